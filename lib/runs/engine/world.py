"""Which rank this process is, as its launcher says: torchrun, Slurm's srun, mpiexec, or none."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lib.runs.flags import UsageError

# Each launcher, and its variables for the rank, the number of ranks, and the same two on this host.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process among the ranks.

    Attributes:
        rank: Its rank, from 0.
        size: Number of ranks R.
        local_rank: Its rank among those on this host.
        local_size: Number of ranks on this host.
        launcher: The program that started it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"


def find_world(env: Mapping[str, str] = os.environ) -> World:
    """This process's place, from an existing process group or from the environment.

    Raises:
        UsageError: the launcher's variables are not numbers, or do not fit together.
    """
    if dist.is_available() and dist.is_initialized():
        at, n_ranks = dist.get_rank(), dist.get_world_size()
        return World(rank=at, size=n_ranks, local_rank=at, local_size=n_ranks, launcher="group")
    for launcher, (rank, size, local_rank, local_size) in LAUNCHERS.items():
        # srun sets PMI_RANK too, to the same value; if they differ, mpiexec was started inside of a step
        is_around = launcher == "Slurm" and env.get("PMI_SIZE", env.get(size)) != env.get(size)
        if rank in env and size in env and not is_around:
            n_ranks = _number(env, size)
            here = _slurm_tasks_here(env) if launcher == "Slurm" else None
            place = World(
                rank=_number(env, rank),
                size=n_ranks,
                local_rank=_number(env, local_rank, _number(env, rank)),
                local_size=here or _number(env, local_size, n_ranks),
                launcher=launcher,
            )
            if not 0 <= place.rank < place.size:
                raise UsageError(
                    f"{rank}={place.rank} with {size}={place.size}: expected a rank from 0 to {n_ranks - 1}"
                )
            return place
    return World()


def _slurm_tasks_here(env: Mapping[str, str]) -> int | None:
    """Tasks on this host, from a list such as ``2(x3),1`` (two on each of three hosts, one on the last);
    None if it is not set.
    """
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(found[1])] * int(found[2] or 1)
    host = int(env.get("SLURM_NODEID", "0"))
    return counts[host] if host < len(counts) else None


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r} in the environment: expected a whole number")
    return int(text)


def choose_device(name: str, world: World) -> torch.device:
    """The device of this rank; nothing is allocated on it.

    A rank that sees one GPU takes it, because ``srun --gpus-per-task=1`` shows each task its own GPU as number 0.
    ``share_no_gpu`` checks later that no two ranks took the same one.

    Raises:
        UsageError: there is no GPU, or this host has several GPUs, but fewer than it has ranks.
    """
    n_gpus = torch.cuda.device_count() if name != "cpu" else 0
    if name == "cuda" and not n_gpus:
        raise UsageError("--device cuda: PyTorch sees no GPU here; expected --device cpu, or a machine that has one")
    if not n_gpus:
        return torch.device("cpu")
    if n_gpus == 1:
        return torch.device("cuda", 0)
    if world.local_size > n_gpus:
        raise UsageError(f"{world.local_size} ranks on this host share {n_gpus} GPUs: expected at most {n_gpus} ranks")
    return torch.device("cuda", world.local_rank)


def start_group(world: World, device: torch.device, env: Mapping[str, str] = os.environ) -> None:
    """Start the process group: NCCL between GPUs, gloo between CPUs. Does nothing if there is a group already.

    Raises:
        UsageError: two ranks have the same GPU.
    """
    if dist.is_initialized():
        return
    backend, its_device = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    store: dist.Store
    if world.size == 1 and world.launcher != "torchrun":
        store = dist.HashStore()
    elif world.launcher == "torchrun":
        store, _, _ = next(dist.rendezvous("env://"))
        # after a restart the agent's store still holds the addresses of dead ranks, so each attempt uses its own names
        attempt = f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}_of_{world.size}_ranks"
        store = dist.PrefixStore(attempt, store)
    elif "MASTER_ADDR" in env or world.launcher == "Slurm":
        store, _, _ = next(dist.rendezvous(f"tcp://{rendezvous(world, env)}", world.rank, world.size))
    else:
        store = _store_by_mpi(world)
    if device.type == "cuda":
        share_no_gpu(store, world, str(torch.cuda.get_device_properties(device).uuid))
    dist.init_process_group(backend, device_id=its_device, store=store, rank=world.rank, world_size=world.size)


def share_no_gpu(store: dist.Store, world: World, gpu: str) -> None:
    """Check that every rank has a GPU of its own, before NCCL fails with a long message. All ranks raise, or none does.

    Args:
        store: The store through which the ranks exchange their GPUs.
        world: This rank's place.
        gpu: The UUID of this rank's GPU.

    Raises:
        UsageError: two ranks have the same GPU.
    """
    store.set(f"gpu_of_{world.rank}", gpu)
    found = [store.get(f"gpu_of_{rank}").decode() for rank in range(world.size)]
    shared = {gpu: [rank for rank in range(world.size) if found[rank] == gpu] for gpu in found}
    if len(shared) == world.size:
        return
    store.set(f"read_by_{world.rank}", "")
    if world.rank == 0:  # which may host the store, so it must leave last
        store.wait([f"read_by_{rank}" for rank in range(world.size)])
    gpu, ranks = next((gpu, ranks) for gpu, ranks in shared.items() if len(ranks) > 1)
    raise UsageError(
        f"ranks {', '.join(map(str, ranks))} share one GPU (UUID {gpu}): "
        "expected as many GPUs on each host as ranks there, "
        "and under srun either --gpus-per-task=1 or all GPUs visible to each task"
    )


def rendezvous(world: World, env: Mapping[str, str]) -> str:
    """``host:port`` of rank 0: from MASTER_ADDR if it is set, else from Slurm.

    Raises:
        UsageError: Slurm names no host.
    """
    if "MASTER_ADDR" in env:
        return f"{env['MASTER_ADDR']}:{env.get('MASTER_PORT', '29500')}"
    return f"{_first_host(env)}:{_slurm_port(env)}"


def _first_host(env: Mapping[str, str]) -> str:
    """The first of ``node[01-04,07],other``."""
    if "SLURM_SRUN_COMM_HOST" in env and "SLURM_STEP_NODELIST" not in env:
        return env["SLURM_SRUN_COMM_HOST"]
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if not first:
        raise UsageError(f"SLURM_STEP_NODELIST={nodes!r} names no host: expected one, or MASTER_ADDR")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _slurm_port(env: Mapping[str, str]) -> int:
    """A port that depends on job and step, so that two jobs do not choose the same one."""
    return 20_000 + (31 * int(env.get("SLURM_JOB_ID", "0")) + int(env.get("SLURM_STEP_ID", "0"))) % 20_000


def _store_by_mpi(world: World) -> dist.Store:
    """Rank 0 listens on a free port and broadcasts it by MPI, which is then shut down: NCCL or gloo do the rest."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    MPI.Init()
    comm = MPI.COMM_WORLD
    address = listener = None
    if comm.rank == 0:
        listener = socket.create_server(("", 0))
        host = "127.0.0.1" if world.local_size == world.size else socket.gethostname()
        address = host, listener.getsockname()[1]
    n_ranks, (host, port) = comm.size, comm.bcast(address)
    MPI.Finalize()
    if n_ranks != world.size:
        raise UsageError(
            f"{world.launcher} started {world.size} ranks, but mpi4py was built for another MPI and sees {n_ranks}: "
            "expected the mpiexec beside this Python, or MASTER_ADDR and MASTER_PORT"
        )
    file = listener.detach() if listener else None
    return dist.TCPStore(host, port, world.size, is_master=world.rank == 0, master_listen_fd=file)


def agree(value: object, what: str) -> None:
    """Check that all ranks found the same value, before any of them continues.

    Raises:
        UsageError: the values differ; the message lists what each rank found.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        found: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        if any(other != found[0] for other in found):
            raise UsageError(f"the ranks disagree about {what}: {found}; expected one folder that all of them can see")
