"""GPT-2: a stack of attention and feed-forward blocks that predicts the next token."""

import math
import os

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lib.given.models.gpt2 import (  # noqa: F401
    GPT2_LARGE,
    GPT2_MEDIUM,
    GPT2_SMALL,
    GPT2_XL,
    TINY,
    GPT2Config,
    find_checkpoint,
    read_config,
    read_tensors,
)
from lib.attention import causal_mask, merge_heads, scaled_dot_product_attention, split_heads


def layer_norm(
    x: Float[Tensor, "... c"], weight: Float[Tensor, " c"], bias: Float[Tensor, " c"], eps: float = 1e-5
) -> Float[Tensor, "... c"]:
    """Normalise features to mean 0 and variance 1, then apply a gain and a bias to each. (Exercise 6.1)

    Size: 15 minutes, difficulty 2, core.

    Args:
        x: ``[..., C]``, any floating dtype; each vector of C features is normalised by itself.
        weight: Gains ``[C]``.
        bias: Biases ``[C]``.
        eps: Added to the variance, under the root.

    Returns:
        A tensor of the shape and dtype of ``x``; mean and variance are computed in float32 at least (float64 stays
        float64).

    Source: Ba and others (arXiv:1607.06450), equations (3) and (5).
    Convention: the variance divides by C, not by C - 1.
        RMSNorm (chapter 4) has neither a mean nor a bias.
    """
    raise NotImplementedError("Exercise 6.1: write layer_norm")


class LayerNorm(nn.LayerNorm):
    """A module that calls ``layer_norm`` with its ``weight`` (initially ones), its ``bias`` (zeros) and its ``eps``."""

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        return layer_norm(x, self.weight, self.bias, self.eps)


def gelu_tanh(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The Gaussian error linear unit, by its tanh formula. (Exercise 6.2)

    Size: 10 minutes, difficulty 2, core.

    Args:
        x: Any shape, any floating dtype.

    Returns:
        A tensor of the shape and dtype of ``x``, computed in float32 at least (float64 stays float64).
        In float16, which ends at 65,504, the cube of 41 would be infinite, and backward would turn that into NaN.

    Source: Hendrycks and Gimpel (arXiv:1606.08415), section 2.
    Convention: GPT-2 was trained with this formula, called "gelu_new" in Transformers; BERT and ViT use the exact form
        there.
    """
    raise NotImplementedError("Exercise 6.2: write gelu_tanh")


class CausalSelfAttention(nn.Module):
    """Attention of every position to itself and the positions before it. (Exercise 6.3)

    Size: 20 minutes, difficulty 2, core.

    Args:
        config: Provides ``dim`` C and ``n_heads`` H.

    Attributes:
        c_attn: ``nn.Linear`` from C to 3C with a bias: the queries of all heads, then all keys, then all values.
        c_proj: ``nn.Linear`` from C to C with a bias, applied after the heads are merged.

    There are no other parameters, and the state dict holds nothing else.
    """

    def __init__(self, config: GPT2Config):
        super().__init__()
        raise NotImplementedError("Exercise 6.3: write CausalSelfAttention.__init__")

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        """``[B, T, C]`` in, ``[B, T, C]`` out; what is made on the way is on the device of ``x``."""
        raise NotImplementedError("Exercise 6.3: write CausalSelfAttention.forward")


class MLP(nn.Module):
    """Two linear layers with a ``gelu_tanh`` between them, at four times the width. (Exercise 6.4)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        config: Provides ``dim`` C.

    Attributes:
        c_fc: ``nn.Linear`` from C to 4C with a bias.
        c_proj: ``nn.Linear`` from 4C to C with a bias.
    """

    def __init__(self, config: GPT2Config):
        super().__init__()
        raise NotImplementedError("Exercise 6.4: write MLP.__init__")

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """``[..., C]`` in, ``[..., C]`` out."""
        raise NotImplementedError("Exercise 6.4: write MLP.forward")


class Block(nn.Module):
    """Attention, then the MLP; each reads a normalised copy of the stream and adds its output to the stream. (Exercise 6.5)

    Size: 10 minutes, difficulty 1, core.

    Args:
        config: Provides ``dim`` C, ``n_heads`` and ``norm_eps``.

    Attributes:
        ln_1: ``LayerNorm`` of width C before ``attn``.
        attn: ``CausalSelfAttention``.
        ln_2: ``LayerNorm`` of width C before ``mlp``.
        mlp: ``MLP``.

    Source: Radford and others (2019), section 2.3: the norm moved to the input of each part.
    Convention: this model has no dropout, like OpenAI's published code; Transformers' configuration of GPT-2 sets 0.1.
    """

    def __init__(self, config: GPT2Config):
        super().__init__()
        raise NotImplementedError("Exercise 6.5: write Block.__init__")

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        """``[B, T, C]`` in, ``[B, T, C]`` out."""
        raise NotImplementedError("Exercise 6.5: write Block.forward")


def init_weights(module: nn.Module, n_layers: int) -> None:
    """Initialise every weight as GPT-2 does, in place. (Exercise 6.6)

    Size: 20 minutes, difficulty 3, core.

    Weights of ``nn.Embedding`` and ``nn.Linear`` become normal with mean 0 and standard deviation 0.02.
    Linear layers whose name ends in ``c_proj`` write to the residual stream; their standard deviation is
    ``0.02 / sqrt(2 * n_layers)`` instead.
    Biases of linear layers, where they exist, become 0.
    Layer norms are left as they are.

    Args:
        module: A whole model or a part of it.
        n_layers: Number of blocks L of the whole model.

    Returns:
        Nothing.

    Source: Radford and others (2019), section 2.3.
    Convention: OpenAI's code drew the positions with 0.01; Transformers and nanoGPT draw them with 0.02, as here.
    """
    raise NotImplementedError("Exercise 6.6: write init_weights")


def pad_vocab(n: int, multiple: int = 128) -> int:
    """Round a vocabulary size up to a multiple. (Exercise 6.7)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        n: Number of tokens.
        multiple: The result is divisible by this.

    Returns:
        The smallest multiple of ``multiple`` that is at least ``n``: 50,304 for 50,257.
    """
    raise NotImplementedError("Exercise 6.7: write pad_vocab")


class GPT2(nn.Module):
    """The whole model: takes tokens, returns scores of the next token. (Exercise 6.8)

    Size: 30 minutes, difficulty 3, core.

    Args:
        config: A ``GPT2Config``.

    Attributes:
        config: The argument.
        wte: ``nn.Embedding`` with ``config.n_rows`` rows (V, or more if padded); its weight is also the head.
        wpe: ``nn.Embedding`` of ``config.context_len`` positions.
        h: ``nn.ModuleList`` of L ``Block``.
        ln_f: ``LayerNorm`` after the last block, with ``config.norm_eps``.

    There are no other parameters, and the state dict holds nothing else: the head is ``wte.weight`` itself.
    ``init_weights`` sets the initial weights.

    Source: Radford and others (2019), section 2.3.
    Convention: parameters have the names of GPT-2's checkpoints; weights of linear layers are ``[out, in]``, as in
        PyTorch.
    """

    def __init__(self, config: GPT2Config):
        super().__init__()
        raise NotImplementedError("Exercise 6.8: write GPT2.__init__")

    def forward(
        self, tokens: Int[Tensor, "b t"], targets: Int[Tensor, "b t"] | None = None
    ) -> tuple[Float[Tensor, "b t v"], Float[Tensor, ""] | None]:
        """For each token, predict the token that follows it.

        Args:
            tokens: Ids ``[B, T]`` with T at most ``context_len``, on the model's device.
            targets: Ids ``[B, T]``: for each token the one that follows it, so already shifted.

        Returns:
            Logits ``[B, T, V]`` and the mean cross-entropy over all B*T targets, in nats (None without targets).
            V is ``vocab_size``: the columns of padding rows are cut off, so that no padding row can win or take
            probability.

        Raises:
            ValueError: T is more than ``context_len``; the message names both numbers.
        """
        raise NotImplementedError("Exercise 6.8: write GPT2.forward")


def count_parameters(config: GPT2Config) -> int:
    """Number of parameters of the model, without building it. (Exercise 6.9)

    Size: 15 minutes, difficulty 2, warm-up.

    Args:
        config: A ``GPT2Config``.

    Returns:
        The number of parameters, with the tied head counted once and padding rows not counted: 124,439,808 for
        ``GPT2_SMALL`` and 1,557,611,200 for ``GPT2_XL``.
    """
    raise NotImplementedError("Exercise 6.9: write count_parameters")


def convert_hf_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert Transformers' GPT-2 weights to this model's names and layout. (Exercise 6.10)

    Size: 20 minutes, difficulty 2, stretch.

    Args:
        state_dict: Tensors of a ``GPT2LMHeadModel`` (whose names begin with ``transformer.``) or of OpenAI's checkpoint
            on the hub (without that prefix); left unchanged.

    Returns:
        A state dict for ``GPT2.load_state_dict``.
        Weights of the linear layers ``c_attn``, ``c_fc`` and ``c_proj`` are transposed, because Transformers'
        ``Conv1D`` stores them as ``[in, out]``.
        The buffers ``attn.bias`` and ``attn.masked_bias`` (causal masks of old checkpoints) are dropped, and so is
        ``lm_head.weight`` if it equals ``wte.weight``.
        Unknown names and a head that is not tied are passed on, so that ``load_state_dict`` can refuse them.

    Source: Transformers, ``pytorch_utils.Conv1D``.
    """
    raise NotImplementedError("Exercise 6.10: write convert_hf_state_dict")


def load_pretrained(name_or_path: str | os.PathLike) -> GPT2:
    """Load a model from a checkpoint in Transformers' format. (Exercise 6.11)

    Size: 25 minutes, difficulty 3, stretch.

    Args:
        name_or_path: A folder with ``config.json`` and ``model.safetensors`` (or shards and their index), or a name on
            the hub: "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl".

    Returns:
        The model, in evaluation mode.

    Raises:
        FileNotFoundError: there is no such folder and no such name on the hub.
        ValueError: the checkpoint does not fit.
            One message lists everything that is wrong: the problems that ``read_config`` and ``read_tensors`` report,
            each missing tensor, each unexpected tensor, and each tensor of a wrong shape with both shapes.
    """
    raise NotImplementedError("Exercise 6.11: write load_pretrained")
