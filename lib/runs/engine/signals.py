"""Leaving in good order: after a signal all ranks finish the same step, write its checkpoint and exit.

SIGTERM comes from a machine that is about to be taken away, from torchrun when it ends its ranks,
or from Slurm at a preemption.
SIGUSR1 comes from Slurm, where ``#SBATCH --signal`` asks for it, and is ignored outside of Slurm jobs.
A signal may reach only some ranks, and these in different steps.
So in every step each rank adds a 1 to a message if it was asked to leave, and the sum comes back with the loss,
which the host reads anyway.
That costs no further message and no wait for the device.
On a GPU the host reads a step after it has started the next one; that next step is then the last, on all ranks.

The sender of the signal must wait for that step and its checkpoint; torchrun waits 30 s and then kills.
A rank that waits for a dead rank does not notice the signal, and is killed at that point.
"""

import os
import signal
import threading
import time
from types import FrameType

STATUS = 75
"""Exit status of a run that left before its last step: "try again later" (sysexits.h). Started again, it continues."""


GRACE_S = 30.0  # as long as torchrun itself waits between SIGTERM and SIGKILL


def follow_launcher() -> None:
    """Leave when the launcher has died, even if it could send no signal:
    ``kill -9`` of torchrun would leave its ranks running.

    Once a second a thread checks that this process still has its original parent.
    If not, the thread sends this rank a SIGTERM, and ends the process after `GRACE_S` if it is still there.
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
    """``with Signals() as signals:`` inside, a signal only sets ``signals.asked``;
    afterwards the old handlers are back.

    Outside of the block a signal ends the process at once, because there is nothing to save.
    Does nothing outside of the main thread, which alone can set signal handlers.
    """

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, object] = {}

    def ask(self, number: int = 0, frame: FrameType | None = None) -> None:
        """The signal handler."""
        self.asked = True

    def __enter__(self) -> "Signals":
        numbers = [signal.SIGTERM, *([signal.SIGUSR1] if "SLURM_JOB_ID" in os.environ else [])]
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.ask) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]
