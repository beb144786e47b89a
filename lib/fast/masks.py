"""Masks of Transformers as the fast kernels take them: a window, documents, and padding, without a matrix.

Transformers describes a mask by a function of two positions, built from a few parts, and PyTorch's attention needs
the whole matrix of its values.
A `BandMask` keeps what the parts say.
Any operation on it but ours first makes the matrix, so that code that knows nothing of it stays right.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lib.fast.variants import FAR, Documents


class Band(NamedTuple):
    """How far a query sees, and in which document it is: numbers ``[B, T]``, or None."""

    before: int = FAR
    after: int = FAR
    ids: Tensor | None = None

    @property
    def window(self) -> int | None:
        """As `flash_attention_fast` takes it."""
        return None if self.before >= FAR else self.before + 1

    @property
    def has_shape(self) -> bool:
        """Whether `flash_attention_fast` computes it: causal, or as far on both sides."""
        return self.after in (0, self.before)


def held_by(function: Callable) -> dict[str, Any]:
    """What a function made by another one remembers, by name."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def band_of(function: Callable) -> Band | None:
    """What a mask function of Transformers says; None if one of its parts is not known here."""
    if getattr(function, "__module__", None) != "transformers.masking_utils" or not hasattr(function, "__code__"):
        return None
    held, name = held_by(function), function.__qualname__.split(".")[0]
    if name == "causal_mask_function":
        return Band(after=0)
    if name == "bidirectional_mask_function":
        return Band()
    if name == "sliding_window_overlay":
        return Band(before=held["sliding_window"] - 1)
    if name == "sliding_window_bidirectional_overlay":  # the distance may equal the window
        return Band(held["sliding_window"], held["sliding_window"])
    if name == "packed_sequence_mask_function":
        return Band(ids=held["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence":  # distances inside of a document stay the same
        return band_of(held["mask_function"])
    if name == "and_masks":
        return _both([band_of(part) for part in held["mask_functions"]])
    return None


def _both(bands: list[Band | None]) -> Band | None:
    known = [band for band in bands if band is not None]
    ids = [band.ids for band in known if band.ids is not None]
    if len(known) < len(bands) or len(ids) > 1:
        return None
    return Band(min(b.before for b in known), min(b.after for b in known), ids[0] if ids else None)


def with_padding(band: Band, padding: Tensor) -> Band | None:
    """A band in which real tokens, True in ``padding`` ``[B, T]``, see only real tokens.

    Padding sees padding: nobody reads what attention returns there.
    None if the real tokens of a sequence are no unbroken run, or if there are documents too.
    """
    begins = padding.clone()
    begins[:, 1:] &= ~padding[:, :-1]
    if band.ids is not None or (begins.sum(1) > 1).any():
        return None
    return band._replace(ids=padding.int())


class BandMask(Tensor):
    """A boolean mask ``[B, 1, T, T]`` that is a matrix only once someone looks at it.

    Args:
        shape: Of the matrix.
        device: Where the matrix is made.
        band: What the mask says.
        make: Makes the matrix.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape, device, band, make):
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)  # type: ignore[attr-defined]

    def __init__(self, shape: tuple[int, ...], device: torch.device | str, band: Band, make: Callable[[], Tensor]):
        self.band, self.make = band, make
        self.documents = None if band.ids is None else Documents.from_ids(band.ids)
        self.matrix: Tensor | None = None

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"BandMask({tuple(self.shape)}, before={self.band.before}, after={self.band.after})"

    def dense(self) -> Tensor:
        """The matrix, True where a query sees a key."""
        if self.matrix is None:
            self.matrix = self.make()
        return self.matrix

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, BandMask) else x, (args, kwargs or {}))
        return func(*args, **kwargs)
