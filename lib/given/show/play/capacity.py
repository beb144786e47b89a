"""Tokens before their experts: how many find room, by how uneven the router is and by the capacity factor."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lib.given.show.play.player import WIDTH, Control, Figure, layer
from lib.given.show.play.svg import BLUE, GREEN, ORANGE, label, line, rect
from lib.given.show.tokens import Html

N_TOKENS, N_EXPERTS, K = 24, 6, 2
LEFT, STEP, CELL, TOP, BASE = 14, 57, 6.6, 26, 198
ALT = (
    "A column for each of six experts: the assignments that it accepts, up to a line for its capacity, "
    "and those that are dropped above it."
)

Mask = Callable[[Tensor, int, float], Tensor]


def capacity(
    capacity_mask: Mask,
    preferences: Sequence[float] = (0.0, 0.5, 1.0, 2.0),
    factors: Sequence[float] = (0.5, 1.0, 1.25, 1.5, 2.0, 3.0),
) -> Html:
    """24 tokens with two experts each, of six.

    Args:
        capacity_mask: Chapter 19's function, which says which assignments find room.
        preferences: How much more the router likes each expert than the next one, in units of its logits' spread.
        factors: Capacity factors.
    """
    return figure(capacity_mask, preferences, factors)()


def routed(preference: float) -> Tensor:
    """The experts ``[24, 2]`` of each token: random logits,
    and a preference that falls from the first expert to the last.
    """
    logits = torch.randn(N_TOKENS, N_EXPERTS, generator=torch.Generator().manual_seed(3))
    return (logits - preference * torch.arange(N_EXPERTS) / 2).argsort(dim=-1, descending=True, stable=True)[:, :K]


def figure(capacity_mask: Mask, preferences: Sequence[float], factors: Sequence[float]) -> Figure:
    def room(factor: float) -> int:
        """What one expert accepts if all tokens ask for it first."""
        return int(capacity_mask(torch.zeros(N_TOKENS * K, 1, dtype=torch.int64), N_EXPERTS, factor).sum())

    def columns(preference: float, factor: float) -> str:
        experts = routed(preference)
        stays = capacity_mask(experts, N_EXPERTS, factor)
        drawn = []
        for expert in range(N_EXPERTS):
            x, wanted = LEFT + STEP * expert, experts == expert
            kept = [int((wanted & stays)[:, choice].sum()) for choice in range(K)]
            dropped = int((wanted & ~stays).sum())
            kinds = [BLUE] * kept[0] + [GREEN] * kept[1] + [ORANGE] * dropped
            for place, colour in enumerate(kinds):
                look = {"fill": "none", "stroke": colour} if colour == ORANGE else {"fill": colour}
                drawn.append(rect(x, BASE - CELL * (place + 1), 42, CELL - 1.4, **look))
            drawn.append(label(x + 21, BASE + 15, f"{sum(kept)}", kind="middle"))
        at = BASE - CELL * room(factor)
        if at > TOP:
            drawn.append(line((4, at), (WIDTH - 4, at), stroke="currentColor", stroke_dasharray="4 3"))
        return "".join(drawn)

    def say(preference: float, factor: float) -> str:
        experts = routed(preference)
        wanted = torch.bincount(experts.flatten(), minlength=N_EXPERTS)
        stays = capacity_mask(experts, N_EXPERTS, factor)
        lost, unused = int((~stays).sum()), room(factor) * N_EXPERTS - int(stays.sum())
        asked = ", ".join(str(int(n)) for n in wanted)
        ends = "No assignment is dropped" if not lost else f"{lost} of {N_TOKENS * K} assignments are dropped"
        return (
            f"The six experts are asked for {asked} assignments, and each has room for {room(factor)}. "
            f"{ends}; {unused} of {room(factor) * N_EXPERTS} places stay empty and are computed as padding."
        )

    preference_ = Control(
        name="preference",
        label="preference for the first experts",
        values=preferences,
        shown=[f"{p:g}" for p in preferences],
        start=2,
        still=2,
    )
    factor_ = Control(
        name="factor", label="capacity factor", values=factors, shown=[f"{f:g}" for f in factors], start=2, still=2
    )
    return Figure(
        name="capacity",
        alt=ALT,
        height=222,
        controls=[preference_, factor_],
        layers=[layer(_legend), layer(columns, preference_, factor_)],
        sentences=[layer(say, preference_, factor_)],
    )


def _legend() -> str:
    drawn = []
    for x, text, look in (
        (14, "first choice", {"fill": BLUE}),
        (126, "second choice", {"fill": GREEN}),
        (254, "dropped", {"fill": "none", "stroke": ORANGE}),
    ):
        drawn += [rect(x, 4, 12, 12, **look), label(x + 17, 14, text)]
    return "".join(drawn)
