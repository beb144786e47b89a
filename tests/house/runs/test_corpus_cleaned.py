"""A corpus cleaned by chapter 26's functions: what is dropped, what a killed program repeats, and a run on shards."""

import contextlib
import json
import os
import shutil
import signal
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lib import data
from lib.demos import data as dirt
from lib.evaluation import wilson_interval
from lib.runs.corpus import main
from lib.runs.data import cleaning, gathering
from lib.runs.data.store import Document, Store
from lib.runs.engine.request import parse
from lib.runs.engine.sources import open_tokens
from lib.runs.flags import UsageError
from lib.runs.lock import refuse_if_held
from lib.runs.train_gpt2 import make_gpt2_parser
from tests.house.runs.test_runs import refused, train


@pytest.fixture
def small(monkeypatch):
    """Parts of a few documents, so that there are many."""
    monkeypatch.setattr(cleaning, "PART", 20_000)


def asked(tmp_path: Path, folder: str = "c") -> str:
    """A command line on dirty pages, which are written first."""
    rows, questions = tmp_path / "pages.jsonl", tmp_path / "q.jsonl"
    rows.write_text("".join(json.dumps({"text": page}) + "\n" for page in dirt.dirty().pages))
    made = [{"query": text, "choices": ["yes", "no"], "gold": 0} for text in dirt.SENTENCES]
    questions.write_text("".join(json.dumps(question) + "\n" for question in made))
    flags = f"--clean --evaluation {questions} --held-out 0.1 --vocab 300 --shard 0.02"
    return f"{tmp_path}/{folder} --dataset {rows} {flags}"


def test_the_steps_find_the_dirt_that_was_put_in(small):
    d = dirt.dirty()
    left, tally = cleaning.cleaned(d.texts, ["personal", "copies", "lines"], dirt.SENTENCES)
    whole = "\n".join(left)
    assert not any(item in whole for item in d.personal)
    assert whole.count(dirt.MENU) == 1
    assert not any(left[i] for i in d.leaks)
    assert {rule for row in tally.steps.values() for rule in row["rules"]} >= {"email", "near_copy", "evaluation"}


def test_parts_change_nothing_of_what_the_functions_say_of_all_documents(small):
    texts = dirt.dirty().texts
    left, _ = cleaning.cleaned(texts, ["copies"])
    later = {i for cluster in data.near_duplicates(texts) for i in cluster[1:]}
    assert later
    assert {i for i, text in enumerate(left) if not text} == later
    each = [cleaning.long_lines(Document("", text)) for text in texts]
    expected = data.deduplicate_lines(["".join(lines) for lines in each], keep="first")
    left, _ = cleaning.cleaned(texts, ["lines"])
    assert ["".join(cleaning.long_lines(Document("", text))) for text in left] == [
        text if after else "" for text, after in zip(expected, left, strict=True)
    ]


def killed(command: str, name: str) -> int:
    """The program in a process that the system kills half-way through a file of this name; the signal."""
    child = os.fork()
    if not child:
        write, program = Path.write_bytes, os.getpid()

        def dies(path, content):
            if path.name == name and os.getpid() == program:
                write(path, content[: len(content) // 2])
                os.kill(program, signal.SIGKILL)
            return write(path, content)

        Path.write_bytes = dies
        os._exit(main(command.split()))
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def unlocked(folder: Path) -> bool:
    """Whether the workers of a killed program, which hold its lock, end within 20 s."""
    for _ in range(100):
        with contextlib.suppress(UsageError):
            refuse_if_held(folder, "c")
            return True
        time.sleep(0.2)
    return False


def test_a_killed_program_goes_on_and_makes_the_same_bytes(tmp_path, small):
    command, folder = asked(tmp_path), tmp_path / "c"
    assert main(command.split()) == 0
    first = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert {"manifest.json", "dropped.md", "shard_00001.bin"} <= set(first)
    shutil.rmtree(folder)
    kept = folder / "work/gathered/part_00002.jsonl"
    assert killed(command, "part_00003.jsonl.part") == signal.SIGKILL
    assert Store(kept.parent).n_parts == 3
    assert unlocked(folder)
    before = kept.stat().st_mtime_ns
    assert killed(command, "shard_00001.bin") == signal.SIGKILL
    assert kept.stat().st_mtime_ns == before, "a finished part is not made again"
    assert not (folder / "manifest.json").exists()
    assert unlocked(folder)
    assert main(command.split()) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == first


def test_the_program_finds_the_pairs_above_its_threshold():
    found = dirt.found_pairs(data.near_duplicates, cleaning.N_BANDS, cleaning.N_HASHES, cleaning.THRESHOLD, 0.8, 300)
    low, _ = wilson_interval(found, 300)
    assert low > 0.95, f"{found} of 300 pairs at the threshold"


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(cleaning, "PART", 30_000)
    peaks = []
    for n in (60, 240):
        rng = np.random.default_rng(0)
        items = ((str(i), " ".join(map(str, rng.integers(10**6, size=160)))) for i in range(n))
        with ThreadPoolExecutor(1) as pool:
            tracemalloc.start()
            store = Store(tmp_path / f"{n}/gathered")
            cleaning.gather(store, gathering.Source("s", "", []), items, ("personal",), (None, None), pool)
            cleaning.steps_after(tmp_path / str(n), store, ["copies", "lines"], ["word " * 20], pool)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0], f"{peaks} bytes at the peak, for one and four times the documents"


def test_a_run_reads_shards_as_it_reads_one_row(tmp_path):
    ids = np.random.default_rng(0).integers(0, 300, 2000)
    data.write_shards(tmp_path / "s", [ids.tolist()], 300, 301, 300)
    options = parse(make_gpt2_parser(), f"--data {tmp_path}/s --length 16 --batch 4 --steps 2 --eval-every 2".split())
    source = open_tokens(options, 512, 16)
    import torch

    source.to(torch.device("cpu"))
    inputs, targets = source.fetch(torch.tensor([3, 40]))
    assert inputs.tolist() == [ids[48:64].tolist(), ids[640:656].tolist()]
    assert targets.tolist() == [ids[49:65].tolist(), ids[641:657].tolist()]
    train(f"gpt2 --data {tmp_path}/s --length 16 --batch 4 --steps 2 --eval-every 2")


def test_wrong_requests_are_one_line(capsys, tmp_path):
    assert main(f"{tmp_path}/c --clean quality,nothing".split()) == 2
    assert "'nothing'" in capsys.readouterr().err
    assert main(f"{tmp_path}/c --evaluation sums".split()) == 2
    assert "--evaluation sums: no question has 13 words" in capsys.readouterr().err
    data.write_shards(tmp_path / "s", [[1] * 200], 50, 300, 299)
    refused(capsys, f"gpt2 --data {tmp_path}/s --steps 1 --prompt a --sample-every 1", "merges.json")
