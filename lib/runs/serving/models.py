"""The models that the server can load: a tiny one, a checkpoint of ``lib.runs``,
and a folder in Transformers' format.
"""

import json
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib.given.data.corpora import language_reference
from lib.given.data.weights import CheckpointError, check_shapes, load_weights
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.llama import LlamaConfig, rope_of
from lib.given.models.variants import VariantConfig, family_of, variant_tensors
from lib.gpt2 import GPT2
from lib.gpt2 import load_pretrained as load_gpt2
from lib.llama import Llama, convert_hf_state_dict
from lib.runs.engine.variants import config_from, make_llama
from lib.runs.flags import UsageError
from lib.runs.memory import shortage
from lib.runs.serving import families
from lib.runs.serving.chat import ChatTemplate, read_template
from lib.runs.serving.quantized import quantize_model
from lib.runs.serving.ropes import rope_scaling, rope_theta
from lib.runs.serving.settings import LLAMA_SIZES, one_line, read_end_ids, read_settings
from lib.runs.serving.text import ByteTokenizer, FileTokenizer, Tokenizer
from lib.runs.variants import VariantLlama, scaled_frequencies

KINDS: dict[str, Any] = {
    "GPT2Task": (lambda settings: GPT2Config(**settings), GPT2), "LlamaTask": (config_from, make_llama),
}  # fmt: skip
"""How the configuration and the model of each task of ``lib.runs`` that generates text are made."""
RUN = ("task", "config", "data")  # of the description of a run
TINY = LlamaConfig(vocab_size=256, dim=256, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=256, context_len=1024)


@dataclass(frozen=True)
class Served:
    """A model, in evaluation mode, its tokenizer, the template of its chats, if it has one, and what to say of it."""

    name: str
    model: nn.Module
    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    notes: tuple[str, ...] = ()


def load(
    model: str, name: str | None, tokenizer: str | None, dtype: torch.dtype, device: torch.device,
    kind: str | None = None,
) -> Served:  # fmt: skip
    """Load what ``--model`` names.

    Args:
        model: "tiny", or a folder.
        name: What clients call it; by default "tiny" or the folder's name.
        tokenizer: "bytes", "gpt2", or a ``tokenizer.json``; None takes what the folder has.
        dtype, device: Of the weights.
        kind: "int4" or "float8", which the blocks' weights become; None: ``dtype``.

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
    net, notes = made[0].requires_grad_(False), tuple[str, ...]()
    try:
        if kind:
            notes = quantize_model(net, kind, made[1], dtype, device).notes(kind, dtype)
        net.to(device, dtype).eval()
    except (MemoryError, RuntimeError) as error:
        why = shortage(error, ["--model"], device) or one_line([str(error)])
        raise UsageError(f"--model {model}: its weights do not fit into the memory of {device}: {why}") from None
    name = name or ("tiny" if model == "tiny" else folder.resolve().name)
    name = name.encode(errors="surrogateescape").decode(errors="replace")
    return Served(name, net, made[1], None if model == "tiny" else read_template(folder), notes)


def load_plain(model: str, tokenizer: str | None) -> Served:
    """Load chapter 4's Llama or chapter 6's GPT-2 on the host, in float32, for a program that trains it further.

    Raises:
        UsageError: as `load`; or it is another model.
    """
    served = load(model, None, tokenizer, torch.float32, torch.device("cpu"))
    if isinstance(served.model, VariantLlama):
        family = family_of(served.model.config)
        raise UsageError(
            f"--model {model} is of the family {family}, which lib.runs.train_llama trains; "
            "expected a plain Llama or a GPT-2"
        )
    return served


def weight_bytes(model: str) -> int:
    """Bytes of the files with a folder's weights, which are read into the host's memory; 0 for what has none."""
    return sum(path.stat().st_size for path in Path(model).glob("*.safetensors") if path.is_file())


@torch.no_grad()
def make_tiny(text: str | None = None) -> Llama:
    """A Llama of bytes whose weights are set, not trained, so that it is ready at once.

    Each byte is a direction of its own in the residual stream,
    and the output layer holds the logarithms of how often each byte follows it in a text, by default the language
    reference. The blocks, random and weak, disturb these a little.
    """
    generator = torch.Generator().manual_seed(0)
    model: Any = Llama(TINY)
    V = TINY.vocab_size
    for parameter in model.layers.parameters():
        if parameter.dim() == 2:
            parameter.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    read = torch.tensor(list((text or language_reference()).encode()))
    counts = torch.bincount(read[:-1] * V + read[1:], minlength=V * V).view(V, V) + 1e-3
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
    try:
        model = make_model(make_config(run["config"]))
        model.load_state_dict(weights)
    except (TypeError, ValueError, RuntimeError) as error:  # of a version with other settings, or with mixtures
        name = run["task"].removesuffix("Task")
        text = f"the checkpoint is not of a plain {name} of this version"
        raise UsageError(f"--model {path}: {text}: {one_line(str(error).splitlines())}") from None
    # the best checkpoint is in a subfolder of the last one's
    files = (place / "tokenizer.json" for place in (folder, folder.parent))
    found = next((str(path) for path in files if path.is_file()), None)
    if not (tokenizer or found) and model.config.vocab_size > 256 and run["data"] != "synthetic":
        raise UsageError(
            f"--model {folder} has no tokenizer.json and a vocabulary of {model.config.vocab_size}: "
            "expected --tokenizer"
        )
    return model, _tokenizer(tokenizer or found or "bytes", model.config.vocab_size, [] if tokenizer else None)


def _read_run(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights of a checkpoint, whole on any mesh, and the description of its run."""
    import torch.distributed.checkpoint as dcp

    from lib.runs.engine.state import FILE, MODEL, STATE

    try:
        if path.name == FILE:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            run = saved["state"]["run"]
            return saved[MODEL], {name: run[name] for name in RUN}
        run = json.loads((path / STATE).read_text(encoding="utf-8"))["run"]
        found: dict[str, Any] = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        prefix = f"{MODEL}."
        weights = {
            name.removeprefix(prefix): torch.empty(found[name].size) for name in found if name.startswith(prefix)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it points out that this process reads alone
            dcp.load({MODEL: weights}, checkpoint_id=path, no_dist=True)
        return weights, {name: run[name] for name in RUN}
    except Exception as error:  # half a pickle can provoke anything
        raise UsageError(f"--model {path} cannot be read: {type(error).__name__}: {error}".splitlines()[0]) from None


def _from_transformers(folder: Path, tokenizer: str | None) -> tuple[nn.Module, Tokenizer]:
    """The model of a folder in Transformers' format."""
    kind, settings = read_settings(folder)
    end_ids = read_end_ids(folder, kind, settings)
    if tokenizer is None and not (folder / "tokenizer.json").is_file():
        raise UsageError(f"--model {folder} has no tokenizer.json; expected one, or --tokenizer")
    try:
        if kind in families.FAMILY:
            model: Any = _load_variant(folder, families.config_of(settings, families.FAMILY[kind]))
        else:
            model = load_gpt2(folder) if kind == "gpt2" else _load_llama(folder, settings)
    except CheckpointError as error:
        raise UsageError(f"--model {folder}: {one_line(error.problems)}") from None
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        head, *problems = [line.removeprefix("- ") for line in str(error).splitlines()] or [type(error).__name__]
        raise UsageError(f"--model {folder}: {one_line(problems or [head])}") from None
    return model, _tokenizer(tokenizer or str(folder / "tokenizer.json"), model.config.vocab_size, end_ids)


def _load_llama(folder: Path, settings: dict[str, Any]) -> Llama:
    """Chapter 4's Llama, from a checkpoint of Transformers'.

    Raises:
        ValueError: the weights don't fit; the message has all that is wrong with them.
    """
    sizes = {ours: settings[theirs] for theirs, ours in LLAMA_SIZES.items() if theirs in settings}
    config = LlamaConfig(**sizes, norm_eps=settings.get("rms_norm_eps", 1e-6), rope_theta=rope_theta(settings))
    tensors = _read_weights(folder, bool(settings.get("tie_word_embeddings")))
    with torch.device("meta"):
        model = Llama(config)
    model.load_state_dict(convert_hf_state_dict(tensors, config), assign=True)
    scaling = rope_scaling(settings)
    if scaling:
        frequencies, factor = scaled_frequencies(config.head_dim, config.rope_theta, scaling)
        model.rope = rope_of(frequencies, config.context_len, factor)
    return model


def _load_variant(folder: Path, config: VariantConfig) -> VariantLlama:
    """A Llama with chapter 23's variants, from a checkpoint of Transformers'."""
    tensors, names = _read_weights(folder, config.tied), variant_tensors(config)
    if config.tied:
        tensors.pop("lm_head.weight", None)
    check_shapes(folder, tensors, {name: shape for name, (_, shape) in names.items()})
    with torch.device("meta"):
        model = VariantLlama(config)
    model.load_state_dict({ours: tensors[theirs] for theirs, (ours, _) in names.items()}, assign=True)
    return model


def _read_weights(folder: Path, is_tied: bool) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with the output layer's, which may be the embedding.

    Raises:
        CheckpointError: one is not of a floating-point dtype, or tied weights differ.
    """
    tensors, head, embedding = load_weights(folder), "lm_head.weight", "model.embed_tokens.weight"
    problems = [
        f"{name} is {tensor.dtype}, expected a floating-point dtype"
        for name, tensor in tensors.items()
        if not tensor.is_floating_point()
    ]
    if is_tied and embedding in tensors:
        is_same = torch.equal(tensors.setdefault(head, tensors[embedding]), tensors[embedding])
        problems += [] if is_same else [f"tie_word_embeddings = True, but {head} is not {embedding}"]
    if problems:
        raise CheckpointError(folder, problems)
    return tensors


def _tokenizer(name: str, vocab_size: int, end_ids: list[int] | None = None) -> Tokenizer:
    """A tokenizer by its name or file, which must not have more tokens than the model."""
    if name == "bytes":
        made: Tokenizer = ByteTokenizer(end_ids=end_ids or ())
        needed = 256
    elif name == "gpt2":
        made, needed = _gpt2_tokenizer()
    elif Path(name).is_file():
        try:
            made = FileTokenizer(name, end_ids)
        except Exception as error:  # the library has one class for all that is wrong with a file
            raise UsageError(f"{name} is no tokenizer.json: {one_line([str(error)])}") from None
        needed = made.n_tokens
    else:
        raise UsageError(f"--tokenizer {name}: expected bytes, gpt2, or a file tokenizer.json")
    if needed > vocab_size:
        raise UsageError(f"--tokenizer {name} has {needed} tokens, but the model's vocabulary has {vocab_size}")
    return made


def _gpt2_tokenizer() -> tuple[Tokenizer, int]:
    """GPT-2's tokenizer, and the number of its tokens; special ones, and those that it lacks, have no text."""
    try:
        import tiktoken

        theirs = tiktoken.get_encoding("gpt2")
    except (ImportError, OSError) as error:  # OSError: no network, and not yet in tiktoken's cache
        raise UsageError(f"--tokenizer gpt2: tiktoken cannot load it: {one_line([str(error)])}") from None
    return ByteTokenizer(theirs.encode_ordinary, partial(_gpt2_bytes, theirs), [theirs.eot_token]), theirs.n_vocab


def _gpt2_bytes(theirs: Any, token: int) -> bytes:
    return theirs.decode_single_token_bytes(token) if token < theirs.eot_token else b""
