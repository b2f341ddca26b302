"""Try several learning rates: one job of the launcher for each, from Python.

python examples/sweep.py --learning-rates 0.0005 0.002 0.008

As many jobs run side by side as there are CPUs for, each with CPUs of its own. A row of the table
and of the CSV file is written when its job has ended, well or not; what a job printed is in a file
beside the CSV file.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from common.arguments import Parser, positive, rate

import poprun_py

TRAIN = Path(__file__).parent / "train.py"
_ACCURACY = re.compile(rb"^test accuracy ([\d.]+) %$", re.MULTILINE)


@dataclass(frozen=True)
class Trial:
    """How the job with one learning rate ended; ``accuracy`` in per cent if it said one."""

    learning_rate: float
    exit_code: int
    seconds: float
    accuracy: float | None = None
    reason: str = ""

    def row(self) -> str:
        """Return the line of the table."""
        accuracy = "-" if self.accuracy is None else f"{self.accuracy:.1f} %"
        numbers = f"{self.learning_rate:13g} {accuracy:>9} {self.seconds:8.1f} {self.exit_code:9}"
        return f"{numbers}  {self.reason}".rstrip()


def run_trial(
    learning_rate: float, cpus: list[int], args: argparse.Namespace, result: Connection
) -> None:
    """Run one job on these CPUs and send its Trial; the main function of a process of its own."""
    os.sched_setaffinity(0, cpus)  # the launcher places instances on the CPUs that it may use
    log = args.csv.parent / f"learning-rate-{learning_rate:g}.log"
    began = time.monotonic()
    with log.open("w+b") as file:
        code, reason = launch(learning_rate, args, file.fileno())
        file.seek(0)
        said = _ACCURACY.search(file.read())
    accuracy = float(said[1]) if said and code == 0 else None
    with contextlib.suppress(BrokenPipeError):  # the sweep was ended by Ctrl-C
        result.send(Trial(learning_rate, code, time.monotonic() - began, accuracy, reason))


def launch(learning_rate: float, args: argparse.Namespace, output: int) -> tuple[int, str]:
    """Run one job; returns its exit code, and why it is not 0."""
    try:
        config = poprun_py.LaunchConfig(
            num_instances=args.num_instances,
            num_replicas=args.num_replicas,
            timeout=args.timeout,
            output="plain",
            program=(
                args.program, "--learning-rate", f"{learning_rate:g}", "--epochs", f"{args.epochs}"
            ),
        )  # fmt: skip
        result = poprun_py.launch(config, descriptors=(output, output))
    except poprun_py.LaunchError as error:  # an option, the start, or the time limit
        return error.exit_code, str(error)
    if (failure := result.first_failure) is None:
        return result.exit_code, result.reason
    last_words = failure.stderr_tail.strip().splitlines()[-1:] or [result.reason]
    return result.exit_code, f"instance {failure.index}: {last_words[0]}"


def trials(args: argparse.Namespace) -> Iterator[Trial]:
    """Run all jobs and yield each as it ends.

    A process launches one job at a time, so every job has a process of its own.
    """
    cpus = sorted(os.sched_getaffinity(0))
    parts = max(1, min(len(cpus) // args.num_instances, len(args.learning_rates)))
    free = [cpus[len(cpus) * i // parts : len(cpus) * (i + 1) // parts] for i in range(parts)]
    waiting, running = list(args.learning_rates), {}
    processes = multiprocessing.get_context("spawn")
    while waiting or running:
        while waiting and free:
            learning_rate, part = waiting.pop(0), free.pop(0)
            receiver, sender = processes.Pipe(duplex=False)
            process = processes.Process(target=run_trial, args=(learning_rate, part, args, sender))
            process.start()
            sender.close()
            running[receiver] = (process, learning_rate, part)
        for receiver in wait(list(running)):
            process, learning_rate, part = running.pop(receiver)
            free.append(part)
            try:
                yield receiver.recv()
            except EOFError:
                process.join()
                yield Trial(learning_rate, 1, 0.0, None, f"its process ended: {process.exitcode}")
            process.join()


def main(argv: list[str] | None = None) -> int:
    """Run the sweep; returns 0 if every job ended with 0."""
    parser = Parser(
        description=__doc__.splitlines()[0],
        epilog="Example: python examples/sweep.py --learning-rates 0.0005 0.002 0.008",
    )
    parser.add_argument(
        "--learning-rates", type=rate, nargs="+", default=[5e-4, 2e-3, 8e-3], metavar="RATE"
    )
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument("--num-instances", type=positive, default=2, help="of each job")
    parser.add_argument("--num-replicas", type=positive, default=8, help="of each job")
    parser.add_argument("--timeout", type=rate, help="seconds for each job")
    parser.add_argument("--csv", type=Path, default=Path("sweep/trials.csv"))
    parser.add_argument(
        "--program", type=Path, default=TRAIN,
        help="takes --learning-rate and --epochs, prints 'test accuracy N %%'",
    )  # fmt: skip
    args = parser.parse_args(argv)

    args.csv.parent.mkdir(parents=True, exist_ok=True)
    ended: list[Trial] = []
    print(f"{'learning rate':>13} {'accuracy':>9} {'seconds':>8} {'exit code':>9}", flush=True)
    with args.csv.open("w", newline="") as file:
        rows = csv.DictWriter(file, [field.name for field in dataclasses.fields(Trial)])
        rows.writeheader()
        for trial in trials(args):
            ended.append(trial)
            rows.writerow(dataclasses.asdict(trial))
            file.flush()
            print(trial.row(), flush=True)
    if good := [trial for trial in ended if trial.accuracy is not None]:
        best = max(good, key=lambda trial: trial.accuracy)
        print(f"best: learning rate {best.learning_rate:g} with {best.accuracy:.1f} %")
    return 0 if all(trial.exit_code == 0 for trial in ended) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the launchers of the running jobs got it, too, and end them
        sys.exit(130)
