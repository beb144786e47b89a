"""What a person's files and words hold: identity of a run, tables, pictures, class names,
copies, control tokens, flags.
"""

import ast
import io
import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image

from lib.given.data.corpora import load_text, stream_text
from lib.given.data.images import has_test_split, load_images
from lib.ranks import forkserver
from lib.runs import flags
from lib.runs.corpus import main as make_corpus
from lib.runs.data import corpus
from lib.runs.engine import export, state
from lib.runs.engine.sources import Codec
from lib.workbook.book.catalog import ROOT
from tests.house.runs.test_runs import refused, train

# ---- a run and its data ----

TEXT = "the apple is red and the apple is sweet\n" * 60
SMALL = "gpt2 --batch 4 --length 16 --steps 2"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_checkpoint_is_not_continued_on_a_text_that_was_edited(capsys, tmp_path):
    data, folder = tmp_path / "data.txt", tmp_path / "ck"
    data.write_text(TEXT)
    command = f"{SMALL} --data {data} --tokenizer bpe --checkpoint {folder} --quiet"
    train(command)
    before = everything(tmp_path / "ck")
    assert "tokenizer.json" in before
    data.write_text(TEXT.replace("apple", "zebra"))
    refused(capsys, command, f"--checkpoint {folder}", f"--data {data}", "digest")
    refused(capsys, command.replace("bpe", "bytes"), "tokenizer = 'bpe'", "'bytes'")
    assert everything(folder) == before
    data.write_text(TEXT)
    train(command.replace("--steps 2", "--steps 3"))


@pytest.mark.parametrize("change", ["pixel", "label", "name"])
def test_a_checkpoint_is_not_continued_on_pictures_that_were_edited(capsys, tmp_path, change):
    pixels = np.arange(8 * 64, dtype=np.uint8).reshape(8, 8, 8)
    labels, names = [0, 1] * 4, ["cat", "dog"]
    table(tmp_path / "train.parquet", pixels, labels, names)
    command = (
        f"vit --batch 4 --steps 1 --data {tmp_path}/train.parquet --image-size 8 --checkpoint {tmp_path}/ck --quiet"
    )
    train(command)
    pixels[3, 3, 3] ^= change == "pixel"
    table(
        tmp_path / "train.parquet",
        pixels,
        labels[::-1] if change == "label" else labels,
        ["cow", "dog"] if change == "name" else names,
    )
    capsys.readouterr()
    refused(capsys, command, f"--checkpoint {tmp_path}/ck", f"--data {tmp_path}/train.parquet")


def test_a_refused_run_writes_nothing(capsys, tmp_path):
    places = f"--checkpoint {tmp_path}/ck --export {tmp_path}/x --log-file {tmp_path}/logs/log --quiet"
    refused(capsys, f"{SMALL} --data {tmp_path}/nothing.txt {places}", "nothing.txt")
    (tmp_path / "short.txt").write_text("short")
    refused(capsys, f"{SMALL} --data {tmp_path}/short.txt {places}", "too few")
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_a_checkpoint_without_the_digest_can_still_be_continued(tmp_path):
    run = {"data": "words.txt", "contents of the data": "abc"}
    given = {"checkpoint": tmp_path, "checkpoint_flag": "--checkpoint", "steps": 9, "data": "words.txt"}
    options: Any = SimpleNamespace(**given)
    state.check_same_run(options, {"step": 3, "run": {"data": "words.txt"}}, run)
    with pytest.raises(ValueError, match="digest def, now abc"):
        state.check_same_run(options, {"step": 3, "run": run | {"contents of the data": "def"}}, run)


def test_another_runs_tokenizer_does_not_stay_beside_a_model(tmp_path):
    def codec(n_tokens, merges):
        return Codec(encode=lambda text: list(map(ord, text)), decode=str, n_tokens=n_tokens, merges=merges)

    export.write(tmp_path, ({}, {}), codec(257, [(b"a", b"b")]))
    theirs = (tmp_path / "tokenizer.json").read_bytes()
    export.write(tmp_path, ({}, {}), codec(50_257, None))
    assert not (tmp_path / "tokenizer.json").exists()
    assert (tmp_path / "tokenizer.json.old").read_bytes() == theirs


def test_no_earlier_log_is_lost(tmp_path):
    command = f"{SMALL} --data {tmp_path}/data.txt --log-file {tmp_path}/log --lr"
    (tmp_path / "data.txt").write_text(TEXT)
    train(*(f"{command} {lr}" for lr in (1, 2, 3)))
    assert [json.loads((tmp_path / n).read_text().split("\n")[0])["lr"] for n in ("log.old", "log.old2", "log")] == [
        1,
        2,
        3,
    ]


# ---- tables ----


@pytest.mark.parametrize(
    "cell", ["null", "NA", "nan", "", "2024-01-01", "007", "1e5", "True", "a,b", 'say "x"', "l1\nl2", "é"]
)
@pytest.mark.parametrize("start", ["", "\ufeff"], ids=["plain", "BOM"])
def test_a_cell_of_a_csv_is_the_string_that_the_file_has(tmp_path, cell, start):
    quoted = '"' + cell.replace('"', '""') + '"'
    (tmp_path / "a.csv").write_bytes(f"{start}n,text\r\n1,{quoted}\r\n2,{quoted}\r\n".encode())
    assert list(stream_text(tmp_path / "a.csv", progress=False)) == [cell, cell]


@pytest.mark.parametrize("text", ["2024-01-01", "2024-01-01T00:00:00Z", "12", "null", "true"])
@pytest.mark.parametrize("listed", [False, True], ids=["lines", "list"])
def test_a_string_of_json_stays_a_string(tmp_path, text, listed):
    rows = [{"text": text, "n": n} for n in (1, "x", None, [2])]
    written = json.dumps(rows) if listed else "\n\n".join(map(json.dumps, rows))
    (tmp_path / "a.json").write_text(written)
    assert list(stream_text(tmp_path / "a.json", progress=False)) == [text] * 4


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', r"row 2: column 'text' holds 3 \(int\), expected text"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": null}\n', r"row 3: column 'text' holds nothing \(null\)"),
        ("a.jsonl", b'{"text": "x"}\nnull\n', r"row 2: nothing \(null\), expected an object"),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', r"row 2: no JSON"),
        ("a.jsonl", b'{"text": "a\\ud800b"}\n', r"row 1: .*\\ud800, half of a surrogate pair"),
        ("a.json", b'[{"text": "x"}, {"txt": "y"}]', r"row 2: no text in column 'text'; .*'txt'"),
        ("a.csv", b"text,n\nx,1\ny\n", r"row 2: 1 cells, expected one for each of the 2 columns"),
        ("a.csv", b'text,n\nx,1\n"y,2\n', r"row 2: .*quotation mark"),
        ("a.csv", b"text,text\nx,1\n", r"2 columns are called 'text'"),
        ("a.csv", b"", r"a\.csv is empty"),
        ("a.csv", b"text\nok\n\xff\n", r"a\.csv, row 3, byte 0 of the row: 0xff"),
        ("a.parquet", b"PAR1 and no more", r"row 1: the file cannot be read"),
    ],
)
def test_a_row_without_text_is_named_with_its_file(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=said) as refusal:
        list(stream_text(tmp_path / name, progress=False))
    assert str(tmp_path / name) in str(refusal.value)


def test_a_shard_whose_column_has_another_name_or_type_is_named(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["x", "y"]}), tmp_path / "0.parquet")
    for odd, said in (
        ({"body": ["z"]}, r"1\.parquet, row 1: no text in column 'text'"),
        ({"text": [1]}, r"1\.parquet, row 1: .*1 \(int\)"),
    ):
        parquet.write_table(pyarrow.table(odd), tmp_path / "1.parquet")
        with pytest.raises(ValueError, match=said):
            list(stream_text(tmp_path, progress=False))


def test_a_byte_order_mark_is_no_text_and_lines_end_in_any_way(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\n".encode())
    assert load_text(tmp_path / "a.txt") == "one\r\ntwo\n"
    assert list(stream_text(tmp_path / "a.txt", progress=False)) == ["one", "two"]


def test_a_long_cell_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + "word " * 100_000)
    assert [len(text) for text in stream_text(tmp_path / "a.csv", progress=False)] == [500_000]


# ---- copies that tools leave ----

COPIES = (".ipynb_checkpoints/train-checkpoint", "__MACOSX/train", ".train", "sub/.git/train", "~$train", "._train")


def test_hidden_files_and_folders_are_not_read_and_counted(capsys, tmp_path):
    for place in ("train", "sub/train", *COPIES):
        path = tmp_path / f"{place}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{place}\n")
    assert list(stream_text(tmp_path, progress=False)) == ["sub/train", "train"]
    assert f"{tmp_path}: 6 hidden files" in capsys.readouterr().err


def test_hidden_pictures_are_not_read(tmp_path):
    for place in ("train", *COPIES[:2]):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        table(tmp_path / f"{place}.parquet", np.zeros((2, 4, 4), np.uint8), [0, 1], ["a", "b"])
    assert len(load_images(tmp_path)) == 2
    (tmp_path / ".ipynb_checkpoints/test-checkpoint.parquet").touch()
    assert not has_test_split(tmp_path)


# ---- pictures ----


def table(path: Path, pixels, labels, names=None, picture=None) -> Path:
    """A parquet file as ``datasets`` writes it, with these pictures (arrays or files' bytes) and classes."""

    def data(one) -> bytes:
        if isinstance(one, bytes):
            return one
        file = io.BytesIO()
        Image.fromarray(one).save(file, "png")
        return file.getvalue()

    rows = {"img": [{"bytes": data(one), "path": None} for one in pixels], "label": labels}
    kinds = {"img": ImageFeature(), "label": ClassLabel(names=names)} if names else {"img": ImageFeature()}
    made = Dataset.from_dict(rows, features=Features(kinds)) if names else Dataset.from_dict(rows)
    made.to_parquet(str(path))
    return path


def saved(picture: Image.Image, kind: str = "png", **settings) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **settings)
    return file.getvalue()


def read(tmp_path: Path, data: bytes) -> np.ndarray:
    return load_images(table(tmp_path / "a.parquet", [data], [0], ["a"])).images[0].numpy()


@pytest.mark.parametrize("kind", ["png", "tiff", "ppm"])
def test_sixteen_bits_are_scaled_by_their_range(tmp_path, kind):
    values = (np.arange(64, dtype=np.uint16) * 1040).reshape(8, 8)
    found = read(tmp_path, saved(Image.fromarray(values), kind))
    assert found.shape == (1, 8, 8)
    np.testing.assert_allclose(found[0], values / 65_535, atol=1e-7)


def test_modes_of_eight_bits_and_of_one(tmp_path):
    gray = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    colour = np.stack([gray, gray[::-1], gray.T], 2)
    opaque = np.full_like(gray, 255)
    one = Image.fromarray(gray).convert("1", dither=Image.Dither.NONE)
    np.testing.assert_array_equal(read(tmp_path, saved(one))[0], np.array(one))
    np.testing.assert_allclose(
        read(tmp_path, saved(Image.fromarray(np.dstack([gray, opaque])))), gray[None] / 255, atol=1e-7
    )
    for picture in (Image.fromarray(np.dstack([colour, opaque])), Image.fromarray(colour).quantize(64)):
        expected = np.array(picture.convert("RGB")).transpose(2, 0, 1) / 255
        np.testing.assert_allclose(read(tmp_path, saved(picture)), expected, atol=1e-7)
    cyan = Image.new("CMYK", (4, 4), (255, 0, 0, 0))
    np.testing.assert_allclose(read(tmp_path, saved(cyan, "tiff"))[:, 0, 0], [0, 1, 1], atol=1e-6)


def test_a_picture_stands_as_its_orientation_says(tmp_path):
    pixels = np.zeros((4, 8), np.uint8)
    pixels[0, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    found = read(tmp_path, saved(Image.fromarray(pixels), exif=exif))
    assert found.shape == (1, 8, 4)
    assert found[0, 0, 3] == 1


def palette_with_a_hole() -> Image.Image:
    picture = Image.new("P", (4, 4))
    picture.putpalette([255, 0, 0, 0, 255, 0])
    picture.info["transparency"] = 0
    return picture


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: saved(Image.new("RGBA", (4, 4), (9, 9, 9, 0))), "RGBA with transparent pixels"),
        (lambda: saved(Image.new("LA", (4, 4), (9, 100))), "LA with transparent pixels"),
        (lambda: saved(palette_with_a_hole(), transparency=0), "P with transparent pixels"),
        (lambda: saved(Image.new("F", (4, 4), 0.5), "tiff"), "mode F"),
        (lambda: saved(Image.new("I", (4, 4), 70_000), "tiff"), "mode I"),
        (
            lambda: saved(Image.new("L", (4, 4)), "gif", save_all=True, append_images=[Image.new("L", (4, 4), 9)]),
            "2 pictures",
        ),
        (lambda: saved(Image.new("L", (4, 4)), save_all=True, append_images=[Image.new("L", (4, 4), 9)]), "2 pictures"),
    ],
    ids=["RGBA", "LA", "P", "F", "I", "GIF", "APNG"],
)
def test_a_picture_that_no_range_fits_is_refused_by_its_mode(tmp_path, data, said):
    with pytest.raises(ValueError, match=rf"a\.parquet, row 1: .*{said}"):
        read(tmp_path, data())


# ---- classes ----

BLACK = np.zeros((2, 4, 4), np.uint8)


def test_classes_are_matched_by_their_names(tmp_path):
    table(tmp_path / "train-0.parquet", BLACK, [0, 2], ["cat", "cow", "dog"])
    table(tmp_path / "train-1.parquet", BLACK, [0, 1], ["dog", "cat"])
    found = load_images(tmp_path)
    assert found.labels.tolist() == [0, 2, 2, 0]
    assert found.classes == ("cat", "cow", "dog")


@pytest.mark.parametrize(
    ("names", "said"), [(["cat", "pig"], r"\[cat, pig\].*\[cat, dog\]"), (None, r"without names.*\[cat, dog\]")]
)
def test_other_classes_in_a_later_file_are_refused_with_both_lists(tmp_path, names, said):
    table(tmp_path / "train-0.parquet", BLACK, [0, 1], ["cat", "dog"])
    table(tmp_path / "train-1.parquet", BLACK, [0, 1], names)
    with pytest.raises(ValueError, match=rf"train-1\.parquet, row 1: .*{said}"):
        load_images(tmp_path)


def test_a_class_beyond_the_names_is_refused_with_its_row(tmp_path):
    import pyarrow.parquet as parquet

    path = table(tmp_path / "train.parquet", BLACK, [0, 1], ["cat", "dog"])
    whole = parquet.read_table(path)
    at = whole.column_names.index("label")
    parquet.write_table(whole.set_column(at, whole.field(at), [[0, 2]]), path)
    with pytest.raises(ValueError, match=r"train\.parquet, row 2: class 2 .* names 2: \[cat, dog\]; expected 0 to 1"):
        load_images(path)


def test_the_classes_of_a_test_split_are_those_of_training(capsys, tmp_path):
    from lib.runs.engine.request import parse
    from lib.runs.engine.sources import open_pictures
    from lib.runs.train_vit import make_vit_parser

    table(tmp_path / "train.parquet", BLACK, [0, 1], ["cat", "dog"])
    table(tmp_path / "test.parquet", BLACK, [0, 1], ["dog", "cat"])
    options = parse(make_vit_parser(), f"--data {tmp_path} --batch 2 --eval-every 1".split())
    assert open_pictures(options, 1, 2, 4).labels.tolist() == [0, 1, 1, 0]
    table(tmp_path / "test.parquet", BLACK, [0, 1], ["dog", "pig"])
    with pytest.raises(ValueError, match=r"test split.*\[dog, pig\].*\[cat, dog\]"):
        open_pictures(options, 1, 2, 4)


# ---- control tokens ----


def test_a_document_that_speaks_of_the_end_does_not_end_there(tmp_path):
    texts = [f"document {i} says <|endoftext|> in its midst" if i % 20 == 3 else f"document {i}" for i in range(60)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = tmp_path / "c"
    assert make_corpus(f"{made} --dataset {tmp_path}/d.jsonl --held-out 0.3 --vocab 300".split()) == 0
    facts, tokens = corpus.read_facts(made), np.fromfile(made / "tokens.bin", dtype=np.uint16)
    end = facts["vocab_size"] - 1
    assert (tokens == end).sum() == facts["documents"] == 60
    decode = corpus.make_tokenizer(corpus.read_merges(made)).decode
    parts = [decode(part[1:] if n else part) for n, part in enumerate(np.split(tokens, np.flatnonzero(tokens == end)))]
    assert sorted(parts[:-1]) == sorted(texts)


# ---- flags ----

BENCH = sorted((ROOT / "lib" / "bench").glob("*.py"))


def test_every_program_takes_whole_names_of_flags_only():
    """argparse would read ``--tin`` as ``--tiny``, and record trials among the book's measurements."""
    made = []
    for path in (ROOT / "lib").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = [
            call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "") for call in calls
        ]
        assert "ArgumentParser" not in names, f"{path}: expected lib.runs.flags"
        made += [path for name in names if name in ("Parser", "ProgramParser")]
    assert len(made) > 30
    for parser in (flags.Parser(), flags.ProgramParser()):
        assert not parser.allow_abbrev
    for path in BENCH:
        source = path.read_text(encoding="utf-8")
        assert "__main__" not in source or "ProgramParser(" in source, f"{path} would ignore its words"


def test_a_wrong_word_ends_a_program_with_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "lib.bench.mpi", "--tin"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--tin" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--seed 18446744073709551616", "18446744073709551615"),
        (f"--seed {'9' * 5000}", "9..."),
        ("--steps 0", "at least 1"),
        ("--steps 1e3", "'1e3'"),
        ("--dim 64000000000000", "at most"),
        ("--lr nan", "'nan'"),
        ("--lr -1", "--lr"),
        ("--bucket-mb 1e300", "at most 1e+15"),
        ("--held-out nan", "between 0 and 1"),
        ("--data=", "'' is empty"),
        ("--checkpoint=", "'' is empty"),
        ("--log-file=", "'' is empty"),
        ("--prompt \udcff --sample-every 1", "not UTF-8"),
        ("--ste 3", "--ste 3"),
    ],
)
def test_a_value_out_of_range_is_one_line(capsys, words, said):
    refused(capsys, f"gpt2 {words}", said)


# ---- what checks are run with ----


def test_a_listing_or_an_empty_choice_leaves_earlier_marks_alone(book):
    book.pytest("tests/chapter_01", "--marks", "marks.json")
    before = (book.root / "marks.json").read_bytes()
    for words in (["--collect-only"], ["-k", "nothing_is_called_so"], ["--exercise", "nothing_is_called_so"]):
        done = book.pytest("tests/chapter_01", "--marks", "marks.json", *words)
        assert (book.root / "marks.json").read_bytes() == before, done.out
    assert not book.pytest(
        "tests/chapter_01", "--marks", "new.json", "--gradescope", "g.json", "--collect-only"
    ).returncode
    assert not (book.root / "new.json").exists()
    assert not (book.root / "g.json").exists()


def test_settings_that_are_meant_for_pytest_do_not_reach_a_check(book):
    for cold in ({}, {"WORKBOOK_COLD": "1"}):
        done = book.workbook("check", "1", PYTEST_ADDOPTS="-n 2 --nothing", PYTEST_PLUGINS="nothing", **cold)
        assert done.returncode == 1
        assert "not started" in done.out


def test_a_copy_of_the_package_without_the_book_says_so(book):
    (book.root / "book.yml").unlink()
    done = book.workbook("check", "1")
    assert done.returncode == 2
    assert "no book.yml" in done.out
    assert "pip install -e" in done.out
    assert "Traceback" not in done.out


def test_numbers_on_a_wire_stay_two_and_whole():
    here, there = socket.socketpair()
    with here, there:
        there.sendall(forkserver.framed(4711) + forkserver.framed(-9)[:3])
        forked = forkserver.Forked(here)
        assert forked.pid == 4711
        there.sendall(forkserver.framed(-9)[3:])
        assert forked.wait(5) == -9


def test_a_full_disk_is_not_called_a_value_that_cannot_be_read_back(monkeypatch):
    from solutions import training

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match="sampler holds a function that weights_only=True cannot read back"):
        training.save_checkpoint(io.BytesIO(), model, optimizer, 1, sampler=lambda: 0)

    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="No space left"):
        training.save_checkpoint(io.BytesIO(), model, optimizer, 1)


def test_warnings_of_other_packages_are_no_errors(tmp_path):
    """Such as pytest-benchmark's, which warns beside pytest-xdist when pytest is configured."""
    (tmp_path / "chatty.py").write_text("import warnings\ndef pytest_configure(config):\n    warnings.warn('chatty')\n")
    words = [sys.executable, "-m", "pytest", "-p", "chatty", "--collect-only", "-q", "tests/chapter_02"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn("ours", stacklevel=1)


def test_the_contract_of_encode_says_what_it_takes():
    from solutions.tokenization import BPETokenizer

    tokenizer = BPETokenizer({i: bytes([i]) for i in range(256)}, [])
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("half \ud800")
    assert "UnicodeEncodeError" in str(BPETokenizer.__doc__)
