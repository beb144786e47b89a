"""FlashAttention for Hopper: chapter 15's kernels again, with tensor descriptors and tiles chosen by measurement.

Read chapter 15 first: the arithmetic is the same, and the page "Measurements:
FlashAttention" says what each difference pays.
Where ``lib.fast.attention.flash_hopper`` has an even faster kernel that the device can run,
``tiles_for`` chooses that one.

Tensors are read and written where they lie, whatever their strides, and of any length.
``lib.fast.attention.blocks`` has forward and backward as two functions, for callers that need them apart,
such as ring attention.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lib.fast.attention.flash_hopper import Roles, hopper_dkdv, hopper_dq, hopper_forward
from lib.fast.attention.flash_items import n_tiles_in_memory
from lib.fast.attention.flash_portable import fast_dkdv_kernel, fast_dq_kernel, fast_forward_kernel
from lib.fast.attention.flash_stored import StoredBackward, has_collectives
from lib.fast.attention.flash_wide import WideBackward, stores_wide
from lib.fast.attention.room import add_parts, part_like
from lib.fast.gluon import has_roles
from lib.fast.launch import (
    Address,
    Box,
    Launch,
    Sizes,
    can_be_read,
    constant_when_compiled,
    grid_by_rows,
    is_watched,
    n_programs,
)
from lib.fast.parts.sums import add_rows
from lib.fast.variants import PLAIN, Documents, Variant, check_variant
from lib.given.kernels.once import NO_SECOND_DERIVATIVE
from lib.given.kernels.tiles import HAS_TRITON, INTERPRETED, triton
from lib.given.kernels.tiles import check_shapes as check_equal_shapes


class Tiles(NamedTuple):
    """How one kernel is cut and compiled."""

    rows: int
    cols: int
    warps: int
    stages: int
    registers: int | None = None
    heads_first: bool = False  # forward and dQ: neighbouring programs compute different heads instead of different rows
    split: bool = False  # dK/dV: one kernel after the other, each with half of the accumulators
    apart: bool = False  # dK/dV: every query head has a dK and a dV of its own, which are added up at the end


# Width, causal: tiles of forward, dQ, dK/dV, found on an H200 by ``lib.bench.kernels.flash_tiles``,
# for kernels without roles.
TABLE: dict[tuple[int, bool], tuple[Tiles, Tiles, Tiles]] = {
    (64, True): (
        Tiles(64, 128, 4, 2, 168, heads_first=True),
        Tiles(128, 64, 4, 4, heads_first=True),
        Tiles(64, 64, 4, 4),
    ),
    (64, False): (Tiles(64, 128, 4, 2), Tiles(128, 64, 4, 4, heads_first=True), Tiles(64, 64, 4, 4)),
    (128, True): (Tiles(64, 64, 4, 3, heads_first=True), Tiles(128, 64, 8, 3, heads_first=True), Tiles(64, 64, 4, 2)),
    (128, False): (Tiles(128, 64, 4, 2), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)),
}
# For width 256, whose dK and dV together would take more registers than there are.
WIDE = (
    Tiles(128, 64, 8, 2, heads_first=True),
    Tiles(64, 32, 4, 4, heads_first=True),
    Tiles(32, 64, 4, 3, split=True),
)
# The fastest kernels where `has_roles` holds; most of them give their warps roles.
ROLES_TABLE: dict[tuple[int, bool], tuple[Tiles | Roles, Tiles | Roles, Tiles | Roles]] = {
    (64, True): (Roles(3, 128, 4, heads_first=True), TABLE[64, True][1], Roles(2, 64, 3, registers=True)),
    (64, False): (Roles(3, 128, 2), TABLE[64, False][1], Roles(2, 64, 3, registers=True)),
    (128, True): (Roles(3, 64, 3, heads_first=True), Roles(2, 64, 3, heads_first=True, early=True), Roles(2, 64, 2)),
    (128, False): (Roles(2, 128, 2), Roles(2, 128, 2), Roles(2, 64, 2)),
    (256, True): (Roles(2, 64, 2, heads_first=True), *WIDE[1:]),
    (256, False): (Roles(2, 64, 2, heads_first=True), *WIDE[1:]),
}
# Of the forward pass at width 256, where values are at most half as wide as keys and leave room for another stage.
NARROW = Roles(2, 64, 3, heads_first=True)
# Tiles for sequences of at most SHORT_LENGTH tokens, for which other programs are faster, however many rows there are.
# None means that the other tables apply (lib.bench.kernels.flash_short).
SHORT_LENGTH, RAGGED_LENGTH = 1024, 512
SHORT: dict[tuple[int, bool], tuple[Tiles | Roles | None, Tiles | None, Tiles | None]] = {
    (64, True): (Tiles(64, 64, 4, 2, 168, heads_first=True), Tiles(64, 32, 4, 3, heads_first=True), None),
    (64, False): (TABLE[64, False][0], None, None),
    (128, False): (Roles(3, 64, 3), None, None),
}
# Tiles without a mask for at most RAGGED_LENGTH tokens whose number 128 does not divide: narrow tiles waste fewer
# columns.
RAGGED = {
    64: (Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 3), Tiles(32, 64, 4, 4)),
    128: (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 3)),
}
# Tiles for a band of keys (a window, documents), in which most tiles lie at an end (`--tune` of
# lib.bench.kernels.flash_variants, as are WIDE and FEW).
BAND = {
    64: (Tiles(64, 64, 4, 3, heads_first=True), Tiles(64, 32, 4, 4, heads_first=True), Tiles(64, 64, 4, 3)),
    128: (TABLE[128, True][0], Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 4)),
}
# Tiles for at most FEW_LENGTH tokens, and at most so many queries of all heads, which leave multiprocessors idle.
FEW_LENGTH = 2048
FEW: dict[tuple[int, bool], dict[int, tuple[Tiles | Roles | None, Tiles | Roles | None, Tiles | None]]] = {
    (64, True): {2**15: (SHORT[64, True][0], Tiles(64, 64, 4, 3, heads_first=True), Tiles(64, 64, 4, 3, apart=True))},
    (128, True): {
        2**14: (None, Tiles(64, 64, 4, 3, heads_first=True), Tiles(64, 64, 4, 2, apart=True)),
        2**15: (None, None, Tiles(64, 64, 4, 2, apart=True)),
    },
    (128, False): {
        2**13: (Tiles(64, 64, 4, 3, heads_first=True), Tiles(64, 64, 4, 3, heads_first=True), None),
        2**14: (Roles(2, 128, 2), Roles(2, 64, 3, heads_first=True, early=True), None),
    },
    (256, True): {2**14: (Tiles(64, 64, 4, 2, heads_first=True), None, None)},
}
# Fewest queries (keys for dK/dV), counted over all heads, for kernels with roles: with fewer, these kernels leave
# multiprocessors idle (lib.bench.kernels.flash_short); at width 256 they pay all the same.
ENOUGH_ROWS = (2**16, 2**15, 2**15)
# Fewest queries and keys of a head, and queries of all heads, for which dS goes through memory in the backward pass at
# width 128, measured on an H100. At 1,024 tokens and 128 heads both ways take the same time
# (lib.bench.kernels.flash_shapes).
STORED_LENGTH, STORED_ROWS = 512, 2**16
# Cases in which none of PyTorch's kernels was measured to be faster (lib.bench.kernels.flash_shapes). At width 64:
# MANY queries and
# keys of all heads. Otherwise, if no head shares keys: QUICKEST has pairs of width and mask; QUICKEST_SHORT,
# for at most
# RAGGED_LENGTH tokens without a mask, has pairs of width and whether 128 fails to divide a length.
MANY = 2**15
QUICKEST, QUICKEST_SHORT = {(64, True), (96, True)}, {(64, True), (64, False), (80, True)}
MOST_ALONG_AXIS = 2**16 - 1  # heads of all batches, or tiles of rows: what CUDA allows along a grid's later axes
WIDTHS = range(64, 257, 8)  # a width between powers of two is computed in tiles of 128 or 256


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """As chapter 15's, but values may be narrower than keys: a tile as wide as the keys has zeros beyond them.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit, or keys or values are too wide.
    """
    if q.shape[-1] > WIDTHS[-1] or k.shape[-1] < v.shape[-1]:
        raise ValueError(
            f"keys {k.shape[-1]} wide, values {v.shape[-1]} wide: expected keys at most {WIDTHS[-1]} wide, and values "
            "no wider; lib.fast.attention.latent takes DeepSeek's 576 and 512"
        )
    if 0 < v.shape[-1] < k.shape[-1]:
        v = v[..., :1].expand(*v.shape[:-1], k.shape[-1])
    check_equal_shapes(q, k, v)


# ---- launches --------------------------------------------------------------------------------------------------------


def tiles_for(
    q: Tensor, k: Tensor, is_causal: bool, variant: Variant = PLAIN, v: Tensor | None = None
) -> tuple[Tiles | Roles, Tiles | Roles, Tiles | Roles]:
    """Tiles of forward, dQ and dK/dV for this device and these sizes; small ones for widths that no table has."""
    small = (Tiles(32, 32, 4, 2),) * 3
    width = q.shape[-1] if INTERPRETED else sizes_of(q, k, is_causal).width
    chosen = TABLE.get((width, is_causal), WIDE if width == 256 else small)
    if variant.has_band:
        return BAND.get(width, chosen)
    if not variant.is_plain or not has_roles(q) or (width, is_causal) not in ROLES_TABLE:
        return chosen
    rows = q.shape[:-1].numel(), q.shape[:-1].numel(), k.shape[:-1].numel()
    both = zip(chosen, ROLES_TABLE[width, is_causal], rows, ENOUGH_ROWS, strict=True)
    by_rows = (roles if n >= enough or width == 256 else tiles for tiles, roles, n, enough in both)
    sizes = sizes_of(q, k, is_causal, v=v)
    forward, dq, dkdv = (a or b for a, b in zip(_short_tiles(sizes), by_rows, strict=True))
    has_room = width == 256 and 2 * sizes.value_width <= width and isinstance(forward, Roles)
    return NARROW if has_room else forward, dq, dkdv


@constant_when_compiled
def _most_bytes_stored(device: torch.device) -> int:
    """The most bytes that `StoredBackward` may take for dS:
    an eighth of a device that it runs on and has for itself, else 0.
    """
    on_gpu = device.type == "cuda" and not INTERPRETED
    if not on_gpu or not has_roles(torch.empty(0, device=device)) or has_collectives():
        return 0
    return torch.cuda.get_device_properties(device).total_memory // 8


@constant_when_compiled
def _memory_bytes(device: torch.device) -> int:
    """Memory of a GPU; 0 where kernels are interpreted."""
    on_gpu = device.type == "cuda" and not INTERPRETED
    return torch.cuda.get_device_properties(device).total_memory if on_gpu else 0


def n_stored_tiles(device: torch.device, sizes: Sizes) -> int:
    """How many tiles of dS the backward pass may keep in memory; 0 where it makes two passes."""
    sees_keys = not sizes.causal or sizes.t <= sizes.s
    fits = sizes.width == 128 and sizes.variant.is_plain
    if not fits or sizes.group < 1 or min(sizes.t, sizes.s) < STORED_LENGTH or not sees_keys:
        return 0
    is_enough = sizes.n_batches * sizes.n_heads * sizes.t >= STORED_ROWS
    return n_tiles_in_memory(sizes, _most_bytes_stored(device)) if is_enough else 0


def _may_be_ragged(t: int, s: int, is_causal: bool) -> bool:
    """Whether RAGGED applies to these lengths, provided that 128 does not divide one of them."""
    return not is_causal and t > 1 and max(t, s) <= RAGGED_LENGTH


def _short_tiles(sizes: Sizes) -> tuple[Tiles | Roles | None, Tiles | Roles | None, Tiles | None]:
    """Tiles for short sequences; None where the other tables apply."""
    if sizes.width in RAGGED and sizes.ragged and _may_be_ragged(sizes.t, sizes.s, sizes.causal):
        return RAGGED[sizes.width]
    key, longest, nothing = (sizes.width, sizes.causal), max(sizes.t, sizes.s), (None, None, None)
    for most, tiles in FEW.get(key, {}).items():
        if longest <= FEW_LENGTH and sizes.n_batches * sizes.n_heads * sizes.t <= most:
            return tiles
    return SHORT.get(key, nothing) if longest <= SHORT_LENGTH else nothing


def sizes_of(q: Tensor, k: Tensor, is_causal: bool, variant: Variant = PLAIN, v: Tensor | None = None) -> Sizes:
    """The sizes that launches depend on; values are as wide as keys if v is None."""
    n_heads, n_groups = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k))
    n_batches, group = q.shape[:-3].numel(), n_heads // n_groups
    narrow = v.shape[-1] if v is not None and v.shape[-1] < q.shape[-1] else None
    return Sizes(n_batches, n_heads, group, q.shape[-2], k.shape[-2], q.shape[-1], is_causal, variant, narrow)


def _options(tiles: Tiles) -> dict[str, int]:
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return {} if INTERPRETED else options | ({"maxnreg": tiles.registers} if tiles.registers else {})


def _scales(sizes: Sizes) -> tuple[float, float]:
    outer, inner = sizes.scales
    return outer * math.log2(math.e), inner


def _switches(variant: Variant) -> tuple[bool, bool, bool]:
    """Which parts of a kernel are compiled: BAND, DOCS, CAP."""
    return variant.has_band, variant.n_documents > 0, variant.softcap is not None


def _reach(sizes: Sizes) -> tuple[int, int, int]:
    """How far a query sees before and after its own position, and the distance of two sequences in the spans."""
    return *sizes.variant.reach(sizes.causal), 2 * sizes.s if sizes.variant.n_documents > 1 else 0


def _spans(sizes: Sizes, at: int, other: int) -> Address:
    """The address of tensor ``at``, the spans; of any other tensor where there are none, and nothing is read."""
    return Address(at if sizes.variant.n_documents else other)


def launch_forward(sizes: Sizes, tiles: Tiles | Roles) -> Launch:
    """The launch for (q, k, v, o, lse), followed by sinks and by spans if the variant has them."""
    if isinstance(tiles, Roles):
        return hopper_forward(sizes, tiles)
    rows, cols = (1, 1, tiles.rows, sizes.width), (1, 1, tiles.cols, sizes.width)
    (scale2, inner), sinks = _scales(sizes), sizes.variant.has_sinks
    args = (
        Box(0, rows), Box(1, cols), Box(2, cols), Box(3, rows), Address(4),
        Address(5 if sinks else 4), _spans(sizes, 5 + sinks, 4), sizes.t, sizes.s, sizes.n_heads, scale2, inner,
        *_reach(sizes),
        sizes.group, sizes.width, tiles.rows, tiles.cols, sizes.causal, sizes.ragged, *_switches(sizes.variant), sinks,
    )  # fmt: skip
    return Launch(
        fast_forward_kernel,
        grid_by_rows(sizes, triton.cdiv(sizes.t, tiles.rows), tiles.heads_first),
        args,
        **_options(tiles),
    )


def launch_dq(sizes: Sizes, tiles: Tiles | Roles, has_sums: bool = False) -> Launch:
    """The launch for (q, k, v, o, do, dq, lse, stats), followed by sums if ``has_sums``, or by the variant's spans.

    Kernels with roles compute no sums.
    """
    if isinstance(tiles, Roles):
        return hopper_dq(sizes, tiles)
    rows, cols = (1, 1, tiles.rows, sizes.width), (1, 1, tiles.cols, sizes.width)
    scale2, inner = _scales(sizes)
    args = (
        Box(0, rows), Box(1, cols), Box(2, cols), Box(3, rows), Box(4, rows), Box(5, rows), Address(6), Address(7),
        Address(8 if has_sums else 7), _spans(sizes, 8, 7), sizes.n_rows, sizes.t, sizes.s, sizes.n_heads,
        sizes.padded, scale2, sizes.scale, inner, *_reach(sizes),
        sizes.group, sizes.width, tiles.rows, tiles.cols, sizes.causal, sizes.ragged, has_sums,
        *_switches(sizes.variant),
    )  # fmt: skip
    return Launch(
        fast_dq_kernel,
        grid_by_rows(sizes, triton.cdiv(sizes.padded, tiles.rows), tiles.heads_first),
        args,
        **_options(tiles),
    )


def launch_dkdv(sizes: Sizes, tiles: Tiles | Roles) -> Any:
    """The launch for (q, k, v, do, dk, dv, stats), followed by the variant's spans."""
    if isinstance(tiles, Roles):
        return hopper_dkdv(sizes, tiles)
    both = ((True, False), (False, True)) if tiles.split else ((True, True),)
    apart = sizes.group if tiles.apart else 1
    launches = tuple(_portable_dkdv(sizes, tiles, has_dk, has_dv, apart) for has_dk, has_dv in both)
    return launches[0] if len(launches) == apart == 1 else InParts(launches, apart)


def _portable_dkdv(sizes: Sizes, tiles: Tiles, has_dk: bool, has_dv: bool, apart: int) -> Launch:
    rows, cols = (1, 1, tiles.rows, sizes.width), (1, 1, tiles.cols, sizes.width)
    scale2, inner = _scales(sizes)
    n_groups = sizes.n_heads // sizes.group
    args = (
        Box(0, rows), Box(1, cols), Box(2, cols), Box(3, rows), Box(4, cols), Box(5, cols),
        Box(6, (2, tiles.rows), flat=(2, sizes.n_rows)), _spans(sizes, 7, 0), sizes.t, sizes.s, n_groups,
        sizes.padded, scale2, sizes.scale, inner, *_reach(sizes),
        sizes.group, sizes.width, tiles.rows, tiles.cols, sizes.causal, *_switches(sizes.variant),
        has_dk, has_dv, apart,
    )  # fmt: skip
    grid = (triton.cdiv(sizes.s, tiles.cols), sizes.n_batches * n_groups * apart)
    return Launch(fast_dkdv_kernel, grid, args, **_options(tiles))


class InParts(NamedTuple):
    """dK/dV as several kernels, or with ``apart`` gradients for each key head, which are added up."""

    launches: tuple[Launch, ...]
    apart: int

    @property
    def is_ready(self) -> bool:
        """Whether addresses may take the place of tensors, as in a `Launch`."""
        return self.apart == 1 and all(launch.is_ready for launch in self.launches)

    def __call__(self, q, k, v, do, dk, dv, *rest) -> None:
        """Fill dk and dv."""
        parts = [part_like(q, x) for x in (dk, dv)] if self.apart > 1 else []
        for launch in self.launches:
            launch(q, k, v, do, *(parts or (dk, dv)), *rest)
        for total, part in zip((dk, dv), parts, strict=False):
            add_parts(total, part, self.apart)


# ---- plans: what follows from shapes and strides is worked out once --------------------------------------------------

_plans: dict[tuple, "Plan"] = {}
MOST_PLANS = 1024


Allocate = Callable[[], Tensor]  # makes a tensor without initial values, on a GPU the current one


def _allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Allocate:
    if device.type == "cuda":  # past PyTorch's dispatcher, as the code that its compiler writes does it
        from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]

        return partial(_empty_strided_cuda, shape, strides, dtype)
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


class Plan(NamedTuple):
    """What a call does for tensors of given shapes, strides and dtypes."""

    copied: tuple[int, ...]  # indices of the inputs that the TMA can't read where they lie
    results: tuple[Allocate, ...]
    launch: Any
    backward: dict[tuple, "Plan"]  # of a forward pass: plans of its backward pass, for `_planned_again`
    elsewhere: torch.device | None = None  # the tensors' device, if it isn't the current one

    def run(self, xs: tuple[Tensor, ...], *rest: Tensor, last: tuple[Tensor, ...] = ()) -> list[Tensor]:
        """Launch with the inputs, ``rest``, the results, which are allocated for it and returned, and ``last``."""
        if self.elsewhere is not None:
            with torch.cuda.device(self.elsewhere):
                return self._replace(elsewhere=None).run(xs, *rest, last=last)
        results = [allocate() for allocate in self.results]
        self.launch(*self.legible(xs), *rest, *results, *last)
        return results

    def legible(self, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs, with copies of those that need one."""
        if not self.copied:
            return xs
        some = list(xs)
        for i in self.copied:
            some[i] = xs[i].clone(memory_format=torch.contiguous_format)
        return tuple(some)


def _planned(make: Callable[..., Plan], xs: tuple[Tensor, ...], *rest: Any) -> Plan:
    """``make(xs, *rest)``, kept for later calls with tensors of the same layouts and dtypes."""
    current = torch._C._cuda_getDevice() if xs[0].is_cuda else -1
    looks = [(x.shape, x.stride(), x.dtype, x.get_device()) for x in xs]
    key = (make, current, _misaligned(xs), *rest, *looks)
    plan = _plans.get(key)
    if plan is None:
        if any(x.device != xs[0].device for x in xs):
            raise ValueError(f"tensors on {', '.join(str(x.device) for x in xs)}: expected one device")
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = make(xs, *rest)
        if xs[0].get_device() != current:
            plan = plan._replace(elsewhere=xs[0].device)
        _plans[key] = plan
    return plan


def _planned_again(known: dict[tuple, Plan], make: Callable[..., Plan], xs: tuple[Tensor, ...], *rest: Any) -> Plan:
    """`_planned` for the backward pass of a call whose plan has ``known``, with less work.

    The forward pass decides shapes, dtypes and the device.
    Strides may differ: those of the gradient, and those of saved tensors if a hook has put them elsewhere.
    """
    key = (_misaligned(xs), *rest, *[x.stride() for x in xs])
    plan = known.get(key)
    if plan is None:
        plan = known[key] = _planned(make, xs, *rest)
    return plan


def _misaligned(xs: tuple[Tensor, ...]) -> int:
    """0 if all addresses are multiples of 16 bytes, as the TMA needs them."""
    bits = 0
    for x in xs:
        bits |= x.data_ptr()
    return bits & 15


def dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Strides of a tensor without gaps whose dimensions lie in memory in the order that ``strides`` give."""
    dense, n = [1] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda i: (strides[i], -i)):
        dense[dim], n = n, n * max(1, shape[dim])
    return dense


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dense_strides(shape, tuple(range(len(shape), 0, -1))))


def _shape_like(x: Tensor, width: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """x's shape, perhaps with another width, and strides with its dimensions in the same order and no gaps; rows are
    always whole.
    """
    strides, width = dense_strides(tuple(x.shape[:-1]), x.stride()[:-1]), width or x.shape[-1]
    return (*x.shape[:-1], width), (*(n * width for n in strides), 1)


def _like(x: Tensor, width: int | None = None) -> Allocate:
    return _allocate(*_shape_like(x, width), x.dtype, x.device)


def _statistics(x: Tensor, *shape: int) -> Allocate:
    return _allocate(shape, _contiguous(shape), torch.float32, x.device)


def _copied(xs: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(xs) if not can_be_read(x) or _misaligned(xs))


def _plan_forward(
    xs: tuple[Tensor, ...], is_causal: bool, tiles: Tiles | Roles | None, variant: Variant = PLAIN
) -> Plan:
    q, k, v = xs
    check_shapes(q, k, v)
    launch = launch_forward(sizes_of(q, k, is_causal, variant, v), tiles or tiles_for(q, k, is_causal, variant, v)[0])
    return Plan(_copied(xs), (_like(q, v.shape[-1]), _statistics(q, *q.shape[:-1])), launch, {})


def _plan_dq(xs: tuple[Tensor, ...], is_causal: bool, tiles: Tiles | Roles | None, variant: Variant = PLAIN) -> Plan:
    q, k, v = xs[:3]
    check_shapes(q, k, v)
    sizes = sizes_of(q, k, is_causal, variant)
    launch = launch_dq(sizes, tiles or tiles_for(q, k, is_causal, variant)[1])
    return Plan(_copied(xs), (_like(q), _statistics(q, 2, sizes.n_rows)), launch, {})


def _plan_dkdv(xs: tuple[Tensor, ...], is_causal: bool, tiles: Tiles | Roles | None, variant: Variant = PLAIN) -> Plan:
    q, k, v = xs[:3]
    check_shapes(q, k, v)
    launch = launch_dkdv(sizes_of(q, k, is_causal, variant), tiles or tiles_for(q, k, is_causal, variant)[2])
    return Plan(_copied(xs), (_like(k), _like(v)), launch, {})


class TwoPasses(NamedTuple):
    """The backward pass as dQ and dK/dV, which both compute the scores: seven products."""

    for_dq: Launch
    for_dkdv: Any
    stats: Allocate

    @property
    def is_ready(self) -> bool:
        """Whether addresses may take the place of tensors, as in a `Launch`."""
        return self.for_dq.is_ready and self.for_dkdv.is_ready

    def __call__(self, q, k, v, o, do, lse, dq, dk, dv, *sums) -> None:
        """Fill dq, dk and dv, and the sums of `launch_dq` if it was made for them; lse is contiguous."""
        stats = self.stats()
        self.for_dq(q, k, v, o, do, dq, lse, stats, *sums)
        self.for_dkdv(q, k, v, do, dk, dv, stats)


class TwoPassesOfVariant(NamedTuple):
    """`TwoPasses` of a variant that is not plain; what dQ leaves for dK/dV is a result, of which a sink's gradient is
    made.
    """

    for_dq: Launch
    for_dkdv: Any

    def __call__(self, q, k, v, o, do, lse, dq, dk, dv, stats, *spans) -> None:
        """Fill dq, dk, dv and stats; lse is contiguous."""
        self.for_dq(q, k, v, o, do, dq, lse, stats, *spans)
        self.for_dkdv(q, k, v, do, dk, dv, stats, *spans)


def _plan_variant_backward(xs: tuple[Tensor, ...], is_causal: bool, variant: Variant) -> Plan:
    """As `_plan_backward`; stats [2, rows] are the last result if the variant is not plain."""
    if variant.is_plain:
        return _plan_backward(xs, is_causal, variant=variant)
    q, k, v = xs[:3]
    check_shapes(q, k, v)
    sizes = sizes_of(q, k, is_causal, variant)
    _, for_dq, for_dkdv = tiles_for(q, k, is_causal, variant)
    launch = TwoPassesOfVariant(launch_dq(sizes, for_dq), launch_dkdv(sizes, for_dkdv))
    return Plan(_copied(xs), (_like(q), _like(k), _like(v), _statistics(q, 2, sizes.n_rows)), launch, {})


def _plan_backward(xs: tuple[Tensor, ...], is_causal: bool, has_sums: bool = False, variant: Variant = PLAIN) -> Plan:
    """``has_sums``: the results include dQ's sums, if the kernels chosen for these sizes compute them."""
    q, k, v = xs[:3]
    check_shapes(q, k, v)
    sizes = sizes_of(q, k, is_causal, variant, v)
    _, for_dq, for_dkdv = tiles_for(q, k, is_causal)
    n_tiles, is_wide = n_stored_tiles(q.device, sizes), stores_wide(sizes, _memory_bytes(q.device))
    sums: tuple[Allocate, ...] = ()
    if has_sums and not n_tiles and not is_wide and isinstance(for_dq, Tiles):
        n = triton.cdiv(sizes.padded, for_dq.rows)
        sums = (_statistics(q, sizes.n_batches, n, 2, sizes.n_heads, sizes.width),)
    launch = launch_dq(sizes, for_dq, has_sums=bool(sums))
    two_passes = TwoPasses(launch, launch_dkdv(sizes, for_dkdv), _statistics(q, 2, sizes.n_rows))
    chosen: Any = two_passes
    if n_tiles:
        chosen = StoredBackward(sizes, q.device, n_programs(q.device), n_tiles, two_passes)
    elif is_wide:
        chosen = WideBackward(sizes, has_roles(q), two_passes)
    return Plan(_copied(xs), (_like(q), _like(k), _like(v), *sums), chosen, {})


# ---- the kernels as functions of tensors -----------------------------------------------------------------------------


def fast_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, tiles: Tiles | Roles | None = None
) -> tuple[Tensor, Tensor]:
    """Output, laid out as q, and natural logsumexp [..., T]. Without ``tiles`` those of the tables are used."""
    xs = (q, k, v)
    o, lse = _planned(_plan_forward, xs, is_causal, tiles).run(xs)
    return o, lse


def fast_dq(
    q, k, v, o, do, lse, is_causal: bool, tiles: Tiles | Roles | None = None,
    variant: Variant = PLAIN, spans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of q; and stats [2, rows]: each row's lse in base 2, and its sum of o * do."""
    xs = (q, k, v, o, do)
    plan = _planned(_plan_dq, xs, is_causal, tiles, variant)
    dq, stats = [allocate() for allocate in plan.results]
    plan.launch(*plan.legible(xs), dq, lse.contiguous(), stats, *(() if spans is None else (spans,)))
    return dq, stats


def fast_dkdv(
    q, k, v, do, stats, is_causal: bool, tiles: Tiles | Roles | None = None,
    variant: Variant = PLAIN, spans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of k and v; stats are those that `fast_dq` returns."""
    xs = (q, k, v, do)
    plan = _planned(_plan_dkdv, xs, is_causal, tiles, variant)
    dk, dv = [allocate() for allocate in plan.results]
    plan.launch(*plan.legible(xs), dk, dv, stats, *(() if spans is None else (spans,)))
    return dk, dv


def fast_backward(q, k, v, o, do, lse, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """All three gradients, each laid out as its input."""
    xs = (q, k, v, o, do)
    dq, dk, dv = _planned(_plan_backward, xs, is_causal).run(xs, lse.contiguous())
    return dq, dk, dv


def variant_forward(q, k, v, sinks, spans, is_causal: bool, variant: Variant, tiles=None) -> tuple[Tensor, Tensor]:
    """`fast_forward` of a variant, with its sinks and the spans of its documents."""
    xs, last = (q, k, v), tuple(x for x in (sinks, spans) if x is not None)
    o, lse = _planned(_plan_forward, xs, is_causal, tiles, variant).run(xs, last=last)
    return o, lse


def variant_backward(
    q, k, v, o, do, lse, sinks, spans, is_causal: bool, variant: Variant
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and of the sinks, which is None without sinks.

    A sink's weight in a row is p = exp(sink - lse), and its value is zero.
    So the derivative of the row's output to the sink is -p times the output: its gradient is the sum of -p (o * do).
    """
    xs = (q, k, v, o, do)
    plan = _planned(_plan_variant_backward, xs, is_causal, variant)
    dq, dk, dv, *stats = plan.run(xs, lse.contiguous(), last=() if spans is None else (spans,))
    if sinks is None:
        return dq, dk, dv, None
    lse2, along = stats[0].view(2, -1, len(sinks), stats[0].shape[1] // q.shape[:-2].numel())
    weights = torch.exp2(sinks.float()[:, None] * math.log2(math.e) - lse2)
    return dq, dk, dv, -(weights * along).sum((0, 2)).to(sinks.dtype)


# ---- attention on a joined projection --------------------------------------------------------------------------------


def split_joined(x: Tensor, n_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[B, H, T, D]``, keys and values ``[B, G, T, D]`` as views of ``[B, T, H + 2 * G, D]``.

    Raises:
        ValueError: x has no such shape for this number of heads.
    """
    if x.ndim != 4 or n_heads < 1 or x.shape[2] <= n_heads or (x.shape[2] - n_heads) % 2:
        raise ValueError(f"x {tuple(x.shape)}, expected [B, T, H + 2 * G, D] with H = {n_heads} heads of queries")
    groups = (x.shape[2] - n_heads) // 2
    heads = x.transpose(1, 2)
    return heads[:, :n_heads], heads[:, n_heads : n_heads + groups], heads[:, n_heads + groups :]


class Joined(NamedTuple):
    """A launch for parts of joined tensors; it is called with the joined ones.

    Making views takes the host as long as launching the kernel.
    So only the first call makes them, and later ones add up where each part begins.
    """

    launch: Any
    views: Callable[..., tuple[Tensor, ...]]  # of the joined tensors
    places: tuple[tuple[int, int], ...]  # for each part, which tensor it is of, and how many bytes lie before it

    def __call__(self, *tensors: Tensor) -> None:
        if not self.launch.is_ready or not self.places:
            self.launch(*self.views(*tensors))
            return
        first = [x.data_ptr() for x in tensors]
        self.launch(*[first[i] + n_bytes for i, n_bytes in self.places])


def _places(tensor: int, x: Tensor, n_heads: int, strides: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Where the parts of `split_joined` begin in a tensor like x with such strides."""
    n_groups = (x.shape[2] - n_heads) // 2
    return tuple((tensor, n * strides[2] * x.element_size()) for n in (0, n_heads, n_heads + n_groups))


def _plan_joined_forward(xs: tuple[Tensor, ...], n_heads: int, is_causal: bool) -> Plan:
    (x,) = xs
    plan = _plan_forward(split_joined(x, n_heads), is_causal, None)
    b, t, _, d = x.shape
    shape = b, t, n_heads, d

    def views(x, o, lse):
        return *plan.legible(split_joined(x, n_heads)), o.transpose(1, 2), lse

    places = () if plan.copied else (*_places(0, x, n_heads, x.stride()), (1, 0), (2, 0))
    o = _allocate(shape, _contiguous(shape), x.dtype, x.device)
    return Plan((), (o, plan.results[1]), Joined(plan.launch, views, places), {})


def _plan_joined_backward(xs: tuple[Tensor, ...], n_heads: int, is_causal: bool, has_bias: bool) -> Plan:
    x, o, do = xs
    plan = _plan_backward((*split_joined(x, n_heads), o.transpose(1, 2), do.transpose(1, 2)), is_causal, has_bias)
    strides = _contiguous(tuple(x.shape))
    dx = _allocate(tuple(x.shape), strides, x.dtype, x.device)

    def views(x, o, do, lse, dx, *sums):
        parts = plan.legible((*split_joined(x, n_heads), o.transpose(1, 2), do.transpose(1, 2)))
        return *parts, lse, *split_joined(dx, n_heads), *sums

    inputs = (*_places(0, x, n_heads, x.stride()), (1, 0), (2, 0), (3, 0))
    outputs = (*_places(4, x, n_heads, strides), *((5 + i, 0) for i in range(len(plan.results[3:]))))
    places = () if plan.copied else inputs + outputs
    return Plan((), (dx, *plan.results[3:]), Joined(plan.launch, views, places), {})


def _joined_backward(
    plan: Plan, x: Tensor, o: Tensor, do: Tensor, lse: Tensor, n_heads: int, has_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """The joined gradient; and with ``has_bias`` the sums [2, H, D] of dQ and dO over all tokens,
    for `_bias_gradient`.
    """
    dx, *sums = plan.run((x, o, do), lse.contiguous())
    if not has_bias:
        return dx, None
    if sums:
        return dx, add_rows(sums[0].flatten(0, 1))[..., : x.shape[-1]].contiguous()
    return dx, torch.stack([y.sum((0, 1), dtype=torch.float32) for y in (dx[:, :, :n_heads], do)])


def _bias_gradient(sums: Tensor, n_groups: int) -> Tensor:
    """The gradient of a joined projection's bias ``[(H + 2 * G) * D]``, in float32.

    The bias of the keys adds the same number to all scores of a row, which the softmax does not see:
    its gradient is zero.
    The bias of the values adds itself to every output, because a row's weights add up to one:
    its gradient is the sum of the outputs' gradients.
    So only the queries' gradient is summed.
    """
    of_queries, of_outputs = sums
    of_values = of_outputs.unflatten(0, (n_groups, -1)).sum(1)
    return torch.cat([of_queries, torch.zeros_like(of_values), of_values]).flatten()


# ---- as PyTorch and its compiler see it ------------------------------------------------------------------------------

# Registered as operators, so that torch.compile treats each as one step and does not look inside.


@torch.library.custom_op("workbook::flash_forward", mutates_args=())
def forward_operator(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """`fast_forward` with the tiles of the tables."""
    return fast_forward(q, k, v, is_causal)


@torch.library.custom_op("workbook::flash_backward", mutates_args=())
def backward_operator(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`fast_backward`."""
    return fast_backward(q, k, v, o, do, lse, is_causal)


@torch.library.custom_op("workbook::flash_joined_forward", mutates_args=())
def joined_forward_operator(x: Tensor, bias: Tensor | None, n_heads: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attention on a joined projection; returns ``[B, T, H, D]`` and the logsumexp ``[B, H, T]``.

    The bias gets a gradient.
    """
    o, lse = _planned(_plan_joined_forward, (x,), n_heads, is_causal).run((x,))
    return o, lse


@torch.library.custom_op("workbook::flash_joined_backward", mutates_args=())
def joined_backward_operator(
    x: Tensor, o: Tensor, do: Tensor, lse: Tensor, n_heads: int, is_causal: bool, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of a joined projection, joined too, and the sums for the gradient of its bias,
    or an empty tensor.
    """
    plan = _planned(_plan_joined_backward, (x, o, do), n_heads, is_causal, has_bias)
    dx, sums = _joined_backward(plan, x, o, do, lse, n_heads, has_bias)
    return dx, x.new_empty(0, dtype=torch.float32) if sums is None else sums


def _fake_like(x: Tensor, width: int | None = None) -> Tensor:
    return x.new_empty_strided(*_shape_like(x, width))


@torch.library.custom_op("workbook::flash_variant_forward", mutates_args=())
def variant_forward_operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, spans: Tensor | None, is_causal: bool,
    scale: float | None, window: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`variant_forward` with sinks and the spans of documents."""
    return variant_forward(q, k, v, sinks, spans, is_causal, check_variant(q, k, scale, window, softcap, sinks, spans))


@torch.library.custom_op("workbook::flash_variant_backward", mutates_args=())
def variant_backward_operator(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, sinks: Tensor | None, spans: Tensor | None,
    is_causal: bool, scale: float | None, window: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`variant_backward`; the gradient of absent sinks is an empty tensor."""
    variant = check_variant(q, k, scale, window, softcap, sinks, spans)
    dq, dk, dv, d_sinks = variant_backward(q, k, v, o, do, lse, sinks, spans, is_causal, variant)
    return dq, dk, dv, q.new_empty(0) if d_sinks is None else d_sinks


@variant_forward_operator.register_fake
def _(q, k, v, sinks, spans, is_causal, scale, window, softcap):
    return _fake_like(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


@variant_backward_operator.register_fake
def _(q, k, v, o, do, lse, sinks, spans, is_causal, scale, window, softcap):
    return (
        _fake_like(q),
        _fake_like(k),
        _fake_like(v),
        q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


@forward_operator.register_fake
def _(q, k, v, is_causal):
    return _fake_like(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


@backward_operator.register_fake
def _(q, k, v, o, do, lse, is_causal):
    return _fake_like(q), _fake_like(k), _fake_like(v)


@joined_forward_operator.register_fake
def _(x, bias, n_heads, is_causal):
    b, t, _, d = x.shape
    return x.new_empty(b, t, n_heads, d), x.new_empty(b, n_heads, t, dtype=torch.float32)


@joined_backward_operator.register_fake
def _(x, o, do, lse, n_heads, is_causal, has_bias):
    shape = (2, n_heads, x.shape[-1]) if has_bias else (0,)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32)


def _refuse(ctx, *grads):
    raise RuntimeError(NO_SECOND_DERIVATIVE)


backward_operator.register_autograd(_refuse)
joined_backward_operator.register_autograd(_refuse)
variant_backward_operator.register_autograd(_refuse)


def _save(ctx, inputs, output):
    q, k, v, ctx.is_causal = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, do, _):
    q, k, v, o, lse = ctx.saved_tensors
    return *backward_operator(q, k, v, o, do, lse, ctx.is_causal), None


def _save_joined(ctx, inputs, output):
    x, bias, ctx.n_heads, ctx.is_causal = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, *output)
    ctx.mark_non_differentiable(output[1])


def _joined_gradients(ctx, do, compute):
    x, o, lse = ctx.saved_tensors
    has_bias = ctx.bias_dtype is not None
    dx, sums = compute(x, o, do, lse, ctx.n_heads, ctx.is_causal, has_bias)
    d_bias = _bias_gradient(sums, (x.shape[2] - ctx.n_heads) // 2).to(ctx.bias_dtype) if has_bias else None
    return dx, d_bias, None, None


def _differentiate_joined(ctx, do, _):
    return _joined_gradients(ctx, do, joined_backward_operator)


def _save_variant(ctx, inputs, output):
    q, k, v, sinks, spans, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, spans)
    ctx.mark_non_differentiable(output[1])


def _differentiate_variant(ctx, do, _):
    q, k, v, o, lse, sinks, spans = ctx.saved_tensors
    *grads, d_sinks = variant_backward_operator(q, k, v, o, do, lse, sinks, spans, *ctx.rest)
    return *grads, None if sinks is None else d_sinks, *[None] * 5


forward_operator.register_autograd(_differentiate, setup_context=_save)
variant_forward_operator.register_autograd(_differentiate_variant, setup_context=_save_variant)
joined_forward_operator.register_autograd(_differentiate_joined, setup_context=_save_joined)


class Eager(torch.autograd.Function):
    """Attention without an operator, for which PyTorch's dispatcher takes longer than a short kernel runs."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        xs = (q, k, v)
        plan = _planned(_plan_forward, xs, is_causal, None)
        o, lse = plan.run(xs)
        ctx.is_causal, ctx.plans = is_causal, plan.backward
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        if (
            torch.is_grad_enabled()
        ):  # the operator raises on a second derivative; a plain launch would silently lack terms
            return *backward_operator(q, k, v, o, do, lse, ctx.is_causal), None
        xs = (q, k, v, o, do)
        return *_planned_again(ctx.plans, _plan_backward, xs, ctx.is_causal).run(xs, lse.contiguous()), None


class EagerJoined(torch.autograd.Function):
    """`Eager` for a joined projection."""

    @staticmethod
    def forward(ctx, x, bias, n_heads, is_causal):
        plan = _planned(_plan_joined_forward, (x,), n_heads, is_causal)
        o, lse = plan.run((x,))
        ctx.n_heads, ctx.is_causal, ctx.bias_dtype = n_heads, is_causal, None if bias is None else bias.dtype
        ctx.plans = plan.backward
        ctx.save_for_backward(x, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        if torch.is_grad_enabled():
            return _joined_gradients(ctx, do, joined_backward_operator)

        def compute(x, o, do, lse, n_heads, is_causal, has_bias):
            plan = _planned_again(ctx.plans, _plan_joined_backward, (x, o, do), n_heads, is_causal, has_bias)
            return _joined_backward(plan, x, o, do, lse, n_heads, has_bias)

        return _joined_gradients(ctx, do, compute)


class EagerVariant(torch.autograd.Function):
    """`Eager` for every `Variant`."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, spans, is_causal, variant):
        o, lse = variant_forward(q, k, v, sinks, spans, is_causal, variant)
        ctx.is_causal, ctx.variant = is_causal, variant
        ctx.save_for_backward(q, k, v, o, lse, sinks, spans)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse, sinks, spans = ctx.saved_tensors
        if torch.is_grad_enabled():
            rest = ctx.is_causal, *ctx.variant[:3]
            *grads, d_sinks = variant_backward_operator(q, k, v, o, do, lse, sinks, spans, *rest)
            return *grads, None if sinks is None else d_sinks, None, None, None
        grads = variant_backward(q, k, v, o, do, lse, sinks, spans, ctx.is_causal, ctx.variant)
        return *grads, None, None, None


# `Function.apply` asks at every call for transforms of torch.func. `is_watched` has asked already.
_apply, _apply_joined, _apply_variant = (
    super(torch.autograd.Function, which).apply for which in (Eager, EagerJoined, EagerVariant)
)

_capabilities: dict[torch.device, tuple[int, int]] = {}


@constant_when_compiled
def _has_copy_engine(device: torch.device) -> bool:
    """Whether a GPU copies whole tiles by descriptors: compute capability 9.0 or more."""
    if device not in _capabilities:
        _capabilities[device] = torch.cuda.get_device_capability(device)
    return _capabilities[device][0] >= 9


def fits_fast(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Whether the fast kernels can run: a Hopper GPU, 16 bits, a width from 64 to 256 that is a multiple of 8, and
    values of no more.
    """
    if not q.is_cuda or not HAS_TRITON or INTERPRETED or q.ndim < 2 or q.shape[-1] not in WIDTHS:
        return False
    if q.shape[:-2].numel() > MOST_ALONG_AXIS or q.shape[-2] > 64 * MOST_ALONG_AXIS:
        return False
    known = q.dtype is torch.bfloat16 or q.dtype is torch.float16
    fits = v.shape[-1] % 8 == 0 < v.shape[-1] <= k.shape[-1]
    return known and fits and _has_copy_engine(q.device) and q.numel() > 0 and k.numel() > 0


def is_quickest(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Whether the fast kernels are faster than all of PyTorch's, as far as ``lib.bench.kernels.flash_shapes`` tells.

    Shapes between those that it measured are judged by the nearest.
    """
    if q.shape[-2] == 1 or not fits_fast(q, k, v, is_causal):
        return False
    t, s, width = q.shape[-2], k.shape[-2], q.shape[-1]
    is_large = width == 64 and min(q.shape[:-1].numel(), k.shape[:-1].numel()) >= MANY
    if is_large or n_stored_tiles(q.device, sizes_of(q, k, is_causal)):
        return True
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        return False
    short = _may_be_ragged(t, s, is_causal) and (width, t % 128 != 0 or s % 128 != 0) in QUICKEST_SHORT
    return short or (width, is_causal) in QUICKEST


def flash_attention_fast(
    q: Float[Tensor, "*lead t d"],
    k: Float[Tensor, "*lead_kv s d"],
    v: Float[Tensor, "*lead_kv s d"],
    is_causal: bool = False,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " h"] | None = None,
    documents: Documents | Int[Tensor, "*b t"] | None = None,
) -> Float[Tensor, "*lead t d"]:
    """Attention with gradients where `fits_fast` holds; tensors are read and written in the layout that they have.

    Args:
        q: Queries ``[..., H, T, D]``.
        k: Keys ``[..., G, S, D]``; query head h reads key head ``h // (H / G)``.
        v: Values, as wide as the keys or narrower, and so is what is returned.
        is_causal: Whether a query sees no key after its own position; the last query is at the last key.
        scale: Factor of the scores; ``D ** -0.5`` if None.
        window: How many keys a query sees at most, its own position included;
            as many after it as before it if not ``is_causal``. Tiles of keys outside are never read.
        softcap: Scores become ``softcap * tanh(scores * scale / softcap)``, before the mask.
        sinks: A logit for each query head, ``[H]``, that joins each softmax's denominator: it has no value, is
            neither scaled nor capped, and gets a gradient.
        documents: A query sees only keys of its own document: numbers ``[B, T]`` or ``[T]``, of which equal
            neighbours are one document, or `Documents`, made once for many layers. Needs as many keys as queries.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit, or an argument's value is not as above.
    """
    if q.ndim > 4:
        check_shapes(q, k, v)
        flat_q, flat_k, flat_v = (x.flatten(0, -4) for x in (q, k, v))
        rest: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "sinks": sinks,
            "documents": documents,
        }
        return flash_attention_fast(flat_q, flat_k, flat_v, is_causal, **rest).unflatten(0, q.shape[:-3])
    if scale is window is softcap is sinks is documents is None:
        if is_watched(q, k, v):
            check_shapes(q, k, v)
            return forward_operator(q, k, v, is_causal)[0]
        return _apply(q, k, v, is_causal)
    check_shapes(q, k, v)
    if isinstance(documents, Tensor):
        documents = Documents.from_ids(documents)
    spans = None if documents is None else documents.spans.contiguous()
    variant = check_variant(q, k, scale, window, softcap, sinks, spans)
    if is_watched(q, k, v):
        return variant_forward_operator(q, k, v, sinks, spans, is_causal, scale, window, softcap)[0]
    return _apply_variant(q, k, v, sinks, spans, is_causal, variant)


def flash_attention_joined(
    x: Float[Tensor, "b t n d"], n_heads: int, is_causal: bool = False, bias: Float[Tensor, " width"] | None = None
) -> Float[Tensor, "b t h d"]:
    """Attention on a joined projection ``[B, T, H + 2 * G, D]`` where `fits_fast` holds; its gradient is joined too.

    Args:
        x: The projection.
        n_heads: H, heads of queries.
        is_causal: Whether a token sees only tokens up to itself.
        bias: A bias ``[(H + 2 * G) * D]`` that was added to ``x`` detached,
            because attention computes its gradient with less work than a sum over that of ``x`` (`_bias_gradient`).

    Raises:
        ValueError: x has no such shape for this number of heads, or the bias does not fit it.
    """
    if bias is not None and bias.shape != (x.shape[-2:].numel(),):
        raise ValueError(f"bias {tuple(bias.shape)}, expected [N * D] for x {tuple(x.shape)} = [B, T, N, D]")
    if is_watched(x):
        split_joined(x, n_heads)
        return joined_forward_operator(x, bias, n_heads, is_causal)[0]
    return _apply_joined(x, bias, n_heads, is_causal)
