"""What the ranks of test_mesh.py do: take some steps on a mesh,
and put the gradient of the first one together again.
"""

import contextlib
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lib.given.models import vit
from lib.given.models.gpt2 import GPT2Config
from lib.runs import train_gpt2, train_vit
from lib.runs.engine import loop, tasks
from lib.runs.engine.loop import Run
from lib.runs.engine.mesh import Mesh
from lib.runs.engine.options import KINDS

PROGRAMS = {"vit": train_vit.main, "gpt2": train_gpt2.main}
TEXT = GPT2Config(vocab_size=40, context_len=16, dim=16, n_layers=4, n_heads=4)
PICTURES = vit.ViTConfig(
    image_size=8, patch_size=4, channels=1, n_classes=10, dim=16, n_layers=4, n_heads=4, hidden_dim=32
)


@contextlib.contextmanager
def small_models() -> Iterator[None]:
    """Smaller presets "tiny", with four heads and four layers each, so that four ranks can divide either."""
    text, pictures = tasks.GPT2_PRESETS["tiny"], vit.PRESETS["tiny"]
    tasks.GPT2_PRESETS["tiny"], vit.PRESETS["tiny"] = TEXT, PICTURES
    try:
        yield
    finally:
        tasks.GPT2_PRESETS["tiny"], vit.PRESETS["tiny"] = text, pictures


def gradients(run: Run) -> dict[str, torch.Tensor]:
    """The gradients of this rank's stage, whole, by the model's names."""
    found: dict[str, torch.Tensor] = {}
    for name, p in run.strategy.named().items():
        found |= run.strategy.whole(name, p.grad if p.grad is not None else torch.zeros_like(p))
    return {name: whole.detach().clone() for name, whole in found.items()}


def observe(command: str) -> dict[str, Any]:
    """Run one command. Returns its status, what it said, and the gradient of its last step before clipping."""
    seen: list[dict[str, torch.Tensor]] = []
    backward = Run.backward

    def watched(self: Run, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        numbers = backward(self, inputs, targets)
        seen.append(gradients(self) if len(seen) == self.options.steps - 1 else {})
        return numbers

    program, *argv = command.split()
    said = io.StringIO()
    Run.backward = watched
    try:
        with contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Grad strides do not match")  # PyTorch's DDP, of one picture
            status = PROGRAMS[program]([*argv, "--quiet", "--device", "cpu"])
    finally:
        Run.backward = backward
    return {"status": status, "said": said.getvalue(), "gradient": seen[-1] if seen else {}}


def observe_all(rank: int, world_size: int, commands: list[str], folder: str) -> list[tuple[int, str]]:
    """Each command's status and what it said; every rank writes its gradients into the folder.

    Runs with the same degrees share a mesh.
    """
    results: list[tuple[int, str]] = []
    meshes: dict[tuple[int, ...], Any] = {}

    def one_mesh(options: Any, device: torch.device) -> Any:
        degrees = tuple(getattr(options, kind) for kind in KINDS)
        if degrees not in meshes:
            meshes[degrees] = Mesh(options, device)
        return meshes[degrees]

    with mock.patch.object(loop, "Mesh", one_mesh), small_models():
        for i, command in enumerate(commands):
            found = observe(command)
            torch.save(found["gradient"], Path(folder, f"{i}.{rank}"))
            results.append((found["status"], found["said"]))
            dist.barrier()  # the next run looks at the folder's lock, which rank 0 may still hold
    return results
