"""Chapter 4's ``sample_next`` for many requests at once, each with settings and random numbers of its own."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lib.given.models.serving import Progress

NOT_FINITE = -1  # in place of a token whose scores are NaN or infinite


def sample_rows(logits: Float[Tensor, "n v"], requests: Sequence[Progress | None]) -> Int[Tensor, " n"]:
    """The next token of each row, without waiting for the device.

    Args:
        logits: ``[N, V]``, float32.
        requests: Whose row it is; None for a row of which no token is wanted.

    Returns:
        ``[N]``, int64: the token that ``sample_next`` draws with the request's settings, and ``NOT_FINITE`` where the
        largest score is NaN or infinite.
    """
    largest, tokens = logits.max(-1)
    random = [i for i, progress in enumerate(requests) if progress and progress.request.temperature > 0]
    if random:
        rows = torch.tensor(random, pin_memory=logits.is_cuda).to(logits.device, non_blocking=True)
        chosen = [progress for progress in requests if progress and progress.request.temperature > 0]
        tokens[rows] = _draw(logits[rows], chosen)
    return torch.where(largest.isfinite(), tokens, NOT_FINITE)


def score_rows(
    logits: Float[Tensor, "n v"], tokens: Int[Tensor, " n"], n_top: int
) -> tuple[Float[Tensor, " n"], Int[Tensor, "n k"], Float[Tensor, "n k"]]:
    """The log-probability of each row's token, and the row's likeliest tokens with theirs, at temperature 1.

    ``NOT_FINITE`` in place of a token gets the log-probability of token 0, which means nothing.
    """
    logprobs = logits.float().log_softmax(-1)
    top, likeliest = logprobs.topk(min(n_top, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, tokens.clamp(min=0)[:, None]).squeeze(-1), likeliest, top


def _draw(logits: Float[Tensor, "n v"], chosen: Sequence[Progress]) -> Int[Tensor, " n"]:
    """A token of each row, drawn as PyTorch does: the largest quotient of probability and exponential noise."""
    width, device = logits.shape[-1], logits.device
    settings = [
        (p.request.temperature, p.request.top_k or width, 2.0 if p.request.top_p is None else p.request.top_p)
        for p in chosen
    ]
    table = torch.tensor(settings, dtype=torch.float64, pin_memory=logits.is_cuda).to(device, non_blocking=True)
    temperature, top_k, top_p = table[:, :, None].unbind(1)
    ordered, tokens = (logits / temperature.float()).sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    if any(k < width for _, k, _ in settings):
        probabilities = probabilities.where(torch.arange(width, device=device) < top_k, 0.0)
        probabilities = torch.where(top_k < width, probabilities / probabilities.sum(-1, keepdim=True), probabilities)
    if any(p <= 1 for *_, p in settings):
        before = probabilities.cumsum(-1) - probabilities
        outside = before >= top_p.float()
        outside[:, 0] = False
        probabilities = probabilities.masked_fill(outside, 0.0)
    noise = torch.empty_like(probabilities)
    for row, progress in zip(noise, chosen, strict=True):
        row.exponential_(1, generator=progress.random(device))
    drawn = (probabilities / noise).argmax(-1, keepdim=True)
    return tokens.gather(-1, drawn).squeeze(-1)
