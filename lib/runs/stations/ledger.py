"""What the whole way has done so far, in a file that survives a kill: stations, seconds, joules; and a child's run."""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib.ranks.processes import end_with_parent
from lib.runs.data.store import save
from lib.runs.engine.signals import STATUS, Signals
from lib.runs.flags import UsageError

STATE = "state.json"
TICK_S = 1.0
"""A kill loses no more of the clock than this."""
WATTS = ("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")
POWERCAP = Path("/sys/class/powercap")


class Ledger:
    """The state of a folder.

    Args:
        folder: Where the file is.
        request: What must stay the same when the command is given again.

    Raises:
        UsageError: the folder belongs to another request.
    """

    def __init__(self, folder: Path, request: dict[str, Any]) -> None:
        self.path = folder / STATE
        self.state: dict[str, Any] = {"request": request, "stations": {}}
        if self.path.is_file():
            self.state = json.loads(self.path.read_text())
            found = self.state["request"]
            for name, value in request.items():
                if found.get(name) != value:
                    raise UsageError(f"--out {folder} was begun with {name} = {found.get(name)}, and this asks for "
                                     f"{value}; expected the same, or another folder")  # fmt: skip

    def of(self, station: str) -> dict[str, Any]:
        """What is known of a station: whether it is done, its seconds, its joules if something measures them."""
        return self.state["stations"].setdefault(station, {"done": 0, "seconds": 0.0, "joules": None})

    def save(self) -> None:
        save(self.path, json.dumps(self.state, indent=1).encode())

    @contextmanager
    def clock(self, station: str) -> Iterator[None]:
        """Count the seconds, and the joules, that pass inside."""
        entry, ended, read_joules = self.of(station), threading.Event(), joules_reader()
        last: tuple[float, float | None] = (time.monotonic(), read_joules())

        def tick() -> None:
            nonlocal last
            now, joules = time.monotonic(), read_joules()
            entry["seconds"] += now - last[0]
            if joules is not None and last[1] is not None:
                entry["joules"] = (entry["joules"] or 0.0) + max(0.0, joules - last[1])
            last = now, joules
            self.save()

        def watch() -> None:
            while not ended.wait(TICK_S):
                tick()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            tick()


def joules_reader() -> Callable[[], float | None]:
    """A function that returns joules, counted from any beginning; it returns None if nothing on this machine measures.

    On a machine with NVIDIA's GPUs these are of all of them together, from ``nvidia-smi``'s watts.
    On another they are of the CPU's sockets, where the system lets us read its counters.
    """
    if shutil.which("nvidia-smi"):
        total, last = [0.0], [time.monotonic()]

        def of_gpus() -> float | None:
            watts, now = gpu_watts(), time.monotonic()
            if watts is None:
                return None
            total[0] += watts * (now - last[0])
            last[0] = now
            return total[0]

        return of_gpus
    counters = sorted(POWERCAP.glob("intel-rapl:?/energy_uj"))

    def of_cpu() -> float | None:
        try:
            return sum(int(path.read_text()) for path in counters) / 1e6 if counters else None
        except (OSError, ValueError):
            return None

    return of_cpu


def gpu_watts() -> float | None:
    """What all GPUs draw now; None if ``nvidia-smi`` does not say."""
    done = subprocess.run(WATTS, capture_output=True, text=True)
    try:
        return sum(map(float, done.stdout.split())) if done.returncode == 0 and done.stdout.strip() else None
    except ValueError:
        return None


def run_child(command: list[str]) -> int:
    """Run a program to its end and return its exit status.

    A signal to leave is passed on: the program saves, and its status is 75.
    If this process is killed, so is the program.
    """
    with Signals() as signals, subprocess.Popen(command, preexec_fn=end_with_parent) as process:
        was_asked = False
        while True:
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                if signals.asked and not was_asked:
                    was_asked = True
                    process.terminate()


def explained(status: int, station: str) -> str:
    """One line about a program that did not succeed."""
    if status == STATUS:
        return f"asked to leave at station {station}: the same command goes on from there"
    return (
        f"station {station}: its command ended with status {status}; mend that, and the same command goes on from there"
    )
