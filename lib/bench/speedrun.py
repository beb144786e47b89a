"""Train GPT-2 124M from nothing to one held-out loss on one GPU, with one idea of the book more each time.

``python -m lib.bench.speedrun CORPUS`` takes some eight minutes on an H200, and two GPUs that share ``--units FOLDER``
take half as long. CORPUS is a folder of ``lib.runs.corpus``. It adds its rows to
``chapters/measurements/speedrun.json`` under the GPU's name, and keeps the rows of other GPUs.
``--only`` measures some recipes and keeps the others; ``--device cpu --tiny`` tries the program.

The clock runs while steps run: it counts neither compiling nor recording a graph nor evaluations.
All recipes are judged alike, in bf16 on the same held-out windows.
A recipe has reached the goal where a straight line between two evaluations meets it.
To add one of your own, write it into ``RECIPES``, with a name and the sentence that the table shows.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lib.bench.kit import machine, record, seconds_of
from lib.bench.optimizers import Curve, Model, Training, file_name, finished, reached, train_one
from lib.fast import models as fast
from lib.given.data.record import MEASUREMENTS, load
from lib.given.models.gpt2 import GPT2_SMALL, GPT2Config
from lib.given.models.gpus import sheet_of
from lib.gpt2 import pad_vocab
from lib.runs.data.corpus import is_corpus, read_facts, read_tokens
from lib.runs.flags import ProgramParser, whole
from lib.speed import training_flops_per_token
from lib.training import cosine_schedule

NAME = "speedrun"
GOAL = 6.55
"""The held-out loss to reach, in nats a token: a little above what the first recipe has at its end."""
STEPS = 150
CONTEXT = 1024
N_EVALUATIONS = 10
JUDGE = fast.Path(dtype=torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one training is done.

    Attributes:
        name: Of its row, and what it has that the one before has not.
        why: What the table says about it.
        path: How the model is computed.
        matmul: ``torch.set_float32_matmul_precision`` of it: "highest" is float32, "high" is TF32.
        compiled: Whether the loss is compiled.
        graph: Whether a step is recorded as a CUDA graph.
        optimizer: "adamw", or a key of ``lib.bench.optimizers.MUONS``.
        lr: The largest rate, of all parameters.
        tried: The rates of which it was the best, with one seed and 180 steps (Muon: 120).
        batches: Sequences in a step, and how many such steps, one after the other.
        seeds: How often it trains.
    """

    name: str
    why: str
    path: fast.Path = fast.Path(attention="written out")  # noqa: RUF009  (it is frozen)
    matmul: str = "highest"
    compiled: bool = False
    graph: bool = False
    optimizer: str = "adamw"
    lr: float = 6e-4
    tried: tuple[float, ...] = (6e-4, 1.2e-3, 2.4e-3)
    batches: tuple[tuple[int, int], ...] = ((16, STEPS),)
    seeds: int = 3

    @property
    def n_sequences(self) -> int:
        """Sequences of the whole training."""
        return sum(batch * steps for batch, steps in self.batches)

    def rate(self, done: int) -> float:
        """The rate of a step after so many sequences: up in a twentieth of them, then down to 0 in half a cosine."""
        return cosine_schedule(done, self.lr, 0.0, self.n_sequences // 20, self.n_sequences)


def make_recipes() -> list[Recipe]:
    """Each adds one idea to the one before."""
    found = [Recipe(name="plain", why="float32, called from Python; attention writes its scores to memory")]

    def add(name: str, why: str, path: dict[str, Any] | None = None, **changes: Any) -> None:
        before = found[-1]
        found.append(replace(before, name=name, why=why, path=replace(before.path, **(path or {})), **changes))

    add("TF32", "chapter 8: products round their factors to 10 bits of mantissa", matmul="high")
    add("bf16", "chapter 11: factors of products in 16 bits", {"dtype": torch.bfloat16})
    add("compiled", "chapter 8: torch.compile joins small kernels", compiled=True)
    add("our attention", "chapter 15: no score is written to memory", {"attention": "quickest"})
    kernels = {"kernels": True, "loss_kernel": True}
    add("our kernels", "GELU, norms, biases and the loss fused with their products or gradients", kernels)
    add("graph", "chapter 8: the host starts a step with one call", graph=True)
    muon: dict[str, Any] = {"optimizer": "stacked_muon", "lr": 2.4e-3, "tried": (2.4e-3, 4.8e-3, 9.6e-3)}
    add("Muon", "chapter 25: fewer steps", batches=((16, 60),), **muon)
    add("growing batch", "as many sequences, the first ones in smaller batches", batches=((8, 60), (16, 30)))
    return found


def make_rival() -> Recipe:
    """The same training with PyTorch's own means: its compiler, cuDNN's attention, fused AdamW, a CUDA graph."""
    path = fast.Path(dtype=torch.bfloat16, attention="cudnn")
    why = "the rival: bf16, torch.compile, cuDNN's attention and a graph, none of the book's kernels"
    return Recipe(name="PyTorch", why=why, path=path, matmul="high", compiled=True, graph=True)


RECIPES = {recipe.name: recipe for recipe in (*make_recipes(), make_rival())}


class Attempt(Training):
    """A training by a recipe.

    Args:
        recipe: What is done.
        seed: Of the weights and of the order of the data.
        model: The model, which begins anew.
        texts: Tokens to train on, and held out.
        o: The program's flags.
    """

    def __init__(self, recipe: Recipe, seed: int, model: Model, texts: tuple[Tensor, Tensor], o: argparse.Namespace):
        rate = torch.tensor(recipe.lr, device=o.device) if recipe.graph else recipe.lr
        super().__init__(recipe.optimizer, rate, seed, model, texts, o)
        self.recipe = recipe
        self.judged_by = lambda x, y: fast.gpt2_loss(model.model, x, y, JUDGE)
        self.updates: dict[int, Callable[[Tensor, Tensor], Any]] = {}
        for batch, _ in recipe.batches:
            self.updates[batch] = self.recorded(batch) if recipe.graph else self.update

    def recorded(self, batch: int) -> Callable[[Tensor, Tensor], Any]:
        """``update`` as a CUDA graph for batches of this size."""
        inputs, targets = (x.clone() for x in self.batch(batch))
        replay = fast.capture(lambda: self.update(inputs, targets))

        def replayed(x: Tensor, y: Tensor) -> Tensor:
            inputs.copy_(x)
            targets.copy_(y)
            return replay()

        return replayed

    def begin(self, begin_model: Callable[[int], None], seed: int) -> None:
        """Forget all steps in place, where the graphs read and write: weights, momenta and the order of the data."""
        begin_model(seed)
        self.chance.manual_seed(seed)
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    state[name] = value.zero_() if torch.is_tensor(value) else type(value)(0)

    def warm_up(self) -> None:
        """Compile all that a run needs."""
        self.set_rate(0.0)
        for batch in self.updates:
            self.updates[batch](*self.batch(batch))
        self.held_out_loss()

    def plan(self) -> list[tuple[int, float]]:
        """Sequences and rate of each step."""
        found, done = [], 0
        for batch, steps in self.recipe.batches:
            for _ in range(steps):
                done += batch
                found.append((batch, self.recipe.rate(done - batch // 2)))
        return found

    def train(self) -> Curve:
        """Train all steps; the held-out loss at each evaluation, with the seconds of the steps so far."""
        steps, found, seconds = self.plan(), [], 0.0
        every = math.ceil(len(steps) / N_EVALUATIONS)
        for first in range(0, len(steps), every):
            some = steps[first : first + every]

            def go(some: list[tuple[int, float]] = some) -> None:
                for batch, lr in some:
                    self.set_rate(lr)
                    self.updates[batch](*self.batch(batch))

            seconds += seconds_of(go, self.o.device)
            found.append({"step": first + len(some), "seconds": seconds, "loss": self.held_out_loss()})
        return found


class Runner:
    """Trains by one recipe after the other. What one has compiled serves all of its seeds, and the next recipes as
    long as they compute the same; a recorded graph serves the seeds.
    """

    def __init__(self, config: GPT2Config, texts: tuple[Tensor, Tensor], o: argparse.Namespace):
        self.config, self.texts, self.o = config, texts, o
        self.is_ready_for: str | None = None
        self.model: Model | None = None
        self.attempt: Attempt | None = None
        self.computes: tuple[Any, ...] = ()

    def __call__(self, recipe: str, seed: int) -> Curve:
        if self.is_ready_for != recipe:
            self.prepare(RECIPES[recipe])
        assert self.model is not None
        assert self.attempt is not None
        self.attempt.begin(self.model.begin, seed)
        return self.attempt.train()

    def prepare(self, recipe: Recipe) -> None:
        """Make the model, unless the one before computes the same, and a training that has compiled all it needs."""
        start = time.perf_counter()
        self.attempt, computes = None, (recipe.path, recipe.matmul, recipe.compiled)
        if self.computes != computes:
            self.model = None  # its memory is free before the next one's is taken
            torch.compiler.reset()
            torch.set_float32_matmul_precision(recipe.matmul)
            self.model, self.computes = Model(self.config, self.o.device, recipe.path, recipe.compiled), computes
        assert self.model is not None
        self.attempt = Attempt(recipe, 0, self.model, self.texts, self.o)
        self.attempt.warm_up()
        self.is_ready_for = recipe.name
        print(f"{recipe.name}: ready after {time.perf_counter() - start:.1f} s", flush=True)


def read_corpus(folder: Path) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
    """What the record says of a corpus, and its tokens to train on and held out."""
    facts, tokens = read_facts(folder), torch.from_numpy(read_tokens(folder).astype(np.int32))
    train, held_out = tokens.split([len(tokens) - facts["held_out_tokens"], facts["held_out_tokens"]])
    about = {"tokens": len(train), "held_out_tokens": len(held_out), "vocab_size": facts["vocab_size"]}
    return about, (train, held_out)


def sizes(o: argparse.Namespace, vocab: int) -> GPT2Config:
    """GPT-2 124M; with ``--tiny`` a size for a CPU."""
    full = replace(GPT2_SMALL, context_len=CONTEXT, vocab_size=vocab, padded_vocab_size=pad_vocab(vocab))
    return replace(full, context_len=16, dim=64, n_layers=1, n_heads=1) if o.tiny else full


def as_tried(recipe: Recipe) -> Recipe:
    """A recipe for a CPU: two steps of each batch, in float32."""
    plain = fast.Path(attention="fused")
    batches = tuple((2 + i, 2) for i in range(len(recipe.batches)))
    return replace(recipe, path=plain, matmul="highest", compiled=False, graph=False, batches=batches)


def row(recipe: Recipe, curves: list[Curve], goal: float) -> dict[str, Any]:
    """What the record says of a recipe's trainings, one a seed."""
    described = {name: value for name, value in asdict(recipe).items() if name not in ("name", "path")}
    described["path"] = {name: str(value) for name, value in asdict(recipe.path).items()}
    n_tokens = recipe.n_sequences * CONTEXT
    return {
        "recipe": described,
        "tokens": n_tokens,
        "tokens_per_s": [n_tokens / curve[-1]["seconds"] for curve in curves],
        "losses": [curve[-1]["loss"] for curve in curves],
        "reached": [reached(curve, goal) for curve in curves],
        "curves": curves,
    }


def peak_of(card: str) -> float | None:
    """FLOP/s of the card in bf16, by its data sheet; None if the book has none."""
    sheet = sheet_of(card)
    return sheet.peak_flops if sheet else None


def measure(names: list[str], runner: Runner, settings: dict[str, Any], o: argparse.Namespace) -> dict[str, Any]:
    """The rows of these recipes, when all of their trainings are done, here or by others that share the folder."""
    seeds = {name: range(o.seeds or RECIPES[name].seeds) for name in names}
    units = [{"recipe": name, "seed": seed} for name in names for seed in seeds[name]]
    folder = o.units or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        done = finished(folder, settings, ("recipe", "seed"))
        missing = [unit for unit in units if (unit["recipe"], unit["seed"]) not in done]
        if not missing:
            break
        begun = {path.name.rpartition("-")[0] for path in folder.glob("*.lock")}
        # first what needs no preparation here, and last what another process has prepared
        missing.sort(key=lambda unit: (unit["recipe"] != runner.is_ready_for, file_name(unit["recipe"]) in begun))
        if not train_one(missing, runner, settings, folder):
            time.sleep(0.5)  # others are at them
    return {name: row(RECIPES[name], [done[name, seed] for seed in seeds[name]], o.goal) for name in names}


def make_parser() -> ProgramParser:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="folder of lib.runs.corpus")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=tuple(RECIPES), help="some of the recipes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model and two steps, to try the program")
    parser.add_argument("--seeds", type=whole(1), help="trainings by each recipe, if not as many as it names")
    parser.add_argument("--goal", type=float, default=GOAL, help="held-out loss to reach, in nats a token")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the record is written")
    parser.add_argument("--units", type=Path, help="folder of the trainings, which several processes may share")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser()
    o = parser.parse_args(arguments)
    if not is_corpus(str(o.corpus)):
        parser.error(f"{o.corpus} is no corpus: expected a folder that python -m lib.runs.corpus has written")
    if o.tiny:
        RECIPES.update({name: as_tried(recipe) for name, recipe in RECIPES.items()})
    o.batch, o.eval_batches = (2, 1) if o.tiny else (16, 4)
    about, texts = read_corpus(o.corpus)
    names = [name for name in RECIPES if not o.only or name in o.only]
    settings = {"tiny": o.tiny, "context": CONTEXT, "eval_sequences": o.batch * o.eval_batches, **about}
    rows = measure(names, Runner(sizes(o, about["vocab_size"]), texts, o), settings, o)
    where = o.folder / f"{NAME}.json"
    cards = load(NAME, o.folder)["results"]["cards"] if where.exists() else {}
    card = torch.cuda.get_device_name() if o.device == "cuda" else "CPU"
    kept = cards.get(card, {}).get("rows", {}) if o.only else {}
    rows = {name: (kept | rows)[name] for name in RECIPES if name in kept | rows}
    bound = {"flops_per_token": training_flops_per_token(sizes(o, about["vocab_size"])), "peak_flops": peak_of(card)}
    cards[card] = {"settings": settings, "goal": o.goal, "rows": rows, **bound, "machine": machine()}
    record(NAME, {"goal": o.goal, "cards": cards}, o.folder)
    for name, found in rows.items():
        print(name, [f"{loss:.3f}" for loss in found["losses"]], found["reached"], flush=True)


if __name__ == "__main__":
    main()
