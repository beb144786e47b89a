"""Train a very small GPT-2 on the bytes of the language reference, in a process that you may kill and start again.

``python -m lib.demos.train_tiny --checkpoint run.pt --log run.txt`` continues from the checkpoint if there is one.
Each line of the log holds a step and its loss, exactly to the last bit.
"""

import pickle
from pathlib import Path

import torch

from lib.given.data.corpora import language_reference
from lib.given.models.gpt2 import GPT2Config
from lib.gpt2 import GPT2
from lib.runs.flags import MOST_SEED, ProgramParser, whole
from lib.training import (
    AdamW,
    TokenBatches,
    accumulate_gradients,
    clip_gradient_norm_,
    cosine_schedule,
    load_checkpoint,
    parameter_groups,
    save_checkpoint,
)

CONFIG = GPT2Config(vocab_size=256, context_len=32, dim=64, n_layers=2, n_heads=2)


class NotThisRun(ValueError):
    """A checkpoint is of another run, or no checkpoint."""


def train(checkpoint: Path, log: Path, n_steps: int, save_every: int, seed: int) -> None:
    """Train up to step ``n_steps``, from the checkpoint if there is one."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = GPT2(CONFIG)
    optimizer = AdamW(parameter_groups(model, 0.1), betas=(0.9, 0.95))
    batches = TokenBatches(list(language_reference().encode()), batch=8, length=CONFIG.context_len, seed=seed)
    begin = 0
    if checkpoint.exists():
        try:
            state = load_checkpoint(checkpoint, model, optimizer)
            begin = state["step"]
            batches.load_state_dict(state["batches"])
        except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError) as error:
            raise NotThisRun(" ".join(str(error).split())) from None
    with open(log, "a", encoding="utf-8") as file:
        for step in range(begin, n_steps):
            for group in optimizer.param_groups:
                group["lr"] = cosine_schedule(step, 5e-3, 5e-4, 10, n_steps)
            optimizer.zero_grad()
            loss = accumulate_gradients(model, [next(batches), next(batches)])
            clip_gradient_norm_(model.parameters(), 1.0)
            optimizer.step()
            print(step, float(loss).hex(), file=file, flush=True)
            if (step + 1) % save_every == 0:
                save_checkpoint(checkpoint, model, optimizer, step + 1, batches=batches.state_dict())


def read_log(log: Path) -> list[tuple[int, float]]:
    """Step and loss of every complete line."""
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(int(step), float.fromhex(loss)) for step, loss in lines]


def main() -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--steps", type=whole(1), default=200)
    parser.add_argument("--save-every", type=whole(1), default=20)
    parser.add_argument("--seed", type=whole(0, MOST_SEED), default=0)
    args = parser.parse_args()
    for flag, path in (("--checkpoint", args.checkpoint), ("--log", args.log)):
        if path.is_dir() or not path.absolute().parent.is_dir():
            parser.error(f"{flag} {path}: expected a file in a folder that exists")
    try:
        train(args.checkpoint, args.log, args.steps, args.save_every, args.seed)
    except NotThisRun as error:
        parser.error(f"--checkpoint {args.checkpoint}: {error}; expected a checkpoint of this run, or another file")


if __name__ == "__main__":
    main()
