"""Measure the steps of ``lib.runs.corpus --clean``: documents a second on two processes, beside datatrove's.

``python -m lib.bench.data_speeds`` needs no GPU and no network, and takes some minutes. It writes
``chapters/measurements/data_speeds.json``. Datatrove takes part where it can be imported; its filters ask for more:
``pip install datatrove lxml_html_clean nltk spacy tokenizers trafilatura 'xxhash<4'``.

Both get the same documents, chapter 26's with known dirt, and the same processes, and they take turns.
Ours are the program's own functions, with their counts of what they drop; the steps that need all documents also read
and write the program's files. Theirs get documents from memory, and write only the files that one of their stages
leaves for the next.
"""

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lib.bench.kit import in_turns, record, seconds_of, spread
from lib.demos import data as dirt
from lib.given.data.record import MEASUREMENTS
from lib.runs.data import cleaning
from lib.runs.data.store import Document, Store, batched, streamed
from lib.runs.flags import ProgramParser, whole

ALONE = ("extract", "quality", "c4", "personal")
"""Steps that need one document at a time."""
TOGETHER = ("copies", "lines", "evaluation")
"""Steps that need all documents."""
PART = 256
"""Documents of a part of the program's store."""
Texts = list[str]


def ours_alone(name: str, texts: Texts, pool: Executor) -> None:
    """A step of the program on documents one by one."""
    items: list[cleaning.Item] = [(str(i), text) for i, text in enumerate(texts)]
    for _ in streamed(pool, partial(cleaning.judged, names=(name,)), batched(items, lambda item: len(item[1]))):
        pass


def ours_together(name: str, texts: Texts, pool: Executor) -> None:
    """A step of the program on all documents, from one store to the next."""
    evaluation = dirt.SENTENCES if name == "evaluation" else []
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder, "gathered"))
        for start in range(0, len(texts), PART):
            store.add(Document(str(i), text) for i, text in enumerate(texts[start : start + PART], start))
        cleaning.steps_after(Path(folder), store, [name], evaluation, pool)


# ---- datatrove -------------------------------------------------------------------------------------------------------


@cache
def _theirs(name: str) -> Callable[[str], Any]:
    """Datatrove's function of a document for a step, which a process makes once."""
    from datatrove.data import Document as Theirs
    from datatrove.pipeline.extractors import Trafilatura
    from datatrove.pipeline.filters import C4QualityFilter, GopherQualityFilter
    from datatrove.pipeline.formatters import PIIFormatter

    if name == "extract":
        return Trafilatura().extract
    if name == "personal":
        return PIIFormatter().format
    judge = GopherQualityFilter() if name == "quality" else C4QualityFilter()
    return lambda text: judge.filter(Theirs(text=text, id=""))


def _each(texts: Texts, name: str) -> None:
    for text in texts:
        _theirs(name)(text)


def theirs_alone(name: str, texts: Texts, pool: Executor) -> None:
    """Datatrove's filter, formatter or extractor."""
    for _ in streamed(pool, partial(_each, name=name), batched(texts, len)):
        pass


def _stage(stage: Callable, texts: Texts | None, rank: int, world_size: int) -> int:
    from datatrove.data import Document as Theirs

    documents = None if texts is None else (Theirs(text=text, id="") for text in texts[rank::world_size])
    return sum(1 for _ in stage(data=documents, rank=rank, world_size=world_size) or [])


def _stages(stages: list[tuple[Callable, bool, int]], texts: Texts, pool: Executor) -> None:
    """Datatrove's stages one after the other, the ranks of each on the processes."""
    for stage, reads, n in stages:
        waiting = [pool.submit(_stage, stage, texts if reads else None, rank, n) for rank in range(n)]
        for future in waiting:
            future.result()


def theirs_copies(texts: Texts, pool: Executor) -> None:
    """MinHash with as many bands of as many values as the program has."""
    from datatrove.pipeline.dedup import minhash as m

    n_bands = cleaning.N_BANDS
    config = m.MinhashConfig(num_buckets=n_bands, hashes_per_bucket=cleaning.N_HASHES // n_bands)
    with tempfile.TemporaryDirectory() as f:
        stages = [
            (m.MinhashDedupSignature(f"{f}/a", config), True, 2),
            (m.MinhashDedupBuckets(f"{f}/a", f"{f}/b", config=config), False, n_bands),
            (m.MinhashDedupCluster(f"{f}/b", f"{f}/c", config), False, 1),
            (m.MinhashDedupFilter(f"{f}/c"), True, 2),
        ]
        _stages(stages, texts, pool)


def theirs_lines(texts: Texts, pool: Executor) -> None:
    """Its sentence deduplication, told that lines are sentences."""
    from datatrove.pipeline.dedup import sentence_dedup as s

    config = s.SentDedupConfig(n_sentences=1, split_sentences=False, min_doc_words=0, min_num_sentences=0)
    with tempfile.TemporaryDirectory() as f:
        stages = [
            (s.SentenceDedupSignature(f"{f}/a", config=config), True, 2),
            (s.SentenceFindDedups(f"{f}/a", f"{f}/b", config=config), False, 1),
            (s.SentenceDedupFilter(f"{f}/b", config), True, 2),
        ]
        _stages(stages, texts, pool)


# ---- both ------------------------------------------------------------------------------------------------------------


def competitors(name: str, texts: Texts, pool: Executor) -> dict[str, Callable[[], None]]:
    """Who does a step, by name."""
    ours = ours_together if name in TOGETHER else ours_alone
    found: dict[str, Callable[[], None]] = {"ours": partial(ours, name, texts, pool)}
    if find_spec("datatrove"):
        theirs: dict[str, Callable[[Texts, Executor], None] | None] = {
            "copies": theirs_copies,
            "lines": theirs_lines,
            "evaluation": None,
        }
        other = theirs.get(name, partial(theirs_alone, name))
        found |= {"datatrove": partial(other, texts, pool)} if other else {}
    return found


def measured(times: dict[str, list[float]], n: int) -> dict[str, Any]:
    """Documents a second of each competitor, and how many times as fast as the other ours is, turn by turn."""
    found: dict[str, Any] = {f"{who}_per_s": spread([n / t for t in each]) for who, each in times.items()}
    if "datatrove" in times:
        found["times_as_fast"] = spread([b / a for a, b in zip(times["ours"], times["datatrove"], strict=True)])
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=whole(1), default=300, help="documents before dirt, at most")
    parser.add_argument("--rounds", type=whole(1), default=5, help="turns of each that count")
    parser.add_argument("--processes", type=whole(1), default=2)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the record is written")
    o = parser.parse_args(arguments)
    dirty = dirt.dirty(0, o.documents)
    results: dict[str, Any] = {
        "documents": len(dirty.texts),
        "characters": sum(map(len, dirty.texts)),
        "processes": o.processes,
        "datatrove": version("datatrove") if find_spec("datatrove") else None,
        "steps": {},
    }
    if results["datatrove"]:
        from loguru import logger

        logger.disable("datatrove")
    with ProcessPoolExecutor(o.processes) as pool:
        for name in (*ALONE, *TOGETHER):
            texts = dirty.pages if name == "extract" else dirty.texts
            times = in_turns(competitors(name, texts, pool), partial(seconds_of, device="cpu"), o.rounds, n_warmup=1)
            results["steps"][name] = measured(times, len(texts))
            print(f"{name:12}", {who: round(s["median"], 2) for who, s in results["steps"][name].items()}, flush=True)
    record("data_speeds", results, o.folder)


if __name__ == "__main__":
    main()
