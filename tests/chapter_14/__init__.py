"""Compared with PyTorch's operators in float64, `F.rms_norm` among them, with gradients from `torch.autograd.grad`."""
