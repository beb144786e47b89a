"""Measure what each of chapter 26's filters buys in held-out bits per byte.

``python -m lib.bench.data`` needs one GPU, some minutes and no network: its text is the sources and documents of the
Python packages that are installed. ``--device cpu --tiny`` tries it. It writes ``chapters/measurements/data.json``.

1. Put known dirt into the text, and predict by chapter 22's law what each filter will save.
2. Train GPT-2s of three sizes on bytes, for the same budget, without a filter, with each alone, and with all.
"""

import argparse
import math
import random
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.bench.kit import record
from lib.bench.optimizers import ENDINGS, HELD_OUT, adamw
from lib.data import ShardReader, deduplicate_lines, gopher_quality, near_duplicates, write_shards
from lib.demos import data as runs
from lib.fast import models as fast
from lib.given.data.record import MEASUREMENTS, load
from lib.given.models.gpt2 import GPT2Config
from lib.gpt2 import GPT2
from lib.runs.flags import ProgramParser, positive, whole
from lib.training import cosine_schedule

SIZES = ((128, 4), (256, 8), (512, 9))
"""Width and layers of the models, three of chapter 22's sweep."""
END, VOCAB = 256, 512
SHARE = 0.15
"""Each kind of dirt has this share of the documents."""
MENU = "Previous topic Next topic This page Show source Report a bug Edit this page\n" * 6


def read_documents(n_bytes: int) -> tuple[list[str], list[str]]:
    """Installed text files, to train on and held out, in an order that is the same on every such machine."""
    parts: tuple[list[str], list[str]] = ([], [])
    total = n = 0
    for path in sorted(p for key in ("stdlib", "purelib") for p in Path(sysconfig.get_paths()[key]).rglob("*")):
        if path.suffix in ENDINGS and total < n_bytes and path.is_file():
            text = path.read_bytes()[: 1 << 15].decode("utf-8", errors="replace")
            if len(text) >= 400:
                parts[n % HELD_OUT == 0].append(text)
                n, total = n + 1, total + len(text)
    return parts


def with_dirt(texts: list[str], seed: int = 0) -> list[str]:
    """The documents with copies, spam and menus, in a random order."""
    rng = random.Random(seed)
    n = max(1, round(SHARE * len(texts)))
    copies = [" ".join([*texts[i].split(" "), f"copy {i}"]) for i in rng.sample(range(len(texts)), n)]
    spam = [" ".join(rng.choices(runs.KEYWORDS, k=600)) for _ in range(n)]
    menus = set(rng.sample(range(len(texts)), n))
    found = [MENU + text if i in menus else text for i, text in enumerate(texts)] + copies + spam
    rng.shuffle(found)
    return found


def without_copies(texts: list[str]) -> list[str]:
    dropped = {i for cluster in near_duplicates(texts, n_hashes=64, n_bands=8) for i in cluster[1:]}
    return [text for i, text in enumerate(texts) if i not in dropped]


def without_spam(texts: list[str]) -> list[str]:
    """Without texts that Gopher's rules on symbols and stop words reject; the corpus is code, so others would fail."""
    limits = {"min_doc_words": 0, "min_avg_word_length": 0, "max_avg_word_length": 10**6, "max_bullet_lines_ratio": 1}
    return [text for text in texts if gopher_quality(text, min_alpha_words_ratio=0, min_stop_words=1, **limits) is None]


def without_menus(texts: list[str]) -> list[str]:
    """Without lines that stand in many documents and are long; code repeats short ones on purpose."""
    long = ["".join(line for line in text.splitlines(keepends=True) if len(line) > 60) for text in texts]
    kept = {line for text in deduplicate_lines(long) for line in text.splitlines()}
    return [
        "".join(line for line in text.splitlines(keepends=True) if len(line) <= 60 or line.splitlines()[0] in kept)
        for text in texts
    ]


FILTERS: dict[str, Callable[[list[str]], list[str]]] = {
    "none": lambda texts: texts,
    "near_duplicates": without_copies,
    "gopher_quality": without_spam,
    "deduplicate_lines": without_menus,
    "all": lambda texts: without_menus(without_spam(without_copies(texts))),
}


def prediction(kept: dict[str, list[str]], o: argparse.Namespace) -> dict[str, float]:
    """Bits per byte that chapter 22's law says each filter saves, with the share of bytes that it removed."""
    corpus = load("scaling_laws")["results"]["corpus"]
    bytes_a_token = corpus["characters"] / corpus["tokens"]
    tokens, whole_size = o.steps * o.batch * o.length / bytes_a_token, sum(map(len, kept["none"]))
    removed = {name: 1 - sum(map(len, texts)) / whole_size for name, texts in kept.items()}
    law = runs.sweep_law()
    return {
        name: runs.predicted_gain(law, tokens, share) / math.log(2) / bytes_a_token for name, share in removed.items()
    }


def bits_per_byte(loss: Callable, held_out: torch.Tensor, o: argparse.Namespace) -> float:
    rows = held_out[: o.eval_rows * (o.length + 1)].view(-1, o.length + 1).to(o.device)
    with torch.no_grad():
        each = [loss(row[:, :-1], row[:, 1:]).item() for row in rows.split(o.batch)]
    return float(np.mean(each)) / math.log(2)


def train(size: tuple[int, int], texts: list[str], held_out: torch.Tensor, o: argparse.Namespace) -> float:
    """Held-out bits per byte after the budget."""
    torch.manual_seed(0)
    dim, n_layers = size
    config = GPT2Config(vocab_size=VOCAB, context_len=o.length, dim=dim, n_layers=n_layers, n_heads=max(1, dim // 64))
    model = GPT2(config).to(o.device)
    path = fast.Path(dtype=torch.bfloat16, kernels=o.device == "cuda", attention="quickest")
    loss: Callable = lambda x, y: fast.gpt2_loss(model, x, y, path)
    loss = torch.compile(loss) if o.device == "cuda" else loss
    optimizer = adamw(list(model.parameters()), o.lr, o)
    with tempfile.TemporaryDirectory() as folder:
        write_shards(folder, (list(text.encode()) for text in texts), 2**24, VOCAB, END)
        reader = ShardReader(folder, o.batch, o.length, seed=0)
        for step in range(o.steps):
            for group in optimizer.param_groups:
                group["lr"] = cosine_schedule(step, o.lr, o.lr / 10, max(1, o.steps // 20), o.steps)
            loss(*(part.to(o.device) for part in next(reader))).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return bits_per_byte(loss, held_out, o)


def gains(o: argparse.Namespace) -> dict[str, Any]:
    """The prediction, printed first, and then the runs."""
    texts, clean = read_documents(round(o.megabytes * 1e6))
    dirty = with_dirt(texts)
    kept = {name: keep(dirty) for name, keep in FILTERS.items()}
    found: dict[str, Any] = {"bytes": {name: sum(map(len, each)) for name, each in kept.items()}}
    found["prediction"] = prediction(kept, o)
    print("predicted gain in bits per byte:", found["prediction"], flush=True)
    held_out = torch.tensor(list("".join(clean).encode()[: o.eval_rows * (o.length + 1)]))
    found["bits_per_byte"] = {}
    for size in SIZES[: 1 if o.tiny else None]:
        name = f"{size[0]} x {size[1]}"
        found["bits_per_byte"][name] = {key: train(size, each, held_out, o) for key, each in kept.items()}
        print(name, found["bits_per_byte"][name], flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="one model only, to try the program")
    parser.add_argument("--steps", type=whole(1), default=1600, help="steps of each training")
    parser.add_argument("--batch", type=whole(1), default=32, help="sequences in a step")
    parser.add_argument("--length", type=whole(16), default=1024, help="bytes in a sequence")
    parser.add_argument("--lr", type=positive, default=1e-3, help="the largest rate")
    parser.add_argument("--eval-rows", type=whole(1), default=512, help="held-out sequences")
    parser.add_argument("--megabytes", type=positive, default=60, help="text that is read at most, before dirt")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the record is written")
    o = parser.parse_args(arguments)
    settings = {name: getattr(o, name) for name in ("tiny", "steps", "batch", "length", "lr", "megabytes", "device")}
    record("data", {"settings": settings, "gains": gains(o)}, o.folder)


if __name__ == "__main__":
    main()
