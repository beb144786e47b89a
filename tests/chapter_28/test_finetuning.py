"""Finetuning, graded: which tokens are learned, what divides the loss, adapters and their bytes, and preferences.

Dense layers, PyTorch's cross-entropy, one process on the whole batch, and exact expectations are the oracles.
"""

import copy
import math
from typing import Any

import pytest
import torch
import torch._dynamo  # a `TorchDispatchMode` imports it when it is first used: not while a check's clock runs
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, recorded
from solutions.llama import LLAMA_2_7B, LLAMA_2_70B, Llama, LlamaConfig, count_parameters
from solutions.low_precision import Int4Linear, pack_int4, unpack_int4
from tests.inputs import randn
from tests.verls import verls

ft = graded("finetuning")

MASK, CROSS, RANKS, LORA, COUNT, NF4, BYTES, ANSWER, DPO, KL = (f"eq-finetuning-{n}" for n in range(1, 11))
ARGS = "the contract, under Args"
RETURNS = "the contract, under Returns"
RAISES = "the contract, under Raises"
COST = "the contract, under Cost"
STATE = "the contract, under Attributes"
FLOAT64: dict[str, Any] = {"atol": 1e-12, "rtol": 1e-12}
IGNORED = -100
ALL = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
SMALL = LlamaConfig(vocab_size=50, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64, context_len=16)

# ---- render_chat -----------------------------------------------------------------------------------------------------

NAMES = ["bos", *(f"{who}_{end}" for who in ("user", "assistant", "python", "output") for end in ("start", "end"))]
SPECIAL = {name: 300 + i for i, name in enumerate(NAMES)}


def encode(text: str) -> list[int]:
    return list(text.encode())


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(content) -> dict:
    return {"role": "assistant", "content": content}


def test_render_chat_by_hand():
    case('user "ab", assistant "c": the answer and its end are learned')
    ids, mask = ft.render_chat([user("ab"), assistant("c")], encode, SPECIAL)
    expect_equal(ids, [300, 301, 97, 98, 302, 303, 99, 304], name="ids", read=RETURNS)
    expect_equal(mask, [0, 0, 0, 0, 0, 0, 1, 1], name="mask", read=RETURNS)
    case("two turns: bos stands once")
    ids, mask = ft.render_chat([user("a"), assistant("b"), user("c"), assistant("d")], encode, SPECIAL)
    expected = [300, 301, 97, 302, 303, 98, 304, 301, 99, 302, 303, 100, 304]
    expect_equal(list(ids), expected, name="ids", read=RETURNS)
    expect_equal(list(mask), [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1], name="mask", read=RETURNS)
    case('user " a ", assistant "": blanks are text, and an empty answer has its two markers')
    ids, mask = ft.render_chat([user(" a "), assistant("")], encode, SPECIAL)
    expect_equal(list(ids), [300, 301, 32, 97, 32, 302, 303, 304], name="ids", read=RETURNS)
    expect_equal(list(mask), [0] * 7 + [1], name="mask", read=RETURNS)


def test_render_chat_parts():
    parts = [("text", "x"), ("python", "1+1"), ("python_output", "2"), ("text", "y")]
    messages = [user("q"), assistant([{"type": kind, "text": text} for kind, text in parts])]
    case("an answer in parts: text, python, its output, text")
    ids, mask = ft.render_chat(messages, encode, SPECIAL)
    expected = [300, 301, 113, 302, 303, 120, 305, 49, 43, 49, 306, 307, 50, 308, 121, 304]
    expect_equal(list(ids), expected, name="ids", read=RETURNS)
    expect_equal(list(mask), [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1], name="mask", read=RETURNS)


def test_render_chat_system_message():
    messages = [{"role": "system", "content": "S"}, user("a"), assistant("b")]
    before = copy.deepcopy(messages)
    case('system "S", user "a", assistant "b": the system message is the beginning of the user\'s')
    ids, mask = ft.render_chat(messages, encode, SPECIAL)
    expect_equal(list(ids), [300, 301, 83, 10, 10, 97, 302, 303, 98, 304], name="ids", read=RETURNS)
    expect_equal(list(mask), [0] * 8 + [1, 1], name="mask", read=RETURNS)
    expect_equal(messages, before, name="the messages afterwards", read=ARGS)
    case("the same, where encode has one token, 126, for a newline before an a")
    ids, _ = ft.render_chat(messages, lambda text: encode(text.replace("\na", "~")), SPECIAL)
    expect_equal(list(ids), [300, 301, 83, 10, 126, 302, 303, 98, 304], name="ids", read=RETURNS)


def test_render_chat_encodes_content_only():
    calls = []

    def spy(text):
        calls.append(text)
        return encode(text)

    case("a marker that somebody typed goes through encode, as text")
    ids, _ = ft.render_chat([user("<|user_end|>"), assistant("b")], spy, SPECIAL)
    expect_equal(list(ids[2:14]), encode("<|user_end|>"), name="ids[2:14]", read=ARGS)
    expect_equal(calls, ["<|user_end|>", "b"], name="texts given to encode", read=ARGS)


def test_render_chat_prompt_and_cut():
    case("a prompt: assistant_start follows, and is not learned")
    ids, mask = ft.render_chat([user("a")], encode, SPECIAL, add_generation_prompt=True)
    expect_equal(list(ids), [300, 301, 97, 302, 303], name="ids", read=ARGS)
    expect_equal(list(mask), [0] * 5, name="mask", read=ARGS)
    case("max_length = 6 of 8: the first six")
    ids, mask = ft.render_chat([user("ab"), assistant("c")], encode, SPECIAL, 6)
    expect_equal((list(ids), list(mask)), ([300, 301, 97, 98, 302, 303], [0] * 6), name="(ids, mask)", read=ARGS)
    case("max_length = 4 of a prompt of 5 tokens")
    ids, mask = ft.render_chat([user("a")], encode, SPECIAL, max_length=4, add_generation_prompt=True)
    expect_equal((list(ids), list(mask)), ([300, 301, 97, 302], [0] * 4), name="(ids, mask)", read=ARGS)
    case("max_length = 0: no token is left")
    ids, mask = ft.render_chat([user("a")], encode, SPECIAL, max_length=0)
    expect_equal((list(ids), list(mask)), ([], []), name="(ids, mask)", read=ARGS)


def test_render_chat_without_messages():
    case("no messages: bos alone")
    ids, mask = ft.render_chat([], encode, SPECIAL)
    expect_equal((list(ids), list(mask)), ([300], [0]), name="(ids, mask)", read=RETURNS)
    case("no messages, as a prompt")
    with expect_raises(ValueError, read=RAISES):
        ft.render_chat([], encode, SPECIAL, add_generation_prompt=True)


WRONG_ORDER = [
    ([assistant("a")], "0", "assistant"),
    ([user("a"), user("b")], "1", "user"),
    ([user("a"), assistant("b"), assistant("c")], "2", "assistant"),
    ([user("a"), {"role": "system", "content": "S"}], "1", "system"),
    ([{"role": "system", "content": "S"}, assistant("b")], "1", "assistant"),
    ([{"role": "system", "content": "S"}], "0", "system"),
    ([user("a"), {"role": "tool", "content": "S"}], "1", "tool"),
]


@pytest.mark.parametrize(("messages", "index", "role"), WRONG_ORDER, ids=str)
def test_render_chat_refuses_other_orders(messages, index, role):
    case(f"roles {[m['role'] for m in messages]}")
    with expect_raises(ValueError, index, role, read=RAISES):
        ft.render_chat(messages, encode, SPECIAL)


def test_render_chat_refuses_other_parts_and_prompts():
    case("a part of the type 'image'")
    with expect_raises(ValueError, "image", read=RAISES):
        ft.render_chat([user("a"), assistant([{"type": "image", "text": "b"}])], encode, SPECIAL)
    case("a prompt that ends with the assistant")
    with expect_raises(ValueError, "1", read=RAISES):
        ft.render_chat([user("a"), assistant("b")], encode, SPECIAL, add_generation_prompt=True)


# ---- pack_conversations ----------------------------------------------------------------------------------------------


def conversation(n: int, first: int = 1, asked: int = 1) -> tuple[list[int], list[int]]:
    """Ids that count from ``first``; the leading ``asked`` ids are not learned."""
    return list(range(first, first + n)), [0] * asked + [1] * (n - asked)


def expect_packed(found: dict, **rows: list[list[int]]) -> None:
    expect_equal(sorted(found), ["documents", "inputs", "positions", "targets"], name="keys", read=RETURNS)
    for name, values in rows.items():
        expect_close(found[name], torch.tensor(values), name=name, read=RETURNS)


def test_pack_conversations_by_hand():
    case("conversations of 4, 5 and 3 ids into rows of 6: the third fits into the first row")
    found = ft.pack_conversations([conversation(4, 10, 2), conversation(5, 20), conversation(3, 30, 2)], 6, pad_id=7)
    expect_packed(
        found,
        inputs=[[10, 11, 12, 30, 31, 7], [20, 21, 22, 23, 7, 7]],
        targets=[[IGNORED, 12, 13, IGNORED, 32, IGNORED], [21, 22, 23, 24, IGNORED, IGNORED]],
        documents=[[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, -1, -1]],
        positions=[[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]],
    )


def test_pack_conversations_takes_the_first_row_with_room():
    case("pairs of 4, 3, 1, 2 and 2 into rows of 5: the first row with room, not the last and not the fullest")
    lengths = [4, 3, 1, 2, 2]
    found = ft.pack_conversations([conversation(n + 1, 10 * i) for i, n in enumerate(lengths)], 5)
    expect_close(
        found["inputs"], torch.tensor([[0, 1, 2, 3, 20], [10, 11, 12, 30, 31], [40, 41, 0, 0, 0]]), read=RETURNS
    )
    case("pairs of 3, 4, 1 and 1 into rows of 5: the fuller row is the second, and the first row comes first")
    found = ft.pack_conversations([conversation(n + 1, 10 * i) for i, n in enumerate([3, 4, 1, 1])], 5)
    expect_close(found["inputs"], torch.tensor([[0, 1, 2, 20, 30], [10, 11, 12, 13, 0]]), read=RETURNS)


def test_pack_conversations_cuts_and_leaves_out():
    case("9 ids into rows of 4: the first five ids, four pairs")
    found = ft.pack_conversations([conversation(9)], 4, ignore_index=-1)
    expect_packed(found, inputs=[[1, 2, 3, 4]], targets=[[2, 3, 4, 5]], documents=[[0] * 4], positions=[[0, 1, 2, 3]])
    case("left out: nothing to learn, one id, no id, and an answer that the cut removes")
    nothing = [([5, 6], [0, 0]), ([5], [1]), ([], []), ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1]), ([8, 9], [1, 0])]
    found = ft.pack_conversations([*nothing, conversation(2, 40), nothing[0], conversation(3, 50)], 4, ignore_index=-1)
    expect_packed(found, inputs=[[40, 50, 51, 0]], targets=[[41, 51, 52, -1]], documents=[[0, 1, 1, -1]])
    for given in ([], nothing):
        case(f"{len(given)} conversations, none with anything to learn: no rows")
        found = ft.pack_conversations(given, 4)
        for name in ("inputs", "targets", "documents", "positions"):
            expect_close(found[name], torch.zeros(0, 4, dtype=torch.int64), name=name, read=RETURNS)


def test_pack_conversations_learns_what_the_targets_mask_says():
    case("mask 0 1 0 1: the target of the pair, not its input, is learned")
    given = ([5, 6, 7, 8], [0, 1, 0, 1])
    found = ft.pack_conversations([given], 3)
    expect_packed(found, inputs=[[5, 6, 7]], targets=[[6, IGNORED, 8]])
    expect_equal(given, ([5, 6, 7, 8], [0, 1, 0, 1]), name="the conversation afterwards", read=ARGS)
    case("ids 0 3 0 4 and a pad_id of 0: an id of 0 is no padding")
    found = ft.pack_conversations([([0, 3, 0, 4], [0, 1, 1, 1])], 4)
    expect_packed(found, targets=[[3, 0, 4, IGNORED]], documents=[[0, 0, 0, -1]], positions=[[0, 1, 2, 0]])


def test_pack_conversations_reads_an_iterable_once_and_refuses():
    case("conversations from a generator")
    found = ft.pack_conversations((conversation(3, 10 * i) for i in range(2)), 4)
    expect_packed(found, inputs=[[0, 1, 10, 11]])
    case("the second of two conversations has 3 ids and a mask of 4")
    with expect_raises(ValueError, "1", "3", "4", read=RAISES):
        ft.pack_conversations([conversation(2), ([1, 2, 3], [0, 1, 1, 1])], 8)
    case("6 ids and a mask of 4 into rows of 2, for which both are cut to three")
    with expect_raises(ValueError, "0", "6", "4", read=RAISES):
        ft.pack_conversations([([1, 2, 3, 4, 5, 6], [0, 1, 1, 1])], 2)


# ---- packed_mask -----------------------------------------------------------------------------------------------------


def test_packed_mask_by_hand():
    case("documents 0 0 1 1 -1 -1")
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [0, 0, 1, 0, 0, 0],
            [0, 0, 1, 1, 0, 0],
            [0, 0, 0, 0, 1, 0],
            [0, 0, 0, 0, 0, 1],
        ]
    ).bool()
    documents = torch.tensor([[0, 0, 1, 1, -1, -1]])
    found = ft.packed_mask(documents)
    expect_close(found, expected[None, None], read=MASK)
    kept = torch.tensor([[0, 0, 1, 1, -1, -1]])
    expect_close(documents, kept, name="documents afterwards", answer=found, read=ARGS)
    case("the same while PyTorch's default device is another, as the CPU is for documents on a GPU")
    with torch.device("meta"):
        found = ft.packed_mask(documents)
    expect_close(found, expected[None, None], read=RETURNS)
    case("two rows of different documents: shape [2, 1, 3, 3]")
    rows = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]]).bool()
    expect_close(ft.packed_mask(torch.tensor([[0, 0, 0], [0, 1, -1]])), rows[:, None], read=MASK)


def test_packed_mask_gives_each_conversation_alone():
    case("attention over a packed row equals attention over each conversation, values and gradients")
    documents = torch.tensor([[0] * 3 + [1] * 4 + [2] + [-1] * 2])
    mask = ft.packed_mask(documents)
    q, k, v = (randn(1, 2, 10, 4, seed=i).double().requires_grad_() for i in range(3))
    found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expect_true(found.isfinite().all(), "a row of the mask is empty: attention there is NaN", answer=mask, read=MASK)
    for start, stop in ((0, 3), (3, 7), (7, 8)):
        part = (slice(None), slice(None), slice(start, stop))
        alone = nn.functional.scaled_dot_product_attention(q[part], k[part], v[part], is_causal=True)
        expect_close(found[:, :, start:stop], alone, name=f"out[:, :, {start}:{stop}]", read=MASK, **FLOAT64)


# ---- masked_cross_entropy --------------------------------------------------------------------------------------------


def test_masked_cross_entropy_by_hand():
    case("two counted targets of probability 1/2 and 1/4, one ignored: (ln 2 + ln 4) / 2")
    logits = torch.tensor([[[0.5, 0.5], [9.0, -3.0], [0.25, 0.75]]]).log().nan_to_num(nan=4.0)
    kept, targets = logits.clone(), torch.tensor([[0, IGNORED, 0]])
    found = ft.masked_cross_entropy(logits, targets)
    expect_close(found, torch.tensor(1.5 * math.log(2)), read=CROSS)
    expect_close(logits, kept, name="logits afterwards", answer=found, read=ARGS)
    expect_close(targets, torch.tensor([[0, IGNORED, 0]]), name="targets afterwards", answer=found, read=ARGS)
    case("the same row alone: logits [3, 2], targets [3]")
    expect_close(ft.masked_cross_entropy(logits[0], targets[0]), torch.tensor(1.5 * math.log(2)), read=CROSS)
    for n in (4, torch.tensor(4), torch.tensor(4.0)):
        case(f"the same, over n_targets = {n!r}")
        found = ft.masked_cross_entropy(logits, torch.tensor([[0, IGNORED, 0]]), n)
        expect_close(found, torch.tensor(0.75 * math.log(2)), read=CROSS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("ignored", [-100, 3])
def test_masked_cross_entropy_equals_pytorchs(dtype, ignored):
    case(f"logits [2, 5, 7] in {dtype}, cut out of [2, 6, 7], ignore_index = {ignored}")
    logits, targets = 3 * randn(2, 6, 7), torch.tensor([[9, 1, 2, ignored, 0, 6], [9, ignored, ignored, 4, 5, 0]])
    targets = targets[:, 1:]
    mine, theirs = (logits.to(dtype)[:, :-1].requires_grad_() for _ in range(2))
    found = ft.masked_cross_entropy(mine, targets, ignore_index=ignored)
    wide = theirs.double() if dtype == torch.float64 else theirs.float()
    expected = nn.functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=ignored)
    expect_close(found, expected.float(), read=CROSS)
    found.backward()
    expected.backward()
    tolerance = FLOAT64 if dtype == torch.float64 else {}
    expect_close(mine.grad, theirs.grad, name="gradient", read=CROSS, **tolerance)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_masked_cross_entropy_does_not_read_ignored_positions(bad):
    case(f"{bad} where the target is ignored")
    clean = randn(2, 3, 5)
    targets = torch.tensor([[1, IGNORED, 2], [IGNORED, 0, IGNORED]])
    dirty = clean.masked_fill((targets == IGNORED)[..., None], bad).requires_grad_()
    clean.requires_grad_()
    found, expected = ft.masked_cross_entropy(dirty, targets), ft.masked_cross_entropy(clean, targets)
    expect_close(found, expected, read=RETURNS)
    found.backward()
    expected.backward()
    expect_close(dirty.grad, clean.grad, name="gradient", read=RETURNS)
    expect_true((dirty.grad[targets == IGNORED] == 0).all(), "an ignored position has a gradient", read=RETURNS)


@pytest.mark.parametrize("n_targets", [None, 5])
def test_masked_cross_entropy_without_a_target(n_targets):
    case(f"every target ignored, logits NaN, n_targets = {n_targets}")
    logits = torch.full((2, 3, 5), math.nan, requires_grad=True)
    found = ft.masked_cross_entropy(logits, torch.full((2, 3), IGNORED), n_targets)
    expect_close(found, torch.tensor(0.0), read=RETURNS)
    found.backward()
    expect_close(logits.grad, torch.zeros(2, 3, 5), name="gradient", read=RETURNS)


# ---- accumulate_masked -----------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """A model of two tensors in float64; it counts its calls."""

    def __init__(self, as_tuple: bool = False):
        super().__init__()
        self.embedding = nn.Parameter(randn(11, 6, dtype=torch.float64))
        self.head = nn.Parameter(randn(11, 6, seed=1, dtype=torch.float64))
        self.as_tuple, self.n_calls = as_tuple, 0

    def forward(self, tokens):
        self.n_calls += 1
        logits = self.embedding[tokens].tanh() @ self.head.T
        return (logits, "more") if self.as_tuple else logits


def micro_batch(shape: tuple[int, int], n_targets: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and targets of which ``n_targets`` count."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randint(11, shape, generator=generator) for _ in range(2))
    targets.view(-1)[torch.randperm(targets.numel(), generator=generator)[n_targets:]] = IGNORED
    return inputs, targets


def whole(batches: list) -> tuple[torch.Tensor, list]:
    """Mean over all targets in one go, and its gradients."""
    model = Tiny()
    losses = [nn.functional.cross_entropy(model(i).flatten(0, 1), t.flatten(), reduction="sum") for i, t in batches]
    mean = torch.stack(losses).sum() / sum(int((t != IGNORED).sum()) for _, t in batches)
    mean.backward()
    return mean.detach().float(), [p.grad for p in model.parameters()]


SIZES = [((2, 4), 7), ((1, 9), 1), ((3, 2), 0), ((2, 5), 4)]


@pytest.mark.parametrize("as_tuple", [False, True])
def test_accumulate_masked_equals_one_batch(as_tuple):
    batches = [micro_batch(*size, seed) for seed, size in enumerate(SIZES)]
    mean, gradients = whole(batches)
    model = Tiny(as_tuple)
    case("one process, micro-batches with 7, 1, 0 and 4 targets, from a generator, in float64")
    found = ft.accumulate_masked(model, (batch for batch in batches))
    expect_close(found, mean, name="mean", read=RANKS)
    expect_true(not found.requires_grad, "the mean is still attached to the graph", read=RETURNS)
    expect_close([p.grad for p in model.parameters()], gradients, name="gradient", read=RANKS, **FLOAT64)
    case("a second call adds to .grad")
    ft.accumulate_masked(model, batches)
    expect_close(model.head.grad, 2 * gradients[1], name="gradient", read=RANKS, **FLOAT64)


def test_accumulate_masked_ignores_another_index_and_refuses():
    case("ignore_index = -1")
    inputs, targets = micro_batch((2, 4), 3, 0)
    mean, _ = whole([(inputs, targets)])
    marked = targets.masked_fill(targets == IGNORED, -1)
    expect_close(ft.accumulate_masked(Tiny(), [(inputs, marked)], ignore_index=-1), mean, read=ARGS)
    for batches in ([], [micro_batch((2, 4), 0, 0)]):
        case(f"{len(batches)} micro-batches without a target")
        with expect_raises(ValueError, read=RAISES):
            ft.accumulate_masked(Tiny(), batches)


def test_accumulate_masked_holds_one_graph_at_a_time():
    case("each micro-batch's backward pass ends before the next forward pass begins")
    model, order = Tiny(), []
    model.embedding.register_hook(lambda _: order.append("backward"))
    model.register_forward_pre_hook(lambda *_: order.append("forward"))
    ft.accumulate_masked(model, [micro_batch((2, 4), 3, 0), micro_batch((1, 4), 2, 1)])
    expect_equal(order, ["forward", "backward"] * 2, name="order", read=COST)


DIVISIONS = [
    [[0, 1], [2, 3]],
    [[0], [1, 2, 3]],
    [[0, 1, 2, 3], []],
    [[2], [0, 1, 3]],
    [[0], [1], [2, 3]],
]


def accumulate_on_ranks(rank, world_size, division):
    batches = [micro_batch(*size, seed) for seed, size in enumerate(SIZES)]
    mean, gradients = whole(batches)
    model = Tiny()
    case(f"micro-batches with 7, 1, 0 and 4 targets, divided as {division}: the mean on rank {rank}")
    found = ft.accumulate_masked(model, (batches[i] for i in division[rank]))
    expect_close(found, mean, name="mean", read=RANKS)
    case(f"divided as {division}: the average over ranks of the gradients")
    averages = []
    for p in model.parameters():
        grads = [torch.zeros_like(p) for _ in range(world_size)]
        torch.distributed.all_gather(grads, torch.zeros_like(p) if p.grad is None else p.grad)
        averages.append(torch.stack(grads).mean(0))
    expect_close(averages, gradients, name="gradient", read=RANKS, **FLOAT64)


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_accumulate_masked_on_ranks(ranks, division):
    ranks(accumulate_on_ranks, division, n_ranks=len(division))


def accumulate_in_a_group(rank, world_size):
    group = torch.distributed.new_group([0, 1])
    if rank == 2:
        return
    batches = [micro_batch(*size, seed) for seed, size in enumerate(SIZES[:2])]
    mean, gradients = whole(batches)
    case("three ranks, and a group of two of them, with 7 and 1 targets")
    model = Tiny()
    expect_close(ft.accumulate_masked(model, [batches[rank]], group), mean, name="mean", read=RANKS)
    torch.distributed.all_reduce(model.head.grad, group=group)
    expect_close(model.head.grad / 2, gradients[1], name="gradient", read=RANKS, **FLOAT64)


def test_accumulate_masked_in_a_group(ranks):
    ranks(accumulate_in_a_group, n_ranks=3)


def refuse_on_ranks(rank, world_size):
    case(f"no target on any of {world_size} ranks")
    with expect_raises(ValueError, read=RAISES):
        ft.accumulate_masked(Tiny(), [] if rank else [micro_batch((2, 4), 0, 0)])


def test_accumulate_masked_refuses_on_all_ranks(ranks):
    ranks(refuse_on_ranks, n_ranks=2)


def count_collectives(rank, world_size):
    case("two ranks with 3 micro-batches and 1")
    batches = [micro_batch((2, 4), 3 + i, i) for i in range(1 if rank else 3)]
    ft.accumulate_masked(Tiny(), batches)


def test_accumulate_masked_sends_four_numbers_at_most(ranks):
    result = ranks(count_collectives, n_ranks=2)
    case("two ranks with 3 micro-batches and 1: collectives and the bytes of each")
    for ledger in result.ledgers:
        sizes = [record.n_bytes for record in ledger.records]
        expect_true(len(sizes) <= 2, f"{len(sizes)} collectives: at most two", answer=sizes, read=COST)
        expect_true(all(n <= 16 for n in sizes), f"{sizes} bytes: at most two numbers each", answer=sizes, read=COST)


# ---- LoRALinear ------------------------------------------------------------------------------------------------------


def adapted(n_out: int = 7, n_in: int = 5, r: int = 3, dtype=torch.float32, bias=True, **settings):
    """A layer with an update that is not 0, and the layer that it wraps."""
    base = nn.Linear(n_in, n_out, bias=bias)
    with torch.no_grad():
        for i, p in enumerate(base.parameters()):
            p.copy_(randn(*p.shape, seed=i))
    base = base.to(dtype)
    layer = ft.LoRALinear(base, r, **{"alpha": 12, **settings})
    with torch.no_grad():
        layer.lora_A.copy_(randn(r, n_in, seed=5))
        layer.lora_B.copy_(randn(n_out, r, seed=6))
    return layer, base


def test_LoRALinear_begins_as_its_base():
    case("in = 400, out = 7, r = 30: A uniform in +-1/20, B zeros, both float32; the base is frozen")
    base = nn.Linear(400, 7).to(torch.bfloat16)
    layer = ft.LoRALinear(base, 30, 60)
    trained = {name: (tuple(p.shape), p.dtype) for name, p in layer.named_parameters() if p.requires_grad}
    expected = {"lora_A": ((30, 400), torch.float32), "lora_B": ((7, 30), torch.float32)}
    expect_equal(trained, expected, name="trained parameters", read=STATE)
    expect_true(layer.base is base, "base is the layer that was given", read=STATE)
    expect_close(layer.lora_B.detach(), torch.zeros(7, 30), name="lora_B", read=STATE)
    a = layer.lora_A.detach()
    expect_true(a.abs().max() <= 0.05, "an entry of A is above 1/sqrt(in)", answer=a, read=STATE)
    deviation = 0.05 / math.sqrt(3)
    expect_true(abs(a.std() / deviation - 1) < 0.03, f"A's deviation is not {deviation:.4f}", answer=a, read=STATE)
    expect_true(abs(a.mean()) < 0.002, "A's mean is not 0", answer=a, read=STATE)
    x = randn(2, 400).to(torch.bfloat16)
    expect_close(layer(x), base(x), read=LORA)
    case('a base on the device "meta"')
    far = ft.LoRALinear(nn.Linear(4, 3, device="meta"), 2, 4)
    expect_equal([far.lora_A.device.type, far.lora_B.device.type], ["meta"] * 2, name="devices of A and B", read=STATE)


@pytest.mark.parametrize(("use_rslora", "scaling"), [(False, 3.0), (True, 6.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_LoRALinear_equals_a_dense_layer(use_rslora, scaling, dtype):
    layer, base = adapted(r=4, dtype=dtype, use_rslora=use_rslora)
    case(f"in = 5, out = 7, r = 4, alpha = 12, use_rslora = {use_rslora}, base and x in {dtype}")
    expect_close(float(layer.scaling), scaling, name="scaling", read=LORA)
    x = randn(2, 3, 5, seed=9).to(dtype)
    wide = x.float()
    dense = base.weight.float() + scaling * layer.lora_B @ layer.lora_A
    found = layer(x)
    if dtype != torch.bfloat16:
        expect_close(found.detach(), (wide @ dense.T + base.bias.float()).detach().to(dtype), atol=1e-4, read=LORA)
    else:
        update = scaling * (wide @ layer.lora_A.T @ layer.lora_B.T)
        expect_close(found.detach(), (base(x) + update).to(dtype).detach(), atol=0, rtol=0, read=LORA)
    found.float().square().sum().backward()
    expect_true(base.weight.grad is None, "the base's weight got a gradient", read=STATE)
    expect_true(layer.lora_A.grad is not None and layer.lora_B.grad is not None, "A and B get gradients", read=STATE)


def test_LoRALinear_gradients():
    layer, base = adapted()
    x = randn(4, 5, seed=9).requires_grad_()
    other = randn(4, 5, seed=9).requires_grad_()
    a, b = (p.detach().clone().requires_grad_() for p in (layer.lora_A, layer.lora_B))
    case("gradients of A, B and x are those of x (W + s B A)^T")
    (layer(x) * randn(4, 7, seed=2)).sum().backward()
    ((other @ (base.weight + 4 * b @ a).T) * randn(4, 7, seed=2)).sum().backward()
    found, expected = [layer.lora_A.grad, layer.lora_B.grad, x.grad], [a.grad, b.grad, other.grad]
    expect_close(found, expected, atol=1e-4, rtol=1e-5, name="gradient", read=LORA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_LoRALinear_merges_once_and_back(dtype):
    layer, base = adapted(dtype=dtype)
    weight = base.weight.detach().clone()
    dense = (weight.float() + 4 * (layer.lora_B @ layer.lora_A)).detach()
    x = randn(2, 5, seed=9).to(dtype)
    before = layer(x).detach()
    exact = {"atol": 0, "rtol": 0} if dtype == torch.bfloat16 else {"atol": 1e-5}
    for time in ("once", "twice"):
        layer.merge()
        case(f"base in {dtype}, merged {time}")
        expect_equal(layer.merged, True, name="merged", read=STATE)
        expect_close(base.weight.detach(), dense.to(dtype), name="weight", read=LORA, **exact)
        expect_true(not base.weight.requires_grad, "the merged weight is no longer frozen", read=ARGS)
        expect_close(layer(x).detach(), base(x).detach(), atol=0, rtol=0, read=LORA)
    if dtype == torch.float32:
        expect_close(layer(x).detach(), before, atol=1e-4, rtol=1e-4, read=LORA)
    for time in ("once", "twice"):
        layer.unmerge()
        case(f"base in {dtype}, unmerged {time}")
        expect_equal(layer.merged, False, name="merged", read=STATE)
        back = (dense.to(dtype).float() - 4 * (layer.lora_B @ layer.lora_A)).detach()
        expect_close(base.weight.detach(), back.to(dtype), name="weight", read=LORA, **exact)
    expect_close(layer(x).detach(), before, atol=0.2 if dtype == torch.bfloat16 else 1e-4, rtol=0.02, read=LORA)


def test_LoRALinear_drops_inputs_of_the_update_only():
    layer, base = adapted(n_in=50, dropout=0.5)
    case("dropout = 0.5: the attribute is an nn.Dropout with this probability")
    found = (type(layer.dropout).__name__, getattr(layer.dropout, "p", None))
    expect_equal(found, ("Dropout", 0.5), name="class and p of dropout", read=STATE)
    x = randn(2, 50, seed=9)
    case("dropout = 0.5 in training: the update's input is dropped, the base's is not")
    torch.manual_seed(0)
    found = layer(x)
    torch.manual_seed(0)
    expected = base(x) + 4 * (nn.functional.dropout(x, 0.5) @ layer.lora_A.T @ layer.lora_B.T)
    expect_close(found.detach(), expected.detach(), atol=1e-4, rtol=1e-4, read=LORA)
    case("dropout = 0.5 in evaluation: nothing is dropped")
    expected = base(x) + 4 * (x @ layer.lora_A.T @ layer.lora_B.T)
    expect_close(layer.eval()(x).detach(), expected.detach(), atol=1e-4, rtol=1e-4, read=LORA)


@pytest.mark.parametrize("kind", ["Int4Linear", "NF4Linear"])
def test_LoRALinear_over_four_bits(kind):
    linear = nn.Linear(128, 6)
    base = Int4Linear(linear, 32) if kind == "Int4Linear" else _NF4Linear(linear)
    case(f"a base of class {kind}, in = 128, out = 6")
    layer = ft.LoRALinear(base, 2, 4)
    shapes = [tuple(layer.lora_A.shape), tuple(layer.lora_B.shape)]
    expect_equal(shapes, [(2, 128), (6, 2)], name="shapes of A and B", read=STATE)
    with torch.no_grad():
        layer.lora_B.copy_(randn(6, 2))
    x = randn(3, 128)
    expected = base(x) + 2 * (x @ layer.lora_A.T @ layer.lora_B.T)
    expect_close(layer(x).detach(), expected.detach(), atol=1e-5, read=LORA)
    case(f"merge() into {kind}")
    for _ in range(2):
        with expect_raises(TypeError, kind, read=RAISES):
            layer.merge()
        expect_equal(layer.merged, False, name="merged", read=STATE)


def _NF4Linear(linear):
    """The reference's layer, so that only one exercise is graded, and an instance of the answer's class as well."""
    from solutions.finetuning import NF4Linear

    layer = NF4Linear(linear)
    if ft.NF4Linear is not NF4Linear:  # the answer asks for instances of its own, written or not
        layer.__class__ = type("NF4Linear", (NF4Linear, ft.NF4Linear), {})
    return layer


def test_LoRALinear_multiplies_thin_matrices():
    layer, _ = adapted(n_out=48, n_in=32, r=2, bias=False)
    x = randn(10, 32)
    case("10 vectors, in = 32, out = 48, r = 2: 2 n (in out + r (in + out)) FLOPs")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    expect_equal(counter.get_total_flops(), 2 * 10 * (32 * 48 + 2 * (32 + 48)), name="FLOPs", read=LORA)
    layer.merge()
    case("the same, merged: 2 n in out FLOPs")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    expect_equal(counter.get_total_flops(), 2 * 10 * 32 * 48, name="FLOPs", read=LORA)


@pytest.mark.parametrize("r", [0, -1])
def test_LoRALinear_refuses_a_rank_below_1(r):
    case(f"r = {r}")
    with expect_raises(ValueError, str(r), read=RAISES):
        ft.LoRALinear(nn.Linear(3, 2), r, 1)


ADAPTERS = {"bias": (7, 5, 3, False), "rslora": (6, 20, 4, True), "wide": (33, 64, 16, False)}


def theirs(base: nn.Linear, layer, x, cotangent, use_rslora: bool) -> torch.Tensor:
    """What peft's layer with the same A and B returns, its gradients, and its merged weight, in a row."""
    import peft

    config = peft.LoraConfig(r=len(layer.lora_A), lora_alpha=12, target_modules=["0"], use_rslora=use_rslora)
    found = peft.get_peft_model(nn.Sequential(copy.deepcopy(base)), config).base_model.model[0]
    a, b = found.lora_A["default"].weight, found.lora_B["default"].weight
    with torch.no_grad():
        a.copy_(layer.lora_A)
        b.copy_(layer.lora_B)
    y = found(x)
    y.backward(cotangent)
    found.merge()
    return torch.cat([part.detach().flatten() for part in (y, a.grad, b.grad, found.base_layer.weight)])


@pytest.mark.parametrize("name", ADAPTERS)
def test_LoRALinear_equals_pefts(name):
    n_out, n_in, r, use_rslora = ADAPTERS[name]
    layer, base = adapted(n_out, n_in, r, bias=name == "bias", use_rslora=use_rslora)
    x, cotangent = randn(4, n_in, seed=9), randn(4, n_out, seed=10)
    case(f"peft's layer with the same A and B, r = {r}, use_rslora = {use_rslora}")
    expected = recorded(f"lora_{name}", lambda: theirs(base, layer, x, cotangent, use_rslora), needs="peft")
    y = layer(x)
    y.backward(cotangent)
    layer.merge()
    parts = {"the output": y, "the gradient of lora_A": layer.lora_A.grad, "the gradient of lora_B": layer.lora_B.grad,
             "the merged weight": base.weight}  # fmt: skip
    values = expected.split([part.numel() for part in parts.values()])
    for (what, part), value in zip(parts.items(), values, strict=True):
        expect_close(part.detach(), value.view_as(part), name=what, read=LORA)


# ---- add_lora --------------------------------------------------------------------------------------------------------


def test_add_lora_replaces_and_freezes():
    model = Llama(SMALL)
    tokens = torch.arange(8)[None]
    before = model(tokens).detach()
    case("a Llama of 2 layers, the default targets")
    names = ft.add_lora(model, 2, 4)
    expected = [f"layers.{i}.attention.{name}" for i in range(2) for name in ("wq", "wv")]
    expect_equal(list(names), expected, name="names", read=RETURNS)
    for name in names:
        layer: Any = model.get_submodule(name)
        expect_true(isinstance(layer, ft.LoRALinear), f"{name} is not a LoRALinear", read=RETURNS)
        expect_equal(layer.lora_A.shape[0], 2, name=f"rank of {name}", read=ARGS)
        expect_close(float(layer.scaling), 2.0, name=f"scaling of {name}", read=ARGS)
    trained = sorted(name for name, p in model.named_parameters() if p.requires_grad)
    expected = sorted(f"{name}.lora_{letter}" for name in names for letter in "AB")
    expect_equal(trained, expected, name="trained parameters", read=RETURNS)
    expect_close(model(tokens).detach(), before, read=RETURNS)


class Odd(nn.Module):
    """Layers whose order in ``named_modules()`` is not that of the alphabet, one of four bits, one not linear."""

    def __init__(self):
        super().__init__()
        self.zebra = nn.Sequential(nn.Linear(64, 8), nn.ReLU())
        self.ant = _NF4Linear(nn.Linear(64, 4))
        self.wq = nn.Embedding(3, 4)
        self.inner = nn.ModuleDict({"ant": nn.Linear(4, 4), "my_ant": nn.Linear(4, 4)})


def test_add_lora_knows_its_layers_by_their_last_name():
    model = Odd()
    case("zebra.0, ant (NF4Linear), inner.ant, inner.my_ant; targets ant, 0, ant from an iterator; dropout 0.25")
    names = ft.add_lora(model, 1, 1, iter(("ant", "0", "ant")), dropout=0.25)
    expect_equal(list(names), ["zebra.0", "ant", "inner.ant"], name="names", read=RETURNS)
    expect_equal(type(model.inner["my_ant"]).__name__, "Linear", name="class of inner.my_ant", read=ARGS)
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    expect_equal(rates, [0.25] * 3, name="dropout of the layers", read=ARGS)
    trained = sorted(name for name, p in model.named_parameters() if p.requires_grad)
    expected = sorted(f"{name}.lora_{letter}" for name in names for letter in "AB")
    expect_equal(trained, expected, name="trained parameters", read=RETURNS)


def test_add_lora_refuses_and_changes_nothing():
    model = Odd()
    case('targets "ant", "wq" (an embedding), "zebra" (holds a layer, and is none) and "bee" (not there)')
    before = [(name, type(m).__name__) for name, m in model.named_modules()]
    with expect_raises(ValueError, "wq", "zebra", "bee", read=RAISES):
        ft.add_lora(model, 1, 1, ("ant", "wq", "zebra", "bee"))
    after = [(name, type(m).__name__) for name, m in model.named_modules()]
    expect_equal(after, before, name="modules afterwards", read=RAISES)
    expect_true(all(p.requires_grad for p in model.parameters()), "a parameter was frozen", read=RAISES)


# ---- lora_parameters and finetuning_memory_bytes ---------------------------------------------------------------------


def test_lora_parameters_by_hand():
    case("Llama 2 7B, r = 8, wq and wv: 32 layers of 2 updates of 8 (4096 + 4096)")
    expect_equal(ft.lora_parameters(LLAMA_2_7B, 8), 4_194_304, read=COUNT)
    case("Llama 2 7B, r = 64, all seven")
    expect_equal(ft.lora_parameters(LLAMA_2_7B, 64, ALL), 159_907_840, read=COUNT)
    case("Llama 2 70B, r = 1, wv: keys and values are 1024 wide")
    expect_equal(ft.lora_parameters(LLAMA_2_70B, 1, ["wv"]), 80 * (8192 + 1024), read=COUNT)
    case("a target twice counts once: wq, wv, wq from an iterator")
    expect_equal(ft.lora_parameters(LLAMA_2_7B, 8, iter(("wq", "wv", "wq"))), 4_194_304, read=ARGS)
    case("targets wq, lm_head and gate")
    with expect_raises(ValueError, "lm_head", "gate", read=RAISES):
        ft.lora_parameters(LLAMA_2_7B, 8, ("wq", "lm_head", "gate"))


@pytest.mark.parametrize("targets", [("wq", "wv"), ("wk", "w2"), ALL], ids=str)
def test_lora_parameters_counts_a_models(targets):
    from solutions.finetuning import add_lora

    model = Llama(SMALL)
    add_lora(model, 3, 1, targets)
    case(f"a Llama with 2 key heads of 4, r = 3, {targets}")
    n = sum(p.numel() for p in model.parameters() if p.requires_grad)
    expect_equal(ft.lora_parameters(SMALL, 3, targets), n, read=COUNT)


def test_finetuning_memory_bytes_by_hand():
    n, adapters = count_parameters(LLAMA_2_7B), 39_976_960
    case("Llama 2 7B, full: 16 bytes for each weight")
    expected = {"weights": 4 * n, "gradients": 4 * n, "optimizer": 8 * n}
    expect_equal(ft.finetuning_memory_bytes(LLAMA_2_7B, "full"), expected, read=BYTES)
    case("Llama 2 7B, lora, r = 16, all seven: 2 bytes a weight, 16 for each trained number")
    expected = {"weights": 2 * n + 4 * adapters, "gradients": 4 * adapters, "optimizer": 8 * adapters}
    expect_equal(ft.finetuning_memory_bytes(LLAMA_2_7B, "lora"), expected, read=BYTES)
    case("Llama 2 7B, qlora: 0.5625 bytes for each weight of the seven matrices, 2 for the rest")
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    weights = matrices // 2 + matrices // 64 * 4 + 2 * (n - matrices) + 4 * adapters
    expected["weights"] = weights
    expect_equal(ft.finetuning_memory_bytes(LLAMA_2_7B, "qlora"), expected, read=BYTES)
    case("Llama 2 7B, lora, r = 8, wq and wv")
    found = ft.finetuning_memory_bytes(LLAMA_2_7B, "lora", 8, ("wq", "wv"))
    expect_equal(found["optimizer"], 8 * 4_194_304, name="optimizer", read=ARGS)
    case("Llama 2 7B, qlora, r = 8, wq and wv: all seven matrices have four bits")
    found = ft.finetuning_memory_bytes(LLAMA_2_7B, "qlora", 8, ("wq", "wv"))
    expect_equal(found["weights"], weights - 4 * adapters + 4 * 4_194_304, name="weights", read=ARGS)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_finetuning_memory_bytes_of_a_model(method):
    from solutions.finetuning import NF4Linear, add_lora

    model = Llama(SMALL)
    if method != "full":
        for block in model.layers:
            for name in ALL:
                owner = block.attention if hasattr(block.attention, name) else block.feed_forward
                if method == "qlora":
                    setattr(owner, name, NF4Linear(getattr(owner, name)))
        model.to(torch.bfloat16)
        for module in model.modules():  # scales stay float32
            if isinstance(module, NF4Linear):
                module.absmax = module.absmax.float()
        add_lora(model, 16, 16, ALL)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(torch.arange(6)[None])[..., 0].sum().backward()
    optimizer.step()
    case(f"a Llama with 2 key heads of 4, {method}: the bytes of its tensors")
    weights = sum(x.numel() * x.element_size() for x in [*model.parameters(), *model.buffers()])
    moments = [x for state in optimizer.state.values() for x in state.values() if x.numel() > 1]
    expected = {
        "weights": weights,
        "gradients": sum(4 * p.numel() for p in trained),
        "optimizer": sum(4 * x.numel() for x in moments),
    }
    expect_equal(ft.finetuning_memory_bytes(SMALL, method), expected, read=BYTES)


def test_finetuning_memory_bytes_refuses():
    case('the method "adapter"')
    with expect_raises(ValueError, "adapter", read=RAISES):
        ft.finetuning_memory_bytes(SMALL, "adapter")
    case('the target "head"')
    with expect_raises(ValueError, "head", read=RAISES):
        ft.finetuning_memory_bytes(SMALL, "lora", 4, ("head",))


# ---- nf4_quantize, nf4_dequantize and NF4Linear ----------------------------------------------------------------------


def levels_of(packed: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return unpack_int4(packed.flatten()).view(shape)


def test_nf4_quantize_by_hand():
    weight = torch.tensor([[2.0, -1.0, 0.0, 0.1], [-8.0, 8.0, 4.6, -0.3]])
    case("blocks (2, -1, 0, 0.1) and (-8, 8, 4.6, -0.3) of 4")
    packed, absmax = ft.nf4_quantize(weight, 4)
    expect_close(absmax, torch.tensor([2.0, 8.0]), name="absmax", read=NF4)
    levels = torch.tensor([[15, 2, 7, 8], [0, 15, 13, 7]], dtype=torch.uint8)
    expect_close(levels_of(packed, (2, 4)), levels, name="levels", answer=packed, read=NF4)
    expect_close(packed.flatten(), pack_int4(levels.flatten()), name="packed", read=NF4)
    case("weights halfway between levels 2 and 3, and between 7 and 8: the lower level")
    halfway = [(ft.NF4_LEVELS[k].double() + ft.NF4_LEVELS[k + 1].double()) / 2 for k in (2, 7)]
    packed, _ = ft.nf4_quantize(torch.tensor([1.0, *halfway, -1.0]), 4)
    levels = torch.tensor([15, 2, 7, 0], dtype=torch.uint8)
    expect_close(levels_of(packed, (4,)), levels, name="levels", answer=packed, read=RETURNS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_nf4_quantize_takes_the_nearest_level(dtype):
    weight = randn(3, 32, 4, seed=3).to(dtype).mT
    before = weight.clone()
    case(f"a weight [3, 4, 32] in {dtype}, the transpose of another, blocks of 48")
    packed, absmax = ft.nf4_quantize(nn.Parameter(weight), 48)
    blocks = weight.float().reshape(8, 48)
    expect_close(absmax, blocks.abs().amax(1), name="absmax", read=NF4)
    scaled = (blocks / blocks.abs().amax(1, keepdim=True)).double()
    nearest = (scaled[..., None] - ft.NF4_LEVELS.double()).abs().argmin(-1)
    expect_close(levels_of(packed, (8, 48)), nearest.to(torch.uint8), name="levels", answer=packed, read=NF4)
    expect_equal((packed.dtype, packed.shape), (torch.uint8, (192,)), name="dtype and shape of packed", read=RETURNS)
    expect_true(not absmax.requires_grad, "absmax is still attached to the weight's graph", read=RETURNS)
    expect_close(weight, before, name="weight afterwards", read=ARGS)


def test_nf4_quantize_keeps_zeros_and_refuses():
    case("a block of zeros beside one of ones; a block size of 64 by default")
    packed, absmax = ft.nf4_quantize(torch.cat([torch.zeros(64), torch.ones(64)]))
    expect_close(absmax, torch.tensor([0.0, 1.0]), name="absmax", read=RETURNS)
    levels = levels_of(packed, (2, 64))
    expect_close(levels, torch.tensor([7, 15], dtype=torch.uint8)[:, None].expand(2, 64), name="levels", read=RETURNS)
    case("the sixteen levels times 2**-70")
    packed, absmax = ft.nf4_quantize(ft.NF4_LEVELS * 2.0**-70, 16)
    expect_close(absmax, torch.tensor([2.0**-70]), atol=0, name="absmax", read=RETURNS)
    expect_close(levels_of(packed, (16,)), torch.arange(16).to(torch.uint8), name="levels", answer=packed, read=RETURNS)
    for block_size in (5, 7, 6, 0):
        case(f"a weight [10, 7], block_size = {block_size}")
        with expect_raises(ValueError, str(block_size), read=RAISES):
            ft.nf4_quantize(torch.zeros(10, 7), block_size)


def test_nf4_dequantize_by_hand():
    levels = torch.tensor([15, 0, 7, 3, 8, 8, 14, 1], dtype=torch.uint8)
    packed, absmax = pack_int4(levels), torch.tensor([2.0, 0.5])
    expected = ft.NF4_LEVELS[levels.long()].view(2, 4) * absmax[:, None]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        case(f"levels 15 0 7 3 times 2 and 8 8 14 1 times 0.5, as [4, 2] in {dtype}")
        found = ft.nf4_dequantize(packed, absmax, (4, 2), dtype)
        expect_close(found, expected.to(dtype).view(4, 2), atol=0, rtol=0, read=NF4)
    case("the default dtype is float32; torch.Size is a shape, too")
    found = ft.nf4_dequantize(packed, absmax, torch.Size([8]))
    expect_close(found, expected.view(8), atol=0, rtol=0, read=NF4)


def test_nf4_dequantize_rounds_once():
    case("absmax = 1.01 in bfloat16: the product is rounded, not its factors")
    packed, absmax = pack_int4(torch.arange(16, dtype=torch.uint8)), torch.tensor([1.01])
    expected = (ft.NF4_LEVELS * 1.01).to(torch.bfloat16)
    expect_close(ft.nf4_dequantize(packed, absmax, (16,), torch.bfloat16), expected, atol=0, rtol=0, read=RETURNS)


def test_NF4Linear_equals_a_dense_layer():
    for bias in (True, False):
        linear = nn.Linear(48, 8, bias=bias)
        given = linear.weight.detach().clone()
        layer = ft.NF4Linear(linear, 16)
        case(f"in = 48, out = 8, bias = {bias}: buffers and no parameters")
        names = {"packed", "absmax", "bias"} if bias else {"packed", "absmax"}
        expect_equal(set(layer.state_dict()), names, name="names in the state dict", read=STATE)
        expect_equal(len(list(layer.parameters())), 0, name="number of parameters", read=STATE)
        expect_equal((layer.in_features, layer.out_features), (48, 8), name="features", read=STATE)
        expect_true(linear.weight.requires_grad, "the given layer is left unchanged: it can still learn", read=ARGS)
        expect_close(linear.weight.detach(), given, atol=0, rtol=0, name="weight of the given layer", read=ARGS)
        weight = _nf4_weight(linear, 16)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            case(f"in = 48, out = 8, bias = {bias}, x [2, 3, 48] in {dtype}")
            x = randn(2, 3, 48).to(dtype)
            expected = nn.functional.linear(
                x, weight.to(dtype), None if linear.bias is None else linear.bias.detach().to(dtype)
            )
            tolerance: dict[str, Any] = {torch.float32: {"atol": 1e-4}, torch.bfloat16: {"atol": 5e-3}}.get(dtype, {})
            expect_close(layer(x).detach(), expected, read=NF4, **tolerance)
    case("the layer's bias is a copy")
    linear = nn.Linear(64, 2)
    layer = ft.NF4Linear(linear)
    kept = linear.bias.detach().clone()
    with torch.no_grad():
        linear.bias.add_(1)
    expect_close(layer.bias.detach(), kept, name="bias", read=STATE)
    attached = [name for name, buffer in layer.named_buffers() if buffer.requires_grad]
    expect_equal(attached, [], name="buffers with a gradient", read=STATE)


def _nf4_weight(linear, block_size):
    from solutions.finetuning import nf4_dequantize, nf4_quantize

    return nf4_dequantize(*nf4_quantize(linear.weight, block_size), linear.weight.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_NF4Linear_gives_the_inputs_gradient(dtype):
    linear = nn.Linear(32, 5)
    x, other = (randn(3, 4, 32).to(dtype).requires_grad_() for _ in range(2))
    case(f"the gradient of x [3, 4, 32] in {dtype}")
    weights = randn(3, 4, 5, seed=4).to(dtype)
    (ft.NF4Linear(linear, 16)(x) * weights).sum().backward()
    ((other @ _nf4_weight(linear, 16).to(dtype).T) * weights).sum().backward()
    tolerance: dict[str, Any] = FLOAT64 if dtype == torch.float64 else {"atol": 1e-5}
    expect_close(x.grad, other.grad, name="gradient of x", read=NF4, **tolerance)


def test_NF4Linear_saves_packed_weights_only():
    layer = ft.NF4Linear(nn.Linear(64, 32))
    x = randn(1000, 64).requires_grad_() * 1
    saved = []
    allowed = 64 * 32 // 2 + 4 * 32
    case("in = 64, out = 32, 1000 vectors: saved for backward are 1024 bytes of packed and 128 of absmax")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    found = sum(t.numel() * t.element_size() for t in saved)
    expect_true(found <= allowed, f"{found} bytes are saved: at most {allowed}", answer=found, read=COST)
    held, node = [], y.grad_fn
    while node is not None:
        held += [v for v in getattr(node, "__dict__", {}).values() if isinstance(v, torch.Tensor)]
        node = next((n for n, _ in node.next_functions if n is not None), None)
    n = sum(t.numel() * t.element_size() for t in held)
    expect_true(n <= allowed, f"{n} bytes are held by the graph: at most {allowed}", answer=n, read=COST)


# ---- sequence_log_probs ----------------------------------------------------------------------------------------------


def test_sequence_log_probs_by_hand():
    case("probabilities 1/2 and 1/4 in the first row, none in the second: the sum, not the mean")
    logits = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.25, 0.75]], [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]]).log()
    found = ft.sequence_log_probs(logits, torch.tensor([[IGNORED, 1, 0], [IGNORED] * 3]))
    expect_close(found, torch.tensor([-3 * math.log(2), 0.0]), read=ANSWER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sequence_log_probs_equals_pytorchs(dtype):
    targets = torch.tensor([[7, 1, -1, 3, 0], [7, -1, 5, 2, 2], [7, 4, -1, -1, -1]])[:, 1:]
    mine, theirs = ((3 * randn(3, 5, 6)).to(dtype)[:, :-1].requires_grad_() for _ in range(2))
    case(f"logits [3, 4, 6] in {dtype}, cut out of [3, 5, 6], ignore_index = -1: float32, value and gradient")
    found = ft.sequence_log_probs(mine, targets, ignore_index=-1)
    wide = theirs.double() if dtype == torch.float64 else theirs.float()
    losses = nn.functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    expected = -losses.view(3, 4).sum(1)
    expect_close(found, expected.float(), read=ANSWER)
    weights = torch.tensor([1.0, -2.0, 0.5])
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    expect_close(mine.grad, theirs.grad, name="gradient", read=ANSWER)


def test_sequence_log_probs_does_not_read_ignored_positions():
    targets = torch.tensor([[1, IGNORED, 3], [IGNORED] * 3])
    for bad in (math.nan, math.inf):
        case(f"{bad} where the target is ignored")
        clean = randn(2, 3, 6)
        dirty = clean.masked_fill((targets == IGNORED)[..., None], bad).requires_grad_()
        found = ft.sequence_log_probs(dirty, targets)
        expect_close(found, ft.sequence_log_probs(clean, targets), read=ARGS)
        found.sum().backward()
        expect_true((dirty.grad[targets == IGNORED] == 0).all(), "an ignored position has a gradient", read=ARGS)


# ---- dpo_loss --------------------------------------------------------------------------------------------------------


def log_probs() -> list[torch.Tensor]:
    return [torch.tensor(values) for values in ([-1.0, -2.0], [-4.0, -3.0], [-2.0, -1.5], [-1.0, -6.0])]


@pytest.mark.parametrize(("beta", "label_smoothing"), [(0.1, 0.0), (0.5, 0.0), (0.1, 0.25), (2.0, 0.1)])
def test_dpo_loss_by_hand(beta, label_smoothing):
    case(f"two pairs, chosen gains (1, -0.5), rejected gains (-3, 3), beta = {beta}, smoothing {label_smoothing}")
    losses, chosen, rejected = ft.dpo_loss(*log_probs(), beta, label_smoothing)
    z = beta * torch.tensor([4.0, -3.5], dtype=torch.float64)
    expected = -(1 - label_smoothing) * z.sigmoid().log() - label_smoothing * (-z).sigmoid().log()
    expect_close(losses, expected.float(), name="losses", read=DPO)
    expect_close(chosen, beta * torch.tensor([1.0, -0.5]), name="chosen_rewards", read=DPO)
    expect_close(rejected, beta * torch.tensor([-3.0, 3.0]), name="rejected_rewards", read=DPO)


def test_dpo_loss_defaults_and_gradients():
    case("beta = 0.1 and no smoothing by default: ln 2 where the policy is the reference")
    losses, *_ = ft.dpo_loss(*[torch.zeros(3)] * 4)
    expect_close(losses, torch.full((3,), math.log(2)), name="losses", read=DPO)
    chosen, rejected, *reference = log_probs()
    losses, *rewards = ft.dpo_loss(chosen.requires_grad_(), rejected.requires_grad_(), *reference)
    expect_true(not any(r.requires_grad for r in rewards), "rewards are still attached to the graph", read=RETURNS)
    losses.sum().backward()
    case("gradients: -beta sigmoid(-z) for the chosen, its opposite for the rejected")
    slope = -0.1 * torch.sigmoid(-0.1 * torch.tensor([4.0, -3.5]))
    expect_close([chosen.grad, rejected.grad], [slope, -slope], name="gradient", read=DPO)


@pytest.mark.parametrize("z", [-1e4, 1e4])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_dpo_loss_is_finite(z, label_smoothing):
    case(f"z = {z:g}, label_smoothing = {label_smoothing}")
    chosen, zero = torch.tensor([z], requires_grad=True), torch.zeros(1)
    losses, *_ = ft.dpo_loss(chosen, zero, zero, zero, beta=1.0, label_smoothing=label_smoothing)
    expected = (1 - label_smoothing) * max(-z, 0) + label_smoothing * max(z, 0)
    expect_close(losses.detach(), torch.tensor([float(expected)]), name="losses", read=RETURNS)
    losses.sum().backward()
    expect_true(chosen.grad.isfinite().all(), "the gradient is not finite", answer=chosen.grad, read=RETURNS)


@pytest.mark.parametrize("label_smoothing", [-0.1, 0.5, 1.0])
def test_dpo_loss_refuses(label_smoothing):
    case(f"label_smoothing = {label_smoothing}")
    with expect_raises(ValueError, str(label_smoothing), read=RAISES):
        ft.dpo_loss(*log_probs(), label_smoothing=label_smoothing)


# ---- kl_penalty ------------------------------------------------------------------------------------------------------

ESTIMATORS = ("k1", "k2", "k3", "k1+", "k2+", "k3+")
SLOPES = {"k1": lambda d: torch.ones_like(d), "k2": lambda d: d, "k3": lambda d: 1 - (-d).exp()}
VALUES = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: (-d).exp() - 1 + d}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_penalty_values_and_gradients(name):
    d = torch.tensor([[1.0, -0.5, 0.0], [2.0, -3.0, 12.0]], dtype=torch.float64)
    reference = torch.full_like(d, -4.0)
    case(f"{name} at d = 1, -0.5, 0, 2, -3, 12")
    logprob = (reference + d).requires_grad_()
    found = ft.kl_penalty(logprob, reference, name)
    expect_close(found.detach(), VALUES[name[:2]](d), read=KL)
    slope = SLOPES["k2" if name.endswith("+") else name](d)
    expect_close(torch.autograd.grad(found.sum(), logprob)[0], slope, name="gradient", read=KL)


def test_kl_penalty_equals_verls():
    logprob, reference = (randn(3, 8, seed=n, dtype=torch.float64) / 2 for n in (0, 1))  # verl clamps k3 to 10
    names = ("k1", "k2", "k3", "k1+", "k2+", "k3+")

    def found(kl_penalty, name: str) -> torch.Tensor:
        x = logprob.clone().requires_grad_()
        values = kl_penalty(x, reference, name)
        return torch.stack([values.detach(), *torch.autograd.grad(values.sum(), x)])

    def theirs() -> torch.Tensor:
        return torch.stack([found(verls().algos.kl_penalty, name) for name in names])

    for name, (values, gradient) in zip(names, recorded("verl_kl_penalty", theirs, needs="verl"), strict=True):
        case(f"24 positions, float64, {name!r}")
        ours = found(ft.kl_penalty, name)
        expect_close(ours[0], values, name="values", read=KL)
        expect_close(ours[1], gradient, name="gradient", read=KL)


def test_kl_penalty_default_and_precision():
    case("k3 is the default; d = 20 and -10: nothing is clamped")
    d = torch.tensor([20.0, -10.0])
    expect_close(ft.kl_penalty(d, torch.zeros(2)), torch.tensor([19.0, math.exp(10) - 11]), read=KL)
    for size in (1e-3, -1e-3, 1e-4):
        case(f"k3 at d = {size:g} in float32, to 3 %")
        found = ft.kl_penalty(torch.tensor([size]), torch.zeros(1), "k3")
        expect_close(found, torch.tensor([math.expm1(-size) + size]), atol=0, rtol=0.03, read=RETURNS)


def test_kl_penalty_means_over_three_outcomes():
    logits, reference = randn(3, dtype=torch.float64).requires_grad_(), randn(3, seed=1, dtype=torch.float64)
    logp, ref = logits.log_softmax(0), reference.log_softmax(0)
    divergence = (logp.exp() * (logp - ref)).sum()
    slope = torch.autograd.grad(divergence, logits, retain_graph=True)[0]
    p = logp.exp().detach()
    for name in ("k1", "k3"):
        case(f"the mean of {name} over three outcomes is the divergence")
        mean = (p * ft.kl_penalty(logp, ref, name)).sum()
        expect_close(mean.detach(), divergence.detach(), read=KL, **FLOAT64)
    for name in ("k2", "k1+", "k3+"):
        case(f"the mean gradient of {name} over three outcomes is the divergence's")
        mean = (p * ft.kl_penalty(logp, ref, name)).sum()
        found = torch.autograd.grad(mean, logits, retain_graph=True)[0]
        expect_close(found, slope, name="gradient", read=KL, **FLOAT64)


@pytest.mark.parametrize("name", ["k4", "kl", "", "+", "k3++"])
def test_kl_penalty_refuses(name):
    case(f"kl_penalty = {name!r}")
    with expect_raises(ValueError, name, read=RAISES):
        ft.kl_penalty(torch.zeros(1), torch.zeros(1), name)
