"""verl's loss functions, read from the files of its wheel alone: none of what verl depends on has to be installed.

``pip download verl --no-deps`` and the folder of the unpacked wheel on PYTHONPATH are enough for
``pytest --reference --record tests/chapter_28 tests/chapter_29`` to compare with it.
"""

import sys
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

UNUSED = ("omegaconf", "tensordict", "transformers", "verl", "verl.trainer", "verl.trainer.config", "verl.protocol",
          "verl.trainer.config.algorithm", "verl.trainer.ppo", "verl.utils", "verl.utils.device", "verl.workers",
          "verl.utils.import_utils", "verl.workers.config", "verl.workers.config.actor")  # fmt: skip
"""Modules that verl's files import, and these functions do not use."""


class ActorConfig(SimpleNamespace):
    """The settings of a policy's loss."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


@cache
def verls() -> SimpleNamespace:
    """verl's modules "algos", "torch_functional" and "corrections".

    Raises:
        ModuleNotFoundError: there is no verl.
    """
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("no module named verl: its unpacked wheel has to be on PYTHONPATH")
    root = Path(spec.submodule_search_locations[0])
    stand_ins: dict[str, Any] = {name: MagicMock() for name in UNUSED}
    stand_ins["verl.workers.config"].ActorConfig = ActorConfig
    stand_ins["verl.trainer.config"].AlgoConfig = type("AlgoConfig", (), {})
    stand_ins["verl.utils.import_utils"].deprecated = lambda *_: lambda function: function
    with patch.dict(sys.modules, stand_ins):
        functional = _load(root, "verl.utils.torch_functional")
        stand_ins["verl.utils"].torch_functional = functional  # what "import a.b as c" reads
        sys.modules["verl"].utils = stand_ins["verl.utils"]  # type: ignore[attr-defined]
        corrections = _load(root, "verl.trainer.ppo.rollout_corr_helper")
        return SimpleNamespace(algos=_load(root, "verl.trainer.ppo.core_algos"), functional=functional,
                               corrections=corrections)  # fmt: skip


def _load(root: Path, name: str) -> ModuleType:
    spec = spec_from_file_location(name, root.joinpath(*name.split(".")[1:]).with_suffix(".py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
