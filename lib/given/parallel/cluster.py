"""Ranks beside a notebook: MPI processes that each run a ``%%px`` cell and show their own output."""

import atexit
import logging
import os
import tempfile

from lib.ranks.mpi_launch import mpi_environment, mpiexec


class Ranks:
    """MPI processes beside the kernel. ``stop()`` ends them, and so does the end of the kernel."""

    def __init__(self, n: int = 4, timeout_s: float = 60):
        import ipyparallel
        from traitlets.config import Config

        os.environ.update(mpi_environment())
        self._folder: tempfile.TemporaryDirectory | None = tempfile.TemporaryDirectory(prefix="workbook-ranks-")
        config = Config()
        config.MPILauncher.mpi_cmd = [mpiexec()]
        config.Cluster.controller_ip = "127.0.0.1"
        self.n = n
        self._cluster = ipyparallel.Cluster(
            n=n, engines="mpi", config=config, profile_dir=self._folder.name, log_level=logging.ERROR
        )
        atexit.register(self.stop)
        try:
            self._cluster.start_cluster_sync()
            self.client = self._cluster.connect_client_sync()
            self.client.wait_for_engines(n, timeout=timeout_s, interactive=False)
        except BaseException:
            self.stop()
            raise
        self.view = self.client[:]
        self.view.block = True
        self._register()

    def _register(self) -> None:
        """Point ``%%px`` at these ranks, in rank order and without a progress bar. Does nothing outside of IPython."""
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is None:
            return
        self.view.activate()
        magics = shell.magics_manager.registry["ParallelMagics"]
        magics.progress_after_seconds = -1
        magics.stream_output = False

    def __repr__(self) -> str:
        return f"{self.n} MPI ranks; %%px runs a cell on each" if self._folder else "stopped"

    def stop(self) -> None:
        """End every rank. A second call does nothing."""
        if self._folder is None:
            return
        atexit.unregister(self.stop)
        if getattr(self, "client", None) is not None:
            self.client.close()
        self._cluster.stop_cluster_sync()
        self._folder.cleanup()
        self._folder = None


def start(n: int = 4, timeout_s: float = 60) -> Ranks:
    """Start ``n`` MPI ranks and register ``%%px``, which runs a cell on each of them.

    Args:
        n: Number of ranks; four work well on two cores.
        timeout_s: Longest time that starting them may take.
    """
    return Ranks(n, timeout_s)
