"""What chapter 24's cells run: associative recall by five kinds of layer, and a hybrid beside full attention."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lib.attention import KVCache
from lib.attention_variants import CausalAttention, hybrid_layer_types
from lib.given.data.corpora import language_reference
from lib.linear_attention import GatedDeltaNet, delta_rule_chunked, linear_attention_chunked
from lib.llama import RMSNorm, SwiGLU
from lib.rope import precompute_rope

# ---- associative recall ----------------------------------------------------------------------------------------------

RULES = ("sum", "decay", "delta", "full attention", "hybrid")
N_VALUES, N_WRITES = 32, 2


class Recall(nn.Module):
    """One layer that reads keys with values, and then keys alone, for which it should return the value written last.

    Queries and keys are rows of one table, so that a key asks for itself.

    Args:
        rule: One of `RULES`; the hybrid adds full attention's answer to the delta rule's.
        n_keys: Number of different keys.
        width: Width Dk of queries and keys.
    """

    def __init__(self, rule: str, n_keys: int, width: int):
        super().__init__()
        self.rule, self.keys, self.values = rule, nn.Embedding(n_keys, width), nn.Embedding(N_VALUES + 1, 32)
        self.gates = nn.Linear(width, 2)  # what is kept at a step, and which share of an error is corrected
        self.sharpness, self.recency = (nn.Parameter(torch.tensor(x)) for x in (2.0, 0.1))
        self.out = nn.Linear(32, N_VALUES)
        nn.init.constant_(self.gates.bias, 3.0)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Logits of the values, ``[B, T, 32]``; ``values`` is 32 at the positions that ask."""
        k, v = F.normalize(self.keys(keys), dim=-1)[:, :, None], self.values(values)[:, :, None]
        writes = (values < N_VALUES)[..., None].float()
        kept, share = torch.sigmoid(self.gates(k[:, :, 0])).chunk(2, -1)
        out: Any = 0
        if self.rule in ("sum", "decay"):
            g = writes * torch.log(kept) if self.rule == "decay" else None
            out = linear_attention_chunked(k, k, v * writes[..., None], g, 1.0)[0]
        if self.rule in ("delta", "hybrid"):
            out = delta_rule_chunked(k, k, v, share * writes, None, 1.0)[0]
        if self.rule in ("full attention", "hybrid"):
            later = torch.arange(keys.shape[1]) * self.recency
            scores = (k[:, :, 0] @ k[:, :, 0].mT) * self.sharpness.exp() + later
            seen = (writes.mT > 0).expand(scores.shape).tril()
            out = out + (torch.softmax(scores.masked_fill(~seen, -1e4), -1) @ v[:, :, 0])[:, :, None]
        return self.out(out[:, :, 0])


def writes(n_keys: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Each key twice with random values, shuffled; then each key once without one; and the last value of each."""
    keys = torch.rand(batch, N_WRITES * n_keys, generator=generator).argsort(-1) % n_keys
    values = torch.randint(N_VALUES, keys.shape, generator=generator)
    asked = torch.arange(n_keys).expand(batch, n_keys)
    places = torch.arange(keys.shape[1])
    last = torch.where(keys[:, None] == asked[..., None], places, -1).amax(-1)
    return torch.cat([keys, asked], 1), F.pad(values, (0, n_keys), value=N_VALUES), values.gather(1, last)


def recall(rule: str, n_keys: int, width: int, n_steps: int = 40, seed: int = 0) -> float:
    """Train on fresh sequences, and return the share of right answers on others."""
    torch.manual_seed(seed)
    generator, model = torch.Generator().manual_seed(seed), Recall(rule, n_keys, width)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(n_steps):
        keys, values, answers = writes(n_keys, 12, generator)
        loss = F.cross_entropy(model(keys, values)[:, -n_keys:].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        keys, values, answers = writes(n_keys, 32, generator)
        return (model(keys, values)[:, -n_keys:].argmax(-1) == answers).float().mean().item()


# ---- a hybrid that writes Python's documentation
# -----------------------------------------------------------------------

LENGTH, BATCH = 128, 4


class Block(nn.Module):
    """A mixer of positions and a SwiGLU, each behind a norm and beside the stream."""

    def __init__(self, dim: int, hidden_dim: int, mixer: nn.Module):
        super().__init__()
        self.mixer_norm, self.mixer, self.ffn_norm, self.ffn = (
            RMSNorm(dim),
            mixer,
            RMSNorm(dim),
            SwiGLU(dim, hidden_dim),
        )

    def forward(self, x: Tensor, rope: Tensor, cache: Any = None) -> Tensor:
        h = self.mixer_norm(x)
        x = x + (self.mixer(h, cache) if isinstance(self.mixer, GatedDeltaNet) else self.mixer(h, rope, cache))
        return x + self.ffn(self.ffn_norm(x))


class ByteModel(nn.Module):
    """Bytes in, logits of the next byte out. ``interval`` 4 is three linear layers to a full one, 1 full layers alone.

    The full model's feed-forward layers are wider by what its attention layers have fewer parameters.
    """

    rope: Tensor

    def __init__(self, interval: int, dim: int = 64, n_layers: int = 4):
        super().__init__()
        self.layer_types = hybrid_layer_types(n_layers, interval, "linear_attention")
        linear = sum(p.numel() for p in GatedDeltaNet(dim, 2, 4, 16, 16).parameters())
        full = sum(p.numel() for p in CausalAttention(dim, 4).parameters())
        wider = 0 if interval > 1 else round((n_layers - n_layers // 4) * (linear - full) / n_layers / (3 * dim))
        self.embed, self.norm, self.head = nn.Embedding(256, dim), RMSNorm(dim), nn.Linear(dim, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(
            Block(
                dim, 160 + wider,
                GatedDeltaNet(dim, 2, 4, 16, 16)
                if kind == "linear_attention"
                else CausalAttention(dim, 4, layout="interleaved"),
            )
            for kind in self.layer_types
        )  # fmt: skip
        self.register_buffer("rope", precompute_rope(dim // 4, 4096), persistent=False)

    def forward(self, tokens: Tensor, caches: list | None = None, start: int = 0) -> Tensor:
        x, rope = self.embed(tokens), self.rope[start : start + tokens.shape[1]]
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, rope, cache)
        return self.head(self.norm(x))

    def make_caches(self, max_len: int) -> list:
        """A state for each linear layer and a cache for each full one, for one sequence."""
        mixers = [block.mixer for block in self.blocks]
        return [m.make_cache(1) if isinstance(m, GatedDeltaNet) else KVCache(1, 4, max_len, 16) for m in mixers]


@dataclass
class Run:
    """A trained model, its losses by step, its loss on text that it has not seen, and the seconds of its training."""

    model: ByteModel
    losses: list[float] = field(default_factory=list)
    held_out: float = math.nan
    seconds: float = 0.0


def windows(data: Tensor, generator: torch.Generator, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Random stretches of the text, and the bytes that follow each of theirs."""
    starts = torch.randint(len(data) - LENGTH - 1, (batch,), generator=generator)
    rows = torch.stack([data[i : i + LENGTH + 1] for i in starts])
    return rows[:, :-1], rows[:, 1:]


def train(interval: int, n_steps: int = 80, seed: int = 0) -> Run:
    """Train on the Python language reference; the last twentieth of it is held out."""
    torch.manual_seed(seed)
    data = torch.frombuffer(bytearray(language_reference().encode()), dtype=torch.uint8).long()
    seen, unseen = data[: len(data) * 19 // 20], data[len(data) * 19 // 20 :]
    run, generator = Run(ByteModel(interval)), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(run.model.parameters(), 4e-3, weight_decay=0.1)
    began = time.perf_counter()
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 10) * (1 - step / n_steps)
        inputs, targets = windows(seen, generator)
        loss = F.cross_entropy(run.model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        optimizer.step()
        run.losses.append(loss.item())
    run.seconds = time.perf_counter() - began
    with torch.no_grad():
        inputs, targets = windows(unseen, torch.Generator().manual_seed(1), 16)
        run.held_out = F.cross_entropy(run.model(inputs).flatten(0, 1), targets.flatten()).item()
    return run


@dataclass
class Written:
    """A text, the bytes of the caches after it, and the milliseconds of each of its characters."""

    text: str
    cache_bytes: int
    ms: list[float]


def write(model: ByteModel, prompt: str, n_characters: int) -> Written:
    """Go on from a prompt, one byte at a time, at temperature 0.8."""
    tokens, generator, ms = list(prompt.encode()), torch.Generator().manual_seed(0), []
    caches = model.make_caches(len(tokens) + n_characters)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), caches)
        for _ in range(n_characters):
            began = time.perf_counter()
            tokens.append(int(torch.multinomial(torch.softmax(logits[0, -1] / 0.8, -1), 1, generator=generator)))
            logits = model(torch.tensor([tokens[-1:]]), caches, len(tokens) - 1)
            ms.append(1e3 * (time.perf_counter() - began))
    return Written(bytes(tokens).decode(errors="replace"), sum(map(_filled_bytes, caches)), ms)


def _filled_bytes(cache: Any) -> int:
    """Bytes that a layer remembers: a state is always full, of a cache only the positions so far count."""
    if isinstance(cache, KVCache):
        return 2 * cache.keys[:, :, : cache.length].nbytes
    return cache.conv_state.nbytes + cache.recurrent_state.nbytes
