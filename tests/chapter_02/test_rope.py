"""Rotary position embedding, graded.

The tests build what they compare with themselves, in float64 and with real numbers, so that no exercise needs another.
"""

import math

import pytest
import torch
from torch import Tensor

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle, recorded
from tests.devices import Watch, devices_of
from tests.inputs import randn

rope = graded("rope")

ROTATION, RELATIVE, FREQUENCIES, BLOCKS = (f"eq-rope-{n}" for n in (3, 4, 5, 6))
TABLE, APPLY, LAYOUTS, INTERPOLATION = (f"eq-rope-{n}" for n in (7, 8, 9, 11))


def make_angles(n_positions: int, head_dim: int, theta: float = 10_000.0) -> Tensor:
    """Angles ``[T, D/2]`` in float64."""
    frequencies = theta ** (-2.0 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)
    return torch.arange(n_positions, dtype=torch.float64)[:, None] * frequencies


def make_table(angles: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Neighbouring pairs of ``[B, T, H, D]`` turned by ``[T, D/2]``, in float64."""
    x, cos, sin = x.double(), angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def turn_halves(x: Tensor, angles: Tensor) -> Tensor:
    """The same where the pairs are features (i, i + D/2)."""
    x, cos, sin = x.double(), angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, low * sin + high * cos], dim=-1)


def make_scores(x: Tensor, wq: Tensor, wk: Tensor, n_heads: int, rotate) -> Tensor:
    """Dot products ``[B, H, T, S]`` of rotated queries and keys."""
    q, k = (rotate((x @ w.T).unflatten(-1, (n_heads, -1))).double() for w in (wq, wk))
    return torch.einsum("bthd,bshd->bhts", q, k)


# Transformers' Llama, for the recorded values: imported only where a maintainer computes them.


def transformers_rotary(head_dim: int, theta: float, **scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=64)
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta, **scaling}
    return LlamaRotaryEmbedding(config)


def transformers_table(n_positions: int, head_dim: int, theta: float, **scaling) -> Tensor:
    """``[2, T, D/2]``: cosines and sines."""
    positions = torch.arange(n_positions)[None]
    cos, sin = transformers_rotary(head_dim, theta, **scaling)(torch.zeros(1), positions)
    return torch.stack([cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]])


def transformers_scores(x: Tensor, wq: Tensor, wk: Tensor, n_heads: int) -> Tensor:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = ((x @ w.T).unflatten(-1, (n_heads, -1)).transpose(1, 2) for w in (wq, wk))
    cos, sin = transformers_rotary(q.shape[-1], 10_000.0)(x, torch.arange(x.shape[1])[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q @ k.transpose(-1, -2)


# ---- rope_frequencies ------------------------------------------------------------------------------------------------


def test_rope_frequencies_by_hand():
    case("head_dim=8, theta=10000: four pairs, each ten times slower than the one before")
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001])
    expect_close(rope.rope_frequencies(8), expected, rtol=1e-5, read=FREQUENCIES)


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 10_000.0), (6, 50.0), (64, 10_000.0), (128, 500_000.0)])
def test_rope_frequencies_by_formula(head_dim, theta):
    case(f"head_dim={head_dim}, theta={theta:.0f}")
    expected = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    expect_close(rope.rope_frequencies(head_dim, theta), expected, rtol=1e-5, atol=0.0, read=FREQUENCIES)


@pytest.mark.parametrize("head_dim", [13, 1])
def test_rope_frequencies_refuses_odd_width(head_dim):
    case(f"head_dim={head_dim}")
    with expect_raises(ValueError, str(head_dim), "even", read="the contract, under Raises"):
        rope.rope_frequencies(head_dim)


def test_rope_frequencies_live_on_the_device_asked_for():
    case('head_dim=4, device="meta"')
    out, devices = devices_of(rope.rope_frequencies, 4, device="meta")
    problem = "no tensor is made on, or moved to, the device asked for"
    expect_true("meta" in devices, problem, answer=out, read="the contract, under Args")


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
def test_rope_frequencies_equal_transformers():
    case("head_dim=16, theta=500000, as in Llama 3")
    expected = recorded("inv_freq", lambda: transformers_rotary(16, 500_000.0).inv_freq)
    expect_close(rope.rope_frequencies(16, 500_000.0), expected, rtol=1e-5, atol=0.0, read=FREQUENCIES)


# ---- rotation_matrix -------------------------------------------------------------------------------------------------


def test_rotation_matrix_by_hand():
    case("position=2, head_dim=4, theta=25: the first pair turns by 2 radians, the second by 0.4")
    c, s, c2, s2 = math.cos(2.0), math.sin(2.0), math.cos(0.4), math.sin(0.4)
    expected = torch.tensor([[c, -s, 0, 0], [s, c, 0, 0], [0, 0, c2, -s2], [0, 0, s2, c2]])
    expect_close(rope.rotation_matrix(2, 4, theta=25.0), expected, atol=1e-6, read=BLOCKS)


def test_rotation_matrix_at_position_0_is_the_identity():
    case("position=0, head_dim=6")
    expect_close(rope.rotation_matrix(0, 6), torch.eye(6), atol=1e-7, read=BLOCKS)


@pytest.mark.parametrize(("position", "head_dim"), [(1, 2), (17, 6), (1000, 10)])
def test_rotation_matrix_keeps_lengths_and_orientation(position, head_dim):
    case(f"position={position}, head_dim={head_dim}: the matrix times its transpose")
    matrix = rope.rotation_matrix(position, head_dim)
    square = matrix.double() @ matrix.double().T
    expect_close(square, torch.eye(head_dim).double(), atol=1e-6, name="out @ out.T", answer=matrix, read=ROTATION)
    case(f"position={position}, head_dim={head_dim}: the determinant")
    expect_close(
        torch.linalg.det(matrix.double()).item(), 1.0, atol=1e-5, name="det(out)", answer=matrix, read=ROTATION
    )


def test_rotation_matrix_depends_on_the_difference_of_positions():
    case("head_dim=8: the transpose at position 5, times the matrix at 12")
    five, twelve = rope.rotation_matrix(5, 8), rope.rotation_matrix(12, 8)
    case("head_dim=8: it should be the matrix at 7")
    expect_close(
        five.T @ twelve, rope.rotation_matrix(7, 8), atol=1e-5, name="R5.T @ R12", answer=twelve, read=RELATIVE
    )


@pytest.mark.parametrize(("position", "head_dim", "theta"), [(1, 2, 10_000.0), (3, 6, 50.0), (40, 16, 500_000.0)])
def test_rotation_matrix_equals_the_matrix_exponential(position, head_dim, theta):
    case(f"position={position}, head_dim={head_dim}, theta={theta:.0f}")
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    angles = make_angles(position + 1, head_dim, theta)[-1]
    expected = torch.matrix_exp(torch.block_diag(*(angle * quarter for angle in angles))).float()
    expect_close(rope.rotation_matrix(position, head_dim, theta), expected, atol=1e-5, read=BLOCKS)


def test_rotation_matrix_knows_the_usual_theta():
    case("position=3, head_dim=6, theta left out: it is 10,000")
    expected = torch.zeros(6, 6)
    for i in range(3):
        angle = 3 * 10_000.0 ** (-2 * i / 6)
        turned = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        expected[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor(turned)
    expect_close(rope.rotation_matrix(3, 6), expected, atol=1e-6, read=BLOCKS)


def test_rotation_matrix_refuses_odd_width():
    case("position=2, head_dim=15")
    with expect_raises(ValueError, "15", read="the contract, under Raises"):
        rope.rotation_matrix(2, 15)


# ---- precompute_rope -------------------------------------------------------------------------------------------------


def test_precompute_rope_by_hand():
    case("head_dim=4, context_len=3, theta=25: angles m and m/5")
    angles = [[0.0, 0.0], [1.0, 0.2], [2.0, 0.4]]
    expected = torch.tensor([[complex(math.cos(a), math.sin(a)) for a in row] for row in angles])
    expect_close(rope.precompute_rope(4, 3, theta=25.0), expected, atol=1e-6, read=TABLE)


@pytest.mark.parametrize(
    ("head_dim", "context_len", "theta"), [(2, 1, 10_000.0), (6, 11, 10_000.0), (64, 300, 500_000.0)]
)
def test_precompute_rope_equals_polar(head_dim, context_len, theta):
    case(f"head_dim={head_dim}, context_len={context_len}, theta={theta:.0f}")
    expected = make_table(make_angles(context_len, head_dim, theta))
    # An angle of 300 radians in float32 is off by up to 1.5e-5, and its frequency's rounding adds as much again.
    expect_close(rope.precompute_rope(head_dim, context_len, theta), expected, atol=1e-4, read=TABLE)


def test_precompute_rope_has_modulus_1():
    case("head_dim=32, context_len=5000: the modulus of every entry")
    table = rope.precompute_rope(32, 5000)
    expect_close(table.abs(), torch.ones(5000, 16), atol=1e-6, name="abs(out)", answer=table, read=TABLE)


def test_precompute_rope_knows_position_100_000():
    case("head_dim=8, position 100000")
    table = rope.precompute_rope(8, 100_001)
    expected = make_table(make_angles(100_001, 8))[-1]
    # float32 angles are off by up to 0.004 there, bfloat16's by hundreds of radians
    expect_close(
        table[-1], expected, atol=0.01, name="out[100000]", answer=table, read='section "A clock read in bfloat16"'
    )


def test_precompute_rope_refuses_odd_width():
    case("head_dim=13, context_len=4")
    with expect_raises(ValueError, "13", read="the contract, under Raises"):
        rope.precompute_rope(13, 4)


def test_precompute_rope_lives_on_the_device_asked_for():
    case('head_dim=4, context_len=3, theta=100, device="meta"')
    out, devices = devices_of(rope.precompute_rope, 4, 3, 100.0, "meta")
    problem = "no tensor is made on, or moved to, the device asked for"
    expect_true("meta" in devices, problem, answer=out, read="the contract, under Args")


def test_precompute_rope_asks_for_the_default_device_only_without_another():
    case('head_dim=4, context_len=3, theta=100, device="cpu", while the default device is "meta"')
    with torch.device("meta"):
        out, devices = devices_of(rope.precompute_rope, 4, 3, 100.0, "cpu")
    problem = "a tensor is made on PyTorch's default device, although another device was asked for"
    expect_true("meta" not in devices, problem, answer=out, read="the contract, under Args")
    case('head_dim=4, context_len=3, theta=100, no device, while the default device is "meta"')
    with torch.device("meta"):
        out, devices = devices_of(rope.precompute_rope, 4, 3, 100.0)
    problem = "no tensor is made on PyTorch's default device, although no other was asked for"
    expect_true("meta" in devices, problem, answer=out, read="the contract, under Args")


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
def test_precompute_rope_equals_transformers():
    case("head_dim=16, context_len=32, theta=500000: cosine and sine")
    cos, sin = recorded("cos_sin", lambda: transformers_table(32, 16, 500_000.0))
    expect_close(rope.precompute_rope(16, 32, 500_000.0), torch.complex(cos, sin), atol=1e-5, read=TABLE)


# ---- apply_rope ------------------------------------------------------------------------------------------------------


def test_apply_rope_by_hand():
    case("b=1 t=4 h=2 d=6, float32: numbers 1 to 48; at position m the pairs turn by m, 2m and 3m quarters of a circle")
    x = torch.arange(1.0, 49.0).view(1, 4, 2, 6)
    quarters = torch.arange(4.0)[:, None] * torch.tensor([1.0, 2.0, 3.0])
    expected = [
        [[1.0, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]],
        [[-14, 13, -15, -16, 18, -17], [-20, 19, -21, -22, 24, -23]],
        [[-25, -26, 27, 28, -29, -30], [-31, -32, 33, 34, -35, -36]],
        [[38, -37, -39, -40, -42, 41], [44, -43, -45, -46, -48, 47]],
    ]
    out = rope.apply_rope(x, make_table(quarters * math.pi / 2))
    expect_close(out, torch.tensor([expected]), atol=1e-4, read=APPLY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_rope_leaves_x_unchanged(dtype):
    case(f"b=1 t=3 h=2 d=4, {str(dtype).removeprefix('torch.')}: x after the call")
    x = randn(1, 3, 2, 4, dtype=dtype)
    before = x.clone()
    out = rope.apply_rope(x, make_table(make_angles(3, 4)))
    expect_close(x, before, atol=0.0, rtol=0.0, name="x", answer=out, read="the contract, under Args")


@pytest.mark.parametrize(("b", "t", "h", "d"), [(2, 5, 3, 8), (1, 1, 1, 2), (1, 4, 4, 4), (3, 7, 1, 10)])
def test_apply_rope_equals_the_explicit_product(b, t, h, d):
    case(f"b={b} t={t} h={h} d={d}, float32")
    x, angles = randn(b, t, h, d, seed=t), make_angles(t, d)
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    matrices = torch.stack([torch.matrix_exp(torch.block_diag(*(a * quarter for a in row))) for row in angles])
    expected = torch.einsum("tij,bthj->bthi", matrices, x.double()).float()
    expect_close(rope.apply_rope(x, make_table(angles)), expected, atol=1e-5, read=BLOCKS)


def test_apply_rope_keeps_position_0():
    case("b=1 t=3 h=2 d=6: the vectors at position 0")
    x = randn(1, 3, 2, 6)
    out = rope.apply_rope(x, make_table(make_angles(3, 6)))
    expect_close(out[:, 0], x[:, 0], atol=1e-6, name="out[:, 0]", answer=out, read=APPLY)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_apply_rope_keeps_norms(seed):
    case(f"b=2 t=9 h=3 d=8, seed={seed}: the length of every vector")
    x = randn(2, 9, 3, 8, seed=seed)
    out = rope.apply_rope(x, make_table(make_angles(9, 8)))
    expect_close(out.norm(dim=-1), x.norm(dim=-1), atol=1e-5, name="out.norm(dim=-1)", answer=out, read=ROTATION)


def test_apply_rope_depends_on_the_difference_of_positions():
    case("t=20 h=1 d=16: the same query and key at every pair of positions, 3 apart")
    q, k = (randn(1, 1, 1, 16, seed=seed).expand(1, 20, 1, 16) for seed in (1, 2))
    table = make_table(make_angles(20, 16))
    turned_q, turned_k = rope.apply_rope(q, table), rope.apply_rope(k, table)
    dots = (turned_q[0, 3:, 0] * turned_k[0, :-3, 0]).sum(-1)
    expected = dots[:1].expand(17)
    expect_close(dots, expected, atol=1e-4, name="dot products", answer=turned_q, read=RELATIVE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_apply_rope_computes_in_float32(dtype):
    name = str(dtype).removeprefix("torch.")
    case(f"b=1 t=8 h=2 d=32, {name}")
    x, angles = randn(1, 8, 2, 32, dtype=dtype), make_angles(8, 32)
    out = rope.apply_rope(x, make_table(angles))
    expected = turn(x, angles).to(dtype)
    expect_close(out, expected, atol=0.1, read="the contract")
    off = (out != expected).double().mean().item()  # float32 arithmetic may fall on the other side of a rare tie
    problem = f"{off:.0%} of the numbers are rounded twice: the arithmetic was not in float32 but in {name}"
    expect_true(off < 0.02, problem, answer=out, read="the contract, under Returns")


def test_apply_rope_takes_any_strides():
    angles = make_angles(5, 4)
    case("b=2 t=5 h=3 d=4, a transposed view of [B, H, T, D]")
    x = randn(2, 3, 5, 4).transpose(1, 2)
    expect_close(rope.apply_rope(x, make_table(angles)), turn(x, angles).float(), atol=1e-5, read=APPLY)
    case("b=2 t=5 h=3 d=4, every second feature of a wider tensor")
    x = randn(2, 5, 3, 8)[..., ::2]
    expect_close(rope.apply_rope(x, make_table(angles)), turn(x, angles).float(), atol=1e-5, read=APPLY)


def test_apply_rope_takes_later_positions():
    case("b=1 t=3 h=2 d=8, rows 4 to 6 of a longer table, as a cache of keys needs them")
    x, angles = randn(1, 3, 2, 8), make_angles(7, 8)
    expect_close(rope.apply_rope(x, make_table(angles)[4:]), turn(x, angles[4:]).float(), atol=1e-5, read=APPLY)
    case("b=1 t=3 h=2 d=8, the same rows, float64")
    expect_close(rope.apply_rope(x.double(), make_table(angles)[4:]), turn(x, angles[4:]), atol=1e-5, read=APPLY)


@pytest.mark.parametrize("rows", [7, 1, 13])
def test_apply_rope_refuses_a_table_of_another_length(rows):
    case(f"x of 11 positions, a table of {rows}")
    with expect_raises(ValueError, f"{rows}, 4", "11, 4", read="the contract, under Raises"):
        rope.apply_rope(randn(2, 11, 3, 8), make_table(make_angles(rows, 8)))


def test_apply_rope_refuses_a_table_of_another_width():
    for n_rows, size in ((1, "one row and one pair"), (5, "one pair")):
        case(f"x of 5 positions and head width 8, a table of {size}, which would broadcast")
        with expect_raises(ValueError, f"{n_rows}, 1", "5, 4", read="the contract, under Raises"):
            rope.apply_rope(randn(1, 5, 3, 8), make_table(make_angles(n_rows, 2)))


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
def test_apply_rope_equals_transformers():
    case("b=2 t=6 c=16 h=2 d=8: scores of queries and keys, against Transformers' half-split layout")
    x, wq, wk = randn(2, 6, 16), randn(16, 16, seed=1), randn(16, 16, seed=2)
    expected = recorded("scores", lambda: transformers_scores(x, wq, wk, 2))
    order = [head * 8 + row for head in range(2) for row in (0, 4, 1, 5, 2, 6, 3, 7)]
    table, outs = make_table(make_angles(6, 8)), []

    def rotate(q):
        outs.append(rope.apply_rope(q, table))
        return outs[-1]

    scores = make_scores(x, wq[order], wk[order], 2, rotate)
    expect_close(scores.float(), expected, atol=1e-3, rtol=1e-4, name="scores", answer=outs[0], read=LAYOUTS)


def test_apply_rope_passes_gradients_back():
    case("b=1 t=4 h=2 d=6: the gradient of x is the incoming one, rotated back")
    x, incoming, angles = randn(1, 4, 2, 6).requires_grad_(), randn(1, 4, 2, 6, seed=1), make_angles(4, 6)
    out = rope.apply_rope(x, make_table(angles))
    problem = "the output is cut off from the graph: no gradient can reach x"
    expect_true(out.requires_grad, problem, answer=out, read=APPLY)
    out.backward(incoming)
    expect_close(x.grad, turn(incoming, -angles).float(), atol=1e-5, name="x.grad", answer=out, read=APPLY)


class Ledger(Watch):
    """Counts operators, and the real numbers in the largest tensor that one of them makes."""

    def __init__(self):
        super().__init__()
        self.n_ops, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.n_ops += 1
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel() * (2 if tensor.is_complex() else 1))
        return out


def test_apply_rope_makes_no_matrices():
    case("b=1 t=6 h=1 d=64: the largest tensor made on the way")
    x, table = randn(1, 6, 1, 64), make_table(make_angles(6, 64))
    with Ledger() as ledger:
        out = rope.apply_rope(x, table)
    problem = f"a tensor of {ledger.largest} numbers is made on the way, but x has only {x.numel()} (64 x 64 = 4096)"
    expect_true(ledger.largest <= 3 * x.numel(), problem, answer=out, read="the contract, under Cost")


def test_apply_rope_does_not_loop():
    n_ops = {}
    for t in (4, 32):
        case(f"b=1 t={t} h=2 d=8: the number of operators")
        x, table = randn(1, t, 2, 8), make_table(make_angles(t, 8))
        with Ledger() as ledger:
            out = rope.apply_rope(x, table)
        n_ops[t] = ledger.n_ops
    problem = f"{n_ops[4]} operators for 4 positions, {n_ops[32]} for 32: there is a loop, where one product is enough"
    expect_true(n_ops[4] == n_ops[32], problem, answer=out, read="the contract, under Cost")


# ---- the two layouts -------------------------------------------------------------------------------------------------


def rows(order: list[int]) -> Tensor:
    """A weight whose rows are (r, 100 + r, 200 + r): a row says where it came from."""
    return torch.tensor([[r, 100.0 + r, 200.0 + r] for r in order])


def test_interleaved_to_half_by_hand():
    case("n_heads=2, head_dim=6, c=3: row r holds (r, 100 + r, 200 + r)")
    expected = rows([0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11])
    expect_close(rope.interleaved_to_half(rows(list(range(12))), 2), expected, atol=0.0, rtol=0.0, read=LAYOUTS)


@pytest.mark.parametrize(("n_heads", "head_dim", "c"), [(1, 2, 3), (3, 4, 5), (4, 10, 1)])
def test_interleaved_to_half_row_by_row(n_heads, head_dim, c):
    case(f"n_heads={n_heads}, head_dim={head_dim}, c={c}")
    weight = randn(n_heads * head_dim, c)
    order = [h * head_dim + 2 * i + side for h in range(n_heads) for side in (0, 1) for i in range(head_dim // 2)]
    expected = weight[order]
    expect_close(rope.interleaved_to_half(weight, n_heads), expected, atol=0.0, rtol=0.0, read=LAYOUTS)


def test_interleaved_to_half_keeps_scores():
    case("n_heads=2, head_dim=6: dot products of rotated queries and keys in the two layouts")
    x, wq, wk, angles = randn(1, 5, 9), randn(12, 9, seed=1), randn(12, 9, seed=2), make_angles(5, 6)
    halves = [rope.interleaved_to_half(w, 2) for w in (wq, wk)]
    actual = make_scores(x, halves[0], halves[1], 2, lambda q: turn_halves(q, angles))
    expected = make_scores(x, wq, wk, 2, lambda q: turn(q, angles))
    expect_close(actual, expected, atol=1e-4, rtol=1e-5, name="scores", answer=halves[0], read=LAYOUTS)


def test_interleaved_to_half_leaves_weight_unchanged():
    case("n_heads=2, head_dim=4, bfloat16: weight after the call")
    weight = randn(8, 3, dtype=torch.bfloat16)
    before = weight.clone()
    out = rope.interleaved_to_half(weight, 2)
    expect_close(weight, before, atol=0.0, rtol=0.0, name="weight", answer=out, read="the contract")
    case("n_heads=2, head_dim=4, bfloat16: the dtype")
    expect_equal(str(out.dtype), "torch.bfloat16", name="out.dtype", answer=out, read="the contract")


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
@oracle
def test_interleaved_to_half_suits_transformers():
    case("n_heads=2, head_dim=8: Transformers' scores with the reordered rows")
    x, wq, wk, angles = randn(2, 6, 16), randn(16, 16, seed=3), randn(16, 16, seed=4), make_angles(6, 8)
    halves = [rope.interleaved_to_half(w, 2) for w in (wq, wk)]
    expected = make_scores(x, wq, wk, 2, lambda q: turn(q, angles)).float()
    scores = transformers_scores(x, halves[0], halves[1], 2)
    expect_close(scores, expected, atol=1e-3, rtol=1e-4, name="scores", answer=halves[0], read=LAYOUTS)


def test_half_to_interleaved_by_hand():
    case("n_heads=2, head_dim=6, c=3: row r holds (r, 100 + r, 200 + r)")
    expected = rows([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    expect_close(rope.half_to_interleaved(rows(list(range(12))), 2), expected, atol=0.0, rtol=0.0, read=LAYOUTS)


@pytest.mark.parametrize(("n_heads", "head_dim", "c"), [(1, 2, 3), (3, 4, 5), (4, 10, 1)])
def test_half_to_interleaved_row_by_row(n_heads, head_dim, c):
    case(f"n_heads={n_heads}, head_dim={head_dim}, c={c}")
    weight = randn(n_heads * head_dim, c)
    half = head_dim // 2
    order = [h * head_dim + i + side * half for h in range(n_heads) for i in range(half) for side in (0, 1)]
    expected = weight[order]
    expect_close(rope.half_to_interleaved(weight, n_heads), expected, atol=0.0, rtol=0.0, read=LAYOUTS)


@pytest.mark.parametrize(("n_heads", "head_dim"), [(1, 6), (2, 10), (5, 4)])
def test_half_to_interleaved_undoes_the_other_order(n_heads, head_dim):
    case(f"n_heads={n_heads}, head_dim={head_dim}: interleaved rows, put into halves and back")
    weight = randn(n_heads * head_dim, 3)
    order = [h * head_dim + 2 * i + side for h in range(n_heads) for side in (0, 1) for i in range(head_dim // 2)]
    expect_close(rope.half_to_interleaved(weight[order], n_heads), weight, atol=0.0, rtol=0.0, read=LAYOUTS)


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
def test_half_to_interleaved_gives_transformers_scores():
    case("n_heads=2, head_dim=8: interleaved rotation of the reordered rows, against Transformers'")
    x, wq, wk, angles = randn(2, 6, 16), randn(16, 16, seed=1), randn(16, 16, seed=2), make_angles(6, 8)
    expected = recorded("scores", lambda: transformers_scores(x, wq, wk, 2))
    pairs = [rope.half_to_interleaved(w, 2) for w in (wq, wk)]
    actual = make_scores(x, pairs[0], pairs[1], 2, lambda q: turn(q, angles)).float()
    expect_close(actual, expected, atol=1e-3, rtol=1e-4, name="scores", answer=pairs[0], read=LAYOUTS)


def test_half_to_interleaved_leaves_weight_unchanged():
    case("n_heads=2, head_dim=6, bfloat16: weight after the call")
    weight = randn(12, 3, dtype=torch.bfloat16)
    before = weight.clone()
    out = rope.half_to_interleaved(weight, 2)
    expect_close(weight, before, atol=0.0, rtol=0.0, name="weight", answer=out, read="the contract")
    case("n_heads=2, head_dim=6, bfloat16: the dtype")
    expect_equal(str(out.dtype), "torch.bfloat16", name="out.dtype", answer=out, read="the contract")


# ---- interpolate_positions -------------------------------------------------------------------------------------------


def test_interpolate_positions_by_hand():
    case("context_len=8, trained_len=4: twice as long, so half a step each")
    expected = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5])
    expect_close(rope.interpolate_positions(8, 4), expected, atol=1e-6, read=INTERPOLATION)


@pytest.mark.parametrize(("context_len", "trained_len"), [(4, 8), (5, 5), (1, 2), (0, 5)])
def test_interpolate_positions_never_stretches(context_len, trained_len):
    case(f"context_len={context_len}, trained_len={trained_len}: it fits")
    expected = torch.arange(context_len, dtype=torch.float32)
    expect_close(rope.interpolate_positions(context_len, trained_len), expected, atol=1e-6, read=INTERPOLATION)


@pytest.mark.parametrize(("context_len", "trained_len"), [(7, 3), (1000, 300), (32_768, 4096)])
def test_interpolate_positions_stay_in_the_trained_range(context_len, trained_len):
    case(f"context_len={context_len}, trained_len={trained_len}")
    expected = torch.arange(context_len, dtype=torch.float64) * trained_len / context_len
    out = rope.interpolate_positions(context_len, trained_len)
    expect_close(out, expected.float(), rtol=1e-5, atol=1e-6, read=INTERPOLATION)
    expect_true(out.max().item() < trained_len, "the last position is outside the trained range", answer=out)


@pytest.mark.time_limit(60)  # where Transformers is imported; else milliseconds
def test_interpolate_positions_equal_transformers():
    case("context_len=16, trained_len=4: cosine and sine, against Transformers' linear scaling by 4")
    cos, sin = recorded("linear_scaling", lambda: transformers_table(16, 8, 10_000.0, rope_type="linear", factor=4.0))
    positions = rope.interpolate_positions(16, 4)
    angles = positions[:, None] * make_angles(2, 8)[1].float()
    expect_close(angles.cos(), cos, atol=1e-5, name="cosine of the angles", answer=positions, read=INTERPOLATION)
    expect_close(angles.sin(), sin, atol=1e-5, name="sine of the angles", answer=positions, read=INTERPOLATION)
