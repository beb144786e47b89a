"""Compared with PyTorch's `ZeroRedundancyOptimizer`, `fully_shard` and `clip_grad_norm_`, and training on one
process.
"""
