"""Rows about processes of a job of four hosts: killed, or stopped, in every phase.

What follows is that of one host (``kills``) where a host makes no difference.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from tools.soak.kills import (
    GOES_ON,
    HANG_OPTIONS,
    KILLED_FIRST,
    LIMIT_SECONDS,
    NAMES,
    after_kill,
    after_stop,
    or_done,
    pause,
    send,
)
from tools.soak.rows import Expected, Row

HOSTS = 4
# Only mpirun can end a wrapper there that is stopped, and its daemon waits seven seconds first.
_KILL_SECONDS, _STOP_SECONDS = 5.0, 20.0


def rows() -> tuple[Row, ...]:
    """Return the rows of processes on four hosts."""
    kills = after_kill(_KILL_SECONDS) | _kills_of_helpers()
    stops = after_stop(_STOP_SECONDS)
    found = [
        Row(title=_title(f"SIGKILL of {NAMES[kind]}"), act=send(kind, signal.SIGKILL),
            expected=expected, by_phase=by_phase, hosts=HOSTS,
            # No other wrapper of the job is there.
            swept=kind == "wrapper")
        for kind, (expected, by_phase) in kills.items()
    ]  # fmt: skip
    found += [
        Row(title=_title(f"SIGSTOP of {NAMES[kind]}"), act=send(kind, signal.SIGSTOP),
            expected=expected, by_phase=by_phase, hosts=HOSTS,
            options=(*HANG_OPTIONS, "--timeout", str(LIMIT_SECONDS)))
        for kind, (expected, by_phase) in stops.items()
    ]  # fmt: skip
    found += [
        Row(title=_title(f"SIGSTOP of {NAMES[kind]}, then SIGCONT"), act=pause(kind),
            expected=GOES_ON, hosts=HOSTS, options=HANG_OPTIONS)
        for kind in NAMES
    ]  # fmt: skip
    return tuple(found)


def _title(text: str) -> str:
    return f"{text}, four hosts"


def _kills_of_helpers() -> dict[str, tuple[Expected, dict[str, Expected]]]:
    """Return what follows SIGKILL of what ``mpirun`` has for the other hosts."""
    lost = Expected(
        # mpirun's own code, or 1 in place of its 0; or it has killed instances before it said so.
        codes=(1, 255, 137),
        seconds=_KILL_SECONDS,
        says=f"lost its connection to host|{KILLED_FIRST}",
    )
    return {
        kind: (
            lost,
            {"start": replace(lost, codes=(3, *lost.codes), says=""), "end": or_done(lost)},
        )
        for kind in ("daemon", "ssh")
    }
