"""What ``torch.autocast`` does to each operation, by the name that a ``TorchFunctionMode`` sees, formats by name,
and the dtype of a factor.

Transcribed from PyTorch's ``aten/src/ATen/autocast_mode.h``, for common operations only.
An operation in neither set runs in the dtypes of its inputs.
The lists of CUDA and of the CPU differ: on the CPU, softmax, norms and sums stay narrow.
"""

import torch

FORMATS: dict[str, tuple[int, int, bool]] = {
    "float32": (8, 23, True),
    "TF32": (8, 10, True),
    "float16": (5, 10, True),
    "bfloat16": (8, 7, True),
    "float8_e5m2": (5, 2, True),
    "float8_e4m3fn": (4, 3, False),
}
"""Bits of the exponent, bits of the mantissa, and whether the format has infinities."""

_CONVOLUTIONS = {f"conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)}
_LOSSES = {
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
    *("binary_cross_entropy_with_logits", "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "poisson_nll_loss", "soft_margin_loss", "triplet_margin_loss"),
}

PRODUCTS: frozenset[str] = frozenset(
    {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "linear", "einsum", "scaled_dot_product_attention"}
    | {"addmm", "addbmm", "baddbmm", "multi_dot", "vecdot", "multi_head_attention_forward"}
    | _CONVOLUTIONS
)
"""Operations that run in the low precision."""

_CUDA = {
    *("softmax", "log_softmax", "softmin", "logsumexp", "layer_norm", "group_norm"),
    *("sum", "prod", "cumsum", "cumprod", "norm", "vector_norm", "normalize", "renorm"),
    *("dist", "cdist", "pdist", "cosine_similarity"),
    *("exp", "expm1", "log", "log10", "log2", "log1p", "pow", "__pow__", "__rpow__", "reciprocal", "rsqrt"),
    *("softplus", "acos", "asin", "cosh", "sinh", "tan", "erfinv"),
}

REDUCTIONS: dict[str, frozenset[str]] = {
    "cuda": frozenset(_CUDA | _LOSSES),
    "cpu": frozenset({"prod", "cdist", "trace", "quantile", "nanquantile", "avg_pool3d", "ctc_loss"} | _LOSSES),
}
"""Operations that run in float32, by type of device."""


def factor_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which ``x`` enters a product: autocast's dtype under ``torch.autocast``, except for float64;
    else its own.
    """
    kind = x.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return x.dtype
    return torch.get_autocast_dtype(kind) if x.is_floating_point() and x.dtype != torch.float64 else x.dtype
