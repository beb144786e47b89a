"""The fast path computes what the models of chapters 5 and 6 compute."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lib.given.fast import ATTENTIONS, Path, gpt2_loss, prepare_images, vit_logits
from lib.given.fast_loss import linear_cross_entropy
from lib.given.gpt2 import GPT2Config
from lib.given.vit import ViTConfig
from solutions.gpt2 import GPT2
from solutions.vit import VisionTransformer

VIT = {"image_size": 8, "patch_size": 4, "n_classes": 5, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}


def gradients(loss, model):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("padded", [None, 40])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("loss_kernel", [False, True])
def test_gpt2_has_the_loss_and_the_gradients_of_the_plain_model(padded, attention, loss_kernel):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=33, context_len=9, dim=16, n_layers=2, n_heads=2, padded_vocab_size=padded)
    model = GPT2(config)
    tokens = torch.randint(33, (3, 8))
    plain = model(tokens[:, :-1], tokens[:, 1:])[1]
    fast = gpt2_loss(model, tokens[:, :-1], tokens[:, 1:], Path(attention=attention, loss_kernel=loss_kernel))
    torch.testing.assert_close(fast, plain)
    torch.testing.assert_close(gradients(fast, model), gradients(plain, model), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("pooling", ["token", "mean"])
@pytest.mark.parametrize("gelu", ["exact", "tanh"])
@pytest.mark.parametrize("alone", [True, False])
def test_vit_has_the_logits_and_the_gradients_of_the_plain_model(pooling, gelu, alone):
    torch.manual_seed(0)
    model = VisionTransformer(ViTConfig(**VIT, pooling=pooling, gelu=gelu))
    images, labels = torch.randn(3, 3, 8, 8), torch.randint(5, (3,))
    plain, fast = model(images), vit_logits(model, images, Path(class_token_alone=alone))
    torch.testing.assert_close(fast, plain, atol=2e-6, rtol=1e-4)
    found, wanted = (gradients(F.cross_entropy(x, labels), model) for x in (fast, plain))
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-4)


def test_bf16_is_near_and_its_stream_may_stay_float32():
    torch.manual_seed(0)
    model = VisionTransformer(ViTConfig(**VIT))
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


def test_an_attention_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="flush"):
        Path(attention="flush")


def test_pictures_are_resized_and_normalised():
    pictures = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = torch.tensor((0.485, 0.456, 0.406))[:, None, None], torch.tensor((0.229, 0.224, 0.225))[:, None, None]
    large = F.interpolate(pictures / 255.0, size=(64, 64), mode="bilinear", align_corners=False)
    torch.testing.assert_close(prepare_images(pictures, 64), (large - mean) / std)
