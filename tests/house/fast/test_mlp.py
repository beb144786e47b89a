"""The MLP with its GELU inside the products: what stands for the kernels without a Hopper GPU,
and on one the kernels.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lib.fast import models
from lib.fast.models import Path, gpt2_loss, vit_logits
from lib.fast.parts import mlp as fast
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.vit import ViTConfig
from solutions.gpt2 import GPT2
from solutions.vit import VisionTransformer
from tests.house.fast.comparing import SMALL_VIT

FORMS = ("none", "tanh")
CASES = {"ViT-L/16": (50_432, 1024, 4096), "GPT-2": (16_384, 768, 3072), "ragged": (4_105, 648, 1_048)}


def batch(n_rows, width, inner, out, dtype=torch.float32, bias_dtype=torch.float32, device="cpu"):
    """Rows, two layers, and the gradient of what comes out."""

    def normal(*shape, scale=1.0):
        return torch.randn(shape, generator=generator, device=device) * scale

    generator = torch.Generator(device).manual_seed(0)
    x, grad = normal(n_rows, width, scale=2.0).to(dtype), normal(n_rows, out).to(dtype)
    first, second = normal(inner, width, scale=width**-0.5).to(dtype), normal(out, inner, scale=inner**-0.5).to(dtype)
    return (x, first, normal(inner).to(bias_dtype), second, normal(out).to(dtype)), grad


def differences(a, b):
    """Where equal numbers differ: how many, the first and the last place, and the largest difference."""
    places = (a != b).nonzero().tolist()
    return len(places), places[0], places[-1], (a.float() - b.float()).abs().max().item()


def with_gradients(function, inputs, grad, approximate):
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*inputs, approximate)
    return out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))


def plain(x, first, bias, second, last, approximate):
    return F.gelu(x @ first.T + bias, approximate=approximate) @ second.T + last


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_result_and_gradients_are_those_of_three_operators(approximate, bias_dtype):
    inputs, grad = batch(37, 24, 40, 16, bias_dtype=bias_dtype)
    found = with_gradients(fast.mlp, inputs, grad, approximate)
    wanted = with_gradients(plain, [x.double() for x in inputs], grad, approximate)
    assert [t.dtype for t in found] == [torch.float32] * 3 + [bias_dtype, torch.float32, torch.float32]
    for got, want in zip(found, wanted, strict=True):
        rtol = 2**-8 if got.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=rtol)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([(5, 8), (16, 9), (16,), (8, 16)], r"first \(16, 9\)"),
        ([(5, 8), (16, 8), (15,), (8, 16)], r"bias \(15,\)"),
        ([(5, 8), (16, 8), (16,), (16, 8)], r"second \(16, 8\)"),
        ([(2, 5, 8), (16, 8), (16,), (8, 16)], r"x \(2, 5, 8\)"),
    ],
    ids=["first", "bias", "second", "three axes"],
)
def test_shapes_that_do_not_fit_are_refused(shapes, says):
    x, first, bias, second = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=says):
        fast.mlp(x, first, bias, second)


def test_other_dtypes_and_forms_are_refused():
    (x, first, bias, second, last), _ = batch(3, 8, 16, 8)
    with pytest.raises(ValueError, match=r"second torch\.bfloat16"):
        fast.mlp(x, first, bias, second.bfloat16())
    with pytest.raises(ValueError, match=r"x is torch\.int64"):
        fast.mlp(x.long(), first.long(), bias, second.long())
    with pytest.raises(ValueError, match="'sigmoid'"):
        fast.mlp(x, first, bias, second, last, "sigmoid")
    with pytest.raises(ValueError, match=r"last torch\.bfloat16"):
        fast.mlp(x, first, bias, second, last.bfloat16())
    with pytest.raises(ValueError, match=r"last \(7,\)"):
        fast.mlp(x, first, bias, second, last[:7])


def test_without_a_hopper_gpu_nothing_fits():
    assert not fast.fits(torch.zeros(4096, 768, dtype=torch.bfloat16), 3072)


@pytest.mark.time_limit(60)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_pytorch_finds_nothing_wrong_with_the_operators_and_traced_they_give_the_same():
    inputs, grad = batch(6, 8, 16, 8)
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.scaling_workbook.gelu_and_slope, (*inputs[:3], "tanh"), test_utils=kinds)
    slope = torch.rand(6, 16)
    torch.library.opcheck(torch.ops.scaling_workbook.times_slope, (grad, inputs[3], slope), test_utils=kinds)
    traced = torch.compile(lambda *given: fast.mlp(*given), backend="aot_eager")
    pairs = zip(*(with_gradients(run, inputs, grad, "tanh") for run in (traced, fast.mlp)), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, atol=0, rtol=0)


def small_gpt2():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=11, context_len=8, dim=16, n_layers=2, n_heads=2))
    tokens = torch.randint(11, (3, 9))
    return model, lambda path: gpt2_loss(model, tokens[:, :-1], tokens[:, 1:], path)


def small_vit():
    torch.manual_seed(0)
    model = VisionTransformer(ViTConfig(**SMALL_VIT))
    images, labels = torch.randn(3, 3, 8, 8), torch.randint(5, (3,))
    return model, lambda path: F.cross_entropy(vit_logits(model, images, path), labels)


@pytest.mark.parametrize("make", [small_gpt2, small_vit])
def test_a_model_on_this_path_has_the_loss_and_the_gradients_of_the_other_path(make, monkeypatch):
    model, loss_of = make()
    calls, results = [], []
    operator = fast.gelu_and_slope_op
    monkeypatch.setattr(fast, "gelu_and_slope_op", lambda *given: calls.append(given[-1]) or operator(*given))
    for takes in (True, False):
        monkeypatch.setattr(models, "fits", lambda *_, takes=takes: takes)
        model.zero_grad()
        loss = loss_of(Path(kernels=True))
        loss.backward()
        results.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        assert len(calls) == 2  # one for each block, all of them by the first path
    torch.testing.assert_close(results[0], results[1], atol=2e-6, rtol=1e-4)


def on_gpu(name, approximate, dtype=torch.bfloat16):
    n_rows, width, inner = CASES[name]
    return batch(n_rows, width, inner, width, dtype, device="cuda"), approximate


@pytest.mark.gpu
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "approximate"), [("ViT-L/16", "none"), ("GPT-2", "tanh"), ("ragged", "tanh")])
def test_on_a_gpu_they_are_as_near_as_pytorchs_and_always_the_same(name, approximate, dtype):
    (inputs, grad), approximate = on_gpu(name, approximate, dtype)
    if not fast.fits(inputs[0], len(inputs[1])):
        pytest.skip("the kernels are for a Hopper GPU, by a version of Triton with which they were tried")
    found = with_gradients(fast.mlp, inputs, grad, approximate)
    again = with_gradients(fast.mlp, inputs, grad, approximate)
    names = ("result", "x", "first", "bias", "second", "last")
    apart = {
        name: differences(*pair) for name, *pair in zip(names, found, again, strict=True) if not torch.equal(*pair)
    }
    assert apart == {}
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = with_gradients(plain, [x.float() for x in inputs], grad, approximate)
    bias_in_16 = [x.to(dtype) for x in inputs]
    theirs = with_gradients(plain, bias_in_16, grad, approximate)
    for got, other, want in zip(found, theirs, exact, strict=True):
        errors = [((t.float() - want).norm() / want.norm()).item() for t in (got, other)]
        assert errors[0] <= 1.1 * errors[1] + 1e-6, errors
        assert got.isfinite().all()


@pytest.mark.gpu
@pytest.mark.time_limit(120)
@pytest.mark.filterwarnings("ignore")
def test_compiled_a_gpt2_takes_them_and_has_the_gradients_of_float32():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=512, context_len=512, dim=512, n_layers=2, n_heads=8)).cuda()
    if not fast.fits(torch.zeros(8 * 512, 512, dtype=torch.bfloat16, device="cuda"), 2048):
        pytest.skip("the kernels are for a Hopper GPU, by a version of Triton with which they were tried")
    tokens = torch.randint(512, (8, 513), device="cuda")
    found = []
    for path in (Path(dtype=torch.bfloat16, kernels=True), Path()):
        model.zero_grad()
        torch.compile(gpt2_loss, dynamic=False)(model, tokens[:, :-1], tokens[:, 1:], path).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, wanted in found[1].items():
        error = (found[0][name] - wanted).norm() / wanted.norm()
        assert error < 0.03, (name, error.item())
