"""The vision transformer, graded.

The tests cut patches by slicing, fill modules with weights drawn by name, and compare with PyTorch's own convolution,
attention and encoder layer, and with Transformers' model, so that few exercises need another.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lib.given.models.vit import PRESETS, TINY, ViTConfig
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle, recorded
from tests.inputs import randn

vit = graded("vit")

CUT, LINEAR, EMBED, ATTEND, GELU = (f"eq-vit-{n}" for n in (1, 2, 3, 4, 5))
BLOCK, MODEL, COUNT, RESIZE = (f"eq-vit-{n}" for n in (6, 7, 8, 9))
CONVERT = 'section "Other people\'s weights"'
SMALL = ViTConfig(
    image_size=6, patch_size=3, channels=2, n_classes=5, dim=12, n_layers=2, n_heads=3, hidden_dim=20, eps=1e-5
)


def cut(images: Tensor, patch: int) -> Tensor:
    """Patches by slicing."""
    rows, columns = images.shape[2] // patch, images.shape[3] // patch
    windows = [
        (slice(r * patch, (r + 1) * patch), slice(c * patch, (c + 1) * patch))
        for r in range(rows)
        for c in range(columns)
    ]
    return torch.stack([images[:, :, rs, cs].flatten(1) for rs, cs in windows], dim=1)


# ---- weights by name, and the model as functions of them -------------------------------------------------------------


def linear_shapes(name: str, n_out: int, n_in: int) -> dict[str, list[int]]:
    return {f"{name}.weight": [n_out, n_in], f"{name}.bias": [n_out]}


def norm_shapes(name: str, dim: int) -> dict[str, list[int]]:
    return {f"{name}.weight": [dim], f"{name}.bias": [dim]}


def embeddings_shapes(c: ViTConfig) -> dict[str, list[int]]:
    kernel = [c.dim, c.channels, c.patch_size, c.patch_size]
    positions = {"cls_token": [1, 1, c.dim], "pos_embed": [1, 1 + c.n_patches, c.dim]}
    return positions | {"proj.weight": kernel, "proj.bias": [c.dim]}


def attention_shapes(c: ViTConfig) -> dict[str, list[int]]:
    return {k: s for name in ("wq", "wk", "wv", "wo") for k, s in linear_shapes(name, c.dim, c.dim).items()}


def mlp_shapes(c: ViTConfig) -> dict[str, list[int]]:
    return linear_shapes("fc1", c.hidden_dim, c.dim) | linear_shapes("fc2", c.dim, c.hidden_dim)


def under(prefix: str, shapes: dict) -> dict:
    return {f"{prefix}.{name}": value for name, value in shapes.items()}


def block_shapes(c: ViTConfig) -> dict[str, list[int]]:
    parts = under("attn", attention_shapes(c)) | under("mlp", mlp_shapes(c))
    return norm_shapes("norm1", c.dim) | norm_shapes("norm2", c.dim) | parts


def model_shapes(c: ViTConfig) -> dict[str, list[int]]:
    shapes = under("embeddings", embeddings_shapes(c)) | norm_shapes("norm", c.dim)
    for i in range(c.n_layers):
        shapes |= under(f"blocks.{i}", block_shapes(c))
    return shapes | linear_shapes("head", c.n_classes, c.dim)


def draw(shapes: dict[str, list[int]], seed: int = 0) -> dict[str, Tensor]:
    """Values for each name; norms near 1, the rest large enough for every part to matter."""
    values = {name: 0.4 * randn(*shape, seed=1000 * seed + i) for i, (name, shape) in enumerate(sorted(shapes.items()))}
    return {n: v + 1 if "norm" in n and n.endswith("weight") else v for n, v in values.items()}


def fill(module: nn.Module, values: dict[str, Tensor], read: str) -> nn.Module:
    """Put values into a module that should have parameters of exactly these names and shapes."""
    found = {name: list(parameter.shape) for name, parameter in module.named_parameters()}
    wanted = {name: list(value.shape) for name, value in values.items()}
    expect_equal(dict(sorted(found.items())), dict(sorted(wanted.items())), name="parameters", read=read)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])
    return module.eval()


def part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix + "."): w for name, w in weights.items() if name.startswith(prefix + ".")}


def run_attention(w: dict[str, Tensor], x: Tensor, n_heads: int) -> Tensor:
    """PyTorch's own multi-head attention."""
    out, _ = F.multi_head_attention_forward(
        *(x.transpose(0, 1),) * 3, x.shape[-1], n_heads,
        torch.cat([w["wq.weight"], w["wk.weight"], w["wv.weight"]]),
        torch.cat([w["wq.bias"], w["wk.bias"], w["wv.bias"]]),
        None, None, False, 0.0, w["wo.weight"], w["wo.bias"], training=False, need_weights=False,
    )  # fmt: skip
    return out.transpose(0, 1)


def run_mlp(w: dict[str, Tensor], x: Tensor, approximate: str = "none") -> Tensor:
    hidden = F.gelu(F.linear(x, w["fc1.weight"], w["fc1.bias"]), approximate=approximate)
    return F.linear(hidden, w["fc2.weight"], w["fc2.bias"])


def run_norm(w: dict[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def run_block(w: dict[str, Tensor], x: Tensor, c: ViTConfig) -> Tensor:
    x = x + run_attention(part(w, "attn"), run_norm(w, "norm1", x, c.eps), c.n_heads)
    return x + run_mlp(part(w, "mlp"), run_norm(w, "norm2", x, c.eps))


def run_embeddings(w: dict[str, Tensor], images: Tensor, patch: int) -> Tensor:
    patches = cut(images, patch) @ w["proj.weight"].flatten(1).T + w["proj.bias"]
    return torch.cat([w["cls_token"].repeat(len(images), 1, 1), patches], dim=1) + w["pos_embed"]


def run_model(w: dict[str, Tensor], images: Tensor, c: ViTConfig) -> Tensor:
    x = run_embeddings(part(w, "embeddings"), images, c.patch_size)
    for i in range(c.n_layers):
        x = run_block(part(w, f"blocks.{i}"), x, c)
    x = run_norm(w, "norm", x, c.eps)
    pooled = x[:, 0] if c.pooling == "token" else x[:, 1:].mean(1)
    return F.linear(pooled, w["head.weight"], w["head.bias"])


# ---- the same weights elsewhere --------------------------------------------------------------------------------------

HF_BLOCK = {
    "norm1": "layernorm_before", "norm2": "layernorm_after", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
    "attn.wq": "attention.q_proj", "attn.wk": "attention.k_proj", "attn.wv": "attention.v_proj",
    "attn.wo": "attention.o_proj",
}  # fmt: skip
HF_OUTER = {
    "embeddings.cls_token": "vit.embeddings.cls_token", "embeddings.pos_embed": "vit.embeddings.position_embeddings",
    "embeddings.proj": "vit.embeddings.patch_embeddings.projection", "norm": "vit.layernorm", "head": "classifier",
}  # fmt: skip
TIMM_OUTER = {
    "embeddings.cls_token": "cls_token", "embeddings.pos_embed": "pos_embed", "embeddings.proj": "patch_embed.proj",
    "norm": "norm", "head": "head",
}  # fmt: skip


def rename(name: str, outer: dict[str, str], block: dict[str, str], layer: str) -> str:
    stem, dot, leaf = (name, "", "") if name.endswith(("cls_token", "pos_embed")) else name.rpartition(".")
    if not stem.startswith("blocks."):
        return outer[stem] + dot + leaf
    _, i, rest = stem.split(".", 2)
    return f"{layer}.{i}.{block[rest]}{dot}{leaf}"


def as_hf(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {rename(name, HF_OUTER, HF_BLOCK, "vit.layers"): w for name, w in weights.items()}


def as_timm(weights: dict[str, Tensor], c: ViTConfig) -> dict[str, Tensor]:
    same = {n: n for n in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")} | {"attn.wo": "attn.proj"}
    theirs = {
        rename(name, TIMM_OUTER, same, "blocks"): w
        for name, w in weights.items()
        if name.split(".")[-2] not in ("wq", "wk", "wv")
    }
    for i in range(c.n_layers):
        for leaf in ("weight", "bias"):
            three = [weights[f"blocks.{i}.attn.{which}.{leaf}"] for which in ("wq", "wk", "wv")]
            theirs[f"blocks.{i}.attn.qkv.{leaf}"] = torch.cat(three)
    return theirs


def transformers_vit(c: ViTConfig, weights: dict[str, Tensor] | None = None):
    from transformers import ViTConfig as TheirConfig
    from transformers import ViTForImageClassification

    torch.manual_seed(0)
    more: dict[str, Any] = {"num_labels": c.n_classes}
    theirs = ViTForImageClassification(
        TheirConfig(
            hidden_size=c.dim, num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads,
            intermediate_size=c.hidden_dim, num_channels=c.channels, **more,
            image_size=c.image_size, patch_size=c.patch_size,
            layer_norm_eps=c.eps, hidden_act="gelu_new" if c.gelu == "tanh" else "gelu",
        )
    ).eval()  # fmt: skip
    if weights is not None:
        theirs.load_state_dict(as_hf(weights))
    return theirs


# ---- patches ---------------------------------------------------------------------------------------------------------

HAND = torch.tensor([[[0.0, 1, 2, 3], [4, 5, 6, 7]], [[10, 11, 12, 13], [14, 15, 16, 17]]])[None]
HAND_PATCHES = torch.tensor([[[0.0, 1, 4, 5, 10, 11, 14, 15], [2, 3, 6, 7, 12, 13, 16, 17]]])
SHAPES = [(1, 1, 4, 4, 2), (2, 3, 8, 8, 4), (3, 2, 6, 9, 3), (1, 3, 5, 15, 5), (2, 1, 3, 2, 1), (1, 4, 7, 7, 7)]
by_shape = pytest.mark.parametrize(("b", "ch", "height", "width", "patch"), SHAPES)
by_bad_sides = pytest.mark.parametrize(  # 131 = 10 x 12 + 11, 145 = 12 x 12 + 1, 11 = 0 x 12 + 11
    ("height", "width", "arithmetic"),
    [(131, 24, ("131", "12", "11")), (24, 131, ("131", "12", "11")), (145, 12, ("145",)), (12, 11, ("12", "11"))],
)


def check_cut(patchify, b, ch, height, width, patch):
    case(f"b={b} ch={ch} height={height} width={width} patch={patch}")
    images = randn(b, ch, height, width, seed=height)
    expect_close(patchify(images, patch), cut(images, patch), atol=0.0, rtol=0.0, read=CUT)


def test_patchify_unfold_by_hand():
    case("b=1 ch=2 height=2 width=4 patch=2: channel 0 counts from 0, channel 1 from 10")
    expect_close(vit.patchify_unfold(HAND, 2), HAND_PATCHES, read=CUT)


@by_shape
def test_patchify_unfold_equals_slicing(b, ch, height, width, patch):
    check_cut(vit.patchify_unfold, b, ch, height, width, patch)


@by_bad_sides
def test_patchify_unfold_refuses_sides_that_are_no_multiple(height, width, arithmetic):
    case(f"height={height} width={width} patch=12")
    with expect_raises(ValueError, *arithmetic, read="the contract, under Raises"):
        vit.patchify_unfold(randn(1, 3, height, width), 12)


def test_patchify_unfold_lets_gradients_through():
    case("b=1 ch=2 height=4 width=4 patch=2: the gradient of half the sum of squares is the image")
    images = randn(1, 2, 4, 4).requires_grad_()
    out = vit.patchify_unfold(images, 2)
    expect_true(out.requires_grad, "the patches are detached from the graph", answer=out)
    (0.5 * out.square().sum()).backward()
    expect_close(images.grad, images.detach(), name="images.grad", answer=out)


def test_patchify_einops_by_hand():
    case("b=1 ch=2 height=2 width=4 patch=2: channel 0 counts from 0, channel 1 from 10")
    expect_close(vit.patchify_einops(HAND, 2), HAND_PATCHES, read=CUT)


@by_shape
def test_patchify_einops_equals_slicing(b, ch, height, width, patch):
    check_cut(vit.patchify_einops, b, ch, height, width, patch)


@by_bad_sides
def test_patchify_einops_refuses_sides_that_are_no_multiple(height, width, arithmetic):
    case(f"height={height} width={width} patch=12")
    with expect_raises(ValueError, *arithmetic, read="the contract, under Raises"):
        vit.patchify_einops(randn(1, 3, height, width), 12)


def test_patchify_einops_takes_bytes():
    case("b=1 ch=3 height=4 width=6 patch=2, uint8")
    images = torch.arange(72, dtype=torch.uint8).reshape(1, 3, 4, 6)
    expect_close(vit.patchify_einops(images, 2), cut(images, 2), read="the contract, under Args")


# ---- unpatchify ------------------------------------------------------------------------------------------------------


def test_unpatchify_by_hand():
    case("two patches of 2 x 2 with two channels, into an image of 2 x 4")
    expect_close(vit.unpatchify(HAND_PATCHES, 2, 2, 4), HAND, read=CUT)


@by_shape
def test_unpatchify_undoes_the_cut(b, ch, height, width, patch):
    case(f"b={b} ch={ch} height={height} width={width} patch={patch}")
    images = randn(b, ch, height, width, seed=width)
    expect_close(vit.unpatchify(cut(images, patch), patch, height, width), images, atol=0.0, rtol=0.0, read=CUT)


@pytest.mark.parametrize("n", [20, 10, 14, 16])
def test_unpatchify_refuses_patches_that_do_not_fill_the_image(n):
    case(f"{n} patches of 2 x 2 into 10 x 6, which takes 5 x 3 = 15")
    with expect_raises(ValueError, "15", str(n), read="the contract, under Raises"):
        vit.unpatchify(randn(1, n, 12), 2, 10, 6)


@oracle
def test_unpatchify_undoes_any_cut():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    few = st.integers(1, 4)

    @settings(deadline=None, max_examples=60)
    @given(few, few, few, few, few)
    def check(b, ch, patch, rows, columns):
        height, width = rows * patch, columns * patch
        case(f"b={b} ch={ch} height={height} width={width} patch={patch}")
        images = torch.arange(b * ch * height * width).reshape(b, ch, height, width).float()
        patches = F.unfold(images, patch, stride=patch).transpose(1, 2)
        expect_close(vit.unpatchify(patches, patch, height, width), images)

    check()


def test_unpatchify_refuses_sides_that_are_no_multiple():
    for height, width in ((131, 24), (24, 131)):
        case(f"20 patches of 12 x 12 into {height} x {width}: 131 = 10 x 12 + 11")
        with expect_raises(ValueError, "131", "12", "11", read="the contract, under Raises"):
            vit.unpatchify(randn(1, 20, 144), 12, height, width)


# ---- conv_from_linear ------------------------------------------------------------------------------------------------


def test_conv_from_linear_by_hand():
    case("C=1 ch=2 patch=2: eight weights in a row")
    weight = torch.arange(1.0, 9.0)[None]
    expected = torch.tensor([[[[1.0, 2], [3, 4]], [[5, 6], [7, 8]]]])
    expect_close(vit.conv_from_linear(weight, 2, 2), expected, read=LINEAR)


@pytest.mark.parametrize(("c", "ch", "height", "width", "patch"), [(5, 3, 8, 4, 4), (4, 1, 6, 9, 3), (2, 2, 4, 4, 2)])
def test_conv_from_linear_gives_the_projection_of_the_patches(c, ch, height, width, patch):
    case(f"C={c} ch={ch} height={height} width={width} patch={patch}: conv2d with a stride of {patch}")
    images, weight = randn(2, ch, height, width), randn(c, ch * patch * patch, seed=1)
    kernel = vit.conv_from_linear(weight, ch, patch)
    expect_equal(list(kernel.shape), [c, ch, patch, patch], name="out.shape", answer=kernel, read=LINEAR)
    out = F.conv2d(images, kernel, stride=patch).flatten(2).transpose(1, 2)
    expect_close(out, cut(images, patch) @ weight.T, atol=1e-4, name="conv2d", answer=kernel, read=LINEAR)


# ---- ImageEmbeddings -------------------------------------------------------------------------------------------------


def test_ImageEmbeddings_by_hand():
    c = ViTConfig(image_size=2, patch_size=1, channels=1, n_classes=2, dim=2, n_layers=1, n_heads=1, hidden_dim=2)
    case("two images of 2 x 2 pixels, patch=1, dim=2: positions are 0.1, 0.2, … 0.5, the class token is (7, 8)")
    values = {
        "proj.weight": torch.tensor([1.0, 10.0]).reshape(2, 1, 1, 1),
        "proj.bias": torch.zeros(2),
        "cls_token": torch.tensor([[[7.0, 8.0]]]),
        "pos_embed": torch.arange(1.0, 6.0)[None, :, None].expand(1, 5, 2) / 10,
    }
    module = fill(vit.ImageEmbeddings(c), values, EMBED)
    images = torch.tensor([[[[1.0, 2], [3, 4]]], [[[5, 6], [7, 8]]]])
    first = [[7.1, 8.1], [1.2, 10.2], [2.3, 20.3], [3.4, 30.4], [4.5, 40.5]]
    second = [[7.1, 8.1], [5.2, 50.2], [6.3, 60.3], [7.4, 70.4], [8.5, 80.5]]
    expect_close(module(images), torch.tensor([first, second]), atol=1e-5, read=EMBED)


@pytest.mark.parametrize("batch", [1, 3])
def test_ImageEmbeddings_equal_the_projection_of_patches(batch):
    case(f"b={batch} ch=2 image_size=6 patch=3 dim=12")
    w, images = draw(embeddings_shapes(SMALL)), randn(batch, 2, 6, 6)
    out = fill(vit.ImageEmbeddings(SMALL), w, EMBED)(images)
    expect_close(out, run_embeddings(w, images, 3), atol=1e-5, read=EMBED)


def test_ImageEmbeddings_begin_as_the_contract_says():
    case("dim=64, 16 patches: the class token and the spread of the positions at first")
    torch.manual_seed(0)
    module = vit.ImageEmbeddings(TINY)
    expect_close(module.cls_token.detach(), torch.zeros(1, 1, 64), name="cls_token", read="the contract")
    spread = module.pos_embed.std().item()
    problem = f"the positions' standard deviation is {spread:.3f}, expected about 0.02"
    expect_true(0.015 < spread < 0.025, problem, answer=spread, read="the contract")


def test_ImageEmbeddings_learn_all_that_they_hold():
    case("b=2: the gradients of cls_token, pos_embed and proj")
    module = fill(vit.ImageEmbeddings(SMALL), draw(embeddings_shapes(SMALL)), EMBED)
    module(randn(2, 2, 6, 6)).sum().backward()
    gradients = {n: p.grad is not None for n, p in module.named_parameters()}
    expect_equal(gradients, dict.fromkeys(gradients, True), name="has a gradient")
    expect_close(module.cls_token.grad, torch.full((1, 1, 12), 2.0), name="cls_token.grad", read=EMBED)


@pytest.mark.parametrize(
    ("shape", "mentions"),
    [
        ((1, 11, 30, 120), ("30", "120", "60")),  # as many patches as the config's
        ((1, 11, 90, 60), ("90", "60")),
        ((1, 11, 60, 90), ("90", "60")),
        ((1, 13, 60, 60), ("13", "11")),
    ],
)
def test_ImageEmbeddings_refuse_other_images(shape, mentions):
    case(f"image_size=60 patch=30 channels=11, images {list(shape)}")
    module = vit.ImageEmbeddings(replace(SMALL, image_size=60, patch_size=30, channels=11))
    with expect_raises(ValueError, *mentions, read="the contract, under Raises"):
        module(randn(*shape))


# ---- EncoderAttention ------------------------------------------------------------------------------------------------


def test_EncoderAttention_by_hand():
    c = replace(SMALL, dim=2, n_heads=1)
    case("t=3 dim=2, one head, wq = wk = 0: every token gets the mean (1, 1) of the values, times (2, 3), plus (1, 0)")
    values = {name: torch.zeros(shape) for name, shape in attention_shapes(c).items()}
    values |= {"wv.weight": torch.eye(2), "wo.weight": torch.diag(torch.tensor([2.0, 3.0]))}
    values["wo.bias"] = torch.tensor([1.0, 0.0])
    module = fill(vit.EncoderAttention(c), values, ATTEND)
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]])
    expect_close(module(x), torch.full((1, 3, 2), 3.0), atol=1e-6, read=ATTEND)


@pytest.mark.parametrize(("b", "t", "dim", "n_heads"), [(2, 5, 12, 3), (1, 1, 8, 2), (3, 7, 10, 1), (1, 4, 6, 6)])
def test_EncoderAttention_equals_PyTorch(b, t, dim, n_heads):
    c = replace(SMALL, dim=dim, n_heads=n_heads)
    case(f"b={b} t={t} dim={dim} n_heads={n_heads}")
    w, x = draw(attention_shapes(c)), randn(b, t, dim)
    expect_close(fill(vit.EncoderAttention(c), w, ATTEND)(x), run_attention(w, x, n_heads), atol=1e-5, read=ATTEND)


def test_EncoderAttention_does_not_know_order():
    case("t=6 dim=12: the tokens in reverse give the outputs in reverse")
    module = fill(vit.EncoderAttention(SMALL), draw(attention_shapes(SMALL)), ATTEND)
    x = randn(1, 6, 12)
    backwards = module(x.flip(1))
    expect_close(
        backwards.flip(1),
        module(x),
        atol=1e-5,
        name="out of the reversed tokens, reversed",
        answer=backwards,
        read=ATTEND,
    )


# ---- MLP -------------------------------------------------------------------------------------------------------------


def test_MLP_by_hand():
    c = replace(SMALL, dim=1, n_heads=1, hidden_dim=2)
    case(
        'dim=1 hidden_dim=2 gelu="exact": x = 1 goes to GELU(1) = 0.84134 and GELU(-2) = -0.04550, then 10 a + '
        "100 b + 5"
    )
    values = {
        "fc1.weight": torch.tensor([[1.0], [-2.0]]), "fc1.bias": torch.zeros(2),
        "fc2.weight": torch.tensor([[10.0, 100.0]]), "fc2.bias": torch.tensor([5.0]),
    }  # fmt: skip
    module = fill(vit.MLP(c), values, GELU)
    expected = torch.tensor([[[10 * 0.8413447 + 100 * -0.0455003 + 5]]])
    expect_close(module(torch.ones(1, 1, 1)), expected, atol=1e-4, read=GELU)


@pytest.mark.parametrize("gelu", ["exact", "tanh"])
def test_MLP_takes_the_gelu_of_its_config(gelu):
    c = replace(SMALL, gelu=gelu)
    case(f'b=2 t=4 dim=12 hidden_dim=20 gelu="{gelu}"')
    w, x = draw(mlp_shapes(c)), randn(2, 4, 12)
    expected = run_mlp(w, x, "tanh" if gelu == "tanh" else "none")
    expect_close(fill(vit.MLP(c), w, GELU)(x), expected, atol=1e-5, read=GELU)


@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 3, 4, 12)])
def test_MLP_takes_any_leading_dimensions(shape):
    case(f"x {list(shape)}")
    w, x = draw(mlp_shapes(SMALL)), randn(*shape)
    expect_close(fill(vit.MLP(SMALL), w, GELU)(x), run_mlp(w, x), atol=1e-5, read="the contract")


def test_MLP_works_on_each_token_alone():
    case("t=3: the middle token without its neighbours")
    module = fill(vit.MLP(SMALL), draw(mlp_shapes(SMALL)), GELU)
    x = randn(1, 3, 12)
    out = module(x)
    expect_close(out[:, 1:2], module(x[:, 1:2]), atol=1e-5, name="out[:, 1]", answer=out, read=GELU)


# ---- ViTBlock --------------------------------------------------------------------------------------------------------


def encoder_layer(w: dict[str, Tensor], c: ViTConfig) -> nn.TransformerEncoderLayer:
    """PyTorch's own block, with our weights."""
    layer = nn.TransformerEncoderLayer(
        c.dim,
        c.n_heads,
        c.hidden_dim,
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=c.eps,
        batch_first=True,
        norm_first=True,
    )
    values = {
        "self_attn.out_proj": "attn.wo",
        "linear1": "mlp.fc1",
        "linear2": "mlp.fc2",
        "norm1": "norm1",
        "norm2": "norm2",
    }
    state = {f"{theirs}.{leaf}": w[f"{ours}.{leaf}"] for theirs, ours in values.items() for leaf in ("weight", "bias")}
    for leaf in ("weight", "bias"):
        state[f"self_attn.in_proj_{leaf}"] = torch.cat([w[f"attn.w{which}.{leaf}"] for which in "qkv"])
    layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize(("b", "t", "eps"), [(1, 3, 1e-5), (2, 6, 1e-6), (2, 5, 0.3)])
def test_ViTBlock_equals_PyTorch(b, t, eps):
    c = replace(SMALL, eps=eps)
    case(f"b={b} t={t} dim=12 n_heads=3 eps={eps}")
    w, x = draw(block_shapes(c)), randn(b, t, 12, seed=3)
    expected = encoder_layer(w, c)(x).detach()
    read = BLOCK if eps == 1e-5 else "the contract"  # another epsilon than PyTorch's own
    given = x.clone()
    expect_close(fill(vit.ViTBlock(c), w, BLOCK)(given), expected, atol=1e-4, read=read)
    expect_close(given, x, atol=0.0, rtol=0.0, name="x after the call", read="the contract")


def test_ViTBlock_that_adds_nothing_is_the_identity():
    case("wo and fc2 are 0, so the block should give back x")
    w = draw(block_shapes(SMALL))
    w = {name: torch.zeros_like(v) if ".wo." in name or ".fc2." in name else v for name, v in w.items()}
    x = randn(1, 4, 12)
    expect_close(fill(vit.ViTBlock(SMALL), w, BLOCK)(x), x, atol=1e-6, read=BLOCK)


# ---- VisionTransformer -----------------------------------------------------------------------------------------------

VARIANTS = {
    "b=2, colour, two layers": (2, replace(SMALL, channels=3)),
    "b=1, grayscale, one layer": (1, replace(SMALL, channels=1, n_layers=1, n_classes=3)),
    "b=3, patch=2, GELU by tanh": (3, replace(SMALL, patch_size=2, gelu="tanh")),
    "b=2, eps=1e-12 as in Transformers": (2, replace(SMALL, eps=1e-12, n_heads=4)),
}


POOLED = {"token": MODEL, "mean": "the contract of ex-vit-visiontransformer"}


@pytest.mark.parametrize("pooling", POOLED)
def test_VisionTransformer_by_hand(pooling):
    c = ViTConfig(
        image_size=2,
        patch_size=1,
        channels=1,
        n_classes=2,
        dim=2,
        n_layers=1,
        n_heads=1,
        hidden_dim=2,
        eps=0.0,
        pooling=pooling,
    )
    case(
        f'pooling="{pooling}", 2 x 2 pixels, dim=2, a block that adds nothing; the norm makes every token (1, '
        "-1) or (-1, 1)"
    )
    values = {name: torch.zeros(shape) for name, shape in model_shapes(c).items()}
    values |= {name: torch.ones_like(v) for name, v in values.items() if "norm" in name and name.endswith("weight")}
    values["embeddings.proj.weight"] = torch.tensor([1.0, -1.0]).reshape(2, 1, 1, 1)
    values["embeddings.cls_token"] = torch.tensor([[[0.0, 4.0]]])
    values |= {"head.weight": torch.tensor([[1.0, 0.0], [0.0, 10.0]]), "head.bias": torch.tensor([0.5, 0.0])}
    images = torch.tensor(
        [[[[1.0, 2.0], [3.0, -4.0]]]]
    )  # three patches of (1, -1), one of (-1, 1); the token is (-1, 1)
    expected = torch.tensor([[-0.5, 10.0]] if pooling == "token" else [[1.0, -5.0]])
    out = fill(vit.VisionTransformer(c), values, MODEL)(images)
    expect_close(out, expected, atol=1e-4, read=POOLED[pooling])


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("variant", VARIANTS)
def test_VisionTransformer_equals_transformers(variant):
    batch, c = VARIANTS[variant]
    case(variant)
    weights, images = draw(model_shapes(c), seed=5), randn(batch, c.channels, 6, 6, seed=7)
    expected = recorded(f"logits {variant}", lambda: transformers_vit(c, weights)(images).logits)
    expect_close(fill(vit.VisionTransformer(c), weights, MODEL)(images), expected, atol=1e-4, read=MODEL)


@pytest.mark.parametrize("pooling", POOLED)
def test_VisionTransformer_equals_PyTorch(pooling):
    c = replace(SMALL, pooling=pooling)
    case(f'b=2 ch=2 image_size=6 patch=3, two layers, pooling="{pooling}"')
    weights, images = draw(model_shapes(c), seed=6), randn(2, 2, 6, 6)
    out = fill(vit.VisionTransformer(c), weights, MODEL)(images)
    expect_close(out, run_model(weights, images, c), atol=1e-4, read=POOLED[pooling])


def test_VisionTransformer_last_norm_uses_the_eps_of_the_config():
    c = replace(SMALL, n_layers=0, eps=0.3)
    case("b=2 ch=2 image_size=6 patch=3, no block, eps=0.3")
    weights, images = draw(model_shapes(c), seed=6), randn(2, 2, 6, 6)
    out = fill(vit.VisionTransformer(c), weights, MODEL)(images)
    expect_close(out, run_model(weights, images, c), atol=1e-4, read="the contract, under Attributes")


def test_VisionTransformer_learns_every_parameter():
    case("b=2, token pooling: which parameters get a gradient")
    model = fill(vit.VisionTransformer(SMALL), draw(model_shapes(SMALL)), MODEL)
    F.cross_entropy(model(randn(2, 2, 6, 6)), torch.tensor([0, 3])).backward()
    reached = {name: p.grad is not None and bool(p.grad.abs().sum() > 0) for name, p in model.named_parameters()}
    # a bias of the keys moves all scores of a query alike, and the softmax does not see it
    wanted = {name: True for name in reached if not name.endswith("wk.bias")}
    expect_equal({name: reached[name] for name in wanted}, wanted, name="has a gradient", read=MODEL)


@oracle
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_VisionTransformer_equals_timm(seed):
    timm = pytest.importorskip("timm", reason="timm needs torchvision, which pulls another torch")
    case(f"timm's VisionTransformer, seed={seed}")
    torch.manual_seed(seed)
    c = replace(SMALL, eps=1e-6, pooling="token")
    theirs = timm.models.VisionTransformer(
        img_size=6,
        patch_size=3,
        in_chans=2,
        num_classes=5,
        embed_dim=12,
        depth=2,
        num_heads=3,
        mlp_ratio=20 / 12,
        global_pool="token",
    ).eval()
    images = randn(2, 2, 6, 6, seed=seed)
    model = vit.VisionTransformer(c)
    model.load_state_dict(vit.convert_timm_state_dict(theirs.state_dict(), c))
    expect_close(model(images), theirs(images).detach(), atol=1e-5)


# ---- count_parameters ------------------------------------------------------------------------------------------------


def test_count_parameters_by_hand():
    c = ViTConfig(image_size=2, patch_size=1, channels=1, n_classes=3, dim=2, n_layers=2, n_heads=1, hidden_dim=5)
    case("dim=2 hidden_dim=5, two layers, 4 patches of 1 number, 3 classes: 16 + 2 x 59 + 4 + 9")
    found = vit.count_parameters(c)
    expect_equal(found, 147, read=COUNT)
    expect_equal(type(found).__name__, "int", name="type of out", answer=found, read="the contract, under Returns")


@pytest.mark.time_limit(5)
@pytest.mark.memory_limit(64)
def test_count_parameters_takes_little_memory():
    case("G/14, 1000 classes: any number will do here, in under 64 MB")
    vit.count_parameters(PRESETS["G/14"])


def test_count_parameters_of_every_preset():
    counts = {
        "tiny": 136_138, "B/16": 86_567_656, "L/16": 304_326_632, "H/14": 632_045_800, "g/14": 1_012_611_432,
        "G/14": 1_844_440_680,
    }  # fmt: skip
    for name, count in counts.items():
        case(f"{name}, {PRESETS[name].n_classes} classes")
        expect_equal(vit.count_parameters(PRESETS[name]), count, read=COUNT)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_count_parameters_of_any_config(seed):
    n = torch.randint(1, 7, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    c = ViTConfig(
        image_size=n[0] * n[1], patch_size=n[0], channels=n[2], n_classes=n[3], dim=n[4] * n[5], n_layers=n[6],
        n_heads=n[5], hidden_dim=3 * n[7] + 1, pooling=("token", "mean")[seed % 2],
    )  # fmt: skip
    case(str(c))
    expected = sum(torch.Size(shape).numel() for shape in model_shapes(c).values())
    expect_equal(vit.count_parameters(c), expected, read=COUNT)


# ---- weights of others -----------------------------------------------------------------------------------------------


def test_convert_hf_state_dict_renames():
    case("two layers, dim=12: Transformers' names to ours")
    weights = draw(model_shapes(SMALL), seed=2)
    out = vit.convert_hf_state_dict(as_hf(weights), SMALL)
    expect_close(dict(out), weights, atol=0.0, rtol=0.0, read=CONVERT)


def test_convert_hf_state_dict_takes_files_of_version_4():
    case("two layers, dim=12: the names that files on the hub have")
    weights = draw(model_shapes(SMALL), seed=2)
    old = {
        "vit.layers.": "vit.encoder.layer.", ".attention.q_proj.": ".attention.attention.query.",
        ".attention.k_proj.": ".attention.attention.key.", ".attention.v_proj.": ".attention.attention.value.",
        ".attention.o_proj.": ".attention.output.dense.", ".mlp.fc1.": ".intermediate.dense.",
        ".mlp.fc2.": ".output.dense.",
    }  # fmt: skip
    theirs = {}
    for name, tensor in as_hf(weights).items():
        for new, before in old.items():
            name = name.replace(new, before)
        theirs[name] = tensor
    out = refused = None
    try:
        out = vit.convert_hf_state_dict(theirs, SMALL)
    except ValueError as error:
        refused = error
    problem = "refused a file with the names of Transformers 4; modern_hf_names turns them into those of version 5"
    expect_true(refused is None, problem, read=CONVERT)
    expect_close(dict(out), weights, atol=0.0, rtol=0.0, read=CONVERT)


def test_convert_hf_state_dict_lists_all_that_is_wrong():
    case("one tensor missing, one extra, three misshapen: one too long, one too short, one with an axis too few")
    theirs = as_hf(draw(model_shapes(SMALL)))
    del theirs["vit.layers.1.mlp.fc1.bias"]
    theirs["vit.pooler.dense.weight"] = randn(12, 12)
    theirs["classifier.weight"] = randn(7, 12)
    theirs["vit.layers.0.layernorm_after.bias"] = randn(11)
    theirs["vit.embeddings.position_embeddings"] = randn(5, 12)
    names = (
        "vit.layers.1.mlp.fc1.bias",
        "vit.pooler.dense.weight",
        "classifier.weight",
        "vit.layers.0.layernorm_after.bias",
        "vit.embeddings.position_embeddings",
    )
    with expect_raises(ValueError, *names, read=CONVERT):
        vit.convert_hf_state_dict(theirs, SMALL)


@pytest.mark.parametrize("rows", [7, 4, 1])
def test_convert_hf_state_dict_refuses_another_shape(rows):
    case(f"classifier.weight is [{rows}, 12], the config has 5 classes; nothing else is wrong")
    theirs = as_hf(draw(model_shapes(SMALL))) | {"classifier.weight": randn(rows, 12)}
    with expect_raises(ValueError, "classifier.weight", read=CONVERT):
        vit.convert_hf_state_dict(theirs, SMALL)


def test_convert_hf_state_dict_refuses_more_layers_than_the_config_has():
    case("weights of two layers, a config of one")
    theirs = as_hf(draw(model_shapes(SMALL)))
    with expect_raises(ValueError, "vit.layers.1.attention.q_proj.weight", read=CONVERT):
        vit.convert_hf_state_dict(theirs, replace(SMALL, n_layers=1))


@oracle
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("variant", VARIANTS)
def test_convert_hf_state_dict_of_a_real_model(variant):
    batch, c = VARIANTS[variant]
    case(f"Transformers' ViTForImageClassification, {variant}")
    theirs, images = transformers_vit(c), randn(batch, c.channels, 6, 6)
    weights = vit.convert_hf_state_dict(theirs.state_dict(), c)
    model = vit.VisionTransformer(c)
    model.load_state_dict(weights)
    expect_close(model(images), theirs(images).logits.detach(), atol=1e-5)


def test_convert_timm_state_dict_splits_and_renames():
    case("two layers, dim=12: timm's names to ours, qkv in three")
    weights = draw(model_shapes(SMALL), seed=3)
    out = vit.convert_timm_state_dict(as_timm(weights, SMALL), SMALL)
    expect_close(dict(out), weights, atol=0.0, rtol=0.0, read=CONVERT)


def test_convert_timm_state_dict_leaves_the_state_dict_alone():
    case("the names in the state dict after the call")
    theirs = as_timm(draw(model_shapes(SMALL)), SMALL)
    before = sorted(theirs)
    vit.convert_timm_state_dict(theirs, SMALL)
    expect_equal(sorted(theirs), before, name="state_dict", read=CONVERT)


def test_convert_timm_state_dict_lists_all_that_is_wrong():
    for rows in (30, 37, 2):
        case(f"blocks.0's qkv.bias missing, blocks.1's qkv.weight of {rows} rows instead of 36, fc_norm.weight extra")
        theirs = as_timm(draw(model_shapes(SMALL)), SMALL)
        del theirs["blocks.0.attn.qkv.bias"]
        theirs["blocks.1.attn.qkv.weight"] = randn(rows, 12)
        theirs["fc_norm.weight"] = randn(12)
        names = ("blocks.0.attn.qkv.bias", "blocks.1.attn.qkv.weight", "fc_norm.weight")
        with expect_raises(ValueError, *names, read=CONVERT):
            vit.convert_timm_state_dict(theirs, SMALL)


# ---- resize_positions ------------------------------------------------------------------------------------------------


def test_resize_positions_by_hand():
    case("a grid of 1 x 2 with positions 0 and 1 to 1 x 4; the class token is 9")
    pos_embed = torch.tensor([[[9.0], [0.0], [1.0]]])
    # PyTorch's cubic has a = -0.75 and repeats the border
    expected = torch.tensor([[[9.0], [-0.1054688], [0.2265625], [0.7734375], [1.1054688]]])
    expect_close(vit.resize_positions(pos_embed, (1, 2), (1, 4)), expected, atol=1e-5, read=RESIZE)


@pytest.mark.parametrize(
    ("old", "new"), [((3, 3), (6, 6)), ((4, 4), (3, 3)), ((2, 5), (5, 4)), ((4, 3), (4, 3)), ((11, 2), (15, 3))]
)
def test_resize_positions_equals_interpolate(old, new):
    case(f"dim=5, {old} to {new}")
    pos_embed = randn(1, 1 + old[0] * old[1], 5)
    image = pos_embed[0, 1:].T.reshape(1, 5, *old)
    resized = F.interpolate(image, new, mode="bicubic").flatten(2).transpose(1, 2)
    expected = torch.cat([pos_embed[:, :1], resized], dim=1)
    expect_close(vit.resize_positions(pos_embed, old, new), expected, atol=1e-5, read=RESIZE)


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("new", [(4, 4), (3, 5)])
def test_resize_positions_equals_transformers(new):
    case(f"dim=12, (2, 2) to {new}, as in Transformers")
    pos_embed = randn(1, 5, 12, seed=4)

    def theirs():
        embeddings = transformers_vit(SMALL).vit.embeddings
        embeddings.position_embeddings.data.copy_(pos_embed)
        tokens = torch.zeros(1, 1 + new[0] * new[1], 12)
        return embeddings.interpolate_pos_encoding(tokens, 3 * new[0], 3 * new[1])

    expected = recorded(f"positions {new[0]} x {new[1]}", theirs)
    expect_close(vit.resize_positions(pos_embed, (2, 2), new), expected, atol=1e-5, read=RESIZE)


def test_resize_positions_refuses_another_grid():
    for n in (30, 35, 28):
        case(f"1 + {n} positions said to be 4 x 8 = 32")
        with expect_raises(ValueError, str(n), "32", read="the contract, under Raises"):
            vit.resize_positions(randn(1, 1 + n, 5), (4, 8), (6, 3))
    case("1 + 30 positions said to be 4 x 8 = 32, and wanted as 4 x 8")
    with expect_raises(ValueError, "30", "32", read="the contract, under Raises"):
        vit.resize_positions(randn(1, 31, 5), (4, 8), (4, 8))
