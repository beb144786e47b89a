"""The command line of a run, and every mistake in it that can be found before anything is allocated."""

import argparse
import importlib.util
import os
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from lib.given.data.images import has_test_split
from lib.runs.data.corpus import has_tokenizer, held_out_share, is_corpus
from lib.runs.flags import MOST_SEED, Parser, UsageError, degree, fraction, positive, share, whole
from lib.runs.lock import FolderLock, refuse_if_held

KINDS = ("pipeline", "replicate", "context", "shard", "expert", "tensor")
"""Kinds of parallelism, each an axis of the mesh of ranks.

The last axis joins neighbours: ranks that divide a layer communicate most.
"""
STRATEGIES = {"single": None, "ddp": "replicate", "fsdp": "shard", "tp": "tensor", "cp": "context", "pp": "pipeline"}
"""Names of the simple cases: one kind over all ranks."""
PRECISIONS = ("float32", "tf32", "bf16", "float16")
OPTIMIZERS = ("ours", "adamw", "sgd", "muon")
CONTENTS = "contents of the data"
"""Entry of a run's description that holds the digest of its data and tokenizer."""
HEAD = 64
"""Width of a head of GPT-2, in all of its sizes."""
DECAYED = 5
"""With ``--schedule wsd`` the decay takes one in so many steps, the last ones."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of a run; ``--help`` explains each.

    None means that the value follows from the others, and ``_resolved`` fills it in.
    """

    checkpoint_flag: ClassVar[str] = "--checkpoint"

    model: str
    strategy: str | None
    replicate: int | None
    shard: int | None
    tensor: int | None
    context: int | None
    pipeline: int | None
    expert: int | None
    engine: str
    precision: str
    path: str
    attention: str
    compile: str | None
    graph: bool
    batch: int
    accumulate: int
    steps: int
    lr: float
    min_lr: float
    schedule: str
    warmup: int
    weight_decay: float
    clip: float
    optimizer: str | None
    muon_lr: float | None
    bucket_mb: float
    data: str | None
    column: str | None
    limit: int | None
    items: int | None
    seed: int
    device: str
    threads: int
    deterministic: bool
    checkpoint: Path | None
    save_every: int
    log: Path | None
    tensorboard: Path | None
    quiet: bool
    peak_tflops: float | None
    image_size: int | None = None
    classes: int | None = None
    patch_size: int | None = None
    length: int | None = None
    family: str | None = None
    window: int | None = None
    interval: int | None = None
    dim: int | None = None
    n_layers: int | None = None
    tokenizer: str | None = None
    n_experts: int | None = None
    top_k: int | None = None
    bias_rate: float | None = None
    eval_every: int | None = None
    held_out: float | None = None
    sample_every: int | None = None
    prompt: str | None = None
    sample_tokens: int = 64
    eval_tasks: list[str] | None = None
    eval_tasks_every: int | None = None
    export: Path | None = None
    wandb: str | None = None

    @property
    def ours(self) -> bool:
        return self.engine == "ours"

    def uses(self, *kinds: str) -> bool:
        """Whether ranks divide the work in one of these ways; one rank counts if ``--strategy`` asks for it."""
        named = STRATEGIES[self.strategy] if self.strategy else None
        return any(kind == named or (getattr(self, kind) or 1) != 1 for kind in kinds)

    @property
    def shards(self) -> bool:
        """Whether parameters are divided by ``FullySharded`` or ``fully_shard``,
        which then choose the dtype of the products too.

        PyTorch's DDP supports neither divided layers nor stages. There ``fully_shard``, with a single shard, averages
        over the copies.
        """
        return self.uses("shard") or (
            not self.ours and self.uses("replicate", "context") and self.uses("tensor", "pipeline")
        )

    @property
    def is_parallel(self) -> bool:
        return self.uses(*KINDS)

    def named(self, kind: str) -> str:
        """The flag that asks for this kind, as it was given."""
        return f"--strategy {self.strategy}" if self.strategy else f"--{kind} {getattr(self, kind)}"

    @property
    def how(self) -> str:
        """All flags that say how the ranks divide the work."""
        if self.strategy:
            return f"--strategy {self.strategy}"
        return " ".join(self.named(kind) for kind in KINDS if self.uses(kind)) or "--strategy single"


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
    _add_training_flags(parser, items)
    _add_data_flags(parser, items)
    _add_quality_flags(parser)
    _add_place_flags(parser)
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
        "--graph", action="store_true", help="record the whole step as a CUDA graph (single, or ddp with --engine ours)"
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


def _add_training_flags(parser: Parser, items: str) -> None:
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


def _add_quality_flags(parser: Parser) -> None:
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


def _add_place_flags(parser: Parser) -> None:
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


def parse(parser: Parser, argv: list[str] | None, kind: type[Options] = Options) -> Options:
    """The options, with every default filled in that follows from other flags.

    Args:
        parser: The program's flags.
        argv: What was asked for; None takes the command line.
        kind: The class of the options, which may have further fields.

    Raises:
        UsageError: a flag is wrong, or two flags exclude each other.
    """
    given = vars(parser.parse_args(argv))
    if given["held_out"] and "image_size" in given and given["data"] and has_test_split(given["data"]):
        raise UsageError(
            f"--held-out {given['held_out']:g}: --data {given['data']} has a test split of its own, "
            "which is held out; expected no --held-out"
        )
    known = {field.name for field in fields(kind)}
    options = kind(**{name: value for name, value in given.items() if name in known})
    return check_flags(kind(**{**vars(options), **_resolved(options)}))


def _resolved(o: Options) -> dict[str, Any]:
    degrees = [kind for kind in KINDS if getattr(o, kind) is not None]
    if o.strategy and degrees:
        raise UsageError(
            f"--strategy {o.strategy} with --{degrees[0]} {getattr(o, degrees[0])}: "
            "expected either a strategy or degrees"
        )
    if [getattr(o, kind) for kind in KINDS].count(-1) > 1:
        raise UsageError("more than one degree is -1: only one can be what the others leave")
    found: dict[str, Any] = {"path": o.path, "compile": o.compile}
    if not degrees:
        found["strategy"] = o.strategy or "single"
    if o.path == "auto":
        found["path"] = "plain" if o.uses("tensor", "context", "pipeline") or o.n_experts else "fast"
    if o.compile == "auto":
        found["compile"] = "blocks" if o.is_parallel else "whole"
    found["optimizer"] = o.optimizer or ("ours" if o.ours and not o.graph else "adamw")
    if o.n_experts:
        found["top_k"] = o.top_k or min(2, o.n_experts)
        found["bias_rate"] = 1e-3 if o.bias_rate is None else o.bias_rate
    if o.eval_tasks:
        found["eval_tasks_every"] = o.eval_tasks_every or o.eval_every or o.steps
    found["data"] = o.data or ("embedded" if o.model == "tiny" else "synthetic")
    try:
        found["held_out"] = o.held_out or ((held_out_share(found["data"]) or 0.1) if o.eval_every else None)
    except ValueError as error:  # a damaged corpus
        raise UsageError(f"--data {error}") from None
    return found


def check_flags(o: Options) -> Options:
    """Returns the options unchanged if no two of them exclude each other.

    Raises:
        UsageError: two of them do.
    """
    divides = o.uses("tensor", "context", "pipeline")
    if o.path == "fast" and divides:
        raise UsageError(f"--path fast computes whole layers, but {o.how} divides them: expected --path plain")
    if o.compile == "whole" and (divides or o.uses("shard")):
        raise UsageError(f"--compile whole cannot see into the hooks of {o.how}: expected --compile blocks")
    if o.compile == "whole" and o.uses("replicate") and not o.ours and o.bucket_mb < 1:
        raise UsageError(
            f"--bucket-mb {o.bucket_mb:g} with --compile whole: "
            "PyTorch cuts the graph at buckets of 1 MB and more; expected --compile blocks"
        )
    if o.precision == "float16" and o.uses("tensor") and not o.ours:
        raise UsageError(f"--precision float16 with {o.how} --engine torch: expected bf16, or --engine ours")
    if o.precision == "float16" and o.uses("pipeline"):
        raise UsageError(f"--precision float16 with {o.how}: no loss scale goes through the stages; expected bf16")
    _check_mixtures(o)
    if o.attention not in ("quickest", "fused") and (o.path == "plain" or o.precision not in ("bf16", "float16")):
        raise UsageError(
            f"--attention {o.attention} with --path {o.path} --precision {o.precision}: "
            "a 16-bit kernel of the fast path; "
            "expected --attention fused, or --path fast with --precision bf16 or float16"
        )
    if o.warmup > o.steps:
        raise UsageError(f"--warmup {o.warmup} is longer than --steps {o.steps}: expected at most {o.steps}")
    if o.dim and o.dim % HEAD:
        raise UsageError(f"--dim {o.dim}: expected a multiple of {HEAD}, the width of a head")
    if o.schedule == "wsd" and (o.min_lr or o.warmup > o.steps - o.steps // DECAYED):
        raise UsageError(
            f"--schedule wsd with --min-lr {o.min_lr:g} --warmup {o.warmup}: "
            f"it falls to 0 over the last fifth of {o.steps} steps; "
            "expected no --min-lr, and a warm-up that ends before"
        )
    if o.muon_lr is not None and (o.optimizer != "muon" or not o.lr):
        raise UsageError(
            f"--muon-lr {o.muon_lr:g} with --optimizer {o.optimizer} --lr {o.lr:g}: "
            "expected --optimizer muon, whose other parameters have a rate above 0 too"
        )
    if o.min_lr > o.lr:
        raise UsageError(f"--min-lr {o.min_lr} is above --lr {o.lr}: expected at most {o.lr}")
    if o.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs the package tensorboard, which is not installed: pip install tensorboard")
    if o.wandb and importlib.util.find_spec("wandb") is None:
        raise UsageError("--wandb needs the package wandb, which is not installed: pip install wandb")
    if is_corpus(o.data or ""):
        for flag, value in (("--tokenizer", o.tokenizer), ("--limit", o.limit), ("--column", o.column)):
            if value is not None:
                raise UsageError(
                    f"{flag} {value} with --data {o.data}: a corpus is tokenized already; expected no {flag}"
                )
    if o.graph:
        _check_graph(o)
    _check_quality(o)
    return o


def _check_mixtures(o: Options) -> None:
    if not o.n_experts:
        for flag, value in (("--top-k", o.top_k), ("--bias-rate", o.bias_rate)):
            if value is not None:
                raise UsageError(
                    f"{flag} {value} without --n-experts: the model has no mixtures; expected both, or neither"
                )
        return
    if o.export:
        raise UsageError(
            f"--export with --n-experts {o.n_experts}: no other library has a GPT-2 of mixtures; expected no --export"
        )
    if o.top_k and o.top_k > o.n_experts:
        raise UsageError(f"--top-k {o.top_k} is more than --n-experts {o.n_experts}: expected at most {o.n_experts}")
    for flag, asked in (("--path fast", o.path == "fast"), (f"--compile {o.compile}", o.compile), ("--graph", o.graph)):
        if asked:
            raise UsageError(
                f"{flag} with --n-experts {o.n_experts}: how many rows an expert gets is known only when "
                "the step runs; "
                f"expected {'--path plain' if o.path == 'fast' else f'no {flag.split()[0]}'}"
            )


def _check_quality(o: Options) -> None:
    if o.held_out and not o.eval_every:
        raise UsageError(f"--held-out {o.held_out:g} without --eval-every: nothing would read the held-out part")
    if o.sample_every and not o.prompt:
        raise UsageError(f"--sample-every {o.sample_every} without --prompt: expected a text for the model to continue")
    if o.prompt and not o.sample_every:
        raise UsageError("--prompt without --sample-every: expected the number of steps between samples")
    if o.prompt and any("\ud800" <= character <= "\udfff" for character in o.prompt):
        raise UsageError(f"--prompt {o.prompt!a} holds bytes that are not UTF-8; expected text")
    if o.eval_tasks_every and not o.eval_tasks:
        raise UsageError(f"--eval-tasks-every {o.eval_tasks_every} without --eval-tasks: expected tasks, such as sums")
    unread = is_corpus(o.data or "") and not has_tokenizer(Path(str(o.data)))
    for flag, asked in (("--sample-every", o.sample_every), ("--eval-tasks", o.eval_tasks)):
        if asked and unread:
            raise UsageError(
                f"{flag} with --data {o.data}: its shards have no merges.json, so no token can be read as text; "
                "expected a corpus of lib.runs.corpus"
            )
        if asked and o.data == "synthetic":
            raise UsageError(
                f"{flag} with --data synthetic: a model of random tokens knows no text; expected other --data"
            )


def _places(o: Options) -> list[tuple[str, Path]]:
    """Each folder that a run writes to, after the flag and the path that name it."""
    log = o.log and o.log.parent
    named = (
        (o.checkpoint_flag, o.checkpoint, o.checkpoint),
        ("--log-file", o.log, log),
        ("--tensorboard", o.tensorboard, o.tensorboard),
        ("--export", o.export, o.export),
    )
    return [(f"{flag} {path}", folder) for flag, path, folder in named if folder is not None]


def check_places(o: Options) -> None:
    """Check that the folders that a run writes to are there, or can be created. Creates nothing.

    Raises:
        UsageError: a folder cannot be created or written to.
    """
    for asked, folder in _places(o):
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
        if not nearest.is_dir():
            raise UsageError(
                f"{asked}: cannot create the folder {folder} ({nearest} is not a folder); "
                "expected a folder that can be written to"
            )
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UsageError(
                f"{asked}: no permission to write into {nearest}; expected a folder that can be written to"
            )
    if o.log and o.log.is_dir():
        raise UsageError(f"--log-file {o.log} is a folder; expected a file, such as {o.log / 'log.jsonl'}")


def make_places(o: Options) -> None:
    """Create the folders that a run writes to, so that it trains nothing that it could not save.

    Raises:
        UsageError: a folder cannot be created.
    """
    for asked, folder in _places(o):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{asked}: cannot create the folder {folder} ({error.strerror}); "
                "expected a folder that can be written to"
            ) from None


def _locked_places(o: Options) -> list[tuple[str, Path]]:
    """Each folder that belongs to one run alone, after its flag."""
    places = {
        path.resolve(): (f"{flag} {path}", path)
        for flag, path in (("--export", o.export), (o.checkpoint_flag, o.checkpoint))
        if path is not None
    }
    return list(places.values())


def check_unlocked(o: Options) -> None:
    """Check that no other run writes to this one's folders. Writes nothing.

    Raises:
        UsageError: one does.
    """
    for asked, folder in _locked_places(o):
        refuse_if_held(folder, asked)


def lock_places(o: Options, rank: int, held: ExitStack) -> None:
    """Lock this run's folders. Rank 0 holds the locks; all ranks call this together, and all raise, or none does.

    Raises:
        UsageError: another run was quicker.
    """
    refused: list[str | None] = [None]
    if rank == 0:
        try:
            for asked, folder in _locked_places(o):
                held.callback(FolderLock(folder, asked).release)
        except UsageError as error:
            refused = [str(error)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(refused, 0)
    if refused[0]:
        raise UsageError(refused[0])


def _check_graph(o: Options) -> None:
    if o.is_parallel and (o.uses("shard", "tensor", "context", "pipeline", "expert") or not o.ours):
        raise UsageError(f"--graph with {o.how} --engine {o.engine}: expected single, or ddp with --engine ours")
    if o.precision == "float16":
        raise UsageError(
            "--graph with --precision float16: the loss scaler needs the host in each step; expected bf16, "
            "tf32 or float32"
        )
    if o.optimizer == "ours":
        raise UsageError(
            "--graph with --optimizer ours: that optimizer counts its steps on the host; expected adamw, sgd or muon"
        )


def check_batch(o: Options, n_data_ranks: int) -> None:
    """Check that this many ranks can divide the batch.

    Raises:
        UsageError: it does not divide evenly.
    """
    parts = n_data_ranks * o.accumulate
    if o.batch % parts:
        whole_part, rest = divmod(o.batch, parts)
        raise UsageError(
            f"--batch {o.batch} does not divide into {n_data_ranks} ranks x {o.accumulate} micro-batches: "
            f"{o.batch} = {whole_part} x {parts} + {rest}; expected a multiple of {parts}"
        )
