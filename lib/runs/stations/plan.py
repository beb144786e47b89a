"""What the whole way consists of: the stations of each size, their commands, and what was predicted of them."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lib.runs.data.corpus import has_tokenizer, is_corpus, make_tokenizer, read_facts, read_merges, read_tokens
from lib.runs.data.store import save
from lib.runs.evaluating.answers import marked
from lib.runs.flags import UsageError
from lib.runs.reinforcing.tasks import draw, endless

STATIONS = ("corpus", "pretrain", "tune", "reward", "export")
MODELS = ("pretrain", "tune", "reward")
"""The stations that make a model, which is then evaluated."""
QUESTIONS = "questions"
"""The folder of what every model is asked."""
THINK = "<think>"
FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
         "special_tokens_map.json", "added_tokens.json", "generation_config.json")  # fmt: skip
"""What a folder that is served consists of."""
Prediction = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large every station is.

    Attributes:
        is_embedded: Whether the corpus is the language reference that every Python has, and not Debian's packages.
        corpus, pretrain, tune, reward, evaluate: Flags of the stations' programs.
        task, difficulty: What the model learns to answer.
        n_conversations: Worked answers that it is tuned on.
        n_questions: Held-out questions that it is asked at each station.
        held_out_bytes: Of the held-out text that it predicts at each station, at most.
        needs_gpu: Whether it is too large for a CPU.
        predictions: What its authors expected before they had run it, as intervals, with their reasons.
    """

    is_embedded: bool
    corpus: str
    pretrain: str
    tune: str
    reward: str
    evaluate: str
    task: str
    difficulty: int
    n_conversations: int
    n_questions: int
    held_out_bytes: int
    needs_gpu: bool
    predictions: tuple[Prediction, ...]


def expected(station: str, what: str, low: float, high: float, why: str) -> Prediction:
    """A prediction: at this station, this result lies between two numbers."""
    return {"station": station, "what": what, "low": low, "high": high, "why": why}


TINY = Size(
    is_embedded=True,
    corpus="--clean --vocab 512 --held-out 0.05",
    pretrain="--model tiny --length 128 --batch 8 --steps 400 --optimizer muon --lr 3e-3 --muon-lr 1e-2 --warmup 20 "
    "--eval-every 100 --save-every 50",
    tune="--optimizer muon --lr 3e-3 --muon-lr 1e-2 --batch 8 --steps 60 --warmup 20 --eval-every 30 --save-every 20",
    reward="--new-tokens 40 --prompts 16 --group 8 --steps 80 --lr 1e-4 --lr-warmup 0 --eval-every 40 --save-every 5",
    evaluate="--max-new-tokens 40 --batch-size 32 --shots 3",
    task="sorting",
    difficulty=5,
    n_conversations=4000,
    n_questions=200,
    held_out_bytes=8000,
    needs_gpu=False,
    predictions=(
        expected("pretrain", "bits_per_byte", 2.0, 2.6, "a trial of 150 steps reached 2.6"),
        expected("pretrain", "accuracy", 0.0, 0.05, "the language reference sorts no numbers"),
        expected("tune", "accuracy", 0.3, 0.9, "60 steps are few: a trial's loss was falling still"),
        expected("reward", "gain", 0.05, 0.4, "chapter 29's sums gain 14 points in 30 steps"),
        expected("reward", "bits_per_byte_lost", 0.3, 5.0, "whoever learns one task alone forgets to write"),
    ),
)
SMALL = Size(
    is_embedded=False,
    corpus="--clean --longest 20000",
    pretrain="--model small --length 1024 --batch 64 --steps 3200 --optimizer muon --lr 1e-3 --muon-lr 3e-3 "
    "--schedule wsd --warmup 100 --eval-every 800 --save-every 400 --precision bf16 --compile --graph",
    tune="--lr 1e-4 --batch 32 --length 512 --steps 200 --warmup 20 --eval-every 50 --save-every 100 --precision bf16",
    reward="--new-tokens 128 --prompts 16 --group 8 --steps 80 --lr 2e-5 --micro-batch 64 --eval-every 20 "
    "--save-every 40 --precision bf16",
    evaluate="--max-new-tokens 128 --batch-size 64 --shots 5",
    task="sorting",
    difficulty=9,
    n_conversations=20_000,
    n_questions=1000,
    held_out_bytes=400_000,
    needs_gpu=True,
    predictions=(
        expected("pretrain", "bits_per_byte", 0.75, 1.1, "chapter 22's run of this size: 1.97 nats for 3.3 bytes"),
        expected("pretrain", "accuracy", 0.0, 0.05, "packages of software sort few lists"),
        expected("tune", "accuracy", 0.3, 0.95, "each digit is a token of its own, and 200 steps see 100,000 lists"),
        expected("reward", "gain", 0.01, 0.4, "80 steps of 128 answers, some right: it learns to repeat those"),
        expected("reward", "bits_per_byte_lost", 0.05, 1.0, "less than tiny, because its steps are smaller"),
    ),
)
SIZES = {"tiny": TINY, "small": SMALL}


@dataclass(frozen=True)
class Way:
    """A size in a folder.

    Attributes:
        size: How large.
        folder: Where everything is written.
        own: Folders that take the place of stations, by the station.
        n_gpus: Ranks of pre-training and tuning; 0 without a GPU.
        threads: Of PyTorch on a CPU.
    """

    size: Size
    folder: Path
    own: dict[str, Path]
    n_gpus: int = 0
    threads: int = 1

    @property
    def stations(self) -> list[str]:
        """Those that are run: what stands before a folder of one's own is not needed."""
        return list(STATIONS[max((STATIONS.index(name) for name in self.own), default=0) :])

    def at(self, station: str) -> Path:
        """The folder of a station's result."""
        return self.own.get(station, self.folder / station)

    def commands(self, station: str) -> list[list[str]]:
        """The programs of a station, in order."""
        found = [] if station in self.own or station == "export" else [getattr(self, f"_{station}")()]
        return [*found, self._evaluate(station)] if station in MODELS else found

    def _corpus(self) -> list[str]:
        data = ["--dataset", str(self.folder / "texts.jsonl")] if self.size.is_embedded else []
        return [*program("corpus"), str(self.at("corpus")), *data, *self.size.corpus.split()]

    def _pretrain(self) -> list[str]:
        at = self.at("pretrain")
        places = ["--checkpoint", at / "checkpoint", "--log-file", at / "log.jsonl", "--export", at]
        return [*self._ranks("train_gpt2"), "--data", str(self.at("corpus")), *self.size.pretrain.split(),
                *map(str, places), *self._threads()]  # fmt: skip

    def _tune(self) -> list[str]:
        what = ["--method", "full", "--model", str(self.at("pretrain")), "--data", str(self.folder / "talks.jsonl")]
        return [*self._ranks("finetune"), *what, *self.size.tune.split(), "--out", str(self.at("tune")),
                *self._threads()]  # fmt: skip

    def _reward(self) -> list[str]:
        what = ["--model", self.at("tune"), "--task", self.size.task, "--difficulty", self.size.difficulty]
        return [*program("reinforce"), *map(str, what), *self.size.reward.split(), "--out", str(self.at("reward")),
                *self._threads()]  # fmt: skip

    def _evaluate(self, station: str) -> list[str]:
        results = self.folder / station
        asked = [self.folder / QUESTIONS / f"{self.size.task}.jsonl"]
        if "corpus" in (*self.stations, *self.own):  # else there is no held-out text
            asked.append(self.folder / QUESTIONS / "text.txt")
        found = [*program("evaluate"), "--model", str(self.at(station)), "--tasks", *map(str, asked)]
        found += [] if station == "pretrain" else ["--chat"]
        places = ["--out", results / "evaluation.json", "--examples", results / "examples.md"]
        return [*found, *self.size.evaluate.split(), *map(str, places)]

    def serve(self) -> list[str]:
        """The command that serves the last model."""
        return [*program("serve"), "--model", str(self.at("export")), "--port", "8000"]

    def _ranks(self, name: str) -> list[str]:
        if self.n_gpus < 2:
            return program(name)
        torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(self.n_gpus), "-m", f"lib.runs.{name}"]
        return [*torchrun, "--strategy", "ddp"]

    def _threads(self) -> list[str]:
        return [] if self.n_gpus else ["--threads", str(self.threads)]


def program(name: str) -> list[str]:
    """The beginning of a command."""
    return ["python", "-m", f"lib.runs.{name}"]


def executable(command: list[str]) -> list[str]:
    """A command as this Python runs it, whatever the shell would find."""
    module = command[command.index("-m") + 1 :]
    if command[0] == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *command[1 : -len(module)], "--", *module]
    return [sys.executable, "-m", *module]


# ---- what the programs read ------------------------------------------------------------------------------------------


def prepare(way: Way, station: str) -> None:
    """Write what a station's programs read, if it is not there."""
    if station == "corpus" and way.size.is_embedded:
        from pydoc_data.topics import topics

        _write_lines(way.folder / "texts.jsonl", ({"text": text} for text in topics.values()))
    if station in MODELS:
        write_questions(way)
        (way.folder / station).mkdir(exist_ok=True)
    if station == "tune":
        _write_lines(way.folder / "talks.jsonl", talks(way.size))


def _write_lines(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    if not path.exists():
        save(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def talks(size: Size) -> Iterator[dict[str, Any]]:
    """Conversations with worked answers to questions of the task, none of them held out."""
    for question in islice(endless(size.task, size.difficulty, 0), size.n_conversations):
        says = [question.prompt.removesuffix(THINK), THINK + question.solution]
        roles = ("user", "assistant")
        yield {"messages": [{"role": role, "content": text} for role, text in zip(roles, says, strict=True)]}


def write_questions(way: Way) -> None:
    """Write the held-out questions, and the beginning of the corpus's held-out text if there is a corpus."""
    folder, size = way.folder / QUESTIONS, way.size
    folder.mkdir(exist_ok=True)
    asked = draw(size.task, size.difficulty, size.n_questions, 0, held_out=True)
    rows = ({"query": q.prompt.removesuffix(THINK), "answer": marked(q.solution)} for q in asked)
    _write_lines(folder / f"{size.task}.jsonl", rows)
    corpus = way.at("corpus")
    if not (folder / "text.txt").exists() and is_corpus(str(corpus)):
        save(folder / "text.txt", held_out_text(corpus, size.held_out_bytes).encode())


def held_out_text(corpus: Path, n_bytes: int) -> str:
    """The beginning of the text that the corpus holds out, whose tokens come last in it."""
    facts = read_facts(corpus)
    tokens = read_tokens(corpus)[-facts["held_out_tokens"] :][:n_bytes]  # a token has at least one byte
    tokenizer = make_tokenizer(read_merges(corpus))
    return tokenizer.decode(np.asarray(tokens).tolist()).replace("<|endoftext|>", "\n\n")[:n_bytes]


def check_own(own: dict[str, Path]) -> None:
    """Check that what shall take the place of a station is there.

    Raises:
        UsageError: it is not; the message names the station.
    """
    for station, path in own.items():
        if station == "corpus":
            is_there = is_corpus(str(path)) and has_tokenizer(path)
            expected = "a folder that lib.runs.corpus has written"
        else:
            is_there = (path / "config.json").is_file() or any(path.glob("checkpoint*"))
            expected = "a folder in Transformers' format, or a checkpoint of lib.runs"
        if not is_there:
            raise UsageError(f"--use {station}={path}: expected {expected}")
