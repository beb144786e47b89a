"""FlashAttention's kernels: in Triton's interpreter on a CPU, compiled on a GPU, the same tests."""

import pytest
import torch

from lib.fast.flash import (
    ROLES_TABLE,
    fast_dkdv,
    fast_dq,
    fast_forward,
    flash_attention_fast,
    forward_operator,
    tiles_for,
)
from lib.fast.flash_hopper import has_roles
from lib.given.kernels.exact import CountMasked, exact, guarded, guards_of, make_inputs
from lib.given.kernels.launch import launch_backward_dkdv, launch_backward_dq, launch_forward
from lib.given.kernels.tiles import HAS_TRITON, INTERPRETED, NO_TRITON
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle

flash = graded("flash_attention")
pytestmark = [pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON), pytest.mark.time_limit(60)]

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
FORWARD, LSE, BACKWARD = "eq-flash_attention-3 to eq-flash_attention-5", "eq-flash_attention-4", "eq-flash_attention-7"
NO_KEYS = "eq-flash_attention-6 and what stands under it about rows without keys"
WHOLE = "the contract of ex-flash-attention-flash-forward-kernel, under Returns, and the picture of the tiles"
CASES = [  # q, k and v, causal: plain, ragged and shared heads, T > S with rows without keys, one query, many heads
    ((1, 64, 16), (1, 64, 16), False),
    ((1, 64, 16), (1, 64, 16), True),
    ((1, 2, 45, 24), (1, 1, 70, 24), True),
    ((1, 2, 45, 24), (1, 1, 70, 24), False),
    ((1, 50, 80), (1, 19, 80), True),
    ((1, 1, 32), (1, 37, 32), True),
    ((2, 4, 5, 16), (2, 2, 9, 16), True),
]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def tolerance(dtype):
    """Rounding of the inputs' products: a few units in the last place of the dtype, of numbers about 1."""
    return {"atol": 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 5e-6, "rtol": 4 * torch.finfo(dtype).eps}


def prepared(q_shape, kv_shape, is_causal, dtype=torch.float32):
    q, k, v, do = make_inputs(q_shape, kv_shape, dtype, DEVICE)
    n_empty = max(q_shape[-2] - kv_shape[-2], 0) * is_causal
    empty = f", the first {n_empty} rows see no key" if n_empty else ""
    case(f"q {q_shape}, k and v {kv_shape}, causal {is_causal}, {dtype}, tiles of 32{empty}")
    return (q, k, v, do), exact(q, k, v, do, is_causal)


def beside(values, *names, dtype=torch.float32):
    return {n: values[n].to(torch.float32 if n in ("lse", "delta") else dtype) for n in names}


def with_delta(values, do):
    return values | {"delta": (values["o"] * do.double()).sum(-1)}


def where_to_read(r, otherwise=BACKWARD):
    if r["dk"].ndim == 4 and r["dk"].shape[1] > 1:
        return "under 'The forward kernel', what is said about heads and `head // GROUP`"
    return NO_KEYS if otherwise == BACKWARD and r["lse"].isinf().any() else otherwise


# ---- 15.5 flash_forward_kernel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q_shape", "kv_shape", "is_causal"), CASES)
def test_flash_forward_kernel_is_attention(q_shape, kv_shape, is_causal):
    (q, k, v, _), expected = prepared(q_shape, kv_shape, is_causal)
    o, lse = launch_forward(flash.flash_forward_kernel, q, k, v, is_causal, rows=32, cols=32)
    expect_close({"o": o}, beside(expected, "o"), **tolerance(q.dtype), read=where_to_read(expected, FORWARD))
    expect_close({"lse": lse}, beside(expected, "lse"), **tolerance(q.dtype), read=LSE)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_flash_forward_kernel_dtypes(dtype):
    (q, k, v, _), expected = prepared((1, 40, 16), (1, 40, 16), True, dtype)
    o, lse = launch_forward(flash.flash_forward_kernel, q, k, v, True, rows=32, cols=16)
    expect_close(o, expected["o"].to(dtype), **tolerance(dtype), read=FORWARD)
    expect_close(lse, expected["lse"].float(), atol=1e-4, name="lse", read=LSE)


def test_flash_forward_kernel_writes_nothing_beside_its_output():
    (q, k, v, _), expected = prepared((1, 37, 20), (1, 37, 20), False)
    o, lse = guarded((1, 37, 20), torch.float32, DEVICE), guarded((1, 37), torch.float32, DEVICE)
    launch_forward(flash.flash_forward_kernel, q, k, v, False, rows=32, cols=32, o=o, lse=lse)
    for name, x in (("o", o), ("lse", lse)):
        expect_true(
            bool((guards_of(x) == -7).all()),
            f"numbers before or after {name} were overwritten: a store without its mask",
        )
    expect_close(o, expected["o"].float(), atol=5e-6)


def test_flash_forward_kernel_reads_no_tile_above_the_diagonal():
    (q, k, v, _), expected = prepared((1, 96, 16), (1, 96, 16), True)
    v[:, 64:] = torch.nan
    o, _ = launch_forward(flash.flash_forward_kernel, q, k, v, True, rows=32, cols=32)
    problem = "values 64 to 95 are NaN, and rows 0 to 63, which do not see them, are NaN too: their tiles were read"
    expect_true(bool(o[:, :64].isfinite().all()), problem, read=FORWARD)
    expect_close(o[:, :64], expected["o"][:, :64].float(), atol=5e-6)


@pytest.mark.skipif(not INTERPRETED, reason="conditions are counted in Triton's interpreter")
def test_flash_forward_kernel_masks_no_whole_tile():
    masked = []
    for length in (32, 128):
        q, k, v, do = make_inputs((1, 32, 16), (1, length, 16))
        case(f"32 queries, {length} keys, causal, tiles of 32: one tile on the diagonal, {length // 32 - 1} whole")
        with CountMasked((32, 32)) as count:
            o, _ = launch_forward(flash.flash_forward_kernel, q, k, v, True, rows=32, cols=32)
        expect_close(o, exact(q, k, v, do, True)["o"].float(), atol=5e-6, read=FORWARD)
        masked.append(count.n)
    problem = (
        f"{masked[1]} tiles of scores were masked, and with the one on the diagonal alone {masked[0]}: whole tiles too"
    )
    expect_true(masked[0] == masked[1], problem, answer=masked, read=WHOLE)


def test_flash_forward_kernel_large_scores():
    q, k, v, do = make_inputs((1, 40, 16), (1, 40, 16), torch.float32, DEVICE)
    q = 100 * q
    case("scores of several hundred")
    o, _ = launch_forward(flash.flash_forward_kernel, q, k, v, False, rows=32, cols=32)
    expect_close(o, exact(q, k, v, do, False)["o"].float(), atol=1e-3, rtol=1e-3, read=FORWARD)


# ---- 15.6 flash_backward_dq_kernel -----------------------------------------------------------------------------------


def run_dq(inputs, r, is_causal, **kwargs):
    q, k, v, do = inputs
    return launch_backward_dq(
        flash.flash_backward_dq_kernel,
        q,
        k,
        v,
        r["o"].to(q.dtype),
        do,
        r["lse"].float(),
        is_causal,
        rows=32,
        cols=32,
        **kwargs,
    )


@pytest.mark.parametrize(("q_shape", "kv_shape", "is_causal"), CASES)
def test_flash_backward_dq_kernel_is_the_gradient(q_shape, kv_shape, is_causal):
    inputs, r = prepared(q_shape, kv_shape, is_causal)
    r = with_delta(r, inputs[3])
    dq, delta = run_dq(inputs, r, is_causal)
    expect_close({"delta": delta, "dq": dq}, beside(r, "delta", "dq"), atol=1e-5, rtol=1e-5, read=where_to_read(r))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_flash_backward_dq_kernel_dtypes(dtype):
    inputs, r = prepared((1, 40, 16), (1, 40, 16), True, dtype)
    dq, _ = run_dq(inputs, r, True)
    expect_close(dq, r["dq"].to(dtype), atol=20 * torch.finfo(dtype).eps, rtol=0.02, read=BACKWARD)


def test_flash_backward_dq_kernel_stays_inside():
    inputs, r = prepared((1, 70, 20), (1, 70, 20), True)
    dq, delta = guarded((1, 70, 20), torch.float32, DEVICE), guarded((1, 70), torch.float32, DEVICE)
    inputs[1][:, 64:] = inputs[2][:, 64:] = torch.nan
    run_dq(inputs, r, True, dq=dq, delta=delta)
    for name, x in (("dq", dq), ("delta", delta)):
        expect_true(
            bool((guards_of(x) == -7).all()),
            f"numbers before or after {name} were overwritten: a store without its mask",
        )
    expect_true(
        bool(dq[:, :64].isfinite().all()),
        "NaN keys that the rows do not see reached them: tiles above the diagonal were read",
    )


# ---- 15.7 flash_backward_dkdv_kernel ---------------------------------------------------------------------------------


def run_dkdv(inputs, r, is_causal, **kwargs):
    q, k, v, do = inputs
    lse, delta = r["lse"].float(), with_delta(r, do)["delta"].float()
    return launch_backward_dkdv(
        flash.flash_backward_dkdv_kernel, q, k, v, do, lse, delta, is_causal, rows=32, cols=32, **kwargs
    )


@pytest.mark.parametrize(("q_shape", "kv_shape", "is_causal"), CASES)
def test_flash_backward_dkdv_kernel_is_the_gradient(q_shape, kv_shape, is_causal):
    inputs, r = prepared(q_shape, kv_shape, is_causal)
    dk, dv = run_dkdv(inputs, r, is_causal)
    expect_close({"dk": dk, "dv": dv}, beside(r, "dk", "dv"), atol=1e-5, rtol=1e-5, read=where_to_read(r))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_flash_backward_dkdv_kernel_dtypes(dtype):
    inputs, r = prepared((1, 40, 16), (1, 40, 16), True, dtype)
    dk, dv = run_dkdv(inputs, r, True)
    expect_close(
        (dk, dv), (r["dk"].to(dtype), r["dv"].to(dtype)), atol=20 * torch.finfo(dtype).eps, rtol=0.02, read=BACKWARD
    )


def test_flash_backward_dkdv_kernel_stays_inside():
    inputs, r = prepared((1, 70, 20), (1, 70, 20), True)
    dk, dv = guarded((1, 70, 20), torch.float32, DEVICE), guarded((1, 70, 20), torch.float32, DEVICE)
    inputs[0][:, :32] = torch.nan
    run_dkdv(inputs, r, True, dk=dk, dv=dv)
    for name, x in (("dk", dk), ("dv", dv)):
        expect_true(
            bool((guards_of(x) == -7).all()),
            f"numbers before or after {name} were overwritten: a store without its mask",
        )
    expect_true(
        bool(dk[:, 32:].isfinite().all()),
        "queries 0 to 31 are NaN and do not see keys 32 on, whose gradient is NaN: their tiles were read",
    )


# ---- 15.8 FlashAttentionTriton ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_FlashAttentionTriton_with_gradients(is_causal):
    shapes = ((2, 4, 5, 16), (2, 2, 9, 16)) if is_causal else ((1, 2, 40, 24), (1, 1, 50, 24))
    (q, k, v, do), r = prepared(*shapes, is_causal)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = flash.FlashAttentionTriton.apply(*leaves, is_causal)
    expect_close(o.detach(), r["o"].float(), atol=5e-6)
    gradients = torch.autograd.grad(o, leaves, do)
    expect_close(gradients, tuple(r[n].float() for n in ("dq", "dk", "dv")), atol=1e-5, rtol=1e-5)


def test_FlashAttentionTriton_saves_one_number_a_row_and_takes_any_strides():
    saved = []
    q, k, v, do = (x.transpose(1, 2) for x in make_inputs((1, 35, 2, 16), (1, 35, 2, 16), torch.float32, DEVICE))
    r = exact(q, k, v, do, True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    case("q, k, v as [B, T, H, D] transposed; the gradient of o.sum()")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = flash.FlashAttentionTriton.apply(*leaves, True)
    expect_equal(
        sorted(tuple(x.shape) for x in saved), sorted([tuple(q.shape)] * 4 + [tuple(q.shape[:-1])]), name="saved shapes"
    )
    row = next(x for x in saved if x.ndim == 3)
    expect_close(row.detach(), r["lse"].float(), atol=5e-6, name="the saved logsumexp", read=LSE)
    o.sum().backward()
    expect_close(q.grad, exact(q, k, v, torch.ones_like(q), True)["dq"].float(), atol=1e-5, rtol=1e-5)


def test_FlashAttentionTriton_errors():
    q, k, v, _ = make_inputs((1, 3, 20, 16), (1, 2, 20, 16), torch.float32, DEVICE)
    with expect_raises(ValueError, "(1, 3, 20, 16)"):
        flash.FlashAttentionTriton.apply(q, k, v, False)


@pytest.mark.gpu
def test_FlashAttentionTriton_gives_the_same_bits_again():
    runs = []
    for _ in range(3):
        q, k, v, do = make_inputs((2, 4, 300, 64), (2, 2, 300, 64), torch.bfloat16, "cuda")
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = flash.FlashAttentionTriton.apply(*leaves, True)
        runs.append((o, *torch.autograd.grad(o, leaves, do)))
    expect_true(
        all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True)),
        "the same inputs gave other bits",
    )


# ---- the fast file, by the same measure ------------------------------------------------------------------------------


def by_launches(q, k, v, do, is_causal, tiles=None):
    """What the fast file does, without autograd; with these tiles or those that it would take."""
    for_forward, for_dq, for_dkdv = tiles or tiles_for(q, k, is_causal)
    o, lse = fast_forward(q, k, v, is_causal, for_forward)
    dq, stats = fast_dq(q, k, v, o, do, lse, is_causal, for_dq)
    return o, dq, *fast_dkdv(q, k, v, do, stats, is_causal, for_dkdv)


def by_autograd(q, k, v, do, is_causal, attend=flash_attention_fast):
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = attend(*leaves, is_causal)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_flash_attention_by_descriptors(width, is_causal, dtype):
    if DEVICE == "cuda" and (torch.cuda.get_device_capability()[0] < 9 or width == 32):
        pytest.skip("the fast path wants a Hopper GPU and width 64 or 128")
    shapes = (1, 2, 128, width), (1, 1, 256 if DEVICE == "cuda" or width == 64 else 128, width)
    shapes = ((2, 4, 32, 32), (2, 2, 64, 32)) if width == 32 else shapes
    (q, k, v, do), r = prepared(*shapes, is_causal, dtype)
    flash.flash_attention(q, k, v, is_causal)  # on a GPU it takes the way that is graded here
    expect_as_exact(by_autograd(q, k, v, do, is_causal), r, dtype)
    if has_roles(q):  # the kernels that larger inputs get
        expect_as_exact(by_launches(q, k, v, do, is_causal, ROLES_TABLE[width, is_causal]), r, dtype)


@oracle
def test_flash_attention_by_operators():
    """What torch.compile sees."""
    size = 128 if DEVICE == "cuda" else 32
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the fast path wants a Hopper GPU")
    width = 64 if DEVICE == "cuda" else 32
    (q, k, v, do), r = prepared((1, 2, size, width), (1, 1, 2 * size, width), True, torch.float16)
    attend = lambda *args: forward_operator(*args)[0]
    expect_as_exact(by_autograd(q, k, v, do, True, attend), r, torch.float16)


def expect_as_exact(got, r, dtype):
    eps = torch.finfo(dtype).eps
    expect_close(got[0], r["o"].to(dtype), atol=4 * eps, rtol=4 * eps)
    expect_close(got[1:], tuple(r[n].to(dtype) for n in ("dq", "dk", "dv")), atol=20 * eps, rtol=0.02)
