"""Tasks whose answers the model writes, and bits per byte: what is read out, what is run, and what is refused."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from lib.evaluation import bits_per_byte, pass_at_k, wilson_interval
from lib.runs import evaluate
from lib.runs.data import questions
from lib.runs.evaluating import answers, programs
from lib.runs.evaluating.choices import first_token, score_texts
from lib.runs.flags import UsageError
from lib.runs.serving.batch import write
from lib.runs.serving.models import Served, make_tiny
from lib.runs.serving.text import ByteTokenizer

pytestmark = pytest.mark.time_limit(120)
NOTHING = SimpleNamespace(update=lambda n: None)


def options_of(*words):
    return evaluate.make_parser().parse_args(["--model", "x", *words])


# ---------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("42", ("number", "42")),
        ("$1,234.50", ("number", "1234.5")),
        ("He has 3 + 4 apples.\n#### 7", ("number", "7")),
        ("B", ("letter", "B")),
        ("b", ("text", "b")),
        ("the 5 rings", ("text", "the 5 rings")),
        (" two words\n", ("text", "two words")),
        ("#### x", ("text", "x")),
    ],
)
def test_the_form_of_an_answer(answer, form):
    assert answers.form_of(answer) == form


def test_answers_are_right_if_what_is_read_out_is():
    rows = [
        {"query": "3 + 4?", "answer": "#### 7"},
        {"query": "Which?", "answer": "F"},
        {"query": "Say it.", "answer": "yes"},
        {"query": "5 + 5?", "answer": "10"},
    ]
    asked = []

    def writes(prompts, n, stops):
        asked.extend([(prompt, n, stops) for prompt in prompts])
        return [["So it is 7.0"], ["The answer is (F)."], [" yes \n"], ["I do not know"]]

    found, shown = answers.score_answers(rows, options_of("--shots", "1", "--seed", "3"), NOTHING, writes)
    low, high = wilson_interval(3, 4)
    assert found == {"questions": 4, "right": 3, "accuracy": 0.75, "low": low, "high": high, "baseline": 0.0}
    assert all(n == 1 and stops == ("\n\n",) and prompt.endswith(row["query"]) for (prompt, n, stops), row in
               zip(asked, rows, strict=True))  # fmt: skip
    assert all(prompt.count("\n\n") == 1 for prompt, _, _ in asked)
    assert "read out: `None`; right: `10`" in shown[3]
    with pytest.raises(UsageError, match="n_shots = 9"):
        answers.score_answers(rows, options_of("--shots", "9"), NOTHING, writes)


@pytest.fixture(scope="module")
def tiny():
    torch.set_num_threads(1)
    return Served("tiny", make_tiny().eval().requires_grad_(False), ByteTokenizer())


def test_what_is_written_ends_at_a_stop_and_does_not_depend_on_its_neighbours(tiny):
    options = options_of("--max-new-tokens", "24", "--temperature", "0.8", "--batch-size", "3")
    prompts = ["The ", "x" * 2000, "def f("]
    texts = write(tiny, prompts, 2, (), options, NOTHING)
    assert [len(row) for row in texts] == [2, 2, 2]
    assert texts[0][0] != texts[0][1]
    assert write(tiny, prompts, 1, (), options, NOTHING) == [row[:1] for row in texts]
    stop = texts[0][0][3:5]
    (first, *_), *_ = write(tiny, prompts[:1], 1, (stop,), options, NOTHING)
    assert first == texts[0][0][: texts[0][0].index(stop)]
    with pytest.raises(UsageError, match=r"--max-new-tokens 1024: the model's context has 1024 tokens"):
        write(tiny, prompts, 1, (), options_of("--max-new-tokens", "1024", "--temperature", "0"), NOTHING)


# ---------------------------------------------------------------------------------------------------- bits


def test_bits_per_byte_of_documents_are_those_of_chapter_27(tiny):
    documents = [{"text": "The quick brown fox. " * 80, "name": "a"}, {"text": "größer", "name": "b"}]
    found, shown = score_texts(tiny, documents, options_of(), NOTHING)
    ones, newline = torch.ones(256, dtype=torch.int64), 10
    bits = [
        bits_per_byte(tiny.model, list(d["text"].encode()), ones, newline, 1024) * len(d["text"].encode())
        for d in documents
    ]
    n_bytes = sum(len(d["text"].encode()) for d in documents)
    assert found["bits_per_byte"] == math.fsum(bits) / n_bytes
    assert (found["bytes"], found["documents"], found["prefix_token"], found["window"]) == (n_bytes, 2, newline, 1024)
    assert shown[1].startswith("b: ")
    assert "8 bytes, 8 tokens" in shown[1]


def test_a_text_has_the_same_bits_whatever_its_tokens(tiny):
    """A tokenizer of pairs would have half the tokens; their bytes are still those of the text."""
    odd = ByteTokenizer(encode=lambda text: list(text.encode())[::2], end_ids=(7, 3))
    assert first_token(odd) == 3
    found, _ = score_texts(Served("x", tiny.model, odd), [{"text": "abcdef", "name": "a"}], options_of(), NOTHING)
    ones = torch.ones(256, dtype=torch.int64)
    assert found["bits_per_byte"] == pytest.approx(bits_per_byte(tiny.model, list(b"ace"), ones, 3, 1024) * 3 / 6)


# ---------------------------------------------------------------------------------------------------- programs


def test_pass_at_k_of_verdicts():
    rows = [["passed"] * c + ["failed"] * (10 - c) for c in (0, 3, 10)]
    found = programs.score([[programs.Verdict(status, "") for status in row] for row in rows])
    for k in (1, 10):
        assert found[f"pass@{k}"] == pytest.approx(sum(pass_at_k(10, c, k) for c in (0, 3, 10)) / 3)
    assert (found["samples"], found["right"], found["accuracy"]) == (10, 13, found["pass@1"])
    assert found["low"] < found["accuracy"] < found["high"]
    low, high = wilson_interval(0, 3)
    none = programs.score([[programs.Verdict("failed", "")] * 4] * 3)
    assert (none["low"], none["high"], set(none) & {"pass@1", "pass@4", "pass@10"}) == (low, high, {"pass@1", "pass@4"})


TASKS = [
    {"prompt": "import math\n\ndef area(r):\n", "entry_point": "area",
     "test": "def check(candidate):\n    assert abs(candidate(1) - math.pi) < 1e-9\n"},
    {"prompt": "def ends(row):\n    '''First and last.'''\n", "entry_point": "ends",
     "test": "def check(candidate):\n    assert candidate([1, 2.5, (None, {'a'})]) == (1, (None, {'a'}))\n"
             "    assert candidate([float('-inf')] * 2) == ends([-1e999] * 2)\n"
             "    try:\n        candidate([])\n    except IndexError:\n        return\n    raise AssertionError\n"},
]  # fmt: skip
WRITTEN = [
    ["    return math.pi * r * r\n", "    return 3 * r\n"],
    ["    return row[0], row[-1]\n", "    return row[99]\n"],
]


def test_programs_are_judged_by_their_tests():
    found, shown = answers.score_programs(
        TASKS, options_of("--samples", "2", "--timeout", "20", "--trust-programs"), NOTHING, lambda *a: WRITTEN
    )
    assert (found["right"], found["pass@1"], found["pass@2"]) == (2, 0.5, 1.0)
    assert shown[0].endswith("- passed")


def test_without_namespaces_programs_run_only_if_they_are_trusted(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(programs, "box_fault", lambda: "unshare: Operation not permitted")
    path = tmp_path / "human.jsonl"
    path.write_text("\n".join(map(json.dumps, TASKS)))
    assert evaluate.main(["--model", "tiny", "--device", "cpu", "--tasks", str(path)]) == 2
    said = capsys.readouterr().err
    assert "no namespaces of their own (unshare: Operation not permitted)" in said
    assert "--trust-programs" in said
    assert said.count("\n") == 1
    assert programs.choose_prefix(trusts=True) == ()
    verdict = programs.run_answer((), TASKS[0], WRITTEN[0][0], 20.0, 2**28)
    assert verdict == ("passed", "")


def test_the_fault_of_a_box_is_told(monkeypatch, tmp_path):
    broken = tmp_path / "box.py"
    broken.write_text("import sys; print('box: unshare: Operation not permitted', file=sys.stderr); sys.exit(125)")
    monkeypatch.setattr(programs, "BOX", broken)
    assert programs.box_fault.__wrapped__() == "unshare: Operation not permitted"
    monkeypatch.setattr("sys.platform", "darwin")
    assert programs.box_fault.__wrapped__() == "darwin has no namespaces"


# ---------------------------------------------------------------------------------------------------- files


def test_a_folder_has_every_kind(tmp_path, capsys):
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"question": f"{i}?", "answer": str(i)}) for i in range(3)))
    (tmp_path / "c.jsonl").write_text(json.dumps(TASKS[0]))
    (tmp_path / "one.txt").write_text("The one.")
    (tmp_path / "two.txt").write_text("The two.")
    found = questions.load(str(tmp_path), 2, 0)
    assert {name: (questions.kind_of(rows[0]), len(rows)) for name, rows in found.items()} == {
        "b": ("answers", 2), "c": ("programs", 1), tmp_path.name: ("texts", 2)}  # fmt: skip
    out, examples = tmp_path / "out.json", tmp_path / "out.md"
    flags = "--model tiny --device cpu --shots 0 --max-new-tokens 8 --samples 2 --timeout 20 --trust-programs --tasks"
    assert evaluate.main([*flags.split(), str(tmp_path), "--out", str(out), "--examples", str(examples)]) == 0
    found = json.loads(out.read_text())
    tasks = found["tasks"]
    assert tasks["b"]["questions"] == 3
    assert tasks["c"]["pass@2"] == 0
    assert 1 < tasks[tmp_path.name]["bits_per_byte"] < 8
    assert "centered" not in tasks[tmp_path.name]
    assert found["core_score"] == (tasks["b"]["centered"] + tasks["c"]["centered"]) / 2
    said = capsys.readouterr().out
    assert "pass@1 0.0%, pass@2 0.0%" in said
    assert "bits per byte of 16" in said
    assert f"# {tmp_path.name}: " in examples.read_text()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"query": "q"}', "the keys query: expected query, choices, gold; or query, answer; or prompt, test"),
        ('{"query": "q", "answer": 5}', "answer: expected a text"),
        ('{"answer": "5"}', "query: expected a text"),
        ('{"prompt": "q", "entry_point": "f"}', "test: expected a text"),
        ('{"prompt": "q", "test": "t", "entry_point": "f()"}', "entry_point: 'f\\(\\)', expected the name"),
        ('{"query": "q", "choices": ["a", "b"], "gold": 1}', "a question of choices, and those before it are of answ"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, line, words):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"query": "q", "answer": "a"}\n' + line)
    with pytest.raises(UsageError, match=f"line 2: {words}"):
        questions.read(path)


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UsageError, match=r"a\.txt is empty"):
        questions.load(str(tmp_path / "a.txt"), None, 0)


# ------------------------------------------------------------------------------------------------------- a chat


def test_in_a_chat_the_template_asks_without_shots_and_the_marked_answer_is_read():
    rows = [{"query": "3,1:", "answer": "1,3"}, {"query": "2+2=", "answer": "4"}]
    asked = []

    def writes(prompts, n, stops):
        asked.append((prompts, stops))
        return [["<think>3</think><answer>1,3</answer>"], ["<think>5</think><answer>4</answer> 9"]]

    found, _ = answers.score_answers(rows, options_of("--chat", "--shots", "1"), NOTHING, writes)
    assert (found["right"], asked) == (2, [(["3,1:", "2+2="], ())])


@pytest.mark.parametrize(
    ("text", "inside"),
    [("<answer>1</answer>", "1"), ("a</answer>", "a</answer>"), ("<answer>a", "<answer>a"), ("7", "7"),
     ("<answer>1</answer><answer>2</answer> 3", "2")],
)  # fmt: skip
def test_what_is_marked_as_the_answer(text, inside):
    assert answers.marked(text) == inside


def test_a_list_is_no_number():
    assert answers.form_of("1,2,3") == ("text", "1,2,3")
    assert answers.form_of("1,234,567.5") == ("number", "1234567.5")


def test_a_chat_needs_a_template(capsys):
    assert evaluate.main(["--model", "tiny", "--chat", "--tasks", "sums", "--limit", "1"]) == 2
    assert "--chat with --model tiny: it has no chat template" in capsys.readouterr().err
