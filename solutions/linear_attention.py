"""Attention with a state: a sum of outer products that decays, corrects itself, and crosses chunks and ranks."""

from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lib.given.kernels.mode import tl, triton
from lib.given.kernels.once import first_derivative_only
from lib.given.kernels.states import check_chunk, check_sequence, state_tiles

# ---- 24.1 ------------------------------------------------------------------------------------------------------------


### BEGIN SOLUTION
def _wide(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float | None, state: Tensor | None):
    """Scaled queries, keys, values, decays ``[B, T, H, 1 or Dk]`` and the first state, in float32 at least."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    if g is None:
        g = q.new_zeros(q.shape[:3])
    g = g[..., None] if g.ndim == 3 else g
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return q.to(dtype) * scale, k.to(dtype), v.to(dtype), g.to(dtype), state.to(dtype)


### END SOLUTION


def linear_attention_recurrent(
    q: Float[Tensor, "b t h dk"], k: Float[Tensor, "b t h dk"], v: Float[Tensor, "b t h dv"],
    g: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None = None, scale: float | None = None,
    initial_state: Float[Tensor, "b h dk dv"] | None = None
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:  # fmt: skip
    """Attention without a softmax, one position after the other. (Exercise)

    Size: 20 minutes, difficulty 2, core.

    Args:
        q, k: Queries and keys.
        v: Values.
        g: Natural logarithm of the decay, at most 0: one a head, or one for each feature of the key. None is no decay.
        scale: Factor of the queries. None means ``Dk ** -0.5``.
        initial_state: The state before the first position. None means zeros.

    Returns:
        The outputs in the dtype of ``q``, and the state after the last position. Everything is summed in float32
        (float64 for float64), which is the state's dtype. T may be 0. Differentiable in all tensors.

    Raises:
        ValueError: shapes do not fit (``check_sequence`` raises it).
    Convention: decay first, then write, then read; so position t reads its own value.
    Source: equation (24.2); Katharopoulos and others (arXiv:2006.16236), without the normaliser.
    """
    check_sequence(q, k, v, g, initial_state=initial_state)
    ### BEGIN SOLUTION
    queries, k, v, g, state = _wide(q, k, v, g, scale, initial_state)
    outputs = []
    for t in range(q.shape[1]):
        state = torch.exp(g[:, t, :, :, None]) * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", queries[:, t], state))
    return (torch.stack(outputs, 1) if outputs else v).to(q.dtype), state
    ### END SOLUTION


# ---- 24.2 ------------------------------------------------------------------------------------------------------------


### BEGIN SOLUTION
def _chunks(x: Tensor, size: int) -> Tensor:
    """``[B, T, H, D]`` to ``[N, B H, C, D]``: the chunks first, zeros after the last position, at least one chunk."""
    missing = -x.shape[1] % size if x.shape[1] else size
    return rearrange(F.pad(x, (0, 0, 0, 0, 0, missing)), "b (n c) h d -> n (b h) c d", c=size)


def _weights(a: Tensor, b: Tensor, c: Tensor, diagonal: int) -> Tensor:
    """``(a_i * exp(c_i - c_j)) . b_j`` where j < i + diagonal, else 0: ``[..., C, C]``; c is ``[..., C, 1 or Dk]``."""
    later = torch.ones(a.shape[-2], a.shape[-2], dtype=torch.bool, device=a.device).triu(diagonal)
    between = c.unsqueeze(-2) - c.unsqueeze(-3)
    decay = torch.exp(between.masked_fill(later[..., None], -torch.inf))  # masked before exp, which would overflow
    if c.shape[-1] == 1:
        return a @ b.mT * decay.squeeze(-1)
    return torch.einsum("...ijd,...jd->...ij", a.unsqueeze(-2) * decay, b)


def _walk(q: Tensor, k: Tensor, c: Tensor, u: Tensor, state: Tensor, w: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs of all chunks, and the state after the last; a chunk adds ``u - w @ state`` to the state before it."""
    end = c[..., -1:, :]
    keys, fade = (k * torch.exp(end - c)).mT, torch.exp(end).mT
    before, new = [], []
    for key, kept, u_n, w_n in zip(keys, fade, u, repeat(None) if w is None else w, strict=False):
        before.append(state)
        new.append(u_n if w_n is None else torch.baddbmm(u_n, w_n, state, alpha=-1))
        state = torch.baddbmm(kept * state, key, new[-1])
    return q * torch.exp(c) @ torch.stack(before) + _weights(q, k, c, 1) @ torch.stack(new), state


### END SOLUTION


def linear_attention_chunked(
    q: Float[Tensor, "b t h dk"], k: Float[Tensor, "b t h dk"], v: Float[Tensor, "b t h dv"],
    g: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None = None, scale: float | None = None,
    initial_state: Float[Tensor, "b h dk dv"] | None = None, chunk_size: int = 64
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:  # fmt: skip
    """The recurrence's numbers from products of matrices, one chunk of positions at a time. (Exercise)

    Size: 45 minutes, difficulty 4, core.

    Args:
        q, k, v, g, scale, initial_state: As for ``linear_attention_recurrent``.
        chunk_size: Positions C of a chunk; the last chunk may have fewer.

    Returns:
        Outputs and state, as ``linear_attention_recurrent`` returns them.

    Raises:
        ValueError: shapes do not fit, or ``chunk_size`` is below 1 (``check_sequence`` raises it).
    Cost: T/C steps that depend on each other, each of a few operators. No tensor of T x T numbers, nor of a state for
        every position. With a decay for each feature, tensors of C x T x Dk numbers a head are allowed.
    Convention: only differences that are at most 0 are exponentiated, so nothing overflows, gradients included.
    Source: equations (24.4) to (24.6); GLA (arXiv:2312.06635); Mamba-2 (arXiv:2405.21060).
    """
    check_sequence(q, k, v, g, initial_state=initial_state, chunk_size=chunk_size)
    ### BEGIN SOLUTION
    *sequences, state = _wide(q, k, v, g, scale, initial_state)
    size = min(chunk_size, max(q.shape[1], 1))
    queries, k, v, g = (_chunks(x, size) for x in sequences)
    out, state = _walk(queries, k, g.cumsum(-2), v, state.flatten(0, 1))
    return _whole(out, q), state.unflatten(0, (q.shape[0], q.shape[2]))
    ### END SOLUTION


### BEGIN SOLUTION
def _whole(out: Tensor, q: Tensor) -> Tensor:
    """``[N, B H, C, Dv]`` back to ``[B, T, H, Dv]``, in the dtype of ``q``."""
    return rearrange(out, "n (b h) c d -> b (n c) h d", b=q.shape[0], h=q.shape[2])[:, : q.shape[1]].to(q.dtype)


### END SOLUTION

# ---- 24.3 ------------------------------------------------------------------------------------------------------------


def delta_rule_recurrent(
    q: Float[Tensor, "b t h dk"], k: Float[Tensor, "b t h dk"], v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "b t h"], g: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None = None,
    scale: float | None = None, initial_state: Float[Tensor, "b h dk dv"] | None = None
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:  # fmt: skip
    """A state that corrects itself: each position writes what the state would get wrong about its value. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        q, v, g, scale, initial_state: As for ``linear_attention_recurrent``.
        k: Keys, as they are: if you want unit keys, norm them before.
        beta: Share of the error that is corrected, one a head.

    Returns:
        Outputs and state, in the dtypes of ``linear_attention_recurrent``.

    Raises:
        ValueError: shapes do not fit (``check_sequence`` raises it).
    Source: equation (24.8); DeltaNet (arXiv:2406.06484); with g Gated DeltaNet (arXiv:2412.06464),
        with g of each feature Kimi Linear (arXiv:2510.26692).
    """
    check_sequence(q, k, v, g, beta, initial_state)
    ### BEGIN SOLUTION
    queries, k, v, g, state = _wide(q, k, v, g, scale, initial_state)
    outputs, beta = [], beta.to(v.dtype)
    for t in range(q.shape[1]):
        state = torch.exp(g[:, t, :, :, None]) * state
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", queries[:, t], state))
    return (torch.stack(outputs, 1) if outputs else v).to(q.dtype), state
    ### END SOLUTION


# ---- 24.4 ------------------------------------------------------------------------------------------------------------


def wy_representation(
    k: Float[Tensor, "*lead c dk"],
    v: Float[Tensor, "*lead c dv"],
    beta: Float[Tensor, "*lead c"],
    g: Float[Tensor, "*lead c"] | Float[Tensor, "*lead c dk"] | None = None,
) -> tuple[Float[Tensor, "*lead c dk"], Float[Tensor, "*lead c dv"]]:
    """All corrections of a chunk at once, whatever the state before it. (Exercise)

    Size: 40 minutes, difficulty 4, core.

    Args:
        k, v, beta: Keys, values and shares of the C positions of a chunk.
        g: Natural logarithm of each position's decay, one a head or one for each feature of the key; None is no decay.

    Returns:
        w and u, in float32 (float64 for float64): with the state S before the chunk, row t of ``u - w @ S`` is what
        ``delta_rule_recurrent`` multiplies k_t with at position t.

    Raises:
        ValueError: shapes do not fit (``check_chunk`` raises it).
    Cost: one triangular solve for both; no inverse of a full matrix.
    Source: equation (24.10); DeltaNet (arXiv:2406.06484); with g Gated DeltaNet (arXiv:2412.06464).
    """
    check_chunk(k, v, beta, g)
    ### BEGIN SOLUTION
    dtype = torch.promote_types(k.dtype, torch.float32)
    g = torch.zeros_like(beta) if g is None else g
    k, v, beta, g = (x.to(dtype) for x in (k, v, beta[..., None], g[..., None] if g.ndim == beta.ndim else g))
    c = g.cumsum(-2)
    right = beta * torch.cat([torch.exp(c) * k, v], -1)
    solved = torch.linalg.solve_triangular(beta * _weights(k, k, c, 0), right, upper=False, unitriangular=True)
    return solved[..., : k.shape[-1]], solved[..., k.shape[-1] :]
    ### END SOLUTION


# ---- 24.5 ------------------------------------------------------------------------------------------------------------


def delta_rule_chunked(
    q: Float[Tensor, "b t h dk"], k: Float[Tensor, "b t h dk"], v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "b t h"], g: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None = None,
    scale: float | None = None, initial_state: Float[Tensor, "b h dk dv"] | None = None, chunk_size: int = 64
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:  # fmt: skip
    """The delta rule's numbers from products of matrices. (Exercise)

    Size: 30 minutes, difficulty 4, core.

    Args:
        q, k, v, beta, g, scale, initial_state: As for ``delta_rule_recurrent``.
        chunk_size: Positions C of a chunk; the last chunk may have fewer.

    Returns:
        Outputs and state, as ``delta_rule_recurrent`` returns them.

    Raises:
        ValueError: shapes do not fit, or ``chunk_size`` is below 1 (``check_sequence`` raises it).
    Cost: ``wy_representation`` of all chunks at once, then T/C steps that depend on each other. Sizes of tensors, and
        what is exponentiated, are as in ``linear_attention_chunked``.
    Source: equation (24.11); DeltaNet (arXiv:2406.06484).
    """
    check_sequence(q, k, v, g, beta, initial_state, chunk_size)
    ### BEGIN SOLUTION
    *sequences, state = _wide(q, k, v, g, scale, initial_state)
    size = min(chunk_size, max(q.shape[1], 1))
    queries, k, v, g, beta = (_chunks(x, size) for x in (*sequences, beta[..., None]))
    w, u = wy_representation(k, v, beta[..., 0], g if g.shape[-1] > 1 else g[..., 0])
    out, state = _walk(queries, k, g.cumsum(-2), u, state.flatten(0, 1), w)
    return _whole(out, q), state.unflatten(0, (q.shape[0], q.shape[2]))
    ### END SOLUTION


# ---- 24.6 ------------------------------------------------------------------------------------------------------------


def short_convolution(
    x: Float[Tensor, "b t c"], weight: Float[Tensor, "c k"], bias: Float[Tensor, " c"] | None = None,
    initial_state: Float[Tensor, "b k_1 c"] | None = None, activation: str | None = "silu"
) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b k_1 c"]]:  # fmt: skip
    """Each channel's weighted sum over its last K inputs. (Exercise)

    Size: 20 minutes, difficulty 2, warm-up.

    Args:
        x: Inputs of C channels.
        weight: K weights a channel; the last column multiplies the present input.
        bias: Added to the sum.
        initial_state: The K - 1 inputs before the first; None means zeros.
        activation: "silu", applied after the bias, or None.

    Returns:
        The outputs in the dtype of ``x``; and the last K - 1 inputs, those of ``initial_state`` included where T is
        shorter, in memory of their own. T may be 0.

    Raises:
        ValueError: another activation; the message shows it.
    Source: equation (24.12).
    """
    ### BEGIN SOLUTION
    if activation not in ("silu", None):
        raise ValueError(f"activation = {activation!r}: expected 'silu' or None")
    if initial_state is None:
        initial_state = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])
    inputs = torch.cat([initial_state.to(x.dtype), x], dim=1)
    y = F.conv1d(inputs.mT, weight[:, None], bias, groups=x.shape[2]).mT if x.shape[1] else x
    return F.silu(y) if activation else y, inputs[:, x.shape[1] :].clone()
    ### END SOLUTION


# ---- 24.7 ------------------------------------------------------------------------------------------------------------


@dataclass
class DeltaCache:
    """What a `GatedDeltaNet` remembers of the positions that it has seen; its size does not depend on their number."""

    conv_state: Float[Tensor, "b k_1 channels"]
    recurrent_state: Float[Tensor, "b hv dk dv"]
    length: int = 0


class GatedDeltaNet(nn.Module):
    """Qwen3-Next's linear layer: short convolutions, unit keys, the gated delta rule, a gated norm. (Exercise)

    Size: 60 minutes, difficulty 4, core.

    Args:
        dim: Width C of the model.
        n_k_heads: Heads Hk of queries and keys.
        n_v_heads: Heads Hv of values; key head j serves the r = Hv/Hk value heads j r to (j + 1) r - 1.
        head_k_dim: Width Dk of queries and keys.
        head_v_dim: Width Dv of values.
        conv_kernel_size: Inputs K that an output of the convolution sees.
        eps: Epsilon of the output's norm.
        chunk_size: As for ``delta_rule_chunked``.

    Attributes, none of them with a bias:
        in_proj_qkvz: For each key head the rows of its query, its key, its r values, and their r gates z.
        in_proj_ba: For each key head the rows of its r b, then of its r a.
        conv1d: Weight ``[2 Hk Dk + Hv Dv, 1, K]`` over all queries, then all keys, then all values.
        dt_bias, A_log: ``[Hv]``, of the decay.
        norm: Weight ``[Dv]``, 1 at first.
        out_proj: From the ``Hv Dv`` features of all heads to C.

    - SiLU follows the convolution. Queries and keys are then divided by ``sqrt(sum of squares + 1e-6)``.
    - ``beta = sigmoid(b)``, ``g = -exp(A_log) * softplus(a + dt_bias)``.
    - Each head's output passes an RMSNorm over Dv, then is multiplied by ``norm.weight`` and by ``silu(z)``.
    - Projections and convolution are in the dtype of ``x``; all between them and ``out_proj`` is in float32 (float64
      for float64).

    Raises:
        ValueError: Hv is no multiple of Hk; the message names both.
    Source: equation (24.13); Gated DeltaNet (arXiv:2412.06464); Transformers' Qwen3NextGatedDeltaNet.
    """

    def __init__(
        self, dim: int, n_k_heads: int, n_v_heads: int, head_k_dim: int, head_v_dim: int,
        conv_kernel_size: int = 4, eps: float = 1e-6, chunk_size: int = 64
    ):  # fmt: skip
        super().__init__()
        if n_v_heads % n_k_heads:
            raise ValueError(f"n_v_heads = {n_v_heads} is no multiple of n_k_heads = {n_k_heads}")
        self.n_k_heads, self.n_v_heads, self.head_k_dim, self.head_v_dim = n_k_heads, n_v_heads, head_k_dim, head_v_dim
        self.eps, self.chunk_size = eps, chunk_size
        keys, values = n_k_heads * head_k_dim, n_v_heads * head_v_dim
        self.in_proj_qkvz = nn.Linear(dim, 2 * keys + 2 * values, bias=False)
        self.in_proj_ba = nn.Linear(dim, 2 * n_v_heads, bias=False)
        channels = 2 * keys + values
        self.conv1d = nn.Conv1d(channels, channels, conv_kernel_size, groups=channels, bias=False)
        step = (
            torch.empty(n_v_heads).uniform_(-6.9, -2.3).exp()
        )  # heads that forget over 10 to 1000 positions, and A times faster
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        self.A_log = nn.Parameter(torch.empty(n_v_heads).uniform_(1, 16).log())
        self.norm = nn.RMSNorm(head_v_dim, eps)
        self.out_proj = nn.Linear(values, dim, bias=False)

    def make_cache(self, batch: int, dtype: torch.dtype = torch.float32, device=None) -> DeltaCache:
        """A cache of zeros, for no positions yet.

        ``conv_state`` is ``[B, K - 1, 2 Hk Dk + Hv Dv]`` in ``dtype``. ``recurrent_state`` is ``[B, Hv, Dk, Dv]`` in
        float32 (float64 for float64).
        """
        ### BEGIN SOLUTION
        wide = torch.promote_types(dtype, torch.float32)
        channels, _, kernel = self.conv1d.weight.shape
        conv = torch.zeros(batch, kernel - 1, channels, dtype=dtype, device=device)
        state = torch.zeros(batch, self.n_v_heads, self.head_k_dim, self.head_v_dim, dtype=wide, device=device)
        return DeltaCache(conv, state)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "b t c"], cache: DeltaCache | None = None) -> Float[Tensor, "b t c"]:
        """The layer's output. With a cache, go on from its states and write them in place; its memory never moves.

        T = 1 is one step of ``delta_rule_recurrent``; more positions are chunked. T may be 0.
        T is added to the cache's ``length``.
        A cache is for decoding, without gradients: what is overwritten cannot be differentiated. It keeps no graph.
        """
        ### BEGIN SOLUTION
        dtype, ratio = torch.promote_types(x.dtype, torch.float32), self.n_v_heads // self.n_k_heads
        keys, values = self.n_k_heads * self.head_k_dim, self.n_v_heads * self.head_v_dim
        shares = [self.head_k_dim, self.head_k_dim, ratio * self.head_v_dim, ratio * self.head_v_dim]
        *qkv, z = self.in_proj_qkvz(x).unflatten(-1, (self.n_k_heads, -1)).split(shares, -1)
        b, a = (y.flatten(2).to(dtype) for y in self.in_proj_ba(x).unflatten(-1, (self.n_k_heads, -1)).chunk(2, -1))
        conv, state = (cache.conv_state, cache.recurrent_state) if cache is not None else (None, None)
        mixed, conv = short_convolution(
            torch.cat([y.flatten(2) for y in qkv], -1), self.conv1d.weight[:, 0], None, conv
        )
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = mixed.to(dtype).split([keys, keys, values], -1)
            q, k = (rearrange(y, "b t (h d) -> b t h d", h=self.n_k_heads) for y in (q, k))
            q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
            q, k = (y.repeat_interleave(ratio, dim=2) for y in (q, k))
            v, z = (y.reshape(*x.shape[:2], self.n_v_heads, self.head_v_dim) for y in (v, z.to(dtype)))
            g = -torch.exp(self.A_log.to(dtype)) * F.softplus(a + self.dt_bias.to(dtype))
            rule = delta_rule_recurrent if x.shape[1] == 1 else partial(delta_rule_chunked, chunk_size=self.chunk_size)
            o, state = rule(q, k, v, torch.sigmoid(b), g, initial_state=state)
            o = F.rms_norm(o, o.shape[-1:], self.norm.weight.to(dtype), self.eps) * F.silu(z)
        if cache is not None:
            cache.conv_state.copy_(conv.detach())
            cache.recurrent_state.copy_(state.detach())
            cache.length += x.shape[1]
        return self.out_proj(o.flatten(2).to(x.dtype))
        ### END SOLUTION


# ---- 24.8 ------------------------------------------------------------------------------------------------------------


### BEGIN SOLUTION
def _layer_bytes(config, kind: str, length: int, bytes_per_value, state_bytes_per_value):
    """Bytes that one layer remembers of one sequence."""
    if kind == "full_attention":
        return 2 * config.n_kv_heads * config.head_dim * length * bytes_per_value
    if kind != "linear_attention":
        raise ValueError(f"layer type {kind!r}: expected 'full_attention' or 'linear_attention'")
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    inputs = (config.linear_conv_kernel_dim - 1) * (2 * keys + values)
    return inputs * bytes_per_value + config.linear_key_head_dim * values * state_bytes_per_value


### END SOLUTION


def hybrid_cache_bytes(config, batch: int, length: int, bytes_per_value=2, state_bytes_per_value=4) -> int:
    """Bytes that all layers remember of ``batch`` sequences of ``length`` positions. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        config: Sizes by attribute: ``layer_types``, and what its kinds need.

            - "full_attention": ``n_kv_heads`` G and ``head_dim`` D.
            - "linear_attention": ``linear_num_key_heads`` Hk, ``linear_num_value_heads`` Hv, ``linear_key_head_dim``
              Dk, ``linear_value_head_dim`` Dv and ``linear_conv_kernel_dim`` K.
        batch: Number of sequences.
        length: Positions of each.
        bytes_per_value: Of keys, values and the convolution's inputs.
        state_bytes_per_value: Of the recurrent state.

    Returns:
        The sum of equation (24.14) over the layers, for all sequences.

    Raises:
        ValueError: another kind of layer; the message shows it.
    """
    ### BEGIN SOLUTION
    sizes = (_layer_bytes(config, kind, length, bytes_per_value, state_bytes_per_value) for kind in config.layer_types)
    return batch * sum(sizes)
    ### END SOLUTION


# ---- 24.9 ------------------------------------------------------------------------------------------------------------


def crossing_length(config, bytes_per_value=2, state_bytes_per_value=4) -> int:
    """The smallest length at which one full layer holds more bytes than one linear layer. (Exercise)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        config: Sizes by attribute, as for ``hybrid_cache_bytes``; ``layer_types`` is not read.
        bytes_per_value: Of keys, values and the convolution's inputs.
        state_bytes_per_value: Of the recurrent state.

    Returns:
        A number of positions: 1049 for Qwen3-Next.
    """
    ### BEGIN SOLUTION
    full, linear = (
        _layer_bytes(config, kind, 1, bytes_per_value, state_bytes_per_value)
        for kind in ("full_attention", "linear_attention")
    )
    return int(linear // full) + 1
    ### END SOLUTION


# ---- 24.10 -----------------------------------------------------------------------------------------------------------


### BEGIN SOLUTION
class _ScanStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, log_decay, group):  # type: ignore[override]
        rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
        before = torch.zeros_like(state, memory_format=torch.contiguous_format)
        if rank > 0:
            dist.recv(before, group=group, group_src=rank - 1)
        fade = torch.exp(log_decay.to(state.dtype))
        fade = fade[..., None] if fade.ndim == 3 else fade[..., None, None]
        if rank < last:
            dist.send((fade * before + state).contiguous(), group=group, group_dst=rank + 1)
        ctx.group, ctx.decay_shape, ctx.decay_dtype = group, log_decay.shape, log_decay.dtype
        ctx.save_for_backward(before, fade)
        return before

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):
        before, fade = ctx.saved_tensors
        rank, last = dist.get_rank(ctx.group), dist.get_world_size(ctx.group) - 1
        after = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        if rank < last:
            dist.recv(after, group=ctx.group, group_src=rank + 1)
        if rank > 0:
            dist.send((grad + fade * after).contiguous(), group=ctx.group, group_dst=rank - 1)
        faded = (after * fade * before).sum(-1)
        return after, (faded if len(ctx.decay_shape) == 3 else faded.sum(-1)).to(ctx.decay_dtype), None


### END SOLUTION


def scan_states(
    state: Float[Tensor, "b h dk dv"],
    log_decay: Float[Tensor, "b h"] | Float[Tensor, "b h dk"],
    group: dist.ProcessGroup | None = None,
) -> Float[Tensor, "b h dk dv"]:
    """The state before this rank's first position, from what each rank's positions build from zero. (Exercise)

    Size: 35 minutes, difficulty 4, core.

    Args:
        state: What this rank's positions build from a state of zeros.
        log_decay: Sum of their g, one a head or one for each feature of the key.
        group: The R ranks, whose peers are counted within the group; None means all ranks.

    Returns:
        Zeros on rank 0. On rank r + 1, the state before rank r times ``exp(log_decay)`` of rank r, plus ``state`` of
        rank r. Differentiable in ``state`` and ``log_decay``; every rank calls backward.

    Raises:
        RuntimeError: a second derivative is asked for (``first_derivative_only`` raises it).
    Cost: forward, one message of one state to the next rank, and none from the last. Backward, one of the same size to
        the previous rank, and none from the first. No collective.
    Source: equation (24.16); LASP (arXiv:2404.02882).
    """
    ### BEGIN SOLUTION
    return _ScanStates.apply(state, log_decay, group)
    ### END SOLUTION


# ---- 24.11 -----------------------------------------------------------------------------------------------------------


def sequence_parallel_linear_attention(
    q: Float[Tensor, "b t_r h dk"], k: Float[Tensor, "b t_r h dk"], v: Float[Tensor, "b t_r h dv"],
    g: Float[Tensor, "b t_r h"] | Float[Tensor, "b t_r h dk"] | None = None, scale: float | None = None,
    group: dist.ProcessGroup | None = None, chunk_size: int = 64
) -> Float[Tensor, "b t_r h dv"]:  # fmt: skip
    """Linear attention over a sequence whose parts are on R ranks. (Exercise)

    Size: 25 minutes, difficulty 3, core.

    Args:
        q, k, v, g: As for ``linear_attention_chunked``, at this rank's positions r T/R to (r + 1) T/R - 1.
        scale, chunk_size: As there.
        group: The R ranks; None means all ranks.

    Returns:
        The output at this rank's positions, as if one process had the whole sequence; gradients of q, k, v and g, too.

    Cost: the messages of ``scan_states``, forward and backward. A rank does its own positions' work before it waits.
    Source: equation (24.17); LASP (arXiv:2404.02882).
    """
    ### BEGIN SOLUTION
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    out, state = linear_attention_chunked(wide, k, v, g, scale, None, chunk_size)
    g = wide.new_zeros(q.shape[:3]) if g is None else g.to(wide.dtype)
    before = scan_states(state, g.sum(1), group)
    faded = wide * torch.exp(g.cumsum(1) if g.ndim == 4 else g.cumsum(1)[..., None])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (out + scale * torch.einsum("bthk,bhkv->bthv", faded, before)).to(q.dtype)
    ### END SOLUTION


# ---- 24.12 -----------------------------------------------------------------------------------------------------------


@triton.jit
def chunk_linear_attention_kernel(
    q, k, v, g, state, o, T, H, Dk, Dv, scale,
    qb, qt, qh, qd, kb, kt, kh, kd, vb, vt, vh, vd, gb, gt, gh,
    DECAYS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Program (i, j) walks the chunks of head ``i % H`` of sequence ``i // H``, for SLICE features from j SLICE.

    - Number (b, t, h, d) of q is ``b * qb + t * qt + h * qh + d * qd`` elements after the pointer; k, v and, if
      DECAYS, g likewise.
    - o ``[B, T, H, Dv]`` and the float32 state ``[B, H, Dk, Dv]`` are contiguous. A program reads its part of the state
      first, and writes it at the end.
    - CHUNK is the number of positions of a chunk. WIDTH, a power of two, holds Dk.
    """
    ### BEGIN SOLUTION
    head, rows, dims = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    cols, b, h = tl.program_id(1) * SLICE + tl.arange(0, SLICE), head // H, head % H
    home = state + (head * Dk + dims[:, None]) * Dv + cols[None, :]
    held = (dims[:, None] < Dk) & (cols[None, :] < Dv)
    memory = tl.load(home, mask=held, other=0.0)
    earlier = rows[:, None] >= rows[None, :]
    for start in range(0, T, CHUNK):
        at = (start + rows).to(tl.int64)
        there, written = (at[:, None] < T) & (dims[None, :] < Dk), (at[:, None] < T) & (cols[None, :] < Dv)
        query = tl.load(q + b * qb + h * qh + at[:, None] * qt + dims[None, :] * qd, mask=there, other=0.0)
        key = tl.load(k + b * kb + h * kh + at[:, None] * kt + dims[None, :] * kd, mask=there, other=0.0)
        value = tl.load(v + b * vb + h * vh + at[:, None] * vt + cols[None, :] * vd, mask=written, other=0.0)
        scores = tl.where(earlier, tl.dot(query, tl.trans(key), input_precision="ieee") * scale, 0.0)
        high = memory.to(
            query.dtype
        )  # the state's product keeps float32's digits: what a narrow dtype loses is a second term
        out = tl.dot(query, high, input_precision="ieee")
        if query.dtype != tl.float32:
            out = tl.dot(query, (memory - high.to(tl.float32)).to(query.dtype), out, input_precision="ieee")
        if DECAYS:
            gate = tl.load(g + b * gb + h * gh + at * gt, mask=at < T, other=0.0).to(tl.float32)
            c, end = tl.cumsum(gate, 0), tl.sum(gate, 0)
            scores *= tl.exp(tl.where(earlier, c[:, None] - c[None, :], 0.0))
            out *= tl.exp(c)[:, None]
            memory *= tl.exp(end)
            faded = (value.to(tl.float32) * tl.exp(end - c)[:, None]).to(value.dtype)
        else:
            faded = value
        out = tl.dot(scores.to(value.dtype), value, out * scale, input_precision="ieee")
        memory = tl.dot(tl.trans(key), faded, memory, input_precision="ieee")
        tl.store(o + ((b * T + at[:, None]) * H + h) * Dv + cols[None, :], out.to(o.dtype.element_ty), mask=written)
    tl.store(home, memory, mask=held)
    ### END SOLUTION


def chunk_linear_attention(
    q: Float[Tensor, "b t h dk"], k: Float[Tensor, "b t h dk"], v: Float[Tensor, "b t h dv"],
    g: Float[Tensor, "b t h"] | None = None, scale: float | None = None,
    initial_state: Float[Tensor, "b h dk dv"] | None = None, chunk_size: int = 64
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:  # fmt: skip
    """The chunked form in one kernel, in which a program keeps its part of the state on the chip. (Exercise)

    Size: 60 minutes, difficulty 5, stretch.

    Args:
        q, k, v: float32, float16 or, on a GPU, bfloat16; any strides; Dk and Dv up to 256.
        g: One decay a head, in any floating-point dtype and with any strides; None is no decay.
        scale, initial_state: As for ``linear_attention_recurrent``.
        chunk_size: A power of two of at least 16.

    Returns:
        New tensors: the outputs in the dtype of ``q``, contiguous, and the last state in float32. Sums, decays and the
        state are float32, and products of float32 are true float32 (no TF32). Forward only: there is no gradient.

    Raises:
        ValueError: ``state_tiles`` raises it, for shapes or dtypes that do not fit, a g for each feature or another
            chunk size.
    Cost: one launch, no product by PyTorch, no copy of q, k, v or g. Program (i, j) is described at the kernel.
    """
    tiles = state_tiles(q, k, v, g, initial_state, chunk_size)
    ### BEGIN SOLUTION
    (b, t, h, dk), dv = q.shape, v.shape[-1]
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    state = torch.zeros(b, h, dk, dv, dtype=torch.float32, device=q.device)
    if initial_state is not None:
        state.copy_(initial_state.detach())
    if state.numel():
        chunk_linear_attention_kernel[(b * h, triton.cdiv(dv, tiles.slice))](
            q, k, v, q if g is None else g, state, out, t, h, dk, dv, dk**-0.5 if scale is None else scale,
            *q.stride(), *k.stride(), *v.stride(), *((0, 0, 0) if g is None else g.stride()),
            DECAYS=g is not None, CHUNK=tiles.chunk, WIDTH=tiles.width, SLICE=tiles.slice,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out, state
    ### END SOLUTION
