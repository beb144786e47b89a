"""Fine-tuning as a task of the engine: its options, the loss over answers or pairs, and a run with its denominators."""

import hashlib
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.finetuning import dpo_loss, packed_mask
from lib.given.models.hidden import hidden_states, is_llama, output_weight
from lib.given.parallel.sharding import blocks_of
from lib.rewards import token_log_probs
from lib.runs.engine import state as checkpoints
from lib.runs.engine.log import memory_peak_bytes
from lib.runs.engine.loop import BEST, Run
from lib.runs.engine.options import CONTENTS, KINDS, Options
from lib.runs.engine.tasks import DTYPES, Loss, Task
from lib.runs.engine.variants import flops_per_token
from lib.runs.flags import UsageError
from lib.runs.memory import shown
from lib.runs.tuning.base import (
    TARGETS,
    adapt,
    held_bytes,
    keep_trained_only,
    open_base,
    write_tuned,
)
from lib.runs.tuning.conversations import IGNORED, make_rows, read_lines
from lib.speed import training_flops_per_token

METHODS = ("full", "lora", "qlora", "dpo")
RANK = 16
"""Of the adapters, unless ``--rank`` says otherwise."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Options):
    """The flags of a run of fine-tuning; ``--help`` explains each."""

    method: str
    dpo_trains: str
    out: Path
    rank: int | None
    alpha: float | None
    targets: str | None
    dropout: float | None
    beta: float
    label_smoothing: float

    @property
    def trains(self) -> str:
        """What is trained: "full", "lora" or "qlora"."""
        return self.dpo_trains if self.method == "dpo" else self.method

    @property
    def is_dpo(self) -> bool:
        return self.method == "dpo"


def check_tuning(o: TuneOptions) -> None:
    """Check the flags of fine-tuning against each other.

    Raises:
        UsageError: one of them would have no effect, or would destroy something.
    """
    if o.out.resolve() == Path(o.model).resolve():
        raise UsageError(f"--out {o.out} is --model, which would be overwritten; expected another folder")
    for name in ("rank", "alpha", "targets", "dropout") if o.trains == "full" else ():
        if (value := getattr(o, name)) is not None:
            raise UsageError(f"--{name} {value}: all weights are trained, without adapters; expected no --{name}")
    if o.label_smoothing >= 0.5:
        raise UsageError(f"--label-smoothing {o.label_smoothing}: expected less than 0.5")


class TuneTask(Task):
    """A model of chapter 4 or 6 learns the assistant's side of conversations, or which of two answers is preferred."""

    size_flags = ("--model",)
    options: TuneOptions

    def __init__(self, options: TuneOptions):
        super().__init__(options)
        self.dtype = DTYPES[options.precision]
        check_tuning(options)
        path = Path(str(options.data))
        lines = read_lines(path, options.is_dpo, options.limit)
        self.base = open_base(options.model, options.seed)
        self.config = self.base.model.config
        context = self.config.context_len
        length = options.length or context
        if length > context:
            raise UsageError(f"--length {length} is more than the model's context of {context}: expected at most that")
        self.unit, self.per_row = ("pair", 1) if options.is_dpo else ("token", length)
        self.scores = ("held_out_loss", *(("held_out_margin", "held_out_right") if options.is_dpo else ()))
        self.source: Any = make_rows(path, lines, self.base.template, length, options.seed, options.is_dpo)
        self.tokens_per_row, self.n_classes = length, self.config.vocab_size
        self.weights = _digest(self.base.model)
        self._choose_trained()
        self._count(length)

    @property
    def rows(self) -> str:
        return "pairs" if self.options.is_dpo else "packed rows"

    @classmethod
    def sizes(cls, options: Any) -> dict[str, dict[str, Any]]:
        if options.uses(*(kind for kind in KINDS if kind not in ("replicate", "shard"))):
            raise UsageError(f"{options.how}: fine-tuning calls a block's layers one by one, past what this divides; "
                             "expected single, ddp or fsdp")  # fmt: skip
        if options.uses("shard") and (options.trains != "full" or not options.ours):
            raise UsageError(f"{options.how}: adapters are small, and PyTorch's engine gathers whole blocks, which "
                             "this loss does not call; expected --method full and --engine ours")  # fmt: skip
        return {}

    def _choose_trained(self) -> None:
        o = self.options
        names = tuple(o.targets.split(",")) if o.targets else TARGETS[is_llama(self.base.model)]
        self.how: dict[str, Any] = {"method": o.method, "trains": o.trains, "model": o.model}
        if o.trains == "full":
            return
        rank = o.rank or RANK
        alpha, dropout = o.alpha or 2.0 * rank, o.dropout or 0.0
        self.how |= {"rank": rank, "alpha": alpha, "targets": ",".join(names), "dropout": dropout}
        torch.manual_seed(o.seed)
        try:
            adapt(self.base, o.trains == "qlora", rank, alpha, names, dropout, self.dtype)
        except ValueError as error:
            flag = f"--targets {','.join(names)}" if "has the name" in str(error) else f"--method {o.method}"
            raise UsageError(f"{flag}: {error}") from None

    def _count(self, length: int) -> None:
        """What the model holds and computes."""
        model, o = self.base.model, self.options
        n_states = 1 if o.optimizer == "sgd" else 2
        whole, n_ranks = held_bytes(model, n_states), (o.shard or 1) if o.shards else 1
        found = {name: value // n_ranks for name, value in whole.items()}
        parts = ", ".join(f"{name} {shown(value)}" for name, value in found.items())
        most = max(sum(found.values()), whole["weights"])  # a rank has all weights before it keeps its shard
        self.held = most, f"--model {o.model} --method {o.method} holds {parts}"
        self.n_weights = sum(p.numel() for p in model.parameters())
        config = replace(self.config, context_len=length)
        flops = flops_per_token(config) if is_llama(model) else training_flops_per_token(config)
        if o.trains != "full":  # no gradients of the weights
            flops = flops * 2 // 3
        self.flops_per_item = flops * (length if o.is_dpo else 1)

    def new_model(self) -> nn.Module:
        keep_trained_only(self.base.model)
        return self.base.model

    def new_loss(self, device: torch.device) -> "TunedLoss":
        return TunedLoss(self, device)

    def describe(self) -> dict[str, Any]:
        o = self.options
        named = {"config": asdict(self.config), "batch": o.batch, "seed": o.seed, "data": o.data, **self.how}
        named |= {"length": self.tokens_per_row, "items": self.source.n, "held_out": self.source.n_held_out}
        named |= {"optimizer": o.optimizer, "beta": o.beta, "label_smoothing": o.label_smoothing}
        named |= {"weights of the model": self.weights, "precision of what is frozen": str(self.dtype)}
        return {"task": type(self).__name__, **named, CONTENTS: self.source.fingerprint()}


def _digest(model: Any) -> str:
    """Sixteen hexadecimal digits of some thousand numbers of each weight, which tell one model from another."""
    found = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        found.update(repr((name, tuple(parameter.shape))).encode())
        found.update(flat[:: max(1, len(flat) // 4096)].contiguous().numpy().data)
    return found.hexdigest()


class TunedLoss(Loss):
    """The loss over what the assistant says, or chapter 28's DPO, from a few rows of logits at a time.

    Attributes:
        scale: What a micro-batch's sum is multiplied by, so that the mean over micro-batches and ranks is the mean over
            all targets, or all pairs, of the step.
        held_out_scale: The same for the held-out part.
        reference: Log-probabilities ``[N, 2]`` of both answers of each pair under the model as it was; None without
            pairs.
    """

    task: TuneTask

    def __init__(self, task: TuneTask, device: torch.device):
        super().__init__(task, device)
        self.mixes = self.mixes and task.options.trains == "full"
        self.scale: Tensor | float = 1.0
        self.held_out_scale = 1.0
        self.reference: Tensor | None = None
        if task.options.is_dpo:
            self.reference = self._answers_before()
        if task.options.shards:  # `hidden_states` calls the layers of a block, never the block
            self.units = [part for block in blocks_of(self.model) for part in block.modules() if not [*part.children()]]
            self.units = [part for part in self.units if [*part.parameters()]]

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """The scaled loss of a micro-batch ``[B, 3, T]``; in evaluation mode all scores."""
        assert targets is not None
        if self.reference is None:
            sums = -self.log_probs(inputs, targets).sum()[None]
        else:
            sums = self.preferences(inputs, targets)
        return (sums * self.scale)[0] if self.training else sums * self.held_out_scale

    def log_probs(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Log-probability of each target that counts, in their order."""
        tokens, documents, positions = inputs.unbind(1)
        counted = targets != IGNORED
        with self.precision():
            hidden = hidden_states(self.model, tokens, packed_mask(documents), positions)
        dtype = self.task.dtype
        return token_log_probs(hidden[counted].to(dtype), output_weight(self.model).to(dtype), targets[counted])[0]

    def answers(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities ``[B, 2]`` of the preferred answer of each pair and of the other one."""
        counted = targets != IGNORED
        log_probs = self.log_probs(inputs, targets)
        places = 2 * counted.nonzero()[:, 0] + inputs[:, 1][counted] % 2
        return log_probs.new_zeros(2 * len(inputs)).index_add(0, places, log_probs).view(-1, 2)

    def preferences(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Sums over the pairs: the loss, the margin, and how often the preferred answer has the greater reward."""
        assert self.reference is not None
        now, before, o = self.answers(inputs, targets), self.reference[inputs[:, 1, 0] // 2], self.task.options
        answers = now[:, 0], now[:, 1], before[:, 0], before[:, 1]
        losses, chosen, rejected = dpo_loss(*answers, beta=o.beta, label_smoothing=o.label_smoothing)
        margin = chosen - rejected
        return torch.stack([losses.sum(), margin.sum(), (margin > 0).float().sum()])

    @torch.no_grad()
    def _answers_before(self) -> Tensor:
        source = self.task.source
        source.to(self.device)
        self.eval()
        numbers = torch.arange(source.n + source.n_held_out, device=self.device)
        found = [self.answers(*source.fetch(part)) for part in numbers.split(self.rows_at_once)]
        self.train()
        return torch.cat(found)

    @property
    def rows_at_once(self) -> int:
        """Rows of a micro-batch."""
        o = self.task.options
        return o.batch // (o.accumulate * (o.replicate or 1) * (o.shard or 1))


class TuneRun(Run):
    """A run whose loss is a mean over all that counts in a step, however it is divided."""

    options: TuneOptions
    task: TuneTask

    def __init__(self, *others: Any):
        super().__init__(*others)
        source, loss = self.task.source, self.loss
        held_out = slice(source.n, source.n + source.n_held_out)
        n = self.count(source.targets[held_out])
        loss.held_out_scale = (source.n_held_out // loss.rows_at_once) / max(1, int(n))
        self.say(self.about())

    @property
    def loss(self) -> TunedLoss:
        return self.strategy.loss  # type: ignore[return-value]

    def about(self) -> str:
        """What is trained on, and what that holds."""
        source = self.task.source
        assert self.task.held
        filled = 1 - source.n_padding / source.inputs[:, 1].numel()
        rows = f"{source.n} {self.task.rows} to train on, {source.n_held_out} held out, {filled:.0%} filled"
        short = f", {source.n_short} lines cut or left out, too long for a row" if source.n_short else ""
        return f"{rows}, {source.n_targets:,} tokens to learn{short}; {self.task.held[1]}; activations come on top"

    def say(self, text: str) -> None:
        if self.world.rank == 0 and not self.options.quiet:
            print(text, file=sys.stderr, flush=True)

    def count(self, targets: Tensor) -> Tensor:
        """What the loss is a mean over: the targets that count, or the pairs."""
        if self.options.is_dpo:
            return torch.tensor(float(len(targets)), dtype=torch.float64, device=targets.device)
        return (targets != IGNORED).sum().double()

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        n = self.count(targets)
        if self.options.is_parallel:
            dist.all_reduce(n)
        self.loss.scale = (self.options.accumulate * self.n_data / n).float()
        return super().backward(inputs, targets)

    def go(self) -> bool:
        is_done = super().go()
        self.say(f"peak of memory: {shown(memory_peak_bytes(self.device))}")
        return is_done

    def export(self, folder: Path) -> None:
        is_divided = self.strategy.is_divided
        whole = checkpoints.gather_model(self.strategy, self.device) if is_divided else None
        if self.world.rank:
            return
        dtype = torch.float32 if self.options.trains == "full" else self.task.dtype
        write_tuned(folder, self.task.base, dtype, self.task.how, whole)
        place = (self.options.checkpoint or folder) / BEST
        if self.best and checkpoints.newest(place):
            best = checkpoints.read_model(place)
            if not is_divided:
                self.strategy.model.load_state_dict(best)
            write_tuned(folder / BEST, self.task.base, dtype, self.task.how, best if is_divided else None)
