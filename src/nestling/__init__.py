"""Federated fine-tuning in kilobytes: a frozen model, and messages of a few hundred bytes to 5 KB.

    adapter = nestling.attach(model, nestling.LatentConfig(seed=7))     # in anyone's training loop
    result = nestling.run(nestling.load_config("flite-digits"))         # a whole federation on this machine

Names are loaded when they are used, so that `nestling --help` does not wait for torch.
"""

import os as _os
import sys as _sys
import warnings as _warnings
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

# Before torch: its OpenMP threads otherwise spin while they wait, which makes training many times slower as soon as
# two clients (or any other program) share the cores.
if "torch" in _sys.modules and "OMP_WAIT_POLICY" not in _os.environ:
    _warnings.warn(
        "torch was imported before nestling, so its idle threads spin; training is slow when cores are shared. "
        "Import nestling first, or set OMP_WAIT_POLICY=passive and GOMP_SPINCOUNT=0.",
        RuntimeWarning,
        stacklevel=2,
    )
_os.environ.setdefault("OMP_WAIT_POLICY", "passive")
_os.environ.setdefault("GOMP_SPINCOUNT", "0")

# Before the libraries that would report their use are imported; whoever wants them to can say so. The first of these is
# a word to all programs (donottrack.sh), the others are for those that are used here, or may be one day.
for _name, _value in (
    ("DO_NOT_TRACK", "1"),
    ("HF_HUB_DISABLE_TELEMETRY", "1"),
    ("FLWR_TELEMETRY_ENABLED", "0"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
):
    _os.environ.setdefault(_name, _value)

if TYPE_CHECKING:
    from nestling.adapters.base import Adapter, attach
    from nestling.adapters.store import from_pretrained
    from nestling.api import resume, run
    from nestling.config.load import load_config
    from nestling.config.schema import FullConfig, LatentConfig, LoraConfig, MappingConfig, MemoryConfig, RunConfig
    from nestling.core.errors import NestlingError
    from nestling.core.types import Progress
    from nestling.counts import Plan, plan
    from nestling.inference.cache import new_cache
    from nestling.inference.stream import Session
    from nestling.runs.result import Result

__version__ = "0.1.0"

_HOMES = {
    "Adapter": "nestling.adapters.base",
    "FullConfig": "nestling.config.schema",
    "LatentConfig": "nestling.config.schema",
    "LoraConfig": "nestling.config.schema",
    "MappingConfig": "nestling.config.schema",
    "MemoryConfig": "nestling.config.schema",
    "NestlingError": "nestling.core.errors",
    "Plan": "nestling.counts",
    "Progress": "nestling.core.types",
    "Result": "nestling.runs.result",
    "RunConfig": "nestling.config.schema",
    "Session": "nestling.inference.stream",
    "attach": "nestling.adapters.base",
    "from_pretrained": "nestling.adapters.store",
    "load_config": "nestling.config.load",
    "new_cache": "nestling.inference.cache",
    "plan": "nestling.counts",
    "resume": "nestling.api",
    "run": "nestling.api",
}

__all__ = [
    "Adapter",
    "FullConfig",
    "LatentConfig",
    "LoraConfig",
    "MappingConfig",
    "MemoryConfig",
    "NestlingError",
    "Plan",
    "Progress",
    "Result",
    "RunConfig",
    "Session",
    "attach",
    "from_pretrained",
    "load_config",
    "new_cache",
    "plan",
    "resume",
    "run",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'nestling' has no attribute {name!r}")
    return getattr(_import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
