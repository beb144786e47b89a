"""Absorbed attention against chapter 23's plain answer."""

import pytest
import torch

from lib.fast.attention import latent
from lib.fast.attention.flash import flash_attention_fast
from lib.fast.attention.latent import latent_attention
from lib.given.kernels.tiles import INTERPRETED
from solutions.attention_variants import grouped_attention, sliding_window_mask

RANK, ROPE = (32, 16) if INTERPRETED else (512, 64)
DEVICE, DTYPE, TOLERANCE = ("cpu", torch.float32, 1e-5) if INTERPRETED else ("cuda", torch.bfloat16, 1e-2)
can_run = pytest.mark.skipif(
    not INTERPRETED and (not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9),
    reason="descriptors need a Hopper GPU, or the interpreter",
)
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
CASES = {  # batch, heads, queries, positions, causal, parts
    "training": (2, 4, 21, 21, True, None),
    "decoding, in parts": (1, 20, 1, 70, True, 4),
    "with a cache, in parts": (2, 3, 5, 40, True, 2),
    "all positions": (1, 16, 3, 33, False, None),
}


def made(b, h, t, s):
    torch.manual_seed(0)
    shapes = (b, h, t, RANK), (b, h, t, ROPE), (b, s, RANK), (b, s, ROPE)
    return [torch.randn(shape, device=DEVICE).to(DTYPE) for shape in shapes]


@can_run
@pytest.mark.parametrize("name", CASES)
def test_absorbed_attention_is_the_plain_one(name):
    b, h, t, s, causal, parts = CASES[name]
    q, turned, latents, keys = made(b, h, t, s)
    found = latent_attention(q, turned, latents, keys, causal, scale=0.3 * RANK**-0.5, n_parts=parts)
    q, turned, latents, keys = (x.double() for x in (q, turned, latents, keys))
    mask = sliding_window_mask(t, s, device=q.device) if causal else torch.ones(t, s, dtype=torch.bool, device=q.device)
    both, every = torch.cat([q, turned], -1), torch.cat([latents, keys], -1)[:, None]
    wanted = grouped_attention(both, every, latents[:, None], mask, 0.3 * RANK**-0.5)
    assert found.dtype == DTYPE
    assert (found.double() - wanted).norm() < TOLERANCE * wanted.norm()


def test_positions_are_split_where_programs_would_be_idle():
    assert latent.n_parts(2, 32_768, 132) == 64
    assert latent.n_parts(100, 32_768, 132) == 1
    assert latent.n_parts(1, 1000, 132) == 4
    assert latent.n_parts(2, 200, 132) == 1


@can_run
def test_what_does_not_fit_is_refused():
    q, turned, latents, keys = made(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"expected \[B, H, T, r\]"):
        latent_attention(q, turned[:, :, :2], latents, keys, scale=1.0)
    with pytest.raises(ValueError, match="no backward pass here"):
        latent_attention(q.requires_grad_(), turned, latents, keys, scale=1.0)
    with pytest.raises(ValueError, match="at most one query a position"):
        latent_attention(q.detach(), turned, latents[:, :2], keys[:, :2], scale=1.0)


def test_the_other_kernels_name_this_one_for_wide_keys():
    x = torch.zeros(1, 1, 4, 576)
    with pytest.raises(ValueError, match=r"keys 576 wide, values 512 wide: .* lib\.fast\.attention\.latent"):
        flash_attention_fast(x, x, x[..., :512])
