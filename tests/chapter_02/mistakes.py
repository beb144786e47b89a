"""Plausible wrong answers of chapter 2, and the misconception behind each."""

import math

import torch
from einops import rearrange

from lib.workbook.grading import mistake
from solutions import rope as reference

# ---- 2.1 rope_frequencies --------------------------------------------------------------------------------------------


def _pairs(head_dim: int) -> torch.Tensor:
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    return torch.arange(head_dim // 2, dtype=torch.float32)


@mistake("rope_frequencies", "the exponent is -i/D: it counts pairs, where -2i/D counts their first features")
def exponent_without_two(head_dim, theta=10_000.0, device=None):
    return (theta ** (-_pairs(head_dim) / head_dim)).to(device)


@mistake("rope_frequencies", "theta is raised to a positive power: the later pairs turn faster instead of slower")
def positive_power(head_dim, theta=10_000.0, device=None):
    return (theta ** (2 * _pairs(head_dim) / head_dim)).to(device)


@mistake("rope_frequencies", "pairs count from 1, as in the paper, but with the formula that counts from 0")
def counted_from_one(head_dim, theta=10_000.0, device=None):
    return (theta ** (-2 * (_pairs(head_dim) + 1) / head_dim)).to(device)


@mistake("rope_frequencies", "the exponent is -2i/(D/2): it is divided by the number of pairs, not by D")
def exponent_over_pairs(head_dim, theta=10_000.0, device=None):
    return (theta ** (-2 * _pairs(head_dim) / (head_dim // 2))).to(device)


@mistake(
    "rope_frequencies", "the last frequency is exactly 1/theta: linspace includes its end, but -2i/D stops before -1"
)
def end_counted(head_dim, theta=10_000.0, device=None):
    return (theta ** -torch.linspace(0, 1, len(_pairs(head_dim)))).to(device)


@mistake("rope_frequencies", "one frequency for every feature, where each pair of features shares one")
def one_for_each_feature(head_dim, theta=10_000.0, device=None):
    return reference.rope_frequencies(head_dim, theta, device).repeat_interleave(2)


@mistake("rope_frequencies", "the frequencies fall in equal steps, where each is the one before times a constant")
def linear_steps(head_dim, theta=10_000.0, device=None):
    return (1 - (1 - 1 / theta) * 2 * _pairs(head_dim) / head_dim).to(device)


@mistake("rope_frequencies", "theta is ignored: the base is always 10,000")
def base_fixed(head_dim, theta=10_000.0, device=None):
    return reference.rope_frequencies(head_dim, device=device)


@mistake("rope_frequencies", "an odd head width is silently rounded down")
def odd_accepted(head_dim, theta=10_000.0, device=None):
    return reference.rope_frequencies(head_dim - head_dim % 2, theta, device)


@mistake("rope_frequencies", "the device asked for is ignored")
def frequencies_on_cpu(head_dim, theta=10_000.0, device=None):
    return reference.rope_frequencies(head_dim, theta)


# ---- 2.2 rotation_matrix ---------------------------------------------------------------------------------------------


def _blocks(position, head_dim, theta, block):
    frequencies = reference.rope_frequencies(head_dim, theta).tolist()
    angles = torch.tensor([position * f for f in frequencies], dtype=torch.float64)
    blocks = (torch.tensor(block(c, s)) for c, s in zip(angles.cos(), angles.sin(), strict=True))
    return torch.block_diag(*blocks).float()


@mistake("rotation_matrix", "it turns the wrong way: the minus sign stands below the diagonal instead of above it")
def matrix_backwards(position, head_dim, theta=10_000.0):
    return _blocks(position, head_dim, theta, lambda c, s: [[c, s], [-s, c]])


@mistake("rotation_matrix", "the blocks overlap: pair i begins at row 2i, not at row i")
def matrix_of_overlapping_blocks(position, head_dim, theta=10_000.0):
    out = torch.zeros(head_dim, head_dim)
    for i, frequency in enumerate(reference.rope_frequencies(head_dim, theta).tolist()):
        c, s = math.cos(position * frequency), math.sin(position * frequency)
        out[i : i + 2, i : i + 2] = torch.tensor([[c, -s], [s, c]])
    return out


@mistake("rotation_matrix", "sine and cosine exchanged")
def matrix_exchanged(position, head_dim, theta=10_000.0):
    return _blocks(position, head_dim, theta, lambda c, s: [[s, -c], [c, s]])


@mistake("rotation_matrix", "both sines have the same sign: that is a reflection and not a rotation")
def matrix_reflects(position, head_dim, theta=10_000.0):
    return _blocks(position, head_dim, theta, lambda c, s: [[c, s], [s, -c]])


@mistake("rotation_matrix", "the pairs are (i, i + D/2), where the contract asks for neighbours (2i, 2i + 1)")
def matrix_of_halves(position, head_dim, theta=10_000.0):
    order = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    return reference.rotation_matrix(position, head_dim, theta)[order][:, order]


@mistake("rotation_matrix", "positions start at 1: every angle is one position too far")
def matrix_from_one(position, head_dim, theta=10_000.0):
    return reference.rotation_matrix(position + 1, head_dim, theta)


@mistake("rotation_matrix", "every pair turns by the first pair's angle: the frequencies are not used")
def matrix_of_one_speed(position, head_dim, theta=10_000.0):
    return _blocks(position, head_dim, 1.0, lambda c, s: [[c, -s], [s, c]])


@mistake("rotation_matrix", "the frequencies grow instead of falling: mend rope_frequencies first")
def matrix_of_growing_frequencies(position, head_dim, theta=10_000.0):
    return reference.rotation_matrix(position, head_dim, 1 / theta)


@mistake("rotation_matrix", "the frequencies have the exponent -i/D, not -2i/D: mend rope_frequencies first")
def matrix_of_exponent_without_two(position, head_dim, theta=10_000.0):
    return reference.rotation_matrix(position, head_dim, theta**0.5)


# ---- 2.3 precompute_rope ---------------------------------------------------------------------------------------------


def _table(positions, frequencies, device=None):
    angles = torch.outer(positions, frequencies).float()
    return torch.polar(torch.ones_like(angles), angles).to(device)


@mistake("precompute_rope", "positions start at 1: the first token must not be turned at all")
def table_from_one(head_dim, context_len, theta=10_000.0, device=None):
    return reference.precompute_rope(head_dim, context_len + 1, theta, device)[1:]


@mistake("precompute_rope", "the arguments of polar are exchanged: the modulus comes first, then the angle")
def table_of_polar_exchanged(head_dim, context_len, theta=10_000.0, device=None):
    positions = torch.arange(context_len, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, reference.rope_frequencies(head_dim, theta, "cpu"))
    return torch.polar(angles, torch.ones_like(angles)).to(device)


@mistake(
    "precompute_rope", "the table holds the angles themselves, not the complex numbers of modulus 1 with those angles"
)
def table_of_angles(head_dim, context_len, theta=10_000.0, device=None):
    frequencies = reference.rope_frequencies(head_dim, theta, "cpu")
    return torch.outer(torch.arange(context_len, device="cpu"), frequencies).to(torch.complex64).to(device)


@mistake("precompute_rope", "sine and cosine exchanged: the real part should be the cosine")
def table_exchanged(head_dim, context_len, theta=10_000.0, device=None):
    table = reference.precompute_rope(head_dim, context_len, theta, "cpu")
    return torch.complex(table.imag, table.real).to(device)


@mistake("precompute_rope", "the sign of the angle is wrong: the table turns backwards")
def table_backwards(head_dim, context_len, theta=10_000.0, device=None):
    return reference.precompute_rope(head_dim, context_len, theta, device).conj().resolve_conj()


@mistake("precompute_rope", "positions and frequencies were multiplied in bfloat16, which cannot tell 257 from 256")
def table_in_bf16(head_dim, context_len, theta=10_000.0, device=None):
    positions = torch.arange(context_len, device="cpu").bfloat16()
    return _table(positions, reference.rope_frequencies(head_dim, theta, "cpu").bfloat16(), device)


@mistake("precompute_rope", "the table is transposed: positions are its rows, pairs its columns")
def table_transposed(head_dim, context_len, theta=10_000.0, device=None):
    return reference.precompute_rope(head_dim, context_len, theta, device).T


@mistake("precompute_rope", "the table holds complex128, where complex64 is asked for")
def table_in_double(head_dim, context_len, theta=10_000.0, device=None):
    return reference.precompute_rope(head_dim, context_len, theta, device).to(torch.complex128)


@mistake("precompute_rope", "theta is not passed on to the frequencies")
def table_of_fixed_base(head_dim, context_len, theta=10_000.0, device=None):
    return reference.precompute_rope(head_dim, context_len, device=device)


@mistake("precompute_rope", "the device asked for is ignored")
def table_on_cpu(head_dim, context_len, theta=10_000.0, device=None):
    return reference.precompute_rope(head_dim, context_len, theta)


@mistake("precompute_rope", "the table is made on PyTorch's default device and then moved to the one asked for")
def table_moved(head_dim, context_len, theta=10_000.0, device=None):
    frequencies = reference.rope_frequencies(head_dim, theta)
    return _table(torch.arange(context_len).float(), frequencies).to(device)


@mistake("precompute_rope", "the frequencies grow instead of falling: mend rope_frequencies first")
def table_of_growing_frequencies(head_dim, context_len, theta=10_000.0, device=None):
    return reference.precompute_rope(head_dim, context_len, 1 / theta, device)


@mistake("precompute_rope", "the frequencies have the exponent -i/D, not -2i/D: mend rope_frequencies first")
def table_of_exponent_without_two(head_dim, context_len, theta=10_000.0, device=None):
    return reference.precompute_rope(head_dim, context_len, theta**0.5, device)


# ---- 2.4 apply_rope --------------------------------------------------------------------------------------------------


def _check(x, rope):
    if rope.shape != (x.shape[1], x.shape[3] // 2):
        raise ValueError(f"x {list(x.shape)}, rope {list(rope.shape)}: expected {[x.shape[1], x.shape[3] // 2]}")


def _turn(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


@mistake("apply_rope", "sine and cosine exchanged")
def sine_cosine_exchanged(x, rope):
    _check(x, rope)
    return _turn(x.float(), rope.imag[:, None], rope.real[:, None]).to(x.dtype)


@mistake(
    "apply_rope", "the pairs are (i, i + D/2), as in Transformers, where the contract asks for neighbours (2i, 2i + 1)"
)
def halves_paired(x, rope):
    _check(x, rope)
    pairs = rearrange(x.float(), "b t h (two i) -> b t h i two", two=2).contiguous()
    out = torch.view_as_real(torch.view_as_complex(pairs) * rope[:, None])
    return rearrange(out, "b t h i two -> b t h (two i)").to(x.dtype)


@mistake("apply_rope", "neighbours were paired, but the result holds all real parts first and then all imaginary ones")
def halves_returned(x, rope):
    out = reference.apply_rope(x, rope)
    return torch.cat([out[..., 0::2], out[..., 1::2]], dim=-1)


@mistake("apply_rope", "it turns the wrong way: by minus the angle")
def turned_backwards(x, rope):
    return reference.apply_rope(x, rope.conj().resolve_conj())


@mistake("apply_rope", "the odd feature of a pair was taken as the real part: it is the imaginary one")
def parts_exchanged(x, rope):
    _check(x, rope)
    return _turn(x.float().unflatten(-1, (-1, 2)).flip(-1).flatten(-2), rope.real[:, None], rope.imag[:, None]).to(
        x.dtype
    )


@mistake("apply_rope", "the table runs along the heads instead of the positions")
def turned_by_head(x, rope):
    _check(x, rope)
    by_head = rope[torch.arange(x.shape[2]) % len(rope)]
    return _turn(x.float(), by_head.real, by_head.imag).to(x.dtype)


@mistake("apply_rope", "every position was turned by the row after its own")
def shifted_by_one(x, rope):
    _check(x, rope)
    return reference.apply_rope(x, rope * rope[1:2] / rope[0:1] if len(rope) > 1 else rope)


@mistake("apply_rope", "the second output uses the first after it was overwritten: keep both old values of a pair")
def overwritten_halfway(x, rope):
    _check(x, rope)
    out, cos, sin = x.float().clone(), rope.real[:, None], rope.imag[:, None]
    out[..., 0::2] = out[..., 0::2] * cos - out[..., 1::2] * sin
    out[..., 1::2] = out[..., 0::2] * sin + out[..., 1::2] * cos
    return out.to(x.dtype)


@mistake("apply_rope", "the result is left in float32 instead of going back to the dtype of x")
def left_in_float32(x, rope):
    return reference.apply_rope(x.float(), rope)


@mistake("apply_rope", "the arithmetic was done in the dtype of x instead of in float32")
def computed_in_dtype_of_x(x, rope):
    _check(x, rope)
    return _turn(x, rope.real[:, None].to(x.dtype), rope.imag[:, None].to(x.dtype))


@mistake("apply_rope", "the table has no axis for the heads, so its positions were broadcast over the heads")
def without_an_axis_for_the_heads(x, rope):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rope).flatten(-2).to(x.dtype)


@mistake("apply_rope", "x was changed in place")
def changed_in_place(x, rope):
    out = reference.apply_rope(x, rope)
    x.data.copy_(out)
    return out


@mistake("apply_rope", "the shape of the table is not checked: one row serves every position")
def broadcasts_silently(x, rope):
    return _turn(x.float(), rope.real[: x.shape[1], None], rope.imag[: x.shape[1], None]).to(x.dtype)


@mistake("apply_rope", "the result is cut off from the graph")
def detached(x, rope):
    return reference.apply_rope(x.detach(), rope)


@mistake("apply_rope", "a matrix of D x D is built for each position, where D/2 complex products are enough")
def with_matrices(x, rope):
    _check(x, rope)
    blocks = [
        torch.block_diag(*(torch.stack([torch.stack([c, -s]), torch.stack([s, c])]) for c, s in zip(*row, strict=True)))
        for row in zip(rope.real, rope.imag, strict=True)
    ]
    return torch.einsum("tij,bthj->bthi", torch.stack(blocks), x.float()).to(x.dtype)


@mistake("apply_rope", "positions are turned one by one in a loop")
def one_by_one(x, rope):
    _check(x, rope)
    return torch.cat([reference.apply_rope(x[:, m : m + 1], rope[m : m + 1]) for m in range(x.shape[1])], dim=1)


# ---- 2.5 and 2.6: the two layouts ------------------------------------------------------------------------------------


@mistake("interleaved_to_half", "the two layouts exchanged: that is half_to_interleaved")
def to_half_exchanged(weight, n_heads):
    return reference.half_to_interleaved(weight, n_heads)


@mistake("interleaved_to_half", "rows were moved across heads: each head keeps its own D rows")
def to_half_across_heads(weight, n_heads):
    return reference.interleaved_to_half(weight, 1)


@mistake("interleaved_to_half", "the columns were reordered, where the rows are the features of the queries")
def to_half_columns(weight, n_heads):
    return torch.cat([weight[:, 0::2], weight[:, 1::2]], dim=1)


@mistake("interleaved_to_half", "the rows are unchanged: a reshape alone moves nothing")
def to_half_unmoved(weight, n_heads):
    return weight.reshape(n_heads, 2, -1, weight.shape[1]).reshape(weight.shape)


@mistake("interleaved_to_half", "weight was reordered in place")
def to_half_in_place(weight, n_heads):
    return weight.copy_(reference.interleaved_to_half(weight, n_heads).clone())


@mistake("half_to_interleaved", "the two layouts exchanged: that is interleaved_to_half")
def to_interleaved_exchanged(weight, n_heads):
    return reference.interleaved_to_half(weight, n_heads)


@mistake("half_to_interleaved", "rows were moved across heads: each head keeps its own D rows")
def to_interleaved_across_heads(weight, n_heads):
    return reference.half_to_interleaved(weight, 1)


@mistake("half_to_interleaved", "the rows are unchanged: a reshape alone moves nothing")
def to_interleaved_unmoved(weight, n_heads):
    return weight.reshape(n_heads, -1, 2, weight.shape[1]).reshape(weight.shape)


@mistake("half_to_interleaved", "the second half comes before the first: the two members of each pair are exchanged")
def to_interleaved_flipped(weight, n_heads):
    return rearrange(
        rearrange(weight, "(h two i) c -> h i two c", h=n_heads, two=2).flip(2), "h i two c -> (h i two) c"
    )


@mistake("half_to_interleaved", "weight was reordered in place")
def to_interleaved_in_place(weight, n_heads):
    return weight.copy_(reference.half_to_interleaved(weight, n_heads).clone())


# ---- 2.7 interpolate_positions ---------------------------------------------------------------------------------------


@mistake(
    "interpolate_positions", "positions are multiplied by context / trained instead of divided: they leave the range"
)
def stretched(context_len, trained_len):
    return torch.arange(context_len).float() * max(1.0, context_len / trained_len)


@mistake(
    "interpolate_positions", "a context that fits is stretched too, so a short text looks like nothing seen in training"
)
def always_scaled(context_len, trained_len):
    return torch.arange(context_len).float() * (trained_len / context_len)


@mistake("interpolate_positions", "positions are cut off at the trained length instead of squeezed")
def clamped(context_len, trained_len):
    return torch.arange(context_len).float().clamp(max=trained_len - 1)


@mistake("interpolate_positions", "positions were rounded to whole numbers, so that neighbours share one")
def rounded(context_len, trained_len):
    return reference.interpolate_positions(context_len, trained_len).floor()


@mistake(
    "interpolate_positions",
    "the last position lands on the last trained one: the scale is (trained - 1) / (context - 1)",
)
def ends_joined(context_len, trained_len):
    if context_len <= trained_len:
        return torch.arange(context_len).float()
    return torch.linspace(0, trained_len - 1, context_len)
