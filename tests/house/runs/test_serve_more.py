"""What the official client may ask for beyond text: scores, several answers, forms, and how a server is watched."""

import json
import math
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from lib.given.models.serving import Request
from lib.runs import serve
from lib.runs.serving import models
from lib.runs.serving.chat import ChatTemplate
from lib.runs.serving.engine import build, describe_path
from lib.runs.serving.forms import Forms, masked
from lib.runs.serving.grammar import grammar_of
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.schema import ResponseFormat
from lib.runs.serving.text import ByteTokenizer, FileTokenizer
from lib.runs.serving.wanted import Wanted
from lib.serving import Scheduler, generate_many
from tests.house.runs.test_serve import (
    SPOKEN,
    Running,
    Threaded,
    client,
    make_tokenizer,
    metric,
    post,
    reciting,
    running,
    users_of,
)
from tests.house.runs.test_serve_chat import PLAIN

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(200)]
ASKED: dict[str, Any] = {
    "model": "fake",
    "prompt": "The for statement",
    "max_tokens": 12,
    "temperature": 0.8,
    "seed": 3,
}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "What?"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def tiny():
    return models.make_tiny()


@pytest.fixture(scope="module")
def server(tiny):
    made = Threaded(PrefixEngine(tiny, Scheduler(64, 200, 8)), context_len=256, queue=20)
    made.service.template = ChatTemplate(PLAIN, {})
    with running(made):
        yield made


# ---- scores ----------------------------------------------------------------------------------------------------------


def scores_of(model, prompt, answer):
    """The log-probabilities ``[T, V]`` of the places of an answer, in one pass of the whole text."""
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt + answer)]))
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)


def test_scores_are_the_models_own_whatever_the_temperature(server, tiny):
    whole = client(server).completions.create(**ASKED, logprobs=3).choices[0]
    expected = scores_of(tiny, ASKED["prompt"].encode(), whole.text.encode())
    found = whole.logprobs
    assert found.tokens == list(whole.text)
    assert found.text_offset == list(range(12))
    for i, token in enumerate(whole.text.encode()):
        assert found.token_logprobs[i] == pytest.approx(float(expected[i, token]), abs=1e-4)
        best = {chr(int(j)): float(expected[i, j]) for j in expected[i].topk(3).indices}
        assert found.top_logprobs[i] == pytest.approx(best | {chr(token): float(expected[i, token])}, abs=1e-4)
    chunks = [c.choices[0] for c in client(server).completions.create(**ASKED, logprobs=3, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [one for chunk in chunks for one in getattr(chunk.logprobs, name)]
        together = getattr(found, name)
        if name == "top_logprobs":
            assert parts == [pytest.approx(top, abs=1e-5) for top in together]
        else:
            assert parts == (pytest.approx(together, abs=1e-5) if name == "token_logprobs" else together)
    plain = client(server).completions.create(**ASKED).choices[0]
    assert (plain.text, plain.logprobs) == (whole.text, None)
    alone = client(server).completions.create(**ASKED, logprobs=0).choices[0].logprobs
    assert [list(top) for top in alone.top_logprobs] == [[token] for token in found.tokens]


def test_scores_of_a_chat_and_of_its_stream(server):
    asked = CHAT | {"logprobs": True, "top_logprobs": 2}
    whole = client(server).chat.completions.create(**asked).choices[0]
    found = whole.logprobs.content
    assert "".join(one.token for one in found) == whole.message.content
    assert bytes(byte for one in found for byte in one.bytes).decode() == whole.message.content
    for one in found:
        assert one.top_logprobs[0].token == one.token
        assert one.top_logprobs[0].logprob == one.logprob >= one.top_logprobs[1].logprob
        assert sum(math.exp(top.logprob) for top in one.top_logprobs) <= 1 + 1e-6
    chunks = [c.choices[0] for c in client(server).chat.completions.create(**asked, stream=True)]
    parts = [one for chunk in chunks for one in chunk.logprobs.content]
    assert [one.token for one in parts] == [one.token for one in found]
    assert [one.logprob for one in parts] == pytest.approx([one.logprob for one in found], abs=1e-5)
    bare = client(server).chat.completions.create(**CHAT | {"logprobs": True}).choices[0].logprobs.content
    assert [one.top_logprobs for one in bare] == [[]] * 8
    assert client(server).chat.completions.create(**CHAT).choices[0].logprobs is None


def test_scores_of_characters_that_tokens_divide_and_of_a_text_that_stops():
    """Each character's tokens begin where it begins, and a stop string's tokens are not in the answer."""
    said = SPOKEN.encode()
    with running(Threaded(PrefixEngine(reciting(SPOKEN), Scheduler(64, 32, 4)), context_len=len(said))) as server:
        asked = {"model": "fake", "prompt": SPOKEN[0], "temperature": 0, "max_tokens": 30, "logprobs": 0}
        for more in ({}, {"stop": "3.1"}):
            whole = client(server).completions.create(**asked, **more).choices[0]
            tokens, offsets = whole.logprobs.tokens, whole.logprobs.text_offset
            n_halves = sum(byte > 127 for byte in said[1 : len(tokens) + 1])
            assert sum(token.startswith("bytes:") for token in tokens) == n_halves
            assert tokens[1:3] == ["bytes:\\xc3", "bytes:\\xaf"]  # of a letter of two bytes
            assert offsets == [len(said[1 : 1 + i].decode(errors="ignore")) for i in range(len(tokens))]
            assert len(tokens) == (len(whole.text.encode()) if more else 30)
            chunks = [c.choices[0] for c in client(server).completions.create(**asked, **more, stream=True)]
            assert [token for chunk in chunks for token in chunk.logprobs.tokens] == tokens


def test_the_bytes_of_a_file_s_tokens_are_their_text_s(tmp_path):
    made = FileTokenizer(str(make_tokenizer(tmp_path / "tokenizer.json")))
    assert b"".join(map(made.bytes_of, made.encode(SPOKEN))) == SPOKEN.encode()
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    theirs = Tokenizer(BPE({"\u2581a": 0, "<0xC3>": 1, "<0xA9>": 2, "<s>": 3}, []))
    theirs.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    theirs.add_special_tokens(["<s>"])
    theirs.save(str(tmp_path / "other.json"))
    other = FileTokenizer(str(tmp_path / "other.json"))
    assert [other.bytes_of(i) for i in range(5)] == [b" a", b"\xc3", b"\xa9", b"<s>", b""]
    assert ByteTokenizer().bytes_of(200) == b"\xc8"


# ---- several answers -------------------------------------------------------------------------------------------------


def rounds(engine, requests, cancel=None):
    """The tokens of requests that were submitted together; ``cancel`` after the first step."""
    for request in requests:
        engine.submit(request)
    found: dict[Request, list[int]] = {request: [] for request in requests}
    n_steps = 0
    while engine.is_busy:
        for request, token in engine.step():
            found[request].append(token)
        assert engine.cache.allocator.n_users == users_of(engine)
        n_steps += 1
        if cancel and n_steps == 1:
            assert engine.cancel(cancel)
    assert engine.sequences == engine.acquired == engine.held == engine.cache.tables == {}
    return list(found.values())


def of_one_prompt(n, n_new=7, **more):
    first = Wanted(list(b"No other test asks so"), n_new, 0.9, 5, **more)
    return [first, *(Wanted(first.tokens, n_new, 0.9, 5 + i, first=first, **more) for i in range(1, n))]


@pytest.mark.parametrize(("n_blocks", "max_tokens"), [(60, 64), (9, 64), (60, 5), (13, 8)])
def test_answers_to_one_prompt_are_forks_and_each_is_its_seed_s(tiny, n_blocks, max_tokens):
    """With room the prompt is computed once, for all; without room some wait, and are the same all the same."""
    passed: list[int] = []
    forked: list[int] = []
    preempted: list[int] = []
    scheduler = Scheduler(max_tokens, n_blocks, 4)
    engine = PrefixEngine(tiny, scheduler, on_forked=forked.append, on_preempted=preempted.append)
    tiny.tok_embeddings.register_forward_hook(lambda module, args, out: passed.append(args[0].numel()))
    try:
        found = rounds(engine, of_one_prompt(4))
    finally:
        tiny.tok_embeddings._forward_hooks.clear()
    alone = [[t for _, t in generate_many(tiny, [r], Scheduler(64, 60, 4))] for r in of_one_prompt(4)]
    assert found == alone
    assert len({tuple(tokens) for tokens in found}) > 1
    assert (sum(preempted) > 0) == ((n_blocks, max_tokens) == (13, 8))
    if n_blocks == 60:
        assert forked == [21] * 3
        assert sum(passed) == 21 + 4 * 6  # the last token of an answer is not passed through the model


def test_a_first_answer_that_leaves_does_not_take_the_others_along(tiny):
    requests = of_one_prompt(3)
    engine = PrefixEngine(tiny, Scheduler(8, 60, 4))  # three steps for the prompt
    found = rounds(engine, requests, cancel=requests[0])
    assert found[0] == []
    assert found[1:] == [[t for _, t in generate_many(tiny, [r], Scheduler(64, 60, 4))] for r in requests[1:]]


def test_the_forks_of_a_last_token_are_all_there_is(tiny):
    found = rounds(PrefixEngine(tiny, Scheduler(64, 60, 4)), of_one_prompt(3, n_new=1))
    assert [len(tokens) for tokens in found] == [1, 1, 1]


def test_a_prompt_is_counted_once_and_its_answers_are_those_of_seeds_in_a_row(server):
    asked = ASKED | {"prompt": "Nobody else says this"}
    before = {name: metric(server, name) for name in ("prompt_tokens_total", "prefix_tokens_forked_total")}
    several = client(server).completions.create(**asked, n=3)
    assert metric(server, "prompt_tokens_total") - before["prompt_tokens_total"] == 21
    assert several.usage.model_dump()["prompt_tokens"] == 21
    assert several.usage.completion_tokens == 36
    alone = [client(server).completions.create(**asked | {"seed": 3 + i}).choices[0].text for i in range(3)]
    assert [choice.text for choice in several.choices] == alone
    assert [choice.index for choice in several.choices] == [0, 1, 2]


def test_best_of_returns_the_likeliest_answers_and_counts_all(server):
    asked = ASKED | {"temperature": 1.5, "prompt": ["The ", "an"]}
    every = client(server).completions.create(**asked, n=5, logprobs=0)
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in every.choices]
    best = [sorted(range(at, at + 5), key=lambda i: -means[i])[:2] for at in (0, 5)]
    found = client(server).completions.create(**asked, n=2, best_of=5)
    assert [c.text for c in found.choices] == [every.choices[i].text for those in best for i in those]
    assert [(c.index, c.logprobs) for c in found.choices] == [(i, None) for i in range(4)]
    assert found.usage == every.usage


# ---- how a server is watched -----------------------------------------------------------------------------------------


def test_a_request_keeps_its_id_or_gets_one_in_the_answer_and_the_log(server, caplog):
    def ask(name, body):
        return post(server, body, headers={"X-Request-Id": name} if name else {}).headers["x-request-id"]

    short = ASKED | {"max_tokens": 1}
    with caplog.at_level("INFO", "workbook.serve"):
        assert ask("mine-7", short) == "mine-7"
        assert ask("wrong/1", short | {"n": 0}) == "wrong/1"
        assert ask("streams", short | {"stream": True}) == "streams"
        made = [ask(name, short) for name in (None, None, "two words", "x" * 129, "")]
    assert len(set(made)) == 5
    assert all(re.fullmatch(r"req-[0-9a-f]{32}", name) for name in made)
    while len(caplog.messages) < 8:  # the log is written after the answer has been sent
        pass
    lines = {line.rpartition(" ")[2]: line for line in caplog.messages}
    assert set(lines) == {"mine-7", "wrong/1", "streams", *made}
    assert re.fullmatch(r"POST /v1/completions: status 200 after \d\.\d{3} s, request mine-7", lines["mine-7"])
    assert "status 400" in lines["wrong/1"]
    for path in ("/health", "/metrics", "/v1/models", "/nowhere"):
        assert httpx.get(server.root + path, headers={"X-Request-Id": "here"}).headers["x-request-id"] == "here"


def test_histograms_count_each_answer_and_each_prompt_once(tiny):
    with running(Threaded(PrefixEngine(tiny, Scheduler(64, 200, 8)), context_len=256)) as server:
        post(server, ASKED | {"n": 2, "max_tokens": 5})
        post(server, ASKED | {"max_tokens": 1})
        while metric(server, "answer_tokens_count") < 3:
            pass
        counts = {"answer_tokens": (3, 11), "request_prompt_tokens": (2, 34), "time_to_first_token_seconds": (3, None),
                  "request_seconds": (3, None), "time_per_token_seconds": (2, None)}  # fmt: skip
        for name, (n, total) in counts.items():
            assert metric(server, f"{name}_count") == n, name
            assert metric(server, f"{name}_sum") == total if total else metric(server, f"{name}_sum") > 0
        assert 'workbook_answer_tokens_bucket{le="4.0"} 1.0' in httpx.get(f"{server.root}/metrics").text


def test_the_engine_says_which_way_its_steps_take():
    engine, ready = build(serve.make_parser().parse_args(["--model", "tiny", "--device", "cpu"]), Counter())
    assert ready.path == ("plain", "the plain step, kernel by kernel: the fast one needs a GPU")
    engine.steps = object()
    assert describe_path(engine)[0] == "fast"


def test_the_command_prints_the_way_after_its_address():
    with running(Running("--device", "cpu")) as server:
        assert server.said.startswith("serving tiny at http://127.0.0.1:")
        said = [server.process.stdout.readline() for _ in range(2)]
        assert said[0].startswith("a page to try it: ")
        assert said[1] == "each step takes the plain step, kernel by kernel: the fast one needs a GPU\n"
        assert 'workbook_runner_info{path="plain"} 1.0' in httpx.get(f"{server.root}/metrics").text


# ---- forms -----------------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
}  # fmt: skip
EXPRESSION = {"type": "regex", "pattern": "(yes|no), [0-9]{3}[.!]"}


def as_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_answer_keeps_to_its_schema_and_ends_with_it(server, seed):
    """A model that knows nothing of JSON; its vocabulary has no token for the end."""
    asked = CHAT | {"temperature": 1.5, "seed": seed, "max_tokens": 120, "response_format": as_schema(PERSON)}
    whole = client(server).chat.completions.create(**asked).choices[0]
    found = json.loads(whole.message.content)
    assert set(found) == {"name", "age"}
    assert len(found["name"]) <= 5
    assert found["age"] in range(100)
    assert whole.finish_reason == "stop"
    chunks = [c.choices[0] for c in client(server).chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.delta.content for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == "stop"


def test_every_answer_of_several_keeps_to_an_expression_beside_free_ones(server, tiny):
    asked = ASKED | {"max_tokens": 40, "n": 3, "logprobs": 1}
    with ThreadPoolExecutor(2) as pool:
        free = pool.submit(client(server).completions.create, **ASKED)
        found = client(server).completions.create(**asked, extra_body={"response_format": EXPRESSION})
    texts = [choice.text for choice in found.choices]
    assert all(re.fullmatch(EXPRESSION["pattern"], text) for text in texts), texts
    assert len(set(texts)) > 1
    assert {choice.finish_reason for choice in found.choices} == {"stop"}
    expected = scores_of(tiny, ASKED["prompt"].encode(), texts[0].encode())  # not those of the tokens allowed
    own = [float(expected[i, token]) for i, token in enumerate(texts[0].encode())]
    assert found.choices[0].logprobs.token_logprobs == pytest.approx(own, abs=1e-4)
    assert free.result().choices[0].text == client(server).completions.create(**ASKED).choices[0].text


def test_an_object_of_json_that_is_too_long_is_cut(server):
    asked = CHAT | {"max_tokens": 1, "response_format": {"type": "json_object"}}
    cut = client(server).chat.completions.create(**asked).choices[0]
    assert cut.message.content == "{"
    assert cut.finish_reason == "length"
    plain = client(server).chat.completions.create(**CHAT, response_format={"type": "text"})
    assert plain.choices == client(server).chat.completions.create(**CHAT).choices


def test_the_end_of_a_text_is_drawn_only_where_the_form_is_complete(tiny):
    """Byte 33 is this tokenizer's end: the form decides when it may come, and that it must."""
    tokenizer = ByteTokenizer(end_ids=[33])
    with running(Threaded(PrefixEngine(tiny, Scheduler(64, 200, 8)), tokenizer, context_len=256)) as server:
        asked = ASKED | {"max_tokens": 60, "temperature": 2, "response_format": {"type": "regex", "pattern": "(ab)+"}}
        for seed in range(3):
            found = post(server, asked | {"seed": seed}).json()["choices"][0]
            assert re.fullmatch("(ab)+" if found["finish_reason"] == "stop" else "(ab)+a?", found["text"])


def test_a_file_s_tokens_keep_to_a_form(tmp_path):
    tokenizer = FileTokenizer(str(make_tokenizer(tmp_path / "tokenizer.json")), [7])
    grammar = grammar_of(ResponseFormat(type="regex", pattern="(naïve|数学) 🦜"))
    form, other = Forms(tokenizer, 310).make(grammar, 2)
    text, logits = "数学 🦜", torch.zeros(3, 310)
    for token in tokenizer.encode(text):
        fine = torch.isfinite(masked(logits, [1], [form]))
        assert fine[0].all()
        assert fine[2].all()
        assert fine[1, token]
        assert not fine[1, 7]
        form.add(token)
    assert form.is_over or torch.isfinite(masked(logits, [1], [form]))[1].nonzero().tolist() == [[7]]
    assert (other.n_accepted, other.is_over) == (0, False)
