"""Draw the batching of a step's samples, from the schedule of a run or from a run.

python examples/data_loading/figures.py iterations iterations.svg --device-iterations 5
python examples/data_loading/figures.py pipeline pipeline.svg --stages 4 --gradient-accumulation 8
python examples/data_loading/figures.py replicas replicas.svg --replicas 4
python examples/data_loading/figures.py batching batching.svg --batch-size 2 --replicas 2
python examples/data_loading/figures.py throughput throughput.svg

A column is a step of the schedule. In a step, each IPU does one action of any duration. The figure
"throughput" shows measurements of data_loading.py, read from its --json file or made now.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common.arguments import Parser, positive
from data_loading import Sizes
from data_loading import main as measure
from torch import nn

from popdist_py import poptorch
from popdist_py.ipu.schedule import Cell, Schedule, least_accumulation

if TYPE_CHECKING:  # each function that draws imports matplotlib
    from matplotlib.axes import Axes

#: The defaults of each figure that differ from DEFAULTS.
FIGURES: Mapping[str, Mapping[str, int]] = {
    "iterations": {"device_iterations": 5},
    "pipeline": {"stages": 4, "gradient_accumulation": 8},
    "replicas": {"replicas": 4, "device_iterations": 2},
    "batching": {
        "batch_size": 4, "device_iterations": 3, "replicas": 2, "gradient_accumulation": 2,
    },
    "throughput": {},
}  # fmt: skip
DEFAULTS = {"batch_size": 16, "replicas": 1, "gradient_accumulation": 1, "device_iterations": 1}
_LEGEND = {
    "forward": "f: forward",
    "recompute": "recomputation",
    "backward": "b: backward",
    "exchange": "all-reduce",
    "update": "u: weight update",
}
_INCHES = 0.34  # height of a row and width of a column
_NARROW = 0.4  # width of a column with recomputations only


class Recorder(nn.Module):
    """A model that records the samples of every forward, in the order of the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def forward(self, index):
        self.seen.append(index.numpy().tolist())
        return poptorch.identity_loss(self.weight * index, reduction="mean")


@dataclass(frozen=True)
class Share:
    """The samples of one micro-batch, with its replica and iteration. All numbers begin with 0."""

    iteration: int
    accumulation: int
    replica: int
    samples: Sequence[int]


def options_of(sizes: Sizes) -> poptorch.Options:
    """Return options of PopTorch with the given sizes."""
    options = poptorch.Options()
    options.replicationFactor(sizes.replicas)
    options.deviceIterations(sizes.device_iterations)
    options.Training.gradientAccumulation(sizes.gradient_accumulation)
    options.showCompilationProgressBar(False)
    return options


def schedule_of(sizes: Sizes, stages: int) -> Schedule:
    """Return the schedule of a replica's IPUs in a step, with one layer of a model on each IPU."""
    layers = [poptorch.BeginBlock(nn.Linear(4, 4), ipu_id=ipu) for ipu in range(stages)]
    # The loss is the last operation of the last stage.
    model = nn.Sequential(*layers, _Loss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training_model = poptorch.trainingModel(model, options_of(sizes), optimizer)
    return training_model.schedule(torch.zeros(sizes.step, 4))


class _Loss(nn.Module):
    def forward(self, x):
        return poptorch.identity_loss(x, reduction="mean")


def shares_of(sizes: Sizes) -> list[Share]:
    """Run a step whose samples are their own indices, and return its micro-batches."""
    options = options_of(sizes)
    options.Emulator.replicaExecution("loop")  # one replica after the other
    dataset = torch.utils.data.TensorDataset(torch.arange(float(sizes.step)))
    loader = poptorch.DataLoader(options, dataset, batch_size=sizes.micro_batch)
    model = Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training_model = poptorch.trainingModel(model, options, optimizer)
    (indices,) = next(iter(loader))
    training_model.compile(indices)
    model.seen.clear()  # without the forward of the compilation
    training_model(indices)
    places = [
        (iteration, accumulation, replica)
        for iteration in range(sizes.device_iterations)
        for accumulation in range(sizes.gradient_accumulation)
        for replica in range(sizes.replicas)
    ]
    return [
        Share(*place, tuple(map(int, seen))) for place, seen in zip(places, model.seen, strict=True)
    ]


def columns(schedule: Schedule) -> list[float]:
    """Return the left edges of all columns, and the right edge of the last column."""
    edges = [0.0]
    for cells in zip(*schedule.rows, strict=True):
        done = {cell.action for cell in cells} - {"idle"}
        edges.append(edges[-1] + (_NARROW if done == {"recompute"} else 1))
    return edges


def draw_step(path: Path, sizes: Sizes, stages: int) -> None:
    """Draw a step with the host's queue, the IPUs of every replica, and the iterations."""
    from common.drawing import new_figure, save

    schedule = schedule_of(sizes, stages)
    edges, rows = columns(schedule), stages * sizes.replicas
    figure = new_figure(max(8.0, _INCHES * edges[-1] + 1.5), _INCHES * (rows + 3) + 1)
    axes = figure.add_subplot()
    axes.set(xlim=(-0.1, edges[-1] + 0.1), ylim=(rows + 1.6, -1.5), xticks=[])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    names = [
        (f"replica {replica}, " if sizes.replicas > 1 else "") + f"IPU {replica * stages + stage}"
        for replica in range(sizes.replicas)
        for stage in range(stages)
    ]
    axes.set_yticks([-0.5, *(row + 0.5 for row in range(rows))], ["queue of the host", *names])
    for row in range(rows):
        for cell in schedule.rows[row % stages]:
            _draw_cell(axes, cell, edges, row, rows)
    _draw_host(axes, schedule, edges, sizes)
    _draw_iterations(axes, schedule, edges, rows)
    _draw_legend(axes, schedule)
    figure.suptitle(f"One step: {_product(sizes)}", x=0.01, ha="left", fontsize=10)
    save(figure, path)


def _product(sizes: Sizes) -> str:
    return (
        f"{sizes.micro_batch} (micro-batch) x {sizes.replicas} (replicas) x "
        f"{sizes.gradient_accumulation} (accumulation) x {sizes.device_iterations} (device "
        f"iterations) = {sizes.step} samples"
    )


def _draw_cell(axes: Axes, cell: Cell, edges: Sequence[float], row: int, rows: int) -> None:
    """Draw the action of one IPU in a step. An all-reduce of all IPUs is drawn once."""
    begin, end = edges[cell.step - 1], edges[cell.step]
    is_shared = cell.action == "exchange"
    if cell.action == "idle" or (is_shared and row):
        return
    height = rows if is_shared else 1
    number = cell.step if cell.micro_batch is None else cell.micro_batch
    name = f"{cell.action}-{number}" if is_shared else f"ipu{row}-{cell.action}-{number}"
    label = "all-reduce" if is_shared else cell.action[0]
    if cell.action == "recompute":
        label = ""
    elif cell.micro_batch is not None:
        label += str(cell.micro_batch)
    _box(axes, (begin, row), (end - begin, height), _colour(cell.action), name, label)


def _box(
    axes: Axes, corner: tuple[float, float], size: tuple[float, float], colour: str, name: str,
    label: str,
) -> None:  # fmt: skip
    from common.drawing import mark
    from matplotlib.patches import Rectangle

    (x, y), (width, height) = corner, size
    gap = 0.04
    box = Rectangle((x + gap, y + gap), width - 2 * gap, height - 2 * gap, color=colour, lw=0)
    mark(axes.add_patch(box), name)
    is_upright = height > 1
    if label and not (is_upright and height < 3):
        axes.text(
            x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=8,
            color="white", rotation=90 if is_upright else 0,
        )  # fmt: skip


def _colour(action: str) -> str:
    from common.drawing import COLOURS, NEUTRAL

    actions = ("forward", "backward", "update", "exchange")
    return COLOURS[actions.index(action)] if action in actions else NEUTRAL


def _draw_host(axes: Axes, schedule: Schedule, edges: Sequence[float], sizes: Sizes) -> None:
    """Draw the queue of micro-batches, each of them above its first forward."""
    from common.drawing import NEUTRAL

    forwards = [cell for cell in schedule.rows[0] if cell.action == "forward"]
    for cell in forwards:
        begin, end = edges[cell.step - 1], edges[cell.step]
        label = str(cell.micro_batch) if sizes.replicas == 1 else f"{sizes.replicas}x"
        _box(axes, (begin, -1), (end - begin, 0.8), NEUTRAL, f"queue-{cell.micro_batch}", label)
        axes.annotate(
            "", ((begin + end) / 2, 0.1), ((begin + end) / 2, -0.25),
            arrowprops={"arrowstyle": "->", "color": NEUTRAL},
        )  # fmt: skip


def _draw_iterations(axes: Axes, schedule: Schedule, edges: Sequence[float], rows: int) -> None:
    """Draw a line below each device iteration, which ends with a weight update."""
    from common.drawing import NEUTRAL, mark

    updates = [cell.step for cell in schedule.rows[0] if cell.action == "update"]
    begins = [0, *updates]
    for number, end in enumerate(updates, start=1):
        left, right = edges[begins[number - 1]] + 0.1, edges[end] - 0.1
        (line,) = axes.plot([left, right], [rows + 0.3] * 2, color=NEUTRAL, lw=1.5)
        mark(line, f"iteration-{number}")
        text = f"iteration {number}" if right - left < 6 else f"device iteration {number}"
        axes.text((left + right) / 2, rows + 0.5, text, ha="center", va="top", fontsize=8)


def _draw_legend(axes: Axes, schedule: Schedule) -> None:
    from matplotlib.patches import Patch

    found = {cell.action for row in schedule.rows for cell in row}
    axes.legend(
        handles=[Patch(color=_colour(x), label=_LEGEND[x]) for x in _LEGEND if x in found],
        loc="upper left", bbox_to_anchor=(0, 0.02), ncols=len(found), frameon=False, fontsize=8,
    )  # fmt: skip


def draw_batching(path: Path, sizes: Sizes) -> None:
    """Draw the samples that each replica gets in a step, in the order of time."""
    from common.drawing import COLOURS, new_figure, save

    width, per_update = 4.0, sizes.gradient_accumulation
    num_columns = sizes.device_iterations * per_update
    figure = new_figure(
        max(8.0, _INCHES * width * num_columns + 1.5), _INCHES * sizes.replicas * 1.2 + 1.4
    )
    axes = figure.add_subplot()
    axes.set(xlim=(-0.1, width * num_columns + 0.1), ylim=(sizes.replicas + 1.2, -0.8), xticks=[])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_yticks(
        [row + 0.5 for row in range(sizes.replicas)],
        [f"replica {row}" for row in range(sizes.replicas)],
    )
    for share in shares_of(sizes):
        column = share.iteration * per_update + share.accumulation
        name = f"replica{share.replica}-iteration{share.iteration}-micro{share.accumulation}"
        colour = COLOURS[share.replica % len(COLOURS)]
        corner = (width * column, share.replica)
        _box(axes, corner, (width, 1), colour, name, _spelled(share.samples))
        if share.replica == 0:
            axes.text(
                width * (column + 0.5), -0.1, f"accumulation {share.accumulation + 1}",
                ha="center", va="bottom", fontsize=8,
            )  # fmt: skip
    for iteration in range(sizes.device_iterations):
        middle = width * per_update * (iteration + 0.5)
        text = f"device iteration {iteration + 1}:\nglobal batch of {sizes.global_batch}, update"
        axes.text(middle, sizes.replicas + 0.1, text, ha="center", va="top", fontsize=8)
        axes.axvline(width * per_update * (iteration + 1), color="black", lw=1.5)
    figure.suptitle(f"One step: {_product(sizes)}", x=0.01, ha="left", fontsize=10)
    save(figure, path)


def _spelled(samples: Sequence[int]) -> str:
    """Return the numbers as text, or "FIRST to LAST" for consecutive numbers."""
    first, last = samples[0], samples[-1]
    if len(samples) > 2 and list(samples) == list(range(first, last + 1)):
        return f"{first} to {last}"
    return ", ".join(map(str, samples))


def draw_throughput(path: Path, measured: Mapping) -> None:
    """Draw the measurements of data_loading.py as bars."""
    from common.drawing import COLOURS, mark, new_figure, save

    found = measured["measurements"]
    values = [one["items_per_second"] for one in found]
    figure = new_figure(7, 0.45 * len(found) + 1.2)
    axes = figure.add_subplot()
    bars = axes.barh([one["what"] for one in found], values, color=COLOURS, height=0.6)
    for bar, one in zip(bars, found, strict=True):
        mark(bar, "bar-" + one["what"].replace(" ", "-"))
    axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    is_wide = max(values) > 50 * min(values)
    if is_wide:  # the smallest bar would be invisible
        axes.set_xscale("log")
    axes.set_xlabel("items/s, measured" + (" (logarithmic)" if is_wide else ""))
    figure.suptitle(measured["verdict"].partition(";")[0], x=0.01, ha="left", fontsize=10)
    save(figure, path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments. Each figure has its own defaults."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("figure", choices=FIGURES, help="what is drawn")
    add("file", type=Path, help="where: .svg, .png or .pdf")
    add("--batch-size", type=positive, help="the micro-batch")
    add("--replicas", type=positive, help="copies of the model")
    add("--gradient-accumulation", type=positive, help="micro-batches of an update on a replica")
    add("--device-iterations", type=positive, help="updates of a step")
    add("--stages", type=int, choices=[1, 2, 4, 8], help="of a pipeline, an IPU for each")
    add("--from", dest="measured", type=Path, metavar="FILE", help="--json of data_loading.py")
    args = parser.parse_args(argv)
    parser.set_defaults(**{"stages": 1, **DEFAULTS, **FIGURES[args.figure]})
    args = parser.parse_args(argv)
    least = least_accumulation(args.stages, is_training=True)
    if args.gradient_accumulation < least:
        parser.error(
            f"--gradient-accumulation {args.gradient_accumulation} is given, a pipeline of "
            f"{args.stages} stages needs {least} or more"
        )
    if args.file.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"{args.file} is given, the name of a .svg, .png or .pdf file is accepted")
    sizes = "batch_size replicas gradient_accumulation device_iterations"
    is_of_time, why = args.figure == "throughput", f"the figure {args.figure} has none"
    parser.say_idle(
        args,
        (is_of_time, why, sizes),
        (is_of_time or args.figure == "batching", why, "stages"),
        (not is_of_time, f"the figure {args.figure} shows nothing measured", "measured"),
    )
    if args.measured:
        args.measured = _read(args.measured, parser)
    return args


def _read(path: Path, parser: Parser) -> Mapping:
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
        _ = [one["items_per_second"] for one in measured["measurements"]], measured["verdict"]
    except (OSError, ValueError, KeyError, TypeError):
        parser.error(f"--from {path} is given, a file that data_loading.py --json wrote is needed")
    return measured


def draw(args: argparse.Namespace, sizes: Sizes) -> None:
    """Draw the figure that the arguments select."""
    if args.figure == "throughput":
        draw_throughput(args.file, args.measured or asdict(measure([])))
    elif args.figure == "batching":
        draw_batching(args.file, sizes)
    else:
        draw_step(args.file, sizes, args.stages)


def main(argv: list[str] | None = None) -> Path:
    """Draw one figure, and return the path of its file."""
    args = parse(argv)
    sizes = Sizes(
        args.batch_size, args.replicas, args.gradient_accumulation, args.device_iterations
    )
    try:
        draw(args, sizes)
    except OSError as error:
        print(f"figures.py: error: {args.file} is given, {error.strerror}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.figure} is in {args.file}")
    return args.file


if __name__ == "__main__":
    main()
