"""Ask the same questions by `lib.runs.evaluate` and by EleutherAI's lm-evaluation-harness, of the same model.

Run ``pip install 'lm_eval[hf]'`` and then ``python -m lib.bench.harness``, without a network if need be;
it writes ``chapters/measurements/harness.json``. A test computes our half of it again.

The model is the tiny one of ``lib.runs.serve``, whose weights are set, with the text of the tasks in place of the
language reference: so each machine has the same.
"""

import tempfile
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lib.bench.kit import record
from lib.evaluation import few_shot_prompt
from lib.given.data.record import MEASUREMENTS
from lib.runs.data.questions import TASKS, Example, generated, kind_of
from lib.runs.engine.export import llama_for_transformers, write
from lib.runs.engine.sources import make_codec
from lib.runs.evaluating.answers import score_answers
from lib.runs.evaluating.choices import DEFAULTS, first_token, score_choices, score_texts
from lib.runs.flags import ProgramParser
from lib.runs.serving import batch
from lib.runs.serving.models import TINY, Served, make_tiny
from lib.runs.serving.text import ByteTokenizer

N = 60  # questions of each task
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NEW_TOKENS = 12
NOTHING = SimpleNamespace(update=lambda n: None)
PIECES = {"choices": ("acc", "acc_norm"), "answers": ("exact_match",), "texts": ("bits_per_byte",)}
"""The harness's metrics for each kind of task."""


def make_text() -> str:
    """Questions with their answers, of another seed than those that are asked."""
    rows = [row for name in TASKS for row in generated(name, 400, seed=9)] + weekdays() * 40
    return "\n\n".join(f"{row['query']} {row['choices'][row['gold']]}" for row in rows)


def weekdays() -> list[Example]:
    """Choices of unequal length, which a normalization tells apart."""
    asked = [(day, k) for day in range(7) for k in (1, 2, 3)]
    return [{"query": f"{k} days after {DAYS[day]} comes", "choices": list(DAYS), "gold": (day + k) % 7}
            for day, k in asked]  # fmt: skip


def make_tasks(served: Served) -> dict[str, list[Example]]:
    """Every kind that the harness has too; of the written answers every second one is what the model writes."""
    tasks = {name: generated(name, N, seed=0) for name in TASKS} | {"weekdays": weekdays()}
    shots = [few_shot_prompt(tasks["dates"], i, 3)[0] for i in range(20)]
    tasks["dates_after_three"] = [row | {"query": shot} for row, shot in zip(tasks["dates"], shots, strict=False)]
    queries = [row["query"] for name in TASKS for row in tasks[name][:8]]
    written = batch.write(served, queries, 1, ("\n\n",), options(), NOTHING)
    pairs = [(query, text.strip()) for query, (text,) in zip(queries, written, strict=True) if text.strip()]
    answers = [text if i % 2 else "something else" for i, (_, text) in enumerate(pairs)]
    tasks["written"] = [{"query": q, "answer": answer} for (q, _), answer in zip(pairs, answers, strict=True)]
    text = make_text()
    pages = (text[:2500], text[7000:7100], "Größe ≠ 大きさ\n" * 60)
    return tasks | {"pages": [{"text": page, "name": str(i)} for i, page in enumerate(pages)]}


def options(**changes: Any) -> Namespace:
    """The flags of `lib.runs.evaluate`; shots are in the queries already, since the harness draws others."""
    flags = {"shots": 0, "max_new_tokens": NEW_TOKENS, "temperature": 0.0, "chat": False}
    return Namespace(**DEFAULTS | flags | changes)


def ours(served: Served, tasks: dict[str, list[Example]]) -> dict[str, dict[str, float]]:
    """What `lib.runs.evaluate` finds, by the harness's names."""
    found: dict[str, dict[str, float]] = {}
    for name, rows in tasks.items():
        kind = kind_of(rows[0])
        if kind == "choices":
            ways = {"acc": "sum", "acc_norm": "byte"}
            found[name] = {metric: score_choices(served, rows, options(normalization=way), NOTHING)[0]["accuracy"]
                           for metric, way in ways.items()}  # fmt: skip
        elif kind == "answers":
            result, _ = score_answers(rows, options(), NOTHING, lambda prompts, n, stops: batch.write(
                served, prompts, n, stops, options(), NOTHING))  # fmt: skip
            found[name] = {"exact_match": result["accuracy"]}
        else:
            found[name] = {"bits_per_byte": score_texts(served, rows, options(), NOTHING)[0]["bits_per_byte"]}
    return found


def settings_of(name: str, rows: list[Example]) -> dict[str, Any]:
    """The harness's description of a task. The rows are handed over: a file's dates would be parsed."""
    from datasets import Dataset

    kind = kind_of(rows[0])
    metrics: list[dict[str, Any]] = [{"metric": metric} for metric in PIECES[kind]]
    shared = {"task": name, "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
              "test_split": "test", "metric_list": metrics}  # fmt: skip
    if kind == "choices":
        return shared | {"output_type": "multiple_choice", "doc_to_text": "{{query}}", "doc_to_choice": "choices",
                         "doc_to_target": "gold"}  # fmt: skip
    if kind == "texts":
        return shared | {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    metrics[0] |= {"regexes_to_ignore": [r"^\s+|\s+$"], "aggregation": "mean", "higher_is_better": True}
    until = {"until": ["\n\n"], "max_gen_toks": NEW_TOKENS, "do_sample": False, "temperature": 0.0}
    return shared | {"output_type": "generate_until", "doc_to_text": "{{query}}", "doc_to_target": "{{answer}}",
                     "generation_kwargs": until}  # fmt: skip


def theirs(served: Served, tasks: dict[str, list[Example]], folder: Path) -> dict[str, dict[str, float]]:
    """What the harness finds, with Transformers' model of the same weights."""
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    write(folder / "model", llama_for_transformers(served.model.state_dict(), TINY), make_codec("bytes", "", 256))
    model = HFLM(pretrained=str(folder / "model"), device="cpu", dtype="float32", batch_size=16,
                 prefix_token_id=first_token(served.tokenizer))  # fmt: skip
    zero = model.tokenizer.convert_ids_to_tokens(0)
    model.tokenizer.eos_token = model.tokenizer.pad_token = zero  # it wants both; the byte 0 is never written
    made = [ConfigurableTask(config=settings_of(name, rows)) for name, rows in tasks.items()]
    found = simple_evaluate(model, tasks=made, bootstrap_iters=0)
    assert found is not None
    return {name: {metric: found["results"][name][f"{metric},none"] for metric in PIECES[kind_of(rows[0])]}
            for name, rows in tasks.items()}  # fmt: skip


def make_served() -> Served:
    return Served("tiny", make_tiny(make_text()).eval().requires_grad_(False), ByteTokenizer())


def main(argv: list[str] | None = None) -> None:
    parser = ProgramParser(prog="python -m lib.bench.harness", description=__doc__)
    parser.add_argument("--folder", type=Path, default=MEASUREMENTS, help="where the record is written")
    folder = parser.parse_args(argv).folder
    served = make_served()
    tasks = make_tasks(served)
    with tempfile.TemporaryDirectory() as name:
        both = {"ours": ours(served, tasks), "harness": theirs(served, tasks, Path(name))}
    for task, found in both["ours"].items():
        print(f"{task:18}", *(f"{key} {value:.6f} / {both['harness'][task][key]:.6f}" for key, value in found.items()))
    questions = {task: len(rows) for task, rows in tasks.items()}
    record("harness", {"lm_eval": version("lm_eval"), "questions": questions, **both}, folder)


if __name__ == "__main__":
    main()
