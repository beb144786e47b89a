"""Kernels, graded: interpreted on a CPU, compiled on a GPU, by the same tests.

Every call runs in guarded memory (`memory.run`): a load or store outside a tensor fails, whatever the numbers.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON, matmul_tiles
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from tests.chapter_14.memory import DEVICE, layouts, run, watch

kernels = graded("triton_kernels")
pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON),
    pytest.mark.time_limit(60),
]  # the first imports Triton

DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
counted = pytest.mark.skipif(not INTERPRETED, reason="accesses are counted in the interpreter")
ADD, SUM, GRADS, SOFTMAX, GROUPS, NORM = (f"eq-triton_kernels-{n}" for n in (1, 2, 3, 4, 5, 6))
COST = "the contract, under Cost"
PRODUCTS = 'the section "Products, in tiles"'


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def tensor(values, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def close(actual, expected, dtype, read, n_terms=1, **more) -> None:
    """Within the rounding of the result's dtype, and of float32 sums of ``n_terms`` numbers."""
    scale = expected.abs().amax().item() if expected.numel() else 0.0
    atol = TOLERANCE[dtype] * 0.1 + 1e-6 * n_terms**0.5 * max(scale, 1.0)
    expect_close(actual, expected.to(dtype), rtol=TOLERANCE[dtype], atol=atol, read=read, **more)


def elsewhere(call) -> torch.Tensor:
    """What a call returns while PyTorch makes its tensors on "meta", where no kernel finds them, unless told
    otherwise.
    """
    try:
        with torch.device("meta"):
            out = call()
    except Exception as error:
        if "meta" not in str(error):
            raise
        out = None
    problem = "a tensor is made on PyTorch's default device: it needs device=x.device"
    expect_true(out is not None and out.device.type == DEVICE, problem, read="the contract")
    return out


def by_kernels(seen, out, inputs=1) -> None:
    """A kernel wrote each element of the result once."""
    counts = seen.count(out, stores=True)
    expect_true(len(seen.launches) > 0, "no kernel was launched", answer=out, read=COST)
    expect_true(
        len(seen.launches) <= inputs, f"{len(seen.launches)} launches, expected {inputs}", answer=out, read=COST
    )
    stores = (
        f"a kernel must store each element of the result once; they were stored {counts.min()} to {counts.max()} times"
    )
    expect_true(counts.min() == counts.max() == 1, stores, answer=out, read=COST)


def loads_once(seen, n_elements: int, item_bytes: int, extra: int, out) -> None:
    """No more bytes are loaded than the elements once, and ``extra``."""
    allowed = n_elements * item_bytes + extra
    more = f"{seen.bytes_loaded:,} bytes were loaded, where {allowed:,} are enough"
    expect_true(seen.bytes_loaded <= allowed, more, answer=out, read=COST)


# ---- vector_add ------------------------------------------------------------------------------------------------------


def test_vector_add_by_hand():
    case("three numbers: one program, most of it masked")
    out, _ = run(kernels.vector_add, tensor([1.0, 2.0, 4.0]), tensor([10.0, 20.0, 40.0]))
    expect_close(out, tensor([11.0, 22.0, 44.0]), read=ADD)


@by_dtype
@pytest.mark.parametrize("shape", [(1,), (257,), (3, 5, 67), (2, 4096)], ids=str)
def test_vector_add_of_ragged_sizes(shape, dtype):
    case(f"{shape}, {dtype}")
    x, y = randn(*shape, dtype=dtype), randn(*shape, seed=1, dtype=dtype)
    out, _ = run(kernels.vector_add, x, y)
    expect_close(out, x + y, rtol=0, atol=0, read=ADD)


def test_vector_add_of_other_strides():
    x, y = randn(9, 14), randn(9, 14, seed=1)
    for name, view in layouts(x).items():
        case(f"x [9, 14] {name}, y contiguous")
        expect_close(run(kernels.vector_add, view, y)[0], view + y, read="the contract")


def test_vector_add_stays_on_the_device_of_x():
    case("x [9, 14], while PyTorch's default device is another one")
    x, y = randn(9, 14), randn(9, 14, seed=1)
    expect_close(elsewhere(lambda: kernels.vector_add(x, y)), x + y, read="the contract")


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0), ()], ids=str)
def test_vector_add_of_nothing_and_of_one_number(shape):
    case(f"shape {shape}")
    out, _ = run(kernels.vector_add, torch.ones(shape, device=DEVICE), torch.ones(shape, device=DEVICE))
    expect_close(out, torch.full(shape, 2.0, device=DEVICE), read="the contract")


def test_vector_add_refuses_other_shapes():
    case("x [3], y [1]: there is no broadcasting")
    run(kernels.vector_add, randn(3), randn(3))
    with expect_raises(ValueError, "(3,)", "(1,)", read="the contract, under Raises"):
        run(kernels.vector_add, randn(3), randn(1))


@counted
def test_vector_add_reads_and_writes_once():
    case("[1000], float32: 8000 bytes in, 4000 bytes out")
    out, seen = run(kernels.vector_add, randn(1000), randn(1000, seed=1))
    by_kernels(seen, out)
    loads_once(seen, 2000, 4, 0, out)
    expect_true(seen.n_programs > 1, "one program does all the work: a GPU has many processors", answer=out, read=ADD)


# ---- weighted_sum ----------------------------------------------------------------------------------------------------


def test_weighted_sum_by_hand():
    case("x [2, 3], weight [1, 10, 100]")
    out, _ = run(kernels.weighted_sum, tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), tensor([1.0, 10.0, 100.0]))
    expect_close(out, tensor([321.0, 654.0]), read=SUM)


@by_dtype
@pytest.mark.parametrize("shape", [(1, 1), (21, 50), (2, 3, 17), (5,), (3, 600)], ids=str)
def test_weighted_sum_of_ragged_sizes(shape, dtype):
    case(f"x {shape}, {dtype}")
    x, w = randn(*shape, dtype=dtype), randn(shape[-1], seed=1, dtype=dtype)
    out, _ = run(kernels.weighted_sum, x, w)
    close(out, x.double() @ w.double(), dtype, SUM, shape[-1])


def test_weighted_sum_adds_in_float32():
    case("2048 and fifty ones in float16, where 2048 + 1 is 2048")
    x, w = torch.ones(1, 51, dtype=torch.float16, device=DEVICE), torch.ones(51, dtype=torch.float16, device=DEVICE)
    x[0, 0] = 2048
    expect_close(run(kernels.weighted_sum, x, w)[0], tensor([2098.0], torch.float16), rtol=0, atol=0, read=SUM)


def test_weighted_sum_gradients_by_hand():
    case("x [2, 2] = [[1, 2], [3, 4]], weight [10, 20], gradient of the output [1, 100]")
    x, w = tensor([[1.0, 2.0], [3.0, 4.0]]).requires_grad_(), tensor([10.0, 20.0]).requires_grad_()
    out, _ = watch(lambda: kernels.weighted_sum(x, w))
    expect_true(out.requires_grad, "the result is cut off from the graph", answer=out, read=GRADS)
    grads, _ = watch(lambda: torch.autograd.grad(out, (x, w), tensor([1.0, 100.0])))
    expect_close(grads[1], tensor([301.0, 402.0]), name="weight.grad", read=GRADS)
    expect_close(grads[0], tensor([[10.0, 20.0], [1000.0, 2000.0]]), name="x.grad", read=GRADS)


@by_dtype
@pytest.mark.parametrize("shape", [(21, 50), (2, 3, 17), (3, 600), (0, 5), (5, 0), (3, 0, 4)], ids=str)
def test_weighted_sum_gradients_of_ragged_sizes(shape, dtype):
    case(f"x {shape}, {dtype}")
    x, w = randn(*shape, dtype=dtype).requires_grad_(), randn(shape[-1], seed=1, dtype=dtype).requires_grad_()
    grad = randn(*shape[:-1], seed=2, dtype=dtype)
    out, _ = run(kernels.weighted_sum, x, w)
    close(out.detach(), x.detach().double() @ w.detach().double(), dtype, SUM, shape[-1])
    out, _ = watch(lambda: kernels.weighted_sum(x, w))
    grads, _ = watch(lambda: torch.autograd.grad(out, (x, w), grad))
    wide_x, wide_g = x.detach().double(), grad.double()
    close(grads[0], wide_g[..., None] * w.detach().double(), dtype, GRADS, name="x.grad")
    expected = (wide_g[..., None] * wide_x).reshape(-1, shape[-1]).sum(0) if x.numel() else torch.zeros_like(w).double()
    close(grads[1], expected, dtype, GRADS, max(1, grad.numel()), name="weight.grad")


@counted
def test_weighted_sum_adds_without_atomics():
    case("x [20, 9], both passes: the weight's gradient is added over three tiles of rows")
    x, w = randn(20, 9).requires_grad_(), randn(9, seed=1).requires_grad_()
    out, forward = run(kernels.weighted_sum, x, w)
    out, _ = watch(lambda: kernels.weighted_sum(x, w))
    grads, backward = watch(lambda: torch.autograd.grad(out, (x, w), randn(20, seed=2)))
    for name, seen in (("forward", forward), ("backward", backward)):
        problem = f"the {name} pass makes {seen.n_atomics} atomic operations, whose order changes from run to run"
        expect_true(seen.n_atomics == 0, f"{problem}: expected none", answer=grads[1], read=GRADS)


def test_weighted_sum_gradient_that_is_not_contiguous():
    case("out.sum().backward(): the gradient is one number, expanded; x transposed")
    x, w = randn(12, 9).T.detach().requires_grad_(), randn(12, seed=1).requires_grad_()
    watch(lambda: kernels.weighted_sum(x, w).sum().backward())
    close(w.grad, x.detach().double().sum(0), torch.float32, GRADS, 9, name="weight.grad")
    close(x.grad, w.detach().double().expand(9, 12), torch.float32, GRADS, name="x.grad")


def test_weighted_sum_gradient_adds_many_rows_in_float32():
    case("rows of 2048 and of fifty ones in float16, where 2048 + 1 is 2048: the weight's gradient is 2098")
    x, w = (torch.ones(n, dtype=torch.float16, device=DEVICE) for n in ((51, 1), (1,)))
    x[0] = 2048
    w.requires_grad_()
    (grad,), _ = watch(lambda: torch.autograd.grad(kernels.weighted_sum(x, w).float().sum(), w))
    expect_close(grad, tensor([2098.0], torch.float16), rtol=0, atol=0, name="weight.grad", read=GRADS)


def test_weighted_sum_of_other_strides():
    x, w = randn(9, 14), randn(14, seed=1)
    for name, view in layouts(x).items():
        case(f"x [9, 14] {name}")
        out, _ = run(kernels.weighted_sum, view, w)
        close(out, view.double() @ w.double(), torch.float32, SUM, 14)
    case("x [9, 14], weight [14]: every second number of a vector")
    weight = torch.stack([w, torch.full_like(w, 7.0)], dim=1).flatten().requires_grad_()
    out, _ = run(kernels.weighted_sum, x, weight[::2])
    close(out, x.double() @ w.double(), torch.float32, SUM, 14)
    watch(lambda: kernels.weighted_sum(x, weight[::2]).sum().backward())
    close(weight.grad[::2], x.double().sum(0), torch.float32, GRADS, 9, name="weight.grad")
    case(
        "x [3, 4, 14], the transpose of [4, 3, 14]: its rows don't lie one after another, and `view` cannot flatten it"
    )
    cube = randn(4, 3, 14, seed=2).transpose(0, 1)
    close(run(kernels.weighted_sum, cube, w)[0], cube.double() @ w.double(), torch.float32, SUM, 14)


def test_weighted_sum_stays_on_the_device_of_x():
    case("x [9, 14], while PyTorch's default device is another one")
    x, w = randn(9, 14), randn(14, seed=1)
    close(elsewhere(lambda: kernels.weighted_sum(x, w)), x.double() @ w.double(), torch.float32, SUM, 14)


def test_weighted_sum_refuses_a_weight_of_other_length():
    case("x [2, 3], weight [1]")
    run(kernels.weighted_sum, randn(2, 3), randn(3))
    with expect_raises(ValueError, "(2, 3)", "(1,)", read="the contract, under Raises"):
        run(kernels.weighted_sum, randn(2, 3), randn(1))
    case("both are scalars")
    with expect_raises(ValueError, "()", read="the contract, under Raises"):
        run(kernels.weighted_sum, randn(), randn())


@counted
def test_weighted_sum_reads_x_once_in_each_direction():
    case("x [100, 40]: 16,000 bytes; a program may read the weight again for each of its tiles")
    x, w = randn(100, 40).requires_grad_(), randn(40, seed=1).requires_grad_()
    out, seen = run(kernels.weighted_sum, x, w)
    by_kernels(seen, out)
    loads_once(seen, 4000, 4, seen.n_programs * 160, out)
    expect_true(
        1 < seen.n_programs < 100,
        f"{seen.n_programs} programs for 100 rows: expected tiles of rows",
        answer=out,
        read=SUM,
    )
    out, _ = watch(lambda: kernels.weighted_sum(x, w))
    grads, seen = watch(lambda: torch.autograd.grad(out, (x, w), randn(100, seed=2)))
    by_kernels(seen, grads[0])
    loads_once(seen, 4000, 4, seen.n_programs * 160 + 400, grads[0])


def test_weighted_sum_refuses_a_second_derivative():
    case(
        "the gradient of out.sum() with respect to x is the weight: a second derivative would silently leave the "
        "weight out"
    )
    x, w = randn(3, 5).requires_grad_(), randn(5, seed=1).requires_grad_()
    out, seen = run(kernels.weighted_sum, x, w)
    if seen:
        by_kernels(seen, out)
    (grad,), _ = watch(lambda: torch.autograd.grad(kernels.weighted_sum(x, w).sum(), x, create_graph=True))
    close(grad.detach(), w.detach().double().expand(3, 5), torch.float32, GRADS, name="x.grad")
    with expect_raises(RuntimeError, read="the contract, under Raises"):
        torch.autograd.grad(grad.square().sum() + w.sum(), w)


def test_weighted_sum_refuses_a_second_derivative_along_the_gradient_from_above():
    case("x.grad is the gradient from above times the weight, and is differentiated with respect to the former")
    x, w, above = randn(3, 5).requires_grad_(), randn(5, seed=1), randn(3, seed=2).requires_grad_()
    (grad,), _ = watch(lambda: torch.autograd.grad(kernels.weighted_sum(x, w), x, above, create_graph=True))
    with expect_raises(RuntimeError, read="the contract, under Raises"):
        torch.autograd.grad(grad.sum() + above.sum(), above)


# ---- softmax_rows ----------------------------------------------------------------------------------------------------


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.double(), dim=-1).nan_to_num(0.0)


def test_softmax_rows_by_hand():
    case("rows [0, ln 3] and [ln 4, 0]")
    out, _ = run(kernels.softmax_rows, tensor([[0.0, 3.0], [4.0, 1.0]]).clamp_min(1.0).log())
    expect_close(out, tensor([[0.25, 0.75], [0.8, 0.2]]), read=SOFTMAX)


@by_dtype
@pytest.mark.parametrize("shape", [(1, 1), (5, 17), (3, 64), (2, 1000)], ids=str)
def test_softmax_rows_of_ragged_sizes(shape, dtype):
    case(f"{shape}, {dtype}")
    x = randn(*shape, dtype=dtype) * 3
    out, _ = run(kernels.softmax_rows, x)
    close(out, softmax(x), dtype, SOFTMAX)


def test_softmax_rows_of_negative_scores():
    case("scores near -200: places beyond the end of a row must not count")
    x = randn(4, 11) - 200
    expect_close(run(kernels.softmax_rows, x)[0], softmax(x).float(), rtol=1e-4, read=SOFTMAX)
    case("11 scores of -1e30: each weight is 1/11")
    x = torch.full((4, 11), -1e30, device=DEVICE)
    expect_close(run(kernels.softmax_rows, x)[0], torch.full_like(x, 1 / 11), rtol=1e-4, read=SOFTMAX)


def test_softmax_rows_of_large_scores():
    case("scores up to 1000: exp(1000) is no float32")
    x = randn(4, 11) * 300
    expect_close(run(kernels.softmax_rows, x)[0], softmax(x).float(), rtol=1e-4, read=SOFTMAX)


def test_softmax_rows_of_hidden_scores():
    case("3 rows of 7: row 0 half hidden, row 1 all -inf (zeros by the convention), row 2 with a single score")
    x = randn(3, 7)
    x[0, ::2] = x[1] = x[2, 1:] = -torch.inf
    expect_close(run(kernels.softmax_rows, x)[0], softmax(x).float(), rtol=1e-5, read="the contract, under Convention")


def test_softmax_rows_sums_in_float32():
    case("4096 equal scores in float16: each weight is 1/4096")
    x = torch.zeros(1, 4096, dtype=torch.float16, device=DEVICE)
    expect_close(run(kernels.softmax_rows, x)[0], torch.full_like(x, 1 / 4096), rtol=1e-3, atol=0, read=SOFTMAX)


def test_softmax_rows_rounds_once():
    case("(8, 300), float16: within half of a float16's last place of the exact result, and 2 % for float32's rounding")
    x = randn(8, 300, dtype=torch.float16)
    out, _ = run(kernels.softmax_rows, x)
    expect_close(out.float(), softmax(x).float(), rtol=0.51 * 2**-10, atol=0.51 * 2**-24, answer=out, read=SOFTMAX)


def test_softmax_rows_of_other_strides():
    x = randn(9, 14)
    for name, view in layouts(x).items():
        case(f"x [9, 14] {name}")
        expect_close(run(kernels.softmax_rows, view)[0], softmax(view).float(), rtol=1e-5, read="the contract")


def test_softmax_rows_stays_on_the_device_of_x():
    case("x [9, 14], while PyTorch's default device is another one")
    x = randn(9, 14)
    expect_close(elsewhere(lambda: kernels.softmax_rows(x)), softmax(x).float(), rtol=1e-5, read="the contract")


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)], ids=str)
def test_softmax_rows_of_nothing(shape):
    case(f"shape {shape}")
    expect_close(run(kernels.softmax_rows, randn(*shape))[0], randn(*shape), read="the contract")


def test_softmax_rows_refuses_a_vector():
    case("x [5]")
    run(kernels.softmax_rows, randn(2, 5))
    with expect_raises(ValueError, "(5,)", read="the contract, under Raises"):
        run(kernels.softmax_rows, randn(5))


@counted
def test_softmax_rows_passes_over_memory_once():
    case("[20, 50]: 4000 bytes in, 4000 bytes out")
    out, seen = run(kernels.softmax_rows, randn(20, 50))
    by_kernels(seen, out)
    loads_once(seen, 1000, 4, 0, out)


# ---- matmul ----------------------------------------------------------------------------------------------------------


def test_matmul_by_hand():
    case("[1, 2] @ [2, 3]")
    out, _ = run(kernels.matmul, tensor([[1.0, 10.0]]), tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    expect_close(out, tensor([[41.0, 52.0, 63.0]]), read=PRODUCTS)


@counted
def test_matmul_walks_the_tiles_in_groups():
    tiles = matmul_tiles(torch.float32)
    m, n = 8 * tiles.m - 3, 2 * tiles.n - 5
    case(f"[{m}, 2] @ [2, {n}]: 8 x 2 tiles in groups of {tiles.group} rows, the last group of {8 % tiles.group}")
    out, seen = run(kernels.matmul, randn(m, 2), randn(2, n))
    corners = seen.writer(out)[:: tiles.m, :: tiles.n]
    expected = [[0] * 2 for _ in range(8)]
    order = [(r, c) for g in range(0, 8, tiles.group) for c in range(2) for r in range(g, min(g + tiles.group, 8))]
    for program, (row, column) in enumerate(order):
        expected[row][column] = program
    by_kernels(seen, out)
    expect_equal(corners.tolist(), expected, name="program that wrote tile", read=GROUPS)


@by_dtype
@pytest.mark.parametrize("sizes", [(1, 1, 1), (33, 17, 50), (70, 70, 70), (100, 5, 40)], ids=str)
def test_matmul_of_ragged_sizes(sizes, dtype):
    m, k, n = sizes
    case(f"[{m}, {k}] @ [{k}, {n}], {dtype}")
    a, b = randn(m, k, dtype=dtype), randn(k, n, seed=1, dtype=dtype)
    out, _ = run(kernels.matmul, a, b)
    tiles = matmul_tiles(dtype)
    read = PRODUCTS if m <= tiles.m * tiles.group else f"{PRODUCTS}; for the last group, {GROUPS}"
    close(out, a.double() @ b.double(), dtype, read, k)


def test_matmul_adds_in_float32():
    case("2048 and fifty ones in float16, where 2048 + 1 is 2048")
    a, b = torch.ones(1, 51, dtype=torch.float16, device=DEVICE), torch.ones(51, 1, dtype=torch.float16, device=DEVICE)
    a[0, 0] = 2048
    expect_close(run(kernels.matmul, a, b)[0], tensor([[2098.0]], torch.float16), rtol=0, atol=0, read="the contract")


def test_matmul_is_exact_to_float32():
    case("factors 1 + 2**-12, which TF32 rounds to 1")
    a = torch.full((16, 16), 1 + 2.0**-12, device=DEVICE)
    out, seen = run(kernels.matmul, a, a)
    expect_close(out, (a.double() @ a.double()).float(), rtol=1e-6, read="the contract")
    asked = sorted({precision.lower() for dtype, precision in seen.dots if dtype == "fp32"} - {"ieee"} if seen else ())
    problem = f"tl.dot of float32 tiles runs with input_precision {', '.join(asked)} on a GPU: expected 'ieee'"
    expect_true(not asked, problem, answer=out, read=PRODUCTS)


def test_matmul_of_other_strides():
    a, b = randn(19, 23), randn(23, 35, seed=1)
    for name, view in layouts(a).items():
        case(f"a [19, 23] {name}")
        close(run(kernels.matmul, view, b)[0], view.double() @ b.double(), torch.float32, "the contract", 23)
    for name, view in layouts(b).items():
        case(f"b [23, 35] {name}")
        close(run(kernels.matmul, a, view)[0], a.double() @ view.double(), torch.float32, "the contract", 23)


def test_matmul_stays_on_the_device_of_a():
    case("[9, 14] @ [14, 5], while PyTorch's default device is another one")
    a, b = randn(9, 14), randn(14, 5, seed=1)
    out = elsewhere(lambda: kernels.matmul(a, b))
    close(out, a.double() @ b.double(), torch.float32, "the contract", 14)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
def test_matmul_of_nothing(sizes):
    m, k, n = sizes
    case(f"[{m}, {k}] @ [{k}, {n}]: a sum of no terms is 0")
    expect_close(
        run(kernels.matmul, randn(m, k), randn(k, n))[0], torch.zeros(m, n, device=DEVICE), read="the contract"
    )


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3)), ((3,), (3, 2))], ids=str)
def test_matmul_refuses_shapes_that_do_not_fit(shapes):
    case(f"a {shapes[0]}, b {shapes[1]}")
    run(kernels.matmul, randn(2, 3), randn(3, 2))
    with expect_raises(ValueError, str(shapes[0]), str(shapes[1]), read="the contract, under Raises"):
        run(kernels.matmul, randn(*shapes[0]), randn(*shapes[1]))


@oracle
def test_matmul_of_any_sizes_and_orders():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    sizes = st.tuples(*[st.integers(0, 40)] * 3)

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(sizes, st.booleans(), st.booleans())
    def check(size, a_turned, b_turned):
        m, k, n = size
        case(f"[{m}, {k}] @ [{k}, {n}], transposed: {a_turned}, {b_turned}")
        a = randn(k, m).T if a_turned else randn(m, k)
        b = randn(n, k, seed=1).T if b_turned else randn(k, n, seed=1)
        close(run(kernels.matmul, a, b)[0], a.double() @ b.double(), torch.float32, PRODUCTS, max(k, 1))

    check()


@counted
def test_matmul_reads_what_a_tile_needs_and_copies_nothing():
    tiles = matmul_tiles(torch.float32)
    m, n, k = 2 * tiles.m + 1, tiles.n + 9, 2 * tiles.k + 3
    case(
        f"a [{m}, {k}], a transposed view, and b [{k}, {n}]: together the programs should read a twice and b three "
        "times"
    )
    a, b = randn(k, m).T, randn(k, n)
    out, seen = run(kernels.matmul, a, b)
    by_kernels(seen, out)
    loads_once(seen, 2 * m * k + 3 * k * n, 4, 0, out)
    copies = [t for _, _, given in seen.launches for t in given if tuple(t.shape) == (m, k) and t.is_contiguous()]
    expect_true(not copies, "a was copied to make it contiguous: the kernel can use its strides", answer=out, read=COST)


# ---- rms_norm --------------------------------------------------------------------------------------------------------


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def test_rms_norm_by_hand():
    case("x [[1, 7]], weight [1, 2], eps 0: the root mean square is 5")
    out, _ = run(kernels.rms_norm, tensor([[1.0, 7.0]]), tensor([1.0, 2.0]), 0.0)
    expect_close(out, tensor([[0.2, 2.8]]), rtol=1e-6, read=NORM)
    case("x [[1, 7]], weight [1, 2], eps 11: the mean square is 25, and the root of 36 is 6")
    out, _ = run(kernels.rms_norm, tensor([[1.0, 7.0]]), tensor([1.0, 2.0]), 11.0)
    expect_close(out, tensor([[1 / 6, 14 / 6]]), rtol=1e-6, read=NORM)


@by_dtype
@pytest.mark.parametrize("shape", [(1, 1), (5, 17), (2, 3, 64), (2, 1000), (7,)], ids=str)
def test_rms_norm_of_ragged_sizes(shape, dtype):
    case(f"x {shape}, {dtype}")
    x, w = randn(*shape, dtype=dtype), randn(shape[-1], seed=1, dtype=dtype)
    out, _ = run(kernels.rms_norm, x, w, eps=1e-5)
    close(out, norm(x, w, 1e-5), dtype, NORM)


def test_rms_norm_equals_pytorch():
    case("x [4, 33], the default eps, beside torch.nn.functional.rms_norm with 1e-5")
    x, w = randn(4, 33) / 100, randn(33, seed=1)
    expect_close(run(kernels.rms_norm, x, w)[0], F.rms_norm(x, (33,), w, 1e-5), rtol=1e-5, read=NORM)


def test_rms_norm_of_small_numbers():
    case("x of about 1e-3, where eps 1e-5 is larger than the mean square")
    x, w = randn(3, 10) * 1e-3, torch.ones(10, device=DEVICE)
    expect_close(run(kernels.rms_norm, x, w, 1e-5)[0], norm(x, w, 1e-5).float(), rtol=1e-5, read=NORM)


def test_rms_norm_of_zeros():
    case("a row of zeros gives zeros")
    x, w = torch.zeros(2, 5, device=DEVICE), torch.ones(5, device=DEVICE)
    expect_close(run(kernels.rms_norm, x, w)[0], x, read=NORM)


def test_rms_norm_computes_in_float32():
    case("x up to 1000 in float16: the square is no float16; and one rounding, at the end")
    x, w = randn(6, 40, dtype=torch.float16) * 300, randn(40, seed=1, dtype=torch.float16)
    out, _ = run(kernels.rms_norm, x, w)
    expected = norm(x, w, 1e-5).half()
    wrong = (out != expected).float().mean().item()
    expect_close(out, expected, rtol=2e-3, atol=1e-4, read=NORM)
    expect_true(wrong < 0.02, f"{wrong:.0%} of the results are rounded twice", answer=out, read="the contract")


def test_rms_norm_of_other_strides():
    x, w = randn(9, 14), randn(14, seed=1)
    for name, view in layouts(x).items():
        case(f"x [9, 14] {name}")
        expect_close(run(kernels.rms_norm, view, w)[0], norm(view, w, 1e-5).float(), rtol=1e-5, read="the contract")
    case("x [9, 14], weight [14]: every second number of a vector")
    every_second = torch.stack([w, torch.full_like(w, 7.0)], dim=1).flatten()[::2]
    expect_close(run(kernels.rms_norm, x, every_second)[0], norm(x, w, 1e-5).float(), rtol=1e-5, read="the contract")
    case(
        "x [3, 4, 14], the transpose of [4, 3, 14]: its rows don't lie one after another, and `view` cannot flatten it"
    )
    cube = randn(4, 3, 14, seed=2).transpose(0, 1)
    expect_close(run(kernels.rms_norm, cube, w)[0], norm(cube, w, 1e-5).float(), rtol=1e-5, read="the contract")


def test_rms_norm_stays_on_the_device_of_x():
    case("x [9, 14], while PyTorch's default device is another one")
    x, w = randn(9, 14), randn(14, seed=1)
    expect_close(elsewhere(lambda: kernels.rms_norm(x, w)), norm(x, w, 1e-5).float(), rtol=1e-5, read="the contract")


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (2, 0, 3)], ids=str)
def test_rms_norm_of_nothing(shape):
    case(f"shape {shape}")
    out, _ = run(kernels.rms_norm, randn(*shape), randn(shape[-1]))
    expect_close(out, randn(*shape), read="the contract")


def test_rms_norm_refuses_a_weight_of_other_length():
    case("x [2, 3], weight [1]")
    run(kernels.rms_norm, randn(2, 3), randn(3), 1e-5)
    with expect_raises(ValueError, "(2, 3)", "(1,)", read="the contract, under Raises"):
        run(kernels.rms_norm, randn(2, 3), randn(1))
    case("both are scalars")
    with expect_raises(ValueError, "()", read="the contract, under Raises"):
        run(kernels.rms_norm, randn(), randn())


@counted
def test_rms_norm_passes_over_memory_once():
    case("x [20, 50]: 4000 bytes in, 4000 bytes out; each program reads the weight")
    out, seen = run(kernels.rms_norm, randn(20, 50), randn(50, seed=1))
    by_kernels(seen, out)
    loads_once(seen, 1000, 4, seen.n_programs * 200, out)
