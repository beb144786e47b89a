"""What the ranks of chapter 18 run: a block with a cut sequence, attention three ways,
and a Llama that learns to copy.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lib.attention import causal_mask, merge_heads, scaled_dot_product_attention, split_heads
from lib.context_parallel import (
    SequenceParallelBlock,
    heads_to_sequence,
    ring_attention,
    sequence_to_heads,
    ulysses_attention,
    zigzag_indices,
)
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.llama import LlamaConfig
from lib.given.parallel.sharding import saved_bytes
from lib.gpt2 import Block, gelu_tanh, layer_norm
from lib.llama import Llama
from lib.ranks import milestone
from lib.rope import apply_rope
from lib.tensor_parallel import CopyToRegion, ReduceFromRegion

COPIER = LlamaConfig(vocab_size=32, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64, context_len=128)
"""A Llama small enough to learn in seconds, with grouped queries."""


class TensorParallelBlock(SequenceParallelBlock):
    """The same block as chapter 13 leaves it: norms and residual stream whole on every rank, four all-reduces."""

    ln_1: Any
    attn: Any
    ln_2: Any
    mlp: Any

    def __init__(self, block: Any):
        super().__init__(block)
        self.head_dim = block.attn.c_attn.in_features // block.attn.n_heads

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, C]`` in and out, the same on every rank."""
        heads = self.attn.c_attn.weight.shape[0] // 3 // self.head_dim
        h = CopyToRegion.apply(layer_norm(x, self.ln_1.weight, self.ln_1.bias, self.ln_1.eps), None)
        q, k, v = (split_heads(part, heads) for part in self.attn.c_attn(h).chunk(3, dim=-1))
        h = merge_heads(scaled_dot_product_attention(q, k, v, causal_mask(x.shape[1], x.shape[1])))
        x = x + ReduceFromRegion.apply(h @ self.attn.c_proj.weight.T, None) + self.attn.c_proj.bias
        h = CopyToRegion.apply(layer_norm(x, self.ln_2.weight, self.ln_2.bias, self.ln_2.eps), None)
        h = gelu_tanh(self.mlp.c_fc(h)) @ self.mlp.c_proj.weight.T
        return x + ReduceFromRegion.apply(h, None) + self.mlp.c_proj.bias


def run_blocks(rank: int, world_size: int, config: GPT2Config, batch: int, length: int) -> dict[str, dict[str, Any]]:
    """One forward and backward of each kind of block; in the ledger each lies between milestones,
    "all-reduce" and "all-reduce: end", and so on.
    """
    torch.manual_seed(0)
    whole = torch.randn(batch, length, config.dim)
    cut = whole.chunk(world_size, 1)[rank].clone()
    block = Block(config)
    kinds: dict[str, tuple[nn.Module, Tensor]] = {
        "all-reduce": (TensorParallelBlock(block), whole),
        "gather and scatter": (SequenceParallelBlock(block), cut),
    }
    found = {}
    for name, (module, x) in kinds.items():
        x.requires_grad_()
        saved = saved_bytes(lambda m=module, x=x: m(x), without=module.parameters())
        milestone(name)
        out = module(x)
        out.sum().backward()
        milestone(f"{name}: end")
        found[name] = {"saved": saved, "stream": tuple(out.shape)}
    with torch.no_grad():
        expected = block(whole).chunk(world_size, 1)[rank]
    found["gather and scatter"]["off"] = (out - expected).abs().max().item()
    return found


def exchange(rank: int, world_size: int, length: int, n_heads: int) -> dict[str, Any]:
    """Entries that say where they come from (100 t + h), before and after ``heads_to_sequence``,
    and whether they come back.
    """
    position, head = torch.meshgrid(torch.arange(length), torch.arange(n_heads), indexing="ij")
    mine = (100 * position + head).float().chunk(world_size)[rank][None, :, :, None]
    after = heads_to_sequence(mine, None)
    back = sequence_to_heads(after, None)
    return {"before": mine[0, :, :, 0], "after": after[0, :, :, 0], "returned": torch.equal(back, mine)}


def whole_inputs(length: int, n_heads: int = 8, n_kv_heads: int = 4, dim: int = 16) -> list[Tensor]:
    """q, k and v of one long sequence ``[1, H, T, D]`` in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, h, length, dim, generator=generator).double() for h in (n_heads, n_kv_heads, n_kv_heads)]


def compare(rank: int, world_size: int, length: int) -> dict[str, dict[str, float]]:
    """How far each way is from PyTorch's attention over the whole sequence,
    in the output and in the three gradients.
    """
    whole = [x.requires_grad_() for x in whole_inputs(length)]
    expected = alone(*whole)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    (expected * weight).sum().backward()
    found = {}
    for name, (positions, attend) in ways(length, rank, world_size).items():
        mine = [x.detach()[:, :, positions].requires_grad_() for x in whole]
        milestone(name)
        out = attend(*mine)
        (out * weight[:, :, positions]).sum().backward()
        pairs = [(x.grad, y.grad[:, :, positions]) for x, y in zip(mine, whole, strict=True)]  # type: ignore[index]
        found[name] = {"output": _off(out, expected[:, :, positions]), "gradients": max(_off(a, b) for a, b in pairs)}
    milestone("end")
    return found


def _off(a: Tensor | None, b: Tensor) -> float:
    assert a is not None
    return (a - b).abs().max().item()


def ways(length: int, rank: int, world_size: int) -> dict[str, tuple[Tensor, Callable[..., Tensor]]]:
    """For each way, the positions that a rank holds, and causal attention on ``[B, H, T/R, D]``."""
    contiguous = torch.arange(length).chunk(world_size)[rank]

    def ulysses(q, k, v):
        return ulysses_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    def ring(layout):
        return lambda q, k, v: ring_attention(q, k, v, is_causal=True, layout=layout)

    zigzag = torch.as_tensor(zigzag_indices(length, rank, world_size))
    return {
        "Ulysses": (contiguous, ulysses),
        "ring, contiguous": (contiguous, ring("contiguous")),
        "ring, zigzag": (zigzag, ring("zigzag")),
    }


# ---- a Llama that copies ---------------------------------------------------------------------------------------------


def copies(n_steps: int, batch: int = 8, length: int = 128, vocab: int = 32) -> tuple[Tensor, Tensor]:
    """Random tokens that repeat after half the length: inputs and targets ``[steps, B, T]``;
    -100 where nothing can be known.
    """
    generator = torch.Generator().manual_seed(1)
    half = torch.randint(vocab, (n_steps, batch, length // 2), generator=generator)
    tokens = torch.cat([half, half, half[..., :1]], -1)
    targets = tokens[..., 1:].clone()
    targets[..., : length // 2 - 1] = -100
    return tokens[..., :-1], targets


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def logits_of(model: Any, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """Chapter 4's forward pass for some positions of a long sequence; ``attend`` is causal
    attention on ``[B, H, T/R, D]``.
    """
    model.rope = model.rope.to(tokens.device)
    rope, x = model.rope[positions], model.tok_embeddings(tokens)
    for layer in model.layers:
        h, attention = layer.attention_norm(x), layer.attention
        q, k, v = (
            split_heads(w(h), n)
            for w, n in (
                (attention.wq, attention.n_heads),
                (attention.wk, attention.n_kv_heads),
                (attention.wv, attention.n_kv_heads),
            )
        )
        q, k = (apply_rope(heads.transpose(1, 2), rope).transpose(1, 2) for heads in (q, k))
        x = x + attention.wo(merge_heads(attend(q, k, v)))
        x = x + layer.feed_forward(layer.ffn_norm(x))
    return model.output(model.norm(x)).float()


def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention within what the caller holds."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over all ranks' positions."""
    return ring_attention(q, k, v, is_causal=True, layout="zigzag")


def train_copier(rank: int, world_size: int, n_steps: int, attend: Attend) -> dict[str, Any]:
    """Train on sequences that repeat; each rank holds its zigzag share of every sequence.

    Returns:
        The loss of each step, and those of the trained model on new sequences: with each token's position in the whole
        sequence ("right"), and with positions that every rank counts from 0 ("from 0").
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = Llama(COPIER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    length = COPIER.context_len
    positions = torch.as_tensor(zigzag_indices(length, rank, world_size)) if world_size > 1 else torch.arange(length)

    def loss_of(tokens: Tensor, targets: Tensor, at: Tensor) -> Tensor:
        """This rank's part of the mean over all targets of the whole sequence."""
        logits = logits_of(model, tokens[:, positions], at, attend)
        total = F.cross_entropy(
            logits.flatten(0, 1), targets[:, positions].flatten(), ignore_index=-100, reduction="sum"
        )
        return total / (targets != -100).sum()

    losses = []
    *training, test = zip(*copies(n_steps + 1), strict=True)
    for step, (tokens, targets) in enumerate(training):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 20)
        loss = loss_of(tokens, targets, positions)
        optimizer.zero_grad()
        loss.backward()
        _add_up(model, world_size)
        optimizer.step()
        losses.append(_sum(loss, world_size))
    with torch.no_grad():
        counted = {"right": positions, "from 0": torch.arange(len(positions))}
        tested = {name: _sum(loss_of(*test, at), world_size) for name, at in counted.items()}
    return {"losses": losses, **tested}


def _add_up(model: nn.Module, world_size: int) -> None:
    """Sum all gradients over the ranks: each has those of its own positions."""
    if world_size > 1:
        flat = nn.utils.parameters_to_vector(p.grad for p in model.parameters() if p.grad is not None)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat, (p.grad for p in model.parameters() if p.grad is not None))


def _sum(loss: Tensor, world_size: int) -> float:
    total = loss.detach().clone()
    if world_size > 1:
        dist.all_reduce(total)
    return total.item()
