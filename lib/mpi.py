"""Message passing: processes that share nothing, and the collectives that are made of their messages."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:  # a module that imports MPI starts it; what takes a communicator need not
    from mpi4py import MPI

Array = TypeVar("Array", bound=np.ndarray)


def scatter_scale_average(comm: "MPI.Comm", values: Sequence[float] | None, factor: float = 0.5) -> float:
    """The mean of numbers that lie on rank 0, each scaled by another rank. (Exercise 9.1)

    Rank 0 scatters the numbers, every rank multiplies its own by ``factor``, rank 0 gets their sum by a reduce, divides it
    by R and broadcasts the mean.

    Args:
        comm: The communicator, of R ranks.
        values: On rank 0 a sequence of R numbers, left unchanged; what the other ranks pass is not looked at.
        factor: What each number is multiplied by.

    Returns:
        The mean of ``factor * value``, the same on every rank: 35.25 for 39, 72, 129, 42 and one half.

    Raises:
        ValueError: rank 0's sequence does not hold R numbers; on every rank, with both counts. (A rank that raised alone
            would leave the others waiting.)

    Cost: one scatter, one reduce, one broadcast; no barrier. (An all-reduce may take the place of the last two.)
    """
    raise NotImplementedError("Exercise 9.1: write scatter_scale_average")


def tree_broadcast(comm: "MPI.Comm", array: Array, root: int = 0) -> Array:
    """Copy the root's array to every rank, along a binomial tree of messages. (Exercise 9.2)

    Args:
        comm: The communicator, of R ranks.
        array: NumPy array, of one shape and dtype on all ranks, any strides. The root's is sent, not written to, and may be
            read-only; the others' are overwritten.
        root: The rank whose array all shall have.

    Returns:
        ``array`` itself, which now holds the root's numbers.

    Raises:
        ValueError: ``root`` is not from 0 to R - 1; the message names both.

    Cost: ``ceil(log2 R)`` rounds, in each of which a rank sends to or receives from at most one other; R - 1 messages in
        all; no collective.
    Convention: filled in place and returned, so that it can stand where ``comm.Bcast(array, root)`` stood.
    """
    raise NotImplementedError("Exercise 9.2: write tree_broadcast")


def ring_all_reduce(comm: "MPI.Comm", array: np.ndarray) -> np.ndarray:
    """The sum of all ranks' arrays, on every rank, by messages to the right neighbour only. (Exercise 9.3)

    The array is cut into R chunks whose lengths differ by at most one (some are empty if it is shorter than R). R - 1 steps
    of reduce-scatter leave each rank with one chunk that is summed; R - 1 steps of all-gather pass the sums on.

    Args:
        comm: The communicator, of R ranks.
        array: NumPy array, float32 or float64, of one shape and dtype on all ranks; any shape, any strides.

    Returns:
        A new array of the shape and dtype of ``array``, with the same bits on every rank.

    Source: Patarasuk and Yuan (2009), Bandwidth optimal all-reduce algorithms for clusters of workstations.
    Convention: ``array`` is left unchanged; ``comm.Allreduce`` fills a buffer that it is given instead. What a rank receives
        into has the dtype that its neighbour sends: MPI converts nothing.
    Cost: 2 (R - 1) messages a rank, each of at most ``ceil(n / R)`` of the n elements; no collective. It may not deadlock
        at any size of message, so no rank may wait for a send to end before it receives.
    """
    raise NotImplementedError("Exercise 9.3: write ring_all_reduce")


def all_reduce_seconds(n_bytes: float, n_ranks: int, latency_s: float, bandwidth: float, algorithm: str) -> float:
    """How long an all-reduce takes, if a message of n bytes takes latency + n / bandwidth. (Exercise 9.4)

    Args:
        n_bytes: Size of the array on each rank.
        n_ranks: Ranks R, from 1.
        latency_s: Seconds that a message takes however short it is.
        bandwidth: Bytes a second.
        algorithm: ``"naive"`` (to rank 0 one after the other, and back), ``"tree"`` (to the root of a binomial tree, and
            back) or ``"ring"``.

    Returns:
        Seconds; 0 for one rank.

    Raises:
        ValueError: another algorithm; the message names it and the three.
        ValueError: ``n_ranks`` is below 1; the message names it.

    Source: Thakur, Rabenseifner and Gropp (2005), Optimization of collective communication operations in MPICH, section 3.
    Convention: additions are free; at any time a rank sends at most one message and receives at most one.
    """
    raise NotImplementedError("Exercise 9.4: write all_reduce_seconds")


def average_gradients_mpi(comm: "MPI.Comm", module: nn.Module) -> None:
    """Replace every gradient by its mean over the ranks, with one all-reduce for the whole module. (Exercise 9.5)

    Args:
        comm: The communicator, of R ranks.
        module: The same module on every rank, after a backward pass of its own; any floating dtypes, also several.

    Returns:
        Nothing; ``p.grad`` changes in place and keeps its dtype, shape and device (the buffer lies on the CPU, where NumPy
        and MPI see it). Parameters and buffers are untouched.

    Cost: one ``Allreduce`` (or ``Iallreduce``) of a NumPy buffer that holds a number for each gradient element and nothing
        else, and no other message.
    Convention: a gradient that is None counts as zeros, and the sum is still divided by R; afterwards every parameter has
        the mean, zeros if no rank had a gradient, as chapter 10's averages do. Frozen parameters (``requires_grad=False``)
        are left out. The buffer is float32, or float64 if any parameter is.
    """
    raise NotImplementedError("Exercise 9.5: write average_gradients_mpi")
