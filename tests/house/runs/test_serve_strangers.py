"""The server among strangers: folders that other programs saved, and requests that nobody would send on purpose."""

import copy
import gzip
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers import models as theirs_models

from lib.given.models.serving import Request
from lib.runs import serve
from lib.runs.flags import UsageError
from lib.runs.serving import models
from lib.runs.serving.engine import build
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.schema import ApiError, AskedCompletion, parse
from lib.runs.serving.text import ByteTokenizer, Characters, FileTokenizer
from lib.serving import Scheduler, generate_many
from tests.house.runs.test_serve import CPU, LONG_S, Fake, Threaded, metric, post, running, write_theirs

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(200)]
PARROT = "🦜"


def why(folder, tokenizer=None):
    """The one line with which the server refuses a folder."""
    with pytest.raises(UsageError) as caught:
        models.load(str(folder), None, tokenizer, torch.float32, CPU)
    said = str(caught.value)
    assert "\n" not in said, said
    assert len(said) < 1000, said
    return said


def is_served(folder, theirs):
    """Whether a folder gives the tokens that Transformers' own model gives."""
    served = models.load(str(folder), None, None, torch.float32, CPU)
    tokens = [5, 17, 200, 3, 99, 41]
    expected = theirs.generate(
        torch.tensor([tokens]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    new = [token for _, token in generate_many(served.model, [Request(tokens, 8)], Scheduler(64, 16, 4))]
    return new == expected[0, len(tokens) :].tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small Llama and a small GPT-2, as Transformers saves them, with their settings."""
    found = {}
    for kind in ("llama", "gpt2"):
        folder = tmp_path_factory.mktemp(kind)
        theirs = write_theirs(kind, folder)
        found[kind] = folder, theirs, json.loads((folder / "config.json").read_text())
    return found


@pytest.fixture(params=["llama", "gpt2"])
def saved(request, folders):
    """One of them; its ``config.json`` is put back after the test."""
    folder, theirs, settings = folders[request.param]
    yield folder, theirs, copy.deepcopy(settings), request.param
    (folder / "config.json").write_text(json.dumps(settings))


def write(folder, settings, without=()):
    kept = {name: value for name, value in settings.items() if name not in without}
    (folder / "config.json").write_text(json.dumps(kept))


# ---- config.json -----------------------------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
CHANGES = {
    "llama": [
        ("rope_scaling", {"type": "linear", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("rope_scaling", {"type": "default", "rope_type": "yarn", "factor": 2.0}),
        ("rope_scaling", {"factor": 8.0}),
        ("rope_scaling", LLAMA3 | {"type": "default"}),
        ("rope_scaling", LLAMA3 | {"rope_type": "default"}),
        ("rope_scaling", LLAMA3 | {"rope_type": ["llama3"]}),
        ("rope_scaling", LLAMA3 | {"attention_factor": 1.2}),
        ("rope_scaling", LLAMA3 | {"factor": "8"}),
        ("rope_scaling", LLAMA3 | {"low_freq_factor": 0}),
        ("rope_scaling", LLAMA3 | {"high_freq_factor": 1.0}),
        ("rope_scaling", LLAMA3 | {"original_max_position_embeddings": True}),
        *[("rope_scaling", {key: value for key, value in LLAMA3.items() if key != name}) for name in LLAMA3],
        ("rope_scaling", "linear"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "5000"}),
        ("rope_parameters", [1]),
        ("rope_theta", 10_000.0),  # rope_parameters has 5000
        ("rope_interleaved", True),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 16),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("head_dim", 16),
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", float("nan")),
        ("final_logit_softcapping", 30.0),
        ("embedding_multiplier", 12.0),
        ("tie_word_embeddings", "false"),
        ("hidden_size", "32"),
        ("num_attention_heads", 0),
        ("num_attention_heads", True),
        ("num_key_value_heads", 3),
    ],
    "gpt2": [
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("activation_function", "gelu"),
        ("activation_function", "relu"),
        ("n_inner", 64),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
        ("layer_norm_epsilon", "1e-5"),
        ("layer_norm_epsilon", float("inf")),
        ("hidden_size", 64),
        ("rope_theta", 10_000.0),
        ("n_head", 0),
        ("n_layer", 1.5),
    ],
    "both": [
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("pruned_heads", {"0": [1]}),
        ("is_encoder_decoder", True),
        ("auto_map", {"AutoModelForCausalLM": "modeling_other.LlamaForCausalLM"}),
        ("per_layer_config", {"0": {"intermediate_size": 24}}),
        ("architectures", ["OtherForCausalLM"]),
        ("logit_scale", 0.0625),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, None]),
        ("vocab_size", -1),
    ],
}  # fmt: skip


def test_a_setting_that_changes_numbers_is_refused_by_name(saved):
    folder, _, settings, kind = saved
    for name, value in CHANGES[kind] + CHANGES["both"]:
        write(folder, settings | {name: value})
        said = why(folder)
        assert name in said, (name, value, said)
        shown = repr(value)[:20] if not isinstance(value, dict | list) else ""
        assert shown in said, (name, value, said)


def test_a_key_that_llama3_lacks_is_named(folders):
    folder, _, settings = folders["llama"]
    for name in LLAMA3.keys() - {"rope_type"}:
        write(folder, settings | {"rope_parameters": {key: LLAMA3[key] for key in LLAMA3 if key != name}})
        assert f"rope_parameters of type llama3 has no {name}" in why(folder)
    write(folder, settings | {"rope_parameters": LLAMA3 | {"low_freq_factor": 4}})
    assert "low_freq_factor = 4, high_freq_factor = 4.0, expected the first to be smaller" in why(folder)
    write(folder, settings)


@pytest.mark.parametrize("spelling", ["Transformers 5", "Transformers 4", "of 2024"])
def test_a_llama_31_has_its_scaled_frequencies(spelling, tmp_path):
    torch.manual_seed(0)
    rope = LLAMA3 | {"rope_theta": 5000.0}
    theirs = write_theirs("llama", tmp_path, rope_parameters=rope)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["rope_parameters"] == rope
    if spelling != "Transformers 5":
        older = {"rope_theta": 5000.0, "rope_scaling": LLAMA3 | ({"type": "llama3"} if spelling == "of 2024" else {})}
        write(tmp_path, settings | older, without=("rope_parameters",))
    served = models.load(str(tmp_path), None, None, torch.float32, CPU)
    expected = theirs.model.rotary_emb.inv_freq
    plain = 5000.0 ** -(torch.arange(4) / 4)
    assert (expected < 0.99 * plain).any()
    rope = vars(served.model)["rope"]
    torch.testing.assert_close(rope[1].angle(), expected, rtol=1e-6, atol=0)
    tokens = torch.randint(300, (2, 60))
    torch.testing.assert_close(served.model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    assert is_served(tmp_path, theirs)


def test_what_leaves_the_numbers_alone_is_taken(saved):
    folder, theirs, settings, _ = saved
    for more in (
        {"_name_or_path": "x", "_commit_hash": "0", "transformers_version": "4.3.0", "torch_dtype": "float16"},
        {"use_cache": False, "max_length": 4096, "temperature": 0.6, "top_p": 0.9, "do_sample": True, "num_beams": 4},
        {"task_specific_params": {"text-generation": {"max_length": 50}}, "gradient_checkpointing": False},
        {"quantization_config": None, "pruned_heads": {}, "is_decoder": True, "output_past": True, "n_ctx": 64},
        {"attention_dropout": 0.1, "initializer_range": 0.5, "pretraining_tp": 2, "unsloth_version": "2025.1"},
    ):
        write(folder, settings | more)
        assert is_served(folder, theirs)


def test_an_older_llama_is_the_same_llama(folders):
    folder, theirs, settings = folders["llama"]
    old = {"rope_theta": 5000.0, "rope_scaling": None, "torch_dtype": "float16", "num_key_value_heads": 2}
    for more in (old, old | {"architectures": ["LLaMAForCausalLM"], "pad_token_id": -1, "max_sequence_length": 64},
                 old | {"rope_scaling": {"type": "default"}},
                 old | {"head_dim": 8, "hidden_act": "swish"}):  # fmt: skip
        write(folder, settings | more, without=("rope_parameters", "dtype"))
        assert is_served(folder, theirs)
    write(folder, settings)


def test_a_gpt2_of_2019_is_the_same_gpt2(folders):
    folder, theirs, settings = folders["gpt2"]
    names = ("initializer_range", "layer_norm_epsilon", "n_embd", "n_head", "n_layer", "n_positions", "vocab_size")
    old = {name: settings[name] for name in names} | {"n_ctx": 64, "architectures": ["GPT2LMHeadModel"]}
    old |= {"resid_pdrop": 0.1, "predict_special_tokens": True, "summary_first_dropout": 0.1, "use_bfloat16": False}
    write(folder, old)
    assert is_served(folder, theirs)
    ends = models.load(str(folder), None, None, torch.float32, CPU).tokenizer.end_ids
    assert ends == {50256} == {transformers.GPT2Config(**old).eos_token_id}  # the default of the class
    write(folder, settings)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_setting_that_transformers_writes_is_known(kind):
    from lib.runs.serving.settings import KINDS

    config = transformers.LlamaConfig() if kind == "llama" else transformers.GPT2Config()
    unknown = [name for name in config.to_dict() if not KINDS[kind].knows(name)]
    assert unknown == []


@pytest.mark.parametrize("text", ["[]", "null", "3", '"llama"', "", "\ufeff{}", '{"model_type": ["llama"]}', "{" * 9,
                                  "[" * 100_000, '{"model_type": "mistral"}', "{}"])  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_file_of_settings_that_is_none_is_one_line(name, text, tmp_path, folders):
    for kind in ("llama", "gpt2"):
        (folder := tmp_path / kind).mkdir()
        for path in folders[kind][0].iterdir():
            if path.name != "model.safetensors" or name != "model.safetensors.index.json":
                (folder / path.name).write_bytes(path.read_bytes())
        (folder / name).write_text(text, encoding="utf-8")
        if name != "generation_config.json" or text[0:1] != "{" or text == "{" * 9:
            assert name in why(folder) or "model_type" in why(folder)
        (folder / name).write_bytes(b'{"\xff": 1')
        assert name in why(folder)


def test_weights_that_are_not_what_the_settings_say_are_one_line(saved, tmp_path):
    folder = saved[0]
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights, file = load_file(folder / "model.safetensors"), tmp_path / "model.safetensors"
    first = next(name for name in weights if name.endswith(("q_proj.weight", "c_attn.weight")))
    for changed in ({first: weights[first].to(torch.int8)}, {first: weights[first][:-1].clone()},
                    {first: weights[first].to(torch.complex64)}, {"score.weight": torch.zeros(2, 32)}):  # fmt: skip
        save_file(weights | changed, file)
        assert next(iter(changed)).removeprefix("transformer.") in why(tmp_path)
    save_file({name: tensor for name, tensor in weights.items() if name != first}, file)
    assert first.removeprefix("transformer.") in why(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    for cut in (b"", whole[:4], whole[:100], whole[:-8]):
        file.write_bytes(cut)
        assert "model.safetensors" in why(tmp_path)
    file.unlink()
    halves = sorted(weights)[::2], sorted(weights)[1::2]
    where = {name: f"model-0000{i}-of-00002.safetensors" for i, half in enumerate(halves, 1) for name in half}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    for half, name in zip(halves, dict.fromkeys(where[half[0]] for half in halves), strict=True):
        save_file({tensor: weights[tensor] for tensor in half}, tmp_path / name)
    assert is_served(tmp_path, saved[1])
    (tmp_path / where[halves[1][0]]).unlink()
    assert where[halves[1][0]] in why(tmp_path)
    broken: object
    for broken in (
        {"weight_map": {}},
        {"weight_map": {first: 1}},
        {"weight_map": [first]},
        [],
        {"weight_map": {first: "../x"}},
    ):
        index.write_text(json.dumps(broken))
        assert "index" in why(tmp_path), broken


def test_a_head_that_is_tied_and_saved_all_the_same_is_taken(tmp_path):
    theirs = write_theirs("llama", tmp_path, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    assert is_served(tmp_path, theirs)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, file)
    assert "lm_head.weight" in why(tmp_path)


def test_an_adapter_beside_the_weights_is_refused(saved):
    folder = saved[0]
    (folder / "adapter_config.json").write_text("{}")
    said = why(folder)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json" in said


# ---- tokenizer.json --------------------------------------------------------------------------------------------------


def sentencepiece_like(path, after="<s> $A", **more):
    """A tokenizer with Llama 2's rules: a space is part of the word after it,
    and the first space of a text is dropped.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{i:02X}>": 3 + i for i in range(256)}}
    for piece in ("▁", *"helowrd!", "▁world", "▁hello", "▁h", "▁w"):
        vocab[piece] = len(vocab)
    made = Tokenizer(
        theirs_models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True, **more)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.post_processor = processors.TemplateProcessing(single=after, special_tokens=[("<s>", 1), ("</s>", 2)])
    made.add_special_tokens(["<s>", "</s>", "<unk>"])
    made.save(str(path))
    return vocab


def answer_of(tokenizer, tokens, prompt="a", stop=None, **more):
    """What a request gets, streaming and not, from an engine that generates these tokens."""
    engine = Fake(tokens)
    engine.gate.set()
    with running(Threaded(engine, tokenizer, vocab_size=2**20)) as server:
        asked = {"model": "fake", "prompt": prompt, "max_tokens": len(tokens), "stop": stop, **more}
        whole = post(server, asked)
        assert whole.status_code == 200, whole.text
        events = post(server, asked | {"stream": True}).text.split("\n\n")[:-2]
        pieces = [json.loads(event[6:])["choices"][0]["text"] for event in events]
        text = whole.json()["choices"][0]["text"]
        assert "".join(pieces) == text
        return text


def test_an_answer_is_decoded_with_its_prompt(tmp_path):
    vocab = sentencepiece_like(tmp_path / "tokenizer.json")
    tokenizer = FileTokenizer(str(tmp_path / "tokenizer.json"))
    world, parrot = [vocab["▁world"], vocab["!"]], [3 + byte for byte in PARROT.encode()]
    assert answer_of(tokenizer, world, "hello") == " world!"
    assert answer_of(tokenizer, world, "hello", echo=True) == "hello world!"
    ids = tokenizer.encode("hello")
    assert answer_of(tokenizer, world, ids) == " world!"
    assert answer_of(tokenizer, world, ids, echo=True) == "hello world!" == tokenizer.decode(ids + world)
    assert answer_of(tokenizer, world, "hello", stop=" wor") == ""
    assert answer_of(tokenizer, world, ids, stop="d") == " worl"
    for n in (1, 2, 3):
        assert answer_of(tokenizer, parrot[n:] + world, ids + parrot[:n]) == f"{PARROT} world!"
        assert answer_of(tokenizer, parrot[n:] + world, ids + parrot[:n], echo=True) == f"hello{PARROT} world!"
    assert answer_of(tokenizer, parrot + world, "hello") == f"{PARROT} world!"
    assert answer_of(tokenizer, world, [1, *parrot, vocab["h"]] * 9) == " world!"


def test_a_prompt_that_ends_inside_a_character_is_completed():
    tokens = list(f"hi {PARROT} ok".encode())
    for n in (1, 2, 3):
        assert answer_of(ByteTokenizer(), tokens[3 + n :], tokens[: 3 + n]) == f"{PARROT} ok"
        assert answer_of(ByteTokenizer(), tokens[3 + n :], tokens[: 3 + n], echo=True) == f"hi {PARROT} ok"
    assert answer_of(ByteTokenizer(), list(b"abc"), [*b"x", 0xF0]) == "abc"
    assert answer_of(ByteTokenizer(), list(b"abc"), [*b"x", 0xF0], echo=True) == "x\N{REPLACEMENT CHARACTER}abc"
    assert answer_of(ByteTokenizer(), list(b"abc"), "x\N{REPLACEMENT CHARACTER}") == "abc"


@pytest.mark.parametrize("prompt", [f"x{PARROT}"[:2], [*b"x", *PARROT.encode()]])
def test_the_text_of_garbage_comes_in_time_and_whole(prompt):
    said = [0xF0, 0x9F, 0xA6, *[0xFF] * 9, *PARROT.encode(), 0xFF, *b"ok"]
    expected = bytes(said).decode(errors="replace")
    assert answer_of(ByteTokenizer(), said, prompt) == expected
    characters = Characters(ByteTokenizer().decode)
    pieces = [characters.add(token) for token in said]
    assert sum(map(len, pieces[:12])) >= 7, "held back for longer than a character can be incomplete"


def test_settings_of_a_tokenizers_file_do_not_change_a_prompt(tmp_path):
    sentencepiece_like(path := tmp_path / "tokenizer.json")
    text, expected = "hello world! " * 4, FileTokenizer(str(path)).encode("hello world! " * 4)
    assert len(expected) > 16
    sentencepiece_like(path, after="<s> $A </s>", dropout=0.9)
    saved = Tokenizer.from_file(str(path))
    saved.enable_truncation(8)
    saved.enable_padding(length=64, pad_token="<unk>")
    saved.save(str(path))
    tokenizer = FileTokenizer(str(path))
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode("hello</s>")[-1] == 2  # it stands in the text
    assert tokenizer.encode("") == [1]


def test_a_tokenizers_file_that_is_none_is_one_line(saved):
    folder = saved[0]
    whole = (folder / "tokenizer.json").read_bytes()
    for text in (b"{}", b"[]", b"null", b"", b"{", b"\xff", whole[:-9], b"\xef\xbb\xbf" + whole):
        (folder / "tokenizer.json").write_bytes(text)
        assert "tokenizer.json" in why(folder)
    sentencepiece_like(folder / "tokenizer.json")
    larger = Tokenizer.from_file(str(folder / "tokenizer.json"))
    larger.add_tokens([f"more{i}" for i in range(99)])
    larger.save(str(folder / "tokenizer.json"))
    assert "tokens, but the model's vocabulary has 300" in why(folder)
    (folder / "tokenizer.json").write_bytes(whole)


# ---- faults of one request -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
def test_a_token_that_the_tokenizer_lacks_has_no_text(streams, tmp_path, monkeypatch):
    import tiktoken

    theirs = tiktoken.Encoding("gpt2", pat_str=r"\S+|\s+", mergeable_ranks={bytes([i]): i for i in range(256)},
                               special_tokens={"<|endoftext|>": 256})  # fmt: skip
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: theirs)
    sentencepiece_like(tmp_path / "tokenizer.json")
    for tokenizer in (models._tokenizer("gpt2", 300), models._tokenizer("bytes", 300),
                      models._tokenizer(str(tmp_path / "tokenizer.json"), 300, [])):  # fmt: skip
        prompt = tokenizer.encode("hell")
        said = [*tokenizer.encode("hello"), 297, 298, *tokenizer.encode("wo")]
        text = answer_of(tokenizer, said, [*prompt, 299], echo=True, ignore_eos=True)
        assert text == tokenizer.decode([*prompt, *said])
        assert "hello" in text


class Faulty(ByteTokenizer):
    """Bytes; but it cannot encode "?", and cannot decode an "x" in an answer."""

    def encode_(self, text):
        if "?" in text:
            raise RuntimeError("Missing [UNK] token from the vocabulary")
        return list(text.encode())

    def __init__(self):
        super().__init__(self.encode_)

    def decode(self, tokens):
        if tokens[-1:] == [ord("x")]:
            raise KeyError("x")
        return super().decode(tokens)


def test_a_fault_of_one_request_is_its_error_and_the_engine_goes_on(capfd):
    engine = Fake(b"abxd" * 9)
    engine.gate.set()
    with running(Threaded(engine, Faulty())) as server:
        asked = {"model": "fake", "prompt": "a", "max_tokens": 2}
        for _ in range(2):
            assert post(server, asked).json()["choices"][0]["text"] == "ab"
            for bad in ({"max_tokens": 3}, {"max_tokens": 3, "n": 3}, {"prompt": ["a", "b"], "max_tokens": 4},
                        {"prompt": list(b"ax"), "echo": True}):  # fmt: skip
                found = post(server, asked | bad)
                assert found.status_code == 500, bad
                assert (found.json()["error"]["type"], found.json()["error"]["code"]) == ("server_error", "failed")
                assert "KeyError" in found.json()["error"]["message"]
            events = post(server, asked | {"max_tokens": 4, "stream": True}).text.split("\n\n")
            assert json.loads(events[-2][6:])["error"]["code"] == "failed"
            found = post(server, asked | {"prompt": "why?"})
            assert (found.status_code, found.json()["error"]["param"]) == (400, "prompt")
            assert "[UNK]" in found.json()["error"]["message"]
            assert httpx.get(f"{server.root}/health").status_code == 200
        text = httpx.get(f"{server.root}/metrics").text
        assert 'responses_total{status="500"} 8' in text
        assert "requests_running 0" in text
    assert server.status == 0


class Breaking(PrefixEngine):
    """The real engine, whose model raises an exception in each step that has ``b"!"`` among its tokens,
    after a layer.
    """

    def __init__(self, **sizes):
        super().__init__(models.make_tiny(), Scheduler(**sizes))
        self.model.get_submodule("layers.1.attention_norm").register_forward_pre_hook(self.look)
        self.is_broken, self.tokens = False, []
        self.gate = threading.Event()
        self.gate.set()

    def run(self, chunks):
        self.gate.wait()
        self.tokens = [token for chunk in chunks for token in chunk.tokens]
        return super().run(chunks)

    def look(self, *_):
        if self.is_broken or ord("!") in self.tokens:
            raise RuntimeError("a fault of the device")

    def check_blocks(self):
        """Only the tree still has blocks, and no one has acquired these."""
        assert self.scheduler.n_free == self.scheduler.n_blocks
        assert not self.sequences
        assert not self.acquired
        assert not self.cache.tables
        pool = self.cache.allocator
        remembered = self.tree.evict(self.scheduler.n_blocks)
        assert sorted(block for block, n in enumerate(pool.n_users) if n) == sorted(remembered)
        for block in remembered:
            pool.free(block)
        assert pool.n_free == self.scheduler.n_blocks


@pytest.mark.parametrize("streams", [False, True])
def test_a_step_that_fails_ends_only_its_requests(streams, capfd):
    engine = Breaking(max_tokens=24, n_blocks=64, block_size=4)
    with running(Threaded(engine)) as server:
        good = {"model": "fake", "prompt": "The for statement is a", "max_tokens": 9, "temperature": 0}
        bad = good | {"prompt": "The for statement is!", "n": 2}
        expected = post(server, good).json()["choices"][0]["text"]
        for _ in range(4):  # more than three failures in all, but no three in a row
            engine.gate.clear()
            with ThreadPoolExecutor(2) as pool:
                failed = pool.submit(post, server, bad | {"stream": streams})
                while not engine.scheduler.running:  # the bad step waits at the gate
                    pass
                found = pool.submit(post, server, good)
                while server.worker._inbox.empty():
                    pass
                engine.gate.set()
                assert found.result().json()["choices"][0]["text"] == expected
                assert failed.result().status_code == 500
                error = failed.result().json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "failed")
            assert error["message"] == "the engine's step failed: RuntimeError: a fault of the device"
            assert httpx.get(f"{server.root}/health").status_code == 200
        assert metric(server, "failed_steps_total") == 4
        assert metric(server, "requests_running") == 0
    assert server.status == 0
    engine.check_blocks()
    assert "a fault of the device" in capfd.readouterr().err


def test_a_step_that_fails_after_text_was_sent_ends_the_stream():
    engine = Breaking(max_tokens=24, n_blocks=64, block_size=4)
    with running(Threaded(engine)) as server:
        asked = {"model": "fake", "prompt": "The for", "max_tokens": 30, "stream": True}
        content = json.dumps(asked).encode()
        with httpx.stream("POST", f"{server.root}/v1/completions", content=content, timeout=LONG_S) as answer:
            lines = answer.iter_lines()
            assert answer.status_code == 200
            assert next(lines).startswith("data: ")
            engine.is_broken = True
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert rest[-1]["error"]["code"] == "failed"
        engine.is_broken = False
        assert post(server, asked | {"stream": False}).status_code == 200
    engine.check_blocks()


def test_an_engine_whose_steps_all_fail_says_that_it_is_unhealthy():
    engine = Breaking(max_tokens=24, n_blocks=64, block_size=4)
    with running(Threaded(engine)) as server:
        asked = {"model": "fake", "prompt": "The for", "max_tokens": 3}
        assert post(server, asked).status_code == 200
        engine.is_broken = True
        assert [post(server, asked).status_code for _ in range(4)] == [500, 500, 503, 503]
        health = httpx.get(f"{server.root}/health")
        assert health.status_code == 503
        error = health.json()["error"]
        assert error["code"] == "engine_unhealthy"
        assert error["message"] == "the last 3 steps of the engine failed: RuntimeError: a fault of the device"
        assert metric(server, "failed_steps_total") == 3
    engine.check_blocks()


def test_an_engine_that_hangs_says_so_until_its_next_step():
    """Also when the client whose request it has is gone."""
    engine = Breaking(max_tokens=24, n_blocks=64, block_size=4)
    with running(Threaded(engine)) as server:
        asked = {"model": "fake", "prompt": "The for", "max_tokens": 3}
        server.service.link.stall_s = 0.3
        engine.gate.clear()
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{server.root}/v1/completions", json=asked, timeout=0.4)
        while (health := httpx.get(f"{server.root}/health")).status_code == 200:
            pass
        assert health.status_code == 503
        assert re.fullmatch(r"the engine has taken no step for \d+ s, although it has requests",
                            health.json()["error"]["message"])  # fmt: skip
        engine.gate.set()
        while httpx.get(f"{server.root}/health").status_code == 503:
            pass
        server.service.link.stall_s = 60.0
        assert post(server, asked).status_code == 200
    engine.check_blocks()


def test_a_step_that_fails_before_its_requests_are_chosen_drops_all_that_run(monkeypatch):
    engine = Breaking(max_tokens=24, n_blocks=64, block_size=4)
    engine.submit(first := Request([1, 2, 3], 9))
    engine.step()
    engine.submit(second := Request([4, 5], 2))
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.abandon() == [first]
    new = []
    while engine.is_busy:
        new += engine.step()
    assert [request for request, _ in new] == [second, second]
    engine.check_blocks()


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (rb'{"model": "fake", "prompt": "ab\\ud83e"}', None, None),
        (rb'{"model": "fake", "prompt": "ab\ud83e\udd9c"}', None, None),
        (rb'{"model": "fake", "prompt": "ab\ud83e"}', "prompt", r"prompt: \ud83e at character 2 is half of"),
        (rb'{"model": "fake", "prompt": "\uDD9C\ud83e"}', "prompt", r"prompt: \udd9c at character 0 is half of"),
        (b'{"model": "fake", "prompt": "ab\xed\xa0\xbe"}', "prompt", r"prompt: \ud83e at character 2 is half of"),
        (rb'{"model": "fake", "prompt": ["a", "\ud83e"]}', "prompt.1", r"prompt.1: \ud83e at character 0"),
        (rb'{"model": "fake", "prompt": "a", "stop": ["\ud83e"]}', "stop.0", r"stop.0: \ud83e at character 0"),
        (rb'{"model": "\ud83e", "prompt": "a"}', "model", r"model: \ud83e at character 0"),
        (rb'{"a\ud83e": 1}', None, r"the name of a field: \ud83e at character 1"),
        (rb'{"model": "fake", "prompt": "\ud83e"', None, "the body is no valid request"),
    ],
)
def test_half_of_a_surrogate_pair_is_named_with_its_field(body, param, said):
    if said is None:
        assert parse(body, AskedCompletion).prompt.startswith("ab")
        return
    with pytest.raises(ApiError) as caught:
        parse(body, AskedCompletion)
    error = caught.value.body["error"]
    assert (caught.value.status, error["param"]) == (400, param)
    assert said in error["message"]
    json.dumps(error, ensure_ascii=False).encode()  # as the answer is written


def test_scores_that_are_no_numbers_end_only_their_request():
    torch.manual_seed(0)
    model = models.make_tiny()
    with torch.no_grad():
        model.get_parameter("tok_embeddings.weight")[ord("N")] = float("nan")
    engine = PrefixEngine(model, Scheduler(64, 64, 4))
    good, bad = {"prompt": "The for statement is", "max_tokens": 9}, {"prompt": "A fewer Nots", "max_tokens": 9}
    with running(Threaded(engine)) as server:
        expected = None
        for temperature in (0, 1):
            asked = {"model": "fake", "temperature": temperature, "seed": 1}
            alone = post(server, asked | good).json()["choices"]
            found = post(server, asked | bad)
            assert (found.status_code, found.json()["error"]["code"]) == (500, "failed")
            assert "not finite" in found.json()["error"]["message"]
            both = post(server, asked | good | {"prompt": [good["prompt"], bad["prompt"]]})
            assert both.status_code == 500
            assert post(server, asked | good).json()["choices"] == alone != expected
            expected = alone
        text = httpx.get(f"{server.root}/metrics").text
        assert "blocks_free 64" in text
        assert httpx.get(f"{server.root}/health").status_code == 200


STRANGE = [
    b"", b"null", b"\xef\xbb\xbf{}", b'{"model": "fake", "prompt": "\\ud800"}',
    b'{"model": "fake", "prompt": "a", "stop": "\\udfff"}',
    b"[" * 100_000, b'{"model": "fake", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"model": "fake", "prompt": [%s]}' % (b"9" * 4000),
    b'{"model": "fake", "prompt": "a", "best_of": %s}' % (b"9" * 4000), b'{"model": "fake", "prompt": [-1]}',
    b'{"model": "fake", "prompt": [true]}', b'{"model": "fake", "prompt": [[]]}',
    b'{"model": "fake", "prompt": {"a": NaN}}',
    b'{"model": "fake", "prompt": null}', b'{"model": null, "prompt": "a"}',
    b'{"model": "fake", "prompt": "a", "logprobs": true}',
    b'{"model": "fake", "prompt": "a", "seed": 9223372036854775808}',
    b'{"model": "fake", "prompt": "a", "temperature": "1"}',
    b'{"model": "fake", "prompt": "a", "temperature": 1e999}', b'{"model": "fake", "prompt": "a", "stop": [""]}',
    b'{"model": "fake", "prompt": "a", "stop": [1]}', b'{"model": "fake", "prompt": "a", "stream": "true"}',
    b'{"model": "fake", "prompt": "a", "stream_options": []}', b'{"model": "fake", "prompt": "a", "\xe2\x80\xae": 1}',
    '{"model": "fake", "prompt": "a"}'.encode("utf-16"), b"model=fake&prompt=a",
]  # fmt: skip


def test_strange_bodies_are_one_error_each_and_the_server_lives():
    engine = Fake()
    engine.gate.set()
    with running(Threaded(engine)) as server:
        for body in STRANGE:
            found = post(server, body)
            assert found.status_code == 400, (body[:80], found.text)
            message = found.json()["error"]["message"]
            assert "\n" not in message
            assert len(message) < 300, message
        asked = json.dumps({"model": "fake", "prompt": "a", "max_tokens": 3}).encode()
        found = post(server, gzip.compress(asked), headers={"Content-Encoding": "gzip"})
        assert (found.status_code, "'gzip'" in found.json()["error"]["message"]) == (415, True)
        more: Mapping[str, object]
        for more in ({"max_tokens": None}, {"stop": []}, {"stop": None}, {"seed": -1}, {"seed": -(2**63)},
            {"seed": 2**63 - 1},
                     {"top_k": 10**30}, {"temperature": 2}, {"prompt": [[97], [98]]}, {"user": ""},
                     {"suffix": ""}):  # fmt: skip
            assert post(server, json.loads(asked) | more).status_code == 200, more
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"):
            assert post(server, asked, headers={"Content-Type": kind}).json()["choices"][0]["text"] == "abc"
        for path in ("/v1/%ff", "/v1/models/%ed%a0%80", "/v1/models/%00", "/v1//completions", "/%"):
            found = httpx.get(server.root + path)
            assert (found.status_code, "error" in found.json()) == (404, True), path
        assert httpx.get(f"{server.root}/health").status_code == 200


def test_a_huge_top_k_is_all_tokens_for_the_real_engine():
    with running(Threaded(PrefixEngine(models.make_tiny(), Scheduler(64, 64, 4)))) as server:
        for more in ({"top_k": 10**30}, {"top_p": 1e-300}, {"seed": -1}, {"temperature": 2, "top_k": 256}):
            asked = {"model": "fake", "prompt": "a", "max_tokens": 3, "temperature": 1} | more
            assert post(server, asked).status_code == 200, more


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["Bearer KEY", "bearer KEY", "BEARER  KEY", "beareR KEY"])
def test_the_scheme_of_a_key_is_not_case_sensitive(header):
    engine = Fake()
    with running(Threaded(engine, key="KEY")) as server:

        def status(given):
            return httpx.get(f"{server.root}/v1/models", headers={"Authorization": given}).status_code

        assert status(header) == 200
        for wrong in (header.lower(), "KEY", "Basic KEY", "Bearer", "BearerKEY", "Bearer KEY KEY", ""):
            assert status(wrong) == 401, wrong
        assert httpx.get(f"{server.root}/v1/models").status_code == 401


def refusal(flags, capfd):
    """The one line with which a command is refused."""
    assert serve.main(flags) == 2, flags
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert len(said) == 1, said
    assert said[0].startswith("error: ")
    return said[0]


def refuse(options):
    raise UsageError("nothing is served")


def test_an_empty_text_is_no_value(capfd, monkeypatch):
    given = {"--model": "tiny", "--port": "0"}
    for flag in ("--model", "--name", "--tokenizer", "--device", "--dtype", "--threads", "--port", "--host",
        "--api-key", "--grace",
                 "--queue", "--max-tokens", "--blocks", "--block-size"):  # fmt: skip
        for value in ("", " "):
            said = refusal([word for pair in (given | {flag: value}).items() for word in pair], capfd)
            assert flag in said, said
            assert "expected" in said or "choose" in said, said
    for key in (" kQ", "kQ\n", "a\tQ"):
        said = refusal(["--model", "tiny", "--port", "0", "--api-key", key], capfd)
        assert "--api-key" in said
        assert "Q" not in said, "a message shows the key"
    monkeypatch.setenv(serve.KEY_VARIABLE, "")
    with monkeypatch.context() as patch:
        patch.setattr(serve, "make_service", refuse)
        assert serve.main(["--model", "tiny", "--port", "0", "--host", "0.0.0.0"]) == 2
    assert "warning: anybody who reaches 0.0.0.0 may use this server" in capfd.readouterr().err
    monkeypatch.setenv(serve.KEY_VARIABLE, " ")
    assert "--api-key" in refusal(["--model", "tiny", "--port", "0"], capfd)


def test_what_cannot_be_started_is_one_line(capfd, monkeypatch):
    tiny = ["--model", "tiny", "--port", "0"]
    for flags, word in ((["--host", "a" * 99], "--host"), (["--mod", "tiny"], "--mod"),
                        (["--queue", "9" * 5000], "--queue"), (["--blocks", "9" * 12], "9" * 12)):  # fmt: skip
        assert word[:80] in refusal([*tiny, *flags], capfd)

    def fails(name):
        raise OSError("no network")

    monkeypatch.setattr("tiktoken.get_encoding", fails)
    for flags, words in ((["--block-size", "2147483647"], "blocks of 2147483647 positions"),
                         (["--threads", "1025"], "--threads 1025"),
                         (["--tokenizer", "gpt2"], "gpt2: tiktoken cannot load it: no network")):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            build(serve.make_parser().parse_args([*tiny, "--device", "cpu", *flags]), Counter())
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_folder_with_a_byte_that_is_not_utf_8_is_served_or_refused_in_one_line(kind, tmp_path):
    (folder := tmp_path / "plain").mkdir()
    write_theirs(kind, folder)
    try:
        folder = folder.rename(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    assert "model.safetensors" in why(folder)  # its reader takes no such path
    name = models.load("tiny", folder.name, None, torch.float32, CPU).name
    assert name.encode() == "caf\N{REPLACEMENT CHARACTER}".encode()  # a name that JSON can hold
