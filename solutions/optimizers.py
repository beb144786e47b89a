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
    """The matrix D of norm at most 1 along which a loss rises fastest: sum(gradient * D) is largest. (Exercise)

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
    ### BEGIN SOLUTION
    if norm not in ("frobenius", "max", "spectral"):
        raise ValueError(f"norm = {norm!r}: expected 'frobenius', 'max' or 'spectral'")
    wide = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
    if norm == "max" or not wide.any():
        return wide.sign().to(gradient.dtype)
    wide = wide / wide.abs().max()  # so that no square is lost
    if norm == "frobenius":
        return (wide / torch.linalg.matrix_norm(wide)).to(gradient.dtype)
    u, s, vt = torch.linalg.svd(wide, full_matrices=False)
    kept = s > max(wide.shape) * torch.finfo(wide.dtype).eps * s.max()
    return (u[:, kept] @ vt[kept]).to(gradient.dtype)
    ### END SOLUTION


class Lion(ByParameter):
    """Steps of one length for every weight: the sign of a mean of gradients. (Exercise)

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
        ### BEGIN SOLUTION
        mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
        beta1, beta2 = group["betas"]
        direction = (beta1 * mean + (1 - beta1) * gradient).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        mean.mul_(beta2).add_(gradient, alpha=1 - beta2)
        ### END SOLUTION


class Adafactor(ByParameter):
    """Adam's second moment from the means of its rows and columns, without momentum. (Exercise)

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
        ### BEGIN SOLUTION
        eps1, eps2 = group["eps"]
        eps1 = torch.finfo(parameter.dtype).eps if eps1 is None else eps1
        step = state.setdefault("step", torch.zeros((), dtype=torch.float32)).add_(1).item()
        rate = max(eps2, _rms(parameter)) * min(group["lr"], step**-0.5)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        update = _second_moment(gradient, state, step ** group["beta2_decay"], eps1).clamp_(min=eps1**2).rsqrt_()
        update.mul_(gradient)
        parameter.add_(update, alpha=-rate / max(1.0, _rms(update) / group["d"]))
        ### END SOLUTION


### BEGIN SOLUTION
def _rms(x: Tensor) -> float:
    return x.norm(2).item() / math.sqrt(x.numel())


def _second_moment(gradient: Tensor, state: dict[str, Any], share: float, eps: float) -> Tensor:
    """The estimate of the mean squared gradient, after ``state`` has taken in the new gradient."""
    if gradient.ndim < 2:
        return state.setdefault("variance", torch.zeros_like(gradient)).lerp_(gradient.square(), share).clone()
    for name, dim in (("row_var", -1), ("col_var", -2)):
        mean = gradient.norm(dim=dim, keepdim=True).square().div_(gradient.shape[dim])
        state.setdefault(name, torch.zeros_like(mean)).lerp_(mean, share)
    return (state["row_var"] @ state["col_var"]).div_(state["row_var"].mean(-2, keepdim=True).clamp_(min=eps))


def _code(signed: bool, device: torch.device) -> Float64[Tensor, "256"]:
    """The 256 ascending values of the dynamic code; float32 values, held in float64."""
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for i in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (i + (not signed)) + 1, dtype=torch.float64)
        middles = 10.0 ** (i - 6) * (ends[1:] + ends[:-1]) / 2
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values.float().double().to(device)


### END SOLUTION


def quantize_blockwise(
    x: Float[Tensor, "..."], signed: bool = True, block_size: int = 256
) -> tuple[UInt8[Tensor, "..."], Float32[Tensor, " n"]]:
    """Round a tensor to one byte an element, with one scale for each block. (Exercise)

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
    ### BEGIN SOLUTION
    row = x.detach().float().reshape(-1)
    n_blocks = -(-len(row) // block_size)
    blocks = nn.functional.pad(row, (0, n_blocks * block_size - len(row))).view(n_blocks, block_size)
    absmax = blocks.abs().amax(1)
    code = _code(signed, x.device)
    between = (code[1:] + code[:-1]) / 2
    q = torch.bucketize((blocks / torch.where(absmax > 0, absmax, 1.0)[:, None]).double(), between)
    return q.to(torch.uint8).view(-1)[: len(row)].reshape(x.shape), absmax
    ### END SOLUTION


def dequantize_blockwise(
    q: UInt8[Tensor, "..."], absmax: Float32[Tensor, " n"], signed: bool = True, block_size: int = 256
) -> Float32[Tensor, "..."]:
    """The numbers that bytes and scales stand for. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        q, absmax: What ``quantize_blockwise`` returned for the same ``signed`` and ``block_size``.
        signed: Whether the code has negative values.
        block_size: Elements in a block.

    Returns:
        The code's value times the block's ``absmax``, in the shape of q.
    """
    ### BEGIN SOLUTION
    scales = absmax.repeat_interleave(block_size)[: q.numel()].view(q.shape)
    return _code(signed, q.device).float()[q.long()] * scales
    ### END SOLUTION


class AdamW8bit(ByParameter):
    """AdamW whose two moments are kept in one byte an element. (Exercise)

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
        ### BEGIN SOLUTION
        (beta1, beta2), block, wide = group["betas"], group["block_size"], gradient.float()
        step = state["step"] = int(state.get("step", 0)) + 1
        in_bytes = parameter.numel() >= group["min_size"]
        if step == 1:
            mean, square = torch.zeros_like(wide), torch.zeros_like(wide)
        elif in_bytes:
            mean = dequantize_blockwise(state["exp_avg"], state["absmax"], True, block)
            square = dequantize_blockwise(state["exp_avg_sq"], state["absmax_sq"], False, block)
        else:
            mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(wide, 1 - beta1)
        square.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
        root = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
        weight = parameter.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.copy_(weight.add_(mean / root, alpha=-group["lr"] / (1 - beta1**step)))
        state |= {"exp_avg": mean, "exp_avg_sq": square}
        if in_bytes:
            state["exp_avg"], state["absmax"] = quantize_blockwise(mean, True, block)
            q, state["absmax_sq"] = quantize_blockwise(square, False, block)
            state["exp_avg_sq"] = torch.where((q == 0) & (square > 0), 1, q).to(torch.uint8)
        ### END SOLUTION

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the settings and the states, which keep their dtypes:
        PyTorch's own turns bytes into the parameter's dtype."""
        ### BEGIN SOLUTION
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, parameter in zip(ids, parameters, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                kept = value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                self.state[parameter][name] = kept
        ### END SOLUTION


def newton_schulz(
    G: Float[Tensor, "... r c"],
    steps: int = 5,
    coefficients: Coefficients = KELLER_JORDAN,
    eps: float = 1e-7,
    dtype: torch.dtype | None = torch.bfloat16,
) -> Float[Tensor, "... r c"]:
    """A matrix with nearly the same singular vectors, and singular values near 1, by matrix products alone. (Exercise)

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
    ### BEGIN SOLUTION
    if G.ndim < 2:
        raise ValueError(f"G has the shape {tuple(G.shape)}: expected two or more dimensions")
    X = G.to(dtype or G.dtype).reshape(math.prod(G.shape[:-2]), *G.shape[-2:])
    is_tall = G.shape[-2] > G.shape[-1]
    X = X.mT if is_tall else X
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=eps)
    for a, b, c in triples(coefficients, steps):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)
    return (X.mT if is_tall else X).reshape(G.shape)
    ### END SOLUTION


def singular_values_after(
    s: Float[Tensor, "... k"], steps: int = 5, coefficients: Coefficients = KELLER_JORDAN
) -> Float64[Tensor, "... k"]:
    """What ``newton_schulz`` makes of singular values, without a matrix. (Exercise)

    Size: 10 minutes, difficulty 2, core.

    Args:
        s: All singular values of a matrix, in any order, or of several matrices; left unchanged.
        steps: How often the polynomial is applied.
        coefficients: As for ``newton_schulz``, with the same error.

    Returns:
        In float64 and in the order of s: s over the root of the sum of its squares, then ``steps`` times
        ``a s + b s^3 + c s^5``. Zeros give zeros.
    """
    ### BEGIN SOLUTION
    s = torch.as_tensor(s).detach().double()
    s = s / s.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)
    for a, b, c in triples(coefficients, steps):
        s = a * s + b * s**3 + c * s**5
    return s
    ### END SOLUTION


def newton_schulz_flops(shape: Sequence[int], steps: int = 5) -> int:
    """FLOPs of the products in ``newton_schulz``, as ``FlopCounterMode`` counts them. (Exercise)

    Size: 10 minutes, difficulty 2, warm-up.

    Args:
        shape: Two or more dimensions; the last two are a matrix.
        steps: Steps of the iteration.

    Returns:
        An exact integer; a multiplication and an addition are two FLOPs.

    Raises:
        ValueError: fewer than two dimensions; the message shows the shape.
    """
    ### BEGIN SOLUTION
    if len(shape) < 2:
        raise ValueError(f"the shape {tuple(shape)} has no matrix: expected two or more dimensions")
    short, long = sorted(shape[-2:])
    return math.prod(shape[:-2]) * steps * (4 * short**2 * long + 2 * short**3)
    ### END SOLUTION


class Muon(ByParameter):
    """Momentum, orthogonalized: every direction of a matrix gets a step of the same length. (Exercise)

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
        ### BEGIN SOLUTION
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        for parameter in params:
            tensor = parameter[-1] if isinstance(parameter, tuple) else parameter  # names may stand beside them
            if tensor.ndim < 2:
                raise ValueError(f"a parameter has the shape {tuple(tensor.shape)}: Muon takes two or more dimensions")
        super().add_param_group({**param_group, "params": params})
        ### END SOLUTION

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        ### BEGIN SOLUTION
        direction = _momentum(parameter, gradient, state, group)
        matrix = direction.flatten(1) if direction.ndim > 3 else direction
        _move(parameter, _orthogonal(matrix, group).reshape(parameter.shape), matrix.shape, group)
        ### END SOLUTION


### BEGIN SOLUTION
def _momentum(parameter: Tensor, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Take the gradient into the momentum, and return the direction that is orthogonalized."""
    mean = state.setdefault("momentum_buffer", torch.zeros_like(parameter)).lerp_(gradient, 1 - group["momentum"])
    return gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean


def _orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    return newton_schulz(matrix, group["ns_steps"], group["ns_coefficients"], group["eps"], group["ns_dtype"])


def _move(parameter: Tensor, o: Tensor, shape: Sequence[int], group: dict[str, Any]) -> None:
    """Decay the weights, then step; ``shape`` is that of the whole matrix, of which ``parameter`` may be a part."""
    rows, columns = shape[-2:]
    match_rms = group["adjust_lr_fn"] == "match_rms_adamw"
    scale = 0.2 * math.sqrt(max(rows, columns)) if match_rms else math.sqrt(max(1, rows / columns))
    kept = 1 - group["lr"] * group["weight_decay"]
    parameter.mul_(torch.where(o * parameter >= 0, kept, 1.0).to(parameter.dtype) if group["cautious"] else kept)
    parameter.add_(o, alpha=-group["lr"] * scale)


### END SOLUTION


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Which parameters Muon trains, and which are left to AdamW. (Exercise)

    Size: 20 minutes, difficulty 3, core.

    Args:
        model: Any module; a weight that is used in two places is one parameter.

    Returns:
        Two lists in the model's order, without frozen parameters. To Muon: two or more dimensions, inside an
        ``nn.ModuleList`` of the model, and in no ``nn.Embedding`` (a weight that is tied to one is in it).
        To AdamW: all others, so embeddings, head, positions, stem, norms and biases.
    """

    ### BEGIN SOLUTION
    def within(kind: type[nn.Module]) -> set[int]:
        return {id(p) for module in model.modules() if isinstance(module, kind) for p in module.parameters()}

    hidden = within(nn.ModuleList) - within(nn.Embedding)
    trained = [p for p in model.parameters() if p.requires_grad]
    to_muon = {id(p) for p in trained if p.ndim >= 2 and id(p) in hidden}
    return [p for p in trained if id(p) in to_muon], [p for p in trained if id(p) not in to_muon]
    ### END SOLUTION


def optimizer_state_bytes(shapes: Sequence[Sequence[int]], optimizer: str) -> int:
    """Bytes that an optimizer keeps between two steps. (Exercise)

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
    ### BEGIN SOLUTION
    names = ("adamw", "lion", "adafactor", "adamw8bit", "muon", "shampoo", "soap")
    if optimizer not in names:
        raise ValueError(f"optimizer = {optimizer!r}: expected one of {', '.join(names)}")
    return sum(_state_bytes(tuple(shape), optimizer) for shape in shapes)
    ### END SOLUTION


### BEGIN SOLUTION
def _state_bytes(shape: tuple[int, ...], optimizer: str) -> int:
    n = math.prod(shape)
    if optimizer == "adamw8bit" and n >= 4096:
        return 2 * n + 8 * -(-n // 256)
    if optimizer == "adafactor" and len(shape) >= 2:
        return 4 * math.prod(shape[:-2]) * (shape[-2] + shape[-1])
    if optimizer in ("lion", "adafactor"):
        return 4 * n
    if optimizer in ("adamw", "adamw8bit") or len(shape) < 2:
        return 8 * n
    rows, columns = shape[-2:] if len(shape) == 3 else (shape[0], math.prod(shape[1:]))
    squares = (shape[0] if len(shape) == 3 else 1) * (rows**2 + columns**2)
    return {"muon": 4 * n, "shampoo": 4 * squares, "soap": 8 * n + 8 * squares}[optimizer]


### END SOLUTION


def assign_owners(shapes: Sequence[Sequence[int]], n_ranks: int, steps: int = 5) -> list[int]:
    """Which rank orthogonalizes each matrix, so that all have about the same work. (Exercise)

    Size: 15 minutes, difficulty 2, core.

    Args:
        shapes: Shapes of the matrices.
        n_ranks: Number of ranks.
        steps: Steps of ``newton_schulz``.

    Returns:
        The owner of each matrix, in the order of ``shapes``. Go from the most ``newton_schulz_flops`` to the fewest (of
        equals, the earlier first), and give each to the rank with the fewest so far (of equals, the lowest).
    """
    ### BEGIN SOLUTION
    flops = [newton_schulz_flops(shape, steps) for shape in shapes]
    owners, load = [0] * len(flops), [0] * n_ranks
    for i in sorted(range(len(flops)), key=lambda i: -flops[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += flops[i]
    return owners
    ### END SOLUTION


class ShardedMuon(ByParameter):
    """Muon on matrices whose rows are divided among ranks. (Exercise)

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
        ### BEGIN SOLUTION
        if self.param_groups:
            raise ValueError("ShardedMuon has one parameter group: the shapes belong to it")
        super().add_param_group(param_group)
        parts, rank = self.param_groups[0]["params"], dist.get_rank(self.group)
        if len(parts) != len(self.shapes):
            raise ValueError(f"{len(parts)} parameters, but {len(self.shapes)} shapes")
        for part, shape in zip(parts, self.shapes, strict=True):
            expected = (_rows_of(shape, dist.get_world_size(self.group))[rank], *shape[1:])
            if len(shape) != 2 or part.shape != expected:
                raise ValueError(
                    f"rank {rank}'s part of {shape} has the shape {tuple(part.shape)}, expected {expected}"
                )
        ### END SOLUTION

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update this rank's parts of all matrices that have a gradient."""
        ### BEGIN SOLUTION
        if not parameters:
            return
        ranks, rank = range(dist.get_world_size(self.group)), dist.get_rank(self.group)
        whole = dict(zip(group["params"], self.shapes, strict=True))
        shapes = [whole[p] for p in parameters]
        rows = [_rows_of(shape, len(ranks)) for shape in shapes]
        owners = assign_owners(shapes, len(ranks), group["ns_steps"])
        there = sorted(range(len(shapes)), key=owners.__getitem__)  # this rank's rows of all matrices, by owner
        here = [(i, r) for r in ranks for i in there if owners[i] == rank]  # everyone's rows of this rank's matrices
        peers = [owners[i] for i in there], [r for _, r in here]
        sizes = [(rows[i][rank], shapes[i][1]) for i in there], [(rows[i][r], shapes[i][1]) for i, r in here]
        u = [_momentum(p, p.grad, self.state[p], group).to(group["ns_dtype"] or p.dtype) for p in parameters]
        empty = u[0].new_empty(0, dtype=functools.reduce(torch.promote_types, [part.dtype for part in u]))
        parts = dict(zip(here, _exchange([u[i] for i in there], *peers, sizes[1], empty, self.group), strict=True))
        o = {}
        for i in [i for i, r in here if r == 0]:
            matrix = torch.cat([parts[i, r] for r in ranks]).to(u[i].dtype)
            o[i] = _orthogonal(matrix, group).split(rows[i])
        back = _exchange([o[i][r] for i, r in here], *peers[::-1], sizes[0], empty, self.group)
        for i, part in zip(there, back, strict=True):
            _move(parameters[i], part, shapes[i], group)
        ### END SOLUTION


### BEGIN SOLUTION
def _rows_of(shape: Sequence[int], n_ranks: int) -> list[int]:
    """How many rows of a matrix each rank has."""
    size = -(-shape[0] // n_ranks)
    return [max(0, min(size, shape[0] - rank * size)) for rank in range(n_ranks)]


def _exchange(tensors: list[Tensor], to: list[int], source: list[int], shapes: list[tuple], empty: Tensor, group):
    """Send each tensor to a rank, in the order of ranks; return those of the given shapes that each source sent."""
    n = dist.get_world_size(group)
    lengths = [math.prod(shape) for shape in shapes]
    sent = torch.cat([empty, *(tensor.reshape(-1) for tensor in tensors)])
    out = sent.new_empty(sum(lengths))
    outgoing = [sum(t.numel() for t, peer in zip(tensors, to, strict=True) if peer == r) for r in range(n)]
    incoming = [sum(length for length, peer in zip(lengths, source, strict=True) if peer == r) for r in range(n)]
    dist.all_to_all_single(out, sent, incoming, outgoing, group=group)
    return [part.view(shape) for part, shape in zip(out.split(lengths), shapes, strict=True)]


### END SOLUTION
