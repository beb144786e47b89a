"""What chapter 23 refuses before it computes: windows, heads, layers, caches and documents that do not fit."""

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

KINDS = ("full_attention", "sliding_attention", "latent_attention")


def check_window(window: int | None) -> None:
    """Reject a window in which not even the query itself is.

    Raises:
        ValueError: ``window`` is below 1; the message shows it.
    """
    if window is not None and window < 1:
        raise ValueError(f"window = {window}: expected at least 1, the query itself")


def check_heads(n_heads: int, n_groups: int) -> None:
    """Reject query heads that cannot share the key heads evenly.

    Raises:
        ValueError: ``n_heads`` is no multiple of ``n_groups``; the message shows both.
    """
    if n_heads % n_groups:
        raise ValueError(f"H = {n_heads} query heads are no multiple of G = {n_groups} key heads")


def check_kinds(layer_types: Sequence[str]) -> Sequence[str]:
    """The kinds of the layers, if all of them are known.

    Raises:
        ValueError: another kind; the message shows it.
    """
    for kind in layer_types:
        if kind not in KINDS:
            raise ValueError(f"layer kind {kind!r}: expected one of {', '.join(KINDS)}")
    return layer_types


def check_fit(pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Reject new positions that a cache's memories cannot take; positions are the last axis but one.

    Args:
        pairs: For each name, the memory and what shall be written into it. The first one says how many positions are
            new.

    Raises:
        ValueError: another batch, width or number of heads or positions; the message shows both shapes.
    """
    n_new = next(iter(pairs.values()))[1].shape[-2]
    for name, (memory, new) in pairs.items():
        expected = [*memory.shape[:-2], n_new, memory.shape[-1]]
        if list(new.shape) != expected:
            raise ValueError(f"{name} are {list(new.shape)}, this cache takes {expected}")


def document_lengths(cu_seqlens: Int[Tensor, " ends"], n_tokens: int | None = None) -> Int[Tensor, " n"]:
    """Length of each document of a packed row, int64, on the device of ``cu_seqlens``.

    Raises:
        ValueError: the ends do not begin with 0, fall, or do not end with ``n_tokens``; the message shows them.
    """
    ends = cu_seqlens.tolist()
    if cu_seqlens.ndim != 1 or ends[:1] != [0] or ends != sorted(ends):
        raise ValueError(f"cu_seqlens = {ends}: expected one row of ends, 0 first and never falling")
    if n_tokens is not None and ends[-1] != n_tokens:
        raise ValueError(f"cu_seqlens = {ends}: expected the number of tokens last, {n_tokens}")
    return cu_seqlens.diff().long()
