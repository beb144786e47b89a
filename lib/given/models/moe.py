"""Sizes of two mixtures of experts that were released with their weights: Mixtral 8x7B and DeepSeek-V3."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes of a transformer whose feed-forward layers are mixtures of experts.

    Attributes:
        vocab_size: Number of tokens V; the embedding and the output layer have a row each for every token.
        dim: Model width C.
        n_layers: Number of blocks L, the dense ones included.
        hidden_dim: Width F of one expert, a SwiGLU without biases.
        n_experts: Experts E in a block, of which the router chooses.
        k: Experts that each token is sent to.
        attention_parameters: Weights of one block's attention, its inner norms included.
        n_shared: Experts that every token passes, beside the chosen ones.
        n_dense: Blocks at the start whose feed-forward layer is a single SwiGLU.
        dense_hidden_dim: Width of that SwiGLU.
        router_bias: Whether each expert has a bias that balances its load (arXiv:2408.15664).
    """

    vocab_size: int
    dim: int
    n_layers: int
    hidden_dim: int
    n_experts: int
    k: int
    attention_parameters: int
    n_shared: int = 0
    n_dense: int = 0
    dense_hidden_dim: int = 0
    router_bias: bool = False


def grouped_query_parameters(dim: int, n_heads: int, n_kv_heads: int) -> int:
    """Weights of attention with grouped queries: chapter 3's four projections."""
    return 2 * dim * dim + 2 * dim * dim * n_kv_heads // n_heads


def latent_attention_parameters(
    dim: int, n_heads: int, q_rank: int, kv_rank: int, nope_dim: int, rope_dim: int, v_dim: int
) -> int:
    """Weights of DeepSeek's latent attention: queries, keys and values are projected down, normalised and projected up.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1, equations (9) to (19).
    """
    queries = dim * q_rank + q_rank + q_rank * n_heads * (nope_dim + rope_dim)
    keys_values = dim * (kv_rank + rope_dim) + kv_rank + kv_rank * n_heads * (nope_dim + v_dim)
    return queries + keys_values + n_heads * v_dim * dim


MIXTRAL_8X7B = MoEConfig(
    vocab_size=32_000,
    dim=4096,
    n_layers=32,
    hidden_dim=14_336,
    n_experts=8,
    k=2,
    attention_parameters=grouped_query_parameters(4096, 32, 8),
)
DEEPSEEK_V3 = MoEConfig(
    vocab_size=129_280,
    dim=7168,
    n_layers=61,
    hidden_dim=2048,
    n_experts=256,
    k=8,
    attention_parameters=latent_attention_parameters(7168, 128, 1536, 512, 128, 64, 128),
    n_shared=1,
    n_dense=3,
    dense_hidden_dim=18_432,
    router_bias=True,
)
