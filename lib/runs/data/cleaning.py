"""A corpus is cleaned by chapter 26's functions, step by step, each from one store of documents to the next.

No step holds the corpus in memory: a part of a store at a time, and a few bytes for each repeated line and document.
A killed program goes on behind the last finished part.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from lib.data import contaminated_spans, deduplicate_lines, extract_text, minhash_signature, near_duplicates, normalize
from lib.given.data.pages import PRIME, text_hash
from lib.given.data.parts import Clusters
from lib.runs.data.gathering import MARKED_UP, Source, clean, package_files, suffix, texts_of_dataset
from lib.runs.data.rules import RULES, Judged, Tally, judge
from lib.runs.data.store import PART, Document, Lines, Store, batched, make_pool, save, streamed

Part = Callable[[int, list[Document] | None], list[Judged]]
"""A step on one part of a store: its number and its documents, or None if an earlier run has finished the part."""
Item = tuple[str, bytes | str]
"""A place, and the bytes of a file or the text of a row."""
N_WORDS = 5
"""Fewest words of a line that is dropped where it comes again: code and lists repeat shorter ones on purpose."""
THRESHOLD, N_HASHES, N_BANDS = 0.8, 126, 18
"""Of near copies: bands of seven find 98.5 % of the pairs at the threshold, and more of those above it."""
MOST = 2**22
"""Marks that are sorted in memory at a time."""


# ---- gather: the rules that need one document ------------------------------------------------------------------------


def _read(place: str, data: bytes, names: tuple[str, ...], tally: Tally) -> Document | None:
    """The text of a package's file."""
    is_page = "extract" in names and suffix(place) in (".html", ".htm")
    raw = Document(place, data.decode(errors="replace"))
    found = clean(place, data, extract_text if is_page else None)
    rules = {"no_text": raw.text} if found is None else {"page": raw.text} if suffix(place) in MARKED_UP else {}
    tally.count("extract" if "extract" in names else "files", raw, found, rules)
    return found


def judged(items: list[Item], names: tuple[str, ...]) -> tuple[list[Document], Tally]:
    """The documents that the rules on one document leave of some items, and what they dropped."""
    kept, tally = [], Tally()
    for place, data in items:
        if isinstance(data, str):
            found: Document | None = Document(place, data.encode(errors="replace").decode())  # no half of a pair
            left = names
        else:
            found, left = _read(place, data, names, tally), tuple(name for name in names if name != "extract")
        if found and (found := judge(found, left, tally)):
            kept.append(found)
    return kept, tally


def gather(
    store: Store, source: Source, items: Iterable[Item], names: tuple[str, ...], limits: tuple[int | None, int | None],
    pool: Executor,
) -> None:  # fmt: skip
    """Judge a source's items, behind those of its finished parts, and write the documents that stay.

    Args:
        store: Gets the documents; the notes of a part say how many items were read and what was dropped.
        source: Where they come from; what is kept is counted there.
        items: All items of the source, the same ones in each run.
        names: Which of ``RULES``.
        limits: Most characters of the source, and of a document.
        pool: Processes that judge.
    """
    most, longest = limits
    n_read = 0
    for notes in store.notes():
        if notes["source"]["name"] == source.name:
            n_read, source.__dict__ = notes["read"], dict(notes["source"])
            if notes["is_last"]:
                return
    parts = _parts(islice(items, n_read, None))
    part, is_last = next(parts, []), False
    while not is_last:
        following = next(parts, [])
        kept, tally = [], Tally()
        batches = batched(part, lambda item: len(item[1]))
        for documents, counts in streamed(pool, partial(judged, names=names), batches):
            tally.add(counts)
            if most is None or source.characters < most:
                kept += [source.add(document, longest) for document in documents]
        n_read += len(part)
        is_last = not following or (most is not None and source.characters >= most)
        store.add(kept, {"source": asdict(source), "read": n_read, "is_last": is_last, "tally": asdict(tally)})
        part = following


def _parts(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Consecutive items, as many as a part is made from."""
    part: list[Item] = []
    total = 0
    for item in items:
        part.append(item)
        total += len(item[1]) + 1
        if total >= PART:
            yield part
            part, total = [], 0
    if part:
        yield part


# ---- the rules that need all documents -------------------------------------------------------------------------------


def marks(store: Store, name: str, function: Callable[[Document], np.ndarray], pool: Executor) -> list[Path]:
    """A file of numbers for each part of a store: those of its documents, one after the other."""
    paths = [store.folder / f"{name}_{i:05d}.bin" for i in range(store.n_parts)]
    for i, path in enumerate(paths):
        if not path.exists():
            batches = batched(store.part(i), lambda document: len(document.text))
            rows = streamed(pool, partial(_numbers, function=function), batches)
            save(path, b"".join(row.tobytes() for row in rows))
    return paths


def _numbers(documents: list[Document], function: Callable[[Document], np.ndarray]) -> np.ndarray:
    return np.concatenate([function(document) for document in documents])


def read_marks(path: Path) -> np.ndarray:
    return np.fromfile(path, dtype=np.uint64)


def repeated(paths: Sequence[Path], most: int = MOST) -> np.ndarray:
    """The numbers that occur more than once in all files together, ascending.

    They are sorted in as many rounds as keep about ``most`` of them in memory.
    """
    n_rounds = max(1, -(-sum(path.stat().st_size for path in paths) // (8 * most)))
    found = [np.zeros(0, np.uint64)]
    for r in range(n_rounds):
        mine = [row[row % np.uint64(n_rounds) == r] for row in map(read_marks, paths)]
        values, counts = np.unique(np.concatenate([found[0], *mine]), return_counts=True)
        found.append(values[counts > 1])
    return np.sort(np.concatenate(found))


def _among(values: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each number of a row whether it is one of the ascending values, and its index there."""
    at = np.searchsorted(values, row)
    inside = at < len(values)
    inside[inside] = values[at[inside]] == row[inside]
    return inside, at


def long_lines(document: Document) -> list[str]:
    """The lines of prose that are dropped where they come again."""
    lines = [] if document.is_code else document.text.splitlines(keepends=True)
    return [line for line in lines if len(line.split()) >= N_WORDS]


def _line_marks(document: Document) -> np.ndarray:
    return np.array([text_hash(line.strip()) for line in long_lines(document)], np.uint64)


def lines(store: Store, pool: Executor) -> Part:
    """Every long line stays where it comes first: ``deduplicate_lines`` of all documents, a part at a time."""
    paths = marks(store, "lines", _line_marks, pool)
    again = repeated(paths)
    seen = np.zeros(len(again), bool)  # which of them an earlier part has had

    def judge_part(i: int, documents: list[Document]) -> list[Judged]:
        texts = [long_lines(document) for document in documents]
        each = [line for text in texts for line in text]
        inside, at = _among(again, read_marks(paths[i]))
        known = inside.copy()
        known[inside] = seen[at[inside]]
        before = "\n".join(line.strip() for line, is_known in zip(each, known, strict=True) if is_known)
        kept = deduplicate_lines([before, *("".join(text) for text in texts)], keep="first")[1:]
        return [_without(document, text) for document, text in zip(documents, kept, strict=True)]

    def part(i: int, documents: list[Document] | None) -> list[Judged]:
        found = [] if documents is None else judge_part(i, documents)
        inside, at = _among(again, read_marks(paths[i]))
        seen[at[inside]] = True
        return found

    return part


def _without(document: Document, kept: str) -> Judged:
    """The document with only those of its long lines that are kept, which are in order."""
    waiting, dropped, stays = kept.splitlines(keepends=True)[::-1], [], []
    long = long_lines(document)[::-1]
    if len(long) == len(waiting):
        return document, {}
    for line in document.text.splitlines(keepends=True):
        if long and line == long[-1]:
            long.pop()
            if not waiting or waiting[-1] != line:
                dropped.append(line)
                continue
            waiting.pop()
        stays.append(line)
    text = "".join(stays)
    after = Document(document.place, text, document.is_code) if text.strip() else None
    return after, {"repeated_line" if after else "only_repeated_lines": "".join(dropped)}


def _band_marks(document: Document) -> np.ndarray:
    """A number for each band of a document's signature; of one without words, numbers that no other has."""
    signature = minhash_signature(document.text, N_HASHES)
    if signature[0] == PRIME:
        return np.array([text_hash(f"{document.place} {band}") for band in range(N_BANDS)], np.uint64)
    bands = enumerate(signature.reshape(N_BANDS, -1))
    return np.array([text_hash(f"{band} {values.tobytes().hex()}") for band, values in bands], np.uint64)


def copies_of(store: Store, pool: Executor) -> dict[int, int]:
    """For each near copy of an earlier document the index of the first one: ``near_duplicates`` of all documents.

    Documents that share no band with others are never compared, so each group that bands connect is a corpus of its
    own, read from the store.
    """
    paths = marks(store, "bands", _band_marks, pool)
    groups = _met(paths, repeated(paths))
    texts = store.lines()
    found: dict[int, int] = {}
    batches = batched((texts[group] for group in groups), len)
    for group, clusters in zip(groups, chain.from_iterable(streamed(pool, _clusters, batches)), strict=True):
        for cluster in clusters:
            first, *later = group[cluster].tolist()
            found |= dict.fromkeys(later, first)
    return found


def _clusters(groups: list[Lines]) -> list[list[list[int]]]:
    return [near_duplicates(texts, THRESHOLD, N_HASHES, N_BANDS) for texts in groups]


def _met(paths: Sequence[Path], again: np.ndarray) -> list[np.ndarray]:
    """The groups of documents that bands connect; of a document that meets no other, nothing is kept in memory."""
    bands: list[np.ndarray] = [np.zeros((2, 0), np.int64)]  # document, and which of the repeated numbers it has
    n = 0
    for row in map(read_marks, paths):
        inside, at = _among(again, row)
        places = np.flatnonzero(inside)
        bands.append(np.stack([n + places // N_BANDS, at[places]]))
        n += len(row) // N_BANDS
    documents, values = np.concatenate(bands, axis=1)
    met, numbers = np.unique(documents, return_inverse=True)
    clusters, first = Clusters(len(met)), np.full(len(again), -1)
    for i, value in zip(numbers.tolist(), values.tolist(), strict=True):
        first[value] = i if first[value] < 0 else first[value]
        clusters.link(int(first[value]), i)
    return [met[group] for group in clusters.lists()]


def copies(store: Store, pool: Executor) -> Part:
    """Of near copies the first one stays."""
    found, texts = copies_of(store, pool), store.lines()
    starts = np.searchsorted(texts.places[:, 0], np.arange(store.n_parts + 1))

    def judged_one(i: int, document: Document) -> Judged:
        if i not in found:
            return document, {}
        original = store.read(*map(int, texts.places[found[i]]))
        return None, {"near_copy": f"of {original.place}\n{document.text}"}

    def part(i: int, documents: list[Document] | None) -> list[Judged]:
        return [judged_one(int(starts[i]) + n, document) for n, document in enumerate(documents or [])]

    return part


def leaks(evaluation: Sequence[str]) -> Part:
    """A document that holds 13 neighbouring words of an evaluation is dropped."""

    def part(i: int, documents: list[Document] | None) -> list[Judged]:
        found = contaminated_spans((d.text for d in documents or []), evaluation)
        return [_leak(document, spans) for document, spans in zip(documents or [], found, strict=True)]

    return part


def _leak(document: Document, spans: list[tuple[int, int]]) -> Judged:
    if not spans:
        return document, {}
    words = normalize(document.text)
    return None, {"evaluation": "\n".join(" ".join(words[start:end]) for start, end in spans)}


# ---- all of it -------------------------------------------------------------------------------------------------------


def through(before: Store, after: Store, name: str, part: Part) -> None:
    """Take a step: what it leaves of each part of one store becomes a part of the next.

    Args:
        before: Where documents come from.
        after: Where they go; its finished parts are not made again.
        name: Name of the step.
        part: Judges the documents of a part; None stands for a part that is finished already.
    """
    n_done = after.n_parts
    for i in range(before.n_parts):
        if i < n_done:
            part(i, None)
            continue
        documents, tally = before.part(i), Tally()
        found = part(i, documents)
        for document, (left, rules) in zip(documents, found, strict=True):
            tally.count(name, document, left, rules)
        after.add((left for left, _ in found if left), {"tally": asdict(tally)})
    after.finish()


def steps_after(
    work: Path, gathered: Store, names: Sequence[str], evaluation: Sequence[str], pool: Executor
) -> list[Store]:
    """The store of each step that needs all documents, in order."""
    makers: dict[str, Callable[[Store], Part]] = {}
    makers |= {"copies": lambda store: copies(store, pool)} if "copies" in names else {}
    makers |= {"lines": lambda store: lines(store, pool)} if "lines" in names else {}
    makers |= {"evaluation": lambda store: leaks(evaluation)} if evaluation else {}
    stores = [gathered]
    for name, make in makers.items():
        stores.append(Store(work / name))
        if not stores[-1].is_done:
            through(stores[-2], stores[-1], name, make(stores[-2]))
    return stores[1:]


def tally_of(stores: Iterable[Store]) -> Tally:
    """What was counted in all parts."""
    tally = Tally()
    for store in stores:
        for notes in store.notes():
            tally.add(Tally(**notes["tally"]))
    return tally


def gather_all(o: argparse.Namespace, store: Store, pool: Executor) -> list[Source]:
    """Gather what the command line names; returns the sources."""
    names, longest = tuple(name for name in RULES if name in o.clean), o.longest
    if o.dataset:
        source, texts = texts_of_dataset(o.dataset, o.column, o.limit)
        gather(store, source, texts, names, (None, longest), pool)
    else:
        done = {notes["source"]["name"] for notes in store.notes() if notes["is_last"]}
        for name in [name for name in dict.fromkeys(o.packages) if name not in done]:
            with package_files(name) as (source, each):
                gather(store, source, each, names, (round(o.most * 1e6), longest), pool)
    return list({notes["source"]["name"]: Source(**notes["source"]) for notes in store.notes()}.values())


def recounted(found: list[Source], store: Store) -> list[Source]:
    """The sources with the counts of the documents in a store."""
    left = {source.name: Source(source.name, source.version, source.licences) for source in found}
    for document in store:
        name = next(name for name in left if document.place.startswith(f"{name}/"))
        left[name].add(document, None)
    return list(left.values())


def clean_all(o: argparse.Namespace, work: Path, evaluation: Sequence[str]) -> tuple[Store, list[Source], Tally]:
    """All that the command line asks for: the documents, where they come from, and what was dropped."""
    gathered = Store(work / "gathered")
    with make_pool() as pool:
        found = gather_all(o, gathered, pool)
        print(f"{sum(source.documents for source in found):,} documents gathered", flush=True)
        stores = [gathered, *steps_after(work, gathered, o.clean, evaluation, pool)]
    return stores[-1], recounted(found, stores[-1]), tally_of(stores)


def cleaned(texts: Sequence[str], names: Sequence[str], evaluation: Sequence[str] = ()) -> tuple[list[str], Tally]:
    """The program's steps on a few texts, for those who measure them.

    Args:
        texts: Documents; each page is told from other text by how it begins.
        names: Steps that ``--clean`` takes.
        evaluation: Texts of an evaluation.

    Returns:
        Texts as they are left, those that are dropped empty; and what was dropped by which rule.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        gathered, source = Store(Path(folder, "gathered")), Source("texts", "", [])
        items = ((str(i), text) for i, text in enumerate(texts))
        gather(gathered, source, items, tuple(name for name in RULES if name in names), (None, None), pool)
        stores = [gathered, *steps_after(Path(folder), gathered, names, evaluation, pool)]
        left = {document.place: document.text for document in stores[-1]}
        return [left.get(f"texts/{i}", "") for i in range(len(texts))], tally_of(stores)
