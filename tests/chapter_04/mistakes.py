"""Plausible wrong answers of chapter 4, and the misconception behind each."""

import torch
from einops import rearrange
from torch import nn
from torch.nn.functional import gelu, silu

from lib.given.models.llama import hf_tensors
from lib.workbook.grading import mistake
from solutions import llama as reference
from solutions.attention import KVCache, MultiHeadAttention, causal_mask
from solutions.rope import half_to_interleaved, precompute_rope

# ---- 4.1 RMSNorm -----------------------------------------------------------------------------------------------------


@mistake("RMSNorm", "the mean is subtracted first: that is LayerNorm, and RMSNorm leaves the mean alone")
class NormCentred(reference.RMSNorm):
    def forward(self, x):
        return super().forward(x.float() - x.float().mean(-1, keepdim=True)).to(x.dtype)


@mistake("RMSNorm", "eps is added outside of the root, and it belongs inside, to the mean square")
class NormEpsilonOutside(reference.RMSNorm):
    def forward(self, x):
        wide = x.float()
        return (self.weight * wide / (wide.square().mean(-1, keepdim=True).sqrt() + self.eps)).to(x.dtype)


@mistake(
    "RMSNorm", "the squares are summed instead of averaged: each vector gets length 1, not a root mean square of 1"
)
class NormOfLengthOne(reference.RMSNorm):
    def forward(self, x):
        wide = x.float()
        return (self.weight * wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


@mistake("RMSNorm", "the root is missing: x is divided by the mean square itself")
class NormWithoutRoot(reference.RMSNorm):
    def forward(self, x):
        wide = x.float()
        return (self.weight * wide / (wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@mistake("RMSNorm", "the statistics are computed in the input's half precision")
class NormInHalf(reference.RMSNorm):
    def forward(self, x):
        return (self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)


@mistake(
    "RMSNorm", "the cast comes before the product with the weight: that is Meta's order, and here the cast comes last"
)
class NormWeighsAfterTheCast(reference.RMSNorm):
    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


@mistake("RMSNorm", "the result stays in float32 instead of returning to the dtype of x")
class NormStaysWide(reference.RMSNorm):
    def forward(self, x):
        return super().forward(x.float())


@mistake("RMSNorm", "the mean is taken over all positions together instead of over each vector")
class NormOverAll(reference.RMSNorm):
    def forward(self, x):
        wide = x.float()
        return (self.weight * wide * torch.rsqrt(wide.square().mean() + self.eps)).to(x.dtype)


@mistake("RMSNorm", "the weight is forgotten")
class NormWithoutWeight(reference.RMSNorm):
    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@mistake("RMSNorm", "the weight starts at zero, so the output is zero; it should start at one")
class NormBeginsAtZero(reference.RMSNorm):
    def __init__(self, dim, eps=1e-5):
        super().__init__(dim, eps)
        nn.init.zeros_(self.weight)


# ---- 4.2 swiglu_hidden_dim -------------------------------------------------------------------------------------------


def _round_up(width, multiple_of):
    return -(-int(width) // multiple_of) * multiple_of


@mistake("swiglu_hidden_dim", "the width is 4 x dim, without the two thirds")
def four_times(dim, multiple_of=256, multiplier=1.0):
    return _round_up(multiplier * 4 * dim, multiple_of)


@mistake("swiglu_hidden_dim", "the width is rounded down to a multiple instead of up")
def rounded_down(dim, multiple_of=256, multiplier=1.0):
    return int(multiplier * (8 * dim // 3)) // multiple_of * multiple_of


@mistake("swiglu_hidden_dim", "a width that is already a multiple is raised to the next one")
def always_one_more(dim, multiple_of=256, multiplier=1.0):
    return (int(multiplier * (8 * dim // 3)) // multiple_of + 1) * multiple_of


@mistake("swiglu_hidden_dim", "the width is not rounded to a multiple of multiple_of")
def not_rounded(dim, multiple_of=256, multiplier=1.0):
    return int(multiplier * (8 * dim // 3))


@mistake("swiglu_hidden_dim", "the multiplier is ignored")
def multiplier_ignored(dim, multiple_of=256, multiplier=1.0):
    return reference.swiglu_hidden_dim(dim, multiple_of)


@mistake(
    "swiglu_hidden_dim",
    "the fraction is dropped only once, at the end; Meta's code also drops it before the multiplier",
)
def dropped_once(dim, multiple_of=256, multiplier=1.0):
    return _round_up(multiplier * 8 * dim / 3, multiple_of)


@mistake("swiglu_hidden_dim", "the number is right, but it is a float and should be an int")
def width_as_float(dim, multiple_of=256, multiplier=1.0):
    return float(reference.swiglu_hidden_dim(dim, multiple_of, multiplier))


# ---- 4.3 SwiGLU ------------------------------------------------------------------------------------------------------


@mistake("SwiGLU", "silu is applied to w3's branch; the gate is w1")
class GateOnW3(reference.SwiGLU):
    def forward(self, x):
        return self.w2(self.w1(x) * silu(self.w3(x)))


@mistake(
    "SwiGLU", "silu is applied after the two branches are multiplied; it belongs on w1's branch, before the product"
)
class SiluOfProduct(reference.SwiGLU):
    def forward(self, x):
        return self.w2(silu(self.w1(x) * self.w3(x)))


@mistake("SwiGLU", "silu is applied to both branches; only w1's is the gate")
class SiluOnBoth(reference.SwiGLU):
    def forward(self, x):
        return self.w2(silu(self.w1(x)) * silu(self.w3(x)))


@mistake("SwiGLU", "the gate is a sigmoid (that is GLU); silu is x times its sigmoid")
class SigmoidGate(reference.SwiGLU):
    def forward(self, x):
        return self.w2(self.w1(x).sigmoid() * self.w3(x))


@mistake("SwiGLU", "the gate is GELU (that is GEGLU); SwiGLU's is silu")
class GeluGate(reference.SwiGLU):
    def forward(self, x):
        return self.w2(gelu(self.w1(x)) * self.w3(x))


@mistake("SwiGLU", "the two branches are added instead of multiplied")
class BranchesAdded(reference.SwiGLU):
    def forward(self, x):
        return self.w2(silu(self.w1(x)) + self.w3(x))


@mistake("SwiGLU", "w2 and w3 are exchanged: in Meta's names, w2 projects back from F to C")
class W2AndW3Exchanged(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(dim, hidden_dim, bias=False)
        self.w3 = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x):
        return self.w3(silu(self.w1(x)) * self.w2(x))


@mistake("SwiGLU", "the linear layers have a bias; Llama has none")
class FeedForwardWithBias(reference.SwiGLU):
    def __init__(self, dim, hidden_dim):
        super().__init__(dim, hidden_dim)
        self.w2 = nn.Linear(hidden_dim, dim)


@mistake("SwiGLU", "two thirds of hidden_dim are taken again, although hidden_dim already includes them")
class TwoThirdsTwice(reference.SwiGLU):
    def __init__(self, dim, hidden_dim):
        super().__init__(dim, 2 * hidden_dim // 3)


# ---- 4.4 TransformerBlock --------------------------------------------------------------------------------------------


@mistake("TransformerBlock", "that is post-norm: the sum is normalised, and Llama normalises the input of each part")
class PostNorm(reference.TransformerBlock):
    def forward(self, x, rope, mask=None, cache=None):
        x = self.attention_norm(x + self.attention(x, rope, mask, cache))
        return self.ffn_norm(x + self.feed_forward(x))


@mistake(
    "TransformerBlock",
    "the feed-forward reads the block's input; it should read the sum that includes attention's output",
)
class Parallel(reference.TransformerBlock):
    def forward(self, x, rope, mask=None, cache=None):
        return x + self.attention(self.attention_norm(x), rope, mask, cache) + self.feed_forward(self.ffn_norm(x))


@mistake("TransformerBlock", "the residual connections are missing: each part's output should be added to its input")
class NoResidual(reference.TransformerBlock):
    def forward(self, x, rope, mask=None, cache=None):
        return self.feed_forward(self.ffn_norm(self.attention(self.attention_norm(x), rope, mask, cache)))


@mistake("TransformerBlock", "the normalised input is added, not the input itself")
class AddsTheNormed(reference.TransformerBlock):
    def forward(self, x, rope, mask=None, cache=None):
        normed = self.attention_norm(x)
        x = normed + self.attention(normed, rope, mask, cache)
        normed = self.ffn_norm(x)
        return normed + self.feed_forward(normed)


@mistake("TransformerBlock", "the two norms are exchanged")
class NormsExchanged(reference.TransformerBlock):
    def forward(self, x, rope, mask=None, cache=None):
        x = x + self.attention(self.ffn_norm(x), rope, mask, cache)
        return x + self.feed_forward(self.attention_norm(x))


@mistake("TransformerBlock", "the mask does not reach attention")
class BlockWithoutMask(reference.TransformerBlock):
    def forward(self, x, rope, mask=None, cache=None):
        return super().forward(x, rope, None, cache)


@mistake("TransformerBlock", "the rotations do not reach attention")
class BlockWithoutRope(reference.TransformerBlock):
    def forward(self, x, rope, mask=None, cache=None):
        return super().forward(x, None, mask, cache)


@mistake("TransformerBlock", "the cache does not reach attention")
class BlockWithoutCache(reference.TransformerBlock):
    def forward(self, x, rope, mask=None, cache=None):
        return super().forward(x, rope, mask if cache is None else mask[:, -x.shape[1] :])


@mistake("TransformerBlock", "n_kv_heads is ignored, so every query head has its own keys and values")
class BlockUngrouped(reference.TransformerBlock):
    def __init__(self, config):
        super().__init__(config)
        self.attention = MultiHeadAttention(config.dim, config.n_heads)


@mistake("TransformerBlock", "the feed-forward is 4 x dim wide instead of hidden_dim")
class BlockFourTimes(reference.TransformerBlock):
    def __init__(self, config):
        super().__init__(config)
        self.feed_forward = reference.SwiGLU(config.dim, 4 * config.dim)


@mistake("TransformerBlock", "norm_eps is ignored")
class BlockFixedEpsilon(reference.TransformerBlock):
    def __init__(self, config):
        super().__init__(config)
        self.attention_norm, self.ffn_norm = (reference.RMSNorm(config.dim) for _ in "12")


# ---- 4.5 Llama -------------------------------------------------------------------------------------------------------


class _Varied(reference.Llama):
    """The reference's pass with parts to change."""

    def start_of(self, cache):
        return cache[0].length if cache else 0

    def mask_of(self, t, end):
        return causal_mask(t, end, self.output.weight.device)

    def check(self, end):
        if end > self.config.context_len:
            raise ValueError(f"{end} positions do not fit: context_len is {self.config.context_len}")

    def head(self, x):
        return self.output(self.norm(x)).float()

    def forward(self, tokens, cache=None):
        t, held = tokens.shape[1], cache[0].length if cache else 0
        self.check(held + t)
        start = self.start_of(cache)
        mask, x = self.mask_of(t, held + t), self.tok_embeddings(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, self.rope[start : start + t], mask, cache[i] if cache else None)
        return self.head(x)


@mistake("Llama", "positions start at 0 in every call: with a cache the first new token stands at the cache's length")
class PositionsFromZero(_Varied):
    def start_of(self, cache):
        return 0


@mistake("Llama", "there is no causal mask: every token sees the tokens that it should predict")
class NoMask(_Varied):
    def mask_of(self, t, end):
        return None


@mistake("Llama", "with a cache the mask is aligned to the first key, so that new tokens cannot see the cached ones")
class MaskAlignedLeft(_Varied):
    def mask_of(self, t, end):
        return torch.ones(t, end, dtype=torch.bool, device=self.output.weight.device).tril()


@mistake("Llama", "the last norm, before the head, is missing")
class NoLastNorm(_Varied):
    def head(self, x):
        return self.output(x).float()


@mistake("Llama", "the logits stay in the weights' dtype")
class LogitsStayHalf(_Varied):
    def head(self, x):
        return self.output(self.norm(x))


@mistake("Llama", "it returns probabilities instead of logits")
class GivesProbabilities(_Varied):
    def head(self, x):
        return super().head(x).softmax(-1)


@mistake("Llama", "only the logits of the last position are returned")
class LastOnly(_Varied):
    def head(self, x):
        return super().head(x)[:, -1:]


@mistake("Llama", "the mask is made on PyTorch's default device, and the tokens may be on another one")
class MaskOnDefaultDevice(_Varied):
    def mask_of(self, t, end):
        return causal_mask(t, end)


@mistake("Llama", "the last position is refused, although context_len positions fit")
class RefusesTheLast(_Varied):
    def check(self, end):
        super().check(end + 1)


@mistake(
    "Llama",
    "the check ignores the tokens in the cache: it looks at the number of new tokens alone, or there is no check",
)
class ChecksNewOnly(_Varied):
    def forward(self, tokens, cache=None):
        if tokens.shape[1] > self.config.context_len:
            raise ValueError(f"{tokens.shape[1]} positions do not fit: context_len is {self.config.context_len}")
        return super().forward(tokens, cache)

    def check(self, end):
        pass


@mistake("Llama", "the head shares the embedding's weight, as in GPT-2; Llama 2 has two separate weights")
class TiedHead(reference.Llama):
    def __init__(self, config):
        super().__init__(config)
        self.output.weight = self.tok_embeddings.weight


@mistake("Llama", "norm_eps does not reach the last norm")
class LastNormFixedEpsilon(reference.Llama):
    def __init__(self, config):
        super().__init__(config)
        self.norm = reference.RMSNorm(config.dim)


@mistake("Llama", "rope_theta does not reach the rotation table: the base is always 10,000")
class RopeOfFixedBase(reference.Llama):
    def __init__(self, config):
        super().__init__(config)
        self.rope = precompute_rope(config.head_dim, config.context_len, device="cpu")


@mistake("Llama", "the length is read from the second layer's cache, which a model with one layer doesn't have")
class AsksTheSecondCache(reference.Llama):
    def forward(self, tokens, cache=None):
        if cache:
            cache[1].length  # noqa: B018
        return super().forward(tokens, cache)


@mistake(
    "Llama",
    "the embeddings are multiplied by the root of the width, as in the first transformer; Llama doesn't do that",
)
class ScaledEmbeddings(_Varied):
    def forward(self, tokens, cache=None):
        hook = self.tok_embeddings.register_forward_hook(lambda m, i, out: out * self.config.dim**0.5)
        try:
            return super().forward(tokens, cache)
        finally:
            hook.remove()


@mistake("Llama", "the rotation table is a buffer, so it appears in the state dict under a name that Meta's files lack")
class RopeInStateDict(reference.Llama):
    def __init__(self, config):
        super().__init__(config)
        table = self.rope
        del self.rope
        self.register_buffer("rope", table)


@mistake(
    "Llama",
    "the rotation table is a non-persistent buffer, and casting the model to a real dtype drops its imaginary part",
)
class RopeCast(reference.Llama):
    def __init__(self, config):
        super().__init__(config)
        table = self.rope
        del self.rope
        self.register_buffer("rope", table, persistent=False)

    def _apply(self, fn, recurse=True):
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super()._apply(fn, recurse)
        if not self.rope.is_complex():
            self.rope = torch.complex(self.rope.float(), torch.zeros_like(self.rope.float()))
        return self


@mistake("Llama", "all layers share one block: the list repeats the same object")
class SharedBlock(reference.Llama):
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([self.layers[0]] * config.n_layers)


@mistake("Llama", "all layers share one cache")
class SharedCache(reference.Llama):
    def make_cache(self, batch, max_len):
        return [super().make_cache(batch, max_len)[0]]

    def forward(self, tokens, cache=None):
        return super().forward(tokens, cache and [_Reused(cache[0]) for _ in self.layers])


class _Reused:
    def __init__(self, cache):
        self.cache, self.length = cache, cache.length

    def update(self, k, v):
        self.cache.length = self.length
        return self.cache.update(k, v)


@mistake("Llama", "the cache has room for every query head, but there are fewer key/value heads (n_kv_heads)")
class CacheUngrouped(reference.Llama):
    def make_cache(self, batch, max_len):
        weight = self.output.weight
        shape = (batch, self.config.n_heads, max_len, self.config.head_dim)
        return [KVCache(*shape, dtype=weight.dtype, device=weight.device) for _ in self.layers]


@mistake("Llama", "the cache is float32 whatever the weights are")
class CacheFloat32(reference.Llama):
    def make_cache(self, batch, max_len):
        shape = (batch, self.config.n_kv_heads, max_len, self.config.head_dim)
        return [KVCache(*shape, device=self.output.weight.device) for _ in self.layers]


@mistake("Llama", "the cache is made on PyTorch's default device, and the weights may be on another one")
class CacheOnDefaultDevice(reference.Llama):
    def make_cache(self, batch, max_len):
        shape = (batch, self.config.n_kv_heads, max_len, self.config.head_dim)
        return [KVCache(*shape, dtype=self.output.weight.dtype) for _ in self.layers]


# ---- 4.6 count_parameters --------------------------------------------------------------------------------------------


def _count(c, heads=2, attention=None, ffn=3, norms=2, last=1):
    kv = c.n_kv_heads * c.head_dim
    attention = 2 * c.dim**2 + 2 * c.dim * kv if attention is None else attention
    block = attention + ffn * c.dim * c.hidden_dim + norms * c.dim
    return heads * c.vocab_size * c.dim + c.n_layers * block + last * c.dim


@mistake("count_parameters", "the head is not counted, as if it shared the embedding's weight")
def counts_tied(config):
    return _count(config, heads=1)


@mistake(
    "count_parameters",
    "keys and values are counted for every query head, but there are fewer key/value heads (n_kv_heads)",
)
def counts_ungrouped(config):
    return _count(config, attention=4 * config.dim**2)


@mistake("count_parameters", "the feed-forward is counted with two matrices; SwiGLU has three")
def counts_two_matrices(config):
    return _count(config, ffn=2)


@mistake("count_parameters", "the last norm is not counted")
def counts_no_last_norm(config):
    return _count(config, last=0)


@mistake("count_parameters", "one norm per block is counted; there are two")
def counts_one_norm(config):
    return _count(config, norms=1)


@mistake("count_parameters", "the norms are counted with a bias, as in LayerNorm; RMSNorm has only a weight")
def counts_norm_biases(config):
    return _count(config, norms=4, last=2)


@mistake("count_parameters", "the number is right, but it is a float and should be an int")
def count_as_a_float(config):
    return float(reference.count_parameters(config))


# ---- 4.7 inference_memory_gb -----------------------------------------------------------------------------------------


@mistake("inference_memory_gb", "the bits are taken for bytes")
def bits_as_bytes(n_parameters, bits=16, overhead=1.2):
    return n_parameters * bits * overhead / 1e9


@mistake("inference_memory_gb", "every weight is counted as four bytes, whatever `bits` says")
def always_four_bytes(n_parameters, bits=16, overhead=1.2):
    return n_parameters * 4 * overhead / 1e9


@mistake("inference_memory_gb", "the result is in GiB (2 ** 30 bytes) instead of GB (1e9 bytes)")
def in_gib(n_parameters, bits=16, overhead=1.2):
    return n_parameters * bits / 8 * overhead / 2**30


@mistake("inference_memory_gb", "the overhead is forgotten")
def no_overhead(n_parameters, bits=16, overhead=1.2):
    return n_parameters * bits / 8 / 1e9


@mistake("inference_memory_gb", "the fraction is upside down: fewer bits need more memory")
def upside_down(n_parameters, bits=16, overhead=1.2):
    return n_parameters * 4 * (32 / bits) * overhead / 1e9


# ---- 4.8 kv_cache_bytes ----------------------------------------------------------------------------------------------


@mistake("kv_cache_bytes", "only the keys are counted; there are as many values")
def keys_only(config, batch, length, bytes_per_value=2):
    return reference.kv_cache_bytes(config, batch, length, bytes_per_value) // 2


@mistake("kv_cache_bytes", "only one layer is counted; every layer has a cache")
def one_layer(config, batch, length, bytes_per_value=2):
    return reference.kv_cache_bytes(config, batch, length, bytes_per_value) // config.n_layers


@mistake("kv_cache_bytes", "every query head is counted, but only the key/value heads (n_kv_heads) are cached")
def cache_of_query_heads(config, batch, length, bytes_per_value=2):
    return reference.kv_cache_bytes(config, batch, length, bytes_per_value) * config.n_heads // config.n_kv_heads


@mistake("kv_cache_bytes", "values are counted, not bytes")
def values_not_bytes(config, batch, length, bytes_per_value=2):
    return reference.kv_cache_bytes(config, batch, length, 1)


@mistake("kv_cache_bytes", "the batch is forgotten")
def one_sequence(config, batch, length, bytes_per_value=2):
    return reference.kv_cache_bytes(config, 1, length, bytes_per_value)


@mistake("kv_cache_bytes", "the number is right, but it is a float and should be an int")
def cache_bytes_as_a_float(config, batch, length, bytes_per_value=2):
    return float(reference.kv_cache_bytes(config, batch, length, bytes_per_value))


# ---- 4.9 convert_hf_state_dict ---------------------------------------------------------------------------------------


def _checked(state_dict, config):
    reference.convert_hf_state_dict(state_dict, config)  # raises
    return {n: w for n, w in state_dict.items() if not n.endswith("rotary_emb.inv_freq")}


def _renamed(state_dict, config, heads):
    """Heads by the projection's name; those without keep their rows."""
    out = {}
    for name, weight in _checked(state_dict, config).items():
        n = heads.get(name.split(".")[-2])
        out[hf_tensors(config)[name][0]] = half_to_interleaved(weight, n) if n else weight
    return out


@mistake("convert_hf_state_dict", "only the names change: the rows of q and k are still split halves")
def names_only(state_dict, config):
    return _renamed(state_dict, config, {})


@mistake("convert_hf_state_dict", "v is reordered as well: only what is rotated has rotary pairs")
def values_reordered(state_dict, config):
    return _renamed(
        state_dict, config, {"q_proj": config.n_heads, "k_proj": config.n_kv_heads, "v_proj": config.n_kv_heads}
    )


@mistake("convert_hf_state_dict", "q is reordered and k is not")
def queries_only(state_dict, config):
    return _renamed(state_dict, config, {"q_proj": config.n_heads})


@mistake("convert_hf_state_dict", "k is reordered by the number of query heads; it has only n_kv_heads heads")
def keys_by_query_heads(state_dict, config):
    n = config.n_heads if config.n_heads * 2 <= config.n_kv_heads * config.head_dim else config.n_kv_heads // 2 or 1
    return _renamed(state_dict, config, {"q_proj": config.n_heads, "k_proj": n})


@mistake("convert_hf_state_dict", "the rows are reordered in the wrong direction, from neighbours to halves")
def wrong_way(state_dict, config):
    out = _renamed(state_dict, config, {})
    for name in out:
        for part, n in ((".wq.", config.n_heads), (".wk.", config.n_kv_heads)):
            if part in name:
                out[name] = rearrange(out[name], "(h i two) c -> (h two i) c", h=n, two=2)
    return out


@mistake("convert_hf_state_dict", "gate_proj and up_proj are exchanged: gate_proj is w1")
def gate_and_up_exchanged(state_dict, config):
    out = reference.convert_hf_state_dict(state_dict, config)
    return {name.replace(".w1.", ".x.").replace(".w3.", ".w1.").replace(".x.", ".w3."): w for name, w in out.items()}


@mistake("convert_hf_state_dict", "every tensor is cast to float32 instead of keeping its dtype")
def converts_dtype(state_dict, config):
    return {name: w.float() for name, w in reference.convert_hf_state_dict(state_dict, config).items()}


@mistake("convert_hf_state_dict", "only the first problem is reported; the message should list all of them")
def first_problem_only(state_dict, config):
    try:
        return reference.convert_hf_state_dict(state_dict, config)
    except ValueError as error:
        raise ValueError("\n".join(str(error).splitlines()[:2])) from None


@mistake("convert_hf_state_dict", "unknown names are dropped silently; they should be reported as extra")
def extra_ignored(state_dict, config):
    known = {name: w for name, w in state_dict.items() if name in hf_tensors(config)}
    return reference.convert_hf_state_dict(known, config)


@mistake(
    "convert_hf_state_dict",
    "rotary_emb.inv_freq, which old checkpoints contain, is reported as an error; it should be dropped",
)
def inv_freq_refused(state_dict, config):
    if any("inv_freq" in name for name in state_dict):
        raise ValueError(f"extra: {[name for name in state_dict if 'inv_freq' in name]}")
    return reference.convert_hf_state_dict(state_dict, config)


@mistake("convert_hf_state_dict", "shapes are not compared")
def shapes_unchecked(state_dict, config):
    fixed = {n: torch.ones(hf_tensors(config)[n][1]) if n in hf_tensors(config) else w for n, w in state_dict.items()}
    reference.convert_hf_state_dict(fixed, config)
    return reference.convert_hf_state_dict(state_dict, config)


# ---- 4.10 sample_next ------------------------------------------------------------------------------------------------


def _sample(
    logits, temperature, top_k, top_p, generator, *, strict=False, keep_first=True, top_p_first=False, by_logits=False,
    one_more=False,
):  # fmt: skip
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError(f"temperature {temperature}, top_k {top_k}, top_p {top_p}")
    if temperature == 0:
        return logits.argmax(-1)
    ordered, tokens = (logits / temperature).sort(dim=-1, descending=True)
    p = ordered.softmax(-1)
    judged = logits.sort(dim=-1, descending=True)[0].softmax(-1) if by_logits else p.clone()
    if top_k is not None:
        p[..., top_k:] = 0
        judged[..., top_k:] = 0 if not top_p_first else judged[..., top_k:]
        if not top_p_first:
            judged = judged / judged.sum(-1, keepdim=True)
    if top_p is not None:
        before = judged.cumsum(-1) - (0 if strict else judged)
        drop = before > top_p if strict or one_more else before >= top_p
        if keep_first:
            drop[..., 0] = False
        p = p.masked_fill(drop, 0)
    return tokens.gather(-1, torch.multinomial(p, 1, generator=generator)).squeeze(-1)


@mistake("sample_next", "top_p drops the token that crosses the threshold")
def crossing_dropped(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    return _sample(logits, temperature, top_k, top_p, generator, strict=True)


@mistake("sample_next", "one token too many remains when the sum before it is exactly top_p")
def exactly_met(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    return _sample(logits, temperature, top_k, top_p, generator, one_more=True)


@mistake("sample_next", "top_p uses the probabilities from before top_k, without renormalising those that remain")
def top_p_before_top_k(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    return _sample(logits, temperature, top_k, top_p, generator, top_p_first=True)


@mistake("sample_next", "the temperature is applied after top_p instead of first")
def temperature_last(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    return _sample(logits, temperature, top_k, top_p, generator, by_logits=True)


@mistake("sample_next", "the logits are multiplied by the temperature instead of divided")
def multiplied(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    inverse = 1 / temperature if temperature > 0 else temperature
    return reference.sample_next(logits, inverse, top_k, top_p, generator)


@mistake("sample_next", "the temperature is ignored unless it is 0")
def temperature_ignored(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    return reference.sample_next(
        logits, min(temperature, 1.0) and 1.0 if temperature >= 0 else temperature, top_k, top_p, generator
    )


@mistake("sample_next", "temperature 0 divides by zero instead of taking the likeliest")
def divides_by_zero(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return torch.multinomial((logits / 0.0).softmax(-1), 1, generator=generator).squeeze(-1)
    return reference.sample_next(logits, temperature, top_k, top_p, generator)


@mistake("sample_next", "it always returns the likeliest token: nothing is drawn")
def always_greedy(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    reference.sample_next(logits, temperature, top_k, top_p, generator)
    return logits.argmax(-1)


@mistake("sample_next", "it returns positions in the sorted order instead of the token ids at those positions")
def places_not_tokens(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    order = logits.argsort(dim=-1, descending=True)
    drawn = reference.sample_next(logits, temperature, top_k, top_p, generator)
    return (order == drawn[..., None]).int().argmax(-1)


@mistake("sample_next", "it returns [B, 1] instead of [B]")
def keeps_a_dimension(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    return reference.sample_next(logits, temperature, top_k, top_p, generator)[:, None]


@mistake("sample_next", "the generator is not used")
def generator_ignored(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    return reference.sample_next(logits, temperature, top_k, top_p)


@mistake("sample_next", "the caller's logits are divided in place")
def in_place(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    out = reference.sample_next(logits, temperature, top_k, top_p, generator)
    if temperature > 0 and 0 not in logits.stride():
        logits /= temperature
    return out


@mistake("sample_next", "a top_p of 0 or less, or above 1, is accepted without an error")
def any_top_p(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    top_p = None if top_p is not None and not 0 < top_p <= 1 else top_p
    return reference.sample_next(logits, temperature, top_k, top_p, generator)


@mistake("sample_next", "top_p = 0 is accepted, but at least one token must remain, so p is above 0")
def top_p_of_zero(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    return reference.sample_next(logits, temperature, top_k, None if top_p == 0 else top_p, generator)


@mistake("sample_next", "a top_k below 1 is accepted without an error")
def any_top_k(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    top_k = None if top_k is not None and top_k < 1 else top_k
    return reference.sample_next(logits, temperature, top_k, top_p, generator)


@mistake("sample_next", "a negative temperature is accepted without an error")
def any_temperature(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    return reference.sample_next(logits, abs(temperature), top_k, top_p, generator)


@mistake("sample_next", "meaningless settings (a negative temperature, top_k = 0, top_p = 0) raise no error")
def nothing_refused(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    top_k = None if top_k is not None and top_k < 1 else top_k
    top_p = None if top_p is not None and not 0 < top_p <= 1 else top_p
    return reference.sample_next(logits, abs(temperature), top_k, top_p, generator)


@mistake("sample_next", "top_k larger than the vocabulary raises an error; it should keep all tokens")
def top_k_too_large(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if top_k is not None:
        logits.topk(top_k)
    return reference.sample_next(logits, temperature, top_k, top_p, generator)


# ---- 4.11 generate ---------------------------------------------------------------------------------------------------


def _generate(
    model, tokens, n, temperature, top_k, top_p, eos_id, generator, *, whole=False, fill=True, prompt_eos=False,
    stop=all, sample=reference.sample_next, position=-1, room=None, before=False, once_more=False, on_default=False,
):  # fmt: skip
    cache = model.make_cache(len(tokens), tokens.shape[1] + n if room is None else room)
    done = (
        (tokens == eos_id).any(1)
        if prompt_eos and eos_id is not None
        else torch.zeros(len(tokens), dtype=torch.bool, device=None if on_default else tokens.device)
    )
    text = tokens
    for _ in range(n):
        new = sample(model(tokens, cache)[:, position], temperature, top_k, top_p, generator)
        if eos_id is not None:
            new = new.masked_fill(done, eos_id) if fill else new
            done = done | (new == eos_id)
        text = torch.cat([text, new[:, None]], 1)
        if before and stop(done.tolist()):
            return
        yield new
        if stop(done.tolist()):
            return
        tokens = text if whole else new[:, None]
    if once_more:
        model(tokens, cache)


def _variant(name, sentence, no_grad=True, **changed):
    def wrong(
        model, tokens, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None
    ):  # fmt: skip
        return _generate(model, tokens, max_new_tokens, temperature, top_k, top_p, eos_id, generator, **changed)

    wrong = torch.no_grad()(_as_generator(wrong)) if no_grad else wrong
    wrong.__name__ = name
    return mistake("generate", sentence)(wrong)


def _as_generator(function):
    def steps(*args, **kwargs):
        yield from function(*args, **kwargs)

    return steps


whole_text = _variant(
    "whole_text",
    "the whole text is passed again in each step, although the cache holds everything but the newest token",
    whole=True,
)
once_more = _variant(
    "once_more", "the model runs once more after the last token, and the result is never used", once_more=True
)
first_only = _variant("first_only", "it stops as soon as one sequence has ended, although others have not", stop=any)
ended_go_on = _variant(
    "ended_go_on", "a sequence that has ended continues with other tokens instead of repeating eos_id", fill=False
)
never_stops = _variant("never_stops", "it keeps going after all sequences have ended", stop=lambda done: False)
eos_swallowed = _variant("eos_swallowed", "the step in which the last sequence ends is not yielded", before=True)
ended_by_prompt = _variant(
    "ended_by_prompt", "an end token in the prompt counts as the end of the sequence", prompt_eos=True
)
with_gradients = _variant("with_gradients", "gradients are recorded", no_grad=False)
first_position = _variant(
    "first_position", "the next token is read from the first position; the last position predicts it", position=0
)
nothing_handed_on = _variant(
    "nothing_handed_on",
    "temperature, top_k and top_p do not reach sample_next",
    sample=lambda logits, temperature, *_: reference.sample_next(logits, 1.0 if temperature else 0),
)
seed_lost = _variant(
    "seed_lost",
    "the generator does not reach sample_next",
    sample=lambda logits, temperature, k, p, g: reference.sample_next(logits, temperature, k, p),
)
small_cache = _variant(
    "small_cache", "the cache has room for the new tokens only, but the prompt goes into it too", room=3
)


on_default_device = _variant(
    "on_default_device", "the record of ended sequences is on PyTorch's default device, and the tokens may be on another one",
    on_default=True,
)  # fmt: skip


@mistake("generate", "it returns a list of all tokens at the end, so nothing can be shown while it is being written")
@torch.no_grad()
def all_at_once(model, tokens, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    args = (model, tokens, max_new_tokens, temperature, top_k, top_p, eos_id, generator)
    return list(reference.generate(*args))


@mistake("generate", "the sequences are written one after the other instead of in one batch")
@torch.no_grad()
def one_by_one(model, tokens, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    rest = (max_new_tokens, temperature, top_k, top_p, eos_id, generator)
    yield from (step for row in tokens for step in reference.generate(model, row[None], *rest))


@mistake("generate", "the prompt is yielded too, before the new tokens")
@torch.no_grad()
def prompt_too(model, tokens, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    yield from tokens.T
    yield from reference.generate(model, tokens, max_new_tokens, temperature, top_k, top_p, eos_id, generator)


@mistake("generate", "each step yields [B, 1] instead of [B]")
@torch.no_grad()
def columns(model, tokens, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    for step in reference.generate(model, tokens, max_new_tokens, temperature, top_k, top_p, eos_id, generator):
        yield step[:, None]
