"""Loss, optimizer, schedule, clipping, accumulation and the yardstick, graded against PyTorch's own."""

import math
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle

training = graded("training")

LOSS, MOMENTS, CORRECTED, DECAY, COSINE, CLIP, SHARE, YARDSTICK = (
    f"equation (7.{n})" for n in (1, 2, 3, 4, 5, 6, 8, 9)
)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw(n: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(seed))


class HostReads(TorchDispatchMode):
    """Counts how often a tensor's value is brought to the host: item(), float(), if, tolist()."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


# ---- 7.1 cross_entropy -----------------------------------------------------------------------------------------------


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
    expect_close(found, expected, atol=atol, read="the contract of exercise 7.1, under Returns")


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


# ---- 7.2 AdamW -------------------------------------------------------------------------------------------------------

SETTINGS = [
    {},
    {"lr": 0.1},
    {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 0.02, "betas": (0.0, 0.5), "eps": 1e-2, "weight_decay": 0.0},
    {"lr": 0.05, "weight_decay": 2.0},
]


def two_copies(*shapes, dtype=torch.float32, seed=0) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    values = [randn(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]
    return [nn.Parameter(v.clone()) for v in values], [nn.Parameter(v.clone()) for v in values]


def set_gradients(mine, theirs, seed):
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        a.grad = randn(*a.shape, seed=1000 * seed + i, dtype=a.dtype)
        b.grad = a.grad.clone()


def values(parameters) -> list[Tensor]:
    return [p.detach().clone() for p in parameters]


def test_AdamW_by_hand():
    case("weights 2 and -1, gradients 0.5 and -4, then 1 and 1; lr=0.1, betas=(0.5, 0.75), eps=0.25, weight_decay=0.5")
    weight = nn.Parameter(torch.tensor([2.0, -1.0]))
    optimizer = training.AdamW([weight], lr=0.1, betas=(0.5, 0.75), eps=0.25, weight_decay=0.5)
    expected, m, v = [2.0, -1.0], [0.0, 0.0], [0.0, 0.0]
    for step, gradient in enumerate(([0.5, -4.0], [1.0, 1.0]), start=1):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        for i, g in enumerate(gradient):
            m[i], v[i] = 0.5 * m[i] + 0.5 * g, 0.75 * v[i] + 0.25 * g * g
            update = m[i] / (1 - 0.5**step) / (math.sqrt(v[i] / (1 - 0.75**step)) + 0.25)
            expected[i] = expected[i] * (1 - 0.1 * 0.5) - 0.1 * update
        name = f"the weights after step {step}"
        expect_close(
            weight.detach().clone(), torch.tensor(expected), atol=1e-6, name=name, read=f"{CORRECTED} and (7.4)"
        )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_AdamW_equals_torch(settings):
    case(f"parameters [3, 4], [5] and [], 40 steps, {settings or 'the defaults'}")
    mine, theirs = two_copies((3, 4), (5,), ())
    a, b = training.AdamW(mine, **settings), torch.optim.AdamW(theirs, **settings)
    for step in range(40):
        set_gradients(mine, theirs, step)
        a.step()
        b.step()
    expect_close(values(mine), values(theirs), atol=2e-6, name="weights", read=f"{MOMENTS} to (7.4)")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_AdamW_in_other_dtypes(dtype):
    case(f"parameters [4, 3] and [2], {str(dtype)[6:]}, 10 steps")
    mine, theirs = two_copies((4, 3), (2,), dtype=dtype)
    a, b = training.AdamW(mine, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    for step in range(10):
        set_gradients(mine, theirs, step)
        a.step()
        b.step()
    atol = {torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    expect_close(values(mine), values(theirs), atol=atol, name="weights", read=f"{MOMENTS} to (7.4)")


def test_AdamW_is_an_optimizer_with_groups():
    case("two groups, lr 0.1 with decay 0.5 and the defaults; a scheduler halves the rates after two steps")
    mine, theirs = two_copies((2, 3), (3,))
    expect_true(
        isinstance(training.AdamW(mine), torch.optim.Optimizer), "AdamW should be a torch.optim.Optimizer", read=DECAY
    )
    pairs = []
    for kind, (weight, bias) in ((training.AdamW, mine), (torch.optim.AdamW, theirs)):
        optimizer = kind([{"params": [weight], "lr": 0.1, "weight_decay": 0.5}, {"params": iter([bias])}], lr=0.01)
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
    for step in range(3):
        set_gradients(mine, theirs, step)
        if step < 2:
            mine[1].grad = theirs[1].grad = None
        a.step()
        b.step()
    expect_close(values(mine), values(theirs), atol=2e-6, name="weights", read="the contract of exercise 7.2, step")


def test_AdamW_leaves_gradients_and_storage():
    case("one step with decay 0.1 on a weight [3, 2] whose gradient is a transposed view")
    weight = nn.Parameter(randn(3, 2))
    weight.grad = randn(2, 3, seed=1).T
    gradient, pointer = weight.grad.clone(), weight.data_ptr()
    training.AdamW([weight], lr=0.1, weight_decay=0.1).step()
    expect_close(weight.grad, gradient, name="the gradient afterwards", read=DECAY)
    expect_equal(weight.data_ptr() == pointer, True, name="updated in place", read="the contract of exercise 7.2, step")


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
    expect_close(loss.detach(), torch.tensor(9.0), name="what step returns", read="the contract of exercise 7.2, step")
    expect_close(weight.detach().clone(), torch.tensor([2.5]), atol=1e-5, name="the weight", read=CORRECTED)
    expect_true(training.AdamW([weight]).step() is None, "step() without a closure should return None")


@pytest.mark.parametrize("target", ["AdamW", "torch"])
def test_AdamW_state_goes_on_elsewhere(target):
    case(f"3 steps, state_dict(), a new {target} takes it, 3 more steps; beside 6 steps of PyTorch's AdamW")
    mine, theirs = two_copies((2, 3), (3,))
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.2}
    a, b = training.AdamW(mine, **settings), torch.optim.AdamW(theirs, **settings)
    for step in range(6):
        if step == 3:
            state = a.state_dict()
            a = (training.AdamW if target == "AdamW" else torch.optim.AdamW)(mine, lr=99.0)
            a.load_state_dict(state)
        set_gradients(mine, theirs, step)
        a.step()
        b.step()
    read = "the contract of exercise 7.2, under Attributes"
    expect_close(values(mine), values(theirs), atol=2e-6, name="weights", read=read)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"lr": -0.5}, "-0.5"),
        ({"eps": -1e-8}, "-1e-08"),
        ({"weight_decay": -0.1}, "-0.1"),
        ({"betas": (0.9, 1.0)}, "1.0"),
    ],
    ids=str,
)
def test_AdamW_refuses(settings, value):
    case(f"{settings}")
    with expect_raises(ValueError, value, read="the contract of exercise 7.2, under Raises"):
        training.AdamW([nn.Parameter(torch.zeros(1))], **settings)


# ---- 7.3 parameter_groups --------------------------------------------------------------------------------------------


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
    return [[names[id(p)] for p in group["params"]] for group in groups]


def test_parameter_groups_by_dimensions():
    case(
        "an embedding tied to the head, a layer norm, a convolution, a linear map with bias, a scalar; weight_decay=0.1"
    )
    model = Tied()
    groups = training.parameter_groups(model, 0.1)
    read = "the contract of exercise 7.3"
    expect_equal([group["weight_decay"] for group in groups], [0.1, 0.0], name="weight_decay of the groups", read=read)
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
    expect_equal(found, [decays, rest], name="groups", read="the contract of exercise 7.3, under Returns")


def test_parameter_groups_of_one_kind():
    case("a linear map without bias, then a layer norm alone: one group is empty, and an optimizer takes both")
    for model, sizes in ((nn.Linear(3, 2, bias=False), [1, 0]), (nn.LayerNorm(3), [0, 2])):
        groups = training.parameter_groups(model, weight_decay=0.3)
        expect_equal([len(list(g["params"])) for g in groups], sizes, name="sizes", read="the contract of exercise 7.3")
        torch.optim.AdamW(training.parameter_groups(model, weight_decay=0.3))


# ---- 7.4 cosine_schedule ---------------------------------------------------------------------------------------------


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
    read = "the contract of exercise 7.4"
    case("warmup_steps=0, max_steps=5: steps 0, 5, 6 and 1000")
    found = [training.cosine_schedule(step, 1.0, 0.1, 0, 5) for step in (0, 5, 6, 1000)]
    expect_close(found, [1.0, 0.1, 0.1, 0.1], name="rate", read=read)
    case("warmup_steps=5, max_steps=5: steps 4 and 5")
    expect_close([training.cosine_schedule(s, 1.0, 0.1, 5, 5) for s in (4, 5)], [0.8, 0.1], name="rate", read=read)
    case("warmup_steps=10, max_steps=9")
    with expect_raises(ValueError, "10", "9", read=read):
        training.cosine_schedule(3, 1.0, 0.1, 10, 9)


# ---- 7.5 clip_gradient_norm_ -----------------------------------------------------------------------------------------


def with_gradients(*gradients) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameters.append(nn.Parameter(torch.zeros(1) if gradient is None else torch.zeros_like(gradient)))
        parameters[-1].grad = None if gradient is None else gradient.clone()
    return parameters


def gradients_of(parameters) -> list[Tensor]:
    return [p.grad.clone() for p in parameters if p.grad is not None]


def test_clip_gradient_norm__by_hand():
    case("gradients [3, 0], none, and [[4], [12]]: together they have the norm 13; max_norm=2")
    three, four = torch.tensor([3.0, 0.0]), torch.tensor([[4.0], [12.0]])
    parameters = with_gradients(three, None, four)
    norm = training.clip_gradient_norm_(parameters, 2.0)
    expect_close(gradients_of(parameters), [three * 2 / 13, four * 2 / 13], atol=1e-5, name="gradients", read=CLIP)
    expect_close(norm, torch.tensor(13.0), name="the norm before", read=CLIP)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3])
def test_clip_gradient_norm__equals_torch(dtype, max_norm):
    case(f"gradients [3, 4], [5], [2, 1, 2] and [], {str(dtype)[6:]}, max_norm={max_norm}")
    gradients = [randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(3, 4), (5,), (2, 1, 2), ()])]
    mine, theirs = with_gradients(*gradients), with_gradients(*gradients)
    norm = training.clip_gradient_norm_(mine, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    expect_close(norm, expected, atol=1e-6, name="the norm before", read=CLIP)
    expect_close(gradients_of(mine), gradients_of(theirs), atol=1e-6, name="gradients", read=CLIP)


def test_clip_gradient_norm__takes_generators_single_tensors_and_nothing():
    read = "the contract of exercise 7.5, under Args"
    case("a generator of two parameters with gradients [3] and [4], max_norm=1")
    parameters = with_gradients(torch.tensor([3.0]), torch.tensor([4.0]))
    norm = training.clip_gradient_norm_((p for p in parameters), 1.0)
    expected = [torch.tensor([0.6]), torch.tensor([0.8])]
    expect_close(gradients_of(parameters), expected, atol=1e-5, name="gradients", read=read)
    expect_close(norm, torch.tensor(5.0), name="the norm before", read=read)
    case("one parameter, not in a list, with the gradient [3, 4]")
    (alone,) = with_gradients(torch.tensor([3.0, 4.0]))
    expect_close(training.clip_gradient_norm_(alone, 10.0), torch.tensor(5.0), name="the norm before", read=read)
    case("no gradient at all")
    expect_close(training.clip_gradient_norm_(with_gradients(None), 1.0), torch.tensor(0.0), name="the norm", read=read)


def test_clip_gradient_norm__works_in_place():
    case("a parameter whose gradient is a view of a flat buffer, as chapter 10's are; norm 5, max_norm=1")
    buffer = torch.tensor([3.0, 4.0])
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = buffer[:]
    training.clip_gradient_norm_([parameter], 1.0)
    expect_close(buffer, torch.tensor([0.6, 0.8]), atol=1e-5, name="the buffer", read="the contract of exercise 7.5")


def test_clip_gradient_norm__brings_nothing_to_the_host():
    case("gradients [3] and [4], max_norm=1 and max_norm=100: item(), float() and if are counted")
    for max_norm in (1.0, 100.0):
        parameters = with_gradients(torch.tensor([3.0]), torch.tensor([4.0]))
        with HostReads() as host:
            training.clip_gradient_norm_(parameters, max_norm)
        expect_equal(host.n, 0, name="values brought to the host", read="the contract of exercise 7.5, under Cost")
    case("gradients on the meta device, which have a shape and no values")
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    parameter.grad = torch.zeros(3, device="meta")
    norm = training.clip_gradient_norm_([parameter], 1.0)
    expect_equal(str(norm.device), "meta", name="the norm's device", read="the contract of exercise 7.5, under Cost")


@pytest.mark.gpu
def test_clip_gradient_norm__does_not_wait_for_the_gpu():
    case("gradients on the GPU, torch.cuda.set_sync_debug_mode('error')")
    parameters = with_gradients(torch.ones(3, device="cuda"), torch.ones(4, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = training.clip_gradient_norm_(parameters, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expect_close(norm.cpu(), torch.tensor(math.sqrt(7.0)), name="the norm before", read=CLIP)


# ---- 7.7 accumulate_gradients ----------------------------------------------------------------------------------------


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
        self.n = self.most = 0

    def forward(self, inputs, targets):
        def pack(tensor):
            kept = Kept(tensor)
            self.alive.append((self.n, weakref.ref(kept)))
            return kept

        self.n += 1
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
    expect_true(not found.requires_grad, "the mean loss should be detached: it would keep what was computed alive")


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
    read = "the contract of exercise 7.7, under Returns"
    expect_close(found, [g + 1 for g in gradients], atol=1e-10, name="gradients", read=read)


def test_accumulate_gradients_holds_one_micro_batch_at_a_time():
    case("five micro-batches of 2 items: graphs alive at once")
    model = Tiny()
    training.accumulate_gradients(model, [batch_of(2, seed=i) for i in range(5)])
    expect_true(
        model.most == 1,
        f"{model.most} forward passes were kept for backward at once: call backward for each micro-batch before the next forward",
        read="the contract of exercise 7.7, under Cost",
    )


def test_accumulate_gradients_of_nothing():
    case("no micro-batch: a list and a generator")
    for nothing in ([], iter(())):
        with expect_raises(ValueError, "micro", read="the contract of exercise 7.7, under Raises"):
            training.accumulate_gradients(Tiny(), nothing)


# ---- 7.10 hours_per_epoch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("speed", "size", "hours"), [(1.0, 3600, 1.0), (250, 50_000, 1 / 18), (0.5, 900, 0.5)])
def test_hours_per_epoch_by_hand(speed, size, hours):
    case(f"{size} items at {speed} a second")
    expect_close(training.hours_per_epoch(speed, size), hours, name="hours", read=YARDSTICK)


@pytest.mark.parametrize("speed", [0, -3.0])
def test_hours_per_epoch_refuses_a_standstill(speed):
    case(f"{speed} items a second")
    with expect_raises(ValueError, str(speed), read="the contract of exercise 7.10, under Raises"):
        training.hours_per_epoch(speed, 100)
