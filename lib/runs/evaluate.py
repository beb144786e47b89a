"""Ask a model questions whose answers are known, and say how many are right and how sure that is.

python -m lib.runs.evaluate --model tiny --tasks sums dates
python -m lib.runs.evaluate --model runs/gpt2 --tasks my_tasks/ --shots 5 --out results.json --examples results.md

A task is a name (sums, sorting, copying, brackets, dates: made from a seed), a file of JSON lines with ``query``,
``choices`` and ``gold``, or a folder of such files. The model takes the choice that it finds most likely after the
question; nothing is generated.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from lib.evaluation import choose_answer, core_score, encode_pair, few_shot_prompt, loglikelihood, wilson_interval
from lib.runs.data.questions import TASKS, Question, load
from lib.runs.flags import Parser, UsageError, whole
from lib.runs.memory import shortage
from lib.runs.serve import DTYPES, filled
from lib.runs.serving.models import Served
from lib.runs.serving.models import load as load_model

PART = 32  # questions between two signs of progress
N_EXAMPLES = 10


def make_parser() -> Parser:
    """All flags of this program."""
    parser = Parser(
        prog="python -m lib.runs.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, type=filled, help="as for lib.runs.serve: tiny, or a folder")
    parser.add_argument("--tokenizer", type=filled, help="bytes, gpt2 or a tokenizer.json; default: the folder's")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bf16 on a GPU, float32 on a CPU")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help=f"default: {' '.join(TASKS)}")
    parser.add_argument("--limit", type=whole(1), help="questions of each task; default: 200 made ones, all of a file")
    parser.add_argument("--shots", type=whole(0), default=5, help="solved questions before each one")
    parser.add_argument("--normalization", choices=("sum", "token", "byte"), default="byte")
    parser.add_argument("--batch-size", type=whole(1), default=16)
    parser.add_argument("--seed", type=whole(0), default=0, help="of questions that are made, and of the shots")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument(
        "--examples", type=Path, help=f"and {N_EXAMPLES} questions of each task with their answers here"
    )
    return parser


def answer(served: Served, questions: list[Question], options: Any, progress: Any) -> list[int]:
    """The index of the choice that the model takes for each question.

    Raises:
        UsageError: a question does not fit into the model, or there are too few for the shots.
    """
    picks: list[int] = []
    config: Any = served.model.config
    limit = config.context_len
    for first in range(0, len(questions), PART):
        asked = range(first, min(first + PART, len(questions)))
        try:
            prompts = [few_shot_prompt(questions, i, options.shots, seed=options.seed) for i in asked]
            pairs = [encode_pair(served.tokenizer.encode, context, c) for context, choices in prompts for c in choices]
            scores = iter(loglikelihood(served.model, pairs, limit, batch_size=options.batch_size))
        except ValueError as error:
            raise UsageError(f"questions {first} to {asked[-1]}: {error}") from None
        lengths = iter([len(continuation) for _, continuation in pairs])
        for i in asked:
            choices = questions[i]["choices"]
            likely = [next(scores)[0] for _ in choices]
            n_tokens, n_bytes = [next(lengths) for _ in choices], [len(c.encode()) for c in choices]
            picks.append(choose_answer(likely, options.normalization, n_tokens, n_bytes))
        progress.update(len(asked))
    return picks


def judge(questions: list[Question], picks: list[int]) -> dict[str, Any]:
    """How many are right, within what interval, and how many guessing would get."""
    right = sum(pick == question["gold"] for pick, question in zip(picks, questions, strict=True))
    low, high = wilson_interval(right, len(questions))
    baseline = sum(1 / len(question["choices"]) for question in questions) / len(questions)
    return {"questions": len(questions), "right": right, "accuracy": right / len(questions), "low": low, "high": high,
            "baseline": baseline}  # fmt: skip


def page(tasks: dict[str, list[Question]], picks: dict[str, list[int]], results: dict[str, Any]) -> str:
    """The first questions of each task, with the choices and what the model took, as Markdown."""
    lines = []
    for name, questions in tasks.items():
        lines += [f"# {name}: {results[name]['right']} of {len(questions)}", ""]
        for question, pick in list(zip(questions, picks[name], strict=True))[:N_EXAMPLES]:
            lines += ["```text", question["query"].replace("```", "` ` `"), "```", ""]
            for i, choice in enumerate(question["choices"]):
                notes = ["right"] * (i == question["gold"]) + ["taken"] * (i == pick)
                lines.append(f"- `{choice}`" + (f" ({', '.join(notes)})" if notes else ""))
            lines.append("")
    return "\n".join(lines)


def run(options: Any) -> dict[str, Any]:
    """Load the model, ask all questions, print a table, and write what was asked for."""
    from tqdm import tqdm

    tasks: dict[str, list[Question]] = {}
    for name in options.tasks:
        for task, questions in load(name, options.limit, options.seed).items():
            if task in tasks:
                raise UsageError(f"--tasks {name}: there are two tasks called {task}")
            tasks[task] = questions
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise UsageError("--device cuda: this machine has no GPU that PyTorch can use; expected cpu")
    device = torch.device("cuda" if has_gpu and options.device != "cpu" else "cpu")
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "float32")]
    served = load_model(options.model, None, options.tokenizer, dtype, device)
    picks, results = {}, {}
    for name, questions in tasks.items():
        with tqdm(total=len(questions), desc=name, unit="question", leave=False) as progress:
            picks[name] = answer(served, questions, options, progress)
        results[name] = found = judge(questions, picks[name])
        print(f"{name:16} {found['accuracy']:6.1%} right ({found['low']:.1%} to {found['high']:.1%}; "
              f"guessing {found['baseline']:.1%}) of {found['questions']}", flush=True)  # fmt: skip
    score, centered = core_score({n: r["accuracy"] for n, r in results.items()},
                                 {n: r["baseline"] for n, r in results.items()})  # fmt: skip
    print(f"{'core score':16} {score:6.3f} (0: guessing, 1: all right)")
    for name, value in centered.items():
        results[name]["centered"] = value
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    whole_result = {"settings": settings, "model": served.name, "tasks": results, "core_score": score}
    if options.out:
        options.out.write_text(json.dumps(whole_result, indent=2) + "\n", encoding="utf-8")
    if options.examples:
        options.examples.write_text(page(tasks, picks, results), encoding="utf-8")
    return whole_result


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 after one line about what is wrong with the request."""
    try:
        run(make_parser().parse_args(argv))
    except UsageError as error:
        print(f"python -m lib.runs.evaluate: error: {error}", file=sys.stderr)
        return 2
    except (MemoryError, OSError, RuntimeError) as error:
        why = shortage(error, ("--model", "--batch-size")) or (str(error) if isinstance(error, OSError) else None)
        if why is None:
            raise
        print(f"python -m lib.runs.evaluate: error: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
