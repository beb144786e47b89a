"""The backward pass for wide heads, whose dS goes through memory."""

from typing import Any

import pytest
import torch

from lib.fast.attention import flash, flash_wide
from lib.fast.attention.flash import fast_backward, fast_forward, sizes_of
from lib.fast.attention.flash_wide import CUTS, FEW, SMALL, Cut, WideBackward, stores_wide
from lib.fast.launch import Sizes
from lib.given.kernels.tiles import INTERPRETED

DEVICE, DTYPE, WIDTH = ("cpu", torch.float32, 16) if INTERPRETED else ("cuda", torch.bfloat16, 256)
can_run = pytest.mark.skipif(
    not INTERPRETED and (not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9),
    reason="descriptors need a Hopper GPU, or the interpreter",
)
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
SHAPES = {  # batch, heads, heads of keys, rows, keys, and parts of the width that values have
    "equal": (1, 2, 1, 64, 64, 1),
    "ragged": (2, 2, 2, 70, 70, 1),
    "more keys": (1, 3, 1, 137, 201, 1),
    "narrow values": (1, 2, 1, 70, 70, 2),
}


def exact(q, k, v, do, causal):
    """The gradients in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:])
    scores = leaves[0] @ keys.mT * q.shape[-1] ** -0.5
    if causal:
        t, s = scores.shape[-2:]
        seen = torch.arange(t, device=q.device)[:, None] + s - t >= torch.arange(s, device=q.device)
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.autograd.grad(scores.softmax(-1) @ values, leaves, do.double())


def full_of_nan(shape, **options):
    """``torch.empty``, whose values must not matter."""
    return torch.full((shape,) if isinstance(shape, int) else shape, torch.nan, **options)


@can_run
@pytest.mark.time_limit(60)
@pytest.mark.parametrize(
    ("name", "causal", "apart", "few"),
    [
        ("equal", True, True, 0),
        ("ragged", True, False, 0),
        ("more keys", True, False, 2**15),
        ("more keys", False, True, 2**15),
        ("narrow values", True, True, 0),
        *([("more keys", True, True, 0), ("narrow values", True, True, 2**15)] if not INTERPRETED else []),
    ],
)
def test_dS_through_memory_gives_the_gradients(name, causal, apart, few, monkeypatch):
    b, h, g, t, s, part = SHAPES[name]
    torch.manual_seed(0)
    q, do = (torch.randn(b, h, t, width, device=DEVICE, dtype=DTYPE) for width in (WIDTH, WIDTH // part))
    k, v = (torch.randn(b, g, s, width, device=DEVICE, dtype=DTYPE) for width in (WIDTH, WIDTH // part))
    o, lse = fast_forward(q, k, v, causal)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    monkeypatch.setattr(torch, "empty", full_of_nan)
    monkeypatch.setattr(flash_wide, "APART_ROWS", 2**15 if apart else 0)
    monkeypatch.setattr(flash_wide, "FEW_ROWS", (few, few))
    WideBackward(sizes_of(q, k, causal), not INTERPRETED)(q, k, v, o, do, lse, *grads)
    for found, wanted in zip(grads, exact(q, k, v, do, causal), strict=True):
        far = (found.double() - wanted).norm() / wanted.norm()
        assert far < (1e-5 if INTERPRETED else 1e-2)


def test_dS_is_stored_where_it_pays_and_fits():
    sizes, memory = Sizes(1, 16, 2, 4096, 4096, 256, True), 140 * 2**30
    assert stores_wide(sizes, memory)
    assert stores_wide(sizes._replace(head_dim=192), memory)
    changes: list[dict[str, Any]] = [
        {"head_dim": 128},
        {"t": 256},
        {"n_heads": 1, "t": 2048},
        {"t": 8192},
        {"t": 2**17, "s": 2**17},
    ]
    for change in changes:
        assert not stores_wide(sizes._replace(**change), memory), change
    assert not stores_wide(sizes, 2**31)


def test_every_cut_divides_the_blocks_of_dS():
    for cut in (*CUTS, *FEW, *SMALL):
        assert isinstance(cut, Cut)
        assert (128 % cut.rows, 128 % cut.cols) == (0, 0)


@pytest.mark.gpu
@can_run
@pytest.mark.skipif(INTERPRETED, reason="compiled kernels")
def test_the_backward_pass_takes_it_and_falls_back_where_memory_is_short():
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, n, 2048, 256, device="cuda", dtype=torch.bfloat16) for n in (16, 8, 8, 16))
    o, lse = fast_forward(q, k, v, True)
    backward = flash._plan_backward((q, k, v, o, do), True).launch
    assert isinstance(backward, WideBackward)
    stored = fast_backward(q, k, v, o, do, lse, True)
    backward.ds_shape = (2**45, 1, 1, 1)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    backward(q, k, v, o, do, lse, *grads)
    for found, wanted in zip(stored, grads, strict=True):
        assert (found.float() - wanted.float()).norm() < 1e-2 * wanted.float().norm()


@can_run
@pytest.mark.parametrize("window", [None, 20])
def test_values_narrower_than_keys_are_as_if_zeros_followed(window):
    """As DeepSeek trains: keys 192 wide, values 128."""
    torch.manual_seed(0)
    width, narrow = (16, 8) if INTERPRETED else (192, 128)
    shapes = (1, 2, 40, width), (1, 1, 40, width), (1, 1, 40, narrow), (1, 2, 40, narrow)
    q, k, v, do = (torch.randn(shape, device=DEVICE, dtype=DTYPE) for shape in shapes)
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for values, results in ((v, found), (torch.nn.functional.pad(v, (0, width - narrow)), wanted)):
        leaves = q, k, values = [x.clone().requires_grad_() for x in (q, k, values)]
        o = flash.flash_attention_fast(q, k, values, True, window=window)[..., :narrow]
        results += [o, *torch.autograd.grad(o, leaves, do)]
    assert [x.shape for x in found] == [do.shape, q.shape, k.shape, v.shape]
    for mine, full in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, full[..., : mine.shape[-1]])
