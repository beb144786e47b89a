"""The kernels with roles for their warps: what they compile to, and, on a Hopper GPU, what they compute."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lib.fast import launch
from lib.fast.attention import flash as flash_fast
from lib.fast.attention import flash_stored
from lib.fast.attention.flash import RAGGED as SHORT_RAGGED
from lib.fast.attention.flash import (
    ROLES_TABLE,
    SHORT,
    TABLE,
    WIDE,
    Tiles,
    fast_backward,
    fast_dkdv,
    fast_dq,
    fast_forward,
    fits_fast,
    flash_attention_fast,
    flash_attention_joined,
    is_quickest,
    sizes_of,
    split_joined,
    tiles_for,
)
from lib.fast.attention.flash_hopper import Roles
from lib.fast.attention.flash_items import TILE_BYTES, deal, n_part_tiles
from lib.fast.attention.flash_stored import StoredBackward
from lib.fast.gluon import KNOWN, has_roles
from lib.fast.launch import VERSION, Sizes, n_programs
from lib.given.kernels.tiles import INTERPRETED

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # autograd's thread says so once
needs_roles = pytest.mark.skipif(
    not has_roles(torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")),
    reason="warps have roles on a GPU of compute capability 9.0, with a Triton that is proven",
)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="tensors on the CPU, which compiled kernels cannot read")
CUTS = {  # beside those of the table
    ("forward", 64): [Roles(2, 128, 2, heads_first=True, early=True, registers=True)],
    ("forward", 128): [Roles(3, 64, 3, heads_first=True, early=True)],
    ("dQ", 64): [Roles(3, 64, 3, heads_first=True), Roles(3, 64, 3, registers=True)],
    ("dQ", 128): [Roles(3, 64, 2, heads_first=True)],
    ("dK/dV", 64): [Roles(2, 64, 2)],
    ("dK/dV", 128): [],
}
SHAPES = {  # batch, heads, heads of keys, rows, keys
    "equal": (1, 4, 2, 1024, 1024),
    "rows for one user, one head each": (2, 2, 2, 256, 256),
    "more keys": (1, 4, 2, 128, 512),
    "three heads share": (1, 3, 1, 384, 640),
}


@pytest.mark.skipif(VERSION not in KNOWN, reason="Gluon's names change: these kernels are for Triton 3.6 to 3.9")
@pytest.mark.time_limit(240)
@pytest.mark.parametrize("forms", ["one", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_the_kernels_compile_for_hopper_and_their_products_run_ahead(forms, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.house.fast.hopper_program", *(["--all"] if forms == "all" else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    of_levels = [kernels.pop(name) for name in list(kernels) if name.startswith("levels")]
    assert len(of_levels) == (2 if forms == "all" else 1)
    assert all(counts["LDL"] == 0 < counts["HMMA"] for counts in of_levels), of_levels
    roles = {"forward", "dQ", "dK/dV", "stored", "wide", "rows", "matrices", "GELU", "slope", "loss"}
    assert {name.split(",")[0] for name in kernels} == roles
    for name, counts in kernels.items():
        assert counts["USETMAXREG"] > 0, f"{name}: no warp gives registers to another"
        # Where the assembler lets products run one after the other, each has a fence of its own.
        assert counts["WARPGROUP.ARRIVE"] <= counts["HGMMA"] / 2, (name, counts)
        assert counts["LDL"] < counts["HGMMA"], f"{name}: registers are spilled to memory: {counts}"
    assert kernels["slope"]["STS "] == 0, "its warps exchange their sums through shared memory"


def test_roles_are_for_hopper_gpus_and_enough_rows(monkeypatch):
    q = torch.empty(2, 16, 4096, 64, device="meta")
    assert not has_roles(q)
    assert tiles_for(q, q, True) == TABLE[64, True]
    assert all(isinstance(tiles, Tiles) for row in TABLE.values() for tiles in row)
    monkeypatch.setattr(flash_fast, "has_roles", lambda x: True)
    assert tiles_for(q, q, True) == ROLES_TABLE[64, True]
    assert tiles_for(q[:1, :1], q[:1, :1], True) == TABLE[64, True]
    shared = tiles_for(q, q[:, :1], True)  # dK/dV has a program for keys, and these are few
    assert shared == (*ROLES_TABLE[64, True][:2], TABLE[64, True][2])


@pytest.mark.parametrize(
    ("length", "width", "causal", "expected"),
    [
        (1024, 64, True, (*SHORT[64, True][:2], ROLES_TABLE[64, True][2])),
        (1025, 64, True, ROLES_TABLE[64, True]),
        (256, 64, False, (TABLE[64, False][0], *ROLES_TABLE[64, False][1:])),
        (197, 64, False, SHORT_RAGGED[64]),
        (257, 80, False, SHORT_RAGGED[128]),
        (600, 64, False, (TABLE[64, False][0], *ROLES_TABLE[64, False][1:])),
        (257, 128, True, ROLES_TABLE[128, True]),
    ],
    ids=str,
)
def test_short_sequences_have_tiles_of_their_own(length, width, causal, expected, monkeypatch):
    q = torch.empty(64, 16, length, width, device="meta")
    if INTERPRETED:
        monkeypatch.setattr(launch, "INTERPRETED", False)
        monkeypatch.setattr(flash_fast, "INTERPRETED", False)
    monkeypatch.setattr(flash_fast, "has_roles", lambda x: True)
    assert tiles_for(q, q, causal) == expected


def test_a_constant_is_marked_as_pytorch_marks_it():
    def marked(mark):
        return vars(mark(lambda: 0))

    assert marked(launch.constant_when_compiled) == marked(torch.compiler.assume_constant_result)
    assert marked(launch.constant_when_compiled)


def test_the_quickest_kernels_are_ours_where_they_were_measured(monkeypatch):
    monkeypatch.setattr(flash_fast, "fits_fast", lambda *given: True)

    @torch.compile(fullgraph=True, backend="eager", dynamic=False)
    def takes_ours(q, k, causal):
        return q + 1 if is_quickest(q, k, k, causal) else q

    def asks(t, s, width, causal):
        q, k = torch.zeros(2, 4, t, width), torch.zeros(2, 4, s, width)
        assert takes_ours(q, k, causal).any() == is_quickest(q, k, k, causal)
        return is_quickest(q, k, k, causal)

    assert asks(1024, 1024, 64, True)
    assert asks(197, 197, 64, False)
    assert asks(257, 257, 80, False)
    assert asks(256, 256, 64, False)
    assert not asks(256, 256, 80, False)
    assert not asks(600, 600, 64, False)
    assert not asks(1, 197, 64, False)
    assert not asks(257, 257, 128, False)
    assert not is_quickest(torch.zeros(2, 4, 8, 64), torch.zeros(2, 2, 8, 64), torch.zeros(2, 2, 8, 64), True)


@pytest.mark.parametrize(
    ("heads", "groups", "queries", "keys", "width", "ours"),
    [
        (16, 16, 2048, 2048, 64, True),
        (64, 16, 2048, 2048, 64, True),
        (64, 15, 2048, 2048, 64, False),  # too few keys
        (64, 16, 511, 2048, 64, False),  # too few queries
        (64, 16, 2048, 2048, 72, False),  # dS goes through memory at such a width, but not on this device
    ],
)
def test_at_width_64_many_queries_and_keys_are_ours_even_if_heads_share_them(
    heads, groups, queries, keys, width, ours, monkeypatch
):
    monkeypatch.setattr(flash_fast, "fits_fast", lambda *given: True)
    q = torch.empty(1, heads, queries, width, device="meta")
    k = torch.empty(1, groups, keys, width, device="meta")
    assert is_quickest(q, k, k, is_causal=False) == ours


@pytest.mark.parametrize(
    ("shape", "causal", "stores"),
    [
        ((2, 32, 32, 4096, 128), True, True),
        ((2, 32, 32, 2048, 128), False, True),
        ((1, 32, 8, 2048, 128), True, True),
        ((1, 16, 8, 2048, 128), True, False),
        ((8, 16, 16, 512, 128), True, True),
        ((9, 16, 16, 511, 128), True, False),
        ((2, 16, 16, 4096, 96), True, True),
        ((1, 8, 8, 65_536, 128), True, True),
        ((1, 8, 8, 131_072, 128), True, False),
        ((2, 32, 32, 4096, 64), True, False),
        ((2, 32, 32, 4096, 256), True, False),
    ],
    ids=str,
)
def test_dS_goes_through_memory_where_that_was_measured_to_pay(shape, causal, stores, monkeypatch):
    batch, heads, groups, length, width = shape
    q, k = (torch.empty(batch, n, length, width, device="meta") for n in (heads, groups))
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert flash_fast.n_stored_tiles(q.device, sizes_of(q, k, causal)) == 0  # such kernels do not run there
    monkeypatch.setattr(flash_fast, "_most_bytes_stored", lambda device: 80 * 10**9 // 8)
    assert (flash_fast.n_stored_tiles(q.device, sizes_of(q, k, causal)) > 0) == stores
    monkeypatch.setattr(flash_fast, "fits_fast", lambda *given: True)
    assert is_quickest(q, k, k, causal) == (stores or (width == 64 and causal))


def test_dS_stays_out_of_memory_where_collectives_share_the_gpu(monkeypatch):
    monkeypatch.setattr(flash_fast, "INTERPRETED", False)
    monkeypatch.setattr(flash_fast, "has_roles", lambda x: True)
    monkeypatch.setattr(torch, "empty", lambda *shape, device: None)
    properties = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cuda")
    assert flash_fast._most_bytes_stored(device) == 10**10
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for n_ranks in (1, 2):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda n=n_ranks: n)
        assert (flash_fast._most_bytes_stored(device) > 0) == (n_ranks == 1)


@interpreted
def test_gradients_of_a_joined_projection_have_launches_of_their_own(monkeypatch):
    x = torch.randn(1, 32, 6, 16)
    o, lse = flash_fast.joined_forward_operator(x, None, 2, True)
    do = torch.randn_like(o)
    used = []
    monkeypatch.setattr(flash_fast, "_plans", {})
    call = flash_fast.TwoPasses.__call__
    monkeypatch.setattr(flash_fast.TwoPasses, "__call__", lambda self, *xs: (used.append(id(self)), call(self, *xs)))
    joined, _ = flash_fast.joined_backward_operator(x, o, do, lse, 2, True, False)
    apart = fast_backward(*split_joined(x, 2), o.transpose(1, 2), do.transpose(1, 2), lse, True)
    for one, other in zip(split_joined(joined, 2), apart, strict=True):
        torch.testing.assert_close(one, other)
    assert len(set(used)) == 2  # a launch keeps the strides of the gradients that it was first called with


def test_more_heads_than_a_grid_may_count_go_elsewhere(monkeypatch):
    monkeypatch.setattr(flash_fast, "INTERPRETED", False)
    monkeypatch.setattr(flash_fast, "_has_copy_engine", lambda device: True)
    for n_batches, fits in ((2**12 - 1, True), (2**12, False)):
        with FakeTensorMode():
            q = torch.empty(n_batches, 16, 32, 64, dtype=torch.bfloat16, device="cuda")
        assert fits_fast(q, q, q, True) == fits


class FakeKernel:
    """Counts how often it is compiled, and how often what was compiled is launched."""

    def __init__(self):
        self.compiled = self.launched = 0

    def __getitem__(self, grid):
        def compile_and_launch(*args, **options):
            self.compiled += 1
            return Launchable(self)

        return compile_and_launch


class Launchable:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        assert len(grid) == 3

        def run(*args):
            self.kernel.launched += 1

        return run


@pytest.mark.parametrize("kernel", ["forward", "dQ", "dK/dV"])
def test_what_another_kernel_is_compiled_for_is_compiled_again_and_nothing_else(kernel, monkeypatch):
    fake = FakeKernel()
    names = {"forward": "fast_forward_kernel", "dQ": "fast_dq_kernel", "dK/dV": "fast_dkdv_kernel"}
    monkeypatch.setattr(flash_fast, names[kernel], fake)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "DIRECT", ())
    monkeypatch.setattr(flash_fast, "_plans", {})

    def run(heads=2, length=128, width=64, dtype=torch.float16, causal=True, rows=64, turned=False):
        q, k = torch.empty(1, 2, length, width, dtype=dtype), torch.empty(1, heads, length, width, dtype=dtype)
        if turned:  # the same sizes in another layout
            q = torch.empty(1, length, 2, width, dtype=dtype).transpose(1, 2)
        lse, stats, tiles = torch.empty(1, 2, length), torch.empty(2, 2 * length), Tiles(rows, 64, 4, 2)
        if kernel == "forward":
            fast_forward(q, k, k, causal, tiles)
        elif kernel == "dQ":
            fast_dq(q, k, k, q, q, lse, causal, tiles)
        else:
            fast_dkdv(q, k, k, q, stats, causal, tiles)

    run()
    run()
    assert (fake.compiled, fake.launched) == (1, 1)
    others: list[dict[str, Any]] = [
        {"heads": 1},
        {"width": 128},
        {"dtype": torch.bfloat16},
        {"causal": False},
        {"rows": 128},
        {"turned": True},
    ]
    for n, other in enumerate([*others, {"length": 256}]):
        run(**other)
        run(**other)
        assert (fake.compiled, fake.launched) == (n + 2, n + 2), other


@interpreted
def test_a_second_derivative_is_refused():
    q = torch.randn(1, 32, 32, requires_grad=True)
    for as_one_sum in (False, True):
        o = flash_attention_fast(q, q.detach(), q.detach(), True)
        (grad,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(grad.square().sum() + (q.sum() if as_one_sum else 0), q)


@interpreted
@pytest.mark.time_limit(60)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_what_is_compiled_takes_the_operators():
    q = torch.randn(1, 32, 32, requires_grad=True)
    plain = flash_attention_fast(q, q, q, True)
    compiled = torch.compile(flash_attention_fast, backend="aot_eager", fullgraph=True)(q, q, q, True)
    torch.testing.assert_close(compiled, plain)
    grads = [torch.autograd.grad(o.square().sum(), q)[0] for o in (plain, compiled)]
    torch.testing.assert_close(*grads)


def test_fake_tensors_get_shapes_and_no_kernel():
    with FakeTensorMode():
        q = torch.empty(2, 4, 128, 64, dtype=torch.float16, requires_grad=True)
        k, v = (torch.empty(2, 2, 256, 64, dtype=torch.float16, requires_grad=True) for _ in range(2))
        o = flash_attention_fast(q, k, v, True)
        o.sum().backward()
    assert [x.shape for x in (o, q.grad, k.grad)] == [q.shape, q.shape, k.shape]


def given_at(shape, width, causal, dtype, device="cuda"):
    batch, heads, kv_heads, t, s = shape
    torch.manual_seed(0)
    q, do = (torch.randn(batch, heads, t, width, device=device).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, s, width, device=device).to(dtype) for _ in range(2))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wide = [leaves[0], *(x.repeat_interleave(heads // kv_heads, 1) for x in leaves[1:])]
    scores = wide[0] @ wide[1].mT * width**-0.5
    hidden = (
        torch.ones(t, s, dtype=torch.bool, device=device).triu(1 + s - t) if causal else scores.new_zeros(t, s).bool()
    )
    empty = hidden.all(-1, keepdim=True)  # rows without keys
    o = scores.masked_fill(hidden & ~empty, -torch.inf).softmax(-1).masked_fill(empty, 0.0) @ wide[2]
    exact = {"o": o.detach(), "lse": scores.masked_fill(hidden, -torch.inf).logsumexp(-1).detach()}
    return (q, k, v, do), exact | dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do.double()), strict=True)
    )


def gap(found, exact):
    return (found.double() - exact).square().mean().sqrt().item()


@pytest.mark.gpu
@needs_roles
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [64, 128])
def test_they_are_as_exact_as_tritons_kernels_and_give_the_same_bits_again(width, causal, dtype):
    for name, shape in SHAPES.items():
        (q, k, v, do), exact = given_at(shape, width, causal, dtype)
        assert fits_fast(q, k, v, causal)
        for_forward, for_dq, for_dkdv = TABLE[width, causal]
        o, lse = fast_forward(q, k, v, causal, for_forward)
        dq, stats = fast_dq(q, k, v, o, do, lse, causal, for_dq)
        dk, dv = fast_dkdv(q, k, v, do, stats, causal, for_dkdv)
        for cut in (ROLES_TABLE[width, causal][0], *CUTS["forward", width]):
            found, its_lse = fast_forward(q, k, v, causal, cut)
            assert gap(found, exact["o"]) <= 1.1 * gap(o, exact["o"]), (name, cut)
            assert (its_lse - exact["lse"]).abs().max() < 1e-3, (name, cut)
            assert torch.equal(found, fast_forward(q, k, v, causal, cut)[0]), (name, cut)
        for cut in (ROLES_TABLE[width, causal][1], *CUTS["dQ", width]):
            found, its_stats = fast_dq(q, k, v, o, do, lse, causal, cut)
            assert gap(found, exact["dq"]) <= 1.1 * gap(dq, exact["dq"]), (name, cut)
            torch.testing.assert_close(its_stats, stats, atol=1e-4, rtol=1e-5)
            assert torch.equal(found, fast_dq(q, k, v, o, do, lse, causal, cut)[0]), (name, cut)
        for cut in (ROLES_TABLE[width, causal][2], *CUTS["dK/dV", width]):
            both = fast_dkdv(q, k, v, do, stats, causal, cut)
            for x, old, key in zip(both, (dk, dv), ("dk", "dv"), strict=True):
                assert gap(x, exact[key]) <= 1.1 * gap(old, exact[key]), (name, cut, key)
            again = fast_dkdv(q, k, v, do, stats, causal, cut)
            assert all(torch.equal(a, b) for a, b in zip(both, again, strict=True)), (name, cut)


RAGGED = [(2, 4, 2, 197, 197), (1, 2, 2, 257, 257), (1, 2, 1, 1000, 1000), (1, 2, 2, 1, 1), (2, 2, 2, 1, 300)]
RAGGED += [(1, 2, 2, 300, 1), (1, 2, 1, 100, 333), (1, 2, 2, 500, 130), (1, 2, 2, 256, 256)]


@interpreted
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 2, 2, 197, 197), (1, 3, 1, 2, 100), (1, 2, 1, 31, 95), (1, 1, 1, 70, 33)], ids=str
)
def test_the_tiles_of_short_sequences_are_right_at_any_length(shape, causal):
    tables: list[Any] = list(SHORT_RAGGED.values())
    if causal:
        tables = [tuple(a or b for a, b in zip(SHORT[64, True], TABLE[64, True], strict=True))]
    (q, k, v, do), exact = given_at(shape, 16, causal, torch.float32, "cpu")
    for for_forward, for_dq, for_dkdv in tables:
        o, lse = fast_forward(q, k, v, causal, for_forward)
        dq, stats = fast_dq(q, k, v, o, do, lse, causal, for_dq)
        dk, dv = fast_dkdv(q, k, v, do, stats, causal, for_dkdv)
        for name, found in {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items():
            torch.testing.assert_close(found.double(), exact[name], rtol=1e-5, atol=1e-5)


def laid_out(x, layout):
    """The same numbers, with rows of one token side by side or as a slice of a larger tensor."""
    if layout == "heads first":
        return x
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((*x.shape[:2], x.shape[2], 3 * x.shape[3]), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., x.shape[3] : 2 * x.shape[3]] = x
    return wide[..., x.shape[3] : 2 * x.shape[3]]


@pytest.mark.gpu
@needs_roles
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_any_length_and_any_strides_without_a_copy(width, causal, monkeypatch):
    of = 64 if width == 64 else 128
    tables: list[Any] = [table[of, causal] for table in (TABLE, ROLES_TABLE)] if width <= 128 else [WIDE]
    if width <= 128 and (of, causal) in SHORT:
        tables.append(tuple(a or b for a, b in zip(SHORT[of, causal], TABLE[of, causal], strict=True)))
    if not causal and width <= 128:
        tables.append(SHORT_RAGGED[of])
    for shape in RAGGED:
        given, exact = given_at(shape, width, causal, torch.bfloat16)
        for layout in ("heads first", "tokens first", "a slice"):
            q, k, v, do = (laid_out(x, layout) for x in given)
            for tiles in tables:
                monkeypatch.setattr(flash_fast, "tiles_for", lambda *args, tiles=tiles: tiles)
                monkeypatch.setattr(flash_fast, "_plans", {})
                o, lse = fast_forward(q, k, v, causal)
                found = dict(
                    zip(("o", "dq", "dk", "dv"), (o, *fast_backward(q, k, v, o, do, lse, causal)), strict=True)
                )
                assert not any(plan.copied for plan in flash_fast._plans.values()), (shape, layout)
                seen = exact["lse"].isfinite()
                assert torch.equal(lse.isfinite(), seen)
                torch.testing.assert_close(lse[seen], exact["lse"][seen].float(), atol=1e-3, rtol=1e-4)
                for n, x in found.items():
                    size = exact[n].square().mean().sqrt().item()
                    assert gap(x, exact[n]) <= 1e-2 * size + 1e-5, (shape, layout, tiles, n)


@pytest.mark.gpu
@needs_roles
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("n_parts", [1, 2, 100])  # with 1, heads that share keys are parts
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [80, 128])
def test_the_backward_pass_through_memory_is_as_exact_as_two_passes(width, causal, n_parts, monkeypatch):
    monkeypatch.setattr(flash_fast, "n_stored_tiles", lambda device, sizes: 0)
    shapes = [(2, 4, 2, 1024, 1024), (1, 4, 4, 1000, 1300), (1, 6, 1, 130, 2048), (1, 2, 2, 1, 300)]
    for shape, layout in zip(shapes, ("heads first", "tokens first", "a slice", "heads first"), strict=True):
        given, exact = given_at(shape, width, causal, torch.bfloat16)
        q, k, v, do = (laid_out(x, layout) for x in given)
        o, lse = fast_forward(q, k, v, causal)
        two_passes = fast_backward(q, k, v, o, do, lse, causal)
        sizes = sizes_of(q, k, causal)
        apart = n_parts == 1 and sizes.group > 1
        parts = sizes._replace(group=1) if apart else sizes
        work = deal(parts, n_programs(q.device), n_parts * n_part_tiles(parts)), sizes.group if apart else 1
        monkeypatch.setattr(flash_stored, "deal_apart", lambda *given, work=work: work)
        flash_stored._dealt.cache_clear()
        backward = StoredBackward(sizes, q.device, n_programs(q.device), 1)
        runs = []
        for _ in range(3):
            runs.append([torch.full_like(x, torch.nan) for x in (q, k, v)])
            backward(q, k, v, o, do, lse, *runs[-1])
        for name, old, *found in zip(("dq", "dk", "dv"), two_passes, *runs, strict=True):
            most = 1.5 if apart and name != "dq" else 1.1  # of heads apart, dK and dV are rounded before they are added
            assert gap(found[0], exact[name]) <= most * gap(old, exact[name]), (shape, name)
            assert all(torch.equal(found[0], again) for again in found[1:]), (shape, name)


@pytest.mark.gpu
@needs_roles
def test_dS_of_several_gigabytes_gives_the_gradients_of_two_passes(monkeypatch):
    q, k, v, do = (torch.randn(1, 2, 65_536, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    o, lse = fast_forward(q, k, v, True)
    assert flash_fast.n_stored_tiles(q.device, sizes_of(q, k, True)) * TILE_BYTES > 2**32
    stored = fast_backward(q, k, v, o, do, lse, True)
    monkeypatch.setattr(flash_fast, "n_stored_tiles", lambda device, sizes: 0)
    monkeypatch.setattr(flash_fast, "_plans", {})
    for found, wanted in zip(stored, fast_backward(q, k, v, o, do, lse, True), strict=True):
        assert gap(found, wanted) <= 1e-2 * gap(wanted, 0)


@pytest.mark.gpu
@needs_roles
def test_where_memory_is_short_two_passes_take_over():
    (q, k, v, do), exact = given_at((1, 32, 32, 2048, 2048), 128, False, torch.bfloat16)
    plan = flash_fast._plan_backward((q, k, v, q, do), False)
    backward = plan.launch
    assert isinstance(backward, StoredBackward)
    backward.n_ds = 2**45
    o, lse = fast_forward(q, k, v, False)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    backward(q, k, v, o, do, lse, *grads)
    for name, found in zip(("dq", "dk", "dv"), grads, strict=True):
        assert gap(found, exact[name]) <= 1e-2


@pytest.mark.parametrize(("n_fit", "apart", "short"), [(0, 1, True), (1, 1, False), (2, 4, True), (3, 4, False)])
def test_two_passes_take_over_if_dS_or_what_heads_apart_need_does_not_fit(n_fit, apart, short, monkeypatch):
    q, k = torch.zeros(1, 4, 8, 2), torch.zeros(1, 4 // apart, 8, 2)
    dk, dv = torch.full_like(k, 7.0), torch.full_like(k, 7.0)
    called: list[Any] = []
    asked, real = [], torch.empty

    def empty(shape, dtype, device):
        asked.append(shape)
        if short and len(asked) > n_fit:
            raise torch.OutOfMemoryError
        return real(shape, dtype=dtype, device=device)

    backward: Any = object.__new__(StoredBackward)
    backward.dealt = flash_stored.Dealt(torch.zeros(1, 1), 1, 2, apart)
    backward.n_ds, backward.n_stats, backward.is_short = 5, 6, False
    backward.statistics = lambda *given: called.append("statistics")
    backward.backward = lambda q, k, v, do, dq, *rest: called.append([x.fill_(i + 1.0) for i, x in enumerate(rest[:2])])
    backward.otherwise = lambda *given: called.append("two passes")
    monkeypatch.setattr(torch, "empty", empty)
    for _ in range(2):
        backward(q, k, k, q, q, q, q, dk, dv)
    if short:
        assert called == ["two passes"] * 2
        assert len(asked) == n_fit + 1  # the second call does not ask again
    else:
        assert called[0] == "statistics"
        assert dk.unique().tolist() == [1.0 * apart]
        assert dv.unique().tolist() == [2.0 * apart]


@pytest.mark.parametrize(
    ("width", "t", "s", "why"), [(64, 128, 128, "tiles of width 64"), (128, 200, 100, "200 rows, 100 keys")]
)
def test_what_cannot_go_through_memory_is_refused(width, t, s, why, monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match=why):
        StoredBackward(Sizes(1, 1, 1, t, s, width, True), torch.device("cpu"), 1, 1000)


@pytest.mark.gpu
@needs_roles
def test_what_the_copy_engine_cannot_read_is_copied_and_right():
    (q, k, v, do), exact = given_at((1, 2, 2, 128, 128), 64, True, torch.bfloat16)
    odd = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape).copy_(q)
    assert odd.data_ptr() % 16 != 0
    for x in (odd, q.mT.contiguous().mT, q):
        found = flash_attention_fast(x.requires_grad_(), k, v, True)
        (grad,) = torch.autograd.grad(found, x, do)
        assert gap(found, exact["o"]) <= 1e-2
        assert gap(grad, exact["dq"]) <= 1e-2
    whole = torch.autograd.grad(flash_attention_fast(q, k, v, True).sum(), q)  # its gradient has strides of 0
    torch.testing.assert_close(whole, torch.autograd.grad(flash_attention_fast(q, k, v, True), q, torch.ones_like(q)))


@pytest.mark.gpu
@needs_roles
def test_later_calls_find_the_parts_of_other_joined_tensors():
    q, k, v = (torch.randn(3, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    do = torch.randn(3, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    apart = [y.clone().requires_grad_() for y in (q, k, v)]
    wanted = torch.autograd.grad(flash_attention_fast(apart[0], apart[1], apart[2], True), apart, do.transpose(1, 2))
    kept = []  # so that each call has other memory
    for _ in range(4):
        x = torch.cat((q, k, v), 1).transpose(1, 2).contiguous().requires_grad_()
        (grad,) = torch.autograd.grad(flash_attention_joined(x, 4, True), x, do.clone())
        kept += [x, grad]
        for found, want in zip(split_joined(grad, 4), wanted, strict=True):
            assert torch.equal(found, want)


@pytest.mark.gpu
@needs_roles
def test_a_thread_that_never_used_the_gpu_can_launch():
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wanted, _ = fast_forward(q, k, v, True)  # compiled here, so that the thread only launches
    with ThreadPoolExecutor(1) as thread:
        found, _ = thread.submit(fast_forward, q, k, v.clone(), True).result()
    assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_tensors_may_be_on_another_gpu_than_the_current_one():
    leaves = [torch.randn(2, 4, 256, 64, device="cuda:1", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    x = torch.randn(2, 256, 12, 64, device="cuda:1", dtype=torch.bfloat16, requires_grad=True)

    def step():
        o, joined = flash_attention_fast(leaves[0], leaves[1], leaves[2], True), flash_attention_joined(x, 4, True)
        return o, joined, *torch.autograd.grad(o.sum() + joined.sum(), (*leaves, x))

    with torch.cuda.device(1):
        wanted = step()
    for _ in range(2):
        for found, want in zip(step(), wanted, strict=True):
            assert found.device == x.device
            assert torch.equal(found, want)


@pytest.mark.gpu
@needs_roles
def test_a_cut_that_no_kernel_has_is_refused():
    (q, k, v, do), _ = given_at((1, 1, 1, 128, 128), 64, True, torch.bfloat16)
    with pytest.raises(ValueError, match="users = 4"):
        fast_forward(q, k, v, True, Roles(4, 64, 2))
    with pytest.raises(ValueError, match="stages = 1"):
        fast_forward(q, k, v, True, Roles(3, 64, 1))
    stats = torch.zeros(2, *q.shape[:-1], device="cuda")
    with pytest.raises(ValueError, match="early = True"):
        fast_dkdv(q, k, v, do, stats, True, Roles(2, 64, 2, early=True))
    with pytest.raises(ValueError, match="users = 3"):
        fast_dkdv(q, k, v, do, stats, True, Roles(3, 64, 2))
    with pytest.raises(ValueError, match="tile = 96"):
        fast_forward(q, k, v, True, Roles(3, 96, 2))


@pytest.mark.gpu
@needs_roles
def test_flash_attention_takes_them_for_many_rows_and_any_strides():
    (q, k, v, do), exact = given_at((1, 32, 32, 2048, 2048), 64, True, torch.bfloat16)
    assert isinstance(tiles_for(q, k, True)[0], Roles)
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    o = flash_attention_fast(*leaves, True)
    grads = torch.autograd.grad(o, leaves, do)
    for name, found in zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True):
        assert gap(found, exact[name]) <= 2e-2 * exact[name].square().mean().sqrt().item(), name
    o = flash_attention_fast(*leaves, True)
    o.sum().backward()
    torch.testing.assert_close(
        leaves[2].grad, torch.autograd.grad(flash_attention_fast(*leaves, True), leaves[2], torch.ones_like(o))[0]
    )
