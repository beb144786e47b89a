"""Chapter 25's Muon for a GPU: the matrices of one shape are orthogonalized together, and half of a symmetric product
is computed.

A GPT-2 has dozens of matrices and each needs fifteen products, too small to fill a GPU one at a time.
In a stack, the same products are a few large ones.
Two of three products in a step of Newton-Schulz are symmetric: ``symmetric_product`` computes the tiles on and below
the diagonal, and writes each twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from lib.given.kernels.mode import INTERPRETED, tl, triton
from lib.given.optim import ByParameter, triples
from lib.given.parallel.sharding import all_gather_row
from lib.optimizers import Muon, ShardedMuon, assign_owners, newton_schulz

SIDE, TERMS = (16, 16) if INTERPRETED else (128, 64)  # of a tile; terms that are added at a time


@triton.jit
def symmetric_kernel(
    x, add, out, n, n_terms, x_batch, x_row, x_term, alpha, beta,
    ADDS: tl.constexpr, SIDE: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """out [batch, n, n] is alpha x x^T, plus beta times the symmetric ``add``; program t has the t-th tile below."""
    t = tl.program_id(0)
    i = ((tl.sqrt(8.0 * t + 1.0) - 1.0) / 2.0).to(tl.int32)  # t = i (i + 1) / 2 + j with j <= i
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    j = t - i * (i + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    rows, columns, terms = i * SIDE + tl.arange(0, SIDE), j * SIDE + tl.arange(0, SIDE), tl.arange(0, TERMS)
    left = x + matrix * x_batch + rows[:, None] * x_row + terms[None, :] * x_term
    right = x + matrix * x_batch + columns[None, :] * x_row + terms[:, None] * x_term
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for start in range(0, n_terms, TERMS):
        inside = terms + start < n_terms
        a = tl.load(left, mask=(rows < n)[:, None] & inside[None, :], other=0.0)
        b = tl.load(right, mask=inside[:, None] & (columns < n)[None, :], other=0.0)
        total = tl.dot(a, b, total)
        left += TERMS * x_term
        right += TERMS * x_term
    total *= alpha
    inside = (rows < n)[:, None] & (columns < n)[None, :]
    places = matrix * n * n + rows[:, None] * n + columns[None, :]
    if ADDS:
        total += beta * tl.load(add + places, mask=inside, other=0.0).to(tl.float32)
    tile = total.to(out.dtype.element_ty)
    tl.store(out + places, tile, mask=inside)
    if i != j:
        mirrored = (columns < n)[:, None] & (rows < n)[None, :]
        tl.store(out + matrix * n * n + columns[:, None] * n + rows[None, :], tl.trans(tile), mask=mirrored)


def symmetric_product(
    x: Float[Tensor, "batch n terms"], add: Float[Tensor, "batch n n"] | None = None, alpha=1.0, beta=1.0
) -> Float[Tensor, "batch n n"]:
    """``alpha x x^T + beta add``, added in float32 and rounded once.

    Args:
        x: Matrices with any strides, on a device on which Triton's kernels run.
        add: Symmetric matrices of x's dtype, contiguous; left out, nothing is added.
        alpha: Factor of the product.
        beta: Factor of ``add``.

    Cost: ``n^2 terms`` FLOPs a matrix, half of those of a product that does not know of its symmetry.
    """
    batch, n, n_terms = x.shape
    out = x.new_empty(batch, n, n)
    tiles = triton.cdiv(n, SIDE)
    symmetric_kernel[(tiles * (tiles + 1) // 2, batch)](
        x, x if add is None else add, out, n, n_terms, *x.stride(), alpha, beta, add is not None, SIDE, TERMS,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def newton_schulz_by_halves(
    G: Float[Tensor, "batch r c"], steps: int, coefficients: Any, eps: float, dtype: torch.dtype
) -> Float[Tensor, "batch r c"]:
    """Chapter 25's ``newton_schulz`` for a stack of matrices, with symmetric products."""
    X = G.to(dtype)
    is_tall = G.shape[1] > G.shape[2]
    X = X.mT if is_tall else X
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=eps)
    for a, b, c in triples(coefficients, steps):
        A = symmetric_product(X)
        B = symmetric_product(A, A, c, b)  # A is its own transpose
        X = torch.baddbmm(X, B, X, beta=a)
    return X.mT if is_tall else X


class Stacked(ByParameter):
    """An optimizer whose matrices of one shape are orthogonalized and updated together."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group.get("cautious", self.defaults["cautious"]):
            raise ValueError("cautious=True: expected False, since a stack of matrices decays as one")
        super().add_param_group(param_group)

    def directions(self, parameters: list[Tensor], group: dict[str, Any]) -> Sequence[Tensor]:
        """Take the gradients into the momenta, and return what is orthogonalized."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        for p in [p for p in parameters if "momentum_buffer" not in self.state[p]]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        means = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        return torch._foreach_lerp(gradients, means, group["momentum"]) if group["nesterov"] else means


class StackedMuon(Stacked, Muon):
    """Chapter 25's ``Muon``, with one call of Newton-Schulz for all matrices of a shape.

    Its state and its steps are ``Muon``'s, to rounding; ``cautious`` is refused.

    Args:
        params: As for ``Muon``.
        ranks: Ranks that hold copies of all parameters and of their gradients. They divide each stack among them, and
            all-gather what they have orthogonalized while they are at the next stack. None: each process does all.
        settings: Further arguments of ``Muon``. A CUDA graph needs ``lr`` to be a tensor on the device.

    Cost: beside ``Muon``, a copy of all matrices in ``ns_dtype``, and one of their gradients' dtype for each shape.
        On R ranks each orthogonalizes ``ceil(n / R)`` of n matrices, and receives the others in ``ns_dtype``.
    """

    def __init__(self, params, ranks: dist.ProcessGroup | None = None, **settings: Any):
        self.ranks = ranks
        super().__init__(params, **settings)

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        stacks = alike(parameters, [matrix_of(p).shape[-2:] for p in parameters])
        begun = [self.begin(stack, group) for stack in stacks]
        for stack, (found, work) in zip(stacks, begun, strict=True):
            if work is not None:
                work.wait()
            shape = found.shape[-2:]
            parts = found.to(stack[0].dtype).split([p.numel() // shape.numel() for p in stack])
            move(stack, [o.reshape(p.shape) for o, p in zip(parts, stack, strict=True)], shape, group)

    def begin(self, stack: list[Tensor], group: dict[str, Any]) -> tuple[Tensor, dist.Work | None]:
        """Orthogonalize what is this rank's of a stack. The rest is there when the work is done."""
        directions = self.directions(stack, group)
        shape = matrix_of(stack[0]).shape[-2:]
        whole = torch.cat([matrix_of(d).reshape(-1, *shape) for d in directions])
        if self.ranks is None:
            return orthogonal(whole, group), None
        n, rank = dist.get_world_size(self.ranks), dist.get_rank(self.ranks)
        size = -(-len(whole) // n)
        mine = whole[rank * size : (rank + 1) * size]
        mine = torch.cat([mine, mine.new_zeros(size - len(mine), *shape)])  # all ranks send as much
        mine = orthogonal(mine, group).contiguous()
        found = mine.new_empty(n * size, *shape)
        work = all_gather_row(found, mine, self.ranks, async_op=True)
        return found[: len(whole)], work


class StackedShardedMuon(Stacked, ShardedMuon):
    """Chapter 25's ``ShardedMuon``, whose owners orthogonalize their matrices of a shape in one call.

    Its arguments, its state, its messages and its steps are ``ShardedMuon``'s, to rounding; ``cautious`` is refused,
    and all parameters have one dtype.
    """

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        n, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        whole = dict(zip(group["params"], self.shapes, strict=True))
        owners = assign_owners([whole[p] for p in parameters], n, group["ns_steps"])
        pairs = sorted(zip(owners, parameters, strict=True), key=lambda pair: pair[0])
        ordered = [p for _, p in pairs]
        mine = [whole[p] for owner, p in pairs if owner == rank]
        outgoing = [sum(p.numel() for owner, p in pairs if owner == r) for r in range(n)]
        sizes = [[rows_of(shape, r, n) * shape[1] for shape in mine] for r in range(n)]
        incoming = [sum(of_rank) for of_rank in sizes]

        row = torch.cat([d.flatten() for d in self.directions(ordered, group)]).to(group["ns_dtype"])
        parts = [part.split(of) for part, of in zip(self.exchange(row, outgoing, incoming), sizes, strict=True)]
        matrices = [torch.cat(pieces).view(shape) for pieces, shape in zip(zip(*parts, strict=True), mine, strict=True)]
        found = [o.flatten() for o in self.orthogonal_all(matrices, group)]
        back = zip(*(o.split([of[i] for of in sizes]) for i, o in enumerate(found)), strict=True)
        row = torch.cat([piece for of_rank in back for piece in of_rank] or [row[:0]])
        steps = torch.cat(list(self.exchange(row, incoming, outgoing))).split([p.numel() for p in ordered])
        for stack in alike(list(zip(ordered, steps, strict=True)), [whole[p] for p in ordered]):
            move([p for p, _ in stack], [o.view(p.shape) for p, o in stack], whole[stack[0][0]], group)

    def exchange(self, row: Tensor, outgoing: list[int], incoming: list[int]) -> Sequence[Tensor]:
        """Send each rank its part of a row; return what each rank sent."""
        out = row.new_empty(sum(incoming))
        dist.all_to_all_single(out, row, incoming, outgoing, group=self.group)
        return out.split(incoming)

    def orthogonal_all(self, matrices: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Whole matrices, orthogonalized in stacks, in their order."""
        found: dict[int, Tensor] = {}
        for places in alike(list(range(len(matrices))), [m.shape for m in matrices]):
            found |= zip(places, orthogonal(torch.stack([matrices[i] for i in places]), group), strict=True)
        return [found[i] for i in range(len(matrices))]


def alike(values: list[Any], keys: Sequence[Any]) -> list[list[Any]]:
    """The values in lists, one for each key."""
    found: dict[Any, list[Any]] = {}
    for value, key in zip(values, keys, strict=True):
        found.setdefault(key, []).append(value)
    return list(found.values())


def rows_of(shape: Sequence[int], rank: int, n_ranks: int) -> int:
    """How many rows of a matrix a rank has, as ``fully_shard`` cuts."""
    size = -(-shape[0] // n_ranks)
    return max(0, min(size, shape[0] - rank * size))


def move(parameters: list[Tensor], steps: list[Tensor], shape: Sequence[int], group: dict[str, Any]) -> None:
    """Decay parameters, or parts of them, and step; ``shape`` is that of their whole matrices."""
    rows, columns = shape
    match_rms = group["adjust_lr_fn"] == "match_rms_adamw"
    scale = 0.2 * max(rows, columns) ** 0.5 if match_rms else max(1, rows / columns) ** 0.5
    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    if isinstance(group["lr"], Tensor):
        torch._foreach_add_(parameters, torch._foreach_mul(steps, -group["lr"] * scale))
    else:
        torch._foreach_add_(parameters, steps, alpha=-group["lr"] * scale)


def matrix_of(tensor: Tensor) -> Tensor:
    """The matrix, or the batch of them, that Muon orthogonalizes: more than three dimensions are ``[first, rest]``."""
    return tensor.flatten(1) if tensor.ndim > 3 else tensor


def orthogonal(stack: Float[Tensor, "batch r c"], group: dict[str, Any]) -> Float[Tensor, "batch r c"]:
    """The learner's ``newton_schulz``, or on a GPU in 16 bits the one with symmetric products."""
    settings: Sequence[Any] = [group[name] for name in ("ns_steps", "ns_coefficients", "eps", "ns_dtype")]
    if stack.is_cuda and group["ns_dtype"] in (torch.bfloat16, torch.float16):
        return newton_schulz_by_halves(stack, *settings)
    return newton_schulz(stack, *settings)
