"""A look at the model while it trains: its scores on the held-out part of the data, its answers to questions,
and text that it writes.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.evaluation import encode_pair, few_shot_prompt
from lib.runs.data.questions import Example, kind_of, load
from lib.runs.engine import state as checkpoints
from lib.runs.engine.options import Options
from lib.runs.engine.tasks import Task
from lib.runs.evaluating.choices import DEFAULTS, center, score_choices, score_texts
from lib.runs.flags import UsageError

TEMPERATURE = 0.8
"""Temperature of samples, as in chapter 6."""
SHOWN = ("accuracy", "low", "high", "bits_per_byte")
"""What a log has of a task's result."""


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


def load_questions(task: Task) -> dict[str, list[Example]]:
    """The questions of ``--eval-tasks``, by the tasks' names.

    Raises:
        UsageError: a task cannot be read, its answers would have to be written, or a question does not fit.
    """
    found: dict[str, list[Example]] = {}
    for name in task.options.eval_tasks or ():
        try:
            found |= load(name, None, DEFAULTS["seed"])
        except UsageError as error:
            raise UsageError(str(error).replace("--tasks", "--eval-tasks")) from None
    for name, questions in found.items():
        kind = kind_of(questions[0])
        if kind in ("answers", "programs"):
            raise UsageError(
                f"--eval-tasks {name}: its {kind} are written, which takes too long between two steps; "
                "expected choices or text; lib.runs.evaluate asks it of a checkpoint"
            )
        if kind == "choices":
            _check_fit(name, questions, task)
    return found


def _check_fit(name: str, questions: list[Example], task: Task) -> None:
    """Find now what would end the run at its first evaluation."""
    codec: Any = task.source.codec
    for i in range(len(questions)):
        try:
            query, choices = few_shot_prompt(questions, i, DEFAULTS["shots"], seed=DEFAULTS["seed"])
        except ValueError as error:
            raise UsageError(f"--eval-tasks {name}: question {i}: {error}") from None
        longest = max(len(encode_pair(codec.encode, query, choice)[1]) for choice in choices)
        if longest > task.per_row:
            raise UsageError(
                f"--eval-tasks {name}: a choice of question {i} has {longest} tokens, and the model reads "
                f"{task.per_row}; expected a longer --length"
            )


class Plain(nn.Module):
    """A model of a run as chapter 27's functions take it: tokens in, logits out, without those of padding."""

    def __init__(self, task: Task, model: nn.Module):
        super().__init__()
        self.task, self.model, self.config = task, model, task.config

    def forward(self, tokens: Tensor) -> Tensor:
        return self.task.plain_logits(self.model, tokens)[..., : self.task.n_classes]


def ask(run: Any) -> dict[str, float] | None:
    """The model's scores on the questions, on rank 0; None on the others. All ranks call it together.

    The same questions, shots and normalization as by ``lib.runs.evaluate``, of the model in whole float32 parameters.
    So a log has the numbers that the checkpoint of its step would get.
    """
    model = whole_model(run)
    if model is None:
        return None
    codec = run.task.source.codec
    ends = [codec.n_tokens - 1] if codec.special_tokens else []
    tokenizer = SimpleNamespace(encode=codec.encode, encode_rendered=codec.encode, end_ids=frozenset(ends))
    asked = SimpleNamespace(model=Plain(run.task, model), tokenizer=tokenizer)
    options, nothing = SimpleNamespace(**DEFAULTS), SimpleNamespace(update=lambda n: None)
    results: dict[str, dict[str, Any]] = {}
    for name, questions in run.task.questions.items():
        scorer = score_texts if kind_of(questions[0]) == "texts" else score_choices
        results[name], _ = scorer(asked, questions, options, nothing)
    core = center(results)
    numbers = {f"{name}_{key}": float(found[key]) for name, found in results.items() for key in SHOWN if key in found}
    return numbers | ({} if core is None else {"core_score": core})


def sample(run: Any) -> str | None:
    """The prompt and what the model writes after it, on rank 0; None on the others. All ranks call it together.

    Chapter 4's ``sample_next`` draws the text from a fixed seed, and the models of chapters 4 and 6 compute it as they
    are written, from whole parameters. So the text is the same on any number of ranks.
    """
    model = whole_model(run)
    return None if model is None else write(run.task, model, run.options)


def whole_model(run: Any) -> nn.Module | None:
    """The model as it is written in its chapter, on rank 0's device; None on the others. All ranks call it together."""
    weights = checkpoints.gather_model(run.strategy, run.device)
    if run.world.rank:
        return None
    if run.strategy.balance is not None:
        weights |= run.strategy.balance.named()
    with torch.device("meta"):
        model = run.task.new_model()
    model.load_state_dict(weights, assign=True)
    return model.to(run.device)


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
