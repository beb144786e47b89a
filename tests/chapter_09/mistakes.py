"""What goes wrong when people pass messages."""

import math

import numpy as np
import torch

from lib.workbook.grading import mistake
from solutions import mpi as reference


def _world(comm):
    """All ranks, whatever communicator was given."""
    from mpi4py import MPI  # which starts MPI

    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > comm.size else comm


# ---- 9.1 scatter_scale_average ---------------------------------------------------------------------------------------


def _check_count(comm, values):
    """The contract's error on every rank."""
    n = comm.bcast(len(values) if comm.rank == 0 else None)
    if n != comm.size:
        raise ValueError(f"{n} values for {comm.size} ranks")


def _scaled(comm, values, scale):
    parts = list(values) if comm.rank == 0 else None
    if comm.rank == 0 and len(parts) != comm.size:
        parts = [ValueError(f"{len(parts)} values for {comm.size} ranks")] * comm.size
    part = comm.scatter(parts)
    if isinstance(part, ValueError):
        raise part
    return scale(part)


@mistake("scatter_scale_average", "halves are cut to whole numbers, as in the C program: 19, 36, 64, 21")
def in_integers(comm, values, factor=0.5):
    total = comm.reduce(_scaled(comm, values, lambda part: float(int(part * factor))))
    return comm.bcast(None if total is None else total / comm.size)


@mistake("scatter_scale_average", "that is the sum: it is not divided by the number of ranks")
def not_divided(comm, values, factor=0.5):
    return comm.bcast(comm.reduce(_scaled(comm, values, lambda part: part * factor)))


@mistake("scatter_scale_average", "the numbers are divided by the factor, where they should be multiplied by it")
def divided_by_factor(comm, values, factor=0.5):
    total = comm.reduce(_scaled(comm, values, lambda part: part / factor))
    return comm.bcast(None if total is None else total / comm.size)


@mistake("scatter_scale_average", "the factor is ignored")
def not_scaled(comm, values, factor=0.5):
    return reference.scatter_scale_average(comm, values, 1.0)


@mistake(
    "scatter_scale_average",
    "only rank 0 has the mean: a reduce returns None on the other ranks, and nothing was broadcast",
)
def only_on_root(comm, values, factor=0.5):
    total = comm.reduce(_scaled(comm, values, lambda part: part * factor))
    return None if total is None else total / comm.size


@mistake("scatter_scale_average", "every rank takes its number from its own `values`; only rank 0 has them")
def from_own_values(comm, values, factor=0.5):
    return comm.allreduce(values[comm.rank] * factor) / comm.size


@mistake("scatter_scale_average", "rank 0 computes everything and broadcasts the result; the other ranks do no work")
def root_computes(comm, values, factor=0.5):
    _check_count(comm, values)
    return comm.bcast(sum(v * factor for v in values) / comm.size if comm.rank == 0 else None)


@mistake("scatter_scale_average", "there is a barrier before a collective, which waits by itself for what it needs")
def with_barriers(comm, values, factor=0.5):
    part = _scaled(comm, values, lambda part: part * factor)
    comm.Barrier()
    total = comm.reduce(part)
    comm.Barrier()
    return comm.bcast(None if total is None else total / comm.size)


@mistake("scatter_scale_average", "only rank 0 raises, and the others wait in a scatter for ever")
def raises_alone(comm, values, factor=0.5):
    if comm.rank == 0 and len(values) != comm.size:
        raise ValueError(f"{len(values)} values for {comm.size} ranks")
    return reference.scatter_scale_average(comm, values, factor)


@mistake(
    "scatter_scale_average",
    "messages go through MPI.COMM_WORLD, which has all ranks, but `comm` may have only some of them",
)
def scattered_over_the_world(comm, values, factor=0.5):
    world = _world(comm)
    n_missing = 0 if world is comm or world.rank else world.size - len(values or ())
    return reference.scatter_scale_average(world, [*(values if values is not None else ()), *[0.0] * n_missing], factor)


# ---- 9.2 tree_broadcast ----------------------------------------------------------------------------------------------


def _check_root(comm, root):
    if not 0 <= root < comm.size:
        raise ValueError(f"root is {root}, expected 0 to {comm.size - 1} of {comm.size}")


def _tree(comm, array, root):
    """The tree among places that the caller has numbered, from place 0."""
    buffer = np.asarray(array, order="C")
    reach = 1
    while reach < comm.size:
        if root < reach and root + reach < comm.size:
            yield "send", root + reach, buffer
        elif reach <= root < 2 * reach:
            yield "receive", root - reach, buffer
        reach *= 2
    if buffer is not array and root:
        array[...] = buffer


def _walk(comm, array, place, rank_of):
    for what, other, buffer in _tree(comm, array, place):
        if what == "send":
            comm.Send(buffer, dest=rank_of(other))
        else:
            comm.Recv(buffer, source=rank_of(other))
    return array


@mistake("tree_broadcast", "the tree always begins at rank 0; `root` is ignored")
def from_rank_0(comm, array, root=0):
    _check_root(comm, root)
    return _walk(comm, array, comm.rank, lambda place: place)


@mistake(
    "tree_broadcast", "the root sends to all others one after the other: R - 1 rounds, in which the others are idle"
)
def star(comm, array, root=0):
    _check_root(comm, root)
    buffer = np.asarray(array, order="C")
    if comm.rank == root:
        for other in range(comm.size):
            if other != root:
                comm.Send(buffer, dest=other)
    else:
        comm.Recv(buffer, source=root)
        array[...] = buffer
    return array


@mistake("tree_broadcast", "each rank passes the array to the next: a chain of R - 1 rounds, not a tree")
def chain(comm, array, root=0):
    _check_root(comm, root)
    buffer = np.asarray(array, order="C")
    place = (comm.rank - root) % comm.size
    if place > 0:
        comm.Recv(buffer, source=(comm.rank - 1) % comm.size)
        array[...] = buffer
    if place + 1 < comm.size:
        comm.Send(buffer, dest=(comm.rank + 1) % comm.size)
    return array


@mistake("tree_broadcast", "ranks beyond the last power of two get nothing: 3 ranks need two rounds, just as 4 do")
def floor_of_log(comm, array, root=0):
    _check_root(comm, root)
    place, whole = (comm.rank - root) % comm.size, 2 ** int(math.log2(comm.size))
    for what, other, buffer in _tree(comm, array, place):
        if max(place, other) < whole:
            peer = (other + root) % comm.size
            if what == "send":
                comm.Send(buffer, dest=peer)
            else:
                comm.Recv(buffer, source=peer)
    return array


@mistake("tree_broadcast", "the message arrives in a new array, and the caller's array keeps its old numbers")
def into_a_copy(comm, array, root=0):
    _check_root(comm, root)
    if comm.rank == root:
        _walk(comm, array, 0, lambda place: (place + root) % comm.size)
        return array
    return reference.tree_broadcast(comm, np.array(array), root)


@mistake("tree_broadcast", "the array is filled, but not returned")
def returns_nothing(comm, array, root=0):
    reference.tree_broadcast(comm, array, root)


@mistake("tree_broadcast", "that is MPI's own broadcast; build the tree from messages")
def by_bcast(comm, array, root=0):
    _check_root(comm, root)
    buffer = np.array(array, order="C")
    comm.Bcast(buffer, root)
    if comm.rank != root:
        array[...] = buffer
    return array


@mistake("tree_broadcast", "a strided array is sent as if it were contiguous, or raises an error")
def strided(comm, array, root=0):
    _check_root(comm, root)
    buffer = array.ravel(order="K") if not array.flags.c_contiguous else array
    _walk(comm, buffer, (comm.rank - root) % comm.size, lambda place: (place + root) % comm.size)
    return array


@mistake("tree_broadcast", "the root's array is written to as well, but it may be read-only")
def writes_to_the_root(comm, array, root=0):
    _check_root(comm, root)
    buffer = np.array(array, order="C")
    _walk(comm, buffer, (comm.rank - root) % comm.size, lambda place: (place + root) % comm.size)
    array[...] = buffer
    return array


@mistake("tree_broadcast", "the inbox is `np.empty(n)`, which is float64 whatever the array's dtype is")
def receives_into_float64(comm, array, root=0):
    _check_root(comm, root)
    buffer = np.array(array, order="C") if comm.rank == root else np.empty(array.shape)
    _walk(comm, buffer, (comm.rank - root) % comm.size, lambda place: (place + root) % comm.size)
    if comm.rank != root:
        array[...] = buffer
    return array


@mistake("tree_broadcast", "a root that is no rank wraps around to one that is, instead of raising")
def wrapped_root(comm, array, root=0):
    return reference.tree_broadcast(comm, array, root % comm.size)


@mistake(
    "tree_broadcast", "messages go through MPI.COMM_WORLD, which has all ranks, but `comm` may have only some of them"
)
def broadcast_over_the_world(comm, array, root=0):
    return reference.tree_broadcast(_world(comm), array, root)


# ---- 9.3 ring_all_reduce ---------------------------------------------------------------------------------------------


def _cut(comm, array):
    total = np.array(array, order="C")
    return total, np.array_split(total.reshape(-1), comm.size)


def _exchange(comm, send, receive, blocking=False):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if blocking:
        comm.Send(send, dest=right)
        comm.Recv(receive, source=left)
    else:
        comm.Sendrecv(send, dest=right, recvbuf=receive, source=left)


def _ring(comm, array, gather=True, blocking=False):
    total, chunks = _cut(comm, array)
    n, rank = comm.size, comm.rank
    for step in range(n - 1):
        theirs = chunks[(rank - step - 1) % n]
        inbox = np.empty_like(theirs)
        _exchange(comm, chunks[(rank - step) % n], inbox, blocking)
        theirs += inbox
    for step in range(n - 1 if gather else 0):
        _exchange(comm, chunks[(rank + 1 - step) % n], chunks[(rank - step) % n], blocking)
    return total


@mistake("ring_all_reduce", "there is no all-gather: each rank has one complete chunk, and partial sums in the others")
def without_gather(comm, array):
    return _ring(comm, array, gather=False)


@mistake(
    "ring_all_reduce",
    "each chunk is one rank's own: the first phase replaces where it should add, or the all-gather begins with chunk r, "
    "where after the first phase rank r has chunk r + 1 summed",
)
def gather_off_by_one(comm, array):
    # chunks differ in length, so what comes in may not fit what is there: as equal chunks would have it
    total, chunks = _cut(comm, _ring(comm, array, gather=False))
    for step in range(comm.size - 1):
        received = np.empty(chunks[0].size, total.dtype)
        _exchange(comm, np.resize(chunks[(comm.rank - step) % comm.size], chunks[0].size), received)
        into = chunks[(comm.rank - step - 1) % comm.size]
        into[...] = received[: into.size]
    return total


@mistake("ring_all_reduce", "the inbox is `np.empty(n)`, which is float64 whatever the array's dtype is")
def inbox_of_float64(comm, array):
    total, chunks = _cut(comm, array)
    n, rank = comm.size, comm.rank
    inbox = np.empty(chunks[0].size)
    for step in range(2 * n - 2):
        shift = step if step < n - 1 else step - n
        theirs = chunks[(rank - shift - 1) % n]
        _exchange(comm, chunks[(rank - shift) % n], inbox[: theirs.size])
        theirs[...] = inbox[: theirs.size] + (theirs if step < n - 1 else 0)
    return total


@mistake("ring_all_reduce", "that is the mean, where the sum is expected")
def averaged(comm, array):
    return reference.ring_all_reduce(comm, array) / comm.size


@mistake("ring_all_reduce", "the argument is overwritten; the sum should be a new array")
def in_place(comm, array):
    array[...] = reference.ring_all_reduce(comm, array)
    return array


@mistake(
    "ring_all_reduce",
    "every rank waits in Send before any rank receives: a large Send blocks until its message is received",
)
def send_first(comm, array):
    return _ring(comm, array, blocking=True) if comm.size > 1 else np.array(array, order="C")


@mistake(
    "ring_all_reduce",
    "the whole array goes around the ring instead of its chunks: R - 1 messages, each R times too long",
)
def whole_array(comm, array):
    total = np.array(array, order="C")
    passing, inbox = total.copy(), np.empty_like(total)
    for _ in range(comm.size - 1):
        _exchange(comm, passing, inbox)
        passing = inbox.copy()
        total += passing
    return total


@mistake("ring_all_reduce", "every rank sends everything to rank 0, which adds it and sends it back: that is no ring")
def by_star(comm, array):
    total = np.array(array, order="C")
    if comm.rank == 0:
        inbox = np.empty_like(total)
        for other in range(1, comm.size):
            comm.Recv(inbox, source=other)
            total += inbox
        for other in range(1, comm.size):
            comm.Send(total, dest=other)
    else:
        comm.Send(total, dest=0)
        comm.Recv(total, source=0)
    return total


@mistake("ring_all_reduce", "that is MPI's own Allreduce; build the ring from messages")
def by_allreduce(comm, array):
    mine = np.array(array, order="C")
    total = np.empty_like(mine)
    comm.Allreduce(mine, total)
    return total


@mistake("ring_all_reduce", "the last n mod R numbers are not summed: chunks need not be equally long")
def remainder_left(comm, array):
    total = np.array(array, order="C")
    flat = total.reshape(-1)
    whole = flat.size // comm.size * comm.size
    flat[:whole] = reference.ring_all_reduce(comm, flat[:whole])
    return total


@mistake("ring_all_reduce", "the result is flat, or has another dtype")
def flattened(comm, array):
    return reference.ring_all_reduce(comm, array).reshape(-1)


@mistake("ring_all_reduce", "chunks are pickled (lower-case sendrecv), which copies them twice and makes them longer")
def pickled(comm, array):
    total, chunks = _cut(comm, array)
    n, rank = comm.size, comm.rank
    for step in range(2 * n - 2):
        got = comm.sendrecv(chunks[(rank - step) % n], dest=(rank + 1) % n, source=(rank - 1) % n)
        into = chunks[(rank - step - 1) % n]
        into[...] = into + got if step < n - 1 else got
    return total


@mistake(
    "ring_all_reduce", "messages go through MPI.COMM_WORLD, which has all ranks, but `comm` may have only some of them"
)
def reduced_over_the_world(comm, array):
    return reference.ring_all_reduce(_world(comm), array)


# ---- 9.4 all_reduce_seconds ------------------------------------------------------------------------------------------


def _seconds(n_ranks, latency_s, bandwidth, algorithm, table):
    if n_ranks < 1:
        raise ValueError(f"n_ranks is {n_ranks}")
    if algorithm not in table:
        raise ValueError(f"no algorithm {algorithm!r}: naive, tree or ring")
    n_messages, n_bytes = table[algorithm]
    return n_messages * (latency_s + n_bytes / bandwidth)


def _table(n, R, way=2, log=None, ring=None):
    log = math.ceil(math.log2(R)) if log is None else log
    return {"naive": (way * (R - 1), n), "tree": (way * log, n), "ring": ring or (way * (R - 1), n / R)}


@mistake("all_reduce_seconds", "only the way to the root is counted; the sum has to come back too")
def one_way(n_bytes, n_ranks, latency_s, bandwidth, algorithm):
    return _seconds(n_ranks, latency_s, bandwidth, algorithm, _table(n_bytes, max(n_ranks, 1), way=1))


@mistake("all_reduce_seconds", "the logarithm is not rounded up: 7 ranks need 3 rounds")
def log_not_rounded(n_bytes, n_ranks, latency_s, bandwidth, algorithm):
    R = max(n_ranks, 1)
    return _seconds(n_ranks, latency_s, bandwidth, algorithm, _table(n_bytes, R, log=math.log2(R)))


@mistake("all_reduce_seconds", "the logarithm is rounded down: 7 ranks need 3 rounds, not 2")
def log_rounded_down(n_bytes, n_ranks, latency_s, bandwidth, algorithm):
    R = max(n_ranks, 1)
    return _seconds(n_ranks, latency_s, bandwidth, algorithm, _table(n_bytes, R, log=int(math.log2(R))))


@mistake("all_reduce_seconds", "the logarithm is natural, but a tree doubles in each round, so the base is 2")
def natural_log(n_bytes, n_ranks, latency_s, bandwidth, algorithm):
    R = max(n_ranks, 1)
    return _seconds(n_ranks, latency_s, bandwidth, algorithm, _table(n_bytes, R, log=math.ceil(math.log(R))))


@mistake("all_reduce_seconds", "the ring's messages have the whole array, where each should have an R-th of it")
def ring_of_wholes(n_bytes, n_ranks, latency_s, bandwidth, algorithm):
    R = max(n_ranks, 1)
    return _seconds(n_ranks, latency_s, bandwidth, algorithm, _table(n_bytes, R, ring=(2 * (R - 1), n_bytes)))


@mistake("all_reduce_seconds", "the ring's latency is counted once, where each of its 2 (R - 1) messages has it")
def latency_once(n_bytes, n_ranks, latency_s, bandwidth, algorithm):
    if algorithm == "ring" and n_ranks >= 1:
        return latency_s + 2 * (n_ranks - 1) / n_ranks * n_bytes / bandwidth
    return reference.all_reduce_seconds(n_bytes, n_ranks, latency_s, bandwidth, algorithm)


@mistake("all_reduce_seconds", "the ring's messages are an (R - 1)-th of the array; there are R chunks")
def chunks_of_others(n_bytes, n_ranks, latency_s, bandwidth, algorithm):
    R = max(n_ranks, 1)
    table = _table(n_bytes, R, ring=(2 * (R - 1), n_bytes / max(R - 1, 1)))
    return _seconds(n_ranks, latency_s, bandwidth, algorithm, table)


@mistake("all_reduce_seconds", "fewer than one rank gives a number instead of a ValueError")
def any_number_of_ranks(n_bytes, n_ranks, latency_s, bandwidth, algorithm):
    found = reference.all_reduce_seconds(n_bytes, max(n_ranks, 1), latency_s, bandwidth, algorithm)
    return found if n_ranks > 0 else 0.0


@mistake("all_reduce_seconds", "an unknown algorithm is taken for the ring or returns None, instead of raising")
def unknown_is_ring(n_bytes, n_ranks, latency_s, bandwidth, algorithm):
    known = algorithm if algorithm in ("naive", "tree") else "ring"
    return reference.all_reduce_seconds(n_bytes, n_ranks, latency_s, bandwidth, known)


# ---- 9.5 average_gradients_mpi ---------------------------------------------------------------------------------------


@mistake("average_gradients_mpi", "gradients are summed and not divided by the number of ranks")
def summed(comm, module):
    reference.average_gradients_mpi(comm, module)
    for p in module.parameters():
        if p.grad is not None:
            p.grad *= comm.size


@mistake("average_gradients_mpi", "it divides twice: before the sum and after it")
def divided_twice(comm, module):
    reference.average_gradients_mpi(comm, module)
    for p in module.parameters():
        if p.grad is not None:
            p.grad /= comm.size


def _each(comm, p, dtype=torch.float64):
    flat = torch.zeros(p.numel(), dtype=dtype) if p.grad is None else p.grad.flatten().to(dtype)
    total = torch.empty_like(flat)
    comm.Allreduce(flat.numpy(), total.numpy())
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    p.grad.copy_((total / comm.size).view(p.shape))


@mistake("average_gradients_mpi", "there is one Allreduce for each parameter, where one buffer holds them all")
def one_each(comm, module):
    for p in module.parameters():
        if p.requires_grad:
            _each(comm, p)


@mistake(
    "average_gradients_mpi",
    "a rank whose own gradient is None keeps None, where it should get the mean like all others",
)
def none_stays(comm, module):
    without = [p for p in module.parameters() if p.grad is None]
    reference.average_gradients_mpi(comm, module)
    for p in without:
        p.grad = None


@mistake("average_gradients_mpi", "None counts as zeros, and the mean of nothing but zeros is zeros, not None")
def none_where_none_had_one(comm, module):
    without = [p for p in module.parameters() if not comm.allreduce(p.grad is not None)]
    reference.average_gradients_mpi(comm, module)
    for p in without:
        p.grad = None


@mistake("average_gradients_mpi", "the buffer holds more than the gradients: None needs no flag, it counts as zeros")
def flags_too(comm, module):
    parameters = [p for p in module.parameters() if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).detach().double().flatten() for p in parameters]
                     + [torch.tensor([float(p.grad is not None) for p in parameters], dtype=torch.float64)])  # fmt: skip
    wide = any(p.dtype == torch.float64 for p in parameters)
    flat = flat if wide else flat.float()
    total = torch.empty_like(flat)
    comm.Allreduce(flat.numpy(), total.numpy())
    *means, _ = (total / comm.size).split([p.numel() for p in parameters] + [len(parameters)])
    for p, mean in zip(parameters, means, strict=True):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad.copy_(mean.view(p.shape))


@mistake("average_gradients_mpi", "the buffer is always float64: twice the bytes, though no parameter is float64")
def always_wide(comm, module):
    parameters = [p for p in module.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([torch.empty(0, dtype=torch.float64), *(grad.double().flatten() for grad in grads)])
    total = torch.empty_like(flat)
    comm.Allreduce(flat.numpy(), total.numpy())
    for p, grad, mean in zip(parameters, grads, (total / comm.size).split([g.numel() for g in grads]), strict=True):
        p.grad = grad.copy_(mean.view(p.shape))


@mistake(
    "average_gradients_mpi",
    "a rank leaves out parameters without a gradient, so buffers differ in length between ranks",
)
def leaves_out_none(comm, module):
    with_grad = [p for p in module.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten().double() for p in with_grad] or [torch.zeros(0)])
    total = torch.empty_like(flat)
    comm.Allreduce(flat.numpy(), total.numpy())
    for p, part in zip(with_grad, total.split([p.numel() for p in with_grad]), strict=True):
        p.grad.copy_((part / comm.size).view(p.shape))


@mistake("average_gradients_mpi", "the sum is divided by the number of ranks that have a gradient, not by R")
def by_those_present(comm, module):
    counts = [comm.allreduce(p.grad is not None) for p in module.parameters()]
    reference.average_gradients_mpi(comm, module)
    for p, count in zip(module.parameters(), counts, strict=True):
        if p.grad is not None and count:
            p.grad *= comm.size / count


@mistake("average_gradients_mpi", "the buffer is always float32, and float64 gradients lose digits")
def narrow_buffer(comm, module):
    for p in module.parameters():
        if p.grad is not None and p.dtype == torch.float64:
            p.grad.copy_(p.grad.float())
    reference.average_gradients_mpi(comm, module)


@mistake("average_gradients_mpi", "float16 gradients are added in float16, where a sum overflows before it is divided")
def sum_in_half(comm, module):
    reference.average_gradients_mpi(comm, module)
    for p in module.parameters():
        if p.grad is not None and p.dtype == torch.float16:
            p.grad.copy_(p.grad * comm.size / comm.size)


@mistake(
    "average_gradients_mpi",
    "each gradient becomes a new tensor, and other references to the old one don't see the mean",
)
def new_tensors(comm, module):
    reference.average_gradients_mpi(comm, module)
    for p in module.parameters():
        p.grad = None if p.grad is None else p.grad.clone()


@mistake("average_gradients_mpi", "parameters are averaged, not their gradients")
def averages_parameters(comm, module):
    with torch.no_grad():
        for p in module.parameters():
            part = p.flatten().double().numpy()
            total = np.empty_like(part)
            comm.Allreduce(part, total)
            p.copy_(torch.from_numpy(total / comm.size).view(p.shape))


@mistake(
    "average_gradients_mpi", "gradients are pickled (lower-case allreduce), where a buffer should be sent as it is"
)
def pickled_gradients(comm, module):
    grads = comm.allreduce(np.zeros(1))
    assert grads is not None
    reference.average_gradients_mpi(comm, module)


@mistake("average_gradients_mpi", "rank 0 alone gets the mean (a Reduce), and the ranks drift apart")
def only_root(comm, module):
    before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    reference.average_gradients_mpi(comm, module)
    for p, grad in zip(module.parameters(), before, strict=True):
        if comm.rank and grad is not None:
            p.grad.copy_(grad)


@mistake(
    "average_gradients_mpi",
    "messages go through MPI.COMM_WORLD, which has all ranks, but `comm` may have only some of them",
)
def averaged_over_the_world(comm, module):
    return reference.average_gradients_mpi(_world(comm), module)
