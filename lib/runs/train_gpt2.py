"""Train a GPT-2, from the bytes of the language reference on a laptop to xl on many GPUs.

python -m lib.runs.train_gpt2
torchrun --nproc-per-node 4 -m lib.runs.train_gpt2 --model small --strategy ddp --precision bf16 --compile --batch 64
torchrun --nproc-per-node 4 -m lib.runs.train_gpt2 --model xl --strategy fsdp --engine torch --precision bf16 --compile
torchrun --nproc-per-node 8 -m lib.runs.train_gpt2 --model xl --replicate 2 --shard 4 --precision bf16 --compile
torchrun --nproc-per-node 4 -m lib.runs.train_gpt2 --model small --n-experts 8 --top-k 2 --expert 4 --precision bf16
python -m lib.runs.corpus my_corpus && python -m lib.runs.train_gpt2 --model small --data my_corpus --schedule wsd
python -m lib.runs.train_gpt2 --model small --data openwebtext --limit 10000 --tokenizer gpt2
"""

import sys

from lib.runs.engine.loop import main as run
from lib.runs.engine.options import KINDS, Parser, add_size_flags, add_text_flags, make_parser, share, whole
from lib.runs.engine.tasks import GPT2_PRESETS, GPT2Task
from lib.runs.engine.world import find_world


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 75 if asked to leave before the last step, or 2 after one line about what is wrong with the request."""
    return run(make_gpt2_parser(), GPT2Task, with_length(sys.argv[1:] if argv is None else argv))


def make_gpt2_parser() -> Parser:
    """All flags of this program."""
    parser = make_parser("lib.runs.train_gpt2", list(GPT2_PRESETS), "sequences", "Train a GPT-2.")
    add_text_flags(parser)
    add_size_flags(parser)
    mixtures = parser.add_argument_group("mixtures of experts")
    mixtures.add_argument(
        "--n-experts",
        type=whole(1),
        help="experts in every block, in place of its MLP; a token's experts together cost as much",
    )
    mixtures.add_argument("--top-k", type=whole(1), help="experts of each token; default: 2")
    mixtures.add_argument("--bias-rate", type=share, help="how far a step moves the router's bias; default: 0.001")
    return parser


def with_length(argv: list[str]) -> list[str]:
    """Read ``--context`` as ``--length`` where it cannot be a degree: beside ``--strategy``, and in one process.

    ``--context`` was the length of a sequence before ranks could divide one.
    """
    words = " ".join(argv).replace("=", " ").split()
    at = next((i + 1 for i, word in enumerate(words[:-1]) if word == "--context"), None)
    is_degree = any(f"--{kind}" in words for kind in KINDS if kind != "context") or (
        "--strategy" not in words and find_world().size > 1
    )
    if at is None or is_degree or "--length" in words or not words[at].isdecimal() or int(words[at]) < 2:
        return argv
    return [word.replace("--context", "--length") if word.split("=")[0] == "--context" else word for word in argv]


if __name__ == "__main__":
    sys.exit(main())
