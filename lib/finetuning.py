"""Finetuning: which tokens the loss counts, how few numbers are trained, and what two answers say about each other."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float32, Int, Int64, UInt8
from torch import Tensor, nn

from lib.given.kernels.nf4 import NF4_LEVELS as NF4_LEVELS
from lib.given.models.llama import LlamaConfig
from lib.llama import count_parameters
from lib.low_precision import Int4Linear, pack_int4, unpack_int4

ALL = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
"""Last names of the seven matrices in a block of chapter 4's Llama."""


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    encode: Callable[[str], list[int]],
    special: Mapping[str, int],
    max_length: int | None = None,
    add_generation_prompt: bool = False,
) -> tuple[list[int], list[int]]:
    """Turn a conversation into tokens, and mark those that the assistant has to learn. (Exercise 28.1)

    Size: 30 minutes, difficulty 2, core.

    Args:
        messages: Dicts with "role" and "content", user and assistant in turn; a system message may come first.
            An assistant's content is a string or a list of parts, dicts with "type" and "text".
            Messages are left unchanged.
        encode: Text to ordinary tokens: a marker that somebody typed stays text.
        special: Ids of "bos", and of "user", "assistant", "python" and "output", each with "_start" and "_end".
        max_length: Keep this many tokens from the start; None keeps all.
        add_generation_prompt: Whether the conversation is a prompt: it ends with a user's message, and
            "assistant_start" follows.

    Returns:
        (ids, mask), two lists of one length: "bos", then each message's start, content and end.
        mask is 1 for what the assistant has to produce, its content and "assistant_end", and 0 for all else.

        - A part "text" is learned, and a part "python" between its two markers, with both of them.
        - A part "python_output" stands between the "output" markers; it is not learned, and neither are they.
        - A system message is put in front of the first user's, with two newlines between, before they are encoded.
        - A conversation without messages is "bos" alone.

    Raises:
        ValueError: user and assistant do not alternate from a user on, or no user follows a system message (shows the
            message's index and role), a prompt has no messages or does not end with a user's (shows the last index), or
            a part has another type (shows it).

    Convention: nanochat's template; an index counts a system message.
    """
    raise NotImplementedError("Exercise 28.1: write render_chat")


def pack_conversations(
    conversations: Iterable[tuple[Sequence[int], Sequence[int]]],
    length: int,
    pad_id: int = 0,
    ignore_index: int = -100,
) -> dict[str, Int64[Tensor, "n t"]]:
    """Lay conversations side by side in rows of one length. (Exercise 28.2)

    Size: 25 minutes, difficulty 3, core.

    Args:
        conversations: Pairs (ids, mask), as `render_chat` returns them; each is cut to its first ``length + 1`` ids.
        length: Positions T in a row.
        pad_id: Input in the padding.
        ignore_index: Target of what is not learned.

    Each conversation goes, whole, into the first row that has room for it, and into a new row if none has, in the
    order in which they are given.
    A conversation without a token to learn is left out.

    Returns:
        int64 ``[N, T]``; without conversations ``[0, T]``:

        - "inputs": the ids but the last of each conversation.
        - "targets": the ids but the first; ``ignore_index`` where the *target's own* mask is 0, and in the padding.
        - "documents": which conversation of its row, counted from 0; -1 in the padding.
        - "positions": from 0 in each conversation; 0 in the padding.

    Raises:
        ValueError: ids and mask differ in length; shows the conversation's index and both lengths.
    """
    raise NotImplementedError("Exercise 28.2: write pack_conversations")


def packed_mask(documents: Int[Tensor, "b t"]) -> Bool[Tensor, "b 1 t t"]:
    """Which earlier positions a position of a packed row may attend to. (Exercise 28.3)

    Size: 10 minutes, difficulty 2, core.

    Args:
        documents: As `pack_conversations` makes them: -1 is padding. Left unchanged.

    Returns:
        True = may attend, for every head: earlier positions of the same conversation, and the position itself; on the
        device of ``documents``.
        A position in the padding attends to itself only, so that no row is empty.

    Convention: chapter 3's: True = may attend.
    """
    raise NotImplementedError("Exercise 28.3: write packed_mask")


def masked_cross_entropy(
    logits: Float[Tensor, "... v"],
    targets: Int[Tensor, "..."],
    n_targets: int | Tensor | None = None,
    ignore_index: int = -100,
) -> Float32[Tensor, ""]:
    """Cross-entropy over the targets that count, divided by a number that the caller may know better. (Exercise 28.4)

    Size: 20 minutes, difficulty 2, core.

    Args:
        logits: Scores of any floating dtype; left unchanged.
        targets: Already shifted; ``ignore_index`` where nothing is to be learned. Left unchanged.
        n_targets: What the sum is divided by; None is the number of targets other than ``ignore_index``.
        ignore_index: Marks an ignored position.

    Returns:
        Float32: the sum over ``n_targets``, in nats; 0, with a gradient of zeros, if every position is ignored.
        Float64 logits are summed and divided in float64, all others in float32; only the result is rounded to float32.
        Logits at an ignored position are not read: NaN there changes neither the value nor the gradient.
    """
    raise NotImplementedError("Exercise 28.4: write masked_cross_entropy")


def accumulate_masked(
    model: Callable[[Tensor], Any],
    micro_batches: Iterable[tuple[Tensor, Tensor]],
    group: dist.ProcessGroup | None = None,
    ignore_index: int = -100,
) -> Float32[Tensor, ""]:
    """Gradients of one mean over all targets, however these are divided among micro-batches and ranks. (Exercise 28.5)

    Size: 35 minutes, difficulty 4, core.

    Args:
        model: Tokens to logits, or to a tuple that begins with them.
        micro_batches: Pairs (inputs, targets), read once; another rank may have another number of them, or none.
        group: The ranks; None is the default group, or this process alone where none is initialised.
        ignore_index: Marks a target that does not count.

    Adds to ``.grad`` so that the *average over ranks* of the gradients (chapter 10's, or DDP's) is the gradient of the
    mean over all targets of all micro-batches of all ranks, with the digits that `masked_cross_entropy` keeps.

    Returns:
        That mean, detached, the same on every rank.

    Raises:
        ValueError: no rank has a target; raised on all of them.

    Cost: at most two collectives, of at most two numbers each; one micro-batch's logits at a time.
    """
    raise NotImplementedError("Exercise 28.5: write accumulate_masked")


class LoRALinear(nn.Module):
    """A frozen linear layer, and beside it a product of two narrow matrices that is trained. (Exercise 28.6)

    Size: 45 minutes, difficulty 3, core.

    Args:
        base: An ``nn.Linear``, chapter 20's ``Int4Linear`` or an `NF4Linear`; its parameters are frozen.
        r: Rank of the update.
        alpha: Sets the size of the update.
        dropout: Probability with which a feature of the update's input is dropped in training.
        use_rslora: Whether the update is scaled by alpha / sqrt(r) instead of alpha / r.

    Attributes:
        base: The layer.
        lora_A: Parameter ``[r, in]``, uniform in +-1/sqrt(in).
        lora_B: Parameter ``[out, r]``, zeros.
            Both are float32, on the device of the base, whatever its dtype is.
        dropout: An ``nn.Dropout``.
        scaling: The factor of the update.
        merged: Whether the update is in the base's weight.

    Raises:
        ValueError: ``r`` below 1; shows it.

    Source: Hu and others (arXiv:2106.09685), section 4.1; Kalajdzievski (arXiv:2312.03732) for rsLoRA.
    """

    merged: bool

    def __init__(
        self,
        base: "nn.Linear | Int4Linear | NF4Linear",
        r: int,
        alpha: float,
        dropout: float = 0.0,
        use_rslora: bool = False,
    ):
        super().__init__()
        raise NotImplementedError("Exercise 28.6: write LoRALinear.__init__")

    def forward(self, x: Float[Tensor, "... n_in"]) -> Float[Tensor, "... n_out"]:
        """``base(x) + scaling * dropout(x) A^T B^T``, in the dtype of ``base(x)``; only ``base(x)`` once merged.

        The update is computed and added in float32 or wider, and only the sum is rounded to the dtype of ``base(x)``.

        Cost: for n vectors ``2 n (in out + r (in + out))`` FLOPs: B A is not formed.
        """
        raise NotImplementedError("Exercise 28.6: write LoRALinear.forward")

    def merge(self) -> None:
        """Add the update to the base's weight, in float32, rounded once to the weight's dtype; nothing if merged.

        Raises:
            TypeError: the base has no floating-point ``weight``; names the base's class.
        """
        raise NotImplementedError("Exercise 28.6: write LoRALinear.merge")

    def unmerge(self) -> None:
        """Take the update away again, in float32, rounded once; nothing if it is not merged."""
        raise NotImplementedError("Exercise 28.6: write LoRALinear.unmerge")


def add_lora(
    model: nn.Module, r: int, alpha: float, targets: Iterable[str] = ("wq", "wv"), dropout: float = 0.0
) -> list[str]:
    """Put a `LoRALinear` around each layer with one of these names, in place, and freeze all else. (Exercise 28.7)

    Size: 20 minutes, difficulty 2, core.

    Args:
        model: Any model; changed in place.
        r: Rank of each update.
        alpha: Sets the size of each update.
        targets: Last names of the ``nn.Linear`` and `NF4Linear` layers to replace.
        dropout: As for `LoRALinear`.

    Returns:
        Full names of the replaced layers, in the order of ``named_modules()``.

    Raises:
        ValueError: targets that no such layer has; names them, and nothing is changed.
    """
    raise NotImplementedError("Exercise 28.7: write add_lora")


def lora_parameters(config: LlamaConfig, r: int, targets: Iterable[str] = ("wq", "wv")) -> int:
    """How many numbers LoRA trains in chapter 4's Llama. (Exercise 28.8)

    Size: 10 minutes, difficulty 1, warm-up.

    Args:
        config: Sizes of the model.
        r: Rank of each update.
        targets: Matrices of a block that get an update, out of ``ALL``, read once; one given twice counts once.

    Returns:
        The number of entries of all A and B: 4,194,304 for Llama 2 7B, r = 8 and the default targets.

    Raises:
        ValueError: names that are not in ``ALL``; shows them.
    """
    raise NotImplementedError("Exercise 28.8: write lora_parameters")


def nf4_quantize(
    weight: Float[Tensor, "..."], block_size: int = 64
) -> tuple[UInt8[Tensor, " half"], Float32[Tensor, " blocks"]]:
    """Round a weight to sixteen levels that suit a normal distribution, with a scale for each block. (Exercise 28.9)

    Size: 20 minutes, difficulty 2, core.

    Args:
        weight: Any shape and floating dtype; flattened in row-major order, and cut into blocks.
        block_size: Weights in a block; even, and divides their number.

    Returns:
        - packed ``[numel / 2]``: the index in ``NF4_LEVELS`` of the level nearest to the weight over its block's
          ``absmax`` (of two, the lower), two in a byte by chapter 20's ``pack_int4``.
        - absmax ``[numel / block_size]``: the largest magnitude of each block, without a gradient.

        A block of zeros comes back as zeros.

    Raises:
        ValueError: ``block_size`` is odd or below 2, or does not divide the number of weights; shows it.

    Source: Dettmers and others (arXiv:2305.14314), section 3.
    Convention: ``pack_int4`` puts the even place into the low four bits; bitsandbytes puts it into the high ones.
    """
    raise NotImplementedError("Exercise 28.9: write nf4_quantize")


def nf4_dequantize(
    packed: UInt8[Tensor, " half"],
    absmax: Float32[Tensor, " blocks"],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "..."]:
    """The weights that `nf4_quantize` rounded: each level times its block's largest magnitude. (Exercise 28.10)

    Size: 10 minutes, difficulty 1, core.

    Args:
        packed: As `nf4_quantize` returns it.
        absmax: As `nf4_quantize` returns it; its length gives the size of a block.
        shape: Shape of the weight.
        dtype: Dtype of the result.

    Returns:
        The product, in float32, rounded once to ``dtype``.
    """
    raise NotImplementedError("Exercise 28.10: write nf4_dequantize")


class NF4Linear(nn.Module):
    """A frozen linear layer whose weights have four bits, and through which gradients pass. (Exercise 28.11)

    Size: 40 minutes, difficulty 4, core.

    Args:
        linear: The layer to quantize; left unchanged.
        block_size: As for `nf4_quantize`.

    Attributes:
        packed: Buffer, as `nf4_quantize` returns it.
        absmax: Buffer, as `nf4_quantize` returns it.
        bias: Buffer with a copy of the layer's bias, or None.
        in_features: Features of the input.
        out_features: Features of the output.

    There are no other buffers, and no parameters.

    Raises:
        ValueError: as `nf4_quantize`.

    Source: Dettmers and others (arXiv:2305.14314), section 3, equation 5, without double quantization.
    """

    packed: Tensor
    absmax: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, block_size: int = 64):
        super().__init__()
        raise NotImplementedError("Exercise 28.11: write NF4Linear.__init__")

    def forward(self, x: Float[Tensor, "... n_in"]) -> Float[Tensor, "... n_out"]:
        """``x`` times the unpacked weights, plus the bias, in the dtype of x.

        Cost: saved for the backward pass are ``packed`` and ``absmax``, neither the unpacked weight nor x.
            The backward pass unpacks again, and computes the gradient of x.
        """
        raise NotImplementedError("Exercise 28.11: write NF4Linear.forward")


def finetuning_memory_bytes(
    config: LlamaConfig, method: str, r: int = 16, targets: Iterable[str] = ALL
) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer while a Llama is fine-tuned; activations come on top. (Exercise 28.12)

    Size: 15 minutes, difficulty 2, core.

    Args:
        config: Sizes of the model.
        method: "full" trains every weight, "lora" updates of frozen 16-bit weights, "qlora" updates of `NF4Linear`.
        r: Rank of the updates.
        targets: As for `lora_parameters`.

    What is trained is float32 and has a gradient and two moments in float32.
    Frozen weights have 2 bytes each; with "qlora" the seven matrices of each block have half a byte and, for every 64
    weights, 4 bytes more.

    Returns:
        {"weights", "gradients", "optimizer"}, in bytes.

    Raises:
        ValueError: another method; shows it. Or unknown targets; shows them.
    """
    raise NotImplementedError("Exercise 28.12: write finetuning_memory_bytes")


def sequence_log_probs(
    logits: Float[Tensor, "b t v"], targets: Int[Tensor, "b t"], ignore_index: int = -100
) -> Float32[Tensor, " b"]:
    """Log-probability of each row's answer. (Exercise 28.13)

    Size: 15 minutes, difficulty 2, core.

    Args:
        logits: Scores of any floating dtype.
        targets: Already shifted; ``ignore_index`` where a token is not of the answer.
        ignore_index: Marks an ignored position, whose logits are not read.

    Returns:
        The *sum* over the answer's tokens, in nats; 0 for a row without one.

    Convention: a mean over the tokens would be another loss, the one of SimPO (arXiv:2405.14734).
    """
    raise NotImplementedError("Exercise 28.13: write sequence_log_probs")


def dpo_loss(
    chosen_logps: Float[Tensor, " b"],
    rejected_logps: Float[Tensor, " b"],
    ref_chosen_logps: Float[Tensor, " b"],
    ref_rejected_logps: Float[Tensor, " b"],
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Learn which of two answers people preferred, without a reward model. (Exercise 28.14)

    Size: 20 minutes, difficulty 2, core.

    Args:
        chosen_logps: Log-probability of each preferred answer under the model that is trained.
        rejected_logps: Log-probability of the other answer under it.
        ref_chosen_logps: The preferred answer's under the model as it was.
        ref_rejected_logps: The other answer's under it.
        beta: How dear it is to leave the reference; reward for one nat.
        label_smoothing: Share e of the pairs that are assumed to be labelled the wrong way round.

    Returns:
        (losses, chosen_rewards, rejected_rewards), not reduced; rewards are detached.
        Losses are finite for any finite log-probabilities.

    Raises:
        ValueError: ``label_smoothing`` outside of [0, 0.5); shows it.

    Source: Rafailov and others (arXiv:2305.18290), equation 7; smoothing as in TRL's ``DPOTrainer``.
    """
    raise NotImplementedError("Exercise 28.14: write dpo_loss")


def kl_penalty(
    logprob: Float[Tensor, "..."], ref_logprob: Float[Tensor, "..."], kl_penalty: str = "k3"
) -> Float[Tensor, "..."]:
    """Estimate, token by token, how far the policy is from the reference. (Exercise 28.15)

    Size: 20 minutes, difficulty 3, core.

    Args:
        logprob: Log-probability of each sampled token under the policy, *from which it was sampled*.
        ref_logprob: Its log-probability under the reference.
        kl_penalty: "k1", "k2", "k3", or one of them with a "+".

    With d = ``logprob - ref_logprob``: k1 is d, k2 is d^2 / 2, and k3 is exp(-d) - 1 + d.
    With "+" the value is the estimator's and the gradient is that of k2, which is the only one of the three whose mean
    gradient over samples is the gradient of the divergence.

    Returns:
        One number for each token, not clamped.
        k3 keeps its digits: at d = 1e-3 it is right to 3 % in float32, too.

    Raises:
        ValueError: another ``kl_penalty``; shows it.

    Source: Schulman, "Approximating KL Divergence" (2020), at http://joschu.net/blog/kl-approx.html.
    Convention: the names, and "+", are verl's, which also clamps k3 to 10 in magnitude.
    """
    raise NotImplementedError("Exercise 28.15: write kl_penalty")
