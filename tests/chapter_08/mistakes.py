"""Wrong answers to chapter 8's exercises, each with the misconception behind it."""

from lib.workbook.grading import edits

edits("""
# benchmark
the code never waits for the accelerator: it times the launch, not the work
- _synchronize(device)
- start
+ start
- fn()
- _synchronize(device)
+ fn()
the code waits for the accelerator before a call, but not after it
- fn()
- _synchronize(device)
+ fn()
the clock starts while the warm-up still runs on the accelerator: wait before the first reading too
- _synchronize(device)
- start
+ start
work that was queued before is timed with the first call; wait before the first reading, with no warm-up too
- for _ in range(warmup):
-     fn()
+ for _ in range(warmup):
+     fn()
+     _synchronize(device)
- _synchronize(device)
- start
+ start
the code waits for CUDA even if the work is on the CPU
@@ _synchronize
+ torch.cuda.synchronize()
device=None is taken for the CPU, although there is an accelerator to wait for
- device is None and torch.accelerator.is_available() => False
torch.cuda.synchronize() waits for the current device; give it the device
- torch.cuda.synchronize(device) => torch.cuda.synchronize()
the code waits for the current accelerator, whichever device was given
- torch.cuda.synchronize(device) => torch.accelerator.synchronize()
- torch.accelerator.synchronize(device) => torch.accelerator.synchronize()
the code waits only for CUDA; for other accelerators there is torch.accelerator.synchronize
- elif device.type != "cpu":
-     torch.accelerator.synchronize(device)
+
the calls of the warm-up are timed too
- for _ in range(warmup):
-     fn()
+
- range(repeats) => range(warmup + repeats)
there is no warm-up: the first calls pay for what happens only once
- for _ in range(warmup):
-     fn()
+
the standard deviation divides by n, where a sample's divides by n - 1
- stdev => pstdev
that is the variance, not its root
- stdev => variance
median_s holds the mean
- statistics.median(times) => statistics.fmean(times)
the times are sorted, where they should be in the order of the calls
- tuple(times) => tuple(sorted(times, reverse=True))
all calls are timed as one and divided by their number, so there is no spread
+ times = [statistics.fmean(times)] * repeats
  std =
a single call has no sample deviation, and statistics.stdev refuses it: return 0
- if repeats > 1 else 0.0 =>
bad counts raise no ValueError
- raise ValueError(f"warmup = {warmup} calls: expected 0 or more") => warmup = 0
- raise ValueError(f"repeats = {repeats} calls: expected 1 or more") => repeats = 1

# matmul_flops
those are multiply-adds: each of them is two operations
- 2 * =>
k - 1 additions for each result: true on paper, but by convention the first one, to zero, counts too
+ return m * n * (2 * k - 1)
that counts the numbers read and written, not the operations on them
- 2 * m * k * n => m * k + k * n + m * n
the inner dimension is left out: each of the m * n results takes k steps
- k * =>
the count goes through a float, which cannot hold large whole numbers exactly
+ return int(2.0 * m * k * n)

# roofline_seconds
the two times are added, but they overlap: the longer one is the answer
- max(flops / peak_flops, bytes_moved / bandwidth) => flops / peak_flops + bytes_moved / bandwidth
the shorter of the two times is taken, but both jobs must finish
- max => min
only the arithmetic is counted, but an addition of two vectors is limited by memory
- max(flops / peak_flops, bytes_moved / bandwidth) => flops / peak_flops
that is the attainable speed in FLOP/s, the roof itself; the function should return seconds
- max(flops / peak_flops, bytes_moved / bandwidth) => min(peak_flops, flops / bytes_moved * bandwidth)
the quotients are upside down: seconds are work divided by speed
+ return max(peak_flops / flops if flops else 0.0, bandwidth / bytes_moved)

# attention_flops
only one product is counted: after the scores, the weights multiply the values
- 2 * matmul_flops => matmul_flops
the heads are counted twice: together they are as wide as the model
- config.n_layers => config.n_layers * config.n_heads
the sequence is taken to be context_len long; it has its own length
- length * (length + 1) // 2 if causal else length * length
+ config.context_len * (config.context_len + 1) // 2 if causal else config.context_len**2
one layer is counted, not all
- * config.n_layers =>
causal counts exactly one half, but the diagonal is allowed too: T (T + 1) / 2 pairs
+ return reference.attention_flops(config, length, False) // (2 if causal else 1)
causal counts T^2 // 2 pairs; with the diagonal there are T (T + 1) / 2
- length * (length + 1) // 2 => length * length // 2
the diagonal is left out, but a query sees itself: there are T (T + 1) / 2 pairs
- length + 1 => length - 1
`causal` is ignored
- if causal => if False
the projections are counted too, where only the two products between positions should be
- return => return matmul_flops(length, config.dim, 4 * config.dim) * config.n_layers +
a multiply-add counts as one operation and only one of the two products is counted: a quarter of the FLOPs
- 2 * matmul_flops(1, config.dim, 1) => config.dim
the count is a float: it should be whole, and beyond 2^53 a float cannot hold every whole number
- // 2 => / 2
- length * length => float(length * length)

# training_flops_per_token
only the forward pass is counted; backward costs twice as much again
- 3 * =>
backward is counted like one more forward, but each product has two in backward, one a factor
- 3 * => 2 *
the head is left out: it shares the embedding's weight, but its product is computed
- + head =>
the embedding is counted as a product, but it is a lookup; only the head multiplies
- + head => + 2 * head
six times all parameters: positions, biases and norms are in no product, attention is missing
+ c = config.dim
+ embeddings = (config.vocab_size + config.context_len) * c
+ return 6 * (embeddings + config.n_layers * (12 * c * c + 13 * c) + 2 * c)
the products of attention are left out
- + attention =>
one of attention's two products is counted: after the scores, the weights multiply the values
- + attention => + attention // 2
attention's output projection is left out: with it, a block has 12 C^2 weights
- 12 * config.dim => 11 * config.dim
one of the feed-forward part's two maps is left out: with it, a block has 12 C^2 weights
- 12 * config.dim => 8 * config.dim
the FLOPs of a whole sequence are returned, where those of one token are expected
- 3 * (linear + head + attention) => 3 * (linear + head + attention) * config.context_len
attention is counted for the causal pairs only, but the naive product computes all pairs
- causal=False => causal=True
the count is a float: divide by the tokens with //, which keeps it whole
- // => /
attention is counted for a whole sequence, where it should be divided by its tokens
- // config.context_len =>
the head's rows of padding are left out, but they are computed before they are cut off
- config.n_rows => config.vocab_size

# vit_training_flops_per_image
the patches are counted three times; nothing needs the gradient of the pixels, so it should be twice
- 2 * patches => 3 * patches
the class token is forgotten: the blocks work on N + 1 tokens
- config.n_patches + 1 => config.n_patches
attention is counted over the N patches: the class token is a query and a key too, so there are N + 1
- config, tokens => config, config.n_patches
the feed-forward part is counted for the N patches: the class token passes through it too, so there are N + 1
- tokens, config.dim, config.hidden_dim => config.n_patches, config.dim, config.hidden_dim
with mean pooling no class token is counted, but the blocks compute it all the same
- config.n_patches + 1 => config.n_patches + (config.pooling == "token")
the projections of q, k and v are counted, but not that of the output, which makes four
- 4 * config.dim) => 3 * config.dim)
one of the feed-forward part's two linear maps is counted
- mlp = 2 * => mlp =
the hidden width is taken to be four times the model's; use the config's hidden_dim
- config.hidden_dim => 4 * config.dim
the head is counted for every token, but it reads one vector
- 1, config.dim, config.n_classes => tokens, config.dim, config.n_classes
only the forward pass is counted
- 2 * patches + 3 * => patches +
the head is left out
- + attention + head => + attention
the products of attention are left out
- + attention + head => + head
the patch convolution is left out
- 2 * patches + =>
attention counts causal pairs, but in a vision transformer every token sees every other
- causal=False => causal=True

# mfu
that is in percent, where a share from 0 to 1 is expected
- / peak_flops => / peak_flops * 100
that is the speed reached in FLOP/s, not yet divided by the peak
- / peak_flops =>
the quotient is upside down: how many times slower than the peak
+ return peak_flops / (items_per_second * flops_per_item) if items_per_second else 0.0
the FLOPs are tripled for backward, but flops_per_item includes backward already
- / peak_flops => / peak_flops * 3
it divides by the items per second: the faster the program, the lower the share
+ return flops_per_item / (items_per_second * peak_flops) if items_per_second else 0.0

# saved_activation_bytes
a storage is counted as often as a view of it is saved
- kept[storage._cdata] => kept[len(kept)]
tensors are told apart as Python objects, but two views of one storage are two objects
- kept[storage._cdata] = storage => kept[id(tensor)] = tensor
- storage.nbytes() for => storage.untyped_storage().nbytes() for
only the number id(tensor) is kept: Python gives it to the next object when the tensor is gone, and tensors are lost
- kept[storage._cdata] = storage => kept[id(tensor)] = storage.nbytes()
- storage.nbytes() for storage in kept.values() => kept.values()
storages are told apart by where a view begins, but two views of one storage begin at different places
- kept[storage._cdata] => kept[tensor.data_ptr()]
only the view's own numbers are counted, but the whole storage stays alive
- kept[storage._cdata] = storage => kept[storage._cdata] = tensor.detach()
- storage.nbytes() for => storage.numel() * storage.itemsize for
four bytes for every number, whatever its dtype
- kept[storage._cdata] = storage => kept[storage._cdata] = tensor.detach()
- storage.nbytes() for => 4 * storage.untyped_storage().nbytes() // storage.itemsize for
that counts numbers, not bytes
- kept[storage._cdata] = storage => kept[storage._cdata] = tensor.detach()
- storage.nbytes() for => storage.untyped_storage().nbytes() // storage.itemsize for
storages are told apart by data_ptr, which is 0 for every tensor on the meta device
- kept[storage._cdata] => kept[storage.data_ptr()]
the inputs (leaves) are left out, but autograd keeps them too
- kept[storage._cdata] = storage
+ if not tensor.is_leaf:
+     kept[storage._cdata] = storage
the unpack hook returns nothing, so backward no longer works
- lambda tensor: tensor => lambda tensor: None
only the number _cdata is kept: when a storage is freed, the next one may get its number, and one of the two is lost
- kept[storage._cdata] = storage => kept[storage._cdata] = storage.nbytes()
- storage.nbytes() for storage in kept.values() => kept.values()
pack returns the tensor itself: an output that is saved holds its graph and the graph holds it, a cycle that is never
freed
- return tensor.detach() => return tensor
fn is called twice, where it should be called once
+ fn()
  with torch.autograd
the number is right, but it is a float and should be an int
- return sum => return 1.0 * sum

# attention_activation_bytes
scores and weights are both counted, but softmax's backward needs only its output
- inputs + weights => inputs + 2 * weights
only the T x T weights are counted, but the products keep q, k and v too
- inputs + weights => weights
v is left out, but the last product keeps it beside the weights
- 3 * => 2 *
the output is counted too, but no backward formula here needs it
- 3 * => 4 *
one T x T is counted for all heads, but each head has its own
- heads * (inputs + weights) => (heads * inputs + weights)
that counts numbers, not bytes
- * bytes_per_value =>
saved memory grows as T^1.5 here; every pair of positions has a weight, so it is T^2
- length * length => int(length**1.5)
half of the weights are counted, as if only causal pairs were kept, but the whole square is
- length * length => length * (length + 1) // 2
the number is right, but it is a float and should be an int
- * bytes_per_value => * float(bytes_per_value)

# profile_step
those are microseconds, as the profiler counts; the contract has seconds
- self_cpu_time_total) / 1e6 => self_cpu_time_total)
- event.cpu_time_total / 1e6 => event.cpu_time_total
those are milliseconds: the profiler counts microseconds, and 1e6 of them are a second
- self_cpu_time_total) / 1e6 => self_cpu_time_total) / 1e3
- event.cpu_time_total / 1e6 => event.cpu_time_total / 1e3
a range opened twice has the time of the last one: add to what the dict has already
- ranges.get(event.name, 0.0) + seconds => seconds
of ranges and operators that come several times, only the last is counted: add up their times
- operators.get(event.name, 0.0) + own[event] => own[event]
- ranges.get(event.name, 0.0) + seconds => seconds
an operator's time includes that of the operators inside it, which are counted twice
- event.self_cpu_time_total => event.cpu_time_total
only a range's own time is counted, without the operators that run inside it
- event.cpu_time_total => event.self_cpu_time_total
ranges and operators are in one dict: only names that begin with "aten::" are operators
- if _is_range(event): => if True:
the optimizer's own ranges are among the step's
- ("Optimizer.", "ProfilerStep") => "ProfilerStep"
only Optimizer.step is left out, but the optimizer names its zero_grad too
- "Optimizer." => "Optimizer.step"
export_chrome_trace takes a str: give it str(path)
- str(path) => path
on a device, an operator's time includes that of the operators inside it; take the device's own time
- event.self_device_time_total if on_device => event.device_time_total if on_device
only operators that also end in a range are added to it; all that began in it count
- span.start <= event.time_range.start < span.end
+ span.start <= event.time_range.start and event.time_range.end <= span.end
a range opened twice has the mean of both, where it should have the sum
- return StepProfile(ranges, operators)
+ names = [event.name for event in events if _is_range(event)]
+ return StepProfile({name: seconds / names.count(name) for name, seconds in ranges.items()}, operators)
the step runs once more to warm up: a training step that runs twice trains twice
+ step_fn()
  with torch.profiler.profile() as profiler:
no trace is written
- profiler.export_chrome_trace(str(path)) =>
the host's time is taken on a CUDA device too: that is the time of launching, not of the work
- any(event.self_device_time_total for event in events if event.name.startswith("aten::")) => False
the host's and the device's row of a range are added: they are the same work, counted twice
- event.device_type.name == "CPU" and mine => mine
- _begun_inside(event.time_range, own) => event.device_time_total / 1e6
a range's own row has only what its own thread launched on the device, and autograd launches from another thread
- _begun_inside(event.time_range, own) => event.device_time_total / 1e6
only three fixed names are taken for ranges
- return StepProfile(ranges, operators)
+ return StepProfile({name: ranges[name] for name in ("forward", "backward", "optimizer")}, operators)

# memory_timeline
frees are not noticed: the total only grows
- self.note("free", -self.alive.pop(key)) => self.alive.pop(key)
a view is counted as memory of its own, but it shares its storage
- storage.nbytes() and storage._cdata not in given => storage.nbytes()
- and storage._cdata not in self.alive =>
- self.alive.pop(key) => self.alive.pop(key, 0)
the file is written only if the block ends well, and an out-of-memory error leaves nothing
- try:
-     yield events
- finally:
-     torch.cuda.memory._dump_snapshot(str(path))
-     torch.cuda.memory._record_memory_history(enabled=None)
+ yield events
+ torch.cuda.memory._dump_snapshot(str(path))
+ torch.cuda.memory._record_memory_history(enabled=None)
- try:
-     with log:
-         yield events
- finally:
-     log.alive
+ with log:
+     yield events
+ if True:
+     log.alive
without CUDA, the file is written only if the block ends well; write it in a finally
- try:
-     with log:
-         yield events
- finally:
-     log.alive
+ with log:
+     yield events
+ if True:
+     log.alive
a storage that was there before is counted as soon as an operator returns it
- and storage._cdata not in given =>
storages are still followed after the block: the list grows when it shouldn't
- log.alive = None =>
the peak is the total at the end, where it should be the greatest total
- max((event["total_bytes"] for event in events), default=0) => log.total
the estimate is made on CUDA too, where the allocator's own history should be written
- torch.cuda.is_available() => False
CUDA's history is never switched off, and slows down everything that follows
- torch.cuda.memory._record_memory_history(enabled=None) =>
the total adds all allocations and does not subtract the frees
- self.total += change => self.total += max(change, 0)
storages of 0 bytes are noted too, but they take no memory
- storage.nbytes() and =>
time_s is the clock's reading: subtract its reading at the beginning
- - self.start =>
sizes are in MiB, where the contract has bytes
+ change = change / 2**20
  self.total += change
the tensor is followed instead of its storage, which may live on in a view
- for storage in _storages(out):
+ for leaf in tree_leaves(out):
+     storage = leaf.untyped_storage()
- weakref.finalize(storage => weakref.finalize(leaf
the operator is called by its short name ("mm.default"), where str(func) says "aten.mm.default"
- str(func) => str(func).removeprefix("aten.")
""")
