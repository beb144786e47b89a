"""The kernels with roles for their warps: what they compile to, and, on a Hopper GPU, what they compute."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lib.given.flash_fast import (
    TABLE,
    Tiles,
    fast_dkdv,
    fast_dq,
    fast_forward,
    fits_fast,
    flash_attention_fast,
    tiles_for,
)
from lib.given.flash_hopper import KNOWN, VERSION, Roles, has_roles

needs_roles = pytest.mark.skipif(
    not has_roles(torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")),
    reason="warps have roles on a GPU of compute capability 9.0, with a Triton that is proven",
)
CUTS = {
    ("forward", 64): [Roles(3, 128, 3), Roles(2, 128, 2, heads_first=True, early=True, registers=True)],
    ("forward", 128): [Roles(3, 64, 3, heads_first=True, early=True), Roles(2, 128, 2)],
    ("dQ", 64): [Roles(3, 64, 3, heads_first=True), Roles(3, 64, 3, registers=True)],
    ("dQ", 128): [Roles(3, 64, 2, heads_first=True), Roles(2, 64, 3, early=True, registers=True)],
    ("dK/dV", 64): [Roles(2, 64, 3), Roles(2, 64, 2, registers=True)],
    ("dK/dV", 128): [Roles(2, 64, 2)],
}
SHAPES = {"equal": (4, 2, 1024, 1024), "rows for one user": (2, 1, 256, 256), "more keys": (4, 2, 128, 512)}


@pytest.mark.skipif(VERSION not in KNOWN, reason="Gluon's names change: these kernels are for Triton 3.6 to 3.9")
@pytest.mark.time_limit(240)
def test_the_kernels_compile_for_hopper_and_their_products_run_ahead(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.workbook.hopper_program"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert {name.split(",")[0] for name in kernels} == {"forward", "dQ", "dK/dV"}
    for name, counts in kernels.items():
        assert counts["USETMAXREG"] > 0, f"{name}: no warp gives registers to another"
        # Where the assembler lets products run one after the other, each has a fence of its own.
        assert counts["WARPGROUP.ARRIVE"] <= counts["HGMMA"] / 2, (name, counts)
        assert counts["LDL"] < counts["HGMMA"], f"{name}: registers are spilled to memory: {counts}"


def test_without_a_hopper_gpu_the_tiles_are_tritons():
    q = torch.empty(1, 1, 128, 64, device="meta")
    assert not has_roles(q)
    assert tiles_for(q, True) == TABLE[64, True]
    assert all(isinstance(tiles, Tiles) for row in TABLE.values() for tiles in row)


def test_fake_tensors_get_shapes_and_no_kernel():
    with FakeTensorMode():
        q = torch.empty(2, 4, 128, 64, dtype=torch.float16, requires_grad=True)
        k, v = (torch.empty(2, 2, 256, 64, dtype=torch.float16, requires_grad=True) for _ in range(2))
        o = flash_attention_fast(q, k, v, True)
        o.sum().backward()
    assert [x.shape for x in (o, q.grad, k.grad)] == [q.shape, q.shape, k.shape]


def given_at(shape, width, causal, dtype):
    heads, kv_heads, t, s = shape
    torch.manual_seed(0)
    q, do = (torch.randn(1, heads, t, width, device="cuda").to(dtype) for _ in range(2))
    k, v = (torch.randn(1, kv_heads, s, width, device="cuda").to(dtype) for _ in range(2))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wide = [leaves[0], *(x.repeat_interleave(heads // kv_heads, 1) for x in leaves[1:])]
    scores = wide[0] @ wide[1].mT * width**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(t, s, dtype=torch.bool, device="cuda").triu(1 + s - t), -torch.inf)
    o = scores.softmax(-1) @ wide[2]
    exact = {"o": o.detach(), "lse": scores.logsumexp(-1).detach()}
    return (q, k, v, do), exact | dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do.double()), strict=True)
    )


def gap(found, exact):
    return (found.double() - exact).square().mean().sqrt().item()


@pytest.mark.gpu
@needs_roles
@pytest.mark.time_limit(300)
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # autograd's thread says so once
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
        for cut in CUTS["forward", width]:
            found, its_lse = fast_forward(q, k, v, causal, cut)
            assert gap(found, exact["o"]) <= 1.1 * gap(o, exact["o"]), (name, cut)
            assert (its_lse - exact["lse"]).abs().max() < 1e-3, (name, cut)
            assert torch.equal(found, fast_forward(q, k, v, causal, cut)[0]), (name, cut)
        for cut in CUTS["dQ", width]:
            found, its_stats = fast_dq(q, k, v, o, do, lse, causal, cut)
            assert gap(found, exact["dq"]) <= 1.1 * gap(dq, exact["dq"]), (name, cut)
            torch.testing.assert_close(its_stats, stats, atol=1e-4, rtol=1e-5)
            assert torch.equal(found, fast_dq(q, k, v, o, do, lse, causal, cut)[0]), (name, cut)
        for cut in CUTS["dK/dV", width]:
            found = fast_dkdv(q, k, v, do, stats, causal, cut)
            for x, old, key in zip(found, (dk, dv), ("dk", "dv"), strict=True):
                assert gap(x, exact[key]) <= 1.1 * gap(old, exact[key]), (name, cut, key)
            again = fast_dkdv(q, k, v, do, stats, causal, cut)
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), (name, cut)


@pytest.mark.gpu
@needs_roles
def test_a_cut_that_no_kernel_has_is_refused():
    (q, k, v, do), _ = given_at((1, 1, 128, 128), 64, True, torch.bfloat16)
    with pytest.raises(ValueError, match="users = 4"):
        fast_forward(q, k, v, True, Roles(4, 64, 2))
    stats = torch.zeros(2, *q.shape[:-1], device="cuda")
    with pytest.raises(ValueError, match="users = 3"):
        fast_dkdv(q, k, v, do, stats, True, Roles(3, 64, 2))
    with pytest.raises(ValueError, match="tile = 96"):
        fast_forward(q, k, v, True, Roles(3, 96, 2))
