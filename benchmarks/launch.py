"""What starting costs: poprun-py beside mpirun and torchrun, interleaved, as ratios of medians.

python benchmarks/launch.py [--repeats 9] [--json]

Rows: the help; two instances of a no-op shell program; two Python programs that initialise MPI
(mpi4py), or a gloo process group for torchrun; and planning 4,096 instances on 256 hosts.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
PROGRAMS = {
    "mpi.py": "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n",
    "gloo.py": "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\n",
    "empty.py": "",
}


def commands(folder: Path) -> dict[str, list[str]]:
    """Return the commands to time, by name."""
    ours = [str(BIN / "poprun-py")]
    two = ["--num-instances", "2", "--num-replicas", "2"]
    mpirun = [str(BIN / "mpirun"), "--allow-run-as-root", "--bind-to", "none", "-n", "2"]
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    python = sys.executable
    return {
        "python -c pass": [python, "-c", "pass"],
        "poprun-py --help": [*ours, "--help"],
        "poprun-py --dry-run": [*ours, *two, "--dry-run", "true"],
        "mpirun true": [*mpirun, "true"],
        "poprun-py true": [*ours, *two, "true"],
        "mpirun mpi.py": [*mpirun, python, str(folder / "mpi.py")],
        "poprun-py mpi.py": [*ours, *two, str(folder / "mpi.py")],
        "torchrun empty.py": [*torchrun, str(folder / "empty.py")],
        "torchrun gloo.py": [*torchrun, str(folder / "gloo.py")],
        "poprun-py gloo.py": [*ours, *two, str(folder / "gloo.py")],
    }


def measure(repeats: int) -> dict[str, float]:
    """Return the median seconds of every command; the commands take turns."""
    # pip compiles what it installs. In a working tree the environment may forbid writing bytecode,
    # and compiling at each start would count against us.
    for package in ("poprun_py", "popdist_py"):
        compileall.compile_dir(Path(__file__).parents[1] / package, quiet=1)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        for program, text in PROGRAMS.items():
            (folder / program).write_text(text)
        timed = commands(folder)
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(repeats):
            for name, command in timed.items():
                start = time.perf_counter()
                subprocess.run(
                    command,
                    check=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def planning() -> dict[str, float]:
    """Return the seconds of planning 512 instances on 32 hosts and 4,096 on 256."""
    from poprun_py.machines.host_list import parse_host_list
    from poprun_py.options.launch_config import LaunchConfig
    from poprun_py.planning.hosts_and_mpi import PlanInputs
    from poprun_py.planning.installed_mpi import OPEN_MPI_5, Mpi
    from poprun_py.planning.instances_on_hosts import make_topology
    from poprun_py.planning.launch_plan import make_plan

    seconds = {}
    for instances, hosts in ((512, 32), (4096, 256)):
        config = LaunchConfig(num_instances=instances, num_replicas=instances, program=("true",))
        host_list = parse_host_list(f"n[1-{hosts}]", source="benchmark")
        start = time.perf_counter()
        inputs = PlanInputs(
            config=config,
            topology=make_topology(config, host_list),
            environ={},
            machines=(None,) * hosts,
            mpi=Mpi(path="mpirun", kind=OPEN_MPI_5),
        )
        make_plan(inputs)
        seconds[f"plan {instances} instances on {hosts} hosts"] = time.perf_counter() - start
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    seconds = measure(args.repeats)
    plans = planning()
    ratios = {
        "poprun-py true - mpirun true (s)": seconds["poprun-py true"] - seconds["mpirun true"],
        "poprun-py mpi.py / mpirun mpi.py": seconds["poprun-py mpi.py"] / seconds["mpirun mpi.py"],
        "poprun-py gloo.py / torchrun gloo.py": seconds["poprun-py gloo.py"]
        / seconds["torchrun gloo.py"],
        "poprun-py true / torchrun empty.py": seconds["poprun-py true"]
        / seconds["torchrun empty.py"],
        "plan: 8 times the instances, times the time": plans["plan 4096 instances on 256 hosts"]
        / plans["plan 512 instances on 32 hosts"],
    }
    if args.json:
        print(json.dumps({"seconds": seconds | plans, "ratios": ratios}, indent=2))
        return
    for name, value in (seconds | plans).items():
        print(f"{name:42} {value:8.3f} s")
    for name, value in ratios.items():
        print(f"{name:46} {value:6.3f}")


if __name__ == "__main__":
    main()
