"""Plausible wrong answers of chapter 5, and the misconception behind each."""

import torch
import torch.nn.functional as F  # noqa: N812
from einops import rearrange
from torch import nn

from lib.given.models.vit import hf_names, modern_hf_names
from lib.workbook.grading import mistake
from solutions import vit as reference
from solutions.attention import causal_mask, merge_heads, scaled_dot_product_attention, split_heads


def _check(images, patch):
    reference.patchify_einops(images, patch)


# ---- 5.1 patchify_unfold ---------------------------------------------------------------------------------------------


@mistake(
    "patchify_unfold",
    "the patches are the columns: F.unfold returns [B, ch*P*P, N], and its last two axes must be exchanged",
)
def unfold_not_transposed(images, patch):
    _check(images, patch)
    return F.unfold(images, patch, stride=patch)


@mistake(
    "patchify_unfold",
    "the axes were reshaped instead of exchanged, so the numbers are in the wrong patches",
)
def unfold_reshaped(images, patch):
    _check(images, patch)
    out = F.unfold(images, patch, stride=patch)
    return out.reshape(out.shape[0], out.shape[2], out.shape[1])


@mistake("patchify_unfold", "inside of a patch the channels come last; the contract puts all of channel 0 first")
def unfold_channels_last(images, patch):
    out = reference.patchify_unfold(images, patch)
    return rearrange(out, "b n (ch pp) -> b n (pp ch)", ch=images.shape[1])


@mistake("patchify_unfold", "the window slides by one pixel; its stride should be the side of a patch")
def unfold_by_one(images, patch):
    _check(images, patch)
    return F.unfold(images, patch).transpose(1, 2)


@mistake(
    "patchify_unfold", "the sides are not checked, and F.unfold silently drops rows and columns that don't fill a patch"
)
def unfold_unchecked(images, patch):
    return F.unfold(images, patch, stride=patch).transpose(1, 2)


@mistake("patchify_unfold", "the patches are detached from the graph")
def unfold_detached(images, patch):
    return reference.patchify_unfold(images.detach(), patch)


# ---- 5.2 patchify_einops ---------------------------------------------------------------------------------------------


@mistake("patchify_einops", "inside of a patch the channels come last; the contract puts all of channel 0 first")
def einops_channels_last(images, patch):
    _check(images, patch)
    return rearrange(images, "b ch (r p) (c q) -> b (r c) (p q ch)", p=patch, q=patch)


@mistake("patchify_einops", "the patches run down the columns; the contract numbers them row by row")
def einops_columns_first(images, patch):
    _check(images, patch)
    return rearrange(images, "b ch (r p) (c q) -> b (c r) (ch p q)", p=patch, q=patch)


@mistake(
    "patchify_einops",
    "the offset inside of the patch comes before the patch's row, (p h) instead of (h p), so each patch takes pixels from all over the image",
)
def einops_strided(images, patch):
    _check(images, patch)
    return rearrange(images, "b ch (p r) (q c) -> b (r c) (ch p q)", p=patch, q=patch)


@mistake("patchify_einops", "each patch is transposed: its rows are the image's columns")
def einops_transposed(images, patch):
    _check(images, patch)
    return rearrange(images, "b ch (r p) (c q) -> b (r c) (ch q p)", p=patch, q=patch)


@mistake("patchify_einops", "a view alone cuts the image into strips of consecutive pixels, not into squares")
def einops_viewed(images, patch):
    _check(images, patch)
    return images.reshape(len(images), -1, images.shape[1] * patch * patch)


@mistake("patchify_einops", "rows and columns that don't fill a patch are dropped; a ValueError should be raised")
def einops_cropped(images, patch):
    rows, columns = images.shape[2] // patch * patch, images.shape[3] // patch * patch
    return reference.patchify_einops(images[:, :, :rows, :columns], patch)


# ---- 5.3 unpatchify --------------------------------------------------------------------------------------------------


@mistake("unpatchify", "the channel is read as the last axis of each patch; it is the first")
def back_channels_last(patches, patch, height, width):
    reference.unpatchify(patches, patch, height, width)
    return rearrange(patches, "b (r c) (p q ch) -> b ch (r p) (c q)", r=height // patch, p=patch, q=patch)


@mistake("unpatchify", "the patches are reshaped to an image, and their numbers never move to their places")
def back_by_view(patches, patch, height, width):
    reference.unpatchify(patches, patch, height, width)
    return patches.reshape(len(patches), -1, height, width)


@mistake("unpatchify", "the patches are placed down the columns; they are numbered row by row")
def back_columns_first(patches, patch, height, width):
    reference.unpatchify(patches, patch, height, width)
    return rearrange(patches, "b (c r) (ch p q) -> b ch (r p) (c q)", r=height // patch, p=patch, q=patch)


@mistake(
    "unpatchify",
    "the offset inside of the patch comes before the patch's row, (p h) instead of (h p), so the pixels of a patch are spread over the image",
)
def back_strided(patches, patch, height, width):
    reference.unpatchify(patches, patch, height, width)
    return rearrange(patches, "b (r c) (ch p q) -> b ch (p r) (q c)", r=height // patch, p=patch, q=patch)


@mistake("unpatchify", "the number of patches is not checked, so the image gets the wrong width")
def back_unchecked(patches, patch, height, width):
    if height % patch or width % patch:
        raise ValueError(f"{height} x {width} is not a multiple of {patch}")
    return rearrange(patches, "b (r c) (ch p q) -> b ch (r p) (c q)", r=height // patch, p=patch, q=patch)


# ---- 5.4 conv_from_linear --------------------------------------------------------------------------------------------


@mistake("conv_from_linear", "the channel is read as the last axis; in a patch it is the first")
def kernel_channels_last(weight, channels, patch):
    return rearrange(weight, "c (p q ch) -> c ch p q", ch=channels, p=patch)


@mistake("conv_from_linear", "rows and columns of each kernel are exchanged")
def kernel_transposed(weight, channels, patch):
    return reference.conv_from_linear(weight, channels, patch).transpose(2, 3)


@mistake("conv_from_linear", "output and input channels are exchanged: that is the kernel of a transposed convolution")
def kernel_of_transposed_convolution(weight, channels, patch):
    return reference.conv_from_linear(weight, channels, patch).transpose(0, 1)


@mistake(
    "conv_from_linear", "the kernel is mirrored, as in the mathematical definition; PyTorch's conv2d does not mirror it"
)
def kernel_flipped(weight, channels, patch):
    return reference.conv_from_linear(weight, channels, patch).flip(2, 3)


@mistake(
    "conv_from_linear",
    "the weight was transposed; its rows already are the output channels, and only the axis ch*P*P must be split",
)
def kernel_of_transposed_weight(weight, channels, patch):
    return weight.T.reshape(len(weight), channels, patch, patch)


# ---- 5.5 ImageEmbeddings ---------------------------------------------------------------------------------------------


class _Embeddings(reference.ImageEmbeddings):
    def patches(self, images):
        super().forward(images)  # checks the shape
        return self.proj(images).flatten(2).transpose(1, 2)

    def tokens(self, images):
        return self.cls_token.expand(len(images), -1, -1)


@mistake("ImageEmbeddings", "the class token is not expanded to the batch: it has a batch of 1 and the patches have B")
class TokenNotExpanded(_Embeddings):
    def forward(self, images):
        return torch.cat([self.cls_token, self.patches(images)], dim=1) + self.pos_embed


@mistake("ImageEmbeddings", "the class token comes after the patches; it should be row 0")
class TokenLast(_Embeddings):
    def forward(self, images):
        return torch.cat([self.patches(images), self.tokens(images)], dim=1) + self.pos_embed


@mistake("ImageEmbeddings", "the positions were added before the class token was put in front, so it has none")
class PositionsBeforeToken(_Embeddings):
    def forward(self, images):
        return torch.cat([self.tokens(images), self.patches(images) + self.pos_embed[:, 1:]], dim=1)


@mistake("ImageEmbeddings", "the first N positions went to the patches, but row 0 belongs to the class token")
class PositionsShifted(_Embeddings):
    def forward(self, images):
        return torch.cat([self.tokens(images), self.patches(images) + self.pos_embed[:, :-1]], dim=1)


@mistake("ImageEmbeddings", "no positions were added")
class NoPositions(_Embeddings):
    def forward(self, images):
        return torch.cat([self.tokens(images), self.patches(images)], dim=1)


@mistake("ImageEmbeddings", "the patches run down the columns first")
class ColumnsFirst(_Embeddings):
    def forward(self, images):
        self.patches(images)
        patches = rearrange(self.proj(images), "b c row column -> b (column row) c")
        return torch.cat([self.tokens(images), patches], dim=1) + self.pos_embed


@mistake("ImageEmbeddings", "the class token is a buffer instead of a parameter, so it is never learned")
class TokenNotLearned(reference.ImageEmbeddings):
    def __init__(self, config):
        super().__init__(config)
        del self.cls_token
        self.register_buffer("cls_token", torch.zeros(1, 1, config.dim))


@mistake("ImageEmbeddings", "the positions start with a standard deviation of 1; the contract says 0.02")
class PositionsLarge(reference.ImageEmbeddings):
    def __init__(self, config):
        super().__init__(config)
        self.pos_embed = nn.Parameter(torch.randn_like(self.pos_embed))


@mistake("ImageEmbeddings", "images of a wrong shape raise no error")
class SidesUnchecked(reference.ImageEmbeddings):
    def forward(self, images):
        patches = self.proj(images).flatten(2).transpose(1, 2)
        return torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1) + self.pos_embed


@mistake("ImageEmbeddings", "the class token is missing")
class NoToken(reference.ImageEmbeddings):
    def __init__(self, config):
        super().__init__(config)
        del self.cls_token


@mistake("ImageEmbeddings", "the positions are missing")
class NoPositionsAtAll(reference.ImageEmbeddings):
    def __init__(self, config):
        super().__init__(config)
        del self.pos_embed


# ---- 5.6 EncoderAttention --------------------------------------------------------------------------------------------


@mistake("EncoderAttention", "there is a causal mask; a picture has no future, so a patch may look at every patch")
class Causal(reference.EncoderAttention):
    def forward(self, x):
        q, k, v = (split_heads(project(x), self.n_heads) for project in (self.wq, self.wk, self.wv))
        mask = causal_mask(x.shape[1], x.shape[1])
        return self.wo(merge_heads(scaled_dot_product_attention(q, k, v, mask)))


@mistake("EncoderAttention", "the projections have no bias, as in Llama; ViT's have one")
class NoBias(reference.EncoderAttention):
    def __init__(self, config):
        super().__init__(config)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(4))


@mistake("EncoderAttention", "there is one head of the whole width: the features were not split into heads")
class OneHead(reference.EncoderAttention):
    def __init__(self, config):
        super().__init__(config)
        self.n_heads = 1


@mistake("EncoderAttention", "the scores are not divided by the square root of the head's width")
class Unscaled(reference.EncoderAttention):
    def forward(self, x):
        q, k, v = (split_heads(project(x), self.n_heads) for project in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads((q @ k.transpose(-2, -1)).softmax(-1) @ v))


@mistake("EncoderAttention", "the output projection wo is missing")
class NoOutputProjection(reference.EncoderAttention):
    def forward(self, x):
        q, k, v = (split_heads(project(x), self.n_heads) for project in (self.wq, self.wk, self.wv))
        return merge_heads(scaled_dot_product_attention(q, k, v))


@mistake("EncoderAttention", "the heads were merged without first moving their axis next to the features")
class MergedByView(reference.EncoderAttention):
    def forward(self, x):
        q, k, v = (split_heads(project(x), self.n_heads) for project in (self.wq, self.wk, self.wv))
        return self.wo(scaled_dot_product_attention(q, k, v).reshape(x.shape))


# ---- 5.7 MLP ---------------------------------------------------------------------------------------------------------


@mistake("MLP", "the activation is ReLU instead of GELU")
class Relu(reference.MLP):
    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


@mistake("MLP", "it is always the exact GELU, whatever the config says")
class AlwaysExact(reference.MLP):
    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


@mistake("MLP", "it is always GELU's tanh approximation, whatever the config says")
class AlwaysTanh(reference.MLP):
    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


@mistake("MLP", "the activation is SiLU, as in Llama, instead of GELU")
class Silu(reference.MLP):
    def forward(self, x):
        return self.fc2(F.silu(self.fc1(x)))


@mistake("MLP", "there is a second GELU after fc2")
class GeluTwice(reference.MLP):
    def forward(self, x):
        return F.gelu(super().forward(x), approximate=self.approximate)


@mistake("MLP", "x is added inside of the MLP; the block adds the residual")
class ResidualInside(reference.MLP):
    def forward(self, x):
        return x + super().forward(x)


@mistake("MLP", "the hidden width is four times dim instead of the config's hidden_dim")
class FourTimes(reference.MLP):
    def __init__(self, config):
        super().__init__(config)
        self.fc1, self.fc2 = nn.Linear(config.dim, 4 * config.dim), nn.Linear(4 * config.dim, config.dim)


# ---- 5.8 ViTBlock ----------------------------------------------------------------------------------------------------


@mistake("ViTBlock", "that is post-norm: the norms come after the additions, as in the first transformer")
class PostNorm(reference.ViTBlock):
    def forward(self, x):
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


@mistake(
    "ViTBlock", "attention and MLP read the same input; the MLP must read the sum that includes attention's output"
)
class Parallel(reference.ViTBlock):
    def forward(self, x):
        return x + self.attn(self.norm1(x)) + self.mlp(self.norm2(x))


@mistake("ViTBlock", "the second residual is missing")
class NoSecondResidual(reference.ViTBlock):
    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return self.mlp(self.norm2(x))


@mistake("ViTBlock", "the residual is the normalised x; it must be x itself")
class ResidualFromNorm(reference.ViTBlock):
    def forward(self, x):
        h = self.norm1(x)
        x = h + self.attn(h)
        h = self.norm2(x)
        return h + self.mlp(h)


@mistake("ViTBlock", "norm1 is used twice and norm2 never")
class OneNormTwice(reference.ViTBlock):
    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm1(x))


@mistake("ViTBlock", "the norms use PyTorch's default epsilon of 1e-5 instead of the config's eps")
class DefaultEpsilon(reference.ViTBlock):
    def __init__(self, config):
        super().__init__(config)
        self.norm1, self.norm2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)


# ---- 5.9 VisionTransformer -------------------------------------------------------------------------------------------


class _Model(reference.VisionTransformer):
    def encode(self, images):
        x = self.embeddings(images)
        for block in self.blocks:
            x = block(x)
        return x

    def pool(self, x):
        return x[:, 0] if self.config.pooling == "token" else x[:, 1:].mean(1)


@mistake("VisionTransformer", "the last norm is missing")
class NoLastNorm(_Model):
    def forward(self, images):
        return self.head(self.pool(self.encode(images)))


@mistake("VisionTransformer", "the mean includes the class token; it should be over the N patches only")
class MeanWithToken(_Model):
    def forward(self, images):
        x = self.norm(self.encode(images))
        return self.head(x[:, 0] if self.config.pooling == "token" else x.mean(1))


@mistake("VisionTransformer", "the class token is used whatever the config's pooling says")
class AlwaysToken(_Model):
    def forward(self, images):
        return self.head(self.norm(self.encode(images))[:, 0])


@mistake("VisionTransformer", "the last token is used as the class token, which is the first")
class LastToken(_Model):
    def forward(self, images):
        x = self.norm(self.encode(images))
        return self.head(x[:, -1] if self.config.pooling == "token" else x[:, 1:].mean(1))


@mistake("VisionTransformer", "the mean is taken before the norm, as timm does; the contract takes it after")
class MeanBeforeNorm(_Model):
    def forward(self, images):
        return self.head(self.norm(self.pool(self.encode(images))))


@mistake("VisionTransformer", "the last norm uses PyTorch's default epsilon of 1e-5 instead of the config's eps")
class LastNormDefaultEpsilon(reference.VisionTransformer):
    def __init__(self, config):
        super().__init__(config)
        self.norm = nn.LayerNorm(config.dim)


@mistake("VisionTransformer", "all layers share one block: [block] * L repeats the same module")
class SharedBlock(reference.VisionTransformer):
    def __init__(self, config):
        super().__init__(config)
        self.blocks = nn.ModuleList([reference.ViTBlock(config)] * config.n_layers)


@mistake("VisionTransformer", "the logits went through a softmax; cross-entropy applies it itself")
class Probabilities(reference.VisionTransformer):
    def forward(self, images):
        return super().forward(images).softmax(-1)


@mistake(
    "VisionTransformer",
    "no block is registered, so neither the optimizer nor state_dict knows about them: "
    "`self.blocks` is a plain list, or missing",
)
class PlainList(reference.VisionTransformer):
    def __init__(self, config):
        super().__init__(config)
        del self.blocks
        self.blocks = [reference.ViTBlock(config) for _ in range(config.n_layers)]


@mistake("VisionTransformer", "there is one block too few: the config asks for n_layers of them")
class OneBlockTooFew(reference.VisionTransformer):
    def __init__(self, config):
        super().__init__(config)
        self.blocks = nn.ModuleList([reference.ViTBlock(config) for _ in range(config.n_layers - 1)])


# ---- 5.10 count_parameters -------------------------------------------------------------------------------------------


@mistake(
    "count_parameters", "the count is C too small: the class token, or its row among the 1 + N positions, is missing"
)
def without_token(config):
    return reference.count_parameters(config) - config.dim


@mistake("count_parameters", "the biases of the linear layers are not counted")
def without_biases(config):
    block = 5 * config.dim + config.hidden_dim  # q, k, v, o and fc2; fc1
    return reference.count_parameters(config) - config.n_layers * block - config.dim - config.n_classes


@mistake("count_parameters", "the last norm is not counted")
def without_last_norm(config):
    return reference.count_parameters(config) - 2 * config.dim


@mistake("count_parameters", "the head is not counted")
def without_head(config):
    return reference.count_parameters(config) - (config.dim + 1) * config.n_classes


@mistake("count_parameters", "a norm has a weight and a bias; only one was counted")
def norms_without_bias(config):
    return reference.count_parameters(config) - (2 * config.n_layers + 1) * config.dim


@mistake("count_parameters", "the hidden width is taken to be 4 times dim, which is wrong for g/14 and G/14")
def four_times_dim(config):
    wrong = 4 * config.dim - config.hidden_dim
    return reference.count_parameters(config) + config.n_layers * wrong * (2 * config.dim + 1)


@mistake("count_parameters", "a model was built just to count its parameters")
def built(config):
    return sum(p.numel() for p in reference.VisionTransformer(config).parameters())


@mistake("count_parameters", "the number is right, but it is a float and should be an int")
def count_as_a_float(config):
    return float(reference.count_parameters(config))


# ---- 5.11 convert_hf_state_dict --------------------------------------------------------------------------------------


@mistake("convert_hf_state_dict", "queries and keys are exchanged")
def hf_queries_for_keys(state_dict, config):
    out = reference.convert_hf_state_dict(state_dict, config)
    return {name.replace("wq", "w?").replace("wk", "wq").replace("w?", "wk"): w for name, w in out.items()}


@mistake("convert_hf_state_dict", "the linear weights were transposed; both models store [out, in]")
def hf_transposed(state_dict, config):
    out = reference.convert_hf_state_dict(state_dict, config)
    return {name: w.T if w.ndim == 2 else w for name, w in out.items()}


@mistake("convert_hf_state_dict", "it stops at the first wrong tensor instead of listing all of them")
def hf_first_only(state_dict, config):
    try:
        return reference.convert_hf_state_dict(state_dict, config)
    except ValueError as error:
        raise ValueError(str(error).splitlines()[1]) from None


@mistake("convert_hf_state_dict", "only names are compared, not shapes")
def hf_shapes_unchecked(state_dict, config):
    theirs, names = modern_hf_names(state_dict), hf_names(config)
    wrong = sorted(set(theirs) ^ set(names.values()))
    if wrong:
        raise ValueError(f"missing or extra: {wrong}")
    return {ours: theirs[name] for ours, name in names.items()}


@mistake("convert_hf_state_dict", "extra tensors are dropped silently")
def hf_extra_dropped(state_dict, config):
    wanted = set(hf_names(config).values())
    return reference.convert_hf_state_dict(
        {k: v for k, v in modern_hf_names(state_dict).items() if k in wanted}, config
    )


@mistake(
    "convert_hf_state_dict", "norm1 and norm2 are exchanged: layernorm_after comes after attention, so before the MLP"
)
def hf_norms_exchanged(state_dict, config):
    out = reference.convert_hf_state_dict(state_dict, config)
    return {
        name.replace("norm1", "norm?").replace("norm2", "norm1").replace("norm?", "norm2"): w for name, w in out.items()
    }


@mistake("convert_hf_state_dict", "version 4's names are not renamed: see modern_hf_names")
def hf_new_names_only(state_dict, config):
    missing = set(hf_names(config).values()) - set(state_dict)
    if len(missing) > 3:
        raise ValueError(f"missing: {sorted(missing)}")
    return reference.convert_hf_state_dict(state_dict, config)


# ---- 5.12 convert_timm_state_dict ------------------------------------------------------------------------------------


def _resplit(state_dict, config, cut):
    """The reference's answer with every fused projection cut by ``cut`` into three."""
    out = reference.convert_timm_state_dict(state_dict, config)
    for i in range(config.n_layers):
        for leaf in ("weight", "bias"):
            thirds = cut(state_dict[f"blocks.{i}.attn.qkv.{leaf}"])
            out |= {f"blocks.{i}.attn.w{which}.{leaf}": third for which, third in zip("qkv", thirds, strict=True)}
    return out


@mistake(
    "convert_timm_state_dict",
    "every third row was taken: the rows of all queries come first, then all keys, then all values",
)
def timm_interleaved(state_dict, config):
    return _resplit(state_dict, config, lambda w: (w[0::3], w[1::3], w[2::3]))


@mistake(
    "convert_timm_state_dict", "qkv is split head by head, as in GPT-NeoX; in timm the rows of all queries come first"
)
def timm_by_head(state_dict, config):
    return _resplit(
        state_dict,
        config,
        lambda w: tuple(rearrange(w, "(h three d) ... -> three (h d) ...", h=config.n_heads, three=3)),
    )


@mistake("convert_timm_state_dict", "keys are taken for queries: the order in qkv is queries, keys, values")
def timm_keys_first(state_dict, config):
    return _resplit(state_dict, config, lambda w: (w.chunk(3)[1], w.chunk(3)[0], w.chunk(3)[2]))


@mistake("convert_timm_state_dict", "the fused tensors were popped from the caller's dict")
def timm_pops(state_dict, config):
    out = reference.convert_timm_state_dict(state_dict, config)
    for name in [name for name in state_dict if ".qkv." in name]:
        del state_dict[name]
    return out


@mistake("convert_timm_state_dict", "it stops at the first wrong tensor instead of listing all of them")
def timm_first_only(state_dict, config):
    try:
        return reference.convert_timm_state_dict(state_dict, config)
    except ValueError as error:
        raise ValueError(str(error).splitlines()[1]) from None


@mistake(
    "convert_timm_state_dict",
    "a qkv that cannot be cut into three stops the conversion; one error should name everything that is wrong",
)
def timm_strict_cut(state_dict, config):
    for i in range(config.n_layers):
        for leaf in ("weight", "bias"):
            fused = state_dict.get(f"blocks.{i}.attn.qkv.{leaf}")
            if fused is not None and len(fused.chunk(3)) != 3:
                raise ValueError("zip() argument 2 is shorter than argument 1")
    return reference.convert_timm_state_dict(state_dict, config)


# ---- 5.13 resize_positions -------------------------------------------------------------------------------------------


def _resize(patches, old, new, **how):
    grid = rearrange(patches, "one (row column) c -> one c row column", row=old[0])
    return F.interpolate(grid, new, **how).flatten(2).transpose(1, 2)


@mistake("resize_positions", "the interpolation is bilinear; the contract says bicubic")
def resized_bilinear(pos_embed, old_grid, new_grid):
    reference.resize_positions(pos_embed, old_grid, new_grid)
    return torch.cat([pos_embed[:, :1], _resize(pos_embed[:, 1:], old_grid, new_grid, mode="bilinear")], dim=1)


@mistake("resize_positions", "the interpolation aligned the corners (align_corners=True)")
def resized_corners_aligned(pos_embed, old_grid, new_grid):
    reference.resize_positions(pos_embed, old_grid, new_grid)
    resized = _resize(pos_embed[:, 1:], old_grid, new_grid, mode="bicubic", align_corners=True)
    return torch.cat([pos_embed[:, :1], resized], dim=1)


@mistake("resize_positions", "the class token was interpolated too: all 1 + N rows were resized as one line")
def resized_with_token(pos_embed, old_grid, new_grid):
    reference.resize_positions(pos_embed, old_grid, new_grid)
    n = 1 + new_grid[0] * new_grid[1]
    return F.interpolate(pos_embed.transpose(1, 2)[:, :, None], (1, n), mode="bicubic")[:, :, 0].transpose(1, 2)


@mistake("resize_positions", "the class token's position is missing")
def resized_without_token(pos_embed, old_grid, new_grid):
    return reference.resize_positions(pos_embed, old_grid, new_grid)[:, 1:]


@mistake("resize_positions", "the class token's position was put last")
def resized_token_last(pos_embed, old_grid, new_grid):
    return reference.resize_positions(pos_embed, old_grid, new_grid).roll(-1, dims=1)


@mistake("resize_positions", "rows and columns of the grid are exchanged")
def resized_transposed(pos_embed, old_grid, new_grid):
    reference.resize_positions(pos_embed, old_grid, new_grid)
    grid = rearrange(pos_embed[:, 1:], "one (column row) c -> one c row column", row=old_grid[0])
    resized = F.interpolate(grid, tuple(new_grid), mode="bicubic").flatten(2).transpose(1, 2)
    return torch.cat([pos_embed[:, :1], resized], dim=1)


@mistake("resize_positions", "antialiasing is on, as in timm; it gives different numbers")
def resized_antialiased(pos_embed, old_grid, new_grid):
    reference.resize_positions(pos_embed, old_grid, new_grid)
    resized = _resize(pos_embed[:, 1:], old_grid, new_grid, mode="bicubic", antialias=True)
    return torch.cat([pos_embed[:, :1], resized], dim=1)


@mistake("resize_positions", "the number of positions is not compared with the grid")
def resized_unchecked(pos_embed, old_grid, new_grid):
    side = old_grid[1] if (pos_embed.shape[1] - 1) % old_grid[0] == 0 else 1
    old = ((pos_embed.shape[1] - 1) // side, side)
    if old[0] * old[1] != pos_embed.shape[1] - 1:
        return pos_embed
    return reference.resize_positions(pos_embed, old, new_grid)
