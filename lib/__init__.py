"""The learner's package: sixteen modules to write, and what the chapters use around them.

``from lib.rope import apply_rope`` gives the learner's function where it is written and the reference's where it is
still a stub; `lib.workbook.book.resolve` says which, and why.
"""

import os as _os

from lib.workbook.book import resolve as _resolve


def _sees_gpu() -> bool:
    """Whether PyTorch will find a GPU, read off the device files: to ask it would take the seconds that its import takes."""
    hidden = any(_os.environ.get(f"{maker}_VISIBLE_DEVICES") in ("", "-1") for maker in ("CUDA", "HIP"))
    return not hidden and any(_os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "nvidia0", "dxg", "kfd"))


# Without a GPU the kernels of chapters 14 and 15 run in Triton's interpreter. It must be asked for before anything imports
# Triton, and PyTorch does that where it likes: so it is asked for here, before every other module of the book, and only here.
if not _sees_gpu():
    _os.environ.setdefault("TRITON_INTERPRET", "1")

_resolve.install()
