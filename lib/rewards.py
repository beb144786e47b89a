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
from lib.ddp import average_gradients_flat
from lib.finetuning import kl_penalty
from lib.serving import Engine, Request, Scheduler
from lib.training import clip_gradient_norm_


def score_response(response: str, check: Callable[[str], bool], format_weight: float = 0.0) -> dict[str, float]:
    """The reward of a response: is its form right, and does a program accept its answer? (Exercise 29.1)

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
    raise NotImplementedError("Exercise 29.1: write score_response")


def check_countdown(expression: str, numbers: Iterable[int], target: int) -> bool:
    """Whether an expression makes the target of the numbers, each used once. (Exercise 29.2)

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
    raise NotImplementedError("Exercise 29.2: write check_countdown")


def group_advantages(rewards: Float[Tensor, " n"], groups: Int[Tensor, " n"], normalize_by_std: bool = True,
                     eps: float = 1e-6) -> Float32[Tensor, " n"]:  # fmt: skip
    """How much better each answer is than the other answers to its prompt. (Exercise 29.3)

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
    raise NotImplementedError("Exercise 29.3: write group_advantages")


def token_log_probs(hidden: Float[Tensor, "*n c"], weight: Float[Tensor, "v c"], targets: Int[Tensor, "*n"],
                    temperature: float = 1.0, chunk_size: int = 256
) -> tuple[Float32[Tensor, "*n"], Float32[Tensor, "*n"]]:  # fmt: skip
    """Log-probabilities of tokens, without ever holding the logits of all positions. (Exercise 29.4)

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
    raise NotImplementedError("Exercise 29.4: write token_log_probs")


def policy_loss(log_probs: Float[Tensor, "n t"], old_log_probs: Float[Tensor, "n t"] | None,
                advantages: Float[Tensor, "n ..."], mask: Tensor, clip_ratio_low: float = 0.2,
                clip_ratio_high: float = 0.2, level: str = "token"
) -> tuple[Float[Tensor, "n t"], Float[Tensor, ""]]:  # fmt: skip
    """The clipped policy gradient's loss of each token. (Exercise 29.5)

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
    raise NotImplementedError("Exercise 29.5: write policy_loss")


@torch.no_grad()
def importance_weights(old_log_probs: Float[Tensor, "n t"], rollout_log_probs: Float[Tensor, "n t"],
                       mask: Tensor, level: str = "token", mode: str = "truncate", cap: float = 2.0,
                       floor: float = 0.0) -> Float32[Tensor, "n t"]:  # fmt: skip
    """How much likelier the trainer finds what the sampler drew. (Exercise 29.6)

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
    raise NotImplementedError("Exercise 29.6: write importance_weights")


def agg_loss(loss_mat: Float[Tensor, "n t"], loss_mask: Tensor, loss_agg_mode: str, dp_size: int = 1,
             batch_num_tokens: int | Tensor | None = None, global_batch_size: int | Tensor | None = None,
             loss_scale_factor: float | None = None) -> Float[Tensor, ""]:  # fmt: skip
    """One loss from those of all tokens; what divides it decides who counts how much. (Exercise 29.7)

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
    raise NotImplementedError("Exercise 29.7: write agg_loss")


def sample_groups(model: nn.Module, prompts: Sequence[Sequence[int]], group_size: int, scheduler: Scheduler,
                  max_new_tokens: int, temperature: float = 1.0, seed: int = 0, eos_id: int | None = None,
                  pad_id: int = 0, version: int = 0) -> dict[str, Any]:  # fmt: skip
    """Sample a group of responses to each prompt on chapter 21's engine, with their log-probabilities. (Exercise 29.8)

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
    raise NotImplementedError("Exercise 29.8: write sample_groups")


class StalenessGate:
    """Lets a sampler run ahead of the trainer, but never so far that its answers are too old. (Exercise 29.9)

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
        raise NotImplementedError("Exercise 29.9: write StalenessGate.__init__")

    def advance(self) -> None:
        """Note an update of the trainer: the version rises by one."""
        raise NotImplementedError("Exercise 29.9: write StalenessGate.advance")

    @property
    def n_allowed(self) -> int:
        """Rollouts that may start now.

        ``(version + max_staleness + 1) * batch_size``, minus all rollouts that were started and not dropped.
        """
        raise NotImplementedError("Exercise 29.9: write StalenessGate.n_allowed")

    def start(self, n: int = 1) -> int:
        """Start n rollouts; returns the version that they belong to.

        Raises:
            ValueError: more than ``n_allowed``; the message has both numbers, and nothing is started.
        """
        raise NotImplementedError("Exercise 29.9: write StalenessGate.start")

    def finish(self, item: Any, version: int) -> None:
        """Hand in a rollout that was started at ``version``.

        Raises:
            ValueError: no rollout of this version is running; the message shows the version.
        """
        raise NotImplementedError("Exercise 29.9: write StalenessGate.finish")

    def take(self) -> list[tuple[Any, int]] | None:
        """A batch for the trainer, or None if there are not enough finished rollouts.

        1. Finished rollouts older than ``max_staleness`` versions are dropped; they no longer count as started.
        2. If ``batch_size`` remain, those of the lowest versions leave the gate, and of one version those that finished
           first.

        Returns:
            ``[(item, staleness)]``; ``staleness`` is the number of versions since the rollout was started.
        """
        raise NotImplementedError("Exercise 29.9: write StalenessGate.take")


def grpo_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any],
              micro_batch_size: int | None = None, *, normalize_by_std: bool = True,
              clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, level: str = "token",
              loss_agg_mode: str = "token-mean", loss_scale_factor: float | None = None,
              kl_coef: float = 0.0, correction: str | None = None, cap: float = 2.0, floor: float = 0.0,
              temperature: float = 1.0, max_norm: float = 1.0, group: dist.ProcessGroup | None = None
) -> dict[str, float]:  # fmt: skip
    """One update of the policy from a batch of rewarded responses, on one process or on ranks. (Exercise 29.10)

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
    raise NotImplementedError("Exercise 29.10: write grpo_step")
