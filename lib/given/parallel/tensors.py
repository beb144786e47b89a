"""Parts of chapter 13 that are given: three styles for DTensor, and a counter of what ranks send each other."""

from collections import Counter
from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle
from torch.utils._python_dispatch import TorchDispatchMode


class SharedInput(ParallelStyle):
    """Turns a module's first argument into one DTensor, whole on every rank.

    Without it, each layer inside would make its own DTensor from the plain tensor, and all-reduce its own gradient.
    With one DTensor for all of them, autograd adds their gradients first and all-reduces the sum once,
    like Megatron's f.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def share(_, args):
            return (DTensor.from_local(args[0], device_mesh, [Replicate()], run_check=False), *args[1:])

        module.register_forward_pre_hook(share)
        return module


class LocalHeads(SharedInput):
    """Tells an attention module how many heads its rank has; inside, it computes with plain tensors.

    Args:
        n_heads: Query heads H of the whole model.
        n_kv_heads: Key/value heads G of the whole model.
    """

    def __init__(self, n_heads: int, n_kv_heads: int):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        n_ranks = device_mesh.size()
        if self.n_heads % n_ranks:
            raise ValueError(f"n_heads = {self.n_heads} cannot be divided evenly among {n_ranks} ranks")
        vars(module).update(n_heads=self.n_heads // n_ranks, n_kv_heads=max(1, self.n_kv_heads // n_ranks))
        return super()._apply(module, device_mesh)


class KeyValueHeads(ParallelStyle):
    """The projection to keys or to values: cut by heads, or whole on every rank if there are fewer heads than ranks.

    If it is whole, the weight stays a plain parameter, each rank uses the output of the one head that its queries
    share, and the gradients of all ranks are summed.

    Args:
        n_kv_heads: Key/value heads G of the whole model.
    """

    def __init__(self, n_kv_heads: int):
        super().__init__()
        self.n_kv_heads = n_kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        n_ranks, n_heads = device_mesh.size(), self.n_kv_heads
        if n_heads % n_ranks == 0:
            return ColwiseParallel()._apply(module, device_mesh)
        if n_ranks % n_heads:
            raise ValueError(f"n_kv_heads = {n_heads} and {n_ranks} ranks: neither is a multiple of the other")
        group = device_mesh.get_group()
        head = device_mesh.get_local_rank() * n_heads // n_ranks
        module.register_forward_pre_hook(lambda _, args: (args[0].to_local(grad_placements=[Partial()]), *args[1:]))
        module.register_forward_hook(lambda _, __, out: out.chunk(n_heads, dim=-1)[head])
        module.get_parameter("weight").register_hook(lambda grad: all_reduce(grad, "sum", group))
        return module


_NAMES = {"allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather"}
_NAMES |= {"_allgather_base_": "all_gather", "allgather_": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
_NAMES |= {"_reduce_scatter_base_": "reduce_scatter", "broadcast_": "broadcast"}


class Collectives(TorchDispatchMode):
    """Counts the collectives that the lines inside ``with`` call, whether written by hand or made by DTensor.

    Attributes:
        calls: Number of calls by name, such as ``{"all_reduce": 4}``.
        n_bytes: Bytes that this rank passed to them.
    """

    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor turns it into operations on this rank's part, which come through here again
        name = _NAMES.get(func._schema.name.split("::")[1])
        if name and func.namespace in ("c10d", "_c10d_functional"):
            self.calls[name] += 1
            self.n_bytes += _n_bytes(args[0])
        return func(*args, **(kwargs or {}))


def _n_bytes(value) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_n_bytes, value)) if isinstance(value, list | tuple) else 0


def rank_part(full: Mapping[str, Tensor], local: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Cut a rank's parts out of whole parameters: every dimension that is smaller in the sharded model is cut.

    Args:
        full: The unsharded model's state dict.
        local: The sharded model's state dict, with the same names.
        rank: The rank whose parts are wanted.
    """
    parts = {}
    for name, tensor in local.items():
        whole = full[name]
        for dim, (n_local, n) in enumerate(zip(tensor.shape, whole.shape, strict=True)):
            if n_local < n:
                whole = whole.narrow(dim, rank * n_local, n_local)
        parts[name] = whole.clone()
    return parts
