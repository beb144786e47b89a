"""Measure grouped products at the shapes of Mixtral 8x7B and DeepSeek-V3: the book's kernel, a loop, padding, and PyTorch's own.

Run ``python -m lib.bench.moe`` on a machine with one GPU (about a minute); it writes ``chapters/measurements/moe.json``.
"""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lib.bench.record import record, spread
from lib.given.models.moe import DEEPSEEK_V3, MIXTRAL_8X7B, MoEConfig
from lib.moe import grouped_matmul, sort_by_expert

N_ROUNDS = 12
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


PRODUCTS: dict[str, Product] = {"ours": grouped_matmul, "PyTorch": pytorchs, "loop": loop, "padded": padded}


def inputs(config: MoEConfig, n_tokens: int, balanced: bool, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """Sorted rows, the first matrices of all experts, and the counts of a router with random, or random and uneven, logits."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(n_tokens, config.n_experts, device=device, generator=generator)
    if not balanced:
        logits -= torch.linspace(0, 2, config.n_experts, device=device)
    _, counts = sort_by_expert(logits.topk(config.k).indices, config.n_experts)
    x = torch.randn(n_tokens * config.k, config.dim, device=device, generator=generator).bfloat16()
    shape = (config.n_experts, config.dim, config.hidden_dim)
    weights = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, config.dim**-0.5, generator=generator)
    return x, weights, counts


def seconds(run: Callable[[], object]) -> float:
    """Time of one call on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


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
        samples: dict[str, list[float]] = {who: [] for who in PRODUCTS}
        for round_ in range(N_ROUNDS + 2):
            for who in random.sample(list(PRODUCTS), len(PRODUCTS)):
                taken = seconds(lambda: run(PRODUCTS[who], *given))  # noqa: B023 (called at once)
                if round_ > 1:
                    samples[who].append(taken)
        found[name] = {who: spread(values) for who, values in samples.items()}
    return found


def case(name: str, n_tokens: int, balanced: bool) -> dict:
    config = CONFIGS[name]
    given = x, weights, counts = inputs(config, n_tokens, balanced)
    expected = pytorchs(*given).float()
    apart = {who: (product(*given).float() - expected).abs().max().item() for who, product in PRODUCTS.items()}
    flops = 2 * len(x) * weights.shape[1] * weights.shape[2]
    facts = {"model": name, "n_tokens": n_tokens, "balanced": balanced, "rows": len(x), "busiest": int(counts.max())}
    return facts | {"flops": flops, "differs_by": apart, "seconds": times(given)}


def main() -> None:
    random.seed(0)
    cases = []
    for name, lengths in TOKENS.items():
        for n_tokens in lengths:
            for balanced in (True, False):
                cases.append(case(name, n_tokens, balanced))
                by_us = {who: f"{1e6 * t['median']:.0f}" for who, t in cases[-1]["seconds"]["forward"].items()}
                print(name, n_tokens, balanced, by_us, flush=True)
                torch.cuda.empty_cache()
    record("moe", {"dtype": "bfloat16", "n_rounds": N_ROUNDS, "cases": cases})


if __name__ == "__main__":
    main()
