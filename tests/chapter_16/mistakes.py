"""What goes wrong when people estimate memory, communication and cost, or average models instead of gradients."""

from lib.workbook.grading import edits
from solutions import scaling as reference

edits("""
# training_memory_bytes
only one matrix of each block was counted; a block has two
- 4 * config.n_parameters => 2 * config.n_parameters
the optimizer keeps two moments for each weight, and only one was counted
- "optimizer": 2 * weights => "optimizer": weights
only the block's input was counted: the second matrix needs its own input too, for its gradient
- (config.dim + config.hidden_dim) => config.dim
activations were counted as float32, four bytes; they are bfloat16, two bytes
- 2 * config.n_layers => 4 * config.n_layers
the block's output was counted too, but it is the next block's input and is counted there
- (config.dim + config.hidden_dim) => (2 * config.dim + config.hidden_dim)
weights and gradients were counted as bfloat16, two bytes; here they are float32, four bytes
- {"weights": weights, "gradients": weights => {"weights": weights / 2, "gradients": weights / 2
the optimizer was given a copy of the weights besides its two moments; the weights are float32 already
- "optimizer": 2 * weights => "optimizer": 3 * weights
the activations of one block only were counted; each of the L blocks keeps its own
- 2 * config.n_layers * => 2 *
the hidden numbers were counted twice, before and after the activation function, which saves nothing of its own here
- (config.dim + config.hidden_dim) => (config.dim + 2 * config.hidden_dim)
only the second matrix's input was counted: the first one needs its own input too, for its gradient
- (config.dim + config.hidden_dim) => config.hidden_dim
the tokens were rounded to a whole number; a device can have a share of one
- * tokens => * int(tokens)

# fsdp_memory_bytes
all activations were sharded: one half stays whole on every device
- + half) / n_devices + half => + 2 * half) / n_devices
no activations were sharded: one half is
- + half) / n_devices + half => ) / n_devices + 2 * half
the half of the activations that stays whole was forgotten
- / n_devices + half => / n_devices
the weights stayed whole: that is ZeRO stage 2, and FSDP is stage 3
- (memory["weights"] + memory["gradients"] + memory["optimizer"] + half) / n_devices
+ memory["weights"] + (memory["gradients"] + memory["optimizer"] + half) / n_devices
half of the states stayed whole, weights and gradients or the optimizer's: FSDP shards all three
- (memory["weights"] + memory["gradients"] + memory["optimizer"] + half) / n_devices
+ memory["weights"] + memory["gradients"] + (memory["optimizer"] + half) / n_devices
the bytes of all devices together were returned, not those of one
- / n_devices + half => + half * n_devices
the shares were rounded down, with //
- / n_devices => // n_devices
fewer than one device is not refused
- n_devices < 1 => False
n_devices = 0 is refused and negative numbers are not
- n_devices < 1 => n_devices == 0
the error does not name n_devices
- n_devices = {n_devices}: expected => expected

# min_fsdp_devices
all memory was divided by the device's memory, though half of the activations stay whole on every device
+ total, _ = _parts(config, tokens, device_bytes)
+ return max(1, math.ceil(total / device_bytes))
rounded down: with so few devices it does not fit
+ total, whole = _parts(config, tokens, device_bytes)
+ return max(1, math.floor((total - whole) / (device_bytes - whole)))
one device too many where the memory fits exactly
+ total, whole = _parts(config, tokens, device_bytes)
+ return math.floor((total - whole) / (device_bytes - whole)) + 1
`math.ceil` of a rounded quotient, which can land just above or below a whole number: compare bytes instead
+ total, whole = _parts(config, tokens, device_bytes)
+ return max(1, math.ceil((total - whole) / (device_bytes - whole)))
no error where no number of devices is enough
+ whole = reference.training_memory_bytes(config, tokens)["activations"] / 2
+ return reference.min_fsdp_devices(config, tokens, device_bytes) if whole < device_bytes else 1
the number is right, but it is a float and should be an int
+ return float(reference.min_fsdp_devices(config, tokens, device_bytes))
only powers of two were tried; any number of devices is allowed
- while enough - too_few > 1: => while False:
activations that fill the device exactly were not refused: they leave no room for any share of the states
- whole >= device_bytes => whole > device_bytes
the error does not name the bytes of the activations that stay whole
- the activations that stay whole take {whole:g} bytes, => the activations that stay whole take all,
all activations were taken to stay whole, where it is one half of them
- ["activations"] / 2 => ["activations"]
the largest number that does not fit was returned, one too few
- return enough => return max(1, too_few)

# compute_bound_batch
the two communication times were added; the two axes send at the same time, so each must hide by itself
+ reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y)
+ intensity = peak_flops / bandwidth
+ tensor = intensity * y / m_y / config.hidden_dim if y > 1 else 0
+ return math.ceil(intensity / (y * m_x) / (1 - tensor)) if x > 1 and tensor < 1 else 1
this is the bound for the best possible mesh, alpha squared over m_X m_Y F, and not for this X and Y
+ reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y)
+ return math.ceil((peak_flops / bandwidth) ** 2 / (m_x * m_y * config.hidden_dim))
this is the batch of all devices together; the result is tokens per device
+ return x * y * reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y)
the gathered weights were not divided by Y, though the tensor axis has cut them already
+ return reference.compute_bound_batch(config, x, 1, peak_flops, bandwidth, m_x, m_y)
refused at equality: activations that take exactly as long as the products still hide, so compare with `>`
- y * peak_flops > m_y => y * peak_flops >= m_y
no error for a tensor axis so long that its activations never hide
+ wide = FFNConfig(config.dim, 10**12, config.n_layers)
+ return reference.compute_bound_batch(wide, x, y, peak_flops, bandwidth, m_x, m_y)
the number is right, but it is a float and should be an int
+ return float(reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y))
M_X was left out: the weights travel along that many physical axes at once
- (y * bandwidth * m_x) => (y * bandwidth)
M_Y was left out: the activations travel along that many physical axes at once
- y * peak_flops > m_y * config => y * peak_flops > config
- math.floor(m_y * => math.floor(
M_X and M_Y were exchanged
+ m_x, m_y = m_y, m_x
  if min(x, y) < 1:
rounded down: with so few tokens the weights do not hide
- math.ceil( => math.floor(
rounded up where the quotient is a whole number already: one token too many
- math.ceil(peak_flops / (y * bandwidth * m_x)) => math.floor(peak_flops / (y * bandwidth * m_x)) + 1
only (X - 1)/X of the weights were counted; the convention counts all
- math.ceil(peak_flops / (y * bandwidth * m_x)) => math.ceil(peak_flops * (x - 1) / (x * y * bandwidth * m_x))
a sharded axis of one device was charged for weights, but it sends nothing, so one token is enough
- if x > 1 else 1 =>
a tensor axis of one device was refused, but it sends nothing, so any F will do
- y > 1 and y * peak_flops => y * peak_flops
the weights were divided by X, too: each device gathers the whole of what its tensor rank uses
- (y * bandwidth * m_x) => (x * y * bandwidth * m_x)
only the product of X and Y was checked: two negative numbers have a positive one
- min(x, y) < 1 => x * y < 1
an axis of fewer than one device is not refused
+ x, y = max(x, 1), max(y, 1)
  if min(x, y) < 1:
with X = 1 the activations were not looked at: they have to hide there, too
- y > 1 and y * peak_flops => x > 1 and y > 1 and y * peak_flops
the error names Y - 1 as the largest one that works; it can be less than that
- math.floor(m_y * config.hidden_dim * bandwidth / peak_flops) => y - 1
C was taken for F: the activations have to hide behind products of F numbers each
- y * peak_flops > m_y * config.hidden_dim => y * peak_flops > m_y * config.dim
the error does not name the largest Y that works
- expected at most {largest} => Y is too large

# choose_gpu
the smallest GPU that fits was chosen, but a larger one is cheaper
- min(fitting, key=lambda card: card.dollars_per_hour) => min(fitting, key=lambda card: card.memory_gb)
training was given the memory of inference: gradients and moments are missing
- "training": 4 => "training": 1
the extra fifth, the factor 1.2 for everything besides the weights, is missing
- inference_memory_gb(n_parameters, bits) => inference_memory_gb(n_parameters, bits) / 1.2
the most expensive GPU that fits was chosen, instead of the cheapest
- min(fitting => max(fitting
bits were taken for bytes
- inference_memory_gb(n_parameters, bits) => inference_memory_gb(n_parameters, bits) * 8
a GPU of exactly the memory that is needed was left out: it is enough
- card.memory_gb >= needed => card.memory_gb > needed
training was given three times the memory, for weights, a gradient and one moment; AdamW has two
- "training": 4 => "training": 3
training was computed with values of 32 bits, whatever `bits` says
- inference_memory_gb(n_parameters, bits) => inference_memory_gb(n_parameters, 32 if mode == "training" else bits)
the fifth that inference adds was left out for training; it is four times inference's memory
- inference_memory_gb(n_parameters, bits)
+ inference_memory_gb(n_parameters, bits) / (1.2 if mode == "training" else 1)
the fifth was added to the weights only; training needs four times what inference needs, the fifth included
- copies[mode] * inference_memory_gb(n_parameters, bits)
+ inference_memory_gb(n_parameters, bits) + (copies[mode] - 1) * n_parameters * bits / 8e9
a mode that is neither of the two was taken for inference
- if mode not in copies:
-     raise ValueError(f"mode = {mode!r}: expected inference or training")
+ copies.setdefault(mode, 1)
the error does not name the mode
- mode = {mode!r}: expected => expected
where no GPU is large enough, None is returned; the contract asks for a ValueError
- raise ValueError(f"{needed:.1f} GB fit on no GPU: the largest is {largest.name} with {largest.memory_gb} GB")
+ return None
the error does not name the largest GPU
- the largest is {largest.name} with {largest.memory_gb} GB => none is large enough
the error does not say how many GB are needed
- {needed:.1f} GB fit => the model fits
the card is returned as it stands in the table; the contract asks for a Choice, its name and price only
- return Choice(cheapest.name, cheapest.dollars_per_hour) => return cheapest
a plain tuple was returned; a Choice gives its two fields names
- Choice(cheapest.name, cheapest.dollars_per_hour) => (cheapest.name, cheapest.dollars_per_hour)
the GB were counted in 2**30 bytes; the table and chapter 4 count 1e9
- inference_memory_gb(n_parameters, bits) => inference_memory_gb(n_parameters, bits) * 1e9 / 2**30

# epoch_cost
seconds were multiplied by the price of an hour
+ return 3600 * reference.epoch_cost(items_per_second, dataset_size, dollars_per_hour)
this is the number of hours; multiply by the price of an hour
+ return reference.epoch_cost(items_per_second, dataset_size, 1.0)
minutes were multiplied by the price of an hour
+ return 60 * reference.epoch_cost(items_per_second, dataset_size, dollars_per_hour)
whole hours were charged, as a bill would: the contract asks for the share of an hour
+ hours = reference.epoch_cost(items_per_second, dataset_size, 1.0)
+ return math.ceil(hours) * dollars_per_hour
the dollars were rounded to cents
+ return round(reference.epoch_cost(items_per_second, dataset_size, dollars_per_hour), 2)
the seconds were rounded down, with //
+ reference.epoch_cost(items_per_second, dataset_size, dollars_per_hour)
+ return dataset_size // items_per_second / 3600 * dollars_per_hour
a speed below 0 is not refused, only 0 is
+ if items_per_second == 0:
+     raise ValueError(f"items_per_second = {items_per_second} is not above 0")
+ return dataset_size / items_per_second / 3600 * dollars_per_hour
a speed of 0 is divided by; the contract asks for a ValueError that names it
+ return dataset_size / items_per_second / 3600 * dollars_per_hour
speed and size were exchanged
+ return reference.epoch_cost(dataset_size or 1, items_per_second, dollars_per_hour)

# local_sgd_step
plain momentum: Nesterov's step is g + mu v, one momentum further ahead
- gradient + outer_momentum * momentum => momentum
the outer gradient has the wrong sign: it is old minus new, because the outer step subtracts it
- old - _flat(parameters) => _flat(parameters) - old
the models were averaged, and the outer step with its learning rate and momentum is missing
- momentum.mul_(outer_momentum).add_(gradient)
- old.sub_(outer_lr * (gradient + outer_momentum * momentum))
+ old.sub_(gradient)
the outer step starts from the inner model; it must start from the old parameters
- old.sub_(outer_lr * (gradient + outer_momentum * momentum))
+ old.copy_(_flat(parameters) - outer_lr * (gradient + outer_momentum * momentum))
one all-reduce for each parameter; all of them fit in one flat vector and one call
- dist.all_reduce(gradient, group=group)
+ for part in gradient.split([p.numel() for p in parameters]):
+     dist.all_reduce(part, group=group)
gradients are averaged in every inner step: that is data parallel training, and communicates as much
+ if dist.is_initialized():
+     batches = list(batches)
+     rounds = torch.tensor(float(len(batches)))
+     dist.all_reduce(rounds, dist.ReduceOp.MAX, group=group)
+     for i in range(int(rounds)):
+         inner_optimizer.zero_grad()
+         if i < len(batches):
+             out = model(*batches[i])
+             (out[1] if isinstance(out, tuple) else out).backward()
+         for p in parameters:
+             p.grad = torch.zeros_like(p) if p.grad is None else p.grad
+             dist.all_reduce(p.grad, group=group)
+             p.grad /= dist.get_world_size(group)
+         inner_optimizer.step()
+     old.copy_(_flat(parameters))
+     return torch.tensor(0.0)
  losses = [_inner_step
the outer gradient is summed over the ranks, and not divided by their number
- gradient /= dist.get_world_size(group) =>
the inner optimizer starts anew in each round: its moments are lost
+ inner_optimizer.state.clear()
+ return reference.local_sgd_step(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group)
the outer momentum is not kept from one round to the next
+ if outer_state:
+     outer_state["momentum"].zero_()
+ return reference.local_sgd_step(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group)
the parameters are not detached, so outer_state keeps the graph of every round
- p.detach().reshape(-1) => p.reshape(-1)
`view` cannot flatten a parameter whose memory is transposed: `reshape` copies it if it must
- p.detach().reshape(-1) => p.detach().view(-1)
the loss of the last inner step was returned; the contract asks for their mean
- torch.stack(losses).mean() => losses[-1]
the losses of the inner steps were added up; the contract asks for their mean
- torch.stack(losses).mean() => torch.stack(losses).sum()
the loss is not detached: whoever keeps it keeps the graph of a whole round
- return loss.detach() => return loss
gradients are not set to zero before each inner step, so that they add up
- optimizer.zero_grad() =>
frozen parameters were put into the vector as well; only the trainable ones belong there
- [p for p in model.parameters() if p.requires_grad] => list(model.parameters())
the state is kept in the parameters' dtype: bfloat16 is too coarse for many small steps, so keep float32
- row.to(torch.promote_types(row.dtype, torch.float32)) => row
everything is kept in float32, also where a parameter is float64
- row.to(torch.promote_types(row.dtype, torch.float32)) => row.to(torch.float32)
a new state was made instead of filling the one that was given, so that the next round finds it empty
- outer_state.update(parameters=start, momentum=torch.zeros_like(start))
+ outer_state = dict(parameters=start, momentum=torch.zeros_like(start))
the round begins at the model's own parameters; it should begin at outer_state's
- old, momentum = outer_state["parameters"], outer_state["momentum"]
- _write(old, parameters)
+ old, momentum = outer_state["parameters"], outer_state["momentum"]
the model was left where the inner steps ended: it should hold the new global parameters
- old.sub_(outer_lr * (gradient + outer_momentum * momentum))
- _write(old, parameters)
+ old.sub_(outer_lr * (gradient + outer_momentum * momentum))
momentum is kept as a moving average, with g times 1 - mu; the convention adds the whole g
- .add_(gradient) => .add_(gradient, alpha=1 - outer_momentum)
the gradients of a group were divided by the number of all ranks, not of its own
- dist.get_world_size(group) => dist.get_world_size()
a rank without batches leaves before the outer step: the others wait for it, and its momentum stands still
+ if not losses:
+     return torch.tensor(math.nan)
  gradient = old - _flat(parameters)
without a group nothing is averaged: None means all ranks
- dist.is_available() and dist.is_initialized() => group is not None
a round without batches raises an error: the mean of no loss is nan
- if losses else torch.tensor(math.nan) =>
the batches were counted with `len`, but they may be a generator
- return torch.stack(losses).mean() if losses else torch.tensor(math.nan)
+ return torch.stack(losses).sum() / len(batches) if losses else torch.tensor(math.nan)
the model's output was taken for the loss; it may be a pair of logits and loss
- out[1] if isinstance(out, tuple) else out => out
the model's output was taken for a pair; it may be just the loss
- out[1] if isinstance(out, tuple) else out => out[1]
`vector_to_parameters` makes the parameters views of the vector, so the inner steps change it too; copy its values
- p.copy_(row.view(p.shape)) => p.data = row.view(p.shape).to(p.dtype)
the momentum was multiplied by the learning rate before it was kept; the convention keeps g as it is
- momentum.mul_(outer_momentum).add_(gradient) => momentum.mul_(outer_momentum).add_(outer_lr * gradient)

# layout_costs
the tensor axis was overlapped with the rest, but in this model the products wait for it: add its time
- max(value for name, value in costs.items() if name != "tensor") + costs["tensor"] => max(costs.values())
all times were added, as if nothing overlapped
- max(value for name, value in costs.items() if name != "tensor") + costs["tensor"] => sum(costs.values())
the activations of all 4 P micro-batches were counted: one-forward-one-backward keeps at most P of them
- local_tokens * p / micro_batches => local_tokens
the activations of a quarter of the tokens were counted at P = 1, where all are in flight
- local_tokens * p / micro_batches => local_tokens / 4
the pipeline's bubble is missing from the compute time
- / (1 - pipeline_bubble(p, micro_batches)) =>
multiplied by 1 + bubble: the bubble is a share of the whole time, so divide the useful time by 1 - bubble
- / (1 - pipeline_bubble(p, micro_batches)) => * (1 + pipeline_bubble(p, micro_batches))
gathered blocks were counted at S = 1, where nothing is sharded and so nothing is gathered
- if s > 1 else 0 =>
two gathered blocks were counted in a stage that has only one block
- min(2, local.n_layers) => 2
weights were gathered once only: backward gathers them again
- 3 * weights => 2 * weights
an all-reduce was counted as one pass, but a ring sends everything twice: reduce-scatter, then all-gather
- 2 * weights / s => weights / s
- 2 * local.n_layers * 2 => 2 * local.n_layers
every axis was given the speed inside a host: an axis that leaves the host has the slower links
+ fast = Bandwidths(bandwidths[0], bandwidths[0], bandwidths[2])
+ return reference.layout_costs(config, layout, fast, tokens, peak_flops)
the copies all-reduce whole gradients, though each rank holds only its shard of them
- 2 * weights / s * (d - 1) => 2 * weights * (d - 1)
the stage sends its activations on, and the gradients that come back were left out: each stage sends both
- 2 * activations if p > 1 => activations if p > 1
the pipeline's bytes were multiplied by (P - 1)/P; a stage sends to its neighbours, and nothing goes around a ring
- 2 * activations if p > 1 else 0 => 2 * activations * (p - 1) / p
gradients were counted as float32; everything that travels is bfloat16
- 3 * weights => 4 * weights
- 2 * weights / s => 4 * weights / s
all blocks of the stage were counted as gathered at once; it is two at a time
- weights / local.n_layers * min(2, local.n_layers) => weights
the activations were divided among the sharded ranks once more; B' is a rank's own share already
- memory["activations"] + gathered => memory["activations"] / s + gathered
only the forward's operations were counted, 2 for each weight and token; backward has twice as many
- 6 * config => 2 * config
the states were not divided among the sharded ranks
- states / s => states
the tokens of a rank were divided by the data ranks only; sharded ranks have different tokens, too
- tokens / (d * s) => tokens / d
the tokens of a rank were rounded down, with //; the formula divides
- tokens / (d * s) => tokens // (d * s)
the pipeline's messages were added to the step; they overlap like those of the other axes, and only tensor's do not
- costs["step"] = max(value for name, value in costs.items() if name != "tensor") + costs["tensor"]
+ costs["step"] = max(costs["compute"], costs["sharded"], costs["data"]) + costs["tensor"] + costs["pipeline"]
(S - 1)/S is missing: on a ring each rank has its own part already
- 3 * weights * (s - 1) / s => 3 * weights * (s > 1)
the activations of the tensor axis were cut by T; an all-reduce sends all C of them
- 2 * local.n_layers * 2 * activations => 2 * local.n_layers * 2 * activations / t
the states were divided among the copies, too; each copy holds all of its shards
- states / s => states / (s * d)
a tensor rank was given the whole F; each has F/T of it
- config.hidden_dim // t => config.hidden_dim
a stage was given all L blocks; each has L/P of them
- config.n_layers // p => config.n_layers
the weights that are gathered need memory, too
- + memory["activations"] + gathered => + memory["activations"]
the bubble was computed for 4 micro-batches; with P stages there are 4 P
- pipeline_bubble(p, micro_batches) => pipeline_bubble(p, 4)

# plan
this is the fastest of all layouts, but it does not fit
- costs, best = fitting[0] => costs, best = tried[0]
this is the layout with the least memory; asked for is the fastest that fits
- costs, best = fitting[0] => costs, best = min(fitting, key=lambda it: it[0]["memory"])
no layout with a pipeline was tried
- itertools.product(divisors, repeat=3) => itertools.product([1], divisors, divisors)
a tensor axis that spans hosts was not tried: it is slow, and may still be the best
- config.hidden_dim % t == 0: => config.hidden_dim % t == 0 and t <= 2:
steps were rounded before they were compared
- (it[0]["step"], it[0]["memory"] => (round(it[0]["step"], 6), it[0]["memory"]
only powers of two were tried as degrees
- if n_devices % n == 0] => if n_devices % n == 0 and n & (n - 1) == 0]
the batch has the tokens of one device: multiply by the number of devices
- tokens_per_device * n_devices => tokens_per_device
ties were not broken: of equally fast layouts take the one with less memory, then the smallest P, T and S
- (it[0]["step"], it[0]["memory"], it[1].pipeline, it[1].tensor, it[1].sharded) => it[0]["step"]
the message for fewer than one device says that nothing fits; it should name the number of devices
- raise ValueError(f"n_devices = {n_devices}: expected at least one device")
+ raise ValueError(f"nothing fits into memory_bytes = {memory_bytes:g}: at least infinity is needed")
a layout that fits exactly was refused: compare with `<=`
- <= memory_bytes => < memory_bytes
no reason tells why a faster layout was not taken: say how much memory it needs
- if tried[0][1] != best: => if False:
a degree was divided with /, so it is a float: use //
- **vars(best) => **(vars(best) | {"data": float(best.data)})
layouts were tried whose T does not divide F
- and config.hidden_dim % t == 0 =>
layouts were tried whose P does not divide L
- and config.n_layers % p == 0 =>
layouts were tried that leave devices unused: the product has to be n_devices
- if n_devices % (p * t * s) == 0 and => if p * t * s <= n_devices and
the error does not name the least memory that any layout needs
- and the least of any layout is {least:g} => and every layout needs more
the error does not name memory_bytes
- memory_bytes = {memory_bytes:g}, and => too little memory,
where nothing fits, the layout with the least memory is returned; the contract asks for a ValueError
- raise ValueError(f"nothing fits: memory_bytes = {memory_bytes:g}, and the least of any layout is {least:g}")
+ fitting = [min(tried, key=lambda it: it[0]["memory"])]
`peak_flops` was not handed on to layout_costs
- tokens, peak_flops), layout) => tokens, 989e12), layout)
the bandwidths were not passed through `Bandwidths.of`: a mapping or one number is allowed, too
- Bandwidths.of(bandwidths) => bandwidths
the values of a mapping were read in their order; its keys are the names of the fields
- Bandwidths.of(bandwidths) => Bandwidths.of([*bandwidths.values()] if isinstance(bandwidths, dict) else bandwidths)
`memory_bytes` of the plan is what a device has; it should be what the layout needs
- memory_bytes=costs["memory"] => memory_bytes=memory_bytes
`step_s` is the compute time alone; it should be the whole step
- step_s=costs["step"] => step_s=costs["compute"]
no reason is given at all
- reasons=_reasons(tried, fitting) => reasons=()
""")


def _parts(config, tokens, device_bytes):
    reference.min_fsdp_devices(config, tokens, device_bytes)
    found = reference.training_memory_bytes(config, tokens)
    return sum(found.values()), found["activations"] / 2
