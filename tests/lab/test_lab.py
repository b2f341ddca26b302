"""The hosts themselves: what a test or a benchmark asks of a link is so, or it is told why not."""

from __future__ import annotations

import time

import pytest

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
