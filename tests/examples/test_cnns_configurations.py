"""Configurations of the CNN programs: bases, what stands above what, and errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import cnn_programs as cnns
from popdist_py.popart import RecomputationType

PODS = {
    "mk2_resnet50_mlperf_pod16_bs20": (20, 6, 16, 1920),
    "mk2_resnet50_mlperf_pod64_lars": (20, 2, 64, 2560),
    "mk2_resnet50_mlperf_pod64_bs20": (20, 2, 64, 2560),
    "mk2_resnet50_mlperf_pod128_lars": (20, 1, 128, 2560),
    "mk2_resnet50_mlperf_pod256_lars": (20, 1, 256, 5120),
}
POD16 = "mk2_resnet50_mlperf_pod16_bs20"

pytestmark = [pytest.mark.examples, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def modules():
    with pytest.MonkeyPatch.context() as patch, cnns.imported():
        patch.delenv("DATA_DIR", raising=False)
        yield


def configurations():
    return cnns.module("configurations")


def file_of(folder, text):
    path = folder / "configs.yml"
    path.write_text(text, encoding="utf-8")
    return path


def parsed(*words, path=None):
    more = [] if path is None else ["--config-path", str(path)]
    return configurations().parse([*words, *more], "Description.", "python train.py")


def refused(capsys, *words, path=None):
    """Options that do not go together: exit code 2, and one line."""
    with pytest.raises(SystemExit) as left:
        parsed(*words, path=path)
    out, err = capsys.readouterr()
    assert left.value.code == 2
    assert out == ""
    assert err.count("\n") == 1, err
    return err


def sizes(args):
    found = cnns.module("batch_sizes").sizes(args)
    return found.micro_batch, found.accumulation, found.replicas, found.global_batch


# --- the file that is there -------------------------------------------------------------------


def test_configurations_are_as_in_the_golden_file(golden):
    """The options of CIFAR-10 without a configuration, and what differs from them.

    A changed default or base shows in the file.
    """

    def options(*words):
        found = configurations().to_dict(parsed(*words, "--data-dir", "data"))
        del found["config_path"]
        return found

    defaults = options("--dataset", "cifar-10")
    lines = [f"{name}: {json.dumps(value)}" for name, value in defaults.items()]
    others = {"imagenet": ("--dataset", "imagenet")} | {
        name: ("--config", name) for name in configurations().names(cnns.FOLDER / "configs.yml")
    }
    for title, words in others.items():
        found = options(*words)
        assert found.keys() == defaults.keys()
        lines += ["", f"[{title}]"]
        lines += [
            f"{name}: {json.dumps(value)}"
            for name, value in found.items()
            if value != defaults[name] and (name, value) != ("config", title)
        ]
    golden("cnns_configurations.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", PODS)
def test_pods_have_the_global_batches_of_the_text(name):
    args = parsed("--config", name, "--data-dir", "data")
    assert sizes(args) == PODS[name]
    assert args.global_batch_size == PODS[name][3]
    assert (args.model, args.model_size, args.norm, args.bn_span) == ("resnet", "50", "batch", 2)
    assert (args.optimiser, args.lr_schedule) == ("LARS", "exponential")
    assert args.label_smoothing == 0.1
    assert args.epochs == 40
    assert args.enable_recompute
    assert args.enable_half_partials


def test_another_global_batch_than_the_configurations_is_refused(capsys):
    words = ("--config", POD16, "--generated-data")
    said = refused(capsys, *words, "--replicas", "4")
    assert "20 x accumulation 6 x 4 replicas are 480" in said
    assert "--replicas 16" in said
    assert "--gradient-accumulation-count 24" in said
    args = parsed(*words, "--replicas", "4", "--gradient-accumulation-count", "24")
    assert sizes(args) == (20, 24, 4, 1920)
    # A batch size alone keeps the global batch.
    assert sizes(parsed(*words, "--batch-size", "4")) == (4, 30, 16, 1920)


def test_a_global_batch_that_cannot_be_reached_names_the_nearest(capsys):
    words = ("--generated-data", "--batch-size", "4", "--replicas", "6")
    said = refused(capsys, *words, "--global-batch-size", "100")
    assert "take 96 or 120" in said
    assert sizes(parsed(*words, "--global-batch-size", "96")) == (4, 4, 6, 96)
    assert "take 24" in refused(capsys, *words, "--global-batch-size", "7")


# --- bases and overriding ---------------------------------------------------------------------

OPTIONS = {
    "batch-size": st.integers(1, 64),
    "momentum": st.floats(0, 1),
    "model-size": st.sampled_from(["8", "14", "B0"]),
    "wandb": st.booleans(),
    "lr-schedule": st.sampled_from(["stepped", "cosine"]),
    "learning-rate-decay": st.lists(st.floats(0.01, 2), min_size=1, max_size=3),
}
some_options = st.fixed_dictionaries({}, optional=OPTIONS)


@settings(max_examples=15)
@given(chain=st.lists(some_options, min_size=1, max_size=4), command_line=some_options)
def test_what_stands_above_counts(tmp_path_factory, chain, command_line):
    """Along a chain of bases, and on the command line: the last who says an option."""
    file = {f"c{index}": dict(own) for index, own in enumerate(chain)}
    for index in range(1, len(chain)):
        file[f"c{index}"]["base"] = f"c{index - 1}"
    # JSON is YAML.
    path = file_of(tmp_path_factory.mktemp("chain"), json.dumps(file))
    words = [word for name, value in command_line.items() for word in _words(name, value)]
    args = parsed("--generated-data", "--config", f"c{len(chain) - 1}", *words, path=path)
    wanted = {name: value for own in (*chain, command_line) for name, value in own.items()}
    for name, value in wanted.items():
        assert getattr(args, name.replace("-", "_")) == value, name


def _words(name, value):
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def test_of_several_bases_the_last_counts(tmp_path):
    path = file_of(
        tmp_path,
        "a: {epochs: 1, momentum: 0.1, groups: 4}\n"
        "b: {epochs: 2, momentum: 0.2}\n"
        "c: {base: [a, b], epochs: 3}\n",
    )
    args = parsed("--generated-data", "--config", "c", path=path)
    assert (args.epochs, args.momentum, args.groups) == (3, 0.2, 4)


def test_iterations_take_back_the_epochs_of_a_base(tmp_path):
    path = file_of(tmp_path, "a: {epochs: 7}\nb: {base: a, iterations: 5}\n")
    args = parsed("--generated-data", "--config", "b", path=path)
    assert (args.epochs, args.iterations) == (None, 5)
    args = parsed("--generated-data", "--config", "b", "--epochs", "2", path=path)
    assert (args.epochs, args.iterations) == (2, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("my: {batch-sise: 3}", "configuration 'my': there is no option 'batch-sise'; is 'batch-"),
        ("my: {batch-size: 0}", "--micro-batch-size: '0' is given, an integer from 1 on"),
        ("my: {batch-size: true}", "expected one argument"),
        ("my: {batch-size: [1, 2]}", "unrecognized arguments: 2"),
        ("my: {lr-schedule: stairs}", "invalid choice: 'stairs'"),
        ("my: {epochs: 1, iterations: 1}", "epochs and iterations are given"),
        ("my: {batch-norm: false}", "batch-norm: false is given"),
        ("my: {config: other}", "there is no option 'config'"),
        ("my: {base: yours}\nyour: {}", "no base 'yours' of 'my'; is 'your' meant?"),
        ("my: {base: b}\nb: {base: my}", "my -> b -> my are based on each other"),
        ("my: {base: my}", "my -> my"),
        ("your: {}", "no configuration 'my'; it has your"),
        ("my: {epochs: 1, epochs: 2}", "'epochs' stands there twice"),
        ("my: [1]", "NAME: and below it"),
        ("- my", "NAME: and below it"),
        ("", "NAME: and below it"),
        ("my: {epochs: 1", "line 1"),
        ("my: !!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, capsys, text, said):
    path = file_of(tmp_path, text)
    found = refused(capsys, "--generated-data", "--config", "my", path=path)
    assert said in found
    assert str(path) in found


def test_a_file_that_is_missing_or_no_text_is_refused_in_one_line(tmp_path, capsys):
    assert "No such file" in refused(capsys, "--config", "my", path=tmp_path / "none.yml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x80")
    assert "YAML" in refused(capsys, "--config", "my", path=tmp_path / "bytes")


def test_unknown_name_lists_those_there_are(capsys):
    said = refused(capsys, "--config", "mk2_resnet8_tests", "--generated-data")
    assert "is 'mk2_resnet8_test' meant?" in said
    assert POD16 in said
    assert "_mk2_resnet50_mlperf;" not in said


# --- defaults ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--dataset cifar-10", ("20", "batch", 32, 32, 160, -7.0)),
        ("--dataset cifar-100 --optimiser momentum", ("20", "batch", 32, 32, 160, -10.0)),
        ("--dataset imagenet", ("50", "group", 224, 4, 100, -8.0)),
        ("--dataset imagenet --model efficientnet", ("B0", "group", 224, 4, 100, -8.0)),
        ("--dataset imagenet --batch-norm --iterations 3", ("50", "batch", 224, 4, None, -8.0)),
    ],
)
def test_defaults_depend_on_model_and_data(words, wanted):
    args = parsed("--generated-data", *words.split())
    found = (args.model_size, args.norm, args.image_size, args.batch_size, args.epochs,
             args.base_learning_rate_exponent)  # fmt: skip
    assert found == wanted
    assert args.valid_batch_size == args.batch_size


def test_help_has_the_defaults_that_depend_on_the_data():
    arguments = cnns.module("arguments")
    shown = " ".join(arguments.make_parser("", "").format_help().split())
    assert "default: None" not in shown
    assert "default: []" not in shown
    for name in ("image_size", "batch_size", "epochs"):
        small, large = (
            getattr(parsed("--generated-data", "--dataset", data), name)
            for data in ("cifar-10", "imagenet")
        )
        assert arguments.FOLLOWS[name] == f"{small} for CIFAR, {large} for ImageNet"
        assert arguments.FOLLOWS[name] in shown


def test_data_are_needed(capsys, monkeypatch):
    assert "sample.py cifar-10 DIR" in refused(capsys)
    assert "sample.py cifar-10 DIR" in refused(capsys, "--dataset", "imagenet")
    monkeypatch.setenv("DATA_DIR", "somewhere")
    assert parsed("--dataset", "cifar-10").data_dir == Path("somewhere")


def test_saved_options_are_the_same_when_they_are_read():
    args = parsed("--config", POD16, "--generated-data", "--log-dir", "here")
    module = configurations()
    assert module.from_dict(json.loads(json.dumps(module.to_dict(args)))) == args


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--BN-span 3 --replicas 4", "1, 2, 4"),
        ("--pipeline-splits layer1.0", "--pipeline"),
        ("--pipeline --pipeline-splits layer2.0 --shards 2 --gradient-accumulation-count 2", "3"),
        ("--available-memory-proportion 0.1 0.2 0.3", "which are 2"),
        ("--select-ipus one", "AUTO"),
        ("--select-ipus 0 1 2", "AUTO"),
        ("--select-ipus 1 1", "two different ids"),
        ("--base-learning-rate-exponent nan", "-64 to 64"),
        ("--distributed", "with --batches-per-step 1000: only 1 is accepted with it; give"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_one_line(capsys, words, said):
    assert said in refused(capsys, "--generated-data", *words.split())


# --- options of PopTorch ----------------------------------------------------------------------


def test_options_reach_poptorch():
    words = (
        "--generated-data --replicas 4 --gradient-accumulation-count 6 --enable-recompute "
        "--enable-half-partials --available-memory-proportion 0.1 0.2 0.3 0.4 --shards 2 "
        "--pipeline --pipeline-splits layer2.0 --seed 3 --deterministic --fp-exceptions"
    )
    args = parsed(*words.split())
    ipu_options = cnns.module("ipu_options")
    options = ipu_options.training_options(args, 49_500)
    assert options.replication_factor == 4
    assert options.Training.gradient_accumulation == 6
    assert options.available_memory_proportion == {0: 0.1, 1: 0.3}
    assert options.Precision.floating_point_exceptions
    assert options.Precision.stochastic_rounding
    # Random roundings would make the answers depend on who shares the images.
    assert not ipu_options.validation_options(args).Precision.stochastic_rounding
    assert options._execution_strategy.is_pipelined
    assert options._Popart.options["autoRecomputation"] == RecomputationType.Pipeline
    # 49,500 images are 64 updates of 32 x 6 x 4, and 16 lines of a log.
    assert options.device_iterations == 4


@given(
    samples=st.integers(1, 5000),
    micro=st.integers(1, 8),
    accumulation=st.integers(1, 4),
    most=st.integers(1, 50),
    logs=st.integers(1, 30),
    iterations=st.none() | st.integers(1, 60),
    done=st.integers(0, 100),
)
def test_calls_fill_epochs_and_trainings_and_fit_between_lines(
    samples, micro, accumulation, most, logs, iterations, done
):
    batch_sizes = cnns.module("batch_sizes")
    args = SimpleNamespace(
        batch_size=micro, gradient_accumulation_count=accumulation, replicas=1,
        batches_per_step=most, logs_per_epoch=logs, iterations=iterations, epochs=3,
    )  # fmt: skip
    updates = samples // (micro * accumulation)
    if not updates:
        with pytest.raises(ValueError, match="fewer than a global batch"):
            batch_sizes.device_iterations(args, samples)
        return
    total = 3 * updates if iterations is None else iterations
    assert batch_sizes.updates(args, samples) == batch_sizes.Updates(updates, total)
    progress = batch_sizes.Progress(done, done % updates)
    at_once = batch_sizes.device_iterations(args, samples, progress)
    assert 1 <= at_once <= updates
    assert at_once * accumulation <= max(most, accumulation)
    assert at_once == 1 or at_once * logs <= updates
    # Neither the end of an epoch nor the end of the training cuts a call short.
    assert updates % at_once == 0
    assert (updates - done % updates) % at_once == 0
    assert done >= total or (total - done) % at_once == 0
    # A restored training with the same options has calls of the same length.
    first = batch_sizes.device_iterations(args, samples)
    place = batch_sizes.Progress(first, first % updates)
    assert batch_sizes.device_iterations(args, samples, place) == first


def test_distributed_says_who_distributes(monkeypatch):
    idle_options, batch_sizes = cnns.module("idle_options"), cnns.module("batch_sizes")
    args = parsed("--generated-data", "--distributed", "--batches-per-step", "1")
    assert batch_sizes.device_iterations(args, 64) == 1
    assert "no effect: one process trains; poprun --num-instances N" in idle_options.distribution(
        args
    )
    monkeypatch.setattr(idle_options.popdist_py, "isPopdistEnvSet", lambda: True)
    monkeypatch.setattr(idle_options.popdist_py, "getNumInstances", lambda: 2)
    assert idle_options.distribution(args).endswith("distributes the training, over 2 instances")
    assert idle_options.distribution(parsed("--generated-data")) is None


def test_the_launchers_numbers_count(monkeypatch):
    """--replicas and --select-ipus are told to be ignored, each launch in one line."""
    idle_options = cnns.module("idle_options")
    args = SimpleNamespace(replicas=3, select_ipus=["1"])
    assert idle_options.ignored(args) is None
    monkeypatch.setattr(idle_options.popdist_py, "isPopdistEnvSet", lambda: True)
    monkeypatch.setattr(idle_options.popdist_py, "getNumTotalReplicas", lambda: 8)
    assert idle_options.ignored(args) == (
        "--replicas 3 and --select-ipus 1: ignored, the launcher gives 8 replicas"
    )
    assert idle_options.ignored(SimpleNamespace(replicas=8, select_ipus=None)) is None
