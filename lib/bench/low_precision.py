"""Measure eight bits and fewer on one GPU: products, training steps, loss curves, and generation from four-bit weights.

Run ``python -m lib.bench.low_precision products steps losses tokens`` (or only some of them) on a machine with one GPU;
it writes them into ``chapters/measurements/low_precision.json`` and keeps what it does not measure anew.
``--tiny --device cpu`` tries the program.
Competitors take turns in random order. torchao's layers are measured beside the book's where torchao is installed.
"""

import dataclasses
import logging
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib.bench.kit import device_seconds, record, spread
from lib.demos.low_precision import replace_linears, train_gpt2
from lib.fast import models as fast
from lib.fast.parts.float8 import DelayedLinear, Scales
from lib.given.data.record import MEASUREMENTS, load
from lib.given.kernels.quantized import has_float8, scaled_mm
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.llama import LLAMA_2_7B, LlamaConfig
from lib.given.models.vit import ViTConfig
from lib.gpt2 import GPT2
from lib.llama import Llama, generate
from lib.low_precision import Float8Linear, Int4Linear, absmax_scale, quantize, scaled_matmul
from lib.runs.flags import ProgramParser
from lib.vit import VisionTransformer

E4M3 = torch.float8_e4m3fn
OUTSIDE, NOT_COMPILED, GRAPH = "delayed, outside", ", not compiled", ", in a graph"
RECIPES = ("dynamic", "delayed", "rowwise", "blockwise")
SHAPES = {
    "GPT-2 XL, c_fc": (8192, 1600, 6400),
    "GPT-2 XL, c_proj": (8192, 6400, 1600),
    "ViT-H/14, w1": (16_448, 1280, 5120),
    "square": (8192, 8192, 8192),
}
TINY_SHAPES = {"tiny": (32, 48, 64)}
Call = Callable[[], Any]


class Bench:
    """What all parts share: the device, how often each call is timed, and the sizes."""

    def __init__(self, device: str, tiny: bool, ways: list[str] | None = None):
        self.device, self.tiny, self.n_rounds, self.ways = torch.device(device), tiny, 2 if tiny else 12, ways

    def seconds(self, call: Call) -> float:
        """Time of a call, until everything that it started on the device is done."""
        return device_seconds(call, self.device)

    def compare(self, calls: dict[str, Call], n_rounds: int | None = None) -> dict[str, Any]:
        """Seconds of each call, in random order in each round; if a call raises, the error is recorded instead."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        failed: dict[str, str] = {}
        for round_ in range((n_rounds or self.n_rounds) + 2):
            for name in random.sample(list(calls), len(calls)):
                if name in failed:
                    continue
                try:
                    taken = self.seconds(calls[name])
                except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError) as error:
                    failed[name] = str(error).splitlines()[0][:200]
                    continue
                if round_ > 1:
                    times[name].append(taken)
        return {name: spread(taken) for name, taken in times.items() if name not in failed} | {"failed": failed}

    # ---- products ----------------------------------------------------------------------------------------------------

    def products(self) -> dict[str, Any]:
        """For each shape, the times of the bfloat16 product and of the float8 products.

        The latter are ``torch._scaled_mm`` and `scaled_matmul` on factors that are quantized already, and
        `scaled_matmul` with the casts.
        """
        found: dict[str, Any] = {}
        shapes = TINY_SHAPES if self.tiny else SHAPES
        for name, (m, k, n) in shapes.items():
            x, w = (torch.randn(size, k, device=self.device).bfloat16() for size in (m, n))
            found[name] = {"shape": [m, k, n], "flops": 2 * m * k * n, "seconds": self.compare(self._products(x, w))}
            print(
                name,
                {who: f"{1e6 * t['median']:.0f} us" for who, t in found[name]["seconds"].items() if who != "failed"},
                flush=True,
            )
        return found

    def _products(self, x: Tensor, w: Tensor) -> dict[str, Call]:
        calls: dict[str, Call] = {"bfloat16": lambda: x @ w.T}
        for recipe, dims in {"tensor": (None, None), "row": (1, 0), "block": ((128, 128), (128, 128))}.items():
            calls |= self._by_scales(recipe, x, w, dims)
        return calls

    def _by_scales(self, recipe: str, x: Tensor, w: Tensor, dims: tuple[Any, Any]) -> dict[str, Call]:
        def cast() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            scale_x, scale_w = absmax_scale(x, E4M3, dims[0]), absmax_scale(w.T, E4M3, dims[1])
            return (
                quantize(x, scale_x, E4M3),
                quantize(w, scale_w.T if scale_w.ndim else scale_w, E4M3).T,
                scale_x,
                scale_w,
            )

        given = cast()
        calls: dict[str, Call] = {
            f"{recipe}: scaled_matmul": lambda: scaled_matmul(*given, torch.bfloat16),
            f"{recipe}: casts and scaled_matmul": lambda: scaled_matmul(*cast(), torch.bfloat16),
        }
        if recipe != "block":
            calls[f"{recipe}: torch._scaled_mm"] = lambda: torch._scaled_mm(
                given[0], given[1], scale_a=given[2], scale_b=given[3], out_dtype=torch.bfloat16
            )
            if has_float8(given[0]):
                calls[f"{recipe}: with fast sums"] = lambda: scaled_mm(*given, torch.bfloat16, fast=True)
        return calls

    # ---- steps -------------------------------------------------------------------------------------------------------

    def steps(self) -> dict[str, Any]:
        """Forward, backward and AdamW of GPT-2 XL and ViT-H/14 with compiled blocks: bfloat16, the recipes,
        torchao's float8.

        "delayed" changes its history in the backward pass, which the compiler refuses, so it is measured uncompiled,
        and "bfloat16" and "dynamic" uncompiled beside it.
        "delayed, outside" is the same recipe with the history outside of the layers (`lib.fast.parts.float8`).
        It and "bfloat16" are also measured as `lib.runs` trains: with all kernels of `lib.fast`,
        and with the step in a CUDA graph.
        """
        found: dict[str, dict[str, Any]] = {}
        variants = {"bfloat16": lambda m: m, "torchao": _torchao_training}
        variants |= {recipe: lambda m, r=recipe: _with_recipe(m, r) for recipe in RECIPES}
        variants[OUTSIDE] = lambda m: replace_linears(m, DelayedLinear, skip=("head",))
        ways = [(way, "") for way in variants if way != "delayed"]
        ways += [(way, NOT_COMPILED) for way in ("bfloat16", "dynamic", "delayed")] + [
            ("bfloat16", GRAPH),
            (OUTSIDE, GRAPH),
        ]
        for name, (make, batch) in self._models().items():
            found[name] = {"batch": list(batch[0].shape)}
            for way, how in ways:  # one after the other: two copies of the largest would not fit
                label = way + how
                if self.ways and label not in self.ways:
                    continue
                torch.manual_seed(0)
                try:
                    with self.device:
                        model = variants[way](make().to(self.device))
                    found[name] |= self.compare({label: self._step(model, batch, how)})
                except (ImportError, RuntimeError, AssertionError) as error:
                    found[name][label] = {"failed": str(error)[:200]}
                model = None
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                print(name, label, found[name].get(label), flush=True)
        return found

    def _models(self) -> dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]]:
        if self.tiny:
            gpt2 = GPT2Config(vocab_size=64, context_len=16, dim=32, n_layers=1, n_heads=2)
            vit, batch = ViTConfig(image_size=28, patch_size=14, dim=32, n_layers=1, n_heads=2, hidden_dim=64), (2, 2)
        else:
            gpt2 = GPT2Config(vocab_size=50_304, context_len=1024, dim=1600, n_layers=48, n_heads=25)
            vit, batch = (
                ViTConfig(image_size=224, patch_size=14, dim=1280, n_layers=32, n_heads=16, hidden_dim=5120),
                (16, 128),
            )
        tokens = torch.randint(gpt2.vocab_size, (batch[0], gpt2.context_len), device=self.device)
        images = torch.randn(batch[1], vit.channels, vit.image_size, vit.image_size, device=self.device)
        labels = torch.randint(vit.n_classes, (batch[1],), device=self.device)
        return {
            "GPT-2 XL": (lambda: GPT2(gpt2), (tokens, tokens)),
            "ViT-H/14": (lambda: VisionTransformer(vit), (images, labels)),
        }

    def _step(self, model: Any, batch: tuple[Tensor, ...], how: str) -> Call:
        in_graph, is_vit = how == GRAPH and self.device.type == "cuda", isinstance(model, VisionTransformer)
        path = fast.Path(dtype=torch.bfloat16, loss_kernel=not self.tiny)
        if how == GRAPH:
            path = dataclasses.replace(path, attention="quickest", kernels=True)
        compute: Any = fast.vit_block if is_vit else fast.gpt2_block
        compute = torch.compile(compute, dynamic=False) if how != NOT_COMPILED and not self.tiny else compute
        sizes = {} if is_vit else {"n_heads": model.config.n_heads}
        for block in model.blocks if is_vit else model.h:
            block.forward = partial(compute, block, path=path, **sizes)
        loss_of: Any = fast.vit_loss if is_vit else fast.gpt2_loss
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, fused=self.device.type == "cuda", capturable=in_graph
        )
        scales = Scales(model)

        def step() -> Tensor:
            loss = loss_of(model, *batch, path, call_blocks=True)
            loss.backward()
            optimizer.step()
            scales.step()
            optimizer.zero_grad()
            return loss.detach()

        return fast.capture(step) if in_graph else step

    # ---- losses ------------------------------------------------------------------------------------------------------

    def losses(self) -> dict[str, Any]:
        """Losses of the chapter's small GPT-2 in bfloat16, with three seeds, and in each recipe."""
        n_steps = 2 if self.tiny else 1000
        runs = {f"bfloat16, seed {seed}": ("bfloat16", seed) for seed in range(1 if self.tiny else 3)}
        runs |= {recipe: (recipe, 0) for recipe in RECIPES}
        return {name: train_gpt2(recipe, n_steps, seed, self.device.type) for name, (recipe, seed) in runs.items()}

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def tokens(self) -> dict[str, Any]:
        """Tokens a second that Llama 2 7B, with random weights, generates for one sequence: bfloat16, `Int4Linear`,
        torchao's int4.
        """
        config = LlamaConfig(vocab_size=64, dim=128, n_layers=1, n_heads=2, hidden_dim=128) if self.tiny else LLAMA_2_7B
        n = 3 if self.tiny else 64
        prompt = torch.zeros(1, 8, dtype=torch.long, device=self.device)
        found: dict[str, Any] = {}
        variants: dict[str, Callable[[nn.Module], nn.Module]] = {
            "bfloat16": lambda m: m,
            "Int4Linear": lambda m: replace_linears(m, Int4Linear, skip=("output",)),
            "torchao": _torchao_int4,
        }
        for name, change in variants.items():
            torch.manual_seed(0)
            with self.device:
                model = Llama(config).to(torch.bfloat16).eval()
            try:
                change(model)
                times = self.compare({name: lambda m=model: list(generate(m, prompt, n, temperature=0))}, 4)
                if self.device.type == "cuda":
                    times |= self.compare({f"{name}, one step in a graph": self._graph(model, prompt)})
            except (ImportError, RuntimeError, AssertionError) as error:
                times = {name: {"failed": str(error)[:200]}}
            found |= times
            if "median" in times.get(name, {}):
                found[name]["tokens_per_s"] = n / times[name]["median"]
            print(name, times, flush=True)
            del model
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return found

    def _graph(self, model: Llama, prompt: Tensor) -> Call:
        """One step of generation at the position after the prompt, as a CUDA graph."""
        cache, start = model.make_cache(1, prompt.shape[1] + 1), prompt.shape[1]
        with torch.no_grad():
            model(prompt, cache)

        @torch.no_grad()
        def step() -> Tensor:
            for layer in cache:
                layer.length = start
            return model(prompt[:, :1], cache)

        return fast.capture(step)


class _Called(nn.Module):
    """Hides from the fast path that torchao's layer is an ``nn.Linear``, so that it is called."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _with_recipe(model: nn.Module, recipe: str) -> nn.Module:
    return replace_linears(model, lambda linear: Float8Linear(linear, recipe), skip=("head",))


def _quietly(load_it: Callable[[], Any]) -> Any:
    """Import torchao without its warnings about kernels that this machine lacks."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load_it()
    finally:
        logging.disable(logging.NOTSET)


def _torchao_training(model: nn.Module) -> nn.Module:
    def load_it() -> Any:
        from torchao.float8 import convert_to_float8_training

        return convert_to_float8_training

    if not next(model.parameters()).is_cuda:
        raise RuntimeError("torchao trains in float8 on a GPU only")
    convert = _quietly(load_it)
    with torch.autocast("cuda", torch.bfloat16):
        convert(model, module_filter_fn=lambda m, name: isinstance(m, nn.Linear) and name != "head")
    return replace_linears(model, _Called, skip=("head",))


def _torchao_int4(model: nn.Module) -> nn.Module:
    def load_it() -> Any:
        from torchao.quantization import Int4WeightOnlyConfig, quantize_

        return quantize_, Int4WeightOnlyConfig

    if not next(model.parameters()).is_cuda:
        raise RuntimeError("torchao's four-bit product needs a GPU")
    quantize_, config = _quietly(load_it)
    tiles: Any = (
        "tile_packed_to_4d"  # PyTorch's own kernel; the other formats need libraries that PyTorch doesn't bring
    )
    quantize_(
        model,
        config(group_size=128, int4_packing_format=tiles),
        filter_fn=lambda m, name: isinstance(m, nn.Linear) and name != "output",
    )
    return model


def main(arguments: list[str] | None = None, folder: Path = MEASUREMENTS) -> None:
    parser = ProgramParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="products, steps, losses, tokens; all unless told")
    parser.add_argument("--tiny", action="store_true", help="try the program with tiny sizes")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--ways", nargs="+", help="measure only these in steps, such as 'bfloat16, in a graph', and keep the others"
    )
    options = parser.parse_args(arguments)
    known = ("products", "steps", "losses", "tokens")
    if unknown := set(options.parts) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    random.seed(0)
    bench = Bench(options.device, options.tiny, options.ways)
    found = {part: getattr(bench, part)() for part in options.parts or known}
    try:
        before = load("low_precision", folder)["results"]
    except FileNotFoundError:
        before = {}
    if before.get("tiny") != options.tiny:
        before = {}
    if options.ways and "steps" in found and "steps" in before:
        found["steps"] = {model: before["steps"][model] | new for model, new in found["steps"].items()}
    record("low_precision", before | {"tiny": options.tiny} | found, folder)


if __name__ == "__main__":
    main()
