"""Wrong answers to chapter 6's exercises, each with the misconception behind it."""

from lib.workbook.grading import edits

edits("""
# layer_norm
the variance divides by C - 1, torch.var's default; it should divide by C
- centred.square().mean(-1, keepdim=True) => centred.var(-1, keepdim=True)
eps is added to the standard deviation, outside of the root; it belongs to the variance
- * torch.rsqrt(variance + eps) => / (variance.sqrt() + eps)
eps is not added
- variance + eps => variance
eps is always 1e-5, whatever was given
- variance + eps => variance + 1e-5
the mean is subtracted for the variance, but not from x itself
- (centred * torch => (wide * torch
the gain is not applied
- * weight + bias => + bias
the bias is not added
- * weight + bias => * weight
the mean is not subtracted: that is RMSNorm with a bias
- wide - wide.mean(-1, keepdim=True) => wide
it divides by the variance instead of by its root
- * torch.rsqrt(variance + eps) => / (variance + eps)
mean and variance are taken over the whole tensor; each vector has its own
- wide.mean(-1, keepdim=True) => wide.mean()
- .square().mean(-1, keepdim=True) => .square().mean()
the bias is added before the gain is applied
- centred * torch.rsqrt(variance + eps) * weight + bias => (centred * torch.rsqrt(variance + eps) + bias) * weight
the result stays in float32 instead of going back to the dtype of x
- bias).to(x.dtype) => bias)
mean and variance are computed in the dtype of x, and float16 overflows
- x.to(torch.promote_types(x.dtype, torch.float32)) => x
only float16 is widened; bfloat16 rounds a mean near 300 by up to 1
- torch.promote_types(x.dtype, torch.float32) => torch.float32 if x.dtype == torch.float16 else x.dtype
float64 is computed in float32: 'float32 at least' means that float64 stays float64
- torch.promote_types(x.dtype, torch.float32) => torch.float32
the variance is the mean square minus the squared mean, which loses all digits when the mean is large
- centred.square().mean(-1, keepdim=True)
+ (wide.square().mean(-1, keepdim=True) - wide.mean(-1, keepdim=True).square()).clamp(min=0)

# gelu_tanh
that is the exact GELU, with the error function; GPT-2 uses the tanh formula
+ return nn.functional.gelu(x)
that is x times sigmoid(1.702 x), the other approximation in the paper
+ return x * torch.sigmoid(1.702 * x)
the cubic term is missing
- + 0.044715 * wide**3 =>
x is squared where the formula cubes it
- wide**3 => wide**2
the root is taken of pi / 2 instead of 2 / pi
- 2.0 / math.pi => math.pi / 2.0
the 1 that is added to the tanh is missing
- (1.0 + torch.tanh(inner)) => torch.tanh(inner)
the factor of one half is missing
- 0.5 * =>
computed in the dtype of x: in float16 the cube of 41 is infinite, and the gradient becomes infinity times 0, NaN
- x.to(torch.promote_types(x.dtype, torch.float32)) => x
x was changed in place
+ out = reference.gelu_tanh(x)
+ x.data.copy_(out)
+ return out

# CausalSelfAttention
the fused projection is cut into keys, queries, values; GPT-2's order is q, k, v
- q, k, v = => k, q, v =
the fused projection is cut into values first; GPT-2's order is q, k, v
- q, k, v = => v, q, k =
c_attn is cut head by head into q, k, v; the queries of all heads come first
- (split_heads(part, self.n_heads) for part in self.c_attn(x).chunk(3, dim=-1))
+ self.c_attn(x).unflatten(-1, (self.n_heads, 3, -1)).permute(3, 0, 2, 1, 4)
there is no mask: every position sees the whole sequence
- q, k, v, mask => q, k, v
the mask's meaning is exchanged: a position sees only what comes after it
- q, k, v, mask => q, k, v, ~mask
masked_fill hides what a position may see, instead of what it may not see
- scaled_dot_product_attention(q, k, v, mask)
+ (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(mask, -math.inf).softmax(-1) @ v
masked scores become 0, whose exp is 1; they should become -inf
- scaled_dot_product_attention(q, k, v, mask)
+ (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, 0.0).softmax(-1) @ v
the softmax is taken over the queries; it belongs over the keys
- scaled_dot_product_attention(q, k, v, mask)
+ (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf).softmax(-2) @ v
the weights are set to 0 after the softmax, so the rest no longer add up to 1; mask the scores before it
- scaled_dot_product_attention(q, k, v, mask)
+ (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1).masked_fill(~mask, 0.0) @ v
a position does not see itself: the mask leaves out the diagonal
- q, k, v, mask => q, k, v, mask.tril(-1)
the mask is the wrong way around: each position sees only itself and what follows
- q, k, v, mask => q, k, v, mask.T
-10,000 is added to masked scores instead of -inf, so a very large score still gets weight
- scaled_dot_product_attention(q, k, v, mask)
+ torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) - 1e4 * ~mask, dim=-1) @ v
the scores are divided by the root of the model's width instead of the head's
- q, k, v, mask => q / math.sqrt(self.n_heads), k, v, mask
the scores are not divided by the root of the head's width
- q, k, v, mask => q * math.sqrt(q.shape[-1]), k, v, mask
the output projection c_proj is never applied
- return self.c_proj => return
the heads are merged in the wrong order: [B, H, T, D] was reshaped without being transposed first
- merge_heads(scaled_dot_product_attention(q, k, v, mask))
+ scaled_dot_product_attention(q, k, v, mask).reshape(x.shape)
the linear layers have no bias; GPT-2's do
- 3 * config.dim => 3 * config.dim, bias=False
- config.dim, config.dim => config.dim, config.dim, bias=False
the mask is a buffer in the state dict, and checkpoints have none: register it with persistent=False
- self.n_heads = config.n_heads
+ self.n_heads = config.n_heads
+ self.register_buffer("mask", causal_mask(config.context_len, config.context_len))
- causal_mask(x.shape[1], x.shape[1], device=x.device) => self.mask[: x.shape[1], : x.shape[1]]
the mask of the first call is kept; another sequence may have another length
- mask = causal_mask(x.shape[1], x.shape[1], device=x.device)
+ self.first = getattr(self, "first", causal_mask(x.shape[1], x.shape[1], device=x.device))
+ mask = self.first
the mask is made on the CPU: it needs device=x.device
- , device=x.device =>

# MLP
the exact GELU; GPT-2 was trained with gelu_tanh
- gelu_tanh => nn.functional.gelu
the activation is ReLU
- gelu_tanh => torch.relu
the activation is SiLU, as in Llama
- gelu_tanh => nn.functional.silu
there is no activation, and two linear maps in a row are one linear map
- gelu_tanh(self.c_fc(x)) => self.c_fc(x)
there is an activation after the second layer; it belongs between the two
- self.c_proj(gelu_tanh(self.c_fc(x))) => gelu_tanh(self.c_proj(gelu_tanh(self.c_fc(x))))
the MLP adds its own input; the block does that
- return self => return x + self
the hidden width is C instead of 4C
- config.dim, 4 * config.dim => config.dim, config.dim
- 4 * config.dim, config.dim => config.dim, config.dim

# Block
the norm comes after the sum, as in the original transformer; GPT-2 moved it before each part
@@ forward
+ x = self.ln_1(x + self.attn(x))
+ return self.ln_2(x + self.mlp(x))
attention replaces the stream; it should be added to it
- x = x + self => x = self
the MLP replaces the stream; it should be added to it
- return x + self => return self
attention reads the stream without a norm
- self.ln_1(x) => x
there is no residual: each part replaces the stream
- x = x + self => x = self
- return x + self => return self
the normalised stream is added instead of the stream itself
- x = x + => x = self.ln_1(x) +
- return x + => return self.ln_2(x) +
the MLP does not see what attention added: both read the same input
@@ forward
+ return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))
ln_1 is used for both parts; the MLP has ln_2
- self.ln_2(x) => self.ln_1(x)
the MLP reads the stream without a norm
- self.ln_2(x) => x
`x +=` changes the caller's tensor in place; make a new one with `x = x +`
- x = x + self.attn(self.ln_1(x)) => x += self.attn(self.ln_1(x))
the MLP comes before attention
@@ forward
+ x = x + self.mlp(self.ln_2(x))
+ return x + self.attn(self.ln_1(x))
the norms do not use the config's norm_eps
- self.ln_1 = LayerNorm(config.dim, eps=config.norm_eps) => self.ln_1 = LayerNorm(config.dim)
- self.ln_2 = LayerNorm(config.dim, eps=config.norm_eps) => self.ln_2 = LayerNorm(config.dim)

# init_weights
the power is -0.05 instead of -0.5
- 0.02 / math.sqrt(2 * n_layers) => 0.02 * (2 * n_layers) ** -0.05
the residual projections are divided by the root of L; there are two per block, so it should be 2L
- 2 * n_layers => n_layers
the residual projections are divided by 2L instead of by its root
- math.sqrt(2 * n_layers) => (2 * n_layers)
the residual projections are not scaled down
- 0.02 / math.sqrt(2 * n_layers) if writes_to_stream else 0.02 => 0.02
every linear layer is scaled down; only those named c_proj write to the stream
- name.split(".")[-1] == "c_proj" => isinstance(part, nn.Linear)
only attention's c_proj is scaled down; the MLP's writes to the stream too
- name.split(".")[-1] == "c_proj" => name.endswith("attn.c_proj")
the embeddings keep PyTorch's standard deviation of 1
- nn.Linear | nn.Embedding => nn.Linear
0.02 is used as the variance; it is the standard deviation
- 0.02 / math.sqrt(2 * n_layers) if writes_to_stream else 0.02
+ math.sqrt(0.02 / (2 * n_layers if writes_to_stream else 1))
the biases keep PyTorch's random values; GPT-2's start at 0
- nn.init.zeros_(part.bias) => pass
the gains of the layer norms were drawn too; they should stay 1
- nn.Linear | nn.Embedding => nn.Linear | nn.Embedding | nn.LayerNorm
the layer norms are set to ones and zeros; they should be left as they are
+ if isinstance(part, nn.LayerNorm):
+     part.reset_parameters()
  if isinstance(part, nn.Linear) and part.bias is not None:
the values are uniform instead of normal
- nn.init.normal_(part.weight, std=0.02 / math.sqrt(2 * n_layers) if writes_to_stream else 0.02)
+ bound = math.sqrt(3) * 0.02 / (math.sqrt(2 * n_layers) if writes_to_stream else 1)
+ nn.init.uniform_(part.weight, -bound, bound)
a weight was replaced by a new parameter, so an optimizer or a tied head still has the old one
+ part.weight = nn.Parameter(part.weight.detach().clone())
  nn.init.normal_

# pad_vocab
that is the next power of two; the next multiple of 128 is smaller
+ return 1 << (n - 1).bit_length()
a size that is already a multiple is raised to the next one
- -(-n // multiple) => (n // multiple + 1)
it rounds down, so the last tokens have no row
- -(-n // multiple) => n // multiple
it rounds to the nearest multiple, which may be too small
- -(-n // multiple) => max(1, round(n / multiple))
the multiple is always 128, whatever was asked for
+ return reference.pad_vocab(n)
the number is right, but it is a float and should be an int
- * multiple => * float(multiple)

# GPT2
the head is a separate matrix; GPT-2 uses the token embedding again
- init_weights(self
+ self.lm_head = nn.Linear(config.dim, config.n_rows, bias=False)
+ init_weights(self
- nn.functional.linear(self.ln_f(x), self.wte.weight) => self.lm_head(self.ln_f(x))
lm_head shares the embedding's weight, but adds a name to the state dict; use wte.weight itself
- init_weights(self
+ self.lm_head = nn.Linear(config.dim, config.n_rows, bias=False)
+ self.lm_head.weight = self.wte.weight
+ init_weights(self
- nn.functional.linear(self.ln_f(x), self.wte.weight) => self.lm_head(self.ln_f(x))
the head uses a copy of the embedding that gets no gradient
- self.wte.weight => self.wte.weight.detach()
the position embedding is never added
- + self.wpe(torch.arange(length, device=tokens.device)) =>
every position gets the embedding of position 0
- torch.arange(length, device=tokens.device) => torch.zeros_like(tokens[0])
the positions run backwards from the end of the context
- self.wpe(torch.arange(length, device=tokens.device)) => self.wpe.weight.flip(0)[:length]
the last norm, ln_f, is never applied
- self.ln_f(x) => x
the targets were shifted again; they already are the next tokens
- logits.flatten(0, 1), targets.flatten() => logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
the loss is the sum over the targets instead of their mean
- targets.flatten() => targets.flatten(), reduction="sum"
the loss is in bits; cross-entropy uses the natural logarithm
- targets.flatten()) => targets.flatten()) / math.log(2)
a sequence longer than the context is cut silently
+ kept = self.config.context_len
+ tokens, targets = tokens[:, -kept:], None if targets is None else targets[:, -kept:]
  length = tokens.shape[1]
a sequence longer than the context ends in an IndexError from inside the embedding
- length > self.config.context_len => False
the columns of padding rows are still there, so a token that does not exist can win
- [..., : self.config.vocab_size] =>
the loss still includes the padding rows; cut their columns off before the cross-entropy
- [..., : self.config.vocab_size] =>
- return logits => return logits[..., : self.config.vocab_size]
the last norm does not use the config's norm_eps
- , eps=config.norm_eps =>
the positions are made on the CPU: torch.arange needs device=tokens.device
- , device=tokens.device =>
probabilities are returned instead of logits
- [..., : self.config.vocab_size] => [..., : self.config.vocab_size].softmax(-1)
init_weights is never called: the embedding starts with a standard deviation of 1
- init_weights(self, config.n_layers) =>
init_weights was given the wrong number of layers, or was called block by block with 1
- init_weights(self, config.n_layers) => init_weights(self, 1)
only the last position's logits are returned
- return logits => return logits[:, -1:]

# count_parameters
the head is counted again, although it is the embedding
- config.vocab_size => 2 * config.vocab_size
the biases of the linear layers are not counted
- 4 * c * c + 4 * c, 8 * c * c + 5 * c => 4 * c * c, 8 * c * c
the layer norms are not counted
- 5 * c, 2 * c => 5 * c, 0
2C are missing in each block: it has two norms, each with a gain and a bias, and c_attn has 3C biases
- 2 * norm => norm
the last norm, ln_f, is not counted
- ) + norm => )
the position embedding is not counted
- config.vocab_size + config.context_len => config.vocab_size
the norms are counted with a gain and no bias, as in Llama
- 5 * c, 2 * c => 5 * c, c
the padding rows are counted
- config.vocab_size => config.n_rows
the number is right, but it is a float and should be an int
- c = config.dim => c = float(config.dim)

# convert_hf_state_dict
nothing is transposed; Conv1D stores its weights as [in, out]
- tensor.T.contiguous() if name.endswith(transposed) else tensor => tensor
square weights are not transposed; attention's c_proj has the same shape either way
- name.endswith(transposed) => name.endswith(transposed) and tensor.shape[0] != tensor.shape[1]
the embeddings are transposed too
- name.endswith(transposed) => tensor.dim() == 2
c_attn.bias is dropped with the masks, because its name ends in attn.bias too
- ".attn.bias" => "attn.bias"
the causal masks of old checkpoints (attn.bias) are kept
- ".attn.bias", ".attn.masked_bias" => ".attn.masked_bias"
the head is always dropped; one that isn't tied must be passed on, because this model cannot use it
- and tokens is not None and torch.equal(head, tokens) =>
the tied head is kept; this model has no lm_head.weight
- torch.equal(head, tokens) => False
the head is compared by identity; in a file, a tied head is another tensor with equal values
- torch.equal(head, tokens) => head is tokens
names keep the prefix `transformer`
- name: tensor.T => f"transformer.{name}": tensor.T
twelve characters are cut off every name, even if it has no prefix
- name.removeprefix("transformer.") => name[len("transformer.") :]
the caller's dict was changed: names were popped from it
- {name.removeprefix("transformer."): tensor for name, tensor in state_dict.items()}
+ {name.removeprefix("transformer."): state_dict.pop(name) for name in list(state_dict)}

# load_pretrained
only the first problem is reported; one message should list all of them
+ problems = problems[:1]
  if problems:
strict=False: missing tensors silently keep their random values
- [f"{name} is missing" for name in expected if name not in found] => []
- assign=True => strict=False
a file without tensors is treated as unreadable, so the missing tensors are not listed
- if config is not None and (tensors or not unreadable):
+ problems += [] if tensors or unreadable else ["no tensor"]
+ if config is not None and tensors:
the model is returned in training mode
- model.eval() => model.train()
norm_eps is always 1e-5, whatever config.json says
- model = GPT2(config)
+ from dataclasses import replace
+ model = GPT2(replace(config, norm_eps=1e-5))
the weights were never loaded: the model keeps its random values
- model.load_state_dict(state, assign=True) =>
the weights don't require gradients, so the model cannot be trained further
- model.eval() => model.eval().requires_grad_(False)
the problems that read_config reports are ignored, so a checkpoint with another activation loads
  config, problems = read_config(folder)
+ problems = problems if config is None else []
""")
