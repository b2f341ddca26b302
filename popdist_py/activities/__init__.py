"""Measurement of the time that this instance spends in each activity, such as computing or waiting.

The package contains the ledger, which counts the time of activities and steps, and the memory
shared with the launcher's wrapper. The package imports only the standard library and
``environment``. No module of this package evaluates the measured times; the launcher does.
May call: environment.
"""

from popdist_py.activities.ledger import (
    COMPILING,
    COMPUTING,
    LOADING,
    NAMES,
    OTHER,
    REDUCING,
    SAVING,
    TRANSFERRING,
    UPDATING,
    VALIDATING,
    WAITING,
    Listener,
    add_first_step,
    awaiting_background,
    begin,
    begin_step,
    count_own_as,
    doing,
    forget_steps,
    listen,
    own_time,
    step_done,
)

__all__ = [
    "COMPILING",
    "COMPUTING",
    "LOADING",
    "NAMES",
    "OTHER",
    "REDUCING",
    "SAVING",
    "TRANSFERRING",
    "UPDATING",
    "VALIDATING",
    "WAITING",
    "Listener",
    "add_first_step",
    "awaiting_background",
    "begin",
    "begin_step",
    "count_own_as",
    "doing",
    "forget_steps",
    "listen",
    "own_time",
    "step_done",
]
