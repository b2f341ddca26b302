"""Printed comparisons and scalings. The folder golden/ contains the whole texts."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from support.launcher.made_runs import MadeAttempt, made_run

from poprun_py.past_runs.comparison import compare, remarks_on
from poprun_py.past_runs.comparison_tables import bar, comparison_lines, scaling_lines
from poprun_py.past_runs.measured_run import measure, parse_target

LOSSES = [2 / step for step in range(1, 21)]


def comparison_of(folder):
    """Compare a run with a run of twice the size and a run of another program."""
    target = parse_target("accuracy=0.9")
    runs = [
        made_run(
            folder, "one", attempts=(MadeAttempt(losses=LOSSES, values={10: {"accuracy": 0.92}}),)
        ),
        made_run(
            folder, "two", instances=2, replicas=4, hosts=("node0", "node1"), seconds=8.0,
            attempts=(
                MadeAttempt(step_seconds=0.125, losses=LOSSES, values={9: {"accuracy": 0.5}}),
            ),
        ),
        made_run(
            folder, "other", attempts=(MadeAttempt(steps=0),), program=("sh", "-c", "true"),
            seconds=None, versions={"torch": "2.8"},
        ),
    ]  # fmt: skip
    measured = [measure(run, target) for run in runs]
    return compare(measured, target=target, remarks=remarks_on(measured))


def scaling_of(folder, *, samples=8, steps=20, seconds=(4.0, 2.5, 2.0)):
    runs = [
        made_run(
            folder, f"scale-n{count}-{repeat}", instances=count, replicas=4,
            seconds=seconds[index] + repeat / 10,
            attempts=(
                MadeAttempt(
                    steps=steps, samples=samples // count,
                    step_seconds=(0.1 + 0.01 * index + 0.001 * repeat) / count,
                ),
            ),
        )
        for repeat in (1, 2, 3)
        for index, count in enumerate((1, 2, 4))
    ]  # fmt: skip
    return compare([measure(run) for run in runs], grouped=True, remarks=("a remark",))


def text_of(lines):
    return "\n".join(lines) + "\n"


def test_a_comparison(golden, tmp_path):
    golden("comparison.txt", text_of(comparison_lines(comparison_of(tmp_path), width=200)))


def test_repetitions_show_their_range(golden, tmp_path):
    runs = [
        measure(made_run(tmp_path, f"run-{n}", attempts=(MadeAttempt(step_seconds=0.1 + n / 100),)))
        for n in range(3)
    ]
    comparison = compare(runs, grouped=True)
    golden("comparison_grouped.txt", text_of(comparison_lines(comparison, width=200)))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100])
def test_a_table_fits_the_terminal(tmp_path, width):
    comparison = comparison_of(tmp_path)
    table = comparison_lines(comparison, width=width)
    table = table[: table.index("")]
    assert max(map(cell_len, table)) <= max(width, 60)
    assert "speedup" in table[0] or width < 60
    scaling = scaling_lines(scaling_of(tmp_path / "scaling"), width=width)
    assert max(map(cell_len, scaling[: scaling.index("")])) <= max(width, 60)


def test_a_scaling(golden, tmp_path):
    golden("scaling.txt", text_of(scaling_lines(scaling_of(tmp_path), width=200)))


def test_a_scaling_by_steps(golden, tmp_path):
    lines = scaling_lines(scaling_of(tmp_path, samples=0), width=200)
    golden("scaling_by_steps.txt", text_of(lines))


def test_a_scaling_by_seconds(golden, tmp_path):
    lines = scaling_lines(scaling_of(tmp_path, steps=0), width=200, blocks=False)
    golden("scaling_by_seconds.txt", text_of(lines))


def test_bars_are_proportional_to_their_values():
    values = [10.0, 5.0, 0.001, None]
    assert [len(bar(each, values, 20, blocks=False)) for each in values] == [20, 10, 1, 0]
    assert [len(bar(each, values, 20)) for each in values] == [20, 10, 1, 0]
    assert bar(5.125, values, 20).endswith("█▎")
