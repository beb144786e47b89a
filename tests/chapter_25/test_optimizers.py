"""Beyond AdamW, graded: directions, states and their bytes, products and their FLOPs, and matrices that ranks divide.

PyTorch's Muon and Adafactor, the singular value decomposition and ``FlopCounterMode`` are the oracles; for ranks it
is Muon on whole matrices.
"""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from solutions.training import AdamW
from tests.inputs import randn

opt = graded("optimizers")

STEEPEST, LION, FACTORS, RATE, CODE, SCHULZ, POLYNOMIAL, FLOPS, MUON, TRAFFIC = (
    f"eq-optimizers-{n}" for n in range(1, 11)
)
RAISES = "the contract, under Raises"
RETURNS = "the contract, under Returns"
ARGS = "the contract, under Args"
STATE = "the contract, under Attributes"
COST = "the contract, under Cost"
KELLER_JORDAN = (3.4445, -4.7750, 2.0315)
by_norm = pytest.mark.parametrize("norm", ["frobenius", "max", "spectral"])


def parameters(*shapes, dtype=torch.float32, seed: int = 0) -> list[nn.Parameter]:
    return [nn.Parameter(randn(*shape, dtype=dtype, seed=seed + i)) for i, shape in enumerate(shapes)]


def take_steps(optimizer, params: list[nn.Parameter], n_steps: int, scale: float = 1.0, first: int = 0) -> None:
    """Steps with the same gradients for everyone who asks for them."""
    for step in range(first, first + n_steps):
        for i, p in enumerate(params):
            p.grad = scale * randn(*p.shape, dtype=p.dtype, seed=100 * step + i)
        optimizer.step()


def values(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def expect_same_state(ours: dict, theirs: dict, names: list[str], read: str) -> None:
    expect_equal(sorted(ours), sorted(names), name="names in the state", read=read)
    for name in names:
        expect_close(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name]), name=f"state[{name!r}]", read=read)


def check_conduct(make, bad: list[dict]) -> None:
    """What every optimizer must do: groups, closures, parameters without a gradient, refused settings."""
    name = make.__name__
    case(f"{name}: one weight has no gradient, and a closure computes the other's")
    used, unused = parameters((4, 3), (3, 4))
    before = unused.detach().clone()
    optimizer = make([{"params": [used], "lr": 0.5}, {"params": [unused]}], lr=0.25)

    def closure():
        loss = (used**2).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    expect_true(
        loss is not None and loss.requires_grad,
        "step() returns the closure's loss, computed with gradients",
        read=RETURNS,
    )
    expect_close(unused.detach(), before, atol=0, rtol=0, name="the weight without a gradient", read=RETURNS)
    expect_true(unused not in optimizer.state, "a weight without a gradient got a state", read=STATE)
    expect_equal([group["lr"] for group in optimizer.param_groups], [0.5, 0.25], name="rates of the groups", read=ARGS)
    gradient = randn(4, 3, seed=7)
    used.grad = gradient.clone()
    optimizer.step()
    expect_close(used.grad, gradient, atol=0, rtol=0, name="the gradient after a step", read=RETURNS)
    case(f"{name}: a schedule sets the first group's lr to 0")
    optimizer.param_groups[0]["lr"], before = 0.0, used.detach().clone()
    optimizer.step()
    expect_close(used.detach(), before, atol=0, rtol=0, name="the weight with lr = 0", read=ARGS)
    for settings in bad:
        key, value = next(iter(settings.items()))
        case(f"{name} with {key} = {value}")
        with expect_raises(ValueError, key, read=RAISES):
            make(parameters((3, 4)), **settings)
        with expect_raises(ValueError, key, read=RAISES):
            make([{"params": parameters((3, 4)), **settings}])


def check_resumes(make, shapes, read: str = STATE) -> None:
    """Six steps in one go, and three, a new optimizer that loads the state, and three more: bit for bit."""
    case(f"{make.__name__}: six steps without a break and with one")
    straight, resumed = parameters(*shapes), parameters(*shapes)
    whole, first = make(straight), make(resumed)
    take_steps(whole, straight, 6)
    take_steps(first, resumed, 3)
    second = make(resumed)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    take_steps(second, resumed, 3, first=3)
    for i, (a, b) in enumerate(zip(values(resumed), values(straight), strict=True)):
        expect_close(a, b, atol=0, rtol=0, name=f"weight {i} after the break", read=read)


BAD: list[dict[str, Any]] = [{"lr": -0.1}, {"weight_decay": -0.1}]


# ---- steepest_direction ----------------------------------------------------------------------------------------------


def test_steepest_direction_by_hand():
    case("[[3, 0], [0, -4]]: norm 5; its signs; singular values 4 and 3")
    G = torch.tensor([[3.0, 0.0], [0.0, -4.0]])
    expect_close(
        opt.steepest_direction(G, "frobenius"), torch.tensor([[0.6, 0.0], [0.0, -0.8]]), name="frobenius", read=STEEPEST
    )
    expect_close(opt.steepest_direction(G, "max"), torch.tensor([[1.0, 0.0], [0.0, -1.0]]), name="max", read=STEEPEST)
    expect_close(
        opt.steepest_direction(G, "spectral"), torch.tensor([[1.0, 0.0], [0.0, -1.0]]), name="spectral", read=STEEPEST
    )
    case("[[2, 2, 1]]: one row, norm 3")
    row = torch.tensor([[2.0, 2.0, 1.0]])
    for norm, expected in (("frobenius", row / 3), ("max", torch.ones(1, 3)), ("spectral", row / 3)):
        expect_close(opt.steepest_direction(row, norm), expected, name=norm, read=STEEPEST)


@by_norm
@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3)], ids=str)
def test_steepest_direction_reaches_the_dual_norm(norm, shape):
    case(f"G {shape}, float64: D has norm 1 ({norm}), and sum(G D) is the dual norm")
    G = randn(*shape, dtype=torch.float64)
    given = G.clone()
    D = opt.steepest_direction(G, norm)
    expect_close(G, given, atol=0, rtol=0, name="G afterwards", answer=D, read=ARGS)
    s = torch.linalg.svdvals(G)
    dual = {"frobenius": G.norm(), "max": G.abs().sum(), "spectral": s.sum()}[norm]
    length = {"frobenius": D.norm(), "max": D.abs().max(), "spectral": torch.linalg.svdvals(D).max()}[norm]
    # the contract also allows an answer that is computed in float32
    expect_close((G * D).sum(), dual, rtol=1e-5, name="sum(G D)", answer=D, read=STEEPEST)
    one = torch.ones((), dtype=torch.float64)
    expect_close(length, one, rtol=1e-5, name=f"the {norm} norm of D", answer=D, read=STEEPEST)


@by_norm
def test_steepest_direction_of_zeros_and_of_low_rank(norm):
    case(f"zeros [3, 2], {norm}")
    expect_close(opt.steepest_direction(torch.zeros(3, 2), norm), torch.zeros(3, 2), read=RETURNS)
    if norm == "spectral":
        case("a matrix of rank 1: only one direction has a singular value that counts")
        # both matrices are exact in float32, so that an answer in float64 sees the same rank
        u, v = torch.tensor([[3.0], [-1.0], [4.0], [1.0], [-5.0], [9.0]]), torch.tensor([[2.0, -7.0, 1.0, 8.0]])
        expect_close(opt.steepest_direction(u @ v, norm), u @ v / (u.norm() * v.norm()), atol=1e-5, read=RETURNS)
        case("rank 2, float32: a singular value of about 1e-5 of the largest counts, and rounding errors do not")
        w, z = torch.tensor([[1.0], [3.0], [0.0], [-1.0], [0.0], [0.0]]), torch.tensor([[7.0, 2.0, 0.0, 0.0]])
        G = u @ v + w @ z * 2.0**-15
        expected = torch.tensor([1.0, 1.0, 0.0, 0.0])
        expect_close(
            torch.linalg.svdvals(opt.steepest_direction(G, norm)),
            expected,
            atol=1e-2,
            name="singular values",
            read=RETURNS,
        )


@by_norm
def test_steepest_direction_of_other_magnitudes_and_dtypes(norm):
    case(f"G times 1e-30 in float32, {norm}: its squares are 0 in float32")
    G = randn(4, 3)
    expect_close(opt.steepest_direction(1e-30 * G, norm), opt.steepest_direction(G, norm), atol=1e-4, read=RETURNS)
    for dtype in (torch.bfloat16, torch.float16):
        low = G.to(dtype)
        case(f"G in {dtype}, {norm}: computed in float32, returned in {dtype}")
        given = low.clone()
        expected = {"frobenius": low.float() / low.float().norm(), "max": low.float().sign()}
        u, _, vt = torch.linalg.svd(low.float(), full_matrices=False)
        expect_close(opt.steepest_direction(low, norm), expected.get(norm, u @ vt).to(dtype), read=RETURNS)
        expect_close(low, given, atol=0, rtol=0, name="G afterwards", read=ARGS)
        if norm == "spectral":
            case(f"[[1, 0], [0, 1/1024]] in {dtype}, spectral: 1/1024 counts in float32")
            small = torch.tensor([[1.0, 0.0], [0.0, 2.0**-10]], dtype=dtype)
            expect_close(opt.steepest_direction(small, norm), torch.eye(2, dtype=dtype), read=RETURNS)


def test_steepest_direction_refuses_other_norms():
    case("norm = 'nuclear'")
    with expect_raises(ValueError, "nuclear", read=RAISES):
        opt.steepest_direction(torch.ones(2, 2), "nuclear")


# ---- Lion ------------------------------------------------------------------------------------------------------------


def test_Lion_by_hand():
    case("w = [8, -8, 8, 8, 8, 8], lr 0.5, betas 0.75 and 0.5, decay 0.25; gradients [4, -4, 0, 4, 4, 4]")
    w = nn.Parameter(torch.tensor([8.0, -8.0, 8.0, 8.0, 8.0, 8.0]))
    lion = opt.Lion([w], lr=0.5, betas=(0.75, 0.5), weight_decay=0.25)
    w.grad = torch.tensor([4.0, -4.0, 0.0, 4.0, 4.0, 4.0])
    lion.step()
    expect_close(w.detach(), torch.tensor([6.5, -6.5, 7.0, 6.5, 6.5, 6.5]), name="w after step 1", read=LION)
    mean = torch.tensor([2.0, -2.0, 0.0, 2.0, 2.0, 2.0])
    expect_close(lion.state[w]["exp_avg"], mean, name="m after step 1", read=LION)
    case("the same, then gradients [-3, -8, 1, -1.5, -1, -0.4]")
    w.grad = torch.tensor([-3.0, -8.0, 1.0, -1.5, -1.0, -0.4])
    lion.step()
    # where m = 2, 0.75 m + 0.25 g is above 0 for g > -6; exchanged shares, the new m or g alone need a g nearer to 0
    expected = torch.tensor([5.1875, -5.1875, 5.625, 5.1875, 5.1875, 5.1875])
    expect_close(w.detach(), expected, name="w after step 2", read=LION)
    mean = torch.tensor([-0.5, -5.0, 0.5, 0.25, 0.5, 0.8])
    expect_close(lion.state[w]["exp_avg"], mean, name="m after step 2", read=LION)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_Lion_holds_one_mean(dtype):
    case(f"weights of three shapes in {dtype}: the state is one mean, in the weight's dtype")
    params = parameters((3, 4), (5,), (), dtype=dtype)
    lion = opt.Lion(params)
    take_steps(lion, params, 2)
    for p in params:
        expect_equal(list(lion.state[p]), ["exp_avg"], name="names in the state", read=STATE)
        expect_equal(lion.state[p]["exp_avg"].dtype, dtype, name="dtype of exp_avg", read=STATE)


def test_Lion_follows_its_algorithm():
    case("ten steps in float64, default settings and a decay, beside algorithm 2 written out")
    (w,) = parameters((6, 5), dtype=torch.float64)
    x, m = w.detach().clone(), torch.zeros(6, 5, dtype=torch.float64)
    lion = opt.Lion([w], weight_decay=0.3)
    for step in range(10):
        w.grad = randn(6, 5, dtype=torch.float64, seed=step)
        lion.step()
        x = x * (1 - 1e-4 * 0.3) - 1e-4 * torch.sign(0.9 * m + 0.1 * w.grad)
        m = 0.99 * m + 0.01 * w.grad
    expect_close(w.detach(), x, read=LION)


def test_Lion_conduct():
    check_conduct(opt.Lion, [*BAD, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}])
    check_resumes(opt.Lion, [(3, 4), (5,)])


# ---- Adafactor -------------------------------------------------------------------------------------------------------


def test_Adafactor_by_hand():
    case("w [[3, 4], [0, 0]], first step: gradient [[1, 2], [2, 0]], lr 0.1")
    w = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    factor = opt.Adafactor([w], lr=0.1)
    w.grad = torch.tensor([[1.0, 2.0], [2.0, 0.0]])
    factor.step()
    state = factor.state[w]
    expect_close(state["row_var"], torch.tensor([[2.5], [2.0]]), name="row_var", read=FACTORS)
    expect_close(state["col_var"], torch.tensor([[2.5, 2.0]]), name="col_var", read=FACTORS)
    moment = torch.tensor([[2.5], [2.0]]) @ torch.tensor([[2.5, 2.0]]) / 2.25
    update = w.grad / moment.sqrt()
    update = update / max(1.0, update.square().mean().sqrt().item())
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0]]) - 2.5 * 0.1 * update  # the root mean square of w is 2.5
    expect_close(w.detach(), expected, name="w", read=RATE)
    case("the same, gradient times 1e-6, eps[0] = 0: the same step")
    w = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    w.grad = torch.tensor([[1e-6, 2e-6], [2e-6, 0.0]])
    opt.Adafactor([w], lr=0.1, eps=(0.0, 1e-3)).step()
    expect_close(w.detach(), expected, name="w", read=ARGS)


SETTINGS = [
    {},
    {"lr": 0.5, "weight_decay": 0.1, "d": 1.5},
    {"beta2_decay": -0.5, "eps": (1e-3, 1e-2)},
    {"lr": 2.0, "eps": (0.5, 3.0), "d": 2.0, "weight_decay": 0.3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-5, 0.0], ids=lambda s: f"gradients x {s:g}")
def test_Adafactor_equals_PyTorchs(settings, scale):
    case(f"four steps with {settings or 'the defaults'}, gradients x {scale:g}, beside torch.optim.Adafactor")
    shapes = [(6, 4), (5,), (), (2, 3, 4), (1, 7)]
    ours, theirs = parameters(*shapes), parameters(*shapes)
    mine, other = opt.Adafactor(ours, **settings), torch.optim.Adafactor(theirs, **settings)
    take_steps(mine, ours, 4, scale)
    take_steps(other, theirs, 4, scale)
    for p, q in zip(ours, theirs, strict=True):
        expect_same_state(mine.state[p], other.state[q], list(other.state[q]), STATE)
        expect_close(p.detach(), q.detach(), name=f"the weight {tuple(p.shape)}", read=RATE)


def test_Adafactor_in_float64_and_bfloat16():
    for dtype in (torch.float64, torch.bfloat16):
        case(f"{dtype}: eps[0] is the dtype's own, and the state has this dtype, except the step")
        ours, theirs = parameters((4, 3), (3,), dtype=dtype), parameters((4, 3), (3,), dtype=dtype)
        mine, other = opt.Adafactor(ours), torch.optim.Adafactor(theirs)
        take_steps(mine, ours, 3, 1e-12)
        take_steps(other, theirs, 3, 1e-12)
        for p, q in zip(ours, theirs, strict=True):
            dtypes = {name: value.dtype for name, value in mine.state[p].items()}
            expect_equal(dtypes, {n: v.dtype for n, v in other.state[q].items()}, name="dtypes", read=STATE)
            expect_close(p.detach(), q.detach(), read=ARGS)


def test_Adafactor_gives_its_state_to_PyTorchs():
    case("three steps of ours, then three of torch.optim.Adafactor with our state")
    shapes = [(6, 4), (5,)]
    straight, handed = parameters(*shapes), parameters(*shapes)
    whole, mine, other = torch.optim.Adafactor(straight), opt.Adafactor(handed), torch.optim.Adafactor(handed)
    take_steps(whole, straight, 6)
    take_steps(mine, handed, 3)
    other.load_state_dict({**other.state_dict(), "state": copy.deepcopy(mine.state_dict()["state"])})
    take_steps(other, handed, 3, first=3)
    expect_close(values(handed), values(straight), read=STATE)


def test_Adafactor_conduct():
    bad = [*BAD, {"eps": (-1.0, 1e-3)}, {"eps": (None, -1e-3)}, {"beta2_decay": 0.1}, {"d": 0.9}]
    check_conduct(opt.Adafactor, bad)
    check_resumes(opt.Adafactor, [(3, 4), (5,)])


# ---- quantize_blockwise ----------------------------------------------------------------------------------------------


def dynamic_code(signed: bool) -> Tensor:
    """The contract's 256 values, written out."""
    found = [0.0, 1.0]
    for i in range(7):
        n = 2**i if signed else 2 ** (i + 1)
        middles = [10.0 ** (i - 6) * (0.1 + 0.9 * (k + 0.5) / n) for k in range(n)]
        found += middles + ([-m for m in middles] if signed else [])
    return torch.tensor(sorted(found), dtype=torch.float64)


def rounded(x: Tensor, signed: bool, block_size: int) -> tuple[Tensor, Tensor]:
    """Every element against all 256 values, block by block."""
    code, row = dynamic_code(signed), x.float().reshape(-1)
    q, scales = [], []
    for block in row.split(block_size):
        scales.append(block.abs().max())
        shares = (block / scales[-1].clamp(min=1e-38)).double()
        q.append((shares[:, None] - code).abs().argmin(1))
    return torch.cat(q).to(torch.uint8).view(x.shape), torch.stack(scales)


def test_quantize_blockwise_by_hand():
    case("[0, -8, 4, 0.8 | 0, 0, 0, 0 | 2]: blocks of 4, the last one shorter")
    q, absmax = opt.quantize_blockwise(torch.tensor([0.0, -8.0, 4.0, 0.8, 0, 0, 0, 0, 2]), block_size=4)
    expect_close(absmax, torch.tensor([8.0, 0.0, 2.0]), name="absmax", answer=(q, absmax), read=CODE)
    # of 0, -1, 0.5, 0.1: 127 is code 0, the smallest value is -0.993, 0.5 and 0.1 are nearest to 0.4938 and 0.0986
    code = dynamic_code(True)
    nearest = [int((code - share).abs().argmin()) for share in (0.0, -1.0, 0.5, 0.1)]
    expected = torch.tensor([*nearest, 127, 127, 127, 127, 255], dtype=torch.uint8)
    expect_equal(nearest[:2], [127, 0], name="places of 0 and -1")
    expect_close(q, expected, name="q", answer=(q, absmax), read=CODE)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_quantize_blockwise_keeps_the_code(signed):
    case(f"the 256 values themselves, {'signed' if signed else 'unsigned'}: each has its own index")
    q, absmax = opt.quantize_blockwise(dynamic_code(signed).float(), signed)
    expect_close(q, torch.arange(256).to(torch.uint8), name="q", answer=(q, absmax), read=CODE)
    expect_close(absmax, torch.ones(1), name="absmax", answer=(q, absmax), read=CODE)
    case("the same times 2**-70")
    q, absmax = opt.quantize_blockwise(dynamic_code(signed).float() * 2.0**-70, signed)
    expect_close(absmax, torch.tensor([2.0**-70]), atol=0, name="absmax", answer=(q, absmax), read=RETURNS)
    expect_close(q, torch.arange(256).to(torch.uint8), name="q", answer=(q, absmax), read=RETURNS)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("shape", [(1000,), (7, 33), (), (2, 3, 64), (0,)], ids=str)
def test_quantize_blockwise_is_nearest(signed, shape):
    case(f"x {shape}, of magnitudes from 1e-6 to 1, blocks of 64, {'signed' if signed else 'unsigned'}")
    x = randn(*shape) * 10 ** (-6 * torch.rand(shape, generator=torch.Generator().manual_seed(1)))
    x = x if signed else x.abs()
    q, absmax = opt.quantize_blockwise(x, signed, 64)
    if x.numel():
        expected, scales = rounded(x, signed, 64)
        expect_close(absmax, scales, atol=0, rtol=0, name="absmax", answer=(q, absmax), read=RETURNS)
        expect_close(q, expected, name="q", answer=(q, absmax), read=CODE)
    else:
        expect_equal((q.shape, absmax.shape, q.dtype), (x.shape, (0,), torch.uint8), name="shapes", read=RETURNS)


def test_quantize_blockwise_takes_the_lower_of_two():
    case("an element exactly between two values of the code: -0.5 and 0.5 of the smallest values, and 1")
    small = float(dynamic_code(True)[128].float())
    q, absmax = opt.quantize_blockwise(torch.tensor([small / 2, -small / 2, 1.0]))
    expect_close(q, torch.tensor([127, 126, 255]).to(torch.uint8), name="q", answer=(q, absmax), read=RETURNS)
    case("all middles, rounded to float32, and 1: some are above the middle in float64, others not")
    code = dynamic_code(True).float().double()
    middles = (code[1:] + code[:-1]) / 2
    x = torch.cat([middles, torch.ones(1)]).float()
    q, absmax = opt.quantize_blockwise(x)
    above = (x.double()[:, None] > middles).sum(1)
    expect_close(q, above.to(torch.uint8), name="q", answer=(q, absmax), read="the contract")


def test_quantize_blockwise_in_row_major_order():
    case("x [4, 6], the transpose of another matrix, in bfloat16, blocks of 6: one a row")
    x = (randn(6, 4) * torch.tensor([1.0, 10.0, 100.0, 1000.0])).bfloat16().T
    q, absmax = opt.quantize_blockwise(x, block_size=6)
    expect_close(absmax, x.float().abs().amax(1), name="absmax", answer=(q, absmax), read=ARGS)
    expect_close(q, rounded(x, True, 6)[0], name="q", answer=(q, absmax), read=ARGS)


# ---- dequantize_blockwise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_dequantize_blockwise_by_hand(signed):
    case(f"all 256 bytes in four rows, blocks of 100 with absmax 1, 2 and 4, {'signed' if signed else 'unsigned'}")
    q = torch.arange(256).to(torch.uint8).view(4, 64)
    scales = torch.tensor([1.0, 2.0, 4.0])
    expected = (dynamic_code(signed).float() * scales.repeat_interleave(100)[:256]).view(4, 64)
    expect_close(opt.dequantize_blockwise(q, scales, signed, 100), expected, read=CODE)


def test_dequantize_blockwise_undoes_rounding():
    case("x [3, 300] in blocks of 256: back to within 1/128 of each block's largest magnitude; zeros are zeros")
    x = randn(3, 300)
    x[1, 10:20] = 0
    q, absmax = rounded(x, True, 256)
    back = opt.dequantize_blockwise(q, absmax)
    largest = absmax.repeat_interleave(256)[:900].view(3, 300)
    expect_true(
        bool(((back - x).abs() <= largest / 128).all()),
        "an element is further away than half a step",
        answer=back,
        read=CODE,
    )
    expect_true(bool((back[1, 10:20] == 0).all()), "zeros are not zeros", answer=back, read=RETURNS)


# ---- AdamW8bit -------------------------------------------------------------------------------------------------------


def emulated(w: Tensor, gradients: list[Tensor], lr, betas, eps, decay, block) -> tuple[Tensor, dict[str, Tensor]]:
    """Chapter 7's step on moments that are rounded afterwards, element by element."""
    w, (beta1, beta2), kept = w.clone(), betas, {}
    codes = dynamic_code(True).float(), dynamic_code(False).float()
    m = v = torch.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m, v = m.lerp(g, 1 - beta1), beta2 * v + (1 - beta2) * g * g
        w = w * (1 - lr * decay) - lr / (1 - beta1**t) * m / (v.sqrt() / math.sqrt(1 - beta2**t) + eps)
        (q, absmax), (q_sq, absmax_sq) = rounded(m, True, block), rounded(v, False, block)
        q_sq = torch.where((q_sq == 0) & (v > 0), 1, q_sq).to(torch.uint8)
        kept = {"exp_avg": q, "absmax": absmax, "exp_avg_sq": q_sq, "absmax_sq": absmax_sq}
        m = codes[0][q.long()] * absmax.repeat_interleave(block)[: w.numel()].view(w.shape)
        v = codes[1][q_sq.long()] * absmax_sq.repeat_interleave(block)[: w.numel()].view(w.shape)
    return w, kept


def test_AdamW8bit_follows_its_rule():
    case("w [5, 60], blocks of 64, min_size 300: four steps with gradients of magnitudes from 1e-5 to 1")
    (w,) = parameters((5, 60))
    sizes = 10 ** (-5 * torch.rand(5, 60, generator=torch.Generator().manual_seed(2)))
    gradients = [randn(5, 60, seed=i) * sizes for i in range(4)]
    expected, kept = emulated(w.detach(), gradients, 0.1, (0.8, 0.9), 1e-6, 0.2, 64)
    optimizer = opt.AdamW8bit([w], 0.1, (0.8, 0.9), 1e-6, 0.2, 64, 300)
    for g in gradients:
        w.grad = g.clone()
        optimizer.step()
    expect_close(w.detach(), expected, rtol=1e-3, atol=1e-4, name="w", read="the contract")
    state = optimizer.state[w]
    expect_equal(sorted(state), sorted([*kept, "step"]), name="names in the state", read=STATE)
    expect_equal(int(state["step"]), 4, name="step", read=STATE)
    for name in ("exp_avg", "exp_avg_sq"):
        expect_equal(
            (state[name].dtype, state[name].shape),
            (torch.uint8, w.shape),
            name=f"dtype and shape of {name}",
            read=STATE,
        )
        differ = int((state[name].int() - kept[name].int()).abs().max())
        expect_true(differ <= 1, f"{name} is up to {differ} values of the code away", answer=state[name], read=STATE)
    for name in ("absmax", "absmax_sq"):
        expect_close(state[name], kept[name], rtol=1e-3, name=name, read=STATE)


def test_AdamW8bit_first_step_is_not_rounded():
    case("the first step of a large weight is chapter 7's, since nothing has been rounded yet")
    ours, theirs = parameters((80, 60)), parameters((80, 60))
    take_steps(opt.AdamW8bit(ours, 0.1), ours, 1)
    take_steps(AdamW(theirs, 0.1), theirs, 1)
    expect_close(values(ours), values(theirs), name="w", read="the contract")


def test_AdamW8bit_keeps_small_parameters_in_float32():
    case("4,095 elements, a vector and a scalar: float32 moments, and chapter 7's step exactly; 4,096: bytes")
    shapes = [(4095,), (3,), (), (64, 64)]
    ours, theirs = parameters(*shapes), parameters(*shapes)
    mine = opt.AdamW8bit(ours)
    take_steps(mine, ours, 5)
    take_steps(AdamW(theirs), theirs, 5)
    dtypes = [mine.state[p]["exp_avg"].dtype for p in ours]
    expect_equal(dtypes, [torch.float32] * 3 + [torch.uint8], name="dtypes of exp_avg", read=ARGS)
    expect_close(values(ours[:3]), values(theirs[:3]), atol=1e-7, name="w", read="the contract")
    case("what the states of 64 x 64 weigh")
    n_bytes = sum(v.nbytes for v in mine.state[ours[3]].values() if isinstance(v, Tensor) and v.ndim)
    expect_equal(n_bytes, 2 * 4096 + 8 * 16, name="bytes", read=STATE)


def test_AdamW8bit_never_loses_a_second_moment():
    case("gradients of 1e-6 and -1e-7 beside one of 1: their squares are below half of the smallest value")
    (w,) = parameters((5,))
    optimizer = opt.AdamW8bit([w], min_size=1)
    w.grad = torch.tensor([1e-6, 1.0, -1e-7, 0.0, 0.5])
    optimizer.step()
    q, mean = optimizer.state[w]["exp_avg_sq"], optimizer.state[w]["exp_avg"]
    expect_equal(q[[0, 1, 2, 3]].tolist(), [1, 255, 1, 0], name="codes of the squares", answer=q, read="the contract")
    # only a second moment is kept from 0: the first one is rounded to the nearest value
    expect_equal(mean[:4].tolist(), [128, 255, 127, 127], name="codes of the means", answer=mean, read="the contract")


def test_AdamW8bit_of_bfloat16_weights():
    case("weights and gradients in bfloat16: the step is computed in float32, and rounded once")
    (w,) = parameters((8,), dtype=torch.bfloat16)
    optimizer = opt.AdamW8bit([w], lr=0.01, weight_decay=0.5)
    wide = nn.Parameter(w.detach().float())
    plain = AdamW([wide], lr=0.01, weight_decay=0.5)
    for i in range(3):
        w.grad = randn(8, seed=i, dtype=torch.bfloat16)
        wide.grad = w.grad.float()
        optimizer.step()
        plain.step()
        wide.data = wide.data.bfloat16().float()
    expect_equal(optimizer.state[w]["exp_avg"].dtype, torch.float32, name="dtype of exp_avg", read=STATE)
    expect_close(w.detach().float(), wide.detach(), rtol=1e-2, name="w", read="the contract")


def test_AdamW8bit_conduct():
    bad = [*BAD, {"eps": -1e-8}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}]
    check_conduct(opt.AdamW8bit, bad)
    check_resumes(opt.AdamW8bit, [(80, 60), (5,)])
    case("load_state_dict into two groups in bfloat16, one weight without a state: bytes and float32 scales stay")
    first, second = (parameters((5,), (80, 60), (64, 64), dtype=torch.bfloat16) for _ in range(2))
    saved, loaded = (opt.AdamW8bit([{"params": params[:2]}, {"params": params[2]}]) for params in (first, second))
    saved.param_groups[1]["lr"] = 0.5
    take_steps(saved, first[1:], 1)
    loaded.load_state_dict(saved.state_dict())
    expect_true(second[0] not in loaded.state, "a weight without a gradient got a state", read=STATE)
    expected = {"exp_avg": torch.uint8, "exp_avg_sq": torch.uint8, "absmax": torch.float32, "absmax_sq": torch.float32}
    states = [loaded.state[p].items() for p in second[1:]]
    dtypes = [{name: v.dtype for name, v in state if isinstance(v, Tensor) and v.ndim} for state in states]
    expect_equal(dtypes, [expected, expected], name="dtypes", read=STATE)
    expect_equal([group["lr"] for group in loaded.param_groups], [1e-3, 0.5], name="rates of the groups", read=STATE)


# ---- newton_schulz ---------------------------------------------------------------------------------------------------


def schulz(G: Tensor, steps: int, coefficients, eps: float = 1e-7) -> Tensor:
    """The singular values through the polynomial, in float64, by the decomposition of each matrix."""
    u, s, vt = torch.linalg.svd(G.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True).clamp(min=eps)
    for k in range(steps):
        a, b, c = coefficients[k] if isinstance(coefficients[0], tuple) else coefficients
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ vt


def test_newton_schulz_by_hand():
    case("diag(3, -4), one step with a = 1, b = 10, c = 100, float64: 0.6 + 10 x 0.216 + 100 x 0.07776")
    G = torch.tensor([[3.0, 0.0], [0.0, -4.0]], dtype=torch.float64)
    expected = torch.tensor([[10.536, 0.0], [0.0, -38.688]], dtype=torch.float64)
    expect_close(opt.newton_schulz(G, 1, (1.0, 10.0, 100.0), dtype=None), expected, read=SCHULZ)
    case("[[3], [4]], no step: only divided by its norm")
    tall = torch.tensor([[3.0], [4.0]])
    expect_close(opt.newton_schulz(tall, 0, dtype=None), tall / 5, read=SCHULZ)


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (1, 4), (2, 6, 4), (2, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("steps", [1, 5])
def test_newton_schulz_moves_singular_values(shape, steps):
    case(f"G {shape} in float64, {steps} steps, each matrix alone and of another size")
    G = randn(*shape, dtype=torch.float64)
    G = G * torch.logspace(0, 3, math.prod(shape[:-2]), dtype=torch.float64).view(*shape[:-2], 1, 1)
    given = G.clone()
    expect_close(opt.newton_schulz(G, steps, dtype=None), schulz(G, steps, KELLER_JORDAN), read=SCHULZ)
    expect_close(G, given, atol=0, rtol=0, name="G afterwards", read=ARGS)


def test_newton_schulz_takes_coefficients_step_by_step():
    case("three triples and two steps: the first two are used; three triples and four steps")
    G, three = randn(4, 6, dtype=torch.float64), [(4.0, -6.0, 3.0), (2.0, -1.5, 0.5), (9.0, 9.0, 9.0)]
    expect_close(opt.newton_schulz(G, 2, three, dtype=None), schulz(G, 2, three), read=ARGS)
    with expect_raises(ValueError, "steps", read=RAISES):
        opt.newton_schulz(G, 4, three)


def test_newton_schulz_of_small_matrices():
    case("a matrix of norm 1e-9: divided by eps = 1e-7, and not by its norm; by eps = 0.01; and zeros")
    G = randn(3, 4, dtype=torch.float64)
    G = 1e-9 * G / G.norm()
    expect_close(opt.newton_schulz(G, 1, dtype=None), schulz(G, 1, KELLER_JORDAN), rtol=1e-6, atol=0, read=SCHULZ)
    found, expected = opt.newton_schulz(G, 1, eps=0.01, dtype=None), schulz(G, 1, KELLER_JORDAN, 0.01)
    expect_close(found, expected, rtol=1e-6, atol=0, read=ARGS)
    expect_close(opt.newton_schulz(torch.zeros(2, 3)), torch.zeros(2, 3, dtype=torch.bfloat16), read=RETURNS)


def test_newton_schulz_in_bfloat16():
    case("G [6, 10] in float32: in bfloat16 by default, as torch.optim.Muon computes it")
    from torch.optim._muon import _zeropower_via_newtonschulz

    G = randn(6, 10)
    expected = _zeropower_via_newtonschulz(G, KELLER_JORDAN, 5, 1e-7)
    found = opt.newton_schulz(G)
    expect_equal(found.dtype, torch.bfloat16, name="dtype", answer=found, read=RETURNS)
    expect_close(found, expected, atol=0.05, rtol=0, read=SCHULZ)
    expect_equal(opt.newton_schulz(G, dtype=None).dtype, torch.float32, name="dtype with dtype=None", read=RETURNS)


@pytest.mark.parametrize("shape", [(4, 20), (20, 4), (3, 20, 4)], ids=str)
def test_newton_schulz_multiplies_on_the_short_side(shape):
    case(f"G {shape}, three steps: FLOPs of the products")
    G = randn(*shape)
    with FlopCounterMode(display=False) as counter:
        answer = opt.newton_schulz(G, 3, dtype=torch.float32)
    expected = math.prod(shape[:-2]) * 3 * (4 * 4**2 * 20 + 2 * 4**3)
    expect_equal(counter.get_total_flops(), expected, name="FLOPs", answer=answer, read=COST)


def test_newton_schulz_refuses_vectors():
    case("a vector of 7")
    with expect_raises(ValueError, "7", read=RAISES):
        opt.newton_schulz(torch.ones(7))


# ---- singular_values_after -------------------------------------------------------------------------------------------


def test_singular_values_after_by_hand():
    case("s = [3, 4], one step with a = 1, b = 10, c = 100: of 0.6 and 0.8")
    found = opt.singular_values_after(torch.tensor([3.0, 4.0]), 1, (1.0, 10.0, 100.0))
    expect_close(found, torch.tensor([10.536, 38.688], dtype=torch.float64), read=POLYNOMIAL)


@pytest.mark.parametrize("shape", [(5, 8), (8, 3)], ids=str)
def test_singular_values_after_equals_the_matrix(shape):
    case(f"a matrix {shape}: the singular values of what five steps make of it, in the order of s")
    G = randn(*shape, dtype=torch.float64)
    u, s, vt = torch.linalg.svd(G, full_matrices=False)
    s = s.flip(0)
    given = s.clone()
    after = torch.diagonal(u.mT @ schulz(G, 5, KELLER_JORDAN) @ vt.mT).flip(0)
    with FlopCounterMode(display=False) as counter:
        found = opt.singular_values_after(s)
    expect_close(found, after, read=POLYNOMIAL)
    expect_close(s, given, atol=0, rtol=0, name="s afterwards", answer=found, read=ARGS)
    flops = counter.get_total_flops()  # a sum of squares may count as a product of two vectors
    expect_true(flops <= 2 * len(s), "matrices are multiplied", answer=found, read="the contract")
    case("s times 1e-9: only its direction counts")
    expect_close(opt.singular_values_after(1e-9 * s), after, read=RETURNS)


def test_singular_values_after_of_several_matrices():
    case("s [3, 3] in float32, of three matrices, one of them zero: each row by its own norm; float64")
    s = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0], [0.0, 6.0, 8.0]])
    expected = torch.tensor([[1 / 3, 2 / 3, 2 / 3], [0.0, 0.0, 0.0], [0.0, 0.6, 0.8]], dtype=torch.float64)
    expect_close(opt.singular_values_after(s, 0), expected, read=RETURNS)
    case("the first two of three triples, and four steps of three")
    three = [(4.0, -6.0, 3.0), (2.0, -1.5, 0.5), (9.0, 9.0, 9.0)]
    x = torch.tensor([0.6, 0.8], dtype=torch.float64)
    x = 4 * x - 6 * x**3 + 3 * x**5
    expect_close(
        opt.singular_values_after(torch.tensor([3.0, 4.0]), 2, three), 2 * x - 1.5 * x**3 + 0.5 * x**5, read=ARGS
    )
    with expect_raises(ValueError, "steps", read=ARGS):
        opt.singular_values_after(s, 4, three)


# ---- newton_schulz_flops ---------------------------------------------------------------------------------------------


def test_newton_schulz_flops_by_hand():
    case("[2, 3], one step: 2 x 2 x 3 x 2 + 2 x 2 x 2 x 2 + 2 x 2 x 2 x 3; [3, 2] too; seven of them, four steps")
    expect_equal(opt.newton_schulz_flops((2, 3), 1), 64, read=FLOPS)
    expect_equal(opt.newton_schulz_flops((3, 2), 1), 64, read=FLOPS)
    expect_equal(opt.newton_schulz_flops((7, 3, 2), 4), 7 * 4 * 64, read=FLOPS)
    case("GPT-2's widest matrix, [3072, 768], five steps")
    expect_equal(opt.newton_schulz_flops((3072, 768)), 40_768_634_880, read=FLOPS)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5), (2, 3, 7, 4)], ids=str)
def test_newton_schulz_flops_equals_the_counter(shape):
    case(f"{shape}, two steps, beside FlopCounterMode on the products themselves")
    X = randn(*shape)
    X = X.mT if shape[-2] > shape[-1] else X
    with FlopCounterMode(display=False) as counter:
        for _ in range(2):
            A = X @ X.mT
            X = (A + A @ A) @ X
    expect_equal(opt.newton_schulz_flops(shape, 2), counter.get_total_flops(), read=FLOPS)


def test_newton_schulz_flops_refuses_vectors():
    case("a vector of 7")
    with expect_raises(ValueError, "7", read=RAISES):
        opt.newton_schulz_flops((7,))


# ---- Muon ------------------------------------------------------------------------------------------------------------


def muon_by_svd(w, gradients, lr, decay, mu, nesterov, scale, cautious=False) -> tuple[Tensor, Tensor]:
    """The rule in float64, with the decomposition in place of products."""
    w, m = w.double(), torch.zeros_like(w).double()
    for g in gradients:
        m = mu * m + (1 - mu) * g.double()
        u = mu * m + (1 - mu) * g.double() if nesterov else m
        o = schulz(u, 5, KELLER_JORDAN)
        kept = torch.where(o * w >= 0, 1 - lr * decay, 1.0) if cautious else 1 - lr * decay
        w = kept * w - lr * scale * o
    return w, m


@pytest.mark.parametrize(
    ("shape", "settings", "scale"),
    [
        ((6, 3), {}, math.sqrt(2)),
        ((3, 6), {}, 1.0),
        ((6, 3), {"adjust_lr_fn": "original", "nesterov": False}, math.sqrt(2)),
        ((6, 3), {"adjust_lr_fn": "match_rms_adamw"}, 0.2 * math.sqrt(6)),
        ((3, 6), {"adjust_lr_fn": "match_rms_adamw", "cautious": True}, 0.2 * math.sqrt(6)),
        ((4, 4), {"cautious": True, "momentum": 0.0}, 1.0),
    ],
    ids=str,
)
def test_Muon_follows_its_rule(shape, settings, scale):
    case(
        f"w {shape} in float64, lr 0.2, decay 0.5, {settings or 'otherwise the defaults'}: "
        "the momentum and w after three steps"
    )
    (w,) = parameters(shape, dtype=torch.float64)
    gradients = [randn(*shape, seed=i + 1, dtype=torch.float64) for i in range(3)]
    how = {"mu": settings.get("momentum", 0.95), "nesterov": settings.get("nesterov", True), "scale": scale}
    expected, mean = muon_by_svd(w.detach(), gradients, 0.2, 0.5, cautious=settings.get("cautious", False), **how)
    muon = opt.Muon([w], lr=0.2, weight_decay=0.5, ns_dtype=None, **settings)
    for g in gradients:
        w.grad = g.clone()
        muon.step()
    expect_close(muon.state[w].get("momentum_buffer"), mean, name="momentum_buffer", read=MUON)
    expect_close(w.detach(), expected, name="w", read=MUON)
    expect_close(w.grad, gradients[-1], atol=0, rtol=0, name="the gradient after the step", read=MUON)


@pytest.mark.parametrize("shape", [(3, 4, 6), (3, 6, 4), (6, 2, 3, 2), (4, 2, 2, 1, 2)], ids=str)
def test_Muon_sees_experts_and_convolutions(shape):
    batch = len(shape) == 3
    case(f"w {shape}: {'three matrices' if batch else 'one matrix, [first, rest]'}, beside the rule")
    (w,) = parameters(shape, dtype=torch.float64)
    g = randn(*shape, seed=1, dtype=torch.float64)
    matrix = (lambda t: t) if batch else (lambda t: t.flatten(1))
    rows, columns = matrix(g).shape[-2:]
    scale = math.sqrt(max(1, rows / columns))
    expected, _ = muon_by_svd(matrix(w.detach()), [matrix(g)], 0.2, 0.5, 0.95, True, scale)
    muon = opt.Muon([w], lr=0.2, weight_decay=0.5, ns_dtype=None)
    w.grad = g
    muon.step()
    expect_close(w.detach(), expected.view(shape), name="w", read=ARGS)


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_Muon_goes_PyTorchs_way(adjust, dtype):
    most = 0.03 if dtype == torch.float32 else 0.08  # where weights, too, are rounded, the order of products counts
    case(f"six steps in {dtype}, products in bfloat16, adjust_lr_fn = {adjust!r}: within {most:.0%} of torch's way")
    shapes = [(8, 5), (5, 8), (6, 6)]
    ours, theirs, start = (parameters(*shapes, dtype=dtype) for _ in range(3))
    take_steps(opt.Muon(ours, lr=0.1, adjust_lr_fn=adjust), ours, 6)
    take_steps(torch.optim.Muon(theirs, lr=0.1, adjust_lr_fn=adjust), theirs, 6)
    for p, q, s in zip(values(ours), values(theirs), values(start), strict=True):
        share = float((p - q).float().norm() / (q - s).float().norm())
        expect_true(
            share < most, f"the weights end {share:.1%} of the way away from PyTorch's", answer=values(ours), read=MUON
        )


def test_Muon_hands_its_settings_on():
    case("w [3, 4] in float64, no momentum; newton_schulz with 2 steps, a = 1, b = 0.5, c = 0.25, eps = 10")
    (w,) = parameters((3, 4), dtype=torch.float64)
    w.grad = randn(3, 4, seed=1, dtype=torch.float64)
    expected = w.detach() - 0.5 * schulz(w.grad, 2, (1.0, 0.5, 0.25), 10.0)
    settings = {"ns_coefficients": (1.0, 0.5, 0.25), "eps": 10.0, "ns_steps": 2, "ns_dtype": None}
    opt.Muon([w], lr=0.5, weight_decay=0.0, momentum=0.0, **settings).step()
    expect_close(w.detach(), expected, name="w", read=ARGS)
    case("a gradient of zeros, cautious: o w = 0, and every weight decays")
    expected, w.grad = 0.75 * w.detach(), torch.zeros(3, 4, dtype=torch.float64)
    opt.Muon([w], lr=0.5, weight_decay=0.5, cautious=True).step()
    expect_close(w.detach(), expected, name="w", read=ARGS)


def test_Muon_refuses_vectors():
    case("a bias of 5 among the weights, and in a group that is added later")
    with expect_raises(ValueError, "5", read=RAISES):
        opt.Muon(parameters((3, 4), (5,)))
    muon = opt.Muon(parameters((3, 4)))
    with expect_raises(ValueError, "5", read=RAISES):
        muon.add_param_group({"params": parameters((5,))})
    expect_equal(len(muon.param_groups), 1, name="groups afterwards", read=RAISES)
    case("groups are added: two matrices from a generator, and a single matrix")
    muon.add_param_group({"params": (p for p in parameters((3, 4), (4, 3)))})
    muon.add_param_group({"params": nn.Parameter(torch.ones(2, 5))})
    expect_equal([len(group["params"]) for group in muon.param_groups], [1, 2, 1], name="parameters", read=ARGS)


def test_Muon_conduct():
    bad = [*BAD, {"eps": -1e-8}, {"momentum": 1.0}, {"momentum": -0.1}, {"adjust_lr_fn": "adamw"}]
    check_conduct(opt.Muon, bad)
    check_resumes(opt.Muon, [(3, 4), (2, 4, 3)])
    case("the state of a weight in bfloat16: the momentum alone, in bfloat16")
    params = parameters((3, 4), dtype=torch.bfloat16)
    muon = opt.Muon(params)
    take_steps(muon, params, 1)
    found = {name: value.dtype for name, value in muon.state[params[0]].items()}
    expect_equal(found, {"momentum_buffer": torch.bfloat16}, name="state", read=STATE)


# ---- split_parameters ------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Whatever a model may have: a stem, positions, experts, a frozen matrix, a table in a block, tied heads."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.positions = nn.Parameter(torch.zeros(1, 5, 4))
        self.stem = nn.Conv2d(3, 4, 2)
        ups, same, out = [nn.Linear(4, 6) for _ in range(2)], nn.Linear(4, 6), nn.Linear(4, 7, bias=False)
        first, second = (nn.ModuleDict({"up": up, "norm": nn.LayerNorm(4)}) for up in ups)
        self.blocks = nn.ModuleList([first, second])
        first["experts"] = nn.ParameterList([nn.Parameter(torch.zeros(3, 4, 4))])
        first["conv"] = nn.Conv1d(4, 4, 3, bias=False)
        second["frozen"] = nn.Linear(4, 4, bias=False).requires_grad_(False)
        second["kinds"] = nn.Embedding(3, 4)
        second["same"], same.weight = same, ups[0].weight
        second["out"], out.weight = out, self.table.weight
        self.head = nn.Linear(4, 7)


def test_split_parameters_by_hand():
    case("a model with a stem, positions, experts, a frozen matrix, a table in a block, and tied weights: the names")
    model = Mixed()
    names = {id(p): name for name, p in model.named_parameters()}
    muon, adamw = opt.split_parameters(model)
    found = [names.get(id(p), "?") for p in muon], [names.get(id(p), "?") for p in adamw]
    to_muon = ["blocks.0.up.weight", "blocks.0.experts.0", "blocks.0.conv.weight", "blocks.1.up.weight"]
    rest = [name for name, p in model.named_parameters() if p.requires_grad and name not in to_muon]
    expect_equal(found[0], to_muon, name="muon", answer=found, read=RETURNS)
    expect_equal(found[1], rest, name="adamw", answer=found, read=RETURNS)
    case("the same model inside of another module")
    found = opt.split_parameters(nn.Sequential(model))
    expect_equal([names.get(id(p), "?") for p in found[0]], to_muon, name="muon", answer=found, read=RETURNS)
    case("a model without blocks: everything to AdamW")
    expect_equal([len(part) for part in opt.split_parameters(nn.Linear(3, 4))], [0, 2], name="lengths", read=RETURNS)


@oracle
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_split_parameters_of_Transformers(name):
    import transformers

    case(f"Transformers' {name}, two layers: the matrices of the layers to Muon, all others to AdamW")
    small = {"vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 6} if name == "GPT2" else {
        "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 12}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(**small)
        )
    muon, adamw = opt.split_parameters(model)
    names = {id(p): n for n, p in model.named_parameters()}
    block = "transformer.h." if name == "GPT2" else "model.layers."
    expected = [n for n, p in model.named_parameters() if n.startswith(block) and p.ndim == 2]
    expect_equal([names[id(p)] for p in muon], expected, name="muon", read=RETURNS)
    expect_equal(len(muon) + len(adamw), len(names), name="all parameters", read=RETURNS)
    expect_equal(len(muon), 8 if name == "GPT2" else 14, name="matrices of two layers", read=RETURNS)


# ---- optimizer_state_bytes -------------------------------------------------------------------------------------------

SHAPES = [(100, 50), (50,), (3, 20, 30), (16, 4, 3, 3), ()]
STATE_BYTES = {
    # 5,000 + 50 + 1,800 + 576 + 1 elements
    "adamw": 8 * 7427,
    "lion": 4 * 7427,
    "adafactor": 4 * (150 + 50 + 3 * 50 + 64 * 6 + 1),
    "adamw8bit": 2 * 5000 + 8 * 20 + 8 * (50 + 1800 + 576 + 1),
    "muon": 4 * (5000 + 1800 + 576) + 8 * 51,
    "shampoo": 4 * (100**2 + 50**2 + 3 * (20**2 + 30**2) + 16**2 + 36**2) + 8 * 51,
    "soap": 8 * 7427 + 8 * (100**2 + 50**2 + 3 * (20**2 + 30**2) + 16**2 + 36**2),
}


@pytest.mark.parametrize("optimizer", list(STATE_BYTES), ids=map(str, range(7)))  # `-k Lion` should mean Lion
def test_optimizer_state_bytes_by_hand(optimizer):
    case(f"{optimizer}: a matrix, a vector, three experts, a convolution and a scalar")
    expect_equal(opt.optimizer_state_bytes(SHAPES, optimizer), STATE_BYTES[optimizer], read=ARGS)
    case(f"{optimizer}: 4,096 and 4,097 elements, and 4,095")
    many = opt.optimizer_state_bytes([torch.Size([4096]), [4097]], optimizer)
    one = opt.optimizer_state_bytes([(4095,)], optimizer)
    wanted = {
        "adamw8bit": (2 * 8193 + 8 * 33, 8 * 4095),
        "lion": (4 * 8193, 4 * 4095),
        "adafactor": (4 * 8193, 4 * 4095),
    }
    expect_equal((many, one), wanted.get(optimizer, (8 * 8193, 8 * 4095)), read=ARGS)


def test_optimizer_state_bytes_equals_PyTorchs_states():
    case("AdamW and Adafactor: bytes of PyTorch's own states, without counters")
    for name, kind in (("adamw", torch.optim.AdamW), ("adafactor", torch.optim.Adafactor)):
        params = parameters((6, 5), (7,), (2, 3, 4))
        optimizer = kind(params)
        take_steps(optimizer, params, 1)
        n_bytes = sum(v.nbytes for state in optimizer.state.values() for key, v in state.items() if key != "step")
        expect_equal(opt.optimizer_state_bytes([p.shape for p in params], name), n_bytes, name=name, read=ARGS)


def test_optimizer_state_bytes_refuses_other_names():
    case("optimizer = 'sgd'")
    with expect_raises(ValueError, "sgd", read=RAISES):
        opt.optimizer_state_bytes([], "sgd")


# ---- assign_owners ---------------------------------------------------------------------------------------------------


def test_assign_owners_by_hand():
    case("six matrices on three ranks: largest work first, to the least loaded")
    shapes = [(2, 2), (8, 8), (4, 4), (3, 100), (8, 8), (4, 4)]
    # FLOPs a step: 48, 3,072, 384, 3,654, 3,072, 384
    expect_equal(opt.assign_owners(shapes, 3, 1), [1, 1, 1, 0, 2, 2], read=RETURNS)
    case("the same on one rank, on seven, and no matrices at all")
    expect_equal(opt.assign_owners(shapes, 1), [0] * 6, read=RETURNS)
    expect_equal(opt.assign_owners(shapes, 7), [5, 1, 3, 0, 2, 4], read=RETURNS)
    expect_equal(opt.assign_owners([], 3), [], read=RETURNS)


def test_assign_owners_balances_work_and_not_elements():
    case("[30, 30] has fewer elements than [2, 600] and [600, 2], and more work")
    expect_equal(opt.assign_owners([(2, 600), (30, 30), (600, 2), (2, 600)], 2), [1, 0, 1, 1], read=RETURNS)


# ---- ShardedMuon -----------------------------------------------------------------------------------------------------

MATRICES = [(7, 3), (3, 9), (5, 5), (2, 4), (1, 6), (9, 2)]


def cut(whole: Tensor, rank: int, n_ranks: int) -> Tensor:
    size = math.ceil(len(whole) / n_ranks)
    return whole[rank * size : (rank + 1) * size].clone()


def sharded_steps(rank, world_size, settings, dtype, members):
    group = dist.new_group(list(range(members))) if members < world_size else None
    if rank >= members:
        return None
    case(
        f"{settings or 'the defaults'}, {dtype}: three steps on {members} ranks, of matrices {MATRICES}, "
        "beside Muon on whole ones"
    )
    whole = parameters(*MATRICES, dtype=dtype)
    mine = [nn.Parameter(cut(p.detach(), rank, members)) for p in whole]
    reference, muon = _muon(whole, settings), opt.ShardedMuon(mine, MATRICES, lr=0.1, group=group, **settings)
    for step in range(3):
        for i, (w, m) in enumerate(zip(whole, mine, strict=True)):
            has_none = step == 1 and i == 2
            w.grad = None if has_none else randn(*w.shape, dtype=dtype, seed=100 * step + i)
            m.grad = None if has_none else cut(w.grad, rank, members)
        reference.step()
        loss = muon.step(lambda: torch.tensor(3.0, requires_grad=True) * 2)
        expect_true(loss.requires_grad and loss.item() == 6, "step() returns the closure's loss", read=RETURNS)
    # products in another order round otherwise, and three steps of bfloat16 add up to a few hundredths
    atol = {None: 1e-9, torch.float32: 1e-4}.get(settings.get("ns_dtype", torch.bfloat16), 0.05)
    for i, (w, m) in enumerate(zip(whole, mine, strict=True)):
        rows = cut(w.detach(), rank, members)
        expect_close(m.detach(), rows, atol=atol, rtol=0, name=f"rows of matrix {i}", read=TRAFFIC)
        momentum = cut(reference.state[w]["momentum_buffer"], rank, members)
        found = muon.state[m]["momentum_buffer"]
        expect_close(found, momentum, atol=1e-6, rtol=0, name=f"momentum of matrix {i}", read=STATE)
        expect_close(m.grad, cut(w.grad, rank, members), atol=0, rtol=0, name=f"gradient of matrix {i}", read=STATE)
    return [m.numel() for m in mine]


def _muon(params, settings):
    """Muon on whole matrices: the reference's, so that only one exercise is graded."""
    from solutions.optimizers import Muon

    return Muon(params, lr=0.1, **settings)


CASES = [
    ({"ns_dtype": None}, torch.float64, 4),
    ({"ns_dtype": None, "adjust_lr_fn": "match_rms_adamw", "nesterov": False}, torch.float64, 3),
    (
        {"cautious": True, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 9.0, "ns_dtype": torch.float32},
        torch.float64,
        2,
    ),
    ({"momentum": 0.5}, torch.float32, 1),
]


@pytest.mark.parametrize(("settings", "dtype", "members"), CASES, ids=str)
def test_ShardedMuon_equals_the_whole_one(ranks, settings, dtype, members):
    ranks(sharded_steps, settings, dtype, members, n_ranks=members)


def test_ShardedMuon_in_a_group(ranks):
    ranks(sharded_steps, {"ns_dtype": None}, torch.float64, 2, n_ranks=3)


def counted(rank, world_size, dtype):
    case(
        f"one step on {world_size} ranks, products in {dtype}, the third matrix without a gradient: "
        "what is sent, and who multiplies"
    )
    mine = [nn.Parameter(cut(p.detach(), rank, world_size)) for p in parameters(*MATRICES)]
    muon = opt.ShardedMuon(mine, MATRICES, ns_dtype=dtype)
    for i, m in enumerate(mine):
        m.grad = None if i == 2 else cut(randn(*MATRICES[i], seed=i), rank, world_size)
    with FlopCounterMode(display=False) as counter:
        muon.step()
    return counter.get_total_flops()


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ShardedMuon_sends_parts_and_multiplies_once(ranks, dtype, n_ranks):
    result = ranks(counted, dtype, n_ranks=n_ranks)
    owners, flops, loads = [], [], [0] * n_ranks
    matrices = MATRICES[:2] + MATRICES[3:]
    for rows, columns in matrices:
        short, long = sorted((rows, columns))
        flops.append(5 * (4 * short**2 * long + 2 * short**3))
    order = sorted(range(len(matrices)), key=lambda i: -flops[i])
    owners = [0] * len(matrices)
    for i in order:
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += flops[i]
    case(f"{n_ranks} ranks: the calls of each rank, two all-to-alls")
    calls = [[record.op for record in ledger.records] for ledger in result.ledgers]
    expect_equal(calls, [["all_to_all_single"] * 2] * n_ranks, name="calls", read=TRAFFIC)
    case(f"{n_ranks} ranks, {dtype}: FLOPs on each rank, those of the matrices that it owns")
    expect_equal(list(result.values), loads, name="FLOPs of each rank", read=COST)
    case(f"{n_ranks} ranks, {dtype}: bytes that each rank passes in, its rows and the matrices that it owns")
    sizes = [math.prod(shape) for shape in matrices]
    parts = [sum(cut(torch.empty(shape), r, n_ranks).numel() for shape in matrices) for r in range(n_ranks)]
    owned = [sum(n for n, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(n_ranks)]
    expected = [dtype.itemsize * (a + b) for a, b in zip(parts, owned, strict=True)]
    expect_equal([ledger.bytes_sent for ledger in result.ledgers], expected, name="bytes", read=TRAFFIC)


def refusals(rank, world_size):
    case("a part with the rows that another cut would give; a second group; too few shapes; settings that Muon refuses")
    part = nn.Parameter(torch.zeros(5 if rank else 4, 3))  # of [9, 3]: 5 and 4 rows
    with expect_raises(ValueError, "5, 3", "4, 3", read=RAISES):
        opt.ShardedMuon([part], [(9, 3)])
    good = nn.Parameter(torch.zeros(4 if rank else 5, 3))
    muon = opt.ShardedMuon([good], [(9, 3)])
    with expect_raises(ValueError, read=RAISES):
        muon.add_param_group({"params": [nn.Parameter(torch.zeros(1, 3))]})
    with expect_raises(ValueError, read=RAISES):
        opt.ShardedMuon([good], [(9, 3), (1, 3)])
    for settings in (*BAD, {"eps": -1.0}, {"momentum": 1.0}, {"adjust_lr_fn": "adamw"}):
        with expect_raises(ValueError, next(iter(settings)), read=RAISES):
            opt.ShardedMuon([good], [(9, 3)], **settings)
    case("no gradient on any rank: no change, no state")
    muon.step()
    expect_equal(len(muon.state), 0, name="parameters with a state", read=STATE)
    expect_equal(float(good.abs().sum()), 0.0, name="the sum of the weights", read=STATE)


def test_ShardedMuon_refuses_other_cuts(ranks):
    ranks(refusals, n_ranks=2)


def resumed(rank, world_size):
    case(f"{world_size} ranks: six steps without a break and with one, bit for bit")
    results = []
    for pause in (False, True):
        mine = [nn.Parameter(cut(p.detach(), rank, world_size)) for p in parameters(*MATRICES)]
        muon = opt.ShardedMuon(mine, MATRICES, lr=0.1)
        for step in range(6):
            if pause and step == 3:
                saved = copy.deepcopy(muon.state_dict())
                muon = opt.ShardedMuon(mine, MATRICES, lr=0.1)
                muon.load_state_dict(saved)
            for i, m in enumerate(mine):
                m.grad = cut(randn(*MATRICES[i], seed=100 * step + i), rank, world_size)
            muon.step()
        results.append(values(mine))
    for a, b in zip(*results, strict=True):
        expect_close(a, b, atol=0, rtol=0, name="rows after the break", read=STATE)


def test_ShardedMuon_resumes(ranks):
    ranks(resumed, n_ranks=2)
