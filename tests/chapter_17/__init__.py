"""Compared with the unsplit model, `torch.utils.checkpoint`, `torch.distributed.pipelining` and PyTorch's layers."""
