"""The figures that one can play with: whole in themselves, in agreement with the book's functions,
and alive in a browser.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

from lib.given.models.laws import BESIROGLU, HOFFMANN
from lib.given.models.scaling import XXL, Bandwidths, FFNConfig
from lib.given.parallel.pipeline import Action, idle_share, most_kept, n_messages
from lib.given.show.play.bands import SIMILARITIES, agreements, mean_promise
from lib.given.show.play.bands import figure as bands_figure
from lib.given.show.play.batching import figure as batching_figure
from lib.given.show.play.batching import requests as batched_requests
from lib.given.show.play.batching import steps_of
from lib.given.show.play.capacity import figure as capacity_figure
from lib.given.show.play.clocks import figure as clocks_figure
from lib.given.show.play.flash_tiles import figure as tiles_figure
from lib.given.show.play.flash_tiles import hidden, moments, scores_and_values
from lib.given.show.play.intervals import figure as intervals_figure
from lib.given.show.play.intervals import scores as answers
from lib.given.show.play.isoflop import figure as isoflop_figure
from lib.given.show.play.pairs import figure as pairs_figure
from lib.given.show.play.planner import figure as planner_figure
from lib.given.show.play.player import HERE, Control, Figure, layer, layer_of_sum
from lib.given.show.play.ring import figure as ring_figure
from lib.given.show.play.ring import sent
from lib.given.show.play.scales import fates, numbers
from lib.given.show.play.scales import figure as scales_figure
from lib.given.show.play.schedules import figure as schedules_figure
from lib.given.show.play.schedules import timeline
from lib.given.show.play.spectrum import figure as spectrum_figure
from lib.given.show.play.state import figure as state_figure
from lib.given.show.play.windows import figure as windows_figure
from lib.given.show.play.zero import figure as zero_figure
from lib.given.show.rings import ring_states
from lib.workbook.book.catalog import ROOT
from solutions.attention_variants import cache_bytes, sliding_window_mask
from solutions.context_parallel import zigzag_indices
from solutions.data import minhash_signature
from solutions.evaluation import paired_difference, wilson_interval
from solutions.flash_attention import online_softmax_update
from solutions.fsdp import memory_per_device
from solutions.linear_attention import delta_rule_recurrent, linear_attention_recurrent
from solutions.low_precision import quantize
from solutions.moe import capacity_mask
from solutions.optimizers import newton_schulz, singular_values_after
from solutions.pipeline import (
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_schedule,
    simulate,
    zero_bubble_schedule,
)
from solutions.rope import apply_rope, precompute_rope, rope_frequencies
from solutions.scaling import plan
from solutions.scaling_laws import compute_optimal
from solutions.serving import Scheduler
from solutions.tensor_parallel import pipeline_bubble
from tests.house.browsing import chromium, opener

LINKS = {"within_host": 450e9, "across_hosts": 50e9, "devices_per_host": 8}
MODELS = {"1.5B": FFNConfig(1600, 9600, 48), "7B": FFNConfig(4096, 24_704, 32)}
SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {
    "GPipe": gpipe_schedule,
    "1F1B": one_f_one_b_schedule,
    "interleaved, 2 chunks": partial(interleaved_schedule, n_chunks=2),
    "interleaved, 4 chunks": partial(interleaved_schedule, n_chunks=4),
    "zero bubble (ZB-H1)": zero_bubble_schedule,
}
SPECTRUM = torch.logspace(-3, 0, 12)
FIGURES = {
    "ring": ring_figure(),
    "zero": zero_figure(memory_per_device, (1.5e9, 7e9, 405e9), (1, 8, 64)),
    "clocks": clocks_figure(rope_frequencies),
    "schedules": schedules_figure(SCHEDULES, simulate),
    "tiles": tiles_figure(online_softmax_update),
    "pairs": pairs_figure(zigzag_indices),
    "planner": planner_figure(plan, MODELS, LINKS, (1, 8, 64), (24, 80)),
    "capacity": capacity_figure(capacity_mask, (0.0, 1.0), (0.5, 1.0, 2.0)),
    "scales": scales_figure(quantize, (-20, -12, 0)),
    "spectrum": spectrum_figure(
        singular_values_after, SPECTRUM, {"Muon": (3.4445, -4.7750, 2.0315), "cubic": (1.5, -0.5, 0.0)}
    ),
    "batching": batching_figure(Scheduler, (8, 16), (12, 40)),
    "state": state_figure(linear_attention_recurrent, delta_rule_recurrent),
    "isoflop": isoflop_figure(compute_optimal, {"replication": BESIROGLU, "paper": HOFFMANN}, range(17, 27)),
    "bands": bands_figure(minhash_signature, (8, 16), (4, 7, 8), (0.4, 0.8)),
    "intervals": intervals_figure(wilson_interval, paired_difference, (200, 1000), (0.01, 0.02), (0.1, 0.4)),
    "windows": windows_figure(sliding_window_mask, cache_bytes),
}
CHAPTERS = {
    "ring": "09_mpi",
    "zero": "12_fsdp",
    "clocks": "02_rope",
    "schedules": "17_pipeline",
    "tiles": "15_flash_attention",
    "pairs": "18_context_parallel",
    "planner": "16_scaling",
    "capacity": "19_moe",
    "scales": "20_low_precision",
    "spectrum": "25_optimizers",
    "bands": "26_data",
    "batching": "21_serving",
    "intervals": "27_evaluation",
    "isoflop": "22_scaling_laws",
    "state": "24_linear_attention",
    "windows": "23_attention_variants",
}
every_figure = pytest.mark.parametrize("name", FIGURES)


def places(figure: Figure, **values) -> dict[str, int]:
    """The state in which each control has the value asked for; others stand where they start."""
    state = {control.name: control.start for control in figure.controls}
    for control in figure.controls:
        if control.name in values:
            state[control.name] = list(control.values).index(values[control.name])
    return state


def said(name: str, **values) -> str:
    return FIGURES[name].sentence(places(FIGURES[name], **values))


# ---- the fragment ----------------------------------------------------------------------------------------------------


@every_figure
def test_a_figure_needs_nothing_from_elsewhere(name):
    page = FIGURES[name]()._repr_html_()
    assert re.findall(r"https?:|//\w|\bsrc=|\bhref=|@import|url\(|\bfetch\(|\bimport\b", page) == []
    assert page.count("<figure") == page.count("</figure>") == 1
    assert "id=" not in page, "an id can clash with another figure's on the same page"


@every_figure
def test_a_figures_elements_are_closed_and_its_data_are_json(name):
    class Reader(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open, self.data = [], ""

        def handle_starttag(self, tag, attrs):
            if tag not in ("input", "meta"):
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

        def handle_data(self, text):
            if self.open[-1:] == ["script"] and not self.data:
                self.data = text

    reader = Reader()
    reader.feed(FIGURES[name]()._repr_html_())
    assert reader.open == []
    figure, data = FIGURES[name], json.loads(reader.data)
    assert [part["frames"] for part in data["layers"]] == [part.frames for part in figure.layers]
    assert set(data["start"]) == {control.name for control in figure.controls}


@every_figure
def test_the_still_and_the_start_are_states_that_exist(name):
    figure = FIGURES[name]
    for state in (figure.stills, {control.name: control.start for control in figure.controls}):
        for control in figure.controls:
            n = control.limit[1][state[control.limit[0]]] if control.limit else len(control.values)
            assert 0 <= state[control.name] < n
        assert len(figure.sentence(state).split()) > 6
    assert figure.sentence(figure.stills) in repr(figure())


@every_figure
def test_every_state_within_its_limits_has_a_picture_and_a_sentence(name):
    figure = FIGURES[name]
    states: list[dict[str, Any]] = [{}]
    for control in figure.controls:
        states = [{**state, control.name: place} for state in states for place in range(len(control.values))]
    for state in states:
        limits = [c for c in figure.controls if c.limit and state[c.name] >= c.limit[1][state[c.limit[0]]]]
        if not limits:
            assert figure.layers[-1].at(state) or name == "schedules"
            assert figure.sentence(state)


@every_figure
def test_a_figure_stands_in_its_chapter_with_a_caption(name):
    text = (ROOT / "chapters" / f"{CHAPTERS[name]}.md").read_text(encoding="utf-8")
    module = CHAPTERS[name][3:]
    shown = rf"play\.{name}\([^`]*```\n\n\(fig-{module}-play-{name}\)=\n\*\*Figure [\w.]+\*\* \w"
    assert re.search(shown, text), f"play.{name}(…), then the label (fig-{module}-play-{name})= and its caption"


def test_the_script_is_short():
    assert len((HERE / "play.js").read_text().splitlines()) <= 150


def test_layers_find_their_frames():
    one = Control(name="one", label="one", values=range(3))
    other = Control(name="other", label="other", values=range(4))
    product, total = layer(lambda a, b: f"{a} {b}", one, other), layer_of_sum(str, one, other)
    for a in range(3):
        for b in range(4):
            assert product.at({"one": a, "other": b}) == f"{a} {b}"
            assert total.at({"one": a, "other": b}) == str(a + b)


def test_a_figure_without_a_description_is_refused():
    with pytest.raises(ValueError, match="alt"):
        Figure(name="x", alt="a picture", height=10, controls=[], layers=[], sentences=[])


# ---- its numbers are the book's --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ranks", range(2, 7))
def test_the_ring_sends_what_the_books_ring_sends(n_ranks):
    """Replay the messages that the figure draws: they give the states that chapter 9 shows,
    and at the end the sum everywhere.
    """
    held = [[frozenset({rank})] * n_ranks for rank in range(n_ranks)]
    for step in range(1, 2 * (n_ranks - 1) + 1):
        before = [list(chunks) for chunks in held]
        for rank in range(n_ranks):
            chunk, right = sent(n_ranks, rank, step), (rank + 1) % n_ranks
            old = held[right][chunk] if step < n_ranks else frozenset()
            held[right] = [*held[right]]
            held[right][chunk] = before[rank][chunk] | old
        assert held == ring_states(n_ranks)[step]
    assert held == [[frozenset(range(n_ranks))] * n_ranks] * n_ranks


def test_the_rings_sentences():
    assert "rank 0 chunk 1" in said("ring", ranks=4, step=3)
    assert "holds the sum, and has sent 6 chunks, 1.5 times its array" in said("ring", ranks=4, step=6)
    assert said("ring", ranks=4, step=7) == ""


def test_the_capacitys_sentence():
    text = said("capacity", preference=1.0, factor=1.0)
    asked = [int(n) for n in re.findall(r"\d+", text.partition(" assignments")[0])]
    assert len(asked) == 6
    assert sum(asked) == 48
    assert "room for 8" in text
    assert "No assignment is dropped" not in text


def test_the_bands_sentence_and_the_signatures_keep_the_promise():
    text = said("bands", bands=16, rows=8, threshold=0.8)
    assert "128 values" in text
    assert "at 0.8 is found with a probability of 94.7%" in text
    assert f"{sum(1 - (1 - (0.8 + i / 5000) ** 8) ** 16 for i in range(1000)) / 1000:.1%} are found" in text
    agree = agreements(minhash_signature, 16 * 7).reshape(19, 60, 16, 7).all(-1).any(-1).mean(-1)
    expected = [mean_promise(s, s, 16, 7) for s in SIMILARITIES]
    assert all(abs(a - p) < 4 * (p * (1 - p) / 60 + 1 / 3600) ** 0.5 for a, p in zip(agree, expected, strict=True))


def test_the_intervals_sentence_is_what_the_chapters_functions_say():
    better, weaker = answers(1000, 0.02, 0.1)
    assert (len(better), sum(better), sum(weaker)) == (1000, 720, 700)
    assert sum(x != y for x, y in zip(better, weaker, strict=True)) == 100
    _, _, low, high = paired_difference(better, weaker)
    text = said("intervals", questions=1000, gain=0.02, apart=0.1)
    assert f"from {low * 100:+.1f} to {high * 100:+.1f}, which is more than noise" in text
    assert "do not decide" in said("intervals", questions=1000, gain=0.02, apart=0.4)


@pytest.mark.parametrize("exponent", [-20, -12, 0])
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_the_scales_sentence_counts_what_pytorchs_cast_does(name, exponent):
    x, dtype = numbers(), {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    scaled = x.double() / 2.0**exponent
    zero = float((scaled.clamp(-448, 448).to(dtype).float() == 0).float().mean())
    beyond = float((scaled.abs() > torch.finfo(dtype).max).float().mean())
    text = said("scales", format=name, exponent=exponent)
    assert f"{zero:.1%} of the numbers become 0" in text
    assert f"{beyond:.1%} saturate" in text
    masks = fates(x, 2.0**exponent, dtype, quantize)
    assert int(torch.stack([*masks.values()]).sum(0).min()) == 1
    assert int(torch.stack([*masks.values()]).sum(0).max()) == 1


@pytest.mark.parametrize("steps", [0, 5, 10])
def test_the_spectrums_sentence_counts_what_a_matrix_shows(steps):
    generator = torch.Generator().manual_seed(0)
    turns = [torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64))[0] for _ in range(2)]
    after = torch.linalg.svdvals(newton_schulz(turns[0] * SPECTRUM.double() @ turns[1], steps, dtype=None))
    text = said("spectrum", coefficients="Muon", steps=steps)
    assert f"After {steps} steps {int(((after >= 0.68) & (after <= 1.14)).sum())} of the gradient's 12" in text
    assert f"smallest is {float(after.min()):.3g}, the largest {float(after.max()):.3g}" in text


def test_the_batches_sentence_says_what_the_scheduler_did():
    text = said("batching", way="continuous", limit=16, pool=12)
    steps = steps_of(Scheduler, "continuous", 16, 12)
    computed = sum(sum(step.tokens.values()) for step in steps)
    needed = sum(len(request.tokens) + request.max_new_tokens - 1 for request in batched_requests())
    assert f"{len(steps)} steps of {computed / len(steps):.1f} tokens" in text
    assert f"{computed - needed} tokens are computed again" in text
    assert computed > needed
    assert max(step.n_blocks for step in steps) <= 12
    assert "nothing is computed twice" in said("batching", way="static", limit=16, pool=12)


@pytest.mark.parametrize(("stage", "size", "n_ranks"), [(0, 7e9, 8), (1, 7e9, 8), (2, 405e9, 64), (3, 1.5e9, 64)])
def test_zeros_memory_is_the_chapters(stage, size, n_ranks):
    gb = memory_per_device(int(size), n_ranks, stage, 4, 4, 8) / 1e9
    text = said("zero", stage=stage, size=size, ranks=n_ranks)
    shown = float(re.search(r"= ([\d.,]+) GB on each device", text)[1].replace(",", ""))
    assert shown == pytest.approx(gb, rel=5e-3)
    assert ("does not fit" in text) == (gb > 80)


@pytest.mark.parametrize("n_stages", [2, 4, 8])
@pytest.mark.parametrize("n_micro", [1, 2, 4, 8, 16])
def test_idle_shares_are_those_of_the_formulas(n_stages, n_micro):
    for name in ("GPipe", "1F1B"):
        work = timeline(SCHEDULES[name], simulate, n_stages, n_micro)
        assert idle_share(work) == pytest.approx(pipeline_bubble(n_stages, n_micro))
        text = said("schedules", schedule=name, stages=n_stages, micro=n_micro)
        assert f"wait {idle_share(work):.1%}" in text
        assert f"send {2 * n_micro * (n_stages - 1)} messages" in text
    for n_chunks in (2, 4):
        name = f"interleaved, {n_chunks} chunks"
        if n_micro % n_stages == 0:
            work = timeline(SCHEDULES[name], simulate, n_stages, n_micro)
            assert idle_share(work) == pytest.approx((n_stages - 1) / (n_chunks * n_micro + n_stages - 1))
            assert n_messages(work) == 2 * n_micro * (n_chunks * n_stages - 1)
        else:
            assert f"n_stages = {n_stages}" in said("schedules", schedule=name, stages=n_stages, micro=n_micro)
    if n_micro >= n_stages:  # ZB-H1 leaves a third of 1F1B's (F + B - W of F + B + W)
        work = timeline(zero_bubble_schedule, simulate, n_stages, n_micro)
        assert idle_share(work) == pytest.approx((n_stages - 1) / (3 * n_micro + n_stages - 1))


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_tiles_end_at_the_softmax_of_the_whole_row(mask):
    scores, values = scores_and_values()
    scores = hidden(scores, mask)
    walk = moments(online_softmax_update, mask)
    assert len(walk) - 1 == {"none": 16, "causal": 10}[mask]
    last = walk[-1]
    torch.testing.assert_close(last.m + last.l.log(), scores.logsumexp(-1))
    torch.testing.assert_close(last.a / last.l[:, None], scores.softmax(-1) @ values)
    shown = tiles_figure(online_softmax_update).picture(places(FIGURES["tiles"], mask=mask, step=len(walk) - 1))
    for output in (scores.softmax(-1) @ values).flatten().tolist():
        assert f">{output:.2f}<" in shown


@pytest.mark.parametrize("n_ranks", range(2, 7))
def test_the_pairs_meet_every_query_once_and_take_the_time_that_chapter_18_says(n_ranks):
    """In blocks: R without a mask, R - 1/2 with contiguous shares under a causal mask, R/2 in zigzag,
    where nobody waits.
    """
    for layout, blocks, waited in (
        ("no mask", n_ranks, 0.0),
        ("causal, contiguous", n_ranks - 0.5, 1 - n_ranks / 2 / (n_ranks - 0.5)),
        ("causal, zigzag", n_ranks / 2, 0.0),
    ):
        texts = [said("pairs", layout=layout, ranks=n_ranks, step=step) for step in range(n_ranks + 1)]
        last = re.search(r"So far ([\d.]+) blocks? of time, (\d+)% of it spent waiting; .* takes ([\d.]+)\.", texts[-1])
        assert (float(last[1]), float(last[3])) == (blocks, n_ranks if layout == "no mask" else n_ranks / 2)
        assert int(last[2]) == round(100 * waited)
        assert layout != "causal, zigzag" or all("All ranks compute 0.5 blocks" in text for text in texts[1:])


@pytest.mark.parametrize(("n", "model", "gb"), [(8, "7B", 80), (64, "1.5B", 24), (64, "7B", 80)])
def test_the_planner_shows_what_plan_returns(n, model, gb):
    found = plan(MODELS[model], n, gb * 1e9, LINKS)
    text = said("planner", gpus=n, model=model, memory=gb)
    assert str(found.layout) in text
    assert f"{found.memory_bytes / 1e9:.3g} GB" in text
    picture = FIGURES["planner"].picture(places(FIGURES["planner"], gpus=n, model=model, memory=gb))
    degrees = re.findall(r"large'>(\d+)<", picture)
    assert degrees == [str(getattr(found, axis)) for axis in ("data", "sharded", "tensor", "pipeline")]


@pytest.mark.parametrize(
    ("kind", "keys", "held"),
    [
        ("full attention", 7, 7 * 2 * 8 * 128 * 2),
        ("window of 4", 4, 4 * 2 * 8 * 128 * 2),
        ("latent attention", 7, 7 * 576 * 2),
    ],
)
def test_the_windows_sentence_counts_keys_and_bytes(kind, keys, held):
    text = said("windows", kind=kind, step=7)
    assert f"sees {keys} keys" in text
    assert f"{held:,} bytes" in text


def test_the_planner_says_when_nothing_fits():
    assert "nothing fits" in said("planner", gpus=1, model="7B", memory=24)


def test_the_clocks_show_the_scores_of_rotated_vectors():
    """Two vectors that are alike, of length 1 and with equal parts in each pair,
    turned by chapter 2's ``apply_rope``.
    """
    x = torch.full((1, 64, 1, 8), 8**-0.5)
    turned = apply_rope(x, precompute_rope(8, 64, theta=300.0))[0, :, 0]
    for n in (0, 5, 32):
        for distance in (0, 3, 24):
            text = said("clocks", key=n, distance=distance)
            assert f"query (blue) at position {n + distance}." in text
            shown = float(re.search(r"the score is (-?[\d.]+),", text)[1])
            assert shown == pytest.approx((turned[n] @ turned[n + distance]).item(), abs=0.006)


def test_sliding_both_leaves_the_angles_between_the_hands():
    key, between = (FIGURES["clocks"].layers[i] for i in (1, 3))
    here, there = ({"key": n, "distance": 5} for n in (0, 20))
    assert key.at(here) != key.at(there)
    assert between.at(here) == between.at(there)


# ---- what the chapters say of them -----------------------------------------------------------------------------------


def test_what_chapter_9_asks_has_an_answer():
    whole = [step for step in range(7) if any(len(held[1]) == 4 for held in ring_states(4)[step])]
    holders = [[rank for rank in range(4) if len(ring_states(4)[step][rank][1]) == 4] for step in whole[:2]]
    assert (whole[0], holders) == (3, [[0], [0, 1]])


def test_what_chapter_12_asks_has_an_answer():
    for stage in (0, 1, 2):
        assert memory_per_device(int(70e9), 1024, stage, 4, 4, 8) > 80e9, "no number of ranks is enough"
    assert memory_per_device(int(70e9), 16, 3, 4, 4, 8) <= 80e9


def test_what_chapter_17_says_of_the_schedules():
    work = {name: timeline(schedule, simulate, 4, 8) for name, schedule in SCHEDULES.items()}
    end = {name: max(w.end for w in works) for name, works in work.items()}
    assert end["GPipe"] == end["1F1B"] > end["interleaved, 2 chunks"] > end["zero bubble (ZB-H1)"]
    assert min(end, key=end.__getitem__) == "interleaved, 4 chunks"
    kept = {name: [most_kept(works, stage) for stage in range(4)] for name, works in work.items()}
    assert kept["GPipe"][0] > kept["interleaved, 2 chunks"][0] > kept["1F1B"][0]
    assert kept["zero bubble (ZB-H1)"] == [kept["1F1B"][0]] * 4
    sent = {name: n_messages(works) for name, works in work.items()}
    assert sent["zero bubble (ZB-H1)"] == sent["1F1B"] < sent["interleaved, 2 chunks"] < sent["interleaved, 4 chunks"]
    waits = {m: pipeline_bubble(8, m) < 1 / 3 for m in (1, 2, 4, 8, 16)}
    assert [m for m, is_less in waits.items() if is_less] == [16]


def test_what_chapter_15_says_of_the_fourth_tile():
    before, after = moments(online_softmax_update, "none")[3:5]
    assert after.tile == (0, 6)
    assert after.m[0] > before.m[0]
    assert after.l[0] < before.l[0]


def test_what_chapter_16_says_of_the_plans():
    small, large = (plan(XXL, 128, gb * 1e9, LINKS) for gb in (40, 80))
    assert 1.7 * large.step_s < small.step_s < 2 * large.step_s
    assert small.sharded == 16
    assert small.costs["sharded"] > small.costs["compute"]
    assert small.layout.bandwidth("sharded", Bandwidths.of(LINKS)) == LINKS["across_hosts"]
    stages = [plan(FFNConfig(8192, 52_224, 80), 128, gb * 1e9, LINKS).pipeline for gb in (80, 40, 24)]
    assert stages == sorted(set(stages))


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """All six on one page, and one of them twice."""
    parts = [figure()._repr_html_() for figure in [*FIGURES.values(), FIGURES["ring"]]]
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>Figures</title>"
    path = tmp_path_factory.mktemp("play") / "page.html"
    path.write_text(f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>", "utf-8")
    return path.as_uri()


@pytest.fixture
def open_page(browser, address):
    with opener(browser, address) as open_with:
        yield open_with


def state_of(figure) -> dict[str, int]:
    return json.loads(figure.get_attribute("data-state"))


@pytest.mark.browser
def test_a_click_is_a_step_of_the_ring_and_the_last_one_gives_everybody_the_sum(open_page):
    figure = open_page().locator(".workbook-play-ring").first
    figure.locator("[data-control=ranks]").fill("1")  # the second choice: 3 ranks
    for _ in range(2 * (3 - 1)):
        assert "holds the sum" not in figure.locator(".play-live").inner_text()
        figure.get_by_role("button", name="Next").click()
    assert state_of(figure) == {"ranks": 1, "step": 4}
    assert "Every rank holds the sum" in figure.get_by_role("status").inner_text()
    stripes = figure.locator(".play-live svg > g").nth(1).locator("path[fill]:not([stroke])")
    drawn = [path.get_attribute("d").count("M") for path in stripes.all()[:3]]
    assert drawn == [9, 9, 9], "each rank's numbers are in all 3 chunks of all 3 ranks"
    figure.get_by_role("button", name="Next").click(force=True)
    assert state_of(figure)["step"] == 4, "there is no step behind the last"
    figure.locator("[data-control=ranks]").fill("0")
    assert state_of(figure) == {"ranks": 0, "step": 2}, "two ranks have two steps"
    figure.get_by_role("button", name="Back").click()
    assert state_of(figure)["step"] == 1


@pytest.mark.browser
@every_figure
def test_the_keyboard_reaches_and_moves_every_control(open_page, name):
    page = open_page()
    figure = page.locator(f".workbook-play-{name}").first
    book = FIGURES[name]
    for control in book.controls:
        before = state_of(figure)
        figure.locator(f"[data-control={control.name}]").focus()
        key = "ArrowRight" if before[control.name] < len(control.values) - 1 else "ArrowLeft"
        page.keyboard.press(key)
        step = 1 if key == "ArrowRight" else -1
        assert state_of(figure) == {**before, control.name: before[control.name] + step}
        state = state_of(figure)
        assert figure.get_by_role("status").inner_text() == book.sentence(state)
        group = figure.locator(".play-live svg > g").last
        assert group.evaluate("g => g.textContent") == re.sub(r"<[^>]*>", "", book.layers[-1].at(state))
    focusable = figure.locator("button:visible, input, select").all()
    focusable[0].focus()
    for element in focusable:
        assert element.evaluate("e => e === document.activeElement")
        page.keyboard.press("Tab")


@pytest.mark.browser
def test_every_control_has_a_name_and_the_picture_a_description(open_page):
    page = open_page()
    for name, book in FIGURES.items():
        figure = page.locator(f".workbook-play-{name}").first
        for control in book.controls:
            role = "combobox" if control.kind == "choice" else "slider"
            assert figure.get_by_role(role, name=control.label).count() == 1, control
        assert figure.get_by_role("img", name=book.alt).count() == 1


@pytest.mark.browser
def test_two_figures_of_one_kind_move_alone(open_page):
    page = open_page()
    one, other = page.locator(".workbook-play-ring").all()
    other.get_by_role("button", name="Next").click()
    assert (state_of(one)["step"], state_of(other)["step"]) == (0, 1)


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1280])
def test_no_figure_is_wider_than_its_page_and_text_can_be_read(open_page, width):
    page = open_page(viewport={"width": width, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (
        page.evaluate("""() => [...document.querySelectorAll('.play-live svg')].filter(svg =>
      [...svg.querySelectorAll('text')].some(t => {
        const a = t.getBoundingClientRect(), b = svg.getBoundingClientRect();
        return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1; })).length""")
        == 0
    )
    heights = page.evaluate("""() => [...document.querySelectorAll('.play-controls :is(button, select, input)')]
      .map(e => e.getBoundingClientRect()).filter(r => r.width).map(r => r.height)""")
    assert min(heights) >= 40, "large enough for a finger"


@pytest.mark.browser
def test_on_paper_a_figure_is_its_still(open_page):
    page = open_page()
    for figure in page.locator(".workbook-play").all():
        assert figure.locator(".play-live").is_visible()
        assert not figure.locator(".play-still").is_visible()
    page.locator(".workbook-play-ring").first.get_by_role("button", name="Next").click()
    page.emulate_media(media="print")
    for figure, book in zip(page.locator(".workbook-play").all(), FIGURES.values(), strict=False):
        assert not figure.locator(".play-live").is_visible()
        assert not figure.locator(".play-controls").is_visible()
        assert figure.locator(".play-still svg").is_visible()
        assert figure.locator(".play-still .play-said").inner_text() == book.sentence(book.stills)


@pytest.mark.browser
def test_without_scripts_a_figure_is_its_still(open_page):
    page = open_page(java_script_enabled=False)
    for figure in page.locator(".workbook-play").all():
        assert figure.locator(".play-still svg").is_visible()
        assert not figure.locator(".play-controls").is_visible()


@pytest.mark.browser
def test_play_walks_to_the_end_and_is_not_offered_to_those_who_want_no_motion(open_page):
    page = open_page()
    page.clock.install(time=0)
    page.reload()
    page.clock.pause_at(60)  # else its time also goes on by itself, as far as a busy machine needs for each line here
    figure = page.locator(".workbook-play-tiles")
    figure.locator("[data-control=mask]").select_option("1")
    figure.get_by_role("button", name="Play").click()
    page.clock.run_for(3_500)
    assert state_of(figure)["step"] == 3
    figure.get_by_role("button", name="Pause").click()
    page.clock.run_for(5_000)
    assert state_of(figure)["step"] == 3
    figure.get_by_role("button", name="Play").click()
    page.clock.run_for(60_000)
    assert state_of(figure)["step"] == 10
    assert figure.get_by_role("button", name="Play").is_visible()
    n_playing = page.get_by_role("button", name="Play").count()
    calm = open_page(reduced_motion="reduce")
    assert calm.get_by_role("button", name="Next").count() == n_playing > 0
    assert calm.get_by_role("button", name="Play").count() == 0
