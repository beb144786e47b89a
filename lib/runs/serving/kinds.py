"""The settings of a folder in Transformers' format: each one that changes numbers is either
honoured or refused by its name.

A name that is not in these tables is refused too, unless its value asks for nothing: an older or newer library, or
another model's code, may give it a meaning.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
ALIKE: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,), "is_encoder_decoder": (False,), "pruned_heads": ({},),
    "add_cross_attention": (False,), "auto_map": (None,),
}  # fmt: skip
"""Settings that no kind of model here can change."""
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
        read: Settings that the model reads, and that ``more`` checks.
        end_id: Transformers' default for ``eos_token_id``; None if it has none.
        more: Further problems of all settings together.
    """

    architectures: tuple[str, ...]
    sizes: tuple[str, ...]
    eps: str
    fixed: dict[str, tuple[Any, ...]]
    end_id: int | None
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


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
