"""What chapter 24 refuses before it computes, and the tiles of its kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lib.given.kernels.mode import INTERPRETED, block_of, check_tensors

__all__ = ["StateTiles", "check_chunk", "check_sequence", "state_tiles"]


def _refuse(expected: str, **tensors: Tensor | None) -> None:
    shown = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items() if x is not None)
    raise ValueError(f"{shown}: expected {expected}")


def check_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = 1,
) -> None:
    """Make sure that the shapes of a sequence fit together.

    Raises:
        ValueError: they don't (the message shows all of them), or ``chunk_size`` is below 1 (the message names it).
    """
    whole = q.ndim == v.ndim == 4 and q.shape == k.shape and q.shape[:3] == v.shape[:3]
    fits = whole and (g is None or g.shape in (q.shape[:3], q.shape)) and (beta is None or beta.shape == q.shape[:3])
    if fits and initial_state is not None:
        fits = initial_state.shape == (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    if not fits:
        _refuse(
            "q and k [B, T, H, Dk], v [B, T, H, Dv], g [B, T, H] or [B, T, H, Dk], beta [B, T, H], "
            "initial_state [B, H, Dk, Dv]",
            q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state,
        )  # fmt: skip
    if chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size}: expected at least 1")


def check_chunk(k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None) -> None:
    """Make sure that the shapes of a chunk fit together.

    Raises:
        ValueError: they don't; the message shows all of them.
    """
    fits = k.ndim >= 2 and k.shape[:-1] == v.shape[:-1] == beta.shape
    if not fits or not (g is None or g.shape in (beta.shape, k.shape)):
        _refuse("k [..., C, Dk], v [..., C, Dv], beta [..., C], g [..., C] or [..., C, Dk]", k=k, v=v, beta=beta, g=g)


@dataclass(frozen=True)
class StateTiles:
    """What one program of the kernel holds: ``chunk`` positions, ``width`` key features, ``slice`` value features."""

    chunk: int
    width: int
    slice: int
    num_warps: int = 4
    num_stages: int = 1


def state_tiles(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None, chunk_size: int
) -> StateTiles:
    """Check the kernel's arguments, and choose how much each program holds.

    The interpreter gets narrow slices, so that even a small head has several. On a GPU a chunk must fit into the
    on-chip memory, so a larger ``chunk_size`` is walked in smaller steps, which changes nothing but rounding; and few
    heads are cut into narrower slices, so that more processors have work.

    Raises:
        ValueError: as `check_sequence` and `check_tensors`; g is of each feature or a head is wider than 256 (the
            message shows the shapes); ``chunk_size`` is no power of two of at least 16 (the message names it).
    """
    check_sequence(q, k, v, g, initial_state=initial_state)
    check_tensors(q, k, v)
    if (g is not None and g.ndim == 4) or max(q.shape[-1], v.shape[-1]) > 256:
        _refuse("g None or [B, T, H], Dk and Dv at most 256", q=q, k=k, v=v, g=g)
    if chunk_size < 16 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size = {chunk_size}: expected a power of two of at least 16")
    width = block_of(q.shape[-1])
    if INTERPRETED:
        return StateTiles(chunk_size, width, 16)
    if q.dtype == torch.float32:
        return StateTiles(min(chunk_size, 32), width, 16)
    chunk = min(chunk_size, 32768 // width)
    n_programs = q.shape[0] * q.shape[2] * -(-v.shape[-1] // 32)
    small = chunk * width <= 8192
    return StateTiles(chunk, width, 32 if n_programs >= 128 else 16, 4 if small else 8, 2 if small else 1)
