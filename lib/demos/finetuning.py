"""Runs of chapter 28: a small GPT-2 reads the language reference, then learns to answer questions made from it."""

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lib.attention import merge_heads, split_heads
from lib.finetuning import (
    LoRALinear,
    NF4Linear,
    accumulate_masked,
    add_lora,
    dpo_loss,
    kl_penalty,
    masked_cross_entropy,
    pack_conversations,
    packed_mask,
    render_chat,
    sequence_log_probs,
)
from lib.given.data.corpora import language_reference
from lib.given.models.gpt2 import GPT2Config
from lib.gpt2 import GPT2
from lib.training import AdamW, clip_gradient_norm_, cosine_schedule, parameter_groups

NAMES = ("bos", *(f"{who}_{end}" for who in ("user", "assistant", "python", "output") for end in ("start", "end")))
SPECIAL = {name: 256 + i for i, name in enumerate(NAMES)}
LENGTH = 192
CONFIG = GPT2Config(vocab_size=256 + len(NAMES), context_len=LENGTH, dim=64, n_layers=2, n_heads=2)
TARGETS = ("c_attn", "c_fc", "c_proj")
KINDS = ("title", "next")
Conversation = list[dict[str, str]]
Rendered = tuple[list[int], list[int]]


def encode(text: str) -> list[int]:
    """Bytes, without markers."""
    return list(text.encode())


def decode(ids: list[int]) -> str:
    """Text of the bytes among the ids; markers are left out."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


# ---- conversations ---------------------------------------------------------------------------------------------------


@cache
def sections() -> dict[str, str]:
    """Text of each section of the reference by its title, in one line each."""
    from pydoc_data.topics import topics

    found = {}
    for text in topics.values():
        title, _, rest = text.partition("\n")
        if len(title) <= 40:
            found[title] = " ".join(rest.lstrip("*=-\n").split())
    return found


@cache
def conversations() -> tuple[list[tuple[str, Conversation]], list[tuple[str, Conversation]]]:
    """Pairs of a kind and a conversation: to train on, and, from every eighth place in the text, held out.

    A "title" has a short answer, the section from which a line comes; a "next" has a long one, the 64 characters that
    follow.
    """
    parts: tuple[list, list] = ([], [])
    for title, text in sections().items():
        for place, start in enumerate(range(0, min(len(text), 1500) - 96, 96)):
            line, more = text[start : start + 32], text[start + 32 : start + 96]
            pairs = (("title", f"Which section says: {line}", title), ("next", f"Go on: {line}", more))
            for kind, question, answer in pairs:
                turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                parts[place % 8 == 7].append((kind, turns))
    for part, order in zip(parts, (1, 2), strict=True):
        shuffled = torch.randperm(len(part), generator=torch.Generator().manual_seed(order)).tolist()
        part[:] = [part[i] for i in shuffled]
    return parts


def rendered(kind: str | None = None, held_out: bool = False, everything: bool = False) -> list[Rendered]:
    """Conversations as ids and masks; with ``everything`` each token is learned."""
    found = [render_chat(turns, encode, SPECIAL) for k, turns in conversations()[held_out] if kind in (None, k)]
    return [(ids, [1] * len(ids)) for ids, _ in found] if everything else found


# ---- the model -------------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Chapter 6's GPT-2 on packed rows: each conversation sees itself only, and its positions begin at 0."""

    def __init__(self, model: GPT2):
        super().__init__()
        self.model: Any = model

    def forward(self, rows: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` of rows ``[3, B, T]``: inputs, documents and positions."""
        inputs, documents, positions = rows
        mask = packed_mask(documents)
        x = self.model.wte(inputs) + self.model.wpe(positions)
        for block in self.model.h:
            q, k, v = (split_heads(part, CONFIG.n_heads) for part in block.attn.c_attn(block.ln_1(x)).chunk(3, dim=-1))
            heads = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + block.attn.c_proj(merge_heads(heads))
            x = x + block.mlp(block.ln_2(x))
        return (self.model.ln_f(x) @ self.model.wte.weight.T)[..., : CONFIG.vocab_size]


@cache
def _pretrained(n_steps: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = GPT2(CONFIG)
    text = torch.tensor(list(language_reference().encode()))
    generator = torch.Generator().manual_seed(0)

    def batches() -> Iterator[list[tuple[Tensor, Tensor]]]:
        while True:
            window = text[torch.randint(len(text) - 121, (8, 1), generator=generator) + torch.arange(121)]
            yield [(window[:, :-1], window[:, 1:])]

    train(model, batches(), n_steps, lr=3e-3)
    return model.state_dict()


def pretrained(n_steps: int = 200) -> GPT2:
    """A model that has read the reference's bytes, and no marker."""
    model = GPT2(CONFIG)
    model.load_state_dict(_pretrained(n_steps))
    return model


# ---- training --------------------------------------------------------------------------------------------------------


def mean_of_means(model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Adds the gradient of the mean of the micro-batches' means, which weighs short answers more."""
    total = torch.zeros(())
    for inputs, targets in micro_batches:
        loss = masked_cross_entropy(model(inputs), targets) / len(micro_batches)
        loss.backward()
        total += loss.detach()
    return total


def train(
    model: nn.Module, batches: Iterator, n_steps: int, lr: float, step_of: Callable[..., Tensor] = accumulate_masked
) -> list[float]:
    """Losses of ``n_steps`` of AdamW with a warm-up and a cosine; only what requires a gradient is trained."""
    trained = nn.ParameterList(p for p in model.parameters() if p.requires_grad)
    optimizer, losses = AdamW(parameter_groups(trained, 0.0), lr=lr, betas=(0.9, 0.95)), []
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = cosine_schedule(step + 1, lr, 0.1 * lr, n_steps // 10, n_steps)
        optimizer.zero_grad()
        losses.append(step_of(model, next(batches)).item())
        clip_gradient_norm_(trained.parameters(), 1.0)
        optimizer.step()
    return losses


@cache
def packed(kind: str, everything: bool = False, held_out: bool = False) -> dict[str, Tensor]:
    """The conversations of one kind in rows of ``LENGTH``."""
    return pack_conversations(rendered(kind, held_out, everything), LENGTH)


def micro_batches(rows: dict[str, Tensor], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One packed row after the other, drawn at random: ``[3, 1, T]`` and its targets."""
    generator, inputs = torch.Generator().manual_seed(seed), as_input(rows)
    while True:
        i = torch.randint(inputs.shape[1], (1,), generator=generator)
        yield inputs[:, i], rows["targets"][i]


def as_input(rows: dict[str, Tensor]) -> Tensor:
    """What `Packed` takes, ``[3, B, T]``."""
    return torch.stack([rows[k] for k in ("inputs", "documents", "positions")])


def by_kind(everything: bool = False) -> Iterator[list]:
    """Two micro-batches a step: one with short answers, and one with long ones."""
    parts = [micro_batches(packed(kind, everything), seed) for seed, kind in enumerate(KINDS)]
    while True:
        yield [next(part) for part in parts]


@torch.no_grad()
def answer_loss(model: GPT2, kind: str) -> float:
    """Mean loss over the answers of the held-out conversations of one kind, in nats a byte."""
    rows = packed(kind, held_out=True)
    return masked_cross_entropy(Packed(model)(as_input(rows)), rows["targets"]).item()


def compare_losses(n_steps: int = 200, lr: float = 2e-3) -> dict[str, dict[str, Any]]:
    """The same model tuned with three losses: what each gives on the held-out answers, and the model."""
    settings = {
        "all tokens": (True, accumulate_masked),
        "answers": (False, accumulate_masked),
        "answers, mean of means": (False, mean_of_means),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, (everything, step_of) in settings.items():
        model = pretrained()
        losses = train(Packed(model), by_kind(everything), n_steps, lr, step_of)
        found[name] = {"model": model, "losses": losses} | {kind: answer_loss(model, kind) for kind in KINDS}
    return found


def tune_adapters(r: int, over_nf4: bool = False, n_steps: int = 200, lr: float = 1e-2) -> dict[str, Any]:
    """LoRA of rank ``r`` on all matrices of the blocks: losses, and the bytes that training holds.

    Args:
        r: Rank.
        over_nf4: Whether the matrices are rounded to four bits first.
        n_steps: Steps.
        lr: Largest rate.
    """
    model: Any = pretrained()
    if over_nf4:
        for part in (module for block in model.h for module in (block.attn, block.mlp)):
            for name, layer in list(part.named_children()):
                setattr(part, name, NF4Linear(layer))
    torch.manual_seed(0)
    add_lora(model, r, 2 * r, TARGETS)
    losses = train(Packed(model), by_kind(), n_steps, lr)
    return {"model": model, "losses": losses, **bytes_held(model)} | {kind: answer_loss(model, kind) for kind in KINDS}


def bytes_held(model: nn.Module) -> dict[str, int]:
    """Bytes of the weights, and of gradients with AdamW's two moments, read off the tensors."""
    weights = sum(x.numel() * x.element_size() for x in [*model.parameters(), *model.buffers()])
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"weights": weights, "trained": trained, "gradients and optimizer": 12 * trained}


def merge_all(model: nn.Module) -> None:
    """Merge every adapter into its weight."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.merge()


# ---- answers ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(model: GPT2, prompts: list[list[int]], n_tokens: int, temperature: float, seed: int = 0) -> list[list[int]]:
    """Answers to prompts, up to ``assistant_end`` or ``n_tokens``; at temperature 0 the likeliest tokens."""
    generator, ids = torch.Generator().manual_seed(seed), [list(prompt) for prompt in prompts]
    done = [False] * len(ids)
    for _ in range(n_tokens):
        width = max(map(len, ids))
        logits = model(torch.tensor([row + [0] * (width - len(row)) for row in ids]))[0]
        last = logits[torch.arange(len(ids)), torch.tensor([len(row) - 1 for row in ids])]
        if temperature:
            picked = torch.multinomial((last / temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            picked = last.argmax(-1)
        for i, token in enumerate(picked.tolist()):
            if not done[i]:
                ids[i].append(token)
            done[i] = done[i] or token == SPECIAL["assistant_end"]
        if all(done):
            break
    return [row[len(prompt) :] for row, prompt in zip(ids, prompts, strict=True)]


def prompts(n: int, held_out: bool = True) -> list[tuple[list[int], str]]:
    """Prompts that ask for a title, with the right answers."""
    chosen = [turns for kind, turns in conversations()[held_out] if kind == "title"][:n]
    return [
        (render_chat(turns[:1], encode, SPECIAL, add_generation_prompt=True)[0], turns[1]["content"])
        for turns in chosen
    ]


# ---- preferences -----------------------------------------------------------------------------------------------------


def padded(rows: list[Rendered]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of conversations, one a row, padded on the right."""
    length = max(len(ids) for ids, _ in rows) - 1
    alone = [pack_conversations([row], length) for row in rows]
    return torch.cat([row["inputs"] for row in alone]), torch.cat([row["targets"] for row in alone])


def _pairs() -> list[tuple[Tensor, Tensor]]:
    """Twenty-four questions with the right title, and the same ones with the title of another question."""
    titles = [turns for kind, turns in conversations()[0] if kind == "title"][:24]
    wrong = [[turns[0], titles[i - 12][1]] for i, turns in enumerate(titles)]
    render = partial(render_chat, encode=encode, special=SPECIAL)
    return [padded([render(turns) for turns in part]) for part in (titles, wrong)]


def prefer(model: GPT2, n_steps: int = 60, beta: float = 0.1, lr: float = 1e-3) -> list[dict[str, Any]]:
    """DPO from a tuned model, eight pairs a step.

    Every 15 steps: the loss and both rewards over all pairs, and the estimators on answers drawn from the policy.
    """
    policy, reference = copy.deepcopy(model), copy.deepcopy(model).requires_grad_(False)
    optimizer, generator = AdamW(policy.parameters(), lr=lr, weight_decay=0.0), torch.Generator().manual_seed(0)
    sides, found = _pairs(), list[dict[str, Any]]()
    kept = [sequence_log_probs(reference(x)[0], targets) for x, targets in sides]

    def losses_of(chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        now = [sequence_log_probs(policy(x[chosen])[0], targets[chosen]) for x, targets in sides]
        before = [logps[chosen] for logps in kept]
        return dpo_loss(now[0], now[1], before[0], before[1], beta=beta)

    for step in range(n_steps + 1):
        if step % 15 == 0:
            with torch.no_grad():
                means = [x.mean().item() for x in losses_of(torch.arange(len(kept[0])))]
            named = dict(zip(("loss", "chosen", "rejected"), means, strict=True))
            found.append({"step": step, **named, "margin": means[1] - means[2], **estimates(policy, reference)})
        optimizer.zero_grad()
        losses_of(torch.randint(len(kept[0]), (8,), generator=generator))[0].mean().backward()
        optimizer.step()
    return found


@torch.no_grad()
def estimates(policy: GPT2, reference: GPT2, n: int = 32) -> dict[str, Any]:
    """Divergence of the policy from the reference, a token: exact over the vocabulary, and by three estimators.

    Each estimator is a pair: the mean over the sampled tokens, and the deviation of one token.
    """
    asked = [ids for ids, _ in prompts(n)]
    answers = sample(policy, asked, 20, temperature=1.0)
    rows = [(a + b, [0] * len(a) + [1] * len(b)) for a, b in zip(asked, answers, strict=True)]
    inputs, targets = padded(rows)
    kept = targets >= 0
    p, q = (model(inputs)[0][kept].log_softmax(-1) for model in (policy, reference))
    exact = (p.exp() * (p - q)).sum(-1).mean().item()
    drawn = [logp.gather(1, targets[kept][:, None])[:, 0] for logp in (p, q)]
    found: dict[str, Any] = {"exact": exact}
    for name in ("k1", "k2", "k3"):
        values = kl_penalty(drawn[0], drawn[1], name)
        found[name] = (values.mean().item(), values.std().item())
    return found
