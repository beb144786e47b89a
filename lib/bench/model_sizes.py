"""Time a training step of the five model sizes by part (forward, backward, optimizer), with warm-up and without.

Run ``python -m lib.bench.model_sizes`` (a minute on a GPU) on any device; ``--tiny`` uses two small models.
It writes ``chapters/measurements/model_sizes.json`` after every size.
Each size runs in a process of its own, because a process has only one first step.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, replace

import torch

from lib.bench.kit import record, spread, timed, wait_for
from lib.given.models.gpt2 import TINY, GPT2Config
from lib.given.models.sizes import MODEL_SIZES
from lib.gpt2 import GPT2, count_parameters
from lib.runs.flags import ProgramParser

BATCH, LENGTH = 4, 256
N_WARMUP, N_STEPS = 5, 10
PARTS = ("forward", "backward", "optimizer")
TINY_SIZES = {"tiny": TINY, "wide": replace(TINY, dim=256)}


def steps(config: GPT2Config, device: str, length: int) -> dict[str, list[float]]:
    """Seconds of each part of every step of a new process, the very first one included."""
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT2(config)
        tokens = torch.randint(config.vocab_size, (BATCH, length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wait_for(device)
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(N_WARMUP + N_STEPS):
        optimizer.zero_grad()
        seconds, output = timed(lambda: model(tokens[:, :-1], tokens[:, 1:]), device)
        found["forward"].append(seconds)
        found["backward"].append(timed(output[1].backward, device)[0])
        found["optimizer"].append(timed(optimizer.step, device)[0])
    return found


def with_mean(times: list[float]) -> dict[str, float]:
    """Spread of the times, and their mean and standard deviation, which a single slow first step distorts."""
    tensor = torch.tensor(times, dtype=torch.float64)
    return {**spread(times), "mean": tensor.mean().item(), "std": tensor.std().item()}


def in_own_process(args: argparse.Namespace, name: str) -> dict[str, list[float]]:
    """The steps of one size, measured in a new process."""
    command = [sys.executable, "-m", "lib.bench.model_sizes", "--device", args.device, "--size", name]
    done = subprocess.run([*command, *(["--tiny"] if args.tiny else [])], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = ProgramParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="two small models, for a laptop")
    parser.add_argument("--size", help="measure this size in this process, print its times, and stop")
    args = parser.parse_args()
    sizes, length = (TINY_SIZES, TINY.context_len) if args.tiny else (MODEL_SIZES, LENGTH)
    if args.size and args.size not in sizes:
        parser.error(f"--size {args.size}: expected one of {', '.join(sizes)}")
    if args.size:
        print(json.dumps(steps(sizes[args.size], args.device, length)))
        return
    results: dict = {"batch": BATCH, "length": length, "dtype": "float32", "n_warmup": N_WARMUP, "n_steps": N_STEPS}
    results["sizes"] = {}
    for name, config in sizes.items():
        times = in_own_process(args, name)
        results["sizes"][name] = {
            "config": asdict(config),
            "n_parameters": count_parameters(config),
            "first_step_s": {part: times[part][0] for part in PARTS},
            "without_warmup_s": {part: with_mean(times[part][:N_STEPS]) for part in PARTS},
            "with_warmup_s": {part: with_mean(times[part][N_WARMUP:]) for part in PARTS},
        }
        means = {part: f"{results['sizes'][name]['with_warmup_s'][part]['median'] * 1e3:.1f} ms" for part in PARTS}
        print(name, means, flush=True)
        record("model_sizes" + ("_tiny" if args.tiny else ""), results)


if __name__ == "__main__":
    main()
