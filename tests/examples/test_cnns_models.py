"""The networks of the CNN programs: sizes, scores, norms, formats, losses, and cuts over IPUs."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.models import placement_of

from examples import cnn_programs as cnns
from popdist_py import poptorch
from popdist_py.popart import RecomputationType

ON_HOST = SimpleNamespace(mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.3), normalised_on_host=True)
ON_DEVICE = SimpleNamespace(**vars(ON_HOST) | {"normalised_on_host": False})
SIZES = [
    ("resnet", "cifar-10", "8 14 20 32 44 56"),
    ("resnet", "cifar-100", "8 14 20 32 44 56"),
    ("resnet", "imagenet", "18 34 50"),
    ("resnext", "cifar-10", "11 29"),
    ("resnext", "cifar-100", "11 29"),
    ("resnext", "imagenet", "50"),
    ("efficientnet", "cifar-10", "B0"),
    ("efficientnet", "cifar-100", "B0"),
    ("efficientnet", "imagenet", "B0"),
]

pytestmark = [pytest.mark.examples, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def modules():
    with cnns.imported():
        yield


def models():
    return cnns.module("models")


def arguments(*argv, **changes):
    """Return arguments with what configurations would have filled in, for small images."""
    parser = cnns.module("arguments").make_parser("", "")
    args = parser.parse_args(["--precision", "32.32", *argv])
    args.dataset = args.dataset or "cifar-10"
    args.model_size = args.model_size or "8"
    args.norm = args.norm or "batch"
    args.batch_size = args.batch_size or 2
    args.image_size = args.image_size or 16
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def made(*argv, classes=10, **changes):
    torch.manual_seed(1)
    return models().create(arguments(*argv, **changes), classes)


def count(network):
    return sum(weight.numel() for weight in network.parameters())


# --- Networks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85)])
def test_a_resnet_for_cifar_has_the_weights_and_layers_of_the_paper(size, millions):
    network = made("--model-size", str(size))
    assert round(count(network) / 1e6, 2) == millions
    layers = [p for p in network.modules() if isinstance(p, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(layers) == size


def test_resnext_29_has_the_weights_of_the_paper():
    network = made("--model", "resnext", "--model-size", "29")
    assert round(count(network) / 1e6, 1) == 34.4


def test_a_resnet_for_cifar_computes_what_its_formula_says():
    network = made().eval()
    weights = network.state_dict()
    x = torch.randn(2, 3, 16, 16)

    def conv(x, name, stride=1):
        return F.conv2d(x, weights[f"{name}.weight"], stride=stride, padding=1)

    def norm(x, name):
        names = ("running_mean", "running_var", "weight", "bias")
        return F.batch_norm(x, *(weights[f"{name}.{part}"] for part in names))

    expected = F.relu(norm(conv(x, "conv1"), "bn1"))
    for stage in (1, 2, 3):
        stride = 1 if stage == 1 else 2
        here = f"layer{stage}.0."
        out = F.relu(norm(conv(expected, here + "conv1", stride), here + "bn1"))
        out = norm(conv(out, here + "conv2"), here + "bn2")
        short = F.avg_pool2d(expected, 1, stride)
        zeros = torch.zeros_like(out[:, short.shape[1] :])
        expected = F.relu(out + torch.cat([short, zeros], 1))
    expected = F.linear(expected.mean((2, 3)), weights["fc.weight"], weights["fc.bias"])
    torch.testing.assert_close(network(x), expected)


@pytest.mark.parametrize(
    ("model", "size", "theirs"),
    [
        ("resnet", "18", "resnet18"),
        pytest.param("resnet", "50", "resnet50", marks=pytest.mark.long),
        ("resnext", "50", "resnext50_32x4d"),
        ("efficientnet", "b0", "efficientnet_b0"),
    ],
)
def test_torchvisions_weights_give_torchvisions_scores(model, size, theirs):
    torchvision = importlib.import_module("torchvision")
    reference = torchvision.models.get_model(theirs, num_classes=1000).eval()
    for name, value in reference.state_dict().items():
        if "running" in name:  # fresh statistics would hide a norm in the wrong place
            value.uniform_(0.5, 1.5)
    network = made("--model", model, "--model-size", size, "--dataset", "imagenet", classes=1000)
    assert count(network) == count(reference)
    network.load_state_dict(reference.state_dict())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(network.eval()(x), reference(x), rtol=1e-4, atol=1e-4)


def test_every_block_of_a_network_for_imagenet_begins_as_its_shortcut():
    network = made("--model-size", "18", "--dataset", "imagenet")
    x = torch.rand(2, 64, 8, 8)
    assert torch.equal(network.layer1[0](x), x)
    assert not torch.equal(made().layer1[0](x[:, :16]), x[:, :16])  # a network for CIFAR's does not


def test_sizes_are_those_of_the_data_set():
    for model, dataset, sizes in SIZES:
        assert models().sizes(model, dataset) == tuple(sizes.split())


@pytest.mark.parametrize(
    ("model", "dataset", "size", "norm"),
    [
        *(
            (model, dataset, size, "--batch-norm")
            for model, dataset, sizes in SIZES
            for size in sizes.split()
            if dataset != "cifar-100"  # the networks are those of CIFAR-10
        ),
        ("resnet", "cifar-10", "8", "--group-norm"),
        ("resnext", "cifar-10", "11", "--group-norm"),
        ("efficientnet", "cifar-10", "B0", "--group-norm"),
    ],
)
def test_every_size_gives_scores_of_small_images(model, dataset, size, norm):
    words = ("--model", model, "--model-size", size, "--dataset", dataset, norm)
    network = made(*words, classes=7, image_size=32)
    scores = network(torch.randn(2, 3, 32, 32))
    assert scores.shape == (2, 7)
    assert scores.isfinite().all()


def test_names_for_logs():
    given = [("resnet", "20", "RN20"), ("resnext", "50", "RNX50"), ("efficientnet", "b0", "ENB0")]
    for model, size, name in given:
        assert models().label(arguments("--model", model, "--model-size", size)) == name


@pytest.mark.parametrize(("model", "dataset", "sizes"), SIZES)
def test_another_size_is_an_error_that_lists_the_sizes(model, dataset, sizes):
    args = arguments("--model", model, "--model-size", "19", "--dataset", dataset)
    with pytest.raises(ValueError, match=", ".join(sizes.split())) as caught:
        models().create(args, 10)
    assert "--model-size 19" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_torchvision_is_not_imported_for_a_resnet():
    program = "import sys, arguments, models; sys.exit('torchvision' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=cnns.FOLDER, check=True, timeout=110)


# --- Norms and formats ----------------------------------------------------------------------------


def test_momentum_of_batch_norms_is_the_share_that_stays():
    network = made("--BN-momentum", "0.75")
    x = torch.randn(4, 3, 16, 16)
    network(x)
    new = network.conv1(x).mean((0, 2, 3))
    torch.testing.assert_close(network.bn1.running_mean, 0.25 * new)


def test_a_momentum_that_keeps_everything_is_an_error():
    with pytest.raises(ValueError, match=r"--BN-momentum 1.5 is given"):
        made("--BN-momentum", "1.5")


@given(st.integers(1, 1280), st.integers(1, 64))
def test_groups_are_the_most_that_divide_the_channels(channels, asked):
    norms = cnns.module("models.norms")
    norm = norms.make(SimpleNamespace(norm="group", groups=asked))(channels)
    divisors = [n for n in range(1, channels + 1) if channels % n == 0 and n <= asked]
    assert norm.num_groups == divisors[-1]


@pytest.mark.parametrize(
    ("words", "halvings"),
    [
        ((), 2),
        (("--model", "resnext", "--model-size", "11"), 2),
        (("--model-size", "18", "--dataset", "imagenet"), 5),
        (("--model", "efficientnet", "--model-size", "B0"), 4),
    ],
)
def test_a_batch_norm_of_one_value_is_refused_before_training(words, halvings):
    side = 2**halvings
    with pytest.raises(ValueError, match=f"--image-size {side + 1}"):
        made(*words, batch_size=1, image_size=side)
    network = made(*words, batch_size=1, image_size=side + 1)
    assert network(torch.randn(1, 3, side + 1, side + 1)).isfinite().all()
    made(*words, "--group-norm", batch_size=1, image_size=side)


@pytest.mark.parametrize("precision", ["16.16", "16.32", "32.32"])
def test_weights_have_the_format_of_the_precision_and_statistics_stay_float(precision):
    network = made("--precision", precision)
    weights = {weight.dtype for weight in network.parameters()}
    assert weights == {torch.float16 if precision == "16.16" else torch.float32}
    assert network.bn1.running_mean.dtype == torch.float32


# --- Images, losses, answers ----------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["16.16", "32.32"])
def test_the_device_normalises_as_the_host_does(precision):
    steps = cnns.module("models.steps")
    args = arguments("--precision", precision)
    pixels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (ON_HOST.mean, ON_HOST.std))
    expected = (pixels / 255 - mean) / std
    on_device = steps.Images(args, ON_DEVICE)(pixels)
    on_host = steps.Images(args, ON_HOST)(expected)
    assert on_device.dtype == on_host.dtype
    tolerance = 4e-3 if precision == "16.16" else 1e-5
    torch.testing.assert_close(on_device, on_host, rtol=0, atol=tolerance)


class Given(torch.nn.Module):
    """A network whose scores are its only weights."""

    def __init__(self, scores):
        super().__init__()
        self.scores = torch.nn.Parameter(scores)

    def forward(self, images):
        return self.scores


def trained(scores, labels, *argv):
    """Return right answers, loss and the gradient of the scores."""
    network = Given(scores)
    module = models().ForTraining(network, arguments(*argv), ON_HOST)
    right, loss = module(torch.zeros(len(labels), 3, 1, 1), labels)
    loss.backward()
    return right, loss, network.scores.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_over_real_images(smoothing):
    scores, labels = torch.randn(6, 5), torch.tensor([3, -1, 0, -1, 4, 2])
    real = labels >= 0
    right, loss, grad = trained(scores, labels, "--label-smoothing", str(smoothing))
    chances = torch.full((4, 5), smoothing / 5)
    chances[range(4), labels[real]] += 1 - smoothing
    expected = -(chances * scores[real].log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss, expected)
    assert right.item() == (scores[real].argmax(1) == labels[real]).sum()
    assert right.dtype == loss.dtype == torch.float32
    assert not grad[~real].any()


def test_a_micro_batch_of_padding_has_the_loss_0_and_teaches_nothing():
    right, loss, grad = trained(torch.randn(3, 5), torch.full((3,), -1), "--label-smoothing", "0.1")
    assert (right.item(), loss.item()) == (0, 0)
    assert not grad.any()


def test_scores_of_half_at_its_limit_have_a_finite_loss():
    scores = torch.full((2, 1000), -60000.0, dtype=torch.float16)
    scores[:, 0] = 60000
    _, loss, grad = trained(scores, torch.tensor([0, 1]), "--label-smoothing", "0.1")
    assert math.isfinite(loss.item())
    assert grad.isfinite().all()


def test_validation_gives_the_class_with_the_highest_score():
    network = made().eval()
    x = torch.randn(5, 3, 16, 16)
    predicted = models().ForValidation(network, arguments(), ON_HOST)(x)
    assert torch.equal(predicted, network(x).argmax(1))


def train(*argv, images=ON_HOST, strategy=None, replicas=1, **changes):
    """Train two updates; returns the answers and losses, predictions and weights after them."""
    args = arguments(*argv, **changes)
    torch.manual_seed(1)
    network = models().create(args, 10)
    models().place(network, args)
    options = poptorch.Options()
    options.Training.gradientAccumulation(8)
    options.outputMode(poptorch.OutputMode.All)
    options.Emulator.replicaExecution("loop")
    inference = poptorch.Options()
    inference.deviceIterations(4)
    inference.Emulator.replicaExecution("loop")
    if strategy:
        for opts in (options, inference):
            opts.setExecutionStrategy(strategy())
    module = models().ForTraining(network, args, images)
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.1)
    training = poptorch.trainingModel(module, options, optimizer=optimizer)
    validation = poptorch.inferenceModel(models().ForValidation(network, args, images), inference)
    generator = torch.Generator().manual_seed(3)
    results = []
    for _ in range(2):
        pixels = torch.randint(0, 256, (16, 3, 16, 16), generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, 10, (16,), generator=generator)
        results += training(pixels, labels)
    predictions = validation(pixels[:8])
    training.destroy()
    validation.destroy()
    return results, predictions, network.state_dict()


@pytest.mark.parametrize(("precision", "norm"), [("16.16", "batch"), ("16.32", "group")])
def test_halves_train_as_floats_but_for_rounding(precision, norm):
    results, predictions, weights = train(
        "--precision", precision, f"--{norm}-norm", images=ON_DEVICE
    )
    exact, *_ = train("--precision", "32.32", f"--{norm}-norm", images=ON_DEVICE)
    for losses, expected in zip(results[1::2], exact[1::2], strict=True):
        torch.testing.assert_close(losses, expected, rtol=0, atol=0.03)
    assert results[0].dtype == results[1].dtype == torch.float32
    assert predictions.shape == (8,)
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "resnext", "--model-size", "11"),
        *(
            pytest.param(words, marks=pytest.mark.long)
            for words in (
                ("--model", "efficientnet", "--model-size", "B0"),
                ("--model-size", "18", "--dataset", "imagenet", "--group-norm"),
            )
        ),
    ],
)
@pytest.mark.parametrize("precision", ["16.16", pytest.param("32.32", marks=pytest.mark.long)])
def test_other_networks_learn_from_every_replica(words, precision):
    args = arguments(*words, "--precision", precision, image_size=32)
    torch.manual_seed(1)
    module = models().ForTraining(models().create(args, 10), args, ON_DEVICE)
    options = poptorch.Options()
    options.replicationFactor(2)
    options.randomSeed(5)  # of dropout, and of blocks that are left out
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.01)
    training = poptorch.trainingModel(module, options, optimizer=optimizer)
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    losses = [training(images, torch.arange(8))[1].mean().item() for _ in range(8)]
    training.destroy()
    assert min(losses[-3:]) < losses[0]


# --- Cuts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("--model-size", "14"),
        ("--model-size", "18", "--dataset", "imagenet"),
        ("--model", "resnext", "--model-size", "11"),
        ("--model", "efficientnet", "--model-size", "B0"),
    ],
)
def test_splits_are_all_layers_but_the_first_in_the_order_in_which_they_run(words):
    network = made(*words)
    names = models().splits(network)
    met = []
    for name in names:
        network.get_submodule(name).register_forward_pre_hook(
            lambda *_, name=name: met.append(name)
        )
    network(torch.randn(2, 3, 16, 16))
    assert met == names
    first = next(
        name for name, part in network.named_modules() if isinstance(part, torch.nn.Conv2d)
    )
    covered = tuple(f"{name}." for name in names)
    for name, _ in network.named_parameters():
        assert name.startswith((*covered, first.rpartition(".")[0] or first))


@given(st.data())
def test_every_choice_of_splits_puts_each_layer_on_its_ipu(data):
    shards = data.draw(st.sampled_from([2, 4, 8]))
    network = made(image_size=8)
    names = models().splits(network)
    chosen = data.draw(st.sets(st.sampled_from(names), min_size=shards - 1, max_size=shards - 1))
    cuts = sorted(chosen, key=names.index)
    args = arguments("--pipeline", "--shards", str(shards), "--pipeline-splits", *cuts)
    models().place(network, args)
    x = torch.randn(2, 3, 8, 8)
    strategy = poptorch.PipelinedExecution()
    placement = placement_of(strategy, network, network, x, training=True)
    assert placement.num_ipus == shards
    assert placement.num_stages == 2 * shards - 1
    begins = [names.index(cut) for cut in cuts]
    for weight, ipu in placement.ipu_of_parameter.items():
        layer = next((i for i, name in enumerate(names) if weight.startswith(f"{name}.")), -1)
        assert ipu == sum(begin <= layer for begin in begins)


PIPELINE_4 = (
    "--pipeline",
    "--shards",
    "4",
    "--pipeline-splits",
    "layer1.0",
    "layer2.0",
    "layer3.0",
)


@pytest.fixture(scope="module")
def uncut():
    """Train without a cut."""
    return train()


ONE_IPU = ("--pipeline", "--pipeline-schedule", "sequential", "--enable-recompute")


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        (PIPELINE_4, poptorch.PipelinedExecution),
        (PIPELINE_4, poptorch.ShardedExecution),
        (("--shards", "4"), poptorch.ShardedExecution),
        (("--enable-recompute",), None),
        ((*ONE_IPU, "--pipeline-splits", "layer2.0"), None),
    ],
)
def test_a_network_that_is_cut_trains_as_one_that_is_not(uncut, words, strategy):
    results, predictions, weights = train(*words, strategy=strategy)
    whole, expected, same = uncut
    for one, other in zip(results, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert torch.equal(predictions, expected)
    torch.testing.assert_close(weights, same, rtol=1e-6, atol=1e-6)


def test_recomputation_keeps_the_marked_layers_and_needs_less_memory():
    def needed(*words):
        args = arguments(*words, batch_size=16)
        network = made(*words)
        models().place(network, args)
        options = poptorch.Options()
        recomputes = "--enable-recompute" in words
        kind = RecomputationType.RecomputeAll if recomputes else RecomputationType.NoRecompute
        options._Popart.set("autoRecomputation", int(kind))
        options.setExecutionStrategy(poptorch.ShardedExecution())
        module = models().ForTraining(network, args, ON_HOST)
        optimizer = poptorch.optim.SGD(module.parameters(), lr=0.1)
        training = poptorch.trainingModel(module, options, optimizer=optimizer)
        images = torch.zeros(16, 3, 32, 32)
        report = training.memoryReport(images, torch.zeros(16, dtype=torch.long))
        return [ipu.not_always_live for ipu in report.ipus]

    assert needed("--enable-recompute") < needed()
    splits = ("--pipeline-splits", "layer2.0", "layer3.0")
    assert needed(*ONE_IPU, *splits) < needed(*ONE_IPU[:-1], *splits) == needed()
    two = needed("--shards", "2", "--enable-recompute")
    assert two < needed("--shards", "2")


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shards_are_cut_evenly(shards):
    args = arguments("--shards", str(shards), "--model-size", "14")
    network = made("--model-size", "14")
    placement = cnns.module("models.placement")
    cuts = placement._balanced_cuts(network, args)
    sizes = placement._sizes(network, args)
    names = ["conv1", *models().splits(network)]
    edges = [0, *(names.index(cut) for cut in cuts), len(names)]
    largest = max(sum(sizes[a:b]) for a, b in pairwise(edges))
    assert len(cuts) == shards - 1
    assert edges == sorted(set(edges))
    assert largest <= sum(sizes) / shards + max(sizes)


@given(st.data())
def test_parts_are_as_even_as_the_allowed_places_permit(data):
    even_parts = cnns.module("models.placement")._even_parts
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=4, max_size=8))
    places = st.sets(st.integers(1, len(sizes) - 1), min_size=2)
    allowed = sorted(data.draw(places))
    parts = data.draw(st.integers(1, len(allowed) + 1))

    def largest(begins):
        edges = [0, *begins, len(sizes)]
        return max(sum(sizes[a:b]) for a, b in pairwise(edges))

    found = even_parts(sizes, allowed, parts)
    assert len(found) == parts - 1
    assert set(found) <= set(allowed)
    assert list(found) == sorted(set(found))
    assert largest(found) == min(largest(way) for way in combinations(allowed, parts - 1))


def test_filters_choose_where_shards_are_cut():
    placement = cnns.module("models.placement")
    network = made("--model-size", "20")

    def cuts(*words):
        return placement._balanced_cuts(network, arguments("--shards", "4", *words))

    assert all("layer3" in cut for cut in cuts("--sharding-include-filter", "layer3"))
    left = cuts("--sharding-include-filter", "layer", "--sharding-exclude-filter", ".0", "layer2")
    assert set(left) < {"layer1.1", "layer1.2", "layer3.1", "layer3.2"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--shards 3", "--shards 3 is given: a replica has 1, 2, 4"),
        ("--shards 4 --sharding-include-filter fc", r"leave 1 \(fc\)"),
        ("--shards 2 --sharding-exclude-filter layer bn relu pool flatten fc", r"leave 0"),
        ("--shards 2 --sharding-include-filter nothing", r"leave 0 \(none\)"),
        ("--shards 2 --pipeline", "--pipeline needs --pipeline-splits.*1 of bn1 relu layer1.0"),
        ("--pipeline --pipeline-splits fc", "--pipeline-schedule Grouped is given with one IPU"),
        ("--shards 4 --pipeline --pipeline-splits fc", "1 are given for 4 IPUs: 3 is accepted"),
        ("--shards 2 --pipeline --pipeline-splits relu fc", "2 are given for 2 IPUs"),
        ("--shards 2 --pipeline --pipeline-splits layer2.1", "; is 'layer2.0' meant"),
        ("--shards 2 --pipeline --pipeline-splits conv1", "not a place to cut"),
        ("--shards 2 --pipeline --pipeline-splits qqq", "to cut; these are accepted: bn1"),
        ("--shards 4 --pipeline --pipeline-splits relu fc fc", "fc is given twice"),
        (
            "--shards 4 --pipeline --pipeline-splits relu fc bn1",
            "fc is given before bn1, which runs earlier: give them in the order bn1 relu fc",
        ),
    ],
)
def test_an_impossible_cut_is_an_error_of_one_line(words, said):
    network = made()
    args = arguments(*words.split())
    with pytest.raises(ValueError, match=said) as caught:
        models().place(network, args)
    assert "\n" not in str(caught.value)
