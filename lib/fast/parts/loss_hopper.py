"""The cross-entropy of ``lib.fast.parts.loss`` on a Hopper GPU, with whole rows of logits in shared memory.

A row of 50,304 logits takes 101 KB in bf16, so the shared memory of a multiprocessor holds the rows of two programs:
while one of them computes, the other one copies.
A row arrives in chunks of 4096 numbers, each with a barrier of its own.
The row's maximum is taken as the chunks arrive, and the sum of its exponentials from shared memory.
The gradient then overwrites the row there, chunk by chunk, and is copied out,
and the next row's chunks follow as their places become free.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lib.fast.gluon import GLUON, has_roles
from lib.fast.launch import Address, Box, Launch, n_programs
from lib.fast.parts.grouped import launches

CHUNK = 4096
LINE = 128  # a chunk is copied as lines: a box has at most 256 numbers along an axis
MOST_CHUNKS = 13  # of a row: two rows of so many take 208 KiB of the 227 KiB of shared memory

if GLUON:
    from lib.fast.gluon import as_box, copy_in, copy_out, fence_async_shared, gl, gluon, mbarrier, tma

    LOG2E = gl.constexpr(math.log2(math.e))
    FLAT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=1)
    LINES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=3)
    LANES = gl.BlockedLayout([8], [32], [8], [0])

    @gluon.jit
    def _load_row(logits, row, row_s, full, CHUNKS: gl.constexpr):
        """Copy each chunk of a row as soon as the gradient of the row before has left its place."""
        for i in gl.static_range(CHUNKS):
            tma.store_wait(CHUNKS - 1 - i)
            mbarrier.expect(full.index(i), 4096 * 2)
            copy_in(logits, [row, 32 * i, 0], full.index(i), as_box(row_s.index(i), logits))

    @gluon.jit
    def _log_sum(row_s, full, phase, n_vocab, CHUNKS: gl.constexpr):
        """The row's logsumexp in bits; ``-inf`` takes the place of columns that are no tokens."""
        largest = gl.full([4096], -math.inf, gl.float32, LANES)
        for i in range(0, CHUNKS):
            mbarrier.wait(full.index(i), phase)
            x = row_s.index(i).load(LANES).to(gl.float32)
            if (i + 1) * 4096 > n_vocab:
                x = gl.where(i * 4096 + gl.arange(0, 4096, LANES) < n_vocab, x, -math.inf)
                row_s.index(i).store(x.to(row_s.dtype))
            largest = gl.maximum(largest, x)
        peak = gl.max(largest, 0) * LOG2E
        total = gl.full([4096], 0.0, gl.float32, LANES)
        for i in range(0, CHUNKS):
            total += gl.exp2(row_s.index(i).load(LANES).to(gl.float32) * LOG2E - peak)
        return peak + gl.log2(gl.sum(total, 0))

    @gluon.jit
    def row_loss_kernel(logits, gradient, targets, losses, n_rows, n_vocab, scale, CHUNKS: gl.constexpr):
        """Losses ``[N]``, and the gradient ``[N, V / 128, 128]`` of logits of that shape, times ``scale``.

        Bytes moved: 1 read and 1 write of the rows.
        """
        row_s = gl.allocate_shared_memory(logits.dtype, [CHUNKS, 4096], FLAT)
        full = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
        for j in gl.static_range(CHUNKS):
            mbarrier.init(full.index(j), count=1)
        phase = 0
        for row in range(gl.program_id(0), n_rows, gl.num_programs(0)):
            _load_row(logits, row, row_s, full, CHUNKS)
            target = gl.load(targets + row).to(gl.int32)
            log_sum = _log_sum(row_s, full, phase, n_vocab, CHUNKS)
            for i in range(0, CHUNKS):
                x = row_s.index(i).load(LANES).to(gl.float32) * LOG2E - log_sum
                share = gl.exp2(x)
                if i == target // 4096:
                    here = i * 4096 + gl.arange(0, 4096, LANES) == target
                    share = gl.where(here, share - 1.0, share)
                    gl.store(losses + row, gl.sum(gl.where(here, x, 0.0), 0) / -LOG2E)
                row_s.index(i).store((share * scale).to(row_s.dtype))
                fence_async_shared()
                copy_out(gradient, [row, 32 * i, 0], as_box(row_s.index(i), gradient))
            phase ^= 1
        tma.store_wait(0)


def fits(logits: Tensor) -> bool:
    """Whether the kernel takes these logits ``[N, V]``: 16 bits, a Hopper GPU, whole lines,
    and rows of which two fit into shared memory.
    """
    n_rows, n_columns = logits.shape
    readable = logits.dtype.itemsize == 2 and n_columns % LINE == 0 and logits.data_ptr() % 16 == 0
    return readable and n_rows > 0 and 0 < n_columns <= MOST_CHUNKS * CHUNK and has_roles(logits)


@lru_cache(maxsize=16)
def _rows_launch(key: tuple[int, int, int, int]) -> Launch:
    n_rows, n_columns, n_vocab, multiprocessors = key
    shape = (n_rows, n_columns // LINE, LINE)
    boxes: Any = [Box(i, (1, CHUNK // LINE, LINE), LINES, shape) for i in (0, 1)]
    args = (*boxes, Address(2), Address(3), n_rows, n_vocab, 1.0 / n_rows, -(-n_columns // CHUNK))
    return Launch(row_loss_kernel, (min(2 * multiprocessors, n_rows),), args, num_warps=8)


def launch_rows(logits: Tensor, targets: Tensor, n_vocab: int) -> tuple[Tensor, Tensor]:
    """The losses ``[N]`` of contiguous logits ``[N, V]`` that `fits` accepts, and the gradient of their mean."""
    n_rows, n_columns = logits.shape
    gradient, losses = torch.empty_like(logits), logits.new_empty(n_rows, dtype=torch.float32)
    tensors = logits, gradient, targets.contiguous(), losses
    launches(_rows_launch, (n_rows, n_columns, n_vocab, n_programs(logits.device)), *tensors)(*tensors)
    return losses, gradient
