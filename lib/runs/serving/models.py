"""The models that the server can load: a tiny one, a checkpoint of ``lib.runs``, and a folder in Transformers' format."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib.given.data.corpora import language_reference
from lib.given.data.weights import load_weights
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.llama import LlamaConfig, hf_tensors
from lib.gpt2 import GPT2
from lib.gpt2 import load_pretrained as load_gpt2
from lib.llama import Llama, convert_hf_state_dict
from lib.runs.flags import UsageError
from lib.runs.serving.text import ByteTokenizer, FileTokenizer, Tokenizer

KINDS: dict[str, Any] = {"GPT2Task": (GPT2Config, GPT2), "LlamaTask": (LlamaConfig, Llama)}
"""Configuration and model of each task of ``lib.runs`` that generates text."""
TINY = LlamaConfig(vocab_size=256, dim=256, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=256, context_len=1024)
FIELDS = {"vocab_size": "vocab_size", "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
          "num_key_value_heads": "n_kv_heads", "intermediate_size": "hidden_dim", "max_position_embeddings": "context_len",
          "rms_norm_eps": "norm_eps"}  # fmt: skip
"""Names in the ``config.json`` of a Llama, and the fields of ``LlamaConfig`` that they set."""


@dataclass(frozen=True)
class Served:
    """A model, in evaluation mode, and its tokenizer."""

    name: str
    model: nn.Module
    tokenizer: Tokenizer


def load(model: str, name: str | None, tokenizer: str | None, dtype: torch.dtype, device: torch.device) -> Served:
    """Load what ``--model`` names.

    Args:
        model: "tiny", or a folder.
        name: What clients call it; by default "tiny" or the folder's name.
        tokenizer: "bytes", "gpt2", or a ``tokenizer.json``; None takes what the folder has.
        dtype, device: Of the weights.

    Raises:
        UsageError: there is nothing of the kind, or it does not fit; the message says what was expected.
    """
    folder = Path(model)
    if model == "tiny":
        made: tuple[nn.Module, Tokenizer] = make_tiny(), _tokenizer(tokenizer or "bytes", TINY.vocab_size)
    elif not folder.is_dir():
        raise UsageError(f"--model {model}: no such folder; expected tiny, or a folder with a checkpoint")
    elif (folder / "config.json").is_file():
        made = _from_transformers(folder, tokenizer)
    else:
        made = _from_runs(folder, tokenizer)
    net = made[0].to(device, dtype).eval().requires_grad_(False)
    return Served(name or folder.resolve().name if model != "tiny" else name or "tiny", net, made[1])


@torch.no_grad()
def make_tiny() -> Llama:
    """A Llama of bytes whose weights are set, not trained, so that it is ready at once.

    Each byte is a direction of its own in the residual stream, and the output layer holds the logarithms of how often each byte follows it in the language
    reference. The blocks, random and weak, disturb these a little.
    """
    generator = torch.Generator().manual_seed(0)
    model: Any = Llama(TINY)
    V = TINY.vocab_size
    for parameter in model.layers.parameters():
        if parameter.dim() == 2:
            parameter.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    text = torch.tensor(list(language_reference().encode()))
    counts = torch.bincount(text[:-1] * V + text[1:], minlength=V * V).view(V, V) + 1e-3
    model.tok_embeddings.weight.copy_(torch.eye(V))
    model.output.weight.copy_(
        (counts / counts.sum(1, keepdim=True)).log().T / V**0.5
    )  # the norm turns each 1 into sqrt(V)
    return model


def _from_runs(folder: Path, tokenizer: str | None) -> tuple[nn.Module, Tokenizer]:
    """The model of the newest checkpoint that ``lib.runs`` wrote into a folder."""
    from lib.runs.engine.state import newest  # imports PyTorch's distributed checkpoints, which takes seconds

    path = newest(folder)
    if path is None:
        text = "expected config.json and weights, or a checkpoint of lib.runs, in this folder"
        raise UsageError(f"--model {folder}: {text}")
    weights, run = _read_run(path)
    if run["task"] not in KINDS:
        raise UsageError(f"--model {path.parent} is a checkpoint of {run['task']}; expected one of {', '.join(KINDS)}")
    make_config, make_model = KINDS[run["task"]]
    model = make_model(make_config(**run["config"]))
    model.load_state_dict(weights)
    files = (
        place / "tokenizer.json" for place in (folder, folder.parent)
    )  # the best checkpoint is in a subfolder of the last one's
    found = next((str(path) for path in files if path.is_file()), None)
    if not (tokenizer or found) and model.config.vocab_size > 256 and run["data"] != "synthetic":
        raise UsageError(
            f"--model {folder} has no tokenizer.json and a vocabulary of {model.config.vocab_size}: expected --tokenizer"
        )
    end_ids = [token["id"] for token in _json(Path(found))["added_tokens"]] if found and not tokenizer else []
    return model, _tokenizer(tokenizer or found or "bytes", model.config.vocab_size, end_ids)


def _read_run(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights of a checkpoint, whole on any mesh, and the description of its run."""
    import torch.distributed.checkpoint as dcp

    from lib.runs.engine.state import FILE, MODEL, STATE

    try:
        if path.name == FILE:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            return saved[MODEL], saved["state"]["run"]
        run = json.loads((path / STATE).read_text(encoding="utf-8"))["run"]
        found: dict[str, Any] = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        prefix = f"{MODEL}."
        weights = {
            name.removeprefix(prefix): torch.empty(found[name].size) for name in found if name.startswith(prefix)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it points out that this process reads alone
            dcp.load({MODEL: weights}, checkpoint_id=path, no_dist=True)
        return weights, run
    except Exception as error:  # half a pickle can provoke anything
        raise UsageError(f"--model {path} cannot be read: {type(error).__name__}: {error}".splitlines()[0]) from None


def _from_transformers(folder: Path, tokenizer: str | None) -> tuple[nn.Module, Tokenizer]:
    """The model of a folder in Transformers' format."""
    settings = _json(folder / "config.json")
    kind = settings.get("model_type")
    try:
        if kind == "gpt2":
            model: Any = load_gpt2(folder)
        elif kind == "llama":
            model = _load_llama(folder, settings)
        else:
            raise UsageError(f"--model {folder}: model_type is {kind!r}, expected gpt2 or llama")
    except (ValueError, FileNotFoundError, KeyError) as error:
        raise UsageError(f"--model {folder}: {error}") from None
    generation = folder / "generation_config.json"
    ends = (_json(generation) if generation.is_file() else {}).get("eos_token_id", settings.get("eos_token_id"))
    end_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if tokenizer is None and not (folder / "tokenizer.json").is_file():
        raise UsageError(f"--model {folder} has no tokenizer.json; expected one, or --tokenizer")
    return model, _tokenizer(tokenizer or str(folder / "tokenizer.json"), model.config.vocab_size, end_ids)


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None


def _load_llama(folder: Path, settings: dict[str, Any]) -> Llama:
    """Chapter 4's Llama, from a checkpoint of Transformers'.

    Raises:
        ValueError: the model has something that chapter 4's has not, or the weights don't fit.
    """
    missing = [name for name in FIELDS if name not in settings and name != "num_key_value_heads"]
    if missing:
        raise ValueError(f"config.json has no {', '.join(missing)}")
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    plain = {"hidden_act": (settings.get("hidden_act"), "silu"), "rope_type": (rope.get("rope_type"), "default"),
             "attention_bias": (settings.get("attention_bias") or None, False), "mlp_bias": (settings.get("mlp_bias") or None, False),
             "head_dim": (settings.get("head_dim"), settings["hidden_size"] // settings["num_attention_heads"])}  # fmt: skip
    for name, (value, expected) in plain.items():
        if value is not None and value != expected:
            raise ValueError(f"config.json: {name} = {value!r}, this model has {expected!r}")
    sizes = {ours: settings[theirs] for theirs, ours in FIELDS.items() if theirs in settings}
    theta = rope.get("rope_theta", settings.get("rope_theta", 10_000.0))
    config = LlamaConfig(**sizes, rope_theta=theta)
    shapes = {name: shape for name, (_, shape) in hf_tensors(config).items()}
    if settings.get("tie_word_embeddings"):
        del shapes["lm_head.weight"]
    tensors = load_weights(folder, shapes, ignore=("rotary_emb.inv_freq",))
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    with torch.device("meta"):
        model = Llama(config)
    model.load_state_dict(convert_hf_state_dict(tensors, config), assign=True)
    return model


def _tokenizer(name: str, vocab_size: int, end_ids: list[int] | tuple = ()) -> Tokenizer:
    """A tokenizer by its name or file, which must not have more tokens than the model."""
    if name == "bytes":
        made: Tokenizer = ByteTokenizer(end_ids=end_ids)
        needed = 256
    elif name == "gpt2":
        import tiktoken

        theirs = tiktoken.get_encoding("gpt2")
        made = ByteTokenizer(theirs.encode_ordinary, theirs.decode_single_token_bytes, [theirs.eot_token])
        needed = theirs.n_vocab
    elif Path(name).is_file():
        made = FileTokenizer(name, end_ids)
        needed = made.theirs.get_vocab_size()
    else:
        raise UsageError(f"--tokenizer {name}: expected bytes, gpt2, or a file tokenizer.json")
    if needed > vocab_size:
        raise UsageError(f"--tokenizer {name} has {needed} tokens, but the model's vocabulary has {vocab_size}")
    return made
