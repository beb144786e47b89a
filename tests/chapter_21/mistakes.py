"""What goes wrong when people serve a model."""

import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from lib.given.kernels.paged import launch_paged, table_of
from lib.given.models.serving import Chunk, Node, OutOfBlocks, Progress, check_used, whole_blocks
from lib.workbook.grading import mistake
from solutions import serving as reference
from solutions.llama import count_parameters, kv_cache_bytes, sample_next
from solutions.speed import roofline_seconds

# ---- 21.1 decode_seconds, 21.2 compute_bound_decode_batch ------------------------------------------------------------


def costs(
    config, length, *, table=False, norms=0, rows=True, attention=1, kv_heads=None, values=2, fma=2, products_of=None
):
    """Bytes of all weights, bytes and FLOPs of a sequence, with whatever somebody forgets.

    ``norms`` is how many of the norms' weights are counted in products, True for all; ``attention`` the share of attention's.
    """
    embedding = config.vocab_size * config.dim
    weights = count_parameters(config) - embedding
    of_norms = (2 * config.n_layers + 1) * config.dim
    products = (products_of or weights) - of_norms + (of_norms if norms is True else norms)
    pairs = round(2 * config.n_layers * config.dim * length * attention)
    own = kv_cache_bytes(config, 1, length) * values // 2
    own = own * (kv_heads or config.n_kv_heads) // config.n_kv_heads
    read = weights + (embedding if table else 0)
    return 2 * read, own + (2 * config.dim if rows else 0), fma * (products + pairs)


def seconds(config, card, batch, length, **faults):
    weights, own, flops = costs(config, length, **faults)
    return roofline_seconds(batch * flops, weights + batch * own, card.peak_flops, card.bandwidth)


@mistake("decode_seconds", "the embedding table is read whole, though a step looks up one row for each sequence")
def whole_table(config, card, batch, length):
    return seconds(config, card, batch, length, table=True, rows=False)


@mistake("decode_seconds", "the rows of the embedding table that a step looks up are not read at all")
def no_rows(config, card, batch, length):
    return seconds(config, card, batch, length, rows=False)


@mistake("decode_seconds", "the weights are read once for each sequence; the batch shares them")
def weights_for_each(config, card, batch, length):
    return batch * reference.decode_seconds(config, card, 1, length)


@mistake("decode_seconds", "the keys and values of one sequence only are read")
def cache_of_one(config, card, batch, length):
    weights, _, flops = costs(config, length)
    n_bytes = weights + kv_cache_bytes(config, 1, length) + batch * 2 * config.dim
    return roofline_seconds(batch * flops, n_bytes, card.peak_flops, card.bandwidth)


@mistake("decode_seconds", "keys and values are counted for all query heads, but only the key heads are cached")
def all_heads_cached(config, card, batch, length):
    return seconds(config, card, batch, length, kv_heads=config.n_heads)


@mistake("decode_seconds", "keys are read and values are not")
def keys_only(config, card, batch, length):
    return seconds(config, card, batch, length, values=1)


@mistake("decode_seconds", "the two products of attention are not counted")
def no_attention(config, card, batch, length):
    return seconds(config, card, batch, length, attention=False)


@mistake("decode_seconds", "a multiplication with its addition is counted as one operation; it is two")
def one_flop(config, card, batch, length):
    return seconds(config, card, batch, length, fma=1)


@mistake("decode_seconds", "the norms' weights are counted as a product")
def norms_multiply(config, card, batch, length):
    return seconds(config, card, batch, length, norms=True)


@mistake("decode_seconds", "the two times are added; arithmetic and memory traffic overlap")
def added(config, card, batch, length):
    weights, own, flops = costs(config, length)
    return batch * flops / card.peak_flops + (weights + batch * own) / card.bandwidth


@mistake("decode_seconds", "one of attention's two products is counted: 2 L C S FLOPs instead of 4 L C S")
def one_product(config, card, batch, length):
    return seconds(config, card, batch, length, attention=0.5)


@mistake("decode_seconds", "the embedding table is read whole, and the rows looked up in it are counted besides")
def table_and_rows(config, card, batch, length):
    return seconds(config, card, batch, length, table=True)


@mistake(
    "decode_seconds", "the embedding table is read whole and takes part in a product; a step looks up one row of it"
)
def table_multiplied(config, card, batch, length):
    return seconds(config, card, batch, length, table=True, rows=False, products_of=count_parameters(config))


@mistake("decode_seconds", "the embedding table takes part in a product, as the output matrix does")
def table_in_products(config, card, batch, length):
    return seconds(config, card, batch, length, products_of=count_parameters(config))


@mistake("decode_seconds", "the keys and values in the cache are not read at all")
def no_cache(config, card, batch, length):
    weights, _, flops = costs(config, length)
    return roofline_seconds(batch * flops, weights + batch * 2 * config.dim, card.peak_flops, card.bandwidth)


@mistake("decode_seconds", "one norm is counted for each layer; a layer has two")
def one_norm(config, card, batch, length):
    return seconds(config, card, batch, length, norms=config.n_layers * config.dim)


@mistake("decode_seconds", "attention is counted for one layer only")
def one_layer(config, card, batch, length):
    return seconds(config, card, batch, length, attention=1 / config.n_layers)


@mistake("compute_bound_decode_batch", "the cache is ignored: each sequence brings bytes of its own")
def cache_ignored(config, card, length):
    weights, _, flops = costs(config, length)
    return max(1, math.ceil(weights * card.peak_flops / (card.bandwidth * flops)))


@mistake("compute_bound_decode_batch", "the cache is taken to be as large for any batch as for one sequence")
def cache_shared(config, card, length):
    weights, own, flops = costs(config, length)
    return max(1, math.ceil((weights + own) * card.peak_flops / (card.bandwidth * flops)))


@mistake("compute_bound_decode_batch", "the result is rounded down: that batch is still bound by memory")
def rounded_down(config, card, length):
    return border(config, card, length, finish=math.floor)


@mistake("compute_bound_decode_batch", "a batch is searched up to some limit, which is returned where there is none")
def limited(config, card, length):
    return min(reference.compute_bound_decode_batch(config, card, length), 65_536)


@mistake("compute_bound_decode_batch", "the FLOPs of attention are not counted")
def bound_without_attention(config, card, length):
    weights, own, flops = costs(config, length, attention=False)
    gain = flops * card.bandwidth / card.peak_flops - own
    return math.ceil(weights / gain) if gain > 0 else math.inf


@mistake("compute_bound_decode_batch", "peak and bandwidth are exchanged")
def exchanged(config, card, length):
    return reference.compute_bound_decode_batch(config, card._replace(peak_flops=card[1], bandwidth=card[0]), length)


@mistake("compute_bound_decode_batch", "where no batch is large enough, a negative number comes out")
def negative(config, card, length):
    weights, own, flops = costs(config, length)
    return math.ceil(weights / (flops * card.bandwidth / card.peak_flops - own))


def border(config, card, length, *, finish=math.ceil, weigh=1.0, **faults):
    weights, own, flops = costs(config, length, **faults)
    gain = flops * card.bandwidth / card.peak_flops - own
    return finish(weigh * weights / gain) if gain > 0 else math.inf


@mistake("compute_bound_decode_batch", "one batch too large where both times are equal: rounded down, plus 1")
def down_plus_one(config, card, length):
    return border(config, card, length, finish=lambda batch: math.floor(batch) + 1)


@mistake("compute_bound_decode_batch", "rounded to the nearest batch, which may still be bound by memory")
def rounded(config, card, length):
    return border(config, card, length, finish=lambda batch: max(1, round(batch)))


@mistake("compute_bound_decode_batch", "the batch is not rounded up to a whole number")
def not_rounded(config, card, length):
    return border(config, card, length, finish=lambda batch: batch)


@mistake("compute_bound_decode_batch", "a sequence that brings as many bytes as arithmetic is a division by zero")
def no_gain(config, card, length):
    weights, own, flops = costs(config, length)
    gain = flops * card.bandwidth / card.peak_flops - own
    return math.ceil(weights / gain) if gain >= 0 else math.inf


@mistake("compute_bound_decode_batch", "the embedding table is read whole")
def bound_with_table(config, card, length):
    return border(config, card, length, table=True)


@mistake("compute_bound_decode_batch", "the row of the embedding table that each sequence reads is forgotten")
def bound_without_rows(config, card, length):
    return border(config, card, length, rows=False)


@mistake("compute_bound_decode_batch", "the norms' weights are counted as a product")
def bound_with_norms(config, card, length):
    return border(config, card, length, norms=True)


@mistake("compute_bound_decode_batch", "weights are counted, not their bytes: each has two")
def weights_not_bytes(config, card, length):
    return border(config, card, length, weigh=0.5)


@mistake("compute_bound_decode_batch", "a multiplication with its addition is counted as one operation")
def bound_one_flop(config, card, length):
    return border(config, card, length, fma=1)


@mistake("compute_bound_decode_batch", "only powers of two are tried")
def doubled(config, card, length):
    batch = reference.compute_bound_decode_batch(config, card, length)
    return batch if batch == math.inf else 1 << (batch - 1).bit_length()


# ---- 21.3 BlockAllocator ---------------------------------------------------------------------------------------------


@mistake("BlockAllocator", "free returns the block to the pool although somebody else still uses it")
class FreesAtOnce(reference.BlockAllocator):
    def free(self, block):
        super().free(block)
        if self.n_users[block] > 0:
            self.n_users[block] = 0
            self.unused.append(block)


@mistake("BlockAllocator", "a block that loses its last user is not put back into the pool")
class NeverReturns(reference.BlockAllocator):
    def free(self, block):
        super().free(block)
        if self.n_users[block] == 0:
            self.unused.remove(block)


@mistake("BlockAllocator", "share does not count the new user")
class ShareUncounted(reference.BlockAllocator):
    def share(self, block):
        super().share(block)
        self.n_users[block] -= 1
        return block


@mistake("BlockAllocator", "share returns nothing")
class ShareReturnsNothing(reference.BlockAllocator):
    def share(self, block):
        super().share(block)


@mistake("BlockAllocator", "a full pool is an IndexError of the empty list instead of OutOfBlocks")
class PopFromEmpty(reference.BlockAllocator):
    def allocate(self):
        block = self.unused.pop()
        self.n_users[block] = 1
        return block


@mistake("BlockAllocator", "a double free goes unnoticed, and the block is in the pool twice")
class DoubleFree(reference.BlockAllocator):
    def free(self, block):
        if not 0 <= block < len(self.n_users):
            raise ValueError(f"there is no block {block}")
        self.n_users[block] = max(0, self.n_users[block] - 1)
        if self.n_users[block] == 0:
            self.unused.append(block)


@mistake("BlockAllocator", "a block that nobody uses can be shared")
class SharesUnused(reference.BlockAllocator):
    def share(self, block):
        if not 0 <= block < len(self.n_users):
            raise ValueError(f"there is no block {block}")
        self.n_users[block] += 1
        return block


@mistake("BlockAllocator", "n_free subtracts users, not blocks: a shared block counts twice")
class FreeByUsers(reference.BlockAllocator):
    @property
    def n_free(self):
        return len(self.n_users) - sum(self.n_users)


@mistake("BlockAllocator", "allocate does not count the block's first user")
class AllocateUncounted(reference.BlockAllocator):
    def allocate(self):
        block = super().allocate()
        self.n_users[block] = 0
        return block


@mistake("BlockAllocator", "blocks that do not exist are not refused: -1 is the last one, as in any list")
class NegativeBlocks(reference.BlockAllocator):
    def _check(self, block):
        if self.n_users[block] == 0:
            raise ValueError(f"block {block} is not in use")

    def share(self, block):
        self._check(block)
        self.n_users[block] += 1
        return block

    def free(self, block):
        self._check(block)
        self.n_users[block] -= 1
        if self.n_users[block] == 0:
            self.unused.append(block)


@mistake("BlockAllocator", "each free puts the block back into the pool, whether or not it was the last user's")
class ReturnsAlways(reference.BlockAllocator):
    def free(self, block):
        check_used(self.n_users, block)
        self.n_users[block] -= 1
        self.unused.append(block)


@mistake("BlockAllocator", "share sets the number of users to 2 instead of adding 1")
class SharesOnce(reference.BlockAllocator):
    def share(self, block):
        check_used(self.n_users, block)
        self.n_users[block] = 2
        return block


@mistake("BlockAllocator", "blocks are handed out in order, and those that were freed never again")
class NeverAgain(reference.BlockAllocator):
    def allocate(self):
        self.unused = [block for block in self.unused if block > getattr(self, "last", -1)]
        if not self.unused:
            raise OutOfBlocks(f"all {len(self.n_users)} blocks of the pool are in use")
        self.last = self.unused.pop(0)
        self.n_users[self.last] = 1
        return self.last


@mistake("BlockAllocator", "blocks are numbered from 1")
class FromOne(reference.BlockAllocator):
    def __init__(self, n_blocks):
        self.n_users, self.unused = [0] * (n_blocks + 1), list(range(1, n_blocks + 1))


@mistake("BlockAllocator", "free takes the user away before it checks, so that a refused call leaves -1 users")
class ChecksTooLate(reference.BlockAllocator):
    def free(self, block):
        if not 0 <= block < len(self.n_users):
            raise ValueError(f"there is no block {block}")
        self.n_users[block] -= 1
        if self.n_users[block] < 0:
            raise ValueError(f"block {block} is not in use")
        if self.n_users[block] == 0:
            self.unused.append(block)


# ---- 21.4 PagedCache -------------------------------------------------------------------------------------------------


@mistake("PagedCache", "fork copies the table without sharing its blocks, so that they are freed too early")
class ForkWithoutSharing(reference.PagedCache):
    def fork(self, sequence):
        self.length_of(sequence)
        copy = self.new()
        self.tables[copy] = list(self.tables[sequence])
        self.lengths[copy] = list(self.lengths[sequence])
        return copy


@mistake("PagedCache", "fork copies every block at once instead of sharing it")
class ForkCopies(reference.PagedCache):
    def fork(self, sequence):
        copy = super().fork(sequence)
        for i, block in enumerate(self.tables[copy]):
            try:
                mine = self.allocator.allocate()
            except OutOfBlocks:
                break
            self.copy_block(block, mine)
            self.allocator.free(block)
            self.tables[copy][i] = mine
        return copy


@mistake("PagedCache", "fork hands out the same lists, so that one sequence grows with the other")
class ForkSameLists(reference.PagedCache):
    def fork(self, sequence):
        copy = super().fork(sequence)
        self.lengths[copy] = self.lengths[sequence]
        return copy


@mistake("PagedCache", "a shared block is written to without copying it first")
class NoCopyOnWrite(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        table, size, n_blocks = self.tables[sequence], self.block_size, -(-end // self.block_size)
        if n_blocks - len(table) > self.allocator.n_free:
            raise OutOfBlocks(f"{n_blocks - len(table)} blocks are needed and {self.allocator.n_free} are free")
        table += [self.allocator.allocate() for _ in range(n_blocks - len(table))]
        return [table[p // size] * size + p % size for p in range(start, end)]


@mistake("PagedCache", "the copy gets a block, but not what was in it")
class CopiesNothing(reference.PagedCache):
    def copy_block(self, block, into):
        pass


@mistake("PagedCache", "the block that was copied does not lose its user: it is never free again")
class CopyKeepsUser(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        before = list(self.tables[sequence])
        slots = super().find_slots(sequence, start, end)
        for old, new in zip(before, self.tables[sequence], strict=False):
            if old != new:
                self.allocator.share(old)
        return slots


@mistake("PagedCache", "every shared block of the table is copied, also those that are not written to")
class CopiesAll(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        slots = super().find_slots(sequence, start, end)
        for i, block in enumerate(self.tables[sequence]):
            if self.allocator.n_users[block] > 1 and self.allocator.n_free and end > start:
                mine = self.allocator.allocate()
                self.copy_block(block, mine)
                self.allocator.free(block)
                self.tables[sequence][i] = mine
        return slots


@mistake("PagedCache", "a block is exchanged although the sequence is its only user")
class CopiesOwn(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        slots = super().find_slots(sequence, start, end)
        table, i = self.tables[sequence], start // self.block_size
        if start % self.block_size and end > start and self.allocator.n_free:
            old, table[i] = table[i], self.allocator.allocate()
            self.copy_block(old, table[i])
            self.allocator.free(old)
            slots = [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(start, end)]
        return slots


@mistake("PagedCache", "one block too many is allocated when the positions fill their blocks exactly")
class OneTooMany(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        slots = super().find_slots(sequence, start, end)
        if end > start and end % self.block_size == 0 and len(self.tables[sequence]) == end // self.block_size:
            if not self.allocator.n_free:
                raise OutOfBlocks("1 block is needed and 0 are free")
            self.tables[sequence].append(self.allocator.allocate())
        return slots


@mistake("PagedCache", "blocks are allocated before it is known whether there are enough")
class AllocatesFirst(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        try:
            return super().find_slots(sequence, start, end)
        except OutOfBlocks:
            while self.allocator.n_free:
                self.tables[sequence].append(self.allocator.allocate())
            raise


@mistake("PagedCache", "only new blocks are counted, not the copies: the pool runs dry in the middle")
class CopiesUncounted(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        table, size, n_blocks = self.tables[sequence], self.block_size, -(-end // self.block_size)
        if n_blocks - len(table) > self.allocator.n_free:
            raise OutOfBlocks(f"{n_blocks - len(table)} blocks are needed and {self.allocator.n_free} are free")
        for i in range(start // size, min(n_blocks, len(table))):
            if self.allocator.n_users[table[i]] > 1:
                old, table[i] = table[i], self.allocator.allocate()
                self.copy_block(old, table[i])
                self.allocator.free(old)
        table += [self.allocator.allocate() for _ in range(n_blocks - len(table))]
        return [table[p // size] * size + p % size for p in range(start, end)]


@mistake("PagedCache", "every layer gets blocks of its own")
class BlocksForEachLayer(reference.PagedCache):
    def append(self, sequence, layer, k, v):
        super().append(sequence, layer, k, v)
        if layer and k.shape[1] and self.allocator.n_free:
            self.tables[sequence].append(self.allocator.allocate())


@mistake("PagedCache", "all layers share one length, so that the second layer's positions come behind the first's")
class OneLength(reference.PagedCache):
    def append(self, sequence, layer, k, v):
        super().append(sequence, layer, k, v)
        self.lengths[sequence] = [max(self.lengths[sequence])] * len(self.keys)


@mistake("PagedCache", "everything is written to layer 0")
class LayerZero(reference.PagedCache):
    def write(self, layer, slots, k, v):
        super().write(0, slots, k, v)


@mistake("PagedCache", "values are stored where keys belong, and keys where values belong")
class KeysForValues(reference.PagedCache):
    def write(self, layer, slots, k, v):
        super().write(layer, slots, v, k)


@mistake("PagedCache", "positions follow each other in the pool, as if a sequence's blocks were neighbours")
class Neighbours(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        slots = super().find_slots(sequence, start, end)
        return (
            [slots[0] + i for i in range(len(slots))]
            if slots and slots[0] + len(slots) <= self.n_blocks * self.block_size
            else slots
        )


@mistake("PagedCache", "free forgets the sequence, and its blocks stay in use")
class FreeLeaks(reference.PagedCache):
    def free(self, sequence):
        self.length_of(sequence)
        del self.lengths[sequence], self.tables[sequence]


@mistake("PagedCache", "free returns the blocks, and the sequence can be freed again")
class FreeKeepsSequence(reference.PagedCache):
    def free(self, sequence):
        self.length_of(sequence)
        for block in self.tables[sequence]:
            self.allocator.free(block)
        self.tables[sequence] = []


@mistake("PagedCache", "ids of freed sequences are given again")
class OldIds(reference.PagedCache):
    def new(self, blocks=()):
        self.n_made = max(self.tables, default=0)
        return super().new(blocks)


@mistake("PagedCache", "shapes are not checked, and what broadcasts is stored")
class ShapesUnchecked(reference.PagedCache):
    def check_shapes(self, k, v):
        pass


@mistake("PagedCache", "a sequence that begins with blocks of others does not become their user")
class NewWithoutSharing(reference.PagedCache):
    def new(self, blocks=()):
        sequence = super().new()
        self.tables[sequence] = list(blocks)
        self.lengths[sequence] = [len(blocks) * self.block_size] * len(self.keys)
        return sequence

    def fork(self, sequence):
        copy = super().fork(sequence)
        for block in self.tables[copy]:
            self.allocator.share(block)
        return copy


@mistake("PagedCache", "a sequence that begins with blocks of others has length 0, so that it overwrites them")
class NewOfLengthZero(reference.PagedCache):
    def new(self, blocks=()):
        sequence = super().new(blocks)
        self.lengths[sequence] = [0] * len(self.keys)
        return sequence


def find(cache, sequence, start, end, *, shared=None, n_new=None, check=None, slots_first=False, into_old=False):
    """The reference's ``find_slots`` with something done differently."""
    table, size, n_blocks = cache.tables[sequence], cache.block_size, -(-end // cache.block_size)
    written = [i for i in range(start // size, min(n_blocks, len(table))) if cache.allocator.n_users[table[i]] > 1]
    written = written if shared is None else shared(table, written)
    n_new = max(0, n_blocks - len(table)) if n_new is None else n_new
    n_needed, n_free = n_new + len(written), cache.allocator.n_free
    if n_needed > n_free if check is None else check(n_needed, n_free):
        raise OutOfBlocks(f"{n_needed} blocks are needed and {n_free} are free")
    before = list(table)
    for i in written:
        old, table[i] = table[i], cache.allocator.allocate()
        cache.copy_block(*((table[i], old) if into_old else (old, table[i])))
        cache.allocator.free(old)
    table += [cache.allocator.allocate() for _ in range(n_new)]
    table = before + table[len(before) :] if slots_first else table
    return [table[p // size] * size + p % size for p in range(start, end)]


@mistake("PagedCache", "slots are computed before the shared block is exchanged: the old block is written to")
class SlotsBeforeCopy(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        return find(self, sequence, start, end, slots_first=True)


@mistake("PagedCache", "copy_block's arguments are exchanged: the shared block is overwritten by the new, empty one")
class CopiesBackwards(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        return find(self, sequence, start, end, into_old=True)


@mistake("PagedCache", "only the first of the blocks written to is copied")
class CopiesTheFirst(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        return find(self, sequence, start, end, shared=lambda table, written: written[:1])


@mistake("PagedCache", "the table's last block is copied when it is shared, though it may be full")
class CopiesTheLast(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        def last(table, written):
            return [len(table) - 1] if table and end > start and self.allocator.n_users[table[-1]] > 1 else []

        return find(self, sequence, start, end, shared=last)


@mistake("PagedCache", "new positions get blocks of their own, though the last block has room")
class BlocksForNewAlone(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        return find(self, sequence, start, end, n_new=-(-(end - start) // self.block_size))


@mistake("PagedCache", "refused when exactly as many blocks are free as are needed")
class RefusesWhatFits(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        return find(self, sequence, start, end, check=lambda n_needed, n_free: n_needed and n_needed >= n_free)


@mistake("PagedCache", "every shared block of the table is counted as a copy, also those that are not written to")
class CountsAllShared(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        table = self.tables[sequence]
        n_needed = max(0, -(-end // self.block_size) - len(table))
        n_needed += sum(self.allocator.n_users[block] > 1 for block in table)
        if end > start and n_needed > self.allocator.n_free:
            raise OutOfBlocks(f"{n_needed} blocks are needed and {self.allocator.n_free} are free")
        return super().find_slots(sequence, start, end)


@mistake("PagedCache", "shared blocks are copied before the new ones are counted: a refused call has changed the table")
class CopiesBeforeCounting(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        find(self, sequence, start, min(end, len(self.tables[sequence]) * self.block_size), n_new=0)
        return find(self, sequence, start, end)


@mistake("PagedCache", "shared blocks behind the last position that is written are copied, too")
class CopiesToTheEnd(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        def behind(table, written):
            first = range(start // self.block_size, len(table))
            return [i for i in first if self.allocator.n_users[table[i]] > 1] if end > start else []

        return find(self, sequence, start, end, shared=behind)


@mistake("PagedCache", "shared blocks before the first position that is written are copied, too")
class CopiesFromTheBeginning(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        def before(table, written):
            upto = range(min(-(-end // self.block_size), len(table)))
            return [i for i in upto if self.allocator.n_users[table[i]] > 1] if end > start else []

        return find(self, sequence, start, end, shared=before)


@mistake("PagedCache", "nothing is counted beforehand: the pool runs dry in the middle of a call")
class CountsNothing(reference.PagedCache):
    def find_slots(self, sequence, start, end):
        return find(self, sequence, start, end, check=lambda n_needed, n_free: False)


@mistake("PagedCache", "the length grows before it is known whether the positions fit")
class GrowsFirst(reference.PagedCache):
    def append(self, sequence, layer, k, v):
        self.check_shapes(k, v)
        start = self.length_of(sequence, layer)
        end = self.lengths[sequence][layer] = start + k.shape[1]
        self.write(layer, self.find_slots(sequence, start, end), k.transpose(0, 1), v.transpose(0, 1))


@mistake("PagedCache", "shapes are checked after blocks were allocated for them")
class ChecksShapesLate(reference.PagedCache):
    def append(self, sequence, layer, k, v):
        start = self.length_of(sequence, layer)
        self.find_slots(sequence, start, start + k.shape[1])
        super().append(sequence, layer, k, v)


@mistake("PagedCache", "[G, T, D] is reshaped to [T, G, D] instead of transposed")
class Reshaped(reference.PagedCache):
    def write(self, layer, slots, k, v):
        super().write(layer, slots, *(x.transpose(0, 1).reshape(x.shape) for x in (k, v)))


@mistake("PagedCache", "fork copies the partly full block at once, though nobody has written yet")
class ForkCopiesTheLast(reference.PagedCache):
    def fork(self, sequence):
        copy = super().fork(sequence)
        length = self.lengths[copy][0]
        if length % self.block_size and self.allocator.n_free:
            find(self, copy, length, length + 1, n_new=0)
        return copy


@mistake("PagedCache", "fork gives all layers the length of the first")
class ForkLengthOfLayerZero(reference.PagedCache):
    def fork(self, sequence):
        copy = super().fork(sequence)
        self.lengths[copy] = [self.lengths[sequence][0]] * len(self.keys)
        return copy


@mistake("PagedCache", "a sequence that begins with blocks of others counts blocks as its length, not positions")
class NewOfBlocksLength(reference.PagedCache):
    def new(self, blocks=()):
        sequence = super().new(blocks)
        self.lengths[sequence] = [len(blocks)] * len(self.keys)
        return sequence


@mistake("PagedCache", "free returns the blocks, and the lengths stay: the id is still known")
class FreeKeepsLengths(reference.PagedCache):
    def free(self, sequence):
        self.length_of(sequence)
        for block in self.tables.pop(sequence):
            self.allocator.free(block)


# ---- 21.5 paged_attention --------------------------------------------------------------------------------------------


def attend(q, cache, sequences, layer, *, scale=None, mask=True, clean=True, tiled=False, pool=None, own=True):
    table, lengths = table_of(cache, sequences, layer if own else 0)
    k, v = (x[layer][table].flatten(1, 2).transpose(1, 2) for x in (cache.keys, cache.values))
    seen = torch.arange(k.shape[2]) < lengths[:, None]
    if clean:
        k, v = (x.masked_fill(~seen[:, None, :, None], 0) for x in (k, v))
    n = q.shape[1] // k.shape[1]
    k, v = (x.repeat(1, n, 1, 1) if tiled else x.repeat_interleave(n, 1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q[:, :, None].to(wide) @ k.transpose(2, 3).to(wide)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask:
        scores = scores.masked_fill(~seen[:, None, None], -math.inf)
    return (
        (scores.softmax(-1).nan_to_num() @ v.to(wide))[:, :, 0].to(q.dtype)
        if mask
        else (scores.softmax(-1) @ v.to(wide))[:, :, 0].to(q.dtype)
    )


@mistake("paged_attention", "positions behind the end of a sequence are not masked")
def unmasked(q, cache, sequences, layer=0, n_parts=None):
    if n_parts:
        return reference.paged_attention(q, cache, sequences, layer, n_parts)
    return attend(q, cache, sequences, layer, mask=False)


@mistake("paged_attention", "a weight of 0 times an old block's infinity or NaN is NaN: the values are not masked, too")
def values_unmasked(q, cache, sequences, layer=0, n_parts=None):
    if n_parts:
        return reference.paged_attention(q, cache, sequences, layer, n_parts)
    table, lengths = table_of(cache, sequences, layer)
    k, v = (x[layer][table].flatten(1, 2).transpose(1, 2) for x in (cache.keys, cache.values))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    mask = torch.arange(k.shape[2]) < lengths[:, None]
    return reference.scaled_dot_product_attention(q[:, :, None], k, v, mask[:, None, None]).squeeze(2)


@mistake("paged_attention", "layer 0 is read, whatever the layer")
def first_layer(q, cache, sequences, layer=0, n_parts=None):
    return reference.paged_attention(q, cache, sequences, 0, n_parts)


@mistake(
    "paged_attention",
    "query heads that share a key head are taken to be n_kv_heads apart instead of next to each other",
)
def tiled_heads(q, cache, sequences, layer=0, n_parts=None):
    if n_parts:
        return reference.paged_attention(q, cache, sequences, layer, n_parts)
    return attend(q, cache, sequences, layer, tiled=True)


@mistake("paged_attention", "the scores are not divided by the root of the heads' width")
def unscaled(q, cache, sequences, layer=0, n_parts=None):
    if n_parts:
        return reference.paged_attention(q, cache, sequences, layer, n_parts)
    return attend(q, cache, sequences, layer, scale=1.0)


@mistake("paged_attention", "the tables are not used: blocks are read in the order of the pool")
def pool_order(q, cache, sequences, layer=0, n_parts=None):
    if n_parts:
        return reference.paged_attention(q, cache, sequences, layer, n_parts)
    keys, values = cache.keys[layer].flatten(0, 1), cache.values[layer].flatten(0, 1)
    out = []
    for query, i in zip(q, sequences, strict=True):
        first, n = min(cache.tables[i], default=0) * cache.block_size, cache.lengths[i][layer]
        k, v = (
            x[first : first + n].transpose(0, 1).repeat_interleave(len(query) // x.shape[1], 0) for x in (keys, values)
        )
        k, v = (x.nan_to_num(0, 0, 0) for x in (k, v))
        out.append(scaled_dot_product_attention(query[:, None], k, v)[:, 0] if n else torch.zeros_like(query))
    return torch.stack(out)


@mistake("paged_attention", "the last block is taken to be full for every sequence")
def full_blocks(q, cache, sequences, layer=0, n_parts=None):
    lengths = dict(cache.lengths)
    for i in sequences:
        cache.lengths[i] = [len(cache.tables[i]) * cache.block_size] * len(cache.keys)
    try:
        return reference.paged_attention(q, cache, sequences, layer, n_parts)
    finally:
        cache.lengths.update(lengths)


@mistake("paged_attention", "outputs of the parts are averaged; they have to be weighed by their logsumexp")
def parts_averaged(q, cache, sequences, layer=0, n_parts=None):
    if not n_parts:
        return reference.paged_attention(q, cache, sequences, layer)
    o, _ = launch_paged(q, cache, sequences, layer, n_parts)
    return o.mean(0).to(q.dtype)


@mistake("paged_attention", "only two parts are merged")
def two_parts(q, cache, sequences, layer=0, n_parts=None):
    if not n_parts or n_parts < 2:
        return reference.paged_attention(q, cache, sequences, layer, n_parts)
    o, lse = launch_paged(q, cache, sequences, layer, n_parts)
    return reference.merge_attention(o[0], lse[0], o[1], lse[1])[0].to(q.dtype)


@mistake("paged_attention", "the first part alone is returned")
def first_part(q, cache, sequences, layer=0, n_parts=None):
    if not n_parts:
        return reference.paged_attention(q, cache, sequences, layer)
    return launch_paged(q, cache, sequences, layer, n_parts)[0][0].to(q.dtype)


@mistake("paged_attention", "n_parts is ignored: the kernel is never launched")
def never_launched(q, cache, sequences, layer=0, n_parts=None):
    return reference.paged_attention(q, cache, sequences, layer)


@mistake("paged_attention", "the output has the dtype of the sums, not of the queries")
def wide_output(q, cache, sequences, layer=0, n_parts=None):
    return reference.paged_attention(q, cache, sequences, layer, n_parts).float()


@mistake("paged_attention", "with n_parts the output stays float32, whatever the dtype of the queries")
def parts_stay_wide(q, cache, sequences, layer=0, n_parts=None):
    return reference.paged_attention(q.float() if n_parts else q, cache, sequences, layer, n_parts)


@mistake("paged_attention", "the kernel is launched on a CPU without n_parts, too; in float64 it is less exact")
def always_launched(q, cache, sequences, layer=0, n_parts=None):
    return reference.paged_attention(q, cache, sequences, layer, n_parts or 1)


# ---- 21.6 PrefixTree -------------------------------------------------------------------------------------------------


@mistake("PrefixTree", "a block is looked up by its own tokens alone, whatever came before it")
class WithoutThePrefix(reference.PrefixTree):
    def match(self, tokens):
        found, known = super().match(tokens), {}
        open_ = [self.root]
        while open_:
            node = open_.pop()
            known.setdefault(node.piece, node.block)
            open_ += node.children.values()
        pieces = whole_blocks(tokens, self.block_size)
        return found if found or not pieces else [known[p] for p in pieces if p in known]


@mistake("PrefixTree", "a match must be complete: a prefix of which a part is known gives nothing")
class CompleteOnly(reference.PrefixTree):
    def match(self, tokens):
        found = super().match(tokens)
        return found if len(found) == len(tokens) // self.block_size else []


@mistake("PrefixTree", "insert replaces a block that is remembered already")
class Replaces(reference.PrefixTree):
    def insert(self, tokens, blocks):
        new = super().insert(tokens, blocks)
        for node, block in zip(self._path(tokens), blocks, strict=True):
            node.block = block
        return new


@mistake("PrefixTree", "insert returns all blocks, not only those that are new in the tree")
class ReturnsAll(reference.PrefixTree):
    def insert(self, tokens, blocks):
        super().insert(tokens, blocks)
        return list(blocks)


@mistake("PrefixTree", "the numbers of tokens and of blocks are not compared")
class CountsUnchecked(reference.PrefixTree):
    def insert(self, tokens, blocks):
        n = min(len(blocks), len(tokens) // self.block_size)
        return super().insert(tokens[: n * self.block_size], blocks[:n])


@mistake("PrefixTree", "the oldest insertion is evicted first; matching does not count as use")
class FirstInFirstOut(reference.PrefixTree):
    def match(self, tokens):
        before = [(node, node.last_used) for node in self._all()]
        found = super().match(tokens)
        for node, used in before:
            node.last_used = used
        return found

    def _all(self):
        found, open_ = [], list(self.root.children.values())
        while open_:
            node = open_.pop()
            found.append(node)
            open_ += node.children.values()
        return found


@mistake("PrefixTree", "the most recently used leaf is evicted first")
class MostRecent(reference.PrefixTree):
    def evict(self, n):
        evicted = []
        while len(evicted) < n and (leaves := [leaf for leaf in self.root.leaves() if leaf.n_users == 0]):
            leaf = max(leaves, key=lambda leaf: leaf.last_used)
            del leaf.parent.children[leaf.piece]
            evicted.append(leaf.block)
        return evicted


@mistake("PrefixTree", "only the last block of a match is used, not those on the way to it")
class UsesTheLast(reference.PrefixTree):
    def match(self, tokens):
        self.clock += 1
        node, found = self.root, []
        for piece in whole_blocks(tokens, self.block_size):
            if piece not in node.children:
                break
            node = node.children[piece]
            found.append(node.block)
        if len(found) == len(whole_blocks(tokens, self.block_size)):
            node.last_used = self.clock
        return found


@mistake("PrefixTree", "inner nodes are evicted, and what lies behind them is lost")
class EvictsInner(reference.PrefixTree):
    def evict(self, n):
        evicted = []
        while len(evicted) < n:
            nodes = [node for node in FirstInFirstOut._all(self) if node.n_users == 0]
            if not nodes:
                break
            node = min(nodes, key=lambda node: (node.last_used, len(node.children) == 0))
            del node.parent.children[node.piece]
            evicted.append(node.block)
        return evicted


@mistake("PrefixTree", "blocks in use are evicted")
class EvictsInUse(reference.PrefixTree):
    def evict(self, n):
        for node in FirstInFirstOut._all(self):
            node.n_users = 0
        return super().evict(n)


@mistake("PrefixTree", "acquire notes that a block is in use, but not how often: the first release lets it go")
class UseIsABool(reference.PrefixTree):
    def release(self, tokens):
        super().release(tokens)
        for node in self._path(tokens):
            node.n_users = 0


@mistake("PrefixTree", "release walks the tree again, and releases blocks that were inserted after acquire")
class ReleasesWhatIsThere(reference.PrefixTree):
    def release(self, tokens):
        if not self.acquired.get(tuple(tokens)):
            raise ValueError("not acquired")
        self.acquired[tuple(tokens)].pop(0)
        for node in self._path(tokens):
            node.n_users -= 1


@mistake("PrefixTree", "the newest acquire is released first, which may hold blocks that somebody still reads")
class ReleasesTheNewest(reference.PrefixTree):
    def release(self, tokens):
        self.acquired.get(tuple(tokens), []).reverse()
        super().release(tokens)
        self.acquired[tuple(tokens)].reverse()


@mistake("PrefixTree", "a release without an acquire goes unnoticed")
class ReleaseUnchecked(reference.PrefixTree):
    def release(self, tokens):
        if self.acquired.get(tuple(tokens)):
            super().release(tokens)


@mistake("PrefixTree", "all nodes have the same last_used: the clock stands still, or is not stored in the nodes")
class ClockStands(reference.PrefixTree):
    def _path(self, tokens):
        path = super()._path(tokens)
        for node in path:
            node.last_used = 1
        return path


@mistake("PrefixTree", "insert makes a new node where one is remembered already, and its children are lost")
class NewNodesAlways(reference.PrefixTree):
    def insert(self, tokens, blocks):
        pieces, node = whole_blocks(tokens, self.block_size), self.root
        if len(pieces) != len(blocks):
            raise ValueError(f"{len(tokens)} tokens fill {len(pieces)} blocks, and {len(blocks)} blocks were given")
        for piece, block in zip(pieces, blocks, strict=True):
            node.children[piece] = Node(block, node, piece)
            node = node.children[piece]
        self._path(tokens)
        return list(blocks)


@mistake("PrefixTree", "evict takes the leaves of the beginning only: a parent that became one has to wait")
class LeavesOfTheBeginning(reference.PrefixTree):
    def evict(self, n):
        leaves = sorted((leaf for leaf in self.root.leaves() if leaf.n_users == 0), key=lambda leaf: leaf.last_used)[:n]
        for leaf in leaves:
            del leaf.parent.children[leaf.piece]
        return [leaf.block for leaf in leaves]


@mistake("PrefixTree", "inserting known tokens again does not count as use")
class InsertIsNoUse(reference.PrefixTree):
    def insert(self, tokens, blocks):
        before = [(node, node.last_used) for node in FirstInFirstOut._all(self)]
        new = super().insert(tokens, blocks)
        for node, used in before:
            node.last_used = used
        return new


@mistake("PrefixTree", "acquire does not count as use")
class AcquireIsNoUse(reference.PrefixTree):
    def acquire(self, tokens):
        before = [(node, node.last_used) for node in FirstInFirstOut._all(self)]
        found = super().acquire(tokens)
        for node, used in before:
            node.last_used = used
        return found


@mistake("PrefixTree", "release counts as a use")
class ReleaseIsAUse(reference.PrefixTree):
    def release(self, tokens):
        super().release(tokens)
        self._path(tokens)


@mistake("PrefixTree", "new nodes begin as never used, so that the newest are evicted first")
class NewNodesUnused(reference.PrefixTree):
    def insert(self, tokens, blocks):
        old = {id(node) for node in FirstInFirstOut._all(self)}
        new = super().insert(tokens, blocks)
        for node in FirstInFirstOut._all(self):
            node.last_used = node.last_used if id(node) in old else 0
        return new


@mistake("PrefixTree", "insert replaces a leaf by a new node, and nobody has acquired that one")
class ReplacesLeaves(reference.PrefixTree):
    def insert(self, tokens, blocks):
        node = self.root
        for piece in whole_blocks(tokens, self.block_size) if len(blocks) == len(tokens) // self.block_size else []:
            child = node.children.get(piece)
            if child is not None and not child.children:
                node.children[piece] = Node(child.block, node, piece)
            node = node.children.get(piece, Node())
        return super().insert(tokens, blocks)


@mistake("PrefixTree", "an acquire that finds no block is forgotten, and its release is refused")
class ForgetsEmptyAcquires(reference.PrefixTree):
    def acquire(self, tokens):
        found = super().acquire(tokens)
        if not found:
            self.acquired[tuple(tokens)].pop()
        return found


@mistake("PrefixTree", "tokens are taken to be hashable as they are: a list of tokens cannot be acquired")
class HashesTokens(reference.PrefixTree):
    def acquire(self, tokens):
        hash(tokens)
        return super().acquire(tokens)


def evicted(tree, n, *, go_on=False, stop=False, keep=False):
    """The reference's ``evict`` with something done differently."""
    blocks, leaves = [], tree.root.leaves() if keep else []
    while len(blocks) < n:
        leaves = leaves if keep else tree.root.leaves()
        leaves = [leaf for leaf in leaves if stop or leaf.n_users == 0]
        leaf = min(leaves, key=lambda leaf: leaf.last_used, default=None)
        if leaf is None or leaf.n_users:
            break
        blocks.append(leaf.block)
        if keep:
            leaves.remove(leaf)
            continue
        del leaf.parent.children[leaf.piece]
        while go_on and len(blocks) < n and (leaf := leaf.parent).parent and not (leaf.children or leaf.n_users):
            del leaf.parent.children[leaf.piece]
            blocks.append(leaf.block)
    return blocks


@mistake("PrefixTree", "evict goes on with the parent of an evicted leaf, though another leaf is older")
class EvictsUpwards(reference.PrefixTree):
    def evict(self, n):
        return evicted(self, n, go_on=True)


@mistake("PrefixTree", "evict ends at the first leaf in use, though others could go")
class EvictStopsAtUse(reference.PrefixTree):
    def evict(self, n):
        return evicted(self, n, stop=True)


@mistake("PrefixTree", "evict returns blocks that stay in the tree")
class EvictKeeps(reference.PrefixTree):
    def evict(self, n):
        return evicted(self, n, keep=True)


@mistake("PrefixTree", "evict fails when fewer than n blocks can go")
class EvictRaises(reference.PrefixTree):
    def evict(self, n):
        blocks = super().evict(n)
        if len(blocks) < n:
            raise ValueError(f"only {len(blocks)} of {n} blocks can be evicted")
        return blocks


@mistake("PrefixTree", "evict counts n down to exactly 0: a negative n forgets everything")
class EvictsBelowZero(reference.PrefixTree):
    def evict(self, n):
        return super().evict(n if n >= 0 else 1 << 30)


# ---- 21.7 Scheduler --------------------------------------------------------------------------------------------------


@mistake("Scheduler", "a prompt passes at once, however long it is: nothing is cut into chunks")
class WholePrompts(reference.Scheduler):
    def schedule(self):
        limit, self.max_tokens = self.max_tokens, 1 << 30
        try:
            return super().schedule()
        finally:
            self.max_tokens = limit


@mistake("Scheduler", "no request is admitted before all running ones have ended: that is a static batch")
class StaticBatch(reference.Scheduler):
    def schedule(self):
        waiting = self.waiting
        if self.running:
            self.waiting = type(waiting)()
        chunks = super().schedule()
        if self.waiting is not waiting:
            self.waiting.extend(waiting)
        return chunks


@mistake("Scheduler", "prompts pass before the requests that decode, which have to wait for them")
class PromptsFirst(reference.Scheduler):
    def schedule(self):
        return _schedule(self, order=lambda progress: progress.n_pending == 1)


def planned(self, *, before=lambda it: it, count=lambda it, n: it.n_cached + n, loses=True, empty=False, take=1):
    """The reference's loops with something done differently."""
    chunks, room, n_running = [], self.max_tokens, len(self.running)
    for progress in before(self.running):
        n = min(progress.n_pending, room)
        n_needed = self.blocks_for(count(progress, n))
        while progress in self.running and n_needed - self.running[progress] > self.n_free:
            self.preempt()
        if n and (progress in self.running or not loses):
            chunks.append(Chunk(progress, n))
            room -= n
            if progress in self.running:
                self.running[progress] = n_needed
    while self.waiting and (room or empty) and len(self.running) >= n_running:
        n = min(self.waiting[0].n_pending, room)
        if self.blocks_for(n) > self.n_free:
            break
        chunks.append(Chunk(self.waiting.popleft(), n))
        self.running[chunks[-1].progress], room = self.blocks_for(n), room - n * take
    return chunks


@mistake("Scheduler", "the loop runs over `self.running` itself, from which preempt takes requests: go through a copy")
class LoopsOverRunning(reference.Scheduler):
    def schedule(self):
        return planned(self)


@mistake("Scheduler", "blocks are counted for the positions in the cache only, not for the tokens of this step")
class BlocksForTheCached(reference.Scheduler):
    def schedule(self):
        return planned(self, before=list, count=lambda it, n: it.n_cached)


@mistake("Scheduler", "a request that was preempted in this step gets a chunk all the same")
class ChunksForThePreempted(reference.Scheduler):
    def schedule(self):
        return planned(self, before=list, loses=False)


@mistake("Scheduler", "requests are admitted with chunks of no tokens when the step has no room left")
class EmptyChunks(reference.Scheduler):
    def schedule(self):
        return planned(self, before=list, empty=True)


@mistake("Scheduler", "an admitted request's tokens are not subtracted from the room of the step")
class RoomNotUsed(reference.Scheduler):
    def schedule(self):
        return planned(self, before=list, take=0)


def _schedule(self, *, order=None, victim=None, skip=False, readmit=False, one=False, keep=False, forget=True):
    """The reference's ``schedule`` with something done differently."""
    planned, n_running = {}, len(self.running)
    for progress in sorted(self.running, key=order or (lambda it: it.n_pending > 1)):
        n = min(progress.n_pending, self.max_tokens - sum(planned.values()), 1 if one else 1 << 30)
        n_needed = self.blocks_for(progress.n_cached + n)
        while progress in self.running and n_needed - self.running[progress] > self.n_free:
            loser = victim(self, progress) if victim else self.preempt()
            if not keep:
                planned.pop(loser, None)
        if progress in self.running and n:
            planned[progress], self.running[progress] = n, n_needed
    while self.waiting and (readmit or len(self.running) >= n_running):
        limit = self.max_tokens - sum(planned.values())
        fits = [
            p
            for p in self.waiting
            if min(limit, p.n_pending) and self.blocks_for(min(limit, p.n_pending)) <= self.n_free
        ]
        if not fits or (fits[0] is not self.waiting[0] and not skip):
            break
        progress = fits[0]
        self.waiting.remove(progress)
        n = min(progress.n_pending, limit)
        planned[progress], self.running[progress] = n, self.blocks_for(n)
    return [Chunk(progress, planned[progress]) for progress in self.running if progress in planned]


@mistake("Scheduler", "a request that fits overtakes one that does not")
class Overtakes(reference.Scheduler):
    def schedule(self):
        return _schedule(self, skip=True)


@mistake("Scheduler", "the oldest running request is preempted instead of the youngest")
class PreemptsTheOldest(reference.Scheduler):
    def preempt(self):
        oldest = next(iter(self.running))
        del self.running[oldest]
        oldest.n_cached = 0
        self.waiting.appendleft(oldest)
        return oldest


@mistake("Scheduler", "a request that lacks blocks always gives up its own")
class PreemptsItself(reference.Scheduler):
    def schedule(self):
        def itself(_, progress):
            del self.running[progress]
            progress.n_cached = 0
            self.waiting.appendleft(progress)
            return progress

        return _schedule(self, victim=itself)


@mistake("Scheduler", "a preempted request waits at the end of the queue")
class PreemptedToTheEnd(reference.Scheduler):
    def preempt(self):
        youngest = super().preempt()
        self.waiting.rotate(-1)
        return youngest


@mistake("Scheduler", "a preempted request keeps n_cached, though its blocks are gone")
class RemembersItsCache(reference.Scheduler):
    def preempt(self):
        n_cached = next(reversed(self.running)).n_cached
        youngest = super().preempt()
        youngest.n_cached = n_cached
        return youngest


@mistake("Scheduler", "preempted requests lose the tokens that they had generated")
class LosesItsTokens(reference.Scheduler):
    def preempt(self):
        youngest = super().preempt()
        youngest.tokens = list(youngest.request.tokens)
        return youngest


@mistake("Scheduler", "a request that was just preempted is admitted again in the same step")
class AdmitsAtOnce(reference.Scheduler):
    def schedule(self):
        return _schedule(self, readmit=True)


@mistake("Scheduler", "a running request gets one token of its prompt a step")
class OneTokenEach(reference.Scheduler):
    def schedule(self):
        return _schedule(self, one=True)


@mistake("Scheduler", "blocks are counted for the whole prompt when it is admitted, not for its first chunk")
class BlocksForThePrompt(reference.Scheduler):
    def schedule(self):
        chunks = super().schedule()
        for chunk in chunks:
            if chunk.progress.n_cached == 0:
                self.running[chunk.progress] = self.blocks_for(chunk.progress.n_pending)
        return chunks


@mistake("Scheduler", "the last token is counted as cached: a request that would just fit is refused")
class LastTokenCached(reference.Scheduler):
    def submit(self, request):
        n_needed = self.blocks_for(len(request.tokens) + request.max_new_tokens)
        if n_needed > self.n_blocks:
            raise ValueError(f"{n_needed} blocks are needed, and the pool has {self.n_blocks}")
        super().submit(request)


@mistake("Scheduler", "only the prompt is checked: a request that can never end is queued")
class PromptChecked(reference.Scheduler):
    def submit(self, request):
        self.check_new(request)
        if self.blocks_for(len(request.tokens)) > self.n_blocks:
            raise ValueError(f"{len(request.tokens)} tokens do not fit into {self.n_blocks} blocks")
        self.waiting.append(Progress(request))


@mistake("Scheduler", "one position too few is counted: only the last new token is never cached")
class TwoUncached(reference.Scheduler):
    def submit(self, request):
        self.check_new(request)
        n_needed = self.blocks_for(len(request.tokens) + request.max_new_tokens - 2)
        if n_needed > self.n_blocks:
            raise ValueError(f"{n_needed} blocks are needed, and the pool has {self.n_blocks}")
        self.waiting.append(Progress(request))


@mistake("Scheduler", "a request can be submitted twice at the same time")
class Twice(reference.Scheduler):
    def check_new(self, request):
        pass


@mistake("Scheduler", "a step's list begins with the youngest")
class YoungestFirst(reference.Scheduler):
    def schedule(self):
        return super().schedule()[::-1]


@mistake("Scheduler", "a step's list is sorted: chunks of one token come first, whatever their age")
class SortedByChunk(reference.Scheduler):
    def schedule(self):
        return sorted(super().schedule(), key=lambda chunk: chunk.n_tokens > 1)


@mistake("Scheduler", "a step's list is sorted: prompts come before requests that decode, whatever their age")
class SortedPromptsFirst(reference.Scheduler):
    def schedule(self):
        return sorted(super().schedule(), key=lambda chunk: chunk.n_tokens == 1)


@mistake("Scheduler", "waiting requests are admitted before the running ones have got their tokens")
class AdmitsFirst(reference.Scheduler):
    def schedule(self):
        old, room = list(self.running), self.max_tokens
        chunks, new = [], []
        while self.waiting and room and self.blocks_for(min(self.waiting[0].n_pending, room)) <= self.n_free:
            new.append(Chunk(self.waiting[0], min(self.waiting[0].n_pending, room)))
            self.running[self.waiting.popleft()] = self.blocks_for(new[-1].n_tokens)
            room -= new[-1].n_tokens
        for progress in old:
            n = min(progress.n_pending, room)
            while progress in self.running and self.blocks_for(progress.n_cached + n) - self.running[progress] > self.n_free:  # fmt: skip
                self.preempt()
            if progress in self.running and n:
                chunks.append(Chunk(progress, n))
                self.running[progress], room = self.blocks_for(progress.n_cached + n), room - n
        return [chunk for chunk in chunks + new if chunk.progress in self.running]


@mistake("Scheduler", "the request with the most blocks is preempted instead of the youngest")
class PreemptsTheLargest(reference.Scheduler):
    def preempt(self):
        largest = max(self.running, key=lambda progress: self.running[progress])
        del self.running[largest]
        largest.n_cached = 0
        self.waiting.appendleft(largest)
        return largest


# ---- 21.8 Engine -----------------------------------------------------------------------------------------------------


def step(self, *, early=True, late=True, all_chunks=False, generator=None, options=True, greedy=False, chooses=None):
    """The reference's ``step`` with something done differently."""
    chunks, new = self.scheduler.schedule(), []
    if early:
        self.release()
    for chunk, logits in zip(chunks, self.run(chunks), strict=True):
        request, token = chunk.progress.request, None
        if chooses(chunk) if chooses else chunk.completes or all_chunks:
            sampling = chunk.progress.sampling(logits.device)
            if generator:
                sampling["generator"] = generator(chunk.progress)
            if not options:
                sampling |= {"top_k": None, "top_p": None}
            if greedy:
                sampling["temperature"] = 0.0
            token = int(sample_next(logits[None], **sampling))
            new.append((request, token))
        self.scheduler.advance(chunk, token)
    if late:
        self.release()
    return new


@mistake("Engine", "caches of preempted requests are not released before the next ones need their blocks")
class ReleasesLate(reference.Engine):
    def step(self):
        return step(self, early=False)


@mistake("Engine", "caches of requests that have ended are kept until the next step")
class KeepsTheEnded(reference.Engine):
    def step(self):
        return step(self, late=False)


@mistake("Engine", "every chunk chooses a token, also one in the middle of a prompt")
class TokensInThePrompt(reference.Engine):
    def step(self):
        return step(self, all_chunks=True)


@mistake("Engine", "all requests draw from PyTorch's global generator")
class GlobalGenerator(reference.Engine):
    def step(self):
        return step(self, generator=lambda progress: None)


@mistake("Engine", "a request's generator is seeded again at each token")
class SeededAgain(reference.Engine):
    def step(self):
        return step(self, generator=lambda progress: torch.Generator().manual_seed(progress.request.seed or 0))


@mistake("Engine", "top_k and top_p are not passed on")
class WithoutTopP(reference.Engine):
    def step(self):
        return step(self, options=False)


@mistake("Engine", "the likeliest token is always taken")
class AlwaysGreedy(reference.Engine):
    def step(self):
        return step(self, greedy=True)


@mistake("Engine", "the model runs for one request after the other, in as many steps")
class OneAtATime(reference.Engine):
    def step(self):
        chunks = self.scheduler.schedule()
        self.release()
        new = []
        for chunk in chunks:
            (logits,) = self.run([chunk])
            token = (
                int(sample_next(logits[None], **chunk.progress.sampling(logits.device))) if chunk.completes else None
            )
            new += [(chunk.progress.request, token)] if token is not None else []
            self.scheduler.advance(chunk, token)
        self.release()
        return new


@mistake("Engine", "all requests draw from one generator of the engine's")
class OneGenerator(reference.Engine):
    def __init__(self, model, scheduler):
        super().__init__(model, scheduler)
        self.generator = torch.Generator().manual_seed(0)

    def step(self):
        return step(self, generator=lambda progress: self.generator)


@mistake("Engine", "only chunks of one token choose a token, not those that complete a longer prompt")
class SingleTokensOnly(reference.Engine):
    def step(self):
        return step(self, chooses=lambda chunk: chunk.n_tokens == 1)


@mistake("Engine", "tokens are chosen for the chunks that do not complete, and none for those that do")
class ChoosesTheOthers(reference.Engine):
    def step(self):
        return step(self, chooses=lambda chunk: not chunk.completes)


@mistake("Engine", "a token is the tensor that `sample_next` returns; it should be an int")
class TensorTokens(reference.Engine):
    def step(self):
        return [(request, torch.tensor([token])) for request, token in super().step()]


@mistake("Engine", "a chunk in the middle of a prompt draws a token that is thrown away, and uses up random numbers")
class DrawsAndThrowsAway(reference.Engine):
    def step(self):
        chunks, new = self.scheduler.schedule(), []
        self.release()
        for chunk, logits in zip(chunks, self.run(chunks), strict=True):
            token = int(sample_next(logits[None], **chunk.progress.sampling(logits.device)))
            new += [(chunk.progress.request, token)] if chunk.completes else []
            self.scheduler.advance(chunk, token if chunk.completes else None)
        self.release()
        return new


@mistake("Engine", "chunks that choose no token do not advance: the scheduler plans them again")
class AdvancesTokensOnly(reference.Engine):
    def step(self):
        chunks, new = self.scheduler.schedule(), []
        self.release()
        for chunk, logits in zip(chunks, self.run(chunks), strict=True):
            if chunk.completes:
                token = int(sample_next(logits[None], **chunk.progress.sampling(logits.device)))
                new.append((chunk.progress.request, token))
                self.scheduler.advance(chunk, token)
        self.release()
        return new


# ---- 21.9 generate_many ----------------------------------------------------------------------------------------------


@mistake("generate_many", "one request after the other, as if there were no scheduler")
def one_by_one(model, requests, scheduler):
    for request in requests:
        yield from reference.generate_many(model, [request], scheduler)


@mistake("generate_many", "all tokens are collected first, and yielded at the end")
def collected(model, requests, scheduler):
    yield from list(reference.generate_many(model, requests, scheduler))


@mistake("generate_many", "requests are not cancelled when the caller stops earlier")
def never_cancelled(model, requests, scheduler):
    engine = reference.Engine(model, scheduler)
    for request in requests:
        engine.submit(request)
    while engine.is_busy:
        yield from engine.step()


@mistake("generate_many", "each request's tokens come together, when the request has ended")
def grouped(model, requests, scheduler):
    requests = list(requests)
    found = {request: [] for request in requests}
    for request, token in reference.generate_many(model, requests, scheduler):
        found[request].append(token)
        if len(found[request]) == request.max_new_tokens:
            yield from ((request, one) for one in found[request])


@mistake("generate_many", "a request that does not fit is skipped without an error")
def skipped(model, requests, scheduler):
    good, engine = [], reference.Engine(model, scheduler)
    for request in requests:
        try:
            engine.submit(request)
            good.append(request)
            engine.cancel(request)
        except ValueError:
            pass
    yield from reference.generate_many(model, good, scheduler)


@mistake("generate_many", "requests that somebody else submitted are cancelled, too")
def cancels_all(model, requests, scheduler):
    engine, requests = reference.Engine(model, scheduler), list(requests)
    try:
        for request in requests:
            engine.submit(request)
        while engine.is_busy:
            yield from engine.step()
    finally:
        for request in requests:
            engine.cancel(request)


@mistake("generate_many", "`requests` is read twice: a generator of requests is empty the second time")
def read_twice(model, requests, scheduler):
    engine = reference.Engine(model, scheduler)
    try:
        for request in requests:
            engine.submit(request)
        while engine.is_busy:
            yield from engine.step()
    finally:
        for request in requests:
            engine.cancel(request)


@mistake("generate_many", "`requests` is taken to be a list; a generator of requests has no length and no indices")
def lists_only(model, requests, scheduler):
    len(requests)
    yield from reference.generate_many(model, requests, scheduler)


@mistake("generate_many", "the scheduler is emptied at the end, with the requests of others in it")
def empties(model, requests, scheduler):
    try:
        yield from reference.generate_many(model, requests, scheduler)
    finally:
        scheduler.waiting.clear()
        scheduler.running.clear()


@mistake("generate_many", "if one request is refused, those submitted before it stay in the scheduler")
def stay(model, requests, scheduler):
    engine, submitted = reference.Engine(model, scheduler), []
    for request in requests:
        engine.submit(request)
        submitted.append(request)
    try:
        while engine.is_busy:
            yield from engine.step()
    finally:
        for request in submitted:
            engine.cancel(request)


@mistake("generate_many", "a step is taken after each submit, instead of after all")
def steps_between(model, requests, scheduler):
    engine, submitted = reference.Engine(model, scheduler), []
    try:
        for request in requests:
            engine.submit(request)
            submitted.append(request)
            yield from engine.step()
        while engine.is_busy:
            yield from engine.step()
    finally:
        for request in submitted:
            engine.cancel(request)


# ---- 21.10 speculative_step ------------------------------------------------------------------------------------------


def speculate(
    target, draft, drafted, generator, *, keep=None, rest=None, bonus=True, own=True, fallback=True, ends=True
):
    places = torch.arange(len(drafted))
    p, q = target[places, drafted], draft[places, drafted]
    uniform = torch.rand(len(drafted), generator=generator)
    kept = keep(uniform, p, q) if keep else uniform * q < p
    n = int((kept.long().cumprod(0) if ends else kept).sum())
    if n == len(drafted):
        if not bonus and n:
            return drafted.clone()
        return torch.cat([drafted, torch.multinomial(target[n], 1, generator=generator)])
    if not own:
        return drafted[:n].clone() if n else torch.multinomial(target[0], 1, generator=generator)
    weights = rest(target[n], draft[n]) if rest else (target[n] - draft[n]).clamp(min=0)
    weights = weights if weights.any() or not fallback else target[n]
    return torch.cat([drafted[:n], torch.multinomial(weights, 1, generator=generator)])


@mistake(
    "speculative_step", "where p and q differ by rounding only, max(0, p - q) is 0 for all tokens: then draw from p"
)
def no_fallback(target, draft, drafted, generator=None):
    return speculate(target, draft, drafted, generator, fallback=False)


@mistake("speculative_step", "all drafts that pass are counted, also those behind the first rejected one: no `cumprod`")
def counts_all_kept(target, draft, drafted, generator=None):
    return speculate(target, draft, drafted, generator, ends=False)


@mistake("speculative_step", "the token in place of a rejected one is drawn from p instead of max(0, p - q)")
def rest_is_target(target, draft, drafted, generator=None):
    return speculate(target, draft, drafted, generator, rest=lambda p, q: p)


@mistake("speculative_step", "the token in place of a rejected one is drawn from |p - q|")
def rest_absolute(target, draft, drafted, generator=None):
    return speculate(target, draft, drafted, generator, rest=lambda p, q: (p - q).abs())


@mistake("speculative_step", "every draft is kept")
def keeps_all(target, draft, drafted, generator=None):
    return speculate(target, draft, drafted, generator, keep=lambda u, p, q: torch.ones_like(u, dtype=torch.bool))


@mistake("speculative_step", "a draft is kept with probability p instead of min(1, p/q)")
def keeps_by_p(target, draft, drafted, generator=None):
    return speculate(target, draft, drafted, generator, keep=lambda u, p, q: u < p)


@mistake("speculative_step", "p and q are exchanged: a draft is kept with probability min(1, q/p)")
def ratio_inverted(target, draft, drafted, generator=None):
    return speculate(target, draft, drafted, generator, keep=lambda u, p, q: u * p < q)


@mistake("speculative_step", "a draft is kept wherever p is at least q, and never elsewhere")
def keeps_by_comparison(target, draft, drafted, generator=None):
    return speculate(target, draft, drafted, generator, keep=lambda u, p, q: p >= q)


@mistake("speculative_step", "when all drafts are kept, the target's last row is not used")
def no_bonus(target, draft, drafted, generator=None):
    return speculate(target, draft, drafted, generator, bonus=False)


@mistake("speculative_step", "a rejected draft is not replaced by a token of the target's")
def no_replacement(target, draft, drafted, generator=None):
    return speculate(target, draft, drafted, generator, own=False)


@mistake("speculative_step", "drafts behind the first rejected one are kept")
def keeps_behind(target, draft, drafted, generator=None):
    places = torch.arange(len(drafted))
    kept = torch.rand(len(drafted), generator=generator) * draft[places, drafted] < target[places, drafted]
    n = int(kept.sum())
    if n == len(drafted):
        return torch.cat([drafted, torch.multinomial(target[n], 1, generator=generator)])
    first = int((~kept).nonzero()[0])
    own = torch.multinomial((target[first] - draft[first]).clamp(min=0), 1, generator=generator)
    return torch.cat([drafted[:first], own, drafted[first + 1 :][kept[first + 1 :]]])


@mistake("speculative_step", "the replacement comes from the row behind the rejected draft")
def next_row(target, draft, drafted, generator=None):
    n_drafted = len(drafted)
    places = torch.arange(n_drafted)
    kept = torch.rand(n_drafted, generator=generator) * draft[places, drafted] < target[places, drafted]
    n = int(kept.long().cumprod(0).sum())
    row = min(n + 1, n_drafted)
    return torch.cat([drafted[:n], torch.multinomial(target[row], 1, generator=generator)])


@mistake("speculative_step", "random numbers come from PyTorch's global generator")
def global_numbers(target, draft, drafted, generator=None):
    return reference.speculative_step(target, draft, drafted)


@mistake("speculative_step", "p - q is computed in place, in the caller's tensor")
def in_place(target, draft, drafted, generator=None):
    answer = reference.speculative_step(target, draft, drafted, generator)
    if len(answer) <= len(drafted):
        target[len(answer) - 1].sub_(draft[len(answer) - 1]).clamp_(min=0)
    return answer


@mistake("speculative_step", "u <= p/q instead of u < p/q: a draft with p = 0 is kept when the uniform number is 0")
def keeps_at_zero(target, draft, drafted, generator=None):
    return speculate(target, draft, drafted, generator, keep=lambda u, p, q: u * q <= p)


@mistake("speculative_step", "one uniform number decides about all drafts")
def one_uniform(target, draft, drafted, generator=None):
    return speculate(target, draft, drafted, generator, keep=lambda u, p, q: u[:1].expand_as(u) * q < p)


@mistake("speculative_step", "without a generator the numbers are seeded anew: each call draws the same")
def seeds_itself(target, draft, drafted, generator=None):
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    return reference.speculative_step(target, draft, drafted, generator)


@mistake("speculative_step", "only the uniform numbers come from the generator, not the target's own token")
def half_global(target, draft, drafted, generator=None):
    n = len(reference.speculative_step(target, draft, drafted, generator)) - 1
    weights = target[n] if n == len(drafted) else (target[n] - draft[n]).clamp(min=0)
    weights = weights if weights.any() else target[n]
    return torch.cat([drafted[:n], torch.multinomial(weights, 1)])


@mistake("speculative_step", "the target's own token is the likeliest one instead of a draw")
def own_is_likeliest(target, draft, drafted, generator=None):
    places = torch.arange(len(drafted))
    kept = torch.rand(len(drafted), generator=generator) * draft[places, drafted] < target[places, drafted]
    n = int(kept.long().cumprod(0).sum())
    weights = target[n] if n == len(drafted) else (target[n] - draft[n]).clamp(min=0)
    return torch.cat([drafted[:n], weights.argmax()[None]])


# ---- 21.11 expected_tokens -------------------------------------------------------------------------------------------


@mistake("expected_tokens", "the target's own token is not counted")
def without_own(acceptance, n_drafted):
    return reference.expected_tokens(acceptance, n_drafted) - 1


@mistake("expected_tokens", "each draft is counted by itself, but a rejected one ends the step")
def independent(acceptance, n_drafted):
    reference.expected_tokens(acceptance, n_drafted)
    return 1.0 + acceptance * n_drafted


@mistake("expected_tokens", "the closed form divides by zero where every draft is kept")
def divides_by_zero(acceptance, n_drafted):
    reference.expected_tokens(acceptance, n_drafted)
    return (1 - acceptance ** (n_drafted + 1)) / (1 - acceptance)


@mistake("expected_tokens", "the sum ends one term too early")
def one_term_less(acceptance, n_drafted):
    reference.expected_tokens(acceptance, n_drafted)
    return float(sum(acceptance**i for i in range(n_drafted)))


@mistake("expected_tokens", "the acceptance is not checked")
def acceptance_unchecked(acceptance, n_drafted):
    return float(sum(acceptance**i for i in range(n_drafted + 1)))


@mistake("expected_tokens", "the sum goes on for ever: as if drafts had no end")
def endless(acceptance, n_drafted):
    reference.expected_tokens(acceptance, n_drafted)
    return 1 / (1 - acceptance) if acceptance < 1 else n_drafted + 1.0


@mistake("expected_tokens", "the drafts are taken to be kept all together or not at all")
def all_or_none(acceptance, n_drafted):
    reference.expected_tokens(acceptance, n_drafted)
    return 1 + n_drafted * acceptance**n_drafted


@mistake("expected_tokens", "the sum ends one term too late")
def one_term_more(acceptance, n_drafted):
    return reference.expected_tokens(acceptance, n_drafted + 1)


@mistake("expected_tokens", "0 and 1 are refused, though both are probabilities")
def ends_refused(acceptance, n_drafted):
    if not 0 < acceptance < 1:
        raise ValueError(f"acceptance = {acceptance}: expected a probability between 0 and 1")
    return reference.expected_tokens(acceptance, n_drafted)


@mistake("expected_tokens", "only an acceptance above 1 is refused")
def below_unchecked(acceptance, n_drafted):
    return (
        reference.expected_tokens(acceptance, n_drafted)
        if acceptance > 1
        else acceptance_unchecked(acceptance, n_drafted)
    )
