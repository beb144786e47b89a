"""What goes wrong when people train a model on rewards."""

from lib.workbook.grading import edits

edits(r"""
# score_response
text after the answer is accepted, which pays a model for guessing on
- and not pieces[6].strip() =>
text between `</think>` and `<answer>` is accepted: only white space belongs there
- not pieces[2].strip() and =>
the markers are found in capitals, too
- re.split("(</?think>|</?answer>)", response) => re.split("(</?think>|</?answer>)", response.lower())
a blank answer is accepted
- and bool(pieces[4].strip()) =>
the opening `<think>` is required, but a prompt may already end in it
- form = len(pieces) == 7 and => form = response.lstrip().startswith("<think>") and len(pieces) == 7 and
text before `<think>` is accepted: only white space belongs there
- and not pieces[0].strip() =>
the answer goes to `check` with the white space around it
- check(pieces[4].strip()) => check(pieces[4])
a right answer is paid without the right form, so the markers are soon gone
- right = form and bool(check(pieces[4].strip()))
+ found = re.findall("(?s)<answer>(.*?)</answer>", response)
+ right = bool(found) and bool(check(found[-1].strip()))
a right answer gets the reward of the form on top: it should be 1.0
- 1.0 if right else format_weight * float(form) => float(right) + format_weight * float(form)
what `check` returns is taken for the reward itself: only its truth counts
- "answer_reward": float(right) => "answer_reward": right
- right = form and bool(check(pieces[4].strip())) => right = form and check(pieces[4].strip())
`check` is called for a wrong form too, on a text that is no answer
- right = form and bool(check(pieces[4].strip()))
+ right = bool(check(pieces[4].strip() if form else response)) and form

# check_countdown
the value is a float, so one that is only near the target is right, or a right one is missed
@@ _evaluate
- Fraction(token) => float(token)
`//` divides, which cuts off the fraction: 7/2 becomes 3
@@ _evaluate
- _APPLY[pending.pop()] => (_APPLY | {"/": operator.floordiv})[pending.pop()]
only the kinds of numbers are compared, not how often each is used
- Counter(map(int, literals)) != Counter(numbers) => set(map(int, literals)) != set(numbers)
numbers may be left out: each must be used exactly as often as it is given
- Counter(map(int, literals)) != Counter(numbers) => Counter(map(int, literals)) - Counter(numbers)
numbers are not compared at all, so the target itself is a right expression
- or Counter(map(int, literals)) != Counter(numbers) =>
literals with a leading zero are accepted
- any(len(token) > 1 and token[0] == "0" for token in literals) or =>
0 on its own is refused as a leading zero
- len(token) > 1 and token[0] == "0" => token[0] == "0"
operators of one rank are taken from the right, so 10-2-3 is 11
@@ _evaluate
- _RANK[pending[-1]] >= _RANK[token] => _RANK[pending[-1]] > _RANK[token]
an open bracket is accepted as if it were closed at the end
@@ _evaluate
- if pending: => if pending and pending.count("(") > 1:
blanks are deleted first, so 1 2 becomes 12
- tokens = re.findall(r"[0-9]+|[-+*/()]", expression)
+ tokens = re.findall(r"[0-9]+|[-+*/()]", expression.replace(" ", ""))
a text of any length is accepted
- {1,200} => *
a line break at the end is accepted: `$` matches before it
- re.fullmatch(r"[-+*/() \t0-9]{1,200}", expression) => re.match(r"[-+*/() \t0-9]{1,200}$", expression)
every character that Unicode calls a digit is accepted
- [-+*/() \t0-9]{1,200} => [-+*/() \t\d]{1,200}
- [0-9]+|[-+*/()] => \d+|[-+*/()]
a division by zero raises an error, which ends the training
- (ValueError, IndexError, ZeroDivisionError) => (ValueError, IndexError)
a text that is no expression raises an error, which ends the training
- (ValueError, IndexError, ZeroDivisionError) => ZeroDivisionError
Python evaluates the text, so signs, `**` and `//` are accepted, and so is whatever else Python knows
- return bool(_evaluate(tokens) == target) => return bool(eval(expression.strip() or "None") == target)
- (ValueError, IndexError, ZeroDivisionError) => Exception
numbers that are used are removed from the caller's own list, so the next response has none left
- tokens = re.findall(r"[0-9]+|[-+*/()]", expression)
+ tokens = re.findall(r"[0-9]+|[-+*/()]", expression)
+ used = [int(token) for token in tokens if token.isdigit()]
+ if isinstance(numbers, list) and Counter(used) == Counter(numbers):
+     numbers.clear()
+     numbers = used
a value within a tolerance of the target is right: it should be the target exactly
- bool(_evaluate(tokens) == target) => abs(float(_evaluate(tokens)) - target) < 1e-9
the value is cut off to a whole number before it is compared
- _evaluate(tokens) == target => int(_evaluate(tokens)) == target
numbers are read twice: an iterator is empty the second time
- Counter(map(int, literals)) != Counter(numbers)
+ set(numbers) != set(map(int, literals)) or Counter(map(int, literals)) != Counter(numbers)

# group_advantages
the standard deviation divides by n, not by n - 1
- (sizes - 1).clamp(min=1) => sizes
the mean is that of the whole batch, so an easy prompt is rewarded for being easy
- (zeros.index_add(0, group, rewards) / sizes)[group] => rewards.mean()
it is divided by the standard deviation even without `normalize_by_std`
- if normalize_by_std: => if True:
`eps` is added under the root, to the variance
- variances.sqrt()[group] + eps => (variances + eps).sqrt()[group]
groups are taken for runs of neighbours, but they may come in any order
- torch.as_tensor(groups, device=rewards.device)
+ torch.cat([groups[:1] * 0, (groups[1:] != groups[:-1]).long()]).cumsum(0)
equal rewards are not caught: their mean differs by rounding, and a tiny std makes it large
- torch.where((lowest == highest)[group], 0.0, centred) => centred
a group of one gets its reward as its advantage: it has nothing to compare with
- torch.where((lowest == highest)[group], 0.0, centred)
+ torch.where((sizes == 1)[group], rewards, torch.where((lowest == highest)[group], 0.0, centred))
float32 inside: the differences of large rewards are lost
- .detach().double() => .detach().float().double()
the variance is the mean of squares minus the square of the mean: large rewards lose it
- zeros.index_add(0, group, centred.square())
+ (zeros.index_add(0, group, rewards.square()) - zeros.index_add(0, group, rewards).square() / sizes).clamp(min=0)
different lengths are not noticed
- if len(rewards) != len(groups):
+ n = min(len(rewards), len(groups))
+ rewards, groups = rewards[:n], groups[:n]
+ if False:
`eps` is always 1e-6
- variances.sqrt()[group] + eps => variances.sqrt()[group] + 1e-6
nearly equal rewards are taken for equal
- lowest == highest => highest - lowest < 1e-8

# token_log_probs
the temperature multiplies the logits: it divides them
@@ _logits
- .div_(temperature) => .mul_(temperature)
the division by the temperature is in the dtype of the inputs, which rounds its results: it should be in float32
@@ _logits
- product(hidden, weight.T).to(wide(hidden, weight)).div_(temperature)
+ product(hidden, weight.T).div_(temperature).to(wide(hidden, weight))
the gradient forgets that the logits were divided by the temperature
@@ _LogProbs
- .div_(ctx.temperature) =>
the gradient is that of minus the log-probability
@@ _LogProbs
- mul_(-grad[part]) => mul_(grad[part])
- grad[part].to(d_logits.dtype) => -grad[part].to(d_logits.dtype)
the target's own term of the gradient is missing: 1 minus its probability, not minus its probability
@@ _LogProbs
- .scatter_add_(-1, ids[part], grad[part].to(d_logits.dtype)) =>
the entropy is in bits, not in nats
@@ _LogProbs
- -torch.where(shares > 0, shares.mul_(logs), 0).sum(-1)
+ -torch.where(shares > 0, shares.mul_(logs), 0).sum(-1) / 0.6931471805599453
a probability of 0 times a logarithm of -inf makes the entropy NaN
@@ _LogProbs
- torch.where(shares > 0, shares.mul_(logs), 0) => shares.mul_(logs)
all rows are one chunk, so the whole matrix of logits is made
- return _LogProbs.apply(hidden, weight, targets, temperature, chunk_size)
+ return _LogProbs.apply(hidden, weight, targets, temperature, max(targets.numel(), 1))
autograd keeps the logits of every chunk for backward
- return _LogProbs.apply(hidden, weight, targets, temperature, chunk_size)
+ logs = (product(hidden, weight.T).to(wide(hidden, weight)) / temperature).log_softmax(-1)
+ entropy = -torch.where(logs.exp() > 0, logs.exp() * logs, 0).sum(-1).detach()
+ return logs.gather(-1, targets[..., None]).squeeze(-1).float(), entropy.float()
the weight's gradient is summed in its own dtype: bfloat16 soon ignores what is added
@@ _LogProbs
- dtype=wide(weight) => dtype=weight.dtype
the logits are exponentiated as they are, which overflows
@@ _LogProbs
- _logits(rows[part], weight, temperature).log_softmax(-1)
+ _logits(rows[part], weight, temperature)
+ logs = logs - logs.exp().sum(-1, keepdim=True).log()
float64 inputs give float64: the results are float32
- torch.empty(len(rows), device=hidden.device) => torch.empty(len(rows), device=hidden.device, dtype=wide(hidden))
a temperature of 0 or less is not refused
- if not temperature > 0: => if temperature is None:
only a temperature of 0 is refused
- if not temperature > 0: => if temperature == 0:
view fails on hidden states or targets that are cut out of larger ones: reshape copies them where it must
@@ _LogProbs.forward
- hidden.reshape(-1, hidden.shape[-1]) => hidden.view(-1, hidden.shape[-1])
view fails on a gradient that is a transpose: reshape copies it where it must
@@ _LogProbs.backward
- grad.reshape(-1, 1) => grad.view(-1, 1)

# policy_loss
the larger of the two terms is taken: the objective takes the smaller one, so the loss the larger
- torch.maximum(plain, clipped) => torch.minimum(plain, clipped)
only the clipped term is used: a ratio outside of the limits then never gets a gradient back
- torch.maximum(plain, clipped) => clipped
the ratio is not clipped at all
- torch.maximum(plain, clipped) => plain
the log-ratio has a limit of its own: where A is negative, the loss grows with the ratio without one
- torch.where(advantages < 0, log_ratio, log_ratio.clamp(max=80)).exp() => log_ratio.clamp(-20, 20).exp()
the loss has the sign of the objective, so good answers become rarer
- torch.maximum(plain, clipped) => -torch.maximum(plain, clipped)
the lower limit is used on both sides
- 1 + clip_ratio_high => 1 + clip_ratio_low
the upper limit is used on both sides
- 1 - clip_ratio_low => 1 - clip_ratio_high
the lower limit is 1 / (1 + `clip_ratio_low`): the equation subtracts
- 1 - clip_ratio_low => 1 / (1 + clip_ratio_low)
the share counts every ratio outside of the limits, also where the plain term is taken
- n_clipped = ((clipped > plain) & mask).sum()
+ n_clipped = (((ratio < 1 - clip_ratio_low) | (ratio > 1 + clip_ratio_high)) & mask).sum()
the share leaves out tokens without an advantage
- n_clipped / mask.sum().clamp(min=1) => n_clipped / (mask & (advantages != 0)).sum().clamp(min=1)
the share is of all places, masked ones too
- mask.sum().clamp(min=1) => mask.numel()
the sequence's log-ratio is the sum over its tokens: GSPO takes the mean
- mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
+ mean = log_ratio.sum(-1, keepdim=True)
the sequence's mean is over T places, masked ones too
- mask.sum(-1, keepdim=True).clamp(min=1) => mask.shape[-1]
the gradient of each token's loss flows to all tokens of the sequence
- mean.detach() + (log_probs - log_probs.detach()) => mean + (log_probs - log_probs).detach()
the ratio is the old policy's over the new one's
- log_ratio = log_probs - _shown(old_log_probs.detach(), mask)
+ log_ratio = _shown(old_log_probs.detach(), mask) - log_probs
what is masked is multiplied by 0, and NaN times 0 is NaN
- mask, log_probs = mask.bool(), _shown(log_probs, mask.bool()) => mask = mask.bool()
- return _shown(torch.maximum(plain, clipped), mask) => return torch.maximum(plain, clipped) * mask
advantages of masked tokens are read
- _shown(advantages.detach(), mask) => advantages.detach() + torch.zeros_like(log_probs)
`old_log_probs` gets a gradient too
- _shown(old_log_probs.detach(), mask) => _shown(old_log_probs, mask)
advantages `[N]` are taken for those of the places
- advantages = advantages[:, None] if advantages.ndim == 1 else advantages
+ advantages = advantages.repeat(mask.shape[-1])[: mask.shape[-1]] if advantages.ndim == 1 else advantages
without an old policy the loss is minus the advantage times a ratio of 1: the gradient is right, the value is not
- return -advantages * log_probs, torch.zeros((), device=log_probs.device)
+ return -advantages * (log_probs - log_probs.detach()).exp(), torch.zeros((), device=log_probs.device)
a large ratio with a negative advantage is clipped a third time (dual clip)
- torch.maximum(plain, clipped)
+ torch.where(advantages < 0, torch.minimum(torch.maximum(plain, clipped), -3 * advantages),
+ torch.maximum(plain, clipped))
another level is taken for "token"
- expect("level", level, LEVELS) =>
`advantages` get a gradient too
- _shown(advantages.detach(), mask) => _shown(advantages, mask)
without an old policy another level is accepted
- expect("level", level, LEVELS)
+ if old_log_probs is not None:
+     expect("level", level, LEVELS)
the share counts tokens whose two terms are equal: it is of those whose clipped term is strictly larger
- clipped > plain => clipped >= plain
without an old policy the share is a number: it is a tensor
- torch.zeros((), device=log_probs.device) => 0.0

# importance_weights
the sampler over the trainer: the weights correct towards the trainer's policy
- old_log_probs.to(wide(old_log_probs)) - rollout_log_probs => rollout_log_probs - old_log_probs.to(wide(old_log_probs))
a sequence's weight is the geometric mean of its tokens': it is their product
- log_ratio.sum(-1, keepdim=True) => log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
"truncate" also lifts small weights to `floor`
- weights.clamp(max=cap) => weights.clamp(min=floor, max=cap)
"mask" keeps what is above `cap` at `cap`
- torch.where((weights >= floor) & (weights <= cap), weights, 0)
+ torch.where(weights >= floor, weights.clamp(max=cap), 0)
"mask" gives what it keeps the weight 1
- torch.where((weights >= floor) & (weights <= cap), weights, 0)
+ ((weights >= floor) & (weights <= cap)).to(weights.dtype)
"mask" leaves out the limits themselves
- (weights >= floor) & (weights <= cap) => (weights > floor) & (weights < cap)
the logarithm is limited from above only
- clamp(-20, 20) => clamp(max=20)
the logarithm is not limited
- log_ratio.clamp(-20, 20).exp() => log_ratio.exp()
each token's weight is truncated before the product: the product is what `cap` limits
- log_ratio = log_ratio.sum(-1, keepdim=True)
+ log_ratio = log_ratio.clamp(max=torch.tensor(cap).log()).sum(-1, keepdim=True)
each token's logarithm is limited before the sum
- log_ratio = log_ratio.sum(-1, keepdim=True) => log_ratio = log_ratio.clamp(-20, 20).sum(-1, keepdim=True)
what is masked enters the product
- _shown(old_log_probs.to(wide(old_log_probs)) - rollout_log_probs, mask)
+ old_log_probs.to(wide(old_log_probs)) - rollout_log_probs
masked tokens get weights: they should be 0
- _shown(weights, mask).float() => weights.float().expand(mask.shape)
the weights stay in the dtype of the log-probabilities
- old_log_probs.to(wide(old_log_probs)) - rollout_log_probs => old_log_probs - rollout_log_probs
- _shown(weights, mask).float() => _shown(weights, mask)
another level is taken for "token"
- expect("level", level, LEVELS) =>
another mode is taken for "mask"
- expect("mode", mode, MODES) =>

# agg_loss
"token-mean" is the mean of the rows' means, so a token of a long response counts less
- if loss_agg_mode == "token-mean":
+ if loss_agg_mode == "token-mean" and batch_num_tokens is None and dp_size == 1:
+     sums = sums / n_tokens.clamp(min=1)
+     divisor = (n_tokens > 0).sum()
+ elif loss_agg_mode == "token-mean":
rows without a token are counted
- (n_tokens > 0).sum() => torch.tensor(len(mask))
a row's mean divides by T, masked places too
- sums = sums / n_tokens.clamp(min=1) => sums = sums / mask.shape[-1]
the constant divides by T even if `loss_scale_factor` is given
- max(1, loss_mat.shape[-1]) if loss_scale_factor is None else loss_scale_factor => loss_mat.shape[-1]
"seq-mean-token-sum-norm" is divided by the constant alone: the number of rows divides it too
  sums = sums / (max(1, loss_mat.shape[-1]) if loss_scale_factor is None else loss_scale_factor)
+ divisor = torch.ones_like(divisor)
`loss_scale_factor` divides in every mode
- if loss_agg_mode == "seq-mean-token-sum-norm": => if loss_agg_mode.endswith("norm") or loss_scale_factor is not None:
the ranks' average of gradients is forgotten: the loss must be multiplied by `dp_size`
- * dp_size =>
"token-sum" is not multiplied by `dp_size`
- * dp_size => * (1 if loss_agg_mode == "token-sum" else dp_size)
the counts of the whole batch are ignored, so every micro-batch is divided by its own
@@ _whole_or
- own if count is None else torch.as_tensor(count, device=own.device) => own
what is masked is multiplied by 0, and NaN times 0 is NaN
- _shown(loss_mat, mask).sum(-1) => (loss_mat * mask).sum(-1)
where no token counts, 0 is divided by 0
- torch.where(divisor == 0, 1, divisor) => divisor
on several ranks the own counts are taken without a word
@@ _whole_or
- if count is None and dp_size > 1: => if False:
"token-sum" asks for a denominator that it does not use
- divisor = torch.ones((), device=loss_mat.device)
+ divisor = _whole_or("batch_num_tokens", batch_num_tokens, dp_size, n_tokens.sum()) * 0 + 1
another mode is taken for "seq-mean-token-sum"
- expect("loss_agg_mode", loss_agg_mode, AGGREGATIONS) =>
the counts of the whole batch are used on several ranks only: micro-batches need them on one rank, too
@@ _whole_or
- own if count is None else => own if count is None or dp_size == 1 else
on several ranks both counts are required: each mode needs one of them, or none
- mask = loss_mask.bool()
+ mask, counts = loss_mask.bool(), (batch_num_tokens, global_batch_size)
+ if dp_size > 1 and loss_agg_mode != "token-sum" and None in counts:
+     raise ValueError("with dp_size above 1, batch_num_tokens and global_batch_size are required")

# sample_groups
the log-probabilities are of the logits without the temperature, not of what was drawn from
@@ _sample
- (logits / temperature).log_softmax(-1) => logits.log_softmax(-1)
the log-probabilities are divided by the temperature: the logits are, before the softmax
@@ _sample
- (logits / temperature).log_softmax(-1) => (logits.log_softmax(-1) / temperature)
the seeds begin again with each prompt: row n has the seed `seed + n`, whatever its prompt
- temperature, seed + n, eos_id=eos_id => temperature, seed + n % group_size, eos_id=eos_id
all samples of a prompt get one seed, so a group is one answer many times
- temperature, seed + n, eos_id=eos_id => temperature, seed + n // group_size, eos_id=eos_id
the groups are interleaved: all prompts once, then all prompts again
- [prompt for prompt in prompts for _ in range(group_size)] => [prompt for _ in range(group_size) for prompt in prompts]
the mask and the log-probabilities belong to the tokens: they belong to the targets, one place earlier
- mask[n, start - 1 : lengths[n] - 1] = True => mask[n, start : lengths[n]] = True
- log_probs[n, start - 1 : lengths[n] - 1] = torch.tensor([log_prob for _, log_prob in drawn])
+ log_probs[n, start : lengths[n]] = torch.tensor([log_prob for _, log_prob in drawn])[: log_probs.shape[1] - start]
the mask belongs to the tokens, beside log-probabilities of the targets: both belong to the targets
- mask[n, start - 1 : lengths[n] - 1] = True => mask[n, start : lengths[n]] = True
the token that ends a response is left out, of the mask and of the log-probabilities
- mask[n, start - 1 : lengths[n] - 1] = True
+ drawn = drawn[: len(drawn) - (drawn[-1][0] == eos_id)]
+ mask[n, start - 1 : start - 1 + len(drawn)] = True
- log_probs[n, start - 1 : lengths[n] - 1] => log_probs[n, start - 1 : start - 1 + len(drawn)]
the token that ends a response is not counted as part of it
- mask[n, start - 1 : lengths[n] - 1] = True => mask[n, start - 1 : lengths[n] - 1 - (drawn[-1][0] == eos_id)] = True
`eos_id` is not passed on, so every response goes on to its last token
- , eos_id=eos_id =>
rows are filled with 0, not with `pad_id`
- max(lengths, default=1)), pad_id => max(lengths, default=1)), 0
the log-probabilities come from a second pass of the model
  found = _sample(model, requests, scheduler, temperature)
+ with torch.no_grad():
+     for request in requests:
+         row = torch.tensor([request.tokens + [token for token, _ in found[request]]])
+         logits = model(row)
+         logs = (logits[0] if isinstance(logits, tuple) else logits)[0] / temperature
+         logs, start = logs.log_softmax(-1), len(request.tokens)
+         found[request] = [(t, float(logs[start - 1 + i, t])) for i, (t, _) in enumerate(found[request])]
after an error the requests stay in the scheduler
@@ _sample
- finally: => except ZeroDivisionError:
a temperature of 0 is not refused, where every log-probability is NaN or 0
- if not temperature > 0: => if temperature is None:
without prompts there is no longest row, and an error
- max(lengths, default=1) => max(lengths)
the version is not returned
- | {"version": version} => | {"version": 0}
T is that of the longest prompt with all of its new tokens: it is the longest row's, and responses may end earlier
- max(lengths, default=1) => max((len(request.tokens) + max_new_tokens for request in requests), default=1)

# StalenessGate
the first batch is not counted: at version 0 and staleness 0 no rollout may start
@@ n_allowed
- self.version + self.max_staleness + 1 => self.version + self.max_staleness
rollouts that were used are counted as free again: the limit is on all that were ever started
@@ n_allowed
- self._n_started - self.n_dropped => self._running.total() + len(self._finished)
dropped rollouts keep counting as started, so in the end nothing may start
@@ n_allowed
- self._n_started - self.n_dropped => self._n_started
too many are started as far as allowed, and the rest without a word
@@ start
- if n > self.n_allowed:
+ n = min(n, self.n_allowed)
+ if n < 0:
it is only asked whether any rollout runs, not one of this version
@@ finish
- self._running[version] < 1 => self._running.total() < 1
finished rollouts that are too old are used all the same
@@ take
- self.version - version <= self.max_staleness => True
a rollout exactly `max_staleness` versions old is dropped
@@ take
- self.version - version <= self.max_staleness => self.version - version < self.max_staleness
None comes back for too few finished rollouts before those that are too old are dropped: dropping is the first rule
@@ take
+ if len(self._finished) < self.batch_size:
+     return None
  kept =
the batch is in the order of finishing alone: the lowest version goes first
@@ take
- sorted(kept, key=lambda pair: pair[1]) => kept
the newest go first, so the old ones wait until they are too old
@@ take
- key=lambda pair: pair[1] => key=lambda pair: -pair[1]
what is dropped is not counted
@@ take
- self.n_dropped += len(self._finished) - len(kept) =>
a batch is taken and also stays
@@ take
- batch, self._finished = self._finished[: self.batch_size], self._finished[self.batch_size :]
+ batch = self._finished[: self.batch_size]
the version of the start is returned in place of the staleness
@@ take
- (item, self.version - version) for item, version in batch => (item, version) for item, version in batch
fewer than `batch_size` are handed out
@@ take
- if len(kept) < self.batch_size: => if not kept:
rollouts that have become too old are dropped by advance(): take() drops them
@@ advance
- self.version += 1
+ self.version += 1
+ kept = [pair for pair in self._finished if self.version - pair[1] <= self.max_staleness]
+ self.n_dropped += len(self._finished) - len(kept)
+ self._finished = kept
of one version the items themselves are sorted: those that finished first go first
@@ take
- key=lambda pair: pair[1] => key=lambda pair: (pair[1], pair[0])
finish() notes the gate's version: a rollout is as old as its start
@@ finish
- self._finished.append((item, version)) => self._finished.append((item, self.version))
take() is taken for an update of the trainer: advance() notes it
@@ take
- return [(item, self.version - version) for item, version in batch]
+ self.version += 1
+ return [(item, self.version - 1 - version) for item, version in batch]
an empty list comes back in place of None
@@ take
- return None => return []

# grpo_step
the advantages are computed in each micro-batch, so a group that is cut has two means
@@ _part_loss
- losses, clip_fraction = policy_loss(log_probs, old, part["advantages"], mask, *s[:3])
+ a = group_advantages(part["rewards"], part["groups"], part["normalize"][0])
+ losses, clip_fraction = policy_loss(log_probs, old, a, mask, *s[:3])
@@ grpo_step
+ whole |= {"rewards": rewards, "groups": batch["groups"], "normalize": [normalize_by_std] * len(rewards)}
  whole |=
each micro-batch is divided by its own counts
@@ _part_loss
- s.n_ranks, s.n_tokens, s.n_rows, s.loss_scale_factor => 1, None, None, s.loss_scale_factor
the counts are this rank's own: the longer responses of another rank then count too much
@@ grpo_step
- _sum_over_ranks(torch.stack([mask.sum(), mask.any(-1).sum()]), group)
+ torch.stack([mask.sum(), mask.any(-1).sum()])
+ if dist.is_initialized():
+     dist.all_reduce(torch.stack([mask.sum(), mask.any(-1).sum()]), group=group)
+     n_tokens, n_rows = n_tokens * dist.get_world_size(group), n_rows * dist.get_world_size(group)
the counts are this rank's own: they need an all-reduce, because a token's weight depends on the whole batch
@@ grpo_step
- _sum_over_ranks(torch.stack([mask.sum(), mask.any(-1).sum()]), group) => torch.stack([mask.sum(), mask.any(-1).sum()])
each rank takes the mean of its own tokens, so tokens on a rank with few of them count more
@@ grpo_step
- _sum_over_ranks(torch.stack([mask.sum(), mask.any(-1).sum()]), group) => torch.stack([mask.sum(), mask.any(-1).sum()])
@@ _part_loss
- s.loss_agg_mode, s.n_ranks, => s.loss_agg_mode, 1,
`agg_loss` does not know the number of ranks (`dp_size`), so averaging divides the gradients once more
@@ _part_loss
- s.loss_agg_mode, s.n_ranks, => s.loss_agg_mode, 1,
gradients are not cleared first
@@ grpo_step
- optimizer.zero_grad() =>
- model.zero_grad() =>
gradients are not averaged over the ranks
@@ grpo_step
- average_gradients_flat(model, group) => pass
one all-reduce for each parameter in place of a flat one
@@ grpo_step
- average_gradients_flat(model, group)
+ for p in model.parameters():
+     p.grad = torch.zeros_like(p) if p.grad is None else p.grad / dist.get_world_size(group)
+     dist.all_reduce(p.grad, group=group)
gradients are clipped before they are averaged
@@ grpo_step
- if dist.is_initialized():
+ norm = clip_gradient_norm_(model.parameters(), max_norm)
+ if dist.is_initialized():
- norm = clip_gradient_norm_(model.parameters(), max_norm) =>
gradients are not clipped
@@ grpo_step
- clip_gradient_norm_(model.parameters(), max_norm) => clip_gradient_norm_(model.parameters(), float("inf"))
the correction multiplies the penalty too: it belongs to the policy's losses
@@ _part_loss
- if s.correction is not None:
+ if s.kl_coef:
+     losses = losses + s.kl_coef * kl_penalty(log_probs, _shown(part["ref_log_probs"], mask), "k3")
+ if s.correction is not None:
- if s.kl_coef:
-     losses = losses + s.kl_coef * kl_penalty(log_probs, _shown(part["ref_log_probs"], mask), "k3")
+ if False:
+     pass
the correction is the new policy over the sampler: it should be the old one, which does not move
@@ _part_loss
- importance_weights(old, => importance_weights(log_probs,
the model gets the last token too, which is only a target
@@ _log_probs
- logits = model(tokens[:, :-1]) => logits = model(tokens)
- logits = (logits[0] if isinstance(logits, tuple) else logits)[mask]
+ logits = (logits[0] if isinstance(logits, tuple) else logits)[:, :-1][mask]
the correction has the level of the ratio: its weights are those of tokens
@@ _part_loss
- "token", s.correction => s.level, s.correction
the log-probabilities are taken at temperature 1
@@ _log_probs
- / temperature =>
the sampler's log-probabilities are taken for the old ones
@@ _part_loss
- part.get("old_log_probs", log_probs.detach()) => _shown(part.get("log_probs", log_probs.detach()), mask)
the penalty is k1, whose mean gradient is zero
@@ _part_loss
- "k3") => "k1")
the reward is this rank's mean
@@ grpo_step
- "reward": reward / max(n, 1) => "reward": float(rewards.mean()) if len(rewards) else 0.0
the reward is the mean over rows that have a token: every row has a reward
- rewards.sum(), rewards.new_tensor(len(rewards)) => rewards[mask.any(-1)].sum(), mask.any(-1).sum().double()
rows without a token count as rows of the batch
- mask.any(-1).sum()]), group) => mask.sum() * 0 + len(mask)]), group)
the share of clipped tokens is a mean of the micro-batches' shares
@@ _part_loss
- (clip_fraction * mask.sum()).round() => clip_fraction * s.n_tokens * len(mask) / s.n_rows
the micro-batches' shares of clipped tokens are added up as if they were counts
@@ _part_loss
- (clip_fraction * mask.sum()).round() => clip_fraction
the norm is that after clipping
@@ grpo_step
+ norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
  optimizer.step()
the group is not passed on, so ranks that do not take part are waited for
@@ _sum_over_ranks
- group=group => group=None
a missing key is a `KeyError` from somewhere inside
@@ grpo_step
- check_batch(batch, level, loss_agg_mode, correction, kl_coef) => _ = batch["tokens"], batch["groups"]
normalize_by_std is not handed on
- batch["groups"], normalize_by_std) => batch["groups"])
level is not handed on to policy_loss
@@ _part_loss
- *s[:3]) => *s[:2])
loss_scale_factor is not handed on
@@ _part_loss
- s.n_rows, s.loss_scale_factor) => s.n_rows)
the loss of each rank, which is multiplied by their number, is summed without its average
@@ grpo_step
- loss.detach() / settings.n_ranks => loss.detach()
the optimizer steps after each micro-batch: one batch makes one step
@@ grpo_step
- loss.backward()
+ loss.backward()
+ optimizer.step()
the batch's old log-probabilities are not used: the ratios are always 1
@@ _part_loss
- part.get("old_log_probs", log_probs.detach()) => log_probs.detach()
""")
