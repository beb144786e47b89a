"""Parts of chapter 12 that are given: which unit owns a parameter, where it hangs in the model,
and how much memory a call takes.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


def all_gather_row(whole: Tensor, mine: Tensor, group=None, async_op: bool = False) -> Any:
    """Fill ``whole`` with every rank's row ``mine``, in rank order: ``dist.all_gather_into_tensor``,
    which torch 2.13 renamed ``all_gather_single``.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, mine, group=group, async_op=async_op)


def reduce_scatter_row(mine: Tensor, whole: Tensor, group=None, async_op: bool = False) -> Any:
    """Fill ``mine`` with this rank's part of the sum of all ``whole``: ``dist.reduce_scatter_tensor``,
    which torch 2.13 renamed ``reduce_scatter_single``.
    """
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce(mine, whole, group=group, async_op=async_op)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The children of the first ``ModuleList`` in a module; an empty list if it has none."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            return list(part)
    return []


def owned_parameters(module: nn.Module, units: Iterable[nn.Module]) -> list[dict[str, nn.Parameter]]:
    """Which parameters each unit gathers, by their names in ``module``.

    Returns:
        First a dict for the root, with the parameters that are in no unit or in more than one;
        then a dict for each unit.
        A tied parameter appears once.
    """
    units = list(units)
    members = [{id(p) for p in unit.parameters()} for unit in units]
    owned: list[dict[str, nn.Parameter]] = [{} for _ in range(1 + len(units))]
    for name, parameter in module.named_parameters():
        holders = [i for i, member in enumerate(members) if id(parameter) in member]
        owned[1 + holders[0] if len(holders) == 1 else 0][name] = parameter
    return owned


def alike(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Split parameters into groups that can share one row: the same dtype, and all trained or all frozen."""
    parts: dict[Any, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        parts.setdefault((parameter.requires_grad, parameter.dtype), {})[name] = parameter
    return [parts[key] for key in sorted(parts, key=lambda key: not key[0])]


class Places:
    """The places in a module where its parameters hang, so that other tensors can hang there instead.

    A tied parameter hangs in several places.
    ``hang`` puts a tensor into all of them.
    ``take_down`` replaces it by a tensor of the right shape on the device "meta", which has no values.
    Don't compute with it: many operators raise an error that names the device, but some return a tensor on "meta",
    and some (a matrix product on a CPU, in torch 2.13) whatever was in memory.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]):
        self._empty = {name: torch.empty_like(p, device="meta").detach() for name, p in parameters.items()}
        names = {id(p): name for name, p in parameters.items()}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        for part in module.modules():
            for attribute, parameter in list(part._parameters.items()):
                if id(parameter) in names:
                    self._places.setdefault(names[id(parameter)], []).append((part, attribute))
                    del part._parameters[attribute]
        self.take_down()

    def hang(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            for part, attribute in self._places[name]:
                object.__setattr__(part, attribute, tensor)

    def take_down(self) -> None:
        self.hang(self._empty)


def tensors_with_grad(tree: Any) -> list[Tensor]:
    """The tensors that need a gradient among the inputs or outputs of a forward, inside tuples,
    dicts and other containers.
    """
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """The same tree with its floating-point tensors cast to ``dtype``; None leaves them as they are."""
    if dtype is None:
        return tree
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


def call_before_backward(tensors: list[Tensor], call: Callable[[], None]) -> None:
    """Call once, when the first gradient of these tensors arrives."""
    torch.autograd.graph.register_multi_grad_hook(tensors, lambda _: call(), mode="any")


def call_after_backward(tensors: list[Tensor], call: Callable[[], None]) -> None:
    """Call once, when the gradients of all these tensors have arrived."""
    # "all" keeps the graph in a cycle that only Python's collector frees, and with one tensor "any" is the same
    register = torch.autograd.graph.register_multi_grad_hook
    register(tensors, lambda _: call(), mode="any" if len(tensors) == 1 else "all")


def backward_is_running() -> bool:
    """Whether this code runs inside a backward: in a hook, or because activation checkpointing recomputes a forward."""
    return torch._C._current_graph_task_id() != -1


class HookedUnits(nn.Module):
    """A module cut into units, which calls its subclass at the moments at which sharding must do something.

    A subclass defines ``make_flat`` (makes a unit's ``FlatShard``), ``before_forward(i)``, ``after_forward(i)``,
    ``before_backward(i)`` and ``free(i)`` for unit i (0 is the root), and ``after_gradient(flat)``.
    A unit's backward may need its frozen values until it ends,
    so ``free(i)`` is called when the gradients of the unit's inputs and trained values are complete.

    Two cases are handled here, so that no subclass has to.
    Activation checkpointing runs a unit's forward again in the middle of backward:
    a unit that is whole at that moment stays whole, and any other is gathered for the duration of that forward.
    And if a backward raised, the next forward first frees every unit and drops the gradient in ``reducing``.
    """

    make_flat: Any
    reducing: Any = None
    before_forward: Callable[[int], None]
    after_forward: Callable[[int], None]
    before_backward: Callable[[int], None]
    after_gradient: Callable[[Any], None]
    free: Callable[[int], None]

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module] | None = None,
        param_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        units = blocks_of(module) if units is None else list(units)
        self.module, self.param_dtype, self.group = module, param_dtype, group
        settings = (param_dtype,) if group is None else (param_dtype, group)
        self.names = [name for name, _ in module.named_parameters()]
        owned = owned_parameters(module, units)
        self.places = [Places(module, part) for part in owned]
        self.flats: list[list[Any]] = []
        self._awaited: dict[int, set] = {}
        self._was_whole: dict[int, bool] = {}  # for units whose forward runs inside a backward
        self._unfinished: set[int] = set()  # backwards that have begun, by autograd's id
        for i, unit in enumerate((module, *units)):
            self.flats.append([type(self).make_flat(part, *settings) for part in alike(owned[i])])
            owned[i].clear()
            self._register(i, unit)

    def _register(self, i: int, unit: nn.Module) -> None:
        for j, flat in enumerate(self.flats[i]):
            unit.register_parameter(f"flat_{j}", flat.shard)
            if flat.shard.requires_grad:
                flat.full.register_post_accumulate_grad_hook(partial(self._after_gradient, i, flat))
        unit.register_forward_pre_hook(partial(self._before, i), with_kwargs=True)
        unit.register_forward_hook(partial(self._after, i), with_kwargs=True, always_call=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """Every parameter, whole and in its own dtype, under its name in the original module.

        All ranks must call this together.
        """
        found = {}
        for flat in (flat for flats in self.flats for flat in flats):
            row = flat.shard.new_empty(dist.get_world_size(self.group) * len(flat.shard))
            all_gather_row(row, flat.shard.detach(), self.group)
            start = 0
            for name, shape in flat.shapes.items():
                found[name] = row[start : start + shape.numel()].view(shape)
                start += shape.numel()
        return {name: found[name] for name in self.names}

    def _before(self, i: int, unit: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if backward_is_running():
            self._gather_again(i)
        else:
            self._drop_what_a_backward_left()
            self.before_forward(i)
        inputs = tensors_with_grad((args, kwargs)) if torch.is_grad_enabled() else []
        if i and inputs:
            call_after_backward(inputs, partial(self._done, i, "inputs"))
        return cast_floats(args, self.param_dtype), cast_floats(kwargs, self.param_dtype)

    def _after(self, i: int, unit: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if outputs := tensors_with_grad(output):
            has_inputs = bool(tensors_with_grad((args, kwargs)))
            call_before_backward(outputs, partial(self._backward, i, has_inputs))
        if not backward_is_running():
            self.after_forward(i)
        elif not self._was_whole.pop(i, True):
            self.free(i)

    def _gather_again(self, i: int) -> None:
        self._was_whole[i] = all(flat.is_whole for flat in self.flats[i])
        for flat in self.flats[i]:
            flat.finish_gather()
            self.places[i].hang(flat.views())

    def _drop_what_a_backward_left(self) -> None:
        """Clean up if the last backward raised: free what it had gathered,
        and drop the gradient that it was reducing.
        """
        if not self._unfinished:
            return
        for of_the_last in (self._unfinished, self._awaited, self._was_whole):
            of_the_last.clear()
        if self.reducing is not None:
            shard = self.reducing.shard
            kept, shard.grad = shard.grad, None
            self.reducing.finish_reduce()
            shard.grad, self.reducing = kept, None
        for flat in (flat for flats in self.flats for flat in flats):
            flat.full.grad = None
        self.after_forward(0)

    def _backward(self, i: int, has_inputs: bool) -> None:
        backward = torch._C._current_graph_task_id()
        if backward not in self._unfinished:
            self._unfinished.add(backward)
            at_the_end = partial(self._unfinished.discard, backward)  # not called if backward raises
            torch.autograd.Variable._execution_engine.queue_callback(at_the_end)
        self._awaited[i] = {id(flat) for flat in self.flats[i] if flat.shard.requires_grad}
        self._awaited[i] |= {"finish"} if i == 0 else {"inputs"} if has_inputs else set()
        self.before_backward(i)
        with torch.enable_grad():  # a checkpointed part of the unit looks for its parameters here
            for flat in self.flats[i]:
                self.places[i].hang(flat.views())

    def _after_gradient(self, i: int, flat: Any, full: Tensor) -> None:
        self.after_gradient(flat)
        self._done(i, id(flat))

    def _done(self, i: int, what: Any) -> None:
        awaited = self._awaited.get(i, set())
        if what in awaited:
            awaited.discard(what)
            if not awaited:
                self.free(i)


def peak_bytes(run: Callable[[], Any], times: int = 5) -> tuple[int, int]:
    """Bytes that a call allocates on the CPU, in addition to what was allocated before, as the allocator counts them.

    The last reference to a reduced gradient may be dropped by a thread of gloo, which the profiler does not watch;
    then the memory seems to be held.
    So the call is repeated and the smallest count taken: memory that is really held is held every time.

    Returns:
        The most bytes at any moment, and the bytes that are still allocated at the end.
    """
    from torch.profiler import ProfilerActivity, profile

    found = []
    for _ in range(times):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        sums = [0, *accumulate(changes)]
        found.append((max(sums), sums[-1]))
    peaks, ends = zip(*found, strict=True)
    return min(peaks), min(ends)


def saved_bytes(run: Callable[[], Any], without: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd saves for backward, counting each storage once, and those of ``without`` not at all."""
    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(kept.values())
