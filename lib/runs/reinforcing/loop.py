"""The loop of ``lib.runs.reinforce``: roll out, update, look, save, and leave when a signal asks for it."""

import argparse
import copy
import sys
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lib.given.data.tasks import Question
from lib.runs.engine import state as checkpoints
from lib.runs.engine.log import Log, memory_peak_bytes
from lib.runs.engine.signals import Signals
from lib.runs.reinforcing.samplers import Here, There, clock
from lib.runs.reinforcing.sampling import evaluate
from lib.runs.reinforcing.start import Policy, describe, keep_tokenizer, write
from lib.runs.reinforcing.update import update, views
from lib.training import AdamW

LOG = "log.jsonl"
HOW = ("task", "difficulty", "prompts", "group", "new_tokens", "temperature", "lag", "updates", "algorithm", "level",
       "normalize_by_std", "loss_agg_mode", "loss_scale_factor", "clip_low", "clip_high", "correction", "cap", "floor",
       "kl_coef", "format_weight", "lr", "lr_warmup", "clip", "warm", "precision", "sampler_dtype", "seed")  # fmt: skip
"""Settings that must not change when a run is resumed."""


class Run:
    """A policy in training, on one device.

    On one rank, sampler and trainer take turns. With a lag, a batch is sampled before the updates that it could have
    waited for, so that no second copy of the weights is needed: the engine reads the trainer's own, unless it is to
    read them in another dtype. Where other ranks sample, a lag lets them work while this one trains.

    Args:
        policy: On the device.
        held_out: Questions of the evaluations.
        o: The settings, complete.
        device: Of everything.
        resumes: Whether there is a checkpoint to continue from.
        sampler: Makes the rollouts; None makes them here.
    """

    def __init__(self, policy: Policy, held_out: list[Question], o: Any, device: torch.device, resumes: bool,
                 sampler: Here | None = None):  # fmt: skip
        self.policy, self.held_out, self.o, self.device = policy, held_out, o, device
        self.sampler = sampler or Here(policy, o, device)
        self.optimizer = AdamW(policy.model.parameters(), lr=o.lr, weight_decay=0.0)
        self.pending: deque[dict[str, Any]] = deque()  # batches that are sampled and not yet trained on
        self.spent = {"seconds": 0.0, "rollout_tokens": 0, "train_tokens": 0}
        self.first: dict[str, Any] = {}  # the evaluation before the first update
        self.last: dict[str, Any] = {}
        self.reference = copy.deepcopy(policy.model).requires_grad_(False) if o.kl_coef else None
        self.done = self._resume() if resumes else 0

    def _resume(self) -> int:
        state = checkpoints.load(self.o, self._strategy(), self.optimizer)
        self.pending.extend({name: self._here(value) for name, value in batch.items()} for batch in state["pending"])
        self.spent, self.first, self.last = state["spent"], state["first"], state["last"]
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        return state["step"]

    def _here(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, Tensor) else value

    def _strategy(self) -> Any:
        """What the checkpoints of ``lib.runs.engine`` need to know: this rank alone trains, and has the whole model."""
        return SimpleNamespace(is_divided=False, is_alone=True, model=self.policy.model)

    def save(self) -> None:
        """Write a checkpoint. It holds the batches that a lag has sampled ahead, since older weights made them.

        It does not say which ranks sampled them, so that the run may go on with more ranks, or with fewer.
        """
        self.pending.extend(self.sampler.take(self.sampler.n_asked))
        kept: dict[str, Any] = {name: getattr(self, name) for name in ("spent", "first", "last")}
        if self.reference is not None:
            kept["reference"] = self.reference.state_dict()
        checkpoints.save(self.o, self._strategy(), self.optimizer, self.done, run=run_of(self.policy, self.o),
                         pending=list(self.pending), **kept)  # fmt: skip

    def go(self) -> bool:
        """Train the remaining steps, or until a signal asks to leave; returns whether all steps are done."""
        o = self.o
        settings = SimpleNamespace(**vars(o) | {"model": f"{o.model} {o.task}", "how": o.algorithm, "batch": 0,
                                   "log": o.out / LOG, "tensorboard": None, "wandb": None,
                                   "peak_tflops": None})  # fmt: skip
        task: Any = SimpleNamespace(per_row=0)
        log = Log(settings, task, self.device, 1, self.done, True)  # type: ignore[arg-type]
        try:
            with Signals() as signals:
                if not self.done:
                    keep_tokenizer(self.policy, o.out)
                    self.ask_held_out(log)
                    self.save()
                for step in log.bar:
                    log.note(step, self.step(step, log))
                    self.done = step + 1
                    if self.done % o.eval_every == 0 or self.done == o.steps:
                        self.ask_held_out(log)
                    if self.done % o.save_every == 0 or self.done == o.steps or signals.asked:
                        self.save()
                    if signals.asked:
                        break
        finally:
            log.close()
        self.sampler.close()
        if self.done < o.steps:
            print(f"asked to leave after step {self.done} of {o.steps}: a checkpoint is in {o.out}", file=sys.stderr)
            return False
        write(self.policy, o.out)
        return True

    def ask_held_out(self, log: Log) -> None:
        """Ask the held-out questions; no step's time includes this."""
        found = evaluate(self.policy, self.held_out, self.o, self.sampler.sampler)
        self.last = {"updates": self.done * self.o.updates, **found}
        self.first = self.first or self.last
        log.note(max(0, self.done - 1), self.last)
        if not self.done and found["held_out_format"] == 0:
            print("warning: no answer has the form </think><answer>...</answer>, and until some have there is nothing "
                  "to learn from: tune the model on the form first, or ask for --warm", file=sys.stderr)  # fmt: skip

    def step(self, step: int, log: Log) -> dict[str, Any]:
        """Sample what the lag allows, update with the oldest batch; what the log says of the step."""
        begin, sent = clock(self.device), (self.sampler.weight_bytes, self.sampler.weight_seconds)
        cpu_seconds = time.process_time()
        self.sample(step)
        between = clock(self.device)
        batch = self.pending.popleft()
        lr = self.set_rate(step)
        trained = self.train(batch)
        end = clock(self.device)
        sampled, busy = self.sampler.spent()
        if not isinstance(self.sampler, There):
            busy = between - begin
        mask = batch["response_mask"]
        n_train = self.o.updates * int((mask.sum(-1) + mask.int().argmax(-1)).sum())  # a prompt is one token longer
        for name, value in (("seconds", end - begin), ("rollout_tokens", sampled), ("train_tokens", n_train)):
            self.spent[name] += value
        if hasattr(log.bar, "set_postfix"):
            log.bar.set_postfix(reward=f"{batch['stats']['reward']:.3f}", length=f"{batch['stats']['length']:.1f}")
        return trained | batch["stats"] | rates(sampled, busy, n_train, end - between, end - begin) | {
            "lr": lr,
            "lag": step * self.o.updates - batch["version"], "ranks": 1 + len(self.sampler.ranks),
            "weight_bytes": self.sampler.weight_bytes - sent[0],
            "weight_seconds": self.sampler.weight_seconds - sent[1],
            "cpu_seconds": time.process_time() - cpu_seconds,  # far below "seconds" where others use the processor
            "device": self.device.type, "memory_peak_bytes": memory_peak_bytes(self.device),
        }  # fmt: skip

    def set_rate(self, step: int) -> float:
        """Set the learning rate of a step, which rises linearly at first, and return it.

        AdamW's first steps have little to average over: they move every weight by about the whole rate.
        """
        lr = self.o.lr * min(1.0, (step + 1) / max(1, self.o.lr_warmup))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def sample(self, step: int) -> None:
        """Roll out the batches up to the one that is the lag ahead."""
        o = self.o
        taken = self.sampler.take(self.sampler.n_asked)
        ahead = range(step + len(self.pending) + len(taken), min(step + o.lag + 1, o.steps))
        if ahead:
            self.sampler.ask(ahead, step * o.updates)
        self.pending.extend(taken)
        self.pending.extend(self.sampler.take(int(not self.pending)))

    def train(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The updates with a batch, and how far the sampler was from the trainer before the first of them."""
        if self.reference is not None:
            batch["ref_log_probs"] = views(self.reference, batch, self.o)
        mask, drift = batch["response_mask"], dict[str, Any]()
        for _ in range(self.o.updates):
            found, log_probs, entropy = update(self.policy.model, self.optimizer, batch, self.o)
            if not drift:
                batch["old_log_probs"] = log_probs
                apart = (log_probs - batch["log_probs"])[mask].double()
                drift = {"entropy": float(entropy[mask].mean()), "drift": float(apart.abs().mean()),
                         "drift_max": float(apart.abs().max()), "drift_kl": float(-apart.mean())}  # fmt: skip
                if self.reference is not None:
                    drift["kl_to_reference"] = float((log_probs - batch["ref_log_probs"])[mask].mean())
        return found | drift

    def summary(self) -> str:
        """What the run did, for the end of its output."""
        first, last = (
            f"{e['held_out_right']:.1%} ({e['held_out_low']:.1%} to {e['held_out_high']:.1%})"
            for e in (self.first, self.last)
        )
        n, seconds = self.spent["rollout_tokens"], self.spent["seconds"]
        return f"held-out answers right: {first} before, {last} after {n:,} sampled tokens in {seconds:,.1f} s"


def rates(sampled: int, busy: float, trained: int, train_s: float, whole: float) -> dict[str, float]:
    """Tokens a second while sampler and trainer worked, and the share of a step in which each did not.

    Args:
        sampled, trained: Tokens.
        busy, train_s: Seconds in which the sampler and the trainer worked.
        whole: Seconds of the step.
    """
    return {
        "rollout_tokens_per_s": sampled / busy if sampled else 0.0,
        "train_tokens_per_s": trained / train_s,
        "rollout_idle": max(0.0, 1 - busy / whole),
        "train_idle": 1 - train_s / whole,
        "seconds": whole,
    }


def run_of(policy: Policy, o: argparse.Namespace) -> dict[str, Any]:
    """The description of a run that its checkpoints hold."""
    return describe(policy) | {"settings": {name: getattr(o, name) for name in HOW}}
