"""The fast path computes what the models of chapters 5 and 6 compute."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lib.bench.yardstick.replicas import RowViT, train_step
from lib.fast.attention.flash import ROLES_TABLE, TABLE, Tiles
from lib.fast.attention.flash_hopper import Roles
from lib.fast.models import (
    ATTENTIONS,
    Path,
    capture,
    gpt2_loss,
    prepare_images,
    short_gelu,
    vit_block,
    vit_logits,
    vit_loss,
)
from lib.fast.parts import loss_hopper
from lib.fast.parts.loss import linear_cross_entropy
from lib.given.data.record import load
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.vit import ViTConfig
from lib.ranks import pool
from solutions.gpt2 import GPT2
from solutions.low_precision import Float8Linear
from solutions.vit import VisionTransformer
from tests.house.bench import yardstick_programs
from tests.house.fast.comparing import SMALL_VIT


def gradients(loss, model):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("padded", [None, 40])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kernels", [False, True])
def test_gpt2_has_the_loss_and_the_gradients_of_the_plain_model(padded, attention, kernels):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=33, context_len=9, dim=16, n_layers=2, n_heads=2, padded_vocab_size=padded)
    model = GPT2(config)
    tokens = torch.randint(33, (3, 8))
    plain = model(tokens[:, :-1], tokens[:, 1:])[1]
    path = Path(attention=attention, loss_kernel=kernels, kernels=kernels)
    fast = gpt2_loss(model, tokens[:, :-1], tokens[:, 1:], path)
    torch.testing.assert_close(fast, plain)
    torch.testing.assert_close(gradients(fast, model), gradients(plain, model), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_float8_layer_in_a_block_is_called(kernels):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=33, context_len=9, dim=16, n_layers=1, n_heads=2)
    model, tokens, called = GPT2(config), torch.randint(33, (2, 9)), []
    before = gpt2_loss(model, tokens[:, :-1], tokens[:, 1:], Path())
    block = model.h[0]
    for owner, name in ((block.attn, "c_attn"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
        setattr(owner, name, Float8Linear(getattr(owner, name), "dynamic"))
        getattr(owner, name).register_forward_hook(lambda *_, name=name: called.append(name))
    fast = gpt2_loss(model, tokens[:, :-1], tokens[:, 1:], Path(kernels=kernels))
    assert called == ["c_attn", "c_fc", "c_proj"]
    assert fast != before, "eight bits round"
    torch.testing.assert_close(fast, model(tokens[:, :-1], tokens[:, 1:])[1])


@pytest.mark.parametrize("pooling", ["token", "mean"])
@pytest.mark.parametrize("gelu", ["exact", "tanh"])
@pytest.mark.parametrize(("alone", "short"), [(True, False), (False, True)])
def test_vit_has_the_logits_and_the_gradients_of_the_plain_model(pooling, gelu, alone, short):
    torch.manual_seed(0)
    model = VisionTransformer(ViTConfig(**SMALL_VIT, pooling=pooling, gelu=gelu))
    images, labels = torch.randn(3, 3, 8, 8), torch.randint(5, (3,))
    plain, fast = model(images), vit_logits(model, images, Path(class_token_alone=alone, short_gelu=short))
    torch.testing.assert_close(fast, plain, atol=2e-6, rtol=1e-4)
    found, wanted = (gradients(F.cross_entropy(x, labels), model) for x in (fast, plain))
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-4)


def test_bf16_is_near_and_its_stream_may_stay_float32():
    torch.manual_seed(0)
    model = VisionTransformer(ViTConfig(**SMALL_VIT))
    images = torch.randn(2, 3, 8, 8)
    for stream in (None, torch.float32):
        fast = vit_logits(model, images, Path(dtype=torch.bfloat16, stream=stream))
        assert fast.dtype == torch.float32
        torch.testing.assert_close(fast, model(images), atol=0.03, rtol=0.03)


def test_the_loss_kernel_scales_its_gradient_and_gives_padding_none():
    torch.manual_seed(0)
    rows, weight = torch.randn(6, 8, requires_grad=True), torch.randn(12, 8, requires_grad=True)
    targets = torch.tensor([0, 9, 3, 3, 1, 9])
    found = torch.autograd.grad(linear_cross_entropy(rows, weight, targets, 10) / 2, (rows, weight))
    wanted = torch.autograd.grad(F.cross_entropy((rows @ weight.T)[:, :10], targets) / 2, (rows, weight))
    torch.testing.assert_close(found, wanted)
    assert found[1][10:].abs().max() == 0.0


@pytest.mark.parametrize("largest", [1.0, 30.0])
def test_loss_and_gradient_follow_from_powers_of_logits_less_the_targets(largest):
    torch.manual_seed(0)
    rows, weight, targets = largest * torch.randn(37, 24), torch.randn(136, 24), torch.randint(131, (37,))
    own = loss_hopper.launch_own_logits(rows, weight, targets)
    logits = (rows.double() @ weight.double().T)[:, :131].requires_grad_()
    wanted_own = logits.gather(1, targets[:, None])[:, 0] * math.log2(math.e)
    torch.testing.assert_close(own.double(), wanted_own, rtol=1e-5, atol=1e-4)
    bits = logits.detach() * math.log2(math.e) - own[:, None]  # what `powers_kernel` does
    powers = F.pad(bits.clamp(max=loss_hopper.MOST_BITS).exp2().float().scatter(1, targets[:, None], 0.0), (0, 5))
    losses, scales = loss_hopper.finish(powers.view(37, 2, 68).sum(2).T.contiguous(), own, targets, powers)
    wanted = F.cross_entropy(logits, targets, reduction="none")
    near = wanted < math.log(2) * loss_hopper.MOST_BITS  # a loss of more than 61 nats counts as about so many
    assert near.all() == (largest == 1.0)
    torch.testing.assert_close(losses.double()[near], wanted[near], atol=1e-5, rtol=1e-5)
    assert losses[~near].isfinite().all()
    (gradient,) = torch.autograd.grad(wanted.mean(), logits)
    found = (powers * scales[:, None]).double()[:, :131]
    torch.testing.assert_close(found[near], gradient[near], atol=1e-7, rtol=1e-4)


def test_a_target_without_a_number_has_no_loss():
    sums, own = torch.ones(2, 3), torch.tensor([1.0, math.nan, math.inf])
    losses, _ = loss_hopper.finish(sums, own, torch.arange(3), torch.zeros(3, 8))
    assert losses.isfinite().tolist() == [True, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize(("n_rows", "n_columns", "n_vocab"), [(700, 5120, 5001), (4096, 50_304, 50_257)])
def test_on_a_gpu_the_loss_inside_of_a_product_is_near_float32_and_always_the_same(n_rows, n_columns, n_vocab):
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(n_rows, 768, device="cuda", generator=generator).bfloat16()
    weight = (0.1 * torch.randn(n_columns, 768, device="cuda", generator=generator)).bfloat16()
    targets = torch.randint(n_vocab, (n_rows,), device="cuda", generator=generator)
    targets[0] = n_vocab - 1
    if not loss_hopper.fits(rows, weight):
        pytest.skip("the kernel is for a Hopper GPU, by a version of Triton with which it was tried")
    losses, powers, scales = loss_hopper.launch_loss(rows, weight, targets, n_vocab)
    assert torch.equal(powers, loss_hopper.launch_loss(rows, weight, targets, n_vocab)[1])
    exact = (rows.double() @ weight.double().T)[:, :n_vocab].requires_grad_()
    wanted = F.cross_entropy(exact, targets, reduction="none")
    torch.testing.assert_close(losses.double(), wanted, atol=1e-4, rtol=1e-4)
    (wanted_gradient,) = torch.autograd.grad(wanted.mean(), exact)
    found = powers.double() * scales[:, None]
    torch.testing.assert_close(found[:, :n_vocab], wanted_gradient, atol=1e-9, rtol=2**-7)
    assert not powers[:, n_vocab:].any()


def test_an_attention_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="flush"):
        Path(attention="flush")


def test_pictures_are_resized_and_normalised():
    pictures = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = torch.tensor((0.485, 0.456, 0.406))[:, None, None], torch.tensor((0.229, 0.224, 0.225))[:, None, None]
    large = F.interpolate(pictures / 255.0, size=(64, 64), mode="bilinear", align_corners=False)
    torch.testing.assert_close(prepare_images(pictures, 64), (large - mean) / std)


def test_the_short_gelu_is_the_exact_one():
    x = torch.linspace(-9, 9, 4001, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    found, wanted = short_gelu(x), F.gelu(wide)
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=0)
    slopes = [torch.autograd.grad(y.sum(), at)[0].double() for y, at in ((found, x), (wanted, wide))]
    torch.testing.assert_close(*slopes, atol=1e-6, rtol=0)
    narrow = x.detach().bfloat16()
    assert short_gelu(narrow).dtype == torch.bfloat16
    torch.testing.assert_close(short_gelu(narrow), F.gelu(narrow))


@pytest.mark.parametrize(("n_blocks", "n_parts"), [(1, 6), (2, 4), (3, 3), (9, 2)])
def test_a_model_in_parts_has_the_gradients_of_the_whole(n_blocks, n_parts):
    torch.manual_seed(0)
    model = VisionTransformer(yardstick_programs.CONFIG)
    images, labels = yardstick_programs.batch()
    plain = F.cross_entropy(model(images), labels)
    wanted, values = gradients(plain, model), {n: p.detach().clone() for n, p in model.named_parameters()}
    compilations = []

    def compiled(run):
        compilations.append(run)
        return run

    parts = RowViT(model, yardstick_programs.PATH, n_blocks, compiled)
    assert len(parts.parts) == n_parts
    assert len(compilations) == min(n_parts, 3), "equal parts share one function"
    loss = parts(images, labels)
    loss.backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(parts.named_gradients(), wanted, atol=2e-6, rtol=1e-4)
    assert parts.named_values().keys() == values.keys()
    torch.testing.assert_close(parts.named_values(), values, atol=0, rtol=0)


def test_rows_cast_before_they_are_cut_change_no_bit():
    torch.manual_seed(0)
    model, path = VisionTransformer(yardstick_programs.CONFIG), Path(dtype=torch.bfloat16)
    batch = yardstick_programs.batch()
    whole = vit_loss(model, *batch, path=path)
    wanted = gradients(whole, model)
    parts: Any = RowViT(model, path, 2)
    seen: list[Any] = []
    for part in parts.parts:
        part.run = lambda pieces, *inputs, run=part.run: seen.extend(pieces) or run(pieces, *inputs)
    loss = parts(*batch)
    loss.backward()
    matrices = {piece.dtype for piece in seen if piece.ndim in (2, 4)}  # the patches' projection has four dimensions
    assert (matrices, {piece.dtype for piece in seen if piece.ndim in (1, 3)}) == ({torch.bfloat16}, {torch.float32})
    torch.testing.assert_close(loss, whole, atol=0, rtol=0)
    torch.testing.assert_close(parts.named_gradients(), wanted, atol=0, rtol=0)


def test_a_part_of_no_blocks_is_refused():
    with pytest.raises(ValueError, match="n_blocks = 0"):
        RowViT(VisionTransformer(yardstick_programs.CONFIG), yardstick_programs.PATH, 0)


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("strategy", ["data", "sharded", "sharded, bf16"])
def test_parts_on_two_ranks_train_as_one_process_does(strategy):
    in_bf16 = strategy == "sharded, bf16"  # where weights change by 0.4
    rel, atol, rtol = (1e-2, 0.02, 0) if in_bf16 else (1e-5, 2e-6, 1e-4)
    losses, values = yardstick_programs.train_alone(yardstick_programs.IN_BF16 if in_bf16 else yardstick_programs.PATH)
    result = pool("gloo").run(yardstick_programs.train_on_ranks, strategy, n_ranks=2, time_limit_s=40)
    for found_losses, found in result.values:
        assert found_losses == pytest.approx(losses, rel=rel)
        torch.testing.assert_close(found, values, atol=atol, rtol=rtol)
    if strategy == "data":  # three steps of a mean for each of the six rows, and of the loss
        assert sum(record.op == "all_reduce" for record in result.ledgers[0].records) == 3 * (6 + 1)


@pytest.mark.gpu
def test_a_recorded_step_of_parts_trains_as_a_plain_one():
    losses = {}
    for recorded in (False, True):
        model = yardstick_programs.parts().to("cuda")
        images, labels = (x.cuda() for x in yardstick_programs.batch())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        plain = train_step(lambda model=model, x=images, y=labels: model(x, y), optimizer)
        first = [plain().item() for _ in range(3)] if not recorded else []
        step = capture(plain, n_warmup=3) if recorded else plain
        losses[recorded] = [*first, *(step().item() for _ in range(4))][-4:]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


@pytest.mark.time_limit(60)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_the_short_gelu_has_the_exact_slopes_when_it_is_traced():
    x = torch.linspace(-9, 9, 4096, requires_grad=True)
    slopes = [torch.autograd.grad(f(x).sum(), x)[0] for f in (torch.compile(short_gelu, backend="eager"), F.gelu)]
    torch.testing.assert_close(*slopes, atol=1e-6, rtol=0)  # torch 2.11 gave zeros for casts without effect


@pytest.mark.parametrize("key", TABLE, ids=str)
def test_the_fast_kernels_take_the_tiles_that_were_quickest(key):
    rows = {(k["kernel"], k["width"], k["causal"]): k["rows"] for k in load("flash_tiles")["results"]["kernels"]}
    for i, kernel in enumerate(("forward", "dQ", "dK/dV")):
        right = [row for row in rows[kernel, *key] if "ms" in row]
        times: dict[Any, float] = {Tiles(**row["tiles"]): row["ms"]["median"] for row in right if "tiles" in row}
        assert times[TABLE[key][i]] <= 1.01 * min(times.values()), (kernel, TABLE[key][i])
        times |= {Roles(**row["roles"]): row["ms"]["median"] for row in right if "roles" in row}
        assert times[ROLES_TABLE[key][i]] <= 1.01 * min(times.values()), (kernel, ROLES_TABLE[key][i])


@pytest.mark.gpu
def test_the_short_gelu_compiled_on_a_gpu_is_the_exact_one():
    x = torch.linspace(-9, 9, 4096, device="cuda", requires_grad=True)
    found = torch.compile(short_gelu)(x)
    torch.testing.assert_close(found, F.gelu(x), atol=1e-6, rtol=0)
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (found, F.gelu(x))]
    torch.testing.assert_close(*slopes, atol=1e-6, rtol=0)


WIDE = {**SMALL_VIT, "image_size": 224, "patch_size": 16, "dim": 1024, "n_heads": 16, "hidden_dim": 1024}
"""Narrow but for what the compiler looks at: 64 images are 12,608 rows of 1024."""


def assert_near(found, wanted):
    """Each gradient for itself: in all as one vector LayerNorm's would not be missed."""
    assert found.keys() == wanted.keys()
    apart = {name: ((found[name] - grad).norm() / grad.norm()).item() for name, grad in wanted.items()}
    for name in [name for name in apart if name.endswith("wk.bias")]:  # softmax does not see it: 0 but for rounding
        apart[name] = (found[name].norm() / wanted[name.replace("wk", "wq")].norm()).item()
    assert {name: error for name, error in apart.items() if not error < 0.05} == {}


@pytest.mark.gpu
@pytest.mark.time_limit(300)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_rows_in_bf16_have_the_gradients_of_plain_float32():
    batch = torch.randn(64, 3, 224, 224, device="cuda"), torch.randint(5, (64,), device="cuda")
    grads = []
    compiled = partial(torch.compile, dynamic=False)
    for path, make in (
        (Path(), lambda run: run),
        (Path(dtype=torch.bfloat16, short_gelu=True), compiled),
        (Path(dtype=torch.bfloat16, stream=torch.float32, short_gelu=True), compiled),
        (Path(dtype=torch.bfloat16, kernels=True), compiled),
    ):
        torch.manual_seed(0)
        parts = RowViT(VisionTransformer(ViTConfig(**WIDE)), path, 1, make).to("cuda")
        parts(*batch).backward()
        grads.append(parts.named_gradients())
    for found in grads[1:]:
        assert_near(found, grads[0])


@pytest.mark.gpu
@pytest.mark.time_limit(300)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_block_with_parameters_of_its_own_has_the_gradients_of_plain_float32():
    torch.manual_seed(0)
    block = VisionTransformer(ViTConfig(**WIDE)).blocks[0].to("cuda")
    x, d_out = torch.randn(2, 64, 197, 1024, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(vit_block, dynamic=False)
    grads = []
    for compute, path in ((vit_block, Path()), (compiled, Path(dtype=torch.bfloat16))):
        block.zero_grad()
        compute(block, x.to(path.dtype), path).backward(d_out.to(path.dtype))
        grads.append({name: parameter.grad.clone() for name, parameter in block.named_parameters()})
    assert_near(grads[1], grads[0])
