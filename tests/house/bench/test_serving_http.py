"""The program that measures how much of the engine's throughput arrives over HTTP."""

import pytest

from lib.bench import serving_http
from lib.given.data.record import load
from lib.given.models.serving import Request

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(120)]


def test_a_costless_engine_gives_each_request_its_tokens():
    engine, requests = serving_http.Costless(0.0), [Request([1], n) for n in (1, 3)]
    for request in requests:
        engine.submit(request)
    new = []
    while engine.is_busy:
        new.append([request for request, _ in engine.step()])
    assert new == [requests, requests[1:], requests[1:]]


def test_a_cancelled_request_gets_no_tokens_whether_it_waits_or_runs():
    engine, (runs, waits) = serving_http.Costless(0.0), [Request([1], 3) for _ in range(2)]
    engine.submit(runs)
    engine.step()
    engine.submit(waits)
    assert [engine.cancel(runs), engine.cancel(waits), engine.cancel(waits)] == [True, True, False]
    assert engine.step() == []


def test_an_engine_alone_is_as_fast_as_its_steps():
    requests = (Request([1], 3) for _ in range(10**6))
    found = serving_http.alone(serving_http.Costless(0.01), requests, 4, warm_up_s=0.05, seconds=0.5)
    assert 0 < found <= 4 / 0.01 * 1.1


def test_a_share_of_the_engines_tokens_is_recorded(tmp_path):
    sizes = ["--step", "30", "--streams", "2", "--processes", "1", "--warm-up", "0.2", "--seconds", "1"]
    lengths = ["--prompt-words", "2", "4", "--answer-tokens", "3", "6"]
    serving_http.main([*sizes, *lengths, "--folder", str(tmp_path)])
    found = load("serving_http", tmp_path)["results"]["streams"]["2"]
    assert found["share"] == found["http"]["tokens_per_s"] / found["engine_tokens_per_s"]
    assert found["http"]["errors"] == {}
    assert found["http"]["answered"] > 0
    assert 0 < found["http"]["cpu_s_per_token"] < 0.1
