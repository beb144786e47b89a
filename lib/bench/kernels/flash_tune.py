"""Try tiles for the kernels of ``lib.bench.kernels.flash_variants``'s cases: ``--tune N`` compiles in N processes.

What wins is written into the tables of ``lib.fast.attention.flash`` by hand.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, multiprocessing

from lib.bench.kit import times_ms
from lib.fast.attention.flash import Tiles, fast_dkdv, fast_dq, tiles_for, variant_forward
from lib.fast.attention.flash_hopper import Roles
from lib.fast.models import capture
from lib.fast.variants import Documents, check_variant

KERNELS = ("forward", "dQ", "dK/dV")
N_CALLS = 10
CUTS: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {  # rows, columns, warps, stages
    ("forward", 64): [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (128, 64, 8, 3)],
    ("forward", 128): [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3)],
    ("forward", 256): [(64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 4)],
    ("dQ", 64): [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 4), (64, 32, 4, 4)],
    ("dQ", 128): [(64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4)],
    ("dQ", 256): [(64, 32, 4, 3), (64, 16, 4, 4), (128, 32, 8, 2), (64, 32, 4, 4)],
    ("dK/dV", 64): [(64, 64, 4, 3), (64, 64, 4, 4), (32, 64, 4, 4), (64, 128, 8, 2)],
    ("dK/dV", 128): [(64, 64, 4, 2), (32, 64, 4, 3), (32, 64, 4, 4), (32, 128, 8, 3)],
    ("dK/dV", 256): [(64, 64, 8, 2)],
}  # fmt: skip
MORE: dict[tuple[str, int], list[Tiles | Roles]] = {  # whether a variant has them or not
    ("dK/dV", 128): [
        *(Tiles(*cut, apart=True) for cut in ((64, 64, 4, 2), (32, 64, 4, 3), (32, 32, 4, 3))),
        *(Tiles(*cut, split=True) for cut in ((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3))),
    ],
    ("dK/dV", 256): [
        Tiles(*cut, split=True)
        for cut in ((32, 64, 4, 3), (32, 64, 4, 2), (64, 64, 4, 1), (64, 64, 8, 2), (32, 128, 8, 2), (16, 64, 4, 4))
    ],
    ("dK/dV", 64): [Tiles(64, 64, 4, 4, apart=True)],
    ("forward", 128): [Tiles(64, 64, 4, 3)],
    ("dQ", 128): [Tiles(64, 64, 4, 2)],
}
WITH_ROLES: dict[tuple[str, int], list[Roles]] = {  # only where a case is plain
    ("forward", 256): [Roles(2, 64, 2, True), Roles(2, 64, 2, True, registers=True)],
}


def candidates(kernel: str, case: Any) -> list[Tiles | Roles]:
    """Tiles for a kernel of a case; with roles only where a case is plain."""
    tiles = [Tiles(*cut, heads_first=kernel != "dK/dV") for cut in CUTS[kernel, case.width]]
    roles = WITH_ROLES.get((kernel, case.width), []) if case.is_plain else []
    return [*tiles, *MORE.get((kernel, case.width), []), *roles]


def calls(case: Any, given: Any) -> dict[str, Callable[[Tiles | Roles | None], Tensor]]:
    """For each kernel, a function of its tiles that runs it; None stands for the tables' own."""
    q, k, v, *rest = (x.detach() for x in given.leaves)
    sinks = rest[0] if rest else None
    spans = None if given.ids is None else Documents.from_ids(given.ids).spans
    variant = check_variant(q, k, None, case.window, case.softcap, sinks, spans)
    o, lse = variant_forward(q, k, v, sinks, spans, True, variant)
    extra = (variant, spans)
    _, stats = fast_dq(q, k, v, o, given.grad, lse, True, None, *extra)
    return {
        "forward": lambda tiles: variant_forward(q, k, v, sinks, spans, True, variant, tiles)[0],
        "dQ": lambda tiles: fast_dq(q, k, v, o, given.grad, lse, True, tiles, *extra)[0],
        "dK/dV": lambda tiles: fast_dkdv(q, k, v, given.grad, stats, True, tiles, *extra)[0],
    }


def jobs(cases: dict[str, Any]) -> Iterator[tuple[Any, str, Tiles | Roles]]:
    """Every candidate of every kernel of every case."""
    for case in cases.values():
        for kernel in KERNELS:
            for tiles in candidates(kernel, case):
                yield case, kernel, tiles


def compile_share(rank: int, n_ranks: int, cases: dict[str, Any], make: Callable[[Any, str], Any]) -> None:
    """Fill Triton's cache with every ``n_ranks``-th candidate."""
    ready: dict[Any, Any] = {}
    for case, kernel, tiles in list(jobs(cases))[rank::n_ranks]:
        ready.setdefault(case, calls(case, make(case, "cuda")))
        try:
            ready[case][kernel](tiles)
            torch.cuda.synchronize()
        except Exception:  # reported when it is timed
            continue


def ms_of(call: Callable[[], Tensor]) -> float:
    """Milliseconds of one call, in a graph of `N_CALLS`."""

    def many() -> Tensor:
        for _ in range(N_CALLS - 1):
            call()
        return call()

    return statistics.median(times_ms(capture(many, n_warmup=1), 5, "cuda", n_warmup=2)) / N_CALLS


def tune(cases: dict[str, Any], given: Callable[[Any, str], Any], n_processes: int) -> None:
    """Print each candidate's time and error against the tables' own tiles, fastest first; ``given`` makes tensors."""
    context = multiprocessing.get_context("spawn")
    shares = [(rank, n_processes, cases, given) for rank in range(n_processes)]
    workers = [context.Process(target=compile_share, args=share, daemon=True) for share in shares]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for name, case in cases.items():
        tensors = given(case, "cuda")
        q, k = tensors.leaves[:2]
        table = tiles_for(q, k, True, check_variant(q, k, None, case.window, case.softcap, None, None))
        for kernel, call in calls(case, tensors).items():
            print(f"{name}, {kernel}; the tables have {table[KERNELS.index(kernel)]}", flush=True)
            compare(call, candidates(kernel, case))


def shown(tiles: Tiles | Roles) -> str:
    """The fields that a candidate chooses."""
    fields = tiles._asdict() if isinstance(tiles, Tiles) else vars(tiles)
    return f"{type(tiles).__name__} {' '.join(f'{name}={x}' for name, x in fields.items() if x)}"


def compare(call: Callable[[Tiles | Roles | None], Tensor], all_tiles: list[Tiles | Roles]) -> None:
    """Print milliseconds of one kernel with the tables' tiles and with each candidate."""
    wanted, found = call(None).clone(), [(ms_of(lambda: call(None)), 0.0, "the tables' own")]
    for tiles in all_tiles:
        try:
            error = ((call(tiles).float() - wanted.float()).norm() / wanted.float().norm()).item()
            found.append((ms_of(lambda t=tiles: call(t)), error, shown(tiles)))
        except Exception as error:  # too much shared memory, or a failure of the compiler
            print(f"  cannot run {tiles}: {str(error)[:100]}", flush=True)
    for ms, error, what in sorted(found):
        print(f"  {ms:.4f} ms  error {error:.1e}  {what}", flush=True)
