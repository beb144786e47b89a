"""The report on the whole way: what each station's model can do, what it cost, and what had been predicted."""

import json
from pathlib import Path
from typing import Any

from lib.runs.data.corpus import read_facts
from lib.runs.data.store import save
from lib.runs.flags import UsageError
from lib.runs.stations.plan import MODELS, Prediction, Way

PREDICTIONS = "predictions.json"
WORDS = {
    "bits_per_byte": "bits per byte of the held-out text",
    "accuracy": "share of right answers",
    "gain": "share of right answers, more than before",
    "bits_per_byte_lost": "bits per byte, more than after pre-training",
}


# ---- predictions -----------------------------------------------------------------------------------------------------


def keep_predictions(way: Way) -> list[Prediction]:
    """The predictions of the folder; those of the size are written if there are none. Nothing replaces them later.

    Raises:
        UsageError: the file in the folder holds something else.
    """
    path = way.folder / PREDICTIONS
    if not path.exists():
        save(path, (json.dumps(list(way.size.predictions), indent=1) + "\n").encode())
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for p in found:
            if p["what"] not in WORDS or p["station"] not in MODELS or not p["low"] <= p["high"]:
                raise ValueError(f"{p}: expected a station of {', '.join(MODELS)}, what of {', '.join(WORDS)}, and "
                                 "low not above high")  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        text = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path}: {text}; expected a list of objects with station, what, low, high and why") from None
    return found


def shown(number: float, what: str) -> str:
    return f"{number:.2f}" if what.startswith("bits") else f"{number:.0%}"


def told(p: Prediction) -> str:
    """A prediction as a line."""
    between = f"{shown(p['low'], p['what'])} to {shown(p['high'], p['what'])}"
    return f"{p['station']}: {WORDS[p['what']]} {between}, since {p['why']}"


def judged(predictions: list[Prediction], stations: dict[str, dict[str, Any]], task: str) -> list[Prediction]:
    """Each prediction with what was measured, None where nothing was, and whether it lay in the interval."""
    found = []
    for p in predictions:
        value = measured(p, stations, task)
        found.append({**p, "measured": value, "held": None if value is None else p["low"] <= value <= p["high"]})
    return found


def measured(p: Prediction, stations: dict[str, dict[str, Any]], task: str) -> float | None:
    """The result that a prediction is about."""
    before = stations.get("tune" if p["what"] == "gain" else "pretrain", {}).get("tasks", {})
    now = stations.get(p["station"], {}).get("tasks", {})
    key, name = ("text", "bits_per_byte") if p["what"].startswith("bits") else (task, "accuracy")
    if key not in now or (p["what"] in ("gain", "bits_per_byte_lost") and key not in before):
        return None
    value = now[key][name]
    return value - before[key][name] if p["what"] in ("gain", "bits_per_byte_lost") else value


# ---- stations --------------------------------------------------------------------------------------------------------


def results_of(way: Way, entry: dict[str, Any], station: str, price: float | None) -> dict[str, Any]:
    """What a station did and what it cost; None for what nothing here can know."""
    own = way.own.get(station)
    found: dict[str, Any] = {
        "own": own and str(own),
        "commands": way.commands(station),
        "tokens": None if own else tokens_of(way, station),
        "seconds": entry["seconds"],
        "kwh": entry["joules"] and entry["joules"] / 3.6e6,
        "dollars": None if price is None else entry["seconds"] / 3600 * price,
    }
    results = way.folder / station / "evaluation.json"
    if station in MODELS:
        found["tasks"] = json.loads(results.read_text(encoding="utf-8"))["tasks"]
        found["example"] = first_example(way.folder / station / "examples.md", way.size.task)
    return found


def tokens_of(way: Way, station: str) -> int | None:
    """Tokens that a station has written, trained on or sampled."""
    if station == "corpus":
        return read_facts(way.at("corpus"))["tokens"]
    if station not in MODELS:
        return None
    lines = [json.loads(line) for line in (way.at(station) / "log.jsonl").read_text().splitlines()]
    if station == "reward":
        flags = way.size.reward.split()
        rows = int(flags[flags.index("--prompts") + 1]) * int(flags[flags.index("--group") + 1])
        return round(sum(line["length"] * rows for line in lines if "reward" in line))
    return round(sum(line["tokens_per_s"] * line["seconds"] for line in lines if "tokens_per_s" in line))


def first_example(path: Path, task: str) -> str:
    """The first question of a task and what the model made of it, from a page of examples."""
    part = path.read_text(encoding="utf-8").partition(f"# {task}:")[2]
    return part.partition("\n")[2].partition("\n- read out")[0].strip()


# ---- the page --------------------------------------------------------------------------------------------------------


def write_report(way: Way, report: dict[str, Any]) -> str:
    """Write report.json and report.md into the folder, and return the table."""
    save(way.folder / "report.json", (json.dumps(report, indent=1) + "\n").encode())
    head = table(report)
    save(way.folder / "report.md", page(report, head).encode())
    return head


def table(report: dict[str, Any]) -> str:
    """The stations as a table of Markdown."""
    rows = ["| station | what its model can do | tokens | seconds | kWh | dollars |", "|---|---|---|---|---|---|"]
    for name, found in report["stations"].items():
        tasks = [ability(task, result) for task, result in found.get("tasks", {}).items()]
        own = f"your {found['own']}" if found["own"] else ""
        numbers = (("tokens", ",d"), ("seconds", ",.0f"), ("kwh", ".4f"), ("dollars", ".2f"))
        cells = [name, "; ".join(filter(None, [own, *tasks])) or "–", *(number(found[k], form) for k, form in numbers)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def ability(task: str, result: dict[str, Any]) -> str:
    """A result in words, with its interval."""
    if "bits_per_byte" in result:
        return f"{result['bits_per_byte']:.2f} bits per byte of held-out text"
    return (f"{task} {result['accuracy']:.0%} right ({result['low']:.0%} to {result['high']:.0%} of "
            f"{result['questions']})")  # fmt: skip


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def page(report: dict[str, Any], head: str) -> str:
    """All of the report as Markdown."""
    lines = [f"# The whole way, {report['size']}", "", head, "", "## Predictions", "",
             "| predicted before the run | measured | |", "|---|---|---|"]  # fmt: skip
    for p in report["predictions"]:
        value = "–" if p["measured"] is None else shown(p["measured"], p["what"])
        verdict = {None: "not measured", True: "held", False: "**missed**"}[p["held"]]
        lines.append(f"| {told(p)} | {value} | {verdict} |")
    for name, found in report["stations"].items():
        lines += ["", f"## {name}", "", *(f"    {' '.join(command)}" for command in found["commands"])]
        lines += ["", found["example"]] if found.get("example") else []
    return "\n".join([*lines, "", "## Serve it", "", f"    {' '.join(report['serve'])}", ""])
