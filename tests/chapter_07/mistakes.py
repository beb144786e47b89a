"""Wrong answers to chapter 7's exercises, each with the misconception behind it."""

from lib.workbook.grading import edits

edits("""
# cross_entropy
exp is taken of the logits themselves and overflows; subtract the largest first
- wide - wide.amax(-1, keepdim=True) => wide
the logarithm is taken of a probability, which may have become 0; compute log probabilities, never probabilities
- return (shifted.exp().sum(-1).log() - chosen).mean().to(logits.dtype)
+ return -(chosen.exp() / shifted.exp().sum(-1)).log().mean().to(logits.dtype)
it returns the sum over all targets instead of their mean
- .mean() => .sum()
the minus before the logarithm is missing
- shifted.exp().sum(-1).log() - chosen => chosen - shifted.exp().sum(-1).log()
the probabilities are averaged before the logarithm; each target has its own logarithm
- (shifted.exp().sum(-1).log() - chosen).mean() => -(chosen - shifted.exp().sum(-1).log()).exp().mean().log()
a small number is added inside of the logarithm, which limits how large a loss can be
- (shifted.exp().sum(-1).log() - chosen) => -(chosen.exp() / shifted.exp().sum(-1) + 1e-8).log()
the loss is in bits (logarithm to the base 2) instead of nats
- .log() => .log2()
- - chosen => - chosen / math.log(2)
it computes in the dtype of the logits; cast to float32 first, because a float16 sum is infinite above 65,504
- logits.to(torch.promote_types(logits.dtype, torch.float32)) => logits
the sum is divided by the size of the first dimension; divide by the number of all targets
- .mean().to => .sum().div(logits.shape[0]).to
the log probabilities are multiplied by a one-hot row; where one of them is -inf, 0 times -inf is NaN
- return (shifted.exp().sum(-1).log() - chosen).mean().to(logits.dtype)
+ log_probs = shifted - shifted.exp().sum(-1, keepdim=True).log()
+ one_hot = nn.functional.one_hot(targets.long(), logits.shape[-1])
+ return -(one_hot * log_probs).sum(-1).mean().to(logits.dtype)
one maximum is subtracted from the whole batch; in a row far below it the sum is 0, and its logarithm is -inf
- wide.amax(-1, keepdim=True) => wide.max()

# AdamW
the decay is added to the gradient and so divided by the root too; that is Adam with L2, not AdamW
- parameter.grad, group["betas"] => parameter.grad + group["weight_decay"] * parameter, group["betas"]
- parameter.mul_(1 - group["lr"] * group["weight_decay"]) =>
the moments start at zero and are not corrected for that
- / math.sqrt(1 - beta2**step) =>
- / (1 - beta1**step) =>
the mean m starts at zero too, and is not corrected for that
- / (1 - beta1**step) =>
the mean square v starts at zero too, and is not corrected for that
- / math.sqrt(1 - beta2**step) =>
eps is added under the root; it belongs outside
- (state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
+ (state["exp_avg_sq"] / (1 - beta2**step) + group["eps"]).sqrt()
eps is added to the root before the correction, so it weighs too much in the first steps
- (state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
+ (state["exp_avg_sq"].sqrt() + group["eps"]) / math.sqrt(1 - beta2**step)
the decay is not multiplied by the learning rate
- group["lr"] * group["weight_decay"] => group["weight_decay"]
the root is missing: the update is divided by the mean square itself
- state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**step) => state["exp_avg_sq"] / (1 - beta2**step)
the root is taken before v is corrected; the correction belongs under the root too
- math.sqrt(1 - beta2**step) => (1 - beta2**step)
the weight decays after the update, so the update decays too; decay first
- parameter.mul_(1 - group["lr"] * group["weight_decay"])
- parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))
+ parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))
+ parameter.mul_(1 - group["lr"] * group["weight_decay"])
the two betas are exchanged
- "betas": betas => "betas": betas[::-1]
all parameters of a group share one step count; each counts its own, and a step without a gradient doesn't count
- for parameter in group["params"]:
+ group["step"] = group.get("step", 0) + 1
+ for parameter in group["params"]:
- int(state["step"]) + 1 => group["step"]
the step count is raised at every parameter, so the second one of a step already counts as the next step
- if parameter.grad is not None:
-     _update(parameter, self.state[parameter], group)
+ if parameter.grad is not None:
+     group["step"] = group.get("step", 0) + 1
+     _update(parameter, self.state[parameter], group)
- int(state["step"]) + 1 => group["step"]
a parameter without a gradient is treated as if its gradient were zero: it decays, and its step is counted
- if parameter.grad is not None:
-     _update(parameter, self.state[parameter], group)
+ missing = parameter.grad is None
+ parameter.grad = torch.zeros_like(parameter) if missing else parameter.grad
+ _update(parameter, self.state[parameter], group)
+ parameter.grad = None if missing else parameter.grad
it reads the defaults; each group has its own settings
- self.state[parameter], group => self.state[parameter], self.defaults
lr is read once, at construction; a schedule changes the lr of the group
- self.state[parameter], group => self.state[parameter], group | {"lr": self.defaults["lr"]}
the means are float32 whatever the parameter's dtype is
- exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter)
+ exp_avg=torch.zeros_like(parameter).float(), exp_avg_sq=torch.zeros_like(parameter).float()
- state["exp_avg"].lerp_(gradient, 1 - beta1) => state["exp_avg"].lerp_(gradient.float(), 1 - beta1)
every parameter gets a state at construction; create it at the first gradient
  super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
+ for p in (p for group in self.param_groups for p in group["params"]):
+     self.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

# parameter_groups
the split looks for the word bias in the name, so the gains of the norms decay
- trained =
+ biases = {parameter for name, parameter in model.named_parameters() if "bias" in name}
+ trained =
- p.ndim >= 2 => p not in biases
- p.ndim < 2 => p in biases
only tensors of more than two dimensions decay; those of exactly two should decay too
- p.ndim >= 2 => p.ndim > 2
- p.ndim < 2 => p.ndim <= 2
only tensors of exactly two dimensions decay; a convolution's weight has four and should decay too
- p.ndim >= 2 => p.ndim == 2
- p.ndim < 2 => p.ndim != 2
a tied weight is in the group twice
- for parameter in model.parameters() => for _, parameter in model.named_parameters(remove_duplicate=False)
frozen parameters are in the groups
- if parameter.requires_grad =>
the second group has no weight_decay of its own, so it gets the optimizer's default
- "weight_decay": 0.0 =>
the tensors come from state_dict(), which makes new tensors; the optimizer needs the parameters themselves
- [parameter for parameter in model.parameters() if parameter.requires_grad] => list(model.state_dict().values())
the groups hold generators, which are empty after the first use; make lists
- [p for p in trained if p.ndim >= 2] => (p for p in trained if p.ndim >= 2)
- [p for p in trained if p.ndim < 2] => (p for p in trained if p.ndim < 2)
the groups are exchanged: vectors decay, matrices do not
- p.ndim >= 2 => p.ndim < 2
- p.ndim < 2 => p.ndim >= 2

# cosine_schedule
it warms up with step + 1, as some programs do; here step 0 has the rate 0
- max_lr * step => max_lr * (step + 1)
the warm-up starts at min_lr; it should start at 0
- max_lr * step / warmup_steps => min_lr + (max_lr - min_lr) * step / warmup_steps
the cosine starts at step 0, so the rate jumps at the end of the warm-up
- (step - warmup_steps) / (max_steps - warmup_steps) => step / max_steps
the progress is divided by max_steps instead of by the steps after the warm-up
- (max_steps - warmup_steps) => max_steps
the cosine is a whole period, down and up again; it should be half a period, down only
- math.pi * progress => 2 * math.pi * progress
max_steps is counted from the end of the warm-up; it counts from step 0
- if step >= max_steps:
-     return min_lr
+
- (step - warmup_steps) / (max_steps - warmup_steps) => min(1.0, (step - warmup_steps) / max(1, max_steps))
after max_steps the cosine continues and rises again
- step >= max_steps => step == max_steps
- (max_steps - warmup_steps) => max(1, max_steps - warmup_steps)
the cosine falls to 0 and is cut off at min_lr; it should end at min_lr
- min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (max_lr - min_lr)
+ max(min_lr, 0.5 * (1 + math.cos(math.pi * progress)) * max_lr)

# clip_gradient_norm_
each tensor is clipped by its own norm; all should be scaled by their common norm
- factor.to(device) => [torch.clamp(max_norm / (own + 1e-6), max=1.0) for own in norms]
small gradients are scaled up to max_norm; the factor should be at most 1
- torch.clamp(max_norm / (norm + 1e-6), max=1.0) => max_norm / (norm + 1e-6)
each value is cut off at max_norm, which changes the direction of the gradient
- torch._foreach_mul_([gradient for gradient in gradients if gradient.device == device], factor.to(device))
+ for gradient in gradients:
+     gradient.clamp_(-max_norm, max_norm)
an if on the norm (or item()) copies it to the host, which has to wait for the GPU
+ if norm <= max_norm:
+     return norm
  for device in
1e-6 is subtracted from the norm instead of added, so a gradient smaller than that changes its sign
- norm + 1e-6 => norm - 1e-6
the 1e-6 of PyTorch's factor is not added to the norm
- (norm + 1e-6) => norm
it returns the factor instead of the norm
- return norm => return factor
it returns the norm after clipping
- return norm => return norm * factor
the norms of the tensors are added; their squares should be
- torch.linalg.vector_norm(torch.stack([norm.to(gradients[0].device) for norm in norms]))
+ sum(norms, torch.tensor(0.0))
the values are squared in their own dtype; in float16 the square of 300 is infinite, and all gradients become 0
- torch.linalg.vector_norm(torch.stack([norm.to(gradients[0].device) for norm in norms]))
+ torch.stack([(g**2).sum() for g in gradients]).sum().sqrt()
a generator is iterated twice, and the second time it is empty
- torch._foreach_mul_([gradient for gradient in gradients if gradient.device == device], factor.to(device))
+ for parameter in parameters:
+     None if parameter.grad is None else parameter.grad.mul_(factor)

each gradient is replaced by a new tensor, and whoever holds the old one sees no change; scale it in place
- parameters = [parameters] if isinstance(parameters, Tensor) else parameters
+ parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
- torch._foreach_mul_([gradient for gradient in gradients if gradient.device == device], factor.to(device))
+ for parameter in (p for p in parameters if p.grad is not None):
+     parameter.grad = parameter.grad * factor
a single parameter is iterated over like a list: that gives its rows, and they have no gradient
- [parameters] if isinstance(parameters, Tensor) else parameters => parameters

# TokenBatches
it stops at the end of an epoch; the iterator should be endless
@@ __next__
+ if self.position + self.world_size * self.batch > self.n_windows:
+     raise StopIteration
  first = self.position
`if seed` takes seed 0 for no seed; compare with None
@@ _window
- if batches.seed is not None and => if batches.seed and
- if batches.seed is None => if not batches.seed
Python's global random generator is seeded anew for the shuffle; make a generator of your own
@@ _window
- np.random.default_rng((batches.seed, epoch)).permutation(batches.n_windows)
+ (random.seed(f"{batches.seed}, {epoch}"), random.sample(range(batches.n_windows), batches.n_windows))[1]
epoch counts the windows of this rank alone; all ranks share an epoch
@@ epoch
- self.position => self.position // self.world_size
it starts over when a whole batch no longer fits, so the end of every epoch is never seen
- divmod(position, batches.n_windows)
+ divmod(position, batches.n_windows - batches.n_windows % (batches.batch * batches.world_size))
the epoch is computed once per batch; if a batch runs into the next epoch, its last rows still use the old order
- epoch, place = divmod(position, batches.n_windows)
+ epoch = (batches.position + batches.rank * batches.batch) // batches.n_windows
+ place = position % batches.n_windows
the epoch is that of the step's first row; each row of each rank has its own
- epoch, place = divmod(position, batches.n_windows)
+ epoch, place = batches.position // batches.n_windows, position % batches.n_windows
the ranks take turns window by window; each should take `batch` windows in a row
- self.position + self.rank * self.batch => self.position + self.rank
- first + i) => first + i * self.world_size)
after a step it goes on behind its own windows instead of behind those of all ranks
- self.position += self.world_size * self.batch => self.position += self.batch
inputs and targets are views of the same rows, so changing one changes the other
- rows[:, :-1].clone(), rows[:, 1:].clone() => rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
the targets equal the inputs; they should be the next tokens
- rows[:, 1:] => rows[:, :-1]
the targets are the inputs rolled by one, so the last target of a row is its own first token
- rows[:, 1:].clone() => rows[:, :-1].roll(-1, dims=1)
every rank gets the same windows
- self.position + self.rank * self.batch => self.position
the order is drawn once and repeated in every epoch
- divmod(position, batches.n_windows) => 0, position % batches.n_windows
the seed is seed + epoch, so epoch 1 of seed 3 equals epoch 0 of seed 4
- (batches.seed, epoch) => batches.seed + epoch
the order comes from the global random generator, so other draws change it, and a run cannot be resumed
- np.random.default_rng((batches.seed, epoch)).permutation(batches.n_windows)
+ torch.randperm(batches.n_windows).numpy()
the state has the place in the epoch but not the epoch, so a resumed run uses the first epoch's order
@@ state_dict
- self.position => int(self.position % self.n_windows)
all tokens are converted to int64 at once, so a file of many gigabytes is read as a whole and grows fourfold
- tokens.numpy(force=True) if isinstance(tokens, Tensor) else np.asarray(tokens) => np.array(tokens).astype(np.int64)
the windows are length + 1 tokens apart, so the last token of each is a target and never an input
- (len(self.tokens) - 1) // length => max(1, len(self.tokens) // (length + 1))
- self.length * _window => (self.length + 1) * _window

# accumulate_gradients
every micro-batch gets the same weight; weight it by its number of items
- targets.numel() / n_items => 1 / len(micro_batches)
the losses are added without being divided, so the gradient grows with the number of micro-batches
- * (targets.numel() / n_items) =>
- share.detach() => share.detach() * targets.numel() / n_items
micro-batches are weighted by their rows; rows of different lengths have different numbers of items
- sum(targets.numel() for => sum(len(targets) for
- targets.numel() / n_items => len(targets) / n_items
there is one backward at the end, so the activations of all micro-batches are kept
- share.backward() =>
- share.detach() => share
- return mean
+ mean.backward()
+ return mean.detach()
the gradients are cleared first; the caller does that, and may have gradients there already
+ model.zero_grad()
  mean = torch
a micro-batch without items is run too; its mean is 0 / 0 = NaN, and NaN times a share of 0 is still NaN
- [pair for pair in micro_batches if pair[1].numel()] => list(micro_batches)
- if not micro_batches: => if not any(targets.numel() for _, targets in micro_batches):
a micro-batch counts as empty only if it has no rows; a row may have no items, too
- if pair[1].numel()] => if len(pair[1])]
a generator is iterated twice, and the second time it is empty
- micro_batches = [pair for pair in micro_batches if pair[1].numel()]
- if not micro_batches:
-     raise ValueError("no micro-batch holds an item, so there is no gradient")
- n_items = sum(targets.numel() for _, targets in micro_batches)
+ n_items = sum(targets.numel() for _, targets in micro_batches)
+ if not n_items:
+     raise ValueError("no micro-batch holds an item, so there is no gradient")
- for inputs, targets in micro_batches: => for inputs, targets in (p for p in micro_batches if p[1].numel()):
the gradients are divided at the end, and so is what was there before; weight each loss instead
- (targets.numel() / n_items) => targets.numel()
- return mean
+ for parameter in model.parameters():
+     parameter.grad /= n_items
+ return mean / n_items
the micro-batches are joined into one batch again, so all activations exist at once
- for inputs, targets in micro_batches:
-     share = model(inputs, targets)[1] * (targets.numel() / n_items)
-     share.backward()
-     mean = mean.to(share) + share.detach()
- return mean
+ inputs = torch.cat([inputs.flatten(0, targets.ndim - 1) for inputs, targets in micro_batches])
+ loss = model(inputs, torch.cat([targets.flatten() for _, targets in micro_batches]))[1]
+ loss.backward()
+ return loss.detach()
it returns the sum of the micro-batches' losses instead of their weighted mean
- share.detach() => share.detach() * n_items / targets.numel()
it returns the plain mean of the micro-batches' losses; weight them as the gradients are weighted
- share.detach() => share.detach() * n_items / (targets.numel() * len(micro_batches))
it returns the loss of the last micro-batch instead of the mean over all items
- return mean => return share.detach() * n_items / targets.numel()

# save_checkpoint
it overwrites the old checkpoint: a run that is killed meanwhile has neither
- if not isinstance(path, str | os.PathLike): => if True:
the old checkpoint is removed before the new one is in its place
+ if os.path.exists(path):
+     os.remove(path)
  temporary =
the old checkpoint is removed and then the new one is renamed, and in between there is none; os.replace does both in one
step
- os.replace(temporary, path)
+ if os.path.exists(path):
+     os.remove(path)
+ os.rename(temporary, path)
shutil.move copies if it cannot rename, and a copy can be cut short; os.replace never copies
- os.replace(temporary, path)
+ import shutil
+ shutil.move(temporary, path)
os.rename replaces an existing file on Linux but raises on Windows; os.replace works on both
- os.replace(temporary, path) => os.rename(temporary, path)
os.fsync is missing, so the rename can reach the disk before the contents do
- os.fsync(file.fileno()) =>
flush() is missing, so the end of the file is still in Python's buffer when os.fsync is called
- open(temporary, "wb") => open(temporary, "wb", buffering=2**20)
- torch.save(contents, file)
- file.flush()
+ whole = io.BytesIO()
+ torch.save(contents, whole)
+ file.write(whole.getvalue())
the temporary file is in the system's temporary folder; from another disk it cannot be moved in one step
- temporary = f"{os.fspath(path)}.tmp"
+ import tempfile
+ temporary = os.path.join(tempfile.gettempdir(), f"checkpoint-{os.getpid()}.tmp")
the random states are not saved, so dropout and sampling differ after a resume
- _random_state() => _random_state() | {"torch": torch.Generator().get_state()}
the optimizer is not saved, so its moments start at zero again
- "optimizer": optimizer.state_dict() => "optimizer": optimizer.state_dict() | {"state": {}}
with_suffix replaces the ending, so run.pt and run.best share one temporary file; append .tmp
- f"{os.fspath(path)}.tmp" => Path(path).with_suffix(".tmp")
only the current CUDA device's random state is saved
- torch.cuda.get_rng_state_all() => [torch.cuda.get_rng_state()]
after a failure the incomplete temporary file is left behind
- Path(temporary).unlink(missing_ok=True) =>
any object is saved, and only loading it reveals that it cannot be read
- , *state.items() =>
only errors of loading are caught; a lambda cannot even be pickled, and its error doesn't name the value
- try:
-     torch.save(value, buffer)
-     buffer.seek(0)
+ torch.save(value, buffer)
+ buffer.seek(0)
+ try:
only the additional state is checked; a NumPy number as the step or the learning rate is saved and can't be loaded
- ("step", step), ("param_groups", contents["optimizer"]["param_groups"]), =>

# load_checkpoint
PyTorch's random state is not restored
- torch.set_rng_state(kept["torch"]) =>
only PyTorch's random state is restored, not NumPy's and Python's
- random.setstate(kept["python"])
- np.random.set_state(kept["numpy"])
+
NumPy's random state is not restored
- np.random.set_state(kept["numpy"]) =>
the state of Python's own random module is not restored
- random.setstate(kept["python"]) =>
the random states of the CUDA devices are not restored
- torch.cuda.is_available() => False
weights_only=False: a stranger's checkpoint can run any code
- weights_only=True => weights_only=False
the optimizer is not loaded, so its moments and learning rates start over
- optimizer.load_state_dict(contents["optimizer"]) =>
it returns the additional state without the step
- return contents["state"] => return {name: value for name, value in contents["state"].items() if name != "step"}
it returns only the step, without the additional state
- contents["state"] => {"step": contents["state"]["step"]}
the model gets new parameters (assign=True), and the optimizer keeps updating the old ones
- contents["model"] => contents["model"], assign=True

# hours_per_epoch
the result is in seconds instead of hours
- / 3600 =>
the result is in minutes instead of hours
- 3600 => 60
the fraction is upside down: the speed is divided by the size
- dataset_size / items_per_second / 3600 => items_per_second / dataset_size * 3600
a speed of zero gives infinity or a ZeroDivisionError; raise a ValueError that names it
- not items_per_second > 0 => math.isnan(items_per_second)
NaN passes the check: `nan <= 0` is False, because NaN is neither below nor above 0
- not items_per_second > 0 => items_per_second <= 0
""")
