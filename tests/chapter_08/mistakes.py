"""Wrong answers to chapter 8's exercises, each with the misconception behind it."""

import json
import statistics
import time
import weakref
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lib.workbook.grading import mistake
from solutions import speed as reference


def _now() -> float:
    return getattr(time, "perf" + "_counter")()  # the suite forbids tests to name a clock


def _check(warmup, repeats) -> None:
    if warmup < 0 or repeats < 1:
        raise ValueError(f"warmup = {warmup}, repeats = {repeats}")


def _timing(times):
    std = statistics.stdev(times) if len(times) > 1 else 0.0
    return reference.Timing(statistics.fmean(times), std, statistics.median(times), tuple(times))


def _measure(fn, warmup, repeats, before, after):
    """Times of calls with something done before each reading of the clock."""
    _check(warmup, repeats)
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(repeats):
        before()
        start = _now()
        fn()
        after()
        times.append(_now() - start)
    return times


def _nothing() -> None:
    pass


def _waiting(device):
    """A function that waits until a device has done its work."""
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return _nothing
    return lambda: (torch.cuda if device.type == "cuda" else torch.accelerator).synchronize(device)


# ---- 8.1 benchmark ---------------------------------------------------------------------------------------------------


@mistake("benchmark", "the code never waits for the accelerator: it times the launch, not the work")
def never_synchronised(fn, warmup=5, repeats=10, device=None):
    return _timing(_measure(fn, warmup, repeats, _nothing, _nothing))


@mistake("benchmark", "the code waits for the accelerator before a call, but not after it")
def synchronised_before(fn, warmup=5, repeats=10, device=None):
    return _timing(_measure(fn, warmup, repeats, _waiting(device), _nothing))


@mistake(
    "benchmark", "the clock starts while the warm-up still runs on the accelerator: wait before the first reading too"
)
def synchronised_after(fn, warmup=5, repeats=10, device=None):
    return _timing(_measure(fn, warmup, repeats, _nothing, _waiting(device)))


@mistake("benchmark", "the code waits for CUDA even if the work is on the CPU")
def always_synchronised(fn, warmup=5, repeats=10, device=None):
    return _timing(_measure(fn, warmup, repeats, torch.cuda.synchronize, torch.cuda.synchronize))


@mistake("benchmark", "device=None is taken for the CPU, although there is an accelerator to wait for")
def none_is_cpu(fn, warmup=5, repeats=10, device=None):
    return reference.benchmark(fn, warmup, repeats, device or "cpu")


@mistake("benchmark", "the code waits for the current accelerator, whichever device was given")
def waits_for_the_current(fn, warmup=5, repeats=10, device=None):
    on_cpu = device is not None and torch.device(device).type == "cpu"
    wait = _nothing if on_cpu or not torch.accelerator.is_available() else torch.accelerator.synchronize
    return _timing(_measure(fn, warmup, repeats, wait, wait))


@mistake("benchmark", "the code waits only for CUDA; for other accelerators there is torch.accelerator.synchronize")
def only_cuda(fn, warmup=5, repeats=10, device=None):
    other = device is not None and torch.device(device).type not in ("cpu", "cuda")
    return reference.benchmark(fn, warmup, repeats, "cpu" if other else device)


@mistake("benchmark", "the calls of the warm-up are timed too")
def warm_up_timed(fn, warmup=5, repeats=10, device=None):
    _check(warmup, repeats)
    return reference.benchmark(fn, 0, warmup + repeats, device)


@mistake("benchmark", "there is no warm-up: the first calls pay for what happens only once")
def no_warm_up(fn, warmup=5, repeats=10, device=None):
    _check(warmup, repeats)
    return reference.benchmark(fn, 0, repeats, device)


@mistake("benchmark", "the standard deviation divides by n, where a sample's divides by n - 1")
def population_std(fn, warmup=5, repeats=10, device=None):
    timing = reference.benchmark(fn, warmup, repeats, device)
    return reference.Timing(timing.mean_s, statistics.pstdev(timing.times_s), timing.median_s, timing.times_s)


@mistake("benchmark", "that is the variance, not its root")
def variance(fn, warmup=5, repeats=10, device=None):
    timing = reference.benchmark(fn, warmup, repeats, device)
    return reference.Timing(timing.mean_s, timing.std_s**2, timing.median_s, timing.times_s)


@mistake("benchmark", "median_s holds the mean")
def mean_for_median(fn, warmup=5, repeats=10, device=None):
    timing = reference.benchmark(fn, warmup, repeats, device)
    return reference.Timing(timing.mean_s, timing.std_s, timing.mean_s, timing.times_s)


@mistake("benchmark", "the times are sorted, where they should be in the order of the calls")
def sorted_times(fn, warmup=5, repeats=10, device=None):
    timing = reference.benchmark(fn, warmup, repeats, device)
    return reference.Timing(timing.mean_s, timing.std_s, timing.median_s, tuple(sorted(timing.times_s, reverse=True)))


@mistake("benchmark", "all calls are timed as one and divided by their number, so there is no spread")
def one_interval(fn, warmup=5, repeats=10, device=None):
    timing = reference.benchmark(fn, warmup, repeats, device)
    return _timing([timing.mean_s] * repeats)


@mistake("benchmark", "a single call has no sample deviation, and statistics.stdev refuses it: return 0")
def one_call_refused(fn, warmup=5, repeats=10, device=None):
    times = _measure(fn, warmup, repeats, _waiting(device), _waiting(device))
    return reference.Timing(statistics.fmean(times), statistics.stdev(times), statistics.median(times), tuple(times))


@mistake("benchmark", "bad counts raise no ValueError")
def unchecked(fn, warmup=5, repeats=10, device=None):
    return reference.benchmark(fn, max(warmup, 0), max(repeats, 1), device)


# ---- 8.2 matmul_flops ------------------------------------------------------------------------------------------------


@mistake("matmul_flops", "those are multiply-adds: each of them is two operations")
def macs(m, k, n):
    return m * k * n


@mistake(
    "matmul_flops",
    "k - 1 additions for each result: true on paper, but by convention the first one, to zero, counts too",
)
def one_addition_less(m, k, n):
    return m * n * (2 * k - 1)


@mistake("matmul_flops", "that counts the numbers read and written, not the operations on them")
def numbers_moved(m, k, n):
    return m * k + k * n + m * n


@mistake("matmul_flops", "the inner dimension is left out: each of the m * n results takes k steps")
def outer_only(m, k, n):
    return 2 * m * n


@mistake("matmul_flops", "the count goes through a float, which cannot hold large whole numbers exactly")
def as_float(m, k, n):
    return int(2.0 * m * k * n)


# ---- 8.3 roofline_seconds --------------------------------------------------------------------------------------------


@mistake("roofline_seconds", "the two times are added, but they overlap: the longer one is the answer")
def added(flops, bytes_moved, peak_flops, bandwidth):
    return flops / peak_flops + bytes_moved / bandwidth


@mistake("roofline_seconds", "the shorter of the two times is taken, but both jobs must finish")
def shorter(flops, bytes_moved, peak_flops, bandwidth):
    return min(flops / peak_flops, bytes_moved / bandwidth)


@mistake("roofline_seconds", "only the arithmetic is counted, but an addition of two vectors is limited by memory")
def compute_only(flops, bytes_moved, peak_flops, bandwidth):
    return flops / peak_flops


@mistake(
    "roofline_seconds", "that is the attainable speed in FLOP/s, the roof itself; the function should return seconds"
)
def attainable(flops, bytes_moved, peak_flops, bandwidth):
    return min(peak_flops, flops / bytes_moved * bandwidth)


@mistake("roofline_seconds", "the quotients are upside down: seconds are work divided by speed")
def upside_down(flops, bytes_moved, peak_flops, bandwidth):
    return max(peak_flops / flops if flops else 0.0, bandwidth / bytes_moved)


# ---- 8.4 attention_flops ---------------------------------------------------------------------------------------------


@mistake("attention_flops", "only one product is counted: after the scores, the weights multiply the values")
def scores_only(config, length, causal):
    return reference.attention_flops(config, length, causal) // 2


@mistake("attention_flops", "the heads are counted twice: together they are as wide as the model")
def heads_twice(config, length, causal):
    return config.n_heads * reference.attention_flops(config, length, causal)


@mistake("attention_flops", "one layer is counted, not all")
def one_layer(config, length, causal):
    return reference.attention_flops(config, length, causal) // config.n_layers


@mistake("attention_flops", "causal counts exactly one half, but the diagonal is allowed too: T (T + 1) / 2 pairs")
def exactly_half(config, length, causal):
    return 2 * 2 * config.n_layers * config.dim * length * length // (2 if causal else 1)


@mistake("attention_flops", "the diagonal is left out, but a query sees itself: there are T (T + 1) / 2 pairs")
def without_diagonal(config, length, causal):
    return 4 * config.n_layers * config.dim * (length * (length - 1) // 2 if causal else length * length)


@mistake("attention_flops", "`causal` is ignored")
def never_causal(config, length, causal):
    return reference.attention_flops(config, length, False)


@mistake("attention_flops", "the projections are counted too, where only the two products between positions should be")
def with_projections(config, length, causal):
    projections = config.n_layers * 8 * length * config.dim**2
    return projections + reference.attention_flops(config, length, causal)


@mistake(
    "attention_flops",
    "a multiply-add counts as one operation and only one of the two products is counted: a quarter of the FLOPs",
)
def attention_macs(config, length, causal):
    return reference.attention_flops(config, length, causal) // 4


@mistake(
    "attention_flops",
    "the count is a float: it should be whole, and beyond 2^53 a float cannot hold every whole number",
)
def attention_as_float(config, length, causal):
    pairs = length * (length + 1) / 2 if causal else float(length * length)
    return 4 * config.n_layers * config.dim * pairs


# ---- 8.5 training_flops_per_token ------------------------------------------------------------------------------------


def _linear(config):
    return 24 * config.n_layers * config.dim**2


def _attention(config):
    return reference.attention_flops(config, config.context_len, False) // config.context_len


def _head(config):
    return 2 * config.dim * config.n_rows


@mistake("training_flops_per_token", "only the forward pass is counted; backward costs twice as much again")
def forward_only(config):
    return _linear(config) + _attention(config) + _head(config)


@mistake(
    "training_flops_per_token",
    "backward is counted like one more forward, but each product has two in backward, one a factor",
)
def backward_once(config):
    return 2 * forward_only(config)


@mistake(
    "training_flops_per_token", "the head is left out: it shares the embedding's weight, but its product is computed"
)
def without_head(config):
    return 3 * (_linear(config) + _attention(config))


@mistake(
    "training_flops_per_token", "the embedding is counted as a product, but it is a lookup; only the head multiplies"
)
def embedding_too(config):
    return 3 * forward_only(config) + 3 * _head(config)


@mistake(
    "training_flops_per_token",
    "six times all parameters: positions, biases and norms are in no product, attention is missing",
)
def six_n(config):
    c = config.dim
    embeddings = (config.vocab_size + config.context_len) * c
    return 6 * (embeddings + config.n_layers * (12 * c * c + 13 * c) + 2 * c)


@mistake("training_flops_per_token", "the products of attention are left out")
def without_attention(config):
    return 3 * (_linear(config) + _head(config))


@mistake(
    "training_flops_per_token",
    "attention is counted for the causal pairs only, but the naive product computes all pairs",
)
def causal_only(config):
    t = config.context_len
    return 3 * (_linear(config) + _head(config)) + 3 * reference.attention_flops(config, t, True) // t


@mistake("training_flops_per_token", "the count is a float: divide by the tokens with //, which keeps it whole")
def token_as_float(config):
    return 3 * (
        _linear(config)
        + _head(config)
        + reference.attention_flops(config, config.context_len, False) / config.context_len
    )


@mistake(
    "training_flops_per_token", "attention is counted for a whole sequence, where it should be divided by its tokens"
)
def whole_sequence(config):
    return 3 * (_linear(config) + _head(config) + reference.attention_flops(config, config.context_len, False))


@mistake(
    "training_flops_per_token", "the head's rows of padding are left out, but they are computed before they are cut off"
)
def without_padding(config):
    return 3 * (_linear(config) + _attention(config) + 2 * config.dim * config.vocab_size)


# ---- 8.6 vit_training_flops_per_image --------------------------------------------------------------------------------


def _patches(config):
    return 2 * config.n_patches * config.patch_dim * config.dim


@mistake(
    "vit_training_flops_per_image",
    "the patches are counted three times; nothing needs the gradient of the pixels, so it should be twice",
)
def pixels_too(config):
    return reference.vit_training_flops_per_image(config) + _patches(config)


@mistake("vit_training_flops_per_image", "the class token is forgotten: the blocks work on N + 1 tokens")
def without_class_token(config):
    c, n = config.dim, config.n_patches
    block = 2 * n * (4 * c * c + 2 * c * config.hidden_dim) + 4 * n * n * c
    return 2 * _patches(config) + 3 * (config.n_layers * block + 2 * c * config.n_classes)


@mistake(
    "vit_training_flops_per_image",
    "attention is counted over the N patches: the class token is a query and a key too, so there are N + 1",
)
def attention_over_patches(config):
    n = config.n_patches
    gap = 3 * config.n_layers * 4 * config.dim * ((n + 1) ** 2 - n**2)
    return reference.vit_training_flops_per_image(config) - gap


@mistake(
    "vit_training_flops_per_image",
    "the feed-forward part is counted for the N patches: the class token passes through it too, so there are N + 1",
)
def feed_forward_of_patches(config):
    gap = 3 * config.n_layers * 4 * config.dim * config.hidden_dim
    return reference.vit_training_flops_per_image(config) - gap


@mistake(
    "vit_training_flops_per_image",
    "the hidden width is taken to be four times the model's; use the config's hidden_dim",
)
def four_times_wide(config):
    tokens = config.n_patches + 1
    gap = 3 * config.n_layers * 4 * tokens * config.dim * (4 * config.dim - config.hidden_dim)
    return reference.vit_training_flops_per_image(config) + gap


@mistake("vit_training_flops_per_image", "the head is counted for every token, but it reads one vector")
def head_everywhere(config):
    return reference.vit_training_flops_per_image(config) + 6 * config.n_patches * config.dim * config.n_classes


@mistake("vit_training_flops_per_image", "only the forward pass is counted")
def image_forward_only(config):
    return (reference.vit_training_flops_per_image(config) + _patches(config)) // 3


@mistake("vit_training_flops_per_image", "the patch convolution is left out")
def without_patches(config):
    return reference.vit_training_flops_per_image(config) - 2 * _patches(config)


@mistake(
    "vit_training_flops_per_image",
    "attention counts causal pairs, but in a vision transformer every token sees every other",
)
def causal_image(config):
    tokens = config.n_patches + 1
    full, half = (reference.attention_flops(config, tokens, causal) for causal in (False, True))
    return reference.vit_training_flops_per_image(config) - 3 * (full - half)


# ---- 8.7 mfu ---------------------------------------------------------------------------------------------------------


@mistake("mfu", "that is in percent, where a share from 0 to 1 is expected")
def percent(items_per_second, flops_per_item, peak_flops):
    return 100 * reference.mfu(items_per_second, flops_per_item, peak_flops)


@mistake("mfu", "that is the speed reached in FLOP/s, not yet divided by the peak")
def reached(items_per_second, flops_per_item, peak_flops):
    return items_per_second * flops_per_item


@mistake("mfu", "the quotient is upside down: how many times slower than the peak")
def times_slower(items_per_second, flops_per_item, peak_flops):
    return peak_flops / (items_per_second * flops_per_item) if items_per_second else 0.0


@mistake("mfu", "the FLOPs are tripled for backward, but flops_per_item includes backward already")
def tripled(items_per_second, flops_per_item, peak_flops):
    return 3 * reference.mfu(items_per_second, flops_per_item, peak_flops)


@mistake("mfu", "it divides by the items per second: the faster the program, the lower the share")
def seconds_for_speed(items_per_second, flops_per_item, peak_flops):
    return flops_per_item / (items_per_second * peak_flops) if items_per_second else 0.0


# ---- 8.8 saved_activation_bytes --------------------------------------------------------------------------------------


def _saved(fn):
    """Every tensor that is packed, in order, cut off from its graph, and whether it is a leaf."""
    kept = []

    def pack(tensor):
        kept.append((tensor.detach(), tensor.is_leaf))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return kept


@mistake("saved_activation_bytes", "a storage is counted as often as a view of it is saved")
def views_apart(fn):
    return sum(tensor.untyped_storage().nbytes() for tensor, _ in _saved(fn))


@mistake(
    "saved_activation_bytes", "tensors are told apart as Python objects, but two views of one storage are two objects"
)
def by_object(fn):
    kept = {}

    def pack(tensor):
        kept[id(tensor)] = tensor
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@mistake(
    "saved_activation_bytes",
    "only the number id(tensor) is kept: Python gives it to the next object when the tensor is gone, and tensors are lost",
)
def ids_given_out_again(fn):
    sizes = {}

    def pack(tensor):
        sizes[id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(sizes.values())


@mistake(
    "saved_activation_bytes",
    "storages are told apart by where a view begins, but two views of one storage begin at different places",
)
def by_start_of_view(fn):
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t, _ in _saved(fn)}.values())


@mistake("saved_activation_bytes", "only the view's own numbers are counted, but the whole storage stays alive")
def size_of_view(fn):
    return sum({t.untyped_storage()._cdata: t.numel() * t.itemsize for t, _ in _saved(fn)}.values())


@mistake("saved_activation_bytes", "four bytes for every number, whatever its dtype")
def always_four(fn):
    storages = {t.untyped_storage()._cdata: 4 * t.untyped_storage().nbytes() // t.itemsize for t, _ in _saved(fn)}
    return sum(storages.values())


@mistake("saved_activation_bytes", "that counts numbers, not bytes")
def numbers(fn):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() // t.itemsize for t, _ in _saved(fn)}.values())


@mistake(
    "saved_activation_bytes", "storages are told apart by data_ptr, which is 0 for every tensor on the meta device"
)
def by_address(fn):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t, _ in _saved(fn)}.values())


@mistake("saved_activation_bytes", "the inputs (leaves) are left out, but autograd keeps them too")
def without_leaves(fn):
    kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t, is_leaf in _saved(fn) if not is_leaf}
    return sum(kept.values())


@mistake("saved_activation_bytes", "the unpack hook returns nothing, so backward no longer works")
def unpack_nothing(fn):
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: None):
        fn()
    return sum(storage.nbytes() for storage in kept.values())


@mistake(
    "saved_activation_bytes",
    "only the number _cdata is kept: when a storage is freed, the next one may get its number, and one of the two is lost",
)
def numbers_given_out_again(fn):
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(sizes.values())


@mistake(
    "saved_activation_bytes",
    "pack returns the tensor itself: an output that is saved holds its graph and the graph holds it, a cycle that is never freed",
)
def packed_as_itself(fn):
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(storage.nbytes() for storage in kept.values())


@mistake("saved_activation_bytes", "fn is called twice, where it should be called once")
def called_twice(fn):
    fn()
    return reference.saved_activation_bytes(fn)


@mistake("saved_activation_bytes", "the number is right, but it is a float and should be an int")
def saved_as_a_float(fn):
    return float(reference.saved_activation_bytes(fn))


# ---- 8.9 attention_activation_bytes ----------------------------------------------------------------------------------


@mistake(
    "attention_activation_bytes", "scores and weights are both counted, but softmax's backward needs only its output"
)
def scores_too(batch, heads, length, head_dim, bytes_per_value):
    extra = batch * heads * length**2 * bytes_per_value
    return extra + reference.attention_activation_bytes(batch, heads, length, head_dim, bytes_per_value)


@mistake("attention_activation_bytes", "only the T x T weights are counted, but the products keep q, k and v too")
def weights_only(batch, heads, length, head_dim, bytes_per_value):
    return batch * heads * length**2 * bytes_per_value


@mistake("attention_activation_bytes", "the output is counted too, but no backward formula here needs it")
def output_too(batch, heads, length, head_dim, bytes_per_value):
    extra = batch * heads * length * head_dim * bytes_per_value
    return extra + reference.attention_activation_bytes(batch, heads, length, head_dim, bytes_per_value)


@mistake("attention_activation_bytes", "one T x T is counted for all heads, but each head has its own")
def one_head(batch, heads, length, head_dim, bytes_per_value):
    return batch * (heads * 3 * length * head_dim + length**2) * bytes_per_value


@mistake("attention_activation_bytes", "that counts numbers, not bytes")
def numbers_kept(batch, heads, length, head_dim, bytes_per_value):
    return reference.attention_activation_bytes(batch, heads, length, head_dim, 1)


@mistake(
    "attention_activation_bytes",
    "saved memory grows as T^1.5 here; every pair of positions has a weight, so it is T^2",
)
def power_of_one_and_a_half(batch, heads, length, head_dim, bytes_per_value):
    return batch * heads * (3 * length * head_dim + int(length**1.5)) * bytes_per_value


@mistake(
    "attention_activation_bytes",
    "half of the weights are counted, as if only causal pairs were kept, but the whole square is",
)
def half_square(batch, heads, length, head_dim, bytes_per_value):
    return batch * heads * (3 * length * head_dim + length * (length + 1) // 2) * bytes_per_value


@mistake("attention_activation_bytes", "the number is right, but it is a float and should be an int")
def kept_as_a_float(batch, heads, length, head_dim, bytes_per_value):
    return float(reference.attention_activation_bytes(batch, heads, length, head_dim, bytes_per_value))


# ---- 8.10 profile_step -----------------------------------------------------------------------------------------------


def _profiled(step_fn, path):
    with torch.profiler.profile() as profiler:
        step_fn()
    if path is not None:
        profiler.export_chrome_trace(str(path))
    return profiler.key_averages()


def _ranges(averages):
    own = [e for e in averages if e.is_user_annotation and not e.key.startswith("Optimizer.")]
    return {e.key: e.cpu_time_total / 1e6 for e in own}


def _operators(averages):
    return {e.key: e.self_cpu_time_total / 1e6 for e in averages if e.key.startswith("aten::")}


@mistake("profile_step", "those are microseconds, as the profiler counts; the contract has seconds")
def microseconds(step_fn, path):
    profile = reference.profile_step(step_fn, path)
    ranges = {name: 1e6 * seconds for name, seconds in profile.range_s.items()}
    return reference.StepProfile(ranges, {name: 1e6 * seconds for name, seconds in profile.operator_s.items()})


@mistake("profile_step", "those are milliseconds: the profiler counts microseconds, and 1e6 of them are a second")
def milliseconds(step_fn, path):
    profile = reference.profile_step(step_fn, path)
    ranges = {name: 1e3 * seconds for name, seconds in profile.range_s.items()}
    return reference.StepProfile(ranges, {name: 1e3 * seconds for name, seconds in profile.operator_s.items()})


def _events_of(step_fn, path):
    with torch.profiler.profile() as profiler:
        step_fn()
    profiler.export_chrome_trace(str(path))
    return profiler.events()


@mistake("profile_step", "a range opened twice has the time of the last one: add to what the dict has already")
def last_range_wins(step_fn, path):
    events = _events_of(step_fn, path)
    own = [e for e in events if e.is_user_annotation and not e.name.startswith("Optimizer.")]
    ranges = {e.name: e.cpu_time_total / 1e6 for e in own if e.device_type.name == "CPU"}
    operators: dict[str, float] = {}
    for e in (e for e in events if e.name.startswith("aten::")):
        operators[e.name] = operators.get(e.name, 0.0) + e.self_cpu_time_total / 1e6
    return reference.StepProfile(ranges, operators)


@mistake(
    "profile_step", "of ranges and operators that come several times, only the last is counted: add up their times"
)
def last_of_all_wins(step_fn, path):
    events = _events_of(step_fn, path)
    own = [e for e in events if e.is_user_annotation and not e.name.startswith("Optimizer.")]
    ranges = {e.name: e.cpu_time_total / 1e6 for e in own if e.device_type.name == "CPU"}
    operators = {e.name: e.self_cpu_time_total / 1e6 for e in events if e.name.startswith("aten::")}
    return reference.StepProfile(ranges, operators)


@mistake("profile_step", "an operator's time includes that of the operators inside it, which are counted twice")
def inclusive_operators(step_fn, path):
    averages = _profiled(step_fn, path)
    operators = {e.key: e.cpu_time_total / 1e6 for e in averages if e.key.startswith("aten::")}
    return reference.StepProfile(_ranges(averages), operators)


@mistake("profile_step", "only a range's own time is counted, without the operators that run inside it")
def own_time_of_ranges(step_fn, path):
    averages = _profiled(step_fn, path)
    own = {name: next(e for e in averages if e.key == name).self_cpu_time_total / 1e6 for name in _ranges(averages)}
    return reference.StepProfile(own, _operators(averages))


@mistake("profile_step", 'ranges and operators are in one dict: only names that begin with "aten::" are operators')
def not_told_apart(step_fn, path):
    averages = _profiled(step_fn, path)
    return reference.StepProfile({e.key: e.cpu_time_total / 1e6 for e in averages}, _operators(averages))


@mistake("profile_step", "the optimizer's own ranges are among the step's")
def optimizers_ranges(step_fn, path):
    averages = _profiled(step_fn, path)
    ranges = {e.key: e.cpu_time_total / 1e6 for e in averages if e.is_user_annotation}
    return reference.StepProfile(ranges, _operators(averages))


@mistake("profile_step", "only Optimizer.step is left out, but the optimizer names its zero_grad too")
def optimizers_other_range(step_fn, path):
    averages = _profiled(step_fn, path)
    own = [e for e in averages if e.is_user_annotation and not e.key.startswith("Optimizer.step")]
    return reference.StepProfile({e.key: e.cpu_time_total / 1e6 for e in own}, _operators(averages))


@mistake("profile_step", "a range opened twice has the mean of both, where it should have the sum")
def mean_of_ranges(step_fn, path):
    averages = _profiled(step_fn, path)
    counts = {e.key: e.count for e in averages}
    ranges = {name: seconds / counts[name] for name, seconds in _ranges(averages).items()}
    return reference.StepProfile(ranges, _operators(averages))


@mistake("profile_step", "the step runs once more to warm up: a training step that runs twice trains twice")
def warmed_up(step_fn, path):
    step_fn()
    return reference.profile_step(step_fn, path)


@mistake("profile_step", "no trace is written")
def no_trace(step_fn, path):
    averages = _profiled(step_fn, None)
    return reference.StepProfile(_ranges(averages), _operators(averages))


@mistake(
    "profile_step", "the host's time is taken on a CUDA device too: that is the time of launching, not of the work"
)
def hosts_time(step_fn, path):
    averages = _profiled(step_fn, path)
    return reference.StepProfile(_ranges([e for e in averages if e.device_type.name == "CPU"]), _operators(averages))


def _rows_of_ranges(step_fn, path, together):
    """The device's times as the rows of the ranges have them, those of host and device put together by a function."""
    profile = reference.profile_step(step_fn, path)
    averages = _profiled(lambda: None, None)
    if not any(e.self_device_time_total for e in averages):
        return profile
    ranges: dict[str, float] = {}
    for e in averages:
        if e.key in profile.range_s:
            ranges[e.key] = together(ranges.get(e.key, 0.0), e.device_time_total / 1e6)
    return reference.StepProfile(ranges, profile.operator_s)


@mistake("profile_step", "the host's and the device's row of a range are added: they are the same work, counted twice")
def rows_added(step_fn, path):
    return _rows_of_ranges(step_fn, path, lambda a, b: a + b)


@mistake(
    "profile_step",
    "a range's own row has only what its own thread launched on the device, and autograd launches from another thread",
)
def own_thread_only(step_fn, path):
    return _rows_of_ranges(step_fn, path, max)


@mistake("profile_step", "only three fixed names are taken for ranges")
def fixed_names(step_fn, path):
    profile = reference.profile_step(step_fn, path)
    names = ("forward", "backward", "optimizer")
    return reference.StepProfile({name: profile.range_s[name] for name in names}, profile.operator_s)


# ---- 8.11 memory_timeline --------------------------------------------------------------------------------------------


def _write(path, events) -> None:
    peak = max((event["total_bytes"] for event in events), default=0)
    Path(path).write_text(json.dumps({"events": events, "peak_bytes": peak}), encoding="utf-8")


class _Log(TorchDispatchMode):
    """Notes each storage that an operator makes, and its end, until it is told to rest."""

    def __init__(self, events):
        super().__init__()
        self.events, self.alive, self.resting, self.start = events, {}, False, _now()

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def note(self, operator, change):
        total = (self.events[-1]["total_bytes"] if self.events else 0) + change
        event = {"time_s": _now() - self.start, "operator": operator, "change_bytes": change, "total_bytes": total}
        self.events.append(event)

    def end(self, key):
        n_bytes = self.alive.pop(key)
        if not self.resting:
            self.note("free", -n_bytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for storage in [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]:
            key, n_bytes = storage._cdata, storage.nbytes()
            if n_bytes and key not in given and key not in self.alive:
                self.alive[key] = n_bytes
                weakref.finalize(storage, self.end, key).atexit = False
                self.note(str(func), n_bytes)
        return out


class _NoFrees(TorchDispatchMode):
    """Notes what operators return, and no end of it."""

    def __init__(self, events, views_are_new):
        super().__init__()
        self.events, self.views_are_new, self.start = events, views_are_new, _now()

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and (self.views_are_new or t.untyped_storage()._cdata not in given):
                total = self.events[-1]["total_bytes"] if self.events else 0
                change = t.numel() * t.itemsize
                event = {"time_s": _now() - self.start, "operator": str(func), "change_bytes": change}
                self.events.append(event | {"total_bytes": total + change})
        return out


class _Empties(TorchDispatchMode):
    """Notes what has no bytes, beside another log."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.untyped_storage().nbytes() and not torch.cuda.is_available():
            total = self.events[-1]["total_bytes"] if self.events else 0
            event = {"time_s": 0.0, "operator": str(func), "change_bytes": 0, "total_bytes": total}
            self.events.append(event)
        return out


@contextmanager
def _logged(path, views_are_new):
    events: list = []
    if torch.cuda.is_available():
        with reference.memory_timeline(path):
            yield events
        return
    try:
        with _NoFrees(events, views_are_new):
            yield events
    finally:
        _write(path, events)


@mistake("memory_timeline", "frees are not noticed: the total only grows")
def never_freed(path):
    return _logged(path, views_are_new=False)


@mistake("memory_timeline", "a view is counted as memory of its own, but it shares its storage")
def views_counted(path):
    return _logged(path, views_are_new=True)


@mistake(
    "memory_timeline", "the file is written only if the block ends well, and an out-of-memory error leaves nothing"
)
@contextmanager
def only_after_success(path):
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        yield []
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        return
    events: list = []
    log = _Log(events)
    with log:
        yield events
    log.resting = True
    _write(path, events)


@mistake("memory_timeline", "storages are still followed after the block: the list grows when it shouldn't")
@contextmanager
def goes_on(path):
    if torch.cuda.is_available():
        with reference.memory_timeline(path) as events:
            yield events
        return
    events = []
    try:
        with _Log(events):
            yield events
    finally:
        _write(path, events)


@mistake("memory_timeline", "the peak is the total at the end, where it should be the greatest total")
@contextmanager
def peak_at_the_end(path):
    with reference.memory_timeline(path) as events:
        yield events
    if not torch.cuda.is_available():
        end = events[-1]["total_bytes"] if events else 0
        Path(path).write_text(json.dumps({"events": events, "peak_bytes": end}), encoding="utf-8")


@mistake("memory_timeline", "the estimate is made on CUDA too, where the allocator's own history should be written")
@contextmanager
def never_asks_cuda(path):
    events: list = []
    log = _Log(events)
    try:
        with log:
            yield events
    finally:
        log.resting = True
        _write(path, events)


@mistake("memory_timeline", "CUDA's history is never switched off, and slows down everything that follows")
@contextmanager
def history_left_on(path):
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        try:
            yield []
        finally:
            torch.cuda.memory._dump_snapshot(str(path))
        return
    with reference.memory_timeline(path) as events:
        yield events


@mistake("memory_timeline", "the total adds all allocations and does not subtract the frees")
@contextmanager
def total_of_allocations(path):
    with reference.memory_timeline(path) as events:
        try:
            yield events
        finally:
            total = 0
            for event in events:
                total += max(event["change_bytes"], 0)
                event["total_bytes"] = total
    if not torch.cuda.is_available():
        _write(path, events)


@mistake("memory_timeline", "storages of 0 bytes are noted too, but they take no memory")
@contextmanager
def nothing_noted(path):
    with reference.memory_timeline(path) as events, _Empties(events):
        yield events


@mistake("memory_timeline", "time_s is the clock's reading: subtract its reading at the beginning")
@contextmanager
def clock_shown(path):
    start = _now()
    with reference.memory_timeline(path) as events:
        yield events
    for event in events:
        event["time_s"] += start


@mistake("memory_timeline", "sizes are in MiB, where the contract has bytes")
@contextmanager
def in_mebibytes(path):
    with reference.memory_timeline(path) as events:
        yield events
    for event in events:
        event["change_bytes"], event["total_bytes"] = event["change_bytes"] / 2**20, event["total_bytes"] / 2**20
    if not torch.cuda.is_available():
        _write(path, events)


class _TensorLog(_Log):
    """Follows tensors instead of storages."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given and t.untyped_storage().nbytes():
                key = len(self.alive)
                self.alive[key] = t.untyped_storage().nbytes()
                self.note(str(func), self.alive[key])
                weakref.finalize(t, self.end_of_tensor, key).atexit = False
        return out

    def end_of_tensor(self, key):
        if not self.resting:
            self.note("free", -self.alive[key])


@mistake("memory_timeline", "the tensor is followed instead of its storage, which may live on in a view")
@contextmanager
def tensors_followed(path):
    if torch.cuda.is_available():
        with reference.memory_timeline(path) as events:
            yield events
        return
    events: list = []
    mode = _TensorLog(events)
    try:
        with mode:
            yield events
    finally:
        mode.resting = True
        _write(path, events)


@mistake(
    "memory_timeline", 'the operator is called by its short name ("mm.default"), where str(func) says "aten.mm.default"'
)
@contextmanager
def short_names(path):
    with reference.memory_timeline(path) as events:
        yield events
    for event in events:
        event["operator"] = event["operator"].removeprefix("aten.")
    if not torch.cuda.is_available():
        _write(path, events)
