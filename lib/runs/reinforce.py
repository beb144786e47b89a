"""Train a model with rewards that a program can check, by chapter 29's functions.

python -m lib.runs.reinforce --model tiny --task sums --out runs/sums
python -m lib.runs.reinforce --model runs/tuned --task countdown --difficulty 3 --algorithm gspo --lag 1 \\
    --correction truncate --prompts 32 --group 8 --new-tokens 128 --steps 200 --precision bf16 --out runs/countdown

Each step asks a few questions of the task, samples a group of responses to each on chapter 21's engine, and updates the
model towards the better ones. The folder gets log.jsonl, a checkpoint, and at the end the model, which lib.runs.serve
and lib.runs.evaluate load. A run that finds a checkpoint there continues from it.

If the reward falls from the start, noise moves the weights more than the rewards do: ask for more --prompts, a smaller
--lr or a longer --lr-warmup. Expect dozens of steps before it rises; chapter 29 shows recorded runs.

On several ranks (torchrun --nproc-per-node 2 -m lib.runs.reinforce ...) rank 0 trains, and the others sample. With
--lag 1 they do so at the same time.
"""

import argparse
import copy
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lib.given.models.rewards import AGGREGATIONS, MODES
from lib.runs.engine import state as checkpoints
from lib.runs.engine.places import check_places, check_unlocked, lock_places, make_places
from lib.runs.engine.signals import STATUS, follow_launcher
from lib.runs.engine.world import World, agree, choose_device, find_world, start_group
from lib.runs.flags import Parser, UsageError, positive, share, whole
from lib.runs.memory import block_bytes, check_need, shortage
from lib.runs.reinforcing.loop import Run, run_of
from lib.runs.reinforcing.samplers import DTYPES, Sampler, There
from lib.runs.reinforcing.sampling import BLOCK, n_blocks
from lib.runs.reinforcing.start import Policy, check_questions, find, warm
from lib.runs.reinforcing.tasks import KINDS, check_difficulty, draw, endless
from lib.runs.reinforcing.update import ALGORITHMS
from lib.runs.serve import filled
from lib.runs.serving.models import weight_bytes

PROGRAM = "python -m lib.runs.reinforce"
MEMORY_FLAGS = ("--micro-batch", "--at-once", "--new-tokens", "--model")
DEFAULTS = {
    "tiny": {"lr": 5e-4, "warm": 150, "warm_lr": 3e-3, "new_tokens": 40},
    "small": {"lr": 1e-5, "warm": 300, "warm_lr": 1e-3, "new_tokens": 64},
    "": {"lr": 1e-6, "warm": 0, "warm_lr": 1e-5, "new_tokens": 128},
}
"""By model; "" is that of a folder."""
LOOKED_AT = 500
"""Questions that are looked at before the run for their length and their characters."""


def make_parser() -> Parser:
    """All flags of this program."""
    parser = Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_what(parser)
    _add_rollouts(parser)
    _add_update(parser)
    _add_run(parser)
    return parser


def _add_what(parser: Parser) -> None:
    what = parser.add_argument_group("model and task")
    what.add_argument("--model", required=True, type=filled, metavar="tiny|small|FOLDER",
                      help="as for lib.runs.serve; tiny, small: a Llama of 0.1 or 3 million weights")  # fmt: skip
    what.add_argument("--tokenizer", type=filled, help="bytes, gpt2 or a tokenizer.json; default: the folder's")
    what.add_argument("--task", required=True, choices=tuple(KINDS))
    levels = (f"{name}: {k.unit}, {k.least} to {k.most}, default {k.usual}" for name, k in KINDS.items() if k.unit)
    what.add_argument("--difficulty", type=whole(1), help="; ".join(levels))
    what.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="gets the log, checkpoints, the model")
    what.add_argument("--format-weight", type=share, default=0.1, help="reward of a right form with a wrong answer")
    what.add_argument("--warm", type=whole(0), help="supervised steps on worked answers before the first reward; "
                      "default: 150 for tiny, 300 for small, else 0")  # fmt: skip
    what.add_argument(
        "--warm-lr",
        type=positive,
        help="their largest learning rate; default: 3e-3 for tiny, 1e-3 for small, else 1e-5",
    )


def _add_rollouts(parser: Parser) -> None:
    rollouts = parser.add_argument_group("rollouts")
    rollouts.add_argument("--prompts", type=whole(1), default=32, help="questions of a step")
    rollouts.add_argument("--group", type=whole(2), default=8, help="responses to each question")
    rollouts.add_argument(
        "--new-tokens", type=whole(1), help="of a response at most; default: 40 for tiny, 64 for small, else 128"
    )
    rollouts.add_argument("--temperature", type=positive, default=1.0)
    rollouts.add_argument("--lag", type=int, choices=(0, 1), default=0,
                          help="1: a step's responses are of the weights before the last step")  # fmt: skip
    rollouts.add_argument("--bucket-mb", type=positive, default=64.0,
                          help="of weights that are sent at a time to ranks that sample")  # fmt: skip
    rollouts.add_argument("--at-once", type=whole(1), help="responses that the cache has room for; default: all")
    rollouts.add_argument("--sampler-dtype", choices=tuple(DTYPES), default="float32",
                          help="of the engine's weights and cache; bf16 makes a copy of the weights")  # fmt: skip


def _add_update(parser: Parser) -> None:
    update = parser.add_argument_group("update")
    update.add_argument("--algorithm", choices=tuple(ALGORITHMS), default="grpo", help="sets what follows from it")
    update.add_argument("--loss-agg-mode", choices=AGGREGATIONS, help="what divides the loss; default: the algorithm's")
    update.add_argument("--loss-scale-factor", type=positive, help="of seq-mean-token-sum-norm; default: --new-tokens")
    update.add_argument("--clip-low", type=share, default=0.2, help="rho counts from 1 minus this")
    update.add_argument("--clip-high", type=share, default=0.2, help="and to 1 plus this")
    update.add_argument("--updates", type=whole(1), default=1, help="with each batch")
    update.add_argument("--correction", choices=("none", *MODES), default="none",
                        help="weights of the trainer's over the sampler's probabilities")  # fmt: skip
    update.add_argument("--cap", type=positive, default=2.0, help="largest weight")
    update.add_argument("--floor", type=share, default=0.0, help="smallest weight with --correction mask")
    update.add_argument("--kl-coef", type=share, default=0.0, help="of the divergence from the model at the beginning")
    update.add_argument("--lr", type=share, help="AdamW's; default: 5e-4 for tiny, 1e-5 for small, else 1e-6")
    update.add_argument("--lr-warmup", type=whole(0), default=10,
                        help="steps in which the rate rises to --lr: AdamW's first steps are mostly noise")  # fmt: skip
    update.add_argument("--clip", type=positive, default=1.0, help="largest norm of the gradient")
    update.add_argument("--micro-batch", type=whole(1), default=16, help="responses that are trained on at a time")
    update.add_argument("--precision", choices=("float32", "tf32", "bf16"), default="float32",
                        help="of the trainer's products; the weights stay float32")  # fmt: skip


def _add_run(parser: Parser) -> None:
    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=whole(1), default=100, help="of the whole run, those before a restart included")
    run.add_argument("--eval-every", type=whole(1), default=10, help="steps between evaluations")
    run.add_argument("--eval-questions", type=whole(1), default=100,
                     help="held-out ones, answered greedily; fewer if the task has fewer")  # fmt: skip
    run.add_argument("--save-every", type=whole(1), default=10, help="steps between checkpoints")
    run.add_argument("--seed", type=whole(0, 2**31 - 1), default=0)
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--threads", type=whole(1, 1024), default=1, help="of PyTorch on a CPU")
    run.add_argument("--quiet", action="store_true", help="no progress bar")


def complete(o: argparse.Namespace) -> argparse.Namespace:
    """The settings with every default that follows from another one.

    Raises:
        UsageError: two of them exclude each other.
    """
    o = copy.copy(o)
    for name, value in DEFAULTS.get(o.model, DEFAULTS[""]).items():
        if getattr(o, name) is None:
            setattr(o, name, value)
    o.difficulty = check_difficulty(o.task, o.difficulty)
    for name, value in ALGORITHMS[o.algorithm].items():
        if getattr(o, name, None) is None:
            setattr(o, name, value)
    o.loss_scale_factor = o.loss_scale_factor or float(o.new_tokens)
    if o.clip_low > 1:
        raise UsageError(f"--clip-low {o.clip_low:g}: expected a number from 0 to 1")
    if o.floor > o.cap:
        raise UsageError(f"--floor {o.floor:g} is above --cap {o.cap:g}: no weight is between them")
    if o.floor and o.correction != "mask":
        raise UsageError(f"--floor {o.floor:g} with --correction {o.correction}: only --correction mask has a floor")
    o.checkpoint, o.checkpoint_flag, o.log, o.tensorboard, o.export = o.out, "--out", None, None, None
    return o


def check_memory(policy: Policy, o: argparse.Namespace, device: torch.device) -> None:
    """Check that the run can fit, before anything is on the device.

    Raises:
        UsageError: it cannot; one line names what needs how much.
    """
    config, dtype = policy.config, DTYPES[o.sampler_dtype]
    n_weights = sum(p.numel() for p in policy.model.parameters())
    model = n_weights * (16 + 4 * bool(o.kl_coef) + (dtype.itemsize if dtype != torch.float32 else 0))
    if device.type == "cpu":
        model -= 4 * n_weights  # the weights are there already
    check_need(model, device, f"--model {o.model}: {n_weights:,} weights, with gradients and two numbers of AdamW",
               ["--model"])  # fmt: skip
    rows = o.prompts * o.group
    cache = n_blocks(policy, rows, o) * block_bytes(config, BLOCK, dtype)
    length = policy.longest + o.new_tokens
    stream = min(rows, o.micro_batch) * length * config.dim * config.n_layers * 4
    what = f"a cache of {min(rows, o.at_once or rows)} responses, then micro-batches of {min(rows, o.micro_batch)}, of "
    both = cache + stream if device.type == "cuda" else max(cache, stream)  # a GPU's engine is kept, with its cache
    check_need(model + both, device, f"{what}{length} tokens each, beside {n_weights:,} weights",
               MEMORY_FLAGS)  # fmt: skip


def set_up(o: argparse.Namespace, world: World) -> torch.device:
    """Set PyTorch's process-wide options; returns this rank's device.

    Raises:
        UsageError: it is not there, or more ranks than questions are to sample.
    """
    if world.size - 1 > o.prompts:
        raise UsageError(f"--prompts {o.prompts}: {world.size - 1} ranks sample; expected at least as many questions")
    if world.launcher == "torchrun":
        follow_launcher()
    device = choose_device(o.device, world)
    if device.type == "cpu":
        torch.set_num_threads(o.threads)
    else:
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high" if o.precision == "tf32" else "highest")
    return device


def prepare(o: argparse.Namespace, held: ExitStack) -> Run | Sampler:
    """Check the request, lock the folder, and build or resume the run, or this rank's part of it.

    Raises:
        UsageError: the request is wrong, or the folder is of another run.
    """
    o, world = complete(o), find_world()
    device = set_up(o, world)
    places: Any = SimpleNamespace(**vars(o))
    check_places(places)
    check_unlocked(places)
    check_need(weight_bytes(o.model), torch.device("cpu"), f"--model {o.model}: weights", ["--model"])
    questions, held_out = ask(o)
    make_places(places)
    found = take_places(places, world, device, held)
    torch.manual_seed(o.seed)
    policy = find_together(o, world)
    checkpoints.check_same_run(places, found, run_of(policy, o))
    check_questions(policy, [*questions, *held_out], o.task, o.new_tokens)
    check_memory(policy, o, device)
    policy.model.to(device)
    objects = dist.new_group(backend="gloo") if world.size > 1 and device.type == "cuda" else None
    if world.rank:
        return Sampler(policy, o, device, objects)
    if o.warm and found is None:
        loss = warm(policy, endless(o.task, o.difficulty, 2 * o.seed), o.warm, o.warm_lr)
        print(f"{o.warm} supervised steps: loss {loss:.3f} nats a token", file=sys.stderr, flush=True)
    sampler = There(policy, o, device, objects) if world.size > 1 else None
    return Run(policy, held_out, o, device, found is not None, sampler)


def take_places(places: Any, world: World, device: torch.device, held: ExitStack) -> dict[str, Any] | None:
    """Start the group, lock the folder, and read what its checkpoint says of its run; None without one.

    Raises:
        UsageError: the ranks were asked for different runs, or another run has the folder.
    """
    if world.size > 1:
        start_group(world, device)
        agree({name: str(value) for name, value in vars(places).items()}, "the flags")  # all have looked at the locks
    lock_places(places, world.rank, held)
    found = checkpoints.peek(places)
    agree(found and found["step"], "the step of the checkpoint")
    return found


def find_together(o: argparse.Namespace, world: World) -> Policy:
    """The model on every rank; rank 0 comes first, since it writes the tokenizer of a model that has its own.

    Raises:
        UsageError: there is no such model.
    """
    if world.rank:
        dist.barrier()
    policy = find(o.model, o.tokenizer, o.out)
    if world.size > 1 and not world.rank:
        dist.barrier()
    return policy


def ask(o: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """Some questions to train on, and those of the evaluations.

    Raises:
        UsageError: the task has too few.
    """
    questions = draw(o.task, o.difficulty, max(LOOKED_AT, o.prompts), 2 * o.seed + 1)
    if len(questions) < o.prompts:
        raise UsageError(f"--prompts {o.prompts}: --task {o.task} --difficulty {o.difficulty} has {len(questions)} "
                         f"questions to train on; expected at most {len(questions)}")  # fmt: skip
    return questions, draw(o.task, o.difficulty, o.eval_questions, 0, held_out=True)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 75 if asked to leave before the last step,
    or 2 after one line about what is wrong with the request.
    """
    group_was_there = dist.is_initialized()
    try:
        with ExitStack() as held:
            run = prepare(make_parser().parse_args(argv), held)
            is_done = run.go()
            if isinstance(run, Run):
                print(run.summary(), file=sys.stderr, flush=True)
        if dist.is_initialized() and not group_was_there:  # after an error NCCL would wait for the other ranks here
            dist.destroy_process_group()
        return 0 if is_done else STATUS
    except UsageError as error:
        why: str | None = str(error)
    except (MemoryError, OSError, RuntimeError) as error:
        why = shortage(error, MEMORY_FLAGS) or (str(error) if isinstance(error, OSError) else None)
        if why is None:
            raise
    print(f"{PROGRAM}: error: {why}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
