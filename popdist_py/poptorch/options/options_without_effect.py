"""A search for options that do nothing on emulated IPUs, and warnings about them.

The table in the module ``option_effects`` decides which options do nothing. Options without effect
on emulated IPUs are of two kinds, and each kind is logged on its own line. Some options without
effect request a feature that this library does not have, such as a report file. The other options
without effect change only the speed or the memory of real IPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Final

from popdist_py.errors import counted
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.option_effects import LOCATIONS, STORED, STRATEGY, Effect, Option
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.options.variables_without_effect import idle_variables
from popdist_py.poptorch.tracing.block_places import ForwardPlaces

__all__ = ["idle_options", "say_idle_in_model", "say_idle_options"]

# The options without effect that have already been logged in this process. An option without effect
# is logged once, even if several models use it.
_said: Final[set[Option]] = set()


def idle_options(options: Options) -> list[Option]:
    """Return an ``Option`` for each option that the program changed without effect."""
    return list(dict.fromkeys(row for row in _changed_rows(options) if row.is_idle))


def _changed_rows(options: Options) -> Iterator[Option]:
    for store in (options, *options._groups().values()):
        if store is options._Popart:
            continue
        for name, value in store.changed().items():
            row = STORED.get(name)
            if row is not None and (row.only is None or row.only == value):
                yield row
            if name.startswith("location_"):
                yield from (row for key, row in LOCATIONS.items() if value.get(key))
    strategy = options._execution_strategy
    for name, row in STRATEGY.items():
        if getattr(strategy, name, None) != getattr(type(strategy), name, None):
            yield row
    if options._source_location_excludes:
        yield STORED["_source_location_excludes"]
    yield from options._Popart.changed_rows()


def say_idle_in_model(options: Options, placement: ForwardPlaces) -> None:
    """On instance 0, log the settings that do nothing for a traced model.

    Available memory proportions do nothing for IPUs that the model does not use. Some settings for
    single operators of the forward pass affect only real IPUs.
    """
    if options.Distributed.processId != 0:
        return
    ipus = placement.num_ipus
    if absent := sorted(ipu for ipu in options.available_memory_proportion if ipu >= ipus):
        logger.warning(
            "setAvailableMemoryProportion() names %s, but the model uses only %s, numbered from "
            "IPU0",
            ", ".join(f"IPU{ipu}" for ipu in absent),
            counted(ipus, "IPU"),
        )
    _say(Option(name, Effect.HARDWARE) for name in placement.idle_settings)


def say_idle_options(options: Options) -> None:
    """Log each option and environment variable without effect once, on instance 0 only."""
    if options.Distributed.processId == 0:
        _say((*idle_options(options), *idle_variables(os.environ)))


def _say(rows: Iterable[Option]) -> None:
    """Log the options that were not logged before, with one line for each kind of option."""
    found = [row for row in rows if row not in _said]
    _said.update(found)
    if missed := ", ".join(str(row) for row in found if row.effect is Effect.NOTHING):
        logger.warning("These options do nothing on emulated IPUs: %s", missed)
    if for_hardware := ", ".join(str(row) for row in found if row.effect is Effect.HARDWARE):
        logger.warning(
            "These options change only the speed or memory of real IPUs, not of emulated IPUs: %s",
            for_hardware,
        )
