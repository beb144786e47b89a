"""What the tests of `lib.ranks` run on gloo ranks: small programs, right and wrong."""

import ctypes
import os
import re
import signal
import time

import torch
import torch.distributed as dist

from lib.ranks import milestone


def sum_of_ranks(rank, world_size, n=3):
    x = torch.full((n,), float(rank))
    dist.all_reduce(x)  # sum
    return x


def ragged(rank, world_size, sizes, *, scale=1):
    x = torch.ones(sizes[rank]) * scale
    gathered = [torch.empty(1) for _ in range(world_size)]
    dist.all_gather(gathered, torch.tensor([float(len(x))]))
    return x, [int(g) for g in gathered]


def environment(rank, world_size, name):
    return os.environ.get(name)


def speak(rank, world_size):
    print(f"I am {rank}")
    os.write(2, b"from below\n")


def every_call(rank, world_size):
    x = torch.ones(4)
    parts = [torch.empty(4) for _ in range(world_size)]
    dist.broadcast(x, src=0)
    dist.reduce(x, dst=1)
    dist.all_gather(parts, x)
    dist.gather(x, parts if rank == 0 else None, dst=0)
    dist.scatter(x, parts if rank == 0 else None, src=0)
    dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4 * world_size))
    dist.all_to_all_single(torch.empty(2 * world_size, dtype=torch.float64), torch.ones(2 * world_size).double())
    dist.barrier()  # all calls
    dist.all_gather_object([None] * world_size, {"rank": rank})
    if rank == 0:
        dist.send(x, dst=1)
    elif rank == 1:
        dist.recv(x, src=0)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    inbox = torch.empty(4)
    ring = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, inbox, left)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, group=pair)


def overlap(rank, world_size):
    weight = torch.ones(3, requires_grad=True)
    works = []
    weight.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad, async_op=True)))
    weight.sum().backward()
    milestone("backward ends")
    works[0].wait()
    dist.barrier()
    return weight.grad, works[0].is_completed()


def raise_on(rank, world_size, culprit):
    x = torch.ones(2)
    dist.all_reduce(x)
    if rank == culprit:
        raise ValueError(f"odd thing on {rank}")
    dist.all_reduce(x)


def not_started(rank, world_size):
    raise NotImplementedError("Exercise 10.2: write me")


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.hold = lambda: None


def raise_unpicklable(rank, world_size):
    raise Unpicklable(1, 2)


def return_unpicklable(rank, world_size):
    return lambda: None


def exit_on(rank, world_size, culprit):
    if rank == culprit:
        os._exit(7)
    dist.all_reduce(torch.ones(2))


def killed_on(rank, world_size, culprit):
    x = torch.ones(2)
    dist.all_reduce(x)
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)


def killed_within(rank, world_size, culprit):
    if rank == culprit:
        signal.setitimer(signal.ITIMER_REAL, 1.0)  # SIGALRM ends it while it waits
        dist.all_reduce(torch.ones(2))  # the alarm rings here
    time.sleep(3)


def crash_on(rank, world_size, culprit):
    if rank == culprit:
        ctypes.string_at(0)
    dist.all_reduce(torch.ones(2))


def threads(rank, world_size):
    return torch.get_num_threads()


def unnoticed(rank, world_size):
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank else torch.float32))


def returns_early(rank, world_size, culprit):
    if rank == culprit:
        return
    dist.all_reduce(torch.ones(2))


def sleeps(rank, world_size, culprit):
    if rank == culprit:
        time.sleep(60)  # never arrives
    dist.all_reduce(torch.ones(2))


def different_calls(rank, world_size):
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank == 0:
        dist.all_reduce(x)  # differs
    else:
        dist.broadcast(x, src=0)
    dist.barrier()


def crossed_groups(rank, world_size):
    pair = dist.new_group([0, 1])
    x = torch.ones(4)
    dist.all_reduce(x, group=pair if rank == 0 else None)


def different_sizes(rank, world_size):
    dist.all_reduce(torch.ones(4 + rank))


def different_roots(rank, world_size):
    dist.broadcast(torch.ones(4), src=rank)


def receive_from_each_other(rank, world_size):
    x = torch.empty(2)
    dist.recv(x, src=1 - rank)
    dist.send(x, dst=1 - rank)


def async_never_matched(rank, world_size):
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()  # for nothing


def loop(rank, world_size, culprit):
    all(iter(lambda: rank == culprit, False))  # endless, and all on one line
    dist.barrier()


def loop_in_c(rank, world_size, culprit):
    if rank == culprit:
        re.match(r"(a+)+$", "a" * 60 + "b")
    dist.barrier()


def loop_alone(rank, world_size):
    while True:
        pass


def sleep_a_while(rank, world_size, seconds):
    if rank == 1:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(2))
    return rank


def start_children(rank, world_size):
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)


def receive_too_much(rank, world_size):
    if rank == 0:
        dist.send(torch.ones(12), 1)
    elif rank == 1:
        dist.recv(torch.empty(6), 0)
    dist.barrier()


def raise_on_all(rank, world_size):
    x = torch.ones(2)
    dist.all_reduce(x)
    time.sleep(0.03 * rank)  # less than FINISH_S, on a busy machine too
    raise ValueError("on all of them")


def raise_beside_work(rank, world_size):
    dist.all_reduce(torch.ones(2))
    if rank == 0:
        raise ValueError("on rank 0")
    if rank == 1:
        time.sleep(5)  # at work
    dist.barrier()


def listening(rank, world_size):
    """The addresses on which this rank and its keeper listen."""
    return addresses_listened_on(1)


def addresses_listened_on(n_parents: int) -> list[str]:
    """Those of this process and of as many of its parents."""
    import psutil

    family = [psutil.Process(), *psutil.Process().parents()[:n_parents]]
    found = set()
    for process in family:
        try:
            found |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return sorted(found)
