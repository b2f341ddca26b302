"""Try several learning rates from Python, with one job of the launcher for each.

python examples/sweep.py --learning-rates 0.0005 0.002 0.008

The jobs run side by side while there are free cores, and each job has its own cores. The program
writes the row of a job to the table and to the CSV file when the job has ended or failed. A file
beside the CSV file has the output of the job.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import dataclasses
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from common.arguments import Parser, positive, rate, readable_file, writable_file

import poprun_py

TRAIN = Path(__file__).parent / "train.py"
_ACCURACY = re.compile(r"^test accuracy ([\d.]+) %$", re.MULTILINE)
_A_DAY = 86_400


@dataclass(frozen=True)
class Trial:
    """The result of the job with one learning rate, and its accuracy in per cent, if known."""

    learning_rate: float
    exit_code: int
    seconds: float
    accuracy: float | None = None
    reason: str = ""

    def row(self) -> str:
        """Return the line of the table for this trial."""
        accuracy = "-" if self.accuracy is None else f"{self.accuracy:.1f} %"
        numbers = f"{self.learning_rate:13g} {accuracy:>9} {self.seconds:8.1f} {self.exit_code:9}"
        return f"{numbers}  {self.reason}".rstrip()


async def run_trial(learning_rate: float, args: argparse.Namespace) -> Trial:
    """Run one job to its end, and store its output. A failed job also returns a Trial."""
    log = args.csv.parent / f"learning-rate-{learning_rate:g}.log"
    words = [args.program, "--learning-rate", learning_rate, "--epochs", args.epochs]
    try:
        job = poprun_py.start(
            words,
            num_instances=args.num_instances,
            num_replicas=args.num_replicas,
            cores_per_instance=1 if len(os.sched_getaffinity(0)) >= args.num_instances else None,
            wait_for_resources=_A_DAY,
            timeout=args.timeout,
        )
    except poprun_py.LaunchError as error:  # an option
        return Trial(learning_rate, error.exit_code, 0.0, None, str(error))
    async with job:
        try:
            await job
            code, reason = 0, ""
        except poprun_py.LaunchError as error:  # a failed start or job, or the time limit
            code, reason = error.exit_code, why(error)
        finally:
            log.write_text(job.output())
        said = _ACCURACY.search(job.output(instance=0)) if code == 0 else None
        accuracy = float(said[1]) if said else None
        return Trial(learning_rate, code, job.status().seconds, accuracy, reason)


def why(error: poprun_py.LaunchError) -> str:
    """Return the reason for a failure, which is the last line of the instance that failed first."""
    result = getattr(error, "result", None)
    if result is None or result.first_failure is None or error.exit_code == 124:
        return str(error)
    failure = result.first_failure
    last_words = failure.stderr_tail.strip().splitlines()[-1:] or [result.reason]
    return f"instance {failure.index}: {last_words[0]}"


async def trials(args: argparse.Namespace) -> AsyncIterator[Trial]:
    """Run all jobs, and yield the result of each job when it ends.

    If the sweep ends early, the running jobs are stopped.
    """
    places = asyncio.Semaphore(max(1, len(os.sched_getaffinity(0)) // args.num_instances))

    async def in_turn(learning_rate: float) -> Trial:
        async with places:
            return await run_trial(learning_rate, args)

    tasks = [asyncio.create_task(in_turn(learning_rate)) for learning_rate in args.learning_rates]
    for ended in asyncio.as_completed(tasks):
        yield await ended


async def sweep(args: argparse.Namespace) -> list[Trial]:
    """Run all jobs, and write the row of each job when it has ended."""
    ended: list[Trial] = []
    print(f"{'learning rate':>13} {'accuracy':>9} {'seconds':>8} {'exit code':>9}", flush=True)
    with args.csv.open("w", newline="") as file:
        rows = csv.DictWriter(file, [field.name for field in dataclasses.fields(Trial)])
        rows.writeheader()
        async for trial in trials(args):
            ended.append(trial)
            rows.writerow(dataclasses.asdict(trial))
            file.flush()
            print(trial.row(), flush=True)
    return ended


def main(argv: list[str] | None = None) -> int:
    """Run the sweep, and return 0 if every job ended with 0."""
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
    parser.add_argument("--csv", type=writable_file, default=Path("sweep/trials.csv"))
    parser.add_argument(
        "--program", type=readable_file, default=TRAIN,
        help="takes --learning-rate and --epochs, prints 'test accuracy N %%'",
    )  # fmt: skip
    args = parser.parse_args(argv)

    args.csv.parent.mkdir(parents=True, exist_ok=True)
    ended = asyncio.run(sweep(args))
    if good := [trial for trial in ended if trial.accuracy is not None]:
        best = max(good, key=lambda trial: trial.accuracy)
        print(f"best: learning rate {best.learning_rate:g} with {best.accuracy:.1f} %")
    return 0 if all(trial.exit_code == 0 for trial in ended) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the running jobs have been stopped
        sys.exit(130)
