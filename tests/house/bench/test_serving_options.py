"""What drafts buy: a small run, whose drafts are right because the layers behind them add nothing."""

from dataclasses import replace

import pytest
import torch

from lib.bench import serving_options

pytestmark = pytest.mark.slow


def test_a_draft_that_is_always_right_and_texts_that_stay_the_same():
    sizes = replace(serving_options.TINY, n_texts=1, n_new=12, dampings=(0.0,))
    found = serving_options.time_drafts(sizes, torch.device("cpu"), torch.float32)
    assert [case["draft"] for case in found] == ["none", "prompt", "model"]
    assert all(case["same_tokens"] == 1.0 for case in found[1:])
    assert found[2]["kept"] == 1.0
    assert found[2]["tokens_for_a_check"] > 3
