"""``--optimizer muon``: chapter 25's Muon for the matrices of the blocks and AdamW for all other parameters, on any
mesh of ranks.

Where each rank has whole matrices, ``Muon`` steps on them.
Where ``fully_shard`` has cut them by rows, ``ShardedMuon`` does.
On a GPU both do so in stacks (``lib.fast.parts.muon``), and copies of a model divide each stack among them.
Flat shards, and layers that ranks divide, have no whole rows: there the ranks of a stage assemble each direction,
each of them orthogonalizes it, and each keeps its own part.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lib.fast.parts.muon import StackedMuon, StackedShardedMuon
from lib.optimizers import Muon, ShardedMuon, newton_schulz
from lib.runs.engine.options import Options

MOMENTUM, STEPS, COEFFICIENTS, EPS = 0.95, 5, (3.4445, -4.7750, 2.0315), 1e-7
MEAN = "exp_avg"
"""Checkpoints hold Muon's momentum under the name of AdamW's mean: a flat shard mixes the parameters of both."""


class MuonAndAdamW(Optimizer):
    """Both optimizers as one, whose state and groups a checkpoint can hold.

    Args:
        options: Of the run; ``muon_lr`` is the largest rate of the matrices, and ``lr`` that of the other parameters.
        strategy: The divided model.
        device: Where it computes. Newton-Schulz runs in bfloat16 on a GPU, and in float32 on a CPU.
        make_adamw: Makes an AdamW of parameter groups.
    """

    def __init__(self, options: Options, strategy: Any, device: torch.device, make_adamw: Callable[..., Optimizer]):
        # a loaded count of steps is then where AdamW's kernels read it
        where = {"capturable": options.graph, "fused": device.type == "cuda"}
        lr = torch.tensor(options.lr, device=device) if options.graph else options.lr
        super().__init__(strategy.groups(), {"lr": lr, "weight_decay": 0.0, **where})
        self.strategy, self.decay = strategy, options.weight_decay
        self.ratio = options.muon_lr / options.lr if options.lr and options.muon_lr is not None else 1.0
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.names = {p: name for name, p in strategy.named().items()}
        self.whole, self.rows, self.gathered, self.others = [], [], [], []  # type: ignore[var-annotated]
        for p, name in self.names.items():
            matrices = [member for member in strategy.members(name) if member in strategy.matrices]
            (self._home(p) if matrices else self.others).append(p)
        self._make_muons(options, device)
        self.pieces = self._pieces()
        self.adamw = make_adamw(self._adamw_groups())
        self.register_load_state_dict_post_hook(lambda _: self._count_on_device())

    def _make_muons(self, options: Options, device: torch.device) -> None:
        """The optimizers of whole matrices and of rows: ``muon``, and ``sharded`` of ``local_rows``."""
        settings: dict[str, Any] = {"momentum": MOMENTUM, "adjust_lr_fn": "match_rms_adamw", "ns_dtype": self.dtype}
        self.local_rows = [nn.Parameter(p.to_local()) for p in self.rows]
        self.muon: Optimizer | None = None
        self.sharded: Optimizer | None = None
        stacks = device.type == "cuda"
        if self.whole and stacks:
            ranks = self.strategy.mesh.group("copies") if options.is_parallel else None
            self.muon = StackedMuon(self.whole, ranks=ranks, **settings)
        elif self.whole:
            self.muon = Muon(self.whole, **settings)
        if self.rows:
            make, group = StackedShardedMuon if stacks else ShardedMuon, _row_group(self.rows[0])
            self.sharded = make(self.local_rows, [p.shape for p in self.rows], group=group, **settings)

    def _count_on_device(self) -> None:
        """Put loaded counts of steps, integers of chapter 7's AdamW, where PyTorch's AdamW keeps them."""
        for p, kept in self.state.items():
            if "step" in kept and isinstance(self.adamw, torch.optim.AdamW):
                kept["step"] = torch.as_tensor(kept["step"], dtype=torch.float32, device=p.device)

    def _home(self, p: Tensor) -> list[Any]:
        """The list of the way in which a parameter with matrices is trained."""
        if not self.strategy.is_divided:
            return self.whole
        cut = [place for place in p.placements if isinstance(place, Shard)] if isinstance(p, DTensor) else []
        by_rows = (
            p.ndim == 2 and len(cut) == 1 and cut[0].dim == 0 and not self.strategy.options.uses("tensor", "expert")
        )
        return self.rows if by_rows else self.gathered

    def _pieces(self) -> dict[Tensor, list[tuple[Tensor, slice, bool]]]:
        """For each flat shard, the parts of it that AdamW trains.

        Each is a parameter on the same memory, its place, and whether it decays.
        """
        found: dict[Tensor, list[tuple[Tensor, slice, bool]]] = {}
        for p in [p for p in (*self.gathered, *self.others) if self._is_flat(p)]:
            for member, part in self.strategy.parts(self.names[p]).items():
                if member not in self.strategy.matrices:
                    piece = nn.Parameter(p.detach()[part])
                    found.setdefault(p, []).append((piece, part, member in self.strategy.decays))
        return found

    def _adamw_groups(self) -> list[dict[str, Any]]:
        """What AdamW trains, with and without decay, and apart by mesh: a fused step takes no mixture."""
        pairs = [(p, self.names[p] in self.strategy.decays) for p in self.others if not self._is_flat(p)]
        pairs += [(piece, decays) for parts in self.pieces.values() for piece, _, decays in parts]
        groups: dict[tuple[bool, int], list[Tensor]] = {}
        for p, decays in pairs:
            n_axes = p.device_mesh.ndim if isinstance(p, DTensor) else 0
            groups.setdefault((decays, n_axes), []).append(p)
        return [{"params": groups[key], "weight_decay": self.decay * key[0]} for key in sorted(groups, reverse=True)]

    def _is_flat(self, p: Tensor) -> bool:
        """Whether it is a row of several parameters, or of parts of them."""
        return self.strategy.members(self.names[p]) != [self.names[p]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both; each group's rate is AdamW's, and Muon's is ``ratio`` times as large.

        A CUDA graph reads the rate from a tensor.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        lr = self.param_groups[0]["lr"]
        self._muon_step(self.muon, dict(zip(self.whole, self.whole, strict=True)), lr)
        for local, p in zip(self.local_rows, self.rows, strict=True):
            local.grad = None if p.grad is None else p.grad.to_local()
        self._muon_step(self.sharded, dict(zip(self.local_rows, self.rows, strict=True)), lr)
        for p in self.gathered:
            if p.grad is not None:
                self._gathered_step(p, lr * self.ratio)
        self._adamw_step(lr)
        return loss

    def _muon_step(self, muon: Optimizer | None, owner: dict[Tensor, Tensor], lr: float | Tensor) -> None:
        """A step of ``Muon`` or ``ShardedMuon``, whose momentum this optimizer's state holds."""
        if muon is None:
            return
        muon.param_groups[0].update(lr=lr * self.ratio, weight_decay=self.decay)
        muon.state.clear()
        for local, p in owner.items():
            if MEAN in self.state[p]:
                muon.state[local]["momentum_buffer"] = _local(self.state[p][MEAN])
        muon.step()
        for local, p in owner.items():
            if local in muon.state and MEAN not in self.state[p]:
                self.state[p][MEAN] = _like(p, muon.state[local]["momentum_buffer"])

    def _gathered_step(self, p: Tensor, lr: float) -> None:
        """Muon on the matrices of a parameter that the ranks of a stage assemble."""
        name, mine, gradient = self.names[p], _local(p), _local(p.grad)  # type: ignore[arg-type]
        mean = _local(self.state[p].setdefault(MEAN, _like(p, torch.zeros_like(mine))))
        direction, matrices = torch.zeros_like(mine), self.strategy.matrices
        parts = {member: part for member, part in self.strategy.parts(name).items() if member in matrices}
        for part in parts.values():
            mean[part].lerp_(gradient[part], 1 - MOMENTUM)
            direction[part] = gradient[part].lerp(mean[part], MOMENTUM)
        whole = self.strategy.whole(name, _like(p, direction))
        steps = {member: self._orthogonal(u) if member in matrices else u for member, u in whole.items()}
        own = self.strategy.take(name, steps)
        for part in parts.values():
            mine[part].mul_(1 - lr * self.decay).add_(own[part], alpha=-lr)

    def _orthogonal(self, u: Tensor) -> Tensor:
        """The direction of a matrix or a batch of them, times the scale that makes it about as long as AdamW's."""
        matrix = u.flatten(1) if u.ndim > 3 else u
        o = newton_schulz(matrix, STEPS, COEFFICIENTS, EPS, self.dtype).to(u.dtype).reshape(u.shape)
        return o * (0.2 * math.sqrt(max(matrix.shape[-2:])))

    def _adamw_step(self, lr: float | Tensor) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.state = self.state
        for p, pieces in self.pieces.items():
            kept = self.state[p]
            for name in (MEAN, "exp_avg_sq"):
                kept.setdefault(name, torch.zeros_like(p))
            kept.setdefault("step", 0)
            for piece, part, _ in pieces:
                piece.grad = None if p.grad is None else p.grad[part]
                self.state[piece] = {
                    "step": kept["step"],
                    MEAN: kept[MEAN][part],
                    "exp_avg_sq": kept["exp_avg_sq"][part],
                }
        self.adamw.step()
        for p, pieces in self.pieces.items():
            self.state[p]["step"] += p.grad is not None
            for piece, _, _ in pieces:
                del self.state[piece]


def _row_group(p: Tensor) -> Any:
    """The ranks among which a DTensor's rows are divided."""
    axis = next(i for i, place in enumerate(p.placements) if isinstance(place, Shard))  # type: ignore[attr-defined]
    return p.device_mesh.get_group(axis)  # type: ignore[attr-defined]


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(p: Tensor, mine: Tensor) -> Tensor:
    """This rank's part as a tensor of the same kind as the parameter, on the same memory."""
    if not isinstance(p, DTensor):
        return mine
    return DTensor.from_local(mine, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
