"""The training loop, graded: against PyTorch's own where it has one, and by what is left when a save is cut short."""

import io
import json
import math
import os
import pickle
import random
import shutil
import signal
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds: better here than in a check's time
from torch import Tensor, nn
from torch.nn import functional

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle
from tests.inputs import randn
from tests.observe import HostReads

training = graded("training")

LOSS, MOMENTS, CORRECTED, DECAY, COSINE, CLIP, SHARE, YARDSTICK = (f"eq-training-{n}" for n in (1, 2, 3, 4, 5, 6, 8, 9))
WINDOWS, BATCHES = "eq-training-7", "the contract of ex-training-tokenbatches"
SAVE = "the contract of ex-training-save-checkpoint"
READ = f"{SAVE}; it reads through load_checkpoint: if only the random states of ex-training-load-checkpoint fail, "
READ += "fix that first"
LOAD = "the contract of ex-training-load-checkpoint; it reads what ex-training-save-checkpoint wrote: fix that first"


def draw(n: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(seed))


# ---- cross_entropy ---------------------------------------------------------------------------------------------------


def test_cross_entropy_by_hand():
    case(
        "two rows of three logits, ln 1, ln 2, ln 5 (probabilities 1/8, 2/8, 5/8) and ln 1, ln 1, ln 2; targets 1 and 2"
    )
    logits = torch.tensor([[1.0, 2.0, 5.0], [1.0, 1.0, 2.0]]).log()
    expected = torch.tensor((math.log(4.0) + math.log(2.0)) / 2)
    expect_close(training.cross_entropy(logits, torch.tensor([1, 2])), expected, read=LOSS)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (2, 5, 11), (2, 1, 3, 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_cross_entropy_equals_torch(shape, seed):
    case(f"logits {list(shape)}, targets {list(shape[:-1])}, float32")
    logits, targets = 3 * randn(*shape, seed=seed), draw(shape[-1], *shape[:-1], seed=seed)
    expected = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
    expect_close(training.cross_entropy(logits, targets), expected, atol=1e-5, read=LOSS)


def test_cross_entropy_of_huge_logits():
    case("logits 10,000, 0 and -10,000 in every order, float32: exp(10,000) is infinite")
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, 1e4, 0.0], [0.0, -1e4, 1e4]])
    targets = torch.tensor([1, 1, 0])
    expected = functional.cross_entropy(logits, targets)
    expect_close(training.cross_entropy(logits, targets), expected, read=LOSS)


def test_cross_entropy_of_rows_at_different_levels():
    case("logits 1000, 1002, 1001; 3, 1, 2; -1000, -1003, -1001, float32: each row has a maximum of its own")
    logits = torch.tensor([[1000.0, 1002.0, 1001.0], [3.0, 1.0, 2.0], [-1000.0, -1003.0, -1001.0]])
    targets = torch.tensor([0, 1, 2])
    expected = functional.cross_entropy(logits, targets)
    expect_close(training.cross_entropy(logits, targets), expected, read=LOSS)


def test_cross_entropy_of_a_class_that_is_ruled_out():
    case("logits 0, -inf, 0; target 0: a class of probability 0 that is not asked for")
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    expect_close(training.cross_entropy(logits, torch.tensor([0])), torch.tensor(math.log(2.0)), read=LOSS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_cross_entropy_counts_wide_and_keeps_the_dtype(dtype):
    case(f"logits [40, 5000], {str(dtype)[6:]}: a sum of 5000 terms")
    logits, targets = randn(40, 5000, dtype=dtype), draw(5000, 40)
    expected = functional.cross_entropy(logits.double(), targets).to(dtype)
    atol = {torch.float16: 4e-3, torch.bfloat16: 3.2e-2, torch.float64: 1e-12}[dtype]
    found = training.cross_entropy(logits, targets)
    expect_close(found, expected, atol=atol, read="the contract, under Returns")


def test_cross_entropy_of_more_classes_than_float16_can_count():
    case("logits 0 for each of 70,000 classes, float16: the sum of their exp is 70,000, and float16 ends at 65,504")
    expected = torch.tensor(math.log(70_000), dtype=torch.float16)
    found = training.cross_entropy(torch.zeros(1, 70_000, dtype=torch.float16), torch.tensor([69_999]))
    expect_close(found, expected, atol=1e-2, read="the contract, under Returns: computed in float32 at least")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_cross_entropy_takes_integers_and_strides(dtype):
    case(f"logits [3, 4, 5] transposed from [4, 3, 5], targets {str(dtype)[6:]}")
    logits, targets = randn(4, 3, 5).transpose(0, 1), draw(5, 4, 3).T.to(dtype)
    before = logits.clone()
    expected = functional.cross_entropy(logits.reshape(-1, 5), targets.reshape(-1).long())
    expect_close(training.cross_entropy(logits, targets), expected, atol=1e-5, read=LOSS)
    expect_close(logits, before, name="logits afterwards")


def test_cross_entropy_passes_gradients():
    case("logits [3, 4], float64: softmax minus one at the target, over 3; once more with logits around 10,000")
    targets = torch.tensor([3, 0, 0])
    for offset in (0.0, 1e4):
        logits = (randn(3, 4, dtype=torch.float64) + offset).requires_grad_()
        (found,) = torch.autograd.grad(training.cross_entropy(logits, targets), logits)
        expected = (logits.softmax(-1) - functional.one_hot(targets, 4)).detach() / 3
        expect_close(found, expected, atol=1e-9, name="gradient", read=LOSS)


@oracle
def test_cross_entropy_shifts_with_the_logits():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(max_examples=30, deadline=None)
    @given(st.integers(1, 6), st.integers(1, 9), st.floats(-1e4, 1e4), st.integers(0, 99))
    def check(n, v, shift, seed):
        case(f"logits [{n}, {v}] float64, seed {seed}, and the same plus {shift}")
        logits, targets = randn(n, v, seed=seed, dtype=torch.float64), draw(v, n, seed=seed)
        plain, shifted = training.cross_entropy(logits, targets), training.cross_entropy(logits + shift, targets)
        expect_close(shifted, plain, atol=1e-9, read=LOSS)

    check()


# ---- AdamW -----------------------------------------------------------------------------------------------------------

SETTINGS = [
    {},
    {"lr": 0.1},
    {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 0.02, "betas": (0.0, 0.5), "eps": 1e-2, "weight_decay": 0.0},
    {"lr": 0.05, "weight_decay": 2.0},
]


def numpy_state() -> list[int]:
    """The state of NumPy's global generator."""
    return np.random.get_state(legacy=False)["state"]["key"].tolist()


def two_copies(*shapes, dtype=torch.float32, seed=0) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    values = [randn(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]
    return [nn.Parameter(v.clone()) for v in values], [nn.Parameter(v.clone()) for v in values]


def set_gradients(mine, theirs, seed):
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        a.grad = randn(*a.shape, seed=1000 * seed + i, dtype=a.dtype)
        b.grad = a.grad.clone()


def values(parameters) -> list[Tensor]:
    return [p.detach().clone() for p in parameters]


def expect_steps(start, gradients, expected, read, **settings) -> None:
    """The weights after each step, beside those that were worked out by hand."""
    weight = nn.Parameter(torch.tensor(start))
    optimizer = training.AdamW([weight], **settings)
    found = []
    for gradient in gradients:
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        found.append(weight.detach().clone())
    names = [f"the weights after step {step}" for step in range(1, len(found) + 1)]
    for name, after, wanted in zip(names, found, expected, strict=True):
        expect_close(after, torch.tensor(wanted), atol=1e-6, name=name, answer=found, read=read)


PLAIN = {"lr": 0.125, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}


def test_AdamW_divides_by_the_root():
    case(
        "weights 2 and -1, gradients 0.5 and -4; lr=0.125, no memory, no eps, no decay: a step of lr whatever "
        "the gradient"
    )
    expect_steps([2.0, -1.0], [[0.5, -4.0]], [[1.875, -0.875]], MOMENTS, **PLAIN)


def test_AdamW_decays_the_weight():
    case("weights 2 and -8, gradients 0, lr=0.125, weight_decay=0.5, eps=1: each step takes 1/16 of the weight off")
    settings = PLAIN | {"eps": 1.0, "weight_decay": 0.5}
    expect_steps([2.0, -8.0], [[0.0, 0.0]] * 2, [[1.875, -7.5], [1.7578125, -7.03125]], DECAY, **settings)


def test_AdamW_adds_eps_to_the_root():
    case(
        "weights 2 and -1, gradients 0.5 and -4, lr=0.125, eps=0.5, no memory, no decay: 0.5 / (0.5 + 0.5) and "
        "-4 / (4 + 0.5)"
    )
    expect_steps([2.0, -1.0], [[0.5, -4.0]], [[1.9375, -8 / 9]], CORRECTED, **PLAIN | {"eps": 0.5})


def test_AdamW_corrects_the_mean():
    case("weights 2 and -1, gradients 0.5 and -4, then 1.5 and 1; betas=(0.75, 0), lr=0.125, no eps, no decay")
    # step 1: m / (1 - 0.75) is the gradient
    # step 2: (0.75 * 0.125 + 0.25 * 1.5) / (7 / 16) and (-0.75 + 0.25) / (7 / 16)
    second = [1.875 - 0.125 * (0.46875 * 16 / 7) / 1.5, -0.875 - 0.125 * (-0.5 * 16 / 7) / 1.0]
    settings = PLAIN | {"betas": (0.75, 0.0)}
    expect_steps([2.0, -1.0], [[0.5, -4.0], [1.5, 1.0]], [[1.875, -0.875], second], CORRECTED, **settings)


def test_AdamW_corrects_the_mean_square():
    case("weights 2 and -1, gradients 0.5 and -4, then 1.5 and 1; betas=(0, 0.75), lr=0.125, no eps, no decay")
    # step 2: the mean squares are (0.75 * 0.0625 + 0.25 * 2.25) / (7 / 16) = 1.392857
    # and (3 + 0.25) / (7 / 16) = 7.428571
    roots = [math.sqrt(0.609375 * 16 / 7), math.sqrt(3.25 * 16 / 7)]
    second = [1.875 - 0.125 * 1.5 / roots[0], -0.875 - 0.125 * 1.0 / roots[1]]
    settings = PLAIN | {"betas": (0.0, 0.75)}
    expect_steps([2.0, -1.0], [[0.5, -4.0], [1.5, 1.0]], [[1.875, -0.875], second], CORRECTED, **settings)


def test_AdamW_by_hand():
    case("weights 2 and -1, gradients 0.5 and -4, then 1 and 3; lr=0.1, betas=(0.5, 0.75), eps=0.25, weight_decay=0.5")
    expected, m, v = [[2.0, -1.0]], [0.0, 0.0], [0.0, 0.0]
    gradients = [[0.5, -4.0], [1.0, 3.0]]
    for step, gradient in enumerate(gradients, start=1):
        after = []
        for i, g in enumerate(gradient):
            m[i], v[i] = 0.5 * m[i] + 0.5 * g, 0.75 * v[i] + 0.25 * g * g
            update = m[i] / (1 - 0.5**step) / (math.sqrt(v[i] / (1 - 0.75**step)) + 0.25)
            after.append(expected[-1][i] * (1 - 0.1 * 0.5) - 0.1 * update)
        expected.append(after)
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.75), "eps": 0.25, "weight_decay": 0.5}
    expect_steps([2.0, -1.0], gradients, expected[1:], f"{CORRECTED} and eq-training-4", **settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_AdamW_equals_torch(settings):
    case(f"parameters [3, 4], [5] and [], float64, 40 steps, {settings or 'the defaults'}")
    mine, theirs = two_copies((3, 4), (5,), (), dtype=torch.float64)  # any order of the operations is precise enough
    a, b = training.AdamW(mine, **settings), torch.optim.AdamW(theirs, **settings)
    for step in range(40):
        set_gradients(mine, theirs, step)
        a.step()
        b.step()
    expect_close(values(mine), values(theirs), atol=2e-5, name="weights", read=f"{MOMENTS} to eq-training-4")


def test_AdamW_has_an_eps_of_1e_8():
    case(
        "a parameter [3] whose gradients are around 1e-8, 5 steps, the defaults: there, eps weighs as much as the root"
    )
    mine, theirs = two_copies((3,))
    a, b = training.AdamW(mine), torch.optim.AdamW(theirs)
    for step in range(5):
        set_gradients(mine, theirs, step)
        mine[0].grad *= 1e-8
        theirs[0].grad *= 1e-8
        a.step()
        b.step()
    expect_close(values(mine), values(theirs), atol=2e-6, name="weights", read="the contract")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_AdamW_in_other_dtypes(dtype):
    case(f"parameters [4, 3] and [2], {str(dtype)[6:]}, 10 steps")
    mine, theirs = two_copies((4, 3), (2,), dtype=dtype)
    a, b = training.AdamW(mine, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    for step in range(10):
        set_gradients(mine, theirs, step)
        a.step()
        b.step()
    atol = {torch.float64: 1e-6, torch.bfloat16: 2e-2}[dtype]  # a step count in float32 is precise enough
    expect_close(values(mine), values(theirs), atol=atol, name="weights", read=f"{MOMENTS} to eq-training-4")
    state, kept = a.state[mine[0]], ("exp_avg", "exp_avg_sq")
    dtypes = {name: str(state[name].dtype) if name in state else "missing" for name in kept}
    expect_equal(
        dtypes, dict.fromkeys(kept, str(dtype)), name="dtypes of the state", read="the contract, under Attributes"
    )


def test_AdamW_is_an_optimizer_with_groups():
    case("two groups, lr 0.1 with decay 0.5 and the defaults; a scheduler halves the rates after two steps")
    mine, theirs = two_copies((2, 3), (3,))
    expect_true(
        isinstance(training.AdamW(mine), torch.optim.Optimizer), "AdamW should be a torch.optim.Optimizer", read=DECAY
    )
    pairs = []
    for kind, (weight, bias) in ((training.AdamW, mine), (torch.optim.AdamW, theirs)):
        groups: list[Any] = [{"params": [weight], "lr": 0.1, "weight_decay": 0.5}, {"params": iter([bias])}]
        optimizer = kind(groups, lr=0.01)
        pairs.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)))
    for step in range(5):
        set_gradients(mine, theirs, step)
        for optimizer, schedule in pairs:
            optimizer.step()
            schedule.step()
    expect_close(values(mine), values(theirs), atol=2e-6, name="weights", read=DECAY)


def test_AdamW_skips_what_has_no_gradient():
    case("the second of two weights has no gradient in steps 1 and 2 and one in step 3: there, its own first step")
    mine, theirs = two_copies((3,), (2,))
    a, b = (kind(p, lr=0.1, weight_decay=0.5) for kind, p in ((training.AdamW, mine), (torch.optim.AdamW, theirs)))
    had_state = False
    for step in range(3):
        set_gradients(mine, theirs, step)
        if step < 2:
            mine[1].grad = theirs[1].grad = None
        a.step()
        b.step()
        had_state = had_state or (step < 2 and bool(a.state.get(mine[1])))
    expect_close(values(mine), values(theirs), atol=2e-6, name="weights", read="the contract, step")
    problem = "the second weight had a state before its first gradient"
    expect_true(not had_state, problem, answer=had_state, read="the contract, under Attributes")


def test_AdamW_leaves_gradients_and_storage():
    case("one step with decay 0.1 on a weight [3, 2] whose gradient is a transposed view")
    weight = nn.Parameter(randn(3, 2))
    weight.grad = randn(2, 3, seed=1).T
    gradient, pointer = weight.grad.clone(), weight.data_ptr()
    training.AdamW([weight], lr=0.1, weight_decay=0.1).step()
    expect_close(weight.grad, gradient, name="the gradient afterwards", read=DECAY)
    expect_equal(weight.data_ptr() == pointer, True, name="updated in place", read="the contract, step")


def test_AdamW_takes_a_closure():
    case("w=3, loss w^2 from a closure, called under no_grad")
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer, calls = training.AdamW([weight], lr=0.5, weight_decay=0.0), []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    expect_equal(len(calls), 1, name="calls of the closure")
    loss = loss.detach() if isinstance(loss, Tensor) else loss
    expect_close(loss, torch.tensor(9.0), name="what step returns", read="the contract, step")
    expect_close(weight.detach().clone(), torch.tensor([2.5]), atol=1e-5, name="the weight", read=CORRECTED)
    expect_true(training.AdamW([weight]).step() is None, "step() without a closure should return None")


@pytest.mark.parametrize(("first", "second"), [("ours", "ours"), ("ours", "PyTorch's"), ("PyTorch's", "ours")])
def test_AdamW_state_goes_on_elsewhere(first, second):
    case(
        f"3 steps of {first} AdamW, then 3 of {second}, new, which takes its state_dict(); beside 6 steps of PyTorch's"
    )
    kinds = {"ours": lambda *a, **k: training.AdamW(*a, **k), "PyTorch's": torch.optim.AdamW}
    mine, theirs = two_copies((2, 3), (3,))
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.2}
    a, b = kinds[first](mine, **settings), torch.optim.AdamW(theirs, **settings)
    for step in range(6):
        if step == 3:
            state = a.state_dict()
            a = kinds[second](mine, lr=99.0)
            a.load_state_dict(state)
        set_gradients(mine, theirs, step)
        a.step()
        b.step()
    read = "the contract, under Attributes"
    expect_close(values(mine), values(theirs), atol=2e-6, name="weights", read=read)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"lr": -0.5}, "-0.5"),
        ({"eps": -1e-8}, "-1e-08"),
        ({"weight_decay": -0.1}, "-0.1"),
        ({"betas": (0.9, 1.0)}, "1.0"),
        ({"betas": (1.0, 0.999)}, "1.0"),
        ({"betas": (1.25, 0.5)}, "1.25"),
        ({"betas": (0.5, -0.25)}, "-0.25"),
        ({"betas": (-0.25, 0.5)}, "-0.25"),
    ],
    ids=str,
)
def test_AdamW_refuses(settings, value):
    case(f"{settings}")
    with expect_raises(ValueError, value, read="the contract, under Raises"):
        training.AdamW([nn.Parameter(torch.zeros(1))], **settings)


def test_AdamW_takes_settings_of_zero():
    case("lr=0, betas=(0, 0), eps=0, weight_decay=0: at their bounds, and so allowed; the weight stays where it is")
    weight = nn.Parameter(torch.tensor([2.0]))
    weight.grad = torch.tensor([3.0])
    training.AdamW([weight], lr=0.0, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0).step()
    expect_close(
        weight.detach().clone(),
        torch.tensor([2.0]),
        name="the weight",
        read="the contract, under Raises",
    )


# ---- parameter_groups ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is also the head, a norm, a convolution, a linear map; and a scalar."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.patches = nn.Conv2d(1, 4, 2)
        self.linear = nn.Linear(4, 3)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.wte.weight
        self.scale = nn.Parameter(torch.tensor(1.0))


def names_in(model: nn.Module, groups) -> list[list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        kind = type(group["params"]).__name__
        expect_equal(kind, "list", name="type of params", answer=kind, read="the contract, under Returns")
    return [[names.get(id(p), "no parameter of the model") for p in group["params"]] for group in groups]


def test_parameter_groups_by_dimensions():
    case(
        "an embedding tied to the head, a layer norm, a convolution, a linear map with bias, a scalar; weight_decay=0.3"
    )
    model = Tied()
    groups = training.parameter_groups(model, 0.3)
    read = "the contract"
    found = [group.get("weight_decay") for group in groups]
    expect_equal(found, [0.3, 0.0], name="weight_decay of the groups", read=read)
    decays = ["wte.weight", "patches.weight", "linear.weight"]
    rest = ["scale", "norm.weight", "norm.bias", "patches.bias", "linear.bias"]
    expect_equal(names_in(model, groups), [decays, rest], name="groups", read=read)


def test_parameter_groups_leave_out_what_is_frozen():
    case("the same model, its embedding (and so its head) and the norm's bias frozen")
    model = Tied()
    model.wte.weight.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    decays, rest = ["patches.weight", "linear.weight"], ["scale", "norm.weight", "patches.bias", "linear.bias"]
    found = names_in(model, training.parameter_groups(model, 0.1))
    expect_equal(found, [decays, rest], name="groups", read="the contract, under Returns")


def test_parameter_groups_of_one_kind():
    case("a linear map without bias, then a layer norm alone: one group is empty, and an optimizer takes both")
    for model, sizes in ((nn.Linear(3, 2, bias=False), [1, 0]), (nn.LayerNorm(3), [0, 2])):
        groups = training.parameter_groups(model, weight_decay=0.3)
        expect_equal([len(list(g["params"])) for g in groups], sizes, name="sizes", read="the contract")
        torch.optim.AdamW(training.parameter_groups(model, weight_decay=0.3))


# ---- cosine_schedule -------------------------------------------------------------------------------------------------


def test_cosine_schedule_by_hand():
    case("max_lr=8, min_lr=2, warmup_steps=4, max_steps=10: steps 0 to 12")
    half = [2 + 3 * (1 + math.cos(math.pi * i / 6)) for i in range(7)]
    expected = [0.0, 2.0, 4.0, 6.0, *half, 2.0, 2.0]
    found = [training.cosine_schedule(step, 8.0, 2.0, 4, 10) for step in range(13)]
    expect_close(found, expected, atol=1e-12, name="rate", read=COSINE)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (1, 2), (715, 19073), (3, 4)])
def test_cosine_schedule_equals_torch(warmup, steps):
    case(f"max_lr=6e-4, min_lr=6e-5, warmup_steps={warmup}, max_steps={steps}, beside CosineAnnealingLR")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=6e-4)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup, 6e-5)
    for step in range(warmup, min(steps, warmup + 50) + 1):
        found = training.cosine_schedule(step, 6e-4, 6e-5, warmup, steps)
        expect_close(found, oracle.get_last_lr()[0], atol=1e-11, rtol=1e-7, name=f"rate of step {step}", read=COSINE)
        optimizer.step()
        oracle.step()


def test_cosine_schedule_at_its_ends():
    read = "the contract"
    case("warmup_steps=0, max_steps=5: steps 0, 5, 6 and 1000")
    found = [training.cosine_schedule(step, 1.0, 0.1, 0, 5) for step in (0, 5, 6, 1000)]
    expect_close(found, [1.0, 0.1, 0.1, 0.1], name="rate", read=read)
    case("warmup_steps=5, max_steps=5: steps 4 and 5")
    expect_close([training.cosine_schedule(s, 1.0, 0.1, 5, 5) for s in (4, 5)], [0.8, 0.1], name="rate", read=read)
    for step in (3, 25, 40):
        case(f"warmup_steps=31, max_steps=30, step={step}")
        with expect_raises(ValueError, "31", "30", read=read):
            training.cosine_schedule(step, 1.0, 0.1, 31, 30)


# ---- clip_gradient_norm_ ---------------------------------------------------------------------------------------------


def with_gradients(*gradients) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameters.append(nn.Parameter(torch.zeros(1) if gradient is None else torch.zeros_like(gradient)))
        parameters[-1].grad = None if gradient is None else gradient.clone()
    return parameters


def gradients_of(parameters) -> list[Tensor]:
    return [p.grad.clone() for p in parameters if p.grad is not None]


def expect_norm(norm, expected: float, *, rtol: float = 3e-6, read: str = CLIP) -> None:
    """Expect a scalar tensor of any floating dtype with this value."""
    is_scalar = isinstance(norm, Tensor) and norm.ndim == 0 and norm.is_floating_point()
    expect_true(is_scalar, "the norm before should be a scalar tensor", answer=norm, read=read)
    wide = torch.tensor(expected, dtype=torch.float64)
    expect_close(norm.double(), wide, rtol=rtol, atol=0, name="the norm before", answer=norm, read=read)


def test_clip_gradient_norm__by_hand():
    case("gradients [3, 0], none, and [[4], [12]]: together they have the norm 13; max_norm=2")
    three, four = torch.tensor([3.0, 0.0]), torch.tensor([[4.0], [12.0]])
    parameters = with_gradients(three, None, four)
    norm = training.clip_gradient_norm_(parameters, 2.0)
    expect_close(gradients_of(parameters), [three * 2 / 13, four * 2 / 13], atol=1e-5, name="gradients", read=CLIP)
    expect_norm(norm, 13.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3])
def test_clip_gradient_norm__equals_torch(dtype, max_norm):
    case(f"gradients [3, 4], [5], [2, 1, 2] and [], {str(dtype)[6:]}, max_norm={max_norm}")
    gradients = [randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(3, 4), (5,), (2, 1, 2), ()])]
    mine, theirs = with_gradients(*gradients), with_gradients(*gradients)
    norm = training.clip_gradient_norm_(mine, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    expect_norm(norm, expected.item())
    expect_close(gradients_of(mine), gradients_of(theirs), atol=1e-6, name="gradients", read=CLIP)


def test_clip_gradient_norm__of_tiny_gradients():
    case("gradients [3e-7] and [-4e-7], of norm 5e-7, below the 1e-6 of the factor; max_norm=1: they stay as they are")
    read = "the contract, under Source"
    tiny = [torch.tensor([3e-7]), torch.tensor([-4e-7])]
    parameters = with_gradients(*tiny)
    norm = training.clip_gradient_norm_(parameters, 1.0)
    expect_close(gradients_of(parameters), tiny, rtol=1e-5, atol=0, name="gradients", read=read)
    expect_norm(norm, 5e-7, rtol=1e-5, read=read)
    case("gradients [3e-6] and [-4e-6], of norm 5e-6, max_norm=3e-6: the factor is 3e-6 / (5e-6 + 1e-6), one half")
    small = [torch.tensor([3e-6]), torch.tensor([-4e-6])]
    parameters = with_gradients(*small)
    training.clip_gradient_norm_(parameters, 3e-6)
    expect_close(gradients_of(parameters), [g / 2 for g in small], rtol=1e-5, atol=0, name="gradients", read=read)
    case("gradients of 0, max_norm=1: they stay 0")
    parameters = with_gradients(torch.zeros(2))
    training.clip_gradient_norm_(parameters, 1.0)
    expect_close(gradients_of(parameters), [torch.zeros(2)], name="gradients", read=read)


def test_clip_gradient_norm__where_squares_overflow():
    case(
        "1000 gradients of 300 in float16, in one tensor and in five: their norm is 9487; 300 squared is infinite there"
    )
    read = "the contract, under Returns"
    for n_tensors in (1, 5):
        parameters = with_gradients(*[torch.full((1000 // n_tensors,), 300.0, dtype=torch.float16)] * n_tensors)
        norm = training.clip_gradient_norm_(parameters, 1.0)
        expected = [torch.full((1000 // n_tensors,), 300 / 9486.8, dtype=torch.float16)] * n_tensors
        expect_close(gradients_of(parameters), expected, rtol=5e-3, atol=0, name="gradients", read=read)
        expect_norm(norm, 9486.8, rtol=2e-3, read=read)


def test_clip_gradient_norm__takes_generators_single_tensors_and_nothing():
    read = "the contract, under Args"
    case("a generator of two parameters with gradients [3] and [4], max_norm=1")
    parameters = with_gradients(torch.tensor([3.0]), torch.tensor([4.0]))
    norm = training.clip_gradient_norm_((p for p in parameters), 1.0)
    expected = [torch.tensor([0.6]), torch.tensor([0.8])]
    expect_close(gradients_of(parameters), expected, atol=1e-5, name="gradients", read=read)
    expect_norm(norm, 5.0, read=read)
    case("one parameter, not in a list, with the gradient [3, 4]")
    (alone,) = with_gradients(torch.tensor([3.0, 4.0]))
    expect_norm(training.clip_gradient_norm_(alone, 10.0), 5.0, read=read)
    case("no gradient at all")
    expect_norm(training.clip_gradient_norm_(with_gradients(None), 1.0), 0.0, read=read)


def test_clip_gradient_norm__works_in_place():
    case("a parameter whose gradient is a view of a flat buffer, as chapter 10's are; norm 5, max_norm=1")
    buffer = torch.tensor([3.0, 4.0])
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = buffer[:]
    training.clip_gradient_norm_([parameter], 1.0)
    expect_close(buffer, torch.tensor([0.6, 0.8]), atol=1e-5, name="the buffer", read="the contract")


def test_clip_gradient_norm__brings_nothing_to_the_host():
    case("gradients [3] and [4], max_norm=1 and max_norm=100: item(), float() and if are counted")
    for max_norm in (1.0, 100.0):
        parameters = with_gradients(torch.tensor([3.0]), torch.tensor([4.0]))
        with HostReads() as host:
            training.clip_gradient_norm_(parameters, max_norm)
        expect_equal(host.n, 0, name="values copied to the host", read="the contract, under Cost")
    case("gradients on the meta device, which have a shape and no values")
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    parameter.grad = torch.zeros(3, device="meta")
    norm = training.clip_gradient_norm_([parameter], 1.0)
    expect_equal(str(norm.device), "meta", name="the norm's device", read="the contract, under Cost")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_clip_gradient_norm__does_not_wait_for_the_gpu():
    case("gradients on the GPU, torch.cuda.set_sync_debug_mode('error')")
    parameters = with_gradients(torch.ones(3, device="cuda"), torch.ones(4, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = training.clip_gradient_norm_(parameters, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expect_close(norm.cpu(), torch.tensor(math.sqrt(7.0)), name="the norm before", read=CLIP)


# ---- TokenBatches ----------------------------------------------------------------------------------------------------


def take(batches, n: int) -> list[tuple[list[list[int]], list[list[int]]]]:
    """The next n batches as lists."""
    taken: list[Any] = []
    for _ in range(n):
        batch = next(batches, None)
        expect_true(batch is not None, "the iterator stopped, but it should be endless", read=BATCHES)
        taken.append(tuple(rows.tolist() for rows in batch))
    return taken


def firsts(batches, n: int) -> list[int]:
    """The first token of every window of the next n batches: with tokens 0, 1, 2, ... its place."""
    return [row[0] for inputs, _ in take(batches, n) for row in inputs]


def test_TokenBatches_by_hand():
    case("tokens 0 to 11, batch=2, length=2: five windows, and the third batch takes the last and, again, the first")
    batches = training.TokenBatches(list(range(12)), 2, 2)
    expected = [
        ([[0, 1], [2, 3]], [[1, 2], [3, 4]]),
        ([[4, 5], [6, 7]], [[5, 6], [7, 8]]),
        ([[8, 9], [0, 1]], [[9, 10], [1, 2]]),
        ([[2, 3], [4, 5]], [[3, 4], [5, 6]]),
    ]
    expect_equal(take(batches, 4), expected, name="batches", read=WINDOWS)


@pytest.mark.parametrize("seed", [None, 0, 8])
def test_TokenBatches_row_by_row_across_an_epoch(seed):
    case(
        f"58 tokens, batch=2, length=3 (19 windows), 3 ranks, seed={seed}: 16 steps, row by row, beside one "
        "rank of batch 1"
        " (step 3, rank 0: its first row is the last of epoch 0, its second the first of epoch 1)"
    )
    ranks = [training.TokenBatches(range(58), 2, 3, rank, 3, seed) for rank in range(3)]
    found = [first for _ in range(16) for one in ranks for first in firsts(one, 1)]
    expected = firsts(training.TokenBatches(range(58), 1, 3, seed=seed), 96)
    read = f"{WINDOWS}: each row has its own p, and so its own epoch"
    expect_equal(found, expected, name="first tokens in the order of p", read=read)


def test_TokenBatches_gives_int64_rows_that_can_be_viewed():
    case("tokens 0 to 30, batch=3, length=4")
    inputs, targets = next(training.TokenBatches(torch.arange(31), 3, 4))
    expect_close(inputs, torch.arange(12).view(3, 4), name="inputs", read=WINDOWS)
    expect_close(targets, torch.arange(1, 13).view(3, 4), name="targets", read=WINDOWS)
    expect_true(inputs.is_contiguous() and targets.is_contiguous(), "inputs and targets should be contiguous")


def test_TokenBatches_is_an_iterator():
    case("iter() does not start over: one batch by next, one by a for loop")
    batches = training.TokenBatches(range(100), 1, 3)
    found = firsts(batches, 1)
    for inputs, _ in batches:
        found.append(inputs[0, 0].item())
        break
    expect_equal([*found, *firsts(iter(batches), 1)], [0, 3, 6], name="first tokens", read=BATCHES)


@pytest.mark.parametrize(
    ("n_tokens", "batch", "length", "world_size"),
    [(13, 1, 4, 3), (31, 2, 3, 2), (50, 3, 2, 4), (7, 1, 1, 1), (58, 2, 3, 3), (23, 4, 2, 2)],
)
@pytest.mark.parametrize("seed", [None, 0, 5])
def test_TokenBatches_uses_every_window_once_an_epoch(n_tokens, batch, length, world_size, seed):
    case(f"tokens 0 to {n_tokens - 1}, batch={batch}, length={length}, {world_size} ranks, seed={seed}: three epochs")
    n = (n_tokens - 1) // length
    ranks = [
        training.TokenBatches(list(range(n_tokens)), batch, length, r, world_size, seed) for r in range(world_size)
    ]
    expect_equal(ranks[0].n_windows, n, name="n_windows", read=BATCHES)
    given: list[Any] = []
    while len(given) < 3 * n:
        for one in ranks:
            given += firsts(one, 1)
    for epoch in range(3):
        once = sorted(given[epoch * n : (epoch + 1) * n])
        expected = list(range(0, n * length, length))
        expect_equal(once, expected, name=f"first tokens of epoch {epoch}, sorted", read=WINDOWS)


def test_TokenBatches_gives_ranks_different_windows():
    case("tokens 0 to 24, batch=2, length=2, 3 ranks: the windows of two steps")
    found = [firsts(training.TokenBatches(range(25), 2, 2, rank, 3), 2) for rank in range(3)]
    expected = [[0, 2, 12, 14], [4, 6, 16, 18], [8, 10, 20, 22]]
    expect_equal(found, expected, name="first tokens of each rank", read=WINDOWS)


def test_TokenBatches_shuffles_anew_each_epoch():
    case("61 tokens, length=1, seed=3 twice, seed=4 and seed=0: two epochs of 60")
    one, same, other, zero = [firsts(training.TokenBatches(range(61), 10, 1, seed=seed), 12) for seed in (3, 3, 4, 0)]
    read = f"{BATCHES}, under seed"
    expect_equal(same, one, name="first tokens, the second time", read=read)
    expect_true(one[:60] != list(range(60)), "with a seed the windows still come in order", read=read)
    expect_true(one[:60] != one[60:], "both epochs have the same order", read=read)
    expect_true(one[:60] != other[:60], "seeds 3 and 4 give the same order", read=read)
    expect_true(zero[:60] != list(range(60)), "with seed=0 the windows come in order: 0 is a seed, too", read=read)
    expect_true(one[60:] != other[:60], "epoch 1 of seed 3 is epoch 0 of seed 4: mix seed and epoch", read=read)


def test_TokenBatches_leaves_the_random_numbers_alone():
    case("seed=0, two epochs; the global generators of PyTorch, NumPy and Python before and after")
    torch_before, numpy_before = torch.get_rng_state(), numpy_state()
    torch.manual_seed(0)
    one = firsts(training.TokenBatches(range(20), 1, 1, seed=0), 40)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    expect_true(torch.equal(state, torch.get_rng_state()), "PyTorch's global random numbers were used", read=BATCHES)
    torch.manual_seed(1)
    np.random.seed(1)
    expect_equal(firsts(training.TokenBatches(range(20), 1, 1, seed=0), 40), one, name="first tokens", read=BATCHES)
    np.random.seed(2)
    random.seed(2)
    numpy_before, python_before = numpy_state(), random.getstate()
    firsts(training.TokenBatches(range(20), 1, 1, seed=0), 40)
    same = numpy_state() == numpy_before
    expect_true(same, "NumPy's global random numbers were used", read=BATCHES)
    expect_true(random.getstate() == python_before, "Python's global random numbers were used", read=BATCHES)
    torch.set_rng_state(torch_before)


@pytest.mark.parametrize("seed", [None, 7])
def test_TokenBatches_goes_on_at_the_exact_batch(seed):
    case(f"23 tokens, batch=2, length=2 (11 windows), seed={seed}: saved after 0 to 13 batches, four more each")
    for done in range(14):
        first = training.TokenBatches(range(23), 2, 2, seed=seed)
        take(first, done)
        state, epoch = json.loads(json.dumps(first.state_dict())), first.epoch
        expected = take(first, 4)
        second = training.TokenBatches(range(23), 2, 2, seed=seed)
        take(second, 3 if done % 2 else 17)  # wherever it stands, in an earlier epoch or a later one
        second.load_state_dict(state)
        expect_equal(second.epoch, epoch, name=f"epoch after {done} batches, once loaded", read=BATCHES)
        expect_equal(take(second, 4), expected, name=f"batches after {done}", read=BATCHES)


def test_TokenBatches_state_is_a_copy_and_the_same_on_every_rank():
    case("25 tokens, batch=1, length=2, 3 ranks, seed=1, after two steps")
    ranks = [training.TokenBatches(range(25), 1, 2, rank, 3, 1) for rank in range(3)]
    for one in ranks:
        take(one, 2)
    states = [one.state_dict() for one in ranks]
    expect_equal(states, [states[0]] * 3, name="states", read=f"{BATCHES}, state_dict")
    take(ranks[0], 1)
    expect_equal(states[0], states[1], name="the state, after one more batch", read=f"{BATCHES}, state_dict")
    plain = all(value is None or type(value) in (int, str, float, bool) for value in states[0].values())
    expect_true(plain, f"the state should be plain numbers, for weights_only=True: {states[0]}")
    whole = all(value is None or isinstance(value, int) for value in states[0].values())
    expect_true(whole, f"the state's numbers should be ints, not floats: {states[0]}", answer=states[0])
    expect_equal(type(ranks[0].epoch).__name__, "int", name="type of epoch", answer=ranks[0].epoch)


def test_TokenBatches_state_is_plain_after_sizes_of_numpy():
    case("25 tokens, batch=1, length=2, seed=1, each an np.int64, after one step")
    one = training.TokenBatches(range(25), np.int64(1), np.int64(2), np.int64(0), np.int64(1), np.int64(1))
    take(one, 1)
    state = one.state_dict()
    plain = all(value is None or type(value) in (int, str, float, bool) for value in state.values())
    expect_true(plain, f"the state should be plain numbers, for weights_only=True: {state}")


@pytest.mark.parametrize("seed", [None, 2])
def test_TokenBatches_goes_on_with_other_ranks(seed):
    case(f"41 tokens, length=2 (20 windows), seed={seed}: 2 ranks of batch 2 for two steps, then 3 ranks of batch 1")
    before = [training.TokenBatches(range(41), 2, 2, rank, 2, seed) for rank in range(2)]
    given = [first for _ in range(2) for one in before for first in firsts(one, 1)]
    after = [training.TokenBatches(range(41), 1, 2, rank, 3, seed) for rank in range(3)]
    for one in after:
        one.load_state_dict(before[0].state_dict())
    given += [first for _ in range(4) for one in after for first in firsts(one, 1)]
    read = f"{BATCHES}, load_state_dict"
    expect_equal(sorted(given), list(range(0, 40, 2)), name="first tokens of the epoch, sorted", read=read)


def test_TokenBatches_knows_its_epoch():
    for batch, n_ranks in ((2, 1), (1, 2)):
        case(f"12 tokens, batch={batch}, length=2 (5 windows), world_size={n_ranks}: epoch after 0 to 5 batches")
        batches, found = training.TokenBatches(range(12), batch, 2, 0, n_ranks), []
        for _ in range(6):
            found.append(batches.epoch)
            take(batches, 1)
        expect_equal(found, [0, 0, 0, 1, 1, 2], name="epoch", read=f"{BATCHES}, under Attributes")


def test_TokenBatches_takes_tokens_of_every_kind(tmp_path):
    array = np.arange(40_000, 40_021, dtype=np.uint16)
    array.tofile(tmp_path / "tokens.bin")
    kinds = {
        "a list": array.tolist(),
        "a tuple": tuple(array.tolist()),
        "an int32 tensor": torch.from_numpy(array.astype(np.int32)),
        "a strided tensor": torch.arange(40_000, 40_042)[::2] // 2 + 20_000,
        "a uint16 array": array,
        "a read-only memmap of uint16": np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r"),
    }
    for name, tokens in kinds.items():
        case(f"{name}: 40000 to 40020, batch=2, length=5")
        inputs, targets = next(training.TokenBatches(tokens, 2, 5))
        expect_close(inputs, torch.arange(40_000, 40_010).view(2, 5), name="inputs", read=f"{BATCHES}, under Args")
        expect_close(targets, torch.arange(40_001, 40_011).view(2, 5), name="targets", read=f"{BATCHES}, under Args")
    expect_equal(array[0].item(), 40_000, name="the array afterwards")


@pytest.mark.memory_limit(300)
def test_TokenBatches_reads_a_memmap_as_it_goes(tmp_path):
    case(
        "a file of 256 million uint16 tokens (mostly a hole on the disk), batch=2, length=8: memory is limited "
        "to 300 MB"
    )
    with open(tmp_path / "tokens.bin", "wb") as file:
        file.truncate(512 * 2**20)
    tokens = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    inputs, _ = next(training.TokenBatches(tokens, 2, 8))
    expect_close(inputs, torch.zeros(2, 8, dtype=torch.int64), name="inputs", read=f"{BATCHES}, under Args")


def test_TokenBatches_does_not_alias_the_tokens():
    read = f"{BATCHES}, __next__: they share memory with no other tensor"
    for batch in (1, 2):
        case(f"int64 tokens, batch={batch}; all inputs are set to 0: do inputs, targets and tokens share memory?")
        tokens = np.arange(17)
        batches = training.TokenBatches(tokens, batch, 8)
        inputs, targets = next(batches)
        inputs.zero_()
        next(batches)
        expect_close(inputs, torch.zeros_like(inputs), name="inputs of 0, after the next batch", read=read)
        expected = torch.arange(1, 8 * batch + 1).view(batch, 8)
        expect_close(targets, expected, name="targets, once the inputs are 0", read=read)
        expect_equal(tokens.tolist(), list(range(17)), name="tokens, once the inputs are 0", read=read)


@pytest.mark.parametrize(
    ("n_tokens", "batch", "length", "world_size"), [(16, 4, 4, 1), (24, 2, 4, 3), (1, 1, 1, 1), (0, 1, 1, 1)]
)
def test_TokenBatches_refuses_too_few_tokens(n_tokens, batch, length, world_size):
    case(f"{n_tokens} tokens, batch={batch}, length={length}, {world_size} ranks")
    needed = world_size * batch * length + 1
    with expect_raises(ValueError, str(n_tokens), str(needed), read=f"{BATCHES}, under Raises"):
        training.TokenBatches(list(range(n_tokens)), batch, length, 0, world_size)
    case(f"{needed} tokens, batch={batch}, length={length}, {world_size} ranks: just enough")
    found = [firsts(training.TokenBatches(range(needed), batch, length, r, world_size), 1) for r in range(world_size)]
    expect_equal(
        [first for one in found for first in one], list(range(0, needed - 1, length)), name="first tokens", read=WINDOWS
    )


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (1, 1)])
def test_TokenBatches_refuses_a_rank_that_is_not_there(rank, world_size):
    case(f"rank={rank}, world_size={world_size}")
    with expect_raises(ValueError, str(rank), read=f"{BATCHES}, under Raises"):
        training.TokenBatches(range(100), 1, 2, rank=rank, world_size=world_size)


def test_TokenBatches_refuses_the_state_of_other_data():
    state = training.TokenBatches(range(100), 2, 4, seed=1).state_dict()
    others = [
        ((range(90), 2, 4), 1, ("100", "90")),
        ((range(100), 2, 5), 1, ("4", "5")),
        ((range(100), 2, 4), 2, ("1", "2")),
    ]
    for arguments, seed, mentions in others:
        case(
            f"saved with 100 tokens, length=4, seed=1; now {len(arguments[0])} tokens, length={arguments[2]}, "
            f"seed={seed}"
        )
        with expect_raises(ValueError, *mentions, read=f"{BATCHES}, load_state_dict"):
            training.TokenBatches(*arguments, seed=seed).load_state_dict(state)


@oracle
def test_TokenBatches_property_of_an_epoch():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    sizes = (st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 40), st.integers(1, 5))

    @settings(max_examples=40, deadline=None)
    @given(*sizes, st.none() | st.integers(0, 9))
    def check(batch, length, world_size, more, epochs, seed):
        n_tokens = batch * length * world_size + 1 + more
        n = (n_tokens - 1) // length
        case(f"{n_tokens} tokens, batch={batch}, length={length}, {world_size} ranks, seed={seed}, {epochs} epochs")
        ranks = [training.TokenBatches(range(n_tokens), batch, length, r, world_size, seed) for r in range(world_size)]
        given_out: list[int] = []
        while len(given_out) < epochs * n:
            for one in ranks:
                given_out += firsts(one, 1)
        counts = Counter(given_out[: epochs * n])
        expect_equal(sorted(counts.items()), [(i * length, epochs) for i in range(n)], name="counts", read=WINDOWS)

    check()


# ---- accumulate_gradients --------------------------------------------------------------------------------------------


class Kept:
    """What autograd keeps for backward: alive until the gradient is computed."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class Tiny(nn.Module):
    """A linear map with the loss of a language model; it notes of how many forward passes autograd keeps something."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.linear = nn.Linear(3, 4).to(dtype)
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(randn(*parameter.shape, seed=seed + i))
        self.alive: list = []
        self.n = self.most = self.largest = 0

    def forward(self, inputs, targets):
        def pack(tensor):
            kept = Kept(tensor)
            self.alive.append((self.n, weakref.ref(kept)))
            return kept

        self.n += 1
        self.largest = max(self.largest, targets.numel())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            logits = self.linear(inputs).tanh()
        self.most = max(self.most, len({n for n, kept in self.alive if kept() is not None}))
        return logits, functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def batch_of(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return randn(*shape, 3, seed=seed, dtype=torch.float64), draw(4, *shape, seed=seed)


def whole_batch(model: nn.Module, micro_batches) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of all items at once."""
    inputs = torch.cat([i.flatten(0, -2) for i, _ in micro_batches])
    loss = model(inputs, torch.cat([t.flatten() for _, t in micro_batches]))[1]
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


SIZES = [[(4,)], [(2,), (2,)], [(1,), (5,), (2,)], [(2, 3), (1, 3)], [(2, 5), (2, 1), (1, 7)]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_accumulate_gradients_equals_the_whole_batch(sizes):
    case(f"targets of the micro-batches {[list(s) for s in sizes]}, float64")
    micro_batches = [batch_of(*size, seed=i) for i, size in enumerate(sizes)]
    model = Tiny()
    loss, gradients = whole_batch(model, micro_batches)
    found = training.accumulate_gradients(model, micro_batches)
    expect_close([p.grad for p in model.parameters()], gradients, atol=1e-10, name="gradients", read=SHARE)
    expect_close(found, loss, atol=1e-10, name="the mean loss", read=SHARE)
    expect_true(not found.requires_grad, "the mean loss should be detached, or it keeps the graph alive")


def test_accumulate_gradients_in_float32():
    case("two micro-batches of 3 and 1 items, float32")
    micro_batches = [(inputs.float(), targets) for inputs, targets in (batch_of(3), batch_of(1, seed=1))]
    model = Tiny(dtype=torch.float32)
    loss, gradients = whole_batch(model, micro_batches)
    found = training.accumulate_gradients(model, micro_batches)
    expect_close(found, loss, name="the mean loss", read=SHARE)
    expect_close([p.grad for p in model.parameters()], gradients, name="gradients", read=SHARE)


def test_accumulate_gradients_adds_to_what_is_there():
    case("a gradient of 1 everywhere before; two micro-batches of 2 and 1 items, from a generator")
    micro_batches = [batch_of(2), batch_of(1, seed=1)]
    model = Tiny()
    _, gradients = whole_batch(model, micro_batches)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.accumulate_gradients(model, (pair for pair in micro_batches))
    found = [p.grad for p in model.parameters()]
    read = "the contract, under Returns"
    expect_close(found, [g + 1 for g in gradients], atol=1e-10, name="gradients", read=read)


def test_accumulate_gradients_holds_one_micro_batch_at_a_time():
    case("five micro-batches of 2 items: graphs alive at once")
    model = Tiny()
    training.accumulate_gradients(model, [batch_of(2, seed=i) for i in range(5)])
    expect_true(
        model.most == 1,
        f"{model.most} forward passes were kept for backward at once: call backward for each micro-batch before "
        "the next forward",
        read="the contract, under Cost",
    )
    expect_equal(model.largest, 2, name="items in the largest forward pass", read="the contract, under Cost")


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_accumulate_gradients_skips_what_is_empty(empty):
    shape = [2, 0] if empty == 2 else [0]
    case(f"micro-batches of 3 and 2 items, and micro-batch {empty} of the three has targets {shape}")
    micro_batches = [batch_of(3), batch_of(2, seed=1)]
    model = Tiny()
    loss, gradients = whole_batch(model, micro_batches)
    micro_batches.insert(empty, batch_of(*shape))
    found = training.accumulate_gradients(model, micro_batches)
    read = "the contract, under micro_batches"
    expect_close(found, loss, atol=1e-10, name="the mean loss", read=read)
    expect_close([p.grad for p in model.parameters()], gradients, atol=1e-10, name="gradients", read=read)


def test_accumulate_gradients_of_nothing():
    for what, nothing in (("a list", []), ("a generator", iter(())), ("a list of an empty one", [batch_of(0)])):
        case(f"no micro-batch that holds an item: {what}")
        with expect_raises(ValueError, ("micro", "item", "target", "empty"), read="the contract, under Raises"):
            training.accumulate_gradients(Tiny(), nothing)


# ---- a run to save ---------------------------------------------------------------------------------------------------


class Run:
    """A small training run whose every step draws from three sources of random numbers."""

    def __init__(self, seed: int = 0):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2))
        groups: list[Any] = [
            {"params": list(self.model[0].parameters())},
            {"params": list(self.model[2].parameters()), "lr": 0.1},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.step = 0

    def train(self, n_steps: int) -> list[float]:
        losses = []
        for _ in range(n_steps):
            shift = random.random() + float(np.random.standard_normal())
            loss = functional.mse_loss(self.model(torch.randn(4, 3)), torch.full((4, 2), shift))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def resume(target, seed: int = 99) -> Run:
    """A run in a process that knows nothing of the first: other weights, other random numbers, another place."""
    run = Run(seed)
    run.train(1)
    state = training.load_checkpoint(target, run.model, run.optimizer)
    run.schedule.load_state_dict(state["schedule"])
    run.step = state["step"]
    return run


def check_resumes_bit_for_bit(target, rewind, exercise: str) -> None:
    case("3 steps with dropout, saved, loaded in a run with other weights and random numbers, 4 more; beside 7 steps")
    whole = Run()
    expected = whole.train(7)
    broken = Run()
    broken.train(3)
    training.save_checkpoint(target, broken.model, broken.optimizer, 3, schedule=broken.schedule.state_dict())
    rewind()
    resumed = resume(target)
    expect_equal(resumed.step, 3, name="step", read=exercise)
    expect_equal(resumed.train(4), expected[3:], name="losses of steps 3 to 6", read=exercise)
    expect_close(resumed.weights(), whole.weights(), atol=0, rtol=0, name="weights", read=exercise)


# ---- save_checkpoint -------------------------------------------------------------------------------------------------


def save(target, step: int, model=None, **state) -> Run:
    run = Run(step)
    training.save_checkpoint(target, model or run.model, run.optimizer, step, **state)
    return run


def step_in(path) -> int:
    run = Run(50)
    return training.load_checkpoint(path, run.model, run.optimizer)["step"]


def test_save_checkpoint_writes_where_it_is_told(tmp_path):
    case("a str, a Path, an open file and a BytesIO; then what is in the folder")
    save(str(tmp_path / "a.pt"), 1)
    save(tmp_path / "b.pt", 2)
    with open(tmp_path / "c.pt", "wb") as file:
        save(file, 3)
        expect_true(
            not file.closed, "the open file was closed, but it belongs to the caller", read=f"{SAVE}, under Args"
        )
    buffer = io.BytesIO()
    save(buffer, 4)
    buffer.seek(0)
    found = [step_in(tmp_path / f"{name}.pt") for name in "abc"] + [step_in(buffer)]
    expect_equal(found, [1, 2, 3, 4], name="steps", read=READ)
    there = sorted(path.name for path in tmp_path.iterdir())
    expect_equal(there, ["a.pt", "b.pt", "c.pt"], name="files", read=f"{SAVE}, under Returns")


def test_save_checkpoint_keeps_all_that_a_run_needs(tmp_path):
    check_resumes_bit_for_bit(tmp_path / "run.pt", lambda: None, READ)


def test_save_checkpoint_keeps_the_extra_state():
    case("extra state of every plain kind, with names that the checkpoint may use itself")
    tensor = torch.arange(3, dtype=torch.int16)
    state = {
        "random": 1,
        "rng": "a",
        "state": [1, (2, None)],
        "extra": {"a": {1: 2.5}},
        "torch": True,
        "tensor": tensor,
    }
    buffer, run = io.BytesIO(), Run()
    training.save_checkpoint(buffer, run.model, run.optimizer, 5, **state)
    buffer.seek(0)
    found = training.load_checkpoint(buffer, run.model, run.optimizer)
    expect_close(found.pop("tensor", None), tensor, name="tensor", read=READ)
    del state["tensor"]
    expect_equal(found, {"step": 5, **state}, name="what is loaded", read=READ)


def test_save_checkpoint_changes_nothing():
    case("weights, and the random numbers of PyTorch, Python and NumPy, before and after")
    run = Run()
    run.train(2)
    before = (run.weights(), torch.get_rng_state(), random.getstate(), numpy_state())
    training.save_checkpoint(io.BytesIO(), run.model, run.optimizer, 2)
    after = (run.weights(), torch.get_rng_state(), random.getstate(), numpy_state())
    expect_close(after[0], before[0], atol=0, rtol=0, name="weights", read=SAVE)
    same = torch.equal(after[1], before[1]) and after[2:] == before[2:]
    expect_true(same, "saving drew from the random numbers", read=SAVE)


REFUSED = {
    "an object of a class": lambda: Path("x"),
    "a list that holds an object": lambda: [1, {"deep": Path("x")}],
    "a lambda": lambda: lambda epoch: 0.5**epoch,
    "a dict that holds a lambda": lambda: {"lr_lambdas": [lambda epoch: 0.5**epoch]},
    "a generator": lambda: (i for i in range(3)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_save_checkpoint_refuses_what_could_not_be_loaded(tmp_path, what):
    case(
        f"the extra state `sampler` is {what}, beside an `epoch` that is fine; before, there is a checkpoint of step 1"
    )
    path, read = tmp_path / "run.pt", f"{SAVE}, under Raises"
    save(path, 1)
    old = path.read_bytes()
    with expect_raises(TypeError, "sampler", read=read):
        save(path, 2, epoch=3, sampler=REFUSED[what]())
    expect_true(path.read_bytes() == old, "the old checkpoint is changed", read=read)
    expect_equal([p.name for p in tmp_path.iterdir()], ["run.pt"], name="files", read=read)


@pytest.mark.parametrize("what", ["step", "param_groups"])
def test_save_checkpoint_refuses_numbers_of_numpy(tmp_path, what):
    case(
        f"a NumPy number in `{what}`, which weights_only=True could not read back; before, there is a "
        "checkpoint of step 1"
    )
    path, read = tmp_path / "run.pt", f"{SAVE}, under Raises"
    save(path, 1)
    old, run = path.read_bytes(), Run()
    if what == "param_groups":
        run.optimizer.param_groups[0]["lr"] = np.float64(0.1)
    with expect_raises(TypeError, what, read=read):
        training.save_checkpoint(path, run.model, run.optimizer, np.int64(2) if what == "step" else 2)
    expect_true(path.read_bytes() == old, "the old checkpoint is changed", read=read)


class Log:
    """Notes in which order files reach the disk and their place, and lose it."""

    def __init__(self, monkeypatch):
        self.calls: list = []
        self.fsynced = 0  # bytes of the largest file when it was brought to the disk
        for name in ("fsync", "replace", "rename", "renames", "remove", "unlink", "link", "truncate"):
            if hasattr(os, name):
                monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        for name in ("move", "copyfile", "copy", "copy2"):
            monkeypatch.setattr(shutil, name, self._wrap(f"shutil.{name}", getattr(shutil, name)))

    def _wrap(self, name, real):
        def call(*args, **kwargs):
            self.calls.append((name, args))
            if name == "fsync":
                number = args[0] if isinstance(args[0], int) else args[0].fileno()
                self.fsynced = max(self.fsynced, os.fstat(number).st_size)
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize("kind", [Path, str])
def test_save_checkpoint_moves_a_whole_file_into_place(tmp_path, monkeypatch, kind):
    case(f"a checkpoint over an old one, path a {kind.__name__}: the calls of os.fsync and os.replace")
    path = tmp_path / "run.pt"
    save(path, 1)
    log = Log(monkeypatch)
    save(kind(path), 2)
    names, read = [name for name, _ in log.calls], f"{SAVE}, under Returns"
    moves = [name for name in names if name not in ("fsync", "remove", "unlink", "truncate")]
    gone = [name for name, args in log.calls if name in ("remove", "unlink") and Path(args[0]) == path]
    problem = "the old checkpoint is removed before the new one is in its place: os.replace puts the new over the old"
    expect_true(not gone, problem, answer=names, read=read)
    expect_true(moves, "nothing was moved into place: the old file was written over", answer=names, read=read)
    expect_true(moves[0] == "replace", f"moved into place by {moves[0]}, not by os.replace", answer=names, read=read)
    expect_true(
        "fsync" in names[: names.index("replace")],
        "it is moved into place before os.fsync: after a power cut the name may stand for an empty file",
        answer=names,
        read=read,
    )
    size, written = path.stat().st_size, log.fsynced
    problem = (
        f"at os.fsync the file had {written} of its {size} bytes: the rest was still in Python's buffer; flush() first"
    )
    expect_true(written == size, problem, answer=names, read=read)
    source = Path(log.calls[names.index("replace")][1][0])
    expect_equal(str(source.parent), str(tmp_path), name="the folder of what is moved", answer=names, read=read)
    expect_equal(source.name, "run.pt.tmp", name="the name of what is moved", answer=source.name[-4:], read=read)


def fail(error: BaseException | None) -> None:
    """Fail with the error, or kill the process if there is none."""
    if error is None:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        raise error


def fail_half_way(error: BaseException | None):
    """A ``torch.save`` that writes the first half and then fails, or kills its process.

    An answer may save to memory and write the bytes itself, so ``os.fsync`` has to fail, too.
    """
    real = torch.save

    def half(contents, target, *args, **kwargs):
        whole = io.BytesIO()
        real(contents, whole, *args, **kwargs)
        data = whole.getvalue()
        if isinstance(target, io.BytesIO):
            target.write(data)
            return
        file = open(target, "wb") if isinstance(target, str | os.PathLike) else target  # noqa: SIM115
        file.write(data[: len(data) // 2])
        file.flush()
        fail(error)

    return half


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
def test_save_checkpoint_that_fails_leaves_the_old_one(tmp_path, monkeypatch, error):
    case(f"a checkpoint of step 1; saving step 2 fails half-way with {type(error).__name__}")
    path = tmp_path / "run.pt"
    save(path, 1)
    old = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail_half_way(error))
        patch.setattr(os, "fsync", lambda fd: fail(error))
        try:
            save(path, 2)
            raised = False
        except type(error):
            raised = True
    expect_true(raised, "the failure was swallowed; the caller should get the error", read=SAVE)
    expect_true(path.exists() and path.read_bytes() == old, "the old checkpoint is gone or changed", read=SAVE)
    there = [p.name for p in tmp_path.iterdir()]
    expect_equal(there, ["run.pt"], name="files left", read=f"{SAVE}, under Returns")


def in_a_child_that_dies(do) -> bool:
    """Run it in a forked process; whether that was killed."""
    child = os.fork()
    if child == 0:
        try:
            do()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_save_checkpoint_that_is_killed_leaves_the_old_one(tmp_path):
    case("a checkpoint of step 1; SIGKILL when half of step 2 is written; then step 3 is saved")
    path = tmp_path / "run.pt"
    save(path, 1)
    old = path.read_bytes()

    def killed():
        torch.save, os.fsync = fail_half_way(None), lambda fd: fail(None)
        save(path, 2)

    in_a_child_that_dies(killed)
    expect_true(path.exists() and path.read_bytes() == old, "the old checkpoint is gone or changed", read=SAVE)
    save(path, 3)
    expect_equal(step_in(path), 3, name="step in the file", read=READ)


TOUCHES = ("open", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "shutil.move", "shutil.copyfile")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_save_checkpoint_can_be_killed_before_each_touch_of_the_disk(tmp_path):
    case("a checkpoint of step 1; saving step 2 is killed just before each time that it opens, moves or removes a file")
    path, run, alive = tmp_path / "run.pt", Run(2), True
    for n in range(1, 100):

        def killed(n=n):
            left = [n]

            def hook(event, args):
                left[0] -= event in TOUCHES
                if event in TOUCHES and left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            training.save_checkpoint(path, run.model, run.optimizer, 2)

        save(path, 1)
        alive = not in_a_child_that_dies(killed)
        if alive:
            break
        step: int | str
        try:
            step = step_in(path)
        except NotImplementedError:  # load_checkpoint is the next exercise
            raise
        except Exception as error:
            step = f"unreadable: {type(error).__name__}"
        expect_true(
            step in (1, 2), f"killed before touch {n} of the disk, the file holds {step!r}, neither step", read=SAVE
        )
    expect_true(alive and step_in(path) == 2, "left alone, the save did not end with step 2 in the file", read=SAVE)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_save_checkpoint_can_be_killed_at_any_moment(tmp_path):
    case("a checkpoint of step 1; saving step 2 is killed at 16 moments from its first call to its last")
    path, run, moments = tmp_path / "run.pt", Run(2), [0]

    def count(frame, event, argument):
        moments[0] += 1

    sys.setprofile(count)
    try:
        training.save_checkpoint(tmp_path / "count.pt", run.model, run.optimizer, 2)
    finally:
        sys.setprofile(None)
    expect_equal(step_in(tmp_path / "count.pt"), 2, name="step in a file that nobody disturbed", read=READ)
    for k in range(16):
        left = [max(1, round(moments[0] * (k + 1) / 16) - 2)]

        def kill(frame, event, argument, left=left):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def killed(kill=kill):
            sys.setprofile(kill)
            training.save_checkpoint(path, run.model, run.optimizer, 2)

        save(path, 1)
        in_a_child_that_dies(killed)
        step: int | str
        try:
            step = step_in(path)
        except NotImplementedError:  # load_checkpoint is the next exercise
            raise
        except Exception as error:
            step = f"unreadable: {type(error).__name__}"
        expect_true(
            step in (1, 2), f"killed at moment {k + 1} of 16, the file holds {step!r}, neither step 1 nor 2", read=SAVE
        )


# ---- load_checkpoint -------------------------------------------------------------------------------------------------


def test_load_checkpoint_gives_back_step_and_state(tmp_path):
    case("step=7, epoch=2, losses=[1.5, 0.5], data={'position': 64}")
    state = {"epoch": 2, "losses": [1.5, 0.5], "data": {"position": 64}}
    run = save(tmp_path / "run.pt", 7, **state)
    found = training.load_checkpoint(tmp_path / "run.pt", run.model, run.optimizer)
    expect_equal(found, {"step": 7, **state}, name="what is loaded", read=f"{LOAD}")


def test_load_checkpoint_restores_each_random_number(tmp_path):
    case("two numbers each of torch.rand, random.gauss and numpy.random.standard_normal after loading")
    run = Run()
    random.gauss(0, 1), np.random.standard_normal()  # both keep the second of a pair for later
    training.save_checkpoint(tmp_path / "run.pt", run.model, run.optimizer, 0)
    sources = {
        "torch": lambda: torch.rand(()).item(),
        "random": lambda: random.gauss(0, 1),
        "numpy": lambda: float(np.random.standard_normal()),
    }
    expected = {name: [draw(), draw()] for name, draw in sources.items()}
    training.load_checkpoint(tmp_path / "run.pt", run.model, run.optimizer)
    found = {name: [draw(), draw()] for name, draw in sources.items()}
    expect_equal(found, expected, name="drawn", read=LOAD)


@pytest.mark.parametrize("kind", ["path", "str", "file", "buffer"])
def test_load_checkpoint_resumes_bit_for_bit(tmp_path, kind):
    path, buffer = tmp_path / "run.pt", io.BytesIO()
    if kind in ("path", "str"):
        check_resumes_bit_for_bit(path if kind == "path" else str(path), lambda: None, LOAD)
    elif kind == "buffer":
        check_resumes_bit_for_bit(buffer, lambda: buffer.seek(0), LOAD)
    else:
        with open(path, "w+b") as file:
            check_resumes_bit_for_bit(file, lambda: file.seek(0), LOAD)


def test_load_checkpoint_fills_the_tensors_that_are_there(tmp_path):
    case("the model's parameters before and after: the same objects, which the optimizer holds; rates of the file")
    saved = Run(1)
    saved.train(3)
    training.save_checkpoint(tmp_path / "run.pt", saved.model, saved.optimizer, 3)
    run = Run(2)
    pointers = [p.data_ptr() for p in run.model.parameters()]
    training.load_checkpoint(tmp_path / "run.pt", run.model, run.optimizer)
    expect_equal([p.data_ptr() for p in run.model.parameters()] == pointers, True, name="loaded in place", read=LOAD)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    expect_equal(rates, [group["lr"] for group in saved.optimizer.param_groups], name="learning rates", read=LOAD)
    moments = [run.optimizer.state[p]["exp_avg"] for p in run.model.parameters()]
    expected = [saved.optimizer.state[p]["exp_avg"] for p in saved.model.parameters()]
    expect_close(moments, expected, atol=0, rtol=0, name="exp_avg", read=LOAD)


RAN: list[str] = []


class Evil:
    """What a pickle may do to whoever opens it."""

    def __reduce__(self):
        return RAN.append, ("run",)


def test_load_checkpoint_runs_nothing_from_the_file(tmp_path):
    case("a file whose pickle calls a function when it is opened")
    RAN.clear()
    torch.save({"model": Evil(), "optimizer": {}, "step": 1}, tmp_path / "evil.pt")
    run = Run()
    with expect_raises(pickle.UnpicklingError, read=f"{LOAD}; weights_only=True"):
        training.load_checkpoint(tmp_path / "evil.pt", run.model, run.optimizer)
    expect_equal(RAN, [], name="what the file could run", read=LOAD)


def test_load_checkpoint_needs_a_file_and_the_same_model(tmp_path):
    run = Run()
    case("no such file")
    with expect_raises(FileNotFoundError, "none.pt", read=LOAD):
        training.load_checkpoint(tmp_path / "none.pt", run.model, run.optimizer)
    case("a file that ends half-way")
    save(tmp_path / "run.pt", 1)
    data = (tmp_path / "run.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(data[: len(data) // 2])
    with expect_raises(Exception, read=LOAD):
        training.load_checkpoint(tmp_path / "half.pt", run.model, run.optimizer)
    case("a model of another width")
    with expect_raises(RuntimeError, "weight", read=LOAD):
        training.load_checkpoint(tmp_path / "run.pt", nn.Sequential(nn.Linear(4, 5)), run.optimizer)


@pytest.fixture
def cards(monkeypatch):
    """A machine with CUDA devices, whatever there is: the test may change the list of their random states."""
    states: list[Tensor] = []

    def number(device) -> int:
        return device if isinstance(device, int) else torch.device(device).index or 0

    def set_state(state, device="cuda"):
        states[number(device)] = state.clone()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": states[number(device)].clone())
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone() for state in states])
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda new: [set_state(s, i) for i, s in enumerate(new)])
    return states


def check_restores_every_device(tmp_path, cards, exercise: str) -> None:
    case("two CUDA devices (played by the test): their random states when loading, which have gone on since saving")
    cards[:] = [torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor([4, 5, 6], dtype=torch.uint8)]
    run = save(tmp_path / "run.pt", 1)
    cards[:] = [torch.tensor([7, 7, 7], dtype=torch.uint8), torch.tensor([8, 8, 8], dtype=torch.uint8)]
    training.load_checkpoint(tmp_path / "run.pt", run.model, run.optimizer)
    expect_equal([state.tolist() for state in cards], [[1, 2, 3], [4, 5, 6]], name="random states", read=exercise)


def test_save_checkpoint_keeps_the_random_numbers_of_every_device(tmp_path, cards):
    check_restores_every_device(tmp_path, cards, READ)


def test_load_checkpoint_restores_the_random_numbers_of_every_device(tmp_path, cards):
    check_restores_every_device(tmp_path, cards, LOAD)


def test_load_checkpoint_beside_devices_that_the_file_does_not_know(tmp_path, monkeypatch, cards):
    case("saved where there is no CUDA device, loaded beside one (played by the test), whose random numbers stay")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        run = save(tmp_path / "run.pt", 6)
    cards[:] = [torch.tensor([7, 8, 9], dtype=torch.uint8)]
    found = training.load_checkpoint(tmp_path / "run.pt", run.model, run.optimizer)
    expect_equal(found, {"step": 6}, name="what is loaded", read=LOAD)
    expect_equal([state.tolist() for state in cards], [[7, 8, 9]], name="random states", read=LOAD)


def test_load_checkpoint_without_the_devices_of_the_file(tmp_path, monkeypatch, cards):
    case("saved beside two CUDA devices (played by the test), loaded where there is none")
    cards[:] = [torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor([4, 5, 6], dtype=torch.uint8)]
    run = save(tmp_path / "run.pt", 6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cards.clear()
    found = training.load_checkpoint(tmp_path / "run.pt", run.model, run.optimizer)
    expect_equal(found, {"step": 6}, name="what is loaded", read=LOAD)


@pytest.mark.gpu
def test_load_checkpoint_on_a_gpu(tmp_path):
    case("a model and its optimizer on the GPU; the next random numbers of the GPU")
    model = nn.Linear(3, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3, device="cuda")).sum().backward()
    optimizer.step()
    training.save_checkpoint(tmp_path / "run.pt", model, optimizer, 1)
    expected = torch.rand(3, device="cuda").tolist()
    training.load_checkpoint(tmp_path / "run.pt", model, optimizer)
    expect_equal(torch.rand(3, device="cuda").tolist(), expected, name="random numbers", read=LOAD)
    expect_equal(optimizer.state[model.weight]["exp_avg"].device.type, "cuda", name="device of the state", read=LOAD)


# ---- hours_per_epoch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed", "size", "hours"), [(1.0, 3600, 1.0), (250, 50_000, 1 / 18), (0.5, 900, 0.5), (7.5, 1000, 1000 / 27_000)]
)
def test_hours_per_epoch_by_hand(speed, size, hours):
    case(f"{size} items at {speed} a second")
    expect_close(training.hours_per_epoch(speed, size), hours, name="hours", read=YARDSTICK)


@pytest.mark.parametrize("speed", [0, -3.0, math.nan])
def test_hours_per_epoch_refuses_a_standstill(speed):
    case(f"{speed} items a second")
    with expect_raises(ValueError, str(speed), read="the contract, under Raises"):
        training.hours_per_epoch(speed, 100)
