"""Compared with Transformers' `GPT2LMHeadModel`, logits and loss, and PyTorch's `functional.layer_norm` and
`functional.gelu`.
"""
