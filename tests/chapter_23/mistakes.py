"""Plausible wrong answers of chapter 23, and the misconception behind each."""

from lib.workbook.grading import edits

edits("""
# qk_norm
one mean square over all heads, also where the weight is that of a single head
- wide if len(weight) == width else wide.flatten(-2) => wide.flatten(-2)
- (normed * (offset + weight.to(wide.dtype)))
+ (normed * (offset + weight.to(wide.dtype).repeat(heads * width // len(weight))))
each head has its own mean square, also where the weight is that of all heads
- wide if len(weight) == width else wide.flatten(-2) => wide
- (normed * (offset + weight.to(wide.dtype))) => (normed * (offset + weight.to(wide.dtype).view(-1, width)))
the mean is subtracted, as in LayerNorm; RMSNorm only divides
+ wide = wide - wide.mean(-1, keepdim=True)
  normed = wide *
divided by the norm, the root of the sum of squares, instead of the mean of squares
- wide.square().mean(-1, keepdim=True) => wide.square().sum(-1, keepdim=True)
divided by the mean square itself instead of its root
- torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
+ torch.reciprocal(wide.square().mean(-1, keepdim=True) + eps)
eps is added to the root instead of the mean square
- torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) => (1 / (wide.square().mean(-1, keepdim=True).sqrt() + eps))
eps is ignored
- keepdim=True) + eps) => keepdim=True))
the offset is ignored: the gain is offset + weight
- (offset + weight.to(wide.dtype)) => weight.to(wide.dtype)
the gain is missing
- (normed * (offset + weight.to(wide.dtype))) => normed
computed in the dtype of x instead of float32
- x.to(torch.promote_types(x.dtype, torch.float32)) => x
rounded before the gain, and once more after it
- (normed * (offset + weight.to(wide.dtype))) => (normed.to(x.dtype) * (offset + weight).to(x.dtype))
float64 is cast down to float32
- x.to(torch.promote_types(x.dtype, torch.float32)) => x.float()
offset + weight is rounded to the weight's dtype; the gain, too, is computed in float32
- (offset + weight.to(wide.dtype)) => (offset + weight).to(wide.dtype)
a weight of another length is not refused
- if len(weight) not in (width, heads * width): => if False:
- (normed * (offset + weight.to(wide.dtype))) => (normed * (offset + torch.ones(normed.shape[-1])))

# grouped_attention
the cap comes after the mask: a hidden score of -inf becomes -softcap, and is visible again
- if softcap is not None:
-     scores = softcap * torch.tanh(scores / softcap)
- if mask is not None:
-     scores = scores.masked_fill(~mask, -math.inf)
+ if mask is not None:
+     scores = scores.masked_fill(~mask, -math.inf)
+ if softcap is not None:
+     scores = softcap * torch.tanh(scores / softcap)
the scores are capped before they are scaled
- queries = (q * scale).reshape => queries = q.reshape
- softcap * torch.tanh(scores / softcap) => scale * softcap * torch.tanh(scores / softcap)
+ scores = scores * scale if softcap is None else scores
  if mask is not None:
the scores are not divided by the cap before the tanh
- torch.tanh(scores / softcap) => torch.tanh(scores)
the tanh is not multiplied by the cap
- softcap * torch.tanh(scores / softcap) => torch.tanh(scores / softcap)
scores above the cap are cut off (clamp) instead of bent by a tanh
- softcap * torch.tanh(scores / softcap) => scores.clamp(-softcap, softcap)
the cap is ignored
- if softcap is not None: => if False:
scale is ignored, and is always D ** -0.5
- q.shape[-1] ** -0.5 if scale is None else scale => q.shape[-1] ** -0.5
the scores are multiplied by D ** -0.5 and by scale
- q.shape[-1] ** -0.5 if scale is None else scale => q.shape[-1] ** -0.5 * (1.0 if scale is None else scale)
query head h reads key head h % G instead of h // (H/G)
+ return reference.grouped_attention(
+     q, *(x.repeat(1, q.shape[1] // k.shape[1], 1, 1) for x in (k, v)), mask, scale, softcap, sinks
+ )
  queries = (q * scale).reshape(
      q.shape[0], k.shape[1], -1, q.shape[-1]
  )
the sink is scaled like a score
- sinks.to(scores.dtype)[:, None, None] => sinks.to(scores.dtype)[:, None, None] * scale
the sink is capped like a score
- sinks.to(scores.dtype)[:, None, None]
+ (sinks if softcap is None else softcap * torch.tanh(sinks / softcap)).to(scores.dtype)[:, None, None]
the sink itself is added to the denominator, instead of its exponential
- sinks.to(scores.dtype)[:, None, None] => sinks.to(scores.dtype)[:, None, None].abs().log()
the sink has no effect: it is ignored, or added to every score, or the weights are divided by their sum without it
- if sinks is not None: => if False:
the sink of head 0 is used for all heads
- sinks.to(scores.dtype)[:, None, None] => sinks.to(scores.dtype)[:1, None, None]
a query that may attend to nothing gets NaN, as torch.softmax returns it
- softmax(scores, dim=-1) => torch.softmax(scores, dim=-1)
the mask is read the other way round: True means that a query may look
- ~mask => mask
hidden scores become 0, a score like any other
- -math.inf => 0.0
hidden scores become a large negative number, so a query that may attend to nothing weighs all keys alike
- -math.inf => -1e9
the softmax runs in the dtype of q instead of float32
- .to(torch.promote_types(q.dtype, torch.float32)) =>
- softmax(scores, dim=-1)
+ torch.exp(scores - scores.amax(-1, keepdim=True)).cumsum(-1).diff(dim=-1, prepend=scores[..., :1] * 0)
- @ v).view
+ @ v / torch.exp(scores - scores.amax(-1, keepdim=True)).cumsum(-1)[..., -1:].reshape(*queries.shape[:3], 1)).view
the result stays in float32 instead of going back to the dtype of q
- softmax(scores, dim=-1)[..., : k.shape[2]].to(v.dtype) => softmax(scores, dim=-1)[..., : k.shape[2]]
- k.shape[2]) @ v).view(*q.shape[:3], v.shape[-1]).to(q.dtype)
+ k.shape[2]) @ v.to(weights.dtype)).view(*q.shape[:3], v.shape[-1])
keys and values are repeated in memory for each query head
  check_heads(q.shape[1], k.shape[1])
+ k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
heads that do not fit are refused by a RuntimeError of a reshape, where a ValueError should name H and G
- check_heads(q.shape[1], k.shape[1]) =>

# llama3_frequencies
the fast pairs are slowed down, and the slow ones kept
- frequencies * keep + frequencies / factor * (1 - keep) => frequencies * (1 - keep) + frequencies / factor * keep
every pair is slowed down, as in position interpolation
- frequencies * keep + frequencies / factor * (1 - keep) => frequencies / factor
the share is not cut off at 0 and 1
- .clamp(0, 1) =>
the turns are counted in radians: 2 pi is missing
- / (2 * math.pi) =>
there is no ramp: each pair is either kept or slowed down
- .clamp(0, 1) => .gt(0.5).float()
slow pairs are multiplied by the factor instead of divided
- frequencies / factor * (1 - keep) => frequencies * factor * (1 - keep)
low_freq_factor is always 1
- turns - low_freq_factor) / (high_freq_factor - low_freq_factor) => turns - 1) / (high_freq_factor - 1)
theta is chapter 2's 10,000, whatever the argument says
- rope_frequencies(head_dim, theta) => rope_frequencies(head_dim)

# yarn_frequencies
the fast pairs are slowed down, and the slow ones kept
- frequencies * (1 - ramp) + frequencies / factor * ramp => frequencies * ramp + frequencies / factor * (1 - ramp)
the ends of the ramp are not rounded, although truncate is true
- if truncate => if False
the ends of the ramp are always rounded, although truncate may be false
- if truncate => if True
both ends of the ramp are rounded down
- math.ceil(high) => math.floor(high)
the upper end is clipped to D/2 - 1 instead of D - 1
- min(high, head_dim - 1) => min(high, head_dim // 2 - 1)
the upper end is not clipped to D - 1
- min(high, head_dim - 1) => high
the lower end is not clipped to 0
- max(low, 0) => low
the ramp is not cut off at 0 and 1
- .clamp(0, 1) =>
where both ends are equal, it divides by zero
- high = high + 0.001 if low == high else high =>
beta_fast and beta_slow are exchanged
- pair_with(beta_fast), pair_with(beta_slow) => pair_with(beta_slow), pair_with(beta_fast)
the attention factor is 1 + 0.1 times the factor, without its logarithm
- math.log(factor) + 1.0 => factor + 1.0
the attention factor is squared: it multiplies cosines and sines, so the scores get its square anyway
- else magnitude(1.0) => else magnitude(1.0) ** 2
mscale counts even without mscale_all_dim
- magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)
+ magnitude(mscale or 1.0) / (magnitude(mscale_all_dim) if mscale_all_dim else 1.0)
mscale_all_dim alone is enough, and a mscale of None or 0 is multiplied
- if mscale and mscale_all_dim => if mscale_all_dim
- magnitude(mscale) / => magnitude(mscale or 0.0) /
the attention factor is m(mscale), without its divisor m(mscale_all_dim)
- magnitude(mscale) / magnitude(mscale_all_dim) => magnitude(mscale)
mscale and mscale_all_dim are ignored
- magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0) => magnitude(1.0)
a factor below 1 gives an attention factor below 1
- if factor > 1 else 1.0 =>
the logarithm of the ramp's ends is taken to the base D instead of theta
- math.log(theta) => math.log(head_dim)

# apply_partial_rope
the two layouts are exchanged
- {"interleaved": "b t h (i two)", "half": "b t h (two i)"} => {"half": "b t h (i two)", "interleaved": "b t h (two i)"}
layout is ignored: pairs are always neighbours
- [layout] => ["interleaved"]
the halves are those of the whole head: feature i is paired with i + D/2 instead of i + R/2
- part = x[..., :turned].to(torch.float64 if wide else torch.float32)
+ chosen = torch.arange(x.shape[-1])
+ if layout == "half":
+     chosen = torch.cat([chosen[:turned // 2], chosen[x.shape[-1] // 2 :][: turned // 2]])
+ part = x[..., chosen[:turned]].to(torch.float64 if wide else torch.float32)
- return torch.cat([part.to(x.dtype), x[..., turned:]], dim=-1)
+ out = x.clone()
+ out[..., chosen[:turned]] = part.to(x.dtype)
+ return out
the last R features turn instead of the first
- part = x[..., :turned].to => part = x[..., x.shape[-1] - turned :].to
- [part.to(x.dtype), x[..., turned:]] => [x[..., : x.shape[-1] - turned], part.to(x.dtype)]
only the part that turns is returned
- torch.cat([part.to(x.dtype), x[..., turned:]], dim=-1) => part.to(x.dtype)
the other features are set to zero
- x[..., turned:]] => torch.zeros_like(x[..., turned:])]
it turns the other way round
- torch.complex(real, imaginary) * rope[:, None] => torch.complex(real, imaginary) * rope[:, None].conj()
the modulus is divided away: YaRN's factor is lost
- rope[:, None].to => torch.polar(torch.ones_like(rope.abs()), rope.angle())[:, None].to
the modulus multiplies the other features, too
- x[..., turned:]] => (x[..., turned:] * (rope[:1, 0].abs().item() if turned else 1.0)).to(x.dtype)]
the table is read along the heads instead of the positions
- rope[:, None].to => rope[: x.shape[2]].to
the result stays in float32 instead of going back to the dtype of x
- part.to(x.dtype), x[..., turned:] => part, x[..., turned:].to(part.dtype)
float64 is cast down to float32
- wide = x.dtype == torch.float64 => wide = False
x is cast to float32 before it meets a table in double precision
- part = x[..., :turned].to(torch.float64 if wide else torch.float32) => part = x[..., :turned].float()
x was changed in place
+ x.data[..., :turned] = part.to(x.dtype)
  return torch.cat(
a rope that is wider than the head is not refused
- turned > x.shape[-1] or len(rope) => len(rope)
+ rope, turned = rope[:, : x.shape[-1] // 2], min(turned, x.shape[-1])
  part = x[..., :turned].to
a rope of one position is broadcast: every token is turned alike
- or len(rope) != x.shape[1] => or len(rope) not in (1, x.shape[1])
an unknown layout is taken for "half"
- if layout not in ("interleaved", "half"): => if False:
- [layout] => ["interleaved" if layout == "interleaved" else "half"]

# sliding_window_mask
the query itself is not counted: it sees window + 1 keys, as with FlashAttention's left = window
- - window + 1) => - window)
one key too few: the key at p - window + 1 is still visible
- - window + 1) => - window + 2)
aligned to the first key: with a cache the window is in the wrong place
- mask.triu(n_keys - n_queries - window + 1) => mask.triu(1 - window)
the window reaches forward as far as backward
- causal_mask(n_queries, n_keys, device) => torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
- mask if window is None else mask.triu
+ causal_mask(n_queries, n_keys, device) if window is None else mask.tril(n_keys - n_queries + window - 1).triu
the window is ignored
- mask if window is None else mask.triu(n_keys - n_queries - window + 1) => mask
True where a query may NOT look
- mask if window is None else mask.triu(n_keys - n_queries - window + 1)
+ ~(mask if window is None else mask.triu(n_keys - n_queries - window + 1))
what the window hides is visible, and the window itself hidden
- mask.triu(n_keys - n_queries - window + 1) => mask.tril(n_keys - n_queries - window)
no window means that the future is visible, too
- return mask if window is None => return torch.ones_like(mask) if window is None
a window of 0 is not refused
- check_window(window) =>
the device asked for is ignored
- causal_mask(n_queries, n_keys, device) => causal_mask(n_queries, n_keys)

# RollingKVCache
the slots are shifted by one for each new position, and so the whole window is copied
- slot, filled = start % window, min(start + 1, window)
+ slot, filled = min(start, window - 1), min(start + 1, window)
+ if start >= window:
+     self.keys[:, :, :-1], self.values[:, :, :-1] = self.keys[:, :, 1:].clone(), self.values[:, :, 1:].clone()
the returned keys are copied into the order of positions, which attention does not need
- return self.keys[:, :, :filled], self.values[:, :, :filled]
+ order = torch.arange(start + 1 - filled, start + 1) % window
+ return self.keys[:, :, order], self.values[:, :, order]
copies are returned, instead of views of the cache's own memory
- return self.keys[:, :, :filled], self.values[:, :, :filled]
+ return self.keys[:, :, :filled].clone(), self.values[:, :, :filled].clone()
all slots are returned, with zeros where nothing was written yet
- min(start + 1, window) => window
the newest position is not among those returned
- self.keys[:, :, slot], self.values[:, :, slot] = k[:, :, 0], v[:, :, 0]
- return self.keys[:, :, :filled], self.values[:, :, :filled]
+ out = self.keys[:, :, : filled - 1].clone(), self.values[:, :, : filled - 1].clone()
+ self.keys[:, :, slot], self.values[:, :, slot] = k[:, :, 0], v[:, :, 0]
+ return out
several positions get window old ones, where the first of them needs window - 1
- max(0, start - window + 1) => max(0, start - window)
several positions get the filled slots only: the first of them have lost what the last ones overwrote
- joined = [torch.cat([memory[:, :, past], new.to(memory.dtype)], dim=2) for memory, new in memories] =>
- return joined[0], joined[1]
+ order = torch.arange(max(0, self.length - window), self.length) % window
+ return self.keys[:, :, order], self.values[:, :, order]
the old positions come in the order of their slots, not of their positions
- past = torch.arange(max(0, start - window + 1), start, device=k.device) % window
+ past = (torch.arange(max(0, start - window + 1), start, device=k.device) % window).sort().values
the old positions are read after the new ones have overwritten them
- joined = [torch.cat([memory[:, :, past], new.to(memory.dtype)], dim=2) for memory, new in memories] =>
+ joined = [torch.cat([memory[:, :, past], new.to(memory.dtype)], dim=2) for memory, new in memories]
  return joined[0], joined[1]
a prompt that is longer than the window keeps its first positions instead of its last
- torch.arange(max(0, n_new - window), n_new, device=k.device) => torch.arange(min(n_new, window), device=k.device)
several positions are written from slot 0 on, whatever came before
- (start + kept) % window => kept % window
length stops at the window: then the slots, and the rotations, are wrong
- self.length = start + n_new => self.length = min(start + n_new, window)
length counts updates instead of positions
- self.length = start + n_new => self.length = start + 1
keys and values are exchanged
- return self.keys[:, :, :filled], self.values[:, :, :filled]
+ return self.values[:, :, :filled], self.keys[:, :, :filled]
the cache is changed before it refuses an update
+ self.length += n_new
  check_fit(
another shape is silently broadcast over the whole cache
- check_fit({"keys": (self.keys, k), "values": (self.values, v)})
+ k, v = (x.expand(*self.keys.shape[:2], n_new, self.keys.shape[-1]) for x in (k, v))

# CausalAttention
the norms come after the rotation
- if self.normed:
-     q, k = (qk_norm(h, norm["weight"], *self.norm) for h, norm in ((q, self.q_norm), (k, self.k_norm)))
- if rope is not None:
-     q, k = (apply_partial_rope(heads, rope, self.layout) for heads in (q, k))
+ if rope is not None:
+     q, k = (apply_partial_rope(heads, rope, self.layout) for heads in (q, k))
+ if self.normed:
+     q, k = (qk_norm(h, norm["weight"], *self.norm) for h, norm in ((q, self.q_norm), (k, self.k_norm)))
only the queries are normed
- for h, norm in ((q, self.q_norm), (k, self.k_norm))) => for h, norm in ((q, self.q_norm),)), k
- q, k = (qk_norm => (q,), k = (qk_norm
queries and keys share one norm, the queries'
- (k, self.k_norm) => (k, self.q_norm if len(self.q_norm["weight"]) <= k.shape[-2] * k.shape[-1] else self.k_norm)
norm_offset is ignored where the norm is applied
- *self.norm) => self.norm[0])
a new norm has weight 1 even where weights are differences from 1: its gain is 2
- 1.0 - norm_offset => 1.0
the values are rotated, too
- q, k = (apply_partial_rope(heads, rope, self.layout) for heads in (q, k))
+ q, k, v = (apply_partial_rope(heads, rope, self.layout) for heads in (q, k, v))
layout is ignored: pairs are always neighbours
- (heads, rope, self.layout) => (heads, rope)
the rows of queries and gates are cut in two halves, where each head has its D rows of query, then those of its gate
- q, gate = q.chunk(2, dim=-1) if self.gate else (q, None)
+ q, gate = (h.unflatten(-1, (self.n_heads, -1)) for h in q.flatten(2).chunk(2, -1)) if self.gate else (q, None)
the gate comes before the query among a head's rows
- q, gate = q.chunk(2, dim=-1) if self.gate else (q, None) => gate, q = q.chunk(2, dim=-1) if self.gate else (None, q)
the gate is not put through a sigmoid
- torch.sigmoid(gate) => gate
the gate is a SiLU instead of a sigmoid
- out * torch.sigmoid(gate) => out * torch.nn.functional.silu(gate)
the gate is applied to the values before attention
+ if gate is not None:
+     v = v * torch.sigmoid(gate[:, :, :: self.n_heads // self.n_kv_heads].transpose(1, 2))
+ gate = None
  if cache is not None:
the window is ignored
- k.shape[2], self.window, x.device => k.shape[2], None, x.device
the mask is square: with a cache the keys before these positions are forgotten
- sliding_window_mask(q.shape[2], k.shape[2], self.window, x.device)
+ torch.nn.functional.pad(sliding_window_mask(q.shape[2], q.shape[2], self.window), (k.shape[2] - q.shape[2], 0))
scale is ignored
- mask, self.scale, => mask, None,
the soft cap is ignored
- self.softcap, self.sinks => None, self.sinks
the sinks are ignored
- self.softcap, self.sinks => self.softcap
a new sink is -inf, and gets no gradient
- torch.zeros(n_heads) => torch.full((n_heads,), -math.inf)
only three projections have a bias: o_proj has none
- self.o_proj = nn.Linear(n_heads * width, dim, bias=bias) => self.o_proj = nn.Linear(n_heads * width, dim, bias=False)
the width of a head is always C/H
- dim // n_heads if head_dim is None else head_dim => dim // n_heads
the keys are cached before they are rotated
- if rope is not None:
-     q, k = (apply_partial_rope(heads, rope, self.layout) for heads in (q, k))
- q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
- if cache is not None:
-     k, v = cache.update(k, v)
+ q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
+ if cache is not None:
+     k, v = cache.update(k, v)
+ if rope is not None and rope.shape[0] == k.shape[2]:
+     q, k = (apply_partial_rope(h.transpose(1, 2), rope, self.layout).transpose(1, 2) for h in (q, k))
another qk_norm is taken for "width"
- qk_norm not in (None, "head", "width") => False
without a rope the norms are left out, too
- if self.normed: => if self.normed and rope is not None:
eps is not passed to `qk_norm`
- *self.norm) => offset=self.norm[1])

# LatentCache
every update begins at position 0
- self.latents[:, start:end], self.rope_keys[:, start:end], self.length = latents, rope_keys, end
+ self.latents[:, : end - start], self.rope_keys[:, : end - start], self.length = latents, rope_keys, end
only the new positions are returned
- return self.latents[:, :end], self.rope_keys[:, :end] => return latents, rope_keys
copies are returned, instead of views of the cache's memory
- return self.latents[:, :end], self.rope_keys[:, :end]
+ return self.latents[:, :end].clone(), self.rope_keys[:, :end].clone()
all max_len positions are returned, with zeros where nothing was written yet
- return self.latents[:, :end], self.rope_keys[:, :end] => return self.latents, self.rope_keys
length is never advanced
- self.rope_keys[:, start:end], self.length = latents, rope_keys, end
+ self.rope_keys[:, start:end] = latents, rope_keys
the cache is changed before it refuses an update that does not fit
+ self.length = end
  if end > max_len:
an update that just fits is refused
- end > max_len => end >= max_len
a batch of one is silently broadcast over the whole cache
- check_fit({"latents": (self.latents, latents), "rope_keys": (self.rope_keys, rope_keys)}) =>

# MultiHeadLatentAttention
the latent is not normed
- self.kv_a_layernorm(latents), apply_partial_rope => latents, apply_partial_rope
the norm runs over the latent and the rotated key together
- latents, key = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
+ both = self.kv_a_proj_with_mqa(x)
+ both = both * torch.rsqrt(both.square().mean(-1, keepdim=True) + 1e-6)
+ latents, key = both.split([self.rank, self.rope], dim=-1)
- self.kv_a_layernorm(latents), apply_partial_rope => latents * self.kv_a_layernorm.weight, apply_partial_rope
the key is taken before the latent from kv_a_proj_with_mqa
- latents, key = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
+ key, latents = self.kv_a_proj_with_mqa(x).split([self.rope, self.rank], dim=-1)
the key is not rotated
- apply_partial_rope(key[:, :, None], rope)[:, :, 0] => key
the queries are not rotated
- apply_partial_rope(turned, rope).transpose(1, 2) => turned.transpose(1, 2)
halves are rotated, where DeepSeek's pairs are neighbours
- apply_partial_rope(key[:, :, None], rope)[:, :, 0] => apply_partial_rope(key[:, :, None], rope, "half")[:, :, 0]
- apply_partial_rope(turned, rope).transpose(1, 2) => apply_partial_rope(turned, rope, "half").transpose(1, 2)
a head's query is read as [rope, nope]
- q, turned = q.unflatten(-1, (self.n_heads, -1)).split([self.nope, self.rope], dim=-1)
+ turned, q = q.unflatten(-1, (self.n_heads, -1)).split([self.rope, self.nope], dim=-1)
kv_b_proj's output is split into all keys, then all values, where each head has its key's, then its value's
@@ _expanded
- keys, values = self.kv_b_proj(latents).unflatten(-1, (self.n_heads, -1)).split([self.nope, self.v], dim=-1)
+ keys, values = self.kv_b_proj(latents).split([self.nope * self.n_heads, self.v * self.n_heads], dim=-1)
+ keys, values = (h.unflatten(-1, (self.n_heads, -1)) for h in (keys, values))
kv_b_proj's rows are read as all keys, then all values, where each head has its key's, then its value's
@@ _expanded
- keys, values = self.kv_b_proj(latents).unflatten(-1, (self.n_heads, -1)).split([self.nope, self.v], dim=-1)
+ keys, values = self.kv_b_proj(latents).split([self.nope * self.n_heads, self.v * self.n_heads], dim=-1)
+ keys, values = (h.unflatten(-1, (self.n_heads, -1)) for h in (keys, values))
@@ _absorbed
- up_keys, up_values = self.kv_b_proj.weight.unflatten(0, (self.n_heads, -1)).split([self.nope, self.v], dim=1)
+ n = self.n_heads
+ up_keys, up_values = self.kv_b_proj.weight.split([self.nope * n, self.v * n], dim=0)
+ up_keys, up_values = (h.unflatten(0, (n, -1)) for h in (up_keys, up_values))
the scale is that of the part that is not rotated
- width = self.nope + self.rope
- self.scale = width**-0.5 if scale is None else scale
+ width = self.nope + self.rope
+ self.scale = self.nope**-0.5 if scale is None else scale
absorbed, the scale is that of the longer key, latent and rotated part
@@ _absorbed
- mask, self.scale) => mask, q.shape[-1] ** -0.5)
absorb is ignored: keys and values are expanded for each head and position
- self._absorbed if absorb else self._expanded => self._expanded
it is always absorbed, also where absorb is False
- self._absorbed if absorb else self._expanded => self._absorbed
absorbed, the values are expanded for each head before their mean is taken
@@ _absorbed
- return grouped_attention(q, keys, latents[:, None], mask, self.scale) @ up_values.mT
+ values = latents[:, None] @ up_values.mT
+ return grouped_attention(q, keys.expand(-1, self.n_heads, -1, -1), values, mask, self.scale)
absorbed, the values' rows of kv_b_proj are not cut from the graph, but the keys' are
@@ _absorbed
- q @ up_keys => q @ up_keys.detach()
the latent enters the cache before it is normed
- latents, key = self.kv_a_layernorm(latents), apply_partial_rope(key[:, :, None], rope)[:, :, 0]
- if cache is not None:
-     latents, key = cache.update(latents, key)
+ key = apply_partial_rope(key[:, :, None], rope)[:, :, 0]
+ if cache is not None:
+     latents, key = cache.update(latents, key)
+ latents = self.kv_a_layernorm(latents)
the mask is made on the CPU: with x on a GPU, the scores are elsewhere
- sliding_window_mask(x.shape[1], key.shape[1], device=x.device) => sliding_window_mask(x.shape[1], key.shape[1])
the queries' own latent is not normed
- self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) => self.q_b_proj(self.q_a_proj(x))
the mask is square: with a cache the positions before these are forgotten
- mask = sliding_window_mask(x.shape[1], key.shape[1], device=x.device)
+ n = x.shape[1]
+ mask = torch.nn.functional.pad(sliding_window_mask(n, n), (key.shape[1] - n, 0))
eps is ignored
- RMSNorm(kv_lora_rank, eps) => RMSNorm(kv_lora_rank, 1e-6)
eps does not reach the norm of the queries' own latent
- RMSNorm(q_lora_rank, eps) => RMSNorm(q_lora_rank)

# hybrid_layer_types
counted from 0: the first layer is full, and then every interval-th
- (i + 1) % interval => i % interval
the kinds are exchanged
- other if (i + 1) % interval else "full_attention" => "full_attention" if (i + 1) % interval else other
other is ignored
- other if => "sliding_attention" if
an interval of 0 is not refused
- if interval < 1: => if False:
- (i + 1) % interval => (i + 1) % max(interval, 1)

# cache_bytes
only the keys are counted, not the values
- 2 * c.n_kv_heads => c.n_kv_heads
query heads are counted, where key/value heads are kept
- 2 * c.n_kv_heads => 2 * c.n_heads
a layer with a window holds the window, also where the sequence is shorter
- min(length, c.sliding_window) => c.sliding_window
a layer with a window holds the whole sequence
- min(length, c.sliding_window) => length
keys and values of latents are counted apart, but both come from one latent
- (c.kv_lora_rank + c.qk_rope_head_dim) * length => 2 * (c.kv_lora_rank + c.qk_rope_head_dim) * length
the rotated key of latent attention is forgotten
- (c.kv_lora_rank + c.qk_rope_head_dim) * length => c.kv_lora_rank * length
the batch is forgotten
- values * batch * bytes_per_value => values * bytes_per_value
a value always has 2 bytes
- values * batch * bytes_per_value => values * batch * 2
another kind of layer is taken for a full one
- check_kinds(config.layer_types) => config.layer_types
- length if kind == "full_attention" else => length if kind != "sliding_attention" else

# variant_flops
all T * S pairs are counted, visible or not
- min(max(p + 1, 0), sees) for p in positions => n_keys for p in positions
a multiply-add counts as one FLOP
- return flops => return flops // 2
the window is ignored
- c.sliding_window if kind == "sliding_attention" else n_keys => n_keys
only one of the two products is counted
- 4 * c.n_heads => 2 * c.n_heads
key/value heads are counted, where every query head has its own scores
- 4 * c.n_heads => 4 * c.n_kv_heads
the queries are aligned to the first key
- range(n_keys - n_queries, n_keys) => range(min(n_queries, n_keys))
with more queries than keys, pairs are counted twice or below zero
- min(max(p + 1, 0), sees) => min(p + 1, sees)
absorb is ignored
- if absorb else (nope => if False else (nope
absorbed, the heads still multiply the latents of all S keys by kv_b_proj
- (2 * r + rope, n_queries) => (2 * r + rope, n_keys)
not absorbed, only the latents of the T new positions are expanded, but none of the others is kept
- (nope + rope + v, n_keys) => (nope + rope + v, n_queries)
kv_b_proj's products are forgotten
- + turned * r * (nope + v) =>
another kind of layer is taken for a full one
- check_kinds(config.layer_types) => config.layer_types

# packed_positions
positions run on over the whole row
- torch.arange(len(starts), device=cu_seqlens.device) - starts => torch.arange(len(starts), device=cu_seqlens.device)
positions count from 1
- - starts => - starts + 1
the number of the document is returned
- torch.arange(len(starts), device=cu_seqlens.device) - starts => torch.arange(len(lengths)).repeat_interleave(lengths)
positions count backwards, from the end of the document
- torch.arange(len(starts), device=cu_seqlens.device) - starts
+ starts + lengths.repeat_interleave(lengths) - 1 - torch.arange(len(starts))
positions are int32, like the ends
- torch.arange(len(starts), device=cu_seqlens.device) - starts
+ (torch.arange(len(starts), device=cu_seqlens.device) - starts).int()
ends that fall are not refused
- document_lengths(cu_seqlens) => cu_seqlens.diff().long().clamp(min=0)

# document_mask
only causal: documents see one another
- return same & sliding_window_mask => return sliding_window_mask
not causal inside of a document
- same & sliding_window_mask(len(document), len(document), window, cu_seqlens.device)
+ same if sliding_window_mask(len(document), len(document), window) is not None else None
the window is ignored
- len(document), window, => len(document), None,
True where a token may NOT look
- return same & sliding_window_mask(len(document), len(document), window, cu_seqlens.device)
+ return ~(same & sliding_window_mask(len(document), len(document), window, cu_seqlens.device))
a document sees the one before it, too
- same = document[:, None] == document => same = (document[:, None] - document).abs() <= 1
ends that fall are not refused
- document_lengths(cu_seqlens) => cu_seqlens.diff().long().clamp(min=0)

# varlen_attention
the documents see one another
- document_lengths(cu_seqlens, len(q)).tolist() => [len(q)] if len(document_lengths(cu_seqlens, len(q))) else []
the whole T x T mask is built, and all pairs are multiplied
+ document_lengths(cu_seqlens, len(q))
+ mask = document_mask(cu_seqlens, window)
+ whole = (x.transpose(0, 1)[None] for x in (q, k, v))
+ return grouped_attention(*whole, mask, scale)[0].transpose(0, 1)
  lengths = document_lengths(cu_seqlens, len(q)).tolist()
one document that is the whole row makes a score for every pair at once
- max(1, len(q) ** 2 // (8 * q.shape[1] * max(length, 1))) => max(1, length)
the window is ignored
- 0 if window is None else max(0, start - window + 1) => 0
- end - first, window, q.device => end - first, None, q.device
a document is not causal
- sliding_window_mask(end - start, end - first, window, q.device)
+ torch.ones(end - start, end - first, dtype=torch.bool)
- end = min(start + rows, length)
+ end, rows = length, length
+ if start: break
scale is ignored
- mask, scale) => mask)
the documents are cut from the graph
- out.append(grouped_attention( => out.append(grouped_attention(*(x.detach() for x in (
- key[:, :, seen], value[:, :, seen], mask, scale)) => key[:, :, seen], value[:, :, seen])), mask, scale))
the tokens after the last end are left out, where the ends should be refused
- document_lengths(cu_seqlens, len(q)).tolist() => document_lengths(cu_seqlens).tolist()
- split(lengths, dim=2) => split([*lengths, max(0, len(q) - sum(lengths))], dim=2)

# flash_window_forward
the window is ignored
- n_keys if window is None else window => n_keys
the query itself is not counted: it sees window + 1 keys
- n_keys if window is None else window => n_keys if window is None else window + 1
aligned to the first key
- n_keys - n_queries => 0
tiles before the window are computed and hidden instead of skipped
- max(0, first - window + 1) // cols * cols => 0
tiles above the diagonal are computed and hidden instead of skipped
- min(n_keys, first + size), cols => n_keys, cols
the tiles of keys begin at the window's edge instead of at a multiple of cols
- max(0, first - window + 1) // cols * cols => max(0, first - window + 1)
the sink is ignored
- if sinks is None else sinks => if sinks is not None else torch.full((n_heads,), -math.inf)
the sink counts for the logsumexp, but not for the output
- out[:, :, at] = (acc / l
+ l_keys = l - torch.exp(sink.expand(batch, -1, -1, size).flatten(2) - m).nan_to_num(0.0)
+ l = l if sinks is None else l_keys
+ out[:, :, at] = (acc / l
- lse[:, :, at] = (m + torch.log(l))
+ l = l if sinks is None else l + torch.exp(sink.expand(batch, -1, -1, size).flatten(2) - m).nan_to_num(0.0)
+ lse[:, :, at] = (m + torch.log(l))
the sink counts for the output, but not for the logsumexp
- (m + torch.log(l)).view(
+ (m + torch.log(l - torch.exp(sink.expand(batch, -1, -1, size).flatten(2) - m).nan_to_num(0.0))).view(
a row that sees nothing is divided by 0
- l.masked_fill(l == 0, 1) => l
the scores are not divided by the root of the width
- * width**-0.5 =>
the logsumexp is in base 2
- m + torch.log(l) => (m + torch.log(l)) / math.log(2)
the largest score is returned instead of the logsumexp
- (m + torch.log(l)) => m
the whole matrix of scores is computed at once
+ _ = q.reshape(batch, n_groups, -1, width) @ k.mT
  for top in range
the logsumexp is rounded to the dtype of q
- q.new_zeros(q.shape[:3], dtype=dtype) => q.new_zeros(q.shape[:3])

# flash_window_kernel
the window is ignored in the mask
- & (cols[None, :] > at[:, None] - window) =>
the query itself is not counted: it sees window + 1 keys
- cols[None, :] > at[:, None] - window => cols[None, :] >= at[:, None] - window
tiles before the window are read and hidden instead of skipped
- tl.maximum(i * ROWS + S - T - window + 1, 0) // COLS * COLS => 0
tiles above the diagonal are read and hidden instead of skipped
- tl.minimum(S, tl.maximum(tl.minimum(i * ROWS + ROWS, T) + S - T, 0)) => S
aligned to the first key
- at = rows + S - T => at = rows
query head h reads key head h
- head // GROUP * S => head * S
the sink is not brought into base 2
- tl.load(sinks + head) * LOG2E => tl.load(sinks + head)
the sum begins with 0, also where there is a sink
- tl.where(m == -float("inf"), 0.0, 1.0) => tl.zeros([ROWS], tl.float32)
the logsumexp is in base 2
- (m + tl.log2(l)) * LN2 => m + tl.log2(l)
the width of the values is taken for that of the keys
- v + part * DV => v + part * D
the last tile of keys is read beyond the end
- there & (dims < D) => (cols[:, None] >= 0) & (dims < D)
the last rows are written beyond the end
- mask=here & (dims_v < DV)) => mask=dims_v < DV)
products use TF32 on a GPU
- tl.dot(query, tl.trans(key), input_precision="ieee") => tl.dot(query, tl.trans(key))
the weights stay in float32: their product with 16-bit values does not use the fast units
- tl.dot(weights.to(value.dtype), value, acc => tl.dot(weights, value.to(tl.float32), acc
""")
