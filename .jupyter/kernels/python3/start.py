"""Start a kernel of the book: as a fork of the process that FORKSERVER names, as in the site's build, or right here."""

import os
import runpy
import signal
import sys
from pathlib import Path

SERVER = Path(__file__).parents[3] / "lib" / "ranks" / "forkserver.py"  # by its path: to import lib would import torch


def main() -> None:
    del sys.path[0]  # this file's folder
    if where := os.environ.get("FORKSERVER"):
        forkserver = runpy.run_path(str(SERVER))
        request = forkserver["Request"](
            program="ipykernel_launcher", arguments=sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ)
        )
        kernel = forkserver["ask"](where, request, sys.stderr.fileno())
        signal.signal(signal.SIGINT, lambda number, _: os.kill(kernel.pid, number))  # how Jupyter interrupts a cell
        sys.exit(kernel.wait())
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
