"""The cross-entropy of a large vocabulary: loss and gradient from a single reading of the logits.

Logits of 16 x 1024 tokens and 50,304 columns fill 1.6 GB in bf16.
Written as softmax, logarithm and indexing, the loss moves them over the memory bus again and again.
Here each row is read once from memory and once from the cache, and its gradient is written once.
On a Hopper GPU, ``lib.fast.parts.loss_hopper`` computes loss and gradient inside of the product, and reads no logit.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lib.fast.parts import loss_hopper
from lib.fast.parts.wide import wide_product

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton does not exist for this system; the CPU path below does not need it
    triton = None

BLOCK, N_WARPS = 4096, 16  # 512 threads for each row: few rows are in flight at a time, so they stay in the cache

if triton is not None:
    NATS = tl.constexpr(1.4426950408889634)  # bits in a nat: log2(e)

    @triton.jit
    def _load_bits(pointer, columns, n):
        """Logits in float32 as powers of 2, for which the GPU has an instruction."""
        return tl.load(pointer + columns, mask=columns < n, other=-1e30).to(tl.float32) * NATS

    @triton.jit
    def _softmax_loss_kernel(logits, targets, losses, gradient, n_vocab, n_columns, BLOCK: tl.constexpr):
        """One program for each row. Bytes moved: 2 reads of the row, the second from the cache, and 1 write."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * n_columns
        gradient += row * n_columns
        columns = tl.arange(0, BLOCK)
        largest = tl.full([BLOCK], -1e30, tl.float32)  # one for each lane; lanes are combined after the loop
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, n_vocab, 2 * BLOCK):
            x = _load_bits(logits, start + columns, n_vocab)
            y = _load_bits(logits, start + BLOCK + columns, n_vocab)
            new = tl.maximum(largest, tl.maximum(x, y))
            total = total * tl.exp2(largest - new) + tl.exp2(x - new) + tl.exp2(y - new)
            largest = new
        peak = tl.max(largest, 0)
        log_sum = peak + tl.log2(tl.sum(total * tl.exp2(largest - peak), 0))
        target = tl.load(targets + row)
        own = tl.load(logits + target).to(tl.float32) * NATS
        tl.store(losses + row, (log_sum - own) / NATS)
        for start in range(0, n_columns, BLOCK):
            at = start + columns
            share = tl.exp2(_load_bits(logits, at, n_vocab) - log_sum)  # 0 in the padding
            tl.store(gradient + at, share.to(gradient.dtype.element_ty), mask=at < n_columns)
        tl.debug_barrier()  # another thread may have written the target's column
        tl.store(gradient + target, (tl.exp2(own - log_sum) - 1.0).to(gradient.dtype.element_ty))


@torch.library.custom_op("scaling_workbook::softmax_loss", mutates_args=())
def softmax_loss(rows: Tensor, weight: Tensor, targets: Tensor, n_vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean cross-entropy of the logits ``rows @ weight.T``, and its gradient with respect to them.

    Args:
        rows: ``[N, C]``, contiguous.
        weight: ``[V + padding, C]``, contiguous.
        targets: ``[N]``, each below ``n_vocab``.
        n_vocab: Number V of columns that are tokens; the others get no probability.

    Returns:
        The loss, float32; and the gradient, as a matrix ``[N, V + padding]`` in the dtype of the rows
        and a float32 factor for each of its rows ``[N]``.
    """
    if loss_hopper.fits(rows, weight):
        losses, gradient, scales = loss_hopper.launch_loss(rows, weight, targets, n_vocab)
        return losses.mean(), gradient, scales
    logits, scales = rows @ weight.T, rows.new_full((len(rows),), 1 / len(rows), dtype=torch.float32)
    if logits.is_cuda:
        return *_softmax_loss_triton(logits, targets, n_vocab), scales
    log_shares = logits[:, :n_vocab].float().log_softmax(-1)
    gradient = log_shares.exp()
    gradient[torch.arange(len(targets)), targets] -= 1.0
    gradient = F.pad(gradient, (0, logits.shape[1] - n_vocab)).to(logits.dtype)
    return F.nll_loss(log_shares, targets), gradient, scales


def _softmax_loss_triton(logits: Tensor, targets: Tensor, n_vocab: int) -> tuple[Tensor, Tensor]:
    n_rows, n_columns = logits.shape
    gradient = torch.empty_like(logits)
    losses = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    _softmax_loss_kernel[(n_rows,)](
        logits, targets, losses, gradient, n_vocab, n_columns, BLOCK=BLOCK, num_warps=N_WARPS
    )
    return losses.mean(), gradient


@softmax_loss.register_fake
def _(rows: Tensor, weight: Tensor, targets: Tensor, n_vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    loss, scales = rows.new_empty((), dtype=torch.float32), rows.new_empty(len(rows), dtype=torch.float32)
    return loss, rows.new_empty(len(rows), len(weight)), scales


class LinearCrossEntropy(torch.autograd.Function):
    """The last product and the loss together, so that the gradient of the logits is computed with them."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, targets: Tensor, n_vocab: int) -> Tensor:
        ctx.dtype, weight = weight.dtype, weight.to(rows.dtype)
        loss, gradient, scales = softmax_loss(rows, weight, targets, n_vocab)
        ctx.save_for_backward(rows, weight, gradient, scales)
        return loss

    @staticmethod
    def backward(ctx, scale: Tensor):
        rows, weight, gradient, scales = ctx.saved_tensors
        scales = (scales * scale)[:, None]
        scaled = (rows * scales).to(rows.dtype)  # a factor of the gradient's rows, where there are fewer numbers
        d_rows = ((gradient @ weight) * scales).to(rows.dtype)
        return d_rows, wide_product(gradient.T, scaled, ctx.dtype), None, None


def linear_cross_entropy(rows: Tensor, weight: Tensor, targets: Tensor, n_vocab: int) -> Tensor:
    """The mean cross-entropy of ``rows @ weight.T`` over the first ``n_vocab`` columns.

    Args:
        rows: ``[N, C]``.
        weight: ``[V + padding, C]``, of the dtype of the rows or wider.
        targets: ``[N]``.
        n_vocab: Number V of columns that are tokens.

    On a Hopper GPU a logit counts as at most 61 nats above its target's.
    """
    return LinearCrossEntropy.apply(rows, weight, targets, n_vocab)
