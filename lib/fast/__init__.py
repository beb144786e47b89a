"""Speed and no lesson: the models' fast paths, fused kernels, FlashAttention for Hopper."""
