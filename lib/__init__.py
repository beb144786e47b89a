"""The learner's package: sixteen modules to write, and what the chapters use around them.

``from lib.rope import apply_rope`` gives the learner's function where it is written and the reference's where it is
still a stub; `lib.workbook.resolve` says which, and why.
"""

import os as _os

from lib.workbook import resolve as _resolve

# Without a GPU the kernels of chapters 14 and 15 run in Triton's interpreter, which must be asked for before anything imports
# Triton (PyTorch's compiler does); whether there is a GPU is read off the device files, since torch would take seconds.
if not any(_os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "nvidia0", "dxg", "kfd")):
    _os.environ.setdefault("TRITON_INTERPRET", "1")

_resolve.install()
