"""What goes wrong when people shard a model by hand."""

from lib.workbook.grading import edits

edits("""
# memory_per_device
stage 1 shards the parameters first; ZeRO begins with the optimizer's state
- (optimizer_bytes, grad_bytes, param_bytes) => (param_bytes, grad_bytes, optimizer_bytes)
each stage shards only its own part, but stage 2 should also shard what stage 1 shards
- i < stage => i == stage - 1
everything is divided by the number of devices at every stage
- i < stage => stage
the bytes are rounded down to whole ones
+ return int(reference.memory_per_device(n_parameters, world_size, stage, param_bytes, grad_bytes, optimizer_bytes))
the padding of the last share is counted
- size / world_size => size * math.ceil(n_parameters / world_size) / n_parameters
an unknown stage is treated as stage 3 instead of being refused
- stage not in (0, 1, 2, 3) => stage < 0

# shard
the last shard is shorter: the padding is missing, and ranks would disagree on sizes
- return out => return part.clone()
a shard holds every R-th element instead of a stretch of neighbouring elements
- row[rank * size : (rank + 1) * size] => row[rank::world_size]
the elements are spread as evenly as possible (`tensor_split`); every shard but the last should be full
- row[rank * size : (rank + 1) * size] => row.tensor_split(world_size)[rank]
the size is rounded down, so the end of the tensor is in no shard
- math.ceil(tensor.numel() / world_size) => tensor.numel() // world_size
the shard is a view that keeps the memory of the whole tensor alive
- out[: len(part)] = part
+ out = nn.functional.pad(row, (0, size * world_size - len(row)))[rank * size : (rank + 1) * size]
the shard is made on the default device instead of the tensor's
- tensor.new_zeros(size) => torch.zeros(size, dtype=tensor.dtype)
a negative rank counts from the end instead of being refused
+ return reference.shard(tensor, rank + world_size if -world_size <= rank < 0 else rank, world_size)
rank = R is accepted, but the last of R ranks is R - 1
+ return reference.shard(tensor, min(rank, world_size - 1) if rank == world_size else rank, world_size)
no rank is refused, neither below 0 nor above R - 1
+ return reference.shard(tensor, rank % world_size, world_size)

# unshard
the padding is still there
- row[:n].view(tuple(shape)) => row
the shards are interleaved instead of following one another
- torch.cat(list(shards)) => torch.stack(list(shards), dim=1).flatten()
missing elements are filled with zeros, but they should raise an error
+ row = nn.functional.pad(row, (0, max(0, n - len(row))))
  if len(row) < n:
the result is float32 whatever the shards are
+ return reference.unshard(shards, shape).float()

# ShardedOptimizer
every rank updates every parameter: the values are right, but no memory is saved
- if self._owner[p] == dist.get_rank() =>
the other ranks' new values do not arrive: broadcast each parameter from the rank that owns it, and wait for it
- if parameter.requires_grad: => if False:
the inner optimizer keeps its first options, so a scheduler that changes param_groups has no effect
- theirs.update({key: value for key, value in group.items() if key != "params"}) => pass
parameters are dealt out in turn, regardless of their size: one rank may get all the large ones
- self._load.index(min(self._load)) => len(self._owner) % len(self._load)
parameters are dealt out in their own order instead of from the largest to the smallest
- sorted(group["params"], key=Tensor.numel, reverse=True) => group["params"]
parameters are dealt out from the smallest to the largest instead of the other way round
- , reverse=True =>
a frozen parameter counts by its size, but it needs no state: it counts as 0
- * parameter.requires_grad =>
only the learning rate is copied to the inner optimizer: a schedule of betas, momentum or weight decay has no effect
- in group.items() if key != "params" => in group.items() if key == "lr"
the loads start again at zero for each group, so the earlier groups are forgotten
  group = self.param_groups[-1]
+ self._load = [0] * len(self._load)
frozen parameters are broadcast, although no rank changes them
- if parameter.requires_grad: => if True:
the state is linked only once, at the start: `load_state_dict` replaces it, and the inner optimizer keeps the old one
- self._local.state, works = self.state, []
+ works = []
+ if not hasattr(self, "linked"):
+     self._local.state = self.linked = self.state
the inner optimizer keeps a state of its own, and `state` stays empty: both share one
- self._local.state, works = self.state, [] => works = []
options that nobody gave are missing from `param_groups`: take them from the inner optimizer's group
- group.setdefault(key, value) => pass
step does not return what the closure returned
- return loss =>
the closure is called outside of the inner step, which may need to call it itself, even several times
- loss = self._local.step(**kwargs) if closure is None else self._local.step(closure, **kwargs)
+ loss = None if closure is None else closure()
+ self._local.step(**kwargs)
a closure of None is passed to an inner optimizer whose step takes none
- self._local.step(**kwargs) if closure is None else self._local.step(closure, **kwargs)
+ self._local.step(closure, **kwargs)
what the inner optimizer changes in its groups is not copied back, and is overwritten at the next step
- group.update({key: value for key, value in theirs.items() if key != "params"}) => pass

# reduce_scatter_gradients
the gradients are summed over the ranks, not averaged
- row / world_size => row
the full gradients are kept: each rank holds all of them, and its share as well
- grad, parameter.grad = parameter.grad, None => grad = parameter.grad
the gradients are set to None only after all of them were reduced: until then a rank holds all of them, and its shares
as well
- grad, parameter.grad = parameter.grad, None => grad = parameter.grad
+ for parameter in module.parameters():
+     parameter.grad = None if parameter.requires_grad else parameter.grad
  return shares
an all-reduce gives every rank the whole sum, out of which it then cuts its share
- row = nn.functional.pad(row / world_size, (0, -len(row) % world_size))
+ row = row / world_size
+ dist.all_reduce(row, group=group)
+ shares[name] = shard(row, dist.get_rank(group), world_size)
+ continue
a gradient of two dimensions is laid out column by column
- grad.reshape(-1) => (grad.t() if grad.ndim == 2 else grad).reshape(-1)
a parameter without a gradient on this rank is skipped, so the ranks' collectives no longer match
- if p.requires_grad => if p.grad is not None
the zeros for a missing gradient are float32 on the default device, whatever the parameter is
- torch.zeros_like(parameter).flatten() => torch.zeros(parameter.numel())
the group is not used: the mean is over all ranks
+ return reference.reduce_scatter_gradients(module)
the mean is taken after the sum, which overflows in float16 where the mean does not
- row / world_size => row
  reduce_scatter_row(shares[name], row, group=group)
+ shares[name].div_(world_size)

# FlatShard
the gradient is summed over the ranks, not averaged
- grad.div_(dist.get_world_size(self.group)) =>
the mean is taken after the sum, which overflows in float16 where the mean does not
- grad.div_(dist.get_world_size(self.group)) =>
- mine.to(self.shard.dtype) => mine.div_(dist.get_world_size(self.group)).to(self.shard.dtype)
the gradient is reduced in the shard's dtype, which sends twice the bytes of a bfloat16 gradient
- grad.div_(dist.get_world_size(self.group))
+ grad = grad.to(torch.promote_types(grad.dtype, self.shard.dtype)) / dist.get_world_size(self.group)
the mean is not cast to the shard's dtype before it becomes its gradient
- mine.to(self.shard.dtype), None => mine, None
a second backward replaces shard.grad instead of adding to it
- mean if self.shard.grad is None else self.shard.grad.add_(mean) => mean
the addition to shard.grad is not in place: the old sum and the new one are both held for a moment
- self.shard.grad.add_(mean) => self.shard.grad + mean
full keeps its memory: `free` does not empty it, or `__init__` does not call `free`
- self.full.untyped_storage().resize_(0) =>
free does not wait for a gather on its way, which then writes into memory that has been released
- self.finish_gather() =>
free gathers the values again where nothing is gathered, only to release them
- if self.is_whole: => if True:
start_gather waits for its gather, so nothing can be computed in the meantime
  self._gathering = (work, mine)
+ work.wait()
without a param_dtype full is float32 instead of the parameters' own dtype
- param_dtype or first.dtype => param_dtype or torch.float32
full is made on the default device instead of the parameters' device
- , device=first.device =>
each rank keeps its own initial values: rank 0's were not broadcast
- dist.broadcast(row, group_src=0, group=group) =>
the gathered row is copied into full, which changes the version that autograd checks; copy it into full.data
- work = all_gather_row(self.full.data, mine, self.group, async_op=True)
+ row = torch.empty_like(self.full.data)
+ all_gather_row(row, mine, self.group)
+ with torch.no_grad():
+     self.full.copy_(row)
- self._gathering = (work, mine) =>
the gather writes into full, which autograd watches; it should write into full.data
- self.full.data, mine => self.full, mine
a slice of full for each parameter: backward makes a row of the whole unit's size for every one of them
@@ views
+ views, at = {}, 0
+ for (name, shape), size in zip(self.shapes.items(), self.sizes, strict=True):
+     views[name], at = self.full[at : at + size].view(shape), at + size
+ return views
the shard is kept in param_dtype, which loses small updates
- shard(row, dist => shard(row.to(param_dtype or row.dtype), dist
the group is ignored: the parameters are divided among all ranks instead of the group's
+ group = None
  first, world_size, self
the sum over the group's ranks is divided by the number of all ranks
- grad.div_(dist.get_world_size(self.group)) => grad.div_(dist.get_world_size())
finish_reduce adds the same mean again if it is called twice: the second time nothing is on its way
- mean, self._reducing = mine.to(self.shard.dtype), None => mean = mine.to(self.shard.dtype)
a parameter that is not contiguous, such as a transposed one, cannot be viewed as a row; reshape copies it
- parameter.detach().reshape(-1) for => parameter.detach().view(-1) for
each parameter is sharded by itself; put them end to end in one row first, and shard that row
- self.shard = nn.Parameter(shard(row, dist.get_rank(group), world_size)
+ parts = [shard(part, dist.get_rank(group), world_size) for part in row.split(self.sizes)]
+ self.shard = nn.Parameter(torch.cat(parts)
full has only the n elements of the parameters; it needs the padding as well, R * S elements
- torch.empty(len(self.shard) * world_size => torch.empty(len(row)
the views are views of full.data, so autograd passes no gradient on to full
- part.view(shape) => part.detach().view(shape)
free empties full but leaves is_whole at True, so the next gather does nothing
- self.is_whole = False =>
start_gather gathers again although full is whole already, or its gather is on its way
- if not self.is_whole: => if True:
the shard is gathered as it is and only then cast to param_dtype, which sends twice the bytes
- self.shard.detach().to(self.full.dtype)
+ torch.empty(len(self.full), dtype=self.shard.dtype, device=self.full.device)
- all_gather_row(self.full.data, mine => all_gather_row(mine, self.shard.detach()
  self._gathering[0].wait()
+ self.full.data.copy_(self._gathering[1])
the shard is not cast to param_dtype before it is gathered into full
- self.shard.detach().to(self.full.dtype) => self.shard.detach()
free gives full other data, but its storage lives on in the tensors that refer to it: empty the storage
- self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
+ self.full.data = self.full.data.new_empty(len(self.shard) * dist.get_world_size(self.group))
- self.full.untyped_storage().resize_(0) => self.full.data = self.full.data.new_empty(0)
the broadcast does not take the group: every group starts from the values of rank 0 of all
- dist.broadcast(row, group_src=0, group=group) => dist.broadcast(row, src=0)

# FullySharded
nothing is freed after forward, so at its end every unit is whole
@@ after_forward
+ self.ahead = self.ahead if i else None
nothing is gathered ahead: every unit waits for its own gather
@@ gather
+ reference.FullySharded.gather(self, i, len(self.flats))
backward gathers unit i + 1 ahead, but unit i - 1 comes next
@@ before_backward
+ self.gather(i, i + 1)
nothing is gathered ahead before the root's backward, but the last unit comes next
@@ before_backward
+ self.gather(i, i - 1 if i else len(self.flats))
each reduction is waited for as soon as it is started, so nothing is computed in the meantime
@@ after_gradient
+ flat.free()
+ flat.start_reduce()
+ flat.finish_reduce()
reductions are waited for only at the end, so the gradients of all units are held at once
@@ after_gradient
+ flat.free()
+ flat.start_reduce()
+ self.__dict__.setdefault("started", []).append(flat)
@@ finish_gradient_synchronization
+ for flat in self.__dict__.pop("started", []):
+     flat.finish_reduce()
+ reference.FullySharded.finish_gradient_synchronization(self)
finish_gradient_synchronization does not wait for the last unit's gradient
@@ finish_gradient_synchronization
+ self.reducing = None
+ self.after_forward(0)
the gradients are reduced only after backward: until then every unit's gradient is held whole
@@ after_gradient
+ flat.free()
+ self.__dict__.setdefault("waiting", []).append(flat)
@@ finish_gradient_synchronization
+ for flat in self.__dict__.pop("waiting", []):
+     if flat.full.grad is not None:
+         flat.start_reduce()
+         flat.finish_reduce()
+ reference.FullySharded.finish_gradient_synchronization(self)
a unit that was gathered ahead and then not used is never freed
@@ gather
+ self.ahead = None
+ reference.FullySharded.gather(self, i, following)
the root counts as gathered ahead: if units run in another order, backward frees it too early
- 0 < =>
an exception in forward leaves the unit that was gathered ahead whole
@@ after_forward
+ self.free(i)
`free` does not take the views down: the weights of a freed unit still hang in the model
- self.places[i].take_down() =>
finish_gradient_synchronization frees nothing: a root with frozen values stays whole
- self.after_forward(0) =>
the root's backward always gathers the last unit ahead: if that unit's backward began first, the one ahead is freed and
gathered again
@@ before_backward
+ self.gather(i, i - 1 if i else len(self.flats) - 1)
after the root's forward a unit still counts as ahead, although all were freed
- self.ahead = self.ahead if i else None =>
a reduction is started before the previous one was waited for, so two gradients are on their way
@@ after_gradient
  flat.free()
+ flat.start_reduce()
- flat.start_reduce() =>
a unit's values are freed only after its reduction was started, so they are held beside its gradient
@@ after_gradient
- flat.free() =>
+ flat.free()
  self.reducing = flat
only the gradient of the last backward is kept: gradient accumulation is lost
@@ before_backward
+ for flat in self.flats[i]:
+     flat.shard.grad = None
+ reference.FullySharded.before_backward(self, i)
a unit has as many flat shards as its list: none in a root without parameters, two where a part is frozen
@@ gather
- for flat in self.flats[i]: => for flat in [self.flats[i][0]]:
every unit is freed after unit 1, but the root's forward ends last
- if i == 0 else (i,) => if i == 1 else (i,)
`free` frees only the first of a unit's flat shards: where a part is frozen there are two
@@ free
- [i]: => [i][:1]:
only the first of the next unit's flat shards is gathered ahead: where a part is frozen there are two
- [following] if self => [following][:1] if self
the views are not hung in their places before the forward: the unit computes with empty parameters
@@ before_forward
+ self.gather(i, i + 1)
the views are taken before the unit is gathered, when there is no memory behind them
- self.gather(i, i + 1) =>
  (flat.views())
+ self.gather(i, i + 1)
the gather of the unit itself is started but not waited for
@@ gather
+ if self.ahead not in (None, i, following):
+     self.free(self.ahead)
+ self.ahead = following if 0 < following < len(self.flats) else None
+ for unit in (i, self.ahead):
+     for flat in self.flats[unit] if unit is not None else ():
+         flat.start_gather()
after the root's forward only the root is freed: a unit that was gathered ahead stays whole
@@ after_forward
+ self.free(i)
+ self.ahead = self.ahead if i else None
`reducing` does not say which gradient is being reduced, so nobody waits for it
@@ after_gradient
+ reference.FullySharded.after_gradient(self, flat)
+ self.reducing = None
a unit's reduction is not started when its gradient is complete
- flat.start_reduce() =>
the unit that was gathered ahead is freed when its turn comes, and gathered again
@@ gather
+ if self.ahead is not None:
+     self.free(self.ahead)
+ self.ahead = None
+ reference.FullySharded.gather(self, i, following)
the unit that is ahead is freed even if it comes next, and gathered again
@@ gather
+ if self.ahead not in (None, i):
+     self.free(self.ahead)
+ reference.FullySharded.gather(self, i, following)
the following unit's gather is waited for too, so nothing is computed in the meantime
- flat.start_gather() => flat.finish_gather()
two units are gathered ahead, so three are whole while one computes
@@ gather
+ reference.FullySharded.gather(self, i, following)
+ for unit in (following - 1, following + 1):
+     for flat in self.flats[unit] if 0 < unit < len(self.flats) and unit != i else ():
+         flat.start_gather()
a gradient is reduced twice
@@ after_gradient
+ reference.FullySharded.after_gradient(self, flat)
+ flat.start_reduce()
`before_forward` names the unit itself as the following one, so no other is gathered ahead
- + 1 =>
`before_backward` frees the unit first, and so gathers anew what was gathered ahead
@@ before_backward
+ self.free(i)
+ reference.FullySharded.before_backward(self, i)
after the last unit comes none: `following` may be the number of units, for which there is no list
@@ gather
+ reference.FullySharded.gather(self, i, following)
+ if following > 0:
+     self.ahead = following
+     for flat in self.flats[following]:
+         flat.start_gather()

# clip_sharded_gradient_norm_
the norm is that of this rank's share alone, so each rank scales by a different factor
- dist.all_reduce(square, group=group) =>
norms are added over the ranks, but their squares should be
- dist.all_reduce(square, group=group)
+ square = square.sqrt()
+ dist.all_reduce(square, group=group)
+ square = square**2
the squares are averaged over the ranks, not added
  dist.all_reduce(square, group=group)
+ square = square / dist.get_world_size(group)
the square root is missing: the squared norm is compared with the limit
- square.sqrt() + 1e-6 => square + 1e-6
- return square.sqrt() => return square
the group is ignored: the norm is over all ranks
- group=group) => group=None)
1e-6 is subtracted from the norm, which makes it negative for a tiny gradient
- + 1e-6 => - 1e-6
squares are computed in the gradient's own dtype: in float16 the square of 300 is infinite
- grad.float() => grad
the scaled gradient is a new tensor, but it should be scaled in place
- for grad in grads: => for parameter in (p for p in parameters if p.grad is not None):
- grad.mul_((max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0))
+ parameter.grad = parameter.grad * (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
nothing is scaled: `grad * factor` and `mul` make a new tensor, and `mul_` changes the gradient
- grad.mul_( => grad.mul(
`parameters` is walked through twice: an iterator is empty the second time
- parameters = list(parameters)
+ again = parameters if isinstance(parameters, list) else []
+ parameters = list(parameters)
- for grad in grads: => for grad in [p.grad for p in again if p.grad is not None]:
on a rank without gradients the zero is made on the default device, which NCCL refuses: make it on the parameters'
device
- parameters[0].device if parameters else "cpu" => next((p.device for p in parameters if p.grad is not None), None)
gradients below the limit are scaled up to it
- .clamp(max=1.0) =>

# apply_fully_shard
only the root is sharded: the whole model is gathered at once
- (*blocks_of(model), model) => (model,)
the root is left out, so the embeddings and the head stay whole on every rank
- (*blocks_of(model), model) => blocks_of(model)
the model itself is cast to param_dtype: the shards lose their float32
+ return reference.apply_fully_shard(model.to(param_dtype), mesh, None)
every layer inside a block is a unit of its own: many small gathers
- (*blocks_of(model), model)
+ (*(layer for block in blocks_of(model) for layer in block.children()), *blocks_of(model), model)
the root is sharded before its blocks, and takes their parameters
- (*blocks_of(model), model) => (model, *blocks_of(model))
the mesh is not passed on: the weights are cut over all ranks
+ return reference.apply_fully_shard(model, None, param_dtype)
`reshard_after_forward=False` keeps every block whole until its backward
- MixedPrecisionPolicy(param_dtype=param_dtype)
+ MixedPrecisionPolicy(param_dtype=param_dtype), reshard_after_forward=False
`reduce_dtype` is set, too: by default, gradients are reduced in param_dtype, with half the bytes of float32
- MixedPrecisionPolicy(param_dtype=param_dtype)
+ MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
`reshard_after_forward=True` frees the root after its forward, too, although backward begins with it
- MixedPrecisionPolicy(param_dtype=param_dtype)
+ MixedPrecisionPolicy(param_dtype=param_dtype), reshard_after_forward=True
the root has no policy: its own parameters are gathered and computed with in float32
- MixedPrecisionPolicy(param_dtype=param_dtype)
+ MixedPrecisionPolicy(param_dtype=None if part is model else param_dtype)
param_dtype is not passed on: everything is gathered in float32
+ return reference.apply_fully_shard(model, mesh, None)

# save_sharded
the optimizer's state is not in the checkpoint
- "optimizer": state => "optimizer": {}
every rank writes its own shard as if it were the whole parameter
- "model": weights => "model": {name: getattr(w, "_local_tensor", w) for name, w in weights.items()}
rank 0 gathers everything and writes it alone, but a large model does not fit on one rank
- weights, state = get_state_dict(model, optimizer)
+ from torch.distributed.checkpoint.state_dict import StateDictOptions
+ weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
- dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
+ if dist.get_rank() == 0:
+     dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path, no_dist=True)
+ dist.barrier()
`full_state_dict=True` gathers the whole model and optimizer on every rank before it writes
- weights, state = get_state_dict(model, optimizer)
+ from torch.distributed.checkpoint.state_dict import StateDictOptions
+ weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
the optimizer's state is not saved under the key 'optimizer'
- "optimizer": state => "optim": state
a plain `state_dict()` names the optimizer's state by numbers; `get_state_dict` uses the parameters' names
- get_state_dict(model, optimizer) => model.state_dict(), optimizer.state_dict()
flat shards are not refused: no `HookedUnits` has names to save, and `FullySharded` is only one of them
- raise ValueError("FullySharded holds flat shards: save what its gather_full_params() gives, by save_checkpoint")
+ pass

# load_sharded
the model is loaded, but the optimizer starts from scratch
- , "optimizer": state =>
the checkpoint is read into a state dict that is then thrown away
+ weights, state = get_state_dict(model, optimizer)
+ copies = {name: w.clone() for name, w in weights.items()}
+ dcp.load({"model": copies, "optimizer": state}, checkpoint_id=path)
the optimizer is loaded, but the model keeps its initial values
- "model": weights, =>
set_state_dict is not called after dcp.load: the moments are read in place, but the learning rate is not restored
- set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state) =>
""")
