"""Make a corpus for `lib.runs.train_gpt2`: gather text, clean it, divide it, learn a tokenizer,
and write one row of tokens.

python -m lib.runs.corpus my_corpus                                   # English and code from free Debian packages
python -m lib.runs.corpus my_corpus --packages git-doc manpages       # from these
python -m lib.runs.corpus my_corpus --dataset openwebtext --limit 100000
python -m lib.runs.train_gpt2 --model small --data my_corpus

Packages are downloaded with apt, which needs no special rights for this, and are unpacked, not installed. The folder
gets ``tokens.bin`` (uint16; the held-out documents last), ``merges.json`` (chapter 1's BPE) and ``corpus.json``: each
source with its version and licences, and all counts.
"""

import argparse
import sys
from pathlib import Path

from lib.runs.data.corpus import (
    PACKAGES,
    SHORTEST,
    VOCAB_SIZE,
    Source,
    documents_of_dataset,
    documents_of_packages,
    make_place,
    write,
)
from lib.runs.flags import Parser, fraction, positive, whole
from lib.runs.lock import closing_lock
from lib.runs.memory import shortage

LESS = ("--limit", "--longest", "--most", "--sample", "--vocab")
"""Flags that change how much memory is needed."""


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
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 after one line about what is wrong with the request."""
    found: list[Source] = []
    try:
        o = make_parser().parse_args(argv)
        if o.vocab > 2**16:
            raise ValueError(f"--vocab {o.vocab}: expected at most {2**16}, what two bytes can name")
        make_place(o.folder)
        with closing_lock(o.folder):
            if o.dataset:
                each = documents_of_dataset(o.dataset, o.column, o.limit, o.longest, found)
            else:
                each = documents_of_packages(o.packages, round(o.most * 1e6), o.longest, found)
            write(o.folder, list(each), found, o.held_out, max(1, round(o.sample * 1e6)), o.vocab)
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        print(f"python -m lib.runs.corpus: {shortage(error, LESS) or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
