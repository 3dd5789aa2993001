"""Load and validate the settings of the runtime.

Each key is declared in :mod:`dask_gpurt.config.settings` with its parser; its default is in ``gpurt.yaml``
and its description in ``gpurt-schema.yaml``. Preload hooks import this package, so keep its imports light.
"""

from dask_gpurt.config.settings import (
    HOOK,
    HOOKED,
    KEYS,
    PUBLIC_KEYS,
    ComputeSettings,
    ExchangeSettings,
    MemorySettings,
    OverlapSettings,
    PlanningSettings,
    ReadSettings,
    Settings,
    ShuffleSettings,
    load,
    load_over,
    partition_sizes,
    preloads,
    problems,
    say_if_without_effect,
    say_once,
    set_here,
    takeover,
    without_effect,
)
from dask_gpurt.config.values import MODES, PATHS, ConfigError, Size

__all__ = [
    "HOOK",
    "HOOKED",
    "KEYS",
    "MODES",
    "PATHS",
    "PUBLIC_KEYS",
    "ComputeSettings",
    "ConfigError",
    "ExchangeSettings",
    "MemorySettings",
    "OverlapSettings",
    "PlanningSettings",
    "ReadSettings",
    "Settings",
    "ShuffleSettings",
    "Size",
    "load",
    "load_over",
    "partition_sizes",
    "preloads",
    "problems",
    "say_if_without_effect",
    "say_once",
    "set_here",
    "takeover",
    "without_effect",
]
