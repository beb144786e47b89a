"""Groups from the engine, the gate between sampler and trainer, and one step on one process and on ranks.

`generate_many` and the model's own second pass are the oracles of the sampler; of a step it is the formula on the whole
batch in float64, written out here, and one process for ranks.
"""

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib.given.models.gpt2 import GPT2Config
from lib.given.models.llama import LlamaConfig
from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded
from solutions.gpt2 import GPT2
from solutions.llama import Llama
from solutions.serving import Request, Scheduler, generate_many
from tests.inputs import randn

rewards = graded("rewards")

GATE = "eq-rewards-7"
STEP = "eq-rewards-8"
RAISES = "the contract, under Raises"
RETURNS = "the contract, under Returns"
ARGS = "the contract, under Args"
COST = "the contract, under Cost"
ATTRIBUTES = "the contract, under Attributes"
START, FINISH, TAKE = (f"the contract, under {method}" for method in ("start", "finish", "take"))

# ---- sample_groups ---------------------------------------------------------------------------------------------------

V = 12
PROMPTS = [[1, 3, 4], [5, 6, 7, 8, 9], [10]]
LLAMA = LlamaConfig(vocab_size=V, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, context_len=40)
GPT = GPT2Config(vocab_size=V, context_len=40, dim=16, n_layers=2, n_heads=4)
SIZES = {"roomy": (64, 64, 4), "in chunks": (3, 64, 4), "preempting": (16, 7, 4)}
every_pool = pytest.mark.parametrize("pool", SIZES)
every_model = pytest.mark.parametrize(("kind", "pool"), [*(("llama", pool) for pool in SIZES), ("gpt2", "preempting")])
long_diagnosis = pytest.mark.time_limit(20)  # every known mistake runs the engine


def model_of(kind: str = "llama", sharpness: float = 30.0) -> Any:
    torch.manual_seed(1)
    model = Llama(LLAMA) if kind == "llama" else GPT2(GPT)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(sharpness ** (1 / 4))  # so that the distributions are far from uniform
    return model


@cache
def drawn(kind: str, pool: str, group_size: int, n_new: int, temperature: float, eos_id: int | None) -> list:
    """What `generate_many` draws for each row with the seeds 11, 12, ...: pairs of prompt and response."""
    requests = [
        Request(PROMPTS[n // group_size], n_new, temperature, 11 + n, eos_id=eos_id)
        for n in range(len(PROMPTS) * group_size)
    ]
    new: dict[Request, list[int]] = {request: [] for request in requests}
    for request, token in generate_many(model_of(kind), requests, Scheduler(*SIZES[pool])):
        new[request].append(token)
    return [(list(request.tokens), tokens) for request, tokens in new.items()]


def second_pass(model: nn.Module, tokens: Tensor, temperature: float) -> Tensor:
    logits = model(tokens[:, :-1])
    logits = logits[0] if isinstance(logits, tuple) else logits
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1).detach()


@long_diagnosis
def test_sample_groups_give_each_row_a_seed():
    case("three prompts, groups of 2, 4 new tokens, seed=11: rows 0 to 5 have the seeds 11 to 16")
    batch = rewards.sample_groups(model_of(), PROMPTS, 2, Scheduler(*SIZES["roomy"]), 4, seed=11)
    for n, (prompt, new) in enumerate(drawn("llama", "roomy", 2, 4, 1.0, None)):
        found = batch["tokens"][n, len(prompt) : len(prompt) + 4].tolist()
        expect_equal(found, new, name=f"response {n}, of seed {11 + n}", read=ARGS)


@long_diagnosis
@every_model
def test_sample_groups_equal_generate_many(kind, pool):
    case(
        f"{kind}, three prompts, groups of 3, at most 9 new tokens, eos_id=2, temperature 0.8; scheduler {SIZES[pool]}"
    )
    model, scheduler = model_of(kind), Scheduler(*SIZES[pool])
    batch = rewards.sample_groups(model, PROMPTS, 3, scheduler, 9, 0.8, seed=11, eos_id=2, pad_id=7, version=4)
    pairs = drawn(kind, pool, 3, 9, 0.8, 2)
    rows = [prompt + new for prompt, new in pairs]
    width = max(map(len, rows))
    expect_equal(
        batch["tokens"].tolist(), [row + [7] * (width - len(row)) for row in rows], name="tokens", read=RETURNS
    )
    mask = [[len(prompt) <= t < len(prompt) + len(new) for t in range(1, width)] for prompt, new in pairs]
    expect_equal(batch["response_mask"].tolist(), mask, name="response_mask", read=RETURNS)
    expect_equal(batch["groups"].tolist(), [0, 0, 0, 1, 1, 1, 2, 2, 2], name="groups", read=RETURNS)
    expect_equal(batch["version"], 4, name="version", read=RETURNS)
    names = sorted(batch)
    expect_equal(names, ["groups", "log_probs", "response_mask", "tokens", "version"], name="keys", read=RETURNS)
    dtypes = [batch[key].dtype for key in ("tokens", "response_mask", "log_probs", "groups")]
    expect_equal(dtypes, [torch.int64, torch.bool, torch.float32, torch.int64], name="dtypes", read=RETURNS)


@long_diagnosis
@every_model
def test_sample_groups_read_log_probs_off_the_engine(kind, pool):
    case(f"{kind}, temperature 0.8, scheduler {SIZES[pool]}: log-probabilities as in a second pass, 0 outside")
    model = model_of(kind)
    batch = rewards.sample_groups(model, PROMPTS, 3, Scheduler(*SIZES[pool]), 9, 0.8, seed=11, eos_id=2)
    expected = second_pass(model, batch["tokens"], 0.8) * batch["response_mask"]
    expect_close(batch["log_probs"], expected, atol=2e-4, name="log_probs", read=RETURNS)
    expect_true(not batch["log_probs"].requires_grad, "the log-probabilities have a gradient", read=RETURNS)


def positions_passed(model: Any, call) -> int:
    passed = []
    hook = model.tok_embeddings.register_forward_hook(lambda module, args, out: passed.append(args[0].numel()))
    try:
        call()
    finally:
        hook.remove()
    return sum(passed)


@long_diagnosis
@every_pool
def test_sample_groups_make_no_second_pass(pool):
    case(f"positions that the model sees, scheduler {SIZES[pool]}")
    model = model_of()
    requests = [Request(PROMPTS[n // 3], 9, 0.8, 11 + n, eos_id=2) for n in range(9)]
    expected = positions_passed(model, lambda: list(generate_many(model, requests, Scheduler(*SIZES[pool]))))
    found = positions_passed(
        model,
        lambda: rewards.sample_groups(model, PROMPTS, 3, Scheduler(*SIZES[pool]), 9, 0.8, seed=11, eos_id=2),
    )
    expect_equal(found, expected, name="positions", read=COST)


@long_diagnosis
def test_sample_groups_leave_the_scheduler_free():
    model, scheduler = model_of(), Scheduler(16, 7, 4)
    case("the second prompt has a token that is not in the vocabulary")
    with expect_raises(ValueError, "99", read=RAISES):
        rewards.sample_groups(model, [[1, 2], [99]], 2, scheduler, 5)
    expect_equal((len(scheduler.waiting), len(scheduler.running)), (0, 0), name="waiting, running", read=ARGS)
    case("the model fails in its third step")
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("on purpose")

    hook = model.tok_embeddings.register_forward_hook(fail)
    with expect_raises(KeyError, "on purpose"):
        rewards.sample_groups(model, PROMPTS, 2, scheduler, 5)
    hook.remove()
    expect_equal((len(scheduler.waiting), len(scheduler.running)), (0, 0), name="waiting, running", read=ARGS)
    expect_equal(scheduler.n_free, 7, name="free blocks", read=ARGS)
    case("the same scheduler again, after the failure")
    batch = rewards.sample_groups(model, PROMPTS, 2, scheduler, 5)
    expect_equal(batch["tokens"].shape, (6, 10), name="shape of tokens", read=RETURNS)
    expect_equal(scheduler.n_free, 7, name="free blocks", read=ARGS)


def test_sample_groups_of_no_prompts():
    case("no prompts, groups of 2")
    batch = rewards.sample_groups(model_of(), [], 2, Scheduler(16, 7, 4), 5, version=3)
    shapes = {key: tuple(value.shape) for key, value in batch.items() if key != "version"}
    expected = {"tokens": (0, 1), "response_mask": (0, 0), "log_probs": (0, 0), "groups": (0,)}
    expect_equal(shapes, expected, name="shapes", read=ARGS)


def test_sample_groups_refuse_greedy_decoding():
    for temperature in (0.0, -1.0):
        case(f"temperature = {temperature}")
        with expect_raises(ValueError, str(temperature), read=RAISES):
            rewards.sample_groups(model_of(), PROMPTS, 2, Scheduler(16, 7, 4), 5, temperature)


# ---- StalenessGate ---------------------------------------------------------------------------------------------------


def expect_taken(gate, expected: list | None) -> None:
    """Expect a batch or None, which `take` may well return on purpose."""
    found = gate.take()
    if expected is not None:
        expect_true(found is not None, f"take() is None, but a batch is ready: {expected}", read=TAKE)
    expect_equal(found, expected, name="take()", read=TAKE)


def test_StalenessGate_by_hand():
    gate = rewards.StalenessGate(batch_size=2, max_staleness=1)
    case("batches of 2, staleness 1 at most: 4 rollouts may start at version 0")
    expect_equal((gate.version, gate.n_allowed, gate.n_dropped), (0, 4, 0), name="version, n_allowed, n_dropped",
                 read=GATE)  # fmt: skip
    expect_equal(gate.start(3), 0, name="start(3)", read=GATE)
    expect_equal(gate.n_allowed, 1, name="n_allowed after 3 starts", read=GATE)
    with expect_raises(ValueError, "2", "1", read=START):
        gate.start(2)
    expect_equal(gate.n_allowed, 1, name="n_allowed after a refusal", read=START)
    case("one rollout is finished: no batch; two: a batch, in the order of finishing")
    gate.finish("b", 0)
    expect_taken(gate, None)
    gate.finish("a", 0)
    expect_taken(gate, [("b", 0), ("a", 0)])
    expect_taken(gate, None)
    expect_equal(gate.n_allowed, 1, name="n_allowed: what was used still counts", read=GATE)
    case("version 1: two more may start, the old rollout is still good, and the lowest version goes first")
    gate.advance()
    expect_equal((gate.version, gate.n_allowed), (1, 3), name="version, n_allowed", read=GATE)
    expect_equal(gate.start(), 1, name="start()", read=GATE)
    gate.finish("d", 1)
    gate.finish("c", 0)
    expect_taken(gate, [("c", 1), ("d", 0)])


def test_StalenessGate_drops_before_it_counts():
    gate = rewards.StalenessGate(batch_size=2, max_staleness=0)
    case("batches of 2, staleness 0 at most: one of two rollouts finishes, then an update makes it too old")
    gate.start(2)
    gate.finish("a", 0)
    gate.advance()
    expect_equal((gate.n_dropped, gate.n_allowed), (0, 2), name="n_dropped, n_allowed before take()", read=TAKE)
    expect_taken(gate, None)
    expect_equal(gate.n_dropped, 1, name="n_dropped after take()", read=TAKE)
    expect_equal(gate.n_allowed, 3, name="n_allowed after take()", read=GATE)


def test_StalenessGate_drops_what_is_too_old():
    gate = rewards.StalenessGate(batch_size=2, max_staleness=1)
    case("four started at version 0; three of them finish at version 2, where 1 version is the most")
    gate.start(4)
    gate.advance()
    gate.advance()
    before = gate.n_allowed
    for item in "abc":
        gate.finish(item, 0)
    expect_equal((before, gate.n_allowed), (4, 4), name="n_allowed before and after they finish", read=GATE)
    expect_taken(gate, None)
    expect_equal(gate.n_dropped, 3, name="n_dropped", read=ATTRIBUTES)
    expect_equal(gate.n_allowed, 7, name="n_allowed: what was dropped no longer counts", read=GATE)
    case("the fourth finishes with two of version 2: it is dropped, and the others make a batch")
    gate.start(2)
    gate.finish("e", 2)
    gate.finish("d", 0)
    gate.finish("f", 2)
    expect_taken(gate, [("e", 0), ("f", 0)])
    expect_equal(gate.n_dropped, 4, name="n_dropped", read=ATTRIBUTES)


def test_StalenessGate_knows_what_runs():
    gate = rewards.StalenessGate(2, 3)
    gate.start(2)
    case("a rollout of version 5 is finished, and two of version 0 are running")
    with expect_raises(ValueError, "5", read=FINISH):
        gate.finish("a", 5)
    items = [{"tokens": [2]}, {"tokens": [1]}]
    for item in items:
        gate.finish(item, 0)
    case("two of version 0 were started, and a third one is finished")
    with expect_raises(ValueError, "0", read=FINISH):
        gate.finish("c", 0)
    case("two dicts are finished, and nothing of what was refused is in the batch")
    expect_taken(gate, [(item, 0) for item in items])


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_StalenessGate_never_yields_a_batch_too_old(max_staleness):
    draw, batch_size = random.Random(max_staleness), 3
    gate = rewards.StalenessGate(batch_size, max_staleness)
    running, n_started, taken, dropped = [], 0, [], 0
    for step in range(600):
        case(f"a random walk, max_staleness={max_staleness}, step {step}")
        allowed = (gate.version + max_staleness + 1) * batch_size - (n_started - gate.n_dropped)
        expect_equal(gate.n_allowed, allowed, name="n_allowed", read=GATE)
        deed = draw.choice(["start", "finish", "finish", "take"])
        if deed == "start" and allowed > 0:
            n = draw.randint(1, allowed)
            version = gate.start(n)
            running += [(version, n_started + i) for i in range(n)]
            n_started += n
        elif deed == "finish" and running:
            version, item = running.pop(draw.randrange(len(running)))
            gate.finish(item, version)
        elif deed == "take" and (batch := gate.take()) is not None:
            expect_equal(len(batch), batch_size, name="size of a batch", read=TAKE)
            worst = max(staleness for _, staleness in batch)
            expect_true(worst <= max_staleness, f"a rollout is {worst} versions old", read=TAKE)
            ages = [staleness for _, staleness in batch]
            expect_equal(ages, sorted(ages, reverse=True), name="staleness: lowest version first", read=TAKE)
            taken += [item for item, _ in batch]
            gate.advance()
        expect_true(gate.n_dropped >= dropped, "n_dropped fell", read=ATTRIBUTES)
        dropped = gate.n_dropped
    expect_equal(len(taken), len(set(taken)), name="rollouts used, each once", read=TAKE)
    expect_true(len(taken) > 30, f"only {len(taken)} rollouts were used in 600 steps", read=GATE)


# ---- grpo_step -------------------------------------------------------------------------------------------------------

NAMES = 7
LENGTHS = ((2, 5), (1, 2), (3, 6), (2, 3), (1, 6), (2, 4))  # of prompt and row
GROUPS = (3, 3, 3, 8, 8, 8)


class Table(nn.Module):
    """Logits of the next token by the last two: the smallest causal model."""

    def __init__(self, as_tuple: bool = False, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.last = nn.Parameter(randn(NAMES, NAMES, seed=5, dtype=dtype))
        self.before = nn.Parameter(randn(NAMES, NAMES, seed=6, dtype=dtype))
        self.as_tuple, self.widths = as_tuple, set[int]()
        self.rows: list[Any] = []

    def forward(self, tokens: Tensor):
        self.rows.append(len(tokens))
        self.widths.add(tokens.shape[1])
        logits = self.last[tokens]
        logits = logits + nn.functional.pad(self.before[tokens[:, :-1]], (0, 0, 1, 0))
        return (logits, None) if self.as_tuple else logits


def a_batch(rows: range = range(6), width: int = 6, mask_dtype: torch.dtype = torch.bool) -> dict[str, Any]:
    """Six responses of two groups, or some of them; everything that is masked is NaN."""
    tokens = torch.randint(NAMES, (6, width), generator=torch.Generator().manual_seed(3))
    target = torch.arange(1, width)
    mask = torch.stack([(target >= start) & (target < end) for start, end in LENGTHS])
    batch = {"tokens": tokens, "response_mask": mask.to(mask_dtype), "groups": torch.tensor(GROUPS),
             "rewards": torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 1.0])}  # fmt: skip
    for seed, key in enumerate(("log_probs", "old_log_probs", "ref_log_probs")):
        values = randn(6, width - 1, seed=20 + seed, dtype=torch.float64) * 0.5 - 2
        batch[key] = values.masked_fill(~mask, float("nan"))
    cut = slice(rows.start, rows.stop)
    return {key: value[cut] for key, value in batch.items()} | {"version": 3}


def written_out(model: Table, batch: dict, **s) -> tuple[Tensor, float]:
    """The loss of the whole batch and the share of clipped tokens, by the formulas of the page."""
    mask = batch["response_mask"].bool()
    logits = model(batch["tokens"][:, :-1]) / s.get("temperature", 1.0)
    log_probs = logits.log_softmax(-1).gather(-1, batch["tokens"][:, 1:, None]).squeeze(-1)
    old = batch.get("old_log_probs", log_probs.detach())
    A = torch.zeros(len(mask), dtype=torch.float64)
    for name in set(batch["groups"].tolist()):
        rows = batch["groups"] == name
        r = batch["rewards"][rows].double()
        A[rows] = (r - r.mean()) / (r.std() + 1e-6 if s.get("normalize_by_std", True) else 1)
    kept, low, high = [], s.get("clip_ratio_low", 0.2), s.get("clip_ratio_high", 0.2)
    clipped = n_tokens = 0
    for n in range(len(mask)):
        x, o = log_probs[n][mask[n]], old[n][mask[n]]
        ratio = (
            (x - o).exp() if s.get("level", "token") == "token" else (x - x.detach() + (x - o).mean().detach()).exp()
        )
        plain, cut = ratio * A[n], ratio.clamp(1 - low, 1 + high) * A[n]
        clipped, n_tokens = clipped + int((cut < plain).sum()), n_tokens + len(x)
        losses = -torch.minimum(plain, cut)
        if s.get("correction"):
            w = (o - batch["log_probs"][n][mask[n]]).exp()
            cap, floor = s.get("cap", 2.0), s.get("floor", 0.0)
            w = w.clamp(max=cap) if s["correction"] == "truncate" else w * ((w >= floor) & (w <= cap))
            losses = losses * w
        d = x - batch["ref_log_probs"][n][mask[n]]
        kept += [losses + s.get("kl_coef", 0.0) * ((-d).exp() - 1 + d)] if len(x) else []
    mode, rows = s.get("loss_agg_mode", "token-mean"), len(kept)
    totals = {
        "token-mean": sum(x.sum() for x in kept) / n_tokens,
        "token-sum": sum(x.sum() for x in kept),
        "seq-mean-token-sum": sum(x.sum() for x in kept) / rows,
        "seq-mean-token-mean": sum(x.mean() for x in kept) / rows,
        "seq-mean-token-sum-norm": sum(x.sum() for x in kept) / rows / (s.get("loss_scale_factor") or mask.shape[1]),
    }
    return totals[mode], clipped / n_tokens


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "clip": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.5},
    "Dr. GRPO": {"normalize_by_std": False, "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 11.0},
    "sequence": {"level": "sequence", "loss_agg_mode": "seq-mean-token-mean"},
    "sequence, weights of tokens": {"level": "sequence", "correction": "truncate", "cap": 1.1},
    "truncate": {"correction": "truncate", "cap": 1.25, "loss_agg_mode": "token-sum"},
    "mask": {"correction": "mask", "cap": 1.5, "floor": 0.5, "loss_agg_mode": "seq-mean-token-sum"},
    "kl": {"kl_coef": 0.3, "correction": "truncate", "cap": 0.5, "temperature": 0.7},
}


def expected_step(batch: dict, lr: float, max_norm: float, **s) -> tuple[dict[str, float], Table]:
    model = Table()
    loss, clip_fraction = written_out(model, batch, **s)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = float(torch.stack([g.norm() for g in gradients]).norm())
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradients, strict=True):
            p -= lr * g * min(1.0, max_norm / (norm + 1e-6))
    reward = float(batch["rewards"].mean())
    return {"loss": float(loss.detach()), "reward": reward, "clip_fraction": clip_fraction, "grad_norm": norm}, model


def expect_same_weights(model: nn.Module, expected: nn.Module, atol: float = 1e-6) -> None:
    for (name, p), e in zip(model.named_parameters(), expected.parameters(), strict=True):
        expect_close(p.detach(), e.detach(), atol=atol, rtol=0, name=f"weight {name} after the step", read=STEP)


@pytest.mark.parametrize("name", [*SETTINGS, "no constant"])
@pytest.mark.parametrize("micro_batch_size", [None, 1, 4])
def test_grpo_step_equals_the_formulas(name, micro_batch_size):
    settings = SETTINGS.get(name, {"loss_agg_mode": "seq-mean-token-sum-norm"})  # divided by T - 1 of the batch
    case(f"six responses in two groups, micro_batch_size={micro_batch_size}, {settings or 'the defaults'}")
    model, batch = Table(), a_batch()
    before = copy.deepcopy(batch)
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # of an earlier step
    found = rewards.grpo_step(
        model, torch.optim.SGD(model.parameters(), lr=0.5), batch, micro_batch_size, max_norm=0.01, **settings
    )
    numbers, expected = expected_step(a_batch(), 0.5, 0.01, **settings)
    expect_close(found, numbers, atol=1e-6, name="", read=STEP)
    expect_same_weights(model, expected)
    expect_equal({type(value) for value in found.values()}, {float}, name="types of the values", read=RETURNS)
    sizes = {None: [6], 1: [1] * 6, 4: [4, 2]}[micro_batch_size]
    expect_equal(model.rows, sizes, name="rows of each call of the model", read=ARGS)
    expect_equal(model.widths, {5}, name="tokens of a row that the model gets", read=ARGS)
    expect_equal(sorted(batch), sorted(before), name="keys of the batch", read=ARGS)
    for key, value in before.items():
        if isinstance(value, Tensor):
            expect_true(torch.equal(batch[key].nan_to_num(), value.nan_to_num()), f"{key} was changed", read=ARGS)


def test_grpo_step_uses_its_own_log_probs_if_there_are_no_old_ones():
    case("no old_log_probs: ratios of 1, nothing clipped; correction against the sampler's")
    batch = {key: value for key, value in a_batch().items() if key != "old_log_probs"}
    for settings in ({}, {"correction": "truncate", "cap": 1.5}):
        model = Table(as_tuple=True)
        found = rewards.grpo_step(
            model, torch.optim.SGD(model.parameters(), lr=0.5), batch, 2, max_norm=100.0, **settings
        )
        numbers, expected = expected_step(batch, 0.5, 100.0, **settings)
        expect_close(found, numbers, atol=1e-6, name="", read=ARGS)
        expect_same_weights(model, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_grpo_step_takes_other_masks(dtype):
    case(f"a mask of {dtype}, float32 weights")
    model, batch = Table(dtype=torch.float32), a_batch(mask_dtype=dtype)
    found = rewards.grpo_step(model, torch.optim.SGD(model.parameters(), lr=0.5), batch)
    numbers, _ = expected_step(a_batch(), 0.5, 1.0)
    expect_close(found, numbers, atol=1e-5, rtol=1e-5, name="", read=ARGS)
    case(f"a mask of {dtype}; the last response, with a reward of 1, has no token, and the loss is a mean over rows")
    settings: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-sum"}
    model, batch = Table(dtype=torch.float32), a_batch(mask_dtype=dtype)
    batch["response_mask"][5] = 0
    found = rewards.grpo_step(model, torch.optim.SGD(model.parameters(), lr=0.5), batch, 4, **settings)
    numbers, _ = expected_step(batch, 0.5, 1.0, **settings)
    expect_close(found, numbers, atol=1e-5, rtol=1e-5, name="", read=RETURNS)


def test_grpo_step_of_two_updates():
    case("two steps of SGD with momentum on one batch: the second one has ratios other than 1")
    batch = a_batch()
    batch["old_log_probs"] = batch["log_probs"]
    model, expected = Table(), Table()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.5) for m in (model, expected))
    for _ in range(2):
        rewards.grpo_step(model, ours, batch, 4, max_norm=1e9)
        theirs.zero_grad()
        written_out(expected, batch)[0].backward()
        theirs.step()
    expect_same_weights(model, expected)


def test_grpo_step_names_what_is_missing():
    needs: dict[str, dict[str, Any]] = {"tokens": {}, "response_mask": {}, "groups": {}, "rewards": {}}
    needs |= {"log_probs": {"correction": "mask"}, "ref_log_probs": {"kl_coef": 0.1}}
    for key, settings in needs.items():
        case(f"a batch without {key}, {settings or 'the defaults'}")
        batch = {name: value for name, value in a_batch().items() if name != key}
        model = Table()
        with expect_raises(ValueError, key, read=RAISES):
            rewards.grpo_step(model, torch.optim.SGD(model.parameters(), lr=0.5), batch, **settings)
    case("without log_probs and ref_log_probs, which the defaults do not need")
    batch = {name: value for name, value in a_batch().items() if name not in ("log_probs", "ref_log_probs", "version")}
    model = Table()
    rewards.grpo_step(model, torch.optim.SGD(model.parameters(), lr=0.5), batch)
    for settings in ({"level": "word"}, {"loss_agg_mode": "mean"}, {"correction": "clip"}):
        key, value = next(iter(settings.items()))
        case(f"{key}={value!r}")
        with expect_raises(ValueError, value, read=RAISES):
            rewards.grpo_step(model, torch.optim.SGD(model.parameters(), lr=0.5), a_batch(), **settings)


SPLIT = {0: range(3), 1: range(3, 6)}


def stepped(rank: int, world_size: int, names: list[str], micro_batch_size: int | None) -> list[float]:
    """This rank's group; rank 1's rows are one place wider."""
    batch = a_batch(SPLIT[rank])
    if rank:  # a column of padding more, with NaN
        batch["tokens"] = nn.functional.pad(batch["tokens"], (0, 1))
        batch["response_mask"] = nn.functional.pad(batch["response_mask"], (0, 1))
        for key in ("log_probs", "old_log_probs", "ref_log_probs"):
            batch[key] = nn.functional.pad(batch[key], (0, 1), value=float("nan"))
    seen = []
    for name in names:
        settings = SETTINGS[name]
        case(f"one group on each of 2 ranks, micro_batch_size={micro_batch_size}, {settings or 'the defaults'}")
        model = Table()
        found = rewards.grpo_step(
            model, torch.optim.SGD(model.parameters(), lr=0.5), batch, micro_batch_size, max_norm=0.01, **settings
        )
        numbers, expected = expected_step(a_batch(), 0.5, 0.01, **settings)
        expect_close(found["loss"], numbers["loss"], atol=1e-6, name="loss", read=STEP)
        expect_same_weights(model, expected)
        expect_close(found, numbers, atol=1e-6, name="", read=STEP)
        seen += [found[key] for key in sorted(found)]
    return seen


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_grpo_step_on_two_ranks_equals_one_process(ranks, micro_batch_size):
    result = ranks(stepped, list(SETTINGS), micro_batch_size, n_ranks=2)
    case("the numbers on both ranks")
    expect_equal(result.values[0], result.values[1], name="rank 0's and rank 1's", read=RETURNS)


def test_grpo_step_communicates_three_times(ranks):
    result = ranks(stepped, ["kl"], 1, n_ranks=2)
    case("collectives of each rank: two counts, the gradients, and one small tensor")
    for ledger in result.ledgers:
        calls = [(record.op, record.n_elements) for record in ledger.records]
        expect_equal([op for op, _ in calls], ["all_reduce"] * 3, name="calls", read=COST)
        expect_equal([n for _, n in calls[:2]], [2, 2 * NAMES * NAMES], name="their elements", read=COST)
        expect_true(calls[2][1] <= 14, f"{calls[2][1]} numbers are sent", read=COST)


def in_a_group(rank: int, world_size: int) -> None:
    import torch.distributed as dist

    group = dist.new_group([0, 1])
    if rank < 2:
        case("ranks 0 and 1 of three make a step together")
        model = Table()
        found = rewards.grpo_step(model, torch.optim.SGD(model.parameters(), lr=0.5), a_batch(SPLIT[rank]), group=group)
        numbers, expected = expected_step(a_batch(), 0.5, 1.0)
        expect_close(found, numbers, atol=1e-6, name="", read=ARGS)
        expect_same_weights(model, expected)


def test_grpo_step_in_a_group(ranks):
    ranks(in_a_group, n_ranks=3)


def without_rows(rank: int, world_size: int) -> None:
    case("rank 1 has no rows at all")
    batch = a_batch() if rank == 0 else a_batch(range(0))
    model = Table()
    found = rewards.grpo_step(model, torch.optim.SGD(model.parameters(), lr=0.5), batch)
    numbers, expected = expected_step(a_batch(), 0.5, 1.0)
    expect_close(found, numbers, atol=1e-6, name="", read=RETURNS)
    expect_same_weights(model, expected)


def test_grpo_step_where_a_rank_has_nothing(ranks):
    ranks(without_rows, n_ranks=2)
