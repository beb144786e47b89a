"""Compared with Transformers' Mixtral block, a loop over tokens, PyTorch's grouped product and all-to-all, and the released models' sizes."""
