"""What the book changes in Triton's interpreter, so that a kernel fails there as ordinary Python does.

- An exception inside a kernel reaches the caller as it was raised, with the kernel's own line in its traceback.
  Triton alone wraps it into an `InterpreterError`, whose traceback ends at the launch.
- Infinities and NaN appear without a warning, as on a GPU: `tl.log2` of 0 is -inf.
- Triton 3.6 also works with NumPy 2.4.
- Triton's language is searched once for what to replace, not at each call of a function; and no sum of integers is
  computed a second time in 64 bits, for an assertion that is made in debug mode only. Kernels take a third less time.
"""

import ast
import dataclasses
import inspect
import textwrap
import warnings
from typing import Any

import numpy as np


def mend() -> None:
    """Change the interpreter. Call it once, after Triton has been imported."""
    import triton
    from triton.runtime import interpreter

    run = interpreter.InterpretedFunction.run

    def run_plainly(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # raised by the maximum of a row of NaN
                return run(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            failure = _original(error, interpreter.InterpreterError)
        except ValueError as error:
            failure = _chained_assignment(self.fn, error)
        raise failure  # outside of the except blocks, so that no other exception is chained to it

    interpreter.InterpretedFunction.run = run_plainly
    _search_once(interpreter, triton.language)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    if triton.__version__.startswith("3.6."):
        _let_numpy_index(interpreter)


def _search_once(interpreter: Any, tl: Any) -> None:
    """For each call of a function, Triton looks for what to replace among all names of its language, some 400."""
    patch = interpreter._patch_builtin
    places = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    known = {place: [n for n, it in inspect.getmembers(place) if tl.core.is_builtin(it)] for place in places}

    def patch_known(place: Any, *given: Any) -> None:
        if place not in known:
            patch(place, *given)
        for name in known.get(place, ()):
            if tl.core.is_builtin(member := getattr(place, name)):
                interpreter._patch_attr(place, name, member, *given)

    interpreter._patch_builtin = patch_known


def _original(error: BaseException, wrapper: type[BaseException]) -> BaseException:
    """The exception that the kernel raised. When one kernel calls another, there are two wrappers around it."""
    while isinstance(error, wrapper) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _chained_assignment(fn: Any, error: ValueError) -> Exception:
    """An error with the line of an ``a = b = ...``; Triton rejects it before the kernel runs,
    without saying where it is.
    """
    if "Multiple assignments" not in str(error):
        return error
    lines, first = inspect.getsourcelines(fn)
    for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
        if isinstance(node, ast.Assign) and len(node.targets) > 1:
            at, text = first + node.lineno - 1, lines[node.lineno - 1].strip()
            why = f"a kernel cannot assign to two names at once, as in `{text}`: write a line for each"
            return SyntaxError(why, (inspect.getsourcefile(fn), at, None, text))
    return error


def _let_numpy_index(interpreter: Any) -> None:
    """From 2.4 on NumPy converts no array with an axis to an int; Triton respects that only from 3.7 on."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_tensor_for_numpy
