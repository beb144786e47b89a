"""The kernel, graded: interpreted on a CPU, compiled on a GPU, in guarded memory as in chapter 14."""

import pytest
import torch

from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON
from lib.workbook.grading import case, expect_close, expect_raises, expect_true, graded
from tests.chapter_14.memory import DEVICE, layouts, run
from tests.chapter_24.forms import Operators, expected, inputs

la = graded("linear_attention")
pytestmark = [pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON), pytest.mark.time_limit(60)]

DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
counted = pytest.mark.skipif(not INTERPRETED, reason="accesses are counted in the interpreter")
CHUNK, STEP = "eq-linear_attention-4", "eq-linear_attention-6"
RETURNS, RAISES, COST = (f"the contract, under {part}" for part in ("Returns", "Raises", "Cost"))


def arguments(length, decay="head", batch=2, heads=2, dk=4, dv=5, dtype=torch.float32, start=True) -> list:
    """q, k, v, g, scale and the initial state; g and the state stay in float32."""
    given = {name: x.detach().to(DEVICE) for name, x in inputs(length, decay, batch, heads, dk, dv).items()}
    q, k, v = (given[name].to(dtype) for name in "qkv")
    g = given["g"].float() if "g" in given else None
    return [q, k, v, g, None, given["initial_state"].float() if start else None]


def check(args: list, read=CHUNK, chunk_size=16):
    """Outputs and state of the kernel beside the recurrence in float64."""
    (out, state), seen = run(la.chunk_linear_attention, *args, chunk_size=chunk_size)
    given = {"q": args[0], "k": args[1], "v": args[2], "g": args[3], "initial_state": args[5]}
    aim, last = expected({name: x for name, x in given.items() if x is not None}, args[4])
    dtype, loose = args[0].dtype, TOLERANCE[args[0].dtype]
    expect_close(out, aim.to(dtype), atol=loose, rtol=loose, answer=(out, state), read=read)
    expect_close(state, last.float(), atol=loose, rtol=loose, name="state", answer=(out, state), read=read)
    return out, state, seen


def test_chunk_linear_attention_by_hand():
    case("T=2 Dk=1 Dv=2, scale 1, decays 1/2 and 1/4, initial state (8, 16)")
    q, k = (torch.tensor(x, device=DEVICE).view(1, 2, 1, 1) for x in ([1.0, 2.0], [1.0, 3.0]))
    v = torch.tensor([[4.0, 8.0], [2.0, 6.0]], device=DEVICE).view(1, 2, 1, 2)
    g = torch.tensor([0.5, 0.25], device=DEVICE).log().view(1, 2, 1)
    start = torch.tensor([8.0, 16.0], device=DEVICE).view(1, 1, 1, 2)
    found, _ = run(la.chunk_linear_attention, q, k, v, g, 1.0, start, 16)
    # states (4 + 4, 8 + 8) and (2 + 6, 4 + 18)
    aim = torch.tensor([[8.0, 16.0], [16.0, 44.0]], device=DEVICE).view(1, 2, 1, 2)
    expect_close(found, (aim, torch.tensor([8.0, 22.0], device=DEVICE).view(1, 1, 1, 2)), rtol=1e-5, read=CHUNK)


@by_dtype
@pytest.mark.parametrize("decay", ["none", "head"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (35, 7, 19), (32, 16, 33)], ids=str)
def test_chunk_linear_attention_of_ragged_sizes(sizes, decay, dtype):
    length, dk, dv = sizes
    case(f"B=2 T={length} H=2 Dk={dk} Dv={dv}, chunks of 16, decay: {decay}, {dtype}")
    check(arguments(length, decay, dk=dk, dv=dv, dtype=dtype), STEP if length > 16 else CHUNK)


def test_chunk_linear_attention_without_an_initial_state():
    case("B=1 T=20 H=3, no initial state, chunks of 32; scale=0.25")
    args = arguments(20, heads=3, batch=1, start=False)
    args[4] = 0.25
    check(args, chunk_size=32)


def test_chunk_linear_attention_of_other_strides():
    names = ("transposed", "every second column", "rows further apart")
    for i, which in enumerate("qkv"):
        args = arguments(18)
        for name in names if i == 0 else names[:1]:
            case(f"B=2 T=18 H=2 Dk=4 Dv=5: {which} {name}")
            other = list(args)
            other[i] = layouts(args[i])[name]
            check(other, "the contract, under Args")
    case("B=2 T=18 H=2: g transposed, and one column of q expanded")
    args = arguments(18)
    args[0], args[3] = layouts(args[0])["one column expanded"], layouts(args[3])["transposed"]
    check(args, "the contract, under Args")
    case("B=2 T=18 H=2 Dk=4 Dv=5: the initial state transposed")
    args = arguments(18)
    args[5] = layouts(args[5])["transposed"]
    check(args, "the contract, under Args")


def test_chunk_linear_attention_of_wide_heads():
    case("B=1 T=17 H=1 Dk=256 Dv=70, float32")
    check(arguments(17, batch=1, heads=1, dk=256, dv=70))


def test_chunk_linear_attention_does_not_overflow():
    case("T=40, chunks of 64, g of -40 a step: exp(40 x 39) is infinite")
    args = arguments(40)
    args[3] = torch.full_like(args[3], -40.0)
    check(args, "eq-linear_attention-4", 64)


def test_chunk_linear_attention_keeps_the_state_in_float32():
    case("T=20 Dk=2 Dv=1, float16, an initial state of (2049, 2048), which float16 cannot tell apart, and q (1, -1)")
    q = torch.tensor([1.0, -1.0], dtype=torch.float16, device=DEVICE).expand(1, 20, 1, 2)
    zeros = torch.zeros(1, 20, 1, 2, dtype=torch.float16, device=DEVICE)
    start = torch.tensor([2049.0, 2048.0], device=DEVICE).view(1, 1, 2, 1)
    found, _ = run(la.chunk_linear_attention, q, zeros, zeros[..., :1], None, 1.0, start, 16)
    expect_close(found, (torch.ones_like(zeros[..., :1]), start), rtol=0, atol=0, read=RETURNS)


def test_chunk_linear_attention_is_exact_to_float32():
    case("factors 1 + 2**-12, which TF32 rounds to 1")
    args = arguments(16, "none", batch=1, heads=1, dk=16, dv=16, start=False)
    args[:3] = [torch.full_like(x, 1 + 2.0**-12) for x in args[:3]]
    out, state, seen = check(args)
    asked = sorted({precision.lower() for dtype, precision in seen.dots if dtype == "fp32"} - {"ieee"} if seen else ())
    problem = f"tl.dot of float32 tiles runs with input_precision {', '.join(asked)} on a GPU: expected 'ieee'"
    expect_true(not asked, problem, answer=(out, state), read=RETURNS)


@pytest.mark.parametrize("shape", [(0, 2, 2), (2, 0, 2), (2, 3, 0)], ids=str)
def test_chunk_linear_attention_of_nothing(shape):
    batch, length, heads = shape
    case(f"B={batch} T={length} H={heads}")
    args = arguments(length, batch=batch, heads=heads)
    out, state = la.chunk_linear_attention(*args)
    expect_close((out, state), (args[2], args[5]), read=RETURNS)
    expect_true(
        state.data_ptr() != args[5].data_ptr() or not state.numel(),
        "the initial state itself is returned",
        read=RETURNS,
    )


def test_chunk_linear_attention_refuses():
    args = arguments(6)
    la.chunk_linear_attention(*args)
    case("a decay for each feature")
    with expect_raises(ValueError, "(2, 6, 2, 4)", read=RAISES):
        la.chunk_linear_attention(*args[:3], torch.zeros(2, 6, 2, 4, device=DEVICE))
    case("a g of another shape")
    with expect_raises(ValueError, "(2, 6, 1)", read=RAISES):
        la.chunk_linear_attention(*args[:3], args[3][..., :1])
    for size in (8, 24, 0):
        case(f"chunk_size={size}")
        with expect_raises(ValueError, "chunk_size", str(size), read=RAISES):
            la.chunk_linear_attention(*args[:3], chunk_size=size)


@counted
def test_chunk_linear_attention_copies_nothing():
    case("B=1 T=20 H=2 Dk=4 Dv=5, q, k and v transposed views: the tensors that the kernel gets")
    args = arguments(20, batch=1)
    views = [layouts(x)["transposed"] for x in args[:3]]
    found, seen = run(la.chunk_linear_attention, *views, *args[3:], chunk_size=16)
    shapes = {tuple(x.shape) for x in views[:2]}
    copies = [t for _, _, given in seen.launches for t in given if tuple(t.shape) in shapes and t.is_contiguous()]
    problem = "q, k or v was copied to make it contiguous: the kernel can use its strides"
    expect_true(not copies, problem, answer=found, read=COST)


@counted
def test_chunk_linear_attention_is_one_kernel():
    case("B=1 T=40 H=2 Dk=8 Dv=32, chunks of 16: launches, programs, products by PyTorch, and what is read and written")
    args = arguments(40, batch=1, dk=8, dv=32)
    with Operators() as seen_by_pytorch:
        found, seen = run(la.chunk_linear_attention, *args, chunk_size=16)
    out = found[0]
    products = {
        n for n in seen_by_pytorch.names if n in ("mm", "bmm", "addmm", "baddbmm", "mul", "exp", "cumsum", "einsum")
    }
    expect_true(not products, f"PyTorch computes {', '.join(sorted(products))}", answer=found, read=COST)
    expect_true(len(seen.launches) == 1, f"{len(seen.launches)} launches, expected 1", answer=found, read=COST)
    expect_true(
        seen.n_programs == 4, f"{seen.n_programs} programs, expected 2 heads x 2 slices", answer=found, read=COST
    )
    counts = seen.count(out, stores=True)
    expect_true(
        counts.min() == counts.max() == 1, "an output is stored more than once, or never", answer=found, read=COST
    )
    states = 2 * 8 * 32  # numbers of the state, which are read and written once
    allowed = 4 * (2 * 2 * (40 * 2 * 8) + 40 * 2 * 32 + 2 * 40 * 2 + states)
    enough = f"{allowed:,} are enough: q, k and g for each slice, v and the state once"
    problem = f"{seen.bytes_loaded:,} bytes are loaded, where {enough}"
    expect_true(seen.bytes_loaded <= allowed, problem, answer=found, read=COST)
    problem = f"{seen.bytes_stored:,} bytes are stored, where outputs and state have {4 * (40 * 64 + states):,}"
    expect_true(seen.bytes_stored == 4 * (40 * 64 + states), problem, answer=found, read=COST)
