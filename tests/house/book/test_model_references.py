"""Edges of the models' references that no contract names and no learner needs to meet."""

import pytest
import torch

from lib.given.models.llama import LLAMA_2_7B, LLAMA_2_13B, LLAMA_2_70B, TINY, LlamaConfig
from solutions.llama import swiglu_hidden_dim
from solutions.rope import apply_rope, precompute_rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_apply_rope_takes_a_slice_that_begins_anywhere(dtype, start):
    wide = torch.randn(2, 3, 1, 17, generator=torch.Generator().manual_seed(0)).to(dtype)
    one = torch.randn(1, 1, 1, 17, generator=torch.Generator().manual_seed(1)).to(dtype)  # its slices are contiguous
    for x in (wide[..., start : start + 8], one[..., start : start + 8]):
        table = precompute_rope(8, x.shape[1])
        assert torch.equal(apply_rope(x, table), apply_rope(x.clone(), table))


@pytest.mark.parametrize("preset", [LLAMA_2_7B, LLAMA_2_13B, LLAMA_2_70B, TINY], ids=["7B", "13B", "70B", "tiny"])
def test_the_default_width_of_a_config_is_the_presets(preset):
    sizes = {
        name: getattr(preset, name) for name in ("dim", "n_layers", "n_heads", "multiple_of", "ffn_dim_multiplier")
    }
    assert LlamaConfig(**sizes).hidden_dim == preset.hidden_dim


def test_the_default_width_of_a_config_is_the_one_that_chapter_4_asks_for():
    for dim in (2, 10, 36, 100, 5120):
        for multiple_of in (1, 7, 256):
            for multiplier in (0.5, 1.0, 1.3):
                config = LlamaConfig(
                    dim=dim, n_layers=1, n_heads=1, multiple_of=multiple_of, ffn_dim_multiplier=multiplier
                )
                assert config.hidden_dim == swiglu_hidden_dim(dim, multiple_of, multiplier)
