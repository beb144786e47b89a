"""Chapter 15's kernels inside Transformers' models: ``attn_implementation="workbook"``.

>>> register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="workbook", dtype=torch.bfloat16)

Where the kernels do not apply (a padding mask, dropout, another scale, one new token at a time, no Hopper GPU), PyTorch's
attention runs instead, as with ``attn_implementation="sdpa"``.
"""

import math
from typing import Any

from torch import Tensor, nn

from lib.fast.flash import fits_fast, flash_attention_fast

SPECIAL = ("position_bias", "softcap", "s_aux", "cache")  # what some models add to attention, and no kernel here has


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
    """
    t, s, d = query.shape[-2], key.shape[-2], query.shape[-1]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and dropout == 0 and 1 < t == s and all(kwargs.get(name) is None for name in SPECIAL)
    usual_scale = scaling is None or math.isclose(scaling, d**-0.5)
    if plain and usual_scale and key.shape == value.shape and fits_fast(query, key, value, causal):
        return flash_attention_fast(query, key, value, causal).transpose(1, 2), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    given: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
    return sdpa_attention_forward(module, query, key, value, attention_mask, **given)


def register(name: str = "workbook") -> None:
    """Make ``attn_implementation=name`` known to Transformers, with the masks of PyTorch's attention.

    Raises:
        ImportError: Transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, workbook_attention)
    AttentionMaskInterface.register(name, sdpa_mask)
