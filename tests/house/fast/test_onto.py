"""The product that ends a branch, onto the residual stream: what stands for its kernel without a Hopper GPU,
and on one the kernel.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lib.fast import models
from lib.fast.models import Path, gpt2_loss
from lib.fast.parts import mlp, onto
from lib.given.models.gpt2 import GPT2Config
from solutions.gpt2 import GPT2


def parts(n_rows, width, columns, dtype=torch.float32, device="cpu"):
    """Rows, a layer, the stream, and the gradient of what comes out."""
    generator = torch.Generator(device).manual_seed(0)
    x, weight, bias, stream, grad = (
        torch.randn(shape, generator=generator, device=device)
        for shape in ((n_rows, width), (columns, width), (columns,), (n_rows, columns), (n_rows, columns))
    )
    return [x.to(dtype), weight / width**0.5, bias, stream.to(dtype)], grad.to(dtype)


def with_gradients(function, inputs, grad):
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))


def plain(x, weight, bias, stream):
    return F.linear(x, weight, bias) + stream


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_and_gradients_are_those_of_a_product_and_a_sum(dtype):
    inputs, grad = parts(37, 24, 16, dtype)
    found = with_gradients(onto.linear_onto, inputs, grad)
    wanted = with_gradients(plain, [t.double() for t in inputs], grad)
    assert [t.dtype for t in found] == [dtype, dtype, torch.float32, torch.float32, dtype]
    rtol = 1e-5 if dtype == torch.float32 else 0.02
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, atol=rtol, rtol=rtol)


@pytest.mark.time_limit(60)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_traced_model_with_it_has_the_loss_and_the_gradients_of_the_one_without(monkeypatch):
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=11, context_len=8, dim=16, n_layers=2, n_heads=2))
    tokens, calls, results = torch.randint(11, (3, 9)), [], []
    monkeypatch.setattr(onto, "fits", lambda *_: calls.append(1))  # so the operator takes the place of the kernel
    for takes in (True, False):
        monkeypatch.setattr(models, "fits", lambda *_, takes=takes: takes)
        loss_of = torch.compile(lambda x, y: gpt2_loss(model, x, y, Path(kernels=True)), backend="aot_eager")
        model.zero_grad()
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        results.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        assert len(calls) == 4  # two for each block, all of them by the first path
        torch.compiler.reset()
    torch.testing.assert_close(results[0], results[1], atol=2e-6, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("n_rows", "width", "columns"), [(16_384, 768, 768), (16_384, 3072, 768), (40_105, 200, 264)])
def test_on_a_gpu_it_is_rounded_once_and_always_the_same(n_rows, width, columns):
    inputs, _ = parts(n_rows, width, columns, torch.bfloat16, "cuda")
    inputs[1] = inputs[1].bfloat16()
    if not mlp.fits(inputs[0], columns):
        pytest.skip("the kernel is for a Hopper GPU, by a version of Triton with which it was tried")
    found = onto.launch_onto(*inputs)
    assert torch.equal(found, onto.launch_onto(*inputs))
    torch.testing.assert_close(found.double(), plain(*(t.double() for t in inputs)), atol=1e-4, rtol=2**-8)
