"""The vision transformer: cuts an image into patches and reads them as words."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from lib.given.models.vit import TINY as TINY
from lib.given.models.vit import VIT_B_16 as VIT_B_16
from lib.given.models.vit import VIT_GIANT_14 as VIT_GIANT_14
from lib.given.models.vit import VIT_GIGANTIC_14 as VIT_GIGANTIC_14
from lib.given.models.vit import VIT_H_14 as VIT_H_14
from lib.given.models.vit import VIT_L_16 as VIT_L_16
from lib.given.models.vit import ViTConfig, hf_names, modern_hf_names, timm_names
from solutions.attention import merge_heads, scaled_dot_product_attention, split_heads


### BEGIN SOLUTION
def _check_sides(height: int, width: int, patch: int) -> None:
    for name, side in (("height", height), ("width", width)):
        if side % patch:
            raise ValueError(
                f"{name} {side} is not a multiple of patch {patch}: {side} = {side // patch} x {patch} + {side % patch}"
            )


### END SOLUTION
def patchify_unfold(images: Float[Tensor, "b ch height width"], patch: int) -> Float[Tensor, "b n ch_p_p"]:
    """Cut images into patches, with a sliding window that steps by its own size. (Exercise)

    Size: 15 minutes, difficulty 2, warm-up.

    Args:
        images: ``[B, ch, height, width]``.
        patch: Side P of a patch, in pixels.

    Returns:
        ``[B, N, ch*P*P]``: patches row by row from the top left; inside of a patch first all of channel 0 (row by row),
        then channel 1, and so on.

    Raises:
        ValueError: a side is not a multiple of ``patch``; the message shows the arithmetic, as in
            "10 = 2 x 4 + 2".

    Source: Dosovitskiy and others (arXiv:2010.11929), section 3.1.
    Convention: the channel comes first inside of a patch, as in PyTorch's convolutions; in the paper's own code (JAX)
        it comes last.
    """
    ### BEGIN SOLUTION
    _check_sides(images.shape[2], images.shape[3], patch)
    return F.unfold(images, kernel_size=patch, stride=patch).transpose(1, 2)
    ### END SOLUTION


def patchify_einops(images: Shaped[Tensor, "b ch height width"], patch: int) -> Shaped[Tensor, "b n ch_p_p"]:
    """The same cut as one rearrangement of axes. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        images: ``[B, ch, height, width]``, of any dtype.
        patch: Side P of a patch, in pixels.

    Returns:
        The same as ``patchify_unfold``.

    Raises:
        ValueError: a side is not a multiple of ``patch``; the message shows the arithmetic, as in
            "10 = 2 x 4 + 2".
    """
    ### BEGIN SOLUTION
    _check_sides(images.shape[2], images.shape[3], patch)
    return rearrange(images, "b ch (row p1) (column p2) -> b (row column) (ch p1 p2)", p1=patch, p2=patch)
    ### END SOLUTION


def unpatchify(
    patches: Float[Tensor, "b n ch_p_p"], patch: int, height: int, width: int
) -> Float[Tensor, "b ch height width"]:
    """Put the patches back together: the exact inverse. (Exercise)

    Size: 20 minutes, difficulty 2, stretch.

    Args:
        patches: ``[B, N, ch*P*P]``.
        patch: Side P of a patch.
        height: Height of the image, in pixels.
        width: Width of the image, in pixels.

    Returns:
        ``[B, ch, height, width]``.

    Raises:
        ValueError: a side is not a multiple of ``patch``, or N patches do not fill the image; the message shows the
            arithmetic.
    """
    ### BEGIN SOLUTION
    _check_sides(height, width, patch)
    rows, columns = height // patch, width // patch
    if patches.shape[1] != rows * columns:
        raise ValueError(
            f"{height} x {width} takes {rows} x {columns} = {rows * columns} patches, got {patches.shape[1]}"
        )
    pattern = "b (row column) (ch p1 p2) -> b ch (row p1) (column p2)"
    return rearrange(patches, pattern, row=rows, p1=patch, p2=patch)
    ### END SOLUTION


def conv_from_linear(weight: Float[Tensor, "c ch_p_p"], channels: int, patch: int) -> Float[Tensor, "c ch p p"]:
    """Turn the matrix that projects patches into a convolution kernel that does the same to the image. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        weight: Weight ``[C, ch*P*P]`` of an ``nn.Linear`` from a patch to the model width.
        channels: Number ch of channels.
        patch: Side P of a patch.

    Returns:
        ``[C, ch, P, P]``, for ``F.conv2d(images, kernel, stride=patch)``.
    """
    ### BEGIN SOLUTION
    return rearrange(weight, "c (ch p1 p2) -> c ch p1 p2", ch=channels, p1=patch)
    ### END SOLUTION


class ImageEmbeddings(nn.Module):
    """Project the patches, put a class token before them, and add a learned position to each. (Exercise)

    Size: 20 minutes, difficulty 2, core.

    Args:
        config: Sizes.

    Attributes:
        proj: ``nn.Conv2d`` from ch channels to C, with kernel size and stride P and a bias.
        cls_token: Parameter ``[1, 1, C]``, initially zero.
        pos_embed: Parameter ``[1, 1 + N, C]``, initially normal with standard deviation 0.02; row 0 belongs to the
            class token.

    Source: Dosovitskiy and others (arXiv:2010.11929), equation (1).
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        ### BEGIN SOLUTION
        self.proj = nn.Conv2d(config.channels, config.dim, config.patch_size, stride=config.patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + config.n_patches, config.dim))
        ### END SOLUTION

    def forward(self, images: Float[Tensor, "b ch height width"]) -> Float[Tensor, "b n_plus_1 c"]:
        """``[B, ch, height, width]`` to ``[B, 1 + N, C]``.

        Raises:
            ValueError: the sides or channels of the images differ from the config's; the message shows
                ``[ch, height, width]`` of the images and of the config.
        """
        ### BEGIN SOLUTION
        wanted = [self.config.channels, self.config.image_size, self.config.image_size]
        if list(images.shape[1:]) != wanted:
            raise ValueError(f"images of [ch, height, width] = {list(images.shape[1:])}, expected {wanted}")
        patches = rearrange(self.proj(images), "b c row column -> b (row column) c")
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1)
        return tokens + self.pos_embed
        ### END SOLUTION


class EncoderAttention(nn.Module):
    """Attention in which every token sees every other token. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        config: Sizes.

    Attributes:
        wq: ``nn.Linear`` from C to C with a bias, for the queries.
        wk: The same for the keys.
        wv: The same for the values.
        wo: The same, applied after the heads are merged.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.n_heads = config.n_heads
        ### BEGIN SOLUTION
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.dim, config.dim) for _ in range(4))
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        """``[B, T, C]`` to ``[B, T, C]``; there is no mask."""
        ### BEGIN SOLUTION
        q, k, v = (split_heads(project(x), self.n_heads) for project in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(scaled_dot_product_attention(q, k, v)))
        ### END SOLUTION


class MLP(nn.Module):
    """Two linear layers with a GELU between them, applied to each token separately. (Exercise)

    Size: 5 minutes, difficulty 1, warm-up.

    Args:
        config: Sizes, and ``gelu``: "exact" is the form with the error function, "tanh" its approximation.

    Attributes:
        fc1: ``nn.Linear`` from C to F with a bias.
        fc2: ``nn.Linear`` from F to C with a bias.

    Source: Hendrycks and Gimpel (arXiv:1606.08415), section 2.
    Convention: timm and Transformers use the exact form, the vision transformer's own code (JAX) the approximation.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        ### BEGIN SOLUTION
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.fc1 = nn.Linear(config.dim, config.hidden_dim)
        self.fc2 = nn.Linear(config.hidden_dim, config.dim)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """``[..., C]`` to ``[..., C]``."""
        ### BEGIN SOLUTION
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))
        ### END SOLUTION


class ViTBlock(nn.Module):
    """Attention, then an MLP; each reads its input through a LayerNorm and adds its output to the input. (Exercise)

    Size: 10 minutes, difficulty 1, core.

    Args:
        config: Sizes; both LayerNorms use ``eps``.

    Attributes:
        norm1: ``nn.LayerNorm`` before ``attn``, which is an ``EncoderAttention``.
        norm2: ``nn.LayerNorm`` before ``mlp``, which is an ``MLP``.

    Source: Dosovitskiy and others (arXiv:2010.11929), equations (2) and (3).
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        ### BEGIN SOLUTION
        self.norm1 = nn.LayerNorm(config.dim, eps=config.eps)
        self.attn = EncoderAttention(config)
        self.norm2 = nn.LayerNorm(config.dim, eps=config.eps)
        self.mlp = MLP(config)
        ### END SOLUTION

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        """``[B, T, C]`` to ``[B, T, C]``; ``x`` is left unchanged."""
        ### BEGIN SOLUTION
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))
        ### END SOLUTION


class VisionTransformer(nn.Module):
    """The whole model: takes images, returns one score per class. (Exercise)

    Size: 20 minutes, difficulty 2, core.

    Args:
        config: Sizes, and ``pooling``: the head reads, after ``norm``, either the class "token" or the "mean" of the N
            patches, without the class token.

    Attributes:
        embeddings: ``ImageEmbeddings``.
        blocks: ``nn.ModuleList`` of L ``ViTBlock``.
        norm: ``nn.LayerNorm`` after the last block.
        head: ``nn.Linear`` from C to the number of classes, with a bias.

    Source: Dosovitskiy and others (arXiv:2010.11929), equation (4).
    Convention: the mean is taken after the norm, as in Google's big_vision; timm takes it before.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        ### BEGIN SOLUTION
        self.embeddings = ImageEmbeddings(config)
        self.blocks = nn.ModuleList(ViTBlock(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.dim, eps=config.eps)
        self.head = nn.Linear(config.dim, config.n_classes)
        ### END SOLUTION

    def forward(self, images: Float[Tensor, "b ch height width"]) -> Float[Tensor, "b n_classes"]:
        """Logits ``[B, n_classes]`` of images ``[B, ch, height, width]``."""
        ### BEGIN SOLUTION
        x = self.embeddings(images)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.config.pooling == "token" else x[:, 1:].mean(dim=1))
        ### END SOLUTION


def count_parameters(config: ViTConfig) -> int:
    """Number of parameters of the model, without building it. (Exercise)

    Size: 15 minutes, difficulty 2, warm-up.

    Args:
        config: Sizes.

    Returns:
        Exactly the number of elements in all parameters of ``VisionTransformer(config)``.

    Cost: arithmetic on the config; under 64 MB even for G/14.
    """
    ### BEGIN SOLUTION
    C, F_ = config.dim, config.hidden_dim  # noqa: N806
    embeddings = (config.patch_dim + 1) * C + C + (1 + config.n_patches) * C
    block = 4 * (C + 1) * C + (C + 1) * F_ + (F_ + 1) * C + 2 * 2 * C
    return embeddings + config.n_layers * block + 2 * C + (C + 1) * config.n_classes
    ### END SOLUTION


### BEGIN SOLUTION
def _rename(state_dict: Mapping[str, Tensor], config: ViTConfig, names: dict[str, str]) -> dict[str, Tensor]:
    """Rename tensors to our names, or raise one error that lists everything that is wrong."""
    with torch.device("meta"):
        wanted = {ours: list(tensor.shape) for ours, tensor in VisionTransformer(config).state_dict().items()}
    problems = [f"{name} is extra" for name in sorted(state_dict.keys() - set(names.values()))]
    for ours, theirs in names.items():
        if theirs not in state_dict:
            problems.append(f"{theirs} is missing")
        elif list(state_dict[theirs].shape) != wanted[ours]:
            problems.append(f"{theirs} is {list(state_dict[theirs].shape)}, expected {wanted[ours]}")
    if problems:
        raise ValueError(f"{len(problems)} tensors do not fit the config:\n  " + "\n  ".join(problems))
    return {ours: state_dict[theirs] for ours, theirs in names.items()}


### END SOLUTION
def convert_hf_state_dict(state_dict: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Rename Transformers' weights to our names. (Exercise)

    Size: 15 minutes, difficulty 2, stretch.

    Args:
        state_dict: State dict of a ``ViTForImageClassification``.
            It may have the names of Transformers 4, so the function passes it through ``modern_hf_names`` first.
        config: Sizes that the weights should have; ``hf_names(config)`` maps each of our names to theirs.

    Returns:
        A state dict for ``VisionTransformer(config).load_state_dict``.

    Raises:
        ValueError: a tensor is missing, extra or has the wrong shape; one message names all of them, by Transformers'
            names.
    """
    ### BEGIN SOLUTION
    return _rename(modern_hf_names(state_dict), config, hf_names(config))
    ### END SOLUTION


def convert_timm_state_dict(state_dict: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Rename timm's weights to our names, and split its fused projections. (Exercise)

    Size: 20 minutes, difficulty 2, stretch.

    Args:
        state_dict: State dict of a ``timm.models.VisionTransformer``; left unchanged.
            ``blocks.{i}.attn.qkv.weight``, ``[3C, C]``, contains the rows of all queries, then of all keys, then of all
            values; its bias ``[3C]`` likewise.
        config: Sizes that the weights should have; ``timm_names(config)`` maps each of our other names to theirs.

    Returns:
        A state dict for ``VisionTransformer(config).load_state_dict``.

    Raises:
        ValueError: a tensor is missing, extra or has the wrong shape; one message names all of them, by timm's names.
    """
    ### BEGIN SOLUTION
    names, split = timm_names(config), dict(state_dict)
    for i in range(config.n_layers):
        for part in ("weight", "bias"):
            fused = f"blocks.{i}.attn.qkv.{part}"
            names |= {f"blocks.{i}.attn.w{which}.{part}": f"{fused} ({which})" for which in "qkv"}
            if fused in split:
                thirds = split.pop(fused).chunk(3)
                split |= {f"{fused} ({which})": third for which, third in zip("qkv", thirds, strict=False)}
    return _rename(split, config, names)
    ### END SOLUTION


def resize_positions(
    pos_embed: Float[Tensor, "1 n_plus_1 c"], old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Float[Tensor, "1 m_plus_1 c"]:
    """Interpolate the learned positions for images of another size. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        pos_embed: ``[1, 1 + N, C]``; row 0 belongs to the class token.
        old_grid: Rows and columns of the N patches.
        new_grid: Rows and columns of the result.

    Returns:
        ``[1, 1 + rows*columns, C]``: row 0 unchanged, the others by bicubic interpolation without aligned corners.

    Raises:
        ValueError: N is not rows times columns of ``old_grid``; the message shows the arithmetic.

    Source: Dosovitskiy and others (arXiv:2010.11929), section 3.2.
    Convention: plain bicubic, as in Transformers; timm turns antialiasing on, which gives slightly different numbers.
    """
    ### BEGIN SOLUTION
    (rows, columns), n = old_grid, pos_embed.shape[1] - 1
    if n != rows * columns:
        raise ValueError(f"{rows} x {columns} = {rows * columns} positions, but pos_embed has 1 + {n}")
    grid = rearrange(pos_embed[:, 1:], "one (row column) c -> one c row column", row=rows)
    resized = F.interpolate(grid, size=tuple(new_grid), mode="bicubic", align_corners=False)
    return torch.cat([pos_embed[:, :1], rearrange(resized, "one c row column -> one (row column) c")], dim=1)
    ### END SOLUTION
