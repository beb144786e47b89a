"""The learner's package: the modules to write, and what the chapters use around them.

``from lib.rope import apply_rope`` gives the learner's function where it is written and the reference's where it is
still a stub; `lib.workbook.book.resolve` says which, and why.
"""

import builtins as _builtins
import os as _os
import sys as _sys

from lib.workbook.book import catalog as _catalog
from lib.workbook.book import resolve as _resolve


def _sees_gpu() -> bool:
    """Whether PyTorch will find a GPU.

    Looks at the device files, because asking PyTorch would take seconds to import it.
    """
    hidden = any(_os.environ.get(f"{maker}_VISIBLE_DEVICES") in ("", "-1") for maker in ("CUDA", "HIP"))
    return not hidden and any(_os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "nvidia0", "dxg", "kfd"))


# Without a GPU the book's kernels run in Triton's interpreter. The variable must be set before anything imports
# Triton, which PyTorch may do at any time, so it is set here, before every other module of the book, and only here.
if not _sees_gpu():
    _os.environ.setdefault("TRITON_INTERPRET", "1")

# PyTorch's profiler prints lines such as "USDT:… profiler_start" for every profile;
# it reads this variable when it is imported.
_os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# A copy of the package that is not in the book's folder has nothing of the learner's in it, so every program ends here.
if _fault := _catalog.missing_book():
    print(f"workbook: {_fault}", file=_sys.stderr)
    raise SystemExit(2)
_resolve.install()

if getattr(
    _builtins, "__IPYTHON__", False
):  # in a notebook's kernel: ``%check``, and edited modules reloaded before each cell
    from lib.workbook.tools import notebook as _notebook

    _notebook.load()
