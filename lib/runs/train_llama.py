"""Train a Llama, chapter 4's model or a variant of it, in one process, in copies or in shards.

python -m lib.runs.train_llama
python -m lib.runs.train_llama --family gemma3 --window 64 --interval 3 --export my_gemma
python -m lib.runs.train_llama --family qwen3_next --export my_hybrid
torchrun --nproc-per-node 4 -m lib.runs.train_llama --strategy ddp --batch 64 --eval-every 50
torchrun --nproc-per-node 8 -m lib.runs.train_llama --model 7B --strategy fsdp --engine torch --precision bf16 \\
    --length 2048 --data openwebtext --limit 10000
"""

import sys

from lib.given.models.llama import PRESETS
from lib.runs.engine.arguments import add_text_flags, make_parser
from lib.runs.engine.start import main as run
from lib.runs.engine.tasks import LlamaTask
from lib.runs.engine.variants import add_variant_flags


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 75 if asked to leave before the last step,
    or 2 after one line about what is wrong with the request.
    """
    models = ["tiny", *(name for name in PRESETS if name != "tiny")]
    parser = make_parser("lib.runs.train_llama", models, "sequences", "Train a Llama.")
    parser.set_defaults(path="plain")
    add_text_flags(parser)
    add_variant_flags(parser)
    return run(parser, LlamaTask, argv)


if __name__ == "__main__":
    sys.exit(main())
