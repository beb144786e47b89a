"""What goes wrong when people reckon with memory, links and money, or average models instead of gradients."""

import itertools
import math

import torch
import torch.distributed as dist

from lib.given.models.scaling import CARDS, Bandwidths, Choice, FFNConfig, Layout, Plan
from lib.workbook.grading import mistake
from solutions import scaling as reference
from solutions.llama import inference_memory_gb
from solutions.tensor_parallel import pipeline_bubble

# ---- 16.1 training_memory_bytes --------------------------------------------------------------------------------------


@mistake("training_memory_bytes", "a block has two matrices, and only one was counted")
def one_matrix(config, tokens):
    found = reference.training_memory_bytes(config, tokens)
    return {name: size if name == "activations" else size // 2 for name, size in found.items()}


@mistake("training_memory_bytes", "the optimizer keeps two moments of each weight, not one")
def one_moment(config, tokens):
    found = reference.training_memory_bytes(config, tokens)
    return found | {"optimizer": found["weights"]}


@mistake(
    "training_memory_bytes",
    "only the input of the block was saved: the second matrix needs its own input for its gradient",
)
def block_inputs_only(config, tokens):
    activations = 2 * config.n_layers * config.dim * tokens
    return reference.training_memory_bytes(config, tokens) | {"activations": activations}


@mistake("training_memory_bytes", "activations are counted in float32, and they are bfloat16")
def wide_activations(config, tokens):
    found = reference.training_memory_bytes(config, tokens)
    return found | {"activations": 2 * found["activations"]}


@mistake(
    "training_memory_bytes", "the block's output was counted too: it is the input of the next block, counted there"
)
def outputs_too(config, tokens):
    found = reference.training_memory_bytes(config, tokens)
    return found | {"activations": 2 * config.n_layers * (2 * config.dim + config.hidden_dim) * tokens}


# ---- 16.2 fsdp_memory_bytes ------------------------------------------------------------------------------------------


@mistake("fsdp_memory_bytes", "all activations were shared out: one half stays whole")
def all_activations_shared(config, tokens, n_devices):
    reference.fsdp_memory_bytes(config, tokens, n_devices)
    return sum(reference.training_memory_bytes(config, tokens).values()) / n_devices


@mistake("fsdp_memory_bytes", "no activation was shared out: one half is")
def no_activation_shared(config, tokens, n_devices):
    reference.fsdp_memory_bytes(config, tokens, n_devices)
    found = reference.training_memory_bytes(config, tokens)
    return (sum(found.values()) - found["activations"]) / n_devices + found["activations"]


@mistake("fsdp_memory_bytes", "the half that stays whole was forgotten")
def half_forgotten(config, tokens, n_devices):
    return reference.fsdp_memory_bytes(config, tokens, n_devices) - (
        reference.training_memory_bytes(config, tokens)["activations"] / 2
    )


@mistake("fsdp_memory_bytes", "the weights stay whole: that is stage 2 of ZeRO, and FSDP is stage 3")
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
    "the whole memory was divided by the device's, though half of the activations cannot be shared out",
)
def divided(config, tokens, device_bytes):
    total, _ = _parts(config, tokens, device_bytes)
    return max(1, math.ceil(total / device_bytes))


@mistake("min_fsdp_devices", "rounded down: the last part of the memory has no device")
def rounded_down(config, tokens, device_bytes):
    total, whole = _parts(config, tokens, device_bytes)
    return max(1, math.floor((total - whole) / (device_bytes - whole)))


@mistake("min_fsdp_devices", "one device too many where it fits exactly")
def one_more(config, tokens, device_bytes):
    total, whole = _parts(config, tokens, device_bytes)
    return math.floor((total - whole) / (device_bytes - whole)) + 1


@mistake(
    "min_fsdp_devices",
    "`math.ceil` of a rounded quotient, which can be a hair above or below a whole number: compare the bytes instead",
)
def ceil_of_a_rounded_quotient(config, tokens, device_bytes):
    total, whole = _parts(config, tokens, device_bytes)
    return max(1, math.ceil((total - whole) / (device_bytes - whole)))


@mistake("min_fsdp_devices", "no error where no number is enough")
def never_refuses(config, tokens, device_bytes):
    whole = reference.training_memory_bytes(config, tokens)["activations"] / 2
    return reference.min_fsdp_devices(config, tokens, device_bytes) if whole < device_bytes else 1


# ---- 16.4 compute_bound_batch ----------------------------------------------------------------------------------------


@mistake("compute_bound_batch", "the two times were added, where the two axes send at once")
def added(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y)
    intensity = peak_flops / bandwidth
    tensor = intensity * y / m_y / config.hidden_dim if y > 1 else 0
    return math.ceil(intensity / (y * m_x) / (1 - tensor)) if x > 1 and tensor < 1 else 1


@mistake("compute_bound_batch", "that is the bound of the best mesh, alpha squared over m_X m_Y F, not of this X and Y")
def best_mesh(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y)
    return math.ceil((peak_flops / bandwidth) ** 2 / (m_x * m_y * config.hidden_dim))


@mistake("compute_bound_batch", "that is the batch of all devices together, not of one")
def of_all(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    return x * y * reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y)


@mistake("compute_bound_batch", "the weights that are gathered are not yet cut by Y")
def uncut_weights(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    return reference.compute_bound_batch(config, x, 1, peak_flops, bandwidth, m_x, m_y)


@mistake(
    "compute_bound_batch", "activations that take exactly as long as the products hide too: `>=` where `>` refuses"
)
def equal_refused(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    found = reference.compute_bound_batch(config, x, y, peak_flops, bandwidth, m_x, m_y)
    if y > 1 and y * peak_flops == m_y * config.hidden_dim * bandwidth:
        raise ValueError(f"y = {y}: no batch is enough; y is at most {y - 1}")
    return found


@mistake("compute_bound_batch", "a tensor axis whose activations never hide was let pass")
def any_y(config, x, y, peak_flops, bandwidth, m_x=2, m_y=1):
    wide = FFNConfig(config.dim, 10**12, config.n_layers)
    return reference.compute_bound_batch(wide, x, y, peak_flops, bandwidth, m_x, m_y)


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


@mistake("choose_gpu", "the smallest card that fits, and a larger one is cheaper")
def smallest(n_parameters, mode, bits):
    return _choose(_needed(n_parameters, mode, bits), key=lambda card: card.memory_gb)


@mistake("choose_gpu", "training was reckoned like inference: gradients and moments are missing")
def like_inference(n_parameters, mode, bits):
    _needed(n_parameters, mode, bits)
    return _choose(_needed(n_parameters, "inference", bits))


@mistake("choose_gpu", "the fifth on top of the weights is missing")
def no_overhead(n_parameters, mode, bits):
    return _choose(_needed(n_parameters, mode, bits) / 1.2)


@mistake("choose_gpu", "the first card of the table that fits, whatever it costs")
def first(n_parameters, mode, bits):
    return _choose(_needed(n_parameters, mode, bits), key=lambda card: -card.dollars_per_hour)


@mistake("choose_gpu", "bits were taken for bytes")
def bits_as_bytes(n_parameters, mode, bits):
    return _choose(8 * _needed(n_parameters, mode, bits))


# ---- 16.6 epoch_cost -------------------------------------------------------------------------------------------------


@mistake("epoch_cost", "seconds were multiplied by the price of an hour")
def seconds(items_per_second, dataset_size, dollars_per_hour):
    return 3600 * reference.epoch_cost(items_per_second, dataset_size, dollars_per_hour)


@mistake("epoch_cost", "these are hours, and no price")
def hours(items_per_second, dataset_size, dollars_per_hour):
    return reference.epoch_cost(items_per_second, dataset_size, 1.0)


@mistake("epoch_cost", "minutes were taken for hours")
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


@mistake("local_sgd_step", "plain momentum: Nesterov's step looks one momentum further ahead")
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


@mistake("local_sgd_step", "the models were averaged and there is no outer step")
def average_only(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    old, _ = _begin(model, outer_state)
    loss = _train(model, inner_optimizer, batches)
    old.copy_(_mean(_values(model), group))
    _set(model, old)
    return loss


@mistake("local_sgd_step", "the outer step goes on from the inner model, where it starts at the old parameters")
def from_the_new(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    old, momentum = _begin(model, outer_state)
    loss = _train(model, inner_optimizer, batches)
    new = _values(model)
    gradient = _mean(old - new, group)
    momentum.mul_(outer_momentum).add_(gradient)
    old.copy_(new - outer_lr * (gradient + outer_momentum * momentum))
    _set(model, old)
    return loss


@mistake("local_sgd_step", "one all-reduce for each parameter, where one flat vector is enough")
def many_reductions(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    old, momentum = _begin(model, outer_state)
    loss = _train(model, inner_optimizer, batches)
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    gradient = torch.cat([_mean(part.clone(), group) for part in (old - _values(model)).split(sizes)])
    momentum.mul_(outer_momentum).add_(gradient)
    old.sub_(outer_lr * (gradient + outer_momentum * momentum))
    _set(model, old)
    return loss


@mistake("local_sgd_step", "gradients are averaged in every inner step: that is data parallel, and sends as much")
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


@mistake("local_sgd_step", "the sum over the ranks was taken for the mean")
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


@mistake("local_sgd_step", "a new inner optimizer in each round: its moments are lost")
def new_optimizer(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    inner_optimizer.state.clear()
    return reference.local_sgd_step(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group)


@mistake("local_sgd_step", "the momentum is not kept from one round to the next")
def forgetful(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group=None):
    if outer_state:
        outer_state["momentum"].zero_()
    return reference.local_sgd_step(model, outer_state, inner_optimizer, batches, outer_lr, outer_momentum, group)


# ---- 16.8 layout_costs -----------------------------------------------------------------------------------------------


def _changed(costs, **parts):
    costs = costs | parts
    hidden = (costs[name] for name in ("compute", "sharded", "data", "pipeline"))
    return costs | {"step": max(hidden) + costs["tensor"]}


@mistake("layout_costs", "the tensor axis was hidden with the others, but the products wait for it")
def tensor_hidden(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    hidden = (costs[name] for name in ("compute", "sharded", "data", "pipeline", "tensor"))
    return costs | {"step": max(hidden)}


@mistake("layout_costs", "all times were added, as if nothing went on at once")
def all_added(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    return costs | {"step": sum(costs[n] for n in ("compute", "sharded", "data", "pipeline", "tensor"))}


@mistake("layout_costs", "the pipeline's bubble is missing")
def no_bubble(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    p = layout.pipeline
    return _changed(costs, compute=costs["compute"] * (1 - pipeline_bubble(p, 4 * p)))


@mistake(
    "layout_costs", "1 + bubble: the bubble is a share of the whole time, so the useful time is divided by 1 - bubble"
)
def useful_bubble(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    bubble = pipeline_bubble(layout.pipeline, 4 * layout.pipeline)
    return _changed(costs, compute=costs["compute"] * (1 - bubble) * (1 + bubble))


@mistake("layout_costs", "two gathered blocks were counted where nothing is sharded, and so nothing is gathered")
def gathered_without_shards(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    blocks = min(2, config.n_layers // layout.pipeline) if layout.sharded == 1 else 0
    return costs | {"memory": costs["memory"] + blocks * 4 * config.dim * config.hidden_dim / layout.tensor}


@mistake("layout_costs", "two gathered blocks were counted where the stage has only one")
def two_blocks_of_one(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    block = 4 * config.dim * config.hidden_dim / layout.tensor
    alone = layout.sharded > 1 and config.n_layers == layout.pipeline
    return costs | {"memory": costs["memory"] + alone * block}


@mistake("layout_costs", "weights were gathered once, where backward gathers them again")
def gathered_once(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    return _changed(costs, sharded=costs["sharded"] * 2 / 3)


@mistake("layout_costs", "an all-reduce was counted once, where a ring sends everything twice")
def half_a_ring(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    return _changed(costs, tensor=costs["tensor"] / 2, data=costs["data"] / 2)


@mistake("layout_costs", "every link has the speed inside a host")
def one_host(config, layout, bandwidths, tokens, peak_flops):
    fast = Bandwidths(bandwidths[0], bandwidths[0], bandwidths[2])
    return reference.layout_costs(config, layout, fast, tokens, peak_flops)


@mistake("layout_costs", "the copies all-reduce all weights, though each holds a shard only")
def whole_gradients(config, layout, bandwidths, tokens, peak_flops):
    costs = reference.layout_costs(config, layout, bandwidths, tokens, peak_flops)
    return _changed(costs, data=costs["data"] * layout.sharded)


# ---- 16.9 plan -------------------------------------------------------------------------------------------------------


def _search(config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, allowed, key):
    if n_devices < 1:
        raise ValueError(f"n_devices = {n_devices}")
    links, found, least = Bandwidths.of(bandwidths), [], math.inf
    divisors = [n for n in range(1, n_devices + 1) if n_devices % n == 0]
    for s, t, p in itertools.product(divisors, repeat=3):
        if n_devices % (s * t * p) or config.hidden_dim % t or config.n_layers % p:
            continue
        layout = Layout(data=n_devices // (s * t * p), sharded=s, tensor=t, pipeline=p)
        costs = reference.layout_costs(config, layout, links, tokens_per_device * n_devices, peak_flops)
        least = min(least, costs["memory"])
        if allowed(layout, costs, memory_bytes):
            found.append((key(layout, costs), (p, t, s), layout, costs))
    if not found:
        raise ValueError(f"memory_bytes = {memory_bytes:g}, least {least:g}")
    *_, layout, costs = min(found, key=lambda it: it[:2])
    return Plan(**vars(layout), step_s=costs["step"], memory_bytes=costs["memory"], costs=costs, reasons=("why",))


def _fits(layout, costs, memory_bytes):
    return costs["memory"] <= memory_bytes


def _fast(layout, costs):
    return costs["step"], costs["memory"]


@mistake("plan", "the fastest of all layouts, though it does not fit")
def too_large(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    _search(config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, _fits, _fast)
    return _search(config, n_devices, 1e30, bandwidths, tokens_per_device, peak_flops, _fits, _fast)


@mistake("plan", "the layout with the least memory, where the fastest that fits is asked for")
def leanest(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    return _search(
        config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, _fits, lambda _, c: c["memory"]
    )


@mistake("plan", "no pipeline was tried")
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


@mistake("plan", "the batch is that of one device, not times the number of devices")
def small_batch(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    return _search(
        config, n_devices, memory_bytes, bandwidths, tokens_per_device / max(1, n_devices), peak_flops, _fits, _fast
    )


@mistake("plan", "of equally fast layouts the first was taken: less memory decides, then P, T and S")
def first_of_the_fastest(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    return _search(
        config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, _fits, lambda _, c: c["step"]
    )


@mistake("plan", "no devices at all count as a model that does not fit")
def none_do_not_fit(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    if n_devices < 1:
        raise ValueError(f"nothing fits into memory_bytes = {memory_bytes:g}: at least infinity is needed")
    return _search(config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, _fits, _fast)


@mistake("plan", "what fits exactly was refused")
def never_full(config, n_devices, memory_bytes, bandwidths, *, tokens_per_device=1024, peak_flops=989e12):
    def allowed(layout, costs, size):
        return costs["memory"] < size

    return _search(config, n_devices, memory_bytes, bandwidths, tokens_per_device, peak_flops, allowed, _fast)
