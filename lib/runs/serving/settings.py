"""The settings of a folder in Transformers' format, by the kind of its model."""

import json
from pathlib import Path
from typing import Any

from lib.given.models import gpt2
from lib.runs.flags import UsageError
from lib.runs.serving import families
from lib.runs.serving.kinds import ALIKE, Kind, Problems, shown
from lib.runs.serving.ropes import ROPE, problems_of_rope

LLAMA_SIZES = {"vocab_size": "vocab_size", "hidden_size": "dim", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
               "num_key_value_heads": "n_kv_heads", "intermediate_size": "hidden_dim",
               "max_position_embeddings": "context_len"}  # fmt: skip
"""Names in the ``config.json`` of a Llama, and the fields of ``LlamaConfig`` that they set."""


def _problems_of_llama(settings: dict[str, Any]) -> Problems:
    yield from problems_of_rope(settings)
    if not isinstance(settings.get("tie_word_embeddings") or False, bool):
        yield f"config.json: tie_word_embeddings = {shown(settings['tie_word_embeddings'])}, expected true or false"
    dim: Any = settings.get("hidden_size")
    n_heads: Any = settings.get("num_attention_heads")
    n_kv_heads, head_dim, types = (settings.get(name) for name in ("num_key_value_heads", "head_dim", "layer_types"))
    if all(type(size) is int and size > 0 for size in (dim, n_heads, n_kv_heads or n_heads)):
        if dim % n_heads or n_heads % (n_kv_heads or n_heads):
            sizes = f"hidden_size = {dim}, num_attention_heads = {n_heads}, num_key_value_heads = {n_kv_heads}"
            yield f"config.json: {sizes}, expected each to be a multiple of the next"
        if head_dim is not None and head_dim != dim // n_heads:
            yield f"config.json: head_dim = {shown(head_dim)}, this model has {dim // n_heads} = {dim} // {n_heads}"
    if types and (not isinstance(types, list) or any(kind not in ("full_attention", "attention") for kind in types)):
        yield f"config.json: layer_types = {shown(types)}, this model has 'full_attention' in every layer"


KINDS = families.KINDS | {
    "llama": Kind(
        architectures=("LlamaForCausalLM", "LLaMAForCausalLM"), sizes=tuple(LLAMA_SIZES),
        optional=("num_key_value_heads",),
        eps="rms_norm_eps", end_id=2, more=_problems_of_llama,
        read=("tie_word_embeddings", "head_dim", "layer_types", "rope_theta", *ROPE),
        fixed=ALIKE | {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,),
                       "partial_rotary_factor": (1.0, 1, None), "sliding_window": (None,),
                       "rope_interleaved": (False,)},
    ),
    "gpt2": Kind(
        architectures=("GPT2LMHeadModel", "GPT2Model"), sizes=tuple(gpt2.FIELDS), eps="layer_norm_epsilon",
        end_id=50_256,
        read=("n_inner",), fixed=ALIKE | gpt2.FIXED,
    ),
}  # fmt: skip
"""By ``model_type``. ``lib.gpt2.load_pretrained`` compares a GPT-2's ``n_inner`` and tensors."""


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        UsageError: it cannot be read, is no JSON, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds {shown(found)}, expected an object")
    return found


def read_settings(folder: Path) -> tuple[str, dict[str, Any]]:
    """The kind of a folder's model and its settings.

    Raises:
        UsageError: something in ``config.json`` does not fit; one line names each setting,
            its value and what was expected.
    """
    settings = read_json(folder / "config.json")
    named = settings.get("architectures") or []
    if not isinstance(named, list):
        raise UsageError(f"--model {folder}: config.json: architectures = {shown(named)}, expected a list")
    kind = settings.get("model_type")
    if kind is None:  # before 2020 only the class of the weights was named, if anything
        kind = next((name for name, known in KINDS.items() if any(one in known.architectures for one in named)), None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise UsageError(f"--model {folder}: model_type is {shown(kind)}, expected {' or '.join(sorted(KINDS))}")
    if (folder / "adapter_config.json").exists():
        text = "adapter_config.json: its weights would not be used; expected a folder into which the adapter is merged"
        raise UsageError(f"--model {folder}: {text}")
    problems = list(KINDS[kind].problems(settings))
    if problems:
        raise UsageError(f"--model {folder}: {one_line(problems)}")
    return kind, settings


def read_end_ids(folder: Path, kind: str, settings: dict[str, Any]) -> list[int]:
    """The tokens that end a text: of ``generation_config.json``, else of ``config.json``, else Transformers' default.

    Raises:
        UsageError: they are no tokens.
    """
    files = {"config.json": {"eos_token_id": KINDS[kind].end_id} | settings}
    if (folder / "generation_config.json").exists():
        files["generation_config.json"] = read_json(folder / "generation_config.json")
    found: list[int] = []
    for name, values in files.items():
        if "eos_token_id" in values:
            ends = values["eos_token_id"]
            found = ends if isinstance(ends, list) else [] if ends is None else [ends]
            if not all(type(token) is int for token in found):
                raise UsageError(f"--model {folder}: {name}: eos_token_id = {shown(ends)}, expected integers")
    return found


def one_line(problems: list[str], most: int = 3) -> str:
    """The first problems in one line, and how many more there are."""
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(" ".join(problem.split())[:300] for problem in problems[:most]) + more
