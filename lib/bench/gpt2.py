"""Measure GPT-2's initialisation: how the residual stream grows at the width of GPT-2 XL,
and what a wrong power costs in training.

Run ``python -m lib.bench.gpt2`` (some minutes on one core); it writes ``chapters/measurements/gpt2.json``.
"""

import dataclasses

import torch

from lib.bench.kit import record, spread
from lib.given.data.corpora import language_reference
from lib.given.models.gpt2 import GPT2_XL, GPT2Config
from lib.gpt2 import GPT2, Block, init_weights
from lib.runs.flags import ProgramParser

POWERS = (0.0, -0.05, -0.5)
LENGTH = 32
DEEP = GPT2Config(vocab_size=256, context_len=LENGTH, dim=64, n_layers=24, n_heads=4)
BATCH, N_STEPS, N_SEEDS = 8, 150, 3


def rescale(module: torch.nn.Module, factor: float) -> None:
    """Multiply the weights of the residual projections, as if their scale had another power."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.mul_(factor)


def residual_spread(config: GPT2Config, power: float) -> list[float]:
    """Standard deviation of the residual stream before the first block and after each;
    only one block exists at a time.
    """
    torch.manual_seed(0)
    stream = 0.02 * (torch.randn(1, LENGTH, config.dim) + torch.randn(1, LENGTH, config.dim))
    found = [stream.std().item()]
    with torch.no_grad():
        for _ in range(config.n_layers):
            block = Block(config)
            init_weights(block, config.n_layers)
            rescale(block, (2 * config.n_layers) ** (power + 0.5))
            stream = block(stream)
            found.append(stream.std().item())
    return found


def train_losses(power: float, seed: int) -> list[float]:
    """Loss of each step of a deep and narrow model on the bytes of the language reference."""
    data = torch.tensor(list(language_reference().encode()))
    torch.manual_seed(seed)
    model = GPT2(DEEP)
    rescale(model, (2 * DEEP.n_layers) ** (power + 0.5))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95)), []
    for _ in range(N_STEPS):
        window = data[torch.randint(len(data) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH + 1)]
        _, loss = model(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.set_num_threads(1)  # two threads on two busy cores wait for each other
    results: dict = {"residual_config": dataclasses.asdict(GPT2_XL), "n_positions": LENGTH}
    results["residual_std"] = {str(power): residual_spread(GPT2_XL, power) for power in POWERS}
    results["train_config"] = dataclasses.asdict(DEEP) | {"batch": BATCH, "n_steps": N_STEPS, "n_seeds": N_SEEDS}
    results["last_30_steps_loss_nats"] = {}
    for power in POWERS:
        ends = [sum(train_losses(power, seed)[-30:]) / 30 for seed in range(N_SEEDS)]
        results["last_30_steps_loss_nats"][str(power)] = {**spread(ends), "values": ends}
    record("gpt2", results)


if __name__ == "__main__":
    ProgramParser(description=__doc__).parse_args()  # there are no flags: a word is refused before anything is measured
    main()
