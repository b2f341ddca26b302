"""A broadcast that all have agreed on needs no meeting; calls that differ are still found."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("repeated_broadcast_program.py")


def called(root: int, name: str = "small", size: int = 3) -> str:
    return f"broadcast(name='{name}', root={root}, shape=({size},), dtype=float64)"


ALL_BUT_LAST = f"instances 0, 1 called {called(0)}; instance 2 called"
# What every instance says, wherever it was when it heard.
EXPECTED = {
    "another call": f"{ALL_BUT_LAST} barrier()",
    "much later": f"{ALL_BUT_LAST} barrier()",
    "the root makes another": f"instance 0 called barrier(); instances 1, 2 called {called(0)}",
    "a large one": f"instances 0, 1 called {called(0, 'large', 200_000)}; "
    "instance 2 called barrier()",
    "another root": f"{ALL_BUT_LAST} {called(2)}",
    "all are the root": "; ".join(f"instance {index} called {called(index)}" for index in range(3)),
    "nobody is the root": "; ".join(
        f"instance {index} called {called((index + 1) % 3)}" for index in range(3)
    ),
    "another size": f"instances 0, 1 called {called(1)}; instance 2 called "
    + called(1, "large", 200_000),
    "after equal ones": f"{ALL_BUT_LAST} {called(1)}",
}


def test_the_root_goes_on_and_calls_that_differ_are_found(poprun):
    done = poprun("--num-instances", 3, "--num-replicas", 3, "--oversubscribe", PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("done") == 3
    for name, text in EXPECTED.items():
        line = f"{name}: {text}: all instances must make the same call"
        assert done.stdout.count(line) == 3, f"{line}\n{done.stdout}"
