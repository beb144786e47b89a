"""Compared with PyTorch's `DistributedDataParallel` and `DistributedSampler`, and training on one process with the
whole batch.
"""
