"""What one more instance costs: start, memory, descriptors and end of jobs of up to 64 instances.

python benchmarks/many.py [--instances 1 16 64] [--programs sleep init] [--hosts 2 8 16] [--json]

All instances run on this machine, most of them on a CPU that they share. ``sleep`` never calls MPI;
``init`` calls ``popdist_py.init()`` and meets the others in a barrier. Both write a line and wait
until all have. The same under a bare ``mpirun`` takes turns with ours; its ``init`` is NumPy's
import and MPI's barrier. Memory is the proportional share (PSS) of everything but the programs, and
apart that of the programs; ``launcher`` is the process that was started, with the CPU time of those
that have ended under it, such as ssh. ``slopes`` are what one more instance costs between the two
largest jobs.

``hosts`` are jobs of one sleeping instance on each host of tests/lab (as root, else left out): what
the first host holds. ``lines`` is what one launcher passes on of two instances. ``plans`` are dry
runs.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from lab.lab import Lab, missing  # noqa: E402
from show_rows import show_rows  # noqa: E402

BIN = Path(sys.executable).parent
# The programs wait for the end of a pipe: 64 that looked again and again would be work.
_WAIT = "pipe = open({pipe!r})\nprint('here', flush=True)\npipe.read()\n"
# mpirun's gets what init() and any program with arrays need as well.
_INIT = "import popdist_py\npopdist_py.init()\npopdist_py.barrier()\n"
_INIT_OF_MPIRUN = "import numpy\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
PROGRAMS = {
    "sleep": {"ours": _WAIT, "mpirun": _WAIT},
    "init": {"ours": _INIT + _WAIT, "mpirun": _INIT_OF_MPIRUN + _WAIT},
}
TIMES = ("seconds_to_last_line", "seconds_to_end")
HELD = ("mb", "descriptors", "cpu_ms", "program_mb")
LAUNCHER = ("launcher_mb", "launcher_descriptors", "launcher_cpu_ms")
FIGURES = (*TIMES, *HELD, *LAUNCHER)
LINES, PLANS = 20_000, ((64, 4), (512, 32), (4096, 256))
_TICKS = os.sysconf("SC_CLK_TCK")


def command(way: str, instances: int, program: Path, *options: str) -> list[str]:
    """Return what starts the instances; ``options`` are those of ours."""
    python = [sys.executable, str(program)]
    if way == "ours":
        return [str(BIN / "poprun-py"), "-n", str(instances), "--oversubscribe", *options, *python]
    return [
        *(str(BIN / "mpirun"), "--allow-run-as-root", "--bind-to", "none"),
        *("--map-by", ":OVERSUBSCRIBE", "-n", str(instances), *python),
    ]


def descendants(pid: int) -> list[int]:
    """Return a process and all that it has started, as far as they are there."""
    pids = [pid]
    for each in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return pids


def megabytes(pid: int) -> float:
    """Return the proportional share of memory of a process."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(rollup.partition("\nPss:")[2].split()[0]) / 1024


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def cpu_ms(pid: int) -> float:
    """Return the CPU time of a process and of those that it has started and waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * sum(map(int, fields[11:15])) / _TICKS


def held(pids: list[int], program: Path) -> dict[str, float]:
    """Return what the processes of a job hold, of which the first is the launcher."""
    holds = dict.fromkeys(HELD, 0.0)
    for pid in pids:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[1:2] == [str(program).encode()]:
            holds["program_mb"] += megabytes(pid)
        else:
            holds["mb"] += megabytes(pid)
            holds["descriptors"] += descriptors(pid)
            holds["cpu_ms"] += cpu_ms(pid)
    of_launcher = (megabytes(pids[0]), descriptors(pids[0]), cpu_ms(pids[0]))
    return {**holds, **dict(zip(LAUNCHER, of_launcher, strict=True))}


@contextlib.contextmanager
def waiting_program(
    text: str, parent: str | None = None
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Give a program of this text that waits, and what lets all that run it go on."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        pipe, program = Path(folder, "pipe"), Path(folder, "program.py")
        os.mkfifo(pipe)
        writer = os.open(pipe, os.O_RDWR)
        program.write_text(text.format(pipe=str(pipe)))
        yield program, lambda: os.close(writer)


def job(
    words: list[str], instances: int, program: Path, release: Callable[[], None], skipped: int = 0
) -> dict[str, float]:
    """Run one job and return what it took; the first ``skipped`` processes are not of it."""
    start = time.perf_counter()
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        for _ in range(instances):
            if b"here" not in process.stdout.readline():
                raise RuntimeError(f"not all of {instances} instances came: {words}")
        there = time.perf_counter()
        holds = held(descendants(process.pid)[skipped:], program)
        released = time.perf_counter()
        release()
        process.wait()
        ended = time.perf_counter()
    return {**dict(zip(TIMES, (there - start, ended - released), strict=True)), **holds}


def medians(jobs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in jobs) for key in FIGURES}


def measure(sizes: list[int], programs: list[str], repeats: int) -> list[dict[str, Any]]:
    """Return a row for each program, way and number of instances; the ways take turns."""
    # pip compiles what it installs. In a working tree the environment may forbid writing bytecode,
    # and compiling at each start would count against us.
    for package in ("poprun_py", "popdist_py"):
        compileall.compile_dir(ROOT / package, quiet=1)
    rows = []
    for name in programs:
        for instances in sizes:
            jobs: dict[str, list[dict[str, float]]] = {"ours": [], "mpirun": []}
            for _ in range(repeats):
                for way, done in jobs.items():
                    with waiting_program(PROGRAMS[name][way]) as (program, release):
                        words = command(way, instances, program)
                        done.append(job(words, instances, program, release))
            for way, done in jobs.items():
                rows.append({"program": name, "way": way, "instances": instances, **medians(done)})
    return rows


def slopes(rows: list[dict[str, Any]], count: str = "instances") -> list[dict[str, Any]]:
    """Return what one more of ``count`` costs between the two largest jobs of each kind."""
    found = []
    for program, way in dict.fromkeys((row["program"], row["way"]) for row in rows):
        few, many = [r for r in rows if (r["program"], r["way"]) == (program, way)][-2:]
        more = many[count] - few[count]
        costs = {key: (many[key] - few[key]) / more for key in FIGURES}
        found.append({"program": program, "way": way, "of": count, **costs})
    return found


def over_hosts(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Return a row for each number of hosts, with an instance on each."""
    rows = []
    # The hosts see the parent of the lab's folder.
    with tempfile.TemporaryDirectory() as parent, Lab(Path(parent, "lab"), max(sizes)) as lab:
        for hosts in sizes:
            done = []
            for _ in range(repeats):
                with waiting_program(_WAIT, parent) as (program, release):
                    words = command("ours", hosts, program, "--host", lab.names(hosts))
                    words = lab[0].enter("env", f"XDG_CACHE_HOME={parent}", *words)
                    done.append(job(words, hosts, program, release, skipped=1))  # of nsenter
            rows.append({"program": "sleep", "way": "ours", "hosts": hosts, **medians(done)})
    return rows


def lines_per_second(way: str) -> float:
    """Return how many lines of two instances a launcher passes on."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(f"for i in range({LINES}): print('step', i, 'loss', 0.5, flush=True)\n")
        with subprocess.Popen(command(way, 2, program), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            start = time.perf_counter()
            for _ in range(2 * LINES - 1):
                process.stdout.readline()
            return 2 * LINES / (time.perf_counter() - start)


def planned(instances: int, hosts: int) -> dict[str, Any]:
    """Return what planning a job takes."""
    words = command("ours", instances, Path("x"), "--host", f"h[1-{hosts}]", "--dry-run")
    start = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"no plan: {words}")
    seconds = time.perf_counter() - start
    mb = used.ru_maxrss / 1024
    return {"instances": instances, "hosts": hosts, "seconds": seconds, "mb": mb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 8, 16])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    jobs = measure(sorted(args.instances), args.programs, args.repeats)
    found = {"jobs": jobs, "slopes": slopes(jobs)}
    if args.hosts and not missing():
        found["hosts"] = over_hosts(sorted(args.hosts), args.repeats)
        found["slopes"] += slopes(found["hosts"], "hosts")
    found["lines"] = [
        {"way": way, "lines_per_second": lines_per_second(way)} for way in ("ours", "mpirun")
    ]
    found["plans"] = [planned(*size) for size in PLANS]
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for title, rows in found.items():
        print(title)
        show_rows(rows, as_json=False)


if __name__ == "__main__":
    main()
