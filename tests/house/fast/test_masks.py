"""Transformers' masks in the fast kernels: what a mask says, and models that need more than a causal one."""

from typing import Any

import pytest
import torch

from lib.fast import interface
from lib.fast.attention.flash import flash_attention_fast
from lib.fast.masks import Band, BandMask, band_of, with_padding
from lib.fast.variants import FAR
from lib.given.kernels.tiles import INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="tensors on the CPU, which compiled kernels cannot read")
transformers = pytest.importorskip("transformers", reason="Transformers, whose masks these are")
masking = pytest.importorskip("transformers.masking_utils")
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 0]])


def matrix(band, t):
    """The matrix that a band stands for."""
    ahead = torch.arange(t)[:, None] - torch.arange(t)
    seen = (ahead <= band.before) & (-ahead <= band.after)
    return seen[None, None] if band.ids is None else seen & (band.ids[:, None, :, None] == band.ids[:, None, None, :])


FUNCTIONS = {
    "causal": (masking.causal_mask_function, (FAR, 0)),
    "all": (masking.bidirectional_mask_function, (FAR, FAR)),
    "window": (masking.sliding_window_causal_mask_function(3), (2, 0)),
    "window on both sides": (masking.sliding_window_bidirectional_mask_function(3), (3, 3)),
    "packed": (masking.packed_sequence_compatibility_function(masking.causal_mask_function, POSITIONS, IDS), (FAR, 0)),
    "packed window": (
        masking.packed_sequence_compatibility_function(masking.sliding_window_causal_mask_function(2), POSITIONS, IDS),
        (1, 0),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_band_says_what_the_function_says(name):
    function, reach = FUNCTIONS[name]
    band = band_of(function)
    assert band[:2] == reach
    assert band.has_shape
    wanted = masking.sdpa_mask(2, 8, 8, mask_function=function, allow_is_causal_skip=False)
    torch.testing.assert_close(matrix(band, 8).expand(2, 1, 8, 8), wanted)


def test_what_is_not_known_is_no_band():
    causal = masking.causal_mask_function
    assert band_of(masking.or_masks(causal, masking.sliding_window_overlay(3))) is None
    assert band_of(masking.and_masks(causal, lambda b, h, q, k: q == k)) is None
    assert band_of(masking.chunked_causal_mask_function(4, torch.zeros(2))) is None
    assert not band_of(masking.sliding_window_overlay(3)).has_shape  # every later key, but few earlier ones


def test_padding_is_a_document_unless_it_lies_between_tokens():
    left, between = torch.tensor([[False, True, True], [True] * 3]), torch.tensor([[True, False, True]])
    assert with_padding(Band(after=0), left).ids.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert with_padding(Band(after=0), between) is None
    assert with_padding(Band(after=0, ids=IDS[:, :3]), left) is None


def test_a_mask_is_a_matrix_for_whoever_looks_at_it():
    made = []

    def make():
        made.append(1)
        return torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()

    mask = BandMask((1, 1, 4, 4), "cpu", Band(after=0), make)
    assert (mask.shape, mask.dtype, made) == ((1, 1, 4, 4), torch.bool, [])
    assert "before" in repr(mask)
    assert mask[..., -1:, :].tolist() == [[[[True] * 4]]]
    assert (mask.sum(), torch.cat([mask, mask], -1).shape, made) == (10, (1, 1, 4, 8), [1])
    assert type(mask[0]) is torch.Tensor


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 7},
    "Gemma2": {"sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9, "layer_types": LAYERS},
    "GptOss": {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": LAYERS},
    "Llama": {},
}


def run(name, implementation, tokens, **inputs):
    """Logits, and gradients of the embedding and of sinks."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name], attn_implementation=implementation)
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    logits = model(tokens, use_cache=False, **inputs).logits
    seen = logits if "attention_mask" not in inputs else logits[inputs["attention_mask"].bool()]
    seen.square().mean().backward()
    wanted = ("embed_tokens", "sinks", "q_proj.weight")
    return seen.detach(), {n: p.grad for n, p in model.named_parameters() if any(w in n for w in wanted)}


def called(monkeypatch, always=True):
    """The options of each call of the kernels; every shape fits them if ``always``."""
    calls = []

    def counted(*args, **options):
        calls.append({name: x for name, x in options.items() if x is not None})
        return flash_attention_fast(*args, **options)

    interface.register()
    monkeypatch.setattr(interface, "flash_attention_fast", counted)
    if always:
        monkeypatch.setattr(interface, "fits_fast", lambda *args: True)
    return calls


def tokens_of(*shape):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(2))


def same(found, wanted):
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-3)


@interpreted
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("always", [True, False], ids=["our kernels", "PyTorch"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Mistral", [{"window"}, {"window"}]),
        ("Gemma2", [{"window", "softcap", "scale"}, {"softcap", "scale"}]),
        ("GptOss", [{"window", "sinks"}, {"sinks"}]),
    ],
)
def test_models_with_more_than_a_causal_mask_have_the_same_logits_and_gradients(name, options, always, monkeypatch):
    calls, tokens = called(monkeypatch, always), tokens_of(2, 20)
    same(run(name, "workbook", tokens), run(name, "eager", tokens))
    assert [set(call) for call in calls] == (options if always else [])


@interpreted
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_packed_documents_do_not_see_each_other(name, monkeypatch):
    calls, tokens = called(monkeypatch), tokens_of(1, 20)
    positions = torch.cat([torch.arange(n) for n in (3, 12, 5)])[None]
    same(run(name, "workbook", tokens, position_ids=positions), run(name, "eager", tokens, position_ids=positions))
    assert [set(call) >= {"documents"} for call in calls] == [True, True]


@interpreted
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_the_real_tokens(side, monkeypatch):
    calls, tokens, mask = called(monkeypatch), tokens_of(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, slice(0, 6) if side == "left" else slice(14, 20)] = 0
    same(run("Mistral", "workbook", tokens, attention_mask=mask), run("Mistral", "eager", tokens, attention_mask=mask))
    assert [set(call) for call in calls] == [{"window", "documents"}] * 2


@interpreted
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "GptOss"])
def test_new_tokens_one_at_a_time_are_the_same_tokens(name, monkeypatch):
    """A prompt longer than the window goes through the kernels, and each new token through PyTorch."""
    calls, found = called(monkeypatch), []
    for implementation in ("workbook", "eager"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name], attn_implementation=implementation)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found.append(model.generate(tokens_of(1, 12), **options))
    assert torch.equal(*found)
    assert len(calls) == 2
