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
from solutions.attention import causal_mask, merge_heads, scaled_dot_product_attention, split_heads


def layer_norm(
    x: Float[Tensor, "... c"], weight: Float[Tensor, " c"], bias: Float[Tensor, " c"], eps: float = 1e-5
) -> Float[Tensor, "... c"]:
    """Normalise features to mean 0 and variance 1, then apply a gain and a bias to each. (Exercise)

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
    ### BEGIN SOLUTION
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return (centred * torch.rsqrt(variance + eps) * weight + bias).to(x.dtype)
    ### END SOLUTION


class LayerNorm(nn.LayerNorm):
    """A module that calls ``layer_norm`` with its ``weight`` (initially ones), its ``bias`` (zeros) and its ``eps``."""

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        return layer_norm(x, self.weight, self.bias, self.eps)


def gelu_tanh(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The Gaussian error linear unit, by its tanh formula. (Exercise)

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
    ### BEGIN SOLUTION
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide**3)
    return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)
    ### END SOLUTION


class CausalSelfAttention(nn.Module):
    """Attention of every position to itself and the positions before it. (Exercise)

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
        ### BEGIN SOLUTION
        self.n_heads = config.n_heads
        self.c_attn = nn.Linear(config.dim, 3 * config.dim)
        self.c_proj = nn.Linear(config.dim, config.dim)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        """``[B, T, C]`` in, ``[B, T, C]`` out; what is made on the way is on the device of ``x``."""
        ### BEGIN SOLUTION
        q, k, v = (split_heads(part, self.n_heads) for part in self.c_attn(x).chunk(3, dim=-1))
        mask = causal_mask(x.shape[1], x.shape[1], device=x.device)
        return self.c_proj(merge_heads(scaled_dot_product_attention(q, k, v, mask)))
        ### END SOLUTION


class MLP(nn.Module):
    """Two linear layers with a ``gelu_tanh`` between them, at four times the width. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        config: Provides ``dim`` C.

    Attributes:
        c_fc: ``nn.Linear`` from C to 4C with a bias.
        c_proj: ``nn.Linear`` from 4C to C with a bias.
    """

    def __init__(self, config: GPT2Config):
        super().__init__()
        ### BEGIN SOLUTION
        self.c_fc = nn.Linear(config.dim, 4 * config.dim)
        self.c_proj = nn.Linear(4 * config.dim, config.dim)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """``[..., C]`` in, ``[..., C]`` out."""
        ### BEGIN SOLUTION
        return self.c_proj(gelu_tanh(self.c_fc(x)))
        ### END SOLUTION


class Block(nn.Module):
    """Attention, then the MLP; each reads a normalised copy of the stream and adds its output to the stream. (Exercise)

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
        ### BEGIN SOLUTION
        self.ln_1 = LayerNorm(config.dim, eps=config.norm_eps)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        """``[B, T, C]`` in, ``[B, T, C]`` out."""
        ### BEGIN SOLUTION
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))
        ### END SOLUTION


def init_weights(module: nn.Module, n_layers: int) -> None:
    """Initialise every weight as GPT-2 does, in place. (Exercise)

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
    ### BEGIN SOLUTION
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            writes_to_stream = name.split(".")[-1] == "c_proj"
            nn.init.normal_(part.weight, std=0.02 / math.sqrt(2 * n_layers) if writes_to_stream else 0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    ### END SOLUTION


def pad_vocab(n: int, multiple: int = 128) -> int:
    """Round a vocabulary size up to a multiple. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        n: Number of tokens.
        multiple: The result is divisible by this.

    Returns:
        The smallest multiple of ``multiple`` that is at least ``n``: 50,304 for 50,257.
    """
    ### BEGIN SOLUTION
    return -(-n // multiple) * multiple  # rounds up, without a float
    ### END SOLUTION


class GPT2(nn.Module):
    """The whole model: takes tokens, returns scores of the next token. (Exercise)

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
        ### BEGIN SOLUTION
        self.config = config
        self.wte = nn.Embedding(config.n_rows, config.dim)
        self.wpe = nn.Embedding(config.context_len, config.dim)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = LayerNorm(config.dim, eps=config.norm_eps)
        init_weights(self, config.n_layers)
        ### END SOLUTION

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
        ### BEGIN SOLUTION
        length = tokens.shape[1]
        if length > self.config.context_len:
            raise ValueError(f"{length} tokens in a row are more than the context of {self.config.context_len}")
        x = self.wte(tokens) + self.wpe(torch.arange(length, device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = nn.functional.linear(self.ln_f(x), self.wte.weight)[..., : self.config.vocab_size]
        loss = None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss
        ### END SOLUTION


def count_parameters(config: GPT2Config) -> int:
    """Number of parameters of the model, without building it. (Exercise)

    Size: 15 minutes, difficulty 2, warm-up.

    Args:
        config: A ``GPT2Config``.

    Returns:
        The number of parameters, with the tied head counted once and padding rows not counted: 124,439,808 for
        ``GPT2_SMALL`` and 1,557,611,200 for ``GPT2_XL``.
    """
    ### BEGIN SOLUTION
    c = config.dim
    attention, mlp, norm = 4 * c * c + 4 * c, 8 * c * c + 5 * c, 2 * c
    embeddings = (config.vocab_size + config.context_len) * c
    return embeddings + config.n_layers * (attention + mlp + 2 * norm) + norm
    ### END SOLUTION


def convert_hf_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert Transformers' GPT-2 weights to this model's names and layout. (Exercise)

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
    ### BEGIN SOLUTION
    state = {name.removeprefix("transformer."): tensor for name, tensor in state_dict.items()}
    head, tokens = state.get("lm_head.weight"), state.get("wte.weight")
    if head is not None and tokens is not None and torch.equal(head, tokens):
        del state["lm_head.weight"]
    transposed = ("c_attn.weight", "c_fc.weight", "c_proj.weight")
    return {
        name: tensor.T.contiguous() if name.endswith(transposed) else tensor
        for name, tensor in state.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))
    }
    ### END SOLUTION


def load_pretrained(name_or_path: str | os.PathLike) -> GPT2:
    """Load a model from a checkpoint in Transformers' format. (Exercise)

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
    ### BEGIN SOLUTION
    folder = find_checkpoint(name_or_path)
    config, problems = read_config(folder)
    tensors, unreadable = read_tensors(folder)
    state, problems = convert_hf_state_dict(tensors), problems + unreadable
    if config is not None and (tensors or not unreadable):
        model = GPT2(config)
        problems += _differences(model.state_dict(), state)
    if problems:
        raise ValueError(f"{folder} does not fit:\n" + "\n".join(f"- {problem}" for problem in problems))
    model.load_state_dict(state, assign=True)
    return model.eval()
    ### END SOLUTION


### BEGIN SOLUTION
def _differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Describe each tensor that is missing, unexpected or of another shape."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in expected]
    for name in expected:
        if name in found and expected[name].shape != found[name].shape:
            problems.append(f"{name} is {list(found[name].shape)}, expected {list(expected[name].shape)}")
    return problems


### END SOLUTION
