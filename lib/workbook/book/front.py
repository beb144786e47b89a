"""The front page's numbers, each counted or measured, and the entry by which the book is cited."""

import html
import tomllib
from typing import Any

import yaml

from lib.given.data.record import load
from lib.workbook.book.backmatter import Listing, hardware
from lib.workbook.book.catalog import ROOT, all_exercises, chapters

STYLE = """<style>
.workbook-numbers {display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1rem;
  margin: 1rem 0}
.workbook-numbers div {border-top: 3px solid #1f7fc4; padding-top: .4rem}
.workbook-numbers strong {display: block; font-size: 1.7em; line-height: 1.2}
.workbook-numbers p {margin: .3rem 0 0}
</style>"""


class Numbers:
    """A few large numbers, each with the sentence that explains it."""

    def __init__(self, found: list[tuple[str, str]]):
        self.found = found

    def _repr_html_(self) -> str:
        cells = (f"<div><strong>{html.escape(n)}</strong><p>{html.escape(text)}</p></div>" for n, text in self.found)
        return f'{STYLE}<div class="workbook-numbers">{"".join(cells)}</div>'

    def __repr__(self) -> str:
        return "\n".join(f"{number}: {text}" for number, text in self.found)


def numbers() -> Numbers:
    """How many exercises there are, how much faster training gets, how much memory sharding saves,
    and a race with timm.
    """
    return Numbers([_exercises(), _speed(), _memory(), _race()])


def ending() -> Numbers:
    """Chapter 22's predicted run, in three numbers."""
    measured = load("scaling_laws")
    run, plan = measured["results"]["run"]["ours"], measured["results"]["predict"]
    loss = run["held_out"][-1]["held_out_loss"]
    return Numbers(
        [
            (
                f"{plan['tokens'] / 1e6:.0f} million tokens",
                f"GPT-2 124M, in {run['legs']} legs, {run['tokens_per_s']:,.0f} tokens per second ({_short(measured)})",
            ),
            (
                f"{run['dollars']:.2f} dollars",
                f"for {run['wall_s'] / 60:.1f} minutes of one GPU and {run['kwh']:.3f} kWh",
            ),
            (
                f"{loss:.2f} nats",
                f"for each held-out token, where {plan['held_out_loss']:.2f} had been predicted before the run began",
            ),
        ]
    )


def way() -> Numbers:
    """The largest recorded run of the whole way, in three numbers."""
    results = load("whole")["results"]
    size = "small" if "small" in results else "tiny"
    found = results[size]
    stations, cards = found["stations"].values(), f"{found['gpus']} x " if found["gpus"] > 1 else ""
    begin = "a corpus" if found["stations"]["corpus"]["own"] else "an empty folder"
    known = [key for key in ("kwh", "dollars") if all(s[key] is not None for s in stations if s["seconds"] > 1)]
    forms = {"kwh": "{:.2f} kWh", "dollars": "{:.2f} dollars"}
    spent = [forms[key].format(sum(s[key] or 0 for s in stations)) for key in known]
    before, after = (found["stations"][name]["tasks"][found["task"]] for name in ("tune", "reward"))
    judged = [p["held"] for p in found["predictions"] if p["held"] is not None]
    return Numbers(
        [
            (
                f"{sum(s['seconds'] for s in stations) / 60:.0f} minutes",
                ", ".join([f"from {begin} to an answer, size {size}, on {cards}{found['device']}", *spent]),
            ),
            (
                f"{before['accuracy']:.1%}, then {after['accuracy']:.1%}",
                f"of {after['questions']:,} held-out questions right after tuning ({before['low']:.0%} to "
                f"{before['high']:.0%}) and after rewards ({after['low']:.0%} to {after['high']:.0%})",
            ),
            (f"{sum(judged)} of {len(judged)}", "predictions held, which were written down before the run began"),
        ]
    )


def _exercises() -> tuple[str, str]:
    n_chapters = len(chapters())
    return (
        f"{len(all_exercises())} exercises",
        f"functions and classes in {n_chapters} chapters, each with its own check",
    )


def _speed(batch: int = 16) -> tuple[str, str]:
    """From the first rung of chapter 8's ladder to the top, for GPT-2."""
    ladder = load("ladder_gpt2")
    rate = {
        r["rung"]["name"]: r["items_per_s"]["ours"] for r in ladder["results"]["rungs"] if r["rung"]["batch"] == batch
    }
    first, top = rate["float32"], rate["top"]
    return (
        f"{top / first:.0f} times as fast",
        f"chapter 8 takes the training of GPT-2 from {first:,.0f} tokens per second, in float32 without TF32, to "
        f"{top:,.0f}, on one GPU ({_short(ladder)})",
    )


def _memory(n_ranks: str = "4", model: str = "ViT-G/14") -> tuple[str, str]:
    """Peak memory with chapter 12's sharding, beside that of PyTorch's DDP."""
    measured = load("fsdp")
    peak = {
        name: row["peak_bytes"] / 1e9
        for name, row in measured["results"]["ranks"][n_ranks][model]["competitors"].items()
    }
    return (
        f"{peak['ours']:.0f} GB instead of {peak['ddp']:.0f} GB",
        f"peak memory of each of four GPUs that train {model}: "
        "with the sharding that you write in chapter 12, and with "
        f"PyTorch's DDP ({_short(measured)})",
    )


def _race(model: str = "L/16", batch: int = 256, n_gpus: int = 4) -> tuple[str, str]:
    """The yardstick's first cell: this book's training beside timm's."""
    measured = load("yardstick")
    place = model, batch, n_gpus
    cell = next(c for c in measured["results"]["cells"] if (c["model"], c["batch"], c["n_gpus"]) == place)
    ours, peer = (cell["competitors"][who]["images_per_s"] for who in ("ours", "peer"))
    return (
        f"{ours / peer - 1:.0%} ahead of timm",
        f"the book's ViT-{model} trains on {ours:,.0f} images per second on four GPUs, and timm under PyTorch's DDP on "
        f"{peer:,.0f} ({_short(measured)})",
    )


def _short(measured: dict[str, Any]) -> str:
    """The hardware and the day, without the version of Python."""
    on, *_, date = hardware(measured).split(", ")
    return f"{on}, {date}"


COLAB_BRANCH = "notebooks"
"""Where the workflow that publishes the site puts every page as a notebook: Colab opens files of a repository only."""
COLAB_CHAPTERS = range(1, 9)
"""Chapters whose cells need one process and no Triton, or say what they skip."""


class Doors:
    """The ways into the book, as buttons, each with its address; those of a row share the words before them."""

    def __init__(self, rows: dict[str, list[tuple[str, str]]]):
        self.rows = rows

    def _repr_html_(self) -> str:
        return "".join(
            f'<p class="workbook-doors">{html.escape(head)} {" ".join(_door(head, *found) for found in row)}</p>'
            for head, row in self.rows.items()
        )

    def __repr__(self) -> str:
        return "\n".join(f"{head} {text}: {url}".strip() for head, row in self.rows.items() for text, url in row)


def _door(head: str, text: str, url: str) -> str:
    label = html.escape(f"{head} {text}".strip())
    return f'<a class="workbook-door" href="{html.escape(url)}" aria-label="{label}">{html.escape(text)}</a>'


def repository() -> str:
    """The address of the book's repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Source"])


def doors() -> Doors:
    """Where a reader can open the book without installing it, and where to get it."""
    source = repository()
    name = source.removeprefix("https://github.com/")
    notebooks = f"https://colab.research.google.com/github/{name}/blob/{COLAB_BRANCH}/chapters"
    first = [chapter for chapter in chapters().values() if chapter.number in COLAB_CHAPTERS]
    return Doors(
        {
            "": [
                ("Open in Codespaces", f"https://codespaces.new/{name}"),
                ("Download", f"{source}/archive/refs/heads/main.zip"),
            ],
            "Open in Colab, chapter": [(str(c.number), f"{notebooks}/{c.path.stem}.ipynb") for c in first],
        }
    )


def citation() -> Listing:
    """The reference for a bibliography, made from CITATION.cff."""
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    book = cff["preferred-citation"]
    fields = {
        "title": f"{{{book['title']}}}",
        "author": f"{{{book['authors'][0]['name']}}}",
        "year": str(book["year"]),
        "version": str(book["version"]),
        "url": book["url"],
    }
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
    return Listing("\n".join(["```bibtex", "@book{scaling_workbook,", *lines, "}", "```"]))
