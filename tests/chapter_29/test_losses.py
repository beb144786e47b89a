"""What a response earns, and what its tokens lose: scores, advantages, log-probabilities, losses and their sums.

Whole matrices and autograd in float64 are the oracle; a mode that sees every tensor counts the cost.
"""

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded
from tests.inputs import randn

rewards = graded("rewards")

ADVANTAGE, ENTROPY, CLIP, SEQUENCE, WEIGHT, AGGREGATE = (f"eq-rewards-{n}" for n in range(1, 7))
FORM = "the contract: the right form"
RAISES = "the contract, under Raises"
RETURNS = "the contract, under Returns"
ARGS = "the contract, under Args"
COST = "the contract, under Cost"
NAN, INF = math.nan, math.inf
MASKS = {"bool": torch.bool, "int64": torch.int64, "float32": torch.float32}
every_mask = pytest.mark.parametrize("dtype", MASKS.values(), ids=MASKS)


def mask_of(rows: list[list[int]], dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.tensor(rows).to(dtype)


# ---- score_response --------------------------------------------------------------------------------------------------

FORMS = [
    ("<think>two</think><answer>4</answer>", True),
    ("two</think> <answer> 4\n</answer>\n", True),
    (" \n<think></think>\n\n<answer>4</answer>", True),
    ("</think><answer>4</answer>", True),
    ("x<think>two</think><answer>4</answer>", False),
    ("<think><think>two</think><answer>4</answer>", False),
    ("<think>two</think></think><answer>4</answer>", False),
    ("<think>two</think>so<answer>4</answer>", False),
    ("<think>two</think><answer>4</answer> I think", False),
    ("<think>two</think><answer>3</answer><answer>4</answer>", False),
    ("<think>two</think><answer> \n</answer>", False),
    ("<think>two <answer>4</answer></think><answer>4</answer>", False),
    ("<think>two</think><answer>4<think></answer>", False),
    ("<think>two</think><answer>4", False),
    ("<think>two<answer>4</answer>", False),
    ("<answer>4</answer><think>two</think>", False),
    ("two</think><ANSWER>4</ANSWER>", False),
    ("4", False),
    ("", False),
]


def test_score_response_knows_the_form():
    for text, right in FORMS:
        case(f"{text!r}: the form is {'right' if right else 'wrong'}, format_weight=0.25")
        seen: list[str] = []

        def check(answer: str, seen: list[str] = seen) -> bool:
            seen.append(answer)
            return answer == "4"

        expected = {"reward": float(right), "format_reward": float(right), "answer_reward": float(right)}
        expect_equal(rewards.score_response(text, check, 0.25), expected, name="scores", read=FORM)
        expect_equal(seen, ["4"] if right else [], name="texts that check was called with", read=ARGS)


def test_score_response_pays_a_little_for_the_form():
    for weight, text, reward in ((0.25, "5", 0.25), (0.0, "5", 0.0), (0.25, "4", 1.0)):
        case(f"a right form with the answer {text}, where 4 is right; format_weight={weight}")
        found = rewards.score_response(f"</think><answer>{text}</answer>", lambda answer: answer == "4", weight)
        expected = {"reward": reward, "format_reward": 1.0, "answer_reward": float(text == "4")}
        expect_equal(found, expected, name="scores", read=RETURNS)
        expect_equal({type(value) for value in found.values()}, {float}, name="types of the values", read=RETURNS)
    case("a check that returns 1 in place of True")
    found = rewards.score_response("</think><answer>4</answer>", lambda answer: 1)
    expect_equal(found, {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}, name="scores", read=RETURNS)


# ---- check_countdown -------------------------------------------------------------------------------------------------

EXPRESSIONS = [
    ("2**3", [2, 3], 8, False),
    ("12", [1, 2], 12, False),
    ("7/2*2", [2, 2, 7], 7, True),
    ("7/2", [2, 7], 3, False),
    ("8/(3-8/3)", [3, 3, 8, 8], 24, True),
    ("24+1/1000000", [24, 1, 1_000_000], 24, False),
    ("24+1/1000000000000000000", [24, 1, 10**18], 24, False),
    ("1/3*3", [1, 3, 3], 1, True),
    ("10-2-3", [2, 3, 10], 5, True),
    ("8/4/2", [2, 4, 8], 1, True),
    ("2+3*4", [2, 3, 4], 14, True),
    ("2*3+4", [2, 3, 4], 10, True),
    (" ( 2 +\t3 ) * 4 ", [4, 3, 2], 20, True),
    ("((7))", [7], 7, True),
    ("0+5", [0, 5], 5, True),
    ("1+2", [1, 2, 3], 3, False),
    ("1+2+2", [1, 2], 5, False),
    ("1+1", [1, 2], 2, False),
    ("5*1", [5, 1, 1], 5, False),
    ("1 2", [12], 12, False),
    ("1 2", [1, 2], 12, False),
    ("05+1", [5, 1], 6, False),
    ("-1+3", [1, 3], 2, False),
    ("2*-3+9", [2, 3, 9], 3, False),
    ("7//2", [7, 2], 3, False),
    ("7%4", [7, 4], 3, False),
    ("1e1", [1], 10, False),
    ("1.0+2", [1, 2], 3, False),
    ("1_0", [10], 10, False),
    ("1/0", [1, 0], 0, False),
    ("1/(2-2)", [1, 2, 2], 0, False),
    ("(1+2", [1, 2], 3, False),
    ("1+2)", [1, 2], 3, False),
    ("1)+(2", [1, 2], 3, False),
    ("2(3)", [2, 3], 6, False),
    ("(2)(3)", [2, 3], 6, False),
    ("()1", [1], 1, False),
    ("1+", [1], 1, False),
    ("1+\n2", [1, 2], 3, False),
    ("1+2\n", [1, 2], 3, False),
    ("٣", [3], 3, False),
    ("3=3", [3, 3], 3, False),
    ("a+1", [1], 1, False),
    ("__import__('os')", [], 0, False),
    ("", [], 0, False),
]


def test_check_countdown_by_hand():
    for text, numbers, target, right in EXPRESSIONS:
        case(f"{text!r} with {numbers}, target {target}")
        given = list(numbers)
        found = rewards.check_countdown(text, given, target)
        expect_equal(found, right, read=RETURNS)
        expect_equal(given, numbers, name="the numbers afterwards", answer=found, read=ARGS)
    case("'2+3*4' with numbers from an iterator, target 14")
    expect_equal(rewards.check_countdown("2+3*4", iter([3, 2, 4]), 14), True, read=ARGS)


def test_check_countdown_refuses_long_texts_and_never_raises():
    case("199 brackets, one number: 199 and 201 characters")
    expect_equal(rewards.check_countdown("(" * 99 + "7" + ")" * 99, [7], 7), True, read=RETURNS)
    expect_equal(rewards.check_countdown("(" * 100 + "7" + ")" * 100, [7], 7), False, read=RETURNS)
    case("200 characters, and one more blank")
    expect_equal(rewards.check_countdown("7".ljust(200), [7], 7), True, read=RETURNS)
    expect_equal(rewards.check_countdown("7".ljust(201), [7], 7), False, read=RETURNS)
    case("300 texts of random characters")
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices("0123+-*/() .a", k=draw.randint(0, 12)))
        expect_true(isinstance(rewards.check_countdown(text, [1, 2], 3), bool), f"{text!r}: not a bool", read=RETURNS)


def test_check_countdown_is_exact():
    for a, b, c in itertools.product("+-*/", repeat=3):
        for shape in ("7{}7{}3{}4", "(7{}7){}3{}4", "7{}(7{}3){}4", "7{}7{}(3{}4)", "7{}(7{}(3{}4))"):
            text = shape.format(a, b, c)
            literal = "".join(f"Fraction({char})" if char.isdigit() else char for char in text)
            try:
                value = eval(literal)
            except ZeroDivisionError:
                value = None
            for target in (24, 4, 1):
                case(f"{text!r}, target {target}, one of all ways to put operators and brackets among 7, 7, 3, 4")
                expect_equal(
                    rewards.check_countdown(text, [7, 7, 3, 4], target), value == Fraction(target), read=RETURNS
                )


# ---- group_advantages ------------------------------------------------------------------------------------------------


def test_group_advantages_by_hand():
    case("rewards 1, 5, 0, 2, 3 of groups 7, -2, 7, 7, -2: means 1 and 4, standard deviations 1 and sqrt(2)")
    r, groups = torch.tensor([1.0, 5.0, 0.0, 2.0, 3.0]), torch.tensor([7, -2, 7, 7, -2])
    expect_close(
        rewards.group_advantages(r, groups, eps=0.5),
        torch.tensor([0.0, 1 / (2**0.5 + 0.5), -1 / 1.5, 1 / 1.5, -1 / (2**0.5 + 0.5)]),
        read=ADVANTAGE,
    )
    case("the same rewards without the standard deviation")
    expect_close(
        rewards.group_advantages(r, groups, normalize_by_std=False),
        torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0]),
        read=ADVANTAGE,
    )
    case("the same rewards times 1e-6 with the default eps: 1e-6")
    expect_close(rewards.group_advantages(r * 1e-6, groups)[2:4], torch.tensor([-0.5, 0.5]), atol=1e-5, read=ADVANTAGE)


def test_group_advantages_without_contrast_are_exactly_zero():
    case("three rewards of 0.1, seven of 1/3, and a group of one with reward 5")
    r = torch.tensor([0.1] * 3 + [1 / 3] * 7 + [5.0], dtype=torch.float64)
    groups = torch.tensor([4] * 3 + [9] * 7 + [1])
    for normalize in (True, False):
        found = rewards.group_advantages(r, groups, normalize, eps=1e-30)
        expect_close(found, torch.zeros(11), atol=0, rtol=0, read=RETURNS)


def test_group_advantages_keep_small_differences():
    case("rewards 1e6 + 0, 1e6 + 1, 1e6 + 2 in float64, without std and with")
    r = torch.tensor([1e6, 1e6 + 1, 1e6 + 2], dtype=torch.float64)
    expected = torch.tensor([-1.0, 0.0, 1.0])
    for normalize in (False, True):
        expect_close(rewards.group_advantages(r, torch.zeros(3, dtype=torch.int64), normalize), expected, read=RETURNS)
    case("rewards 0, 1e-9 and 2e-9, eps=0: they are not equal")
    found = rewards.group_advantages(1e-9 * (r - 1e6), torch.zeros(3, dtype=torch.int64), eps=0.0)
    expect_close(found, expected, read=RETURNS)
    case("rewards 1e8 + 0, + 1, + 2 in float64: squares of the rewards themselves would lose the differences")
    expect_close(rewards.group_advantages(r + 99e6, torch.zeros(3, dtype=torch.int64)), expected, read=RETURNS)


def test_group_advantages_refuse_other_lengths():
    case("5 rewards, 4 groups")
    with expect_raises(ValueError, "5", "4", read=RAISES):
        rewards.group_advantages(torch.zeros(5), torch.zeros(4, dtype=torch.int64))


# ---- token_log_probs -------------------------------------------------------------------------------------------------


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """All logits at once, in float64."""
    log_probs = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    return log_probs.gather(-1, targets[..., None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def test_token_log_probs_by_hand():
    case("logits 0 and log 3 at temperature 1 and 0.5")
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    for temperature, p in ((1.0, 0.75), (0.5, 0.9)):
        log_probs, entropy = rewards.token_log_probs(hidden, weight, torch.tensor([1]), temperature)
        expect_close(log_probs, torch.tensor([math.log(p)]), name="log_probs", read=ENTROPY)
        h = -p * math.log(p) - (1 - p) * math.log(1 - p)
        expect_close(entropy, torch.tensor([h]), name="entropy", read=ENTROPY)
    case("the same in float64, at temperature 1: the results are float32")
    log_probs, entropy = rewards.token_log_probs(hidden.double(), weight.double(), torch.tensor([1]))
    expect_equal((log_probs.dtype, entropy.dtype), (torch.float32,) * 2, name="dtypes", read=RETURNS)


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 256])
@pytest.mark.parametrize("shape", [(10,), (2, 5), ()], ids=str)
def test_token_log_probs_equal_whole_logits(shape, chunk_size):
    case(f"targets {list(shape)}, C=6, V=11, temperature 0.7, chunks of {chunk_size}")
    hidden, weight = randn(*shape, 6), randn(11, 6, seed=1).requires_grad_()
    targets = torch.randint(11, shape, generator=torch.Generator().manual_seed(2))
    if len(shape) == 2:  # hidden states cut out of longer rows, as a model's are
        hidden, targets = randn(2, 6, 6)[:, :-1], targets.T.contiguous().T
    hidden.requires_grad_()
    log_probs, entropy = rewards.token_log_probs(hidden, weight, targets, 0.7, chunk_size)
    expected, expected_entropy = whole(hidden, weight, targets, 0.7)
    expect_close(log_probs.detach(), expected.detach().float(), name="log_probs", read=ENTROPY)
    expect_close(entropy, expected_entropy.detach().float(), name="entropy", read=ENTROPY)
    expect_true(not entropy.requires_grad, "the entropy has a gradient", read=RETURNS)
    case(f"gradients at targets {list(shape)}, C=6, V=11, temperature 0.7, chunks of {chunk_size}")
    upstream = randn(*shape, seed=3) if len(shape) < 2 else randn(5, 2, seed=3).T
    found = torch.autograd.grad(log_probs, (hidden, weight), upstream)
    wanted = torch.autograd.grad(expected, (hidden, weight), upstream.double())
    for name, a, b in zip(("hidden", "weight"), found, wanted, strict=True):
        expect_close(a, b.float(), atol=1e-5, name=f"gradient of {name}", read=RETURNS)


def test_token_log_probs_of_large_logits():
    case("logits 1,000 apart and 10,000 high: finite, with entropy 0 and ln 2")
    weight = torch.tensor([[10_000.0], [10_000.0], [9_000.0]])
    log_probs, entropy = rewards.token_log_probs(torch.ones(2, 1), weight, torch.tensor([0, 2]))
    expect_close(log_probs, torch.tensor([-math.log(2), -1000 - math.log(2)]), atol=2e-3, name="log_probs")
    expect_close(entropy, torch.full((2,), math.log(2)), atol=1e-5, name="entropy", read=ENTROPY)
    case("a logit of -inf: probability 0, entropy that of the others")
    weight = torch.tensor([[-INF], [0.0], [0.0]])
    _, entropy = rewards.token_log_probs(torch.ones(1, 1), weight, torch.tensor([1]))
    expect_close(entropy, torch.tensor([math.log(2)]), name="entropy", read=ENTROPY)


def test_token_log_probs_sum_the_weights_gradient_in_float32():
    case("bfloat16, 1,024 equal positions in chunks of 1: each adds a 1,024th of the whole gradient")
    n = 1024
    hidden = torch.ones(n, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = rewards.token_log_probs(hidden, weight, torch.zeros(n, dtype=torch.int64), chunk_size=1)
    expect_equal(log_probs.dtype, torch.float32, name="dtype of log_probs", read=RETURNS)
    log_probs.backward(torch.full((n,), 2.0**-9))
    for name, x in (("hidden", hidden), ("weight", weight)):
        expect_equal(x.grad.dtype, torch.bfloat16, name=f"dtype of the gradient of {name}", read=RETURNS)
    expect_close(weight.grad.float(), torch.tensor([[1.0], [-1.0]]), rtol=1e-2, name="the weight's gradient", read=COST)


def test_token_log_probs_divide_in_float32():
    case("bfloat16 logits 3, 5 and -2 at temperature 0.7: what the division gives is not rounded to bfloat16")
    hidden, weight = torch.ones(3, 1).bfloat16(), torch.tensor([[3.0], [5.0], [-2.0]]).bfloat16()
    targets = torch.tensor([0, 1, 2])
    log_probs, entropy = rewards.token_log_probs(hidden, weight, targets, 0.7)
    expected, expected_entropy = whole(hidden, weight, targets, 0.7)
    expect_close(log_probs, expected.float(), name="log_probs", read=ARGS)
    expect_close(entropy, expected_entropy.float(), atol=1e-5, name="entropy", read=ARGS)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_token_log_probs_hold_one_chunk():
    N, C, V, chunk = 60, 2, 40, 5
    case(f"N={N}, C={C}, V={V}, chunks of {chunk}: no tensor above {chunk * V} numbers, at most 4 a row are saved")
    hidden, weight = randn(N, C).requires_grad_(), randn(V, C, seed=1).requires_grad_()
    targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(2))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with Largest() as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        log_probs, _ = rewards.token_log_probs(hidden, weight, targets, chunk_size=chunk)
    inputs = {x.data_ptr() for x in (hidden, weight, targets)}
    extra = sum(x.numel() for x in saved if x.data_ptr() not in inputs)
    expect_true(extra <= 4 * N, "more than four numbers a row are saved for backward", answer=extra, read=COST)
    expect_true(forward.numel <= chunk * V, "a larger tensor was made forward", answer=forward.numel, read=COST)
    with Largest() as backward:
        log_probs.sum().backward()
    expect_true(backward.numel <= chunk * V, "a larger tensor was made backward", answer=backward.numel, read=COST)


def test_token_log_probs_of_a_frozen_weight_or_hidden():
    case("only one of hidden and weight needs a gradient")
    targets = torch.tensor([3, 1])
    for trained in ("hidden", "weight"):
        x = {"hidden": randn(2, 3), "weight": randn(5, 3, seed=1)}
        x[trained].requires_grad_()
        rewards.token_log_probs(x["hidden"], x["weight"], targets)[0].sum().backward()
        expected = torch.autograd.grad(whole(x["hidden"], x["weight"], targets, 1.0)[0].sum(), x[trained])[0]
        expect_close(x[trained].grad, expected, atol=1e-5, name=f"gradient of {trained}", read=RETURNS)


def test_token_log_probs_refuse_a_temperature():
    for temperature in (0.0, -0.5, NAN):
        case(f"temperature = {temperature}")
        with expect_raises(ValueError, str(temperature), read=RAISES):
            rewards.token_log_probs(randn(2, 3), randn(5, 3), torch.tensor([0, 1]), temperature)


# ---- policy_loss -----------------------------------------------------------------------------------------------------

MASK = [[0, 1, 1, 1], [1, 1, 0, 0]]
RATIOS = [[1.0, 0.5, 1.1, 1.5], [1.25, 0.7, 1.0, 1.0]]


def ratios_as_log_probs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    old = randn(2, 4, dtype=dtype) - 3
    return (old + torch.tensor(RATIOS, dtype=dtype).log()).requires_grad_(), old


def expect_fraction(found: Tensor, expected: Tensor, read: str) -> None:
    expect_true(isinstance(found, Tensor), "clip_fraction is no tensor", answer=found, read=RETURNS)
    expect_close(found.float(), expected, name="clip_fraction", read=read)


def test_policy_loss_by_hand():
    case(f"ratios {RATIOS}, advantages 2 and -1, mask {MASK}, limits 0.2 and 0.3")
    log_probs, old = ratios_as_log_probs()
    losses, fraction = rewards.policy_loss(log_probs, old, torch.tensor([2.0, -1.0]), mask_of(MASK), 0.2, 0.3)
    expected = torch.tensor([[0.0, -1.0, -2.2, -2.6], [1.25, 0.8, 0.0, 0.0]])
    expect_close(losses.detach(), expected, name="losses", read=CLIP)
    expect_fraction(fraction, torch.tensor(2 / 5), RETURNS)
    case("the same with advantages 2 and 0: one of five tokens is clipped")
    _, fraction = rewards.policy_loss(log_probs, old, torch.tensor([2.0, 0.0]), mask_of(MASK), 0.2, 0.3)
    expect_fraction(fraction, torch.tensor(1 / 5), RETURNS)
    case("advantages 2 and -1: gradients of the log-probabilities, 0 where the clipped term counts")
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    expect_close(gradient, torch.tensor([[0.0, -1.0, -2.2, 0.0], [1.25, 0.0, 0.0, 0.0]]), name="gradient", read=CLIP)
    case("the same with the default limits: 0.2 on both sides")
    losses, _ = rewards.policy_loss(log_probs, old, torch.tensor([2.0, -1.0]), mask_of(MASK))
    expected = torch.tensor([[0.0, -1.0, -2.2, -2.4], [1.25, 0.8, 0.0, 0.0]])
    expect_close(losses.detach(), expected, name="losses", read=CLIP)


def test_policy_loss_takes_three_shapes_of_advantages():
    log_probs, old = ratios_as_log_probs()
    case("advantages [2], [2, 1] and [2, 4] of the same numbers")
    a = torch.tensor([2.0, -1.0])
    expected, _ = rewards.policy_loss(log_probs, old, a, mask_of(MASK))
    for shaped in (a[:, None], a[:, None].expand(2, 4)):
        found, _ = rewards.policy_loss(log_probs, old, shaped, mask_of(MASK))
        expect_close(found.detach(), expected.detach(), name="losses", read=ARGS)
    case("two rows of two tokens, with an advantage for each row, 1 and 3")
    found, _ = rewards.policy_loss(torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([1.0, 3.0]), torch.ones(2, 2))
    expect_close(found, torch.tensor([[-1.0, -1.0], [-3.0, -3.0]]), name="losses", read=ARGS)
    case("advantages of the tokens: 1, 2, 3, 4 in each row")
    found, _ = rewards.policy_loss(
        torch.zeros(2, 4), torch.zeros(2, 4), torch.arange(1.0, 5.0).expand(2, 4), mask_of(MASK)
    )
    expect_close(found, torch.tensor([[0.0, -2.0, -3.0, -4.0], [-1.0, -2.0, 0.0, 0.0]]), name="losses", read=ARGS)


def test_policy_loss_of_a_sequence():
    case('level="sequence", ratios as above: the geometric means of each row\'s tokens')
    log_probs, old = ratios_as_log_probs(torch.float64)
    losses, fraction = rewards.policy_loss(
        log_probs, old, torch.tensor([2.0, -1.0]).double(), mask_of(MASK), 0.2, 0.2, "sequence"
    )
    first, second = (0.5 * 1.1 * 1.5) ** (1 / 3), (1.25 * 0.7) ** (1 / 2)
    expected = torch.tensor([[0.0] + [-2 * first] * 3, [second] * 2 + [0.0] * 2], dtype=torch.float64)
    expect_close(losses.detach(), expected, name="losses", read=SEQUENCE)
    expect_fraction(fraction, torch.tensor(0.0), RETURNS)
    case("the same: the mean over a row's tokens has the gradient of the sequence's objective")
    mask = mask_of(MASK).double()
    counts = mask.sum(-1)
    (found,) = torch.autograd.grad((losses.sum(-1) / counts).sum(), log_probs)
    ratio = (((log_probs - old) * mask).sum(-1) / counts).exp()
    (expected,) = torch.autograd.grad((-ratio * torch.tensor([2.0, -1.0])).sum(), log_probs)
    expect_close(found, expected, name="gradient", read=SEQUENCE)
    case("the same: at each token of a row, the losses' gradient reaches that token alone")
    losses, _ = rewards.policy_loss(
        log_probs, old, torch.tensor([2.0, -1.0]).double(), mask_of(MASK), 0.2, 0.2, "sequence"
    )
    (found,) = torch.autograd.grad(losses[0, 1], log_probs)
    expected = torch.zeros(2, 4, dtype=torch.float64)
    expected[0, 1] = -2 * first
    expect_close(found, expected, name="gradient of the loss of token 1", read=SEQUENCE)
    case("limits 0.05 and 0.05: the first row's ratio is 0.94, clipped for its positive advantage only if it is above")
    tight, fraction = rewards.policy_loss(
        log_probs, old, torch.tensor([-2.0, -1.0]).double(), mask_of(MASK), 0.05, 0.05, "sequence"
    )
    expect_close(tight[0, 1].detach(), torch.tensor(1.9, dtype=torch.float64), name="loss", read=CLIP)
    expect_fraction(fraction, torch.tensor(1.0), RETURNS)


def test_policy_loss_without_an_old_policy():
    case("old_log_probs=None: -A log p")
    log_probs, _ = ratios_as_log_probs()
    losses, fraction = rewards.policy_loss(log_probs, None, torch.tensor([2.0, -1.0]), mask_of(MASK))
    expected = torch.tensor([[-2.0], [1.0]]) * log_probs.detach() * mask_of(MASK)
    expect_close(losses.detach(), expected, name="losses", read=ARGS)
    expect_fraction(fraction, torch.tensor(0.0), ARGS)
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    expect_close(gradient, torch.tensor([[-2.0], [1.0]]) * mask_of(MASK), name="gradient", read=ARGS)


@every_mask
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_policy_loss_reads_nothing_masked(level, dtype):
    case(f"level={level!r}, a mask of {dtype}, NaN and infinity where it is 0")
    hidden = mask_of(MASK) == 0
    log_probs, old = ratios_as_log_probs()
    advantages = torch.tensor([[2.0], [-1.0]]).expand(2, 4)
    plain, fraction = rewards.policy_loss(log_probs, old, advantages, mask_of(MASK), level=level)
    (gradient,) = torch.autograd.grad(plain.sum(), log_probs)
    for bad in (NAN, INF, -INF):
        x = log_probs.detach().masked_fill(hidden, bad).requires_grad_()
        y, a = old.masked_fill(hidden, NAN), advantages.masked_fill(hidden, bad)
        losses, found = rewards.policy_loss(x, y, a, mask_of(MASK, dtype), level=level)
        expect_close(losses.detach(), plain.detach(), name="losses", read=ARGS)
        expect_fraction(found, fraction.float(), ARGS)
        expect_close(torch.autograd.grad(losses.sum(), x)[0], gradient, name="gradient", read=ARGS)
        losses, _ = rewards.policy_loss(x, None, a, mask_of(MASK, dtype), level=level)
        expect_true(bool(losses.detach()[hidden].eq(0).all()), "REINFORCE's losses where masked should be 0", read=ARGS)
    case(f"level={level!r}: a row without a token, and none in any row")
    losses, found = rewards.policy_loss(log_probs, old, advantages, torch.zeros(2, 4, dtype=dtype), level=level)
    expect_close(losses.detach(), torch.zeros(2, 4), name="losses", read=RETURNS)
    expect_fraction(found, torch.tensor(0.0), RETURNS)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_policy_loss_of_a_ratio_too_large_for_a_float(level):
    case(f"level={level!r}, log-ratios of 100, 100 and 30, advantages 1, 0 and -1")
    log_probs, old = torch.zeros(3, 1, requires_grad=True), torch.tensor([[-100.0], [-100.0], [-30.0]])
    losses, _ = rewards.policy_loss(log_probs, old, torch.tensor([1.0, 0.0, -1.0]), torch.ones(3, 1), level=level)
    expect_close(losses.detach(), torch.tensor([[-1.2], [0.0], [math.exp(30)]]), name="losses", read=RETURNS)
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    expect_close(gradient, torch.tensor([[0.0], [0.0], [math.exp(30)]]), name="gradient", read=RETURNS)


def test_policy_loss_has_one_gradient_and_no_third_clip():
    case("old_log_probs and advantages that require a gradient get none")
    log_probs, old = ratios_as_log_probs()
    old, advantages = old.requires_grad_(), torch.tensor([2.0, -1.0], requires_grad=True)
    losses, fraction = rewards.policy_loss(log_probs, old, advantages, mask_of(MASK))
    losses.sum().backward()
    expect_true(old.grad is None, "old_log_probs has a gradient: only log_probs gets one", read=ARGS)
    expect_true(advantages.grad is None, "advantages have a gradient: only log_probs gets one", read=ARGS)
    expect_true(not fraction.requires_grad, "clip_fraction has a gradient", read=RETURNS)
    case("a ratio of 100 with advantage -1: the loss is 100, there is no dual clip")
    losses, _ = rewards.policy_loss(
        torch.full((1, 1), math.log(100)), torch.zeros(1, 1), torch.tensor([-1.0]), torch.ones(1, 1)
    )
    expect_close(losses, torch.full((1, 1), 100.0), rtol=1e-5, name="losses", read=CLIP)
    case("a ratio of 2 with advantage 0: nothing is clipped, since both terms are 0")
    _, fraction = rewards.policy_loss(
        torch.full((1, 1), math.log(2)), torch.zeros(1, 1), torch.tensor([0.0]), torch.ones(1, 1)
    )
    expect_fraction(fraction, torch.tensor(0.0), RETURNS)


def test_policy_loss_refuses_another_level():
    for old in (torch.zeros(1, 1), None):
        case(f'level="word", {"with" if old is not None else "without"} old_log_probs')
        with expect_raises(ValueError, "word", read=RAISES):
            rewards.policy_loss(torch.zeros(1, 1), old, torch.zeros(1), torch.ones(1, 1), level="word")


# ---- importance_weights ----------------------------------------------------------------------------------------------


def weights_of(ratios: list[list[float]], mask: list[list[int]], dtype: torch.dtype = torch.bool, **settings) -> Tensor:
    rollout = torch.zeros(len(ratios), len(ratios[0])) - 1.5
    return rewards.importance_weights(rollout + torch.tensor(ratios).log(), rollout, mask_of(mask, dtype), **settings)


def test_importance_weights_by_hand():
    ratios, mask = [[0.5, 3.0, 1.2, 9.0], [0.25, 1.5, 1.0, 0.1]], [[1, 1, 1, 0], [1, 1, 0, 0]]
    nought = [0.0, 0.0]
    table: list[tuple[dict[str, Any], list[list[float]]]] = [
        ({}, [[0.5, 2.0, 1.2, 0.0], [0.25, 1.5, *nought]]),
        ({"floor": 0.4}, [[0.5, 2.0, 1.2, 0.0], [0.25, 1.5, *nought]]),
        ({"cap": 1.4}, [[0.5, 1.4, 1.2, 0.0], [0.25, 1.4, *nought]]),
        ({"mode": "mask", "floor": 0.4}, [[0.5, 0.0, 1.2, 0.0], [0.0, 1.5, *nought]]),
        ({"mode": "mask"}, [[0.5, 0.0, 1.2, 0.0], [0.25, 1.5, *nought]]),
        ({"level": "sequence"}, [[1.8, 1.8, 1.8, 0.0], [0.375, 0.375, *nought]]),
        ({"level": "sequence", "cap": 1.5}, [[1.5, 1.5, 1.5, 0.0], [0.375, 0.375, *nought]]),
        ({"level": "sequence", "mode": "mask", "floor": 0.4}, [[1.8, 1.8, 1.8, 0.0], [*nought, *nought]]),
    ]
    for settings, expected in table:
        case(f"ratios {ratios}, mask {mask}, {settings or 'the defaults'}")
        expect_close(weights_of(ratios, mask, **settings), torch.tensor(expected), read=WEIGHT)


def test_importance_weights_keep_the_logarithm_in_limits():
    case("ratios e**30 and e**-30, mode mask and truncate, cap=inf")
    x = torch.tensor([[30.0, -30.0]])
    for mode in ("truncate", "mask"):
        found = rewards.importance_weights(x, torch.zeros(1, 2), torch.ones(1, 2), mode=mode, cap=INF)
        expect_close(found.log(), torch.tensor([[20.0, -20.0]]), atol=1e-4, name="log of the weights", read=RETURNS)
    case("a sequence of log-ratios 30 and -25: the sum 5 is what is limited, not each")
    found = rewards.importance_weights(
        torch.tensor([[30.0, -25.0]]), torch.zeros(1, 2), torch.ones(1, 2), "sequence", cap=INF
    )
    expect_close(found, torch.full((1, 2), math.exp(5)), rtol=1e-5, read=RETURNS)
    case("limits are included: weights of exactly 1 with cap=1 and floor=1")
    found = rewards.importance_weights(
        torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), "token", "mask", 1.0, 1.0
    )
    expect_close(found, torch.ones(1, 2), read=ARGS)


@every_mask
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_read_nothing_masked(level, dtype):
    case(f"level={level!r}, a mask of {dtype}, NaN where it is 0, arguments with gradients")
    old, rollout = randn(2, 4), randn(2, 4, seed=1)
    mask = mask_of(MASK, dtype)
    expected = rewards.importance_weights(old, rollout, mask_of(MASK), level, cap=9.0)
    old, rollout = (x.masked_fill(mask == 0, bad).requires_grad_() for x, bad in ((old, NAN), (rollout, INF)))
    found = rewards.importance_weights(old, rollout, mask, level, cap=9.0)
    expect_close(found, expected, read=ARGS)
    expect_true(not found.requires_grad, "the weights have a gradient", read=RETURNS)
    case("bfloat16 log-probabilities give float32 weights")
    found = rewards.importance_weights(
        torch.full((1, 1), -3.0).bfloat16(), torch.full((1, 1), -3.015625).bfloat16(), torch.ones(1, 1)
    )
    expect_close(found, torch.full((1, 1), math.exp(0.015625)), read=RETURNS)


def test_importance_weights_refuse_other_names():
    for key in ("level", "mode"):
        case(f'{key}="other"')
        with expect_raises(ValueError, "other", read=RAISES):
            rewards.importance_weights(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), **{key: "other"})


# ---- agg_loss --------------------------------------------------------------------------------------------------------

LOSSES = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 9.0, 9.0, 9.0]]
COUNTED = [[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
TOTALS = {
    "token-mean": 12 / 4,
    "token-sum": 12.0,
    "seq-mean-token-sum": 12 / 2,
    "seq-mean-token-mean": (2 + 6) / 2,
    "seq-mean-token-sum-norm": 12 / 2 / 4,
}
every_aggregation = pytest.mark.parametrize("mode", TOTALS)


@every_aggregation
def test_agg_loss_by_hand(mode):
    case(f"{LOSSES}, mask {COUNTED}, {mode!r}")
    found = rewards.agg_loss(torch.tensor(LOSSES), mask_of(COUNTED), mode)
    expect_close(found, torch.tensor(TOTALS[mode]), read=AGGREGATE)
    case(f"the same with loss_scale_factor=10: it divides in one mode only, {mode!r}")
    expected = 12 / 2 / 10 if mode == "seq-mean-token-sum-norm" else TOTALS[mode]
    found = rewards.agg_loss(torch.tensor(LOSSES), mask_of(COUNTED), mode, loss_scale_factor=10)
    expect_close(found, torch.tensor(expected), read=AGGREGATE)
    case(f"the same on one of 3 ranks, of a batch with 20 tokens in 8 rows, {mode!r}")
    sums = {"token-mean": 12 / 20, "token-sum": 12.0, "seq-mean-token-mean": 8 / 8}
    expected = 3 * sums.get(mode, 12 / 8 / (4 if mode.endswith("norm") else 1))
    for count in (int, torch.tensor):
        found = rewards.agg_loss(torch.tensor(LOSSES), mask_of(COUNTED), mode, 3, count(20), count(8))
        expect_close(found, torch.tensor(expected), read=AGGREGATE)
    case(f"the same on one rank, as a micro-batch of a batch with 20 tokens in 8 rows, {mode!r}")
    found = rewards.agg_loss(torch.tensor(LOSSES), mask_of(COUNTED), mode, 1, 20, 8)
    expect_close(found, torch.tensor(expected / 3), read=AGGREGATE)


@every_aggregation
@every_mask
def test_agg_loss_reads_nothing_masked(mode, dtype):
    case(f"{mode!r}, a mask of {dtype}, NaN where it is 0")
    hidden = mask_of(COUNTED) == 0
    losses = torch.tensor(LOSSES).masked_fill(hidden, NAN).requires_grad_()
    found = rewards.agg_loss(losses, mask_of(COUNTED, dtype), mode)
    expect_close(found.detach(), torch.tensor(TOTALS[mode]), read=ARGS)
    (gradient,) = torch.autograd.grad(found, losses)
    expect_true(bool(gradient[hidden].eq(0).all()), "a masked place has a gradient", answer=gradient, read=ARGS)
    case(f"{mode!r}, nothing is unmasked: 0, with gradient 0")
    losses = torch.full((2, 3), NAN, requires_grad=True)
    found = rewards.agg_loss(losses, torch.zeros(2, 3, dtype=dtype), mode)
    expect_close(found.detach(), torch.tensor(0.0), read=RETURNS)
    expect_close(torch.autograd.grad(found, losses)[0], torch.zeros(2, 3), name="gradient", read=RETURNS)
    case(f"{mode!r}, nothing is unmasked in the whole batch either: counts of 0")
    found = rewards.agg_loss(torch.ones(2, 3), torch.zeros(2, 3, dtype=dtype), mode, 2, 0, 0)
    expect_close(found, torch.tensor(0.0), read=RETURNS)


@every_aggregation
def test_agg_loss_does_not_depend_on_cuts(mode):
    losses = randn(6, 5, dtype=torch.float64)
    mask = randn(6, 5, seed=1) > 0
    mask[4] = False
    case(f"{mode!r}: six rows at once, and on two ranks of two and four rows, in micro-batches of one")
    n_tokens, n_rows = int(mask.sum()), int(mask.any(-1).sum())
    parts = [
        sum(rewards.agg_loss(losses[n : n + 1], mask[n : n + 1], mode, 2, n_tokens, n_rows) for n in rows)
        for rows in ((0, 1), (2, 3, 4, 5))
    ]
    expect_close(sum(parts) / 2, rewards.agg_loss(losses, mask, mode), read=AGGREGATE)


def test_agg_loss_refuses_what_it_cannot_know():
    case("another mode")
    with expect_raises(ValueError, "seq-sum", read=RAISES):
        rewards.agg_loss(torch.ones(1, 1), torch.ones(1, 1), "seq-sum")
    for mode in TOTALS:
        missing = {"token-mean": "batch_num_tokens", "token-sum": None}.get(mode, "global_batch_size")
        given = {"batch_num_tokens": 5, "global_batch_size": 5}
        case(f"{mode!r} with dp_size=2, without {missing}")
        if missing is None:
            expect_close(rewards.agg_loss(torch.ones(1, 1), torch.ones(1, 1), mode, 2), torch.tensor(2.0), read=RETURNS)
            continue
        needed = given.pop(missing)
        with expect_raises(ValueError, missing, read=RAISES):
            rewards.agg_loss(torch.ones(1, 1), torch.ones(1, 1), mode, 2, **given)
        case(f"{mode!r} with dp_size=2, with {missing} alone")
        found = rewards.agg_loss(torch.ones(1, 1), torch.ones(1, 1), mode, 2, **{missing: needed})
        expect_close(found, torch.tensor(2 / 5), read=RAISES)
