"""Commands of Graphcore's tutorial on efficient data loading."""

from __future__ import annotations

from tutorial_texts.values import Quantity, Text, TextCommand

__all__ = ["TEXT"]

_FOLDER = "examples/data_loading"
_KEEP = (
    r"^global batch ",
    r"^one step takes ",
    r"items/s +x synthetic",
    r"^(DataLoader alone|synthetic data|real data) +[\d,]+ ",
    r"^the (loader|device) limits",
)


def _case(number: int, text: str, loader: int, batch: int, synthetic: int, real: int, seconds: int):
    """Return a case of the text. Its loader depends on the host and is not compared."""
    modelled = r" +[\d,]+ +[\d.]+ +([\d,]+)"
    return TextCommand(
        f"Case {number}: {text}",
        shows=(
            f"Global batch size: {batch}",
            f"DataLoader throughput: {loader} items/s",
            f"Synthetic data throughput: {synthetic} items/s",
            f"Real data throughput: {real} items/s",
        ),
        here=("python", "data_loading.py", "--case", str(number), "--steps", "1"),
        folder=_FOLDER,
        keep=_KEEP,
        quantities=(
            Quantity(batch, r"^global batch (\d+) "),
            Quantity(synthetic, f"^synthetic data{modelled}", factor=2),
            Quantity(real, f"^real data{modelled}", factor=2),
        ),
        at_most_partly=True,  # one step of the epoch
        seconds=seconds,
    )


TEXT = Text(
    "Efficient data loading with PopTorch",
    "data-loading.md",
    (
        TextCommand("pip install torchvision"),
        TextCommand(
            "--synthetic-data  # Run with IPU-generated synthetic data",
            here=("python", "data_loading.py", "--synthetic-data", "--steps", "2"),
            folder=_FOLDER,
            keep=_KEEP,
        ),
        TextCommand(
            "--replicas # Takes an integer parameter to set the number of replicas",
            here=("python", "data_loading.py", "--replicas", "2", "--steps", "2"),
            folder=_FOLDER,
            keep=_KEEP,
        ),
        _case(
            1, "mini-batch size 16, replica 1, device iterations 50, workers 32",
            70523, 16, 22170, 17150, seconds=300,
        ),
        _case(
            2, "mini-batch size 16, replica 4, device iterations 50, workers 32",
            182716, 64, 40773, 36542, seconds=600,
        ),
    ),
)  # fmt: skip
