"""Chapter 15's kernels inside a Transformers Llama, and as operators that PyTorch's compiler understands."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lib.fast import interface, models
from lib.fast.attention import flash
from lib.fast.attention.blocks import block_backward, block_forward
from lib.fast.attention.flash import (
    flash_attention_fast,
    flash_attention_joined,
    forward_operator,
    joined_forward_operator,
    split_joined,
)
from lib.fast.models import Path, gpt2_loss
from lib.given.kernels.tiles import INTERPRETED
from lib.given.models.gpt2 import GPT2Config
from solutions.gpt2 import GPT2

interpreted = pytest.mark.skipif(not INTERPRETED, reason="tensors on the CPU, which compiled kernels cannot read")


def llama(implementation, **options):
    transformers = pytest.importorskip("transformers", reason="Transformers, with which logits are compared")
    interface.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation=implementation, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def logits_and_gradient(implementation, tokens, device="cpu", dtype=torch.float32, **inputs):
    model = llama(implementation).to(device, dtype)
    found = model(tokens, use_cache=False, **inputs).logits
    found.float().square().mean().backward()
    return found.detach(), model.model.embed_tokens.weight.grad


@interpreted
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("ours", [True, False])
def test_a_llama_of_transformers_has_the_same_logits(ours, monkeypatch):
    calls = []

    def counted(*args, **options):
        calls.append(args[0].shape)
        return flash_attention_fast(*args, **options)

    monkeypatch.setattr(interface, "flash_attention_fast", counted)
    if ours:
        monkeypatch.setattr(interface, "fits_fast", lambda q, k, v, causal: True)
    tokens = torch.randint(64, (2, 37))
    torch.testing.assert_close(logits_and_gradient("workbook", tokens), logits_and_gradient("eager", tokens))
    assert calls == ([(2, 4, 37, 16)] * 2 if ours else [])


@interpreted
@pytest.mark.time_limit(120)
def test_a_deepseek_whose_values_are_narrower_than_its_keys_has_the_same_logits(monkeypatch):
    transformers = pytest.importorskip("transformers", reason="Transformers, with which logits are compared")
    interface.register()
    calls, found = [], []

    def counted(q, k, v, *rest, **options):
        calls.append((k.shape, v.shape))
        return flash_attention_fast(q, k, v, *rest, **options)

    monkeypatch.setattr(interface, "flash_attention_fast", counted)
    monkeypatch.setattr(interface, "fits_fast", lambda q, k, v, causal: True)
    for implementation in ("workbook", "eager"):
        torch.manual_seed(0)
        config = transformers.DeepseekV3Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, first_k_dense_replace=1,
            num_attention_heads=2, num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16,
            qk_rope_head_dim=8, v_head_dim=16, attn_implementation=implementation,
        )  # fmt: skip
        model = transformers.DeepseekV3ForCausalLM(config)
        found.append(model(torch.arange(37)[None], use_cache=False).logits)
    torch.testing.assert_close(*found)
    assert calls == [((1, 2, 37, 24), (1, 2, 37, 16))]


@interpreted
def test_what_the_kernels_do_not_have_goes_to_pytorch(monkeypatch):
    monkeypatch.setattr(interface, "fits_fast", lambda q, k, v, causal: True)
    monkeypatch.setattr(interface, "flash_attention_fast", lambda *args, **options: pytest.fail("this call has a mask"))
    tokens, mask = torch.randint(64, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, 3:5] = 0  # real tokens on both sides
    padded = [logits_and_gradient(name, tokens, attention_mask=mask)[0][1] for name in ("workbook", "sdpa")]
    torch.testing.assert_close(*padded)


@pytest.mark.parametrize("name", interface.IGNORED)
def test_what_pytorchs_attention_would_ignore_is_refused(name):
    q = torch.zeros(1, 4, 5, 16)
    ignored: dict[str, Any] = {name: torch.zeros(4)}
    with pytest.raises(ValueError, match=name):
        interface.workbook_attention(torch.nn.Identity(), q, q, q, None, **ignored)


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("name", ["Bloom", "TrOCR"])
def test_a_model_that_computes_its_own_attention_is_refused(name):
    """Such a model adds the mask that it gets to its scores, and would take a missing one for none."""
    transformers = pytest.importorskip("transformers")
    interface.register()
    sizes = {"Bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4}}.get(name, {"d_model": 64, "decoder_layers": 2})
    config = getattr(transformers, f"{name}Config")(vocab_size=64, attn_implementation="workbook", **sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with pytest.raises(ValueError, match=f"{name}.* has an attention of its own"):
        model(torch.randint(64, (2, 9)), use_cache=False)


@pytest.mark.time_limit(60)
def test_a_gemma_that_keeps_only_the_last_queries_has_the_same_logits():
    """Gemma 4 computes its last layers for the kept tokens alone, and cuts a mask to fit;
    None would mean another diagonal.
    """
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("a release of Transformers with Gemma 4")
    interface.register()
    found = []
    for name in ("workbook", "eager"):
        torch.manual_seed(0)
        config = transformers.Gemma4TextConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            head_dim=16,
            num_key_value_heads=2, global_head_dim=16, num_global_key_value_heads=2, hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=64, num_kv_shared_layers=2, sliding_window=64, pad_token_id=0, bos_token_id=1,
            layer_types=["sliding_attention", "full_attention"] * 2, attn_implementation=name,
        )  # fmt: skip
        model = transformers.Gemma4ForCausalLM(config).eval()
        tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))
        found.append(model(tokens, logits_to_keep=3).logits)
    torch.testing.assert_close(*found)


@pytest.mark.gpu
@pytest.mark.time_limit(120)
def test_a_llama_on_a_gpu_has_nearly_the_same_logits():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("a Hopper GPU")
    transformers = pytest.importorskip("transformers")
    interface.register()
    found = {}
    for name in ("workbook", "sdpa", "eager"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, attn_implementation=name,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).cuda()
        if name != "eager":
            model.bfloat16()
        tokens = torch.randint(256, (2, 197), generator=torch.Generator().manual_seed(1)).cuda()
        found[name] = model(tokens, use_cache=False).logits.double()
    errors = {name: (found[name] - found["eager"]).norm() for name in ("workbook", "sdpa")}
    assert errors["workbook"] <= 1.2 * errors["sdpa"], errors


# ---- operators -------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.time_limit(120)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_the_operators_pass_pytorchs_own_check():
    q = torch.randn(1, 9, 2, 16).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(1, 1, 12, 16, requires_grad=True) for _ in range(2))
    torch.library.opcheck(forward_operator, (q, k, v, True))
    torch.library.opcheck(joined_forward_operator, (torch.randn(2, 9, 4, 16, requires_grad=True), None, 2, False))
    biased = torch.randn(2, 9, 4, 16, requires_grad=True), torch.randn(64, requires_grad=True), 2, True
    torch.library.opcheck(joined_forward_operator, biased)


@interpreted
@pytest.mark.time_limit(120)
@pytest.mark.filterwarnings("ignore")
def test_a_joined_projection_gets_a_joined_gradient_compiled_or_not():
    x, grad = torch.randn(2, 33, 4, 16, requires_grad=True), torch.randn(2, 33, 2, 16)
    q, k, v = (part.detach().requires_grad_() for part in split_joined(x, 2))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    parts = torch.autograd.grad(plain, (q, k, v), grad.transpose(1, 2))
    for attend in (
        flash_attention_joined,
        torch.compile(flash_attention_joined, backend="aot_eager", fullgraph=True),
    ):
        o = attend(x, 2, True)
        (found,) = torch.autograd.grad(o, x, grad)
        torch.testing.assert_close(o, plain.transpose(1, 2), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found, torch.cat(parts, 1).transpose(1, 2), atol=1e-5, rtol=1e-4)
        assert found.is_contiguous()


@interpreted
@pytest.mark.time_limit(120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("has_sums", [True, False], ids=["the kernel sums", "PyTorch sums"])
def test_the_bias_of_a_joined_projection_gets_its_gradient_compiled_or_not(causal, has_sums, monkeypatch):
    """Three heads of width 12 on one head of keys: the sums have gaps beyond the width,
    and heads share a bias of values.
    """
    if not has_sums:
        plan = flash._plan_backward
        monkeypatch.setattr(flash, "_plan_backward", lambda xs, is_causal, has_sums=False: plan(xs, is_causal))
    monkeypatch.setattr(flash, "_plans", {})
    x, grad = torch.randn(2, 33, 5, 12), torch.randn(2, 33, 3, 12)
    bias = torch.randn(60, requires_grad=True)
    q, k, v = (part.transpose(1, 2) for part in (x + bias.view(5, 12)).split((3, 1, 1), 2))
    plain = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=causal)
    (wanted,) = torch.autograd.grad(plain, bias, grad.transpose(1, 2))
    projected = (x + bias.detach().view(5, 12)).requires_grad_()
    for attend in (
        flash_attention_joined,
        torch.compile(flash_attention_joined, backend="aot_eager", fullgraph=True),
    ):
        d_x, d_bias = torch.autograd.grad(attend(projected, 3, causal, bias), (projected, bias), grad)
        torch.testing.assert_close(d_bias, wanted, atol=3e-5, rtol=1e-4)  # its zeros for the keys are sums
        torch.testing.assert_close(d_bias, d_x.sum((0, 1)).flatten(), atol=1e-5, rtol=1e-4)
        assert torch.equal(d_bias[36:48], torch.zeros(12))  # of the keys


@pytest.mark.gpu
@pytest.mark.time_limit(120)
@pytest.mark.parametrize(
    ("shape", "n_heads", "causal"),
    [((6, 197, 48, 64), 16, False), ((3, 1024, 36, 64), 12, True), ((70, 1024, 24, 64), 8, True),
    ((4, 257, 12, 80), 4, False),
     ((2, 300, 10, 128), 6, True), ((2, 4096, 24, 128), 8, False), ((2, 130, 6, 256), 2, True)],
)  # fmt: skip
def test_on_a_gpu_the_bias_of_a_joined_projection_gets_the_sum_of_its_gradient(shape, n_heads, causal):
    x, bias = (
        torch.randn(shape, device="cuda").bfloat16().requires_grad_(),
        torch.randn(shape[2] * shape[3], device="cuda"),
    )
    bias.requires_grad_()
    o = flash_attention_joined(x, n_heads, causal, bias)
    d_x, d_bias = torch.autograd.grad(o, (x, bias), torch.randn_like(o))
    wanted = d_x.double().sum((0, 1)).flatten()
    assert (d_bias - wanted).norm() < 0.01 * wanted.norm()


@interpreted
@pytest.mark.time_limit(60)
def test_a_models_projection_gets_the_gradient_of_its_bias_from_our_attention(monkeypatch):
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=11, context_len=8, dim=32, n_layers=2, n_heads=2))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens, parameters = torch.randint(11, (3, 9)), list(model.parameters())
    plain = torch.autograd.grad(gpt2_loss(model, tokens[:, :-1], tokens[:, 1:], Path()), parameters)
    monkeypatch.setattr(models, "_takes_ours", lambda *_: True)
    for kernels in (True, False):
        loss = gpt2_loss(model, tokens[:, :-1], tokens[:, 1:], Path(kernels=kernels))
        for got, want in zip(torch.autograd.grad(loss, parameters), plain, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("wide", [False, True], ids=["alone", "part of a wider tensor"])
def test_the_parts_of_joined_tensors_are_where_their_views_are(wide, has_bias):
    x = torch.randn(2, 9, 7 if wide else 5, 16)[:, :, :5]
    forward = flash._plan_joined_forward((x,), 3, True)
    o, lse = (allocate() for allocate in forward.results)
    do = torch.randn(2, 9, 4, 16)[:, :, 1:]
    backward = flash._plan_joined_backward((x, o, do), 3, True, has_bias)
    assert len(backward.results) == 1 + has_bias
    grads = [allocate() for allocate in backward.results]
    for launch, tensors in ((forward.launch, (x, o, lse)), (backward.launch, (x, o, do, lse, *grads))):
        used: list[Any] = []
        later = launch._replace(launch=Recorder(used))
        later(*tensors)
        assert used == [view.data_ptr() for view in launch.views(*tensors)]


class Recorder:
    """A launch that needs only addresses, and keeps them."""

    is_ready = True

    def __init__(self, used):
        self.used = used

    def __call__(self, *addresses):
        self.used.extend(addresses)


@interpreted
@pytest.mark.parametrize("joined", [False, True])
def test_a_hook_may_give_saved_tensors_other_strides(joined):
    """The backward pass looks at the strides again, and not only at those of the forward pass."""
    x, do = torch.randn(2, 9, 4, 16).requires_grad_(), torch.randn(2, 9, 2, 16)

    def gradient():
        if joined:
            o = flash_attention_joined(x, 2, True)
        else:
            o = flash_attention_fast(*split_joined(x, 2), True).transpose(1, 2)
        return torch.autograd.grad(o, x, do)[0]

    wanted = gradient()
    for turn in (
        lambda y: y.mT.contiguous().mT,
        torch.Tensor.contiguous,
        lambda y: y.transpose(0, 1).clone().transpose(0, 1),
    ):
        with torch.autograd.graph.saved_tensors_hooks(lambda y: y, turn):
            torch.testing.assert_close(gradient(), wanted)


@interpreted
@pytest.mark.filterwarnings("ignore")  # vmap takes one example after another
def test_a_transform_of_torch_func_is_right_or_refused():
    q, k, v = (torch.randn(3, 2, 9, 16) for _ in range(3))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda q: flash_attention_fast(q, k, v).square().sum())(q)
    torch.testing.assert_close(torch.vmap(flash_attention_fast)(q, k, v), flash_attention_fast(q, k, v))


def test_a_bias_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"bias \(63,\)"):
        flash_attention_joined(torch.zeros(1, 4, 4, 16), 2, False, torch.zeros(63))


def test_heads_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match="H = 3"):
        split_joined(torch.zeros(1, 4, 4, 16), 3)


@interpreted
@pytest.mark.parametrize("through_kernels", [True, False])
def test_two_halves_of_the_keys_give_the_gradients_of_all(through_kernels, monkeypatch):
    if through_kernels:
        monkeypatch.setattr("lib.fast.attention.blocks.fits_fast", lambda *args: True)
    q, do = (torch.randn(1, 2, 20, 16) for _ in range(2))
    k, v = (torch.randn(1, 1, 34, 16) for _ in range(2))
    o, lse = block_forward(q, k, v, False)
    scores = q @ k.mT * 0.25
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-4)
    whole = block_backward(q, k, v, o, do, lse, False)
    halves = [
        block_backward(q, k[..., part, :], v[..., part, :], o, do, lse, False) for part in (slice(15), slice(15, 34))
    ]
    torch.testing.assert_close(sum(x[0] for x in halves), whole[0], atol=1e-5, rtol=1e-4)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([x[i] for x in halves], 2), whole[i], atol=1e-5, rtol=1e-4)
    causal = block_forward(q, k[..., :7, :], v[..., :7, :], True)
    assert causal[1][..., :13].isneginf().all()
    assert (causal[0][..., :13, :] == 0).all()
