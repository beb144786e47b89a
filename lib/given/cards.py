"""The cards that Modal rents, and about what an hour of each costs: one table for chapters 4 and 16 and for the programs."""

from dataclasses import dataclass


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
