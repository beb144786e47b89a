"""What goes wrong when people route tokens to experts. The kernel takes its fault as one constant more."""

import functools
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from lib.given.kernels.autocast import factor_dtype
from lib.given.kernels.grouped import check_groups, tile_of_program, with_gradients
from lib.given.kernels.mode import tl, triton
from lib.given.parallel.experts import AllToAll, experts_per_rank
from lib.workbook.grading import mistake
from solutions import moe as reference

# ---- 19.1 top_k_router -----------------------------------------------------------------------------------------------


def _route(logits, k, normalize, probabilities):
    reference.top_k_router(logits, k)
    experts = probabilities.argsort(dim=-1, descending=True, stable=True)[..., :k]
    weights = probabilities.gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, experts


@mistake("top_k_router", "the weights are never divided by their sum")
def never_normalized(logits, k, normalize=True):
    return reference.top_k_router(logits, k, normalize=False)


@mistake(
    "top_k_router",
    "the weights add up to 1 even without normalize: they are divided by their sum, or come from a softmax of k logits",
)
def softmax_of_the_chosen(logits, k, normalize=True):
    _, experts = reference.top_k_router(logits, k)
    return logits.float().gather(-1, experts).softmax(-1), experts


@mistake("top_k_router", "the softmax is computed in the dtype of the logits instead of float32")
def softmax_in_their_dtype(logits, k, normalize=True):
    return _route(logits, k, normalize, logits.softmax(-1))


@mistake("top_k_router", "each expert has its own sigmoid; a softmax makes the experts compete")
def sigmoids(logits, k, normalize=True):
    return _route(logits, k, normalize, logits.float().sigmoid())


@mistake("top_k_router", "the experts with the smallest probabilities are chosen")
def smallest(logits, k, normalize=True):
    reference.top_k_router(logits, k)
    weights, experts = logits.float().softmax(-1).topk(k, largest=False)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, experts


@mistake("top_k_router", "of equal probabilities the expert with the higher index comes first")
def higher_index(logits, k, normalize=True):
    weights, experts = reference.top_k_router(logits.flip(-1), k, normalize)
    return weights, logits.shape[-1] - 1 - experts


@mistake("top_k_router", "the weights are detached: the router cannot learn")
def detached(logits, k, normalize=True):
    weights, experts = reference.top_k_router(logits, k, normalize)
    return weights.detach(), experts


@mistake("top_k_router", "k is not checked")
def k_unchecked(logits, k, normalize=True):
    if 1 <= k <= logits.shape[-1]:
        return reference.top_k_router(logits, k, normalize)
    return reference.top_k_router(logits, max(1, min(k, logits.shape[-1])), normalize)


@mistake("top_k_router", "the experts come from `topk`, which may take any of equal probabilities")
def topk_alone(logits, k, normalize=True):
    reference.top_k_router(logits, k)
    weights, experts = logits.float().softmax(-1).topk(k)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, experts


@mistake("top_k_router", "`argsort` without `stable=True`: equal probabilities may come in any order")
def unstable(logits, k, normalize=True):
    reference.top_k_router(logits, k)
    probabilities = logits.float().softmax(-1)
    experts = probabilities.argsort(dim=-1, descending=True)[..., :k]
    weights = probabilities.gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, experts


@mistake("top_k_router", "the softmax is over the tokens instead of the experts")
def softmax_over_tokens(logits, k, normalize=True):
    return _route(logits, k, normalize, logits.float().softmax(0))


@mistake("top_k_router", "the weights are divided by the sum over all tokens instead of the token's own")
def divided_by_all(logits, k, normalize=True):
    weights, experts = reference.top_k_router(logits, k, normalize=False)
    return weights / weights.sum() if normalize else weights, experts


# ---- 19.2 load_balancing_loss ----------------------------------------------------------------------------------------


@mistake(
    "load_balancing_loss", "shares are counted of the N tokens instead of the N * k assignments: k times too large"
)
def shares_of_tokens(probabilities, experts):
    return reference.load_balancing_loss(probabilities, experts) * experts.shape[-1]


@mistake("load_balancing_loss", "the factor E is missing")
def without_the_factor(probabilities, experts):
    return reference.load_balancing_loss(probabilities, experts) / probabilities.shape[-1]


@mistake("load_balancing_loss", "only first choices are counted")
def first_choices(probabilities, experts):
    return reference.load_balancing_loss(probabilities, experts[:, :1])


@mistake(
    "load_balancing_loss", "mean probabilities are multiplied with themselves; the shares of assignments are not used"
)
def probabilities_squared(probabilities, experts):
    return probabilities.shape[-1] * probabilities.mean(0).square().sum()


@mistake("load_balancing_loss", "shares are multiplied with themselves: no gradient reaches the router")
def shares_squared(probabilities, experts):
    shares = torch.bincount(experts.flatten(), minlength=probabilities.shape[-1]) / experts.numel()
    return probabilities.shape[-1] * shares.square().sum() + 0 * probabilities.sum()


@mistake("load_balancing_loss", "the probabilities are added up over the tokens instead of averaged")
def summed_over_tokens(probabilities, experts):
    return reference.load_balancing_loss(probabilities, experts) * len(probabilities)


@mistake("load_balancing_loss", "the counts end at the last expert that was chosen: `bincount` needs `minlength`")
def counted_to_the_last(probabilities, experts):
    shares = torch.bincount(experts.flatten()) / experts.numel()
    return probabilities.shape[-1] * (shares * probabilities.mean(0)).sum()


@mistake("load_balancing_loss", "the shares are rounded down to integers")
def integer_shares(probabilities, experts):
    shares = torch.bincount(experts.flatten(), minlength=probabilities.shape[-1]) // experts.numel()
    return probabilities.shape[-1] * (shares * probabilities.mean(0)).sum()


@mistake("load_balancing_loss", "the probabilities are averaged over the experts too: that mean is always 1/E")
def averaged_over_experts(probabilities, experts):
    return reference.load_balancing_loss(probabilities.mean().expand_as(probabilities), experts)


@mistake("load_balancing_loss", "the probabilities are detached: no gradient reaches the router")
def probabilities_detached(probabilities, experts):
    return reference.load_balancing_loss(probabilities.detach(), experts)


@mistake(
    "load_balancing_loss",
    "`view` cannot flatten the transpose of another tensor: `flatten` or `reshape` copies where it must",
)
def experts_viewed(probabilities, experts):
    experts.view(-1)
    return reference.load_balancing_loss(probabilities, experts)


# ---- 19.3 router_z_loss ----------------------------------------------------------------------------------------------


@mistake("router_z_loss", "the logsumexp is not squared")
def not_squared(logits):
    return logits.float().logsumexp(-1).mean()


@mistake("router_z_loss", "the squares are added up instead of averaged over the tokens")
def summed_squares(logits):
    return logits.float().logsumexp(-1).square().sum()


@mistake("router_z_loss", "the mean is squared, instead of the squares averaged")
def mean_squared(logits):
    return logits.float().logsumexp(-1).mean().square()


@mistake("router_z_loss", "exp before log without subtracting the largest logit: it overflows")
def overflowing(logits):
    return logits.float().exp().sum(-1).log().square().mean()


@mistake("router_z_loss", "the logits themselves are squared")
def logits_squared(logits):
    return logits.float().square().mean()


@mistake("router_z_loss", "the logsumexp is over the tokens instead of the experts")
def over_the_tokens(logits):
    return logits.float().logsumexp(0).square().mean()


@mistake("router_z_loss", "everything is computed in the dtype of the logits instead of float32")
def in_their_dtype(logits):
    return logits.logsumexp(-1).square().mean()


@mistake("router_z_loss", "the logits become float32 only after the logsumexp")
def converted_late(logits):
    return logits.logsumexp(-1).float().square().mean()


@mistake("router_z_loss", "the logits are detached: no gradient reaches the router")
def logits_detached(logits):
    return reference.router_z_loss(logits.detach())


# ---- 19.4 sort_by_expert ---------------------------------------------------------------------------------------------


@mistake("sort_by_expert", "the inverse order is returned: where each assignment goes, instead of which one comes next")
def inverse_order(experts, n_experts):
    order, counts = reference.sort_by_expert(experts, n_experts)
    return order.argsort(), counts


@mistake("sort_by_expert", "tokens are returned instead of assignments: order // k")
def tokens_instead(experts, n_experts):
    order, counts = reference.sort_by_expert(experts, n_experts)
    return order // max(experts.shape[-1], 1), counts


@mistake("sort_by_expert", "the assignments of one expert are in reversed order: the sort is not stable")
def reversed_within(experts, n_experts):
    flat = experts.flatten()
    order, counts = reference.sort_by_expert(flat.flip(0)[:, None], n_experts)
    return len(flat) - 1 - order, counts


@mistake("sort_by_expert", "`argsort` without `stable=True`: it may put assignments of one expert in any order")
def argsort_alone(experts, n_experts):
    return experts.flatten().argsort(), reference.sort_by_expert(experts, n_experts)[1]


@mistake("sort_by_expert", "experts are flattened choice by choice instead of token by token")
def by_choice(experts, n_experts):
    return reference.sort_by_expert(experts.T.contiguous(), n_experts)


@mistake("sort_by_expert", "counts end at the last expert that is used: those after it are missing")
def counts_too_short(experts, n_experts):
    order, _ = reference.sort_by_expert(experts, n_experts)
    return order, torch.bincount(experts.flatten())


@mistake("sort_by_expert", "offsets are returned instead of counts")
def offsets(experts, n_experts):
    order, counts = reference.sort_by_expert(experts, n_experts)
    return order, counts.cumsum(0)


@mistake("sort_by_expert", "the last expert's assignments come first: the order is descending")
def descending(experts, n_experts):
    order = experts.flatten().argsort(descending=True, stable=True)
    return order, reference.sort_by_expert(experts, n_experts)[1]


@mistake("sort_by_expert", "the sorted experts are returned instead of the assignments in that order")
def sorted_experts(experts, n_experts):
    return experts.flatten().sort().values, reference.sort_by_expert(experts, n_experts)[1]


@mistake("sort_by_expert", "each expert is counted once: `counts[flat] += 1` adds 1 for all of an expert's assignments")
def counted_once(experts, n_experts):
    order, counts = reference.sort_by_expert(experts, n_experts)
    return order, counts.clamp(max=1)


@mistake(
    "sort_by_expert",
    "`view` cannot flatten the transpose of another tensor: `flatten` or `reshape` copies where it must",
)
def assignments_viewed(experts, n_experts):
    experts.view(-1)
    return reference.sort_by_expert(experts, n_experts)


# ---- 19.5 grouped_matmul_kernel --------------------------------------------------------------------------------------

NO_ROW_END, NO_GUARD, TILE_AS_ROW, FIRST_EXPERT = (tl.constexpr(n) for n in (1, 2, 3, 4))
SAME_MATRIX, NO_LOOP, TF32, STRIDES, ENDS_BEFORE = (tl.constexpr(n) for n in (5, 6, 7, 8, 9))
UNMASKED_K, FIRST_AS_END, NO_END_BEYOND, ROW_BY_ROW, BEGIN_AS_END = (tl.constexpr(n) for n in (10, 11, 12, 13, 14))
UNMASKED_ROWS, COLUMNS_BY_ROWS, HALF_SUMS = (tl.constexpr(n) for n in (15, 16, 17))


@triton.jit
def _kernel(
    x, weights, out, first_rows, first_tiles, C, F, E, xn, xc, we, wc, wf,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, EXPERTS: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    tile, column = tile_of_program(GROUP)
    index = tl.arange(0, EXPERTS)
    ends = tl.load(first_tiles + 1 + index, mask=index < E, other=1 << 60)
    if FAULT == FIRST_AS_END:
        ends = tl.load(first_tiles + index, mask=index < E, other=1 << 60)
    if FAULT == NO_END_BEYOND:
        ends = tl.load(first_tiles + 1 + index, mask=index < E, other=0)
    if FAULT == ENDS_BEFORE:
        expert = tl.sum((ends < tile).to(tl.int32), axis=0)
    else:
        expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    found = expert < E
    if FAULT == NO_GUARD:
        expert = tl.minimum(expert, E - 1)
        found = expert < E
    if found:
        end = tl.load(first_rows + expert + 1)
        if FAULT == NO_ROW_END:
            end = tl.load(first_rows + E)
        if FAULT == BEGIN_AS_END:
            end = tl.load(first_rows + expert)
        start = tl.load(first_rows + expert) + (tile - tl.load(first_tiles + expert)) * TILE_M
        if FAULT == TILE_AS_ROW:
            start = (tile * TILE_M).to(tl.int64)
        if FAULT == FIRST_EXPERT:
            start = tl.load(first_rows + expert)
        if FAULT == ROW_BY_ROW:
            start = tl.load(first_rows + expert) + (tile - tl.load(first_tiles + expert))
        rows = start + tl.arange(0, TILE_M)
        columns = (column * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
        if FAULT == COLUMNS_BY_ROWS:
            columns = (column * TILE_M + tl.arange(0, TILE_N)).to(tl.int64)
        matrix = weights + expert.to(tl.int64) * we
        if FAULT == SAME_MATRIX:
            matrix = weights
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        last = C
        if FAULT == NO_LOOP:
            last = tl.minimum(C, TILE_K)
        for first in range(0, last, TILE_K):
            k = (first + tl.arange(0, TILE_K)).to(tl.int64)
            k_inside = k < C
            if FAULT == UNMASKED_K:
                k_inside = k >= 0
            x_inside, w_inside = (rows < end)[:, None] & k_inside[None, :], k_inside[:, None] & (columns < F)[None, :]
            if FAULT == UNMASKED_ROWS:
                x_inside = (rows >= 0)[:, None] & k_inside[None, :]
            if FAULT == STRIDES:
                left = tl.load(x + rows[:, None] * C + k[None, :], mask=x_inside, other=0.0)
                right = tl.load(matrix + k[:, None] * F + columns[None, :], mask=w_inside, other=0.0)
            else:
                left = tl.load(x + rows[:, None] * xn + k[None, :] * xc, mask=x_inside, other=0.0)
                right = tl.load(matrix + k[:, None] * wc + columns[None, :] * wf, mask=w_inside, other=0.0)
            if FAULT == TF32:
                total = tl.dot(left, right, total)
            else:
                total = tl.dot(left, right, total, input_precision="ieee")
            if FAULT == HALF_SUMS:
                total = total.to(out.dtype.element_ty).to(tl.float32)
        inside = (rows < end)[:, None] & (columns < F)[None, :]
        tl.store(out + rows[:, None] * F + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


class _Faulty:
    """A kernel with a fault, launched as the graded kernel is: ``Kernel[grid](...)``."""

    def __init_subclass__(cls, fault):
        cls.fault = fault

    def __class_getitem__(cls, grid):
        return functools.partial(_kernel[grid], FAULT=cls.fault)


@mistake(
    "grouped_matmul_kernel",
    "the rows are masked at the end of all rows instead of the expert's: its last tile overwrites the next expert's rows",
)
class RowsOfTheNextExpert(_Faulty, fault=NO_ROW_END):
    pass


@mistake(
    "grouped_matmul_kernel",
    "programs after the last tile of rows do not stop: they compute the last expert's rows again, or rows beyond the end",
)
class ProgramsAfterTheLast(_Faulty, fault=NO_GUARD):
    pass


@mistake("grouped_matmul_kernel", "tile i begins at row i * TILE_M, but tiles begin anew with every expert")
class TilesOfAllRows(_Faulty, fault=TILE_AS_ROW):
    pass


@mistake("grouped_matmul_kernel", "every tile of an expert begins at its first row")
class FirstTileOnly(_Faulty, fault=FIRST_EXPERT):
    pass


@mistake("grouped_matmul_kernel", "every tile is multiplied with the matrix of expert 0")
class MatrixOfExpertZero(_Faulty, fault=SAME_MATRIX):
    pass


@mistake("grouped_matmul_kernel", "only the first TILE_K terms are added: the loop over C is missing")
class NoLoop(_Faulty, fault=NO_LOOP):
    pass


@mistake("grouped_matmul_kernel", "tl.dot is left to use TF32 on a GPU")
class RoundedToTF32(_Faulty, fault=TF32):
    pass


@mistake("grouped_matmul_kernel", "the strides are ignored: the operands are read as if they were contiguous")
class AsIfContiguous(_Faulty, fault=STRIDES):
    pass


@mistake(
    "grouped_matmul_kernel",
    "a tile that is an expert's first is counted to the expert before: an expert's tiles end before the next one's first",
)
class ExpertBefore(_Faulty, fault=ENDS_BEFORE):
    pass


@mistake("grouped_matmul_kernel", "terms after the last are not masked: the last step of the sum reads beyond C")
class TermsAfterTheLast(_Faulty, fault=UNMASKED_K):
    pass


@mistake("grouped_matmul_kernel", "an expert's first tile is taken for the end of its tiles, which is entry e + 1")
class FirstTileAsEnd(_Faulty, fault=FIRST_AS_END):
    pass


@mistake("grouped_matmul_kernel", "places beyond E count as experts whose tiles have ended: their end must be huge")
class PlacesBeyondE(_Faulty, fault=NO_END_BEYOND):
    pass


@mistake("grouped_matmul_kernel", "a tile begins one row after the tile before it, instead of TILE_M rows")
class TilesRowByRow(_Faulty, fault=ROW_BY_ROW):
    pass


@mistake("grouped_matmul_kernel", "an expert's first row is taken for the end of its rows, which is entry e + 1")
class FirstRowAsEnd(_Faulty, fault=BEGIN_AS_END):
    pass


@mistake("grouped_matmul_kernel", "the rows are masked when they are stored, but not when they are loaded")
class RowsLoadedUnmasked(_Faulty, fault=UNMASKED_ROWS):
    pass


@mistake("grouped_matmul_kernel", "a tile's columns begin at a multiple of TILE_M instead of TILE_N")
class ColumnsByRows(_Faulty, fault=COLUMNS_BY_ROWS):
    pass


@mistake("grouped_matmul_kernel", "the sums are kept in the dtype of the result instead of float32")
class SumsInTheirDtype(_Faulty, fault=HALF_SUMS):
    pass


# ---- 19.6 grouped_matmul ---------------------------------------------------------------------------------------------


def _parts(x, weights, counts):
    return zip(x.split(counts.tolist()), weights, strict=True)


def _one_step(product):
    @functools.wraps(product)
    def answer(x, weights, counts):
        check_groups(x, weights, counts)
        return with_gradients(product, x, weights, counts)

    return answer


@mistake("grouped_matmul", "experts and their rows are matched from the end")
@_one_step
def from_the_end(x, weights, counts):
    return torch.cat([rows @ weight for rows, weight in _parts(x, weights.flip(0), counts)])


@mistake("grouped_matmul", "every row is multiplied with the matrix of expert 0")
@_one_step
def one_matrix(x, weights, counts):
    return x @ weights[0]


@mistake(
    "grouped_matmul", "every row is multiplied with every expert's matrix, and masked afterwards: E times the work"
)
@_one_step
def all_and_mask(x, weights, counts):
    expert = torch.repeat_interleave(counts.to(torch.int64))
    return torch.einsum("nc,ecf,ne->nf", x, weights, functional.one_hot(expert, len(weights)).to(x.dtype))


@mistake("grouped_matmul", "the rows of each expert are padded to the longest: the padding is multiplied too")
@_one_step
def padded(x, weights, counts):
    longest = int(counts.max()) if len(counts) else 0
    parts = [functional.pad(rows, (0, 0, 0, longest - len(rows))) for rows in x.split(counts.tolist())]
    out = torch.bmm(torch.stack(parts), weights)
    return torch.cat([out[e, : int(n)] for e, n in enumerate(counts)])


@mistake("grouped_matmul", "experts without rows are skipped, and the matrices of those after them move up")
@_one_step
def empty_moved_up(x, weights, counts):
    used = [int(n) for n in counts if n > 0]
    parts = zip(x.split(used) if used else (), weights[: len(used)], strict=True)
    return torch.cat([rows @ weight for rows, weight in parts]) if used else x @ weights[0]


@mistake("grouped_matmul", "the result has no gradient")
def without_gradient(x, weights, counts):
    return reference.grouped_matmul(x, weights, counts).detach()


@mistake("grouped_matmul", "the gradient reaches x but not the matrices")
def frozen_matrices(x, weights, counts):
    return reference.grouped_matmul(x, weights.detach(), counts)


@mistake(
    "grouped_matmul", "autograd follows the CPU's loop, but it can't see into a kernel: `with_gradients` is missing"
)
def traced(x, weights, counts):
    check_groups(x, weights, counts)
    return torch.cat([rows @ weight for rows, weight in _parts(x, weights, counts)])


# ---- 19.7 capacity_mask ----------------------------------------------------------------------------------------------


def _mask(experts, n_experts, room):
    in_order = functional.one_hot(experts.T.flatten(), n_experts)
    place = (in_order.cumsum(0) * in_order).sum(-1)
    return (place <= room).view(*experts.T.shape).T


@mistake(
    "capacity_mask",
    "tokens are served in order with all their choices, instead of all first choices before all second ones",
)
def token_by_token(experts, n_experts, capacity_factor):
    room = math.ceil(capacity_factor * experts.numel() / n_experts)
    in_order = functional.one_hot(experts.flatten(), n_experts)
    return ((in_order.cumsum(0) * in_order).sum(-1) <= room).view_as(experts)


@mistake("capacity_mask", "the capacity is rounded down")
def rounded_down(experts, n_experts, capacity_factor):
    return _mask(experts, n_experts, math.floor(capacity_factor * experts.numel() / n_experts))


@mistake("capacity_mask", "the capacity counts N tokens instead of N * k assignments")
def capacity_of_tokens(experts, n_experts, capacity_factor):
    return _mask(experts, n_experts, math.ceil(capacity_factor * len(experts) / n_experts))


@mistake(
    "capacity_mask", "one assignment fewer than the capacity is accepted: places begin with 1, so the last one is <="
)
def one_too_few(experts, n_experts, capacity_factor):
    return _mask(experts, n_experts, math.ceil(capacity_factor * experts.numel() / n_experts) - 1)


@mistake("capacity_mask", "the mask holds integers instead of booleans: it would index, not select")
def mask_of_integers(experts, n_experts, capacity_factor):
    return reference.capacity_mask(experts, n_experts, capacity_factor).long()


@mistake("capacity_mask", "one assignment more than the capacity is accepted")
def one_too_many(experts, n_experts, capacity_factor):
    return _mask(experts, n_experts, 1 + math.ceil(capacity_factor * experts.numel() / n_experts))


@mistake("capacity_mask", "each choice has a capacity of its own, so an expert can take k times as much")
def room_for_each_choice(experts, n_experts, capacity_factor):
    room = math.ceil(capacity_factor * experts.numel() / n_experts)
    return torch.cat([_mask(experts[:, i : i + 1], n_experts, room) for i in range(experts.shape[1])], dim=1)


@mistake("capacity_mask", "what is dropped is returned instead of what stays")
def dropped(experts, n_experts, capacity_factor):
    return ~reference.capacity_mask(experts, n_experts, capacity_factor)


@mistake("capacity_mask", "the mask is in the order of the choices, and is viewed as [N, k] instead of as [k, N]")
def viewed_untransposed(experts, n_experts, capacity_factor):
    return reference.capacity_mask(experts, n_experts, capacity_factor).T.contiguous().view(experts.shape)


@mistake("capacity_mask", "the capacity factor is not used")
def factor_unused(experts, n_experts, capacity_factor):
    return reference.capacity_mask(experts, n_experts, 1.0)


@mistake("capacity_mask", "the capacity is rounded to the nearest integer instead of up")
def rounded_to_nearest(experts, n_experts, capacity_factor):
    return _mask(experts, n_experts, round(capacity_factor * experts.numel() / n_experts))


# ---- 19.8 update_router_bias -----------------------------------------------------------------------------------------


@mistake("update_router_bias", "the sign is the wrong way round: a busy expert is preferred even more")
def wrong_sign(bias, counts, rate):
    return 2 * bias - reference.update_router_bias(bias, counts, rate)


@mistake("update_router_bias", "the bias moves by the difference itself instead of its sign")
def by_the_difference(bias, counts, rate):
    counts = counts.to(bias.dtype)
    return bias + rate * (counts.mean() - counts)


@mistake("update_router_bias", "the mean is rounded down to an integer")
def rounded_mean(bias, counts, rate):
    mean = torch.div(counts.sum(), len(counts), rounding_mode="floor")
    return bias + rate * torch.sign(mean - counts).to(bias.dtype)


@mistake("update_router_bias", "counts are compared with their median instead of their mean")
def by_median(bias, counts, rate):
    return bias + rate * torch.sign(counts.median() - counts).to(bias.dtype)


@mistake("update_router_bias", "the bias is changed in place")
def in_place(bias, counts, rate):
    return bias.copy_(reference.update_router_bias(bias, counts, rate))


@mistake("update_router_bias", "an expert with exactly the mean is raised too: there the sign is 0")
def raised_at_the_mean(bias, counts, rate):
    counts = counts.to(bias.dtype)
    return bias + rate * torch.where(counts <= counts.mean(), 1.0, -1.0)


@mistake("update_router_bias", "the bias moves by 1: the rate is not used")
def without_rate(bias, counts, rate):
    return reference.update_router_bias(bias, counts, 1.0)


@mistake("update_router_bias", "an expert with exactly the mean is lowered too: there the sign is 0")
def lowered_at_the_mean(bias, counts, rate):
    counts = counts.to(bias.dtype)
    return bias + rate * torch.where(counts < counts.mean(), 1.0, -1.0)


@mistake("update_router_bias", "idle experts are raised, but busy ones are not lowered")
def raised_only(bias, counts, rate):
    return bias + rate * (counts < counts.double().mean())


# ---- 19.9 MoE --------------------------------------------------------------------------------------------------------


def _combined(layer, x, weights, experts, shared=True):
    tokens = x.reshape(-1, x.shape[-1])
    order, counts = reference.sort_by_expert(experts, len(layer.w1))
    rows = layer.compute_experts(tokens[order // layer.k], counts).to(x.dtype)
    rows = rows * weights.flatten()[order, None].to(x.dtype)
    out = torch.zeros_like(tokens).index_add(0, order // layer.k, rows)
    return (out + layer.shared(tokens) if shared and layer.shared is not None else out).view_as(x)


class _MoE(reference.MoE):
    def forward(self, x):
        weights, experts = self.route(x.reshape(-1, x.shape[-1]))
        return self.mix(x, weights, experts)

    def mix(self, x, weights, experts):
        return _combined(self, x, weights, experts)


@mistake("MoE", "the experts' results are added up without the router's weights")
class Unweighted(_MoE):
    def mix(self, x, weights, experts):
        return _combined(self, x, torch.ones_like(weights) + 0 * weights, experts)


@mistake("MoE", "the weights stay in the order of the tokens, while the rows are sorted by expert")
class WeightsNotSorted(_MoE):
    def mix(self, x, weights, experts):
        order, _ = reference.sort_by_expert(experts, len(self.w1))
        inverse = torch.empty_like(order).index_copy(0, order, torch.arange(len(order)))
        return _combined(self, x, weights.flatten()[inverse].view_as(weights), experts)


@mistake("MoE", "a token's results overwrite each other instead of being added")
class Overwritten(_MoE):
    def mix(self, x, weights, experts):
        tokens = x.reshape(-1, x.shape[-1])
        order, counts = reference.sort_by_expert(experts, len(self.w1))
        rows = self.compute_experts(tokens[order // self.k], counts).to(x.dtype)
        rows = rows * weights.flatten()[order, None].to(x.dtype)
        out = torch.zeros_like(tokens)
        out[order // self.k] = rows
        return (out if self.shared is None else out + self.shared(tokens)).view_as(x)


@mistake("MoE", "the shared experts are forgotten")
class SharedForgotten(_MoE):
    def mix(self, x, weights, experts):
        unused = 0 * sum(p.sum() for p in self.shared.parameters()) if self.shared is not None else 0
        return _combined(self, x, weights, experts, shared=False) + unused


@mistake("MoE", "only the first choice is computed")
class FirstChoiceOnly(_MoE):
    def mix(self, x, weights, experts):
        keep = torch.zeros_like(weights)
        keep[:, 0] = 1
        return _combined(self, x, weights * keep, experts)


@mistake("MoE", "the router's bias is in the weights too; it may only choose")
class BiasInTheWeights(_MoE):
    def route(self, x):
        logits = self.router(x).float()
        super().route(x)
        return reference.top_k_router(logits + self.router_bias, self.k)


@mistake("MoE", "the router's bias is never used")
class BiasIgnored(_MoE):
    def route(self, x):
        logits = self.router(x).float()
        weights, experts = reference.top_k_router(logits, self.k)
        self.routing = logits.softmax(-1), experts
        return weights, experts


@mistake("MoE", "the probabilities of the k chosen experts are not divided by their sum")
class NotNormalized(_MoE):
    def route(self, x):
        _, experts = super().route(x)
        return self.routing[0].gather(-1, experts), experts


@mistake("MoE", "gate and value are exchanged: silu(w3 x) * w1 x")
class GateExchanged(_MoE):
    def compute_experts(self, rows, counts):
        gate = functional.silu(reference.grouped_matmul(rows, self.w3, counts))
        return reference.grouped_matmul(gate * reference.grouped_matmul(rows, self.w1, counts), self.w2, counts)


@mistake("MoE", "the routing is kept without its gradient: a balancing loss cannot reach the router")
class RoutingDetached(_MoE):
    def route(self, x):
        weights, experts = super().route(x)
        self.routing = self.routing[0].detach(), experts
        return weights, experts


@mistake("MoE", "under autocast the tokens' sums stay in autocast's dtype instead of the dtype of x")
class NarrowSums(_MoE):
    def mix(self, x, weights, experts):
        return super().mix(x.to(factor_dtype(x)), weights, experts)


@mistake("MoE", "a full expert drops tokens; here no token is dropped")
class TokensDropped(_MoE):
    def mix(self, x, weights, experts):
        keep = reference.capacity_mask(experts, len(self.w1), 1.0)
        return _combined(self, x, weights * keep, experts)


@mistake("MoE", "assignment i is taken for token i % N; it belongs to token i // k")
class TokenModulo(_MoE):
    def mix(self, x, weights, experts):
        tokens = x.reshape(-1, x.shape[-1])
        order, counts = reference.sort_by_expert(experts, len(self.w1))
        owner = order % max(len(tokens), 1)
        rows = self.compute_experts(tokens[owner], counts) * weights.flatten()[order, None].to(x.dtype)
        out = torch.zeros_like(tokens).index_add(0, owner, rows)
        return (out if self.shared is None else out + self.shared(tokens)).view_as(x)


@mistake("MoE", "the experts get the tokens' rows in their old order, although counts are for rows sorted by expert")
class RowsNotSorted(_MoE):
    def mix(self, x, weights, experts):
        tokens = x.reshape(-1, x.shape[-1])
        order, counts = reference.sort_by_expert(experts, len(self.w1))
        rows = self.compute_experts(tokens.repeat_interleave(self.k, 0), counts)
        out = torch.zeros_like(tokens).index_add(0, order // self.k, rows * weights.flatten()[order, None].to(x.dtype))
        return (out if self.shared is None else out + self.shared(tokens)).view_as(x)


@mistake("MoE", "the experts' results are added as if they were in the tokens' order, but they are sorted by expert")
class AddedUnsorted(_MoE):
    def mix(self, x, weights, experts):
        tokens = x.reshape(-1, x.shape[-1])
        order, counts = reference.sort_by_expert(experts, len(self.w1))
        rows = self.compute_experts(tokens[order // self.k], counts) * weights.flatten()[order, None].to(x.dtype)
        out = torch.zeros_like(tokens).index_add(0, torch.arange(len(order)) // self.k, rows)
        return (out if self.shared is None else out + self.shared(tokens)).view_as(x)


@mistake("MoE", "the routing holds the softmax with the router's bias in it; the bias only chooses")
class BiasInTheRouting(_MoE):
    def route(self, x):
        weights, experts = super().route(x)
        self.routing = (self.router(x).float() + self.router_bias).softmax(-1), experts
        return weights, experts


@mistake("MoE", "the router's bias is added to the probabilities; the contract adds it to the logits")
class BiasOnProbabilities(_MoE):
    def route(self, x):
        probabilities = self.router(x).float().softmax(-1)
        experts = (probabilities + self.router_bias).argsort(dim=-1, descending=True, stable=True)[:, : self.k]
        self.routing, weights = (probabilities, experts), probabilities.gather(-1, experts)
        return weights / weights.sum(-1, keepdim=True), experts


@mistake("MoE", "the shared experts' result replaces the others' instead of being added")
class SharedAlone(_MoE):
    def mix(self, x, weights, experts):
        out = _combined(self, x, weights, experts, shared=False)
        return out if self.shared is None else self.shared(x) + 0 * out


@mistake("MoE", "the gate's silu is missing")
class WithoutSilu(_MoE):
    def compute_experts(self, rows, counts):
        gate = reference.grouped_matmul(rows, self.w1, counts)
        return reference.grouped_matmul(gate * reference.grouped_matmul(rows, self.w3, counts), self.w2, counts)


@mistake("MoE", "the experts' weights start as zeros, so they never get a gradient")
class StartsAtZero(_MoE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for w in (self.w1, self.w2, self.w3):
            nn.init.zeros_(w)


@mistake(
    "MoE", "the experts' weights are drawn for the width that goes out, or for E, instead of the width that comes in"
)
class DrawnForOtherWidths(_MoE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for w in (self.w1, self.w2, self.w3):
            nn.init.uniform_(w, -(w.shape[2] ** -0.5), w.shape[2] ** -0.5)


@mistake("MoE", "the routing is computed in the layer's dtype instead of float32")
class RoutesInItsDtype(_MoE):
    def route(self, x):
        weights, experts = super().route(x)
        self.routing = self.routing[0].to(x.dtype), experts
        return weights.to(x.dtype), experts


@mistake("MoE", "the router's bias is no buffer: the state dict lacks it")
class BiasNotKept(_MoE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        bias = self.router_bias
        del self.router_bias
        self.router_bias = bias


@mistake("MoE", "`view` cannot flatten the transpose of another tensor: `flatten` or `reshape` copies where it must")
class TokensViewed(reference.MoE):
    def forward(self, x, *args, **kwargs):
        x.view(-1, x.shape[-1])
        return super().forward(x, *args, **kwargs)


# ---- 19.10 convert_hf_state_dict -------------------------------------------------------------------------------------


def _names(state_dict):
    return reference.convert_hf_state_dict(state_dict)


@mistake("convert_hf_state_dict", "gates and values are exchanged: the first half of gate_up_proj is w1")
def halves_exchanged(state_dict):
    found = _names(state_dict)
    return found | {"w1": found["w3"], "w3": found["w1"]} if "experts.gate_up_proj" in state_dict else found


@mistake("convert_hf_state_dict", "the matrices are reshaped instead of transposed")
def reshaped(state_dict):
    return {n: t.transpose(1, 2).reshape(t.shape) if t.ndim == 3 else t for n, t in _names(state_dict).items()}


@mistake("convert_hf_state_dict", "the experts are in the order of their names as text: 0, 1, 10, 11, 2")
def sorted_as_text(state_dict):
    found = _names(state_dict)
    if "experts.gate_up_proj" in state_dict:
        return found
    order = sorted(range(len(found["w1"])), key=str)
    return {n: t[order].contiguous() if t.ndim == 3 else t for n, t in found.items()}


@mistake("convert_hf_state_dict", "rows of gate_up_proj are taken in turn, as if gates and values were interleaved")
def interleaved(state_dict):
    found = _names(state_dict)
    if "experts.gate_up_proj" not in state_dict:
        return found
    both = state_dict["experts.gate_up_proj"]
    return found | {"w1": both[:, ::2].transpose(1, 2).contiguous(), "w3": both[:, 1::2].transpose(1, 2).contiguous()}


@mistake("convert_hf_state_dict", "names that are missing or unknown pass without an error")
def nothing_refused(state_dict):
    try:
        return _names(state_dict)
    except ValueError:
        return {}


@mistake("convert_hf_state_dict", "the weights are taken out of the dictionary given, which must stay as it is")
def popped(state_dict):
    found = _names(dict(state_dict))
    state_dict.clear()
    return found


@mistake("convert_hf_state_dict", "only missing names are refused, unknown ones are passed over")
def unknown_ignored(state_dict):
    known = ("gate.weight", "experts.")
    try:
        return _names({n: t for n, t in state_dict.items() if n.startswith(known)})
    except ValueError:
        return _names(state_dict)


@mistake("convert_hf_state_dict", "the router's bias is missing")
def without_bias(state_dict):
    return {n: t for n, t in _names(state_dict).items() if n != "router_bias"}


@mistake("convert_hf_state_dict", "the matrices are not transposed: they still are [out, in]")
def not_transposed(state_dict):
    return {n: t.transpose(1, 2).contiguous() if t.ndim == 3 else t for n, t in _names(state_dict).items()}


@mistake("convert_hf_state_dict", "the matrices are transposed views: `contiguous()` is missing")
def views(state_dict):
    swapped = not_transposed(state_dict)
    return {n: t.transpose(1, 2) if t.ndim == 3 else t for n, t in swapped.items()}


# ---- 19.11 dispatch --------------------------------------------------------------------------------------------------


def _dispatch(x, experts, n_experts, group, by_expert=True, token_of=None, detach=False, n_exchanges=1):
    n_local = experts_per_rank(n_experts, group)
    order, to_each = reference.sort_by_expert(experts, n_experts)
    from_each = torch.empty_like(to_each)
    for _ in range(n_exchanges):
        dist.all_to_all_single(from_each, to_each, group=group)
    send, receive = (counts.view(-1, n_local).sum(1).tolist() for counts in (to_each, from_each))
    k = experts.shape[-1]
    tokens = order // k if token_of is None else token_of(order, k, len(x))
    rows = AllToAll.apply(x.detach() if detach else x[tokens], send, receive, group)
    local = (torch.arange(n_experts) % n_local).repeat_interleave(from_each)
    where, counts = reference.sort_by_expert(local, n_local)
    return (rows[where] if by_expert else rows), counts, (order, where, send, receive)


@mistake("dispatch", "the rows are left in the order of the ranks that sent them, instead of sorted by expert")
def left_by_rank(x, experts, n_experts, group=None):
    return _dispatch(x, experts, n_experts, group, by_expert=False)


@mistake("dispatch", "assignment i is taken for token i % N; it belongs to token i // k")
def token_modulo(x, experts, n_experts, group=None):
    return _dispatch(x, experts, n_experts, group, token_of=lambda order, k, n: order % max(n, 1))


@mistake("dispatch", "the rows carry no gradient back: the all-to-all is not differentiated")
def no_way_back(x, experts, n_experts, group=None):
    with torch.no_grad():
        return reference.dispatch(x, experts, n_experts, group)


@mistake("dispatch", "the counts of all experts are returned instead of those of this rank's experts")
def counts_sent(x, experts, n_experts, group=None):
    rows, _, state = reference.dispatch(x, experts, n_experts, group)
    return rows, torch.bincount(experts.flatten(), minlength=n_experts), state


@mistake("dispatch", "the counts are exchanged twice")
def counts_twice(x, experts, n_experts, group=None):
    return _dispatch(x, experts, n_experts, group, n_exchanges=2)


@mistake("dispatch", "the group is not passed on to the collectives: all ranks take part")
def dispatch_to_all(x, experts, n_experts, group=None):
    return reference.dispatch(x, experts, n_experts, None)


@mistake("dispatch", "experts are dealt to the ranks in turn: expert e lives on rank e // (E/R), not e % R")
def dealt_in_turn(x, experts, n_experts, group=None):
    n_local = experts_per_rank(n_experts, group)
    n_ranks = n_experts // n_local
    return reference.dispatch(x, experts % n_ranks * n_local + experts // n_ranks, n_experts, group)


@mistake("dispatch", "the rows are permuted by the inverse of the order that sorts them by expert")
def permuted_back(x, experts, n_experts, group=None):
    rows, counts, state = _dispatch(x, experts, n_experts, group, by_expert=False)
    return rows[state[1].argsort()], counts, state


@mistake("dispatch", "send and receive are exchanged")
def exchanged(x, experts, n_experts, group=None):
    *_, (order, _, send, receive) = reference.dispatch(x, experts, n_experts, group)
    return AllToAll.apply(x[order // experts.shape[-1]], receive, send, group), None, None


@mistake("dispatch", "the group is missing in the rows' all-to-all or in `experts_per_rank`")
def rows_to_all(x, experts, n_experts, group=None):
    order, _ = reference.sort_by_expert(experts, n_experts)
    send = [1] * dist.get_world_size(group)
    return AllToAll.apply(x[order // experts.shape[-1]], send, send, None), None, None


@mistake("dispatch", "the received counts are returned for each rank of origin, instead of added up over the ranks")
def counts_received(x, experts, n_experts, group=None):
    rows, _, state = reference.dispatch(x, experts, n_experts, group)
    _, counts = reference.sort_by_expert(experts, n_experts)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return rows, received, state


# ---- 19.12 combine ---------------------------------------------------------------------------------------------------


def _combine(y, weights, state, group, unsort=True, weigh=True, token_of=None):
    order, by_expert, send, receive = state
    rows = torch.empty_like(y).index_copy(0, by_expert, y) if unsort else y
    back = AllToAll.apply(rows, receive, send, group)
    back = back * weights.flatten()[order, None].to(y.dtype) if weigh else back + 0 * weights.sum()
    tokens = order // weights.shape[1] if token_of is None else token_of(order, len(weights))
    return y.new_zeros(len(weights), y.shape[1]).index_add(0, tokens, back)


@mistake("combine", "the results are sent back sorted by expert, not in the order in which their rows arrived")
def not_unsorted(y, weights, state, group=None):
    return _combine(y, weights, state, group, unsort=False)


@mistake("combine", "the results are permuted forward once more instead of backward: y[by_expert] is not the inverse")
def sorted_again(y, weights, state, group=None):
    return _combine(y[state[1]], weights, state, group, unsort=False)


@mistake("combine", "the results are added up without their weights")
def without_weights(y, weights, state, group=None):
    return _combine(y, weights, state, group, weigh=False)


@mistake("combine", "the weights stay in the order of the tokens, while the rows are sorted by expert")
def weights_unsorted(y, weights, state, group=None):
    order, by_expert, send, receive = state
    rows = torch.empty_like(y).index_copy(0, by_expert, y)
    back = AllToAll.apply(rows, receive, send, group) * weights.flatten()[:, None].to(y.dtype)
    return y.new_zeros(len(weights), y.shape[1]).index_add(0, order // weights.shape[1], back)


@mistake("combine", "a token's results overwrite each other instead of being added")
def overwritten(y, weights, state, group=None):
    order, by_expert, send, receive = state
    rows = torch.empty_like(y).index_copy(0, by_expert, y)
    back = AllToAll.apply(rows, receive, send, group) * weights.flatten()[order, None].to(y.dtype)
    return y.new_zeros(len(weights), y.shape[1]).index_copy(0, order // weights.shape[1], back)


@mistake("combine", "the weights get no gradient: the router cannot learn")
def weights_detached(y, weights, state, group=None):
    return _combine(y, weights.detach(), state, group)


@mistake("combine", "the group is not passed on to the all-to-all: all ranks take part")
def combine_with_all(y, weights, state, group=None):
    return reference.combine(y, weights, state, None)


@mistake("combine", "assignment i is taken for token i % N; it belongs to token i // k")
def combine_modulo(y, weights, state, group=None):
    return _combine(y, weights, state, group, token_of=lambda order, n: order % max(n, 1))


@mistake("combine", "send and receive are not exchanged: rows go back the way they came")
def combine_the_same_way(y, weights, state, group=None):
    order, by_expert, send, receive = state
    return reference.combine(y, weights, (order, by_expert, receive, send), group)


@mistake("combine", "the results get no gradient: the experts cannot learn")
def results_detached(y, weights, state, group=None):
    return _combine(y.detach(), weights, state, group)


@mistake("combine", "float32 weights make the results float32, too")
def wider_results(y, weights, state, group=None):
    order, by_expert, send, receive = state
    rows = torch.empty_like(y).index_copy(0, by_expert, y)
    back = AllToAll.apply(rows, receive, send, group) * weights.flatten()[order, None]
    return back.new_zeros(len(weights), y.shape[1]).index_add(0, order // weights.shape[1], back)


# ---- 19.13 ExpertParallelMoE -----------------------------------------------------------------------------------------


class _Parallel(reference.ExpertParallelMoE):
    pass


@mistake("ExpertParallelMoE", "under autocast the result stays in autocast's dtype instead of the dtype of x")
class NarrowResult(reference.ExpertParallelMoE):
    def forward(self, x):
        return super().forward(x).to(factor_dtype(x))


@mistake("ExpertParallelMoE", "every rank keeps all experts")
class KeepsAllExperts(nn.Module):
    def __init__(self, moe, group=None):
        super().__init__()
        experts_per_rank(len(moe.w1), group)
        self.local = reference.ExpertParallelMoE(moe, group).local
        for name in ("w1", "w2", "w3"):
            setattr(self.local, name, nn.Parameter(getattr(moe, name).detach().clone()))

    def forward(self, x):
        return self.local(x)


@mistake("ExpertParallelMoE", "the shared experts are forgotten")
class ForgetsTheShared(_Parallel):
    def forward(self, x):
        shared, self.local.shared = self.local.shared, None
        try:
            return super().forward(x)
        finally:
            self.local.shared = shared


@mistake("ExpertParallelMoE", "the router's gradient is averaged over the ranks; it stays this rank's part")
class AveragesTheRouter(_Parallel):
    def __init__(self, moe, group=None):
        super().__init__(moe, group)

        def average(grad):
            total = grad.clone()
            dist.all_reduce(total, group=group)
            return total / dist.get_world_size(group)

        self.local.router.weight.register_hook(average)


@mistake(
    "ExpertParallelMoE", "the experts' gradients are divided by the number of ranks; they are sums over all tokens"
)
class AveragesTheExperts(_Parallel):
    def __init__(self, moe, group=None):
        super().__init__(moe, group)
        for name in ("w1", "w2", "w3"):
            getattr(self.local, name).register_hook(lambda grad: grad / dist.get_world_size(group))


@mistake("ExpertParallelMoE", "rank r holds experts r, r + R, ..., but `dispatch` sends it the experts from r * E/R on")
class ExpertsInTurn(_Parallel):
    def __init__(self, moe, group=None):
        super().__init__(moe, group)
        n_ranks = dist.get_world_size(group)
        for name in ("w1", "w2", "w3"):
            part = getattr(moe, name).detach()[dist.get_rank(group) :: n_ranks]
            setattr(self.local, name, nn.Parameter(part.clone()))


@mistake("ExpertParallelMoE", "the layer given is cut itself, instead of a copy")
class CutsTheGiven(_Parallel):
    def __init__(self, moe, group=None):
        super().__init__(moe, group)
        for name in ("w1", "w2", "w3"):
            moe.get_parameter(name).data = moe.get_parameter(name).data.clone() * 0


@mistake("ExpertParallelMoE", "the router is the given layer's own, not a copy: a step of one moves the other")
class SharesTheRouter(_Parallel):
    def __init__(self, moe, group=None):
        super().__init__(moe, group)
        self.local.router = moe.router


@mistake("ExpertParallelMoE", "the group is not passed on: all ranks take part")
class GroupForgotten(_Parallel):
    def __init__(self, moe, group=None):
        super().__init__(moe, None if dist.get_world_size() == 4 and group is not None else group)


@mistake(
    "ExpertParallelMoE", "a rank's experts are a view of the layer given, not a copy: a step of one moves the other"
)
class ViewsOfTheGiven(_Parallel):
    def __init__(self, moe, group=None):
        super().__init__(moe, group)
        for name in ("w1", "w2", "w3"):
            part = getattr(moe, name).detach().chunk(dist.get_world_size(group))[dist.get_rank(group)]
            setattr(self.local, name, nn.Parameter(part))


@mistake("ExpertParallelMoE", "the rank among all ranks is taken for the rank in the group")
class RankOfAll(_Parallel):
    def __init__(self, moe, group=None):
        super().__init__(moe, group)
        n_local = experts_per_rank(len(moe.w1), group)
        first = dist.get_rank() * n_local
        for name in ("w1", "w2", "w3"):
            setattr(self.local, name, nn.Parameter(getattr(moe, name).detach()[first : first + n_local].clone()))


# ---- 19.14 moe_parameters --------------------------------------------------------------------------------------------


@mistake("moe_parameters", "shared experts are left out of the active weights")
def shared_not_active(config):
    total, active = reference.moe_parameters(config)
    shared = 3 * config.dim * config.hidden_dim * config.n_shared * (config.n_layers - config.n_dense)
    return total, active - shared


@mistake("moe_parameters", "all blocks are counted as mixtures, the dense ones too")
def all_sparse(config):
    from dataclasses import replace

    dense = config.n_dense * 3 * config.dim * config.dense_hidden_dim
    total, active = reference.moe_parameters(replace(config, n_dense=0))
    return total + dense, active + dense


@mistake("moe_parameters", "the output layer is counted as tied to the embedding")
def tied(config):
    return tuple(n - config.vocab_size * config.dim for n in reference.moe_parameters(config))


@mistake("moe_parameters", "an expert is counted with two matrices; a SwiGLU has three")
def two_matrices(config):
    total, active = reference.moe_parameters(config)
    matrix = config.dim * config.hidden_dim * (config.n_layers - config.n_dense)
    return total - matrix * (config.n_experts + config.n_shared), active - matrix * (config.k + config.n_shared)


@mistake("moe_parameters", "only the chosen rows of the router are counted as active; it scores all experts")
def router_in_part(config):
    total, active = reference.moe_parameters(config)
    unused = (config.n_experts - config.k) * (config.dim + config.router_bias)
    return total, active - unused * (config.n_layers - config.n_dense)


@mistake("moe_parameters", "the routers are forgotten")
def no_routers(config):
    routers = config.n_experts * (config.dim + config.router_bias) * (config.n_layers - config.n_dense)
    return tuple(n - routers for n in reference.moe_parameters(config))


@mistake("moe_parameters", "the routers' biases are forgotten")
def no_biases(config):
    biases = config.n_experts * config.router_bias * (config.n_layers - config.n_dense)
    return tuple(n - biases for n in reference.moe_parameters(config))


@mistake("moe_parameters", "a block is counted with one norm; it has two")
def one_norm(config):
    return tuple(n - config.dim * config.n_layers for n in reference.moe_parameters(config))


@mistake("moe_parameters", "the norm behind the last block is forgotten")
def no_last_norm(config):
    return tuple(n - config.dim for n in reference.moe_parameters(config))


@mistake("moe_parameters", "the norms are forgotten")
def no_norms(config):
    return tuple(n - config.dim * (2 * config.n_layers + 1) for n in reference.moe_parameters(config))


@mistake("moe_parameters", "the dense blocks' SwiGLUs are forgotten")
def no_dense(config):
    dense = config.n_dense * 3 * config.dim * config.dense_hidden_dim
    return tuple(n - dense for n in reference.moe_parameters(config))


@mistake("moe_parameters", "the dense blocks' SwiGLUs are counted with the width of an expert")
def narrow_dense(config):
    less = config.n_dense * 3 * config.dim * (config.dense_hidden_dim - config.hidden_dim)
    return tuple(n - less for n in reference.moe_parameters(config))


@mistake("moe_parameters", "a dense block's SwiGLU is counted with two matrices; it has three")
def two_dense_matrices(config):
    less = config.n_dense * config.dim * config.dense_hidden_dim
    return tuple(n - less for n in reference.moe_parameters(config))


@mistake("moe_parameters", "shared experts are forgotten")
def no_shared(config):
    shared = 3 * config.dim * config.hidden_dim * config.n_shared * (config.n_layers - config.n_dense)
    return tuple(n - shared for n in reference.moe_parameters(config))


@mistake("moe_parameters", "every router is counted with a bias; here it has none")
def always_a_bias(config):
    from dataclasses import replace

    return reference.moe_parameters(replace(config, router_bias=True))


@mistake("moe_parameters", "one row of the embedding is counted as active; the contract counts all of it")
def one_row(config):
    total, active = reference.moe_parameters(config)
    return total, active - (config.vocab_size - 1) * config.dim


@mistake("moe_parameters", "the embedding is left out of the active weights; the contract counts it")
def embedding_not_active(config):
    total, active = reference.moe_parameters(config)
    return total, active - config.vocab_size * config.dim


@mistake("moe_parameters", "the numbers are right, but they are floats and should be ints")
def counts_as_floats(config):
    return tuple(float(count) for count in reference.moe_parameters(config))
