"""All-reduce and a training step over separate hosts on emulated links: ours against torchrun.

The hosts are those of tests/lab (root, network namespaces, sshd): each has its own network, and
links of the given rates. Two jobs take turns on them: one that poprun-py starts, with our
collectives, MPI_Allreduce and our training step; and one of torchrun on every host (static
rendezvous), with gloo and DDP over it. "gradients" is ours on memory that the instances of a host
share, where gradients lie. Our training step is also taken with compressed gradients: "fp16",
"bf16", and "powersgd" of rank 2. A time is the slowest instance's, and the median over all rounds.
The last row is what each compression leaves of the digits example's accuracy, in percent: the mean
over some seeds (tests/lab/accuracy_program.py).

Usage: python benchmarks/multi_host.py [--json] [--quick] [--rates 1gbit 10gbit] [--delay 50us]
       [--per-host 1 2] [--rounds 3] [--turns 5] [--seeds 3]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from lab.lab import Lab, missing  # noqa: E402
from show_rows import show_rows  # noqa: E402

HOSTS = 2
SIZES = [4 << 10, 64 << 10, 1 << 20, 25 << 20]
MODELS = ["mlp"]
# Our training steps, by name: what gradientCompression() is given.
COMPRESSIONS = {
    "ours": ("none",),
    "fp16": ("fp16",),
    "bf16": ("bf16",),
    "powersgd": ("powersgd", 2, 0),
}
LIMIT_SECONDS = 900
ACCURACY_PROGRAM = ROOT / "tests" / "lab" / "accuracy_program.py"
EPOCHS = 6
# Each implementation repeats its call for about this long in every turn.
_SECONDS_PER_TURN = 0.02
# In its first steps ours measures whether reducing during backward pays.
_WARM_UP_STEPS = 8

# Calls to compare, by implementation.
Calls = dict[str, Callable[[], Any]]


# --- in the instances -------------------------------------------------------------------------


def our_calls(subject: int | str) -> Calls:
    """Return all-reduces of ``subject`` bytes, or a step of model ``subject``, under poprun-py."""
    import allreduce
    import train_step

    if isinstance(subject, str):
        return {
            name: when_called(partial(train_step.ours, subject, compression=compression))
            for name, compression in COMPRESSIONS.items()
        }
    calls = allreduce.implementations("all_reduce", subject)
    return {"gradients": calls["window"], "ours": calls["ours"], "mpi": calls["mpi"]}


def when_called(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """Return a call that is made when it is needed: models beside it would take its cache."""
    made: list[Callable[[], Any]] = []

    def call() -> Any:
        if not made:
            made.append(make())
        return made[0]()

    return call


def their_calls(subject: int | str) -> Calls:
    """Return an all-reduce of ``subject`` bytes, or a step of model ``subject``, under torchrun."""
    import torch
    import train_step

    if isinstance(subject, str):
        return {"ddp": train_step.plain(subject, train_step.INSTANCES, ddp=True)}
    tensor = torch.zeros(subject // 4)
    return {"gloo": lambda: torch.distributed.all_reduce(tensor)}


def timed(
    calls: Calls, turns: int, slowest: Callable[[list[float]], list[float]], warm_up: int
) -> Any:
    """Return the milliseconds of every call in every turn, those of the slowest instance."""
    times = {}
    for name in list(calls):
        call = calls.pop(name)
        gc.collect()
        for _ in range(warm_up):
            call()
        slowest([0.0])
        start = time.perf_counter()
        call()
        seconds_per_call = slowest([time.perf_counter() - start])[0]
        repetitions = max(1, min(1000, int(_SECONDS_PER_TURN / seconds_per_call)))
        own_times = []
        for _ in range(turns):
            slowest([0.0])
            start = time.perf_counter()
            for _ in range(repetitions):
                call()
            own_times.append(1000 * (time.perf_counter() - start) / repetitions)
        times[name] = slowest(own_times)
    return times


def work(launcher: str, subjects: list[int | str], turns: int) -> None:
    """Measure as one of the instances; the first one prints a line for every size and model."""
    import torch

    torch.set_num_threads(1)
    if launcher == "poprun-py":
        import popdist_py

        popdist_py.init()
        is_first = popdist_py.getInstanceIndex() == 0
        calls_of = our_calls

        def slowest(times: list[float]) -> list[float]:
            return list(popdist_py.all_reduce(times, "max"))
    else:
        torch.distributed.init_process_group("gloo")
        is_first = torch.distributed.get_rank() == 0
        calls_of = their_calls

        def slowest(times: list[float]) -> list[float]:
            tensor = torch.tensor(times, dtype=torch.float64)
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
            return tensor.tolist()

    for subject in subjects:
        warm_up = _WARM_UP_STEPS if isinstance(subject, str) else 1
        times = timed(calls_of(subject), turns, slowest, warm_up)
        if is_first:
            print(json.dumps([subject, times]), flush=True)
    if launcher == "torchrun":
        torch.distributed.destroy_process_group()


# --- on the hosts -----------------------------------------------------------------------------


def run_poprun(lab: Lab, per_host: int, program: list[object]) -> str:
    """Run a program under poprun-py on all hosts; return the output of instance 0."""
    instances = str(HOSTS * per_host)
    completed = lab[0].poprun(
        *("--host", lab.names(), "--num-instances", instances, "--num-replicas", instances),
        *("--only-output-from-instance", "0", "--output", "plain", "--oversubscribe"),
        *(program[0], "--worker", "poprun-py", *program[1:]),
        timeout=LIMIT_SECONDS,
    )
    if completed.returncode:
        sys.exit(f"poprun-py ended with {completed.returncode}: {completed.stderr}")
    return completed.stdout


def run_torchrun(lab: Lab, per_host: int, program: list[object]) -> str:
    """Run a program under one torchrun on every host; return the output of its first process."""
    processes = [
        host.start(
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", HOSTS),
            *("--node-rank", rank, "--nproc-per-node", per_host),
            *("--master-addr", lab[0].address, "--master-port", 29500),
            *(program[0], "--worker", "torchrun", *program[1:]),
            env={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
        )
        for rank, host in enumerate(lab.hosts)
    ]
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=LIMIT_SECONDS))
    except subprocess.TimeoutExpired:
        sys.exit(f"torchrun ran over {LIMIT_SECONDS} s")
    finally:
        for process in processes:
            process.kill()
    for process, (_, stderr) in zip(processes, outputs, strict=True):
        if process.returncode:
            sys.exit(f"torchrun ended with {process.returncode}: {stderr}")
    return outputs[0][0]


def measured(lab: Lab, per_host: int, options: argparse.Namespace) -> dict[Any, dict[str, float]]:
    """Return the median milliseconds by size or model and implementation; the jobs take turns."""
    program = [__file__, "--turns", options.turns, "--sizes", *options.sizes]
    program += ["--models", *options.models]
    all_times: dict[Any, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for run in (run_poprun, run_torchrun):
            lines = run(lab, per_host, program).splitlines()
            for subject, job_times in (json.loads(line) for line in lines if line.startswith("[")):
                for name, times in job_times.items():
                    all_times.setdefault(subject, {}).setdefault(name, []).extend(times)
    return {
        subject: {name: statistics.median(times) for name, times in subject_times.items()}
        for subject, subject_times in all_times.items()
    }


def accuracies(lab: Lab, seeds: int) -> dict[str, float]:
    """Return the digits example's accuracy by compression, in percent, over one instance a host."""
    completed = lab[0].poprun(
        *("--host", lab.names(), "--num-instances", HOSTS, "--num-replicas", 2 * HOSTS),
        *("--only-output-from-instance", "0", "--output", "plain"),
        *(ACCURACY_PROGRAM, seeds, EPOCHS),
        timeout=LIMIT_SECONDS,
    )
    if completed.returncode:
        sys.exit(f"poprun-py ended with {completed.returncode}: {completed.stderr}")
    return json.loads(completed.stdout)


def shape(lab: Lab, rate: str, delay: str | None) -> str:
    """Give every link its rate and delay; return the delay that the links have."""
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
    """Yield one row for every rate, number of instances, and size or model; then the accuracies."""
    with (
        tempfile.TemporaryDirectory(prefix="lab-") as folder,
        Lab(Path(folder) / "hosts", HOSTS) as lab,
    ):
        for rate in options.rates:
            delay = shape(lab, rate, options.delay)
            for count in options.per_host:
                where = {"rate": rate, "delay": delay, "hosts": HOSTS, "per_host": count}
                for subject, ms in measured(lab, count, options).items():
                    kind = "bytes" if isinstance(subject, int) else "model"
                    rival = "gloo" if "gloo" in ms else "ddp"
                    ratios = {
                        f"{name}/{rival}": round(ms[rival] / ms[name], 2)
                        for name in ("gradients", "ours")
                        if name in ms
                    }
                    ratios |= {
                        f"{name}/ours": round(ms["ours"] / ms[name], 2)
                        for name in COMPRESSIONS
                        if name in ms and name != "ours"
                    }
                    times = {f"{name}_ms": round(value, 3) for name, value in ms.items()}
                    yield {**where, kind: subject, **times, **ratios}
        if options.seeds:
            found = accuracies(lab, options.seeds)
            percent = {f"{name}_percent": round(value, 2) for name, value in found.items()}
            yield {"example": "digits", "hosts": HOSTS, "seeds": options.seeds, **percent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="as tc spells them")
    parser.add_argument("--delay", help="of each direction of a link, such as 50us (needs netem)")
    parser.add_argument("--per-host", nargs="+", type=int, default=[1, 2], help="instances")
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="bytes")
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each launcher")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each job")
    parser.add_argument("--seeds", type=int, default=3, help="of the digits example; 0: leave out")
    parser.add_argument("--quick", action="store_true", help="only show that all of it runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=["poprun-py", "torchrun"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, [*options.sizes, *options.models], options.turns)
        return
    if options.quick:
        options.rates, options.per_host, options.sizes = ["10gbit"], [1], [4 << 10, 1 << 20]
        options.rounds, options.turns, options.seeds = 1, 2, 1
    if reason := missing():
        sys.exit(f"no hosts to measure on: {reason}")
    show_rows(rows(options), as_json=options.json)


if __name__ == "__main__":
    main()
