"""A look at the model while it trains: its scores on the held-out part of the data, and text that it writes."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.runs.engine import state as checkpoints
from lib.runs.engine.options import Options
from lib.runs.engine.tasks import Task
from lib.runs.flags import UsageError

TEMPERATURE = 0.8
"""Temperature of samples, as in chapter 6."""


def is_due(every: int | None, done: int, options: Options) -> bool:
    """Whether something that happens every so many steps, and after the last one, happens after this step."""
    return every is not None and (done % every == 0 or done == options.steps)


def hold_out(task: Task) -> None:
    """Set aside the held-out part of the data: the requested share, or the data's own test split.

    It is cut to whole batches, which any number of ranks divides as in training.

    Raises:
        UsageError: too little is left to train on.
    """
    o, source = task.options, task.source
    n = source.n
    if o.held_out is None:
        return
    source.hold_out(max(1, (source.n_test or int(o.held_out * n)) // o.batch) * o.batch)
    if source.n < o.batch:
        raise UsageError(
            f"--held-out {o.held_out:g} of --data {o.data}, which has {n} {task.rows}: "
            f"of --batch {o.batch} at least one batch is held out, "
            f"and that leaves {max(source.n, 0)} to train on; expected a smaller batch or more data"
        )


@torch.no_grad()
def evaluate(run: Any) -> dict[str, float]:
    """The held-out part's scores, always over the same items. All ranks call it together and get the same scores."""
    task, source, micro = run.task, run.task.source, run.options.accumulate
    share, first = run.numbers.batch, source.n + run.numbers.rank * run.numbers.batch
    starts = range(first, first + source.n_held_out, run.options.batch)
    total = torch.zeros(len(task.scores), dtype=torch.float64, device=run.device)
    run.strategy.loss.eval()
    for start in starts:
        inputs, targets = run.fetch(torch.arange(start, start + share))
        for x, y in zip(inputs.chunk(micro), targets.chunk(micro), strict=True):
            total += run.strategy.score(x, y)
    run.strategy.loss.train()
    if run.options.is_parallel:
        dist.all_reduce(total)
        total *= run.mesh.size["pipeline"] / run.world.size  # only the last stage has scores
    found = dict(zip(task.scores, (total / (len(starts) * micro)).tolist(), strict=True))
    if task.unit == "token":
        loss = found["held_out_loss"]
        found["held_out_perplexity"] = math.exp(loss) if loss < 700 else loss * math.inf  # keeps NaN
    return found


def sample(run: Any) -> str | None:
    """The prompt and what the model writes after it, on rank 0; None on the others. All ranks call it together.

    Chapter 4's ``sample_next`` draws the text from a fixed seed, and the models of chapters 4 and 6 compute it as they
    are written, from whole parameters. So the text is the same on any number of ranks.
    """
    weights = checkpoints.gather_model(run.strategy, run.device)
    if run.world.rank:
        return None
    if run.strategy.balance is not None:
        weights |= run.strategy.balance.named()
    with torch.device("meta"):
        model = run.task.new_model()
    model.load_state_dict(weights, assign=True)
    return write(run.task, model.to(run.device), run.options)


@torch.no_grad()
def write(task: Any, model: nn.Module, options: Options) -> str:
    """The prompt and ``--sample-tokens`` more; the text ends early if the model's logits are not finite."""
    from lib.llama import sample_next

    codec, length = task.source.codec, task.per_row
    generator = torch.Generator().manual_seed(options.seed)
    tokens: Tensor = torch.tensor([codec.encode(options.prompt)], device=next(model.parameters()).device)
    for _ in range(options.sample_tokens):
        logits = task.plain_logits(model, tokens[:, -length:])[:, -1, : codec.n_tokens]
        if not logits.isfinite().all():
            break
        drawn = sample_next(logits.cpu(), TEMPERATURE, generator=generator)
        tokens = torch.cat([tokens, drawn[:, None].to(tokens.device)], dim=1)
    return codec.decode(tokens[0].tolist())
