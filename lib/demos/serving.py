"""Short runs of chapter 21: static batches against continuous ones, shared prefixes,
and a small model that drafts for a larger one.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lib.flash_attention import flash_attention
from lib.given.data.corpora import language_reference
from lib.given.models.llama import LlamaConfig
from lib.given.models.serving import Request, next_logits
from lib.llama import Llama
from lib.serving import Engine, PagedCache, PrefixTree, Scheduler, paged_attention, speculative_step

LENGTH, BATCH = 96, 16
TARGET = LlamaConfig(vocab_size=256, dim=96, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=256, context_len=256)
DRAFT = replace(TARGET, dim=48, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=128)


def train(config: LlamaConfig, n_steps: int, seed: int = 0, learning_rate: float = 4e-3) -> Llama:
    """A Llama on the bytes of the language reference."""
    torch.manual_seed(seed)
    model = Llama(config)
    data = torch.frombuffer(bytearray(language_reference().encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=n_steps, pct_start=0.1)
    for _ in range(n_steps):
        start = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=generator)
        window = data[start + torch.arange(LENGTH + 1)]
        loss = torch.nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def prompts(n: int, seed: int = 0, shortest: int = 8, longest: int = 60) -> list[list[int]]:
    """Beginnings of random sentences of the language reference, as bytes, of very different lengths."""
    text, rng = language_reference().encode(), random.Random(seed)
    starts = [rng.randrange(len(text) - longest) for _ in range(n)]
    return [list(text[start : start + rng.randint(shortest, longest)]) for start in starts]


def workload(n: int, seed: int = 0, temperature: float = 0.0, longest: int = 60) -> list[Request]:
    """Requests that ask for 1 to 60 new tokens, most of them for few."""
    rng = random.Random(seed + 1)
    wanted = [min(longest, 1 + int(rng.expovariate(1 / 15))) for _ in range(n)]
    pairs = zip(prompts(n, seed), wanted, strict=True)
    return [Request(prompt, new, temperature=temperature, seed=i) for i, (prompt, new) in enumerate(pairs)]


# ---- batches ---------------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """What serving some requests took.

    Attributes:
        tokens: The new tokens of each request.
        passes: For each pass through the model its rows of tokens.
        useful: For each pass those rows that some request needed, and that no earlier pass had computed.
        finished: For each request the number of rows passed when its last token was known.
    """

    tokens: list[list[int]]
    passes: list[int] = field(default_factory=list)
    useful: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)


def serve_static(requests: Sequence[Request], batch: int) -> Served:
    """Batches of a fixed size, padded on the left to the longest prompt, that last as long as their longest request."""
    served = Served([], finished=[0] * len(requests))
    for first in range(0, len(requests), batch):
        group = list(requests[first : first + batch])
        longest, rounds = max(len(r.tokens) for r in group), max(r.max_new_tokens for r in group)
        for i in range(rounds):
            rows = len(group) * (longest if i == 0 else 1)
            running = [r for r in group if r.max_new_tokens > i]
            served.passes.append(rows)
            served.useful.append(sum(len(r.tokens) if i == 0 else 1 for r in running))
            for place, request in enumerate(group):
                if request.max_new_tokens == i + 1:
                    served.finished[first + place] = sum(served.passes)
    return served


def serve(model: Llama, requests: Sequence[Request], scheduler: Scheduler) -> Served:
    """The same by chapter 21's engine, with all requests submitted at the beginning."""
    served = Served([[] for _ in requests], finished=[0] * len(requests))
    engine, place = Engine(model, scheduler), {request: i for i, request in enumerate(requests)}
    passed = [0]
    embeddings: Any = model.tok_embeddings
    hook = embeddings.register_forward_pre_hook(lambda _, inputs: passed.append(len(inputs[0])))
    for request in requests:
        engine.submit(request)
    furthest = dict.fromkeys(scheduler.waiting, 0)  # most positions computed so far: after a preemption some come again
    while engine.is_busy:
        before = sum(passed)
        new = engine.step()
        served.passes.append(sum(passed) - before)
        served.useful.append(sum(max(0, progress.n_cached - n) for progress, n in furthest.items()))
        furthest = {progress: max(progress.n_cached, n) for progress, n in furthest.items()}
        for request, token in new:
            i = place[request]
            served.tokens[i].append(token)
            served.finished[i] = sum(passed)
    hook.remove()
    return served


# ---- shared prefixes -------------------------------------------------------------------------------------------------


@dataclass
class Chats:
    """What conversations computed: for each turn, the tokens of its prompt and how many of
    them were found in the tree.
    """

    prompts: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    evicted: int = 0


@torch.no_grad()
def chat(model: Llama, n_people: int, n_turns: int, n_blocks: int, block_size: int = 4, remember: bool = True) -> Chats:
    """People who share a long instruction and take turns; each prompt is the whole conversation so far.

    Args:
        remember: Whether blocks are kept in a ``PrefixTree`` after a turn;
            otherwise each turn is computed from its beginning.
    """
    instruction, lines = prompts(1, 7, 80, 80)[0], iter(prompts(n_people * n_turns, 8, 6, 16))
    talks = [list(instruction) for _ in range(n_people)]
    cache, tree, done = PagedCache(model.config, n_blocks, block_size), PrefixTree(block_size), Chats()
    for turn in range(n_people * n_turns):
        talk = talks[turn % n_people]
        talk += next(lines)
        done.prompts.append(len(talk))
        known = tree.acquire(talk[:-1]) if remember else []  # the last token is always computed: its logits are needed
        done.found.append(len(known) * block_size)
        key = list(talk[:-1])
        needed = -(-(len(talk) + 8) // block_size) - len(known)
        for block in tree.evict(needed - cache.allocator.n_free):
            cache.allocator.free(block)
            done.evicted += 1
        sequence, reply = cache.new(known), []
        for _ in range(8):
            reply.append(int(_continue(model, cache, sequence, talk).argmax()))
            talk.append(reply[-1])
        done.replies.append(reply)
        if remember:
            n_whole = cache.lengths[sequence][0] // block_size
            for block in tree.insert(talk[: n_whole * block_size], cache.tables[sequence][:n_whole]):
                cache.allocator.share(block)  # the tree is a user, too
            tree.release(key)
        cache.free(sequence)
    return done


def _continue(model: Llama, cache: PagedCache, sequence: int, tokens: list[int]) -> Tensor:
    """Compute the tokens of a sequence that are not in the cache; returns the logits after the last one."""
    start, end = cache.lengths[sequence][0], len(tokens)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(sequence, layer, k.transpose(0, 1), v.transpose(0, 1))
        if len(q) == 1:
            return paged_attention(q, cache, [sequence], layer)
        return flash_attention(q.transpose(0, 1), *cache.read(sequence, layer), True).transpose(0, 1)

    new, positions = torch.tensor(tokens[start:]), torch.arange(start, end)
    return next_logits(model, new, positions, torch.tensor([len(new) - 1]), attend)[0]


# ---- drafts ----------------------------------------------------------------------------------------------------------


@dataclass
class Drafted:
    """What speculative decoding did: the tokens, and for each pass of the target how many tokens it gave."""

    tokens: list[int] = field(default_factory=list)
    per_pass: list[int] = field(default_factory=list)


@torch.no_grad()
def speculate(
    target: Llama, draft: Llama, prompt: list[int], n_new: int, k: int, temperature: float, seed: int
) -> Drafted:
    """Continue a prompt with drafts of k tokens.

    For shortness neither model keeps a cache: each pass computes everything again.
    """
    generator, done = torch.Generator().manual_seed(seed), Drafted()

    def probabilities(model: Llama, tokens: list[int], n: int) -> Tensor:
        logits = model(torch.tensor([tokens]))[0, -n:]
        if temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return (logits / temperature).softmax(-1)

    config: Any = target.config
    while len(done.tokens) < n_new:
        tokens, rows = prompt + done.tokens, []
        for _ in range(k):
            rows.append(probabilities(draft, tokens, 1)[0])
            tokens = [*tokens, int(torch.multinomial(rows[-1], 1, generator=generator))]
        drafted = torch.tensor(tokens[len(tokens) - k :] if k else [], dtype=torch.int64)
        q = torch.stack(rows) if rows else torch.zeros(0, config.vocab_size)
        new = speculative_step(probabilities(target, tokens, k + 1), q, drafted, generator).tolist()
        done.per_pass.append(len(new))
        done.tokens += new
    done.tokens = done.tokens[:n_new]
    return done


def acceptance(target: Llama, draft: Llama, text: Sequence[list[int]], temperature: float = 1.0) -> float:
    """The mean probability that a drafted token is kept: the sum over tokens of min(p, q), averaged over positions."""
    found = []
    with torch.no_grad():
        for tokens in text:
            p, q = ((model(torch.tensor([tokens]))[0] / temperature).softmax(-1) for model in (target, draft))
            found.append(torch.minimum(p, q).sum(-1).mean())
    return float(torch.stack(found).mean())
