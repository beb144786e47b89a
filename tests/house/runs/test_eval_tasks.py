"""Questions during training: the log has what the checkpoint of the same step would get, on any number of ranks."""

import json
from typing import Any

import pytest

from lib.runs import evaluate
from lib.runs.engine.log import read_log
from tests.house.runs import runs_programs as programs
from tests.house.runs.test_runs import on_ranks

pytestmark = pytest.mark.time_limit(120)
RUN = "--batch 4 --steps 4 --lr 1e-2 --quiet"


@pytest.fixture
def tasks(tmp_path):
    rows = [{"query": f"{i} is", "choices": ["odd", "even"], "gold": (i + 1) % 2} for i in range(40)]
    (tmp_path / "parity.jsonl").write_text("\n".join(json.dumps(one) for one in rows))
    (tmp_path / "page.txt").write_text("An expression statement evaluates an expression. " * 9)
    return tmp_path / "parity.jsonl", tmp_path / "page.txt"


def run(program, words):
    assert programs.PROGRAMS[program](words.split()) == 0


@pytest.mark.parametrize(("program", "length"), [("gpt2", 64), ("llama", 48)])
def test_the_log_has_what_the_checkpoint_gets(tmp_path, tasks, program, length):
    log, folder, out = tmp_path / "log", tmp_path / "kept", tmp_path / "out.json"
    asked = f"--eval-tasks {tasks[0]} {tasks[1]} --eval-tasks-every 3"
    run(program, f"{RUN} --length {length} {asked} --log-file {log} --checkpoint {folder}")
    lines = read_log(log, "core_score")
    assert [line["step"] for line in lines] == [2, 3]
    names = {"parity_accuracy", "parity_low", "parity_high", "page_bits_per_byte", "core_score"}
    assert set(lines[1]) == names | {"step"}
    flags = f"--model {folder} --device cpu --tasks {tasks[0]} {tasks[1]} --out {out}"
    assert evaluate.main(flags.split()) == 0
    found = json.loads(out.read_text())
    parity, page = found["tasks"]["parity"], found["tasks"]["page"]
    for key in ("accuracy", "low", "high"):
        assert lines[1][f"parity_{key}"] == parity[key]
    assert lines[1]["page_bits_per_byte"] == page["bits_per_byte"]
    assert lines[1]["core_score"] == found["core_score"]


def test_questions_change_nothing_of_the_training(tmp_path, tasks):
    asked = {"with": f"--eval-tasks {tasks[0]} --eval-tasks-every 1", "without": ""}
    for name, flags in asked.items():
        run("gpt2", f"{RUN} --length 32 {flags} --log-file {tmp_path / name}")
    losses = {name: [line["loss"] for line in read_log(tmp_path / name)] for name in asked}
    assert losses["with"] == losses["without"]
    assert len(read_log(tmp_path / "with", "core_score")) == 4


def test_two_ranks_log_what_one_does(tmp_path, tasks):
    flags = f"{RUN} --length 32 --optimizer sgd --eval-tasks {tasks[0]} {tasks[1]}"
    run("gpt2", f"{flags} --log-file {tmp_path / 'one'}")
    on_ranks(programs.run_all, [f"gpt2 {flags} --strategy fsdp --log-file {tmp_path / 'two'}"])
    (one,), (two,) = (read_log(tmp_path / name, "core_score") for name in ("one", "two"))
    assert one["step"] == two["step"] == 3  # without an interval only the last step asks
    assert two["page_bits_per_byte"] == pytest.approx(one["page_bits_per_byte"], rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--eval-tasks nonsense", "--eval-tasks nonsense: expected sums, sorting"),
        ("--eval-tasks-every 5", "--eval-tasks-every 5 without --eval-tasks"),
        ("--eval-tasks sums --data synthetic", "--eval-tasks with --data synthetic"),
        ("--eval-tasks FOLDER/written.jsonl", "--eval-tasks written: its answers are written"),
        ("--eval-tasks FOLDER/few.jsonl", "--eval-tasks few: question 0: n_shots = 5, but only 2"),
        ("--eval-tasks FOLDER/long.jsonl", "a choice of question 0 has 41 tokens, and the model reads 32"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_the_run(tmp_path, capsys, flags, said):
    row = {"query": "q", "choices": ["x" * 40, "b"], "gold": 1}
    kinds: dict[str, list[dict[str, Any]]] = {
        "written": [{"query": "q", "answer": "5"}],
        "few": [row | {"query": f"{i}"} for i in range(3)],
        "long": [row | {"query": f"{i}"} for i in range(9)],
    }
    for name, rows in kinds.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(one) for one in rows))
    words = f"{RUN} --length 32 {flags} --checkpoint {tmp_path / 'kept'}".replace("FOLDER", str(tmp_path)).split()
    assert programs.PROGRAMS["gpt2"](words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "kept").exists()
