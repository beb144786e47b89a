"""Triton where there is a GPU, its interpreter where there is none,
and neither where Triton is not installed (macOS).
"""

import inspect
import os
import re
import subprocess
import sys

import pytest
import torch

from lib.flash_attention import FlashAttentionTriton
from lib.given.kernels.grouped import check_groups
from lib.given.kernels.mode import INTERPRETED
from lib.workbook.book.catalog import ROOT

HIDE = """
import sys


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
"""
WITHOUT = """
import torch
from lib.flash_attention import flash_attention
from lib.given.kernels.mode import HAS_TRITON
from lib.triton_kernels import vector_add
q = torch.randn(1, 2, 20, 16)
torch.testing.assert_close(flash_attention(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q))
assert not HAS_TRITON
try:
    vector_add(q, q)
except RuntimeError as error:
    print(error)
"""


def run(*command, **env) -> str:
    known = {k: v for k, v in os.environ.items() if not k.startswith(("WORKBOOK_", "PYTEST_", "TRITON_"))}
    environment = known | {"PYTHONPATH": str(ROOT), "WORKBOOK_WORLD": "reference"} | env
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def without_triton(tmp_path) -> dict:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def test_without_triton_attention_takes_the_tiles_and_a_kernel_says_what_is_missing(without_triton):
    assert "Triton is not installed" in run("-c", WITHOUT, **without_triton)


@pytest.mark.slow
def test_without_triton_the_checks_of_kernels_are_skipped_with_a_reason(without_triton):
    chosen = "vector_add or flash_forward_kernel or io_bytes"
    chapters = ["tests/chapter_14", "tests/chapter_15"]
    out = run("-m", "pytest", "--reference", "-rs", "-p", "no:cacheprovider", "-k", chosen, *chapters, **without_triton)
    assert "tests/chapter_14/test_triton_kernels.py" in out
    assert "tests/chapter_15/test_kernels.py" in out
    assert "Triton is not installed" in out
    assert " passed, " in out


@pytest.mark.parametrize("visible", ["", "-1"])
def test_the_interpreter_is_asked_for_where_gpus_are_hidden(visible):
    code = "import os, lib; print(os.environ.get('TRITON_INTERPRET'))"
    assert run("-c", code, CUDA_VISIBLE_DEVICES=visible).strip() == "1"


def test_who_asks_for_the_interpreter_is_heard():
    code = "from lib.given.kernels.mode import INTERPRETED; print(INTERPRETED)"
    assert run("-c", code, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0").strip() == "False"


def test_triton_that_was_imported_too_early_is_told():
    code = "import triton, lib.given.kernels.mode"
    done = run(
        "-W",
        "always",
        "-c",
        "import warnings, io, contextlib\nwith warnings.catch_warnings(record=True) as said:\n    "
        f"warnings.simplefilter('always')\n    {code}\nprint(said[-1].message)",
        CUDA_VISIBLE_DEVICES="",
    )
    assert "put `import lib` first" in done


@pytest.mark.skipif(not INTERPRETED, reason="of Triton's interpreter")
def test_no_call_searches_tritons_language_again(monkeypatch):
    monkeypatch.setattr(inspect, "getmembers", None)
    q, k, v = torch.randn(3, 1, 20, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(FlashAttentionTriton.apply(q, k, v, False), expected)


@pytest.mark.parametrize("counts", [[1, 1], [4, -1], [2, 2, 0]])
def test_groups_that_do_not_add_up_are_refused_with_their_counts(counts):
    x, weights = torch.ones(3, 4), torch.ones(2, 4, 5)
    with pytest.raises(ValueError, match=re.escape(str(counts)) if len(counts) == 2 else r"counts \(3,\)"):
        check_groups(x, weights, torch.tensor(counts))
    check_groups(x, weights, torch.tensor([0, 3]))
