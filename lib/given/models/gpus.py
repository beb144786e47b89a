"""The GPUs that Modal rents out, their prices, and their data sheets: one table for chapters and programs."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that Modal rents out. The price is a guide for choosing; modal.com/pricing has today's."""

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
    """A GPU's data sheet.

    Attributes:
        peak_flops: Operations a second of dense bfloat16 products (float16 for the T4, which has no bfloat16 units).
        bandwidth: Bytes a second of its memory.
        tf32_flops, float32_flops: Operations a second in TF32 and float32,
            given only where a program of this book needs them.
        device: A part of the name that PyTorch reports for it; for H100, the version with NVLink.
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
"""From NVIDIA's data sheets (AWS's figures for its A10G).

Where a sheet prints only the peak with sparsity, as for L4, H100, H200 and B200, the number here is half of that.
"""


def sheet_of(device: str) -> Sheet | None:
    """The data sheet of the GPU with this PyTorch name, such as "NVIDIA H200", or None if the book has none."""
    return next((sheet for sheet in SHEETS.values() if sheet.device and sheet.device in device), None)
