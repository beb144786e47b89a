"""Inputs of chapter 16: a model of feed-forward blocks, GPUs and their prices, Google's benchmark,
layouts and links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lib.given.models.gpus import GPUS, SHEETS


@dataclass(frozen=True)
class FFNConfig:
    """A stack of feed-forward blocks and nothing else: how CS336's assignment 2 (spring 2025) models a large
    transformer.

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
"""CS336's XXL (assignment 2, spring 2025), with the widths and the depth of Llama 3 405B."""

V5P_PEAK_FLOPS, V5P_BANDWIDTH, V5P_BYTES = 4.6e14, 2 * 9e10, 95e9
"""A TPU v5p: bfloat16 operations a second; bytes a second along one mesh axis, both directions; bytes of memory.

Source: CS336, assignment 2 (spring 2025)."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU that can be rented.

    Attributes:
        name: Its name at the provider.
        memory_gb: Its nominal memory, in 1e9 bytes.
        dollars_per_hour: A list price, for comparison only.
        peak_flops: Dense bfloat16 operations a second by its data sheet (float16 for the T4,
            which has no bfloat16 units).
        bandwidth: Bytes a second of its memory, by the same data sheet.
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
"""The GPUs that ``choose_gpu`` chooses from: those of Modal,
with its list prices of 2025 (``lib.given.models.gpus``).
"""

COMMUNITY_A40 = Card(name="A40", memory_gb=48, dollars_per_hour=0.40, peak_flops=150e12, bandwidth=696e9)
"""A GPU that a private person rents out through RunPod or Vast, $0.40 to $0.47 an hour in 2025 (M. Mboya, Scaling ViTs
across Training Compute)."""


class Choice(NamedTuple):
    """The result of ``choose_gpu``."""

    name: str
    dollars_per_hour: float


class Published(NamedTuple):
    """A row of Google's benchmark: training on CIFAR-10, 50,000 images an epoch, resized to 224 x 224.

    Attributes:
        model, framework, devices: What was trained, with what, and on what.
        batch: Images a step, over all devices.
        precision: Of the products.
        images_per_second, hours_per_epoch, dollars_per_epoch: Of all devices together.
    """

    model: str
    framework: str
    devices: str
    batch: int
    precision: str
    images_per_second: float
    hours_per_epoch: float
    dollars_per_epoch: float


_A100 = "8 A100-40GB"
GOOGLES_TABLE = (
    Published("L/16", "PyTorch DDP", _A100, 512, "float16", 1923, 0.00722251, 0.249),
    Published("L/16", "JAX", "TPU v3-8", 512, "bf16", 750, 0.01851851, 0.1874),
    Published("L/16", "JAX", "TPU v3-32", 2048, "bf16", 3020, 0.00459896, 0.1692),
    Published("H/14", "PyTorch DDP", _A100, 128, "float16", 552, 0.02516103, 0.8676),
    Published("g/14", "PyTorch DDP", _A100, 128, "float16", 408, 0.03404139, 1.1738),
    Published("G/14", "PyTorch DeepSpeed ZeRO-3", _A100, 256, "float16", 195, 0.07122507, 2.4559),
    Published("G/14", "JAX FSDP", _A100, 256, "bf16", 295, 0.04708097, 1.6234),
)
"""From Rai, Xu, Steiner, Wang and Kolesnikov, "ViT PyTorch vs JAX training benchmarks on Vertex AI Training Platform"
(GoogleCloudPlatform/vertex-ai-samples, jax_vit_benchmarking_report.md). Its table has more rows than these."""


class Bandwidths(NamedTuple):
    """How fast one device sends, in bytes a second.

    Attributes:
        within_host: To another device on the same host.
        across_hosts: To a device on another host.
        devices_per_host: Number of devices in a host.
    """

    within_host: float
    across_hosts: float
    devices_per_host: int = 8

    @classmethod
    def of(cls, given: Bandwidths | Mapping[str, float] | Sequence[float] | float) -> Bandwidths:
        """Accepts a ``Bandwidths``, its fields as a mapping or in their order, or one number for every link."""
        if isinstance(given, Mapping):
            return cls(**given)  # type: ignore[arg-type]
        if isinstance(given, Sequence):
            return cls(*given)  # type: ignore[arg-type]
        return cls(given, given)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees of four kinds of parallelism; their product is the number of devices.

    Attributes:
        tensor: Ranks that divide each matrix, C x F/tensor on each; they are neighbours in one host where possible.
        sharded: Ranks that shard the states of their part and train on different tokens.
        data: Copies of that arrangement, which train on different tokens and average their gradients.
        pipeline: Stages, each with its own consecutive layers.
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
        """Bytes a second along an axis: ``within_host`` if all ranks of the axis share a host, else ``across_hosts``.

        Devices are numbered with ``tensor`` fastest, then ``sharded``, ``data`` and ``pipeline``.
        """
        span = 1
        for name in ("tensor", "sharded", "data", "pipeline"):
            span *= getattr(self, name)
            if name == axis:
                break
        return bandwidths.within_host if span <= bandwidths.devices_per_host else bandwidths.across_hosts

    @property
    def flags(self) -> str:
        """The same degrees for ``lib.runs``, where copies are called replicas and micro-batches are counted by
        ``--accumulate``.
        """
        degrees = {"replicate": self.data, "shard": self.sharded, "tensor": self.tensor, "pipeline": self.pipeline}
        degrees["accumulate"] = 4 * self.pipeline if self.pipeline > 1 else 1
        return " ".join(f"--{name} {n}" for name, n in degrees.items() if n > 1)

    def command(self, *arguments: str, devices_per_host: int = 8, program: str = "lib.runs.train_gpt2") -> str:
        """The command that trains with this layout; on several hosts, the one to run on each.

        Args:
            arguments: Further arguments, such as "--model xl".
            devices_per_host: Number of devices in a host.
            program: "lib.runs.train_gpt2" or "lib.runs.train_vit".
        """
        n_hosts = -(-self.n_devices // devices_per_host)
        hosts = f"--nnodes {n_hosts} --rdzv-backend c10d --rdzv-endpoint $FIRST_HOST:29500 " if n_hosts > 1 else ""
        ranks = f"--nproc-per-node {self.n_devices // n_hosts}"
        return " ".join(["torchrun", f"{hosts}{ranks}", "-m", program, *arguments, self.flags]).strip()

    def __str__(self) -> str:
        return f"{self.data} data x {self.sharded} sharded x {self.tensor} tensor x {self.pipeline} pipeline"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of ``plan``: the chosen degrees, their predicted costs, and why they were chosen.

    Attributes:
        data, sharded, tensor, pipeline: The degrees.
        step_s: Predicted seconds a step.
        memory_bytes: Predicted bytes on each device.
        costs: Everything that ``layout_costs`` returned for them.
        reasons: Sentences for a reader.
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
