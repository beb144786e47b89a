"""Record the whole way: what each station's model could do and what it cost, read from the reports of finished runs.

``python -m lib.bench.whole way`` writes ``chapters/measurements/whole.json``, on the machine that made the folder way
with ``python -m lib.runs.whole --out way``. A size that was recorded before stays, unless it is among the folders.
Of that folder's path, and of those in the place of stations, the record keeps the last name.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from lib.bench.kit import machine, record
from lib.given.data.record import MEASUREMENTS, load
from lib.runs.flags import ProgramParser
from lib.runs.stations import plan


def main(argv: list[str] | None = None) -> None:
    """Read the reports and write the record."""
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="+", type=Path, metavar="FOLDER", help="folders of lib.runs.whole")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the record is written")
    o = parser.parse_args(argv)
    record("whole", recorded(o.folder) | dict(map(read, o.ways)), o.folder)


def recorded(folder: Path) -> dict[str, Any]:
    """The sizes that are recorded already."""
    try:
        return load("whole", folder)["results"]
    except FileNotFoundError:
        return {}


def read(way: Path) -> tuple[str, dict[str, Any]]:
    """The size of a folder, with the task if it is not today's, and its report with the machine.

    Raises:
        SystemExit: it has no report yet.
    """
    path = way / "report.json"
    if not path.is_file():
        raise SystemExit(f"{path} is not there: expected a folder in which lib.runs.whole has come to its end")
    text = path.read_text(encoding="utf-8")
    own = [Path(found["own"]) for found in json.loads(text)["stations"].values() if found["own"]]
    for folder in (way, *own):
        text = text.replace(f'"{folder}', f'"{folder.name}')
    report = json.loads(text)
    size, task = report["size"], report["task"]
    name = size if task == plan.SIZES[size].task else f"{size}, {task}"  # an earlier plan asked for something else
    return name, report | {"machine": machine()}


if __name__ == "__main__":
    main()
