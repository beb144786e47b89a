"""Windows, soft caps, sinks and documents in the fast kernels, beside attention with a dense mask in float64."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lib.fast.attention import flash, flash_portable
from lib.fast.attention.flash import flash_attention_fast, variant_forward_operator
from lib.fast.variants import Documents, Variant
from lib.given.kernels.tiles import INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="tensors on the CPU, which compiled kernels cannot read")


def dense_mask(t, s, is_causal, window=None, ids=None):
    """True where a query sees a key: ``[T, S]``, or ``[B, 1, T, S]`` with numbers of documents."""
    ahead = torch.arange(t)[:, None] + s - t - torch.arange(s)  # of the query before the key
    seen = torch.ones(t, s, dtype=torch.bool)
    if is_causal:
        seen &= ahead >= 0
    if window is not None:
        seen &= ahead.abs() < window
    if ids is None:
        return seen
    edges = (ids[..., 1:] != ids[..., :-1]).cumsum(-1)
    runs = torch.nn.functional.pad(edges, (1, 0)).view(-1, t).cpu()
    return seen & (runs[:, None, :, None] == runs[:, None, None, :])


def dense(q, k, v, is_causal, scale=None, window=None, softcap=None, sinks=None, documents=None):
    """The same in float64 with all scores in memory; a row that sees nothing is zero."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = dense_mask(q.shape[-2], k.shape[-2], is_causal, window, documents).to(q.device)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is None:
        sinks = q.new_full((q.shape[-3],), -math.inf)
    column = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1].nan_to_num()
    return weights @ v


def inputs(h, g, t, s, d, seed=0, batch=(2,), device="cpu", dtype=torch.float32):
    """Queries, keys and values that need gradients, and a gradient of the output."""
    random = torch.Generator().manual_seed(seed)
    shapes = (h, t), (g, s), (g, s), (h, t)
    q, k, v, do = (torch.randn(*batch, *shape, d, generator=random).to(device, dtype) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v)], do


def compare(leaves, do, is_causal, **options):
    """Output and gradients, those of the sinks included, against `dense`."""
    sinks = options.get("sinks")
    wanted_of = [*leaves, *([] if sinks is None else [sinks])]
    found, wanted = (
        flash_attention_fast(*leaves, is_causal=is_causal, **options),
        dense(*leaves, is_causal=is_causal, **options),
    )
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
    got = torch.autograd.grad(found, wanted_of, do)
    want = torch.autograd.grad(wanted, wanted_of, do.double())
    for name, a, b in zip("qkvs", got, want, strict=False):
        torch.testing.assert_close(a.double(), b.double(), atol=3e-5, rtol=1e-4, msg=lambda m, n=name: f"d{n}: {m}")


# ---- what a query sees -----------------------------------------------------------------------------------------------


@interpreted
def test_a_window_of_two_by_hand():
    """With equal scores a query's output is the mean of its own value and of the one before."""
    q, v = torch.zeros(1, 4, 16), torch.arange(4.0)[:, None].expand(4, 16)[None]
    found = flash_attention_fast(q, q, v.contiguous(), True, window=2)
    torch.testing.assert_close(found[0, :, 0], torch.tensor([0.0, 0.5, 1.5, 2.5]))


@interpreted
def test_a_sink_of_zero_counts_as_one_more_key_without_a_value():
    q, v = torch.zeros(1, 3, 16), torch.ones(1, 3, 16)
    found = flash_attention_fast(q, q, v, True, sinks=torch.zeros(1))
    torch.testing.assert_close(found[0, :, 0], torch.tensor([1 / 2, 2 / 3, 3 / 4]))


@interpreted
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("t", "s", "window"), [(70, 70, 1), (100, 100, 40), (65, 97, 33), (97, 65, 7), (64, 64, 200)])
def test_a_window(t, s, window, is_causal):
    compare(*inputs(4, 2, t, s, 16, batch=(1,)), is_causal=is_causal, window=window)


@interpreted
@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_before_the_first_key_are_zero_even_where_all_tiles_are_whole(is_causal):
    """256 queries on 128 keys: with no ragged edge, only the window leaves rows empty."""
    compare(*inputs(1, 1, 256, 128, 16, batch=(1,)), is_causal=is_causal, window=20)


@interpreted
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_a_soft_cap(softcap, is_causal):
    leaves, do = inputs(2, 1, 40, 45, 16, batch=(1,))
    compare(leaves, do, is_causal, softcap=softcap, scale=0.7)


@interpreted
@pytest.mark.parametrize("is_causal", [True, False])
def test_sinks_and_their_gradient(is_causal):
    """One sink is far below all scores, one far above."""
    sinks = torch.tensor([0.3, -40.0, 12.0, -math.inf], requires_grad=True)
    compare(*inputs(4, 2, 40, 40, 16), is_causal=is_causal, sinks=sinks)


@interpreted
def test_a_row_without_keys_puts_all_its_weight_on_the_sink():
    sinks = torch.tensor([0.3, -1.0], requires_grad=True)
    compare(*inputs(2, 1, 50, 20, 16, batch=(1,)), is_causal=True, sinks=sinks)


def documents(*lengths: int) -> torch.Tensor:
    return torch.tensor(list(itertools.chain.from_iterable([i] * n for i, n in enumerate(lengths))))


@interpreted
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 9])
def test_documents(window, is_causal):
    """Of one token, of more than a tile, and ending exactly with a tile; the two sequences have different ones."""
    ids = torch.stack([documents(1, 31, 40, 25), documents(80, 16, 1)])
    compare(*inputs(2, 1, 97, 97, 16), is_causal=is_causal, window=window, documents=ids)


@interpreted
def test_documents_that_all_sequences_share():
    compare(*inputs(2, 2, 45, 45, 16), is_causal=True, documents=documents(20, 25))


@interpreted
def test_everything_at_once_and_any_strides():
    """As in a layer of a packed batch, whose heads lie side by side for each token."""
    (q, k, v), do = inputs(4, 2, 70, 70, 16)
    leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    ids = torch.stack([documents(30, 40), documents(70)])
    sinks = torch.randn(4, requires_grad=True)
    compare(leaves, do, True, scale=0.3, window=25, softcap=5.0, sinks=sinks, documents=ids)


@interpreted
def test_more_leading_dimensions_and_fewer():
    (q, k, v), _ = inputs(2, 1, 20, 20, 16, batch=(2, 3))
    found = flash_attention_fast(q, k, v, True, window=5)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    torch.testing.assert_close(found, flash_attention_fast(*flat, True, window=5).unflatten(0, (2, 3)))
    torch.testing.assert_close(found[0, 0], flash_attention_fast(q[0, 0], k[0, 0], v[0, 0], True, window=5))


# ---- what is skipped -------------------------------------------------------------------------------------------------


def tiles_read(monkeypatch, kernel_name, **options) -> int:
    """How many tiles of keys the forward pass reads of 256 tokens, in tiles of 32."""
    read = []
    plain = flash_portable._tile

    def counted(x, *rest, **named):
        read.append(1)
        return plain(x, *rest, **named)

    monkeypatch.setattr(flash_portable, "_tile", counted)
    q = torch.randn(1, 1, 256, 16)
    flash_attention_fast(q, q, q, True, **options)
    monkeypatch.setattr(flash_portable, "_tile", plain)
    return len(read)


@interpreted
def test_tiles_outside_of_the_window_or_the_document_are_not_read(monkeypatch):
    """Eight blocks of 32 queries; each reads itself, and twice (keys and values) every tile that it sees."""
    assert tiles_read(monkeypatch, "forward") == 8 + 2 * sum(range(1, 9))
    assert tiles_read(monkeypatch, "forward", window=33) == 8 + 2 * (1 + 7 * 2)
    assert tiles_read(monkeypatch, "forward", documents=documents(128, 128)) == 8 + 2 * 2 * sum(range(1, 5))


def test_a_run_of_equal_numbers_is_a_document():
    spans = Documents.from_ids(torch.tensor([[5, 5, 2, 2, 2, 5], [0, 0, 0, 0, 0, 0]])).spans
    assert spans.tolist() == [[[0, 0, 2, 2, 2, 5], [1, 1, 4, 4, 4, 5]], [[0] * 6, [5] * 6]]
    by_length = Documents.from_lengths(torch.tensor([0, 2, 5, 6]), 6).spans
    assert by_length.tolist() == spans[:1].tolist()
    after = Documents.from_lengths(torch.tensor([0, 2, 2, 4]), 6).spans  # an empty document, and two tokens after all
    assert after.tolist() == [[[0, 0, 2, 2, 4, 4], [1, 1, 3, 3, 5, 5]]]


def test_only_the_portable_kernels_have_variants(monkeypatch):
    monkeypatch.setattr(flash, "has_roles", lambda x: True)
    q = torch.empty(2, 16, 4096, 128, device="meta")
    assert flash.tiles_for(q, q, True, Variant(scale=0.1)) == flash.tiles_for(q, q, True)
    for variant in (Variant(window=5), Variant(softcap=5.0), Variant(has_sinks=True), Variant(n_documents=1)):
        assert all(isinstance(tiles, flash.Tiles) for tiles in flash.tiles_for(q, q, True, variant))
        assert flash.n_stored_tiles(q.device, flash.sizes_of(q, q, True, variant)) == 0


@interpreted
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("parts", [{"split": True}, {"apart": True}, {"split": True, "apart": True}], ids=str)
def test_dk_and_dv_in_parts_are_the_same(parts, joined, monkeypatch):
    """One kernel for each, or one for each query head."""
    tiles = flash.Tiles(32, 32, 4, 2)
    monkeypatch.setattr(flash, "tiles_for", lambda *given: (tiles, tiles, tiles._replace(**parts)))
    monkeypatch.setattr(flash, "_plans", {})
    if not joined:
        compare(*inputs(4, 2, 40, 40, 16), is_causal=True, window=20)
        compare(*inputs(4, 2, 40, 40, 16), is_causal=False)
        return
    x, do = torch.randn(2, 33, 8, 16, requires_grad=True), torch.randn(2, 33, 4, 16)
    for _ in range(2):  # the second time with addresses, where the parts allow it
        q, k, v = flash.split_joined(x.detach().double(), 4)
        leaves = [y.requires_grad_() for y in (q, k, v)]
        want = torch.autograd.grad(dense(*leaves, is_causal=True), leaves, do.transpose(1, 2).double())
        (got,) = torch.autograd.grad(flash.flash_attention_joined(x, 4, True), x, do)
        torch.testing.assert_close(got.double(), torch.cat(want, 1).transpose(1, 2), atol=3e-5, rtol=1e-4)


# ---- errors ----------------------------------------------------------------------------------------------------------


WRONG: dict[str, dict[str, Any]] = {
    "window = 0": {"window": 0},
    "window = 2.5": {"window": 2.5},
    "softcap = 0": {"softcap": 0},
    "softcap = nan": {"softcap": math.nan},
    "scale = inf": {"scale": math.inf},
    r"sinks \(2,\)": {"sinks": torch.zeros(2)},
    r"sinks \(3,\) of torch.int64": {"sinks": torch.zeros(3, dtype=torch.long)},
    r"documents with spans \(2, 2, 9\)": {"documents": torch.zeros(2, 9, dtype=torch.long)},
    r"documents with spans \(1, 2, 8\)": {"documents": torch.zeros(8, dtype=torch.long)},
    r"documents \(1, 1, 9\)": {"documents": torch.zeros(1, 1, 9, dtype=torch.long)},
    "of torch.float32: expected integers": {"documents": torch.zeros(9)},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_makes_no_sense_is_refused_by_name(message):
    q = torch.zeros(3, 9, 16)
    with pytest.raises(ValueError, match=message):
        flash_attention_fast(q, q, q, **WRONG[message])


def test_documents_need_as_many_keys_as_queries():
    q, k = torch.zeros(1, 9, 16), torch.zeros(1, 10, 16)
    with pytest.raises(ValueError, match="9 queries and 10 keys"):
        flash_attention_fast(q, k, k, documents=torch.zeros(9, dtype=torch.long))


# ---- as PyTorch and its compiler see it ------------------------------------------------------------------------------


@interpreted
@pytest.mark.time_limit(120)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_the_operator_passes_pytorchs_own_check_and_gives_the_same_compiled():
    leaves, do = inputs(2, 1, 33, 33, 16)
    sinks, spans = torch.randn(2, requires_grad=True), Documents.from_ids(documents(20, 13)).spans
    torch.library.opcheck(variant_forward_operator, (*leaves, sinks, spans, True, None, 9, 5.0))
    torch.library.opcheck(variant_forward_operator, (*leaves, None, None, True, 0.3, None, None))

    def attend(q, k, v, sinks):
        return flash_attention_fast(q, k, v, True, window=9, sinks=sinks, documents=documents(20, 13))

    found = [
        torch.autograd.grad(f(*leaves, sinks=sinks), [*leaves, sinks], do)
        for f in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True))
    ]
    torch.testing.assert_close(*found)


@interpreted
def test_a_second_derivative_is_refused():
    (q, k, v), _ = inputs(1, 1, 8, 8, 16)
    (dq,) = torch.autograd.grad(flash_attention_fast(q, k, v, True, window=3).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        dq.sum().backward()


# ---- compiled --------------------------------------------------------------------------------------------------------


def on_gpu() -> Iterator[tuple[str, dict]]:
    """Names and arguments of what a GPU compares."""
    yield "window", {"window": 100}
    yield "soft cap", {"softcap": 20.0}
    yield "sinks", {"sinks": True}
    yield "documents", {"documents": documents(300, 1, 83, 128)}
    yield "all", {"window": 64, "softcap": 30.0, "sinks": True, "documents": documents(200, 312), "scale": 0.2}


@pytest.mark.gpu
@pytest.mark.time_limit(240)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize(("name", "options"), on_gpu(), ids=lambda x: x if isinstance(x, str) else "")
def test_on_a_gpu_every_variant_is_as_exact_as_16_bits_allow(name, options, width, is_causal):
    """Two per cent of the norm: a rounding to bfloat16 costs 0.2 to 0.4 per cent, and a gradient is made of several."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("a Hopper GPU")
    leaves, do = inputs(4, 2, 512, 512, width, device="cuda", dtype=torch.bfloat16)
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.randn(4, device="cuda", requires_grad=True)
    if "documents" in options:
        options["documents"] = options["documents"].cuda()
    of = [*leaves, *([options["sinks"]] if "sinks" in options else [])]
    wanted, found = (
        dense(*leaves, is_causal=is_causal, **options),
        flash_attention_fast(*leaves, is_causal=is_causal, **options),
    )
    want, got = torch.autograd.grad(wanted, of, do.double()), torch.autograd.grad(found, of, do)
    for part, a, b in zip(("o", "dq", "dk", "dv", "dsinks"), (found, *got), (wanted, *want), strict=False):
        assert (a.double() - b).norm() <= 0.02 * b.double().norm(), (name, part)
