"""What drafts buy: a small run, whose drafts are right because the layers behind them add nothing."""

from dataclasses import replace

import pytest
import torch

from lib.bench import serving_options

pytestmark = pytest.mark.slow


def test_drafts_that_are_always_right_and_texts_that_stay_the_same():
    sizes = replace(serving_options.TINY, n_texts=1, n_new=48, dampings=(0.0,))
    found = serving_options.time_drafts(sizes, torch.device("cpu"), torch.float32)
    cases = [(case["repeats"], case["draft"]) for case in found]
    assert cases == [(False, "none"), (False, "prompt"), (False, "model"), (True, "none"), (True, "prompt")]
    assert all(case["same_tokens"] == 1.0 for case in found if case["draft"] != "none")
    for case in (found[2], found[4]):
        assert case["kept"] == 1.0
        assert case["tokens_for_a_check"] > 3
