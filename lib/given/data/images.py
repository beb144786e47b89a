"""Images: digits and a photograph that are on every machine already,
and one function for CIFAR-10 and your own files.
"""

import functools
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lib.given.data.folders import files_below

# Each name, the arguments of `datasets.load_dataset` for it, and the columns of the picture and the class.
DATA_SETS = {"cifar10": {"path": "uoft-cs/cifar10", "image": "img", "label": "label"}}
BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
SPLIT_SEED = 0
N_DIGITS_TEST = 360
DIGITS_MEAN, DIGITS_STD = 0.3, 0.37  # of the pixels of the handwritten digits, about


@dataclass(frozen=True, kw_only=True)
class Images:
    """Pictures with their classes.

    Attributes:
        images: Float32 ``[n, ch, height, width]``, from 0 to 1.
        labels: Int64 ``[n]``.
        classes: The name of each label.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)


def load_images(
    source: str | os.PathLike,
    split: str = "train",
    *,
    image: str | None = None,
    label: str | None = None,
    limit: int | None = None,
    progress: bool = False,
) -> Images:
    """The pictures of a data set or of your own files.

    Args:
        source: "digits" (8 x 8, grayscale, on every machine), "cifar10", any data set on the Hugging Face hub as
            "owner/name", a .parquet, .json or .jsonl file, or a folder of such files.
        split: "train" or "test".
            In a folder, the files whose names begin with it are read, apart from hidden ones;
            a single file is read whole.
        image: Column of the pictures, as ``datasets`` writes them, with their bytes or their path. The default is the
            data set's own column, or "img".
        label: Column of the classes, which are whole numbers from 0.
            The default is the data set's own, or "label".
            Where files name their classes, the names count: numbers are those of the first file.
        limit: Read at most this many pictures.
        progress: Show a bar that counts pictures.

    Raises:
        FileNotFoundError: there is no such file, folder or data set; the message says what there is.
        ValueError: a row lacks a column, or its class is beyond the names; its picture is cut short,
            or one that a tensor from 0 to 1 cannot hold (`_pixels`), or of another size than the first;
            or a file has other classes than the first.
            The message names the file and the row, counted from 1.
    """
    if str(source) == "digits":
        digits = _digits(split)
        return Images(images=digits.images[:limit], labels=digits.labels[:limit], classes=digits.classes)
    known = DATA_SETS.get(str(source), {})
    image, label = image or known.get("image", "img"), label or known.get("label", "label")
    rows = _rows(source, split, image)
    if progress:
        from tqdm.auto import tqdm

        rows = tqdm(rows, desc=Path(source).name, unit=" images", total=limit)
    pictures: list = []
    labels: list[int] = []
    last: dict | None = None
    ours: list[str] | None = None
    theirs: list[str] | None = None
    order: list[int] | None = None
    for where, row, found in rows:
        if limit is not None and len(pictures) >= limit:
            break
        if not pictures or found is not last:
            last, theirs = found, getattr((found or {}).get(label), "names", None)
            ours = ours if pictures else theirs
            order = order_of(theirs, ours, where)
        pictures.append(_picture(where, row, image, pictures))
        number = _class(where, row, label, theirs)
        labels.append(number if order is None else order[number])
    if not pictures:
        raise ValueError(f"{source}, split {split!r}: there is no row in it")
    names = ours or [str(i) for i in range(max(labels) + 1)]
    return Images(images=torch.stack(pictures), labels=torch.tensor(labels), classes=tuple(names))


def order_of(theirs: Sequence[str] | None, ours: Sequence[str] | None, where: str) -> list[int] | None:
    """Our number of each of their classes; None if the numbers are the same.

    Args:
        theirs, ours: Names of the classes in two files; None where a file has none.
        where: Their file, for the message.

    Raises:
        ValueError: they have a class that we have not, or only one of the two has names; the message lists both.
    """
    if theirs is None and ours is None:
        return None
    theirs, ours = theirs and list(theirs), ours and list(ours)
    if theirs is None or ours is None or not set(theirs) <= set(ours):
        raise ValueError(
            f"{where}: its classes are {_listed(theirs)}, those of the first file {_listed(ours)}; "
            "expected the same names"
        )
    return None if theirs == ours[: len(theirs)] else [ours.index(name) for name in theirs]


def _listed(names: Sequence[str] | None) -> str:
    if names is None:
        return "numbers without names"
    return f"[{', '.join(names)}]" if len(names) <= 20 else f"[{', '.join(names[:20])}, … {len(names)} in all]"


@functools.cache
def _digits(split: str) -> Images:
    """1797 scanned digits in a fixed random order; the last 360 are the test set."""
    if split not in ("train", "test"):
        raise ValueError(f"digits have the splits train and test, not {split!r}")
    table = torch.from_numpy(np.loadtxt(_digits_file(), delimiter=","))  # 64 pixels and the digit
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(SPLIT_SEED))
    chosen = table[order[:-N_DIGITS_TEST] if split == "train" else order[-N_DIGITS_TEST:]]
    pixels = chosen[:, :-1].float().view(-1, 1, 8, 8) / 16  # the scans have 17 shades
    return Images(images=pixels, labels=chosen[:, -1].long(), classes=tuple(map(str, range(10))))


def _digits_file() -> Path:
    """Scikit-learn's file of digits, read without importing scikit-learn, which takes two seconds in each process."""
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the digits are scikit-learn's: pip install scikit-learn", name="sklearn")
    return Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")


def normalize_digits(pixels: Tensor) -> Tensor:
    """Pixels of digits from 0 to 1 as numbers with a mean of about 0 and a standard deviation of about 1."""
    return (pixels - DIGITS_MEAN) / DIGITS_STD


def photograph(height: int | None = None, width: int | None = None) -> Tensor:
    """Rear Admiral Grace Hopper in colour, from matplotlib's sample data: float32 ``[3, height, width]`` from 0 to 1.

    Args:
        height: Scale to this many pixels; None keeps the picture's 600.
        width: Scale to this many pixels; None keeps the picture's 512.
    """
    from matplotlib import cbook
    from PIL import Image

    with cbook.get_sample_data("grace_hopper.jpg") as file, Image.open(file) as picture:  # type: ignore[union-attr]
        size = (width or picture.width, height or picture.height)
        return _pixels(picture.convert("RGB").resize(size, Image.Resampling.BICUBIC))


def _pixels(picture) -> Tensor:
    """A PIL image as ``[ch, height, width]`` from 0 to 1: grayscale keeps one channel, everything else gets three.

    The picture stands as its EXIF orientation says, and values are scaled by their mode's range: 1, 255 or 65,535.

    Raises:
        ValueError: values without a range (F, and I unless it is a PNG's or PGM's 16 bits), pixels that are not opaque,
            or several pictures in one file; the message names it.
    """
    from PIL import ImageOps

    if (
        getattr(picture, "n_frames", 1) > 1 and picture.format != "MPO"
    ):  # a camera's MPO: one picture and previews of it
        raise ValueError(f"an animation of {picture.n_frames} pictures, expected a single one")
    mode, is_16_bit = picture.mode, picture.mode.startswith("I;16")
    if mode == "F" or (mode.startswith("I") and not is_16_bit and picture.format not in ("PNG", "PPM")):
        raise ValueError(f"mode {mode}, whose values have no largest one to divide by; expected 8 or 16 bits")
    if picture.has_transparency_data and (is_16_bit or picture.convert("RGBA").getextrema()[3][0] < 255):
        raise ValueError(
            f"mode {mode} with transparent pixels, whose colour depends on what is behind; expected opaque ones"
        )
    picture = ImageOps.exif_transpose(picture)
    if mode in ("1", "L", "LA", "La"):
        array = np.array(picture.convert("L"), dtype=np.float32) / 255
    elif mode.startswith("I"):
        array = np.array(picture).astype(np.float32) / 65_535
    else:
        array = np.array(picture.convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


def _files_of(source: str | os.PathLike, split: str) -> list[Path]:
    """The files that a path stands for; none for the name of a data set."""
    path, kinds = Path(source), f"the kinds are {', '.join(BUILDERS)}"
    if path.is_file():
        if path.suffix not in BUILDERS:
            raise FileNotFoundError(f"{path}: cannot read {path.suffix or 'a file without suffix'}; {kinds}")
        return [path]
    if path.is_dir():
        files = files_below(path, BUILDERS, split)
        if not files:
            raise FileNotFoundError(f"{path} holds no file whose name begins with {split!r}; {kinds}")
        return files
    on_hub = str(source).count("/") == 1 and not str(source).startswith((".", "/")) and not path.suffix
    if str(source) not in DATA_SETS and not on_hub:
        there = ", ".join(["digits", *DATA_SETS])
        raise FileNotFoundError(
            f"no file or folder {path} (searched from {Path.cwd()}), and no data set: "
            f"those are {there} or owner/name on the hub"
        )
    return []


def has_test_split(source: str | os.PathLike) -> bool:
    """Whether a folder holds files of the split "test"."""
    path = Path(source)
    return path.is_dir() and bool(files_below(path, BUILDERS, "test", is_quiet=True))


def _rows(source: str | os.PathLike, split: str, image: str) -> Iterator[tuple[str, dict, dict | None]]:
    """("file, row n", the row, its features) for every row; the pictures are not decoded yet."""
    from datasets import Image, load_dataset

    files = _files_of(source, split)
    parts = [(str(p), {"path": BUILDERS[p.suffix], "data_files": {split: str(p)}}) for p in files]
    for name, what in parts or [(str(source), {"path": DATA_SETS.get(str(source), {}).get("path", str(source))})]:
        number = 0
        try:
            rows = load_dataset(**what, split=split, streaming=True)
            if isinstance((rows.features or {}).get(image), Image):
                rows = rows.cast_column(image, Image(decode=False))
            for number, row in enumerate(rows, start=1):
                yield f"{name}, row {number}", row, rows.features
        except (ValueError, OSError) as error:
            if not files:
                raise
            raise ValueError(f"{name}, after row {number}: the file cannot be read ({error})") from None


def _picture(where: str, row: dict, column: str, before: list[Tensor]) -> Tensor:
    from PIL import Image

    cell = row.get(column)
    if not isinstance(cell, dict) or not (cell.get("bytes") or cell.get("path")):
        raise ValueError(f"{where}: no picture in column {column!r}; its columns are {sorted(row)}")
    try:
        with Image.open(io.BytesIO(cell["bytes"]) if cell.get("bytes") else cell["path"]) as picture:
            pixels = _pixels(picture)
    except FileNotFoundError:
        raise FileNotFoundError(f"{where}: there is no file {cell['path']}") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{where}: the picture in column {column!r} cannot be read ({error})") from None
    if before and pixels.shape != before[0].shape:
        raise ValueError(f"{where}: the picture is {list(pixels.shape)}, the first one is {list(before[0].shape)}")
    return pixels


def _class(where: str, row: dict, column: str, names: Sequence[str] | None) -> int:
    value = row.get(column)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"{where}: no class (a whole number from 0) in column {column!r}, but {value!r}; "
            f"its columns are {sorted(row)}"
        )
    if names is not None and value >= len(names):
        raise ValueError(
            f"{where}: class {value} in column {column!r}, but the file names {len(names)}: "
            f"{_listed(names)}; expected 0 to {len(names) - 1}"
        )
    return value
