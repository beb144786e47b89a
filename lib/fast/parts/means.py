"""The mean over ranks of a row of numbers that all ranks have, after the other ranks' rows have been copied here."""

from torch import Tensor

from lib.given.kernels.mode import tl, triton

BLOCK = 8192  # numbers for each program


@triton.jit
def mean_kernel(
    own, received, out, squares, n, RANK: tl.constexpr, RANKS: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr
):
    """out [n] is the mean of own [n] and of the rows of received [RANKS, n] but row RANK, in the order of the ranks.

    With SQUARES, each program stores the sum of its squares.
    Bytes moved: each row once, and the mean. FLOPs: one for each number of a row, and two for the square.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
        else:
            row = received + tl.full([], rank, tl.int64) * n
            total += tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    mean = total * (1.0 / RANKS)
    tl.store(out + at, mean.to(out.dtype.element_ty), mask=inside)
    if SQUARES:
        tl.store(squares + tl.program_id(0), tl.sum(mean * mean, 0))


def n_squares(n: int) -> int:
    """How many sums of squares belong to a row of n numbers."""
    return -(-n // BLOCK)


def mean_of_ranks(own: Tensor, received: Tensor, rank: int, out: Tensor, squares: Tensor | None = None) -> None:
    """Fill ``out`` with the mean of this rank's row and the others'.

    Args:
        own: This rank's row ``[n]``.
        received: ``[R, n]``: the rows of all ranks; this rank's own is not read.
        rank: This rank.
        out: ``[n]``, float32; may be ``own``.
        squares: Gets the sums of the mean's squares, ``[n_squares(n)]``, float32.
    """
    n, grid = len(own), (n_squares(len(own)),)
    mean_kernel[grid](own, received, out, squares, n, rank, len(received), squares is not None, BLOCK, num_warps=8)
