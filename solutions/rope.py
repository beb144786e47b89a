"""Rotary position embedding: a token's position as a rotation of its queries and keys."""

import math

import torch
from einops import rearrange
from jaxtyping import Complex, Float
from torch import Tensor


def rope_frequencies(head_dim: int, theta: float = 10_000.0, device=None) -> Float[Tensor, " half_d"]:
    """Angular frequency of each pair of features. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        head_dim: Width D of a head; even.
        theta: Base of the geometric progression.
        device: Where the result lives: "cpu", "cuda" or "mps".

    Returns:
        Radians per position, float32 ``[D/2]``: ``theta ** (-2i / D)`` for pairs i = 0 .. D/2 - 1, which go from 1
        down to nearly 1/theta.

    Raises:
        ValueError: ``head_dim`` is odd; the message gives its value and says that it must be even.

    Source: RoFormer (arXiv:2104.09864), section 3.2.2.
    Convention: pairs count from 0. The paper counts them from 1 and writes ``-2(i - 1) / D``, which is the same.
    """
    ### BEGIN SOLUTION
    if head_dim % 2:
        raise ValueError(f"head_dim must be even to be cut into pairs, got {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / theta**exponents
    ### END SOLUTION


def rotation_matrix(position: int, head_dim: int, theta: float = 10_000.0) -> Float[Tensor, "d d"]:
    """The rotation of one position, as a whole matrix. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        position: Position m of the token; the first token is at 0.
        head_dim: Width D of a head; even.
        theta: Base of the frequencies.

    Returns:
        Float32, block-diagonal: block i turns features (2i, 2i + 1) of a column vector by ``m * frequency[i]`` radians,
        counter-clockwise. All other entries are 0.

    Raises:
        ValueError: ``head_dim`` is odd; the message gives its value.

    Source: RoFormer (arXiv:2104.09864), equation (15).
    """
    ### BEGIN SOLUTION
    blocks = []
    for frequency in rope_frequencies(head_dim, theta).tolist():
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        blocks.append(torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float32))
    return torch.block_diag(*blocks)
    ### END SOLUTION


def precompute_rope(
    head_dim: int, context_len: int, theta: float = 10_000.0, device=None
) -> Complex[Tensor, "context_len half_d"]:
    """The rotations of every position up to ``context_len``, as complex numbers. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        head_dim: Width D of a head; even.
        context_len: Number of positions, 0 .. context_len - 1.
        theta: Base of the frequencies.
        device: Where the result lives; None means PyTorch's default device. If a device is given, nothing is
            made on the default one.

    Returns:
        Complex64 of modulus 1: row m holds ``exp(1j * m * frequency[i])`` for each pair i.

    Raises:
        ValueError: ``head_dim`` is odd; the message gives its value.

    Source: RoFormer (arXiv:2104.09864), equation (12); Meta's Llama code stores it in this form.
    Convention: Meta and Transformers multiply position and frequency in float32, which is off by up to 0.004 radians
        at position 100,000. The reference multiplies in float64. Both pass the checks; float16 and bfloat16 do not.
    """
    ### BEGIN SOLUTION
    device = torch.get_default_device() if device is None else device
    positions = torch.arange(context_len, dtype=torch.float64, device="cpu")  # Apple's GPU has no float64
    angles = torch.outer(positions, rope_frequencies(head_dim, theta, device="cpu").double())
    return torch.polar(torch.ones_like(angles), angles).to(device, torch.complex64)
    ### END SOLUTION


def apply_rope(x: Float[Tensor, "b t h d"], rope: Complex[Tensor, "t half_d"]) -> Float[Tensor, "b t h d"]:
    """Rotate each pair of features of queries or keys by the position of its token. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        x: Queries or keys of any floating dtype, also float64, and of any strides; not changed.
        rope: Rows of ``precompute_rope`` for exactly the T positions of ``x``.

    Returns:
        Each vector, multiplied by the ``rotation_matrix`` of its position, in the dtype of ``x``. The arithmetic is in
        float32.

    Raises:
        ValueError: ``rope`` is not ``[T, D/2]``; the message names the shape that it has and the one that it should
            have. (A table of one row would broadcast, and every token would be at the same position.)

    Cost: a few operations on whole tensors of the size of ``x``: no ``[D, D]`` matrix, no loop over positions.
    Source: RoFormer (arXiv:2104.09864), section 3.4.2.
    Convention: pairs are neighbours, (2i, 2i + 1), as in the paper and in Meta's code. GPT-NeoX and Transformers pair
        feature i with i + D/2: see ``interleaved_to_half``.
    """
    ### BEGIN SOLUTION
    t, half = x.shape[1], x.shape[3] / 2
    if tuple(rope.shape) != (t, half):
        raise ValueError(f"x {list(x.shape)} needs a rope of [{t}, {half:g}] (T, D/2), got {list(rope.shape)}")
    real, imaginary = rearrange(x.float(), "b t h (i two) -> two b t h i", two=2)
    rotated = torch.complex(real, imaginary) * rope[:, None, :]
    return rearrange(torch.view_as_real(rotated), "b t h i two -> b t h (i two)").to(x.dtype)
    ### END SOLUTION


def interleaved_to_half(weight: Float[Tensor, "h_d c"], n_heads: int) -> Float[Tensor, "h_d c"]:
    """Reorder a projection's rows from neighbouring pairs to split halves. (Exercise)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        weight: Query or key projection ``[H*D, C]`` whose rotary pairs are rows (2i, 2i + 1) of each head.
        n_heads: Number of heads H in ``weight`` (for keys under grouped queries: the number of key heads).

    Returns:
        The same rows in another order, in which the pairs of each head are its rows (i, i + D/2).
        ``weight`` is not changed.

    Source: Transformers' ``convert_llama_weights_to_hf.py``, which calls it ``permute``.
    """
    ### BEGIN SOLUTION
    return rearrange(weight, "(h i two) c -> (h two i) c", h=n_heads, two=2)
    ### END SOLUTION


def half_to_interleaved(weight: Float[Tensor, "h_d c"], n_heads: int) -> Float[Tensor, "h_d c"]:
    """Reorder a projection's rows from split halves to neighbouring pairs. (Exercise)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        weight: Query or key projection ``[H*D, C]`` whose rotary pairs are rows (i, i + D/2) of each head.
        n_heads: Number of heads H in ``weight``.

    Returns:
        The same rows in another order, in which the pairs of each head are its rows (2i, 2i + 1). This undoes
        ``interleaved_to_half``. ``weight`` is not changed.
    """
    ### BEGIN SOLUTION
    return rearrange(weight, "(h two i) c -> (h i two) c", h=n_heads, two=2)
    ### END SOLUTION


def interpolate_positions(context_len: int, trained_len: int) -> Float[Tensor, " context_len"]:
    """Positions of a long context, squeezed into the range that a model was trained on. (Exercise)

    Size: 10 minutes, difficulty 2, stretch.

    Args:
        context_len: Number of positions in the context.
        trained_len: Number of positions that the model saw in training.

    Returns:
        Float32 ``[context_len]``: 0, 1, 2, … times ``trained_len / context_len`` if the context is longer than the
        trained one. A context that fits is not scaled; one of 0 positions gives an empty tensor.

    Source: Position interpolation (arXiv:2306.15595), whose f'(x, m) is f(x, mL/L').
    """
    ### BEGIN SOLUTION
    scale = trained_len / max(context_len, trained_len)
    return torch.arange(context_len, dtype=torch.float32) * scale
    ### END SOLUTION
