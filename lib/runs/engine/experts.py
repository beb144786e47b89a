"""Mixtures of experts for chapter 6's model: chapter 19's layer in place of each MLP, its experts spread over ranks,
its router balanced by a bias.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from lib.given.parallel.sharding import blocks_of
from lib.gpt2 import init_weights
from lib.moe import ExpertParallelMoE, MoE, update_router_bias
from lib.runs.engine.mesh import Mesh
from lib.runs.engine.options import Options
from lib.runs.engine.tensor import Cuts

EXPERTS = ("w1", "w2", "w3")
"""The parameters of a mixture that have a matrix for each expert."""


def expert_width(dim: int, k: int) -> int:
    """Width of an expert: a token's k experts, with three matrices each,
    have about as many weights as an MLP with two; a multiple of 16.
    """
    return 16 * math.ceil(8 * dim / (3 * k) / 16)


def extra_weights(options: Options, dim: int) -> int:
    """Number of weights that a token uses in a mixture, its experts' and the router's, beyond those of an MLP."""
    assert options.n_experts
    assert options.top_k
    return dim * (3 * options.top_k * expert_width(dim, options.top_k) + options.n_experts - 8 * dim)


def put_mixtures(model: nn.Module, options: Options, dim: int, n_layers: int) -> None:
    """Replace the MLP of every block, in place.

    Weights begin as ``init_weights`` says; ``w2`` writes to the residual stream.
    """
    assert options.n_experts
    assert options.top_k
    for block in blocks_of(model):
        mixture = MoE(dim, expert_width(dim, options.top_k), options.n_experts, options.top_k)
        init_weights(mixture, n_layers)
        for name in EXPERTS:
            nn.init.normal_(getattr(mixture, name), std=0.02 / math.sqrt(2 * n_layers) if name == "w2" else 0.02)
        block.mlp = mixture


def mixtures_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and layers of a model's mixtures."""
    yield from [(name, part) for name, part in model.named_modules() if isinstance(part, MoE)]


def spread_experts(model: nn.Module, mesh: Mesh) -> Cuts:
    """Give each rank of the expert axis its experts of every mixture, in place. All names stay the same."""
    cuts: Cuts = {}
    for name, mixture in mixtures_of(model):
        spread: Any = ExpertParallelMoE(mixture, mesh.group("expert"))
        vars(spread.local)["forward"] = spread.forward
        model.set_submodule(name, spread.local)
        cuts |= {f"{name}.{part}": ("expert", 0, 1) for part in EXPERTS}
    return cuts


class Narrow(nn.Module):
    """A mixture that computes in a dtype of 16 bits, since mixed precision does not know grouped products.

    Args:
        mixture: Keeps its parameters.
        dtype: Dtype of rows and experts while it computes.
    """

    def __init__(self, mixture: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.mixture, self.compute, self.dtype = mixture, mixture.forward, dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)

    def call(self, x: Tensor) -> Tensor:
        experts = {f"mixture.{name}": getattr(self.mixture, name).to(self.dtype) for name in EXPERTS}
        return functional_call(self, experts, (x.to(self.dtype),))


def narrow_mixtures(model: nn.Module, dtype: torch.dtype) -> None:
    """Let every mixture compute in a dtype of 16 bits, in place."""
    for _, mixture in mixtures_of(model):
        compute: Callable[[Tensor], Tensor] = Narrow(mixture, dtype).call
        vars(mixture)["forward"] = compute


class Balance:
    """Chapter 19's balance without a loss: after each step the bias of every router is updated.

    The update follows the number of tokens that all ranks together sent to each expert. A mean of the ranks' balancing
    losses would not be the loss of the whole batch. Counts add up, so every mesh computes the same.

    Args:
        model: This rank's part of the model, changed in place.
        options: Those of the run.
        n_layers: Number of blocks L of the whole model.
        device: Device of the model.

    Attributes:
        bias: ``[L, E]``, also of blocks that other stages hold.
        counts: For each block a queue with ``[E]`` for each micro-batch of a step, on this rank.
    """

    def __init__(self, model: nn.Module, options: Options, n_layers: int, device: torch.device):
        assert options.n_experts
        assert options.bias_rate is not None
        self.rate, self.adds_up = options.bias_rate, options.is_parallel
        self.bias = torch.zeros(n_layers, options.n_experts, device=device)
        # PyTorch's pipelining begins with an extra micro-batch of arbitrary values, to learn shapes; the queue drops it
        self.counts: list[deque[Tensor]] = [deque(maxlen=options.accumulate) for _ in range(n_layers)]
        for name, mixture in mixtures_of(model):
            i = int(name.split(".")[-2])  # h.3.mlp
            mixture.register_buffer("router_bias", self.bias[i], persistent=False)
            mixture.register_forward_hook(partial(self.count, i))

    def count(self, i: int, mixture: Any, *_: Any) -> None:
        experts = mixture.routing[1].flatten()
        counts = torch.zeros_like(self.bias[i], dtype=torch.int64)
        self.counts[i].append(counts.scatter_add_(0, experts, torch.ones_like(experts)))  # the host does not wait
        mixture.routing = None  # frees its graph too

    @torch.no_grad()
    def update(self) -> None:
        """Update all biases and reset the counts. All ranks must call it together."""
        step = torch.zeros_like(self.bias, dtype=torch.int64)
        for total, counts in zip(step, self.counts, strict=True):
            total += sum(counts, torch.zeros_like(total))
            counts.clear()
        if self.adds_up:
            dist.all_reduce(step)
        for bias, counts in zip(self.bias, step, strict=True):
            bias.copy_(update_router_bias(bias, counts, self.rate))

    def named(self) -> dict[str, Tensor]:
        """The biases by their names in the whole model."""
        return {f"h.{i}.mlp.router_bias": bias for i, bias in enumerate(self.bias)}

    def load(self, bias: list[list[float]]) -> None:
        """Restore the biases of a checkpoint."""
        self.bias.copy_(torch.tensor(bias))
