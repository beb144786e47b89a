"""Memory that notices: inputs framed by NaN, fresh tensors full of NaN inside a frame, and a trace of every access."""

import linecache
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # a `TorchDispatchMode` imports it when it is first used: not while a check's clock runs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lib.given.kernels.mode import INTERPRETED
from lib.given.kernels.trace import OutOfBounds, Trace, trace
from lib.workbook.book.catalog import ROOT
from lib.workbook.grading import Wrong, expect_true

DEVICE = "cpu" if INTERPRETED else "cuda"
FRAME = 4096
FRESH = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")
BOUNDS = 'the section "A program and its tile"'


@contextmanager
def watched(read: str = BOUNDS) -> Iterator[Trace | None]:
    """A trace of the interpreted kernels in this block; the first access outside their tensors is a wrong answer.

    Raises:
        Wrong: a kernel read or wrote outside; the report names the operation, the tensor and the line of the kernel.
    """
    if not INTERPRETED:
        yield None
        return
    try:
        with trace(stop_outside=True) as seen:
            yield seen
    except OutOfBounds as error:
        rows = [("at", kernel_line(error)), ("that is", error.place)]
        raise Wrong(error.problem, rows, answer=error.problem, read=read) from error


def kernel_line(error: BaseException) -> str:
    """The innermost line of a traceback that is neither Triton's nor the book's machinery: the kernel's own."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if "/triton/" not in f.filename and "/lib/given/" not in f.filename]
    file, line = Path(mine[-1].filename), mine[-1].lineno or 1
    place = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    return f"{place}:{line}   {linecache.getline(str(file), line).strip()}"


def framed(like: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor of the same sizes and strides in the middle of a buffer of NaN, and the buffer."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    buffer = torch.full((2 * FRAME + max(span, 0),), torch.nan, dtype=like.dtype, device=like.device)
    return buffer.as_strided(like.shape, like.stride(), FRAME), buffer


def inside_frame(x: Tensor) -> Tensor:
    """The same numbers, strides and flag, framed by NaN; gaps between strided elements are NaN too."""
    view, _ = framed(x)
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())  # an expanded number has one place
    view.detach()[once].copy_(x.detach()[once])
    return view.requires_grad_(x.requires_grad)


class Guarded(TorchDispatchMode):
    """Fresh tensors are framed, and full of NaN until somebody writes."""

    def __init__(self):
        super().__init__()
        self.fresh: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in FRESH and out.is_floating_point() and out.numel():
            out, buffer = framed(out)
            self.fresh.append((out, buffer))
        return out

    def touched(self) -> int:
        """Numbers around and between the elements of fresh tensors that are no longer NaN."""
        n_touched = 0
        for out, buffer in self.fresh:
            kept = buffer.clone()
            kept.as_strided(out.shape, out.stride(), FRAME).fill_(torch.nan)
            n_touched += int((~kept.isnan()).sum())
        return n_touched


def run(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, Trace | None]:
    """Call with framed inputs; nothing outside a tensor may be read or written, and the inputs stay as they are."""
    mine = [inside_frame(a) if isinstance(a, Tensor) else a for a in args]
    out, seen = watch(lambda: function(*mine, **kwargs))
    for i, (before, after) in enumerate(zip(args, mine, strict=True)):
        if isinstance(before, Tensor):
            same = torch.equal(before.nan_to_num(), after.nan_to_num())
            expect_true(same, f"argument {i} was changed in place", answer=out, read="the contract")
    return out, seen


def watch(call: Any) -> tuple[Any, Trace | None]:
    """Call in guarded memory."""
    with ExitStack() as stack:
        seen = stack.enter_context(watched())
        guard = stack.enter_context(Guarded())
        out = call()
    results = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor) and x.numel()]
    is_empty = seen is not None and bool(results) and seen.n_programs > 0 and seen.bytes_stored == 0
    expect_true(not is_empty, "a kernel was launched and stored nothing: is its body written?", answer=out)
    n = max(guard.touched(), seen.outside(True) if seen else 0)
    expect_true(n == 0, f"{n} stores went outside the tensor: a mask or a stride is wrong", answer=out, read=BOUNDS)
    n = seen.outside(False) if seen else 0
    expect_true(n == 0, f"{n} loads went outside the tensor: a mask or a stride is wrong", answer=out, read=BOUNDS)
    return out, seen


def layouts(x: Tensor) -> dict[str, Tensor]:
    """Tensors of one shape in other strides: the same numbers three times, then one column and one row of them with
    stride 0.
    """
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7.0, dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    longer = torch.cat([x, torch.full_like(x, 7.0)], dim=-1)
    return {
        "transposed": x.transpose(0, -1).contiguous().transpose(0, -1),
        "every second column": wide[..., ::2],
        "rows further apart": longer[..., : x.shape[-1]],
        "one column expanded": x[..., :1].expand(x.shape),
        "one row expanded": x[:1].expand(x.shape),
    }
