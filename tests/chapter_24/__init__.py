"""Compared with Transformers' `torch_recurrent_gated_delta_rule`, `torch_chunk_gated_delta_rule` and `Qwen3NextGatedDeltaNet`, and with `F.conv1d`."""
