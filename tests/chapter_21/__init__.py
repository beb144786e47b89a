"""Compared with Transformers' ``generate``, PyTorch's ``FlopCounterMode`` and attention, a cache of plain lists, and chapter 4's ``generate``."""
