"""How much faster are two instances than one, and why not twice as fast?

python examples/course/speed_up.py
python examples/course/speed_up.py --batch-size 256 --figure speed-up.svg

Both jobs train FashionCNN on the same global batch; each of two instances gets half of the batch.
An instance computes on one core. Jobs of one and of two instances run in turn, and the medians are
compared. More measurements split the loss of two instances into its causes: the optimiser, a half
batch on one core, two independent processes at once, and DistributedDataParallel without and with
its reduction.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import HelpFormat, Parser, figure_file, positive
from common.running import run

LIMIT = 300  # seconds of a job
INSTANCE = Path(__file__).with_name("speed_up_instance.py")


@dataclass(frozen=True)
class Part:
    """One cause of the loss of two instances, and the time that it adds to a step.

    Without loss, a step of two instances would take half as long as a step of one instance.
    """

    name: str
    seconds: float
    how: str


@dataclass(frozen=True)
class Found:
    """The seconds of a step and of the start, for one and two instances, with the causes."""

    one: float
    two: float
    serial_share: float
    start_one: float
    start_two: float
    parts: tuple[Part, ...]

    @property
    def speed_up(self) -> float:
        """The speed-up of the steps, without the start."""
        return self.one / self.two

    @property
    def bound(self) -> float:
        """The greatest speed-up that the serial share allows (Amdahl's law)."""
        return 1 / (self.serial_share + (1 - self.serial_share) / 2)

    def speed_up_of_run(self, steps: int) -> float:
        """Return the speed-up of a whole run of ``steps`` steps."""
        return (self.start_one + steps * self.one) / (self.start_two + steps * self.two)


def job(instances: int, batch_size: int, steps: int) -> dict[str, float]:
    """Run a job and return the seconds that it measured."""
    words = ("--num-instances", str(instances), "--output", "plain", str(INSTANCE))
    sizes = ("--batch-size", str(batch_size), "--steps", str(steps), "--began", str(time.time()))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "poprun_py", *words, *sizes],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"the job of {instances} instance(s) took over {LIMIT} s: give fewer --steps")
    if done.returncode:
        last = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        sys.exit(f"the job of {instances} instance(s) ended with code {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def explained(ones: Sequence[dict[str, float]], twos: Sequence[dict[str, float]]) -> Found:
    """Return the causes of the loss of two instances, from the measurements of the jobs."""

    def median(jobs: Sequence[dict[str, float]], name: str) -> float:
        return statistics.median(job[name] for job in jobs)

    one, two = median(ones, "run"), median(twos, "run")
    alone, at_once = median(ones, "half batch"), median(twos, "half batch")
    without, with_ = median(twos, "without reduction"), median(twos, "with reduction")
    optimiser = median(ones, "optimiser")
    parts = (
        Part("half a step of one", one / 2, "a speed-up of 2"),
        Part("optimiser", optimiser / 2, "it takes as long for half a batch"),
        Part("smaller batch", alone - one / 2 - optimiser / 2, "half a batch alone, the rest"),
        Part("shared memory", at_once - alone, "two half batches at once, without DDP"),
        Part("DDP's wrapper", without - at_once, "the same within DDP's no_sync"),
        Part("reduction", with_ - without, "all-reduce, BatchNorm's buffers, waiting"),
        Part("unexplained", two - with_, "what is left of the run"),
    )
    return Found(one, two, optimiser / one, median(ones, "start"), median(twos, "start"), parts)


def print_table(found: Found, steps: int) -> None:
    """Print the parts, which add up to a step of two instances."""
    print(
        f"one instance {1e3 * found.one:.1f} ms a step, two {1e3 * found.two:.1f} ms: "
        f"speed-up {found.speed_up:.2f}\n"
    )
    print(f"{'a step of two':20} {'ms':>8} {'share':>6}  measured as")
    for part in found.parts:
        share = part.seconds / found.two
        print(f"{part.name:20} {1e3 * part.seconds:8.2f} {share:6.0%}  {part.how}")
    print(f"{'together':20} {1e3 * sum(part.seconds for part in found.parts):8.2f} {1:6.0%}")
    print(
        f"\nserial share {found.serial_share:.1%} (the optimiser): by Amdahl's law two instances "
        f"are at most {found.bound:.2f} times as fast"
    )
    print(
        f"start to first step: {found.start_one:.1f} s with one, {found.start_two:.1f} s with two"
    )
    for count in (steps, 1000, 10_000):
        print(f"  speed-up of a run of {count} steps with its start: "
              f"{found.speed_up_of_run(count):.2f}")  # fmt: skip


def draw(found: Found, path: Path) -> None:
    """Draw a step of one instance, and the parts of a step of two."""
    from common.drawing import COLOURS, GRID, NEUTRAL, mark, new_figure, save

    figure = new_figure(7.5, 2.8)
    axes = figure.add_subplot()
    mark(axes.barh(0, 1e3 * found.one, 0.55, color=NEUTRAL)[0], "one-instance")
    # Measurement noise can make a part negative. Negative parts are drawn left of the axis.
    left, right = 0.0, 0.0
    for part, colour in zip(found.parts, (*COLOURS, GRID), strict=True):
        width = 1e3 * part.seconds
        begin = right if width >= 0 else left
        label = f"{part.name}: {width:.1f} ms"
        bar = axes.barh(1, width, 0.55, left=begin, color=colour, label=label)[0]
        mark(bar, part.name.replace(" ", "-").replace("'", ""))
        left, right = left + min(width, 0), right + max(width, 0)
    axes.set_yticks([0, 1], ["one instance", "two instances"])
    axes.invert_yaxis()
    axes.set_xlabel("ms a step, measured; what is gained stands left of 0")
    axes.set_title(f"Speed-up {found.speed_up:.2f} at the same global batch", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save(figure, path)


def arguments(argv: list[str] | None):
    """Parse the command line."""
    parser = Parser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--batch-size", type=positive, default=128, help="images of the global batch")
    add("--steps", type=positive, default=30, help="of a job, and of each kind of steps in it")
    add("--repetitions", type=positive, default=3, help="jobs of which the median counts")
    add("--quick", action="store_true", help="8 steps, one repetition")
    add("--figure", type=figure_file, help="also draw the parts")
    add("--json", action="store_true", help="print the figures as JSON instead of a table")
    args = parser.parse_args(argv)
    if args.batch_size % 2:
        parser.error(f"--batch-size {args.batch_size}: two instances share it, give an even number")
    parser.say_idle(args, (args.quick, "--quick chooses it", "steps repetitions"))
    if args.quick:
        args.steps, args.repetitions = 8, 1
    if "RANK" in os.environ:
        parser.error("the program starts its instances itself: run it without a launcher")
    return args


def main(argv: list[str] | None = None) -> Found:
    """Benchmark, and print and return the result."""
    from tqdm import tqdm

    args = arguments(argv)
    ones, twos = [], []
    with tqdm(total=2 * args.repetitions, desc="jobs") as bar:
        for _ in range(args.repetitions):
            for instances, jobs in ((1, ones), (2, twos)):
                jobs.append(job(instances, args.batch_size, args.steps))
                bar.update()
    found = explained(ones, twos)
    if args.json:
        values = {**asdict(found), "speed_up": found.speed_up, "steps": args.steps}
        print(json.dumps(values, indent=2))
    else:
        print_table(found, args.steps)
    if args.figure:
        try:
            draw(found, args.figure)
        except OSError as error:
            sys.exit(f"--figure {args.figure}: {error.strerror}; give a place that can be written")
    return found


if __name__ == "__main__":
    run(main)
