"""What chapter 15 is checked with: PyTorch's attention in float64,
and counters of the tensors and masks that a call makes.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def make_inputs(q_shape, kv_shape, dtype=torch.float32, device="cpu", seed=0) -> list[Tensor]:
    """q, k, v and a gradient of the output: random, and equal in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (q_shape, kv_shape, kv_shape, q_shape)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool) -> dict[str, Tensor]:
    """Output, logsumexp and gradients in float64, by PyTorch's scaled_dot_product_attention;
    0 for rows without keys.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    shared = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    keys, values = (x.repeat_interleave(shared, -3) if shared > 1 else x for x in (k, v))
    t, s = q.shape[-2], k.shape[-2]
    seen = torch.ones(t, s, dtype=torch.bool, device=q.device)
    seen = seen.tril(s - t) if is_causal else seen
    some = seen.any(-1)
    o = torch.zeros_like(q)
    if some.any():
        o[..., some, :] = F.scaled_dot_product_attention(q[..., some, :], keys, values, attn_mask=seen[some])
    scores = (q @ keys.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    loss = (o * do.double()).sum() + 0 * sum(
        x.sum() for x in (q, k, v)
    )  # so that all three get a gradient, even if no row has keys
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    return {"o": o.detach(), "lse": scores.logsumexp(-1).detach(), "dq": dq, "dk": dk, "dv": dv}


class LargestTensor(TorchDispatchMode):
    """While active, ``numbers`` is the size of the largest tensor that was made."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return out


class CountMasked:
    """While active, ``n`` counts the calls of `tl.where` on tiles of ``shape`` in interpreted kernels."""

    def __init__(self, shape: tuple[int, int]):
        self.shape, self.n = shape, 0

    def __enter__(self):
        from triton.runtime.interpreter import InterpreterBuilder

        self.builder, self.select = InterpreterBuilder, InterpreterBuilder.create_select

        def counted(builder, condition, *choices):
            self.n += condition.data.shape == self.shape
            return self.select(builder, condition, *choices)

        InterpreterBuilder.create_select = counted
        return self

    def __exit__(self, *error):
        self.builder.create_select = self.select


def guarded(shape, dtype, device="cpu", guard=8192, value=-7.0) -> Tensor:
    """A contiguous tensor with ``guard`` numbers before and after it, all filled with ``value``."""
    n = torch.Size(shape).numel()
    whole = torch.full((n + 2 * guard,), value, dtype=dtype, device=device)
    return whole[guard : guard + n].view(shape)


def guards_of(tensor: Tensor, guard=8192) -> Tensor:
    """The current values of the numbers before and after a tensor made by ``guarded``."""
    n, at = tensor.numel(), tensor.storage_offset()
    before = tensor.as_strided((guard,), (1,), at - guard)
    return torch.cat([before, tensor.as_strided((guard,), (1,), at + n)])
