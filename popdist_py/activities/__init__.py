"""Where this instance's time goes: what its program does now, and for how long it did what.

Here live the ledger of activities and steps, and the memory shared with the launcher's wrapper.
Standard library only. Nothing here decides what is slow: that is the launcher's matter.
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
    awaiting_background,
    begin,
    doing,
    listen,
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
    "awaiting_background",
    "begin",
    "doing",
    "listen",
    "step_done",
]
