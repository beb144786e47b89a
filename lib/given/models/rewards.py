"""What chapter 29's functions share: names of settings and their checks, dtypes, and slices of rows."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lib.given.data.tasks import Characters
from lib.given.models.llama import LlamaConfig

LEVELS = ("token", "sequence")
"""Over what a ratio of probabilities is taken."""
MODES = ("truncate", "mask")
"""What becomes of a weight outside of its limits."""
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""verl's names for the ways to make one number of a matrix of losses."""
TINY = LlamaConfig(vocab_size=len(Characters()), dim=64, n_layers=2, n_heads=4, hidden_dim=160, context_len=64)
"""The Llama of the chapter's page, which reads the tasks' characters."""
SMALL = LlamaConfig(vocab_size=len(Characters()), dim=256, n_layers=4, n_heads=4, hidden_dim=704, context_len=128)
"""One of 3 million weights, which a GPU tunes for a task in seconds."""


def expect(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise a ``ValueError`` that shows a setting's value and its choices, unless it is one of them."""
    if value not in choices:
        raise ValueError(f"{name} = {value!r}: expected one of {', '.join(map(repr, choices))}")


class Settings(NamedTuple):
    """What decides the loss of ``grpo_step``, and the counts of the whole batch that divide it."""

    clip_ratio_low: float
    clip_ratio_high: float
    level: str
    loss_agg_mode: str
    loss_scale_factor: float | None
    kl_coef: float
    correction: str | None
    cap: float
    floor: float
    temperature: float
    n_ranks: int
    n_tokens: Tensor
    n_rows: Tensor


def check_batch(
    batch: Mapping[str, Any], level: str, loss_agg_mode: str, correction: str | None, kl_coef: float
) -> None:
    """Raise the errors of ``grpo_step`` that every rank raises, before any of them waits for another.

    Raises:
        ValueError: the batch lacks a key that a setting needs, which the message names; or an unknown setting.
    """
    expect("level", level, LEVELS)
    expect("loss_agg_mode", loss_agg_mode, AGGREGATIONS)
    expect("correction", correction, (None, *MODES))
    needed = ["tokens", "response_mask", "groups", "rewards"]
    if correction is not None:
        needed.append("log_probs")
    if kl_coef != 0:
        needed.append("ref_log_probs")
    for key in needed:
        if batch.get(key) is None:
            raise ValueError(f"the batch has no {key!r}")


def slices(n: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` rows that cover n rows; the last may be shorter."""
    return (slice(first, first + size) for first in range(0, n, size))


def wide(*tensors: Tensor) -> torch.dtype:
    """Float32, or float64 if one of the tensors is."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def product(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product that also takes two dtypes."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype) @ b.to(dtype)
