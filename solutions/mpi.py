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
    """The mean of rank 0's numbers, each of which a different rank scales. (Exercise)

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
    ### BEGIN SOLUTION
    n_ranks, is_root = comm.Get_size(), comm.Get_rank() == 0
    parts: list[Any] = list(values) if is_root else []  # type: ignore[arg-type]
    if is_root and len(parts) != n_ranks:
        parts = [ValueError(f"{len(parts)} values for {n_ranks} ranks: expected one for each")] * n_ranks
    part = comm.scatter(parts, root=0)
    if isinstance(part, ValueError):
        raise part
    total: Any = comm.reduce(part * factor, root=0)
    return comm.bcast(total / n_ranks if is_root else None, root=0)
    ### END SOLUTION


def tree_broadcast(comm: "MPI.Comm", array: Array, root: int = 0) -> Array:
    """Copy the root's array to every rank, along a binomial tree of messages. (Exercise)

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
    ### BEGIN SOLUTION
    n_ranks = comm.Get_size()
    if not 0 <= root < n_ranks:
        raise ValueError(f"root is {root}, expected one of the {n_ranks} ranks 0 to {n_ranks - 1}")
    place, reach = (comm.Get_rank() - root) % n_ranks, 1  # places count from the root; those below reach have the array
    buffer = np.asarray(array, order="C")  # MPI needs contiguous memory
    while reach < n_ranks:
        if place < reach and place + reach < n_ranks:
            comm.Send(buffer, dest=(place + reach + root) % n_ranks)
        elif reach <= place < 2 * reach:
            comm.Recv(buffer, source=(place - reach + root) % n_ranks)
        reach *= 2
    if buffer is not array and place != 0:
        array[...] = buffer
    return array
    ### END SOLUTION


def ring_all_reduce(comm: "MPI.Comm", array: np.ndarray) -> np.ndarray:
    """The sum of all ranks' arrays, on every rank, by messages to the right neighbour only. (Exercise)

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
    ### BEGIN SOLUTION
    rank, n_ranks = comm.Get_rank(), comm.Get_size()
    right, left = (rank + 1) % n_ranks, (rank - 1) % n_ranks
    total = np.array(array, order="C")
    chunks = np.array_split(total.reshape(-1), n_ranks)
    inbox = np.empty_like(chunks[0])  # as long as the longest chunk
    for step in range(n_ranks - 1):  # reduce-scatter: add what arrives
        mine, theirs = chunks[(rank - step) % n_ranks], chunks[(rank - step - 1) % n_ranks]
        received = inbox[: theirs.size]
        comm.Sendrecv(mine, dest=right, recvbuf=received, source=left)
        theirs += received
    for step in range(n_ranks - 1):  # all-gather: what arrives is a complete sum
        mine, theirs = chunks[(rank - step + 1) % n_ranks], chunks[(rank - step) % n_ranks]
        comm.Sendrecv(mine, dest=right, recvbuf=theirs, source=left)
    return total
    ### END SOLUTION


def all_reduce_seconds(n_bytes: float, n_ranks: int, latency_s: float, bandwidth: float, algorithm: str) -> float:
    """How long an all-reduce takes, if a message of n bytes takes latency + n / bandwidth. (Exercise)

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
    ### BEGIN SOLUTION
    if n_ranks < 1:
        raise ValueError(f"n_ranks is {n_ranks}, expected at least 1")
    n_rounds = (n_ranks - 1).bit_length()  # ceil(log2 R), without a rounded logarithm
    costs = {
        "naive": (2 * (n_ranks - 1), n_bytes),
        "tree": (2 * n_rounds, n_bytes),
        "ring": (2 * (n_ranks - 1), n_bytes / n_ranks),
    }
    if algorithm not in costs:
        raise ValueError(f"no algorithm {algorithm!r}: expected one of {', '.join(costs)}")
    n_messages, message_bytes = costs[algorithm]
    return n_messages * (latency_s + message_bytes / bandwidth)
    ### END SOLUTION


def average_gradients_mpi(comm: "MPI.Comm", module: nn.Module) -> None:
    """Replace every gradient by its mean over the ranks, with one all-reduce for the whole module. (Exercise)

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
    ### BEGIN SOLUTION
    parameters = [p for p in module.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in parameters]
    dtype = torch.float32
    for p in parameters:
        dtype = torch.promote_types(dtype, p.dtype)
    parts = [grad.flatten().to("cpu", dtype) for grad in grads]
    flat = torch.cat([torch.empty(0, dtype=dtype), *parts])  # a module may have no parameters
    total = torch.empty_like(flat)
    comm.Allreduce(flat.numpy(), total.numpy())
    means = total.div_(comm.Get_size()).split([p.numel() for p in parameters])
    for p, grad, mean in zip(parameters, grads, means, strict=True):
        grad.copy_(mean.view(p.shape))
        p.grad = grad if p.grad is None else p.grad  # a detached gradient shares the old one's memory
    ### END SOLUTION
