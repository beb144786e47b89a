"""Compared with PyTorch's whole layers and their gradients, `parallelize_module`, and JAX's
`with_sharding_constraint`.
"""
