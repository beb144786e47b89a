"""The drawings that explain: what they compute is right, and each of them can be drawn."""

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.figure import Figure

from lib.given.models.llama import TINY
from lib.given.parallel.mail import Message
from lib.given.parallel.pipeline import Work
from lib.given.show import block, experts, pipeline, scales, sequences, serving

TWO = torch.tensor([[1.0, 0.8], [0.8, 1.0]]), torch.tensor([0.4, 0.4])  # chapter 20's inputs and weights


def draw_error_flow() -> Figure:
    return scales.draw_error_flow(*TWO)


DRAWINGS = (
    draw_error_flow,
    experts.draw_mixture,
    pipeline.draw_chunks,
    scales.draw_granularity,
    sequences.draw_ring_backward,
    serving.draw_block_tables,
    serving.draw_drafts,
    serving.draw_prefix_tree,
)


def words(fig: Figure) -> list[str]:
    found = [text.get_text() for ax in fig.axes for text in ax.texts]
    plt.close(fig)
    return found


@pytest.mark.parametrize("draw", DRAWINGS, ids=lambda draw: draw.__name__)
def test_a_drawing_fits_the_page_and_every_word_lies_in_it(draw):
    fig = draw()
    assert fig.get_figwidth() <= 7.4
    fig.canvas.draw()
    box, renderer = fig.bbox, fig.canvas.get_renderer()
    outside = []
    for ax in fig.axes:
        for text in ax.texts:
            extent = text.get_window_extent(renderer)
            if text.get_text() and not (
                extent.x0 >= box.x0 - 1 and extent.x1 <= box.x1 + 1 and extent.y0 >= box.y0 - 1
            ):
                outside.append(text.get_text())
    plt.close(fig)
    assert outside == []


def test_the_weights_of_a_mixture_by_hand():
    probabilities, weights = experts.mixture_weights([0.0, 0.0, 0.0, 0.0], 2)
    assert probabilities == [0.25] * 4
    assert weights == {0: 0.5, 1: 0.5}
    assert list(experts.mixture_weights([1.0, 3.0, 2.0], 1)[1].items()) == [(1, 1.0)]


def test_chunks_are_dealt_as_the_chapter_says():
    names = words(pipeline.draw_chunks(16, 4, 2))
    assert [name for name in names if name.startswith("rank")] == [f"rank {r}" for r in (0, 1, 2, 3) * 3]


def test_an_entry_shares_its_scale_with_its_neighbours_only():
    assert {scales.scale_of(row, column, (8, 8)) for row in range(8) for column in range(8)} == {0}
    corners = [scales.scale_of(row, column, (4, 4)) for row, column in ((3, 3), (3, 4), (4, 3), (4, 4))]
    assert corners == [0, 1, 2, 3]
    assert scales.scale_of(1, 4, (1, 4)) == 3


def test_two_weights_take_the_three_steps_of_the_chapter():
    places = torch.stack(scales.steps_of_two(*TWO))
    assert torch.allclose(places, torch.tensor([[0.4, 0.4], [0.0, 0.4], [0.0, 0.72], [0.0, 1.0]]))


def test_the_sum_of_a_pair_has_one_part_more_in_each_step_and_comes_home():
    texts = words(sequences.draw_ring_backward(4))
    assert [text for text in texts if text.startswith("sum")] == ["sum of 1", "sum of 1, 2", "sum of 1, 2, 3"]
    assert texts.index("own part waits") < texts.index("sum of 1") < texts.index("all parts")


def test_after_the_copy_each_sequence_has_a_last_block_of_its_own():
    users = [text.split(": ")[1] for text in words(serving.draw_block_tables()) if text.startswith("block")]
    assert users == ["2 users", "free", "free", "2 users", "2 users", "1 user", "free", "1 user"]


def test_a_step_returns_the_kept_drafts_and_one_token_more():
    texts = words(serving.draw_drafts(("a", "b", "c"), kept=1, instead="z"))
    assert texts[-2:] == ["z", "drawn from the rest of\nthe target's distribution"]
    assert [texts.count(word) for word in ("a", "b", "keep", "reject", "drop")] == [2, 1, 1, 1, 1]


def test_the_picture_of_the_whole_agrees_with_the_model():
    from lib.demos.block import parts

    whole, half = (parts(TINY, length=8, n_ranks=n) for n in (1, 2))
    keys = TINY.dim * TINY.n_kv_heads // TINY.n_heads
    n_weights = 2 * TINY.dim**2 + 2 * TINY.dim * keys + 3 * TINY.dim * TINY.hidden_dim + 2 * TINY.dim
    assert sum(part.holds for part in whole) == 2 * n_weights
    assert sum(part.holds for part in half) == 2 * (n_weights + 2 * TINY.dim) // 2  # the norms are on both ranks
    stream = 8 * TINY.dim * 2
    assert [part.sends for part in half if part.on == "sum"] == [stream, stream]
    assert [part.sends for part in whole if part.on == "sum"] == [0, 0]
    written = {part.name: part.writes for part in half}
    assert written["Q, K, V"] == (stream + 2 * 8 * keys * 2) // 2
    assert written["attention"] == stream // 2
    assert written["gate, up"] == 2 * written["SiLU(gate) × up"] == 2 * (8 * TINY.hidden_dim * 2) // 2


def test_the_picture_of_the_whole_has_a_box_for_each_rank_and_bars_to_scale():
    shown = [
        block.Part("norm", "whole", ["all", "all"], "one pass", 0, 10_000_000),
        block.Part("output <o>", "share", ["rows 0", "rows 1"], "tiles", 5_000_000, 20_000_000),
        block.Part("all-reduce", "sum", ["added"], "ring", sends=20_000_000),
    ]
    page = block.draw_block(shown, "a block")._repr_html_()
    assert page.count("output &lt;o&gt;") == 2
    assert page.count("all-reduce") == page.count("<b>+</b>") == 1
    widths = [part.partition("%")[0] for part in page.split('<i style="width:')[1:]]
    assert widths == ["50.0", "25.0", "100.0", "100.0"]
    assert "output <o>: tiles; holds 5 MB, writes 20 MB" in repr(block.draw_block(shown, "a block"))


def test_messages_of_a_timetable_are_numbered_in_their_order():
    works = [Work(0, 0, "F", 0, 1), Work(1, 0, "F", 1, 2), Work(1, 0, "B", 2, 4), Work(0, 0, "B", 4, 6)]
    messages = [Message(("F", 1, 0), 0, 1), Message(("B", 0, 0), 1, 0)]
    fig, ax = plt.subplots()
    pipeline.draw_timetable(ax, [works[0], messages[0], *works[1:3], messages[1], works[3]])
    found = [(text.get_text(), text.get_position()) for text in ax.texts if text.get_position()[1] == 0.5]
    plt.close(fig)
    assert [number for number, _ in found] == ["1", "2"]
    assert [round(x) for _, (x, _) in found] == [1, 4]
