"""Chapter 15's kernels inside Transformers' models: ``attn_implementation="workbook"``.

>>> register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="workbook", dtype=torch.bfloat16)

Where the kernels do not apply (a padding mask, dropout, another scale, one new token at a time, no Hopper GPU),
PyTorch's attention runs instead, as with ``attn_implementation="sdpa"``.
Models that PyTorch's attention cannot compute are refused.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lib.fast.attention.flash import fits_fast, flash_attention_fast

SPECIAL = ("position_bias", "softcap", "cache")  # what some models add to attention, and no kernel here has
IGNORED = ("s_aux", "sinks", "indices", "block_indices")  # what other models add, and PyTorch's attention would ignore
USE_EAGER = "PyTorch's attention would compute something else; load the model with attn_implementation='eager'"


def workbook_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention with the signature of Transformers' interface.

    Args:
        module: The layer; its ``is_causal`` is used if the argument is None.
        query: ``[B, H, T, D]``.
        key, value: ``[B, G, S, D]``.
        attention_mask: None if the mask is causal, or if there is none.

    Returns:
        ``[B, T, H, D]``, and None in place of the weights.

    Raises:
        ValueError: the model adds something to attention that PyTorch's attention would ignore,
            such as attention sinks.
    """
    ignored = [name for name in IGNORED if kwargs.get(name) is not None]
    if ignored:
        raise ValueError(f"{type(module).__name__} passes {', '.join(ignored)} to its attention: {USE_EAGER}")
    t, s, d = query.shape[-2], key.shape[-2], query.shape[-1]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and dropout == 0 and 1 < t == s and all(kwargs.get(name) is None for name in SPECIAL)
    usual_scale = scaling is None or math.isclose(scaling, d**-0.5)
    if plain and usual_scale and key.shape == value.shape and fits_fast(query, key, value, causal):
        return flash_attention_fast(query, key, value, causal).transpose(1, 2), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    given: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
    return sdpa_attention_forward(module, query, key, value, attention_mask, **given)


def workbook_mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """A mask for PyTorch's attention: boolean, or None if ``is_causal`` describes it completely.

    Some of Transformers' models compute attention by themselves, whatever ``attn_implementation`` is,
    and add the mask to their scores.
    For them a boolean mask, or None, would give wrong logits.
    Transformers marks them as not supporting "sdpa".

    Raises:
        ValueError: the model of this ``config`` does not support PyTorch's attention.
    """
    from transformers.masking_utils import sdpa_mask

    if not torch.compiler.is_compiling():  # the compiler can't look into Transformers' table of models
        refuse_model(config)
    if getattr(config, "num_kv_shared_layers", 0):
        kwargs["allow_is_causal_skip"] = False  # Gemma 4's last layers drop queries: they can cut a mask, but not None
    return sdpa_mask(*args, config=config, **kwargs)


def refuse_model(config: Any) -> None:
    """Raise a ``ValueError`` if Transformers' model for this ``config`` does not support PyTorch's attention."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    found = MODEL_MAPPING.get(type(config), None) or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    for model in found if isinstance(found, tuple | list) else (found,):
        if model is not None and not model._supports_sdpa:
            raise ValueError(f"{model.__name__} has an attention of its own: {USE_EAGER}")


def register(name: str = "workbook") -> None:
    """Make ``attn_implementation=name`` known to Transformers, with the masks of PyTorch's attention.

    Raises:
        ImportError: Transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, workbook_attention)
    AttentionMaskInterface.register(name, workbook_mask)
