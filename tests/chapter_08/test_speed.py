"""Speed, graded: clocks that the test winds, and counts that PyTorch makes itself."""

import gc
import math
import statistics
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lib.given.models.gpt2 import GPT2_SMALL, GPT2_XL, GPT2Config
from lib.given.models.sizes import MODEL_SIZES
from lib.given.models.vit import VIT_L_16, ViTConfig
from lib.gpt2 import GPT2
from lib.vit import VisionTransformer
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle, recorded

speed = graded("speed")

TIMING, PRODUCT, ROOF, PAIRS, TRAINING, IMAGE, SHARE = (f"eq-speed-{n}" for n in (1, 2, 3, 4, 5, 6, 7))
WAITING = "the contract, under Convention"
TINY = GPT2Config(vocab_size=10, context_len=3, dim=4, n_layers=1, n_heads=2)
ODD = GPT2Config(vocab_size=101, context_len=9, dim=24, n_layers=3, n_heads=2)
TINY_VIT = ViTConfig(image_size=4, patch_size=2, channels=1, n_classes=5, dim=2, n_layers=1, n_heads=1, hidden_dim=3)
ODD_VIT = ViTConfig(image_size=12, patch_size=4, n_classes=7, dim=24, n_layers=3, n_heads=2, hidden_dim=40)
CLOCK = "perf" + "_counter"  # the clock that the test winds; no test reads a real one


def counted_flops(run) -> int:
    """What PyTorch counts while ``run`` runs."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def expect_whole(found, expected: int, unit: str = "FLOPs", **where) -> None:
    """Exactly this number, and an int: a float holds no more than 53 bits of it."""
    if found == expected and not isinstance(found, int):
        problem = f"a {type(found).__name__}, expected an int: {unit} are counted in whole numbers (// divides them)"
        expect_true(False, problem, answer=found, **where)
    expect_equal(found, expected, **where)


# ---- benchmark -------------------------------------------------------------------------------------------------------


class Machine:
    """A host and an asynchronous device with a clock of their own: calls return at once, the work is done later."""

    launch_s = 0.25

    def __init__(self, work_s):
        self.work_s, self.now, self.busy_until, self.done = list(work_s), 100.0, 0.0, []
        self.waited_for: list[torch.device | None] = []

    def fn(self):
        n = self.done.count("fn")
        self.now += self.launch_s
        self.busy_until = max(self.now, self.busy_until) + self.work_s[n % len(self.work_s)]
        self.done.append("fn")
        return "a result"

    def synchronize(self, *args, **kwargs):
        self.now = max(self.now, self.busy_until)
        self.done.append("synchronize")
        given = args[0] if args else kwargs.get("device")
        self.waited_for.append(given if given is None else torch.device(given))

    def clock(self):
        self.done.append("clock" if self.now >= self.busy_until else "clock while the device works")
        return self.now


class Host(Machine):
    """Without a device: the call itself takes the time."""

    def fn(self):
        super().fn()
        self.now = self.busy_until


@pytest.fixture
def run_on(monkeypatch):
    """Run ``benchmark`` on a machine that is put where torch and the clock are."""

    def run(machine, *args, accelerator=None, **kwargs):
        def synchronize_cuda(device=None):
            if device is not None and torch.device(device).type != "cuda":
                raise ValueError(f"Expected a cuda device, but got: {device}")  # as PyTorch does
            if device is not None or accelerator in ("cuda", None):
                machine.synchronize(device)

        with monkeypatch.context() as patch:
            patch.setattr(time, CLOCK, machine.clock)
            patch.setattr(torch.cuda, "synchronize", synchronize_cuda)
            for module in (torch.accelerator, torch.mps, torch.xpu):
                patch.setattr(module, "synchronize", machine.synchronize)
            patch.setattr(torch.cuda, "is_available", lambda: accelerator == "cuda")
            patch.setattr(torch.accelerator, "is_available", lambda: accelerator is not None)
            device = torch.device(accelerator) if accelerator else None
            patch.setattr(torch.accelerator, "current_accelerator", lambda *args: device)
            return speed.benchmark(machine.fn, *args, **kwargs)

    return run


def expect_timing(timing, times, machine, n_calls) -> None:
    is_read = any(event.startswith("clock") for event in machine.done)
    expect_true(is_read, f"the clock was never read: call time.{CLOCK}()", read=TIMING)
    found = {name: getattr(timing, name) for name in ("mean_s", "std_s", "median_s")}
    found = {name: float(x) if isinstance(x, int | float) else x for name, x in found.items()}  # also NumPy's
    found["times_s"] = list(timing.times_s)
    std = statistics.stdev(times) if len(times) > 1 else 0.0
    expected = {"mean_s": statistics.fmean(times), "std_s": std, "median_s": statistics.median(times)}
    expect_close(found, expected | {"times_s": list(times)}, name="the timing", read=TIMING)
    kinds = {name: type(getattr(timing, name)).__name__ for name in ("mean_s", "std_s", "median_s", "times_s")}
    fields = isinstance(timing.times_s, tuple) and all(isinstance(found[name], int | float) for name in expected)
    problem = f"a Timing holds three floats and a tuple, not {', '.join(kinds.values())}"
    expect_true(fields, problem, answer=kinds, read="the contract of ex-speed-benchmark")
    expect_equal(machine.done.count("fn"), n_calls, name="calls of fn", read="the contract of ex-speed-benchmark")


def test_benchmark_by_hand_on_the_host(run_on):
    case("on the CPU, 2 calls to warm up and 3 timed: they take 8.25, 4.25, 1.25, 2.25 and 6.25 s")
    machine = Host([8, 4, 1, 2, 6])
    expect_timing(run_on(machine, warmup=2, repeats=3, device="cpu"), [1.25, 2.25, 6.25], machine, 5)
    expect_true("synchronize" not in machine.done, "a synchronisation on the CPU, where there is nothing to wait for")


def test_benchmark_waits_at_all(run_on):
    case("a device that works for 3 s after calls that return in 0.25 s; warmup=1, repeats=1, device='cuda'")
    machine = Machine([3])
    run_on(machine, warmup=1, repeats=1, device="cuda", accelerator="cuda")
    problem = "the code never waits for the accelerator: torch.cuda.synchronize was never called"
    expect_true("synchronize" in machine.done, problem, answer=machine.done, read=WAITING)


def test_benchmark_waits_for_an_accelerator(run_on):
    case(
        "a device that works for 8, 4, 1, 2 and 6 s after calls that return in 0.25 s; warmup=2, repeats=3, "
        "device='cuda'"
    )
    machine = Machine([8, 4, 1, 2, 6])
    timing = run_on(machine, warmup=2, repeats=3, device="cuda", accelerator="cuda")
    expect_timing(timing, [1.25, 2.25, 6.25], machine, 5)
    problem = "the code read the clock while the device still worked: synchronise before each reading"
    expect_true("clock while the device works" not in machine.done, problem, read=WAITING)
    case("warmup=0, repeats=1, 3 s of work, and a device that has 5 s to go on what was queued before; device='cuda'")
    machine = Machine([3])
    machine.busy_until = machine.now + 5
    expect_timing(run_on(machine, warmup=0, repeats=1, device="cuda", accelerator="cuda"), [3.25], machine, 1)


@pytest.mark.parametrize("device", [torch.device("cuda"), torch.device("cuda", 1), "cuda:0", None])
def test_benchmark_takes_a_device_its_name_or_none(run_on, device):
    case(f"device={device!r}, and there is an accelerator")
    machine = Machine([3])
    timing = run_on(machine, 1, 2, device, accelerator="cuda")
    expect_timing(timing, [3.25, 3.25], machine, 3)


@pytest.mark.parametrize("device", [torch.device("cuda", 1), "cuda:1", torch.device("xpu", 2), "mps"])
def test_benchmark_waits_for_the_device_that_is_given(run_on, device):
    case(f"device={device!r}, which is not the current accelerator; 3 s of work after calls that return in 0.25 s")
    machine = Machine([3])
    timing = run_on(machine, 1, 2, device, accelerator="cuda")
    expect_timing(timing, [3.25, 3.25], machine, 3)
    waited_for = sorted({str(one) for one in machine.waited_for})
    expect_equal(waited_for, [str(device)], name="devices that were waited for", read=WAITING)


@pytest.mark.parametrize(("accelerator", "device"), [("xpu", None), ("xpu", "xpu:1"), ("mps", None), ("mps", "mps")])
def test_benchmark_waits_for_an_accelerator_that_is_not_cuda(run_on, accelerator, device):
    case(f"device={device!r} on a machine whose accelerator is {accelerator!r}; 3 s of work after calls of 0.25 s")
    machine = Machine([3])
    timing = run_on(machine, 1, 2, device, accelerator=accelerator)
    problem = "the code never waits for an accelerator that is not CUDA"
    expect_true("synchronize" in machine.done, problem, answer=machine.done, read=WAITING)
    expect_timing(timing, [3.25, 3.25], machine, 3)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_benchmark_on_the_cpu_waits_for_nothing(run_on, device):
    case(f"device={device!r}, and there is no accelerator")
    machine = Host([0.5])
    expect_timing(run_on(machine, 1, 2, device), [0.75, 0.75], machine, 3)
    expect_true("synchronize" not in machine.done, "a synchronisation on the CPU, where there is nothing to wait for")


def test_benchmark_defaults_are_five_and_ten(run_on):
    case("no argument but fn: 5 calls to warm up, 10 timed, the last of them slow")
    machine = Host([1.0] * 14 + [11.0])
    expect_timing(run_on(machine), [1.25] * 9 + [11.25], machine, 15)


def test_benchmark_of_two_calls(run_on):
    case("warmup=1, repeats=2: calls of 3.25, 1.25 and 5.25 s; two times have a standard deviation")
    machine = Host([3, 1, 5])
    expect_timing(run_on(machine, warmup=1, repeats=2), [1.25, 5.25], machine, 3)


def test_benchmark_without_warm_up_and_once(run_on):
    case("warmup=0, repeats=1: a single call, whose standard deviation is 0")
    machine = Host([7.0, 1.0])
    expect_timing(run_on(machine, warmup=0, repeats=1), [7.25], machine, 1)


@pytest.mark.parametrize(("name", "value"), [("warmup", -1), ("repeats", 0), ("repeats", -37), ("warmup", -29)])
def test_benchmark_refuses(run_on, name, value):
    case(f"{name}={value}")
    machine = Host([1.0])
    shown = (str(value),) if value else ()  # "0" stands in many a message
    with expect_raises(ValueError, name, *shown, read="the contract, under Raises"):
        run_on(machine, **{name: value})
    expect_equal(machine.done, [], name="what was done before the error")


# ---- matmul_flops ----------------------------------------------------------------------------------------------------


def test_matmul_flops_by_hand():
    case("m=2, k=3, n=5: ten results, each of three products and three additions")
    expect_whole(speed.matmul_flops(2, 3, 5), 60, read=PRODUCT)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (7, 1, 3), (1, 9, 4), (13, 5, 11)])
def test_matmul_flops_are_pytorchs(m, k, n):
    case(f"m={m}, k={k}, n={n}, against FlopCounterMode")
    a, b = torch.ones(m, k), torch.ones(k, n)
    expect_whole(speed.matmul_flops(m, k, n), counted_flops(lambda: a @ b), read=PRODUCT)


def test_matmul_flops_stay_exact_when_they_are_many():
    case("m=2^20+1, k=2^20+1, n=2^20+1: more than a float can count one by one")
    side = 2**20 + 1
    expect_whole(speed.matmul_flops(side, side, side), 2 * side**3, read=PRODUCT)


@oracle
def test_matmul_flops_on_any_sizes():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(max_examples=20, deadline=None)
    @given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
    def check(m, k, n):
        case(f"m={m}, k={k}, n={n}")
        a, b = torch.ones(m, k, device="meta"), torch.ones(k, n, device="meta")
        expect_whole(speed.matmul_flops(m, k, n), counted_flops(lambda: a @ b), read=PRODUCT)

    check()


# ---- roofline_seconds ------------------------------------------------------------------------------------------------


def test_roofline_seconds_by_hand():
    for flops, n_bytes, expected in [(600.0, 10.0, 6.0), (100.0, 70.0, 3.5), (200.0, 40.0, 2.0), (0.0, 30.0, 1.5)]:
        case(f"{flops:.0f} FLOPs and {n_bytes:.0f} bytes at 100 FLOP/s and 20 bytes/s")
        expect_close(speed.roofline_seconds(flops, n_bytes, 100.0, 20.0), expected, read=ROOF)


def test_roofline_seconds_take_whole_numbers_and_names():
    case("a bf16 product of 8192 cubed at 989e12 FLOP/s and 4.8e12 bytes/s")
    n = 8192
    found = speed.roofline_seconds(flops=2 * n**3, bytes_moved=3 * 2 * n * n, peak_flops=989e12, bandwidth=4.8e12)
    expect_close(found, 2 * n**3 / 989e12, rtol=1e-12, read=ROOF)
    case("a float32 copy of 2^30 bytes on the same processor")
    expect_close(speed.roofline_seconds(0, 2**31, 989e12, 4.8e12), 2**31 / 4.8e12, rtol=1e-12, read=ROOF)


def test_roofline_seconds_follow_the_slower_side_only():
    case("10 FLOPs at 10 FLOP/s beside 50 bytes at 10 bytes/s: a processor twice as fast changes nothing")
    slow, fast = (speed.roofline_seconds(10.0, 50.0, peak, 10.0) for peak in (10.0, 20.0))
    expect_close([slow, fast], [5.0, 5.0], read=ROOF)


# ---- attention_flops -------------------------------------------------------------------------------------------------


def attention_by_rows(config, length, causal) -> int:
    """FlopCounterMode's count of attention that computes, query by query, the pairs that are allowed and no other."""
    q, k, v = torch.ones(3, config.n_heads, length, config.dim // config.n_heads, device="meta")

    def run():
        for _ in range(config.n_layers):
            for t in range(length):
                seen = t + 1 if causal else length
                scores = q[:, t : t + 1] @ k[:, :seen].transpose(1, 2)
                scores.softmax(-1) @ v[:, :seen]

    return counted_flops(run)


def test_attention_flops_by_hand():
    config = GPT2Config(vocab_size=10, context_len=8, dim=4, n_layers=3, n_heads=2)
    case("dim=4, 3 layers, length T=3, not causal: 9 pairs in each layer, 4 FLOPs for each of 4 features of the heads")
    expect_whole(speed.attention_flops(config, 3, False), 432, read=PAIRS)
    case("dim=4, 3 layers, length T=3, causal: 6 pairs in each layer, T (T + 1) / 2")
    expect_whole(speed.attention_flops(config, 3, causal=True), 288, read=PAIRS)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_attention_flops_are_pytorchs(length, causal):
    for config in (TINY, ODD, replace(ODD, n_heads=8, n_layers=2)):
        case(f"dim={config.dim}, {config.n_heads} heads, {config.n_layers} layers, length={length}, causal={causal}")
        expect_whole(
            speed.attention_flops(config, length, causal), attention_by_rows(config, length, causal), read=PAIRS
        )


def test_attention_flops_take_a_vit_and_any_length():
    case("ViT-L/16's 197 tokens, not causal")
    expect_whole(speed.attention_flops(VIT_L_16, 197, False), 4 * 24 * 1024 * 197**2, read=PAIRS)
    case("GPT-2 small over 1,000,001 tokens, causal: whole numbers, exactly")
    expected = 4 * 12 * 768 * (1_000_001 * 1_000_002 // 2)
    expect_whole(speed.attention_flops(GPT2_SMALL, 1_000_001, True), expected, read=PAIRS)
    case("one layer of dim=3 over 1,000,000,001 tokens: more than a float can count one by one")
    for causal, pairs in ((True, 1_000_000_001 * 500_000_001), (False, 1_000_000_001**2)):
        config = GPT2Config(vocab_size=10, context_len=8, dim=3, n_layers=1, n_heads=1)
        expect_whole(speed.attention_flops(config, 1_000_000_001, causal), 12 * pairs, read=PAIRS)


# ---- training_flops_per_token ----------------------------------------------------------------------------------------


def step_of(model, *inputs):
    """A forward and a backward pass."""
    return lambda: model(*inputs)[1].backward()


def test_training_flops_per_token_by_hand():
    case("V=10, T=3, C=4, one layer: 3 x (384 for the linear maps, 80 for the head, 48 for attention)")
    expect_whole(speed.training_flops_per_token(TINY), 1536, read=TRAINING)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("config", [TINY, ODD, replace(ODD, padded_vocab_size=128), replace(ODD, n_heads=8)])
def test_training_flops_per_token_are_pytorchs(config, batch):
    case(f"{config}, {batch} sequences, against FlopCounterMode")
    tokens = torch.zeros(batch, config.context_len, dtype=torch.long)
    total = counted_flops(step_of(GPT2(config), tokens, tokens))
    expect_whole(speed.training_flops_per_token(config), total // tokens.numel(), read=TRAINING)


def test_training_flops_per_token_of_transformers():
    def count():
        import transformers

        sizes: dict[str, Any] = {
            "vocab_size": 101,
            "n_positions": 9,
            "n_embd": 24,
            "n_layer": 3,
            "n_head": 2,
            "n_inner": None,
            "attn_implementation": "eager",
        }
        settings = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        model, tokens = transformers.GPT2LMHeadModel(settings), torch.zeros(2, 9, dtype=torch.long)
        total = counted_flops(lambda: model(tokens, labels=tokens).loss.backward())
        return torch.tensor([total / 18], dtype=torch.float64)

    case(f"{ODD}, against FlopCounterMode on Transformers' GPT-2")
    expected = int(recorded("flops_per_token_of_gpt2", count).item())
    expect_whole(speed.training_flops_per_token(ODD), expected, read=TRAINING)


def test_training_flops_per_token_of_the_real_sizes():
    for name, config in {"GPT-2 small": GPT2_SMALL, "GPT-2 XL": GPT2_XL, "2.7B": MODEL_SIZES["2.7B"]}.items():
        case(f"{name}: no model is built")
        layers, c = config.n_layers, config.dim
        expected = 72 * layers * c * c + 6 * config.vocab_size * c + 12 * layers * config.context_len * c
        expect_whole(speed.training_flops_per_token(config), expected, read=TRAINING)


# ---- vit_training_flops_per_image ------------------------------------------------------------------------------------


def test_vit_training_flops_per_image_by_hand():
    case(
        "4 patches of 4 pixels, C=2, F=3, one layer, 5 classes: 2 x 64 for the patches, "
        "3 x (160 for the projections + 120 for the feed-forward part + 200 for attention + 20 for the head)"
    )
    expect_whole(speed.vit_training_flops_per_image(TINY_VIT), 1628, read=IMAGE)


VITS = [TINY_VIT, ODD_VIT, replace(ODD_VIT, pooling="mean", channels=1), replace(ODD_VIT, gelu="tanh", n_heads=3)]


@pytest.mark.parametrize("config", VITS)
def test_vit_training_flops_per_image_are_pytorchs(config):
    case(f"{config}, 3 images, against FlopCounterMode")
    images = torch.zeros(3, config.channels, config.image_size, config.image_size)
    model = VisionTransformer(config)
    total = counted_flops(lambda: model(images).sum().backward())
    expect_whole(speed.vit_training_flops_per_image(config), total // 3, read=IMAGE)


def test_vit_training_flops_per_image_of_transformers():
    def count():
        import transformers

        sizes: dict[str, Any] = {
            "image_size": 12,
            "patch_size": 4,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
        }
        sizes |= {"intermediate_size": 40, "num_labels": 7, "attn_implementation": "eager"}
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
        total = counted_flops(lambda: model(torch.zeros(2, 3, 12, 12)).logits.sum().backward())
        return torch.tensor([total / 2], dtype=torch.float64)

    case(f"{ODD_VIT}, against FlopCounterMode on Transformers' ViT")
    expected = int(recorded("flops_per_image_of_vit", count).item())
    expect_whole(speed.vit_training_flops_per_image(ODD_VIT), expected, read=IMAGE)


def test_vit_training_flops_per_image_of_a_real_size():
    case("ViT-L/16 at 224 x 224: no model is built")
    block = 2 * 197 * (4 * 1024**2 + 2 * 1024 * 4096) + 4 * 197**2 * 1024
    expected = 2 * 2 * 196 * 768 * 1024 + 3 * (24 * block + 2 * 1024 * 1000)
    expect_whole(speed.vit_training_flops_per_image(VIT_L_16), expected, read=IMAGE)


# ---- mfu -------------------------------------------------------------------------------------------------------------


def test_mfu_by_hand():
    case("50 items/s of 4 TFLOP each on a processor of 1000 TFLOP/s")
    expect_close(speed.mfu(50.0, 4e12, 1e15), 0.2, read=SHARE)


def test_mfu_takes_whole_numbers_and_names():
    case("430,000 tokens/s of 854,438,400 FLOPs at 989.4 TFLOP/s")
    found = speed.mfu(items_per_second=430_000, flops_per_item=854_438_400, peak_flops=989_400_000_000_000)
    expect_close(found, 430_000 * 854_438_400 / 989.4e12, rtol=1e-12, read=SHARE)


def test_mfu_is_proportional():
    case("twice the speed or half the peak doubles the MFU; nothing done is 0")
    base, faster, smaller = speed.mfu(10.0, 3.0, 120.0), speed.mfu(20.0, 3.0, 120.0), speed.mfu(10.0, 3.0, 60.0)
    expect_close([base, faster, smaller], [0.25, 0.5, 0.5], read=SHARE)
    expect_close(speed.mfu(0.0, 3.0, 120.0), 0.0, read=SHARE)


# ---- saved_activation_bytes ------------------------------------------------------------------------------------------

SAVED = "eq-speed-8"


def randn(*shape, seed=0, dtype=torch.float32, grad=True):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(grad)


def bytes_in_graph(out) -> int:
    """Bytes of the storages that the nodes behind ``out`` hold, read off the nodes themselves."""
    storages, todo, seen = {}, [out.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(value, torch.Tensor) and value.dim():  # a number such as the 8 in x / 8 is no activation
                storages[value.untyped_storage()._cdata] = value.untyped_storage()
        todo += [following for following, _ in node.next_functions]
    return sum(storage.nbytes() for storage in storages.values())


def test_saved_activation_bytes_by_hand():
    x, w = randn(3, 5), randn(3, 5, seed=1)
    cases = [
        ("x.exp() keeps its result, 15 x 4 bytes", lambda: x.exp(), 60),
        ("x * w keeps both factors", lambda: x * w, 120),
        ("x * x keeps x, twice, in one storage", lambda: x * x, 60),
        ("x.view(5, 3) * x[1, :3] keeps two views of one storage", lambda: x.view(5, 3) * x[1, :3], 60),
        ("x + w keeps nothing: the gradient of a sum needs neither", lambda: x + w, 0),
        ("x.exp().exp() keeps two results", lambda: x.exp().exp(), 120),
    ]
    for text, fn, expected in cases:
        case(f"x and w [3, 5], float32: {text}")
        expect_whole(speed.saved_activation_bytes(fn), expected, "bytes", read=SAVED)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 8), (torch.bfloat16, 2), (torch.float16, 2)])
def test_saved_activation_bytes_depend_on_the_dtype(dtype, size):
    case(f"x [7] of {str(dtype)[6:]}: x.exp()")
    x = randn(7, dtype=dtype)
    expect_equal(speed.saved_activation_bytes(lambda: x.exp()), 7 * size, read=SAVED)


def test_saved_activation_bytes_are_of_whole_storages():
    case("two rows of a table [100, 4] times w [2, 4]: the view keeps all 100 rows alive")
    table, w = randn(100, 4, grad=False), randn(2, 4)
    expect_equal(speed.saved_activation_bytes(lambda: table[3:5] * w), 1600, read=SAVED)
    case("a column vector expanded to [6, 50] times w [6, 50]: 6 numbers are kept")
    column, wide = randn(6, 1, grad=False), randn(6, 50)
    expect_equal(speed.saved_activation_bytes(lambda: column.expand(6, 50) * wide), 24, read=SAVED)


def test_saved_activation_bytes_are_none_without_a_gradient():
    case("x needs no gradient: x.exp()")
    x, y = randn(4, grad=False), randn(4)
    expect_equal(speed.saved_activation_bytes(lambda: x.exp()), 0, read=SAVED)
    case("under torch.no_grad(): y.exp()")
    with torch.no_grad():
        expect_equal(speed.saved_activation_bytes(lambda: y.exp()), 0, read=SAVED)


def test_saved_activation_bytes_are_what_the_graph_holds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 2))
    x, convolution = randn(5, 6, grad=False), nn.Conv1d(2, 3, 2)
    for text, fn in [("an MLP", lambda: model(x)), ("a convolution", lambda: convolution(randn(1, 2, 8)).relu())]:
        case(f"{text}, against the tensors that its graph's nodes hold")
        expect_equal(speed.saved_activation_bytes(fn), bytes_in_graph(fn()), read=SAVED)


def test_saved_activation_bytes_see_checkpoints():
    case("8 tanh in a checkpoint: only the input [11] is kept")
    x = randn(11)

    def chain(y):
        for _ in range(8):
            y = y.tanh()
        return y

    def checkpointed():
        return torch.utils.checkpoint.checkpoint(chain, x, use_reentrant=False)

    expect_equal(speed.saved_activation_bytes(checkpointed), 44, read=SAVED)
    case("the same 8 tanh without a checkpoint")
    expect_equal(speed.saved_activation_bytes(lambda: chain(x)), 8 * 44, read=SAVED)


def test_saved_activation_bytes_count_what_fn_drops_again():
    read = "the contract, under Convention: a _cdata is given out again when its storage has ended"
    for sizes in ([1000, 100, 10], [1000] * 10):

        def fn(sizes=sizes):
            for size in sizes:
                torch.randn(size, requires_grad=True) ** 2  # keeps its input, and is dropped

        case(f"x ** 2 for new x of {sizes} numbers, one after the other, each dropped before the next is made")
        expect_equal(speed.saved_activation_bytes(fn), 4 * sum(sizes), read=read)


def test_saved_activation_bytes_hold_nothing_afterwards():
    case("y = x.exp(), which saves its own output, dropped by fn; the garbage collector is off")
    x, made = randn(1000), []

    def fn():
        y = x.exp()
        made.append(weakref.ref(y))

    gc.collect()
    gc.disable()
    try:
        expect_equal(speed.saved_activation_bytes(fn), 4000, read=SAVED)
        held = made[0]() is not None
    finally:
        gc.enable()
    problem = "y is alive after the call: a saved output that is packed as itself holds its own graph; pack y.detach()"
    expect_true(not held, problem, answer="alive", read="the contract, under Convention")


def test_saved_activation_bytes_on_the_meta_device():
    case("x [1000, 1000] on the meta device, where no memory is taken: x.exp().exp()")
    x = torch.empty(1000, 1000, device="meta", requires_grad=True)
    read = "the contract, under Convention"
    expect_equal(speed.saved_activation_bytes(lambda: x.exp().exp()), 8_000_000, read=read)


def test_saved_activation_bytes_leave_backward_as_it_was():
    case("fn runs its own backward: the gradient of x.exp().sum() is x.exp(); fn is called once")
    x, calls = randn(5), []

    def fn():
        calls.append(1)
        x.exp().sum().backward()

    expect_equal(speed.saved_activation_bytes(fn), 20, read=SAVED)
    expect_equal(len(calls), 1, name="calls of fn")
    expect_close(x.grad, x.detach().exp(), name="x.grad", answer=None)


def test_saved_activation_bytes_let_errors_through():
    case("fn raises a RuntimeError; a second call of saved_activation_bytes counts as if nothing had been")
    x = randn(4)

    def fails():
        x.exp()
        raise RuntimeError("no such layer")

    with expect_raises(RuntimeError, "no such layer"):
        speed.saved_activation_bytes(fails)
    expect_equal(speed.saved_activation_bytes(lambda: x.exp()), 16, read=SAVED)


# ---- attention_activation_bytes --------------------------------------------------------------------------------------

KEPT = "eq-speed-9"


def naive_attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1) @ v


def test_attention_activation_bytes_by_hand():
    case("1 sequence, 1 head, 2 positions of width 3, 4 bytes: q, k and v of 6 numbers each, and 4 weights")
    expect_whole(speed.attention_activation_bytes(1, 1, 2, 3, 4), 88, "bytes", read=KEPT)
    case("5 sequences of 7 heads, in 2 bytes")
    expect_equal(speed.attention_activation_bytes(5, 7, 2, 3, 2), 35 * 44, read=KEPT)


SIZES = [(1, 1, 1, 1), (2, 3, 17, 8), (1, 2, 33, 5), (3, 1, 8, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_activation_bytes_are_what_the_graph_holds(sizes, dtype):
    batch, heads, length, head_dim = sizes
    case(f"[B, H, T, D] = {list(sizes)}, {str(dtype)[6:]}, against the tensors that the graph's nodes hold")
    q, k, v = (randn(*sizes, seed=i, dtype=dtype) for i in range(3))
    expected = bytes_in_graph(naive_attention(q, k, v))
    found = speed.attention_activation_bytes(batch, heads, length, head_dim, dtype.itemsize)
    expect_equal(found, expected, read=KEPT)


def test_attention_activation_bytes_grow_with_the_square():
    case("batch 8, 12 heads of 64, float32, 16,384 positions: whole numbers, more than any GPU holds")
    expect_equal(
        speed.attention_activation_bytes(8, 12, 16_384, 64, 4), 8 * 12 * 4 * (3 * 16_384 * 64 + 16_384**2), read=KEPT
    )
    case("from 10^6 to 2 x 10^6 positions of width 1: four times as many bytes, nearly")
    one, two = (speed.attention_activation_bytes(1, 1, n * 10**6, 1, 4) for n in (1, 2))
    expect_close(two / one, 4.0, rtol=1e-5, name="their ratio", read=KEPT)
