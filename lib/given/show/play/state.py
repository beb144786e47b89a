"""A state of four rows that six pairs are written into, by four rules: what it holds, and what each key gets back."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import BLUE, GREEN, ORANGE, label, line, rect
from lib.given.show.tokens import Html

HEIGHT, UNIT, FLOOR = 262, 9.0, 150.0
KEYS = {"a": (1.0, 0, 0, 0), "b": (0, 1.0, 0, 0), "c": (0, 0, 1.0, 0), "d": (0, 0, 0, 1.0), "e": (0.5, 0.5, 0.5, 0.5)}
WRITES = (("a", 5), ("b", 3), ("c", 7), ("a", 2), ("d", 4), ("e", 6))
RULES = {"sum": (0, 1.0), "sum with decay 0.8": (0, 0.8), "delta rule": (1, 1.0), "delta rule with decay 0.8": (1, 0.8)}
ALT = (
    "Left, the four numbers of a state as bars. Right, a pair of bars for each key: the value that was written last, "
    "and what the state returns for the key."
)

Form = Callable[..., tuple[Tensor, Tensor]]


def state(sums: Form, corrects: Form) -> Html:
    """The figure, with chapter 24's recurrent forms: linear attention's, and the delta rule's."""
    return figure(sums, corrects)()


def figure(sums: Form, corrects: Form) -> Figure:
    rule = Control(name="rule", label="rule", values=list(RULES), start=0, still=2, kind="choice")
    step = Control(name="step", label="pairs written", values=range(len(WRITES) + 1), still=4, kind="steps")

    def held(name: str, n: int) -> list[float]:
        return states(sums, corrects, name)[n]

    return Figure(
        name="state",
        alt=ALT,
        height=HEIGHT,
        controls=[rule, step],
        layers=[layer(at_rest), layer(lambda name, n: draw(held(name, n), n), rule, step)],
        sentences=[layer(lambda name, n: say(held(name, n), name, n), rule, step)],
    )


def states(sums: Form, corrects: Form, rule: str) -> list[list[float]]:
    """The state before the first write and after each."""
    is_delta, decay = RULES[rule]
    k = torch.tensor([KEYS[key] for key, _ in WRITES])[None, :, None]
    v = torch.tensor([[float(value)] for _, value in WRITES])[None, :, None]
    ones = torch.ones(1, len(WRITES), 1)
    g, found = math.log(decay) * ones, [[0.0] * 4]
    for n in range(1, len(WRITES) + 1):
        given = (k[:, :n], k[:, :n], v[:, :n])
        done = corrects(*given, ones[:, :n], g[:, :n]) if is_delta else sums(*given, g[:, :n])
        found.append(done[1].flatten().tolist())
    return found


def recalled(held: list[float], key: str) -> float:
    """What the state returns for a key, unscaled."""
    return sum(x * y for x, y in zip(KEYS[key], held, strict=True))


def wanted(n: int) -> dict[str, int]:
    """The value written last under each key, after n writes."""
    return dict(WRITES[:n])


def at_rest() -> str:
    """The frames and names of the bars."""
    parts = [label(8, 16, "the state", kind="strong"), label(148, 16, "what each key gets back", kind="strong")]
    parts += [line((8, FLOOR), (118, FLOOR), kind="grid"), line((148, FLOOR), (WIDTH - 8, FLOOR), kind="grid")]
    parts += [label(22 + 28 * i, FLOOR + 18, f"row {i}", kind="middle small") for i in range(4)]
    keys = [label(170 + 42 * i, FLOOR + 18, key, kind="middle") for i, key in enumerate(KEYS)]
    legend = [rect(148, 222, 10, 10, fill=GREEN), label(163, 231, "written last")]
    legend += [rect(248, 222, 10, 10, fill=ORANGE), label(263, 231, "returned")]
    places = ", ".join(f"{key}: row {i}" for i, key in enumerate("abcd"))
    return "".join([*parts, *keys, *legend, label(8, 252, f"{places}; e: half of every row", kind="small")])


def _bar(left: float, width: float, value: float, colour: str) -> str:
    height = min(abs(value), 13.0) * UNIT
    top = FLOOR - height if value >= 0 else FLOOR
    below = FLOOR - height - 4 if value >= 0 else FLOOR + height + 30
    return rect(left, top, width, height, fill=colour) + label(
        left + width / 2, below, f"{value:.3g}", kind="middle small"
    )


def draw(held: list[float], n: int) -> str:
    """The bars after n writes."""
    parts = [_bar(13 + 28 * i, 18, value, BLUE) for i, value in enumerate(held)] if n else []
    for key, value in wanted(n).items():
        left = 151 + 42 * list(KEYS).index(key)
        parts += [_bar(left, 17, value, GREEN), _bar(left + 20, 17, recalled(held, key), ORANGE)]
    written = f"just written: {WRITES[n - 1][0]} = {WRITES[n - 1][1]}" if n else "nothing written yet"
    parts.append(label(8, 206, written, kind="strong"))
    return "".join(parts)


def say(held: list[float], rule: str, n: int) -> str:
    """The state in words."""
    if n == 0:
        return f"Nothing is written yet. The rule: {rule}."
    aims = wanted(n)
    wrong = [f"{key} ({recalled(held, key):.3g}, written {value})" for key, value in aims.items()
             if abs(recalled(held, key) - value) > 0.005]  # fmt: skip
    right = len(aims) - len(wrong)
    text = f"After {n} of {len(WRITES)} pairs, {rule}: {right} of {len(aims)} keys get their last value back."
    return text + (f" Wrong: {', '.join(wrong)}." if wrong else "")
