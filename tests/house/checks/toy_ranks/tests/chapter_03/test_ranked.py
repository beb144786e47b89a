import pytest

from lib.workbook.grading import case, expect_equal, graded

ranked = graded("ranked")


def total_of_ranks(rank, world_size):
    case(f"{world_size} ranks, each with its number plus one")
    expect_equal(ranked.total(float(rank + 1)), world_size * (world_size + 1) / 2, name=f"total on rank {rank}")


@pytest.mark.time_limit(20)
def test_total_on_two_ranks(ranks):
    result = ranks(total_of_ranks, n_ranks=2)
    expect_equal([ledger.count("all_reduce") for ledger in result.ledgers], [1, 1], name="all_reduces of each rank")
