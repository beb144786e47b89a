"""The ladder of speed: train GPT-2 or ViT-L/16, one optimization at a time,
beside a library's model in the same process.

Run ``python -m lib.bench.ladder --model gpt2`` (or ``--model vit``; some minutes on a GPU) on any device;
``--tiny`` uses a small model, for a laptop.
It writes ``chapters/measurements/ladder_gpt2.json`` (or ``ladder_vit.json``) after every rung.
``--compile-only`` compiles for all rungs at once, in processes of their own, so that the measured run need not.

Three models are timed: *ours* is the book's model on the paths of ``lib.fast.models``;
*plain* is the same model as chapters 5 and 6 leave it; *peer* is Transformers' GPT-2 or timm's ViT.
They start from the same weights, which is checked before the timing.
"""

import argparse
import dataclasses
import gc
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lib.bench.kit import device_seconds, record, seconds_of, spread, wait_for
from lib.fast.models import Path, capture, gpt2_loss, vit_loss
from lib.given.data.record import MEASUREMENTS, load
from lib.given.models.gpt2 import GPT2_SMALL, GPT2Config
from lib.given.models.gpus import SHEETS
from lib.given.models.vit import VIT_L_16, ViTConfig
from lib.runs.flags import ProgramParser, positive, whole

PEAK_FLOPS = SHEETS["H200"].peak_flops
"""Peak of an H100 or H200 in dense bf16, by the datasheet. On every rung MFU is a share of this."""
N_IMAGES = 50_000
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One rung of the ladder: the settings that all models on it share."""

    name: str
    precision: str = "float32"
    compiled: bool = False
    attention: str = "written out"
    padded: bool = False
    fused_optimizer: bool = False
    n_micro: int = 1
    top: bool = False  # ours has a CUDA graph of the whole step and the kernel for the loss; its peer stays as it was
    kernels: bool = False  # ours has the kernels of ``lib.fast`` for attention and inside of the blocks
    stream: str = ""  # dtype of the residual stream of ours; "" means the precision
    batch: int = 0
    who: tuple[str, ...] = ("ours", "peer", "plain")

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]


def gpt2_rungs() -> list[Rung]:
    """The rungs of GPT-2; each adds one thing to the one before."""
    rungs = [Rung(name="float32"), Rung(name="TF32", precision="tf32"), Rung(name="bf16", precision="bf16")]
    both = ("ours", "peer")
    for name, change in (
        ("compile", {"compiled": True}),
        ("fused attention", {"attention": "fused", "who": both}),
        ("padded vocabulary", {"padded": True}),
        ("fused optimizer", {"fused_optimizer": True}),
        ("accumulation", {"n_micro": 4}),
        ("top", {"n_micro": 1, "top": True}),
        ("top with a float32 stream", {"stream": "float32", "who": ("ours",)}),
        ("top with our kernels", {"stream": "", "kernels": True, "who": both}),
    ):
        rungs.append(replace(rungs[-1], name=name, **change))
    return [*(replace(rung, batch=16) for rung in rungs), replace(rungs[-1], batch=64, who=("ours",))]


def vit_rungs(batch: int) -> list[Rung]:
    """The rungs of the ViT: timm's attention is fused from the start, so ours is too."""
    who = ("ours", "peer", "plain") if batch <= 64 else ("ours", "peer")  # at 256 the plain scores do not fit
    first = Rung(name="float32", attention="fused", batch=batch, who=who)
    tf32 = replace(first, name="TF32", precision="tf32")
    bf16, half = replace(first, name="bf16", precision="bf16"), replace(first, name="float16", precision="float16")
    compiled = replace(bf16, name="compile", compiled=True, fused_optimizer=True, who=("ours", "peer"))
    top = replace(compiled, name="top", top=True)
    wide = replace(top, name="top with a float32 stream", stream="float32", who=("ours",))
    other = replace(top, name="top with flash attention", attention="flash", who=("ours",))
    return [first, tf32, bf16, half, compiled, top, *([wide, other] if batch > 64 else [])]


# ---- the models ------------------------------------------------------------------------------------------------------


@dataclass
class Task:
    """What is trained: the configurations, the loss of each model, and the batches."""

    name: str
    config: Any
    device: str
    peer_name: str

    def build(self, who: str, rung: Rung, state: dict[str, Tensor] | None) -> nn.Module:
        """A model in training mode, with the given weights of ours if they fit."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = self.peer(rung) if who == "peer" else self.ours(rung)
        model = model.to(self.device)  # torch.normal ignores the default device
        if state is not None and who != "peer":
            model.load_state_dict(state)
        return model.train()

    def ours(self, rung: Rung) -> nn.Module:
        raise NotImplementedError

    def peer(self, rung: Rung) -> nn.Module:
        raise NotImplementedError

    def loss(self, who: str, rung: Rung, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss as a function of inputs and targets, with the precision of the rung."""
        stream = DTYPES[rung.stream] if rung.stream else None
        attention = "quickest" if rung.kernels else rung.attention
        path = Path(dtype=rung.dtype, stream=stream, attention=attention, loss_kernel=rung.top, kernels=rung.kernels)
        mixed = torch.autocast(self.device, rung.dtype, enabled=rung.dtype != torch.float32, cache_enabled=False)

        def ours(inputs: Tensor, targets: Tensor) -> Tensor:
            return self.fast(model, inputs, targets, path)

        def others(inputs: Tensor, targets: Tensor) -> Tensor:
            with mixed:
                logits = self.plain_logits(model, inputs) if who == "plain" else self.peer_logits(model, inputs)
            return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

        return ours if who == "ours" else others

    def fast(self, model: nn.Module, inputs: Tensor, targets: Tensor, path: Path) -> Tensor:
        raise NotImplementedError

    def plain_logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def peer_logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def from_peer(self, peer: nn.Module) -> dict[str, Tensor]:
        """The peer's weights under our names."""
        raise NotImplementedError

    def batch(self, n: int) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""
        raise NotImplementedError

    def items(self, n: int) -> int:
        """Number of items in a batch of n."""
        raise NotImplementedError


class GPT2Task(Task):
    """Next tokens: an item is a token."""

    def ours(self, rung):
        from lib.gpt2 import GPT2, pad_vocab

        padded = pad_vocab(self.config.vocab_size) if rung.padded else None
        return GPT2(replace(self.config, padded_vocab_size=padded))

    def peer(self, rung):
        from transformers import GPT2Config as PeerConfig
        from transformers import GPT2LMHeadModel

        from lib.gpt2 import pad_vocab

        c = self.config
        rows = pad_vocab(c.vocab_size) if rung.padded else c.vocab_size
        config = PeerConfig(
            vocab_size=rows, n_positions=c.context_len, n_embd=c.dim, n_layer=c.n_layers, n_head=c.n_heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        config._attn_implementation = "eager" if rung.attention == "written out" else "sdpa"
        return GPT2LMHeadModel(config)

    def from_peer(self, peer: nn.Module) -> dict[str, Tensor]:
        from lib.gpt2 import convert_hf_state_dict

        return convert_hf_state_dict(peer.state_dict())

    def fast(self, model, inputs, targets, path):
        return gpt2_loss(model, inputs, targets, path)

    def plain_logits(self, model, inputs):
        return model(inputs)[0]

    def peer_logits(self, model, inputs):
        return model(inputs, use_cache=False).logits

    def batch(self, n):
        tokens = torch.randint(self.config.vocab_size, (n, self.config.context_len + 1), device=self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def items(self, n):
        return n * self.config.context_len


class ViTTask(Task):
    """Classes of images: an item is an image."""

    def ours(self, rung):
        from lib.vit import VisionTransformer

        return VisionTransformer(self.config)

    def peer(self, rung):
        from timm.models.vision_transformer import VisionTransformer as PeerViT

        c = self.config
        return PeerViT(
            img_size=c.image_size, patch_size=c.patch_size, in_chans=c.channels, num_classes=c.n_classes,
            embed_dim=c.dim, depth=c.n_layers, num_heads=c.n_heads, mlp_ratio=c.hidden_dim / c.dim,
        )  # fmt: skip

    def from_peer(self, peer: nn.Module) -> dict[str, Tensor]:
        from lib.vit import convert_timm_state_dict

        return convert_timm_state_dict(peer.state_dict(), self.config)

    def fast(self, model, inputs, targets, path):
        return vit_loss(model, inputs, targets, path)

    def plain_logits(self, model, inputs):
        return model(inputs)

    def peer_logits(self, model, inputs):
        return model(inputs)

    def batch(self, n):
        side = self.config.image_size
        images = torch.randn(n, self.config.channels, side, side, device=self.device)
        return images, torch.randint(self.config.n_classes, (n,), device=self.device)

    def items(self, n):
        return n


def make_task(model: str, device: str, tiny: bool) -> Task:
    """The task of the command line."""
    if model == "gpt2":
        small = GPT2Config(vocab_size=500, context_len=64, dim=64, n_layers=2, n_heads=2)
        return GPT2Task("gpt2", small if tiny else GPT2_SMALL, device, "transformers")
    little = ViTConfig(image_size=32, patch_size=8, n_classes=10, dim=64, n_layers=2, n_heads=2, hidden_dim=128)
    return ViTTask("vit", little if tiny else VIT_L_16, device, "timm")


def set_tf32(on: bool) -> None:
    """Switch TF32 on or off for float32 products."""
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on


def flops_per_item(task: Task) -> float:
    """FLOPs per item of the products in forward and backward of the model as written, as PyTorch counts them."""
    meta = make_task(task.name, "meta", False)
    meta.config = task.config
    model = meta.build("plain", Rung(name=""), None)
    inputs, targets = (x.to("meta") for x in replace_device(task).batch(1))
    with FlopCounterMode(display=False) as counter:
        logits = meta.plain_logits(model, inputs)
        F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
    return counter.get_total_flops() / task.items(1)


def replace_device(task: Task) -> Task:
    """The same task on the CPU."""
    return type(task)(task.name, task.config, "cpu", task.peer_name)


# ---- one step --------------------------------------------------------------------------------------------------------


class Climber:
    """A model on a rung: its training step, ready to be called."""

    def __init__(self, task: Task, who: str, rung: Rung, state: dict[str, Tensor] | None):
        self.task, self.who, self.rung = task, who, rung
        self.model = task.build(who, rung, state)
        self.graphed = rung.top and who == "ours" and task.device == "cuda"
        fused = rung.fused_optimizer and task.device == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=fused, capturable=self.graphed
        )
        self.scaler = torch.amp.GradScaler(task.device, enabled=rung.precision == "float16")
        loss = task.loss(who, rung, self.model)
        self.loss = torch.compile(loss, dynamic=False) if rung.compiled else loss
        self.micro = [task.batch(rung.batch) for _ in range(rung.n_micro)]
        self.n_items = rung.n_micro * task.items(rung.batch)
        self.step = self.train_step

    def train_step(self) -> Tensor:
        """Forward and backward of every micro-batch, then the optimizer; nothing waits for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.task.device)
        for inputs, targets in self.micro:
            loss = self.loss(inputs, targets) / len(self.micro)
            self.scaler.scale(loss).backward()
            total = total + loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total

    def warm_up(self) -> float:
        """Compile, choose kernels and record the graph; returns the seconds that this took."""
        start = time.perf_counter()
        set_tf32(self.rung.precision != "float32")
        if self.graphed:
            self.step = capture(self.train_step)
        for _ in range(2):
            self.step()
        wait_for(self.task.device)
        return time.perf_counter() - start

    def seconds(self, n_steps: int) -> float:
        """Seconds of one step, the mean of several in a row."""
        set_tf32(self.rung.precision != "float32")
        return seconds_of(self.step, self.task.device, n_steps)


def race(climbers: list[Climber], seconds: float, min_rounds: int = 3, n_in_row: int = 4) -> dict[str, dict]:
    """Time climbers in turn, round by round, so that a change of the GPU's speed affects all of them."""
    rounds: list[list[float]] = []
    start = time.perf_counter()
    first = [climber.seconds(1) for climber in climbers]
    n_steps = max(1, min(n_in_row, int(0.3 / max(first))))
    while len(rounds) < min_rounds or (time.perf_counter() - start < seconds and len(rounds) < 40):
        rounds.append([climber.seconds(n_steps) for climber in climbers])
    return {
        climber.who: spread(list(times)) for climber, times in zip(climbers, zip(*rounds, strict=True), strict=True)
    }


# ---- checks before the clock -----------------------------------------------------------------------------------------


def gradients(task: Task, who: str, rung: Rung, state: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple:
    """Loss and gradients of one batch, float32, under the names of our parameters."""
    model = task.build(who, rung, state)
    loss = task.loss(who, rung, model)(*batch)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def check(task: Task, state: dict[str, Tensor], padded_state: dict[str, Tensor]) -> dict[str, Any]:
    """Errors of our paths against the model as written in float32: of the loss, and of all gradients as one vector.

    Raises:
        ValueError: an error is larger than the precision explains.
    """
    set_tf32(False)
    torch.manual_seed(1)
    batch, found = task.batch(2), {}
    want_loss, want = gradients(task, "plain", Rung(name="plain"), state, batch)
    cases = [
        ("float32", "written out", False, False),
        ("float32", "fused", True, False),
        ("float32", "fused", True, True),
    ]
    cases += [("bf16", "written out", False, False), ("bf16", "fused", True, False), ("bf16", "fused", True, True)]
    for precision, attention, padded, top in cases:
        rung = Rung(name="", precision=precision, attention=attention, padded=padded, top=top)
        loss, got = gradients(task, "ours", rung, padded_state if padded else state, batch)
        got = {name: grad[: len(want[name])] for name, grad in got.items()}  # padding rows have no counterpart
        wrong = math.sqrt(sum((got[n].double() - want[n].double()).square().sum().item() for n in want))
        size = math.sqrt(sum(want[n].double().square().sum().item() for n in want))
        errors = {"loss": abs(loss - want_loss) / want_loss, "gradients": wrong / size}
        found[f"{precision}, {attention}{', padded' if padded else ''}{', loss kernel' if top else ''}"] = errors
        limits = (1e-4, 1e-3) if precision == "float32" else (1e-2, 5e-2)
        if not (errors["loss"] <= limits[0] and errors["gradients"] <= limits[1]):
            raise ValueError(f"{task.name}, {precision}, {attention}: relative errors {errors}, allowed {limits}")
    return found


def compiled_apart(climber: Climber, n_at_once: int = 16, limit: float = 0.3) -> float:
    """Relative error of the compiled gradients of a whole batch against those without a compiler.

    The latter are computed on pieces of the batch, and both have the rung's precision. An error of the compiler may
    depend on the number of rows, so a check of a small batch would prove nothing.

    Raises:
        ValueError: the error of one parameter is larger than rounding explains.
    """
    inputs, targets = climber.micro[0]
    found: list[dict[str, Tensor]] = []
    plain = climber.task.loss(climber.who, climber.rung, climber.model)
    set_tf32(climber.rung.precision != "float32")
    for loss_of, rows in ((climber.loss, len(inputs)), (plain, n_at_once)):
        climber.model.zero_grad(set_to_none=True)
        for some, wanted in zip(inputs.split(rows), targets.split(rows), strict=True):
            (loss_of(some, wanted) * len(some) / len(inputs)).backward()
        found.append({n: p.grad.double().cpu() for n, p in climber.model.named_parameters() if p.grad is not None})
    climber.model.zero_grad(set_to_none=True)
    got, want = found
    size = math.sqrt(sum(grad.square().sum().item() for grad in want.values()))
    wrong = {n: (got[n] - want[n]).norm().item() for n in want}
    for n, distance in wrong.items():  # one by one: the error of a norm would vanish among all others
        own = want[n.replace("wk.bias", "wq.bias")].norm().item()  # a key's bias has a gradient of 0, up to rounding
        if not distance <= max(limit * own, 1e-4 * size):
            what = f"{climber.who}, rung {climber.rung.name}: the compiled gradient of {n}"
            raise ValueError(f"{what} is {distance:.2e} off, of {want[n].norm().item():.2e}")
    return math.sqrt(sum(distance**2 for distance in wrong.values())) / size


# ---- what limits the top ---------------------------------------------------------------------------------------------

FUSED = ("powers_kernel", "gelu_kernel", "slope_kernel")  # products of this book, with what follows them
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "compute_dot_do_o", "convert_dq", "fast_forward", "fast_dq", "dkdv"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "gemv", *FUSED),
    "optimizer": ("multi_tensor", "adam"),
    "softmax over the vocabulary and loss": ("log_softmax", "nll_loss", "softmax_loss", "own_logits", "finish_kernel"),
    "copies and fills": ("memcpy", "memset"),
}
OTHERS = "norms, GELU, sums and casts"


def kind_of(kernel: str) -> str:
    """Which part of the step a kernel belongs to, by its name."""
    for kind, parts in KINDS.items():
        if any(part in kernel.lower() for part in parts):
            return kind
    return OTHERS


def kernel_times(step: Callable[[], Any], n_steps: int = 3) -> dict[str, Any]:
    """Seconds a step in each kind of kernel, and the kernels that take most."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(n_steps):
            step()
        torch.cuda.synchronize()
    kinds: dict[str, float] = {}
    rows = []
    for event in trace.key_averages():
        seconds = event.device_time_total * 1e-6 / n_steps
        if seconds > 0:
            kinds[kind_of(event.key)] = kinds.get(kind_of(event.key), 0.0) + seconds
            rows.append({"kernel": event.key[:120], "s": seconds, "calls": event.count / n_steps})
    rows.sort(key=lambda row: -row["s"])
    return {"kinds_s": kinds, "kernels": rows[:30]}


def events_seconds(run: Callable[[], Any], n_repeats: int = 10) -> dict[str, float]:
    """Seconds of one call on the device, by its own clock."""
    return spread([device_seconds(run, "cuda") for _ in range(n_repeats + 3)][3:])


def ceilings() -> dict[str, Any]:
    """The GPU's ceilings: the speed of a bf16 product of 8192 cubed on random data, and of a copy of 4 GB."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = events_seconds(lambda: a @ b)
    x = torch.randn(2**30, device="cuda")
    y = torch.empty_like(x)
    copy = events_seconds(lambda: y.copy_(x))
    return {
        "product_s": product,
        "product_flops_per_s": 2 * n**3 / product["median"],
        "copy_s": copy,
        "copy_bytes_per_s": 2 * x.nbytes / copy["median"],
    }


def product_shapes(task: Task, batch: int) -> dict[str, tuple[int, int, int, int]]:
    """The products of one forward: rows, width in, width out, count; backward has two of the same FLOPs for each."""
    c = task.config
    if isinstance(c, GPT2Config):
        n, rows = c.n_layers, batch * c.context_len
        head = 128 * math.ceil(c.vocab_size / 128)
        widths = {"c_attn": (c.dim, 3 * c.dim, n), "attn.c_proj": (c.dim, c.dim, n), "c_fc": (c.dim, 4 * c.dim, n)}
        widths |= {"mlp.c_proj": (4 * c.dim, c.dim, n), "head": (c.dim, head, 1)}
        return {name: (rows, *shape) for name, shape in widths.items()}
    n, rows = c.n_layers, batch * (c.n_patches + 1)
    shapes = {"patches": (batch * c.n_patches, c.patch_dim, c.dim, 1), "qkv": (rows, c.dim, 3 * c.dim, n - 1)}
    shapes |= {"kv of the last": (rows, c.dim, 2 * c.dim, 1), "wo": (rows, c.dim, c.dim, n - 1)}
    return shapes | {"fc1": (rows, c.dim, c.hidden_dim, n - 1), "fc2": (rows, c.hidden_dim, c.dim, n - 1)}


def products_alone(task: Task, batch: int) -> dict[str, Any]:
    """Time each product of a step by itself: forward, and the gradients of the input and of the weight."""
    found: dict[str, Any] = {"rows": {}, "flops": 0.0, "s": 0.0}
    for name, (m, k, n, count) in product_shapes(task, batch).items():
        x, w, dy = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (n, k), (m, n)))
        runs = (lambda: x @ w.T, lambda: dy @ w, lambda: dy.T @ x)  # noqa: B023
        seconds = [events_seconds(run, 5)["median"] for run in runs]
        found["rows"][name] = {"shape": [m, k, n], "count": count, "s": seconds}
        found["flops"] += 6.0 * m * k * n * count
        found["s"] += sum(seconds) * count
    return found


# ---- the climb -------------------------------------------------------------------------------------------------------


def climb(task: Task, rung: Rung, states: dict[bool, dict[str, Tensor]], seconds: float) -> dict[str, Any]:
    """Measure one rung: build its models, warm them up, and time them in turns."""
    climbers = [Climber(task, who, rung, states.get(rung.padded)) for who in rung.who]
    apart = {climber.who: compiled_apart(climber) for climber in climbers if rung.compiled}
    compile_s = {climber.who: climber.warm_up() for climber in climbers}
    times = race(climbers, seconds)
    row: dict[str, Any] = {"rung": dataclasses.asdict(rung), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    row |= {"first_steps_s": compile_s, "step_s": times}
    row["items_per_s"] = {climber.who: climber.n_items / times[climber.who]["median"] for climber in climbers}
    if apart:
        row["compiled_gradients_apart"] = apart
    if rung.top and task.device == "cuda":
        row["kernels"] = {climber.who: kernel_times(climber.step) for climber in climbers}
    return row


def start_states(task: Task) -> dict[bool, dict[str, Tensor]]:
    """The weights that all begin with: the peer's, under our names, without and with padding rows."""
    peer = task.build("peer", Rung(name=""), None)
    state = {name: tensor.clone() for name, tensor in task.from_peer(peer).items()}
    if task.name != "gpt2":
        return {False: state, True: state}
    padded = task.build("ours", Rung(name="", padded=True), None).state_dict()
    padded["wte.weight"][: len(state["wte.weight"])] = state["wte.weight"]
    return {False: state, True: {**state, "wte.weight": padded["wte.weight"].clone()}}


def rungs_of(args: argparse.Namespace) -> list[Rung]:
    """The rungs that the command line asks for."""
    if args.model == "gpt2":
        rungs = gpt2_rungs()
    else:
        rungs = [rung for batch in args.batch or (256, 64) for rung in vit_rungs(batch)]
    if args.tiny:
        rungs = [replace(rung, batch=2) for rung in rungs]
    return [rung for rung in rungs if not args.rung or rung.name in args.rung]


def compile_all(args: argparse.Namespace) -> None:
    """Fill the compiler's cache, with a process for each rung and each model on it that is compiled."""
    commands = []
    for rung in rungs_of(args):
        compiling = rung.compiled and rung.n_micro == 1
        for who in [who for who in rung.who if compiling and not (rung.top and who == "peer" and not rung.kernels)]:
            command = [sys.executable, "-m", "lib.bench.ladder", "--model", args.model, "--rung", rung.name]
            command += ["--who", who, "--batch", str(rung.batch), *(["--tiny"] if args.tiny else [])]
            commands.append(subprocess.Popen(command))
    print([command.wait() for command in commands])


def compile_one(args: argparse.Namespace, task: Task) -> None:
    """Compile one model on one rung and take a step; if memory runs out in the step, that does not matter."""
    rung = next(rung for rung in rungs_of(args) if rung.batch == args.batch[0] or args.tiny)
    set_tf32(True)
    if task.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.06)  # others compile beside this one
    try:
        Climber(task, args.who, rung, None).train_step()
        wait_for(task.device)
    except torch.OutOfMemoryError:
        print(f"{rung.name}, {args.who}: compiled, but the step ran out of memory")


def run(args: argparse.Namespace, task: Task) -> None:
    """Check, then climb rung by rung; what is measured is written at once."""
    name = f"ladder_{task.name}" + ("_tiny" if args.tiny else "")
    begin = time.perf_counter()
    states = start_states(task)
    results: dict[str, Any] = {
        "config": dataclasses.asdict(task.config),
        "peer": f"{task.peer_name} {version(task.peer_name)}",
        "flops_per_item": flops_per_item(task),
        "peak_flops": PEAK_FLOPS,
        "errors": check(task, *states.values()),
        "rungs": [],
    }
    if task.device == "cuda":
        results["ceilings"] = ceilings()
        results["products_alone"] = products_alone(task, rungs_of(args)[0].batch)
    if args.keep and (MEASUREMENTS / f"{name}.json").exists():
        kept = load(name)
        results["rungs"] = [{"date": kept["date"], **row} for row in kept["results"]["rungs"]]
    for rung in rungs_of(args):
        try:
            row = climb(task, rung, states, args.seconds)
        except torch.OutOfMemoryError as error:
            row = {"rung": dataclasses.asdict(rung), "error": str(error)[:200]}
        gc.collect()
        torch.compiler.reset()
        if task.device == "cuda":
            torch.cuda.empty_cache()
        results["rungs"] = placed(results["rungs"], row)
        report(task, results, row, time.perf_counter() - begin)
        record(name, results)


def placed(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Put ``row`` in the place of the first row with its rung and batch, or at the end; drop other rows with them."""

    def key(r: dict[str, Any]) -> tuple[str, int]:
        return r["rung"]["name"], r["rung"]["batch"]

    keys = [key(r) for r in rows]
    place = keys.index(key(row)) if key(row) in keys else len(rows)
    before, after = ([r for r in part if key(r) != key(row)] for part in (rows[:place], rows[place:]))
    return [*before, row, *after]


def report(task: Task, results: dict[str, Any], row: dict[str, Any], elapsed_s: float) -> None:
    """Print a line for each model of the rung."""
    for who, rate in row.get("items_per_s", {}).items():
        share = rate * results["flops_per_item"] / PEAK_FLOPS
        hours = f", {N_IMAGES / rate / 3600:.4f} h/epoch" if task.name == "vit" else ""
        first = row["first_steps_s"][who]
        print(
            f"[{elapsed_s:5.0f} s] {row['rung']['name']:18s} batch {row['rung']['batch']:4d} {who:6s} {rate:12,.0f}/s"
            f" MFU {share:6.1%}{hours}  (first steps {first:.0f} s)",
            flush=True,
        )
    if "error" in row:
        print(row["rung"]["name"], row["error"], flush=True)


def main() -> None:
    parser = ProgramParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("gpt2", "vit"), default="gpt2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a small model, for a laptop")
    parser.add_argument("--seconds", type=positive, default=4.0, help="seconds to time each rung")
    parser.add_argument("--batch", type=whole(1), action="append", help="batch of the ViT; may be given several times")
    parser.add_argument("--rung", action="append", help="only rungs with this name; may be given several times")
    parser.add_argument("--who", choices=("ours", "peer", "plain"), help="compile this one on one rung, and stop")
    parser.add_argument("--compile-only", action="store_true", help="fill the compiler's cache, and stop")
    parser.add_argument("--keep", action="store_true", help="keep the recorded results of other rungs")
    args = parser.parse_args()
    if args.compile_only:
        return compile_all(args)
    known = dict.fromkeys(rung.name for rung in rungs_of(argparse.Namespace(**vars(args) | {"rung": None})))
    if unknown := [name for name in args.rung or () if name not in known]:
        parser.error(f"--rung {', '.join(unknown)}: expected some of {', '.join(known)}")
    task = make_task(args.model, args.device, args.tiny)
    return compile_one(args, task) if args.who else run(args, task)


if __name__ == "__main__":
    main()
