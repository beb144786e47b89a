"""Pipelines, graded: schedules and the simulator by counting, everything else against PyTorch's own layers,
checkpoints and pipelines.

What runs on ranks is in `programs.py`.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lib.given.parallel.mail import Message
from lib.given.parallel.pipeline import Action, Work
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from tests.chapter_17 import programs
from tests.chapter_17.programs import many
from tests.inputs import randn

pipeline = graded("pipeline")

CUT, STEP, AHEAD, GROUP, HALVES, BUBBLE, NEEDS = (f"eq-pipeline-{n}" for n in (1, 2, 4, 5, 7, 8, 9))
SENT = "eq-pipeline-6"
TWICE = "the section 'Throw away, compute again'"
TRAPS = "the section 'What can go wrong'"
STAGE = "the section 'One stage'"
TABLE = "the section 'One timetable'"
RUN = "the section 'The run'"


def short(actions) -> str:
    """A schedule as text: F0 F1 B0, with a dot before chunks: F0.1."""
    expect_true(
        isinstance(actions, list), f"a schedule is a list of Action, not {type(actions).__name__}", answer=actions
    )
    wrong = next((a for a in actions if not isinstance(a, Action)), None)
    expect_true(wrong is None, f"a schedule is a list of Action, and this is none: {wrong!r}", answer=actions)
    return " ".join(f"{a.kind}{a.micro_batch}" + (f".{a.chunk}" if a.chunk else "") for a in actions)


def long(text: str) -> list[Action]:
    """The inverse of `short`."""
    words = [word.partition(".") for word in text.split()]
    return [Action(word[0], int(word[1:]), int(chunk or 0)) for word, _, chunk in words]


def most_waiting(actions: list[Action], begins: str, ends: str) -> int:
    """The most (micro-batch, chunk) that have had an action of kind ``begins`` and not yet one of kind ``ends``."""
    held = most = 0
    for action in actions:
        held += (action.kind == begins) - (action.kind == ends)
        most = max(most, held)
    return most


def step_seconds(schedules: list[list[Action]], seconds: dict[str, float]) -> float:
    """When the last stage is done, by the rules of the chapter; fails if the stages wait for each other."""
    return max(work.end for work in programs.timed(schedules, seconds))


def expect_complete(schedules: list[list[Action]], n_micro: int, n_chunks: int = 1, kinds: str = "FB") -> None:
    """Each stage has every action once."""
    wanted = Counter(Action(k, m, c) for k in kinds for m in range(n_micro) for c in range(n_chunks))
    for stage, actions in enumerate(schedules):
        short(actions)
        found = Counter(actions)
        lacks, extra = next(iter(wanted - found), None), next(iter(found - wanted), None)
        expect_true(lacks is None, f"stage {stage} lacks {lacks}", answer=actions, read="the contract, under Returns")
        expect_true(
            extra is None, f"stage {stage} has {extra} too much", answer=actions, read="the contract, under Returns"
        )


# ---- partition_layers ------------------------------------------------------------------------------------------------


def starts(ranges) -> list[int]:
    expect_true(all(isinstance(r, range) for r in ranges), "a stage is a range", answer=ranges, read="the contract")
    return [r.start for r in ranges]


def test_partition_layers_by_hand():
    case("costs [4, 1, 1, 1, 1, 4, 2] in 3 stages: 6, 2 and 6 is worse than 5, 3 and 6? the least possible is 6")
    costs = [4, 1, 1, 1, 1, 4, 2]
    expect_equal(pipeline.partition_layers(costs, 3), [range(0, 1), range(1, 5), range(5, 7)], read=CUT)
    expect_true(costs == [4, 1, 1, 1, 1, 4, 2], "the list of costs that was given was changed", answer=costs)
    case("the same costs as an array of float32")
    found = pipeline.partition_layers(np.array([4, 1, 1, 1, 1, 4, 2], dtype=np.float32), 3)
    expect_equal(found, [range(0, 1), range(1, 5), range(5, 7)], read=CUT)


@pytest.mark.parametrize(
    ("costs", "n", "expected"),
    [
        ([1, 1, 1, 1, 1], 3, [0, 1, 3]),  # not [0, 2, 4] and not [0, 2, 3]
        ([5, 1, 1, 1, 1], 3, [0, 1, 2]),  # the first stage costs 5, so the others may be cut anywhere
        ([1, 1, 1, 1, 5], 3, [0, 1, 4]),
        ([0, 0, 3, 0], 2, [0, 1]),
        ([2, 3, 4], 3, [0, 1, 2]),
        ([2, 3, 4], 1, [0]),
        ([0.5, 0.25, 0.125, 0.125], 2, [0, 1]),
        ([0.1] * 10, 3, [0, 2, 6]),  # rounded sums of equally many layers differ
        ([0.4, 1.0, 0.0], 3, [0, 1, 2]),  # sums that are rounded differently on two ways must not lose a stage
    ],
)
def test_partition_layers_of_equal_ones_takes_the_first(costs, n, expected):
    case(f"costs {costs} in {many(n, 'stage')}")
    found = pipeline.partition_layers(costs, n)
    expect_equal(starts(found), expected, name="first layers", answer=found, read="the contract, under Returns")
    expect_equal([r.stop for r in found], [*expected[1:], len(costs)], name="ends", answer=found, read=CUT)


def test_partition_layers_equals_trying_all_cuts():
    draw = torch.Generator().manual_seed(0)
    for n_layers, n, top in itertools.product((3, 6, 9), (1, 2, 3, 5), (3, 20)):
        if n > n_layers:
            continue
        costs = torch.randint(top, (n_layers,), generator=draw).tolist()
        case(f"costs {costs} in {many(n, 'stage')}")
        cuts = [[0, *cut] for cut in itertools.combinations(range(1, n_layers), n - 1)]
        worst = [max(sum(costs[i:j]) for i, j in itertools.pairwise([*cut, n_layers])) for cut in cuts]
        best = min(cut for cut, cost in zip(cuts, worst, strict=True) if cost == min(worst))
        expect_equal(starts(pipeline.partition_layers(costs, n)), best, name="first layers", read=CUT)


def test_partition_layers_of_tenths():
    case(
        "ten layers of 0.1 in 4 stages: differences of running sums differ in their last digits, "
        "and no stage may be empty"
    )
    found = pipeline.partition_layers([0.1] * 10, 4)
    sizes = [len(r) for r in found]
    seen = {"stages": len(found), "layers of the largest stage": max(sizes), "layers of all stages": sum(sizes)}
    expected = {"stages": 4, "layers of the largest stage": 3, "layers of all stages": 10}
    expect_equal(seen, expected, name="", answer=found, read=CUT)
    expect_true(min(sizes) > 0, "a stage is empty", answer=found, read="the contract, under Returns")


def test_partition_layers_of_many():
    case("120 layers in 16 stages: there are 10**19 cuts, so they cannot all be tried")
    costs = (randn(120).abs() * 100).int().tolist()
    found = pipeline.partition_layers(costs, 16)
    low, high = max(costs), sum(costs)
    while low < high:  # the least limit that needs at most 16 stages
        limit, needed, held = (low + high) // 2, 1, 0
        for cost in costs:
            needed, held = (needed + 1, cost) if held + cost > limit else (needed, held + cost)
        low, high = (low, limit) if needed <= 16 else (limit + 1, high)
    expect_equal(max(sum(costs[i] for i in r) for r in found), low, name="largest stage", answer=found, read=CUT)


@pytest.mark.parametrize(("n_layers", "n"), [(3, 4), (0, 1), (5, 0), (5, -2)])
def test_partition_layers_refuses(n_layers, n):
    case(f"{many(n_layers, 'layer')} in {many(n, 'stage')}")
    with expect_raises(ValueError, str(n_layers), str(n), read="the contract, under Raises"):
        pipeline.partition_layers([1] * n_layers, n)


# ---- gpipe_schedule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
def test_gpipe_schedule_by_hand(stage):
    case(f"stage {stage} of 2, 3 micro-batches")
    expect_equal(
        short(pipeline.gpipe_schedule(stage, 2, 3)),
        "F0 F1 F2 B0 B1 B2",
        name="schedule",
        read="the contract, under Returns",
    )


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 1), (3, 2), (4, 8)])
def test_gpipe_schedule_takes_what_the_formula_says(n, m):
    case(f"{many(n, 'stage')}, {many(m, 'micro-batch')}, F 1 s, B 2 s")
    schedules = [pipeline.gpipe_schedule(s, n, m) for s in range(n)]
    expect_complete(schedules, m)
    expect_close(
        step_seconds(schedules, {"F": 1, "B": 2}), 3.0 * (m + n - 1), name="seconds", answer=schedules, read=STEP
    )


# ---- one_f_one_b_schedule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "n", "m", "expected"),
    [
        (0, 3, 4, "F0 F1 F2 B0 F3 B1 B2 B3"),
        (1, 3, 4, "F0 F1 B0 F2 B1 F3 B2 B3"),
        (2, 3, 4, "F0 B0 F1 B1 F2 B2 F3 B3"),
        (0, 4, 2, "F0 F1 B0 B1"),
        (0, 1, 2, "F0 B0 F1 B1"),
    ],
)
def test_one_f_one_b_schedule_by_hand(stage, n, m, expected):
    case(f"stage {stage} of {n}, {many(m, 'micro-batch')}")
    expect_equal(short(pipeline.one_f_one_b_schedule(stage, n, m)), expected, name="schedule", read=AHEAD)


@pytest.mark.parametrize(("n", "m"), [(2, 7), (4, 3), (4, 12)])
def test_one_f_one_b_schedule_holds_few_and_takes_no_longer(n, m):
    case(f"{many(n, 'stage')}, {many(m, 'micro-batch')}")
    schedules = [pipeline.one_f_one_b_schedule(s, n, m) for s in range(n)]
    expect_complete(schedules, m)
    held = [most_waiting(actions, "F", "B") for actions in schedules]
    expect_equal(
        held, [min(n - s, m) for s in range(n)], name="most micro-batches in flight", answer=schedules, read=AHEAD
    )
    expect_close(
        step_seconds(schedules, {"F": 1, "B": 2}), 3.0 * (m + n - 1), name="seconds", answer=schedules, read=STEP
    )


# ---- interleaved_schedule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (
            1,
            "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
        ),  # first, because on stage 0 several warm-ups have the same length
        (0, "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"),
    ],
)
def test_interleaved_schedule_by_hand(stage, expected):
    case(f"stage {stage} of 2 with 2 chunks each, 4 micro-batches; F0.1 is the forward of micro-batch 0 in chunk 1")
    expect_equal(short(pipeline.interleaved_schedule(stage, 2, 4, 2)), expected, name="schedule", read=GROUP)


@pytest.mark.parametrize(("n", "m", "v"), [(2, 2, 3), (3, 6, 2), (4, 8, 2), (4, 4, 3), (2, 6, 1), (1, 3, 2)])
def test_interleaved_schedule_has_a_smaller_bubble(n, m, v):
    case(f"{many(n, 'stage')}, {many(m, 'micro-batch')}, {many(v, 'chunk')}, F 1 s and B 2 s for each chunk")
    schedules = [pipeline.interleaved_schedule(s, n, m, v) for s in range(n)]
    expect_complete(schedules, m, v)
    expected = 3.0 * (m * v + n - 1)
    expect_close(step_seconds(schedules, {"F": 1, "B": 2}), expected, name="seconds", answer=schedules, read=SENT)
    ahead = [min(m * v, (2 if v > 1 else 1) * (n - s - 1) + (v - 1) * n + 1) for s in range(n)]
    held = [most_waiting(actions, "F", "B") for actions in schedules]
    expect_equal(held, ahead, name="most chunks in flight", answer=schedules, read="the contract, under Returns")


@pytest.mark.parametrize(("n", "m"), [(4, 6), (3, 2), (17, 23)])
def test_interleaved_schedule_refuses(n, m):
    case(f"{many(n, 'stage')}, {many(m, 'micro-batch')}")
    with expect_raises(ValueError, str(n), str(m), read="the contract, under Raises"):
        pipeline.interleaved_schedule(0, n, m, 2)


class _Group:
    """The little that PyTorch's schedules ask of a stage."""

    def __init__(self, rank: int, n: int, chunk: int, n_chunks: int):
        self.group_rank, self.group_size, self.num_stages = rank, n, n * n_chunks
        self.stage_index, self.has_backward = chunk * n + rank, True
        self.stage_index_to_group_rank = {i: i % n for i in range(n * n_chunks)}
        self.is_first, self.is_last = self.stage_index == 0, self.stage_index == self.num_stages - 1
        self.submod, self.device, self.group = nn.Identity(), torch.device("cpu"), None


def torch_order(cls, n: int, m: int, v: int) -> list[list[tuple]]:
    """The order of a schedule of `torch.distributed.pipelining`: kind, micro-batch and virtual stage."""
    made = cls([_Group(0, n, c, v) for c in range(v)], m, loss_fn=lambda y, t: y, scale_grads=False)
    short_kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    return [
        [(short_kinds[a.computation_type.name], a.microbatch_index, a.stage_index) for a in made.pipeline_order[s] if a]
        for s in range(n)
    ]


@oracle
@pytest.mark.parametrize(("n", "m", "v"), [(2, 4, 2), (4, 8, 2), (3, 6, 3)])
def test_interleaved_schedule_equals_pytorch(n, m, v):
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    case(f"{many(n, 'stage')}, {many(m, 'micro-batch')}, {many(v, 'chunk')}, beside ScheduleInterleaved1F1B")
    for s, theirs in enumerate(torch_order(ScheduleInterleaved1F1B, n, m, v)):
        ours = [(a.kind, a.micro_batch, a.chunk * n + s) for a in pipeline.interleaved_schedule(s, n, m, v)]
        expect_equal(ours, theirs, name=f"stage {s}")


# ---- zero_bubble_schedule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "n", "m", "expected"),
    [
        (0, 3, 4, "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"),
        (1, 3, 4, "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3"),
        (2, 3, 4, "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"),
        (2, 3, 1, "F0 B0 W0"),
    ],
)
def test_zero_bubble_schedule_by_hand(stage, n, m, expected):
    case(f"stage {stage} of {n}, {many(m, 'micro-batch')}")
    expect_equal(
        short(pipeline.zero_bubble_schedule(stage, n, m)), expected, name="schedule", read="the contract, under Returns"
    )


@pytest.mark.parametrize(("n", "m"), [(1, 3), (2, 5), (4, 4), (4, 9)])
def test_zero_bubble_schedule_has_a_smaller_bubble(n, m):
    schedules = [pipeline.zero_bubble_schedule(s, n, m) for s in range(n)]
    for f, b, w in ((1, 1, 1), (4, 5, 3)):
        case(f"{many(n, 'stage')}, {many(m, 'micro-batch')}, F {f} s, B {b} s, W {w} s")
        expect_complete(schedules, m, kinds="FBW")
        expected = float(m * (f + b + w) + (n - 1) * (f + b - w))
        expect_close(
            step_seconds(schedules, {"F": f, "B": b, "W": w}), expected, name="seconds", answer=schedules, read=BUBBLE
        )


@pytest.mark.parametrize(("n", "m"), [(2, 5), (4, 12), (4, 2)])
def test_zero_bubble_schedule_holds_no_more_than_1f1b(n, m):
    case(f"{many(n, 'stage')}, {many(m, 'micro-batch')}: waiting for B, for W, and in all")
    schedules = [pipeline.zero_bubble_schedule(s, n, m) for s in range(n)]
    expect_complete(schedules, m, kinds="FBW")
    for s, actions in enumerate(schedules):
        held = [most_waiting(actions, *kinds) for kinds in ("FB", "BW", "FW")]
        allowed = [min(n - s, m), n, n]
        problem = f"stage {s} has {held} micro-batches waiting for B, for W and for either, and may have {allowed}"
        expect_true(all(h <= a for h, a in zip(held, allowed, strict=True)), problem, answer=actions, read=BUBBLE)


@oracle
@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8)])
def test_zero_bubble_schedule_is_no_longer_than_pytorch(n, m):
    from torch.distributed.pipelining import ScheduleInterleavedZeroBubble

    case(f"{many(n, 'stage')}, {many(m, 'micro-batch')}, beside ScheduleInterleavedZeroBubble with one chunk")
    theirs = [[Action(k, i) for k, i, _ in actions] for actions in torch_order(ScheduleInterleavedZeroBubble, n, m, 1)]
    ours = [pipeline.zero_bubble_schedule(s, n, m) for s in range(n)]
    seconds = {"F": 1.0, "B": 1.0, "W": 1.0}
    expect_true(step_seconds(ours, seconds) <= step_seconds(theirs, seconds), "PyTorch's is shorter")


# ---- simulate --------------------------------------------------------------------------------------------------------


def boxes(works) -> list[tuple]:
    return [(w.stage, w.kind, w.micro_batch, w.chunk, w.start, w.end) for w in works]


def test_simulate_by_hand():
    case("2 stages, 2 micro-batches; F 1 s, B 3 s")
    schedules = [long("F0 F1 B0 B1"), long("F0 B0 F1 B1")]
    works = pipeline.simulate(schedules, {"F": 1, "B": 3})
    left = [short(actions) for actions in schedules]
    problem = "the schedules that were given were changed"
    expect_true(left == ["F0 F1 B0 B1", "F0 B0 F1 B1"], problem, answer=left)
    expected = [
        (0, "F", 0, 0, 0.0, 1.0),
        (0, "F", 1, 0, 1.0, 2.0),
        (1, "F", 0, 0, 1.0, 2.0),
        (1, "B", 0, 0, 2.0, 5.0),
        (0, "B", 0, 0, 5.0, 8.0),
        (1, "F", 1, 0, 5.0, 6.0),
        (1, "B", 1, 0, 6.0, 9.0),
        (0, "B", 1, 0, 9.0, 12.0),
    ]
    expect_true(
        all(isinstance(w, Work) for w in works), "the list is of Work", answer=works, read="the contract, under Returns"
    )
    expect_equal(boxes(works), expected, name="works", read=NEEDS)


def test_simulate_halves_of_backward():
    case("2 stages, 1 micro-batch, F 1 s, B 2 s, W 4 s: stage 0's B waits for B on stage 1, and not for W")
    works = pipeline.simulate([long("F0 B0 W0"), long("F0 B0 W0")], {"F": 1, "B": 2, "W": 4})
    found = {(w.stage, w.kind): w.start for w in works}
    expected = {(0, "F"): 0.0, (1, "F"): 1.0, (1, "B"): 2.0, (0, "B"): 4.0, (1, "W"): 4.0, (0, "W"): 6.0}
    expect_close(found, expected, name="starts", read=NEEDS)


def test_simulate_chunks():
    case("2 stages, 2 chunks, 1 micro-batch, F 1 s, B 2 s: it goes round twice, and back")
    works = pipeline.simulate([long("F0 F0.1 B0.1 B0")] * 2, {"F": 1, "B": 2})
    found = {(w.kind, w.chunk, w.stage): w.start for w in works}
    expected = {("F", 0, 0): 0.0, ("F", 0, 1): 1.0, ("F", 1, 0): 2.0, ("F", 1, 1): 3.0}
    expected |= {("B", 1, 1): 4.0, ("B", 1, 0): 6.0, ("B", 0, 1): 8.0, ("B", 0, 0): 10.0}
    expect_close(found, expected, name="starts", read=NEEDS)


def test_simulate_unequal_stages():
    case(
        "3 stages whose forwards take 1, 4 and 2 s and whose backwards take 1, 8 and 2 s, 2 micro-batches, "
        "all forwards first"
    )
    seconds = [{"F": 1, "B": 1}, {"F": 4, "B": 8}, {"F": 2, "B": 2}]
    works = pipeline.simulate([long("F0 F1 B0 B1")] * 3, seconds)
    found: dict[str, float] = {}
    for w in works:
        what = f"{w.kind} of micro-batch {w.micro_batch} on stage {w.stage}"
        found |= {f"start of {what}": w.start, f"end of {what}": w.end}
    expected = {(0, "F", 0): (0, 1), (0, "F", 1): (1, 2), (1, "F", 0): (1, 5), (1, "F", 1): (5, 9), (2, "F", 0): (5, 7)}
    expected |= {(2, "F", 1): (9, 11), (2, "B", 0): (11, 13), (2, "B", 1): (13, 15), (1, "B", 0): (13, 21)}
    expected |= {(1, "B", 1): (21, 29), (0, "B", 0): (21, 22), (0, "B", 1): (29, 30)}
    times: dict[str, float] = {}
    for (stage, kind, m), (start, end) in expected.items():
        what = f"{kind} of micro-batch {m} on stage {stage}"
        times |= {f"start of {what}": start, f"end of {what}": end}
    expect_close(found, times, name="", answer=works, read=NEEDS)


def test_simulate_takes_any_mapping_and_empty_lists():
    schedules = [long("F0 B0"), long("F0 B0")]
    seconds = MappingProxyType({"F": 1, "B": 3})
    for durations, what in (
        (seconds, "a read-only mapping"),
        ((seconds, seconds), "a tuple of two read-only mappings"),
    ):
        case(f"2 stages, 1 micro-batch; F 1 s, B 3 s, given as {what}")
        found = {(w.stage, w.kind): w.start for w in pipeline.simulate(schedules, durations)}
        expected = {(0, "F"): 0.0, (1, "F"): 1.0, (1, "B"): 2.0, (0, "B"): 5.0}
        expect_close(found, expected, name="starts", read="the contract, under Args")
    case("2 stages without actions")
    expect_equal(pipeline.simulate([[], []], seconds), [], name="works", read="the contract, under Returns")


@pytest.mark.parametrize(
    ("kind", "n", "m"), [("1F1B", 4, 6), ("weights later", 3, 5), ("one by one", 3, 2), ("1F1B", 1, 3)]
)
def test_simulate_keeps_the_rules(kind, n, m):
    case(f"{many(n, 'stage')}, {many(m, 'micro-batch')}, {kind}; F 2 s, B 3 s, W 1.5 s")
    schedules = [programs.plan(kind, s, n, m) for s in range(n)]
    seconds = {"F": 2.0, "B": 3.0, "W": 1.5}
    works = pipeline.simulate(schedules, seconds)
    expect_close(max(w.end for w in works), step_seconds(schedules, seconds), name="end", answer=works, read=NEEDS)
    for s in range(n):
        mine = [Action(w.kind, w.micro_batch, w.chunk) for w in works if w.stage == s]
        expect_equal(short(mine), short(schedules[s]), name=f"order on stage {s}", answer=works, read=NEEDS)
    order = [(w.start, w.stage) for w in works]
    expect_true(
        order == sorted(order),
        "the list is not in ascending order of start, then of stage",
        answer=works,
        read="the contract, under Returns",
    )


@pytest.mark.parametrize(
    ("schedules", "mentions"),
    [
        (["F0 B0 F1 B1", "F0 F1 B1 B0"], None),
        (["F0 F1 B0 B1", "B0 F0 F1 B1"], ("stage 1", "B of micro-batch 0", "F of micro-batch 0")),
        (["F0 B0 F1 B1", "F1 B1 F0 B0"], ("stage 1", "F of micro-batch 1", "stage 0")),
        (["F0 F1 B0 B1", "F0 F1 B1"], ("stage 0", "B of micro-batch 0", "stage 1")),
        (["B0 F0", "F0 B0"], ("stage 0", "B of micro-batch 0", "F of micro-batch 0")),
        (["F0 W0 B0", "F0 B0 W0"], ("stage 0", "W of micro-batch 0", "B of micro-batch 0")),
        (["F0 F0.1 B0 B0.1", "F0 F0.1 B0.1 B0"], ("stage 0", "B of micro-batch 0, chunk 0", "stage 1")),
        (["F0 F0.1", "F0 F0.1 B0.1 B0"], ("B of micro-batch 0, chunk 0", "B of micro-batch 0, chunk 1", "stage 0")),
        (["F0 B0", "F0 F0.1 B0.1 B0"], ("stage 0", "B of micro-batch 0, chunk 0", "stage 1")),
    ],
)
def test_simulate_refuses_what_never_goes_on(schedules, mentions):
    case(f"schedules {schedules}; F0.1 is chunk 1")
    lists = [long(text) for text in schedules]
    if mentions is None:
        lists[0] = long("F0 B0 F1 B1")
        mentions = ("stage 0", "B of micro-batch 0", "stage 1")
    with expect_raises(ValueError, *mentions, read="the contract, under Raises"):
        pipeline.simulate(lists, {"F": 1, "B": 2, "W": 1})


def test_simulate_names_who_is_stuck_first():
    case("stage 1 is stuck at once, stage 0 only after two forwards: the message begins with stage 1")
    with expect_raises(ValueError, "B of micro-batch 3", read="the contract, under Raises"):
        try:
            pipeline.simulate([long("F0 F3 B0 B3"), long("B3 F0 B0 F3")], {"F": 1, "B": 2})
        except ValueError as error:
            text = str(error)
            first = text.find("micro-batch 3")
            other = text.find("B of micro-batch 0")
            expect_true(
                other < 0 or first < other,
                f"stage 0 is named first: {text}",
                answer=text,
                read="the contract, under Raises",
            )
            raise


# ---- checkpoint ------------------------------------------------------------------------------------------------------


def their_checkpoint(function, *args):
    return torch_checkpoint(function, *args, use_reentrant=False)


def plain(function, *args):
    return function(*args)


def saved_bytes(make) -> tuple[object, int]:
    """What ``make()`` returns, and the bytes that the graph saves for it, each storage once."""
    seen: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = make()
    return out, sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


def block(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 20), nn.GELU(), nn.Dropout(dropout), nn.Linear(20, 5), nn.Tanh())


def outcome(call, make, autocast: bool = False) -> dict[str, Tensor | int]:
    """Values, gradients, saved bytes and the random state afterwards of ``make(call, model, x, z)``."""
    model = block(dropout=0.5)
    torch.manual_seed(3)
    x, z = randn(4, 5).requires_grad_(), randn(4, 5, seed=1)
    with torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
        out, n_bytes = saved_bytes(lambda: make(call, model, x, z))
    outs = out if isinstance(out, tuple) else (out,)
    sum((o.float().square().sum() for o in outs), torch.zeros(())).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if x.grad is not None:
        grads["x"] = x.grad
    return {**{f"out {i}": o.detach() for i, o in enumerate(outs)}, **grads, "bytes": n_bytes, "random": torch.rand(3)}


def nested(call, model, x, z):
    return call(lambda a: model[4](call(model[:4], torch.sin(a)) * 2).exp(), x)


MAKES = {
    "one block": lambda call, model, x, z: call(model, x),
    "two blocks in a row": lambda call, model, x, z: call(model, call(model, x)),
    "an argument without gradient": lambda call, model, x, z: call(lambda a, b: model(a * b), x, z),
    "no argument with a gradient": lambda call, model, x, z: call(model, z),
    "arguments that are no tensors": lambda call, model, x, z: call(
        lambda a, n, b, s: model(a * n).sin() + b, x, 3, z, None
    ),
    "a tuple": lambda call, model, x, z: call(lambda a: (model(a), a.exp().sin()), x),
    "a checkpoint inside": nested,
}


def test_checkpoint_by_hand():
    case("exp(sin(x)) at x = [0, 1], float64")
    x = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    out = pipeline.checkpoint(lambda a: a.sin().exp(), x)
    expect_close(out.detach(), x.detach().sin().exp(), name="value", read=TWICE)
    out.sum().backward()
    expect_close(x.grad, x.detach().cos() * x.detach().sin().exp(), name="gradient", read=TWICE)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MAKES)
def test_checkpoint_equals_pytorch(name, autocast):
    case(
        f"{name}, with dropout 0.5{', under bf16 autocast' if autocast else ''}: "
        "values, gradients, bytes saved, next random number"
    )
    expected = outcome(their_checkpoint, MAKES[name], autocast)
    found = outcome(pipeline.checkpoint, MAKES[name], autocast)
    for key in expected:
        what = f"gradient of {key}" if "." in key or key == "x" else key
        read = TRAPS if key != "bytes" else TWICE
        if key == "bytes":
            expect_equal(found["bytes"], expected["bytes"], name="bytes saved by the graph", read=read)
        else:
            expect_true(key in found, f"{what} is missing", read=read)
            expect_close(found[key], expected[key], name=what, read=read, atol=1e-6)


def test_checkpoint_keeps_only_its_inputs():
    case("a block of 5 to 20 features on [1000, 5]: what is alive between forward and backward")
    refs: list[StorageWeakRef] = []

    class Watch(nn.Module):
        def forward(self, x):
            refs.append(StorageWeakRef(x.untyped_storage()))
            return x

    model = block()
    model.insert(1, Watch())
    x = randn(1000, 5).requires_grad_()
    out = pipeline.checkpoint(model, x)
    expect_true(refs[0].expired(), "an activation inside the function is still in memory before backward", read=TWICE)
    out.sum().backward()
    expect_true(all(ref.expired() for ref in refs), "an activation is still in memory after backward", read=TWICE)


def test_checkpoint_lets_an_enclosing_one_drop_its_inputs():
    case("a checkpoint inside of another, whose input [1000, 5] is computed by the outer one: alive before backward?")
    refs: list[StorageWeakRef] = []
    model = block()

    def outer(a: Tensor) -> Tensor:
        inner = a.sin()
        refs.append(StorageWeakRef(inner.untyped_storage()))
        return pipeline.checkpoint(model, inner) * 2

    out = pipeline.checkpoint(outer, randn(1000, 5).requires_grad_())
    problem = "the inner checkpoint holds its input, besides what the graph saves: the outer one cannot drop it"
    expect_true(refs[0].expired(), problem, answer=[out.requires_grad], read="the contract, under Returns")


def test_checkpoint_computes_twice():
    calls = []

    def function(x):
        calls.append("first")
        y = x.exp()
        calls.append("second")
        return y * 2

    case("exp(x) * 2: forward, backward; how often each half runs")
    x = randn(3).requires_grad_()
    out = pipeline.checkpoint(function, x)
    expect_equal(calls, ["first", "second"], name="runs in forward", read=TWICE)
    out.sum().backward()
    problem = (
        "the second run should end when everything that was saved is there: here after exp"
        if len(calls) == 4
        else "the function should run once more"
    )
    expect_true(calls == ["first", "second", "first"], problem, answer=calls, read="the contract")
    case("the same without gradients: one run")
    calls.clear()
    with torch.no_grad():
        pipeline.checkpoint(function, x)
    expect_equal(calls, ["first", "second"], name="runs", read="the contract")


def test_checkpoint_backward_twice():
    case("backward with retain_graph=True, then again; dropout 0.5")
    grads = []
    for call in (plain, pipeline.checkpoint):
        model, x = block(dropout=0.5), randn(4, 5).requires_grad_()
        torch.manual_seed(5)
        out = call(model, x).sum()
        out.backward(retain_graph=True)
        out.backward()
        grads.append(x.grad)
    expect_close(grads[1], grads[0], name="gradient after both", read=TWICE)


def test_checkpoint_backward_in_parts():
    case("first the gradient of the last layer's weight alone, then those of everything; retain_graph=True")
    grads = []
    for call in (plain, pipeline.checkpoint):
        model, x = block(), randn(4, 5).requires_grad_()
        out = call(model, x).sum()
        (first,) = torch.autograd.grad(out, model.get_parameter("3.weight"), retain_graph=True)
        out.backward()
        grads.append({"last weight": first, "x": x.grad, "first weight": model[0].weight.grad})
    expect_close(grads[1], grads[0], name="gradients", read="the contract")


def test_checkpoint_drops_what_backward_has_used():
    case("sin(exp(exp(x))) on [1000, 5]: what is in memory when backward has passed the outer exp")
    outer, used = list[StorageWeakRef](), list[bool]()

    def function(x):
        inner = x.exp()
        if inner.requires_grad:
            inner.register_hook(lambda grad: used.append(outer[-1].expired()))
        out = inner.exp()
        outer.append(StorageWeakRef(out.untyped_storage()))
        return out.sin()

    pipeline.checkpoint(function, randn(1000, 5).requires_grad_()).sum().backward()
    problem = "the outer exp has had its backward, and what it saved is still in memory: each tensor is needed once"
    if not outer[-1].expired():
        problem = "what the second run saved is still in memory after backward: does it have a history, which holds it?"
    expect_true(used == [True], problem, answer=used, read="the contract")


def test_checkpoint_of_a_gradient():
    case("the gradient of the gradient of exp(sin(x)), with create_graph=True")
    x = randn(4, dtype=torch.float64).requires_grad_()
    found = []
    for call in (plain, pipeline.checkpoint):
        (first,) = torch.autograd.grad(call(lambda a: a.sin().exp(), x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.sum(), x)[0])
    expect_close(found[1], found[0], name="second derivative", read=TWICE)


def test_checkpoint_passes_errors_on():
    calls = []

    def function(x, when):
        calls.append(1)
        y = torch.tanh(x).exp()
        torch.rand(2)
        if len(calls) == when:
            raise ArithmeticError("out of order")
        return y.sin()

    x = randn(3).requires_grad_()
    case("the function raises in its first run: the error arrives, and later operations save tensors as always")
    with expect_raises(ArithmeticError, "out of order", read=TRAPS):
        pipeline.checkpoint(function, x, 1)
    (grad,) = torch.autograd.grad(x.exp().sum(), x)
    expect_close(grad, x.detach().exp(), name="gradient of exp(x) afterwards", read=TRAPS)
    case("the function raises in its second run: the error arrives, and the random state is as before backward")
    calls.clear()
    out = pipeline.checkpoint(function, x, 2)
    before = torch.get_rng_state()
    with expect_raises(ArithmeticError, "out of order", read=TRAPS):
        out.sum().backward()
    expect_true(torch.equal(before, torch.get_rng_state()), "the random state was not put back", read=TRAPS)


def test_checkpoint_refuses_another_graph():
    calls = []

    def function(x):
        calls.append(1)
        return x.exp().sin() if len(calls) == 1 else x.exp()

    case("a function that saves 2 tensors first, and 1 when it runs again")
    with expect_raises(RuntimeError, "2", "1", read="the contract, under Raises"):
        pipeline.checkpoint(function, randn(3).requires_grad_()).sum().backward()


def gradients(named: Iterable[tuple[str, nn.Parameter]], read: str) -> dict[str, Tensor]:
    named = list(named)
    missing = [name for name, p in named if p.grad is None]
    expect_true(not missing, f"no gradient was added to {', '.join(missing)}", answer=missing, read=read)
    return {name: p.grad for name, p in named if p.grad is not None}


# ---- DeferredLinear --------------------------------------------------------------------------------------------------


def linear(bias: bool = True, dtype=torch.float64) -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(3, 4, bias=bias, dtype=dtype)


def test_DeferredLinear_by_hand():
    case("weight [[2, 3]], bias [5], x = [1, 10], gradient 7")
    plain_layer = nn.Linear(2, 1)
    with torch.no_grad():
        plain_layer.weight.copy_(torch.tensor([[2.0, 3.0]]))
        plain_layer.bias.fill_(5.0)
    layer = pipeline.DeferredLinear(plain_layer)
    x = torch.tensor([[1.0, 10.0]], requires_grad=True)
    out = layer(x)
    expect_close(out.detach(), torch.tensor([[37.0]]), name="output", read=HALVES)
    out.backward(torch.tensor([[7.0]]))
    expect_close(x.grad, torch.tensor([[14.0, 21.0]]), name="x's gradient", read=HALVES)
    same = layer.weight is plain_layer.weight and layer.bias is plain_layer.bias
    problem = (
        "weight and bias are not the parameters of the layer given, so its optimizer would not see their gradients"
    )
    expect_true(same, problem, answer=[same], read="the contract, under Attributes")
    early = plain_layer.weight.grad is None and plain_layer.bias.grad is None
    expect_true(
        early, "the weights have a gradient before backward_weights()", answer=plain_layer.weight.grad, read=HALVES
    )
    layer.backward_weights()
    grads = gradients(plain_layer.named_parameters(), HALVES)
    expect_close(
        grads, {"weight": torch.tensor([[7.0, 70.0]]), "bias": torch.tensor([7.0])}, name="gradients", read=HALVES
    )


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3), (2, 1, 4, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_DeferredLinear_equals_linear(shape, bias):
    case(f"x {list(shape)}, F=4, bias={bias}, float64, two times forward and backward, x with its memory transposed")
    theirs, mine = linear(bias), linear(bias)
    layer = pipeline.DeferredLinear(mine)
    expect_equal(
        [name for name, _ in layer.named_parameters()],
        [name for name, _ in theirs.named_parameters()],
        name="parameters",
        read="the contract, under Attributes",
    )
    for seed in range(2):
        x, y = (randn(*shape[::-1], seed=seed, dtype=torch.float64) for _ in range(2))
        x, y = (each.permute(*reversed(range(x.ndim))).requires_grad_() for each in (x, y))
        up = randn(*shape[:-1], 4, seed=seed + 5, dtype=torch.float64)
        out = layer(x)
        expect_close(out.detach(), theirs(y).detach(), name="output", read=HALVES)
        out.backward(up)
        theirs(y).backward(up)
        expect_close(x.grad, y.grad, name="x's gradient", read=HALVES)
        layer.backward_weights()
    found = gradients(mine.named_parameters(), HALVES)
    expect_close(found, {name: p.grad for name, p in theirs.named_parameters()}, name="gradients of both", read=HALVES)


def test_DeferredLinear_does_the_oldest():
    case("three backwards of x = 1, 10 and 100 with gradients 1, 2 and 3, then backward_weights() three times")
    mine = nn.Linear(1, 1)
    layer = pipeline.DeferredLinear(mine)
    outs = [layer(torch.tensor([[value]], requires_grad=True)) for value in (1.0, 10.0, 100.0)]
    for out, grad in zip(outs, (1.0, 2.0, 3.0), strict=True):
        out.backward(torch.tensor([[grad]]))
    for expected in (1.0, 21.0, 321.0):
        layer.backward_weights()
        expect_close(
            mine.weight.grad,
            torch.tensor([[expected]]),
            name="weight.grad",
            read="the contract of ex-pipeline-deferredlinear",
        )
    with expect_raises(RuntimeError, "pending", read="the contract, under Raises"):
        layer.backward_weights()


def test_DeferredLinear_lists_what_is_pending():
    case(
        "two layers; of the first, forwards of x = 1, 10 and 100, then backwards of the last, the first and the second"
    )
    mine = nn.Linear(1, 1)
    layer, other = pipeline.DeferredLinear(mine), pipeline.DeferredLinear(nn.Linear(1, 1))
    read = "the contract, under Attributes"
    expect_true(isinstance(layer.pending, deque), "`pending` is not a deque", answer=[layer.pending], read=read)
    outs = [layer(torch.tensor([[value]], requires_grad=True)) for value in (1.0, 10.0, 100.0)]
    found = [(len(layer.pending), len(other.pending))]
    for i in (2, 0, 1):
        outs[i].backward(torch.tensor([[i + 1.0]]))
        found.append((len(layer.pending), len(other.pending)))
    expected = [(0, 0), (1, 0), (2, 0), (3, 0)]
    name = "entries pending on both layers after the forwards and each backward"
    expect_equal(found, expected, name=name, read="the contract, under Attributes")
    for left, total in ((2, 300.0), (1, 301.0), (0, 321.0)):
        layer.backward_weights()
        grad = gradients(mine.named_parameters(), HALVES)["weight"]
        read = "the contract of ex-pipeline-deferredlinear"
        expect_close(grad, torch.tensor([[total]]), name="weight.grad", read=read)
        expect_equal(len(layer.pending), left, name="entries pending", read="the contract, under Attributes")


def test_DeferredLinear_without_gradient_of_the_input():
    case("x needs no gradient, as on the first layer of a model; then a frozen weight, and everything frozen")
    mine, x = linear(), randn(5, 3, dtype=torch.float64)
    layer = pipeline.DeferredLinear(mine)
    out = layer(x)
    expect_true(out.requires_grad, "the output must require a gradient because the weights do", read="the contract")
    out.sum().backward()
    layer.backward_weights()
    expect_close(mine.weight.grad, x.sum(0).expand(4, 3), name="weight.grad", read=HALVES)
    frozen = linear()
    frozen.weight.requires_grad_(False)
    layer = pipeline.DeferredLinear(frozen)
    layer(x).sum().backward()
    layer.backward_weights()
    expect_true(
        frozen.weight.grad is None, "a frozen weight got a gradient", answer=frozen.weight.grad, read="the contract"
    )
    expect_close(frozen.bias.grad, torch.full((4,), 5.0, dtype=torch.float64), name="bias.grad", read=HALVES)
    frozen.bias.requires_grad_(False)
    expect_true(
        not layer(x).requires_grad, "nothing needs a gradient, and the output requires one", read="the contract"
    )


def test_DeferredLinear_under_autocast():
    case("under bf16 autocast, x and weight float32: as nn.Linear")
    theirs, mine = linear(dtype=torch.float32), linear(dtype=torch.float32)
    layer = pipeline.DeferredLinear(mine)
    x, y = (randn(5, 3).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = layer(x), theirs(y)
    expect_close(out.detach(), expected.detach(), name="output", read="the contract")
    out.float().square().sum().backward()
    expected.float().square().sum().backward()
    layer.backward_weights()
    expect_close(
        {"x": x.grad, "weight": mine.weight.grad, "bias": mine.bias.grad},
        {"x": y.grad, "weight": theirs.weight.grad, "bias": theirs.bias.grad},
        name="gradients",
        read="the contract",
        atol=2e-2,
        rtol=2e-2,
    )
    expect_equal(mine.weight.grad.dtype, torch.float32, name="dtype of weight.grad", read="the contract")


def test_DeferredLinear_releases_what_it_kept():
    case("x [1000, 3]: kept until backward_weights(), and then released")
    layer = pipeline.DeferredLinear(linear())
    x = randn(1000, 3, dtype=torch.float64) * 1
    ref = StorageWeakRef(x.untyped_storage())
    layer(x).sum().backward()
    del x
    problem = "the layer keeps a copy of x until backward_weights(), and not x itself, which takes no more memory"
    expect_true(not ref.expired(), problem, read=HALVES)
    layer.backward_weights()
    expect_true(
        ref.expired(),
        "x is still in memory after backward_weights()",
        read="the contract of ex-pipeline-deferredlinear",
    )


def test_DeferredLinear_saves_in_the_graph():
    case("x [1000, 3]: the bytes that the graph saves, which a checkpoint can drop; as nn.Linear")
    x = randn(1000, 3, dtype=torch.float64).requires_grad_()
    expected = saved_bytes(lambda: linear()(x))[1]
    layer = pipeline.DeferredLinear(linear())
    expect_equal(saved_bytes(lambda: layer(x))[1], expected, name="bytes saved by the graph")


def test_DeferredLinear_keeps_its_input_and_its_gradient():
    refs: dict[str, StorageWeakRef] = {}

    def follow(name: str, tensor: Tensor) -> Tensor:
        refs[name] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    torch.manual_seed(2)
    first, last = pipeline.DeferredLinear(nn.Linear(3, 4)), pipeline.DeferredLinear(nn.Linear(4, 3))
    inner = follow("sin's input", first(randn(1000, 3).requires_grad_()))
    inner.register_hook(lambda grad: refs.update(grad=StorageWeakRef(grad.untyped_storage())))
    out = last(follow("x", inner.sin()))
    del inner
    out.sum().backward()
    case("3 to 4 features, sin, 4 to 3, x [1000, 3], backward: the layers keep their inputs and gradients, no more")
    expect_true(refs["sin's input"].expired(), "the input of sin is still in memory after backward", read=HALVES)
    kept = not (refs["x"].expired() or refs["grad"].expired())
    expect_true(kept, "the layer keeps a copy of its input or of the gradient, and not the tensor itself", read=HALVES)
    case("the same, then backward_weights() of both layers, while the output is still there")
    last.backward_weights()
    first.backward_weights()
    problem = (
        "the gradient of the first layer's output is still in memory; does weight.grad have a history, which keeps it?"
    )
    expect_true(
        refs["grad"].expired(), problem, answer=first.weight.grad, read="the contract of ex-pipeline-deferredlinear"
    )
    expect_true(refs["x"].expired(), "the second layer's input is still in memory", read=HALVES)


# ---- PipelineStage ---------------------------------------------------------------------------------------------------


def two_layers() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def whole_gradients(xs: list[Tensor], ups: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    module = two_layers()
    leaves = [x.clone().requires_grad_() for x in xs]
    for x, up in zip(leaves, ups, strict=True):
        module(x).backward(up)
    return [x.grad for x in leaves], {name: p.grad for name, p in module.named_parameters()}


def test_PipelineStage_by_hand():
    case("stage 1 of 2 multiplies by 3: x = [1, 2], the gradient of its output [10, 100]")
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(3.0)
    stage = pipeline.PipelineStage(module, 1, 2)
    found = {"module": stage.module, "stage": stage.stage, "n_stages": stage.n_stages}
    expect_equal(found, {"module": module, "stage": 1, "n_stages": 2}, name="", read="the contract, under Args")
    out = stage.forward_micro(0, torch.tensor([[1.0], [2.0]]))
    expect_close(out.detach(), torch.tensor([[3.0], [6.0]]), name="output", read=STAGE)
    grad = stage.backward_micro(0, torch.tensor([[10.0], [100.0]]))
    expect_close(grad, torch.tensor([[30.0], [300.0]]), name="gradient of x", read=STAGE)
    stage.backward_weights(0)
    expect_close(module.weight.grad, torch.tensor([[210.0]]), name="weight.grad", read=STAGE)


def test_PipelineStage_keeps_its_group():
    case("the process group that was given, here one that nobody uses")
    make: Any = dist.ProcessGroup
    group = make(0, 1)
    found = getattr(pipeline.PipelineStage(two_layers(), 0, 1, group), "group", "missing")
    expect_true(found is group, "`group` is not the one given", answer=[found], read="the contract, under Args")


def test_PipelineStage_returns_an_output_with_a_graph():
    case("x [2, 3], stage 0 of 2: the output's graph, which ends at x")
    out = pipeline.PipelineStage(two_layers(), 0, 2).forward_micro(0, randn(2, 3, dtype=torch.float64))
    problem = "the output has no graph, so a loss that is computed from it has no gradient"
    expect_true(out.requires_grad, problem, answer=out, read="the contract of ex-pipeline-pipelinestage")


def test_PipelineStage_takes_a_number_again():
    case("micro-batch 0 of two steps, 2 and 3 rows; .grad adds up")
    stage, xs = pipeline.PipelineStage(two_layers(), 0, 1), [randn(n, 3, seed=n, dtype=torch.float64) for n in (2, 3)]
    expected, grads = whole_gradients(xs, [torch.ones_like(x) for x in xs])
    for x, wanted in zip(xs, expected, strict=True):
        stage.forward_micro(0, x)
        expect_close(stage.backward_micro(0, torch.ones_like(x)), wanted, name="gradient of x", read=STAGE)
        stage.backward_weights(0)
    expect_close(gradients(stage.module.named_parameters(), STAGE), grads, name="gradients", read=STAGE)


def test_PipelineStage_of_an_output_without_a_gradient():
    read = "the contract, under backward_micro"
    case("a frozen table of words: its output requires no gradient")
    table = nn.Embedding(5, 2)
    table.weight.requires_grad_(False)
    stage = pipeline.PipelineStage(table, 0, 2)
    stage.forward_micro(0, torch.tensor([[1, 4, 1]]))
    found = stage.backward_micro(0, torch.ones(1, 3, 2))
    stage.backward_weights(0)
    expect_true(found is None, "words have no gradient: expected None", answer=[found], read=read)
    expect_true(table.weight.grad is None, "the frozen table has a gradient", answer=[table.weight.grad], read=read)


def test_PipelineStage_of_an_output_that_does_not_depend_on_x():
    case("a layer of which the output does not depend on x [2, 3]: the gradient of x is zero")

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.expand(len(x), 3)

    stage = pipeline.PipelineStage(Constant(), 1, 2)
    stage.forward_micro(0, randn(2, 3))
    found, read = stage.backward_micro(0, torch.ones(2, 3)), "the contract, under backward_micro"
    problem = "the gradient of x is None, as x.grad is where autograd never came to x; it should be zero"
    expect_true(found is not None, problem, answer=[found], read=read)
    expect_close(found, torch.zeros(2, 3), name="gradient of x", read=read)


def test_PipelineStage_finds_deferred_layers_at_any_depth():
    case("a DeferredLinear two levels deep, and one that is the whole module; one micro-batch")
    for wrap in (lambda layer: nn.Sequential(nn.Tanh(), nn.Sequential(nn.Sequential(layer))), lambda layer: layer):
        mine = nn.Linear(3, 2)
        stage = pipeline.PipelineStage(wrap(pipeline.DeferredLinear(mine)), 0, 1)
        stage.forward_micro(0, randn(4, 3))
        stage.backward_micro(0, torch.ones(4, 2))
        stage.backward_weights(0)
        grads = gradients(mine.named_parameters(), STAGE)
        expect_close(grads["bias"], torch.full((2,), 4.0), name="bias.grad", read=STAGE)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_PipelineStage_of_several_micro_batches(order):
    case(f"3 micro-batches of 1, 2 and 3 rows, all forwards, then the backwards in the order {order}")
    stage = pipeline.PipelineStage(two_layers(), 0, 1)
    xs, ups = ([randn(n + 1, 3, seed=n + s, dtype=torch.float64) for n in range(3)] for s in (0, 10))
    expected, grads = whole_gradients(xs, ups)
    for i, x in enumerate(xs):
        stage.forward_micro(i, x)
    for i in order:
        expect_close(stage.backward_micro(i, ups[i]), expected[i], name=f"gradient of x of micro-batch {i}", read=STAGE)
        stage.backward_weights(i)
    expect_close(gradients(stage.module.named_parameters(), STAGE), grads, name="gradients", read=STAGE)
    for i, x in enumerate(xs):
        expect_true(x.grad is None and not x.requires_grad, f"x of micro-batch {i} was changed", read=STAGE)


def test_PipelineStage_cuts_the_graph():
    case("x comes with a graph of its own, which the backward of the stage must not touch")
    source = randn(2, 3, dtype=torch.float64).requires_grad_()
    stage = pipeline.PipelineStage(two_layers(), 1, 3)
    stage.forward_micro(4, source * 2)
    stage.backward_micro(4, torch.ones(2, 3, dtype=torch.float64))
    expect_true(source.grad is None, "the gradient went beyond the stage", answer=source.grad, read=STAGE)


def test_PipelineStage_of_a_loss_and_of_words():
    case("a last stage that returns the loss: backward_micro(0) without a gradient; 2 rows of 3")
    module = two_layers()

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return self.inner(x).square().mean()

    stage, x = pipeline.PipelineStage(Loss(), 2, 3), randn(2, 3, dtype=torch.float64)
    stage.forward_micro(0, x)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(two_layers()(leaf).square().mean(), leaf)
    expect_close(
        stage.backward_micro(0), expected, name="gradient of x", read="the contract of ex-pipeline-pipelinestage"
    )
    case("a first stage that looks words up: no gradient of x")
    table = nn.Embedding(5, 2)
    stage = pipeline.PipelineStage(table, 0, 2)
    stage.forward_micro(0, torch.tensor([[1, 4, 1]]))
    expect_true(
        stage.backward_micro(0, torch.ones(1, 3, 2)) is None,
        "words have no gradient",
        read="the contract of ex-pipeline-pipelinestage",
    )
    stage.backward_weights(0)
    expect_close(
        table.weight.grad.sum(-1), torch.tensor([0.0, 4.0, 0.0, 0.0, 2.0]), name="gradient of the table", read=STAGE
    )


def test_PipelineStage_with_deferred_layers():
    case("two DeferredLinear layers and one plain one; 3 micro-batches; the weights of the deferred ones wait")
    torch.manual_seed(4)
    first, plain_layer, last = nn.Linear(3, 3).double(), nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    theirs = nn.Sequential(first, nn.Tanh(), plain_layer, last)
    expected_of = {name: p.detach().clone().requires_grad_() for name, p in theirs.named_parameters()}
    deferred = pipeline.DeferredLinear
    stage = pipeline.PipelineStage(nn.Sequential(deferred(first), nn.Tanh(), plain_layer, deferred(last)), 0, 1)
    xs = [randn(n + 1, 3, seed=n, dtype=torch.float64) for n in range(3)]
    total = sum(
        (torch.func.functional_call(theirs, expected_of, (x,)).sum() for x in xs), torch.zeros((), dtype=torch.float64)
    )
    expected = dict(zip(expected_of, torch.autograd.grad(total, list(expected_of.values())), strict=True))
    for i, x in enumerate(xs):
        stage.forward_micro(i, x)
        stage.backward_micro(i, torch.ones(i + 1, 3, dtype=torch.float64))
    problem = "the weights of a DeferredLinear have a gradient before backward_weights"
    expect_true(first.weight.grad is None and last.weight.grad is None, problem, read=STAGE)
    stage.backward_weights(0)
    expect_close(
        last.bias.grad, torch.ones(3, dtype=torch.float64), name="last bias after backward_weights(0)", read=STAGE
    )
    for i in (1, 2):
        stage.backward_weights(i)
    expect_close(gradients(theirs.named_parameters(), STAGE), expected, name="gradients", read=STAGE)


def test_PipelineStage_with_a_layer_used_twice():
    case("one DeferredLinear that a micro-batch passes twice; 2 micro-batches")
    torch.manual_seed(4)
    shared = nn.Linear(3, 3).double()
    layer = pipeline.DeferredLinear(shared)
    stage = pipeline.PipelineStage(nn.Sequential(layer, nn.Tanh(), layer), 0, 1)
    weight = shared.weight.detach().clone().requires_grad_()
    for i in range(2):
        x = randn(2, 3, seed=i, dtype=torch.float64)
        stage.forward_micro(i, x)
        stage.backward_micro(i, torch.ones(2, 3, dtype=torch.float64))
        hidden = functional.linear(x, weight, shared.bias.detach()).tanh()
        functional.linear(hidden, weight, shared.bias.detach()).sum().backward()
    for i in range(2):
        stage.backward_weights(i)
    gradients(shared.named_parameters(), STAGE)
    expect_close(shared.weight.grad, weight.grad, name="weight.grad", read="the contract of ex-pipeline-pipelinestage")


class Seen(nn.Module):
    """A layer whose outputs, which backward needs, can be followed."""

    def __init__(self):
        super().__init__()
        self.refs: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        self.refs.append(StorageWeakRef(y.untyped_storage()))
        return y


def test_PipelineStage_releases_what_it_kept():
    seen = Seen()
    stage = pipeline.PipelineStage(nn.Sequential(nn.Linear(3, 8), seen, nn.Linear(8, 3)).double(), 0, 2)
    case("2 micro-batches: the output of the stage is released when the caller drops it")
    outs = [stage.forward_micro(i, randn(4, 3, seed=i, dtype=torch.float64)) for i in range(2)]
    refs = [StorageWeakRef(out.untyped_storage()) for out in outs]
    del outs
    problem = "the stage holds its output until backward; the gradient edge is enough"
    expect_true(all(ref.expired() for ref in refs), problem, read=STAGE)
    case(
        "2 micro-batches, the backward of micro-batch 1: its activations are released, "
        "and those of micro-batch 0 are not"
    )
    stage.backward_micro(1, torch.ones(4, 3, dtype=torch.float64))
    first, second = (ref.expired() for ref in seen.refs)
    expect_true(second, "micro-batch 1 has had its backward, and its activations are still in memory", read=STAGE)
    expect_true(not first, "micro-batch 0 waits for its backward, and its activations are gone", read=STAGE)
    case("one micro-batch, forward and backward: x [4, 3], which the caller has dropped, is released")
    x = randn(4, 3, dtype=torch.float64) * 1
    ref = StorageWeakRef(x.untyped_storage())
    stage.forward_micro(2, x)
    del x
    expect_true(
        not ref.expired(), "the stage keeps a copy of x, and not x itself, which takes no more memory", read=STAGE
    )
    stage.backward_micro(2, torch.ones(4, 3, dtype=torch.float64))
    expect_true(ref.expired(), "x is still in memory after the backward", read=STAGE)


def test_PipelineStage_refuses_the_wrong_order():
    stage = pipeline.PipelineStage(two_layers(), 0, 1)
    x, up = randn(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    case("backward of micro-batch 5 before its forward")
    with expect_raises(ValueError, "5", read="the contract, under Raises"):
        stage.backward_micro(5, up)
    case("backward_weights of micro-batch 6 before its backward")
    with expect_raises(ValueError, "6", read="the contract, under Raises"):
        stage.backward_weights(6)
    stage.forward_micro(7, x)
    stage.backward_micro(7, up)
    case("a second backward of micro-batch 7")
    with expect_raises(ValueError, "7", read="the contract, under Raises"):
        stage.backward_micro(7, up)
    stage.backward_weights(7)
    case("backward_weights of micro-batch 7 for the second time, after one backward")
    with expect_raises(ValueError, "7", read="the contract, under Raises"):
        stage.backward_weights(7)


@pytest.mark.parametrize(("n", "at"), [(2, 2), (3, -1)])
def test_PipelineStage_refuses_a_stage_that_does_not_exist(n, at):
    case(f"stage {at} of {n}")
    with expect_raises(ValueError, str(at), str(n), read="the contract, under Raises"):
        pipeline.PipelineStage(two_layers(), at, n)


# ---- timetable -------------------------------------------------------------------------------------------------------


def entries(items) -> list[str]:
    """A timetable as text: "stage 0: F0" and "F0 to virtual stage 1, from 0 to 1", with a dot before chunks."""
    expect_true(isinstance(items, list), "a timetable is a list", answer=items, read="the contract, under Returns")
    wrong = next((i for i in items if not isinstance(i, Work | Message)), None)
    problem = f"a timetable is a list of Work and Message, and this is neither: {wrong!r}"
    expect_true(wrong is None, problem, answer=items, read="the contract, under Returns")
    return [entry(item) for item in items]


def entry(item: Work | Message) -> str:
    if isinstance(item, Work):
        return f"stage {item.stage}: {short([Action(item.kind, item.micro_batch, item.chunk)])}"
    if not (isinstance(item.name, tuple) and len(item.name) == 3):
        return repr(item)
    kind, g, m = item.name
    return f"{kind}{m} to virtual stage {g}, from {item.sender} to {item.receiver}"


def works_of(*rows: tuple[int, str, float, float]) -> list[Work]:
    """Works from stage, action in short, start and end."""
    named = [(stage, long(text)[0], start, end) for stage, text, start, end in rows]
    return [Work(stage, a.micro_batch, a.kind, start, end, a.chunk) for stage, a, start, end in named]


def test_timetable_by_hand():
    case("2 stages, 1 micro-batch; F 1 s, B 3 s")
    works = works_of((0, "F0", 0, 1), (1, "F0", 1, 2), (1, "B0", 2, 5), (0, "B0", 5, 8))
    alone = [entry(work) for work in works]
    expected = ["stage 0: F0", "F0 to virtual stage 1, from 0 to 1", "stage 1: F0", "stage 1: B0"]
    expected += ["B0 to virtual stage 0, from 1 to 0", "stage 0: B0"]
    found = pipeline.timetable(works, 2)
    problem = "the list of works that was given was changed"
    expect_true([entry(work) for work in works] == alone, problem, answer=works)
    expect_equal(entries(found), expected, name="entries", answer=found, read=TABLE)
    kept = [item for item in found if isinstance(item, Work)]
    expect_equal(kept, works, name="works", answer=found, read="the contract, under Returns")


def test_timetable_of_three_micro_batches():
    case("2 stages, 3 micro-batches, 1F1B; F 1 s, B 2 s: stage 0 starts F2 while stage 1 is in the midst of B1")
    works = works_of((0, "F0", 0, 1), (0, "F1", 1, 2), (1, "F0", 1, 2), (1, "B0", 2, 4), (0, "B0", 4, 6))
    works += works_of((1, "F1", 4, 5), (1, "B1", 5, 7), (0, "F2", 6, 7), (0, "B1", 7, 9), (1, "F2", 7, 8))
    works += works_of((1, "B2", 8, 10), (0, "B2", 10, 12))
    expected = ["stage 0: F0", "F0 to virtual stage 1, from 0 to 1", "stage 0: F1", "stage 1: F0"]
    expected += ["F1 to virtual stage 1, from 0 to 1", "stage 1: B0", "B0 to virtual stage 0, from 1 to 0"]
    expected += ["stage 0: B0", "stage 1: F1", "stage 1: B1", "stage 0: F2", "B1 to virtual stage 0, from 1 to 0"]
    expected += ["F2 to virtual stage 1, from 0 to 1", "stage 0: B1", "stage 1: F2", "stage 1: B2"]
    expected += ["B2 to virtual stage 0, from 1 to 0", "stage 0: B2"]
    found = pipeline.timetable(works, 2)
    expect_equal(entries(found), expected, name="entries", answer=found, read=TABLE)


def test_timetable_of_chunks_and_weights():
    case("2 stages with 2 chunks each, 1 micro-batch, W of chunk 0 later; F 1 s, B 2 s, W 1 s; F0.1 is chunk 1")
    works = works_of((0, "F0", 0, 1), (1, "F0", 1, 2), (0, "F0.1", 2, 3), (1, "F0.1", 3, 4), (1, "B0.1", 4, 6))
    works += works_of((0, "B0.1", 6, 8), (1, "B0", 8, 10), (0, "B0", 10, 12), (1, "W0", 10, 11), (0, "W0", 12, 13))
    expected = ["stage 0: F0", "F0 to virtual stage 1, from 0 to 1", "stage 1: F0"]
    expected += ["F0 to virtual stage 2, from 1 to 0", "stage 0: F0.1", "F0 to virtual stage 3, from 0 to 1"]
    expected += ["stage 1: F0.1", "stage 1: B0.1", "B0 to virtual stage 2, from 1 to 0", "stage 0: B0.1"]
    expected += ["B0 to virtual stage 1, from 0 to 1", "stage 1: B0", "B0 to virtual stage 0, from 1 to 0"]
    expected += ["stage 0: B0", "stage 1: W0", "stage 0: W0"]
    found = pipeline.timetable(works, 2)
    expect_equal(entries(found), expected, name="entries", answer=found, read=TABLE)


def test_timetable_of_one_stage_with_two_chunks():
    case("1 stage with 2 chunks, 1 micro-batch: its messages go to itself")
    works = works_of((0, "F0", 0, 1), (0, "F0.1", 1, 2), (0, "B0.1", 2, 4), (0, "B0", 4, 6))
    expected = ["stage 0: F0", "F0 to virtual stage 1, from 0 to 0", "stage 0: F0.1", "stage 0: B0.1"]
    expected += ["B0 to virtual stage 0, from 0 to 0", "stage 0: B0"]
    found = pipeline.timetable(works, 1)
    expect_equal(entries(found), expected, name="entries", answer=found, read="the contract, under Returns")


def test_timetable_keeps_the_order_of_equal_times():
    case("3 stages, works of the same time, stage 2 before stage 0 in the list: what is equal keeps its order")
    works = works_of((2, "B0", 0, 2), (0, "F5", 0, 2), (1, "B1", 0, 2), (1, "F4", 2, 3), (0, "B1", 2, 4))
    expected = ["stage 2: B0", "stage 0: F5", "stage 1: B1", "B0 to virtual stage 1, from 2 to 1"]
    expected += ["F5 to virtual stage 1, from 0 to 1", "B1 to virtual stage 0, from 1 to 0", "stage 1: F4"]
    expected += ["stage 0: B1", "F4 to virtual stage 2, from 1 to 2"]
    found = pipeline.timetable(works, 3)
    expect_equal(entries(found), expected, name="entries", answer=found, read="the contract, under Returns")


def test_timetable_of_nothing():
    case("no works, 2 stages")
    expect_equal(pipeline.timetable([], 2), [], name="timetable", read="the contract, under Returns")


@pytest.mark.parametrize(
    ("kind", "n", "m", "v"), [("1F1B", 4, 6, 1), ("weights later", 3, 5, 1), ("all, then back", 2, 4, 2)]
)
def test_timetable_can_always_go_on(kind, n, m, v):
    case(f"{many(n, 'stage')}, {many(m, 'micro-batch')}, {many(v, 'chunk')}, {kind}; what is needed has come before")
    works = programs.timed([programs.plan(kind, s, n, m, v) for s in range(n)], {"F": 1, "B": 2, "W": 1})
    found = pipeline.timetable(works, n)
    entries(found)
    made, here = set(), set()
    for item in found:
        if isinstance(item, Message):
            problem = f"{entry(item)} is sent before it exists"
            expect_true((item.name, item.sender) in made, problem, answer=found, read=TABLE)
            here.add((item.name, item.receiver))
            continue
        g = item.chunk * n + item.stage
        needs = {"F": g > 0, "B": g < n * v - 1, "W": False}[item.kind]
        problem = f"{entry(item)} starts before its message has come"
        expect_true(
            not needs or ((item.kind, g, item.micro_batch), item.stage) in here, problem, answer=found, read=TABLE
        )
        made.add(((item.kind, g + (1 if item.kind == "F" else -1), item.micro_batch), item.stage))
    n_messages = sum(isinstance(item, Message) for item in found)
    expect_equal(n_messages, 2 * m * (n * v - 1), name="messages", answer=found, read=SENT)


# ---- run_schedule ----------------------------------------------------------------------------------------------------


@pytest.mark.time_limit(30)
def test_run_schedule_equals_one_process(ranks):
    case("2 ranks, 2 to 5 micro-batches: four schedules beside one process")
    ranks(
        programs.several,
        [("1F1B", 3, 1, False), ("all, then back", 4, 1), ("weights later", 5, 1), ("one by one", 2, 1)],
        n_ranks=2,
    )


@pytest.mark.time_limit(30)
def test_run_schedule_with_chunks(ranks):
    case("2 ranks with 2 or 3 chunks each: four schedules beside one process")
    cases = [("all, then back", 4, 2), ("one by one", 3, 2), ("all, then back", 2, 3), ("one W", 3, 2)]
    ranks(programs.several, cases, n_ranks=2)


@pytest.mark.time_limit(30)
@pytest.mark.parametrize("n_ranks", [1, 3])
def test_run_schedule_on_other_numbers_of_ranks(ranks, n_ranks):
    case(f"{many(n_ranks, 'rank')}: three schedules beside one process")
    ranks(programs.several, [("1F1B", 4, 1), ("weights later", 4, 1), ("all, then back", 3, 2)], n_ranks=n_ranks)


@pytest.mark.time_limit(30)
def test_run_schedule_in_groups(ranks):
    case("4 ranks in two groups, (0, 2) and (1, 3), each a pipeline of its own")
    ranks(programs.in_subgroups, n_ranks=4)


@pytest.mark.time_limit(30)
def test_run_schedule_leaves_ignored_targets_out(ranks):
    case("2 ranks, 4 micro-batches, some of whose targets are -100")
    ranks(programs.ignored_targets, n_ranks=2)


@pytest.mark.time_limit(30)
def test_run_schedule_of_numbers_and_of_a_shared_table(ranks):
    case("3 ranks: float inputs and targets; then a table that the first and the last stage share")
    ranks(programs.numbers_and_tables, n_ranks=3)


@oracle
@pytest.mark.time_limit(60)
def test_run_schedule_equals_pytorch(ranks):
    case("2 ranks, beside three schedules of torch.distributed.pipelining")
    ranks(programs.beside_pytorch, n_ranks=2)


@pytest.mark.time_limit(30)
@pytest.mark.parametrize(("kind", "n", "m", "v"), [("1F1B", 3, 6, 1), ("all, then back", 2, 4, 2)])
def test_run_schedule_sends_one_message_a_border(ranks, kind, n, m, v):
    case(f"{many(n, 'rank')}, {many(v, 'chunk')}, {many(m, 'micro-batch')}, {kind}: what each rank sends")
    result = ranks(programs.counted, kind, m, v, n_ranks=n)
    size, n_virtual = 2 * 4 * programs.WIDTH * 8, n * v
    for rank, ledger in enumerate(result.ledgers):
        sent = [(r.to, r.n_bytes) for r in ledger.records if r.op in ("isend", "send")]
        found = Counter(f"messages of {n_bytes} bytes from rank {rank} to rank {to}" for to, n_bytes in sent)
        wanted: Counter = Counter()
        for g in range(rank, n_virtual, n):
            for to in (g + 1, g - 1):
                if 0 <= to < n_virtual and to % n != rank:
                    wanted[f"messages of {size} bytes from rank {rank} to rank {to % n}"] += m
        expect_equal(dict(found), dict(wanted), name="", read="the contract, under Cost")


@pytest.mark.time_limit(30)
def test_run_schedule_holds_no_outputs(ranks):
    case("2 ranks, 12 micro-batches, 1F1B: outputs of a stage in memory at once")
    result = ranks(programs.counted, "1F1B", 12, 1, n_ranks=2)
    for rank, alive in enumerate(result.values):
        case(f"2 ranks, 12 micro-batches, 1F1B: outputs of the stage on rank {rank} in memory at once")
        allowed = 2 - rank + 4  # in flight, and messages on their way
        problem = (
            f"{alive[0]} outputs were alive at once, though at most {2 - rank} micro-batches wait for their backward"
        )
        expect_true(alive[0] <= allowed, problem, answer=alive[0], read=RUN)


@pytest.mark.time_limit(30)
@pytest.mark.parametrize(
    ("n", "cases"), [(2, [("1F1B", 4, 1), ("all, then back", 4, 2), ("weights later", 4, 1)]), (3, [("1F1B", 5, 1)])]
)
def test_run_schedule_never_deadlocks(ranks, n, cases):
    case(f"{many(n, 'rank')}: a send returns when the receiver has taken the message")
    ranks(programs.without_buffers, cases, n_ranks=n)


@pytest.mark.time_limit(30)
def test_run_schedule_refuses_bad_schedules(ranks):
    case("2 ranks: schedules that the contract refuses, each on one rank only")
    result = ranks(programs.bad_schedules, n_ranks=2)
    expect_equal(
        sum(result.values), 0, name="forwards and backwards before the ValueError", read="the contract, under Raises"
    )


@pytest.mark.time_limit(30)
@pytest.mark.parametrize(("where", "in_backward"), [(1, False), (0, True)])
def test_run_schedule_ends_all_ranks(ranks, where, in_backward):
    case(f"3 ranks, 1F1B; rank {where} raises in {'backward' if in_backward else 'forward'} of micro-batch 1")
    ranks(programs.failing, where, in_backward, n_ranks=3)
