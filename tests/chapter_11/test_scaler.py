"""The gradient scaler, graded step for step beside ``torch.amp.GradScaler`` on the CPU."""

import pytest
import torch
import torch._dynamo  # a `TorchDispatchMode` imports it when it is first used: not while a check's clock runs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded

amp = graded("amp")

RULE = "eq-amp-4"
ORDER = "the contract of ex-amp-gradscaler, under Raises"
IN_PLACE = "the contract, under unscale_: in place"


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def backward(scaler, weight: nn.Parameter, gradient: float | list[float]) -> None:
    """A loss whose gradient with respect to ``weight`` is ``gradient``."""
    weight.grad = None
    scaler.scale((weight * torch.tensor(gradient)).sum()).backward()


def take_step(scaler, optimizer, weight, gradient) -> None:
    backward(scaler, weight, gradient)
    scaler.step(optimizer)
    scaler.update()


def settings(**changes) -> dict:
    return {"init_scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2} | changes


def test_GradScaler_by_hand():
    case("scale 8, growth after 2: gradients 1, inf, 1, 1, 1, 1; the second step is skipped; lr 1")
    scaler, weight = amp.GradScaler(**settings(growth_factor=4.0)), parameter(10.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    found = []
    for gradient in (1.0, torch.inf, 1.0, 1.0, 1.0, 1.0):
        take_step(scaler, optimizer, weight, gradient)
        found.append([weight.item(), scaler.get_scale()])
    expected = [[9.0, 8.0], [9.0, 4.0], [8.0, 4.0], [7.0, 16.0], [6.0, 16.0], [5.0, 64.0]]
    expect_close(found, expected, name="weight and scale", read=RULE)


def test_GradScaler_scales_tensors_and_structures():
    case("scale 8: a tensor, a list, a tuple in a list")
    scaler = amp.GradScaler(init_scale=8.0)
    one, two = torch.tensor(1.0), torch.tensor([2.0, 3.0])
    expect_close(scaler.scale(two), torch.tensor([16.0, 24.0]), read=RULE)
    expect_close(scaler.scale([one, (two,)]), [torch.tensor(8.0), (torch.tensor([16.0, 24.0]),)], read=RULE)
    structure = scaler.scale([one, (two,)])
    kinds = [type(structure).__name__, type(structure[1]).__name__]
    expect_equal(kinds, ["list", "tuple"], name="types of a list and of the tuple in it", answer=structure, read=RULE)
    expect_close(one, torch.tensor(1.0), name="the loss afterwards")


def test_GradScaler_moves_its_scale_to_the_loss():
    case("a loss on the meta device, which has no numbers: the scale and its counter move there")
    scaler = amp.GradScaler(init_scale=8.0)
    scaled = scaler.scale(torch.empty((), device="meta"))
    where = [tensor.device.type for tensor in (scaled, scaler._scale, scaler._growth_tracker)]
    read = "the contract, under scale"
    expect_equal(where, ["meta"] * 3, name="devices of the scaled loss, _scale, _growth_tracker", read=read)


def test_GradScaler_starts_as_torchs():
    case("GradScaler() without arguments")
    scaler, theirs = amp.GradScaler(), torch.amp.GradScaler("cpu")
    expect_close(scaler.get_scale(), theirs.get_scale(), name="scale", read="the contract")
    expect_equal(dict(scaler.state_dict()), theirs.state_dict(), name="state_dict()")
    expect_close(scaler.scale(torch.tensor(0.5)), theirs.scale(torch.tensor(0.5)), name="scale(0.5)", read=RULE)


def test_GradScaler_unscales_in_place_once():
    case("scale 8, gradient 3: unscale_, clip to 1, step; lr 1")
    scaler, weight = amp.GradScaler(init_scale=8.0), parameter(10.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    backward(scaler, weight, 3.0)
    gradient = weight.grad
    expect_close(gradient, torch.tensor([24.0]), name="gradient before", read=RULE)
    scaler.unscale_(optimizer)
    expect_close(weight.grad, torch.tensor([3.0]), name="gradient after unscale_", read=RULE)
    expect_true(weight.grad is gradient, "the gradient is a new tensor", answer=weight.grad, read=IN_PLACE)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    scaler.step(optimizer)
    expect_close(weight.detach(), torch.tensor([9.0]), atol=1e-5, name="weight", read=RULE)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_GradScaler_equals_torchs_step_for_step(seed):
    case(f"60 steps of AdamW, three tensors, one step in four with inf or NaN, growth after 3, seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    sizes, both = [(3,), (1,), (2, 2)], []
    start = [torch.randn(size, generator=generator) for size in sizes]
    for make in (amp.GradScaler, lambda **kw: torch.amp.GradScaler("cpu", **kw)):
        weights = [nn.Parameter(w.clone()) for w in start]
        scaler = make(**settings(init_scale=1000.0, growth_interval=3, growth_factor=3.0, backoff_factor=0.3))
        both.append((scaler, weights, torch.optim.AdamW(weights, lr=0.1)))
    for step in range(60):
        gradients = [torch.randn(size, generator=generator) for size in sizes]
        if torch.rand((), generator=generator) < 0.25:
            gradients[step % 3].view(-1)[0] = [torch.inf, torch.nan, -torch.inf][step % 3]
        for scaler, weights, optimizer in both:
            optimizer.zero_grad()
            losses = [(w * g).sum() for w, g in zip(weights, gradients, strict=True)]
            scaler.scale(sum(losses, torch.zeros(()))).backward()
            scaler.step(optimizer)
            scaler.update()
        (ours, mine, _), (theirs, other, _) = both
        expect_close(ours.get_scale(), theirs.get_scale(), rtol=1e-6, name=f"scale after step {step}", read=RULE)
        values = [w.detach() for w in mine], [w.detach() for w in other]
        expect_close(*values, atol=1e-6, name=f"weights after step {step}", read=RULE)
        expect_equal(ours.state_dict()["_growth_tracker"], theirs.state_dict()["_growth_tracker"], name="tracker")


def test_GradScaler_of_two_optimizers():
    for place in ("first", "second"):
        case(f"two optimizers, the {place} with inf: the other steps, and the scale backs off once")
        scaler, bad, good = amp.GradScaler(**settings()), parameter(1.0), parameter(1.0)
        optimizers = [
            torch.optim.SGD([weight], lr=1.0) for weight in ((bad, good) if place == "first" else (good, bad))
        ]
        backward(scaler, bad, torch.inf)
        backward(scaler, good, 0.25)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        found = [bad.item(), good.item(), scaler.get_scale()]
        expect_close(found, [1.0, 0.75, 4.0], name="weights and scale", read=RULE)
    case("both without inf: one update counts once, so the scale does not grow yet")
    backward(scaler, bad, 1.0)
    backward(scaler, good, 1.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    found = [scaler.get_scale(), scaler.state_dict()["_growth_tracker"]]
    expect_close(found, [4.0, 1], name="scale and _growth_tracker", read=RULE)


def test_GradScaler_updates_without_a_step():
    case("inf: unscale_, no step, update, which backs off from 8; then a whole step with gradient 0.25, lr 1")
    scaler, weight = amp.GradScaler(**settings()), parameter(1.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    backward(scaler, weight, torch.inf)
    scaler.unscale_(optimizer)
    scaler.update()
    take_step(scaler, optimizer, weight, 0.25)
    found = [weight.item(), scaler.get_scale()]
    expect_close(found, [0.75, 4.0], name="weight and scale", read="the contract, under update")


def test_GradScaler_skips_for_any_gradient():
    case("three parameters in two groups: one without a gradient, one finite, the last entry of the third NaN")
    none, fine, bad = parameter(1.0), parameter(1.0, 2.0), parameter(1.0, 2.0, 3.0)
    scaler = amp.GradScaler(**settings())
    optimizer = torch.optim.SGD([{"params": [none, fine]}, {"params": [bad]}], lr=1.0)
    scaler.scale(fine.sum() + (bad * torch.tensor([1.0, 1.0, torch.nan])).sum()).backward()
    returned = scaler.step(optimizer)
    expect_true(returned is None, "a skipped step returned something", answer=[returned], read=RULE)
    scaler.update()
    expect_close([fine.detach(), bad.detach()], [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])], read=RULE)
    expect_close(scaler.get_scale(), 4.0, name="scale", read=RULE)


def test_GradScaler_looks_at_large_gradients_as_they_are():
    case("finite gradients of 1e30: their squares would overflow float32, they do not")
    scaler, weight = amp.GradScaler(init_scale=2.0), parameter(0.0, 0.0)
    optimizer = torch.optim.SGD([weight], lr=1e-30)
    take_step(scaler, optimizer, weight, [1e30, -1e30])
    expect_close(weight.detach(), torch.tensor([-1.0, 1.0]), name="weight", read=RULE)
    case("three finite gradients of 1.5e38: their sum would overflow float32, they do not")
    scaler, weight = amp.GradScaler(init_scale=2.0), parameter(0.0, 0.0, 0.0)
    take_step(scaler, torch.optim.SGD([weight], lr=1e-37), weight, [1.5e38] * 3)
    expect_close(weight.detach(), torch.full((3,), -15.0), name="weight", read=RULE)


def test_GradScaler_takes_sparse_and_bfloat16_gradients():
    case("an embedding with sparse gradients; a bfloat16 parameter; a float64 parameter")
    embedding, scaler = nn.Embedding(4, 2, sparse=True), amp.GradScaler(init_scale=8.0)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    before = embedding.weight.detach().clone()
    scaler.scale(embedding(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    expected = before - torch.tensor([[0.0], [2.0], [0.0], [1.0]])
    expect_close(embedding.weight.detach(), expected, name="embedding", read=RULE)
    for dtype in (torch.bfloat16, torch.float64):
        weight = nn.Parameter(torch.ones(2, dtype=dtype))
        take_step(scaler, torch.optim.SGD([weight], lr=0.5), weight, [1.0, 1.0])
        expect_close(weight.detach(), torch.full((2,), 0.5, dtype=dtype), name="weight", read=RULE)


@pytest.mark.parametrize("worst", [torch.bfloat16, torch.float64, torch.float32])
def test_GradScaler_of_one_optimizer_with_several_dtypes(worst):
    case(f"one optimizer with a float32, a bfloat16 and a float64 parameter: a good step, then inf in {str(worst)[6:]}")
    weights = [nn.Parameter(torch.ones(2, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float64)]
    scaler, optimizer = amp.GradScaler(**settings()), torch.optim.SGD(weights, lr=0.5)
    for gradient in (1.0, torch.inf):
        optimizer.zero_grad()
        losses = [(w * (gradient if w.dtype == worst else 1.0)).sum() for w in weights]
        for loss in scaler.scale(losses):
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
    found = [w.detach() for w in weights]
    expect_close(found, [torch.full((2,), 0.5, dtype=w.dtype) for w in weights], name="weights", read=RULE)
    expect_close(scaler.get_scale(), 4.0, name="scale", read=RULE)


def test_GradScaler_does_not_grow_to_infinity():
    case("scale 2**127, growth after 2: doubling would be infinite, so it stays, and the count begins again")
    scaler, weight = amp.GradScaler(**settings(init_scale=2.0**127)), parameter(1.0)
    optimizer, found = torch.optim.SGD([weight], lr=1.0), []
    for _ in range(3):
        take_step(scaler, optimizer, weight, 2.0**-100)
        found.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    expect_equal(found, [(2.0**127, n) for n in (1, 0, 1)], name="scale and _growth_tracker", read=RULE)


def test_GradScaler_refuses_what_is_out_of_order():
    scaler, weight = amp.GradScaler(**settings()), parameter(1.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    case("unscale_ before any backward: no parameter has a gradient")
    with expect_raises(RuntimeError, read=ORDER):
        scaler.unscale_(optimizer)
    backward(scaler, weight, 1.0)
    case("update after backward, but before unscale_ and step")
    with expect_raises(RuntimeError, read=ORDER):
        scaler.update()
    case("unscale_ twice")
    scaler.unscale_(optimizer)
    with expect_raises(RuntimeError, "unscale_()", read=ORDER):
        scaler.unscale_(optimizer)
    case("step twice")
    scaler.step(optimizer)
    with expect_raises(RuntimeError, "step()", read=ORDER):
        scaler.step(optimizer)
    case("unscale_ after step")
    with expect_raises(RuntimeError, "step()", read=ORDER):
        scaler.unscale_(optimizer)
    case("after these errors: update, then a whole step; the weight has moved twice")
    scaler.update()
    take_step(scaler, optimizer, weight, 1.0)
    expect_close(weight.item(), -1.0, name="weight after two steps", read=RULE)


def test_GradScaler_refuses_a_closure():
    scaler, weight = amp.GradScaler(**settings()), parameter(1.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    backward(scaler, weight, 1.0)
    case("step(optimizer, closure=...)")
    with expect_raises(RuntimeError, "closure", read=ORDER):
        scaler.step(optimizer, closure=lambda: 0.0)
    case("step(optimizer, closure), the closure by position")
    with expect_raises(RuntimeError, "closure", read=ORDER):
        scaler.step(optimizer, lambda: 0.0)


def test_GradScaler_takes_empty_gradients():
    scaler, empty, weight = amp.GradScaler(**settings()), nn.Parameter(torch.empty(0, 3)), parameter(1.0)
    case("two parameters, one of them without entries, so that its gradient has the shape [0, 3]")
    optimizer = torch.optim.SGD([empty, weight], lr=0.25)
    scaler.scale(empty.sum() + weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    expect_close(weight.detach(), torch.tensor([0.75]), name="weight", read=RULE)
    case("an optimizer with nothing but an empty gradient: nothing is inf, and the second update grows the scale")
    optimizer = torch.optim.SGD([empty], lr=0.25)
    empty.grad = None
    scaler.scale(empty.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    expect_close(scaler.get_scale(), 16.0, name="scale", read=RULE)


def test_GradScaler_refuses_float16_parameters():
    case("a model made float16 by half(): its gradients are float16")
    scaler, weight = amp.GradScaler(**settings()), nn.Parameter(torch.ones(2, dtype=torch.float16))
    backward(scaler, weight, [1.0, 1.0])
    with expect_raises(ValueError, "float16", read=ORDER):
        scaler.step(torch.optim.SGD([weight], lr=1.0))
    case("an optimizer with a float32 parameter and, after it, the float16 one")
    scaler, first = amp.GradScaler(**settings()), parameter(1.0)
    first.grad = torch.ones(1)
    with expect_raises(ValueError, "float16", read=ORDER):
        scaler.unscale_(torch.optim.SGD([first, weight], lr=1.0))


def test_GradScaler_passes_on_what_step_returns():
    class Optimizer(torch.optim.SGD):
        def step(self, closure=None, *, said="nothing"):
            super().step(closure)
            return said

    case("step(optimizer, said='stepped'); the optimizer's step returns what it gets as `said`")
    scaler, weight = amp.GradScaler(**settings()), parameter(1.0)
    backward(scaler, weight, 1.0)
    returned = [scaler.step(Optimizer([weight], lr=1.0), said="stepped")]
    expect_equal(returned, ["stepped"], name="[step()]", read="the contract, under step")


def test_GradScaler_resumes():
    case("the state after three steps, loaded into new scalers, ours and PyTorch's, and from PyTorch's")
    scaler, weight = amp.GradScaler(**settings(growth_interval=5)), parameter(1.0)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for gradient in (torch.inf, 1.0, 1.0):
        take_step(scaler, optimizer, weight, gradient)
    state = scaler.state_dict()
    scales = []
    for other in (amp.GradScaler(), torch.amp.GradScaler("cpu")):
        other.load_state_dict(state)
        for _ in range(3):
            take_step(other, optimizer, weight, 1.0)
        scales.append(other.get_scale())
    expect_close(scales, [8.0, 8.0], name="scales of ours and PyTorch's", read=RULE)


class _Counter(TorchDispatchMode):
    """Counts the operations with which the host reads a device's numbers."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func.name().split("::")[1].split(".")[0] in (
            "_local_scalar_dense",
            "nonzero",
            "equal",
            "is_nonzero",
        )
        return func(*args, **(kwargs or {}))


def test_GradScaler_keeps_the_dtypes_of_its_state():
    case("after an update that grows the scale, one that backs off, one that only counts, and load_state_dict")
    scaler, weight = amp.GradScaler(**settings(growth_interval=1)), parameter(1.0)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    found = []
    for gradient, interval in ((1.0, 1), (torch.inf, 1), (1.0, 9)):
        scaler.growth_interval = interval
        take_step(scaler, optimizer, weight, gradient)
        found.append([scaler._scale.dtype, scaler._growth_tracker.dtype])
    scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    found.append([scaler._scale.dtype, scaler._growth_tracker.dtype])
    expected = [[torch.float32, torch.int32]] * 4
    expect_equal(found, expected, name="dtypes of _scale, _growth_tracker", read="the contract, under update")


@pytest.mark.parametrize("gradient", [1.0, torch.inf])
def test_GradScaler_reads_one_value_a_step(gradient):
    case(f"eight parameters, five steps, gradient {gradient}: how often the host reads a value, by method")
    weights, scaler = [parameter(1.0, 2.0) for _ in range(8)], amp.GradScaler(**settings(growth_interval=1))
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    loss = sum((w * gradient).sum() for w in weights)
    reads = dict.fromkeys(("scale", "unscale_", "step", "update"), 0)
    allowed = reads | {"step": 5}
    for _ in range(5):
        calls = {"scale": lambda: scaler.scale(loss).backward(retain_graph=True)}
        calls |= {"unscale_": lambda: scaler.unscale_(optimizer), "step": lambda: scaler.step(optimizer)}
        for name, call in (calls | {"update": scaler.update}).items():
            with _Counter() as counter:
                call()
            reads[name] += counter.reads
    for name, count in reads.items():
        problem = f"in 5 steps the host read {count} values in {name}; at most {allowed[name]} are allowed there"
        read = "the contract, under Cost"
        expect_true(count <= allowed[name], problem, answer=reads, read=read)
