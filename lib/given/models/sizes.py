"""The five model sizes that chapters 8, 10 and 12 measure: GPT-2's architecture,
from 100 million weights to 2.7 billion.

The feed-forward width is four times the model width in all of them.
Source: Stanford's CS336, spring 2025, assignment 2.
"""

from lib.given.models.gpt2 import GPT2Config

VOCAB_SIZE, CONTEXT_LEN = 10_000, 1024


def _size(dim: int, n_layers: int, n_heads: int) -> GPT2Config:
    return GPT2Config(vocab_size=VOCAB_SIZE, context_len=CONTEXT_LEN, dim=dim, n_layers=n_layers, n_heads=n_heads)


MODEL_SIZES: dict[str, GPT2Config] = {
    "small": _size(768, 12, 12),
    "medium": _size(1024, 24, 16),
    "large": _size(1280, 36, 20),
    "xl": _size(1600, 48, 25),
    "2.7B": _size(2560, 32, 32),
}
