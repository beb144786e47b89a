"""What a run can be asked for: the values of its flags, as one object."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

AVERAGING = ("auto", "copies", "collectives")
KINDS = ("pipeline", "replicate", "context", "shard", "expert", "tensor")
"""Kinds of parallelism, each an axis of the mesh of ranks.

The last axis joins neighbours: ranks that divide a layer communicate most.
"""
STRATEGIES = {"single": None, "ddp": "replicate", "fsdp": "shard", "tp": "tensor", "cp": "context", "pp": "pipeline"}
"""Names of the simple cases: one kind over all ranks."""
PRECISIONS = ("float32", "tf32", "bf16", "float16")
OPTIMIZERS = ("ours", "adamw", "sgd", "muon")
CONTENTS = "contents of the data"
"""Entry of a run's description that holds the digest of its data and tokenizer."""
HEAD = 64
"""Width of a head of GPT-2, in all of its sizes."""
DECAYED = 5
"""With ``--schedule wsd`` the decay takes one in so many steps, the last ones."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of a run; ``--help`` explains each.

    None means that the value follows from the others, and `lib.runs.engine.request.parse` fills it in.
    """

    checkpoint_flag: ClassVar[str] = "--checkpoint"

    model: str
    strategy: str | None
    replicate: int | None
    shard: int | None
    tensor: int | None
    context: int | None
    pipeline: int | None
    expert: int | None
    engine: str
    precision: str
    path: str
    attention: str
    compile: str | None
    graph: bool
    batch: int
    accumulate: int
    steps: int
    lr: float
    min_lr: float
    schedule: str
    warmup: int
    weight_decay: float
    clip: float
    optimizer: str | None
    muon_lr: float | None
    bucket_mb: float
    averaging: str
    data: str | None
    column: str | None
    limit: int | None
    items: int | None
    seed: int
    device: str
    threads: int
    deterministic: bool
    checkpoint: Path | None
    save_every: int
    log: Path | None
    tensorboard: Path | None
    quiet: bool
    peak_tflops: float | None
    image_size: int | None = None
    classes: int | None = None
    patch_size: int | None = None
    length: int | None = None
    family: str | None = None
    window: int | None = None
    interval: int | None = None
    dim: int | None = None
    n_layers: int | None = None
    tokenizer: str | None = None
    n_experts: int | None = None
    top_k: int | None = None
    bias_rate: float | None = None
    eval_every: int | None = None
    held_out: float | None = None
    sample_every: int | None = None
    prompt: str | None = None
    sample_tokens: int = 64
    eval_tasks: list[str] | None = None
    eval_tasks_every: int | None = None
    export: Path | None = None
    wandb: str | None = None

    @property
    def ours(self) -> bool:
        return self.engine == "ours"

    def uses(self, *kinds: str) -> bool:
        """Whether ranks divide the work in one of these ways; one rank counts if ``--strategy`` asks for it."""
        named = STRATEGIES[self.strategy] if self.strategy else None
        return any(kind == named or (getattr(self, kind) or 1) != 1 for kind in kinds)

    @property
    def shards(self) -> bool:
        """Whether parameters are divided by ``FullySharded`` or ``fully_shard``,
        which then choose the dtype of the products too.

        PyTorch's DDP supports neither divided layers nor stages. There ``fully_shard``, with a single shard, averages
        over the copies.
        """
        return self.uses("shard") or (
            not self.ours and self.uses("replicate", "context") and self.uses("tensor", "pipeline")
        )

    @property
    def copies(self) -> bool:
        """Whether all ranks keep the whole model, and our engine averages their gradients while backward goes on."""
        divided = self.uses("shard", "tensor", "pipeline", "expert")
        return self.ours and self.uses("replicate", "context") and not divided

    @property
    def only_shards(self) -> bool:
        """Whether our engine divides the parameters over all ranks, and nothing else divides or copies the model."""
        return self.ours and self.uses("shard") and not self.uses(*(kind for kind in KINDS if kind != "shard"))

    @property
    def is_parallel(self) -> bool:
        return self.uses(*KINDS)

    def named(self, kind: str) -> str:
        """The flag that asks for this kind, as it was given."""
        return f"--strategy {self.strategy}" if self.strategy else f"--{kind} {getattr(self, kind)}"

    @property
    def how(self) -> str:
        """All flags that say how the ranks divide the work."""
        if self.strategy:
            return f"--strategy {self.strategy}"
        return " ".join(self.named(kind) for kind in KINDS if self.uses(kind)) or "--strategy single"
