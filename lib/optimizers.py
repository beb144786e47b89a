"""Beyond AdamW: what is a step's length, which direction is the steepest, and what does each answer cost?"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Float64, UInt8
from torch import Tensor, nn

from lib.given.optim import KELLER_JORDAN, ByParameter, Coefficients, triples


def steepest_direction(gradient: Float[Tensor, "r c"], norm: str) -> Float[Tensor, "r c"]:
    """The matrix D of norm at most 1 along which a loss rises fastest: sum(gradient * D) is largest. (Exercise 25.1)

    Size: 25 minutes, difficulty 3, core.

    Args:
        gradient: A matrix G in any floating dtype and of any magnitude; left unchanged.
        norm: "frobenius" (root of the sum of squares), "max" (largest magnitude of an element), or "spectral" (largest
            singular value).

    Returns:
        - "frobenius": G over its norm.
        - "max": the sign of each element, with sign(0) = 0.
        - "spectral": ``U_r V_r^T``, in which singular values up to ``max(R, C) * eps * s_max`` count as 0; eps is that
          of the dtype in which they are computed.

        Zeros give zeros. Computed in float32 at least, and returned in the gradient's dtype.

    Raises:
        ValueError: another ``norm``; the message shows it.

    Source: Bernstein and Newhouse (arXiv:2409.20325), section 1 and appendix.
    """
    raise NotImplementedError("Exercise 25.1: write steepest_direction")


class Lion(ByParameter):
    """Steps of one length for every weight: the sign of a mean of gradients. (Exercise 25.2)

    Size: 20 minutes, difficulty 2, core.

    Args:
        params: Parameters, or groups: dicts with "params" and the settings that differ from the defaults.
        lr: Learning rate: how far a weight moves in a step.
        betas: b1, the share of the old mean in the direction; b2, the share of it that the state keeps.
        weight_decay: Times ``lr``, the fraction of a weight that each step removes.

    Attributes:
        state: For each parameter that has had a gradient: "exp_avg" (m), in its dtype, and nothing else.

    Raises:
        ValueError: a negative ``lr`` or ``weight_decay``, or a beta outside [0, 1). ``ByParameter`` checks them.

    Source: Chen and others (arXiv:2302.06675), algorithm 2. First decay, then step, then the state.
    """

    def __init__(self, params, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError("Exercise 25.2: write Lion.update")


class Adafactor(ByParameter):
    """Adam's second moment from the means of its rows and columns, without momentum. (Exercise 25.3)

    Size: 45 minutes, difficulty 4, core.

    Args:
        params: Parameters, or groups: dicts with "params" and the settings that differ from the defaults.
        lr: Upper limit of the relative step; also multiplies ``weight_decay``.
        beta2_decay: At step t, from 1, the new squares have the share ``t**beta2_decay`` in the means.
        eps: Smallest root of a mean square (None: the epsilon of the parameter's dtype); smallest size of a parameter.
        d: Largest root mean square of an update, before it is multiplied by the rate.
        weight_decay: Times ``lr``, the fraction of a weight that each step removes.

    Attributes:
        state: For each parameter that has had a gradient: "step", a float32 scalar tensor, and in the parameter's dtype
            "row_var" ``[..., R, 1]`` and "col_var" ``[..., 1, C]`` for two or more dimensions, else "variance".
            PyTorch's ``Adafactor`` can load it.

    A step:

    1. The rate is ``max(eps[1], rms(w)) * min(lr, t**-0.5)``. Then w decays.
    2. The means of the squared gradient, of rows over C and of columns over R, take in the new ones.
    3. The second moment of a matrix is ``row_var @ col_var`` over the mean of ``row_var`` (at least ``eps[0]``).
    4. The update is the gradient over the moment's root (at least ``eps[0]``), divided by ``max(1, rms(update) / d)``.

    Raises:
        ValueError: a negative ``lr``, ``eps`` or ``weight_decay``, ``beta2_decay`` above 0 or ``d`` below 1.
            ``ByParameter`` checks them.

    Source: Shazeer and Stern (arXiv:1804.04235), algorithms 4 and 5, as in ``torch.optim.Adafactor``.
    Convention: the paper adds ``eps[0]`` to the squares; PyTorch uses it as the smallest value of what is divided by.
    """

    def __init__(
        self, params, lr: float = 1e-2, beta2_decay: float = -0.8, eps=(None, 1e-3), d: float = 1.0, weight_decay=0.0
    ):
        super().__init__(params, lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError("Exercise 25.3: write Adafactor.update")


def quantize_blockwise(
    x: Float[Tensor, "..."], signed: bool = True, block_size: int = 256
) -> tuple[UInt8[Tensor, "..."], Float32[Tensor, " n"]]:
    """Round a tensor to one byte an element, with one scale for each block. (Exercise 25.4)

    Size: 35 minutes, difficulty 3, core.

    Args:
        x: Any shape and floating dtype.
            Its elements, in row-major order, are cut into blocks; the last one may be shorter.
        signed: Whether the code has negative values.
        block_size: Elements in a block.

    The code has 256 ascending float32 values: 0, 1 and, for i from 0 to 6, ``10**(i - 6)`` times the midpoints of
    ``2**i`` equal parts of [0.1, 1], each with both signs.
    Unsigned, it has ``2**(i + 1)`` parts, without signs.
    Whether an element is above the middle between two values is decided in float64.

    Returns:
        - q ``[...]``: for each element, the index of the nearest value (of two, the lower) to x over its block's
          ``absmax``.
        - absmax ``[n]``: the largest magnitude of each block.

        Zeros stay zeros, in a block of nothing else too.

    Source: Dettmers and others (arXiv:2110.02861), sections 2.1 and 2.2; the code is that of bitsandbytes.
    """
    raise NotImplementedError("Exercise 25.4: write quantize_blockwise")


def dequantize_blockwise(
    q: UInt8[Tensor, "..."], absmax: Float32[Tensor, " n"], signed: bool = True, block_size: int = 256
) -> Float32[Tensor, "..."]:
    """The numbers that bytes and scales stand for. (Exercise 25.5)

    Size: 10 minutes, difficulty 2, core.

    Args:
        q, absmax: What ``quantize_blockwise`` returned for the same ``signed`` and ``block_size``.
        signed: Whether the code has negative values.
        block_size: Elements in a block.

    Returns:
        The code's value times the block's ``absmax``, in the shape of q.
    """
    raise NotImplementedError("Exercise 25.5: write dequantize_blockwise")


class AdamW8bit(ByParameter):
    """AdamW whose two moments are kept in one byte an element. (Exercise 25.6)

    Size: 40 minutes, difficulty 4, core.

    Args:
        params: Parameters, or groups: dicts with "params" and the settings that differ from the defaults.
        lr, betas, eps, weight_decay: Chapter 7's settings.
        block_size: Elements that share a scale.
        min_size: Parameters with fewer elements keep float32 moments.

    Attributes:
        state: For each parameter that has had a gradient: "step", "exp_avg" (signed) and "exp_avg_sq" (unsigned).
            Where these are bytes, "absmax" and "absmax_sq" are their scales.

    A step is chapter 7's, in float32: dequantize, take in the gradient, update the weight from the moments as they are
    now, and only then round them. A second moment above 0 never becomes code 0, but the next one.

    Raises:
        ValueError: a negative ``lr``, ``eps`` or ``weight_decay``, or a beta outside [0, 1).
            ``ByParameter`` checks them.

    Source: Dettmers and others (arXiv:2110.02861), section 2.
    """

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, block_size: int = 256, min_size=4096
    ):
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, **settings, block_size=block_size, min_size=min_size)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError("Exercise 25.6: write AdamW8bit.update")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the settings and the states, which keep their dtypes:
        PyTorch's own turns bytes into the parameter's dtype."""
        raise NotImplementedError("Exercise 25.6: write AdamW8bit.load_state_dict")


def newton_schulz(
    G: Float[Tensor, "... r c"],
    steps: int = 5,
    coefficients: Coefficients = KELLER_JORDAN,
    eps: float = 1e-7,
    dtype: torch.dtype | None = torch.bfloat16,
) -> Float[Tensor, "... r c"]:
    """A matrix with nearly the same singular vectors, and singular values near 1, by matrix products alone. (Exercise 25.7)

    Size: 30 minutes, difficulty 3, core.

    Args:
        G: Matrices; each is treated alone. Left unchanged.
        steps: How often the polynomial is applied.
        coefficients: a, b and c, or a list with one such triple a step, of which the first ones are used.
        eps: Smallest norm by which G is divided.
        dtype: In which everything is computed and returned; None: that of G.

    Returns:
        ``X = G / max(|G|, eps)`` with the Frobenius norm, then ``steps`` times ``A = X X^T``,
        ``X = a X + (b A + c A A) X``. A tall matrix (R > C) is transposed first, and back at the end.

    Raises:
        ValueError: fewer than two dimensions; the message shows the shape.
            A list with fewer triples than ``steps``; the message names ``steps`` (``triples`` raises it).

    Source: Jordan and others (https://kellerjordan.github.io/posts/muon/); Kovarik (1970), Bjorck and Bowie (1971).
    Cost: ``steps * (4 s^2 l + 2 s^3)`` FLOPs, where s is the short side and l the long one.
    """
    raise NotImplementedError("Exercise 25.7: write newton_schulz")


def singular_values_after(
    s: Float[Tensor, "... k"], steps: int = 5, coefficients: Coefficients = KELLER_JORDAN
) -> Float64[Tensor, "... k"]:
    """What ``newton_schulz`` makes of singular values, without a matrix. (Exercise 25.8)

    Size: 10 minutes, difficulty 2, core.

    Args:
        s: All singular values of a matrix, in any order, or of several matrices; left unchanged.
        steps: How often the polynomial is applied.
        coefficients: As for ``newton_schulz``, with the same error.

    Returns:
        In float64 and in the order of s: s over the root of the sum of its squares, then ``steps`` times
        ``a s + b s^3 + c s^5``. Zeros give zeros.
    """
    raise NotImplementedError("Exercise 25.8: write singular_values_after")


def newton_schulz_flops(shape: Sequence[int], steps: int = 5) -> int:
    """FLOPs of the products in ``newton_schulz``, as ``FlopCounterMode`` counts them. (Exercise 25.9)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        shape: Two or more dimensions; the last two are a matrix.
        steps: Steps of the iteration.

    Returns:
        An exact integer; a multiplication and an addition are two FLOPs.

    Raises:
        ValueError: fewer than two dimensions; the message shows the shape.
    """
    raise NotImplementedError("Exercise 25.9: write newton_schulz_flops")


class Muon(ByParameter):
    """Momentum, orthogonalized: every direction of a matrix gets a step of the same length. (Exercise 25.10)

    Size: 45 minutes, difficulty 4, core.

    Args:
        params: Parameters of two or more dimensions, or groups of them.
            Two are a matrix and three are a batch of matrices (experts); more are one matrix ``[first, rest]``
            (convolutions).
        lr: Learning rate.
        weight_decay: Times ``lr``, the fraction of a weight that each step removes.
        momentum: Share of the old mean that the state keeps.
        nesterov: Whether the new gradient is mixed with the mean once more: ``momentum * m + (1 - momentum) * g``.
        ns_coefficients, eps, ns_steps, ns_dtype: Settings of ``newton_schulz``.
        adjust_lr_fn: The scale of the step. None or "original": ``sqrt(max(1, R / C))``. "match_rms_adamw":
            ``0.2 sqrt(max(R, C))``, after which a step is about as long as AdamW's.
        cautious: Whether only the weights decay for which ``o * w >= 0``, with w as it was before the step.

    Attributes:
        state: For each parameter that has had a gradient: "momentum_buffer", in its dtype.

    Raises:
        ValueError: fewer than two dimensions, in ``add_param_group`` too; the message shows the shape.
            A negative ``lr``, ``eps`` or ``weight_decay``, a momentum outside [0, 1), or another ``adjust_lr_fn``
            (``ByParameter`` checks these).

    Source: Jordan and others, 2024; Liu and others (arXiv:2502.16982), section 2.2; cautious: arXiv:2510.12402.
    Convention: the mean has weights that sum to 1, as in ``torch.optim.Muon``; some programs sum.
    The decay isn't scaled.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = KELLER_JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        cautious: bool = False,
        ns_dtype: torch.dtype | None = torch.bfloat16,
    ):
        settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        settings |= {"eps": eps, "ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "ns_dtype": ns_dtype}
        super().__init__(params, **settings, adjust_lr_fn=adjust_lr_fn, cautious=cautious)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, if all of its parameters have two or more dimensions. ``Optimizer.__init__`` calls this too."""
        raise NotImplementedError("Exercise 25.10: write Muon.add_param_group")

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError("Exercise 25.10: write Muon.update")


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Which parameters Muon trains, and which are left to AdamW. (Exercise 25.11)

    Size: 20 minutes, difficulty 3, core.

    Args:
        model: Any module; a weight that is used in two places is one parameter.

    Returns:
        Two lists in the model's order, without frozen parameters. To Muon: two or more dimensions, inside an
        ``nn.ModuleList`` of the model, and in no ``nn.Embedding`` (a weight that is tied to one is in it).
        To AdamW: all others, so embeddings, head, positions, stem, norms and biases.
    """

    raise NotImplementedError("Exercise 25.11: write split_parameters")


def optimizer_state_bytes(shapes: Sequence[Sequence[int]], optimizer: str) -> int:
    """Bytes that an optimizer keeps between two steps. (Exercise 25.12)

    Size: 25 minutes, difficulty 3, core.

    Args:
        shapes: Shapes of the parameters; n is the number of a parameter's elements.
        optimizer: Where nothing else is said, states are float32; counters are left out.
            - "adamw": two moments. "lion": one mean.
            - "adafactor": the means of rows and columns of the last two dimensions; of a vector, one value an element.
            - "adamw8bit": two bytes an element and two scales for each 256 elements; below 4,096 elements, as "adamw".
            - "muon": the momentum.
            - "shampoo": two statistics, ``[R, R]`` and ``[C, C]``.
            - "soap": two moments, two statistics and two bases.

            The last three leave fewer than two dimensions to AdamW, and see three and more as ``Muon`` does.

    Returns:
        An exact integer.

    Raises:
        ValueError: another ``optimizer``; the message shows it.
    """
    raise NotImplementedError("Exercise 25.12: write optimizer_state_bytes")


def assign_owners(shapes: Sequence[Sequence[int]], n_ranks: int, steps: int = 5) -> list[int]:
    """Which rank orthogonalizes each matrix, so that all have about the same work. (Exercise 25.13)

    Size: 15 minutes, difficulty 2, core.

    Args:
        shapes: Shapes of the matrices.
        n_ranks: Number of ranks.
        steps: Steps of ``newton_schulz``.

    Returns:
        The owner of each matrix, in the order of ``shapes``. Go from the most ``newton_schulz_flops`` to the fewest (of
        equals, the earlier first), and give each to the rank with the fewest so far (of equals, the lowest).
    """
    raise NotImplementedError("Exercise 25.13: write assign_owners")


class ShardedMuon(ByParameter):
    """Muon on matrices whose rows are divided among ranks. (Exercise 25.14)

    Size: 60 minutes, difficulty 5, core.

    Args:
        params: This rank's parts of the matrices. Of R rows, rank r has r c to (r + 1) c with c = ceil(R / ranks), as
            ``fully_shard`` cuts; the last ranks may have fewer or none. Their gradients are the parts of the averaged
            gradients: None on all ranks, or on none.
        shapes: Shapes of the whole matrices, two dimensions each.
        lr, weight_decay, momentum, nesterov: As in ``Muon``.
        ns_coefficients, eps, ns_steps, ns_dtype: As in ``Muon``.
        adjust_lr_fn, cautious: As in ``Muon``.
        group: The process group; None: all ranks.

    Attributes:
        state: For each parameter that has had a gradient: "momentum_buffer", with this rank's rows.

    A step:

    1. Each rank updates the momentum of its rows, and sends its part of u, in ``ns_dtype``, to the matrix's owner. The
       owners are those of ``assign_owners`` for the matrices that have a gradient.
    2. The owners run ``newton_schulz`` on whole matrices, and send every rank its rows of o, in ``ns_dtype``.
    3. Each rank updates its rows, with the scale of the whole matrix.

    Raises:
        ValueError: a part has another shape than its rows should have (the message shows both), there is another number
            of shapes than of parameters, a second group is added, or a setting that ``Muon`` refuses.

    Cost: two ``all_to_all_single`` a step for all matrices together, uneven and unpadded; each matrix is multiplied on
    one rank.
    """

    def __init__(
        self,
        params,
        shapes: Sequence[Sequence[int]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = KELLER_JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        cautious: bool = False,
        ns_dtype: torch.dtype | None = torch.bfloat16,
        group=None,
    ):
        settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        settings |= {"eps": eps, "ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "ns_dtype": ns_dtype}
        self.group, self.shapes = group, [tuple(shape) for shape in shapes]
        super().__init__(params, **settings, adjust_lr_fn=adjust_lr_fn, cautious=cautious)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the only group, after its parts are compared with ``shapes``. ``Optimizer.__init__`` calls this."""
        raise NotImplementedError("Exercise 25.14: write ShardedMuon.add_param_group")

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update this rank's parts of all matrices that have a gradient."""
        raise NotImplementedError("Exercise 25.14: write ShardedMuon.update_group")
