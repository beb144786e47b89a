"""A progress bar that reads well where it is: one line in a terminal,
one line that is replaced on a notebook's page.
"""

import io
from collections.abc import Iterable, Iterator

from tqdm.std import tqdm


class NotebookBar(tqdm):
    """tqdm's bar as plain text in one display: no widget, no red box,
    and of a finished bar only its last state is kept.
    """

    @staticmethod
    def status_printer(file):
        from IPython.display import display

        handle = display({"text/plain": ""}, raw=True, display_id=True)
        return lambda text: handle.update({"text/plain": text}, raw=True)


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")


def progress(items: Iterable, what: str, unit: str = "step") -> Iterator:
    """The same items, with a bar that counts them.

    Args:
        items: What to walk through; its length is shown if it has one.
        what: What the bar is called.
        unit: What is counted.

    Returns:
        A tqdm bar: ``bar.set_postfix(loss=...)`` writes behind it.
    """
    kind, where = (NotebookBar, io.StringIO()) if in_notebook() else (tqdm, None)
    return kind(items, desc=what, unit=f" {unit}s", file=where, ascii=False, ncols=96, mininterval=0.25)
