"""A wrong word on a command line is one message that names it and what was expected, and nothing runs."""

import importlib
import re
import sys

import pytest

from lib.workbook.book.catalog import BookError, find
from lib.workbook.tools import cli

pytestmark = pytest.mark.time_limit(120)
WORDS = {
    "all_reduce --backend mpi": r"--backend: 'mpi': expected some of gloo, nccl",
    "all_reduce --ranks 2,x": r"--ranks: 'x': expected a whole number of at least 1",
    "ddp --backend mpi": r"--backend: invalid choice: 'mpi' \(choose from '?gloo'?, '?nccl",
    "ddp --sizes abc": r"unrecognized arguments: --sizes abc",
    "model_sizes --tiny --size huge": r"--size huge: expected one of \w+, \w+",
    "scaling_laws sweep --data x --size 128": r"--size: '128': expected a width and a number of layers, such as 128x4",
    "scaling_laws sweep --data x --size 128x4": r"--size 128x4 with sweep: expected --size with the part size",
    "scaling_laws size --data x": r"--size None with size: expected --size with the part size",
    "scaling_laws nonsense --data x": r"invalid choice: 'nonsense'",
    "scaling_laws_images --tiny --size axb": r"--size: 'axb': expected a width and a number of layers",
    "ladder --tiny --device cpu --rung nonsense": r"--rung nonsense: expected some of \w+",
    "low_precision nonsense": r"nonsense: expected some of products, steps, losses, tokens",
    "kernels.flash_short nonsense": r"unknown part nonsense: expected lengths, models",
    "kernels.flash_shapes --only nonsense": r"--only nonsense: no shape has it in its name",
    "kernels.flash_variants --only nonsense": r"--only nonsense: no case has it in its name",
    "yardstick.compare --models S/9": r"--models: 'S/9': expected some of L/16, ",
    "yardstick.parts --model S/9": r"--model: invalid choice: 'S/9'",
    "serving --only nonsense": r"invalid choice: 'nonsense'",
    "serving --rates -1": r"--rates",
    "load": r"--url",
    "load --url x --rate 0": r"--rate",
    "load --url x --prompt-words 5 2": r"--prompt-words 5 2: expected the smaller number first",
    "load --url http://127.0.0.1:9/v1": r"--url http://127.0.0.1:9/v1: .*does not list a model \(ConnectError",
    "load --url nonsense": r"--url nonsense: .*does not list a model",
    "moe nonsense": r"invalid choice: 'nonsense'",
    "pipeline --ranks 0": r"--ranks: '0': expected a whole number of at least 1",
    "attention_sweep --compile-only x": r"--compile-only: 'x': expected a whole number",
}


@pytest.mark.parametrize("words", WORDS)
def test_a_bench_program_names_a_wrong_word(words, monkeypatch, capsys):
    name, *argv = words.split()
    module = importlib.import_module(f"lib.bench.{name}")
    monkeypatch.setattr(sys, "argv", [name, *argv])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(WORDS[words], said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("check 99", "there is no chapter 99; expected a number from 1 to"),
        ("check 2.99", "there is no exercise 2.99; expected a number from 2.1 to 2."),
        ("check 99.1", "there is no exercise 99.1; expected a number from 1 to"),
        ("check apply_rop", "no chapter or exercise is called 'apply_rop'; did you mean apply_rope"),
        ("check --route nonsense", "no route is called 'nonsense': expected one of"),
        ("check", "check takes either a chapter or an exercise"),
        ("check 2 --route kernels", "check takes either a chapter or an exercise"),
        ("check --route kernels --watch", "--watch follows a chapter or an exercise, not a route"),
        ("lab 99", "there is no chapter 99"),
        ("lab ropes", "no chapter or exercise is called 'ropes'; did you mean rope"),
        ("lab 2 --port 0", "'0': expected a port from 1 to 65535"),
        ("lab 2 --port 70000", "'70000': expected a port"),
        ("lab 2 --port abc", "'abc': expected a port from 1 to 65535"),
        ("solution 99", "there is no chapter 99"),
        ("solution", "Missing argument"),
        ("solution 2.4 --dif", "No such option"),
        ("reset nonsense --yes", "no chapter or exercise is called 'nonsense'"),
        ("progress 2", "unexpected extra argument"),
        ("nonsense", "No such command 'nonsense'"),
        ("check 2 --mine=3", "--mine"),
    ],
)  # fmt: skip
def test_workbook_names_a_wrong_word(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["workbook", *words.split()])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    boxed = (shown.out + shown.err).replace("│", " ")  # typer puts its messages into boxes
    assert said in " ".join(boxed.split())
    assert "Traceback" not in shown.err


def test_a_name_is_found_by_number_and_by_name():
    assert find("2.4") == find("apply_rope") == find("rope.apply_rope")
    with pytest.raises(BookError, match="from 1 to"):
        find("99")
