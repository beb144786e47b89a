"""From a command line to options that can be met: defaults that follow from other flags, and flags that exclude others.

All of it is found before anything is allocated.
"""

import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

from lib.given.data.images import has_test_split
from lib.runs.data.corpus import has_tokenizer, held_out_share, is_corpus
from lib.runs.engine.options import DECAYED, HEAD, KINDS, Options
from lib.runs.flags import Parser, UsageError


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
    if o.averaging == "copies" and not (o.copies or o.only_shards):
        raise UsageError(
            f"--averaging copies with {o.how} --engine {o.engine}: expected ddp or fsdp with --engine ours"
        )
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


def _check_graph(o: Options) -> None:
    if o.is_parallel and (o.uses("tensor", "context", "pipeline", "expert") or not o.ours):
        raise UsageError(
            f"--graph with {o.how} --engine {o.engine}: expected single, or ddp or fsdp with --engine ours"
        )
    if o.uses("shard") and o.optimizer == "muon":
        raise UsageError(
            f"--graph with {o.how} --optimizer muon: Muon counts steps of flat shards on the host; "
            "expected adamw or sgd, or no --graph"
        )
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
