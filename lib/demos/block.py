"""One block of Llama 2 on two ranks: what each of its parts holds, writes and sends, by the book's own functions."""

import torch

from lib.given.models.llama import LLAMA_2_7B, LlamaConfig
from lib.given.show.block import Part, megabytes
from lib.llama import TransformerBlock
from lib.tensor_parallel import llama_plan, tensor_parallel_bytes

BYTES = 2
"""Of a number in bfloat16."""


def weight_bytes(config: LlamaConfig, n_ranks: int) -> dict[str, int]:
    """Bytes that each rank holds of every weight of a block: a share of those that ``llama_plan`` cuts, or all."""
    with torch.device("meta"):  # shapes without values
        block = TransformerBlock(config)
    cut = {name.rpartition(".")[2] for name in llama_plan(config) if name.startswith("layers.*.")}
    found = {}
    for name, weight in block.named_parameters():
        layer = name.split(".")[-2]
        found[layer] = weight.numel() * BYTES // (n_ranks if layer in cut and weight.ndim == 2 else 1)
    return found


def parts(config: LlamaConfig = LLAMA_2_7B, length: int = 4096, n_ranks: int = 2) -> list[Part]:
    """The parts of a block in the forward pass of one sequence, tensor parallel over ``n_ranks``."""
    held, stream = weight_bytes(config, n_ranks), length * config.dim * BYTES
    hidden = length * config.hidden_dim // n_ranks * BYTES
    sent = tensor_parallel_bytes(config, 1, length, n_ranks) // (4 * config.n_layers)  # one of the four all-reduces
    scores = config.n_heads // n_ranks * length**2 * BYTES
    heads = [f"heads {h[0]} to {h[-1]}" for h in torch.arange(config.n_heads).chunk(n_ranks)]
    columns, rows = ([f"{what} of rank {rank}" for rank in range(n_ranks)] for what in ("columns", "rows"))
    whole, total = ["all of it"] * n_ranks, ["the ranks' parts are added"]
    share, keys = stream // n_ranks, stream * config.n_kv_heads // config.n_heads // n_ranks
    flash = f"FlashAttention (15): {megabytes(scores)} of scores never leave the chip"
    tiles, one_pass, ring = "matmul in tiles (14)", "RMSNorm in one pass (14)", "ring (9), placed by chapter 13"
    return [
        Part("norm", "whole", whole, one_pass, held["attention_norm"], stream),
        Part("Q, K, V", "share", heads, tiles, held["wq"] + held["wk"] + held["wv"], share + 2 * keys),
        Part("rotate Q, K", "share", heads, "RoPE (2)", 0, share + keys),
        Part("attention", "share", heads, flash, 0, share),
        Part("output", "share", rows, tiles, held["wo"], stream),
        Part("all-reduce", "sum", total, ring, 0, 0, sent),
        Part("norm", "whole", whole, one_pass, held["ffn_norm"], stream),
        Part("gate, up", "share", columns, tiles, held["w1"] + held["w3"], 2 * hidden),
        Part("SiLU(gate) × up", "share", columns, "SwiGLU (4)", 0, hidden),
        Part("down", "share", rows, tiles, held["w2"], stream),
        Part("all-reduce", "sum", total, ring, 0, 0, sent),
    ]
