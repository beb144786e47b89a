"""What test_whole.py starts: the whole way in miniature, in processes that kill themselves in the midst of it."""

import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

from lib.runs import whole
from lib.runs.engine.loop import Run
from lib.runs.reinforcing import loop
from lib.runs.stations import plan

MINI = plan.Size(
    is_embedded=True,
    corpus="--clean --vocab 300 --held-out 0.4 --limit 12",
    pretrain="--model tiny --dim 64 --n-layers 1 --length 64 --batch 4 --steps 6 --optimizer muon --eval-every 3 "
    "--held-out 0.05 --save-every 2 --quiet",
    tune="--lr 1e-3 --batch 2 --steps 4 --eval-every 2 --save-every 2 --quiet",
    reward="--new-tokens 6 --prompts 2 --group 2 --steps 4 --eval-every 2 --eval-questions 2 --save-every 1 "
    "--warm 2 --warm-lr 1e-3 --quiet",
    evaluate="--max-new-tokens 6 --batch-size 4 --shots 1",
    task="sums",
    difficulty=2,
    n_conversations=60,
    n_questions=6,
    held_out_bytes=300,
    needs_gpu=False,
    predictions=(
        plan.expected("pretrain", "bits_per_byte", 0.0, 1.0, "a miracle"),
        plan.expected("tune", "accuracy", 0.0, 1.0, "it is a share"),
        plan.expected("reward", "gain", -1.0, 1.0, "it is a difference"),
    ),
)
plan.SIZES["mini"] = MINI
MOMENTS = ("before pretrain", "in pretrain", "before evaluate", "in tune", "in reward", "before export")


def here(command: list[str]) -> int:
    """Run a program of lib.runs in this process."""
    return import_module(command[2]).main(command[3:])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(moment: str):
    """A launch that kills this process at a moment, and what must be patched for it."""
    when, what = moment.split()
    set_lr, step = Run.set_lr, loop.Run.step
    running = [""]

    def launch(command: list[str]) -> int:
        running[0] = command[2]
        if when == "before" and command[2].endswith({"pretrain": "train_gpt2"}.get(what, what)):
            die()
        return here(command)

    def dies_late(self, now):
        if when == "in" and now == 3 and running[0].endswith({"pretrain": "train_gpt2", "tune": "finetune"}[what]):
            die()
        return set_lr(self, now)

    def dies_in_step(self, now, log):
        if what == "reward" and now == 2:
            die()
        return step(self, now, log)

    Run.set_lr = dies_late if what in ("pretrain", "tune") else set_lr
    loop.Run.step = dies_in_step
    if what == "export":
        whole.export = lambda *_: die()
    return launch


def main(folder: str) -> None:
    """Be killed at every moment, go on each time, and print how each process ended and which stations were done."""
    request = ["--size", "mini", "--out", folder, "--threads", "1"]
    for moment in [*MOMENTS, "never at-all"]:
        if not (pid := os.fork()):
            os._exit(whole.main(request, dying(moment)))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        stations = json.loads(Path(folder, "state.json").read_text())["stations"]
        said = {"moment": moment, "status": status, "done": {k: v["done"] for k, v in stations.items()}}
        print(json.dumps(said), flush=True)  # what waits in the buffer would belong to the next process, too


if __name__ == "__main__":
    main(sys.argv[1])
