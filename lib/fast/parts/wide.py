"""Weights that stay float32 beside products in 16 bits, and whose gradients are never rounded to 16.

A product with such a weight reads a narrow copy of it.
Its gradient is a sum over all tokens, which the tensor cores add in float32.
If a product in 16 bits and then a cast computed it, each gradient would be rounded, and be written and read once more.
Here the product writes float32.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` of matrices in ``dtype``; on a GPU a float32 result of 16-bit factors is not rounded in between."""
    if a.is_cuda and dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        narrow = weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return F.linear(x, narrow, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, narrow = ctx.saved_tensors
        (of_weight, of_bias), rows = ctx.dtypes, grad.flatten(0, -2)
        dx = grad @ narrow if ctx.needs_input_grad[0] else None
        dw = wide_product(rows.T, x.flatten(0, -2), of_weight) if ctx.needs_input_grad[1] else None
        return dx, dw, rows.sum(0, dtype=of_bias) if ctx.needs_input_grad[2] else None


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` in the dtype of x ``[..., C]``, for a weight ``[F, C]`` that may be wider."""
    return _Linear.apply(x, weight, bias)


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor, d_weight: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        wide = torch.promote_types(d_weight.dtype, torch.float32)  # a frequent token has many gradients to add
        total = d_weight.to(wide).index_add(0, tokens.flatten(), d_rows.flatten(0, -2).to(wide))
        return total.to(d_weight.dtype), None


def tied_embedding(weight: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a weight that is also the last product's: ``[*tokens, C]``; and the weight, for that product.

    The gradients of the rows are then added to the product's gradient.
    Else each use would have a gradient of the whole weight, one of them mostly zeros, to be added up.
    """
    return _TiedEmbedding.apply(weight, tokens)
