"""Sizes of GPT-2, and readers for checkpoints in Transformers' format: they find, open and check, but don't convert."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Sizes of a GPT-2.

    Attributes:
        vocab_size: Number of tokens V.
        context_len: Largest number of positions T.
        dim: Model width C; a multiple of ``n_heads``.
        n_layers: Number of blocks L.
        n_heads: Number of heads H.
        norm_eps: Added to the variance in every layer norm.
        padded_vocab_size: Rows of the embedding, at least ``vocab_size``; None means ``vocab_size``.
    """

    vocab_size: int = 50_257
    context_len: int = 1024
    dim: int = 768
    n_layers: int = 12
    n_heads: int = 12
    norm_eps: float = 1e-5
    padded_vocab_size: int | None = None

    def __post_init__(self):
        if self.dim % self.n_heads:
            raise ValueError(f"dim = {self.dim} is not a multiple of n_heads = {self.n_heads}")
        if self.padded_vocab_size is not None and self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size = {self.padded_vocab_size} is below vocab_size = {self.vocab_size}")

    @property
    def n_rows(self) -> int:
        """Rows of the embedding, padding included."""
        return self.padded_vocab_size or self.vocab_size


GPT2_SMALL = GPT2Config()
GPT2_MEDIUM = GPT2Config(dim=1024, n_layers=24, n_heads=16)
GPT2_LARGE = GPT2Config(dim=1280, n_layers=36, n_heads=20)
GPT2_XL = GPT2Config(dim=1600, n_layers=48, n_heads=25)
TINY = GPT2Config(vocab_size=512, context_len=64, dim=128, n_layers=2, n_heads=2)

# Names in Transformers' config.json, and the fields of GPT2Config that they set.
FIELDS = {
    "vocab_size": "vocab_size",
    "n_positions": "context_len",
    "n_embd": "dim",
    "n_layer": "n_layers",
    "n_head": "n_heads",
}
# Settings that this model cannot change, and the values with which Transformers computes the same.
FIXED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
INDEX = "model.safetensors.index.json"


def find_checkpoint(name_or_path: str | os.PathLike) -> Path:
    """Return the folder of a checkpoint: a local folder, or a download if the argument is a name on the hub.

    Raises:
        FileNotFoundError: there is no such folder, and the hub has no such name; the message says what was tried.
    """
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder
    name = str(name_or_path)
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"no folder {name} (searched from {Path.cwd()})")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "model*.safetensors", INDEX]))
    except Exception as error:
        raise FileNotFoundError(f"no folder {name}, and the hub did not give it: {error}") from error


def read_config(folder: Path) -> tuple[GPT2Config | None, list[str]]:
    """Read ``config.json``; return the config (None if there is no usable one) and a list of problems."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, ["config.json is missing"]
    except (ValueError, RecursionError) as error:
        return None, [f"config.json is not valid JSON: {error}"]
    if not isinstance(settings, dict):
        return None, [f"config.json holds a {type(settings).__name__}, expected an object"]
    problems = [f"config.json has no {name}" for name in FIELDS if name not in settings]
    for name, allowed in FIXED.items():
        if settings.get(name, allowed[0]) not in allowed:
            problems.append(f"config.json: {name} = {settings[name]!r}, this model has {allowed[0]!r}")
    dim, hidden = settings.get("n_embd"), settings.get("n_inner")
    if hidden is not None and dim is not None and hidden != 4 * dim:
        problems.append(f"config.json: n_inner = {hidden}, this model has 4 x {dim}")
    if any(name not in settings for name in FIELDS):
        return None, problems
    wrong = [name for name in FIELDS if type(settings[name]) is not int or settings[name] < 1]
    if wrong:
        return None, problems + [
            f"config.json: {name} = {settings[name]!r}, expected a positive integer" for name in wrong
        ]
    sizes, eps = {ours: settings[theirs] for theirs, ours in FIELDS.items()}, settings.get("layer_norm_epsilon", 1e-5)
    if type(eps) not in (int, float) or not 0 <= eps < math.inf:
        return None, [*problems, f"config.json: layer_norm_epsilon = {eps!r}, expected a number of at least 0"]
    try:
        return GPT2Config(**sizes, norm_eps=eps), problems
    except ValueError as error:
        return None, [*problems, f"config.json: {error}"]


def read_tensors(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Read ``model.safetensors`` or the shards that its index lists; return the tensors and a list of problems."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    files, problems = _tensor_files(folder)
    for name in files:
        try:
            tensors |= load_file(folder / name)
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except Exception as error:  # safetensors has its own error class for a header or a length that does not fit
            problems.append(f"{name} cannot be read (cut off?): {error}")
    for name, tensor in tensors.items():
        if not torch.is_floating_point(tensor) and not name.endswith("attn.bias"):
            problems.append(f"{name} is {tensor.dtype}, expected a floating-point dtype")
    return tensors, problems


def _tensor_files(folder: Path) -> tuple[list[str], list[str]]:
    if (folder / INDEX).exists():
        try:
            files = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
            outside = sorted(str(file) for file in files if Path(file).name != file)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            return [], [f"{INDEX} cannot be read ({type(error).__name__}: {error})"]
        problems = [f"{INDEX}: {file} is no file of this folder" for file in outside]
        return ([], problems) if problems else (sorted(files), [] if files else [f"{INDEX} names no file"])
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"], []
    others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "nothing else"
    return [], [f"model.safetensors is missing (there is {others})"]
