"""A data set of pictures from a Debian package: Fashion-MNIST (``lib.runs.pictures``)."""

import gzip
import io
import json
import struct
import tempfile
from pathlib import Path

import numpy as np

from lib.runs.data.corpus import make_place
from lib.runs.data.gathering import unpacked
from lib.runs.lock import closing_lock

PACKAGE = "dataset-fashion-mnist"
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SPLITS = {"train": "train", "test": "t10k"}
"""Each split, and how the names of its files begin."""


def read_idx(path: Path) -> np.ndarray:
    """The bytes that a compressed idx file holds, in the shape that its head says.

    Raises:
        ValueError: It is not such a file, or it is cut short; the message names it.
    """
    try:
        data = gzip.decompress(path.read_bytes())
        zero, kind, n_axes = struct.unpack(">HBB", data[:4])
        shape = struct.unpack(f">{n_axes}I", data[4 : 4 + 4 * n_axes])
    except (OSError, EOFError, struct.error) as error:
        raise ValueError(
            f"{path.name} is no idx file that can be read ({error}): expected bytes, compressed by gzip"
        ) from None
    values = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * n_axes)
    if (zero, kind) != (0, 8) or len(values) != np.prod(shape):
        raise ValueError(f"{path.name} holds {len(values):,} bytes for the shape {shape}: expected one for each place")
    return values.reshape(shape)


def read_split(folder: Path, beginning: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures ``[n, height, width]`` and classes ``[n]`` of a split.

    Raises:
        ValueError: Its files are missing or damaged, or there are not as many pictures as classes.
    """
    found = {axes: sorted(folder.rglob(f"{beginning}-*-idx{axes}-ubyte.gz")) for axes in (3, 1)}
    if not all(found.values()):
        raise ValueError(f"there is no {beginning}-images-idx3-ubyte.gz with its labels-idx1-ubyte.gz: expected both")
    pictures, labels = (read_idx(found[axes][0]) for axes in (3, 1))
    if len(pictures) != len(labels) or labels.max(initial=0) >= len(CLASSES):
        raise ValueError(
            f"{beginning}: {len(pictures):,} pictures, {len(labels):,} classes up to "
            f"{labels.max(initial=0)}: expected as many, below {len(CLASSES)}"
        )
    return pictures, labels


def write_split(path: Path, pictures: np.ndarray, labels: np.ndarray) -> None:
    """One row a picture, as ``datasets`` writes them: a PNG in the column "img", a class in the column "label"."""
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as Picture

    def png(pixels: np.ndarray) -> dict[str, bytes | None]:
        file = io.BytesIO()
        Picture.fromarray(pixels).save(file, "png")
        return {"bytes": file.getvalue(), "path": None}

    features = Features({"img": Image(), "label": ClassLabel(names=list(CLASSES))})
    rows = {"img": [png(pixels) for pixels in pictures], "label": labels.tolist()}
    Dataset.from_dict(rows, features=features).to_parquet(path)


def write_pictures(folder: Path) -> dict[str, int]:
    """Download the package and write its data set into ``folder``; returns the number of pictures of each split.

    Raises:
        ValueError: The folder cannot be written to, or the package's files are damaged.
        RuntimeError: The package cannot be downloaded.
    """
    make_place(folder)
    with closing_lock(folder), tempfile.TemporaryDirectory() as place:
        source = unpacked(PACKAGE, Path(place))
        splits = {split: read_split(Path(place), beginning) for split, beginning in SPLITS.items()}
        for split, (pictures, labels) in splits.items():
            write_split(folder / f"{split}.parquet", pictures, labels)
        counts = {split: len(labels) for split, (_, labels) in splits.items()}
        facts = {"package": source.name, "version": source.version, "licences": source.licences, **counts}
        (folder / "pictures.json").write_text(json.dumps(facts, indent=1))
    return counts
