"""Wrong answers to chapter 10's exercises, each with the misconception behind it."""

from lib.workbook.grading import edits

edits("""
# shard_indices
each rank takes a block of consecutive items, where it should take every R-th item
- range(rank, n_each * world_size, world_size) => range(rank * n_each, (rank + 1) * n_each)
nothing is padded or cut, so some ranks have an item more than others and would wait for them
- [order[i % n] for i in range(rank, n_each * world_size, world_size)] => order[rank::world_size]
a list of tensors is returned: `torch.randperm` gives a tensor, and `.tolist()` makes whole numbers of it
- .tolist() if shuffle => if shuffle
the epoch is not in the seed: every epoch repeats the first one's order
- seed + epoch => seed
each rank shuffles with a seed of its own, so that items are read twice or not at all
- seed + epoch => seed + epoch + rank
the last item is repeated as padding, where padding comes from the start of the order
- order[i % n] => order[min(i, n - 1)]
padding goes through the items only once, which is too little if there are fewer items than ranks
- [order[i % n] for i in range(rank, n_each * world_size, world_size)]
+ (order + order)[rank : n_each * world_size : world_size]
`math.ceil(n // R)` rounds a number that is whole already: the tail is lost without drop_last
- -(-n // world_size) => math.ceil(n // world_size)
the shuffle uses and changes the global generator instead of one of its own
- torch.Generator().manual_seed => torch.manual_seed
a rank that does not exist gets a share instead of a ValueError
+ rank %= world_size
  if not 0 <=

# broadcast_parameters
tensors are sent in their own dtype, and gloo refuses some dtypes: send their bytes, a uint8 view
- sent.view(-1).view(torch.uint8) => sent
buffers are not sent: counters and running means differ between ranks
- , *module.buffers() =>
`state_dict()` has no buffer that is not persistent, and a tied tensor under each of its names
- [*module.parameters(), *module.buffers()] => module.state_dict().values()
only trained parameters are sent; frozen ones must be the same everywhere too
- *module.parameters() => *_trainable(module)
parameters are averaged, where all ranks should get those of rank 0
- dist.broadcast(sent.view(-1).view(torch.uint8), group_src=0, group=group)
+ sent = sent.to(torch.float64)
+ _start_mean(sent, group)
a copy is sent and the parameter keeps its value: the result must be written back
- sent = once.contiguous() => sent = once.clone(memory_format=torch.contiguous_format)
- if sent.data_ptr() != once.data_ptr():
-     once.copy_(sent)
+
`.contiguous()` made a copy of a tensor that is not contiguous; the copy received rank 0's values and was dropped
- if sent.data_ptr() != once.data_ptr():
-     once.copy_(sent)
+
`src=0` is the world's rank 0, which need not be in the group
- group_src=0 => src=0
a tensor that is tied is sent once for each of its names
- [*module.parameters(), *module.buffers()]
+ [t for named in (module.named_parameters, module.named_buffers) for _, t in named(remove_duplicate=False)]

# average_gradients
gradients are summed, and never divided by the number of ranks
- tensor.div_(dist.get_world_size(group)) =>
it divides by the number of ranks twice
- tensor.div_(dist.get_world_size(group)) => tensor.div_(dist.get_world_size(group) ** 2)
it divides by the size of the world, where it should divide by the size of the group
- tensor.div_(dist.get_world_size(group)) => tensor.div_(dist.get_world_size())
the group is ignored: all ranks are averaged
- [p], group => [p]
a parameter without a gradient is skipped: other ranks wait for it, or meet the wrong collective
- _flat_mean([p], group)
+ if p.grad is not None:
+     _flat_mean([p], group)
zeros for a missing gradient have PyTorch's default dtype, not the parameter's
- _flat_mean([p], group)
+ p.grad = torch.zeros(p.shape) if p.grad is None else p.grad
+ _flat_mean([p], group)
a frozen parameter's old gradient is averaged too, but only those that require a gradient take part
- in _trainable(module) => in [p for p in module.parameters() if p.requires_grad or p.grad is not None]
the collectives are in the reverse order of the parameters
- in _trainable(module) => in reversed(_trainable(module))
the mean is over the ranks that used a parameter, where unused ones count as zeros
- _flat_mean([p], group)
+ users = torch.tensor(float(p.grad is not None))
+ dist.all_reduce(users, group=group)
+ _flat_mean([p], group)
+ p.grad.mul_(dist.get_world_size(group) / max(users.item(), 1))
parameters are averaged instead of gradients
- _flat_mean([p], group)
+ mean = p.clone(memory_format=torch.contiguous_format)
+ _start_mean(mean, group)
+ p.copy_(mean)
a gradient that is not contiguous is sent in its memory order, and meets other elements: make it contiguous first
- _flat_mean([p], group)
+ p.grad = torch.zeros_like(p) if p.grad is None else p.grad
+ _start_mean(p.grad, group)
`.contiguous()` made a copy of a gradient that is not contiguous; the copy received the mean and was dropped
- _flat_mean([p], group)
+ p.grad = torch.zeros_like(p) if p.grad is None else p.grad
+ _start_mean(p.grad.contiguous(), group)
all gradients go in one buffer; that is the next exercise
+ reference.average_gradients_flat(module, group)

# average_gradients_flat
the group is ignored: all ranks are averaged
- _flat_mean(parameters, group) => _flat_mean(parameters)
it divides by the size of the world, where it should divide by the size of the group
- tensor.div_(dist.get_world_size(group)) => tensor.div_(dist.get_world_size())
one collective a tensor, where one buffer should hold all of a dtype
+ reference.average_gradients(module, group)
gradients are summed, and never divided by the number of ranks
- tensor.div_(dist.get_world_size(group)) =>
the buffer is averaged and thrown away: gradients are never read back from it
- torch.cat(pieces) if len(pieces) > 1 else pieces[0] => torch.cat(pieces)
- p.grad = piece.view(p.shape) => piece.view(p.shape)
missing gradients are left out, so that the buffers of the ranks differ in length
- by_dtype.setdefault(p.dtype, []).append(p)
+ if p.grad is not None:
+     by_dtype.setdefault(p.dtype, []).append(p)
all dtypes are widened into one buffer, which sends more bytes than the gradients have
+ for p in _trainable(module):
+     p.grad = torch.zeros_like(p) if p.grad is None else p.grad
+ flat = torch.cat([p.grad.reshape(-1).double() for p in _trainable(module)])
+ _start_mean(flat, group)
+ for p, piece in zip(_trainable(module), flat.split([p.numel() for p in _trainable(module)]), strict=True):
+     p.grad = piece.view(p.shape).to(p.dtype)
every gradient is read from the start of the buffer: the place does not move on
- p.grad = piece.view(p.shape) => p.grad = flat[: p.numel()].view(p.shape)
one buffer for all dtypes widens the narrow ones: make one for each dtype
- by_dtype.setdefault(p.dtype, []) => by_dtype.setdefault(torch.float64, [])
the pieces are read back from the buffer in another order than they were put there
- torch.cat(pieces) => torch.cat(pieces[::-1])

# ddp_overhead_seconds
all bytes are counted, where all but the last bucket are hidden behind backward
- n_bytes / (n_buckets * bandwidth) => n_bytes / bandwidth
the cost of a call is paid once, where each bucket pays it
- n_buckets * call_overhead_s => call_overhead_s
the call's cost is divided by the number of buckets instead of multiplied by it
- n_buckets * call_overhead_s => call_overhead_s / n_buckets
the bucket's size is rounded to whole bytes with `//`
- n_bytes / (n_buckets * bandwidth) => n_bytes // n_buckets / bandwidth
no buckets at all, or no bandwidth, gives a number instead of a ValueError
+ return n_bytes / ((n_buckets or 1) * (bandwidth or 1)) + n_buckets * call_overhead_s
a bandwidth of 1 byte a second or less is refused, where only 0 and less should be
- bandwidth <= 0 => bandwidth <= 1

# optimal_bucket_bytes
that is the best number of buckets, where the size of one bucket is expected
+ return math.sqrt(n_bytes / (bandwidth * call_overhead_s)) if call_overhead_s else math.inf
the square root is missing
- math.sqrt(n_bytes * bandwidth * call_overhead_s) => n_bytes * bandwidth * call_overhead_s
that is the size whose transfer takes as long as a call; it should depend on all bytes together
- math.sqrt(n_bytes * bandwidth * call_overhead_s) => bandwidth * call_overhead_s
the size is a whole number where one bucket is best, but it should always be a float
- float(n_bytes) => n_bytes
k is rounded to a whole number, but here it may be a fraction
- math.sqrt(n_bytes * bandwidth * call_overhead_s)
+ n_bytes / max(1, round(math.sqrt(n_bytes / (bandwidth * call_overhead_s)))) if call_overhead_s else 0.0
the bucket is larger than all gradients together, but k is at least 1
+ return math.sqrt(n_bytes * bandwidth * call_overhead_s)

# OverlapDDP, BucketedDDP
the ranks begin with different weights: broadcast rank 0's first
- broadcast_parameters(module) =>
gradients are summed, and never divided by the number of ranks
- tensor.div_(dist.get_world_size(group)) =>
every collective starts in finish_gradient_synchronization(), after backward: nothing overlaps
@@ _Rounds.on_ready
+ pass
the collective in the hook is not asynchronous (async_op=True), so backward waits for it
- async_op=True => async_op=False
a parameter that this rank did not use is left out: other ranks wait for it, or meet the wrong collective
@@ _Rounds.start_next
+ used = [p for p in self.buckets[len(self.works)] if p.grad is not None]
+ self.works.append(_flat_mean(used, async_op=True) if used else None)
each collective starts as soon as it can, so ranks that used different parameters start them in different orders
- while len(self.works) < len(self.buckets) and self.n_missing[len(self.works)] == 0:
-     self.start_next()
+ if self.n_missing[self.bucket_of[p]] == 0:
+     self.start_next(self.bucket_of[p])
- def start_next(self) -> None:
-     self.works.append(_flat_mean(self.buckets[len(self.works)], async_op=True))
+ def start_next(self, which):
+     self.works.append(_flat_mean(self.buckets[which], async_op=True))
- while len(self.works) < len(self.buckets):
-     self.start_next()
+ for which in range(len(self.buckets)):
+     if self.n_missing[which]:
+         self.start_next(which)
collectives start inside no_sync() too, in the hooks or in finish_gradient_synchronization()
@@ _Rounds.paused
+ yield
an exception inside no_sync() leaves synchronisation off: restore the flag in `finally`
@@ _Rounds.paused
+ before, self.is_paused = self.is_paused, True
+ yield
+ self.is_paused = before
the end of an inner no_sync() turns synchronisation on inside the outer one: restore the value from before
- before, self.is_paused = self.is_paused, True => self.is_paused = True
- self.is_paused = before => self.is_paused = False
a second backward in one round changes gradients that were sent already, and no error says so
@@ _Rounds.on_ready
- self.is_paused => self.is_paused or p in self.ready
collectives that a failed step had started are counted as the next step's
@@ _Rounds.on_ready
- self.is_paused => self.is_paused or p in self.ready
@@ _Rounds.finish_what_was_left
+ pass
forward must complete an open round, and a round is open once a gradient is ready, even if no collective has started
@@ _Rounds.finish_what_was_left
+ pass
finish_gradient_synchronization() starts no collective for gradients that backward did not reach
@@ _Rounds.finish
- while len(self.works) < len(self.buckets):
-     self.start_next()
+
the hook notes gradients as ready inside no_sync() too, so the next forward finds an open round and sends everything
- if self.is_paused:
-     return
- if p in self.ready:
+ if self.is_paused:
+     self.ready.add(p)
+     return
+ if p in self.ready:
a finished round is not forgotten: finish_gradient_synchronization() must begin a new one
@@ _Rounds.finish
- self.begin() =>
a gradient that is not contiguous is sent in its memory order, and meets other elements: make it contiguous first
- torch.zeros_like(p) if => torch.zeros(p.shape, dtype=p.dtype) if
- grad.detach().reshape(-1) => grad.detach().as_strided((grad.numel(),), (1,))
- piece.view(p.shape)
+ piece.as_strided(p.shape, torch.empty(p.shape).stride() if p.grad is None else p.stride())
a forward under `torch.no_grad()` completes the round too, so a rank that evaluates alone would wait for the others
- if self.ready and torch.is_grad_enabled(): => if self.ready:
keyword arguments do not reach the module
- (self, *args, **kwargs) => (self, *args)
- self.module(*args, **kwargs) => self.module(*args)

# OverlapDDP
all gradients are in one bucket, which is complete only when backward ends
- [[p] for p in reversed(_trainable(module))] => _buckets(_trainable(module)[::-1], math.inf)
collectives start in the order of the parameters, but backward reaches the first parameters last
- reversed(_trainable(module)) => _trainable(module)

# BucketedDDP
buckets fill in the order of the parameters, but backward reaches the first parameters last
- _trainable(module)[::-1] => _trainable(module)
every gradient has a collective of its own, where buckets should hold several
- _buckets(_trainable(module)[::-1], bucket_size_mb * 2**20) => [[p] for p in reversed(_trainable(module))]
a bucket is closed after it has become too large, where it should be closed before
- + p.nbytes > bucket_bytes => >= bucket_bytes
a MB is 10**6 bytes here; `bucket_size_mb` counts MB of 2**20 bytes
- 2**20 => 10**6
`>=` in place of `>`: a gradient that just fits begins the next bucket
- > bucket_bytes => >= bucket_bytes
the size counts numbers, where it should count bytes
- sum(q.nbytes for q in bucket) + p.nbytes => sum(q.numel() for q in bucket) + p.numel()
each number counts as 4 bytes, but a float64 takes 8 and a bfloat16 takes 2
- sum(q.nbytes for q in bucket) + p.nbytes => sum(4 * q.numel() for q in bucket) + 4 * p.numel()
dtypes share a bucket, in which the narrow ones are widened
- open_buckets.get(p.dtype) => open_buckets.get(None)
- open_buckets[p.dtype] => open_buckets[None]
a bucket is closed where the dtype changes, but each dtype keeps its own open bucket
- open_buckets.get(p.dtype) => buckets[-1] if buckets and buckets[-1][0].dtype == p.dtype else None
a bucket is sent when its last parameter is ready, though others in it may not be
- self.n_missing[self.bucket_of[p]] -= 1
+ if p is self.buckets[self.bucket_of[p]][-1]:
+     self.n_missing[self.bucket_of[p]] = 0
buckets go in the order in which they were begun: one that is completed late holds up all others
- sorted(buckets, key=lambda bucket: position[bucket[-1]]) => buckets
a bucket size that is not positive raises no ValueError
- raise ValueError(f"bucket_size_mb = {bucket_size_mb}, expected more than 0") => bucket_size_mb = 1e-9
""")
