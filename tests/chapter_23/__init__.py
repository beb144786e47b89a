"""Compared with Transformers' attention of seven models (Qwen3, Gemma 2 and 3, OLMo 3, gpt-oss, Qwen3-Next,
DeepSeek-V3), its frequencies and masks, PyTorch's
`F.scaled_dot_product_attention` in float64, and `FlopCounterMode`."""
