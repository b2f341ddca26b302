"""Steps of instances on other hosts are recorded, on the launcher's clock."""

from __future__ import annotations

import pytest

from poprun_py.past_runs.recorded_run import read_run
from poprun_py.past_runs.run_files import RunFiles

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

# The hosts of the lab have one clock, so that times can be compared.
PROGRAM = """
import time
import popdist_py
from popdist_py import heartbeat

popdist_py.init()
for number in range(1, 401):
    time.sleep(0.005)
    heartbeat.step(2, number / 4)
    if number % 100 == 0:
        print(popdist_py.getInstanceIndex(), number, time.time())
"""


def test_every_step_of_every_host_is_in_the_run(lab, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = lab[0].poprun(
        *("--host", "node[0-1]", "--num-instances", "2", "--num-replicas", "2"),
        *("--output-dir", tmp_path / "out", program),
    )
    assert done.returncode == 0, done.stderr
    (attempt,) = read_run(RunFiles((tmp_path / "out" / "latest").resolve())).attempts
    ended = {(each.instance, each.step): each.at for each in attempt.steps}
    assert sorted(ended) == [(index, step) for index in (0, 1) for step in range(1, 401)]
    assert all(each.loss == each.step / 4 for each in attempt.steps)
    assert {each.host for each in attempt.observations[-1][1].instances} == {"node0", "node1"}
    printed = [line.partition(">:")[2].split() for line in done.stdout.splitlines()]
    assert len(printed) == 8
    for index, step, at in printed:
        # An answer that is late puts its steps later, by no more than it was late. Another clock
        # would be wrong by hours.
        assert abs(ended[int(index), int(step)] - float(at)) < 60
