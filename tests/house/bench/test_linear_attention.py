"""Chapter 24's measurements, tried at tiny sizes on the CPU."""

import sys

import pytest

from lib.bench import linear_attention
from lib.given.data.record import load


@pytest.mark.time_limit(120)
def test_chapter_24_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["linear_attention", "--device", "cpu", "--tiny", "--folder", str(tmp_path)])
    linear_attention.main()
    found = load("linear_attention", tmp_path)["results"]
    assert list(found["by_length"]) == ["32", "64"]
    assert {"chunked", "delta chunked", "attention", "kernel"} <= set(found["by_length"]["64"]["forward_s"])
    assert all(s["median"] > 0 for s in found["by_length"]["64"]["both_s"].values() if s)
    assert list(found["by_chunk_size"]) == ["16", "32"]
    assert found["decoding"]["64"]["state_bytes"] == found["decoding"]["16"]["state_bytes"]


def test_fla_is_measured_beside_the_kernel(tmp_path, monkeypatch):
    wrong = {"fla simple_gla": lambda q, k, v, beta, g: 1.5 * linear_attention.linear_attention_chunked(q, k, v, g)[0]}
    monkeypatch.setattr(linear_attention, "peers", lambda: wrong)
    words = ["linear_attention", "--device", "cpu", "--tiny", "--fla", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    linear_attention.main()
    found = load("linear_attention_fla", tmp_path)["results"]
    assert found["error"]["kernel"] < 1e-5
    assert found["error"]["fla simple_gla"] == pytest.approx(0.5, abs=1e-4)
    assert set(found["by_length"]["64"]) == {"kernel", "fla simple_gla", "attention"}
