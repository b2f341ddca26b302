"""The hosts themselves: what a test or a benchmark asks of a link is so, or it is told why not."""

from __future__ import annotations

import time

import pytest
from lab import lab as lab_module
from lab.lab import Lab
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


def seconds_to_send(lab, count):
    """Return how long ``count`` bytes take from node0 to node1."""
    begun = time.monotonic()
    done = lab[0].run("sh", "-c", f"head -c {count} /dev/urandom | ssh node1 wc -c")
    assert done.stdout.strip() == str(count), done.stderr
    return time.monotonic() - begun


def test_a_link_has_its_rate_and_delay_or_the_kernel_is_named(make_lab):
    lab = make_lab(2)
    lab[1].shape("4mbit")
    # A burst of 256 KB passes at once, the rest at 500 KB/s.
    assert seconds_to_send(lab, 1_000_000) > 1.2
    try:
        lab[1].shape("10gbit", "300ms")
    except RuntimeError as error:
        assert str(error).startswith("a delay of 300ms needs netem in the kernel; tc says: ")  # noqa: PT017
        return
    # Both directions, several times until ssh is through.
    assert seconds_to_send(lab, 1) > 0.6


def test_commands_that_a_test_has_left_are_collected_with_their_host(make_lab):
    lab = make_lab(1)
    left = lab[0].start("sleep", "600")
    lab.close()
    assert left.returncode is not None
    assert left.stdout.closed


def test_a_host_that_does_not_start_is_collected(lab_permitted, tmp_path, monkeypatch):
    def fail(_):
        raise RuntimeError("no first process")

    monkeypatch.setattr(lab_module, "_first_child", fail)
    lab = Lab(tmp_path / "lab", 1)
    with pytest.raises(RuntimeError, match="no first process"):
        lab.__enter__()
    assert lab.hosts[0].holder.returncode is not None


def test_a_host_that_is_switched_on_again_is_reached_at_once_and_has_lost_its_memory(make_lab):
    lab = make_lab(2)
    assert lab[0].run("ssh", "node1", "touch /dev/shm/kept").returncode == 0
    lab[1].kill()
    lab.switch_on(1)

    def listed():
        return lab[0].run("ssh", "-oConnectTimeout=1", "node1", "ls /dev/shm")

    wait_until(lambda: listed().returncode == 0, 10, "node1 does not answer")
    assert listed().stdout == ""
