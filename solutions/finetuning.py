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
from solutions.llama import count_parameters
from solutions.low_precision import Int4Linear, pack_int4, unpack_int4

ALL = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
"""Last names of the seven matrices in a block of chapter 4's Llama."""


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    encode: Callable[[str], list[int]],
    special: Mapping[str, int],
    max_length: int | None = None,
    add_generation_prompt: bool = False,
) -> tuple[list[int], list[int]]:
    """Turn a conversation into tokens, and mark those that the assistant has to learn. (Exercise)

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
    ### BEGIN SOLUTION
    ids, mask = [special["bos"]], [0]

    def add(tokens: Sequence[int], learned: int) -> None:
        ids.extend(tokens)
        mask.extend([learned] * len(tokens))

    for role, content in _alternating(messages, add_generation_prompt):
        add([special[f"{role}_start"]], 0)
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] not in _MARKERS:
                raise ValueError(f"a part of type {part['type']!r}: expected one of {sorted(_MARKERS)}")
            markers, tokens = _MARKERS[part["type"]], encode(part["text"])
            if markers:
                tokens = [special[f"{markers}_start"], *tokens, special[f"{markers}_end"]]
            add(tokens, int(role == "assistant" and markers != "output"))
        add([special[f"{role}_end"]], int(role == "assistant"))
    if add_generation_prompt:
        add([special["assistant_start"]], 0)
    return ids[:max_length], mask[:max_length]
    ### END SOLUTION


### BEGIN SOLUTION
_MARKERS = {"text": "", "python": "python", "python_output": "output"}


def _alternating(messages: Sequence[Mapping[str, Any]], prompt: bool) -> list[tuple[str, Any]]:
    """Roles and contents, the system message within the first user's."""
    first = int(bool(messages) and messages[0]["role"] == "system")
    for i, message in enumerate(messages[first:]):
        if message["role"] != ("user", "assistant")[i % 2]:
            raise ValueError(f"message {i + first} has the role {message['role']!r}: user and assistant must alternate")
    if len(messages) == first == 1:
        raise ValueError("message 0 has the role 'system': a user's message must follow it")
    if prompt and (not messages or messages[-1]["role"] != "user"):
        raise ValueError(f"message {len(messages) - 1} ends the prompt: expected one with the role 'user'")
    turns = [(message["role"], message["content"]) for message in messages[first:]]
    if first:
        turns[0] = ("user", messages[0]["content"] + "\n\n" + turns[0][1])
    return turns


### END SOLUTION


def pack_conversations(
    conversations: Iterable[tuple[Sequence[int], Sequence[int]]],
    length: int,
    pad_id: int = 0,
    ignore_index: int = -100,
) -> dict[str, Int64[Tensor, "n t"]]:
    """Lay conversations side by side in rows of one length. (Exercise)

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
    ### BEGIN SOLUTION
    rows, room = list[dict[str, list[int]]](), list[int]()
    for index, (ids, mask) in enumerate(conversations):
        if len(ids) != len(mask):
            raise ValueError(f"conversation {index} has {len(ids)} ids and a mask of {len(mask)}")
        ids, learned = ids[: length + 1], mask[1 : length + 1]
        n = len(learned)
        if not any(learned):
            continue
        first = next((i for i, left in enumerate(room) if n <= left), len(rows))
        if first == len(rows):
            rows.append({name: [] for name in _PADDING})
            room.append(length)
        room[first] -= n
        row = rows[first]
        row["inputs"] += ids[:-1]
        row["targets"] += [token if own else ignore_index for token, own in zip(ids[1:], learned, strict=True)]
        row["documents"] += [row["documents"][-1] + 1 if row["documents"] else 0] * n
        row["positions"] += range(n)
    padding = _PADDING | {"inputs": pad_id, "targets": ignore_index}
    padded = {name: [row[name] + [fill] * (length - len(row[name])) for row in rows] for name, fill in padding.items()}
    return {name: torch.tensor(values, dtype=torch.int64).view(-1, length) for name, values in padded.items()}
    ### END SOLUTION


### BEGIN SOLUTION
_PADDING = {"inputs": 0, "targets": 0, "documents": -1, "positions": 0}

### END SOLUTION


def packed_mask(documents: Int[Tensor, "b t"]) -> Bool[Tensor, "b 1 t t"]:
    """Which earlier positions a position of a packed row may attend to. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        documents: As `pack_conversations` makes them: -1 is padding. Left unchanged.

    Returns:
        True = may attend, for every head: earlier positions of the same conversation, and the position itself; on the
        device of ``documents``.
        A position in the padding attends to itself only, so that no row is empty.

    Convention: chapter 3's: True = may attend.
    """
    ### BEGIN SOLUTION
    t = documents.shape[1]
    itself = torch.eye(t, dtype=torch.bool, device=documents.device)
    same = (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, :, None]
    return ((same & itself.new_ones(t, t).tril()) | itself)[:, None]
    ### END SOLUTION


def masked_cross_entropy(
    logits: Float[Tensor, "... v"],
    targets: Int[Tensor, "..."],
    n_targets: int | Tensor | None = None,
    ignore_index: int = -100,
) -> Float32[Tensor, ""]:
    """Cross-entropy over the targets that count, divided by a number that the caller may know better. (Exercise)

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
    ### BEGIN SOLUTION
    losses = _counted_losses(logits, targets, ignore_index)
    if not losses.numel():
        return losses.sum().float()
    return (losses.sum() / (losses.numel() if n_targets is None else n_targets)).float()
    ### END SOLUTION


### BEGIN SOLUTION
def _counted_losses(logits: Tensor, targets: Tensor, ignore_index: int) -> Float[Tensor, " n"]:
    """-log p of each target that counts; the other rows of the logits are never copied."""
    counted = targets != ignore_index
    rows = logits[counted]
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return -rows.log_softmax(-1).gather(1, targets[counted][:, None])[:, 0]


### END SOLUTION


def accumulate_masked(
    model: Callable[[Tensor], Any],
    micro_batches: Iterable[tuple[Tensor, Tensor]],
    group: dist.ProcessGroup | None = None,
    ignore_index: int = -100,
) -> Float32[Tensor, ""]:
    """Gradients of one mean over all targets, however these are divided among micro-batches and ranks. (Exercise)

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
    ### BEGIN SOLUTION
    batches = list(micro_batches)
    device = _device(model, batches)
    n_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    counts = torch.tensor(sum(int((targets != ignore_index).sum()) for _, targets in batches), device=device)
    n_targets = int(_sum_over_ranks(counts, group))
    if n_targets == 0:
        raise ValueError("no rank has a target that counts")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, targets in batches:
        logits = model(inputs)
        logits = logits[0] if isinstance(logits, tuple) else logits
        loss = masked_cross_entropy(logits, targets, n_targets, ignore_index)
        (n_ranks * loss).backward()
        total += loss.detach()
    return _sum_over_ranks(total, group).float()
    ### END SOLUTION


### BEGIN SOLUTION
def _device(model: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> torch.device:
    tensors = list(model.parameters())[:1] if isinstance(model, nn.Module) else []
    return next((t.device for t in tensors + [inputs for inputs, _ in batches[:1]]), torch.device("cpu"))


def _sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(x, group=group)
    return x


### END SOLUTION


class LoRALinear(nn.Module):
    """A frozen linear layer, and beside it a product of two narrow matrices that is trained. (Exercise)

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
        ### BEGIN SOLUTION
        if r < 1:
            raise ValueError(f"r = {r}: the rank is at least 1")
        self.dropout = nn.Dropout(dropout)
        self.base = base.requires_grad_(False)
        n_out, n_in = _sizes(base)
        device = next(t.device for t in [*base.parameters(), *base.buffers()])
        self.lora_A = nn.Parameter(torch.empty(r, n_in, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(n_out, r, dtype=torch.float32, device=device))
        nn.init.uniform_(self.lora_A, -(n_in**-0.5), n_in**-0.5)
        self.scaling = alpha / (math.sqrt(r) if use_rslora else r)
        self.merged = False
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... n_in"]) -> Float[Tensor, "... n_out"]:
        """``base(x) + scaling * dropout(x) A^T B^T``, in the dtype of ``base(x)``; only ``base(x)`` once merged.

        The update is computed and added in float32 or wider, and only the sum is rounded to the dtype of ``base(x)``.

        Cost: for n vectors ``2 n (in out + r (in + out))`` FLOPs: B A is not formed.
        """
        ### BEGIN SOLUTION
        y = self.base(x)
        if self.merged:
            return y
        wide = torch.promote_types(x.dtype, self.lora_A.dtype)
        update = self.dropout(x).to(wide) @ self.lora_A.to(wide).T @ self.lora_B.to(wide).T
        return (y + self.scaling * update).to(y.dtype)
        ### END SOLUTION

    def merge(self) -> None:
        """Add the update to the base's weight, in float32, rounded once to the weight's dtype; nothing if merged.

        Raises:
            TypeError: the base has no floating-point ``weight``; names the base's class.
        """
        ### BEGIN SOLUTION
        if not self.merged:
            self._add(1)
        self.merged = True
        ### END SOLUTION

    def unmerge(self) -> None:
        """Take the update away again, in float32, rounded once; nothing if it is not merged."""
        ### BEGIN SOLUTION
        if self.merged:
            self._add(-1)
        self.merged = False
        ### END SOLUTION

    ### BEGIN SOLUTION
    @torch.no_grad()
    def _add(self, sign: int) -> None:
        weight = getattr(self.base, "weight", None)
        if weight is None or not weight.is_floating_point():
            raise TypeError(f"{type(self.base).__name__} has no floating-point weight to merge into")
        wide = torch.promote_types(weight.dtype, torch.float32)
        update = self.scaling * (self.lora_B.to(wide) @ self.lora_A.to(wide))
        weight.copy_(weight.to(wide) + sign * update)

    ### END SOLUTION


### BEGIN SOLUTION
def _sizes(base: Any) -> tuple[int, int]:
    """Features out and in; an ``Int4Linear`` knows them by its packed weights only."""
    if isinstance(base, Int4Linear):
        return base.packed.shape[0], 2 * base.packed.shape[1]
    return base.out_features, base.in_features


### END SOLUTION


def add_lora(
    model: nn.Module, r: int, alpha: float, targets: Iterable[str] = ("wq", "wv"), dropout: float = 0.0
) -> list[str]:
    """Put a `LoRALinear` around each layer with one of these names, in place, and freeze all else. (Exercise)

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
    ### BEGIN SOLUTION
    wanted = set(targets)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | NF4Linear)}
    found = {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in wanted}
    missing = wanted - {name.rpartition(".")[2] for name in found}
    if missing:
        raise ValueError(f"no linear layer has the name {', '.join(sorted(missing))}")
    adapted = {name: LoRALinear(layer, r, alpha, dropout) for name, layer in found.items()}
    model.requires_grad_(False)
    for name, layer in adapted.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    return list(adapted)
    ### END SOLUTION


def lora_parameters(config: LlamaConfig, r: int, targets: Iterable[str] = ("wq", "wv")) -> int:
    """How many numbers LoRA trains in chapter 4's Llama. (Exercise)

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
    ### BEGIN SOLUTION
    sizes = _block_matrices(config)
    names = set(targets)
    if unknown := sorted(names - set(sizes)):
        raise ValueError(f"targets {', '.join(unknown)}: expected names out of {', '.join(ALL)}")
    return config.n_layers * r * sum(sum(sizes[name]) for name in names)
    ### END SOLUTION


### BEGIN SOLUTION
def _block_matrices(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """Features out and in of the seven matrices of a block."""
    c, f, kv = config.dim, config.hidden_dim, config.n_kv_heads * config.head_dim
    return {"wq": (c, c), "wk": (kv, c), "wv": (kv, c), "wo": (c, c), "w1": (f, c), "w2": (c, f), "w3": (f, c)}


### END SOLUTION


def nf4_quantize(
    weight: Float[Tensor, "..."], block_size: int = 64
) -> tuple[UInt8[Tensor, " half"], Float32[Tensor, " blocks"]]:
    """Round a weight to sixteen levels that suit a normal distribution, with a scale for each block. (Exercise)

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
    ### BEGIN SOLUTION
    if block_size < 2 or block_size % 2 or weight.numel() % block_size:
        raise ValueError(f"block_size = {block_size}: expected an even divisor of {weight.numel()} weights")
    blocks = weight.detach().float().reshape(-1, block_size)
    absmax = blocks.abs().amax(1)
    scaled = blocks / torch.where(absmax > 0, absmax, 1.0)[:, None]
    levels = NF4_LEVELS.double().to(weight.device)
    nearest = torch.bucketize(scaled.double(), (levels[1:] + levels[:-1]) / 2)
    return pack_int4(nearest.to(torch.uint8).flatten()), absmax
    ### END SOLUTION


def nf4_dequantize(
    packed: UInt8[Tensor, " half"],
    absmax: Float32[Tensor, " blocks"],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "..."]:
    """The weights that `nf4_quantize` rounded: each level times its block's largest magnitude. (Exercise)

    Size: 10 minutes, difficulty 1, core.

    Args:
        packed: As `nf4_quantize` returns it.
        absmax: As `nf4_quantize` returns it; its length gives the size of a block.
        shape: Shape of the weight.
        dtype: Dtype of the result.

    Returns:
        The product, in float32, rounded once to ``dtype``.
    """
    ### BEGIN SOLUTION
    levels = NF4_LEVELS.to(packed.device)[unpack_int4(packed.flatten()).long()]
    return (levels.view(len(absmax), -1) * absmax[:, None]).to(dtype).reshape(*shape)
    ### END SOLUTION


class NF4Linear(nn.Module):
    """A frozen linear layer whose weights have four bits, and through which gradients pass. (Exercise)

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
        ### BEGIN SOLUTION
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed, absmax = nf4_quantize(linear.weight, block_size)
        self.register_buffer("packed", packed)
        self.register_buffer("absmax", absmax)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... n_in"]) -> Float[Tensor, "... n_out"]:
        """``x`` times the unpacked weights, plus the bias, in the dtype of x.

        Cost: saved for the backward pass are ``packed`` and ``absmax``, neither the unpacked weight nor x.
            The backward pass unpacks again, and computes the gradient of x.
        """
        ### BEGIN SOLUTION
        y = _NF4Product.apply(x, self.packed, self.absmax, self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)
        ### END SOLUTION


### BEGIN SOLUTION
class _NF4Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, absmax: Tensor, n_out: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(packed, absmax)
        ctx.shape = (n_out, x.shape[-1])
        return x @ nf4_dequantize(packed, absmax, ctx.shape, x.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        packed, absmax = ctx.saved_tensors
        return grad @ nf4_dequantize(packed, absmax, ctx.shape, grad.dtype), None, None, None


### END SOLUTION


def finetuning_memory_bytes(
    config: LlamaConfig, method: str, r: int = 16, targets: Iterable[str] = ALL
) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer while a Llama is fine-tuned; activations come on top. (Exercise)

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
    ### BEGIN SOLUTION
    n, trained = count_parameters(config), lora_parameters(config, r, targets)
    matrices = config.n_layers * sum(n_out * n_in for n_out, n_in in _block_matrices(config).values())
    frozen = {"full": 0, "lora": 2 * n, "qlora": 2 * (n - matrices) + matrices // 2 + matrices // 64 * 4}
    if method not in frozen:
        raise ValueError(f"method = {method!r}: expected 'full', 'lora' or 'qlora'")
    trained = n if method == "full" else trained
    return {"weights": frozen[method] + 4 * trained, "gradients": 4 * trained, "optimizer": 8 * trained}
    ### END SOLUTION


def sequence_log_probs(
    logits: Float[Tensor, "b t v"], targets: Int[Tensor, "b t"], ignore_index: int = -100
) -> Float32[Tensor, " b"]:
    """Log-probability of each row's answer. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        logits: Scores of any floating dtype.
        targets: Already shifted; ``ignore_index`` where a token is not of the answer.
        ignore_index: Marks an ignored position, whose logits are not read.

    Returns:
        The *sum* over the answer's tokens, in nats; 0 for a row without one.

    Convention: a mean over the tokens would be another loss, the one of SimPO (arXiv:2405.14734).
    """
    ### BEGIN SOLUTION
    losses = _counted_losses(logits, targets, ignore_index)
    return -losses.new_zeros(targets.shape).masked_scatter(targets != ignore_index, losses).sum(1).float()
    ### END SOLUTION


def dpo_loss(
    chosen_logps: Float[Tensor, " b"],
    rejected_logps: Float[Tensor, " b"],
    ref_chosen_logps: Float[Tensor, " b"],
    ref_rejected_logps: Float[Tensor, " b"],
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Learn which of two answers people preferred, without a reward model. (Exercise)

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
    ### BEGIN SOLUTION
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing = {label_smoothing}: expected at least 0 and less than 0.5")
    chosen, rejected = beta * (chosen_logps - ref_chosen_logps), beta * (rejected_logps - ref_rejected_logps)
    margin = chosen - rejected
    right, wrong = nn.functional.logsigmoid(margin), nn.functional.logsigmoid(-margin)
    return -(1 - label_smoothing) * right - label_smoothing * wrong, chosen.detach(), rejected.detach()
    ### END SOLUTION


def kl_penalty(
    logprob: Float[Tensor, "..."], ref_logprob: Float[Tensor, "..."], kl_penalty: str = "k3"
) -> Float[Tensor, "..."]:
    """Estimate, token by token, how far the policy is from the reference. (Exercise)

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
    ### BEGIN SOLUTION
    d = logprob - ref_logprob
    values = {"k1": lambda: d, "k2": lambda: d.square() / 2, "k3": lambda: torch.expm1(-d) + d}
    name = kl_penalty.removesuffix("+")
    if name not in values or kl_penalty.endswith("++"):
        raise ValueError(f"kl_penalty = {kl_penalty!r}: expected 'k1', 'k2' or 'k3', perhaps with a '+'")
    if name == kl_penalty:
        return values[name]()
    slope = values["k2"]()
    return values[name]().detach() + (slope - slope.detach())  # the second term is 0, with a gradient
    ### END SOLUTION
