"""Tasks whose answers are programs: each runs in a box, and its test in another one, which the program cannot reach.

The test calls the program's function over two pipes. Arguments and results cross them as literals, so a program can
return a wrong value and nothing else: no object that is equal to everything, no patched ``assert``, no forged verdict.
"""

import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from lib.evaluation import pass_at_k, wilson_interval
from lib.given.programs import Outcome, run_behind
from lib.runs.flags import UsageError

BOX = Path(__file__).with_name("box.py")
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Where a function's body ends, as in section 3.2 of Chen and others (arXiv:2107.03374)."""
KS = (1, 10, 100)
PROBE = "print(2 + 2)"
ENDED = "the program ended"

LITERALS = """
import ast, builtins, os, sys


class _Numbers(ast.NodeTransformer):
    def visit_Name(self, node):
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


def _read(line):
    return ast.literal_eval(_Numbers().visit(ast.parse(line, mode="eval")).body)


def _plain(value):
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind(value)
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return (set if kind is frozenset else kind)(map(_plain, value))
    if isinstance(value, dict):
        return {_plain(key): _plain(value[key]) for key in value}
    if value is None or value is Ellipsis:
        return value
    if hasattr(value, "tolist"):  # of NumPy
        return _plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} is no literal")
"""
"""What both sides begin with: values of Python's own kinds as a line of text, and back."""

PROGRAM = """
def _serve(source, name):
    results = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\\n")
    os.dup2(2, 1)
    names = {"__name__": "answer"}
    exec(compile(source, "answer.py", "exec"), names)
    for line in sys.stdin:
        args, kwargs = _read(line)
        try:
            told = "value", _plain(names[name](*args, **kwargs))
        except Exception as error:
            told = "error", type(error).__name__, str(error)[:200]
        print(repr(told), file=results, flush=True)


_serve(%r, %r)
"""

TEST = """
def _judge(prompt, test, name, most=2**20):
    calls = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\\n")
    os.dup2(2, 1)

    def candidate(*args, **kwargs):
        try:
            print(repr((_plain(args), _plain(kwargs))), file=calls, flush=True)
        except BrokenPipeError:
            os._exit(3)
        line = sys.stdin.readline(most)
        if not line.endswith("\\n"):
            sys.exit("ENDED" if len(line) < most else "the result is too long")
        told = _read(line)
        if told[0] == "value":
            return told[1]
        kind = getattr(builtins, told[1], None)
        is_error = isinstance(kind, type) and issubclass(kind, Exception)
        raise kind(told[2]) if is_error else RuntimeError(f"{told[1]}: {told[2]}")

    names = {"__name__": "test"}
    for ending in ("", "\\n    pass\\n"):  # a prompt's function may have no body yet
        try:
            code = compile(prompt + ending, "prompt.py", "exec")
        except SyntaxError:
            continue
        exec(code, names)
        break
    names[name] = candidate
    exec(compile(test, "test.py", "exec"), names)
    names["check"](candidate)


_judge(%r, %r, %r)
""".replace("ENDED", ENDED)


class Verdict(NamedTuple):
    """What became of a program.

    Attributes:
        status: "passed", "failed", "timeout" or "memory".
        why: The last line of what the test said; empty if it passed.
    """

    status: str
    why: str


def in_box() -> tuple[str, ...]:
    """The command before a command that runs it in namespaces of its own."""
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    return (sys.executable, "-I", "-S", "-B", str(BOX), *sorted(python | set(map(os.path.realpath, python))), "--")


@functools.cache
def box_fault() -> str:
    """Why this system gives a program no namespaces of its own; empty if it does."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    found = run_behind(in_box(), PROBE, timeout_s=20)
    if found.status == "ok" and found.stdout == "4\n":
        return ""
    return (found.stderr.strip().splitlines() or [f"a box ended with {found.status!r}"])[-1].removeprefix("box: ")


def choose_prefix(trusts: bool) -> tuple[str, ...]:
    """The command before each generated program: a box where the system allows one.

    Raises:
        UsageError: it does not, and the person who started this has not said to go on without.
    """
    fault = box_fault()
    if fault and not trusts:
        raise UsageError(
            f"a task's answers are programs, and this system gives them no namespaces of their own ({fault}): they "
            "would run with your rights, behind an audit hook that native code gets around; expected a system with "
            "user namespaces, or --trust-programs"
        )
    return () if fault else in_box()


def run_answer(
    prefix: tuple[str, ...], task: dict[str, Any], completion: str, timeout_s: float, memory_bytes: int
) -> Verdict:
    """Run a program and its test, each guarded and behind the prefix.

    Args:
        prefix: Of `choose_prefix`.
        task: Has ``prompt``, ``test`` and ``entry_point``.
        completion: What the model wrote after the prompt.
        timeout_s, memory_bytes: Limits of each of the two.
    """
    name = task["entry_point"]
    program = LITERALS + PROGRAM % (task["prompt"] + completion, name)
    test = LITERALS + TEST % (task["prompt"], task["test"], name)
    (calls, to_program), (results, to_test) = os.pipe(), os.pipe()
    limits: dict[str, Any] = {"timeout_s": timeout_s, "memory_bytes": memory_bytes}
    with ThreadPoolExecutor(1) as beside:
        ran = beside.submit(
            run_behind, prefix, program, os.fdopen(calls, "rb"), stdout=os.fdopen(to_test, "wb"), **limits
        )
        judged = run_behind(prefix, test, os.fdopen(results, "rb"), stdout=os.fdopen(to_program, "wb"), **limits)
    return _verdict(judged, ran.result())


def _verdict(judged: Outcome, ran: Outcome) -> Verdict:
    """The test alone decides whether a program passes; what ended the program says why it did not."""
    if judged.status == "ok":
        return Verdict("passed", "")
    said, cause = (outcome.stderr.strip().rpartition("\n")[2] for outcome in (judged, ran))
    status = next((outcome.status for outcome in (judged, ran) if outcome.status in ("timeout", "memory")), "failed")
    return Verdict(status, (cause if said in ("", ENDED) else said)[:200] or ENDED)


def judge_all(
    tasks: list[dict[str, Any]], completions: list[list[str]], options: Any, progress: Any
) -> list[list[Verdict]]:
    """The verdicts of each task's samples."""
    prefix = choose_prefix(options.trust_programs)
    limits = options.timeout, int(options.program_mb * 2**20)

    def judged(task: dict[str, Any], completion: str) -> Verdict:
        verdict = run_answer(prefix, task, completion, *limits)
        progress.update(1)
        return verdict

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        rows = [
            [pool.submit(judged, task, text) for text in texts] for task, texts in zip(tasks, completions, strict=True)
        ]
        return [[verdict.result() for verdict in row] for row in rows]


def score(verdicts: list[list[Verdict]]) -> dict[str, Any]:
    """pass@k for every k in use that the samples serve; the accuracy is pass@1.

    Its interval takes each task as one question, whatever the number of samples, so it is never too narrow.
    """
    counts = [sum(verdict.status == "passed" for verdict in row) for row in verdicts]
    n, samples = len(counts), len(verdicts[0])
    ks = sorted({k for k in KS if k <= samples} | {samples})
    passed = {f"pass@{k}": sum(pass_at_k(samples, c, k) for c in counts) / n for k in ks}
    low, high = wilson_interval(sum(counts) / samples, n)  # type: ignore[arg-type]  # a mean number of right answers
    return {"questions": n, "samples": samples, "right": sum(counts), "accuracy": passed["pass@1"],
            "low": low, "high": high, "baseline": 0.0, **passed}  # fmt: skip
