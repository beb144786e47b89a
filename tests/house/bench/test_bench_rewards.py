"""A step of chapter 29, at a size for a CPU; and the tasks that it is made of."""

from itertools import islice

import pytest

from lib.bench import reinforce, rewards
from lib.given.data.record import load
from lib.given.data.tasks import Characters, countdown, sorting, sums
from lib.given.show.rewards import tables
from lib.rewards import check_countdown, score_response
from lib.runs import reinforce as program


@pytest.mark.time_limit(120)
def test_a_step_is_recorded(tmp_path):
    words = "--device cpu --tiny --prompts 2 --group 2 --new-tokens 6 --positions 40 --rounds 1"
    rewards.main([*words.split(), "--folder", str(tmp_path)])
    found = load("rewards", tmp_path)["results"]
    assert set(found["step"]["float32"]) == {"sampling", "scoring", "training", "tokens"}
    assert found["step"]["bfloat16"]["tokens"] == 24
    assert found["drift"]["float32"]["largest"] < 1e-4
    assert found["log_probs"]["positions"] == 40


@pytest.mark.time_limit(120)
def test_finished_runs_are_recorded_with_what_they_cost(tmp_path):
    words = "--model tiny --task sums --device cpu --quiet --warm 2 --prompts 2 --group 2 --new-tokens 6 --steps 2"
    out = tmp_path / "run"
    assert program.main([*words.split(), "--eval-questions", "2", "--lag", "1", "--out", str(out)]) == 0
    watts = {"00:00.000": 100, "00:01.000": 100, "00:02.000": 400, "00:09.000": 400, "00:10.000": 0, "00:11.0": "[N/A]"}
    (out / "power.csv").write_text("".join(f"2026/01/01 10:{at}, {value}\n" for at, value in watts.items()))
    (out / "power1.csv").write_text("2026/01/01 10:00:00.000, 50\n2026/01/01 10:00:01.000, 0\n")  # a second GPU
    with pytest.raises(SystemExit):
        reinforce.main(["--runs", "a", str(tmp_path), "--folder", str(tmp_path)])
    reinforce.main(["--runs", "late", str(out), "--price", "3600", "--window", "2", "--folder", str(tmp_path)])
    measured = load("reinforce", tmp_path)
    (group,) = measured["results"]["groups"].values()
    (run,) = group["runs"]
    assert run["settings"]["lag"] == 1
    assert run["steps"]["lag"] == [0, 1]
    assert run["watts"] == pytest.approx(200 + 50)  # 7 seconds between two samples are a pause
    assert run["kwh"] == pytest.approx(250 * run["seconds"] / 3.6e6)
    assert run["dollars"] == pytest.approx(run["seconds"])
    assert group["curve"] == [{"step": 2, "mean": pytest.approx(sum(run["steps"]["reward"]) / 2), "low": None,
                               "high": None}]  # fmt: skip
    assert "| late | 0 |" in tables(measured)


def test_a_curve_over_seeds_has_students_interval():
    first, last = reinforce.curve([[0.0, 0.2, 1.0], [0.2, 0.4, 1.0], [0.4, 0.6, 1.0, 9.0]], 2)
    assert (first["step"], last["step"]) == (2, 3)
    quantile = 0.95 * (2 / (4 * 0.975 * 0.025)) ** 0.5  # Student's with two degrees of freedom has this closed form
    half = quantile * 0.2 / 3**0.5
    assert [first[key] for key in ("low", "mean", "high")] == pytest.approx([0.3 - half, 0.3, 0.3 + half])
    assert last["low"] == last["high"] == pytest.approx(1.0)


@pytest.mark.parametrize("task", [sums, sorting, lambda seed: countdown(check_countdown, seed=seed)])
def test_a_tasks_solutions_are_right_and_its_seed_decides(task):
    letters = Characters()
    questions, again = (list(islice(task(seed=3), 50)) for _ in range(2))
    assert [q.prompt for q in questions] == [q.prompt for q in again]
    for question in questions:
        assert score_response(question.solution, question.check)["reward"] == 1.0
        for text in (question.prompt, question.solution):
            assert letters.decode(letters.encode(text)) == text


def test_a_hedged_solution_is_wrong():
    for question in islice(sums(seed=1, hedged=1.0), 20):
        assert score_response(question.solution, question.check)["reward"] == 0.0
