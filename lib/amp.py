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

    Args:
        exponent_bits: Width E of the exponent, 2 to 11; its bias is ``2**(E - 1) - 1``. The least stored exponent holds
            zero and the subnormals.
        mantissa_bits: Width M of the fraction, 1 to 52.
        has_infinity: True: the greatest stored exponent is kept for infinity and NaN, as IEEE 754 has it. False: it holds
            numbers, and only its all-ones mantissa is NaN. A format of 11 exponent bits must have infinity.

    Raises:
        ValueError: a width is out of its range, or 11 exponent bits are to go without infinity; the message names the width
            and its range, which without infinity is 2 to 10 for the exponent.

    Source: IEEE 754-2019, section 3; Micikevicius and others (arXiv:2209.05433), table 1, for the two formats of 8 bits.
    Convention: ``mantissa_bits`` counts the stored bits; texts that count the implied leading 1 say 24 for float32.
    """

    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True

    def __post_init__(self):
        raise NotImplementedError("Exercise 11.1: write FloatFormat.__post_init__")

    @property
    def max(self) -> float:
        """The greatest finite number: 65,504 for float16."""
        raise NotImplementedError("Exercise 11.1: write FloatFormat.max")

    @property
    def min_normal(self) -> float:
        """The least positive number with all its mantissa bits: ``2**-14`` for float16."""
        raise NotImplementedError("Exercise 11.1: write FloatFormat.min_normal")

    @property
    def min_subnormal(self) -> float:
        """The least positive number: ``2**-24``, about 6e-8, for float16."""
        raise NotImplementedError("Exercise 11.1: write FloatFormat.min_subnormal")

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next greater number: ``2**-10`` for float16."""
        raise NotImplementedError("Exercise 11.1: write FloatFormat.epsilon")


def round_to_format(x: Float[Tensor, "..."], fmt: FloatFormat) -> Float[Tensor, "..."]:
    """Each number moved to the nearest one that the format has; of two equally near, to the even one. (Exercise 11.2)

    Args:
        x: Any shape, any floating dtype, those of 8 bits too (``x.double()`` takes them all); left unchanged.
        fmt: A ``FloatFormat``.

    Returns:
        The shape and dtype of ``x``. Bit for bit what a cast to the format and back gives: subnormals are kept, what rounds
        beyond ``fmt.max`` is infinite, zeros keep their sign, NaN stays NaN. A format without infinity has ``fmt.max``,
        with the sign of x, in the place of infinity.

    Raises:
        ValueError: ``x`` is of no floating dtype; the message names it.

    Source: IEEE 754-2019, section 4.3.1, roundTiesToEven.
    Convention: float8_e4m3fn saturates at 448, as PyTorch does from 2.12; before, it gave NaN. float64 is rounded once;
        PyTorch takes float64 to float16 by way of float32, and is off by one place in a few of 100,000 numbers.
    """
    raise NotImplementedError("Exercise 11.2: write round_to_format")


def accumulate(
    values: Tensor | Iterable[float], accumulator_dtype: torch.dtype, value_dtype: torch.dtype
) -> Float[Tensor, ""]:
    """Numbers added one after another to a running total, which is rounded after each. (Exercise 11.3)

    Args:
        values: Numbers in the order in which they are added.
        accumulator_dtype: Dtype of the total, which begins at 0.
        value_dtype: Dtype to which each number is rounded before it is added.

    Returns:
        The total, a tensor without dimensions, in ``accumulator_dtype``: what ``total += value`` gives. It is on the device of
        ``values`` if that is a tensor, else on the CPU. A list's numbers are Python floats, float64, until they are rounded
        to ``value_dtype``.

    Source: Stanford CS336, assignment 2, problem mixed_precision_accumulation.
    """
    raise NotImplementedError("Exercise 11.3: write accumulate")


class GradScaler:
    """Multiplies the loss so that small gradients survive float16, and divides them again before the step. (Exercise 11.4)

    Args:
        init_scale: First factor.
        growth_factor: What the scale is multiplied by after ``growth_interval`` updates in a row without inf or NaN.
        backoff_factor: What it is multiplied by after an update with inf or NaN.
        growth_interval: Updates without inf or NaN between two growths.

    A step is ``scaler.scale(loss).backward()``, ``scaler.step(optimizer)``, ``scaler.update()``; whoever clips gradients
    calls ``scaler.unscale_(optimizer)`` before. Several optimizers may be stepped between two updates; one with inf or NaN
    does not keep another from its step.

    Source: Micikevicius and others (arXiv:1710.03740), section 3.2; ``torch.amp.GradScaler``.
    Cost: at most one value read back by the host for each optimizer's step, none in ``scale``, ``unscale_`` and ``update``.
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
        self._growth_tracker = torch.zeros((), dtype=torch.int32)  # updates without inf or NaN since the last change
        self._found: dict[int, Tensor] = {}  # id of an unscaled optimizer -> bool tensor: has it inf or NaN?
        self._stepped: set[int] = set()  # ids of the optimizers stepped since the last update

    def scale(self, outputs: Any) -> Any:
        """A loss times the scale; or a list or tuple of them, nested or not, each times the scale, in the same structure.

        ``_scale`` and ``_growth_tracker`` move to the losses' device.
        """
        raise NotImplementedError("Exercise 11.4: write GradScaler.scale")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer's parameters by the scale, in place, and note whether one is inf or NaN.

        Raises:
            RuntimeError: since the last ``update`` this optimizer was unscaled (the message names ``unscale_()``) or stepped
                (it names ``step()``); or none of its parameters has a gradient. An empty gradient is one.
            ValueError: a gradient is float16, where its parameter should be float32; the message names float16.
        """
        raise NotImplementedError("Exercise 11.4: write GradScaler.unscale_")

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that was not done, then step unless a gradient is inf or NaN.

        Returns:
            What ``optimizer.step(*args, **kwargs)`` returns, or None if the step is skipped.

        Raises:
            RuntimeError: this optimizer was stepped since the last ``update`` (the message names ``step()``); or a closure is
                given, by name or by position, which would be run after the check (it names ``closure``).
        """
        raise NotImplementedError("Exercise 11.4: write GradScaler.step")

    def update(self) -> None:
        """Back off if any optimizer unscaled since the last update had inf or NaN, else count, and grow in time.

        A growth that would make the scale infinite is left out, and the count begins again all the same.

        Raises:
            RuntimeError: nothing was unscaled or stepped since the last update.
        """
        raise NotImplementedError("Exercise 11.4: write GradScaler.update")

    def get_scale(self) -> float:
        """The scale as a number; the host waits for it."""
        return self._scale.item()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, under the keys of ``torch.amp.GradScaler``."""
        settings = {name: getattr(self, name) for name in ("growth_factor", "backoff_factor", "growth_interval")}
        return {"scale": self.get_scale(), "_growth_tracker": int(self._growth_tracker), **settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on as the scaler did that gave the ``state_dict``, ours or PyTorch's."""
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            setattr(self, name, state_dict[name])
        self._scale = torch.full_like(self._scale, state_dict["scale"])
        self._growth_tracker = torch.full_like(self._growth_tracker, state_dict["_growth_tracker"])


class MiniAutocast(TorchFunctionMode):
    """Inside ``with MiniAutocast(dtype):`` products run in ``dtype`` and reductions in float32. (Exercise 11.5)

    Args:
        dtype: Of the products: float16, bfloat16, or float32, which switches an outer region off.
        device_type: Whose rules: "cuda", or "cpu" with its shorter list of reductions.

    The floating-point tensors among the arguments of an operation whose name is in ``PRODUCTS`` are cast to ``dtype``; of one
    in ``REDUCTIONS[device_type]``, to float32; every other operation runs as it is. float64 is never cast. Regions nest, and
    the innermost decides. Parameters stay as they are, and their gradients come in their own dtype. Both lists are in
    ``lib/given/kernels/autocast.py``.

    Raises:
        ValueError: ``dtype`` is none of the three, or there are no rules for ``device_type``; the message names it.

    Source: ``torch.autocast``.
    Convention: these are CUDA's rules, on any device. ``torch.autocast("cpu")`` keeps softmax, norms and sums narrow.
    """

    def __init__(self, dtype: torch.dtype, device_type: str = "cuda"):
        super().__init__()
        raise NotImplementedError("Exercise 11.5: write MiniAutocast.__init__")

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Called for every operation in the region, with the function that PyTorch was about to run."""
        kwargs = kwargs or {}
        raise NotImplementedError("Exercise 11.5: write MiniAutocast.__torch_function__")


def autocast_dtypes(model: nn.Module, x: Tensor, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype that every layer's output would have under ``torch.autocast``, predicted by its rules. (Exercise 11.6)

    Args:
        model: Any module; afterwards it has no more hooks, gradients or changed buffers than before, and is in its mode.
            The prediction leaves the random generators as they were: a Dropout in it draws nothing from the run.
        x: What ``model(x)`` takes. On the CPU the CPU's rules hold; anywhere else, CUDA's. A model and an ``x`` on the
            "meta" device have no numbers: the prediction costs nothing and needs no GPU.
        dtype: float16 or bfloat16.

    Returns:
        Name to dtype, in the order of ``model.named_modules()``, which need not be the order of the calls, for each module
        without submodules that was called. A model that has no submodules is named "". Of an output of several tensors the first counts; of several calls the last.
    """
    raise NotImplementedError("Exercise 11.6: write autocast_dtypes")
