"""Evaluation from the command line: tasks are made and read rightly, and a model that knows the answers gets all."""

import json
import re
from datetime import date, timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lib.runs import evaluate
from lib.runs.data import questions
from lib.runs.flags import UsageError
from lib.runs.serving.models import Served
from lib.runs.serving.text import ByteTokenizer

pytestmark = pytest.mark.time_limit(120)
TASKS = list(questions.TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_repeats_with_its_seed_and_asks_nothing_twice(name):
    made = questions.generated(name, 150, seed=3)
    assert made == questions.generated(name, 150, seed=3) != questions.generated(name, 150, seed=4)
    assert len({q["query"] for q in made}) == 150
    for q in made:
        assert len(set(q["choices"])) == len(q["choices"]) in (2, 4)
    assert len({q["gold"] for q in made}) == len(made[0]["choices"])


def test_the_answers_are_right():
    for q in questions.generated("sums", 100, 0):
        a, _, b, _ = q["query"].split()
        assert int(q["choices"][q["gold"]]) == int(a) + int(b)
    for q in questions.generated("sorting", 100, 0):
        assert q["choices"][q["gold"]].split() == sorted(q["query"].split()[:5])
    for q in questions.generated("copying", 100, 0):
        assert q["query"].startswith(q["choices"][q["gold"]] + " again")
    for q in questions.generated("dates", 100, 0):
        day = date.fromisoformat(q["query"].split()[3])
        assert q["choices"][q["gold"]] == str(day + timedelta(days=1))


def test_brackets_are_judged_by_removing_pairs():
    made = questions.generated("brackets", 200, 0)
    for q in made:
        text = q["query"].split()[3]
        while any(pair in text for pair in ("()", "[]", "{}")):
            text = text.replace("()", "").replace("[]", "").replace("{}", "")
        assert q["choices"][q["gold"]] == ("no" if text else "yes")
    assert 0.3 < sum(q["gold"] for q in made) / 200 < 0.7
    assert questions.closes("([)]") is False


class Knows(nn.Module):
    """Bytes in, logits out: whatever continues one of its texts is likely."""

    def __init__(self, texts):
        super().__init__()
        self.config = SimpleNamespace(context_len=400)
        self.texts, self.shapes = [text.encode() for text in texts], []

    def forward(self, tokens):
        self.shapes.append(tuple(tokens.shape))
        logits = torch.zeros(*tokens.shape, 256)
        for row, ids in enumerate(tokens.tolist()):
            for end in range(1, len(ids) + 1):
                tail = bytes(ids[max(0, end - 12) : end])
                for text in self.texts:
                    at = text.find(tail)
                    if 0 <= at < len(text) - len(tail):
                        logits[row, end - 1, text[at + len(tail)]] = 9.0
        return logits


def options_of(*words):
    return evaluate.make_parser().parse_args(["--model", "x", *words])


@pytest.mark.parametrize("shots", ["0", "2"])
def test_a_model_that_knows_the_answers_gets_all_and_one_that_knows_nothing_guesses(shots):
    asked = questions.generated("copying", 40, 1)
    knows = Knows([f"{q['query']} {q['choices'][q['gold']]}" for q in asked])
    found = {}
    for name, model in (("knows", knows), ("guesses", Knows([]))):
        served = Served(name, model, ByteTokenizer())
        progress = SimpleNamespace(update=lambda n: None)
        picks = evaluate.answer(served, asked, options_of("--shots", shots, "--batch-size", "8"), progress)
        found[name] = evaluate.judge(asked, picks)
    assert found["knows"]["accuracy"] == 1.0 == found["knows"]["high"]
    assert found["guesses"]["accuracy"] < 0.6
    assert found["knows"]["baseline"] == 0.25
    assert max(rows for rows, _ in knows.shapes) == 8


def test_a_run_writes_its_results_and_a_page_of_examples(tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    rows = [{"query": f"Question {i}:", "choices": ["the", "zqx"], "gold": 0, "more": 1} for i in range(6)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    out, examples = tmp_path / "out.json", tmp_path / "out.md"
    argv = ["--model", "tiny", "--device", "cpu", "--tasks", "sums", str(file), "--limit", "5", "--shots", "1"]
    assert evaluate.main([*argv, "--out", str(out), "--examples", str(examples)]) == 0
    found = json.loads(out.read_text())
    assert found["tasks"]["mine"]["accuracy"] == 1.0  # the tiny model knows which letters follow which
    assert found["tasks"]["sums"]["questions"] == found["tasks"]["mine"]["questions"] == 5
    assert found["tasks"]["mine"]["centered"] == 1.0
    assert found["core_score"] == pytest.approx(sum(t["centered"] for t in found["tasks"].values()) / 2)
    assert "- `the` (right, taken)" in examples.read_text()
    said = capsys.readouterr().out
    assert "mine             100.0% right" in said
    assert "core score" in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: no JSON"),
        ("5", "line 2: a int, expected an object"),
        ('{"query": "", "choices": ["a", "b"], "gold": 0}', "query: expected a text"),
        ('{"query": "q", "choices": ["a"], "gold": 0}', "choices: expected a list of at least two"),
        ('{"query": "q", "choices": ["a", ""], "gold": 0}', "choices: expected"),
        ('{"query": "q", "choices": ["a", "b"], "gold": 2}', "gold: 2, expected the index of one of 2"),
        ('{"query": "q", "choices": ["a", "b"], "gold": true}', "gold: True"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, line, words):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"query": "q", "choices": ["a", "b"], "gold": 1}\n' + line)
    with pytest.raises(UsageError, match=words):
        questions.read(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model tiny --tasks nonsense", "--tasks nonsense: expected sums, sorting"),
        ("--model nowhere --tasks sums", "--model nowhere: no such folder"),
        ("--model tiny --tasks sums sums", "two tasks called sums"),
        ("--model tiny --tasks sums --limit 3 --shots 5", "questions 0 to 2: .*5"),
        ("--model tiny --tasks sums --shots x", "--shots"),
        (
            "--model tiny --tasks sums --out nowhere/a.json",
            "--out nowhere/a.json: expected a file in a folder that exi",
        ),
        ("--tasks sums", "--model"),
    ],
)
def test_what_is_wrong_is_one_line(words, said, capsys):
    assert evaluate.main([*words.split(), *(["--device", "cpu"] if "--model" in words else [])]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert error.count("\n") == 1


def test_a_folder_is_every_file_in_it(tmp_path):
    with pytest.raises(UsageError, match=r"no file \.jsonl"):
        questions.load(str(tmp_path), None, 0)
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text('{"query": "q", "choices": ["a", "b"], "gold": 1}\n' * 3)
    found = questions.load(str(tmp_path), 2, 0)
    assert [(name, len(rows)) for name, rows in found.items()] == [("a", 2), ("b", 2)]
