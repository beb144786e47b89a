"""A norm and the bias of a branch's last product: gradients from one kernel."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lib.fast.models import Path, add_branch, gpt2_loss, vit_loss
from lib.fast.parts.norms import fits, launch_backward, norm_and_bias, norm_and_bias_backward
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.vit import ViTConfig
from solutions.gpt2 import GPT2
from solutions.vit import VisionTransformer
from tests.house.fast.comparing import SMALL_VIT

WHY = "kernels are compiled here; the interpreter runs them where there is no GPU" if HAS_TRITON else NO_TRITON
needs_interpreter = pytest.mark.skipif(not (HAS_TRITON and INTERPRETED), reason=WHY)
WAYS = [norm_and_bias_backward, pytest.param(launch_backward, marks=needs_interpreter)]


def given(*shape, dtype=torch.float32, device="cpu"):
    """A stream; the norm's weight and bias, and a later bias; and the gradients of both results."""
    generator = torch.Generator().manual_seed(0)
    x, *above = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    return x, [torch.randn(shape[-1], generator=generator).to(device) for _ in range(3)], above


def gradients(function, leaves, above):
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    results = function(*leaves)
    return results, torch.autograd.grad(results, leaves, [a.to(r.dtype) for a, r in zip(above, results, strict=True)])


def plain(x, weight, shift, bias):
    return x + bias, F.layer_norm(x, (x.shape[-1],), weight, shift, 1e-5)


def ours(x, weight, shift, bias):
    layer = torch.nn.LayerNorm(x.shape[-1], device="meta")
    del layer.weight, layer.bias
    layer.weight, layer.bias = weight, shift
    stream, normed = norm_and_bias(x, layer, bias)
    return (stream + bias.detach()).to(x.dtype), normed


@pytest.mark.parametrize("shape", [(2, 3, 8), (5, 40), (1, 1)])
def test_results_and_gradients_are_those_of_operators(shape):
    x, vectors, above = given(*shape)
    found = gradients(ours, [x, *vectors], above)
    wanted = gradients(plain, [t.double() for t in (x, *vectors)], above)
    for got, want in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)


def test_each_gradient_has_the_dtype_of_its_parameter():
    x, (weight, shift, bias), above = given(4, 8)
    leaves = [x.bfloat16(), weight, shift.bfloat16(), bias.double()]
    found, of_leaves = gradients(ours, leaves, above)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16]
    assert [t.dtype for t in of_leaves] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("backward", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 3, 8), (70, 100), (1, 1), (0, 4)])
def test_the_kernel_gives_the_streams_gradient_and_three_sums(backward, dtype, shape):
    stream, (weight, *_), (d_out, d_normed) = given(*shape, dtype=dtype)
    mean, scale = stream.float().mean(-1, keepdim=True), 1 + stream.float().square().mean(-1, keepdim=True)
    dx, sums = backward(stream, mean, scale, weight, d_out, d_normed)
    x, d = (t.double() for t in ((stream.float() - mean) * scale, d_normed))
    g = d * weight
    wanted = d_out + scale * (g - g.mean(-1, keepdim=True) - x * (g * x).mean(-1, keepdim=True))
    torch.testing.assert_close(dx.double(), wanted, atol=1e-4, rtol=2**-7 if dtype == torch.bfloat16 else 1e-4)
    of_vectors = torch.stack([t.flatten(0, -2).sum(0) for t in (d * x, d, d_out.double())])
    torch.testing.assert_close(sums.double(), of_vectors, atol=1e-3, rtol=1e-4)


def small_gpt2():
    model = GPT2(GPT2Config(vocab_size=11, context_len=8, dim=16, n_layers=2, n_heads=2))
    tokens = torch.randint(11, (3, 9))
    return model, lambda path: gpt2_loss(model, tokens[:, :-1], tokens[:, 1:], path)


def small_vit():
    model = VisionTransformer(ViTConfig(**SMALL_VIT))
    images, labels = torch.randn(3, 3, 8, 8), torch.randint(5, (3,))
    return model, lambda path: vit_loss(model, images, labels, path)


@pytest.mark.time_limit(60)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("make", [small_gpt2, small_vit])
def test_a_compiled_model_has_the_gradients_that_it_has_without(make, monkeypatch):
    torch.manual_seed(0)
    model, loss_of = make()
    for parameter in model.parameters():  # biases begin as zeros, which would hide a bias in the wrong place
        torch.nn.init.normal_(parameter, std=0.3)
    calls = []
    monkeypatch.setattr("lib.fast.models.norm_and_bias", lambda *xs: (calls.append(1), norm_and_bias(*xs))[1])
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    wanted = torch.autograd.grad(compiled(Path()), list(model.parameters()))
    assert not calls
    for takes_products in (False, True):  # of lib.fast.parts.mlp
        torch.compiler.reset()
        monkeypatch.setattr("lib.fast.models.fits", lambda *_, takes=takes_products: takes)
        found = torch.autograd.grad(compiled(Path(kernels=True)), list(model.parameters()))
        assert len(calls) >= 3, "a norm for each branch, but for the attention of a class token alone"
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.time_limit(60)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_bias_acts_by_its_size_however_small_it_is_beside_the_stream(device, kernels):
    torch.manual_seed(0)
    layer, out = torch.nn.LayerNorm(64, device=device), torch.nn.Linear(64, 64, device=device)
    bias = 2.0**-12  # in the stream, neighbours in bf16 are 2^-8 apart
    torch.nn.init.constant_(out.bias, bias)
    x, dtype = 0.5 + torch.rand(8, 512, 64, device=device).bfloat16() / 2, torch.bfloat16

    def add(path):
        return add_branch(x, path, layer, out, lambda seen, bias: F.linear(seen, out.weight.to(dtype), bias.to(dtype)))

    backend = "inductor" if device == "cuda" else "aot_eager"  # which may take a bias out of a product
    found = torch.compile(add, backend=backend, fullgraph=True)(Path(dtype=dtype, kernels=kernels))
    product = layer(x.float()).to(dtype).double() @ out.weight.to(dtype).double().T
    assert (found.double() - x.double() - product).mean().item() == pytest.approx(bias, rel=0.1)


class Twice(torch.nn.Module):
    """A layer in the place of another, as an adapter would be."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


@pytest.mark.time_limit(60)
@pytest.mark.filterwarnings("ignore")
def test_a_last_layer_that_was_replaced_or_has_no_bias_is_computed_as_it_is():
    torch.manual_seed(0)
    model, loss_of = small_gpt2()
    first, second = model.h
    first.attn.c_proj, first.mlp.c_proj = Twice(first.attn.c_proj), Twice(first.mlp.c_proj)
    for layer in (second.attn.c_attn, second.attn.c_proj, second.mlp.c_proj):
        layer.bias = None
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(Path(kernels=True)), loss_of(Path()))


@pytest.mark.filterwarnings("ignore")
def test_a_second_derivative_is_refused():
    x, vectors, above = given(3, 8)
    leaves = [t.requires_grad_() for t in (x, *vectors)]
    (first,) = torch.autograd.grad(ours(*leaves), leaves[:1], above, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative"):
        torch.autograd.grad(first.sum(), leaves[:1])


def test_a_stream_with_other_strides_gets_the_gradient_that_the_compiler_expects():
    x, (weight, *_), above = given(5, 8)
    x, *above = (t.t().contiguous().t() for t in (x, *above))
    dx, _ = norm_and_bias_backward(x, torch.zeros(5, 1), torch.ones(5, 1), weight, *above)
    assert dx.is_contiguous()


@pytest.mark.filterwarnings("ignore")
def test_pytorch_finds_nothing_wrong_with_the_operator():
    x, (weight, *_), above = given(3, 8)
    inputs = (x, torch.zeros(3, 1), torch.ones(3, 1), weight, *above)
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.scaling_workbook.norm_and_bias_backward, inputs, test_utils=kinds)


@pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
def test_rows_that_are_too_wide_for_the_kernel_are_known():
    narrow, wide = torch.empty(2, 8192, dtype=torch.bfloat16), torch.empty(2, 8200, dtype=torch.bfloat16)
    assert fits(narrow, narrow)
    assert not fits(narrow, narrow.float())
    assert not fits(wide, narrow)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 1024, 768), (256, 197, 1024), (1000, 100), (33, 8192), (33, 8200)])
def test_on_a_gpu_the_kernel_is_near_operators_and_always_the_same(shape):
    x, (weight, *_), above = given(*shape, dtype=torch.bfloat16, device="cuda")
    inputs = (x, x.float().mean(-1, keepdim=True), x.float().var(-1, keepdim=True).rsqrt(), weight)
    found, again = (norm_and_bias_backward(*inputs, *above) for _ in range(2))
    wanted = norm_and_bias_backward(*(t.cpu() for t in (*inputs, *above)))
    for got, same, want in zip(found, again, wanted, strict=True):
        assert torch.equal(got, same)
        error = (got.cpu().float() - want.float()).norm() / want.float().norm()
        assert error < 2e-3, error.item()
