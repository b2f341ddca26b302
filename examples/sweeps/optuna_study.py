"""Search for a good learning rate and width of a network with Optuna.

python examples/sweeps/optuna_study.py --trials 12 --jobs 2
python examples/sweeps/optuna_study.py --trials 4               # goes on with the same study
python examples/sweeps/optuna_study.py --pod lab --num-replicas 8

Every trial is a separate job, which waits for its cores, and with --pod for its IPUs. The job
reports its accuracy after each epoch. If Optuna prunes the trial, the job is stopped. If a trial
fails, its row shows the reason, and the other trials go on. The study is stored in a file.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
import threading
from pathlib import Path

import poprun_py

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import HelpFormat, Parser, positive, rate, writable_file

# This import stands after ``common``, which reports a missing package in one line.
# isort: split
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

_EPOCH = re.compile(r"^epoch (\d+): accuracy ([\d.]+) %$", re.MULTILINE)
# The pause in seconds between two checks of a job's output.
_LOOK = 0.2
_A_DAY = 86_400
_INTERRUPTED = threading.Event()


def train(learning_rate: float, width: int, epochs: int) -> float:
    """Train a perceptron on real digits, and return the accuracy in per cent.

    Every instance of the job runs this function.
    """
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import popdist_py
    from popdist_py import poptorch

    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

        def forward(self, pictures, labels):
            scores = self.layers(pictures)
            return scores, nn.functional.cross_entropy(scores, labels)

    popdist_py.init()
    torch.manual_seed(1)
    pictures, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(labels))
    pictures, labels = pictures[order].float() / 16, labels[order]
    model = Perceptron()
    options = poptorch.DistributedOptions()
    options.randomSeed(1)
    options.showCompilationProgressBar(False)
    data = torch.utils.data.TensorDataset(pictures[:1440], labels[:1440])
    loader = poptorch.DataLoader(options, data, batch_size=8, shuffle=True)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=learning_rate)
    training_model = poptorch.trainingModel(model, options, optimizer)
    accuracy = 0.0
    for epoch in range(1, epochs + 1):
        for some_pictures, some_labels in loader:
            training_model(some_pictures, some_labels)
        with torch.no_grad():
            right = model.layers(pictures[1440:]).argmax(1) == labels[1440:]
        accuracy = 100 * right.float().mean().item()
        print(f"epoch {epoch}: accuracy {accuracy:.2f} %", flush=True)
    return accuracy


def run_trial(trial: optuna.Trial, args: argparse.Namespace) -> float:
    """Run the job of one trial, and return its accuracy in per cent.

    Raises:
        optuna.TrialPruned: Optuna pruned the trial, or Ctrl-C was pressed. The job is stopped.
        Exception: The job failed with this error.
    """
    values = {
        "learning_rate": trial.suggest_float("learning_rate", *args.learning_rates, log=True),
        "width": trial.suggest_int("width", 8, 64, log=True),
        "epochs": args.epochs,
    }
    with poprun_py.start(
        train,
        kwargs=values,
        num_instances=args.num_instances,
        num_replicas=args.num_replicas,
        cores_per_instance=1,
        wait_for_resources=_A_DAY,
        pod=args.pod,
        timeout=args.timeout,
    ) as job:  # which stops the job where an exception ends the block
        told = 0
        while not job.done():
            if _INTERRUPTED.is_set():
                trial.study.stop()
                raise optuna.TrialPruned("interrupted")
            with contextlib.suppress(TimeoutError):
                job.wait(_LOOK)
            for epoch, accuracy in _EPOCH.findall(job.output(instance=0, stream="stdout"))[told:]:
                told += 1
                trial.report(float(accuracy), int(epoch))
                if told < args.epochs and trial.should_prune():
                    raise optuna.TrialPruned(f"after epoch {epoch}")
        return job.result()[0]


def objective(trial: optuna.Trial, args: argparse.Namespace) -> float:
    """Run one trial, and print its result as soon as it has ended."""
    try:
        accuracy = run_trial(trial, args)
    except optuna.TrialPruned as reason:
        tell(trial, "pruned", str(reason))
        raise
    except Exception as error:
        words = str(error).splitlines() or [""]
        tell(trial, "failed", f"{type(error).__name__}: {words[0]}")
        raise
    tell(trial, f"{accuracy:.1f} %")
    return accuracy


def tell(trial: optuna.Trial, outcome: str, reason: str = "") -> None:
    """Print the row of a trial."""
    learning_rate, width = trial.params["learning_rate"], trial.params["width"]
    print(
        f"{trial.number:5} {learning_rate:13.5f} {width:5}  {outcome:8} {reason}".rstrip(),
        flush=True,
    )


def open_study(file: Path, name: str) -> optuna.Study:
    """Open the study with this name in a file, or begin a new study.

    If the file exists but does not contain studies of Optuna, the program ends with an error.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _study_in(file, name)
    except (ValueError, KeyError, TypeError):  # the lines are not a journal
        Parser().error(f"argument --storage: {str(file)!r} is given, it holds no studies of Optuna")


def _study_in(file: Path, name: str) -> optuna.Study:
    return optuna.create_study(
        # The study is stored in Optuna's journal instead of SQLite, because with SQLite two threads
        # may get the same trial.
        storage=JournalStorage(JournalFileBackend(str(file))),
        study_name=name,
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2),
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--trials", type=positive, default=12, help="to add to the study")
    parser.add_argument("--jobs", type=positive, default=2, help="trials at the same time")
    parser.add_argument("--epochs", type=positive, default=6, help="of each trial")
    parser.add_argument("--num-instances", type=positive, default=2, help="of each job")
    parser.add_argument("--num-replicas", type=positive, default=4, help="of each job")
    parser.add_argument(
        "--learning-rates", type=rate, nargs=2, default=(1e-4, 0.3), metavar=("LOW", "HIGH"),
        help="the search is between these",
    )  # fmt: skip
    parser.add_argument("--timeout", type=rate, help="seconds for each job")
    parser.add_argument("--pod", help="the pod whose IPUs the jobs take")
    parser.add_argument("--storage", type=writable_file, default=Path("study.log"), help="a file")
    parser.add_argument("--study", default="digits", help="its name in that file")
    args = parser.parse_args(argv)
    low, high = args.learning_rates
    if low > high:
        parser.error(f"--learning-rates {low:g} {high:g}: the first is to be the lower one")
    if args.num_replicas % args.num_instances:
        parser.error(
            f"--num-replicas {args.num_replicas}: give a multiple of {args.num_instances} instances"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the search, and return 0 if the study has a successful trial."""
    args = parse_arguments(argv)
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # this program prints each trial itself
    study = open_study(args.storage, args.study)
    print(f"{'trial':>5} {'learning rate':>13} {'width':>5}  accuracy", flush=True)
    # Trials run in threads. Ctrl-C interrupts neither these threads nor their jobs, so this flag
    # tells the threads to stop.
    _INTERRUPTED.clear()
    before = signal.signal(signal.SIGINT, lambda *_: _INTERRUPTED.set())
    try:
        study.optimize(
            lambda trial: objective(trial, args),
            n_trials=args.trials,
            n_jobs=args.jobs,
            catch=Exception,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    return 130 if _INTERRUPTED.is_set() else show_best(study)


def show_best(study: optuna.Study) -> int:
    """Print the best trial of the study, and return 0 if any trial was successful."""
    trials = study.get_trials(deepcopy=False)
    ended = [trial for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE]
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in trials)
    failed = sum(trial.state == optuna.trial.TrialState.FAIL for trial in trials)
    print(f"{len(trials)} trials: {len(ended)} ended well, {pruned} pruned, {failed} failed")
    if not ended:
        return 1
    best, value = study.best_params, study.best_value
    print(
        f"best: {value:.1f} % with learning rate {best['learning_rate']:.5f}, width {best['width']}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
