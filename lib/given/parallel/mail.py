"""Point-to-point messages between the stages of a pipeline: tensors of any shape,
and no rank waits for one that failed.
"""

import pickle
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Message(NamedTuple):
    """A tensor that one rank of the group sends to another; ``name`` is unique in an exchange."""

    name: Any
    sender: int
    receiver: int


Header = tuple[tuple[int, ...], torch.dtype]
"""What a receiver must know to make room for a tensor: its shape and dtype."""


class Mail:
    """One exchange of messages among the ranks of a group.

    Every rank makes a `Mail` for it, in the same order as the others.

    The tensors travel by ``isend`` and ``irecv``.
    Their shapes travel through the group's key-value store, from host to host,
    so the receiver can make room for any tensor and the accelerator never has to wait for its host.
    But a host that reads a shape waits until the sender's host has got that far; of messages that are alike,
    it reads only the first one's.

    Args:
        group: The ranks; None means all ranks. Ranks below are ranks in this group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group or dist.group.WORLD
        self.rank, self.n_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._store = self.group.get_group_store()  # type: ignore[union-attr]
        self._round = self._store.add(f"mail/rounds/{self.rank}", 1)
        self._n_gathered = 0
        for n in (1, 2):  # all ranks have read what this one gathered two exchanges ago
            for name in (("gather", n, self.rank), ("read", n), ("read by all", n)):
                self._store.delete_key(self._key(name, self._round - 2))
        self._arrived: dict[Hashable, tuple[Tensor, dist.Work | None]] = {}
        self._sending: deque[tuple[Any, Tensor]] = deque()
        self._open: list[Message] = []
        self._alike: Callable[[Message], Hashable] | None = None
        self._shapes: dict[Hashable, Header] = {}

    def gather(self, value: Any) -> list:
        """Every rank's ``value``, in the order of the ranks. All ranks call it."""
        self._n_gathered += 1
        names = [("gather", self._n_gathered, rank) for rank in range(self.n_ranks)]
        self._write(names[self.rank], value)
        values = [value if rank == self.rank else self._read(name) for rank, name in enumerate(names)]
        if self._store.add(self._key(("read", self._n_gathered), self._round), 1) == self.n_ranks:
            self._write(("read by all", self._n_gathered), True)
        if self.rank == 0:  # whose process may hold the store
            self._read(("read by all", self._n_gathered))
        return values

    @contextmanager
    def delivering(
        self,
        messages: Iterable[Any],
        device: torch.device | str = "cpu",
        alike: Callable[[Message], Hashable] | None = None,
    ) -> Iterator[None]:
        """Inside, the ranks send and receive all of ``messages``, each rank in the same order.

        An exception on one rank ends the block on all ranks: its own on the rank that raised it,
        and a RuntimeError with its text on the others.
        These get zeros for messages whose shape they know already,
        and read of the exception in the next message of another shape, or at the end.

        Args:
            messages: All messages of the block, the same on all ranks.
                What is no `Message` is skipped, so that a whole timetable may be given.
            device: Where received tensors live.
            alike: The same function on all ranks.
                Messages for which it returns the same key have the same shape and dtype, or `send` raises a ValueError.
                None if nothing is known of the shapes.
        """
        self._open, self._device, self._alike = [item for item in messages if isinstance(item, Message)], device, alike
        failure = None
        try:
            yield
            if left := [message for message in self._open if self.rank in message[1:]]:
                raise ValueError(f"rank {self.rank} has neither sent nor expected {left[0]}")
        except Exception as error:
            failure = error
            self._give_up(error)
        while self._sending:
            self._sending.popleft()[0].wait()
        texts = self.gather(None if failure is None else self._text(failure))
        first = next((text for text in texts if text), None)
        if failure is not None and not isinstance(failure, _OtherRank):
            raise failure
        if first:
            raise RuntimeError(first) from None

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start to send a tensor. It returns at once unless two earlier tensors are still on their way."""
        self._check(message, self.rank == message.sender, "send")
        tensor, known = tensor.detach().contiguous(), self._known(message)
        header = tuple(tensor.shape), tensor.dtype
        if message.receiver != self.rank and known not in (None, header):
            raise ValueError(f"{message}: {header}, and an earlier message that should be alike was {known}")
        self._open.remove(message)
        if message.receiver == self.rank:
            self._arrived[message.name] = tensor, None
            return
        if known is None:
            self._write(message.name, header)
            self._remember(message, header)
        self._sending.append((dist.isend(tensor, group=self.group, group_dst=message.receiver), tensor))
        while len(self._sending) > 2:
            self._sending.popleft()[0].wait()

    def expect(self, message: Message) -> None:
        """Make room for a tensor that another rank sends, and start to receive it."""
        if message.sender == message.receiver == self.rank:
            return
        self._check(message, self.rank == message.receiver, "expect")
        found = self._known(message) or self._read_header(message)
        self._open.remove(message)
        if isinstance(found, str):
            raise _OtherRank(found)
        self._remember(message, found)
        tensor = torch.empty(found[0], dtype=found[1], device=self._device)
        work = dist.irecv(tensor, group=self.group, group_src=message.sender)
        self._arrived[message.name] = tensor, work

    def take(self, name: Hashable) -> Tensor:
        """The tensor of a message that is expected, as soon as it is here."""
        if name not in self._arrived:
            raise ValueError(
                f"rank {self.rank} takes {name}, which it does not expect; it expects {list(self._arrived)}"
            )
        tensor, work = self._arrived.pop(name)
        if work is not None:
            work.wait()
        return tensor

    def _check(self, message: Message, is_mine: bool, verb: str) -> None:
        if not is_mine:
            raise ValueError(f"rank {self.rank} cannot {verb} {message}")
        if message not in self._open:
            raise ValueError(
                f"rank {self.rank} has done {verb} {message} before, or it is not among the messages of this block"
            )

    def _known(self, message: Message) -> Header | None:
        """Shape and dtype of an earlier message that is alike."""
        return None if self._alike is None else self._shapes.get(self._alike(message))

    def _remember(self, message: Message, header: Header) -> None:
        if self._alike is not None:
            self._shapes[self._alike(message)] = header

    def _read_header(self, message: Message) -> Header | str:
        """Shape and dtype, or why the tensor will not come."""
        found = self._read(message.name)
        self._store.delete_key(self._key(message.name, self._round))
        return found

    def _give_up(self, error: Exception) -> None:
        """Tell the ranks that wait for this one why nothing will come, or send zeros where they wait for a tensor;
        take what is still sent to this one.

        Again in the order of the messages, so that it cannot deadlock either.
        """
        for message in list(self._open):
            known = self._known(message)
            if message.sender == message.receiver:
                continue
            if message.sender == self.rank and known:
                self.send(message, torch.zeros(known[0], dtype=known[1], device=self._device))
            elif message.sender == self.rank:
                self._write(message.name, self._text(error))
            elif message.receiver == self.rank:
                with suppress(_OtherRank):
                    self.expect(message)
        for name in list(self._arrived):
            self.take(name)

    def _text(self, error: Exception) -> str:
        return (
            str(error) if isinstance(error, _OtherRank) else f"rank {self.rank} raised {type(error).__name__}: {error}"
        )

    def _key(self, name: Hashable, round_: int) -> str:
        return f"mail/{round_}/{name!r}"

    def _write(self, name: Hashable, value: Any) -> None:
        self._store.set(self._key(name, self._round), pickle.dumps(value))  # type: ignore[arg-type]

    def _read(self, name: Hashable) -> Any:
        return pickle.loads(self._store.get(self._key(name, self._round)))


class _OtherRank(Exception):
    """Another rank failed; the text says which, and how."""
