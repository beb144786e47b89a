"""FlashAttention for Hopper GPUs, and what stands around it."""
