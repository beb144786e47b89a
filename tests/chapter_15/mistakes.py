"""Wrong answers to chapter 15's exercises, each the reference with one misconception put into its text."""

import linecache
import types
from pathlib import Path

import solutions
from lib.workbook.grading import mistake

SOURCE = (Path(solutions.__file__).parent / "flash_attention.py").read_text()


def _wrong(name, sentence, *changes):
    """Register the reference's ``name`` with texts exchanged; Triton reads the text again, so Python must know it."""
    start = SOURCE.index(f"def {name}(" if name[0].islower() else f"class {name}(")
    head, text = SOURCE[:start], SOURCE[start:]
    for old, new in changes:
        assert old in text, f"{name}: {old!r} is not in the reference"
        text = text.replace(old, new, 1)
    file = f"{__file__[:-3]}_{name}_{abs(hash(sentence))}.py"
    lines = (head + text).splitlines(keepends=True)
    linecache.cache[file] = (len(head + text), None, lines, file)
    module = types.ModuleType(f"{__name__}.wrong")
    exec(compile(head + text, file, "exec"), module.__dict__)
    wrong = module.__dict__[name]
    wrong.__module__ = __name__
    mistake(name, sentence)(wrong)


# ---- 15.1 attention_io_bytes -----------------------------------------------------------------------------------------
_wrong(
    "attention_io_bytes",
    "numbers counted, not bytes",
    ("return 2 * (4", "return 1 * (4"),
    ("return 2 * (2", "return 1 * (2"),
)
_wrong(
    "attention_io_bytes",
    "the scores are moved twice: what the softmax writes is read again too",
    ("4 * length**2", "2 * length**2"),
)
_wrong(
    "attention_io_bytes",
    "the last block of keys, which is not full, is forgotten",
    ("passes = -(-length // block)", "passes = length // block"),
)
_wrong("attention_io_bytes", "the output is written once a block and never read back", ("(3 * length", "(2 * length"))

_wrong(
    "attention_io_bytes",
    "the block of keys rounded down: where fewer than 4d numbers have room it has no key at all",
    ("block = -(-(sram_bytes // 2) // (4 * head_dim))", "block = (sram_bytes // 2) // (4 * head_dim)"),
)
_wrong(
    "attention_io_bytes",
    "a block of M // d keys: the queries, the keys, the values and the output need room too",
    ("// (4 * head_dim))", "// head_dim)"),
)

# ---- 15.2 online_softmax_update --------------------------------------------------------------------------------------
_wrong("online_softmax_update", "the sum so far is not scaled to the new maximum", ("l * decay", "l"))
_wrong("online_softmax_update", "the output so far is not scaled to the new maximum", ("acc * decay[..., None]", "acc"))
_wrong(
    "online_softmax_update",
    "the maximum of the tile alone: what came before is forgotten",
    ("torch.maximum(m, scores.amax(-1))", "scores.amax(-1)"),
)
_wrong(
    "online_softmax_update",
    "a row without keys subtracts -inf from -inf",
    ("m_new.masked_fill(m_new == -torch.inf, 0)", "m_new"),
)
_wrong(
    "online_softmax_update",
    "divided already: the output is normalised in every tile",
    (
        "acc * decay[..., None] + weights @ values.to(acc.dtype)",
        "(acc * decay[..., None] + weights @ values.to(acc.dtype)) / (l * decay + weights.sum(-1))[..., None]",
    ),
)

# ---- 15.3 FlashAttentionTorch ----------------------------------------------------------------------------------------
_wrong("FlashAttentionTorch", "scores not scaled by the root of the width", (" * q.shape[-1] ** -0.5", ""))
_wrong(
    "FlashAttentionTorch", "causal aligned to the first key", ("tile.start + k.shape[-2] - q.shape[-2]", "tile.start")
)
_wrong(
    "FlashAttentionTorch",
    "the logsumexp saved for base 2",
    ("q, k, v, out, lse)\n        return", "q, k, v, out, lse * 1.4426950408889634)\n        return"),
)
_wrong(
    "FlashAttentionTorch",
    "nothing but q, k and v saved: the backward pass has no logsumexp",
    ("q, k, v, out, lse)\n        return", "q, k, v)\n        return"),
)
_wrong(
    "FlashAttentionTorch",
    "the whole matrix of scores at once",
    ("for tile in tile_slices(q.shape[-2]):", "queries @ keys.mT\n            for tile in tile_slices(q.shape[-2]):"),
)
_wrong("FlashAttentionTorch", "causal ignored", ("if is_causal else None", "if False else None"))

_wrong(
    "FlashAttentionTorch",
    "autocast left on inside: it rounds the products of float32 inputs to 16 bits",
    ("with torch.autocast(q.device.type, enabled=False):", "with torch.no_grad():"),
)

# ---- 15.4 flash_backward ---------------------------------------------------------------------------------------------
_wrong("flash_backward", "the row sums of o * do are not subtracted", (" - delta[..., rows, None]", ""))
_wrong(
    "flash_backward",
    "the gradient of the queries lacks the scale of the scores",
    ("ks[..., cols, :] * scale", "ks[..., cols, :]"),
)
_wrong(
    "flash_backward",
    "the gradient of the keys lacks the scale of the scores",
    ("(ds.mT @ query)", "(ds.mT @ qs[..., rows, :])"),
)
_wrong(
    "flash_backward", "causal aligned to the first key", ("rows.start + ahead - cols.start", "rows.start - cols.start")
)
_wrong(
    "flash_backward",
    "the gradient of the values taken with ds instead of the weights",
    ("(p.mT @ grad)", "(ds.mT @ grad)"),
)

_wrong(
    "flash_backward",
    "scores hidden before the logsumexp is subtracted: in a row without keys that is -inf minus -inf, NaN",
    (
        "query @ ks[..., cols, :].mT - lses[..., rows, None]\n",
        "query @ ks[..., cols, :].mT\n",
    ),
    (
        "p = torch.exp(hide_later(exponent, rows.start + ahead - cols.start) if is_causal else exponent)",
        "p = torch.exp((hide_later(exponent, rows.start + ahead - cols.start) if is_causal else exponent)"
        " - lses[..., rows, None])",
    ),
)
_wrong(
    "flash_backward",
    "autocast left on inside: it rounds the products of float32 inputs to 16 bits",
    ("with torch.autocast(q.device.type, enabled=False):", "with torch.no_grad():"),
)

# ---- 15.5 flash_forward_kernel ---------------------------------------------------------------------------------------
_wrong("flash_forward_kernel", "causal aligned to the first key", ("<= rows[:, None] + S - T", "<= rows[:, None]"))
_wrong("flash_forward_kernel", "the logsumexp left in base 2", (" * LN2", ""))
_wrong("flash_forward_kernel", "exp2 of natural scores", ("(scale * LOG2E)", "scale"))
_wrong(
    "flash_forward_kernel",
    "tiles above the diagonal read and masked, not skipped",
    ("end = tl.minimum(S, tl.maximum(i * ROWS + ROWS + S - T, 0))", "end = S"),
)
_wrong(
    "flash_forward_kernel",
    "keys after the last one take part with score 0",
    ("seen = cols[None, :] < S", "seen = cols[None, :] >= 0"),
)
_wrong(
    "flash_forward_kernel",
    "the store of the output has no mask",
    ("to(o.dtype.element_ty), mask=inside", "to(o.dtype.element_ty)"),
)
_wrong(
    "flash_forward_kernel",
    "shared heads read one after the other instead of in groups",
    ("head // GROUP * S", "head % GROUP * S"),
)

_wrong(
    "flash_forward_kernel",
    "query heads dealt out in turn: the map is head // GROUP, not head modulo the heads of keys",
    ("head // GROUP * S", "head % (tl.num_programs(0) // GROUP) * S"),
)
_wrong(
    "flash_forward_kernel",
    "one loop in which every tile is masked, the whole ones too",
    ("tl.maximum(i * ROWS + S - T + 1, 0) // COLS * COLS)", "0)"),
)

# ---- 15.6 flash_backward_dq_kernel -----------------------------------------------------------------------------------
_wrong(
    "flash_backward_dq_kernel", "the natural logsumexp taken for one in base 2", ("other=0.0) * LOG2E", "other=0.0)")
)
_wrong("flash_backward_dq_kernel", "the scale of the scores is missing in the gradient", ("(acc * scale)", "acc"))
_wrong("flash_backward_dq_kernel", "the row sums are not subtracted", ("(dp - sums[:, None])", "dp"))
_wrong("flash_backward_dq_kernel", "the store of the row sums has no mask", ("sums, mask=rows < T", "sums"))
_wrong(
    "flash_backward_dq_kernel",
    "tiles above the diagonal read and masked, not skipped",
    ("end = tl.minimum(S, tl.maximum(i * ROWS + ROWS + S - T, 0))", "end = S"),
)

_wrong(
    "flash_backward_dq_kernel",
    "query heads dealt out in turn: the map is head // GROUP, not head modulo the heads of keys",
    ("head // GROUP * S", "head % (tl.num_programs(0) // GROUP) * S"),
)
_wrong(
    "flash_backward_dq_kernel",
    "scores hidden before the logsumexp is subtracted: in a row without keys that is -inf minus -inf, NaN",
    ("(scale * LOG2E) - lse2[:, None]", "(scale * LOG2E)"),
    ("tl.exp2(exponent)", "tl.exp2(exponent - lse2[:, None])"),
)

# ---- 15.7 flash_backward_dkdv_kernel ---------------------------------------------------------------------------------
_wrong(
    "flash_backward_dkdv_kernel",
    "only the first of the query heads that share the keys",
    ("tl.range(0, GROUP)", "tl.range(0, 1)"),
)
_wrong(
    "flash_backward_dkdv_kernel", "the gradient of the keys lacks the scale of the scores", ("(dkey * scale)", "dkey")
)
_wrong("flash_backward_dkdv_kernel", "the diagonal not compared: later keys are seen", ("if masked:", "if False:"))
_wrong(
    "flash_backward_dkdv_kernel",
    "queries before the tile's keys are read",
    ("first = tl.maximum(j * COLS + T - S, 0) // ROWS * ROWS", "first = 0"),
)
_wrong(
    "flash_backward_dkdv_kernel",
    "the gradient of the values taken with ds instead of the weights",
    ("weights.to(grad.dtype)", "(weights * (dp - sums[None, :])).to(grad.dtype)"),
)

_wrong(
    "flash_backward_dkdv_kernel",
    "query heads counted from the head of keys on: its own are head * GROUP to head * GROUP + GROUP - 1",
    ("h = head * GROUP + shared", "h = head + shared"),
)
_wrong(
    "flash_backward_dkdv_kernel",
    "scores hidden before the logsumexp is subtracted: in a row without keys that is -inf minus -inf, NaN",
    ("(scale * LOG2E) - lse2[None, :]", "(scale * LOG2E)"),
    ("tl.exp2(exponent)", "tl.exp2(exponent - lse2[None, :])"),
)

# ---- 15.8 FlashAttentionTriton ---------------------------------------------------------------------------------------
_wrong("FlashAttentionTriton", "causal not passed to the forward kernel", ("q, k, v, is_causal)", "q, k, v)"))
_wrong(
    "FlashAttentionTriton",
    "the gradients of keys and values exchanged",
    ("return dq, dk, dv, None", "return dq, dv, dk, None"),
)
_wrong(
    "FlashAttentionTriton",
    "the logsumexp handed on where the row sums belong",
    ("do, lse, delta, ctx", "do, lse, lse, ctx"),
)

# ---- 15.9 flash_attention --------------------------------------------------------------------------------------------
_wrong("flash_attention", "causal by default", ("is_causal: bool = False", "is_causal: bool = True"))
_wrong(
    "flash_attention",
    "under autocast the dtype of the inputs is kept",
    ("q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))", "pass"),
)
_wrong(
    "flash_attention",
    "float64 cast under autocast too: PyTorch's autocast leaves it alone",
    ("if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:", "if torch.is_autocast_enabled(kind):"),
)
_wrong(
    "flash_attention",
    "cut off from autograd: the result has no gradient",
    (
        "return FlashAttentionTorch.apply(q, k, v, is_causal)",
        "return FlashAttentionTorch.apply(q.detach(), k.detach(), v.detach(), is_causal)",
    ),
)
