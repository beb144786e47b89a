"""Where a tensor's numbers fall in a format, by the scale that they are divided by."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lib.given.kernels.quantized import largest
from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import BLUE, GREEN, ORANGE, label, line, rect
from lib.given.show.tokens import Html

N_NUMBERS = 20_000
LOWEST, HIGHEST = -28, 20
LEFT, BASE, TOP = 8, 176, 44
STEP = (WIDTH - 2 * LEFT) / (HIGHEST - LOWEST)
FORMATS = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ALT = (
    "A histogram of a tensor's magnitudes over powers of two, coloured by what becomes of them: rounded, "
    "rounded coarsely, zero, or saturated."
)

Quantize = Callable[[Tensor, Tensor, torch.dtype], Tensor]


def scales(quantize: Quantize, exponents: Sequence[int] = tuple(range(-24, 9, 2))) -> Html:
    """20,000 numbers like a layer's gradients, divided by powers of two and rounded.

    Args:
        quantize: Chapter 20's function, which divides and rounds.
        exponents: Of the scales.
    """
    return figure(quantize, exponents)()


def numbers() -> Tensor:
    """Normal numbers whose sizes spread over several powers of two, as those of a gradient do."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(2.0 * torch.randn(N_NUMBERS, generator=generator) - 10)
    return size * torch.randn(N_NUMBERS, generator=generator)


def fates(x: Tensor, scale: float, dtype: torch.dtype, quantize: Quantize) -> dict[str, Tensor]:
    """Which numbers become 0, lie among the subnormal numbers, are rounded normally, or saturate; each a mask."""
    q = quantize(x, torch.tensor(scale), dtype).float().abs()
    zero, beyond = (q == 0) & (x != 0), x.abs() / scale > largest(dtype)
    coarse = ~zero & ~beyond & (q < torch.finfo(dtype).tiny)
    return {"zero": zero, "coarse": coarse, "beyond": beyond, "normal": ~(zero | coarse | beyond)}


def decibels(x: Tensor, scale: float, dtype: torch.dtype, quantize: Quantize) -> float:
    """Signal over noise of the rounded numbers."""
    noise = (quantize(x, torch.tensor(scale), dtype).float() * scale - x).double().square().sum()
    return 10 * math.log10(float(x.double().square().sum() / noise))


def figure(quantize: Quantize, exponents: Sequence[int]) -> Figure:
    x = numbers()
    colours = {"normal": GREEN, "coarse": BLUE, "zero": ORANGE, "beyond": ORANGE}

    def bars(name: str, exponent: int) -> str:
        scale, drawn = 2.0**exponent, []
        place = (x.abs() / scale).log2().floor().clamp(LOWEST, HIGHEST - 1)
        masks = fates(x, scale, FORMATS[name], quantize)
        for power in range(LOWEST, HIGHEST):
            bottom: float = BASE
            for fate, mask in masks.items():
                height = int((mask & (place == power)).sum()) / N_NUMBERS * 620
                if height > 0.2:
                    at = LEFT + STEP * (power - LOWEST)
                    drawn.append(rect(at, bottom - height, STEP - 1, height, fill=colours[fate]))
                    bottom -= height
        return "".join(drawn)

    def ends(name: str) -> str:
        info, drawn = torch.finfo(FORMATS[name]), []
        for value, text, kind in (
            (info.smallest_normal * info.eps, "smallest", "end"),
            (info.smallest_normal, "normal", "start"),
            (info.max, "largest", "middle"),
        ):
            at = LEFT + STEP * (math.log2(value) - LOWEST)
            drawn += [line((at, TOP), (at, BASE), stroke="currentColor", stroke_dasharray="4 3")]
            drawn += [label(at, TOP - 6, text, kind=kind)]
        return "".join(drawn)

    def say(name: str, exponent: int) -> str:
        scale, dtype = 2.0**exponent, FORMATS[name]
        shares = {fate: float(mask.float().mean()) for fate, mask in fates(x, scale, dtype, quantize).items()}
        return (
            f"Divided by 2^{exponent} and rounded to {name}, {shares['zero']:.1%} of the numbers become 0, "
            f"{shares['coarse']:.1%} are "
            f"subnormal, with fewer digits, and {shares['beyond']:.1%} saturate. Signal over noise: "
            f"{decibels(x, scale, dtype, quantize):.1f} dB."
        )

    format_ = Control(
        name="format", label="format", values=list(FORMATS), shown=list(FORMATS), start=0, still=0, kind="choice"
    )
    exponent_ = Control(
        name="exponent",
        label="scale",
        values=exponents,
        shown=[f"2^{e}" for e in exponents],
        start=len(exponents) // 2,
        still=len(exponents) // 2,
    )
    return Figure(
        name="scales",
        alt=ALT,
        height=206,
        controls=[format_, exponent_],
        layers=[layer(_axis), layer(bars, format_, exponent_), layer(ends, format_)],
        sentences=[layer(say, format_, exponent_)],
    )


def _axis() -> str:
    drawn = [line((LEFT, BASE), (WIDTH - LEFT, BASE), stroke="currentColor")]
    for power in range(LOWEST + 4, HIGHEST, 8):
        drawn.append(label(LEFT + STEP * (power - LOWEST), BASE + 15, f"2^{power}", kind="middle"))
    for x, text, colour in ((8, "full precision", GREEN), (122, "subnormal", BLUE), (212, "zero or saturated", ORANGE)):
        drawn += [rect(x, 4, 12, 12, fill=colour), label(x + 17, 14, text)]
    return "".join(drawn)
