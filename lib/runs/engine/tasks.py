"""The tasks, image classification and the next token by GPT-2 or Llama: the model, its loss on either path,
and the FLOPs of an item.
"""

import contextlib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lib import amp, training
from lib.fast import models as fast
from lib.given.models import vit
from lib.given.models.gpt2 import GPT2_LARGE, GPT2_MEDIUM, GPT2_SMALL, GPT2_XL, TINY, GPT2Config
from lib.given.models.variants import SLIDING, VariantConfig
from lib.given.parallel.sharding import blocks_of
from lib.runs.data.corpus import is_corpus
from lib.runs.engine import export
from lib.runs.engine.experts import extra_weights, put_mixtures
from lib.runs.engine.options import CONTENTS, HEAD, Options
from lib.runs.engine.sources import Source, open_pictures, open_tokens
from lib.runs.engine.variants import PLAIN, flops_per_token, llama_sizes, make_llama, weights_per_token
from lib.runs.flags import UsageError
from lib.speed import training_flops_per_token, vit_training_flops_per_image

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}
GPT2_PRESETS = {"tiny": TINY, "small": GPT2_SMALL, "medium": GPT2_MEDIUM, "large": GPT2_LARGE, "xl": GPT2_XL}


class Task:
    """A model and its data.

    Attributes:
        unit: The unit in which speed is counted, "image" or "token".
        per_row: Units in a row of a batch.
        config: Configuration of the model.
        source: The data.
        flops_per_item: FLOPs of a training step for one unit.
        n_classes: Number of logits.
        first_parts, last_parts: The model's parts before its blocks and after them.
        scores: Names of what an evaluation computes for each batch.
        layout: Which positions ranks that divide a sequence have, as in chapter 18.
        n_weights: Number of weights of all its matrices: what a model needs at least.
        size_flags: Flags that change the size of the model.
        tokens_per_row: Positions that a row of a batch has in the residual stream.
        questions: What the model is asked while it trains, by task.
        held: Bytes of weights, gradients and optimizer on a rank, and the words for it, where not every weight is
            trained; None where every one is.
    """

    unit: str
    per_row: int
    config: Any
    source: Source
    flops_per_item: int
    n_classes: int
    first_parts: tuple[str, ...]
    last_parts: tuple[str, ...]
    scores: tuple[str, ...] = ("held_out_loss",)
    layout: str = "zigzag"
    size_flags: tuple[str, ...] = ("--dim", "--n-layers", "--model")
    n_weights: int
    tokens_per_row: int
    questions: dict[str, list[dict[str, Any]]]
    held: tuple[int, str] | None = None

    def __init__(self, options: Options):
        self.options, self.dtype = options, DTYPES[options.precision]

    @property
    def rows(self) -> str:
        """What the rows of a batch are called."""
        return "images" if self.unit == "image" else "sequences"

    @classmethod
    def sizes(cls, options: Options) -> dict[str, dict[str, Any]]:
        """The sizes that each kind of parallelism divides, by kind and name; "why" has the kinds not supported."""
        raise NotImplementedError

    def new_model(self) -> nn.Module:
        raise NotImplementedError

    def new_loss(self, device: torch.device) -> "Loss":
        """The model on its device, as a module that returns its loss."""
        return Loss(self, device)

    def fast_path(self, device: torch.device) -> fast.Path:
        # a layer that ranks divide has its own forward
        kernels = device.type == "cuda" and self.dtype.itemsize == 2 and not self.options.uses("tensor")
        return fast.Path(dtype=self.dtype, attention=self.options.attention, kernels=kernels)

    def fast_block(self, model: Any, i: int, path: fast.Path) -> Callable[[Any, Tensor], Tensor]:
        """The function that computes block i on the fast path."""
        raise NotImplementedError

    def fast_loss(self, model: Any, inputs: Tensor, targets: Tensor, path: fast.Path) -> Tensor:
        raise NotImplementedError

    def fast_logits(self, model: Any, inputs: Tensor, path: fast.Path) -> Tensor:
        """Logits on the fast path, for the scores that need them."""
        raise NotImplementedError

    def plain_logits(self, model: Any, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def exported(self, weights: dict[str, Tensor]) -> export.Exported:
        """The model in the format of the library that people load it with.

        Args:
            weights: The whole parameters, by the names of ``new_model``.
        """
        raise NotImplementedError

    def embed(self, model: Any, inputs: Tensor) -> Tensor:
        """The residual stream that the first block reads."""
        raise NotImplementedError

    def head(self, model: Any, x: Tensor) -> Tensor:
        """The logits, including those of padding, from what the last block returns."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What a run and its checkpoint must share: settings, and the contents of the data, which are on the host yet.

        Rates (``lr``, ``muon_lr``), schedule, decay, clipping and the number of steps are not among them: a run that
        goes on may change each.
        """
        o = self.options
        named = {"model": o.model, "config": asdict(self.config), "batch": o.batch, "seed": o.seed, "data": o.data}
        named |= {"tokenizer": o.tokenizer or "bytes"} if self.unit == "token" and not is_corpus(o.data or "") else {}
        named |= {"items": self.source.n, "held_out": self.source.n_held_out, "optimizer": o.optimizer}
        return {"task": type(self).__name__, **named, CONTENTS: self.source.fingerprint() if o.checkpoint else None}


class ViTTask(Task):
    """Image classification."""

    unit, per_row = "image", 1
    first_parts, last_parts = ("embeddings",), ("norm", "head")
    scores = ("held_out_loss", "held_out_top1")

    def __init__(self, options: Options):
        super().__init__(options)
        config = vit_sizes(options)
        size = config.image_size
        source = open_pictures(options, config.channels, options.classes or config.n_classes, size)
        if options.classes is not None and options.classes < source.n_classes:
            raise UsageError(
                f"--classes {options.classes}: the data has {source.n_classes} classes; expected at least as many"
            )
        n_classes = options.classes or source.n_classes
        self.config = replace(config, channels=source.shape[0], n_classes=n_classes)
        self.n_classes = n_classes
        source.size, source.dtype = size, self.dtype if options.path == "fast" else torch.float32
        self.source = source
        self.flops_per_item = vit_training_flops_per_image(self.config)
        self.n_weights = config.n_layers * (4 * config.dim**2 + 2 * config.dim * config.hidden_dim)
        self.tokens_per_row = config.n_patches

    @classmethod
    def sizes(cls, options: Options) -> dict[str, dict[str, Any]]:
        config = vit_sizes(options)
        widths = {"n_heads": config.n_heads, "hidden_dim": config.hidden_dim}
        why = {
            "expert": "a vision transformer has no experts to spread",
            "context": "a picture is a short sequence, whose class token the head reads on one rank only",
        }
        return {"tensor": widths, "pipeline": {"n_layers": config.n_layers}, "why": why}

    def new_model(self) -> nn.Module:
        from lib.vit import VisionTransformer

        return VisionTransformer(self.config)

    def fast_block(self, model: Any, i: int, path: fast.Path) -> Callable[[Any, Tensor], Tensor]:
        return partial(fast.vit_block_of(model, i, path), path=path)

    def fast_loss(self, model: Any, inputs: Tensor, targets: Tensor, path: fast.Path) -> Tensor:
        return fast.vit_loss(model, inputs, targets, path, call_blocks=True)

    def fast_logits(self, model: Any, inputs: Tensor, path: fast.Path) -> Tensor:
        return fast.vit_logits(model, inputs, path, call_blocks=True)

    def plain_logits(self, model: Any, inputs: Tensor) -> Tensor:
        return model(inputs)

    def exported(self, weights: dict[str, Tensor]) -> export.Exported:
        return export.vit_for_timm(weights, self.config)

    def embed(self, model: Any, inputs: Tensor) -> Tensor:
        return model.embeddings(inputs)

    def head(self, model: Any, x: Tensor) -> Tensor:
        x = model.norm(x)
        return model.head(x[:, 0] if self.config.pooling == "token" else x[:, 1:].mean(dim=1))


def vit_sizes(options: Options) -> vit.ViTConfig:
    """The preset, with what the flags change of it.

    Raises:
        UsageError: patches of this size do not tile the picture.
    """
    changes = {
        "image_size": options.image_size,
        "patch_size": options.patch_size,
        "n_layers": options.n_layers,
        "dim": options.dim,
    }
    if options.dim:
        changes |= {"n_heads": options.dim // HEAD, "hidden_dim": 4 * options.dim}
    try:
        return vit.preset(options.model, **{name: value for name, value in changes.items() if value})
    except ValueError as error:
        raise UsageError(f"--image-size {options.image_size} --patch-size {options.patch_size}: {error}") from None


def gpt2_sizes(options: Options) -> GPT2Config:
    """The preset, with what the flags change of it."""
    config = GPT2_PRESETS[options.model]
    asked: dict[str, int] = {"dim": options.dim, "n_heads": options.dim // HEAD} if options.dim else {}
    asked |= {"n_layers": options.n_layers} if options.n_layers else {}
    return replace(config, context_len=options.length or config.context_len, **asked)


class GPT2Task(Task):
    """Next-token prediction."""

    unit = "token"
    first_parts, last_parts = ("wte", "wpe"), ("ln_f", "wte")
    size_flags = ("--dim", "--n-layers", "--n-experts", "--length", "--model")

    def __init__(self, options: Options):
        from lib.gpt2 import pad_vocab

        super().__init__(options)
        config = gpt2_sizes(options)
        length = config.context_len
        self.config: GPT2Config = replace(config, padded_vocab_size=pad_vocab(config.vocab_size))
        self.source, self.n_classes = open_tokens(options, config.vocab_size, length), config.vocab_size
        self.per_row = self.tokens_per_row = length
        self.flops_per_item = training_flops_per_token(self.config)
        of_mlp = 8 * config.dim**2
        if options.n_experts:
            of_mlp = of_mlp * options.n_experts // (options.top_k or 1)
        self.n_weights = (config.vocab_size + length + config.n_layers * 4 * config.dim) * config.dim
        self.n_weights += config.n_layers * of_mlp
        if options.n_experts:
            self.flops_per_item += 6 * config.n_layers * extra_weights(options, config.dim)

    @classmethod
    def sizes(cls, options: Options) -> dict[str, dict[str, Any]]:
        config = gpt2_sizes(options)
        sizes = {"context": {"length": config.context_len}, "pipeline": {"n_layers": config.n_layers}}
        if options.n_experts:
            why = {"tensor": "--tensor divides an MLP by its hidden features, and mixtures are divided by --expert"}
            return sizes | {"expert": {"n_experts": options.n_experts}, "why": why}
        widths = {"n_heads": config.n_heads, "hidden_dim": 4 * config.dim}
        why = {"expert": "the model has no experts without --n-experts"}
        return sizes | {"tensor": widths, "why": why}

    def new_model(self) -> nn.Module:
        from lib.gpt2 import GPT2

        model = GPT2(self.config)
        if self.options.n_experts:
            put_mixtures(model, self.options, self.config.dim, self.config.n_layers)
        return model

    def describe(self) -> dict[str, Any]:
        o = self.options
        mixture = {"n_experts": o.n_experts, "top_k": o.top_k} if o.n_experts else None
        return {**super().describe(), "mixture": mixture}

    def fast_path(self, device: torch.device) -> fast.Path:
        # the kernel rounds its gradient to 16 bits before the loss scale reaches it: float16 would lose most of it
        return replace(super().fast_path(device), loss_kernel=device.type == "cuda" and self.dtype == torch.bfloat16)

    def fast_block(self, model: Any, i: int, path: fast.Path) -> Callable[[Any, Tensor], Tensor]:
        return partial(fast.gpt2_block, path=path, n_heads=self.config.n_heads)

    def fast_loss(self, model: Any, inputs: Tensor, targets: Tensor, path: fast.Path) -> Tensor:
        return fast.gpt2_loss(model, inputs, targets, path, call_blocks=True)

    def plain_logits(self, model: Any, inputs: Tensor) -> Tensor:
        return model(inputs)[0]

    def exported(self, weights: dict[str, Tensor]) -> export.Exported:
        return export.gpt2_for_transformers(weights, self.config)

    def embed(self, model: Any, inputs: Tensor) -> Tensor:
        return model.wte(inputs) + model.wpe(torch.arange(inputs.shape[1], device=inputs.device))

    def head(self, model: Any, x: Tensor) -> Tensor:
        return model.wte(model.ln_f(x))


class LlamaTask(Task):
    """Next-token prediction by chapter 4's model or a variant of it, on the plain path, in copies or shards."""

    unit, layout = "token", "contiguous"
    size_flags = ("--model",)

    def __init__(self, options: Options):
        super().__init__(options)
        self.config = config = llama_sizes(options)
        length = config.context_len
        self.source, self.n_classes = open_tokens(options, config.vocab_size, length), config.vocab_size
        self.per_row = self.tokens_per_row = length
        self.flops_per_item = flops_per_token(config)
        self.n_weights = weights_per_token(config)
        self.n_weights += 0 if getattr(config, "tied", False) else config.vocab_size * config.dim  # the embedding

    @classmethod
    def sizes(cls, options: Options) -> dict[str, dict[str, Any]]:
        config = llama_sizes(options)
        divides = isinstance(config, VariantConfig) and not (
            SLIDING in config.layer_types or config.softcap or config.sinks
        )
        if options.uses("tensor", "pipeline", "expert", *([] if divides else ["context"])):
            family = "chapter 4's Llama" if options.family in (None, PLAIN) else f"--family {options.family}"
            more = ", or --context" if divides else "; --context divides qwen3 without --window, and qwen3_next"
            raise UsageError(
                f"{options.how}: {family} runs in copies and shards only{', or with divided sequences' * divides}, "
                "because no strategy here divides its layers; "
                f"expected single, ddp or fsdp, or --replicate and --shard{more}"
            )
        if options.path == "fast":
            raise UsageError("--path fast: there is no fast path for a Llama; expected --path plain")
        return {"context": {"length": config.context_len}}

    def new_model(self) -> nn.Module:
        return make_llama(self.config)

    def describe(self) -> dict[str, Any]:
        return {"family": self.options.family or PLAIN, **super().describe()}

    def plain_logits(self, model: Any, inputs: Tensor) -> Tensor:
        return model(inputs)

    def exported(self, weights: dict[str, Tensor]) -> export.Exported:
        if isinstance(self.config, VariantConfig):
            return export.variant_for_transformers(weights, self.config)
        return export.llama_for_transformers(weights, self.config)


class Loss(nn.Module):
    """A model that returns its mean loss, or a stage of one; in evaluation mode it returns its scores.

    Strategies wrap this module, so that all computation happens inside of it.

    Args:
        task: Model, loss and data.
        device: Device of the model.
    """

    is_first = is_last = True  # of the stages of a pipeline
    units: list[nn.Module] | None = None  # that sharding gathers one after the other; None: the blocks

    def __init__(self, task: Task, device: torch.device):
        super().__init__()
        with torch.device(device):
            self.model = task.new_model().to(device)  # torch.normal ignores the default device
        self.task, self.device, options = task, device, task.options
        self.path = task.fast_path(device) if options.path == "fast" else None
        # sharded parameters are gathered in the dtype of the products
        self.mixes = self.path is None and task.dtype != torch.float32 and not options.shards
        self.place_blocks()

    def place_blocks(self) -> None:
        """Make each block compute on the chosen path, compiled if asked for; the module itself stays the same."""
        for i, block in enumerate(blocks_of(self.model)):
            compute = self.task.fast_block(self.model, i, self.path) if self.path else type(block).forward
            if self.task.options.compile == "blocks":
                compute = _compiled(compute)
            if self.path or self.task.options.compile == "blocks":
                block.forward = partial(compute, block)
        if self.task.options.compile == "whole":
            self.compile(dynamic=False)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss of a micro-batch, in float32; in evaluation mode its scores;
        without targets a stage's output.
        """
        if targets is None:
            with self.precision():
                return self.stage(inputs)
        if not self.training and "held_out_top1" in self.task.scores:
            return self.scores_of(self.logits(inputs), targets)
        if self.path:
            loss = self.task.fast_loss(self.model, inputs, targets, self.path)
        else:
            loss = self.loss_of(self.logits(inputs), targets)
        return loss if self.training else loss[None]

    def logits(self, inputs: Tensor) -> Tensor:
        if self.path:
            return self.task.fast_logits(self.model, inputs, self.path)
        with self.precision():
            return self.task.plain_logits(self.model, inputs)

    def scores_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The task's scores of a micro-batch, each a mean: the loss, and for images the accuracy."""
        scores = [self.loss_of(logits, targets)]
        if "held_out_top1" in self.task.scores:
            scores.append((logits[..., : self.task.n_classes].argmax(-1) == targets).float().mean())
        return torch.stack(scores)

    def stage(self, x: Tensor) -> Tensor:
        """This stage's part of the model: from inputs or the residual stream to the residual stream or logits."""
        x = self.task.embed(self.model, x) if self.is_first else x
        for block in blocks_of(self.model):
            x = block(x)
        return self.task.head(self.model, x) if self.is_last else x

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits[..., : self.task.n_classes].float()  # without the logits of padding
        if self.task.options.ours:
            return training.cross_entropy(logits, targets)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Mixed precision of the plain path: chapter 11's, or PyTorch's autocast, which the compiler understands."""
        if not self.mixes:
            return contextlib.nullcontext()
        if self.task.options.ours and not self.task.options.compile:
            return amp.MiniAutocast(self.task.dtype, self.device.type)
        return torch.autocast(self.device.type, self.task.dtype, cache_enabled=not self.task.options.graph)


_compiled_functions: dict[Any, Any] = {}


def _compiled(compute: Any) -> Any:
    """The function, compiled once for all blocks that share it."""
    function, keywords = (compute.func, compute.keywords) if isinstance(compute, partial) else (compute, {})
    if function not in _compiled_functions:
        _compiled_functions[function] = torch.compile(function, dynamic=False)
    return partial(_compiled_functions[function], **keywords)
