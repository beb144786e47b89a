"""What the official client may ask for beyond text: scores, several answers, forms, and how a server is watched."""

import math

import pytest
import torch

from lib.runs.serving import models
from lib.runs.serving.chat import ChatTemplate
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.text import ByteTokenizer, FileTokenizer
from lib.serving import Scheduler
from tests.house.runs.test_serve import SPOKEN, Threaded, client, make_tokenizer, reciting, running
from tests.house.runs.test_serve_chat import PLAIN

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(200)]
ASKED = {"model": "fake", "prompt": "The for statement", "max_tokens": 12, "temperature": 0.8, "seed": 3}
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
