"""The memory of ZeRO's stages: model states of one device, by size of the model and number of ranks."""

from collections.abc import Callable, Sequence

from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import label, line, rect
from lib.given.show.plots import COLOURS
from lib.given.show.tokens import Html

BYTES = {"parameters": (4, 0, 0), "gradients": (0, 4, 0), "optimizer": (0, 0, 8)}
"""Bytes a parameter of each kind, float32 with AdamW's two moments, as ``memory_per_device`` takes them."""
STAGES = ("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3")
CARD_GB = 80
POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LEFT, LONGEST, ROW = 58, 222, 38
ALT = (
    "Bars of memory a device for plain data parallel and ZeRO's stages 1 to 3, in parameters, "
    "gradients and optimizer state."
)

Memory = Callable[[int, int, int, float, float, float], float]


def zero(
    memory_per_device: Memory,
    sizes: Sequence[float] = (0.124e9, 1.5e9, 7e9, 13e9, 70e9, 405e9),
    ranks: Sequence[int] = POWERS,
) -> Html:
    """Model states of one device under each stage.

    Args:
        memory_per_device: Chapter 12's function, which computes every number of the figure.
        sizes: Numbers of parameters.
        ranks: Numbers of devices R.
    """
    return figure(memory_per_device, sizes, ranks)()


def figure(memory_per_device: Memory, sizes: Sequence[float], ranks: Sequence[int]) -> Figure:
    def parts_gb(stage: int, size: float, n_ranks: int) -> dict[str, float]:
        """GB of each kind on one device."""
        return {kind: memory_per_device(int(size), n_ranks, stage, *b) / 1e9 for kind, b in BYTES.items()}

    def bars(size: float, n_ranks: int) -> str:
        scale = LONGEST / sum(parts_gb(0, size, n_ranks).values())
        drawn = []
        for stage in range(4):
            x, y = float(LEFT), 34 + ROW * stage
            gb = parts_gb(stage, size, n_ranks)
            for part, colour in zip(gb.values(), COLOURS, strict=False):
                drawn.append(rect(x, y, part * scale, 22, fill=colour))
                x += part * scale
            drawn.append(label(WIDTH - 6, y + 16, f"{_gb(sum(gb.values()))} GB", kind="end"))
        at = LEFT + CARD_GB * scale
        if at <= LEFT + LONGEST:
            drawn.append(line((at, 28), (at, 34 + 4 * ROW - 10), stroke="currentColor", stroke_dasharray="4 3"))
            drawn.append(label(at, 34 + 4 * ROW + 3, f"{CARD_GB} GB", kind="middle small"))
        return "".join(drawn)

    def say(stage: int, size: float, n_ranks: int) -> str:
        gb = parts_gb(stage, size, n_ranks)
        total = sum(gb.values())
        account = " + ".join(f"{kind} {_gb(value)}" for kind, value in gb.items())
        card = f"a card of {CARD_GB} GB"
        fits = (
            f"fits on {card}, activations not counted"
            if total <= CARD_GB
            else f"does not fit on {card}, even without activations"
        )
        return (
            f"{STAGES[stage]}, {size / 1e9:g} billion parameters, {n_ranks} ranks: "
            f"{account} = {_gb(total)} GB on each device. That {fits}."
        )

    stage_ = Control(name="stage", label="stage", values=range(4), shown=STAGES, kind="choice", still=2)
    size_ = Control(
        name="size", label="parameters", values=sizes, shown=[f"{n / 1e9:g}B" for n in sizes], start=2, still=2
    )
    ranks_ = Control(name="ranks", label="ranks R", values=ranks, start=3, still=3)
    return Figure(
        name="zero",
        alt=ALT,
        height=206,
        controls=[stage_, size_, ranks_],
        layers=[layer(_legend), layer(bars, size_, ranks_), layer(_chosen, stage_)],
        sentences=[layer(say, stage_, size_, ranks_)],
    )


def _gb(value: float) -> str:
    """Three digits, and thousands in groups."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _legend() -> str:
    drawn = [label(LEFT - 6, 50 + ROW * stage, name, kind="end") for stage, name in enumerate(STAGES)]
    for x, kind, colour in zip((58, 158, 248), BYTES, COLOURS, strict=False):
        drawn += [rect(x, 4, 12, 12, fill=colour), label(x + 17, 14, kind)]
    return "".join(drawn)


def _chosen(stage: int) -> str:
    """A frame around the chosen row."""
    return rect(3, 29 + ROW * stage, 354, 32, kind="frame", rx=4)
