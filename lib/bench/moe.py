"""Measure mixtures of Mixtral 8x7B's and DeepSeek-V3's sizes: grouped products on one GPU, and experts on several.

``python -m lib.bench.moe grouped`` needs one GPU and about a minute.
It compares the book's kernels with a loop, with padding and with PyTorch's own grouped product:
first one product, then Mixtral's whole layer, in which Transformers' block with the same weights competes too.
It writes ``chapters/measurements/moe.json``.
``python -m lib.bench.moe parallel`` starts a rank on each of 4 GPUs.
It times forward and backward of a layer with its experts spread over the ranks, the layer's all-to-alls alone,
and a dense layer of the same active size, and writes ``moe_parallel.json``.
``--device cpu --tiny`` tries either of them, the second one with gloo.
"""

import argparse
import dataclasses
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lib.bench.kit import device_seconds, in_turns, record, seconds_of, slowest, spawn, spread
from lib.given.data.record import MEASUREMENTS
from lib.given.kernels.grouped import launch_grouped, with_gradients
from lib.given.models.moe import DEEPSEEK_V3, MIXTRAL_8X7B, MoEConfig
from lib.given.parallel.experts import AllToAll
from lib.llama import SwiGLU
from lib.moe import (
    ExpertParallelMoE,
    MoE,
    convert_hf_state_dict,
    grouped_matmul,
    grouped_matmul_kernel,
    sort_by_expert,
)
from lib.runs.flags import ProgramParser, whole

N_ROUNDS, N_WARMUP = 12, 2
TOKENS_PER_RANK = 4096
PARALLEL = ("experts on ranks", "all-to-alls alone", "dense layer")
TOKENS = {"Mixtral 8x7B": (1024, 8192), "DeepSeek-V3": (4096, 16_384)}
CONFIGS = {"Mixtral 8x7B": MIXTRAL_8X7B, "DeepSeek-V3": DEEPSEEK_V3}
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def loop(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """One product for each expert; the host waits for the counts."""
    return torch.cat([rows @ weight for rows, weight in zip(x.split(counts.tolist()), weights, strict=True)])


def padded(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """One batched product, in which every expert has as many rows as the busiest; the host waits for that number."""
    longest = int(counts.max())
    first = counts.cumsum(0) - counts
    expert = torch.repeat_interleave(torch.arange(len(counts), device=x.device), counts, output_size=len(x))
    place = expert * longest + torch.arange(len(x), device=x.device) - first[expert]
    rows = x.new_zeros(len(counts) * longest, x.shape[1]).index_copy(0, place, x)
    return torch.bmm(rows.view(len(counts), longest, -1), weights).flatten(0, 1)[place]


def pytorchs(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """PyTorch's grouped product."""
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return product(x, weights, offs=counts.cumsum(0).to(torch.int32))


def by_the_chapters_kernel(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The kernel of chapter 19, even where `grouped_matmul` would choose another."""
    if not x.is_cuda:
        return grouped_matmul(x, weights, counts)
    return with_gradients(partial(launch_grouped, grouped_matmul_kernel), x, weights, counts)


PRODUCTS: dict[str, Product] = {
    "ours": grouped_matmul,
    "chapter's kernel": by_the_chapters_kernel,
    "PyTorch": pytorchs,
    "loop": loop,
    "padded": padded,
}


def shrunk(config: MoEConfig) -> MoEConfig:
    """A size with which to try the program."""
    return dataclasses.replace(config, dim=32, hidden_dim=16)


def inputs(config: MoEConfig, n_tokens: int, balanced: bool, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted rows, the first matrices of all experts, and the counts of a router with random, or
    random and uneven, logits.
    """
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(n_tokens, config.n_experts, device=device, generator=generator)
    if not balanced:
        logits -= torch.linspace(0, 2, config.n_experts, device=device)
    _, counts = sort_by_expert(logits.topk(config.k).indices, config.n_experts)
    x = torch.randn(n_tokens * config.k, config.dim, device=device, generator=generator).bfloat16()
    shape = (config.n_experts, config.dim, config.hidden_dim)
    weights = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, config.dim**-0.5, generator=generator)
    return x, weights, counts


def seconds(run: Callable[[], object], device: str, cycles: int = 1_000_000) -> float:
    """Time of one call on the device.

    On a GPU, other work fills the first half millisecond, or as many clock cycles as are given, so that the host runs
    ahead, as it does in training.
    """
    return device_seconds(run, device, before=lambda: torch.cuda._sleep(cycles))


def forward(product: Product, x: Tensor, weights: Tensor, counts: Tensor) -> None:
    with torch.no_grad():
        product(x, weights, counts)


def forward_and_backward(product: Product, x: Tensor, weights: Tensor, counts: Tensor) -> None:
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    out = product(x, weights, counts)
    out.backward(torch.ones_like(out))


def times(given: tuple[Tensor, Tensor, Tensor]) -> dict[str, dict]:
    """For forward, and forward with backward, the seconds of each product, in random order in each round."""
    found = {}
    for name, run in (("forward", forward), ("forward and backward", forward_and_backward)):
        runs = {who: partial(run, product, *given) for who, product in PRODUCTS.items()}
        samples = in_turns(runs, partial(seconds, device=given[0].device.type), N_ROUNDS, N_WARMUP)
        found[name] = {who: spread(values) for who, values in samples.items()}
    return found


def case(name: str, n_tokens: int, balanced: bool, options: argparse.Namespace) -> dict:
    config = shrunk(CONFIGS[name]) if options.tiny else CONFIGS[name]
    given = x, weights, counts = inputs(config, n_tokens, balanced, options.device)
    expected = pytorchs(*given).float()
    apart = {who: (product(*given).float() - expected).abs().max().item() for who, product in PRODUCTS.items()}
    flops = 2 * len(x) * weights.shape[1] * weights.shape[2]
    facts = {"model": name, "n_tokens": n_tokens, "balanced": balanced, "rows": len(x), "busiest": int(counts.max())}
    return facts | {"flops": flops, "differs_by": apart, "seconds": times(given)}


def grouped(options: argparse.Namespace) -> None:
    cases = []
    for name, lengths in TOKENS.items():
        for n_tokens in (64,) if options.tiny else lengths:
            for balanced in (True, False):
                cases.append(case(name, n_tokens, balanced, options))
                taken = {who: f"{1e6 * t['median']:.0f}" for who, t in cases[-1]["seconds"]["forward"].items()}
                print(name, n_tokens, balanced, taken, flush=True)
                if options.device == "cuda":
                    torch.cuda.empty_cache()
    layers = [layer_case(n_tokens, options) for n_tokens in ((64,) if options.tiny else TOKENS["Mixtral 8x7B"])]
    record("moe", {"dtype": "bfloat16", "n_rounds": N_ROUNDS, "cases": cases, "layers": layers}, options.folder)


# ---- a whole layer on one GPU ----------------------------------------------------------------------------------------


class LayerBy(MoE):
    """Another layer's weights, whose experts' products are computed by ``product``."""

    w1: Tensor
    w2: Tensor
    w3: Tensor

    def __init__(self, layer: MoE, product: Product):
        nn.Module.__init__(self)
        self.__dict__.update(vars(layer))
        self.product = product

    def compute_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate = F.silu(self.product(rows, self.w1, counts))
        return self.product(gate * self.product(rows, self.w3, counts), self.w2, counts)


def transformers_block(config: MoEConfig, way: str) -> nn.Module:
    """Transformers' block of Mixtral; ``way`` is its experts' implementation, "eager" (a loop) or "grouped_mm"."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    settings = MixtralConfig(
        hidden_size=config.dim,
        intermediate_size=config.hidden_dim,
        num_local_experts=config.n_experts,
        num_experts_per_tok=config.k,
    )
    settings._experts_implementation = way
    block = MixtralSparseMoeBlock(settings)
    for name, parameter in block.named_parameters():
        width = config.hidden_dim if "down" in name else config.dim
        nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)
    return block


def layers_alike(config: MoEConfig, device: str) -> dict[str, nn.Module]:
    """Mixtral's layer in each way, all with the same weights in bfloat16."""
    with torch.device(device):
        looped, joined = (transformers_block(config, way).bfloat16() for way in ("eager", "grouped_mm"))
        joined.load_state_dict(looped.state_dict(), assign=True)
        ours = MoE(config.dim, config.hidden_dim, config.n_experts, config.k).bfloat16()
    ours.load_state_dict(convert_hf_state_dict(looped.state_dict()), assign=True)
    found: dict[str, nn.Module] = {"ours": ours, "PyTorch's product": LayerBy(ours, pytorchs)}
    found["padded"] = LayerBy(ours, padded)
    return found | {"Transformers, loop": looped, "Transformers, grouped": joined}


def layer_case(n_tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward of Mixtral's layer in each way, in turns."""
    config = shrunk(MIXTRAL_8X7B) if options.tiny else MIXTRAL_8X7B
    torch.manual_seed(0)
    layers = layers_alike(config, options.device)
    x = torch.randn(1, n_tokens, config.dim, dtype=torch.bfloat16, device=options.device).requires_grad_()
    with torch.no_grad():
        expected = layers["Transformers, loop"](x).float()
        apart = {who: ((layer(x) - expected).norm() / expected.norm()).item() for who, layer in layers.items()}
    timed = partial(seconds, device=options.device, cycles=16_000_000)  # 8 ms: a layer has some hundred launches
    samples = in_turns({who: partial(step, layer, x) for who, layer in layers.items()}, timed, N_ROUNDS, N_WARMUP)
    flops = 3 * 3 * 2 * n_tokens * config.k * config.dim * config.hidden_dim
    taken = {who: spread(values) for who, values in samples.items()}
    print("layer", n_tokens, {who: f"{1e3 * t['median']:.2f} ms" for who, t in taken.items()}, flush=True)
    return {"model": "Mixtral 8x7B", "n_tokens": n_tokens, "flops": flops, "differs_by": apart, "seconds": taken}


# ---- experts on ranks ------------------------------------------------------------------------------------------------


def exchanges(layer: ExpertParallelMoE, x: Tensor) -> tuple[Callable[[], None], int]:
    """The five all-to-alls of a step and nothing else, with the rows that the layer sends;
    and how many rows arrive at this rank.
    """
    local: Any = layer.local
    with torch.no_grad():
        _, experts = local.route(x)
    order, to_each = sort_by_expert(experts, local.router.out_features)
    from_each = torch.empty_like(to_each)
    dist.all_to_all_single(from_each, to_each)
    send, receive = (n.view(dist.get_world_size(), -1).sum(1).tolist() for n in (to_each, from_each))
    rows = x.detach()[order // experts.shape[1]]

    def run() -> None:
        dist.all_to_all_single(from_each, to_each)
        for _ in ("forward", "backward"):
            AllToAll.apply(AllToAll.apply(rows, send, receive, None), receive, send, None)

    return run, sum(receive)


def step(layer: nn.Module, x: Tensor) -> None:
    """Forward and backward; then the gradients are freed, as an optimizer would after its step."""
    out = layer(x)
    out.backward(torch.ones_like(out))
    layer.zero_grad(set_to_none=True)
    x.grad = None


def parallel_case(config: MoEConfig, n_tokens: int, device: torch.device) -> dict[str, Any]:
    """Times of the slowest rank in each round; every rank has ``n_tokens`` tokens of its own."""
    torch.manual_seed(0)  # the whole layer is the same on every rank
    with device:
        whole = MoE(config.dim, config.hidden_dim, config.n_experts, config.k, config.n_shared)
        layer = ExpertParallelMoE(whole)
        del whole
        dense = SwiGLU(config.dim, (config.k + config.n_shared) * config.hidden_dim)
        torch.manual_seed(1 + dist.get_rank())
        x = torch.randn(n_tokens, config.dim).requires_grad_()
    messages, received = exchanges(layer, x)
    calls: tuple[Callable[[], None], ...] = (partial(step, layer, x), messages, partial(step, dense, x))
    ways = dict(zip(PARALLEL, calls, strict=True))
    samples = in_turns(ways, partial(seconds_of, device=device, on_ranks=True), N_ROUNDS, N_WARMUP)
    most = int(slowest(received, device))
    facts = {"tokens_per_rank": n_tokens, "rows_sent_per_rank": n_tokens * config.k, "rows_at_busiest_rank": most}
    return facts | {"seconds": {name: spread(values) for name, values in samples.items()}}


def measure_parallel(rank: int, device: torch.device, options: argparse.Namespace) -> None:
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    torch.set_default_dtype(dtype)
    results: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "n_ranks": options.ranks, "cases": []}
    for name, config in CONFIGS.items():
        chosen, n_tokens = (shrunk(config), 64) if options.tiny else (config, TOKENS_PER_RANK)
        results["cases"].append({"model": name} | parallel_case(chosen, n_tokens, device))
        if options.device == "cuda":
            torch.cuda.empty_cache()
        if rank == 0:
            taken = {who: f"{1e3 * t['median']:.2f} ms" for who, t in results["cases"][-1]["seconds"].items()}
            print(name, taken, flush=True)
            record("moe_parallel", results, options.folder)


def main() -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("grouped", "parallel"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--ranks", type=whole(1), default=4, help="of parallel; the number of experts must be a multiple"
    )
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program out")
    options = parser.parse_args()
    random.seed(0)
    if options.what == "grouped":
        grouped(options)
    else:
        backend = "nccl" if options.device == "cuda" else "gloo"
        spawn(measure_parallel, backend, options.ranks, options, limit_s=600)


if __name__ == "__main__":
    main()
