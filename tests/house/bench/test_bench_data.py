"""Chapter 26's steps timed and its filters' gains measured, at a size for a CPU."""

import pytest

from lib.bench import data
from lib.given.data.record import load


@pytest.mark.time_limit(180)
def test_steps_are_timed_and_filters_are_compared(tmp_path, monkeypatch):
    texts = [
        f"def f{i}():\n    '''The text of {i} and what is to be read of it.'''\n" + f"    x{i} = {i}\n" * 40
        for i in range(40)
    ]
    monkeypatch.setattr(data, "read_documents", lambda n_bytes: (texts, texts[:9]))
    monkeypatch.setattr(data, "SIZES", ((32, 1),))
    words = "--device cpu --tiny --steps 2 --batch 2 --length 32 --eval-rows 4 --rounds 1"
    data.main(["speeds", *words.split(), "--folder", str(tmp_path)])
    data.main(["gains", *words.split(), "--folder", str(tmp_path)])
    found = load("data", tmp_path)["results"]
    assert found["speeds"]["extract_text"]["documents_per_s"] > 0, "the part that was measured before is kept"
    gains = found["gains"]
    assert set(gains["bits_per_byte"]["32 x 1"]) == set(data.FILTERS)
    assert gains["prediction"]["none"] == 0 < gains["prediction"]["gopher_quality"] < gains["prediction"]["all"]
    assert gains["bytes"]["near_duplicates"] < gains["bytes"]["none"]


def test_each_filter_removes_its_dirt():
    texts = [f"Page {i} is a page of words that no other page of the book has: " + f"word{i} " * 60 for i in range(30)]
    dirty = data.with_dirt(texts)
    n = round(data.SHARE * 30)
    assert len(dirty) == 30 + 2 * n
    assert len(data.without_spam(dirty)) == 30 + n
    assert len(data.without_copies(texts + [f"{text} again" for text in texts])) == 30
    assert not any("Report a bug" in text for text in data.without_menus(dirty))
