"""The data sets of the CNN programs: images for training and validation, and their loader.

``images.py`` is the common base of all data sets. ``order.py`` has the order of the images for each
instance. CIFAR-10 and CIFAR-100 are in ``cifar.py``, ImageNet is in ``imagenet.py`` and
``tfrecords.py``, and random images are in ``generated.py``. ``sample.py`` is a program that makes
small data sets of handwritten digits.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch

import popdist_py
from datasets import cifar, imagenet, tfrecords
from datasets.cifar import Cifar
from datasets.generated import Generated
from datasets.imagenet import ImageNet
from datasets.images import DataError, Pictures, Statistics, Transfer
from datasets.order import InOrder, Shuffled, Split
from popdist_py import poptorch

__all__ = [
    "DATASETS",
    "DataError",
    "Images",
    "Known",
    "folder_of",
    "infer",
    "load",
    "loader",
    "seed_of_order",
]


@dataclass(frozen=True)
class Known:
    """Properties of a data set that are known before it is read.

    Attributes:
        classes: The number of classes.
        side: The height and width in pixels of an image that a model gets.
        training: The number of training images.
        validation: The number of validation images.
        statistics: The statistics of the training images.
    """

    classes: int
    side: int
    training: int
    validation: int
    statistics: Statistics


DATASETS = {
    "cifar-10": Known(
        10, 32, 50_000, 10_000, Statistics((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    ),
    "cifar-100": Known(
        100, 32, 50_000, 10_000, Statistics((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    ),
    "imagenet": Known(
        1000, 224, 1_281_167, 50_000, Statistics((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    ),
}


@dataclass(frozen=True)
class Images:
    """A data set and its properties that a model needs.

    Attributes:
        data: The samples (image [3, side, side], label), without padding.
        num_classes: The number of classes. Labels are 0 to ``num_classes`` - 1.
        side: The height and width of an image in pixels.
        mean: The mean of each colour, for pixels from 0 to 1.
        std: The standard deviation of each colour, for pixels from 0 to 1.
        normalised_on_host: Whether the host normalises images. Otherwise pixels are 0 to 255 (uint8
            with --eight-bit-io, else float32), and the model computes (image / 255 - mean) / std.
    """

    data: Pictures
    num_classes: int
    side: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    normalised_on_host: bool


def folder_of(args: argparse.Namespace) -> Path:
    """Return the folder of the data, after checking that it can be read.

    Raises:
        DataError: The folder is missing or cannot be read.
    """
    folder: Path = args.data_dir
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: give a --data-dir that holds a data set")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise DataError(f"{folder} cannot be read: give a --data-dir that this user may read")
    return folder


def infer(folder: Path) -> str:
    """Return the name of the data set whose files are in ``folder``.

    Raises:
        DataError: The folder does not contain the files of a known data set, or contains the files
            of several data sets.
    """
    found = _names_in(folder)
    if not found:
        raise _missing(f"any of {', '.join(DATASETS)}", folder, *DATASETS)
    if len(found) > 1:
        raise DataError(f"{folder} holds {' and '.join(found)}: choose one with --dataset")
    return found[0]


def _names_in(folder: Path) -> list[str]:
    found = [name for name in cifar.FORMATS if cifar.find(name, folder)]
    if tfrecords.find(folder, training=True) or imagenet.find_folders(folder, training=True):
        found.append("imagenet")
    return found


def load(args: argparse.Namespace, training: bool) -> Images:
    """Return the images for training or for validation.

    Raises:
        DataError: The data is missing or damaged. The text suggests how to repair it.
    """
    known = DATASETS[args.dataset]
    normalised = args.hostside_norm and not args.eight_bit_io
    transfer = Transfer(known.statistics, args.eight_bit_io, normalised)
    if args.generated_data or args.synthetic_data:
        count = args.generated_samples or (known.training if training else known.validation)
        seed = (args.seed or 0) * 2 + training
        side = args.image_size or known.side
        data: Pictures = Generated(count, side, known.classes, seed, transfer)
    elif args.dataset == "imagenet":
        side = args.image_size or known.side
        data = _load_imagenet(args, training, side, transfer)
    else:
        side, data = known.side, _load_cifar(args, training, transfer)
    statistics = known.statistics
    return Images(data, data.num_classes, side, statistics.mean, statistics.std, normalised)


def _load_cifar(args: argparse.Namespace, training: bool, transfer: Transfer) -> Cifar:
    side = DATASETS[args.dataset].side
    if args.image_size not in (None, side):
        raise DataError(
            f"--image-size {args.image_size} is given, {args.dataset} has images of {side}; leave "
            "it out"
        )
    folder = folder_of(args)
    place = cifar.find(args.dataset, folder)
    if place is None:
        raise _missing(f"the binary version of {args.dataset}", folder, args.dataset)
    return Cifar(args.dataset, place, training, transfer)


def _load_imagenet(
    args: argparse.Namespace, training: bool, side: int, transfer: Transfer
) -> ImageNet:
    folder = folder_of(args)
    if not (tfrecords.find(folder, training=True) or imagenet.find_folders(folder, training=True)):
        raise _missing("ImageNet", folder, args.dataset)
    # The launcher sets LOCAL_WORLD_SIZE to the number of instances on this host.
    instances = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if args.dataset_cache else 0
    speaks = popdist_py.getInstanceIndex() == 0
    return ImageNet(folder, training, side, transfer, instances, speaks)


def _missing(what: str, folder: Path, *names: str) -> DataError:
    """Return the error for a folder that does not contain any of the named data sets."""
    there = sorted(place.name for place in folder.iterdir())
    shown = ", ".join(there[:3]) + (", ..." if len(there) > 3 else "")
    return DataError(
        f"{folder} holds not {what} but {shown or 'nothing'}; expected data_batch_1.bin ... and "
        "test_batch.bin (cifar-10), train.bin and test.bin (cifar-100), or train and validation "
        "with folders or TFRecords (imagenet). python examples/cnns/datasets/sample.py "
        f"{names[0]} DIR makes a small one{_below(folder, names)}"
    )


def _below(folder: Path, names: tuple[str, ...]) -> str:
    """Return a hint if a subfolder contains one of the named data sets; otherwise an empty text."""
    for place in sorted(folder.iterdir()):
        if not place.is_dir() or not os.access(place, os.R_OK | os.X_OK):
            continue
        if found := [name for name in _names_in(place) if name in names]:
            return f"; {place} holds {found[0]}: is it meant?"
    return ""


def loader(
    args: argparse.Namespace,
    options: poptorch.Options,
    images: Images,
    training: bool,
    seed: int | None = None,
) -> poptorch.DataLoader:
    """Return the loader of this instance's share of the images.

    Training reads whole steps of images, in a new order each epoch. The images of a step do not
    depend on the number of instances. ImageNet is the exception: each instance reads its own part
    of the files, unless --standard-imagenet or --deterministic is given. Validation reads every
    image once, and pads the last batch with samples that have the label -1.
    ``TrainingCheckpoints`` saves the position of the loader.

    Args:
        args: All options.
        options: The options of the model that gets the images.
        images: The images of all instances.
        training: Whether the images are for training, and not for validation.
        seed: The seed of the training order; None for that of :func:`seed_of_order`, which is
            collective.

    Raises:
        DataError: The images are too few for a step.
    """
    batch_size = args.batch_size if training else args.valid_batch_size
    batching = options.batching(training=False)
    distributed = options.Distributed
    # An epoch of a training consists of whole weight updates. It does not depend on the number of
    # updates in a call.
    split = Split(
        distributed.processId,
        distributed.numProcesses,
        batch_size * batching.num_groups,
        batching.gradient_accumulation if training else batching.num_steps,
    )
    count = len(images.data)
    call = split.instances * batch_size * batching.num_slices
    if training and count < call:
        raise DataError(
            f"{count:,} images to train on are given, one step needs {call:,} "
            f"(micro-batch {batch_size} x {batching.num_groups * split.instances} replicas x "
            f"gradient accumulation {batching.gradient_accumulation} x device iterations "
            f"{batching.device_iterations}): make one of these smaller, or give more images"
        )
    order = _shuffled(args, images.data, split, seed) if training else InOrder(count, split)
    return poptorch.DataLoader(
        options,
        images.data,
        batch_size,
        sampler=order,
        num_workers=args.workers,
        collate_fn=_as_it_is,
        auto_distributed_partitioning=False,  # the sampler divides the images among the instances
    )


def _shuffled(args: argparse.Namespace, data: Pictures, split: Split, seed: int | None) -> Shuffled:
    has_own = isinstance(data, ImageNet) and not (args.standard_imagenet or args.deterministic)
    part = data.part(split.instance, split.instances) if has_own and split.instances > 1 else None
    return Shuffled(len(data), split, seed_of_order(args) if seed is None else seed, part)


def seed_of_order(args: argparse.Namespace) -> int:
    """Return --seed, or a seed that instance 0 draws for all instances. Collective."""
    if args.seed is not None:
        return args.seed
    drawn = int(torch.randint(2**31, ()))
    return popdist_py.broadcast_object(drawn) if popdist_py.getNumInstances() > 1 else drawn


def _as_it_is(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch unchanged, because the data set already made a whole batch."""
    return batch
