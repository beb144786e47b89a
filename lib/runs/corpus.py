"""Make a corpus for `lib.runs.train_gpt2`: gather text, clean it, divide it, learn a tokenizer,
and write one row of tokens.

python -m lib.runs.corpus my_corpus                                   # English and code from free Debian packages
python -m lib.runs.corpus my_corpus --packages git-doc manpages       # from these
python -m lib.runs.corpus my_corpus --clean --evaluation my_tasks     # by chapter 26's rules, as shards
python -m lib.runs.corpus my_corpus --dataset openwebtext --limit 100000 --clean quality,personal,copies
python -m lib.runs.train_gpt2 --model small --data my_corpus

Packages are downloaded with apt, which needs no special rights for this, and are unpacked, not installed. The folder
gets ``tokens.bin`` (uint16; the held-out documents last), ``merges.json`` (chapter 1's BPE) and ``corpus.json``: each
source with its version and licences, and all counts.

With --clean the tokens are in chapter 26's shards with a ``manifest.json`` in place of ``tokens.bin``; ``dropped.md``
has a table of what each rule dropped, and ten examples of each. Two programs with the same flags write the same bytes.
The folder ``work`` is what a killed program leaves: the same command goes on from there. It is deleted at the end.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from lib.runs.data.corpus import VOCAB_SIZE, Form, make_place, start_work, write
from lib.runs.data.gathering import PACKAGES, SHORTEST, Source, documents_of_dataset, documents_of_packages
from lib.runs.data.store import Document, Store
from lib.runs.flags import Parser, UsageError, fraction, positive, some_of, whole
from lib.runs.lock import closing_lock
from lib.runs.memory import shortage

LESS = ("--limit", "--longest", "--most", "--sample", "--vocab")
"""Flags that change how much memory is needed."""
STEPS = ("extract", "quality", "c4", "personal", "copies", "lines")
"""What ``--clean`` can name, in the order in which it is done."""
USUAL = "extract,quality,personal,copies,lines"
N_GRAM = 13
"""Words of a question that a document must hold to be dropped."""


def make_parser() -> argparse.ArgumentParser:
    """All flags of this program."""
    parser = Parser(
        prog="python -m lib.runs.corpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the corpus is written")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--packages", nargs="+", default=PACKAGES, help="Debian packages; default: about thirty with free licences"
    )
    where.add_argument("--dataset", help="a file, a folder or a data set of the hub, in place of packages")
    parser.add_argument("--column", default="text", help="the data set's column with the text")
    parser.add_argument("--limit", type=whole(1), help="read no more documents of the data set than this")
    parser.add_argument(
        "--longest",
        type=whole(SHORTEST),
        help="characters of a document that are kept, from its beginning; default: all",
    )
    parser.add_argument("--most", type=positive, default=50, help="million characters of each package at most")
    parser.add_argument(
        "--held-out", type=fraction, default=0.01, help="share of the documents that is never trained on"
    )
    parser.add_argument("--sample", type=positive, default=20, help="million characters that the tokenizer learns from")
    parser.add_argument("--vocab", type=whole(257), default=VOCAB_SIZE, help="size of the vocabulary, at most 65,536")
    _add_clean_flags(parser)
    return parser


def _add_clean_flags(parser: argparse.ArgumentParser) -> None:
    """What is dropped."""
    clean = parser.add_argument_group("chapter 26's rules")
    clean.add_argument(
        "--clean", type=some_of(*STEPS), nargs="?", const=USUAL, metavar="STEPS",
        help="apply these steps, with commas between: extract (text of HTML pages), quality (Gopher's rules; prose "
        "only), c4 (C4's rules; prose only), personal (mask addresses and numbers), copies (drop near copies), lines "
        f"(drop lines of five words or more where they come again; prose only); without names: {USUAL}",
    )  # fmt: skip
    clean.add_argument(
        "--evaluation", metavar="TASK",
        help=f"drop documents that hold {N_GRAM} neighbouring words of these questions: a file, a folder or a name, "
        "as lib.runs.evaluate takes them",
    )  # fmt: skip
    clean.add_argument(
        "--shard", type=positive, help="million tokens of a shard; default: 100 with --clean or --evaluation, else none"
    )


def read_evaluation(name: str | None) -> list[str]:
    """The questions of an evaluation, each with its right answer.

    Raises:
        UsageError: They cannot be read, or none is long enough to be found.
    """
    if name is None:
        return []
    from lib.data import normalize
    from lib.runs.data.questions import load

    try:
        tasks = load(name, None, 0)
    except UsageError as error:
        raise UsageError(str(error).replace("--tasks", "--evaluation")) from None
    texts = [f"{q['query']} {q['choices'][q['gold']]}" for questions in tasks.values() for q in questions]
    if not any(len(normalize(text)) >= N_GRAM for text in texts):
        raise UsageError(f"--evaluation {name}: no question has {N_GRAM} words, so no document would be dropped")
    return texts


def gathered(o: argparse.Namespace, work: Path) -> tuple[Store, list[Source]]:
    """The documents as they are, without chapter 26's rules: a killed program gathers them again."""
    found: list[Source] = []
    shutil.rmtree(work / "gathered", ignore_errors=True)
    store, part = Store(work / "gathered"), list[Document]()
    if o.dataset:
        each = documents_of_dataset(o.dataset, o.column, o.limit, o.longest, found)
    else:
        each = documents_of_packages(o.packages, round(o.most * 1e6), o.longest, found)
    for document in each:
        part.append(document)
        if len(part) == 1024:
            store.add(part)
            part = []
    store.add(part)
    return store, found


def make(o: argparse.Namespace) -> None:
    """Make the corpus."""
    evaluation = read_evaluation(o.evaluation)
    is_cleaned, o.clean = bool(o.clean or o.evaluation), o.clean.split(",") if o.clean else []
    shard = round((o.shard or 100) * 1e6) if o.shard or is_cleaned else None
    form = Form(held_out=o.held_out, sample=max(1, round(o.sample * 1e6)), vocab=o.vocab, shard=shard)
    request: dict[str, Any] = {"flags": {name: str(value) for name, value in vars(o).items()}, "questions": evaluation}
    if o.dataset and Path(o.dataset).is_file():
        request["size"] = Path(o.dataset).stat().st_size
    work = start_work(o.folder, request)
    if is_cleaned:
        from lib.runs.data.cleaning import clean_all

        store, found, tally = clean_all(o, work, evaluation)
        print("\n".join(tally.table()))
        (o.folder / "dropped.md").write_text(tally.page(), encoding="utf-8")
        write(o.folder, store, found, form, cleaning=tally.steps)
    else:
        store, found = gathered(o, work)
        write(o.folder, store, found, form)
    shutil.rmtree(work)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 after one line about what is wrong with the request."""
    try:
        o = make_parser().parse_args(argv)
        if o.vocab > 2**16:
            raise ValueError(f"--vocab {o.vocab}: expected at most {2**16}, what two bytes can name")
        make_place(o.folder)
        with closing_lock(o.folder):
            make(o)
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        print(f"python -m lib.runs.corpus: {shortage(error, LESS) or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
