"""A small simulator of what the kernels with roles ask of a Hopper GPU: Gluon's operations on tensors.

The kernels' own Python runs here, with other meanings for Gluon's names.
It shows what a GPU shows only now and then: every role runs on a stack of its own,
an asynchronous copy or product may happen at any time between its start and the wait for it,
and which of all that comes next is drawn at random.
A copy puts NaN into its target when it starts, so a tile that is read too early, or overwritten too early,
spoils the result.
A program in which nothing can go on is a `Fault`, as are reads past the end of a tensor,
copies of what no fence has made visible, and work that is still under way when a program ends.

Programs run one after the other, or, where a launch is cooperative, at once:
then one of them reads what another one writes.

Not simulated: layouts, registers, integers of 32 bits, and the order in which a tensor core adds.
"""

import math
import random
from itertools import product
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from lib.fast.launch import Address, Box, Launch, _shape_of

_split = Tensor.split
MOST_STEPS = 200_000  # of programs that run together: more is a loop that never ends


class Fault(Exception):
    """What the hardware would not forgive."""


def split(x: Tensor, *of_torch: Any, **named: Any) -> tuple[Tensor, ...]:
    """Without arguments it is Gluon's, for a last axis of two elements; with arguments it is PyTorch's."""
    return _split(x, *of_torch, **named) if of_torch or named else (x[..., 0], x[..., 1])


class Pending:
    """The result of a product that has been started."""

    def __init__(self, compute: Any):
        self.compute, self.result = compute, None

    def finish(self) -> Tensor:
        if self.result is None:
            self.result = self.compute()
        return self.result


class Pointer:
    """An address in a tensor's memory, or a block of them."""

    def __init__(self, memory: Tensor, at: Any = 0):
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.at + offset)

    def places(self, mask: Any) -> tuple[Tensor, Tensor | None]:
        """Where to read or write, and which elements of the block that concerns: None means all."""
        at = torch.as_tensor(self.at)
        inside = None if mask is None else torch.as_tensor(mask).expand(at.shape)
        wanted = at if inside is None else at[inside]
        if wanted.numel():
            first, last = map(int, wanted.aminmax())
            if not 0 <= first <= last < self.memory.numel():
                raise Fault(f"addresses {first} to {last} of {self.memory.numel()} numbers")
        return at, inside


class Descriptor:
    """What the TMA copies: boxes of a tensor."""

    def __init__(self, x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]):
        self.whole = x.as_strided(shape, strides)
        self.dtype, self.block_shape, self.layout = x.dtype, box, None

    def _both(self, at: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a box that lies inside the tensor, as slices of the tensor and of the box."""
        inner, outer = [], []
        for start, n, size in zip(map(int, at), self.block_shape, self.whole.shape, strict=True):
            if start < 0:
                raise Fault(f"a copy starts at {start}")
            end = max(start, min(start + n, size))
            inner.append(slice(start, end))
            outer.append(slice(0, end - start))
        return tuple(inner), tuple(outer)

    def read(self, at: list[Any]) -> Tensor:
        result = torch.zeros(self.block_shape, dtype=self.dtype)
        inner, outer = self._both(at)
        result[outer] = self.whole[inner]
        return result

    def load(self, at: list[Any]) -> Tensor:
        """Triton's copy to registers."""
        return self.read(at)

    def write(self, at: list[Any], values: Tensor) -> None:
        inner, outer = self._both(at)
        self.whole[inner] = values.reshape(self.block_shape)[outer]


class Shared:
    """A piece of shared memory.

    ``hidden`` has the number of the role that stored a number and has not fenced it since; 0 for others.
    """

    def __init__(self, machine: "Machine", data: Tensor, hidden: Tensor):
        self.machine, self.data, self.hidden = machine, data, hidden

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: tuple(self.data.shape))

    def _of_both(self, view: Any) -> "Shared":
        return Shared(self.machine, view(self.data), view(self.hidden))

    def index(self, i: Any) -> "Shared":
        if not 0 <= int(i) < len(self.data):
            raise Fault(f"piece {int(i)} of {len(self.data)}")
        return self._of_both(lambda x: x[int(i)])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return self._of_both(lambda x: x.permute(order))

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return self._of_both(lambda x: x.narrow(dim, start, length))

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> "Shared":
        return self._of_both(lambda x: x.view(tuple(shape)))

    def load(self, layout: Any = None) -> Tensor:
        return self.data.clone()

    def store(self, values: Tensor) -> None:
        self.data.copy_(values)
        number = self.machine.current.number
        self.hidden.fill_(number)
        self.machine.stored.setdefault(number, []).append(self.hidden)

    def seen(self) -> Tensor:
        """The numbers as copies and products see them."""
        if self.hidden.any():
            raise Fault("a copy or a product reads what was stored without a fence")
        return self.data


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all bytes that it expects have come."""

    def __init__(self, count: int):
        self.count = self.missing = count
        self.n_bytes = self.phase = 0

    def change(self, arrivals: int = 0, n_bytes: int = 0) -> None:
        self.missing -= arrivals
        self.n_bytes += n_bytes
        if self.missing < 0:
            raise Fault(f"more arrivals than the {self.count} that a barrier expects")
        if self.missing == 0 and self.n_bytes == 0:
            self.missing, self.phase = self.count, self.phase ^ 1


class Role:
    """A greenlet: it runs until its next pause, while the others wait."""

    def __init__(self, machine: "Machine", number: int, run: Any):
        self.number = number
        self.waits: Any = None  # a function: whether the role can go on
        self.products: list[Pending] = []
        self.stores: list[Any] = []  # copies to memory that may still read shared memory
        self.writes: list[Any] = []  # copies that have read it, and are not yet in memory
        self.started: list[Any] = []  # all of them, also those that have ended

        def body() -> None:
            run()
            if self.products or self.stores:
                raise Fault(f"role {number} ends while its products or copies are under way")

        self.steps = greenlet(body, machine.main)

    done = property(lambda self: self.steps.dead)


class Machine:
    """One program: its roles, its barriers and its copies under way."""

    def __init__(self, seed: int, at: tuple[int, ...], grid: tuple[int, ...]):
        self.random, self.at, self.grid = random.Random(seed), at, grid
        self.barriers: dict[int, Barrier] = {}  # by address
        self.made: list[int] = []  # addresses of the allocations that hold barriers
        self.used: set[int] = set()  # those of them that a role has waited for or arrived at
        self.stored: dict[int, list[Tensor]] = {}  # by role: where it has stored numbers that it has not fenced since
        self.loads: list[Any] = []
        self.roles: list[Role] = []
        self.main = getcurrent()  # where a role that pauses goes
        self.current: Role
        self.hurry = self.random.choice((0.05, 0.5, 0.95))  # how soon copies are made

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        fill = math.nan if dtype.is_floating_point else 0
        data = torch.full(tuple(map(int, shape)), fill, dtype=dtype)
        return Shared(self, data, torch.zeros(data.shape, dtype=torch.int8))

    def barrier(self, shared: Shared) -> Barrier:
        self.used.add(shared.data.untyped_storage().data_ptr())
        return self.barriers[shared.data.data_ptr()]

    def pause(self, until: Any = None) -> None:
        """Let others run; come back when ``until`` says so."""
        role = self.current
        role.waits = until
        self.main.switch()
        role.waits = None

    def start(self, kernel: Any, args: tuple) -> None:
        """Start a program."""
        self._add_role(lambda: kernel(*args))

    def has_ended(self) -> bool:
        """Whether all roles are done. What they have copied out is then in memory."""
        if not all(role.done for role in self.roles):
            return False
        if self.loads:
            raise Fault("the program ends while copies to shared memory are under way")
        for role in self.roles:
            for write in list(role.writes):
                write()
        return True

    def stop(self) -> None:
        """End the roles that have not ended."""
        for role in self.roles:
            role.steps.throw()

    def _add_role(self, run: Any) -> None:
        self.roles.append(Role(self, len(self.roles) + 1, run))

    def specialize(self, parts: list[tuple[Any, tuple]]) -> None:
        """Give the other parts to roles of their own; the first stays with the role that calls."""
        for function, args in parts[1:]:
            self._add_role(lambda function=function, args=args: function(*args))
        function, args = parts[0]
        function(*args)

    def step(self) -> None:
        """One role goes on to its next pause, or one copy is made."""
        ready = [role for role in self.roles if not role.done and (role.waits is None or role.waits())]
        copies = self.loads + [copy for role in self.roles for copy in role.stores + role.writes]
        if copies and (not ready or self.random.random() < self.hurry):
            self.random.choice(copies)()
            return
        if not ready:
            waiting = ", ".join(str(role.number) for role in self.roles if not role.done)
            raise Fault(f"nothing can go on: the roles {waiting} wait for a barrier that nobody completes")
        self.current = self.random.choice(ready)
        self.current.steps.switch()

    # ---- what kernels call -------------------------------------------------------------------------------------------

    def init(self, shared: Shared, count: int) -> None:
        self.barriers[shared.data.data_ptr()] = Barrier(int(count))
        address = shared.data.untyped_storage().data_ptr()
        self.made += [] if address in self.made else [address]

    def expect(self, shared: Shared, n_bytes: int) -> None:
        self.barrier(shared).change(1, int(n_bytes))
        self.pause()

    def arrive(self, shared: Shared, count: int = 1, pred: Any = True) -> None:
        if pred:
            self.barrier(shared).change(count)
        self.pause()

    def wait(self, shared: Shared, phase: Any) -> None:
        barrier, phase = self.barrier(shared), int(phase)
        self.pause(lambda: barrier.phase != phase)

    def copy_in(self, source: Descriptor, at: list[Any], opens: Shared, target: Shared) -> None:
        target.data.fill_(math.nan)
        values, barrier = source.read(at), self.barrier(opens)

        def load() -> None:
            self.loads.remove(load)
            target.data.copy_(values.reshape(target.data.shape))
            barrier.change(n_bytes=-values.nbytes)

        self.loads.append(load)
        self.pause()

    def copy_out(self, target: Descriptor, at: list[Any], source: Shared) -> None:
        role, at = self.current, list(map(int, at))

        def store() -> None:
            values = source.seen().clone()

            def write() -> None:
                role.writes.remove(write)
                target.write(at, values)

            role.stores.remove(store)
            role.writes.append(write)

        source.seen()
        role.stores.append(store)
        role.started.append(store)
        self.pause()

    def store_wait(self, pendings: int) -> None:
        role = self.current
        older = role.started[
            : len(role.started) - pendings
        ]  # the most recent ones may go on, whether or not they have ended
        self.pause(lambda: not any(copy in role.stores for copy in older))

    def wait_for_writes(self) -> None:
        role = self.current
        self.pause(lambda: not role.stores and not role.writes)

    def fence(self) -> None:
        """Show copies and products what this role has stored."""
        number = self.current.number
        for hidden in self.stored.pop(number, []):
            hidden[hidden == number] = 0

    def atomic_add(self, pointer: Pointer, value: Any, **how: Any) -> Tensor:
        """Others may come before it, as before every instruction that other roles can notice."""
        self.pause()
        before = _load(pointer)
        _store(pointer, before + value)
        return before

    def product(self, left: Any, right: Shared, total: Any, use_acc: Any = True, is_async: bool = False) -> Any:
        in_registers = None if isinstance(left, Shared) else left.clone()

        def compute() -> Tensor:
            a = left.seen() if in_registers is None else in_registers
            before = total.finish() if isinstance(total, Pending) else total
            result = a.float() @ right.seen().float()
            return result + before if use_acc else result

        pending = Pending(compute)
        if self.random.random() < 0.5:
            pending.finish()
        self.current.products.append(pending)
        return pending

    def product_wait(self, most: int, deps: list[Any]) -> Any:
        self.pause()
        products = self.current.products
        while len(products) > most:
            products.pop(0).finish()
        found = [d.finish() if isinstance(d, Pending) and d not in products else d for d in deps]
        return found[0] if len(found) == 1 else tuple(found)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    at, inside = pointer.places(mask)
    if inside is None:
        return pointer.memory.take(at.long())
    result = torch.full(at.shape, other, dtype=pointer.memory.dtype)
    result[inside] = pointer.memory[at[inside]]
    return result


def _store(pointer: Pointer, values: Any, mask: Any = None) -> None:
    at, inside = pointer.places(mask)
    values = torch.as_tensor(values).to(pointer.memory.dtype).expand(at.shape)
    pointer.memory[at if inside is None else at[inside]] = values if inside is None else values[inside]


def _names(machine: Machine) -> dict[str, Any]:
    """What stands for Gluon's names in a module of kernels."""

    def of_two(function: Any) -> Any:
        return lambda a, b: function(*(torch.as_tensor(x) for x in (a, b)))

    def number(x: Any) -> Any:
        return x if isinstance(x, Tensor) else torch.tensor(x)

    language = SimpleNamespace(
        float32=torch.float32, bfloat16=torch.bfloat16, int64=torch.int64, int32=torch.int32,
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None),
        constexpr=lambda x: x, static_range=range, program_id=lambda i: torch.tensor(machine.at[i]),
        num_programs=lambda i: torch.tensor(machine.grid[i]),
        SliceLayout=lambda *_: None, arange=lambda a, b, layout=None: torch.arange(a, b),
        full=lambda shape, x, dtype, layout=None: torch.full(tuple(shape), x, dtype=dtype),
        zeros=lambda shape, dtype: torch.zeros(tuple(shape), dtype=dtype),
        zeros_like=torch.zeros_like,
        maximum=of_two(torch.maximum), minimum=of_two(torch.minimum), where=lambda c, a,
        b: torch.where(c, number(a), number(b)),
        max=lambda x, dim: x.amax(dim), sum=lambda x, dim: x.sum(dim), abs=torch.abs, exp2=torch.exp2, log2=torch.log2,
        load=_load, store=_store, atomic_add=machine.atomic_add, convert_layout=lambda x, layout,
        assert_trivial=False: x,
        allocate_shared_memory=machine.allocate, warp_specialize=lambda parts, warps,
        registers: machine.specialize(parts),
    )  # fmt: skip
    barriers = SimpleNamespace(
        init=machine.init, expect=machine.expect, arrive=machine.arrive, wait=machine.wait, MBarrierLayout=lambda: None
    )
    return {
        "gl": language, "tl": language, "mbarrier": barriers, "tma": SimpleNamespace(store_wait=machine.store_wait),
        "copy_in": machine.copy_in, "copy_out": machine.copy_out, "fence_async_shared": machine.fence, "RENAMED": True,
        "warpgroup_mma": machine.product, "warpgroup_mma_wait": machine.product_wait,
        "fence_memory": lambda: None, "unknown": lambda n: n, "barrier": lambda: None,
        "wait_for_writes": machine.wait_for_writes,
        "_exp2": lambda x, _: torch.exp2(x), "_inverse": lambda x, _: 1 / x,
    }  # fmt: skip


def _python_of(kernel: Any, names: dict[str, Any], modules: dict[str, dict]) -> FunctionType:
    """A kernel's own Python with the simulator's names, and so for everything that it calls."""
    fn = kernel.fn
    if fn.__module__ not in modules:
        found = modules[fn.__module__] = dict(vars(__import__(fn.__module__, fromlist=["x"])))
        for name, value in list(found.items()):
            if name in names:
                found[name] = names[name]
            elif type(value).__name__ == "ConstexprFunction":
                found[name] = lambda *_: None
            elif type(value).__name__ == "constexpr":
                found[name] = value.value
            elif hasattr(value, "fn") and not isinstance(value, ModuleType):
                found[name] = _python_of(value, names, modules)
    return FunctionType(fn.__code__, modules[fn.__module__], fn.__name__, fn.__defaults__)


def _argument(arg: Any, tensors: tuple[Tensor, ...]) -> Any:
    if isinstance(arg, Box):
        x = tensors[arg.tensor]
        return Descriptor(x, *_shape_of(arg, x), arg.box)
    if isinstance(arg, Address):
        x = tensors[arg.tensor]
        return Pointer(x.as_strided((x.untyped_storage().nbytes() // x.itemsize - x.storage_offset(),), (1,)))
    return arg


def simulate(launch: Launch, *tensors: Tensor, seed: int = 0, change: Any = None) -> None:
    """Run all programs of a launch on tensors in the CPU's memory, which it writes as a GPU would.

    Args:
        launch: What ``lib.fast`` would launch on a GPU.
        tensors: What it would be launched with.
        seed: Of the order in which things happen.
        change: A function that may put others into the dictionary of functions that the kernels call; with it,
            a test can break a kernel.

    Raises:
        Fault: the program does what the hardware does not allow, or can't go on.
    """
    places = [place[::-1] for place in product(*map(range, launch.grid[::-1]))]
    if launch.options.get("launch_cooperative_grid"):
        machines = _run_together(launch, places, tensors, seed, change)
    else:
        machines = [_run_together(launch, [place], tensors, seed + i, change)[0] for i, place in enumerate(places)]
    for same in zip(*(machine.made for machine in machines), strict=True):
        if not any(address in machine.used for address, machine in zip(same, machines, strict=True)):
            raise Fault("barriers that no role uses: the compiler gives their memory to something else")


def _run_together(
    launch: Launch, places: list[tuple[int, ...]], tensors: tuple[Tensor, ...], seed: int, change: Any
) -> list[Machine]:
    machines = [Machine(seed + i, place, launch.grid) for i, place in enumerate(places)]
    chance, left = random.Random(seed), list(machines)
    for machine in machines:
        names = _names(machine)
        if change is not None:
            change(names)
        kernel = _python_of(launch.kernel, names, {})
        machine.start(kernel, tuple(_argument(arg, tensors) for arg in launch.args))
    try:
        with patch.object(Tensor, "split", split):
            for _ in range(MOST_STEPS):
                machine = chance.choice(left)
                machine.step()
                if machine.has_ended():
                    left.remove(machine)
                if not left:
                    return machines
        raise Fault(f"no end after {MOST_STEPS:,} steps")
    finally:
        for machine in machines:
            machine.stop()
