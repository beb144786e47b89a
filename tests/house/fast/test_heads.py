"""Queries, keys and values from one product, and their gradients back into one."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lib.fast.attention.heads import join_heads, launch_join, split_heads
from lib.fast.models import Path, vit_loss
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, NO_TRITON
from lib.given.models.vit import ViTConfig
from solutions.vit import VisionTransformer

WHY = "kernels are compiled here; the interpreter runs them where there is no GPU" if HAS_TRITON else NO_TRITON
needs_interpreter = pytest.mark.skipif(not (HAS_TRITON and INTERPRETED), reason=WHY)
WAYS = [join_heads, pytest.param(launch_join, marks=needs_interpreter)]


def three(*shape, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3)]


def expect_joined(join, given):
    joined, sums = join(*given)
    want = torch.cat([x.flatten(-2) for x in given], dim=-1)
    assert torch.equal(joined, want)
    torch.testing.assert_close(sums, want.double().flatten(0, -2).sum(0).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("join", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 3, 2, 8), (1, 1, 1, 1), (150, 3, 100), (3, 70, 4, 88)])
def test_three_stand_side_by_side_with_their_sums(join, shape, dtype):
    expect_joined(join, three(*shape, dtype=dtype))


@pytest.mark.parametrize("join", WAYS)
def test_no_rows_have_sums_of_zero(join):
    joined, sums = join(*three(0, 2, 4))
    assert joined.shape == (0, 24)
    assert torch.equal(sums, torch.zeros(24))


def test_gradients_are_those_of_a_product_with_its_bias():
    x, weight, bias = three(5, 7, 12)[0], three(24, 12)[0], three(24)[0]

    def gradients(split):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        q, k, v = split(*leaves)
        return torch.autograd.grad((q * k.sin() + v.square()).sum(), leaves)

    def plainly(x, weight, bias):
        return F.linear(x, weight, bias).unflatten(-1, (3, 2, 4)).unbind(-3)

    ours = gradients(lambda x, w, b: split_heads(F.linear(x, w, b.detach()), b, 2))
    for got, want in zip(ours, gradients(plainly), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("shape", "n_heads"), [((4, 10), 2), ((12,), 2), ((4, 12), 0)])
def test_another_shape_is_refused(shape, n_heads):
    with pytest.raises(ValueError, match=rf"for H = {n_heads}"):
        split_heads(torch.zeros(shape), torch.zeros(shape[-1]), n_heads)


@pytest.mark.time_limit(60)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_vit_has_the_gradients_that_it_has_without(backend):
    config = ViTConfig(image_size=8, patch_size=4, n_classes=3, dim=16, n_layers=2, n_heads=2, hidden_dim=32)
    torch.manual_seed(0)
    model = VisionTransformer(config)
    batch = torch.randn(2, 3, 8, 8), torch.tensor([0, 2])

    def gradients(path):
        run = vit_loss if backend is None else torch.compile(vit_loss, backend=backend)
        return torch.autograd.grad(run(model, *batch, path), list(model.parameters()))

    for got, want in zip(gradients(Path(kernels=True)), gradients(Path()), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_compiled_three_stand_side_by_side_with_their_sums():
    for shape in ((256, 197, 16, 64), (3, 77, 5, 88)):
        expect_joined(launch_join, three(*shape, dtype=torch.bfloat16, device="cuda"))
        again = [launch_join(*three(*shape, dtype=torch.bfloat16, device="cuda"))[1] for _ in range(2)]
        assert torch.equal(*again)
