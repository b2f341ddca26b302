"""What a loss cost, from the notes of a training: the next step, steps again, and restarts."""

from __future__ import annotations

from tools.soak.step_notes import cost, digests, median_step, read_notes, steps_and_seconds

NOTES = """\
start 0 10.0 node0 41
imported 0 11.0
resumed 0 12.0
step 1 13.0
step 2 14.0
digest 2 14.0 aa
step 3 15.0
step 4 15.9
start 0 20.0 node0 52
resumed 3 21.0
step 4 22.0
step 5 23.0
start 0 24.0 node0 60
step 5 26.0
digest 5 26.0 bb
step 6 27.0
end 6 27.5 cc
"""
RUNS = read_notes(NOTES)


def test_a_restart_costs_the_time_to_its_first_step_and_the_steps_done_twice():
    found = cost(RUNS, loss=15.2, next_loss=23.5)
    assert (found.seconds, found.again, found.restarts) == (6.8, 1, 1)
    assert found.phases == {"start": 4.8, "resumed": 5.8, "step": 6.8}


def test_further_restarts_before_the_next_loss_count_for_the_loss():
    assert (cost(RUNS, loss=15.2).again, cost(RUNS, loss=15.2).restarts) == (2, 2)


def test_without_a_restart_the_step_in_progress_does_not_show_that_the_training_goes_on():
    assert cost(read_notes(NOTES[: NOTES.index("step 3")]), loss=13.5) is None
    found = cost(read_notes(NOTES[: NOTES.index("step 4")]), loss=13.5)
    assert (found.seconds, found.again, found.restarts) == (1.5, 0, 0)


def test_a_training_without_a_step_has_no_cost_yet():
    assert cost([], loss=1.0) is None
    assert cost(read_notes("start 0 1.0 node0 4\n"), loss=2.0) is None


def test_steps_count_once_and_digests_of_one_step_are_kept_apart():
    assert steps_and_seconds(RUNS) == (5, 14.0)
    assert median_step(RUNS) == 1.0
    assert digests(RUNS) == {2: {"aa"}, 5: {"bb"}, 6: {"cc"}}
