"""The optimizer of a run, as its options name it."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lib.runs.engine.options import Options

if TYPE_CHECKING:
    from lib.runs.engine.strategies import Strategy


def make_optimizer(
    options: Options, groups: list[dict[str, Any]], device: torch.device, strategy: "Strategy | None" = None
) -> Optimizer:
    """The optimizer that the options name; its settings come from the options even after it loads a checkpoint.

    Args:
        options: Of the run.
        groups: Parameter groups, as ``strategy`` makes them.
        device: Where the parameters are.
        strategy: The divided model, which Muon needs in order to assemble whole matrices.
    """
    if options.optimizer == "muon":
        from lib.runs.engine.muon import MuonAndAdamW

        name = "ours" if options.ours else "adamw"
        optimizer: Optimizer = MuonAndAdamW(
            options, strategy, device, lambda some: _new_optimizer(replace(options, optimizer=name), some, device)
        )
    else:
        optimizer = _new_optimizer(options, groups, device)
    optimizer.register_load_state_dict_pre_hook(keep_settings)
    return optimizer


def keep_settings(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A loaded state with this run's learning rate, decay and kernels. (A CUDA graph reads its rate from a tensor on
    the device.)
    """
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    return {**state, "param_groups": [{**now, "params": was["params"]} for now, was in pairs]}


def _new_optimizer(options: Options, groups: list[dict[str, Any]], device: torch.device) -> Optimizer:
    """Chapter 7's AdamW, PyTorch's AdamW, or SGD with momentum; fused on a GPU, and capturable for ``--graph``."""
    if options.optimizer == "ours":
        from lib.training import AdamW

        return AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    lr = torch.tensor(options.lr, device=device) if options.graph else options.lr
    fused = device.type == "cuda"
    if options.optimizer == "sgd":
        # there is no fused SGD for DTensors
        sharded = any(isinstance(p, DTensor) for group in groups for p in group["params"])
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=fused and not sharded, foreach=fused and sharded)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused, capturable=options.graph)
