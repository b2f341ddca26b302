"""All-reduce and a training step over separate hosts on emulated links: ours against torchrun.

The hosts are those of tests/lab (root, network namespaces, sshd): each has its own network, and
links of the given rates. Two jobs take turns on them: one that poprun-py starts, with our
collectives, MPI_Allreduce and our training step; and one of torchrun on every host (static
rendezvous), with gloo and DDP over it. "gradients" is ours on memory that the instances of a host
share, as gradients lie in. A time is the slowest instance's, and the median over all rounds.

Usage: python benchmarks/multi_host.py [--json] [--quick] [--rates 1gbit 10gbit] [--delay 50us]
       [--per-host 1 2] [--rounds 3] [--turns 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from lab.lab import Lab, missing  # noqa: E402

HOSTS = 2
SIZES = [4 << 10, 64 << 10, 1 << 20, 25 << 20]
MODELS = ["mlp"]
LIMIT_SECONDS = 900
# Each way repeats its call for about this long in every turn.
_SECONDS = 0.02

Ways = dict[str, Callable[[], Any]]


# --- in the instances -------------------------------------------------------------------------


def our_ways(what: int | str) -> Ways:
    """Return the all-reduces of ``what`` bytes, or a step of model ``what``, under poprun-py."""
    import allreduce
    import train_step

    if isinstance(what, str):
        return {"ours": train_step.ours(what)}
    made = allreduce.ways(what)
    return {"gradients": made["window"], "ours": made["ours"], "mpi": made["mpi"]}


def their_ways(what: int | str) -> Ways:
    """Return the all-reduce of ``what`` bytes, or a step of model ``what``, under torchrun."""
    import torch
    import train_step

    if isinstance(what, str):
        return {"ddp": train_step.plain(what, train_step.INSTANCES, ddp=True)}
    tensor = torch.zeros(what // 4)
    return {"gloo": lambda: torch.distributed.all_reduce(tensor)}


def timed(ways: Ways, turns: int, slowest: Callable[[list[float]], list[float]]) -> Any:
    """Return the milliseconds of every way in every turn, those of the slowest instance."""
    found = {}
    for name, call in ways.items():
        call()
        slowest([0.0])
        start = time.perf_counter()
        call()
        once = slowest([time.perf_counter() - start])[0]
        repetitions = max(1, min(1000, int(_SECONDS / once)))
        taken = []
        for _ in range(turns):
            slowest([0.0])
            start = time.perf_counter()
            for _ in range(repetitions):
                call()
            taken.append(1000 * (time.perf_counter() - start) / repetitions)
        found[name] = slowest(taken)
    return found


def work(launcher: str, subjects: list[int | str], turns: int) -> None:
    """Measure as one of the instances; the first one prints a line for every size and model."""
    import torch

    torch.set_num_threads(1)
    if launcher == "poprun-py":
        import popdist_py

        popdist_py.init()
        is_first = popdist_py.getInstanceIndex() == 0
        ways = our_ways

        def slowest(times: list[float]) -> list[float]:
            return list(popdist_py.all_reduce(times, "max"))
    else:
        torch.distributed.init_process_group("gloo")
        is_first = torch.distributed.get_rank() == 0
        ways = their_ways

        def slowest(times: list[float]) -> list[float]:
            tensor = torch.tensor(times, dtype=torch.float64)
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
            return tensor.tolist()

    for what in subjects:
        found = timed(ways(what), turns, slowest)
        if is_first:
            print(json.dumps([what, found]), flush=True)
    if launcher == "torchrun":
        torch.distributed.destroy_process_group()


# --- on the hosts -----------------------------------------------------------------------------


def run_poprun(lab: Lab, per_host: int, program: list[object]) -> str:
    """Run a program under poprun-py on all hosts; returns what instance 0 printed."""
    instances = str(HOSTS * per_host)
    done = lab[0].poprun(
        *("--host", lab.names(), "--num-instances", instances, "--num-replicas", instances),
        *("--only-output-from-instance", "0", "--output", "plain", "--oversubscribe"),
        *(program[0], "--worker", "poprun-py", *program[1:]),
        timeout=LIMIT_SECONDS,
    )
    if done.returncode:
        sys.exit(f"poprun-py ended with {done.returncode}: {done.stderr}")
    return done.stdout


def run_torchrun(lab: Lab, per_host: int, program: list[object]) -> str:
    """Run a program under one torchrun on every host; returns what its first process printed."""
    running = [
        host.start(
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", HOSTS),
            *("--node-rank", rank, "--nproc-per-node", per_host),
            *("--master-addr", lab[0].address, "--master-port", 29500),
            *(program[0], "--worker", "torchrun", *program[1:]),
            env={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
        )
        for rank, host in enumerate(lab.hosts)
    ]
    ended = []
    try:
        for process in running:
            ended.append(process.communicate(timeout=LIMIT_SECONDS))
    except subprocess.TimeoutExpired:
        sys.exit(f"torchrun ran over {LIMIT_SECONDS} s")
    finally:
        for process in running:
            process.kill()
    for process, (_, stderr) in zip(running, ended, strict=True):
        if process.returncode:
            sys.exit(f"torchrun ended with {process.returncode}: {stderr}")
    return ended[0][0]


def measured(lab: Lab, per_host: int, options: argparse.Namespace) -> dict[Any, dict[str, float]]:
    """Return the median milliseconds of every way, by size or model; the jobs take turns."""
    program = [__file__, "--turns", options.turns, "--sizes", *options.sizes]
    program += ["--models", *options.models]
    taken: dict[Any, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for run in (run_poprun, run_torchrun):
            lines = run(lab, per_host, program).splitlines()
            for what, found in (json.loads(line) for line in lines if line.startswith("[")):
                for way, times in found.items():
                    taken.setdefault(what, {}).setdefault(way, []).extend(times)
    return {
        what: {way: statistics.median(times) for way, times in found.items()}
        for what, found in taken.items()
    }


def shape(lab: Lab, rate: str, delay: str | None) -> str:
    """Give every link its rate and delay; returns the delay that the links have."""
    try:
        for host in lab.hosts:
            host.shape(rate, delay)
    except RuntimeError as error:
        print(f"links of {rate} without a delay: {error}", file=sys.stderr)
        for host in lab.hosts:
            host.shape(rate)
        return "none"
    return delay or "none"


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row for every rate, number of instances, and size or model."""
    with (
        tempfile.TemporaryDirectory(prefix="lab-") as folder,
        Lab(Path(folder) / "hosts", HOSTS) as lab,
    ):
        for rate in options.rates:
            delay = shape(lab, rate, options.delay)
            for count in options.per_host:
                where = {"rate": rate, "delay": delay, "hosts": HOSTS, "per_host": count}
                for what, ms in measured(lab, count, options).items():
                    subject = "bytes" if isinstance(what, int) else "model"
                    rival = "gloo" if "gloo" in ms else "ddp"
                    ratios = {
                        f"{way}/{rival}": round(ms[rival] / ms[way], 2)
                        for way in ("gradients", "ours")
                        if way in ms
                    }
                    times = {f"{way}_ms": round(value, 3) for way, value in ms.items()}
                    yield {**where, subject: what, **times, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="as tc spells them")
    parser.add_argument("--delay", help="of each direction of a link, such as 50us (needs netem)")
    parser.add_argument("--per-host", nargs="+", type=int, default=[1, 2], help="instances")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes")
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each launcher")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each job")
    parser.add_argument("--quick", action="store_true", help="only show that all of it runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=["poprun-py", "torchrun"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, [*options.sizes, *options.models], options.turns)
        return
    if options.quick:
        options.rates, options.per_host, options.sizes = ["10gbit"], [1], [4 << 10, 1 << 20]
        options.rounds, options.turns = 1, 2
    if reason := missing():
        sys.exit(f"no hosts to measure on: {reason}")
    found = []
    for row in rows(options):
        found.append(row)
        if not options.json:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if options.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
