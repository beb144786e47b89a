"""What goes wrong when people build pipelines."""

import torch
from torch import Tensor

from lib.given.parallel.mail import Message
from lib.given.parallel.pipeline import Work
from lib.workbook.grading import edits

edits("""
# partition_layers
equally many layers on each stage: their costs are not looked at
+ starts = [n * s // n_stages for s in range(n_stages + 1)]
  return
each stage is filled up to the mean cost, from the first on: greedy, and not the best cut
+ starts = filled_up(costs, n_stages, sum(costs) / n_stages)
  return
stages are filled to the limit from the first on; of equally good cuts the contract asks for the earliest starts
+ starts = filled_up(costs, n_stages, float(least[n]))
  return
the smallest sum of squares is another aim: here only the most expensive stage counts
+ from itertools import combinations
+ if n <= 20:
+     cuts = [[0, *cut, n] for cut in combinations(range(1, n), n_stages - 1)]
+     starts = min(cuts, key=lambda cut: sum(sum(costs[i:j]) ** 2 for i, j in pairwise(cut)))
+ else:
+     starts = [n * s // n_stages for s in range(n_stages + 1)]
  return
sums are rounded, so equal costs seem to differ: add fractions
- (Fraction(c if isinstance(c, int) else float(c)) for c in costs), initial=Fraction(0)
+ (float(c) for c in costs), initial=0.0
too few layers for the stages are no error here: a stage stays empty
+ if n_stages > n:
+     return [range(min(s, n), min(s + 1, n)) for s in range(n_stages)]
  raise ValueError(f"{n} layers cannot fill n_stages = {n_stages} stages with at least one layer each")
the layers after the first stage are cut as well as they can be by themselves; they need only stay below the largest
stage of all
+ from functools import cache
+ @cache
+ def cut(first, k):
+     if k == 1:
+         return sum(costs[first:]), (first,)
+     later = ((i, cut(i, k - 1)) for i in range(first + 1, n - k + 2))
+     return min((max(sum(costs[first:i]), largest), (first, *rest)) for i, (largest, rest) in later)
+ starts = [*cut(0, n_stages)[1], n]
  return
the layers before the last stage are cut as well as they can be by themselves; they need only stay below the largest
stage of all
+ from functools import cache
+ @cache
+ def cut(k, end):
+     if k == 1:
+         return before[end], 0, (0,)
+     earlier = ((i, cut(k - 1, i)) for i in range(k - 1, end))
+     return min((max(largest, before[end] - before[i]), i, (*rest, i)) for i, (largest, _, rest) in earlier)
+ starts = [*cut(n_stages, n)[2], n]
  return
the stages are pairs of first layer and end; the contract asks for a range each
- range(first, end) for => (first, end) for
the costs are rounded down to whole numbers, though they may be seconds
- c if isinstance(c, int) else float(c) => int(c)
stages may be empty where that costs no more: each needs at least one layer
- range(k, n) => range(n)
the error does not name both numbers, those of the layers and of the stages
- {n} layers cannot fill n_stages = {n_stages} stages => there are too few layers for the stages
n_stages below 1 is not refused, although no list of stages can hold the layers then
  n = len(costs)
+ if n_stages < 1:
+     return []
the costs are added up in the list that was given, which belongs to the caller
+ costs[:] = [float(b) for b in before[1:]]
  starts = [n]
n_stages = 0 is refused and negative numbers of stages are not
  n = len(costs)
+ if n_stages < 0:
+     return []

# gpipe_schedule
the backwards descend, as in the paper's figure; the contract asks for ascending ones, whose gradients add up in order
+ return [Action("F", m) for m in range(n_micro)] + [Action("B", m) for m in reversed(range(n_micro))]
each forward is followed by its backward: with several stages they would work one after the other
- for kind in "FB" for m in range(n_micro) => for m in range(n_micro) for kind in "FB"
this is 1F1B: backwards begin before all forwards are done
+ return one_f_one_b_schedule(stage, n_stages, n_micro)
the gradients of the weights are separate actions, which belong to the zero-bubble schedule only
- "FB" => "FBW"

# one_f_one_b_schedule
a forward too few at the start: n_stages - stage - 1, so that the stage waits before each backward
- n_stages - stage => max(1, n_stages - stage - 1)
every stage starts with n_stages forwards; later stages need fewer, because their first backward comes sooner
- n_stages - stage => n_stages
the stages are counted from the wrong end: stage 0 starts with one forward, the last with n_stages
- n_stages - stage => stage + 1
a forward before each backward instead of after it: one micro-batch more is kept
- n_stages - stage => n_stages - stage + 1
this is GPipe: all forwards come first
+ return gpipe_schedule(stage, n_stages, n_micro)
it begins with n_stages - stage forwards even if there are fewer micro-batches: some of them do not exist
+ forwards += [Action("F", m) for m in range(n_micro, n_stages - stage)]
  return
with fewer micro-batches than n_stages - stage the list of forwards is read beyond its end
+ [forwards[m] for m in range(n_stages - stage)]
  return
the backwards that are left at the end are missing
- backwards, n_stages => backwards[: max(0, n_micro - (n_stages - stage))], n_stages
the backwards descend: the stage asks for the gradient of a micro-batch that has not been through it
- backwards, n_stages => backwards[::-1], n_stages
the newest micro-batch has its backward first, as on a stack; the oldest one's gradient is there first
+ actions, waiting, ahead = [], [], n_stages - stage
+ for n in range(ahead + n_micro):
+     if n >= ahead and waiting:
+         actions.append(Action("B", waiting.pop()))
+     if n < n_micro:
+         actions.append(Action("F", n))
+         waiting.append(n)
+ return actions

# interleaved_schedule
backwards go from the first chunk to the last; they must come back from the last to the first
- reversed(range(n_chunks)) => range(n_chunks)
all micro-batches go through a chunk before the next chunk begins; a round has only n_stages of them
- [range(first, first + n_stages) for first in range(0, n_micro, n_stages)] => [range(n_micro)]
- (n_chunks - 1) * n_stages => (n_chunks - 1) * n_micro
it begins with n_stages - stage - 1 forwards besides the rounds, as 1F1B; here it takes twice as many
- min(n_chunks, 2) * (n_stages - stage - 1) => (n_stages - stage - 1)
the forwards at the start are counted as in Megatron's code, where one more follows before the first backward
- * n_stages + 1 => * n_stages + 2 - min(n_chunks, 2)
all forwards come first, as in GPipe
- * n_stages + 1 => * n_stages + 1 + n_micro * n_chunks
micro-batches that are no multiple of the stages are not refused
- n_micro % n_stages => False
- range(first, first + n_stages) => range(first, min(first + n_stages, n_micro))
with one chunk, too, it begins with 2 (n_stages - stage - 1) + 1 forwards; one chunk is plain 1F1B
- min(n_chunks, 2) => 2
(n_chunks - 1) n_stages is taken for n_chunks n_stages: a round of forwards too many at the start
- (n_chunks - 1) => n_chunks
the stages are counted from the wrong end: stage 0 begins with the fewest forwards
- (n_stages - stage - 1) => stage
the micro-batches of a round have their backwards in descending order; both kinds ascend
- in reversed(range(n_chunks)) for m in round_ => in reversed(range(n_chunks)) for m in reversed(round_)
the last round has its backwards first; they come in the rounds of the forwards
- in rounds for chunk in reversed => in reversed(rounds) for chunk in reversed
a micro-batch goes through all chunks before the next one begins: the two loops of a round are exchanged
- for chunk in range(n_chunks) for m in round_ => for m in round_ for chunk in range(n_chunks)
- for chunk in reversed(range(n_chunks)) for m in round_ => for m in round_ for chunk in reversed(range(n_chunks))
an action has the number of its virtual stage, c * n_stages + s; it should have the chunk's, c
- "F", m, chunk => "F", m, chunk * n_stages + stage
- "B", m, chunk => "B", m, chunk * n_stages + stage
a round has n_chunks micro-batches; it should have n_stages of them
- range(first, first + n_stages) for first in range(0, n_micro, n_stages)
+ range(first, min(first + n_chunks, n_micro)) for first in range(0, n_micro, n_chunks)
n_micro has to be a multiple of n_chunks, too; the contract asks for a multiple of n_stages only
- n_micro % n_stages => n_micro % n_stages or n_micro % n_chunks
only fewer micro-batches than stages are refused, not every number that is no multiple of them
- n_micro % n_stages => n_micro < n_stages
- range(first, first + n_stages) => range(first, min(first + n_stages, n_micro))
the error does not name both numbers, those of the micro-batches and of the stages
- n_micro = {n_micro} must be a multiple of n_stages = {n_stages} => the micro-batches must be a multiple of the stages
the last + 1 of the forwards at the start is missing, with one chunk, too
- * n_stages + 1 => * n_stages

# zero_bubble_schedule
each W follows its own B: that is 1F1B in three actions, and nothing fills the bubble at the end
+ stage = 0
  later =
all W come at the end: the bubble is filled, but every micro-batch waits for its W
+ stage = n_micro
  later =
W is late by n_stages - 1 - stage micro-batches: the first stage puts most off, and it should be the last
+ stage = n_stages - 1 - stage
  later =
every stage puts its W off by n_stages - 1 micro-batches; stage s may put off s, or it keeps too many
+ stage = n_stages - 1
  later =
W is late by one micro-batch too many: stage + 1 instead of stage
+ stage += 1
  later =
the W that are left at the end are missing: some micro-batches give the weights no gradient
- + rest =>
the W that are left at the end descend; they come in ascending order as well
- + rest => + rest[::-1]
W comes right before the B that it should follow, so the stage before waits longer for its gradient
- (action, *later.get(action, [])) => (*later.get(action, []), action)
W waits until the forward after the B is done; it comes right after the B
+ found = reference.zero_bubble_schedule(stage, n_stages, n_micro)
+ for n in range(1, len(found)):
+     if (found[n - 1].kind, found[n].kind) == ("W", "F"):
+         found[n - 1 : n + 1] = found[n], found[n - 1]
+ return found
with fewer micro-batches than `stage`, W of micro-batches below 0 are among those at the end
- max(0, n_micro - stage) => n_micro - stage
the first B of a stage, too, are followed by a W: of micro-batch m - stage, which is below 0
- range(stage, n_micro) => range(n_micro)

# simulate
the backward of a stage waits for W on the next one; it needs only B from there
- ends: dict
+ late = {(a.chunk * n + s, a.micro_batch) for s, each in enumerate(schedules) for a in each if a.kind == "W"}
+ ends: dict
- if missing :=
+ if a.kind == "B":
+     needs = [("W", *need[1:]) if need[0] == "B" and need[1:] in late else need for need in needs]
+ if missing :=
the backward does not wait for the backward on the next stage
- , ("B", g + 1, m) =>
the forward does not wait for the forward on the stage before
- ("F", g - 1, m) =>
the chunks do not wait for each other: the first stage's chunk 1 needs the last stage's chunk 0
+ needs = [need for need in needs if need[1] // n == a.chunk]
  if missing :=
a stage's chunks are taken for neighbours; chunk c of stage s is virtual stage c * R + s, so the stages alternate
- _needs(a.kind, a.chunk * n + stage => _needs(a.kind, stage * n_chunks + a.chunk
- ends[a.kind, a.chunk * n + stage => ends[a.kind, stage * n_chunks + a.chunk
- g // n => g % n_chunks
- g % n => g // n_chunks
an action starts when its input is there, even if the stage is still at work
- max([free[stage], => max([0.0,
all stages take the first stage's durations
- else durations => else [durations[0]] * n
the works are listed as they were found, not by their start
- sorted(works, key=lambda work: (work.start, work.stage)) => works
the error does not name the action that is stuck and what it waits for
- stage {stage} is stuck for ever at {todo[stage][0]}, which waits for {need} => the schedule can never go on
what can never go on is left out silently instead of being refused
- raise ValueError(f"stage {stage} is stuck for ever at {todo[stage][0]}, which waits for {need}") => return []
the backward does not wait for the forward of its own stage
- ("F", g, m), =>
W does not wait for its B
- [("B", g, m)] => []
an action starts as soon as its stage is free, although what it needs ends later
- max([free[stage], *(ends[need] for need in needs)]) => free[stage]
the works are in the order of their stages; the contract asks for their start first
- (work.start, work.stage) => (work.stage, work.start)
the works are in the order of their ends; the contract asks for their start
- (work.start, work.stage) => (work.end, work.stage)
works that start together are not in the order of their stages
- (work.start, work.stage) => (work.start, work.micro_batch, work.stage)
the error does not say what the stuck action waits for
- , which waits for {need} =>
the chunk of what is awaited is missing from the error: it is always chunk 0
- Action(kind, m, g // n) => Action(kind, m, 0)
the error names the virtual stage of what is awaited as its stage; the stage is that number modulo R
- g % n => g
after the last virtual stage the first one follows: its backward waits for one that never comes before it
- < n_virtual] => < n_virtual] + [("B", 0, m)] * (kind == "B" and g == n_virtual - 1)
a stage takes whatever can start; it has to run its list in order, and waits where the next action cannot start
- a = todo[stage][0]
+ def can_start(a):
+     return all(x in ends for x in _needs(a.kind, a.chunk * n + stage, a.micro_batch, n * n_chunks))
+ a = next(filter(can_start, todo[stage]), todo[stage][0])
- todo[stage].popleft() => todo[stage].remove(a)
the chunk is missing from the works: all of them have chunk 0
- free[stage], a.chunk => free[stage]
`end` is the duration of the work, not the time at which it ends
- start, free[stage] => start, seconds[stage][a.kind]
only a dict is taken for one mapping for all stages: other mappings are read as a sequence
- isinstance(durations, Mapping) => isinstance(durations, dict)
only a list is taken for one mapping for each stage: a tuple of them is read as one mapping
- isinstance(durations, Mapping) => not isinstance(durations, list)
without any action there is no largest chunk: `max` of nothing raises an error
- , default=0 =>
the chunks are counted on the first stage only, and not on all stages
- for actions in schedules for action in actions => for action in schedules[0]
the error names the first stage that is stuck, not the one that has waited longest
- min(stuck, key=lambda s: free[s]) => next(iter(stuck))
the error names the last stage that is stuck, not the one that has waited longest
- min(stuck, key=lambda s: free[s]) => [*stuck][-1]
the error says that the awaited action is on the stuck stage, wherever it is
- g % n => stage
there are as many virtual stages as stages: chunks are not counted, and the actions of later ones need nothing
- n * n_chunks => n
the schedules that were given are used up: work on a copy of each list
- [deque(actions) for actions in schedules] => list(schedules)
- popleft() => pop(0)
of two missing actions the error names B on the next stage; F of its own stage stands first in the rules
- ("F", g, m), ("B", g + 1, m) => ("B", g + 1, m), ("F", g, m)
the error names the stage that has waited shortest; the one that has waited longest is asked for
- min(stuck => max(stuck

# checkpoint
an autograd function is used: where no argument needs a gradient, the parameters get none either
+ return Again.apply(function, *args)
what the second run computed is kept to the end of backward: pop each tensor when it is used
- again.pop(index) => again[index]
the function runs again only when nothing is left of the last run: a tensor that was used already is missing
- index not in again => not again
the second run draws other random numbers: another dropout mask than in forward
- conditions_of(args) => autocast_only()
the random state is not put back after the second run, so that backward changes the numbers drawn afterwards
- conditions_of(args) => autocast_only()
- def drop(
+ state = torch.get_rng_state()
+ def drop(
- again.clear()
+ again.clear()
+ torch.set_rng_state(state)
autocast is off in the second run: float32 is computed where forward computed bf16
- torch.enable_grad() => torch.autocast("cpu", enabled=False), torch.enable_grad()
the arguments are kept outside of the graph, so that an enclosing checkpoint cannot drop them, and nobody can count them
- keep_in_graph(args) => (lambda: args) if torch.is_grad_enabled() else None
nothing is dropped: this is a plain call
+ return function(*args)
the second run goes on to the end, although everything that was saved is there already
- len(again) == len(saved) => False
a second run that saves fewer tensors fails with a KeyError; the contract asks for a RuntimeError with both numbers
- len(again) < len(saved) => False
the tensors are saved again by PyTorch's reentrant checkpoint, which needs an argument with a gradient and cannot be
nested in autograd.grad
+ from torch.utils import checkpoint as in_torch
+ return in_torch.checkpoint(function, *args, use_reentrant=True)
gradients are not enabled in the second run: backward runs without them, so nothing is saved again
- torch.enable_grad(), =>
what is left of the last run is not cleared before the next: its tensors are counted along
- again.clear() =>
the exception that ends the second run, `Enough`, is not caught
- suppress(Enough), =>
every exception of the second run is swallowed; only `Enough` may be
- suppress(Enough) => suppress(BaseException)
the second run ends a tensor too early: the last one that was saved is missing
- == len(saved) => == len(saved) - 1
the error is a ValueError; the contract asks for a RuntimeError
- RuntimeError => ValueError
the error does not name both numbers of saved tensors, those of the first run and of the second
- the first run saved {len(saved)} tensors, the second only {len(again)} => the second run saves fewer tensors
the second run takes `args` itself and not what `keep_in_graph` gives back, so that they are held anyway
- inputs() => args
what the second run's hook keeps or returns has its history, which holds it even after backward: detach it
- again[len(again)] = tensor.detach() => again[len(again)] = tensor
- return tensor.detach() => return tensor
the second run gets detached inputs, which require no gradient: it does not save what the first one saved
- *inputs() => *(a.detach() if isinstance(a, Tensor) else a for a in inputs())

# DeferredLinear
a plain linear layer: the weights get their gradients in backward, and nothing is left for later
@@ forward
+ return nn.functional.linear(x, self.weight, self.bias)
@@ backward_weights
+ return None
the newest backward is done first; the contract asks for the oldest
- popleft() => pop()
all backwards that are pending are done at once; the contract asks for one, the oldest
@@ backward_weights
+ reference.DeferredLinear.backward_weights(self)
+ while self.pending:
+     reference.DeferredLinear.backward_weights(self)
the weight's gradient is transposed: x^T times the gradient, where nn.Linear keeps [out, in]
- grad.T @ x.to(grad.dtype) => (x.to(grad.dtype).T @ grad).reshape(self.weight.shape)
the gradient replaces what is in .grad; it must be added
- new if parameter.grad is None else parameter.grad.add_(new) => new
the bias never gets a gradient
- (self.bias, lambda: grad.sum(0)) =>
the parameters are copies: an optimizer of the original layer would never see their gradients
- self.weight, self.bias = linear.weight, linear.bias
+ self.weight = nn.Parameter(linear.weight.detach().clone())
+ self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
the output requires a gradient only if the input does: on the first layer of a model the weights get none
- return _DeferredProduct.apply(x, self.weight, self.bias, self)
+ y = _DeferredProduct.apply(x, self.weight, self.bias, self)
+ return y if x.requires_grad else y.detach()
under autocast the layer computes in float32, unlike nn.Linear
- return _DeferredProduct
+ with torch.autocast("cpu", enabled=False):
+     return _DeferredProduct
x is an attribute of ctx, not saved with `save_for_backward`: a checkpoint around it cannot drop it
- ctx.save_for_backward(x, weight) => ctx.kept = x, weight
- ctx.saved_tensors => ctx.kept
what was kept for the weights is never released
+ self.old = [*getattr(self, "old", []), self.pending[0]]
  x, grad = (tensor
x is put aside with its history: weight.grad gets a graph, which keeps the gradients of all micro-batches in memory
- x.detach(), grad => x, grad
x and the gradient are not flattened to two dimensions before they are multiplied
- (tensor.reshape(-1, tensor.shape[-1]) for tensor in self.pending.popleft()) => self.pending.popleft()
`view` cannot flatten an x whose memory is transposed: `reshape` copies it if it must
- tensor.reshape(-1, => tensor.view(-1,
the gradient of the bias is summed over the features, too, so that all of them get the same
- grad.sum(0) => grad.sum().expand(grad.shape[-1]).clone()
the gradient of the bias is the mean over the rows; it should be the sum
- grad.sum(0) => grad.mean(0)
the gradient of the weight is divided by the number of rows; the loss does that where it should be done
- x.to(grad.dtype) => x.to(grad.dtype) / len(x)
a frozen weight or bias gets a gradient; `nn.Linear` would leave it alone
- parameter is not None and parameter.requires_grad => parameter is not None
without a pending backward there is an IndexError; the contract asks for a RuntimeError
- raise RuntimeError("no backward is pending: run backward first") => self.pending.popleft()
without a pending backward nothing happens; the contract asks for a RuntimeError
- raise RuntimeError("no backward is pending: run backward first") => return
under autocast the gradient is bf16, and x and the weight are float32: they are multiplied without a cast
- weight.to(grad.dtype) => weight
the gradient of x is multiplied by the transposed weight; forward has transposed it, backward takes it as it is
- weight.to(grad.dtype) => weight.to(grad.dtype).T
the bias gets its gradient in backward already; only the weight's is put off
  x, weight = ctx.saved_tensors
+ bias_grad = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
- else None, None, None, None => else None, None, bias_grad, None
- (self.bias, lambda: grad.sum(0)) =>
x is detached before the layer, which computes no gradient of it
- apply(x, => apply(x.detach(),
nothing is put aside where x needs no gradient, though the weights do: the first layer's are missing
- ctx.layer.pending.append(
+ if ctx.needs_input_grad[0]:
+     ctx.layer.pending.append(
the inputs are queued by the forwards; backwards in another order get those of other micro-batches
@@ forward
+ self.inputs = [*getattr(self, "inputs", []), x.detach()]
  return
@@ backward_weights
+ self.pending[0] = self.inputs.pop(0), self.pending[0][1]
  x, grad = (tensor
the layer remembers one input, the last forward's: several micro-batches are on their way
@@ forward
+ self.last = x.detach()
  return
@@ backward_weights
+ self.pending[0] = self.last, self.pending[0][1]
  x, grad = (tensor
the bias is missing from the output
- self.bias, self) => None, self)
after the oldest pending backward the others are thrown away
  self.pending.popleft())
+ self.pending.clear()
`pending` belongs to the class, so that all layers share it; each instance needs its own
- def __init__(self, linear: nn.Linear):
+ shared = deque()
+ def __init__(self, linear: nn.Linear):
- self.pending: deque[tuple[Tensor, Tensor]] = deque() => self.pending = self.shared
`pending` is a list; the contract asks for a deque, which gives the oldest without moving the others
- self.pending: deque[tuple[Tensor, Tensor]] = deque() => self.pending = []
- popleft() => pop(0)
x is copied before it is put aside: `detach` alone cuts its history, and takes no memory
- x.detach(), grad => x.detach().clone(), grad

# PipelineStage
the output is kept until backward, though the next stage has it: keep its gradient edge
- self._kept[i] = x,
+ self.outputs = {**getattr(self, "outputs", {}), i: y.detach()}
+ self._kept[i] = x,
- x, edge = self._kept.pop(i)
+ x, edge = self._kept.pop(i)
+ self.outputs.pop(i)
what a micro-batch kept is held after its backward
  x, edge = self._kept.pop(i)
+ self.held = [*getattr(self, "held", []), (x, edge)]
- backward(edge, grad) => backward(edge, grad, retain_graph=True)
x itself is made to require gradients, but it is the caller's: detach it first
- x = x.detach().requires_grad_ => x = x.requires_grad_
x is not cut off from its history: backward goes on beyond the stage
- x = x.detach().requires_grad_(x.is_floating_point())
+ history, x = x, x.detach().requires_grad_(x.is_floating_point())
+ if history.requires_grad:
+     x.register_hook(lambda grad: history.backward(grad))
one slot for all micro-batches: the second forward overwrites what the first one kept
  self._kept[i] = x, get_gradient_edge(y) if y.requires_grad else None
+ self._kept.update(dict.fromkeys(self._kept, self._kept[i]))
- torch.autograd.backward(edge, grad)
+ if grad is not None and len(grad) != len(x):
+     grad = grad[:1].expand(len(x), *grad.shape[1:])
+ torch.autograd.backward(edge, grad, retain_graph=True)
backwards are done in the order of the forwards, whichever micro-batch is asked for
- x, edge = self._kept.pop(i)
+ first = min(self._kept)
+ self._kept[i], self._kept[first] = self._kept[first], self._kept[i]
+ x, edge = self._kept.pop(i)
+ if grad is not None and len(grad) != len(x):
+     grad = grad[:1].expand(len(x), *grad.shape[1:])
nothing is returned: the stage before never gets its gradient
- return torch.zeros_like(x) if x.requires_grad and x.grad is None else x.grad =>
the weights of DeferredLinear layers are done in backward_micro; they must wait for backward_weights
+ for layer in self._pending[i]:
+     layer.backward_weights()
+ self._pending[i] = []
  return torch.zeros_like
each DeferredLinear is called once, though a layer that was used twice has two backwards pending
- self._pending.pop(i) => dict.fromkeys(self._pending.pop(i))
backward_weights(i) does everything that is pending; it should do what micro-batch i left, and no more
- for layer in self._pending.pop(i):
-     layer.backward_weights()
+ for layer in self.modules():
+     while isinstance(layer, DeferredLinear) and layer.pending:
+         layer.backward_weights()
+ self._pending = {m: [] for m in self._pending}
backward_weights does nothing: DeferredLinear layers never get their gradients
- for layer in self._pending.pop(i):
-     layer.backward_weights()
+ self._pending.pop(i)
a call in the wrong state is not refused, or without the number of the micro-batch
- raise ValueError(f"micro-batch {i} has had no forward, or its backward already") => return None
- raise ValueError(f"micro-batch {i} has had no backward, or its weights already") => return None
the x that the caller gave is itself made to require a gradient; detach it first
+ if x.is_leaf and x.is_floating_point():
+     x.requires_grad_()
  x = x.detach()
x is always made to require a gradient: integers cannot
- x.is_floating_point() =>
only float32 gets a gradient, not every floating-point dtype
- x.is_floating_point() => x.dtype == torch.float32
the output is detached, so a loss cannot be computed from it with a gradient: only messages are detached
- return y => return y.detach()
what a micro-batch kept is read but not removed, so a second backward is not refused
- self._kept.pop(i) => self._kept[i]
without DeferredLinear layers backward_weights refuses its call; then it has nothing to do, and that is right
+ if not layers:
+     self._pending.pop(i)
  return torch.zeros_like
backward_weights(i) may be called twice after one backward; the second call has to be refused
- for layer in self._pending.pop(i):
-     layer.backward_weights()
+ while self._pending[i]:
+     self._pending[i].pop(0).backward_weights()
stage = n_stages is not refused: the stages count from 0
- 0 <= stage < n_stages => 0 <= stage <= n_stages
a negative stage is not refused
- 0 <= stage < n_stages => stage < n_stages
the stages are counted from 1, so stage 0 is refused
- 0 <= stage < n_stages => 1 <= stage <= n_stages
where the output does not depend on x, None is returned; the gradient of x is zero
- torch.zeros_like(x) if x.requires_grad and x.grad is None else x.grad => x.grad
an output that requires no gradient has no edge in a graph: a frozen table on the first stage raises an error
- if y.requires_grad else None =>
zeros are returned as the gradient of words; the contract asks for None
- x.requires_grad and x.grad is None => x.grad is None
a number that was used before is refused, although the next step has a micro-batch 0, too
+ self.seen = getattr(self, "seen", set())
+ if i in self.seen:
+     raise ValueError(f"micro-batch {i} has had its forward")
+ self.seen.add(i)
  x = x.detach()
the group is not stored, and run_schedule needs it
- self.module, self.stage, self.n_stages, self.group = module, stage, n_stages, group
+ self.module, self.stage, self.n_stages = module, stage, n_stages
`group` is None whatever was given: all ranks are taken
- = module, stage, n_stages, group => = module, stage, n_stages, None
only the module's direct children are looked at: a DeferredLinear inside of a block gets no gradient
- self.modules() => self.module.children()
only the gradient of x is computed, not those of the parameters
- torch.autograd.backward(edge, grad)
+ before = [(p, None if p.grad is None else p.grad.clone()) for p in self.parameters()]
+ torch.autograd.backward(edge, grad)
+ for p, p_grad in before:
+     p.grad = p_grad
the gradients of the parameters are set to zero before each backward: those of the other micro-batches are lost
+ self.module.zero_grad()
  torch.autograd.backward(edge, grad)
the error about a wrong order does not name the micro-batch
- micro-batch {i} has had no forward => this micro-batch has had no forward
- micro-batch {i} has had no backward => this micro-batch has had no backward
a call in the wrong order raises a KeyError; the contract asks for a ValueError
- ValueError(f"micro-batch {i} has had no forward, or its backward already") => KeyError(i)
- ValueError(f"micro-batch {i} has had no backward, or its weights already") => KeyError(i)
backward_weights without a backward raises a KeyError; the contract asks for a ValueError
- ValueError(f"micro-batch {i} has had no backward, or its weights already") => KeyError(i)
the newest micro-batch has its backward, whichever is asked for
+ last = [*self._kept][-1]
+ self._kept[i], self._kept[last] = self._kept[last], self._kept[i]
  x, edge = self._kept.pop(i)
the gradient is divided by the number of stages: the loss is a mean over micro-batches, not over stages
- backward(edge, grad) => backward(edge, None if grad is None else grad / self.n_stages)
stage 0 returns no gradient; only for integers is there none
+ if self.stage == 0:
+     return None
  return torch.zeros_like
x is copied: `detach` alone cuts its history, and takes no memory
- x.detach().requires_grad_ => x.detach().clone().requires_grad_
the last micro-batch's x is held after its backward
- x, edge = self._kept.pop(i) => x, edge = self.last = self._kept.pop(i)
everything that is pending is counted as this micro-batch's; what was pending before its backward is not its own
- range(len(layer.pending) - n) => layer.pending
a stage is taken whatever its number; it has to be in range(n_stages)
- not 0 <= stage < n_stages => False

# timetable
works come before messages of the same time: a work that starts then may need one of them
- (work.start, 1, work) => (work.start, 0, work)
- (work.end, 0, Message( => (work.end, 1, Message(
a message counts at the start of its work, where its tensor does not exist yet; it counts at the end
- (work.end, 0, Message( => (work.start, 0, Message(
a message counts at the start of its work, behind the works of that time; it counts at the end of its work
- (work.end, 0, Message( => (work.start, 2, Message(
the chunk is left out of the virtual stage; it is chunk * n_stages + stage
- to = work.chunk * n_stages + work.stage + (1 if work.kind == "F" else -1)
+ to = work.stage + (1 if work.kind == "F" else -1)
nothing goes from the last stage to stage 0, or back; the next chunk's first virtual stage is there
- if 0 <= to < n_virtual: => if 0 <= to < n_virtual and 0 <= work.stage + (1 if work.kind == "F" else -1) < n_stages:
the receiver is the chunk of the virtual stage; its stage is the remainder, not the quotient
- to % n_stages) => to // n_stages)
a work counts at its end: it comes behind messages that are sent while it runs; it counts at its start
- (work.start, 1, work) => (work.end, 1, work)
all works come first, then all messages: each message belongs between the works
- key=lambda entry: entry[:2] => key=lambda entry: (isinstance(entry[2], Message), entry[0])
the messages are put right behind the works that make them: other ranks have not come that far
- return [item for *_, item in sorted(timed, key=lambda entry: entry[:2])]
+ order = []
+ for work in works:
+     order.append(work)
+     order += [m for _, is_work, m in timed if not is_work and m.name[2] == work.micro_batch
+               and m.name[0] == work.kind and m.sender == work.stage
+               and m.name[1] == work.chunk * n_stages + work.stage + (1 if work.kind == "F" else -1)]
+ return order
a backward's message goes to the next virtual stage, too; it goes to the previous one
- (1 if work.kind == "F" else -1) => 1
the directions are exchanged: a forward's tensor goes to the next virtual stage, a backward's to the previous one
- (1 if work.kind == "F" else -1) => (-1 if work.kind == "F" else 1)
a "W" makes a message as well; nobody waits for the gradients of the weights
- if work.kind == "W":
-     continue
+
chunks are not counted: the last stage's forwards go to nobody, though the next chunk needs them
- n_virtual = n_stages * (1 + max((work.chunk for work in works), default=0)) => n_virtual = n_stages
- to = work.chunk * n_stages + work.stage + (1 if work.kind == "F" else -1)
+ to = work.stage + (1 if work.kind == "F" else -1)
the last virtual stage's forward makes a message, too, and nobody takes it
- if 0 <= to < n_virtual: => if 0 <= to:
the first virtual stage's backward makes a message, too, and nobody takes it
- if 0 <= to < n_virtual: => if to < n_virtual:
the name has the virtual stage that makes the tensor; it should have the one that needs it
- Message((work.kind, to, work.micro_batch) => Message((work.kind, work.chunk * n_stages + work.stage, work.micro_batch)
the receiver is the number of a virtual stage; a stage holds every n_stages-th of them, so take it modulo n_stages
- to % n_stages) => to)
the sender is the number of a virtual stage; it is the stage of the work
- work.stage, to % n_stages => work.chunk * n_stages + work.stage, to % n_stages
sender and receiver are exchanged
- work.stage, to % n_stages => to % n_stages, work.stage
the virtual stage is counted as s * n_chunks + c, as if a stage's chunks were neighbours; it is c * n_stages + s
- to = work.chunk * n_stages + work.stage + (1 if work.kind == "F" else -1)
+ to = work.stage * (n_virtual // n_stages) + work.chunk + (1 if work.kind == "F" else -1)
a message from a stage to itself is left out; it belongs to the list like every other
- if 0 <= to < n_virtual: => if 0 <= to < n_virtual and to % n_stages != work.stage:
messages of one time are in the order of their receivers; they keep the order of the works that make them
- key=lambda entry: entry[:2] => key=lambda entry: (*entry[:2], 0 if entry[1] else entry[2].receiver)
works of one time are in the order of their stages; they keep the order that they have in the list given
- key=lambda entry: entry[:2] => key=lambda entry: (*entry[:2], entry[2].stage if entry[1] else 0)
the messages are put into the list of works that was given, which belongs to the caller
- return [item for *_, item in sorted(timed, key=lambda entry: entry[:2])]
+ works[:] = [item for *_, item in sorted(timed, key=lambda entry: entry[:2])]
+ return works
`sorted` has no key, so that it compares the works themselves where times are equal, and they have no order
- sorted(timed, key=lambda entry: entry[:2]) => sorted(timed)
an empty list raises an error; its timetable is empty
- , default=0 =>

# run_schedule
the weights' gradients are computed with every B, and again in the W that follows: a B with a W leaves them to it
- and (i, work.chunk) not in self.weights_later => and True
all micro-batches count equally, whatever their sizes; each counts by its targets
+ run.loss.shares = torch.full((len(micro_targets),), 1 / len(micro_targets), dtype=torch.float64)
  with mail.delivering(
targets of -100 are counted, though the loss leaves them out
+ n_targets = torch.tensor([targets.numel() for targets in micro_targets], dtype=torch.float64)
+ run.loss.shares = n_targets / n_targets.sum()
  with mail.delivering(
the losses are added up without dividing: gradients grow with the number of micro-batches
+ run.loss.shares = torch.ones(len(micro_targets), dtype=torch.float64)
  with mail.delivering(
the loss is right, but each backward starts from a micro-batch's own mean: the gradient is not weighted
- self.loss_grads[i] = self.loss.add(i, y)
+ loss_grad = self.loss.add(i, y)
+ self.loss_grads[i] = None if loss_grad is None else loss_grad / self.loss.shares[i].to(loss_grad)
a B without a W in the list does only half of the backward: backward_weights is never called
- or (work.kind == "B" and (i, work.chunk) not in self.weights_later) =>
one W in the list puts off the weights' gradients of every B, also of those without a W
- (i, work.chunk) not in self.weights_later => not self.weights_later
the W of one chunk is taken for the W of all chunks of its micro-batch
- (i, work.chunk) not in self.weights_later => i not in dict(self.weights_later)
the weights' gradients are computed with each B, although the list puts them off to a W
- work.kind == "W" or (work.kind == "B" and (i, work.chunk) not in self.weights_later) => work.kind == "B"
the gradients are set to zero at first; a run adds its own to `.grad`, as backward does
+ for stage in stages:
+     stage.zero_grad()
  with mail.delivering(
all outputs are held to the end of the run: the memory that 1F1B saves is spent again
+ self.all = [*getattr(self, "all", []), *self.outgoing.values()]
  if work.kind == "W" or
each rank receives right before it needs a message and sends right after: two ranks that send to each other wait for
ever
- for item in items => for item in without_common_order(items, mail.rank, mail.n_ranks)
the schedule is not checked before the run: a bad one fails after the first activations were sent
- check_plans(plans)
- works = simulate([plan.actions for plan in plans], {"F": 1, "B": 2, "W": 1})
+ try:
+     check_plans(plans)
+     works = simulate([plan.actions for plan in plans], {"F": 1, "B": 2, "W": 1})
+ except ValueError:
+     if stages[0].stage == 0:
+         stages[0].forward_micro(0, micro_inputs[0])
+     raise
only what simulate refuses is refused: an action that is missing, and for which nobody waits, passes
- check_plans(plans)
+ if any(p.n_inputs != plans[0].n_inputs for p in plans) or plans[-1].virtual_stages[0] != len(plans) - 1:
+     check_plans(plans)
each rank checks its own list only: the others do not notice, and wait
- check_plans(plans)
- works = simulate([plan.actions for plan in plans], {"F": 1, "B": 2, "W": 1})
+ try:
+     check_plans(plans)
+     works = simulate([plan.actions for plan in plans], {"F": 1, "B": 2, "W": 1})
+ except ValueError as error:
+     if f"rank {mail.rank} " in str(error) or f"stage {mail.rank} is stuck" in str(error).split(";")[0]:
+         raise
+     raise RuntimeError("another rank has ended") from None
the loss is on every rank: that takes another message, and the contract asks for a zero on the others
- return run.loss.total
+ loss = run.loss.total.double()
+ dist.all_reduce(loss, group=group)
+ return loss
the last micro-batch's loss is returned instead of the mean over all targets
- mail = Mail(
+ seen = []
+ def last_seen(y, targets):
+     found = loss_function(y, targets)
+     seen.append(found.detach())
+     return found
+ mail = Mail(
- MeanLoss(loss_function => MeanLoss(last_seen
- return run.loss.total => return seen[-1] if seen else run.loss.total
the group is not passed on: the ranks of another group are waited for
+ if group is not None and dist.get_world_size(group) != dist.get_world_size():
+     raise RuntimeError("the ranks of all groups together do not fit the stages")
+ return reference.run_schedule(stages, schedule, micro_inputs, micro_targets, loss_function)
without `group` it takes all ranks, although the stages know their group
- next((getattr(stage, "group", None) for stage in stages), None) => dist.group.WORLD
an exception on one rank is not passed on: the others never learn why they wait
+ try:
+     return reference.run_schedule(stages, schedule, micro_inputs, micro_targets, loss_function, group)
+ except RuntimeError as error:
+     if "raised" in str(error):
+         raise RuntimeError("a rank has ended") from None
+     raise
the first chunk of every rank takes the inputs; only virtual stage 0 does
- if g else self.inputs[i] => if work.chunk else self.inputs[i]
every chunk of the last rank computes a loss; only the last virtual stage does
- stage.stage == stage.n_stages - 1 => self.mail.rank == self.mail.n_ranks - 1
the W of the list are left out: nobody calls backward_weights for them
- work.kind == "W" or (work.kind == "B" => (work.kind == "B"
the timetable is wrong: mend `timetable` first
  items = timetable(works, mail.n_ranks)
+ items = [i for i in items if isinstance(i, Work)] + [i for i in items if not isinstance(i, Work)]
""")


def filled_up(costs, n_stages, limit):
    """The starts of stages that are filled up to a limit, from the first on, and the end of the last."""
    starts, held = [0], 0
    for i, cost in enumerate(costs):
        left = n_stages - len(starts)
        if i > starts[-1] and left and (held + cost > limit or len(costs) - i <= left):
            starts.append(i)
            held = 0
        held += cost
    return [*starts, len(costs)]


class Again(torch.autograd.Function):
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


def autocast_only():
    """Like ``conditions_of``, without the random states."""
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return lambda: torch.autocast("cpu", enabled=enabled, dtype=dtype)


def without_common_order(items, rank, n_ranks):
    """A rank's works, each right after its message has come and right before its own goes out."""
    messages = [item for item in items if isinstance(item, Message)]
    expects = {item.name: item for item in messages if item.receiver == rank != item.sender}
    sends = {item.name: item for item in messages if item.sender == rank}
    for item in items:
        if isinstance(item, Work) and item.stage == rank:
            g = item.chunk * n_ranks + rank
            if (item.kind, g, item.micro_batch) in expects:
                yield expects[item.kind, g, item.micro_batch]
            yield item
            to = (item.kind, g + (1 if item.kind == "F" else -1), item.micro_batch)
            if item.kind != "W" and to in sends:
                yield sends[to]
