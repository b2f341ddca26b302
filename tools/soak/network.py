"""Rows about the network between four hosts: links, packets and addresses, never a process.

A host that says nothing for fifteen seconds is lost: the job ends and names it. A network that
stalls for less, loses packets or is slow costs time only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

from lab.lab import LabHost
from lab.wire import IN, OUT, Faults, missing

from tools.soak.host_kills import HOSTS
from tools.soak.jobs import Job
from tools.soak.kills import TIMES_OF_PHASE, or_done
from tools.soak.program import PHASES
from tools.soak.rows import Act, Done, Expected, Row

# From the start of the launcher on: checks of the hosts, then mpirun and its daemons.
_START_SECONDS = 2.0
_PHASE_SECONDS = 0.03
OTHER_ADDRESS = "10.99.0.200"

_SLOWER = Expected(codes=(0,), seconds=60)
# The kernel looks every two seconds; what was cut off ends by itself, which counts as well.
_LOST_SECONDS = 40.0
_LOST_CODES = (1, 137, 143, 255)
_HOST_LOST = r"on node\d failed first|lost its connection to host node\d"
_UNSTARTED = r"host node\d: |instances started|cannot|failed first|lost its connection"
# Either all went well, or one line says what did not.
_IF_ANY = r"(?s)\A(?!.*poprun-py: error)"


def rows() -> tuple[Row, ...]:
    """Return the rows of the network."""
    return (*_outages(), *_slow_networks(), *_partitions())


def _row(title: str, act: Act, expected: Expected, by_phase: dict[str, Expected]) -> Row:
    return Row(title=f"{title}, four hosts", act=act, expected=expected, by_phase=by_phase,
               # A host that was cut off may lose its wrapper to MPI's daemon there.
               hosts=HOSTS, mend=_mend, swept=True)  # fmt: skip


def _mend(job: Job) -> None:
    for instance in range(job.place.num_instances):
        job.place.host(instance).repair()


def _at_a_moment(
    fault: Callable[[LabHost, Job, random.Random], str],
    hosts: tuple[int, ...] = (0, 1, 2, 3),
    *,
    has_wire: bool = False,
) -> Act:
    """Do something to a drawn host at a drawn moment of a drawn phase; it returns what it was.

    With ``has_wire`` the host has a wire of its own before, which takes a while.
    """

    def act(job: Job, dice: random.Random) -> Done:
        phase, instance = dice.choice(PHASES), dice.choice(hosts)
        if has_wire:
            job.place.host(instance).wire(Faults())
        times, share = dice.randint(1, TIMES_OF_PHASE.get(phase, 1)), dice.random()
        if phase != "start":
            job.wait_for(lambda: job.noted(instance).count(phase) >= times)
        time.sleep(share * (_START_SECONDS if phase == "start" else _PHASE_SECONDS))
        began, seen, missed = time.monotonic(), job.phase(instance), job.is_over
        what = "" if missed else fault(job.place.host(instance), job, dice)
        return Done(at=began, phase=seen, instance=instance, missed=missed, what=what)

    return act


# --- outages ----------------------------------------------------------------------------------


def _outages() -> list[Row]:
    lost = Expected(codes=_LOST_CODES, seconds=_LOST_SECONDS, names=True, says=_HOST_LOST)
    all_lost = replace(lost, names=False)
    return [
        *(
            _row(f"a host's link is down for {seconds} s", _at_a_moment(_down(seconds)), _SLOWER,
                 {"start": _or_unstarted(_SLOWER)})
            for seconds in (1, 5)
        ),
        _row("a host's link is down for 20 s", _at_a_moment(_down(20), hosts=(1, 2, 3)), lost,
             _of_lost(lost)),
        _row("the link of the launcher's host is down for 20 s",
             _at_a_moment(_down(20), hosts=(0,)), all_lost, _of_lost(all_lost)),
    ]  # fmt: skip


def _of_lost(lost: Expected) -> dict[str, Expected]:
    return {"start": _or_unstarted(lost), "end": or_done(lost)}


def _or_unstarted(expected: Expected) -> Expected:
    """Return what has to follow where programs may not have started: an error says why, if any."""
    codes = tuple({*expected.codes, 0, 3, *_LOST_CODES})
    seconds = max(_LOST_SECONDS, expected.seconds) + 15
    return Expected(codes=codes, seconds=seconds, says=f"{_IF_ANY}|{_UNSTARTED}")


def _down(seconds: float) -> Callable[[LabHost, Job, random.Random], str]:
    def fault(host: LabHost, job: Job, dice: random.Random) -> str:
        host.link("down")
        time.sleep(seconds)
        host.link("up")
        return host.name

    return fault


# --- bad wires --------------------------------------------------------------------------------


def _slow_networks() -> list[Row]:
    def loss(host: LabHost, job: Job, dice: random.Random) -> str:
        share = dice.uniform(0.01, 0.2)
        host.wire(Faults(loss=share))
        return f"{100 * share:.0f} % at {host.name}"

    def delay(host: LabHost, job: Job, dice: random.Random) -> str:
        ms = dice.uniform(50, 200)
        host.wire(Faults(delay_ms=ms, jitter_ms=ms / 4))
        return f"{ms:.0f} ms at {host.name}"

    return [
        replace(
            _row(
                title,
                _at_a_moment(fault, has_wire=True),
                _SLOWER,
                {"start": _or_unstarted(_SLOWER)},
            ),
            needs=missing,
        )
        for title, fault in (
            ("1 to 20 % of a host's packets are lost", loss),
            ("a host's packets come 50 to 200 ms later", delay),
        )
    ]


def _partitions() -> list[Row]:
    lost = Expected(codes=_LOST_CODES, seconds=_LOST_SECONDS, names=True, says=_HOST_LOST)

    def one_way(host: LabHost, job: Job, dice: random.Random) -> str:
        direction = dice.choice((IN, OUT))
        host.wire(Faults(dropped=(direction,)))
        # A daemon of mpirun that reaches nobody waits for its network: for longer than a case.
        time.sleep(20)
        host.wire(Faults())
        return f"{direction} of {host.name}"

    def between_two(host: LabHost, job: Job, dice: random.Random) -> str:
        others = [each for each in job.place.lab.hosts[1:] if each is not host]
        other = dice.choice(others)
        host.wire(Faults(dropped=(OUT,), peers=(other.address,)))
        return f"from {host.name} to {other.name}"

    def address(host: LabHost, job: Job, dice: random.Random) -> str:
        host.readdress(OTHER_ADDRESS)
        return host.name

    rest = (1, 2, 3)
    cut = replace(lost, names=False, says="no answer from instance")
    # Where MPI starts it finds out itself, and ends the program with a code of its own.
    cuts = _of_lost(cut)
    cuts["start"] = replace(cuts["start"], codes=(*cuts["start"].codes, 14))
    return [
        replace(
            _row("packets of a host pass one way only for 20 s",
                 _at_a_moment(one_way, hosts=rest, has_wire=True), lost, _of_lost(lost)),
            needs=missing,
        ),
        replace(
            _row("packets between two hosts pass one way only, the launcher's is neither",
                 _at_a_moment(between_two, hosts=rest, has_wire=True), cut, cuts),
            needs=missing,
        ),
        _row("a host gets another address", _at_a_moment(address, hosts=rest), lost,
             _of_lost(lost)),
    ]  # fmt: skip
