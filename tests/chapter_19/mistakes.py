"""What goes wrong when people route tokens to experts."""

from lib.workbook.grading import edits
from solutions import moe as reference

edits("""
# top_k_router
the chosen experts are in the order of their numbers: the largest weight comes first
- stable=True)[..., :k] => stable=True)[..., :k].sort(-1).values
the weights are never divided by their sum
+ return reference.top_k_router(logits, k, normalize=False)
the weights add up to 1 even without normalize: they are divided by their sum, or come from a softmax of k logits
+ _, experts = reference.top_k_router(logits, k)
+ return logits.float().gather(-1, experts).softmax(-1), experts
the softmax is computed in the dtype of the logits instead of float32
- logits.float().softmax(-1) => logits.softmax(-1)
each expert has its own sigmoid; a softmax makes the experts compete
- logits.float().softmax(-1) => logits.float().sigmoid()
the experts with the smallest probabilities are chosen
- descending=True => descending=False
of equal probabilities the expert with the higher index comes first
+ weights, experts = reference.top_k_router(logits.flip(-1), k, normalize)
+ return weights, logits.shape[-1] - 1 - experts
the weights are detached: the router cannot learn
+ weights, experts = reference.top_k_router(logits, k, normalize)
+ return weights.detach(), experts
k is not checked
+ if 1 <= k <= logits.shape[-1]:
+     return reference.top_k_router(logits, k, normalize)
+ return reference.top_k_router(logits, max(1, min(k, logits.shape[-1])), normalize)
the experts come from `topk`, which may take any of equal probabilities
- probabilities.argsort(dim=-1, descending=True, stable=True)[..., :k] => probabilities.topk(k).indices
`argsort` without `stable=True`: equal probabilities may come in any order
- , stable=True =>
the softmax is over the tokens instead of the experts
- .softmax(-1) => .softmax(0)
the weights are divided by the sum over all tokens instead of the token's own
- weights.sum(-1, keepdim=True) => weights.sum()
a chosen expert's probability is set to 0, where others may be 0, too: the same expert is chosen again
- experts = probabilities.argsort(dim=-1, descending=True, stable=True)[..., :k]
+ left, chosen = probabilities.detach(), list[Tensor]()
+ for _ in range(k):
+     chosen.append(left.argmax(-1, keepdim=True))
+     left = left.scatter(-1, chosen[-1], 0.0)
+ experts = torch.cat(chosen, -1)

# load_balancing_loss
shares are counted of the N tokens instead of the N * k assignments: k times too large
+ return reference.load_balancing_loss(probabilities, experts) * experts.shape[-1]
the factor E is missing
+ return reference.load_balancing_loss(probabilities, experts) / probabilities.shape[-1]
only first choices are counted
+ return reference.load_balancing_loss(probabilities, experts[:, :1])
mean probabilities are multiplied with themselves; the shares of assignments are not used
- shares * probabilities.mean(0) => probabilities.mean(0).square()
shares are multiplied with themselves: no gradient reaches the router
- shares * probabilities.mean(0) => shares * shares + 0 * probabilities.mean(0)
the probabilities are added up over the tokens instead of averaged
+ return reference.load_balancing_loss(probabilities, experts) * len(probabilities)
the counts end at the last expert that was chosen: `bincount` needs `minlength`
- , minlength=probabilities.shape[-1] =>
the shares are rounded down to integers
- counts.double() / experts.numel() => counts // experts.numel()
the probabilities are averaged over the experts too: that mean is always 1/E
+ return reference.load_balancing_loss(probabilities.mean().expand_as(probabilities), experts)
the probabilities are detached: no gradient reaches the router
+ return reference.load_balancing_loss(probabilities.detach(), experts)
`view` cannot flatten the transpose of another tensor: `flatten` or `reshape` copies where it must
+ experts.view(-1)
+ return reference.load_balancing_loss(probabilities, experts)

# router_z_loss
the logsumexp is not squared
- square(). =>
the squares are added up instead of averaged over the tokens
- mean => sum
the mean is squared, instead of the squares averaged
- square().mean() => mean().square()
exp before log without subtracting the largest logit: it overflows
- .logsumexp(-1) => .exp().sum(-1).log()
the logits themselves are squared
- .logsumexp(-1) =>
the logsumexp is over the tokens instead of the experts
- -1 => 0
everything is computed in the dtype of the logits instead of float32
- .float() =>
the logits become float32 only after the logsumexp
+ return logits.logsumexp(-1).float().square().mean()
the logits are detached: no gradient reaches the router
+ return reference.router_z_loss(logits.detach())

# sort_by_expert
the inverse order is returned: where each assignment goes, instead of which one comes next
+ order, counts = reference.sort_by_expert(experts, n_experts)
+ return order.argsort(), counts
tokens are returned instead of assignments: order // k
+ order, counts = reference.sort_by_expert(experts, n_experts)
+ return order // max(experts.shape[-1], 1), counts
the assignments of one expert are in reversed order: the sort is not stable
+ flat = experts.flatten()
+ order, counts = reference.sort_by_expert(flat.flip(0)[:, None], n_experts)
+ return len(flat) - 1 - order, counts
`argsort` without `stable=True`: it may put assignments of one expert in any order
+ return experts.flatten().argsort(), reference.sort_by_expert(experts, n_experts)[1]
experts are flattened choice by choice instead of token by token
+ return reference.sort_by_expert(experts.T.contiguous(), n_experts)
counts end at the last expert that is used: those after it are missing
+ order, _ = reference.sort_by_expert(experts, n_experts)
+ return order, torch.bincount(experts.flatten())
offsets are returned instead of counts
+ order, counts = reference.sort_by_expert(experts, n_experts)
+ return order, counts.cumsum(0)
the last expert's assignments come first: the order is descending
+ order = experts.flatten().argsort(descending=True, stable=True)
+ return order, reference.sort_by_expert(experts, n_experts)[1]
the sorted experts are returned instead of the assignments in that order
+ return experts.flatten().sort().values, reference.sort_by_expert(experts, n_experts)[1]
each expert is counted once: `counts[flat] += 1` adds 1 for all of an expert's assignments
+ order, counts = reference.sort_by_expert(experts, n_experts)
+ return order, counts.clamp(max=1)
`view` cannot flatten the transpose of another tensor: `flatten` or `reshape` copies where it must
+ experts.view(-1)
+ return reference.sort_by_expert(experts, n_experts)

# grouped_matmul_kernel
the rows are masked at the end of all rows instead of the expert's: its last tile overwrites the next expert's rows
- end = tl.load(first_rows + expert + 1) => end = tl.load(first_rows + E)
programs after the last tile of rows do not stop: they compute the last expert's rows again, or rows beyond the end
+ expert = tl.minimum(expert, E - 1)
  if expert < E:
tile i begins at row i * TILE_M, but tiles begin anew with every expert
- start = tl.load(first_rows + expert) + (tile - tl.load(first_tiles + expert)) * TILE_M
+ start = (tile * TILE_M).to(tl.int64)
every tile of an expert begins at its first row
- + (tile - tl.load(first_tiles + expert)) * TILE_M =>
every tile is multiplied with the matrix of expert 0
- + expert.to(tl.int64) * we =>
only the first TILE_K terms are added: the loop over C is missing
- range(0, C, TILE_K) => range(0, tl.minimum(C, TILE_K), TILE_K)
tl.dot is left to use TF32 on a GPU
- , input_precision="ieee" =>
the strides are ignored: the operands are read as if they were contiguous
- rows[:, None] * xn + k[None, :] * xc => rows[:, None] * C + k[None, :]
- k[:, None] * wc + columns[None, :] * wf => k[:, None] * F + columns[None, :]
a tile that is an expert's first is counted to the expert before: an expert's tiles end before the next one's first
- ends <= tile => ends < tile
terms after the last are not masked: the last step of the sum reads beyond C
- (k < C)[None, :] => (k >= 0)[None, :]
- (k < C)[:, None] => (k >= 0)[:, None]
an expert's first tile is taken for the end of its tiles, which is entry e + 1
- first_tiles + 1 + index => first_tiles + index
places beyond E count as experts whose tiles have ended: their end must be huge
- other=1 << 60 => other=0
a tile begins one row after the tile before it, instead of TILE_M rows
- (tile - tl.load(first_tiles + expert)) * TILE_M => (tile - tl.load(first_tiles + expert))
an expert's first row is taken for the end of its rows, which is entry e + 1
- first_rows + expert + 1 => first_rows + expert
the rows are masked when they are stored, but not when they are loaded
- (rows < end)[:, None] & (k < C)[None, :] => (rows >= 0)[:, None] & (k < C)[None, :]
a tile's columns begin at a multiple of TILE_M instead of TILE_N
- column * TILE_N => column * TILE_M
the sums are kept in the dtype of the result instead of float32
  total, input_precision="ieee")
+ total = total.to(out.dtype.element_ty).to(tl.float32)
an expert's number times the distance of matrices is computed in 32 bits: large stacks need `expert.to(tl.int64)`
- expert.to(tl.int64) * we => expert * we
programs after the last tile must do nothing: there is no expert E whose rows they could read
- if expert < E: => if expert <= E:
terms beyond C are masked where the rows are loaded, but not where the matrix is
- (k < C)[:, None] & (columns < F)[None, :] => (columns < F)[None, :]

# grouped_matmul
experts and their rows are matched from the end
- zip(parts, weights, strict=True) => zip(parts, weights.flip(0), strict=True)
every row is multiplied with the matrix of expert 0
- torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)]) => x @ weights[0]
every row is multiplied with every expert's matrix, and masked afterwards: E times the work
- parts = x.split(counts.tolist())
+ expert = torch.repeat_interleave(counts.to(torch.int64))
+ return torch.einsum("nc,ecf,ne->nf", x, weights, nn.functional.one_hot(expert, len(weights)).to(x.dtype))
the rows of each expert are padded to the longest: the padding is multiplied too
- parts = x.split(counts.tolist())
+ longest = int(counts.max()) if len(counts) else 0
+ parts = [nn.functional.pad(rows, (0, 0, 0, longest - len(rows))) for rows in x.split(counts.tolist())]
+ out = torch.bmm(torch.stack(parts), weights)
+ return torch.cat([out[e, : int(n)] for e, n in enumerate(counts)])
experts without rows are skipped, and the matrices of those after them move up
- parts = x.split(counts.tolist())
+ used = [n for n in counts.tolist() if n > 0]
+ parts, weights = x.split(used) if used else (x,), weights[: max(1, len(used))]
the result has no gradient
+ return reference.grouped_matmul(x, weights, counts).detach()
the gradient reaches x but not the matrices
+ return reference.grouped_matmul(x, weights.detach(), counts)
autograd follows the CPU's loop, but it can't see into a kernel: `with_gradients` is missing
- with_gradients(_product, x, weights, counts) => _product(x, weights, counts)

# capacity_mask
tokens are served in order with all their choices, instead of all first choices before all second ones
- experts.T.flatten() => experts.flatten()
- .view(*experts.T.shape).T => .view_as(experts)
the capacity is rounded down
- math.ceil => math.floor
the capacity counts N tokens instead of N * k assignments
- len(experts) * experts.shape[1] => len(experts)
one assignment fewer than the capacity is accepted: places begin with 1, so the last one is <=
- place <= room => place < room
the mask holds integers instead of booleans: it would index, not select
+ return reference.capacity_mask(experts, n_experts, capacity_factor).long()
one assignment more than the capacity is accepted
- place <= room => place <= room + 1
each choice has a capacity of its own, so an expert can take k times as much
- in_order.cumsum(0) => in_order.view(*experts.T.shape, n_experts).cumsum(1).flatten(0, 1)
what is dropped is returned instead of what stays
+ return ~reference.capacity_mask(experts, n_experts, capacity_factor)
the mask is in the order of the choices, and is viewed as [N, k] instead of as [k, N]
+ return reference.capacity_mask(experts, n_experts, capacity_factor).T.contiguous().view(experts.shape)
the capacity factor is not used
+ return reference.capacity_mask(experts, n_experts, 1.0)
the capacity is rounded to the nearest integer instead of up
- math.ceil => round
`one_hot` is not told the number of experts, and takes it from the largest one
- nn.functional.one_hot(experts.T.flatten(), n_experts) => nn.functional.one_hot(experts.T.flatten())

# update_router_bias
the sign is the wrong way round: a busy expert is preferred even more
+ return 2 * bias - reference.update_router_bias(bias, counts, rate)
the bias moves by the difference itself instead of its sign
- torch.sign =>
the mean is rounded down to an integer
- counts.double().mean() => counts.sum() // len(counts)
the mean is rounded to the nearest integer
- counts.double().mean() => counts.double().mean().round()
counts become the bias's dtype: in bfloat16, 1001 and 1000 are the same number
- counts.double().mean() - counts => counts.to(bias.dtype).mean() - counts.to(bias.dtype)
counts are compared with their median instead of their mean
- counts.double().mean() => counts.median()
the bias is changed in place
+ return bias.copy_(reference.update_router_bias(bias, counts, rate))
an expert with exactly the mean is raised too: there the sign is 0
- torch.sign(counts.double().mean() - counts) => torch.where(counts <= counts.double().mean(), 1.0, -1.0)
the bias moves by 1: the rate is not used
+ return reference.update_router_bias(bias, counts, 1.0)
an expert with exactly the mean is lowered too: there the sign is 0
- torch.sign(counts.double().mean() - counts) => torch.where(counts < counts.double().mean(), 1.0, -1.0)
idle experts are raised, but busy ones are not lowered
- torch.sign(counts.double().mean() - counts) => (counts < counts.double().mean())

# MoE
the experts' results are added up without the router's weights
- rows = rows * weights.flatten()[order, None].to(x.dtype) => rows = rows + 0 * weights.sum().to(x.dtype)
the weights stay in the order of the tokens, while the rows are sorted by expert
- weights.flatten()[order, None] => weights.flatten()[:, None]
a token's results overwrite each other instead of being added
- index_add => index_copy
the shared experts are forgotten
- out + self.shared(tokens) => out + 0 * self.shared(tokens)
only the first choice is computed
- weights.flatten()[order, None].to(x.dtype)
+ weights.flatten()[order, None].to(x.dtype) * (order % self.k == 0)[:, None]
the router's bias is in the weights too; it may only choose
- probabilities.gather => (logits.float() + self.router_bias).softmax(-1).gather
the router's bias is never used
- + self.router_bias =>
the probabilities of the k chosen experts are not divided by their sum
- return weights / weights.sum(-1, keepdim=True) => return weights
gate and value are exchanged: silu(w3 x) * w1 x
- grouped_matmul(rows, self.w1, counts) => grouped_matmul(rows, self.w3, counts)
- grouped_matmul(rows, self.w3, counts) => grouped_matmul(rows, self.w1, counts)
the routing is kept without its gradient: a balancing loss cannot reach the router
- = probabilities, experts => = probabilities.detach(), experts
under autocast the tokens' sums stay in autocast's dtype instead of the dtype of x
+ from lib.given.kernels.autocast import factor_dtype
+ x = x.to(factor_dtype(x))
  tokens = x.reshape
a full expert drops tokens; here no token is dropped
- weights.flatten()[order, None] => (weights * capacity_mask(experts, len(self.w1), 1.0)).flatten()[order, None]
assignment i is taken for token i % N; it belongs to token i // k
- tokens[order // self.k] => tokens[order % max(len(tokens), 1)]
- index_add(0, order // self.k, rows) => index_add(0, order % max(len(tokens), 1), rows)
the experts get the tokens' rows in their old order, although counts are for rows sorted by expert
- tokens[order // self.k] => tokens.repeat_interleave(self.k, 0)
the experts' results are added as if they were in the tokens' order, but they are sorted by expert
- index_add(0, order // self.k, rows) => index_add(0, torch.arange(len(order)) // self.k, rows)
the routing holds the softmax with the router's bias in it; the bias only chooses
- = probabilities, experts => = (logits.float() + self.router_bias).softmax(-1), experts
the router's bias is added to the probabilities; the contract adds it to the logits
- _, experts = top_k_router(logits.float() + self.router_bias, self.k)
+ experts = (probabilities + self.router_bias).argsort(dim=-1, descending=True, stable=True)[:, : self.k]
the shared experts' result replaces the others' instead of being added
- out + self.shared(tokens) => self.shared(tokens) + 0 * out
the gate's silu is missing
- nn.functional.silu =>
the experts' weights start as zeros, so they never get a gradient
- torch.empty(n_experts, n_in, n_out).uniform_(-(n_in**-0.5), n_in**-0.5) => torch.zeros(n_experts, n_in, n_out)
all experts start with the same numbers
- torch.empty(n_experts, n_in, n_out).uniform_(-(n_in**-0.5), n_in**-0.5)
+ torch.empty(1, n_in, n_out).uniform_(-(n_in**-0.5), n_in**-0.5).repeat(n_experts, 1, 1)
the router's bias is updated in each forward pass; that is the training loop's task
+ counts = torch.bincount(experts.flatten(), minlength=len(self.router_bias))
+ self.router_bias = update_router_bias(self.router_bias, counts, 0.001)
  self.routing = probabilities, experts
the routing is kept in training only
- self.routing = probabilities, experts
+ if self.training:
+     self.routing = probabilities, experts
the experts' weights are drawn for the width that goes out, or for E, instead of the width that comes in
- uniform_(-(n_in**-0.5), n_in**-0.5) => uniform_(-(n_out**-0.5), n_out**-0.5)
the routing is computed in the layer's dtype instead of float32
- = probabilities, experts => = probabilities.to(x.dtype), experts
- return weights / weights.sum(-1, keepdim=True) => return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
the router's bias is no buffer: the state dict lacks it
- self.register_buffer("router_bias", torch.zeros(n_experts)) => self.router_bias = torch.zeros(n_experts)
`view` cannot flatten the transpose of another tensor: `flatten` or `reshape` copies where it must
- x.reshape => x.view
the shared experts are as wide as one expert: together they are n_shared * hidden_dim wide
- SwiGLU(dim, n_shared * hidden_dim) => SwiGLU(dim, hidden_dim)

# convert_hf_state_dict
gates and values are exchanged: the first half of gate_up_proj is w1
- chunk(2, dim=1) => chunk(2, dim=1)[::-1]
the matrices are reshaped instead of transposed
- w.transpose(1, 2).contiguous() => w.reshape(len(w), w.shape[2], w.shape[1])
the experts are in the order of their names as text: 0, 1, 10, 11, 2
- for e in range(n_experts) => for e in sorted(range(n_experts), key=str)
rows of gate_up_proj are taken in turn, as if gates and values were interleaved
- *state_dict[joined[0]].chunk(2, dim=1) => state_dict[joined[0]][:, ::2], state_dict[joined[0]][:, 1::2]
names that are missing or unknown pass without an error
  if wrong:
+     return {}
the weights are taken out of the dictionary given, which must stay as it is
+ found = _names(dict(state_dict))
+ state_dict.clear()
+ return found
only missing names are refused, unknown ones are passed over
- ^ set(state_dict) => - set(state_dict)
the experts are counted by the names that are there, so nobody misses the last one: `gate.weight` has E rows
- len(state_dict.get("gate.weight", ()))
+ len({n.split(".")[1] for n in state_dict if n.count(".") == 3} or state_dict.get("gate.weight", ()))
all weights become float32: the dictionary should hold them in the dtype that they have
- w.transpose(1, 2).contiguous() => w.float().transpose(1, 2).contiguous()
the router's bias is missing
+ return {n: t for n, t in _names(state_dict).items() if n != "router_bias"}
the matrices are not transposed: they still are [out, in]
- w.transpose(1, 2) => w
the matrices are transposed views: `contiguous()` is missing
- .contiguous() =>

# dispatch
the rows are left in the order of the ranks that sent them, instead of sorted by expert
- return rows[by_expert] => return rows
assignment i is taken for token i % N; it belongs to token i // k
- order // experts.shape[-1] => order % max(len(x), 1)
the rows carry no gradient back: the all-to-all is not differentiated
+ with torch.no_grad():
+     return reference.dispatch(x, experts, n_experts, group)
the counts of all experts are returned instead of those of this rank's experts
- return rows[by_expert], counts => return rows[by_expert], to_each
the counts are exchanged twice
  dist.all_to_all_single(from_each, to_each, group=group)
+ dist.all_to_all_single(from_each, to_each, group=group)
the group is not passed on to the collectives: all ranks take part
+ return reference.dispatch(x, experts, n_experts, None)
experts are dealt to the ranks in turn: expert e lives on rank e // (E/R), not e % R
+ n_local = experts_per_rank(n_experts, group)
+ n_ranks = n_experts // n_local
+ return reference.dispatch(x, experts % n_ranks * n_local + experts // n_ranks, n_experts, group)
the rows are permuted by the inverse of the order that sorts them by expert
- return rows[by_expert] => return rows[by_expert.argsort()]
send and receive are exchanged
- send, receive, group) => receive, send, group)
the group is missing in the rows' all-to-all or in `experts_per_rank`
- send, receive, group) => send, receive, None)
the received counts are returned for each rank of origin, instead of added up over the ranks
- return rows[by_expert], counts => return rows[by_expert], from_each
the counts are int32 instead of int64
- return rows[by_expert], counts, => return rows[by_expert], counts.int(),
the group is missing in the counts' all-to-all
- dist.all_to_all_single(from_each, to_each, group=group) => dist.all_to_all_single(from_each, to_each)
`order` numbers assignments, not tokens: assignment a belongs to token a // k
- x[order // experts.shape[-1]] => x[order]
this rank's own counts are taken for those that it receives: the counts must travel first
- dist.all_to_all_single(from_each, to_each, group=group) => from_each.copy_(to_each)
the received counts come rank by rank, each with all of this rank's experts; they are read expert by expert
- (torch.arange(n_experts, device=x.device) % n_local).repeat_interleave(from_each)
+ (torch.arange(n_experts, device=x.device) // (n_experts // n_local)).repeat_interleave(from_each)
the counts are viewed as [E/R, R]; a rank's experts are neighbours, so it is [R, E/R]
- counts.view(-1, n_local).sum(1) => counts.view(n_local, -1).sum(0)

# combine
the results are sent back sorted by expert, not in the order in which their rows arrived
- torch.empty_like(y).index_copy(0, by_expert, y) => y
the results are permuted forward once more instead of backward: y[by_expert] is not the inverse
- torch.empty_like(y).index_copy(0, by_expert, y) => y[by_expert]
the results are added up without their weights
- back * weights.flatten()[order, None].to(y.dtype) => back + 0 * weights.sum()
the weights stay in the order of the tokens, while the rows are sorted by expert
- weights.flatten()[order, None] => weights.flatten()[:, None]
a token's results overwrite each other instead of being added
- index_add => index_copy
the weights get no gradient: the router cannot learn
- weights.flatten() => weights.detach().flatten()
the group is not passed on to the all-to-all: all ranks take part
+ return reference.combine(y, weights, state, None)
assignment i is taken for token i % N; it belongs to token i // k
- order // weights.shape[1] => order % max(len(weights), 1)
send and receive are not exchanged: rows go back the way they came
- rows, receive, send => rows, send, receive
the results get no gradient: the experts cannot learn
- by_expert, y) => by_expert, y.detach())
float32 weights make the results float32, too
- .to(y.dtype) =>
- y.new_zeros => back.new_zeros

# ExpertParallelMoE
under autocast the result stays in autocast's dtype instead of the dtype of x
- .to(x.dtype) =>
every rank keeps all experts
- .split(n_local)[dist.get_rank(group)] =>
@@ forward
+ return self.local(x)
the shared experts are forgotten
- out + self.local.shared(tokens) => out
the router's gradient is averaged over the ranks; it stays this rank's part
+ def average(grad):
+     total = grad.clone()
+     dist.all_reduce(total, group=group)
+     return total / dist.get_world_size(group)
+ self.local.router.weight.register_hook(average)
  for name in
the experts' gradients are divided by the number of ranks; they are sums over all tokens
  setattr(self.local, name, nn.Parameter(part.clone()))
+ getattr(self.local, name).register_hook(lambda grad: grad / dist.get_world_size(group))
rank r holds experts r, r + R, ..., but `dispatch` sends it the experts from r * E/R on
- .split(n_local)[dist.get_rank(group)] => [dist.get_rank(group) :: dist.get_world_size(group)]
the layer given is cut itself, instead of a copy
- copy.deepcopy(moe) => moe
the router is the given layer's own, not a copy: a step of one moves the other
+ self.local.router = moe.router
  for name in
the group is not passed on: all ranks take part
+ group = None
  self.group, self.n_experts = group
a rank's experts are a view of the layer given, not a copy: a step of one moves the other
- part.clone() => part
the rank among all ranks is taken for the rank in the group
- dist.get_rank(group) => dist.get_rank()
`view` cannot flatten an x whose memory is transposed: `reshape` copies it if it must
- x.reshape( => x.view(
`combine` gets no group: the results would go to ranks of other groups
- state, self.group) => state)

# moe_parameters
shared experts are left out of the active weights
- common + n_sparse * config.k * expert => common + n_sparse * (config.k - config.n_shared) * expert
all blocks are counted as mixtures, the dense ones too
- config.n_layers - config.n_dense => config.n_layers
the output layer is counted as tied to the embedding
- 2 * config.vocab_size => config.vocab_size
an expert is counted with two matrices; a SwiGLU has three
- 3 * config.dim => 2 * config.dim
only the chosen rows of the router are counted as active; it scores all experts
- common + n_sparse * config.k * expert
+ common + n_sparse * (config.k * expert - (config.n_experts - config.k) * (C + config.router_bias))
the routers are forgotten
- + config.n_experts * (C + config.router_bias) =>
the routers' biases are forgotten
- (C + config.router_bias) => C
a block is counted with one norm; it has two
- + 2 * C => + C
the norm behind the last block is forgotten
- C + C => C
the norms are forgotten
- + C + config.n_layers * (config.attention_parameters + 2 * C) => + config.n_layers * config.attention_parameters
the dense blocks' SwiGLUs are forgotten
- common += config.n_dense * 3 * C * config.dense_hidden_dim =>
the dense blocks' SwiGLUs are counted with the width of an expert
- config.dense_hidden_dim => config.hidden_dim
a dense block's SwiGLU is counted with two matrices; it has three
- config.n_dense * 3 => config.n_dense * 2
shared experts are forgotten
- config.n_shared * expert + =>
every router is counted with a bias; here it has none
- config.router_bias => 1
one row of the embedding is counted as active; the contract counts all of it
- common + n_sparse * config.k * expert => common - (config.vocab_size - 1) * C + n_sparse * config.k * expert
the embedding is left out of the active weights; the contract counts it
- common + n_sparse * config.k * expert => common - config.vocab_size * C + n_sparse * config.k * expert
the numbers are right, but they are floats and should be ints
+ return tuple(float(count) for count in reference.moe_parameters(config))
""")


def _names(state_dict):
    return reference.convert_hf_state_dict(state_dict)
