"""The course's module on distributed data loading."""

from __future__ import annotations

from tools.pages.seed_texts.values import Figure, Text, TextCommand

__all__ = ["FIGURES", "TEXT"]

_PROGRAM = ("python", "examples/course/lfw_dataset.py", "-path_to_folder", "{data}/lfw")
_SNIPPET = (
    "import multiprocessing; cores = multiprocessing.cpu_count(); "
    'print(f"Number of cores: {cores}, Number of threads: {2*cores}")'
)

TEXT = Text(
    title='The course on distributed data loading and training, module "distributed data loading"',
    page="course.md",
    commands=(
        TextCommand(
            text=_SNIPPET,
            shows=(),
            here=("python", "-c", _SNIPPET),
            folder=".",
            why="The snippet is the text's. cpu_count() counts hardware threads already, so that "
            "its second number is right on no machine: course.md shows what is there.",
        ),
        TextCommand(
            text="python lfw_dataset.py",
            shows=(),
            here=_PROGRAM,
            folder=".",
            why="Without LFW on the disk, 100 of its faces that scikit-image ships stand for its "
            "13,233 pictures, in four versions each.",
            keep=("pictures of",),
            at_most_partly=True,  # other pictures
        ),
        TextCommand(
            text="python lfw_dataset.py -visualize_batch",
            shows=(),
            here=(*_PROGRAM, "-visualize_batch", "-output", "{out}/batch.png"),
            folder=".",
            why="Without a screen the batch is written to a file.",
            keep=("points",),
            at_most_partly=True,  # other pictures
        ),
        TextCommand(
            text="python lfw_dataset.py -get_timing -num_workers 1",
            shows=(),
            here=(*_PROGRAM, "-get_timing", "-num_workers", "1", "-batches_to_check", "10"),
            folder=".",
            why="Passes of 10 batches instead of 100 keep it short, as the text's hint says.",
            keep=("Timing",),
            at_most_partly=True,  # other pictures
        ),
    ),
)

FIGURES = (
    Figure(
        name="course-batch.png",
        command=(
            "python", "examples/course/lfw_dataset.py", "-path_to_folder", "{data}/lfw",
            "-visualize_batch", "-output", "{file}",
        ),
        marks=(),
        same_each_time=True,
    ),
    Figure(
        name="course-workers.svg",
        command=(
            "python", "examples/course/lfw_dataset.py", "-path_to_folder", "{data}/lfw",
            "-plot", "{file}", "-batches_to_check", "40", "-batch_size", "5",
            "-workers", "0", "1", "2",
        ),
        marks=("workers-0", "workers-1", "workers-2", "heavy", "held in memory"),
        same_each_time=False,
    ),
)  # fmt: skip
