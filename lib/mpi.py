"""Message passing: processes that share nothing, and the collectives that are made of their messages."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:  # importing mpi4py.MPI starts MPI, and functions that take a communicator needn't import it
    from mpi4py import MPI

Array = TypeVar("Array", bound=np.ndarray)


def scatter_scale_average(comm: "MPI.Comm", values: Sequence[float] | None, factor: float = 0.5) -> float:
    """The mean of rank 0's numbers, each of which a different rank scales. (Exercise 9.1)

    Size: 20 minutes, difficulty 2, warm-up.

    Rank 0 scatters the numbers, and every rank multiplies its own by ``factor``.
    A reduce gives rank 0 the sum; rank 0 divides it by R and broadcasts the mean.

    Args:
        comm: The communicator, of R ranks.
        values: On rank 0 a sequence of R numbers, left unchanged; ignored on the other ranks, where it may be None.
        factor: Multiplies each number.

    Returns:
        The mean of ``factor * value``, the same on every rank: 35.25 for 39, 72, 129, 42 and one half.

    Raises:
        ValueError: rank 0's sequence does not hold R numbers.
            Every rank raises it, with both counts in the message: if one rank raised alone, the others would wait for
            ever.

    Cost: one scatter, one reduce, one broadcast; no barrier.
        An all-reduce may replace the last two.
    """
    raise NotImplementedError("Exercise 9.1: write scatter_scale_average")


def tree_broadcast(comm: "MPI.Comm", array: Array, root: int = 0) -> Array:
    """Copy the root's array to every rank, along a binomial tree of messages. (Exercise 9.2)

    Size: 30 minutes, difficulty 3, core.

    Args:
        comm: The communicator, of R ranks.
        array: NumPy array of the same shape and dtype on all ranks, with any strides.
            The root's is sent and never written to, so it may be read-only; the other ranks' are overwritten.
        root: The rank whose array all ranks get.

    Returns:
        ``array`` itself, which now holds the root's numbers.

    Raises:
        ValueError: ``root`` is not from 0 to R - 1; the message names both.

    Cost: ``ceil(log2 R)`` rounds; in each, a rank sends to at most one other rank or receives from at most one.
        R - 1 messages in total; no collective.
    Convention: ``array`` is filled in place and returned, so that the call can replace ``comm.Bcast(array, root)``.
    """
    raise NotImplementedError("Exercise 9.2: write tree_broadcast")


def ring_all_reduce(comm: "MPI.Comm", array: np.ndarray) -> np.ndarray:
    """The sum of all ranks' arrays, on every rank, by messages to the right neighbour only. (Exercise 9.3)

    Size: 40 minutes, difficulty 4, core.

    The array is cut into R chunks whose lengths differ by at most one (some are empty if it is shorter than R).
    After R - 1 steps of reduce-scatter each rank has one chunk that is fully summed; R - 1 steps of all-gather pass the
    sums on.

    Args:
        comm: The communicator, of R ranks.
        array: NumPy array, float32 or float64, of the same shape and dtype on all ranks; any shape, any strides.

    Returns:
        A new array of the shape and dtype of ``array``, with the same bits on every rank.

    Source: Patarasuk and Yuan (2009), Bandwidth optimal all-reduce algorithms for clusters of workstations.
    Convention: ``array`` is left unchanged (``comm.Allreduce`` fills a second buffer that you pass).
        Receive into a buffer of the dtype that the neighbour sends: MPI converts nothing.
    Cost: 2 (R - 1) messages a rank, each of at most ``ceil(n / R)`` of the n elements; no collective.
        It must not deadlock at any size of message, so no rank may wait for a send to end before it receives.
    """
    raise NotImplementedError("Exercise 9.3: write ring_all_reduce")


def all_reduce_seconds(n_bytes: float, n_ranks: int, latency_s: float, bandwidth: float, algorithm: str) -> float:
    """How long an all-reduce takes, if a message of n bytes takes latency + n / bandwidth. (Exercise 9.4)

    Size: 20 minutes, difficulty 2, core.

    Args:
        n_bytes: Size of the array on each rank.
        n_ranks: Ranks R, from 1.
        latency_s: Seconds that every message takes, however short it is.
        bandwidth: Bytes a second.
        algorithm: ``"naive"`` (to rank 0 one after the other, and back), ``"tree"`` (to the root of a binomial tree,
            and back) or ``"ring"``.

    Returns:
        Seconds; 0 for one rank.

    Raises:
        ValueError: another algorithm; the message names it and the three.
        ValueError: ``n_ranks`` is below 1; the message names it.

    Source: Thakur, Rabenseifner and Gropp (2005), Optimization of collective communication operations in MPICH, section
        3.
    Convention: additions are free; at any time a rank sends at most one message and receives at most one; a rank of the
        tree sends its whole array in one message (libraries cut it into pieces and pipeline them).
    """
    raise NotImplementedError("Exercise 9.4: write all_reduce_seconds")


def average_gradients_mpi(comm: "MPI.Comm", module: nn.Module) -> None:
    """Replace every gradient by its mean over the ranks, with one all-reduce for the whole module. (Exercise 9.5)

    Size: 25 minutes, difficulty 3, core.

    Args:
        comm: The communicator, of R ranks.
        module: The same module on every rank, after a backward pass of its own; any floating dtypes, also several.

    Returns:
        Nothing; ``p.grad`` changes in place and keeps its dtype, shape and device.
        (The buffer is on the CPU, where NumPy and MPI can see it.)
        Parameters and buffers stay as they are.

    Cost: one ``Allreduce`` (or ``Iallreduce``) of a NumPy buffer with one number for each gradient element and nothing
        else, and no other message.
    Convention: a gradient that is None counts as zeros, and the sum is still divided by R.
        Afterwards every parameter has the mean, and zeros if no rank had a gradient, as in chapter 10.
        Frozen parameters (``requires_grad=False``) are left out.
        The buffer is float32, or float64 if any of the other parameters is.
    """
    raise NotImplementedError("Exercise 9.5: write average_gradients_mpi")
