"""The vision transformer in a few parts, each with its parameters in one row of numbers,
for fast training on several ranks.

A model that is compiled as a whole has a single backward pass.
All gradients are ready at its end, when no computation remains that could hide their all-reduce.
A model that is compiled block by block pays at every seam.
Here the model is compiled in parts of a few blocks.
A part's parameters are views of one row, so its gradient is one row too, joined at the end of the part's backward pass.
Chapter 10's ``OverlapDDP`` averages that row while the next part's backward pass runs,
chapter 12's ``FullySharded`` gathers it in one piece, and equal parts share one compilation.

The row is cut outside of the compiled function, at the price of one copy of the gradient,
and the matrices are cast there too, because then one kernel casts all of them.
If the row is cut inside, PyTorch 2.10 to 2.13 lose a part of the gradient on a GPU, from some thousand tokens on:
where a gradient is joined from pieces, the compiler's fusion of sums over rows and over columns leaves LayerNorm's
pieces in tensors that nothing reads (github.com/pytorch/pytorch/issues/193061).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from lib.fast.models import Path, vit_block, vit_head, vit_stem

Compile = Callable[[Callable], Callable]


class Stem(nn.Module):
    """From images to the residual stream."""

    def __init__(self, model: Any, path: Path):
        super().__init__()
        self.embeddings, self.path = model.embeddings, path

    def forward(self, images: Tensor) -> Tensor:
        return vit_stem(self.embeddings, images, self.path)


class Middle(nn.Module):
    """Some blocks."""

    def __init__(self, blocks: list[Any], path: Path):
        super().__init__()
        self.blocks, self.path = nn.ModuleList(blocks), path

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = vit_block(block, x, self.path)
        return x


class Tail(nn.Module):
    """The last blocks, the head and the loss."""

    def __init__(self, model: Any, blocks: list[Any], path: Path):
        super().__init__()
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), model.norm, model.head
        self.pooling, self.path = model.config.pooling, path

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        *blocks, last = self.blocks
        for block in blocks:
            x = vit_block(block, x, self.path)
        return F.cross_entropy(vit_head(last, self.norm, self.head, x, self.path, self.pooling), labels)


class CutRow(torch.autograd.Function):
    """Cut a row into pieces, some of them of another dtype.

    The row is cast as a whole, and a few kernels join the gradients.

    Args:
        row: ``[n]``.
        sizes: Length of each piece; together n.
        is_cast: For each piece, whether it gets ``dtype``; the others keep the row's.
        dtype: Dtype of some pieces and of their gradients. The row's gradient has the row's dtype.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, sizes: list[int], is_cast: list[bool], dtype: torch.dtype) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.new_empty = sizes, row.new_empty
        kept, cast = row.split(sizes), row.to(dtype).split(sizes)
        return tuple(pair[i] for pair, i in zip(zip(kept, cast, strict=True), is_cast, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        row = ctx.new_empty(sum(ctx.sizes))
        pieces = list(zip(row.split(ctx.sizes), gradients, strict=True))
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            alike = [(place, gradient.reshape(-1)) for place, gradient in pieces if gradient.dtype == dtype]
            torch._foreach_copy_([place for place, _ in alike], [gradient for _, gradient in alike])
        return row, None, None, None


class RowPart(nn.Module):
    """A part of a model whose parameters are one row.

    Args:
        part: The module to compute; its own parameters are moved to the device "meta".
        names: For each of its parameters, the name in the whole model.
        run: The compiled function of an equal part; None compiles a new one with ``compiled``.
        dtype: Dtype of the products, to which the matrices are cast before they are cut from the row.

    Attributes:
        row: All parameters of the part, one after another, in the order of ``shapes``.
        shapes: Their names in the whole model, and their shapes.
    """

    def __init__(
        self, part: nn.Module, names: Mapping[Tensor, str], run: Callable | None, compiled: Compile, dtype: torch.dtype
    ):
        super().__init__()
        parameters = dict(part.named_parameters())
        self.row = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters.values()]))
        self.shapes = {names[p]: p.shape for p in parameters.values()}
        self.is_cast = [name.endswith("weight") and p.ndim > 1 for name, p in parameters.items()]
        self.run, self.dtype = run or compiled(on_pieces(part.to("meta"))), dtype

    def forward(self, *inputs: Tensor) -> Tensor:
        pieces = CutRow.apply(self.row, [shape.numel() for shape in self.shapes.values()], self.is_cast, self.dtype)
        return self.run([piece.view(shape) for piece, shape in zip(pieces, self.shapes.values(), strict=True)], *inputs)

    def named(self, row: Tensor) -> dict[str, Tensor]:
        """Views of a row of this part's length, under the names of the whole model."""
        pieces = row.split([shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}


def on_pieces(part: nn.Module) -> Callable[..., Tensor]:
    """The part as a function of a list of its parameters, in the order of ``named_parameters``, and of its inputs."""
    names = [name for name, _ in part.named_parameters()]

    def run(pieces: list[Tensor], *inputs: Tensor) -> Tensor:
        return functional_call(part, dict(zip(names, pieces, strict=True)), inputs)

    return run


class RowViT(nn.Module):
    """A ``lib.vit.VisionTransformer`` cut into a stem, equal parts of some blocks, and a tail with the loss.

    Args:
        model: The model whose parameters it takes over; the model's own are on the device "meta" afterwards.
        path: How the model is computed.
        n_blocks: Number of blocks in a part. The remaining blocks, at least one, belong to the tail.
        compiled: Applied to each part's function: ``torch.compile``, or nothing by default.

    Attributes:
        parts: The parts in the order in which they run, which are units for ``lib.fsdp.FullySharded``.
    """

    def __init__(self, model: Any, path: Path, n_blocks: int = 4, compiled: Compile = lambda run: run):
        super().__init__()
        if n_blocks < 1:
            raise ValueError(f"n_blocks = {n_blocks}, expected at least 1")
        names = {parameter: name for name, parameter in model.named_parameters()}
        blocks = list(model.blocks)
        n_equal = (len(blocks) - 1) // n_blocks
        self.parts = nn.ModuleList([RowPart(Stem(model, path), names, None, compiled, path.dtype)])
        run: Callable | None = None
        for i in range(n_equal):
            part = RowPart(Middle(blocks[i * n_blocks : (i + 1) * n_blocks], path), names, run, compiled, path.dtype)
            self.parts.append(part)
            run = part.run
        self.parts.append(RowPart(Tail(model, blocks[n_equal * n_blocks :], path), names, None, compiled, path.dtype))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy."""
        x = images
        for part in self.parts[:-1]:
            x = part(x)
        return self.parts[-1](x, labels)

    def named_gradients(self) -> dict[str, Tensor]:
        """The gradients under the names of the original model."""
        return {name: grad for part in self.row_parts() for name, grad in part.named(part.row.grad).items()}

    @torch.no_grad()
    def named_values(self) -> dict[str, Tensor]:
        """The parameters under the names of the original model: its state dict."""
        return {name: value for part in self.row_parts() for name, value in part.named(part.row.detach()).items()}

    def row_parts(self) -> list[Any]:
        return list(self.parts)


def train_step(
    loss_of: Callable[[], Tensor], optimizer: Any, finish: Callable[[], None] = lambda: None
) -> Callable[[], Tensor]:
    """A whole step that can be called, or recorded by ``lib.fast.models.capture``: nothing in it waits for the device.

    Args:
        loss_of: The forward pass.
        optimizer: Anything with ``zero_grad`` and ``step``, ``lib.fast.copies.InTurn`` too.
            Gradients are allocated anew in each step; in a recorded step they keep their addresses.
        finish: Completes the gradients, for example ``OverlapDDP.finish_gradient_synchronization``.

    Returns:
        A function that takes a step and returns the loss before it.
    """

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        finish()
        optimizer.step()
        return loss.detach()

    return step
