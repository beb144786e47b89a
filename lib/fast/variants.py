"""What attention may have beside a causal mask: a scale of its own, a window, a soft cap, sinks, and documents.

``lib.fast.attention.flash`` computes all of them in the kernels of ``lib.fast.attention.flash_portable``.
Chapter 23 explains each: its `grouped_attention` and `varlen_attention` compute the same numbers slowly.

A query sees one unbroken run of keys, whatever the mask is made of.
So a mask is two numbers a query, its first and its last key; and tiles outside of all runs are never read.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

FAR = 2**30  # more than any distance between two positions


class Variant(NamedTuple):
    """What a kernel computes beside plain attention; it is part of what a launch depends on."""

    scale: float | None = None  # of the scores; None is one over the square root of the width
    window: int | None = None  # how many keys a query sees at most on each side, itself included
    softcap: float | None = None
    has_sinks: bool = False
    n_documents: int = 0  # sequences with documents of their own: 0 without documents, 1 if all share them

    @property
    def has_band(self) -> bool:
        """Whether a query may see none of the first keys, so that tiles at both ends are skipped."""
        return self.window is not None or self.n_documents > 0

    @property
    def is_plain(self) -> bool:
        """Whether every kernel computes this, and not only the portable ones."""
        return not self.has_band and self.softcap is None and not self.has_sinks

    def reach(self, is_causal: bool) -> tuple[int, int]:
        """How many positions before and after its own a query sees, documents aside."""
        before = FAR if self.window is None else self.window - 1
        return before, 0 if is_causal else before


PLAIN = Variant()


class Documents(NamedTuple):
    """Where the document of each token begins and ends; made once for a batch, and used by every layer.

    ``spans`` ``[B, 2, T]`` or ``[1, 2, T]`` holds the first and the last position of each token's document.
    """

    spans: Int[Tensor, "b two t"]

    @classmethod
    def from_ids(cls, ids: Int[Tensor, "*b t"]) -> "Documents":
        """Documents from a number for each token: neighbours with equal numbers are in the same document.

        Args:
            ids: ``[B, T]``, or ``[T]`` for all sequences of a batch.

        Raises:
            ValueError: ``ids`` has other dimensions, or is not of integers.
        """
        if ids.ndim not in (1, 2) or ids.is_floating_point() or ids.is_complex():
            raise ValueError(f"documents {tuple(ids.shape)} of {ids.dtype}: expected integers [B, T] or [T]")
        ids = ids.view(-1, ids.shape[-1])
        at = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32).expand_as(ids)
        differs = ids[:, 1:] != ids[:, :-1]
        edge = torch.ones_like(ids[:, :1], dtype=torch.bool)
        first = torch.where(torch.cat([edge, differs], 1), at, 0).cummax(1).values
        last = torch.where(torch.cat([differs, edge], 1), at, ids.shape[1]).flip(1).cummin(1).values.flip(1)
        return cls(torch.stack([first, last], 1).to(torch.int32))

    @classmethod
    def from_lengths(cls, cu_seqlens: Int[Tensor, " ends"], length: int) -> "Documents":
        """Documents from their bounds in one packed sequence.

        Args:
            cu_seqlens: ``[N + 1]``, from 0: document n has the positions from ``cu_seqlens[n]`` up to
                ``cu_seqlens[n + 1]``, exclusive.
            length: Tokens of the packed sequence; those after the last bound are one more document.

        Raises:
            ValueError: ``cu_seqlens`` has another number of dimensions, or is not of integers.
        """
        if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
            raise ValueError(f"cu_seqlens {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}: expected integers [N + 1]")
        at = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        return cls.from_ids(torch.bucketize(at, cu_seqlens, right=True))


def check_variant(
    q: Tensor, k: Tensor, scale: float | None, window: int | None, softcap: float | None,
    sinks: Tensor | None, spans: Tensor | None,
) -> Variant:  # fmt: skip
    """The `Variant` of one call.

    Raises:
        ValueError: a value is not what `flash_attention_fast` expects; the message names it.
    """
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale = {scale}: expected a finite number")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window = {window}: expected a whole number of keys, 1 or more, or None")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap = {softcap}: expected a number above 0, or None")
    n_heads = q.shape[-3] if q.ndim > 2 else 1
    if sinks is not None and (sinks.shape != (n_heads,) or not sinks.is_floating_point()):
        raise ValueError(f"sinks {tuple(sinks.shape)} of {sinks.dtype}: expected a logit for each of {n_heads} heads")
    if spans is not None:
        n, t, s = q.shape[:-3].numel(), q.shape[-2], k.shape[-2]
        if t != s:
            raise ValueError(f"documents with {t} queries and {s} keys: expected as many keys as queries")
        if spans.dtype != torch.int32 or spans.shape not in ((1, 2, t), (n, 2, t)):
            shown = f"{tuple(spans.shape)} of {spans.dtype}"
            raise ValueError(f"documents with spans {shown}: expected int32 [{n}, 2, {t}] or [1, 2, {t}]")
    if any(x is not None and x.device != q.device for x in (sinks, spans)):
        raise ValueError(f"sinks or documents are not on {q.device}, where q is")
    # A window that reaches every key hides nothing.
    window = None if window is None or window >= max(q.shape[-2], k.shape[-2]) else window
    return Variant(scale, window, softcap, sinks is not None, 0 if spans is None else len(spans))
