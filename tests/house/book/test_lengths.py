"""No module is longer than 300 lines of code and no function than 25, but for those that `LONG` lists with a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.workbook.book.catalog import ROOT

MODULE, FUNCTION, KERNEL = 300, 25, 60
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
ROOMS = ("solutions", "lib", "tests/house")
LONG = {
    "the steps of a measurement in their order, each a line or two, and nothing is used twice": """
        lib/bench/all_reduce.py ::main
        lib/bench/amp.py ::main
        lib/bench/attention_sweep.py ::main
        lib/bench/context_parallel.py ::work
        lib/bench/ddp.py ::measure_steps
        lib/bench/ladder.py module ::run
        lib/bench/low_precision.py ::Bench.steps ::Bench.tokens
        lib/bench/mpi.py ::main
        lib/bench/scaling_laws.py module ::main ::rival
        lib/bench/serving.py ::main
        lib/bench/yardstick/compare.py module ::main
        lib/bench/yardstick/parts.py module ::compare ::main
    """,
    "kernels, their launches and the shapes they take: one is read beside the other": """
        lib/bench/kernels/flash.py module ::main
        lib/bench/kernels/flash_shapes.py ::main
        lib/bench/kernels/flash_tiles.py ::main
        lib/bench/kernels/kernels_once.py ::main
        lib/bench/triton_kernels.py ::cases ::main
        lib/fast/attention/flash.py module
        lib/fast/attention/flash_hopper.py module
        lib/fast/attention/flash_items.py ::deal
        lib/fast/attention/flash_stored.py module
        lib/fast/launch.py ::_direct
        lib/fast/parts/grouped.py module
    """,
    "a drawing, one statement for each thing that is seen": """
        lib/demos/scaling_laws.py ::draw_run
        lib/given/show/attention.py ::heads_and_cache
        lib/given/show/experts.py ::draw_mixture
        lib/given/show/memory.py ::draw_tiles
        lib/given/show/parallel.py ::draw_flat_row
        lib/given/show/play/pairs.py ::_row
        lib/given/show/plots.py ::style
        lib/given/show/profiles.py ::draw_trace
        lib/given/show/sequences.py ::draw_ring_backward ::draw_sequence_block
        lib/given/show/serving.py ::draw_prefix_tree
        lib/workbook/tools/paper.py ::write
    """,
    "one statement for each flag or number, with its help": """
        lib/runs/engine/arguments.py ::_add_model_flags ::add_place_flags ::add_training_flags
        lib/runs/evaluate.py ::make_parser
        lib/runs/serve.py ::make_parser
        lib/runs/serving/metrics.py ::Metrics.__init__
    """,
    "rules in the order in which they are tried, each with its message": """
        lib/given/data/images.py ::load_images
        lib/given/models/gpt2.py ::read_config
        lib/ranks/failure.py ::_state
        lib/runs/engine/mesh.py ::check_degrees
        lib/runs/engine/request.py ::_resolved ::check_flags
        lib/runs/engine/sources.py ::make_codec ::open_pictures
        lib/runs/engine/state.py ::peek
        lib/workbook/book/catalog.py ::find
        lib/workbook/grading/expect.py ::_close_arrays ::_first_difference
        lib/workbook/tools/update.py ::_refuse_what_is_in_the_way
    """,
    "one loop around what a process, a run or an engine holds; its steps have names already": """
        lib/demos/ddp.py ::train_digits
        lib/demos/fsdp.py ::run_stage
        lib/demos/serving.py ::chat
        lib/ranks/forkserver.py ::_be ::serve
        lib/runs/engine/loop.py ::Run.go
        lib/runs/engine/start.py ::prepare
        lib/runs/reinforcing/loop.py ::Run.go
        lib/runs/rent/modal_llama.py ::main
        lib/runs/rent/modal_train.py ::main
        lib/runs/rent/remote.py ::main
        lib/runs/serving/draft.py ::DraftEngine.step
        lib/workbook/checks/child.py ::_guard
        lib/workbook/checks/runner.py ::Runner.work
    """,
    "cases of one subject, each read by itself; a long one acts as one user from beginning to end": """
        tests/house/bench/test_bench.py ::test_scaling_laws_are_swept_and_fitted
        tests/house/bench/yardstick_programs.py ::train_through_files
        tests/house/book/test_book.py module
        tests/house/book/test_lab.py ::test_a_wrong_answer_is_explained_and_the_right_one_passes
        tests/house/book/test_site.py module
        tests/house/book/test_update.py module
        tests/house/checks/test_checks.py module
        tests/house/checks/test_files.py ::test_gradescope_gets_what_its_specification_names
        tests/house/fast/hopper_simulator.py module ::_names
        tests/house/fast/test_flash_hopper.py module
        tests/house/given/test_play.py module
        tests/house/ranks/test_ranks.py module
        tests/house/runs/test_escapes.py ::place
        tests/house/runs/test_finetune.py module ::test_full_is_a_loop_by_hand_however_a_step_is_cut
        tests/house/runs/test_inputs.py module
        tests/house/runs/test_limits.py ::test_a_second_run_is_refused_by_name_and_goes_on_when_the_first_was_killed
        tests/house/runs/test_rented.py module
        tests/house/runs/test_runs.py module
            ::test_torchrun_restarts_a_run_whose_rank_was_killed_and_nothing_is_trained_twice
            ::test_torchrun_that_is_asked_to_leave_lets_its_ranks_save_first
        tests/house/runs/test_runs_quality.py module
        tests/house/runs/test_serve.py module ::test_shared_blocks_change_no_token_and_none_is_lost
        tests/house/runs/test_serve_chat.py module ::test_a_folder_of_transformers_chats_as_its_own_library_does
        tests/house/runs/test_serve_strangers.py module ::test_a_step_that_fails_ends_only_its_requests
            ::test_weights_that_are_not_what_the_settings_say_are_one_line
    """,
}


def texts(tree: ast.Module) -> set[int]:
    """The lines of docstrings."""
    alone = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    found = [value for value in alone if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return {n for value in found for n in range(value.lineno, (value.end_lineno or value.lineno) + 1)}


def code_of(text: str, tree: ast.Module) -> set[int]:
    """The lines that are no docstring, comment or blank line."""
    lines = enumerate(text.splitlines(), start=1)
    return {n for n, line in lines if line.strip() and not line.strip().startswith("#")} - texts(tree)


def functions(tree: ast.AST, home: str = "") -> Iterator[tuple[str, FUNCTIONS]]:
    """Every function with its name and those around it."""
    for node in ast.iter_child_nodes(tree):
        name = f"{home}.{node.name}" if isinstance(node, FUNCTIONS | ast.ClassDef) else home
        if isinstance(node, FUNCTIONS):
            yield name.removeprefix("."), node
        yield from functions(node, name)


def too_long(path: Path) -> Iterator[tuple[str, int]]:
    """The module and its functions that are over the limit, each with its lines, without those of inner functions."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    code, name = code_of(text, tree), path.relative_to(ROOT).as_posix()
    if len(code) > MODULE:
        yield name, len(code)
    for function, node in functions(tree):
        within = {
            n for _, inner in functions(node) for n in range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
        }
        own = code & set(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)) - within
        if len(own) > (KERNEL if any("jit" in ast.unparse(d) for d in node.decorator_list) else FUNCTION):
            yield f"{name}::{function}", len(own)


def listed_in(names: str) -> Iterator[str]:
    """The names in a text of the list: each file, then "module" if it is long itself, then its functions."""
    file = ""
    for word in names.split():
        if word.endswith(".py"):
            file = word
        else:
            yield file if word == "module" else file + word


@pytest.fixture(scope="module")
def long() -> dict[str, int]:
    return dict(pair for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) for pair in too_long(path))


def test_what_is_long_is_listed_with_a_reason(long):
    listed = {name for names in LONG.values() for name in listed_in(names)}
    unlisted = {name: lines for name, lines in long.items() if name not in listed}
    assert unlisted == {}, f"divide them (a module has {MODULE} lines of code, a function {FUNCTION}): {unlisted}"
    assert listed - long.keys() == set(), "no longer long: take them off the list"


def test_lines_of_code_are_counted(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    body = "\n".join(f"    x = {n}" for n in range(26))
    path = tmp_path / "a.py"
    path.write_text(
        f'def long():\n    """One.\n\n    Two.\n    """\n    # three\n{body}\n\n\n'
        "class A:\n    def short(self):\n        pass\n"
    )
    assert list(too_long(path)) == [("a.py::long", 26)]
    path.write_text(f"@triton.jit\ndef kernel():\n{body}\n")
    assert list(too_long(path)) == []
    path.write_text("x = 1\n" * 301)
    assert list(too_long(path)) == [("a.py", 301)]
