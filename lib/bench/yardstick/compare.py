"""The yardstick: train vision transformers of four sizes on 1, 2, 4 or more GPUs,
ours beside timm under PyTorch's own DDP.

``python -m lib.bench.yardstick --ranks 1,2,4`` on a machine with that many GPUs writes
``chapters/measurements/yardstick.json`` after every cell: a model, a batch for each GPU and a number of GPUs.
Each cell runs in processes of its own, so that a failure costs no other cell;
both competitors train in the same processes, in turns.
Images are random numbers on the device.
``--compile-only`` first fills the compiler's cache, for all cells at once; ``--tiny`` tries the program on a CPU.
Recorded results of other cells stay, unless you give ``--fresh``.
To use several GPUs at once, run one program on each of them, each with a folder of its own.
``--join`` then merges their files, on any machine: name the folders of single GPUs first,
because scaling is computed from them, and last the folder whose machine the merged file is to name.

*ours* is chapter 5's model on the path of ``lib.fast.models``,
in parts with flat parameters (``lib.bench.yardstick.replicas``),
whose gradients copy engines average while backward runs (``lib.fast.copies``),
or with ``--averaging collectives`` chapter 10's ``OverlapDDP``; forward, backward,
averaging and update are one CUDA graph. *peer* is timm with autocast to bf16 and ``torch.compile``,
under ``DistributedDataParallel``.
G/14 is sharded: ours by chapter 12's ``FullySharded``, timm by ``fully_shard``, both compiled, neither in a graph.
All update by SGD with momentum.
Before the timing, the float32 gradient of ours, averaged over the ranks, is compared with timm's on the whole batch,
and so are the losses of the first steps.
"""

import argparse
import gc
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lib.bench.kit import machine, record, seconds_of, slowest, spawn, spread, wait_for
from lib.bench.ladder import N_IMAGES, PEAK_FLOPS, Rung, ViTTask, flops_per_item, set_tf32
from lib.bench.yardstick.replicas import RowViT, train_step
from lib.ddp import OverlapDDP
from lib.fast.copies import CopyDDP, InTurn
from lib.fast.models import ATTENTIONS, capture
from lib.fast.models import Path as FastPath
from lib.fsdp import FullySharded
from lib.given.data.record import MEASUREMENTS, load
from lib.given.models.vit import ViTConfig, preset
from lib.runs.flags import ProgramParser, positive, some_of, whole, wholes
from lib.vit import VisionTransformer

DTYPE, LR, MOMENTUM = torch.bfloat16, 1e-3, 0.9
N_WARMUP, MIN_ROUNDS, MAX_ROUNDS = 3, 3, 30
N_CHECKED = 2  # images a rank for the comparison of gradients
LIMITS = {"gradients": 1e-3, "bf16_gradients": 0.3, "losses": 1e-3, "tiny losses": 1e-2}
SMALL = ViTConfig(image_size=32, patch_size=8, n_classes=10, dim=64, n_layers=6, n_heads=2, hidden_dim=128)
AVERAGING: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copies": lambda parts: CopyDDP(parts, bucket_mb=0, sent=DTYPE),
    "collectives": OverlapDDP,
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A row of the table.

    Attributes:
        model: A preset of ``lib.given.models.vit``.
        batch: Images per GPU.
        n_gpus: Number of ranks.
        sharded: Whether parameters, gradients and momenta are sharded.
        n_blocks: Number of blocks in a part of our model.
        attention: Our model's attention, one of ``lib.fast.models.ATTENTIONS``.
        averaging: How several ranks average the gradients of ours, one of ``AVERAGING``;
            without effect where they are sharded.
    """

    model: str
    batch: int
    n_gpus: int = 1
    sharded: bool = False
    n_blocks: int = 4
    attention: str = "quickest"
    averaging: str = "copies"
    tiny: bool = False

    @property
    def config(self) -> ViTConfig:
        return SMALL if self.tiny else preset(self.model)

    def __str__(self) -> str:
        return f"{self.model}, {self.batch} a GPU, {self.n_gpus} GPU{'s' * (self.n_gpus > 1)}"


CELLS = (
    Cell(model="L/16", batch=256),
    Cell(model="L/16", batch=64),
    Cell(model="G/14", batch=64, sharded=True, n_blocks=2),
    Cell(model="G/14", batch=16, sharded=True, n_blocks=2),
    Cell(model="H/14", batch=128),
    Cell(model="g/14", batch=64),
)


# ---- the competitors -------------------------------------------------------------------------------------------------


class Racer:
    """A model under its strategy, with its optimizer, ready to take steps.

    Args:
        name: "ours" or "peer".
        model: The model, which is called on images.
        loss_of: Computes the loss of a step.
        optimizer: The optimizer of the model's parameters.
        finish: Completes the gradients after backward.
        gradients: Returns the gradients after a step, under our parameters' names; None where no rank has them whole.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        loss_of: Callable[[], Tensor],
        optimizer: torch.optim.Optimizer | InTurn,
        finish: Callable[[], None] = lambda: None,
        gradients: Callable[[], dict[str, Tensor]] | None = None,
    ):
        self.name, self.model, self.loss_of, self.optimizer, self.finish = name, model, loss_of, optimizer, finish
        self.gradients = gradients
        self.first_gradients: dict[str, Tensor] = {}
        self.step = train_step(loss_of, optimizer, finish)
        self.how, self.problem, self.peak_bytes = "plain", "", 0
        self.losses: list[float] = []
        self.times: list[float] = []

    def warm_up(self, device: torch.device, others_bytes: int) -> None:
        """Take the first steps, which compile; keep their losses, the first one's gradients and the later peak."""
        start = time.perf_counter()
        for i in range(N_WARMUP):
            if i == 1 and self.gradients is not None and dist.get_rank() == 0:
                self.first_gradients = {name: grad.cpu() for name, grad in self.gradients().items()}
            if i == 1 and device.type == "cuda":
                gc.collect()
                torch.cuda.reset_peak_memory_stats()
            self.losses.append(self.step().item())
        wait_for(device)
        self.first_steps_s = time.perf_counter() - start
        if device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated() - others_bytes + getattr(self.model, "peers_bytes", 0)

    def record_graph(self) -> None:
        """Record the step as one CUDA graph; if that fails, take it as it is, and keep the error."""
        try:
            step = capture(self.step, 2, on_ranks=True)
            step()
            torch.cuda.synchronize()
        except RuntimeError as error:
            self.problem = f"graph: {str(error)[:300]}"
            print(f"{self.name}, graph: {error}", flush=True)
        else:
            self.step, self.how = step, "graph"

    def row_of_steps(self, n: int, device: torch.device) -> float:
        """Seconds of one step on the slowest rank, the mean of several in a row."""
        return seconds_of(self.step, device, n, on_ranks=True)


def compiled(run: Callable) -> Callable:
    """Compile with PyTorch; on a CPU, where only a trial runs, without the compiler's slow stages."""
    return torch.compile(run, dynamic=False, backend="inductor" if torch.cuda.is_available() else "eager")


def sgd(parameters: Iterable[nn.Parameter], fused: bool = True) -> torch.optim.Optimizer:
    parameters = list(parameters)
    fused = fused and parameters[0].is_cuda
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, fused=fused, foreach=not fused)


def our_parts(cell: Cell, state: dict[str, Tensor], path: FastPath, make: Callable = compiled) -> RowViT:
    """Chapter 5's model with the given weights, copied into rows of its own."""
    with torch.device("meta"):
        model = VisionTransformer(cell.config)
    model.load_state_dict(state, assign=True)
    return RowViT(model, path, cell.n_blocks, make)


def path_of(cell: Cell) -> FastPath:
    """The path on which our model is timed."""
    return FastPath(dtype=DTYPE, kernels=True, attention=cell.attention)


def make_ours(cell: Cell, state: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Racer:
    parts = our_parts(cell, state, path_of(cell))
    model: nn.Module = parts
    if cell.sharded:
        model = FullySharded(parts, param_dtype=DTYPE)
    elif cell.n_gpus > 1:
        model = AVERAGING[cell.averaging](parts)
    gradients = None if cell.sharded else parts.named_gradients
    if isinstance(model, CopyDDP):
        return Racer("ours", model, lambda: model(*batch), InTurn(model, sgd), gradients=gradients)
    finish = getattr(model, "finish_gradient_synchronization", lambda: None)
    return Racer("ours", model, lambda: model(*batch), sgd(model.parameters()), finish, gradients)


def make_peer(
    cell: Cell, peer: nn.Module, batch: tuple[Tensor, Tensor], distributed: bool, task: ViTTask | None = None
) -> Racer:
    """timm's model, wrapped and compiled as its users do.

    With ``fully_shard`` SGD runs in a few kernels, because there is no fused SGD for its parameters.
    """
    images, labels = batch
    if cell.sharded:
        policy = MixedPrecisionPolicy(param_dtype=DTYPE)
        for block in peer.blocks:  # type: ignore[union-attr]
            block.compile(dynamic=False, backend="inductor" if images.is_cuda else "eager")
            fully_shard(block, mp_policy=policy)
        fully_shard(peer, mp_policy=policy)
        optimizer = sgd(peer.parameters(), fused=False)
        return Racer("peer", peer, lambda: F.cross_entropy(peer(images).float(), labels), optimizer)
    model: nn.Module = peer
    if distributed:
        ids = [images.device.index] if images.is_cuda else None
        model = DistributedDataParallel(peer, device_ids=ids, gradient_as_bucket_view=True)

    def loss_of() -> Tensor:
        with torch.autocast(images.device.type, DTYPE):
            logits = fast(images)
        return F.cross_entropy(logits.float(), labels)

    fast: Any = compiled(model)
    gradients = None if task is None else lambda: gradients_of(peer, task)
    return Racer("peer", model, loss_of, sgd(model.parameters()), gradients=gradients)


# ---- checks before the clock -----------------------------------------------------------------------------------------


def relative(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Distance of ``got`` from ``want``, each taken as one vector, relative to the length of ``want``."""
    wrong = sum((got[name].double() - want[name].double()).square().sum().item() for name in want)
    return math.sqrt(wrong / sum(tensor.double().square().sum().item() for tensor in want.values()))


def gradients_of(peer: nn.Module, task: ViTTask) -> dict[str, Tensor]:
    """The peer's gradients under our names, for the parameters that our model has."""
    names = task.from_peer(peer)
    grads = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    return {name: grad for name, grad in _converted(task, grads).items() if name in names}


def check_first_gradients(cell: Cell, racers: list[Racer], device: torch.device) -> list[Any] | None:
    """The parameter whose compiled gradients in the first step are furthest apart, and how far;
    None where none are kept.

    Raises:
        ValueError: they are further apart than bf16 explains.
    """
    ours, peer = (racer.first_gradients for racer in racers)
    apart = {}
    for name in peer:
        one, other = (grads[name].to(device) for grads in (ours, peer))
        size = peer[name.replace("wk.bias", "wq.bias")].norm().item()  # a key's bias has a gradient of about 0
        apart[name] = (one - other).norm().item() / size
    for racer in racers:
        racer.first_gradients = {}
    furthest = max(apart, key=apart.__getitem__, default="")
    worst = slowest(apart.get(furthest, 0.0), device)  # rank 0's value, on all ranks
    if not worst <= LIMITS["bf16_gradients"]:
        raise ValueError(
            f"{cell}: the compiled gradient of {furthest} is {worst:.2e} off, allowed {LIMITS['bf16_gradients']}"
        )
    return [furthest, worst] if apart else None


def check_gradients(cell: Cell, task: ViTTask, peer: nn.Module, state: dict[str, Tensor]) -> float:
    """Relative error of our gradients against the peer's, in float32.

    Each rank computes ours on its share of a batch, and they are averaged over ranks; the peer's are computed on the
    whole batch in one process.

    Raises:
        ValueError: they are further apart than rounding explains.
    """
    set_tf32(False)
    torch.manual_seed(1)
    images, labels = task.batch(N_CHECKED * cell.n_gpus)
    F.cross_entropy(peer(images), labels).backward()
    want = {name: grad.clone() for name, grad in gradients_of(peer, task).items()}
    peer.zero_grad(set_to_none=True)
    parts = our_parts(cell, state, FastPath(), lambda run: run)
    model = OverlapDDP(parts)
    model(*(x.chunk(cell.n_gpus)[dist.get_rank()] for x in (images, labels))).backward()
    model.finish_gradient_synchronization()
    apart = slowest(relative(parts.named_gradients(), want), images.device)
    set_tf32(True)
    if not apart <= LIMITS["gradients"]:
        raise ValueError(f"{cell}: gradients are {apart:.2e} apart in float32, allowed {LIMITS['gradients']}")
    return apart


def check_losses(cell: Cell, racers: list[Racer], device: torch.device) -> dict[str, Any]:
    """The first losses, averaged over ranks: before the first update, after it, and after the next.

    Raises:
        ValueError: the losses of the two competitors are further apart than bf16 explains.
    """
    losses = torch.tensor([racer.losses for racer in racers], dtype=torch.float64, device=device) / cell.n_gpus
    dist.all_reduce(losses)
    apart = ((losses[0] - losses[-1]).abs() / losses[-1]).max().item()
    limit = LIMITS["tiny losses" if cell.tiny else "losses"]
    if not apart <= limit:
        raise ValueError(f"{cell}: first losses {losses.tolist()} are {apart:.2e} apart, allowed {limit}")
    return {racer.name: row for racer, row in zip(racers, losses.tolist(), strict=True)} | {"apart": apart}


# ---- one cell --------------------------------------------------------------------------------------------------------


class PlainTask(ViTTask):
    """For a trial without timm: chapter 5's model as it is written takes the place of timm's."""

    def peer(self, rung):
        return VisionTransformer(self.config)

    def from_peer(self, peer):
        return dict(peer.state_dict())


def _converted(task: ViTTask, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that have the peer's names, under our names."""
    if isinstance(task, PlainTask):
        return tensors
    from lib.vit import convert_timm_state_dict

    return convert_timm_state_dict(tensors, task.config)


def make_task(cell: Cell, device: torch.device) -> tuple[ViTTask, str]:
    """The task, which builds the peer, and the peer's name."""
    try:
        name = f"timm {version('timm')}"
    except PackageNotFoundError:
        if not cell.tiny:
            raise
        return PlainTask("vit", cell.config, str(device), "none"), "chapter 5's model, for want of timm"
    return ViTTask("vit", cell.config, str(device), "timm"), name


def race(racers: list[Racer], seconds: float, device: torch.device) -> None:
    """Time rows of steps in turns, in both orders, until the time is up; all ranks decide alike."""
    start = time.perf_counter()
    longest = max(racer.row_of_steps(2, device) for racer in racers)
    n_steps = max(1, min(10, int(0.6 / longest)))
    for turn in range(MAX_ROUNDS):
        if turn >= MIN_ROUNDS and slowest(time.perf_counter() - start, device) > seconds:
            return
        for racer in racers if turn % 2 == 0 else racers[::-1]:
            racer.times.append(racer.row_of_steps(n_steps, device))


def facts_of(racer: Racer, cell: Cell, flops: float, device: torch.device) -> dict[str, Any]:
    """The file's entry for a competitor."""
    peak = slowest(float(racer.peak_bytes), device)
    step = spread(racer.times)
    rate = cell.batch * cell.n_gpus / step["median"]
    found: dict[str, Any] = {"step_s": step, "images_per_s": rate, "hours_per_epoch": N_IMAGES / rate / 3600}
    found |= {"mfu": rate * flops / (cell.n_gpus * PEAK_FLOPS), "peak_bytes": peak, "how": racer.how}
    found |= {"first_steps_s": racer.first_steps_s, "step_values_s": racer.times}
    return found | ({"problem": racer.problem} if racer.problem else {})


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def measure_cell(rank: int, device: torch.device, cell: Cell, options: argparse.Namespace) -> None:
    """Build, check, warm up and time both competitors on this rank; rank 0 records the results."""
    racers: list[Racer] = []
    try:
        found = measure(rank, device, cell, options, racers)
        if rank == 0:
            write(found, options)
        dist.barrier()
        wait_for(device)
        if device.type == "cuda":  # the results are written, so compiler, graphs and NCCL need no orderly shutdown
            sys.stdout.flush()
            os._exit(0)
    finally:  # NCCL destroys a communicator only when the graphs that use it are gone
        wait_for(device)
        for racer in racers:
            del racer.step
        racers.clear()
        gc.collect()


def measure(
    rank: int, device: torch.device, cell: Cell, options: argparse.Namespace, racers: list[Racer]
) -> dict[str, Any]:
    """Measure a cell; returns its entry in the file. The competitors go into ``racers``."""
    set_tf32(True)
    task, peer_name = make_task(cell, device)
    peer = task.build("peer", Rung(name=""), None)
    found: dict[str, Any] = _described(cell, task, peer_name)
    state = task.from_peer(peer)
    if not cell.sharded:
        found["checks"]["gradients_apart"] = check_gradients(cell, task, peer, state)
    torch.manual_seed(2 + rank)
    batch = task.batch(cell.batch)
    gc.collect()
    own, before = sum(p.nbytes for p in peer.parameters()), allocated(device)
    racers.append(make_ours(cell, state, batch))
    del state
    racers[0].warm_up(device, before)
    before = allocated(device) - own
    racers.append(make_peer(cell, peer, batch, cell.n_gpus > 1, task))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    racers[1].warm_up(device, before)
    found["checks"]["losses"] = check_losses(cell, racers, device)
    found["checks"]["bf16_gradients"] = check_first_gradients(cell, racers, device)
    if device.type == "cuda" and not cell.sharded and options.step != "plain":
        racers[0].record_graph()
    race(racers, options.seconds, device)
    return found | {"competitors": {r.name: facts_of(r, cell, found["flops_per_item"], device) for r in racers}}


def _described(cell: Cell, task: ViTTask, peer_name: str) -> dict[str, Any]:
    """The description of a cell, before anything is measured."""
    with torch.device("meta"):
        n_parameters = sum(p.numel() for p in VisionTransformer(cell.config).parameters())
    m = machine()
    found = {"model": cell.model, "batch": cell.batch, "n_gpus": cell.n_gpus, "peer": peer_name}
    found |= {
        "strategy": "sharded" if cell.sharded else "data parallel",
        "n_blocks": cell.n_blocks,
        "attention": cell.attention,
        "averaging": cell.averaging,
    }
    found |= {"n_parameters": n_parameters, "flops_per_item": flops_per_item(task), "checks": {}}
    on = m.get("accelerators", [m["cpu"]])[0]
    return found | {"on": on, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "versions": m["versions"]}


def write(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Put a cell in its place in the file, with its scaling if the file has the same work on one GPU of this kind."""
    results = load(options.name, options.folder)["results"]
    place = itemgetter("model", "batch", "n_gpus")
    cells = [found, *(cell for cell in results["cells"] if place(cell) != place(found))]
    places = [c.model for c in CELLS]
    results["cells"] = sorted(cells, key=lambda c: (places.index(c["model"]), -c["batch"], c["n_gpus"]))
    for cell in results["cells"]:
        for who, facts in cell.get("competitors", {}).items():
            facts["scaling"] = scaling(cell, who, results["cells"])
    record(options.name, results, options.folder, options.measured)
    for who, facts in found.get("competitors", {}).items():
        share = f"{facts['scaling']:.1%}" if facts["scaling"] else "-"
        print(
            f"{found['model']} {found['batch']:4d} x {found['n_gpus']} {who:5s} "
            f"{facts['images_per_s']:8.0f}/s  MFU {facts['mfu']:6.1%}"
            f"  {facts['hours_per_epoch']:.5f} h  scaling {share}  {facts['peak_bytes'] / 1e9:5.1f} GB  {facts['how']}"
            f"  (first steps {facts['first_steps_s']:.0f} s)",
            flush=True,
        )


def scaling(cell: dict[str, Any], who: str, cells: list[dict[str, Any]]) -> float | None:
    """Speed per GPU as a share of a single GPU's with the same batch per GPU; None if that was not measured."""
    for one in cells:
        same = all(one[k] == cell[k] for k in ("model", "batch", "on")) and one["n_gpus"] == 1
        if same and cell["n_gpus"] > 1 and who in one.get("competitors", {}):
            alone = one["competitors"][who]["images_per_s"]
            return cell["competitors"][who]["images_per_s"] / (cell["n_gpus"] * alone)
    return None


# ---- compiling ahead -------------------------------------------------------------------------------------------------


def compile_cell(rank: int, device: torch.device, cell: Cell, who: str) -> None:
    """Compile one competitor of a cell in a first step; if that step runs out of memory, it does not matter."""
    import torch._functorch.config as functorch

    set_tf32(True)
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = True
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.1)
    task, _ = make_task(cell, device)
    peer, batch = task.build("peer", Rung(name=""), None), task.batch(cell.batch)
    try:
        if who == "ours":
            compile_parts(our_parts(cell, task.from_peer(peer), path_of(cell)), *batch)
        else:
            make_peer(cell, peer, batch, distributed=who == "peer under DDP").step()
        wait_for(device)
    except torch.OutOfMemoryError:
        print(f"{cell}, {who}: compiled, but a step ran out of memory", flush=True)


def compile_parts(parts: RowViT, images: Tensor, labels: Tensor) -> None:
    """Take a step of the first part, of one of the equal parts, and of the last part, each alone."""
    x = parts.parts[0](images)
    x.sum().backward()
    for part, more in ((parts.parts[1], ()), (parts.parts[-1], (labels,))):
        x = x.detach().requires_grad_()
        part(x, *more).sum().backward()


def compile_ahead(cells: list[Cell], options: argparse.Namespace) -> None:
    """Compile each model, batch and competitor in a process of its own, all at once, spread over the GPUs."""
    wanted: dict[tuple[Cell, str], None] = {}
    for cell in (c for c in cells if not c.sharded):  # sharded models are compiled block by block, which is quick
        peers = ["peer" if cell.n_gpus == 1 else "peer under DDP"] if options.compile_only == "all" else []
        for who in ("ours", *peers):
            wanted[replace(cell, n_gpus=1), who] = None
    everything = ",".join(map(str, range(torch.cuda.device_count())))
    started, gpus = [], (os.environ.get("CUDA_VISIBLE_DEVICES") or everything).split(",")
    for i, (cell, who) in enumerate(wanted):
        command = [sys.executable, "-m", "lib.bench.yardstick", "--compile-one", who, "--models", cell.model]
        command += ["--batch", str(cell.batch), "--attention", cell.attention, *(["--tiny"] if options.tiny else [])]
        threads = str(max(1, (os.cpu_count() or 1) // len(wanted)))
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)], "TORCHINDUCTOR_COMPILE_THREADS": threads}
        started.append((f"{cell}, {who}", subprocess.Popen(command, env=env)))
    start = time.perf_counter()
    print({name: process.wait() for name, process in started}, f"{time.perf_counter() - start:.0f} s", flush=True)


# ---- the command line ------------------------------------------------------------------------------------------------


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """The cells that the command line asks for; a sharded model needs at least two ranks."""
    models = options.models.split(",") if options.models else [c.model for c in CELLS]
    chosen = [c for c in CELLS if c.model in models and options.batch in (None, c.batch)]
    cells: list[Cell] = []
    for n in map(int, options.ranks.split(",")):
        cells += [replace(c, n_gpus=n) for c in chosen if n > 1 or not c.sharded]
    if options.tiny:
        cells = [replace(c, batch=max(2, c.batch // 32), n_blocks=1 + c.sharded, tiny=True) for c in cells]
    cells = [replace(c, attention=options.attention, averaging=options.averaging) for c in cells]
    return [replace(c, n_blocks=options.blocks) if options.blocks else c for c in cells]


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that all cells share."""
    found: dict[str, Any] = {"n_images": N_IMAGES, "peak_flops": PEAK_FLOPS, "dtype": "bfloat16", "tiny": options.tiny}
    found |= {"optimizer": f"SGD, momentum {MOMENTUM}", "means": "float32, those of sharded models bf16"}
    return found | {"images": "random, on the device", "n_warmup": N_WARMUP, "limits": LIMITS}


def main() -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=wholes, default="1,2,4")
    parser.add_argument("--models", type=some_of(*{c.model: 0 for c in CELLS}), help="default: all")
    parser.add_argument("--batch", type=whole(1), help="only cells with this many images on each GPU (before --tiny)")
    parser.add_argument(
        "--blocks", type=whole(0), default=0, help="blocks in each part of ours, instead of the cell's number"
    )
    parser.add_argument("--attention", choices=ATTENTIONS, default="quickest", help="attention kernel of ours")
    quickest = "copies" if torch.cuda.is_available() else "collectives"
    parser.add_argument("--averaging", choices=AVERAGING, default=quickest, help="how ranks average our gradients")
    parser.add_argument("--step", choices=["graph", "plain"], default="graph", help="whether our step is a CUDA graph")
    parser.add_argument("--seconds", type=positive, default=10, help="seconds to time each cell")
    parser.add_argument("--budget", type=positive, default=500, help="start no further cell after this many seconds")
    parser.add_argument("--limit", type=positive, default=240, help="stop a cell after this many seconds")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the program")
    parser.add_argument("--fresh", action="store_true", help="discard earlier results")
    parser.add_argument("--join", type=Path, nargs="+", help="measure nothing; merge the cells of these folders' files")
    parser.add_argument(
        "--compile-only",
        nargs="?",
        const="all",
        choices=["all", "ours"],
        help="fill the compiler's cache, measure nothing",
    )
    parser.add_argument("--compile-one", choices=["ours", "peer", "peer under DDP"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.name = "yardstick_tiny" if options.tiny else "yardstick"
    cells, start = cells_of(options), time.monotonic()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if options.compile_one:
        for cell in cells[:1]:
            spawn(compile_cell, backend, 1, replace(cell, n_gpus=1), options.compile_one)
        return
    if options.compile_only:
        compile_ahead(cells, options)
        return
    kept: list[dict[str, Any]] = []
    if not options.fresh and (options.folder / f"{options.name}.json").exists():
        kept = load(options.name, options.folder)["results"]["cells"]
    options.measured = load(options.name, options.join[-1]) if options.join else None
    settings = options.measured["results"]["settings"] if options.join else settings_of(options)
    record(options.name, {"settings": settings, "cells": kept}, options.folder, options.measured)
    for folder in options.join or ():
        for found in load(options.name, folder)["results"]["cells"]:
            write(found, options)
    for cell in [] if options.join else cells:
        run_cell(cell, backend, start, options)


def in_file(cell: Cell, options: argparse.Namespace) -> dict[str, Any] | None:
    """The file's entry for a cell; None if there is none."""
    found = load(options.name, options.folder)["results"]["cells"]
    key = [cell.model, cell.batch, cell.n_gpus]
    return next((c for c in found if [c["model"], c["batch"], c["n_gpus"]] == key), None)


def run_cell(cell: Cell, backend: str, start: float, options: argparse.Namespace) -> None:
    """Run one cell in processes of its own; if it fails, the file records the failure."""
    if backend == "nccl" and torch.cuda.device_count() < cell.n_gpus:
        print(f"{cell}: skipped, because there are only {torch.cuda.device_count()} GPUs", flush=True)
        return
    if time.monotonic() - start > options.budget:
        print(f"{cell}: skipped, because time is up", flush=True)
        return
    began, before = time.monotonic(), in_file(cell, options)
    try:
        spawn(measure_cell, backend, cell.n_gpus, cell, options, limit_s=options.limit)
    except Exception as error:
        print(f"{cell}: {error}", flush=True)
        if in_file(cell, options) != before:  # it was measured, and failed at its end
            return
        lines = str(error).strip().splitlines() or [type(error).__name__]
        write(_described(cell, *make_task(cell, torch.device("cpu"))) | {"error": lines[-1][:300]}, options)
    print(f"[{time.monotonic() - start:5.0f} s] {cell}: {time.monotonic() - began:.0f} s", flush=True)
