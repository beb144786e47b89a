"""A model and the small one that drafts for it: both must mean the same by a token."""

import json
from pathlib import Path
from typing import Any

import torch

from lib.runs.flags import UsageError
from lib.runs.memory import check_need
from lib.runs.serving import models

PROMPT = "prompt"
"""The draft that needs no model."""


def check_draft(options: Any) -> None:
    """Refuse a draft of other tokens than the model's, before any weights are read.

    Raises:
        UsageError: there is no such folder, or its tokenizer is another one.
    """
    folder = Path(options.draft)
    if options.draft != "tiny" and not folder.is_dir():
        raise UsageError(
            f"--draft {options.draft}: no such folder; expected {PROMPT}, or the folder of a model with the tokenizer "
            f"of --model {options.model}"
        )
    theirs, ours = (tokens_of(name, options.tokenizer) for name in (options.draft, options.model))
    if theirs == ours:
        return
    n = sum(ours.get(token) == number for token, number in theirs.items())
    raise UsageError(
        f"--draft {options.draft}: its tokenizer is not that of --model {options.model}: of its {len(theirs)} tokens "
        f"{n} have the same number there; expected a draft with the same tokenizer"
    )


def tokens_of(model: str, tokenizer: str | None) -> dict[str, int]:
    """The number of each token that a model reads and writes, by its text; bytes for a folder without a tokenizer."""
    folder = Path(model)
    places = [folder / "tokenizer.json", folder.resolve().parent / "tokenizer.json"]
    if (folder / "config.json").is_file():  # a run's best checkpoint is in a subfolder, a model in Transformers' not
        del places[1]
    path = next((path for path in places if path.is_file()), None) if model != "tiny" and not tokenizer else None
    if path is None:
        return {tokenizer or "bytes": 0}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        words = read["model"]["vocab"]
        numbers = dict(words) if isinstance(words, dict) else {word: i for i, (word, _) in enumerate(words)}
        return numbers | {added["content"]: added["id"] for added in read.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{path} is no tokenizer.json: {type(error).__name__}: {error}"
        raise UsageError(" ".join(text.split())[:300]) from None


def load_models(options: Any, dtype: torch.dtype, device: torch.device) -> tuple[models.Served, Any]:
    """The model that is served, and the one that drafts for it; None for the latter if no model does.

    Raises:
        UsageError: one cannot be loaded, they are no pair, or both do not fit into memory.
    """
    draft, drafting = options.draft if options.draft != PROMPT else None, None
    if draft:
        check_draft(options)
    n_bytes = models.weight_bytes(options.model) + (models.weight_bytes(draft) if draft else 0)
    check_need(n_bytes, torch.device("cpu"), f"--model {options.model}: weights", ["--model"])
    if draft:
        try:
            drafting = models.load(draft, None, options.tokenizer, dtype, device).model
        except UsageError as error:
            raise UsageError(str(error).replace("--model", "--draft", 1)) from None
        check_layers(drafting.config, options, draft)
    return models.load(options.model, options.name, options.tokenizer, dtype, device, options.quantize), drafting


def check_layers(config: Any, options: Any, model: str) -> None:
    """Raise a ``UsageError`` if a model that takes part in drafting has linear layers."""
    if "linear_attention" in getattr(config, "layer_types", ()):
        raise UsageError(
            f"--draft {options.draft}: {model} has linear layers, whose state cannot take back a drafted token; "
            "expected no --draft" + ("" if model == options.model else f", or {PROMPT}")
        )
