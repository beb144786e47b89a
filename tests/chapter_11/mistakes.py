"""Wrong answers to chapter 11's exercises, each with the misconception behind it."""

from lib.workbook.grading import edits

edits("""
# FloatFormat
the largest number is taken to be a power of two: a mantissa of all ones nearly doubles it
@@ max
+ return 2.0 ** (2 ** (self.exponent_bits - 1) - 1 + (not self.has_infinity))
the bias is 2**(E - 1), which is one too large
- 2 - 2 ** => 1 - 2 **
- 2 ** (self.exponent_bits - 1) - 1 => 2 ** (self.exponent_bits - 1) - 2
the largest exponent is left unused, although a format without infinity uses it for numbers
@@ max
- self.has_infinity => True
in the format without infinity, the all-ones mantissa counts as a number, but it is NaN
- 2 - 2 * self.epsilon => 2 - self.epsilon
the smallest number is taken to be the smallest normal one, but subnormals go on below it
- self.min_normal * self.epsilon => self.min_normal
epsilon is half the distance from 1 to the next number: that is the rounding error, not the step
- 2.0**-self.mantissa_bits => 2.0 ** -(self.mantissa_bits + 1)
widths that no format can have are accepted without an error
@@ __post_init__
+ pass

# round_to_format
ties are rounded away from zero, but they should go to the even number
- torch.round(wide / spacing) => torch.copysign(((wide / spacing).abs() + 0.5).floor(), wide)
`floor(x + 0.5)` rounds every tie up, but half of them should go down, to the even number
- torch.round(wide / spacing) => (wide / spacing + 0.5).floor()
`torch.frexp` has its fraction in [1/2, 1), so its exponent is one larger than the logarithm's floor
- .exponent - 1 => .exponent
the bits that do not fit are cut off instead of rounded to the nearest number
- torch.round => torch.trunc
the spacing keeps shrinking below the smallest normal number, but subnormals are equally far apart
- fmt.min_normal => 0.0
numbers below the smallest normal number become 0, but subnormals go on there
- return rounded.to(x.dtype) => return torch.where(wide.abs() < fmt.min_normal, 0.0, rounded).to(x.dtype)
the comparison with max comes before the rounding: 65,519 becomes infinite, but it rounds down
- rounded.abs() > fmt.max => wide.abs() > fmt.max
numbers below -max do not overflow: compare the magnitude with max
- rounded.abs() > fmt.max => rounded > fmt.max
`>=` in place of `>`: the largest number of the format becomes infinite, too
- rounded.abs() > fmt.max => rounded.abs() >= fmt.max
overflow stops at the largest number, but a format with infinity overflows to infinity
- torch.inf if fmt.has_infinity else fmt.max => fmt.max
a format without infinity returns infinity
- torch.inf if fmt.has_infinity else fmt.max => torch.inf
every format without infinity stops at 448, which is the largest number of float8_e4m3fn alone
- else fmt.max => else 448.0
a format without infinity overflows to NaN, as PyTorch did before 2.12; here it saturates
- else fmt.max => else torch.nan
an infinite input becomes NaN, because infinity divided by its own spacing is NaN
- return rounded.to(x.dtype) => return rounded.masked_fill(wide.isinf(), torch.nan).to(x.dtype)
the exponent comes from a logarithm, which rounds up just below a power of two
- exponent = torch.frexp(wide.abs().clamp(min=fmt.min_normal)).exponent - 1
+ magnitude = wide.abs().clamp(fmt.min_normal, torch.finfo(torch.float64).max)
+ exponent = magnitude.log2().floor().clamp(max=1023)
x is changed in place: `double()` of a float64 tensor is that tensor, not a copy
- torch.round(wide / spacing) * spacing => wide.div_(spacing).round_().mul_(spacing)
the sign of zero is lost
- return rounded.to(x.dtype) => return (rounded + 0.0).to(x.dtype)
float64 goes through float32 first, and a number just off a tie is rounded twice
- x.double() => (x.float() if x.dtype == torch.float64 else x).double()
the result has another dtype than x
- rounded.to(x.dtype) => rounded
integers are accepted without an error
- if not x.is_floating_point():
-     raise ValueError(f"x has dtype {x.dtype}, expected floating-point numbers")
+

# accumulate
the whole tensor is summed at once: torch.sum adds in float32 and rounds at the end
- return total => return values.to(value_dtype).float().sum().to(accumulator_dtype)
the values are not rounded to value_dtype before they are added
- .to(value_dtype) => .double()
the total is rounded once at the end instead of after each addition
+ return reference.accumulate(values, torch.float32, value_dtype).to(accumulator_dtype)
the two dtypes are exchanged
+ return reference.accumulate(values, value_dtype, accumulator_dtype).to(accumulator_dtype)
`total = total + value` gives the total the wider of the two dtypes; `+=` keeps its own
- total += value => total = total + value
a list becomes a float32 tensor, torch.tensor's default, before anything is rounded to value_dtype
- , dtype=torch.float64 =>
the total is on the CPU, wherever the values are
- return total => return torch.zeros_like(total, device="cpu") if total.is_meta else total.cpu()
the result is a Python number
- return total => return total.item()
the total begins as the first value itself, so that `+=` changes the values
- total = torch.zeros((), dtype=accumulator_dtype, device=values.device)
- for value in values.detach().flatten().to(value_dtype):
+ values = values.detach().flatten()
+ total = (values[0] if len(values) else values.sum()).to(value_dtype).to(accumulator_dtype)
+ for value in values[1:].to(value_dtype):
`view(-1)` cannot flatten a transposed matrix: `flatten` or `reshape` copies where it must
- .flatten() => .view(-1)

# GradScaler
a step with inf is not skipped: only the scale changes
- if self._found[id(optimizer)].item():
-     return None
+
NaN goes unnoticed: only infinity is looked for
- (~largest.isfinite()) => largest.isinf()
only the greatest entry is looked at, so -inf goes unnoticed
- torch._foreach_norm(alike, torch.inf) => [grad.max() for grad in alike]
the gradients are never divided by the scale
- torch._foreach_mul_(alike, inverse.to(kind[0])) =>
the divided gradients are new tensors, but unscale_ should change them in place
- self._found[id(optimizer)] = torch.stack(found).any()
+ for p in [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]:
+     p.grad = p.grad.clone()
+ self._found[id(optimizer)] = torch.stack(found).any()
step divides the gradients again, although unscale_ has already divided them
- if id(optimizer) not in self._found:
-     self.unscale_(optimizer)
+ self._found.pop(id(optimizer), None)
+ self.unscale_(optimizer)
the scale never grows again
- torch.where(grows, grown, self._scale) => self._scale
the count of good steps goes on after a bad one instead of starting again at 0
- torch.where(found, 0, self._growth_tracker + 1) => torch.where(found, self._growth_tracker, self._growth_tracker + 1)
the count is not set back to 0 after a growth, and the scale never grows a second time
- torch.where(count == self.growth_interval, 0, count) => count
the scale grows one update too late
- (count == self.growth_interval) & => (count == self.growth_interval + 1) &
- torch.where(count == self.growth_interval, 0, count) => torch.where(count == self.growth_interval + 1, 0, count)
inf in one optimizer's gradients keeps the other optimizers from their steps, too
- self._found[id(optimizer)].item() => torch.stack(list(self._found.values())).any().item()
only the first optimizer's gradients decide about the scale, but inf in those of any should make it back off
- torch.stack(list(self._found.values())).any() => list(self._found.values())[0]
only the last optimizer's gradients decide about the scale, but inf in those of any should make it back off
- torch.stack(list(self._found.values())).any() => list(self._found.values())[-1]
update asks for a step, but unscale_ alone is enough for it to back off
- if not self._found: => if not self._stepped:
update forgets only the optimizers that were stepped, so another one's inf counts again in the next step
- self._found, self._stepped = {}, set()
+ self._found = {key: flag for key, flag in self._found.items() if key not in self._stepped}
+ self._stepped = set()
steps are counted instead of updates, so two optimizers make the scale grow twice as soon
- self._growth_tracker + 1) => self._growth_tracker + len(self._stepped))
the scale backs off once for each optimizer instead of once for each update
- self._scale * self.backoff_factor => self._scale * self.backoff_factor ** len(self._found)
the scale doubles into infinity, and every gradient after it is lost
- & grown.isfinite() =>
the host reads one value for each parameter, but one value for all of them is enough
- torch.stack(found).any() => torch.tensor(not all(bool(grad.isfinite().all()) for grad in grads))
gradients are squared to look for infinity, and 1e30 overflows
- torch._foreach_norm(alike, torch.inf) => [grad.float().square().sum() for grad in alike]
gradients are added up to look for infinity, and the sum of large finite ones overflows
- torch._foreach_norm(alike, torch.inf) => [grad.sum() for grad in alike]
unscale_ may be called twice without an error, and the gradients are divided twice
- id(optimizer) in self._found => False
a closure given by position is run, and its gradients are not checked
- or args =>
step may be called twice without an error, and the same gradients are applied twice
@@ step
- id(optimizer) in self._stepped => False
an empty gradient raises an error, because the maximum of no numbers does
- grads = [grad for grad in grads if grad.numel()] => [grad.max() for grad in grads]
float16 parameters are accepted, and their small updates are lost
- any(grad.dtype == torch.float16 for grad in grads) => False
only the first gradient is looked at, and a float16 one may come after it
- any(grad.dtype == torch.float16 for grad in grads) => grads[0].dtype == torch.float16
a tuple comes back as a list
- tuple(scaled) if isinstance(outputs, tuple) else scaled => scaled
the scale stays on the CPU instead of moving to the device of the loss
- self._scale = self._scale.to(outputs.device, non_blocking=True)
- self._growth_tracker = self._growth_tracker.to(outputs.device, non_blocking=True)
+
only one tensor can be scaled, no list or tuple
- [self.scale(output) for output in outputs] => outputs
step does not return what the optimizer's step returned
- return optimizer => optimizer
keyword arguments do not reach the optimizer's step
- (*args, **kwargs) => ()
the count becomes int64 (the dtype of `torch.tensor(0)`), but it should stay int32
- .to(torch.int32) => .long()

# MiniAutocast
an inner region is overruled by the outer one: its call goes through the outer region again
- if getattr(_inside, "busy", False):
-     return func(*args, **kwargs)
+
an operation that is in no list of the inner region goes through the outer one, which may cast it
- _inside.busy = True
+ if dtype is None:
+     return func(*args, **kwargs)
+ _inside.busy = True
reductions run in the low precision too
- torch.float32 if name in self.reductions else None => None
device_type is ignored: CUDA's rules are used for the CPU, too
- REDUCTIONS[device_type] => REDUCTIONS["cuda"]
tensors in a list are not cast: einsum takes its operands in one
- list | tuple => tuple
float64 is cast, but a region should leave it alone
- and value.dtype != torch.float64 =>
whole numbers and masks are cast as well
- and value.is_floating_point() =>
arguments given by name are not cast
- kwargs = {key: _cast(value, dtype) for key, value in kwargs.items()} =>
the result is cast, and the product itself still runs in float32
- args = _cast(args, dtype)
- kwargs = {key: _cast(value, dtype) for key, value in kwargs.items()}
+ return _cast(func(*args, **kwargs), dtype)
everything is cast to the low precision, sums of two dtypes too
- else None => else self.dtype if name in ("add", "__add__", "cat") else None
dtypes that are not allowed are accepted without an error
- raise ValueError(f"dtype = {dtype}, expected torch.float16, torch.bfloat16 or torch.float32") => dtype = torch.float32
- raise ValueError(f"device_type = {device_type!r}, expected one of {', '.join(REDUCTIONS)}") => device_type = "cuda"
an error inside leaves the region believing that another one has decided
- try: => if True:
-     return func(*args, **kwargs)
- finally:
-     _inside.busy = False
+ out = func(*args, **kwargs)
+ _inside.busy = False
+ return out

# autocast_dtypes
every layer is assumed to return the low precision
- name: found[name] for => name: dtype for
these are the dtypes of the layers' parameters, which autocast leaves in float32
- name: found[name] for => name: next((p.dtype for p in layers[name].parameters()), x.dtype) for
CUDA's rules are used on the CPU, where LayerNorm and softmax keep the low precision
- "cpu" if x.device.type == "cpu" else "cuda" => "cuda"
the CPU's rules are used everywhere, but on a GPU LayerNorm returns float32
- "cpu" if x.device.type == "cpu" else "cuda" => "cpu"
only the layer's type counts: Linear gets the low precision, every other layer float32
- name: found[name] for => name: dtype if isinstance(layers[name], nn.Linear) else torch.float32 for
only the direct children of the model are looked at
- model.named_modules() if not list(module.children()) => model.named_children()
containers are listed beside the layers in them
- if not list(module.children()) => if name
BatchNorm's running statistics were changed by the prediction
- functional_call(model, buffers, (x,)) => model(x)
the names are in the order of the calls instead of the order of named_modules()
- for name in layers if name in found => for name in found
for a layer that is called twice, the first call is noted instead of the last
- found.update({name: _first_tensor(output).dtype}) => found.setdefault(name, _first_tensor(output).dtype) and None
the hooks stay in the model
- for handle in handles:
-     handle.remove()
+ pass
all forward hooks are removed from the model, those of others too
- handle.remove() => pass
- return {name: found[name] for
+ for layer in layers.values():
+     layer._forward_hooks.clear()
+ return {name: found[name] for
`train()` at the end puts all layers in training mode, those that were in eval mode too
- functional_call(model, buffers, (x,)) => functional_call(model.eval(), buffers, (x,))
- for handle in handles:
+ model.train()
+ for handle in handles:
`zero_grad()` removes gradients that the model had before
- for handle in handles:
+ model.zero_grad()
+ for handle in handles:
the first tensor is looked for in tuples only, but a list or dict of tensors has one, too
- _first_tensor(output).dtype => (output[0] if isinstance(output, tuple) else output).dtype
the hooks stay in the model when its forward fails
- try: => if True:
- finally: => if True:
the prediction changes the state of the random generator, and so the training that follows
- , torch.random.fork_rng(gpus) =>
""")
