"""Compared with PyTorch's `FlopCounterMode`, its profiler, and Transformers' `GPT2LMHeadModel` and
`ViTForImageClassification`.
"""
