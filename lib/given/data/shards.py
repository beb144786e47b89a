"""Files of tokens: shards, the manifest that describes them, and an endless walk through windows."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

Folder = str | os.PathLike


def checked_ids(ids, vocab_size: int) -> np.ndarray:
    """Ids as an array.

    Raises:
        ValueError: one is not in the vocabulary; the message shows it.
    """
    array = np.asarray(ids, dtype=np.int64)
    wrong = array[(array < 0) | (array >= vocab_size)]
    if len(wrong):
        raise ValueError(f"id {wrong[0]} is not from 0 to vocab_size - 1 = {vocab_size - 1}")
    return array


def save_shard(folder: Path, number: int, tokens: bytes | bytearray | memoryview, width: int) -> dict[str, Any]:
    """Write one file of tokens of ``width`` bytes, and describe it: "name", "tokens", "sha256"."""
    name = f"shard_{number:05d}.bin"
    (folder / name).write_bytes(tokens)
    return {"name": name, "tokens": len(tokens) // width, "sha256": hashlib.sha256(tokens).hexdigest()}


def save_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Write ``manifest.json`` in one step, so that a reader sees all of it or none, and return it."""
    unfinished = folder / "manifest.json.part"
    unfinished.write_text(json.dumps(manifest, indent=1))
    unfinished.replace(folder / "manifest.json")
    return manifest


def open_shards(folder: Folder) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The manifest, and the tokens of each shard, mapped into memory.

    Raises:
        FileNotFoundError: there is no ``manifest.json``.
        ValueError: a shard is missing or has another size than the manifest says; the message names it.
    """
    manifest = json.loads((Path(folder) / "manifest.json").read_text())
    shards: list[np.ndarray] = []
    dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
    for shard in manifest["shards"]:
        path, expected = Path(folder) / shard["name"], shard["tokens"] * dtype.itemsize
        found = path.stat().st_size if path.exists() else None
        if found != expected:
            state = "is missing" if found is None else f"has {found:,} bytes"
            raise ValueError(f"{path} {state}; the manifest says {expected:,} bytes")
        shards.append(np.memmap(path, dtype, "r"))
    return manifest, shards


def manifest_mark(manifest: dict[str, Any]) -> str:
    """A short text that another manifest does not have."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class TokenWindows:
    """The counting of chapter 7's ``TokenBatches``: windows, ranks, epochs and a state, for a row that is anywhere.

    Args:
        n_tokens: Tokens in the row.
        batch: Windows in a batch of one rank.
        length: Tokens in a window.
        rank: Index of this rank.
        world_size: Number of ranks that share the row.
        seed: Seed of the shuffles; None keeps the order.
        manifest: What the row's files are; see ``manifest_mark``.

    Attributes:
        n_windows: Windows in an epoch.
        position: Windows that all ranks together have read, over all epochs.

    Raises:
        ValueError: too few tokens for one batch on every rank, or a wrong ``rank``.
    """

    def __init__(self, n_tokens: int, batch: int, length: int, rank: int, world_size: int, seed, manifest: str):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank = {rank} is not from 0 to world_size - 1 = {world_size - 1}")
        needed = world_size * batch * length + 1
        if n_tokens < needed:
            parts = f"{world_size} ranks x {batch} windows x {length} tokens + 1"
            raise ValueError(f"{n_tokens} tokens are too few: one step takes {parts} = {needed}")
        self.batch, self.length, self.rank, self.world_size = batch, length, rank, world_size
        self.seed, self.manifest = seed, manifest
        self.n_windows = (n_tokens - 1) // length
        self.position = 0

    @property
    def epoch(self) -> int:
        return self.position // self.n_windows

    def next_places(self) -> list[tuple[int, int]]:
        """The epoch and the place in it of each of this rank's next windows; all ranks move on."""
        first = self.position + self.rank * self.batch
        self.position += self.world_size * self.batch
        return [divmod(place, self.n_windows) for place in range(first, first + self.batch)]

    def __iter__(self):
        return self

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts: what JSON can write, the same on every rank and for every ``batch``."""
        return {"position": self.position, "length": self.length, "seed": self.seed, "manifest": self.manifest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; ``batch`` and the number of ranks may have changed.

        Raises:
            ValueError: another ``length``, ``seed`` or manifest; the message names which, and both values.
        """
        for name, ours in self.state_dict().items():
            if name != "position" and state[name] != ours:
                raise ValueError(f"{name} was {state[name]} when the state was saved and is {ours} now")
        self.position = int(state["position"])
