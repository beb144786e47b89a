"""Measure a step of chapter 29 on GPT-2 124M: sampling, scoring, training, bytes, and how far two engines differ.

``python -m lib.bench.rewards`` needs one GPU, some 5 minutes and no network.
It writes ``chapters/measurements/rewards.json``. ``--device cpu --tiny`` tries it.

1. Seconds of a step of countdown: groups sampled on chapter 21's engine, their check, ``grpo_step``.
2. Peak bytes of ``token_log_probs`` forward and backward, beside those of whole logits.
3. Drift: the mean and largest difference between the engine's log-probabilities and the model's own, by dtype.

The weights are random, so no answer is right: a step costs the same whatever its rewards are.
"""

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib.bench.kit import record, spread, timed
from lib.given.data.record import MEASUREMENTS
from lib.given.data.tasks import Characters, countdown
from lib.given.models.gpt2 import GPT2_SMALL, GPT2Config
from lib.gpt2 import GPT2
from lib.rewards import check_countdown, grpo_step, sample_groups, score_response, token_log_probs
from lib.runs.flags import ProgramParser, whole
from lib.serving import Scheduler

TINY = GPT2Config(vocab_size=64, context_len=64, dim=16, n_layers=1, n_heads=2)
LETTERS = Characters()


def main(argv: list[str] | None = None) -> None:
    """Measure all parts and write them down."""
    o = options(argv)
    o.device = torch.device(o.device)
    results = {"step": {}, "drift": {}, "log_probs": log_prob_bytes(o)}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        results["step"][name], results["drift"][name] = step(o, dtype)
    record("rewards", {"prompts": o.prompts, "group": o.group, "new_tokens": o.new_tokens} | results, o.folder)


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--prompts", type=whole(1), default=16)
    parser.add_argument("--group", type=whole(1), default=8)
    parser.add_argument("--new-tokens", type=whole(1), default=128)
    parser.add_argument("--positions", type=whole(1), default=65_536, help="of the log-probabilities")
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    return parser.parse_args(argv)


def step(o: argparse.Namespace, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, float]]:
    """Seconds of sampling, scoring and training, and the difference of the log-probabilities."""
    torch.manual_seed(o.seed)
    model = GPT2(TINY if o.tiny else GPT2_SMALL).to(o.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    questions = list(islice(countdown(check_countdown, seed=o.seed), o.prompts))
    prompts = [LETTERS.encode(question.prompt) for question in questions]
    rows, blocks = o.prompts * o.group, -(-(max(map(len, prompts)) + o.new_tokens) // 16)
    times: dict[str, list[float]] = {"sampling": [], "scoring": [], "training": []}
    for n in range(o.rounds + 1):  # the first is a warm-up
        scheduler = Scheduler(4096, rows * blocks, 16)
        seconds, batch = timed(
            lambda s=scheduler, n=n: sample_groups(model, prompts, o.group, s, o.new_tokens, seed=n * rows), o.device
        )
        scored, batch["rewards"] = timed(lambda b=batch: scores(b, questions), o.device)
        trained, _ = timed(lambda b=batch: grpo_step(model, optimizer, b, o.group), o.device)
        if n:
            for key, value in zip(times, (seconds, scored, trained), strict=True):
                times[key].append(value)
    n_tokens = int(batch["response_mask"].sum())
    return {key: spread(value) for key, value in times.items()} | {"tokens": n_tokens}, drift(model, batch)


def scores(batch: dict[str, Any], questions: list) -> Tensor:
    """The reward of each response, on the device of the batch; ids outside of the letters are left out."""
    masks, found = batch["response_mask"], []
    for row, mask, group in zip(batch["tokens"], masks, batch["groups"].tolist(), strict=True):
        text = LETTERS.decode([i for i in row[1:][mask].tolist() if i < len(LETTERS)])
        found.append(score_response(text, questions[group].check)["reward"])
    return torch.tensor(found, device=masks.device)


@torch.no_grad()
def drift(model: nn.Module, batch: dict[str, Any]) -> dict[str, float]:
    """How far the engine's log-probabilities are from those of a pass of the model over the same weights.

    ``sample_groups`` is called once more, because the batch's are of the weights before the update.
    """
    pairs = zip(batch["tokens"], batch["response_mask"], strict=True)
    prompts = [row[: int(mask.int().argmax()) + 1].tolist() for row, mask in pairs]
    length = int(batch["response_mask"].sum(-1).max())
    rows = len(prompts) * -(-batch["tokens"].shape[1] // 16)
    again = sample_groups(model, prompts, 1, Scheduler(4096, rows, 16), length)
    logits = model(again["tokens"][:, :-1])
    logits = (logits[0] if isinstance(logits, tuple) else logits).float()
    own = logits.log_softmax(-1).gather(-1, again["tokens"][:, 1:, None]).squeeze(-1)
    apart = (own - again["log_probs"])[again["response_mask"]].abs()
    return {"mean": float(apart.mean()), "largest": float(apart.max())}


def log_prob_bytes(o: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes above the inputs of both ways; on a CPU, where nothing counts them, None."""
    width, vocabulary = (16, 64) if o.tiny else (GPT2_SMALL.dim, GPT2_SMALL.vocab_size)
    positions = min(o.positions, 512) if o.tiny else o.positions
    hidden = torch.randn(positions, width, device=o.device, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=o.device, requires_grad=True)
    targets = torch.randint(vocabulary, (positions,), device=o.device)

    def lean() -> None:
        token_log_probs(hidden, weight, targets)[0].sum().backward()

    def whole_logits() -> None:
        logits = hidden @ weight.T
        nn.functional.cross_entropy(logits, targets, reduction="sum").backward()

    found: dict[str, Any] = {"positions": positions, "vocabulary": vocabulary}
    for name, call in (("lean", lean), ("whole", whole_logits)):
        hidden.grad = weight.grad = None
        if o.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        seconds, _ = timed(call, o.device)
        peak = torch.cuda.max_memory_allocated() - before if o.device.type == "cuda" else None
        found[name] = {"peak_bytes": peak, "seconds": seconds}
    return found


if __name__ == "__main__":
    main()
