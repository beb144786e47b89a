"""Time attention with windows, soft caps, sinks and documents beside compiled FlexAttention and PyTorch's backends.

``python -m lib.bench.kernels.flash_variants`` on a Hopper GPU (four minutes) adds its rows to
``flash_variants.json`` under the GPU's name, and keeps the rows of other GPUs.
Forward and backward run together in bf16, in random order, called in a row from Python and in a CUDA graph;
of absorbed attention, whose keys are wider than its values, only forward.
Each row also says what share of the GPU's peak the pairs that a query sees would take at those times:
products of hidden pairs do not count.
``--only`` measures some cases anew and keeps the others; ``--tiny`` runs a toy size and times nothing.
"""

import argparse
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lib.bench.kernels import flash_tune
from lib.bench.kernels.flash_shapes import Shape, in_turns, inputs, prepare
from lib.bench.kit import machine, record
from lib.fast.attention.flash import flash_attention_fast
from lib.fast.attention.latent import latent_attention
from lib.fast.variants import Documents
from lib.given.data.record import MEASUREMENTS, load
from lib.given.models.gpus import SHEETS
from lib.runs.flags import ProgramParser, whole

NAME = "flash_variants"
PEAK_FLOPS = SHEETS["H100"].peak_flops  # an H200 has the same


class Case(NamedTuple):
    """Sizes of one call, all causal, and what it has beside the causal mask."""

    batch: int
    heads: int
    groups: int
    length: int
    width: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    document: int | None = None  # mean length of documents, which have random bounds
    latent: int | None = None  # columns of the keys that are the values, too
    queries: int | None = None  # as many as keys if None
    values: int | None = None  # width of values; that of keys if None

    @property
    def shape(self) -> Shape:
        """Sizes alone."""
        return Shape(*self[:5], causal=True)

    @property
    def is_plain(self) -> bool:
        """Whether PyTorch's fast backends compute it."""
        return self[5:9] == (None, None, False, None)


CASES = {
    "window of 1,024 in 16,384, 32 on 8, width 128": Case(1, 32, 8, 16_384, 128, window=1024),
    "Mistral: window of 4,096 in 8,192, 32 on 8, width 128": Case(1, 32, 8, 8192, 128, window=4096),
    "gpt-oss: window of 128 in 8,192 with sinks, 64 on 8, width 64": Case(1, 64, 8, 8192, 64, 128, has_sinks=True),
    "gpt-oss: all of 8,192 with sinks, 64 on 8, width 64": Case(1, 64, 8, 8192, 64, has_sinks=True),
    "Gemma 2: window of 4,096 in 8,192, soft cap, 8 on 4, width 256": Case(1, 8, 4, 8192, 256, 4096, 50.0),
    "Gemma 2: all of 8,192, soft cap, 8 on 4, width 256": Case(1, 8, 4, 8192, 256, softcap=50.0),
    "Gemma 2 27B: all of 8,192, soft cap, 32 on 16, width 128": Case(1, 32, 16, 8192, 128, softcap=50.0),
    "packed documents of 1,024 in 16,384, 32 on 8, width 128": Case(1, 32, 8, 16_384, 128, document=1024),
    "packed documents of 512 in 4 x 4,096, 12 heads, width 64": Case(4, 12, 12, 4096, 64, document=512),
    "width 256: 4,096, 16 on 8": Case(1, 16, 8, 4096, 256),
    "width 256: 2 x 4,096, 8 heads": Case(2, 8, 8, 4096, 256),
    "width 192: 4,096, 16 on 8": Case(1, 16, 8, 4096, 192),
    "DeepSeek: 4,096, 16 heads, keys 192, values 128": Case(1, 16, 16, 4096, 192, values=128),
    "absorbed: 4,096, 16 heads, keys 576, values 512 (forward)": Case(1, 16, 1, 4096, 576, latent=512),
    "absorbed: one token after 16,384, 128 heads, keys 576, values 512 (forward)": Case(
        1, 128, 1, 16_384, 576, latent=512, queries=1
    ),
    "short: 512, 32 on 8, width 128": Case(1, 32, 8, 512, 128),
    "short: 1,024, 32 on 8, width 128": Case(1, 32, 8, 1024, 128),
}
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash backend": SDPBackend.FLASH_ATTENTION,
    "memory-efficient backend": SDPBackend.EFFICIENT_ATTENTION,
}
TINY = Case(2, 4, 2, 64, 16, 20, 5.0, True, 24)
Attend = Callable[[list[Tensor]], Tensor]


class Given(NamedTuple):
    """The tensors of a case."""

    leaves: list[Tensor]  # q, k, v, and the sinks if there are any
    grad: Tensor
    ids: Tensor | None  # of documents


def given(case: Case, device: str) -> Given:
    """Random tensors, and documents with random bounds, always the same; of absorbed attention queries and keys."""
    if case.latent is not None:
        torch.manual_seed(0)
        shapes = (case.batch, case.heads, case.queries or case.length), (case.batch, 1, case.length)
        q, k = (torch.randn(*shape, case.width, device=device, dtype=torch.bfloat16) for shape in shapes)
        return Given([q, k], q, None)
    leaves, grad = inputs(case.shape, device)
    if case.values is not None:
        leaves[2], grad = (x.detach()[..., : case.values].contiguous() for x in (leaves[2], grad))
        leaves[2].requires_grad_()
    if case.has_sinks:
        leaves.append(torch.randn(case.heads, device=device, dtype=grad.dtype).requires_grad_())
    if case.document is None:
        return Given(leaves, grad, None)
    random = torch.Generator().manual_seed(0)
    starts = torch.rand(case.batch, case.length, generator=random) < 1 / case.document
    return Given(leaves, grad, starts.cumsum(1).to(device))


def pairs(case: Case, ids: Tensor | None) -> int:
    """How many pairs of a query and a key are seen, in all query heads of all sequences."""
    at = torch.arange(case.length)[-(case.queries or case.length) :]
    low = torch.zeros(case.batch, len(at), dtype=torch.long)
    if case.window is not None:
        low = low.maximum(at - case.window + 1)
    if ids is not None:
        low = low.maximum(Documents.from_ids(ids.cpu()).spans[:, 0])
    return case.heads * int((at + 1 - low).sum())


def flops(case: Case, ids: Tensor | None) -> int:
    """Operations of the two products of the forward pass and the five of the backward pass on the pairs seen."""
    if case.latent is not None:
        return 2 * (case.width + case.latent) * pairs(case, ids)
    return 2 * (4 * case.width + 3 * (case.values or case.width)) * pairs(case, ids)


# ---- competitors -----------------------------------------------------------------------------------------------------


def absorbed(rank: int, width: int) -> Attend:
    """Ours for keys and values that are one tensor, of which the values are the first ``rank`` columns."""

    def attend(leaves: list[Tensor]) -> Tensor:
        (q, turned), (latents, keys) = (x.tensor_split([rank], -1) for x in (leaves[0], leaves[1][:, 0]))
        return latent_attention(q, turned, latents, keys, scale=width**-0.5)

    return attend


def ours(case: Case, ids: Tensor | None) -> Attend:
    if case.latent is not None:
        return absorbed(case.latent, case.width)
    documents = None if ids is None else Documents.from_ids(ids)  # once for a batch, as in a model

    def attend(leaves: list[Tensor]) -> Tensor:
        q, k, v, *sinks = leaves
        options: dict[str, Any] = {"window": case.window, "softcap": case.softcap, "documents": documents}
        return flash_attention_fast(q, k, v, True, **options, sinks=sinks[0] if sinks else None)

    return attend


def flex(case: Case, ids: Tensor | None, device: str) -> Attend:
    """Compiled FlexAttention; a sink is a factor of its output, made from its logsumexp."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    def sees(b, h, q, k):
        seen = q >= k
        if case.window is not None:
            seen = seen & (q - k < case.window)
        return seen if ids is None else seen & (ids[b, q] == ids[b, k])

    def capped(score, b, h, q, k):
        cap = case.softcap or 1.0
        return cap * torch.tanh(score / cap)

    def sees_late(b, h, q, k):
        return sees(b, h, q + case.length - (case.queries or case.length), k)

    n = None if ids is None else case.batch
    mask = create_block_mask(sees_late, n, None, case.queries or case.length, case.length, device=device)
    options: dict[str, Any] = {
        "block_mask": mask,
        "score_mod": None if case.softcap is None else capped,
        "enable_gqa": True,
    }

    def attend(leaves: list[Tensor]) -> Tensor:
        q, k, *rest = leaves
        v, *sinks = rest or [k[..., : case.latent]]
        if not sinks:
            return flex_attention(q, k, v, **options)
        out, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
        return out * torch.sigmoid(aux.lse - sinks[0][:, None])[..., None].to(out.dtype)

    return torch.compile(attend) if device == "cuda" else attend


def backend(kind: SDPBackend, case: Case) -> Attend:
    """One of PyTorch's backends, for what is plain."""

    def attend(leaves: list[Tensor]) -> Tensor:
        q, k, *values = leaves
        v, is_causal = values[0] if values else k[..., : case.latent], q.shape[2] == k.shape[2]
        with sdpa_kernel([kind]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])

    return attend


def competitors(case: Case, ids: Tensor | None, device: str) -> dict[str, Attend]:
    """Ours first."""
    found = {"ours": ours(case, ids), "FlexAttention": flex(case, ids, device)}
    kinds = BACKENDS | ({"math backend": SDPBackend.MATH} if case.latent else {})
    return found | ({name: backend(kind, case) for name, kind in kinds.items()} if case.is_plain else {})


def measure(case: Case) -> dict[str, Any]:
    """Milliseconds of forward and backward by name and way, and the share of the peak."""
    leaves, grad, ids = given(case, "cuda")
    ready: dict[str, tuple[Callable[[], Tensor], int]] = {}
    for name, attend in competitors(case, ids, "cuda").items():

        def step(attend: Attend = attend) -> tuple[Tensor, ...]:
            o = attend(leaves)
            if case.latent is not None:
                return (o,)
            return o, *torch.autograd.grad(o, leaves, grad)

        try:
            ready |= prepare(name, step)
        except Exception as error:  # a competitor that cannot run is a result like any other
            print("cannot run:", name, case, str(error)[:200], flush=True)
    ms = in_turns(ready)
    share = {name: flops(case, ids) / (1e-3 * t["median"]) / PEAK_FLOPS for name, t in ms.items()}
    return {"case": case._asdict(), "flops": flops(case, ids), "ms": ms, "share_of_peak": share}


def shown(row: dict[str, Any]) -> str:
    """Each competitor's milliseconds and share of the peak, and what ours takes of the best other one's time."""
    ms, share = row["ms"], row["share_of_peak"]
    parts = [f"{name} {t['median']:.3f} ms ({100 * share[name]:.0f} %)" for name, t in ms.items()]
    for way in ("row", "graph"):
        others = [t["median"] for name, t in ms.items() if name.endswith(way) and not name.startswith("ours")]
        if f"ours, {way}" in ms and others:
            parts.append(f"ours / best, {way}: {ms[f'ours, {way}']['median'] / min(others):.2f}")
    return "; ".join(parts)


def try_out() -> None:
    """Ours and FlexAttention on a toy case on the CPU, which agree."""
    leaves, _, ids = given(TINY, "cpu")
    leaves = [x.detach().float() for x in leaves]
    both = [attend(leaves) for attend in competitors(TINY, ids, "cpu").values()]
    torch.testing.assert_close(*both, atol=1e-4, rtol=1e-4)
    print(f"{len(CASES)} cases would be timed, but there is no GPU")


def make_parser() -> ProgramParser:
    parser = ProgramParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose name has one of these words in it")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tune", type=whole(1), metavar="PROCESSES", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    names = [n for n in CASES if not options.only or any(w in n for w in options.only)]
    if not names:
        parser.error(
            f"--only {' '.join(options.only)}: no case has it in its name, expected a word of {'; '.join(CASES)}"
        )
    if options.tiny:
        try_out()
        return
    if options.tune:
        flash_tune.tune({name: CASES[name] for name in names}, given, options.tune)
        return
    cards = load(NAME, options.folder)["results"]["cards"] if (options.folder / f"{NAME}.json").exists() else {}
    known = cards.get(torch.cuda.get_device_name(), {}).get("rows", {}) if options.only else {}
    start, date = time.perf_counter(), datetime.now(UTC).strftime("%Y-%m-%d")
    for name in names:
        torch._dynamo.reset()  # after eight shapes FlexAttention would no longer be compiled
        known[name] = measure(CASES[name]) | {"date": date}
        print(f"{time.perf_counter() - start:.0f} s {name}: {shown(known[name])}", flush=True)
        rows = {n: known[n] for n in CASES if n in known}
        cards[torch.cuda.get_device_name()] = {"rows": rows, "machine": machine()}
        record(NAME, {"dtype": "bf16", "peak_flops": PEAK_FLOPS, "cards": cards}, options.folder)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
