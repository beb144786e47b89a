"""What goes wrong when people estimate memory, communication and cost, or average models instead of gradients."""

import itertools
import math
from dataclasses import replace

import torch
import torch.distributed as dist

from lib.given.models.scaling import CARDS, Bandwidths, Choice, FFNConfig, Layout, Plan
from lib.workbook.grading import mistake
from solutions import scaling as reference
from solutions.llama import inference_memory_gb
from solutions.tensor_parallel import pipeline_bubble

# ---- 16.1 training_memory_bytes --------------------------------------------------------------------------------------


@mistake("training_memory_bytes", "only one matrix of each block was counted; a block has two")
def one_matrix(config, tokens):
    found = reference.training_memory_bytes(config, tokens)
    return {name: size if name == "activations" else size // 2 for name, size in found.items()}


@mistake("training_memory_bytes", "the optimizer keeps two moments for each weight, and only one was counted")
def one_moment(config, tokens):
    found = reference.training_memory_bytes(config, tokens)
    return found | {"optimizer": found["weights"]}


@mistake(
    "training_memory_bytes",
    "only the block's input was counted: the second matrix needs its own input too, for its gradient",
)
def block_inputs_only(config, tokens):
    activations = 2 * config.n_layers * config.dim * tokens
    return reference.training_memory_bytes(config, tokens) | {"activations": activations}


@mistake("training_memory_bytes", "activations were counted as float32, four bytes; they are bfloat16, two bytes")
def wide_activations(config, tokens):
    found = reference.training_memory_bytes(config, tokens)
    return found | {"activations": 2 * found["activations"]}


@mistake(
    "training_memory_bytes", "the block's output was counted too, but it is the next block's input and is counted there"
)
def outputs_too(config, tokens):
    found = reference.training_memory_bytes(config, tokens)
    return found | {"activations": 2 * config.n_layers * (2 * config.dim + config.hidden_dim) * tokens}


# ---- 16.2 fsdp_memory_bytes ------------------------------------------------------------------------------------------


@mistake("fsdp_memory_bytes", "all activations were sharded: one half stays whole on every device")
def all_activations_shared(config, tokens, n_devices):
    reference.fsdp_memory_bytes(config, tokens, n_devices)
    return sum(reference.training_memory_bytes(config, tokens).values()) / n_devices


@mistake("fsdp_memory_bytes", "no activations were sharded: one half is")
def no_activation_shared(config, tokens, n_devices):
    reference.fsdp_memory_bytes(config, tokens, n_devices)
    found = reference.training_memory_bytes(config, tokens)
    return (sum(found.values()) - found["activations"]) / n_devices + found["activations"]


@mistake("fsdp_memory_bytes", "the half of the activations that stays whole was forgotten")
def half_forgotten(config, tokens, n_devices):
    return reference.fsdp_memory_bytes(config, tokens, n_devices) - (
        reference.training_memory_bytes(config, tokens)["activations"] / 2
    )


@mistake("fsdp_memory_bytes", "the weights stayed whole: that is ZeRO stage 2, and FSDP is stage 3")
def weights_whole(config, tokens, n_devices):
    weights = reference.training_memory_bytes(config, tokens)["weights"]
    return reference.fsdp_memory_bytes(config, tokens, n_devices) + weights - weights / n_devices


# ---- 16.3 min_fsdp_devices -------------------------------------------------------------------------------------------


def _parts(config, tokens, device_bytes):
    reference.min_fsdp_devices(config, tokens, device_bytes)
    found = reference.training_memory_bytes(config, tokens)
    return sum(found.values()), found["activations"] / 2


@mistake(
    "min_fsdp_devices",
    "all memory was divided by the device's memory, though half of the activations stay whole on every device",
)
def divided(config, tokens, device_bytes):
    total, _ = _parts(config, tokens, device_bytes)
    return max(1, math.ceil(total / device_bytes))


@mistake("min_fsdp_devices", "rounded down: with so few devices it does not fit")
def rounded_down(config, tokens, device_bytes):
    total, whole = _parts(config, tokens, device_bytes)
    return max(1, math.floor((total - whole) / (device_bytes - whole)))


@mistake("min_fsdp_devices", "one device too many where the memory fits exactly")
def one_more(config, tokens, device_bytes):
    total, whole = _parts(config, tokens, device_bytes)
    return math.floor((total - whole) / (device_bytes - whole)) + 1


@mistake(
    "min_fsdp_devices",
    "`math.ceil` of a rounded quotient, which can land just above or below a whole number: compare bytes instead",
)
def ceil_of_a_rounded_quotient(config, tokens, device_bytes):
    total, whole = _parts(config, tokens, device_bytes)
    return max(1, math.ceil((total - whole) / (device_bytes - whole)))


@mistake("min_fsdp_devices", "no error where no number of devices is enough")
def never_refuses(config, tokens, device_bytes):
    whole = reference.training_memory_bytes(config, tokens)["activations"] / 2
    return reference.min_fsdp_devices(config, tokens, device_bytes) if whole < device_bytes else 1


@mistake("min_fsdp_devices", "the number is right, but it is a float and should be an int")
def devices_as_a_float(config, tokens, device_bytes):
    return float(reference.min_fsdp_devices(config, tokens, device_bytes))


# ---- 16.4 compute_bound_batch ----------------------------------------------------------------------------------------


@mistake(
    "compute_bound_batch",
    "the two communication times were added; the two axes send at the same time, so each must hide by itself",
)
def added(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y)
    intensity = peak_flops / bandwidth
    tensor = intensity * y / m_y / config.hidden_dim if y > 1 else 0
    return math.ceil(intensity / (y * m_x) / (1 - tensor)) if x > 1 and tensor < 1 else 1


@mistake(
    "compute_bound_batch",
    "this is the bound for the best possible mesh, alpha squared over m_X m_Y F, and not for this X and Y",
)
def best_mesh(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y)
    return math.ceil((peak_flops / bandwidth) ** 2 / (m_x * m_y * config.hidden_dim))


@mistake("compute_bound_batch", "this is the batch of all devices together; the result is tokens per device")
def of_all(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    return x * y * reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y)


@mistake(
    "compute_bound_batch", "the gathered weights were not divided by Y, though the tensor axis has cut them already"
)
def uncut_weights(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    return reference.compute_bound_batch(config, x, 1, peak_flops, bandwidth, m_x, m_y)


@mistake(
    "compute_bound_batch",
    "refused at equality: activations that take exactly as long as the products still hide, so compare with `>`",
)
def equal_refused(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    found = reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y)
    if y > 1 and y * peak_flops == m_y * config.hidden_dim * bandwidth:
        raise ValueError(f"y = {y}: no batch is enough; y is at most {y - 1}")
    return found


@mistake("compute_bound_batch", "no error for a tensor axis so long that its activations never hide")
def any_y(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    wide = FFNConfig(config.dim, 10**12, config.n_layers)
    return reference.compute_bound_batch(wide, x, y, peak_flops, bandwidth, m_x, m_y)


@mistake("compute_bound_batch", "the number is right, but it is a float and should be an int")
def batch_as_a_float(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    return float(reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y))


# ---- 16.5 choose_gpu -------------------------------------------------------------------------------------------------


def _choose(needed, key=lambda card: card.dollars_per_hour):
    fitting = [card for card in CARDS if card.memory_gb >= needed]
    if not fitting:
        raise ValueError(f"{needed:.1f} GB fit on no card: the largest is {CARDS[-1].name}")
    best = min(fitting, key=key)
    return Choice(best.name, best.dollars_per_hour)


def _needed(n_parameters, mode, bits):
    if mode not in ("inference", "training"):
        raise ValueError(mode)
    return (4 if mode == "training" else 1) * inference_memory_gb(n_parameters, bits)


@mistake("choose_gpu", "the smallest GPU that fits was chosen, but a larger one is cheaper")
def smallest(n_parameters, mode, bits):
    return _choose(_needed(n_parameters, mode, bits), key=lambda card: card.memory_gb)


@mistake("choose_gpu", "training was given the memory of inference: gradients and moments are missing")
def like_inference(n_parameters, mode, bits):
    _needed(n_parameters, mode, bits)
    return _choose(_needed(n_parameters, "inference", bits))


@mistake("choose_gpu", "the extra fifth, the factor 1.2 for everything besides the weights, is missing")
def no_overhead(n_parameters, mode, bits):
    return _choose(_needed(n_parameters, mode, bits) / 1.2)


@mistake("choose_gpu", "the most expensive GPU that fits was chosen, instead of the cheapest")
def first(n_parameters, mode, bits):
    return _choose(_needed(n_parameters, mode, bits), key=lambda card: -card.dollars_per_hour)


@mistake("choose_gpu", "bits were taken for bytes")
def bits_as_bytes(n_parameters, mode, bits):
    return _choose(8 * _needed(n_parameters, mode, bits))


# ---- 16.6 epoch_cost -------------------------------------------------------------------------------------------------


@mistake("epoch_cost", "seconds were multiplied by the price of an hour")
def seconds(items_per_second, dataset_size, dollars_per_hour):
    return 3600 * reference.epoch_cost(items_per_second, dataset_size, dollars_per_hour)


@mistake("epoch_cost", "this is the number of hours; multiply by the price of an hour")
def hours(items_per_second, dataset_size, dollars_per_hour):
    return reference.epoch_cost(items_per_second, dataset_size, 1.0)


@mistake("epoch_cost", "minutes were multiplied by the price of an hour")
def minutes(items_per_second, dataset_size, dollars_per_hour):
    return 60 * reference.epoch_cost(items_per_second, dataset_size, dollars_per_hour)


# ---- 16.7 local_sgd_step ---------------------------------------------------------------------------------------------


def _values(model):
    rows = [p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]
    return torch.cat([row.to(torch.promote_types(row.dtype, torch.float32)) for row in rows])


def _set(model, values):
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, row in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
            p.copy_(row.view(p.shape))


def _begin(model, state):
    if not state:
        state.update(parameters=_values(model), momentum=torch.zeros_like(_values(model)))
    _set(model, state["parameters"])
    return state["parameters"], state["momentum"]


def _train(model, optimizer, batches):
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        out = model(*batch)
        loss = out[1] if isinstance(out, tuple) else out
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean() if losses else torch.tensor(math.nan)


def _mean(tensor, group):
    if dist.is_initialized():
        dist.all_reduce(tensor, group=group)
        tensor /= dist.get_world_size(group)
    return tensor


@mistake("local_sgd_step", "plain momentum: Nesterov's step is g + mu v, one momentum further ahead")
def no_nesterov(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    old, momentum = _begin(model, outer_state)
    loss = _train(model, inner_optimizer, batches)
    momentum.mul_(outer_momentum).add_(_mean(old - _values(model), group))
    old.sub_(outer_lr * momentum)
    _set(model, old)
    return loss


@mistake(
    "local_sgd_step", "the outer gradient has the wrong sign: it is old minus new, because the outer step subtracts it"
)
def uphill(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    old, momentum = _begin(model, outer_state)
    loss = _train(model, inner_optimizer, batches)
    gradient = _mean(_values(model) - old, group)
    momentum.mul_(outer_momentum).add_(gradient)
    old.sub_(outer_lr * (gradient + outer_momentum * momentum))
    _set(model, old)
    return loss


@mistake(
    "local_sgd_step", "the models were averaged, and the outer step with its learning rate and momentum is missing"
)
def average_only(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    old, _ = _begin(model, outer_state)
    loss = _train(model, inner_optimizer, batches)
    old.copy_(_mean(_values(model), group))
    _set(model, old)
    return loss


@mistake("local_sgd_step", "the outer step starts from the inner model; it must start from the old parameters")
def from_the_new(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    old, momentum = _begin(model, outer_state)
    loss = _train(model, inner_optimizer, batches)
    new = _values(model)
    gradient = _mean(old - new, group)
    momentum.mul_(outer_momentum).add_(gradient)
    old.copy_(new - outer_lr * (gradient + outer_momentum * momentum))
    _set(model, old)
    return loss


@mistake("local_sgd_step", "one all-reduce for each parameter; all of them fit in one flat vector and one call")
def many_reductions(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    old, momentum = _begin(model, outer_state)
    loss = _train(model, inner_optimizer, batches)
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    gradient = torch.cat([_mean(part.clone(), group) for part in (old - _values(model)).split(sizes)])
    momentum.mul_(outer_momentum).add_(gradient)
    old.sub_(outer_lr * (gradient + outer_momentum * momentum))
    _set(model, old)
    return loss


@mistake(
    "local_sgd_step",
    "gradients are averaged in every inner step: that is data parallel training, and communicates as much",
)
def data_parallel(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    if not dist.is_initialized():
        return reference.local_sgd_step(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group)
    old, _ = _begin(model, outer_state)
    batches = list(batches)
    rounds = torch.tensor(float(len(batches)))
    dist.all_reduce(rounds, dist.ReduceOp.MAX, group=group)
    for i in range(int(rounds)):
        inner_optimizer.zero_grad()
        if i < len(batches):
            out = model(*batches[i])
            (out[1] if isinstance(out, tuple) else out).backward()
        for p in model.parameters():
            if p.requires_grad:
                p.grad = _mean(torch.zeros_like(p) if p.grad is None else p.grad, group)
        inner_optimizer.step()
    old.copy_(_values(model))
    return torch.tensor(0.0)


@mistake("local_sgd_step", "the outer gradient is summed over the ranks, and not divided by their number")
def sum_over_ranks(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    old, momentum = _begin(model, outer_state)
    loss = _train(model, inner_optimizer, batches)
    gradient = old - _values(model)
    if dist.is_initialized():
        dist.all_reduce(gradient, group=group)
    momentum.mul_(outer_momentum).add_(gradient)
    old.sub_(outer_lr * (gradient + outer_momentum * momentum))
    _set(model, old)
    return loss


@mistake("local_sgd_step", "the inner optimizer starts anew in each round: its moments are lost")
def new_optimizer(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    inner_optimizer.state.clear()
    return reference.local_sgd_step(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group)


@mistake("local_sgd_step", "the outer momentum is not kept from one round to the next")
def forgetful(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    if outer_state:
        outer_state["momentum"].zero_()
    return reference.local_sgd_step(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group)


# ---- 16.8 layout_costs -----------------------------------------------------------------------------------------------


def _changed(costs, **parts):
    costs = costs | parts
    hidden = (costs[name] for name in ("compute", "sharded", "data", "pipeline"))
    return costs | {"step": max(hidden) + costs["tensor"]}


@mistake(
    "layout_costs",
    "the tensor axis was overlapped with the rest, but in this model the products wait for it: add its time",
)
def tensor_hidden(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    hidden = (costs[name] for name in ("compute", "sharded", "data", "pipeline", "tensor"))
    return costs | {"step": max(hidden)}


@mistake("layout_costs", "all times were added, as if nothing overlapped")
def all_added(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    return costs | {"step": sum(costs[n] for n in ("compute", "sharded", "data", "pipeline", "tensor"))}


@mistake(
    "layout_costs",
    "the activations of all 4 P micro-batches were counted: one-forward-one-backward keeps at most P of them",
)
def all_micro_batches(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    rows, blocks = tokens / (layout.data * layout.sharded), config.n_layers // layout.pipeline
    activations = 2 * blocks * (config.dim + config.hidden_dim / layout.tensor) * rows
    return costs | {"memory": costs["memory"] + (0.75 * activations if layout.pipeline > 1 else 0)}


@mistake("layout_costs", "the activations of a quarter of the tokens were counted at P = 1, where all are in flight")
def a_quarter_always(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    rows, blocks = tokens / (layout.data * layout.sharded), config.n_layers // layout.pipeline
    activations = 2 * blocks * (config.dim + config.hidden_dim / layout.tensor) * rows
    return costs | {"memory": costs["memory"] - (0.75 * activations if layout.pipeline == 1 else 0)}


@mistake("layout_costs", "the pipeline's bubble is missing from the compute time")
def no_bubble(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    p = layout.pipeline
    return _changed(costs, compute=costs["compute"] * (1 - pipeline_bubble(p, 4 * p)))


@mistake(
    "layout_costs",
    "multiplied by 1 + bubble: the bubble is a share of the whole time, so divide the useful time by 1 - bubble",
)
def useful_bubble(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    bubble = pipeline_bubble(layout.pipeline, 4 * layout.pipeline)
    return _changed(costs, compute=costs["compute"] * (1 - bubble) * (1 + bubble))


@mistake("layout_costs", "gathered blocks were counted at S = 1, where nothing is sharded and so nothing is gathered")
def gathered_without_shards(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    blocks = min(2, config.n_layers // layout.pipeline) if layout.sharded == 1 else 0
    return costs | {"memory": costs["memory"] + blocks * 4 * config.dim * config.hidden_dim / layout.tensor}


@mistake("layout_costs", "two gathered blocks were counted in a stage that has only one block")
def two_blocks_of_one(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    block = 4 * config.dim * config.hidden_dim / layout.tensor
    alone = layout.sharded > 1 and config.n_layers == layout.pipeline
    return costs | {"memory": costs["memory"] + alone * block}


@mistake("layout_costs", "weights were gathered once only: backward gathers them again")
def gathered_once(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    return _changed(costs, sharded=costs["sharded"] * 2 / 3)


@mistake(
    "layout_costs",
    "an all-reduce was counted as one pass, but a ring sends everything twice: reduce-scatter, then all-gather",
)
def half_a_ring(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    return _changed(costs, tensor=costs["tensor"] / 2, data=costs["data"] / 2)


@mistake(
    "layout_costs", "every axis was given the speed inside a host: an axis that leaves the host has the slower links"
)
def one_host(config, layout, bandwidths, tokens, peak_flops):
    fast = Bandwidths(bandwidths[0], bandwidths[0], bandwidths[2])
    return reference.layout_costs(config, layout, fast, tokens, peak_flops)


@mistake("layout_costs", "the copies all-reduce whole gradients, though each rank holds only its shard of them")
def whole_gradients(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    return _changed(costs, data=costs["data"] * layout.sharded)


# ---- 16.9 plan -------------------------------------------------------------------------------------------------------


def _search(config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, allowed, key):
    if n_devices < 1:
        raise ValueError(f"n_devices = {n_devices}")
    links, found, least, fastest = Bandwidths.of(bandwidths), [], math.inf, (math.inf, math.inf)
    divisors = [n for n in range(1, n_devices + 1) if n_devices % n == 0]
    for s, t, p in itertools.product(divisors, repeat=3):
        if n_devices % (s * t * p) or config.hidden_dim % t or config.n_layers % p:
            continue
        layout = Layout(data=n_devices // (s * t * p), sharded=s, tensor=t, pipeline=p)
        costs = reference.layout_costs(config, layout, links, tokens_per_device * n_devices, peak_flops)
        least = min(least, costs["memory"])
        fastest = min(fastest, (costs["step"], costs["memory"]))
        if allowed(layout, costs, memory_bytes):
            found.append((key(layout, costs), (p, t, s), layout, costs))
    if not found:
        raise ValueError(f"memory_bytes = {memory_bytes:g}, least {least:g}")
    *_, layout, costs = min(found, key=lambda it: it[:2])
    reasons = (f"the fastest layout of all needs {fastest[1]:g} bytes",)
    return Plan(**vars(layout), step_s=costs["step"], memory_bytes=costs["memory"], costs=costs, reasons=reasons)


def _fits(layout, costs, memory_bytes):
    return costs["memory"] <= memory_bytes


def _fast(layout, costs):
    return costs["step"], costs["memory"]


@mistake("plan", "this is the fastest of all layouts, but it does not fit")
def too_large(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    _search(config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, _fits, _fast)
    return _search(config, n_devices, 1e30, bandwidths, tokens_per_device, peak_flops, _fits, _fast)


@mistake("plan", "this is the layout with the least memory; asked for is the fastest that fits")
def leanest(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    return _search(
        config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, _fits, lambda _, c: c["memory"]
    )


@mistake("plan", "no layout with a pipeline was tried")
def no_pipeline(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    def allowed(layout, costs, size):
        return layout.pipeline == 1 and costs["memory"] <= size

    return _search(config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, allowed, _fast)


@mistake("plan", "only powers of two were tried as degrees")
def powers_of_two(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    def allowed(layout, costs, size):
        degrees = (layout.sharded, layout.tensor, layout.pipeline)
        return all(n & (n - 1) == 0 for n in degrees) and costs["memory"] <= size

    return _search(config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, allowed, _fast)


@mistake("plan", "the batch has the tokens of one device: multiply by the number of devices")
def small_batch(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    return _search(
        config, n_devices, memory_bytes, bandwidths, tokens_per_device / max(1, n_devices), peak_flops, _fits, _fast
    )


@mistake(
    "plan", "ties were not broken: of equally fast layouts take the one with less memory, then the smallest P, T and S"
)
def first_of_the_fastest(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    return _search(
        config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, _fits, lambda _, c: c["step"]
    )


@mistake("plan", "the message for fewer than one device says that nothing fits; it should name the number of devices")
def none_do_not_fit(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    if n_devices < 1:
        raise ValueError(f"nothing fits into memory_bytes = {memory_bytes:g}: at least infinity is needed")
    return _search(config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, _fits, _fast)


@mistake("plan", "a layout that fits exactly was refused: compare with `<=`")
def never_full(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    def allowed(layout, costs, size):
        return costs["memory"] < size

    return _search(config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, allowed, _fast)


@mistake("plan", "no reason tells why a faster layout was not taken: say how much memory it needs")
def faster_layout_left_out(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    found = reference.plan(
        config, n_devices, memory_bytes, bandwidths, tokens_per_device=tokens_per_device, peak_flops=peak_flops
    )
    return replace(found, reasons=tuple(r for r in found.reasons if "but needs" not in r))


@mistake("plan", "a degree was divided with /, so it is a float: use //")
def degrees_are_floats(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    found = reference.plan(
        config, n_devices, memory_bytes, bandwidths, tokens_per_device=tokens_per_device, peak_flops=peak_flops
    )
    return replace(found, data=float(found.data))
