"""Llama 2: a model that writes, from a norm to the next token."""

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

from lib.given.models.llama import LLAMA_2_7B as LLAMA_2_7B
from lib.given.models.llama import LLAMA_2_13B as LLAMA_2_13B
from lib.given.models.llama import LLAMA_2_70B as LLAMA_2_70B
from lib.given.models.llama import TINY as TINY
from lib.given.models.llama import LlamaConfig, hf_tensors
from lib.attention import KVCache, MultiHeadAttention, causal_mask
from lib.rope import half_to_interleaved, precompute_rope


class RMSNorm(nn.Module):
    """Scale each vector to a root mean square of one, then each feature by a weight. (Exercise 4.1)

    Args:
        dim: Width C of the vectors.
        eps: Added to the mean square, under the root.

    Attributes:
        weight: Parameter ``[C]``, ones at first.

    Source: Zhang and Sennrich (arXiv:1910.07467), equation (4).
    Convention: everything in float32, the weight's product too, and one cast at the end. Meta's code casts before that product.
    """

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        raise NotImplementedError("Exercise 4.1: write RMSNorm.__init__")

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """Normalise the last dimension.

        Args:
            x: ``[..., C]`` of any floating dtype.

        Returns:
            The shape and dtype of ``x``; the statistics are in float32.
        """
        raise NotImplementedError("Exercise 4.1: write RMSNorm.forward")


def swiglu_hidden_dim(dim: int, multiple_of: int = 256, multiplier: float = 1.0) -> int:
    """Width of a SwiGLU with as many weights as a plain feed-forward of 4 x ``dim``. (Exercise 4.2)

    Args:
        dim: Model width C.
        multiple_of: The width is rounded up to a multiple of this.
        multiplier: Llama 2 70B makes its feed-forward wider by 1.3.

    Returns:
        The width F: 4 x ``dim``, two thirds of it (fractions dropped), ``multiplier`` times that (fractions dropped), rounded up.
        4096 gives 11008.

    Source: Shazeer (arXiv:2002.05202), section 2; the rounding is that of Meta's ``FeedForward``.
    """
    raise NotImplementedError("Exercise 4.2: write swiglu_hidden_dim")


class SwiGLU(nn.Module):
    """A feed-forward layer whose first projection has a gate beside it. (Exercise 4.3)

    Args:
        dim: Model width C.
        hidden_dim: Width F between the layers, taken as it is.

    Attributes:
        w1: ``nn.Linear`` C to F, no bias: the gate; ``w3``, C to F, is what it gates; ``w2``, F to C, leads back.

    Source: Shazeer (arXiv:2002.05202), equation (6).
    Convention: the names are Meta's. Transformers calls w1, w3, w2 ``gate_proj``, ``up_proj``, ``down_proj``.
    """

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        raise NotImplementedError("Exercise 4.3: write SwiGLU.__init__")

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """``w2(silu(w1 x) * w3 x)``."""
        raise NotImplementedError("Exercise 4.3: write SwiGLU.forward")


class TransformerBlock(nn.Module):
    """Attention, then a feed-forward layer, each normalised before and added to what came in. (Exercise 4.4)

    Args:
        config: Its ``dim``, ``n_heads``, ``n_kv_heads``, ``hidden_dim`` and ``norm_eps`` are used.

    Attributes:
        attention: ``MultiHeadAttention`` of chapter 3; ``feed_forward``: ``SwiGLU``; ``attention_norm`` and ``ffn_norm``:
            ``RMSNorm``.

    Source: Llama (arXiv:2302.13971), section 2.2.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        raise NotImplementedError("Exercise 4.4: write TransformerBlock.__init__")

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        rope: Complex[Tensor, "t half_d"],
        mask: Bool[Tensor, "t s"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "b t c"]:
        """One block: ``x`` with what attention and feed-forward add to it; the call is ``attention(x, rope, mask, cache)``."""
        raise NotImplementedError("Exercise 4.4: write TransformerBlock.forward")


class Llama(nn.Module):
    """Tokens in, scores of the next token out. (Exercise 4.5)

    Args:
        config: Its sizes.

    Attributes:
        config: The same.
        tok_embeddings: ``nn.Embedding`` V x C.
        layers: ``nn.ModuleList`` of L ``TransformerBlock``.
        norm: ``RMSNorm``, after the last block.
        output: ``nn.Linear`` C to V, no bias, with a weight of its own.
        rope: Rotations of ``context_len`` positions, complex64: a plain attribute, no parameter and no buffer. (In a state dict it would be a
            name that Meta's files lack, and ``model.to(torch.bfloat16)`` would cut off the imaginary part of a buffer.) ``forward`` takes it to the
            device of the tokens.

    Source: Llama 2 (arXiv:2307.09288), section 2.2; the names are those of Meta's weights.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        raise NotImplementedError("Exercise 4.5: write Llama.__init__")

    def make_cache(self, batch: int, max_len: int) -> list[KVCache]:
        """An empty cache for each layer, in the dtype and on the device of the weights; ``[B, G, max_len, D]`` each."""
        raise NotImplementedError("Exercise 4.5: write Llama.make_cache")

    def forward(self, tokens: Int[Tensor, "b t"], cache: list[KVCache] | None = None) -> Float[Tensor, "b t v"]:
        """Scores of the token after each of ``tokens``.

        Args:
            tokens: ``[B, T]``; without a cache, positions 0 .. T - 1.
            cache: From ``make_cache``: holds the positions before these, and then these too. The first token stands at the cache's length.

        Returns:
            Logits ``[B, T, V]``, float32 whatever the weights' dtype, on the device of ``tokens``. So is all that it makes on the way,
            whatever PyTorch's default device is.

        Raises:
            ValueError: the cache's length + T is more than ``context_len``; the message names that sum and ``context_len``.
        """
        raise NotImplementedError("Exercise 4.5: write Llama.forward")


def count_parameters(config: LlamaConfig) -> int:
    """How many weights the model has, by arithmetic. (Exercise 4.6)

    Args:
        config: Any sizes; no model is built, so 70B costs nothing.

    Returns:
        Exactly the number of values in the state dict.
    """
    raise NotImplementedError("Exercise 4.6: write count_parameters")


def inference_memory_gb(n_parameters: float, bits: int = 16, overhead: float = 1.2) -> float:
    """Rule of thumb for the memory in which a model can answer. (Exercise 4.7)

    Args:
        n_parameters: Weights of the model.
        bits: Q, of each weight as it is kept: 32, 16, 8, 4.
        overhead: A factor for all that is not weights.

    Returns:
        Gigabytes (1e9 bytes): 33.6 for 7e9 weights of 32 bits.
    """
    raise NotImplementedError("Exercise 4.7: write inference_memory_gb")


def kv_cache_bytes(config: LlamaConfig, batch: int, length: int, bytes_per_value: int = 2) -> int:
    """Bytes of keys and values that a batch of sequences keeps. (Exercise 4.8)

    Args:
        config: Its layers and heads; mind the grouped ones.
        batch: Sequences B.
        length: Positions of each.
        bytes_per_value: 2 for float16 and bfloat16.

    Returns:
        Bytes over all layers: 524,288 for one token of Llama 2 7B.
    """
    raise NotImplementedError("Exercise 4.8: write kv_cache_bytes")


def convert_hf_state_dict(state_dict: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Transformers' weights under Meta's names, rotary pairs as neighbours. (Exercise 4.9)

    Args:
        state_dict: Of a ``LlamaForCausalLM``; left unchanged. ``hf_tensors(config)`` gives, for each name in it, Meta's name and the shape.
        config: The sizes that it should have.

    Returns:
        What ``Llama(config).load_state_dict`` takes, in the dtypes given. The rows of query and key projections are reordered with
        ``half_to_interleaved`` (chapter 2), each by its own number of heads.

    Raises:
        ValueError: one message that lists every missing name, every extra name and every wrong shape (the one found and the one
            expected). Old checkpoints hold ``….rotary_emb.inv_freq``: those alone are left out without a word.
    """
    raise NotImplementedError("Exercise 4.9: write convert_hf_state_dict")


def sample_next(
    logits: Float[Tensor, "b v"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " b"]:
    """Draw the next token of each sequence. (Exercise 4.10)

    Args:
        logits: ``[B, V]``; left unchanged.
        temperature: Divides the logits first; 0 takes the likeliest token, whatever the rest says.
        top_k: Then only the k likeliest may be drawn (all of them, if V is less). Ties with the k-th may stay.
        top_p: Then only the likeliest whose probabilities, after the two steps above, sum to p: as few as reach it, so the one that crosses
            p may still be drawn, and one is always left.
        generator: Where the chance comes from.

    Returns:
        Token ids ``[B]``, int64.

    Raises:
        ValueError: ``temperature`` below 0, ``top_k`` below 1, or ``top_p`` not in (0, 1]; the message names the value.

    Source: nucleus sampling, Holtzman and others (arXiv:1904.09751), section 3.1.
    """
    raise NotImplementedError("Exercise 4.10: write sample_next")


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
    """Go on writing, one token of every sequence at a time. (Exercise 4.11)

    The prompt passes through the model once, into a cache; then each step passes only the newest tokens.

    Args:
        model: With ``make_cache(batch, max_len)`` and ``model(tokens, cache)``, as ``Llama``.
        tokens: Prompts ``[B, T]`` of equal length.
        max_new_tokens: Most steps; the model runs once for each.
        temperature: As ``top_k``, ``top_p`` and ``generator``: for ``sample_next``.
        eos_id: A sequence that has produced this token repeats it from then on; when all have, nothing more comes. One in the prompt means nothing.

    Yields:
        ``[B]``, the newest token of each sequence, as soon as it is known, on the device of ``tokens``. No gradients are kept.
    """
    raise NotImplementedError("Exercise 4.11: write generate")
