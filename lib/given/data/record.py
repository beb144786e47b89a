"""The measurements that the book shows: each a JSON file with its results,
the machine and the date (``lib.bench`` writes them).
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

MEASUREMENTS = Path(__file__).parents[3] / "chapters" / "measurements"
if "--tiny" in sys.argv:  # the program is only tried, so it must not change the book's records
    MEASUREMENTS = Path(tempfile.gettempdir()) / "workbook_trials"


def load(name: str, folder: Path = MEASUREMENTS) -> dict[str, Any]:
    """A recorded measurement: ``results``, ``machine`` and ``date``.

    Raises:
        FileNotFoundError: there is no measurement of that name; the message lists those that exist.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        there = ", ".join(sorted(p.stem for p in folder.glob("*.json"))) or "none"
        raise FileNotFoundError(f"no measurement {name!r}, only {there}; python -m lib.bench.{name} makes it")
    return json.loads(path.read_text(encoding="utf-8"))


def where(measured: dict[str, Any]) -> str:
    """The machine and the date of a measurement in one line, for the caption of a figure or table."""
    m = measured["machine"]
    cards = Counter(m.get("accelerators", []))
    named = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in cards.items())
    on = named or f"{m['cores']} cores of an {m['cpu']}"
    return f"measured on {on}, Python {m['python']}, {measured['date']}"
