"""The GELU with its bias: the kernels, interpreted where there is no GPU, and what stands for them there."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lib.fast.models import Path, vit_logits
from lib.fast.parts.gelu import Tiles, bias_gelu, launch_backward, launch_forward
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON
from lib.given.models.vit import ViTConfig
from solutions.vit import VisionTransformer
from tests.house.fast.comparing import SMALL_VIT

SMALL = Tiles(4, 32, 3, 4)
HALF_UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
WHY = "kernels are compiled here; the interpreter runs them where there is no GPU" if HAS_TRITON else NO_TRITON
needs_interpreter = pytest.mark.skipif(not (HAS_TRITON and INTERPRETED), reason=WHY)


def normal(*shape, dtype=torch.float32, seed=0, scale=2.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def batch(*shape, dtype=torch.float32, bias_dtype=torch.float32):
    """Rows, a bias and the gradient of what comes out."""
    x, d_out = (normal(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
    return x, normal(shape[-1], dtype=bias_dtype, seed=2), d_out


def exact(x, bias, d_out, approximate="none"):
    """Result and gradients by PyTorch in float64."""
    x, bias = (tensor.detach().double().requires_grad_() for tensor in (x, bias))
    out = F.gelu(x + bias, approximate=approximate)
    return out.detach(), *torch.autograd.grad(out, (x, bias), d_out.double())


def by_operator(x, bias, d_out, approximate="none", function=bias_gelu):
    x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
    out = function(x, bias, approximate)
    return out.detach(), *torch.autograd.grad(out, (x, bias), d_out)


def by_kernels(x, bias, d_out, approximate="none", tiles=SMALL):
    return launch_forward(x, bias, approximate, tiles), *launch_backward(x, bias, d_out, approximate, tiles)


def assert_exact(found, x, bias, d_out, approximate="none"):
    """Rounded once to its dtype, and 1e-6 away before; a sum of that many terms, as many times as far."""
    n_rows = x.numel() // max(1, x.shape[-1])
    room = 1e-6 * max(1.0, d_out.double().abs().max().item() if d_out.numel() else 0.0)
    for got, want, n_terms in zip(found, exact(x, bias, d_out, approximate), (1, 1, max(1, n_rows)), strict=True):
        rounding = 2 * HALF_UNIT[got.dtype]  # twice: the interpreter cuts bfloat16 off
        torch.testing.assert_close(got.double(), want, atol=room * n_terms, rtol=rounding)


FORMS = ("none", "tanh")
WAYS = [by_operator, pytest.param(by_kernels, marks=needs_interpreter)]


@pytest.mark.parametrize("compute", WAYS)
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", HALF_UNIT)
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_result_and_gradients_have_the_dtypes_of_what_they_belong_to(compute, approximate, dtype, bias_dtype):
    x, bias, d_out = batch(2, 7, 37, dtype=dtype, bias_dtype=bias_dtype)
    found = compute(x, bias, d_out, approximate)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in (x, x, bias)]
    assert_exact(found, x, bias, d_out, approximate)


@pytest.mark.parametrize("compute", WAYS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 33), (13, 32), (2, 3, 4, 31), (0, 8), (3, 0)], ids=str)
def test_rows_and_columns_need_not_fill_tiles(compute, shape):
    inputs = batch(*shape)
    assert_exact(compute(*inputs), *inputs)


@pytest.mark.parametrize("compute", WAYS)
def test_rows_may_lie_in_any_order(compute):
    x, bias, d_out = batch(6, 34)
    found = compute(x.T.contiguous().T, bias.repeat_interleave(2)[::2], d_out[:1].expand(6, 34))
    assert found[0].is_contiguous()
    assert found[1].is_contiguous()
    assert_exact(found, x, bias, d_out[:1].expand(6, 34))


@pytest.mark.parametrize("compute", WAYS)
@pytest.mark.parametrize("approximate", FORMS)
def test_far_from_zero_it_is_the_number_itself_or_nothing(compute, approximate):
    far = torch.tensor([[30.0, -30.0, 1e4, -1e4, 1e18, -1e18, 0.0, -0.0]])
    out, dx, d_bias = compute(far, torch.zeros(8), torch.ones(1, 8), approximate)
    torch.testing.assert_close(out, far.clamp(min=0), atol=0, rtol=0)
    torch.testing.assert_close(dx, torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.5, 0.5]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(d_bias, dx[0], atol=0, rtol=0)


@pytest.mark.parametrize("compute", WAYS)
@pytest.mark.parametrize("approximate", FORMS)
def test_it_is_as_near_as_float32_gets_everywhere(compute, approximate):
    x = torch.linspace(-9, 9, 1024).view(32, 32)
    inputs = x, torch.zeros(32), torch.ones(32, 32), approximate
    assert_exact(compute(*inputs), *inputs)


@pytest.mark.parametrize("compute", WAYS)
def test_the_same_numbers_give_the_same_bits(compute):
    inputs = batch(50, 40)
    for first, second in zip(compute(*inputs), compute(*inputs), strict=True):
        torch.testing.assert_close(first, second, atol=0, rtol=0)


@needs_interpreter
@pytest.mark.parametrize("tiles", [Tiles(8, 16, 1, 4), Tiles(2, 64, 7, 4, 3)], ids=str)
def test_how_the_kernels_are_cut_changes_nothing_but_rounding(tiles):
    inputs = batch(29, 50)
    assert_exact(by_kernels(*inputs, tiles=tiles), *inputs)


@pytest.mark.parametrize(
    ("x", "bias", "says"),
    [
        (torch.zeros(2, 3), torch.zeros(4), r"bias \(4,\)"),
        (torch.zeros(2, 3), torch.zeros(1, 3), r"bias \(1, 3\)"),
        (torch.zeros(3), torch.zeros(3), r"x \(3,\)"),
        (torch.zeros(2, 3).double(), torch.zeros(3), "x is torch.float64"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), "bias is torch.int64"),
    ],
    ids=["too long", "two axes", "no rows", "x float64", "bias int64"],
)
def test_what_does_not_fit_is_refused(x, bias, says):
    with pytest.raises(ValueError, match=says):
        bias_gelu(x, bias)


def test_another_form_is_refused():
    with pytest.raises(ValueError, match="'sigmoid'"):
        bias_gelu(torch.zeros(2, 3), torch.zeros(3), "sigmoid")


@pytest.mark.time_limit(60)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traced_it_gives_the_same(dtype):
    inputs = batch(6, 10, dtype=dtype)
    traced = torch.compile(lambda *given: bias_gelu(*given), backend="aot_eager")
    for found, wanted in zip(by_operator(*inputs, function=traced), by_operator(*inputs), strict=True):
        torch.testing.assert_close(found, wanted, atol=0, rtol=0)


@pytest.mark.time_limit(60)
@pytest.mark.filterwarnings("ignore")
def test_pytorch_finds_nothing_wrong_with_the_operators():
    x, bias, d_out = batch(5, 6)
    args = x.requires_grad_(), bias.requires_grad_(), "tanh"
    torch.library.opcheck(torch.ops.scaling_workbook.bias_gelu, args)
    inner = (x.detach(), bias.detach(), d_out, "tanh")
    torch.library.opcheck(
        torch.ops.scaling_workbook.bias_gelu_backward, inner, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("gelu", ["exact", "tanh"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_vit_on_this_path_has_the_logits_and_the_gradients_of_the_plain_model(gelu, alone):
    torch.manual_seed(0)
    model = VisionTransformer(ViTConfig(**SMALL_VIT, gelu=gelu))
    images, labels, results = torch.randn(3, 3, 8, 8), torch.randint(5, (3,)), []
    for logits in (model(images), vit_logits(model, images, Path(class_token_alone=alone, kernels=True))):
        model.zero_grad()
        F.cross_entropy(logits, labels).backward()
        results.append((logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[1], results[0], atol=2e-6, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.time_limit(120)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("shape", [(50_432, 4096), (257, 1000), (33, 77)], ids=str)
def test_compiled_on_a_gpu_it_is_as_near_as_pytorchs(shape, approximate):
    x, bias, d_out = (t.cuda() for t in batch(*shape, dtype=torch.bfloat16))
    ours = torch.compile(bias_gelu, dynamic=False)
    found = by_operator(x, bias, d_out, approximate, ours)
    for first, second in zip(found, by_operator(x, bias, d_out, approximate, ours), strict=True):
        assert torch.equal(first, second)

    def torchs(x, bias, approximate):
        return F.gelu(x.float() + bias, approximate=approximate).to(x.dtype)

    theirs = by_operator(x, bias, d_out, approximate, torchs)
    for got, other, want in zip(found, theirs, exact(x, bias, d_out, approximate), strict=True):
        errors = [((t.double() - want).norm() / want.norm()).item() for t in (got, other)]
        assert errors[0] <= 1.1 * errors[1] + 1e-6, errors
        assert got.isfinite().all()
