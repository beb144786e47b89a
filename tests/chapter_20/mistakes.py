"""What goes wrong when numbers of eight bits and fewer are written by hand."""

import torch

from lib.workbook.grading import edits

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

edits("""
# absmax_scale
the inverse is returned: the format's largest number over the tensor's; a number is q * scale
+ return 1 / reference.absmax_scale(x, dtype, dim)
the largest magnitude is not divided by the format's largest number
+ return reference.absmax_scale(x, dtype, dim) * largest(dtype)
the largest number is taken instead of the largest magnitude: negative numbers are forgotten
+ return reference.absmax_scale(x.clamp(min=0), dtype, dim)
one scale for all numbers, whatever dim is
+ reference.absmax_scale(x, dtype, dim)
+ return reference.absmax_scale(x, dtype)
the scale is one for each entry of dim, instead of one that serves all numbers along dim
- _amax(magnitudes, dim, keepdim=True)
+ _amax(magnitudes, [d for d in range(x.ndim) if d != dim % x.ndim], keepdim=True)
the dimension along which the largest is taken is dropped: it must stay, with size 1
- _amax(magnitudes, dim, keepdim=True) => _amax(magnitudes, dim)
zeros get the scale 0, and would be divided by it
- torch.where(scale > 0, scale, 1.0) => scale
infinities enter the scale
- nan_to_num(nan=0, posinf=0) => nan_to_num(nan=0, posinf=torch.inf)
NaN enters the scale
+ scale = reference.absmax_scale(x, dtype, dim)
+ return scale * torch.nan if x.isnan().any() else scale
e5m2's largest number is taken for e4m3fn too
+ return reference.absmax_scale(x, E5M2 if dtype == E4M3 else dtype, dim)
int8's largest magnitude is taken to be 128, which only negative numbers have
+ return reference.absmax_scale(x, dtype, dim) * (127 / 128 if dtype == INT8 else 1)
the blocks at the ragged ends are left out
+ scale = reference.absmax_scale(x, dtype, dim)
+ return scale[: x.shape[0] // BLOCK, : x.shape[1] // BLOCK] if isinstance(dim, tuple) else scale
the scale has the dtype of x instead of float32
+ return reference.absmax_scale(x, dtype, dim).to(x.dtype)
the scale carries a gradient: x was not detached
+ return reference.absmax_scale(x, dtype, dim) + 0 * x.float().nan_to_num(0, 0, 0).sum()
the division by the format's largest number is in the dtype of x instead of float32
- x.detach().float().abs() => x.detach().abs()
- torch.where(scale > 0, scale, 1.0) => torch.where(scale > 0, scale, 1.0).float()
zeros get a smallest scale, such as 1e-12, instead of 1
- torch.where(scale > 0, scale, 1.0) => torch.where(scale > 0, scale, 1e-12)
the scale of small numbers is taken for 0, and becomes 1
- torch.where(scale > 0, scale, 1.0) => torch.where(scale > 1e-12, scale, 1.0)
NaN is replaced in x itself
+ scale = reference.absmax_scale(x, dtype, dim)
+ x.detach()[x.isnan()] = 0
+ return scale
infinities become float32's largest number, and enter the scale as such
+ return reference.absmax_scale(x.float().nan_to_num(), dtype, dim)
a tensor without numbers has no largest magnitude: `amax` raises instead of the scale being 1
- (torch.amax if magnitudes.numel() else torch.sum)(magnitudes => torch.amax(magnitudes
block sizes other than 128 x 128 are not refused
+ return reference.absmax_scale(x, dtype, (BLOCK, BLOCK) if isinstance(dim, tuple) and x.ndim == 2 else dim)
a format that is none of the three is not refused
+ return reference.absmax_scale(x, dtype if dtype in (E4M3, E5M2, torch.int8) else E4M3, dim)
whether a number is finite is asked before the conversion to float32, in which it may be infinite
+ scale = reference.absmax_scale(x, dtype, dim)
+ finite = torch.where(x.isfinite(), x.detach(), 0)
+ return torch.full_like(scale, torch.inf) if finite.float().isinf().any() else scale
x itself is changed: in float32, `x.float()` is no copy
+ scale = reference.absmax_scale(x, dtype, dim)
+ x.detach().float().abs_()
+ return scale
`view` cannot cut blocks out of a matrix whose rows don't lie one after the other
+ blocks = isinstance(dim, tuple) and x.ndim == 2
+ return reference.absmax_scale(x.view(-1).view(x.shape) if blocks else x, dtype, dim)

# quantize
multiplied by the scale instead of divided
+ return reference.quantize(x, 1 / scale, dtype)
not clamped: numbers beyond the largest one overflow instead of saturating
- .clamp(-bound, bound) =>
int8 is cut towards 0 instead of rounded
- scaled.round() => scaled
int8 is rounded half up instead of to even
- scaled.round() => torch.floor(scaled + 0.5)
float8 is rounded to whole numbers first, as int8 is
- else scaled.to => else scaled.round().to
infinities become 0 instead of the largest number
+ return reference.quantize(torch.where(x.isinf(), 0, x), scale, dtype)
NaN becomes 0 in float8, too, where it should stay NaN
+ return reference.quantize(torch.where(x.isnan(), 0, x), scale, dtype)
int8 saturates at -128 below, and at 127 above
- .clamp(-bound, bound) => .clamp(-bound - (dtype == torch.int8), bound)
divided in the dtype of x instead of float32
- x.float() / expand_blocks(scale, x.shape) => x / expand_blocks(scale, x.shape).to(x.dtype)
x is divided in place: the caller's tensor is changed
- (x.float() / expand_blocks(scale, x.shape)) => x.float().div_(expand_blocks(scale, x.shape))
NaN is replaced in x itself
+ q = reference.quantize(x, scale, dtype)
+ x[x.isnan()] = 0
+ return q
the numbers come back in float32 instead of the format's dtype
+ return reference.quantize(x, scale, dtype).float()
every block is divided by the first block's scale
+ spread = expand_blocks(scale, x.shape)
+ return reference.quantize(x, scale if spread is scale else scale[:1, :1], dtype)

# dequantize
divided by the scale instead of multiplied
+ return reference.dequantize(q, 1 / scale)
the scale is forgotten
+ return q.float()
blocks of scales are repeated like a pattern instead of spread over their blocks
+ if expand_blocks(scale, q.shape) is scale:
+     return reference.dequantize(q, scale)
+ times = [-(-n // s) for n, s in zip(q.shape, scale.shape, strict=True)]
+ return q.float() * scale.repeat(*times)[: q.shape[0], : q.shape[1]]
the product is rounded to bfloat16
+ return reference.dequantize(q, scale).bfloat16().float()
the product is in bfloat16, or in another narrow dtype: a scale without dimensions does not widen it
+ return (q.bfloat16() * expand_blocks(scale, q.shape)).float()

# quantization_error
20 instead of 10: squares are powers already
- (10 * => (20 *
noise over signal: the sign is wrong
+ return -reference.quantization_error(x, dtype, granularity)
the natural logarithm is taken
- torch.log10 => torch.log
one scale for the whole tensor, whatever the granularity is
- dims[granularity]) => None)
scales of columns instead of rows
- "row": -1 => "row": 0
where nothing is lost, or there is nothing, it returns NaN instead of infinity
+ answer = reference.quantization_error(x, dtype, granularity)
+ return torch.nan if answer == torch.inf and not x.any() else answer
the signal is that of the rounded numbers instead of x
- x.double().square().sum() / noise => dequantize(quantize(x, scale, dtype), scale).double().square().sum() / noise
squares are added in the dtype of x, where they overflow or lose digits
- dequantize(quantize(x, scale, dtype), scale).double() - x.double()
+ dequantize(quantize(x, scale, dtype), scale).to(x.dtype) - x
- x.double().square().sum() / noise => x.square().sum() / noise
absolute values are added instead of squares
- x.double()).square() => x.double()).abs()
- x.double().square() => x.double().abs()
a tensor is returned instead of a float
+ return torch.tensor(reference.quantization_error(x, dtype, granularity))
an unknown granularity is taken for 'tensor'
+ known = granularity in ("tensor", "row", "block")
+ return reference.quantization_error(x, dtype, granularity if known else "tensor")

# scaled_matmul
the scales are forgotten
- dequantize(a, scale_a) @ dequantize(b, scale_b) => a.float() @ b.float()
divided by the scales instead of multiplied
+ return reference.scaled_matmul(a, b, 1 / scale_a, 1 / scale_b, out_dtype)
only a's scale is used
+ return reference.scaled_matmul(a, b, scale_a, torch.ones_like(scale_b), out_dtype)
the sum is taken in bfloat16, or the factors are rounded to it before the product
- dequantize(a, scale_a) @ dequantize(b, scale_b)
+ dequantize(a, scale_a).bfloat16() @ dequantize(b, scale_b).bfloat16()
blocks are multiplied with the scale of their first block along the sum
+ if expand_blocks(scale_a, a.shape) is scale_a:
+     return reference.scaled_matmul(a, b, scale_a, scale_b, out_dtype)
+ return reference.scaled_matmul(a, b, scale_a[:, :1].expand_as(scale_a), scale_b[:1].expand_as(scale_b), out_dtype)
the result stays in float32, whatever out_dtype is
+ return reference.scaled_matmul(a, b, scale_a, scale_b, torch.float32)
the result is rounded to bfloat16 and then to out_dtype
+ return reference.scaled_matmul(a, b, scale_a, scale_b, torch.bfloat16).to(out_dtype)
a's scale is used twice, and b's not at all
- dequantize(b, scale_b) => dequantize(b, scale_a)
one scale for a is taken to mean one for b, too: the blocks' scales of b don't broadcast
- dequantize(a, scale_a) @ dequantize(b, scale_b)
+ a.float() @ b.float() * scale_a * scale_b if scale_a.numel() == 1 else dequantize(a, scale_a) @ dequantize(b, scale_b)
one scale for b is taken to mean one for a, too: the blocks' scales of a don't broadcast
- dequantize(a, scale_a) @ dequantize(b, scale_b)
+ a.float() @ b.float() * scale_a * scale_b if scale_b.numel() == 1 else dequantize(a, scale_a) @ dequantize(b, scale_b)
`has_float8` is never asked: it says where a GPU multiplies such numbers
- if has_float8(a): => if False:

# DelayedScale
the latest step's magnitude is used instead of the largest of the history
- torch.stack(self.amax).amax() => self.amax[-1]
nothing is forgotten: the history grows for ever
- [-self.history :] =>
one step too many is remembered
- self.history = history => self.history = history + 1
one step too few is remembered
- self.history = history => self.history = max(1, history - 1)
the first steps are remembered instead of the last
- [-self.history :] => [: self.history]
the number is copied to the host (item() or float()), which has to wait for the GPU
- _amax(_magnitudes(x)) => torch.tensor(_amax(_magnitudes(x)).item())
`x[mask]` makes the host wait: the GPU must say how many numbers are left
- _amax(_magnitudes(x)) => _amax(_magnitudes(x)[_magnitudes(x).isfinite()])
a recorded step of zeros counts as no record, so the current tensor's scale is taken
- if self.amax: => if self.amax and (x is None or torch.stack(self.amax).any()):
x itself is changed: in float32, `x.float()` is no copy
- _amax(_magnitudes(x)) => _amax(_magnitudes(x.detach().float().abs_()))
x is not detached: what is recorded keeps the step's graph
- x.detach().float() => x.float()
all magnitudes of a step are recorded, not the largest alone
@@ update
+ reference.DelayedScale.update(self, x)
+ self.all = [*getattr(self, "all", []), x.detach().abs()][-self.history :]
the magnitude stays in the dtype of x, and so does the scale
- _amax(_magnitudes(x)) => _amax(_magnitudes(x)).to(x.dtype)
all objects share one history
- history: int = 16 => history: int = 16, shared=[]
- self.amax: list[Tensor] = [] => self.amax = shared
- self.amax = [*self.amax => self.amax[:] = [*self.amax
the current tensor is always used where it is given: the scale is not from the past
- if self.amax: => if self.amax and x is None:
the inverse is returned
@@ scale
+ return 1 / reference.DelayedScale.scale(self, dtype, x)
the mean of the history is used instead of its largest
- torch.stack(self.amax).amax() => torch.stack(self.amax).mean()
`scale` records the tensor that it is given, too
@@ scale
+ scale = reference.DelayedScale.scale(self, dtype, x)
+ if x is not None:
+     self.update(x)
+ return scale
tensors are kept instead of their largest magnitudes: memory for a history of whole tensors
- _amax(_magnitudes(x)) => x.detach()
- torch.stack(self.amax).amax() => torch.stack([_amax(_magnitudes(x)) for x in self.amax]).amax()
every format gets e4m3fn's scale
@@ scale
+ return reference.DelayedScale.scale(self, E4M3, x)
infinities are recorded: they spoil the scale for the whole history
- _amax(_magnitudes(x)) => _amax(x.detach().float().abs().nan_to_num(nan=0, posinf=torch.inf))
NaN is recorded: it spoils the scale for the whole history
- _amax(_magnitudes(x)) => _amax(x.detach().float().abs().nan_to_num(nan=torch.nan, posinf=0))
a history of zeros gives the scale 0, by which the next tensor would be divided
- _positive(torch.stack(self.amax).amax() / largest(dtype)) => torch.stack(self.amax).amax() / largest(dtype)
a step of zeros is recorded as the scale 1 times the format's largest number, instead of as 0
- _amax(_magnitudes(x)) => _amax(_magnitudes(x)) if x.any() else torch.tensor(127.0)
without a past and without a tensor it returns 1 instead of raising
@@ scale
+ return reference.DelayedScale.scale(self, dtype, x) if self.amax or x is not None else torch.tensor(1.0)

# Float8Linear
gradients are e4m3fn, as activations are
- torch.float8_e5m2 if name == "grad" else torch.float8_e4m3fn => torch.float8_e4m3fn
gradients are e5m2, but their scale maps onto e4m3fn's largest number, and small gradients become 0
- absmax_scale(tensor, dtype, => absmax_scale(tensor, torch.float8_e4m3fn,
- self.past[name].scale(dtype, tensor) => self.past[name].scale(torch.float8_e4m3fn, tensor)
activations and weights are e5m2, as gradients are
- torch.float8_e5m2 if name == "grad" else torch.float8_e4m3fn => torch.float8_e5m2
'rowwise' gives a scale to each entry along the sum, which a product cannot take out of it
+ if self.recipe == "rowwise":
+     scale = absmax_scale(tensor, dtype, 1 - dim)
+     return dequantize(quantize(tensor, scale, dtype), scale), torch.tensor(1.0)
  return quantize(tensor, scale, dtype), scale
every recipe uses one scale for each tensor
- dims.get(self.recipe) => None
nothing is scaled: numbers are cast as they are
- return quantize(tensor, scale, dtype), scale => return quantize(tensor, torch.ones(()), dtype), torch.ones(())
'delayed' uses the current tensor's scale: its history is never asked
- self.now[name] if self.recipe == "delayed" else =>
'delayed' records a tensor at each of its products, so its history covers half as many steps
+ if self.recipe == "delayed" and not first:
+     self.past[name].update(tensor)
  return quantize(tensor, scale, dtype), scale
'delayed' records a tensor before it asks for the scale: the scale is not from the past
- self.now[name] = self.past[name].scale(dtype, tensor) => self.past[name].update(tensor)
- self.past[name].update(tensor) => self.now[name] = self.past[name].scale(dtype, tensor)
'delayed' rounds a tensor's second product with a newer scale than its first
- if self.recipe == "delayed" and first: => if self.recipe == "delayed":
- self.past[name].update(tensor)
+ if first:
+     self.past[name].update(tensor)
'delayed' chooses a gradient's scale in the product with the weight only, which a frozen input never asks for
- and first: => and (name != "grad" or tensor.shape[1] == len(self.weight)) and (name == "grad" or first):
activations, weights and gradients share one history
- {name: DelayedScale() for name in ("x", "weight", "grad")} => dict.fromkeys(("x", "weight", "grad"), DelayedScale())
only the forward product is in float8: backward multiplies the unrounded tensors
+ if "grad" in names:
+     return (a.float() @ b.float()).to(x.dtype)
  left, scale_a =
the bias is forgotten
- y + self.bias.to(y.dtype) => y + 0 * self.bias.to(y.dtype)
the output is float32, whatever the dtype of x is
@@ forward
+ return reference.Float8Linear.forward(self, x.float())
the parameters are copied, so training the layer leaves the given one as it was
- = linear.weight, => = nn.Parameter(linear.weight.detach().clone()),
the weight is detached, so it gets no gradient
- self.weight, product => self.weight.detach(), product
the given layer is kept as a submodule: its weights are in the state dict twice
- self.now: dict[str, Tensor] = {} => self.now, self.linear = {}, linear
another recipe is not refused
- raise ValueError(f"recipe = {recipe!r}: expected 'dynamic', 'delayed', 'rowwise' or 'blockwise'")
+ recipe = "dynamic"
weights are cast to the dtype of x before they are rounded: they are rounded twice
@@ cast
+ return reference.Float8Linear.cast(self, tensor.bfloat16() if name == "weight" else tensor, name, dim, first)
`view` cannot flatten an x whose vectors don't lie one after the other: `reshape` copies where it must
- x.reshape(-1 => x.view(-1
'rowwise' gives both factors scales of rows: in the right factor they change along the sum
- {"rowwise": dim => {"rowwise": 1
the products and the bias are added in float32, and only the sum is rounded to the dtype of x
- scale_a, scale_b, x.dtype => scale_a, scale_b, torch.float32
- y if self.bias is None else y + self.bias.to(y.dtype) => (y if self.bias is None else y + self.bias).to(x.dtype)

# mx_quantize
the 8, the exponent of e4m3fn's largest numbers, is not subtracted
- - 1 - 8 => - 1
torch.frexp's exponent is taken as it is, but it is one more than floor(log2)
- - 1 - 8 => - 8
the exponent is rounded up instead of down
- torch.frexp(amax).exponent - 1 - 8 => torch.ceil(torch.log2(amax.double())).int() - 8
the exponent is rounded to the nearest instead of down
- torch.frexp(amax).exponent - 1 - 8 => torch.round(torch.log2(amax.double())).int() - 8
the largest number is divided by 448 and rounded down to a power of two
- torch.frexp(amax).exponent - 1 - 8 => torch.floor(torch.log2(amax.double() / 448)).int()
the largest number is divided by 448 and rounded up to a power of two
- torch.frexp(amax).exponent - 1 - 8 => torch.ceil(torch.log2(amax.double() / 448)).int()
log2 in float32 rounds up just below a power of two
- torch.frexp(amax).exponent - 1 - 8 => torch.floor(torch.log2(amax)).int() - 8
9 is subtracted from floor(log2) instead of 8: frexp's extra one is taken off twice
- - 1 - 8 => - 1 - 9
elements are not divided by the scale
- quantize(blocks, scale, => quantize(blocks, torch.ones(()),
a block of zeros gets the scale 1 instead of the smallest
- -127).clamp => 0).clamp
infinities decide the scale of their block
+ return reference.mx_quantize(x.float().clamp(-3e38, 3e38), block)
the blocks are divided in place: in float32, `x.float()` is no copy
- quantize(blocks, scale, => quantize(blocks.detach().div_(scale), torch.ones(()),
NaN becomes 0, where it should stay NaN
- quantize(blocks, scale, => quantize(blocks.nan_to_num(0, torch.inf, -torch.inf), scale,
NaN decides the scale of its block
- _magnitudes(blocks).amax(-1, keepdim=True) => blocks.abs().nan_to_num(torch.nan, posinf=0).amax(-1, keepdim=True)
`view` cannot cut blocks out of rows that don't lie one after the other: `reshape` copies where it must
- x.float().unflatten(-1, (-1, block))
+ x.float().view(-1, block).view(*x.shape[:-1], x.shape[-1] // block, block)
the scales are float32 instead of float8_e8m0fnu
- .to(torch.float8_e8m0fnu) =>

# quantize_int4
the range is divided by 16, the number of levels, instead of 15, the number of steps
- / 15 => / 16
the range need not contain 0: a group of one sign begins at its smallest number
- .clamp(max=0) =>
- .clamp(min=0) =>
- .clamp(max=15) => .clamp(0, 15)
the range is symmetric around 0: levels are wasted where a group is not
- groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
+ -groups.abs().amax(-1, keepdim=True), groups.abs().amax(-1, keepdim=True)
levels are cut off instead of rounded
- torch.round(groups / scale) => torch.floor(groups / scale)
the zero point is added before rounding: with an odd one, ties go to the other neighbour
- torch.round(groups / scale) + zero => torch.round(groups / scale + zero)
ties are rounded away from 0 instead of to the even number
- torch.round(groups / scale) => groups.sign() * torch.floor(groups.abs() / scale + 0.5)
the zero points are returned before the scales
+ q, scale, zero = reference.quantize_int4(weight, group_size)
+ return q, zero, scale
the weights are divided in place: in float32, `weight.float()` is no copy
- groups / scale => groups.div_(scale)
weights are divided in their own dtype instead of float32
- torch.round(groups / scale) => torch.round(groups.to(weight.dtype) / scale.to(weight.dtype))
`view` cannot cut groups out of rows that don't lie one after the other: `reshape` copies where it must
- weight.detach().float().unflatten(1, (-1, group_size))
+ weight.detach().float().view(-1, group_size).view(weight.shape[0], -1, group_size)
the zero point is cut off instead of rounded
- torch.round(-low / scale) => torch.floor(-low / scale)
one scale for a whole row, repeated for its groups
+ n_groups = weight.shape[1] // group_size
+ q, _, _ = reference.quantize_int4(weight, group_size)
+ q, scale, zero = reference.quantize_int4(weight[:, : q.shape[1]], q.shape[1])
+ return q, scale.repeat(1, n_groups), zero.repeat(1, n_groups)
the zero point has the wrong sign
+ q, scale, zero = reference.quantize_int4(weight, group_size)
+ return q, scale, (256 - zero.int()).remainder(256).to(torch.uint8)
the smallest number is returned instead of the level that stands for 0
+ q, scale, zero = reference.quantize_int4(weight, group_size)
+ return q, scale, -zero.float() * scale
the zero point is not clamped: the scale of the smallest numbers has few digits
- .clamp(max=15) =>
levels are not clamped, and wrap around
- .clamp(0, 15).to(torch.uint8) => .int().remainder(16).to(torch.uint8)
a group of zeros gets another scale than 1
- scale[..., 0] => torch.where(groups.any(-1), scale[..., 0], 0.0)
the scales have the dtype of the weights instead of float32
- scale[..., 0] => scale[..., 0].to(weight.dtype)

# pack_int4
the even place is in the high four bits and the odd one in the low four
- q[..., ::2] | q[..., 1::2] << 4 => q[..., 1::2] | q[..., ::2] << 4
the first half of the row is in the low four bits and the second half in the high ones
- q[..., ::2] | q[..., 1::2] << 4 => q[..., : q.shape[-1] // 2] | q[..., q.shape[-1] // 2 :] << 4
the bytes are int32 instead of uint8
+ return reference.pack_int4(q).to(torch.int32)
the odd place is multiplied by 15 instead of shifted by four bits
- q[..., ::2] | q[..., 1::2] << 4 => (q[..., ::2].int() + 15 * q[..., 1::2].int()).to(torch.uint8)
the pair is joined before it is shifted: `<<` binds tighter than `|`, and (a | b) << 4 is not a | b << 4
- q[..., ::2] | q[..., 1::2] << 4 => (q[..., ::2] | q[..., 1::2]) << 4
the levels that were given are changed in place
+ packed = reference.pack_int4(q)
+ q[..., ::2] |= q[..., 1::2] << 4
+ return packed
an odd number of levels in a row is not refused
+ return reference.pack_int4(q[..., : q.shape[-1] // 2 * 2])
`view` cannot cut pairs out of rows that don't lie one after the other: `reshape` copies where it must
- return q[..., ::2] | q[..., 1::2] << 4
+ pairs = q.view(-1, 2)
+ return (pairs[:, 0] | pairs[:, 1] << 4).view(*q.shape[:-1], q.shape[-1] // 2)

# unpack_int4
the high four bits come first
+ return reference.unpack_int4(packed).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
the levels are int32 instead of uint8
+ return reference.unpack_int4(packed).to(torch.int32)
all low halves come first, then all high ones
+ return torch.cat([packed & 15, packed >> 4], dim=-1)
the high four bits are not shifted down
- >> 4 => & 240
the low level keeps the high four bits
- & 15 =>
the bytes that were given are changed in place
+ q = reference.unpack_int4(packed)
+ packed &= 15
+ return q

# int4_matmul_kernel
the low and the high four bits of a byte are exchanged
- byte >> 4 if odd else byte & 15 => byte & 15 if odd else byte >> 4
the zero point is not subtracted
- (level - origin[None, :]) => level
the zero point is added instead of subtracted
- level - origin => level + origin
all groups of a column get the first group's scale and zero point
- + start // group =>
each byte is loaded twice, once for each of its levels
+ byte = tl.load(bytes_at, mask=(columns < N)[None, :], other=0)
  level = (byte
tl.dot is left to use TF32 on a GPU
- , input_precision="ieee" =>
rows after the last are not masked
- mask=(rows < M)[:, None] => mask=(rows >= 0)[:, None]
columns after the last are not masked
- mask=(columns < N)[None, :] => mask=(columns >= 0)[None, :]
only the first TILE_K terms are added: the loop over K is missing
- range(0, K, TILE_K) => range(0, TILE_K, TILE_K)
the sum is rounded to the dtype of x after each tile instead of once at the end
  total, input_precision="ieee")
+ total = total.to(x.dtype.element_ty).to(tl.float32)
high levels are taken for the second half of the tile instead of for the odd places
- 2 * pairs + odd => pairs + odd * (TILE_K // 2)
a column of x is counted as its byte is: the even terms of the bytes are two columns apart
- 2 * pairs + odd => pairs
the odd columns of x are multiplied with both levels of a byte, and the even ones with none
- 2 * pairs + odd => 2 * pairs + 1
the even columns of x are multiplied with both levels of a byte, and the odd ones with none
- 2 * pairs + odd => 2 * pairs
the zero point is subtracted after scaling: it is a level, and is scaled too
- (level - origin[None, :]) * factor[None, :] => level * factor[None, :] - origin[None, :]
rows are counted by `tl.program_id(1)`, as columns are: the rows' programs are along the grid's first dimension
- tl.program_id(0) => tl.program_id(1)
weights and x are multiplied in float32 instead of the dtype of x
- * factor[None, :]).to(x.dtype.element_ty) => * factor[None, :])
- tl.load(x_at, mask=(rows < M)[:, None], other=0.0), weight
+ tl.load(x_at, mask=(rows < M)[:, None], other=0.0).to(tl.float32), weight

# Int4Linear
the bias is forgotten
- y + self.bias.to(y.dtype) => y
the zero point is not subtracted
- self.zero).to => torch.zeros_like(self.zero)).to
the levels are kept one in a byte: packing is forgotten
- pack_int4(q) => q
- unpack_int4(self.packed) => self.packed
the packed weights are a plain attribute instead of a buffer: no state_dict has them
- self.register_buffer(name, tensor) => (setattr if name == "packed" else nn.Module.register_buffer)(self, name, tensor)
the scales and zero points are not in the state dict: `persistent=False`
- self.register_buffer(name, tensor) => self.register_buffer(name, tensor, persistent=name == "packed")
the given layer's parameters are frozen
+ linear.requires_grad_(False)
  q, scale, zero =
`view` cannot flatten an x whose vectors don't lie one after the other: `reshape` copies where it must
- x.reshape(-1, x.shape[-1]) => x.view(-1, x.shape[-1])
the weights stay beside the packed ones, as a parameter
+ self.weight = linear.weight
  q, scale, zero =
the output is float32, whatever the dtype of x is
@@ forward
+ return reference.Int4Linear.forward(self, x.float())
the bias is added in its own dtype, and the output takes it
- y + self.bias.to(y.dtype) => y + self.bias
the given layer's weights are rounded in place
+ linear.weight.data.copy_(dequantize_int4(q, scale, zero))
  for name, tensor in
the bias is the layer's own: it changes when the layer is trained on
- linear.bias.detach().clone() => linear.bias.detach()
a layer without a bias gets one of zeros
- None if linear.bias is None => torch.zeros(len(q)) if linear.bias is None
the copy of the bias carries a gradient: it was not detached
- linear.bias.detach().clone() => linear.bias.clone()
the unpacked weights are kept as an attribute, beside the packed ones
+ self.unpacked = [dequantize_int4(q, scale, zero)]
  for name, tensor in
without being told, groups are not of 128
- group_size: int = 128 => group_size: int = 64
groups are multiplied one by one, and added in the dtype of x instead of float32
@@ forward
+ weight = dequantize_int4(reference.unpack_int4(self.packed), self.scale, self.zero).to(x.dtype)
+ size = weight.shape[1] // self.scale.shape[1]
+ parts = [a @ b.T for a, b in zip(x.split(size, -1), weight.split(size, 1), strict=True)]
+ y = sum(parts[1:], parts[0])
+ return y if self.bias is None else y + self.bias.to(y.dtype)
groups always have 128 columns, or are the whole row
- linear.weight, group_size => linear.weight, 128 if linear.weight.shape[1] % 128 == 0 else linear.weight.shape[1]

# gptq
errors are not carried on: this is plain rounding
- w[:, i + 1 :] -= error * upper[i, i + 1 :] =>
the Cholesky factor of the Hessian is used instead of that of its inverse
- torch.linalg.cholesky(inverse, upper=True) => torch.linalg.cholesky(torch.linalg.inv(inverse), upper=True)
the rows of the inverse are used as they are: columns that are done are not taken out of it
- torch.linalg.cholesky(inverse, upper=True) => inverse
the errors are added to the columns after instead of subtracted
- -= error => += error
weights are divided by the scale in float64: near a tie the level is not that of `quantize_int4`
- column.float() / scale => column / scale
errors stay within their group
- w[:, i + 1 :] -= error * upper[i, i + 1 :]
+ stop = (i // group_size + 1) * group_size
+ w[:, i + 1 : stop] -= error * upper[i, i + 1 : stop]
a group's range is that of the original weights instead of the weights as they are by then
- w[:, i : i + group_size] => weight.detach()[:, i : i + group_size]
the Hessian is not damped: a singular one has no inverse
- 0.01 * => 0 *
the damping is 1 % of the diagonal's sum instead of its mean
- h.diagonal().mean() => h.diagonal().sum()
the damping has a smallest value, which is more than 1 % where inputs are small
- h.diagonal().mean() => h.diagonal().mean().clamp(min=1e-6)
the weight is not detached: the scales of a parameter carry the graph of all corrections
- weight.detach().double() => weight.double()
the Hessian is not detached: the scales carry its graph
- hessian.detach() => hessian
weights whose input is always 0 are set to 0, as in the authors' code; here they are rounded
  n_columns = weight.shape[1]
+ dead = hessian.diagonal() == 0
+ weight = weight if dead.all() else weight * ~dead
the corrected weights are kept in the dtype of the weights, which rounds each correction
- weight.detach().double().clone() => weight.detach().clone()
weights in float64 are not copied, so the corrections change the caller's tensor
- .double().clone() => .double()
the Hessian is damped in place
+ answer = reference.gptq(weight, hessian, group_size)
+ hessian.diagonal().mul_(1.01)
+ return answer
the error is not divided by the entry of the factor on its diagonal
- / upper[i, i] =>
the error is divided twice by the entry of the factor on its diagonal
- error * upper[i, i + 1 :] => error * (upper[i, i + 1 :] / upper[i, i])
the error is that of the weight as it was given instead of the weight as it is corrected by then
- error = (column - => error = (weight.detach()[:, i : i + 1].double() -
the damping is 0.01 itself instead of 1 % of the diagonal's mean
- 0.01 * _positive(h.diagonal().mean()) => 0.01
the damping is added to all of H instead of its diagonal alone
- * torch.eye(n_columns).to(h) =>
corrections are computed in float32 instead of float64
- weight.detach().double().clone() => weight.detach().float().clone()
- hessian.detach().double() => hessian.detach().float()
the weights are changed in place
+ answer = reference.gptq(weight, hessian, group_size)
+ weight.copy_(dequantize_int4(*answer))
+ return answer
""")
