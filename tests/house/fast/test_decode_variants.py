"""The captured step of chapter 23's Llamas gives the plain way's greedy tokens, with windows, caps and sinks too."""

from typing import Any

import pytest
import torch

import lib.fast.decode as decode
import lib.fast.serving as serving
from lib.fast.attention.paged import Tiles, cut
from lib.fast.attention.paged_variants import variant_attention
from lib.fast.decode_variants import VariantSteps, can_run
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON
from lib.given.models.serving import Request
from lib.given.models.variants import FAMILIES, VariantConfig
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.variants import Routed, VariantLlama
from lib.serving import PagedCache, Scheduler
from tests.house.fast.comparing import PLACES

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
LAYERED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
CASES = {
    "gemma2": LAYERED | {"softcap": 1.5, "logits_softcap": 2.0, "scale": 24**-0.5, "tied": True},
    "gpt_oss": LAYERED | {"n_experts": 3, "top_k": 2},
    "qwen3": {},
    "olmo3": LAYERED,
    "gemma3": LAYERED | {"scale": 24**-0.5, "sliding_rope_theta": 100.0},
}
"""The interpreter runs the first two, which have all that the kernel knows."""
MOST = dict(zip(CASES, (4, 8, 4, 8, 4), strict=True))
"""Tokens of a step that attend row by row: with 8 those of every step do, with 4 the first prompts lie in tiles."""
RUNS = [pytest.param(family, *place.values, marks=place.marks) for place in PLACES for family in CASES
        if place.values != ("cpu",) or family in [*CASES][:2]]  # fmt: skip


def make(family, **more):
    sizes: dict[str, Any] = {
        "vocab_size": 23,
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "hidden_dim": 24,
    }
    torch.manual_seed(0)
    model = VariantLlama(VariantConfig(**sizes, context_len=32, head_dim=16, **FAMILIES[family] | more)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.requires_grad_(False)


def tokens_of(engine, step):
    """Prompts with a common beginning, in chunks and in a pool so small that requests wait and are preempted."""
    prompts = [[3, 1, 4, 1, 5 + i, 9][: 6 - i] for i in range(2)]
    requests = [Request(prompt, 4) for prompt in prompts]
    found: dict[int, list[int]] = {id(request): [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.is_busy:
        for request, token in getattr(engine, step)():
            found[id(request)].append(token)
    return [found[id(request)] for request in requests]


@pytest.mark.time_limit(120)
@pytest.mark.parametrize(("family", "device"), RUNS)
def test_the_captured_step_gives_the_plain_ways_tokens(family, device, monkeypatch):
    model = make(family, **CASES[family]).to(device)
    monkeypatch.setattr(serving.Runner, "is_fast", lambda engine: False)
    expected = tokens_of(PrefixEngine(model, Scheduler(5, 4, 4)), "step")
    assert len({tuple(tokens) for tokens in expected}) == 2
    monkeypatch.setattr(serving.Runner, "is_fast", lambda engine: can_run(engine.model, engine.cache))
    monkeypatch.setattr(serving, "GRAPH_ROWS", MOST[family])
    monkeypatch.setattr(decode, "GRAPH_ROWS", MOST[family])
    monkeypatch.setattr(decode, "TILED_ROWS", (6,))
    engine = PrefixEngine(model, Scheduler(5, 4, 4))
    assert isinstance(engine.steps, VariantSteps)
    assert tokens_of(engine, "step_ahead") == expected


@pytest.mark.parametrize("device", PLACES)
def test_parts_are_merged_and_a_sink_counts_once(device):
    """A long sequence in four parts, of which a window leaves some without a key, and a sequence without a token."""
    torch.manual_seed(0)
    size, n_heads, n_kv_heads, width, lengths = 16, 4, 2, 16, [150, 1, 0]
    q, sinks = torch.randn(3, n_heads, width, device=device), torch.randn(n_heads, device=device)
    keys, values = torch.randn(2, 12, size, n_kv_heads, width, device=device)
    fields = [torch.tensor(x, device=device) for x in cut([n - 1 for n in lengths], [1] * 3, 1)]
    tiles = Tiles(torch.arange(12, device=device).repeat(3, 1), *fields)
    tiles = tiles._replace(position=tiles.position.clamp(min=0), n_queries=torch.tensor([1, 1, 0], device=device))
    for window in (None, 40):
        found = variant_attention(q, keys, values, tiles, window, 2.0, sinks, n_parts=4)
        for i, n in enumerate(lengths):
            k, v = (
                pool.flatten(0, 1)[max(0, n - (window or n)) : n].repeat_interleave(2, 1) for pool in (keys, values)
            )
            scores = 2 * torch.tanh(torch.einsum("hd,shd->hs", q[i], k) * width**-0.5 / 2)
            weights = torch.cat([scores, sinks[:, None]], 1).softmax(1)[:, :-1]
            torch.testing.assert_close(found[i], torch.einsum("hs,shd->hd", weights, v), atol=1e-5, rtol=1e-4)


def test_what_has_a_state_or_another_dtype_stays_on_the_plain_way():
    linear = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    linear |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    hybrid = make("qwen3_next", layer_types=["linear_attention", "full_attention"], **linear)
    for model, dtype in ((hybrid, torch.float32), (make("qwen3"), torch.float16)):
        assert not can_run(model, PagedCache(model.config, 4, 4, dtype=dtype))
    assert can_run(make("qwen3"), PagedCache(make("qwen3").config, 4, 4)) == INTERPRETED


@torch.no_grad()
def test_the_answers_of_all_experts_are_weighed_as_those_of_the_chosen_ones():
    torch.manual_seed(0)
    layer, rows = Routed(6, 8, 5, 2), torch.randn(7, 6)
    for weights in layer.parameters():
        torch.nn.init.normal_(weights)
    scores, chosen = layer.router(rows).topk(2, dim=-1)
    torch.testing.assert_close(layer.by_all(rows, chosen, scores.softmax(-1)), layer(rows))
