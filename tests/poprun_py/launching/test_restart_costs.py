"""What a restart costs: its parts until the next training step, and the steps computed again."""

from __future__ import annotations

from dataclasses import replace

from poprun_py.launching.restart_costs import restart_cost
from poprun_py.running.supervise.launch_result import InstanceResult, LaunchResult, Progress
from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.phases import Phases

FAILED = LaunchResult(exit_code=137, ending_seconds=0.25)


def attempt(step, resumed, *phases):
    states = tuple(InstanceState(index=i, phases=each) for i, each in enumerate(phases))
    return LaunchResult(
        exit_code=0,
        instances=(InstanceResult(index=0, progress=Progress(step, resumed=resumed)),),
        view=JobView(run_id="r", pid=1, program="p", instances=states),
    )


def phases(imports, **before):
    return Phases(launch=0.5, imports=imports, before_steps=before, in_steps={}, after_steps={})


def test_the_slowest_instance_tells_where_the_time_went():
    quick = phases(0.1, compiling=9.0 - 8.0)
    slow = phases(1.0, compiling=2.0, saving=0.5, other=0.75, loading=0.25)
    cost = restart_cost(FAILED, 0.125, attempt(12, 9, quick, slow, None), reached=10)
    assert cost is not None
    assert cost.to_json() == {
        "seconds": 5.375, "ending": 0.25, "pause": 0.125, "starting": 0.5, "imports": 1.0,
        "compiling": 2.0, "state": 0.5, "first_step": 1.0, "num_repeated_steps": 1,
    }  # fmt: skip
    assert cost.text == (
        "took 5.38 s from the failure to the next training step (ending 0.25 s, pause 0.12 s, "
        "start 0.5 s, Python and imports 1 s, compiling 2 s, loading the state 0.5 s, "
        "preparation and first step 1 s); finished training steps that were computed again: 1"
    )
    assert "pause" not in replace(cost, pause=0.004).text


def test_a_restart_without_a_known_step_has_no_cost():
    assert restart_cost(FAILED, 0.0, attempt(9, 9, phases(1.0)), reached=9) is None
    assert restart_cost(FAILED, 0.0, attempt(10, 9, phases(None), None), reached=9) is None
    assert restart_cost(FAILED, 0.0, LaunchResult(exit_code=1), reached=9) is None
