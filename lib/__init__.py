"""The learner's package: sixteen modules to write, and what the chapters use around them.

``from lib.rope import apply_rope`` gives the learner's function where it is written and the reference's where it is
still a stub; `lib.workbook.resolve` says which, and why.
"""

from lib.workbook import resolve as _resolve

_resolve.install()
