"""What the chapters on Triton are given: the interpreter, traces, tiles and launches."""
