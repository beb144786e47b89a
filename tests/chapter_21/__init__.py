"""Compared with Transformers' greedy generation, PyTorch's `FlopCounterMode` and `scaled_dot_product_attention`,
chapter 4's `generate`, and caches of plain lists.
"""
