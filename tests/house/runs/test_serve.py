"""The server: asked over HTTP and by the official client, with faults, in processes and threads of its own."""

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch

from lib.given.data.corpora import language_reference
from lib.given.data.record import load
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.llama import LlamaConfig
from lib.given.models.serving import Request
from lib.gpt2 import GPT2
from lib.llama import Llama, generate
from lib.runs import serve
from lib.runs.flags import UsageError
from lib.runs.serving import api, models
from lib.runs.serving.api import Service
from lib.runs.serving.forms import Forms
from lib.runs.serving.jobs import Job
from lib.runs.serving.link import Link
from lib.runs.serving.metrics import Metrics
from lib.runs.serving.prefix import PrefixEngine, evict
from lib.runs.serving.schema import AskedCompletion, parse
from lib.runs.serving.text import Answer, ByteTokenizer, Characters, FileTokenizer
from lib.runs.serving.wire import Ask, Drawn, EngineFailed, Report
from lib.runs.serving.worker import Worker
from lib.serving import PrefixTree, Scheduler, generate_many
from tests.house.runs import runs_programs

ROOT = Path(__file__).resolve().parents[3]
LONG_S = 120.0  # of a start or a request on a machine that does other things too
SPOKEN = "naïve café: π ≈ 3.14, 数学, 🦜!\n" * 3
CPU = torch.device("cpu")
pytestmark = [pytest.mark.slow, pytest.mark.time_limit(200)]


class Running:
    """A server in a process of its own, and clients of it."""

    def __init__(self, *flags: str):
        command = [sys.executable, "-m", "lib.runs.serve", "--model", "tiny", "--port", "0", *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "WORKBOOK_WORLD": "reference", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        self.said = self.process.stdout.readline()
        self.root = re.search(r"http://127\.0\.0\.1:\d+", self.said)[0]

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class Threaded:
    """A server in a thread of this process, over any engine."""

    def __init__(self, engine, tokenizer=None, queue=8, key=None, context_len=64, vocab_size=256):
        here, there = multiprocessing.Pipe()
        metrics, tokenizer = Metrics(n_blocks=engine.scheduler.n_free), tokenizer or ByteTokenizer()
        self.worker = Worker(engine, queue, there, Forms(tokenizer, vocab_size))
        self.steps = threading.Thread(target=self.worker.run, daemon=True)
        self.service = Service(
            "fake", tokenizer, Link(here, queue, metrics), metrics, vocab_size=vocab_size, context_len=context_len,
            key=key,
        )  # fmt: skip
        bound = serve.open_socket("127.0.0.1", 0)
        bound.listen()  # clients may knock before the thread has begun
        self.root = f"http://127.0.0.1:{bound.getsockname()[1]}"
        self.status = None
        self.thread = threading.Thread(target=self._run, args=(bound,))
        self.steps.start()
        self.thread.start()

    def _run(self, bound):
        self.status = serve.run(self.service, bound, self.root, grace_s=5.0)

    def end(self):
        self.service.is_leaving = True  # as SIGTERM would
        self.thread.join(LONG_S)
        self.steps.join(LONG_S)


@contextlib.contextmanager
def running(server):
    try:
        yield server
    finally:
        server.end()


def client(server, key="none", **settings):
    return openai.OpenAI(base_url=f"{server.root}/v1", api_key=key, max_retries=0, timeout=LONG_S, **settings)


def post(server, body, **settings):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{server.root}/v1/completions", content=content, timeout=LONG_S, **settings)


def told_by(error: openai.APIError) -> dict[str, str]:
    """The error's fields in an answer that refuses a request."""
    assert isinstance(error.body, dict)
    return error.body


def metric(server, name):
    text = httpx.get(f"{server.root}/metrics", timeout=LONG_S).text
    return float(re.search(rf"^workbook_{name} (\S+)$", text, re.MULTILINE)[1])


def wait_for(server, **expected):
    """Ask for the metrics until they have these values; the test's own time limit ends it otherwise."""
    while {name: metric(server, name) for name in expected} != expected:
        pass


@pytest.fixture(scope="module")
def server():
    with running(Running("--queue", "80", "--max-tokens", "256")) as made:
        yield made


@pytest.fixture(scope="module")
def tiny():
    return models.make_tiny()


def alone(model, prompts, n_new):
    """What chapter 4's ``generate`` gives for prompts of equal length, greedily."""
    steps = generate(model, torch.tensor([list(prompt.encode()) for prompt in prompts]), n_new, temperature=0)
    return [bytes(row).decode(errors="replace") for row in torch.stack(list(steps), 1).tolist()]


def test_it_lists_its_model_and_is_well(server):
    assert [model.id for model in client(server).models.list()] == ["tiny"]
    assert client(server).models.retrieve("tiny").id == "tiny"
    assert httpx.get(f"{server.root}/health").json() == {"status": "ok"}
    assert server.root.startswith("http://127.0.0.1:")


def test_a_completion_is_generates_own_streaming_and_not(server, tiny):
    asked = {"model": "tiny", "prompt": "The for statement", "max_tokens": 20, "temperature": 0}
    whole = client(server).completions.create(**asked)
    assert whole.choices[0].text == alone(tiny, [asked["prompt"]], 20)[0]
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (17, 20, 37)
    options = {"include_usage": True}
    chunks = list(client(server).completions.create(**asked, stream=True, stream_options=options))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_is_server_sent_events(server):
    found = post(server, {"model": "tiny", "prompt": "an", "max_tokens": 3, "stream": True})
    assert found.headers["content-type"].startswith("text/event-stream")
    events = found.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2])


def test_sixty_four_at_once_get_what_each_gets_alone(server, tiny):
    prompts = [language_reference()[50 * i : 50 * i + 24] for i in range(64)]
    prompts = [prompt.encode("ascii", "replace").decode() for prompt in prompts]

    async def ask(theirs, i):
        asked = {"model": "tiny", "prompt": prompts[i], "max_tokens": 12, "temperature": 0}
        if i % 2:
            return (await theirs.completions.create(**asked)).choices[0].text
        return "".join([c.choices[0].text async for c in await theirs.completions.create(**asked, stream=True)])

    async def ask_all():
        root = f"{server.root}/v1"
        async with openai.AsyncOpenAI(base_url=root, api_key="none", max_retries=0, timeout=LONG_S) as theirs:
            return await asyncio.gather(*(ask(theirs, i) for i in range(64)))

    assert asyncio.run(ask_all()) == alone(tiny, prompts, 12)


def test_a_seed_repeats_an_answer_and_its_choices_differ(server):
    def ask(seed, **more):
        asked = {"model": "tiny", "prompt": "The ", "max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": seed}
        return [choice.text for choice in client(server).completions.create(**asked, **more).choices]

    assert ask(1) == ask(1) != ask(2)
    assert ask(1, n=3)[0] == ask(1)[0]
    assert len(set(ask(1, n=3))) == 3


def test_several_prompts_echo_and_tokens(server):
    asked = {"model": "tiny", "max_tokens": 5, "temperature": 0}
    plain = client(server).completions.create(**asked, prompt=["The", "an"], n=2)
    texts = [choice.text for choice in plain.choices]
    assert [choice.index for choice in plain.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert plain.usage.prompt_tokens == 5
    tokens = client(server).completions.create(**asked, prompt=[list(b"The"), list(b"an")], echo=True)
    assert [choice.text for choice in tokens.choices] == ["The" + texts[0], "an" + texts[2]]
    stream = client(server).completions.create(**asked, prompt="The", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "The" + texts[0]


def test_a_stop_string_ends_an_answer_and_is_not_in_it(server):
    asked = {"model": "tiny", "prompt": "The for statement", "max_tokens": 40, "temperature": 0.8, "seed": 4}
    whole = client(server).completions.create(**asked).choices[0].text
    stop = whole[17:20]
    cut = client(server).completions.create(**asked, stop=["not there", stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 40
    chunks = list(client(server).completions.create(**asked, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.choices[0].text


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_vanishes_gives_its_blocks_back(server, streams):
    n_blocks, before = metric(server, "blocks"), metric(server, "generated_tokens_total")
    body = json.dumps({"model": "tiny", "prompt": "The", "max_tokens": 1000, "stream": streams}).encode()
    host, port = server.root.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as gone:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        gone.sendall(head.encode() + body)
        wait_for(server, requests_running=1)
        assert metric(server, "blocks_free") < n_blocks
    wait_for(server, requests_running=0, requests_waiting=0, blocks_free=n_blocks)
    assert 0 < metric(server, "generated_tokens_total") - before < 1000


WRONG = {
    "{": (None, "no valid request"),
    "[]": (None, "object"),
    "\xff": (None, "no valid request"),
    '{"prompt": "a"}': ("model", "required"),
    '{"model": "tiny"}': ("prompt", "required"),
    '{"model": "tiny", "prompt": 5}': ("prompt", "got 5"),
    '{"model": "tiny", "prompt": ""}': ("prompt", "at least one token"),
    '{"model": "tiny", "prompt": []}': ("prompt", "expected a string"),
    '{"model": "tiny", "prompt": ["a", 1]}': ("prompt", "expected a string"),
    '{"model": "tiny", "prompt": [256]}': ("prompt", "token 256"),
    '{"model": "tiny", "prompt": "a", "max_tokens": 1024}': ("max_tokens", "1024"),
    '{"model": "tiny", "prompt": "a", "max_tokens": 0}': ("max_tokens", "greater"),
    '{"model": "tiny", "prompt": "a", "max_tokens": "5"}': ("max_tokens", "got '5'"),
    '{"model": "tiny", "prompt": "a", "max_tokens": true}': ("max_tokens", "integer"),
    '{"model": "tiny", "prompt": "a", "max_tokens": 2.0}': ("max_tokens", "integer"),
    '{"model": "tiny", "prompt": "a", "max_tokens": 1%s}' % ("0" * 90): ("max_tokens", "0… new ones"),
    '{"model": "tiny", "prompt": "%s"}' % ("a" * 1024): ("prompt", "prompt of 1024 tokens"),
    '{"model": "tiny", "prompt": [%s"a"]}' % ('"a", ' * 80): ("prompt", "queue of 80"),
    '{"model": "tiny", "prompt": "a", "temperature": -1}': ("temperature", "got -1"),
    '{"model": "tiny", "prompt": "a", "temperature": NaN}': ("temperature", ""),
    '{"model": "tiny", "prompt": "a", "top_p": 0}': ("top_p", "greater"),
    '{"model": "tiny", "prompt": "a", "n": 0}': ("n", "greater"),
    '{"model": "tiny", "prompt": "a", "n": 100}': ("n", "queue"),
    '{"model": "tiny", "prompt": "a", "stop": ["a", "b", "c", "d", "e"]}': ("stop", "at most 4"),
    '{"model": "tiny", "prompt": "a", "stop": ""}': ("stop", "not empty"),
    '{"model": "tiny", "prompt": "a", "logprobs": 21}': ("logprobs", "20"),
    '{"model": "tiny", "prompt": "a", "logprobs": 1, "echo": true}': ("logprobs", "not with echo"),
    '{"model": "tiny", "prompt": "a", "repetition_penalty": 1.1}': ("repetition_penalty", "not supported"),
    '{"model": "tiny", "prompt": "a", "n": 3, "best_of": 2}': ("best_of", "less than n = 3"),
    '{"model": "tiny", "prompt": "a", "best_of": 2, "stream": true}': ("best_of", "not with stream"),
    '{"model": "tiny", "prompt": "a", "best_of": 100}': ("best_of", "queue"),
    '{"model": "tiny", "prompt": "a", "max_token": 1}': ("max_token", "no such field"),
    '{"model": "tiny", "prompt": "a", "suffix": "b"}': ("suffix", "not supported"),
    '{"model": "tiny", "prompt": "a", "logit_bias": {"5": 1}}': ("logit_bias", "not supported"),
    '{"model": "tiny", "prompt": "a", "seed": 1.5}': ("seed", "integer"),
    '{"model": "tiny", "prompt": "a", "echo": "yes"}': ("echo", "boolean"),
    '{"model": "tiny", "prompt": "a", "user": "%s", "n": 0}' % ("u" * 200): ("n", "greater"),
    '{"model": "tiny", "prompt": "a", "stream_options": {"include_usage": true}}': ("stream_options", "stream"),
}


def test_what_is_wrong_with_a_request_is_one_error(server):
    for body, (param, words) in WRONG.items():
        found = post(server, body.encode("latin-1"))
        error = found.json()["error"]
        assert found.status_code == 400, body
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", param), body
        assert words in error["message"], error["message"]
        assert len(error["message"]) < 300, error["message"]
    assert metric(server, "requests_running") == 0


def test_what_a_load_generator_adds_is_taken(server):
    added = {"ignore_eos": True, "repetition_penalty": 1.0, "min_p": 0.0, "min_tokens": 0, "logprobs": None}
    answer = client(server).completions.create(model="tiny", prompt="a", max_tokens=3, extra_body=added)
    assert answer.usage.completion_tokens == 3


def test_ignore_eos_goes_on_after_a_tokenizers_end():
    service = Service("fake", ByteTokenizer(end_ids=[7]), None, None, vocab_size=256, context_len=32)
    for more, expected in (("", {7}), (', "ignore_eos": false', {7}), (', "ignore_eos": true', set())):
        asked = parse(b'{"model": "tiny", "prompt": "a"%s}' % more.encode(), AskedCompletion)
        assert service.prepare(asked)[0].end_ids == expected


def test_a_temperature_next_to_0_is_0(server):
    asked = {"model": "tiny", "prompt": "The for statement", "max_tokens": 8}
    texts = [client(server).completions.create(**asked, temperature=t).choices[0].text for t in (0, 1e-300, 1e-45)]
    assert texts == texts[:1] * 3


def test_prompts_that_begin_alike_are_computed_once(server, tiny):
    begin = "No other test begins so. " + language_reference()[:175].encode("ascii", "replace").decode()
    prompts = [begin + end for end in ("a", "b")]
    before = metric(server, "prefix_tokens_found_total")
    for prompt in [*prompts, prompts[0]]:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0}
        assert client(server).completions.create(**asked).choices[0].text == alone(tiny, [prompt], 20)[0]
    assert metric(server, "prefix_tokens_found_total") - before == 2 * 192


def send(server, text, wait=True):
    """The answer to raw bytes, or nothing if the client does not wait."""
    host, port = server.root.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as made:
        made.settimeout(LONG_S)
        made.sendall(text)
        return made.recv(100_000) if wait else b""


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"


def test_a_body_that_never_ends_is_408_and_one_that_is_cut_off_is_no_fault(monkeypatch, capfd):
    monkeypatch.setattr(api, "BODY_S", 0.5)
    engine = Fake()
    with running(Threaded(engine)) as server:
        assert b"408" in send(server, HEAD + b"{").splitlines()[0]
        send(server, HEAD + b"{", wait=False)
        while server.service.n_open:
            pass
        assert 'responses_total{status="408"} 1' in httpx.get(f"{server.root}/metrics").text
    assert "Traceback" not in capfd.readouterr().err


def test_garbage_collections_pass_over_what_exists_at_the_start():
    gc.unfreeze()
    engine = PrefixEngine(models.make_tiny(), Scheduler(64, 200, 8), lambda n: None)
    with running(Threaded(engine)) as made:
        assert post(made, {"model": "fake", "prompt": "a", "max_tokens": 1}).status_code == 200
        assert gc.get_freeze_count() > 0


def test_what_is_not_there_is_404(server):
    with pytest.raises(openai.NotFoundError) as caught:
        client(server).completions.create(model="gpt-9", prompt="a")
    body = told_by(caught.value)
    assert (body["param"], body["code"]) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client(server).models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError):
        client(server).embeddings.create(model="tiny", input="a")
    assert httpx.get(f"{server.root}/v1/completions").status_code == 405
    slash = httpx.post(f"{server.root}/v1/completions/", json={"model": "tiny", "prompt": "a"})
    assert (slash.status_code, slash.json()["error"]["type"]) == (404, "invalid_request_error")
    assert post(server, b"x" * (17 * 2**20)).status_code == 413


def test_metrics_are_prometheus_text(server):
    from prometheus_client.parser import text_string_to_metric_families

    found = httpx.get(f"{server.root}/metrics")
    families = {family.name: family for family in text_string_to_metric_families(found.text)}
    assert found.headers["content-type"].startswith("text/plain")
    assert families["workbook_generated_tokens"].type == "counter"
    assert families["workbook_time_to_first_token_seconds"].type == "histogram"
    assert {"workbook_requests_running", "workbook_requests_waiting", "workbook_blocks_free"} <= set(families)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_right_after_the_first_line_is_heeded(sent):
    with running(Running()) as server:
        server.process.send_signal(sent)
        assert server.process.wait(LONG_S) == 0


def test_sigterm_completes_what_streams_and_refuses_what_is_new(capfd):
    with running(Running()) as server:
        stream = client(server).completions.create(model="tiny", prompt="The", max_tokens=600, stream=True)
        chunks = iter(stream)
        text = next(chunks).choices[0].text
        server.process.send_signal(signal.SIGTERM)
        while (refused := post(server, {"model": "tiny", "prompt": "a", "max_tokens": 1})).status_code == 200:
            pass
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "leaving"
        rest = [chunk.choices[0] for chunk in chunks]
        assert rest[-1].finish_reason == "length"
        assert len((text + "".join(choice.text for choice in rest)).encode()) >= 600
        assert server.process.wait(LONG_S) == 0
    assert "leaked" not in capfd.readouterr().err  # as Triton says of its types if they outlive the process


def test_an_engine_s_process_that_is_killed_ends_its_requests_and_the_server():
    with running(Running()) as server:
        stream = client(server).completions.create(model="tiny", prompt="The", max_tokens=900, stream=True)
        next(iter(stream))
        (engine,) = [p for p in psutil.Process(server.process.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        engine.kill()
        with pytest.raises(openai.APIError, match=r"engine's process has ended: signal 9 \(SIGKILL\) killed it"):
            list(stream)
        assert server.process.wait(LONG_S) == 1


class Fake:
    """An engine whose requests all run, and get one token a step once the gate is open."""

    def __init__(self, tokens=b"abcdefgh" * 100, fails_at=None):
        self.tokens, self.fails_at, self.gate, self.n_steps = tokens, fails_at, threading.Event(), 0
        self.scheduler = SimpleNamespace(waiting=[], running={}, n_free=8)

    @property
    def is_busy(self):
        return bool(self.scheduler.waiting or self.scheduler.running)

    def submit(self, request):
        self.scheduler.waiting.append(request)

    def cancel(self, request):
        return self.scheduler.running.pop(request, None) is not None

    def step(self):
        self.gate.wait()
        if self.n_steps == self.fails_at:
            raise ArithmeticError("no more numbers")
        self.n_steps += 1
        new = []
        self.scheduler.running |= dict.fromkeys(self.scheduler.waiting, 0)
        self.scheduler.waiting.clear()
        for request, n in list(self.scheduler.running.items()):
            new.append((request, self.tokens[n]))
            self.scheduler.running[request] = n + 1
            if n + 1 == request.max_new_tokens:
                del self.scheduler.running[request]
        return new


def test_a_full_queue_is_429_and_says_when_to_come_back():
    with running(Threaded(engine := Fake(), queue=2)) as server:
        answers = []
        asked = {"model": "fake", "prompt": ["a", "b"], "max_tokens": 3}
        first = threading.Thread(target=lambda: answers.append(post(server, asked)))
        first.start()
        wait_for(server, requests_waiting=2)
        threads = [threading.Thread(target=lambda: answers.append(post(server, asked))) for _ in range(3)]
        for thread in threads:
            thread.start()  # they reach the engine after its step, which waits for the gate
        while server.worker._inbox.qsize() < 3:
            pass
        engine.gate.set()
        for thread in [first, *threads]:
            thread.join()
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200, 200, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"


def test_a_key_is_asked_for():
    engine = Fake()
    engine.gate.set()
    with running(Threaded(engine, key="sésame")) as server:
        ask = {"model": "fake", "prompt": "a", "max_tokens": 3}
        assert post(server, ask).status_code == 401
        with pytest.raises(openai.AuthenticationError) as caught:
            client(server, key="open").models.list()
        assert told_by(caught.value)["code"] == "invalid_api_key"
        found = post(server, ask, headers={b"Authorization": "Bearer sésame".encode()})
        assert found.json()["choices"][0]["text"] == "abc"
        assert httpx.get(f"{server.root}/health").status_code == 200


@pytest.mark.parametrize("streams", [True, False])
def test_an_engine_that_fails_ends_its_requests_and_the_server(streams, capfd):
    with running(Threaded(engine := Fake(fails_at=2))) as server:
        asked = {"model": "fake", "prompt": "a", "max_tokens": 9}
        engine.gate.set()
        if streams:
            with pytest.raises(openai.APIError, match="no more numbers"):
                list(client(server).completions.create(**asked, stream=True))
        else:
            with pytest.raises(openai.InternalServerError, match="no more numbers"):
                client(server).completions.create(**asked)
        server.thread.join(LONG_S)
        assert server.status == 1
    assert "error: the engine failed: ArithmeticError: no more numbers" in capfd.readouterr().err


def users_of(engine):
    """How many users each block should have: the sequences that list it, and the tree."""
    users, open_ = [0] * engine.cache.n_blocks, list(engine.tree.root.children.values())
    for table in engine.cache.tables.values():
        for block in table:
            users[block] += 1
    while open_:
        node = open_.pop()
        users[node.block] += 1
        open_ += node.children.values()
    return users


@pytest.mark.parametrize(("n_blocks", "max_tokens"), [(60, 64), (11, 16), (9, 5)])
def test_shared_blocks_change_no_token_and_none_is_lost(n_blocks, max_tokens):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, context_len=64)
    model, rng = Llama(config).double().eval(), random.Random(n_blocks)
    found: list[int] = []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3 if parameter.dim() > 1 else 1  # so that the next token is no near tie
    engine = PrefixEngine(model, Scheduler(max_tokens, n_blocks, 4), found.append)
    begins = [[rng.randrange(64) for _ in range(16)] for _ in range(3)]
    requests = [
        Request(rng.choice(begins)[: rng.randint(1, 16)] + [rng.randrange(3)] * rng.randint(0, 4), rng.randint(1, 12),
                temperature=0.8 * (i % 2), seed=i)
        for i in range(40)
    ]  # fmt: skip
    tokens: dict[Request, list[int]] = {request: [] for request in requests}
    waiting, cancelled = list(requests), set[Request]()
    while waiting or engine.is_busy:
        if waiting and rng.random() < 0.5:
            engine.submit(waiting.pop(0))
        if rng.random() < 0.05:
            request = rng.choice(requests)
            cancelled |= {request} if engine.cancel(request) else set()
        for request, token in engine.step():
            tokens[request].append(token)
        assert engine.cache.allocator.n_users == users_of(engine)
    for request in requests:
        own = [token for _, token in generate_many(model, [request], Scheduler(64, 60, 4))]
        assert tokens[request] == (own[: len(tokens[request])] if request in cancelled else own)
    assert sum(found) > 0
    assert engine.acquired == engine.sequences == engine.cache.tables == {}
    for block in engine.tree.evict(n_blocks):
        engine.cache.allocator.free(block)
    assert engine.cache.allocator.n_free == n_blocks


def reciting(text: str) -> GPT2:
    """A GPT-2 of bytes that says a text, whatever its prompt: its positions, not its blocks, choose the next token."""
    said = text.encode()
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=256, context_len=len(said), dim=64, n_layers=1, n_heads=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.zero_()
        wte = torch.randn(256, 64)
        wte = wte - wte.mean(1, keepdim=True)
        wte = wte / wte.norm(dim=1, keepdim=True)
        model.get_parameter("wte.weight").copy_(wte)
        model.get_parameter("wpe.weight").copy_(30 * wte[[*list(said[1:]), 0]])
    return model.eval()


def test_characters_and_stop_strings_that_tokens_divide():
    from lib.serving import Engine

    model, said = reciting(SPOKEN), SPOKEN.encode()
    engine = Engine(model, Scheduler(64, 32, 4))
    with running(Threaded(engine, context_len=len(said))) as server:
        ask = {"model": "fake", "prompt": SPOKEN[0], "temperature": 0, "max_tokens": len(said) - 1}
        pieces = [c.choices[0].text for c in client(server).completions.create(**ask, stream=True)]
        assert "".join(pieces) == SPOKEN[1:]
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
        for stop in ("π ≈ 3", "学", ", 🦜", "3.14, 数"):
            whole = client(server).completions.create(**ask, stop=stop).choices[0]
            parts = [c.choices[0] for c in client(server).completions.create(**ask, stop=[stop, "zz"], stream=True)]
            assert whole.text == "".join(part.text for part in parts) == SPOKEN[1 : SPOKEN.index(stop)]
            assert whole.finish_reason == parts[-1].finish_reason == "stop"
        ask["max_tokens"] = SPOKEN[: SPOKEN.index("🦜")].encode().__len__() + 1  # two bytes of four
        cut = client(server).completions.create(**ask).choices[0].text
        assert cut == SPOKEN[1 : SPOKEN.index("🦜")] + "\N{REPLACEMENT CHARACTER}"


def test_an_answer_is_the_text_up_to_the_first_stop_however_it_is_divided():
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        said = bytes(torch.tensor(list(b"ab\xc3\xa9"))[torch.randint(4, (24,), generator=generator)].tolist())
        text = said.decode(errors="replace")
        stops = ["ab", "éb", "bba", "aaa"][trial % 4 :]
        answer = Answer(Characters(ByteTokenizer().decode), stops)
        found = "".join([*map(answer.add, said), answer.finish()])
        ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        assert found == (text[: min(ends)[1]] if ends else text), (said, stops)
        assert answer.is_stopped == bool(ends)


def test_tokens_that_come_together_are_those_that_come_one_by_one():
    chance = random.Random(0)

    def fed(said, ends, stops, scored, size):
        job = Job([Ask([1], 12, 0.0)], [Answer(Characters(ByteTokenizer().decode), stops)])
        tokens = [Drawn(token, -0.5, []) if scored else token for token in said]
        reports = [Report(new=[(7, 0, token, ends and i == len(tokens) - 1)]) for i, token in enumerate(tokens)]
        for begin in range(0, len(reports), size):
            ((name, (new, is_end)),) = Report.joined(reports[begin : begin + size]).answers().items()
            assert name == (7, 0)
            if job.unfinished:
                job.add(0, new, is_end)
        return job.waiting[0], job.n_tokens, job.logprobs, job.unfinished

    for trial in range(100):
        said, stops = chance.choices("aabb\N{LATIN SMALL LETTER E WITH ACUTE}", k=9), ["ab", "bba"][: trial % 3]
        given = "".join(said).encode()[:12], trial % 2 == 0, stops, trial % 5 == 0
        one_by_one = fed(*given, 1)
        assert all(fed(*given, size) == one_by_one for size in (2, 3, 12)), given


def test_a_fault_lets_out_the_text_of_the_tokens_before_it():
    def decode(tokens):
        if tokens[-1:] == [0]:
            raise KeyError(0)
        return bytes(tokens).decode()

    for said, left in ((b"ab\0c", ["ab"]), (b"\0ab", [])):
        job = Job([Ask([1], 9, 0.0)], [Answer(Characters(decode))])
        with pytest.raises(KeyError):
            job.add(0, [*said], False)
        assert [piece.text for piece in job.waiting.values()] == left


def test_reports_are_joined_in_order():
    fault, refused = EngineFailed("over"), ValueError("no")
    first = Report([(1, None)], [(1, 0, 5, False)], [], None, {"steps": 1}, {"waiting": 3, "running": 1})
    then = Report(
        [(2, refused)], [(1, 1, 6, False), (1, 0, 7, True)], [(2, refused)], fault, {"steps": 1}, {"waiting": 2}
    )
    found = Report.joined([first, then])
    assert (found.accepted, found.ended) == ([(1, None), (2, refused)], [(2, refused)])
    assert found.answers() == {(1, 0): ([5, 7], True), (1, 1): ([6], False)}
    assert (found.fault, found.counts, found.levels) == (fault, {"steps": 2}, {"waiting": 2, "running": 1})
    assert len(first.new) == 1


def make_tokenizer(path: Path, vocab_size: int = 300) -> Path:
    """A ``tokenizer.json`` of byte-level pairs."""
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    made.train_from_iterator([SPOKEN, language_reference()[:20_000]], vocab_size=vocab_size, show_progress=False)
    made.save(str(path))
    return path


def test_a_file_tokenizer_gives_whole_characters(tmp_path):
    tokenizer = FileTokenizer(str(make_tokenizer(tmp_path / "tokenizer.json")))
    ids = tokenizer.encode(SPOKEN)
    assert len(ids) < len(SPOKEN.encode())
    characters = Characters(tokenizer.decode)
    pieces = [characters.add(token) for token in ids]
    assert "".join(pieces) + characters.finish() == SPOKEN
    assert "" in pieces
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    half = Characters(tokenizer.decode)
    half.add(tokenizer.encode("🦜")[0])
    assert half.finish() in ("", "\N{REPLACEMENT CHARACTER}")


def write_theirs(kind: str, folder: Path, **more):
    """A small random model of Transformers, with a tokenizer, in a folder."""
    import transformers

    make_tokenizer(folder / "tokenizer.json")
    torch.manual_seed(0)
    theirs: transformers.PreTrainedModel
    if kind == "gpt2":
        gpt2 = transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2, **more)
        theirs = transformers.GPT2LMHeadModel(gpt2)
    else:
        config = transformers.LlamaConfig(
            vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, **{"rope_theta": 5000.0} | more,
        )  # fmt: skip
        theirs = transformers.LlamaForCausalLM(config)
    theirs.eval()
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize(
    ("kind", "more"), [("gpt2", {}), ("llama", {}), ("llama", {"tie_word_embeddings": True, "eos_token_id": [7, 9]})]
)
def test_a_folder_of_transformers_gives_its_own_tokens(kind, more, tmp_path):
    theirs = write_theirs(kind, tmp_path, **more)
    served = models.load(str(tmp_path), None, None, torch.float32, CPU)
    tokens = served.tokenizer.encode("The for statement")
    ids = torch.tensor([tokens])
    expected = theirs.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    new = [token for _, token in generate_many(served.model, [Request(tokens, 12)], Scheduler(64, 16, 4))]
    assert new == expected[0, len(tokens) :].tolist()
    assert served.name == tmp_path.name
    if more:
        assert served.tokenizer.end_ids == {7, 9}


def test_a_folder_that_does_not_fit_is_one_line(tmp_path):
    def why(folder, tokenizer=None):
        with pytest.raises(UsageError) as caught:
            models.load(str(folder), None, tokenizer, torch.float32, CPU)
        return str(caught.value)

    assert "no such folder" in why(tmp_path / "nowhere")
    assert "a checkpoint of lib.runs" in why(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "no valid JSON" in why(tmp_path) or "not valid JSON" in why(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "'bert', expected gemma2 or gemma3_text or gpt2 or gpt_oss or llama or olmo3" in why(tmp_path)
    llama = tmp_path / "llama"
    llama.mkdir()
    write_theirs("llama", llama)
    settings = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(settings | {"hidden_act": "gelu"}))
    assert "hidden_act = 'gelu'" in why(llama)
    (llama / "config.json").write_text(json.dumps(settings | {"vocab_size": 200}))
    assert "wrong shape" in why(llama)
    (llama / "config.json").write_text(json.dumps(settings))
    assert "expected bytes, gpt2, or a file" in why(llama, "words")
    (llama / "tokenizer.json").unlink()
    assert "no tokenizer.json" in why(llama)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_checkpoint_of_a_run_is_served(strategy, tmp_path):
    run = (
        f"gpt2 --batch 4 --steps 2 --data synthetic --items 8 --length 16 --strategy {strategy} --checkpoint "
        f"{tmp_path}/run"
    )
    assert runs_programs.run_all(0, 1, [run]) == [(0, "")]
    served = models.load(f"{tmp_path}/run", "mine", None, torch.float32, CPU)
    assert served.name == "mine"
    tokens = served.tokenizer.encode("The")
    expected = served.model(torch.tensor([tokens]))[0][0, -1].argmax()
    [(_, token)] = generate_many(served.model, [Request(tokens, 1)], Scheduler(16, 4, 4))
    assert token == expected


def test_a_checkpoint_of_images_is_refused(tmp_path):
    run = f"vit --batch 4 --steps 1 --data synthetic --items 8 --checkpoint {tmp_path}"
    assert runs_programs.run_all(0, 1, [run]) == [(0, "")]
    with pytest.raises(UsageError, match="ViTTask; expected one of GPT2Task"):
        models.load(str(tmp_path), None, None, torch.float32, CPU)


def test_a_wrong_command_is_one_line(capfd):
    with serve.open_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        for flags in (["--model", "tiny", "--port", port], ["--model", "tiny", "--port", "99999"], [],
                      ["--model", "tiny", "--queue", "0"], ["--model", "tiny", "--host", "203.0.113.7"],
                      ["--model", "tiny", "--port", "0", "--tokenizer", "/nowhere"]):  # fmt: skip
            assert serve.main(flags) == 2, flags
            said = capfd.readouterr().err.strip().splitlines()
            assert len([line for line in said if line.startswith("error: ")]) == 1, said


def test_the_load_test_measures_all_three(tmp_path, monkeypatch):
    from lib.bench import serving

    monkeypatch.setattr(sys, "argv", ["serving", "--tiny", "--device", "cpu", "--folder", str(tmp_path)])
    serving.main()
    found = load("serving", tmp_path)["results"]["requests_per_s"]
    assert list(found) == ["50", "1000"]
    for loads in found.values():
        assert list(loads) == list(serving.COMPETITORS)
        for numbers in loads.values():
            assert numbers["tokens_per_s"] > 0
            assert 0 < numbers["first_token_s"]["median"] <= numbers["whole_s"]["p90"]
            assert numbers["between_tokens_s"]["median"] >= 0


def test_many_blocks_are_evicted_in_the_tree_s_own_order():
    chance = random.Random(0)

    def grown() -> Any:  # a stub's attributes are not declared
        chance.seed(1)
        tree = PrefixTree(2)
        for first in range(0, 300, 10):
            tokens = [chance.randrange(3) for _ in range(2 * chance.randint(1, 5))]
            tree.insert(tokens, range(first, first + len(tokens) // 2))
        tree.acquire([0, 1, 2, 2])
        tree.acquire(tokens)
        return tree

    one_by_one, at_once = grown(), grown()
    for n in (0, 1, 7, 4, 500):
        assert evict(at_once, n) == one_by_one.evict(n)
    assert at_once.root.leaves()
