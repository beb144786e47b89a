"""What chapter 16 reckons with: a model of feed-forward blocks, cards and their prices, Google's table, layouts and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lib.given.models.gpus import GPUS, SHEETS


@dataclass(frozen=True)
class FFNConfig:
    """A stack of blocks that are feed-forward layers and nothing else, as CS336's assignment 2 counts large models.

    Attributes:
        dim: Model width C.
        hidden_dim: Feed-forward width F.
        n_layers: Blocks L, each of two matrices, C x F and F x C, without biases.
    """

    dim: int
    hidden_dim: int
    n_layers: int

    @property
    def n_parameters(self) -> int:
        """Weights of all matrices, 2 L C F."""
        return 2 * self.n_layers * self.dim * self.hidden_dim


XXL = FFNConfig(16384, 53248, 126)
"""The assignment's: the widths and depth of Llama 3 405B."""

V5P_PEAK_FLOPS, V5P_BANDWIDTH, V5P_BYTES = 4.6e14, 2 * 9e10, 95e9
"""A TPU v5p: bfloat16 operations a second, bytes a second of one mesh axis (both directions), memory. CS336, assignment 2."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU that can be rented.

    Attributes:
        name, memory_gb: What it is called, and how many 1e9 bytes it holds by its name.
        dollars_per_hour: What an hour of it costs; a guide, and no offer.
        peak_flops: Dense bfloat16 operations a second by its data sheet (float16 for the T4, which has no bfloat16 units).
        bandwidth: Bytes a second of its memory, by the same sheet.
    """

    name: str
    memory_gb: float
    dollars_per_hour: float
    peak_flops: float
    bandwidth: float


CARDS = tuple(
    Card(
        name=gpu.name,
        memory_gb=gpu.memory_gb,
        dollars_per_hour=gpu.dollars_per_hour,
        peak_flops=SHEETS[gpu.name].peak_flops,
        bandwidth=SHEETS[gpu.name].bandwidth,
    )
    for gpu in GPUS
)
"""The table that ``choose_gpu`` reads: Modal's cards, and its list prices of 2025, as ``lib.given.models.gpus`` keeps them."""

COMMUNITY_A40 = Card(name="A40", memory_gb=48, dollars_per_hour=0.40, peak_flops=150e12, bandwidth=696e9)
"""A private person's card on RunPod or Vast, $0.40 to $0.47 an hour in 2025 (M. Mboya, Scaling ViTs across Training Compute)."""


class Choice(NamedTuple):
    """What ``choose_gpu`` answers."""

    name: str
    dollars_per_hour: float


class Published(NamedTuple):
    """A row of Google's table, as M. Mboya, Scaling ViTs across Training Compute (2025), prints it: 50,000 images an epoch.

    ``slipped`` marks rows whose columns slip in print. In no row do images a second fit the hours: one digit differs.
    """

    model: str
    framework: str
    devices: str
    batch: int
    precision: str
    images_per_second: float
    hours_per_epoch: float
    dollars_per_epoch: float
    slipped: bool = False


_A100 = "8 A100-40GB"
GOOGLES_TABLE = (
    Published("L/16", "PyTorch DDP", _A100, 512, "float16", 1823, 0.00722251, 0.249),
    Published("L/16", "JAX", "TPU v3-8", 512, "bf16", 730, 0.01851851, 0.1874),
    Published("L/16", "JAX", "TPU v3-32", 2048, "bf16", 3320, 0.00459896, 0.1692),
    Published("H/14", "PyTorch DDP", _A100, 128, "float16", 652, 0.02516103, 0.8676),
    Published("g/14", "PyTorch DDP", _A100, 128, "float16", 608, 0.03404139, 1.1738, slipped=True),
    Published("G/14", "PyTorch DeepSpeed ZeRO-3", _A100, 256, "float16", 395, 0.07122507, 2.4559),
    Published("G/14", "JAX FSDP", _A100, 256, "bf16", 395, 0.04709097, 1.6234, slipped=True),
)


class Bandwidths(NamedTuple):
    """How fast one device sends, in bytes a second.

    Attributes:
        within_host: To another device of its host.
        across_hosts: To a device of another host.
        devices_per_host: How many devices share a host.
    """

    within_host: float
    across_hosts: float
    devices_per_host: int = 8

    @classmethod
    def of(cls, given: Bandwidths | Mapping[str, float] | Sequence[float] | float) -> Bandwidths:
        """Take a ``Bandwidths``, its fields as a mapping or in their order, or one number for every link."""
        if isinstance(given, Mapping):
            return cls(**given)  # type: ignore[arg-type]
        if isinstance(given, Sequence):
            return cls(*given)  # type: ignore[arg-type]
        return cls(given, given)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many devices share each kind of work; their number is the product.

    Attributes:
        tensor: Ranks that cut each matrix, C x F/tensor; neighbours in one host where they can be.
        sharded: Ranks that share the states of their part, and take different tokens.
        data: Copies of that, which take different tokens and average their gradients.
        pipeline: Stretches of the layers.
    """

    data: int = 1
    sharded: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def n_devices(self) -> int:
        """The product of the four."""
        return self.data * self.sharded * self.tensor * self.pipeline

    def bandwidth(self, axis: str, bandwidths: Bandwidths) -> float:
        """Bytes a second along an axis: within the host as long as its ranks are in one.

        Devices are numbered with ``tensor`` fastest, then ``sharded``, ``data`` and ``pipeline``.
        """
        span = 1
        for name in ("tensor", "sharded", "data", "pipeline"):
            span *= getattr(self, name)
            if name == axis:
                break
        return bandwidths.within_host if span <= bandwidths.devices_per_host else bandwidths.across_hosts

    def __str__(self) -> str:
        return f"{self.data} data x {self.sharded} sharded x {self.tensor} tensor x {self.pipeline} pipeline"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What ``plan`` answers: the degrees, what they were predicted to cost, and why they were chosen.

    Attributes:
        data, sharded, tensor, pipeline: The degrees.
        step_s: Predicted seconds a step.
        memory_bytes: Predicted bytes a device.
        costs: All that ``layout_costs`` gave for them.
        reasons: Sentences.
    """

    data: int
    sharded: int
    tensor: int
    pipeline: int
    step_s: float
    memory_bytes: float
    costs: dict[str, float]
    reasons: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        """The degrees alone."""
        return Layout(data=self.data, sharded=self.sharded, tensor=self.tensor, pipeline=self.pipeline)
