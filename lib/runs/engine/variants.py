"""The Llama that a run trains: chapter 4's, or one with the variants of chapters 23 and 24."""

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lib.given.models.llama import PRESETS, LlamaConfig
from lib.given.models.variants import DEFAULTS, LINEAR, VariantConfig, variant_of
from lib.runs.engine.options import Options
from lib.runs.flags import Parser, UsageError, whole

PLAIN = "llama"
STATES = "qwen3_next"
"""The family in which only every n-th layer has full attention, and the others are linear."""


def add_variant_flags(parser: Parser) -> argparse._ArgumentGroup:
    """The flags that choose a family of Llamas and its layers."""
    what = parser.add_argument_group("variants of the Llama, chapters 23 and 24")
    what.add_argument(
        "--family", choices=(PLAIN, *DEFAULTS), default=PLAIN,
        help="llama: chapter 4's; the others have the preset's sizes, and norms, windows, gates and linear layers as "
        "the models of that name; qwen3_next is the hybrid, without experts; gpt_oss has one expert in each layer",
    )  # fmt: skip
    what.add_argument(
        "--window", type=whole(1),
        help="keys that a query of a sliding layer sees; default: a quarter of --length for olmo3, gemma2, gemma3 and "
        "gpt_oss, no such layers for qwen3",
    )  # fmt: skip
    what.add_argument(
        "--interval", type=whole(1),
        help="n: every n-th layer sees everything, the others are sliding or linear; default: 2 for gemma2 and "
        "gpt_oss, 6 for gemma3, else 4, but at most the number of layers",
    )  # fmt: skip
    return what


def llama_sizes(options: Options) -> LlamaConfig:
    """The preset, with the length and the family that the flags ask for.

    Raises:
        UsageError: the family has no such layers.
    """
    sizes = PRESETS[options.model]
    sizes = replace(sizes, context_len=options.length or sizes.context_len)
    family, window, interval = options.family or PLAIN, options.window, options.interval
    if window is not None and family in (PLAIN, STATES):
        raise UsageError(f"--window {window} with --family {family}, which has no sliding layers; "
                         "expected qwen3, olmo3, gemma2, gemma3 or gpt_oss")  # fmt: skip
    if interval is not None and (family == PLAIN or (family == "qwen3" and window is None)):
        raise UsageError(f"--interval {interval} with --family {family}, whose layers all see everything; "
                         "expected qwen3 with --window, or olmo3, gemma2, gemma3, gpt_oss or qwen3_next")  # fmt: skip
    if interval is not None and interval > sizes.n_layers:
        raise UsageError(
            f"--interval {interval}: --model {options.model} has {sizes.n_layers} layers; expected at most as many"
        )
    return sizes if family == PLAIN else variant_of(sizes, family, window, interval)


def make_llama(config: LlamaConfig) -> nn.Module:
    """The model of a configuration."""
    if isinstance(config, VariantConfig):
        from lib.runs.variants import VariantLlama

        return VariantLlama(config)
    from lib.llama import Llama

    return Llama(config)


def config_from(settings: dict[str, Any]) -> LlamaConfig:
    """The configuration that a checkpoint describes."""
    return (VariantConfig if "layer_types" in settings else LlamaConfig)(**settings)


def weights_per_token(config: LlamaConfig) -> int:
    """Weights that a token is multiplied by: those of the blocks and of the output layer, norms left out."""
    with torch.device("meta"):
        model = make_llama(config)
    named = model.named_parameters()
    n_weights = sum(weight.numel() for name, weight in named if weight.dim() > 1 and not name.endswith("bias"))
    return n_weights if getattr(config, "tied", False) else n_weights - config.vocab_size * config.dim


def flops_per_token(config: LlamaConfig) -> int:
    """FLOPs of a training step for each token, counted as chapter 8 counts GPT-2's.

    A sliding layer's query meets the keys of its window. In a linear layer each position reads its state for the
    correction, writes it, and reads it for the output.
    """
    of_keys = config.n_heads * config.head_dim
    windows = getattr(config, "windows", [None] * config.n_layers)
    multiplies = sum(2 * of_keys * min(window or config.context_len, config.context_len) for window in windows)
    if isinstance(config, VariantConfig):
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        multiplies += config.layer_types.count(LINEAR) * 3 * state
    return 3 * 2 * (weights_per_token(config) + multiplies)
