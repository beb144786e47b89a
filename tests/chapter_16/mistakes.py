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

# epoch_cost
seconds were multiplied by the price of an hour
+ return 3600 * reference.epoch_cost(items_per_second, dataset_size, dollars_per_hour)
this is the number of hours; multiply by the price of an hour
+ return reference.epoch_cost(items_per_second, dataset_size, 1.0)
minutes were multiplied by the price of an hour
+ return 60 * reference.epoch_cost(items_per_second, dataset_size, dollars_per_hour)

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

# plan
this is the fastest of all layouts, but it does not fit
- costs, best = fitting[0] => costs, best = tried[0]
this is the layout with the least memory; asked for is the fastest that fits
- costs, best = fitting[0] => costs, best = min(fitting, key=lambda it: it[0]["memory"])
no layout with a pipeline was tried
- itertools.product(divisors, repeat=3) => itertools.product([1], divisors, divisors)
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
""")


def _parts(config, tokens, device_bytes):
    reference.min_fsdp_devices(config, tokens, device_bytes)
    found = reference.training_memory_bytes(config, tokens)
    return sum(found.values()), found["activations"] / 2
