"""What goes wrong when people fine-tune: masks that are one token off, means of means, updates merged twice."""

from lib.workbook.grading import edits

edits(r"""
# render_chat
assistant_start is learned: the program writes it, so the model never has to
- add([special[f"{role}_start"]], 0) => add([special[f"{role}_start"]], int(role == "assistant"))
assistant_end is not learned: the model would never learn to stop
- add([special[f"{role}_end"]], int(role == "assistant")) => add([special[f"{role}_end"]], 0)
the user's words are learned, too
- int(role == "assistant" and markers != "output") => int(markers != "output")
what Python printed is learned: at inference the interpreter writes it, not the model
- int(role == "assistant" and markers != "output") => int(role == "assistant")
the two markers around Python's code are missing
- if markers: => if markers == "output":
the two markers around Python's code are not learned: the assistant has to call the interpreter itself
  add(tokens, int(role == "assistant" and markers != "output"))
+ if markers == "python":
+     mask[-len(tokens)] = mask[-1] = 0
the two markers around Python's output are missing
- if markers: => if markers == "python":
the conversation has no bos
- ids, mask = [special["bos"]], [0] => ids, mask = [], []
the system message is left out
- messages[0]["content"] + "\n\n" + turns[0][1] => turns[0][1]
the system message and the user's are joined by one newline: two belong between them
- "\n\n" => "\n"
the system message is written into the caller's own messages
@@ _alternating
- turns = [(message["role"], message["content"]) for message in messages[first:]]
+ if first:
+     messages[1]["content"] = messages[0]["content"] + "\n\n" + messages[1]["content"]
+ turns = [(message["role"], message["content"]) for message in messages[first:]]
- if first:
-     turns[0] = ("user", messages[0]["content"] + "\n\n" + turns[0][1])
+
the last max_length tokens are kept instead of the first
- return ids[:max_length], mask[:max_length]
+ return ids[-max_length if max_length else None :], mask[-max_length if max_length else None :]
the mask is not cut with the ids
- mask[:max_length] => mask
a prompt does not end with assistant_start
- if add_generation_prompt: => if False:
the assistant_start at the end of a prompt is marked as learned
- add([special["assistant_start"]], 0) => add([special["assistant_start"]], 1)
roles may come in any order
- if message["role"] != ("user", "assistant")[i % 2]: => if message["role"] not in ("user", "assistant"):
a system message alone is taken for a conversation, and lost
- if len(messages) == first == 1: => if False:
a prompt may end with any message
- if prompt and (not messages or messages[-1]["role"] != "user"): => if False:
a prompt without messages has a last one, too
- (not messages or messages[-1]["role"] != "user") => messages[-1]["role"] != "user"
the index in the message does not count the system message, so it points to the wrong one
- {i + first} => {i}
a part of an unknown type is taken for text
- if part["type"] not in _MARKERS: => if False:
- _MARKERS[part["type"]], encode(part["text"]) => _MARKERS.get(part["type"], ""), encode(part["text"])
a max_length of 0 keeps everything: only None does
- ids[:max_length], mask[:max_length] => ids[: max_length or None], mask[: max_length or None]
white space at the ends of a text is taken off: it is text, too
- encode(part["text"]) => encode(part["text"].strip())
an empty answer loses its turn, and with it the marker that ends it
- for role, content in _alternating(messages, add_generation_prompt):
+ for role, content in [turn for turn in _alternating(messages, add_generation_prompt) if turn[1]]:
all roles are joined in one text with their markers written out, so a typed marker looks like a real one
- encode(part["text"]) => [i for i in encode(part["text"].replace("<|user_end|>", chr(126)))]
the system message is encoded apart from the user's: together they may have other tokens
@@ _alternating
- turns[0] = ("user", messages[0]["content"] + "\n\n" + turns[0][1])
+ parts = messages[0]["content"] + "\n\n", turns[0][1]
+ turns[0] = ("user", [{"type": "text", "text": text} for text in parts])
ids and mask are tensors: two lists are wanted
- return ids[:max_length], mask[:max_length] => return torch.tensor(ids[:max_length]), torch.tensor(mask[:max_length])
only the last answer is learned: every answer of the assistant is
- return ids[:max_length], mask[:max_length]
+ last = max([i for i, token in enumerate(ids) if token == special["assistant_start"]], default=0)
+ return ids[:max_length], [int(learned and i > last) for i, learned in enumerate(mask)][:max_length]
the cut comes before assistant_start, so a prompt is one token longer than max_length
- if add_generation_prompt:
-     add([special["assistant_start"]], 0)
- return ids[:max_length], mask[:max_length]
+ ids, mask = ids[:max_length], mask[:max_length]
+ return (ids + [special["assistant_start"]], mask + [0]) if add_generation_prompt else (ids, mask)

# pack_conversations
the mask of the input decides: the pair predicts the target, whose own mask counts
- mask[1 : length + 1] => mask[: len(ids[: length + 1]) - 1]
targets are masked by their input's mask, although a conversation is left out by the right one
- zip(ids[1:], learned, strict=True) => zip(ids[1:], mask, strict=False)
masked targets keep their ids, so the user's words are learned
- token if own else ignore_index => token
a conversation is cut to length ids, which gives one pair too few
- ids, learned = ids[: length + 1], mask[1 : length + 1] => ids, learned = ids[:length], mask[1:length]
only the last row is tried: first fit begins at the first
- for i, left in enumerate(room) if => for i, left in list(enumerate(room))[-1:] if
the fullest row with room is taken: first fit takes the first
- for i, left in enumerate(room) if => for i, left in sorted(enumerate(room), key=lambda pair: pair[1]) if
a row is full one position too early
- if n <= left => if n < left
conversations are sorted by length, longest first: the order given counts
- enumerate(conversations) => enumerate(sorted(conversations, key=lambda c: -len(c[0])))
a conversation without anything to learn takes up room
- if not any(learned): => if not learned:
documents are counted through all rows: each row begins with 0
- [row["documents"][-1] + 1 if row["documents"] else 0] * n => [index] * n
positions run on through the row: each conversation begins with 0
- range(n) => range(len(row["positions"]), len(row["positions"]) + n)
the padding has document 0, so it seems to belong to the first conversation
- "documents": -1 => "documents": 0
targets in the padding are pad_id, so padding is learned
- "targets": ignore_index} => "targets": pad_id}
pad_id is ignored
- {"inputs": pad_id, "targets": ignore_index} => {"targets": ignore_index}
no conversation gives no columns either: the shape is [0, T]
- .view(-1, length) =>
ids and mask of different lengths are accepted
- if len(ids) != len(mask): => if False:
- strict=True => strict=False
ids and mask are compared after the cut, which can hide that they differ
- if len(ids) != len(mask): => if len(ids[: length + 1]) != len(mask[: length + 1]):
the error does not say which conversation is meant
- conversation {index} has => a conversation has
a conversation that does not fit in the rest of a row is split
+ if room and 0 < room[-1] < len(learned):
+     ids, learned = ids[: room[-1] + 1], learned[: room[-1]]
  n = len(learned)
padding is looked for by its id, which a conversation may have, too: then targets of learned tokens are lost
- return {name: torch.tensor(values, dtype=torch.int64).view(-1, length) for name, values in padded.items()}
+ found = {name: torch.tensor(values, dtype=torch.int64).view(-1, length) for name, values in padded.items()}
+ return found | {"targets": found["targets"].masked_fill(found["inputs"] == pad_id, ignore_index)}
padding is looked for by its id, which a conversation may have, too: then it has holes
- return {name: torch.tensor(values, dtype=torch.int64).view(-1, length) for name, values in padded.items()}
+ found = {name: torch.tensor(values, dtype=torch.int64).view(-1, length) for name, values in padded.items()}
+ return found | {"documents": found["documents"].masked_fill(found["inputs"] == pad_id, -1)}
a conversation that is longer than a row is left out: it is cut
- if not any(learned): => if not any(learned) or len(mask) > length + 1:
a conversation whose answer the cut removes stays: nothing of it can be learned
- if not any(learned): => if not learned or not any(mask[1:]):

# packed_mask
conversation 0 is taken for padding: that is -1
- (documents >= 0) => (documents > 0)
the mask is made on the CPU: documents on a GPU need it there
- dtype=torch.bool, device=documents.device => dtype=torch.bool
conversations in one row see each other: the mask is only causal
- (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, :, None]
+ (documents[:, :, None] >= -1) & (documents[:, None, :] >= -1)
a position may attend to later ones of its conversation
- same & itself.new_ones(t, t).tril() => same
a position in the padding may attend to nothing, so its softmax divides 0 by 0
- ((same & itself.new_ones(t, t).tril()) | itself) => (same & itself.new_ones(t, t).tril())
the padding is taken for one more conversation
- & (documents >= 0)[:, :, None] =>
a position may not attend to itself
- ((same & itself.new_ones(t, t).tril()) | itself) => ((same & itself.new_ones(t, t).tril(-1)) | (itself & ~same))
True means masked here; in chapter 3 it means "may attend"
- return ((same => return ~((same
the dimension for the heads is missing
- [:, None] =>
every row has the mask of the first
- [:, None] => [:1, None].expand(len(documents), 1, t, t)
earlier conversations may be attended to, too
- documents[:, :, None] == documents[:, None, :] => documents[:, :, None] >= documents[:, None, :]
documents of the padding are renumbered in the caller's own tensor
- t = documents.shape[1]
+ t = documents.shape[1]
+ documents[documents < 0] = -1 - torch.arange(int((documents < 0).sum()))

# masked_cross_entropy
the mean is over all positions, ignored ones too
- losses.numel() if n_targets is None => targets.numel() if n_targets is None
n_targets is ignored
- (losses.numel() if n_targets is None else n_targets) => losses.numel()
the sum is returned: it is divided by nothing
- losses.sum() / (losses.numel() if n_targets is None else n_targets) => losses.sum()
no target gives 0 / 0
- if not losses.numel(): => if False:
- losses.numel() if n_targets is None else n_targets
+ losses.numel() if n_targets is None else n_targets * float(losses.numel() > 0)
ignored positions are multiplied by 0: NaN times 0 is NaN
+ counted = targets != ignore_index
+ rows = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
+ losses = -rows.gather(-1, targets.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0] * counted
+ n = counted.sum() if n_targets is None else n_targets
+ return (losses.sum() / (n if counted.any() else 1)).float()
the loss is computed in the dtype of the logits: bfloat16 has three digits
- rows.to(torch.promote_types(rows.dtype, torch.float32)) => rows
float64 logits are rounded to float32, and their gradient with them
- torch.promote_types(rows.dtype, torch.float32) => torch.float32
the sum is rounded to float32 before it is divided, so a gradient in float64 keeps seven digits
- losses.sum() / (losses.numel() if n_targets is None else n_targets)
+ losses.sum().float() / (losses.numel() if n_targets is None else n_targets)
ignore_index is always -100
- _counted_losses(logits, targets, ignore_index) => _counted_losses(logits, targets, -100)
the targets are shifted again: they are already those of their positions
- losses = _counted_losses(logits, targets, ignore_index)
+ losses = _counted_losses(logits[..., :-1, :], targets[..., 1:], ignore_index)
logits at ignored positions are set to 0 in the caller's own tensor
- losses = _counted_losses(logits, targets, ignore_index)
+ with torch.no_grad():
+     logits[targets == ignore_index] = 0
+ losses = _counted_losses(logits, targets, ignore_index)
ignored targets become 0 in the caller's own tensor
- losses = _counted_losses(logits, targets, ignore_index)
+ losses = _counted_losses(logits, targets, ignore_index)
+ targets[targets == ignore_index] = 0
the logits are taken to be [B, T, V]: they may have any number of dimensions
- losses = _counted_losses(logits, targets, ignore_index)
+ losses = _counted_losses(logits.flatten(0, 1), targets.flatten(0, 1), ignore_index)
view fails on logits or targets that are cut out of larger ones: reshape copies them where it must
- losses = _counted_losses(logits, targets, ignore_index)
+ losses = _counted_losses(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index)

# accumulate_masked
a mean of means: each micro-batch is divided by its own number of targets
- loss = masked_cross_entropy(logits, targets, n_targets, ignore_index)
+ loss = masked_cross_entropy(logits, targets, None, ignore_index) / len(batches)
each rank divides by its own number of targets, so a rank with few of them counts too much
- n_targets = int(_sum_over_ranks(counts, group))
+ own = int(counts)
+ n_targets = int(_sum_over_ranks(counts, group))
- masked_cross_entropy(logits, targets, n_targets, ignore_index)
+ masked_cross_entropy(logits, targets, own, ignore_index) / n_ranks
the loss is not multiplied by the number of ranks, although the gradients are averaged over them
- (n_ranks * loss).backward() => loss.backward()
the factor for the number of ranks is in the mean that is returned, too: it belongs to the gradients only
- loss = masked_cross_entropy(logits, targets, n_targets, ignore_index)
+ loss = n_ranks * masked_cross_entropy(logits, targets, n_targets, ignore_index)
- (n_ranks * loss).backward() => loss.backward()
the micro-batches are read twice: a generator is empty the second time
- batches = list(micro_batches) => batches = micro_batches
- _device(model, batches) => torch.device("cpu")
all graphs are kept until one backward pass at the end, and with them all logits
  total = torch.zeros((), dtype=torch.float64, device=device)
+ kept = torch.zeros((), dtype=torch.float64, device=device)
- (n_ranks * loss).backward() => kept = kept + n_ranks * loss
+ if batches:
+     kept.backward()
  return _sum_over_ranks(total, group).float()
gradients are cleared first: they are to be added
+ model.zero_grad()
  total = torch.zeros((), dtype=torch.float64, device=device)
a model that returns a tuple is not understood
- logits[0] if isinstance(logits, tuple) else logits => logits
the mean that is returned is only this rank's part
- return _sum_over_ranks(total, group).float() => return total.float()
the mean is still attached to the graph
- total += loss.detach() => total = total + loss
no target anywhere goes unnoticed
- if n_targets == 0: => if False:
only the ranks without a target of their own raise
- if n_targets == 0: => if int(counts) == 0 and not dist.is_initialized():
every rank sends all of its targets, in order to count them
+ _sum_over_ranks(torch.zeros(64, device=device), group)
  n_targets = int(_sum_over_ranks(counts, group))
one collective for each micro-batch: ranks with fewer of them wait for ever, or get another's numbers
  total += loss.detach()
+ _sum_over_ranks(torch.zeros(1, device=device), group)
the default group is used, whichever is given
- dist.get_world_size(group) => dist.get_world_size()
ignore_index is always -100
- (targets != ignore_index) => (targets != -100)
the gradients are averaged over the ranks here: the caller does that
- return _sum_over_ranks(total, group).float()
+ for p in model.parameters():
+     p.grad = _sum_over_ranks(torch.zeros_like(p) if p.grad is None else p.grad, group).div_(n_ranks)
+ return _sum_over_ranks(total, group).float()

# LoRALinear
the update is scaled by alpha; alpha / r keeps its size when r changes
@@ __init__
- alpha / (math.sqrt(r) if use_rslora else r) => alpha
use_rslora is ignored
@@ __init__
- (math.sqrt(r) if use_rslora else r) => r
B starts at random, so the model changes before the first step
@@ __init__
- torch.zeros(n_out, r, dtype=torch.float32, device=device)
+ torch.full((n_out, r), 0.01, dtype=torch.float32, device=device)
A starts at zeros as well as B: neither has a gradient
@@ __init__
- nn.init.uniform_(self.lora_A, -(n_in**-0.5), n_in**-0.5) => nn.init.zeros_(self.lora_A)
A is drawn from a wider range: Kaiming's gain for ReLU instead of a = sqrt 5
@@ __init__
- nn.init.uniform_(self.lora_A, -(n_in**-0.5), n_in**-0.5) => nn.init.kaiming_uniform_(self.lora_A)
A and B have the base's dtype: small steps are lost in bfloat16
@@ __init__
- torch.empty(r, n_in, dtype=torch.float32, device=device)
+ torch.empty(r, n_in, dtype=base.bias.dtype if base.bias is not None else torch.float32, device=device)
- torch.zeros(n_out, r, dtype=torch.float32, device=device)
+ torch.zeros(n_out, r, dtype=self.lora_A.dtype, device=device)
the base is trained, too
@@ __init__
- self.base = base.requires_grad_(False) => self.base = base
B A is formed in every forward pass: in times out times r more products
@@ forward
- self.dropout(x).to(wide) @ self.lora_A.to(wide).T @ self.lora_B.to(wide).T
+ self.dropout(x).to(wide) @ (self.lora_B.to(wide) @ self.lora_A.to(wide)).T
the update is not scaled
@@ forward
- self.scaling * update => update
the update is rounded before it is added, so the sum is rounded twice
@@ forward
- (y + self.scaling * update).to(y.dtype) => y + (self.scaling * update).to(y.dtype)
the output has the dtype of A and B: it should be that of base(x)
@@ forward
- (y + self.scaling * update).to(y.dtype) => y + self.scaling * update
dropout reaches the base's input, too
@@ forward
- y = self.base(x)
+ x = self.dropout(x)
+ y = self.base(x)
- self.dropout(x).to(wide) => x.to(wide)
no feature is dropped in training
@@ forward
- self.dropout(x).to(wide) => x.to(wide)
the attribute dropout is a number: it should be an nn.Dropout
@@ __init__
- nn.Dropout(dropout) => dropout
@@ forward
- self.dropout(x).to(wide) => nn.functional.dropout(x, self.dropout, self.training).to(wide)
A and B are rounded to the dtype of x, and the update is computed in it: float32 is wanted until the sum
@@ forward
- torch.promote_types(x.dtype, self.lora_A.dtype) => x.dtype
a merged layer adds the update a second time
@@ forward
- if self.merged:
-     return y
+
merge() adds the update each time it is called
@@ merge
- if not self.merged:
-     self._add(1)
+ self._add(1)
unmerge() takes the update away each time it is called
@@ unmerge
- if self.merged:
-     self._add(-1)
+ self._add(-1)
merge() works in the weight's dtype, so the sum of a bfloat16 weight is rounded twice
@@ _add
- weight.copy_(weight.to(wide) + sign * update) => weight.add_(sign * update.to(weight.dtype))
merge() forgets the scaling
@@ _add
- self.scaling * (self.lora_B.to(wide) @ self.lora_A.to(wide)) => self.lora_B.to(wide) @ self.lora_A.to(wide)
merge() into four bits does nothing and says nothing
@@ _add
- raise TypeError(f"{type(self.base).__name__} has no floating-point weight to merge into") => return
the error does not say what the base is
@@ _add
- {type(self.base).__name__} has => this layer has
the features of an Int4Linear are read off its packed weights as if each byte held one of them
- 2 * base.packed.shape[1] => base.packed.shape[1]
a rank of 0 is accepted
@@ __init__
- if r < 1: => if r < 0:
B stays in float32 where x is in float64: PyTorch multiplies no two dtypes
@@ forward
- self.lora_B.to(wide) => self.lora_B
A and B are made on the default device: they belong on that of the base
@@ __init__
- device = next(t.device for t in [*base.parameters(), *base.buffers()]) => device = None
merge() puts a new parameter in the place of the weight, and this one is trained
@@ _add
- weight.copy_(weight.to(wide) + sign * update)
+ self.base.weight = nn.Parameter((weight.to(wide) + sign * update).to(weight.dtype))
merged is already True when the error is raised, so a second merge() says nothing
@@ merge
- if not self.merged:
-     self._add(1)
- self.merged = True
+ was, self.merged = self.merged, True
+ if not was:
+     self._add(1)
dropout comes after A: it belongs to the update's input
@@ forward
- self.dropout(x).to(wide) @ self.lora_A.to(wide).T => self.dropout(x.to(wide) @ self.lora_A.to(wide).T)
the base is called without gradients, so that nothing below the layer learns through it
@@ forward
- y = self.base(x)
+ with torch.no_grad():
+     y = self.base(x)
the update's input is detached, so that nothing below the layer learns through it
@@ forward
- self.dropout(x).to(wide) => self.dropout(x.detach()).to(wide)

# add_lora
everything stays trainable
- model.requires_grad_(False) =>
everything is frozen, the updates too
+ model.requires_grad_(False)
  return list(adapted)
names that end with a target are replaced, too: "my_ant" is not "ant"
- name.rpartition(".")[2] in wanted => name.endswith(tuple(wanted))
only layers of the outermost module are found
- found = {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in wanted}
+ found = {name: layer for name, layer in layers.items() if name in wanted}
NF4Linear layers are passed over
- isinstance(layer, nn.Linear | NF4Linear) => isinstance(layer, nn.Linear)
a target that no layer has is passed over
- if missing: => if False:
only the first missing target is named
- {', '.join(sorted(missing))} => {min(missing)}
layers are replaced before all targets have been looked for
  if missing:
+     model.requires_grad_(False)
+     for name, layer in found.items():
+         parent, _, last = name.rpartition(".")
+         setattr(model.get_submodule(parent), last, LoRALinear(layer, r, alpha, dropout))
names come sorted: they should have the order of named_modules()
- return list(adapted) => return sorted(adapted)
the last names are returned: the full ones are needed to find the layers again
- return list(adapted) => return [name.rpartition(".")[2] for name in adapted]
dropout is ignored
- LoRALinear(layer, r, alpha, dropout) => LoRALinear(layer, r, alpha)
alpha is not handed on
- LoRALinear(layer, r, alpha, dropout) => LoRALinear(layer, r, r, dropout)
biases of the model stay trainable
- model.requires_grad_(False)
+ for name, p in model.named_parameters():
+     p.requires_grad_("lora_" in name or name.endswith("bias"))
a target counts as found when it is a part of a layer's full name
- missing = wanted - {name.rpartition(".")[2] for name in found}
+ missing = {target for target in wanted if not any(target in name for name in layers)}

# lora_parameters
keys and values are taken to be as wide as the model: with grouped queries they are G D wide
- kv = config.dim, config.hidden_dim, config.n_kv_heads * config.head_dim
+ kv = config.dim, config.hidden_dim, config.dim
the whole matrices are counted: B A has r (in + out) numbers
- sum(sum(sizes[name]) for name in names) => sum(sizes[name][0] * sizes[name][1] // r for name in names)
one layer is counted
- config.n_layers * r => r
a target that is given twice counts twice
- names = set(targets) => names = list(targets)
- names - set(sizes) => set(names) - set(sizes)
targets are read twice: an iterator is empty the second time
- names = set(targets) => names = targets
- sorted(names - set(sizes)) => sorted(set(names) - set(sizes))
- for name in names) => for name in set(names))
unknown names are passed over
- if unknown := sorted(names - set(sizes)):
+ names &= set(sizes)
+ if unknown := []:
only A is counted, not B
- sum(sizes[name]) => sizes[name][1]

# nf4_quantize
sixteen evenly spaced levels: those of a normal float are closer where weights are frequent
- levels = NF4_LEVELS.double().to(weight.device) => levels = torch.linspace(-1, 1, 16, dtype=torch.float64)
the level below is taken, not the nearest
- (levels[1:] + levels[:-1]) / 2 => levels[1:]
of two levels that are equally near, the upper one is taken
- (levels[1:] + levels[:-1]) / 2) => (levels[1:] + levels[:-1]) / 2, right=True)
weights are looked up between the levels, which takes the level above: the bounds are their midpoints
- (levels[1:] + levels[:-1]) / 2 => levels
a block of zeros is divided by its largest magnitude, 0
- torch.where(absmax > 0, absmax, 1.0) => absmax
the whole weight has one scale
- blocks.abs().amax(1) => blocks.abs().amax().expand(len(blocks)).clone()
the largest value is taken, not the largest magnitude
- blocks.abs().amax(1) => blocks.amax(1)
the even place is packed into the high four bits, as in bitsandbytes
- pack_int4(nearest.to(torch.uint8).flatten())
+ pack_int4(nearest.to(torch.uint8).flatten().view(-1, 2).flip(1).flatten())
levels are not packed: each takes a byte
- pack_int4(nearest.to(torch.uint8).flatten()) => nearest.to(torch.uint8).flatten()
an odd block is accepted
- block_size % 2 or =>
a block size that does not divide the number of weights is not named
- raise ValueError(f"block_size = {block_size}: expected an even divisor of {weight.numel()} weights")
+ raise ValueError("the weights do not divide into blocks")
scales have the weight's dtype: they should be float32
- return pack_int4(nearest.to(torch.uint8).flatten()), absmax
+ return pack_int4(nearest.to(torch.uint8).flatten()), absmax.to(weight.dtype)
the largest magnitude is kept above 1e-8 against zeros: only 0 needs a guard
- torch.where(absmax > 0, absmax, 1.0) => absmax.clamp(min=1e-8)
the scales are still attached to the weight's graph
- weight.detach().float() => weight.float()
each row is cut into blocks of its own: a block may reach into the next row
- blocks = weight.detach().float().reshape(-1, block_size)
+ blocks = weight.detach().float().reshape(*weight.shape[:-1], -1, block_size).flatten(0, -2)
packed has a row for each block: it should be flat
- return pack_int4(nearest.to(torch.uint8).flatten()), absmax => return pack_int4(nearest.to(torch.uint8)), absmax
view fails on a transposed weight: reshape copies it where it must
- weight.detach().float().reshape(-1, block_size) => weight.detach().float().view(-1, block_size)

# nf4_dequantize
the levels are multiplied by nothing: each block has its largest magnitude
- * absmax[:, None] =>
the packed bytes are taken for levels of one weight each
- unpack_int4(packed.flatten()).long() => (packed.flatten().repeat_interleave(2) & 15).long()
the high four bits are taken for the even place
- unpack_int4(packed.flatten()).long() => unpack_int4(packed.flatten()).long().view(-1, 2).flip(1).flatten()
levels and scales are rounded before they are multiplied, so the result is rounded twice
- (levels.view(len(absmax), -1) * absmax[:, None]).to(dtype)
+ (levels.to(dtype).view(len(absmax), -1) * absmax[:, None].to(dtype))
dtype is ignored
- .to(dtype).reshape => .reshape
the weight stays flat
- .reshape(*shape) => .flatten()
the integers are multiplied: an index stands for its level in NF4_LEVELS
- NF4_LEVELS.to(packed.device)[unpack_int4(packed.flatten()).long()] => (unpack_int4(packed.flatten()).float() - 7) / 8

# NF4Linear
the unpacked weight is saved for the backward pass, which can unpack it again
@@ forward
- y = _NF4Product.apply(x, self.packed, self.absmax, self.out_features)
+ y = x @ nf4_dequantize(self.packed, self.absmax, (self.out_features, self.in_features), x.dtype).T
the input is saved: a frozen layer does not need it
@@ NF4Linear.forward
- y = _NF4Product.apply(x, self.packed, self.absmax, self.out_features)
+ y = _NF4Product.apply(x, self.packed, self.absmax, self.out_features) + 0 * (x * x.detach()).sum(-1, keepdim=True)
the weight is unpacked when the layer is made, and kept
@@ __init__
  self.register_buffer("packed", packed)
+ self.register_buffer("weight", nf4_dequantize(packed, absmax, linear.weight.shape))
the bias is a parameter
@@ __init__
- self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
+ self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
the given layer is frozen, too: it should be left unchanged
- self.in_features, self.out_features = linear.in_features, linear.out_features
+ self.in_features, self.out_features = linear.in_features, linear.out_features
+ linear.requires_grad_(False)
the bias is not a copy: it changes with the layer's
@@ __init__
- linear.bias.detach().clone() => linear.bias.detach()
the bias is forgotten
@@ __init__
- None if linear.bias is None else linear.bias.detach().clone() => None
the output has the dtype of the unpacked weights: it should be that of x
@@ forward
- y if self.bias is None else y + self.bias.to(y.dtype)
+ (y if self.bias is None else y + self.bias.to(y.dtype)).float()
the block size is ignored
@@ __init__
- nf4_quantize(linear.weight, block_size) => nf4_quantize(linear.weight, 8)
no gradient passes through the layer, so nothing below it can learn
@@ forward
- y = _NF4Product.apply(x, self.packed, self.absmax, self.out_features)
+ y = _NF4Product.apply(x.detach(), self.packed, self.absmax, self.out_features) + 0 * x.sum()
in_features and out_features are exchanged
@@ __init__
- linear.in_features, linear.out_features => linear.out_features, linear.in_features
+ self.shape = linear.weight.shape
  packed, absmax = nf4_quantize
@@ forward
- self.out_features) => self.in_features)
the bias's copy is still attached to the layer's graph
@@ __init__
- linear.bias.detach().clone() => linear.bias.clone()
the gradient of x is computed in float32, also for an x in float64
@@ _NF4Product.backward
- grad @ nf4_dequantize(packed, absmax, ctx.shape, grad.dtype)
+ grad.float() @ nf4_dequantize(packed, absmax, ctx.shape, torch.float32)
the given layer's weight is replaced by the rounded one: it should be left unchanged
@@ __init__
  self.register_buffer("packed", packed)
+ linear.weight.data = nf4_dequantize(packed, absmax, linear.weight.shape)

# finetuning_memory_bytes
gradients are counted for frozen weights, too
- "gradients": 4 * trained => "gradients": 4 * count_parameters(config)
the optimizer is counted with one moment: AdamW has two
- "optimizer": 8 * trained => "optimizer": 4 * trained
the weights of the updates are forgotten
- frozen[method] + 4 * trained => frozen[method] + (4 * trained if method == "full" else 0)
frozen weights are counted in float32
- "lora": 2 * n => "lora": 4 * n
the scales of four-bit blocks are forgotten
- matrices // 2 + matrices // 64 * 4 => matrices // 2
the table, the head and the norms are counted with four bits, too
- 2 * (n - matrices) + matrices // 2 + matrices // 64 * 4 => n // 2 + n // 64 * 4
the trained weights are counted with 2 bytes, as the frozen ones: they are float32
- frozen[method] + 4 * trained => frozen[method] + 2 * trained
full training is counted in 16 bits
- trained = n if method == "full" else trained
+ if method == "full":
+     return {"weights": 2 * n, "gradients": 2 * n, "optimizer": 8 * n}
targets and r are ignored
- lora_parameters(config, r, targets) => lora_parameters(config, 16, ALL)
another method is taken for "lora"
- if method not in frozen: => if False:
- "weights": frozen[method] + 4 * trained => "weights": frozen.get(method, 2 * n) + 4 * trained
with "qlora" only the matrices with an update are counted with four bits: all seven have them
- sum(n_out * n_in for n_out, n_in in _block_matrices(config).values())
+ sum(a * b for k, (a, b) in _block_matrices(config).items() if k in targets or method != "qlora")

# sequence_log_probs
the mean over the answer's tokens is returned: that is another loss
- .sum(1).float() => .sum(1).float() / (targets != ignore_index).sum(1).clamp(min=1)
losses are summed: log-probabilities have the other sign
- return -losses.new_zeros => return losses.new_zeros
ignored positions are read, and multiplied by 0: NaN stays NaN
+ logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
+ picked = logp.gather(-1, targets.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
+ return (picked * (targets != ignore_index)).sum(1).float()
the sum is over the whole batch
- .sum(1).float() => .sum().expand(len(targets)).float()
ignore_index is always -100
- losses = _counted_losses(logits, targets, ignore_index) => losses = _counted_losses(logits, targets, -100)
- targets != ignore_index => targets != -100
probabilities are summed instead of their logarithms
- -losses.new_zeros => losses.new_zeros
- (targets != ignore_index, losses) => (targets != ignore_index, (-losses).exp())
the result has the dtype of the logits: it should be float32
- .sum(1).float() => .sum(1).to(logits.dtype)
view fails on logits or targets that are cut out of larger ones: reshape copies them where it must
- losses = _counted_losses(logits, targets, ignore_index)
+ losses = _counted_losses(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index)

# dpo_loss
the reference is left out
- beta * (chosen_logps - ref_chosen_logps), beta * (rejected_logps - ref_rejected_logps)
+ beta * chosen_logps, beta * rejected_logps
the margin has the wrong sign, so the rejected answer is learned
- margin = chosen - rejected => margin = rejected - chosen
beta is left out of the margin
- margin = chosen - rejected => margin = (chosen - rejected) / beta
the logarithm is taken of a sigmoid that is 0 for a large margin
- nn.functional.logsigmoid(margin), nn.functional.logsigmoid(-margin)
+ margin.sigmoid().log(), (-margin).sigmoid().log()
label_smoothing is ignored
- -(1 - label_smoothing) * right - label_smoothing * wrong => -right
label_smoothing is divided between both labels: half of it stays with the right one
- -(1 - label_smoothing) * right - label_smoothing * wrong
+ -(1 - label_smoothing / 2) * right - label_smoothing / 2 * wrong
the losses are averaged: one is wanted for each pair
- return -(1 - label_smoothing) * right - label_smoothing * wrong,
+ return (-(1 - label_smoothing) * right - label_smoothing * wrong).mean(),
the rewards are still attached to the graph
- chosen.detach(), rejected.detach() => chosen, rejected
the rewards lack beta
- chosen.detach(), rejected.detach() => chosen.detach() / beta, rejected.detach() / beta
a share of wrong labels of one half, or a negative one, is accepted
- if not 0 <= label_smoothing < 0.5: => if False:
the two answers' references are exchanged
- chosen_logps - ref_chosen_logps => chosen_logps - ref_rejected_logps
- rejected_logps - ref_rejected_logps => rejected_logps - ref_chosen_logps

# kl_penalty
d has the wrong sign: samples come from the policy, not from the reference
- d = logprob - ref_logprob => d = ref_logprob - logprob
k2 lacks the half
- d.square() / 2 => d.square()
the exponential minus 1 cancels for a small d: expm1 does not
- torch.expm1(-d) + d => torch.exp(-d) - 1 + d
k3 has exp(d) where it needs exp(-d), which holds for samples from the reference
- torch.expm1(-d) + d => torch.expm1(d) - d
"+" is passed over
- if name == kl_penalty: => if True:
with "+" the value is k2's, too
- values[name]().detach() + (slope - slope.detach()) => slope
with "+" the gradient of the estimator is added to that of k2
- values[name]().detach() => values[name]()
k3 is clamped to 10
- torch.expm1(-d) + d => (torch.expm1(-d) + d).clamp(-10, 10)
the default is k1
@@ kl_penalty
+ kl_penalty = "k1" if kl_penalty == "k3" else kl_penalty
  values = {
another name is taken for k3
- if name not in values or kl_penalty.endswith("++"):
+ name = name if name in values else "k3"
+ if False:
all signs "+" at the end are removed, so "k3++" is accepted
- or kl_penalty.endswith("++") =>
- kl_penalty.removesuffix("+") => kl_penalty.rstrip("+")
""")
