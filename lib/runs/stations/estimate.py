"""What a size will need, from the book's own records, before anything is run: each number names where it comes from."""

from typing import Any

from lib.given.data.record import load
from lib.given.models.gpt2 import GPT2_SMALL
from lib.given.models.gpus import GPUS
from lib.runs.memory import shown
from lib.runs.stations.plan import Way

STATE_BYTES = 16
"""Of a weight in training: itself, its gradient and two numbers of the optimizer, in float32."""


def flag(flags: str, name: str) -> int:
    words = flags.split()
    return int(words[words.index(name) + 1])


def recorded() -> dict[str, Any]:
    """The reports that the book has recorded (``lib.bench.whole``), by their sizes."""
    try:
        return load("whole")["results"]
    except FileNotFoundError:
        return {}


def estimates(way: Way, size: str) -> list[str]:
    """Lines about time, memory and dollars; for a size that has been recorded, what it took."""
    if (found := recorded().get(size)) is None:
        return of_small(way) if way.size.needs_gpu else ["this size has not been recorded yet"]
    seconds = sum(station["seconds"] for station in found["stations"].values())
    cards = f"{found['gpus']} x " if found["gpus"] > 1 else ""
    return [f"recorded on {cards}{found['device']}: {seconds / 60:.0f} minutes"]


def of_small(way: Way) -> list[str]:
    """GPT-2 small, from chapter 22's run, chapter 25's race and chapter 29's step."""
    n_ranks, size = max(1, way.n_gpus), way.size
    run = load("scaling_laws")["results"]["run"]["ours"]
    muon = load("optimizers")["results"]["speeds"]["optimizer_s"]["stacked_muon"]["median"]
    step = load("rewards")["results"]["step"]["bfloat16"]
    n_steps, batch, length = (flag(size.pretrain, name) for name in ("--steps", "--batch", "--length"))
    pretrain = n_steps * (batch * length / run["tokens_per_s"] / n_ranks + muon)
    tune = flag(size.tune, "--steps") * flag(size.tune, "--batch") * flag(size.tune, "--length")
    tune_s = tune / run["tokens_per_s"] / n_ranks
    answers = flag(size.reward, "--prompts") * flag(size.reward, "--group") * flag(size.reward, "--new-tokens")
    one = (step["sampling"]["median"] + step["training"]["median"]) * answers / step["tokens"]
    reward = flag(size.reward, "--steps") * one
    hours = (pretrain + tune_s + reward) / 3600
    price = next(gpu.dollars_per_hour for gpu in GPUS if gpu.name == "H100")
    cards = "1 GPU" if n_ranks == 1 else f"{n_ranks} GPUs"
    return [
        f"pretrain: {n_steps * batch * length:,} tokens, {pretrain / 60:.0f} minutes on {cards} "
        "(chapter 22's tokens a second, chapter 25's Muon)",
        f"tune: {tune:,} positions, {tune_s / 60:.1f} minutes, if it were as fast; its attention is the plain one",
        f"reward: {reward / 60:.0f} minutes on one GPU if every answer were as long as it may be (chapter 29's step)",
        f"together {hours:.1f} hours, {hours * n_ranks * price:.2f} dollars at ${price} an hour for an H100; the "
        "corpus and the evaluations come on top",
        f"memory: {shown(n_weights() * STATE_BYTES)} of weights, gradients and optimizer on each GPU; the first step "
        "refuses what does not fit",
    ]


def n_weights() -> int:
    """Weights of GPT-2 small, with the table of its tokens and that of its positions."""
    config: Any = GPT2_SMALL
    return (config.vocab_size + config.context_len + 12 * config.n_layers * config.dim) * config.dim
