"""Mixture of experts: more weights than any token uses, and the traffic that brings each token to its own."""

import copy
import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lib.fast.parts.grouped import with_gradients
from lib.given.kernels.grouped import check_groups, launch_grouped, tile_of_program
from lib.given.kernels.mode import tl, triton
from lib.given.models.moe import DEEPSEEK_V3, MIXTRAL_8X7B, MoEConfig  # noqa: F401 - two for the chapter
from lib.given.parallel.experts import AllToAll, check_experts, experts_per_rank
from lib.llama import SwiGLU


def top_k_router(
    logits: Float[Tensor, "n e"], k: int, normalize: bool = True
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The experts of each token, and how much each of them counts. (Exercise 19.1)

    Size: 20 minutes, difficulty 2, core.

    Args:
        logits: ``[N, E]``: each token's score for each expert, in any floating dtype.
        k: Experts for each token, from 1 to E.
        normalize: Whether a token's k weights are divided by their sum.

    Returns:
        Weights ``[N, k]``, float32, the largest first, and their experts ``[N, k]``, int64.
        The softmax is over all E experts, in float32; of equal probabilities the expert with the lower index comes
        first.
        The weights are differentiable.

    Raises:
        ValueError: k is below 1 or above E; the message shows both.

    Source: Mixtral (arXiv:2401.04088), section 2.1, with the softmax before the choice.
        Dividing by the sum makes the two orders equal.
    Convention: Mixtral divides by the sum; Switch and DeepSeek's first mixtures keep the probabilities.
        If divided, the single weight of k = 1 is always 1 and has no gradient.
    """
    raise NotImplementedError("Exercise 19.1: write top_k_router")


def load_balancing_loss(probabilities: Float[Tensor, "n e"], experts: Int[Tensor, "n k"]) -> Float[Tensor, ""]:
    """A loss that is 1 when all experts are used alike, and grows when the router prefers some. (Exercise 19.2)

    Size: 15 minutes, difficulty 2, core.

    Args:
        probabilities: ``[N, E]``: the router's softmax for each token.
        experts: ``[N, k]``: the experts that were chosen.

    Returns:
        Equation (19.2), a scalar; an expert's share is of the ``N * k`` assignments.
        The gradient flows through the probabilities only.

    Source: Switch Transformer (arXiv:2101.03961), equations (4) to (6), for k = 1; shares of N k assignments extend
        it to any k.
    Convention: Transformers' Mixtral counts shares of the N tokens, so its loss is k times as large.
    """
    raise NotImplementedError("Exercise 19.2: write load_balancing_loss")


def router_z_loss(logits: Float[Tensor, "n e"]) -> Float[Tensor, ""]:
    """A loss that keeps the router's logits small. (Exercise 19.3)

    Size: 5 minutes, difficulty 1, warm-up.

    Returns:
        The mean over tokens of the squared logsumexp of a token's logits, computed in float32: a scalar.

    Source: ST-MoE (arXiv:2202.08906), equation (5).
    """
    raise NotImplementedError("Exercise 19.3: write router_z_loss")


def sort_by_expert(experts: Int[Tensor, "n k"], n_experts: int) -> tuple[Int[Tensor, " a"], Int[Tensor, " e"]]:
    """Order the assignments so that those of each expert lie together. (Exercise 19.4)

    Size: 15 minutes, difficulty 2, core.

    Args:
        experts: ``[N, k]``, all below E; on a CPU `check_experts` raises an error if not.
            Assignment ``i`` of ``experts.flatten()`` belongs to token ``i // k``.
        n_experts: Number of experts E.

    Returns:
        order: ``[N k]``, int64: the assignments of expert 0, then those of expert 1, and so on; those of one expert in
            their old order.
        counts: ``[E]``, int64: how many assignments each expert has; 0 for an expert without any.
    """
    check_experts(experts, n_experts)
    raise NotImplementedError("Exercise 19.4: write sort_by_expert")


@triton.jit
def grouped_matmul_kernel(
    x, weights, out, first_rows, first_tiles, C, F, E, xn, xc, we, wc, wf,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A tile of the product of sorted rows with their experts' matrices. (Exercise 19.5)

    Size: 50 minutes, difficulty 5, core.

    Args:
        x, weights, out: Pointers to ``[N, C]``, ``[E, C, F]`` and a contiguous ``[N, F]``.
            Element (n, c) is ``xn * n + xc * c`` elements after x, element (e, c, f) is ``we * e + wc * c + wf * f``
            after weights; ``we * e`` may need more than 32 bits.
        first_rows: Pointer to int64 ``[E + 1]``: the first row of each expert; the last entry is the number of rows.
        first_tiles: Pointer to int64 ``[E + 1]``: the first tile of rows of each expert; the last entry is the number
            of tiles.
        TILE_M, TILE_N, TILE_K: Rows and columns of a tile, and terms added at a time. No tile has rows of two experts.
        GROUP: ``tile_of_program(GROUP)``, given, returns the program's tile, (tile of rows, tile of columns).
        EXPERTS: The smallest power of two that is not below E.

    Returns:
        Nothing.
        The grid is (tiles of rows, tiles of columns).
        The program of tile (i, j) writes it; if there are fewer than i + 1 tiles of rows, it does nothing.
        Sums in float32, no TF32.
    """
    raise NotImplementedError("Exercise 19.5: write grouped_matmul_kernel")


def grouped_matmul(
    x: Float[Tensor, "n c"], weights: Float[Tensor, "e c f"], counts: Int[Tensor, " e"]
) -> Float[Tensor, "n f"]:
    """Multiply the rows of each expert with that expert's matrix. (Exercise 19.6)

    Size: 15 minutes, difficulty 2, core.

    Args:
        x: ``[N, C]``: first the rows of expert 0, then those of expert 1, and so on.
        weights: ``[E, C, F]``: a matrix for each expert.
        counts: ``[E]``: rows of each expert, also 0; they add up to N.

    Returns:
        ``[N, F]``, with the dtype of x, or autocast's.
        On a GPU `launch_grouped` runs `grouped_matmul_kernel`, and the host does not wait for counts; on a CPU, or in
        float64, PyTorch multiplies expert by expert.
        Differentiable: `with_gradients` uses your product again.
        `check_groups` raises a ``ValueError`` if the shapes, dtypes or counts don't fit.
    """
    check_groups(x, weights, counts)
    raise NotImplementedError("Exercise 19.6: write grouped_matmul")


def capacity_mask(experts: Int[Tensor, "n k"], n_experts: int, capacity_factor: float) -> Bool[Tensor, "n k"]:
    """Which assignments an expert accepts if it has room for a fixed number of them. (Exercise 19.7)

    Size: 15 minutes, difficulty 2, stretch.

    Args:
        experts: ``[N, k]``: the experts of each token, its first choice first.
        n_experts: Number of experts E.
        capacity_factor: Each expert has room for ``ceil(capacity_factor * N * k / E)`` assignments.

    Returns:
        ``[N, k]``: True where there is room.
        All tokens' first choices, in order, are served before all second choices, and so on.

    Source: GShard (arXiv:2006.16668), Algorithm 1, which serves first choices first; Switch (arXiv:2101.03961),
        equation (3).
    """
    raise NotImplementedError("Exercise 19.7: write capacity_mask")


def update_router_bias(bias: Float[Tensor, " e"], counts: Int[Tensor, " e"], rate: float) -> Float[Tensor, " e"]:
    """Balance without a loss: raise the bias of an idle expert, lower that of a busy one. (Exercise 19.8)

    Size: 10 minutes, difficulty 2, core.

    Args:
        bias: ``[E]``: what is added to each expert's score when experts are chosen, and only then. Left unchanged.
        counts: ``[E]``: how many assignments each expert got in the last step.
        rate: How far a bias moves in a step.

    Returns:
        A new tensor in the dtype of bias, ``bias + rate * sign(mean of counts - counts)``.

    Source: Wang et al. (arXiv:2408.15664), Algorithm 1; DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
    """
    raise NotImplementedError("Exercise 19.8: write update_router_bias")


class MoE(nn.Module):
    """A feed-forward layer of E experts; each token goes through k of them. (Exercise 19.9)

    Size: 40 minutes, difficulty 4, core.

    Args:
        dim: Model width C.
        hidden_dim: Width F of an expert, which is chapter 4's SwiGLU.
        n_experts: Number of experts E.
        k: How many of them each token goes through.
            With k = 1 the weight is always 1, and only the balancing losses train the router.
        n_shared: Experts that every token goes through, as one SwiGLU of width ``n_shared * hidden_dim``; none if 0.

    Attributes:
        router: ``nn.Linear`` from C to E, without bias.
        w1: Parameter ``[E, C, F]``, the gates; ``w3``, ``[E, C, F]``, the values; ``w2``, ``[E, F, C]``, back to the
            model's width; drawn as ``nn.Linear`` draws.
        router_bias: Buffer ``[E]``, initially zeros, added to the logits when experts are chosen and not when they are
            weighted. A forward pass leaves it unchanged.
        shared: The shared SwiGLU, or None.
        routing: For the balancing losses: float32 softmax ``[N, E]`` without the bias, with its gradient, and experts
            ``[N, k]`` of the last pass; None at first and in copies.

    Source: Mixtral (arXiv:2401.04088), section 2.1; shared experts: DeepSeekMoE (arXiv:2401.06066), section 3.2.
    """

    router_bias: Tensor
    routing: tuple[Tensor, Tensor] | None

    def __init__(self, dim: int, hidden_dim: int, n_experts: int, k: int, n_shared: int = 0):
        super().__init__()
        raise NotImplementedError("Exercise 19.9: write MoE.__init__")

    def __getstate__(self) -> dict:  # what is copied and pickled: not the routing, which belongs to a graph
        return self.__dict__ | {"routing": None}

    def route(self, x: Float[Tensor, "n c"]) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Weights and experts of each token, ``[N, k]`` each, in the order of the choice.

        Only the choice uses the bias; a token's weights add up to 1.
        Sets ``routing``.
        """
        raise NotImplementedError("Exercise 19.9: write MoE.route")

    def compute_experts(self, rows: Float[Tensor, "a c"], counts: Int[Tensor, " e"]) -> Float[Tensor, "a c"]:
        """The experts' SwiGLUs on rows that are sorted by expert: three grouped products."""
        raise NotImplementedError("Exercise 19.9: write MoE.compute_experts")

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """The sum of each token's experts, weighted by the router, and of the shared experts.

        It is in the dtype of x, also under autocast.
        No token is dropped.
        """
        raise NotImplementedError("Exercise 19.9: write MoE.forward")


def convert_hf_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of Transformers' Mixtral block under this chapter's names. (Exercise 19.10)

    Size: 25 minutes, difficulty 3, stretch.

    Args:
        state_dict: State dict of a ``MixtralSparseMoeBlock``, left unchanged: ``gate.weight`` ``[E, C]``, and in the
            installed library ``experts.gate_up_proj`` ``[E, 2F, C]``, gates before values, and
            ``experts.down_proj`` ``[E, C, F]``; in checkpoints on the hub, for each expert,
            ``experts.0.w1.weight`` ``[F, C]``, ``experts.0.w2.weight`` ``[C, F]`` and ``experts.0.w3.weight``
            ``[F, C]``.

    Returns:
        ``router.weight``, ``w1``, ``w2``, ``w3`` and a ``router_bias`` ``[E]`` of zeros, contiguous and in the weights'
        dtype, for ``MoE(...).load_state_dict``.

    Raises:
        ValueError: a name is missing or unknown; one message lists all of them.

    Convention: ``nn.Linear`` keeps ``[out, in]``; the experts of this chapter keep ``[in, out]``, so that rows
        multiply them from the left.
    """
    raise NotImplementedError("Exercise 19.10: write convert_hf_state_dict")


def dispatch(
    x: Float[Tensor, "n c"], experts: Int[Tensor, "n k"], n_experts: int, group: dist.ProcessGroup | None = None
) -> tuple[Float[Tensor, "a c"], Int[Tensor, " e_local"], tuple]:
    """Send each token to the ranks that hold its experts. (Exercise 19.11)

    Size: 35 minutes, difficulty 4, core.

    Args:
        x: ``[N, C]``, this rank's tokens.
        experts: ``[N, k]``, their experts out of all E.
            Ranks may have different numbers of tokens, also none.
        n_experts: Number of experts E.
        group: The R ranks that share them, None for all.
            Rank r holds experts ``r * E/R`` up to ``(r + 1) * E/R``.

    Returns:
        rows: ``[A, C]``: the rows for this rank's experts, sorted by expert, then by rank of origin, then by their
            order there.
            Differentiable.
        counts: ``[E/R]``, int64: how many rows each of this rank's experts has.
        state: What `combine` needs to send the results back.

    Raises:
        ValueError: R does not divide E (`experts_per_rank` raises it).

    Cost: one all-to-all of the E counts, one of the rows, in which nothing is padded.
    """
    raise NotImplementedError("Exercise 19.11: write dispatch")


def combine(
    y: Float[Tensor, "a c"], weights: Float[Tensor, "n k"], state: tuple, group: dist.ProcessGroup | None = None
) -> Float[Tensor, "n c"]:
    """Send the experts' results back to where their tokens live, and add them up. (Exercise 19.12)

    Size: 20 minutes, difficulty 3, core.

    Args:
        y: ``[A, C]``: the experts' results, in the order of the rows of `dispatch`; ``state`` and ``group`` are those
            of `dispatch`, too.
        weights: ``[N, k]``: how much each expert counts for each of this rank's tokens.

    Returns:
        ``[N, C]``, with the dtype of y, not of weights: each token's weighted sum over its experts.
        Costs one all-to-all.
        Differentiable in y and weights.
    """
    raise NotImplementedError("Exercise 19.12: write combine")


class ExpertParallelMoE(nn.Module):
    """A `MoE` whose experts are spread over ranks; every rank brings its own tokens. (Exercise 19.13)

    Size: 35 minutes, difficulty 4, core.

    Args:
        moe: The whole layer, the same on every rank; left unchanged. Use only what ``MoE``'s contract lists.
        group: The ranks that share the experts; None means all ranks.

    Attributes:
        local: A ``MoE`` with the whole router and the shared experts, and in ``w1``, ``w2`` and ``w3`` this rank's E/R
            experts only.

    Nothing is averaged: an expert's gradient is the sum over all ranks' tokens; those of the router and the shared
    experts are this rank's part.
    Source: GShard (arXiv:2006.16668), section 3.2.
    """

    def __init__(self, moe: MoE, group: dist.ProcessGroup | None = None):
        super().__init__()
        raise NotImplementedError("Exercise 19.13: write ExpertParallelMoE.__init__")

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """What the whole layer would return for this rank's tokens.

        Route, dispatch, compute, combine; and the shared experts.
        """
        raise NotImplementedError("Exercise 19.13: write ExpertParallelMoE.forward")


def moe_parameters(config: MoEConfig) -> tuple[int, int]:
    """Weights of a model with mixtures of experts: all of them, and those that one token uses. (Exercise 19.14)

    Size: 15 minutes, difficulty 2, warm-up.

    Args:
        config: The sizes. Its ``attention_parameters`` are the attention weights of one block, inner norms included.

    Returns:
        (total, active).
        Both contain the embedding, the untied output layer, attention, two norms of C weights a block and one at the
        end, dense SwiGLUs, shared experts, and each router with its E biases if it has any.
        All E experts are in the total; k of them are active.

    Source: 46.7 and 12.9 billion in Mixtral (arXiv:2401.04088), section 2; 671 and 37 billion in DeepSeek-V3
        (arXiv:2412.19437), section 4.2.
    """
    raise NotImplementedError("Exercise 19.14: write moe_parameters")
