"""Sizes of vision transformers, and the names of their weights in other libraries."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

POOLINGS = ("token", "mean")
GELUS = ("exact", "tanh")


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """One vision transformer.

    Attributes:
        image_size: Side of the square image, in pixels; a multiple of ``patch_size``.
        patch_size: Side P of a patch, in pixels.
        channels: 1 for grayscale, 3 for colour.
        n_classes: Width of the output.
        dim: Model width C; a multiple of ``n_heads``.
        n_layers: Number L of blocks.
        n_heads: Number H of attention heads.
        hidden_dim: Width F inside the MLP.
        eps: Added to the variance in every LayerNorm: 1e-6 in the paper's code and in timm, 1e-12 in Transformers.
        pooling: What the head reads: the class "token", or the "mean" of the patches.
        gelu: "exact", as in timm and Transformers, or the "tanh" approximation, as in the paper's code.
    """

    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    n_classes: int = 1000
    dim: int
    n_layers: int
    n_heads: int
    hidden_dim: int
    eps: float = 1e-6
    pooling: str = "token"
    gelu: str = "exact"

    def __post_init__(self):
        for wide, narrow in (("image_size", "patch_size"), ("dim", "n_heads")):
            n, d = getattr(self, wide), getattr(self, narrow)
            if n % d:
                raise ValueError(f"{wide} = {n} is not a multiple of {narrow} = {d}: {n} = {n // d} x {d} + {n % d}")
        for name, allowed in (("pooling", POOLINGS), ("gelu", GELUS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r} is none of {', '.join(allowed)}")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        side = self.image_size // self.patch_size
        return side, side

    @property
    def n_patches(self) -> int:
        """Number N of patches."""
        return self.grid[0] * self.grid[1]

    @property
    def patch_dim(self) -> int:
        """Numbers in one patch, ch*P*P."""
        return self.channels * self.patch_size**2


VIT_B_16 = ViTConfig(dim=768, n_layers=12, n_heads=12, hidden_dim=3072)
VIT_L_16 = ViTConfig(dim=1024, n_layers=24, n_heads=16, hidden_dim=4096)
VIT_H_14 = ViTConfig(patch_size=14, dim=1280, n_layers=32, n_heads=16, hidden_dim=5120)
VIT_GIANT_14 = ViTConfig(patch_size=14, dim=1408, n_layers=40, n_heads=16, hidden_dim=6144)
VIT_GIGANTIC_14 = ViTConfig(patch_size=14, dim=1664, n_layers=48, n_heads=16, hidden_dim=8192)
TINY = ViTConfig(image_size=8, patch_size=2, channels=1, n_classes=10, dim=64, n_layers=4, n_heads=4, hidden_dim=128)
"""For scikit-learn's 8 x 8 digits; trains on a laptop."""

PRESETS = {
    "B/16": VIT_B_16,
    "L/16": VIT_L_16,
    "H/14": VIT_H_14,
    "g/14": VIT_GIANT_14,
    "G/14": VIT_GIGANTIC_14,
    "tiny": TINY,
}


def preset(name: str, **changes) -> ViTConfig:
    """A preset by its name in the papers ("B/16", "g/14"), with fields changed.

    Raises:
        ValueError: there is no preset of that name; the message lists the names.
    """
    if name not in PRESETS:
        raise ValueError(f"no vision transformer {name!r}: there are {', '.join(PRESETS)} (g and G are two)")
    return replace(PRESETS[name], **changes)


# ---- names of weights in other libraries -----------------------------------------------------------------------------

_HF = {
    "embeddings.cls_token": "vit.embeddings.cls_token",
    "embeddings.pos_embed": "vit.embeddings.position_embeddings",
    "embeddings.proj": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
}
_HF_BLOCK = {
    "norm1": "layernorm_before",
    "attn.wq": "attention.q_proj",
    "attn.wk": "attention.k_proj",
    "attn.wv": "attention.v_proj",
    "attn.wo": "attention.o_proj",
    "norm2": "layernorm_after",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_HF_BEFORE_5 = {
    "vit.encoder.layer.": "vit.layers.",
    ".attention.attention.query.": ".attention.q_proj.",
    ".attention.attention.key.": ".attention.k_proj.",
    ".attention.attention.value.": ".attention.v_proj.",
    ".attention.output.dense.": ".attention.o_proj.",
    ".intermediate.dense.": ".mlp.fc1.",
    ".output.dense.": ".mlp.fc2.",
}
_TIMM = {
    "embeddings.cls_token": "cls_token",
    "embeddings.pos_embed": "pos_embed",
    "embeddings.proj": "patch_embed.proj",
    "norm": "norm",
    "head": "head",
}
_TIMM_BLOCK = {"attn.wo": "attn.proj"} | {name: name for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")}


def _names(n_layers: int, outer: dict[str, str], block: dict[str, str], layer: str) -> dict[str, str]:
    """Map our name of every tensor to its name elsewhere; every module has a weight and a bias."""
    modules = dict(outer)
    for i in range(n_layers):
        modules |= {f"blocks.{i}.{ours}": f"{layer}.{i}.{theirs}" for ours, theirs in block.items()}
    names: dict[str, str] = {}
    for ours, theirs in modules.items():
        bare = ours.endswith(("cls_token", "pos_embed"))
        names |= {ours: theirs} if bare else {f"{ours}.{part}": f"{theirs}.{part}" for part in ("weight", "bias")}
    return names


def hf_names(config: ViTConfig) -> dict[str, str]:
    """Map our name of every tensor to its name in Transformers' ``ViTForImageClassification``."""
    return _names(config.n_layers, _HF, _HF_BLOCK, "vit.layers")


def timm_names(config: ViTConfig) -> dict[str, str]:
    """Map our name of every tensor to its name in timm's ``VisionTransformer``, except for queries, keys and values.

    timm fuses those (``blocks.{i}.attn.wq``, ``wk`` and ``wv``) into one ``blocks.{i}.attn.qkv``.
    """
    return _names(config.n_layers, _TIMM, _TIMM_BLOCK, "blocks")


def modern_hf_names(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names of Transformers 5; most files on the hub still have those of version 4."""
    renamed = {}
    for name, tensor in state_dict.items():
        for old, new in _HF_BEFORE_5.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed
