"""Make a data set of pictures for `lib.runs.train_vit` from a Debian package: Fashion-MNIST.

python -m lib.runs.pictures my_pictures
python -m lib.runs.train_vit --data my_pictures --image-size 28 --patch-size 4 --dim 128 --n-layers 6 --steps 960 \\
    --eval-every 240

The package is downloaded with apt, which needs no special rights for this, and is unpacked, not installed. Its idx
files become ``train.parquet`` and ``test.parquet``, and ``pictures.json`` names the package's version and licence.
`lib.runs.train_vit` never trains on the pictures of ``test``.
"""

import argparse
import sys
from pathlib import Path

from lib.runs.data.pictures import write_pictures
from lib.runs.flags import Parser
from lib.runs.memory import shortage


def make_parser() -> argparse.ArgumentParser:
    """All flags of this program."""
    parser = Parser(
        prog="python -m lib.runs.pictures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the data set is written")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 after one line about what is wrong."""
    try:
        folder = make_parser().parse_args(argv).folder
        counts = write_pictures(folder)
        print(f"{folder}: {counts['train']:,} pictures to train on and {counts['test']:,} to test")
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        why = shortage(error, ["more memory"]) or error
        print(f"python -m lib.runs.pictures: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
