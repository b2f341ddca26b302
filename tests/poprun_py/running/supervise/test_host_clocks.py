"""The launcher asks other hosts for their time, but not its own host."""

from __future__ import annotations

import time

from popdist_py.timeline.folder import clock_path, instance_prefix, read_clock
from poprun_py.instance import control_protocol
from poprun_py.running.supervise.other_hosts import HostClocks


def test_another_host_is_asked_for_its_time_at_the_start_and_at_the_end(tmp_path):
    """The clock of the other host is an hour ahead."""
    hour, asked = 3600 * 10**9, []
    clocks = HostClocks(tmp_path, frozenset({1}), lambda *frame: asked.append(frame))
    for _ in range(2):
        clocks.ask(0)
        clocks.ask(1)
        while asked:
            instance, kind, sent = asked.pop()
            assert (instance, kind) == (1, control_protocol.ASK_CLOCK)
            clocks.take(1, sent, time.monotonic_ns() + hour)
    line = read_clock(clock_path(instance_prefix(tmp_path, 1)))
    assert line.begin < line.end
    now = time.monotonic_ns()
    assert abs(line.ours(now + hour) - now) <= line.error + 1_000_000
    clocks.take(0, 0, 0)  # was not asked
    assert not clock_path(instance_prefix(tmp_path, 0)).exists()


def test_without_a_timeline_no_host_is_asked(tmp_path):
    asked = []
    clocks = HostClocks(None, frozenset({1}), lambda *frame: asked.append(frame))
    clocks.ask(1)
    clocks.take(1, 0, 0)
    assert asked == []
