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
meaningless settings (a negative temperature, top_k = 0, top_p = 0) raise no error
- raise ValueError(f"temperature must be 0 or more, got {temperature}") => temperature = -temperature
- raise ValueError(f"top_k must be 1 or more, got {top_k}") => top_k = None
- raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}") => top_p = None
top_k larger than the vocabulary raises an error; it should keep all tokens
+ probabilities.topk(top_k)
  probabilities[..., top_k:] = 0.0

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
""")
