"""Full training, LoRA and QLoRA, and padded against packed conversations, at a size for a CPU."""

import argparse

import pytest
import torch

from lib.bench import finetuning
from lib.given.data.record import load
from lib.given.models.llama import LlamaConfig
from lib.llama import Llama

WORDS = "--device cpu --tiny --r 2 --batch 2 --length 32 --full-layers 1 --conversations 12 --rounds 1"


@pytest.mark.time_limit(120)
def test_bytes_are_as_predicted_and_packing_learns_the_same_targets(tmp_path):
    finetuning.main([*WORDS.split(), "--folder", str(tmp_path)])
    found = load("finetuning", tmp_path)["results"]
    assert set(found["methods"]) == {"full", "lora", "qlora"}
    for method, measured in found["methods"].items():
        assert measured["bytes"] == measured["predicted_bytes"], method
        assert measured["tokens_per_s"] > 0
    assert found["methods"]["full"]["n_layers"] == 1
    padded, packed = found["packing"]["padded"], found["packing"]["packed"]
    assert padded["learned"] == packed["learned"] > 0
    assert packed["positions"] < padded["positions"]


def test_the_model_is_chapter_4s_llama():
    config = LlamaConfig(vocab_size=50, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=128, context_len=8)
    model, plain = finetuning.Model(config, "full", 1, "cpu"), Llama(config)
    model.load_state_dict(plain.state_dict())
    tokens = torch.arange(8)[None]
    rows = torch.stack([tokens, torch.zeros_like(tokens), tokens])
    torch.testing.assert_close(model(rows), plain(tokens), atol=1e-5, rtol=1e-5)


def test_batches_end_with_their_longest_row():
    o = argparse.Namespace(batch=2, length=16, device="cpu")
    given = [(list(range(n)), [0, *[1] * (n - 1)]) for n in (5, 9, 3)]
    found = list(finetuning.batches(finetuning.rows_of(given, o, "padded"), o))
    assert [tuple(inputs.shape) for inputs, _ in found] == [(3, 2, 8), (3, 1, 2)]
