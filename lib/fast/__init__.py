"""Code for speed, not for teaching: the models' fast paths, fused kernels, FlashAttention for Hopper."""
