"""Options from several places become one LaunchConfig: the stronger place wins, option by option.

Pure. A layer is what one place gives, as keyword arguments of LaunchConfig, with ``origins``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poprun_py.options.launch_config import EXCLUSIVE, LaunchConfig, options
from poprun_py.options.option_origins import COMMAND_LINE, Origin, typed

Layer = Mapping[str, Any]


def typed_layer(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer of what was typed on a command line; no program there means no program."""
    layer = {name: v for name, v in values.items() if name != "program" or v}
    return {**layer, "origins": {name: typed(name) for name in layer if name in options()}}


def merged(*layers: Layer) -> LaunchConfig:
    """Return the configuration that ``layers`` give together, the weakest first.

    A list is replaced as a whole. Of two options that exclude one another, the one of the stronger
    place counts.

    Raises:
        UsageError: the values contradict one another.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for layer in layers:
        for pair in EXCLUSIVE:
            if any(name in layer for name in pair):
                for name in pair:
                    values.pop(name, None)
                    origins.pop(name, None)
        values.update(layer)
        origins.update(layer.get("origins", {}))
    return LaunchConfig(**{**values, "origins": origins})


def places(config: LaunchConfig) -> dict[str, list[str]]:
    """Return the options that were not typed, by the file or environment that gave them."""
    found: dict[str, list[str]] = {}
    for origin in config.origins.values():
        if origin.place != COMMAND_LINE:
            found.setdefault(origin.place, []).append(origin.name)
    return found
