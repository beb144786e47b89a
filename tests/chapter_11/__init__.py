"""Compared with `torch.finfo`, PyTorch's own casts, `torch.amp.GradScaler` step for step, and `torch.autocast`."""
