"""Triton in class: interpreter, traces, tiles, launches."""
