"""Compared with PyTorch's attention and layers over the whole sequence, and
`torch.distributed.tensor.experimental.context_parallel`.
"""
