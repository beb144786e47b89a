"""What goes wrong when people keep a state instead of a cache."""

from typing import Any

from lib.workbook.grading import edits

edits("""
# linear_attention_recurrent
the new value fades, too: the decay comes first, and then position t writes
- torch.exp(g[:, t, :, :, None]) * state + k[:, t, :, :, None] * v[:, t, :, None, :]
+ torch.exp(g[:, t, :, :, None]) * (state + k[:, t, :, :, None] * v[:, t, :, None, :])
position t reads before it writes, so that it never sees its own value
- state = torch.exp(g[:, t, :, :, None]) * state + k[:, t, :, :, None] * v[:, t, :, None, :]
- outputs.append(torch.einsum("bhk,bhkv->bhv", queries[:, t], state))
+ state = torch.exp(g[:, t, :, :, None]) * state
+ outputs.append(torch.einsum("bhk,bhkv->bhv", queries[:, t], state))
+ state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
g is taken as the decay itself: it is the decay's logarithm
- torch.exp(g[:, t, :, :, None]) => g[:, t, :, :, None]
the decay of each feature belongs to the key's features, which are the state's rows, not its columns
- torch.exp(g[:, t, :, :, None])
+ torch.exp(g[:, t, :, None, :] if g.shape[-1] == v.shape[-1] else g[:, t, :, :, None])
the scale is missing: it goes to the query
- q.to(dtype) * scale => q.to(dtype)
the keys are scaled instead of the queries, so that the state is scaled, too
- q.to(dtype) * scale, k.to(dtype) => q.to(dtype), k.to(dtype) * scale
a scale of 0 is taken for None
- q.shape[-1] ** -0.5 if scale is None else scale => scale or q.shape[-1] ** -0.5
the default scale is 1 / Dk: it is one over the root of Dk
- q.shape[-1] ** -0.5 if scale is None => q.shape[-1] ** -1.0 if scale is None
the sums are in the dtype of the queries, where small numbers vanish beside large ones
- torch.promote_types(q.dtype, torch.float32) => q.dtype
everything is float32, float64 inputs too
- torch.promote_types(q.dtype, torch.float32) => torch.float32
the outputs stay in the dtype of the sums
- (torch.stack(outputs, 1) if outputs else v).to(q.dtype), state => torch.stack(outputs, 1) if outputs else v, state
the initial state is ignored
- if state is None: => if True:
the initial state is a constant: no gradient reaches it
- state.to(dtype) => state.detach().to(dtype)
the initial state is written in place: it belongs to the caller
- state = torch.exp(g[:, t, :, :, None]) * state + k[:, t, :, :, None] * v[:, t, :, None, :]
+ if t == 0 and initial_state is not None and not initial_state.requires_grad:
+     initial_state.mul_(torch.exp(g[:, t, :, :, None]))
+     state = initial_state.add_(k[:, t, :, :, None] * v[:, t, :, None, :])
+ else:
+     state = torch.exp(g[:, t, :, :, None]) * state + k[:, t, :, :, None] * v[:, t, :, None, :]
without a position, `torch.stack` has nothing to stack: T = 0 gives no outputs and the initial state
- torch.stack(outputs, 1) if outputs else v => torch.stack(outputs, 1)
the shapes are not checked, and broadcast
- check_sequence(q, k, v, g, initial_state=initial_state) => pass

# linear_attention_chunked
a position sees the later ones of its chunk, too: j runs up to i
@@ _walk
- _weights(q, k, c, 1) => _weights(q, k, c, k.shape[-2])
a position does not see its own value: the diagonal belongs to the scores
@@ _walk
- _weights(q, k, c, 1) => _weights(q, k, c, 0)
the state before the chunk does not fade on its way to position i
@@ _walk
- q * torch.exp(c) @ => q @
the state that a chunk adds to is not faded over the chunk
@@ _walk
- torch.baddbmm(kept * state, key, new[-1]) => torch.baddbmm(state, key, new[-1])
the values that a chunk adds to the state do not fade until its end
@@ _walk
- (k * torch.exp(end - c)).mT => k.mT
the values that a chunk adds fade by the decay since the chunk's beginning instead of that up to its end
@@ _walk
- (k * torch.exp(end - c)).mT => (k * torch.exp(c)).mT
each chunk reads the state after it instead of the state before it
@@ _walk
- before.append(state) => pass
  state = torch.baddbmm(kept * state, key, new[-1])
+ before.append(state)
no state crosses the chunks: each one begins with the initial state
@@ _walk
- state = torch.baddbmm(kept * state, key, new[-1])
+ first = state if len(before) == 1 else first
+ state = torch.baddbmm(kept * state, key, new[-1])
- torch.stack(before) => first
the decays within a chunk are missing from its scores
@@ _weights
- torch.exp(between.masked_fill(later[..., None], -torch.inf))
+ torch.exp(torch.zeros_like(between).masked_fill(later[..., None], -torch.inf))
the sum of g runs through the whole sequence, where a chunk needs its own
- g.cumsum(-2) => (g.cumsum(-2) + (g.sum(-2, keepdim=True).cumsum(0) - g.sum(-2, keepdim=True)))
all of exp(c_i - c_j) is computed, and masked afterwards: above the diagonal it overflows, and gradients become NaN
@@ _weights
- torch.exp(between.masked_fill(later[..., None], -torch.inf)) => torch.exp(between) * ~later[..., None]
exp(c_i) and exp(-c_j) are computed apart, and the second one overflows
@@ _weights
- torch.exp(between.masked_fill(later[..., None], -torch.inf))
+ (torch.exp(c.unsqueeze(-2)) * torch.exp(-c.unsqueeze(-3))).masked_fill(later[..., None], 0)
the recurrence itself, position after position: right, and as many steps as positions
+ check_sequence(q, k, v, g, initial_state=initial_state, chunk_size=chunk_size)
+ return reference.linear_attention_recurrent(q, k, v, g, scale, initial_state)
one chunk for the whole sequence: a tensor of T x T numbers
- size = min(chunk_size, max(q.shape[1], 1)) => size = max(q.shape[1], 1)
the last positions are dropped where they do not fill a chunk
- queries, k, v, g = (_chunks(x, size) for x in sequences)
+ n = q.shape[1] // size * size
+ queries, k, v, g = (_chunks(x[:, :n], size) for x in sequences)
- return _whole(out, q), state.unflatten(0, (q.shape[0], q.shape[2]))
+ out = F.pad(out.flatten(0, 0), (0, 0, 0, 0, 0, 0, 0, 1))
+ return _whole(out, q), state.unflatten(0, (q.shape[0], q.shape[2]))
the initial state is ignored
- state.flatten(0, 1) => torch.zeros_like(state.flatten(0, 1))
the state that is returned is the one before the last chunk
@@ _walk
- @ torch.stack(new), state => @ torch.stack(new), before[-1]
a chunk size below 1 is not refused
- initial_state=initial_state, chunk_size=chunk_size) => initial_state=initial_state)
- min(chunk_size, max(q.shape[1], 1)) => min(max(chunk_size, 1), max(q.shape[1], 1))
no positions leave no chunk, and nothing to stack
@@ _chunks
- -x.shape[1] % size if x.shape[1] else size => -x.shape[1] % size
the sums are in the dtype of the queries
@@ _wide
- torch.promote_types(q.dtype, torch.float32) => q.dtype
a scale of 0 is taken for None
@@ _wide
- q.shape[-1] ** -0.5 if scale is None else scale => scale or q.shape[-1] ** -0.5
the scale is missing: it goes to the query
@@ _wide
- q.to(dtype) * scale => q.to(dtype)
the keys are scaled instead of the queries, so that the state is scaled, too
@@ _wide
- q.to(dtype) * scale, k.to(dtype) => q.to(dtype), k.to(dtype) * scale
c_i lacks g_i, the decay of its own position: the sum runs up to i, with i
- g.cumsum(-2) => g.cumsum(-2) - g

# delta_rule_recurrent
the value is written as it is: what the state already says about its key must be taken off first
- error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state) => error = v[:, t]
the state is read before it fades: the decay comes first
- state = torch.exp(g[:, t, :, :, None]) * state
- error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
+ error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
+ state = torch.exp(g[:, t, :, :, None]) * state
beta weighs only the new value: it weighs the error, so the old value goes by the same share
- error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
+ error = beta[:, t, :, None] * v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
- (beta[:, t, :, None] * error)[:, :, None, :] => error[:, :, None, :]
beta is missing: the whole error is corrected
- (beta[:, t, :, None] * error) => (0 * beta[:, t, :, None] + error)
beta weighs the old value only, and all of the new one is written
- (beta[:, t, :, None] * error) => (beta[:, t, :, None] * (error - v[:, t]) + v[:, t])
the query predicts the value, where the key should
- k[:, t], state) => queries[:, t], state)
the prediction is added to the value instead of taken off
- v[:, t] - torch.einsum => v[:, t] + torch.einsum
keys are normed here: they come as they are
- outputs, beta = [], beta.to(v.dtype) => outputs, beta, k = [], beta.to(v.dtype), F.normalize(k, dim=-1)
position t reads before it corrects
- state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None, :]
- outputs.append(torch.einsum("bhk,bhkv->bhv", queries[:, t], state))
+ outputs.append(torch.einsum("bhk,bhkv->bhv", queries[:, t], state))
+ state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None, :]
no gradient flows through the prediction
- torch.einsum("bhk,bhkv->bhv", k[:, t], state) => torch.einsum("bhk,bhkv->bhv", k[:, t], state).detach()
the sums are in the dtype of the queries
@@ _wide
- torch.promote_types(q.dtype, torch.float32) => q.dtype
the shape of beta is not checked
- check_sequence(q, k, v, g, beta, initial_state)
+ check_sequence(q, k, v, g, None, initial_state)
+ beta = beta.reshape(q.shape[:3])

# wy_representation
a position corrects itself once more: A has zeros on its diagonal
- torch.linalg.solve_triangular(beta * _weights(k, k, c, 0), right, upper=False, unitriangular=True)
+ torch.linalg.solve_triangular(
+     torch.eye(k.shape[-2], dtype=dtype) + beta * _weights(k, k, c, 1), right, upper=False)
the system is not solved: w and u are its right-hand sides, as if no position saw the earlier ones
- torch.linalg.solve_triangular(beta * _weights(k, k, c, 0), right, upper=False, unitriangular=True)
+ right + 0 * (beta * _weights(k, k, c, 0)) @ right
(I + A) is applied where its inverse is needed
- torch.linalg.solve_triangular(beta * _weights(k, k, c, 0), right, upper=False, unitriangular=True)
+ right + (beta * _weights(k, k, c, 0)) @ right
the sign of A: the system is I + A
- torch.linalg.solve_triangular(beta * _weights(k, k, c, 0), right
+ torch.linalg.solve_triangular(-beta * _weights(k, k, c, 0), right
beta_j stands in A where beta_i should: it belongs to the row
- torch.linalg.solve_triangular(beta * _weights(k, k, c, 0), right
+ torch.linalg.solve_triangular(beta.mT * _weights(k, k, c, 0), right
beta is missing from A
- torch.linalg.solve_triangular(beta * _weights(k, k, c, 0), right
+ torch.linalg.solve_triangular(_weights(k, k, c, 0), right
beta is missing from u
- beta * torch.cat([torch.exp(c) * k, v], -1) => torch.cat([beta * torch.exp(c) * k, v], -1)
the state before the chunk does not fade in w: its keys lack exp(c)
- torch.exp(c) * k, v => k, v
A has no decays: what position j wrote fades until i reads it
- _weights(k, k, c, 0) => _weights(k, k, 0 * c, 0)
the decays are those of single positions, not their running sum
- c = g.cumsum(-2) => c = g
the values in u fade like the keys in w: only what the old state says fades
- torch.cat([torch.exp(c) * k, v], -1) => torch.exp(c[..., :1]) * torch.cat([torch.exp(c - c[..., :1]) * k, v], -1)
a full inverse is computed, where a triangular solve is enough
- torch.linalg.solve_triangular(beta * _weights(k, k, c, 0), right, upper=False, unitriangular=True)
+ torch.linalg.inv(torch.eye(k.shape[-2], dtype=dtype) + beta * _weights(k, k, c, 0)) @ right
the rows are solved one after the other in a loop
- torch.linalg.solve_triangular(beta * _weights(k, k, c, 0), right, upper=False, unitriangular=True)
+ in_a_loop(beta * _weights(k, k, c, 0), right)
w and u are in the dtype of the keys
- torch.promote_types(k.dtype, torch.float32) => k.dtype if k.dtype != torch.bfloat16 else torch.float32
- return solved[..., : k.shape[-1]], solved[..., k.shape[-1] :]
+ return tuple(x.to(given) for x in (solved[..., : k.shape[-1]], solved[..., k.shape[-1] :]))
- g = torch.zeros_like(beta) if g is None else g => g, given = torch.zeros_like(beta) if g is None else g, k.dtype
the two results change places: w comes first
- solved[..., : k.shape[-1]], solved[..., k.shape[-1] :] => solved[..., k.shape[-1] :], solved[..., : k.shape[-1]]
the shapes are not checked, and broadcast
- check_chunk(k, v, beta, g) => pass

# delta_rule_chunked
the values are added as in linear attention: the state before the chunk is not taken into account
- u, state.flatten(0, 1), w) => u + 0 * w.sum(-1, keepdim=True), state.flatten(0, 1))
the outputs are computed from the values instead of from what each position adds
@@ _walk
- _weights(q, k, c, 1) @ torch.stack(new) => _weights(q, k, c, 1) @ u
w S is added to u instead of taken off
@@ _walk
- torch.baddbmm(u_n, w_n, state, alpha=-1) => torch.baddbmm(u_n, w_n, state)
w reads the initial state in every chunk
@@ _walk
- torch.baddbmm(u_n, w_n, state, alpha=-1) => torch.baddbmm(u_n, w_n, before[0], alpha=-1)
`wy_representation` is called without the decays
- wy_representation(k, v, beta[..., 0], g if g.shape[-1] > 1 else g[..., 0]) => wy_representation(k, v, beta[..., 0])
a decay of each feature is replaced by its mean over the features
- g if g.shape[-1] > 1 else g[..., 0] => g.mean(-1)
the queries read the state before the chunk without its decay
@@ _walk
- q * torch.exp(c) @ => q @
the state is not faded over the chunk
@@ _walk
- torch.baddbmm(kept * state, key, new[-1]) => torch.baddbmm(state, key, new[-1])
the initial state is ignored
- state.flatten(0, 1), w) => torch.zeros_like(state.flatten(0, 1)), w)
the recurrence itself, position after position: right, and as many steps as positions
+ check_sequence(q, k, v, g, beta, initial_state, chunk_size)
+ return reference.delta_rule_recurrent(q, k, v, beta, g, scale, initial_state)
one chunk for the whole sequence: a tensor of T x T numbers
- size = min(chunk_size, max(q.shape[1], 1)) => size = max(q.shape[1], 1)
a chunk size below 1 is not refused
- check_sequence(q, k, v, g, beta, initial_state, chunk_size) => check_sequence(q, k, v, g, beta, initial_state)
- min(chunk_size, max(q.shape[1], 1)) => min(max(chunk_size, 1), max(q.shape[1], 1))
all of exp(c_i - c_j) is computed, and masked afterwards: above the diagonal it overflows
@@ _weights
- torch.exp(between.masked_fill(later[..., None], -torch.inf)) => torch.exp(between) * ~later[..., None]
the sums are in the dtype of the queries
@@ _wide
- torch.promote_types(q.dtype, torch.float32) => q.dtype
beta is left out: every position writes its whole value
- wy_representation(k, v, beta[..., 0], => wy_representation(k, v, torch.ones_like(beta[..., 0]),
the values are multiplied by beta before `wy_representation`, which does it once more
- wy_representation(k, v, beta[..., 0], => wy_representation(k, beta * v, beta[..., 0],
a position does not see its own value: the diagonal belongs to the scores
@@ _walk
- _weights(q, k, c, 1) => _weights(q, k, c, 0)
a position sees the later ones of its chunk, too: j runs up to i
@@ _walk
- _weights(q, k, c, 1) => _weights(q, k, c, k.shape[-2])
what a chunk adds to the state does not fade until its end
@@ _walk
- (k * torch.exp(end - c)).mT => k.mT
the scale is missing: it goes to the query
@@ _wide
- q.to(dtype) * scale => q.to(dtype)

# short_convolution
the weights are turned round: the last one multiplies the present input
- weight[:, None] => weight.flip(1)[:, None]
the window looks ahead: the zeros come after the inputs
  torch.cat([initial_state.to(x.dtype), x], dim=1)
+ ahead = torch.cat([x, torch.zeros_like(initial_state)], dim=1)
- F.conv1d(inputs.mT => F.conv1d(ahead.mT
the initial state is ignored
- if initial_state is None: => if True:
SiLU comes before the bias
- F.conv1d(inputs.mT, weight[:, None], bias, groups=x.shape[2]).mT
+ F.conv1d(inputs.mT, weight[:, None], groups=x.shape[2]).mT
- F.silu(y) if activation else y => (F.silu(y) if activation else y) + (0 if bias is None else bias)
SiLU is applied whatever `activation` says
- F.silu(y) if activation else y => F.silu(y)
the activation is a sigmoid: SiLU is the input times it
- F.silu(y) if activation else y => torch.sigmoid(y) if activation else y
the state is the last K inputs: the next position needs K - 1
- inputs[:, x.shape[1] :].clone() => inputs[:, max(x.shape[1] - 1, 0) :].clone()
the state holds outputs: the next position needs inputs
- inputs[:, x.shape[1] :].clone() => torch.cat([initial_state, y], 1)[:, x.shape[1] :].clone()
the state is only this call's inputs, with zeros before them: those of the initial state are forgotten
- inputs[:, x.shape[1] :].clone() => torch.cat([torch.zeros_like(initial_state), x], 1)[:, x.shape[1] :].clone()
the state is a view, which keeps all inputs alive
- inputs[:, x.shape[1] :].clone() => inputs[:, x.shape[1] :]
without a position there is nothing to convolve, and PyTorch refuses
- if x.shape[1] else x =>
the state stays in the dtype in which it came
- inputs[:, x.shape[1] :].clone() => inputs[:, x.shape[1] :].to(initial_state.dtype, copy=True)
an activation that is neither "silu" nor None is not refused
- raise ValueError(f"activation = {activation!r}: expected 'silu' or None") => pass
all channels are mixed, where each one has weights of its own
- F.conv1d(inputs.mT, weight[:, None], bias, groups=x.shape[2]).mT
+ F.conv1d(inputs.mT, weight.expand(len(weight), *weight.shape), bias).mT

# GatedDeltaNet
the rows of in_proj_qkvz are read as all queries, then all keys: they lie side by side for each key head
@@ forward
- *qkv, z = self.in_proj_qkvz(x).unflatten(-1, (self.n_k_heads, -1)).split(shares, -1)
+ *qkv, z = self.in_proj_qkvz(x).split([n * self.n_k_heads for n in shares], -1)
+ qkv, z = [y.unflatten(-1, (self.n_k_heads, -1)) for y in qkv], z.unflatten(-1, (self.n_k_heads, -1))
the rows of in_proj_ba are read as all b, then all a: they lie side by side for each key head
@@ forward
- self.in_proj_ba(x).unflatten(-1, (self.n_k_heads, -1)).chunk(2, -1)
+ (y.unflatten(-1, (self.n_k_heads, -1)) for y in self.in_proj_ba(x).chunk(2, -1))
a and b change places: b comes first, and beta is made of it
@@ forward
- b, a = (y.flatten(2) => a, b = (y.flatten(2)
key head j serves the value heads j, j + Hk, j + 2 Hk, where it should serve r neighbours
@@ forward
- (y.repeat_interleave(ratio, dim=2) for y in (q, k)) => (y.repeat(1, 1, ratio, 1) for y in (q, k))
queries and keys are not normed
@@ forward
- (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k)) => (y for y in (q, k))
keys are normed and queries are not
@@ forward
- (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
+ (q, k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6))
queries and keys are divided by the root of the mean of squares, as in an RMSNorm: here it is the sum
@@ forward
- y.square().sum(-1, keepdim=True) => y.square().mean(-1, keepdim=True)
`F.normalize` norms queries and keys: its eps is a floor of the norm, where 1e-6 is added to the sum of squares
@@ forward
- y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) => F.normalize(y, dim=-1)
queries and keys are normed with the layer's eps, which is the output norm's: theirs is 1e-6
@@ forward
- y.square().sum(-1, keepdim=True) + 1e-6 => y.square().sum(-1, keepdim=True) + self.eps
the queries are scaled here, and once more by the delta rule
@@ forward
- rule(q, k, v => rule(q * self.head_k_dim**-0.5, k, v
dt_bias is added after the softplus
@@ forward
- F.softplus(a + self.dt_bias.to(dtype)) => (F.softplus(a) + self.dt_bias.to(dtype))
A_log is taken as A itself: its exponential is the rate
@@ forward
- -torch.exp(self.A_log.to(dtype)) * => -self.A_log.to(dtype).abs() *
there is no decay: g is missing
@@ forward
- torch.sigmoid(b), g, initial_state=state) => torch.sigmoid(b), 0 * g, initial_state=state)
beta is b itself: its sigmoid is a share from 0 to 1
@@ forward
- torch.sigmoid(b), g => b, g
the gate is a sigmoid, where it should be SiLU
@@ forward
- F.silu(z) => torch.sigmoid(z)
the gate comes before the norm, which then undoes its size
@@ forward
- F.rms_norm(o, o.shape[-1:], self.norm.weight.to(dtype), self.eps) * F.silu(z)
+ F.rms_norm(o * F.silu(z), o.shape[-1:], self.norm.weight.to(dtype), self.eps)
the output is not normed
@@ forward
- F.rms_norm(o, o.shape[-1:], self.norm.weight.to(dtype), self.eps) * F.silu(z)
+ o * self.norm.weight.to(dtype) * F.silu(z)
the norm's gain is 1 + weight, as in Qwen3-Next's other norms: this one multiplies by the weight itself
@@ forward
- self.norm.weight.to(dtype) => 1 + self.norm.weight.to(dtype)
eps is not the layer's
@@ forward
- self.norm.weight.to(dtype), self.eps) => self.norm.weight.to(dtype), 1e-6)
the convolution has no activation: SiLU comes after it
@@ forward
- self.conv1d.weight[:, 0], None, conv) => self.conv1d.weight[:, 0], None, conv, None)
the convolution forgets the inputs in the cache
@@ forward
- self.conv1d.weight[:, 0], None, conv) => self.conv1d.weight[:, 0])
the recurrence forgets the state in the cache
@@ forward
- g, initial_state=state) => g)
the cache gets new tensors, so that its memory moves
@@ forward
- cache.conv_state.copy_(conv.detach())
- cache.recurrent_state.copy_(state.detach())
+ cache.conv_state, cache.recurrent_state = conv.detach(), state.detach()
the cache's length does not grow by T: it counts positions, not calls
@@ forward
- cache.length += x.shape[1] => cache.length += 1
a single position is chunked, too
@@ forward
- delta_rule_recurrent if x.shape[1] == 1 else =>
all positions go through the recurrence, one after the other
@@ forward
- if x.shape[1] == 1 else partial(delta_rule_chunked, chunk_size=self.chunk_size) => if True else None
the rule computes in the dtype of x, where it should in float32
@@ forward
- mixed.to(dtype).split => mixed.split
- q, k = (y.repeat_interleave(ratio, dim=2) for y in (q, k))
+ q, k = (y.repeat_interleave(ratio, dim=2).to(dtype) for y in (q, k))
the norm and the gate are in the dtype of x, where they should be in float32
@@ forward
- F.rms_norm(o, o.shape[-1:], self.norm.weight.to(dtype), self.eps) * F.silu(z)
+ F.rms_norm(o.to(x.dtype), o.shape[-1:], self.norm.weight, self.eps) * F.silu(z.to(x.dtype))
the recurrent state is kept in the dtype of the convolution's inputs
@@ make_cache
- dtype=wide => dtype=dtype
the cache's two states have a position too many: the present input is not remembered
@@ make_cache
- kernel - 1 => kernel
make_cache forgets the device
@@ make_cache
- conv = torch.zeros(batch, kernel - 1, channels, dtype=dtype, device=device)
+ conv = torch.zeros(batch, kernel - 1, channels, dtype=dtype)
- dtype=wide, device=device => dtype=wide
the states are not detached, so the cache keeps the graph of everything that was passed
- conv.detach() => conv
- state.detach() => state
numbers of heads that do not fit are not refused
@@ __init__
- if n_v_heads % n_k_heads: => if False:

# hybrid_cache_bytes
only keys are counted, and the values are cached, too
- return 2 * config.n_kv_heads => return config.n_kv_heads
the batch is missing: every sequence has a state and a cache of its own
- batch * sum(sizes) => sum(sizes)
a linear layer's bytes grow with the length
- return inputs * bytes_per_value + config.linear_key_head_dim * values * state_bytes_per_value
+ return length * (inputs * bytes_per_value + config.linear_key_head_dim * values * state_bytes_per_value)
the convolution's inputs are forgotten
- return inputs * bytes_per_value + config.linear_key_head_dim * values * state_bytes_per_value
+ return config.linear_key_head_dim * values * state_bytes_per_value
the convolution remembers K inputs: the present one is not needed again
- (config.linear_conv_kernel_dim - 1) => config.linear_conv_kernel_dim
the convolution's channels are counted without the queries'
- (2 * keys + values) => (keys + values)
there is a state for each value head, and not for each key head
- config.linear_key_head_dim * values * state_bytes_per_value
+ keys * config.linear_value_head_dim * state_bytes_per_value
the state is counted with the bytes of keys and values: it is kept in float32
- values * state_bytes_per_value => values * bytes_per_value
the convolution's inputs are counted with the bytes of the state
- inputs * bytes_per_value => inputs * state_bytes_per_value
an unknown kind of layer is counted instead of refused
- if kind != "linear_attention": => if "attention" not in kind and kind != "full":

# crossing_length
the result is the length at which both hold the same: the full layer must hold more
- int(linear // full) + 1 => -int(-linear // full)
the division is rounded down: at that length the full layer does not hold more yet
- int(linear // full) + 1 => int(linear // full)
a fraction of a position is returned
- int(linear // full) + 1 => linear / full
the state's bytes are left at their default
- _layer_bytes(config, kind, 1, bytes_per_value, state_bytes_per_value)
+ _layer_bytes(config, kind, 1, bytes_per_value, 4)
the bytes of keys and values are left at their default
- _layer_bytes(config, kind, 1, bytes_per_value, state_bytes_per_value)
+ _layer_bytes(config, kind, 1, 2, state_bytes_per_value)

# scan_states
each rank gets the state after its positions, with its own included
@@ _ScanStates.forward
- return before => return fade * before + state
the state of the ranks before is not faded by this rank's decay before it goes on
@@ _ScanStates.forward
- (fade * before + state).contiguous() => (before + state).contiguous()
the whole sum is faded, this rank's own state too
@@ _ScanStates.forward
- (fade * before + state).contiguous() => (fade * (before + state)).contiguous()
a rank passes on only its own state: all earlier ranks are forgotten
@@ _ScanStates.forward
- (fade * before + state).contiguous() => state.contiguous()
the logarithm is taken as the decay itself
@@ _ScanStates.forward
- torch.exp(log_decay.to(state.dtype)) => log_decay.to(state.dtype)
all states are gathered on every rank by a collective
@@ _ScanStates.forward
+ rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
+ fade = torch.exp(log_decay.to(state.dtype))
+ fade = (fade[..., None] if fade.ndim == 3 else fade[..., None, None]).expand(state.shape).contiguous()
+ states, fades = ([torch.empty_like(fade) for _ in range(n_ranks)] for _ in range(2))
+ dist.all_gather(states, state.detach().contiguous(), group=group)
+ dist.all_gather(fades, fade, group=group)
+ before = torch.zeros_like(fade)
+ for r in range(rank):
+     before = fades[r] * before + states[r]
+ ctx.group, ctx.decay_shape, ctx.decay_dtype = group, log_decay.shape, log_decay.dtype
+ ctx.save_for_backward(before, fade)
+ return before
the last rank sends its state, too, round to the first
@@ _ScanStates.forward
- if rank < last:
-     dist.send((fade * before + state).contiguous(), group=group, group_dst=rank + 1)
+ if last:
+     dist.send((fade * before + state).contiguous(), group=group, group_dst=(rank + 1) % (last + 1))
+ if rank == 0 and last:
+     dist.recv(torch.empty_like(before), group=group, group_src=last)
peers are counted in the world instead of in the group
@@ _ScanStates.forward
- dist.recv(before, group=group, group_src=rank - 1) => dist.recv(before, src=rank - 1)
- dist.send((fade * before + state).contiguous(), group=group, group_dst=rank + 1)
+ dist.send((fade * before + state).contiguous(), dst=rank + 1)
in backward, peers are counted in the world instead of in the group
@@ _ScanStates.backward
- dist.recv(after, group=ctx.group, group_src=rank + 1) => dist.recv(after, src=rank + 1)
- dist.send((grad + fade * after).contiguous(), group=ctx.group, group_dst=rank - 1)
+ dist.send((grad + fade * after).contiguous(), dst=rank - 1)
no gradient crosses the ranks: backward sends nothing
@@ _ScanStates.backward
- if rank < last:
-     dist.recv(after, group=ctx.group, group_src=rank + 1)
- if rank > 0:
-     dist.send((grad + fade * after).contiguous(), group=ctx.group, group_dst=rank - 1)
+ pass
the gradient of the later ranks is not faded on its way to the earlier ones
@@ _ScanStates.backward
- (grad + fade * after).contiguous() => (grad + after).contiguous()
a rank passes on only its own gradient: that of the later ranks is lost
@@ _ScanStates.backward
- (grad + fade * after).contiguous() => grad.contiguous()
the gradient of `state` is that of this rank's own result, where that of the next ranks should come
@@ _ScanStates.backward
- return after, => return grad,
the decay gets no gradient
@@ _ScanStates.backward
- (after * fade * before).sum(-1) => 0 * (after * fade * before).sum(-1)
the decay's gradient lacks the factor exp(log_decay)
@@ _ScanStates.backward
- (after * fade * before).sum(-1) => (after * before).sum(-1)
the state is sent in its own strides, and arrives scrambled
@@ _ScanStates.forward
  dist.recv(before, group=group, group_src=rank - 1)
+ before = before.view(before.mT.shape).mT if not state.is_contiguous() else before
a second derivative is silently wrong
@@ _ScanStates.backward
- @first_derivative_only =>
the state is faded by this rank's own decay, which acts only on what goes on to the next rank
@@ _ScanStates.forward
- return before => return fade * before
the decay's gradient comes from this rank's result: the decay acts only on what the next ranks get
@@ _ScanStates.backward
- (after * fade * before).sum(-1) => (grad * fade * before).sum(-1)

# sequence_parallel_linear_attention
the state of the ranks before is not faded on its way to position t
- wide * torch.exp(g.cumsum(1) if g.ndim == 4 else g.cumsum(1)[..., None]) => wide
the state of the ranks before fades by a rank's whole decay at every position
- g.cumsum(1) if g.ndim == 4 else g.cumsum(1)[..., None]
+ g.sum(1, keepdim=True) if g.ndim == 4 else g.sum(1, keepdim=True)[..., None]
this rank's first decay is left out: a position fades what came before it first
- torch.exp(g.cumsum(1) if g.ndim == 4 else g.cumsum(1)[..., None])
+ torch.exp(g.cumsum(1) - g[:, :1] if g.ndim == 4 else (g.cumsum(1) - g[:, :1])[..., None])
the part from the ranks before is not scaled
- out + scale * torch.einsum => out + torch.einsum
the default scale is taken for every scale
- q.shape[-1] ** -0.5 if scale is None else scale => q.shape[-1] ** -0.5
the ranks before are ignored: each rank sees its own positions only
- (out + scale * torch.einsum("bthk,bhkv->bthv", faded, before))
+ (out + 0 * torch.einsum("bthk,bhkv->bthv", faded, before))
the state is passed on without its decay
- scan_states(state, g.sum(1), group) => scan_states(state, 0 * g.sum(1), group)
the group is ignored: all ranks of the world take part
- scan_states(state, g.sum(1), group) => scan_states(state, g.sum(1))
the rank waits for the state, and only then begins with its own positions
- out, state = linear_attention_chunked(wide, k, v, g, scale, None, chunk_size)
- g = wide.new_zeros(q.shape[:3]) if g is None else g.to(wide.dtype)
- before = scan_states(state, g.sum(1), group)
+ decay = wide.new_zeros(q.shape[:3]) if g is None else g.to(wide.dtype)
+ check_sequence(q, k, v, g)
+ left = decay.flip(1).cumsum(1).flip(1) - decay
+ left = torch.exp(left if left.ndim == 4 else left[..., None])
+ state = torch.einsum("bthk,bthv->bhkv", left * k.to(wide.dtype), v.to(wide.dtype))
+ before = scan_states(state, decay.sum(1), group)
+ out, _ = linear_attention_chunked(wide, k, v, g, scale, None, chunk_size)
+ g = decay
the state of the ranks before is the chunked form's initial state: all work is done again after it arrives
+ wide = q.to(torch.promote_types(q.dtype, torch.float32))
+ decay = wide.new_zeros(q.shape[:3]) if g is None else g.to(wide.dtype)
+ _, state = linear_attention_chunked(wide, k, v, g, scale, None, chunk_size)
+ before = scan_states(state, decay.sum(1), group)
+ return linear_attention_chunked(wide, k, v, g, scale, before, chunk_size)[0].to(q.dtype)
both parts are rounded to the dtype of q before they are added
  wide = q.to(torch.promote_types(q.dtype, torch.float32))
+ rounded = q.dtype
- return (out + scale * torch.einsum("bthk,bhkv->bthv", faded, before)).to(q.dtype)
+ return out.to(rounded) + (scale * torch.einsum("bthk,bhkv->bthv", faded, before)).to(rounded)
the part from the ranks before is scaled twice
- scale * torch.einsum => scale**2 * torch.einsum
g may be None, which is no decay
- wide.new_zeros(q.shape[:3]) if g is None else g.to(wide.dtype) => g.to(wide.dtype)
the output stays in the dtype of the sums
- (out + scale * torch.einsum("bthk,bhkv->bthv", faded, before)).to(q.dtype)
+ out + scale * torch.einsum("bthk,bhkv->bthv", faded, before)

# chunk_linear_attention
the queries, keys and values are read as if they were contiguous
- *q.stride(), *k.stride(), *v.stride() => *(s for x in (q, k, v) for s in torch.empty(x.shape, device="meta").stride())
g is read as if it were contiguous
- *((0, 0, 0) if g is None else g.stride()) => *((0, 0, 0) if g is None else (t * h, h, 1))
the inputs are copied to make them contiguous: the kernel can use their strides
+ q, k, v = (x.contiguous() for x in (q, k, v))
  out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
the initial state is overwritten: the new state needs memory of its own
  state = torch.zeros(b, h, dk, dv, dtype=torch.float32, device=q.device)
+ state = state if initial_state is None else initial_state
the initial state is ignored
- state.copy_(initial_state.detach()) => pass
the initial state is cloned in its own strides, where the kernel needs it contiguous
- state.copy_(initial_state.detach()) => state = initial_state.detach().clone()
a position sees the later ones of its chunk, too
@@ chunk_linear_attention_kernel
- earlier = rows[:, None] >= rows[None, :] => earlier = rows[:, None] >= 0 * rows[None, :]
a position does not see its own value
@@ chunk_linear_attention_kernel
- earlier = rows[:, None] >= rows[None, :] => earlier = rows[:, None] > rows[None, :]
the state before the chunk is not faded on its way to position i
@@ chunk_linear_attention_kernel
- out *= tl.exp(c)[:, None] => out *= 1.0
the state is not faded over the chunk
@@ chunk_linear_attention_kernel
- memory *= tl.exp(end) => memory *= 1.0
the values do not fade until the end of the chunk
@@ chunk_linear_attention_kernel
- (value.to(tl.float32) * tl.exp(end - c)[:, None]).to(value.dtype) => value
the decays are exponentiated before they are masked, and overflow
@@ chunk_linear_attention_kernel
- tl.exp(tl.where(earlier, c[:, None] - c[None, :], 0.0)) => tl.exp(c)[:, None] * tl.exp(-c)[None, :]
the state is not scaled, only the scores within the chunk
@@ chunk_linear_attention_kernel
- tl.dot(scores.to(value.dtype), value, out * scale, input_precision="ieee")
+ tl.dot(scores.to(value.dtype), value, out, input_precision="ieee")
the state is rounded to the dtype of the queries before it is read
@@ chunk_linear_attention_kernel
- if query.dtype != tl.float32: => if query.dtype == tl.int8:
the state is kept in the dtype of the queries
@@ chunk_linear_attention_kernel
- memory = tl.dot(tl.trans(key), faded, memory, input_precision="ieee")
+ memory = tl.dot(tl.trans(key), faded, memory, input_precision="ieee").to(query.dtype).to(tl.float32)
products of float32 run in TF32 on a GPU
@@ chunk_linear_attention_kernel
- tl.dot(tl.trans(key), faded, memory, input_precision="ieee") => tl.dot(tl.trans(key), faded, memory)
the last chunk writes beyond the end of the outputs: the store needs a mask
@@ chunk_linear_attention_kernel
- out.to(o.dtype.element_ty), mask=written) => out.to(o.dtype.element_ty), mask=cols[None, :] < Dv)
the last chunk reads beyond the end of the keys: the load needs a mask
@@ chunk_linear_attention_kernel
- dims[None, :] * kd, mask=there, other=0.0) => dims[None, :] * kd, mask=dims[None, :] < Dk, other=0.0)
the state is read and written beyond its rows where Dk is no power of two
@@ chunk_linear_attention_kernel
- (dims[:, None] < Dk) & (cols[None, :] < Dv) => (dims[:, None] >= 0) & (cols[None, :] < Dv)
all slices of the values write the first one: the columns lack the program's offset
@@ chunk_linear_attention_kernel
- tl.program_id(1) * SLICE + tl.arange(0, SLICE) => tl.arange(0, SLICE)
only whole chunks are walked
@@ chunk_linear_attention_kernel
- range(0, T, CHUNK) => range(0, T // CHUNK * CHUNK, CHUNK)
the last state is never stored
@@ chunk_linear_attention_kernel
- tl.store(home, memory, mask=held) => tl.store(home, tl.load(home, mask=held, other=0.0), mask=held)
PyTorch computes the outputs, and no kernel is launched
- chunk_linear_attention_kernel[(b * h, triton.cdiv(dv, tiles.slice))](
-     q, k, v, q if g is None else g, state, out, t, h, dk, dv, dk**-0.5 if scale is None else scale,
-     *q.stride(), *k.stride(), *v.stride(), *((0, 0, 0) if g is None else g.stride()),
-     DECAYS=g is not None, CHUNK=tiles.chunk, WIDTH=tiles.width, SLICE=tiles.slice,
-     num_warps=tiles.num_warps, num_stages=tiles.num_stages,
- )
+ return linear_attention_chunked(q, k, v, g, scale, initial_state, chunk_size)
""")


def in_a_loop(a, right):
    """Forward substitution, row by row."""
    import torch

    rows: list[Any] = []
    for i in range(a.shape[-2]):
        known = torch.stack(rows, -2) if rows else right[..., :0, :]
        rows.append(right[..., i, :] - (a[..., i : i + 1, :i] @ known).squeeze(-2))
    return torch.stack(rows, -2)
