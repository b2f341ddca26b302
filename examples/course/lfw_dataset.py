"""Load pictures of faces from jpg files, and measure the effect of a DataLoader's workers.

python examples/course/lfw_dataset.py -get_timing -num_workers 1
poprun-py -n 2 examples/course/lfw_dataset.py -get_timing

The folder -path_to_folder holds the pictures of "Labeled Faces in the Wild" (LFW). If it is
missing, the program writes the faces of sample_faces.py to it. An option may begin with one dash or
with two, and may contain - instead of _. Every instance loads its own share of the files. Instance
0 prints the times, which are those of the slowest instance.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common.arguments import Parser, figure_file, from_zero, positive, worker_count
from common.running import run
from course.messages import Traffic, count_messages
from course.sample_faces import find_or_make
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms

import popdist_py

RUNS = 5
LIGHT = transforms.ToTensor()
HEAVY = transforms.Compose([
    transforms.RandomAffine(5, (0.1, 0.1), (0.5, 2.0)),
    transforms.RandomHorizontalFlip(),
    transforms.RandomPerspective(p=1, interpolation=transforms.InterpolationMode.BICUBIC),
    transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
    transforms.ToTensor(),
])  # fmt: skip
IN_MEMORY = "held in memory"


class LFWDataset(Dataset):
    """The jpg files below a folder, as tensors [3, height, width] of 0 to 1.

    Args:
        path_to_folder: The folder. LFW has a subfolder for each person; other layouts also work.
        transform: A function from a PIL image to a tensor.
        part, parts: The data set contains every ``parts``-th file, beginning with number ``part``.
    """

    def __init__(self, path_to_folder, transform=LIGHT, part: int = 0, parts: int = 1) -> None:
        self.files = sorted(Path(path_to_folder).rglob("*.jpg"))[part::parts]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.files[index]) as picture:
            return self.transform(picture.convert("RGB"))


class InMemory(Dataset):
    """The first samples of a data set in memory, so that loading a sample takes almost no time."""

    def __init__(self, dataset: Dataset, count: int = 64) -> None:
        self.samples = [dataset[index] for index in range(min(count, len(dataset)))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index]


@dataclass(frozen=True)
class Timing:
    """The seconds of each pass of the slowest instance, for a number of workers."""

    kind: str
    workers: int
    seconds: Sequence[float] = field(repr=False)

    @property
    def mean(self) -> float:
        """The mean of the passes."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def deviation(self) -> float:
        """The standard deviation of the passes, as numpy.std gives it."""
        return (sum((s - self.mean) ** 2 for s in self.seconds) / len(self.seconds)) ** 0.5


def make_loader(
    dataset: Dataset, args, workers: int, batches: int, *, keep: bool = False
) -> DataLoader:
    """Return a loader of ``batches`` shuffled batches, which repeats the files if needed.

    With ``keep``, the workers stay alive after a pass and load the next pass.
    """
    random = torch.Generator().manual_seed(args.seed)
    samples = RandomSampler(dataset, num_samples=batches * args.batch_size, generator=random)
    return DataLoader(
        dataset, batch_size=args.batch_size, sampler=samples, num_workers=workers,
        pin_memory=args.pin_memory and torch.cuda.is_available(),
        multiprocessing_context=args.multiprocessing_context if workers else None,
        persistent_workers=keep and workers > 0,
    )  # fmt: skip


def measure(
    dataset: Dataset, kind: str, args, numbers: Sequence[int], *, keep: bool = False
) -> list[Timing]:
    """Load all batches ``RUNS`` times with each number of workers.

    The passes alternate between the numbers of workers, so that other programs on the machine slow
    all numbers equally. Each pass starts its own workers, and its time includes this. With
    ``keep``, the workers are started only once, by a pass that is not measured.
    """
    loaders = {
        workers: make_loader(dataset, args, workers, args.batches_to_check, keep=keep)
        for workers in numbers
    }
    seconds = {workers: [] for workers in loaders}
    for _ in range(RUNS + keep):
        for workers, loader in loaders.items():
            popdist_py.barrier()
            seconds[workers].append(popdist_py.all_reduce(seconds_of_pass(loader), op="max"))
    return [Timing(kind, workers, tuple(found[-RUNS:])) for workers, found in seconds.items()]


def seconds_of_pass(loader: DataLoader) -> float:
    """Load all batches, and return the seconds.

    If there is a GPU, the batches are copied to it. -pin_memory makes these copies faster.
    """
    gpu = torch.cuda.is_available()
    start = perf_counter()
    for batch in loader:
        if gpu:
            batch.to("cuda", non_blocking=True)
    if gpu:
        torch.cuda.synchronize()
    return perf_counter() - start


def told(timing: Timing, args) -> str:
    """Return a line of text about a measurement."""
    pictures = args.batches_to_check * args.batch_size * popdist_py.getNumInstances()
    words = f"{timing.workers} worker{'' if timing.workers == 1 else 's'}, {timing.kind}"
    return (
        f"Timing: {timing.mean:.3f}+-{timing.deviation:.3f} s, {words}, "
        f"{pictures / timing.mean:.0f} pictures/s"
    )


def verdict(timings: Sequence[Timing]) -> str:
    """Return which number of workers was the fastest for a kind, compared with the first one."""
    first, best = timings[0], min(timings, key=lambda timing: timing.mean)
    if best is first:
        return f"{first.kind}: fastest with {first.workers}"
    ratio = first.mean / best.mean
    # Two means differ clearly if their difference is larger than the sum of the deviations.
    clear = first.mean - best.mean > first.deviation + best.deviation
    return (
        f"{best.kind}: fastest with {best.workers}, {ratio:.2f} times as fast as with "
        f"{first.workers}{'' if clear else ', which is within the deviations'}"
    )


def draw(timings: Sequence[Timing], args) -> None:
    """Draw means and standard deviations for each number of workers, with a line for each kind."""
    from common.drawing import COLOURS, mark, new_figure, save

    figure = new_figure(6.4, 3.6)
    axes = figure.add_subplot()
    workers = sorted({timing.workers for timing in timings})
    kinds = list(dict.fromkeys(timing.kind for timing in timings))
    for number, (kind, colour) in enumerate(zip(kinds, COLOURS, strict=False)):
        found = [timing for timing in timings if timing.kind == kind]
        drawn = axes.errorbar(
            [workers.index(t.workers) for t in found], [t.mean for t in found],
            yerr=[t.deviation for t in found], color=colour, marker="o", markersize=4, capsize=4,
        )  # fmt: skip
        mark(drawn.lines[0], f"workers-{number}")
        axes.annotate(
            kind, (workers.index(found[-1].workers), found[-1].mean), xytext=(10, 0),
            textcoords="offset points", va="center", color=colour,
        )  # fmt: skip
    axes.set_xticks(range(len(workers)), [str(count) for count in workers])
    axes.set_xlabel("workers (num_workers)")
    axes.set_ylabel(f"seconds for {args.batches_to_check} batches of {args.batch_size}")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    axes.set_title(f"Mean and standard deviation of {RUNS} passes", loc="left", fontsize=10)
    save(figure, args.plot)


def picture_of(dataset: Dataset, args) -> Image.Image:
    """Return one picture that shows up to 32 pictures of a shuffled batch in rows of eight."""
    from torchvision.transforms.functional import resize, to_pil_image
    from torchvision.utils import make_grid

    batch = next(iter(make_loader(dataset, args, args.num_workers, 1)))
    return to_pil_image(make_grid(resize(batch[:32], [96, 96], antialias=True), pad_value=1))


def show(picture: Image.Image, output: Path | None) -> str:
    """Show ``picture`` in a window.

    If there is no screen, or ``output`` is given, the picture is written to a file instead.
    """
    if output is None:
        import matplotlib.pyplot as plt

        # Without a screen, pyplot chooses a backend without windows.
        if plt.get_backend().lower() not in {"agg", "cairo", "pdf", "pgf", "ps", "svg", "template"}:
            plt.imshow(picture)
            plt.axis("off")
            plt.show()
            return "the batch was shown in a window"
    path = output or Path("batch.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)
    reason = "" if output else "no screen for a window: "
    return f"{reason}the batch is in {path}, {picture.width}x{picture.height} points"


def traffic_table(traffic: Traffic) -> str:
    """Return lines with the counted messages. Worker -1 is the main process."""
    if not traffic.asked:
        return f"{len(traffic.loaded)} batches, no messages: the main process loads them itself"
    batches, lines = len(traffic.loaded), []
    for number, workers in enumerate(traffic.loaded[:8]):
        by = ", ".join(f"worker {worker}" for worker in sorted(set(workers)))
        asked = traffic.asked[number]
        lines.append(
            f"batch {number}: asked of worker {asked}, all {len(workers)} samples loaded by {by}"
        )
    for count, what in (
        (traffic.index_lists, "lists of indices to workers"),
        (traffic.batches, "batches back"),
        (traffic.handles, "handles of shared memory back"),
    ):
        lines.append(f"{what:<30}{count:>4}, {count / batches:.3g} per batch")
    lines.append(f"{'farewells to workers':<30}{traffic.farewells:>4}")
    lines.append(f"{'lists sent before a batch came':<30}{traffic.ahead:>4}")
    return "\n".join(lines)


def make_parser() -> Parser:
    """Return the parser of the course's options and of the options for its exercises."""
    about, _, uses = __doc__.partition("\n\n")
    parser = Parser(description=about, epilog=f"Examples: {'; '.join(uses.splitlines()[:2])}")

    def add(name: str, **words) -> None:
        double = f"--{name.replace('_', '-')}"
        parser.add_argument(f"-{name}", double, f"--{name}", dest=name, **words)

    add("path_to_folder", type=Path, default=Path("data/lfw"), help="the folder of jpg files")
    add("batch_size", type=positive, default=32, help="pictures in a batch")
    add(
        "num_workers", type=worker_count, default=0,
        help="processes that load, 0: none but this one",
    )  # fmt: skip
    add("visualize_batch", action="store_true", help="show a batch in a window or a file")
    add("output", type=Path, help="with -visualize_batch: this file instead of a window")
    add("get_timing", action="store_true", help=f"measure {RUNS} passes")
    add("batches_to_check", type=positive, default=100, help="batches in a pass")
    add("heavy", action="store_true", help="augment each picture (move, mirror, change colours)")
    add("keep_workers", action="store_true", help="measure without their start: workers stay alive")
    add("in_memory", action="store_true", help="hold 64 pictures in memory: loading is indexing")
    add(
        "workers", type=worker_count, nargs="+", default=[0, 1, 2, 4],
        help="what -plot goes through",
    )  # fmt: skip
    add("plot", type=figure_file, help="measure -workers, and draw this file (.svg, .png, .pdf)")
    add("count_messages", action="store_true", help="count what main process and workers send")
    add("pin_memory", action="store_true", help="lock the memory of batches, for a GPU")
    add(
        "multiprocessing_context", choices=("fork", "spawn", "forkserver"),
        help="how workers are started; Python's own way if it is left out",
    )  # fmt: skip
    add("seed", type=from_zero, default=0, help="of the order and the augmentation")
    return parser


def open_dataset(args, parser: Parser, say) -> dict[str, Dataset]:
    """Return the requested kinds of this instance's data set, by name."""
    index, count = popdist_py.getInstanceIndex(), popdist_py.getNumInstances()
    try:
        if index == 0 and find_or_make(args.path_to_folder)[1]:
            say(f"{args.path_to_folder} was missing: sample faces are there now")
        popdist_py.barrier()
        light, heavy = (LFWDataset(args.path_to_folder, t, index, count) for t in (LIGHT, HEAVY))
    except OSError as error:
        reason = error.strerror or error
        parser.error(f"-path_to_folder {args.path_to_folder}: {reason}")
    if not len(light):
        parser.error(f"{args.path_to_folder} has fewer jpg files than there are instances, {count}")
    kinds = {
        "light": lambda: light, "heavy": lambda: heavy, IN_MEMORY: lambda: InMemory(light),
    }  # fmt: skip
    chosen = [k for k, on in (("heavy", args.heavy), (IN_MEMORY, args.in_memory)) if on]
    chosen = chosen or ([IN_MEMORY, "light", "heavy"] if args.plot else ["light"])
    return {kind: kinds[kind]() for kind in chosen}


def _say_idle(parser: Parser, args) -> None:
    measures = args.get_timing or args.plot is not None
    loads = args.count_messages or args.visualize_batch
    parser.say_idle(
        args,
        (not args.visualize_batch, "no -visualize_batch", "output"),
        (not measures, "neither -get_timing nor -plot", "batches_to_check keep_workers"),
        (args.plot is None, "no -plot", "workers"),
        (
            measures and args.plot is not None and not loads,
            "-plot goes through -workers",
            "num_workers",
        ),
        (not measures and not loads, "nothing is loaded", "num_workers multiprocessing_context"),
    )


def main(argv: list[str] | None = None) -> list[Timing]:
    """Load, show and measure as the options choose, and return the measured times."""
    parser = make_parser()
    args = parser.parse_args(argv)
    _say_idle(parser, args)
    popdist_py.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # as in torch's workers, for a fair comparison
    # This program tries more workers than cores on purpose.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    first = popdist_py.getInstanceIndex() == 0
    say = print if first else lambda *_: None

    datasets = open_dataset(args, parser, say)
    dataset = next(iter(datasets.values()))
    shape = "x".join(map(str, dataset[0].shape))
    count = popdist_py.all_reduce(max(map(len, datasets.values())))
    say(f"{count} pictures of {shape}, batches of {args.batch_size}")
    if args.pin_memory and not torch.cuda.is_available():
        say("-pin_memory has no effect: this host does not have a GPU")
    if args.visualize_batch and first:
        say(show(picture_of(dataset, args), args.output))
    if args.count_messages and first:
        method = args.multiprocessing_context
        say(traffic_table(count_messages(dataset, args.batch_size, args.num_workers, 12, method)))
    timings = []
    if args.get_timing or args.plot:
        numbers = args.workers if args.plot else [args.num_workers]
        for kind, one in datasets.items():
            of_kind = measure(one, kind, args, numbers, keep=args.keep_workers)
            say("\n".join(told(timing, args) for timing in of_kind))
            timings += of_kind
    if args.plot:
        for kind in datasets:
            say(verdict([timing for timing in timings if timing.kind == kind]))
    if args.plot and first:
        draw(timings, args)
        say(f"the figure is {args.plot}")
    return timings


if __name__ == "__main__":
    run(main)
