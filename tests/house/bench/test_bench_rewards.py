"""A step of chapter 29, at a size for a CPU; and the tasks that it is made of."""

from itertools import islice

import pytest

from lib.bench import rewards
from lib.given.data.record import load
from lib.given.data.tasks import Characters, countdown, sorting, sums
from lib.rewards import check_countdown, score_response


@pytest.mark.time_limit(120)
def test_a_step_is_recorded(tmp_path):
    words = "--device cpu --tiny --prompts 2 --group 2 --new-tokens 6 --positions 40 --rounds 1"
    rewards.main([*words.split(), "--folder", str(tmp_path)])
    found = load("rewards", tmp_path)["results"]
    assert set(found["step"]["float32"]) == {"sampling", "scoring", "training", "tokens"}
    assert found["step"]["bfloat16"]["tokens"] == 24
    assert found["drift"]["float32"]["largest"] < 1e-4
    assert found["log_probs"]["positions"] == 40


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
