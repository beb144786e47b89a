"""The cloud run: planned and described without an account, and its container's part run on a small checkpoint."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from lib.given.models.llama import PRESETS, hf_tensors
from lib.runs.rent import modal_llama


def test_the_dry_run_says_everything_and_imports_no_modal(capsys):
    assert modal_llama.main(["--dry-run"]) == 0
    out = capsys.readouterr().out
    for word in ("image", "volume", "secret", "L4", "16.2 GB", "$0.80", "nothing was rented"):
        assert word in out
    assert "modal" not in sys.modules


@pytest.mark.parametrize(
    ("memory_gb", "gpu"), [(3, "T4"), (16.2, "L4"), (33.6, "L40S"), (48.1, "A100-80GB"), (81, "H200"), (165.5, "B200")]
)
def test_the_cheapest_card_that_fits(memory_gb, gpu):
    assert modal_llama.pick_gpu(memory_gb).name == gpu


def test_what_fits_on_no_card_is_refused(capsys):
    assert modal_llama.main(["--dry-run", "--model", "70B", "--bits", "32"]) == 1
    assert "B200 with 180 GB" in capsys.readouterr().err


def test_without_modal_it_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "modal", None)
    assert modal_llama.main([]) == 1
    assert "pip install modal" in capsys.readouterr().err


class Words:
    eos_token_id = None

    def encode(self, text):
        return [len(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


def test_the_containers_part_streams_text(tmp_path):
    generator = torch.Generator().manual_seed(0)
    shapes = hf_tensors(PRESETS["tiny"])
    weights = {name: 0.05 * torch.randn(shape, generator=generator) for name, (_, shape) in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    writer = modal_llama.Writer(str(tmp_path), "tiny", 32, "cpu", Words())
    pieces = list(writer.write("one three five", 5, temperature=0))
    assert len(pieces) == 5
    assert "".join(pieces).split() == [piece.strip() for piece in pieces]
