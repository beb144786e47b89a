"""Measure full training, LoRA and QLoRA of Llama 2 7B's shapes: peak bytes and tokens a second, beside the prediction.

``python -m lib.bench.finetuning`` needs one GPU of 80 GB, some 5 minutes and no network: weights and tokens are random.
It writes ``chapters/measurements/finetuning.json``. ``--device cpu --tiny`` tries it.

1. Predict the bytes of weights, gradients and optimizer: ``finetuning_memory_bytes``.
2. Make the model layer by layer, so that a 16-bit copy of all weights never exists beside the four-bit one.
   Full training has float32 weights, and as many layers as fit (``--full-layers``).
3. Time steps: forward and backward with every block recomputed, and fused AdamW on what is trained.
   The peak of the allocator counts from before the model is made.
4. Padded against packed: the same conversations, one a row or side by side, until the same targets are learned.

``--runs "one GPU" runs/one --runs "two, FSDP" runs/two`` reads finished runs of ``lib.runs.finetune`` instead, on the
machine that made them, and writes ``finetuning_runs.json``: the bytes that each run told before it began and the peak
of rank 0, its losses, and its tokens a second.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.attention import merge_heads, split_heads
from lib.bench.kit import record, seconds_of, spread, wait_for
from lib.finetuning import (
    ALL,
    NF4Linear,
    add_lora,
    finetuning_memory_bytes,
    masked_cross_entropy,
    pack_conversations,
    packed_mask,
)
from lib.given.data.record import MEASUREMENTS
from lib.given.models.llama import LLAMA_2_7B, LlamaConfig
from lib.llama import RMSNorm, TransformerBlock
from lib.rope import apply_rope, precompute_rope
from lib.runs.engine import state as checkpoints
from lib.runs.engine.log import read_log
from lib.runs.flags import ProgramParser, whole

METHODS = ("full", "lora", "qlora")


class Model(nn.Module):
    """Llama's parameters with PyTorch's attention, each block recomputed in the backward pass.

    Args:
        config: Sizes; the tables and every block are made on the device, one after the other.
        method: "full" in float32 under autocast; "lora" in bfloat16; "qlora" with the blocks' matrices in four bits.
        r: Rank of the adapters.
        device: Where the model lives.
    """

    def __init__(self, config: LlamaConfig, method: str, r: int, device: str):
        super().__init__()
        self.config, self.method = config, method
        dtype = torch.float32 if method == "full" else torch.bfloat16
        with torch.device(device):
            self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim, dtype=dtype)
            self.norm = RMSNorm(config.dim, config.norm_eps).to(dtype)
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False, dtype=dtype)
            self.layers = nn.ModuleList()
            for _ in range(config.n_layers):
                block = TransformerBlock(config).to(dtype)
                if method == "qlora":
                    in_four_bits(block)
                self.layers.append(block)
        if method != "full":
            add_lora(self, r, 2 * r, ALL)
        self.rope = precompute_rope(config.head_dim, config.context_len, config.rope_theta, device=device)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits of rows ``[3, B, T]``: inputs, documents and positions."""
        inputs, documents, positions = rows
        mask = packed_mask(documents)
        x = self.tok_embeddings(inputs)
        x.requires_grad_(True)  # so that frozen tables do not end the recomputation's graph
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, mask, positions, use_reentrant=False)
        return self.output(self.norm(x))

    def block(self, layer: Any, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        attention, h = layer.attention, layer.attention_norm(x)
        q, k, v = (
            split_heads(getattr(attention, name)(h), n)
            for name, n in (("wq", self.config.n_heads), ("wk", self.config.n_kv_heads), ("wv", self.config.n_kv_heads))
        )
        q, k = (self.rotated(part, positions) for part in (q, k))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + attention.wo(merge_heads(heads))
        return x + layer.feed_forward(layer.ffn_norm(x))

    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads ``[B, H, T, D]``, of which each row has positions of its own."""
        rows = zip(heads.transpose(1, 2), positions, strict=True)
        return torch.cat([apply_rope(row[None], self.rope[at]) for row, at in rows]).transpose(1, 2)


def in_four_bits(block: Any) -> None:
    """Replace the block's seven matrices by `NF4Linear`."""
    for part in (block.attention, block.feed_forward):
        for name, layer in list(part.named_children()):
            if name in ALL:
                setattr(part, name, NF4Linear(layer))  # type: ignore[arg-type]


def trainer(model: Model, o: argparse.Namespace) -> Callable[[Tensor, Tensor], None]:
    """One step of forward, backward and AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=o.device == "cuda")

    def step(rows: Tensor, targets: Tensor) -> None:
        with torch.autocast(o.device, torch.bfloat16):
            logits = model(rows)
        masked_cross_entropy(logits, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def conversations(o: argparse.Namespace, vocab_size: int) -> list[tuple[list[int], list[int]]]:
    """Random ids; lengths are log-normal around an eighth of a row, and the last half of each is learned."""
    chance = torch.Generator().manual_seed(0)
    spreads = torch.randn(o.conversations, generator=chance)
    lengths = (o.length / 8 * (0.8 * spreads).exp()).round().clamp(4, o.length + 1).int().tolist()
    ids = [torch.randint(vocab_size, (n,), generator=chance).tolist() for n in lengths]
    return [(row, [0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2)) for row in ids]


def rows_of(given: list, o: argparse.Namespace, way: str) -> dict[str, Tensor]:
    """The conversations packed, or one in each row."""
    if way == "packed":
        return pack_conversations(given, o.length)
    alone = [pack_conversations([one], o.length) for one in given]
    return {name: torch.cat([rows[name] for rows in alone]) for name in alone[0]}


def batches(rows: dict[str, Tensor], o: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ``o.batch`` rows on the device, each cut after its longest row."""
    for start in range(0, len(rows["inputs"]), o.batch):
        part = {name: values[start : start + o.batch] for name, values in rows.items()}
        longest = int((part["documents"] >= 0).sum(1).max())
        inputs = torch.stack([part[name][:, :longest] for name in ("inputs", "documents", "positions")])
        yield inputs.to(o.device), part["targets"][:, :longest].to(o.device)


def measure_method(method: str, config: LlamaConfig, o: argparse.Namespace) -> dict[str, Any]:
    """Bytes predicted and found, and tokens a second, of one method on packed rows that are full."""
    sizes = replace(config, n_layers=min(o.full_layers, config.n_layers)) if method == "full" else config
    if o.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = Model(sizes, method, o.r, o.device)
    step = trainer(model, o)
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (o.batch, o.length + 1), generator=chance).to(o.device)
    positions = torch.arange(o.length, device=o.device).expand(o.batch, -1)
    rows = torch.stack([ids[:, :-1], torch.zeros_like(positions), positions])
    for _ in range(2):
        step(rows, ids[:, 1:])
    seconds = [seconds_of(lambda: step(rows, ids[:, 1:]), o.device) for _ in range(o.rounds)]
    wait_for(o.device)
    found: dict[str, Any] = {
        "n_layers": sizes.n_layers,
        "predicted_bytes": finetuning_memory_bytes(sizes, method, o.r),
        "bytes": bytes_of(model),
        "step_s": spread(seconds),
        "tokens_per_s": o.batch * o.length / spread(seconds)["median"],
    }
    if o.device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    print(method, found, flush=True)
    return found


def bytes_of(model: nn.Module) -> dict[str, int]:
    """Bytes of the model's tensors, and of the gradients and moments of what is trained."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = sum(x.numel() * x.element_size() for x in [*model.parameters(), *model.buffers()])
    return {"weights": weights, "gradients": 4 * trained, "optimizer": 8 * trained}


def measure_packing(config: LlamaConfig, o: argparse.Namespace) -> dict[str, Any]:
    """Seconds in which LoRA learns the same conversations, padded to the longest of each batch, and packed."""
    given = conversations(o, config.vocab_size)
    model = Model(config, "lora", o.r, o.device)
    step, found = trainer(model, o), dict[str, Any]()
    for way in ("padded", "packed"):
        rows = rows_of(given, o, way)
        cut = list(batches(rows, o))
        for inputs, targets in cut[:1]:
            step(inputs, targets)

        def run(cut: list = cut) -> None:
            for inputs, targets in cut:
                step(inputs, targets)

        learned = sum(int((targets != -100).sum()) for _, targets in cut)
        positions = sum(targets.numel() for _, targets in cut)
        seconds = seconds_of(run, o.device)
        found[way] = {"learned": learned, "positions": positions, "steps": len(cut), "seconds": seconds}
    print("packing", found, flush=True)
    return found


def read(folder: Path) -> dict[str, Any]:
    """What a finished run of ``lib.runs.finetune`` logged.

    Raises:
        SystemExit: the folder has no log of such a run, or no checkpoint.
    """
    places: Any = SimpleNamespace(checkpoint=folder / "checkpoint", checkpoint_flag="--runs")
    lines, looks = (read_log(folder / "log.jsonl", what) for what in ("loss", "held_out_loss"))
    found = checkpoints.peek(places)
    if not lines or not looks or found is None:
        raise SystemExit(f"{folder}: expected the log and the checkpoint of a run of lib.runs.finetune")
    run, rate = found["run"], next(name for name in ("tokens_per_s", "pairs_per_s") if name in lines[-1])
    return {
        "settings": {name: run[name] for name in ("method", "config", "batch", "length", "items", "optimizer", "seed")},
        "ranks": lines[-1]["ranks"],
        "told_bytes": lines[-1]["memory_told_bytes"],
        "peak_bytes": max(line["memory_peak_bytes"] for line in lines),
        "losses": [line["loss"] for line in lines],
        "held_out": [{name: look[name] for name in ("step", "held_out_loss")} for look in looks],
        rate: spread([line[rate] for line in lines]),
    }


def make_parser() -> ProgramParser:
    """All flags of this program."""
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=(*METHODS, "packing", []), default=[], help="by default all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the program")
    parser.add_argument("--r", type=whole(1), default=16, help="rank of the adapters")
    parser.add_argument("--batch", type=whole(1), default=4, help="rows in a step")
    parser.add_argument("--length", type=whole(8), default=2048, help="positions in a row")
    parser.add_argument("--full-layers", type=whole(1), default=16, help="layers of full training, which has to fit")
    parser.add_argument("--conversations", type=whole(1), default=256, help="conversations of the packed comparison")
    parser.add_argument("--rounds", type=whole(1), default=8, help="how many steps are timed")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the record is written")
    parser.add_argument("--runs", nargs=2, action="append", metavar=("NAME", "FOLDER"),
                        help="read a finished run in place of measuring; may be repeated")  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> None:
    o = make_parser().parse_args(arguments)
    if o.runs:
        record("finetuning_runs", {name: read(Path(folder)) for name, folder in o.runs}, o.folder)
        return
    small = LlamaConfig(vocab_size=128, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=128, context_len=64)
    config = replace(small if o.tiny else LLAMA_2_7B, context_len=o.length)
    names = ("tiny", "r", "batch", "length", "full_layers", "conversations", "rounds")
    results: dict[str, Any] = {"settings": {name: getattr(o, name) for name in names}, "methods": {}}
    for part in o.parts or (*METHODS, "packing"):
        if part == "packing":
            results["packing"] = measure_packing(config, o)
        else:
            results["methods"][part] = measure_method(part, config, o)
        record("finetuning", results, o.folder)


if __name__ == "__main__":
    main()
