"""Chapter 4's Llama on tokens of many requests, with few launches: a step is one launch of a CUDA graph.

Chapter 21's step takes its time on the host, which launches many small kernels for each layer.
`Steps` computes the same with fewer, and records them once for each of some numbers of tokens.
What changes from step to step (tokens, positions, slots, tables, lengths) lies in buffers whose addresses never change.
A copy or two fill them before a replay.

A step of up to `GRAPH_ROWS` tokens attends row by row, as decoding does, and splits long sequences along their keys.
A step of more tokens holds prompts. There a tile of queries reads its sequence's keys once.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lib.fast.attention.one_row import one_row_attention
from lib.fast.attention.paged import ROWS, Tiles, heads_of, prompt_attention
from lib.fast.models import capture
from lib.fast.parts.early import launch_early
from lib.fast.parts.narrow import MANY_ROWS, SOME_ROWS, Narrow, NarrowLinear, few_rows, has_room, join, widen
from lib.fast.parts.one_row import one_row
from lib.fast.parts.packed import Packed, block_attention_kernel, pointers
from lib.fast.parts.rows import add_norm, embed, gate, rotate_and_store
from lib.given.kernels.mode import HAS_TRITON, INTERPRETED, triton

GRAPH_ROWS = 256  # of the largest graph that attends row by row; sequences of any graph at most
TILED_ROWS = (384, 512, 768, 1024, 1536, 2048)  # of the graphs that attend in tiles
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = 16 if INTERPRETED else 64  # positions that the paged kernel reads at a time
MOST_PARTS = 16  # of a sequence's positions, which different programs attend to
FIELDS = 4  # of a sequence, before its table: token, position, slot, length
PADDING = np.array([[0], [0], [-1], [0]])  # where a batch has no sequence: nothing is written, nothing is attended to
TOKEN_FIELDS, TILE_FIELDS = 3, 4  # of a token: as above, but for its length; of a tile, as in `Tiles`
TILE_PADDING = np.array([[0], [0], [0], [-1]])


class Layer(NamedTuple):
    """The weights of a block, those of one product side by side."""

    attention_norm: Tensor
    wqkv: Tensor | Narrow
    wo: Tensor | Narrow
    ffn_norm: Tensor
    w13: Tensor | Narrow
    w2: Tensor | Narrow


def can_step(model: Any, cache: Any) -> bool:
    """Whether `Steps` can run a model: a plain ``Llama`` of one floating dtype on a GPU, or in the interpreter.

    The matrices of its blocks may be narrow.
    """
    if not HAS_TRITON or not hasattr(model, "tok_embeddings") or not hasattr(model, "rope"):
        return False
    weights = list(model.parameters())
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | NarrowLinear)]
    names = {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}
    plain = all(type(layer) in (nn.Linear, NarrowLinear) and layer.bias is None for layer in layers)
    block = model.layers[0].named_modules()
    found = {name.rpartition(".")[2] for name, module in block if isinstance(module, nn.Linear | NarrowLinear)}
    one_kind = {(w.dtype, w.device) for w in weights} == {(cache.keys.dtype, cache.keys.device)}
    places = (cache.keys.is_cuda or INTERPRETED) and can_read(cache.keys)
    head_dim = cache.keys.shape[-1]
    return places and plain and found == names and one_kind and cache.keys.dtype in DTYPES and 16 <= head_dim <= 256


def can_read(pool: Any) -> bool:
    """Whether Triton can convert the numbers of a pool on this device: float8 needs an H100's generation, or the one
    before.
    """
    is_float8 = isinstance(pool, Packed) and pool.numbers.dtype == torch.float8_e4m3fn
    return not is_float8 or not pool.is_cuda or torch.cuda.get_device_capability(pool.device) >= (8, 9)


def side_by_side(*layers: Any) -> Tensor | Narrow:
    """One weight of several layers, whose parameters become parts of it: no weight is in memory twice.

    Where they are parts of one already, for another engine, they stay so: both engines read the weights of now.
    """
    if isinstance(layers[0], NarrowLinear):
        return join(layers)
    weights = [layer.weight.detach() for layer in layers]
    if all(follows(a, b) for a, b in pairwise(weights)):
        rows, (_, width) = sum(map(len, weights)), weights[0].shape
        return weights[0].as_strided((rows, width), (width, 1))
    whole = torch.cat(weights)
    for layer, part in zip(layers, whole.split([len(layer.weight) for layer in layers]), strict=True):
        layer.weight.data = part
    return whole


def follows(a: Tensor, b: Tensor) -> bool:
    """Whether the second of two matrices begins in memory where the first ends."""
    are_one = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.is_contiguous()
    return are_one and b.is_contiguous() and b.storage_offset() == a.storage_offset() + a.numel()


def times(x: Float[Tensor, "n c"], weight: Tensor | Narrow) -> Float[Tensor, "p n f"]:
    """The product of rows with a weight, wide or narrow, in P parts whose sum it is."""
    if takes_few(x, weight):
        return few_rows(x, weight)
    return nn.functional.linear(x, widen(weight, x.dtype) if isinstance(weight, Narrow) else weight)[None]


def gated(x: Float[Tensor, "n c"], weight: Tensor | Narrow) -> Float[Tensor, "n f"]:
    """``silu(first half) * second half`` of the product of rows with a weight."""
    if takes_few(x, weight) and (isinstance(weight, Tensor) or len(x) > SOME_ROWS):
        return few_rows(x, weight, gated=True)[0]
    return gate(times(x, weight), x.dtype)


def takes_few(x: Float[Tensor, "n c"], weight: Tensor | Narrow) -> bool:
    """Whether `few_rows` computes a product: of a narrow weight always, if the rows are few; of a wide one on a GPU
    whose kernels begin early, in 16 bits.
    """
    begins_early = launch_early(x.device)["EARLY"] and x.element_size() == 2
    return len(x) <= MANY_ROWS and (isinstance(weight, Narrow) or begins_early)


class Steps:
    """A model and its cache, ready to pass tokens through.

    Args:
        model: Chapter 4's ``Llama``, for which `can_step` holds. Its weights stay the same, but some become parts of
            larger tensors.
        cache: Chapter 21's ``PagedCache``.
        n_rows: Tokens of a step at most.

    Attributes:
        fields: ``[FIELDS, GRAPH_ROWS]``, a numpy array: token, position, slot and length of each row of the next
            captured step. The length counts the new position. A token of ``-1 - row`` stands for ``sampled[row]``.
            Rows of one sequence, a prompt's tokens or drafts, differ in position, slot and length.
        tables: ``[GRAPH_ROWS, M]``, a numpy array: the blocks of each row's sequence.
        sampled: ``[n_rows]``, int64, on the device: the token that each row of the last step led to.
            The caller who samples writes it.
        tile_queries: Queries of a tile at most.
    """

    def __init__(self, model: Any, cache: Any, n_rows: int = GRAPH_ROWS) -> None:
        self.model, self.cache, self.config = model, cache, model.config
        self.device = cache.keys.device
        self.layers = self._prepare()
        n_fields, width = FIELDS * GRAPH_ROWS, -(-model.config.context_len // cache.block_size)
        host = torch.zeros(n_fields + GRAPH_ROWS * width, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._host, self._rows = host, torch.zeros_like(host, device=self.device, pin_memory=False)
        self.fields = host[:n_fields].view(FIELDS, -1).numpy()
        self.tables = host[n_fields:].view(-1, width).numpy()
        self.sampled = torch.zeros(max(n_rows, GRAPH_ROWS), dtype=torch.int64, device=self.device)
        self._arrived = torch.zeros(GRAPH_ROWS, cache.keys.shape[3], dtype=torch.int32, device=self.device)
        self.n_rows, self.tile_queries = n_rows, max(1, ROWS // heads_of(self.config.n_heads // cache.keys.shape[3]))
        self.tiled_rows = TILED_ROWS if self.waits_for_nothing else ()
        longest = self._tiled_end(self._tiled_size(n_rows))
        self._tiled_host = torch.zeros(longest, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._tiled = torch.zeros_like(self._tiled_host, device=self.device, pin_memory=False)
        self._read = torch.cuda.Event() if self.device.type == "cuda" else None
        self.graphs: dict[int, Callable[[], Tensor]] = {}  # by their rows
        self.tiled_graphs: dict[int, Callable[[], Tensor]] = {}
        self.pool: Any = None
        self.processors = 1
        if self.device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()
            self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count

    @property
    def waits_for_nothing(self) -> bool:
        """Whether the host may launch a step of any number of tokens without waiting for the device."""
        return True

    def _prepare(self) -> list[Any]:
        """The layers' weights, and all else that must be on the device before the first step."""
        self.model.rope = self.model.rope.to(self.device)
        return [self._layer(block) for block in self.model.layers]

    @staticmethod
    def _layer(block: Any) -> Layer:
        a, f = block.attention, block.feed_forward
        wqkv, wo, w13, w2 = (side_by_side(*layers) for layers in ((a.wq, a.wk, a.wv), (a.wo,), (f.w1, f.w3), (f.w2,)))
        return Layer(block.attention_norm.weight.detach(), wqkv, wo, block.ffn_norm.weight.detach(), w13, w2)

    def wait(self) -> None:
        """Wait until the device has read the last step's ``fields`` and ``tables``."""
        if self._read is not None:
            self._read.synchronize()

    @torch.no_grad()
    def decode(self, n: int) -> Float[Tensor, "n v"]:
        """The logits, float32, after the tokens of n rows: the first n of ``fields`` and ``tables``.

        The next call overwrites them. Call ``wait`` before you change ``fields`` and ``tables`` for the next step.
        """
        size = batch_size(n)
        self.fields[:, n:size] = PADDING
        end = self.fields.size + size * self.tables.shape[1]
        self._rows[:end].copy_(self._host[:end], non_blocking=True)
        if self._read is not None:
            self._read.record()
        if self.device.type != "cuda":
            return self._decode(size)[:n]
        if size not in self.graphs:
            self.graphs[size] = self._record(lambda: self._decode(size))
        return self.graphs[size]()[:n]

    def _record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return capture(step, n_warmup=1, pool=self.pool)

    def warm_up(self, show: Callable[[list[int]], Iterable[int]] = iter) -> None:
        """Record the graphs of all batch sizes, which ``show`` passes on one by one, perhaps with a progress bar."""
        tiled = {size for size in self.tiled_rows if size <= self._tiled_size(self.n_rows) and self.n_rows > GRAPH_ROWS}
        for size in show(sorted({batch_size(n) for n in range(1, GRAPH_ROWS + 1)} | tiled, reverse=True)):
            self.wait()
            if size in tiled:
                self.decode_tiled(PADDING[:TOKEN_FIELDS].repeat(size, 1), TILE_PADDING, [0])
            else:
                self.fields[:, :size] = PADDING
                self.decode(size)

    @torch.no_grad()
    def decode_tiled(self, fields: Any, tiles: Any, asked: list[int]) -> Float[Tensor, "r v"]:
        """The logits, float32, after some of the tokens of a step that is too long for `decode`.

        The next call overwrites them. Call ``wait`` before you change ``tables`` for the next step.

        Args:
            fields: ``[3, N]``: token, position and slot of each, one sequence's tokens after another's.
            tiles: ``[4, T]``: the fields of `Tiles`, whose sequences are rows of ``tables``. Each sequence has at
                least one tile, and each tile but its last has ``tile_queries`` queries.
            asked: R rows whose next token is asked for. They and the sequences are at most `GRAPH_ROWS`.
        """
        (_, n), (_, n_tiles), size = fields.shape, tiles.shape, self._tiled_size(fields.shape[1])
        end = self._tiled_end(size)
        rows, own, queries = self._tiled_parts(self._tiled_host[:end].numpy(), size)
        rows[:, :n], rows[:, n:] = fields, PADDING[:TOKEN_FIELDS]
        own[:, :n_tiles], own[:, n_tiles:] = tiles, TILE_PADDING
        queries[: len(asked)], queries[len(asked) :] = asked, 0
        self._tiled[:end].copy_(self._tiled_host[:end], non_blocking=True)
        begin = self.fields.size
        n_blocks = (int(tiles[0, -1]) + 1) * self.tables.shape[1]
        self._rows[begin : begin + n_blocks].copy_(self._host[begin : begin + n_blocks], non_blocking=True)
        if self._read is not None:
            self._read.record()
        if self.device.type != "cuda" or size not in self.tiled_rows:
            return self._decode_tiled(size)[: len(asked)]
        if size not in self.tiled_graphs:
            self.tiled_graphs[size] = self._record(lambda: self._decode_tiled(size))
        return self.tiled_graphs[size]()[: len(asked)]

    def _decode_tiled(self, size: int) -> Float[Tensor, "r v"]:
        fields, tiles, asked = self._tiled_parts(self._tiled[: self._tiled_end(size)], size)
        tables = self._rows[self.fields.size :].view(-1, self.tables.shape[1])
        return self.prompts(fields[0], fields[1], fields[2], asked, Tiles(tables, *tiles))

    def _embed(self, known: Int[Tensor, " n"]) -> Float[Tensor, "n c"]:
        return embed(known, self.sampled, self.model.tok_embeddings.weight)

    def _whole(self, product: Float[Tensor, "p n c"]) -> Float[Tensor, "q n c"]:
        """What a product adds to the residual stream, in parts; a model that is divided sums over its ranks here."""
        return product

    def _tokens(self, known: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Tokens, of which -1 - row stands for ``sampled[row]``."""
        sampled = self.sampled[(-1 - known).clamp(min=0)].clamp(min=0)  # below 0 for a request that has ended
        return torch.where(known < 0, sampled, known)

    def _tiled_size(self, n: int) -> int:
        """The size of the graph that runs n tokens in tiles; n itself, without a graph, if none is as large."""
        return next((size for size in self.tiled_rows if n <= size), n)

    def _n_tiles(self, size: int) -> int:
        """Tiles of so many tokens at most."""
        return size // self.tile_queries + GRAPH_ROWS

    def _tiled_end(self, size: int) -> int:
        """Numbers that a step in tiles reads, but for its tables."""
        return TOKEN_FIELDS * size + TILE_FIELDS * self._n_tiles(size) + GRAPH_ROWS

    def _tiled_parts(self, numbers: Any, size: int) -> tuple[Any, Any, Any]:
        """The tokens' fields, the tiles' fields and the rows that are asked for, in a flat array or tensor."""
        n_fields, n_tiles = TOKEN_FIELDS * size, self._n_tiles(size)
        fields, tiles = numbers[:n_fields], numbers[n_fields : n_fields + TILE_FIELDS * n_tiles]
        return fields.reshape(TOKEN_FIELDS, size), tiles.reshape(TILE_FIELDS, n_tiles), numbers[-GRAPH_ROWS:]

    def _decode(self, size: int) -> Float[Tensor, "b v"]:
        fields = self._rows[: self.fields.size].view(FIELDS, -1)[:, :size]
        tables = self._rows[self.fields.size :].view(-1, self.tables.shape[1])
        x, parts = self._embed(fields[0]), self._n_parts(size)

        def attend(i: int, qkv: Tensor) -> Tensor:
            if self._alone(x):
                pools = self.cache.keys[i], self.cache.values[i]
                rope, where = self.model.rope, (tables, fields[3], self._arrived)
                return one_row_attention(qkv[0], rope, fields[2], *pools, *where, parts, TILE)
            return self._attend_to_blocks(
                i, self._stored(i, qkv, fields[1], fields[2], x.dtype), tables, fields[3], parts
            )

        return self._logits(*self._blocks(x, attend))

    @torch.no_grad()
    def prompts(
        self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], slots: Int[Tensor, " n"],
        last: Int[Tensor, " c"], tiles: Tiles,
    ) -> Float[Tensor, "c v"]:  # fmt: skip
        """The logits, float32, of some rows of tokens of any number of sequences.

        Args:
            tokens: One sequence's tokens after another's; -1 - row stands for ``sampled[row]``.
            positions: Of each in its own sequence.
            slots: The place of each in the cache.
            last: The rows whose next token is asked for.
            tiles: The sequences' blocks, and how their queries are cut into tiles.
        """

        x = self._embed(tokens)

        def attend(i: int, qkv: Tensor) -> Tensor:
            queries = self._stored(i, qkv, positions, slots, x.dtype)
            return prompt_attention(queries, self.cache.keys[i], self.cache.values[i], tiles)

        return self._logits(*self._blocks(x, attend), last)

    def _stored(self, i: int, qkv: Tensor, positions: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """The rotated queries of layer i, whose keys and values are in the cache then."""
        return rotate_and_store(qkv, self.model.rope, positions, slots, self.cache.keys[i], self.cache.values[i], dtype)

    @staticmethod
    def _alone(x: Tensor) -> bool:
        """Whether x is one row, and not in float16, in which a row times its gain can overflow."""
        return len(x) == 1 and x.dtype != torch.float16

    def _blocks(self, x: Tensor, attend: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
        """The residual stream x behind the last block, in place, and what is still to be added to it.

        ``attend`` takes a layer and its queries, keys and values ``[P, N, (H + 2 G) D]``, in parts.
        """
        eps, added, alone = self.config.norm_eps, None, self._alone(x)
        for i, layer in enumerate(self.layers):
            if alone:
                qkv = one_row(x, layer.wqkv, layer.attention_norm, eps)[None]
            else:
                qkv = times(add_norm(x, added, layer.attention_norm, eps), layer.wqkv)
            mean = attend(i, qkv).reshape(len(x), -1)
            if alone:
                one_row(mean, layer.wo, into=x)
                one_row(one_row(x, layer.w13, layer.ffn_norm, eps, gated=True), layer.w2, into=x)
            else:
                normed = add_norm(x, self._whole(times(mean, layer.wo)), layer.ffn_norm, eps)
                added = self._whole(times(gated(normed, layer.w13), layer.w2))
        return x, added

    def _logits(self, x: Tensor, added: Tensor | None, rows: Tensor | None = None) -> Tensor:
        if rows is not None:
            x, added = x[rows], None if added is None else added[:, rows]
        normed = add_norm(x, added, self.model.norm.weight, self.config.norm_eps)
        return nn.functional.linear(normed, self.model.output.weight).float()

    def _n_parts(self, batch: int) -> int:
        """Parts of a sequence's positions, a power of two: as many as give each processor one program, but four where
        no processor then has more than four. At most one part a tile.
        """
        n_tiles, n_programs = -(-self.config.context_len // TILE), batch * self.cache.keys.shape[3]
        most = max(self.processors // n_programs, min(4, 4 * self.processors // n_programs))
        return 1 << max(0, min(MOST_PARTS, n_tiles, most).bit_length() - 1)

    def _attend_to_blocks(self, i: int, queries: Tensor, tables: Tensor, lengths: Tensor, n_parts: int) -> Tensor:
        keys, values, batch = self.cache.keys[i], self.cache.values[i], len(queries)
        (_, size, n_kv_heads, width), n_heads = keys.shape, self.config.n_heads
        o = torch.empty(n_parts, batch, n_heads, width, dtype=torch.float32, device=queries.device)
        lse, out = torch.empty_like(o[..., 0]), queries.new_empty(batch, n_heads, width)
        (k, k_scales, largest), (v, v_scales, _) = pointers(keys), pointers(values)
        is_long = has_room(self.device) and width * queries.element_size() <= 256
        block_attention_kernel[(batch, n_kv_heads, n_parts)](
            queries, k, v, k_scales, v_scales, tables, lengths, o, lse, self._arrived, out, width**-0.5, n_heads,
            tables.shape[1], SIZE=size, GROUP=n_heads // n_kv_heads, D=width, WIDTH=triton.next_power_of_2(width),
            ROWS=max(16, triton.next_power_of_2(n_heads // n_kv_heads)), COLS=TILE << is_long,
            SCALED=largest > 0, PARTS=n_parts, num_warps=4, num_stages=2 if is_long else 3,
            **launch_early(queries.device),
        )  # fmt: skip
        return out


def batch_size(n: int) -> int:
    """The size of the graph that runs n sequences: 1, 2, 4, or a multiple of 8."""
    return next((size for size in (1, 2, 4) if n <= size), -(-n // 8) * 8)
