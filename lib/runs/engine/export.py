"""The trained model as other libraries load it: ``model.safetensors`` and ``config.json``, for Transformers or timm.

Each function here is the inverse of its chapter's converter: the names, layouts and settings of the other library,
from our own.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lib.fast.models import MEAN, STD
from lib.given.models.gpt2 import FIELDS, GPT2Config
from lib.given.models.llama import LlamaConfig, hf_tensors
from lib.given.models.variants import VariantConfig, settings_of, variant_tensors
from lib.given.models.vit import PRESETS, ViTConfig, timm_names
from lib.runs.engine.sources import GRAY_MEAN, GRAY_STD, Codec

Exported = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors by the other library's names, and the contents of ``config.json``."""
TOKENIZER = "tokenizer.json"
TIMM = {
    "B/16": "base_patch16", "L/16": "large_patch16", "H/14": "huge_patch14", "g/14": "giant_patch14",
    "G/14": "gigantic_patch14",
}  # fmt: skip
"""timm's name of each preset, between ``vit_`` and ``_224``."""


def write(
    folder: Path, exported: Exported, codec: Codec | None = None, beside: "dict[str, Make] | None" = None
) -> None:
    """Write the model and its tokenizer. The files get their names only when all of them are complete.

    Args:
        folder: Where; it is made.
        exported: The model.
        codec: Its tokenizer; None writes none.
        beside: Further files, by their names.
    """
    tensors, settings = exported
    if codec is not None and codec.special_tokens:
        settings = settings | dict.fromkeys(("bos_token_id", "eos_token_id"), codec.n_tokens - 1)
    kept = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    model = {"model.safetensors": lambda path: save_file(kept, path, metadata={"format": "pt"})}
    _put_in_place(folder, codec, model | {"config.json": as_text(settings, indent=2)} | (beside or {}))


def write_tokenizer(folder: Path, codec: Codec | None) -> None:
    """Write the tokenizer of a run beside its model, as ``tokenizer.json``.

    Nothing is written for random tokens, or for GPT-2's tokenizer, which every library has.
    """
    _put_in_place(folder, codec, {})


Make = Callable[[Path], Any]
"""Writes a file at a path."""


def _put_in_place(folder: Path, codec: Codec | None, files: dict[str, Make]) -> None:
    """Write these files and those of the tokenizer, so that no tokenizer is left beside the model of another one."""
    folder.mkdir(parents=True, exist_ok=True)
    files = files | _tokenizer_files(codec)
    temporary = {folder / name: folder / f".{name}.tmp" for name in files}
    for name, make in files.items():
        make(temporary[folder / name])
    if codec is not None and TOKENIZER not in files and _n_tokens(folder / TOKENIZER) not in (None, codec.n_tokens):
        os.replace(folder / TOKENIZER, folder / f"{TOKENIZER}.old")  # another run's
    for path, unfinished in temporary.items():
        os.replace(unfinished, path)


def as_text(contents: Any, **settings: Any) -> Make:
    """Writes an object as JSON."""
    text = json.dumps(contents, **settings) + "\n"
    return lambda path: path.write_text(text, encoding="utf-8")


def _tokenizer_files(codec: Codec | None) -> dict[str, Make]:
    if codec is None or codec.merges is None:
        return {}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    kind |= {"eos_token": codec.special_tokens[-1]} if codec.special_tokens else {}
    contents = {
        TOKENIZER: tokenizer_for_transformers(codec.merges, codec.special_tokens),
        "tokenizer_config.json": kind,
    }
    return {name: as_text(content, ensure_ascii=False) for name, content in contents.items()}


def _n_tokens(path: Path) -> int | None:
    """Number of ids of a ``tokenizer.json``: 0 if it cannot be read, None if there is none."""
    if not path.exists():
        return None
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        ids = {*contents["model"]["vocab"].values(), *(token["id"] for token in contents.get("added_tokens", []))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
    return len(ids)


def tokenizer_for_transformers(
    merges: Sequence[tuple[bytes, bytes]], special_tokens: Sequence[str] = ()
) -> dict[str, Any]:
    """Chapter 1's tokenizer in the format of Hugging Face tokenizers, in which each byte is a visible character.

    Ids are those of `lib.runs.data.corpus.make_tokenizer`: 256 bytes, the merges, the special tokens.
    """
    letters = dict(zip(_order_of_bytes(), map(chr, [*_VISIBLE, *range(256, 512 - len(_VISIBLE))]), strict=True))

    def shown(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": t, **added} for i, t in enumerate(special_tokens, len(tokens))],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {shown(token): i for i, token in enumerate(tokens)},
            "merges": [[shown(left), shown(right)] for left, right in merges],
        },
    }


_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]


def _order_of_bytes() -> list[int]:
    """All bytes in the order of GPT-2's table.

    First come those that are a visible character of Latin-1, then the others, which get the characters from 256 on.
    """
    return [*_VISIBLE, *(byte for byte in range(256) if byte not in _VISIBLE)]


def gpt2_for_transformers(weights: dict[str, Tensor], config: GPT2Config) -> Exported:
    """For ``GPT2LMHeadModel``: linear weights ``[in, out]``, no rows of padding, no head (it is the embedding)."""
    transposed = ("c_attn.weight", "c_fc.weight", "c_proj.weight")
    tensors = {name: t.T if name.endswith(transposed) else t for name, t in weights.items()}
    tensors["wte.weight"] = tensors["wte.weight"][: config.vocab_size]
    settings: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32"}
    settings |= {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
    settings |= {"layer_norm_epsilon": config.norm_eps, "activation_function": "gelu_new", "tie_word_embeddings": True}
    settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id"), 50_256 if config.vocab_size == 50_257 else None)
    return {f"transformer.{name}": tensor for name, tensor in tensors.items()}, settings


def llama_for_transformers(weights: dict[str, Tensor], config: LlamaConfig) -> Exported:
    """For ``LlamaForCausalLM``: its rotary pairs are half a head apart,
    so the rows of queries and keys are reordered.
    """
    from lib.rope import interleaved_to_half

    n_heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}
    tensors = {}
    for theirs, (ours, _) in hf_tensors(config).items():
        heads = n_heads.get(theirs.split(".")[-2])
        tensors[theirs] = interleaved_to_half(weights[ours], heads) if heads else weights[ours]
    return tensors, {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "max_position_embeddings": config.context_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,  # Transformers 4 reads this, Transformers 5 the next
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def variant_for_transformers(weights: dict[str, Tensor], config: VariantConfig) -> Exported:
    """For the class of the model's family, ``Qwen3ForCausalLM`` and others: names change, and no tensor does."""
    return {theirs: weights[ours] for theirs, (ours, _) in variant_tensors(config).items()}, settings_of(config)


def vit_for_timm(weights: dict[str, Tensor], config: ViTConfig) -> Exported:
    """For timm's ``VisionTransformer``: queries, keys and values are one layer.

    ``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads it.

    Raises:
        ValueError: the model pools by the mean after its last norm; timm's takes the mean before.
    """
    if config.pooling != "token":
        raise ValueError(f"pooling = {config.pooling!r}: timm takes the mean before the norm; expected 'token'")
    tensors = {theirs: weights[ours] for ours, theirs in timm_names(config).items() if ours in weights}
    for i in range(config.n_layers):
        for part in ("weight", "bias"):
            three = [weights[f"blocks.{i}.attn.{which}.{part}"] for which in ("wq", "wk", "wv")]
            tensors[f"blocks.{i}.attn.qkv.{part}"] = torch.cat(three)
    return tensors, {
        "architecture": _architecture(config),
        "num_classes": config.n_classes,
        "num_features": config.dim,
        "global_pool": "token",
        "model_args": _model_args(config),
        "pretrained_cfg": _preparation(config),
    }


def _architecture(config: ViTConfig) -> str:
    """The timm model with these blocks; for other sizes the base model, whose arguments ``_model_args`` overrides."""
    for name, middle in TIMM.items():
        preset = PRESETS[name]
        sizes = ("patch_size", "dim", "n_layers", "n_heads", "hidden_dim")
        if all(getattr(preset, size) == getattr(config, size) for size in sizes):
            return f"vit_{middle}_224"
    return "vit_base_patch16_224"


def _model_args(config: ViTConfig) -> dict[str, Any]:
    ratio = config.hidden_dim / config.dim
    if int(config.dim * ratio) != config.hidden_dim:  # timm rounds the product down
        ratio = math.nextafter(ratio, math.inf)
    args: dict[str, Any] = {"img_size": config.image_size, "patch_size": config.patch_size, "in_chans": config.channels}
    args |= {"embed_dim": config.dim, "depth": config.n_layers, "num_heads": config.n_heads, "mlp_ratio": ratio}
    return args | ({"act_layer": "gelu_tanh"} if config.gelu == "tanh" else {})


def _preparation(config: ViTConfig) -> dict[str, Any]:
    """How pictures are prepared: as in ``prepare_images``, resized whole, then normalised."""
    mean, std = (MEAN, STD) if config.channels == 3 else (GRAY_MEAN, GRAY_STD)
    side = config.image_size
    return {
        "input_size": [config.channels, side, side],
        "fixed_input_size": True,
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "crop_mode": "squash",
        "mean": list(mean),
        "std": list(std),
        "num_classes": config.n_classes,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
