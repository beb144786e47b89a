"""Records which devices code asks PyTorch for, without a second device and without importing PyTorch's compiler."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary


class Watch(TorchDispatchMode):
    """A dispatch mode whose first use does not import PyTorch's compiler, which would take 2 s."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Devices(Watch):
    """Runs all operators on the CPU, and records which devices they were asked to use.

    A tensor that was made on ``meta``, or moved there, counts as being there, and so does everything computed from it.

    Attributes:
        asked: The types of the devices that operators were asked for, in order.
        mixed: The first operator that got tensors from both places, or "".
            On real devices PyTorch would have refused it.
    """

    def __init__(self):
        super().__init__()
        self.asked, self.mixed, self.on_meta = [], "", WeakTensorKeyDictionary()
        self.moves = _Moves(self)

    def __enter__(self):
        self.moves.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.moves.__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim]
        on_meta = [x in self.on_meta for x in given]
        if kwargs.get("device") is not None:
            self.asked.append(kwargs["device"].type)
            kwargs["device"], is_there = torch.device("cpu"), self.asked[-1] == "meta"
        elif name == "copy_":  # from any device to any other; the target stays where it is
            is_there = on_meta[:1] == [True]
        else:
            is_there = any(on_meta)
            self.mixed = self.mixed or (name if is_there and not all(on_meta) else "")
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and is_there:
                self.on_meta[x] = True
        return out


class _Moves(TorchFunctionMode):
    """Notices ``.to(device)``, ``.type_as(other)`` and ``.cpu()``, which run no operator on a tensor that is really on
    the CPU, and ``.device`` and ``torch.tensor``, which run none at all.
    """

    def __init__(self, devices: Devices):
        super().__init__()
        self.devices = devices

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and out.is_meta:
            out = func(*args, **{**(kwargs or {}), "device": "cpu"})
            self.devices.asked.append("meta")
            self.devices.on_meta[out] = True
            return out
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("meta") if args[0] in self.devices.on_meta else out
        if func not in (Tensor.to, Tensor.cpu, Tensor.type_as) or out not in self.devices.on_meta:
            return out
        targets = [torch.device("cpu")] if func is Tensor.cpu else [*args[1:], *(kwargs or {}).values()]
        for target in targets:
            if isinstance(target, Tensor):
                target = "meta" if target in self.devices.on_meta else "cpu"
            if isinstance(target, str | torch.device) and torch.device(target).type != "meta":
                out = out.clone()
                del self.devices.on_meta[out]
                break
        return out


def devices_of(function, *args, **kwargs) -> tuple[Tensor, set[str]]:
    """What a call returns, and every device that it asked for or that its result is on."""
    with Devices() as devices:
        out = function(*args, **kwargs)
    return out, {*devices.asked, out.device.type}
