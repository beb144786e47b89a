"""Float8 with scales of past steps: the cast in both orders, and linear layers beside chapter 20's."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lib.demos.low_precision import replace_linears
from lib.fast import models as fast
from lib.fast.parts.float8 import E4M3, E5M2, DelayedLinear, Scales, cast_both, launch_cast
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.vit import ViTConfig
from lib.gpt2 import GPT2
from lib.vit import VisionTransformer
from solutions.low_precision import Float8Linear, quantize

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # by the thread of the backward pass
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY_GPT2 = GPT2Config(vocab_size=64, context_len=16, dim=32, n_layers=2, n_heads=2)
TINY_VIT = ViTConfig(image_size=28, patch_size=14, dim=32, n_layers=2, n_heads=2, hidden_dim=64)


def matrix(m, k, dtype=torch.bfloat16):
    torch.manual_seed(0)
    x = torch.randn(m, k, device=DEVICE).to(dtype)
    if x.numel() > 3:
        x.view(-1)[:2] = torch.tensor([torch.inf, -torch.inf])
    return x


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [(50, 70), (32, 48), (256, 384), (300, 200), (1, 1), (0, 8)], ids=str)
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [3e-3, 1.7], ids=["saturates", "fits"])
def test_both_orders_are_chapter_20s(shape, dtype, given, size):
    x, scale = matrix(*shape, dtype=given), torch.tensor(size, device=DEVICE)
    rounded, flipped, amax = cast_both(x, scale, dtype)
    expected = quantize(x, scale, dtype)
    assert rounded.view(torch.uint8).equal(expected.view(torch.uint8))
    assert flipped.is_contiguous()
    assert flipped.view(torch.uint8).equal(expected.view(torch.uint8).T)
    finite = x.float().abs()
    assert amax == (finite[finite < torch.inf].max() if x.numel() else 0.0)


@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_a_matrix_without_finite_numbers_has_no_magnitude(what):
    rounded, flipped, amax = cast_both(
        torch.full((130, 140), what, device=DEVICE), torch.tensor(0.5, device=DEVICE), E4M3
    )
    expected = torch.full((130, 140), 448.0 if what == torch.inf else what, device=DEVICE)
    torch.testing.assert_close(rounded.float(), expected, equal_nan=True)
    torch.testing.assert_close(flipped.float(), expected.T, equal_nan=True)
    assert amax == 0


@pytest.mark.skipif(not (HAS_TRITON and INTERPRETED), reason="the interpreter runs the kernels where there is no GPU")
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_the_kernel_divides_by_the_scale_and_stores_both_orders(dtype):
    x, scale = matrix(130, 70), torch.tensor(2e-3)
    x[3, 3], x[64:128] = torch.nan, torch.nan  # one number, and a whole tile
    quotients, flipped, amax = launch_cast(
        x, scale, dtype, torch.float32
    )  # the interpreter rounds to float8 in its own way
    bound = torch.finfo(dtype).max
    torch.testing.assert_close(quotients, (x.float() / scale).clamp(-bound, bound), rtol=1e-6, atol=0, equal_nan=True)
    assert flipped.T.nan_to_num(7.0).equal(quotients.nan_to_num(7.0))
    assert amax == x.float().abs().nan_to_num(0, posinf=0).max()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("columns", [32, 40])
def test_steps_of_a_layer_are_those_of_the_delayed_recipe(bias, columns):
    torch.manual_seed(0)
    linear = nn.Linear(48, columns, bias, device=DEVICE)
    theirs, ours = Float8Linear(copy.deepcopy(linear), "delayed"), DelayedLinear(copy.deepcopy(linear))
    scales = Scales(ours, history=2)
    theirs.past = {name: type(past)(2) for name, past in theirs.past.items()}
    for size in (1.0, 8.0, 0.25, 2.0, 2.0):  # the second step saturates, the fourth has forgotten the first
        x = (size * torch.randn(4, 16, 48, device=DEVICE)).bfloat16().requires_grad_()
        out_grad = size * torch.randn(4, 16, columns, device=DEVICE).bfloat16()
        found = []
        for layer in (theirs, ours):
            y = layer(x)
            y.backward(out_grad)
            found.append((y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())))
            x.grad = None
            layer.zero_grad()
        scales.step()
        for mine, chapters in zip(*found[::-1], strict=True):
            assert mine.dtype == chapters.dtype
            # PyTorch divides by a number on a GPU as it multiplies,
            # so scales differ in their last bit and some numbers are rounded the other way
            assert (mine - chapters).norm() <= 1e-2 * chapters.norm()


@pytest.mark.parametrize("size", [0.0, 1e-43, 1e-37])
def test_scales_of_zeros_and_of_the_smallest_numbers_have_inverses(size):
    layer = DelayedLinear(nn.Linear(16, 16, bias=False, device=DEVICE))
    scales = Scales(layer)
    for _ in range(2):
        y = layer(torch.full((16, 16), size, device=DEVICE))
        y.backward(torch.full_like(y, size))
        scales.step()
        assert layer.scales.isfinite().all()
        assert (1 / layer.scales).isfinite().all()
        assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", ["gpt2", "vit"])
@pytest.mark.parametrize("kernels", [False, True], ids=["operators", "kernels"])
@pytest.mark.time_limit(120)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_model_learns_with_scales_of_past_steps(name, kernels):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = GPT2(TINY_GPT2) if name == "gpt2" else VisionTransformer(TINY_VIT)
        tokens = torch.randint(64, (4, 16))
        batch = (tokens, tokens) if name == "gpt2" else (torch.randn(4, 3, 28, 28), torch.arange(4))
    replace_linears(model, DelayedLinear, skip=("head",))
    path, scales = fast.Path(dtype=torch.bfloat16, kernels=kernels), Scales(model)
    blocks = [*model.get_submodule("h" if name == "gpt2" else "blocks").children()]
    compute = fast.gpt2_block if name == "gpt2" else fast.vit_block
    compute = torch.compile(compute, dynamic=False, fullgraph=True, backend="aot_eager")
    for block in blocks:
        block.forward = partial(compute, block, path=path, **({"n_heads": 2} if name == "gpt2" else {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = (fast.gpt2_loss if name == "gpt2" else fast.vit_loss)(model, *batch, path, call_blocks=True)
        loss.backward()
        optimizer.step()
        scales.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    joined = 0 if name == "gpt2" else 2 * len(blocks)  # keys' and values' layers go with the queries'
    assert sum(layer.known for layer in scales.layers) == len(scales.layers) - joined


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_the_steps_of_a_graph_are_those_without():
    losses = []
    for in_graph in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(DEVICE)
        replace_linears(model, DelayedLinear)
        x, scales = torch.randn(256, 64, device=DEVICE).bfloat16(), Scales(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)

        def step(model=model, x=x, scales=scales, optimizer=optimizer):
            loss = (model(x) - x).float().square().mean()
            loss.backward()
            optimizer.step()
            scales.step()
            optimizer.zero_grad()
            return loss.detach()

        run = fast.capture(step, n_warmup=3) if in_graph else step
        losses.append([run().item() for _ in range(20 if in_graph else 23)])
    assert losses[0][-1] < 0.5 * losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0][3:]), rtol=2e-2, atol=0)


def test_a_step_without_a_backward_pass_of_all_layers_is_refused():
    layers = nn.Sequential(*(DelayedLinear(nn.Linear(16, 16, device=DEVICE)) for _ in range(2)))
    scales = Scales(layers)
    layers(torch.randn(2, 16, device=DEVICE).bfloat16()).sum().backward()
    scales.step()
    with pytest.raises(RuntimeError, match="0 layers have gradients, 2 had them"):
        scales.step()


@pytest.mark.time_limit(60)
@pytest.mark.filterwarnings("ignore")
def test_pytorch_finds_nothing_wrong_with_the_operators():
    one, tests = torch.ones((), device=DEVICE), ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.scaling_workbook.cast_both, (matrix(5, 6), one, E4M3), test_utils=tests)
    a, b = (torch.ones(16, 16, device=DEVICE).to(E4M3) for _ in range(2))
    given = (a, b, one, one, torch.bfloat16, False, torch.ones(16, device=DEVICE))
    torch.library.opcheck(torch.ops.scaling_workbook.product_of_rows, given, test_utils=tests)
