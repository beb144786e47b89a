"""The settings of a folder in Transformers' format: each one that changes numbers is either
honoured or refused by its name.

A name that is not in these tables is refused too, unless its value asks for nothing: an older or newer library, or
another model's code, may give it a meaning.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.given.models import gpt2
from lib.runs.flags import UsageError

INERT = frozenset(
    """
    architectures attention_dropout attention_probs_dropout_prob attn_pdrop begin_suppress_tokens bad_words_ids
    bos_token_id chunk_size_feed_forward classifier_dropout cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    hidden_dropout hidden_dropout_prob id2label initializer_range is_decoder is_llama_config label2id length_penalty
    max_length max_new_tokens max_sequence_length min_length model_max_length model_type n_ctx name_or_path
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_past output_scores pad_token_id predict_special_tokens prefix pretraining_tp
    problem_type remove_invalid_values reorder_and_upcast_attn repetition_penalty resid_pdrop return_dict
    return_dict_in_generate sep_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tie_last_hidden_states tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
""".split()  # noqa: SIM905
)
"""Settings without influence on the logits: of training, of Transformers' ``generate``, of other heads, and mere notes.

``pretraining_tp`` and ``reorder_and_upcast_attn`` change the order of a computation, not what is computed.
"""
ROPE = ("rope_parameters", "rope_scaling")  # the newer name, and the older
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Settings of Llama 3.1's frequencies, all of which must be there; ``lib.attention_variants`` has the same names."""
LLAMA_SIZES = {"vocab_size": "vocab_size", "hidden_size": "dim", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
               "num_key_value_heads": "n_kv_heads", "intermediate_size": "hidden_dim",
               "max_position_embeddings": "context_len"}  # fmt: skip
"""Names in the ``config.json`` of a Llama, and the fields of ``LlamaConfig`` that they set."""
Problems = Iterator[str]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What the server knows about the settings of one kind of model.

    Attributes:
        architectures: Classes of Transformers whose weights it can read.
        sizes: Names of positive integers.
        optional: Those among them that may be absent or null.
        eps: Name of the number that every norm adds.
        fixed: Settings that the model cannot change: for each the values with which Transformers computes the same, its
            default first. null is the same as a default that says no.
        end_id: Transformers' default for ``eos_token_id``.
        more: Further problems of all settings together.
    """

    architectures: tuple[str, ...]
    sizes: tuple[str, ...]
    eps: str
    fixed: dict[str, tuple[Any, ...]]
    end_id: int
    optional: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    more: Callable[[dict[str, Any]], Problems] = lambda settings: iter(())

    def knows(self, name: str) -> bool:
        """Whether a setting is read, checked, or known to change no number."""
        return name.startswith("_") or name in {*INERT, *self.sizes, self.eps, *self.fixed, *self.read}

    def problems(self, settings: dict[str, Any]) -> Problems:
        """What is wrong with the settings: the value found, and what was expected."""
        for name in self.sizes:
            value = settings.get(name)
            if value is None and name in self.optional:
                continue
            if name not in settings:
                yield f"config.json has no {name}"
            elif type(value) is not int or value < 1:
                yield f"config.json: {name} = {shown(value)}, expected a positive integer"
        eps = settings.get(self.eps, 0.0)
        if not is_number(eps) or eps < 0:
            yield f"config.json: {self.eps} = {shown(eps)}, expected a number of at least 0"
        for name, allowed in self.fixed.items():
            value = settings.get(name, allowed[0])
            if not any(value == one and type(value) is type(one) for one in (*allowed, allowed[0] or None)):
                yield f"config.json: {name} = {shown(value)}, this model has {allowed[0]!r}"
        for name in settings.get("architectures") or ():
            if name not in self.architectures:
                yield f"config.json: architectures has {name!r}, expected {self.architectures[0]!r}"
        yield from self.more(settings)
        for name, value in settings.items():
            if not self.knows(name) and value not in (None, False, 0, "", [], {}):
                yield (
                    f"config.json: {name} = {shown(value)} is unknown to this server, "
                    "and may change what the model computes"
                )


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def rope_theta(settings: dict[str, Any]) -> float:
    """Base of a Llama's rotary frequencies.

    It stands beside the other settings, or, since Transformers 5, among those of the rotation.
    """
    found = (settings.get(name) for name in ROPE)
    bases = [rope["rope_theta"] for rope in found if rope and rope.get("rope_theta") is not None]
    return next(iter(bases), None) or settings.get("rope_theta") or 10_000.0


def llama3_scaling(settings: dict[str, Any]) -> dict[str, Any] | None:
    """How a Llama 3.1 slows its rotary frequencies down, by the names in ``LLAMA3``; None for other Llamas."""
    ropes = [settings.get(name) or {} for name in ROPE]
    return next(({key: rope[key] for key in LLAMA3} for rope in ropes if _is_llama3(rope)), None)


def _is_llama3(rope: dict[str, Any]) -> bool:
    types = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]  # the newer name, and the older
    return bool(types) and all(kind == "llama3" for kind in types)


def _problems_of_llama(settings: dict[str, Any]) -> Problems:
    yield from _problems_of_rope(settings)
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


def _problems_of_scaling(rope: dict[str, Any]) -> Problems:
    """What is wrong with the frequencies' settings, their base aside; each text follows the object's name."""
    scaled = _is_llama3(rope)
    low: Any = rope.get("low_freq_factor")
    high: Any = rope.get("high_freq_factor")
    for key in LLAMA3 if scaled else ():
        if rope.get(key) is None:
            yield f" of type llama3 has no {key}"
        elif not is_number(rope[key]) or rope[key] <= 0:
            yield f".{key} = {shown(rope[key])}, expected a number above 0"
    if scaled and is_number(low) and is_number(high) and low >= high:
        yield f": low_freq_factor = {low}, high_freq_factor = {high}, expected the first to be smaller"
    for key, value in rope.items():
        if key in ("rope_type", "type"):
            if not scaled and value not in (None, "default"):
                yield f".{key} = {shown(value)}, expected 'default' or 'llama3', and the same in rope_type and type"
        elif key == "partial_rotary_factor":
            if value not in (None, 1.0):
                yield f".{key} = {shown(value)}, this model has 1.0"
        elif value is not None and key not in ("rope_theta", *(LLAMA3 if scaled else ())):
            yield f".{key} = {shown(value)}, this model has no such setting"


def _problems_of_rope(settings: dict[str, Any]) -> Problems:
    bases = {"rope_theta": settings.get("rope_theta")}
    if all(settings.get(name) for name in ROPE):
        yield f"config.json has {' and '.join(ROPE)}, expected one of them"
    for name in ROPE:
        rope = settings.get(name) or {}
        if not isinstance(rope, dict):
            yield f"config.json: {name} = {shown(rope)}, expected an object"
            continue
        bases[f"{name}.rope_theta"] = rope.get("rope_theta")
        yield from (f"config.json: {name}{problem}" for problem in _problems_of_scaling(rope))
    given = {key: value for key, value in bases.items() if value is not None}
    for key, value in given.items():
        if not is_number(value) or value <= 0:
            yield f"config.json: {key} = {shown(value)}, expected a number above 0"
    if len({repr(value) for value in map(float, filter(is_number, given.values()))}) > 1:
        yield f"config.json: {' and '.join(f'{key} = {value!r}' for key, value in given.items())} contradict each other"


ALIKE: dict[str, tuple[Any, ...]] = {"quantization_config": (None,), "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
                                     "add_cross_attention": (False,), "auto_map": (None,)}  # fmt: skip
KINDS = {
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


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


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
