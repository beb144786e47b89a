"""Compared with PyTorch's `F.scaled_dot_product_attention` in float64, `torch.autograd.gradcheck`, and
`FlopCounterMode`.
"""
