"""A corpus from packages and data sets: what is kept, what is held out, what the folder says,
and a run that reads it.
"""

import gzip
import io
import json
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.runs.corpus import main
from lib.runs.data import corpus, gathering
from lib.runs.data.corpus import is_held_out, make_tokenizer
from lib.runs.data.gathering import Seen, Source, clean, files, is_text
from lib.runs.data.store import Document
from lib.runs.engine.log import read_log
from lib.runs.engine.request import parse
from lib.runs.engine.sources import Tokens, open_tokens
from lib.runs.flags import UsageError
from lib.runs.serving import models
from lib.runs.train_gpt2 import make_gpt2_parser
from tests.house.runs.test_runs import refused, train

N = 60
DEP5 = (
    "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\nLicense: "
    "GPL-2+\n\nFiles: doc/*\nLicense: CC-BY-SA-4.0\n some text\n"
)
PROSE = (
    "On Debian systems, see /usr/share/common-licenses/GPL-2. Parts are in the public domain, "
    "others under the BSD license."
)


def words(number: int, n: int = 90) -> str:
    """A text that no other number has."""
    return " ".join(f"word{number}of{i}" + ("\n" if i % 8 == 7 else "") for i in range(n))


def tar_of(texts: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in texts.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return packed.getvalue()


def put(folder: Path, texts: Mapping[str, str | bytes]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.fixture
def packages(monkeypatch):
    """Two packages that share a page, in place of apt's."""
    trees: dict[str, dict[str, str | bytes]] = {
        "guide": {f"usr/share/doc/guide/{i}.txt": words(i) for i in range(N)},
        "code": {"usr/src/a.py": words(900), "usr/src/copy.txt": words(3),
        "usr/src/more.tar.gz": tar_of({"x/b.c": words(901)})},
    }  # fmt: skip

    def unpacked(package: str, folder: Path) -> Source:
        put(folder / "tree", trees[package])
        return Source(package, "1.0", ["MIT"])

    monkeypatch.setattr(gathering, "unpacked", unpacked)


@pytest.fixture
def made(tmp_path, packages) -> Path:
    folder = tmp_path / "made"
    assert main([str(folder), "--packages", "guide", "code", "--held-out", "0.3", "--vocab", "300"]) == 0
    return folder


# ---- clean ----


def test_a_page_loses_its_navigation_and_programs_and_keeps_its_code():
    page = (
        "<html><head><title>T</title></head><nav>menu</nav><h1>Title</h1><p>a   &lt;b&gt;\n c</p><script>var "
        f"x;</script><pre>if x:\n    y</pre><p>{words(1)}</p>"
    )
    found = clean("usr/a.html", page.encode())
    assert found is not None
    assert found.text.startswith("Title\n\na <b> c\n\nif x:\n    y\n\nword1of0")
    assert "menu" not in found.text
    assert "var x" not in found.text


def test_a_manual_page_loses_its_commands():
    found = clean("man/ls.1.gz", f'.TH LS 1\n.\\" a comment\n\\fBls\\fR lists\\&.\n.PP\n{words(2)}'.encode())
    assert found is not None
    assert found.text.startswith("ls lists.\nword2of0")


def test_code_is_told_from_prose_and_is_kept_as_it_is():
    text = f"def f():\r\n    return 1   \r\n\n\n\n\n{words(3)}"
    found = clean("src/a.py", text.encode())
    assert found is not None
    assert found.is_code
    assert found.text.startswith("def f():\n    return 1\n\nword3of0")
    prose = clean("src/a.txt", text.encode())
    assert prose is not None
    assert not prose.is_code


@pytest.mark.parametrize(
    "data",
    [b"too short", b"\xff" * 900, b"0 1 2 3 4 5\n" * 200, ("ж " * 900).encode(), b"word " * 900,
    b"<![bogus[" + b"word word\n" * 90],
    ids=["short", "not UTF-8", "numbers", "another alphabet", "one line", "a broken declaration"],
)  # fmt: skip
def test_what_is_no_english_is_left_out(data):
    assert clean("a.html" if data.startswith(b"<!") else "a.txt", data) is None


def test_foreign_places_are_skipped_and_no_suffix_of_code_is_taken_for_a_language():
    for place in ("usr/locale/a.txt", "doc/index.de.html", "man/da/man1/ls.1", "doc/x_pt_BR.txt", "help/zh-CN/a.page"):
        assert not is_text(place), place
    for place in ("lisp/files.el", "lisp/files.el.gz", "perl/strict.pl", "doc/index.html", "doc/README", "src/id.c"):
        assert is_text(place), place
    assert not is_text("a.png")


def test_broken_archives_are_left_out_and_the_others_are_read(tmp_path):
    whole, zipped = tar_of({"in/a.txt": words(1), "in/a.png": "no"}), io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("b.py", words(2))
    texts = {"good.tar.gz": whole, "c.txt.gz": gzip.compress(b"hello"), "z.zip": zipped.getvalue(), "d.txt": b"text"}
    broken = {
        "cut.tar.gz": whole[:60], "no.zip": b"PK", "no.tar.xz": b"\xfd7zXZ", "bad.txt.gz": b"\x1f\x8bno",
        "cut.txt.gz": gzip.compress(b"x" * 99)[:-9],
    }  # fmt: skip
    put(tmp_path, texts | broken)
    found = dict(files(tmp_path))
    assert set(found) == {"good.tar.gz/in/a.txt", "c.txt.gz", "z.zip/b.py", "d.txt"}
    assert found["c.txt.gz"] == b"hello"
    assert found["good.tar.gz/in/a.txt"].decode() == words(1)


def test_a_block_that_was_seen_before_is_dropped():
    seen, licence = Seen(), "This program is free software. " * 10
    other = licence.replace(". ", ".\n// ")
    first = seen.new_part(Document("a", f"{licence}\n\n{words(1)}"))
    again = seen.new_part(Document("b", f"{other}\n\n{words(2)}\n\nshort\n\nshort"))
    assert first is not None
    assert first.text.startswith(licence)
    assert again is not None
    assert again.text == f"{words(2)}\n\nshort\n\nshort", (
        "other spaces make no other block, and short ones may come again"
    )
    assert seen.new_part(Document("c", f"{licence}\n\n{words(1)}")) is None


# ---- divide ----


@given(st.lists(st.text(max_size=9), min_size=1, max_size=9), st.floats(0.01, 0.99))
@settings(deadline=None, max_examples=30)
def test_the_place_alone_decides_what_is_held_out(places, share):
    held = {place: is_held_out(place, share) for place in places}
    assert held == {place: is_held_out(place, share) for place in reversed(places)}
    assert all(is_held_out(place, min(1.0, share + 0.2)) for place, is_held in held.items() if is_held)


def test_about_the_asked_share_is_held_out():
    n = sum(is_held_out(f"place {i}", 0.1) for i in range(4000))
    assert 340 < n < 460  # three standard deviations


def decoded(folder: Path) -> tuple[list[str], list[str]]:
    """The documents to train on and the held-out ones, from the tokens."""
    facts, tokenizer = corpus.read_facts(folder), make_tokenizer(corpus.read_merges(folder))
    tokens = np.fromfile(folder / "tokens.bin", dtype=np.uint16).tolist()
    n = facts["tokens"] - facts["held_out_tokens"]
    parts = [tokenizer.decode(part).split(corpus.END) for part in (tokens[:n], tokens[n:])]
    assert all(part.pop() == "" for part in parts), "each document ends with the token"
    return parts[0], parts[1]


def test_the_tokens_are_the_documents_and_the_held_out_ones_come_last(made):
    trained, held = decoded(made)
    places = {words(i).strip(): f"guide/usr/share/doc/guide/{i}.txt" for i in range(N)}
    places |= {words(900).strip(): "code/usr/src/a.py", words(901).strip(): "code/usr/src/more.tar.gz/x/b.c"}
    places = {"\n".join(line.rstrip() for line in text.split("\n")): place for text, place in places.items()}
    assert sorted(trained + held) == sorted(places)
    assert not set(trained) & set(held)
    assert [is_held_out(places[text], 0.3) for text in trained + held] == [False] * len(trained) + [True] * len(held)


def test_more_packages_move_no_document_to_the_other_side(made, tmp_path):
    assert main([str(tmp_path / "less"), "--packages", "guide", "--held-out", "0.3", "--vocab", "300"]) == 0
    trained, held = decoded(tmp_path / "less")
    assert set(trained) <= set(decoded(made)[0])
    assert set(held) <= set(decoded(made)[1])


def test_corpus_json_counts_what_was_written(made):
    facts, (trained, held) = corpus.read_facts(made), decoded(made)
    assert 2 * facts["tokens"] == (made / "tokens.bin").stat().st_size
    assert facts["documents"] == len(trained + held) == N + 2
    assert facts["characters"] == sum(map(len, trained + held))
    assert facts["vocab_size"] == 300
    guide, code = facts["sources"]
    assert (guide["name"], guide["documents"], guide["code_characters"]) == ("guide", N, 0)
    assert (code["documents"], code["licences"]) == (2, ["MIT"]), "the page that both have counts once"
    assert code["code_characters"] == code["characters"] > 0
    assert corpus.held_out_share(str(made)) == facts["held_out_tokens"] / facts["tokens"]


@pytest.mark.parametrize(
    ("text", "licences"),
    [(DEP5, ["CC-BY-SA-4.0", "GPL-2+"]), (PROSE, ["BSD license", "GPL-2", "public domain"]),
    ("", ["see the package's copyright file"])],
    ids=["DEP-5", "prose", "nothing"],
)  # fmt: skip
def test_licences_are_read_from_the_copyright_file(monkeypatch, tmp_path, text, licences):
    def run(command, cwd, **_):
        (cwd / "tool_1%3a2.0_all.deb").touch()
        put(cwd / "tree", {"usr/share/doc/tool/copyright": text})
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert gathering.unpacked("tool", tmp_path) == Source("tool", "1:2.0", licences)


def test_a_data_set_of_files_is_read_up_to_the_limit(tmp_path):
    put(tmp_path, {"rows.jsonl": "".join(json.dumps({"body": words(i, 9)}) + "\n" for i in range(40))})
    asked = f"{tmp_path}/c --dataset {tmp_path}/rows.jsonl --column body --limit 30 --held-out 0.3 --vocab 270".split()
    assert main(asked) == 0
    trained, held = decoded(tmp_path / "c")
    assert sorted(trained + held) == sorted(words(i, 9) for i in range(30))


def test_documents_are_cut_to_the_longest(tmp_path):
    long = "".join(words(i, 9) for i in range(60))
    put(tmp_path, {"rows.jsonl": "".join(json.dumps({"text": f"{i} {long}"}) + "\n" for i in range(20))})
    asked = f"{tmp_path}/c --dataset {tmp_path}/rows.jsonl --longest 400 --held-out 0.3 --vocab 270".split()
    assert main(asked) == 0
    trained, held = decoded(tmp_path / "c")
    assert sorted(trained + held) == sorted(f"{i} {long}"[:400] for i in range(20))


# ---- a run on it ----


def test_a_run_evaluates_the_held_out_tokens(made, tmp_path):
    facts = corpus.read_facts(made)
    flags = f"--data {made} --length 16 --batch 4 --steps 2 --eval-every 2"
    options = parse(make_gpt2_parser(), flags.split())
    assert options.held_out == corpus.held_out_share(str(made))
    n = (facts["tokens"] - 1) // 16
    n_held = facts["held_out_tokens"] * n // facts["tokens"] // 4 * 4
    tokens = open_tokens(options, 512, 16)
    assert tokens.n == n
    assert isinstance(tokens, Tokens)
    assert tokens.codec is not None
    assert tokens.codec.decode(tokens.tokens[:200].tolist()) in corpus.END.join(decoded(made)[0])
    assert (n - n_held) * 16 > facts["tokens"] - facts["held_out_tokens"] - 16, "no window of what is trained on"
    from lib.runs.engine.loop import Run

    fetched: list[int] = []
    fetch = Run.fetch

    def noting(self, numbers):
        fetched.extend(numbers.tolist() if not self.strategy.loss.training else [])
        return fetch(self, numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "fetch", noting)
        train(f"gpt2 {flags} --log {tmp_path / 'log'}")
    assert fetched == list(range(n - n_held, n))
    assert len(read_log(tmp_path / "log", "held_out_loss")) == 1


# ---- what is wrong is one line ----


def test_a_run_leaves_its_tokenizer_where_others_find_it(made, tmp_path):
    """Beside its checkpoint, for the server, and beside the exported model, for Transformers."""
    train(f"gpt2 --data {made} --batch 2 --length 16 --steps 2 --checkpoint {tmp_path}/ck --export {tmp_path}/x")
    ours = make_tokenizer(corpus.read_merges(made))
    text = "word3of5 h\N{LATIN SMALL LETTER E WITH ACUTE}\n\t 12<|endoftext|>don't"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "x")
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.ids[b"<|endoftext|>"]
    assert json.loads((tmp_path / "x" / "config.json").read_text())["eos_token_id"] == theirs.eos_token_id
    for place in ("ck", "x"):
        served = models.load(str(tmp_path / place), None, None, torch.float32, torch.device("cpu"))
        assert served.tokenizer.encode(text) == ours.encode(text)
        assert served.tokenizer.end_ids == {theirs.eos_token_id}
    (tmp_path / "ck" / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"no tokenizer\.json and a vocabulary of"):
        models.load(str(tmp_path / "ck"), None, None, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--held-out 0", ("--held-out", "'0'", "between 0 and 1")),
        ("--held-out 2", ("--held-out", "'2'", "between 0 and 1")),
        ("--vocab 100", ("--vocab", "'100'", "257")),
        ("--vocab 70000", ("--vocab 70000", "65536")),
        ("--dataset x --limit 0", ("--limit", "'0'", "at least 1")),
        ("--most 0", ("--most", "'0'", "above 0")),
        ("--dataset nothing.jsonl", ("nothing.jsonl",)),
        ("--dataset {file}.jsonl --vocab 300", ("file.jsonl", "empty file")),
        ("--packages a --dataset b", ("--packages", "--dataset")),
    ],
)
def test_a_wrong_request_is_one_line_and_status_2(capsys, tmp_path, words, said):
    (tmp_path / "file.jsonl").touch()
    wrong(capsys, f"{tmp_path}/c {words.format(file=tmp_path / 'file')}", *said)
    assert not (tmp_path / "c/corpus.json").exists()


def wrong(capsys, command: str, *said: str) -> None:
    assert main(command.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    for word in said:
        assert word in lines[0], (word, lines[0])


def test_too_few_documents_to_divide_are_counted(capsys, tmp_path):
    put(tmp_path, {"one.txt": words(1).replace("\n", "")})
    wrong(capsys, f"{tmp_path}/c --dataset {tmp_path}/one.txt --vocab 300", "1 documents", "to hold out")


def test_what_apt_says_is_one_line(capsys, monkeypatch, tmp_path):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 100, "", "W: a warning\nE: Unable to locate package nosuch\n")

    monkeypatch.setattr(subprocess, "run", run)
    wrong(capsys, f"{tmp_path}/c --packages nosuch", "--packages nosuch", "Unable to locate package nosuch")

    def nothing(command, **_):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", nothing)
    wrong(capsys, f"{tmp_path}/c --packages git-doc", "no apt-get", "--dataset")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_gathered(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(gathering, "unpacked", None)
    (tmp_path / "file").touch()
    wrong(capsys, f"{tmp_path}/file/c", f"{tmp_path}/file/c", "cannot create")
    wrong(capsys, f"{tmp_path}/file", f"{tmp_path}/file", "cannot create")


def test_a_corpus_that_was_not_finished_does_not_look_whole(capsys, made, monkeypatch):
    def fails(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(corpus, "learn_merges", fails)
    wrong(capsys, f"{made} --packages guide --held-out 0.3 --vocab 300", "No space left")
    assert not corpus.is_corpus(str(made))


def test_a_damaged_corpus_and_flags_that_it_excludes_are_refused(capsys, made):
    command = f"gpt2 --data {made} --steps 1"
    refused(capsys, f"{command} --tokenizer bytes", "--tokenizer bytes", str(made), "expected no --tokenizer")
    refused(capsys, f"{command} --limit 3", "--limit 3", "expected no --limit")
    whole = (made / "tokens.bin").read_bytes()
    (made / "tokens.bin").write_bytes(whole[:-2])
    refused(capsys, command, "tokens.bin", f"{len(whole) - 2:,} bytes", f"{len(whole) // 2:,} tokens")
    (made / "tokens.bin").unlink()
    refused(capsys, command, str(made), "no tokens.bin")
    (made / "corpus.json").write_text('{"tokens": 3')
    refused(capsys, f"{command} --eval-every 1", "corpus.json", "damaged")
    refused(capsys, command, "corpus.json", "damaged")


def test_a_corpus_with_more_tokens_than_the_model_is_refused(capsys, made):
    (made / "corpus.json").write_text(json.dumps(corpus.read_facts(made) | {"vocab_size": 600}))
    refused(capsys, f"gpt2 --data {made} --steps 1", "600 different tokens", "512", "--vocab")
