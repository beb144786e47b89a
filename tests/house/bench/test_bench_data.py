"""The program's steps timed and the gains of chapter 26's filters measured, at a size for a CPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lib.bench import data, data_speeds
from lib.given.data.record import load


@pytest.mark.time_limit(180)
def test_filters_are_compared(tmp_path, monkeypatch):
    texts = [
        f"def f{i}():\n    '''The text of {i} and what is to be read of it.'''\n" + f"    x{i} = {i}\n" * 40
        for i in range(40)
    ]
    monkeypatch.setattr(data, "read_documents", lambda n_bytes: (texts, texts[:9]))
    monkeypatch.setattr(data, "SIZES", ((32, 1),))
    words = "--device cpu --tiny --steps 2 --batch 2 --length 32 --eval-rows 4"
    data.main([*words.split(), "--folder", str(tmp_path)])
    gains = load("data", tmp_path)["results"]["gains"]
    assert set(gains["bits_per_byte"]["32 x 1"]) == set(data.FILTERS)
    assert gains["prediction"]["none"] == 0 < gains["prediction"]["gopher_quality"] < gains["prediction"]["all"]
    assert gains["bytes"]["near_duplicates"] < gains["bytes"]["none"]


def test_the_programs_steps_are_timed(tmp_path, monkeypatch):
    taken = []
    judged, through = data_speeds.cleaning.judged, data_speeds.cleaning.through
    monkeypatch.setattr(data_speeds, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(data_speeds, "find_spec", lambda name: None)
    monkeypatch.setattr(
        data_speeds.cleaning, "judged", lambda items, names: taken.extend(names) or judged(items, names)
    )
    monkeypatch.setattr(
        data_speeds.cleaning, "through", lambda a, b, name, part: taken.append(name) or through(a, b, name, part)
    )
    data_speeds.main(f"--documents 30 --rounds 1 --folder {tmp_path}".split())
    found = load("data_speeds", tmp_path)["results"]
    assert found["datatrove"] is None
    assert list(found["steps"]) == list(dict.fromkeys(taken)) == [*data_speeds.ALONE, *data_speeds.TOGETHER]
    assert all(step["ours_per_s"]["median"] > 0 for step in found["steps"].values())


def test_each_filter_removes_its_dirt():
    texts = [f"Page {i} is a page of words that no other page of the book has: " + f"word{i} " * 60 for i in range(30)]
    dirty = data.with_dirt(texts)
    n = round(data.SHARE * 30)
    assert len(dirty) == 30 + 2 * n
    assert len(data.without_spam(dirty)) == 30 + n
    assert len(data.without_copies(texts + [f"{text} again" for text in texts])) == 30
    assert not any("Report a bug" in text for text in data.without_menus(dirty))
