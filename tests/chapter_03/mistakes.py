"""Plausible wrong answers of chapter 3, and the misconception behind each."""

from lib.workbook.grading import edits

edits("""
# softmax
nothing is subtracted before the exponential: exp(89) is infinite in float32
- wide - largest.masked_fill(largest == -math.inf, 0.0) => wide
a row of -inf gives NaN: -inf minus its maximum -inf is not a number
+ return torch.softmax(x, dim)
a row of -inf gives equal weights, where every weight should be 0
+ return torch.softmax(x.clamp(min=torch.finfo(x.dtype).min / 2), dim)
the NaN is replaced afterwards, but the gradient still runs through it: it must never arise
+ return torch.nan_to_num(torch.softmax(x, dim))
the maximum of the whole tensor is subtracted, so that a row far below it vanishes
- amax(dim, keepdim=True) => amax()
the weights sum to one along the last dimension, whatever dim says
+ return reference.softmax(x, -1)
the weights sum to one along the first dimension, whatever dim says
+ return reference.softmax(x, 0)
the scores were divided by their sum without an exponential
+ return x / x.sum(dim, keepdim=True)
the exponentials are not divided by their sum
+ return torch.exp(x - x.amax(dim, keepdim=True))
the powers are those of 2 instead of e
- torch.exp => torch.exp2
it is the logarithm of the weights
+ return torch.log_softmax(x, dim)
float16 and bfloat16 were computed in their own precision, instead of in float32
- x.to(torch.promote_types(x.dtype, torch.float32)) => x
the weights are left in float32 instead of going back to the dtype of x
- .to(x.dtype) =>
float64 is cast down to float32
- x.to(torch.promote_types(x.dtype, torch.float32)) => x.float()
x was changed in place
- wide - largest.masked_fill(largest == -math.inf, 0.0) => wide.sub_(largest.masked_fill(largest == -math.inf, 0.0))
the result is cut off from the graph
- x.to(torch.promote_types => x.detach().to(torch.promote_types
the maximum of an empty dimension is taken, which raises an error: that case must return early
- if x.numel() == 0:
-     return x.clone()
+
the size of a dimension is asked for, and a scalar has none; numel() counts its one number
- x.numel() == 0 => x.shape[dim] == 0
keepdim=True is missing from the maximum, so its axes do not line up with those of x
+ weights = torch.exp(x - x.amax(dim))
+ return weights / weights.sum(dim, keepdim=True)
keepdim=True is missing from the sum, so its axes do not line up with those of x
+ weights = torch.exp(x - x.amax(dim, keepdim=True))
+ return weights / weights.sum(dim)
the maximum is taken along the last dimension, whatever dim says
- amax(dim => amax(-1
the sum is taken along the last dimension, whatever dim says
- weights.sum(dim => weights.sum(-1
the mean is subtracted instead of the maximum, so the largest score can still overflow
- wide.detach().amax(dim => wide.detach().mean(dim
the largest absolute value is subtracted: where scores are negative, that is far above their maximum
- wide.detach().amax => wide.detach().abs().amax
exp(x - logsumexp(x)): adding the logarithm to a large maximum rounds it away
+ wide = x.to(torch.promote_types(x.dtype, torch.float32))
+ total = wide.logsumexp(dim, keepdim=True)
+ return torch.exp(wide - total.masked_fill(total == -math.inf, 0.0)).to(x.dtype)
1e-6 was added to the sum, which takes a little from every weight: divide by 1 where the sum is 0
- total.masked_fill(total == 0.0, 1.0) => (total + 1e-6)
1e-8 was added to the sum, which takes a little from every weight: divide by 1 where the sum is 0
- total.masked_fill(total == 0.0, 1.0) => (total + 1e-8)
the exponentials were rounded to the dtype of x before they were summed and divided
- torch.exp(wide - largest.masked_fill(largest == -math.inf, 0.0))
+ torch.exp(wide - largest.masked_fill(largest == -math.inf, 0.0)).to(x.dtype).to(wide.dtype)
float16 is computed in float32, but bfloat16 is not
- x.to(torch.promote_types(x.dtype, torch.float32)) => x.float() if x.dtype == torch.float16 else x
an empty result is float32 whatever the dtype of x
- return x.clone() => return torch.zeros(x.shape)
keepdim=True is missing from the maximum and from the sum: their axes do not line up with those of x
+ weights = torch.exp(x - x.amax(dim))
+ return weights / weights.sum(dim)
max along a dimension returns values and indices: take .values, or call amax
- wide.detach().amax(dim, keepdim=True) => wide.detach().max(dim, keepdim=True)
- largest.masked_fill(largest == -math.inf, 0.0) => largest
max(dim) of an empty dimension raises an error: return early if there is nothing to weigh
- if x.numel() == 0:
-     return x.clone()
+
- amax(dim, keepdim=True) => max(dim, keepdim=True).values
size(dim) is asked for, and a scalar has no dimensions; numel() counts its one number
- x.numel() == 0 => x.size(dim) == 0
1e-9 was added to the sum, which takes a little from every weight: divide by 1 where the sum is 0
- total.masked_fill(total == 0.0, 1.0) => (total + 1e-9)
keepdim=True is missing from the sum, and nothing is subtracted before the exponential
+ weights = torch.exp(x)
+ return weights / weights.sum(dim)

# causal_mask
aligned to the first key: with a cache the last query would not see itself
- n_keys - n_queries =>
True where a query may NOT look: the polarity of nn.MultiheadAttention
- torch.ones => ~torch.ones
a query may not see its own key, so the first query sees nothing
- n_keys - n_queries => n_keys - n_queries - 1
every query sees one key ahead
- n_keys - n_queries => n_keys - n_queries + 1
queries look ahead and not back: rows and columns are exchanged
- tril => triu
the offset has the wrong sign: n_queries - n_keys
- n_keys - n_queries => n_queries - n_keys
the mask holds 0 and -inf, to be added to scores, where True and False are asked for
+ hidden = ~reference.causal_mask(n_queries, n_keys, device)
+ return torch.zeros(n_queries, n_keys, device=device).masked_fill(hidden, -math.inf)
ones and zeros instead of True and False
- dtype=torch.bool, =>
the mask is transposed: queries are its rows, keys its columns
- n_keys - n_queries) => n_keys - n_queries).T
the mask is square: it has no columns for the keys in the cache
+ return reference.causal_mask(n_queries, n_queries, device)
the device asked for is ignored
- dtype=torch.bool, device=device => dtype=torch.bool
the tensors that are compared are on different devices: device is given to one of them only
- torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries)
+ torch.arange(n_keys, device=device) <= torch.arange(n_queries)[:, None] + (n_keys - n_queries)
blocks are joined whose widths are T and S - T, which is negative if there are fewer keys than queries
+ new = torch.ones(n_queries, n_queries, dtype=torch.bool, device=device).tril()
+ return torch.cat([torch.ones(n_queries, n_keys - n_queries, dtype=torch.bool, device=device), new], dim=1)
the last rows of a square mask of the keys: with fewer keys than queries, it has too few rows
+ return torch.ones(n_keys, n_keys, dtype=torch.bool, device=device).tril()[-n_queries:]
the columns of the cache stand last: its keys are the first ones
+ new = torch.ones(n_queries, n_queries, dtype=torch.bool, device=device).tril()
+ return torch.cat([new, torch.ones(n_queries, max(0, n_keys - n_queries), dtype=torch.bool, device=device)], dim=1)
the keys of the cache are hidden: they lie in the past, so every query may see them
+ mask = reference.causal_mask(n_queries, n_keys, device)
+ mask[:, : max(0, n_keys - n_queries)] = False
+ return mask
with fewer keys than queries, S - T is negative, but it was cut off at 0
- n_keys - n_queries => max(0, n_keys - n_queries)

# scaled_dot_product_attention
the scores are not divided by the square root of D
- / math.sqrt(q.shape[-1]) =>
the scores are divided by D instead of by its square root
- math.sqrt(q.shape[-1]) => q.shape[-1]
the scores are multiplied by the square root of D instead of divided
- / math.sqrt => * math.sqrt
the square root is that of the width of the values, not of the keys
- math.sqrt(q.shape[-1]) => math.sqrt(v.shape[-1])
the square root is that of the number of keys, not of their width
- math.sqrt(q.shape[-1]) => math.sqrt(k.shape[-2])
the weights were divided by the square root of D, after the softmax
- / math.sqrt(q.shape[-1]) =>
- softmax(scores, dim=-1) => softmax(scores, dim=-1) / math.sqrt(q.shape[-1])
the softmax runs over the queries: the weights of one query should sum to one
- dim=-1 => dim=-2
the scores themselves weigh the values: there is no softmax
- -math.inf => 0.0
- softmax(scores, dim=-1) => scores
the mask is read the other way round: True means that a query may look
- ~mask => mask
the mask is ignored
- mask is not None => False
the weights are masked after the softmax, so they no longer sum to one
- ~mask, -math.inf => ~mask, scores
- softmax(scores, dim=-1) => (softmax(scores, dim=-1) * (1 if mask is None else mask))
hidden scores are set to 0, which is a score like any other
- -math.inf => 0.0
True and False were added to the scores as 1 and 0
- scores.masked_fill(~mask, -math.inf) => scores + mask.to(q.dtype)
a query that may see nothing sees the mean of everything: its scores must be -inf, and their softmax zeros
- -math.inf => -6e4
a query that may see nothing gets NaN, as torch.softmax returns it
- softmax => torch.softmax
NaN is replaced at the end: the output is right, and the gradients are NaN
- softmax(scores, dim=-1) @ v => torch.nan_to_num(torch.softmax(scores, dim=-1) @ v)
it fails for S = 0: without keys there is no largest score
+ scores.amax(-1)
  if mask is not None:
it always hides the future, where only the mask should do that
- if mask is not None:
-     scores = scores.masked_fill(~mask, -math.inf)
+ causal = causal_mask(q.shape[-2], k.shape[-2])
+ scores = scores.masked_fill(~(causal if mask is None else causal & mask), -math.inf)
the scores are divided after the product, which by then has passed 65,504, float16's largest number
- q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1) => q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
the result is left in float32 instead of going back to the dtype of q
+ q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
  scores = q
the result is cut off from the graph
- softmax(scores, dim=-1) @ v => (softmax(scores, dim=-1) @ v).detach()
queries are processed one by one in a loop, where one product is enough
+ t, s = q.shape[-2], k.shape[-2]
+ mask = torch.ones(t, s, dtype=torch.bool) if mask is None else mask.expand(*mask.shape[:-2], t, s)
+ attend = reference.scaled_dot_product_attention
+ return torch.cat([attend(q[..., [i], :], k, v, mask[..., [i], :]) for i in range(t)], dim=-2)
a tensor of T x S x D products is stored, where a matrix product sums as it goes
- q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
+ ((q / math.sqrt(q.shape[-1]))[..., :, None, :] * k[..., None, :, :]).sum(-1)
transpose(2, 3) counts axes from the front, but there may be any number of leading ones: use -2 and -1
- k.transpose(-2, -1) => k.transpose(2, 3)
transpose(1, 2) counts axes from the front, but there may be any number of leading ones: use -2 and -1
- k.transpose(-2, -1) => k.transpose(1, 2)
softmax over dim=3 counts axes from the front, but there may be any number of leading ones: use -1
- dim=-1 => dim=3
the square root is that of the number of queries, not of the width of a head
- math.sqrt(q.shape[-1]) => math.sqrt(q.shape[-2])
q was divided in place, which changes the tensor of the caller
- q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1) => q.div_(math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
the mask was turned into float32 numbers and added, which turns float16 scores into float32 too
- scores.masked_fill(~mask, -math.inf) => scores + torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
the weights are returned too, where only the means are asked for
- return softmax(scores, dim=-1) @ v => return softmax(scores, dim=-1) @ v, softmax(scores, dim=-1)
the weights are returned, not the means of the values
- softmax(scores, dim=-1) @ v => softmax(scores, dim=-1)
softmax over dim=1 counts axes from the front, but there may be any number of leading ones: use -1
- dim=-1 => dim=1
softmax over dim=2 counts axes from the front, but there may be any number of leading ones: use -1
- dim=-1 => dim=2
the letters of einsum stand for exactly four axes: write ... for any number of leading ones
- q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
+ torch.einsum("bhtd,bhsd->bhts", q / math.sqrt(q.shape[-1]), k)
the weights are float32, but v is not: a product takes two tensors of the same dtype
- q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
+ q.float() / math.sqrt(q.shape[-1]) @ k.float().transpose(-2, -1)

# split_heads
a reshape to [B, H, T, D] without moving an axis: positions and heads are mixed up
- rearrange(x, "b t (h d) -> b h t d", h=n_heads) => x.reshape(x.shape[0], n_heads, x.shape[1], -1)
neighbouring features go to different heads: head 0 should be the first D of them
- (h d) => (d h)
the heads come after the positions, [B, T, H, D], instead of next to the batch
- -> b h t d => -> b t h d
n_heads was taken as the width of a head
- h=n_heads => d=n_heads
a width that does not divide is silently cut off
+ width = max(n_heads, x.shape[-1] // n_heads * n_heads)
+ padded = torch.nn.functional.pad(x, (0, max(0, width - x.shape[-1])))
+ return reference.split_heads(padded[..., :width], n_heads)
the width is not checked: the error is einops' own, where a ValueError with both numbers is asked for
- x.shape[-1] % n_heads => False
the last two axes are the wrong way round: [B, H, D, T]
- -> b h t d => -> b h d t
the heads come before the batch: [H, B, T, D]
- -> b h t d => -> h b t d
the width is not checked: the error is PyTorch's own, where a ValueError with both numbers is asked for
+ return x.reshape(x.shape[0], x.shape[1], n_heads, x.shape[2] // n_heads).transpose(1, 2)

# merge_heads
a reshape without moving the heads back: positions and heads are mixed up
+ return x.reshape(x.shape[0], x.shape[2], -1)
the features of the heads alternate, where those of one head should be side by side
- (h d) => (d h)
the heads were added up instead of placed side by side
+ return x.sum(1)
the heads are back behind the positions, [B, T, H, D], but not joined
+ return x.transpose(1, 2)
the last two axes are the wrong way round: [B, H*D, T]
- b t (h d) => b (h d) t
after transpose the numbers of a position are not side by side in memory: reshape copies them, view cannot
+ return x.transpose(1, 2).view(x.shape[0], x.shape[2], -1)
positions and features were joined, [B, H, T*D], instead of heads and features
+ return x.flatten(2)

# repeat_kv
the groups alternate (0, 1, 0, 1), where the copies of one should be side by side (0, 0, 1, 1)
- (g r) => (r g)
positions were repeated instead of heads
- b (g r) t d => b g (t r) d
the batch was repeated instead of the heads
- b (g r) t d => (b r) g t d
the groups are not repeated at all
+ return x
the result has one axis too many, [B, G, R, T, D]: groups and copies are not joined
- (g r) => g r
the copies are cut off from the graph, so that no gradient reaches the group
- x, "b => x.detach(), "b
n_repeats was taken as the total number of heads
- r=n_repeats => r=max(1, n_repeats // x.shape[1])
the features were repeated instead of the heads
- b (g r) t d => b g t (d r)
repeat_interleave without dim flattens the tensor first
+ return x.repeat_interleave(n_repeats)
expand repeats only an axis of size 1: make a new one after the groups, and join the two after that
+ return x.expand(-1, x.shape[1] * n_repeats, -1, -1)

# KVCache
tensors are concatenated at each update: the whole past is copied for every token
- self.length = 0 => self.length, self.max_len = 0, max_len
- batch, n_kv_heads, max_len, head_dim = self.keys.shape
+ batch, n_kv_heads, _, head_dim = self.keys.shape
+ max_len = self.max_len
- self.keys[:, :, start:end] = k
- self.values[:, :, start:end] = v
+ self.keys = torch.cat([self.keys[:, :, :start], k], dim=2)
+ self.values = torch.cat([self.values[:, :, :start], v], dim=2)
copies are returned, instead of views of the cache's own memory
- return self.keys[:, :, :end], self.values[:, :, :end]
+ return self.keys[:, :, :end].clone(), self.values[:, :, :end].clone()
every update begins at position 0 and overwrites the past
- self.keys[:, :, start:end] => self.keys[:, :, : k.shape[2]]
- self.values[:, :, start:end] => self.values[:, :, : k.shape[2]]
length is never advanced
- self.length = end =>
length grows by 1, however many positions came
- self.length = end => self.length += 1
only the new positions are returned, not all positions so far
- self.keys[:, :, :end], self.values[:, :, :end] => k, v
all max_len positions are returned, with zeros where nothing was written yet
- self.keys[:, :, :end], self.values[:, :, :end] => self.keys, self.values
what is returned ends before the new positions
- self.keys[:, :, :end], self.values[:, :, :end] => self.keys[:, :, :start], self.values[:, :, :start]
keys and values are exchanged
+ k, v = v, k
  batch, n_kv_heads, max_len, head_dim = self
the values were written over the keys
- v)): => k)):
- self.values[:, :, start:end] = v =>
- self.keys[:, :, :end], self.values[:, :, :end] => self.keys[:, :, :end], self.keys[:, :, :end]
the number of new positions is read from the axis of the heads
- self.length = end => self.length = end = start + k.shape[1]
a full cache silently drops its oldest positions
- if end > max_len:
-     raise ValueError(f"the cache holds {start} of {max_len} positions: {k.shape[2]} more would make {end}")
+ if end > max_len:
+     kept = max(0, max_len - k.shape[2])
+     self.keys[:, :, :kept] = self.keys[:, :, start - kept : start].clone()
+     self.values[:, :, :kept] = self.values[:, :, start - kept : start].clone()
+     start, end, k, v = kept, max_len, k[:, :, -max_len:], v[:, :, -max_len:]
the cache is changed before it refuses an update that does not fit
+ self.length = end
  if end > max_len:
the last position is never used: an update that just fits is refused
- end > max_len => end >= max_len
a batch of one, or a single head, is silently broadcast over the whole cache
+ k, v = (new.expand(batch, n_kv_heads, -1, head_dim) for new in (k, v))
  expected = (batch, n_kv_heads, k.shape[-2], head_dim)
the keys are written before the shape of the values is checked
  ("values", v)):
+     if name == "values" and self.length + k.shape[2] <= max_len:
+         self.keys[:, :, self.length : self.length + k.shape[2]] = k
the third axis is read before the number of axes is checked
+ if self.length + k.shape[2] > max_len:
+     raise ValueError(f"{self.length} + {k.shape[2]} > {max_len}")
  expected =
only the new positions are compared with max_len, not those held and the new ones together
- end > max_len => k.shape[2] > max_len
only the shape of the keys is checked, not that of the values
- (("keys", k), ("values", v)) => (("keys", k),)
the new positions were written along the axis of the heads: positions are the third axis
- self.keys[:, :, start:end] = k => self.keys[:, start:end] = k
- self.values[:, :, start:end] = v => self.values[:, start:end] = v
what fits is written before the rest is refused
- if end > max_len:
+ self.keys[:, :, start:end] = k[:, :, : max_len - start]
+ self.values[:, :, start:end] = v[:, :, : max_len - start]
+ if end > max_len:
max_len is not checked: the error is PyTorch's, where a ValueError with the arithmetic is asked for
- if end > max_len: => if False:
the new values are never written
- self.values[:, :, start:end] = v =>

# MultiHeadAttention
the output projection wo is left out
- self.wo(merge_heads(scaled_dot_product_attention(q, k, v, mask)))
+ merge_heads(scaled_dot_product_attention(q, k, v, mask))
the heads are joined by a reshape alone: positions and heads are mixed up
- merge_heads(scaled_dot_product_attention(q, k, v, mask))
+ scaled_dot_product_attention(q, k, v, mask).reshape(x.shape)
the whole width is one head: the features are not split
+ q, k, v = (merge_heads(heads)[:, None] for heads in (q, k, v))
+ mask = None if mask is None else mask[..., :1, :, :]
  return self.wo(merge_heads(scaled_dot_product_attention(q, k, v, mask)))
the scores are divided by the square root of the model's width, not of a head's
- (q, k, v, mask) => (q / math.sqrt(self.n_heads), k, v, mask)
the values are rotated too
- q, k = (apply_rope(heads.transpose(1, 2), rope).transpose(1, 2) for heads in (q, k))
+ q, k, v = (apply_rope(heads.transpose(1, 2), rope).transpose(1, 2) for heads in (q, k, v))
only the queries are rotated, not the keys
- q, k = (apply_rope(heads.transpose(1, 2), rope).transpose(1, 2) for heads in (q, k))
+ q = apply_rope(q.transpose(1, 2), rope).transpose(1, 2)
rope is ignored
- rope is not None => False
the input is rotated before it is projected, instead of queries and keys after it
+ if rope is not None:
+     x, rope = apply_rope(x.unflatten(-1, (self.n_heads, -1)), rope).flatten(2), None
  q, k = split_heads
the mask is ignored
- (q, k, v, mask) => (q, k, v)
it always hides the future, where only the mask should do that
+ causal = causal_mask(q.shape[2], k.shape[2])
+ mask = causal if mask is None else causal & mask
  return
the cache is ignored: each chunk attends to itself alone
- k, v = cache.update(k, v)
+ cache.update(k, v)
+ mask = None if mask is None else mask[..., -x.shape[1] :]
the keys are cached before they are rotated, and never rotated after
- q, k = (apply_rope(heads.transpose(1, 2), rope).transpose(1, 2) for heads in (q, k))
+ q = apply_rope(q.transpose(1, 2), rope).transpose(1, 2)
+ k = k if cache is not None else apply_rope(k.transpose(1, 2), rope).transpose(1, 2)
apply_rope was given [B, H, T, D], where it takes [B, T, H, D]
- apply_rope(heads.transpose(1, 2), rope).transpose(1, 2) => apply_rope(heads, rope)
the keys are rotated after they are cached, so the old ones are rotated again
- if rope is not None:
-     q, k = (apply_rope(heads.transpose(1, 2), rope).transpose(1, 2) for heads in (q, k))
- if cache is not None:
-     k, v = cache.update(k, v)
+ if rope is not None:
+     q = apply_rope(q.transpose(1, 2), rope).transpose(1, 2)
+ if cache is not None:
+     k, v = cache.update(k, v)
+ if rope is not None:
+     rope = rope.expand(k.shape[2], -1) if len(rope) == 1 else rope
+     k = apply_rope(k.transpose(1, 2), rope).transpose(1, 2)
the keys and values are repeated before they are cached: the cache grows by H / G
- if cache is not None:
-     k, v = cache.update(k, v)
- k, v = (repeat_kv(heads, self.n_heads // self.n_kv_heads) for heads in (k, v))
+ k, v = (repeat_kv(heads, self.n_heads // self.n_kv_heads) for heads in (k, v))
+ if cache is not None:
+     k, v = cache.update(k, v)
query heads take the groups in turn, where neighbouring heads should share a group
- repeat_kv(heads, self.n_heads // self.n_kv_heads) => heads.repeat(1, self.n_heads // self.n_kv_heads, 1, 1)
the projections have biases
- n_heads * self.head_dim, bias=False)
- self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
- self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
- self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
+ n_heads * self.head_dim)
+ self.wk = nn.Linear(dim, n_kv_heads * self.head_dim)
+ self.wv = nn.Linear(dim, n_kv_heads * self.head_dim)
+ self.wo = nn.Linear(n_heads * self.head_dim, dim)
n_kv_heads is ignored: keys and values have as many heads as the queries
+ n_kv_heads = n_heads
  self.n_heads, self.n_kv_heads, self.head_dim = n_heads
a width that is no multiple of the heads is silently rounded down
- if dim % n_heads:
-     raise ValueError(f"dim = {dim} is not a multiple of n_heads = {n_heads}")
+ dim = dim // n_heads * n_heads
heads of queries that are no multiple of the key/value heads are accepted
- raise ValueError(f"n_heads = {n_heads} is not a multiple of n_kv_heads = {n_kv_heads}") => n_kv_heads = 1
the result is cut off from the graph before wo: wq, wk and wv learn nothing
- scaled_dot_product_attention(q, k, v, mask) => scaled_dot_product_attention(q, k, v, mask).detach()
the mask was inverted: True means that a query may attend here too
- (q, k, v, mask) => (q, k, v, None if mask is None else ~mask)
without a mask it hides the future, where None means that every position may attend to every other
- (q, k, v, mask) => (q, k, v, causal_mask(q.shape[2], k.shape[2]) if mask is None else mask)
keys and values are not repeated for the query heads that share them
- k, v = (repeat_kv(heads, self.n_heads // self.n_kv_heads) for heads in (k, v)) =>
keys and values are repeated G times, where H / G copies are needed
- repeat_kv(heads, self.n_heads // self.n_kv_heads) => repeat_kv(heads, self.n_kv_heads)
n_kv_heads=None was taken as one head: it means as many as the queries have
- n_heads if n_kv_heads is None => 1 if n_kv_heads is None
the width of a head was taken as C / G, where it is C / H for queries, keys and values
- dim // n_heads => dim // n_kv_heads
split_heads was given the width of a head, where it takes their number
- split_heads(self.wq(x), self.n_heads) => split_heads(self.wq(x), self.head_dim)
keys and values are exchanged on the way into the cache
- cache.update(k, v) => cache.update(v, k)
the values are projected by wk instead of wv
- v = split_heads(self.wv(x), self.n_kv_heads) => v = split_heads(self.wk(x), self.n_kv_heads)
x is added to the result: that is the block's task, not the layer's
- return self.wo => return x + self.wo
the scores are divided by D instead of by its square root, perhaps because both the layer and
scaled_dot_product_attention divide
- (q, k, v, mask) => (q / math.sqrt(self.head_dim), k, v, mask)
with a cache, queries and keys are not rotated
- if rope is not None: => if rope is not None and cache is None:
the result of apply_rope is [B, T, H, D], and was not transposed back
- apply_rope(heads.transpose(1, 2), rope).transpose(1, 2) => apply_rope(heads.transpose(1, 2), rope)
wo has a bias
- self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False) => self.wo = nn.Linear(n_heads * self.head_dim, dim)
the keys are cut off from the graph: wk learns nothing
- split_heads(self.wk(x), self.n_kv_heads) => split_heads(self.wk(x), self.n_kv_heads).detach()
the queries are projected by wk and the keys by wq
- q, k = split_heads(self.wq(x), self.n_heads), split_heads(self.wk(x), self.n_kv_heads)
+ k, q = split_heads(self.wq(x), self.n_heads), split_heads(self.wk(x), self.n_kv_heads)
a mask of three axes was given a head axis: it broadcasts as it is, which makes it [H, T, S]
- (q, k, v, mask) => (q, k, v, mask[:, None] if mask is not None and mask.ndim == 3 else mask)
the cache was given [B, T, G, D], where it takes [B, G, T, D]
- k, v = cache.update(k, v)
+ k, v = (heads.transpose(1, 2) for heads in cache.update(k.transpose(1, 2), v.transpose(1, 2)))
keys and values are cut off from the graph: wk and wv learn nothing
- repeat_kv(heads, => repeat_kv(heads.detach(),
the scores are divided by the square root of the number of keys: mend scaled_dot_product_attention first
- (q, k, v, mask) => (q * math.sqrt(self.head_dim / k.shape[2]), k, v, mask)
""")
