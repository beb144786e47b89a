"""Plausible wrong answers of chapter 3, and the misconception behind each."""

import math

import torch
from einops import rearrange
from torch import nn

from lib.workbook.grading import mistake
from solutions import attention as reference
from solutions.rope import apply_rope

# ---- 3.1 softmax -----------------------------------------------------------------------------------------------------


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


@mistake("softmax", "nothing is subtracted before the exponential: exp(89) is infinite in float32")
def without_shift(x, dim):
    weights = _wide(x).exp()
    total = weights.sum(dim, keepdim=True)
    return (weights / total.masked_fill(total == 0, 1)).to(x.dtype)


@mistake("softmax", "a row of -inf gives NaN: -inf minus its maximum -inf is not a number")
def nan_for_nothing(x, dim):
    return torch.softmax(x, dim)


@mistake("softmax", "a row of -inf gives equal weights, where every weight should be 0")
def uniform_for_nothing(x, dim):
    return torch.softmax(x.clamp(min=torch.finfo(x.dtype).min / 2), dim)


@mistake("softmax", "the NaN is replaced afterwards, but the gradient still runs through it: it must never arise")
def nan_replaced(x, dim):
    return torch.nan_to_num(torch.softmax(x, dim))


@mistake("softmax", "the maximum of the whole tensor is subtracted, so that a row far below it vanishes")
def one_maximum_for_all(x, dim):
    largest = _wide(x).max()
    weights = torch.exp(_wide(x) - (largest if largest > -math.inf else 0.0))
    total = weights.sum(dim, keepdim=True)
    return (weights / total.masked_fill(total == 0, 1)).to(x.dtype)


@mistake("softmax", "the weights sum to one along the last dimension, whatever dim says")
def always_last(x, dim):
    return reference.softmax(x, -1)


@mistake("softmax", "the weights sum to one along the first dimension, whatever dim says")
def always_first(x, dim):
    return reference.softmax(x, 0)


@mistake("softmax", "the scores were divided by their sum without an exponential")
def without_exponential(x, dim):
    return x / x.sum(dim, keepdim=True)


@mistake("softmax", "the exponentials are not divided by their sum")
def not_divided(x, dim):
    return torch.exp(x - x.amax(dim, keepdim=True))


@mistake("softmax", "the powers are those of 2 instead of e")
def powers_of_two(x, dim):
    return reference.softmax(x * math.log(2), dim)


@mistake("softmax", "it is the logarithm of the weights")
def log_of_weights(x, dim):
    return torch.log_softmax(x, dim)


@mistake("softmax", "float16 and bfloat16 were computed in their own precision, instead of in float32")
def in_its_own_dtype(x, dim):
    largest = x.amax(dim, keepdim=True)
    weights = torch.exp(x - largest.masked_fill(largest == -math.inf, 0.0))
    total = weights.sum(dim, keepdim=True)
    return weights / total.masked_fill(total == 0.0, 1.0)


@mistake("softmax", "the weights are left in float32 instead of going back to the dtype of x")
def left_in_float32(x, dim):
    return reference.softmax(_wide(x), dim)


@mistake("softmax", "float64 is cast down to float32")
def float64_cast_down(x, dim):
    return reference.softmax(x.float(), dim).to(x.dtype)


@mistake("softmax", "x was changed in place")
def changed_in_place(x, dim):
    out = reference.softmax(x, dim)
    x.data.copy_(x - x.amax(dim, keepdim=True))
    return out


@mistake("softmax", "the result is cut off from the graph")
def weights_detached(x, dim):
    return reference.softmax(x.detach(), dim)


@mistake("softmax", "the maximum of an empty dimension is taken, which raises an error: that case must return early")
def largest_of_nothing(x, dim):
    x.amax(dim)
    return reference.softmax(x, dim)


# ---- 3.2 causal_mask -------------------------------------------------------------------------------------------------


@mistake("causal_mask", "aligned to the first key: with a cache the last query would not see itself")
def aligned_to_first(n_queries, n_keys, device=None):
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril()


@mistake("causal_mask", "True where a query may NOT look: the polarity of nn.MultiheadAttention")
def true_hides(n_queries, n_keys, device=None):
    return ~reference.causal_mask(n_queries, n_keys, device)


@mistake("causal_mask", "a query may not see its own key, so the first query sees nothing")
def without_itself(n_queries, n_keys, device=None):
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries - 1)


@mistake("causal_mask", "every query sees one key ahead")
def one_ahead(n_queries, n_keys, device=None):
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries + 1)


@mistake("causal_mask", "queries look ahead and not back: rows and columns are exchanged")
def looks_ahead(n_queries, n_keys, device=None):
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).triu(n_keys - n_queries)


@mistake("causal_mask", "the offset has the wrong sign: n_queries - n_keys")
def wrong_offset(n_queries, n_keys, device=None):
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_queries - n_keys)


@mistake("causal_mask", "the mask holds 0 and -inf, to be added to scores, where True and False are asked for")
def additive(n_queries, n_keys, device=None):
    hidden = ~reference.causal_mask(n_queries, n_keys, device)
    return torch.zeros(n_queries, n_keys, device=device).masked_fill(hidden, -math.inf)


@mistake("causal_mask", "ones and zeros instead of True and False")
def of_numbers(n_queries, n_keys, device=None):
    return reference.causal_mask(n_queries, n_keys, device).float()


@mistake("causal_mask", "the mask is transposed: queries are its rows, keys its columns")
def transposed(n_queries, n_keys, device=None):
    return reference.causal_mask(n_queries, n_keys, device).T


@mistake("causal_mask", "the mask is square: it has no columns for the keys in the cache")
def square(n_queries, n_keys, device=None):
    return reference.causal_mask(n_queries, n_queries, device)


@mistake("causal_mask", "the device asked for is ignored")
def mask_on_cpu(n_queries, n_keys, device=None):
    return reference.causal_mask(n_queries, n_keys)


# ---- 3.3 scaled_dot_product_attention --------------------------------------------------------------------------------


def _attend(q, k, v, mask=None, scale=None, hidden=-math.inf, weigh=reference.softmax):
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q * scale @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, hidden)
    return weigh(scores, -1) @ v


@mistake("scaled_dot_product_attention", "the scores are not divided by the square root of D")
def not_scaled(q, k, v, mask=None):
    return _attend(q, k, v, mask, 1.0)


@mistake("scaled_dot_product_attention", "the scores are divided by D instead of by its square root")
def scaled_by_width(q, k, v, mask=None):
    return _attend(q, k, v, mask, 1 / q.shape[-1])


@mistake("scaled_dot_product_attention", "the scores are multiplied by the square root of D instead of divided")
def scaled_up(q, k, v, mask=None):
    return _attend(q, k, v, mask, math.sqrt(q.shape[-1]))


@mistake("scaled_dot_product_attention", "the square root is that of the width of the values, not of the keys")
def scaled_by_values(q, k, v, mask=None):
    return _attend(q, k, v, mask, 1 / math.sqrt(v.shape[-1]))


@mistake("scaled_dot_product_attention", "the square root is that of the number of keys, not of their width")
def scaled_by_keys(q, k, v, mask=None):
    return _attend(q, k, v, mask, 1 / math.sqrt(k.shape[-2]))


@mistake("scaled_dot_product_attention", "the weights were divided by the square root of D, after the softmax")
def scaled_after_softmax(q, k, v, mask=None):
    return _attend(q, k, v, mask, 1.0) / math.sqrt(q.shape[-1])


@mistake(
    "scaled_dot_product_attention", "the softmax runs over the queries: the weights of one query should sum to one"
)
def softmax_over_queries(q, k, v, mask=None):
    return _attend(q, k, v, mask, weigh=lambda scores, dim: reference.softmax(scores, -2))


@mistake("scaled_dot_product_attention", "the scores themselves weigh the values: there is no softmax")
def without_softmax(q, k, v, mask=None):
    return _attend(q, k, v, mask, hidden=0.0, weigh=lambda scores, dim: scores)


@mistake("scaled_dot_product_attention", "the mask is read the other way round: True means that a query may look")
def mask_reversed(q, k, v, mask=None):
    return _attend(q, k, v, None if mask is None else ~mask)


@mistake("scaled_dot_product_attention", "the mask is ignored")
def mask_ignored(q, k, v, mask=None):
    return _attend(q, k, v)


@mistake("scaled_dot_product_attention", "the weights are masked after the softmax, so they no longer sum to one")
def masked_after_softmax(q, k, v, mask=None):
    return _attend(q, k, v, None, weigh=lambda s, dim: reference.softmax(s, dim) * (1 if mask is None else mask))


@mistake("scaled_dot_product_attention", "hidden scores are set to 0, which is a score like any other")
def masked_with_zero(q, k, v, mask=None):
    return _attend(q, k, v, mask, hidden=0.0)


@mistake("scaled_dot_product_attention", "True and False were added to the scores as 1 and 0")
def mask_added(q, k, v, mask=None):
    extra = 0.0 if mask is None else mask.to(q.dtype)
    return _attend(q, k, v, None, weigh=lambda scores, dim: reference.softmax(scores + extra, dim))


@mistake(
    "scaled_dot_product_attention",
    "hidden scores are set to a large negative number: a query that may see nothing sees the mean of everything",
)
def masked_with_a_number(q, k, v, mask=None):
    return _attend(q, k, v, mask, hidden=-6e4)


@mistake("scaled_dot_product_attention", "a query that may see nothing gets NaN, as torch.softmax returns it")
def nan_for_hidden_rows(q, k, v, mask=None):
    return _attend(q, k, v, mask, weigh=torch.softmax)


@mistake("scaled_dot_product_attention", "NaN is replaced at the end: the output is right, and the gradients are NaN")
def nan_replaced_in_output(q, k, v, mask=None):
    return torch.nan_to_num(_attend(q, k, v, mask, weigh=torch.softmax))


@mistake("scaled_dot_product_attention", "it fails for S = 0: without keys there is no largest score")
def largest_of_no_keys(q, k, v, mask=None):
    (q @ k.transpose(-2, -1)).amax(-1)
    return reference.scaled_dot_product_attention(q, k, v, mask)


@mistake("scaled_dot_product_attention", "it always hides the future, where only the mask should do that")
def always_causal(q, k, v, mask=None):
    causal = reference.causal_mask(q.shape[-2], k.shape[-2])
    return _attend(q, k, v, causal if mask is None else causal & mask)


@mistake(
    "scaled_dot_product_attention",
    "the scores are divided after the product, which by then has passed 65,504, float16's largest number",
)
def divided_too_late(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return reference.softmax(scores, -1) @ v


@mistake("scaled_dot_product_attention", "the result is left in float32 instead of going back to the dtype of q")
def attention_in_float32(q, k, v, mask=None):
    return reference.scaled_dot_product_attention(_wide(q), _wide(k), _wide(v), mask)


@mistake("scaled_dot_product_attention", "the result is cut off from the graph")
def attention_detached(q, k, v, mask=None):
    return _attend(q, k, v, mask).detach()


@mistake("scaled_dot_product_attention", "queries are processed one by one in a loop, where one product is enough")
def query_by_query(q, k, v, mask=None):
    t, s = q.shape[-2], k.shape[-2]
    mask = torch.ones(t, s, dtype=torch.bool) if mask is None else mask.expand(*mask.shape[:-2], t, s)
    rows = [_attend(q[..., i : i + 1, :], k, v, mask[..., i : i + 1, :]) for i in range(t)]
    return torch.cat(rows, dim=-2)


@mistake(
    "scaled_dot_product_attention", "a tensor of T x S x D products is stored, where a matrix product sums as it goes"
)
def all_products_at_once(q, k, v, mask=None):
    products = (q / math.sqrt(q.shape[-1]))[..., :, None, :] * k[..., None, :, :]
    scores = products.sum(-1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return reference.softmax(scores, -1) @ v


# ---- 3.4 and 3.5: heads ----------------------------------------------------------------------------------------------


def _divides(x, n_heads):
    if x.shape[-1] % n_heads:
        raise ValueError(f"{x.shape[-1]} is no multiple of {n_heads}")


@mistake("split_heads", "a reshape to [B, H, T, D] without moving an axis: positions and heads are mixed up")
def split_by_reshape(x, n_heads):
    _divides(x, n_heads)
    return x.reshape(x.shape[0], n_heads, x.shape[1], -1)


@mistake("split_heads", "neighbouring features go to different heads: head 0 should be the first D of them")
def split_interleaved(x, n_heads):
    _divides(x, n_heads)
    return rearrange(x, "b t (d h) -> b h t d", h=n_heads)


@mistake("split_heads", "the heads come after the positions, [B, T, H, D], instead of next to the batch")
def split_not_moved(x, n_heads):
    _divides(x, n_heads)
    return x.unflatten(-1, (n_heads, -1))


@mistake("split_heads", "n_heads was taken as the width of a head")
def split_by_width(x, n_heads):
    _divides(x, n_heads)
    return rearrange(x, "b t (h d) -> b h t d", d=n_heads)


@mistake("split_heads", "a width that does not divide is silently cut off")
def split_cuts_off(x, n_heads):
    width = max(n_heads, x.shape[-1] // n_heads * n_heads)
    padded = torch.nn.functional.pad(x, (0, max(0, width - x.shape[-1])))
    return reference.split_heads(padded[..., :width], n_heads)


@mistake("merge_heads", "a reshape without moving the heads back: positions and heads are mixed up")
def merge_by_reshape(x):
    return x.reshape(x.shape[0], x.shape[2], -1)


@mistake("merge_heads", "the features of the heads alternate, where those of one head should be side by side")
def merge_interleaved(x):
    return rearrange(x, "b h t d -> b t (d h)")


@mistake("merge_heads", "the heads were added up instead of placed side by side")
def merge_by_sum(x):
    return x.sum(1)


@mistake("merge_heads", "the heads are back behind the positions, [B, T, H, D], but not joined")
def merge_not_joined(x):
    return x.transpose(1, 2)


@mistake("merge_heads", "the last two axes are the wrong way round: [B, H*D, T]")
def merge_transposed(x):
    return rearrange(x, "b h t d -> b (h d) t")


# ---- 3.6 repeat_kv ---------------------------------------------------------------------------------------------------


@mistake("repeat_kv", "the groups alternate (0, 1, 0, 1), where the copies of one should be side by side (0, 0, 1, 1)")
def repeat_tiled(x, n_repeats):
    return x.repeat(1, n_repeats, 1, 1)


@mistake("repeat_kv", "positions were repeated instead of heads")
def repeat_positions(x, n_repeats):
    return x.repeat_interleave(n_repeats, dim=2)


@mistake("repeat_kv", "the batch was repeated instead of the heads")
def repeat_batch(x, n_repeats):
    return x.repeat_interleave(n_repeats, dim=0)


@mistake("repeat_kv", "the groups are not repeated at all")
def repeat_nothing(x, n_repeats):
    return x


@mistake("repeat_kv", "the result has one axis too many, [B, G, R, T, D]: groups and copies are not joined")
def repeat_not_joined(x, n_repeats):
    return x[:, :, None].expand(-1, -1, n_repeats, -1, -1)


@mistake("repeat_kv", "the copies are cut off from the graph, so that no gradient reaches the group")
def repeat_detached(x, n_repeats):
    return reference.repeat_kv(x.detach(), n_repeats)


@mistake("repeat_kv", "n_repeats was taken as the total number of heads")
def repeat_to_a_number(x, n_repeats):
    return reference.repeat_kv(x, max(1, n_repeats // x.shape[1]))


# ---- 3.7 KVCache -----------------------------------------------------------------------------------------------------


def _room(cache, k, v):
    expected = [cache.keys.shape[0], cache.keys.shape[1], k.shape[2], cache.keys.shape[3]]
    for new in (k, v):
        if list(new.shape) != expected:
            raise ValueError(f"{list(new.shape)}, expected {expected}")
    end = cache.length + k.shape[2]
    if end > cache.keys.shape[2]:
        raise ValueError(f"{cache.length} held, {k.shape[2]} more is {end}, of {cache.keys.shape[2]}")
    return cache.length, end


def _write(cache, k, v, start):
    cache.keys[:, :, start : start + k.shape[2]] = k
    cache.values[:, :, start : start + k.shape[2]] = v


@mistake("KVCache", "tensors are concatenated at each update: the whole past is copied for every token")
class JoinsTensors(reference.KVCache):
    def __init__(self, batch, n_kv_heads, max_len, head_dim, dtype=torch.float32, device=None):
        super().__init__(batch, n_kv_heads, max_len, head_dim, dtype, device)
        self.max_len = max_len

    def update(self, k, v):
        fits = reference.KVCache(len(self.keys), self.keys.shape[1], self.max_len, self.keys.shape[3], self.keys.dtype)
        fits.length = self.length
        fits.update(k, v)
        self.keys = torch.cat([self.keys[:, :, : self.length], k], dim=2)
        self.values = torch.cat([self.values[:, :, : self.length], v], dim=2)
        self.length = fits.length
        return self.keys, self.values


@mistake("KVCache", "copies are returned, instead of views of the cache's own memory")
class ReturnsCopies(reference.KVCache):
    def update(self, k, v):
        keys, values = super().update(k, v)
        return keys.clone(), values.clone()


@mistake("KVCache", "every update begins at position 0 and overwrites the past")
class BeginsAtZero(reference.KVCache):
    def update(self, k, v):
        _, end = _room(self, k, v)
        _write(self, k, v, 0)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


@mistake("KVCache", "length is never advanced")
class NeverAdvances(reference.KVCache):
    def update(self, k, v):
        start, end = _room(self, k, v)
        _write(self, k, v, start)
        return self.keys[:, :, :end], self.values[:, :, :end]


@mistake("KVCache", "length grows by 1, however many positions came")
class AdvancesByOne(reference.KVCache):
    def update(self, k, v):
        out = super().update(k, v)
        self.length += 1 - k.shape[2]
        return out


@mistake("KVCache", "only the new positions are returned, not all positions so far")
class ReturnsTheNew(reference.KVCache):
    def update(self, k, v):
        super().update(k, v)
        return k, v


@mistake("KVCache", "all max_len positions are returned, with zeros where nothing was written yet")
class ReturnsEverything(reference.KVCache):
    def update(self, k, v):
        super().update(k, v)
        return self.keys, self.values


@mistake("KVCache", "what is returned ends before the new positions")
class ReturnsThePast(reference.KVCache):
    def update(self, k, v):
        start = self.length
        super().update(k, v)
        return self.keys[:, :, :start], self.values[:, :, :start]


@mistake("KVCache", "keys and values are exchanged")
class ExchangesBoth(reference.KVCache):
    def update(self, k, v):
        return super().update(v, k)


@mistake("KVCache", "the values were written over the keys")
class KeysForValues(reference.KVCache):
    def update(self, k, v):
        super().update(k, k)
        return self.keys[:, :, : self.length], self.keys[:, :, : self.length]


@mistake("KVCache", "the number of new positions is read from the axis of the heads")
class CountsHeads(reference.KVCache):
    def update(self, k, v):
        super().update(k, v)
        self.length += k.shape[1] - k.shape[2]
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


@mistake("KVCache", "a full cache silently drops its oldest positions")
class DropsTheOldest(reference.KVCache):
    def update(self, k, v):
        _room(self, k[:, :, :0], v[:, :, :0] if k.shape == v.shape else v)
        max_len = self.keys.shape[2]
        excess = max(0, self.length + k.shape[2] - max_len)
        if excess:
            kept = max(0, self.length - excess)
            self.keys[:, :, :kept] = self.keys[:, :, self.length - kept : self.length].clone()
            self.values[:, :, :kept] = self.values[:, :, self.length - kept : self.length].clone()
            self.length, k, v = kept, k[:, :, -max_len:], v[:, :, -max_len:]
        return super().update(k, v)


@mistake("KVCache", "the cache is changed before it refuses an update that does not fit")
class ChangesBeforeItRefuses(reference.KVCache):
    def update(self, k, v):
        start = _room(self, k[:, :, :0], v[:, :, :0])[0] if k.shape == v.shape else _room(self, k, v)[0]
        self.length += k.shape[2]
        if self.length > self.keys.shape[2]:
            raise ValueError(f"{start} + {k.shape[2]} > {self.keys.shape[2]}")
        _write(self, k, v, start)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


@mistake("KVCache", "the last position is never used: an update that just fits is refused")
class RefusesTheLast(reference.KVCache):
    def update(self, k, v):
        end = self.length + k.shape[2]
        if end >= self.keys.shape[2]:
            raise ValueError(f"{self.length} + {k.shape[2]} >= {self.keys.shape[2]}")
        return super().update(k, v)


@mistake("KVCache", "a batch of one, or a single head, is silently broadcast over the whole cache")
class BroadcastsOne(reference.KVCache):
    def update(self, k, v):
        batch, groups, _, width = self.keys.shape
        return super().update(*(new.expand(batch, groups, -1, width) for new in (k, v)))


@mistake("KVCache", "the keys are written before the shape of the values is checked")
class WritesBeforeItLooks(reference.KVCache):
    def update(self, k, v):
        if k.ndim == 4:
            start, _ = _room(self, k, k)
            self.keys[:, :, start : start + k.shape[2]] = k
        return super().update(k, v)


@mistake("KVCache", "the third axis is read before the number of axes is checked")
class ReadsTheThirdAxis(reference.KVCache):
    def update(self, k, v):
        if self.length + k.shape[2] > self.keys.shape[2]:
            raise ValueError(f"{self.length} + {k.shape[2]} > {self.keys.shape[2]}")
        return super().update(k, v)


# ---- 3.8 MultiHeadAttention ------------------------------------------------------------------------------------------


class _Layer(reference.MultiHeadAttention):
    """The reference in steps, each of which a mistake may take in its own way."""

    def turn(self, x, rope):
        return x if rope is None else apply_rope(x.transpose(1, 2), rope).transpose(1, 2)

    def share(self, x):
        return reference.repeat_kv(x, self.n_heads // self.n_kv_heads)

    def attend(self, q, k, v, mask):
        return reference.scaled_dot_product_attention(q, k, v, mask)

    def project(self, x, rope):
        q, k = reference.split_heads(self.wq(x), self.n_heads), reference.split_heads(self.wk(x), self.n_kv_heads)
        return self.turn(q, rope), self.turn(k, rope), reference.split_heads(self.wv(x), self.n_kv_heads)

    def forward(self, x, rope=None, mask=None, cache=None):
        q, k, v = self.project(x, rope)
        if cache is not None:
            k, v = cache.update(k, v)
        k, v = self.share(k), self.share(v)
        return self.wo(reference.merge_heads(self.attend(q, k, v, mask)))


@mistake("MultiHeadAttention", "the output projection wo is left out")
class WithoutOutput(_Layer):
    def forward(self, x, rope=None, mask=None, cache=None):
        out = super().forward(x, rope, mask, cache)
        return out @ torch.linalg.pinv(self.wo.weight.T)


@mistake("MultiHeadAttention", "the heads are joined by a reshape alone: positions and heads are mixed up")
class JoinsByReshape(_Layer):
    def attend(self, q, k, v, mask):
        out = super().attend(q, k, v, mask)
        return rearrange(out.reshape(out.shape[0], out.shape[2], -1), "b t (h d) -> b h t d", h=self.n_heads)


@mistake("MultiHeadAttention", "the whole width is one head: the features are not split")
class OneHead(_Layer):
    def attend(self, q, k, v, mask):
        q, k, v = (reference.merge_heads(z)[:, None] for z in (q, k, v))
        out = reference.scaled_dot_product_attention(q, k, v, None if mask is None else mask[..., :1, :, :])
        return reference.split_heads(out[:, 0], self.n_heads)


@mistake("MultiHeadAttention", "the scores are divided by the square root of the model's width, not of a head's")
class ScalesByModelWidth(_Layer):
    def attend(self, q, k, v, mask):
        return super().attend(q / math.sqrt(self.n_heads), k, v, mask)


@mistake("MultiHeadAttention", "the values are rotated too")
class TurnsValues(_Layer):
    def project(self, x, rope):
        q, k, v = super().project(x, rope)
        return q, k, self.turn(v, rope)


@mistake("MultiHeadAttention", "only the queries are rotated, not the keys")
class TurnsQueriesOnly(_Layer):
    def project(self, x, rope):
        q, _, v = super().project(x, rope)
        return q, super().project(x, None)[1], v


@mistake("MultiHeadAttention", "rope is ignored")
class TurnsNothing(_Layer):
    def turn(self, x, rope):
        return x


@mistake("MultiHeadAttention", "the input is rotated before it is projected, instead of queries and keys after it")
class TurnsTheInput(_Layer):
    def forward(self, x, rope=None, mask=None, cache=None):
        turned = x
        if rope is not None:
            turned = apply_rope(x.unflatten(-1, (self.n_heads, -1)), rope).flatten(2)
        return super().forward(turned, None, mask, cache)


@mistake("MultiHeadAttention", "the mask is ignored")
class IgnoresTheMask(_Layer):
    def attend(self, q, k, v, mask):
        return super().attend(q, k, v, None)


@mistake("MultiHeadAttention", "it always hides the future, where only the mask should do that")
class AlwaysCausal(_Layer):
    def attend(self, q, k, v, mask):
        causal = reference.causal_mask(q.shape[2], k.shape[2])
        return super().attend(q, k, v, causal if mask is None else causal & mask)


@mistake("MultiHeadAttention", "the cache is ignored: each chunk attends to itself alone")
class IgnoresTheCache(_Layer):
    def forward(self, x, rope=None, mask=None, cache=None):
        if cache is not None:
            cache.update(*self.project(x, rope)[1:])
            mask = None if mask is None else mask[..., -x.shape[1] :]
        return super().forward(x, rope, mask, None)


@mistake("MultiHeadAttention", "the keys are cached before they are rotated, and never rotated after")
class CachesBeforeTurning(_Layer):
    def forward(self, x, rope=None, mask=None, cache=None):
        if cache is None:
            return super().forward(x, rope, mask)
        q, k, v = self.project(x, None)
        k, v = cache.update(k, v)
        return self.wo(reference.merge_heads(self.attend(self.turn(q, rope), self.share(k), self.share(v), mask)))


@mistake("MultiHeadAttention", "apply_rope was given [B, H, T, D], where it takes [B, T, H, D]")
class TurnsByHead(_Layer):
    def turn(self, x, rope):
        return x if rope is None else apply_rope(x, rope)


@mistake("MultiHeadAttention", "the keys are rotated after they are cached, so the old ones are rotated again")
class TurnsTheOldAgain(_Layer):
    def forward(self, x, rope=None, mask=None, cache=None):
        if cache is None or rope is None:
            return super().forward(x, rope, mask, cache)
        q, k, v = self.project(x, None)
        k, v = cache.update(k, v)
        rows = rope.expand(k.shape[2], -1) if len(rope) == 1 else rope  # more rows than one do not fit, and raise
        k = self.turn(k, rows)
        return self.wo(reference.merge_heads(self.attend(self.turn(q, rope), self.share(k), self.share(v), mask)))


@mistake("MultiHeadAttention", "the keys and values are repeated before they are cached: the cache grows by H / G")
class CachesRepeated(_Layer):
    def forward(self, x, rope=None, mask=None, cache=None):
        q, k, v = self.project(x, rope)
        k, v = self.share(k), self.share(v)
        if cache is not None:
            k, v = cache.update(k, v)
        return self.wo(reference.merge_heads(self.attend(q, k, v, mask)))


@mistake("MultiHeadAttention", "query heads take the groups in turn, where neighbouring heads should share a group")
class SharesInTurn(_Layer):
    def share(self, x):
        return x.repeat(1, self.n_heads // self.n_kv_heads, 1, 1)


@mistake("MultiHeadAttention", "the projections have biases")
class HasBiases(_Layer):
    def __init__(self, dim, n_heads, n_kv_heads=None):
        super().__init__(dim, n_heads, n_kv_heads)
        for name in ("wq", "wk", "wv", "wo"):
            old = getattr(self, name)
            setattr(self, name, nn.Linear(old.in_features, old.out_features))


@mistake("MultiHeadAttention", "n_kv_heads is ignored: keys and values have as many heads as the queries")
class IgnoresGroups(_Layer):
    def __init__(self, dim, n_heads, n_kv_heads=None):
        super().__init__(dim, n_heads, n_kv_heads)
        super().__init__(dim, n_heads)


@mistake("MultiHeadAttention", "a width that is no multiple of the heads is silently rounded down")
class RoundsDown(_Layer):
    def __init__(self, dim, n_heads, n_kv_heads=None):
        super().__init__(dim // n_heads * n_heads, n_heads, n_kv_heads)


@mistake("MultiHeadAttention", "heads of queries that are no multiple of the key/value heads are accepted")
class AcceptsAnyGroups(_Layer):
    def __init__(self, dim, n_heads, n_kv_heads=None):
        groups = n_kv_heads or n_heads
        super().__init__(dim, n_heads, groups if n_heads % groups == 0 else 1)


@mistake("MultiHeadAttention", "the result is cut off from the graph before wo: wq, wk and wv learn nothing")
class CutOff(_Layer):
    def attend(self, q, k, v, mask):
        return super().attend(q, k, v, mask).detach()
