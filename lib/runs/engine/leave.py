"""Leaving in good order: a signal asks, all ranks agree, the step that runs is the last, and its checkpoint is written.

SIGTERM comes from a machine that is taken away, from torchrun when it ends its ranks, from Slurm at a preemption; SIGUSR1 from Slurm, as
``#SBATCH --signal`` says, and is heeded in a Slurm job only. They need not reach all ranks, nor all in the same step. So each rank adds
to every step's message a 1 if it was asked, and the sum comes back with the loss, which the host reads anyway: no message more, and no
wait for the device. On a GPU the host reads a step when it has begun the next, which is then the last, on all ranks alike.

Whoever asks must wait for that step and its checkpoint: torchrun waits 30 s by itself, then it kills. A rank that waits for another that died
hears nothing, and is killed then.
"""

import os
import signal
import threading
import time
from types import FrameType

STATUS = 75
"""The exit status of a run that left before its last step: "try again later" (sysexits.h). Started again it goes on."""


GRACE_S = 30.0  # as long as torchrun itself waits between SIGTERM and SIGKILL


def follow_launcher() -> None:
    """Leave when the launcher is gone, also when nobody could say so: ``kill -9`` of torchrun would leave its ranks running.

    A thread looks once a second whether this process still has the parent that it began with. If not, it asks this rank to
    leave, as a signal would, and ends it after `GRACE_S` if it has not left by then.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os._exit(STATUS)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


class Signals:
    """``with Signals() as signals:`` what asks to leave only sets ``signals.asked``, and the handlers of before come back after.

    Before and after it, a signal ends the process at once: there is nothing to save then. Does nothing when called outside of
    the main thread, which alone can set signal handlers.
    """

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, object] = {}

    def ask(self, number: int = 0, frame: FrameType | None = None) -> None:
        """What the signals call."""
        self.asked = True

    def __enter__(self) -> "Signals":
        numbers = [signal.SIGTERM, *([signal.SIGUSR1] if "SLURM_JOB_ID" in os.environ else [])]
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.ask) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]
