"""Chapter 15's kernels inside Transformers' models: ``attn_implementation="workbook"``.

>>> register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="workbook", dtype=torch.bfloat16)

The kernels take sliding windows, packed documents, padding, soft caps and sinks.
Where they do not apply (dropout, one new token at a time, a mask of another kind, no Hopper GPU), PyTorch computes
the same: by its own attention, as with ``attn_implementation="sdpa"``, or step by step where a soft cap or sinks
are more than that has.
Models that none of them can compute are refused.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lib.fast.attention.flash import fits_fast, flash_attention_fast
from lib.fast.masks import Band, BandMask, band_of, with_padding
from lib.fast.variants import FAR

SPECIAL = ("position_bias", "cache")  # what some models add to attention, and no kernel here has
IGNORED = ("sinks", "indices", "block_indices")  # what other models add, and PyTorch's attention would ignore
USE_EAGER = "PyTorch's attention would compute something else; load the model with attn_implementation='eager'"


def workbook_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention with the signature of Transformers' interface.

    Args:
        module: The layer; its ``is_causal`` is used if the argument is None.
        query: ``[B, H, T, D]``.
        key, value: ``[B, G, S, D]``.
        attention_mask: What `workbook_mask` returned; None if the mask is causal, or if there is none.
        dropout: Probability with which a weight is dropped.
        scaling: Factor of the scores; None is ``D ** -0.5``.
        is_causal: Whether a mask of None is causal.
        softcap: Of the scores, as in Gemma 2.
        s_aux: Attention sinks ``[H]``, as in gpt-oss.
        kwargs: What else a model passes. ``sliding_window`` is not read: the mask has it.

    Returns:
        ``[B, T, H, D]``, and None in place of the weights.

    Raises:
        ValueError: the model adds something to attention that PyTorch's attention would ignore,
            such as the keys that an index chose.
    """
    ignored = [name for name in IGNORED if kwargs.get(name) is not None]
    if ignored:
        raise ValueError(f"{type(module).__name__} passes {', '.join(ignored)} to its attention: {USE_EAGER}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    band, documents = Band(after=0) if causal else Band(), None
    if isinstance(attention_mask, BandMask):
        band, documents = attention_mask.band, attention_mask.documents
    known = attention_mask is None or isinstance(attention_mask, BandMask)
    is_plain = dropout == 0 and all(kwargs.get(name) is None for name in SPECIAL)
    fits = 1 < query.shape[-2] == key.shape[-2] and key.shape[:-1] == value.shape[:-1]
    if known and is_plain and fits and fits_fast(query, key, value, band.after == 0):
        options: dict[str, Any] = {"window": band.window, "softcap": softcap, "sinks": s_aux, "documents": documents}
        scale = None if scaling == query.shape[-1] ** -0.5 else scaling
        return flash_attention_fast(query, key, value, band.after == 0, scale=scale, **options).transpose(1, 2), None
    mask = attention_mask.dense() if isinstance(attention_mask, BandMask) else attention_mask
    if softcap is not None or s_aux is not None:
        return step_by_step(query, key, value, mask, causal, dropout, scaling, softcap, s_aux), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    given: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
    return sdpa_attention_forward(module, query, key, value, mask, **given)


def step_by_step(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float,
    scaling: float | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention with a soft cap and sinks and all scores in memory; returns ``[B, T, H, D]``.

    A causal mask begins with the first key, as PyTorch's, and one query sees every key.
    """
    t, h = query.shape[-2], query.shape[-3]
    key, value = (x.repeat_interleave(h // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and causal and t > 1:
        mask = torch.ones(t, key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, torch.float32).to(value.dtype)[..., : key.shape[-2]]
    return (functional.dropout(weights, dropout) @ value).transpose(1, 2)


def workbook_mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """A mask for `workbook_attention`: None if ``is_causal`` describes it completely, a `BandMask`, or a matrix.

    Some of Transformers' models compute attention by themselves, whatever ``attn_implementation`` is,
    and add the mask to their scores.
    For them a boolean mask, or None, would give wrong logits.
    Transformers marks them as supporting neither "sdpa" nor FlexAttention.

    Raises:
        ValueError: the model of this ``config`` computes attention by itself.
    """
    from transformers.masking_utils import sdpa_mask

    if getattr(config, "num_kv_shared_layers", 0):
        kwargs["allow_is_causal_skip"] = False  # Gemma 4's last layers drop queries: they can cut a mask, but not None
    if torch.compiler.is_compiling():  # the compiler can't look into Transformers' table of models
        return sdpa_mask(*args, config=config, **kwargs)
    refuse_model(config)
    band = None if args else _band(**kwargs)
    if band is None:
        return sdpa_mask(*args, config=config, **kwargs)
    shape = kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"]
    return BandMask(shape, kwargs.get("device", "cpu"), band, partial(_whole_mask, config, kwargs))


def _whole_mask(config: Any, kwargs: dict[str, Any]) -> Any:
    """The mask as a matrix in any case."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(config=config, **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def _band(
    q_length: int = 0, kv_length: int = 0, q_offset: Any = 0, kv_offset: Any = 0, mask_function: Any = None,
    attention_mask: Tensor | None = None, use_vmap: bool = False, **kwargs: Any,
) -> Band | None:  # fmt: skip
    """What a mask says, if the kernels have it, and None or a matrix would say it worse."""
    starts_at_zero = type(q_offset) is int and type(kv_offset) is int and q_offset == kv_offset == 0
    band = None if use_vmap or not starts_at_zero or not 1 < q_length == kv_length else band_of(mask_function)
    if band is None or not band.has_shape:
        return None
    if band.before >= kv_length - 1:  # no key is so far away
        band = band._replace(before=FAR, after=FAR if band.after else 0)
    if attention_mask is not None and not attention_mask.all():
        return with_padding(band, attention_mask.bool()) if attention_mask.shape[-1] == kv_length else None
    may_skip = (
        kwargs.get("allow_is_causal_skip", True) if band.after == 0 else kwargs.get("allow_is_bidirectional_skip")
    )
    return None if may_skip and band.window is None and band.ids is None else band


def refuse_model(config: Any) -> None:
    """Raise a ``ValueError`` if Transformers' model for this ``config`` computes attention by itself.

    A model that supports FlexAttention through the interface does not, even where a soft cap or sinks keep it from
    PyTorch's other attention.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    found = MODEL_MAPPING.get(type(config), None) or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    for model in found if isinstance(found, tuple | list) else (found,):
        if model is None or (model._supports_flex_attn and model._supports_attention_backend):
            continue
        if not model._supports_sdpa:
            raise ValueError(f"{model.__name__} has an attention of its own: {USE_EAGER}")


def register(name: str = "workbook") -> None:
    """Make ``attn_implementation=name`` known to Transformers, with the masks of PyTorch's attention.

    Raises:
        ImportError: Transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, workbook_attention)
    AttentionMaskInterface.register(name, workbook_mask)
