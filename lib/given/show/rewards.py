"""Runs of ``lib.runs.reinforce`` that were recorded by ``lib.bench.reinforce``: reward by step, cost, and failures."""

import statistics
from typing import Any

import matplotlib.pyplot as plt

from lib.given.data.record import where
from lib.given.show.plots import COLOURS, show

HOW_TO_READ = (
    "A band is Student's interval of 95 % for the mean over seeds. A curve without a band is a single run, which does "
    "not say how far another seed would be from it. Rewards are those of sampled answers, and held-out questions are "
    "answered greedily. Sampler and trainer take turns on one device, so each is idle while the other works, and the "
    "sampler's seconds include the check of its answers. CPU seconds are those of the rank that trains. On a CPU, "
    "seconds far above them show that other programs used it too, and the tokens/s are then too low."
)
LAST = 10
"""Steps at the end of a run whose answers are sorted by what was wrong with them."""
Row = list[str]


def show_runs(measured: dict[str, Any]) -> str:
    """Draw recorded runs and return their tables as Markdown."""
    draw(measured["results"])
    return tables(measured)


def draw(results: dict[str, Any]) -> None:
    """The reward of each group of runs by step: the mean over seeds, and its interval where there are several."""
    fig, ax = plt.subplots(figsize=(6.4, 3.0))
    for colour, (name, group) in zip(COLOURS, results["groups"].items(), strict=False):
        steps, means = ([point[key] for point in group["curve"]] for key in ("step", "mean"))
        n = len(group["runs"])
        ax.plot(steps, means, color=colour, label=f"{name}, {n} seed{'s' * (n > 1)}")
        if n > 1:
            low, high = ([point[key] for point in group["curve"]] for key in ("low", "high"))
            ax.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
    ax.set(xlabel="step", ylabel=f"reward, mean of {results['window']} steps")
    ax.legend()
    show(fig, f"Reward by step of the recorded runs: {', '.join(results['groups'])}.")


def tables(measured: dict[str, Any]) -> str:
    """What the runs cost, what they changed, and where their answers fail, as Markdown."""
    runs = [(name, run) for name, group in measured["results"]["groups"].items() for run in group["runs"]]
    parts = [_table(runs, head, cells) for head, cells in ((ASKED, asked), (COST, cost), (WRONG, wrong))]
    about = where(measured)
    return "\n\n".join([f"{about[0].upper()}{about[1:]}. {HOW_TO_READ}", *parts])


def _table(runs: list[tuple[str, dict[str, Any]]], head: Row, cells: Any) -> str:
    rows = [["run", "seed", *head], ["---"] * (len(head) + 2)]
    rows += [[name, str(run["settings"]["seed"]), *cells(run)] for name, run in runs]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


ASKED = ["held-out answers right before", "after", "tokens of an answer before", "after"]


def asked(run: dict[str, Any]) -> Row:
    """The held-out questions before the first step and after the last one."""
    looks = run["looks"][0], run["looks"][-1]
    right = [f"{e['held_out_right']:.0%} ({e['held_out_low']:.0%} to {e['held_out_high']:.0%})" for e in looks]
    return [*right, *(f"{e['held_out_length']:.0f}" for e in looks)]


COST = ["device", "tokens sampled", "seconds", "CPU seconds", "kWh", "dollars", "sampled tokens/s", "trained tokens/s",
        "sampler idle", "trainer idle", "weights sent"]  # fmt: skip


def cost(run: dict[str, Any]) -> Row:
    """What a run took, and how sampler and trainer shared its time."""
    rates = {name: rate["median"] for name, rate in run["rates"].items()}
    n, sent = run.get("ranks", 1), sum(run["steps"]["weight_bytes"])
    return [f"{n} x {run['device']}" if n > 1 else run["device"],
            f"{run['rollout_tokens']:,}", f"{run['seconds']:,.0f}", f"{run['cpu_seconds']:,.0f}",
            _or_dash(run["kwh"], ".4f"), _or_dash(run["dollars"], ".3f"), f"{rates['rollout_tokens_per_s']:,.0f}",
            f"{rates['train_tokens_per_s']:,.0f}", f"{rates['rollout_idle']:.0%}",
            f"{rates['train_idle']:.0%}", f"{sent / 1e6:,.0f} MB" if sent else "–"]  # fmt: skip


WRONG = ["right", "right form, wrong answer", "cut off", "other", "groups that differ", "entropy, nats",
         "sampler - trainer, mean", "versions behind"]  # fmt: skip


def wrong(run: dict[str, Any]) -> Row:
    """What became of the answers of the last steps, and what was left to learn from."""
    last = {name: statistics.fmean(v or 0.0 for v in values[-LAST:]) for name, values in run["steps"].items()}
    other = max(0.0, 1 - last["format"] - last["cut_off"])
    shares = last["right"], last["format"] - last["right"], last["cut_off"], other, last["groups_that_differ"]
    return [*(f"{share:.0%}" for share in shares), f"{last['entropy']:.2f}", f"{last['drift']:.1e}",
            f"{last['lag']:.0f}"]  # fmt: skip


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
