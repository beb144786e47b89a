"""Compared with Transformers' `LlamaForCausalLM`, logits and greedy text, and PyTorch's `functional.rms_norm`."""
