"""Compared with Transformers' Mixtral and DeepSeek-V2 layers, its routers of Qwen3-MoE and NLLB-MoE and its losses of
Mixtral and Switch, a loop over tokens, PyTorch's grouped product and all-to-all, and the released models' sizes.
"""
