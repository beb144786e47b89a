"""The load generator, against the book's server and against servers that misbehave."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice, pairwise

import pytest

from lib.bench import load
from lib.bench.clients import Clients, certificates
from lib.bench.load import Ask, Load, Seen, drawn, make_parser, percentiles, read_trace, summarize
from lib.given.data.corpora import language_reference
from lib.runs.flags import UsageError
from lib.runs.serving import models
from lib.runs.serving.chat import ChatTemplate
from lib.runs.serving.prefix import PrefixEngine
from lib.serving import Scheduler
from tests.house.runs.test_serve import Threaded, running

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(200)]
SHORT = ["--warm-up", "0.5", "--seconds", "2", "--prompt-words", "2", "5", "--answer-tokens", "2", "6", "--ignore-eos"]


@pytest.fixture(scope="module")
def server():
    made = Threaded(PrefixEngine(models.make_tiny(), Scheduler(64, 200, 8), lambda n: None), context_len=256, queue=50)
    made.service.template = ChatTemplate("{{ messages[0].content }}", {})
    with running(made):
        yield made


def options_of(*words):
    return make_parser().parse_args(["--url", "http://x", *words])


def test_a_load_is_a_poisson_process_that_its_seed_repeats():
    options = options_of("--prompt-words", "2", "9", "--answer-tokens", "3", "7", "--seed", "4")
    asks = list(islice(drawn(options, 50.0), 4000))
    assert asks == list(islice(drawn(options, 50.0), 4000))
    gaps = [b.at - a.at for a, b in pairwise(asks)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.08)
    assert sum(gap**2 for gap in gaps) / len(gaps) == pytest.approx(2 * mean**2, rel=0.15)  # of an exponential
    assert {ask.fields["max_tokens"] for ask in asks} == {3, 4, 5, 6, 7}
    assert {len(ask.fields["prompt"].split()) for ask in asks} == set(range(3, 11))


def test_processes_share_one_poisson_process(server, tmp_path):
    """Each sends a part of it, and none sends what another does."""
    out = tmp_path / "out.json"
    argv = ["--url", f"{server.root}/v1", "--rate", "5", *SHORT, "--processes", "2", "--out", str(out)]
    assert load.main(argv) == 0
    found = json.loads(out.read_text())["loads"]["5"]
    options = options_of("--rate", "5", *SHORT)
    assert found["requests"] == sum(0.5 <= ask.at < 2.5 for ask in islice(drawn(options, 5.0), 100))
    assert (found["answered"], found["errors"]) == (found["requests"], {})


def test_streams_are_as_many_as_asked_for(server):
    """Two of three, in one of two processes: at any moment of the window so many requests are open."""
    options = options_of("--url", f"{server.root}/v1", "--streams", "3", "--processes", "2", *SHORT)
    seen = asyncio.run(load.send(options, "fake", 0, 0))
    counted = [one for one in seen if one.ended is not None]
    assert len(counted) > 4
    assert not any(one.error for one in counted)
    moments = [0.6 + i / 10 for i in range(18)]
    assert {sum(one.left <= t and (one.ended is None or one.ended > t) for one in seen) for t in moments} <= {1, 2}
    assert any(sum(one.left <= t < (one.ended or 9) for one in seen) == 2 for t in moments)


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_the_books_server_answers_all(server, tmp_path, capsys, chat):
    out, picture = tmp_path / "out.json", tmp_path / "picture.png"
    argv = ["--url", f"{server.root}/v1", "--rate", "5", *SHORT, "--out", str(out), "--plot", str(picture), *chat]
    assert load.main(argv) == 0
    found = json.loads(out.read_text())["loads"]["5"]
    assert found["answered"] == found["requests"] > 2
    assert (found["errors"], found["unfinished"]) == ({}, 0)
    assert 0 < found["first_token_s"]["p50"] <= found["first_token_s"]["p99"] <= found["whole_s"]["p99"]
    assert found["tokens_per_s"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "requests/s" in capsys.readouterr().out


def test_a_trace_is_sent_as_it_is(server, tmp_path):
    lines = [{"at": 0.6 + 0.1 * i, "prompt": f"The {i}", "max_tokens": i + 1, "ignore_eos": True} for i in range(4)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, reversed(lines))))
    out = tmp_path / "out.json"
    argv = ["--url", f"{server.root}/v1", "--trace", str(path), "--warm-up", "0.5", "--seconds", "2"]
    assert load.main([*argv, "--out", str(out)]) == 0
    (found,) = json.loads(out.read_text())["loads"].values()
    assert found["answered"] == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "has no lines"), ("{", "line 1"), ('{"at": 1}\n5', "line 2"), ('{"prompt": "a"}', "KeyError: 'at'")],
)
def test_a_trace_that_cannot_be_read_names_the_line(tmp_path, text, words):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_trace(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "none")


def seen(at, first, last, n, ended=True, error=""):
    step = (last - first) / max(1, n - 1)
    moments = [first + i * step for i in range(n)]
    return Seen(Ask(at, {}), at, moments, n, last if ended else None, error)


def summary(*cases, limits=(1.0, 0.1)):
    made = Load(None, "m", iter(()), (10.0, 20.0), 5.0)
    made.seen = list(cases)
    return summarize(made, limits)


def test_only_the_window_counts_and_good_answers_hold_both_limits():
    found = summary(
        seen(9.9, 10.5, 12.5, 21),  # of the warm-up: its tokens arrive within the window, it does not count
        seen(10.0, 10.5, 11.5, 11),  # good
        seen(12.0, 13.5, 14.5, 11),  # a late first token
        seen(14.0, 14.5, 18.5, 11),  # slow between tokens
        seen(15.0, 15.2, 15.2, 1, error="status 500"),
        seen(19.9, 19.95, 20.95, 11, ended=False),
    )
    assert (found["requests"], found["answered"], found["unfinished"]) == (5, 3, 1)
    assert found["errors"] == {"status 500": 1}
    assert found["goodput"]["share"] == pytest.approx(1 / 5)
    assert found["goodput"]["requests_per_s"] == pytest.approx(0.1)
    assert found["first_token_s"] == pytest.approx({"p50": 0.5, "p90": 1.5, "p99": 1.5})
    assert found["tokens_per_s"] == pytest.approx((21 + 11 + 11 + 11 + 1 + 1) / 10)
    assert found["server_kept_up"]


def test_a_late_start_counts_within_the_window_alone():
    """The first requests of a process may wait for its connections, and no figure is made of them."""
    cases = [seen(at, at + 0.5, at + 1.0, 3) for at in (1.0, 11.0, 12.0)]
    for case, late in zip(cases, (0.5, 0.02, 0.03), strict=True):
        case.left = case.ask.at + late
    assert summary(*cases)["latest_start_s"] == pytest.approx(0.03)


def test_what_the_first_request_needs_is_read_before_the_clock_runs():
    """In each process of a load: reading the certificates takes longer than the next request can wait."""
    certificates.cache_clear()
    language_reference.cache_clear()
    load.prepare()
    assert certificates.cache_info().currsize == language_reference.cache_info().currsize == 1


def test_a_server_that_falls_behind_is_named():
    late = [seen(10 + i / 10, 30 + i, 31 + i, 3) for i in range(100)]
    found = summary(*late)
    assert found["open_requests"] == {"middle": 51, "end": 100}
    assert not found["server_kept_up"]
    assert "did not keep up: 51 requests were open in the window's middle, 100 at its end" in load.told(found)


def test_percentiles_are_values_that_were_seen():
    assert percentiles([]) == {}
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([float(i) for i in range(200)]) == {"p50": 100.0, "p90": 180.0, "p99": 198.0}


class Bad(BaseHTTPRequestHandler):
    """Lists a model; answers the first request with status 429, the next with an error in its stream, and so on."""

    answers = iter(())

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._say(200, b'{"data": [{"id": "bad"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say(*next(self.answers))

    def _say(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


TEXT = b'data: {"choices": [{"text": "a"}]}\n\n'


def test_what_fails_is_counted_by_its_kind(tmp_path, monkeypatch):
    cases = [
        (429, b"{}"),
        (200, TEXT + b'data: {"error": {}}\n\n'),
        (200, b"data: {\n\n"),
        (200, b"data: [DONE]\n\n"),
        (200, TEXT + b"data: [DONE]\n\n"),
    ]
    monkeypatch.setattr(Bad, "answers", iter(cases))
    path, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    path.write_text("\n".join(json.dumps({"at": 0.3 * i, "prompt": "a", "max_tokens": 1}) for i in range(1, 6)))
    bad = ThreadingHTTPServer(("127.0.0.1", 0), Bad)
    threading.Thread(target=bad.serve_forever, daemon=True).start()
    argv = ["--url", f"http://127.0.0.1:{bad.server_port}", "--trace", str(path), "--warm-up", "0.1", "--seconds", "3"]
    assert load.main([*argv, "--out", str(out)]) == 0
    bad.shutdown()
    bad.server_close()
    (found,) = json.loads(out.read_text())["loads"].values()
    assert found["errors"] == {"status 429": 1, "error in the stream": 1, "JSONDecodeError": 1, "no text": 1}
    assert found["answered"] == 1


def test_a_request_takes_a_connection_that_no_other_has(server):
    async def ask_at_once(clients, n):
        async def ask():
            async with clients.stream("GET", "models") as answer:
                await answer.aread()
                await asyncio.sleep(0.05)

        await asyncio.gather(*(ask() for _ in range(n)))
        return len({id(client) for client in clients.idle})

    async def ask_some():
        clients = Clients(make_parser().parse_args(["--url", f"{server.root}/v1"]))
        found = [await ask_at_once(clients, n) for n in (1, 3, 2)]
        await clients.close()
        return found, [client.is_closed for client in clients.idle]

    assert asyncio.run(ask_some()) == ([1, 3, 3], [True] * 3)


def test_what_is_open_after_the_drain_is_given_up():
    class Never:
        def stream(self, *_, **__):
            return self

        async def __aenter__(self):
            await asyncio.sleep(1000)

        async def __aexit__(self, *_):
            pass

    made = Load(Never(), "m", iter([Ask(0.1, {"prompt": "a"})]), (0.0, 0.3), 0.3)
    asyncio.run(asyncio.wait_for(made.run(), 60))
    assert summarize(made, (1, 1))["unfinished"] == 1
