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
from lib.attention import merge_heads, scaled_dot_product_attention, split_heads


def patchify_unfold(images: Float[Tensor, "b ch height width"], patch: int) -> Float[Tensor, "b n ch_p_p"]:
    """Cut images into patches, with a sliding window that steps by its own size. (Exercise 5.1)

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
    raise NotImplementedError("Exercise 5.1: write patchify_unfold")


def patchify_einops(images: Shaped[Tensor, "b ch height width"], patch: int) -> Shaped[Tensor, "b n ch_p_p"]:
    """The same cut as one rearrangement of axes. (Exercise 5.2)

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
    raise NotImplementedError("Exercise 5.2: write patchify_einops")


def unpatchify(
    patches: Float[Tensor, "b n ch_p_p"], patch: int, height: int, width: int
) -> Float[Tensor, "b ch height width"]:
    """Put the patches back together: the exact inverse. (Exercise 5.3)

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
    raise NotImplementedError("Exercise 5.3: write unpatchify")


def conv_from_linear(weight: Float[Tensor, "c ch_p_p"], channels: int, patch: int) -> Float[Tensor, "c ch p p"]:
    """Turn the matrix that projects patches into a convolution kernel that does the same to the image. (Exercise 5.4)

    Size: 10 minutes, difficulty 2, core.

    Args:
        weight: Weight ``[C, ch*P*P]`` of an ``nn.Linear`` from a patch to the model width.
        channels: Number ch of channels.
        patch: Side P of a patch.

    Returns:
        ``[C, ch, P, P]``, for ``F.conv2d(images, kernel, stride=patch)``.
    """
    raise NotImplementedError("Exercise 5.4: write conv_from_linear")


class ImageEmbeddings(nn.Module):
    """Project the patches, put a class token before them, and add a learned position to each. (Exercise 5.5)

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
        raise NotImplementedError("Exercise 5.5: write ImageEmbeddings.__init__")

    def forward(self, images: Float[Tensor, "b ch height width"]) -> Float[Tensor, "b n_plus_1 c"]:
        """``[B, ch, height, width]`` to ``[B, 1 + N, C]``.

        Raises:
            ValueError: the sides or channels of the images differ from the config's; the message shows
                ``[ch, height, width]`` of the images and of the config.
        """
        raise NotImplementedError("Exercise 5.5: write ImageEmbeddings.forward")


class EncoderAttention(nn.Module):
    """Attention in which every token sees every other token. (Exercise 5.6)

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
        raise NotImplementedError("Exercise 5.6: write EncoderAttention.__init__")

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        """``[B, T, C]`` to ``[B, T, C]``; there is no mask."""
        raise NotImplementedError("Exercise 5.6: write EncoderAttention.forward")


class MLP(nn.Module):
    """Two linear layers with a GELU between them, applied to each token separately. (Exercise 5.7)

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
        raise NotImplementedError("Exercise 5.7: write MLP.__init__")

    def forward(self, x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
        """``[..., C]`` to ``[..., C]``."""
        raise NotImplementedError("Exercise 5.7: write MLP.forward")


class ViTBlock(nn.Module):
    """Attention, then an MLP; each reads its input through a LayerNorm and adds its output to the input. (Exercise 5.8)

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
        raise NotImplementedError("Exercise 5.8: write ViTBlock.__init__")

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        """``[B, T, C]`` to ``[B, T, C]``; ``x`` is left unchanged."""
        raise NotImplementedError("Exercise 5.8: write ViTBlock.forward")


class VisionTransformer(nn.Module):
    """The whole model: takes images, returns one score per class. (Exercise 5.9)

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
        raise NotImplementedError("Exercise 5.9: write VisionTransformer.__init__")

    def forward(self, images: Float[Tensor, "b ch height width"]) -> Float[Tensor, "b n_classes"]:
        """Logits ``[B, n_classes]`` of images ``[B, ch, height, width]``."""
        raise NotImplementedError("Exercise 5.9: write VisionTransformer.forward")


def count_parameters(config: ViTConfig) -> int:
    """Number of parameters of the model, without building it. (Exercise 5.10)

    Size: 15 minutes, difficulty 2, warm-up.

    Args:
        config: Sizes.

    Returns:
        Exactly the number of elements in all parameters of ``VisionTransformer(config)``.

    Cost: arithmetic on the config; under 64 MB even for G/14.
    """
    raise NotImplementedError("Exercise 5.10: write count_parameters")


def convert_hf_state_dict(state_dict: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Rename Transformers' weights to our names. (Exercise 5.11)

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
    raise NotImplementedError("Exercise 5.11: write convert_hf_state_dict")


def convert_timm_state_dict(state_dict: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Rename timm's weights to our names, and split its fused projections. (Exercise 5.12)

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
    raise NotImplementedError("Exercise 5.12: write convert_timm_state_dict")


def resize_positions(
    pos_embed: Float[Tensor, "1 n_plus_1 c"], old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Float[Tensor, "1 m_plus_1 c"]:
    """Interpolate the learned positions for images of another size. (Exercise 5.13)

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
    raise NotImplementedError("Exercise 5.13: write resize_positions")
