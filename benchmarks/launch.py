"""What starting costs: poprun-py beside mpirun and torchrun, interleaved, as medians.

python benchmarks/launch.py [--repeats 9] [--json]

Rows: the help; one and two instances of a no-op shell program, also with --output-dir; 32 instances
that share the CPUs, of ``sleep 0`` and of an empty Python program; two Python programs that
initialise MPI (mpi4py), or a gloo process group for torchrun; and planning 4,096 instances on 256
hosts. On a machine that others use too, the CPU time (user and system, of all processes of a
command) varies less than the time on the clock. ``load`` is the machine's load before and after.
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
    mpi = [str(BIN / "mpirun"), "--allow-run-as-root", "--bind-to", "none", "--oversubscribe"]
    mpirun = [*mpi, "-n", "2"]
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    python, empty = sys.executable, str(folder / "empty.py")
    return {
        "python -c pass": [python, "-c", "pass"],
        "poprun-py --help": [*ours, "--help"],
        "poprun-py --dry-run": [*ours, *two, "--dry-run", "true"],
        "mpirun -n 1 true": [*mpi, "-n", "1", "true"],
        "poprun-py -n 1 true": [*ours, "-n", "1", "true"],
        "mpirun true": [*mpirun, "true"],
        "poprun-py true": [*ours, *two, "true"],
        "poprun-py --output-dir true": [*ours, *two, "--output-dir", str(folder / "runs"), "true"],
        "mpirun -n 32 sleep 0": [*mpi, "-n", "32", "sleep", "0"],
        "poprun-py -n 32 sleep 0": [*ours, "-n", "32", "--oversubscribe", "sleep", "0"],
        "mpirun -n 32 empty.py": [*mpi, "-n", "32", python, empty],
        "poprun-py -n 32 empty.py": [*ours, "-n", "32", "--oversubscribe", empty],
        "mpirun mpi.py": [*mpirun, python, str(folder / "mpi.py")],
        "poprun-py mpi.py": [*ours, *two, str(folder / "mpi.py")],
        "torchrun empty.py": [*torchrun, empty],
        "torchrun gloo.py": [*torchrun, str(folder / "gloo.py")],
        "poprun-py gloo.py": [*ours, *two, str(folder / "gloo.py")],
    }


def run(command: list[str], environ: dict[str, str]) -> tuple[float, float]:
    """Run a command; return its seconds on the clock, and the CPU time of all of its processes."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return seconds, usage.ru_utime + usage.ru_stime


def measure(repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median seconds and the median CPU time of every command, which take turns."""
    # pip compiles what it installs. In a working tree the environment may forbid writing bytecode,
    # and compiling at each start would count against us.
    for package in ("poprun_py", "popdist_py"):
        compileall.compile_dir(Path(__file__).parents[1] / package, quiet=1)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        for program, text in PROGRAMS.items():
            (folder / program).write_text(text)
        timed = commands(folder)
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
        for _ in range(repeats):
            for name, command in timed.items():
                runs[name].append(run(command, environ))
    seconds = {name: statistics.median(each for each, _ in runs[name]) for name in timed}
    cpu_seconds = {name: statistics.median(each for _, each in runs[name]) for name in timed}
    return seconds, cpu_seconds


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
    load = [os.getloadavg()[0]]
    seconds, cpu_seconds = measure(args.repeats)
    load.append(os.getloadavg()[0])
    plans = planning()
    ratios = {
        "poprun-py true - mpirun true (s)": seconds["poprun-py true"] - seconds["mpirun true"],
        "the same for one instance (s)": seconds["poprun-py -n 1 true"]
        - seconds["mpirun -n 1 true"],
        "--output-dir: more (s)": seconds["poprun-py --output-dir true"]
        - seconds["poprun-py true"],
        "32 of sleep 0: poprun-py / mpirun": seconds["poprun-py -n 32 sleep 0"]
        / seconds["mpirun -n 32 sleep 0"],
        "32 of empty.py: poprun-py / mpirun": seconds["poprun-py -n 32 empty.py"]
        / seconds["mpirun -n 32 empty.py"],
        "poprun-py mpi.py / mpirun mpi.py": seconds["poprun-py mpi.py"] / seconds["mpirun mpi.py"],
        "poprun-py gloo.py / torchrun gloo.py": seconds["poprun-py gloo.py"]
        / seconds["torchrun gloo.py"],
        "poprun-py true / torchrun empty.py": seconds["poprun-py true"]
        / seconds["torchrun empty.py"],
        "plan: 8 times the instances, times the time": plans["plan 4096 instances on 256 hosts"]
        / plans["plan 512 instances on 32 hosts"],
    }
    if args.json:
        found = {"seconds": seconds | plans, "cpu_seconds": cpu_seconds, "ratios": ratios}
        print(json.dumps({**found, "load": load}, indent=2))
        return
    print(f"load {load[0]:.1f} before, {load[1]:.1f} after{'':17} clock         CPU")
    for name, value in (seconds | plans).items():
        cpu = f"{cpu_seconds[name]:10.3f} s" if name in cpu_seconds else ""
        print(f"{name:42} {value:8.3f} s{cpu}")
    for name, value in ratios.items():
        print(f"{name:46} {value:6.3f}")


if __name__ == "__main__":
    main()
