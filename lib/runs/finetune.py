"""Fine-tune a Llama or a GPT-2 on conversations, so that it answers, or on preferences between two answers.

python -m lib.runs.finetune --method lora --model runs/gpt2 --data conversations.jsonl --out runs/assistant
python -m lib.runs.finetune --method dpo --model runs/assistant --data preferences.jsonl --out runs/preferred
torchrun --nproc-per-node 4 -m lib.runs.finetune --strategy ddp --method full --precision bf16 ...

--data is a file of JSON lines: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}, and for
dpo {"prompt": "..." or messages, "chosen": "...", "rejected": "..."}.

--out gets the merged model in Transformers' format, which lib.runs.serve loads; in it are best/, the model with the
smallest held-out loss, adapter.safetensors, log.jsonl, and checkpoint/, from which a run that was ended goes on.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from lib.runs.engine.arguments import add_place_flags, add_quality_flags, add_training_flags
from lib.runs.engine.options import STRATEGIES
from lib.runs.engine.start import main as run
from lib.runs.flags import Parser, fraction, positive, share, whole
from lib.runs.serve import filled
from lib.runs.tuning.task import METHODS, RANK, TuneOptions, TuneRun, TuneTask


class Out(argparse.Action):
    """Stores the folder of a run, and the places in it that other flags do not name."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> None:
        namespace.out = value
        for name, place in (("checkpoint", value / "checkpoint"), ("log", value / "log.jsonl"), ("export", value)):
            if getattr(namespace, name) is None:
                setattr(namespace, name, place)


def make_parser() -> Parser:
    """All flags of this program."""
    parser = Parser(
        prog="python -m lib.runs.finetune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_tuning_flags(parser)
    ranks = parser.add_argument_group("ranks and computation")
    ranks.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="single (the default); on several ranks ddp, or fsdp with --method full",
    )
    ranks.add_argument("--engine", choices=("ours", "torch"), default="ours", help="the book's DDP, or PyTorch's")
    ranks.add_argument("--precision", choices=("float32", "tf32", "bf16"), default="float32",
                       help="of the matrix products; with adapters of the frozen weights too")  # fmt: skip
    add_training_flags(parser, "packed rows, or pairs,")
    add_quality_flags(parser)
    add_place_flags(parser)
    unused = ("replicate", "shard", "tensor", "context", "pipeline", "expert", "compile", "column", "items")
    parser.set_defaults(path="plain", attention="quickest", graph=False, **dict.fromkeys(unused))
    parser.set_defaults(batch=8, lr=1e-4, weight_decay=0.0, eval_every=50)
    return parser


def _add_tuning_flags(parser: Parser) -> None:
    what = parser.add_argument_group("what is tuned")
    what.add_argument("--method", required=True, choices=METHODS,
                      help="full: all weights; lora, qlora: adapters; dpo: preferences")  # fmt: skip
    what.add_argument("--model", required=True, type=filled, help="as for lib.runs.serve: tiny, or a folder")
    what.add_argument("--data", required=True, type=filled, help="file of JSON lines")
    what.add_argument("--out", required=True, type=Path, action=Out, help="folder for all that the run writes")
    what.add_argument("--limit", type=whole(1), help="read no more lines than this")
    what.add_argument("--length", type=whole(2), help="tokens in a row; default: the model's context")
    what.add_argument("--rank", type=whole(1), help=f"of the adapters; default: {RANK}")
    what.add_argument("--alpha", type=positive, help="size of the adapters' update; default: twice --rank")
    what.add_argument("--targets", type=filled, help="layers with adapters, with commas; default: all of the blocks")
    what.add_argument("--dropout", type=fraction, help="on the way into an adapter; default: none")
    what.add_argument("--dpo-trains", choices=("full", "lora", "qlora"), default="lora", help="with --method dpo")
    what.add_argument("--beta", type=positive, default=0.1, help="of dpo")
    what.add_argument("--label-smoothing", type=share, default=0.0, help="of dpo: share of pairs labelled wrongly")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 75 if asked to leave before the last step,
    or 2 after one line about what is wrong with the request.
    """
    return run(make_parser(), TuneTask, argv, TuneOptions, TuneRun)


if __name__ == "__main__":
    sys.exit(main())
