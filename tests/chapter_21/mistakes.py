"""What goes wrong when people serve a model."""

import torch

from lib.workbook.grading import edits
from solutions import serving as reference


def nodes_of(tree):
    """All blocks of a prefix tree, parents first."""
    nodes = [tree.root]
    for node in nodes:
        nodes += node.children.values()
    return nodes[1:]


def unused(tree, method, *args):
    """What a method of the reference's returns, without counting as a use of the nodes that were there."""
    used = [(node, node.last_used) for node in nodes_of(tree)]
    found = getattr(reference.PrefixTree, method)(tree, *args)
    for node, before in used:
        node.last_used = before
    return found


def one_by_one(target, draft, drafted, generator, **wrong):
    """A speculative step as a loop, which draws each uniform number when it is needed; ``wrong`` replaces its parts."""
    uniform = wrong.get("uniform", lambda: torch.rand((), generator=generator))
    is_kept = wrong.get("is_kept", lambda u, p, q: u * q < p)
    rest = wrong.get("rest", lambda p, q: (p - q).clamp(min=0))
    tokens = []
    for p, q, token in zip(target, draft, drafted.tolist(), strict=False):
        if is_kept(uniform(), p[token], q[token]):
            tokens.append(token)
            continue
        weights = rest(p, q)
        tokens.append(int(torch.multinomial(weights if weights.any() else p, 1, generator=generator)))
        if not wrong.get("goes_on"):
            return torch.tensor(tokens)
    return torch.tensor([*tokens, int(torch.multinomial(wrong.get("last", target[-1]), 1, generator=generator))])


edits("""
# decode_seconds
the embedding table is read whole, though a step looks up one row for each sequence
- 2 * weights, => 2 * count_parameters(config),
- 2 * config.dim + kv_cache_bytes => kv_cache_bytes
the rows of the embedding table that a step looks up are not read at all
- 2 * config.dim + kv_cache_bytes => kv_cache_bytes
the weights are read once for each sequence; the batch shares them
+ return batch * reference.decode_seconds(config, card, 1, length)
the keys and values of one sequence only are read
- weights + batch * own => weights + own + (batch - 1) * 2 * config.dim
keys and values are counted for all query heads, but only the key heads are cached
- kv_cache_bytes(config, 1, length) => kv_cache_bytes(config, 1, length) * config.n_heads // config.n_kv_heads
keys are read and values are not
- kv_cache_bytes(config, 1, length) => kv_cache_bytes(config, 1, length) // 2
the two products of attention are not counted
- + 2 * config.n_layers * config.dim * length =>
a multiplication with its addition is counted as one operation; it is two
- 2 * products => products
the norms' weights are counted as a product
- - (2 * config.n_layers + 1) * config.dim =>
the two times are added; arithmetic and memory traffic overlap
- roofline_seconds(batch * flops, weights + batch * own, card.peak_flops, card.bandwidth)
+ batch * flops / card.peak_flops + (weights + batch * own) / card.bandwidth
one of attention's two products is counted: 2 L C S FLOPs instead of 4 L C S
- 2 * config.n_layers * config.dim * length => config.n_layers * config.dim * length
the embedding table is read whole, and the rows looked up in it are counted besides
- 2 * weights, => 2 * count_parameters(config),
the embedding table is read whole and takes part in a product; a step looks up one row of it
- - config.vocab_size * config.dim =>
- 2 * config.dim + kv_cache_bytes => kv_cache_bytes
the embedding table takes part in a product, as the output matrix does
- products = weights - => products = count_parameters(config) -
the keys and values in the cache are not read at all
- batch * own => batch * 2 * config.dim
one norm is counted for each layer; a layer has two
- (2 * config.n_layers + 1) => (config.n_layers + 1)
attention is counted for one layer only
- 2 * config.n_layers * config.dim * length => 2 * config.dim * length
attention's products are counted for the key heads only; every query head has its own
- 2 * config.n_layers * config.dim * length => 2 * config.n_layers * config.n_kv_heads * config.head_dim * length
the last norm, behind all layers, is counted as a product
- (2 * config.n_layers + 1) => 2 * config.n_layers
the new position is left out of the cache, but `length` counts it
- kv_cache_bytes(config, 1, length) => kv_cache_bytes(config, 1, length - 1)
the output matrix is left out of the products, but every token of the vocabulary gets a score
- products = weights - => products = weights - config.vocab_size * config.dim -
the output matrix is not read, but every token of the vocabulary gets a score
- 2 * weights, => 2 * (weights - config.vocab_size * config.dim),

# compute_bound_decode_batch
the cache is ignored: each sequence brings bytes of its own
- card.peak_flops - own => card.peak_flops
the cache is taken to be as large for any batch as for one sequence
- card.peak_flops - own => card.peak_flops
- weights / gain => (weights + own) / gain
the result is rounded down: that batch is still bound by memory
- math.ceil => math.floor
a batch is searched up to some limit, which is returned where there is none
+ return min(reference.compute_bound_decode_batch(config, card, length), 65_536)
the FLOPs of attention are not counted
- + 2 * config.n_layers * config.dim * length =>
peak and bandwidth are exchanged
+ return reference.compute_bound_decode_batch(config, card._replace(peak_flops=card[1], bandwidth=card[0]), length)
where no batch is large enough, a negative number comes out
- math.ceil(weights / gain) if gain > 0 else math.inf => math.ceil(weights / gain)
one batch too large where both times are equal: rounded down, plus 1
- math.ceil(weights / gain) => math.floor(weights / gain) + 1
rounded to the nearest batch, which may still be bound by memory
- math.ceil(weights / gain) => max(1, round(weights / gain))
the batch is not rounded up to a whole number
- math.ceil(weights / gain) => weights / gain
a sequence that brings as many bytes as arithmetic is a division by zero
- > 0 => >= 0
the embedding table is read whole
- 2 * weights, => 2 * count_parameters(config),
the row of the embedding table that each sequence reads is forgotten
- 2 * config.dim + kv_cache_bytes => kv_cache_bytes
the norms' weights are counted as a product
- - (2 * config.n_layers + 1) * config.dim =>
weights are counted, not their bytes: each has two
- 2 * weights, => weights,
a multiplication with its addition is counted as one operation
- 2 * products => products
only powers of two are tried
+ batch = reference.compute_bound_decode_batch(config, card, length)
+ return batch if batch == math.inf else 1 << (batch - 1).bit_length()

# BlockAllocator
free returns the block to the pool although somebody else still uses it
- self.n_users[block] -= 1 => self.n_users[block] = 0
a block that loses its last user is not put back into the pool
- self.unused.append(block) => pass
share does not count the new user
- self.n_users[block] += 1 =>
share returns nothing
@@ share
- return block =>
a full pool is an IndexError of the empty list instead of OutOfBlocks
@@ allocate
+ block = self.unused.pop()
+ self.n_users[block] = 1
+ return block
a double free goes unnoticed, and the block is in the pool twice
@@ free
- self.n_users, block => [1] * len(self.n_users), block
- self.n_users[block] -= 1 => self.n_users[block] = max(0, self.n_users[block] - 1)
a block that nobody uses can be shared
@@ share
- self.n_users, block => [1] * len(self.n_users), block
n_free subtracts users, not blocks: a shared block counts twice
@@ n_free
+ return len(self.n_users) - sum(self.n_users)
allocate does not count the block's first user
- self.n_users[block] = 1 =>
blocks that do not exist are not refused: -1 is the last one, as in any list
@@ share
- self.n_users, block => self.n_users, block % len(self.n_users)
@@ free
- self.n_users, block => self.n_users, block % len(self.n_users)
each free puts the block back into the pool, whether or not it was the last user's
- if self.n_users[block] == 0: => if True:
share sets the number of users to 2 instead of adding 1
- += 1 => = 2
blocks are handed out in order, and those that were freed never again
@@ allocate
+ self.unused = [block for block in self.unused if block > getattr(self, "last", -1)]
+ if not self.unused:
+     raise OutOfBlocks(f"all {len(self.n_users)} blocks of the pool are in use")
+ self.last = self.unused.pop(0)
+ self.n_users[self.last] = 1
+ return self.last
blocks are numbered from 1
@@ __init__
+ self.n_users, self.unused = [0] * (n_blocks + 1), list(range(1, n_blocks + 1))
the free blocks are kept in the class, so that all pools share one list
- self.n_users, self.unused = [0] * n_blocks, list(range(n_blocks))
+ self.n_users, type(self).unused = [0] * n_blocks, list(range(n_blocks))
free takes the user away before it checks, so that a refused call leaves -1 users
@@ free
- self.n_users, block => [1] * len(self.n_users), block
  self.n_users[block] -= 1
+ check_used([n + 1 for n in self.n_users], block)

# PagedCache
fork copies the table without sharing its blocks, so that they are freed too early
- self.new(self.tables[sequence])
+ self.new()
+ self.tables[copy] = list(self.tables[sequence])
fork copies every block at once instead of sharing it
+ self.find_slots(copy, 0, len(self.tables[copy]) * self.block_size)
  return copy
fork hands out the same lists, so that one sequence grows with the other
- list(self.lengths[sequence]) => self.lengths[sequence]
a shared block is written to without copying it first
- if self.allocator.n_users[table[i]] > 1 => if False
the copy gets a block, but not what was in it
- self.copy_block(old, table[i]) =>
the block that was copied does not lose its user: it is never free again
- self.allocator.free(old) =>
every shared block of the table is copied, also those that are not written to
- range(start // size, min(n_blocks, len(table))) => range(len(table) if end > start else 0)
a block is exchanged although the sequence is its only user
- > 1 => > 0
one block too many is allocated when the positions fill their blocks exactly
- -(-end // self.block_size) => end // self.block_size + (end > start)
blocks are allocated before it is known whether there are enough
@@ find_slots
+ try:
+     return reference.PagedCache.find_slots(self, sequence, start, end)
+ except OutOfBlocks:
+     while self.allocator.n_free:
+         self.tables[sequence].append(self.allocator.allocate())
+     raise
only new blocks are counted, not the copies: the pool runs dry in the middle
- + len(shared) =>
every layer gets blocks of its own
@@ append
+ reference.PagedCache.append(self, sequence, layer, k, v)
+ if layer and k.shape[1] and self.allocator.n_free:
+     self.tables[sequence].append(self.allocator.allocate())
all layers share one length, so that the second layer's positions come behind the first's
@@ append
+ reference.PagedCache.append(self, sequence, layer, k, v)
+ self.lengths[sequence] = [max(self.lengths[sequence])] * len(self.keys)
everything is written to layer 0
- self.write(layer, => self.write(0,
values are stored where keys belong, and keys where values belong
- k.transpose(0, 1), v.transpose(0, 1) => v.transpose(0, 1), k.transpose(0, 1)
positions follow each other in the pool, as if a sequence's blocks were neighbours
- [table[p // size] * size + p % size for p in range(start, end)]
+ [(table[start // size] * size + p - start // size * size) % (self.n_blocks * size) for p in range(start, end)]
free forgets the sequence, and its blocks stay in use
- for block in self.tables.pop(sequence):
-     self.allocator.free(block)
+ del self.tables[sequence]
free returns the blocks, and the sequence can be freed again
@@ free
+ self.length_of(sequence)
+ for block in self.tables[sequence]:
+     self.allocator.free(block)
+ self.tables[sequence] = []
ids of freed sequences are given again
@@ new
+ self.n_made = max(self.tables, default=0)
+ return reference.PagedCache.new(self, blocks)
shapes are not checked, and what broadcasts is stored
- self.check_shapes(k, v) =>
a sequence that begins with blocks of others does not become their user
- [self.allocator.share(block) for block in blocks] => list(blocks)
- self.new(self.tables[sequence]) => self.new([self.allocator.share(block) for block in self.tables[sequence]])
the caller's list of blocks becomes the sequence's table, and grows with it
- self.tables[self.n_made] = [self.allocator.share(block) for block in blocks]
+ self.tables[self.n_made] = blocks if blocks else []
+ for block in blocks:
+     self.allocator.share(block)
- self.new(self.tables[sequence]) => self.new(list(self.tables[sequence]))
a sequence that begins with blocks of others has length 0, so that it overwrites them
- [len(blocks) * self.block_size] => [0]
slots are computed before the shared block is exchanged: the old block is written to
- for i in shared:
+ before = dict(enumerate(table))
+ for i in shared:
- [table[p // size] * size => [before.get(p // size, table[p // size]) * size
copy_block's arguments are exchanged: the shared block is overwritten by the new, empty one
- copy_block(old, table[i]) => copy_block(table[i], old)
only the first of the blocks written to is copied
+ shared = shared[:1]
  n_needed = max
the table's last block is copied when it is shared, though it may be full
- range(start // size, min(n_blocks, len(table))) if => range(len(table))[-1:] if end > start and
new positions get blocks of their own, though the last block has room
- max(0, n_blocks - len(table)) + len(shared) => -(-(end - start) // size) + len(shared)
- range(n_blocks - len(table)) => range(-(-(end - start) // size))
refused when exactly as many blocks are free as are needed
- if n_needed > self.allocator.n_free => if n_needed and n_needed >= self.allocator.n_free
every shared block of the table is counted as a copy, also those that are not written to
- + len(shared) => + (end > start) * sum(self.allocator.n_users[block] > 1 for block in table)
shared blocks are copied before the new ones are counted: a refused call has changed the table
+ if n_blocks > len(table) and len(shared) <= self.allocator.n_free:
+     self.find_slots(sequence, start, len(table) * size)
+     shared = []
  n_needed = max
shared blocks behind the last position that is written are copied, too
- min(n_blocks, len(table)) => len(table) if end > start else 0
shared blocks before the first position that is written are copied, too
- start // size, min => 0 if end > start else n_blocks, min
nothing is counted beforehand: the pool runs dry in the middle of a call
- if n_needed > self.allocator.n_free => if False
the length grows before it is known whether the positions fit
- end = start + k.shape[1] => end = self.lengths[sequence][layer] = start + k.shape[1]
- self.lengths[sequence][layer] = end =>
shapes are checked after blocks were allocated for them
@@ append
+ start = self.length_of(sequence, layer)
+ self.find_slots(sequence, start, start + k.shape[1])
+ reference.PagedCache.append(self, sequence, layer, k, v)
[G, T, D] is reshaped to [T, G, D] instead of transposed
- k.transpose(0, 1), v.transpose(0, 1) => *(x.reshape(x.transpose(0, 1).shape) for x in (k, v))
fork copies the partly full block at once, though nobody has written yet
+ if (length := self.lengths[copy][0]) % self.block_size and self.allocator.n_free:
+     self.find_slots(copy, length, length + 1)
  return copy
fork gives all layers the length of the first
- list(self.lengths[sequence]) => [self.lengths[sequence][0]] * len(self.keys)
a sequence that begins with blocks of others counts blocks as its length, not positions
- [len(blocks) * self.block_size] => [len(blocks)]
free returns the blocks, and the lengths stay: the id is still known
- del self.lengths[sequence] =>
fork hands out the table itself: the fork's list of blocks is the first's, and no block has a user more
- copy = self.new(self.tables[sequence])
+ copy = self.new()
+ self.tables[copy] = self.tables[sequence]
fork shares the blocks, but both sequences have one list of them, so that a copy on write changes both
- copy = self.new(self.tables[sequence])
+ copy = self.new(self.tables[sequence])
+ self.tables[copy] = self.tables[sequence]
an id is the number of sequences there are, so that after a `free` one that was used before comes again
@@ new
+ self.n_made = len(self.tables) - 1
+ return reference.PagedCache.new(self, blocks)

# paged_attention
positions behind the end of a sequence are not masked
- v, mask[:, None, None] => v
a weight of 0 times an old block's infinity or NaN is NaN: the values are not masked, too
- x.masked_fill(~mask[:, None, :, None], 0), q => x, q
one position too many is attended to: positions count from 0, so the last is `lengths` - 1
- < lengths[:, None] => <= lengths[:, None]
layer 0 is read, whatever the layer
+ return reference.paged_attention(q, cache, sequences, 0, n_parts)
a sequence has as many positions in every layer as in layer 0: in the middle of a step it has not
- table, lengths = table_of(cache, sequences, layer) => table, lengths = table_of(cache, sequences)
query heads that share a key head are taken to be n_kv_heads apart instead of next to each other
- repeat_kv(x.masked_fill(~mask[:, None, :, None], 0), q.shape[1] // x.shape[1])
+ x.masked_fill(~mask[:, None, :, None], 0).repeat(1, q.shape[1] // x.shape[1], 1, 1)
the scores are not divided by the root of the heads' width
- q[:, :, None] => q[:, :, None] * math.sqrt(q.shape[-1])
the tables are not used: blocks are read in the order of the pool
  table, lengths = table_of(cache, sequences, layer)
+ table = (table[:, :1] + torch.arange(table.shape[1])) % cache.n_blocks
the last block is taken to be full for every sequence
- table, lengths = table_of(cache, sequences, layer)
+ table, _ = table_of(cache, sequences, layer)
+ lengths = torch.tensor([len(cache.tables[i]) * cache.block_size for i in sequences])
outputs of the parts are averaged; they have to be weighed by their logsumexp
- o, lse = launch_paged(q, cache, sequences, layer, n_parts)
+ return launch_paged(q, cache, sequences, layer, n_parts)[0].mean(0).to(q.dtype)
only two parts are merged
- while len(o) > 1: => if len(o) > 1:
the first part alone is returned
- while len(o) > 1: => while False:
n_parts is ignored: the kernel is never launched
+ return reference.paged_attention(q, cache, sequences, layer)
one part is taken for no number of parts: with n_parts=1 the kernel is launched, too
+ return reference.paged_attention(q, cache, sequences, layer, None if n_parts == 1 else n_parts)
the output has the dtype of the sums, not of the queries
+ return reference.paged_attention(q, cache, sequences, layer, n_parts).float()
with n_parts the output stays float32, whatever the dtype of the queries
- o[0].to(q.dtype) => o[0]
the kernel is launched on a CPU without n_parts, too; in float64 it is less exact
+ return reference.paged_attention(q, cache, sequences, layer, n_parts or 1)

# PrefixTree
a block is looked up by its own tokens alone, whatever came before it
@@ match
+ known, nodes = {}, [self.root]
+ for node in nodes:
+     known.setdefault(node.piece, node.block)
+     nodes += node.children.values()
+ found = reference.PrefixTree.match(self, tokens)
+ return found or [known[p] for p in whole_blocks(tokens, self.block_size) if p in known]
a match must be complete: a prefix of which a part is known gives nothing
@@ match
+ found = reference.PrefixTree.match(self, tokens)
+ return found if len(found) == len(tokens) // self.block_size else []
insert replaces a block that is remembered already
  node = node.children[piece]
+ node.block = block
insert returns all blocks, not only those that are new in the tree
- return new => return list(blocks)
the numbers of tokens and of blocks are not compared
@@ insert
+ n = min(len(blocks), len(tokens) // self.block_size)
+ return reference.PrefixTree.insert(self, tokens[: n * self.block_size], blocks[:n])
the oldest insertion is evicted first; matching does not count as use
@@ match
+ return unused(self, "match", tokens)
the most recently used leaf is evicted first
- leaf = min(leaves => leaf = max(leaves
only the last block of a match is used, not those on the way to it
- path[-1].last_used = self.clock =>
+ path[-1].last_used = self.clock
  return path[1:]
inner nodes are evicted, and what lies behind them is lost
- leaf for leaf in self.root.leaves() if leaf.n_users == 0 => node for node in nodes_of(self) if node.n_users == 0
blocks in use are evicted
- if leaf.n_users == 0 =>
acquire notes that a block is in use, but not how often: the first release lets it go
- node.n_users -= 1 => node.n_users = 0
release walks the tree again, and releases blocks that were inserted after acquire
- for node in self.acquired[tuple(tokens)].pop(0):
+ self.acquired[tuple(tokens)].pop(0)
+ for node in self._path(tokens):
the newest acquire is released first, which may hold blocks that somebody still reads
- pop(0) => pop()
a release without an acquire goes unnoticed
- raise ValueError(f"these {len(tokens)} tokens are not acquired: released already, or never acquired") => return
all nodes have the same last_used: the clock stands still, or is not stored in the nodes
- self.clock + 1 => 1
insert makes a new node where one is remembered already, and its children are lost
- if piece not in node.children: => if True:
evict takes the leaves of the beginning only: a parent that became one has to wait
@@ evict
+ leaves = sorted((leaf for leaf in self.root.leaves() if leaf.n_users == 0), key=lambda leaf: leaf.last_used)[:n]
+ for leaf in leaves:
+     del leaf.parent.children[leaf.piece]
+ return [leaf.block for leaf in leaves]
inserting known tokens again does not count as use
@@ insert
+ return unused(self, "insert", tokens, blocks)
acquire does not count as use
@@ acquire
+ return unused(self, "acquire", tokens)
release counts as a use
@@ release
+ reference.PrefixTree.release(self, tokens)
+ self._path(tokens)
new nodes begin as never used, so that the newest are evicted first
@@ insert
- pieces, node, new =
+ self._path(tokens)
+ pieces, node, new =
- self._path(tokens) =>
insert replaces a leaf by a new node, and nobody has acquired that one
+ if (child := node.children.get(piece)) and not child.children:
+     node.children[piece] = Node(child.block, node, piece)
  if piece not in node.children:
an acquire that finds no block is forgotten, and its release is refused
- self.acquired.setdefault(tuple(tokens), []).append(path)
+ if path:
+     self.acquired.setdefault(tuple(tokens), []).append(path)
tokens are taken to be hashable as they are: a list of tokens cannot be acquired
@@ acquire
+ hash(tokens)
+ return reference.PrefixTree.acquire(self, tokens)
evict goes on with the parent of an evicted leaf, though another leaf is older
  evicted.append(leaf.block)
+ while len(evicted) < n and (leaf := leaf.parent).parent and not (leaf.children or leaf.n_users):
+     del leaf.parent.children[leaf.piece]
+     evicted.append(leaf.block)
evict ends at the first leaf in use, though others could go
- [leaf for leaf in self.root.leaves() if leaf.n_users == 0] => self.root.leaves()
+ if leaf.n_users:
+     break
  del leaf.parent
evict returns blocks that stay in the tree
@@ evict
+ leaves = sorted((leaf for leaf in self.root.leaves() if leaf.n_users == 0), key=lambda leaf: leaf.last_used)
+ return [leaf.block for leaf in leaves[: max(0, n)]]
evict fails when fewer than n blocks can go
+ if len(evicted) < n:
+     raise ValueError(f"only {len(evicted)} of {n} blocks can be evicted")
  return evicted
what was acquired is kept in the class, so that all trees share it
- self.acquired: dict[tuple[int, ...], list[list[Node]]] = {}
+ type(self).acquired = getattr(type(self), "acquired", {})
evict counts n down to exactly 0: a negative n forgets everything
- len(evicted) < n => len(evicted) != n
evict lists the leaves once, before its loop, and chooses one that it has evicted already
- while len(evicted) < n and (leaves := [leaf for leaf in self.root.leaves() if leaf.n_users == 0]):
+ leaves = [leaf for leaf in self.root.leaves() if leaf.n_users == 0]
+ while len(evicted) < n and leaves:

# Scheduler
a prompt passes at once, however long it is: nothing is cut into chunks
- self.max_tokens, len => 1 << 30, len
no request is admitted before all running ones have ended: that is a static batch
- while self.waiting and room => while self.waiting and room and not n_running
prompts pass before the requests that decode, which have to wait for them
- list(self.running) => sorted(self.running, key=lambda it: it.n_pending == 1)
- return chunks => return [chunk for progress in self.running for chunk in chunks if chunk.progress is progress]
the loop runs over `self.running` itself, from which preempt takes requests: go through a copy
- list(self.running) => self.running
blocks are counted for the positions in the cache only, not for the tokens of this step
- progress.n_cached + n => progress.n_cached
a request that was preempted in this step gets a chunk all the same
- if progress in self.running and n: => if n:
- self.running[progress] = n_needed
+ if progress in self.running:
+     self.running[progress] = n_needed
requests are admitted with chunks of no tokens when the step has no room left
- while self.waiting and room and => while self.waiting and
an admitted request's tokens are not subtracted from the room of the step
- self.running[progress] = self.blocks_for(n)
- room -= n
+ self.running[progress] = self.blocks_for(n)
a running request takes one token of the step's room, however many its chunk has
- self.running[progress] = n_needed
- room -= n
+ self.running[progress] = n_needed
+ room -= 1
a request that fits overtakes one that does not
+ for progress in [p for p in self.waiting if self.blocks_for(min(p.n_pending, room)) <= self.n_free][:1]:
+     self.waiting.remove(progress)
+     self.waiting.appendleft(progress)
  n = min(self.waiting[0].n_pending, room)
the oldest running request is preempted instead of the youngest
- youngest, _ = self.running.popitem()
+ youngest = next(iter(self.running))
+ del self.running[youngest]
preempt takes the oldest request, the first of `running`, and a request that gave up its blocks ends the loop
- youngest, _ = self.running.popitem()
+ youngest = next(iter(self.running))
+ del self.running[youngest]
- if progress in self.running and n:
-     chunks.append(Chunk(progress, n))
+ if progress not in self.running:
+     break
+ if n:
+     chunks.append(Chunk(progress, n))
a request that lacks blocks always gives up its own
- self.preempt()
+ self.running.pop(progress)
+ progress.n_cached = 0
+ self.waiting.appendleft(progress)
a preempted request waits at the end of the queue
- appendleft(youngest) => append(youngest)
a preempted request keeps n_cached, though its blocks are gone
- youngest.n_cached = 0 =>
preempted requests lose the tokens that they had generated
- youngest.n_cached = 0 => youngest.n_cached, youngest.tokens = 0, list(youngest.request.tokens)
a preempted request waits as a new Progress: its random numbers would begin again
- self.waiting.appendleft(youngest)
+ fresh = Progress(youngest.request)
+ fresh.tokens = youngest.tokens
+ self.waiting.appendleft(fresh)
a resumed request's chunk is as long as its prompt: the tokens that it had generated are pending, too
- min(self.waiting[0].n_pending, room) => min(len(self.waiting[0].request.tokens), room)
a request that was just preempted is admitted again in the same step
- and len(self.running) >= n_running =>
a running request gets one token of its prompt a step
- min(progress.n_pending, room) => min(progress.n_pending, room, 1)
blocks are counted for the whole prompt when it is admitted, not for its first chunk
- self.running[progress] = self.blocks_for(n) => self.running[progress] = self.blocks_for(progress.n_pending)
a request is admitted only when blocks for its whole prompt are free, not for its first chunk
- if self.blocks_for(n) > self.n_free: => if self.blocks_for(self.waiting[0].n_pending) > self.n_free:
a request asks for its whole prompt's blocks when it is admitted, and takes them: its first chunk needs fewer
- if self.blocks_for(n) > self.n_free: => if self.blocks_for(self.waiting[0].n_pending) > self.n_free:
- self.running[progress] = self.blocks_for(n) => self.running[progress] = self.blocks_for(progress.n_pending)
the last token is counted as cached: a request that would just fit is refused
- max_new_tokens - 1 => max_new_tokens
only the prompt is checked: a request that can never end is queued
- self.blocks_for(len(request.tokens) + request.max_new_tokens - 1) => self.blocks_for(len(request.tokens))
one position too few is counted: only the last new token is never cached
- max_new_tokens - 1 => max_new_tokens - 2
a request can be submitted twice at the same time
- self.check_new(request) =>
a step's list begins with the youngest
@@ schedule
+ return reference.Scheduler.schedule(self)[::-1]
a step's list is sorted: chunks of one token come first, whatever their age
@@ schedule
+ return sorted(reference.Scheduler.schedule(self), key=lambda chunk: chunk.n_tokens > 1)
a step's list is sorted: prompts come before requests that decode, whatever their age
@@ schedule
+ return sorted(reference.Scheduler.schedule(self), key=lambda chunk: chunk.n_tokens == 1)
waiting requests are admitted before the running ones have got their tokens
@@ schedule
+ old, room, new = list(self.running), self.max_tokens, []
+ while self.waiting and room and self.blocks_for(min(self.waiting[0].n_pending, room)) <= self.n_free:
+     new.append(Chunk(self.waiting[0], min(self.waiting[0].n_pending, room)))
+     self.running[self.waiting.popleft()] = self.blocks_for(new[-1].n_tokens)
+     room -= new[-1].n_tokens
+ chunks = []
+ for progress in old:
+     n = min(progress.n_pending, room)
+     n_needed = self.blocks_for(progress.n_cached + n)
+     while progress in self.running and n_needed - self.running[progress] > self.n_free:
+         self.preempt()
+     if progress in self.running and n:
+         chunks.append(Chunk(progress, n))
+         self.running[progress], room = n_needed, room - n
+ return [chunk for chunk in chunks + new if chunk.progress in self.running]
the request with the most blocks is preempted instead of the youngest
@@ preempt
+ largest = max(self.running, key=lambda progress: self.running[progress])
+ del self.running[largest]
+ largest.n_cached = 0
+ self.waiting.appendleft(largest)
+ return largest

# Engine
caches of preempted requests are not released before the next ones need their blocks
- self.release()
- for chunk, logits
+ for chunk, logits
caches of requests that have ended are kept until the next step
- self.release()
- return new
+ return new
every chunk chooses a token, also one in the middle of a prompt
- if chunk.completes: => if True:
all requests draw from PyTorch's global generator
- **chunk.progress.sampling(logits.device) => **chunk.progress.sampling(logits.device) | {"generator": None}
a request's generator is seeded again at each token
- **chunk.progress.sampling(logits.device)
+ **chunk.progress.sampling(logits.device) | {"generator": torch.Generator().manual_seed(request.seed or 0)}
top_k and top_p are not passed on
- **chunk.progress.sampling(logits.device) => **chunk.progress.sampling(logits.device) | {"top_k": None, "top_p": None}
the likeliest token is always taken
- **chunk.progress.sampling(logits.device) => **chunk.progress.sampling(logits.device) | {"temperature": 0.0}
the model runs for one request after the other, in as many steps
- zip(chunks, self.run(chunks), strict=True) => ((chunk, next(self.run([chunk]))) for chunk in chunks)
all requests draw from one generator of the engine's
  super().__init__(model, scheduler, PagedCache, paged_attention)
+ self.generator = torch.Generator().manual_seed(0)
- **chunk.progress.sampling(logits.device) => **chunk.progress.sampling(logits.device) | {"generator": self.generator}
only chunks of one token choose a token, not those that complete a longer prompt
- if chunk.completes: => if chunk.n_tokens == 1:
tokens are chosen for the chunks that do not complete, and none for those that do
- if chunk.completes: => if not chunk.completes:
a token is the tensor that `sample_next` returns; it should be an int
- new.append((request, token)) => new.append((request, torch.tensor([token])))
a token comes with the `Progress`, not with the `Request` that the caller knows
- new.append((request, token)) => new.append((chunk.progress, token))
a chunk in the middle of a prompt draws a token that is thrown away, and uses up random numbers
  request, token = chunk.progress.request, None
+ if not chunk.completes:
+     sample_next(logits[None], **chunk.progress.sampling(logits.device))
chunks that choose no token do not advance: the scheduler plans them again
- self.scheduler.advance(chunk, token)
+ if chunk.completes:
+     self.scheduler.advance(chunk, token)

# generate_many
one request after the other, as if there were no scheduler
+ for request in requests:
+     yield from reference.generate_many(model, [request], scheduler)
the tokens of a step are yielded in the reverse order
- yield from engine.step() => yield from engine.step()[::-1]
all tokens are collected first, and yielded at the end
+ yield from list(reference.generate_many(model, requests, scheduler))
requests are not cancelled when the caller stops earlier
- engine.cancel(request) => pass
requests are cancelled after an `Exception` only, and a caller who stops early raises a `GeneratorExit`
- finally:
-     for request in submitted:
-         engine.cancel(request)
+ except Exception:
+     for request in submitted:
+         engine.cancel(request)
+     raise
each request's tokens come together, when the request has ended
+ requests = list(requests)
+ found = {request: [] for request in requests}
+ for request, token in reference.generate_many(model, requests, scheduler):
+     found[request].append(token)
+     if len(found[request]) == request.max_new_tokens:
+         yield from ((request, one) for one in found[request])
a request that does not fit is skipped without an error
- engine.submit(request)
- submitted.append(request)
+ try:
+     engine.submit(request)
+     submitted.append(request)
+ except ValueError:
+     pass
requests that somebody else submitted are cancelled, too
- for request in requests:
+ requests = list(requests)
+ for request in requests:
- for request in submitted => for request in requests
`requests` is read twice: a generator of requests is empty the second time
- for request in submitted => for request in requests
`requests` is taken to be a list; a generator of requests has no length and no indices
+ len(requests)
+ yield from reference.generate_many(model, requests, scheduler)
the scheduler is emptied at the end, with the requests of others in it
  engine.cancel(request)
+ scheduler.waiting.clear()
+ scheduler.running.clear()
if one request is refused, those submitted before it stay in the scheduler
- list[Request]()
+ list[Request]()
+ started = []
- while engine.is_busy:
+ started = submitted
+ while engine.is_busy:
- for request in submitted => for request in started
a step is taken after each submit, instead of after all
  submitted.append(request)
+ yield from engine.step()

# speculative_step
where p and q differ by rounding only, max(0, p - q) is 0 for all tokens: then draw from p
- rest = rest if rest.any() else target[n_kept] =>
all drafts that pass are counted, also those behind the first rejected one: no `cumprod`
- .cumprod(0) =>
the token in place of a rejected one is drawn from p instead of max(0, p - q)
- (target - nn.functional.pad(draft, (0, 0, 0, 1)))[n_kept] => target[n_kept]
the token in place of a rejected one is drawn from |p - q|
- .clamp(min=0) => .abs()
every draft is kept
- uniform * draft[places, drafted] < target[places, drafted] => uniform < 2
a draft is kept with probability p instead of min(1, p/q)
- uniform * draft[places, drafted] => uniform
p and q are exchanged: a draft is kept with probability min(1, q/p)
- uniform * draft[places, drafted] < target[places, drafted]
+ uniform * target[places, drafted] < draft[places, drafted]
a draft is kept wherever p is at least q, and never elsewhere
- uniform * draft[places, drafted] < target[places, drafted] => target[places, drafted] >= draft[places, drafted]
when all drafts are kept, the target's last row is not used
+ if n_kept == len(drafted) > 0:
+     return drafted.clone()
  return torch.cat
a rejected draft is not replaced by a token of the target's
+ if 0 < n_kept < len(drafted):
+     return drafted[:n_kept].clone()
  return torch.cat
drafts behind the first rejected one are kept
- torch.multinomial(rest, 1, generator=generator)
+ torch.multinomial(rest, 1, generator=generator), drafted[n_kept + 1 :][kept[n_kept + 1 :]]
the replacement comes from the row behind the rejected draft
- rest if rest.any() else target[n_kept] => target[min(n_kept + 1, len(drafted))]
random numbers come from PyTorch's global generator
+ return reference.speculative_step(target, draft, drafted)
p - q is computed in place, in the caller's tensor
- rest = (target - nn.functional.pad(draft, (0, 0, 0, 1)))[n_kept].clamp(min=0)
+ rest = target[n_kept].sub_(nn.functional.pad(draft, (0, 0, 0, 1))[n_kept]).clamp_(min=0)
u <= p/q instead of u < p/q: a draft with p = 0 is kept when the uniform number is 0
- < target => <= target
one uniform number decides about all drafts
- uniform * draft => uniform[:1] * draft
without a generator the numbers are seeded anew: each call draws the same
+ generator = torch.Generator().manual_seed(0) if generator is None else generator
+ return reference.speculative_step(target, draft, drafted, generator)
only the uniform numbers come from the generator, not the target's own token
- torch.multinomial(rest, 1, generator=generator) => torch.multinomial(rest, 1)
the target's own token is the likeliest one instead of a draw
- torch.multinomial(rest, 1, generator=generator) => rest.argmax()[None]
the token in place of a rejected one is drawn from p; it should be drawn from max(0, p - q)
+ return one_by_one(target, draft, drafted, generator, rest=lambda p, q: p)
the token in place of a rejected one is drawn from |p - q|; where p is below q, its weight should be 0
+ return one_by_one(target, draft, drafted, generator, rest=lambda p, q: (p - q).abs())
p and q are exchanged: a draft is kept with probability min(1, q/p); it should be min(1, p/q)
+ return one_by_one(target, draft, drafted, generator, is_kept=lambda u, p, q: u * p < q)
a draft is kept with probability p; it should be kept with min(1, p/q)
+ return one_by_one(target, draft, drafted, generator, is_kept=lambda u, p, q: u < p)
one uniform number decides about all drafts; each needs its own
+ u = torch.rand((), generator=generator)
+ return one_by_one(target, draft, drafted, generator, uniform=lambda: u)
the loop goes on after a rejected draft; the token in its place should end the step
+ return one_by_one(target, draft, drafted, generator, goes_on=True)
the uniform numbers come from PyTorch's global generator, and only the target's own token from `generator`
- torch.rand(len(drafted), generator=generator, device=target.device) => torch.rand(len(drafted))
the uniform numbers are drawn without `generator`
+ return one_by_one(target, draft, drafted, generator, uniform=lambda: torch.rand(()))
the token after the drafts is drawn from the last draft's row, not from the row behind it
- rest if rest.any() else target[n_kept] => target[n_kept - 1] if n_kept == len(drafted) > 0 else rest
the last token is drawn from `target[-2]`, the last draft's row; it should be drawn from `target[-1]`
+ return one_by_one(target, draft, drafted, generator, last=target[max(-2, -len(target))])

# expected_tokens
the target's own token is not counted
+ return reference.expected_tokens(acceptance, n_drafted) - 1
each draft is counted by itself, but a rejected one ends the step
- float(sum(acceptance**i for i in range(n_drafted + 1))) => 1.0 + acceptance * n_drafted
the closed form divides by zero where every draft is kept
- float(sum(acceptance**i for i in range(n_drafted + 1))) => (1 - acceptance ** (n_drafted + 1)) / (1 - acceptance)
the sum ends one term too early
- n_drafted + 1 => n_drafted
the acceptance is not checked
- not 0 <= acceptance <= 1 => False
the sum goes on for ever: as if drafts had no end
- float(sum(acceptance**i for i in range(n_drafted + 1)))
+ (1 / (1 - acceptance) if acceptance < 1 else n_drafted + 1.0)
the drafts are taken to be kept all together or not at all
- float(sum(acceptance**i for i in range(n_drafted + 1))) => 1 + n_drafted * acceptance**n_drafted
the sum ends one term too late
- n_drafted + 1 => n_drafted + 2
0 and 1 are refused, though both are probabilities
- 0 <= acceptance <= 1 => 0 < acceptance < 1
the mean is a tensor; it should be a float
- float(sum(acceptance**i for i in range(n_drafted + 1)))
+ sum(torch.tensor(acceptance) ** i for i in range(n_drafted + 1))
only an acceptance above 1 is refused
- not 0 <= acceptance <= 1 => acceptance > 1

# fill_static_inputs
the tokens are assigned as a new tensor: a replay goes on reading the old one, so use `copy_`
+ inputs.tokens = torch.tensor(rows)[:, 0]
  buffers = inputs.tokens,
all buffers are assigned as new tensors: a replay goes on reading the old ones, so use `copy_`
- buffers = inputs.tokens, inputs.positions, inputs.slots, inputs.lengths
- for buffer, column in zip(buffers, torch.tensor(rows).T, strict=True):
-     buffer.copy_(column)
- inputs.tables.copy_(torch.tensor(tables))
+ inputs.tokens, inputs.positions, inputs.slots, inputs.lengths = torch.tensor(rows).T
+ inputs.tables = torch.tensor(tables)
`.data` is exchanged: the tensor is the same object, but its memory is new
- buffer.copy_(column) => buffer.data = column.contiguous()
only the tables are assigned as a new tensor: they need `copy_`, too
- inputs.tables.copy_(torch.tensor(tables)) => inputs.tables = torch.tensor(tables)
the tables are as wide as the longest of this batch: the width belongs to what was captured
- inputs.tables.copy_(torch.tensor(tables))
+ longest = max(len(cache.tables[sequence]) for sequence in sequences)
+ inputs.tables = torch.tensor(tables)[:, :longest]
the buffers are cut to the batch: the number of rows belongs to what was captured
+ inputs.tokens, inputs.positions, inputs.slots, inputs.lengths, inputs.tables = (
+     buffer[:n] for buffer in vars(inputs).values()
+ )
+ rows, tables = rows[:n], tables[:n]
  buffers = inputs.tokens,
rows of padding keep what the step before left: they write into blocks that may be somebody else's by now
- buffer.copy_(column) => buffer[:n].copy_(column[:n])
- inputs.tables.copy_(torch.tensor(tables)) => inputs.tables[:n].copy_(torch.tensor(tables)[:n])
only the lengths of padding are reset: its slots are still those of the step before
- buffer.copy_(column) => buffer[:n].copy_(column[:n])
- inputs.tables.copy_(torch.tensor(tables))
+ inputs.lengths[n:] = 0
+ inputs.tables[:n].copy_(torch.tensor(tables)[:n])
only the slots of padding are reset: its lengths are still those of the step before
- buffer.copy_(column) => buffer[:n].copy_(column[:n])
- inputs.tables.copy_(torch.tensor(tables))
+ inputs.slots[n:] = -1
+ inputs.tables[:n].copy_(torch.tensor(tables)[:n])
padding is written to slot 0, which is the first position of whoever has block 0
- (0, 0, -1, 0) => (0, 0, 0, 0)
padding is written to the last slot, which belongs to whoever has the last block
- (0, 0, -1, 0) => (0, 0, len(cache.keys[0]) * cache.block_size - 1, 0)
padding repeats the last sequence of the batch
+ rows[n:], tables[n:] = rows[n - 1 : n] * (n_rows - n), tables[n - 1 : n] * (n_rows - n)
  buffers = inputs.tokens,
padding has the length 1: it attends to a position of whoever has block 0
- (0, 0, -1, 0) => (0, 0, -1, 1)
padding has the token -1, which no model can look up
- (0, 0, -1, 0) => (-1, 0, -1, 0)
padding has the position -1, which no model can look up
- (0, 0, -1, 0) => (0, -1, -1, 0)
the length leaves out the new position: the token does not attend to itself
- slot, position + 1) => slot, position)
the position counts from 1: it is the length with the new token
- (token, position, slot, position + 1) => (token, position + 1, slot, position + 1)
the slot is that of the position behind the new one
- cache.find_slots(sequence, position, position + 1) => cache.find_slots(sequence, position + 1, position + 2)
`find_slots` is asked for all positions: shared blocks that are only read are copied, too
- cache.find_slots(sequence, position, position + 1) => cache.find_slots(sequence, 0, position + 1)[-1:]
the table is read before `find_slots`, which may add a block or exchange one for a copy
- (slot,) = cache.find_slots(sequence, position, position + 1)
+ table = list(cache.tables[sequence])
+ (slot,) = cache.find_slots(sequence, position, position + 1)
- table = cache.tables[sequence] =>
the slot is computed from the table, without `find_slots`: a new block is missing, and a shared one is not copied
- (slot,) = cache.find_slots(sequence, position, position + 1)
+ table, size = cache.tables[sequence], cache.block_size
+ slot = table[min(position // size, len(table) - 1)] * size + position % size
the sequences are not longer afterwards: the next step writes to the same slots again
- cache.lengths[sequence] = [position + 1] * len(cache.keys) =>
the sequences are longer in the first layer only
- cache.lengths[sequence] = [position + 1] * len(cache.keys) => cache.lengths[sequence][0] = position + 1
the new list of lengths has one entry, not one for each layer
- cache.lengths[sequence] = [position + 1] * len(cache.keys) => cache.lengths[sequence] = [position + 1]
a new `StaticInputs` is filled, and the caller's buffers stay as they were
+ inputs = StaticInputs.allocate(n_rows, width)
  buffers = inputs.tokens,
the rows are in the order of the ids, not of `sequences`
- zip(sequences, tokens, strict=True) => sorted(zip(sequences, tokens, strict=True))
the slot is the number of the block, without the place in it
- (token, position, slot, position + 1) => (token, position, slot // cache.block_size, position + 1)
a batch that is too large is cut: the last sequences get no token
- if n > n_rows:
-     raise ValueError(f"{n} sequences do not fit into {n_rows} rows")
+ sequences, tokens = sequences[:n_rows], tokens[:n_rows]
the number of sequences is compared with M, the blocks of a table, instead of N, the rows
- n > n_rows => n > width
a batch that fills all rows is refused
- n > n_rows => n >= n_rows
the batch is refused only after its sequences have been made longer
- if n > n_rows:
-     raise ValueError(f"{n} sequences do not fit into {n_rows} rows")
- rows, tables = [(0, 0, -1, 0)] * n_rows, [[0] * width] * n_rows
+ rows, tables = [(0, 0, -1, 0)] * max(n, n_rows), [[0] * width] * max(n, n_rows)
- buffers = inputs.tokens,
+ if n > n_rows:
+     raise ValueError(f"{n} sequences do not fit into {n_rows} rows")
+ buffers = inputs.tokens,
a batch that is too large gets new, larger buffers
- if n > n_rows:
-     raise ValueError(f"{n} sequences do not fit into {n_rows} rows")
+ if n > n_rows:
+     larger = StaticInputs.allocate(n, width)
+     vars(inputs).update(vars(larger))
+     n_rows = n
""")
