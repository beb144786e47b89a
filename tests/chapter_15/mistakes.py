"""What goes wrong when people write flash attention."""

from lib.workbook.grading import edits

edits("""
# attention_io_bytes
numbers are counted instead of bytes
- return 2 * (4 * length => return (4 * length
- return 2 * (2 * length => return (2 * length
2 N^2 instead of 4 N^2: both the scores and the weights are written and read again
- 4 * length**2 => 2 * length**2
the last block of keys, which is not full, is missing
- -(-length // block) => length // block
the output is written for each block, but never read back
- 3 * length => 2 * length
the block of keys is rounded down: with room for fewer than 4d numbers it has no key at all
- -(-(sram_bytes // 2) // (4 * head_dim)) => sram_bytes // 2 // (4 * head_dim)
a block of M // d keys: the queries, the keys, the values and the output need room too
- (4 * head_dim) => head_dim
M is the memory's size in bytes instead of the numbers of two bytes that it holds
- (sram_bytes // 2) => sram_bytes
the number is right, but it is a float and should be an int
+ return float(reference.attention_io_bytes(length, head_dim, sram_bytes, algorithm))

# online_softmax_update
the sum so far is not scaled to the new maximum
- l * decay => l
the output so far is not scaled to the new maximum
- acc * decay[..., None] => acc
the old sums are multiplied by exp(m' - m): the exponent has the wrong sign
- torch.exp(m - shift) => torch.exp((m_new - m).nan_to_num(0.0, posinf=0.0))
the new maximum is that of the tile alone: the old maximum is forgotten
- torch.maximum(m, scores.amax(-1)) => scores.amax(-1)
in a row without keys, -inf is subtracted from -inf
- m_new.masked_fill(m_new == -torch.inf, 0) => m_new
the weights are rounded to the values' 16 bits for their product
- weights @ values.to(acc.dtype) => (weights.to(values.dtype) @ values).to(acc.dtype)
the output is divided by l in every tile instead of once at the end
+ m, l, acc = reference.online_softmax_update(m, l, acc, scores, values)
+ return m, l, acc / l[..., None]
powers of 2 are taken where the softmax has powers of e
- torch.exp(scores => torch.exp2(scores
- torch.exp(m => torch.exp2(m
what came before is scaled to the new maximum twice
- l * decay => l * decay**2
- acc * decay[..., None] => acc * decay[..., None] ** 2
the new tile is scaled by exp(m - m') too, but its weights are relative to m' already
- l * decay + weights.sum(-1), acc * decay[..., None] + weights @ values.to(acc.dtype)
+ (l + weights.sum(-1)) * decay, (acc + weights @ values.to(acc.dtype)) * decay[..., None]
the mean of the tile's weights is added to l instead of their sum
- weights.sum(-1) => weights.mean(-1)

# FlashAttentionTorch
scores not divided by the root of the width
- * q.shape[-1] ** -0.5 =>
scores divided by the width instead of its root
- q.shape[-1] ** -0.5 => (1 / q.shape[-1])
the causal mask is aligned to the first key, but query t sees the keys up to t + S - T
- tile.start + k.shape[-2] - q.shape[-2] => tile.start
the diagonal is hidden too (< instead of <=), but a query sees its own key
- tile.start + k.shape[-2] - q.shape[-2] => tile.start + k.shape[-2] - q.shape[-2] - 1
a row without keys is divided by its sum, which is 0: NaN instead of zeros
- l.masked_fill(l == 0, 1)[..., None] => l[..., None]
the causal mask is ignored
- if is_causal else None => if False else None
tiles above the diagonal are computed and hidden instead of skipped
- tile.start > position + q.shape[-2] - 1 => False
the saved logsumexp is in base 2
- v, out, lse) => v, out, lse / torch.tensor(2.0).log())
only q, k and v are saved, so the backward pass has no logsumexp
- v, out, lse) => v)
the whole matrix of scores is computed at once
- dtype = torch.promote_types(q.dtype, torch.float32)
+ dtype, _ = torch.promote_types(q.dtype, torch.float32), queries @ keys.mT
the output or the logsumexp is made on the default device instead of that of the inputs
- torch.empty_like(queries), queries.new_empty(queries.shape[:-1], dtype=dtype)
+ torch.empty(queries.shape, dtype=q.dtype), torch.empty(queries.shape[:-1], dtype=dtype)
autocast is left on inside: it rounds the products of float32 inputs to 16 bits
- enabled=False => enabled=torch.is_autocast_enabled(q.device.type)
the scaled queries are rounded to 16 bits before their product with the keys
- queries[..., tile, :].to(dtype) * q.shape[-1] ** -0.5
+ (queries[..., tile, :].to(dtype) * q.shape[-1] ** -0.5).to(q.dtype).to(dtype)
the scores are computed in the inputs' dtype: 16 bits before the exponential
- q @ k[..., tile, :].to(q.dtype).mT => (q @ k[..., tile, :].to(q.dtype).mT).to(k.dtype).to(q.dtype)

# flash_backward
the row sums of o * do are not subtracted
- - delta[..., rows, None] =>
the gradient of the queries lacks the scale of the scores
- ks[..., cols, :] * scale => ks[..., cols, :]
the gradient of the keys lacks the scale of the scores
- ds.mT @ query => ds.mT @ (query / scale)
the gradient of the values is computed with ds instead of the weights
- p.mT @ grad => ds.mT @ grad
the causal mask is aligned to the first key, but query t sees the keys up to t + S - T
- k.shape[-2] - q.shape[-2] => 0
the diagonal is hidden too (< instead of <=), but a query sees its own key
- k.shape[-2] - q.shape[-2] => k.shape[-2] - q.shape[-2] - 1
the causal mask is ignored
+ return reference.flash_backward(q, k, v, o, do, lse, False)
only the first of the query heads that share the keys is counted
- (p.mT @ grad).sum(2, keepdim=True) => (p.mT @ grad)[:, :, :1]
- (ds.mT @ query).sum(2, keepdim=True) => (ds.mT @ query)[:, :, :1]
scores hidden before the logsumexp is subtracted: in a row without keys that is -inf minus -inf, NaN
- .mT - lses[..., rows, None] => .mT
- p = torch.exp(hide_later(exponent, rows.start + ahead - cols.start) if is_causal else exponent)
+ exponent = hide_later(exponent, rows.start + ahead - cols.start) if is_causal else exponent
+ p = torch.exp(exponent - lses[..., rows, None])
autocast is left on inside: it rounds the products of float32 inputs to 16 bits
- enabled=False => enabled=torch.is_autocast_enabled(q.device.type)
tiles above the diagonal are computed and hidden instead of skipped
- is_causal and cols.start > rows.stop - 1 + ahead => False
the gradients are made on the default device instead of that of the inputs
- dos.new_zeros(x.shape) => torch.zeros(x.shape, dtype=dtype)
the row sums of o * do are computed in the inputs' 16 bits
- (dos * o.reshape(qs.shape)).sum(-1) => (do * o).reshape(qs.shape).sum(-1).to(dtype)
the gradient of the values is summed in their 16 bits: each tile's part is rounded
+ dv = dv.to(v.dtype)
  with torch.autocast
the scores are computed in the inputs' dtype: 16 bits before the exponential
- query @ ks[..., cols, :].mT - lses => (query @ ks[..., cols, :].mT).to(q.dtype).to(dtype) - lses
`view` takes an o or a do with some strides only: `reshape` copies where it must
- do.reshape => do.view

# flash_forward_kernel
the logsumexp is left in base 2
- (m + tl.log2(l)) * LN2 => m + tl.log2(l)
exp2 of natural scores: they need the factor log2(e)
- (scale * LOG2E) => scale
scores not divided by the root of the width
- (scale * LOG2E) => LOG2E
a row without keys is divided by its sum, which is 0: NaN instead of zeros
- l = tl.where(l == 0.0, 1.0, l) =>
hidden scores get a large negative number instead of -inf: a row without keys takes the mean of hidden values
- tl.where(seen, scores, -float("inf")) => tl.where(seen, scores, -1.0e30)
tiles above the diagonal are read and masked instead of skipped
- end = tl.minimum(S, tl.maximum(i * ROWS + ROWS + S - T, 0)) =>
keys after the last one take part with score 0
- seen = cols[None, :] < S => seen = cols[None, :] >= 0
one key after the last takes part with score 0: the mask says <= S instead of < S
- seen = cols[None, :] < S => seen = cols[None, :] <= S
the store of the output has no mask
- o.dtype.element_ty), mask=inside => o.dtype.element_ty)
the keys of head % GROUP are read instead of head // GROUP
- head // GROUP * S => head % GROUP * S
key/value heads are assigned in turn, head modulo their number, instead of head // GROUP
- head // GROUP * S => head % (tl.num_programs(0) // GROUP) * S
a single loop masks every tile, even those that are seen whole
- whole, end = S // COLS * COLS, S => whole, end = S * 0, S
weights are left in float32 for their product, but tensor cores need them in v's dtype
- weights.to(value.dtype), value, acc => weights, value.to(tl.float32), acc
tl.dot without input_precision="ieee": a GPU rounds float32 factors to TF32
- tl.trans(key), input_precision="ieee" => tl.trans(key)
- acc * decay[:, None], input_precision="ieee" => acc * decay[:, None]

# flash_forward_kernel, flash_backward_dq_kernel
the causal mask is aligned to the first key, but query t sees the keys up to t + S - T
- rows[:, None] + S - T => rows[:, None]
- tl.maximum(i * ROWS + S - T + 1, 0) // COLS * COLS => 0
the diagonal is hidden too (< instead of <=), but a query sees its own key
- cols[None, :] <= rows[:, None] => cols[None, :] < rows[:, None]
- tl.maximum(i * ROWS + S - T + 1, 0) // COLS * COLS => 0
the causal mask is ignored
- tl.maximum(i * ROWS + S - T + 1, 0) // COLS * COLS => S // COLS * COLS
- tl.minimum(S, tl.maximum(i * ROWS + ROWS + S - T, 0)) => S
- seen & (cols[None, :] <= rows[:, None] + S - T) => seen
keys and values are loaded without a mask: the last tile reads beyond their end
- k + part, mask=there, other=0.0 => k + part
- v + part, mask=there, other=0.0 => v + part

# flash_backward_dq_kernel
the natural logsumexp is used as if it were in base 2
- other=0.0) * LOG2E => other=0.0)
keys beyond the last are not hidden: where scores are very negative, 2 to the power of -L is infinite there
- seen = cols[None, :] < S => seen = cols[None, :] >= 0
the scale of the scores is missing in the gradient
- acc * scale => acc
the row sums are not subtracted
- (dp - sums[:, None]) => dp
the store of the row sums has no mask
- sums, mask=rows < T => sums
tiles above the diagonal are read and masked instead of skipped
- end = tl.minimum(S, tl.maximum(i * ROWS + ROWS + S - T, 0)) =>
key/value heads are assigned in turn, head modulo their number, instead of head // GROUP
- head // GROUP * S => head % (tl.num_programs(0) // GROUP) * S
scores hidden before the logsumexp is subtracted: in a row without keys that is -inf minus -inf, NaN
- (scale * LOG2E) - lse2[:, None] => (scale * LOG2E)
- tl.exp2(exponent) => tl.exp2(exponent - lse2[:, None])
tl.dot without input_precision="ieee": a GPU rounds float32 factors to TF32
- tl.trans(key), input_precision="ieee" => tl.trans(key)
a single loop masks every tile, even those that are seen whole
- whole, end = S // COLS * COLS, S => whole, end = S * 0, S
ds is left in float32 for its product, but tensor cores need it in k's dtype
- ds.to(key.dtype), key, acc => ds, key.to(tl.float32), acc
o * do is multiplied and summed in 16 bits; cast both to float32 first
- tl.sum(tl.load(o + at, mask=inside, other=0.0).to(tl.float32) * grad.to(tl.float32), 1)
+ tl.sum(tl.load(o + at, mask=inside, other=0.0) * grad, 1).to(tl.float32)

# flash_backward_dkdv_kernel
the natural logsumexp is used as if it were in base 2
- other=0.0) * LOG2E => other=0.0)
the gradient of the keys lacks the scale of the scores
- dkey * scale => dkey
the row sums are not subtracted
- (dp - sums[None, :]) => dp
the gradient of the values is computed with ds instead of the weights
- dvalue = tl.dot(weights.to(grad.dtype), grad, dvalue, input_precision="ieee") =>
+ dvalue = tl.dot(ds.to(grad.dtype), grad, dvalue, input_precision="ieee")
  dkey = tl.dot(ds
the causal mask is aligned to the first key, but query t sees the keys up to t + S - T
- rows[None, :] + S - T => rows[None, :]
- whole = tl.minimum(tl.cdiv(tl.maximum(j * COLS + COLS - 1 + T - S, 0), ROWS) * ROWS, T) => whole = T
the diagonal is hidden too (< instead of <=), but a query sees its own key
- cols[:, None] <= rows[None, :] => cols[:, None] < rows[None, :]
- whole = tl.minimum(tl.cdiv(tl.maximum(j * COLS + COLS - 1 + T - S, 0), ROWS) * ROWS, T) => whole = T
positions are not compared on the diagonal, so queries see later keys
- if masked: => if False:
queries and gradients are loaded without a mask: the last tile reads beyond their end
- q + part, mask=there, other=0.0 => q + part
- do + part, mask=there, other=0.0 => do + part
the store of the keys' gradient has no mask
- dk.dtype.element_ty), mask=inside => dk.dtype.element_ty)
queries before the tile's keys are read
- first = tl.maximum(j * COLS + T - S, 0) // ROWS * ROWS =>
only the first of the query heads that share the keys is counted
- tl.range(0, GROUP) => tl.range(0, 1)
query heads are counted from the key/value head on, but its own are head * GROUP to head * GROUP + GROUP - 1
- head * GROUP + shared => head + shared
scores hidden before the logsumexp is subtracted: in a row without keys that is -inf minus -inf, NaN
- (scale * LOG2E) - lse2[None, :] => (scale * LOG2E)
- tl.exp2(exponent) => tl.exp2(exponent - lse2[None, :])
tl.dot without input_precision="ieee": a GPU rounds float32 factors to TF32
- tl.trans(query), input_precision="ieee" => tl.trans(query)
every tile is masked, even those whose queries see all of the keys
- whole = tl.minimum(tl.cdiv(tl.maximum(j * COLS + COLS - 1 + T - S, 0), ROWS) * ROWS, T) => whole = T
ds is left in float32 for its product, but tensor cores need it in q's dtype
- ds.to(query.dtype), query => ds, query.to(tl.float32)
the gradient of the values has the scale of the scores; only the keys' has it
- dvalue.to(dv => (dvalue * scale).to(dv

# FlashAttentionTriton
is_causal is not passed to the forward kernel
- v, is_causal) => v, False)
the inputs are saved as contiguous copies instead of as they are
- ctx.save_for_backward(q, k, v, o, lse) => ctx.save_for_backward(*(x.contiguous() for x in (q, k, v)), o, lse)
the row sums are computed again in the inputs' 16 bits; the dQ kernel's are float32
- lse, delta, ctx => lse, (o * do).sum(-1).float(), ctx
is_causal is not passed to the backward kernels
- ctx.is_causal = is_causal => ctx.is_causal = False
backward calls `flash_backward`, tiles in PyTorch, instead of launching the two kernels
- dq, delta = launch_backward_dq(flash_backward_dq_kernel, q, k, v, o, do, lse, ctx.is_causal) =>
- dk, dv = launch_backward_dkdv(flash_backward_dkdv_kernel, q, k, v, do, lse, delta, ctx.is_causal) =>
- return dq, dk, dv, None => return (*flash_backward(q, k, v, o, do, lse, ctx.is_causal), None)
the logsumexp is saved in the inputs' dtype, which may have 16 bits only
- v, o, lse)
+ v, o, lse.to(q.dtype))
- k, v, o, lse = ctx.saved_tensors => k, v, o, lse = ctx.saved_tensors; lse = lse.float()
the gradients of keys and values are exchanged
- return dq, dk, dv => return dq, dv, dk
the logsumexp is passed on instead of the row sums
- lse, delta, ctx => lse, lse, ctx
`first_derivative_only` is missing on `backward`: a second derivative silently lacks terms
- @first_derivative_only =>
contiguous copies are saved too, which takes twice the memory until the backward pass
- ctx.save_for_backward(q, k, v, o, lse)
+ ctx.save_for_backward(q, k, v, o, lse, q.contiguous(), k.contiguous(), v.contiguous())
- q, k, v, o, lse = ctx => q, k, v, o, lse, *_ = ctx

# flash_attention
is_causal is not passed on: every query sees every key
+ return reference.flash_attention(q, k, v, False)
CPU tensors go to the Triton kernels, which an interpreter runs there; ask `q.is_cuda` first
+ if q.is_cuda or torch.is_autocast_enabled(q.device.type) or q.dtype == torch.float64 or q.shape[-1] > 256:
+     return reference.flash_attention(q, k, v, is_causal)
+ return reference.FlashAttentionTriton.apply(q, k, v, is_causal)
under autocast the dtype of the inputs is kept
+ with torch.autocast(q.device.type, enabled=False):
+     return reference.flash_attention(q, k, v, is_causal)
float64 is cast under autocast, but PyTorch's autocast leaves it alone
- x if x.dtype == torch.float64 else x.to => x.to
cut off from autograd: the result has no gradient
+ return reference.flash_attention(q.detach(), k.detach(), v.detach(), is_causal)
""")
