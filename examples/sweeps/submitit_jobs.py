"""Train with several learning rates as tasks of a batch system, through submitit.

python examples/sweeps/submitit_jobs.py --learning-rates 0.0005 0.002 0.008
python examples/sweeps/submitit_jobs.py --cluster slurm --partition batch --learning-rates 0.002

Each task launches a job on the host that the batch system chose. With --cluster local, tasks are
processes of this machine, and their jobs wait for each other's cores. This program prints the
results of all tasks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import HelpFormat, Parser, positive, rate, readable_file, writable_folder
from common.running import run

# This import stands after ``common``, which reports a missing package in one line.
# isort: split
import submitit

TRAIN = Path(__file__).resolve().parents[1] / "train.py"


def run_task(
    program: str, learning_rate: float, epochs: int, num_instances: int, num_replicas: int
) -> tuple[float | None, str]:
    """Launch a job on this task's host, and return its test accuracy in per cent or an error.

    submitit sends only this function to the task, so the function contains its own imports.
    """
    import re

    import poprun_py

    words = [program, "--learning-rate", learning_rate, "--epochs", epochs]
    try:
        with poprun_py.start(
            words,
            num_instances=num_instances,
            num_replicas=num_replicas,
            host="localhost",
            wait_for_resources=86_400,
        ) as job:
            job.result()
            said = re.search(r"^test accuracy ([\d.]+) %$", job.output(0), re.MULTILINE)
    except poprun_py.LaunchError as error:
        return None, str(error)
    return (float(said[1]), "") if said else (None, "the program said no test accuracy")


def executor_of(args: argparse.Namespace) -> submitit.Executor:
    """Return the executor that starts tasks as local processes or as jobs of Slurm."""
    executor = submitit.AutoExecutor(folder=args.folder, cluster=args.cluster)
    executor.update_parameters(
        name="learning-rates", timeout_min=args.minutes, cpus_per_task=args.cpus
    )
    if args.cluster == "slurm" and args.partition:
        executor.update_parameters(slurm_partition=args.partition)
    return executor


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--cluster", choices=["local", "slurm"], default="local")
    parser.add_argument("--partition", help="of Slurm")
    parser.add_argument(
        "--learning-rates", type=rate, nargs="+", default=[5e-4, 2e-3, 8e-3], metavar="RATE"
    )
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument("--num-instances", type=positive, default=2, help="of each job")
    parser.add_argument("--num-replicas", type=positive, default=8, help="of each job")
    parser.add_argument("--cpus", type=positive, default=2, help="that a task asks Slurm for")
    parser.add_argument("--minutes", type=positive, default=60, help="that a task may take")
    parser.add_argument(
        "--folder", type=writable_folder, default=Path("tasks"), help="for logs and results"
    )
    parser.add_argument(
        "--program", type=readable_file, default=TRAIN,
        help="takes --learning-rate and --epochs, prints 'test accuracy N %%'",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.cluster == "slurm" and submitit.AutoExecutor.which() != "slurm":
        parser.error(
            "--cluster slurm: this machine does not have srun; use a machine with Slurm, or "
            "--cluster local"
        )
    parser.say_idle(args, (args.cluster == "local", "no --cluster slurm", "partition cpus"))
    return args


def main(argv: list[str] | None = None) -> int:
    """Submit a task for each learning rate, and return 0 if all tasks were successful."""
    args = parse_arguments(argv)
    program = str(args.program.resolve())
    counts = args.num_instances, args.num_replicas
    executor = executor_of(args)
    with executor.batch():  # for Slurm one array
        tasks = [
            executor.submit(run_task, program, one, args.epochs, *counts)
            for one in args.learning_rates
        ]
    print(f"{'learning rate':>13} {'accuracy':>9}", flush=True)
    accuracies = {}
    for one, task in zip(args.learning_rates, tasks, strict=True):
        try:
            accuracy, reason = task.result()
        except Exception as error:  # the batch system ended the task
            accuracy, reason = None, (str(error).splitlines() or [type(error).__name__])[0]
        if accuracy is None:
            print(f"{one:13g} {'-':>9}  {reason}", flush=True)
        else:
            accuracies[one] = accuracy
            print(f"{one:13g} {accuracy:7.1f} %", flush=True)
    if accuracies:
        best = max(accuracies, key=accuracies.__getitem__)
        print(f"best: learning rate {best:g} with {accuracies[best]:.1f} %")
    return 0 if len(accuracies) == len(tasks) else 1


if __name__ == "__main__":
    run(lambda: sys.exit(main()))
