"""Finetuning: how far has a policy moved from the model that it began as?"""

import torch
from jaxtyping import Float
from torch import Tensor


def kl_penalty(
    logprob: Float[Tensor, "*n"], ref_logprob: Float[Tensor, "*n"], kl_penalty: str = "k3"
) -> Float[Tensor, "*n"]:
    """An estimate, token by token, of the divergence from the reference model. (Exercise 28.1)

    Size: 15 minutes, difficulty 2, core.

    Args:
        logprob: Log-probabilities of tokens that the policy drew.
        ref_logprob: The reference model's, in the same shape.
        kl_penalty: "k1", "k2" or "k3", of ``d = logprob - ref_logprob``; a "+" behind it takes the gradient of k2.

    Returns:
        "k1": d; "k2": ``d**2 / 2``; "k3": ``exp(-d) - 1 + d``.

    Raises:
        ValueError: another name; the message shows it.
    """
    raise NotImplementedError("Exercise 28.1: write kl_penalty")
