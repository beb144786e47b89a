"""How the ranks are arranged: a degree for each kind of parallelism, and the mesh that they span.

The degrees are checked against the number of ranks and the sizes of the model.
"""

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lib.runs.engine.options import KINDS, STRATEGIES, Options
from lib.runs.flags import UsageError

DATA = ("replicate", "shard", "expert")
"""Kinds of parallelism whose ranks divide a batch."""


def arrange(options: Options, n_ranks: int) -> Options:
    """The options with a number for every degree; their product is the number of ranks.

    Raises:
        UsageError: the product differs from the number of ranks; the message shows it.
    """
    degrees: dict[str, Any]
    if options.strategy is not None:
        kind = STRATEGIES[options.strategy]
        if kind is None and n_ranks > 1:
            names = ", ".join(name for name, kind in STRATEGIES.items() if kind)
            raise UsageError(
                f"--strategy single runs on 1 rank, but {n_ranks} were started: expected one of {names}, "
                f"or degrees such as --shard {n_ranks}"
            )
        degrees = {name: n_ranks if name == kind else 1 for name in KINDS}
        return replace(options, **degrees)
    given = {name: getattr(options, name) or 1 for name in KINDS}
    known = math.prod(n for n in given.values() if n != -1)
    degrees = {name: n_ranks // known if n == -1 else n for name, n in given.items()}
    if math.prod(degrees.values()) == n_ranks:
        return replace(options, **degrees)
    shown = " x ".join(f"--{name} {n}" for name, n in given.items() if n != 1)
    started = f"but {n_ranks} {'were' if n_ranks > 1 else 'was'} started"
    if -1 in given.values():
        raise UsageError(f"{shown} needs a multiple of {known} ranks, {started}: {_division(n_ranks, known)}")
    raise UsageError(
        f"{shown or '--replicate 1'} is {known} ranks, {started}: expected degrees whose product is {n_ranks}"
    )


def _division(n: int, parts: int) -> str:
    return f"{n} = {n // parts} x {parts} + {n % parts}"


def check_degrees(options: Options, sizes: dict[str, dict[str, int]]) -> None:
    """Check that the degrees can divide the model.

    Args:
        options: With a number for every degree.
        sizes: A task's ``sizes``.

    Raises:
        UsageError: a degree cannot divide the model; the message names the size.
    """
    for kind in ("expert", "tensor", "context", "pipeline"):
        n = getattr(options, kind)
        if n == 1:
            continue
        if kind not in sizes:
            raise UsageError(f"{options.named(kind)}: {sizes['why'][kind]}; expected --{kind} 1")
        for name, size in sizes[kind].items():
            if kind == "pipeline" and size < n:
                raise UsageError(
                    f"--model {options.model} has {name} = {size}, "
                    f"too few for {options.named(kind)} with {n} stages: expected at most {size} stages"
                )
            parts = 2 * n if kind == "context" else n  # zigzag gives every rank two chunks
            if kind != "pipeline" and size % parts:
                what = f"{n} ranks with two chunks each" if kind == "context" else f"{n} ranks"
                raise UsageError(
                    f"--model {options.model} has {name} = {size}, "
                    f"which {options.named(kind)} cannot divide among {what}: "
                    f"{_division(size, parts)}; expected a degree that divides it"
                )
    if options.pipeline and options.pipeline > options.accumulate and not options.ours:
        raise UsageError(
            f"{options.named('pipeline')} --engine torch with --accumulate {options.accumulate}: "
            "PyTorch's 1F1B needs as many micro-batches "
            f"as stages; expected --accumulate {options.pipeline} or more"
        )
    if options.uses("expert") and not options.ours:
        raise UsageError(
            f"{options.named('expert')} --engine torch: PyTorch has no module that spreads experts over "
            "ranks; expected --engine ours"
        )


class Mesh:
    """The ranks as one ``DeviceMesh`` whose axes are the kinds of parallelism, and this rank's place in it.

    Ranks that hold the same parameters and train on different tokens differ along ``replicate``,
    ``context`` or ``expert``: together they are the copies, over which gradients are averaged.
    Along ``expert`` the experts themselves differ; their copies are fewer.

    Args:
        options: With a number for every degree.
            One process alone needs no process group; it is a mesh of one rank without axes.
        device: Device of this rank.

    Attributes:
        size, rank: Number of ranks along each axis, and this rank's place there.
            "copies" and "expert_copies" have a size too.
        devices: PyTorch's mesh.
        stage_size, stage_rank: Number of ranks of a stage, and this rank's place among them.
    """

    def __init__(self, options: Options, device: torch.device):
        self.size = {kind: getattr(options, kind) for kind in KINDS}
        self.rank = dict.fromkeys(KINDS, 0)
        self.size["expert_copies"] = self.size["replicate"] * self.size["context"]
        self.size["copies"] = self.size["expert_copies"] * self.size["expert"]
        self.stage_size, self.stage_rank = math.prod(self.size[kind] for kind in KINDS[1:]), 0
        if options.is_parallel:
            self._join(device)

    def _join(self, device: torch.device) -> None:
        self.devices = init_device_mesh(device.type, tuple(self.size[kind] for kind in KINDS), mesh_dim_names=KINDS)
        self.rank = {kind: self.devices.get_local_rank(kind) for kind in KINDS}
        self.stage_rank = dist.get_rank() % self.stage_size  # the pipeline is the outermost axis
        copies = self.devices["replicate", "context"]._flatten("expert_copies")
        self._copies = {"expert_copies": copies, "copies": copies}
        if self.size["expert"] > 1:
            self._copies["copies"] = self.devices["replicate", "context", "expert"]._flatten("copies")

    def group(self, kind: str) -> dist.ProcessGroup:
        """The ranks along one axis, or ``"copies"``, or ``"expert_copies"``."""
        return (self._copies.get(kind) or self.devices[kind]).get_group()

    def along(self, kind: str) -> dict[str, Any]:
        """``{"group": ...}`` for a function that takes all ranks by default; empty where the axis has all ranks."""
        return {} if self.size[kind] == self.devices.size() else {"group": self.group(kind)}

    def copies_by_shard(self) -> DeviceMesh:
        """The two axes that ``fully_shard`` takes for hybrid sharding."""
        if self.size["context"] == 1:
            return self.devices["replicate", "shard"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a flattened axis beside others has no other public form
            return self.devices["expert_copies", "shard"]
