"""Ask a model questions whose answers are known, and say how many are right and how sure that is.

python -m lib.runs.evaluate --model tiny --tasks sums dates
python -m lib.runs.evaluate --model runs/gpt2 --tasks my_tasks/ --shots 5 --out results.json --examples results.md
python -m lib.runs.evaluate --model ~/models/Llama-2-7b-hf --tasks HumanEval.jsonl --samples 10 --temperature 0.8

A task is a name (sums, sorting, copying, brackets, dates: made from a seed), a file, or a folder of files.
What a file asks for is seen from the keys of its JSON lines, or from its name:

  query, choices, gold        the model takes the choice that it finds most likely after the question
  query (question), answer    the model writes, and what chapter 27 reads out of it must be the answer exactly
  prompt, test, entry_point   the model writes a program; pass@k from --samples
  a file .txt                 bits per byte; all .txt files of a folder are one task

Programs that a model wrote run in namespaces of their own: no network, a root that is read-only, nothing but memory to
write to. Where the system gives them none, they run only with --trust-programs.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lib.runs.data.questions import TASKS, Example, kind_of, load
from lib.runs.evaluating.answers import score_answers, score_programs
from lib.runs.evaluating.choices import DEFAULTS, center, score_choices, score_texts
from lib.runs.evaluating.choices import answer as answer
from lib.runs.evaluating.choices import judge as judge
from lib.runs.evaluating.programs import choose_prefix
from lib.runs.flags import Parser, UsageError, positive, share, whole
from lib.runs.memory import shortage
from lib.runs.serve import filled
from lib.runs.serving.engine import DTYPES
from lib.runs.serving.models import Served
from lib.runs.serving.models import load as load_model

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
    parser.add_argument("--shots", type=whole(0), help="solved questions before each one; default: 5")
    parser.add_argument("--normalization", choices=("sum", "token", "byte"), help="default: byte")
    parser.add_argument("--batch-size", type=whole(1), help="questions at once; default: 16")
    parser.add_argument("--seed", type=whole(0), help="of made questions, shots and samples; default: 0")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument(
        "--examples", type=Path, help=f"and {N_EXAMPLES} questions of each task with their answers here"
    )
    writing = parser.add_argument_group("answers that the model writes")
    writing.add_argument("--chat", action="store_true", help="ask as a user would, by the model's chat template")
    writing.add_argument("--max-new-tokens", type=whole(1), default=256, help="of each answer at most")
    writing.add_argument("--temperature", type=share, help="default: 0, and 0.8 for several samples of a program")
    writing.add_argument("--samples", type=whole(1), default=1, help="programs for each prompt")
    writing.add_argument("--timeout", type=positive, default=5.0, help="seconds of a program and its test")
    writing.add_argument("--program-mb", type=positive, default=256.0, help="memory of each, in 2**20 bytes")
    writing.add_argument(
        "--trust-programs", action="store_true", help="run programs with your own rights if there are no namespaces"
    )
    parser.set_defaults(**DEFAULTS)
    return parser


def check_places(options: Any) -> None:
    """Find before the model is loaded that its results could not be written."""
    for flag, path in (("--out", options.out), ("--examples", options.examples)):
        if path and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"{flag} {path}: expected a file in a folder that exists")


def load_tasks(options: Any) -> dict[str, list[Example]]:
    """The questions of all tasks, by the tasks' names.

    Raises:
        UsageError: a task cannot be read, or two have the same name.
    """
    tasks: dict[str, list[Example]] = {}
    for name in options.tasks:
        for task, questions in load(name, options.limit, options.seed).items():
            if task in tasks:
                raise UsageError(f"--tasks {name}: there are two tasks called {task}")
            tasks[task] = questions
    return tasks


def load_served(options: Any) -> Served:
    """The model on the device that the options name."""
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise UsageError("--device cuda: this machine has no GPU that PyTorch can use; expected cpu")
    device = torch.device("cuda" if has_gpu and options.device != "cpu" else "cpu")
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "float32")]
    served = load_model(options.model, None, options.tokenizer, dtype, device)
    if options.chat and served.template is None:
        raise UsageError(f"--chat with --model {options.model}: it has no chat template; expected no --chat")
    return served


def score(served: Served, name: str, questions: list[Example], options: Any) -> tuple[dict[str, Any], list[str]]:
    """The result of a task, and for each question what a page of examples shows of it."""
    from tqdm import tqdm

    from lib.runs.serving.batch import write

    kind = kind_of(questions[0])
    n_steps = len(questions) * (2 * options.samples if kind == "programs" else 1)
    with tqdm(total=n_steps, desc=name, unit="question", leave=False) as progress:
        if kind in ("choices", "texts"):
            scorer: Any = score_choices if kind == "choices" else score_texts
            return scorer(served, questions, options, progress)
        n_samples = options.samples if kind == "programs" else 1
        warmth = (0.8 if n_samples > 1 else 0.0) if options.temperature is None else options.temperature
        is_chat = options.chat and kind == "answers"
        chosen = argparse.Namespace(**vars(options) | {"temperature": warmth, "chat": is_chat})
        writes = partial(_write, write, served, chosen, progress)
        return (score_programs if kind == "programs" else score_answers)(questions, chosen, progress, writes)


def _write(write: Any, served: Served, options: Any, progress: Any, prompts: list[str], n: int, stops: Any) -> Any:
    return write(served, prompts, n, stops, options, progress)


def told(name: str, found: dict[str, Any]) -> str:
    """A task's line of the table."""
    if "bits_per_byte" in found:
        return f"{name:16} {found['bits_per_byte']:6.3f} bits per byte of {found['bytes']:,}"
    text = f"{name:16} {found['accuracy']:6.1%} right ({found['low']:.1%} to {found['high']:.1%}; "
    text += f"guessing {found['baseline']:.1%}) of {found['questions']}"
    passed = (f", {key} {value:.1%}" for key, value in found.items() if key.startswith("pass@"))
    return text + "".join(passed)


def page(tasks: dict[str, list[str]], results: dict[str, Any]) -> str:
    """The first questions of each task, with what the model made of them, as Markdown."""
    lines = []
    for name, shown in tasks.items():
        found = results[name]
        if "bits_per_byte" in found:
            head = f"{found['bits_per_byte']:.3f} bits per byte"
        else:
            head = f"{found['right']} of {found['questions'] * found.get('samples', 1)}"
        lines += [f"# {name}: {head}", ""]
        for text in shown[:N_EXAMPLES]:
            lines += [text, ""]
    return "\n".join(lines)


def run(options: Any) -> dict[str, Any]:
    """Load the model, ask all questions, print a table, and write what was asked for."""
    check_places(options)
    tasks = load_tasks(options)
    if any(kind_of(questions[0]) == "programs" for questions in tasks.values()):
        choose_prefix(options.trust_programs)  # before the model is loaded
    served = load_served(options)
    shown: dict[str, list[str]] = {}
    results: dict[str, dict[str, Any]] = {}
    for name, questions in tasks.items():
        results[name], shown[name] = score(served, name, questions, options)
        print(told(name, results[name]), flush=True)
    core = center(results)
    if core is not None:
        print(f"{'core score':16} {core:6.3f} (0: guessing, 1: all right)")
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    whole_result = {"settings": settings, "model": served.name, "tasks": results, "core_score": core}
    if options.out:
        options.out.write_text(json.dumps(whole_result, indent=2) + "\n", encoding="utf-8")
    if options.examples:
        options.examples.write_text(page(shown, results), encoding="utf-8")
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
