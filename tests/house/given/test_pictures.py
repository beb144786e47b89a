"""The drawings that explain: what they compute is right, and each of them can be drawn."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from lib.given.show import experts, pipeline, scales, sequences, serving

DRAWINGS = (
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
