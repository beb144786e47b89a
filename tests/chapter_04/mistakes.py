"""Wrong answers to chapter 4's exercises, each with the misconception behind it."""

from lib.workbook.grading import edits

edits("""
# RMSNorm
the mean is subtracted first: that is LayerNorm, and RMSNorm leaves the mean alone
- wide = x.float() => wide = x.float() - x.float().mean(-1, keepdim=True)
eps is added outside of the root, and it belongs inside, to the mean square
- wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
+ wide / (wide.square().mean(-1, keepdim=True).sqrt() + self.eps)
the squares are summed instead of averaged: each vector gets length 1, not a root mean square of 1
- .mean(-1, keepdim=True) => .sum(-1, keepdim=True)
the root is missing: x is divided by the mean square itself
- wide * torch.rsqrt => wide /
the statistics are computed in the input's half precision
- x.float() => x
the cast comes before the product with the weight: that is Meta's order, and here the cast comes last
- (self.weight * normed).to(x.dtype) => self.weight.to(x.dtype) * normed.to(x.dtype)
the result stays in float32 instead of returning to the dtype of x
- .to(x.dtype) =>
the mean is taken over all positions together instead of over each vector
- .mean(-1, keepdim=True) => .mean()
the weight is forgotten
- self.weight * normed => normed
the weight starts at zero, so the output is zero; it should start at one
- torch.ones(dim) => torch.zeros(dim)
eps is not added, so a vector of zeros is divided by zero
- + self.eps =>
eps is always 1e-5, whatever the argument says
- self.eps = eps => self.eps = 1e-5
the variance is taken instead of the mean square: it subtracts the mean first, and divides by C - 1
- wide.square().mean(-1, keepdim=True) => wide.var(-1, keepdim=True)
the variance is taken instead of the mean square: it subtracts the mean first
- wide.square().mean(-1, keepdim=True) => wide.var(-1, correction=0, keepdim=True)
the mean is squared, where the squares should be averaged
- wide.square().mean(-1, keepdim=True) => wide.mean(-1, keepdim=True).square()
x is multiplied by the root mean square instead of divided by it
- torch.rsqrt => torch.sqrt
dim=1 is the last dimension only of a matrix: the vectors lie along -1, however many dimensions there are
- mean(-1, => mean(1,
keepdim=True is missing, so the means do not line up with the vectors
- mean(-1, keepdim=True) => mean(-1)
the weight is added to 1, as in Gemma: here it begins at ones and is the whole factor
- self.weight * normed => (1 + self.weight) * normed
the weight is no parameter, so an optimizer would not find it
- self.weight = nn.Parameter(torch.ones(dim)) => self.register_buffer("weight", torch.ones(dim))
the weight is cut off from the graph, so it never learns
- self.weight * normed => self.weight.detach() * normed
the mean square is cut off from the graph, but it depends on x too
- wide.square() => wide.detach().square()
x is changed in place: where x is float32 already, float() is x itself, and *= writes into it
- wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
+ wide.mul_(torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))
float64 comes back as float32: the result has the dtype of x
- .to(x.dtype) => .to(x.dtype if x.dtype != torch.float64 else torch.float32)
the cast comes before the product with a float32 weight, which makes float32 of the result again
- (self.weight * normed).to(x.dtype) => self.weight * normed.to(x.dtype)

# swiglu_hidden_dim
the width is 4 x dim, without the two thirds
- 2 * 4 * dim // 3 => 4 * dim
the width is rounded down to a multiple instead of up
- + multiple_of - 1 =>
a width that is already a multiple is raised to the next one
- + multiple_of - 1 => + multiple_of
the width is not rounded to a multiple of multiple_of
- (width + multiple_of - 1) // multiple_of * multiple_of => width
the multiplier is ignored
- multiplier * (2 * 4 * dim // 3) => 2 * 4 * dim // 3
the fraction is dropped only once, at the end; Meta's code also drops it before the multiplier
- 2 * 4 * dim // 3 => 2 * 4 * dim / 3
the number is right, but it is a float and should be an int
- * multiple_of => * float(multiple_of)
the width is rounded to the nearest whole number, where the fraction is dropped
- int(multiplier => round(multiplier
a third is cut to a whole number before it is doubled
- 2 * 4 * dim // 3 => 4 * dim // 3 * 2
the multiplier is applied after the width was rounded up to a multiple
- int(multiplier * (2 * 4 * dim // 3)) => 2 * 4 * dim // 3
- (width + multiple_of - 1) // multiple_of * multiple_of
+ int((width + multiple_of - 1) // multiple_of * multiple_of * multiplier)
the width is rounded to the nearest multiple, which may lie below it
- + multiple_of - 1 => + multiple_of // 2
multiple_of is ignored: the width is always a multiple of 256
- (width + multiple_of - 1) // multiple_of * multiple_of => (width + 255) // 256 * 256

# SwiGLU
silu is applied to w3's branch; the gate is w1
- nn.functional.silu(self.w1(x)) * self.w3(x) => self.w1(x) * nn.functional.silu(self.w3(x))
silu is applied after the two branches are multiplied; it belongs on w1's branch, before the product
- nn.functional.silu(self.w1(x)) * self.w3(x) => nn.functional.silu(self.w1(x) * self.w3(x))
silu is applied to both branches; only w1's is the gate
- * self.w3(x) => * nn.functional.silu(self.w3(x))
the gate is a sigmoid (that is GLU); silu is x times its sigmoid
- nn.functional.silu => torch.sigmoid
the gate is GELU (that is GEGLU); SwiGLU's is silu
- silu => gelu
the two branches are added instead of multiplied
- * self.w3(x) => + self.w3(x)
w2 and w3 are exchanged: in Meta's names, w2 projects back from F to C
- self.w2 = nn.Linear(hidden_dim, dim => self.w2 = nn.Linear(dim, hidden_dim
- self.w3 = nn.Linear(dim, hidden_dim => self.w3 = nn.Linear(hidden_dim, dim
- self.w2(nn.functional.silu(self.w1(x)) * self.w3(x)) => self.w3(nn.functional.silu(self.w1(x)) * self.w2(x))
the linear layers have a bias; Llama has none
- hidden_dim, dim, bias=False => hidden_dim, dim
two thirds of hidden_dim are taken again, although hidden_dim already includes them
+ hidden_dim = 2 * hidden_dim // 3
  self.w1 =
the gate is ReLU (that is ReGLU); SwiGLU's is silu
- silu => relu
the gate has no silu: the two products are only multiplied
- nn.functional.silu(self.w1(x)) => self.w1(x)
w1 makes the values too, where w3 should make them
- self.w3(x) => self.w1(x)
x is added to the result: that is the block's task, not the layer's
- return self.w2 => return x + self.w2
hidden_dim is ignored: the layer is 4 x dim wide
+ hidden_dim = 4 * dim
  self.w1 = nn.Linear(dim

# TransformerBlock
that is post-norm: the sum is normalised, and Llama normalises the input of each part
@@ forward
+ x = self.attention_norm(x + self.attention(x, rope, mask, cache))
+ return self.ffn_norm(x + self.feed_forward(x))
the feed-forward reads the block's input; it should read the sum that includes attention's output
@@ forward
+ return x + self.attention(self.attention_norm(x), rope, mask, cache) + self.feed_forward(self.ffn_norm(x))
the residual connections are missing: each part's output should be added to its input
- x = x + self => x = self
- return x + self => return self
the normalised input is added, not the input itself
- x = x + => x = self.attention_norm(x) +
- return x + => return self.ffn_norm(x) +
the two norms are exchanged
- self.attention_norm(x) => self.ffn_norm(x)
- self.ffn_norm(x) => self.attention_norm(x)
the mask does not reach attention
- rope, mask, cache => rope, None, cache
the rotations do not reach attention
- rope, mask, cache => None, mask, cache
the cache does not reach attention
- rope, mask, cache => rope, mask if cache is None else mask[:, -x.shape[1] :]
n_kv_heads is ignored, so every query head has its own keys and values
- , config.n_kv_heads =>
the feed-forward is 4 x dim wide instead of hidden_dim
- config.hidden_dim => 4 * config.dim
norm_eps is ignored
- self.attention_norm = RMSNorm(config.dim, config.norm_eps)
- self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
+ self.attention_norm, self.ffn_norm = RMSNorm(config.dim), RMSNorm(config.dim)
both parts are normalised by attention_norm, and ffn_norm is never used
- self.ffn_norm(x) => self.attention_norm(x)
both norms are one object, so they share a weight
- self.ffn_norm = RMSNorm(config.dim, config.norm_eps) => self.ffn_norm = self.attention_norm
the norms are LayerNorm, which subtracts the mean
- self.attention_norm = RMSNorm(config.dim, config.norm_eps)
- self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
+ self.attention_norm = nn.LayerNorm(config.dim, config.norm_eps, bias=False)
+ self.ffn_norm = nn.LayerNorm(config.dim, config.norm_eps, bias=False)
norm_eps reaches attention_norm only
- self.ffn_norm = RMSNorm(config.dim, config.norm_eps) => self.ffn_norm = RMSNorm(config.dim)
norm_eps reaches ffn_norm only
- self.attention_norm = RMSNorm(config.dim, config.norm_eps) => self.attention_norm = RMSNorm(config.dim)
attention reads x itself, which should be normalised first
- self.attention(self.attention_norm(x), => self.attention(x,
the feed-forward layer reads x itself, which should be normalised first
- self.ffn_norm(x) => x
x is missing from the first sum: only attention's output is left
- x = x + self => x = self
x is missing from the second sum: only the feed-forward layer's output is left
- return x + self => return self
the feed-forward layer is left out
- return x + self.feed_forward(self.ffn_norm(x)) => return x
mask and cache are exchanged in the call of attention
- rope, mask, cache => rope, cache, mask
it hides the future even without a mask, where None means that every position may attend to every other
+ if mask is None and cache is None:
+     mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
  x = x
x is changed in place: += writes into the caller's tensor
- x = x + self.attention => x += self.attention

# Llama
positions start at 0 in every call: with a cache the first new token stands at the cache's length
- self.rope[start:end] => self.rope[: tokens.shape[1]]
there is no causal mask: every token sees the tokens that it should predict
- causal_mask(tokens.shape[1], end, tokens.device) => None
with a cache the mask is aligned to the first key, so that new tokens cannot see the cached ones
- causal_mask(tokens.shape[1], end, tokens.device)
+ torch.ones(tokens.shape[1], end, dtype=torch.bool, device=tokens.device).tril()
the last norm, before the head, is missing
- self.norm(x) => x
the logits stay in the weights' dtype
- .float() =>
it returns probabilities instead of logits
- .float() => .float().softmax(-1)
only the logits of the last position are returned
- .float() => .float()[:, -1:]
the mask is made on PyTorch's default device, and the tokens may be on another one
- end, tokens.device => end
the last position is refused, although context_len positions fit
- end > self.config.context_len => end >= self.config.context_len
the check ignores the tokens in the cache: it looks at the number of new tokens alone, or there is no check
- end > self.config.context_len => tokens.shape[1] > self.config.context_len
the head shares the embedding's weight, as in GPT-2; Llama 2 has two separate weights
+ self.output.weight = self.tok_embeddings.weight
  self.rope = precompute_rope
norm_eps does not reach the last norm
- , config.norm_eps =>
rope_theta does not reach the rotation table: the base is always 10,000
- , config.rope_theta =>
the length is read from the second layer's cache, which a model with one layer doesn't have
- cache[0].length => cache[1].length
the embeddings are multiplied by the root of the width, as in the first transformer; Llama doesn't do that
- self.tok_embeddings(tokens) => self.tok_embeddings(tokens) * self.config.dim**0.5
the rotation table is a buffer, so it appears in the state dict under a name that Meta's files lack
- self.rope = precompute_rope(config.head_dim, config.context_len, config.rope_theta, device="cpu")
+ self.register_buffer("rope", precompute_rope(config.head_dim, config.context_len, config.rope_theta))
the rotation table is a non-persistent buffer, and casting the model to a real dtype drops its imaginary part
- self.rope = precompute_rope(config.head_dim, config.context_len, config.rope_theta, device="cpu")
+ table = precompute_rope(config.head_dim, config.context_len, config.rope_theta)
+ self.register_buffer("rope", table, persistent=False)
all layers share one block: the list repeats the same object
- TransformerBlock(config) for _ in range(config.n_layers) => [TransformerBlock(config)] * config.n_layers
all layers share one cache
- [KVCache(*shape, dtype=weight.dtype, device=weight.device) for _ in self.layers]
+ [KVCache(*shape, dtype=weight.dtype, device=weight.device)] * len(self.layers)
the cache has room for every query head, but there are fewer key/value heads (n_kv_heads)
- config.n_kv_heads => config.n_heads
the cache is float32 whatever the weights are
- dtype=weight.dtype, device => device
the cache is made on PyTorch's default device, and the weights may be on another one
- , device=weight.device =>
with a cache there is no mask, so the new tokens see those that come after them
- causal_mask(tokens.shape[1], end, tokens.device) => None if cache else causal_mask(end, end, tokens.device)
the mask is T x T, but with a cache there are more keys than new tokens
- tokens.shape[1], end, => tokens.shape[1], tokens.shape[1],
every layer is given the first layer's cache
- cache[i] if cache => cache[0] if cache
the cache does not reach the layers, so new tokens see nothing of the earlier ones
- cache[i] if cache else None => None
- causal_mask(tokens.shape[1], end => causal_mask(tokens.shape[1], tokens.shape[1]
layers is a plain list, in which a module does not look for parameters: it must be a ModuleList
- nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
+ [TransformerBlock(config) for _ in range(config.n_layers)]
the rotation table is as wide as the model, where every head is rotated by itself
- config.head_dim, config.context_len => config.dim, config.context_len
the head has a bias; Llama has none
- config.vocab_size, bias=False => config.vocab_size
config is not kept as an attribute
- self.config = config => self.sizes = config
- weight, config = self.tok_embeddings.weight, self.config => weight, config = self.tok_embeddings.weight, self.sizes
- if end > self.config.context_len => if end > self.sizes.context_len
- context_len is {self.config.context_len} => context_len is {self.sizes.context_len}
the mask is inverted: True means that a query may attend
- causal_mask(tokens.shape[1], end, tokens.device) => ~causal_mask(tokens.shape[1], end, tokens.device)
the rotations of the cached positions are passed too, but only the new tokens are rotated
- self.rope[start:end] => self.rope[:end]

# count_parameters
the head is not counted, as if it shared the embedding's weight
- 2 * config.vocab_size => config.vocab_size
keys and values are counted for every query head, but there are fewer key/value heads (n_kv_heads)
- config.n_kv_heads * config.head_dim => C
the feed-forward is counted with two matrices; SwiGLU has three
- 3 * => 2 *
the last norm is not counted
- block + C => block
one norm per block is counted; there are two
- config.hidden_dim + 2 * C => config.hidden_dim + C
the norms are counted with a bias, as in LayerNorm; RMSNorm has only a weight
- config.hidden_dim + 2 * C => config.hidden_dim + 4 * C
- block + C => block + 2 * C
the number is right, but it is a float and should be an int
- return 2 => return 2.0
only one of keys and values is counted
- 2 * C * config.n_kv_heads => C * config.n_kv_heads
one of the two matrices wq and wo is not counted
- 2 * C * C => C * C
the last norm is counted once for each layer
- * block + C => * (block + C)
the feed-forward is counted as 4 x dim wide, where it is hidden_dim wide
- config.hidden_dim => 4 * C

# inference_memory_gb
the bits are taken for bytes
- / 8 =>
every weight is counted as four bytes, whatever `bits` says
- bits / 8 => 4
the result is in GiB (2 ** 30 bytes) instead of GB (1e9 bytes)
- 1e9 => 2**30
the overhead is forgotten
- * overhead =>
the fraction is upside down: fewer bits need more memory
- bits / 8 => 4 * (32 / bits)
bits // 8 is a whole number, which is 0 for 4 bits
- bits / 8 => (bits // 8)
the overhead is always 1.2, whatever the argument says
- * overhead => * 1.2
the result is rounded
- n_parameters * bits / 8 * overhead / 1e9 => round(n_parameters * bits / 8 * overhead / 1e9, 1)
the result is in megabytes (1e6 bytes) instead of gigabytes (1e9)
- 1e9 => 1e6

# kv_cache_bytes
only the keys are counted; there are as many values
- 2 * =>
only one layer is counted; every layer has a cache
- config.n_layers * =>
every query head is counted, but only the key/value heads (n_kv_heads) are cached
- config.n_kv_heads => config.n_heads
values are counted, not bytes
- * bytes_per_value =>
the batch is forgotten
- * batch =>
the number is right, but it is a float and should be an int
- * bytes_per_value => * float(bytes_per_value)
the width of a head is forgotten
- * config.head_dim =>
the length is forgotten
- * length =>
every value is counted as two bytes, whatever `bytes_per_value` says
- * bytes_per_value => * 2
context_len positions are counted, where `length` says how many there are
- * length => * config.context_len

# convert_hf_state_dict
only the names change: the rows of q and k are still split halves
- half_to_interleaved(found[name], heads) if heads else found[name] => found[name]
v is reordered as well: only what is rotated has rotary pairs
- "k_proj": config.n_kv_heads => "k_proj": config.n_kv_heads, "v_proj": config.n_kv_heads
q is reordered and k is not
- , "k_proj": config.n_kv_heads =>
k is reordered by the number of query heads; it has only n_kv_heads heads
- "k_proj": config.n_kv_heads => "k_proj": config.n_heads
the rows are reordered in the wrong direction, from neighbours to halves
- half_to_interleaved(found[name], heads) => found[name].unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
gate_proj and up_proj are exchanged: gate_proj is w1
- converted[metas_name]
+ converted[".".join({"w1": "w3", "w3": "w1"}.get(part, part) for part in metas_name.split("."))]
every tensor is cast to float32 instead of keeping its dtype
- return converted => return {name: tensor.float() for name, tensor in converted.items()}
only the first problem is reported; the message should list all of them
+ problems = problems[:1]
  if problems:
unknown names are dropped silently; they should be reported as extra
- problems += [f"extra: {name}" for name in found if name not in expected] =>
rotary_emb.inv_freq, which old checkpoints contain, is reported as an error; it should be dropped
- if not name.endswith("rotary_emb.inv_freq") =>
shapes are not compared
- if name in found and tuple(found[name].shape) != shape: => if False:
names that are missing are not reported
- [f"missing: {name}" for name in expected if name not in found] => list[str]()
- expected.items():
-     heads
+ ((name, value) for name, value in expected.items() if name in found):
+     heads
each kind of problem has an error of its own, so that missing names hide the others
- problems += [f"extra: {name}"
+ if problems:
+     raise ValueError(str(problems))
+ problems += [f"extra: {name}"
wo is reordered as well: its rows are not queries
- "k_proj": config.n_kv_heads => "k_proj": config.n_kv_heads, "o_proj": config.n_heads
every name that ends in inv_freq is dropped, not only those of rotary_emb
- "rotary_emb.inv_freq" => "inv_freq"
the old buffers are removed from the state dict of the caller
+ for name in [name for name in state_dict if name.endswith("rotary_emb.inv_freq")]:
+     del state_dict[name]
  expected =

# sample_next
top_p drops the token that crosses the threshold
- probabilities.cumsum(-1) - probabilities => probabilities.cumsum(-1)
- >= top_p => > top_p
one token too many remains when the sum before it is exactly top_p
- >= top_p => > top_p
top_p uses the probabilities from before top_k, without renormalising those that remain
- probabilities /= probabilities.sum(-1, keepdim=True) =>
the temperature is applied after top_p instead of first
- before = probabilities.cumsum(-1) - probabilities
+ cold = (ordered * temperature).softmax(-1) * (probabilities > 0)
+ before = (cold.cumsum(-1) - cold) / cold.sum(-1, keepdim=True)
the logits are multiplied by the temperature instead of divided
- / temperature => * temperature
the temperature is ignored unless it is 0
- / temperature =>
temperature 0 divides by zero instead of taking the likeliest
- if temperature == 0:
-     return logits.argmax(-1)
+
it always returns the likeliest token: nothing is drawn
- temperature == 0 => True
it returns positions in the sorted order instead of the token ids at those positions
- tokens.gather(-1, drawn) => drawn
it returns [B, 1] instead of [B]
- logits.argmax(-1) => logits.argmax(-1, keepdim=True)
- .squeeze(-1) =>
the generator is not used
- , generator=generator =>
the caller's logits are divided in place
- (logits.float() / temperature) => logits.div_(temperature).float()
a top_p of 0 or less, or above 1, is accepted without an error
- raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}") => top_p = None
top_p = 0 is accepted, but at least one token must remain, so p is above 0
- 0 < top_p => 0 <= top_p
a top_k below 1 is accepted without an error
- raise ValueError(f"top_k must be 1 or more, got {top_k}") => top_k = None
a negative temperature is accepted without an error
- raise ValueError(f"temperature must be 0 or more, got {temperature}") => temperature = -temperature
meaningless settings (a negative temperature, top_k = 0, top_p = 0) are not refused
- if temperature < 0:
-     raise ValueError(f"temperature must be 0 or more, got {temperature}")
- if top_k is not None and top_k < 1:
-     raise ValueError(f"top_k must be 1 or more, got {top_k}")
- if top_p is not None and not 0 < top_p <= 1:
-     raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
+
top_k larger than the vocabulary raises an error; it should keep all tokens
+ probabilities.topk(top_k)
  probabilities[..., top_k:] = 0.0
`if top_k` skips 0 as well, which should be refused: ask whether it is None
- top_k is not None and => top_k and
- if top_k is not None: => if top_k:
top_p = 1 is refused, but then all tokens remain
- < top_p <= 1 => < top_p < 1
one token too many remains after top_k
- top_k:] => top_k + 1 :]
the k least likely tokens remain: the order is ascending
- descending=True => descending=False
top_p sums the logits, where the probabilities are to be summed
- probabilities.cumsum(-1) - probabilities => ordered.cumsum(-1) - ordered
what top_p drops was found in sorted order, but was hidden in the order of the logits
- ordered, tokens = (logits.float() / temperature).sort(dim=-1, descending=True)
- probabilities = ordered.softmax(-1)
+ probabilities = (logits.float() / temperature).softmax(-1)
+ ordered, tokens = probabilities.sort(dim=-1, descending=True)
- if top_k is not None:
-     probabilities[..., top_k:] = 0.0
+ if top_k is not None:
+     probabilities.scatter_(-1, tokens[..., top_k:], 0.0)
+     ordered[..., top_k:] = 0.0
- before = probabilities.cumsum(-1) - probabilities
+ before = (ordered.cumsum(-1) - ordered) / ordered.sum(-1, keepdim=True)
- return tokens.gather(-1, drawn).squeeze(-1) => return drawn.squeeze(-1)
top_p is taken as the smallest probability that a token may have
- before[..., 1:] >= top_p => probabilities[..., 1:] < top_p
the k-th logit itself is dropped: those below it are too many
- probabilities[..., top_k:] = 0.0 => probabilities[ordered <= ordered[..., [min(top_k, ordered.shape[-1]) - 1]]] = 0.0
the k-th logit of the first row is the threshold of every row
- probabilities[..., top_k:] = 0.0 => probabilities[ordered < ordered[0, min(top_k, ordered.shape[-1]) - 1]] = 0.0
one token is drawn for the whole batch
- torch.multinomial(probabilities, 1, generator=generator)
+ torch.multinomial(probabilities[:1], 1, generator=generator).expand(len(probabilities), 1)
squeeze() drops the axis of a batch of one, too: squeeze(-1) drops the last axis only
- .squeeze(-1) => .squeeze()
argmax without a dimension looks for the largest logit of the whole batch
- logits.argmax(-1) => logits.argmax()
argmax runs over the batch, not over the tokens
- logits.argmax(-1) => logits.argmax(0)
the logits after the k-th are set to -inf in the caller's tensor
- ordered, tokens = (logits.float() / temperature).sort(dim=-1, descending=True)
+ logits = logits if temperature == 1 else logits / temperature
+ if top_k is not None:
+     logits[logits < logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]] = -torch.inf
+ ordered, tokens = logits.float().sort(dim=-1, descending=True)

# generate
the whole text is passed again in each step, although the cache holds everything but the newest token
- tokens = new[:, None] => tokens = torch.cat([tokens, new[:, None]], dim=1)
the model runs once more after the last token, and the result is never used
- for _ in range(max_new_tokens):
-     logits = model(tokens, cache)[:, -1]
+ for step in range(max_new_tokens + 1):
+     logits = model(tokens, cache)[:, -1]
+     if step == max_new_tokens:
+         return
it stops as soon as one sequence has ended, although others have not
- done.all() => done.any()
a sequence that has ended continues with other tokens instead of repeating eos_id
- new = new.masked_fill(done, eos_id) =>
it keeps going after all sequences have ended
- if done.all():
-     return
+
the step in which the last sequence ends is not yielded
- yield new
- if done.all():
-     return
+ if done.all():
+     return
+ yield new
an end token in the prompt counts as the end of the sequence
- torch.zeros(batch, dtype=torch.bool, device=tokens.device)
+ (tokens == (-1 if eos_id is None else eos_id)).any(dim=1)
gradients are recorded
- @torch.no_grad() =>
the next token is read from the first position; the last position predicts it
- [:, -1] => [:, 0]
temperature, top_k and top_p do not reach sample_next
- logits, temperature, top_k, top_p, generator => logits, 1.0 if temperature else 0
the generator does not reach sample_next
- top_p, generator) => top_p)
the cache has room for the new tokens only, but the prompt goes into it too
- prompt_len + max_new_tokens => max_new_tokens
the record of ended sequences is on PyTorch's default device, and the tokens may be on another one
- , device=tokens.device =>
it returns a list of all tokens at the end, so nothing can be shown while it is being written
+ return list(reference.generate(model, tokens, max_new_tokens, temperature, top_k, top_p, eos_id, generator))
the sequences are written one after the other instead of in one batch
+ settings = max_new_tokens, temperature, top_k, top_p, eos_id, generator
+ yield from (step for row in tokens for step in reference.generate(model, row[None], *settings))
the prompt is yielded too, before the new tokens
+ yield from tokens.T
  batch, prompt_len = tokens.shape
each step yields [B, 1] instead of [B]
- yield new => yield new[:, None]
`if eos_id` skips the id 0, which is a token like any other: ask whether it is None
- if eos_id is not None: => if eos_id:
a sequence that has ended repeats 0 instead of eos_id
- masked_fill(done, eos_id) => masked_fill(done, 0)
the whole text is yielded in each step, not the newest token
- yield new => yield torch.cat([tokens, new[:, None]], dim=1)
the prompt passes through the model token by token, which takes as many runs as it has tokens
+ for token in tokens[:, :-1].T:
+     model(token[:, None], cache)
+ tokens = tokens[:, -1:]
  for _ in range
top_k and top_p are exchanged in the call of sample_next
- temperature, top_k, top_p, generator) => temperature, top_p, top_k, generator)
top_k does not reach sample_next
- temperature, top_k, top_p => temperature, None, top_p
top_p does not reach sample_next
- temperature, top_k, top_p => temperature, top_k, None
the temperature does not reach sample_next, except for 0
- logits, temperature, top_k => logits, 1.0 if temperature else 0, top_k
one token too few
- range(max_new_tokens) => range(max_new_tokens - 1)
a sequence that has ended leaves the batch, where it should repeat eos_id
- tokens = new[:, None] => tokens = new[~done][:, None]
the cache has room for the prompt only, but the new tokens go into it too
- prompt_len + max_new_tokens => prompt_len
the temperature does not reach sample_next: it is always 1
- logits, temperature, top_k => logits, 1.0, top_k
squeeze() drops the axis of a batch of one, too: [:, -1] drops only that of the positions
- model(tokens, cache)[:, -1] => model(tokens, cache)[:, -1:].squeeze()
""")
