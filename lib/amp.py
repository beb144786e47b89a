"""Mixed precision: number formats, rounding, loss scaling, and which operation runs in which dtype."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from lib.given.kernels.autocast import PRODUCTS, REDUCTIONS


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: one sign bit, an exponent, a mantissa. (Exercise 11.1)

    Size: 20 minutes, difficulty 2, core.

    Args:
        exponent_bits: Width E of the exponent, 2 to 11; its bias is ``2**(E - 1) - 1``.
            The smallest stored exponent encodes zero and the subnormals.
        mantissa_bits: Width M of the fraction, 1 to 52.
        has_infinity: If True, the largest stored exponent is reserved for infinity and NaN, as in IEEE 754.
            If False, it encodes numbers, and only its all-ones mantissa is NaN.
            A format with 11 exponent bits must have infinity.

    Raises:
        ValueError: a width is out of its range; the message names the width's value and its range.
            Without infinity the range of ``exponent_bits`` is 2 to 10.

    Source: IEEE 754-2019, section 3; Micikevicius and others (arXiv:2209.05433), table 1, for the two formats of 8
        bits.
    Convention: ``mantissa_bits`` counts the stored bits: 23 for float32.
        Texts that also count the implied leading 1 say 24.
    """

    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True

    def __post_init__(self):
        raise NotImplementedError("Exercise 11.1: write FloatFormat.__post_init__")

    @property
    def max(self) -> float:
        """The largest finite number: 65,504 for float16."""
        raise NotImplementedError("Exercise 11.1: write FloatFormat.max")

    @property
    def min_normal(self) -> float:
        """The smallest positive number with full precision: ``2**-14`` for float16."""
        raise NotImplementedError("Exercise 11.1: write FloatFormat.min_normal")

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number: ``2**-24``, about 6e-8, for float16."""
        raise NotImplementedError("Exercise 11.1: write FloatFormat.min_subnormal")

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number: ``2**-10`` for float16."""
        raise NotImplementedError("Exercise 11.1: write FloatFormat.epsilon")


def round_to_format(x: Float[Tensor, "..."], fmt: FloatFormat) -> Float[Tensor, "..."]:
    """Round each number to the nearest one that the format has; round ties to even. (Exercise 11.2)

    Size: 30 minutes, difficulty 3, core.

    Args:
        x: Any shape and any floating dtype, those of 8 bits included (``x.double()`` takes them all); left unchanged.
        fmt: A ``FloatFormat``.

    Returns:
        The shape and dtype of ``x``.
        Bit for bit the result of a cast to the format and back: subnormals are kept, numbers that round beyond
        ``fmt.max`` become infinite, zeros keep their sign, NaN stays NaN.
        In a format without infinity, ``fmt.max`` with the sign of x takes the place of infinity.

    Raises:
        ValueError: ``x`` does not have a floating dtype; the message names its dtype.

    Source: IEEE 754-2019, section 4.3.1, roundTiesToEven.
    Convention: float8_e4m3fn saturates at 448, as PyTorch does from 2.12 on; before, PyTorch gave NaN.
        Round float64 once; PyTorch casts float64 to float16 by way of float32, and is off by one place in a few of
        100,000 numbers.
    """
    raise NotImplementedError("Exercise 11.2: write round_to_format")


def accumulate(
    values: Tensor | Iterable[float], accumulator_dtype: torch.dtype, value_dtype: torch.dtype
) -> Float[Tensor, ""]:
    """Add numbers one after another to a running total that is rounded after each addition. (Exercise 11.3)

    Size: 15 minutes, difficulty 2, core.

    Args:
        values: Numbers in the order in which they are added; left unchanged.
        accumulator_dtype: Dtype of the total, which starts at 0.
        value_dtype: Dtype to which each number is rounded before it is added.

    Returns:
        The total, a scalar tensor in ``accumulator_dtype``: what ``total += value`` gives.
        It is on the device of ``values`` if that is a tensor, otherwise on the CPU.
        The numbers of a list are Python floats (float64) until they are rounded to ``value_dtype``.

    Source: Stanford CS336, assignment 2, problem mixed_precision_accumulation.
    """
    raise NotImplementedError("Exercise 11.3: write accumulate")


class GradScaler:
    """Scales the loss up so that small gradients survive float16, and the gradients down before the step. (Exercise 11.4)

    Size: 45 minutes, difficulty 4, core.

    Args:
        init_scale: The first scale.
        growth_factor: Multiplies the scale after ``growth_interval`` updates in a row without inf or NaN.
        backoff_factor: Multiplies the scale after an update with inf or NaN.
        growth_interval: Number of updates without inf or NaN before the scale grows.

    A training step calls ``scaler.scale(loss).backward()``, ``scaler.step(optimizer)`` and ``scaler.update()``; to clip
    gradients, call ``scaler.unscale_(optimizer)`` before ``step``.
    Several optimizers may step between two updates, and inf or NaN in the gradients of one does not keep another from
    its step.

    Source: Micikevicius and others (arXiv:1710.03740), section 3.2; ``torch.amp.GradScaler``.
    Cost: the host reads back at most one value in each ``step``, and none in ``scale``, ``unscale_`` and ``update``.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ):
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self._scale = torch.tensor(float(init_scale), dtype=torch.float32)
        self._growth_tracker = torch.zeros(
            (), dtype=torch.int32
        )  # updates without inf or NaN since the scale last changed
        self._found: dict[int, Tensor] = {}  # id of an unscaled optimizer -> bool tensor: is a gradient inf or NaN?
        self._stepped: set[int] = set()  # ids of the optimizers stepped since the last update

    def scale(self, outputs: Any) -> Any:
        """A loss times the scale.

        A list or tuple of losses, nested or not, comes back in the same structure, each loss scaled.

        Moves ``_scale`` and ``_growth_tracker`` to the losses' device.
        """
        raise NotImplementedError("Exercise 11.4: write GradScaler.scale")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer's parameters by the scale, in place, and note whether any is inf or NaN.

        A gradient may be sparse: then its values count.

        Raises:
            RuntimeError: since the last ``update`` this optimizer was unscaled; the message names ``unscale_()``.
            RuntimeError: since the last ``update`` this optimizer was stepped; the message names ``step()``.
            RuntimeError: none of its parameters has a gradient.
                A gradient without elements counts as one.
            ValueError: a gradient is float16, so its parameter is not in float32; the message names float16.
        """
        raise NotImplementedError("Exercise 11.4: write GradScaler.unscale_")

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that has not been done, then step unless a gradient is inf or NaN.

        Returns:
            What ``optimizer.step(*args, **kwargs)`` returns, or None if the step is skipped.

        Raises:
            RuntimeError: this optimizer was stepped since the last ``update``; the message names ``step()``.
            RuntimeError: a closure is passed, by name or by position, whose gradients would not be checked; the message
                names ``closure``.
        """
        raise NotImplementedError("Exercise 11.4: write GradScaler.step")

    def update(self) -> None:
        """Back off if any optimizer unscaled since the last update had inf or NaN.

        Otherwise count, and grow after the interval.
        A growth that would make the scale infinite is skipped, but the count starts again all the same.
        ``_scale`` stays float32, and ``_growth_tracker`` int32.

        Raises:
            RuntimeError: nothing was unscaled or stepped since the last update.
        """
        raise NotImplementedError("Exercise 11.4: write GradScaler.update")

    def get_scale(self) -> float:
        """The scale as a number. The host waits for it."""
        return self._scale.item()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, under the keys of ``torch.amp.GradScaler``."""
        settings = {name: getattr(self, name) for name in ("growth_factor", "backoff_factor", "growth_interval")}
        return {"scale": self.get_scale(), "_growth_tracker": int(self._growth_tracker), **settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of another scaler, ours or PyTorch's."""
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            setattr(self, name, state_dict[name])
        self._scale = torch.full_like(self._scale, state_dict["scale"])
        self._growth_tracker = torch.full_like(self._growth_tracker, state_dict["_growth_tracker"])


class MiniAutocast(TorchFunctionMode):
    """Inside ``with MiniAutocast(dtype):`` products run in ``dtype`` and reductions in float32. (Exercise 11.5)

    Size: 35 minutes, difficulty 4, stretch.

    Args:
        dtype: Dtype of the products: float16, bfloat16, or float32, which switches an outer region off.
        device_type: Which rules apply: "cuda", or "cpu" with its shorter list of reductions.

    If the name of an operation is in ``PRODUCTS``, its floating-point arguments, also those in lists and tuples, are
    cast to ``dtype``; if it is in ``REDUCTIONS[device_type]``, to float32; every other operation runs unchanged.
    float64 is never cast.
    Regions nest, and the innermost one decides.
    Parameters are not changed, and their gradients have the parameters' dtype.
    Both lists are in ``lib/given/kernels/autocast.py``.

    Raises:
        ValueError: ``dtype`` is none of the three, or ``device_type`` has no rules; the message names the wrong one.

    Source: ``torch.autocast``.
    Convention: by default CUDA's rules apply on any device.
        ``torch.autocast("cpu")`` keeps softmax, norms and sums narrow.
    """

    def __init__(self, dtype: torch.dtype, device_type: str = "cuda"):
        super().__init__()
        raise NotImplementedError("Exercise 11.5: write MiniAutocast.__init__")

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """PyTorch calls this for every operation in the region, with the function that it was about to run."""
        kwargs = kwargs or {}
        raise NotImplementedError("Exercise 11.5: write MiniAutocast.__torch_function__")


def autocast_dtypes(model: nn.Module, x: Tensor, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Predict the dtype that every layer's output would have under ``torch.autocast``. (Exercise 11.6)

    Size: 20 minutes, difficulty 2, core.

    Args:
        model: Any module.
            Afterwards its hooks, gradients, buffers and mode are what they were before, and so is the state of the
            random generators, even if the model has a Dropout.
        x: The argument of ``model(x)``.
            If it is on the CPU, the CPU's rules apply; otherwise CUDA's.
            A model and an ``x`` on the "meta" device have no numbers, so there the prediction costs nothing and needs
            no GPU.
        dtype: float16 or bfloat16.

    Returns:
        Name to dtype for each module without submodules that was called, in the order of ``model.named_modules()``
        (which need not be the order of the calls).
        A model without submodules has the name "".
        If an output is a tuple, list or dict, the first tensor in it counts.
        If a module is called several times, the last call counts.
    """
    raise NotImplementedError("Exercise 11.6: write autocast_dtypes")
