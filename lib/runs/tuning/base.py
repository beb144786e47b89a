"""The model that is tuned: opened with its tokenizer and template, changed by adapters, and written when it is done."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lib.finetuning import LoRALinear, NF4Linear, add_lora, nf4_dequantize
from lib.given.models.hidden import is_llama
from lib.runs.engine import export
from lib.runs.engine.export import as_text, tokenizer_for_transformers
from lib.runs.memory import check_need
from lib.runs.serving import models
from lib.runs.serving.text import FileTokenizer
from lib.runs.tuning.templates import (
    JINJA,
    MARKERS,
    BookTemplate,
    FolderTemplate,
    Template,
    add_markers,
    ordinary,
    read_tokenizer,
)

COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
          "added_tokens.json", "generation_config.json")  # fmt: skip
"""Files of a folder with a template of its own, which go with the tuned model unchanged."""
TARGETS = {True: ("wq", "wk", "wv", "wo", "w1", "w2", "w3"), False: ("c_attn", "c_fc", "c_proj")}
"""The matrices of a block of chapter 4's Llama, and of chapter 6's GPT-2."""
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass
class Base:
    """A model and what belongs to it.

    Attributes:
        model: Chapter 4's ``Llama`` or chapter 6's ``GPT2``, on the host, in float32.
        template: Of its conversations.
        settings: Its ``config.json``, without what tuning changes; None for a model of ``lib.runs``.
        files: What is written beside the tuned model.
        ends: Ids of the markers that begin and end a text, where the template is chapter 28's.
        is_new: Whether the model has not seen its markers before.
        is_tied: Whether its head is the embedding.
    """

    model: Any
    template: Template
    settings: dict[str, Any] | None
    files: dict[str, Callable[[Path], Any]]
    ends: dict[str, int] = field(default_factory=dict)
    is_new: bool = False
    is_tied: bool = False


def open_base(name: str, seed: int) -> Base:
    """Open what ``--model`` names: tiny, a folder of Transformers', or a checkpoint of ``lib.runs``.

    Without a chat template of its own it gets chapter 28's, and rows for those of its markers that it lacks.

    Raises:
        UsageError: there is no such model, or something about it cannot be used; the message says what.
    """
    folder, host = Path(name), torch.device("cpu")
    check_need(models.weight_bytes(name), host, f"--model {name}: weights", ["--model"])
    served = models.load_plain(name, None)
    model: Any = served.model.requires_grad_(True)
    settings = None
    if (folder / "config.json").is_file():
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    is_tied = not is_llama(model)
    if is_llama(model) and (settings or {}).get("tie_word_embeddings"):
        is_tied, model.output.weight = True, model.tok_embeddings.weight
    if served.template is not None and isinstance(served.tokenizer, FileTokenizer):
        own = FolderTemplate(served.template, served.tokenizer.encode_rendered)
        files = {each: _copy_of(folder / each) for each in COPIED if (folder / each).is_file()}
        return Base(model, own, settings, files, is_tied=is_tied)
    return _with_markers(model, settings, is_tied, folder, seed)


def _copy_of(path: Path) -> Callable[[Path], Any]:
    contents = path.read_bytes()
    return lambda to: to.write_bytes(contents)


def _with_markers(model: Any, settings: dict[str, Any] | None, is_tied: bool, folder: Path, seed: int) -> Base:
    """A model without a template of its own gets chapter 28's."""
    places = [place / "tokenizer.json" for place in (folder, folder.parent)][: 1 if settings else 2]
    found = next((path for path in places if path.is_file()), None)
    contents = read_tokenizer(found) if found and folder.is_dir() else tokenizer_for_transformers(())
    known = {token["content"] for token in contents.get("added_tokens") or ()}
    special = add_markers(contents)
    grow(model, 1 + max(special.values()), seed, is_tied)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": MARKERS["bos"]}
    kind |= {"eos_token": MARKERS["assistant_end"], "chat_template": JINJA}
    texts: dict[str, Any] = {"tokenizer.json": contents, "tokenizer_config.json": kind}
    files = {name: as_text(content, ensure_ascii=False) for name, content in texts.items()}
    ends = {"bos_token_id": special["bos"], "eos_token_id": special["assistant_end"]}
    is_new = not set(MARKERS.values()) <= known
    return Base(model, BookTemplate(ordinary(contents), special), settings, files, ends, is_new, is_tied)


@torch.no_grad()
def grow(model: Any, vocab_size: int, seed: int, is_tied: bool) -> None:
    """Add rows to the embedding and the head, in place, so that the model has this many tokens; it never loses any.

    New rows are the mean of the old ones and a tenth of their spread at random, so that no new token begins as a likely
    one. GPT-2's rows of padding are dropped.
    """
    config = model.config
    if vocab_size <= config.vocab_size:
        return
    generator = torch.Generator().manual_seed(seed % 2**63)

    def grown(weight: Tensor) -> nn.Parameter:
        rows = weight[: config.vocab_size]
        noise = torch.randn(vocab_size - len(rows), rows.shape[1], generator=generator)
        return nn.Parameter(torch.cat([rows, rows.mean(0) + 0.1 * rows.std(0) * noise]))

    if is_llama(model):
        model.tok_embeddings.weight = grown(model.tok_embeddings.weight)
        model.output.weight = model.tok_embeddings.weight if is_tied else grown(model.output.weight)
        model.tok_embeddings.num_embeddings = model.output.out_features = vocab_size
        model.config = replace(config, vocab_size=vocab_size)
    else:
        model.wte.weight, model.wte.num_embeddings = grown(model.wte.weight), vocab_size
        model.config = replace(config, vocab_size=vocab_size, padded_vocab_size=None)


# ---- what is trained -------------------------------------------------------------------------------------------------


def tables(model: Any) -> list[nn.Parameter]:
    """The embedding and the head, which may be one."""
    return [model.tok_embeddings.weight, model.output.weight] if is_llama(model) else [model.wte.weight]


def adapt(base: Base, is_quantized: bool, r: int, alpha: float, targets: Iterable[str], dropout: float,
          dtype: torch.dtype) -> None:  # fmt: skip
    """Put adapters around layers, in place; what is frozen is rounded to ``dtype``, or the blocks' matrices to NF4.

    The embedding and the head are trained too if the model has not seen its markers.

    Raises:
        ValueError: a name in ``targets`` that no layer has, or a matrix that blocks of 64 weights do not divide.
    """
    model = base.model
    if is_quantized:
        for part in list(model.modules()):
            for name, layer in list(part.named_children()):
                if isinstance(layer, nn.Linear) and name in TARGETS[is_llama(model)]:
                    setattr(part, name, NF4Linear(layer))
    add_lora(model, r, alpha, targets, dropout)
    if base.is_new:
        for parameter in tables(model):
            parameter.requires_grad_(True)
        embedding = model.tok_embeddings if is_llama(model) else model.wte  # stays float32, as all that is trained
        embedding.register_forward_hook(lambda _, args, out: out.to(dtype))
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def trained_names(model: nn.Module) -> set[str]:
    """Names of all parameters that are trained, a tied one under both of its names."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


def keep_trained_only(model: nn.Module) -> None:
    """Let a model's state dict hold what is trained only, and let it load such a one: the rest stays as it is."""
    names = trained_names(model)
    others = {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in names}

    def drop(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for name in others:
            state.pop(name, None)

    def fill_in(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for name, value in others.items():
            state.setdefault(name, value)

    model.register_state_dict_post_hook(drop)
    model.register_load_state_dict_pre_hook(fill_in)


def held_bytes(model: nn.Module, n_states: int) -> dict[str, int]:
    """Bytes of weights, gradients and the optimizer's state, read off the tensors; chapter 28's sum for its Llama."""
    tensors = [*model.parameters(), *model.buffers()]
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    weights = sum(t.numel() * t.element_size() for t in tensors)
    return {"weights": weights, "gradients": trained, "optimizer": n_states * trained}


# ---- the folder that comes out ---------------------------------------------------------------------------------------


@torch.no_grad()
def merged(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of the plain model, by its own names, on the host: adapters merged, four-bit weights unpacked."""
    found: dict[str, Tensor] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear | NF4Linear) and not name.startswith(tuple(inside)):
            inside.append(f"{name}.")
            found |= {f"{name}.{part}": value for part, value in _plain(module, dtype).named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.startswith(tuple(inside)):
            found[name] = parameter.detach()
    return {name: value.detach().to("cpu", dtype) for name, value in found.items()}


def _plain(layer: Any, dtype: torch.dtype) -> nn.Linear:
    """A linear layer that computes what an adapter and its base do, in float32; the layer itself stays as it is."""
    base: Any = layer.base if isinstance(layer, LoRALinear) else layer
    plain = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device=_device(base))
    shape = (base.out_features, base.in_features)
    weight = nf4_dequantize(base.packed, base.absmax, shape) if isinstance(base, NF4Linear) else base.weight
    plain.weight.copy_(weight)
    if base.bias is not None:
        plain.bias.copy_(base.bias)
    if isinstance(layer, LoRALinear):
        adapter: Any = layer
        alone: Any = LoRALinear(plain, len(adapter.lora_A), 1.0)
        alone.lora_A, alone.lora_B, alone.scaling = adapter.lora_A, adapter.lora_B, adapter.scaling
        alone.merge()
    return plain


def _device(layer: nn.Module) -> torch.device:
    return next(tensor.device for tensor in [*layer.parameters(), *layer.buffers()])


def write_tuned(folder: Path, base: Base, dtype: torch.dtype, how: dict[str, Any],
                whole: dict[str, Tensor] | None = None) -> None:  # fmt: skip
    """Write the merged model as Transformers and ``lib.runs.serve`` load it, and the adapters, if there are any.

    Args:
        folder: Where.
        base: The model in training.
        dtype: Of the weights that are written.
        how: Settings of the run, which ``adapter.safetensors`` holds as its metadata.
        whole: The weights, if ranks have divided the model; None: the model has them.
    """
    model, weights = base.model, merged(base.model, dtype) if whole is None else whole
    if whole is not None and base.is_tied and is_llama(model):
        weights = {"output.weight": whole["tok_embeddings.weight"], **whole}
    make = export.llama_for_transformers if is_llama(model) else export.gpt2_for_transformers
    tensors, settings = make(weights, model.config)
    if base.settings is not None:
        settings = {key: value for key, value in base.settings.items() if key != "torch_dtype"}
    settings |= {"vocab_size": model.config.vocab_size, "dtype": NAMES[dtype], **base.ends}
    if base.is_tied:
        tensors.pop("lm_head.weight", None)
        settings["tie_word_embeddings"] = True
    files = dict(base.files)
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        names = trained_names(model)
        adapter = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if name in names}
        told = {"settings": json.dumps(how)}
        files["adapter.safetensors"] = lambda path: save_file(adapter, os.fspath(path), metadata=told)
    export.write(folder, (tensors, settings), beside=files)
