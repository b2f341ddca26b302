"""What each cause of a slow job costs, and what its remedy gives back.

The same small training (slow_job.py, two instances) runs as it is, slowed in each way, and with the
remedy, in turns. A row has the medians of the microseconds of a sample, and their ratios to those
of the training as it is. The row of the slow link needs root: its hosts are those of tests/lab,
with a link of 100 Mbit/s. A wrong NUMA node is not measured here, because this needs a machine with
several nodes.

Usage: python benchmarks/slow_jobs.py [--json] [--turns 2] [--steps 60] [--only loader cores]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from show_rows import show_rows

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "benchmarks" / "slow_job.py"
# The causes that one host can show.
CAUSES = ("loader", "uneven", "own-code", "cores", "batches", "saving", "compile")
_RATE = "100mbit"
# What a variant of the training is called in the rows.
_AS_IS, _SLOW, _MENDED = "as it is", "slow", "mended"


def main() -> None:
    """Measure, and show the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", nargs="+", choices=[*CAUSES, "link"], default=[*CAUSES, "link"])
    arguments = parser.parse_args()
    show_rows(
        measured_rows(arguments.only, arguments.turns, arguments.steps), as_json=arguments.json
    )


def measured_rows(causes: list[str], turns: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each cause."""
    for cause in causes:
        times: defaultdict[str, list[float]] = defaultdict(list)
        measured = (
            _link_times(turns, steps // 3) if cause == "link" else _times(cause, turns, steps)
        )
        for variant, microseconds in measured:
            times[variant].append(microseconds)
        if times:
            medians = {name: statistics.median(values) for name, values in times.items()}
            yield {
                "cause": cause,
                **{name: round(value) for name, value in medians.items()},
                "slow ratio": round(medians[_SLOW] / medians[_AS_IS], 2),
                "mended ratio": round(medians[_MENDED] / medians[_AS_IS], 2),
            }


def _times(cause: str, turns: int, steps: int) -> Iterator[tuple[str, float]]:
    """Yield the variants of a training on this host with the microseconds of a sample."""
    for _ in range(turns):
        for variant in (_AS_IS, _SLOW, _MENDED):
            is_taken = (cause, variant) == ("cores", _SLOW)
            with taken_cpu() if is_taken else contextlib.nullcontext():
                yield variant, _train(["-n", "2"], cause, steps, variant)


def last_cpu() -> int:
    """Return the CPU that the cause "cores" is about."""
    return max(os.sched_getaffinity(0))


@contextlib.contextmanager
def taken_cpu() -> Iterator[None]:
    """Keep the last CPU busy with two processes of other sessions."""
    code = f"import os\nos.sched_setaffinity(0, [{last_cpu()}])\nwhile True: pass"
    busy = [
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(2)
    ]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def words_of_program(cause: str, steps: int, variant: str = _SLOW) -> list[str]:
    """Return the program of a variant of the training with its arguments."""
    words = [str(PROGRAM), "none" if variant == _AS_IS else cause, "--steps", str(steps)]
    words += ["--mended"] if variant == _MENDED else []
    return words + (["--cpu", str(last_cpu())] if cause == "cores" else [])


def _run_here(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "poprun_py", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def _train(
    options: list[str],
    cause: str,
    steps: int,
    variant: str = _SLOW,
    run: Callable[[list[str]], subprocess.CompletedProcess[str]] = _run_here,
) -> float:
    """Run the training, and return the microseconds of a sample, which instance 0 prints."""
    shown = ["--output", "plain", "--only-output-from-instance", "0"]
    done = run([*options, *shown, *words_of_program(cause, steps, variant)])
    if done.returncode:
        raise SystemExit(f"{cause}, {variant}: {done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def _link_times(turns: int, steps: int) -> Iterator[tuple[str, float]]:
    """Yield the variants of a training over two hosts with their times; none without a lab."""
    sys.path.insert(0, str(ROOT / "tests"))
    from lab.lab import Lab, missing

    if reason := missing():
        print(f"link: no lab of hosts: {reason}", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder, "hosts"), 2) as lab:
        options = ["--host", lab.names(), "-n", "2"]

        def run(words: list[str]) -> subprocess.CompletedProcess[str]:
            return lab[0].poprun(*words, timeout=300)

        for _ in range(turns):
            for variant, rate in ((_AS_IS, "10gbit"), (_SLOW, _RATE), (_MENDED, _RATE)):
                for host in lab.hosts:
                    host.shape(rate)
                yield variant, _train(options, "link", steps, variant, run)


if __name__ == "__main__":
    main()
