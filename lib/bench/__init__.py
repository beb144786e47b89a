"""Programs that measure what the chapters report, and write the results to chapters/measurements/."""

import sys
from types import TracebackType

WITH_THE_TESTS = {"jax", "sentencepiece", "tiktoken", "tokenizers", "torchao", "transformers"}


def what_is_missing(error: BaseException) -> str | None:
    """What the machine lacks if that is why a program raised an error: a package or a GPU; None for another reason."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("lib."):
        package = error.name.split(".")[0]
        where = "; pip install -e '.[test]'" if package in WITH_THE_TESTS else ""
        return f"the package that Python imports as {package} is not installed{where}"
    if "torch" in sys.modules and "CUDA" in str(error) and not sys.modules["torch"].cuda.is_available():
        return "this measurement needs a GPU"
    return None


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one line in place of a traceback if the machine lacks something."""
    if missing := what_is_missing(error):
        print(f"error: {missing}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = explain
