"""How to start MPI processes on this machine alone: the launcher and its environment."""

import os
import shutil
import socket
import sys
from pathlib import Path


def mpiexec() -> str:
    """The launcher of the MPI that was installed beside this Python, else the system's.

    MPICH's ``mpiexec.gforker`` comes first: it forks its processes and uses pipes to them,
    while ``mpiexec`` listens on every address of the machine.

    Raises:
        FileNotFoundError: there is none.
    """
    beside = Path(sys.executable).parent
    for name in ("mpiexec.gforker", "mpiexec"):
        if (beside / name).exists():
            return str(beside / name)
    found = shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError(f"no mpiexec beside {sys.executable} or on PATH: python -m pip install mpich")
    return found


def loopback() -> str:
    """The name of the loopback interface, by which only the machine itself can reach it."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def mpi_environment() -> dict[str, str]:
    """Settings under which MPI's processes listen on the loopback interface only, also as root and on few cores."""
    only = loopback()
    settings = {
        "OMP_NUM_THREADS": "1",
        "UCX_NET_DEVICES": only,  # MPICH over UCX
        "FI_TCP_IFACE": only,  # MPICH over libfabric
        "HYDRA_LAUNCHER": "fork",  # also within a Slurm allocation
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_btl_tcp_if_include": only,
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_prte_if_include": only,
        "PMIX_MCA_ptl_tcp_if_include": only,
    }
    return {**settings, **os.environ}
