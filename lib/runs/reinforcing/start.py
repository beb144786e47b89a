"""The policy before its first reward: a model of a folder, or a tiny one, perhaps after some supervised steps."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lib.given.data.tasks import MARKERS, Characters, Question, supervised_batch
from lib.given.models.hidden import hidden_states, is_llama, output_weight
from lib.given.models.rewards import SMALL, TINY
from lib.llama import Llama
from lib.rewards import token_log_probs
from lib.runs.engine import export
from lib.runs.flags import UsageError
from lib.runs.serving.chat import ChatTemplate
from lib.runs.serving.models import load_plain
from lib.runs.serving.text import FileTokenizer, Tokenizer
from lib.training import AdamW

KEPT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
        "chat_template.jinja")  # fmt: skip
"""Files of a model's folder that are copied beside the trained one."""
THINK = MARKERS[0]
"""What every prompt of a task ends with."""
OWN = {"tiny": TINY, "small": SMALL}
"""Models that begin with random weights and read the tasks' characters."""


@dataclass(eq=False)
class Policy:
    """A model in training and its tokens.

    Attributes:
        model: Chapter 4's ``Llama`` or chapter 6's ``GPT2``, in float32.
        tokenizer: Its tokenizer.
        end_id: The token that ends a response.
        longest: Tokens of the longest prompt.
        source: The folder that it came from; None for one of ``OWN``.
        template: Of its chats. A model that has one is asked by it, as people will ask it, and writes ``<think>``.
    """

    model: nn.Module
    tokenizer: Tokenizer
    end_id: int
    source: Path | None = None
    longest: int = 0
    template: ChatTemplate | None = None

    @property
    def config(self) -> Any:
        return self.model.config

    def encode(self, question: Question) -> list[int]:
        """The tokens of a prompt."""
        if self.template is None:
            return self.tokenizer.encode(question.prompt)
        asked = {"role": "user", "content": question.prompt.removesuffix(THINK)}
        return self.tokenizer.encode_rendered(self.template.render([asked]))

    def encode_solution(self, question: Question) -> list[int]:
        """The tokens of a right response, without its end."""
        return self.tokenizer.encode_rendered((THINK if self.template else "") + question.solution)

    def decode(self, tokens: list[int]) -> str:
        """The text of a response, without its end."""
        return self.tokenizer.decode([token for token in tokens if token != self.end_id])


def find(model: str, tokenizer: str | None, out: Path) -> Policy:
    """The model that ``--model`` names, on the host.

    A tokenizer that names no end gets token 0 for it, which a tokenizer of bytes never needs for a text.

    Raises:
        UsageError: there is nothing of the kind.
    """
    if model in OWN:
        if tokenizer is not None:
            raise UsageError(
                f"--tokenizer {tokenizer} with --model {model}, which has its own: expected no --tokenizer"
            )
        path = out / export.TOKENIZER
        text = json.dumps(letters()) + "\n"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        return Policy(Llama(OWN[model]), FileTokenizer(str(path), [Characters().eos_id]), Characters().eos_id)
    served = load_plain(model, tokenizer)
    return Policy(served.model.requires_grad_(True), served.tokenizer, min(served.tokenizer.end_ids, default=0),
                  Path(model), template=served.template)  # fmt: skip


def letters() -> dict[str, Any]:
    """The tokenizer of chapter 29's page, as a ``tokenizer.json``."""
    made = Characters()
    kind = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ends = {made.pieces[i] for i in (made.pad_id, made.eos_id)}
    added = [{"id": made.ids[p], "content": p, "special": p in ends, **kind} for p in (*sorted(ends), *MARKERS)]
    return {"version": "1.0", "added_tokens": sorted(added, key=lambda token: token["id"]), "decoder": {"type": "Fuse"},
            "model": {"type": "BPE", "vocab": made.ids, "merges": []}}  # fmt: skip


def check_questions(policy: Policy, questions: list[Question], task: str, new_tokens: int) -> None:
    """Check that the model can read and answer a task's questions, and note the longest prompt.

    Raises:
        UsageError: its tokenizer loses a character, or its context is too short.
    """
    for question in questions:
        text = question.prompt + question.solution
        tokens = policy.tokenizer.encode(question.prompt) + policy.tokenizer.encode_rendered(question.solution)
        if policy.tokenizer.decode(tokens).strip() != text.strip():
            raise UsageError(
                f"--task {task}: the model's tokenizer cannot write {text!r}; expected another task or model"
            )
        policy.longest = max(policy.longest, len(policy.encode(question)))
    context = policy.config.context_len
    if policy.longest + new_tokens > context:
        raise UsageError(
            f"--new-tokens {new_tokens}: with prompts of {policy.longest} tokens that is more than the model's context "
            f"of {context}; expected at most {context - policy.longest}"
        )


def warm(policy: Policy, shown: Iterator[Question], n_steps: int, lr: float, n_rows: int = 32) -> float:
    """Supervised steps on a task's worked answers; returns the last loss, in nats a token."""
    optimizer, loss = AdamW(policy.model.parameters(), lr=lr), torch.zeros(())
    device = next(policy.model.parameters()).device
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20, (n_steps - step) / (0.3 * n_steps))
        rows = [(policy.encode(q), [*policy.encode_solution(q), policy.end_id]) for q in islice(shown, n_rows)]
        inputs, targets = (x.to(device) for x in supervised_batch(rows))
        counted = targets >= 0
        hidden = hidden_states(policy.model, inputs)[counted]
        loss = -token_log_probs(hidden, output_weight(policy.model), targets[counted])[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def describe(policy: Policy) -> dict[str, Any]:
    """What a checkpoint says about its model, as the other runs say it, so that it can be served."""
    kind = "LlamaTask" if is_llama(policy.model) else "GPT2Task"
    return {"task": kind, "config": asdict(policy.config), "data": "rewards"}


def keep_tokenizer(policy: Policy, out: Path) -> None:
    """Copy the tokenizer of the model's folder beside its checkpoints."""
    for name in KEPT if policy.source else ():
        found = next((f / name for f in (policy.source, policy.source.parent) if (f / name).is_file()), None)  # type: ignore[union-attr, operator]
        if found is not None and found.resolve() != (out / name).resolve():
            shutil.copyfile(found, out / name)


def write(policy: Policy, out: Path) -> None:
    """The trained model in Transformers' format, with the settings of the folder that it came from."""
    made = export.llama_for_transformers if is_llama(policy.model) else export.gpt2_for_transformers
    tensors, settings = made(policy.model.state_dict(), policy.config)
    path = policy.source and policy.source / "config.json"
    if path and path.is_file():
        ours = {name: settings[name] for name in ("dtype", "tie_word_embeddings")}
        settings = json.loads(path.read_text(encoding="utf-8")) | ours
        settings.pop("torch_dtype", None)
    elif settings.get("eos_token_id") is None:
        settings["eos_token_id"] = policy.end_id
    export.write(out, (tensors, settings))
