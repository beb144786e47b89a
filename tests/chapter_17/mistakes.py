"""What goes wrong when people build pipelines."""

import itertools
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lib.given.parallel.mail import Mail, Message
from lib.given.parallel.pipeline import Action, MeanLoss, Plan, Work, check_plans
from lib.given.parallel.recompute import Enough, keep_in_graph
from lib.workbook.grading import graded, mistake
from solutions import pipeline as reference

pipeline = graded("pipeline")

# ---- 17.1 partition_layers -------------------------------------------------------------------------------------------


def ranges(starts, n):
    return [range(i, j) for i, j in itertools.pairwise([*starts, n])]


@mistake("partition_layers", "equally many layers on each stage: their costs are not looked at")
def by_number(costs, n_stages):
    reference.partition_layers(costs, n_stages)
    return ranges([len(costs) * s // n_stages for s in range(n_stages)], len(costs))


@mistake(
    "partition_layers", "each stage is filled up to the mean cost, from the first on: greedy, and not the best cut"
)
def greedy(costs, n_stages):
    reference.partition_layers(costs, n_stages)
    starts, held, mean = [0], 0, sum(costs) / n_stages
    for i, cost in enumerate(costs):
        left = n_stages - len(starts)
        if i > starts[-1] and left and (held + cost > mean or len(costs) - i <= left):
            starts.append(i)
            held = 0
        held += cost
    return ranges(starts, len(costs))


@mistake(
    "partition_layers",
    "stages are filled to the limit from the first on; of equally good cuts the contract asks for the earliest starts",
)
def filled(costs, n_stages):
    best = max(sum(costs[i] for i in r) for r in reference.partition_layers(costs, n_stages))
    starts, held = [0], 0
    for i, cost in enumerate(costs):
        left = n_stages - len(starts)
        if i > starts[-1] and left and (held + cost > best or len(costs) - i <= left):
            starts.append(i)
            held = 0
        held += cost
    return ranges(starts, len(costs))


@mistake("partition_layers", "the smallest sum of squares is another aim: here only the most expensive stage counts")
def squares(costs, n_stages):
    reference.partition_layers(costs, n_stages)
    if len(costs) > 20:
        return by_number(costs, n_stages)
    cuts = [[0, *cut] for cut in itertools.combinations(range(1, len(costs)), n_stages - 1)]
    return ranges(
        min(cuts, key=lambda cut: sum(sum(costs[i] for i in r) ** 2 for r in ranges(cut, len(costs)))), len(costs)
    )


@mistake("partition_layers", "too few layers for the stages are no error here: a stage stays empty")
def empty_stages(costs, n_stages):
    if n_stages <= len(costs):
        return reference.partition_layers(costs, n_stages)
    return [range(min(s, len(costs)), min(s + 1, len(costs))) for s in range(max(n_stages, 0))]


@mistake(
    "partition_layers",
    "the layers after the first stage are cut as well as they can be by themselves; they need only stay below the largest stage of all",
)
def best_rests(costs, n_stages):
    reference.partition_layers(costs, n_stages)

    @cache
    def cut(first, n):
        if n == 1:
            return sum(costs[first:]), (first,)
        found = []
        for i in range(first + 1, len(costs) - n + 2):
            largest, starts = cut(i, n - 1)
            found.append((max(sum(costs[first:i]), largest), (first, *starts)))
        return min(found)

    return ranges(cut(0, n_stages)[1], len(costs))


@mistake(
    "partition_layers",
    "the layers before the last stage are cut as well as they can be by themselves; they need only stay below the largest stage of all",
)
def best_beginnings(costs, n_stages):
    reference.partition_layers(costs, n_stages)
    before = list(itertools.accumulate((float(c) for c in costs), initial=0.0))

    @cache
    def cut(n, end):
        if n == 1:
            return before[end], (0,)
        found = []
        for first in range(n - 1, end):
            largest, starts = cut(n - 1, first)
            found.append((max(largest, before[end] - before[first]), first, (*starts, first)))
        largest, _, starts = min(found)
        return largest, starts

    return ranges(cut(n_stages, len(costs))[1], len(costs))


@mistake("partition_layers", "the stages are pairs of first layer and end; the contract asks for a range each")
def pairs_of_ends(costs, n_stages):
    return [(r.start, r.stop) for r in reference.partition_layers(costs, n_stages)]


@mistake("partition_layers", "the costs are rounded down to whole numbers, though they may be seconds")
def whole_costs(costs, n_stages):
    return reference.partition_layers([int(cost) for cost in costs], n_stages)


@mistake("partition_layers", "stages may be empty where that costs no more: each needs at least one layer")
def empty_where_cheap(costs, n_stages):
    best = max(sum(costs[i] for i in r) for r in reference.partition_layers(costs, n_stages))
    found, end = [len(costs)], len(costs)
    for k in reversed(range(n_stages)):
        end = 0 if not k else next(j for j in range(end + 1) if sum(costs[j:end]) <= best)
        found.insert(0, end)
    return [range(i, j) for i, j in itertools.pairwise(found)]


@mistake("partition_layers", "the error does not name both numbers, those of the layers and of the stages")
def one_number_only(costs, n_stages):
    if not 1 <= n_stages <= len(costs):
        raise ValueError("there are too few layers for the stages")
    return reference.partition_layers(costs, n_stages)


@mistake("partition_layers", "n_stages below 1 is not refused, although no list of stages can hold the layers then")
def stages_below_one(costs, n_stages):
    return reference.partition_layers(costs, n_stages) if n_stages > 0 else []


@mistake("partition_layers", "n_stages = 0 is refused and negative numbers of stages are not")
def only_zero_stages(costs, n_stages):
    return reference.partition_layers(costs, n_stages) if n_stages >= 0 else []


# ---- 17.2 gpipe_schedule ---------------------------------------------------------------------------------------------


@mistake(
    "gpipe_schedule",
    "the backwards descend, as in the paper's figure; the contract asks for ascending ones, whose gradients add up in order",
)
def gpipe_reversed(stage, n_stages, n_micro):
    return [Action("F", m) for m in range(n_micro)] + [Action("B", m) for m in reversed(range(n_micro))]


@mistake(
    "gpipe_schedule",
    "each forward is followed by its backward: with several stages they would work one after the other",
)
def gpipe_one_by_one(stage, n_stages, n_micro):
    return [Action(kind, m) for m in range(n_micro) for kind in "FB"]


@mistake("gpipe_schedule", "this is 1F1B: backwards begin before all forwards are done")
def gpipe_eager(stage, n_stages, n_micro):
    return reference.one_f_one_b_schedule(stage, n_stages, n_micro)


@mistake(
    "gpipe_schedule", "the gradients of the weights are separate actions, which belong to the zero-bubble schedule only"
)
def gpipe_with_weights(stage, n_stages, n_micro):
    return [Action(kind, m) for kind in "FBW" for m in range(n_micro)]


# ---- 17.3 one_f_one_b_schedule ---------------------------------------------------------------------------------------


def alternate(forwards, backwards, n_ahead):
    actions = forwards[:n_ahead]
    for n, backward in enumerate(backwards):
        actions += [backward, *forwards[n_ahead + n : n_ahead + n + 1]]
    return actions


def numbered(kind, n_micro):
    return [Action(kind, m) for m in range(n_micro)]


@mistake(
    "one_f_one_b_schedule",
    "a forward too few at the start: n_stages - stage - 1, so that the stage waits before each backward",
)
def one_forward_less(stage, n_stages, n_micro):
    return alternate(numbered("F", n_micro), numbered("B", n_micro), max(1, n_stages - stage - 1))


@mistake(
    "one_f_one_b_schedule",
    "every stage starts with n_stages forwards; later stages need fewer, because their first backward comes sooner",
)
def same_on_all(stage, n_stages, n_micro):
    return alternate(numbered("F", n_micro), numbered("B", n_micro), n_stages)


@mistake(
    "one_f_one_b_schedule",
    "the stages are counted from the wrong end: stage 0 starts with one forward, the last with n_stages",
)
def wrong_end(stage, n_stages, n_micro):
    return alternate(numbered("F", n_micro), numbered("B", n_micro), stage + 1)


@mistake("one_f_one_b_schedule", "a forward before each backward instead of after it: one micro-batch more is kept")
def forward_first(stage, n_stages, n_micro):
    return alternate(numbered("F", n_micro), numbered("B", n_micro), n_stages - stage + 1)


@mistake("one_f_one_b_schedule", "this is GPipe: all forwards come first")
def all_forwards_first(stage, n_stages, n_micro):
    return reference.gpipe_schedule(stage, n_stages, n_micro)


@mistake(
    "one_f_one_b_schedule",
    "it begins with n_stages - stage forwards even if there are fewer micro-batches: some of them do not exist",
)
def more_than_there_are(stage, n_stages, n_micro):
    ahead = n_stages - stage
    return alternate(numbered("F", max(ahead, n_micro)), numbered("B", n_micro), ahead)


@mistake(
    "one_f_one_b_schedule", "with fewer micro-batches than n_stages - stage the list of forwards is read beyond its end"
)
def beyond_the_forwards(stage, n_stages, n_micro):
    forwards = numbered("F", n_micro)
    first = [forwards[m] for m in range(n_stages - stage)]
    return first + alternate(forwards, numbered("B", n_micro), n_stages - stage)[len(first) :]


@mistake("one_f_one_b_schedule", "the backwards that are left at the end are missing")
def no_end(stage, n_stages, n_micro):
    n_turns = max(0, n_micro - (n_stages - stage))
    return alternate(numbered("F", n_micro), numbered("B", n_turns), n_stages - stage)


@mistake(
    "one_f_one_b_schedule",
    "the backwards descend: the stage asks for the gradient of a micro-batch that has not been through it",
)
def backwards_descend(stage, n_stages, n_micro):
    return alternate(numbered("F", n_micro), numbered("B", n_micro)[::-1], n_stages - stage)


@mistake(
    "one_f_one_b_schedule",
    "the newest micro-batch has its backward first, as on a stack; the oldest one's gradient is there first",
)
def newest_first(stage, n_stages, n_micro):
    forwards, actions, waiting = numbered("F", n_micro), [], []
    ahead = n_stages - stage
    for n in range(ahead + n_micro):
        if n >= ahead and waiting:
            actions.append(Action("B", waiting.pop()))
        if n < n_micro:
            actions.append(forwards[n])
            waiting.append(n)
    return actions


# ---- 17.4 interleaved_schedule ---------------------------------------------------------------------------------------


def interleaved(stage, n_stages, n_micro, n_chunks, forward_chunks=None, backward_chunks=None, ahead=0, per_round=None):
    reference.interleaved_schedule(stage, n_stages, n_micro, n_chunks)
    size = per_round or n_stages
    rounds = [range(first, min(first + size, n_micro)) for first in range(0, n_micro, size)]
    up, down = forward_chunks or range(n_chunks), backward_chunks or range(n_chunks)[::-1]
    forwards = [Action("F", m, c) for r in rounds for c in up for m in r]
    backwards = [Action("B", m, c) for r in rounds for c in down for m in r]
    return alternate(
        forwards, backwards, min(n_chunks, 2) * (n_stages - stage - 1) + (n_chunks - 1) * n_stages + 1 + ahead
    )


@mistake(
    "interleaved_schedule",
    "backwards go from the first chunk to the last; they must come back from the last to the first",
)
def chunks_forward(stage, n_stages, n_micro, n_chunks):
    return interleaved(stage, n_stages, n_micro, n_chunks, backward_chunks=list(range(n_chunks)))


@mistake(
    "interleaved_schedule",
    "all micro-batches go through a chunk before the next chunk begins; a round has only n_stages of them",
)
def all_micro_batches(stage, n_stages, n_micro, n_chunks):
    reference.interleaved_schedule(stage, n_stages, n_micro, n_chunks)
    found = interleaved(stage, n_stages, n_micro, n_chunks, per_round=n_micro)
    n_ahead = min(n_chunks, 2) * (n_stages - stage - 1) + (n_chunks - 1) * n_micro + 1
    forwards, backwards = ([a for a in found if a.kind == kind] for kind in "FB")
    return alternate(forwards, backwards, n_ahead)


@mistake(
    "interleaved_schedule",
    "it begins with n_stages - stage - 1 forwards besides the rounds, as 1F1B; here it takes twice as many",
)
def too_few_ahead(stage, n_stages, n_micro, n_chunks):
    return interleaved(stage, n_stages, n_micro, n_chunks, ahead=-(min(n_chunks, 2) - 1) * (n_stages - stage - 1))


@mistake(
    "interleaved_schedule",
    "the forwards at the start are counted as in Megatron's code, where one more follows before the first backward",
)
def without_one_more(stage, n_stages, n_micro, n_chunks):
    return interleaved(stage, n_stages, n_micro, n_chunks, ahead=-(min(n_chunks, 2) - 1))


@mistake("interleaved_schedule", "all forwards come first, as in GPipe")
def interleaved_gpipe(stage, n_stages, n_micro, n_chunks):
    return interleaved(stage, n_stages, n_micro, n_chunks, ahead=n_micro * n_chunks)


@mistake("interleaved_schedule", "micro-batches that are no multiple of the stages are not refused")
def any_number(stage, n_stages, n_micro, n_chunks):
    whole = -(-n_micro // n_stages) * n_stages
    return [a for a in reference.interleaved_schedule(stage, n_stages, whole, n_chunks) if a.micro_batch < n_micro]


def reordered(stage, n_stages, n_micro, n_chunks, forwards, backwards, n_ahead=None):
    """Other lists of forwards and backwards, alternating as in the reference."""
    reference.interleaved_schedule(stage, n_stages, n_micro, n_chunks)
    right = min(n_chunks, 2) * (n_stages - stage - 1) + (n_chunks - 1) * n_stages + 1
    return alternate(forwards, backwards, right if n_ahead is None else n_ahead)


def in_rounds(kind, n_stages, n_micro, n_chunks):
    """The actions of one kind in the reference's order."""
    return [a for a in reference.interleaved_schedule(0, n_stages, n_micro, n_chunks) if a.kind == kind]


@mistake(
    "interleaved_schedule",
    "with one chunk, too, it begins with 2 (n_stages - stage - 1) + 1 forwards; one chunk is plain 1F1B",
)
def no_exception(stage, n_stages, n_micro, n_chunks):
    return interleaved(stage, n_stages, n_micro, n_chunks, ahead=max(0, 2 - n_chunks) * (n_stages - stage - 1))


@mistake(
    "interleaved_schedule",
    "(n_chunks - 1) n_stages is taken for n_chunks n_stages: a round of forwards too many at the start",
)
def round_too_many(stage, n_stages, n_micro, n_chunks):
    return interleaved(stage, n_stages, n_micro, n_chunks, ahead=n_stages)


@mistake("interleaved_schedule", "the stages are counted from the wrong end: stage 0 begins with the fewest forwards")
def interleaved_wrong_end(stage, n_stages, n_micro, n_chunks):
    return interleaved(stage, n_stages, n_micro, n_chunks, ahead=min(n_chunks, 2) * (2 * stage - n_stages + 1))


@mistake(
    "interleaved_schedule", "the micro-batches of a round have their backwards in descending order; both kinds ascend"
)
def descending_in_a_round(stage, n_stages, n_micro, n_chunks):
    reference.interleaved_schedule(stage, n_stages, n_micro, n_chunks)
    firsts = range(0, n_micro, n_stages)
    backwards = [Action("B", f + i, c) for f in firsts for c in range(n_chunks)[::-1] for i in range(n_stages)[::-1]]
    return reordered(stage, n_stages, n_micro, n_chunks, in_rounds("F", n_stages, n_micro, n_chunks), backwards)


@mistake("interleaved_schedule", "the last round has its backwards first; they come in the rounds of the forwards")
def last_round_first(stage, n_stages, n_micro, n_chunks):
    reference.interleaved_schedule(stage, n_stages, n_micro, n_chunks)
    firsts = range(0, n_micro, n_stages)[::-1]
    backwards = [Action("B", f + i, c) for f in firsts for c in range(n_chunks)[::-1] for i in range(n_stages)]
    return reordered(stage, n_stages, n_micro, n_chunks, in_rounds("F", n_stages, n_micro, n_chunks), backwards)


@mistake(
    "interleaved_schedule",
    "a micro-batch goes through all chunks before the next one begins: the two loops of a round are exchanged",
)
def loops_exchanged(stage, n_stages, n_micro, n_chunks):
    forwards = [Action("F", m, c) for m in range(n_micro) for c in range(n_chunks)]
    backwards = [Action("B", m, c) for m in range(n_micro) for c in range(n_chunks)[::-1]]
    return reordered(stage, n_stages, n_micro, n_chunks, forwards, backwards)


@mistake(
    "interleaved_schedule",
    "an action has the number of its layer group, c * n_stages + s; it should have the chunk's, c",
)
def groups_for_chunks(stage, n_stages, n_micro, n_chunks):
    right = reference.interleaved_schedule(stage, n_stages, n_micro, n_chunks)
    return [Action(a.kind, a.micro_batch, a.chunk * n_stages + stage) for a in right]


@mistake("interleaved_schedule", "a round has n_chunks micro-batches; it should have n_stages of them")
def rounds_of_chunks(stage, n_stages, n_micro, n_chunks):
    return interleaved(stage, n_stages, n_micro, n_chunks, per_round=n_chunks)


@mistake(
    "interleaved_schedule",
    "n_micro has to be a multiple of n_chunks, too; the contract asks for a multiple of n_stages only",
)
def multiple_of_both(stage, n_stages, n_micro, n_chunks):
    if n_micro % n_chunks:
        raise ValueError(f"n_micro = {n_micro} must be a multiple of n_chunks = {n_chunks} and n_stages = {n_stages}")
    return reference.interleaved_schedule(stage, n_stages, n_micro, n_chunks)


@mistake(
    "interleaved_schedule",
    "only fewer micro-batches than stages are refused, not every number that is no multiple of them",
)
def only_fewer(stage, n_stages, n_micro, n_chunks):
    if n_micro < n_stages:
        raise ValueError(f"n_micro = {n_micro} is below n_stages = {n_stages}")
    return any_number(stage, n_stages, n_micro, n_chunks)


@mistake("interleaved_schedule", "the error does not name both numbers, those of the micro-batches and of the stages")
def interleaved_nameless(stage, n_stages, n_micro, n_chunks):
    if n_micro % n_stages:
        raise ValueError("the micro-batches must be a multiple of the stages")
    return reference.interleaved_schedule(stage, n_stages, n_micro, n_chunks)


@mistake("interleaved_schedule", "the last + 1 of the forwards at the start is missing, with one chunk, too")
def one_less_in_any_case(stage, n_stages, n_micro, n_chunks):
    return interleaved(stage, n_stages, n_micro, n_chunks, ahead=-1)


# ---- 17.5 zero_bubble_schedule ---------------------------------------------------------------------------------------


def with_weights(stage, n_stages, n_micro, late):
    actions = []
    for action in reference.one_f_one_b_schedule(stage, n_stages, n_micro):
        actions.append(action)
        if action.kind == "B" and action.micro_batch >= late:
            actions.append(Action("W", action.micro_batch - late))
    return actions + [Action("W", m) for m in range(max(0, n_micro - late), n_micro)]


@mistake(
    "zero_bubble_schedule",
    "each W follows its own B: that is 1F1B in three actions, and nothing fills the bubble at the end",
)
def weights_at_once(stage, n_stages, n_micro):
    return with_weights(stage, n_stages, n_micro, 0)


@mistake("zero_bubble_schedule", "all W come at the end: the bubble is filled, but every micro-batch waits for its W")
def weights_at_the_end(stage, n_stages, n_micro):
    return with_weights(stage, n_stages, n_micro, n_micro)


@mistake(
    "zero_bubble_schedule",
    "W is late by n_stages - 1 - stage micro-batches: the first stage puts most off, and it should be the last",
)
def late_at_the_first(stage, n_stages, n_micro):
    return with_weights(stage, n_stages, n_micro, n_stages - 1 - stage)


@mistake(
    "zero_bubble_schedule",
    "every stage puts its W off by n_stages - 1 micro-batches; stage s may put off s, or it keeps too many",
)
def equally_late(stage, n_stages, n_micro):
    return with_weights(stage, n_stages, n_micro, n_stages - 1)


@mistake("zero_bubble_schedule", "W is late by one micro-batch too many: stage + 1 instead of stage")
def one_too_late(stage, n_stages, n_micro):
    return with_weights(stage, n_stages, n_micro, stage + 1)


@mistake(
    "zero_bubble_schedule",
    "the W that are left at the end are missing: some micro-batches give the weights no gradient",
)
def no_rest(stage, n_stages, n_micro):
    found = reference.zero_bubble_schedule(stage, n_stages, n_micro)
    return found[: len(found) - min(stage, n_micro)]


@mistake("zero_bubble_schedule", "the W that are left at the end descend; they come in ascending order as well")
def rest_descends(stage, n_stages, n_micro):
    found, n = reference.zero_bubble_schedule(stage, n_stages, n_micro), min(stage, n_micro)
    return found[: len(found) - n] + found[len(found) - n :][::-1]


@mistake(
    "zero_bubble_schedule",
    "W comes right before the B that it should follow, so the stage before waits longer for its gradient",
)
def weights_before(stage, n_stages, n_micro):
    found = reference.zero_bubble_schedule(stage, n_stages, n_micro)
    for n in range(1, len(found)):
        b, w = found[n - 1 : n + 1]
        if b.kind == "B" and w.kind == "W" and w.micro_batch == b.micro_batch - stage:
            found[n - 1 : n + 1] = w, b
    return found


@mistake("zero_bubble_schedule", "W waits until the forward after the B is done; it comes right after the B")
def weights_after_forward(stage, n_stages, n_micro):
    found = reference.zero_bubble_schedule(stage, n_stages, n_micro)
    for n in range(1, len(found)):
        if (found[n - 1].kind, found[n].kind) == ("W", "F"):
            found[n - 1 : n + 1] = found[n], found[n - 1]
    return found


@mistake(
    "zero_bubble_schedule",
    "with fewer micro-batches than `stage`, W of micro-batches below 0 are among those at the end",
)
def rest_below_zero(stage, n_stages, n_micro):
    extra = [Action("W", m) for m in range(min(0, n_micro - stage), 0)]
    found, n = reference.zero_bubble_schedule(stage, n_stages, n_micro), min(stage, n_micro)
    return found[: len(found) - n] + extra + found[len(found) - n :]


@mistake(
    "zero_bubble_schedule",
    "the first B of a stage, too, are followed by a W: of micro-batch m - stage, which is below 0",
)
def weights_below_zero(stage, n_stages, n_micro):
    found = []
    for action in reference.zero_bubble_schedule(stage, n_stages, n_micro):
        found.append(action)
        if action.kind == "B" and action.micro_batch < stage:
            found.append(Action("W", action.micro_batch - stage))
    return found


# ---- 17.6 simulate ---------------------------------------------------------------------------------------------------


def simulated(schedules, durations, needs, name_first=True, sort=True, free_at=None):
    """The reference's loop with other rules: ``needs(kind, group, micro_batch, n_groups)``."""
    n = len(schedules)
    per_stage = [durations] * n if isinstance(durations, Mapping) else list(durations)
    n_groups = n * (1 + max((a.chunk for actions in schedules for a in actions), default=0))
    todo, free, ends, works = [deque(actions) for actions in schedules], [0.0] * n, {}, []
    while any(todo):
        before = len(works)
        for stage, queue in enumerate(todo):
            while queue:
                a = queue[0]
                event = a.kind, a.chunk * n + stage, a.micro_batch
                wanted = needs(*event, n_groups)
                if not all(need in ends for need in wanted):
                    break
                start = max([free[stage], *(ends[need] for need in wanted)])
                ends[event] = start + per_stage[stage][a.kind]
                free[stage] = ends[event] if free_at is None else free_at(start, ends[event], a)
                works.append(Work(stage, a.micro_batch, a.kind, start, ends[event], a.chunk))
                queue.popleft()
        if len(works) == before:
            if name_first:
                reference.simulate(schedules, durations)
            raise ValueError("the schedule can never go on")
    return sorted(works, key=lambda w: (w.start, w.stage)) if sort else works


def right_needs(kind, group, m, n_groups):
    return reference._needs(kind, group, m, n_groups)


@mistake("simulate", "the backward of a stage waits for W on the next one; it needs only B from there")
def waits_for_weights(schedules, durations):
    has = {
        (a.chunk * len(schedules) + s, a.micro_batch)
        for s, actions in enumerate(schedules)
        for a in actions
        if a.kind == "W"
    }

    def needs(kind, group, m, n_groups):
        found = right_needs(kind, group, m, n_groups)
        return [("W", g, i) if k == "B" and kind == "B" and (g, i) in has else (k, g, i) for k, g, i in found]

    return simulated(schedules, durations, needs)


@mistake("simulate", "the backward does not wait for the backward on the next stage")
def backward_alone(schedules, durations):
    return simulated(schedules, durations, lambda k, g, m, n: right_needs(k, g, m, n)[:1])


@mistake("simulate", "the forward does not wait for the forward on the stage before")
def forward_alone(schedules, durations):
    return simulated(schedules, durations, lambda k, g, m, n: [] if k == "F" else right_needs(k, g, m, n))


@mistake("simulate", "the chunks do not wait for each other: the first stage's chunk 1 needs the last stage's chunk 0")
def chunks_apart(schedules, durations):
    n = len(schedules)

    def needs(kind, group, m, n_groups):
        return [need for need in right_needs(kind, group, m, n_groups) if need[1] // n == group // n]

    return simulated(schedules, durations, needs)


@mistake(
    "simulate",
    "a stage's chunks are taken for neighbours; chunk c of stage s is layer group c * R + s, so the stages alternate",
)
def neighbours(schedules, durations):
    n = len(schedules)
    v = 1 + max((a.chunk for actions in schedules for a in actions), default=0)

    def group_of(place):  # place c * n + s is group s * v + c here
        return (place % n) * v + place // n

    place_of = {group_of(place): place for place in range(n * v)}

    def needs(kind, place, m, n_groups):
        return [(k, place_of[g], i) for k, g, i in right_needs(kind, group_of(place), m, n_groups)]

    return simulated(schedules, durations, needs)


@mistake("simulate", "an action starts when its input is there, even if the stage is still at work")
def stage_never_busy(schedules, durations):
    return simulated(schedules, durations, right_needs, free_at=lambda start, end, a: 0.0)


@mistake("simulate", "all stages take the first stage's durations")
def first_durations(schedules, durations):
    return reference.simulate(schedules, durations if isinstance(durations, Mapping) else durations[0])


@mistake("simulate", "the works are listed as they were found, not by their start")
def not_sorted(schedules, durations):
    return simulated(schedules, durations, right_needs, sort=False)


@mistake("simulate", "the error does not name the action that is stuck and what it waits for")
def nameless(schedules, durations):
    return simulated(schedules, durations, right_needs, name_first=False)


@mistake("simulate", "what can never go on is left out silently instead of being refused")
def stops_silently(schedules, durations):
    try:
        return reference.simulate(schedules, durations)
    except ValueError:
        return []


@mistake("simulate", "the backward does not wait for the forward of its own stage")
def not_its_forward(schedules, durations):
    return simulated(
        schedules, durations, lambda k, g, m, n: [x for x in right_needs(k, g, m, n) if (k, x[0]) != ("B", "F")]
    )


@mistake("simulate", "W does not wait for its B")
def weights_alone(schedules, durations):
    return simulated(schedules, durations, lambda k, g, m, n: [] if k == "W" else right_needs(k, g, m, n))


@mistake("simulate", "an action starts as soon as its stage is free, although what it needs ends later")
def starts_when_free(schedules, durations):
    free, works = [0.0] * len(schedules), []
    for w in simulated(schedules, durations, right_needs, sort=False):
        end = free[w.stage] + w.end - w.start
        works.append(Work(w.stage, w.micro_batch, w.kind, free[w.stage], end, w.chunk))
        free[w.stage] = end
    return sorted(works, key=lambda w: (w.start, w.stage))


@mistake("simulate", "the works are in the order of their stages; the contract asks for their start first")
def by_stage(schedules, durations):
    return sorted(reference.simulate(schedules, durations), key=lambda w: (w.stage, w.start))


@mistake("simulate", "the works are in the order of their ends; the contract asks for their start")
def by_end(schedules, durations):
    return sorted(reference.simulate(schedules, durations), key=lambda w: (w.end, w.stage))


@mistake("simulate", "works that start together are not in the order of their stages")
def by_micro_batch(schedules, durations):
    return sorted(reference.simulate(schedules, durations), key=lambda w: (w.start, w.micro_batch, w.stage))


def told_otherwise(change):
    """``simulate`` whose error has another text: ``change(text, schedules)``."""

    def run(schedules, durations):
        try:
            return reference.simulate(schedules, durations)
        except ValueError as error:
            raise ValueError(change(str(error), schedules)) from None

    return run


@mistake("simulate", "the error does not say what the stuck action waits for")
def reason_unsaid(schedules, durations):
    return told_otherwise(lambda text, _: text.partition(", which waits for")[0])(schedules, durations)


@mistake("simulate", "the chunk of what is awaited is missing from the error: it is always chunk 0")
def chunk_unsaid(schedules, durations):
    def change(text, _):
        stuck, waits, need = text.partition(", which waits for")
        words = need.split()
        words[words.index("chunk") + 1] = "0"
        return stuck + waits + " " + " ".join(words)

    return told_otherwise(change)(schedules, durations)


@mistake("simulate", "the error names the layer group of what is awaited as its stage; the stage is the group modulo R")
def group_for_stage(schedules, durations):
    def change(text, lists):
        words = text.split()
        words[-1] = str(int(words[-1]) + len(lists) * int(words[-4]))
        return " ".join(words)

    return told_otherwise(change)(schedules, durations)


@mistake(
    "simulate",
    "after the last layer group the first one follows: its backward waits for one that never comes before it",
)
def groups_in_a_ring(schedules, durations):
    plain = reference._needs

    def needs(kind, group, m, n_groups):
        return [*plain(kind, group, m, n_groups), *([("B", 0, m)] if kind == "B" and group == n_groups - 1 else [])]

    with mock.patch.object(reference, "_needs", needs):
        return reference.simulate(schedules, durations)


@mistake(
    "simulate",
    "a stage takes whatever can start; it has to run its list in order, and waits where the next action cannot start",
)
def out_of_order(schedules, durations):
    n = len(schedules)
    per_stage = [durations] * n if isinstance(durations, Mapping) else list(durations)
    n_groups = n * (1 + max((a.chunk for actions in schedules for a in actions), default=0))
    todo, free, ends, works = [list(actions) for actions in schedules], [0.0] * n, {}, []
    while any(todo):
        n_done = len(works)
        for stage, left in enumerate(todo):
            for a in left:
                event = a.kind, a.chunk * n + stage, a.micro_batch
                wanted = right_needs(*event, n_groups)
                if all(need in ends for need in wanted):
                    start = max([free[stage], *(ends[need] for need in wanted)])
                    ends[event] = free[stage] = start + per_stage[stage][a.kind]
                    works.append(Work(stage, a.micro_batch, a.kind, start, free[stage], a.chunk))
                    left.remove(a)
                    break
        if len(works) == n_done:
            return reference.simulate(schedules, durations)
    return sorted(works, key=lambda w: (w.start, w.stage))


@mistake("simulate", "the chunk is missing from the works: all of them have chunk 0")
def chunkless(schedules, durations):
    found = reference.simulate(schedules, durations)
    return [Work(w.stage, w.micro_batch, w.kind, w.start, w.end) for w in found]


@mistake("simulate", "`end` is the duration of the work, not the time at which it ends")
def durations_as_ends(schedules, durations):
    found = reference.simulate(schedules, durations)
    of_stage = [durations] * len(schedules) if isinstance(durations, Mapping) else durations
    return [Work(w.stage, w.micro_batch, w.kind, w.start, of_stage[w.stage][w.kind], w.chunk) for w in found]


@mistake("simulate", "only a dict is taken for one mapping for all stages: other mappings are read as a sequence")
def dicts_only(schedules, durations):
    alike = isinstance(durations, Mapping) and not isinstance(durations, dict)
    return reference.simulate(schedules, [durations[s] for s in range(len(schedules))] if alike else durations)


@mistake("simulate", "only a list is taken for one mapping for each stage: a tuple of them is read as one mapping")
def lists_only(schedules, durations):
    if isinstance(durations, tuple):
        return reference.simulate(schedules, [{kind: durations[kind] for kind in "FBW"}] * len(schedules))
    return reference.simulate(schedules, durations)


@mistake("simulate", "without any action there is no largest chunk: `max` of nothing raises an error")
def max_of_nothing(schedules, durations):
    max(a.chunk for actions in schedules for a in actions)
    return reference.simulate(schedules, durations)


@mistake("simulate", "the chunks are counted on the first stage only, and not on all stages")
def chunks_of_the_first(schedules, durations):
    n_groups = len(schedules) * (1 + max((a.chunk for a in schedules[0]), default=0))

    def needs(kind, group, m, _):
        return right_needs(kind, group, m, n_groups)

    return simulated(schedules, durations, needs)


@mistake("simulate", "the error names the first stage that is stuck, not the one that has waited longest")
def first_stuck(schedules, durations):
    with mock.patch.object(reference, "min", lambda stuck, key: next(iter(stuck)), create=True):
        return reference.simulate(schedules, durations)


@mistake("simulate", "the error names the last stage that is stuck, not the one that has waited longest")
def last_stuck(schedules, durations):
    with mock.patch.object(reference, "min", lambda stuck, key: [*stuck][-1], create=True):
        return reference.simulate(schedules, durations)


@mistake("simulate", "the error says that the awaited action is on the stuck stage, wherever it is")
def own_stage_named(schedules, durations):
    def change(text, _):
        words = text.split()
        return " ".join([*words[:-1], words[1]])

    return told_otherwise(change)(schedules, durations)


@mistake(
    "simulate",
    "there are as many layer groups as stages: chunks are not counted, and later groups' actions need nothing",
)
def groups_of_one_chunk(schedules, durations):
    return simulated(schedules, durations, lambda k, g, m, n: right_needs(k, g, m, len(schedules)))


@mistake("simulate", "the error names the stage that has waited shortest; the one that has waited longest is asked for")
def shortest_wait(schedules, durations):
    with mock.patch.object(reference, "min", max, create=True):
        return reference.simulate(schedules, durations)


# ---- 17.7 checkpoint -------------------------------------------------------------------------------------------------


class _Again(torch.autograd.Function):
    """An older way to do it: an autograd function that runs forward without a graph, and again in backward."""

    @staticmethod
    def forward(ctx, function, *args):
        ctx.function, ctx.args = function, args
        ctx.state = torch.get_rng_state()
        return function(*args)

    @staticmethod
    def backward(ctx, *grads):
        args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in ctx.args]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            out = ctx.function(*args)
        outs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outs, grads)
        return None, *(a.grad if isinstance(a, Tensor) else None for a in args)


@mistake(
    "checkpoint", "an autograd function is used: where no argument needs a gradient, the parameters get none either"
)
def by_function(function, *args):
    return _Again.apply(function, *args)


def checkpointed(
    function,
    args,
    *,
    random=True,
    autocast=True,
    stop=True,
    put_back=True,
    check=True,
    drop_used=True,
    once=False,
    clear=True,
    ended=(Enough,),
    early=0,
    failure=RuntimeError,
    given_of=None,
    grad=torch.enable_grad,
):
    """The reference in one piece, with parts that a mistake leaves out."""
    inputs = keep_in_graph(args)
    if inputs is None:
        return function(*args)
    state, cast = torch.get_rng_state(), (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    n_saved, again = [0], {}

    def drop(tensor):
        n_saved[0] += 1
        return n_saved[0] - 1

    def catch(tensor):
        again[len(again)] = tensor.detach()
        if stop and len(again) == n_saved[0] - early:
            raise Enough
        return tensor.detach()

    def run_again():
        if clear:
            again.clear()
        given = inputs() if given_of is None else given_of(inputs)
        now = torch.get_rng_state()
        if random:
            torch.set_rng_state(state)
        try:
            cast_again = torch.autocast("cpu", enabled=cast[0] and autocast, dtype=cast[1])
            with cast_again, grad(), saved_tensors_hooks(catch, lambda t: t):
                function(*given)
        except ended:
            pass
        finally:
            if put_back:
                torch.set_rng_state(now)
        if check and len(again) < n_saved[0]:
            raise failure(f"{n_saved[0]} tensors were saved first, {len(again)} again")

    def restore(index):
        if not again if once else index not in again:
            run_again()
        return again.pop(index) if drop_used else again[index]

    with saved_tensors_hooks(drop, restore):
        return function(*args)


@mistake("checkpoint", "what the second run computed is kept to the end of backward: pop each tensor when it is used")
def keeps_used(function, *args):
    return checkpointed(function, args, drop_used=False)


@mistake(
    "checkpoint",
    "the function runs again only when nothing is left of the last run: a tensor that was used already is missing",
)
def again_when_empty(function, *args):
    return checkpointed(function, args, once=True)


@mistake("checkpoint", "the second run draws other random numbers: another dropout mask than in forward")
def other_numbers(function, *args):
    return checkpointed(function, args, random=False, put_back=False)


@mistake(
    "checkpoint",
    "the random state is not put back after the second run, so that backward changes the numbers drawn afterwards",
)
def not_put_back(function, *args):
    return checkpointed(function, args, put_back=False)


@mistake("checkpoint", "autocast is off in the second run: float32 is computed where forward computed bf16")
def autocast_off(function, *args):
    return checkpointed(function, args, autocast=False)


@mistake(
    "checkpoint",
    "the arguments are kept outside of the graph, so that an enclosing checkpoint cannot drop them, and nobody can count them",
)
def kept_outside(function, *args):
    if not torch.is_grad_enabled():
        return function(*args)
    return _outside(function, args)


def _outside(function, args):
    state = torch.get_rng_state()
    cast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    n_saved, again = [0], {}

    def drop(tensor):
        n_saved[0] += 1
        return n_saved[0] - 1

    def catch(tensor):
        again[len(again)] = tensor.detach()
        if len(again) == n_saved[0]:
            raise Enough
        return tensor.detach()

    def restore(index):
        if index not in again:
            again.clear()
            with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=cast[0], dtype=cast[1]):
                torch.set_rng_state(state)
                try:
                    with torch.enable_grad(), saved_tensors_hooks(catch, lambda t: t):
                        function(*args)
                except Enough:
                    pass
            if len(again) < n_saved[0]:
                raise RuntimeError(f"{n_saved[0]} tensors were saved first, {len(again)} again")
        return again.pop(index)

    with saved_tensors_hooks(drop, restore):
        return function(*args)


@mistake("checkpoint", "nothing is dropped: this is a plain call")
def plain_call(function, *args):
    return function(*args)


@mistake("checkpoint", "the second run goes on to the end, although everything that was saved is there already")
def to_the_end(function, *args):
    return checkpointed(function, args, stop=False)


@mistake(
    "checkpoint",
    "a second run that saves fewer tensors fails with a KeyError; the contract asks for a RuntimeError with both numbers",
)
def no_check(function, *args):
    return checkpointed(function, args, check=False)


@mistake(
    "checkpoint",
    "the tensors are saved again by PyTorch's reentrant checkpoint, which needs an argument with a gradient and cannot be nested in autograd.grad",
)
def reentrant(function, *args):
    return torch_checkpoint(function, *args, use_reentrant=True)


@mistake(
    "checkpoint", "gradients are not enabled in the second run: backward runs without them, so nothing is saved again"
)
def without_gradients(function, *args):
    return checkpointed(function, args, grad=nullcontext)


@mistake("checkpoint", "what is left of the last run is not cleared before the next: its tensors are counted along")
def not_cleared(function, *args):
    return checkpointed(function, args, clear=False)


@mistake("checkpoint", "the exception that ends the second run, `Enough`, is not caught")
def never_caught(function, *args):
    return checkpointed(function, args, ended=())


@mistake("checkpoint", "every exception of the second run is swallowed; only `Enough` may be")
def swallows_all(function, *args):
    return checkpointed(function, args, ended=(BaseException,))


@mistake("checkpoint", "the second run ends a tensor too early: the last one that was saved is missing")
def one_too_early(function, *args):
    return checkpointed(function, args, early=1)


@mistake("checkpoint", "the error is a ValueError; the contract asks for a RuntimeError")
def wrong_kind(function, *args):
    return checkpointed(function, args, failure=ValueError)


@mistake(
    "checkpoint", "the error does not name both numbers of saved tensors, those of the first run and of the second"
)
def numbers_unsaid(function, *args):
    return checkpointed(function, args, failure=lambda text: RuntimeError("the second run saves fewer tensors"))


@mistake(
    "checkpoint",
    "the second run takes `args` itself and not what `keep_in_graph` gives back, so that they are held anyway",
)
def args_held(function, *args):
    return checkpointed(function, args, given_of=lambda inputs: args)


@mistake(
    "checkpoint",
    "the second run gets detached inputs, which require no gradient: it does not save what the first one saved",
)
def detached_inputs(function, *args):
    return checkpointed(
        function, args, given_of=lambda inputs: [a.detach() if isinstance(a, Tensor) else a for a in inputs()]
    )


# ---- 17.8 DeferredLinear ---------------------------------------------------------------------------------------------


@mistake(
    "DeferredLinear", "a plain linear layer: the weights get their gradients in backward, and nothing is left for later"
)
class AtOnce(reference.DeferredLinear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)

    def backward_weights(self):
        return None


@mistake("DeferredLinear", "the newest backward is done first; the contract asks for the oldest")
class Newest(reference.DeferredLinear):
    def backward_weights(self):
        if self.pending:
            self.pending.rotate(1)
        super().backward_weights()


@mistake("DeferredLinear", "all backwards that are pending are done at once; the contract asks for one, the oldest")
class AllPending(reference.DeferredLinear):
    def backward_weights(self):
        super().backward_weights()
        while self.pending:
            super().backward_weights()


@mistake(
    "DeferredLinear", "the weight's gradient is transposed: x^T times the gradient, where nn.Linear keeps [out, in]"
)
class Transposed(reference.DeferredLinear):
    def backward_weights(self):
        if not self.pending:
            raise RuntimeError("no backward is pending")
        x, grad = (t.reshape(-1, t.shape[-1]) for t in self.pending.popleft())
        for p, new in ((self.weight, x.T @ grad), (self.bias, grad.sum(0))):
            if p is not None and p.requires_grad:
                new = new.to(p.dtype)
                p.grad = new.reshape(p.shape) if p.grad is None else p.grad + new.reshape(p.shape)


@mistake("DeferredLinear", "the gradient replaces what is in .grad; it must be added")
class Replaced(reference.DeferredLinear):
    def backward_weights(self):
        if self.pending:
            self.weight.grad = None
            if self.bias is not None:
                self.bias.grad = None
        super().backward_weights()


@mistake("DeferredLinear", "the bias never gets a gradient")
class NoBias(reference.DeferredLinear):
    def backward_weights(self):
        before = None if self.bias is None or self.bias.grad is None else self.bias.grad.clone()
        super().backward_weights()
        if self.bias is not None:
            self.bias.grad = before


@mistake(
    "DeferredLinear", "the parameters are copies: an optimizer of the original layer would never see their gradients"
)
class Copied(reference.DeferredLinear):
    def __init__(self, linear):
        super().__init__(linear)
        self.weight = nn.Parameter(linear.weight.detach().clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())


@mistake(
    "DeferredLinear",
    "the output requires a gradient only if the input does: on the first layer of a model the weights get none",
)
class InputOnly(reference.DeferredLinear):
    def forward(self, x):
        return super().forward(x) if x.requires_grad else super().forward(x).detach()


@mistake("DeferredLinear", "under autocast the layer computes in float32, unlike nn.Linear")
class NoAutocast(reference.DeferredLinear):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class _OnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        ctx.x, ctx.weight, ctx.layer = x, weight, layer
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        ctx.layer.pending.append((ctx.x.detach(), grad))
        return grad @ ctx.weight.to(grad.dtype) if ctx.needs_input_grad[0] else None, None, None, None


@mistake(
    "DeferredLinear",
    "x is an attribute of ctx, not saved with `save_for_backward`: a checkpoint around it cannot drop it",
)
class OnContext(reference.DeferredLinear):
    def forward(self, x):
        return _OnContext.apply(x, self.weight, self.bias, self)


@mistake("DeferredLinear", "what was kept for the weights is never released")
class Held(reference.DeferredLinear):
    def backward_weights(self):
        self.old = [*getattr(self, "old", []), *list(self.pending)[:1]]
        super().backward_weights()


@mistake(
    "DeferredLinear",
    "x is put aside with its history: weight.grad gets a graph, which keeps the gradients of all micro-batches in memory",
)
class Traced(reference.DeferredLinear):
    def forward(self, x):
        self.inputs = [*getattr(self, "inputs", []), x]
        return super().forward(x)

    def backward_weights(self):
        if self.pending:
            self.pending[0] = self.inputs.pop(0), self.pending[0][1]
        super().backward_weights()


def added(layer, weight_part=lambda x, grad: grad.T @ x.to(grad.dtype), bias_part=lambda grad: grad.sum(0), flat=True):
    """The reference's ``backward_weights`` with other gradients."""
    if not layer.pending:
        raise RuntimeError("no backward is pending")
    x, grad = (t.reshape(-1, t.shape[-1]) if flat else t for t in layer.pending.popleft())
    for p, part in ((layer.weight, lambda: weight_part(x, grad)), (layer.bias, lambda: bias_part(grad))):
        if p is not None and p.requires_grad:
            new = part().to(p.dtype)
            p.grad = new if p.grad is None else p.grad.add_(new)


@mistake("DeferredLinear", "x and the gradient are not flattened to two dimensions before they are multiplied")
class NotFlattened(reference.DeferredLinear):
    def backward_weights(self):
        added(self, lambda x, grad: grad.T @ x, flat=False)


@mistake(
    "DeferredLinear", "the gradient of the bias is summed over the features, too, so that all of them get the same"
)
class OneSum(reference.DeferredLinear):
    def backward_weights(self):
        added(self, bias_part=lambda grad: grad.sum().expand(grad.shape[-1]).clone())


@mistake("DeferredLinear", "the gradient of the bias is the mean over the rows; it should be the sum")
class MeanOfRows(reference.DeferredLinear):
    def backward_weights(self):
        added(self, bias_part=lambda grad: grad.mean(0))


@mistake(
    "DeferredLinear",
    "the gradient of the weight is divided by the number of rows; the loss does that where it should be done",
)
class DividedByRows(reference.DeferredLinear):
    def backward_weights(self):
        added(self, lambda x, grad: grad.T @ x.to(grad.dtype) / len(x))


@mistake("DeferredLinear", "a frozen weight or bias gets a gradient; `nn.Linear` would leave it alone")
class FrozenToo(reference.DeferredLinear):
    def backward_weights(self):
        frozen = [p for p in self.parameters() if not p.requires_grad]
        x, grad = self.pending[0] if self.pending else (None, None)
        super().backward_weights()
        x, grad = (t.reshape(-1, t.shape[-1]) for t in (x, grad))
        for p in frozen:
            p.grad = grad.T @ x.to(grad.dtype) if p is self.weight else grad.sum(0)


@mistake("DeferredLinear", "without a pending backward there is an IndexError; the contract asks for a RuntimeError")
class OtherError(reference.DeferredLinear):
    def backward_weights(self):
        if not self.pending:
            self.pending.popleft()
        super().backward_weights()


@mistake("DeferredLinear", "without a pending backward nothing happens; the contract asks for a RuntimeError")
class NoError(reference.DeferredLinear):
    def backward_weights(self):
        if self.pending:
            super().backward_weights()


class _Uncast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.layer.pending.append((x.detach(), grad))
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None, None


@mistake(
    "DeferredLinear",
    "under autocast the gradient is bf16, and x and the weight are float32: they are multiplied without a cast",
)
class Uncast(reference.DeferredLinear):
    def forward(self, x):
        return _Uncast.apply(x, self.weight, self.bias, self)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        return reference._DeferredProduct.forward(ctx, x, weight, bias, layer)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.layer.pending.append((x.detach(), grad))
        return grad @ weight.to(grad.dtype).T if ctx.needs_input_grad[0] else None, None, None, None


@mistake(
    "DeferredLinear",
    "the gradient of x is multiplied by the transposed weight; forward has transposed it, backward takes it as it is",
)
class TurnedWeight(reference.DeferredLinear):
    def forward(self, x):
        return _Turned.apply(x, self.weight, self.bias, self)


class _EarlyBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        return reference._DeferredProduct.forward(ctx, x, weight, bias, layer)

    @staticmethod
    def backward(ctx, grad):
        x_grad = reference._DeferredProduct.backward(ctx, grad)[0]
        bias_grad = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return x_grad, None, bias_grad, None


@mistake("DeferredLinear", "the bias gets its gradient in backward already; only the weight's is put off")
class EarlyBias(reference.DeferredLinear):
    def forward(self, x):
        return _EarlyBias.apply(x, self.weight, self.bias, self)

    def backward_weights(self):
        before = None if self.bias is None else self.bias.grad
        kept = None if before is None else before.clone()
        super().backward_weights()
        if self.bias is not None:
            self.bias.grad = kept


@mistake("DeferredLinear", "x is detached before the layer, which computes no gradient of it")
class CutOff(reference.DeferredLinear):
    def forward(self, x):
        return super().forward(x.detach())


class _IfNeeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        return reference._DeferredProduct.forward(ctx, x, weight, bias, layer)

    @staticmethod
    def backward(ctx, grad):
        found = reference._DeferredProduct.backward(ctx, grad)
        if not ctx.needs_input_grad[0]:
            ctx.layer.pending.pop()
        return found


@mistake(
    "DeferredLinear",
    "nothing is put aside where x needs no gradient, though the weights do: the first layer's are missing",
)
class IfNeeded(reference.DeferredLinear):
    def forward(self, x):
        return _IfNeeded.apply(x, self.weight, self.bias, self)


@mistake(
    "DeferredLinear",
    "the inputs are queued by the forwards; backwards in another order get those of other micro-batches",
)
class Queued(reference.DeferredLinear):
    def forward(self, x):
        self.inputs = [*getattr(self, "inputs", []), x.detach()]
        return super().forward(x)

    def backward_weights(self):
        if self.pending:
            self.pending[0] = self.inputs.pop(0), self.pending[0][1]
        super().backward_weights()


@mistake("DeferredLinear", "the layer remembers one input, the last forward's: several micro-batches are on their way")
class LastInput(reference.DeferredLinear):
    def forward(self, x):
        self.last = x.detach()
        return super().forward(x)

    def backward_weights(self):
        if self.pending:
            self.pending[0] = self.last, self.pending[0][1]
        super().backward_weights()


@mistake("DeferredLinear", "the bias is missing from the output")
class Unbiased(reference.DeferredLinear):
    def forward(self, x):
        return reference._DeferredProduct.apply(x, self.weight, None, self)


@mistake("DeferredLinear", "after the oldest pending backward the others are thrown away")
class ThrowsAway(reference.DeferredLinear):
    def backward_weights(self):
        super().backward_weights()
        self.pending.clear()


@mistake("DeferredLinear", "`pending` belongs to the class, so that all layers share it; each instance needs its own")
class SharedPending(reference.DeferredLinear):
    shared: ClassVar[deque] = deque()

    def __init__(self, linear):
        super().__init__(linear)
        self.pending = self.shared


class _List(list):
    def popleft(self):
        return self.pop(0)


@mistake(
    "DeferredLinear",
    "`pending` is a list; the contract asks for a deque, which gives the oldest without moving the others",
)
class ListPending(reference.DeferredLinear):
    def __init__(self, linear):
        super().__init__(linear)
        self.pending = _List()


class _WithHistory(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        return reference._DeferredProduct.forward(ctx, x, weight, bias, layer)

    @staticmethod
    def backward(ctx, grad):
        found = reference._DeferredProduct.backward(ctx, grad)
        ctx.layer.pending[-1] = ctx.saved_tensors[0], grad
        return found


@mistake(
    "DeferredLinear",
    "x is put aside with its history: weight.grad gets a graph, which keeps the gradients of all micro-batches in memory",
)
class WithHistory(reference.DeferredLinear):
    def forward(self, x):
        return _WithHistory.apply(x, self.weight, self.bias, self)


class _CopiesX(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        return reference._DeferredProduct.forward(ctx, x, weight, bias, layer)

    @staticmethod
    def backward(ctx, grad):
        found = reference._DeferredProduct.backward(ctx, grad)
        ctx.layer.pending[-1] = ctx.layer.pending[-1][0].clone(), grad
        return found


@mistake("DeferredLinear", "x is copied before it is put aside: `detach` alone cuts its history, and takes no memory")
class CopiesX(reference.DeferredLinear):
    def forward(self, x):
        return _CopiesX.apply(x, self.weight, self.bias, self)


# ---- 17.9 PipelineStage ----------------------------------------------------------------------------------------------


class RightStage(reference.PipelineStage):
    """The reference, which also recognises the graded answer's ``DeferredLinear``: the learner's, when a learner is graded."""

    def backward_micro(self, i, grad=None):
        with mock.patch.object(reference, "DeferredLinear", pipeline.DeferredLinear):
            return super().backward_micro(i, grad)


@mistake("PipelineStage", "the output is kept until backward, though the next stage has it: keep its gradient edge")
class KeepsOutput(RightStage):
    def forward_micro(self, i, x):
        y = super().forward_micro(i, x)
        self.outputs = {**getattr(self, "outputs", {}), i: y.detach()}
        return y

    def backward_micro(self, i, grad=None):
        getattr(self, "outputs", {}).pop(i, None)
        return super().backward_micro(i, grad)


@mistake("PipelineStage", "what a micro-batch kept is held after its backward")
class NeverReleases(RightStage):
    def backward_micro(self, i, grad=None):
        if i in self._kept:
            self.held = [*getattr(self, "held", []), self._kept[i]]
        with mock.patch("torch.autograd.backward", partial(torch.autograd.backward, retain_graph=True)):
            return super().backward_micro(i, grad)


@mistake("PipelineStage", "x is not cut off from its history: backward goes on beyond the stage")
class NotCut(RightStage):
    def forward_micro(self, i, x):
        y = super().forward_micro(i, x)
        if x.requires_grad:
            leaf, _ = self._kept[i]
            leaf.register_hook(lambda grad: x.backward(grad))
        return y


@mistake("PipelineStage", "one slot for all micro-batches: the second forward overwrites what the first one kept")
class OneSlot(RightStage):
    def forward_micro(self, i, x):
        y = super().forward_micro(i, x)
        self._kept.update(dict.fromkeys(self._kept, self._kept[i]))
        return y

    def backward_micro(self, i, grad=None):
        if i in self._kept and grad is not None and len(grad) != len(self._kept[i][0]):
            grad = grad[:1].expand(len(self._kept[i][0]), *grad.shape[1:])
        if i in self._kept:
            x, edge = self._kept.pop(i)
            torch.autograd.backward(edge, grad, retain_graph=True)
            self._pending[i] = []
            return x.grad
        return super().backward_micro(i, grad)


@mistake("PipelineStage", "backwards are done in the order of the forwards, whichever micro-batch is asked for")
class InOrder(RightStage):
    def backward_micro(self, i, grad=None):
        if i in self._kept:
            first = min(self._kept)
            self._kept[i], self._kept[first] = self._kept[first], self._kept[i]
            if grad is not None and len(grad) != len(self._kept[i][0]):
                grad = grad[:1].expand(len(self._kept[i][0]), *grad.shape[1:])
        return super().backward_micro(i, grad)


@mistake("PipelineStage", "nothing is returned: the stage before never gets its gradient")
class NoGradient(RightStage):
    def backward_micro(self, i, grad=None):
        super().backward_micro(i, grad)


@mistake(
    "PipelineStage",
    "the weights of DeferredLinear layers are done in backward_micro; they must wait for backward_weights",
)
class WeightsAtOnce(RightStage):
    def backward_micro(self, i, grad=None):
        found = super().backward_micro(i, grad)
        for layer in self._pending[i]:
            layer.backward_weights()
        self._pending[i] = []
        return found


@mistake(
    "PipelineStage", "each DeferredLinear is called once, though a layer that was used twice has two backwards pending"
)
class OnceForEach(RightStage):
    def backward_weights(self, i):
        if i in self._pending:
            self._pending[i] = list(dict.fromkeys(self._pending[i]))
        super().backward_weights(i)


@mistake(
    "PipelineStage",
    "backward_weights(i) does everything that is pending; it should do what micro-batch i left, and no more",
)
class AllWeights(RightStage):
    def backward_weights(self, i):
        super().backward_weights(i)
        for layer in self.modules():
            while isinstance(layer, pipeline.DeferredLinear) and layer.pending:
                layer.backward_weights()
        self._pending = {m: [] for m in self._pending}


@mistake("PipelineStage", "backward_weights does nothing: DeferredLinear layers never get their gradients")
class NoWeights(RightStage):
    def backward_weights(self, i):
        if i not in self._pending:
            raise ValueError(f"micro-batch {i} has had no backward")
        self._pending.pop(i)


@mistake("PipelineStage", "a call in the wrong state is not refused, or without the number of the micro-batch")
class NoStates(RightStage):
    def backward_micro(self, i, grad=None):
        return super().backward_micro(i, grad) if i in self._kept else None

    def backward_weights(self, i):
        return super().backward_weights(i) if i in self._pending else None


@mistake("PipelineStage", "the x that the caller gave is itself made to require a gradient; detach it first")
class ChangesX(RightStage):
    def forward_micro(self, i, x):
        y = super().forward_micro(i, x)
        if x.is_leaf and x.is_floating_point():
            x.requires_grad_()
        return y


@mistake("PipelineStage", "x is always made to require a gradient: integers cannot")
class IntegersToo(RightStage):
    def forward_micro(self, i, x):
        x.detach().requires_grad_()
        return super().forward_micro(i, x)


@mistake("PipelineStage", "only float32 gets a gradient, not every floating-point dtype")
class OnlyFloat32(RightStage):
    def backward_micro(self, i, grad=None):
        is_float32 = i in self._kept and self._kept[i][0].dtype == torch.float32
        found = super().backward_micro(i, grad)
        return found if is_float32 else None


@mistake(
    "PipelineStage",
    "the output is detached, so a loss cannot be computed from it with a gradient: only messages are detached",
)
class DetachedOutput(RightStage):
    def forward_micro(self, i, x):
        return super().forward_micro(i, x).detach()


@mistake("PipelineStage", "what a micro-batch kept is read but not removed, so a second backward is not refused")
class NotRemoved(RightStage):
    def backward_micro(self, i, grad=None):
        kept = self._kept.get(i)
        found = super().backward_micro(i, grad)
        self._kept[i] = kept
        return found


@mistake(
    "PipelineStage",
    "without DeferredLinear layers backward_weights refuses its call; then it has nothing to do, and that is right",
)
class RefusesPlainLayers(RightStage):
    def backward_micro(self, i, grad=None):
        found = super().backward_micro(i, grad)
        if not any(isinstance(layer, pipeline.DeferredLinear) for layer in self.modules()):
            self._pending.pop(i)
        return found


@mistake(
    "PipelineStage", "backward_weights(i) may be called twice after one backward; the second call has to be refused"
)
class WeightsTwice(RightStage):
    def backward_weights(self, i):
        super().backward_weights(i)
        self._pending[i] = []


@mistake("PipelineStage", "stage = n_stages is not refused: the stages count from 0")
class OnePastTheEnd(RightStage):
    def __init__(self, module, stage, n_stages, group=None):
        super().__init__(module, 0 if stage == n_stages else stage, n_stages, group)


@mistake("PipelineStage", "a negative stage is not refused")
class NegativeStages(RightStage):
    def __init__(self, module, stage, n_stages, group=None):
        super().__init__(module, max(stage, 0), n_stages, group)


@mistake("PipelineStage", "the stages are counted from 1, so stage 0 is refused")
class FromOne(RightStage):
    def __init__(self, module, stage, n_stages, group=None):
        if not 1 <= stage <= n_stages:
            raise ValueError(f"stage = {stage}, expected 0 to {n_stages - 1} for n_stages = {n_stages}")
        super().__init__(module, min(stage, n_stages - 1), n_stages, group)
        self.stage = stage


@mistake("PipelineStage", "where the output does not depend on x, None is returned; the gradient of x is zero")
class NoneForZero(RightStage):
    def backward_micro(self, i, grad=None):
        x = self._kept[i][0] if i in self._kept else None
        found = super().backward_micro(i, grad)
        return None if x.grad is None else found


@mistake(
    "PipelineStage",
    "an output that requires no gradient has no edge in a graph: a frozen table on the first stage raises an error",
)
class AlwaysAnEdge(RightStage):
    def forward_micro(self, i, x):
        y = super().forward_micro(i, x)
        torch.autograd.graph.get_gradient_edge(y)
        return y


@mistake("PipelineStage", "zeros are returned as the gradient of words; the contract asks for None")
class ZerosForWords(RightStage):
    def backward_micro(self, i, grad=None):
        x = self._kept[i][0] if i in self._kept else None
        found = super().backward_micro(i, grad)
        return torch.zeros_like(x) if found is None else found


@mistake("PipelineStage", "a number that was used before is refused, although the next step has a micro-batch 0, too")
class NumbersOnce(RightStage):
    def forward_micro(self, i, x):
        self.seen = getattr(self, "seen", set())
        if i in self.seen:
            raise ValueError(f"micro-batch {i} has had its forward")
        self.seen.add(i)
        return super().forward_micro(i, x)


@mistake("PipelineStage", "the group is not stored, and run_schedule needs it")
class GroupLost(RightStage):
    def __init__(self, module, stage, n_stages, group=None):
        super().__init__(module, stage, n_stages, group)
        del self.group


@mistake("PipelineStage", "`group` is None whatever was given: all ranks are taken")
class GroupOfAll(RightStage):
    def __init__(self, module, stage, n_stages, group=None):
        super().__init__(module, stage, n_stages)


@mistake(
    "PipelineStage",
    "only the module's direct children are looked at: a DeferredLinear inside of a block gets no gradient",
)
class DirectChildren(RightStage):
    def backward_micro(self, i, grad=None):
        found = super().backward_micro(i, grad)
        children = [*self.module.children()]
        self._pending[i] = [layer for layer in self._pending[i] if any(layer is child for child in children)]
        return found


@mistake("PipelineStage", "only the gradient of x is computed, not those of the parameters")
class OnlyX(RightStage):
    def backward_micro(self, i, grad=None):
        before = [(p, p.grad) for p in self.parameters()]
        before = [(p, None if g is None else g.clone()) for p, g in before]
        found = super().backward_micro(i, grad)
        for p, g in before:
            p.grad = g
        return found


@mistake(
    "PipelineStage",
    "the gradients of the parameters are set to zero before each backward: those of the other micro-batches are lost",
)
class ZeroesGradients(RightStage):
    def backward_micro(self, i, grad=None):
        self.module.zero_grad()
        return super().backward_micro(i, grad)


def renamed_error(change):
    """A stage whose errors about the order of calls are changed."""

    class Stage(RightStage):
        def backward_micro(self, i, grad=None):
            if i not in self._kept:
                raise change(i)
            return super().backward_micro(i, grad)

        def backward_weights(self, i):
            if i not in self._pending:
                raise change(i)
            super().backward_weights(i)

    return Stage


mistake("PipelineStage", "the error about a wrong order does not name the micro-batch")(
    renamed_error(lambda i: ValueError("this micro-batch has had no forward"))
)
mistake("PipelineStage", "a call in the wrong order raises a KeyError; the contract asks for a ValueError")(
    renamed_error(lambda i: KeyError(i))
)


@mistake("PipelineStage", "backward_weights without a backward raises a KeyError; the contract asks for a ValueError")
class KeyErrorOfWeights(RightStage):
    def backward_weights(self, i):
        self._pending[i]
        super().backward_weights(i)


@mistake("PipelineStage", "the newest micro-batch has its backward, whichever is asked for")
class NewestFirst(RightStage):
    def backward_micro(self, i, grad=None):
        if i in self._kept:
            last = [*self._kept][-1]
            self._kept[i], self._kept[last] = self._kept[last], self._kept[i]
        return super().backward_micro(i, grad)


@mistake(
    "PipelineStage",
    "the gradient is divided by the number of stages: the loss is a mean over micro-batches, not over stages",
)
class DividedByStages(RightStage):
    def backward_micro(self, i, grad=None):
        return super().backward_micro(i, None if grad is None else grad / self.n_stages)


@mistake("PipelineStage", "stage 0 returns no gradient; only for integers is there none")
class NoneOnTheFirst(RightStage):
    def backward_micro(self, i, grad=None):
        found = super().backward_micro(i, grad)
        return found if self.stage else None


@mistake("PipelineStage", "the last micro-batch's x is held after its backward")
class HoldsLast(RightStage):
    def backward_micro(self, i, grad=None):
        self.last = self._kept.get(i)
        return super().backward_micro(i, grad)


@mistake(
    "PipelineStage",
    "everything that is pending is counted as this micro-batch's; what was pending before its backward is not its own",
)
class CountsAllPending(RightStage):
    def backward_micro(self, i, grad=None):
        found = super().backward_micro(i, grad)
        layers = [layer for layer in self.modules() if isinstance(layer, pipeline.DeferredLinear)]
        self._pending[i] = [layer for layer in layers for _ in layer.pending]
        return found


@mistake("PipelineStage", "a stage is taken whatever its number; it has to be in range(n_stages)")
class AnyStage(RightStage):
    def __init__(self, module, stage, n_stages, group=None):
        super().__init__(module, min(max(stage, 0), n_stages - 1), n_stages, group)


# ---- 17.10 run_schedule ----------------------------------------------------------------------------------------------


def refuse(plans):
    """What the reference refuses before the run; the works of what it accepts."""
    check_plans(plans)
    return reference.simulate([plan.actions for plan in plans], {"F": 1, "B": 2, "W": 1})


def changed(
    stages, schedule, micro_inputs, micro_targets, loss_function, group, *, run=None, loss=None, check=None, order=None
):
    """The reference in one piece, with parts that a mistake exchanges."""
    mail = Mail(group or stages[0].group)
    plan = Plan(list(schedule), [s.stage for s in stages], len(micro_inputs), len(micro_targets))
    timetable = reference._timetable((check or refuse)(mail.gather(plan)), mail.n_ranks)
    mean = (loss or MeanLoss)(loss_function, micro_targets)
    mine = (run or reference._Run)(stages, schedule, micro_inputs, mean, mail)
    with mail.delivering([item for item in timetable if isinstance(item, Message)]):
        for item in (order or list)(timetable):
            if isinstance(item, Work):
                if item.stage == mail.rank:
                    mine.work(item)
            elif item.sender == mail.rank:
                mail.send(item, mine.outgoing.pop(item.name))
            elif item.receiver == mail.rank:
                mail.expect(item)
    return mean.total


class _PlainMean(MeanLoss):
    def __init__(self, *args):
        super().__init__(*args)
        self.shares = torch.full((len(self.targets),), 1 / len(self.targets), dtype=torch.float64)


class _ByAllTargets(MeanLoss):
    def __init__(self, *args):
        super().__init__(*args)
        n = torch.tensor([t.numel() for t in self.targets], dtype=torch.float64)
        self.shares = n / n.sum()


class _Summed(MeanLoss):
    def __init__(self, *args):
        super().__init__(*args)
        self.shares = torch.ones(len(self.targets), dtype=torch.float64)


class _WholeLoss(MeanLoss):
    def add(self, i, output):
        grad = super().add(i, output)
        return None if grad is None else grad / self.shares[i].to(grad)


class _NoWeights(reference._Run):
    def work(self, work):
        self.weights_later = {(m, c) for m in range(len(self.inputs)) for c in range(len(self.stages))}
        super().work(work)


class _WeightsAtOnce(reference._Run):
    def work(self, work):
        self.weights_later = set()
        if work.kind != "W":
            super().work(work)


class _KeepsOutputs(reference._Run):
    def work(self, work):
        super().work(work)
        self.all = [*getattr(self, "all", []), *self.outgoing.values()]


@mistake("run_schedule", "all micro-batches count equally, whatever their sizes; each counts by its targets")
def plain_mean(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, loss=_PlainMean)


@mistake("run_schedule", "targets of -100 are counted, though the loss leaves them out")
def counts_ignored(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, loss=_ByAllTargets)


@mistake("run_schedule", "the losses are added up without dividing: gradients grow with the number of micro-batches")
def summed(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, loss=_Summed)


@mistake(
    "run_schedule",
    "the loss is right, but each backward starts from a micro-batch's own mean: the gradient is not weighted",
)
def gradient_not_weighted(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, loss=_WholeLoss)


@mistake("run_schedule", "a B without a W in the list does only half of the backward: backward_weights is never called")
def half_a_backward(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, run=_NoWeights)


@mistake("run_schedule", "the weights' gradients are computed with each B, although the list puts them off to a W")
def weights_too_early(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, run=_WeightsAtOnce)


@mistake("run_schedule", "all outputs are held to the end of the run: the memory that 1F1B saves is spent again")
def holds_outputs(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, run=_KeepsOutputs)


@mistake(
    "run_schedule",
    "each rank receives right before it needs a message and sends right after: two ranks that send to each other wait for ever",
)
def no_common_order(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    rank = dist.get_rank(group)

    def order(timetable):
        expects = {
            item.name: item for item in timetable if isinstance(item, Message) and item.receiver == rank != item.sender
        }
        sends = {item.name: item for item in timetable if isinstance(item, Message) and item.sender == rank}
        n = dist.get_world_size(group)
        for item in timetable:
            if isinstance(item, Work) and item.stage == rank:
                g = item.chunk * n + rank
                if (item.kind, g, item.micro_batch) in expects:
                    yield expects[item.kind, g, item.micro_batch]
                yield item
                to = (item.kind, g + (1 if item.kind == "F" else -1), item.micro_batch)
                if item.kind != "W" and to in sends:
                    yield sends[to]

    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, order=order)


@mistake(
    "run_schedule", "the schedule is not checked before the run: a bad one fails after the first activations were sent"
)
def not_checked(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    def check(plans):
        try:
            return refuse(plans)
        except ValueError as error:
            stage = stages[0]
            if stage.stage == 0:
                stage.forward_micro(0, micro_inputs[0])
            raise error

    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, check=check)


@mistake(
    "run_schedule",
    "only what simulate refuses is refused: an action that is missing, and for which nobody waits, passes",
)
def only_simulated(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    def check(plans):
        if any(p.n_inputs != plans[0].n_inputs for p in plans) or plans[-1].groups[0] != len(plans) - 1:
            return refuse(plans)
        return reference.simulate([plan.actions for plan in plans], {"F": 1, "B": 2, "W": 1})

    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, check=check)


@mistake("run_schedule", "each rank checks its own list only: the others do not notice, and wait")
def own_list_only(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    rank = dist.get_rank(group)

    def check(plans):
        try:
            return refuse(plans)
        except ValueError as error:
            if f"rank {rank} " in str(error) or f"stage {rank} is stuck" in str(error).split(";")[0]:
                raise
            raise RuntimeError("another rank has ended") from None

    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, check=check)


@mistake(
    "run_schedule",
    "the loss is on every rank: that takes another message, and the contract asks for a zero on the others",
)
def loss_everywhere(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    loss = reference.run_schedule(stages, schedule, micro_inputs, micro_targets, loss_function, group).double()
    dist.all_reduce(loss, group=group)
    return loss


@mistake("run_schedule", "the last micro-batch's loss is returned instead of the mean over all targets")
def last_loss(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    seen = []

    def loss(y, targets):
        found = loss_function(y, targets)
        seen.append(found.detach())
        return found

    mean = reference.run_schedule(stages, schedule, micro_inputs, micro_targets, loss, group)
    return seen[-1] if seen else mean


@mistake("run_schedule", "the group is not passed on: the ranks of another group are waited for")
def all_ranks(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise RuntimeError("the ranks of all groups together do not fit the stages")
    return reference.run_schedule(stages, schedule, micro_inputs, micro_targets, loss_function)


@mistake("run_schedule", "without `group` it takes all ranks, although the stages know their group")
def stages_group_unread(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    everyone = group or dist.group.WORLD
    return reference.run_schedule(stages, schedule, micro_inputs, micro_targets, loss_function, everyone)


@mistake("run_schedule", "an exception on one rank is not passed on: the others never learn why they wait")
def silent_failure(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    try:
        return reference.run_schedule(stages, schedule, micro_inputs, micro_targets, loss_function, group)
    except RuntimeError as error:
        if "raised" in str(error):
            raise RuntimeError("a rank has ended") from None
        raise


class _NeverW(reference._Run):
    def work(self, work):
        if work.kind != "W":
            super().work(work)


@mistake("run_schedule", "the W of the list are left out: nobody calls backward_weights for them")
def weights_left_out(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, run=_NeverW)


@mistake(
    "run_schedule",
    "messages stand behind the actions that start when they are sent; an action may need one of them, so they come first",
)
def messages_late(stages, schedule, micro_inputs, micro_targets, loss_function, group=None):
    times = {"F": 1, "B": 2, "W": 1}
    works = []

    def check(plans):
        works.extend(refuse(plans))
        return works

    def order(timetable):
        ends = {("W", 0, 0): 0.0}
        for work in works:
            to = work.chunk * n_ranks + work.stage + {"F": 1, "B": -1, "W": 0}[work.kind]
            ends[work.kind, to, work.micro_batch] = work.start + times[work.kind]
        late = [(item.start, 0, item) if isinstance(item, Work) else (ends[item.name], 1, item) for item in timetable]
        return [item for *_, item in sorted(late, key=lambda entry: entry[:2])]

    n_ranks = dist.get_world_size(group or stages[0].group)
    return changed(stages, schedule, micro_inputs, micro_targets, loss_function, group, check=check, order=order)
