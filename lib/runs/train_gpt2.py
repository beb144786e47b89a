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

from lib.runs.engine.arguments import add_size_flags, add_text_flags, make_parser
from lib.runs.engine.start import main as run
from lib.runs.engine.tasks import GPT2_PRESETS, GPT2Task
from lib.runs.flags import Parser, share, whole


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 75 if asked to leave before the last step,
    or 2 after one line about what is wrong with the request.
    """
    return run(make_gpt2_parser(), GPT2Task, argv)


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


if __name__ == "__main__":
    sys.exit(main())
