"""Float32 weights beside narrow products: values, and gradients with their dtypes."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lib.fast.parts.loss import linear_cross_entropy
from lib.fast.parts.mlp import mlp
from lib.fast.parts.wide import tied_embedding, wide_linear, wide_product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_map_has_its_result_and_gradients(dtype, has_bias):
    torch.manual_seed(0)
    x, weight = normal(2, 5, 8, dtype=dtype), normal(6, 8)
    bias = normal(6) if has_bias else None
    inputs = [t for t in (x, weight, bias) if t is not None]
    grad, out = torch.randn(2, 5, 6, device=DEVICE).to(dtype), wide_linear(x, weight, bias)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    wanted = F.linear(*exact)
    rtol = 1e-5 if dtype == torch.float32 else 0.05
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, rtol=rtol, atol=rtol)
    found = zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(wanted, exact, grad.double()), strict=True)
    for t, (got, want) in zip(inputs, found, strict=True):
        assert got.dtype == t.dtype
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=rtol)


def test_a_frozen_input_or_weight_gets_no_gradient():
    x, weight = normal(3, 8), normal(6, 8)
    wide_linear(x.detach(), weight).sum().backward()
    wide_linear(x, weight.detach()).sum().backward()
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(6, 8))
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(3, 8))


def test_a_weight_that_is_used_twice_has_the_sum_of_both_gradients():
    torch.manual_seed(0)
    weight, tokens = normal(9, 4), torch.tensor([[1, 8, 1], [0, 1, 3]], device=DEVICE)

    def loss(rows, last):
        return (rows @ last.T).square().sum()

    found = torch.autograd.grad(loss(*tied_embedding(weight, tokens)), weight)
    wanted = torch.autograd.grad(loss(F.embedding(tokens, weight), weight), weight)
    torch.testing.assert_close(found, wanted)
    (found,) = torch.autograd.grad(tied_embedding(weight, tokens)[0].sum(), weight)  # the product may be elsewhere
    assert found.sum(1).tolist() == [4, 12, 0, 4, 0, 0, 0, 0, 4]


def test_a_frequent_token_of_a_narrow_weight_has_the_sum_of_all_its_gradients():
    weight, tokens = normal(3, 4, dtype=torch.bfloat16), torch.ones(1024, dtype=torch.int64, device=DEVICE)
    (found,) = torch.autograd.grad(tied_embedding(weight, tokens)[0].sum(), weight)
    assert found.sum(1).tolist() == [0, 4096, 0]  # added one by one in bfloat16, they end at 256


def test_the_mlp_and_the_loss_take_float32_weights():
    torch.manual_seed(0)
    x, first, second = normal(7, 8, dtype=torch.bfloat16), normal(16, 8), normal(8, 16)
    bias, last, head = normal(16), normal(8), normal(11, 8)
    targets = torch.randint(10, (7,), device=DEVICE)

    def of(*weights):
        first, second, last, head = weights
        return linear_cross_entropy(mlp(x, first, bias, second, last), head, targets, 10)

    given = (first, second, last, head)
    found = torch.autograd.grad(of(*given), given)
    wanted = torch.autograd.grad(of(*(t.bfloat16() for t in given)), given)
    assert {t.dtype for t in found} == {torch.float32}
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_a_wide_product_is_not_rounded_in_between(dtype):
    a, b = (torch.randn(64, 4096, device="cuda").to(dtype) for _ in range(2))
    wanted = a.double() @ b.double().T
    wide, narrow = (wide_product(a, b.T, t).double() for t in (torch.float32, dtype))
    assert (wide - wanted).norm() < 0.05 * (narrow - wanted).norm()
