"""Graphcore's tutorial on efficient data loading: what it has its reader run."""

from __future__ import annotations

from tools.pages.seed_texts.values import Figure, Quantity, Text, TextCommand

__all__ = ["FIGURES", "TEXT"]

_KEEP = (
    r"^global batch ",
    r"^one step takes ",
    r"items/s +x synthetic",
    r"^(DataLoader alone|synthetic data|real data) +[\d,]+ ",
    r"^the (loader|device) limits",
)
_SPEED = (
    "Measured here are the loader and the emulation, which computes on the same cores as the "
    "loader's workers; the last column is a model of the IPU."
)


def _quantities(batch: int, synthetic: float, real: float) -> tuple[Quantity, ...]:
    """Return the numbers of a case that the model of the device has too."""
    return (
        Quantity("global batch", batch, r"^global batch (\d+) "),
        Quantity(
            "synthetic data (items/s, modelled)", synthetic,
            r"^synthetic data +[\d,]+ +[\d.]+ +([\d,]+)", factor=2,
        ),
        Quantity(
            "real data (items/s, modelled)", real,
            r"^real data +[\d,]+ +[\d.]+ +([\d,]+)", factor=2,
        ),
    )  # fmt: skip


_NOT_THE_HOST = "The DataLoader's throughput depends on the host and was not compared."


TEXT = Text(
    title="Efficient data loading with PopTorch",
    page="data-loading.md",
    commands=(
        TextCommand(
            text="pip install torchvision",
            shows=(),
            here=(),
            folder=".",
            why="torchvision is installed with this project, and the program makes its data.",
        ),
        TextCommand(
            text="--synthetic-data  # Run with IPU-generated synthetic data",
            shows=(),
            here=("python", "data_loading.py", "--synthetic-data", "--steps", "2"),
            folder="examples/data_loading",
            why="Two steps of 64 pictures. " + _SPEED,
            keep=_KEEP,
        ),
        TextCommand(
            text="--replicas # Takes an integer parameter to set the number of replicas",
            shows=(),
            here=("python", "data_loading.py", "--replicas", "2", "--steps", "2"),
            folder="examples/data_loading",
            why="Emulated replicas share the cores of this machine: the gain by more of them is "
            "hardware's. " + _SPEED,
            keep=_KEEP,
        ),
        TextCommand(
            text="Case 1: mini-batch size 16, replica 1, device iterations 50, workers 32",
            shows=(
                "Global batch size: 16",
                "DataLoader throughput: 70523 items/s",
                "Synthetic data throughput: 22170 items/s",
                "Real data throughput: 17150 items/s",
            ),
            here=("python", "data_loading.py", "--case", "1", "--steps", "1"),
            folder="examples/data_loading",
            why="The loader reads all of the 10,000 pictures, the model takes one step of them. "
            + _SPEED,
            keep=_KEEP,
            quantities=_quantities(16, 22170, 17150),
            compared=_NOT_THE_HOST,
            at_most_partly=True,
            seconds=300,
        ),
        TextCommand(
            text="Case 2: mini-batch size 16, replica 4, device iterations 50, workers 32",
            shows=(
                "Global batch size: 64",
                "DataLoader throughput: 182716 items/s",
                "Synthetic data throughput: 40773 items/s",
                "Real data throughput: 36542 items/s",
            ),
            here=("python", "data_loading.py", "--case", "2", "--steps", "1"),
            folder="examples/data_loading",
            why="One step of four replicas, which share the cores of this machine: the gain by "
            "replication is hardware's. " + _SPEED,
            keep=_KEEP,
            quantities=_quantities(64, 40773, 36542),
            compared=_NOT_THE_HOST,
            at_most_partly=True,
            seconds=600,
        ),
    ),
)


def _drawn(figure: str, *marks: str) -> Figure:
    return Figure(
        name=f"data-loading-{figure}.svg",
        command=("python", "examples/data_loading/figures.py", figure, "{file}"),
        marks=marks,
        same_each_time=True,
    )


FIGURES = (
    _drawn("iterations", "queue-5", "ipu0-forward-5", "ipu0-backward-5", "80 samples"),
    _drawn("pipeline", "ipu0-forward-8", "ipu3-backward-8", "iteration-1", "128 samples"),
    _drawn("replicas", "ipu3-forward-2", "exchange-3", "all-reduce", "128 samples"),
    _drawn("batching", "replica1-iteration2-micro1", "44 to 47", "48 samples"),
    Figure(
        name="data-loading-throughput.svg",
        command=("python", "examples/data_loading/figures.py", "throughput", "{file}"),
        marks=("bar-DataLoader-alone", "bar-synthetic-data", "bar-real-data", "limits"),
        same_each_time=False,
    ),
)
