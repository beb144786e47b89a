"""Kernels of a decoding step that begin before the one ahead of them has ended.

A step is a chain of some hundred short kernels. In a plain chain each one starts when the one before has ended
everywhere, and the memory rests in between. On a Hopper GPU the next kernel's programs may start as soon as all of the
last one's have (*programmatic dependent launch*). They read or ask for their first weights, which no kernel of a
step writes, and wait before they touch anything else.
"""

import functools
from typing import Any

import torch

from lib.given.kernels.mode import tl, triton


@functools.cache
def launch_early(device: torch.device) -> dict[str, Any]:
    """The arguments of a launch that say whether its kernel begins early."""
    is_new = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if is_new else {"EARLY": False}


@triton.jit
def wait_for_the_kernel_ahead(EARLY: tl.constexpr):
    """Let the next kernel begin, then wait until all that the kernel ahead writes is in memory."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def ask_for_rows(base, rows, n_rows, row_bytes, n_bytes, LINES: tl.constexpr):
    """Have the first n_bytes of some rows brought into the level 2 cache, LINES lines of memory at a time.

    Rows are row_bytes apart; what would lie behind the last row is not read.
    """
    row = tl.minimum(rows, n_rows - 1).to(tl.int64)[:, None] * row_bytes
    for start in range(0, n_bytes, 128 * LINES):
        at = tl.minimum(start + 128 * tl.arange(0, LINES), n_bytes - 1)
        place = (base.to(tl.pointer_type(tl.uint8)) + row + at[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
        )
