"""Llama 2: a model that writes text, from its norm to the next token."""

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

from lib.given.models.llama import LLAMA_2_7B as LLAMA_2_7B
from lib.given.models.llama import LLAMA_2_13B as LLAMA_2_13B
from lib.given.models.llama import LLAMA_2_70B as LLAMA_2_70B
from lib.given.models.llama import TINY as TINY
from lib.given.models.llama import LlamaConfig, hf_tensors
from solutions.attention import KVCache, MultiHeadAttention, causal_mask
from solutions.rope import half_to_interleaved, precompute_rope


class RMSNorm(nn.Module):
    """Scale each vector to a root mean square of 1, then multiply each feature by a weight. (Exercise)

    Size: 10 minutes, difficulty 1, core.

    Args:
        dim: Width C of the vectors.
        eps: Added to the mean square, under the root.

    Attributes:
        weight: Parameter ``[C]``, initially ones.

    Source: Zhang and Sennrich (arXiv:1910.07467), equation (4).
    Convention: everything is computed in float32, including the product with the weight, and cast once at the end.
        Meta's code casts before that product.
    """

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        ### BEGIN SOLUTION
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """Normalise the last dimension.

        Args:
            x: ``[..., C]`` of any floating dtype; not changed.

        Returns:
            A tensor of the shape and dtype of ``x``; the statistics are computed in float32.
        """
        ### BEGIN SOLUTION
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed).to(x.dtype)
        ### END SOLUTION


def swiglu_hidden_dim(dim: int, multiple_of: int = 256, multiplier: float = 1.0) -> int:
    """Width of a SwiGLU that has as many weights as a plain feed-forward layer of width 4 x ``dim``. (Exercise)

    Size: 10 minutes, difficulty 1, warm-up.

    Args:
        dim: Model width C.
        multiple_of: The width is rounded up to a multiple of this.
        multiplier: Widens the layer; 1.3 in Llama 2 70B.

    Returns:
        The width F.
        Take two thirds of 4 x ``dim`` and drop the fraction; multiply by ``multiplier`` and drop the fraction; round up
        to a multiple of ``multiple_of``.
        A ``dim`` of 4096 gives 11008.

    Source: Shazeer (arXiv:2002.05202), section 2; the rounding is that of Meta's ``FeedForward``.
    """
    ### BEGIN SOLUTION
    width = int(multiplier * (2 * 4 * dim // 3))
    return (width + multiple_of - 1) // multiple_of * multiple_of
    ### END SOLUTION


class SwiGLU(nn.Module):
    """A feed-forward layer with a gate: ``w2(silu(w1 x) * w3 x)``. (Exercise)

    Size: 10 minutes, difficulty 1, core.

    Args:
        dim: Model width C.
        hidden_dim: Width F inside the layer, used exactly as given.

    Attributes:
        w1: ``nn.Linear`` from C to F, without bias: the gate.
        w2: ``nn.Linear`` from F to C, without bias: projects back.
        w3: ``nn.Linear`` from C to F, without bias: makes the values that ``w1`` gates.

    Source: Shazeer (arXiv:2002.05202), equation (6).
    Convention: the names are Meta's.
        Transformers calls w1, w3, w2 ``gate_proj``, ``up_proj``, ``down_proj``.
    """

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        ### BEGIN SOLUTION
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """``w2(silu(w1 x) * w3 x)``."""
        ### BEGIN SOLUTION
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        ### END SOLUTION


class TransformerBlock(nn.Module):
    """Attention, then a feed-forward layer; each reads its input normalised and adds its output to it. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        config: The block uses its ``dim``, ``n_heads``, ``n_kv_heads``, ``hidden_dim`` and ``norm_eps``.

    Attributes:
        attention: Chapter 3's ``MultiHeadAttention``.
        feed_forward: A ``SwiGLU``.
        attention_norm: ``RMSNorm`` before ``attention``.
        ffn_norm: ``RMSNorm`` before ``feed_forward``.

    Source: Llama (arXiv:2302.13971), section 2.2.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        ### BEGIN SOLUTION
        self.attention = MultiHeadAttention(config.dim, config.n_heads, config.n_kv_heads)
        self.feed_forward = SwiGLU(config.dim, config.hidden_dim)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        ### END SOLUTION

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        rope: Complex[Tensor, "t half_d"],
        mask: Bool[Tensor, "t s"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "b t c"]:
        """``x`` plus the outputs of attention and feed-forward; ``x`` itself is not changed.

        Attention is called as ``attention(x, rope, mask, cache)``.
        """
        ### BEGIN SOLUTION
        x = x + self.attention(self.attention_norm(x), rope, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))
        ### END SOLUTION


class Llama(nn.Module):
    """The whole model: takes tokens, returns scores of the next token. (Exercise)

    Size: 35 minutes, difficulty 3, core.

    Args:
        config: The model's sizes.

    Attributes:
        config: The argument.
        tok_embeddings: ``nn.Embedding`` V x C.
        layers: ``nn.ModuleList`` of L ``TransformerBlock``.
        norm: ``RMSNorm`` after the last block.
        output: ``nn.Linear`` from C to V, without bias; its weight is its own, not the embedding's.
        rope: Rotations of ``context_len`` positions, complex64.
            A plain attribute, neither parameter nor buffer: as a buffer it would appear in the state dict under a name
            that Meta's files lack, and ``model.to(torch.bfloat16)`` would drop its imaginary part.
            ``forward`` moves it to the device of the tokens.

    Source: Llama 2 (arXiv:2307.09288), section 2.2; the names are those of Meta's weights.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        ### BEGIN SOLUTION
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.rope = precompute_rope(config.head_dim, config.context_len, config.rope_theta, device="cpu")
        ### END SOLUTION

    def make_cache(self, batch: int, max_len: int) -> list[KVCache]:
        """One empty cache per layer, each ``[B, G, max_len, D]``, in the dtype and on the device of the weights."""
        ### BEGIN SOLUTION
        weight, config = self.tok_embeddings.weight, self.config
        shape = (batch, config.n_kv_heads, max_len, config.head_dim)
        return [KVCache(*shape, dtype=weight.dtype, device=weight.device) for _ in self.layers]
        ### END SOLUTION

    def forward(self, tokens: Int[Tensor, "b t"], cache: list[KVCache] | None = None) -> Float[Tensor, "b t v"]:
        """For each token, the scores of the token that follows it.

        Args:
            tokens: ``[B, T]``; without a cache they are at positions 0 to T - 1.
            cache: From ``make_cache``.
                It holds the earlier positions, and the call appends the new ones.
                The first new token is at the position that equals the cache's length.

        Returns:
            Logits ``[B, T, V]``, float32 whatever the dtype of the weights, on the device of ``tokens``.
            Every tensor made on the way is on that device too, whatever PyTorch's default device is.

        Raises:
            ValueError: the cache's length + T is more than ``context_len``; the message names that sum and
                ``context_len``.
        """
        ### BEGIN SOLUTION
        start = cache[0].length if cache else 0
        end = start + tokens.shape[1]
        if end > self.config.context_len:
            raise ValueError(f"{end} positions ({start} cached) do not fit: context_len is {self.config.context_len}")
        if not tokens.is_meta:  # moving the table to meta would lose its numbers for good
            self.rope = self.rope.to(tokens.device)
        rope = self.rope[start:end].to(tokens.device)
        mask = causal_mask(tokens.shape[1], end, tokens.device)
        x = self.tok_embeddings(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, mask, cache[i] if cache else None)
        return self.output(self.norm(x)).float()
        ### END SOLUTION


def count_parameters(config: LlamaConfig) -> int:
    """Number of weights of the model, by arithmetic. (Exercise)

    Size: 15 minutes, difficulty 2, warm-up.

    Args:
        config: Sizes of the model; no model is built, so 70B costs nothing.

    Returns:
        Exactly the number of values in the state dict.
    """
    ### BEGIN SOLUTION
    C = config.dim
    attention = 2 * C * C + 2 * C * config.n_kv_heads * config.head_dim
    block = attention + 3 * C * config.hidden_dim + 2 * C
    return 2 * config.vocab_size * C + config.n_layers * block + C
    ### END SOLUTION


def inference_memory_gb(n_parameters: float, bits: int = 16, overhead: float = 1.2) -> float:
    """Rule of thumb for the memory that a model needs to run. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        n_parameters: Number of weights.
        bits: Bits Q of each stored weight: 32, 16, 8 or 4.
        overhead: Factor for everything besides the weights.

    Returns:
        Gigabytes (1e9 bytes): 33.6 for 7e9 weights of 32 bits.
    """
    ### BEGIN SOLUTION
    return n_parameters * bits / 8 * overhead / 1e9
    ### END SOLUTION


def kv_cache_bytes(config: LlamaConfig, batch: int, length: int, bytes_per_value: int = 2) -> int:
    """Bytes of the cached keys and values of a batch of sequences. (Exercise)

    Size: 10 minutes, difficulty 1, warm-up.

    Args:
        config: Sizes of the model; keys and values have ``n_kv_heads`` heads.
        batch: Number of sequences B.
        length: Positions of each sequence.
        bytes_per_value: 2 for float16 and bfloat16.

    Returns:
        Bytes over all layers: 524,288 for one token of Llama 2 7B.
    """
    ### BEGIN SOLUTION
    values_per_token = 2 * config.n_layers * config.n_kv_heads * config.head_dim
    return values_per_token * batch * length * bytes_per_value
    ### END SOLUTION


def convert_hf_state_dict(state_dict: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Rename Transformers' weights to Meta's names and reorder their rotary pairs. (Exercise)

    Size: 30 minutes, difficulty 3, stretch.

    Args:
        state_dict: State dict of a ``LlamaForCausalLM``; left unchanged.
            ``hf_tensors(config)`` maps each of its names to Meta's name and the shape.
        config: The sizes that the weights should have.

    Returns:
        A state dict for ``Llama(config).load_state_dict``, in the dtypes given.
        The rows of the query and key projections are reordered with ``half_to_interleaved`` (chapter 2), each by its
        own number of heads.

    Raises:
        ValueError: a name is missing, a name is extra, or a shape is wrong; one message lists all of them, a wrong
            shape with the shape found and the shape expected.
            Old checkpoints contain ``….rotary_emb.inv_freq``: drop those names without an error.
    """
    ### BEGIN SOLUTION
    expected = hf_tensors(config)
    found = {name: tensor for name, tensor in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    problems = [f"missing: {name}" for name in expected if name not in found]
    problems += [f"extra: {name}" for name in found if name not in expected]
    for name, (_, shape) in expected.items():
        if name in found and tuple(found[name].shape) != shape:
            problems.append(f"wrong shape: {name} is {list(found[name].shape)}, expected {list(shape)}")
    if problems:
        raise ValueError(f"{len(problems)} problems with these weights:\n" + "\n".join(problems))
    n_heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}
    converted = {}
    for name, (metas_name, _) in expected.items():
        heads = n_heads.get(name.split(".")[-2])
        converted[metas_name] = half_to_interleaved(found[name], heads) if heads else found[name]
    return converted
    ### END SOLUTION


def sample_next(
    logits: Float[Tensor, "b v"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " b"]:
    """Draw the next token of each sequence. (Exercise)

    Size: 25 minutes, difficulty 3, core.

    Args:
        logits: ``[B, V]``; left unchanged.
        temperature: First, the logits are divided by it.
            0 means the likeliest token, whatever the other arguments are.
        top_k: Second, only the k likeliest tokens remain (all of them if V is less than k).
            Ties with the k-th may remain too.
        top_p: Third, only the likeliest tokens remain whose probabilities (renormalised after the second step) sum to
            at least p, and as few as possible: the token that crosses p remains, so there is always at least one.
        generator: Source of the random numbers.

    Returns:
        Token ids ``[B]``, int64.

    Raises:
        ValueError: ``temperature`` below 0, ``top_k`` below 1, or ``top_p`` not in (0, 1]; the message names the value.

    Source: nucleus sampling, Holtzman and others (arXiv:1904.09751), section 3.1.
    """
    ### BEGIN SOLUTION
    if temperature < 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be 1 or more, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if temperature == 0:
        return logits.argmax(-1)
    ordered, tokens = (logits.float() / temperature).sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    if top_k is not None:
        probabilities[..., top_k:] = 0.0
        probabilities /= probabilities.sum(-1, keepdim=True)
    if top_p is not None:
        before = probabilities.cumsum(-1) - probabilities
        probabilities[..., 1:][before[..., 1:] >= top_p] = 0.0
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return tokens.gather(-1, drawn).squeeze(-1)
    ### END SOLUTION


@torch.no_grad()
def generate(
    model: Llama,
    tokens: Int[Tensor, "b t"],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Int[Tensor, " b"]]:
    """Continue the prompts, one token of every sequence at a time. (Exercise)

    Size: 30 minutes, difficulty 3, core.

    The whole prompt passes through the model once and fills a cache; after that, each step passes only the newest
    tokens.

    Args:
        model: ``Llama``, or anything with ``make_cache(batch, max_len)`` and ``model(tokens, cache)``.
        tokens: Prompts ``[B, T]`` of equal length.
        max_new_tokens: Number of steps at most; the model runs once per step.
        temperature: Passed to ``sample_next``.
        top_k: Passed to ``sample_next``.
        top_p: Passed to ``sample_next``.
        eos_id: End token.
            A sequence that has produced it repeats it from then on, and when all sequences have produced it, the
            iterator ends.
            An end token in the prompt has no effect.
        generator: Passed to ``sample_next``.

    Yields:
        ``[B]``, the newest token of each sequence, as soon as it is known, on the device of ``tokens``.
        No gradients are recorded.
    """
    ### BEGIN SOLUTION
    batch, prompt_len = tokens.shape
    cache = model.make_cache(batch, prompt_len + max_new_tokens)
    done = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    for _ in range(max_new_tokens):
        logits = model(tokens, cache)[:, -1]
        new = sample_next(logits, temperature, top_k, top_p, generator)
        if eos_id is not None:
            new = new.masked_fill(done, eos_id)
            done |= new == eos_id
        yield new
        if done.all():
            return
        tokens = new[:, None]
    ### END SOLUTION
