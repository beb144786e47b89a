"""What a model can do, graded: windows and bits, likelihoods and choices, and what each costs in calls of the model."""

import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch

from lib.workbook.grading import case, expect_close, expect_equal, expect_raises, expect_true, graded, oracle, with_peak
from tests.chapter_27.models import VOCAB, Recorder, log_probs, table_model

ev = graded("evaluation")

BITS, LIKELIHOOD, SCORES = (f"eq-evaluation-{n}" for n in range(1, 4))
ARGS, RETURNS, RAISES, COST = (f"the contract, under {head}" for head in ("Args", "Returns", "Raises", "Cost"))


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=n)


def harness_windows(tokens: list[int], prefix: int, size: int, context: int) -> list[tuple[list[int], list[int]]]:
    """The pairs of EleutherAI's harness, from their definition on the row of all ids."""
    row, found, done = [prefix, *tokens], [], 0
    while done < len(tokens):
        end = min(len(tokens), done + (size if not done else size - context + 1))
        found.append((row[max(0, end - size) : end], row[done + 1 : end + 1]))
        done = end
    return found


# ---- rolling_windows -------------------------------------------------------------------------------------------------


def test_rolling_windows_by_hand():
    case("tokens 1..10 after prefix 0, max_seq_len 4, context_len 1")
    expected = [([0, 1, 2, 3], [1, 2, 3, 4]), ([4, 5, 6, 7], [5, 6, 7, 8]), ([6, 7, 8, 9], [9, 10])]
    expect_equal(list(ev.rolling_windows(list(range(1, 11)), 0, 4)), expected, read=RETURNS)
    case("tokens 1..10 after prefix 0, max_seq_len 4, context_len 3")
    expected = [([0, 1, 2, 3], [1, 2, 3, 4]), ([2, 3, 4, 5], [5, 6]), ([4, 5, 6, 7], [7, 8]), ([6, 7, 8, 9], [9, 10])]
    expect_equal(list(ev.rolling_windows(list(range(1, 11)), 0, 4, 3)), expected, read=RETURNS)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_rolling_windows_of_every_length(size):
    for n in range(14):
        for context in range(1, size + 1):
            case(f"{n} tokens, max_seq_len {size}, context_len {context}")
            tokens = ids(n)
            windows = list(ev.rolling_windows(tokens, 0, size, context))
            expect_equal([t for _, targets in windows for t in targets], tokens, name="all targets", read=RETURNS)
            expect_equal(windows, harness_windows(tokens, 0, size, context), read=RETURNS)


def test_rolling_windows_refuses_a_context_before_the_first_window():
    for context in (0, 5, -1):
        case(f"max_seq_len 4, context_len {context}")
        with expect_raises(ValueError, f"{context}", "4", read=RAISES):
            list(ev.rolling_windows([1, 2], 0, 4, context))
    for context in (0, 5, -1):
        case(f"max_seq_len 4, context_len {context}; nobody asks for a window")
        with expect_raises(ValueError, f"{context}", "4", read=RAISES):
            ev.rolling_windows([1, 2], 0, 4, context)


# ---- bits_per_byte ---------------------------------------------------------------------------------------------------


def test_bits_per_byte_by_hand():
    case("0 then 1, 2, 5: p = 2/12, 2/12, 1/12; bytes 1, 2, 3")
    sizes = torch.ones(VOCAB, dtype=torch.int64)
    sizes[2], sizes[5] = 2, 3
    bits = (2 * math.log2(6) + math.log2(12)) / 6
    expect_close(ev.bits_per_byte(table_model, [1, 2, 5], sizes, 0, 8), bits, rtol=1e-6, read=BITS)
    case("the same, and the id 2 is special: 0 bytes, so it is context only")
    sizes[2] = 0
    bits = (math.log2(6) + math.log2(12)) / 4
    expect_close(ev.bits_per_byte(table_model, [1, 2, 5], sizes, 0, 8), bits, rtol=1e-6, read=RETURNS)

    case("0 then 1, 2, 3, max_seq_len 2: the second window has the inputs 1, 2 and the target 3, whose p is 2/12")
    bits = 3 * math.log2(6) / 3
    expect_close(ev.bits_per_byte(table_model, [1, 2, 3], torch.ones_like(sizes), 0, 2), bits, rtol=1e-6, read=BITS)


@pytest.mark.parametrize("context", [1, 3, 5])
@pytest.mark.parametrize("as_tuple", [False, True], ids=["logits", "tuple"])
def test_bits_per_byte_equals_single_windows(context, as_tuple):
    tokens, sizes = ids(23), torch.arange(VOCAB) % 4
    nats = n_bytes = 0.0
    for inputs, targets in harness_windows(tokens, 0, 5, context):
        rows = log_probs(Recorder(), inputs)[-len(targets) :]
        nats -= sum(rows[i, t].item() for i, t in enumerate(targets) if sizes[t])
        n_bytes += sum(int(sizes[t]) for t in targets)
    for batch in (1, 2, 16):
        case(f"23 tokens, max_seq_len 5, context_len {context}, batch_size {batch}, float64")
        found = ev.bits_per_byte(Recorder(as_tuple=as_tuple), tokens, sizes, 0, 5, context, batch)
        expect_true(type(found) is float, f"expected a float, got {type(found).__name__}", answer=found, read=RETURNS)
        expect_close(found, nats / math.log(2) / n_bytes, rtol=1e-12, read=BITS)


def test_bits_per_byte_takes_impossible_special_tokens():
    case("the special id 3 has probability 0 everywhere, and is in the text")

    def model(tokens):
        logits = torch.zeros(*tokens.shape, VOCAB)
        logits[..., 3] = -torch.inf
        return logits

    sizes = torch.ones(VOCAB, dtype=torch.int64)
    sizes[3] = 0
    expect_close(ev.bits_per_byte(model, [1, 3, 2], sizes, 0, 8), math.log2(10), rtol=1e-6, read=RETURNS)


def test_bits_per_byte_refuses_texts_without_bytes():
    sizes = torch.zeros(VOCAB, dtype=torch.int64)
    for tokens in ([], [1, 2]):
        case(f"tokens {tokens}, of 0 bytes")
        with expect_raises(ValueError, read=RAISES):
            ev.bits_per_byte(table_model, tokens, sizes, 0, 4)
    case("context_len 9, max_seq_len 4")
    with expect_raises(ValueError, "9", "4", read=RAISES):
        ev.bits_per_byte(table_model, [1], sizes + 1, 0, 4, 9)


def test_bits_per_byte_sums_in_float64():
    case("4,000 targets; a model in bfloat16, whose log-probabilities are computed in float32")
    tokens, sizes = ids(4000), torch.ones(VOCAB, dtype=torch.int64)
    model = Recorder(torch.bfloat16)
    nats = 0.0
    for inputs, targets in harness_windows(tokens, 0, 100, 1):
        nats -= log_probs(model, inputs)[-len(targets) :][range(len(targets)), targets].sum().item()
    found = ev.bits_per_byte(model, tokens, sizes, 0, 100, batch_size=1)
    expect_close(found, nats / math.log(2) / 4000, rtol=1e-6, read=RETURNS)


def test_bits_per_byte_cost():
    case("23 tokens, max_seq_len 5, context_len 3, batch_size 4: 7 windows")
    model = Recorder()
    ev.bits_per_byte(model, ids(23), torch.ones(VOCAB, dtype=torch.int64), 0, 5, 3, 4)
    expect_equal(model.shapes, [(4, 5), (3, 5)], name="shapes of the calls", read=COST)
    expect_true(not any(model.gradients), "the model was called with gradients on", read=COST)


# ---- encode_pair -----------------------------------------------------------------------------------------------------

PIECES = ["the", "them", " cat", " ca", "t", "s", " ", "  ", "a", "b", "ab", "h", "e", "m", "c", "\n"]


def encode(text: str) -> list[int]:
    """Ids of the longest pieces from left to right."""
    found = []
    while text:
        piece = max((p for p in PIECES if text.startswith(p)), key=len)
        found.append(PIECES.index(piece))
        text = text[len(piece) :]
    return found


def pieces(*names: str) -> list[int]:
    return [PIECES.index(name) for name in names]


def test_encode_pair_by_hand():
    case("'the cat' and 's': no token crosses the border")
    expect_equal(ev.encode_pair(encode, "the cat", "s"), (pieces("the", " cat"), pieces("s")), read=RETURNS)
    case("'the ' and 'cat': the space moves to the continuation")
    expect_equal(ev.encode_pair(encode, "the ", "cat"), (pieces("the"), pieces(" cat")), read=ARGS)
    case("'the\\n  ' and 's': all white space at the end moves")
    expect_equal(ev.encode_pair(encode, "the\n  ", "s"), (pieces("the"), pieces("\n", "  ", "s")), read=ARGS)
    case("'a' and 'b': one token 'ab' crosses the border, so it is scored and no context is left")
    expect_equal(ev.encode_pair(encode, "a", "b"), ([], pieces("ab")), read=RETURNS)
    case("'the ca' and 'ts': ' ca' becomes ' cat', which holds a byte of the continuation")
    expect_equal(ev.encode_pair(encode, "the ca", "ts"), (pieces("the"), pieces(" cat", "s")), read=RETURNS)
    case("'the' and 'm a': 'them' crosses; then ' ' and 'a', although 'the' alone is one token, too")
    expect_equal(ev.encode_pair(encode, "the", "m a"), ([], pieces("them", " ", "a")), read=RETURNS)


def test_encode_pair_at_the_edges():
    case("an empty context")
    expect_equal(ev.encode_pair(encode, "", " cat"), ([], pieces(" cat")), read=RETURNS)
    case("an empty continuation")
    expect_equal(ev.encode_pair(encode, "the", ""), (pieces("the"), []), read=RETURNS)
    case("a context of white space: it belongs to the continuation")
    expect_equal(ev.encode_pair(encode, "  ", "a"), ([], pieces("  ", "a")), read=ARGS)


def test_encode_pair_never_cuts_at_a_later_difference():
    case("an encoding whose ids agree again after the first difference")
    alone, whole = {"xyz": [1, 2, 3]}, {"xyzw": [1, 9, 3, 4]}
    expect_equal(ev.encode_pair({**alone, **whole}.get, "xyz", "w"), ([1], [9, 3, 4]), read=RETURNS)


# ---- loglikelihood ---------------------------------------------------------------------------------------------------


def expected_score(context: list[int], continuation: list[int], limit: int) -> tuple[float, bool]:
    """One request alone, in float64."""
    if not continuation:
        return 0.0, True
    kept = (context + continuation)[-limit - 1 :]
    rows = log_probs(Recorder(), kept[:-1])[-len(continuation) :]
    score = sum(rows[i, t].item() for i, t in enumerate(continuation))
    return score, rows.argmax(-1).tolist() == continuation


def greedy_after(context: list[int], n: int) -> list[int]:
    row = list(context)
    for _ in range(n):
        row.append(int(log_probs(Recorder(), row)[-1].argmax()))
    return row[len(context) :]


def requests() -> list[tuple[list[int], list[int]]]:
    """Of awkward lengths, in no order; the second and the fifth are what greedy decoding writes."""
    lengths = [(3, 2), (5, 0), (1, 1), (9, 4), (4, 3), (2, 0), (12, 5), (6, 1), (3, 6)]
    found = [(ids(a, a), ids(b, 7 * b)) for a, b in lengths]
    found[1] = found[1][0], greedy_after(found[1][0], 3)
    found[4] = found[4][0], greedy_after(found[4][0], 3)
    return found


def test_loglikelihood_pads_on_the_right():
    case("([1, 2, 3], [4, 5]) and ([6], [7, 8]), pad_id 9: the model gets [1, 2, 3, 4] and [6, 7, 9, 9]")
    model = Recorder()
    ev.loglikelihood(model, [([1, 2, 3], [4, 5]), ([6], [7, 8])], 8, pad_id=9)
    rows = sorted(row for call in model.rows for row in call.tolist())
    expect_equal(rows, [[1, 2, 3, 4], [6, 7, 9, 9]], name="the rows that the model received", read=ARGS)


def test_loglikelihood_by_hand():
    case("after id i, id i + 1 has p = 2/12, all others 1/12; no parameters; pad_id 2")
    asked = [([1], [2, 3]), ([4, 5], [7]), ([9], [10, 0, 1]), ([1], [2, 5]), ([1], [5, 6])]
    expected = [(2 * math.log(1 / 6), True), (math.log(1 / 12), False), (3 * math.log(1 / 6), True)]
    expected += [(math.log(1 / 72), False)] * 2
    found = ev.loglikelihood(table_model, asked, 8, pad_id=2)
    expect_true(isinstance(found, list), f"expected a list, got {type(found).__name__}", answer=found, read=RETURNS)
    for i, ((score, greedy), (right, is_greedy)) in enumerate(zip(found, expected, strict=True)):
        expect_true(isinstance(score, float), f"out[{i}][0] is no float: {score!r}", answer=found, read=RETURNS)
        expect_close(score, right, rtol=1e-6, name=f"out[{i}][0]", answer=found, read=LIKELIHOOD)
        expect_equal(greedy, is_greedy, name=f"out[{i}][1]", answer=found, read=RETURNS)


@pytest.mark.parametrize("as_tuple", [False, True], ids=["logits", "tuple"])
@pytest.mark.parametrize("limit", [6, 9, 40])
def test_loglikelihood_equals_single_requests(limit, as_tuple):
    asked = requests()
    expected = [expected_score(*request, limit) for request in asked]
    for batch in (1, 3, 16):
        case(f"9 requests, max_length {limit}, batch_size {batch}, float64")
        found = ev.loglikelihood(Recorder(as_tuple=as_tuple), asked, limit, pad_id=2, batch_size=batch)
        expect_equal(len(found), 9, name="len(out)", answer=found, read=RETURNS)
        for i, (score, greedy) in enumerate(expected):
            # the contract also allows logits that are cast to float32
            expect_close(found[i][0], score, rtol=2e-6, name=f"out[{i}][0]", answer=found, read=LIKELIHOOD)
            expect_equal(found[i][1], greedy, name=f"out[{i}][1]", answer=found, read=RETURNS)


def test_loglikelihood_of_half_precision():
    case("logits in bfloat16: the softmax is in float32")
    model = Recorder(torch.bfloat16)
    context, continuation = ids(5), ids(20, 3)
    rows = log_probs(model, [*context, *continuation][:-1])[-20:]
    expected = sum(rows[i, t].item() for i, t in enumerate(continuation))
    expect_close(ev.loglikelihood(model, [(context, continuation)], 40)[0][0], expected, rtol=1e-5, read=RETURNS)


def test_loglikelihood_on_the_models_device():
    case("PyTorch's default device is another than the model's, as the CPU is for a model on a GPU")
    asked, model = [([1, 2, 3], [4, 5]), ([6], [7, 8])], Recorder()
    expected = ev.loglikelihood(model, asked, 8)
    with torch.device("meta"):
        found = ev.loglikelihood(model, asked, 8)
    expect_equal(found, expected, read=ARGS)


def test_loglikelihood_cost():
    case("lengths passed: 4, 7, 1, 12, 6, (none), 16, 6, 8; batch_size 3: three calls, longest first")
    model = Recorder()
    ev.loglikelihood(model, requests(), 40, pad_id=2, batch_size=3)
    expect_equal(model.shapes, [(3, 16), (3, 7), (2, 4)], name="shapes of the calls", read=COST)
    expect_true(not any(model.gradients), "the model was called with gradients on", read=COST)
    expect_equal(model.rows[2].tolist()[1][1:], [2, 2, 2], name="the last row after its first id", read=ARGS)
    case("only empty continuations: no call")
    model = Recorder()
    expect_equal(ev.loglikelihood(model, [([1], []), ([2, 3], [])], 8), [(0.0, True)] * 2, read=RETURNS)
    expect_equal(ev.loglikelihood(model, [], 8), [], read=RETURNS)
    expect_equal(model.shapes, [], name="shapes of the calls", read=COST)


def test_loglikelihood_refuses():
    case("request 2 has an empty context")
    model = Recorder()
    with expect_raises(ValueError, "2", read=RAISES):
        ev.loglikelihood(model, [([1], [7]), ([1], [7]), ([], [7])], 8, batch_size=1)
    expect_equal(model.shapes, [], name="shapes of the calls", read=RAISES)
    case("a continuation of 5 ids, max_length 4")
    with expect_raises(ValueError, "5", "4", read=RAISES):
        ev.loglikelihood(model, [([1], ids(5))], 4)
    case("a continuation of 4 ids, max_length 4: the context is cut to its last id")
    found = ev.loglikelihood(model, [([3, 8, 1], [7, 2, 6, 5])], 4)
    expect_close(found[0][0], expected_score([1], [7, 2, 6, 5], 4)[0], rtol=2e-6, name="out[0][0]", read=ARGS)


# ---- choose_answer ---------------------------------------------------------------------------------------------------


def test_choose_answer_by_hand():
    scores, n_tokens, n_bytes, alone = (
        [-6.0, -8.0, -9.0, -10.0],
        [2, 4, 3, 4],
        [6, 9, 20, 12],
        [-7.0, -8.0, -9.5, -14.0],
    )
    for name, expected in (("sum", 0), ("token", 1), ("byte", 2), ("unconditional", 3)):
        case(f"log_probs {scores}, {name}")
        expect_equal(ev.choose_answer(scores, name, n_tokens, n_bytes, alone), expected, read=SCORES)
    for name in ("token", "byte"):
        for second, length, score in ((-1.9, 3, -0.63), (-1.8, 2, -0.9)):
            case(f"log_probs [-1.0, {second}], lengths [1, {length}], {name}: -1 and {score}")
            expect_equal(ev.choose_answer([-1.0, second], name, [1, length], [1, length]), 1, read=SCORES)
    case("the default")
    expect_equal(ev.choose_answer([-3.0, -2.0, -5.0]), 1, read=ARGS)


def test_choose_answer_between_equal_scores():
    for name in ("sum", "token", "byte", "unconditional"):
        case(f"choices 1 and 2 are equal, {name}")
        expect_equal(ev.choose_answer([-4.0, -2.0, -2.0], name, [1] * 3, [1] * 3, [-1.0] * 3), 1, read=RETURNS)
    case("-inf is a score: it loses, and all of them are equal")
    expect_equal(ev.choose_answer([-math.inf, -900.0]), 1, read=ARGS)
    expect_equal(ev.choose_answer([-math.inf, -math.inf], "byte", n_bytes=[3, 1]), 0, read=ARGS)


def test_choose_answer_ignores_what_it_does_not_need():
    case("'token' with wrong bytes and no unconditional")
    expect_equal(ev.choose_answer([-4.0, -3.0], "token", [4, 1], [0]), 0, read=RETURNS)
    case("'sum' with lengths of 0")
    expect_equal(ev.choose_answer([-4.0, -3.0], "sum", [0, 0], [0, 0], [math.nan] * 2), 1, read=RETURNS)


def test_choose_answer_refuses():
    for name, argument in (("token", "n_tokens"), ("byte", "n_bytes"), ("unconditional", "unconditional")):
        case(f"{name} without {argument}")
        with expect_raises(ValueError, argument, read=RAISES):
            ev.choose_answer([-1.0, -2.0], name)
        case(f"{name} with 3 values for 2 choices")
        with expect_raises(ValueError, argument, read=RAISES):
            ev.choose_answer([-1.0, -2.0], name, **{argument: [1, 1, 1]})
    for length in (0, -2):
        case(f"choice 1 has the length {length}")
        with expect_raises(ValueError, "1", read=RAISES):
            ev.choose_answer([-7.0, -7.0], "byte", n_bytes=[5, length])
    case("choice 2 is NaN")
    with expect_raises(ValueError, "2", read=RAISES):
        ev.choose_answer([-5.0, -5.0, math.nan])
    case("choice 2 is NaN after an empty prompt")
    with expect_raises(ValueError, "2", read=RAISES):
        ev.choose_answer([-5.0, -5.0, -5.0], "unconditional", unconditional=[-1.0, -1.0, math.nan])
    case("normalization 'mean'")
    with expect_raises(ValueError, "mean", read=RAISES):
        ev.choose_answer([-1.0], "mean")


# ---- few_shot_prompt -------------------------------------------------------------------------------------------------

EXAMPLES: list[dict[str, Any]] = [
    {"query": f"{i} + 1 =", "choices": [str(i - 1), str(i + 1), str(i + 2)], "gold": 1} for i in (0, 1, 2, 1, 3, 4, 4)
]
EXAMPLES[3]["choices"].reverse()  # question 1 again, with its choices in another order


def test_few_shot_prompt_by_hand():
    case("question 2, no shots")
    expect_equal(ev.few_shot_prompt(EXAMPLES, 2), ("2 + 1 =", [" 1", " 3", " 4"]), read=RETURNS)
    case("question 2, 2 shots, delimiter ' -> ', seed 7: random.Random(9).sample([0, 1, 3, 4, 5, 6], 2)")
    a, b = (EXAMPLES[i] for i in random.Random(9).sample([0, 1, 3, 4, 5, 6], 2))
    solved = "".join(f"{e['query']} -> {e['choices'][1]}\n\n" for e in (a, b))
    found = ev.few_shot_prompt(EXAMPLES, 2, 2, " -> ", 7)
    expect_equal(found, (solved + "2 + 1 =", [" -> 1", " -> 3", " -> 4"]), read=RETURNS)


def test_few_shot_prompt_takes_the_right_choice():
    case("the right choice of the only shot is the third")
    examples = [{"query": "q", "choices": ["a", "b"], "gold": 0}, {"query": "r", "choices": ["c", "d", "e"], "gold": 2}]
    expect_equal(ev.few_shot_prompt(examples, 0, 1), ("r e\n\nq", [" a", " b"]), read=RETURNS)


@pytest.mark.parametrize("index", [5, 1, 3])
def test_few_shot_prompt_never_shows_the_question(index):
    copy = "6 is the same" if index == 5 else "1 and 3 differ in the order of their choices only"
    case(f"question {index}, all 5 others as shots; {copy}")
    asked = EXAMPLES[index]["query"]
    context, _ = ev.few_shot_prompt(EXAMPLES, index, 5)
    expect_equal(context.count(asked), 1, name="times that the question is in its context", read=ARGS)
    expect_equal(context.count("\n\n"), 5, name="number of shots", read=ARGS)
    available = [i for i, example in enumerate(EXAMPLES) if example["query"] != asked]
    order = random.Random(1234 + index).sample(available, 5)
    expected = "".join(f"{EXAMPLES[i]['query']} {EXAMPLES[i]['choices'][1]}\n\n" for i in order) + asked
    expect_equal(context, expected, name="out[0]", read=ARGS)


def test_few_shot_prompt_refuses_too_many_shots():
    case("question 1 and its copy leave 5 examples; 6 shots")
    with expect_raises(ValueError, "6", "5", read=RAISES):
        ev.few_shot_prompt(EXAMPLES, 1, 6)


# ---- contaminated_share ----------------------------------------------------------------------------------------------


def test_contaminated_share_by_hand():
    texts, corpus = ["a b c d e", "x y z a b c", "a b", "e f", "", "b c"], ["z a b c", "c d e", "a", "b e f"]
    case(f"3-grams of {texts} in {corpus}")
    expected = [2 / 3, 2 / 4, 1.0, 1.0, 0.0, 1.0]
    expect_close(ev.contaminated_share(texts, corpus, 3), expected, read=RETURNS)
    for what, text, document in (
        ("upper case", "A b C d", "x a B c D"),
        ("punctuation", "a b, c - (d)!", "x a-b c. d"),
        ("no words", "... !", "... !"),
    ):
        case(f"{what}: 3-grams of {text!r} in {document!r}")
        share = float(what != "no words")
        expect_close(ev.contaminated_share([text], [document], 3), [share], read=RETURNS)


def test_contaminated_share_counts_places_and_keeps_documents_apart():
    case("the 2-gram 'a a' is at three of four places")
    expect_close(ev.contaminated_share(["a a a a b"], ["x a a"], 2), [0.75], read=RETURNS)
    case("'p q' stands only across the border of two documents")
    expect_close(ev.contaminated_share(["p q"], ["o p", "q r"], 2), [0.0], read=RETURNS)
    case("a text of 2 words is one gram of 2 words, also for n = 13; words are whole")
    found = ev.contaminated_share(["big cat", "ig cat", "cat big"], ["a big cat sat"])
    expect_close(found, [1.0, 0.0, 0.0], read=RETURNS)
    case("digits, letters with accents and underscores belong to words, an apostrophe does not")
    corpus = ["a 3 b", "a e b", "don t go", "c d e"]
    found = ev.contaminated_share(["a 2 b", "a é b", "don't go", "c_d e"], corpus, 3)
    expect_close(found, [0.0, 0.0, 1.0, 0.0], read=ARGS)
    case("12 words in a row are no gram of 13")
    words = [f"w{i}" for i in range(13)]
    found = ev.contaminated_share([" ".join(words)], [" ".join(words[:12]), " ".join(words[1:])])
    expect_close(found, [0.0], read=RETURNS)
    expect_close(ev.contaminated_share([" ".join(words)], [" ".join(["x", *words])]), [1.0], read=RETURNS)
    case("no texts, and no corpus")
    expect_equal(ev.contaminated_share([], ["a"]), [], read=RETURNS)
    expect_close(ev.contaminated_share(["a b"], []), [0.0], read=RETURNS)
    case("one text twice")
    expect_close(ev.contaminated_share(["a b", "a b"], ["a b"]), [1.0, 1.0], read=RETURNS)


class Document(str):
    """A document that knows how many of its kind there are."""

    alive = 0

    def __new__(cls, text):
        cls.alive += 1
        return super().__new__(cls, text)

    def __del__(self):
        type(self).alive -= 1


def test_contaminated_share_reads_the_corpus_once_and_keeps_nothing():
    case("20 documents from a generator, which looks at how many are still there")
    most = []

    def corpus():
        for i in range(20):
            most.append(Document.alive)
            yield Document(f"the document {i} says nothing new at all")

    found = ev.contaminated_share(["document 7 says", "document 7 said"], corpus(), 3)
    expect_close(found, [1.0, 0.0], read=RETURNS)
    expect_equal(len(most), 20, name="documents read", read=COST)
    name = "documents kept while the next is read (the variable of a `for` loop keeps one)"
    expect_equal(max(most), 0, name=name, read=COST)


@pytest.mark.memory_limit(300)
def test_contaminated_share_memory_grows_with_the_texts_only():
    case("300,000 different 5-grams in 300 documents: the peak is below 2 MB")

    def corpus():
        for i in range(300):
            yield " ".join(f"w{i}x{j}" for j in range(1000))

    _, peak = with_peak(lambda: ev.contaminated_share(["w1x1 w1x2 w1x3 w1x4 w1x5"], corpus(), 5))
    expect_true(peak < 2_000_000, f"the peak was {peak / 1e6:.1f} MB", read=COST)


# ---- pass_at_k -------------------------------------------------------------------------------------------------------


def test_pass_at_k_by_hand():
    case("n = 4, c = 1, k = 2: 3 of the 6 pairs hold the right sample")
    expect_close(ev.pass_at_k(4, 1, 2), 0.5, rtol=1e-12, read="eq-evaluation-8")
    case("n = 10, c = 3, k = 2: 1 - 21/45")
    expect_close(ev.pass_at_k(10, 3, 2), 24 / 45, rtol=1e-12, read="eq-evaluation-8")
    for n, c, k, expected in ((5, 0, 3, 0.0), (5, 3, 3, 1.0), (5, 5, 1, 1.0), (1, 1, 1, 1.0), (3, 0, 3, 0.0)):
        case(f"n = {n}, c = {c}, k = {k}: exactly {expected}")
        found = ev.pass_at_k(n, c, k)
        expect_equal(found, expected, read=RETURNS)
        expect_true(type(found) is float, f"expected a float, got {type(found).__name__}", answer=found, read=RETURNS)


def test_pass_at_k_equals_the_fraction():
    for n in (1, 7, 30, 1100):
        for c in {0, 1, n // 3, n // 2, n - 1, n}:
            for k in {1, min(2, n), (n + 1) // 2, n}:
                case(f"n = {n}, c = {c}, k = {k}, against the exact fraction")
                exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
                expect_close(ev.pass_at_k(n, c, k), float(exact), rtol=1e-9, atol=0, read="eq-evaluation-8")


def test_pass_at_k_of_many_samples():
    for c, k in ((1, 1), (1, 100), (3, 7), (40_000, 2), (2, 50_000), (500, 500)):
        case(f"n = 100,000, c = {c}, k = {k}")
        exact = Fraction(1)
        for i in range(min(c, k)):
            exact *= Fraction(100_000 - max(c, k) - i, 100_000 - i)
        expect_close(ev.pass_at_k(100_000, c, k), float(1 - exact), rtol=1e-9, atol=0, read=RETURNS)


def test_pass_at_k_refuses():
    for n, c, k in ((5, 6, 1), (5, -1, 1), (5, 2, 0), (5, 2, 6), (0, 0, 1)):
        case(f"n = {n}, c = {c}, k = {k}")
        with expect_raises(ValueError, f"{n}", f"{c}", f"{k}", read=RAISES):
            ev.pass_at_k(n, c, k)


@oracle
def test_pass_at_k_is_the_share_of_subsets():
    import itertools

    case("n = 8, c = 3, k = 4: all 70 subsets are drawn")
    drawn = [min(subset) < 3 for subset in itertools.combinations(range(8), 4)]
    expect_close(ev.pass_at_k(8, 3, 4), sum(drawn) / len(drawn), rtol=1e-12, read="eq-evaluation-8")
