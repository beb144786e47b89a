"""verl's functions and ours, on the same numbers: values and gradients. verl's are recorded; see ``tests/verls.py``."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lib.workbook.grading import case, expect_close, graded, recorded
from tests.inputs import randn
from tests.verls import ActorConfig, verls

rewards = graded("rewards")

ADVANTAGE, ENTROPY, CLIP, SEQUENCE, WEIGHT, AGGREGATE = (f"eq-rewards-{n}" for n in range(1, 7))
N, T = 7, 9
F64 = torch.float64


def a_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of two policies ``[N, T]``, advantages ``[N]`` and a mask, of which one row has no token."""
    old = -randn(N, T, seed=1, dtype=F64).abs() - 0.1
    log_probs = old + 0.3 * randn(N, T, seed=2, dtype=F64)
    mask = (randn(N, T, seed=3) > -0.5).double()
    mask[2] = 0
    return log_probs, old, randn(N, seed=4, dtype=F64), mask


def with_gradient(loss: Tensor, x: Tensor) -> Tensor:
    """A loss and its gradient, in a row."""
    return torch.cat([loss.detach()[None], torch.autograd.grad(loss, x)[0].flatten()])


@pytest.mark.parametrize("normalize", [True, False], ids=["std", "no std"])
def test_group_advantages_equal_verls(normalize):
    case(f"{N} rewards in groups of 3, 2 and 2, the last one without contrast, normalize_by_std={normalize}")
    r, groups = randn(N).round(decimals=2), torch.tensor([4, -1, 4, 9, -1, 9, 4])
    r[groups == 9] = 0.25

    def theirs() -> Tensor:
        found, _ = verls().algos.compute_grpo_outcome_advantage(
            r[:, None].clone(), torch.ones(N, 1), groups.numpy(), norm_adv_by_std_in_grpo=normalize
        )
        return found[:, 0]

    expected = recorded(f"verl_advantages_{normalize}", theirs, needs="verl")
    expect_close(rewards.group_advantages(r, groups, normalize), expected, read=ADVANTAGE)


def test_token_log_probs_equal_verls():
    hidden, weight = randn(5, 4), randn(11, 4, seed=1)
    targets, upstream = torch.tensor([3, 0, 10, 7, 3]), randn(5, seed=2)
    case("5 positions, C=4, V=11, temperature 0.8: verl's log-probabilities and entropies of whole logits")

    def theirs() -> Tensor:
        h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
        logits = h @ w.T / 0.8
        log_probs = verls().functional.logprobs_from_logits_naive(logits, targets)
        gradients = torch.autograd.grad(log_probs, (h, w), upstream.double())
        entropy = verls().functional.entropy_from_logits(logits.detach())
        return torch.cat([log_probs.detach(), entropy, *(g.flatten() for g in gradients)]).float()

    values = recorded("verl_log_probs", theirs, needs="verl").split([5, 5, hidden.numel(), weight.numel()])
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    log_probs, entropy = rewards.token_log_probs(hidden, weight, targets, 0.8, 2)
    found = (log_probs.detach(), entropy, *torch.autograd.grad(log_probs, (hidden, weight), upstream))
    names = ("log_probs", "entropy", "gradient of hidden", "gradient of weight")
    for name, ours, expected in zip(names, found, values, strict=True):
        expect_close(ours, expected.view_as(ours), atol=1e-5, name=name, read=ENTROPY)


@pytest.mark.parametrize("level", ["token", "sequence", "reinforce"])
def test_policy_loss_equals_verls(level):
    log_probs, old, advantages, mask = a_batch()
    low, high = (0.03, 0.05) if level == "sequence" else (0.1, 0.2)
    case(f"N={N}, T={T}, float64, clip_ratio_low={low}, clip_ratio_high={high}: {level}, the sum over all tokens")

    def theirs() -> Tensor:
        x, algos = log_probs.clone().requires_grad_(), verls().algos
        name = {"token": "vanilla", "sequence": "gspo", "reinforce": "reinforce"}[level]
        config = ActorConfig(clip_ratio=0.2, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=1e9,  # no dual clip
                             global_batch_info={})  # fmt: skip
        loss = getattr(algos, f"compute_policy_loss_{name}")
        found, metrics = loss(old, x, advantages[:, None].expand(N, T), mask, "token-sum", config)
        clipped = torch.tensor([metrics.get("actor/pg_clipfrac", 0.0)], dtype=F64)
        return torch.cat([with_gradient(found, x), clipped])

    expected = recorded(f"verl_policy_{level}", theirs, needs="verl")
    x = log_probs.requires_grad_()
    settings = () if level == "reinforce" else (low, high, level)
    losses, fraction = rewards.policy_loss(x, None if level == "reinforce" else old, advantages, mask, *settings)
    found = with_gradient(losses.sum(), x)
    read = SEQUENCE if level == "sequence" else CLIP
    expect_close(found[:1], expected[:1], name="sum of the losses", read=read)
    expect_close(found[1:].view(N, T), expected[1:-1].view(N, T), name="gradient of log_probs", read=read)
    expect_close(fraction.double(), expected[-1], name="clip_fraction", read="the contract, under Returns")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_equal_verls(level):
    old, rollout, _, mask = a_batch()
    limits: dict[str, Any] = {"truncate": 1.25, "mask": "0.7_1.25"}

    def theirs() -> Tensor:
        weights = verls().corrections.compute_rollout_correction_weights
        return torch.stack([weights(old - rollout, mask, level, limit)[0] for limit in limits.values()]).float()

    expected = recorded(f"verl_weights_{level}", theirs, needs="verl")
    for mode, values in zip(limits, expected, strict=True):
        case(f"N={N}, T={T}, level={level!r}, mode={mode!r}, cap=1.25, floor=0.7")
        expect_close(rewards.importance_weights(old, rollout, mask, level, mode, 1.25, 0.7), values, read=WEIGHT)


MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def test_agg_loss_equals_verls():
    losses, _, _, mask = a_batch()
    cases: list[dict[str, Any]] = [{}, {"dp_size": 2, "batch_num_tokens": 90, "global_batch_size": 13,
                                        "loss_scale_factor": 20}]  # fmt: skip
    runs = [(mode, given) for mode in MODES for given in cases]

    def theirs() -> Tensor:
        x = losses.clone().requires_grad_()
        return torch.stack([with_gradient(verls().algos.agg_loss(x, mask, mode, **given), x) for mode, given in runs])

    expected = recorded("verl_agg_loss", theirs, needs="verl")
    x = losses.requires_grad_()
    for (mode, given), values in zip(runs, expected, strict=True):
        case(f"N={N}, T={T}, one row without a token, {mode!r}, {given or 'no more arguments'}")
        found = with_gradient(rewards.agg_loss(x, mask, mode, **given), x)
        expect_close(found[0], values[0], name="loss", read=AGGREGATE)
        expect_close(found[1:], values[1:], name="gradient", read=AGGREGATE)
