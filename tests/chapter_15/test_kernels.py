"""FlashAttention's kernels, with the same tests in Triton's interpreter on a CPU and compiled on a GPU."""

import pytest
import torch
import torch._dynamo  # a `TorchDispatchMode` imports it when it is first used: not while a check's clock runs
from torch.utils.flop_counter import FlopCounterMode

from lib.fast.attention.flash import (
    ROLES_TABLE,
    fast_dkdv,
    fast_dq,
    fast_forward,
    flash_attention_fast,
    forward_operator,
    tiles_for,
)
from lib.fast.gluon import has_roles
from lib.given.kernels.exact import CountMasked, exact, guarded, guards_of, make_inputs
from lib.given.kernels.launch import launch_backward_dkdv, launch_backward_dq, launch_forward
from lib.given.kernels.tiles import HAS_TRITON, INTERPRETED, NO_TRITON
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from tests.chapter_14.memory import watched
from tests.chapter_15.test_tiles import refuses_a_second_derivative

flash = graded("flash_attention")
pytestmark = [pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON), pytest.mark.time_limit(60)]

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
FORWARD, LSE, BACKWARD = "eq-flash_attention-3 to eq-flash_attention-5", "eq-flash_attention-4", "eq-flash_attention-7"
NO_KEYS = "eq-flash_attention-6, and the lines after it about rows without keys"
WHOLE = "the contract of ex-flash-attention-flash-forward-kernel, under Returns, and the picture in 'Tiles in PyTorch'"
WEIGHTS = (
    "the contract of ex-flash-attention-flash-forward-kernel, under Returns: weights are cast to v's dtype before "
    "their product"
)
EXACT = "the contract of ex-flash-attention-flash-forward-kernel, under Returns: products of float32 don't use TF32"
OUTSIDE = "the contract: nothing outside the tensors is read or written"
CASES = [  # q, k and v, causal: whole tiles, the diagonal, ragged and S > T, T > S with rows without keys
    ((1, 32, 16), (1, 64, 16), False),
    ((1, 64, 16), (1, 64, 16), True),
    ((1, 45, 24), (1, 70, 24), False),
    ((1, 45, 24), (1, 70, 24), True),
    ((1, 50, 40), (1, 19, 40), True),
    ((2, 6, 5, 16), (2, 2, 9, 16), True),  # three heads share the keys of one, in two batches
    ((1, 1, 32), (1, 37, 32), True),
    ((1, 5, 16), (1, 0, 16), False),
]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def tolerance(dtype):
    """Rounding of the inputs' products: a few units in the last place of the dtype, of numbers about 1."""
    return {"atol": 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 5e-6, "rtol": 4 * torch.finfo(dtype).eps}


def prepared(q_shape, kv_shape, is_causal, dtype=torch.float32):
    q, k, v, do = make_inputs(q_shape, kv_shape, dtype, DEVICE)
    n_empty = max(q_shape[-2] - kv_shape[-2], 0) * (is_causal or kv_shape[-2] == 0)
    empty = f", the first {n_empty} rows see no key" if n_empty else ""
    case(f"q {q_shape}, k and v {kv_shape}, causal {is_causal}, {dtype}, tiles of 32{empty}")
    return (q, k, v, do), exact(q, k, v, do, is_causal)


def launched(launch, kernel, *args, **kwargs):
    """A launch, in tiles of 32 by default, and in the interpreter its trace; an access outside the tensors is wrong."""
    with watched(OUTSIDE) as seen:
        results = launch(kernel, *args, **({"rows": 32, "cols": 32} | kwargs))
    return results, seen


def exact_products(seen, answer) -> None:
    """Products of float32 ask for float32; a GPU would round their factors to TF32."""
    asked = sorted({precision.lower() for dtype, precision in seen.dots if dtype == "fp32"} - {"ieee"} if seen else ())
    problem = f"tl.dot of float32 tiles runs with input_precision {', '.join(asked)} on a GPU: expected 'ieee'"
    expect_true(not asked, problem, answer=answer, read=EXACT)


def unwritten(names, tensors, answer) -> None:
    """On a GPU, where no access is watched: the numbers around the results have not changed."""
    for name, x in zip(names, tensors, strict=True):
        kept = bool((guards_of(x) == -7).all())
        expect_true(kept, f"numbers before or after {name} were overwritten: a store lacks its mask", answer=answer)


def beside(values, *names, dtype=torch.float32):
    return {n: values[n].to(torch.float32 if n in ("lse", "delta") else dtype) for n in names}


def with_delta(values, do):
    return values | {"delta": (values["o"] * do.double()).sum(-1)}


def where_to_read(r, otherwise=BACKWARD):
    if r["dk"].ndim == 4 and r["dk"].shape[1] > 1:
        return "under 'The forward kernel', the lines about heads and `head // GROUP`"
    return NO_KEYS if otherwise == BACKWARD and r["lse"].isinf().any() else otherwise


# ---- flash_forward_kernel --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q_shape", "kv_shape", "is_causal"), CASES)
def test_flash_forward_kernel_is_attention(q_shape, kv_shape, is_causal):
    (q, k, v, _), expected = prepared(q_shape, kv_shape, is_causal)
    (o, lse), seen = launched(launch_forward, flash.flash_forward_kernel, q, k, v, is_causal)
    expect_close({"o": o}, beside(expected, "o"), **tolerance(q.dtype), read=where_to_read(expected, FORWARD))
    expect_close({"lse": lse}, beside(expected, "lse"), **tolerance(q.dtype), answer=(o, lse), read=LSE)
    exact_products(seen, (o, lse))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_flash_forward_kernel_dtypes(dtype):
    (q, k, v, _), expected = prepared((1, 40, 16), (1, 52, 16), True, dtype)
    (o, lse), seen = launched(launch_forward, flash.flash_forward_kernel, q, k, v, True, cols=16)
    expect_close(o, expected["o"].to(dtype), **tolerance(dtype), read=FORWARD)
    expect_close(lse, expected["lse"].float(), atol=1e-4, name="lse", answer=(o, lse), read=LSE)
    wide = [left for left, _ in seen.dots if left == "fp32"] if seen and dtype == torch.float16 else []
    problem = f"{len(wide)} of {len(seen.dots) if seen else 0} products have factors in float32, where v is {dtype}"
    expect_true(not wide, problem, answer=(o, lse), read=WEIGHTS)


def test_flash_forward_kernel_writes_nothing_beside_its_output():
    (q, k, v, _), expected = prepared((1, 37, 20), (1, 41, 20), False)
    o, lse = guarded((1, 37, 20), torch.float32, DEVICE), guarded((1, 37), torch.float32, DEVICE)
    launched(launch_forward, flash.flash_forward_kernel, q, k, v, False, o=o, lse=lse)
    unwritten(("o", "lse"), (o, lse), (o, lse))
    expect_close(o, expected["o"].float(), atol=5e-6)


def test_flash_forward_kernel_reads_no_tile_above_the_diagonal():
    (q, k, v, _), expected = prepared((1, 96, 16), (1, 96, 16), True)
    for first in (32, 64):
        case(
            f"T=S=96, causal, tiles of 32; keys and values {first} to 95 are NaN: rows 0 to {first - 1} do not see them"
        )
        keys, values = k.clone(), v.clone()
        keys[:, first:] = values[:, first:] = torch.nan
        (o, _), seen = launched(launch_forward, flash.flash_forward_kernel, q, keys, values, True)
        expect_close(
            o[:, :first], expected["o"][:, :first].float(), atol=5e-6, name=f"o[:, :{first}]", answer=o, read=FORWARD
        )
        reads_by_tiles(seen, {"keys": keys, "values": values}, [3, 2, 1])


def reads_by_tiles(seen, tensors, expected) -> None:
    """How often each tile of 32 rows is read, in the interpreter."""
    for name, x in tensors.items() if seen else ():
        reads = seen.count(x, stores=False)[0, ::32, 0].tolist()
        expect_equal(reads, expected, name=f"how often each tile of {name} is read", read=WHOLE)


@pytest.mark.skipif(not INTERPRETED, reason="conditions are counted in Triton's interpreter")
def test_flash_forward_kernel_masks_no_whole_tile():
    unit = 0
    for length, is_causal, n_masked, what in (
        (32, True, 1, "one tile, on the diagonal"),
        (128, True, 1, "three whole tiles and one on the diagonal"),
        (63, True, 1, "query 0 sees 32 keys, so one tile is whole; the other is on the diagonal and ragged"),
        (62, True, 2, "query 0 sees 31 keys, so none is whole"),
        (64, False, 0, "two whole tiles"),
        (70, False, 1, "two whole tiles and a ragged one"),
    ):
        q, k, v, do = make_inputs((1, 32, 16), (1, length, 16))
        case(f"32 queries, {length} keys, causal {is_causal}, tiles of 32: {what}")
        with CountMasked((32, 32)) as count:
            (o, _), _ = launched(launch_forward, flash.flash_forward_kernel, q, k, v, is_causal)
        expect_close(o, exact(q, k, v, do, is_causal)["o"].float(), atol=5e-6, read=FORWARD)
        unit = unit or count.n
        problem = f"{count.n / (unit or 1):g} tiles of scores were masked, where {n_masked} must be"
        expect_true(count.n <= n_masked * unit, problem, answer=count.n, read=WHOLE)


def test_flash_forward_kernel_large_scores():
    q, k, v, do = make_inputs((1, 40, 16), (1, 45, 16), torch.float32, DEVICE)
    q = 100 * q
    case("scores of several hundred")
    (o, _), _ = launched(launch_forward, flash.flash_forward_kernel, q, k, v, False)
    expect_close(o, exact(q, k, v, do, False)["o"].float(), atol=1e-3, rtol=1e-3, read=FORWARD)


# ---- flash_backward_dq_kernel ----------------------------------------------------------------------------------------


def run_dq(inputs, r, is_causal, **kwargs):
    q, k, v, do = inputs
    o, lse = r["o"].to(q.dtype), r["lse"].float()
    return launched(launch_backward_dq, flash.flash_backward_dq_kernel, q, k, v, o, do, lse, is_causal, **kwargs)


@pytest.mark.parametrize(("q_shape", "kv_shape", "is_causal"), CASES)
def test_flash_backward_dq_kernel_is_the_gradient(q_shape, kv_shape, is_causal):
    inputs, r = prepared(q_shape, kv_shape, is_causal)
    r = with_delta(r, inputs[3])
    (dq, delta), seen = run_dq(inputs, r, is_causal)
    expect_close({"delta": delta, "dq": dq}, beside(r, "delta", "dq"), atol=1e-5, rtol=1e-5, read=where_to_read(r))
    exact_products(seen, (dq, delta))


def test_flash_backward_dq_kernel_of_very_negative_scores():
    case("no mask, T = 40, S = 70, scores near -256: in the last tile 2 to the power of -L is infinite")
    q, k, v, do = make_inputs((1, 40, 16), (1, 70, 16), torch.float32, DEVICE)
    q, k = 0.3 * q + 8, 0.3 * k - 8
    r = exact(q, k, v, do, False)
    (dq, _), _ = run_dq((q, k, v, do), r, False)
    expect_close(dq, r["dq"].float(), atol=1e-3, rtol=1e-2, read=BACKWARD)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_flash_backward_dq_kernel_dtypes(dtype):
    inputs, r = prepared((1, 40, 16), (1, 52, 16), True, dtype)
    (dq, _), _ = run_dq(inputs, r, True)
    expect_close(dq, r["dq"].to(dtype), atol=20 * torch.finfo(dtype).eps, rtol=0.02, read=BACKWARD)


def test_flash_backward_dq_kernel_stays_inside():
    inputs, r = prepared((1, 70, 20), (1, 70, 20), True)
    dq, delta = guarded((1, 70, 20), torch.float32, DEVICE), guarded((1, 70), torch.float32, DEVICE)
    for first in (32, 64):
        q, k, v, do = (x.clone() for x in inputs)
        case(
            f"T=S=70, causal, tiles of 32; keys and values {first} to 69 are NaN: rows 0 to {first - 1} do not see them"
        )
        k[:, first:] = v[:, first:] = torch.nan
        _, seen = run_dq((q, k, v, do), r, True, dq=dq, delta=delta)
        unwritten(("dq", "delta"), (dq, delta), (dq, delta))
        found = dq[:, :first]
        expect_close(
            found, r["dq"][:, :first].float(), atol=1e-5, rtol=1e-5, name=f"dq[:, :{first}]", answer=dq, read=BACKWARD
        )
        reads_by_tiles(seen, {"keys": k, "values": v}, [3, 2, 1])


def narrow_products(seen, answer) -> None:
    """Tensor cores multiply 16 bits: in the interpreter, no product of a kernel with float16 inputs has a float32
    factor.
    """
    wide = [left for left, _ in seen.dots if left == "fp32"] if seen else []
    problem = (
        f"{len(wide)} of {len(seen.dots) if seen else 0} products have factors in float32, where the inputs are float16"
    )
    expect_true(not wide, problem, answer=answer, read=WEIGHTS)


def test_flash_backward_dq_kernel_sums_and_products_of_float16():
    inputs, r = prepared((1, 40, 16), (1, 52, 16), True, torch.float16)
    (dq, delta), seen = run_dq(inputs, r, True)
    sums = (r["o"].half().double() * inputs[3].double()).sum(-1).float()
    read = "the contract: each row's sum of o * do, float32"
    expect_close(delta, sums, atol=1e-5, rtol=1e-5, name="delta", answer=(dq, delta), read=read)
    narrow_products(seen, (dq, delta))


def masks_no_whole_tile(run, cases, name) -> None:
    """How often `tl.where` is called on a tile of scores; ``cases`` has T, S, causal and the tiles that need a mask."""
    unit = 0
    for length, n_keys, is_causal, n_masked in cases:
        q, k, v, do = make_inputs((1, length, 16), (1, n_keys, 16))
        r = exact(q, k, v, do, is_causal)
        case(f"{length} queries, {n_keys} keys, causal {is_causal}, tiles of 32")
        with CountMasked((32, 32)) as count:
            results, _ = run((q, k, v, do), r, is_causal)
        expect_close(results[0], r[name].float(), atol=1e-5, rtol=1e-5, name=name, answer=results, read=BACKWARD)
        unit = unit or count.n
        problem = f"{count.n / (unit or 1):g} tiles of scores were masked, where {n_masked} must be"
        expect_true(count.n <= n_masked * unit, problem, answer=count.n, read=WHOLE)


@pytest.mark.skipif(not INTERPRETED, reason="conditions are counted in Triton's interpreter")
def test_flash_backward_dq_kernel_masks_no_whole_tile():
    cases = [(32, 32, True, 1), (32, 128, True, 1), (32, 63, True, 1), (32, 62, True, 2), (32, 64, False, 0)]
    masks_no_whole_tile(run_dq, cases, "dq")


# ---- flash_backward_dkdv_kernel --------------------------------------------------------------------------------------


def run_dkdv(inputs, r, is_causal, **kwargs):
    q, k, v, do = inputs
    lse, delta = r["lse"].float(), with_delta(r, do)["delta"].float()
    kernel = flash.flash_backward_dkdv_kernel
    return launched(launch_backward_dkdv, kernel, q, k, v, do, lse, delta, is_causal, **kwargs)


@pytest.mark.parametrize(
    ("q_shape", "kv_shape", "is_causal"), [c for c in CASES if 0 not in c[1]]
)  # no keys, no launch
def test_flash_backward_dkdv_kernel_is_the_gradient(q_shape, kv_shape, is_causal):
    inputs, r = prepared(q_shape, kv_shape, is_causal)
    (dk, dv), seen = run_dkdv(inputs, r, is_causal)
    expect_close({"dk": dk, "dv": dv}, beside(r, "dk", "dv"), atol=1e-5, rtol=1e-5, read=where_to_read(r))
    exact_products(seen, (dk, dv))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_flash_backward_dkdv_kernel_dtypes(dtype):
    inputs, r = prepared((1, 40, 16), (1, 52, 16), True, dtype)
    (dk, dv), _ = run_dkdv(inputs, r, True)
    expect_close(
        (dk, dv), (r["dk"].to(dtype), r["dv"].to(dtype)), atol=20 * torch.finfo(dtype).eps, rtol=0.02, read=BACKWARD
    )


def test_flash_backward_dkdv_kernel_stays_inside():
    inputs, r = prepared((1, 70, 20), (1, 70, 20), True)
    dk, dv = guarded((1, 70, 20), torch.float32, DEVICE), guarded((1, 70, 20), torch.float32, DEVICE)
    for end in (32, 64):
        q, k, v, do = (x.clone() for x in inputs)
        case(f"T=S=70, causal, tiles of 32; queries 0 to {end - 1} are NaN: they do not see keys {end} to 69")
        q[:, :end] = torch.nan
        _, seen = run_dkdv((q, k, v, do), r, True, dk=dk, dv=dv)
        unwritten(("dk", "dv"), (dk, dv), (dk, dv))
        found, expected = (dk[:, end:], dv[:, end:]), (r["dk"][:, end:].float(), r["dv"][:, end:].float())
        expect_close(found, expected, atol=1e-5, rtol=1e-5, name=f"(dk, dv)[:, {end}:]", answer=(dk, dv), read=BACKWARD)
        reads_by_tiles(seen, {"queries": q, "gradients": do}, [1, 2, 3])


def test_flash_backward_dkdv_kernel_products_of_float16():
    inputs, r = prepared((1, 40, 16), (1, 52, 16), True, torch.float16)
    (dk, dv), seen = run_dkdv(inputs, r, True)
    narrow_products(seen, (dk, dv))


@pytest.mark.skipif(not INTERPRETED, reason="conditions are counted in Triton's interpreter")
def test_flash_backward_dkdv_kernel_masks_no_whole_tile():
    cases = [(32, 32, True, 1), (32, 128, True, 1), (96, 96, True, 3), (32, 64, False, 0)]
    masks_no_whole_tile(run_dkdv, cases, "dk")


# ---- FlashAttentionTriton --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_FlashAttentionTriton_with_gradients(is_causal):
    shapes = ((2, 6, 5, 16), (2, 2, 9, 16)) if is_causal else ((1, 2, 40, 24), (1, 1, 50, 24))
    (q, k, v, do), r = prepared(*shapes, is_causal)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with FlopCounterMode(display=False) as counter:
        o = flash.FlashAttentionTriton.apply(*leaves, is_causal)
        expect_close(o.detach(), r["o"].float(), atol=5e-6)
        expect_true(o.requires_grad, "the result is cut off from autograd: it has no gradient", answer=o)
        gradients = torch.autograd.grad((o * do).sum(), leaves)
    expect_close(gradients, tuple(r[n].float() for n in ("dq", "dk", "dv")), atol=1e-5, rtol=1e-5)
    flops = counter.get_total_flops()
    problem = f"PyTorch computed {flops} FLOPs of matrix products: all of them belong into the three kernels"
    expect_true(flops == 0, problem, answer=flops, read="the contract: attention by the three kernels")


def test_FlashAttentionTriton_saves_one_number_a_row_and_takes_any_strides():
    saved = []
    q, k, v, do = (x.transpose(1, 2) for x in make_inputs((1, 35, 2, 16), (1, 43, 2, 16), torch.float32, DEVICE))
    r = exact(q, k, v, do, True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    case("q, k, v as [B, T, H, D] transposed; the gradient of o.sum()")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = flash.FlashAttentionTriton.apply(*leaves, True)
    expect_equal(
        sorted(tuple(x.shape) for x in saved),
        sorted(tuple(shape) for shape in (q.shape, q.shape, k.shape, k.shape, q.shape[:-1])),
        name="saved shapes",
    )
    row = next(x for x in saved if x.ndim == 3)
    expect_close(row.detach(), r["lse"].float(), atol=5e-6, name="the saved logsumexp", read=LSE)
    o.sum().backward()
    expect_close(q.grad, exact(q, k, v, torch.ones_like(q), True)["dq"].float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_FlashAttentionTriton_keeps_dtypes(dtype):
    (q, k, v, do), r = prepared((1, 2, 20, 16), (1, 2, 25, 16), True, dtype)
    leaves, saved = [x.requires_grad_() for x in (q, k, v)], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = flash.FlashAttentionTriton.apply(*leaves, True)
    expect_as_exact((o.detach(), *torch.autograd.grad((o * do).sum(), leaves)), r, dtype)
    found = [str(x.dtype) for x in saved if x.shape == q.shape[:-1]]
    expect_equal(found, ["torch.float32"], name="dtype of the saved logsumexp", read=LSE)


def test_FlashAttentionTriton_saves_its_inputs_and_no_copies():
    saved = []
    q, k, v, _ = (x.transpose(1, 2) for x in make_inputs((1, 35, 2, 16), (1, 43, 2, 16), torch.float32, DEVICE))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    case("q, k, v as [B, T, H, D] transposed: are the saved ones those, or copies of them?")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        flash.FlashAttentionTriton.apply(*leaves, True)
    places = {x.data_ptr() for x in saved}
    copied = [name for name, x in zip("qkv", leaves, strict=True) if x.data_ptr() not in places]
    problem = (
        f"copies of {', '.join(copied)} are saved, which live until the backward pass beside what they were copied from"
    )
    expect_true(not copied, problem, answer=copied, read="the contract of ex-flash-attention-flashattentiontorch")


def test_FlashAttentionTriton_takes_row_sums_beyond_float16():
    q, k, v, do = make_inputs((1, 1, 20, 16), (1, 1, 25, 16), torch.float32, DEVICE)
    q, k, v, do = q.half(), k.half(), (v + 256).half(), (do + 256).half()
    case(
        "float16, values and gradients about 256: a row's sum of o * do is about 1,000,000, and float16 ends at 65,504"
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = flash.FlashAttentionTriton.apply(*leaves, True)
    gradients = torch.autograd.grad((o.float() * do.float()).sum(), leaves)
    finite = [bool(x.isfinite().all()) for x in gradients]
    read = "the contract of ex-flash-attention-flash-backward-dq-kernel: each row's sum of o * do is float32"
    expect_equal(finite, [True] * 3, name="whether dq, dk and dv are finite", read=read)


def test_FlashAttentionTriton_of_no_keys():
    q, k, v, _ = make_inputs((1, 2, 5, 16), (1, 2, 0, 16), torch.float32, DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    case("q (1, 2, 5, 16), k and v (1, 2, 0, 16): zeros, and gradients of zero")
    o = flash.FlashAttentionTriton.apply(*leaves, False)
    expect_close(o.detach(), torch.zeros_like(q), read=NO_KEYS)
    expect_close(torch.autograd.grad(o.sum(), leaves), tuple(torch.zeros_like(x) for x in leaves), read=NO_KEYS)


def test_FlashAttentionTriton_refuses_a_second_derivative():
    refuses_a_second_derivative(flash.FlashAttentionTriton.apply, DEVICE)


def test_FlashAttentionTriton_errors():
    q, k, v, _ = make_inputs((1, 3, 20, 16), (1, 2, 20, 16), torch.float32, DEVICE)
    case("3 heads of queries, 2 of keys")
    with expect_raises(ValueError, read="the contract"):
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
    return o.detach(), *torch.autograd.grad((o * do).sum(), leaves)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_flash_attention_by_descriptors(width, is_causal, dtype):
    if DEVICE == "cuda" and (torch.cuda.get_device_capability()[0] < 9 or width == 32):
        pytest.skip("the fast path wants a Hopper GPU and width 64 or 128")
    heads = 2 if DEVICE == "cuda" else 1  # the interpreter is slow, and width 32 has heads enough
    shapes = (1, heads, 128, width), (1, 1, 256 if DEVICE == "cuda" or (width == 64 and is_causal) else 128, width)
    shapes = ((2, 4, 32, 32), (2, 2, 64, 32)) if width == 32 else shapes
    (q, k, v, do), r = prepared(*shapes, is_causal=is_causal, dtype=dtype)
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
