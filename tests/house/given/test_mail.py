"""Chapter 17's given messages: shapes that are read once,
and ranks that fail while others wait for tensors whose shape they know.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lib.given.parallel.mail import Mail, Message
from lib.ranks import Pool, pool
from solutions.pipeline import PipelineStage, one_f_one_b_schedule, run_schedule

SIZES = (3, 3, 5, 3, 5, 3)
"""Rows of each micro-batch."""


@pytest.fixture
def ranks() -> Pool:
    return pool("gloo")


class Watched(Mail):
    """Mail that counts the shapes it reads."""

    n_read = 0

    def _read_header(self, message):
        self.n_read += 1
        return super()._read_header(message)


def there_and_back() -> list[Message]:
    """From rank 0 to rank 1, and back, for each micro-batch."""
    return [Message((kind, i), s, 1 - s) for i in range(len(SIZES)) for kind, s in (("there", 0), ("back", 1))]


def kind_and_size(message: Message) -> tuple:
    return message.name[0], SIZES[message.name[1]]


def exchange(rank: int, mail: Mail, fail_at: int | None = None, lie: bool = False) -> list[int]:
    """Every tensor goes to rank 1 and comes back doubled; rank 0 may fail before it sends one.

    Returns what came back.
    """
    alike = (lambda message: message.name[0]) if lie else kind_and_size
    with mail.delivering([*there_and_back(), "no message"], alike=alike):
        back = []
        for message in there_and_back():
            kind, i = message.name
            if rank == message.receiver:
                mail.expect(message)
                continue
            if rank == 0 and i == fail_at:
                raise ArithmeticError("rank 0 is out of order")
            if rank == 0 and i:
                back.append(int(mail.take(("back", i - 1)).sum()))
            if rank < 2:
                mail.send(message, torch.full((SIZES[i],), i) if kind == "there" else 2 * mail.take(("there", i)))
        return back + ([int(mail.take(("back", len(SIZES) - 1)).sum())] if rank == 0 else [])


def plain_exchange(rank: int, world_size: int) -> tuple[list[int], int]:
    mail = Watched()
    return exchange(rank, mail), mail.n_read


def failing_exchange(rank: int, world_size: int, fail_at: int | None, lie: bool) -> list[str]:
    """What each rank raises; afterwards the same ranks exchange messages as if nothing had happened."""
    found = []
    try:
        exchange(rank, Mail(), fail_at, lie)
    except Exception as error:
        found = [type(error).__name__, str(error)]
    expected = [2 * i * n for i, n in enumerate(SIZES)] if rank == 0 else []
    assert exchange(rank, Mail()) == expected
    return found


def pipeline_step(rank: int, world_size: int) -> tuple[int, int]:
    """A step of 1F1B with a last micro-batch that is shorter: the shapes that this rank read,
    and the messages that it got.
    """
    reads, gets = [], []
    read, receive = Mail._read_header, dist.irecv
    Mail._read_header = lambda self, message: reads.append(message) or read(self, message)
    dist.irecv = lambda *args, **kwargs: gets.append(1) or receive(*args, **kwargs)
    try:
        inputs = [torch.randn(n, 4) for n in (2, 2, 2, 2, 2, 1)]
        stage = PipelineStage(nn.Linear(4, 4), rank, world_size)
        schedule = one_f_one_b_schedule(rank, world_size, len(inputs))
        run_schedule([stage], schedule, inputs, inputs, nn.functional.mse_loss)
    finally:
        Mail._read_header, dist.irecv = read, receive
    return len(reads), len(gets)


def test_a_shape_is_read_once(ranks):
    (back, n_back), (nothing, n_there) = ranks.run(plain_exchange, n_ranks=2).values
    assert back == [2 * i * n for i, n in enumerate(SIZES)]
    assert nothing == []
    assert (n_back, n_there) == (2, 2)


def test_a_pipeline_reads_a_shape_for_each_border_and_size(ranks):
    first, middle, last = ranks.run(pipeline_step, n_ranks=3).values
    assert (first, middle, last) == ((2, 6), (4, 12), (2, 6))


@pytest.mark.parametrize("fail_at", range(len(SIZES)))
def test_a_rank_fails_while_others_know_the_shapes_that_they_wait_for(ranks, fail_at):
    first, second, third = ranks.run(failing_exchange, fail_at, False, n_ranks=3).values
    assert first == ["ArithmeticError", "rank 0 is out of order"]
    assert second == third == ["RuntimeError", "rank 0 raised ArithmeticError: rank 0 is out of order"]


def test_messages_that_should_be_alike_and_are_not(ranks):
    first, second, third = ranks.run(failing_exchange, None, True, n_ranks=3).values
    assert first[0] == "ValueError"
    assert "name=('there', 2)" in first[1]
    assert "((5,), torch.int64)" in first[1]
    assert "((3,), torch.int64)" in first[1]
    assert second == third == ["RuntimeError", f"rank 0 raised ValueError: {first[1]}"]
