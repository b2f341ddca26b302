"""Compare the steps of the IPU hands-on session: the gain of each step here and in the session.

python compare.py
python compare.py --only accumulation --only async --steps 5
python compare.py --steps 0 --figure ladder.svg

Each step is a run of main.py with the session's options. The table has three kinds of figures:

- measured: images per second of a smaller run on this host (--model, --side, --batch-size,
  --steps). A step that does not fit on the IPUs runs at its full size, since it only fails.
- modelled: cycles, bytes from the host, memory and busy share of the IPUs, from the model of the
  device. The size is the session's: ResNet-101, images of 64 by 64, micro-batches of 64.
- the session's: figures of runs on hardware from its slides.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

import popdist_py

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from common import running  # noqa: E402
from common.arguments import (  # noqa: E402
    HelpFormat,
    Parser,
    figure_file,
    from_zero,
    positive,
)
from networks import NETWORKS, too_few_values  # noqa: E402
from rungs import RUNGS, Rung  # noqa: E402

KIB, MIB = 2**10, 2**20
# Prefixes of the variables that make a program an instance of a job.
_OF_A_JOB = ("POPDIST_", "POPRUN_", "OMPI_", "PMIX_", "PRTE_", "PMI_")


@dataclass(frozen=True)
class Modelled:
    """The modelled figures of one call at the session's size. Tuples have one value per IPU.

    Attributes:
        cycles: The cycles of the call.
        images: The images of the call.
        seconds: The seconds of the call on the device, without the host.
        received: The MiB that each IPU gets from the host.
        sent: The KiB that each IPU sends to the host.
        memory: The share of its memory that the fullest tile needs.
        busy: The share of the call during which the IPU computes.
        verdict: Whether the fullest tile has enough memory: "fits", "close" or "does not fit".
    """

    cycles: int
    images: int
    seconds: float
    received: tuple[float, ...]
    sent: tuple[float, ...]
    memory: tuple[float, ...]
    busy: tuple[float, ...]
    verdict: str

    @property
    def fits(self) -> bool:
        """Whether main.py accepts the run. A run that is close to the limit only gets a warning."""
        return self.verdict != "does not fit"


@dataclass(frozen=True)
class Measured:
    """The images per second of a run of main.py, or the reason of its failure."""

    rate: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """A step of the session with all its figures."""

    rung: Rung
    modelled: Modelled
    measured: Measured

    def flat(self) -> dict[str, object]:
        """Return the line of the CSV file."""
        rung, model = self.rung, self.modelled
        return {
            "step": rung.name,
            "options": rung.flags,
            "measured images/s": self.measured.rate,
            "session's images/s": rung.rate,
            "modelled cycles": model.cycles,
            "session's cycles": rung.cycles,
            "modelled MiB to IPU 0": model.received[0],
            "session's MiB to IPU 0": rung.received,
            **{f"modelled KiB from IPU {ipu}": size for ipu, size in enumerate(model.sent)},
            **{f"session's KiB from IPU {ipu}": (rung.sent or (None, None))[ipu] for ipu in (0, 1)},
            **{f"modelled memory of IPU {ipu}": share for ipu, share in enumerate(model.memory)},
            "session's run fitted": rung.fits,
            **{f"modelled busy share of IPU {ipu}": share for ipu, share in enumerate(model.busy)},
            "reason": self.measured.reason,
        }


def modelled(rung: Rung) -> Modelled:
    """Return the modelled figures of a step, without training and without memory for weights."""
    import main as program
    import torch

    from popdist_py import poptorch

    args = program.parse_arguments(rung.flags.split())
    dtype = torch.float16 if args.precision.startswith("16.") else torch.float32
    samples = args.batch_size * args.gradient_accumulation * args.device_iterations
    # Tensors of the device "meta" have a shape, but no data.
    with torch.device("meta"):
        model = program.build_model(args)
        images = torch.empty(samples, 3, 64, 64, dtype=torch.uint8 if args.eight_bit_io else dtype)
        labels = torch.empty(samples, dtype=torch.int64)
    optimizer = program.build_optimizer(model, args.precision)
    training = poptorch.trainingModel(model, program.training_options(args), optimizer)
    execution = training.executionReport(images, labels)
    memory = training.memoryReport(images, labels)
    return Modelled(
        execution.report.total,
        execution.report.samples,
        execution.report.seconds,
        tuple(ipu.received / MIB for ipu in execution.ipus),
        tuple(ipu.sent / KIB for ipu in execution.ipus),
        tuple(ipu.fullest_tile / memory.tile_bytes for ipu in memory.ipus),
        execution.report.busy,
        memory.verdict,
    )


def measured(rung: Rung, fits: bool, args: argparse.Namespace) -> Measured:
    """Run main.py --repeats times, and return the median over all calls but each first call.

    The first call compiles.
    """
    rates: list[float] = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory(prefix="hands-on-") as folder:
            times = Path(folder, "times.json")
            code, said = _run(_command(rung, fits, times, args))
            if code != 0:
                return Measured(reason=_reason(code, said))
            found = json.loads(times.read_text())
        rates += [found["samples"] / seconds for seconds in found["seconds"][0][1:]]
    return Measured(statistics.median(rates))


def _command(rung: Rung, fits: bool, times: Path, args: argparse.Namespace) -> list[str]:
    words = [*rung.flags.split(), "--epochs", "1", "--data-dir", str(args.data_dir)]
    if fits:
        words[words.index("--batch-size") + 1] = str(args.batch_size)
        words += ["--model", args.model, "--side", str(args.side), "--steps", str(args.steps + 1)]
    else:
        words += ["--steps", "1"]
    return [sys.executable, str(HERE / "main.py"), *words, "--times", str(times)]


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Run a command, and return its exit code and its stderr. It ends with this program.

    The command has its own process group. It therefore gets Ctrl-C once, from this program, and not
    a second time from the terminal.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_JOB)}
    environ.setdefault("OMP_NUM_THREADS", "1")  # threads wait for one another on a busy host
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    try:
        _, said = process.communicate()
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        raise
    return process.returncode, said


def _reason(code: int, said: str) -> str:
    """Return the reason of a failure: the line about memory if there is one, else the last line."""
    lines = said.splitlines() or [f"exit code {code}"]
    return next((line for line in lines if line.startswith("Out of memory")), lines[-1])


def table(rows: Sequence[Row]):
    """Return the table to print, with the kind of figure below each heading."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE, pad_edge=False, header_style="bold")
    for heading in ("step\n", *(f"{name}\n{sort}" for name, sort in _COLUMNS)):
        made.add_column(heading, justify="left" if heading == "step\n" else "right", no_wrap=True)
    for row in rows:
        rung, model = row.rung, row.modelled
        made.add_row(
            rung.title,
            _number(row.measured.rate, ",.0f"), _number(rung.rate, ",.0f"),
            _number(model.cycles / 1e6, ",.1f"),
            _number(rung.cycles and rung.cycles / 1e6, ",.1f"),
            _number(model.received[0], "g"), _number(rung.received, "g"),
            " ".join(f"{share:.0%}" for share in model.memory),
            "fits" if rung.fits else "too large",
            " ".join(f"{share:.0%}" for share in model.busy),
        )  # fmt: skip
    return made


_COLUMNS = (
    ("images/s", "measured"), ("images/s", "session"),
    ("Mcycles", "modelled"), ("Mcycles", "session"),
    ("MiB to IPU 0", "modelled"), ("MiB to IPU 0", "session"),
    ("memory", "modelled"), ("memory", "session"), ("busy", "modelled"),
)  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def report(rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Print the table, and explain its figures."""
    from rich.console import Console

    # A narrower terminal wraps lines; rich would cut numbers.
    console = Console(highlight=False, width=132)
    console.print(table(rows))
    if args.steps:
        print(
            f"measured: {args.model}, {args.side} x {args.side}, micro-batches of "
            f"{args.batch_size}, {args.repeats} x {args.steps} calls, one thread, on this host"
        )
    print("modelled: one call at the session's size, both IPUs of memory and busy share")
    print("session: as its slides show it; images/s from its progress bars, second epoch on")
    for row in rows:
        if row.measured.reason:
            print(f"{row.rung.title}: {row.measured.reason}")


def write(rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Write the files that are asked for."""
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0].flat()))
            writer.writeheader()
            writer.writerows(row.flat() for row in rows)
    if args.json:
        names = ("model", "side", "batch_size", "steps", "repeats")
        cut = {name: getattr(args, name) for name in names}
        document = {"measured with": cut, "rows": [_nested(row) for row in rows]}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if args.figure:
        from ladder_figure import draw

        draw(rows, args.figure)


def _nested(row: Row) -> dict[str, object]:
    session = {name: value for name, value in asdict(row.rung).items() if name != "call_seconds"}
    session["images_per_second"] = row.rung.rate
    measured = {"images_per_second": row.measured.rate, "reason": row.measured.reason}
    return {"session": session, "measured": measured, "modelled": asdict(row.modelled)}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = Parser(description=__doc__, formatter_class=HelpFormat)
    names = [rung.name for rung in RUNGS]
    parser.add_argument("--only", choices=names, action="append", help="this step, and no other")
    parser.add_argument(
        "--steps", type=from_zero, default=2, help="calls that are measured; 0 trains nothing"
    )
    parser.add_argument("--repeats", type=positive, default=1, help="runs of each step")
    parser.add_argument(
        "--model", choices=list(NETWORKS), default="resnet18", help="network that is trained"
    )
    parser.add_argument("--side", type=positive, default=16, help="height and width of images")
    parser.add_argument("--batch-size", type=positive, default=8, help="of a micro-batch")
    parser.add_argument(
        "--data-dir", type=Path, default=HERE.parent / "datasets", help="as main.py's"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument(
        "--figure", type=figure_file, metavar="FILE", help="draw them: .svg, .png, .pdf"
    )
    args = parser.parse_args(argv)
    if why := too_few_values(args.batch_size, args.side):
        parser.error(why)
    for name in ("csv", "json", "figure"):
        path = getattr(args, name)
        if path and not path.parent.is_dir():
            parser.error(f"argument --{name}: {path.parent} is not a folder")
    trained = "repeats model side batch_size data_dir"
    parser.say_idle(args, (args.steps == 0, "--steps 0 trains nothing", trained))
    return args


def main(argv: list[str] | None = None) -> list[Row]:
    """Compare, and return the rows."""
    args = parse_arguments(argv)
    if popdist_py.getInstanceIndex() != 0:
        return []  # the first instance says why
    if popdist_py.getNumInstances() > 1:
        sys.exit("compare.py starts its runs itself: start it once, with python, not poprun-py")
    rows = compare(args)
    report(rows, args)
    write(rows, args)
    return rows


def compare(args: argparse.Namespace) -> list[Row]:
    """Return the rows of the steps that are asked for, behind a progress bar."""
    rows = []
    with tqdm([rung for rung in RUNGS if rung.name in (args.only or rung.name)]) as bar:
        for rung in bar:
            bar.set_description(rung.title)
            model = modelled(rung)
            run = measured(rung, model.fits, args) if args.steps else Measured()
            rows.append(Row(rung, model, run))
    return rows


def _leave(number: int, _: object) -> NoReturn:
    """End as a signal asks, but the run of main.py first."""
    sys.exit(128 + number)


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _leave)
    running.run(main)
