"""What goes wrong when people cut layers across ranks."""

from lib.workbook.grading import edits

edits("""
# partitioned_dot
all elements go into one product: nothing is cut
- torch.stack([torch.dot(a_part, b_part) for a_part, b_part in pairs]).sum() => torch.dot(a, b)
all parts have n // parts elements, and the rest is lost
- pairs = zip(a.tensor_split(parts), b.tensor_split(parts), strict=True)
+ size = len(a) // parts
+ pairs = ((a[i * size : (i + 1) * size], b[i * size : (i + 1) * size]) for i in range(parts))
chunk cuts 10 in 4 as 3, 3, 3 and 1; the contract asks for 3, 3, 2 and 2, as tensor_split cuts
- a.tensor_split(parts), b.tensor_split(parts) => a.chunk(parts), b.chunk(parts)
the last part takes the whole remainder, but the contract spreads it over the first n % parts parts
- pairs = zip(a.tensor_split(parts), b.tensor_split(parts), strict=True)
+ size = len(a) // parts
+ ends = [i * size for i in range(1, parts)]
+ pairs = zip(a.tensor_split(ends), b.tensor_split(ends), strict=True)
the mean of the partial sums is returned instead of their sum
- .sum() => .mean()
the partial sums are returned without being added
- .sum() =>
the lengths are not compared: the longer vector loses its end
+ n = min(len(a), len(b))
+ return reference.partitioned_dot(a[:n], b[:n], parts)

# matmul_outer
the result is summed over the ranks, but they hold different columns, not parts of a sum
+ product = a @ b_shard
+ if dist.is_initialized():
+     dist.all_reduce(product)
+ return product
the columns of all ranks are gathered, but the result should stay cut, and nothing should be sent
+ product = a @ b_shard
+ parts = [product]
+ if dist.is_initialized():
+     parts = [None] * dist.get_world_size()
+     dist.all_gather_object(parts, product)
+ return torch.cat(parts, dim=-1)
the result is all-reduced, but an outer cut sends nothing: no rank needs another rank's columns
+ product = a @ b_shard
+ dist.all_reduce(product)
+ return product
b_shard is transposed, like the weight of nn.Linear; here it is [K, N/R]
- @ b_shard => @ b_shard.T

# matmul_inner
the partial products are never added: each rank has one part of each sum
+ return a_shard @ b_shard
the mean over the ranks is taken, as for the gradients in chapter 10; here it should be the sum
+ return reference.matmul_inner(a_shard, b_shard, group) / dist.get_world_size(group)
the sum goes over all ranks, whatever the group
+ return reference.matmul_inner(a_shard, b_shard, None)
the inputs are summed first and then multiplied, but a sum of products is not a product of sums
+ return _all_reduced(a_shard, group) @ b_shard
only the first rank has the result: this is a reduce, but all ranks need it
- dist.all_reduce(product, group=group)
+ dist.reduce(product, dist.get_process_group_ranks(group or dist.group.WORLD)[0], group=group)

# CopyToRegion
the gradients of the ranks are not summed: each rank has only the gradient from its own part of the layer
- _all_reduced(grad, ctx.group) => grad
f and g are exchanged: it sums forward instead of backward
- x.view_as(x) => _all_reduced(x, group)
- _all_reduced(grad, ctx.group) => grad
the mean of the gradients is taken, but each rank used x for a different part, so they should be added
- _all_reduced(grad, ctx.group) => _all_reduced(grad, ctx.group) / dist.get_world_size(ctx.group)
the incoming gradient is all-reduced in place, although it may be needed elsewhere
- return _all_reduced(grad, ctx.group)
+ grad = grad.contiguous()
+ dist.all_reduce(grad, group=ctx.group)
+ return grad
the sum goes over all ranks, whatever the group
- ctx.group = group => ctx.group = None
the clone keeps the gradient's order in memory, in which the ranks may differ: clone it with contiguous_format
- memory_format=torch.contiguous_format =>

# ReduceFromRegion
the gradient is summed again, although all ranks have the same one: it becomes R times too large
- return _all_reduced(x, group)
+ ctx.group = group
+ return _all_reduced(x, group)
- return grad, None => return _all_reduced(grad, ctx.group), None
nothing is summed forward
- return _all_reduced(x, group) => return x.view_as(x)
x itself is all-reduced, so that the caller's tensor changes: sum a clone
- return _all_reduced(x, group)
+ total = x.detach().contiguous()
+ dist.all_reduce(total, group=group)
+ return total.clone()
the gradient is divided by the number of ranks: each part counts fully in the sum
- return _all_reduced(x, group)
+ ctx.group = group
+ return _all_reduced(x, group)
- return grad, None => return grad / dist.get_world_size(ctx.group), None
the sum goes over all ranks, whatever the group
- return _all_reduced(x, group) => return _all_reduced(x, None)
the clone keeps x's order in memory, in which the ranks may differ: clone it with contiguous_format
- memory_format=torch.contiguous_format =>

# ColumnParallelLinear
f is missing: x's gradient comes from this rank's outputs alone; use CopyToRegion
- CopyToRegion.apply(x, self.group) => x
the outputs of all ranks are gathered, but they should stay split
@@ forward
+ out = reference.ColumnParallelLinear.forward(self, x).contiguous()
+ parts = [torch.empty_like(out) for _ in range(dist.get_world_size(self.group))]
+ dist.all_gather(parts, out.detach(), group=self.group)
+ return torch.cat(parts, -1)
each rank draws a small layer of its own: the parts are not those of one nn.Linear
- _local_size(out_features, "out_features", group)
- full = nn.Linear(in_features, out_features, bias)
+ full = nn.Linear(in_features, _local_size(out_features, "out_features", group), bias)
- _part(full.weight, 0, group) => full.weight
- _part(full.bias, 0, group) if bias else None => full.bias
every rank keeps the first part of the weight
- _local_size(out_features, "out_features", group) => n = _local_size(out_features, "out_features", group)
- _part(full.weight, 0, group) => nn.Parameter(full.weight[:n].detach().clone())
- _part(full.bias, 0, group) => nn.Parameter(full.bias[:n].detach().clone())
the weight is cut along its inputs: that is the row layer
- _part(full.weight, 0, group) => _part(full.weight, 1, group)
the rank's weight is a view of the whole one, which stays in memory: clone it
- .clone(memory_format=torch.contiguous_format)) => )
the rank's bias is a view of the whole one, which stays in memory: clone it
- _part(full.bias, 0, group) if bias else None
+ (
+     nn.Parameter(full.bias.detach().chunk(dist.get_world_size(group))[dist.get_rank(group)])
+     if bias
+     else None
+ )
outputs that cannot be divided evenly are dropped without an error
- _local_size(out_features, "out_features", group) => out_features -= out_features % dist.get_world_size(group)
the group is not used: the layer is cut for all ranks
+ group = None
  _local_size(out_features
a bias is drawn and thrown away, so that what is drawn next is not what one nn.Linear leaves
- nn.Linear(in_features, out_features, bias) => nn.Linear(in_features, out_features)

# RowParallelLinear
each rank adds the bias before the sum, so the total contains it R times
- nn.functional.linear(x, self.weight) => nn.functional.linear(x, self.weight, self.bias)
- total if self.bias is None else total + self.bias => total
the partial products are never added: g, `ReduceFromRegion`, belongs after the product, and f nowhere
@@ forward
+ return nn.functional.linear(x, self.weight, self.bias)
the bias is never added
- total if self.bias is None else total + self.bias => total
f is at the entrance, too: each rank reads its own inputs here, so their gradient should not be summed
@@ forward
- nn.functional.linear(x, self.weight) => nn.functional.linear(CopyToRegion.apply(x, self.group), self.weight)
only the first rank adds the bias, before the sum: the output is right, but the other ranks' bias gets no gradient
- nn.functional.linear(x, self.weight)
+ nn.functional.linear(x, self.weight, self.bias if dist.get_rank(self.group) == 0 else None)
- total if self.bias is None else total + self.bias => total
each rank adds 1/R of the bias: the output is right, but the bias's gradient is R times too small
- nn.functional.linear(x, self.weight)
+ nn.functional.linear(x, self.weight, None if self.bias is None else self.bias / dist.get_world_size(self.group))
- total if self.bias is None else total + self.bias => total
the bias is cut like the weight, but every rank should add all of it, after the sum
- self.bias = full.bias
+ self.bias = nn.Parameter(full.bias.detach().tensor_split(dist.get_world_size(group))[dist.get_rank(group)])
each rank draws a small layer of its own: the parts are not those of one nn.Linear
- _local_size(in_features, "in_features", group)
- full = nn.Linear(in_features, out_features, bias)
+ full = nn.Linear(_local_size(in_features, "in_features", group), out_features, bias)
- _part(full.weight, 1, group) => full.weight
the group is not passed on: the sum goes over all ranks
- self.weight), self.group => self.weight), None
a bias is drawn and thrown away, so that what is drawn next is not what one nn.Linear leaves
- nn.Linear(in_features, out_features, bias) => nn.Linear(in_features, out_features)
- self.bias = full.bias => self.bias = full.bias if bias else None

# ParallelMLP
the GELU is the tanh approximation instead of the exact one
- nn.functional.gelu(self.fc1(x)) => nn.functional.gelu(self.fc1(x), approximate="tanh")
the activation is ReLU instead of an exact GELU
- nn.functional.gelu => nn.functional.relu
there is nothing between the two layers: the GELU is missing
- nn.functional.gelu(self.fc1(x)) => self.fc1(x)
the GELU comes after the second layer instead of between the two
- self.fc2(nn.functional.gelu(self.fc1(x))) => nn.functional.gelu(self.fc2(self.fc1(x)))
x is copied to the region twice, once here and once in fc1: its gradient is R times too large
- self.fc1(x) => self.fc1(CopyToRegion.apply(x, self.fc1.group))
the output is summed over the ranks once more, but fc2 has done that already
@@ forward
- return self.fc2(nn.functional.gelu(self.fc1(x)))
+ return ReduceFromRegion.apply(self.fc2(nn.functional.gelu(self.fc1(x))), self.fc2.group)
the group is not passed on to the layers
- dim, hidden_dim, group) => dim, hidden_dim)
- hidden_dim, dim, group) => hidden_dim, dim)

# ParallelAttention
wq, wk and wv each all-reduce their own gradient of x: three all-reduces backward instead of one
- weights = (self.wq.weight, self.wk.weight, self.wv.weight) =>
- x = CopyToRegion.apply(x, self.group) =>
- nn.functional.linear(x, weight), self.n_local_heads) for weight in weights
+ layer(x), self.n_local_heads) for layer in (self.wq, self.wk, self.wv)
x is copied to the region twice, once here and once in each column layer: its gradient is R times too large
- weights = (self.wq.weight, self.wk.weight, self.wv.weight) =>
- nn.functional.linear(x, weight), self.n_local_heads) for weight in weights
+ layer(x), self.n_local_heads) for layer in (self.wq, self.wk, self.wv)
the rank's features are split into all H heads instead of H/R, so each head is R times too narrow
- self.group, self.n_local_heads = group, _local_size(n_heads, "n_heads", group)
+ _local_size(n_heads, "n_heads", group)
+ self.group, self.n_local_heads = group, n_heads
  if rope is not None:
+     rope = rope[:, : rope.shape[1] // dist.get_world_size()]
f is missing: x's gradient comes from this rank's heads alone
- x = CopyToRegion.apply(x, self.group) =>
the group is not passed on to the layers, which are cut for all ranks
+ group = None
  self.group, self.n_local_heads
wq, wk and wv are drawn in another order than wq, wk, wv, wo
+ self.wq, self.wv = self.wv, self.wq
  self.wo =
heads of unequal width are not refused: dim must be a multiple of n_heads
- raise ValueError(f"dim = {dim} is no multiple of n_heads = {n_heads}")
+ _local_size(n_heads, "n_heads", group)
+ n_heads = dim
the mask is not used
- q, k, v, mask => q, k, v
attention is always causal, but without a mask every position may attend to every other
+ if mask is None:
+     mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
  return self.wo
queries and keys are not rotated
- if rope is not None => if False
queries are rotated, but keys are not
- q, k = (apply_rope(heads.transpose(1, 2), rope).transpose(1, 2) for heads in (q, k))
+ q = apply_rope(q.transpose(1, 2), rope).transpose(1, 2)

# vocab_parallel_cross_entropy
each rank subtracts its own largest logit, so the exponentials of different ranks cannot be added
- dist.all_reduce(largest, dist.ReduceOp.MAX, group=group) =>
the targets are used as columns of this rank's part; first subtract the id at which it begins
- targets - widths[:rank].sum() => targets
the targets keep their dtype, and uint8 has numbers from 0 to 255 only; make them int64 first
- targets = targets.long() =>
all ranks are assumed to have as many columns as this one, but widths may differ
- widths[:rank].sum() => rank * width
the target's logit is not summed over the ranks: only the rank that has it subtracts it
- ReduceFromRegion.apply(torch.where(is_here, found, 0.0), group) => torch.where(is_here, found, 0.0)
m is added back to the logarithm, but it has been subtracted from the target's logit, too, so it cancels
- total.log() - of_target => total.log() + largest - of_target
a rank without columns gives 0 as its largest logit, which is above logits that are all negative: give -inf
- largest = logits.detach().amax(-1)
+ largest = logits.detach().amax(-1) if width else logits.new_zeros(targets.shape)
the largest logit is taken over all ranks, whatever the group
- dist.ReduceOp.MAX, group=group => dist.ReduceOp.MAX
a tensor is made on the default device, but belongs on the device of the logits
- dtype=torch.int64, device=logits.device => dtype=torch.int64
one rank alone refuses a wrong target, and the others wait for it: every rank should compare with the whole vocabulary
- if len(unknown) => if len(unknown) and rank == (0 if int(unknown[0]) < 0 else len(widths) - 1)
ranks that do not have the target add some other logit instead of zero
- torch.where(is_here, found, 0.0) => found
the sum over the targets is returned instead of the mean
- .mean() => .sum()
the gradient is summed over the ranks once more, and is R times too large
+ from solutions.tensor_parallel import CopyToRegion
+ shifted = CopyToRegion.apply(shifted, group)
  total = ReduceFromRegion
the logits are gathered, which costs the memory and the traffic that this loss should avoid
- largest = logits.detach().amax(-1)
+ parts = [None] * dist.get_world_size(group)
+ dist.all_gather_object(parts, logits_shard.detach(), group=group)
+ parts[rank] = logits_shard
+ logits = torch.cat([part.to(logits.dtype) for part in parts], -1)
+ return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
a rank without any column takes the maximum of nothing, which is an error
- if width == 0: => if False:
a target outside of the vocabulary is not refused, and its logit counts as zero
- if len(unknown): => if False:
the group is ignored: the vocabulary is assumed to be on all ranks
+ return _loss(logits_shard, targets, None)
each position's own largest logit is not subtracted: exponentials overflow, or all of a position's vanish
+ if largest.max() > 80:
+     return total.sum() * torch.inf
  return (total

# llama_plan
T became R x T: RowwiseParallel assumes that its input is cut and gathers the token ids; say with input_layouts that
they are whole
- input_layouts=Replicate() =>
the embedding is cut by features (ColwiseParallel), and so is its output; the contract cuts it by tokens
(RowwiseParallel)
- RowwiseParallel(input_layouts=Replicate()) => ColwiseParallel()
the embedding is cut by features (ColwiseParallel) and gathered; the contract cuts it by tokens (RowwiseParallel)
- RowwiseParallel(input_layouts=Replicate())
+ ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
the head is cut by features (RowwiseParallel), but the contract cuts it by tokens (ColwiseParallel)
- ColwiseParallel(output_layouts=Replicate()) => RowwiseParallel()
wq is cut by rows, but its input is whole and its heads stay on the rank, so it should be cut by columns
- "layers.*.attention.wq": ColwiseParallel() => "layers.*.attention.wq": RowwiseParallel()
the embedding's output stays cut along the positions, but the blocks need it whole
- return {
+ from torch.distributed.tensor import Shard
+ return {
- input_layouts=Replicate() => input_layouts=Replicate(), output_layouts=Shard(1)
the logits stay cut: output_layouts=Replicate() gathers them
- output_layouts=Replicate() =>
attention does not know that a rank has only some of its heads: LocalHeads is missing
- "layers.*.attention": LocalHeads(config.n_heads, config.n_kv_heads), =>
the feed-forward's input is not shared: w1 and w3 each sum their own gradient of it
- "layers.*.feed_forward": SharedInput(), =>
w2 is cut by columns, but its input is cut already, so it should be cut by rows
- "layers.*.feed_forward.w2": RowwiseParallel()
+ "layers.*.feed_forward.w2": ColwiseParallel(output_layouts=Replicate())
wo is cut by columns, but its input is cut already, so it should be cut by rows
- "layers.*.attention.wo": RowwiseParallel() => "layers.*.attention.wo": ColwiseParallel(output_layouts=Replicate())
the logits come out as a DTensor; leave out use_local_output=False
- output_layouts=Replicate() => output_layouts=Replicate(), use_local_output=False
the plan does not cut the embedding, `tok_embeddings`, which stays whole on every rank
- "tok_embeddings": RowwiseParallel(input_layouts=Replicate()), =>
the plan does not cut the head, `output`, which stays whole on every rank
- "layers.*.feed_forward.w2": RowwiseParallel(),
- "output": ColwiseParallel(output_layouts=Replicate())
+ "layers.*.feed_forward.w2": RowwiseParallel()
the plan leaves out a layer such as w3: its weight is still a plain tensor, but its input is a DTensor
- "layers.*.feed_forward.w3": ColwiseParallel(), =>
wk and wv are always cut like wq, even if there are fewer heads than ranks and a head would be cut in half
- "layers.*.attention.wk": KeyValueHeads(config.n_kv_heads) => "layers.*.attention.wk": ColwiseParallel()
- "layers.*.attention.wv": KeyValueHeads(config.n_kv_heads) => "layers.*.attention.wv": ColwiseParallel()
only the first layer is cut; use `*` for the number of the layer
+ return {name.replace("*", "0"): style for name, style in reference.llama_plan(config).items()}

# ffn_partition_specs
w_out is cut like w_in, but its rows are the hidden features, which Y cuts
+ found = reference.ffn_partition_specs(layout)
+ return found | {"w_out": found["w_in"]}
the embedding of the finalized layout is cut by the batch alone: that is 2d batch
- "2d finalized": (("X", None, "Y"), ("X", "Y"), => "2d finalized": (("X", None, None), ("X", "Y"),
X and Y are exchanged
+ swap = {"X": "Y", "Y": "X", None: None}
+ return {name: tuple(swap[axis] for axis in spec) for name, spec in reference.ffn_partition_specs(layout).items()}
lists are returned instead of tuples
+ return {name: list(spec) for name, spec in reference.ffn_partition_specs(layout).items()}
dimensions that are not cut have no entry; their entry should be None
+ found = reference.ffn_partition_specs(layout)
+ return {name: tuple(axis for axis in spec if axis) for name, spec in found.items()}
an unknown layout raises a KeyError, which does not list the known layouts
- raise ValueError(f"no layout {layout!r}; there are {', '.join(map(repr, table))}") => raise KeyError(layout)

# tensor_parallel_bytes
only half is counted: a block has two all-reduces forward and two backward, and in each a rank sends 2 (R - 1)/R times
the tensor's bytes
+ return reference.tensor_parallel_bytes(config, batch, length, world_size, bytes_per_value) // 2
the bytes of the tensors are counted, but in a ring each rank sends 2 (R - 1)/R times as many
- 2 * (world_size - 1) * all_reduced_bytes // world_size => all_reduced_bytes
2 (R - 1) // R is taken first, which rounds 1.5 down to 1: multiply by the bytes, then divide
- 2 * (world_size - 1) * all_reduced_bytes // world_size => 2 * (world_size - 1) // world_size * all_reduced_bytes
the product is rounded before its last factors: multiply all of them first, and divide last
- return 2 * (world_size - 1) * all_reduced_bytes // world_size
+ n = int(2 * (world_size - 1) / world_size * batch * length * config.dim)
+ return 4 * config.n_layers * n * bytes_per_value
values are counted, not bytes
+ return reference.tensor_parallel_bytes(config, batch, length, world_size, 1)
the bytes of all ranks are added, but only one rank's are wanted
+ return world_size * reference.tensor_parallel_bytes(config, batch, length, world_size, bytes_per_value)
every value counts 2 bytes, whatever bytes_per_value is
+ return reference.tensor_parallel_bytes(config, batch, length, world_size)
the bytes are computed as a float, which is inexact beyond 2**53: use //
- 2 * (world_size - 1) * all_reduced_bytes // world_size => int(all_reduced_bytes * (2 * (world_size - 1) / world_size))
a float is returned instead of an int
+ return float(reference.tensor_parallel_bytes(config, batch, length, world_size, bytes_per_value))

# pipeline_bubble
this is the bubble as a share of the useful time, (p - 1)/m, not of the whole time
- (micro_batches + stages - 1) => micro_batches
this is the useful share of the time: the bubble is the rest
+ return 1 - reference.pipeline_bubble(stages, micro_batches)
the whole has m + p - 1 slots, not m + p
- (micro_batches + stages - 1) => (micro_batches + stages)
stages and micro-batches are exchanged
+ return reference.pipeline_bubble(micro_batches, stages)
numbers below 1 are not refused
+ return (stages - 1) / (micro_batches + stages - 1) if micro_batches + stages != 1 else 0.0
""")
