"""Published weights: read as they come, and one error for all that is wrong with them."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from lib.given.data.weights import META_CUTS, CheckpointError, load_weights
from lib.given.models.llama import LlamaConfig, hf_tensors, meta_shapes

CONFIG = LlamaConfig(vocab_size=10, dim=8, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=12, context_len=16)
HF_SHAPES = {name: shape for name, (_, shape) in hf_tensors(CONFIG).items()}


def make(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_shards(folder, weights, n_shards=3):
    """As Transformers writes them: model-00001-of-00003.safetensors and an index."""
    files = [f"model-{i + 1:05}-of-{n_shards:05}.safetensors" for i in range(n_shards)]
    weight_map = {name: files[i % n_shards] for i, name in enumerate(weights)}
    for file in files:
        save_file({n: w.contiguous() for n, w in weights.items() if weight_map[n] == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def test_shards_with_an_index(tmp_path):
    weights = make(HF_SHAPES, torch.bfloat16)
    write_shards(tmp_path, weights)
    assert same(load_weights(tmp_path, HF_SHAPES), weights)


def test_one_safetensors_file_by_folder_and_by_name(tmp_path):
    weights = make(HF_SHAPES)
    save_file(weights, tmp_path / "model.safetensors")
    assert same(load_weights(tmp_path), weights)
    assert same(load_weights(tmp_path / "model.safetensors", HF_SHAPES), weights)


def test_metas_file(tmp_path):
    weights = make(meta_shapes(CONFIG), torch.bfloat16)
    torch.save(weights | {"rope.freqs": torch.ones(1)}, tmp_path / "consolidated.00.pth")
    assert same(load_weights(tmp_path, meta_shapes(CONFIG), ignore=("rope.freqs",)), weights)


def test_metas_files_of_a_larger_model_are_put_together(tmp_path):
    weights = make(meta_shapes(CONFIG))
    for rank in range(2):
        share = {}
        for name, weight in weights.items():
            dim = META_CUTS.get(name.split(".")[-2])
            share[name] = weight.clone() if dim is None else weight.chunk(2, dim)[rank].clone()
        torch.save(share, tmp_path / f"consolidated.{rank:02}.pth")
    assert same(load_weights(tmp_path, meta_shapes(CONFIG)), weights)


def test_loaded_weights_run(tmp_path):
    from solutions.llama import Llama, convert_hf_state_dict

    write_shards(tmp_path, make(HF_SHAPES))
    model = Llama(CONFIG)
    model.load_state_dict(convert_hf_state_dict(load_weights(tmp_path, HF_SHAPES), CONFIG))
    assert model(torch.tensor([[1, 2, 3]])).isfinite().all()


def test_all_that_is_wrong_comes_in_one_error(tmp_path):
    weights = make(HF_SHAPES)
    weight_map = write_shards(tmp_path, weights)
    first, second, third = sorted(set(weight_map.values()))
    names = {file: [n for n in weight_map if weight_map[n] == file] for file in (first, second, third)}
    data = (tmp_path / first).read_bytes()
    (tmp_path / first).write_bytes(data[: len(data) // 2])
    gone, bent = names[second][:2]
    kept = {n: weights[n] for n in names[second] if n != gone} | {bent: torch.ones(3, 3), "who.weight": torch.ones(1)}
    save_file(kept, tmp_path / second)
    (tmp_path / third).unlink()
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path, HF_SHAPES)
    text = str(caught.value)
    assert f"{first}: cut short" in text
    assert f"{third}: the index names it, and it is not there" in text
    assert f"missing: {gone} (the index says in {second})" in text
    assert f"wrong shape: {bent} is [3, 3], expected {list(HF_SHAPES[bent])}" in text
    assert "extra: who.weight" in text
    assert len(caught.value.problems) == 5
    assert "5 problems" in text


def test_a_tensor_that_neither_index_nor_file_has_is_missing(tmp_path):
    weights = make(HF_SHAPES)
    del weights["lm_head.weight"], weights["model.norm.weight"]
    write_shards(tmp_path, weights)
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path, HF_SHAPES)
    assert sorted(caught.value.problems) == ["missing: lm_head.weight", "missing: model.norm.weight"]


class Sly:
    ran = False

    def __reduce__(self):
        return (setattr, (Sly, "ran", True))


@pytest.mark.parametrize("write", ["torch", "pickle"])
def test_a_pickle_that_would_run_code_runs_none(tmp_path, write):
    path = tmp_path / "consolidated.00.pth"
    if write == "torch":
        torch.save({"norm.weight": Sly()}, path)
    else:
        path.write_bytes(pickle.dumps({"norm.weight": Sly()}))
    with pytest.raises(CheckpointError, match="nothing was run"):
        load_weights(tmp_path)
    assert not Sly.ran


def test_a_pickle_of_other_things_lists_them(tmp_path):
    torch.save({"norm.weight": torch.ones(2), "step": 7, "names": ["a"]}, tmp_path / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match=r"step is a int, names is a list"):
        load_weights(tmp_path)
    torch.save([torch.ones(2)], tmp_path / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match="holds a list, where a dict of tensors"):
        load_weights(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "consolidated.00.pth"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_file_cut_short_is_said_to_be(tmp_path, name, share):
    path = tmp_path / name
    (save_file if name.endswith("safetensors") else torch.save)(make(meta_shapes(CONFIG)), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path, meta_shapes(CONFIG))
    assert len(caught.value.problems) == 1
    assert name in caught.value.problems[0]


def test_pieces_that_do_not_fit_together(tmp_path):
    torch.save({"layers.0.attention.wq.weight": torch.ones(2, 8), "norm.weight": torch.ones(2)},
               tmp_path / "consolidated.00.pth")  # fmt: skip
    torch.save({"layers.0.attention.wq.weight": torch.ones(2, 6)}, tmp_path / "consolidated.01.pth")
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path)
    assert len(caught.value.problems) == 2


def test_an_index_that_is_none_and_one_that_leads_outside(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no index"):
        load_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    with pytest.raises(CheckpointError, match="no file of this folder"):
        load_weights(tmp_path)


def test_no_checkpoint_says_what_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match="looked for model"):
        load_weights(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match="must end in"):
        load_weights(tmp_path / "weights.bin")


def test_pytorchs_advice_to_load_it_all_the_same_is_never_quoted(tmp_path):
    for thing, named in ((os.system, "(posix.system)"), (CONFIG, "LlamaConfig)")):
        torch.save({"w": thing}, tmp_path / "consolidated.00.pth")
        with pytest.raises(CheckpointError) as error:
            load_weights(tmp_path)
        assert named in str(error.value)
        assert "nothing was run" in str(error.value)
        assert "weights_only" not in str(error.value)
