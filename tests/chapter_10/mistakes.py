"""What goes wrong when people write distributed data parallel."""

import math
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lib.workbook.grading import mistake
from solutions import ddp as reference

# ---- 10.1 shard_indices ----------------------------------------------------------------------------------------------


def _order(n, epoch, seed, shuffle):
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(n, generator=generator).tolist() if shuffle else list(range(n))


def _check(rank, world_size):
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")


def _padded(order, world_size, drop_last):
    n_each = len(order) // world_size if drop_last else -(-len(order) // world_size)
    return [order[i % len(order)] for i in range(n_each * world_size)]


@mistake("shard_indices", "each rank takes a block of consecutive items, where it should take every R-th item")
def in_blocks(n, rank, world_size, epoch=0, seed=0, shuffle=True, drop_last=False):
    _check(rank, world_size)
    order = _padded(_order(n, epoch, seed, shuffle), world_size, drop_last)
    n_each = len(order) // world_size
    return order[rank * n_each : (rank + 1) * n_each]


@mistake(
    "shard_indices", "nothing is padded or cut, so some ranks have an item more than others and would wait for them"
)
def ragged(n, rank, world_size, epoch=0, seed=0, shuffle=True, drop_last=False):
    _check(rank, world_size)
    return _order(n, epoch, seed, shuffle)[rank::world_size]


@mistake("shard_indices", "the epoch is not in the seed: every epoch repeats the first one's order")
def without_epoch(n, rank, world_size, epoch=0, seed=0, shuffle=True, drop_last=False):
    return reference.shard_indices(n, rank, world_size, 0, seed, shuffle, drop_last)


@mistake("shard_indices", "each rank shuffles with a seed of its own, so that items are read twice or not at all")
def seeded_by_rank(n, rank, world_size, epoch=0, seed=0, shuffle=True, drop_last=False):
    _check(rank, world_size)
    return _padded(_order(n, epoch, seed + rank, shuffle), world_size, drop_last)[rank::world_size]


@mistake("shard_indices", "the last item is repeated as padding, where padding comes from the start of the order")
def padded_with_last(n, rank, world_size, epoch=0, seed=0, shuffle=True, drop_last=False):
    _check(rank, world_size)
    order = _order(n, epoch, seed, shuffle)
    if drop_last or not n:
        return reference.shard_indices(n, rank, world_size, epoch, seed, shuffle, drop_last)
    return (order + order[-1:] * (-n % world_size))[rank::world_size]


@mistake(
    "shard_indices", "padding goes through the items only once, which is too little if there are fewer items than ranks"
)
def padded_once(n, rank, world_size, epoch=0, seed=0, shuffle=True, drop_last=False):
    if drop_last or not n:
        return reference.shard_indices(n, rank, world_size, epoch, seed, shuffle, drop_last)
    _check(rank, world_size)
    order = _order(n, epoch, seed, shuffle)
    return (order + order[: -n % world_size])[rank::world_size]


@mistake(
    "shard_indices", "`math.ceil(n // R)` rounds a number that is whole already: the tail is lost without drop_last"
)
def ceil_of_whole(n, rank, world_size, epoch=0, seed=0, shuffle=True, drop_last=False):
    _check(rank, world_size)
    n_each = math.ceil(n // world_size)
    return _order(n, epoch, seed, shuffle)[rank : n_each * world_size : world_size]


@mistake("shard_indices", "the shuffle uses and changes the global generator instead of one of its own")
def global_generator(n, rank, world_size, epoch=0, seed=0, shuffle=True, drop_last=False):
    torch.manual_seed(seed + epoch)
    return reference.shard_indices(n, rank, world_size, epoch, seed, shuffle, drop_last)


@mistake("shard_indices", "a rank that does not exist gets a share instead of a ValueError")
def any_rank(n, rank, world_size, epoch=0, seed=0, shuffle=True, drop_last=False):
    return reference.shard_indices(n, rank % world_size, world_size, epoch, seed, shuffle, drop_last)


# ---- 10.2 broadcast_parameters ---------------------------------------------------------------------------------------


def _send(tensor, group, **root):
    """The root's bytes, in a tensor of their own that still has to be copied back."""
    sent = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(sent.view(-1).view(torch.uint8), group=group, **(root or {"group_src": 0}))
    return sent


@mistake(
    "broadcast_parameters",
    "tensors are sent in their own dtype, and gloo refuses some dtypes: send their bytes, a uint8 view",
)
def own_dtypes(module, group=None):
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, group_src=0, group=group)
            tensor.copy_(sent)


@mistake("broadcast_parameters", "buffers are not sent: counters and running means differ between ranks")
def without_buffers(module, group=None):
    stripped = torch.nn.Module()
    stripped.held = torch.nn.ParameterList(module.parameters())
    reference.broadcast_parameters(stripped, group)


@mistake("broadcast_parameters", "only trained parameters are sent; frozen ones must be the same everywhere too")
def only_trained(module, group=None):
    with torch.no_grad():
        for tensor in [*(p for p in module.parameters() if p.requires_grad), *module.buffers()]:
            tensor.copy_(_send(tensor, group))


@mistake("broadcast_parameters", "parameters are averaged, where all ranks should get those of rank 0")
def averaged_parameters(module, group=None):
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            total = tensor.detach().to(torch.float64).contiguous()
            dist.all_reduce(total, group=group)
            tensor.copy_(total / dist.get_world_size(group))


@mistake("broadcast_parameters", "a copy is sent and the parameter keeps its value: the result must be written back")
def never_written_back(module, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        _send(tensor, group)


@mistake(
    "broadcast_parameters",
    "`.contiguous()` made a copy of a tensor that is not contiguous; the copy received rank 0's values and was dropped",
)
def copy_dropped(module, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach().contiguous().view(-1).view(torch.uint8), group_src=0, group=group)


@mistake("broadcast_parameters", "`src=0` is the world's rank 0, which need not be in the group")
def worlds_root(module, group=None):
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(_send(tensor, group, src=0))


@mistake("broadcast_parameters", "a tensor that is tied is sent once for each of its names")
def tied_twice(module, group=None):
    with torch.no_grad():
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for _, tensor in named:
            tensor.copy_(_send(tensor, group))


# ---- 10.3 average_gradients, 10.4 average_gradients_flat -------------------------------------------------------------


def _trained(module):
    return [p for p in module.parameters() if p.requires_grad]


def _fill(module):
    for p in _trained(module):
        if p.grad is None:
            p.grad = torch.zeros_like(p)


def _scale(module, factor):
    for p in _trained(module):
        if p.grad is not None:
            p.grad.mul_(factor)


@mistake("average_gradients", "gradients are summed, and never divided by the number of ranks")
def summed(module, group=None):
    reference.average_gradients(module, group)
    _scale(module, dist.get_world_size(group))


@mistake("average_gradients", "it divides by the number of ranks twice")
def divided_twice(module, group=None):
    reference.average_gradients(module, group)
    _scale(module, 1 / dist.get_world_size(group))


@mistake("average_gradients", "it divides by the size of the world, where it should divide by the size of the group")
def worlds_size(module, group=None):
    reference.average_gradients(module, group)
    _scale(module, dist.get_world_size(group) / dist.get_world_size())


@mistake("average_gradients", "the group is ignored: all ranks are averaged")
def group_ignored(module, group=None):
    reference.average_gradients(module)


@mistake(
    "average_gradients",
    "a parameter without a gradient is skipped: other ranks wait for it, or meet the wrong collective",
)
def skipped(module, group=None):
    for p in _trained(module):
        if p.grad is not None:
            grad = p.grad.contiguous() / dist.get_world_size(group)
            dist.all_reduce(grad, group=group)
            p.grad = grad


@mistake("average_gradients", "the mean is over the ranks that used a parameter, where unused ones count as zeros")
def mean_of_users(module, group=None):
    used = {p: torch.tensor(float(p.grad is not None)) for p in _trained(module)}
    reference.average_gradients(module, group)
    for p, count in used.items():
        dist.all_reduce(count, group=group)
        p.grad.mul_(dist.get_world_size(group) / max(count.item(), 1))


@mistake("average_gradients", "parameters are averaged instead of gradients")
def parameters_averaged(module, group=None):
    with torch.no_grad():
        for p in _trained(module):
            p.copy_(p / dist.get_world_size(group))
            value = p.contiguous()
            dist.all_reduce(value, group=group)
            p.copy_(value)


@mistake(
    "average_gradients",
    "a gradient that is not contiguous is sent in its memory order, and meets other elements: make it contiguous first",
)
def as_it_lies(module, group=None):
    _fill(module)
    for p in _trained(module):
        dist.all_reduce(p.grad.div_(dist.get_world_size(group)), group=group)


@mistake("average_gradients", "all gradients go in one buffer; that is the next exercise")
def already_flat(module, group=None):
    reference.average_gradients_flat(module, group)


@mistake("average_gradients_flat", "the group is ignored: all ranks are averaged")
def flat_group_ignored(module, group=None):
    reference.average_gradients_flat(module)


@mistake(
    "average_gradients_flat", "it divides by the size of the world, where it should divide by the size of the group"
)
def flat_worlds_size(module, group=None):
    reference.average_gradients_flat(module, group)
    _scale(module, dist.get_world_size(group) / dist.get_world_size())


@mistake("average_gradients_flat", "one collective a tensor, where one buffer should hold all of a dtype")
def not_flat(module, group=None):
    reference.average_gradients(module, group)


@mistake("average_gradients_flat", "gradients are summed, and never divided by the number of ranks")
def flat_summed(module, group=None):
    reference.average_gradients_flat(module, group)
    _scale(module, dist.get_world_size(group))


@mistake("average_gradients_flat", "the buffer is averaged and thrown away: gradients are never read back from it")
def not_unpacked(module, group=None):
    before = [None if p.grad is None else p.grad.clone() for p in _trained(module)]
    reference.average_gradients_flat(module, group)
    for p, grad in zip(_trained(module), before, strict=True):
        p.grad = grad


@mistake("average_gradients_flat", "missing gradients are left out, so that the buffers of the ranks differ in length")
def flat_skipped(module, group=None):
    _flat([p for p in _trained(module) if p.grad is not None], group)


def _flat(parameters, group, dtype=None):
    flat = torch.cat([p.grad.reshape(-1).to(dtype or p.grad.dtype) for p in parameters])
    dist.all_reduce(flat.div_(dist.get_world_size(group)), group=group)
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = piece.view(p.shape).to(p.dtype)


@mistake(
    "average_gradients_flat", "all dtypes are widened into one buffer, which sends more bytes than the gradients have"
)
def flat_widened(module, group=None):
    _fill(module)
    _flat(_trained(module), group, torch.float64)


@mistake("average_gradients_flat", "the pieces are read back from the buffer in another order than they were put there")
def flat_reversed(module, group=None):
    reference.average_gradients_flat(module, group)
    grads = torch.cat([p.grad.reshape(-1).float() for p in reversed(_trained(module))])
    for p, piece in zip(_trained(module), grads.split([p.numel() for p in _trained(module)]), strict=True):
        p.grad = piece.view(p.shape).to(p.dtype)


# ---- 10.6, 10.7 the model of the overhead ----------------------------------------------------------------------------


def _refuse(bandwidth, n_buckets):
    if n_buckets < 1 or bandwidth <= 0:
        raise ValueError(f"n_buckets = {n_buckets}, bandwidth = {bandwidth}")


@mistake("ddp_overhead_seconds", "all bytes are counted, where all but the last bucket are hidden behind backward")
def nothing_hidden(n_bytes, bandwidth, call_overhead_s, n_buckets):
    _refuse(bandwidth, n_buckets)
    return n_bytes / bandwidth + n_buckets * call_overhead_s


@mistake("ddp_overhead_seconds", "the cost of a call is paid once, where each bucket pays it")
def one_call(n_bytes, bandwidth, call_overhead_s, n_buckets):
    _refuse(bandwidth, n_buckets)
    return n_bytes / (n_buckets * bandwidth) + call_overhead_s


@mistake("ddp_overhead_seconds", "the call's cost is divided by the number of buckets instead of multiplied by it")
def call_divided(n_bytes, bandwidth, call_overhead_s, n_buckets):
    _refuse(bandwidth, n_buckets)
    return (n_bytes / bandwidth + call_overhead_s) / n_buckets


@mistake("ddp_overhead_seconds", "the bucket's size is rounded to whole bytes with `//`")
def whole_bytes(n_bytes, bandwidth, call_overhead_s, n_buckets):
    _refuse(bandwidth, n_buckets)
    return n_bytes // n_buckets / bandwidth + n_buckets * call_overhead_s


@mistake("ddp_overhead_seconds", "no buckets at all, or no bandwidth, gives a number instead of a ValueError")
def unchecked(n_bytes, bandwidth, call_overhead_s, n_buckets):
    return n_bytes / ((n_buckets or 1) * (bandwidth or 1)) + n_buckets * call_overhead_s


@mistake("ddp_overhead_seconds", "a bandwidth of 1 byte a second or less is refused, where only 0 and less should be")
def slow_refused(n_bytes, bandwidth, call_overhead_s, n_buckets):
    _refuse(bandwidth - 1, n_buckets)
    return reference.ddp_overhead_seconds(n_bytes, bandwidth, call_overhead_s, n_buckets)


@mistake("optimal_bucket_bytes", "that is the best number of buckets, where the size of one bucket is expected")
def best_number(n_bytes, bandwidth, call_overhead_s):
    return math.sqrt(n_bytes / (bandwidth * call_overhead_s)) if call_overhead_s else math.inf


@mistake("optimal_bucket_bytes", "the square root is missing")
def without_root(n_bytes, bandwidth, call_overhead_s):
    return min(float(n_bytes), n_bytes * bandwidth * call_overhead_s)


@mistake(
    "optimal_bucket_bytes",
    "that is the size whose transfer takes as long as a call; it should depend on all bytes together",
)
def break_even(n_bytes, bandwidth, call_overhead_s):
    return min(float(n_bytes), bandwidth * call_overhead_s)


@mistake("optimal_bucket_bytes", "the bucket is larger than all gradients together, but k is at least 1")
def unbounded(n_bytes, bandwidth, call_overhead_s):
    return math.sqrt(n_bytes * bandwidth * call_overhead_s)


# ---- 10.5 OverlapDDP, 10.8 BucketedDDP -------------------------------------------------------------------------------


def _start_mean(parameters, async_op=True):
    """One collective for the gradients of several parameters; it is divided first, as the reference does it."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([grad.detach().reshape(-1) for grad in grads])
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = piece.view(p.shape)
    return dist.all_reduce(flat.div_(dist.get_world_size()), async_op=async_op)


class _Rounds:
    """Means of buckets of gradients, in one order on all ranks; right, but for what a mistake overrides."""

    def __init__(self, buckets):
        self.buckets, self.is_paused = buckets, False
        self.bucket_of = {p: i for i, bucket in enumerate(buckets) for p in bucket}
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.on_ready)
        self.begin()

    def begin(self):
        self.ready, self.works = set(), []
        self.n_missing = [len(bucket) for bucket in self.buckets]

    def on_ready(self, p):
        if self.is_paused:
            return
        if p in self.ready:
            raise RuntimeError("a second backward in one round")
        self.ready.add(p)
        self.n_missing[self.bucket_of[p]] -= 1
        while len(self.works) < len(self.buckets) and self.n_missing[len(self.works)] <= 0:
            self.start_next()

    @torch.no_grad()
    def start_next(self):
        self.works.append(_start_mean(self.buckets[len(self.works)]))

    def finish(self):
        if self.is_paused:
            return
        while len(self.works) < len(self.buckets):
            self.start_next()
        works = self.works
        self.begin()
        for work in works:
            if work is not None:
                work.wait()

    def finish_what_was_left(self):
        if self.ready and torch.is_grad_enabled():
            paused, self.is_paused = self.is_paused, False
            self.finish()
            self.is_paused = paused

    @contextmanager
    def paused(self):
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


def _fill_buckets(parameters, bucket_bytes):
    """Parameters in the order given, each dtype in buckets of its own; the bucket that is complete first comes first."""
    position = {p: i for i, p in enumerate(parameters)}
    buckets, open_buckets = [], {}
    for p in parameters:
        bucket = open_buckets.get(p.dtype)
        if bucket is None or sum(q.nbytes for q in bucket) + p.nbytes > bucket_bytes:
            bucket = open_buckets[p.dtype] = []
            buckets.append(bucket)
        bucket.append(p)
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


class _Wrapper(torch.nn.Module):
    """What both wrappers share; a mistake overrides a part of it, or its rounds."""

    rounds = _Rounds

    def wrap(self, module, bucket_size_mb=None):
        self.module = module
        self.send(module)
        self.turns = self.rounds(self.buckets(_trained(module), bucket_size_mb))

    def send(self, module):
        reference.broadcast_parameters(module)

    def forward(self, *args, **kwargs):
        self.turns.finish_what_was_left()
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        self.turns.finish()

    @contextmanager
    def no_sync(self):
        with self.turns.paused():
            yield


class _Overlap(_Wrapper):
    def __init__(self, module):
        super().__init__()
        self.wrap(module)

    def buckets(self, trained, bucket_size_mb):
        return [[p] for p in reversed(trained)]


class _Bucketed(_Wrapper):
    def __init__(self, module, bucket_size_mb):
        super().__init__()
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb = {bucket_size_mb}")
        self.wrap(module, bucket_size_mb)

    def buckets(self, trained, bucket_size_mb):
        return _fill_buckets(trained[::-1], bucket_size_mb * 2**20)


class _NotSent:
    def send(self, module):
        pass


class _Sum(_Rounds):
    """Means multiplied again by the number of ranks."""

    def finish(self):
        super().finish()
        if not self.is_paused:
            for p in self.bucket_of:
                p.grad.mul_(dist.get_world_size())


class _AtTheEnd(_Rounds):
    """Nothing starts before finish."""

    def on_ready(self, p):
        pass


class _Blocking(_Rounds):
    """Backward waits for each collective."""

    @torch.no_grad()
    def start_next(self):
        self.works.append(_start_mean(self.buckets[len(self.works)], async_op=False))


class _NoZeros(_Rounds):
    """What backward did not reach takes no part."""

    @torch.no_grad()
    def start_next(self):
        parameters = [p for p in self.buckets[len(self.works)] if p.grad is not None]
        self.works.append(_start_mean(parameters) if parameters else None)


class _AsReady(_Rounds):
    """Each bucket is started as soon as it is whole, whatever is under way elsewhere."""

    def begin(self):
        super().begin()
        self.started = set()

    def on_ready(self, p):
        if not self.is_paused:
            self.ready.add(p)
            i = self.bucket_of[p]
            self.n_missing[i] -= 1
            if self.n_missing[i] == 0:
                self.start(i)

    @torch.no_grad()
    def start(self, i):
        self.started.add(i)
        self.works.append(_start_mean(self.buckets[i]))

    def finish(self):
        if self.is_paused:
            return
        for i in range(len(self.buckets)):
            if i not in self.started:
                self.start(i)
        works = self.works
        self.begin()
        for work in works:
            work.wait()


class _AlwaysSync(_Rounds):
    """no_sync has no effect on the hooks."""

    @contextmanager
    def paused(self):
        yield


class _StaysPaused(_Rounds):
    """The end of no_sync is not reached when an exception passes."""

    @contextmanager
    def paused(self):
        before, self.is_paused = self.is_paused, True
        yield
        self.is_paused = before


class _NotForgotten(_Rounds):
    """What an exception left is still there in the next round."""

    def on_ready(self, p):
        if p not in self.ready:
            super().on_ready(p)

    def finish_what_was_left(self):
        pass


class _OpenIfStarted(_Rounds):
    """A round is taken for open only when a collective of it has been started."""

    def begin(self):
        super().begin()
        self.fired = set()

    def on_ready(self, p):
        if self.is_paused:
            return
        if p in self.fired:
            raise RuntimeError("a second backward")
        self.fired.add(p)
        self.ready.add(p)
        self.n_missing[self.bucket_of[p]] -= 1
        while len(self.works) < len(self.buckets) and self.n_missing[len(self.works)] <= 0:
            self.start_next()

    def finish_what_was_left(self):
        if self.works:
            super().finish_what_was_left()
        else:
            self.fired = set()


class _ResetToOn(_Rounds):
    """The end of any no_sync turns synchronisation on."""

    @contextmanager
    def paused(self):
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False


class _TwiceReady(_Rounds):
    """A gradient that changes after it has been sent passes without a word."""

    def on_ready(self, p):
        if p not in self.ready:
            super().on_ready(p)


class _PlainCall:
    def forward(self, x, *rest):
        self.turns.finish_what_was_left()
        return self.module(x, *rest)


NOT_SENT = "the ranks begin with different weights: broadcast rank 0's first"


@mistake("OverlapDDP", NOT_SENT)
class OverlapNotSent(_NotSent, _Overlap):
    pass


@mistake("BucketedDDP", NOT_SENT)
class BucketedNotSent(_NotSent, _Bucketed):
    pass


SUM = "gradients are summed, and never divided by the number of ranks"


@mistake("OverlapDDP", SUM)
class OverlapSum(_Overlap):
    rounds = _Sum


@mistake("BucketedDDP", SUM)
class BucketedSum(_Bucketed):
    rounds = _Sum


AT_THE_END = "every collective starts in finish_gradient_synchronization(), after backward: nothing overlaps"


@mistake("OverlapDDP", AT_THE_END)
class OverlapAtTheEnd(_Overlap):
    rounds = _AtTheEnd


@mistake("BucketedDDP", AT_THE_END)
class BucketedAtTheEnd(_Bucketed):
    rounds = _AtTheEnd


BLOCKING = "the collective in the hook is not asynchronous (async_op=True), so backward waits for it"


@mistake("OverlapDDP", BLOCKING)
class OverlapBlocking(_Overlap):
    rounds = _Blocking


@mistake("BucketedDDP", BLOCKING)
class BucketedBlocking(_Bucketed):
    rounds = _Blocking


NO_ZEROS = "a parameter that this rank did not use is left out: other ranks wait for it, or meet the wrong collective"


@mistake("OverlapDDP", NO_ZEROS)
class OverlapNoZeros(_Overlap):
    rounds = _NoZeros


@mistake("BucketedDDP", NO_ZEROS)
class BucketedNoZeros(_Bucketed):
    rounds = _NoZeros


AS_READY = (
    "each collective starts as soon as it can, so ranks that used different parameters start them in different orders"
)


@mistake("OverlapDDP", AS_READY)
class OverlapAsReady(_Overlap):
    rounds = _AsReady


@mistake("BucketedDDP", AS_READY)
class BucketedAsReady(_Bucketed):
    rounds = _AsReady


ALWAYS_SYNC = "hooks start collectives inside no_sync() too"


@mistake("OverlapDDP", ALWAYS_SYNC)
class OverlapAlwaysSync(_Overlap):
    rounds = _AlwaysSync


@mistake("BucketedDDP", ALWAYS_SYNC)
class BucketedAlwaysSync(_Bucketed):
    rounds = _AlwaysSync


STAYS_PAUSED = "an exception inside no_sync() leaves synchronisation off: restore the flag in `finally`"


@mistake("OverlapDDP", STAYS_PAUSED)
class OverlapStaysPaused(_Overlap):
    rounds = _StaysPaused


@mistake("BucketedDDP", STAYS_PAUSED)
class BucketedStaysPaused(_Bucketed):
    rounds = _StaysPaused


OPEN_IF_STARTED = (
    "a round counts as open only once a collective has started: if an exception ends a step before that, its notes "
    "of ready gradients stay, and must be forgotten too"
)


@mistake("OverlapDDP", OPEN_IF_STARTED)
class OverlapOpenIfStarted(_Overlap):
    rounds = _OpenIfStarted


@mistake("BucketedDDP", OPEN_IF_STARTED)
class BucketedOpenIfStarted(_Bucketed):
    rounds = _OpenIfStarted


RESET_TO_ON = (
    "the end of an inner no_sync() turns synchronisation on inside the outer one: restore the value from before"
)


@mistake("OverlapDDP", RESET_TO_ON)
class OverlapResetToOn(_Overlap):
    rounds = _ResetToOn


@mistake("BucketedDDP", RESET_TO_ON)
class BucketedResetToOn(_Bucketed):
    rounds = _ResetToOn


TWICE_READY = "a second backward in one round changes gradients that were sent already, and no error says so"


@mistake("OverlapDDP", TWICE_READY)
class OverlapTwiceReady(_Overlap):
    rounds = _TwiceReady


@mistake("BucketedDDP", TWICE_READY)
class BucketedTwiceReady(_Bucketed):
    rounds = _TwiceReady


NOT_FORGOTTEN = "collectives that a failed step had started are counted as the next step's"


@mistake("OverlapDDP", NOT_FORGOTTEN)
class OverlapNotForgotten(_Overlap):
    rounds = _NotForgotten


@mistake("BucketedDDP", NOT_FORGOTTEN)
class BucketedNotForgotten(_Bucketed):
    rounds = _NotForgotten


PLAIN_CALL = "keyword arguments do not reach the module"


@mistake("OverlapDDP", PLAIN_CALL)
class OverlapPlainCall(_PlainCall, _Overlap):
    pass


@mistake("BucketedDDP", PLAIN_CALL)
class BucketedPlainCall(_PlainCall, _Bucketed):
    pass


@mistake("OverlapDDP", "all gradients are in one bucket, which is complete only when backward ends")
class OneBucket(_Overlap):
    def buckets(self, trained, bucket_size_mb):
        return _fill_buckets(trained[::-1], math.inf)


@mistake(
    "OverlapDDP", "collectives start in the order of the parameters, but backward reaches the first parameters last"
)
class Forwards(_Overlap):
    def buckets(self, trained, bucket_size_mb):
        return [[p] for p in trained]


@mistake("BucketedDDP", "buckets fill in the order of the parameters, but backward reaches the first parameters last")
class BucketsForwards(_Bucketed):
    def buckets(self, trained, bucket_size_mb):
        return _fill_buckets(trained, bucket_size_mb * 2**20)


@mistake("BucketedDDP", "every gradient has a collective of its own, where buckets should hold several")
class NoBuckets(_Bucketed):
    def buckets(self, trained, bucket_size_mb):
        return [[p] for p in reversed(trained)]


@mistake("BucketedDDP", "a bucket is closed after it has become too large, where it should be closed before")
class Overfull(_Bucketed):
    def buckets(self, trained, bucket_size_mb):
        buckets, open_buckets = [], {}
        for p in reversed(trained):
            bucket = open_buckets.get(p.dtype)
            if bucket is None or sum(q.nbytes for q in bucket) >= bucket_size_mb * 2**20:
                bucket = open_buckets[p.dtype] = []
                buckets.append(bucket)
            bucket.append(p)
        order = {p: i for i, p in enumerate(reversed(trained))}
        return sorted(buckets, key=lambda bucket: order[bucket[-1]])


@mistake("BucketedDDP", "a MB is 10**6 bytes here; `bucket_size_mb` counts MB of 2**20 bytes")
class DecimalMB(_Bucketed):
    def buckets(self, trained, bucket_size_mb):
        return _fill_buckets(trained[::-1], bucket_size_mb * 10**6)


@mistake("BucketedDDP", "`>=` in place of `>`: a gradient that just fits begins the next bucket")
class JustFitting(_Bucketed):
    def buckets(self, trained, bucket_size_mb):
        return _fill_buckets(trained[::-1], bucket_size_mb * 2**20 - 1e-3)


@mistake("BucketedDDP", "the size counts numbers, where it should count bytes")
class Elements(_Bucketed):
    def buckets(self, trained, bucket_size_mb):
        return _fill_buckets(trained[::-1], 4 * bucket_size_mb * 2**20)


@mistake("BucketedDDP", "dtypes share a bucket, in which the narrow ones are widened")
class MixedBuckets(_Bucketed):
    def buckets(self, trained, bucket_size_mb):
        buckets = [[]]
        for p in reversed(trained):
            if buckets[-1] and sum(q.nbytes for q in buckets[-1]) + p.nbytes > bucket_size_mb * 2**20:
                buckets.append([])
            buckets[-1].append(p)
        return buckets if trained else []


@mistake(
    "BucketedDDP", "buckets go in the order in which they were begun: one that is completed late holds up all others"
)
class OrderOfBeginning(_Bucketed):
    def buckets(self, trained, bucket_size_mb):
        order = {p: i for i, p in enumerate(reversed(trained))}
        return sorted(super().buckets(trained, bucket_size_mb), key=lambda bucket: order[bucket[0]])


@mistake("BucketedDDP", "a bucket size that is not positive raises no ValueError")
class AnySize(_Bucketed):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module, max(bucket_size_mb, 1e-9))
