"""The folders that a run writes to: whether they can be, and that no other run writes there at the same time."""

import os
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from lib.runs.engine.options import Options
from lib.runs.flags import UsageError
from lib.runs.lock import FolderLock, refuse_if_held


def _places(o: Options) -> list[tuple[str, Path]]:
    """Each folder that a run writes to, after the flag and the path that name it."""
    log = o.log and o.log.parent
    named = (
        (o.checkpoint_flag, o.checkpoint, o.checkpoint),
        ("--log-file", o.log, log),
        ("--tensorboard", o.tensorboard, o.tensorboard),
        ("--export", o.export, o.export),
    )
    return [(f"{flag} {path}", folder) for flag, path, folder in named if folder is not None]


def check_places(o: Options) -> None:
    """Check that the folders that a run writes to are there, or can be created. Creates nothing.

    Raises:
        UsageError: a folder cannot be created or written to.
    """
    for asked, folder in _places(o):
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
        if not nearest.is_dir():
            raise UsageError(
                f"{asked}: cannot create the folder {folder} ({nearest} is not a folder); "
                "expected a folder that can be written to"
            )
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UsageError(
                f"{asked}: no permission to write into {nearest}; expected a folder that can be written to"
            )
    if o.log and o.log.is_dir():
        raise UsageError(f"--log-file {o.log} is a folder; expected a file, such as {o.log / 'log.jsonl'}")


def make_places(o: Options) -> None:
    """Create the folders that a run writes to, so that it trains nothing that it could not save.

    Raises:
        UsageError: a folder cannot be created.
    """
    for asked, folder in _places(o):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{asked}: cannot create the folder {folder} ({error.strerror}); "
                "expected a folder that can be written to"
            ) from None


def _locked_places(o: Options) -> list[tuple[str, Path]]:
    """Each folder that belongs to one run alone, after its flag."""
    places = {
        path.resolve(): (f"{flag} {path}", path)
        for flag, path in (("--export", o.export), (o.checkpoint_flag, o.checkpoint))
        if path is not None
    }
    return list(places.values())


def check_unlocked(o: Options) -> None:
    """Check that no other run writes to this one's folders. Writes nothing.

    Raises:
        UsageError: one does.
    """
    for asked, folder in _locked_places(o):
        refuse_if_held(folder, asked)


def lock_places(o: Options, rank: int, held: ExitStack) -> None:
    """Lock this run's folders. Rank 0 holds the locks; all ranks call this together, and all raise, or none does.

    Raises:
        UsageError: another run was quicker.
    """
    refused: list[str | None] = [None]
    if rank == 0:
        try:
            for asked, folder in _locked_places(o):
                held.callback(FolderLock(folder, asked).release)
        except UsageError as error:
            refused = [str(error)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(refused, 0)
    if refused[0]:
        raise UsageError(refused[0])
