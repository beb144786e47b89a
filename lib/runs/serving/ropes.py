"""The settings of rotary positions in a ``config.json``: their bases, and how the frequencies are scaled."""

from collections.abc import Iterator
from typing import Any

from lib.given.models.variants import FULL, SLIDING
from lib.runs.serving.kinds import Problems, is_number, shown

ROPE = ("rope_parameters", "rope_scaling")  # the newer name, and the older
LOCAL = "rope_local_base_freq"
"""The older name of the base of Gemma's sliding layers."""
SHARE = "partial_rotary_factor"
NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Settings of each kind of scaling that must be there; ``lib.attention_variants`` has the same names."""
OPTIONAL = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}
"""Settings that may be there."""
Rope = dict[str, Any]


def rope_theta(settings: dict[str, Any], default: float = 10_000.0, kind: str = FULL) -> float:
    """Base of the rotary frequencies of a kind of layer.

    It stands beside the other settings, or, since Transformers 5, among those of the rotation.
    """
    ropes = [rope for _, kind_, rope in _ropes(settings) if kind_ == kind and isinstance(rope, dict)]
    beside = settings.get("rope_theta") if kind == FULL else settings.get(LOCAL)
    bases = [rope["rope_theta"] for rope in ropes if rope.get("rope_theta") is not None]
    return next(iter(bases), None) or beside or default


def rope_scaling(settings: dict[str, Any]) -> Rope | None:
    """How the frequencies of full layers are scaled, by Transformers' names; None for not at all."""
    for _, kind, rope in _ropes(settings):
        type_ = _type_of(rope)
        if kind == FULL and type_ in NEEDED:
            names = NEEDED[type_] + OPTIONAL.get(type_, ())
            return {"rope_type": type_} | {key: rope[key] for key in names if rope.get(key) is not None}
    return None


def rotary_shares(settings: dict[str, Any]) -> list[Any]:
    """The share of a head's features that turn, as the rotation's settings and those beside them have it, if any do."""
    found = [rope.get(SHARE) for _, _, rope in _ropes(settings) if isinstance(rope, dict)]
    return [share for share in (*found, settings.get(SHARE)) if share is not None]


def problems_of_rope(
    settings: dict[str, Any], types: tuple[str, ...] = ("llama3",), is_layered: bool = False, is_partial: bool = False
) -> Problems:
    """What is wrong with the rotation.

    Args:
        settings: Of ``config.json``.
        types: The kinds of scaling that the model can have.
        is_layered: Whether each kind of layer has settings of its own; sliding layers are not scaled.
        is_partial: Whether a part of a head may turn, for which the caller checks the share.
    """
    if all(settings.get(name) for name in ROPE):
        yield f"config.json has {' and '.join(ROPE)}, expected one of them"
    parameters = settings.get(ROPE[0]) or {}
    if isinstance(parameters, dict) and parameters:
        layers = [kind for kind in (FULL, SLIDING) if kind in parameters]
        if is_layered and set(parameters) - {FULL, SLIDING}:
            yield f"config.json: {ROPE[0]} = {shown(parameters)}, expected {FULL} and {SLIDING}"
        elif layers and not is_layered:
            yield f"config.json: {ROPE[0]} has {layers[0]}, this model's layers all turn alike"
    bases: dict[str, dict[str, Any]] = {FULL: {"rope_theta": settings.get("rope_theta")}}
    bases[SLIDING] = {LOCAL: settings.get(LOCAL)} if is_layered else {}
    for name, kind, rope in _ropes(settings):
        if not isinstance(rope, dict):
            yield f"config.json: {name} = {shown(rope)}, expected an object"
            continue
        bases[kind][f"{name}.rope_theta"] = rope.get("rope_theta")
        known = types if kind == FULL else ()
        yield from (f"config.json: {name}{problem}" for problem in _problems_of_scaling(rope, known, is_partial))
    for group in bases.values():
        yield from _problems_of_bases({key: value for key, value in group.items() if value is not None})


def _ropes(settings: dict[str, Any]) -> Iterator[tuple[str, str, Rope]]:
    """Each object with settings of the rotation: its name, the kind of layers, and what it holds."""
    for name in ROPE:
        rope = settings.get(name) or {}
        layers = [kind for kind in (FULL, SLIDING) if isinstance(rope, dict) and kind in rope]
        if name == ROPE[0] and layers:
            yield from ((f"{name}.{kind}", kind, rope[kind] or {}) for kind in layers)
        else:
            yield name, FULL, rope


def _type_of(rope: Rope) -> Any:
    """The kind of scaling, of which the newer and the older name must say the same; "default" for none."""
    types = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    return next((type_ for type_ in types[:1] if all(other == type_ for other in types)), None) if types else "default"


def _problems_of_bases(given: dict[str, Any]) -> Problems:
    for key, value in given.items():
        if not is_number(value) or value <= 0:
            yield f"config.json: {key} = {shown(value)}, expected a number above 0"
    if len({repr(value) for value in map(float, filter(is_number, given.values()))}) > 1:
        yield f"config.json: {' and '.join(f'{key} = {value!r}' for key, value in given.items())} contradict each other"


def _problems_of_scaling(rope: Rope, types: tuple[str, ...], is_partial: bool) -> Problems:
    """What is wrong with the frequencies' settings, their base aside; each text follows the object's name."""
    type_ = _type_of(rope)
    scaled = isinstance(type_, str) and type_ in types
    needed = NEEDED[type_] if scaled else ()
    known = (*needed, *OPTIONAL.get(type_, ())) if scaled else ()
    for key in needed:
        if rope.get(key) is None:
            yield f" of type {type_} has no {key}"
    for key in known:
        value = rope.get(key)
        if value is not None and (type(value) is not bool if key == "truncate" else not is_number(value) or value <= 0):
            yield f".{key} = {shown(value)}, expected {'true or false' if key == 'truncate' else 'a number above 0'}"
    low: Any = rope.get("low_freq_factor")
    high: Any = rope.get("high_freq_factor")
    if type_ == "llama3" and scaled and is_number(low) and is_number(high) and low >= high:
        yield f": low_freq_factor = {low}, high_freq_factor = {high}, expected the first to be smaller"
    for key, value in rope.items():
        if key in ("rope_type", "type"):
            if not scaled and (value not in (None, "default") or type_ is None):
                expected = " or ".join(map(repr, ("default", *types)))
                yield f".{key} = {shown(value)}, expected {expected}, and the same in rope_type and type"
        elif key == SHARE:
            if value not in (None, 1.0) and not is_partial:
                yield f".{key} = {shown(value)}, this model has 1.0"
        elif value is not None and key not in ("rope_theta", *known):
            yield f".{key} = {shown(value)}, this model has no such setting"
