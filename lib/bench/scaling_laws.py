"""The run that ends the book: sweep small GPT-2s, fit a law, predict GPT-2 124M, then train it and compare.

python -m lib.runs.corpus my_corpus
python -m lib.bench.scaling_laws look sweep predict run --data my_corpus

``look`` shows how long the documents are. ``sweep`` trains six sizes, each to five lengths, on all GPUs there are.
``positions`` trains one size again and measures how much the context helps it. ``predict`` fits chapter 22's law to the
longest runs of the sweep, and records a prediction of GPT-2 124M's loss before that model is trained. ``run`` trains it
with ``lib.runs.train_gpt2`` in two legs, of which the second resumes the first. It also trains Transformers' GPT-2 with
PyTorch's own optimizer for the same number of seconds, on a second GPU at the same time or else afterwards. Everything
is recorded in ``chapters/measurements/scaling_laws.json``. ``--tiny`` tries the program on a CPU.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.bench.kit import machine, record
from lib.given.data.record import MEASUREMENTS, load
from lib.given.models.gpt2 import GPT2_SMALL
from lib.given.models.gpus import GPUS
from lib.runs.engine.state import gather_model
from lib.runs.flags import ProgramParser, positive, whole, width_and_layers
from lib.scaling_laws import bootstrap, fit_power_law, wsd_schedule

SIZES = ((128, 4), (192, 6), (256, 8), (384, 8), (512, 9), (640, 10))
"""Width and blocks of the models of the sweep."""
BATCH, LENGTH, WARMUP = 32, 1024, 100
STEPS = (400, 800, 1600, 2400, 3200)
"""Lengths of the sweep's runs, which are decays that branch off one run. The predicted run has the last length."""
GPU_OF = (0, 1, 0, 1, 1, 1)
"""The GPU of each size if there are two, from the widest size on, so that both have about as much to do."""
TINY_SIZES, TINY_STEPS = ((64, 1), (128, 1), (192, 1)), (8, 10, 12)
PROMPT = "The function returns"
N_BOOTSTRAP = 100


def learning_rate(dim: int) -> float:
    """The highest rate of a model: it falls with the width, as that of hidden weights under muP,
    and is 0.001 at GPT-2's 768.
    """
    return min(4e-3, 0.768 / dim)


def n_weights(dim: int, n_layers: int) -> int:
    """Parameters of the blocks' matrices, 12 L C^2: the N of the law.

    Embeddings, a large part of small models, are left out.
    """
    return 12 * n_layers * dim**2


def flags(o: argparse.Namespace, dim: int, n_layers: int, steps: int) -> list[str]:
    """Flags of ``lib.runs.train_gpt2`` that all runs share."""
    same = {
        "model": "tiny" if o.tiny else "small", "data": o.data, "dim": dim, "n-layers": n_layers, "steps": steps,
        "length": 64 if o.tiny else LENGTH, "batch": 4 if o.tiny else BATCH, "lr": f"{learning_rate(dim):.6g}",
        "schedule": "wsd",
        "warmup": 2 if o.tiny else WARMUP, "weight-decay": 0.1, "eval-every": 10**9, "optimizer": "adamw",
    }  # fmt: skip
    fast = [] if o.tiny else ["--precision", "bf16", "--compile", "--graph"]
    return [*(f"--{name}={value}" for name, value in same.items()), *fast, *(["--device=cpu"] if o.tiny else [])]


# ---- the sweep -------------------------------------------------------------------------------------------------------


def train_size(
    o: argparse.Namespace,
    dim: int,
    n_layers: int,
    ends: tuple[int, ...],
    more: Callable[[Any], dict[str, Any]] = lambda run: {},
) -> list[dict[str, Any]]:
    """Train a GPT-2 to each of these lengths; returns a point for each, with the entries that ``more`` returns."""
    from lib.runs.engine.request import parse
    from lib.runs.engine.tasks import GPT2Task
    from lib.runs.train_gpt2 import make_gpt2_parser

    options = parse(make_gpt2_parser(), flags(o, dim, n_layers, ends[-1]))
    return [
        {"dim": dim, "n_layers": n_layers, "n_weights": n_weights(dim, n_layers), **point}
        for point in train_branches(options, GPT2Task, ends, more)
    ]


def train_branches(
    options: Any, task: Any, ends: tuple[int, ...], more: Callable[[Any], dict[str, Any]] = lambda run: {}
) -> list[dict[str, Any]]:
    """Train one run at a constant rate, from which a decay branches off for each length.

    Returns:
        For each length the scores, with the entries that ``more`` returns.
    """
    from lib.runs.engine.evaluation import evaluate
    from lib.runs.engine.options import DECAYED
    from lib.runs.engine.start import prepare

    run = prepare(options, task)
    if run.options.graph:
        run.record_graph()
    points, done, start = [], 0, time.perf_counter()

    def train(first: int, last: int, begin: int, end: int) -> None:
        for step in range(first, last):
            rate = wsd_schedule(step, run.options.lr, run.options.warmup, begin, end)
            for group in run.optimizer.param_groups:
                group["lr"].fill_(rate) if torch.is_tensor(group["lr"]) else group.update(lr=rate)
            run.step(*run.batch())

    for end in ends:
        begin = end - end // DECAYED
        train(done, begin, begin, end)
        done, restore = begin, snapshot(run)
        train(begin, end, begin, end)
        points.append(
            {
                "steps": end, f"{run.task.unit}s": end * run.options.batch * run.task.per_row, **evaluate(run),
                "seconds_so_far": time.perf_counter() - start, **more(run),
            }
        )  # fmt: skip
        print(points[-1], flush=True)
        restore()
    return points


def snapshot(run: Any) -> Callable[[], None]:
    """A function that brings weights, optimizer and the place in the data back to what they are now."""
    tensors = [*run.parameters, *(v for s in run.optimizer.state.values() for v in s.values() if torch.is_tensor(v))]
    before, place = [tensor.detach().clone() for tensor in tensors], run.numbers.state_dict()

    def restore() -> None:
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
        run.numbers.load_state_dict(place)

    return restore


def sweep(o: argparse.Namespace) -> dict[str, Any]:
    """All sizes at once, each in a process of its own; several share a GPU, since nothing is timed here."""
    sizes, n_gpus = sorted(TINY_SIZES if o.tiny else SIZES, reverse=True), max(1, torch.cuda.device_count())

    def train(number: int) -> list[dict[str, Any]]:
        dim, n_layers = sizes[number]
        with tempfile.TemporaryDirectory() as folder:
            command = [*_this(o, "size"), f"--size={dim}x{n_layers}", f"--folder={folder}"]
            subprocess.run(command, env=_on(o, GPU_OF[number] % n_gpus), check=True)
            return json.loads(Path(folder, "size.json").read_text())

    with ThreadPoolExecutor(1 if o.tiny else len(sizes)) as threads:
        points = [point for found in threads.map(train, range(len(sizes))) for point in found]
    return {"batch": BATCH, "length": LENGTH, "points": sorted(points, key=lambda p: (p["n_weights"], p["tokens"]))}


def _this(o: argparse.Namespace, part: str) -> list[str]:
    """The command of one part of this program."""
    return [sys.executable, "-m", "lib.bench.scaling_laws", part, f"--data={o.data}", *(["--tiny"] if o.tiny else [])]


def _on(o: argparse.Namespace, gpu: int) -> dict[str, str]:
    """The environment of a process that sees only this GPU."""
    return {**os.environ} if o.tiny else {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}


@torch.no_grad()
def loss_by_position(run: Any) -> dict[str, list[float]]:
    """The held-out loss at each place in the window, in 16 equal parts:
    a model that uses its context is better at the end.
    """
    source, length, model = run.task.source, run.task.per_row, run.task.new_model()
    model.load_state_dict(gather_model(run.strategy, run.device))
    model.to(run.device)
    total, rows = torch.zeros(length, device=run.device), range(source.n, source.n + source.n_held_out, 4)
    for row in rows:
        inputs, targets = run.fetch(torch.arange(row, row + 4))
        with torch.autocast(run.device.type, torch.bfloat16):
            logits = run.task.plain_logits(model, inputs)
        total += torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").mean(0)
    return {"loss_by_position": (total / len(rows)).view(16, -1).mean(1).tolist()}


def positions(o: argparse.Namespace) -> dict[str, Any]:
    """The loss by position for one size, at a length before the drop in the sweep's losses and at one after it."""
    (dim, n_layers), ends = (TINY_SIZES[0], TINY_STEPS[:2]) if o.tiny else (SIZES[3], STEPS[1:3])
    return {"points": train_size(o, dim, n_layers, ends, loss_by_position)}


# ---- the prediction --------------------------------------------------------------------------------------------------


def predict(o: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """GPT-2 124M's held-out loss from the runs that are as long as its own, so that only the size is extrapolated;
    with its 90 % interval.

    A run that ends above a shorter one of the same size has diverged, and is left out.
    """
    swept = found["sweep"]["points"]
    least = {size: min(p["held_out_loss"] for p in swept if p["dim"] == size) for size in {p["dim"] for p in swept}}
    longest = [p for p in swept if p["steps"] == o.steps]
    used = [p for p in longest if p["held_out_loss"] == least[p["dim"]]]
    points = np.array([[p["n_weights"], p["held_out_loss"]] for p in used])
    n = n_weights(GPT2_SMALL.dim, GPT2_SMALL.n_layers)

    def fit(x: Any, y: Any) -> dict[str, float]:
        law = fit_power_law(x, y)
        return asdict(law) | {"held_out_loss": float(law(n))}

    law = fit_power_law(*points.T)
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"), "law": asdict(law),
        "intervals_90": bootstrap(fit, points, 4 if o.tiny else N_BOOTSTRAP, seed=0),
        "largest_relative_error_of_fit": float(np.abs(law(points[:, 0]) / points[:, 1] - 1).max()),
        "diverged": [p["dim"] for p in longest if p not in used],
        "n_weights": n, "tokens": o.steps * BATCH * LENGTH, "steps": o.steps, "held_out_loss": float(law(n)),
    }  # fmt: skip


# ---- the run ---------------------------------------------------------------------------------------------------------


class Power(threading.Thread):
    """The mean power of a GPU, in watts, sampled once a second by nvidia-smi."""

    def __init__(self, gpu: int = 0):
        super().__init__(daemon=True)
        self.gpu, self.watts, self.ended = gpu, list[float](), threading.Event()

    def run(self) -> None:
        command = ["nvidia-smi", f"--id={self.gpu}", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
        while not self.ended.wait(1.0):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                self.watts.append(float(done.stdout))

    def mean(self) -> float | None:
        self.ended.set()
        return sum(self.watts) / len(self.watts) if self.watts else None


def run(o: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """GPT-2 124M by ``lib.runs.train_gpt2`` in two legs, and its rival for the same seconds."""
    with tempfile.TemporaryDirectory() as folder:
        rival = start_rival(o, Path(folder)) if torch.cuda.device_count() > 1 else None
        power = Power()
        if not o.tiny:
            power.start()
        begun = time.perf_counter()
        restarts = _legs(o, Path(folder))
        wall, watts = time.perf_counter() - begun, power.mean() if not o.tiny else None
        ours = summarize([json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()], o)
        ours |= {"legs": restarts + 1, "wall_s": wall, "mean_watts": watts}
        if watts is not None:
            price = next(gpu.dollars_per_hour for gpu in GPUS if gpu.name == "H200")
            ours |= {"kwh": watts * wall / 3.6e6, "dollars": wall / 3600 * price, "dollars_per_hour": price}
        rival = rival or start_rival(o, Path(folder))
        if rival.wait() != 0:
            raise RuntimeError("the rival failed; its message is above")
        return {"ours": ours, "transformers": json.loads(Path(folder, "rival.json").read_text())}


def _legs(o: argparse.Namespace, folder: Path) -> int:
    """Train; after ``--leg`` seconds ask the run to leave, and start it again. Returns the number of restarts."""
    more = [
        "--quiet",
        f"--checkpoint={folder / 'checkpoint'}",
        "--save-every=1000000",
        f"--log-file={folder / 'log.jsonl'}",
    ]
    dim, n_layers = TINY_SIZES[-1] if o.tiny else (GPT2_SMALL.dim, GPT2_SMALL.n_layers)
    every = max(1, o.steps // 5)
    more += [f"--eval-every={every}", f"--sample-every={every}", f"--prompt={PROMPT}", "--sample-tokens=100"]
    command = [sys.executable, "-m", "lib.runs.train_gpt2", *flags(o, dim, n_layers, o.steps), *more]
    for restarts in range(100):
        leg = subprocess.Popen(command, env=_on(o, 0))
        try:
            status = leg.wait(timeout=o.leg if restarts == 0 else None)
        except subprocess.TimeoutExpired:
            leg.send_signal(signal.SIGTERM)
            status = leg.wait()
        if status == 0:
            return restarts
        if status != 75:
            raise RuntimeError(
                f"lib.runs.train_gpt2 ended with status {status}, expected 0 or 75; its message is above"
            )
    raise RuntimeError("100 legs were not enough")


def summarize(lines: list[dict[str, Any]], o: argparse.Namespace) -> dict[str, Any]:
    """Summary of a log: the loss in means of 20 steps, the evaluations, the samples, the rate of the median step."""
    steps = [line for line in lines if "loss" in line]
    rates = sorted(line["tokens_per_s"] for line in steps)
    mean = [sum(p["loss"] for p in steps[i : i + 20]) / len(steps[i : i + 20]) for i in range(0, len(steps), 20)]
    return {
        "steps": len(steps), "tokens_per_s": rates[len(rates) // 2], "mfu": steps[len(steps) // 2]["mfu"],
        "training_s": sum(line["seconds"] for line in steps), "losses_every_20": [round(x, 4) for x in mean],
        "held_out": [{k: line[k] for k in ("step", "held_out_loss",
        "held_out_perplexity")} for line in lines if "held_out_loss" in line],
        "samples": [{"step": line["step"], "text": line["sample"]} for line in lines if "sample" in line],
    }  # fmt: skip


# ---- a look at the data ----------------------------------------------------------------------------------------------


def look(o: argparse.Namespace) -> dict[str, Any]:
    """Lengths of the documents, and an excerpt of the longest in each part: look at these before you train."""
    from lib.runs.data.corpus import END, make_tokenizer, read_facts, read_merges

    tokenizer, n = make_tokenizer(read_merges(Path(o.data))), read_facts(Path(o.data))["held_out_tokens"]
    ids = np.fromfile(Path(o.data, "tokens.bin"), dtype=np.uint16)
    found: dict[str, Any] = {}
    for name, part in {"trained on": ids[:-n], "held out": ids[-n:]}.items():
        ends = np.flatnonzero(part == tokenizer.ids[END.encode()])
        sizes = np.diff(np.concatenate([[-1], ends]))
        longest = int(sizes.argmax())
        begin = int(ends[longest] - sizes[longest] + 1)
        found[name] = {
            "documents": len(sizes), "longest_tokens": int(sizes[longest]),
            "share_of_longest": float(sizes[longest] / len(part)),
            "share_of_those_over_50000": float(sizes[sizes > 50_000].sum() / len(part)),
            "from_the_longest": tokenizer.decode(part[begin + sizes[longest] // 2 :][:90].tolist()),
        }  # fmt: skip
    return found


# ---- the rival -------------------------------------------------------------------------------------------------------


def start_rival(o: argparse.Namespace, folder: Path) -> subprocess.Popen:
    """Start `rival` in a process of its own, on the second GPU if there is one."""
    command = [*_this(o, "rival"), f"--seconds={o.seconds}", f"--folder={folder}"]
    return subprocess.Popen(command, env=_on(o, 1 if torch.cuda.device_count() > 1 else 0))


def rival(o: argparse.Namespace) -> dict[str, Any]:
    """Transformers' GPT-2 124M, compiled, with PyTorch's fused AdamW under autocast, on the same tokens,
    for ``--seconds`` of training.

    The learning rate follows the same schedule, over the seconds instead of the steps.
    """
    import transformers

    from lib.runs.data.corpus import held_out_share, read_tokens

    device = torch.device("cpu" if o.tiny else "cuda")
    tokens = torch.from_numpy(read_tokens(Path(o.data))).int().to(device)
    batch, length = (4, 64) if o.tiny else (BATCH, LENGTH)
    n = (len(tokens) - 1) // length
    n_train = n - max(1, int((held_out_share(o.data) or 0.1) * n) // batch) * batch
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 1, "n_head": 1} if o.tiny else {}
    config = transformers.GPT2Config(
        vocab_size=50_304, n_positions=length, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **sizes
    )
    model: Any = transformers.GPT2LMHeadModel(config)
    model.to(device)
    torch.set_float32_matmul_precision("high")
    compiled = model if o.tiny else torch.compile(model, dynamic=False)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == decays],
        "weight_decay": 0.1 * decays} for decays in (True, False)
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=not o.tiny)
    order, offsets = (
        torch.randperm(n_train, generator=torch.Generator().manual_seed(0)),
        torch.arange(length + 1, device=device),
    )

    def loss_of(rows: torch.Tensor, run: Any) -> torch.Tensor:
        window = tokens[rows.to(device)[:, None] * length + offsets].long()
        with torch.autocast(device.type, torch.bfloat16):
            logits = run(input_ids=window[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())

    def step(at: int, rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = order[torch.arange(at * batch, (at + 1) * batch) % n_train]
        loss_of(rows, compiled).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for at in range(3):
        step(at, 0.0)  # compile; at a rate of 0 no weight changes
    done, parts, begun = 0, 10_000, time.perf_counter()
    while (now := time.perf_counter() - begun) < o.seconds:
        share = int(now / o.seconds * parts)
        step(done, wsd_schedule(share, learning_rate(768), parts // 40, parts * 4 // 5, parts))
        done += 1
        if not o.tiny and done % 20 == 0:
            torch.cuda.synchronize()  # the host must not run ahead of the clock
    taken = time.perf_counter() - begun
    model.eval()
    with torch.no_grad():
        losses = [loss_of(torch.arange(at, at + batch), model).item() for at in range(n_train, n - batch + 1, batch)]
    return {
        "steps": done, "tokens": done * batch * length, "seconds": taken, "tokens_per_s": done * batch * length / taken,
        "held_out_loss": sum(losses) / len(losses), "machine": machine(),
    }  # fmt: skip


# ---- the program -----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("look", "sweep", "positions", "predict", "run", "size", "rival"))
    parser.add_argument("--data", required=True, help="a folder that lib.runs.corpus wrote")
    parser.add_argument("--steps", type=whole(1), default=STEPS[-1], help="of GPT-2 124M")
    parser.add_argument(
        "--seconds", type=positive, default=212.0, help="of training that the rival gets: what the run will take"
    )
    parser.add_argument(
        "--leg", type=positive, default=150.0, help="seconds after which the run is asked to leave, and resumed"
    )
    parser.add_argument("--size", type=width_and_layers, help="of one model of the sweep, such as 128x4")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    o = parser.parse_args(arguments)
    if ("size" in o.parts) != (o.size is not None):
        parser.error(f"--size {o.size} with {' '.join(o.parts)}: expected --size with the part size, and only there")
    if o.parts in (["rival"], ["size"]):  # started by the others, each on its own GPU
        ends = TINY_STEPS if o.tiny else STEPS
        dim, n_layers = map(int, (o.size or "0x0").split("x"))
        done = rival(o) if o.parts == ["rival"] else train_size(o, dim, n_layers, ends)
        (o.folder / f"{o.parts[0]}.json").write_text(json.dumps(done))
        return
    try:
        before = load("scaling_laws", o.folder)
        found = before["results"]
    except FileNotFoundError:
        before, found = None, {}
    from lib.runs.data.corpus import read_facts

    found |= {"tiny": o.tiny, "corpus": read_facts(Path(o.data))}
    for part in o.parts:
        of_data = {"look": look, "sweep": sweep, "positions": positions}
        found[part] = of_data[part](o) if part in of_data else {"predict": predict, "run": run}[part](o, found)
        measured_elsewhere = before if part in ("look", "predict") else None  # neither measures a machine
        record("scaling_laws", found, o.folder, measured_elsewhere)
        shown = {k: v for k, v in found[part].items() if k not in ("points", "ours")}
        print(part, json.dumps(shown)[:2000], flush=True)
    if "run" in o.parts:
        measured = found["run"]["ours"]["held_out"][-1]["held_out_loss"]
        expected = found["predict"]["held_out_loss"]
        print(f"predicted {expected:.4f}, measured {measured:.4f}: {math.expm1(math.log(measured / expected)):+.2%}")


if __name__ == "__main__":
    main()
