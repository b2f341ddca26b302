"""Commands of the IPU hands-on session: ResNet-101 from out of memory to fast."""

from __future__ import annotations

from tutorial_texts.values import FIELDS, Text, TextCommand

__all__ = ["TEXT"]

_FOLDER = "examples/hands_on"
_CUT = (
    *("--model", "resnet18", "--side", "16", "--batch-size", "8", "--epochs", "2", "--steps", "2"),
    *("--data-dir", "{data}"),
)
_LINES = (r"^Namespace", r"^\[Epoch \d+\]")
_HALF = "python main.py --batch-size 64 --precision 16.16"
_LONG = f"{_HALF} --gradient-accumulation 8 --device-iteration 4"


def _command(text: str, shows: tuple[str, ...]) -> TextCommand:
    """Return a command of the session; the later of two equal options counts."""
    here = (*text.split(), *_CUT)
    names = FIELDS if shows[0].startswith("Namespace") else ""
    return TextCommand(
        text, shows, here, _FOLDER, keep=_LINES, seconds=300, by_names=names,
        at_most_partly=True,  # another network
    )  # fmt: skip


TEXT = Text(
    "IPU hands-on session, day 3: IPU optimisation",
    "hands-on.md",
    (
        # A long test in tests/examples/test_example_folders.py installs this file.
        TextCommand("pip install -r requirements.txt"),
        TextCommand(
            "python main.py --batch-size 64 --precision 32.32 --gradient-accumulation 3 --epochs 1",
            (
                "Namespace(async_data_loader=False, batch_size=64, device_iterations=1, "
                "eight_bit_io=False, epochs=1, gradient_accumulation=3, precision='32.32', "
                "replicas=1)",
            ),
            (
                *("python", "main.py", "--batch-size", "64", "--precision", "32.32"),
                *("--gradient-accumulation", "3", "--epochs", "1", "--data-dir", "{data}"),
            ),
            _FOLDER,
            keep=(r"^Namespace", r"^Out of memory", r"then the model fits$"),
            code=1, numbers_vary=False, seconds=300, by_names=FIELDS,
            at_most_partly=True,
        ),
        _command(
            f"{_HALF} --gradient-accumulation 3",
            (
                "Namespace(async_dataloader=False, batch_size=64, device_iterations=1, "
                "eight_bit_io=False, epochs=5, gradient_accumulation=3, precision='16.16', "
                "replicas=1)",
            ),
        ),
        _command(
            f"{_HALF} --gradient-accumulation 8",
            (
                "[Epoch 01]: 100%|██████████| 97/97 [09:20<00:00, 5.78s/it, loss=1.56, acc=39.1]",
                "[Epoch 01] loss: 1.900, acc: 33.7",
                "[Epoch 02]: 100%|██████████| 97/97 [00:46<00:00, 2.10it/s, loss=1.01, acc=67.2]",
                "[Epoch 02] loss: 1.375, acc: 50.0",
                "[Epoch 03]: 100%|██████████| 97/97 [00:46<00:00, 2.10it/s, loss=1.31, acc=54.7]",
                "[Epoch 03] loss: 1.177, acc: 58.0",
                "[Epoch 04]: 100%|██████████| 97/97 [00:46<00:00, 2.11it/s, loss=0.935, acc=67.2]",
                "[Epoch 04] loss: 1.056, acc: 61.9",
                "[Epoch 05]: 100%|██████████| 97/97 [00:46<00:00, 2.09it/s, loss=0.905, acc=64.1]",
                "[Epoch 05] loss: 0.921, acc: 67.3",
            ),
        ),
        _command(
            _LONG,
            (
                "[Epoch 01]: 100%|██████████| 24/24 [09:11<00:00, 22.97s/it, loss=1.51, acc=45.3]",
                "[Epoch 01] loss: 1.759, acc: 36.5",
                "[Epoch 02]: 100%|██████████| 24/24 [00:45<00:00, 1.88s/it, loss=1.11, acc=57.8]",
                "[Epoch 02] loss: 1.395, acc: 48.3",
                "[Epoch 03]: 100%|██████████| 24/24 [00:45<00:00, 1.88s/it, loss=0.841, acc=75]",
                "[Epoch 03] loss: 1.251, acc: 55.1",
                "[Epoch 04]: 100%|██████████| 24/24 [00:45<00:00, 1.88s/it, loss=1.37, acc=54.7]",
                "[Epoch 04] loss: 1.086, acc: 61.8",
                "[Epoch 05]: 100%|██████████| 24/24 [00:45<00:00, 1.88s/it, loss=0.744, acc=73.4]",
                "[Epoch 05] loss: 0.863, acc: 68.9",
            ),
        ),
        _command(
            f"{_LONG} --eight-bit-io",
            (
                "[Epoch 01]: 100%|██████████| 24/24 [08:35<00:00, 21.48s/it, loss=1.65, acc=34.4]",
                "[Epoch 01] loss: 1.848, acc: 32.6",
                "[Epoch 02]: 100%|██████████| 24/24 [00:13<00:00, 1.77it/s, loss=1.33, acc=51.6]",
                "[Epoch 02] loss: 1.334, acc: 51.8",
                "[Epoch 03]: 100%|██████████| 24/24 [00:13<00:00, 1.77it/s, loss=1.44, acc=50]",
                "[Epoch 03] loss: 1.205, acc: 56.3",
                "[Epoch 04]: 100%|██████████| 24/24 [00:13<00:00, 1.77it/s, loss=0.639, acc=81.2]",
                "[Epoch 04] loss: 1.004, acc: 63.4",
                "[Epoch 05]: 100%|██████████| 24/24 [00:13<00:00, 1.77it/s, loss=0.903, acc=71.9]",
                "[Epoch 05] loss: 0.926, acc: 67.2",
            ),
        ),
        _command(
            f"{_LONG} --eight-bit-io --async-dataloader",
            (
                "[Epoch 01]: 100%|██████████| 24/24 [08:32<00:00, 21.35s/it, loss=1.27, acc=50]",
                "[Epoch 01] loss: 1.758, acc: 34.2",
                "[Epoch 02]: 100%|██████████| 24/24 [00:08<00:00, 2.75it/s, loss=1.4, acc=50]",
                "[Epoch 02] loss: 1.352, acc: 49.4",
                "[Epoch 03]: 100%|██████████| 24/24 [00:08<00:00, 2.71it/s, loss=1.03, acc=65.6]",
                "[Epoch 03] loss: 1.200, acc: 56.9",
                "[Epoch 04]: 100%|██████████| 24/24 [00:08<00:00, 2.78it/s, loss=0.954, acc=65.6]",
                "[Epoch 04] loss: 1.039, acc: 64.2",
                "[Epoch 05]: 100%|██████████| 24/24 [00:08<00:00, 2.76it/s, loss=1.1, acc=62.5]",
                "[Epoch 05] loss: 1.003, acc: 65.1",
            ),
        ),
    ),
)  # fmt: skip
