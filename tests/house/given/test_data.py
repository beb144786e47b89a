"""What chapters read: the texts on the machine, files of every kind, and errors that say where."""

import json

import pytest

from lib.bench.kit import record
from lib.given.data.corpora import language_reference, load_text, standard_library_docstrings, stream_text
from lib.given.data.record import load, where
from lib.given.show.tokens import readable, show_pieces, show_tokens


def test_language_reference_is_a_long_english_text():
    text = language_reference()
    assert 300_000 < len(text) < 1_000_000
    assert "The simplest form of slicing" in text or " the " in text


def test_docstrings_are_found_without_importing():
    text = standard_library_docstrings()
    assert len(text) > 300_000
    assert "CSV" in text


def test_load_text_gives_the_file_as_it_is(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("eins\r\nzwei é\n".encode())
    assert load_text(path) == "eins\r\nzwei é\n"


def test_load_text_names_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*missing\.txt"):
        load_text(tmp_path / "missing.txt")
    with pytest.raises(FileNotFoundError, match="folder"):
        load_text(tmp_path)


def test_load_text_names_file_row_and_byte(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"one\ntwo\ncaf" + b"\xe9 au lait\n")
    with pytest.raises(ValueError, match=r"latin\.txt, row 3, byte 3 of the row: 0xe9 is not UTF-8"):
        load_text(path)


DOCUMENTS = ["the ruler", "of a kingdom", "王国 🙂"]


def write(path, kind):
    if kind == "txt":
        path.write_text("\n".join(DOCUMENTS) + "\n", encoding="utf-8")
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"text": d, "n": 1}) + "\n" for d in DOCUMENTS), encoding="utf-8")
    elif kind == "csv":
        path.write_text("text,n\n" + "".join(f"{d},1\n" for d in DOCUMENTS), encoding="utf-8")
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": DOCUMENTS}), path)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
def test_stream_text_reads_a_file(tmp_path, kind):
    path = tmp_path / f"documents.{kind}"
    write(path, kind)
    assert list(stream_text(path, progress=False)) == DOCUMENTS


def test_stream_text_reads_a_folder_and_shows_progress(tmp_path, capsys):
    for name in ("a.txt", "b.txt"):
        write(tmp_path / name, "txt")
    assert list(stream_text(tmp_path)) == DOCUMENTS * 2
    assert "6 documents" in capsys.readouterr().err


def test_stream_text_is_lazy(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("line\n" * 100_000, encoding="utf-8")
    stream = stream_text(path, progress=False)
    assert [next(stream), next(stream)] == ["line", "line"]


def test_stream_text_names_a_wrong_column(tmp_path):
    path = tmp_path / "documents.jsonl"
    write(path, "jsonl")
    with pytest.raises(ValueError, match=r"documents\.jsonl, row 1: no text in column 'body'; .*'n', 'text'"):
        list(stream_text(path, column="body", progress=False))


def test_stream_text_names_what_is_not_utf8(tmp_path):
    write(tmp_path / "a.txt", "txt")
    (tmp_path / "b.txt").write_bytes(b"good\nbad \xff\n")
    with pytest.raises(ValueError, match=r"b\.txt, row 2, byte 4 of the row: 0xff"):
        list(stream_text(tmp_path, progress=False))


@pytest.mark.parametrize("source", ["nowhere.txt", "./nowhere", "not_a_corpus"])
def test_stream_text_names_what_is_missing(source):
    with pytest.raises(FileNotFoundError, match=r"nowhere|not_a_corpus.*tiny_shakespeare"):
        next(stream_text(source, progress=False))


def test_stream_text_refuses_folders_that_it_cannot_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file that can be read"):
        next(stream_text(tmp_path))
    write(tmp_path / "a.txt", "txt")
    write(tmp_path / "b.csv", "csv")
    with pytest.raises(ValueError, match="several kinds"):
        next(stream_text(tmp_path))
    (tmp_path / "c.png").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"c\.png"):
        next(stream_text(tmp_path / "c.png"))


def test_record_and_load(tmp_path):
    record("speed", {"train_s": {"median": 1.5}}, folder=tmp_path)
    loaded = load("speed", folder=tmp_path)
    assert loaded["results"] == {"train_s": {"median": 1.5}}
    assert loaded["machine"]["cpu"]
    assert loaded["date"] in where(loaded)
    assert [p.name for p in tmp_path.iterdir()] == ["speed.json"]
    with pytest.raises(FileNotFoundError, match="only speed"):
        load("other", folder=tmp_path)


def test_tokens_are_shown_as_text_and_html():
    vocab = {0: b" a", 1: b"<b>\n", 2: b"\xf0\x9f"}
    shown = show_tokens([0, 1, 2], vocab, "three")
    assert repr(shown) == "three: ␣a|<b>⏎|\\xf0\\x9f"
    assert "&lt;b&gt;" in shown._repr_html_()
    assert "id 2" in shown._repr_html_()
    assert readable("a\tb") == "a⇥b"
    assert "3 tokens" in show_pieces(["x", "y", "z"], "pieces")._repr_html_()
