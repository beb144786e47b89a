"""Compared with Transformers' `Qwen3NextGatedDeltaNet`, its two functions of the gated delta rule, and `F.conv1d`."""
