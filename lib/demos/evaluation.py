"""Small models of the language reference for chapter 27, questions made from it, programs, and a reader of digits."""

import gzip
import lzma
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lib.evaluation import (
    bits_per_byte,
    choose_answer,
    encode_pair,
    few_shot_prompt,
    loglikelihood,
    run_program,
)
from lib.given.data.images import load_images, normalize_digits
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.llama import LlamaConfig
from lib.given.models.vit import TINY
from lib.gpt2 import GPT2
from lib.llama import Llama
from lib.optimizers import Muon, split_parameters
from lib.tokenization import BPETokenizer, train_bpe
from lib.training import AdamW, cross_entropy
from lib.vit import VisionTransformer

LENGTH, BATCH = 128, 4
PREFIX = 0  # the byte 0, which the text does not have
NORMALIZATIONS = ("sum", "token", "byte", "unconditional")


@dataclass(eq=False)
class Trained:
    """A model with its tokenizer; equal only to itself, so that its scores can be kept.

    Attributes:
        model: Takes tokens, and returns logits or a tuple that begins with them.
        encode: Text to ids.
        token_bytes: Bytes of each id, ``[V]``.
        loss: Last loss of training, nats a token.
    """

    model: nn.Module
    encode: Callable[[str], list[int]]
    token_bytes: Tensor
    loss: float

    def bits(self, text: str, context_len: int = LENGTH // 2) -> float:
        """Bits per byte of a text."""
        return bits_per_byte(self.model, self.encode(text), self.token_bytes, PREFIX, LENGTH, context_len)


@cache
def paragraphs() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(section title, paragraph) of the language reference, to train on and held out: every eighth paragraph is."""
    from pydoc_data.topics import topics

    found = []
    for topic in topics.values():
        title, _, body = topic.partition("\n")
        pieces = (" ".join(piece.split()) for piece in body.split("\n\n"))
        found += [(title.replace('"', ""), piece) for piece in pieces if 20 <= len(piece.split()) <= 200]
    return [p for i, p in enumerate(found) if i % 8], found[::8]


@cache
def held_out() -> str:
    return "\n\n".join(text for _, text in paragraphs()[1])


@cache
def training_text() -> str:
    """Each paragraph, and the section that it is from."""
    return "".join(f"{text}\nSection: {title}\n\n" for title, text in paragraphs()[0])


@cache
def trained() -> dict[str, Trained]:
    """A tiny GPT-2 with a vocabulary of 512, and a tiny Llama with one of 4,096, trained for as many bytes."""
    gpt2 = GPT2Config(vocab_size=512, context_len=LENGTH, dim=64, n_layers=2, n_heads=2)
    llama = LlamaConfig(
        vocab_size=4096, dim=64, n_layers=2, n_heads=2, hidden_dim=176, multiple_of=16, context_len=LENGTH
    )
    torch.manual_seed(0)
    return {
        "GPT-2, V = 512": _train(GPT2(gpt2), 512, 200),
        "Llama, V = 4,096": _train(Llama(llama), 4096, 60),
    }


def _train(model: nn.Module, vocab_size: int, n_steps: int) -> Trained:
    vocab, merges = train_bpe(training_text(), vocab_size)
    encode = BPETokenizer(vocab, merges).encode
    row = torch.tensor(encode(training_text()))
    matrices, others = split_parameters(model)
    optimizers = [Muon(matrices, lr=3e-2, ns_dtype=torch.float32), AdamW(others, lr=3e-3, betas=(0.9, 0.95))]
    peaks, generator = [3e-2, 5e-3], torch.Generator().manual_seed(0)
    for step in range(n_steps):
        starts = torch.randint(len(row) - LENGTH - 1, (BATCH, 1), generator=generator)
        window = row[starts + torch.arange(LENGTH + 1)]
        logits = model(window[:, :-1])
        loss = cross_entropy(logits[0] if isinstance(logits, tuple) else logits, window[:, 1:])
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 10, 2 * (n_steps - step) / n_steps)
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    sizes = torch.tensor([len(vocab[i]) for i in range(len(vocab))])
    return Trained(model.eval(), encode, sizes, loss.item())


def compressed(chosen: str | None = None) -> dict[str, float]:
    """Bits per byte of a text, by default the held-out one, in gzip and xz, alone and after the training text."""
    text, before = (held_out() if chosen is None else chosen).encode(), training_text().encode()
    found = {}
    for name, pack in (("gzip", gzip.compress), ("xz", lzma.compress)):
        found[name] = 8 * len(pack(text)) / len(text)
        found[f"{name} after the training text"] = 8 * (len(pack(before + text)) - len(pack(before))) / len(text)
    return found


# ---- questions -------------------------------------------------------------------------------------------------------


@cache
def questions(n: int = 150) -> list[dict[str, Any]]:
    """Which of four sections a held-out paragraph is from; only its first 25 words are shown."""
    rng, titles = random.Random(0), sorted({title for title, _ in paragraphs()[0]})
    found = []
    for title, text in rng.sample(paragraphs()[1], len(paragraphs()[1])):
        if title in titles:
            choices = [title, *rng.sample([t for t in titles if t != title], 3)]
            rng.shuffle(choices)
            query = " ".join(text.split()[:25]) + "\nSection:"
            found.append({"query": query, "choices": choices, "gold": choices.index(title), "section": title})
    return found[:n]


@cache
def _scored(run: Trained, n_shots: int = 0) -> tuple[list[tuple[list[int], list[int]]], list[float]]:
    """Ids of each question with each of its four choices, and their log-likelihoods."""
    asked, pairs = questions(), []
    for i in range(len(asked)):
        context, continuations = few_shot_prompt(asked, i, n_shots)
        pairs += [encode_pair(run.encode, context, c) for c in continuations]
    return pairs, [score for score, _ in loglikelihood(run.model, pairs, LENGTH)]


@cache
def _unconditional(run: Trained) -> list[float]:
    """The log-likelihood of each choice without its question."""
    alone = [encode_pair(run.encode, "Section:", " " + c) for q in questions() for c in q["choices"]]
    return [score for score, _ in loglikelihood(run.model, alone, LENGTH)]


def answers(run: Trained, n_shots: int = 0) -> dict[str, list[int]]:
    """For each normalization, the choice that a model takes for each question."""
    asked, (pairs, scores), unconditional = questions(), _scored(run, n_shots), _unconditional(run)
    found: dict[str, list[int]] = {name: [] for name in NORMALIZATIONS}
    for i, question in enumerate(asked):
        four = slice(4 * i, 4 * i + 4)
        n_tokens, n_bytes = [len(c) for _, c in pairs[four]], [len(c.encode()) for c in question["choices"]]
        for name in NORMALIZATIONS:
            found[name].append(choose_answer(scores[four], name, n_tokens, n_bytes, unconditional[four]))
    return found


def right(chosen: list[int]) -> list[int]:
    """1 for each question that is answered correctly."""
    return [int(c == q["gold"]) for c, q in zip(chosen, questions(), strict=True)]


def three_tasks(run: Trained) -> tuple[float, float, float]:
    """Accuracy on the questions, on those with two choices only (both by bytes), and on each paragraph's 20th word."""
    asked, two, scores = questions(), [], _scored(run)[1]
    for i, q in enumerate(asked):
        kept = sorted((q["gold"], (q["gold"] + 1) % 4))
        n_bytes = [len(q["choices"][c].encode()) for c in kept]
        two.append(kept[choose_answer([scores[4 * i + c] for c in kept], "byte", n_bytes=n_bytes)] == q["gold"])
    words = [text.split()[:20] for _, text in paragraphs()[1]]
    ends = [encode_pair(run.encode, " ".join(w[:-1]), " " + w[-1]) for w in words]
    written = [greedy for _, greedy in loglikelihood(run.model, ends, LENGTH)]
    four = right(answers(run)["byte"])
    return sum(four) / len(four), sum(two) / len(two), sum(written) / len(written)


# ---- programs --------------------------------------------------------------------------------------------------------

TASKS = {
    "the sum": ("3 4 5", "12", "print(sum(a))"),
    "the largest": ("3 9 5", "9", "print(max(a))"),
    "sorted": ("3 1 2", "1 2 3", "print(*sorted(a))"),
    "reversed": ("3 1 2", "2 1 3", "print(*a[::-1])"),
    "how many": ("3 1 2 8", "4", "print(len(a))"),
    "the product": ("3 4 5", "60", "import math; print(math.prod(a))"),
    "the second": ("3 4 5", "4", "print(a[1])"),
    "the differences": ("3 4 9", "1 5", "print(*[y - x for x, y in zip(a, a[1:])])"),
    "without copies": ("3 3 1", "3 1", "print(*dict.fromkeys(a))"),
    "the squares": ("3 4", "9 16", "print(*[x * x for x in a])"),
}
WRONG = (
    "print(a)",
    "print(a[0])",
    "print(sum(a) / len(a))",
    "import time; time.sleep(60)",
    "a = 'x' * 10**10",
    "import os; os.remove('/tmp/answers')",
    "import socket; socket.create_connection(('example.org', 80))",
)


def samples(n: int = 10) -> dict[str, list[str]]:
    """n programs for each task, as a model might write them: the k-th task's are right k times in eleven."""
    rng, found = random.Random(1), {}
    for k, (task, (_, _, body)) in enumerate(TASKS.items(), 1):
        bodies = [body if rng.random() < k / 11 else rng.choice(WRONG) for _ in range(n)]
        found[task] = [f"a = list(map(int, input().split()))\n{b}\n" for b in bodies]
    return found


def judged(programs: dict[str, list[str]]) -> dict[str, list[tuple[str, bool]]]:
    """For each program how it ended, and whether it printed what it should."""

    def judge(job: tuple[str, str]) -> tuple[str, bool]:
        given, expected, _ = TASKS[job[0]]
        found = run_program(job[1], given, timeout_s=2.0)
        return found.status, found.status == "ok" and found.stdout.strip() == expected

    jobs = [(task, program) for task, some in programs.items() for program in some]
    with ThreadPoolExecutor(4) as pool:  # most of the time they wait for a program that sleeps
        ends = iter(list(pool.map(judge, jobs)))
    return {task: [next(ends) for _ in some] for task, some in programs.items()}


# ---- digits ----------------------------------------------------------------------------------------------------------


@cache
def digit_logits(n_epochs: int = 3) -> tuple[Tensor, Tensor]:
    """Logits of chapter 5's vision transformer on the test digits, and their labels."""
    torch.manual_seed(0)
    model: Any = VisionTransformer(TINY)
    train, test = load_images("digits", "train"), load_images("digits", "test")
    with torch.no_grad():
        model.embeddings.pos_embed.mul_(50)
    optimizer = AdamW(model.parameters(), lr=2e-3)
    for _ in range(n_epochs):
        for chosen in torch.randperm(len(train)).split(32):
            loss = cross_entropy(model(normalize_digits(train.images[chosen])), train.labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return model.eval()(normalize_digits(test.images)), test.labels


def fitted_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature that gives the labels the largest likelihood, from a grid."""
    grid = torch.logspace(-1, 1, 201)
    return min(grid.tolist(), key=lambda t: cross_entropy(logits / t, labels).item())
