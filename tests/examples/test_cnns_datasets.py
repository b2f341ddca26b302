"""The data sets of the CNN programs: what is read, in which order, and what damage is told."""

from __future__ import annotations

import io
import json
import struct
from itertools import chain, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from examples import cnn_programs as cnns
from popdist_py import poptorch

PIXELS = 3 * 32 * 32
# Trains for two epochs and saves in the middle of the first one, or goes on from there. Nobody
# gives a seed: the one that was drawn is in the checkpoint.
JOB = """\
import hashlib, json, sys
from pathlib import Path
from types import SimpleNamespace
sys.path[:0] = {paths}
import torch
import datasets, popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.checkpoint import TrainingCheckpoints

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
    def forward(self, images):
        sums = images.float().flatten(1).sum(1) * self.weight
        return sums, poptorch.identity_loss(sums, "mean")

popdist_py.init()
args = SimpleNamespace(
    dataset="cifar-10", data_dir=Path({data!r}), generated_data=False, synthetic_data=False,
    image_size=None, eight_bit_io=True, hostside_norm=True, deterministic=False, workers=0,
    standard_imagenet=False, seed=None, batch_size=4,
)
options = poptorch.DistributedOptions()
loader = datasets.loader(args, options, datasets.load(args, True), True)
module = Model()
model = poptorch.trainingModel(
    module, options, optimizer=poptorch.optim.SGD(module.parameters(), lr=0.01)
)
kept = TrainingCheckpoints("kept", model, loader)
step, _ = kept.resume()
resumed, seen = step > 0, []
while kept.epoch < 2:
    for images, _ in kept.batches():
        seen.append([hashlib.sha256(image.numpy()).hexdigest() for image in images])
        model(images)
        step += 1
        if step == 3 and not resumed:
            kept.save(step)
Path(f"{{sys.argv[1]}}-{{popdist_py.getInstanceIndex()}}.json").write_text(json.dumps(seen))
"""

pytestmark = [pytest.mark.examples, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def datasets():
    """The package, with its modules as attributes."""
    with cnns.imported():
        for name in ("cache", "cifar", "generated", "images", "order", "tfrecords"):
            cnns.module(f"datasets.{name}")
        yield cnns.module("datasets")


@pytest.fixture
def refuses(datasets):
    """Expect an error of one line that holds all of some words."""

    def check(*words, call):
        with pytest.raises(datasets.DataError) as caught:
            call()
        assert isinstance(caught.value, ValueError)
        text = str(caught.value)
        assert "\n" not in text
        assert [word for word in map(str, words) if word not in text] == [], text

    return check


def arguments(dataset="cifar-10", data_dir=None, **given):
    """What configurations.complete() returns, as far as it is of the data."""
    return SimpleNamespace(**{
        "dataset": dataset, "data_dir": data_dir, "generated_data": False,
        "synthetic_data": False, "generated_samples": None, "image_size": None,
        "eight_bit_io": False, "hostside_norm": True, "standard_imagenet": False,
        "dataset_cache": True, "workers": 0, "seed": 3, "deterministic": False, "batch_size": 4,
        "valid_batch_size": 4, **given,
    })  # fmt: skip


def options(instance=0, instances=1, replicas=2, iterations=1, accumulation=1):
    made = poptorch.Options()
    made.Distributed.configureProcessId(instance, instances)
    made.replicationFactor(replicas).deviceIterations(iterations)
    made.Training.gradientAccumulation(accumulation)
    return made


def cifar_record(labels, pixels):
    return bytes(labels) + pixels.tobytes()


def write_cifar10(folder, count=8, test=6, seed=0, names=()):
    """Write ``count`` random pictures into each file; returns pixels and labels to train on."""
    random = np.random.default_rng(seed)
    files = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    all_pixels, all_labels = [], []
    for file in files:
        size = test if file.startswith("test") else count
        pixels = random.integers(0, 256, (size, 3, 32, 32), np.uint8)
        labels = random.integers(0, 10, size)
        records = zip(labels.tolist(), pixels, strict=True)
        (folder / file).write_bytes(b"".join(cifar_record([n], image) for n, image in records))
        all_pixels.append(pixels)
        all_labels.append(labels)
    if names:
        (folder / "batches.meta.txt").write_text("\n".join(names))
    return np.concatenate(all_pixels[:5]), np.concatenate(all_labels[:5])


def jpeg(side=(24, 16), colour=(200, 30, 90), quality=95):
    file = io.BytesIO()
    ramp = np.linspace(0.2, 1, side[0])[None, :, None] * np.ones((side[1], 1, 1))
    picture = (ramp * np.array(colour)).astype(np.uint8)
    Image.fromarray(picture).save(file, "JPEG", quality=quality)
    return file.getvalue()


def write_records(folder, name, examples):
    """Write a TFRecord file of (encoded image, label from 1)."""
    from tfrecord.writer import TFRecordWriter

    writer = TFRecordWriter(str(folder / name))
    for encoded, label in examples:
        writer.write({"image/encoded": (encoded, "byte"), "image/class/label": (label, "int")})
    writer.close()
    return folder / name


def colours(count):
    return [
        (20 + 200 * number // count, 255 - 200 * number // count, 90) for number in range(count)
    ]


def write_photographs(folder, per_class=3, classes=("cat", "dog")):
    """Write folders, and TFRecords of the same pictures in the same order; returns both folders."""
    folders, records = folder / "folders", folder / "records"
    records.mkdir(parents=True)
    for part, name in (("train", "train"), ("validation", "validation")):
        examples = []
        for label, kind in enumerate(classes):
            place = folders / part / kind
            place.mkdir(parents=True)
            for number, colour in enumerate(colours(per_class)):
                encoded = jpeg((24 + 8 * label, 20 + number), colour)
                (place / f"{number}.JPEG").write_bytes(encoded)
                examples.append((encoded, label + 1))
        half = len(examples) // 2
        write_records(records, f"{name}-00000-of-00002", examples[:half])
        write_records(records, f"{name}-00001-of-00002", examples[half:])
    (records / "labels.txt").write_text("1:cat\n2:dog\n")
    return folders, records


# --- CIFAR ------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    labels=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 99)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_records_of_cifar_are_read_as_they_were_written(datasets, tmp_path_factory, labels, seed):
    folder = tmp_path_factory.mktemp("cifar-100")
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3, 32, 32), np.uint8)
    records = zip(labels, pixels, strict=True)
    (folder / "train.bin").write_bytes(
        b"".join(cifar_record(pair, image) for pair, image in records)
    )
    images = datasets.load(arguments("cifar-100", folder, eight_bit_io=True), training=True)
    read = [images.data[index] for index in range(len(images.data))]
    assert torch.equal(torch.stack([image for image, _ in read]), torch.from_numpy(pixels))
    assert [int(label) for _, label in read] == [fine for _, fine in labels]
    assert (images.num_classes, images.side) == (100, 32)


def test_files_of_cifar10_are_read_one_after_the_other_there_and_in_the_archives_folder(
    datasets, tmp_path
):
    inner = tmp_path / "cifar-10-batches-bin"
    inner.mkdir()
    pixels, labels = write_cifar10(inner)
    for folder in (tmp_path, inner):
        data = datasets.load(arguments(data_dir=folder, eight_bit_io=True), training=True).data
        images, found = data.__getitems__([(index, None) for index in range(len(data))])
        assert np.array_equal(images, pixels)
        assert np.array_equal(found, labels)
    assert len(datasets.load(arguments(data_dir=tmp_path), training=False).data) == 6
    with pytest.raises(IndexError, match="40 is asked for, 0 to 39"):
        data[40]


@pytest.mark.parametrize("cut", [0, 1, 3072, 3073 + 1, 8 * 3073 - 1])
def test_file_that_is_cut_off_is_told(datasets, tmp_path, refuses, cut):
    write_cifar10(tmp_path)
    file = tmp_path / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:cut])
    refuses(
        file, f"{cut:,} bytes", "3,073", "unpack",
        call=lambda: datasets.load(arguments(data_dir=tmp_path), training=True),
    )  # fmt: skip
    datasets.load(arguments(data_dir=tmp_path), training=False)  # does not read it


@pytest.mark.parametrize(("label", "is_accepted"), [(9, True), (10, False), (255, False)])
def test_label_out_of_range_is_told_with_its_record(
    datasets, tmp_path, refuses, label, is_accepted
):
    write_cifar10(tmp_path)
    file = tmp_path / "test_batch.bin"
    data = bytearray(file.read_bytes())
    data[2 * 3073] = label

    def load():
        return datasets.load(arguments(data_dir=tmp_path), training=False)

    file.write_bytes(data)
    if is_accepted:
        assert int(load().data[2][1]) == label
    else:
        refuses(file, "record 2", f"label {label}", "0 to 9", call=load)


def test_coarse_label_out_of_range_is_told_too(datasets, tmp_path, refuses):
    record = cifar_record([20, 5], np.zeros(PIXELS, np.uint8))
    (tmp_path / "train.bin").write_bytes(record)
    refuses(
        "train.bin", "record 0", "label 20", "0 to 19",
        call=lambda: datasets.load(arguments("cifar-100", tmp_path), training=True),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "training"), [("test_batch.bin", False), ("data_batch_4.bin", True)]
)
def test_missing_file_is_told(datasets, tmp_path, refuses, missing, training):
    write_cifar10(tmp_path)
    (tmp_path / missing).unlink()
    refuses(
        tmp_path, missing, "unpack",
        call=lambda: datasets.load(arguments(data_dir=tmp_path), training),
    )  # fmt: skip


def test_shifts_and_mirrors_follow_from_the_key_alone(datasets, tmp_path):
    pixels, _ = write_cifar10(tmp_path)
    data = datasets.load(arguments(data_dir=tmp_path, eight_bit_io=True), training=True).data
    samples = [(number % 40, 7919 * number) for number in range(200)]
    images = data.__getitems__(samples)[0].numpy()
    backwards = data.__getitems__(samples[::-1])[0].numpy()[::-1]
    assert np.array_equal(images, backwards)
    bordered = np.pad(pixels, ((0, 0), (0, 0), (4, 4), (4, 4)))
    seen = set()
    for (index, _), image in zip(samples, images, strict=True):
        found = [
            (down, right, turn)
            for turn in (1, -1)
            for down in range(9)
            for right in range(9)
            if np.array_equal(
                image, bordered[index, :, down : down + 32, right : right + 32][..., ::turn]
            )
        ]
        assert len(found) == 1
        seen.update(found)
    rows, columns, turns = (set(values) for values in zip(*seen, strict=True))
    assert rows == columns == set(range(9))
    assert turns == {1, -1}


def augmented(datasets, args):
    return datasets.load(args, training=True).data.__getitems__([(0, 37 * n) for n in range(40)])[0]


@pytest.mark.parametrize(("dataset", "names"), [("cifar-10", 10), ("imagenet", 2)])
def test_written_digits_are_not_mirrored(datasets, tmp_path, dataset, names):
    if dataset == "imagenet":
        file = write_photographs(tmp_path)[1] / "labels.txt"
    else:
        write_cifar10(tmp_path)
        file = tmp_path / "batches.meta.txt"
    size = 16 if dataset == "imagenet" else None
    args = arguments(dataset, file.parent, eight_bit_io=True, image_size=size)
    pictures = augmented(datasets, args)
    file.write_text("".join(f"digit-{number}\n" for number in range(names)))
    digits = augmented(datasets, args)
    turned = [torch.equal(one, other.flip(-1)) for one, other in zip(pictures, digits, strict=True)]
    alike = [torch.equal(one, other) for one, other in zip(pictures, digits, strict=True)]
    assert 8 < sum(turned) < 32
    assert sum(turned) + sum(alike) == len(digits)


# --- what is transferred ----------------------------------------------------------------------


def test_images_are_normalised_on_the_host_or_left_to_the_device(datasets, tmp_path):
    pixels, _ = write_cifar10(tmp_path)
    sample = [(index, None) for index in range(40)]

    def load(**given):
        images = datasets.load(arguments(data_dir=tmp_path, **given), training=True)
        return images, images.data.__getitems__(sample)[0]

    images, normalised = load()
    assert images.normalised_on_host
    mean, std = (np.array(values)[:, None, None] for values in (images.mean, images.std))
    expected = torch.from_numpy((pixels / 255 - mean) / std)
    assert torch.allclose(normalised.double(), expected, atol=1e-6)
    assert normalised.dtype == torch.float32
    for eight_bits, dtype in ((True, torch.uint8), (False, torch.float32)):
        images, plain = load(eight_bit_io=eight_bits, hostside_norm=False)
        assert not images.normalised_on_host
        assert plain.dtype == dtype
        assert torch.equal(plain.byte(), torch.from_numpy(pixels))
    images, plain = load(eight_bit_io=True)
    assert not images.normalised_on_host
    assert 4 * plain.nbytes == normalised.nbytes


def test_generated_images_follow_from_the_seed_and_cost_bounded_memory(datasets):
    given = {"generated_data": True, "generated_samples": 300, "image_size": 64}
    first, again, other, validation = (
        datasets.load(arguments("imagenet", seed=seed, **given), training).data
        for seed, training in ((1, True), (1, True), (2, True), (1, False))
    )
    assert torch.equal(first[7][0], again[7][0])
    assert not torch.equal(first[7][0], other[7][0])
    assert not torch.equal(first[7][0], validation[7][0])
    assert len(first) == 300
    assert first._images.shape[1:] == (3, 64, 64)
    big = datasets.load(arguments("imagenet", generated_data=True), training=True).data
    assert len(big) == 1_281_167
    assert big._images.nbytes <= 64 * 2**20
    assert torch.equal(big[0][0], big[len(big._images)][0])
    images, labels = big.__getitems__([(0, 5), (-1, None)])
    assert (images.shape, int(labels[1])) == ((2, 3, 224, 224), -1)
    cifar = datasets.load(arguments("cifar-100", synthetic_data=True), training=False)
    assert (len(cifar.data), cifar.num_classes, cifar.side) == (10_000, 100, 32)


# --- order ------------------------------------------------------------------------------------

splits = st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 3), st.integers(1, 4))


def orders(datasets, made, instances, replicas, rows):
    """Return one epoch of each instance; ``replicas`` is of all of them, an image for each."""
    return [
        list(made(datasets.order.Split(instance, instances, replicas // instances, rows)))
        for instance in range(instances)
    ]


@given(count=st.integers(0, 200), replicas=st.integers(1, 3), rows=st.integers(1, 4),
       seed=st.integers(0, 2**70))  # fmt: skip
def test_steps_hold_the_same_images_for_any_number_of_instances(
    datasets, count, replicas, rows, seed
):
    replicas *= 4

    def made(split):
        return datasets.order.Shuffled(count, split, seed)

    (alone,) = orders(datasets, made, 1, replicas, rows)
    assert len(alone) == count // (replicas * rows) * replicas * rows
    assert len({index for index, _ in alone}) == len(alone)
    assert all(0 <= index < count and 0 <= key < 2**64 for index, key in alone)
    for instances in (2, 4):
        shares = orders(datasets, made, instances, replicas, rows)
        width = replicas // instances
        together = [
            sample
            for row in range(len(alone) // replicas)
            for share in shares
            for sample in share[row * width : (row + 1) * width]
        ]
        assert together == alone


@given(count=st.integers(0, 200), instances=st.integers(1, 4), width=st.integers(1, 5),
       rows=st.integers(1, 4))  # fmt: skip
def test_every_image_counts_once_in_validation(datasets, count, instances, width, rows):
    step = instances * width * rows

    def made(split):
        return datasets.order.InOrder(count, split)

    shares = orders(datasets, made, instances, width * instances, rows)
    assert {len(share) for share in shares} == {-(-count // step) * width * rows}
    indices = [index for share in shares for index, key in share if key is None]
    assert sorted(index for index in indices if index >= 0) == list(range(count))
    assert set(indices) <= {-1, *range(count)}


@given(count=st.integers(0, 200), instances=st.integers(2, 4), width=st.integers(1, 3),
       rows=st.integers(1, 3))  # fmt: skip
def test_parts_of_instances_have_nothing_in_common_and_equal_lengths(
    datasets, count, instances, width, rows
):
    contiguous = [range(count * n // instances, count * (n + 1) // instances)
                  for n in range(instances)]  # fmt: skip
    strided = [range(n, count, instances) for n in range(instances)]
    for parts in (contiguous, strided):
        shares = []
        for instance, part in enumerate(parts):
            split = datasets.order.Split(instance, instances, width, rows)
            order = datasets.order.Shuffled(count, split, 5, part)
            shares.append({index for index, _ in order})
            assert len(shares[-1]) == len(order) == count // split.step * width * rows
            assert shares[-1] <= set(part)
        assert sum(map(len, shares)) == len(set().union(*shares))


def test_epochs_differ_in_order_and_keys(datasets):
    split = datasets.order.Split(0, 1, 4, 2)
    order = datasets.order.Shuffled(41, split, seed=1)
    first, second = dict(order), dict(order)
    assert (len(order), len(first)) == (40, 40)
    assert list(first) != list(second)
    assert not set(first.values()) & set(second.values())
    assert dict(datasets.order.Shuffled(41, split, seed=1)) == first
    assert dict(datasets.order.Shuffled(41, split, seed=2)) != first


def test_numbers_from_keys_are_spread_evenly(datasets):
    numbers = datasets.images.uniform(np.arange(20_000, dtype=np.uint64), 4)
    assert numbers.shape == (20_000, 4)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert np.allclose(
        np.quantile(numbers, [0.25, 0.5, 0.75], axis=0).T, [0.25, 0.5, 0.75], atol=0.02
    )
    assert np.abs(np.corrcoef(numbers.T) - np.eye(4)).max() < 0.03


# --- loaders ----------------------------------------------------------------------------------


def batches(loader):
    return [(images.clone(), labels.clone()) for images, labels in loader]


def same(left, right):
    return len(left) == len(right) and all(
        torch.equal(a, b) for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip


def make_loader(datasets, folder, training=True, given=(), **opts):
    args = arguments(data_dir=folder, **dict(given))
    images = datasets.load(args, training)
    return datasets.loader(args, options(**opts), images, training)


def test_instances_together_train_on_what_one_would(datasets, tmp_path):
    write_cifar10(tmp_path)
    (alone,) = [batches(make_loader(datasets, tmp_path, replicas=2, iterations=2))]
    both = [
        batches(make_loader(datasets, tmp_path, instance=n, instances=2, replicas=1, iterations=2))
        for n in range(2)
    ]
    assert len(alone) == 40 // 16
    for step, (images, _) in enumerate(alone):
        halves = [share[step][0].view(2, 4, 3, 32, 32) for share in both]
        assert torch.equal(torch.cat(halves, 1).reshape(images.shape), images)


def test_validation_is_filled_up_with_labels_that_do_not_count(datasets, tmp_path):
    write_cifar10(tmp_path)
    labels = [
        torch.cat([found for _, found in make_loader(
            datasets, tmp_path, training=False, instance=n, instances=2, replicas=1
        )])
        for n in range(2)
    ]  # fmt: skip
    assert [len(found) for found in labels] == [4, 4]
    assert int((torch.cat(labels) >= 0).sum()) == 6


def test_too_few_images_for_a_step_are_told(datasets, tmp_path, refuses):
    write_cifar10(tmp_path)
    refuses(
        "40 images", "needs 96", "micro-batch 4", "4 replicas", "gradient accumulation 2",
        "device iterations 3",
        call=lambda: make_loader(datasets, tmp_path, instances=2, iterations=3, accumulation=2),
    )  # fmt: skip


# Instances agree on a seed of their own only where the launcher connects them.
@pytest.mark.parametrize(("instances", "seed"), [(1, 3), (1, None), (2, 3)])
@pytest.mark.parametrize("done", [0, 3, 5])
def test_loader_goes_on_with_the_same_pictures(datasets, tmp_path, instances, done, seed):
    write_cifar10(tmp_path)
    given = {"seed": seed}
    for instance in range(instances):
        place = {"instance": instance, "instances": instances, "replicas": 2 // instances}
        torch.manual_seed(1)
        loader = make_loader(datasets, tmp_path, given=given, **place)
        batches(loader)
        epoch = iter(loader)
        before = [next(epoch) for _ in range(done)]
        state = loader.state_dict()
        expected = [*epoch, *loader]
        assert len(before) + len(expected) == 2 * len(loader)
        torch.manual_seed(2)  # a run that goes on draws another seed; the saved one counts
        resumed = make_loader(datasets, tmp_path, given=given, **place)
        resumed.load_state_dict(state)
        assert same([*batches(resumed), *batches(resumed)], expected)


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_checkpoint_of_a_job_goes_on_with_the_same_pictures(tmp_path, poprun, script):
    data = tmp_path / "data"
    data.mkdir()
    write_cifar10(data)
    program = script(JOB.format(paths=[str(cnns.FOLDER), str(cnns.FOLDER.parent)], data=str(data)))

    def seen(name, instances):
        """Return for each step the images, whichever instance read them."""
        job = ("-n", str(instances), "--num-replicas", "2")
        done = poprun(*job, program, name, env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        shares = [
            json.loads((tmp_path / f"{name}-{instance}.json").read_text())
            for instance in range(instances)
        ]
        return [sorted(chain(*step)) for step in zip(*shares, strict=True)]

    whole = seen("first", 2)
    assert len(whole) == 2 * 5
    epochs = [set(chain(*steps)) for steps in (whole[:5], whole[5:])]
    assert [len(epoch) for epoch in epochs] == [40, 40]
    assert len(epochs[0] | epochs[1]) > 60  # shifted in other ways, but for some by chance
    for name, instances in (("alike", 2), ("alone", 1)):  # also with another number of instances
        assert seen(name, instances) == whole[3:]


def test_workers_load_the_same_and_their_errors_are_one_line(datasets, tmp_path, refuses):
    folders, _ = write_photographs(tmp_path, per_class=8)
    given = {"dataset": "imagenet", "image_size": 16}
    alone = make_loader(datasets, folders, given=given, replicas=1)
    workers = make_loader(datasets, folders, given={**given, "workers": 2}, replicas=1)
    for _ in range(3):  # the later ones from the cache, which workers share
        assert same(batches(alone), batches(workers))
    assert len(workers.dataset._cache) == 16
    damaged = folders / "train" / "cat" / "3.JPEG"
    damaged.write_bytes(b"no image")
    refuses(
        damaged, "cannot be decoded",
        call=lambda: batches(
            make_loader(datasets, folders, given={**given, "workers": 1}, replicas=1)
        ),
    )  # fmt: skip
    del workers


# --- ImageNet ---------------------------------------------------------------------------------


def test_folders_and_records_give_the_same_pictures_with_and_without_cache(datasets, tmp_path):
    samples = [(number % 6, 31 * number) for number in range(12)]
    read = []
    for folder in write_photographs(tmp_path):
        for cache in (True, False):
            args = arguments(
                "imagenet", folder, image_size=16, dataset_cache=cache, eight_bit_io=True
            )
            images = datasets.load(args, training=True)
            assert (images.num_classes, images.side, len(images.data)) == (2, 16, 6)
            read += [images.data.__getitems__(samples) for _ in range(2)]
    assert all(same([read[0]], [other]) for other in read[1:])
    assert read[0][1].tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert read[0][0].shape == (12, 3, 16, 16)


def test_validation_takes_the_middle(datasets, tmp_path):
    picture = np.zeros((32, 64, 3), np.uint8)
    picture[:, 16:48] = 255  # white, black at both sides
    place = tmp_path / "val" / "cat"
    for folder in (place, tmp_path / "train" / "cat"):
        folder.mkdir(parents=True)
        Image.fromarray(picture).save(folder / "wide.png")
    args = arguments("imagenet", tmp_path, image_size=28, eight_bit_io=True)
    image, _ = datasets.load(args, training=False).data[0]
    assert image.shape == (3, 28, 28)
    assert int(image.min()) == 255
    for place in (tmp_path / "val" / "cat", tmp_path / "train" / "cat"):
        Image.fromarray(picture.transpose(1, 0, 2)).save(place / "high.png")
    image, _ = datasets.load(args, training=False).data[0]
    assert int(image.min()) == 255
    (tmp_path / "train" / "cat" / "high.png").unlink()
    data = datasets.load(args, training=True).data
    crops, _ = data.__getitems__([(0, key) for key in range(100)])
    white = (crops == 255).float().mean((1, 2, 3))
    assert len(white.unique()) > 20  # crops of many sizes and places
    assert float((crops[:, 0, 14, 0] < crops[:, 0, 14, -1]).float().mean()) > 0.1
    assert float((crops[:, 0, 14, 0] > crops[:, 0, 14, -1]).float().mean()) > 0.1


def test_picture_that_is_too_oblong_for_a_crop_gives_squares(datasets):
    box = cnns.module("datasets.imagenet")._box
    draws = datasets.images.uniform(np.arange(50, dtype=np.uint64), 23)
    for height, width in ((8, 4000), (4000, 8), (1, 1)):
        for numbers in draws:
            left, top, w, h = box(height, width, numbers)
            assert 0 < w <= width - left
            assert 0 < h <= height - top


@pytest.mark.parametrize("damage", ["text", "cut", "empty"])
def test_image_that_cannot_be_decoded_is_told_with_its_file(datasets, tmp_path, refuses, damage):
    folders, records = write_photographs(tmp_path)
    whole = jpeg((64, 64))
    content = {"text": b"no image", "cut": whole[: len(whole) // 2], "empty": b""}[damage]
    file = folders / "train" / "dog" / "1.JPEG"
    file.write_bytes(content)
    load = datasets.load(arguments("imagenet", folders, image_size=16), training=True).data
    refuses(file, "cannot be decoded", call=lambda: load[4])
    write_records(records, "train-00000-of-00002", [(content, 1), (jpeg(), 2)])
    load = datasets.load(arguments("imagenet", records, image_size=16), training=True).data
    refuses("train-00000-of-00002: record 0", "cannot be decoded", call=lambda: load[0])


def test_folders_that_are_none_of_a_data_set_are_told(datasets, tmp_path, refuses):
    folders, _ = write_photographs(tmp_path)

    def load(training=True):
        return datasets.load(arguments("imagenet", folders, image_size=16), training)

    (folders / "train" / "bird").mkdir()
    refuses(folders / "train" / "bird", "no images", call=load)
    (folders / "train" / "bird" / "1.jpg").write_bytes(jpeg())
    assert load().num_classes == 3
    refuses("bird", "same classes", call=lambda: load(training=False))
    (folders / "validation").rename(folders / "other")
    refuses("no validation data", call=lambda: load(training=False))
    (folders / "empty" / "train").mkdir(parents=True)
    refuses(
        "no folders", "each class",
        call=lambda: datasets.load(arguments("imagenet", folders / "empty"), training=True),
    )  # fmt: skip


# --- TFRecords --------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    """A file of two records, small enough to damage each of its bytes."""
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    return write_records(tmp_path, "train-00000-of-00001", [(b"\xff" * 40, 1), (b"\x01" * 30, 2)])


def read_all(datasets, file):
    records = datasets.tfrecords.Records(file.parent, [file])
    return [records.read(index)[:2] for index in range(len(records))]


@settings(max_examples=20)
@given(examples=st.lists(st.tuples(st.binary(), st.integers(1, 1000)), min_size=2, max_size=5))
def test_records_are_read_as_they_were_written_and_as_the_package_reads_them(
    datasets, tmp_path_factory, examples
):
    from tfrecord.reader import tfrecord_loader

    file = write_records(tmp_path_factory.mktemp("one"), "train-00000-of-00001", examples)
    found = read_all(datasets, file)
    assert found == [(encoded, label - 1) for encoded, label in examples]
    assert read_all(datasets, file) == found  # by the index
    index = f"{file}.tfindex"
    for begin, end in pairwise([0, *np.loadtxt(index, np.int64, ndmin=2).sum(1)]):
        assert end > begin
    package = list(tfrecord_loader(str(file), index, {"image/class/label": "int"}, (0, 1)))
    assert [int(each["image/class/label"][0]) for each in package] == [n for _, n in examples]


@pytest.mark.parametrize("indexed", [False, True])
def test_damage_of_any_byte_is_told_with_file_and_record(datasets, small, indexed):
    whole = small.read_bytes()
    second = read_index(datasets, small)[1, 0]
    index = small.with_name(f"{small.name}.tfindex")
    for offset in range(len(whole)):
        damaged = bytearray(whole)
        damaged[offset] ^= 0x10
        small.write_bytes(damaged)
        if not indexed:
            index.unlink(missing_ok=True)
        with pytest.raises(datasets.DataError) as caught:
            read_all(datasets, small)
        assert f"{small}: record {int(offset >= second)} " in str(caught.value), offset
        assert "\n" not in str(caught.value)


def read_index(datasets, file):
    return datasets.tfrecords.index_of(file)


def test_file_that_is_cut_off_anywhere_is_told(datasets, small):
    whole = small.read_bytes()
    second = read_index(datasets, small)[1, 0]
    for length in range(len(whole)):
        small.write_bytes(whole[:length])  # the index of the whole file stays: it does not fit
        if length == second:
            assert len(read_all(datasets, small)) == 1  # a whole file, of one record
            continue
        with pytest.raises(datasets.DataError) as caught:
            read_all(datasets, small)
        assert str(small) in str(caught.value)
        assert "copy it again" in str(caught.value)


@pytest.mark.parametrize(
    "index",
    ["", "no index\n", "0 99999\n", "0\n", "1.5 2\n", "{2} {3}\n", "0 8\n{2} {3}\n", "0 {1}\n"],
)
def test_index_that_does_not_fit_is_made_again(datasets, small, index):
    kept = small.with_name(f"{small.name}.tfindex")
    places = read_index(datasets, small)
    made = kept.read_text()
    kept.write_text(index.format(*places.ravel()))
    assert np.array_equal(read_index(datasets, small), places)
    assert kept.read_text() == made
    assert not list(small.parent.glob(".*"))


def test_index_of_other_records_of_the_same_size_is_told(datasets, small, refuses):
    first, second = read_index(datasets, small).tolist()
    kept = small.with_name(f"{small.name}.tfindex")
    kept.write_text(f"0 {first[1] - 4}\n{second[0] - 4} {second[1] + 4}\n")
    refuses(small, "record 0", "remove", kept.name, call=lambda: read_all(datasets, small))


@pytest.mark.parametrize("label", [0, 3, -1])
def test_label_that_no_class_has_is_told(datasets, small, refuses, label):
    write_records(small.parent, small.name, [(b"x", label)])
    refuses(f"record 0 has the label {label}", "1 to 2", call=lambda: read_all(datasets, small))


@pytest.mark.parametrize(
    "content", [b"\xff\xff", b"", {"label": (1, "int")},
                {"image/encoded": (1, "int"), "image/class/label": (1, "int")}],
    ids=["no example", "nothing", "other features", "other types"],
)  # fmt: skip
def test_record_of_something_else_is_told(datasets, small, refuses, content):
    from tfrecord.writer import TFRecordWriter

    data = content if isinstance(content, bytes) else TFRecordWriter.serialize_tf_example(content)
    length = struct.pack("<Q", len(data))
    checksum = TFRecordWriter.masked_crc
    small.write_bytes(length + checksum(length) + data + checksum(data))
    refuses(small, "record 0", "image/encoded", call=lambda: read_all(datasets, small))


def test_missing_file_of_records_is_told(datasets, tmp_path, refuses):
    _, records = write_photographs(tmp_path)
    (records / "train-00000-of-00002").unlink()
    refuses(
        records, "train-00000-of-00002",
        call=lambda: datasets.load(arguments("imagenet", records, image_size=16), training=True),
    )  # fmt: skip


# --- cache ------------------------------------------------------------------------------------


def test_cache_keeps_what_fits_and_says_once_when_it_is_full(datasets, capsys, monkeypatch):
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    cache = datasets.cache.Cache(200, most=4096)
    for index in range(200):
        cache.put(index, picture + index, label=index)
        cache.put(index, picture, label=0)  # is there already
    assert len(cache) == 4096 // 48
    kept, label = cache.get(7)
    assert np.array_equal(kept, picture + 7)
    assert (label, cache.get(199)) == (7, None)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{4096 // 48} images" in error
    short = SimpleNamespace(available=9, total=100)
    monkeypatch.setattr(datasets.cache.psutil, "virtual_memory", lambda: short)
    cache = datasets.cache.Cache(10, most=4096)
    cache.put(0, picture, label=1)
    assert cache.get(0) is None
    assert "no room for more: 0 images" in capsys.readouterr().err
    cache = datasets.cache.Cache(10, most=2**62)  # more than any system promises
    assert cache.get(0) is None


# --- which data set, and where ----------------------------------------------------------------


def test_data_set_is_inferred_from_its_files(datasets, tmp_path, refuses):
    folders, records = write_photographs(tmp_path / "imagenet")
    ten, hundred = tmp_path / "ten", tmp_path / "hundred"
    for place, file in ((ten, "data_batch_1.bin"), (hundred / "cifar-100-binary", "train.bin")):
        place.mkdir(parents=True)
        (place / file).touch()
    found = [datasets.infer(folder) for folder in (ten, hundred, folders, records)]
    assert found == ["cifar-10", "cifar-100", "imagenet", "imagenet"]
    (ten / "train.bin").touch()
    refuses(ten, "cifar-10 and cifar-100", "--dataset", call=lambda: datasets.infer(ten))


def test_folder_without_data_is_told(datasets, tmp_path, refuses):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "empty").mkdir()
    for name in datasets.DATASETS:
        for place, there in ((tmp_path, "cifar-10-batches-py"), (tmp_path / "empty", "nothing")):
            refuses(
                place, there, "sample.py", "data_batch_1.bin", name,
                call=lambda name=name, place=place: datasets.load(arguments(name, place), True),
            )  # fmt: skip
    refuses("sample.py", call=lambda: datasets.infer(tmp_path))
    (tmp_path / "photographs" / "train").mkdir(parents=True)
    deeper = f"{tmp_path / 'photographs'} holds imagenet: is it meant?"
    refuses(tmp_path, deeper, call=lambda: datasets.infer(tmp_path))
    refuses(deeper, call=lambda: datasets.load(arguments("imagenet", tmp_path), True))
    with pytest.raises(datasets.DataError) as other:
        datasets.load(arguments("cifar-100", tmp_path), True)
    assert "is it meant?" not in str(other.value)
    (tmp_path / "photographs" / "train").rmdir()
    none = tmp_path / "none"
    refuses(none, "not a folder", call=lambda: datasets.load(arguments(data_dir=none), True))
    write_cifar10(tmp_path)
    refuses(
        "--image-size 64", "32",
        call=lambda: datasets.load(arguments(data_dir=tmp_path, image_size=64), training=True),
    )  # fmt: skip


# --- the sample -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cifar-10", "cifar-100", "imagenet", "imagenet-tfrecords"])
def test_sample_is_a_data_set_and_is_made_once(datasets, tmp_path, capsys, name):
    main = cnns.module("datasets.sample").main
    words = [name, str(tmp_path), "--training", "104", "--test", "101"]
    main(words)
    place = tmp_path / capsys.readouterr().out.split(" is in ")[1].strip()
    kind = name.removesuffix("-tfrecords")
    assert datasets.infer(place) == kind
    size = None if "cifar" in kind else 32
    for training, count in ((True, 104), (False, 101)):
        images = datasets.load(arguments(kind, place, image_size=size), training)
        assert len(images.data) == count
        assert not getattr(images.data, "_mirrors", False)
        labels = images.data.__getitems__([(index, None) for index in range(count)])[1]
        assert set(labels.tolist()) <= set(range(images.num_classes))
        assert len(labels.unique()) >= 10
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "there already" in error
    assert error.count("\n") == 1
