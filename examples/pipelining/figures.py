"""Pictures of pipelining: the action of each IPU in each step, and the cost of an update.

python examples/pipelining/figures.py ramp-up
python examples/pipelining/figures.py strategies --ipus 2 --micro-batches 5 --output two.svg
python examples/pipelining/figures.py --compare pipeline_profile sharding_profile --output both.svg

ramp-up      the steps until all IPUs of a pipeline work
strategies   pipelined beside sharded execution
progression  the path of the first micro-batch, with green forwards and red backwards
offload      memory and time with the optimiser's state on the chip and off the chip

All figures come from the model of the device, so they are the same each time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.schedule import Cell, Schedule, schedule
from popdist_py.ipu.settings import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import Parser, positive
from common.drawing import COLOURS, mark, new_figure, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from profile_folder import Profile, ipus_at_work, read_profile, until_update

LETTERS = {"forward": "F", "recompute": "R", "backward": "B", "update": "U"}
FILLS = {
    "forward": "#9ec9f5",
    "recompute": "#fde68a",
    "backward": "#f7bd92",
    "update": "#c9b8f2",
    "idle": "#f1f5f9",
}
GREEN, RED, PALE = "#5fbf77", "#e0605e", "#e8ecf2"
KINDS = ("pipelined", "sharded")


def one_update(ipus: int, micro_batches: int, kind: str = "pipelined") -> Schedule:
    """Return the steps of an update of a pipeline with one stage on each IPU.

    As in the tutorial's pictures, activations are not recomputed. A step is a forward or a
    backward.
    """
    stages = tuple(range(ipus))
    settings = Settings(
        accumulation=micro_batches,
        strategy="grouped" if kind == "pipelined" else "sharded",
        recompute="none",
    )
    return until_update(schedule(Placement(stages, stages), settings))


def fill_by_action(cell: Cell) -> str:
    """Return the colour of the cell's action."""
    return FILLS[cell.action]


def fill_first(cell: Cell) -> str:
    """Return green or red for a pass of the first micro-batch, and a pale colour otherwise."""
    if cell.micro_batch == 1 and cell.action in ("forward", "backward"):
        return GREEN if cell.action == "forward" else RED
    return FILLS["idle"] if cell.action == "idle" else PALE


def draw_schedule(
    axes: Axes,
    drawn: Schedule,
    name: str,
    *,
    fill: Callable[[Cell], str] = fill_by_action,
    steps: int | None = None,
) -> None:
    """Draw a row for each IPU and a box for each step, with the micro-batch's number.

    The axis has ``steps`` steps, so that two schedules can have the same scale.
    """
    steps = steps or len(drawn.cycles)
    size = 8 if steps < 50 else 6 if steps < 70 else 0  # small boxes have a colour only
    for ipu, row in enumerate(drawn.rows):
        for cell in row:
            box = Rectangle((cell.step - 0.96, ipu + 0.06), 0.92, 0.88, color=fill(cell), lw=0)
            mark(axes.add_patch(box), f"{name}-{cell.action}-{ipu}-{cell.step}")
            if size and cell.action != "idle":
                label = LETTERS[cell.action] + str(cell.micro_batch or "")
                axes.text(cell.step - 0.5, ipu + 0.52, label, ha="center", va="center", size=size)
    axes.set(xlim=(0, steps), ylim=(len(drawn.rows), 0), xlabel="step")
    shown = range(1, steps + 1, 1 if steps < 50 else 10)
    axes.set_xticks([step - 0.5 for step in shown], [str(step) for step in shown], size=8)
    names = [f"IPU {ipu}" for ipu in range(len(drawn.rows))]
    axes.set_yticks([ipu + 0.5 for ipu in range(len(names))], names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def describe(kind: str, drawn: Schedule) -> str:
    """Return a title with the number of steps and the mean number of working IPUs."""
    at_work = ipus_at_work(drawn)
    mean = sum(at_work) / len(at_work)
    return (
        f"{kind}: {len(at_work)} steps up to the update, {mean:.1f} of {len(drawn.rows)} IPUs work"
    )


def wide(rows: int, steps: int) -> Figure:
    """Return an empty figure whose size is suitable for the given numbers of rows and steps."""
    return new_figure(min(2 + 0.36 * steps, 17), 0.9 + 0.36 * rows)


def draw_ramp_up(ipus: int, micro_batches: int) -> Figure:
    """Draw the steps of a pipeline up to its last forward, and mark the first step on all IPUs."""
    drawn = one_update(ipus, micro_batches)
    figure = wide(ipus + 1, len(drawn.cycles))
    axes = figure.subplots()
    draw_schedule(axes, drawn, "ramp-up")
    full = drawn.steps_until_full
    if full is None:
        title = f"{micro_batches} micro-batches do not fill {ipus} IPUs: {2 * ipus - 1} would"
    else:
        title = f"{ipus} IPUs: after {full} steps all of them work at the same time"
        mark(axes.axvline(full, color=COLOURS[0], lw=2), "all-ipus-work")
    axes.set_title(title, loc="left")
    return figure


def draw_strategies(ipus: int, micro_batches: int) -> Figure:
    """Draw the same micro-batches pipelined and sharded."""
    drawn = {kind: one_update(ipus, micro_batches, kind) for kind in KINDS}
    steps = max(len(one.cycles) for one in drawn.values())
    figure = wide(2 * ipus + 4, steps)
    for axes, (kind, one) in zip(figure.subplots(2, sharex=True), drawn.items(), strict=True):
        draw_schedule(axes, one, kind, steps=steps)
        axes.set_title(describe(kind, one), loc="left")
        axes.label_outer()
    return figure


def draw_progression(ipus: int, micro_batches: int) -> Figure:
    """Draw the schedule of a pipeline, with the passes of its first micro-batch in colour."""
    drawn = one_update(ipus, micro_batches)
    figure = wide(ipus + 1, len(drawn.cycles))
    axes = figure.subplots()
    draw_schedule(axes, drawn, "progression", fill=fill_first)
    axes.set_title("The first micro-batch: forwards green, backwards red", loc="left")
    return figure


def draw_offload(ipus: int, micro_batches: int) -> Figure:
    """Draw memory and time of the tutorial's network with AdamW's state on the chip and off it."""
    figure = new_figure(9, 3.2)
    memory_axes, time_axes = figure.subplots(1, 2)
    for index, (name, offload) in enumerate((("on the chip", False), ("off the chip", True))):
        state, update = optimiser_costs(micro_batches, offload=offload)
        for axes, values, what in (
            (memory_axes, [size / 1e3 for size in state], "state"),
            (time_axes, [number / 1e3 for number in update], "update"),
        ):
            places = [ipu + 0.4 * index for ipu in range(len(values))]
            bars = axes.bar(places, values, width=0.38, color=COLOURS[index], label=name)
            for ipu, bar in enumerate(bars):
                mark(bar, f"{what}-{'off' if offload else 'on'}-{ipu}")
            axes.bar_label(bars, [f"{value:,.0f}" for value in values], size=8, padding=2)
    memory_axes.set_title("AdamW's state that the chip holds, kB (modelled)", loc="left", size=10)
    time_axes.set_title("The update, thousands of cycles (modelled)", loc="left", size=10)
    for axes in (memory_axes, time_axes):
        axes.set_xticks([ipu + 0.2 for ipu in range(ipus)], [f"IPU {ipu}" for ipu in range(ipus)])
        axes.spines["left"].set_visible(False)
        axes.tick_params(length=0, labelleft=False)
    memory_axes.legend(frameon=False, loc="upper left")
    return figure


def optimiser_costs(micro_batches: int, *, offload: bool) -> tuple[list[int], list[int]]:
    """Return for each IPU the bytes of AdamW's state on it, and the cycles of its update."""
    import mnist_pipeline as program  # imported here because only this figure needs torch
    import torch

    words = ["--gradient-accumulation", str(micro_batches), "--device-iterations", "1"]
    _, args = program.parse_arguments(words + ["--offload-optimiser"] * offload)
    options = program.get_training_options(args)
    model = program.get_training_model(options, program.Network(), args.learning_rate)
    samples = args.batch_size * micro_batches
    step = torch.zeros(samples, 1, 28, 28), torch.zeros(samples, dtype=torch.long)
    memory, execution = model.memoryReport(*step), model.executionReport(*step)
    return (
        [ipu.by_category().get("optimiser state", 0) for ipu in memory.ipus],
        [round(stage.update) for stage in execution.report.stages],
    )


def draw_comparison(profiles: list[Profile]) -> Figure:
    """Draw the schedules of two profiles below one another, to the same scale."""
    steps = max(len(one.schedule.cycles) for one in profiles)
    figure = new_figure(11, 1.2 + 0.4 * sum(len(one.schedule.rows) for one in profiles))
    for axes, one in zip(figure.subplots(len(profiles), sharex=True), profiles, strict=True):
        draw_schedule(axes, one.schedule, one.strategy, steps=steps)
        axes.set_title(f"{one.name}, {describe(one.strategy, one.schedule)}", loc="left")
        axes.label_outer()
    used = {cell.action for one in profiles for row in one.schedule.rows for cell in row}
    keys = [Rectangle((0, 0), 1, 1, color=FILLS[name], label=name) for name in LETTERS]
    keys = [key for key in keys if key.get_label() in used]
    figure.legend(handles=keys, loc="outside lower right", ncols=len(keys), frameon=False)
    return figure


def print_comparison(profiles: list[Profile]) -> None:
    """Print two profiles side by side."""
    table = {
        "strategy": [one.strategy for one in profiles],
        "steps before the update": [len(one.at_work) for one in profiles],
        "IPUs that work in a step": [
            f"{sum(one.at_work) / len(one.at_work):.1f}, {max(one.at_work)} at most"
            for one in profiles
        ],
        "cycles to the next update": [f"{one.cycles:,}" for one in profiles],
        "busy of a call, by IPU": [
            " ".join(f"{share:.1%}" for share in one.busy) for one in profiles
        ],
        "MB needed, by IPU": [
            " ".join(f"{size / 1e6:.1f}" for size in one.needed) for one in profiles
        ],
    }
    rows = [["(modelled)", *(one.name for one in profiles)]]
    rows += [[name, *map(str, values)] for name, values in table.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


FIGURES: dict[str, tuple[Callable[[int, int], Figure], int]] = {
    "ramp-up": (draw_ramp_up, 8),
    "strategies": (draw_strategies, 8),
    "progression": (draw_progression, 10),
    "offload": (draw_offload, 10),
}


def parse_arguments(argv: list[str] | None) -> tuple[Parser, argparse.Namespace]:
    """Return the parser, for later errors, and the arguments."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "figure", nargs="?", choices=FIGURES, default="ramp-up", help="what is drawn (ramp-up)"
    )
    what.add_argument(
        "--compare", nargs=2, type=Path, metavar="DIR", help="two folders of --profile-dir"
    )
    parser.add_argument("--output", type=Path, help="an .svg, .png or .pdf file (FIGURE.svg)")
    parser.add_argument("--ipus", type=positive, default=4, help="of the pipeline (4)")
    parser.add_argument("--micro-batches", type=positive, help="of an update (8 or 10)")
    args = parser.parse_args(argv)
    args.output = args.output or Path("comparison.svg" if args.compare else f"{args.figure}.svg")
    if args.output.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--output {args.output}: the name of an .svg, .png or .pdf file is accepted")
    if args.figure == "offload" and args.ipus != 4:
        parser.error("--ipus: the figure of the optimiser is of the tutorial's network, on 4 IPUs")
    if args.figure == "offload" and args.micro_batches is not None and args.micro_batches < 7:
        parser.error(f"--micro-batches {args.micro_batches}: 7 or more fill a pipeline of 4 IPUs")
    is_measured = args.compare is not None
    parser.say_idle(args, (is_measured, "--compare draws what was measured", "ipus micro_batches"))
    return parser, args


def main(argv: list[str] | None = None) -> Path:
    """Draw one figure, and return the path of its file."""
    parser, args = parse_arguments(argv)
    try:
        if args.compare:
            profiles = [read_profile(folder) for folder in args.compare]
            print_comparison(profiles)
            figure = draw_comparison(profiles)
        else:
            draw, micro_batches = FIGURES[args.figure]
            figure = draw(args.ipus, args.micro_batches or micro_batches)
        save(figure, args.output)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
    print(f"figure: {args.output}")
    return args.output


if __name__ == "__main__":
    main()
