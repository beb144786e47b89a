"""Llama 2 on a rented GPU: the model that you wrote, called from your own machine through Modal.

    python -m lib.runs.rent.modal_llama --dry-run              # show what it would do; needs no account and no `modal`
    pip install modal && modal setup                           # once: the package, and an account
    modal secret create huggingface HF_TOKEN=hf_…         # once: your token, after accepting Meta's licence on the hub
    python -m lib.runs.rent.modal_llama --prompt "The for statement" --model 7B

The weights are downloaded once, into a volume that outlives the container.
The container stops by itself when it is idle.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.given.models.gpus import GPUS, Gpu
from lib.given.models.llama import PRESETS
from lib.llama import count_parameters, inference_memory_gb
from lib.runs.flags import ProgramParser, positive, share, whole

APP, VOLUME, SECRET, WEIGHTS = "workbook-llama", "workbook-llama-weights", "huggingface", "/weights"
IDLE_S = 120
PACKAGES = ("torch>=2.11,<2.14", "numpy", "einops", "jaxtyping", "safetensors", "regex", "transformers",
    "sentencepiece",
            "huggingface_hub", "pyyaml")  # fmt: skip


def pick_gpu(memory_gb: float) -> Gpu:
    """The cheapest GPU with this much memory.

    Raises:
        ValueError: no GPU is large enough; the message names the largest.
    """
    large_enough = [gpu for gpu in GPUS if gpu.memory_gb >= memory_gb]
    if not large_enough:
        largest = max(GPUS, key=lambda gpu: gpu.memory_gb)
        raise ValueError(f"{memory_gb:.1f} GB fit on no GPU: the largest is {largest.name} with {largest.memory_gb} GB")
    return min(large_enough, key=lambda gpu: gpu.dollars_per_hour)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run needs, decided before anything is rented."""

    model: str
    bits: int
    memory_gb: float
    gpu: Gpu
    minutes: float

    @property
    def repository(self) -> str:
        return f"meta-llama/Llama-2-{self.model.lower()}-hf"

    @property
    def dollars(self) -> float:
        return self.gpu.dollars_per_hour * self.minutes / 60

    def describe(self) -> str:
        rows = {
            "app": f"{APP}: one class; its @enter method loads the weights, "
            "its other method generates text and streams it back",
            "image": f"debian_slim, Python {sys.version_info.major}.{sys.version_info.minor}, "
            f"pip install {' '.join(PACKAGES)}; "
            "and this book",
            "volume": f"{VOLUME} at {WEIGHTS}, created if it does not exist; "
            f"holds {self.repository} after the first run",
            "secret": f"{SECRET} (HF_TOKEN)",
            "memory": f"{count_parameters(PRESETS[self.model]):,} weights of {self.bits} bits x 1.2 = "
            f"{self.memory_gb:.1f} GB",
            "gpu": f"{self.gpu.name} ({self.gpu.memory_gb} GB), the cheapest that fits",
            "cost": f"${self.gpu.dollars_per_hour:.2f} an hour: ${self.dollars:.2f} for {self.minutes:.0f} minutes "
            f"and {IDLE_S} s of idling at most ${self.gpu.dollars_per_hour * IDLE_S / 3600:.2f} more",
        }
        return "\n".join(f"{name:8} {text}" for name, text in rows.items())


def make_plan(model: str = "7B", bits: int = 16, minutes: float = 10.0) -> Plan:
    """Choose the GPU by the memory formula of chapter 4."""
    memory_gb = inference_memory_gb(count_parameters(PRESETS[model]), bits)
    return Plan(model=model, bits=bits, memory_gb=memory_gb, gpu=pick_gpu(memory_gb), minutes=minutes)


class Writer:
    """The container's part: plain Python, so that it can be tried on a checkpoint of any size."""

    def __init__(self, folder: str, model: str, bits: int = 16, device: str = "cuda", tokenizer: Any = None):
        import torch

        from lib.given.data.weights import load_weights
        from lib.given.models.llama import hf_tensors
        from lib.llama import Llama, convert_hf_state_dict

        config, old = PRESETS[model], ("rotary_emb.inv_freq",)
        shapes = {name: shape for name, (_, shape) in hf_tensors(config).items()}
        weights = convert_hf_state_dict(load_weights(folder, shapes, ignore=old), config)
        with torch.device("meta"):
            self.model = Llama(config)
        dtype = {16: torch.float16, 32: torch.float32}[bits]
        weights = {name: weight.to(device, dtype) for name, weight in weights.items()}
        self.model.load_state_dict(weights, assign=True)
        self.tokenizer, self.device = tokenizer or _their_tokenizer(folder), device

    def write(
        self, prompt: str, max_new_tokens: int, temperature: float = 0.7, top_k: int | None = 40
    ) -> Iterator[str]:
        """Yields the text piece by piece, as it is generated."""
        import torch

        from lib.llama import generate

        ids = torch.tensor([self.tokenizer.encode(prompt)], device=self.device)
        settings = {"temperature": temperature, "top_k": top_k, "eos_id": self.tokenizer.eos_token_id}
        new: list[int] = []
        shown = ""
        for step in generate(self.model, ids, max_new_tokens, **settings):
            new.append(int(step[0]))
            text = self.tokenizer.decode(new)
            yield text[len(shown) :]
            shown = text


def _their_tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def make_app(plan: Plan) -> tuple[Any, Any]:
    """The Modal app and its class; nothing is rented before it is called.

    Raises:
        ModuleNotFoundError: `modal` is not installed.
    """
    import modal

    here = Path(__file__).parents[3]
    image = modal.Image.debian_slim(python_version=f"{sys.version_info.major}.{sys.version_info.minor}")
    image = image.pip_install(*PACKAGES)
    image = image.env({"PYTHONPATH": "/book"})
    for folder in ("lib", "solutions"):
        image = image.add_local_dir(str(here / folder), f"/book/{folder}")
    image = image.add_local_file(str(here / "book.yml"), "/book/book.yml")
    volume = modal.Volume.from_name(VOLUME, create_if_missing=True)
    app = modal.App(APP)
    repository, model, bits = plan.repository, plan.model, plan.bits

    class Remote:
        @modal.enter()
        def load(self) -> None:
            from huggingface_hub import snapshot_download

            from lib.runs.rent.modal_llama import WEIGHTS, Writer

            patterns = ["*.safetensors", "*.safetensors.index.json", "tokenizer*", "*.json"]
            folder = snapshot_download(repository, local_dir=f"{WEIGHTS}/{repository}", allow_patterns=patterns)
            volume.commit()
            self.writer = Writer(folder, model, bits)

        @modal.method(is_generator=True)
        def write(self, prompt: str, max_new_tokens: int, temperature: float) -> Iterator[str]:
            yield from self.writer.write(prompt, max_new_tokens, temperature)

    settings = {"gpu": plan.gpu.name, "volumes": {WEIGHTS: volume}, "timeout": 3600, "scaledown_window": IDLE_S}
    secrets = [modal.Secret.from_name(SECRET)]
    # serialized: the class is nested here, because the plan decides its GPU
    return app, app.cls(image=image, secrets=secrets, serialized=True, **settings)(Remote)


def main(argv: list[str] | None = None) -> int:
    parser = ProgramParser(prog="python -m lib.runs.rent.modal_llama", description="Llama 2 on a rented GPU")
    parser.add_argument("--model", choices=[name for name in PRESETS if name != "tiny"], default="7B")
    parser.add_argument("--bits", type=int, choices=[16, 32], default=16)
    parser.add_argument("--prompt", default='The "for" statement')
    parser.add_argument("--max-new-tokens", type=whole(1), default=200)
    parser.add_argument("--temperature", type=share, default=0.7)
    parser.add_argument("--minutes", type=positive, default=10.0, help="minutes that the cost estimate assumes")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and do nothing")
    options = parser.parse_args(argv)
    try:
        plan = make_plan(options.model, options.bits, options.minutes)
    except ValueError as error:
        print(f"{error}; use fewer bits, or divide the model among several GPUs as in chapter 13", file=sys.stderr)
        return 1
    print(plan.describe())
    if options.dry_run:
        print("dry run  nothing was rented and nothing was sent")
        return 0
    try:
        app, remote = make_app(plan)
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed: pip install modal && modal setup; or --dry-run", file=sys.stderr)
        return 1
    with app.run():
        for piece in remote().write.remote_gen(options.prompt, options.max_new_tokens, options.temperature):
            print(piece, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
