"""What goes wrong when people write optimizers by hand."""

from lib.workbook.grading import edits

edits("""
# steepest_direction
singular directions whose singular value is 0 are kept: they are arbitrary, and G says nothing about them
- s > max(wide.shape) * torch.finfo(wide.dtype).eps * s.max() => s >= 0
the largest singular value is divided by, so the singular values keep their ratios: all should become 1
- u[:, kept] @ vt[kept] => (u[:, kept] * (s[kept] / s.max())) @ vt[kept]
the Frobenius norm is the root of the sum of all squares; this one is the largest singular value
- torch.linalg.matrix_norm(wide) => torch.linalg.matrix_norm(wide, 2)
with "max" G is divided by its largest magnitude: then only one element has its full length
+ if norm == "max" and wide.any():
+     return (wide / wide.abs().max()).to(gradient.dtype)
  if norm == "max" or not wide.any():
zeros are divided by their norm, which gives NaN
- or not wide.any() =>
the squares of a small gradient are 0 in float32, so its norm is 0 and the direction is lost
- wide = wide / wide.abs().max() =>
the gradient itself is divided, in place
- wide = wide / wide.abs().max() => wide = wide.div_(wide.abs().max())
the result stays in the dtype of the computation: it should have the gradient's
- (wide / torch.linalg.matrix_norm(wide)).to(gradient.dtype) => wide / torch.linalg.matrix_norm(wide)
- return wide.sign().to(gradient.dtype) => return wide.sign()
- (u[:, kept] @ vt[kept]).to(gradient.dtype) => u[:, kept] @ vt[kept]
every unknown norm is taken for "spectral"
- if norm not in ("frobenius", "max", "spectral"): => if norm not in ("frobenius", "max", "spectral") and not norm:
the product of all singular vectors with zeros counted by an absolute limit: the limit grows with the largest one
- torch.finfo(wide.dtype).eps * s.max() => 1e-2

# Lion
the state is updated before the direction is taken, as in Adam: Lion mixes the gradient with the old mean
@@ update
- direction = (beta1 * mean + (1 - beta1) * gradient).sign_()
+ mean.mul_(beta2).add_(gradient, alpha=1 - beta2)
+ direction = (beta1 * mean + (1 - beta1) * gradient).sign_()
- mean.mul_(beta2).add_(gradient, alpha=1 - beta2) =>
the two betas are exchanged: b1 belongs to the direction, b2 to the state
@@ update
- beta1, beta2 = group["betas"] => beta2, beta1 = group["betas"]
the step is the mean itself, without its sign
@@ update
- .sign_() =>
the decay is not multiplied by the learning rate
@@ update
- 1 - group["lr"] * group["weight_decay"] => 1 - group["weight_decay"]
the decay is added to the gradient, so the sign swallows it: Lion's decay is decoupled
@@ update
  beta1, beta2 = group["betas"]
+ gradient = gradient + group["weight_decay"] * parameter
- parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_ => parameter.add_
the sign of the gradient alone is taken: the mean of past gradients is kept and never used
@@ update
- (beta1 * mean + (1 - beta1) * gradient) => gradient.clone()
the weight decays after the step, so the step shrinks too
@@ update
- parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
+ parameter.add_(direction, alpha=-group["lr"]).mul_(1 - group["lr"] * group["weight_decay"])
the gradient is overwritten by the direction: clipping, logging or a second optimizer would read it later
@@ update
- direction = (beta1 * mean + (1 - beta1) * gradient).sign_()
+ direction = gradient.mul_(1 - beta1).add_(mean, alpha=beta1)
+ gradient = direction.sub(mean, alpha=beta1).div_(1 - beta1)
+ direction.sign_()
the state is kept in float32, whatever the weight's dtype is
@@ update
- torch.zeros_like(parameter) => torch.zeros_like(parameter, dtype=torch.float32)
- beta1 * mean + (1 - beta1) * gradient => beta1 * mean.to(gradient.dtype) + (1 - beta1) * gradient
the two shares are exchanged: b1 is that of the old mean, 1 - b1 that of the gradient
@@ update
- beta1 * mean + (1 - beta1) * gradient => (1 - beta1) * mean + beta1 * gradient
the state is updated with b1: its own share is b2
@@ update
- mean.mul_(beta2).add_(gradient, alpha=1 - beta2) => mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
the direction is mixed with b2: its own share is b1
@@ update
- beta1 * mean + (1 - beta1) * gradient => beta2 * mean + (1 - beta2) * gradient
the step goes up the slope: it is subtracted
@@ update
- alpha=-group["lr"] => alpha=group["lr"]
the new weight is a new tensor, which only the local name holds: the parameter should change in place
@@ update
- parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
+ parameter = parameter * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * direction
settings are read from self.defaults: each group has its own, and a schedule changes those
@@ update
+ group = self.defaults
  beta1, beta2 = group["betas"]

# Adafactor
the rate is not relative to the weights: lr should be multiplied by their root mean square
- max(eps2, _rms(parameter)) * min => min
the rate uses lr alone, although it may not exceed the inverse root of the step
- min(group["lr"], step**-0.5) => group["lr"]
updates are not clipped to a root mean square of d
- max(1.0, _rms(update) / group["d"]) => 1.0
every update is brought to the root mean square d, small ones too: only larger ones should be
- max(1.0, _rms(update) / group["d"]) => (_rms(update) / group["d"])
t**beta2_decay is taken for the share that stays: it is the share of the new squares
- step ** group["beta2_decay"], eps1 => 1 - step ** group["beta2_decay"], eps1
the weights decay before their root mean square is taken, so the decay changes the rate
- parameter.mul_(1 - group["lr"] * group["weight_decay"]) =>
+ parameter.mul_(1 - group["lr"] * group["weight_decay"])
  rate = max(
rows and columns are summed instead of averaged
@@ _second_moment
- .square().div_(gradient.shape[dim]) => .square()
the product of the row and column means is not divided by the mean of the rows: it is a fourth power
@@ _second_moment
- .div_(state["row_var"].mean(-2, keepdim=True).clamp_(min=eps)) =>
the mean over rows is taken over the whole tensor, batch dimensions included
@@ _second_moment
- state["row_var"].mean(-2, keepdim=True) => state["row_var"].mean()
the stored squares of a vector are turned into the update in place, so the next step finds them changed
@@ _second_moment
- .lerp_(gradient.square(), share).clone() => .lerp_(gradient.square(), share)
the smallest mean square is eps[0] instead of its square, although eps[0] limits the root
@@ update
- clamp_(min=eps1**2) => clamp_(min=eps1)
without eps[0], the paper's 1e-30 is taken instead of the epsilon of the dtype
@@ update
- torch.finfo(parameter.dtype).eps if eps1 is None => 1e-30 if eps1 is None
the decay is not multiplied by lr
@@ update
- 1 - group["lr"] * group["weight_decay"] => 1 - group["weight_decay"]
the step is a plain number: PyTorch's Adafactor wants a float32 tensor
@@ update
- state.setdefault("step", torch.zeros((), dtype=torch.float32)).add_(1).item()
+ float(state.get("step", 0)) + 1
+ state["step"] = step
settings are read from self.defaults: each group has its own, and a schedule changes those
@@ update
+ group = self.defaults
  eps1, eps2 = group["eps"]
an eps[0] of 0 is taken for None: it means that nothing is limited
@@ update
- if eps1 is None => if not eps1
the decay is multiplied by the whole rate: it is by lr
@@ update
- 1 - group["lr"] * group["weight_decay"] => 1 - rate * group["weight_decay"]
eps[1] is ignored: a parameter counts as at least that large
@@ update
- max(eps2, _rms(parameter)) => _rms(parameter)
eps[0] is added to the squares, as in the paper: PyTorch limits with it what is divided by
@@ update
- clamp_(min=eps1**2) => add_(eps1**2)
tensors of more than two dimensions are not factored
@@ _second_moment
- gradient.ndim < 2 => gradient.ndim != 2

# quantize_blockwise
the 256 values are equally far apart, as in int8: small numbers become 0
@@ _code
+ n = 127 if signed else 255
+ values = torch.linspace(-1 if signed else 0, 1, 256, dtype=torch.float64)
+ return values.float().double().to(device)
one scale serves the whole tensor: each block should have its own
- absmax = blocks.abs().amax(1)
+ absmax = blocks.abs().amax().expand(n_blocks).clone() if n_blocks else blocks.new_zeros(0)
the largest number of a block is taken, not the largest magnitude: negative numbers are forgotten
- blocks.abs().amax(1) => blocks.amax(1)
a block of zeros is divided by its largest magnitude, 0: its bytes are those of NaN
- torch.where(absmax > 0, absmax, 1.0) => absmax
the largest magnitude is kept above 1e-8 against zeros, but second moments are often smaller: only 0 needs a guard
- torch.where(absmax > 0, absmax, 1.0) => absmax.clamp(min=1e-8)
of two values that are equally near, the upper is taken
- .double(), between) => .double(), between, right=True)
numbers are rounded down to the next value of the code, not to the nearest
- between = (code[1:] + code[:-1]) / 2 => between = code[1:]
the unsigned code is the signed one: half of its values are never used
- _code(signed, x.device) => _code(True, x.device)
the upper ends of the equal parts are taken instead of their midpoints
@@ _code
- (ends[1:] + ends[:-1]) / 2 => ends[1:]
the powers of ten begin one too low: the largest midpoints should lie between 0.1 and 1
@@ _code
- 10.0 ** (i - 6) => 10.0 ** (i - 7)
the unsigned code has as few parts in each power of ten as the signed one, and not twice as many
@@ _code
- 2 ** (i + (not signed)) + 1 => 2**i + 1
- if signed else [middles] => if signed else [middles, middles + 1e-9]
blocks run down the columns of a transposed matrix: they are of elements in row-major order
- row = x.detach().float().reshape(-1)
+ order = sorted(range(x.ndim), key=lambda d: -x.stride(d))
+ row = x.detach().float().permute(order).reshape(-1)
- .view(-1)[: len(row)].reshape(x.shape), absmax
+ .view(-1)[: len(row)].reshape([x.shape[d] for d in order]).permute(
+     [order.index(d) for d in range(x.ndim)]), absmax

# dequantize_blockwise
the scales alternate from element to element: each belongs to a whole block
- absmax.repeat_interleave(block_size)[: q.numel()] => absmax.repeat(block_size)[: q.numel()]
bytes are read as the signed code, whatever signed says
- _code(signed, q.device) => _code(True, q.device)
bytes are divided by 127 or 255, as if the values were equally far apart
- _code(signed, q.device).float()[q.long()] => ((q.float() - 127) / 128 if signed else q.float() / 255)
the result is in float64
- _code(signed, q.device).float()[q.long()] => _code(signed, q.device)[q.long()]
the values of the code are returned without their block's scale
- _code(signed, q.device).float()[q.long()] * scales => _code(signed, q.device).float()[q.long()]
blocks have 256 elements, whatever block_size says
- absmax.repeat_interleave(block_size) => absmax.repeat_interleave(256)

# AdamW8bit
the update uses the moments after they are rounded: round them only to store them
@@ update
+ if in_bytes:
+     mean = dequantize_blockwise(*quantize_blockwise(mean, True, block), True, block)
+     q, scale = quantize_blockwise(square, False, block)
+     q = torch.where((q == 0) & (square > 0), 1, q).to(torch.uint8)
+     square = dequantize_blockwise(q, scale, False, block)
  root = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
small second moments become 0, and the next step divides by eps alone
@@ update
- torch.where((q == 0) & (square > 0), 1, q).to(torch.uint8) => q
second moments of exactly 0 become the smallest value: only those above 0 should
@@ update
- (q == 0) & (square > 0) => q == 0
parameters of exactly min_size elements keep float32 moments: only those below should
@@ update
- >= group["min_size"] => > group["min_size"]
min_size is ignored, and vectors of a few elements are rounded too
@@ update
- parameter.numel() >= group["min_size"] => True
the second moment is stored in the signed code, although it is never negative
@@ update
- quantize_blockwise(square, False, block) => quantize_blockwise(square, True, block)
- dequantize_blockwise(state["exp_avg_sq"], state["absmax_sq"], False, block)
+ dequantize_blockwise(state["exp_avg_sq"], state["absmax_sq"], True, block)
- torch.where((q == 0) & (square > 0), 1, q) => torch.where((q == 127) & (square > 0), 128, q)
the moments are not corrected for their start at 0
@@ update
- math.sqrt(1 - beta2**step) => 1
- -group["lr"] / (1 - beta1**step) => -group["lr"]
the decay is added to the gradient, as in Adam with an L2 penalty
@@ update
- gradient.float() => gradient.float() + group["weight_decay"] * parameter.float()
- weight.mul_(1 - group["lr"] * group["weight_decay"]) =>
load_state_dict is PyTorch's, which turns the bytes into the parameter's dtype
@@ load_state_dict
+ super().load_state_dict(state_dict)
moments of small parameters are kept in the gradient's dtype instead of float32
@@ update
- gradient.float() => gradient
blocks have 256 elements, whatever block_size says
@@ update
- group["betas"], group["block_size"], gradient.float() => group["betas"], 256, gradient.float()
eps is added under the root: it belongs beside it
@@ update
- (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"]) => (square / (1 - beta2**step) + group["eps"]).sqrt()
the decay is not multiplied by the learning rate
@@ update
- 1 - group["lr"] * group["weight_decay"] => 1 - group["weight_decay"]
the first moment is stored in the unsigned code, which has no negative numbers
@@ update
- quantize_blockwise(mean, True, block) => quantize_blockwise(mean, False, block)
- dequantize_blockwise(state["exp_avg"], state["absmax"], True, block)
+ dequantize_blockwise(state["exp_avg"], state["absmax"], False, block)
the weight's update is computed in its own dtype: a bfloat16 weight loses small steps, so do it in float32
@@ update
- parameter.to(torch.promote_types(parameter.dtype, torch.float32), copy=True) => parameter.clone()
settings are read from self.defaults: each group has its own, and a schedule changes those
@@ update
+ group = self.defaults
  (beta1, beta2), block, wide =
only the first group's states get back their dtypes: the others' bytes stay in the parameter's dtype
@@ load_state_dict
- for group in state_dict["param_groups"] => for group in state_dict["param_groups"][:1]
- for group in self.param_groups => for group in self.param_groups[:1]
the states are loaded and the settings are not
@@ load_state_dict
- super().load_state_dict(state_dict) =>
the weights decay after the step, so the step shrinks too
@@ update
- weight.mul_(1 - group["lr"] * group["weight_decay"]) =>
- weight.add_(mean / root, alpha=-group["lr"] / (1 - beta1**step))
+ weight.add_(mean / root, alpha=-group["lr"] / (1 - beta1**step)).mul_(1 - group["lr"] * group["weight_decay"])
eps is added before the second moment is corrected for its start at 0
@@ update
- (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
+ square.sqrt().add_(group["eps"]) / math.sqrt(1 - beta2**step)

# newton_schulz
a tall matrix is not transposed: its products then have the long side twice
- is_tall = G.shape[-2] > G.shape[-1] => is_tall = False
wide matrices are transposed and tall ones are not: the product belongs to the short side
- G.shape[-2] > G.shape[-1] => G.shape[-2] < G.shape[-1]
the result of a tall matrix is not transposed back
- return (X.mT if is_tall else X).reshape(G.shape) => return X.reshape(*G.shape[:-2], *X.shape[-2:])
one norm is taken of all matrices together: each has its own
- torch.linalg.matrix_norm(X, keepdim=True) => X.norm()
the largest singular value is divided by: that needs a decomposition, and the contract asks for the Frobenius norm
- torch.linalg.matrix_norm(X, keepdim=True) => torch.linalg.matrix_norm(X.float(), 2, keepdim=True).to(X.dtype)
b and c are exchanged: b goes with the third power and c with the fifth
- beta=b, alpha=c => beta=c, alpha=b
the fifth power is left out, so the iteration is the cubic one with the wrong coefficients
- torch.baddbmm(A, A, A, beta=b, alpha=c) => b * A
X is built from the first power and the new one only: a multiplies the old X, not the matrix that was given
- torch.baddbmm(X, B, X, beta=a) => torch.baddbmm(first, B, X, beta=a)
+ first = X if "first" not in locals() else first
  A = X @ X.mT
eps is added to the norm: it is only the smallest norm that is divided by
- .clamp(min=eps) => .add(eps)
G itself is divided by its norm, in place
- X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=eps)
+ X = X.div_(torch.linalg.matrix_norm(X, keepdim=True).clamp(min=eps))
all steps use the first triple of a list
- triples(coefficients, steps) => [triples(coefficients, steps)[i] for i in [0] * steps]
the result is turned back into the dtype of G: it should stay in dtype
- return (X.mT if is_tall else X).reshape(G.shape) => return (X.mT if is_tall else X).reshape(G.shape).to(G.dtype)
dtype is ignored: everything is computed in the dtype of G
- G.to(dtype or G.dtype) => G.to(G.dtype)
one step too many is taken
- for a, b, c in triples(coefficients, steps): => for a, b, c in triples(coefficients, max(steps, 1)):
eps is always 1e-7, whatever is given
- clamp(min=eps) => clamp(min=1e-7)
A A is taken element by element: it is a matrix product
- torch.baddbmm(A, A, A, beta=b, alpha=c) => b * A + c * A * A

# singular_values_after
s is divided by the largest singular value: the norm is the root of the sum of squares
- s.norm(dim=-1, keepdim=True) => s.amax(-1, keepdim=True)
s is not divided by the norm of the matrix
- s / s.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny) => s
the polynomial is applied once, whatever steps is
- in triples(coefficients, steps): => in triples(coefficients, steps)[:1]:
the result is in the dtype of s instead of float64
- s = torch.as_tensor(s).detach().double() => s = torch.as_tensor(s).detach()
the values are sorted: they should stay in the order of s
- return s => return s.sort(descending=True).values
zeros are divided by their norm, which gives NaN
- .clamp(min=torch.finfo(s.dtype).tiny) =>
one norm is taken of the singular values of all matrices
- s.norm(dim=-1, keepdim=True) => s.norm()
b and c are exchanged
- b * s**3 + c * s**5 => c * s**3 + b * s**5
the even powers 2 and 4 are used: X A and X A A have the powers 3 and 5 of the singular values
- b * s**3 + c * s**5 => b * s**2 + c * s**4
s itself is divided, in place
- s / s.norm(dim=-1, keepdim=True) => s.div_(s.norm(dim=-1, keepdim=True)
- .clamp(min=torch.finfo(s.dtype).tiny) => .clamp(min=torch.finfo(s.dtype).tiny))
a norm below 1e-7 is raised to 1e-7: only zeros need a guard here
- torch.finfo(s.dtype).tiny => 1e-7
a diagonal matrix goes through newton_schulz: the polynomial of the values needs no matrix
- s = s / s.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)
+ return torch.diagonal(newton_schulz(torch.diag_embed(s), steps, coefficients, 0, None), dim1=-2, dim2=-1).nan_to_num()

# newton_schulz_flops
A A is counted with the long side: both of its factors are [s, s]
- 2 * short**3 => 2 * short**2 * long
rows are taken for the short side, although a tall matrix is transposed first
- sorted(shape[-2:]) => shape[-2:]
a multiplication and an addition are counted as one
- 4 * short**2 * long + 2 * short**3 => 2 * short**2 * long + short**3
a batch counts as one matrix
- math.prod(shape[:-2]) * steps => steps
one step is counted, whatever steps is
- math.prod(shape[:-2]) * steps => math.prod(shape[:-2])
A A is left out: there are three products in a step
- + 2 * short**3 =>

# Muon
the gradients are summed into the momentum: the contract's mean gives the new one a share of 1 - momentum
@@ _momentum
- .lerp_(gradient, 1 - group["momentum"]) => .mul_(group["momentum"]).add_(gradient)
- gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
+ gradient.add(mean, alpha=group["momentum"]) if group["nesterov"] else mean
nesterov is ignored: the momentum itself is orthogonalized
@@ _momentum
- gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean => mean
the new gradient is mixed in once more although nesterov is off
@@ _momentum
- gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean => gradient.lerp(mean, group["momentum"])
the gradient is overwritten by the direction, as in Keller Jordan's code
@@ _momentum
- gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
+ gradient.lerp_(mean, group["momentum"]) if group["nesterov"] else mean
the step is not scaled by the matrix's shape
@@ _move
- alpha=-group["lr"] * scale => alpha=-group["lr"]
wide matrices get the longer step: the original scale is sqrt(R / C) for tall ones
@@ _move
- rows / columns => columns / rows
the root of the scale is left out
@@ _move
- 0.2 * math.sqrt(max(rows, columns)) if match_rms else math.sqrt(max(1, rows / columns))
+ 0.2 * max(rows, columns) if match_rms else max(1, rows / columns)
adjust_lr_fn is ignored: the original scale is always used
@@ _move
- group["adjust_lr_fn"] == "match_rms_adamw" => False
the decay is scaled like the step: it is lr * weight_decay, whatever the shape
@@ _move
- 1 - group["lr"] * group["weight_decay"] => 1 - group["lr"] * group["weight_decay"] * scale
the weights decay after the step, so the step shrinks too
@@ _move
- parameter.mul_(torch.where(o * parameter >= 0, kept, 1.0).to(parameter.dtype) if group["cautious"] else kept)
+ factor = torch.where(o * parameter >= 0, kept, 1.0).to(parameter.dtype) if group["cautious"] else kept
- parameter.add_(o, alpha=-group["lr"] * scale) => parameter.add_(o, alpha=-group["lr"] * scale).mul_(factor)
cautious decay is taken where the step moves a weight away from 0: it belongs where the step moves it towards 0
@@ _move
- o * parameter >= 0 => o * parameter <= 0
cautious is ignored: every weight decays
@@ _move
- if group["cautious"] else kept => if False else kept
experts are seen as one matrix: a batch of three dimensions holds a matrix for each expert
@@ update
- if direction.ndim > 3 else direction => if direction.ndim > 2 else direction
a convolution is seen as a batch of its small kernels: it is one matrix, [first, rest]
@@ update
- direction.flatten(1) if direction.ndim > 3 else direction => direction
a convolution is seen as [all but the last, last] instead of [first, rest]
@@ update
- direction.flatten(1) if => direction.flatten(0, -2) if
vectors are let in, and fail later
@@ add_param_group
+ super().add_param_group(param_group)
ns_dtype is ignored: the products are always in bfloat16
@@ _orthogonal
- group["ns_dtype"] => torch.bfloat16
newton_schulz gets its own defaults, and not the steps, coefficients and eps of the optimizer's settings
@@ _orthogonal
- group["ns_steps"], group["ns_coefficients"], group["eps"], group["ns_dtype"] => dtype=group["ns_dtype"]
settings are read from self.defaults: each group has its own, and a schedule changes those
@@ update
+ group = self.defaults
  direction = _momentum(parameter, gradient, state, group)
looking for vectors reads a generator to its end, and nothing is left to train
@@ add_param_group
- else list(params) => else params
a single matrix is taken for a list of its rows
@@ add_param_group
- [params] if isinstance(params, Tensor) else list(params) => list(params)
a weight does not decay where o * w is 0: it does where o * w >= 0
@@ _move
- o * parameter >= 0 => o * parameter > 0
the momentum starts as the first gradient, as in torch.optim.SGD: it starts at 0
@@ _momentum
- torch.zeros_like(parameter) => gradient.clone()
a wide matrix gets a shorter step: the original scale is at least 1
@@ _move
- math.sqrt(max(1, rows / columns)) => math.sqrt(rows / columns)

# split_parameters
every matrix goes to Muon, embeddings and head too: only those in the blocks should
- p.ndim >= 2 and id(p) in hidden => p.ndim >= 2
all parameters of the blocks go to Muon, norms and biases too
- p.ndim >= 2 and id(p) in hidden => id(p) in hidden
tables inside the blocks, and weights that are tied to one, go to Muon
- within(nn.ModuleList) - within(nn.Embedding) => within(nn.ModuleList)
only an nn.ModuleList right below the model is found: it may be deeper, as in a model with a head around another
- within(nn.ModuleList) - within(nn.Embedding)
+ {id(p) for part in model.children() if isinstance(part, nn.ModuleList) for p in part.parameters()}
+ hidden -= within(nn.Embedding)
only tensors of exactly two dimensions go to Muon: experts and convolutions are matrices too
- p.ndim >= 2 and => p.ndim == 2 and
frozen parameters are handed to an optimizer
- if p.requires_grad] => if True]
a weight that is used in two places is listed twice
- trained = [p for p in model.parameters() if p.requires_grad]
+ trained = [p for _, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
the lists are the other way round: Muon's comes first
- return [p for p in trained if id(p) in to_muon], [p for p in trained if id(p) not in to_muon]
+ return [p for p in trained if id(p) not in to_muon], [p for p in trained if id(p) in to_muon]
parameters are sorted by size: they should stay in the model's order
+ trained = sorted(trained, key=lambda p: -p.numel())
  return [p for p in trained if id(p) in to_muon], [p for p in trained if id(p) not in to_muon]

# optimizer_state_bytes
leading dimensions are forgotten: each matrix of a batch has row and column means of its own
@@ _state_bytes
- 4 * math.prod(shape[:-2]) * (shape[-2] + shape[-1]) => 4 * (shape[-2] + shape[-1])
Adafactor is counted with a full second moment
@@ _state_bytes
- if optimizer == "adafactor" and len(shape) >= 2: => if optimizer == "adafactor" and len(shape) > 9:
the last, shorter block's scales are forgotten
@@ _state_bytes
- 8 * -(-n // 256) => 8 * (n // 256)
a block has one scale instead of two, one for each moment
@@ _state_bytes
- 8 * -(-n // 256) => 4 * -(-n // 256)
small parameters are counted in bytes: below 4,096 elements the moments are float32
@@ _state_bytes
- optimizer == "adamw8bit" and n >= 4096 => optimizer == "adamw8bit"
exactly 4,096 elements are counted as a small parameter
@@ _state_bytes
- n >= 4096 => n > 4096
Muon is counted for vectors too: AdamW has them, with 8 bytes an element
@@ _state_bytes
- if optimizer in ("lion", "adafactor"): => if optimizer in ("lion", "adafactor", "muon"):
SOAP's bases are forgotten: it keeps two statistics and two bases
@@ _state_bytes
- 8 * n + 8 * squares => 8 * n + 4 * squares
experts are seen as one matrix [first, rest]
@@ _state_bytes
- shape[-2:] if len(shape) == 3 else => shape[-2:] if len(shape) == 2 else
- (shape[0] if len(shape) == 3 else 1) => 1
a convolution is seen as a batch of its kernels
@@ _state_bytes
- shape[-2:] if len(shape) == 3 else (shape[0], math.prod(shape[1:])) => shape[-2:]
- (shape[0] if len(shape) == 3 else 1) => math.prod(shape[:-2])
an unknown optimizer is counted as AdamW
- raise ValueError(f"optimizer = {optimizer!r}: expected one of {', '.join(names)}") => optimizer = "adamw"

# assign_owners
elements are balanced: the work is that of newton_schulz
- newton_schulz_flops(shape, steps) for shape in shapes => math.prod(shape) for shape in shapes
the ranks take turns, whatever the matrices cost
- owners[i] = load.index(min(load)) => owners[i] = i % n_ranks
matrices are given out in their order instead of the largest first
- sorted(range(len(flops)), key=lambda i: -flops[i]) => range(len(flops))
the smallest matrices are given out first
- key=lambda i: -flops[i] => key=lambda i: flops[i]
of equally loaded ranks, the highest is taken
- load.index(min(load)) => max(r for r in range(n_ranks) if load[r] == min(load))
of equally expensive matrices, the later one comes first
- key=lambda i: -flops[i] => key=lambda i: (-flops[i], -i)
each goes to the rank with the fewest matrices so far, not with the least work
- load[owners[i]] += flops[i] => load[owners[i]] += 1
the work is taken for rows squared times columns, although the products of a tall matrix are those of its transpose
- newton_schulz_flops(shape, steps) for shape in shapes => shape[0] ** 2 * shape[1] for shape in shapes
the ranks take turns there and back, whatever their matrices cost
- owners[i] = load.index(min(load))
+ turn = sorted(range(len(flops)), key=lambda i: -flops[i]).index(i)
+ owners[i] = [*range(n_ranks), *reversed(range(n_ranks))][turn % (2 * n_ranks)]

# ShardedMuon
each rank orthogonalizes its own rows: the orthogonalized part is not the part of the orthogonalized whole
@@ update_group
+ for p in parameters:
+     u = _momentum(p, p.grad, self.state[p], group)
+     whole = dict(zip(group["params"], self.shapes, strict=True))[p]
+     o = _orthogonal(u, group) if len(u) else u
+     _move(p, o, whole, group)
the step is scaled by the shape of this rank's part: R and C are those of the whole matrix
@@ update_group
- _move(parameters[i], part, shapes[i], group) => _move(parameters[i], part, (max(1, len(part)), shapes[i][1]), group)
every rank gathers every matrix and multiplies it: each should be multiplied on one rank
@@ update_group
+ ranks, rank = range(dist.get_world_size(self.group)), dist.get_rank(self.group)
+ for p, shape in zip(group["params"], self.shapes, strict=True):
+     if p.grad is not None:
+         u = _momentum(p, p.grad, self.state[p], group).to(group["ns_dtype"] or p.dtype)
+         rows = _rows_of(shape, len(ranks))
+         padded = nn.functional.pad(u, (0, 0, 0, rows[0] - len(u)))
+         found = [torch.empty_like(padded) for _ in ranks]
+         dist.all_gather(found, padded, group=self.group)
+         matrix = torch.cat([part[:n] for part, n in zip(found, rows, strict=True)])
+         _move(p, _orthogonal(matrix, group).split(rows)[rank], shape, group)
the parts are sent in the momentum's dtype: they should go in ns_dtype
@@ update_group
- .to(group["ns_dtype"] or p.dtype) for p in parameters] => for p in parameters]
- _orthogonal(matrix, group).split(rows[i]) => _orthogonal(matrix, group).to(matrix.dtype).split(rows[i])
the group is forgotten in the exchange, which then is one of all ranks
@@ _exchange
- incoming, outgoing, group=group) => incoming, outgoing)
rows are spread as evenly as possible, as tensor_split does: fully_shard gives all ranks but the last ceil(R / ranks)
@@ _rows_of
+ return [len(part) for part in torch.arange(shape[0]).tensor_split(n_ranks)]
the owners are taken in turn: one rank may get all of the large matrices
@@ update_group
- assign_owners(shapes, len(ranks), group["ns_steps"]) => [i % len(ranks) for i in range(len(shapes))]
the owners are chosen among all matrices, also those without a gradient: then some ranks have more work than they need
@@ update_group
- owners = assign_owners(shapes, len(ranks), group["ns_steps"])
+ every = assign_owners(self.shapes, len(ranks), group["ns_steps"])
+ owners = [owner for p, owner in zip(group["params"], every, strict=True) if p.grad is not None]
a second group is let in, whose parameters have no shapes
@@ add_param_group
- if self.param_groups: => if False:
- if len(parts) != len(self.shapes): => if len(parts) != len(self.shapes) or len(self.param_groups) > 2:
- parts, rank = self.param_groups[0]["params"] => parts, rank = self.param_groups[0]["params"]
each matrix is exchanged on its own: two all-to-alls serve all matrices together
@@ update_group
+ if len(parameters) > 1:
+     for p in parameters:
+         self.update_group([p], group)
+     return
  if not parameters:
the momentum is taken of what comes back, and not of the gradient
@@ update_group
- u = [_momentum(p, p.grad, self.state[p], group).to(group["ns_dtype"] or p.dtype) for p in parameters]
+ u = [p.grad.to(group["ns_dtype"] or p.dtype) for p in parameters]
- _move(parameters[i], part, shapes[i], group)
+ part = _momentum(parameters[i], part.to(parameters[i].dtype), self.state[parameters[i]], group)
+ _move(parameters[i], part, shapes[i], group)
""")
