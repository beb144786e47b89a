"""Simulate the kernels with roles on a CPU, and print as JSON how far each result is from float64's,
or what fault was found.
"""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812

from lib.fast.attention import flash, flash_hopper, flash_items, flash_stored, flash_wide, flash_wide_hopper
from lib.fast.attention.flash_hopper import Roles
from lib.fast.attention.flash_stored import StoredBackward
from lib.fast.launch import Launch, Sizes
from lib.fast.parts import grouped, loss_hopper, mlp
from tests.house.fast.hopper_simulator import Fault, simulate

SEEDS = range(3)
SHAPES = {  # batch, heads, heads of keys, rows, keys, width
    "equal": (2, 2, 2, 256, 256, 64),
    "shared keys": (1, 3, 1, 128, 256, 64),
    "ragged": (1, 2, 2, 197, 130, 64),
    "rows without keys": (1, 2, 1, 200, 70, 80),
    "one row": (1, 2, 2, 1, 300, 128),
    "a group of rows beyond the last one": (1, 1, 1, 129, 512, 128),
}
CUTS = (
    Roles(3, 128, 2, heads_first=True, early=True),
    Roles(3, 64, 3, registers=True),
    Roles(2, 64, 3, registers=True),
)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error in units of bfloat16's rounding of the largest number, or of 1 where all are small."""
    return ((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1)).item() * 2**8


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Numbers of which each must be written."""
    return torch.full(shape, math.nan, dtype=dtype)


def attention(shape: str, causal: bool, cuts: tuple[Any, ...], seed: int, **options: Any) -> dict[str, float]:
    """Forward and backward pass by kernels with roles alone."""
    B, H, G, T, S, D = SHAPES[shape]
    q, do, k, v = (torch.randn(B, n, t, D).bfloat16() for n, t in ((H, T), (H, T), (G, S), (G, S)))
    sizes = Sizes(B, H, H // G, T, S, D, causal)
    o, dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, q, k, v))
    lse, stats = empty(B, H, T, dtype=torch.float32), empty(2 * sizes.n_rows, dtype=torch.float32)
    simulate(flash_hopper.hopper_forward(sizes, cuts[0]), q, k, v, o, lse, seed=seed, **options)
    simulate(flash_hopper.hopper_dq(sizes, cuts[1]), q, k, v, o, do, dq, lse, stats, seed=seed, **options)
    simulate(flash_hopper.hopper_dkdv(sizes, cuts[2]), q, k, v, do, dk, dv, stats, seed=seed, **options)

    wanted, scores, wanted_gradients = exact_attention(q, k, v, do, causal)
    pairs = zip((dq, dk, dv), wanted_gradients, strict=True)
    seen = scores.isfinite().any(-1)
    assert torch.equal(lse.isfinite(), seen)
    return {"o": distance(o, wanted), "lse": distance(lse[seen], scores.logsumexp(-1)[seen])} | {
        f"d{name}": distance(*pair) for name, pair in zip("qkv", pairs, strict=True)
    }


def exact_attention(q: Any, k: Any, v: Any, do: Any, causal: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Output, masked scores and gradients in float64."""
    exact, group = [x.double().requires_grad_() for x in (q, k, v)], q.shape[1] // k.shape[1]
    scores = exact[0] @ exact[1].repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2]), -math.inf
        )
    seen = scores.isfinite().any(-1, keepdim=True)
    out = (torch.where(seen, scores, 0).softmax(-1) * seen) @ exact[2].repeat_interleave(group, 1)
    return out.detach(), scores.detach(), torch.autograd.grad(out, exact, do.double())


def stored(
    shape: tuple[int, ...], causal: bool, n_parts: int, apart: bool, seed: int, **options: Any
) -> dict[str, float]:
    """The backward pass through memory that holds dS of so many parts, by three programs at once."""
    B, H, G, T, S, D = shape
    q, do, k, v = (torch.randn(B, n, t, D).bfloat16() for n, t in ((H, T), (H, T), (G, S), (G, S)))
    o, scores, wanted = exact_attention(q, k, v, do, causal)
    found, sizes = [torch.full_like(x, math.nan) for x in (q, k, v)], Sizes(B, H, H // G, T, S, D, causal)
    parts = sizes._replace(group=1) if apart else sizes
    work = flash_items.deal(parts, 3, n_parts * flash_items.n_part_tiles(parts)), H // G if apart else 1
    with patch.object(flash_stored, "deal_apart", lambda *given: work):
        flash_stored._dealt.cache_clear()
        backward = StoredBackward(sizes, q.device, 3, 1)
    spoiled = {torch.bfloat16: math.nan, torch.float32: math.nan, torch.int32: -(2**20)}
    with (
        patch.object(Launch, "__call__", lambda launch, *tensors: simulate(launch, *tensors, seed=seed, **options)),
        patch.object(
            torch,
            "empty",
            lambda n, dtype, device: torch.full(
                torch.Size(n if isinstance(n, tuple) else (n,)), spoiled[dtype], dtype=dtype
            ),
        ),
    ):
        backward(q, k, v, o.bfloat16(), do, scores.logsumexp(-1).float(), *found)
    return {f"d{name}": distance(*pair) for name, *pair in zip("qkv", found, wanted, strict=True)}


# batch, heads, heads of keys, rows, keys, width; mask; parts in memory; whether heads that share keys are parts
STORED = {
    "full": ((2, 2, 2, 256, 256, 128), False, 4, False),
    "causal": ((1, 3, 1, 256, 384, 128), True, 1, False),
    "causal, each head apart": ((2, 6, 2, 192, 256, 128), True, 2, True),
    "ragged, each head apart": ((1, 3, 1, 70, 200, 80), False, 1, True),
    "ragged": ((1, 2, 1, 200, 330, 80), False, 1, False),
    "ragged, causal": ((1, 2, 2, 197, 330, 128), True, 2, False),
    "one row": ((1, 2, 2, 1, 300, 128), True, 2, False),
    "a place for two of three parts": ((1, 3, 3, 192, 192, 72), True, 2, False),
    "a place for one of four parts": ((2, 4, 2, 384, 320, 128), False, 1, False),
}


def wide(shape: tuple[int, ...], causal: bool, apart: int, seed: int, **options: Any) -> dict[str, float]:
    """The forward pass, dV of wide heads, and dS: all pairs in blocks of 128 with a pair that is seen must be there."""
    B, H, G, T, S, D, V = shape
    q, do, k, v = (torch.randn(B, n, t, d).bfloat16() for n, t, d in ((H, T, D), (H, T, V), (G, S, D), (G, S, V)))
    o, scores, (_, _, wanted) = exact_attention(q, k, v, do, causal)
    sizes, values = Sizes(B, H, H // G, T, S, D, causal, value_dim=V), v.double().repeat_interleave(H // G, 1)
    out, lse = empty(B, H, T, V), empty(B, H, T, dtype=torch.float32)
    cut = Roles(2, 64, 2, heads_first=True)
    simulate(flash_hopper.hopper_forward(sizes, cut), q, k, v, out, lse, seed=seed, **options)

    along = (o * do.double()).sum(-1)
    d_scores = scores.softmax(-1) * (do.double() @ values.mT - along[..., None])
    beyond = sizes.padded - T
    lse2 = F.pad(scores.logsumexp(-1).float() / math.log(2), (0, beyond), value=math.inf)
    stats = torch.stack([lse2, F.pad(along.float(), (0, beyond))]).flatten()
    dv, ds = empty(B, G * apart, S, V), empty(B, H, S, sizes.padded)[..., :T]
    launch = flash_wide_hopper.hopper_wide(sizes, flash_wide.ROLES, apart)
    simulate(launch, q, k, v, do, dv, ds, stats, seed=seed, **options)
    first = torch.arange(S) // 128 * 128 + T - S if causal else torch.zeros(S)  # row that sees the first key of a block
    written = torch.arange(T) // 128 * 128 + 127 >= first[:, None]
    ds, d_scores = (torch.where(written, x, 0) for x in (ds, d_scores.mT))
    dv = dv.double().unflatten(1, (G, apart)).sum(2)
    return {"o": distance(out, o), "dv": distance(dv, wanted), "ds": distance(ds, d_scores)}


# batch, heads, heads of keys, rows, keys, widths of keys and values; mask; programs that share a head of keys
WIDE = {
    "causal": ((1, 1, 1, 256, 256, 256, 256), True, 1),
    "ragged, each head apart": ((1, 2, 1, 70, 200, 256, 256), True, 2),
    "narrow values": ((1, 1, 1, 70, 70, 192, 128), True, 1),
    "full, narrow values, each head apart": ((1, 2, 1, 70, 130, 256, 72), False, 2),
}


def products(counts: tuple[int, ...], transposed: bool, seed: int, **options: Any) -> dict[str, float]:
    """Chapter 19's grouped product and its gradient for the matrices."""
    C, columns, n = 136, 264, sum(counts)
    x, grad = torch.randn(n, C).bfloat16(), torch.randn(n, columns).bfloat16()
    weights = torch.randn(len(counts), C, columns).bfloat16()
    weights = weights.mT.contiguous().mT if transposed else weights
    first = torch.tensor([0, *counts]).cumsum(0).int()
    tiles = [(e, row, first[e + 1]) for e in range(len(counts)) for row in range(first[e], first[e + 1], grouped.ROWS)]
    table = torch.tensor([len(tiles), *(column for part in zip(*tiles, strict=True) for column in part)]).int()
    out, of_weights = empty(n, columns), empty(len(counts), C, columns)
    cut = grouped.Cut(columns=128, transposed=transposed)
    inner = weights.mT if transposed else weights
    simulate(grouped._rows_launch((C, columns, len(tiles), 2, cut)), x, inner, out, table, seed=seed, **options)
    launch = grouped._matrices_launch((C, columns, len(counts), 3, grouped.Cut(columns=128)))
    simulate(launch, x, grad, of_weights, first, seed=seed, **options)
    parts = [x.double().split(counts), weights.double(), grad.double().split(counts)]
    wanted = torch.cat([a @ w for a, w in zip(parts[0], parts[1], strict=True)])
    wanted_weights = torch.stack([a.T @ g for a, g in zip(parts[0], parts[2], strict=True)])
    return {"rows": distance(out, wanted), "matrices": distance(of_weights, wanted_weights)}


def around_gelu(form: str, n_programs: int, seed: int, **options: Any) -> dict[str, float]:
    """The products before and after a GELU."""
    n, C, inner = 300, 392, 264
    x, first, bias = torch.randn(n, C).bfloat16(), (torch.randn(inner, C) / C**0.5).bfloat16(), torch.randn(inner)
    gelu, slope = empty(n, inner), empty(n, inner)
    launch = mlp._forward_launch((n, C, inner, form == "tanh", n_programs))
    simulate(launch, x, first, bias, gelu, slope, seed=seed, **options)
    argument = (x.double() @ first.double().T + bias.double()).requires_grad_()
    wanted = F.gelu(argument, approximate=form)
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), argument)

    grad, second = torch.randn(n, C).bfloat16(), (torch.randn(C, inner) / C**0.5).bfloat16()
    out, sums = empty(n, inner), empty(4 * -(-n // 192), inner, dtype=torch.float32)
    simulate(mlp._backward_launch((n, C, inner, n_programs)), grad, second, slope, out, sums, seed=seed, **options)
    d = (grad.double() @ second.double()) * slope.double()
    pairs = {"gelu": (gelu, wanted), "slope": (slope, wanted_slope), "d": (out, d), "d_bias": (sums.sum(0), d.sum(0))}
    return {name: distance(*pair) for name, pair in pairs.items()}


def loss_of_rows(n_columns: int, n_vocab: int, n_programs: int, seed: int, **options: Any) -> dict[str, float]:
    """Powers of the logits less the targets', and their sums over rows."""
    n, C = 300, 136
    rows, weight = torch.randn(n, C).bfloat16(), (2 * torch.randn(n_columns, C) / C**0.5).bfloat16()
    targets, exact = torch.randint(n_vocab, (n,)), rows.double() @ weight.double().T
    own = exact.gather(1, targets[:, None])
    powers, sums = empty(n, n_columns), empty(-(-n_columns // 128), n, dtype=torch.float32)
    launch = loss_hopper._powers_launch((n, C, n_columns, n_vocab, n_programs))
    bits = (own[:, 0] * math.log2(math.e)).float()
    simulate(launch, rows, weight, bits, targets, powers, sums, seed=seed, **options)
    wanted = (exact - own).exp().scatter(1, targets[:, None], 0.0)
    wanted[:, n_vocab:] = 0.0
    pairs = {"powers": (powers, wanted), "sums": (sums.sum(0), wanted.sum(1))}
    return {name: distance(*pair) for name, pair in pairs.items()}


def leave_out(name: str) -> Callable[[dict], None]:
    return lambda names: names.update({name: lambda *_, **__: None})


def no_store_wait(names: dict) -> None:
    names["tma"].store_wait = lambda n: names["mbarrier"].arrive(None, pred=False) if n else None


def hasty_product(names: dict) -> None:
    """Lets go of a tile while its product may still read it."""
    wait = names["warpgroup_mma_wait"]
    names.update(warpgroup_mma_wait=lambda n, deps: deps if n else wait(n, deps=deps))


def out_of_turn(names: dict) -> None:
    """Lets the second user of `lib.fast.parts.mlp` start while the first one's terms are still to come."""

    def wait_full(full: Any, n: Any, CUT: Any) -> None:
        if CUT.stages != 2 or n % 2 == 1:
            names["mbarrier"].wait(full.index(n % CUT.stages), (n // CUT.stages) & 1)

    names.update(wait_full=wait_full)


BREAKS = {
    "no tile is released": leave_out("release"),
    "no fence": leave_out("fence_async_shared"),
    "nobody waits for a tile": leave_out("wait_full"),
    "nobody waits for a place": leave_out("wait_empty"),
    "nobody waits for copies to memory": no_store_wait,
    "a tile is released while a product reads it": hasty_product,
    "nobody waits for a turn": out_of_turn,
}
STORED_BREAKS = {
    "no item waits for others": leave_out("await_count"),
    "an item is counted before its results are in memory": leave_out("wait_for_writes"),
}


def cases() -> Iterator[tuple[str, Callable[..., dict[str, float]]]]:
    """Everything that is simulated, by name."""
    for shape in SHAPES:
        for causal in (True, False):
            width = 64 if SHAPES[shape][-1] == 64 else 128
            of_table = flash.ROLES_TABLE[width, causal]
            cuts = tuple(mine if isinstance(mine, Roles) else other for mine, other in zip(of_table, CUTS, strict=True))
            for kind, chosen in (("table", cuts), ("other", CUTS)):
                name = f"attention, {shape}, {'causal' if causal else 'full'}, {kind}"
                yield name, lambda seed, s=shape, c=causal, cut=chosen, **kw: attention(s, c, cut, seed, **kw)
    for kind, how in STORED.items():
        yield f"stored, {kind}", lambda seed, how=how, **kw: stored(*how, seed=seed, **kw)
    for kind, what in WIDE.items():
        yield f"wide, {kind}", lambda seed, what=what, **kw: wide(*what, seed=seed, **kw)
    for transposed in (False, True):
        for counts in ((128, 256, 64), (0, 5, 300, 0, 129), (1,)):
            name = f"products, {counts}, {'transposed' if transposed else 'plain'}"
            yield name, lambda seed, n=counts, t=transposed, **kw: products(n, t, seed, **kw)
    for form in ("none", "tanh"):
        for n_programs in (1, 3):
            name = f"around a GELU, {form}, programs: {n_programs}"
            yield name, lambda seed, f=form, n=n_programs, **kw: around_gelu(f, n, seed, **kw)
    for sizes in ((264, 250, 1), (256, 256, 3), (384, 200, 2), (128, 100, 4)):
        yield f"loss of rows, {sizes}", lambda seed, s=sizes, **kw: loss_of_rows(*s, seed=seed, **kw)


def outcome(run: Callable[..., dict[str, float]], seed: int, **options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    try:
        return run(seed, **options)
    except Fault as fault:
        return {"fault": str(fault)}


def main() -> None:
    torch.set_num_threads(1)
    found = {name: [outcome(run, seed) for seed in SEEDS] for name, run in cases()}
    broken = {}
    for name, change in BREAKS.items():
        broken[name] = [
            outcome(lambda seed, **kw: around_gelu("tanh", 1, seed, **kw), seed, change=change) for seed in SEEDS
        ]
    how = STORED["a place for one of four parts"]
    for name, change in STORED_BREAKS.items():
        broken[name] = [
            outcome(lambda seed, **kw: stored(*how, seed=seed, **kw), seed, change=change) for seed in SEEDS
        ]
    print(json.dumps({"found": found, "broken": broken}))


if __name__ == "__main__":
    main()
