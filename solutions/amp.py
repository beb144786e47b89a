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
    """A binary floating-point format: one sign bit, an exponent, a mantissa. (Exercise)

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
        ### BEGIN SOLUTION
        widest = 11 if self.has_infinity else 10
        if not 2 <= self.exponent_bits <= widest:
            raise ValueError(f"exponent_bits = {self.exponent_bits}, expected 2 to {widest}")
        if not 1 <= self.mantissa_bits <= 52:
            raise ValueError(f"mantissa_bits = {self.mantissa_bits}, expected 1 to 52")
        ### END SOLUTION

    @property
    def max(self) -> float:
        """The largest finite number: 65,504 for float16."""
        ### BEGIN SOLUTION
        bias = 2 ** (self.exponent_bits - 1) - 1
        if self.has_infinity:
            return (2 - self.epsilon) * 2.0**bias
        return (2 - 2 * self.epsilon) * 2.0 ** (bias + 1)
        ### END SOLUTION

    @property
    def min_normal(self) -> float:
        """The smallest positive number with full precision: ``2**-14`` for float16."""
        ### BEGIN SOLUTION
        return 2.0 ** (2 - 2 ** (self.exponent_bits - 1))
        ### END SOLUTION

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number: ``2**-24``, about 6e-8, for float16."""
        ### BEGIN SOLUTION
        return self.min_normal * self.epsilon
        ### END SOLUTION

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number: ``2**-10`` for float16."""
        ### BEGIN SOLUTION
        return 2.0**-self.mantissa_bits
        ### END SOLUTION


def round_to_format(x: Float[Tensor, "..."], fmt: FloatFormat) -> Float[Tensor, "..."]:
    """Round each number to the nearest one that the format has; round ties to even. (Exercise)

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
    ### BEGIN SOLUTION
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}, expected floating-point numbers")
    wide = x.double()  # room to divide and multiply by powers of two without any rounding
    exponent = torch.frexp(wide.abs().clamp(min=fmt.min_normal)).exponent - 1  # frexp's fraction is in [1/2, 1)
    spacing = torch.exp2(exponent.double()) * fmt.epsilon
    rounded = torch.round(wide / spacing) * spacing  # torch.round takes ties to even
    beyond = torch.inf if fmt.has_infinity else fmt.max
    rounded = torch.where(rounded.abs() > fmt.max, torch.copysign(torch.full_like(wide, beyond), wide), rounded)
    return rounded.to(x.dtype)
    ### END SOLUTION


def accumulate(
    values: Tensor | Iterable[float], accumulator_dtype: torch.dtype, value_dtype: torch.dtype
) -> Float[Tensor, ""]:
    """Add numbers one after another to a running total that is rounded after each addition. (Exercise)

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
    ### BEGIN SOLUTION
    if not isinstance(values, Tensor):
        values = torch.tensor(list(values), dtype=torch.float64)
    total = torch.zeros((), dtype=accumulator_dtype, device=values.device)
    for value in values.detach().flatten().to(value_dtype):
        total += value
    return total
    ### END SOLUTION


class GradScaler:
    """Scales the loss up so that small gradients survive float16, and the gradients down before the step. (Exercise)

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
        ### BEGIN SOLUTION
        if isinstance(outputs, Tensor):
            self._scale = self._scale.to(outputs.device, non_blocking=True)
            self._growth_tracker = self._growth_tracker.to(outputs.device, non_blocking=True)
            return outputs * self._scale
        if isinstance(outputs, Iterable):
            scaled = [self.scale(output) for output in outputs]
            return tuple(scaled) if isinstance(outputs, tuple) else scaled
        raise ValueError(f"outputs is a {type(outputs).__name__}, expected tensors or an iterable of them")
        ### END SOLUTION

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
        ### BEGIN SOLUTION
        if id(optimizer) in self._stepped:
            raise RuntimeError("unscale_() after step(): call update() between them")
        if id(optimizer) in self._found:
            raise RuntimeError("unscale_() has already been called for this optimizer since the last update()")
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            raise RuntimeError("this optimizer has no gradient: call scale(loss).backward() first")
        if any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError("a gradient is float16, expected float32: the parameters of a scaled run stay in float32")
        grads = [grad._values() if grad.is_sparse else grad for grad in grads]
        grads = [grad for grad in grads if grad.numel()]  # an empty gradient has no largest magnitude
        inverse, found = self._scale.double().reciprocal().float(), [torch.zeros_like(self._scale, dtype=torch.bool)]
        for kind in {(grad.device, grad.dtype) for grad in grads}:
            alike = [grad for grad in grads if (grad.device, grad.dtype) == kind]
            torch._foreach_mul_(alike, inverse.to(kind[0]))  # one kernel for many tensors, as torch.optim does it
            largest = torch.stack(torch._foreach_norm(alike, torch.inf))
            found.append((~largest.isfinite()).any().to(self._scale.device))
        self._found[id(optimizer)] = torch.stack(found).any()
        ### END SOLUTION

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that has not been done, then step unless a gradient is inf or NaN.

        Returns:
            What ``optimizer.step(*args, **kwargs)`` returns, or None if the step is skipped.

        Raises:
            RuntimeError: this optimizer was stepped since the last ``update``; the message names ``step()``.
            RuntimeError: a closure is passed, by name or by position, whose gradients would not be checked; the message
                names ``closure``.
        """
        ### BEGIN SOLUTION
        if "closure" in kwargs or args:
            raise RuntimeError("step() takes no closure: its gradients would not be checked")
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() has already been called for this optimizer since the last update()")
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        if self._found[id(optimizer)].item():  # the one place where the host waits
            return None
        return optimizer.step(*args, **kwargs)
        ### END SOLUTION

    def update(self) -> None:
        """Back off if any optimizer unscaled since the last update had inf or NaN.

        Otherwise count, and grow after the interval.
        A growth that would make the scale infinite is skipped, but the count starts again all the same.
        ``_scale`` stays float32, and ``_growth_tracker`` int32.

        Raises:
            RuntimeError: nothing was unscaled or stepped since the last update.
        """
        ### BEGIN SOLUTION
        if not self._found:
            raise RuntimeError("update() before step(): no optimizer was checked since the last update()")
        found = torch.stack(list(self._found.values())).any()
        count = torch.where(found, 0, self._growth_tracker + 1)
        grown = self._scale * self.growth_factor
        grows = (count == self.growth_interval) & grown.isfinite()
        kept = torch.where(grows, grown, self._scale)
        self._scale = torch.where(found, self._scale * self.backoff_factor, kept)
        self._growth_tracker = torch.where(count == self.growth_interval, 0, count).to(torch.int32)
        self._found, self._stepped = {}, set()
        ### END SOLUTION

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


### BEGIN SOLUTION
def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors cast to ``dtype``, inside lists and tuples too; float64 and everything else unchanged."""
    if isinstance(value, list | tuple):
        return type(value)(_cast(part, dtype) for part in value)
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.to(dtype)
    return value


_inside = threading.local()  # .busy: an inner region has already decided about the current operation


### END SOLUTION
class MiniAutocast(TorchFunctionMode):
    """Inside ``with MiniAutocast(dtype):`` products run in ``dtype`` and reductions in float32. (Exercise)

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
        ### BEGIN SOLUTION
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"dtype = {dtype}, expected torch.float16, torch.bfloat16 or torch.float32")
        if device_type not in REDUCTIONS:
            raise ValueError(f"device_type = {device_type!r}, expected one of {', '.join(REDUCTIONS)}")
        self.dtype, self.reductions = dtype, REDUCTIONS[device_type]
        ### END SOLUTION

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """PyTorch calls this for every operation in the region, with the function that it was about to run."""
        kwargs = kwargs or {}
        ### BEGIN SOLUTION
        if getattr(_inside, "busy", False):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        dtype = self.dtype if name in PRODUCTS else torch.float32 if name in self.reductions else None
        _inside.busy = True
        try:
            if dtype is not None:
                args = _cast(args, dtype)
                kwargs = {key: _cast(value, dtype) for key, value in kwargs.items()}
            return func(*args, **kwargs)
        finally:
            _inside.busy = False
        ### END SOLUTION


def autocast_dtypes(model: nn.Module, x: Tensor, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Predict the dtype that every layer's output would have under ``torch.autocast``. (Exercise)

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
    ### BEGIN SOLUTION
    layers = {name: module for name, module in model.named_modules() if not list(module.children())}
    found: dict[str, torch.dtype] = {}

    def note(name: str) -> Callable:
        return lambda module, inputs, output: found.update({name: _first_tensor(output).dtype})

    handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    rules = "cpu" if x.device.type == "cpu" else "cuda"
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gpus = [x.device.index] if x.is_cuda else []  # whose random states are put back, besides the CPU's
    try:
        with torch.no_grad(), torch.random.fork_rng(gpus), MiniAutocast(dtype, rules):
            functional_call(model, buffers, (x,))
    finally:
        for handle in handles:
            handle.remove()
    return {name: found[name] for name in layers if name in found}
    ### END SOLUTION


### BEGIN SOLUTION
def _first_tensor(output: Any) -> Tensor:
    """A layer's output, or the first tensor in it if it is a tuple or a dict."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output


### END SOLUTION
