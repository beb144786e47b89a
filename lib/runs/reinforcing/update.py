"""Chapter 29's ``grpo_step`` from hidden states: the same update, without the logits of a batch ever being held."""

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lib.finetuning import kl_penalty
from lib.given.models.hidden import hidden_states, output_weight
from lib.given.models.rewards import slices
from lib.rewards import agg_loss, group_advantages, importance_weights, policy_loss, token_log_probs
from lib.training import clip_gradient_norm_

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"normalize_by_std": True, "level": "token", "loss_agg_mode": "seq-mean-token-mean"},
    "drgrpo": {"normalize_by_std": False, "level": "token", "loss_agg_mode": "seq-mean-token-sum-norm"},
    "gspo": {"normalize_by_std": True, "level": "sequence", "loss_agg_mode": "seq-mean-token-mean"},
}
"""What makes each algorithm, in the names of ``grpo_step``."""


def passes(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The context of a pass through the model in a number format."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def view(
    model: nn.Module, tokens: Tensor, mask: Tensor, temperature: float, precision: str = "float32"
) -> tuple[Tensor, Tensor]:
    """The model's log-probabilities of the responses' tokens and its entropies there, ``[N, T-1]``, 0 elsewhere."""
    with passes(tokens.device, precision):
        hidden = hidden_states(model, tokens[:, :-1])[mask]
    found = token_log_probs(hidden, output_weight(model), tokens[:, 1:][mask], temperature)
    log_probs, entropy = (x.new_zeros(mask.shape).masked_scatter(mask, x) for x in found)
    return log_probs, entropy


@torch.no_grad()
def views(model: nn.Module, batch: Mapping[str, Tensor], o: argparse.Namespace) -> Tensor:
    """The log-probabilities of a whole batch, in micro-batches and without gradients."""
    tokens, mask = batch["tokens"], batch["response_mask"]
    parts = slices(len(mask), o.micro_batch)
    return torch.cat([view(model, tokens[rows], mask[rows], o.temperature, o.precision)[0] for rows in parts])


def part_loss(log_probs: Tensor, part: Mapping[str, Tensor], o: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """A micro-batch's losses by token, and the share of them that is clipped."""
    mask, old = part["response_mask"], part.get("old_log_probs", log_probs.detach())
    losses, clipped = policy_loss(log_probs, old, part["advantages"], mask, o.clip_low, o.clip_high, o.level)
    if o.correction != "none":
        losses = losses * importance_weights(old, part["log_probs"], mask, "token", o.correction, o.cap, o.floor)
    if o.kl_coef:
        losses = losses + o.kl_coef * kl_penalty(log_probs, part["ref_log_probs"], "k3")
    return losses, clipped


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any], o: argparse.Namespace
) -> tuple[dict[str, float], Tensor, Tensor]:
    """One update of the policy.

    Args:
        model: Chapter 4's ``Llama`` or chapter 6's ``GPT2``.
        optimizer: Of its parameters.
        batch: As for ``grpo_step``.
        o: The run's settings.

    Returns:
        - "loss", "clip_fraction" and "grad_norm", as ``grpo_step`` returns them.
        - The log-probabilities of all responses before the update, and the entropies, ``[N, T-1]``.
    """
    mask = batch["response_mask"]
    n_tokens, n_rows = mask.sum(), mask.any(-1).sum()
    keys = ("tokens", "response_mask", "log_probs", "old_log_probs", "ref_log_probs")
    whole = {key: batch[key] for key in keys if key in batch}
    whole["advantages"] = group_advantages(batch["rewards"], batch["groups"], o.normalize_by_std)
    optimizer.zero_grad()
    total: Any = 0.0
    n_clipped, seen = 0.0, list[tuple[Tensor, Tensor]]()
    for rows in slices(len(mask), o.micro_batch):
        part = {key: value[rows] for key, value in whole.items()}
        log_probs, entropy = view(model, part["tokens"], part["response_mask"], o.temperature, o.precision)
        losses, clipped = part_loss(log_probs, part, o)
        loss = agg_loss(losses, part["response_mask"], o.loss_agg_mode, 1, n_tokens, n_rows, o.loss_scale_factor)
        loss.backward()
        total, n_clipped = total + loss.detach(), n_clipped + clipped * part["response_mask"].sum()
        seen.append((log_probs.detach(), entropy))
    norm = clip_gradient_norm_(model.parameters(), o.clip)
    optimizer.step()
    found = {"loss": float(total), "clip_fraction": float(n_clipped / n_tokens.clamp(min=1)), "grad_norm": float(norm)}
    log_probs, entropy = (torch.cat(parts) for parts in zip(*seen, strict=True))
    return found, log_probs, entropy
