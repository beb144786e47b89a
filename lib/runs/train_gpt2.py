"""Train a GPT-2, from the bytes of the language reference on a laptop to xl on many GPUs.

python -m lib.runs.train_gpt2
torchrun --nproc-per-node 4 -m lib.runs.train_gpt2 --model small --strategy ddp --precision bf16 --compile --batch 64
torchrun --nproc-per-node 4 -m lib.runs.train_gpt2 --model xl --strategy fsdp --engine torch --precision bf16 --compile
python -m lib.runs.train_gpt2 --model small --data openwebtext --limit 10000 --tokenizer gpt2
"""

import sys

from lib.runs.engine.loop import main as run
from lib.runs.engine.options import make_parser, whole
from lib.runs.engine.tasks import GPT2_PRESETS, GPT2Task


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 75 if asked to leave before the last step, or 2 after one line about what is wrong with the request."""
    parser = make_parser("lib.runs.train_gpt2", list(GPT2_PRESETS), "sequences", "Train a GPT-2.")
    text = parser.add_argument_group("text")
    text.add_argument("--context", type=whole(1), help="tokens in a sequence; default: the preset's")
    text.add_argument("--tokenizer", choices=("bytes", "bpe", "gpt2"), default="bytes",
                      help="bytes; bpe: chapter 1's tokenizer, trained on the text; gpt2: tiktoken's")  # fmt: skip
    return run(parser, GPT2Task, argv)


if __name__ == "__main__":
    sys.exit(main())
