"""The flags that training programs share; ``--help`` shows what they say."""

import argparse
from pathlib import Path

from lib.runs.engine.options import AVERAGING, OPTIMIZERS, PRECISIONS, STRATEGIES
from lib.runs.flags import MOST_SEED, Parser, degree, fraction, positive, share, whole


def make_parser(program: str, models: list[str], items: str, description: str) -> Parser:
    """The flags that all training programs share.

    Args:
        program: The program's module, for the usage line.
        models: Names of presets.
        items: The unit of a batch: "images" or "sequences".
        description: Text above the flags.
    """
    parser = Parser(prog=f"python -m {program}", description=description)
    _add_model_flags(parser, models)
    _add_rank_flags(parser)
    add_training_flags(parser, items)
    _add_data_flags(parser, items)
    add_quality_flags(parser)
    add_place_flags(parser)
    return parser


def _add_model_flags(parser: Parser, models: list[str]) -> None:
    """The model, and how it is computed."""
    what = parser.add_argument_group("model and computation")
    what.add_argument("--model", choices=models, default="tiny")
    what.add_argument("--engine", choices=("ours", "torch"), default="ours", help="the book's functions, or PyTorch's")
    what.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="number format of the matrix products; float16 adds a loss scaler",
    )
    what.add_argument(
        "--path",
        choices=("auto", "fast", "plain"),
        default="auto",
        help="fast: lib.fast.models; plain: the model as in its chapter; auto: fast where the strategy allows it",
    )
    what.add_argument(
        "--attention",
        choices=("quickest", "workbook", "fused", "flash", "cudnn"),
        default="quickest",
        help="attention kernel of the fast path: chapter 15's where it was measured to be the fastest, "
        "or wherever it fits; "
        "PyTorch's choice; or one of PyTorch's",
    )
    what.add_argument(
        "--compile",
        nargs="?",
        const="auto",
        choices=("auto", "whole", "blocks"),
        help="torch.compile the whole model (single) or each block, so that gradients are ready early",
    )
    what.add_argument(
        "--graph",
        action="store_true",
        help="record the whole step as a CUDA graph (single, or ddp or fsdp with --engine ours)",
    )


def _add_rank_flags(parser: Parser) -> None:
    """How the ranks divide the work."""
    ranks = parser.add_argument_group(
        "ranks",
        "How the ranks divide the work. The product of the degrees is the number of ranks; "
        "a degree left out is 1, and -1 is "
        "what the others leave.",
    )
    ranks.add_argument("--replicate", type=degree, help="copies of the model, whose gradients are averaged")
    ranks.add_argument(
        "--shard", type=degree, help="ranks among which parameters, gradients and optimizer state are divided"
    )
    ranks.add_argument("--tensor", type=degree, help="ranks that divide each layer")
    ranks.add_argument("--context", type=degree, help="ranks that divide each sequence")
    ranks.add_argument("--pipeline", type=degree, help="stages; --accumulate is the number of micro-batches")
    ranks.add_argument(
        "--expert",
        type=degree,
        help="ranks that divide the experts of each mixture; each has a share of the batch, too",
    )
    ranks.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="one kind over all ranks: ddp is --replicate, fsdp --shard, tp --tensor, cp --context, pp --pipeline",
    )


def add_training_flags(parser: Parser, items: str) -> None:
    """The training: batches, steps and the optimizer."""
    train = parser.add_argument_group("training")
    train.add_argument("--batch", type=whole(1), default=32, help=f"{items} in a step, over all ranks")
    train.add_argument("--accumulate", type=whole(1), default=1, help="micro-batches in a step")
    train.add_argument(
        "--steps", type=whole(1), default=100, help="steps of the whole run, including those before a restart"
    )
    train.add_argument("--lr", type=share, default=1e-3, help="largest learning rate")
    train.add_argument(
        "--min-lr", type=share, default=0.0, help="learning rate at the end of the cosine, after the last step"
    )
    train.add_argument(
        "--schedule",
        choices=("cosine", "wsd"),
        default="cosine",
        help="after the warm-up: half a cosine, or chapter 22's constant rate that falls in a line over the "
        "last fifth of the steps",
    )
    train.add_argument("--warmup", type=whole(0), default=0, help="warm-up steps")
    train.add_argument("--weight-decay", type=share, default=0.05, help="applied to tensors of two or more dimensions")
    train.add_argument("--clip", type=share, default=1.0, help="largest gradient norm; 0 neither clips nor measures it")
    train.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="ours: chapter 7's AdamW (the default with --engine ours); sgd: momentum 0.9; "
        "muon: chapter 25's, for the matrices of the blocks, and the engine's AdamW for all else",
    )
    train.add_argument(
        "--muon-lr",
        type=positive,
        help="largest learning rate of the matrices with --optimizer muon; default: --lr, "
        "since their steps are as long as AdamW's",
    )
    train.add_argument("--bucket-mb", type=positive, default=25.0, help="size of a DDP bucket, in 2**20 bytes")
    train.add_argument(
        "--averaging",
        choices=AVERAGING,
        default="auto",
        help="how ddp averages gradients, and how fsdp gathers and reduces its shards: by copies between the GPUs of "
        "one host, which hold no multiprocessor, or by collectives; "
        "auto: by copies where every GPU can read the others' memory",
    )
    train.add_argument(
        "--seed", type=whole(0, MOST_SEED), default=0, help="for the initial weights and the order of the data"
    )


def _add_data_flags(parser: Parser, items: str) -> None:
    """What the run reads."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        help="embedded, synthetic (made on the device), a file, a folder, a corpus of lib.runs.corpus, "
        "or a name on the hub; "
        "default: embedded for tiny, synthetic for the others",
    )
    data.add_argument("--column", help="name of the column that holds the picture or the text")
    data.add_argument("--limit", type=whole(1), help="read no more rows than this")
    data.add_argument("--items", type=whole(1), help=f"number of synthetic {items}")


def add_quality_flags(parser: Parser) -> None:
    """Evaluations, and the trained model."""
    quality = parser.add_argument_group("evaluation and export")
    quality.add_argument(
        "--eval-every",
        type=whole(1),
        help="steps between evaluations on the held-out part; the last step always makes one",
    )
    quality.add_argument(
        "--held-out", type=fraction, help="share of the data that is never trained on, in whole batches; default: 0.1"
    )
    quality.add_argument(
        "--export",
        type=Path,
        help="folder for the trained model, in the format of Transformers (text) or timm (images)",
    )


def add_place_flags(parser: Parser) -> None:
    """Where the run computes, and where it writes."""
    where = parser.add_argument_group("where it runs")
    where.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    where.add_argument("--threads", type=whole(1, 4096), default=1, help="CPU threads of each rank")
    where.add_argument(
        "--deterministic", action="store_true", help="use kernels that return the same bits every time, on a GPU too"
    )
    where.add_argument(
        "--checkpoint",
        type=Path,
        help="folder that all ranks can see; a run that finds a checkpoint there continues from it",
    )
    where.add_argument(
        "--save-every", type=whole(1), default=100, help="steps between checkpoints; the last step always writes one"
    )
    where.add_argument(
        "--log-file",
        "--log",
        dest="log",
        type=Path,
        help="write a line of JSON for each step (torchrun on Python 3.11 takes --log for a flag of its own: "
        "use --log-file)",
    )
    where.add_argument("--tensorboard", type=Path, help="folder for TensorBoard, if it is installed")
    where.add_argument("--wandb", metavar="PROJECT", help="project of Weights & Biases to log to, if it is installed")
    where.add_argument("--quiet", action="store_true", help="no progress bar")
    where.add_argument(
        "--peak-tflops", type=positive, help="peak of one device, for MFU; known for A100, H100 SXM and H200"
    )


def add_text_flags(parser: Parser) -> None:
    """The flags of the programs that train on text."""
    text = parser.add_argument_group("text")
    text.add_argument("--length", type=whole(1), help="tokens in a sequence; default: the preset's")
    text.add_argument(
        "--tokenizer",
        choices=("bytes", "bpe", "gpt2"),
        help="bytes (the default); bpe: chapter 1's tokenizer, trained on the text; gpt2: tiktoken's; "
        "a corpus has its own",
    )
    text.add_argument(
        "--sample-every", type=whole(1), help="steps between samples of text; the last step always makes one"
    )
    text.add_argument("--prompt", help="beginning of each sample")
    text.add_argument("--sample-tokens", type=whole(1), default=64, help="tokens that a sample adds to the prompt")
    text.add_argument(
        "--eval-tasks",
        nargs="+",
        metavar="TASK",
        help="questions for the model, as for lib.runs.evaluate: names, or files of choices or of text",
    )
    text.add_argument(
        "--eval-tasks-every",
        type=whole(1),
        help="steps between them; the last step always asks; default: --eval-every, or only the last step",
    )


def add_size_flags(parser: Parser) -> argparse._ArgumentGroup:
    """The flags that change a preset's size."""
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--dim", type=whole(64), help="width, a multiple of 64, which is a head's; default: the preset's"
    )
    sizes.add_argument("--n-layers", type=whole(1), help="blocks; default: the preset's")
    return sizes
