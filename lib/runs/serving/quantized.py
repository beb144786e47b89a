"""Weights of 4 or 8 bits in place of those of a served model, and what they change in its scores."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from lib.fast.parts.narrow import Narrow, NarrowLinear
from lib.low_precision import absmax_scale, pack_int4, quantize, quantize_int4
from lib.runs.flags import UsageError
from lib.runs.memory import free_bytes, shown
from lib.runs.serving.packed import Cost, Portable, compare, text_for

FORMATS = ("int4", "float8")
GROUPS = (128, 64, 32)
"""Weights of a row that share a scale and a zero point in int4: the largest of these that divides the row."""
ROOM = 0.8  # of a device's free memory, which the wide weights may take while the cost is measured


def narrow(weight: torch.Tensor, kind: str) -> Narrow:
    """A weight ``[N, K]`` in a format of chapter 20: levels in groups of a row, or float8 with a scale for each row.

    Raises:
        ValueError: a weight is not finite, or for int4 no size of a group divides K.
    """
    if not weight.isfinite().all():
        raise ValueError("has weights that are not finite")
    if kind == "float8":
        scale = absmax_scale(weight, torch.float8_e4m3fn, 1)
        return Narrow(quantize(weight, scale, torch.float8_e4m3fn), scale, None)
    group = next((size for size in GROUPS if weight.shape[1] % size == 0), None)
    if group is None:
        raise ValueError(f"has rows of {weight.shape[1]} weights, expected a multiple of {GROUPS[-1]}")
    levels, scale, zero = quantize_int4(weight, group)
    halves = levels.unflatten(1, (-1, 2, group // 2))
    return Narrow(pack_int4(halves.transpose(2, 3).flatten(1)), scale, zero)


def matrices(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The weights that become narrow: the linear layers in the model's blocks, not the tables and the output layer."""
    return ((name, m) for name, m in model.named_modules() if type(m) is nn.Linear and "." in name)


class Quantized(NamedTuple):
    """What narrow weights take and cost.

    Attributes:
        n_bytes: Of the blocks' weights, with their scales.
        wide_bytes: Of the same weights before.
        cost: What changed in the scores of a text; None where the device has no room for the wide weights.
    """

    n_bytes: int
    wide_bytes: int
    cost: Cost | None

    def notes(self, kind: str, dtype: torch.dtype) -> tuple[str, ...]:
        """What to say of it at the start, a line each."""
        wide = f"in {str(dtype).removeprefix('torch.')} they would take {shown(self.wide_bytes)}"
        unknown = f"how {kind} changes the scores was not measured: there is no room for the wide weights"
        said = f"the blocks' weights take {shown(self.n_bytes)}, in {kind}; {wide}"
        return said, unknown if self.cost is None else str(self.cost)


@torch.no_grad()
def quantize_model(model: nn.Module, kind: str, tokenizer: Any, dtype: torch.dtype, device: torch.device) -> Quantized:
    """Move a model to a device with its blocks' weights in int4 or float8, made from those of ``dtype``.

    Where the wide weights fit into the device's memory too, the scores of a text are computed with both.

    Raises:
        UsageError: the model has weights that this format does not hold, or the device cannot read it.
    """
    check(model, kind, device)
    names, tokens, wide = [name for name, _ in matrices(model)], text_for(model, tokenizer), None
    wide_bytes = sum(layer.weight.numel() for _, layer in matrices(model)) * dtype.itemsize
    whole_bytes = sum(w.numel() for w in model.parameters()) * dtype.itemsize
    if device.type == "cpu" or whole_bytes < ROOM * free_bytes(device):
        wide = Portable(model.to(device, dtype).eval(), len(tokens), None).scores(tokens)
    for name in names:
        layer: Any = model.get_submodule(name)
        bias = None if layer.bias is None else layer.bias.detach().to(device, dtype)
        try:
            made = NarrowLinear(narrow(layer.weight.detach().to(device, dtype), kind), bias)
        except ValueError as error:
            raise UsageError(f"--quantize {kind}: {name} {error}") from None
        model.set_submodule(name, made)
    model.to(device, dtype).eval()
    n_bytes = sum(x.nbytes for m in model.modules() if isinstance(m, NarrowLinear) for x in m.weights if x is not None)
    cost = None if wide is None else compare(wide, Portable(model, len(tokens), None).scores(tokens))
    return Quantized(n_bytes, wide_bytes, cost)


def check(model: Any, kind: str, device: torch.device) -> None:
    """Raise a ``UsageError`` for a model whose blocks are more than linear layers, and for float8 on an older GPU."""
    if getattr(model.config, "n_experts", None):
        raise UsageError(f"--quantize {kind}: the model has experts, which it does not hold; expected no --quantize")
    if "linear_attention" in getattr(model.config, "layer_types", ()):
        raise UsageError(
            f"--quantize {kind}: the model has linear layers, which it does not hold; expected no --quantize"
        )
    if kind == "float8" and device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < (8, 9):
        raise UsageError(
            f"--quantize float8 needs compute capability 8.9, this GPU has {found[0]}.{found[1]}; expected int4"
        )
