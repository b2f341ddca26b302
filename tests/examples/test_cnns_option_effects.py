"""Each option of the CNN programs has an effect, or a line says that it has none.

An option acts if a training that is made with it, and not started, differs from one without it.
"""

from __future__ import annotations

import argparse
import ast

import pytest
import torch
from PIL import Image
from support.repository import ROOT

from examples import cnn_programs as cnns

pytestmark = pytest.mark.examples

RANDOM = "--generated-data --generated-samples 24"
TINY = "--image-size 8 --model-size 8 --batch-size 4 --precision 32.32 --seed 3 --no-tensorboard"
PIPELINE = "--pipeline --shards 2 --pipeline-splits layer2.0"
# For each option: the words without it, and the words with it.
ACTS = {
    "--model": ("", "--model resnext --model-size 11"),
    "--model-size": ("", "--model-size 14"),
    "--batch-norm": ("{photographs}", "--batch-norm"),
    "--group-norm": ("", "--group-norm"),
    "--groups": ("--group-norm", "--groups 4"),
    "--BN-span": ("--replicas 2", "--BN-span 2"),
    "--BN-momentum": ("", "--BN-momentum 0.9"),
    "--dataset": ("", "--dataset cifar-100"),
    "--generated-data": ("", "{photographs}"),
    "--synthetic-data": ("", "--synthetic-data"),
    "--generated-samples": ("", "--generated-samples 16"),
    "--image-size": ("", "--image-size 16"),
    "--eight-bit-io": ("", "--eight-bit-io"),
    "--hostside-norm": ("", "--no-hostside-norm"),
    "--dataset-cache": ("{photographs}", "--no-dataset-cache"),
    "--workers": ("", "--workers 1"),
    "--seed": ("", "--seed 4"),
    "--epochs": ("", "--epochs 2"),
    "--iterations": ("", "--iterations 5"),
    "--batch-size": ("", "--batch-size 8"),
    "--global-batch-size": ("", "--global-batch-size 8"),
    "--gradient-accumulation-count": ("", "--gradient-accumulation-count 3"),
    "--label-smoothing": ("", "--label-smoothing 0.1"),
    "--weight-decay": ("", "--weight-decay 0.1"),
    "--loss-scaling": ("--precision 16.16", "--loss-scaling 2"),
    "--base-learning-rate-exponent": ("", "--base-learning-rate-exponent -3"),
    "--lr-schedule": ("", "--lr-schedule cosine"),
    "--warmup-epochs": ("", "--warmup-epochs 1"),
    "--learning-rate-decay": ("", "--learning-rate-decay 0.2"),
    "--learning-rate-schedule": ("", "--learning-rate-schedule 0.1 0.2"),
    "--lr-decay-rate": ("--lr-schedule exponential", "--lr-decay-rate 0.5"),
    "--lr-decay-epochs": ("--lr-schedule exponential", "--lr-decay-epochs 2"),
    "--poly-power": ("--lr-schedule polynomial_decay_lr", "--poly-power 1"),
    "--poly-end-ratio": ("--lr-schedule polynomial_decay_lr", "--poly-end-ratio 0.5"),
    "--optimiser": ("", "--optimiser LARS"),
    "--momentum": ("--optimiser momentum", "--momentum 0.5"),
    "--rmsprop-decay": ("--optimiser RMSProp", "--rmsprop-decay 0.5"),
    "--rmsprop-epsilon": ("--optimiser RMSProp", "--rmsprop-epsilon 0.1"),
    "--lars-eeta": ("--optimiser LARS", "--lars-eeta 0.1"),
    "--lars-epsilon": ("--optimiser LARS", "--lars-epsilon 0.1"),
    "--precision": ("", "--precision 16.32"),
    "--stochastic-rounding": ("--precision 16.16", "--no-stochastic-rounding"),
    "--enable-half-partials": ("", "--enable-half-partials"),
    "--batches-per-step": ("--logs-per-epoch 1", "--batches-per-step 1"),
    "--replicas": ("", "--replicas 2"),
    "--shards": ("", "--shards 2"),
    "--sharding-exclude-filter": ("--shards 2", "--sharding-exclude-filter layer3"),
    "--sharding-include-filter": ("--shards 2", "--sharding-include-filter layer1"),
    "--pipeline": ("--shards 2", "--pipeline --pipeline-splits layer2.0"),
    "--pipeline-splits": (PIPELINE, "--pipeline-splits layer3.0"),
    "--pipeline-schedule": (PIPELINE, "--pipeline-schedule Sequential"),
    "--enable-recompute": ("", "--enable-recompute"),
    "--available-memory-proportion": ("", "--available-memory-proportion 0.1"),
    "--select-ipus": ("", "--select-ipus 3"),
    "--fp-exceptions": ("", "--fp-exceptions"),
    "--deterministic": ("", "--deterministic"),
    "--device": ("", "--device bow"),
    "--validation": ("", "--no-validation"),
    "--valid-batch-size": ("", "--valid-batch-size 2"),
    "--name-prefix": ("", "--name-prefix one"),
    "--name-suffix": ("", "--name-suffix one"),
    "--config": ("", "--config digits_resnet8"),
}  # fmt: skip
# Options that have an effect during or after a training, and the tests that show the effect.
ELSEWHERE = {
    "--data-dir": "test_cnns_datasets.test_data_set_is_inferred_from_its_files",
    "--standard-imagenet": "test_cnns_option_effects.test_one_order_for_all_instances",
    "--distributed": "test_cnns_configurations.test_distributed_says_who_distributes",
    "--weight-avg": "test_cnns_runs.test_a_training_averages_at_its_end",
    "--weight-avg-count": "test_cnns_runs.test_an_average_is_that_of_the_last_weights",
    "--weight-avg-decay": "test_cnns_runs.test_an_average_is_that_of_the_last_weights",
    "--log-dir": "test_cnns_runs.test_a_run_is_in_a_private_folder_of_its_own",
    "--logs-per-epoch": "test_cnns_train.test_a_training_logs_validates_and_saves",
    "--ckpts-per-epoch": "test_cnns_train.test_a_training_logs_validates_and_saves",
    "--tensorboard": "test_cnns_runs.test_tensorboard_has_both_parts",
    "--wandb": "test_cnns_runs.test_only_online_needs_a_login",
    "--config-path": "test_cnns_configurations.test_a_wrong_file_is_refused_in_one_line",
}
# Options without effect beside other options, and the reason that the line gives.
IDLE = [
    ("", "--groups 4", "no group norms"),
    ("--group-norm", "--BN-momentum 0.9", "no batch norms"),
    ("--group-norm --replicas 2", "--BN-span 2", "no batch norms"),
    ("--synthetic-data --no-generated-data", "--generated-data", "--synthetic-data replaces it"),
    ("", "--data-dir {data}", "random images are not read"),
    ("{photographs}", "--generated-samples 16", "the images are not random"),
    ("--eight-bit-io", "--no-hostside-norm", "the IPU normalises"),
    ("", "--standard-imagenet", "other images have one order only"),
    ("{photographs}", "--standard-imagenet", "a single instance has one order"),
    ("{photographs} --deterministic", "--standard-imagenet", "one order for all instances"),
    ("", "--no-dataset-cache", "only photographs are cached"),
    ("--no-validation", "--valid-batch-size 2", "nothing is validated"),
    ("", "--loss-scaling 2", "no number is in half precision"),
    ("", "--no-stochastic-rounding", "no number is in half precision"),
    ("", "--weight-avg-count 2", "no --weight-avg"),
    ("--weight-avg mean", "--weight-avg-decay 0.5", "no --weight-avg exponential"),
    ("--lr-schedule cosine", "--learning-rate-decay 0.2", "no --lr-schedule stepped"),
    ("--lr-schedule cosine", "--learning-rate-schedule 0.2", "no --lr-schedule stepped"),
    ("", "--lr-decay-rate 0.5", "no --lr-schedule exponential"),
    ("", "--lr-decay-epochs 2", "no --lr-schedule exponential"),
    ("", "--poly-power 1", "no --lr-schedule polynomial_decay_lr"),
    ("", "--poly-end-ratio 0.5", "no --lr-schedule polynomial_decay_lr"),
    ("", "--momentum 0.5", "SGD has none"),
    ("", "--rmsprop-decay 0.5", "no --optimiser RMSProp"),
    ("", "--rmsprop-epsilon 0.1", "no --optimiser RMSProp"),
    ("", "--lars-eeta 0.1", "no --optimiser LARS"),
    ("", "--lars-epsilon 0.1", "no --optimiser LARS"),
    ("", "--sharding-exclude-filter layer1", "does not choose where to cut"),
    (PIPELINE, "--sharding-include-filter layer1", "does not choose where to cut"),
    ("", "--config-path configs.yml", "no --config"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def programs():
    with cnns.imported():
        yield


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A small ImageNet, and the arguments to train on it."""
    folder = tmp_path_factory.mktemp("data") / "imagenet"
    for part in ("train", "validation"):
        for number in range(8):
            file = folder / part / f"class{number % 2}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 10), (30 * number, 60, 90)).save(file)
    return folder, f"--no-generated-data --dataset imagenet --model-size 18 --data-dir {folder}"


@pytest.fixture
def arguments(photographs):
    """Parse arguments, after those of a tiny training."""
    folder, words_of = photographs

    def read(*words):
        text = " ".join((TINY if "{photographs}" in words[0] else f"{TINY} {RANDOM}", *words))
        text = text.format(data=folder, photographs=words_of)
        configurations = cnns.module("configurations")
        parser = cnns.module("arguments").make_parser("", "")
        own = configurations.given(parser, text.split())
        return configurations.combine(own)

    return read


def facts(args):
    """Return all values that follow from the options before a training starts."""
    torch.manual_seed(0)
    training = cnns.module("training").Training(args, cnns.module("datasets").seed_of_order(args))
    try:
        return list(_facts(training, args))
    finally:
        training.close()


def _facts(training, args):
    models = [training.model] + ([training.validation._model] if training.validation else [])
    for model in models:
        yield repr(model.options._description())
        yield [
            (
                name,
                repr(module),
                module.training,
                list(map(repr, module._forward_pre_hooks.values())),
            )
            for name, module in model.model.named_modules()
        ]
        yield [(name, tensor.dtype) for name, tensor in model.model.state_dict().items()]
        yield {name: value for name, value in vars(model.model).items() if _is_plain(value)}
    yield training.steps, training.sizes
    groups = training.optimizer.param_groups
    yield [{k: v for k, v in group.items() if _is_plain(v)} for group in groups]
    yield {name: v for name, v in vars(training.optimizer).items() if _is_plain(v)}
    yield type(training.optimizer)
    yield [training.schedule.rate(epoch / 3) for epoch in range(500)]
    loaders = [training.loader] + ([training.validation._loader] if training.validation else [])
    yield [
        (loader.combinedBatchSize, loader.num_workers, list(loader.sampler)) for loader in loaders
    ]
    image, label = training.images.data[0]
    yield image.tolist(), image.dtype, int(label), len(training.images.data)
    yield getattr(training.images.data, "_cache", None) is None
    name = cnns.module("run_folder").name_of(args)
    yield [part for part in name.split("_") if len(part) != 3 or part == "one"]


def _is_plain(value):
    return isinstance(value, bool | int | float | str | tuple | torch.dtype)


def test_every_option_has_an_entry():
    parser = cnns.module("arguments").make_parser("", "")
    options = {action.option_strings[0] for action in parser._actions} - {"-h"}
    assert not ACTS.keys() & ELSEWHERE.keys()
    assert options == {*ACTS, *ELSEWHERE}
    for module, function in (place.split(".") for place in ELSEWHERE.values()):
        tree = ast.parse((ROOT / f"tests/examples/{module}.py").read_text())
        assert function in {node.name for node in ast.walk(tree) if hasattr(node, "name")}


def test_every_option_acts(arguments):
    line_of = cnns.module("idle_options").line
    before = {}
    idle = []
    for option, (beside, words) in ACTS.items():
        if beside not in before:
            before[beside] = facts(arguments(beside))
        args = arguments(beside, words)
        if facts(args) == before[beside] or f"{option} (" in str(line_of(args)):
            idle.append(option)
    assert idle == []


@pytest.mark.parametrize(("beside", "words", "reason"), IDLE)
def test_what_does_nothing_is_said(arguments, beside, words, reason):
    line_of = cnns.module("idle_options").line
    plain, args = arguments(beside), arguments(beside, words)
    assert line_of(plain) is None
    said = line_of(args)
    assert said.startswith(f"without effect here: {words.split()[0]} (")
    assert reason in said
    assert said.count(" (") == 1


def test_what_does_nothing_changes_nothing(arguments):
    before = {}
    for beside, words, _ in IDLE:
        if beside not in before:
            before[beside] = facts(arguments(beside))
        assert facts(arguments(beside, words)) == before[beside], words


def test_the_line_is_in_the_log(arguments, tmp_path, capfd):
    words = [
        *cnns.TINY,
        "--iterations",
        "1",
        "--no-validation",
        "--momentum",
        "0.5",
        "--groups",
        "4",
    ]
    result = cnns.module("train").main([*words, "--log-dir", str(tmp_path)])
    line = "without effect here: --groups (there are no group norms), --momentum (SGD has none)"
    assert line in capfd.readouterr().out.splitlines()
    assert line in (result.folder / "log.txt").read_text()
    words = ["--restore-path", str(result.folder), "--epochs", "3", "--optimiser", "LARS"]
    cnns.module("validation").main(words)
    line = (
        "without effect here: --epochs (only a training has it), --optimiser (only a training has "
        "it)"
    )
    assert line in capfd.readouterr().out.splitlines()


def test_configurations_have_no_option_that_does_nothing():
    configurations = cnns.module("configurations")
    path = cnns.FOLDER / "configs.yml"
    for name in configurations.names(path):
        own = {"config": name, **configurations.settings(name, path)}
        if "generated_data" not in own:
            own["data_dir"] = cnns.FOLDER
        args = configurations.complete(argparse.Namespace(**own))
        assert cnns.module("idle_options").line(args) is None, name


def test_one_order_for_all_instances(arguments, monkeypatch):
    """Each of two instances reads files of its own, or both share one order."""
    for name, value in {
        "NUM_TOTAL_REPLICAS": 2, "NUM_LOCAL_REPLICAS": 1, "REPLICA_INDEX_OFFSET": 0,
        "UNIFORM_REPLICAS_PER_INSTANCE": 1, "NUM_LOCAL_INSTANCES": 2,
    }.items():  # fmt: skip
        monkeypatch.setenv(f"POPDIST_{name}", str(value))
    words = "{photographs} --batch-size 1 --no-validation"
    orders = []
    for option in ("", "--standard-imagenet", "--deterministic"):
        args = arguments(words, option)
        assert cnns.module("idle_options").line(args) is None
        data = cnns.module("datasets")
        images = data.load(args, training=True)
        options = cnns.module("ipu_options").training_options(args)
        loader = data.loader(args, options, images, training=True, seed=3)
        orders.append(sorted(index for index, _ in loader.sampler))
        loader.terminate()
    own, standard, deterministic = orders
    assert own == [0, 2, 4, 6]
    assert standard == deterministic != own
