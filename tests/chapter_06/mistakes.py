"""What goes wrong when people write GPT-2."""

import math

import torch
from torch import nn
from torch.nn import functional

from lib.given.models.gpt2 import find_checkpoint, read_config, read_tensors
from lib.workbook.grading import mistake
from solutions import gpt2 as reference
from solutions.attention import merge_heads, scaled_dot_product_attention, softmax, split_heads

# ---- 6.1 layer_norm --------------------------------------------------------------------------------------------------


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


@mistake("layer_norm", "the variance divides by C - 1, torch.var's default; it should divide by C")
def unbiased(x, weight, bias, eps=1e-5):
    wide = _wide(x)
    return ((wide - wide.mean(-1, keepdim=True)) / torch.sqrt(wide.var(-1, keepdim=True) + eps) * weight + bias).to(
        x.dtype
    )


@mistake("layer_norm", "eps is added to the standard deviation, outside of the root; it belongs to the variance")
def eps_outside(x, weight, bias, eps=1e-5):
    wide = _wide(x)
    std = wide.var(-1, keepdim=True, unbiased=False).sqrt()
    return ((wide - wide.mean(-1, keepdim=True)) / (std + eps) * weight + bias).to(x.dtype)


@mistake("layer_norm", "the mean is not subtracted: that is RMSNorm with a bias")
def without_mean(x, weight, bias, eps=1e-5):
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight + bias).to(x.dtype)


@mistake("layer_norm", "it divides by the variance instead of by its root")
def by_variance(x, weight, bias, eps=1e-5):
    wide = _wide(x)
    variance = wide.var(-1, keepdim=True, unbiased=False)
    return ((wide - wide.mean(-1, keepdim=True)) / (variance + eps) * weight + bias).to(x.dtype)


@mistake("layer_norm", "mean and variance are taken over the whole tensor; each vector has its own")
def of_everything(x, weight, bias, eps=1e-5):
    wide = _wide(x)
    return ((wide - wide.mean()) * torch.rsqrt(wide.var(unbiased=False) + eps) * weight + bias).to(x.dtype)


@mistake("layer_norm", "the bias is added before the gain is applied")
def bias_first(x, weight, bias, eps=1e-5):
    plain = reference.layer_norm(_wide(x), torch.ones_like(weight), torch.zeros_like(bias), eps)
    return ((plain + bias) * weight).to(x.dtype)


@mistake("layer_norm", "the result stays in float32 instead of going back to the dtype of x")
def norm_left_wide(x, weight, bias, eps=1e-5):
    return reference.layer_norm(_wide(x), _wide(weight), _wide(bias), eps)


@mistake("layer_norm", "mean and variance are computed in the dtype of x, and float16 overflows")
def norm_in_dtype(x, weight, bias, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps) * weight + bias


@mistake("layer_norm", "only float16 is widened; bfloat16 rounds a mean near 300 by up to 1")
def norm_in_bfloat16(x, weight, bias, eps=1e-5):
    return (norm_in_dtype if x.dtype == torch.bfloat16 else reference.layer_norm)(x, weight, bias, eps)


@mistake("layer_norm", "float64 is computed in float32: 'float32 at least' means that float64 stays float64")
def norm_narrowed(x, weight, bias, eps=1e-5):
    return reference.layer_norm(x.float(), weight.float(), bias.float(), eps).to(x.dtype)


@mistake(
    "layer_norm",
    "the variance is the mean square minus the squared mean, which loses all digits when the mean is large",
)
def cancelling(x, weight, bias, eps=1e-5):
    wide = _wide(x)
    mean = wide.mean(-1, keepdim=True)
    variance = wide.square().mean(-1, keepdim=True) - mean.square()
    return ((wide - mean) * torch.rsqrt(variance.clamp(min=0) + eps) * weight + bias).to(x.dtype)


# ---- 6.2 gelu_tanh ---------------------------------------------------------------------------------------------------


@mistake("gelu_tanh", "that is the exact GELU, with the error function; GPT-2 uses the tanh formula")
def exact(x):
    return functional.gelu(x)


@mistake("gelu_tanh", "that is x times sigmoid(1.702 x), the other approximation in the paper")
def with_sigmoid(x):
    return x * torch.sigmoid(1.702 * x)


@mistake("gelu_tanh", "the cubic term is missing")
def without_cube(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x))


@mistake("gelu_tanh", "x is squared where the formula cubes it")
def squared(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**2)))


@mistake("gelu_tanh", "the root is taken of pi / 2 instead of 2 / pi")
def root_inverted(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(math.pi / 2) * (x + 0.044715 * x**3)))


@mistake("gelu_tanh", "the factor of one half is missing")
def doubled(x):
    return 2 * reference.gelu_tanh(x)


@mistake(
    "gelu_tanh",
    "computed in the dtype of x: in float16 the cube of 41 is infinite, and the gradient becomes infinity times 0, NaN",
)
def gelu_in_dtype(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@mistake("gelu_tanh", "x was changed in place")
def gelu_in_place(x):
    out = reference.gelu_tanh(x)
    x.data.copy_(out)
    return out


# ---- 6.3 CausalSelfAttention -----------------------------------------------------------------------------------------


class _Attention(reference.CausalSelfAttention):
    """Attention from queries, keys, values and a mask, each of which a mistake may make in its own way."""

    def parts(self, x):
        return [split_heads(part, self.n_heads) for part in self.c_attn(x).chunk(3, dim=-1)]

    def mask(self, t, device):
        return torch.ones(t, t, dtype=torch.bool, device=device).tril()

    def weigh(self, q, k, v):
        return scaled_dot_product_attention(q, k, v, self.mask(q.shape[-2], q.device))

    def forward(self, x):
        return self.c_proj(merge_heads(self.weigh(*self.parts(x))))


@mistake("CausalSelfAttention", "the fused projection is cut into keys, queries, values; GPT-2's order is q, k, v")
class KeysFirst(_Attention):
    def parts(self, x):
        k, q, v = super().parts(x)
        return q, k, v


@mistake("CausalSelfAttention", "the fused projection is cut into values first; GPT-2's order is q, k, v")
class ValuesFirst(_Attention):
    def parts(self, x):
        v, q, k = super().parts(x)
        return q, k, v


@mistake("CausalSelfAttention", "c_attn is cut head by head into q, k, v; the queries of all heads come first")
class FusedByHead(_Attention):
    def parts(self, x):
        fused = self.c_attn(x).unflatten(-1, (self.n_heads, 3, -1))
        return [fused[..., i, :].transpose(1, 2) for i in range(3)]


@mistake("CausalSelfAttention", "there is no mask: every position sees the whole sequence")
class WithoutMask(_Attention):
    def mask(self, t, device):
        return torch.ones(t, t, dtype=torch.bool, device=device)


@mistake("CausalSelfAttention", "a position does not see itself: the mask leaves out the diagonal")
class WithoutSelf(_Attention):
    def mask(self, t, device):
        return torch.ones(t, t, dtype=torch.bool, device=device).tril(-1)


@mistake("CausalSelfAttention", "the mask is the wrong way around: each position sees only itself and what follows")
class LooksAhead(_Attention):
    def mask(self, t, device):
        return torch.ones(t, t, dtype=torch.bool, device=device).triu()


@mistake(
    "CausalSelfAttention", "-10,000 is added to masked scores instead of -inf, so a very large score still gets weight"
)
class TenThousand(_Attention):
    def weigh(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return softmax(scores - 1e4 * ~self.mask(q.shape[-2], q.device), dim=-1) @ v


@mistake("CausalSelfAttention", "the scores are divided by the root of the model's width instead of the head's")
class ScaledByWidth(_Attention):
    def weigh(self, q, k, v):
        return super().weigh(q / math.sqrt(self.n_heads), k, v)


@mistake("CausalSelfAttention", "the scores are not divided by the root of the head's width")
class Unscaled(_Attention):
    def weigh(self, q, k, v):
        return super().weigh(q * math.sqrt(q.shape[-1]), k, v)


@mistake("CausalSelfAttention", "the output projection c_proj is never applied")
class WithoutProjection(_Attention):
    def forward(self, x):
        return merge_heads(self.weigh(*self.parts(x)))


@mistake(
    "CausalSelfAttention",
    "the heads are merged in the wrong order: [B, H, T, D] was reshaped without being transposed first",
)
class Reshaped(_Attention):
    def forward(self, x):
        return self.c_proj(self.weigh(*self.parts(x)).reshape(x.shape))


@mistake("CausalSelfAttention", "the linear layers have no bias; GPT-2's do")
class WithoutBias(_Attention):
    def __init__(self, config):
        super().__init__(config)
        self.c_attn = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.c_proj = nn.Linear(config.dim, config.dim, bias=False)


@mistake("CausalSelfAttention", "the mask is made on the CPU: it needs device=x.device")
class MaskOnCPU(_Attention):
    def mask(self, t, device):
        return super().mask(t, "cpu")


# ---- 6.4 MLP ---------------------------------------------------------------------------------------------------------


class _MLP(reference.MLP):
    def activate(self, x):
        return reference.gelu_tanh(x)

    def forward(self, x):
        return self.c_proj(self.activate(self.c_fc(x)))


@mistake("MLP", "the exact GELU; GPT-2 was trained with gelu_tanh")
class WithExactGELU(_MLP):
    def activate(self, x):
        return functional.gelu(x)


@mistake("MLP", "the activation is ReLU")
class WithReLU(_MLP):
    def activate(self, x):
        return x.relu()


@mistake("MLP", "the activation is SiLU, as in Llama")
class WithSiLU(_MLP):
    def activate(self, x):
        return functional.silu(x)


@mistake("MLP", "there is no activation, and two linear maps in a row are one linear map")
class Linear(_MLP):
    def activate(self, x):
        return x


@mistake("MLP", "there is an activation after the second layer; it belongs between the two")
class ActivatedTwice(_MLP):
    def forward(self, x):
        return self.activate(super().forward(x))


@mistake("MLP", "the MLP adds its own input; the block does that")
class OwnResidual(_MLP):
    def forward(self, x):
        return x + super().forward(x)


@mistake("MLP", "the hidden width is C instead of 4C")
class Narrow(_MLP):
    def __init__(self, config):
        super().__init__(config)
        self.c_fc, self.c_proj = nn.Linear(config.dim, config.dim), nn.Linear(config.dim, config.dim)


# ---- 6.5 Block -------------------------------------------------------------------------------------------------------


@mistake("Block", "the norm comes after the sum, as in the original transformer; GPT-2 moved it before each part")
class PostNorm(reference.Block):
    def forward(self, x):
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


@mistake("Block", "there is no residual: each part replaces the stream")
class WithoutResidual(reference.Block):
    def forward(self, x):
        return self.mlp(self.ln_2(self.attn(self.ln_1(x))))


@mistake("Block", "the normalised stream is added instead of the stream itself")
class NormedResidual(reference.Block):
    def forward(self, x):
        x = self.ln_1(x)
        x = self.ln_2(x + self.attn(x))
        return x + self.mlp(x)


@mistake("Block", "the MLP does not see what attention added: both read the same input")
class Parallel(reference.Block):
    def forward(self, x):
        return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))


@mistake("Block", "ln_1 is used for both parts; the MLP has ln_2")
class OneNorm(reference.Block):
    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_1(x))


@mistake("Block", "the MLP reads the stream without a norm")
class MLPWithoutNorm(reference.Block):
    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(x)


@mistake("Block", "the MLP comes before attention")
class MLPFirst(reference.Block):
    def forward(self, x):
        x = x + self.mlp(self.ln_2(x))
        return x + self.attn(self.ln_1(x))


@mistake("Block", "the norms do not use the config's norm_eps")
class FixedEps(reference.Block):
    def __init__(self, config):
        super().__init__(config)
        self.ln_1.eps = self.ln_2.eps = 1e-5


# ---- 6.6 init_weights ------------------------------------------------------------------------------------------------


def _start(module, std_of, biases=True):
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std_of(name, part))
        if biases and isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def _is_residual(name):
    return name.endswith("c_proj")


@mistake("init_weights", "the power is -0.05 instead of -0.5")
def copied_power(module, n_layers):
    _start(module, lambda name, _: 0.02 * (2 * n_layers) ** (-0.05 if _is_residual(name) else 0.0))


@mistake(
    "init_weights", "the residual projections are divided by the root of L; there are two per block, so it should be 2L"
)
def one_a_block(module, n_layers):
    _start(module, lambda name, _: 0.02 * (n_layers**-0.5 if _is_residual(name) else 1.0))


@mistake("init_weights", "the residual projections are divided by 2L instead of by its root")
def by_number(module, n_layers):
    _start(module, lambda name, _: 0.02 / (2 * n_layers if _is_residual(name) else 1))


@mistake("init_weights", "the residual projections are not scaled down")
def unscaled(module, n_layers):
    _start(module, lambda *_: 0.02)


@mistake("init_weights", "every linear layer is scaled down; only those named c_proj write to the stream")
def all_scaled(module, n_layers):
    _start(module, lambda _, part: 0.02 / math.sqrt(2 * n_layers) if isinstance(part, nn.Linear) else 0.02)


@mistake("init_weights", "only attention's c_proj is scaled down; the MLP's writes to the stream too")
def attention_only(module, n_layers):
    _start(module, lambda name, _: 0.02 / (math.sqrt(2 * n_layers) if name.endswith("attn.c_proj") else 1))


@mistake("init_weights", "the embeddings keep PyTorch's standard deviation of 1")
def embeddings_left(module, n_layers):
    linear = nn.ModuleDict({n.replace(".", "/"): p for n, p in module.named_modules() if isinstance(p, nn.Linear)})
    reference.init_weights(linear, n_layers)
    for name, part in linear.items():
        if name.endswith("c_proj"):
            nn.init.normal_(part.weight, std=0.02 / math.sqrt(2 * n_layers))


@mistake("init_weights", "0.02 is used as the variance; it is the standard deviation")
def as_variance(module, n_layers):
    _start(module, lambda name, _: math.sqrt(0.02 / (2 * n_layers if _is_residual(name) else 1)))


@mistake("init_weights", "the biases keep PyTorch's random values; GPT-2's start at 0")
def biases_left(module, n_layers):
    _start(module, lambda name, _: 0.02 / (math.sqrt(2 * n_layers) if _is_residual(name) else 1), biases=False)


@mistake("init_weights", "the gains of the layer norms were drawn too; they should stay 1")
def norms_drawn(module, n_layers):
    reference.init_weights(module, n_layers)
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            nn.init.normal_(part.weight, std=0.02)


@mistake("init_weights", "the values are uniform instead of normal")
def uniform(module, n_layers):
    reference.init_weights(module, n_layers)
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            bound = math.sqrt(3) * part.weight.std().item()
            nn.init.uniform_(part.weight, -bound, bound)


@mistake(
    "init_weights", "a weight was replaced by a new parameter, so an optimizer or a tied head still has the old one"
)
def replaced(module, n_layers):
    reference.init_weights(module, n_layers)
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            part.weight = nn.Parameter(part.weight.detach().clone())


# ---- 6.7 pad_vocab ---------------------------------------------------------------------------------------------------


@mistake("pad_vocab", "that is the next power of two; the next multiple of 128 is smaller")
def power_of_two(n, multiple=128):
    return 1 << (n - 1).bit_length()


@mistake("pad_vocab", "a size that is already a multiple is raised to the next one")
def one_more(n, multiple=128):
    return (n // multiple + 1) * multiple


@mistake("pad_vocab", "it rounds down, so the last tokens have no row")
def rounded_down(n, multiple=128):
    return n // multiple * multiple


@mistake("pad_vocab", "it rounds to the nearest multiple, which may be too small")
def nearest(n, multiple=128):
    return max(1, round(n / multiple)) * multiple


@mistake("pad_vocab", "the multiple is always 128, whatever was asked for")
def fixed_multiple(n, multiple=128):
    return reference.pad_vocab(n)


@mistake("pad_vocab", "the number is right, but it is a float and should be an int")
def padded_to_a_float(n, multiple=128):
    return float(reference.pad_vocab(n, multiple))


# ---- 6.8 GPT2 --------------------------------------------------------------------------------------------------------


class _GPT2(reference.GPT2):
    """The model in steps, each of which a mistake may take in its own way."""

    def places(self, tokens):
        return self.wpe(torch.arange(tokens.shape[1], device=tokens.device))

    def head(self, x):
        return functional.linear(self.ln_f(x), self.wte.weight)[..., : self.config.vocab_size]

    def loss(self, logits, targets):
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def check(self, tokens):
        if tokens.shape[1] > self.config.context_len:
            raise ValueError(f"{tokens.shape[1]} tokens are more than {self.config.context_len}")

    def forward(self, tokens, targets=None):
        self.check(tokens)
        x = self.wte(tokens) + self.places(tokens)
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        return logits, None if targets is None else self.loss(logits, targets)


@mistake("GPT2", "the head is a separate matrix; GPT-2 uses the token embedding again")
class Untied(_GPT2):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.dim, config.n_rows, bias=False)

    def head(self, x):
        return self.lm_head(self.ln_f(x))[..., : self.config.vocab_size]


@mistake("GPT2", "the head uses a copy of the embedding that gets no gradient")
class DetachedHead(_GPT2):
    def head(self, x):
        return functional.linear(self.ln_f(x), self.wte.weight.detach())[..., : self.config.vocab_size]


@mistake("GPT2", "the position embedding is never added")
class WithoutPositions(_GPT2):
    def places(self, tokens):
        return 0.0 * self.wpe.weight[: tokens.shape[1]]


@mistake("GPT2", "every position gets the embedding of position 0")
class OnePosition(_GPT2):
    def places(self, tokens):
        return self.wpe.weight[:1]


@mistake("GPT2", "the positions run backwards from the end of the context")
class BackwardPositions(_GPT2):
    def places(self, tokens):
        return self.wpe.weight.flip(0)[: tokens.shape[1]]


@mistake("GPT2", "the last norm, ln_f, is never applied")
class WithoutLastNorm(_GPT2):
    def head(self, x):
        return functional.linear(x, self.wte.weight)[..., : self.config.vocab_size]


@mistake("GPT2", "the targets were shifted again; they already are the next tokens")
class ShiftedTwice(_GPT2):
    def loss(self, logits, targets):
        return super().loss(logits[:, :-1], targets[:, 1:])


@mistake("GPT2", "the loss is the sum over the targets instead of their mean")
class SummedLoss(_GPT2):
    def loss(self, logits, targets):
        return super().loss(logits, targets) * targets.numel()


@mistake("GPT2", "the loss is in bits; cross-entropy uses the natural logarithm")
class LossInBits(_GPT2):
    def loss(self, logits, targets):
        return super().loss(logits, targets) / math.log(2)


@mistake("GPT2", "a sequence longer than the context is cut silently")
class CutsSilently(_GPT2):
    def forward(self, tokens, targets=None):
        length = self.config.context_len
        return super().forward(tokens[:, -length:], None if targets is None else targets[:, -length:])


@mistake("GPT2", "a sequence longer than the context ends in an IndexError from inside the embedding")
class WithoutCheck(_GPT2):
    def check(self, tokens):
        pass


@mistake("GPT2", "the columns of padding rows are still there, so a token that does not exist can win")
class PaddingWins(_GPT2):
    def head(self, x):
        return functional.linear(self.ln_f(x), self.wte.weight)


@mistake("GPT2", "the loss still includes the padding rows; cut their columns off before the cross-entropy")
class PaddingCounts(_GPT2):
    def head(self, x):
        return functional.linear(self.ln_f(x), self.wte.weight)

    def forward(self, tokens, targets=None):
        logits, loss = super().forward(tokens, targets)
        return logits[..., : self.config.vocab_size], loss


@mistake("GPT2", "the last norm does not use the config's norm_eps")
class LastNormFixedEps(_GPT2):
    def __init__(self, config):
        super().__init__(config)
        self.ln_f.eps = 1e-5


@mistake("GPT2", "the positions are made on the CPU: torch.arange needs device=tokens.device")
class PositionsOnCPU(_GPT2):
    def places(self, tokens):
        return self.wpe(torch.arange(tokens.shape[1]))


@mistake("GPT2", "probabilities are returned instead of logits")
class Probabilities(_GPT2):
    def head(self, x):
        return super().head(x).softmax(-1)


@mistake("GPT2", "init_weights is never called: the embedding starts with a standard deviation of 1")
class PyTorchStart(_GPT2):
    def __init__(self, config):
        super().__init__(config)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                part.reset_parameters()


@mistake("GPT2", "init_weights was given the wrong number of layers, or was called block by block with 1")
class WrongDepth(_GPT2):
    def __init__(self, config):
        super().__init__(config)
        reference.init_weights(self, 1)


@mistake("GPT2", "only the last position's logits are returned")
class LastOnly(_GPT2):
    def forward(self, tokens, targets=None):
        logits, loss = super().forward(tokens, targets)
        return logits[:, -1:], loss


# ---- 6.9 count_parameters --------------------------------------------------------------------------------------------


@mistake("count_parameters", "the head is counted again, although it is the embedding")
def head_twice(config):
    return reference.count_parameters(config) + config.vocab_size * config.dim


@mistake("count_parameters", "the biases of the linear layers are not counted")
def without_biases(config):
    return reference.count_parameters(config) - config.n_layers * 9 * config.dim


@mistake("count_parameters", "the layer norms are not counted")
def without_norms(config):
    return reference.count_parameters(config) - (4 * config.n_layers + 2) * config.dim


@mistake("count_parameters", "the last norm, ln_f, is not counted")
def without_last_norm(config):
    return reference.count_parameters(config) - 2 * config.dim


@mistake("count_parameters", "the position embedding is not counted")
def without_positions(config):
    return reference.count_parameters(config) - config.context_len * config.dim


@mistake("count_parameters", "the norms are counted with a gain and no bias, as in Llama")
def norms_without_bias(config):
    return reference.count_parameters(config) - (2 * config.n_layers + 1) * config.dim


@mistake("count_parameters", "the padding rows are counted")
def with_padding(config):
    return reference.count_parameters(config) + (config.n_rows - config.vocab_size) * config.dim


@mistake("count_parameters", "the number is right, but it is a float and should be an int")
def count_as_a_float(config):
    return float(reference.count_parameters(config))


# ---- 6.10 convert_hf_state_dict --------------------------------------------------------------------------------------


def _convert(state_dict, transposes, leaves_out=(".attn.bias", ".attn.masked_bias")):
    bare = {name.removeprefix("transformer."): tensor for name, tensor in state_dict.items()}
    tied = "lm_head.weight" in bare and torch.equal(bare["lm_head.weight"], bare["wte.weight"])
    return {
        name: tensor.T.contiguous() if transposes(name, tensor) else tensor
        for name, tensor in bare.items()
        if not name.endswith(leaves_out) and not (tied and name == "lm_head.weight")
    }


def _is_conv1d(name, tensor=None):
    return name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight"))


@mistake("convert_hf_state_dict", "nothing is transposed; Conv1D stores its weights as [in, out]")
def not_transposed(state_dict):
    return _convert(state_dict, lambda *_: False)


@mistake("convert_hf_state_dict", "square weights are not transposed; attention's c_proj has the same shape either way")
def square_left(state_dict):
    return _convert(state_dict, lambda name, tensor: _is_conv1d(name) and tensor.shape[0] != tensor.shape[1])


@mistake("convert_hf_state_dict", "the embeddings are transposed too")
def all_transposed(state_dict):
    return _convert(state_dict, lambda name, tensor: tensor.dim() == 2)


@mistake("convert_hf_state_dict", "c_attn.bias is dropped with the masks, because its name ends in attn.bias too")
def bias_lost(state_dict):
    return _convert(state_dict, _is_conv1d, ("attn.bias", "attn.masked_bias"))


@mistake("convert_hf_state_dict", "the causal masks of old checkpoints (attn.bias) are kept")
def masks_kept(state_dict):
    return _convert(state_dict, _is_conv1d, ("attn.masked_bias",))


@mistake(
    "convert_hf_state_dict",
    "the head is always dropped; one that isn't tied must be passed on, because this model cannot use it",
)
def head_dropped(state_dict):
    converted = _convert(state_dict, _is_conv1d)
    converted.pop("lm_head.weight", None)
    return converted


@mistake("convert_hf_state_dict", "names keep the prefix `transformer`")
def prefix_kept(state_dict):
    return {f"transformer.{name}": tensor for name, tensor in reference.convert_hf_state_dict(state_dict).items()}


@mistake("convert_hf_state_dict", "twelve characters are cut off every name, even if it has no prefix")
def prefix_cut_blindly(state_dict):
    return reference.convert_hf_state_dict({name[len("transformer.") :]: t for name, t in state_dict.items()})


@mistake("convert_hf_state_dict", "the caller's dict was changed: names were popped from it")
def input_emptied(state_dict):
    converted = reference.convert_hf_state_dict(state_dict)
    state_dict.clear()
    return converted


# ---- 6.11 load_pretrained --------------------------------------------------------------------------------------------


def _load(folder, strict=True, convert=reference.convert_hf_state_dict, **changes):
    from dataclasses import replace

    folder = find_checkpoint(folder)
    (config, problems), (tensors, unreadable) = read_config(folder), read_tensors(folder)
    if problems + unreadable:
        raise ValueError((problems + unreadable)[0])
    model = reference.GPT2(replace(config, **changes))
    try:
        model.load_state_dict(convert(tensors), strict=strict)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return model.eval()


@mistake("load_pretrained", "only the first problem is reported; one message should list all of them")
def first_only(name_or_path):
    return _load(name_or_path)


@mistake("load_pretrained", "strict=False: missing tensors silently keep their random values")
def not_strict(name_or_path):
    return _load(name_or_path, strict=False)


@mistake("load_pretrained", "a file without tensors is treated as unreadable, so the missing tensors are not listed")
def empty_not_listed(name_or_path):
    folder = find_checkpoint(name_or_path)
    tensors, problems = read_tensors(folder)
    if not tensors and not problems:
        raise ValueError(f"{folder} holds no tensor")
    return reference.load_pretrained(name_or_path)


@mistake("load_pretrained", "the model is returned in training mode")
def in_training_mode(name_or_path):
    return reference.load_pretrained(name_or_path).train()


@mistake("load_pretrained", "norm_eps is always 1e-5, whatever config.json says")
def eps_ignored(name_or_path):
    model = reference.load_pretrained(name_or_path)
    for part in model.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = 1e-5
    return model


@mistake("load_pretrained", "the weights were never loaded: the model keeps its random values")
def not_loaded(name_or_path):
    return reference.GPT2(reference.load_pretrained(name_or_path).config).eval()


@mistake("load_pretrained", "the weights don't require gradients, so the model cannot be trained further")
def frozen(name_or_path):
    return reference.load_pretrained(name_or_path).requires_grad_(False)


@mistake(
    "load_pretrained",
    "the problems that read_config reports are ignored, so a checkpoint with another activation loads",
)
def config_problems_ignored(name_or_path):
    folder = find_checkpoint(name_or_path)
    config, problems = read_config(folder)
    if config is None or not problems:
        return reference.load_pretrained(name_or_path)
    model = reference.GPT2(config)
    try:
        model.load_state_dict(reference.convert_hf_state_dict(read_tensors(folder)[0]))
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return model.eval()
