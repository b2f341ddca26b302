"""Programs of PopTorch's tutorials run as they are printed, each in a process of its own.

Their output is compared with ``printed/``.
"""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
from sdk_programs.catalog import COMMANDS, HERE, RUNS, Run
from sdk_programs.data_sets import make_data
from sdk_programs.running import plan, run_program
from support.processes import survivors, wait_until
from support.repository import ROOT

from examples.common.sample_data import make_cifar10
from tools.running.printed import comparable

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data-sets")
    make_data(folder)
    return folder


@pytest.fixture
def mark():
    """Give a variable for all processes of a program; afterwards none of them may be left."""
    name, value = "SDK_PROGRAMS_MARK", f"{os.getpid()}-{time.monotonic_ns()}"
    yield name, value
    wait_until(lambda: not survivors(f"{name}={value}"), 30, "processes of the program are left")


def params():
    for run in RUNS:
        yield pytest.param(run, id=run.name, marks=[] if run.by_default else pytest.mark.long)


@pytest.mark.parametrize("run", list(params()))
def test_program_prints_its_record(run, tmp_path, mark, request):
    if run.by_default:
        # It reads no data set, and making these takes long.
        data = tmp_path / "none"
        (data / "lfw").mkdir(parents=True)
    else:
        data = request.getfixturevalue("data")
    lines, code = run_program(run, tmp_path, data, mark)
    text = "\n".join(lines)
    assert code == run.code, text
    for bound in run.within:
        found = re.search(bound.pattern, text)
        assert found, text
        assert bound.low <= float(found[1]) <= bound.high, text
    assert_equal_weights(tmp_path / "work" / "checkpoints", run.saves)
    file = HERE / "printed" / f"{run.name}.txt"
    lines = [line.replace(str(tmp_path), "...").replace(str(ROOT), "...") for line in lines]
    if request.config.getoption("--rewrite-goldens"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    expected = file.read_text(encoding="utf-8").splitlines()
    vary = run.numbers_vary
    assert comparable(lines, numbers_vary=vary) == comparable(expected, numbers_vary=vary)


def assert_equal_weights(folder, count):
    """Compare the weights that instances saved, but for the statistics of batch norms."""
    saved = [torch.load(path)["model_state_dict"] for path in folder.glob("*.pt")]
    assert len(saved) == count
    for other in saved[1:]:
        for name, value in saved[0].items():
            if "running" not in name and "num_batches" not in name:
                assert torch.equal(other[name], value), name


def rows(table: str) -> list[list[str]]:
    """Return the cells of each row of a topology table."""
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")][1:]
        for line in table.splitlines()
        if re.match(r"\s*\| (hosts|ILDs|instances|replicas) ", line)
    ]


@pytest.mark.examples
def test_the_hands_on_session_begins_out_of_memory(tmp_path, mark):
    data = tmp_path / "data"
    (data / "lfw").mkdir(parents=True)
    make_cifar10(data, training=3 * 64 + 3, test=5)
    first = (HERE / "commands" / "hands_on.sh").read_text().splitlines()[0]
    run = Run("hands-on-memory", "programs/hands_on/main.py", first)
    assert "--batch-size 64 --precision 32.32" in first
    lines, code = run_program(run, tmp_path, data, mark)
    text = "\n".join(lines)
    assert code == 1, text
    assert "poplar_graph_memory_allocation_error': Out of memory on IPU 1: " in text
    assert "] loss:" not in text


@pytest.mark.examples
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_command_line_of_the_launcher_is_planned(command, tmp_path, mark):
    shown, code = plan(
        command, tmp_path, mark, dry_run="yes", repaired="yes" if command.repaired else ""
    )
    assert code == 0, shown
    assert tuple(map(len, rows(shown))) == command.rows


@pytest.mark.examples
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.repaired], ids=lambda c: c.name)
def test_what_is_repaired_would_not_be_planned_as_meant(command, tmp_path, mark):
    shown, code = plan(command, tmp_path, mark, dry_run="yes")
    assert code == 2
    assert command.as_printed in shown


@pytest.mark.examples
def test_command_line_for_one_host_runs_a_stand_in(tmp_path, mark):
    command = COMMANDS[0]
    shown, code = plan(command, tmp_path, mark, oversubscribe="yes")
    assert code == 0, shown
    found = re.findall(r"replicas (\d+) (\d+)$", shown, re.M)
    assert sorted(int(x) for pair in found for x in pair) == list(range(16))


@pytest.mark.examples
def test_printed_topology_is_the_launchers(poprun):
    done = poprun("--num-replicas", 8, "--num-instances", 2, "--print-topology=yes", "--dry-run",
                  "true")  # fmt: skip
    table = (HERE / "commands" / "topology.txt").read_text()
    shown = [line.strip() for line in done.stdout.splitlines()]
    expected = [line.strip() for line in table.splitlines()]
    assert shown[: len(expected)] == expected


def test_options_are_shown_with_the_values_that_the_notebook_shows():
    import popdist_py.poptorch as poptorch

    options = poptorch.Options()
    shown = repr(options)
    for value in (
        "replication_factor=1", "broadcast_buffers=True", "device_iterations=1", "log_dir='.'",
        "auto_round_num_ipus=False", "anchored_tensors={}", "output_return_period=1",
        "available_memory_proportion={}", "num_distributed_processes=1",
        "distributed_process_id=0", "trace_model=False", "rearrangeAnchorsOnHost=False",
        "instrumentWithHardwareCycleCounter=False",
    ):  # fmt: skip
        assert value in shown
    assert (options.output_mode, options.connection_type, options.sync_pattern) == (4, 0, 0)
    assert repr(options.Training.gradientAccumulation(10)).startswith(
        "_TrainingOptions(\n    gradient_accumulation=10,  # default: 1\n"
        "    accumulation_and_replication_reduction_type=<ReductionType.Mean: 1>,\n"
        "    meanAccumulationAndReplicationReductionStrategy=<MeanReductionStrategy.Post: 1>,\n"
    )
    location = poptorch.TensorLocationSettings().useOnChipStorage(False)
    assert repr(options.TensorLocations.setOptimizerLocation(location)).startswith(
        "_TensorLocationOptions(\n    location_optimizer={'onChip': 0},"
    )
    assert options.outputMode(poptorch.OutputMode.All).output_mode == 2
    assert options.deviceIterations(10).device_iterations == 10


def test_every_program_is_run():
    files = {str(path.relative_to(HERE)) for folder in ("programs", "recreated")
             for path in (HERE / folder).rglob("*.py")}  # fmt: skip
    assert files - {"programs/hands_on/utils.py"} == {run.file for run in RUNS}
    assert {path.stem for path in (HERE / "printed").glob("*.txt")} == {run.name for run in RUNS}
