"""One step of an installation, for the Makefile: says what is being done, for how long, and how long it took last time.

    python3 -I lib/workbook/tools/step.py "Installing the book's packages" .venv/bin/python -m pip install --editable .

It runs before anything is installed, as a file, so it imports nothing of the book's.
"""

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

TIMES = Path(".workbook/steps.json")
"""Seconds that each step took last time, in the folder that keeps what a learner does."""
TICK_S = 0.5
SHOWN_LINES = 30
WIDTH = 100
PIP = re.compile(r"\s*(?:Collecting|Downloading|Using cached|Installing collected packages:|Building) (?P<what>.+)")


def run(label: str, command: list[str]) -> int:
    """Run a command, show how far it is, and return its exit status; if it fails, show the end of what it printed."""
    before, began = times().get(label), time.monotonic()
    last = f" ({before:.0f} s last time)" if before else ""
    print(f"{label}{last}", flush=True)
    said: list[str] = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert process.stdout is not None
    listener = threading.Thread(target=said.extend, args=(process.stdout,))
    listener.start()
    while process.poll() is None:
        listener.join(TICK_S)
        if sys.stdout.isatty():
            progress = f"  {time.monotonic() - began:.0f} s  {doing(said)}"
            print(f"\r{progress[:WIDTH]:<{WIDTH}}", end="", flush=True)
    listener.join()
    took = time.monotonic() - began
    end = "\r" if sys.stdout.isatty() else ""
    if process.returncode:
        print("".join(said[-SHOWN_LINES:]), end="")
        print(f"{end}{f'  failed after {took:.0f} s':<{WIDTH}}".rstrip(), flush=True)
    else:
        print(f"{end}{f'  done in {took:.0f} s':<{WIDTH}}".rstrip(), flush=True)
        TIMES.parent.mkdir(exist_ok=True)
        TIMES.write_text(json.dumps({**times(), label: round(took, 1)}), encoding="utf-8")
    return process.returncode


def times() -> dict[str, float]:
    """How long each step took last time; nothing if the file is missing or damaged."""
    try:
        return dict(json.loads(TIMES.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def doing(said: list[str]) -> str:
    """What pip is at: the last package that it named."""
    found = next((match for line in reversed(said[-50:]) if (match := PIP.match(line))), None)
    return found["what"].strip() if found else ""


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
