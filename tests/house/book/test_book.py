"""The book as a whole fits together: chapters, exercises, mistakes, hints, measurements, and the habits of its code."""

import ast
import importlib
import re
import subprocess
import sys

import pytest

from lib.workbook import grading
from lib.workbook.book.backmatter import program
from lib.workbook.book.catalog import (
    EXERCISE_NUMBER,
    ROOT,
    BookError,
    Size,
    all_exercises,
    chapters,
    find,
    pages,
    routes,
)
from lib.workbook.book.stubs import make_stub, marker_lines

CHAPTERS = list(chapters().values())
EXERCISES = all_exercises()
by_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.module)
by_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: f"{e.number}-{e.name}")
CONTRACT = {
    "tokenization": "WordTokenizer count_pairs merge_pair train_bpe BPETokenizer embed",
    "rope": """
        rope_frequencies rotation_matrix precompute_rope apply_rope interleaved_to_half half_to_interleaved
        interpolate_positions
    """,
    "attention": """
        softmax causal_mask scaled_dot_product_attention split_heads merge_heads repeat_kv KVCache
        MultiHeadAttention
    """,
    "llama": """
        RMSNorm swiglu_hidden_dim SwiGLU TransformerBlock Llama count_parameters inference_memory_gb kv_cache_bytes
        convert_hf_state_dict sample_next generate
    """,
    "vit": """
        patchify_unfold patchify_einops unpatchify conv_from_linear ImageEmbeddings EncoderAttention MLP ViTBlock
        VisionTransformer count_parameters convert_hf_state_dict convert_timm_state_dict resize_positions
    """,
    "gpt2": """
        layer_norm gelu_tanh CausalSelfAttention MLP Block GPT2 init_weights count_parameters convert_hf_state_dict
        pad_vocab load_pretrained
    """,
    "training": """
        cross_entropy AdamW cosine_schedule clip_gradient_norm_ parameter_groups TokenBatches accumulate_gradients
        save_checkpoint load_checkpoint hours_per_epoch
    """,
    "speed": """
        benchmark matmul_flops attention_flops training_flops_per_token vit_training_flops_per_image mfu
        roofline_seconds saved_activation_bytes attention_activation_bytes profile_step memory_timeline
    """,
    "mpi": "scatter_scale_average ring_all_reduce tree_broadcast all_reduce_seconds average_gradients_mpi",
    "ddp": """
        shard_indices broadcast_parameters average_gradients average_gradients_flat OverlapDDP BucketedDDP
        ddp_overhead_seconds optimal_bucket_bytes
    """,
    "amp": "FloatFormat round_to_format accumulate GradScaler autocast_dtypes MiniAutocast",
    "fsdp": """
        shard unshard ShardedOptimizer reduce_scatter_gradients FlatShard FullySharded clip_sharded_gradient_norm_
        memory_per_device apply_fully_shard save_sharded load_sharded
    """,
    "tensor_parallel": """
        partitioned_dot matmul_outer matmul_inner CopyToRegion ReduceFromRegion ColumnParallelLinear
        RowParallelLinear ParallelMLP ParallelAttention vocab_parallel_cross_entropy llama_plan ffn_partition_specs
        tensor_parallel_bytes pipeline_bubble
    """,
    "triton_kernels": "vector_add weighted_sum softmax_rows matmul rms_norm",
    "flash_attention": """
        attention_io_bytes online_softmax_update FlashAttentionTorch flash_backward flash_forward_kernel
        flash_backward_dq_kernel flash_backward_dkdv_kernel FlashAttentionTriton flash_attention
    """,
    "scaling": """
        training_memory_bytes fsdp_memory_bytes min_fsdp_devices compute_bound_batch choose_gpu epoch_cost
        local_sgd_step layout_costs plan
    """,
    "pipeline": """
        partition_layers gpipe_schedule one_f_one_b_schedule interleaved_schedule zero_bubble_schedule
        DeferredLinear simulate checkpoint PipelineStage timetable run_schedule
    """,
    "context_parallel": """
        GatherSequence ScatterSequence SequenceParallelBlock heads_to_sequence sequence_to_heads ulysses_attention
        merge_attention zigzag_indices zigzag_shard zigzag_gather ring_block ring_attention context_parallel_bytes
        hidden_length
    """,
    "moe": """
        top_k_router load_balancing_loss router_z_loss sort_by_expert grouped_matmul_kernel grouped_matmul
        capacity_mask update_router_bias MoE convert_hf_state_dict dispatch combine ExpertParallelMoE moe_parameters
    """,
    "low_precision": """
        absmax_scale quantize dequantize quantization_error scaled_matmul DelayedScale Float8Linear mx_quantize
        quantize_int4 pack_int4 unpack_int4 int4_matmul_kernel Int4Linear gptq
    """,
    "serving": """
        decode_seconds compute_bound_decode_batch BlockAllocator PagedCache paged_attention PrefixTree Scheduler
        Engine generate_many speculative_step expected_tokens fill_static_inputs
    """,
    "scaling_laws": """
        fit_power_law bootstrap learning_curve_prediction wsd_schedule fit_parametric isoflop_minimum
        compute_optimal critical_batch_size mup_multipliers
    """,
    "attention_variants": """
        qk_norm grouped_attention llama3_frequencies yarn_frequencies apply_partial_rope sliding_window_mask
        RollingKVCache CausalAttention LatentCache MultiHeadLatentAttention hybrid_layer_types cache_bytes
        variant_flops packed_positions document_mask varlen_attention flash_window_forward flash_window_kernel
    """,
    "linear_attention": """
        linear_attention_recurrent linear_attention_chunked delta_rule_recurrent wy_representation
        delta_rule_chunked short_convolution GatedDeltaNet hybrid_cache_bytes crossing_length scan_states
        sequence_parallel_linear_attention chunk_linear_attention
    """,
    "optimizers": """
        steepest_direction Lion Adafactor quantize_blockwise dequantize_blockwise AdamW8bit newton_schulz
        singular_values_after newton_schulz_flops Muon split_parameters optimizer_state_bytes assign_owners
        ShardedMuon
    """,
    "data": """
        extract_text gopher_quality c4_clean mask_pii normalize deduplicate_lines minhash_signature near_duplicates
        contaminated_spans QualityClassifier plan_mixture pack_documents write_shards shuffled_index ShardReader
    """,
    "evaluation": """
        rolling_windows bits_per_byte encode_pair loglikelihood choose_answer few_shot_prompt wilson_interval
        paired_difference core_score extract_answer pass_at_k expected_calibration_error contaminated_share
    """,
    "finetuning": """
        render_chat pack_conversations packed_mask masked_cross_entropy accumulate_masked LoRALinear add_lora
        lora_parameters nf4_quantize nf4_dequantize NF4Linear finetuning_memory_bytes sequence_log_probs dpo_loss
        kl_penalty
    """,
    "rewards": """
        score_response check_countdown group_advantages token_log_probs policy_loss importance_weights agg_loss
        sample_groups StalenessGate grpo_step
    """,
}
"""The graded names of each chapter. Answers and other chapters use them, so they stay as they are."""


def test_every_page_of_the_book_is_there_and_every_chapter_is_in_the_book():
    listed = {entry["file"] for entry in pages()}
    assert [file for file in listed if not (ROOT / file).exists()] == []
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "chapters").glob("[0-9][0-9]_*.md")}
    assert found <= listed


def test_every_reference_is_a_chapter():
    modules = {path.stem for path in (ROOT / "solutions").glob("*.py")} - {"__init__"}
    assert modules == set(chapters())


@by_chapter
def test_the_graded_names_are_the_contracts(chapter):
    names = [e.name for e in chapter.exercises]
    assert sorted(names) == sorted(CONTRACT[chapter.module].split()), (
        "CONTRACT lists the graded names: add a new one there"
    )
    numbers = [e.number for e in chapter.exercises]
    assert numbers == [f"{chapter.number}.{i}" for i in range(1, len(numbers) + 1)]


@by_chapter
def test_stubs_name_every_exercise_and_hide_every_answer(chapter):
    stub = make_stub(chapter)
    assert set(marker_lines(stub)) == {e.name for e in chapter.exercises}
    assert "SOLUTION" not in stub
    assert "solutions" not in stub
    compile(stub, str(chapter.mine), "exec")


IMPORT_STUBS = """
import sys, types
from lib.workbook.book import resolve
from lib.workbook.book.catalog import chapters
from lib.workbook.book.stubs import make_stub
for chapter in chapters().values():
    resolve.enter(f"only:{chapter.module}")
    name = f"stub_of_{chapter.module}"
    module = sys.modules[name] = types.ModuleType(name)
    try:
        exec(compile(make_stub(chapter), f"stub of {chapter.module}", "exec"), vars(module))
        missing = [e.name for e in chapter.exercises if not hasattr(module, e.name)]
    except Exception as error:
        missing = [repr(error)]
    if missing:
        print(chapter.module, *missing)
"""


def test_every_stub_imports():
    """As a learner who has written nothing gets it, beside the reference of the other chapters."""
    done = subprocess.run([sys.executable, "-c", IMPORT_STUBS], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


@by_chapter
def test_hidden_helpers_begin_with_an_underscore(chapter):
    stub_names = {getattr(n, "name", None) for n in ast.parse(make_stub(chapter)).body}
    tree = ast.parse(chapter.reference.read_text())
    hidden = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name not in stub_names]
    assert [name for name in hidden if not name.startswith("_")] == []


@by_exercise
def test_docstrings_state_the_contract(exercise):
    assert EXERCISE_NUMBER.search(exercise.doc.splitlines()[0])
    assert exercise.summary.endswith((".", "?"))
    if exercise.name[0].islower():
        assert "Returns:" in exercise.doc or "Yields:" in exercise.doc


@by_exercise
def test_every_exercise_has_three_mistakes_with_their_own_sentences(exercise):
    sentences = [m.sentence for m in grading.mistakes_of(exercise.module, exercise.name)]
    assert len(set(sentences)) == len(sentences) >= 3
    assert [s for s in sentences if s.endswith(".") or s.startswith("looks like")] == [], (
        "it completes 'looks like', without a period"
    )


@by_exercise
def test_every_exercise_has_its_place_its_card_and_three_hints_in_the_chapter(exercise):
    text = chapters()[exercise.module].path.read_text()
    assert f"({exercise.label})=" in text
    assert f'exercise("{exercise.handle}")' in text
    after = text.split(f"({exercise.label})=")[1].split("\n(ex-")[0]
    for n in (1, 2, 3):
        assert len(re.findall(rf":::+\{{dropdown\}} Hint {n}", after)) == 1, (
            f"{exercise.name}: hint {n} is missing, or twice"
        )


@by_exercise
def test_the_chapter_says_the_command_that_the_card_says(exercise):
    text = chapters()[exercise.module].path.read_text()
    after = text.split(f"({exercise.label})=")[1].split("\n(ex-")[0]
    assert f"`{exercise.command}`" in after


@by_chapter
def test_equations_are_labelled_in_the_order_of_the_page(chapter):
    labels = re.findall(r"^:label: eq-([\w-]+)-(\d+)$", chapter.path.read_text(), re.MULTILINE)
    assert labels == [(chapter.module, str(n)) for n in range(1, len(labels) + 1)]


@by_chapter
def test_every_test_is_named_after_an_exercise_and_every_exercise_has_tests(chapter):
    from lib.workbook.checks.plugin import exercise_of

    tests = [
        node.name
        for path in sorted(chapter.tests.glob("test_*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    graded = {exercise_of(chapter, name).name for name in tests}
    assert graded == {e.name for e in chapter.exercises}


@by_chapter
def test_selecting_one_exercise_by_k_selects_no_other(chapter):
    names = [e.name for e in chapter.exercises]
    for path in sorted(chapter.tests.glob("test_*.py")):
        for test in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            own = max((n for n in names if test.startswith(f"test_{n}")), key=len)
            others = [n for n in names if n.lower() in test.lower() and n.lower() not in own.lower()]
            assert others == [], f"{test}: `pytest -k {others[0]}` selects it too"


@by_chapter
def test_no_test_reads_a_clock(chapter):
    text = "".join(path.read_text() for path in chapter.tests.glob("*.py"))
    assert not re.search(r"perf_counter|time\.time\(|monotonic|timeit", text)


@pytest.mark.parametrize("path", sorted((ROOT / "chapters").glob("*.md")), ids=lambda p: p.name)
def test_no_box_swallows_a_cell(path):
    import jupytext  # what it imports takes as long as PyTorch

    cells = jupytext.read(path).cells
    swallowed = [c.source[:80] for c in cells if c.cell_type == "markdown" and "{code-cell}" in c.source]
    assert swallowed == [], "a fence before the cell is not closed"


@pytest.mark.parametrize("path", sorted((ROOT / "chapters").glob("*.md")), ids=lambda p: p.name)
def test_cells_are_short(path):
    cells = re.findall(r"```\{code-cell\}[^\n]*\n(.*?)```", path.read_text(), re.DOTALL)
    long = []
    for cell in cells:
        code = re.sub(r"\A(:[^\n]*\n|---\n.*?\n---\n)+", "", cell, flags=re.DOTALL)
        lines = [line for line in code.splitlines() if line.strip()]
        if len(lines) > 15 and not re.fullmatch(r"(import|from)\b.*", lines[0]):
            long.append(code)
    assert long == []


MOST_WORDS = 4_500


def words_of_prose(page: str) -> int:
    """Words that a reader reads: hints, captions and tables count, cells, listings, equations and markup do not."""
    text = re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.DOTALL)
    text = re.sub(r"^(`{3,})(?:\{code-cell\}|\{math\}|\w).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\$\$.*?\$\$$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?:[:`]{3,}.*|\([\w-]+\)=|:[\w-]+:.*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<!\\)\$[^$\n]+(?<!\\)\$", "x", text)  # an equation within a line is one word
    text = re.sub(r"\]\([^)\s]*\)", "]", text)
    return len(re.findall(r"\S*\w\S*", text))


def test_words_of_prose_counts_what_a_reader_reads():
    page = "---\nkernelspec: python\n---\n# One\n\nTwo [three](four.md) $x + y$ five, \\$6 to \\$7.\n\n(ex-a)=\n"
    page += (
        ":::{dropdown} Hint 1: a nudge\nEight.\n:::\n\n| nine | 10 |\n|---|---|\n\n```{math}\n:label: "
        "eq-a-1\na b c\n```\n"
    )
    page += "\n```{code-cell} ipython3\n:tags: [x]\n\nprint(1)\n```\n\n$$\na\n$$\n\n```console\n$ ls\n```\n"
    assert words_of_prose(page) == 11


@by_chapter
def test_every_mark_of_an_exercise_ends_a_first_line(chapter):
    """A mark that was wrapped onto the next line would make no exercise, and no check of it would be collected."""
    source = (ROOT / "solutions" / f"{chapter.module}.py").read_text(encoding="utf-8")
    assert source.count("(Exercise)") == len(chapter.exercises)


@by_chapter
def test_a_chapter_is_no_longer_than_a_reader_bears(chapter):
    assert words_of_prose(chapter.path.read_text(encoding="utf-8")) <= MOST_WORDS, (
        "cut what is said twice and what a picture says; move the rest of a measurement to its page in the back matter"
    )


def test_measurements_say_where_they_come_from():
    import json

    for path in sorted((ROOT / "chapters" / "measurements").glob("*.json")):
        record = json.loads(path.read_text())
        assert record["date"]
        assert record["machine"]["versions"], f"{path.name} does not say which versions it was measured with"
        assert program(path.stem).startswith("lib.bench.")


def test_import_lib_touches_no_accelerator_no_mpi_and_no_torch():
    code = "import sys, lib; print([m for m in ('torch', 'mpi4py.MPI', 'numpy', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_only_the_machinery_knows_the_references():
    for folder in ("given", "ranks", "fast", "demos", "runs", "bench"):
        for path in (ROOT / "lib" / folder).rglob("*.py"):
            text = path.read_text()
            assert "solutions" not in text.replace("'solutions", "").replace('"solutions', ""), path


def test_find_takes_every_way_of_naming():
    chapter, exercise = find("2.4")
    assert (chapter.module, exercise.name) == ("rope", "apply_rope")
    for what in ("2", "02", "rope", "tests/chapter_02", "tests/chapter_02/"):
        assert find(what) == (chapter, None)
    for what in ("apply_rope", "rope.apply_rope", "lib.rope.apply_rope"):
        assert find(what) == (chapter, exercise)


def test_no_path_of_a_machine_stands_in_the_book():
    done = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    for name in done.stdout.split():
        path = ROOT / name
        if path.suffix in (".py", ".md", ".yml", ".toml", ".json") and path.exists():
            assert not re.search(r"/(home|root|Users|work)/\w", path.read_text()), name


def test_the_command_lists_what_the_readme_says():
    cli = importlib.import_module("lib.workbook.tools.cli")
    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    for name in re.findall(r"`workbook (\w+)", (ROOT / "README.md").read_text()):
        assert name in commands


# ---- sizes and routes ------------------------------------------------------------------------------------------------


def test_an_exercise_without_a_size_or_with_another_weight_is_named():
    with pytest.raises(BookError, match=r"rope\.turn: its size says 'nothing', expected a line such as 'Size: 20"):
        Size.read("Turns. (Exercise 2.1)", "rope.turn")
    with pytest.raises(BookError, match=r"rope\.turn: its size says 'Size: 9 minutes, difficulty 2, easy\.'"):
        Size.read("Turns. (Exercise 2.1)\n\n    Size: 9 minutes, difficulty 2, easy.\n", "rope.turn")
    assert str(Size.read("A.\n\nSize: 9 minutes, difficulty 2, core.", "a")) == "9 minutes, difficulty 2 of 5, core"


def test_routes_name_chapters_in_order_and_everything_has_every_exercise():
    assert list(routes()) == ["everything", "models", "training", "kernels", "assistant"]
    assert routes()["everything"].exercises == tuple(all_exercises())
    for route in routes().values():
        assert [c.number for c in route.chapters] == sorted({c.number for c in route.chapters})
        assert all(e.size.weight in route.weights for e in route.exercises)


@pytest.mark.parametrize("chapter", chapters().values(), ids=lambda chapter: chapter.module)
def test_a_chapter_is_mostly_core(chapter):
    weights = [e.size.weight for e in chapter.exercises]
    assert 2 * weights.count("core") >= len(weights)
