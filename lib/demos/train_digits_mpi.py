"""Train the digits ViT of chapter 5 on any number of MPI processes.

    mpiexec -n 4 python -m mpi4py -m lib.demos.train_digits_mpi --steps 60 --out four.json
    mpiexec -n 1 python -m mpi4py -m lib.demos.train_digits_mpi --steps 60 --out one.json

With ``-m mpi4py`` all processes end when one raises; without it the others would wait forever.
Every step uses the same batch whatever the number of processes; each process trains on an equal share of it.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

from lib.given.data.images import load_images, normalize_digits
from lib.mpi import average_gradients_mpi, tree_broadcast
from lib.runs.flags import ProgramParser, whole
from lib.vit import TINY, VisionTransformer

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def train(
    comm, n_steps: int = 60, batch: int = 64, lr: float = 3e-3, dtype: str = "float32", average: bool = True
) -> dict:
    """Train as chapter 5 does; ``losses`` are those of the whole batch.

    Args:
        comm: The communicator; its R ranks divide ``batch`` evenly.
        n_steps: Number of steps.
        batch: Images in a step, over all ranks.
        lr: Learning rate of AdamW.
        dtype: "float32" or "float64".
        average: Whether gradients are averaged; without that, the R models drift apart.

    Raises:
        ValueError: ``batch`` is not a multiple of R.
    """
    rank, n_ranks = comm.Get_rank(), comm.Get_size()
    if batch % n_ranks:
        share, rest = divmod(batch, n_ranks)
        raise ValueError(f"batch {batch} is not a multiple of {n_ranks} ranks: {batch} = {share} x {n_ranks} + {rest}")
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # a different seed on each rank, so each begins with different weights
    model = VisionTransformer(TINY).to(DTYPES[dtype])
    model.get_parameter("embeddings.pos_embed").data *= 50  # a spread of 1, as in chapter 5
    for p in model.parameters():
        tree_broadcast(comm, p.detach().numpy())  # rank 0's, in place
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    data, order = load_images("digits", "train"), torch.Generator().manual_seed(0)
    images, losses = normalize_digits(data.images).to(DTYPES[dtype]), []
    for _ in range(n_steps):
        chosen = torch.randint(len(data), (batch,), generator=order)  # the same on every rank
        mine = chosen[rank * batch // n_ranks : (rank + 1) * batch // n_ranks]
        loss = F.cross_entropy(model(images[mine]), data.labels[mine])
        optimizer.zero_grad()
        loss.backward()
        if average:
            average_gradients_mpi(comm, model)
        optimizer.step()
        losses.append(comm.allreduce(loss.item()) / n_ranks)
    return {"losses": losses, "weights_sha": _digest(model), "weights": _flat(model), "images_a_rank": len(mine)}


def _flat(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _digest(model) -> str:
    """Eight hexadecimal digits that change with any bit of the weights."""
    return hashlib.sha256(_flat(model).numpy().tobytes()).hexdigest()[:8]


def main() -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=whole(1), default=60)
    parser.add_argument("--batch", type=whole(1), default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--out", type=Path, help="JSON file for the losses, written by rank 0")
    options = parser.parse_args()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if options.batch % comm.size:
        parser.error(f"--batch {options.batch}: expected a multiple of the {comm.size} ranks")
    if options.out and not options.out.absolute().parent.is_dir():
        parser.error(f"--out {options.out}: there is no folder {options.out.parent}")
    run = train(comm, options.steps, options.batch, dtype=options.dtype)
    first, last = run["losses"][0], run["losses"][-1]
    print(f"rank {comm.rank} of {comm.size}: loss {first:.3f} to {last:.3f}, weights {run['weights_sha']}", flush=True)
    if comm.rank == 0 and options.out:
        options.out.write_text(json.dumps({"n_ranks": comm.size, "losses": run["losses"]}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
