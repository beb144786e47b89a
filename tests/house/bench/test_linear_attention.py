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
