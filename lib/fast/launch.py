"""Launch a kernel with as little work on the host as Python allows.

A short kernel runs for some tens of microseconds.
Triton's own launch of a kernel with seven tensor descriptors takes longer: it builds each descriptor in Python,
checks it, and compares every argument with its compiled variants.
Here a `Launch` belongs to fixed shapes and strides.
Everything but the addresses is prepared once, and the arguments for given addresses are kept.
A training loop sees the same addresses again and again, because PyTorch's allocator hands out the same blocks.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lib.fast.variants import PLAIN, Variant
from lib.given.kernels.tiles import HAS_TRITON, INTERPRETED, triton

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

F = TypeVar("F", bound=Callable[..., Any])
VERSION = tuple(map(int, triton.__version__.split(".")[:2])) if HAS_TRITON else ()
DIRECT = ((3, 6),)  # versions of Triton whose launcher `_direct` knows; other versions launch through Triton's Python
# Arguments on which Triton does not specialize (for 1, or a multiple of 16).
LENGTHS = ("T", "S", "H", "G")
REACH = ("before", "after", "each")
# Heads whose rows are computed side by side. With more, too few programs at a time read the same
# keys; with fewer, long and
# short rows follow each other. If no number in between divides theirs, it is all of them.
FEWEST_TOGETHER, MOST_TOGETHER = 8, 32
MOST_KEPT = 256  # lists of arguments that a launch keeps, one for each set of addresses


def constant_when_compiled(function: F) -> F:
    """Tell torch.compile that a function returns the same at each call, as ``torch.compiler.assume_constant_result``
    does. PyTorch's imports the compiler for that, which takes longer than PyTorch itself.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Box(NamedTuple):
    """An argument of a kernel: a descriptor with which the TMA copies boxes of tensor number ``tensor``."""

    tensor: int
    box: tuple[int, ...]
    layout: Any = None  # Gluon's layout of a box in shared memory
    flat: tuple[int, ...] | None = None  # for a contiguous tensor: the shape in which it is described


class Address(NamedTuple):
    """An argument of a kernel: the address of tensor number ``tensor``."""

    tensor: int


def as_heads(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of ``[..., T, D]`` with at most two leading dimensions as ``[batch, heads, T, D]``."""
    missing, unit = 4 - x.ndim, -(-x.shape[-1] // 8) * 8
    shape = (1,) * missing + tuple(x.shape)
    strides = (unit,) * missing + x.stride()
    usable = (unit if n == 1 else stride for n, stride in zip(shape[:3], strides[:3], strict=True))
    return shape, (*usable, 1)


def can_be_read(x: Tensor) -> bool:
    """Whether the TMA can read rows where they lie; the address must also be a multiple of 16 bytes."""
    strides = as_heads(x)[1][:3]
    return (x.stride(-1) == 1 or x.shape[-1] == 1) and all(n > 0 and n * x.element_size() % 16 == 0 for n in strides)


def is_watched(*xs: Tensor) -> bool:
    """Whether a compiler, a transform of torch.func, a dispatch mode or a tensor subclass must see the operators."""
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    ):
        return True
    return {type(x) for x in xs} != {Tensor}


class Sizes(NamedTuple):
    """What the launches of forward, dQ and dK/dV depend on, apart from strides."""

    n_batches: int
    n_heads: int  # of queries, in a batch
    group: int  # heads of queries for each head of keys
    t: int
    s: int
    head_dim: int
    causal: bool
    variant: Variant = PLAIN
    value_dim: int | None = None  # width of values; head_dim if None

    @property
    def width(self) -> int:
        """Width of a tile: the head's, padded with zeros to a power of two, and on a GPU to at least 64."""
        return max(16 if INTERPRETED else 64, triton.next_power_of_2(self.head_dim))

    @property
    def value_width(self) -> int:
        """Width of a tile of values, for kernels in which it is another."""
        return self._replace(head_dim=self.value_dim or self.head_dim).width

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5 if self.variant.scale is None else self.variant.scale

    @property
    def scales(self) -> tuple[float, float]:
        """Factor of the scores before exp, in which a soft cap has its part; and of products inside a soft cap."""
        cap = self.variant.softcap
        return (self.scale, 0.0) if cap is None else (cap, self.scale / cap)

    @property
    def padded(self) -> int:
        """Rows of a head for which dQ stores statistics, so that dK/dV reads only whole tiles."""
        return -(-self.t // 128) * 128

    @property
    def n_rows(self) -> int:
        """Rows of all heads with statistics."""
        return self.n_batches * self.n_heads * self.padded

    @property
    def ragged(self) -> bool:
        """Whether a tile can be partly empty, or a row can have no key."""
        is_bounded = self.causal or self.variant.window is not None
        return self.t % 128 != 0 or self.s % 128 != 0 or (is_bounded and self.t > self.s)


def grid_by_rows(sizes: Sizes, n_blocks: int, heads_first: bool) -> tuple[int, int, int]:
    """The grid of forward or dQ: heads side by side, blocks of rows, and how often so many heads.

    ``heads_first`` computes the longest rows of several heads first, then the next longest of these heads, and so on.
    """
    n_heads = sizes.n_batches * sizes.n_heads
    if not heads_first:
        return 1, n_blocks, n_heads
    together = max(n for n in range(1, min(n_heads, MOST_TOGETHER) + 1) if n_heads % n == 0)
    if together < FEWEST_TOGETHER:
        together = n_heads
    return together, n_blocks, n_heads // together


class Launch:
    """One kernel for tensors of fixed shapes, strides and dtypes.

    Args:
        kernel: Of Triton or Gluon.
        grid: Numbers of programs along one, two or three axes.
        args: The kernel's arguments in their order; a `Box` or an `Address` takes the place of a tensor.
        options: Options for the compiler.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **options: Any):
        self.kernel, self.args, self.options = kernel, args, options
        self.grid = (*grid, 1, 1)[:3]
        self.compiled: Any = None
        self.ready: Callable[[tuple[int, ...]], None] | None = None

    def __call__(self, *given: Tensor | int) -> None:
        """Launch on the current stream of the current device, which holds the tensors.

        Once `is_ready` holds, addresses may take the place of tensors.
        """
        if self.ready is not None:
            self.ready(tuple([x if type(x) is int else x.data_ptr() for x in given]))  # type: ignore[union-attr]
            return
        tensors: tuple[Tensor, ...] = given  # type: ignore[assignment]
        if tensors[0].is_cuda:
            _take_context()
        arguments = [_argument(arg, tensors) for arg in self.args]
        if self.compiled is not None:  # a version of Triton that `_direct` does not know
            self.compiled[self.grid](*arguments)
            return
        compiled = self.kernel[self.grid](*arguments, **self.options)
        if not INTERPRETED:
            self.compiled, self.ready = compiled, _direct(self, compiled, tensors)

    @property
    def is_ready(self) -> bool:
        """Whether a call needs no more than addresses."""
        return self.ready is not None


def _shape_of(arg: Box, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if arg.flat is None:
        return as_heads(x)
    strides = [1]
    for n in arg.flat[:0:-1]:
        strides.insert(0, strides[0] * n)
    return arg.flat, tuple(strides)


def _argument(arg: Any, tensors: tuple[Tensor, ...]) -> Any:
    if isinstance(arg, Address):
        return tensors[arg.tensor]
    if not isinstance(arg, Box):
        return arg
    x = tensors[arg.tensor]
    shape, strides = _shape_of(arg, x)
    if INTERPRETED:  # it reads the tensor itself; when compiled, only its address matters
        x = x.as_strided(shape, strides)
    if arg.layout is None:
        return TensorDescriptor(x, list(shape), list(strides), list(arg.box))
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as InGluon

    return InGluon(x, list(shape), list(strides), list(arg.box), arg.layout)


def _take_context() -> None:
    """Give this thread the GPU's context, without which no descriptor can be made.

    A new thread has none before its first kernel.
    """
    torch.cuda.set_device(torch.cuda.current_device())


def _direct(launch: Launch, compiled: Any, tensors: tuple[Tensor, ...]) -> Callable[[tuple[int, ...]], None] | None:
    """A function of addresses that calls Triton's compiled C launcher for this kernel;
    None if it is of an unknown kind.
    """
    if VERSION not in DIRECT:
        return None
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    outer, described = compiled.run, list(compiled.metadata.tensordesc_meta or [])
    if not inspect.isfunction(outer.launch) or outer.global_scratch_size or outer.profile_scratch_size:
        return None
    run = inspect.getclosurevars(outer.launch).nonlocals.get("launcher")
    if run is None or len(described) != sum(isinstance(arg, Box) for arg in launch.args) or None in described:
        return None
    encode = driver.active.utils.fill_tma_descriptor
    fixed = (outer.launch_cooperative_grid, outer.launch_pdl, None, None, compiled.packed_metadata, None, None, None)
    args = [compiled.function, *fixed]
    slots: list[tuple[int, int, tuple]] = []  # where an address goes, which one, and how its descriptor is made
    for arg in launch.args:
        if isinstance(arg, Box):
            meta, (shape, strides) = described.pop(0), _shape_of(arg, tensors[arg.tensor])
            kind = (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]])
            slots.append((len(args), arg.tensor, (*kind, meta["block_size"], list(shape), list(strides), 0)))
            args += [None, *shape, *strides]
        elif isinstance(arg, Address):
            slots.append((len(args), arg.tensor, ()))
            args.append(None)
        else:
            args.append(arg)
    device, stream_of, grid = tensors[0].get_device(), torch._C._cuda_getCurrentRawStream, launch.grid
    known: dict[tuple[int, ...], list[Any]] = {}

    def ready(addresses: tuple[int, ...]) -> None:
        complete = known.get(addresses)
        if complete is None:
            _take_context()
            complete = args.copy()
            for at, index, how in slots:
                complete[at] = encode(addresses[index], *how) if how else addresses[index]
            known[addresses] = complete
            if len(known) > MOST_KEPT:
                known.clear()
        run(*grid, stream_of(device), *complete)

    return ready


@lru_cache(maxsize=16)
def n_programs(device: torch.device) -> int:
    """Number of programs of a persistent kernel: one for each multiprocessor of the GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
