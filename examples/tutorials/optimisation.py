"""Optimising a model step by step: half precision, accumulation, device iterations, 8-bit I/O.

The training program of the IPU hands-on session (ResNet pipelined over two IPUs), with its imports
and data path changed only. Without --data-dir it trains on scikit-learn's handwritten digits.

python examples/tutorials/optimisation.py --precision 16.16 --gradient-accumulation 8
    --device-iterations 4 --eight-bit-io --async-dataloader
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from popdist_py import poptorch

IMAGENET_STATISTICS = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


class ModelWithNormalization(torch.nn.Module):
    """Casts 8-bit images and normalises them on the IPU."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        from torchvision import transforms

        self.model = model
        self.dtype = dtype
        self.normalize = transforms.Normalize(**IMAGENET_STATISTICS)

    def forward(self, img):
        return self.model(self.normalize(img.to(self.dtype)))


class ModelWithLoss(torch.nn.Module):
    """Returns the outputs, and the loss when labels are given."""

    def __init__(self, model: torch.nn.Module, criterion: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, x, labels=None):
        out = self.model(x)
        if labels is None:
            return out
        return out, self.criterion(out, labels)


class Digits(torch.utils.data.Dataset):
    """scikit-learn's 8x8 digits as RGB pictures, the form in which CIFAR-10 comes."""

    def __init__(self, transform) -> None:
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.pictures = [
            Image.fromarray((picture * 15.9).astype("uint8")).convert("RGB")
            for picture in digits.images
        ]
        self.labels = digits.target
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.transform(self.pictures[index]), int(self.labels[index])


def get_transform(precision: str, eight_bit_io: bool, side: int):
    """Return the preprocessing on the host."""
    from torchvision import transforms

    preprocessing_steps = [
        transforms.RandomHorizontalFlip(),
        transforms.Resize((side, side)),
        transforms.PILToTensor(),
    ]
    if not eight_bit_io:
        dtype = torch.float16 if precision[:2] == "16" else torch.float32
        preprocessing_steps.extend(
            [
                transforms.ConvertImageDtype(dtype),
                transforms.Normalize(**IMAGENET_STATISTICS),
            ]
        )
    return transforms.Compose(preprocessing_steps)


def build_model(args: argparse.Namespace) -> torch.nn.Module:
    """Return the network, pipelined over two IPUs, in the precision asked for."""
    from torchvision.models import resnet

    layers = {"resnet18": resnet.resnet18, "resnet101": resnet.resnet101}
    model = layers[args.model](num_classes=10)
    model.layer3[-1] = poptorch.BeginBlock(model.layer3[-1], ipu_id=1)
    input_dtype = torch.float16 if args.precision[:2] == "16" else torch.float32
    model_dtype = torch.float16 if args.precision[-2:] == "16" else torch.float32
    if args.eight_bit_io:
        model = ModelWithNormalization(model, dtype=input_dtype)
    return ModelWithLoss(model, nn.CrossEntropyLoss()).to(model_dtype)


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the mean loss of every epoch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="folder that holds CIFAR-10")
    parser.add_argument("--model", choices=["resnet18", "resnet101"], default="resnet18")
    parser.add_argument("--side", type=int, default=32, help="height and width of the images")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--precision", choices=["32.32", "16.32", "16.16"], default="32.32")
    parser.add_argument("--gradient-accumulation", type=int, default=3)
    parser.add_argument("--device-iterations", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="steps of an epoch at most")
    parser.add_argument("--eight-bit-io", action="store_true")
    parser.add_argument("--async-dataloader", action="store_true")
    parser.add_argument(
        "--device", choices=["mk1", "mk2", "bow"], default="mk2", help="the IPUs that it has to fit"
    )
    args = parser.parse_args(argv)

    opts = poptorch.Options()
    opts.Emulator.device(args.device)
    opts.deviceIterations(args.device_iterations)
    opts.replicationFactor(args.replicas)
    opts.Training.gradientAccumulation(args.gradient_accumulation)
    transform = get_transform(args.precision, args.eight_bit_io, args.side)
    if args.data_dir is None:
        train_dataset = Digits(transform)
    else:
        import torchvision

        train_dataset = torchvision.datasets.CIFAR10(root=args.data_dir, transform=transform)
    mode = poptorch.DataLoaderMode.Async if args.async_dataloader else poptorch.DataLoaderMode.Sync
    train_dataloader = poptorch.DataLoader(
        opts, train_dataset, batch_size=args.batch_size, shuffle=True, mode=mode
    )
    model = build_model(args)
    if args.precision.endswith("16"):
        optimizer = poptorch.optim.AdamW(
            model.parameters(),
            lr=0.001,
            loss_scaling=1000,
            accum_type=torch.float16,
            first_order_momentum_accum_type=torch.float16,
            second_order_momentum_accum_type=torch.float32,
        )
    else:
        optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.001)
    training_model = poptorch.trainingModel(model, opts, optimizer=optimizer)

    means = []
    for epoch in range(1, args.epochs + 1):
        losses = []
        bar = tqdm(train_dataloader, desc=f"[Epoch {epoch:02d}]", total=args.steps)
        for images, labels in bar:
            out, loss = training_model(images, labels)
            shown = labels[-out.shape[0] :]
            acc = (out.argmax(1) == shown).float().mean().item() * 100
            losses.append(loss.float().mean().item())
            bar.set_postfix(loss=f"{losses[-1]:.3g}", acc=f"{acc:.3g}")
            if len(losses) == args.steps:
                break
        means.append(sum(losses) / len(losses))
        print(f"[Epoch {epoch:02d}] loss: {means[-1]:.3f}")
    if args.async_dataloader:
        train_dataloader.terminate()
    return means


if __name__ == "__main__":
    main()
