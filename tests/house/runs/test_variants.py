"""Qwen3, OLMo 3, Gemma 2 and 3, gpt-oss and Qwen3-Next in Transformers' folders: the same values, gradients and
greedy tokens, or one line that names what is not supported."""

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers import models as theirs_models

from lib.attention_variants import cache_bytes
from lib.given.kernels.paged import window_of
from lib.given.models.serving import Request
from lib.given.models.variants import FULL, LINEAR, SLIDING, VariantConfig, family_of, settings_of, variant_tensors
from lib.linear_attention import hybrid_cache_bytes
from lib.runs import evaluate
from lib.runs.flags import UsageError
from lib.runs.serving import families, models
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.settings import KINDS, read_settings
from lib.runs.variants import VariantLlama, scaled_frequencies
from lib.serving import PagedCache, Scheduler

CPU = torch.device("cpu")
pytestmark = [pytest.mark.slow, pytest.mark.time_limit(60)]
SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "initializer_range": 0.2,
         "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 10_000.0}
LAYERED = {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 5}


def turned(scaling, theta):
    """Scaled full layers beside sliding ones that turn as they were trained."""
    return {FULL: scaling | {"rope_theta": theta}, SLIDING: {"rope_type": "default", "rope_theta": 10_000.0}}


CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "qwen3 tied, stretched": {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": YARN},
    "qwen3 with windows": {"head_dim": 16, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 7},
    "olmo3": LAYERED | {"num_key_value_heads": 4},
    "olmo3 stretched": LAYERED | {"rope_parameters": turned(YARN | {"attention_factor": 1.2}, 500_000.0)},
    "gemma2": LAYERED | {
        "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0,
    },
    "gpt_oss": LAYERED | {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2,
                          "rope_parameters": YARN | {"truncate": False}},
    "gemma3": LAYERED | {"head_dim": 16, "query_pre_attn_scalar": 24},
    "gemma3 stretched": LAYERED | {
        "head_dim": 10, "rope_parameters": turned({"rope_type": "linear", "factor": 8.0}, 1e6),
        "num_key_value_heads": 1, "tie_word_embeddings": False,
    },
    "qwen3_next": {
        "layer_types": [LINEAR, FULL, LINEAR], "head_dim": 16, "num_experts": 0, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 3,
    },
}  # fmt: skip
THEIRS: dict[str, tuple[Any, Any]] = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
}


def make_theirs(case):
    """A small model of Transformers' with random weights, gains too."""
    make_config, make_model = THEIRS[case.split()[0]]
    torch.manual_seed(len(case))
    model = make_model(make_config(**SIZES | CASES[case])).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.0 if case.startswith(("gemma", "qwen3_next")) else 1.0, 0.3)
    return model


def save(model, folder, **settings):
    """Save it as a folder that the server can load: each token of the tokenizer is a number."""
    model.save_pretrained(folder, **settings)
    Tokenizer(theirs_models.WordLevel({str(i): i for i in range(300)}, "0")).save(str(folder / "tokenizer.json"))


def load(folder):
    return models.load(str(folder), None, None, torch.float32, CPU)


@pytest.fixture(scope="module", params=CASES)
def saved(request, tmp_path_factory):
    """A folder with the model, in shards where Transformers cuts it, and the model."""
    folder, theirs = tmp_path_factory.mktemp("folder"), make_theirs(request.param)
    save(theirs, folder, max_shard_size="60KB" if "stretched" in request.param else "5GB")
    return folder, theirs, request.param


def test_values_and_gradients_are_transformers(saved):
    folder, theirs, case = saved
    assert len(list(folder.glob("*.safetensors"))) > ("stretched" in case)
    ours = load(folder).model
    assert family_of(ours.config) == case.split()[0]
    tokens, seed = torch.randint(300, (2, 40)), torch.randn(2, 40, 300)
    logits, expected = ours.requires_grad_(True)(tokens), theirs(tokens).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    (logits * seed).sum().backward()
    theirs.zero_grad()
    (expected * seed).sum().backward()
    found = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        gradient = found.pop(variant_tensors(ours.config)[name][0]).grad
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-4 * scale, msg=name)
    assert not found


def test_a_served_folder_gives_transformers_greedy_tokens(saved):
    """Through blocks of 4, prompts in chunks, a shared beginning that the tree finds, and a pool too small for all."""
    folder, theirs, _ = saved
    text = torch.randint(300, (40,)).tolist()
    prompts = [text[:1], text[:8], text[3:30], text, [*text[:9], 7]]
    engine = PrefixEngine(load(folder).model, Scheduler(max_tokens=13, n_blocks=31, block_size=4))
    requests = [Request(prompt, 12) for prompt in prompts]
    found: dict[int, list[int]] = {id(request): [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.is_busy:
        for request, token in engine.step():
            found[id(request)].append(token)
        if engine.states is not None:
            _check_states(engine)
    for request, prompt in zip(requests, prompts, strict=True):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert found[id(request)] == expected[0, len(prompt) :].tolist()


def _check_states(engine):
    """Each sequence has a state of the same size in each linear layer, whatever its length, and no more keys."""
    config, block = engine.model.config, engine.cache.keys[:, :1].nbytes * 2
    assert len(engine.cache.keys) == config.layer_types.count(FULL)
    assert engine.states.held.keys() <= engine.cache.tables.keys()
    for sequence, states in engine.states.held.items():
        held = sum(state.conv_state.nbytes + state.recurrent_state.nbytes for state in states.values())
        assert held == hybrid_cache_bytes(config, 1, 0, bytes_per_value=4)
        keys = hybrid_cache_bytes(config, 1, engine.cache.block_size, bytes_per_value=4) - held
        assert len(engine.cache.tables[sequence]) * block == len(engine.cache.tables[sequence]) * keys


def test_a_cache_of_windows_gives_the_same_logits(saved):
    ours, tokens = load(saved[0]).model, torch.randint(300, (2, 30))
    cache, expected = ours.make_cache(2, 30), ours(tokens)
    held = sum(tensor.nbytes for part in cache for tensor in vars(part).values() if torch.is_tensor(tensor))
    count = hybrid_cache_bytes if LINEAR in ours.config.layer_types else cache_bytes
    assert held == count(ours.config, 2, 30, bytes_per_value=4)
    parts = [ours(part, cache) for part in tokens.split([11, 1, 1, 9, 1, 7], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
    ours.config.__dict__["context_len"] = 30
    with pytest.raises(ValueError, match="31 positions"):
        ours(tokens[:, :1], cache)


def test_the_settings_that_are_written_are_read_as_the_same_model(saved, tmp_path):
    config = load(saved[0]).model.config
    (tmp_path / "config.json").write_text(json.dumps(settings_of(config)))
    assert families.config_of(read_settings(tmp_path)[1], family_of(config)) == config


def test_a_folder_is_evaluated(saved, tmp_path):
    folder, _, _ = saved
    (tmp_path / "one.jsonl").write_text(json.dumps({"query": "7", "choices": ["1", "2"], "gold": 0}))
    flags = ["--model", str(folder), "--tasks", str(tmp_path / "one.jsonl"), "--shots", "0", "--dtype", "bf16"]
    assert evaluate.main([*flags, "--tokenizer", "bytes", "--device", "cpu"]) == 0


def test_nothing_outside_of_a_window_is_read():
    config = VariantConfig(vocab_size=8, dim=8, n_layers=1, n_heads=2, hidden_dim=8)
    cache = PagedCache(config, n_blocks=12, block_size=4)
    for pool in (cache.keys, cache.values):
        pool.fill_(torch.nan)
    lengths = 2, 4, 5, 11, 16
    ids = [cache.new() for _ in lengths]
    for i, length in zip(ids, lengths, strict=True):
        for position in range(length):
            k = torch.full((2, 1, 4), float(position))
            cache.append(i, 0, k, -k)
    for window in (1, 3, 4, 5, 20):
        k, v, seen = window_of(cache, ids, window)
        for row, length in enumerate(lengths):
            visible = k[row, 0, seen[row], 0].tolist()
            assert visible == list(range(max(0, length - window), length))
        assert torch.equal(k, -v)
        assert k.shape[2] <= (window + 6) // 4 * 4 or window == 20


# ---- settings --------------------------------------------------------------------------------------------------------

PLAIN = {"rope_type": "default", "rope_theta": 1e4}
CHANGES = {
    "qwen3": [
        ("attention_bias", True), ("hidden_act", "gelu"), ("head_dim", 15), ("head_dim", "16"), ("head_dim", None),
        ("num_key_value_heads", 3), ("use_sliding_window", 1), ("max_window_layers", "1"),
        ("layer_types", [FULL] * 2), ("layer_types", "full_attention"),
        ("layer_types", [FULL, FULL, "chunked_attention"]), ("num_experts", 8), ("quantization_config", {"bits": 4}),
        ("rope_parameters", PLAIN | {"rope_type": "dynamic", "factor": 2.0}), ("rope_parameters", YARN | {"factor": 0}),
        ("rope_parameters", {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}),
        ("rope_parameters", YARN | {"truncate": 1}), ("rope_parameters", YARN | {"low_freq_factor": 1.0}),
        ("rope_parameters", PLAIN | {"partial_rotary_factor": 0.5}), ("rope_parameters", {FULL: PLAIN}),
        ("rope_theta", 77.0), ("tie_word_embeddings", "false"), ("architectures", ["Qwen3MoeForCausalLM"]),
        ("architectures", "Qwen3ForCausalLM"), ("model_type", "qwen3_moe"), ("rms_norm_eps", "1e-6"),
    ],
    "olmo3": [
        ("attention_bias", True), ("clip_qkv", 8.0), ("sliding_window", None), ("sliding_window", 0),
        ("layer_types", [SLIDING]), ("rope_parameters", PLAIN), ("rope_theta", 77.0), ("hidden_size", 30),
        ("rope_parameters", {FULL: PLAIN, SLIDING: PLAIN | {"rope_type": "linear", "factor": 2.0}}),
    ],
    "gemma2": [
        ("attn_logit_softcapping", 0), ("final_logit_softcapping", "30"), ("hidden_activation", "gelu"),
        ("sliding_window", None), ("rope_parameters", {FULL: PLAIN}), ("sliding_window_pattern", 3),
    ],
    "gpt_oss": [
        ("num_experts_per_tok", 6), ("num_local_experts", 0), ("swiglu_limit", None), ("attention_bias", False),
        ("quantization_config", {"quant_method": "mxfp4"}), ("rope_parameters", None), ("num_experts", 5),
    ],
    "gemma3": [
        ("attention_bias", True), ("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0),
        ("use_bidirectional_attention", True), ("hidden_activation", "gelu"), ("query_pre_attn_scalar", 0),
        ("rope_local_base_freq", 77.0), ("sliding_window_pattern", 0), ("model_type", "gemma3"),
        ("rope_scaling", {"rope_type": "linear", "factor": 8.0}),
    ],
    "qwen3_next": [
        ("num_experts", 8), ("num_experts", None), ("attention_bias", True), ("layer_types", [LINEAR, LINEAR, SLIDING]),
        ("layer_types", [LINEAR] * 3), ("linear_num_value_heads", 3), ("linear_key_head_dim", 0),
        ("partial_rotary_factor", 0.2), ("partial_rotary_factor", "0.25"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, and its settings."""
    found = {}
    for family in THEIRS:
        folder = tmp_path_factory.mktemp(family)
        save(make_theirs(family), folder)
        found[family] = folder, json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(("family", "name", "value"), [(f, *change) for f in CHANGES for change in CHANGES[f]])
def test_what_is_not_supported_is_refused_by_its_name(family, name, value, folders):
    folder, settings = folders[family]
    (folder / "config.json").write_text(json.dumps(settings | {name: value}))
    try:
        with pytest.raises(UsageError, match=name) as caught:
            load(folder)
        assert "\n" not in str(caught.value)
    finally:
        (folder / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("family", THEIRS)
def test_every_setting_that_transformers_writes_is_known(family):
    make_config, _ = THEIRS[family]
    kind = KINDS[make_config.model_type]
    settings = make_config(**({"num_experts": 0} if family == "qwen3_next" else {})).to_dict()
    assert [name for name in settings if not kind.knows(name)] == []
    assert list(kind.problems(settings)) == []


@pytest.mark.parametrize(("family", "older"), [
    ("qwen3", {"rope_theta": 1e6, "rope_scaling": None, "sliding_window": None, "head_dim": 16}),
    ("qwen3", {"rope_theta": 1e4, "head_dim": 16, "rope_scaling": YARN}),
    ("olmo3", {"rope_theta": 500_000, "rope_scaling": YARN | {"rope_theta": 500_000}, "sliding_window": 9}),
    ("olmo3", {"sliding_window": 9, "num_hidden_layers": 9, "head_dim": None}),
    ("gemma3", {"rope_theta": 5e5, "rope_local_base_freq": 500, "sliding_window": 9, "sliding_window_pattern": 2,
                "head_dim": 16, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 16,
                "cache_implementation": "hybrid"}),
])  # fmt: skip
def test_older_settings_mean_what_transformers_reads(family, older, tmp_path):
    make_config, _ = THEIRS[family]
    settings = SIZES | older | {"model_type": make_config.model_type}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ours = families.config_of(read_settings(tmp_path)[1], family)
    theirs = make_config(**{name: value for name, value in (SIZES | older).items() if value is not None})
    assert ours.layer_types == theirs.layer_types
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    ropes = theirs.rope_parameters
    full, local = (ropes.get(FULL, ropes), ropes.get(SLIDING))
    frequencies, factor = scaled_frequencies(16, ours.rope_theta, ours.rope_scaling)
    expected, their_factor = scaled_frequencies(16, full["rope_theta"], {k: v for k, v in full.items() if k in (
        "rope_type", "factor", "original_max_position_embeddings")})  # fmt: skip
    assert torch.equal(frequencies, expected)
    assert factor == their_factor
    assert ours.sliding_rope_theta == (local and local["rope_theta"])


@pytest.mark.parametrize(("share", "said"), [(1.5, "at most 1"), (0, "above 0"), ("1", "number"), (0.2, "turns 3")])
def test_a_share_of_a_head_that_cannot_turn_is_refused(share, said, folders):
    _, settings = folders["qwen3_next"]
    changed = settings | {"partial_rotary_factor": share, "rope_parameters": PLAIN}
    (problem,) = KINDS["qwen3_next"].problems(changed)
    assert f"partial_rotary_factor = {share!r}" in problem
    assert said in problem


def test_one_base_for_olmos_layers_is_refused_where_versions_of_transformers_differ(folders):
    _, settings = folders["olmo3"]
    plain = {name: value for name, value in settings.items() if name != "rope_parameters"}
    problems = list(KINDS["olmo3"].problems(plain | {"rope_theta": 10_000.0}))
    assert len(problems) == 1
    assert "rope_theta = 10000.0" in problems[0]


def test_weights_that_are_not_the_models_are_one_line(folders, tmp_path):
    folder, _ = folders["gemma3"]
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights, file = load_file(folder / "model.safetensors"), tmp_path / "model.safetensors"
    name = "model.layers.1.self_attn.q_norm.weight"
    for change in (
        {name: weights[name][:-1].clone()},
        {name: weights[name].int()},
        {"lm_head.bias": weights[name] + 1},
    ):
        save_file(weights | change, file)
        with pytest.raises(UsageError, match=next(iter(change))):
            load(tmp_path)
    save_file({other: tensor for other, tensor in weights.items() if other != name}, file)
    with pytest.raises(UsageError, match=f"missing: {name}"):
        load(tmp_path)
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, file)  # as some programs save tied weights
    assert load(tmp_path).model.output is None
    save_file(weights | {"lm_head.weight": embedding + 1}, file)
    with pytest.raises(UsageError, match="tie_word_embeddings"):
        load(tmp_path)


def test_a_configuration_says_what_does_not_fit():
    sizes: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 8}
    for change, named in (
        ({"norms": "around"}, "around"), ({"activation": "relu"}, "relu"), ({"layer_types": [FULL]}, "layer_types"),
        ({"layer_types": [FULL, "latent"]}, "latent"), ({"n_kv_heads": 3}, "3"), ({"n_heads": 3}, "n_heads = 3"),
        ({"layer_types": [LINEAR] * 2}, "linear_num_key_heads"),
        ({"layer_types": [SLIDING] * 2}, "sliding_window = None"), ({"head_dim": 8, "hidden_dim": None}, "hidden_dim"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=named):
            VariantConfig(**sizes | change)
    with pytest.raises(ValueError, match="no family"):
        family_of(VariantConfig(**sizes, norms="both"))
    with pytest.raises(ValueError, match="ntk"):
        VariantLlama(VariantConfig(**sizes, rope_scaling={"rope_type": "ntk"}))
