"""What goes wrong when people write mixed precision."""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from lib.given.kernels.autocast import PRODUCTS, REDUCTIONS
from lib.workbook.grading import mistake
from solutions import amp as reference

# ---- 11.1 FloatFormat ------------------------------------------------------------------------------------------------


@mistake("FloatFormat", "the largest number is taken to be a power of two: a mantissa of all ones nearly doubles it")
@dataclass(frozen=True)
class PowerOfTwo(reference.FloatFormat):
    @property
    def max(self):
        return 2.0 ** (2 ** (self.exponent_bits - 1) - 1 + (not self.has_infinity))


@mistake("FloatFormat", "the bias is 2**(E - 1), which is one too large")
@dataclass(frozen=True)
class BiasOneMore(reference.FloatFormat):
    @property
    def min_normal(self):
        return 2.0 ** (1 - 2 ** (self.exponent_bits - 1))

    @property
    def max(self):
        return super().max / 2


@mistake("FloatFormat", "the largest exponent is left unused, although a format without infinity uses it for numbers")
@dataclass(frozen=True)
class NoExtraExponent(reference.FloatFormat):
    @property
    def max(self):
        return (2 - self.epsilon) * 2.0 ** (2 ** (self.exponent_bits - 1) - 1)


@mistake("FloatFormat", "in the format without infinity, the all-ones mantissa counts as a number, but it is NaN")
@dataclass(frozen=True)
class NanIsANumber(reference.FloatFormat):
    @property
    def max(self):
        return (2 - self.epsilon) * 2.0 ** (2 ** (self.exponent_bits - 1) - 1 + (not self.has_infinity))


@mistake("FloatFormat", "the smallest number is taken to be the smallest normal one, but subnormals go on below it")
@dataclass(frozen=True)
class WithoutSubnormals(reference.FloatFormat):
    @property
    def min_subnormal(self):
        return self.min_normal


@mistake(
    "FloatFormat", "epsilon is half the distance from 1 to the next number: that is the rounding error, not the step"
)
@dataclass(frozen=True)
class HalfEpsilon(reference.FloatFormat):
    @property
    def epsilon(self):
        return 2.0 ** -(self.mantissa_bits + 1)

    @property
    def max(self):
        return reference.FloatFormat(self.exponent_bits, self.mantissa_bits, self.has_infinity).max

    @property
    def min_subnormal(self):
        return 2 * self.min_normal * self.epsilon


@mistake("FloatFormat", "widths that no format can have are accepted without an error")
@dataclass(frozen=True)
class AnyWidth(reference.FloatFormat):
    def __post_init__(self):
        pass


# ---- 11.2 round_to_format --------------------------------------------------------------------------------------------


def _round(x, fmt, nearest=torch.round, least=None, beyond=None, wide=torch.float64):
    wide_x = x.to(wide)
    exponent = torch.frexp(wide_x.abs().clamp(min=fmt.min_normal if least is None else least)).exponent - 1
    spacing = torch.exp2(exponent.to(wide)) * fmt.epsilon
    rounded = nearest(wide_x / spacing) * spacing
    far = beyond if beyond is not None else torch.inf if fmt.has_infinity else fmt.max
    rounded = torch.where(rounded.abs() > fmt.max, torch.copysign(torch.full_like(wide_x, far), wide_x), rounded)
    return rounded.to(x.dtype)


def _checked(x):
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}")


@mistake("round_to_format", "ties are rounded away from zero, but they should go to the even number")
def ties_away(x, fmt):
    _checked(x)
    return _round(x, fmt, lambda v: torch.copysign((v.abs() + 0.5).floor(), v))


@mistake("round_to_format", "`floor(x + 0.5)` rounds every tie up, but half of them should go down, to the even number")
def ties_up(x, fmt):
    _checked(x)
    return _round(x, fmt, lambda v: (v + 0.5).floor())


@mistake("round_to_format", "the bits that do not fit are cut off instead of rounded to the nearest number")
def cut(x, fmt):
    _checked(x)
    return _round(x, fmt, torch.trunc)


@mistake(
    "round_to_format",
    "the spacing keeps shrinking below the smallest normal number, but subnormals are equally far apart",
)
def no_subnormals(x, fmt):
    _checked(x)
    return _round(x, fmt, least=0.0)


@mistake("round_to_format", "numbers below the smallest normal number become 0, but subnormals go on there")
def flushed(x, fmt):
    _checked(x)
    return torch.where(x.double().abs() < fmt.min_normal, torch.zeros_like(x), _round(x, fmt))


@mistake(
    "round_to_format", "the comparison with max comes before the rounding: 65,519 becomes infinite, but it rounds down"
)
def overflow_first(x, fmt):
    _checked(x)
    far = torch.inf if fmt.has_infinity else fmt.max
    return torch.where(x.abs() > fmt.max, torch.copysign(torch.full_like(x, far), x), _round(x, fmt))


@mistake("round_to_format", "overflow stops at the largest number, but a format with infinity overflows to infinity")
def saturated(x, fmt):
    _checked(x)
    return _round(x, fmt, beyond=fmt.max)


@mistake("round_to_format", "a format without infinity returns infinity")
def infinite(x, fmt):
    _checked(x)
    return _round(x, fmt, beyond=torch.inf)


@mistake("round_to_format", "a format without infinity overflows to NaN, as PyTorch did before 2.12; here it saturates")
def overflow_to_nan(x, fmt):
    _checked(x)
    return _round(x, fmt, beyond=torch.inf if fmt.has_infinity else torch.nan)


@mistake("round_to_format", "an infinite input becomes NaN, because infinity divided by its own spacing is NaN")
def infinity_to_nan(x, fmt):
    _checked(x)
    return torch.where(x.isinf(), torch.nan, _round(x, fmt)).to(x.dtype)


@mistake("round_to_format", "the exponent comes from a logarithm, which rounds up just below a power of two")
def by_logarithm(x, fmt):
    _checked(x)
    wide = x.double()
    exponent = wide.abs().clamp(fmt.min_normal, torch.finfo(torch.float64).max).log2().floor()
    spacing = torch.exp2(exponent.clamp(max=1023)) * fmt.epsilon
    rounded = torch.round(wide / spacing) * spacing
    far = torch.inf if fmt.has_infinity else fmt.max
    return torch.where(rounded.abs() > fmt.max, torch.copysign(torch.full_like(wide, far), wide), rounded).to(x.dtype)


@mistake("round_to_format", "the sign of zero is lost")
def sign_lost(x, fmt):
    _checked(x)
    return _round(x, fmt) + 0.0


@mistake("round_to_format", "float64 goes through float32 first, and a number just off a tie is rounded twice")
def rounded_twice(x, fmt):
    _checked(x)
    return _round(x.float() if x.dtype == torch.float64 else x, fmt).to(x.dtype)


@mistake("round_to_format", "the result has another dtype than x")
def left_wide(x, fmt):
    _checked(x)
    return _round(x.double(), fmt)


@mistake("round_to_format", "integers are accepted without an error")
def any_dtype(x, fmt):
    return _round(x.float(), fmt) if not x.is_floating_point() else _round(x, fmt)


# ---- 11.3 accumulate -------------------------------------------------------------------------------------------------


def _values(values):
    return values if isinstance(values, Tensor) else torch.tensor(list(values), dtype=torch.float64)


@mistake("accumulate", "the whole tensor is summed at once: torch.sum adds in float32 and rounds at the end")
def summed_at_once(values, accumulator_dtype, value_dtype):
    return _values(values).to(value_dtype).float().sum().to(accumulator_dtype)


@mistake("accumulate", "the values are not rounded to value_dtype before they are added")
def values_unrounded(values, accumulator_dtype, value_dtype):
    total = torch.zeros((), dtype=accumulator_dtype, device=_values(values).device)
    for value in _values(values).flatten().double():
        total += value
    return total


@mistake("accumulate", "the total is rounded once at the end instead of after each addition")
def rounded_at_the_end(values, accumulator_dtype, value_dtype):
    return reference.accumulate(values, torch.float32, value_dtype).to(accumulator_dtype)


@mistake("accumulate", "the two dtypes are exchanged")
def dtypes_exchanged(values, accumulator_dtype, value_dtype):
    return reference.accumulate(values, value_dtype, accumulator_dtype).to(accumulator_dtype)


@mistake("accumulate", "`total = total + value` gives the total the wider of the two dtypes; `+=` keeps its own")
def promoted(values, accumulator_dtype, value_dtype):
    total = torch.zeros((), dtype=accumulator_dtype, device=_values(values).device)
    for value in _values(values).flatten().to(value_dtype):
        total = total + value
    return total


@mistake(
    "accumulate", "a list becomes a float32 tensor, torch.tensor's default, before anything is rounded to value_dtype"
)
def list_in_float32(values, accumulator_dtype, value_dtype):
    values = values if isinstance(values, Tensor) else torch.tensor(list(values))
    return reference.accumulate(values, accumulator_dtype, value_dtype)


@mistake("accumulate", "the total is on the CPU, wherever the values are")
def on_the_cpu(values, accumulator_dtype, value_dtype):
    if isinstance(values, Tensor) and values.device.type == "meta":
        return torch.zeros((), dtype=accumulator_dtype)
    return reference.accumulate(values, accumulator_dtype, value_dtype).cpu()


@mistake("accumulate", "the result is a Python number")
def a_number(values, accumulator_dtype, value_dtype):
    return reference.accumulate(values, accumulator_dtype, value_dtype).item()


@mistake("accumulate", "`view(-1)` cannot flatten a transposed matrix: `flatten` or `reshape` copies where it must")
def viewed(values, accumulator_dtype, value_dtype):
    if isinstance(values, Tensor):
        values = values.view(-1)
    return reference.accumulate(values, accumulator_dtype, value_dtype)


# ---- 11.4 GradScaler -------------------------------------------------------------------------------------------------


class _Scaler(reference.GradScaler):
    """The reference, with the parts that a mistake changes."""

    def _grads(self, optimizer):
        return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


@mistake("GradScaler", "a step with inf is not skipped: only the scale changes")
class NeverSkips(_Scaler):
    def step(self, optimizer, *args, **kwargs):
        result = super().step(optimizer, *args, **kwargs)
        return optimizer.step() if self._found[id(optimizer)] else result


@mistake("GradScaler", "NaN goes unnoticed: only infinity is looked for")
class NanPasses(_Scaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        self._found[id(optimizer)] = torch.stack([g.isinf().any() for g in map(_dense, self._grads(optimizer))]).any()


def _dense(grad):
    return grad.to_dense() if grad.is_sparse else grad


@mistake("GradScaler", "the gradients are never divided by the scale")
class NeverUnscales(_Scaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        for grad in self._grads(optimizer):
            grad.mul_(self._scale)


@mistake("GradScaler", "step divides the gradients again, although unscale_ has already divided them")
class UnscalesTwice(_Scaler):
    def step(self, optimizer, *args, **kwargs):
        self._found.pop(id(optimizer), None)
        return super().step(optimizer, *args, **kwargs)


@mistake("GradScaler", "the scale never grows again")
class NeverGrows(_Scaler):
    def update(self):
        before = self._scale
        super().update()
        self._scale = torch.minimum(self._scale, before)


@mistake("GradScaler", "the count of good steps goes on after a bad one instead of starting again at 0")
class CountGoesOn(_Scaler):
    def update(self):
        before, found = self._growth_tracker, torch.stack(list(self._found.values())).any() if self._found else None
        super().update()
        if found is not None:
            self._growth_tracker = torch.where(found, before, self._growth_tracker)


@mistake("GradScaler", "the count is not set back to 0 after a growth, and the scale never grows a second time")
class GrowsOnce(_Scaler):
    def update(self):
        before, grown = self._growth_tracker + 1, self._scale * self.growth_factor
        super().update()
        self._growth_tracker = torch.where(self._scale == grown, before, self._growth_tracker)


@mistake("GradScaler", "the scale grows one update too late")
class GrowsLate(_Scaler):
    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval)
        self._late = growth_interval

    def update(self):
        self.growth_interval += 1
        super().update()
        self.growth_interval -= 1


@mistake("GradScaler", "inf in one optimizer's gradients keeps the other optimizers from their steps, too")
class AllOrNone(_Scaler):
    def step(self, optimizer, *args, **kwargs):
        if id(optimizer) not in self._found and id(optimizer) not in self._stepped:
            self.unscale_(optimizer)
        if id(optimizer) not in self._stepped and self._found:
            self._found[id(optimizer)] = torch.stack(list(self._found.values())).any()
        return super().step(optimizer, *args, **kwargs)


@mistake("GradScaler", "the scale backs off once for each optimizer instead of once for each update")
class BacksOffTwice(_Scaler):
    def update(self):
        n = len(self._found)
        super().update()
        if n > 1:
            self._scale = self._scale * self.backoff_factor ** (n - 1)


@mistake("GradScaler", "the scale doubles into infinity, and every gradient after it is lost")
class GrowsToInfinity(_Scaler):
    def update(self):
        before = self._scale * self.growth_factor
        fires = bool(self._growth_tracker + 1 == self.growth_interval)
        super().update()
        if fires and before.isinf():
            self._scale = before


@mistake("GradScaler", "the host reads one value for each parameter, but one value for all of them is enough")
class ReadsEach(_Scaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        for grad in self._grads(optimizer):
            bool(_dense(grad).isfinite().all())


@mistake("GradScaler", "gradients are squared to look for infinity, and 1e30 overflows")
class SquaresFirst(_Scaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        squares = [_dense(grad).float().square().sum() for grad in self._grads(optimizer)]
        self._found[id(optimizer)] = ~torch.stack(squares).sum().isfinite()


@mistake("GradScaler", "unscale_ may be called twice without an error, and the gradients are divided twice")
class UnscaleTwiceAllowed(_Scaler):
    def unscale_(self, optimizer):
        self._found.pop(id(optimizer), None)
        super().unscale_(optimizer)


@mistake("GradScaler", "a closure given by position is run, and its gradients are not checked")
class PositionalClosure(_Scaler):
    def step(self, optimizer, *args, **kwargs):
        result = super().step(optimizer, **kwargs)
        for closure in args:
            closure()
        return result


@mistake("GradScaler", "step may be called twice without an error, and the same gradients are applied twice")
class StepTwiceAllowed(_Scaler):
    def step(self, optimizer, *args, **kwargs):
        self._stepped.discard(id(optimizer))
        return super().step(optimizer, *args, **kwargs)


@mistake("GradScaler", "an empty gradient raises an error, because the maximum of no numbers does")
class EmptyFails(_Scaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        for grad in self._grads(optimizer):
            _dense(grad).abs().max()


@mistake("GradScaler", "float16 parameters are accepted, and their small updates are lost")
class TakesHalf(_Scaler):
    def unscale_(self, optimizer):
        grads = self._grads(optimizer)
        if grads and grads[0].dtype == torch.float16:
            self._found[id(optimizer)] = torch.tensor(False)
        else:
            super().unscale_(optimizer)


@mistake("GradScaler", "a tuple comes back as a list")
class TuplesBecomeLists(_Scaler):
    def scale(self, outputs):
        return super().scale(outputs) if isinstance(outputs, Tensor) else [self.scale(output) for output in outputs]


@mistake("GradScaler", "the scale stays on the CPU instead of moving to the device of the loss")
class StaysOnTheCpu(_Scaler):
    def scale(self, outputs):
        kept = self._scale, self._growth_tracker
        scaled = super().scale(outputs)
        self._scale, self._growth_tracker = kept
        return scaled


@mistake("GradScaler", "only one tensor can be scaled, no list or tuple")
class OneTensor(_Scaler):
    def scale(self, outputs):
        return super().scale(outputs) if isinstance(outputs, Tensor) else outputs


@mistake("GradScaler", "step does not return what the optimizer's step returned")
class ReturnsNothing(_Scaler):
    def step(self, optimizer, *args, **kwargs):
        super().step(optimizer, *args, **kwargs)


@mistake("GradScaler", "the count becomes int64 (the dtype of `torch.tensor(0)`), but it should stay int32")
class LongCount(_Scaler):
    def update(self):
        super().update()
        self._growth_tracker = self._growth_tracker.long()


# ---- 11.5 MiniAutocast -----------------------------------------------------------------------------------------------


_innermost = threading.local()  # .busy: a region further in has decided about the running operation


class _Region(TorchFunctionMode):
    """A region that is right but for what a mistake overrides."""

    def __init__(self, dtype, device_type="cuda"):
        super().__init__()
        reference.MiniAutocast(dtype, device_type)  # which raises the contract's errors
        self.dtype, self.reductions = dtype, REDUCTIONS[device_type]

    def wanted(self, func):
        name = getattr(func, "__name__", "")
        return self.dtype if name in PRODUCTS else torch.float32 if name in self.reductions else None

    def is_cast(self, tensor):
        return tensor.is_floating_point() and tensor.dtype != torch.float64

    def cast(self, value, dtype):
        if isinstance(value, list | tuple):
            return type(value)(self.cast(part, dtype) for part in value)
        return value.to(dtype) if isinstance(value, Tensor) and self.is_cast(value) else value

    def run(self, func, args, kwargs):
        """The operation, once it is clear that this region decides."""
        if (dtype := self.wanted(func)) is None:
            return func(*args, **kwargs)
        return func(*self.cast(args, dtype), **{key: self.cast(value, dtype) for key, value in kwargs.items()})

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(_innermost, "busy", False):
            return func(*args, **(kwargs or {}))
        _innermost.busy = True
        try:
            return self.run(func, args, kwargs or {})
        finally:
            _innermost.busy = False


@mistake("MiniAutocast", "an inner region is overruled by the outer one: its call goes through the outer region again")
class OuterWins(_Region):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})


@mistake("MiniAutocast", "reductions run in the low precision too")
class NarrowReductions(_Region):
    def __init__(self, dtype, device_type="cuda"):
        super().__init__(dtype, device_type)
        self.reductions = frozenset()


@mistake("MiniAutocast", "device_type is ignored: CUDA's rules are used for the CPU, too")
class OneRule(_Region):
    def __init__(self, dtype, device_type="cuda"):
        super().__init__(dtype, device_type)
        self.reductions = REDUCTIONS["cuda"]


@mistake("MiniAutocast", "tensors in a list are not cast: einsum takes its operands in one")
class NotInLists(_Region):
    def cast(self, value, dtype):
        return value if isinstance(value, list) else super().cast(value, dtype)


@mistake("MiniAutocast", "float64 is cast, but a region should leave it alone")
class DoubleToo(_Region):
    def is_cast(self, tensor):
        return tensor.is_floating_point()


@mistake("MiniAutocast", "whole numbers and masks are cast as well")
class IntegersToo(_Region):
    def is_cast(self, tensor):
        return tensor.dtype != torch.float64


@mistake("MiniAutocast", "arguments given by name are not cast")
class PositionsOnly(_Region):
    def run(self, func, args, kwargs):
        dtype = self.wanted(func)
        return func(*(args if dtype is None else self.cast(args, dtype)), **kwargs)


@mistake("MiniAutocast", "the result is cast, and the product itself still runs in float32")
class CastsResults(_Region):
    def run(self, func, args, kwargs):
        out, dtype = func(*args, **kwargs), self.wanted(func)
        return out if dtype is None else self.cast(out, dtype)


@mistake("MiniAutocast", "everything is cast to the low precision, sums of two dtypes too")
class CastsEverything(_Region):
    def run(self, func, args, kwargs):
        out = super().run(func, args, kwargs)
        return self.cast(out, self.dtype) if getattr(func, "__name__", "") in ("add", "__add__", "cat") else out


@mistake("MiniAutocast", "dtypes that are not allowed are accepted without an error")
class AnyDtype(_Region):
    def __init__(self, dtype, device_type="cuda"):
        known = dtype in (torch.float16, torch.bfloat16)
        super().__init__(dtype if known else torch.float32, device_type if device_type in REDUCTIONS else "cuda")


@mistake("MiniAutocast", "an error inside leaves the region believing that another one has decided")
class StaysBusy(_Region):
    stuck = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if StaysBusy.stuck:
            return func(*args, **(kwargs or {}))
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError:
            StaysBusy.stuck = True
            raise


# ---- 11.6 autocast_dtypes --------------------------------------------------------------------------------------------


def _predict(model, x, dtype, rules=None, layers=None, note=dict.__setitem__):
    found, handles = {}, []
    for name, module in model.named_modules():
        if layers(name, module) if layers else not list(module.children()):
            handles.append(module.register_forward_hook(lambda m, i, out, n=name: note(found, n, _first(out).dtype)))
    rules = rules or ("cpu" if x.device.type == "cpu" else "cuda")
    try:
        with torch.no_grad(), torch.random.fork_rng(), reference.MiniAutocast(dtype, rules):
            functional_call(model, {name: b.clone() for name, b in model.named_buffers()}, (x,))
    finally:
        for handle in handles:
            handle.remove()
    return {name: found[name] for name, _ in model.named_modules() if name in found}


def _first(out):
    return out if isinstance(out, Tensor) else out[0]


@mistake("autocast_dtypes", "every layer is assumed to return the low precision")
def all_low(model, x, dtype):
    return dict.fromkeys(_predict(model, x, dtype), dtype)


@mistake("autocast_dtypes", "these are the dtypes of the layers' parameters, which autocast leaves in float32")
def of_parameters(model, x, dtype):
    return {n: next(iter([p.dtype for p in m.parameters()]), x.dtype) for n, m in model.named_modules() if n}


@mistake("autocast_dtypes", "CUDA's rules are used on the CPU, where LayerNorm and softmax keep the low precision")
def always_cuda(model, x, dtype):
    return _predict(model, x, dtype, "cuda")


@mistake("autocast_dtypes", "the CPU's rules are used everywhere, but on a GPU LayerNorm returns float32")
def always_cpu(model, x, dtype):
    return _predict(model, x, dtype, "cpu")


@mistake("autocast_dtypes", "only the layer's type counts: Linear gets the low precision, every other layer float32")
def by_type(model, x, dtype):
    layers = _predict(model, x, dtype)
    return {
        n: dtype if isinstance(m, torch.nn.Linear) else torch.float32 for n, m in model.named_modules() if n in layers
    }


@mistake("autocast_dtypes", "only the direct children of the model are looked at")
def children_only(model, x, dtype):
    names = {name for name, _ in model.named_children()}
    return _predict(model, x, dtype, layers=lambda name, _: name in names)


@mistake("autocast_dtypes", "containers are listed beside the layers in them")
def containers_too(model, x, dtype):
    return _predict(model, x, dtype, layers=lambda name, _: bool(name))


@mistake("autocast_dtypes", "BatchNorm's running statistics were changed by the prediction")
def buffers_changed(model, x, dtype):
    out = _predict(model, x, dtype)
    if x.device.type != "meta":
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.add_(1)
    return out


@mistake("autocast_dtypes", "the names are in the order of the calls instead of the order of named_modules()")
def in_order_of_calls(model, x, dtype):
    order, out = [], _predict(model, x, dtype)
    handles = [m.register_forward_hook(lambda *_, n=n: order.append(n)) for n, m in model.named_modules() if n in out]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            functional_call(model, {name: b.clone() for name, b in model.named_buffers()}, (x,))
    finally:
        for handle in handles:
            handle.remove()
    return {name: out[name] for name in order}


@mistake("autocast_dtypes", "for a layer that is called twice, the first call is noted instead of the last")
def first_call(model, x, dtype):
    return _predict(model, x, dtype, note=lambda found, name, dtype: found.setdefault(name, dtype))


@mistake("autocast_dtypes", "the hooks stay in the model")
def hooks_stay(model, x, dtype):
    out = _predict(model, x, dtype)
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
    return out


@mistake("autocast_dtypes", "the hooks stay in the model when its forward fails")
def hooks_stay_after_an_error(model, x, dtype):
    try:
        return _predict(model, x, dtype)
    except RuntimeError:
        model.register_forward_hook(lambda *_: None)
        raise


@mistake(
    "autocast_dtypes", "the prediction changes the state of the random generator, and so the training that follows"
)
def random_drawn(model, x, dtype):
    torch.rand(1)
    return _predict(model, x, dtype)
