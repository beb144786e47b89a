"""What the tests of chapter 9 run on MPI ranks. Each returns what it found, and the test that sent it judges."""

import inspect
import time

import numpy as np
import torch
from torch import nn

from lib.workbook.grading import graded

mpi = graded("mpi")
OVERWRITTEN = -1.0


def scattered(comm, runs):
    """``scatter_scale_average`` of each run's values, which only rank 0 is given; the others pass what they please."""
    elsewhere = (None, [], "nothing", [1.0])[comm.rank]
    return [mpi.scatter_scale_average(comm, values if comm.rank == 0 else elsewhere, *rest) for values, *rest in runs]


def scattered_wrongly(comm, values):
    """The error's text on this rank, or None if there was none."""
    return _error(mpi.scatter_scale_average, comm, values if comm.rank == 0 else None)


def _error(function, *args):
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return None


def pair(comm):
    """A communicator of two of four ranks: 1 and 3, or 0 and 2, numbered from the greater to the lesser."""
    return comm.Split(color=comm.rank % 2, key=-comm.rank)


def scattered_in_pairs(comm, values):
    """``values[r]`` is what rank r of the world passes; the greater rank of its pair is rank 0 there."""
    return mpi.scatter_scale_average(pair(comm), values[comm.rank], 0.25)


def broadcast_in_pairs(comm):
    """From rank 1 of each pair, which is rank 0 or 1 of the world."""
    return mpi.tree_broadcast(pair(comm), np.arange(3) + 10.0 * comm.rank, root=1)


def reduced_in_pairs(comm):
    return mpi.ring_all_reduce(pair(comm), np.arange(1.0, 4.0) * 10**comm.rank)


def averaged_in_pairs(comm):
    module = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2))})
    module["a"].grad = torch.tensor([2.0, 6.0]) * 10**comm.rank
    mpi.average_gradients_mpi(pair(comm), module)
    return module["a"].grad


def kept(comm, values):
    mpi.scatter_scale_average(comm, values)
    return values


def made(kind, n, rank, dtype="float32"):
    """An array of n numbers that no other rank has, laid out in the way that ``kind`` says."""
    flat = np.random.default_rng([n, rank]).standard_normal(n).astype(dtype)
    if kind == "every other":
        wide = np.zeros(2 * n, dtype)
        wide[::2] = flat
        return wide[::2]
    if kind == "transposed":
        return flat.reshape(-1, 2).T
    if kind.startswith("columns first"):
        return np.array(flat.reshape(2, -1), order="C" if "odd" in kind and rank % 2 == 0 else "F")
    if kind == "a number":
        return flat[:1].reshape(())
    return flat


class Typed:
    """A communicator that notes when a rank receives into another dtype than is sent; MPI would end the process unsaid.

    What is sent is the last that this rank sent itself, for all do the same.
    ``sent`` is what counts before that, if it is clear.
    A message that does not fit is received and thrown away, so that no rank waits for another.
    """

    def __init__(self, comm, sent=None):
        self._comm, self._sent, self.problem = comm, sent, ""

    def __getattr__(self, name):
        method = getattr(self._comm, name)
        if name not in ("Send", "Ssend", "Isend", "Issend", "Recv", "Irecv", "Sendrecv", "Isendrecv"):
            return method

        def call(*args, **kwargs):
            bound = inspect.signature(method).bind(*args, **kwargs)
            given = bound.arguments
            if "dest" in given:
                self._sent = _dtype(given["sendbuf" if "sendbuf" in given else "buf"], self._sent)
            if "source" in given or "Recv" in name or "recv" in name:
                key = "recvbuf" if "recvbuf" in given else "buf"
                if self._sent is not None and _dtype(given[key], self._sent) != self._sent:
                    here, there = f"rank {self._comm.rank} receives into {given[key].dtype}", given.get("source", -1)
                    sender = f"rank {there}" if there >= 0 else "another rank"
                    self.problem = self.problem or f"{sender} sends {self._sent}, {here}"
                    given[key] = np.empty(given[key].shape, self._sent)
            return method(*bound.args, **bound.kwargs)

        return call


def _dtype(buffer, otherwise):
    return buffer.dtype if isinstance(buffer, np.ndarray) else otherwise


def reduced_typed(comm, dtype):
    """The sum of arrays of a dtype, and where a rank received into another one."""
    typed = Typed(comm)
    total = mpi.ring_all_reduce(typed, np.arange(1, 4, dtype=dtype) * 10**comm.rank)
    return total, typed.problem


def broadcast_typed(comm, dtype):
    """The root's array of a dtype, and where a rank received into another one."""
    array = np.arange(1, 4, dtype=dtype) * 10**comm.rank
    typed = Typed(comm, array.dtype)
    return mpi.tree_broadcast(typed, array), typed.problem


def reduced(comm, kinds):
    """For each (kind, n, dtype): the ring's sum, MPI's, and whether the input is as it was."""
    found = []
    for kind, n, dtype in kinds:
        array = made(kind, n, comm.rank, dtype)
        before, total = array.copy(), np.empty_like(array, order="C")
        ours = mpi.ring_all_reduce(comm, array)
        comm.Allreduce(np.array(before, order="C"), total)
        found.append((ours, total, np.array_equal(array, before) and ours is not array))
    return found


def reduced_once(comm, array):
    return mpi.ring_all_reduce(comm, array * 10**comm.rank)


class Late:
    """A communicator whose rank 1 makes every call that receives 50 ms late."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        if "recv" in name.lower():
            time.sleep(0.05 * (self._comm.rank == 1))
        return getattr(self._comm, name)


def reduced_large(comm, n):
    """What a rank has, if rank 1 receives late and every rank overwrites its sum as soon as it may."""
    total = mpi.ring_all_reduce(Late(comm), np.full(n, comm.rank + 1.0))
    is_right = total.shape == (n,) and (total == sum(range(1, comm.size + 1))).all()
    found = "right" if is_right else "overwritten" if (total == OVERWRITTEN).any() else "wrong"
    total[...] = OVERWRITTEN
    comm.Barrier()  # no array is freed before all ranks have theirs
    return found


def broadcast(comm, kinds, roots):
    """For each (kind, n, dtype) and root: what came back, MPI's, and whether what came back is the array itself."""
    found = []
    for kind, n, dtype in kinds:
        for root in roots:
            array = made(kind, n, comm.rank, dtype)
            theirs = np.array(array, order="C")
            comm.Bcast(theirs, root=root)
            ours = mpi.tree_broadcast(comm, array, root=root)
            found.append((np.array(array), theirs, ours is array))
    return found


def broadcast_once(comm, root, n=4):
    array = np.arange(n) + 10.0 * comm.rank
    mpi.tree_broadcast(comm, array, root)
    return array


def broadcast_from_nowhere(comm, roots):
    return [_error(mpi.tree_broadcast, comm, np.zeros(2), root) for root in roots]


def broadcast_read_only(comm, kind):
    """The root's array may be one that cannot be written; a copy of the array afterwards."""
    array = made(kind, 6, 0)
    array[...] = comm.rank
    array.flags.writeable = comm.rank != 1
    mpi.tree_broadcast(comm, array, root=1)
    return np.array(array)


def broadcast_large(comm, n, root):
    """What a rank has, if all but the root come late and every rank overwrites its array as soon as it may."""
    array = np.full(n, float(comm.rank))
    time.sleep(0.1 * (comm.rank != root))
    mpi.tree_broadcast(comm, array, root)
    found = "right" if (array == root).all() else "overwritten" if (array == OVERWRITTEN).any() else "wrong"
    array[...] = OVERWRITTEN
    comm.Barrier()  # no array is freed before all ranks have theirs
    return found


class Mixed(nn.Module):
    """Parameters of four dtypes, one of them frozen, one tied, one without elements; and a buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(2, 3))
        self.b = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.c = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.h = nn.Parameter(torch.ones(5, dtype=torch.float16))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.tied = self.a
        self.empty = nn.Parameter(torch.ones(0, 2))
        self.register_buffer("mean", torch.zeros(2))


def averaged(comm, grads):
    """Gradients of named vectors after averaging; ``grads[rank][name]`` is what each begins with, or None."""
    names = list(grads[0])
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in names})
    for name in names:
        if (begin := grads[comm.rank][name]) is not None:
            module[name].grad = torch.tensor(begin)
    returned = mpi.average_gradients_mpi(comm, module)
    assert returned is None, f"average_gradients_mpi returned {returned!r}, expected nothing"
    return {name: module[name].grad for name in names}


def averaged_mixed(comm):
    """Gradients, MPI's averages of them, whether each is still the same tensor, and what changed that must not."""
    module = Mixed()
    generator = torch.Generator().manual_seed(comm.rank)
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
    module.mean += comm.rank
    before = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    expected = {}
    for name, grad in before.items():
        buffer = grad.double().numpy().copy()
        total = np.empty_like(buffer)
        comm.Allreduce(buffer, total)
        expected[name] = torch.from_numpy(np.asarray(total / comm.size)).to(grad.dtype)
    mpi.average_gradients_mpi(comm, module)
    after = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    same = {name: after[name] is grad for name, grad in before.items()}
    changed = [f"parameter {name} changed" for name, p in module.named_parameters() if not bool((p == 1).all())]
    if module.get_buffer("mean").tolist() != [comm.rank] * 2:
        changed.append("the buffer changed")
    if module.frozen.grad is not None:
        changed.append("the frozen parameter has a gradient, expected None")
    return after, expected, same, "; ".join(changed)


def averaged_precisely(comm):
    """Numbers that a sum in a narrow dtype would spoil: float64's digits, and float16's range."""
    module = nn.ParameterDict({"wide": nn.Parameter(torch.zeros(1, dtype=torch.float64))})
    module["wide"].grad = torch.tensor([1 + comm.rank * 2.0**-40], dtype=torch.float64)
    mpi.average_gradients_mpi(comm, module)
    half = nn.ParameterDict({name: nn.Parameter(torch.zeros(1, dtype=torch.float16)) for name in ("narrow", "none")})
    half["narrow"].grad = torch.tensor([50_000.0], dtype=torch.float16)
    mpi.average_gradients_mpi(comm, half)
    return module["wide"].grad, half["narrow"].grad


def averaged_layouts(comm):
    """A gradient whose strides are not its shape's, and a module that has nothing to average."""
    linear = nn.Linear(3, 2, bias=False)
    linear.weight.grad = (torch.arange(6.0).reshape(3, 2) * (comm.rank + 1)).T
    mpi.average_gradients_mpi(comm, linear)
    mpi.average_gradients_mpi(comm, nn.ReLU())
    return linear.weight.grad.contiguous()


def trained(comm, n_steps, batch):
    """Weights after some steps on this rank's share of each batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()
    x, y = torch.randn(n_steps, batch, 5, dtype=torch.float64), torch.randint(3, (n_steps, batch))
    share = slice(comm.rank * batch // comm.size, (comm.rank + 1) * batch // comm.size)
    for step in range(n_steps):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[step, share]), y[step, share]).backward()
        mpi.average_gradients_mpi(comm, model)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.3 * p.grad  # PyTorch's optimizers take seconds to import
    return {name: value.detach() for name, value in model.state_dict().items()}
