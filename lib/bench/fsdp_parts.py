"""Time the parts of a step in chapter 12's comparison that need no communication: computing, and the optimizer.

The optimizer updates all parameters, or a rank's share of them. ``python -m lib.bench.fsdp_parts`` runs on one GPU and
writes ``chapters/measurements/fsdp_parts.json``; ``--tiny --device cpu`` tries the program without a GPU. ZeRO-3
computes with bfloat16 parameters, DDP with float32 parameters under autocast.
"""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib.bench.fsdp import (
    DTYPE,
    N_ROUNDS,
    N_WARMUP,
    SIZES,
    TINY,
    make_loss,
    make_model,
    predict,
    use_fused_parts,
)
from lib.bench.kit import measure, record, wait_for
from lib.given.data.record import MEASUREMENTS
from lib.given.models.gpt2 import GPT2Config
from lib.runs.flags import ProgramParser


def computing(way: str, config: Any, batch: int, device: torch.device) -> Callable[[], None]:
    """A forward and a backward, as the units of ZeRO-3 compute them ("bfloat16") or as DDP does ("autocast")."""
    model, loss = make_model(config, device), make_loss(config, batch, device)
    if way == "bfloat16":
        model = model.to(DTYPE)
        if not isinstance(config, GPT2Config):  # the wrapper casts the images; tokens stay whole numbers
            model.register_forward_pre_hook(lambda _, args: tuple(x.to(DTYPE) for x in args))

    def run() -> None:
        with torch.autocast(device.type, DTYPE, enabled=way == "autocast"):
            value: Tensor = loss(model)
        value.backward()
        model.zero_grad()
        wait_for(device)

    return run


def updating(n: int, device: torch.device) -> Callable[[], None]:
    """AdamW's step over ``n`` float32 parameters in a row."""
    row = nn.Parameter(torch.zeros(n, device=device))
    row.grad = torch.ones_like(row)
    optimizer = torch.optim.AdamW([row], lr=1e-5, fused=device.type == "cuda")

    def run() -> None:
        optimizer.step()
        wait_for(device)

    return run


def main() -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small models, to try the program")
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    options = parser.parse_args()
    device = torch.device(options.device)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for attention in ("written out", "fused"):
        if attention == "fused":
            use_fused_parts()
        for name, (config, batch) in (TINY if options.tiny else SIZES).items():
            parts = found.setdefault(name, {}).setdefault(attention, {})
            parts["predicted_bytes"] = predict(config, batch, 4, device)
            n = parts["predicted_bytes"]["n_parameters"]
            makers = {way: partial(computing, way, config, batch, device) for way in ("bfloat16", "autocast")}
            makers |= {f"optimizer, 1/{r}": partial(updating, int(n) // r, device) for r in (1, 2, 4)}
            for part, make in makers.items():
                parts[part] = measure(make(), 3 * N_ROUNDS, N_WARMUP)
                gc.collect()  # free this part's memory before the next is measured
                print(name, attention, part, parts[part], flush=True)
    record("fsdp_parts", {"n_rounds": 3 * N_ROUNDS, "n_warmup": N_WARMUP, "models": found}, options.folder)


if __name__ == "__main__":
    main()
