"""What goes wrong when people write a training loop."""

import io
import math
import os
import random
import shutil
import tempfile

import numpy as np
import torch
from torch import Tensor

from lib.workbook.grading import mistake
from solutions import training as reference

# ---- 7.1 cross_entropy -----------------------------------------------------------------------------------------------


def _pick(values, targets):
    return values.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)


@mistake("cross_entropy", "exp is taken of the logits themselves and overflows; subtract the largest first")
def not_stable(logits, targets):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide.exp().sum(-1).log() - _pick(wide, targets)).mean().to(logits.dtype)


@mistake("cross_entropy", "it returns the sum over all targets instead of their mean")
def summed(logits, targets):
    return reference.cross_entropy(logits, targets) * targets.numel()


@mistake("cross_entropy", "the minus before the logarithm is missing")
def without_minus(logits, targets):
    return -reference.cross_entropy(logits, targets)


@mistake("cross_entropy", "the probabilities are averaged before the logarithm; each target has its own logarithm")
def mean_inside(logits, targets):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -_pick(wide.softmax(-1), targets).mean().log().to(logits.dtype)


@mistake(
    "cross_entropy",
    "a small number is added inside of the logarithm, which limits how large a loss can be",
)
def with_epsilon(logits, targets):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -(_pick(wide.softmax(-1), targets) + 1e-8).log().mean().to(logits.dtype)


@mistake("cross_entropy", "the loss is in bits (logarithm to the base 2) instead of nats")
def in_bits(logits, targets):
    return reference.cross_entropy(logits, targets) / math.log(2)


@mistake(
    "cross_entropy",
    "it computes in the dtype of the logits; cast to float32 first, because a float16 sum is infinite above 65,504",
)
def not_widened(logits, targets):
    shifted = logits - logits.amax(-1, keepdim=True)
    return (shifted.exp().sum(-1).log() - _pick(shifted, targets)).mean()


@mistake(
    "cross_entropy",
    "one maximum is subtracted from the whole batch; in a row far below it the sum is 0, and its logarithm is -inf",
)
def one_maximum(logits, targets):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shifted = wide - wide.max()
    return (shifted.exp().sum(-1).log() - _pick(shifted, targets)).mean().to(logits.dtype)


# ---- 7.2 AdamW -------------------------------------------------------------------------------------------------------


class _Variant(reference.AdamW):
    """The reference's frame around another update."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def moments(self, parameter, gradient, state, group):
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        b1, b2 = group["betas"]
        state["step"] = int(state["step"]) + 1
        state["exp_avg"].mul_(b1).add_(gradient, alpha=1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        return state["exp_avg"], state["exp_avg_sq"], 1 - b1 ** state["step"], 1 - b2 ** state["step"]


@mistake("AdamW", "the decay is added to the gradient and so divided by the root too; that is Adam with L2, not AdamW")
class Coupled(_Variant):
    def update(self, p, g, state, group):
        m, v, c1, c2 = self.moments(p, g + group["weight_decay"] * p, state, group)
        p.sub_(group["lr"] * (m / c1) / ((v / c2).sqrt() + group["eps"]))


@mistake("AdamW", "the moments start at zero and are not corrected for that")
class Uncorrected(_Variant):
    def update(self, p, g, state, group):
        m, v, _, _ = self.moments(p, g, state, group)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))


@mistake("AdamW", "eps is added under the root; it belongs outside")
class EpsInside(_Variant):
    def update(self, p, g, state, group):
        m, v, c1, c2 = self.moments(p, g, state, group)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * (m / c1) / (v / c2 + group["eps"]).sqrt())


@mistake("AdamW", "eps is added to the root before the correction, so it weighs too much in the first steps")
class EpsEarly(_Variant):
    def update(self, p, g, state, group):
        m, v, c1, c2 = self.moments(p, g, state, group)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * math.sqrt(c2) / c1 * m / (v.sqrt() + group["eps"]))


@mistake("AdamW", "the decay is not multiplied by the learning rate")
class DecayWithoutRate(_Variant):
    def update(self, p, g, state, group):
        m, v, c1, c2 = self.moments(p, g, state, group)
        p.mul_(1 - group["weight_decay"])
        p.sub_(group["lr"] * (m / c1) / ((v / c2).sqrt() + group["eps"]))


@mistake("AdamW", "the root is missing: the update is divided by the mean square itself")
class NoRoot(_Variant):
    def update(self, p, g, state, group):
        m, v, c1, c2 = self.moments(p, g, state, group)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * (m / c1) / (v / c2 + group["eps"]))


@mistake("AdamW", "the root is taken before v is corrected; the correction belongs under the root too")
class RootBeforeCorrection(_Variant):
    def update(self, p, g, state, group):
        m, v, c1, c2 = self.moments(p, g, state, group)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * (m / c1) / (v.sqrt() / c2 + group["eps"]))


@mistake("AdamW", "the weight decays after the update, so the update decays too; decay first")
class DecayAfter(_Variant):
    def update(self, p, g, state, group):
        m, v, c1, c2 = self.moments(p, g, state, group)
        p.sub_(group["lr"] * (m / c1) / ((v / c2).sqrt() + group["eps"]))
        p.mul_(1 - group["lr"] * group["weight_decay"])


@mistake("AdamW", "the two betas are exchanged")
class BetasExchanged(reference.AdamW):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, lr, betas[::-1], eps, weight_decay)


@mistake(
    "AdamW",
    "all parameters of a group share one step count; each counts its own, and a step without a gradient doesn't count",
)
class StepInGroup(_Variant):
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                    state["step"] = group["step"] - 1
                    self.update(parameter, parameter.grad, state, group)
        return loss

    def update(self, p, g, state, group):
        m, v, c1, c2 = self.moments(p, g, state, group)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * (m / c1) / ((v / c2).sqrt() + group["eps"]))


@mistake(
    "AdamW",
    "a parameter without a gradient is treated as if its gradient were zero: it decays, and its step is counted",
)
class NoneIsZero(reference.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        missing = [p for group in self.param_groups for p in group["params"] if p.grad is None]
        if closure is None:
            for parameter in missing:
                parameter.grad = torch.zeros_like(parameter)
        loss = super().step(closure)
        for parameter in missing:
            parameter.grad = None if closure is None else parameter.grad
        return loss


@mistake("AdamW", "it reads the defaults; each group has its own settings")
class DefaultsOnly(reference.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        kept = [dict(group) for group in self.param_groups]
        for group in self.param_groups:
            group.update(self.defaults)
        super().step()
        for group, old in zip(self.param_groups, kept, strict=True):
            group.update(old)
        return loss


# ---- 7.3 parameter_groups --------------------------------------------------------------------------------------------


def _split(parameters, weight_decay, decays):
    named = list(parameters)
    return [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]


def _trained(model):
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


@mistake("parameter_groups", "the split looks for the word bias in the name, so the gains of the norms decay")
def by_name(model, weight_decay):
    return _split(_trained(model), weight_decay, lambda n, p: "bias" not in n)


@mistake("parameter_groups", "only tensors of more than two dimensions decay; those of exactly two should decay too")
def above_two(model, weight_decay):
    return _split(_trained(model), weight_decay, lambda n, p: p.ndim > 2)


@mistake(
    "parameter_groups",
    "only tensors of exactly two dimensions decay; a convolution's weight has four and should decay too",
)
def exactly_two(model, weight_decay):
    return _split(_trained(model), weight_decay, lambda n, p: p.ndim == 2)


@mistake("parameter_groups", "a tied weight is in the group twice")
def tied_twice(model, weight_decay):
    named = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    return _split(named, weight_decay, lambda n, p: p.ndim >= 2)


@mistake("parameter_groups", "frozen parameters are in the groups")
def with_frozen(model, weight_decay):
    return _split(model.named_parameters(), weight_decay, lambda n, p: p.ndim >= 2)


@mistake("parameter_groups", "the groups are exchanged: vectors decay, matrices do not")
def exchanged(model, weight_decay):
    return _split(_trained(model), weight_decay, lambda n, p: p.ndim < 2)


# ---- 7.4 cosine_schedule ---------------------------------------------------------------------------------------------


def _checked(warmup_steps, max_steps):
    if max_steps < warmup_steps:
        raise ValueError(f"max_steps = {max_steps} is below warmup_steps = {warmup_steps}")


def _cosine(progress, max_lr, min_lr):
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (max_lr - min_lr)


@mistake("cosine_schedule", "it warms up with step + 1, as some programs do; here step 0 has the rate 0")
def one_ahead(step, max_lr, min_lr, warmup_steps, max_steps):
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    return reference.cosine_schedule(step, max_lr, min_lr, warmup_steps, max_steps)


@mistake("cosine_schedule", "the cosine starts at step 0, so the rate jumps at the end of the warm-up")
def from_zero(step, max_lr, min_lr, warmup_steps, max_steps):
    _checked(warmup_steps, max_steps)
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    return min_lr if step >= max_steps else _cosine(step / max_steps, max_lr, min_lr)


@mistake("cosine_schedule", "the cosine is a whole period, down and up again; it should be half a period, down only")
def whole_cosine(step, max_lr, min_lr, warmup_steps, max_steps):
    _checked(warmup_steps, max_steps)
    if step < warmup_steps or step >= max_steps:
        return reference.cosine_schedule(step, max_lr, min_lr, warmup_steps, max_steps)
    return _cosine(2 * (step - warmup_steps) / (max_steps - warmup_steps), max_lr, min_lr)


@mistake("cosine_schedule", "max_steps is counted from the end of the warm-up; it counts from step 0")
def max_after_warmup(step, max_lr, min_lr, warmup_steps, max_steps):
    _checked(warmup_steps, max_steps)
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    return _cosine(min(1.0, (step - warmup_steps) / max(1, max_steps)), max_lr, min_lr)


@mistake("cosine_schedule", "after max_steps the cosine continues and rises again")
def goes_on(step, max_lr, min_lr, warmup_steps, max_steps):
    if step <= max_steps:
        return reference.cosine_schedule(step, max_lr, min_lr, warmup_steps, max_steps)
    return _cosine((step - warmup_steps) / max(1, max_steps - warmup_steps), max_lr, min_lr)


@mistake("cosine_schedule", "the cosine falls to 0 and is cut off at min_lr; it should end at min_lr")
def cut_off(step, max_lr, min_lr, warmup_steps, max_steps):
    _checked(warmup_steps, max_steps)
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    return max(min_lr, reference.cosine_schedule(step, max_lr, 0.0, warmup_steps, max_steps))


# ---- 7.5 clip_gradient_norm_ -----------------------------------------------------------------------------------------


def _gradients(parameters) -> list[Tensor]:
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    return [p.grad for p in parameters if p.grad is not None]


def _norm(gradients) -> Tensor:
    if not gradients:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))


@mistake("clip_gradient_norm_", "each tensor is clipped by its own norm; all should be scaled by their common norm")
def each_alone(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (torch.linalg.vector_norm(gradient) + 1e-6), max=1.0))
    return norm


@mistake("clip_gradient_norm_", "small gradients are scaled up to max_norm; the factor should be at most 1")
def scaled_up(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    for gradient in gradients:
        gradient.mul_(max_norm / (norm + 1e-6))
    return norm


@mistake("clip_gradient_norm_", "each value is cut off at max_norm, which changes the direction of the gradient")
def by_value(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    for gradient in gradients:
        gradient.clamp_(-max_norm, max_norm)
    return norm


@mistake("clip_gradient_norm_", "an if on the norm (or item()) copies it to the host, which has to wait for the GPU")
def with_if(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / (norm + 1e-6))
    return norm


@mistake(
    "clip_gradient_norm_",
    "1e-6 is subtracted from the norm instead of added, so a gradient smaller than that changes its sign",
)
def minus_epsilon(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm - 1e-6), max=1.0))
    return norm


@mistake("clip_gradient_norm_", "the 1e-6 of PyTorch's factor is not added to the norm")
def without_epsilon(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / norm, max=1.0))
    return norm


@mistake("clip_gradient_norm_", "it returns the norm after clipping")
def norm_after(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = _norm(gradients)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
    return norm * factor


@mistake("clip_gradient_norm_", "the norms of the tensors are added; their squares should be")
def norms_added(parameters, max_norm):
    gradients = _gradients(parameters)
    norm = sum((torch.linalg.vector_norm(g) for g in gradients), torch.tensor(0.0))
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(gradient))
    return norm


@mistake(
    "clip_gradient_norm_",
    "the values are squared in their own dtype; in float16 the square of 300 is infinite, and all gradients become 0",
)
def squares_overflow(parameters, max_norm):
    gradients = _gradients(parameters)
    if not gradients:
        return torch.tensor(0.0)
    norm = torch.stack([(g**2).sum() for g in gradients]).sum().sqrt()
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


@mistake("clip_gradient_norm_", "a generator is iterated twice, and the second time it is empty")
def walked_twice(parameters, max_norm):
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    norm = _norm([p.grad for p in parameters if p.grad is not None])
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in [p.grad for p in parameters if p.grad is not None]:
        gradient.mul_(factor)
    return norm


# ---- 7.6 TokenBatches ------------------------------------------------------------------------------------------------


class _Windows(reference.TokenBatches):
    """The reference's frame around another order of the windows."""

    def _window(self, position):
        epoch, place = divmod(position, self.n_windows)
        if self.seed is None:
            return place
        return int(np.random.default_rng((self.seed, epoch)).permutation(self.n_windows)[place])

    def __next__(self):
        first = self.position + self.rank * self.batch
        starts = [self.length * self._window(first + i) for i in range(self.batch)]
        rows = np.stack([self.tokens[start : start + self.length + 1] for start in starts])
        rows = torch.from_numpy(rows.astype(np.int64))
        self.position += self.world_size * self.batch
        return rows[:, :-1].clone(), rows[:, 1:].clone()


@mistake("TokenBatches", "it starts over when a whole batch no longer fits, so the end of every epoch is never seen")
class DropsTheTail(_Windows):
    def _window(self, position):
        per_step = self.batch * self.world_size
        steps = self.n_windows // per_step
        epoch, place = divmod(position, steps * per_step)
        return super()._window(epoch * self.n_windows + place)


@mistake(
    "TokenBatches",
    "the epoch is computed once per batch; if a batch runs into the next epoch, its last rows still use the old order",
)
class OneEpochABatch(_Windows):
    def __next__(self):
        self._at = (self.position + self.rank * self.batch) // self.n_windows
        return super().__next__()

    def _window(self, position):
        return super()._window(self._at * self.n_windows + position % self.n_windows)


@mistake("TokenBatches", "after a step it goes on behind its own windows instead of behind those of all ranks")
class OwnStep(reference.TokenBatches):
    def __next__(self):
        pair = super().__next__()
        self.position -= (self.world_size - 1) * self.batch
        return pair


@mistake("TokenBatches", "inputs and targets are views of the same rows, so changing one changes the other")
class SharedRows(reference.TokenBatches):
    def __next__(self):
        inputs, targets = super().__next__()
        rows = torch.cat([inputs, targets[:, -1:]], dim=1)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@mistake("TokenBatches", "the targets equal the inputs; they should be the next tokens")
class NotShifted(reference.TokenBatches):
    def __next__(self):
        inputs, _ = super().__next__()
        return inputs, inputs.clone()


@mistake(
    "TokenBatches",
    "the targets are the inputs rolled by one, so the last target of a row is its own first token",
)
class Rolled(reference.TokenBatches):
    def __next__(self):
        inputs, _ = super().__next__()
        return inputs, inputs.roll(-1, dims=1)


@mistake("TokenBatches", "every rank gets the same windows")
class SameForAll(reference.TokenBatches):
    def __next__(self):
        rank, self.rank = self.rank, 0
        try:
            return super().__next__()
        finally:
            self.rank = rank


@mistake("TokenBatches", "the order is drawn once and repeated in every epoch")
class OneOrder(_Windows):
    def _window(self, position):
        return super()._window(position % self.n_windows)


@mistake("TokenBatches", "the seed is seed + epoch, so epoch 1 of seed 3 equals epoch 0 of seed 4")
class SeedPlusEpoch(_Windows):
    def _window(self, position):
        epoch, place = divmod(position, self.n_windows)
        if self.seed is None:
            return place
        return int(np.random.default_rng(self.seed + epoch).permutation(self.n_windows)[place])


@mistake(
    "TokenBatches",
    "the order comes from the global random generator, so other draws change it, and a run cannot be resumed",
)
class GlobalOrder(_Windows):
    def _window(self, position):
        epoch, place = divmod(position, self.n_windows)
        if self.seed is None:
            return place
        if getattr(self, "drawn_for", None) != epoch:
            self.drawn_for, self.drawn = epoch, torch.randperm(self.n_windows).numpy()
        return int(self.drawn[place])


@mistake(
    "TokenBatches",
    "the state has the place in the epoch but not the epoch, so a resumed run uses the first epoch's order",
)
class EpochForgotten(reference.TokenBatches):
    def state_dict(self):
        return super().state_dict() | {"position": self.position % self.n_windows}


@mistake(
    "TokenBatches",
    "all tokens are converted to int64 at once, so a file of many gigabytes is read as a whole and grows fourfold",
)
class ReadsAll(reference.TokenBatches):
    def __init__(self, tokens, *args, **kwargs):
        super().__init__(torch.as_tensor(np.array(tokens).astype(np.int64)), *args, **kwargs)


@mistake(
    "TokenBatches", "the windows are length + 1 tokens apart, so the last token of each is a target and never an input"
)
class StrideTooLong(_Windows):
    def __init__(self, tokens, batch, length, *args, **kwargs):
        super().__init__(tokens, batch, length, *args, **kwargs)
        self.n_windows = max(1, len(self.tokens) // (length + 1))

    def __next__(self):
        first = self.position + self.rank * self.batch
        starts = [(self.length + 1) * self._window(first + i) for i in range(self.batch)]
        rows = np.stack([np.resize(self.tokens[s : s + self.length + 1], self.length + 1) for s in starts])
        rows = torch.from_numpy(rows.astype(np.int64))
        self.position += self.world_size * self.batch
        return rows[:, :-1].clone(), rows[:, 1:].clone()


# ---- 7.7 accumulate_gradients ----------------------------------------------------------------------------------------


def _listed(micro_batches):
    micro_batches = [pair for pair in micro_batches if pair[1].numel()]
    if not micro_batches:
        raise ValueError("no micro-batch")
    return micro_batches, sum(targets.numel() for _, targets in micro_batches)


@mistake("accumulate_gradients", "every micro-batch gets the same weight; weight it by its number of items")
def by_micro_batch(model, micro_batches):
    micro_batches, _ = _listed(micro_batches)
    losses = [model(*pair)[1] for pair in micro_batches]
    mean = sum(losses) / len(losses)
    mean.backward()
    return mean.detach()


@mistake(
    "accumulate_gradients",
    "the losses are added without being divided, so the gradient grows with the number of micro-batches",
)
def not_divided(model, micro_batches):
    micro_batches, n_items = _listed(micro_batches)
    total = 0
    for inputs, targets in micro_batches:
        loss = model(inputs, targets)[1]
        loss.backward()
        total = total + loss.detach() * targets.numel()
    return total / n_items


@mistake(
    "accumulate_gradients",
    "micro-batches are weighted by their rows; rows of different lengths have different numbers of items",
)
def by_rows(model, micro_batches):
    micro_batches, _ = _listed(micro_batches)
    n_rows, mean = sum(len(targets) for _, targets in micro_batches), 0
    for inputs, targets in micro_batches:
        share = model(inputs, targets)[1] * (len(targets) / n_rows)
        share.backward()
        mean = mean + share.detach()
    return mean


@mistake("accumulate_gradients", "there is one backward at the end, so the activations of all micro-batches are kept")
def backward_at_the_end(model, micro_batches):
    micro_batches, n_items = _listed(micro_batches)
    mean = sum(model(inputs, targets)[1] * (targets.numel() / n_items) for inputs, targets in micro_batches)
    mean.backward()
    return mean.detach()


@mistake(
    "accumulate_gradients",
    "the gradients are cleared first; the caller does that, and may have gradients there already",
)
def clears(model, micro_batches):
    model.zero_grad()
    return reference.accumulate_gradients(model, micro_batches)


@mistake(
    "accumulate_gradients",
    "a micro-batch without items is run too; its mean is 0 / 0 = NaN, and NaN times a share of 0 is still NaN",
)
def empty_too(model, micro_batches):
    micro_batches = list(micro_batches)
    _, n_items = _listed(micro_batches)
    mean = 0
    for inputs, targets in micro_batches:
        share = model(inputs, targets)[1] * (targets.numel() / n_items)
        share.backward()
        mean = mean + share.detach()
    return mean


@mistake("accumulate_gradients", "it returns the loss of the last micro-batch instead of the mean over all items")
def last_loss(model, micro_batches):
    micro_batches, _ = _listed(micro_batches)
    reference.accumulate_gradients(model, micro_batches)
    with torch.no_grad():
        return model(*micro_batches[-1])[1]


# ---- 7.8 save_checkpoint ---------------------------------------------------------------------------------------------


def _contents(model, optimizer, step, state):
    """What the reference would write."""
    buffer = io.BytesIO()
    reference.save_checkpoint(buffer, model, optimizer, step, **state)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _write(path, contents, temporary=None):
    """Atomically, but for what a mistake leaves out."""
    if not isinstance(path, str | os.PathLike):
        torch.save(contents, path)
        return
    temporary = temporary or f"{os.fspath(path)}.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


@mistake("save_checkpoint", "it overwrites the old checkpoint: a run that is killed meanwhile has neither")
def written_over(path, model, optimizer, step, **state):
    torch.save(_contents(model, optimizer, step, state), path)


@mistake("save_checkpoint", "the old checkpoint is removed before the new one is in its place")
def removed_first(path, model, optimizer, step, **state):
    contents = _contents(model, optimizer, step, state)
    if isinstance(path, str | os.PathLike) and os.path.exists(path):
        os.remove(path)
    _write(path, contents)


def _moved_by(path, contents, move):
    """As ``_write`` does it, with another last step."""
    if not isinstance(path, str | os.PathLike):
        torch.save(contents, path)
        return
    temporary = f"{os.fspath(path)}.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        move(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


@mistake(
    "save_checkpoint",
    "the old checkpoint is removed and then the new one is renamed, and in between there is none; os.replace does both in one step",
)
def removed_then_renamed(path, model, optimizer, step, **state):
    def move(temporary, path):
        if os.path.exists(path):
            os.remove(path)
        os.rename(temporary, path)

    _moved_by(path, _contents(model, optimizer, step, state), move)


@mistake(
    "save_checkpoint", "shutil.move copies if it cannot rename, and a copy can be cut short; os.replace never copies"
)
def moved_by_shutil(path, model, optimizer, step, **state):
    _moved_by(path, _contents(model, optimizer, step, state), shutil.move)


@mistake(
    "save_checkpoint",
    "os.rename replaces an existing file on Linux but raises on Windows; os.replace works on both",
)
def renamed(path, model, optimizer, step, **state):
    _moved_by(path, _contents(model, optimizer, step, state), os.rename)


@mistake("save_checkpoint", "os.fsync is missing, so the rename can reach the disk before the contents do")
def without_fsync(path, model, optimizer, step, **state):
    if not isinstance(path, str | os.PathLike):
        torch.save(_contents(model, optimizer, step, state), path)
        return
    temporary = f"{os.fspath(path)}.tmp"
    try:
        torch.save(_contents(model, optimizer, step, state), temporary)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


@mistake(
    "save_checkpoint", "flush() is missing, so the end of the file is still in Python's buffer when os.fsync is called"
)
def without_flush(path, model, optimizer, step, **state):
    contents = _contents(model, optimizer, step, state)
    if not isinstance(path, str | os.PathLike):
        torch.save(contents, path)
        return
    temporary = f"{os.fspath(path)}.tmp"
    try:
        whole = io.BytesIO()
        torch.save(contents, whole)
        with open(temporary, "wb", buffering=2**20) as file:
            file.write(whole.getvalue())
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


@mistake(
    "save_checkpoint",
    "the temporary file is in the system's temporary folder; from another disk it cannot be moved in one step",
)
def elsewhere(path, model, optimizer, step, **state):
    name = os.path.join(tempfile.gettempdir(), f"checkpoint-{os.getpid()}.tmp")
    _write(path, _contents(model, optimizer, step, state), name)


@mistake("save_checkpoint", "the random states are not saved, so dropout and sampling differ after a resume")
def without_random(path, model, optimizer, step, **state):
    contents = _contents(model, optimizer, step, state)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        contents["random"]["torch"] = torch.get_rng_state()
    _write(path, contents)


@mistake("save_checkpoint", "the optimizer is not saved, so its moments start at zero again")
def without_optimizer(path, model, optimizer, step, **state):
    contents = _contents(model, optimizer, step, state)
    contents["optimizer"] = {**contents["optimizer"], "state": {}}
    _write(path, contents)


@mistake("save_checkpoint", "after a failure the incomplete temporary file is left behind")
def leaves_rubbish(path, model, optimizer, step, **state):
    contents = _contents(model, optimizer, step, state)
    if not isinstance(path, str | os.PathLike):
        torch.save(contents, path)
        return
    temporary = f"{os.fspath(path)}.tmp"
    with open(temporary, "wb") as file:
        torch.save(contents, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@mistake(
    "save_checkpoint",
    "any object is saved, and only loading it reveals that it cannot be read",
)
def unchecked(path, model, optimizer, step, **state):
    contents = _contents(model, optimizer, step, {})
    contents["state"] |= state
    _write(path, contents)


@mistake(
    "save_checkpoint",
    "only errors of loading are caught; a lambda cannot even be pickled, and its error doesn't name the value",
)
def only_loads_checked(path, model, optimizer, step, **state):
    for value in state.values():
        torch.save(value, io.BytesIO())
    reference.save_checkpoint(path, model, optimizer, step, **state)


@mistake(
    "save_checkpoint",
    "only the additional state is checked; a NumPy number as the step or the learning rate is saved and can't be loaded",
)
def only_state_checked(path, model, optimizer, step, **state):
    contents = _contents(model, torch.optim.SGD(model.parameters()), 0, state)
    contents["state"]["step"] = step
    _write(path, contents | {"optimizer": optimizer.state_dict()})


# ---- 7.9 load_checkpoint ---------------------------------------------------------------------------------------------


def _restore(contents, model, optimizer, *, torch_too=True, python_too=True, numpy_too=True, cards_too=True):
    model.load_state_dict(contents["model"])
    optimizer.load_state_dict(contents["optimizer"])
    kept = contents["random"]
    if torch_too:
        torch.set_rng_state(kept["torch"])
    if python_too:
        random.setstate(kept["python"])
    if numpy_too:
        np.random.set_state(kept["numpy"])
    if cards_too and torch.cuda.is_available() and len(kept.get("cuda", [])) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(kept["cuda"])
    return contents["state"]


def _read(path):
    return torch.load(path, map_location="cpu", weights_only=True)


@mistake("load_checkpoint", "PyTorch's random state is not restored")
def torch_forgotten(path, model, optimizer):
    return _restore(_read(path), model, optimizer, torch_too=False)


@mistake("load_checkpoint", "only PyTorch's random state is restored, not NumPy's and Python's")
def others_forgotten(path, model, optimizer):
    return _restore(_read(path), model, optimizer, python_too=False, numpy_too=False)


@mistake("load_checkpoint", "the random states of the CUDA devices are not restored")
def cards_forgotten(path, model, optimizer):
    return _restore(_read(path), model, optimizer, cards_too=False)


@mistake("load_checkpoint", "weights_only=False: a stranger's checkpoint can run any code")
def unsafe(path, model, optimizer):
    return _restore(torch.load(path, map_location="cpu", weights_only=False), model, optimizer)


@mistake("load_checkpoint", "the optimizer is not loaded, so its moments and learning rates start over")
def optimizer_forgotten(path, model, optimizer):
    contents = _read(path)
    contents["optimizer"] = optimizer.state_dict()
    return _restore(contents, model, optimizer)


@mistake("load_checkpoint", "it returns only the step, without the additional state")
def step_only(path, model, optimizer):
    return {"step": _restore(_read(path), model, optimizer)["step"]}


@mistake(
    "load_checkpoint", "the model gets new parameters (assign=True), and the optimizer keeps updating the old ones"
)
def assigned(path, model, optimizer):
    contents = _read(path)
    model.load_state_dict(contents["model"], assign=True)
    return _restore(contents, model, optimizer)


# ---- 7.10 hours_per_epoch --------------------------------------------------------------------------------------------


def _moving(items_per_second):
    if not items_per_second > 0:
        raise ValueError(f"items_per_second = {items_per_second} is not above 0")


@mistake("hours_per_epoch", "the result is in seconds instead of hours")
def in_seconds(items_per_second, dataset_size):
    _moving(items_per_second)
    return dataset_size / items_per_second


@mistake("hours_per_epoch", "the result is in minutes instead of hours")
def in_minutes(items_per_second, dataset_size):
    _moving(items_per_second)
    return dataset_size / items_per_second / 60


@mistake("hours_per_epoch", "the fraction is upside down: the speed is divided by the size")
def upside_down(items_per_second, dataset_size):
    _moving(items_per_second)
    return items_per_second / dataset_size * 3600


@mistake(
    "hours_per_epoch",
    "a speed of zero gives infinity or a ZeroDivisionError; raise a ValueError that names it",
)
def standstill(items_per_second, dataset_size):
    if math.isnan(items_per_second):
        raise ValueError(f"items_per_second = {items_per_second} is not above 0")
    return dataset_size / items_per_second / 3600


@mistake("hours_per_epoch", "NaN passes the check: `nan <= 0` is False, because NaN is neither below nor above 0")
def lets_nan_through(items_per_second, dataset_size):
    if items_per_second <= 0:
        raise ValueError(f"items_per_second = {items_per_second} is not above 0")
    return dataset_size / items_per_second / 3600
