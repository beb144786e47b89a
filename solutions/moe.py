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
from solutions.llama import SwiGLU


def top_k_router(
    logits: Float[Tensor, "n e"], k: int, normalize: bool = True
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The experts of each token, and how much each of them counts. (Exercise)

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
    ### BEGIN SOLUTION
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"k = {k} of {logits.shape[-1]} experts: expected from 1 to {logits.shape[-1]}")
    probabilities = logits.float().softmax(-1)
    experts = probabilities.argsort(dim=-1, descending=True, stable=True)[..., :k]
    weights = probabilities.gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, experts
    ### END SOLUTION


def load_balancing_loss(probabilities: Float[Tensor, "n e"], experts: Int[Tensor, "n k"]) -> Float[Tensor, ""]:
    """A loss that is 1 when all experts are used alike, and grows when the router prefers some. (Exercise)

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
    ### BEGIN SOLUTION
    counts = torch.bincount(experts.flatten(), minlength=probabilities.shape[-1])
    shares = (counts.double() / experts.numel()).to(probabilities.dtype)
    return len(shares) * (shares * probabilities.mean(0)).sum()
    ### END SOLUTION


def router_z_loss(logits: Float[Tensor, "n e"]) -> Float[Tensor, ""]:
    """A loss that keeps the router's logits small. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Returns:
        The mean over tokens of the squared logsumexp of a token's logits, computed in float32: a scalar.

    Source: ST-MoE (arXiv:2202.08906), equation (5).
    """
    ### BEGIN SOLUTION
    return logits.float().logsumexp(-1).square().mean()
    ### END SOLUTION


def sort_by_expert(experts: Int[Tensor, "n k"], n_experts: int) -> tuple[Int[Tensor, " a"], Int[Tensor, " e"]]:
    """Order the assignments so that those of each expert lie together. (Exercise)

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
    ### BEGIN SOLUTION
    flat = experts.flatten()
    ones = torch.ones_like(flat, dtype=torch.int64)  # bincount would let the host wait for a GPU
    return flat.argsort(stable=True), ones.new_zeros(n_experts).index_add(0, flat, ones)
    ### END SOLUTION


@triton.jit
def grouped_matmul_kernel(
    x, weights, out, first_rows, first_tiles, C, F, E, xn, xc, we, wc, wf,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A tile of the product of sorted rows with their experts' matrices. (Exercise)

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
    ### BEGIN SOLUTION
    tile, column = tile_of_program(GROUP)
    index = tl.arange(0, EXPERTS)
    ends = tl.load(first_tiles + 1 + index, mask=index < E, other=1 << 60)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    if expert < E:
        end = tl.load(first_rows + expert + 1)
        start = tl.load(first_rows + expert) + (tile - tl.load(first_tiles + expert)) * TILE_M
        rows = start + tl.arange(0, TILE_M)
        columns = (column * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
        matrix = weights + expert.to(tl.int64) * we
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        for first in range(0, C, TILE_K):
            k = (first + tl.arange(0, TILE_K)).to(tl.int64)
            x_inside, w_inside = (rows < end)[:, None] & (k < C)[None, :], (k < C)[:, None] & (columns < F)[None, :]
            left = tl.load(x + rows[:, None] * xn + k[None, :] * xc, mask=x_inside, other=0.0)
            right = tl.load(matrix + k[:, None] * wc + columns[None, :] * wf, mask=w_inside, other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        inside = (rows < end)[:, None] & (columns < F)[None, :]
        tl.store(out + rows[:, None] * F + columns[None, :], total.to(out.dtype.element_ty), mask=inside)
    ### END SOLUTION


### BEGIN SOLUTION
def _product(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    if x.is_cuda and x.dtype != torch.float64:
        return launch_grouped(grouped_matmul_kernel, x, weights, counts)
    parts = x.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


### END SOLUTION


def grouped_matmul(
    x: Float[Tensor, "n c"], weights: Float[Tensor, "e c f"], counts: Int[Tensor, " e"]
) -> Float[Tensor, "n f"]:
    """Multiply the rows of each expert with that expert's matrix. (Exercise)

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
    ### BEGIN SOLUTION
    return with_gradients(_product, x, weights, counts)
    ### END SOLUTION


def capacity_mask(experts: Int[Tensor, "n k"], n_experts: int, capacity_factor: float) -> Bool[Tensor, "n k"]:
    """Which assignments an expert accepts if it has room for a fixed number of them. (Exercise)

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
    ### BEGIN SOLUTION
    room = math.ceil(capacity_factor * len(experts) * experts.shape[1] / n_experts)
    in_order = nn.functional.one_hot(experts.T.flatten(), n_experts)
    place = (in_order.cumsum(0) * in_order).sum(-1)
    return (place <= room).view(*experts.T.shape).T
    ### END SOLUTION


def update_router_bias(bias: Float[Tensor, " e"], counts: Int[Tensor, " e"], rate: float) -> Float[Tensor, " e"]:
    """Balance without a loss: raise the bias of an idle expert, lower that of a busy one. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        bias: ``[E]``: what is added to each expert's score when experts are chosen, and only then. Left unchanged.
        counts: ``[E]``: how many assignments each expert got in the last step.
        rate: How far a bias moves in a step.

    Returns:
        A new tensor in the dtype of bias, ``bias + rate * sign(mean of counts - counts)``.

    Source: Wang et al. (arXiv:2408.15664), Algorithm 1; DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
    """
    ### BEGIN SOLUTION
    return bias + rate * torch.sign(counts.double().mean() - counts).to(bias.dtype)
    ### END SOLUTION


class MoE(nn.Module):
    """A feed-forward layer of E experts; each token goes through k of them. (Exercise)

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
        ### BEGIN SOLUTION
        self.k, self.routing = k, None
        self.router = nn.Linear(dim, n_experts, bias=False)

        def matrices(n_in: int, n_out: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(n_experts, n_in, n_out).uniform_(-(n_in**-0.5), n_in**-0.5))

        self.w1, self.w2, self.w3 = matrices(dim, hidden_dim), matrices(hidden_dim, dim), matrices(dim, hidden_dim)
        self.register_buffer("router_bias", torch.zeros(n_experts))
        self.shared = SwiGLU(dim, n_shared * hidden_dim) if n_shared else None
        ### END SOLUTION

    def __getstate__(self) -> dict:  # what is copied and pickled: not the routing, which belongs to a graph
        return self.__dict__ | {"routing": None}

    def route(self, x: Float[Tensor, "n c"]) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Weights and experts of each token, ``[N, k]`` each, in the order of the choice.

        Only the choice uses the bias; a token's weights add up to 1.
        Sets ``routing``.
        """
        ### BEGIN SOLUTION
        logits = self.router(x)
        probabilities = logits.float().softmax(-1)
        _, experts = top_k_router(logits.float() + self.router_bias, self.k)
        self.routing = probabilities, experts
        weights = probabilities.gather(-1, experts)
        return weights / weights.sum(-1, keepdim=True), experts
        ### END SOLUTION

    def compute_experts(self, rows: Float[Tensor, "a c"], counts: Int[Tensor, " e"]) -> Float[Tensor, "a c"]:
        """The experts' SwiGLUs on rows that are sorted by expert: three grouped products."""
        ### BEGIN SOLUTION
        gate = nn.functional.silu(grouped_matmul(rows, self.w1, counts))
        return grouped_matmul(gate * grouped_matmul(rows, self.w3, counts), self.w2, counts)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """The sum of each token's experts, weighted by the router, and of the shared experts.

        It is in the dtype of x, also under autocast.
        No token is dropped.
        """
        ### BEGIN SOLUTION
        tokens = x.reshape(-1, x.shape[-1])
        weights, experts = self.route(tokens)
        order, counts = sort_by_expert(experts, len(self.w1))
        rows = self.compute_experts(tokens[order // self.k], counts).to(x.dtype)
        rows = rows * weights.flatten()[order, None].to(x.dtype)
        out = torch.zeros_like(tokens).index_add(0, order // self.k, rows)
        return (out if self.shared is None else out + self.shared(tokens)).view_as(x)
        ### END SOLUTION


def convert_hf_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of Transformers' Mixtral block under this chapter's names. (Exercise)

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
    ### BEGIN SOLUTION
    n_experts = len(state_dict.get("gate.weight", ()))
    single = [f"experts.{e}.{w}.weight" for e in range(n_experts) for w in ("w1", "w3", "w2")]
    joined = ["experts.gate_up_proj", "experts.down_proj"]
    names = joined if set(joined) & set(state_dict) else single
    wrong = {"gate.weight", *names} ^ set(state_dict)
    if wrong:
        raise ValueError(f"missing or unknown: {', '.join(sorted(wrong))}; expected gate.weight, {', '.join(names)}")
    if names is joined:
        parts = [*state_dict[joined[0]].chunk(2, dim=1), state_dict[joined[1]]]
    else:
        parts = [torch.stack([state_dict[name] for name in names[i::3]]) for i in range(3)]
    experts = {name: w.transpose(1, 2).contiguous() for name, w in zip(("w1", "w3", "w2"), parts, strict=True)}
    return {"router.weight": state_dict["gate.weight"], "router_bias": parts[0].new_zeros(n_experts), **experts}
    ### END SOLUTION


def dispatch(
    x: Float[Tensor, "n c"], experts: Int[Tensor, "n k"], n_experts: int, group: dist.ProcessGroup | None = None
) -> tuple[Float[Tensor, "a c"], Int[Tensor, " e_local"], tuple]:
    """Send each token to the ranks that hold its experts. (Exercise)

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
    ### BEGIN SOLUTION
    n_local = experts_per_rank(n_experts, group)
    order, to_each = sort_by_expert(experts, n_experts)
    from_each = torch.empty_like(to_each)
    dist.all_to_all_single(from_each, to_each, group=group)
    send, receive = (counts.view(-1, n_local).sum(1).tolist() for counts in (to_each, from_each))
    rows = AllToAll.apply(x[order // experts.shape[-1]], send, receive, group)
    local_expert = (torch.arange(n_experts, device=x.device) % n_local).repeat_interleave(from_each)
    by_expert, counts = sort_by_expert(local_expert, n_local)
    return rows[by_expert], counts, (order, by_expert, send, receive)
    ### END SOLUTION


def combine(
    y: Float[Tensor, "a c"], weights: Float[Tensor, "n k"], state: tuple, group: dist.ProcessGroup | None = None
) -> Float[Tensor, "n c"]:
    """Send the experts' results back to where their tokens live, and add them up. (Exercise)

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
    ### BEGIN SOLUTION
    order, by_expert, send, receive = state
    rows = torch.empty_like(y).index_copy(0, by_expert, y)
    back = AllToAll.apply(rows, receive, send, group)
    back = back * weights.flatten()[order, None].to(y.dtype)
    return y.new_zeros(len(weights), y.shape[1]).index_add(0, order // weights.shape[1], back)
    ### END SOLUTION


class ExpertParallelMoE(nn.Module):
    """A `MoE` whose experts are spread over ranks; every rank brings its own tokens. (Exercise)

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
        ### BEGIN SOLUTION
        self.group, self.n_experts = group, len(moe.w1)
        n_local = experts_per_rank(self.n_experts, group)
        self.local = copy.deepcopy(moe)
        for name in ("w1", "w2", "w3"):
            part = getattr(moe, name).detach().split(n_local)[dist.get_rank(group)]
            setattr(self.local, name, nn.Parameter(part.clone()))
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """What the whole layer would return for this rank's tokens.

        Route, dispatch, compute, combine; and the shared experts.
        """
        ### BEGIN SOLUTION
        tokens = x.reshape(-1, x.shape[-1])
        weights, experts = self.local.route(tokens)
        rows, counts, state = dispatch(tokens, experts, self.n_experts, self.group)
        out = combine(self.local.compute_experts(rows, counts), weights, state, self.group).to(x.dtype)
        return (out if self.local.shared is None else out + self.local.shared(tokens)).view_as(x)
        ### END SOLUTION


def moe_parameters(config: MoEConfig) -> tuple[int, int]:
    """Weights of a model with mixtures of experts: all of them, and those that one token uses. (Exercise)

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
    ### BEGIN SOLUTION
    C, expert = config.dim, 3 * config.dim * config.hidden_dim
    common = 2 * config.vocab_size * C + C + config.n_layers * (config.attention_parameters + 2 * C)
    common += config.n_dense * 3 * C * config.dense_hidden_dim
    n_sparse = config.n_layers - config.n_dense
    common += n_sparse * (config.n_shared * expert + config.n_experts * (C + config.router_bias))
    return common + n_sparse * config.n_experts * expert, common + n_sparse * config.k * expert
    ### END SOLUTION
