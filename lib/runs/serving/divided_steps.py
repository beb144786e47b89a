"""The captured step of a Llama that is divided among ranks, on GPUs.

Rank 0 fills the buffers of its next step, and sends the same numbers to the other ranks, which fill theirs. Then every
rank replays a graph of its own, in which NCCL's all-reduces make one model of the ranks' parts. The tokens that only
rank 0's device knows yet, those that the step before drew, reach the others by a broadcast in the graph.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from lib.fast.decode import DTYPES, Steps
from lib.fast.models import capture
from lib.given.kernels.mode import HAS_TRITON


class Numbers(NamedTuple):
    """What the buffers of a step hold.

    Attributes:
        fields: ``Steps.fields`` of its rows, or the fields of its tokens if they lie in tiles.
        tables: The rows of ``Steps.tables`` that it reads.
        tiles, asked: Of tokens in tiles, as in ``Steps.decode_tiled``; otherwise None.
        copies: Pairs of blocks, the first copied into the second since the step before.
    """

    fields: np.ndarray
    tables: np.ndarray
    tiles: np.ndarray | None
    asked: list[int] | None
    copies: list[tuple[int, int]]


def can_capture(cache: Any) -> bool:
    """Whether a rank's part of a Llama can take captured steps."""
    fits = cache.keys.dtype in DTYPES and 16 <= cache.keys.shape[-1] <= 256
    return bool(HAS_TRITON and cache.keys.is_cuda and fits)


class DividedSteps(Steps):
    """`Steps` of one rank's part of a model, which `divided.divide` has made.

    Args:
        model, cache, n_rows: As for `Steps`.
        tell: On rank 0, called with the `Numbers` of each step before it is launched.

    Attributes:
        is_telling: Whether ``tell`` is called. While graphs are recorded, all ranks know the steps by themselves.
    """

    def __init__(self, model: Any, cache: Any, n_rows: int, tell: Callable[[Numbers], None] | None = None) -> None:
        super().__init__(model, cache, n_rows)
        self.tell, self.is_telling = tell, True

    def warm_up(self, show: Any = iter) -> None:
        self.is_telling = False
        super().warm_up(show)
        self.is_telling = True

    def decode(self, n: int) -> Float[Tensor, "n v"]:
        """As `Steps.decode`, on all ranks; on another than 0 the result means nothing."""
        self._tell(self.fields[:, :n], n)
        return super().decode(n)

    def decode_tiled(self, fields: Any, tiles: Any, asked: list[int]) -> Float[Tensor, "r v"]:
        """As `Steps.decode_tiled`, likewise."""
        self._tell(fields, int(tiles[0, -1]) + 1, tiles, asked)
        return super().decode_tiled(fields, tiles, asked)

    def _tell(self, fields: np.ndarray, n_tables: int, tiles: Any = None, asked: list[int] | None = None) -> None:
        if self.tell is not None and self.is_telling:
            copies, self.cache.copies = self.cache.copies, []
            self.tell(Numbers(fields, self.tables[:n_tables], tiles, asked, copies))

    def follow(self, told: Numbers) -> None:
        """Take the step that rank 0 tells of."""
        self.wait()
        for block, into in told.copies:
            self.cache.copy_block(block, into)
        self.tables[: len(told.tables)] = told.tables
        if told.asked is not None:
            self.decode_tiled(told.fields, told.tiles, told.asked)
            return
        n = told.fields.shape[1]
        self.fields[:, :n] = told.fields
        self.decode(n)

    def _record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return capture(step, n_warmup=1, on_ranks=True, pool=self.pool)

    def _embed(self, known: Tensor) -> Tensor:
        tokens = self._tokens(known)
        dist.broadcast(tokens, 0)
        return self.model.tok_embeddings(tokens)

    def _whole(self, parts: Float[Tensor, "p n c"]) -> Float[Tensor, "1 n c"]:
        part = parts[0] if len(parts) == 1 else parts.sum(0).to(self.cache.keys.dtype)
        dist.all_reduce(part)
        return part[None]

    @staticmethod
    def _alone(x: Tensor) -> bool:
        return False  # the kernels of one row add to the residual stream what is only a rank's part

    def _logits(self, x: Tensor, added: Tensor | None, rows: Tensor | None = None) -> Tensor:
        if dist.get_rank() == 0:
            return super()._logits(x, added, rows)
        return x
