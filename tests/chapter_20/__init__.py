"""Compared with PyTorch's casts and ``torch._scaled_mm``, torchao's float8 casts, its float8 linear layer, its MX
format and its groups of four bits, and GPTQ's sum of squares solved afresh for each column.
"""
