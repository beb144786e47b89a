"""Rewards: how does a model learn from answers that a program can check, and what does each shortcut change?"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn

from lib.given.models.rewards import AGGREGATIONS, LEVELS, MODES, Settings, check_batch, expect, product, slices, wide
from solutions.ddp import average_gradients_flat
from solutions.finetuning import kl_penalty
from solutions.serving import Engine, Request, Scheduler
from solutions.training import clip_gradient_norm_


def score_response(response: str, check: Callable[[str], bool], format_weight: float = 0.0) -> dict[str, float]:
    """The reward of a response: is its form right, and does a program accept its answer? (Exercise)

    Size: 20 minutes, difficulty 2, core.

    Args:
        response: What the model wrote after the prompt.
        check: Says whether an answer is right; called at most once, for a right form only, with the answer's text
            without white space around it.
        format_weight: The reward of a right form with a wrong answer.

    Returns:
        - "format_reward": 1.0 for a right form, else 0.0.
        - "answer_reward": 1.0 for a right form with a right answer, else 0.0.
        - "reward": 1.0 for a right answer, else ``format_weight * format_reward``.

    The right form, from the first character to the last:

    1. White space, at most one ``<think>``, any text, ``</think>``.
    2. White space, ``<answer>``, text that is not blank, ``</answer>``, white space.
    3. None of the four markers anywhere else. Text is what holds no marker.

    Convention: a prompt may end in ``<think>`` (R1-zero), so the opening marker is optional. Some graders accept text
        after the answer, which pays a model for guessing on.
    """
    ### BEGIN SOLUTION
    pieces = re.split("(</?think>|</?answer>)", response)
    if pieces[1:2] == ["<think>"] and not pieces[0].strip():
        pieces = pieces[2:]
    form = len(pieces) == 7 and pieces[1::2] == ["</think>", "<answer>", "</answer>"]
    form = form and not pieces[2].strip() and bool(pieces[4].strip()) and not pieces[6].strip()
    right = form and bool(check(pieces[4].strip()))
    return {
        "reward": 1.0 if right else format_weight * float(form),
        "format_reward": float(form),
        "answer_reward": float(right),
    }
    ### END SOLUTION


### BEGIN SOLUTION
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2, ")": 0}
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def _evaluate(tokens: Sequence[str]) -> Fraction:
    """The exact value of literals, operators and brackets; an error if they are no expression."""
    values, pending, wants_operand = list[Fraction](), ["("], True
    for token in (*tokens, ")"):
        if wants_operand != (token.isdigit() or token == "("):
            raise ValueError(f"{token} is out of place")
        if token == "(":
            pending.append(token)
        elif token.isdigit():
            values.append(Fraction(token))
            wants_operand = False
        else:
            while pending[-1] != "(" and _RANK[pending[-1]] >= _RANK[token]:
                right = values.pop()
                values[-1] = _APPLY[pending.pop()](values[-1], right)
            if token == ")":
                pending.pop()
            else:
                pending.append(token)
                wants_operand = True
    if pending:
        raise ValueError("a bracket is not closed")
    return values[0]


### END SOLUTION
def check_countdown(expression: str, numbers: Iterable[int], target: int) -> bool:
    """Whether an expression makes the target of the numbers, each used once. (Exercise)

    Size: 40 minutes, difficulty 3, core.

    Args:
        expression: Written by a model, so it may be anything.
        numbers: Whole numbers; the expression must use each exactly as often as it is given. Left unchanged, read once.
        target: The value that the expression must have, **exactly**: ``8/(3-8/3)`` is 24, ``24+1/1000000`` is not.

    Returns:
        False for:

        - more than 200 characters, or any character but the digits 0 to 9, ``+ - * / ( )``, blanks and tabs;
        - anything but literals, brackets and operators between two operands: no sign in front, no ``**``, no ``//``;
        - a literal with a leading zero (0 itself is fine), other numbers than the given ones, or a division by 0;
        - any other value than the target.

        It never raises, whatever a model wrote, and no part of the text is run as a program.
    """
    ### BEGIN SOLUTION
    if not isinstance(expression, str) or not re.fullmatch(r"[-+*/() \t0-9]{1,200}", expression):
        return False
    tokens = re.findall(r"[0-9]+|[-+*/()]", expression)
    literals = [token for token in tokens if token.isdigit()]
    if any(len(token) > 1 and token[0] == "0" for token in literals) or Counter(map(int, literals)) != Counter(numbers):
        return False
    try:
        return bool(_evaluate(tokens) == target)
    except (ValueError, IndexError, ZeroDivisionError):
        return False
    ### END SOLUTION


def group_advantages(rewards: Float[Tensor, " n"], groups: Int[Tensor, " n"], normalize_by_std: bool = True,
                     eps: float = 1e-6) -> Float32[Tensor, " n"]:  # fmt: skip
    """How much better each answer is than the other answers to its prompt. (Exercise)

    Size: 25 minutes, difficulty 2, core.

    Args:
        rewards: ``[N]``, the reward of each answer.
        groups: ``[N]``, any integers in any order: answers with the same one belong to one prompt.
        normalize_by_std: Divide by the group's standard deviation (GRPO), or not (Dr. GRPO).
        eps: Added to the standard deviation.

    Returns:
        Float32 ``[N]``: the reward minus its group's mean, and over ``std + eps`` if asked for, where ``std`` divides
        by n - 1.
        Exactly 0 in a group whose rewards are all equal, and in a group of one.
        Computed in float64, the mean first and then the squares of the differences from it.

    Raises:
        ValueError: as many rewards as groups are expected; the message has both numbers.

    Source: GRPO (arXiv:2402.03300), section 4.1; Dr. GRPO (arXiv:2503.20783), section 3.
    Convention: in a group of one, some implementations return the reward itself.
    """
    ### BEGIN SOLUTION
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards and {len(groups)} groups: expected as many of both")
    rewards = torch.as_tensor(rewards).detach().double()
    _, group, sizes = torch.unique(torch.as_tensor(groups, device=rewards.device), return_inverse=True,
                                   return_counts=True)  # fmt: skip
    zeros = torch.zeros(len(sizes), dtype=torch.float64, device=rewards.device)
    centred = rewards - (zeros.index_add(0, group, rewards) / sizes)[group]
    if normalize_by_std:
        variances = zeros.index_add(0, group, centred.square()) / (sizes - 1).clamp(min=1)
        centred = centred / (variances.sqrt()[group] + eps)
    lowest, highest = (zeros.scatter_reduce(0, group, rewards, way, include_self=False) for way in ("amin", "amax"))
    return torch.where((lowest == highest)[group], 0.0, centred).float()
    ### END SOLUTION


### BEGIN SOLUTION
class _LogProbs(torch.autograd.Function):
    """Log-probabilities and entropies of rows, from ``chunk_size`` rows of logits at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk_size):
        rows, ids = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1, 1)
        log_probs, entropy = (torch.empty(len(rows), device=hidden.device) for _ in range(2))
        for part in slices(len(rows), chunk_size):
            logs = _logits(rows[part], weight, temperature).log_softmax(-1)
            log_probs[part] = logs.gather(-1, ids[part]).squeeze(-1)
            shares = logs.exp()
            entropy[part] = -torch.where(shares > 0, shares.mul_(logs), 0).sum(-1)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        entropy = entropy.view(targets.shape)
        ctx.mark_non_differentiable(entropy)
        return log_probs.view(targets.shape), entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets = ctx.saved_tensors
        rows, ids, grad = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1, 1), grad.reshape(-1, 1)
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        d_rows = torch.empty(rows.shape, dtype=hidden.dtype, device=hidden.device) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide(weight)) if wants_weight else None
        for part in slices(len(rows), ctx.chunk_size):
            d_logits = _logits(rows[part], weight, ctx.temperature).softmax(-1).mul_(-grad[part])
            d_logits.scatter_add_(-1, ids[part], grad[part].to(d_logits.dtype)).div_(ctx.temperature)
            if d_rows is not None:
                d_rows[part] = product(d_logits.to(hidden.dtype), weight)
            if d_weight is not None:
                d_weight.addmm_(d_logits.T.to(d_weight.dtype), rows[part].to(d_weight.dtype))
        d_hidden = None if d_rows is None else d_rows.view(hidden.shape)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return product(hidden, weight.T).to(wide(hidden, weight)).div_(temperature)


### END SOLUTION
def token_log_probs(hidden: Float[Tensor, "*n c"], weight: Float[Tensor, "v c"], targets: Int[Tensor, "*n"],
                    temperature: float = 1.0, chunk_size: int = 256
) -> tuple[Float32[Tensor, "*n"], Float32[Tensor, "*n"]]:  # fmt: skip
    """Log-probabilities of tokens, without ever holding the logits of all positions. (Exercise)

    Size: 50 minutes, difficulty 4, core.

    Args:
        hidden: ``[..., C]``, the model's states in front of its head.
        weight: ``[V, C]``, the head's.
        targets: ``[...]``, token ids.
        temperature: The logits are ``hidden @ weight.T / temperature``.
            From the division on everything is in float32, also for bfloat16 inputs.
        chunk_size: Rows of logits that exist at one time.

    Returns:
        - The target's log-probability at each position, float32, in the shape of ``targets``.
        - The entropy of the distribution at each position, in nats, float32, without a gradient.

        Gradients of ``hidden`` and ``weight`` have their dtypes; the weight's is summed in float32.

    Raises:
        ValueError: ``temperature`` is not above 0; the message shows it.

    Cost: an ``autograd.Function``. Forward and backward make no tensor of more than ``chunk_size * V`` numbers, the
        gradients themselves aside. Saved for backward are the inputs and at most four numbers a position.
    """
    ### BEGIN SOLUTION
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: expected a number above 0")
    return _LogProbs.apply(hidden, weight, targets, temperature, chunk_size)
    ### END SOLUTION


### BEGIN SOLUTION
def _shown(x: Tensor, mask: Tensor) -> Tensor:
    """Zeros where masked; what was there is not read, not even by the gradient."""
    return torch.where(mask, x, 0)


### END SOLUTION
def policy_loss(log_probs: Float[Tensor, "n t"], old_log_probs: Float[Tensor, "n t"] | None,
                advantages: Float[Tensor, "n ..."], mask: Tensor, clip_ratio_low: float = 0.2,
                clip_ratio_high: float = 0.2, level: str = "token"
) -> tuple[Float[Tensor, "n t"], Float[Tensor, ""]]:  # fmt: skip
    """The clipped policy gradient's loss of each token. (Exercise)

    Size: 40 minutes, difficulty 4, core.

    Args:
        log_probs: ``[N, T]``, the policy's; the only argument that gets a gradient.
        old_log_probs: ``[N, T]``, of the policy before its first update on this batch.
            None: the loss is ``-A log p`` (REINFORCE), and nothing is clipped.
        advantages: ``[N]``, ``[N, 1]`` or ``[N, T]``.
        mask: ``[N, T]``, bool, integer or float; 0 hides a token.
            Whatever is hidden is not read: NaN there changes neither value nor gradient.
        clip_ratio_low, clip_ratio_high: rho counts from ``1 - clip_ratio_low`` to ``1 + clip_ratio_high``.
        level: "token": rho is each token's ratio of probabilities, new over old.
            "sequence" (GSPO): the exponential of the mean log-ratio over the response, at each of its tokens.
            Its gradient flows through the token's own log-probability.

    Returns:
        - ``-min(rho A, clip(rho) A)``, ``[N, T]``, 0 where masked.
          Where A is not negative, the loss and its gradient are finite even if rho is too large for a float.
        - The share of unmasked tokens whose clipped term, as a loss, is strictly larger: a scalar tensor without
          gradient, 0 if there is no token.

    Raises:
        ValueError: another ``level``; the message shows it.

    Source: PPO (arXiv:1707.06347), equation 7; GSPO (arXiv:2507.18071), equations 7 and 13; DAPO (arXiv:2503.14476)
        for two limits.
    Convention: verl also keeps log-ratios from -20 to 20 (a response's: below 10), and by default bounds the loss of
        a negative advantage by -3 A (dual clip). Neither is in the equations, and both hide a ratio that has exploded.
    """
    ### BEGIN SOLUTION
    expect("level", level, LEVELS)
    mask, log_probs = mask.bool(), _shown(log_probs, mask.bool())
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages
    advantages = _shown(advantages.detach(), mask)
    if old_log_probs is None:
        return -advantages * log_probs, torch.zeros((), device=log_probs.device)
    log_ratio = log_probs - _shown(old_log_probs.detach(), mask)
    if level == "sequence":
        mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = mean.detach() + (log_probs - log_probs.detach())
    # where A >= 0 a ratio of exp(80) is clipped or multiplied by 0, and infinity would turn a gradient of 0 into NaN
    ratio = torch.where(advantages < 0, log_ratio, log_ratio.clamp(max=80)).exp()
    plain, clipped = -ratio * advantages, -ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages
    n_clipped = ((clipped > plain) & mask).sum()
    return _shown(torch.maximum(plain, clipped), mask), n_clipped / mask.sum().clamp(min=1)
    ### END SOLUTION


@torch.no_grad()
def importance_weights(old_log_probs: Float[Tensor, "n t"], rollout_log_probs: Float[Tensor, "n t"],
                       mask: Tensor, level: str = "token", mode: str = "truncate", cap: float = 2.0,
                       floor: float = 0.0) -> Float32[Tensor, "n t"]:  # fmt: skip
    """How much likelier the trainer finds what the sampler drew. (Exercise)

    Size: 25 minutes, difficulty 3, core.

    Args:
        old_log_probs: ``[N, T]``, the trainer's, before its first update on this batch.
        rollout_log_probs: ``[N, T]``, the sampler's: of other kernels, an older version or rounded weights.
        mask: ``[N, T]``, bool, integer or float; 0 hides a token, and whatever is hidden is not read.
        level: "token": each token's ratio. "sequence": the product over the response, at each of its tokens.
        mode: "truncate": at most ``cap``. "mask": 0 unless the weight is from ``floor`` to ``cap``, both included.
        cap, floor: Limits of the weights; "truncate" does not use ``floor``.

    Returns:
        Float32 ``[N, T]``, without gradient, 0 where masked.
        The logarithm, of the token's ratio or of the product, is kept from -20 to 20.

    Raises:
        ValueError: another ``level`` or ``mode``; the message shows it.

    Convention: this is the trainer over the *sampler*; ``policy_loss`` has the new policy over the old.
    """
    ### BEGIN SOLUTION
    expect("level", level, LEVELS)
    expect("mode", mode, MODES)
    mask = mask.bool()
    log_ratio = _shown(old_log_probs.to(wide(old_log_probs)) - rollout_log_probs, mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    weights = log_ratio.clamp(-20, 20).exp()
    if mode == "truncate":
        weights = weights.clamp(max=cap)
    else:
        weights = torch.where((weights >= floor) & (weights <= cap), weights, 0)
    return _shown(weights, mask).float()
    ### END SOLUTION


def agg_loss(loss_mat: Float[Tensor, "n t"], loss_mask: Tensor, loss_agg_mode: str, dp_size: int = 1,
             batch_num_tokens: int | Tensor | None = None, global_batch_size: int | Tensor | None = None,
             loss_scale_factor: float | None = None) -> Float[Tensor, ""]:  # fmt: skip
    """One loss from those of all tokens; what divides it decides who counts how much. (Exercise)

    Size: 30 minutes, difficulty 3, core.

    Args:
        loss_mat: ``[N, T]``, this micro-batch's losses.
        loss_mask: ``[N, T]``, bool, integer or float; 0 hides a token, and whatever is hidden is not read.
        loss_agg_mode: One of

            - "token-mean": the sum over all tokens, divided by ``batch_num_tokens``;
            - "token-sum": the sum;
            - "seq-mean-token-sum": the sum, divided by ``global_batch_size``;
            - "seq-mean-token-mean": each row's mean over its tokens, their sum divided by ``global_batch_size``;
            - "seq-mean-token-sum-norm": the third, divided by ``loss_scale_factor`` (Dr. GRPO).
        dp_size: Ranks whose gradients will be averaged; the loss is multiplied by it.
        batch_num_tokens: Unmasked tokens of the whole batch, of all ranks and micro-batches; None: of this matrix.
        global_batch_size: Rows with an unmasked token in the whole batch; None: in this matrix.
        loss_scale_factor: The constant of "seq-mean-token-sum-norm"; None is T, the width of this matrix.
            If T differs between micro-batches or ranks, pass a number, or each part is divided by its own T.

    Returns:
        A scalar: summed over micro-batches and averaged over ranks it is that of the whole batch. 0 if no token counts.

    Raises:
        ValueError: another ``loss_agg_mode``; the message shows it. Or ``dp_size`` is above 1 and the count that the
            mode needs, ``batch_num_tokens`` or ``global_batch_size``, is None; the message names it.
            ``loss_scale_factor`` may always be None.

    Convention: the names and meanings are verl's, whose means are NaN if no token counts.
    """
    ### BEGIN SOLUTION
    expect("loss_agg_mode", loss_agg_mode, AGGREGATIONS)
    mask = loss_mask.bool()
    sums, n_tokens = _shown(loss_mat, mask).sum(-1), mask.sum(-1)
    if loss_agg_mode == "token-mean":
        divisor = _whole_or("batch_num_tokens", batch_num_tokens, dp_size, n_tokens.sum())
    elif loss_agg_mode == "token-sum":
        divisor = torch.ones((), device=loss_mat.device)
    else:
        divisor = _whole_or("global_batch_size", global_batch_size, dp_size, (n_tokens > 0).sum())
    if loss_agg_mode == "seq-mean-token-mean":
        sums = sums / n_tokens.clamp(min=1)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        sums = sums / (max(1, loss_mat.shape[-1]) if loss_scale_factor is None else loss_scale_factor)
    return sums.sum() / torch.where(divisor == 0, 1, divisor) * dp_size
    ### END SOLUTION


### BEGIN SOLUTION
def _whole_or(name: str, count: int | Tensor | None, dp_size: int, own: Tensor) -> Tensor:
    """The whole batch's count, or this matrix's own, which is the same only on one rank."""
    if count is None and dp_size > 1:
        raise ValueError(f"{name} is required: with dp_size = {dp_size}, this matrix is not the whole batch")
    return own if count is None else torch.as_tensor(count, device=own.device)


class _Recorder(Engine):
    """An engine that keeps the logits from which the tokens of its last step were drawn."""

    def run(self, chunks):
        logits = list(super().run(chunks))
        self.drawn_from = [row for chunk, row in zip(chunks, logits, strict=True) if chunk.completes]
        return iter(logits)


def _sample(model: nn.Module, requests: list[Request], scheduler: Scheduler, temperature: float) -> dict[Request, Any]:
    """The new tokens of each request, each with its log-probability."""
    engine, found = _Recorder(model, scheduler), dict[Request, list[tuple[int, float]]]()
    try:
        for request in requests:
            engine.submit(request)
            found[request] = []
        while engine.is_busy:
            if new := engine.step():
                logits = torch.stack(engine.drawn_from).float()  # all rows at once: one wait for the device, not N
                log_probs = (logits / temperature).log_softmax(-1)[range(len(new)), [t for _, t in new]].tolist()
                for (request, token), log_prob in zip(new, log_probs, strict=True):
                    found[request].append((token, log_prob))
    finally:
        for request in found:
            engine.cancel(request)
    return found


### END SOLUTION
def sample_groups(model: nn.Module, prompts: Sequence[Sequence[int]], group_size: int, scheduler: Scheduler,
                  max_new_tokens: int, temperature: float = 1.0, seed: int = 0, eos_id: int | None = None,
                  pad_id: int = 0, version: int = 0) -> dict[str, Any]:  # fmt: skip
    """Sample a group of responses to each prompt on chapter 21's engine, with their log-probabilities. (Exercise)

    Size: 45 minutes, difficulty 4, core.

    Args:
        model: A ``Llama`` or a ``GPT2``.
        prompts: Token ids of each prompt. No prompts give a batch without rows, of T = 1.
        group_size: Responses to each.
        scheduler: As for ``Engine``; free of these requests afterwards, also after an error.
            Nobody else's requests are in it.
        max_new_tokens: Tokens of a response at most.
        temperature: Above 0; that of the sampling, and of the log-probabilities too.
        seed: Row n is ``Request(prompt, max_new_tokens, temperature, seed + n, eos_id=eos_id)``.
        eos_id: Ends a response, of which it is the last token.
        pad_id: Fills the rows on the right.
        version: Of the weights; returned as it is.

    Returns:
        A batch without rewards, on the model's device; N = prompts times ``group_size``, T is the longest row:

        - "tokens": int64 ``[N, T]``, prompt and response; prompt i's samples are rows ``i * group_size`` to
          ``(i + 1) * group_size - 1``.
        - "response_mask": bool ``[N, T-1]``, True where the *target* ``tokens[:, 1:]`` is of the response.
        - "log_probs": float32 ``[N, T-1]``, the sampler's log-probability of each target of a response, 0 elsewhere.
        - "groups": int64 ``[N]``, the prompt's index.
        - "version".

    Raises:
        ValueError: ``temperature`` is not above 0; the message shows it.

    Cost: no second pass: the log-probabilities are read off the logits from which the engine drew, preempted or not.
    """
    ### BEGIN SOLUTION
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: expected a number above 0")
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    requests = [
        Request(list(prompt), max_new_tokens, temperature, seed + n, eos_id=eos_id) for n, prompt in enumerate(rows)
    ]
    found = _sample(model, requests, scheduler, temperature)
    lengths = [len(request.tokens) + len(found[request]) for request in requests]
    tokens = torch.full((len(requests), max(lengths, default=1)), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(requests), tokens.shape[1] - 1, dtype=torch.bool)
    log_probs = torch.zeros(mask.shape)
    for n, request in enumerate(requests):
        start, drawn = len(request.tokens), found[request]
        tokens[n, : lengths[n]] = torch.tensor(request.tokens + [token for token, _ in drawn])
        mask[n, start - 1 : lengths[n] - 1] = True
        log_probs[n, start - 1 : lengths[n] - 1] = torch.tensor([log_prob for _, log_prob in drawn])
    batch = {"tokens": tokens, "response_mask": mask, "log_probs": log_probs, "groups": torch.arange(len(rows))}
    batch["groups"] //= max(group_size, 1)
    device = next(model.parameters()).device
    return {key: value.to(device) for key, value in batch.items()} | {"version": version}
    ### END SOLUTION


class StalenessGate:
    """Lets a sampler run ahead of the trainer, but never so far that its answers are too old. (Exercise)

    Size: 40 minutes, difficulty 3, core.

    Args:
        batch_size: Rollouts that one update of the trainer uses.
        max_staleness: Largest number of versions between a rollout's start and its use.

    Attributes:
        version: Updates of the trainer so far.
        n_dropped: Finished rollouts that were dropped because they had become too old.

    Source: AReaL (arXiv:2505.24298), equation 3.
    """

    def __init__(self, batch_size: int, max_staleness: int):
        self.batch_size, self.max_staleness = batch_size, max_staleness
        self.version = 0
        self.n_dropped = 0
        ### BEGIN SOLUTION
        self._n_started = 0
        self._running: Counter[int] = Counter()
        self._finished: list[tuple[Any, int]] = []
        ### END SOLUTION

    def advance(self) -> None:
        """Note an update of the trainer: the version rises by one."""
        ### BEGIN SOLUTION
        self.version += 1
        ### END SOLUTION

    @property
    def n_allowed(self) -> int:
        """Rollouts that may start now.

        ``(version + max_staleness + 1) * batch_size``, minus all rollouts that were started and not dropped.
        """
        ### BEGIN SOLUTION
        return (self.version + self.max_staleness + 1) * self.batch_size - (self._n_started - self.n_dropped)
        ### END SOLUTION

    def start(self, n: int = 1) -> int:
        """Start n rollouts; returns the version that they belong to.

        Raises:
            ValueError: more than ``n_allowed``; the message has both numbers, and nothing is started.
        """
        ### BEGIN SOLUTION
        if n > self.n_allowed:
            raise ValueError(f"{n} rollouts cannot start: {self.n_allowed} are allowed at version {self.version}")
        self._n_started += n
        self._running[self.version] += n
        return self.version
        ### END SOLUTION

    def finish(self, item: Any, version: int) -> None:
        """Hand in a rollout that was started at ``version``.

        Raises:
            ValueError: no rollout of this version is running; the message shows the version.
        """
        ### BEGIN SOLUTION
        if self._running[version] < 1:
            raise ValueError(f"no rollout of version {version} is running")
        self._running[version] -= 1
        self._finished.append((item, version))
        ### END SOLUTION

    def take(self) -> list[tuple[Any, int]] | None:
        """A batch for the trainer, or None if there are not enough finished rollouts.

        1. Finished rollouts older than ``max_staleness`` versions are dropped; they no longer count as started.
        2. If ``batch_size`` remain, those of the lowest versions leave the gate, and of one version those that finished
           first.

        Returns:
            ``[(item, staleness)]``; ``staleness`` is the number of versions since the rollout was started.
        """
        ### BEGIN SOLUTION
        kept = [(item, version) for item, version in self._finished if self.version - version <= self.max_staleness]
        self.n_dropped += len(self._finished) - len(kept)
        self._finished = sorted(kept, key=lambda pair: pair[1])
        if len(kept) < self.batch_size:
            return None
        batch, self._finished = self._finished[: self.batch_size], self._finished[self.batch_size :]
        return [(item, self.version - version) for item, version in batch]
        ### END SOLUTION


### BEGIN SOLUTION
def _log_probs(model: nn.Module, tokens: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """The model's log-probabilities ``[N, T-1]`` of the responses' tokens, 0 elsewhere."""
    logits = model(tokens[:, :-1])
    logits = (logits[0] if isinstance(logits, tuple) else logits)[mask]
    logits = logits.to(wide(logits)) / temperature
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:][mask][:, None]).squeeze(-1)
    return chosen.new_zeros(mask.shape).masked_scatter(mask, chosen)


def _part_loss(model: nn.Module, part: Mapping[str, Tensor], s: Settings) -> tuple[Tensor, Tensor]:
    """A micro-batch's share of the loss, and how many of its tokens are clipped."""
    mask = part["response_mask"]
    log_probs = _log_probs(model, part["tokens"], mask, s.temperature)
    old = part.get("old_log_probs", log_probs.detach())
    losses, clip_fraction = policy_loss(log_probs, old, part["advantages"], mask, *s[:3])
    if s.correction is not None:
        losses = losses * importance_weights(old, part["log_probs"], mask, "token", s.correction, s.cap, s.floor)
    if s.kl_coef:
        losses = losses + s.kl_coef * kl_penalty(log_probs, _shown(part["ref_log_probs"], mask), "k3")
    loss = agg_loss(losses, mask, s.loss_agg_mode, s.n_ranks, s.n_tokens, s.n_rows, s.loss_scale_factor)
    return loss, (clip_fraction * mask.sum()).round()


def _sum_over_ranks(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(numbers, group=group)
    return numbers


### END SOLUTION
def grpo_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any],
              micro_batch_size: int | None = None, *, normalize_by_std: bool = True,
              clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, level: str = "token",
              loss_agg_mode: str = "token-mean", loss_scale_factor: float | None = None,
              kl_coef: float = 0.0, correction: str | None = None, cap: float = 2.0, floor: float = 0.0,
              temperature: float = 1.0, max_norm: float = 1.0, group: dist.ProcessGroup | None = None
) -> dict[str, float]:  # fmt: skip
    """One update of the policy from a batch of rewarded responses, on one process or on ranks. (Exercise)

    Size: 60 minutes, difficulty 5, core.

    Args:
        model: Gets ``tokens[:, :-1]``, since the last token is only a target.
            It returns logits ``[B, T-1, V]``, or a tuple that begins with them.
        optimizer: Of the model's parameters.
        batch: This rank's, with "rewards"; unchanged. A prompt's group is on one rank. T may differ between ranks.
            A rank may have no rows: its gradients are 0, and it takes part in all that ranks do together.
            "old_log_probs" are the model's own, detached, if the batch has none.
        micro_batch_size: Rows that pass through the model at a time; None is all. The result does not depend on it.
        normalize_by_std: As in ``group_advantages``, which sees the whole local batch before it is cut.
        clip_ratio_low, clip_ratio_high, level: As in ``policy_loss``.
        loss_agg_mode: As in ``agg_loss``, which gets the counts of the global batch.
        loss_scale_factor: As in ``agg_loss``; None is the T - 1 of this rank, so pass a number if T differs.
        kl_coef: Times chapter 28's k3 of the policy against "ref_log_probs"; added to the losses, not weighted.
        correction: None, or a mode of ``importance_weights``: the policy's losses are multiplied by its weights of the
            old over the sampler's "log_probs".
            Their level is always "token", whatever ``level`` is: products over long responses vary too much.
        cap, floor: As in ``importance_weights``.
        temperature: Of the log-probabilities, as when sampling.
        max_norm: Of the gradients, which are cleared first, averaged over ranks (chapter 10), then clipped (chapter 7).
        group: The ranks; None is all of them, and one process where there is no process group.

    Returns:
        Floats of the global batch, the same on all ranks: "loss"; "reward", the mean; "clip_fraction", of all unmasked
        tokens; "grad_norm", before clipping.

    Raises:
        ValueError: the batch lacks a key that a setting needs, which the message names; or an unknown setting.

    Cost: three all-reduces: of two counts, of all gradients as one, and of one small tensor.
    """
    ### BEGIN SOLUTION
    check_batch(batch, level, loss_agg_mode, correction, kl_coef)
    rewards, mask = batch["rewards"].double(), batch["response_mask"].bool()
    n_tokens, n_rows = _sum_over_ranks(torch.stack([mask.sum(), mask.any(-1).sum()]), group)
    settings = Settings(clip_ratio_low, clip_ratio_high, level, loss_agg_mode, loss_scale_factor, kl_coef, correction,
                         cap, floor, temperature, dist.get_world_size(group) if dist.is_initialized() else 1,
                         n_tokens, n_rows)  # fmt: skip
    whole = {key: value for key in ("tokens", "log_probs", "old_log_probs", "ref_log_probs")
             if (value := batch.get(key)) is not None}  # fmt: skip
    whole |= {"response_mask": mask, "advantages": group_advantages(rewards, batch["groups"], normalize_by_std)}
    optimizer.zero_grad()
    model.zero_grad()
    sums = torch.stack([rewards.new_zeros(()), rewards.sum(), rewards.new_tensor(len(rewards)), rewards.new_zeros(())])
    for rows in slices(len(mask), micro_batch_size or max(len(mask), 1)):
        loss, n_clipped = _part_loss(model, {key: value[rows] for key, value in whole.items()}, settings)
        loss.backward()
        sums[0] += loss.detach() / settings.n_ranks
        sums[3] += n_clipped
    if dist.is_initialized():
        average_gradients_flat(model, group)
    norm = clip_gradient_norm_(model.parameters(), max_norm)
    optimizer.step()
    loss, reward, n, clipped = _sum_over_ranks(sums, group).tolist()
    n_tokens_ = max(int(n_tokens), 1)
    return {"loss": loss, "reward": reward / max(n, 1), "clip_fraction": clipped / n_tokens_, "grad_norm": float(norm)}
    ### END SOLUTION
