"""The cards that Modal rents, about what an hour of each costs, and what their data sheets promise: one table for chapters and programs."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A card that Modal rents, and about what an hour of it costs: a guide for choosing; modal.com/pricing has today's price."""

    name: str
    memory_gb: int
    dollars_per_hour: float


GPUS = (
    Gpu(name="T4", memory_gb=16, dollars_per_hour=0.59),
    Gpu(name="L4", memory_gb=24, dollars_per_hour=0.80),
    Gpu(name="A10G", memory_gb=24, dollars_per_hour=1.10),
    Gpu(name="L40S", memory_gb=48, dollars_per_hour=1.95),
    Gpu(name="A100-40GB", memory_gb=40, dollars_per_hour=2.10),
    Gpu(name="A100-80GB", memory_gb=80, dollars_per_hour=2.50),
    Gpu(name="H100", memory_gb=80, dollars_per_hour=3.95),
    Gpu(name="H200", memory_gb=141, dollars_per_hour=4.54),
    Gpu(name="B200", memory_gb=180, dollars_per_hour=6.25),
)


class Sheet(NamedTuple):
    """What the maker says of a card: operations a second of dense products, and bytes a second.

    Attributes:
        peak_flops: With factors of 16 bits (float16 for the T4, which has no bfloat16 units).
        bandwidth: Of its memory.
        tf32_flops, float32_flops: With TF32's and float32's, where a program of this book asks for them.
        device: What the name that PyTorch gives it contains; of H100, the one with NVLink.
    """

    peak_flops: float
    bandwidth: float
    tf32_flops: float | None = None
    float32_flops: float | None = None
    device: str | None = None


SHEETS = {
    "T4": Sheet(65e12, 320e9),
    "L4": Sheet(121e12, 300e9),
    "A10G": Sheet(70e12, 600e9),
    "L40S": Sheet(362e12, 864e9),
    "A100-40GB": Sheet(312e12, 1555e9, 156e12, 19.5e12, "A100"),
    "A100-80GB": Sheet(312e12, 2039e9, 156e12, 19.5e12, "A100"),
    "H100": Sheet(989.4e12, 3350e9, 494.7e12, 66.9e12, "H100 80GB HBM3"),
    "H200": Sheet(989.4e12, 4800e9, 494.7e12, 66.9e12, "H200"),
    "B200": Sheet(2250e12, 8000e9),
}
"""By NVIDIA's data sheets (AWS's figures for its A10G). Where a sheet prints the peak with sparsity only, as for L4, H100, H200 and B200, this is half of it."""


def sheet_of(device: str) -> Sheet | None:
    """Of the card with this name of PyTorch's, as "NVIDIA H200"; None for one that no program here knows."""
    return next((sheet for sheet in SHEETS.values() if sheet.device and sheet.device in device), None)
