"""Commands of the course on distributed data loading and training."""

from __future__ import annotations

from tutorial_texts.values import Quantity, Text, TextCommand

__all__ = ["TEXT"]

_COURSE = "examples/course"
_SMALL = ("--data-dir", "{data}", "--epochs", "1", "--items", "2001")
_LAUNCH = ("python", "-m", "poprun_py", "--num-instances", "2", "--output", "plain")
_PROGRAM = ("python", "examples/course/lfw_dataset.py", "-path_to_folder", "{data}/lfw")
_SNIPPET = (
    "import multiprocessing; cores = multiprocessing.cpu_count(); "
    'print(f"Number of cores: {cores}, Number of threads: {2*cores}")'
)

TEXT = Text(
    title="The course on distributed data loading and training",
    page="course.md",
    commands=(
        TextCommand(_SNIPPET, here=("python", "-c", _SNIPPET), quick=True),
        TextCommand(
            "python lfw_dataset.py",
            here=_PROGRAM,
            keep=("pictures of",),
            at_most_partly=True,  # other pictures
        ),
        TextCommand(
            "python lfw_dataset.py -visualize_batch",
            here=(*_PROGRAM, "-visualize_batch", "-output", "{out}/batch.png"),
            keep=("points",),
            at_most_partly=True,  # other pictures
        ),
        TextCommand(
            "python lfw_dataset.py -get_timing -num_workers 1",
            here=(*_PROGRAM, "-get_timing", "-num_workers", "1", "-batches_to_check", "10"),
            keep=("Timing",),
            at_most_partly=True,  # other pictures
        ),
        TextCommand(
            text="preds = model(input)  # nn.DataParallel(model, device_ids=[0, 1])",
            here=("python", "data_parallel.py", "--data-dir", "{data}", "--batch-size", "64"),
            folder=_COURSE,
            keep=(r"^  ", r"^largest difference", r"^torch's own"),
        ),
        TextCommand(
            text="for _ in range(n_reps): out = model(batch)",
            here=("python", "data_parallel.py", "--data-dir", "{data}"),
            folder=_COURSE,
            keep=(r"^microseconds", r"^batch ", r"faster"),
            numbers_vary=False,
        ),
        TextCommand(
            text="the same, with the batch size played around with, and measured",
            here=(
                "python", "data_parallel.py", "--data-dir", "{data}", "--compute", "host",
                "--batch-size", "8", "32", "128",
            ),
            folder=_COURSE,
            keep=(r"^microseconds", r"^batch "),
        ),
        TextCommand(
            text="Empirically distributed data parallel tends to be 2-3 times faster than data "
            "parallel.",
            here=("python", "threads_or_processes.py", "--steps", "20", "--repetitions", "3"),
            folder=_COURSE,
            keep=(r"^DDP is",),
            quantities=(
                Quantity(2.5, r"^DDP is ([\d.]+) times", factor=1.25),
            ),
            at_most_partly=True,
            seconds=300,
        ),
        TextCommand(
            text="distributed_example.sh",
            here=(
                "bash", "distributed_example.sh", *_SMALL, "--show-environment", "--show-samples",
            ),
            folder=_COURSE,
            keep=(r"^[A-Z_]+=", r"^rank ", r"^together ", r"^epoch \d+: last", r"^test accuracy"),
        ),
        TextCommand(
            text="distributed_example.py, what the DDP wrapper does",
            here=(*_LAUNCH, "distributed_example.py", *_SMALL, "--without-ddp"),
            folder=_COURSE,
            keep=(r"^epoch \d+: last", r"^test accuracy"),
        ),
        TextCommand(
            text="distributed_example.py, what dist.barrier() does",
            here=(*_LAUNCH, "distributed_example.py", *_SMALL, "--late-rank", "2"),
            folder=_COURSE,
            keep=(r"^rank ",),
        ),
        TextCommand(
            text="Try to benchmark the runs using 1 and 2 GPUs",
            here=("python", "speed_up.py", "--steps", "20", "--repetitions", "2"),
            folder=_COURSE,
            keep=(r"^one instance",),
            seconds=180,
        ),
        TextCommand(
            text='trainer = Trainer(accelerator="gpu", gpus=2)',
            here=(*_LAUNCH, "lightning_example.py", *_SMALL),
            folder=_COURSE,
            keep=(r"epoch\(s\) in",),
        ),
        TextCommand(
            text="How much of a speedup can you actually get? Why can you not get a speedup of 2?",
            here=("python", "speed_up.py", "--steps", "20", "--repetitions", "2"),
            folder=_COURSE,
            keep=(r"^[a-zD].*\d%", r"^serial share", r"^start", r"^  speed-up"),
            seconds=180,
        ),
    ),
)  # fmt: skip
