"""Chats over HTTP, by the official client; the templates beside Transformers' own rendering; and the page at /."""

import json
import time

import httpx
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from lib.given.models.serving import Request
from lib.runs.flags import UsageError
from lib.runs.serving import models
from lib.runs.serving.chat import ChatTemplate, read_template
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.schema import ApiError
from lib.serving import Scheduler, generate_many
from tests.house.browsing import chromium, is_foreign
from tests.house.runs.test_serve import CPU, LONG_S, Threaded, client, metric, running, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(200)]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <b> & 'c'? 🦜"},
    {"role": "assistant", "content": "A tag."},
    {"role": "user", "content": "\nAnd a loop?  "},
]
TEMPLATES = {
    "ChatML": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "white space and tojson": "{{ bos_token }}\n{%- for m in messages %}\n    {%- if m.role == 'user' %}\n"
    "[{{ m.content | trim | tojson }}]\n    {%- else %}\n{{ m | tojson(indent=2) }}{{ eos_token }}\n"
    "    {%- endif %}\n{%- endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tools and documents are none": "{{ tools is none }} {{ documents is none }} {{ messages | length }}",
}


def folder_of(tmp_path, template, **more):
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | more), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gives_transformers_text(tmp_path, name):
    """Theirs is a tokenizer with the same template and the same special tokens."""
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE()), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATES[name]
    )
    expected = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    theirs.save_pretrained(tmp_path)
    assert read_template(tmp_path).render(TALK) == expected


def test_where_a_template_is_found(tmp_path):
    assert read_template(tmp_path) is None
    assert read_template(folder_of(tmp_path, None)) is None
    assert read_template(folder_of(tmp_path, "{{ eos_token }}")).render(TALK) == "</s>"
    several = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    assert read_template(folder_of(tmp_path, several)).render(TALK) == "b"
    assert read_template(folder_of(tmp_path, several[:1])) is None
    (tmp_path / "chat_template.jinja").write_text("own file {{ bos_token }}")
    assert read_template(tmp_path).render(TALK) == "own file <s>"


@pytest.mark.parametrize("template", ["{% for %}", 5, [5], [{"name": "default"}]])
def test_a_template_that_cannot_be_read_is_one_line(tmp_path, template):
    with pytest.raises(UsageError, match="chat template cannot be read") as caught:
        read_template(folder_of(tmp_path, template))
    assert "\n" not in str(caught.value)
    assert "tokenizer_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses them: roles must alternate"),
        ("{{ messages[9].content.x }}", "fails on them"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "range"),
        ("{{ raise_exception('x' * 10000) }}", "…"),
    ],
)
def test_what_a_template_raises_is_the_clients_error(source, words):
    with pytest.raises(ApiError) as caught:
        ChatTemplate(source, {}).render(TALK)
    error = caught.value.body["error"]
    assert (caught.value.status, error["param"], error["code"]) == (400, "messages", "chat_template")
    assert words in error["message"]
    assert len(error["message"]) < 400


@pytest.fixture(scope="module")
def tiny():
    return models.make_tiny()


@pytest.fixture(scope="module")
def server(tiny):
    made = Threaded(PrefixEngine(tiny, Scheduler(64, 200, 8), lambda n: None), context_len=256, queue=20)
    made.service.template = ChatTemplate(PLAIN, {})
    with running(made):
        yield made


def alone(tiny, text, n_new, **more):
    """The engine's answer to a prompt by itself."""
    request = Request(list(text.encode()), n_new, **{"temperature": 0.0} | more)
    new = [token for _, token in generate_many(tiny, [request], Scheduler(64, 200, 8))]
    return bytes(new).decode(errors="replace")


def rendered(messages):
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"


def test_a_chat_is_the_completion_of_its_rendered_text(server, tiny):
    asked = {"model": "fake", "messages": TALK, "max_tokens": 20, "temperature": 0}
    whole = client(server).chat.completions.create(**asked)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == alone(tiny, rendered(TALK), 20)
    assert whole.choices[0].finish_reason == "length"
    n_prompt = len(rendered(TALK).encode())
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (n_prompt, 20)
    newer = {k: v for k, v in asked.items() if k != "max_tokens"} | {"max_completion_tokens": 20}
    assert client(server).chat.completions.create(**newer).choices == whole.choices


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(server, tiny):
    asked = {"model": "fake", "messages": TALK[:2], "max_tokens": 12, "temperature": 0, "n": 2}
    options = {"include_usage": True}
    chunks = list(client(server).chat.completions.create(**asked, stream=True, stream_options=options))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1].usage.completion_tokens == 24
    for i in range(2):
        parts = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == i]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.delta.content for part in parts) == alone(tiny, rendered(TALK[:2]), 12)
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_parts_of_a_text_are_joined_and_an_answer_may_fill_the_context(server):
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    asked = {"model": "fake", "temperature": 0}
    once, twice = (
        client(server).chat.completions.create(**asked, messages=[{"role": "user", "content": content}])
        for content in (parts, "What is it?")
    )
    assert once.choices == twice.choices
    assert once.usage.total_tokens == 256


USER = '{"model": "fake", "messages": [{"role": "user", "content": "a"}], '
WRONG = {
    '{"model": "fake"}': ("messages", "required"),
    '{"model": "fake", "messages": []}': ("messages", "at least 1"),
    '{"model": "fake", "messages": "hello"}': ("messages", "array"),
    '{"model": "fake", "messages": [{"role": "tool", "content": "a"}]}': ("messages.0.role", "'user'"),
    '{"model": "fake", "messages": [{"role": "user"}]}': ("messages.0.content", "required"),
    '{"model": "fake", "messages": [{"role": "user", "content": 5}]}': ("messages.0.content", "a list of parts"),
    '{"model": "fake", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}': (
        "messages.0.content",
        "a list of parts",
    ),
    '{"model": "fake", "messages": [{"role": "user", "content": "a", "tool_calls": []}]}': (
        "messages.0.tool_calls",
        "no such field",
    ),
    USER + '"tools": [{"type": "function"}]}': (
        "tools",
        "not supported",
    ),
    USER + '"top_logprobs": 2}': ("top_logprobs", "only with logprobs"),
    USER + '"logprobs": true, "top_logprobs": 21}': ("top_logprobs", "20"),
    USER + '"response_format": {"type": "xml"}}': ("response_format.type", "'json_schema'"),
    USER + '"response_format": {"type": "json_schema"}}': ("response_format", "json_schema if, and only if"),
    USER + '"response_format": {"type": "text", "pattern": "a"}}': ("response_format", "pattern if, and only if"),
    USER + '"response_format": {"type": "regex", "pattern": "("}}': ("response_format", "regex"),
    USER + '"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}': (
        "response_format",
        "type",
    ),
    USER + '"prompt": "a"}': ("prompt", "no such field"),
    '{"model": "fake", "messages": [{"role": "user", "content": "%s"}]}' % ("a" * 300): ("messages", "context of 256"),
    '{"model": "fake", "messages": [{"role": "user", "content": "a\\ud800"}]}': ("messages.0.content", "surrogate"),
    '{"model": "other", "messages": [{"role": "user", "content": "a"}]}': ("model", "no model"),
}


def test_what_is_wrong_with_a_chat_is_one_error(server):
    for body, (param, words) in WRONG.items():
        found = httpx.post(f"{server.root}/v1/chat/completions", content=body.encode(), timeout=LONG_S)
        error = found.json()["error"]
        assert found.status_code == (404 if param == "model" else 400), body
        assert error["param"] == param, (body, error)
        assert words in error["message"], error["message"]
        assert "\n" not in error["message"]
    assert metric(server, "requests_running") == 0


def test_a_model_without_a_template_says_so_and_its_card_too(server):
    template, server.service.template = server.service.template, None
    try:
        asked = {"model": "fake", "messages": TALK}
        found = httpx.post(f"{server.root}/v1/chat/completions", json=asked, timeout=LONG_S)
        assert found.status_code == 400
        assert "'fake' has no chat template; ask /v1/completions" in found.json()["error"]["message"]
        assert httpx.get(f"{server.root}/v1/models/fake").json()["has_chat_template"] is False
    finally:
        server.service.template = template
    assert httpx.get(f"{server.root}/v1/models/fake").json()["has_chat_template"] is True


def test_a_folder_of_transformers_chats_as_its_own_library_does(tmp_path):
    """The rendered text is encoded once: its special tokens become one token each, and nothing is put before it."""
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256, bos_token_id=256, eos_token_id=258,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bare, chat_template=TEMPLATES["ChatML"])
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "<|im_end|>"})
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    assert isinstance(ids, torch.Tensor)
    new = theirs.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[0, ids.shape[1] :]
    served = models.load(str(tmp_path), None, None, torch.float32, CPU)
    engine = PrefixEngine(served.model, Scheduler(64, 100, 8), lambda n: None)
    made = Threaded(engine, tokenizer=served.tokenizer, vocab_size=300, context_len=256)
    made.service.template = served.template
    with running(made) as server:
        asked = {"model": "fake", "messages": TALK, "max_tokens": 8, "temperature": 0}
        answer = client(server).chat.completions.create(**asked, extra_body={"ignore_eos": True})
    assert answer.usage.prompt_tokens == ids.shape[1]
    assert answer.choices[0].message.content == tokenizer.decode(new, skip_special_tokens=True)


class Slow:
    """An engine in front of another, whose steps take a while."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def step(self):
        time.sleep(0.02)
        return self.engine.step()


@pytest.fixture(scope="module")
def browser():
    with chromium() as made:
        yield made


@pytest.fixture
def paced(tiny):
    """A server that writes slowly enough to be stopped, and asks for a key."""
    engine = Slow(PrefixEngine(tiny, Scheduler(64, 200, 8), lambda n: None))
    made = Threaded(engine, context_len=512, key="secret")
    with running(made):
        yield made


@pytest.mark.browser
def test_the_page_asks_streams_stops_and_goes_on(browser, paced, tiny):
    """A key is asked for; a text is continued, with the keyboard alone; Escape ends the request on the server too."""
    page = browser.new_page(color_scheme="dark", viewport={"width": 360, "height": 700})
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda asked: faults.append(asked.url) if is_foreign(asked.url) else None)
    page.goto(f"{paced.root}/")
    page.get_by_text("the key is wrong or missing").wait_for()
    page.get_by_label("Key of this server").fill("secret")
    page.keyboard.press("Tab")
    page.get_by_text("fake, which continues your text").wait_for()
    page.locator("summary").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens at most").fill("20")
    page.get_by_label("Your text").fill("The for")
    page.keyboard.press("Enter")
    page.get_by_text("as many tokens as allowed; first token after").wait_for()
    assert page.locator("p.mine").inner_text() == "The for" + alone(tiny, "The for", 20)
    page.get_by_label("Tokens at most").fill("400")
    page.get_by_label("Your text").press("Enter")
    page.locator("p.mine:nth-of-type(2) .answer:not(:empty)").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("stopped by you").wait_for()
    wait_for(paced, requests_running=0, blocks_free=200)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert faults == []
    page.close()


@pytest.mark.browser
def test_the_page_keeps_a_conversation(browser, server, tiny):
    page = browser.new_page()
    page.goto(f"{server.root}/")
    page.locator("summary").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens at most").fill("8")
    said = []
    for text in ("What?", "<b>And</b> why?"):
        said.append({"role": "user", "content": text})
        page.get_by_label("Your text").fill(text)
        page.get_by_label("Your text").press("Enter")
        page.locator(f".answer:nth-of-type({len(said) + 1}):not(:empty)").wait_for()
        page.locator("#send:enabled").wait_for()
        said.append({"role": "assistant", "content": alone(tiny, rendered(said), 8)})
    assert page.locator("#log p").all_text_contents() == [message["content"] for message in said]
    page.get_by_text("Clear").click()
    assert page.locator("#log p").count() == 0
    page.close()


@pytest.mark.browser
def test_the_page_shows_each_token_s_probability_on_demand(browser, server, tiny):
    """By the pointer or, in the conversation, with the arrow keys; without the switch no token is marked."""
    page = browser.new_page()
    page.goto(f"{server.root}/")
    page.locator("summary").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens at most").fill("6")
    page.get_by_label("Show probabilities").check()
    page.get_by_label("Your text").fill("What?")
    page.get_by_label("Your text").press("Enter")
    page.locator("#rate:has-text('first token after')").wait_for()
    tokens = page.locator("#log .answer .odds")
    said = alone(tiny, rendered([{"role": "user", "content": "What?"}]), 6)
    assert "".join(tokens.all_text_contents()) == said
    tokens.first.hover()
    assert page.locator("#odds").inner_text().startswith(f"{json.dumps(said[0])} had ")
    page.locator("#log").press("ArrowRight")
    assert page.locator("#odds").inner_text().startswith(f"{json.dumps(said[1])} had ")
    assert " %; likeliest: " in page.locator("#odds").inner_text()
    page.get_by_text("Clear").click()
    page.get_by_label("Show probabilities").uncheck()
    page.get_by_label("Your text").fill("What?")
    page.get_by_label("Your text").press("Enter")
    page.locator("#rate:has-text('first token after')").wait_for()
    assert page.locator("#log .odds").count() == 0
    assert page.locator("#odds").inner_text() == ""
    page.close()


def test_the_page_may_load_and_run_nothing_but_itself(server):
    found = httpx.get(f"{server.root}/", timeout=LONG_S)
    assert found.headers["content-security-policy"].startswith("default-src 'none';")
    assert "://" not in found.text
