"""Options: names, defaults, types, freezing, copies, and options from text."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from support.models import Mlp, classified
from torch import nn

import popdist_py as popdist
import popdist_py.poptorch as poptorch
from popdist_py.poptorch.errors import ConfigFileError


def test_defaults():
    options = poptorch.Options()
    assert options.replication_factor == 1
    assert options.device_iterations == 1
    assert options.output_mode == poptorch.OutputMode.Default
    assert options.connection_type == poptorch.ConnectionType.Always
    assert options.Training.gradient_accumulation == 1
    assert (
        options.Training.accumulation_and_replication_reduction_type == poptorch.ReductionType.Mean
    )
    assert isinstance(options._execution_strategy, poptorch.PipelinedExecution)
    assert options.defaultOutputMode()
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (0, 1)


def test_setters_chain_and_values_are_attributes():
    options = poptorch.Options().deviceIterations(3).replicationFactor(2)
    assert options.Training.gradientAccumulation(4) is options.Training
    options.replication_factor = 5
    assert options.replication_factor == options("replication_factor") == 5
    assert options.exists("replication_factor")
    assert not options.exists("random_seed")


@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        (lambda o: setattr(o, "replication_factor", "two"), AssertionError, "Unexpected type"),
        (lambda o: setattr(o, "no_such_option", 1), AssertionError, "Invalid option"),
        (lambda o: o.set(no_such_option=1), AssertionError, "Invalid option"),
        (lambda o: o.no_such_option, AttributeError, "Invalid attribute"),
        (lambda o: setattr(o, "_private", 1), AttributeError, "Invalid private attribute"),
        (lambda o: o.toDict(), AssertionError, "output mode must be picked"),
        (lambda o: o.outputMode(poptorch.OutputMode.EveryN), AssertionError, "positive"),
        (lambda o: o.randomSeed(1.5), AssertionError, "integer"),
        (lambda o: o.setExecutionStrategy(3), AssertionError, "strategy"),
        (lambda o: o.setAvailableMemoryProportion({"CPU0": 0.1}), AssertionError, "IPU"),
        (lambda o: o.setAvailableMemoryProportion({0: 0.1}), AssertionError, "Invalid key 0"),
        (lambda o: o.setAvailableMemoryProportion([0.1]), AssertionError, "dictionary"),
        (lambda o: o.syncPattern(0), AssertionError, "SyncPattern"),
        (
            lambda o: o.inputReplicaGrouping(2, poptorch.CommGroupType.All),
            ValueError,
            "not supported",
        ),
        (
            lambda o: o.inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive),
            ValueError,
            "group size 2",
        ),
        (
            lambda o: o.Training.accumulationAndReplicationReductionType(
                poptorch.ReductionType.NoReduction
            ),
            ValueError,
            "Sum or ReductionType.Mean",
        ),
        (lambda o: o.Training.gradientCompression("fp8"), ValueError, "expected 'none', 'fp16'"),
        (
            lambda o: o.Training.gradientCompression("fp16", rank=2),
            ValueError,
            "only 'powersgd'",
        ),
        (lambda o: o.Training.gradientCompression("powersgd", 0), ValueError, "rank=0.*1 or more"),
        (lambda o: o.Training.gradientCompression("powersgd", 2.0), ValueError, "whole number"),
        (lambda o: o.Training.gradientCompression("powersgd", 1, -1), ValueError, "0 or more"),
        (lambda o: o.Training.gradientCompression("powersgd", 1, 1, 1), ValueError, "a bool"),
        (lambda o: o.Precision.setPartialsType(torch.int8), ValueError, "torch.half"),
        (lambda o: o.Precision.enableStochasticRounding(1), AssertionError, "bool"),
        (lambda o: o.TensorLocations.numIOTiles(33), AssertionError, "even"),
        (lambda o: o.TensorLocations.numIOTiles(16), AssertionError, "32 to 192"),
        (lambda o: o.TensorLocations.setWeightLocation({}), AssertionError, "Settings"),
        (lambda o: o.Jit.traceModel(True), ValueError, "traceModel"),
        (lambda o: o.useOfflineIpuTarget(7), ValueError, "expected one of"),
        (lambda o: o.logDir(3), AssertionError, r"Unexpected type.*logDir\(3\)"),
        (lambda o: o.modelName(3), AssertionError, r"Unexpected type.*modelName\(3\)"),
        (lambda o: o.useIpuId("1"), AssertionError, r"Unexpected type.*useIpuId\('1'\)"),
        (lambda o: o.useIpuModel(1), AssertionError, r"Unexpected type.*useIpuModel\(1\)"),
    ],
)
def test_wrong_values_are_refused(act, error, text):
    with pytest.raises(error, match=text):
        act(poptorch.Options())


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda o: o.replicationFactor(2), ValueError, "group size 4 .* replication factor 2"),
        (lambda o: o.replicationFactor(6), ValueError, "group size 4 .* replication factor 6"),
        (lambda o: setattr(o, "replication_factor", 2), ValueError, "group size 4"),
        (lambda o: setattr(o, "input_group_size", 3), ValueError, "group size 3"),
        (lambda o: o.set(input_group_size=8), ValueError, "group size 8"),
        (lambda o: o.createOrSet(input_group_size=0), ValueError, "group size 0"),
        (
            lambda o: setattr(o, "input_cgt", poptorch.CommGroupType.All),
            ValueError,
            "CommGroupType.All is not supported",
        ),
        (lambda o: o.from_json('{"replicationFactor": 2}'), ValueError, "group size 4"),
        (lambda o: setattr(o, "replication_factor", 0), AssertionError, r"replicationFactor\(0\)"),
        (lambda o: o.set(device_iterations=0), AssertionError, r"deviceIterations\(0\)"),
        (
            lambda o: setattr(o.Training, "gradient_accumulation", -1),
            AssertionError,
            r"gradientAccumulation\(-1\)",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_and_changes_nothing(change, error, text):
    options = poptorch.Options().replicationFactor(4)
    options.inputReplicaGrouping(4, poptorch.CommGroupType.Orthogonal)
    before = repr(options)
    with pytest.raises(error, match=text):
        change(options)
    assert repr(options) == before


def test_replicas_and_their_groups_change_in_either_order_or_together():
    options = poptorch.Options().replicationFactor(4)
    options.inputReplicaGrouping(4, poptorch.CommGroupType.Consecutive)
    options.replicationFactor(8).set(replication_factor=6, input_group_size=3)
    options.inputReplicaGrouping(1, poptorch.CommGroupType.NoGrouping).replicationFactor(1)
    assert options.batching(training=True).num_groups == 1


def test_groups_of_older_options_are_checked_when_these_are_used():
    options = poptorch.Options()
    options._values["input_group_size"] = 2
    dataset = torch.utils.data.TensorDataset(torch.ones(4, 1))
    with pytest.raises(ValueError, match="group size 2"):
        poptorch.DataLoader(options, dataset)
    with pytest.raises(ValueError, match="group size 2"):
        poptorch.inferenceModel(nn.Linear(1, 1), options)(torch.ones(1, 1))


def test_using_options_freezes_them_with_all_groups():
    options = poptorch.Options()
    model = poptorch.inferenceModel(nn.Linear(1, 1), options)
    settings = poptorch.TensorLocationSettings()
    for act in (
        lambda: options.deviceIterations(2),
        lambda: options.anchorTensor("a", "b"),
        lambda: options.showCompilationProgressBar(False),
        lambda: options.Training.gradientAccumulation(2),
        lambda: options.Precision.enableStochasticRounding(True),
        lambda: options.Distributed.disable(),
        lambda: options.TensorLocations.setWeightLocation(settings),
        lambda: options._Popart.set("a", 1),
        lambda: setattr(options, "_execution_strategy", poptorch.ShardedExecution()),
        lambda: model.options.deviceIterations(2),
    ):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            act()
    for duplicate in (options.clone(), copy.deepcopy(options)):
        duplicate.deviceIterations(2).Training.gradientAccumulation(2)
        duplicate._Popart.set("a", 1)
        assert options.device_iterations == 1
    assert pickle.loads(pickle.dumps(options)).replication_factor == 1


def test_wrong_objects_instead_of_options():
    with pytest.raises(poptorch.Error, match="Invalid type: 'options'"):
        poptorch.trainingModel(nn.Linear(1, 1), options={})


def test_dictionary_and_text():
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(3)
    values = options.toDict()
    assert values["gradient_accumulation"] == 3
    assert values["distributed_process_id"] == 0
    text = repr(options)
    assert text.startswith("Options(")
    assert "replication_factor=1" in text
    assert "Training=_TrainingOptions(" in text


def test_options_from_json():
    options = poptorch.Options().from_json(
        '{"Training.gradientAccumulation": 2, "deviceIterations": 4,'
        ' "outputMode": ["OutputMode.EveryN", 2], "modelName": "a.b"}'
    )
    assert options.Training.gradient_accumulation == 2
    assert (options.output_mode, options.output_return_period) == (poptorch.OutputMode.EveryN, 2)
    assert options.model_name == "a.b"


def test_options_from_a_file(tmp_path):
    path = tmp_path / "options.conf"
    path.write_text(
        "# comment\n\ndeviceIterations(2)\nTraining.gradientAccumulation(3)\n"
        "outputMode(poptorch.OutputMode.All)\n"
    )
    options = poptorch.Options()
    options.loadFromFile(str(path))
    assert options.device_iterations == 2
    assert options.Training.gradient_accumulation == 3
    path.write_text("# comment\ndeviceIterations(2)\n\nreplicationFactor(\n")
    with pytest.raises(ConfigFileError, match=r"(?s)at line 2 of options\.conf.*> replicationF"):
        poptorch.Options().loadFromFile(str(path))
    path.write_text("Training.gradientAccumulation('a')\n")
    with pytest.raises(AssertionError, match="Unexpected type"):
        poptorch.Options().loadFromFile(str(path))


def test_options_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 7}')
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all": "false"}')
    options = poptorch.Options().enableProfiling("reports")
    assert options.device_iterations == 7
    assert options._Popart.options["cachePath"] == str(tmp_path)
    assert options._Popart.options["engineOptions"]["autoReport.all"] == "false"
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (1, 4)
    assert options.Distributed.disable().numProcesses == 1


@pytest.mark.parametrize(
    ("choose", "value", "before", "after"),
    [
        (lambda o: o.Training.setAutomaticLossScaling(True),
         lambda o: o.Training.automatic_loss_scaling, False, True),
        (lambda o: o.Precision.enableStochasticRounding(True),
         lambda o: o.Precision.stochastic_rounding, False, True),
        (lambda o: o.Precision.enableFloatingPointExceptions(True),
         lambda o: o.Precision.floating_point_exceptions, False, True),
        (lambda o: o.updatableNamedBuffers(["a"]), lambda o: o.updatable_buffers, (), ("a",)),
        (lambda o: o.enableSyntheticData(True), lambda o: o.synthetic_data, False, True),
        (lambda o: o.logCycleCount(True), lambda o: o.counts_cycles, False, True),
        (lambda o: o.enableExecutableCaching("a"),
         lambda o: o.executable_cache, None, Path("a")),
        (lambda o: o.enableExecutableCaching("a").enableExecutableCaching(None),
         lambda o: o.executable_cache, None, None),
    ],
)  # fmt: skip
def test_session_options_are_read_as_values(choose, value, before, after):
    options = poptorch.Options()
    assert value(options) == before
    choose(options)
    assert value(options) == value(options.clone()) == after


def test_gradient_compression_is_read_with_its_settings():
    training = poptorch.Options().Training
    plain = training._description()
    assert training.gradient_compression_settings == {"method": "none"}
    assert training.gradientCompression("powersgd", 4) is training
    assert training.gradient_compression_settings == {
        "method": "powersgd", "rank": 4, "start_step": 1000, "warm_start": True
    }  # fmt: skip
    assert training.gradientCompression("bf16").gradient_compression_settings == {"method": "bf16"}
    assert training.gradientCompression("none")._description() == plain
    options = poptorch.Options()
    options.from_json('{"Training.gradientCompression": ["powersgd", 2, 10, false]}')
    assert options.Training.gradient_compression_settings["warm_start"] is False


def test_session_options_are_a_group_like_others():
    options = poptorch.Options()
    options._Popart.set("syntheticDataMode", 1).setPatterns({"a": True})
    options._Popart.set("syntheticDataMode", "of any type")
    values = options.outputMode(poptorch.OutputMode.All).toDict()
    assert values["syntheticDataMode"] == options._Popart.syntheticDataMode == "of any type"
    assert (values["patterns.a"], values["patterns_level"]) == (True, 2)
    assert repr(options).count("_PopartOptions(") == 1
    with pytest.raises(AttributeError, match="Invalid attribute 'no_such' of _PopartOptions"):
        _ = options._Popart.no_such
    duplicate = pickle.loads(pickle.dumps(options)).clone()
    duplicate.Training.setAutomaticLossScaling(True)
    assert duplicate._Popart.options["automaticLossScalingSettings.enabled"]
    assert not options.Training.automatic_loss_scaling


def test_executables_do_not_depend_on_where_they_are_cached():
    plain, other = poptorch.Options(), poptorch.Options()
    assert plain._description() == other.enableExecutableCaching("a")._description()
    assert plain._description() != other.enableStableNorm(True)._description()


def test_processes_are_those_of_open_mpi_unless_told(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    for group, expected in (
        (poptorch.options._DistributedOptions(), (1, 4)),
        (poptorch.options._DistributedOptions(2, 3), (2, 3)),
    ):
        assert (group.processId, group.numProcesses) == expected


def test_unknown_session_options_fail_when_the_model_is_compiled():
    options = poptorch.Options()
    options._Popart.set("noSuchOption", 1)
    with pytest.raises(poptorch.Error, match="noSuchOption"):
        poptorch.inferenceModel(nn.Linear(1, 1), options)(torch.ones(1, 1))


@pytest.mark.parametrize("name", ["convolutionOptions", "engineOptions", "matmulOptions"])
def test_session_options_that_have_to_be_dictionaries(name):
    options = poptorch.Options()
    options._Popart.set(name, "half")
    with pytest.raises(poptorch.Error, match=f"'{name}' is 'half': expected a dictionary"):
        poptorch.inferenceModel(nn.Linear(1, 1), options)(torch.ones(1, 1))


def test_log_levels():
    for level in ("TRACE", "DEBUG", "INFO", "ERR", "OFF", 3, "WARN"):
        poptorch.setLogLevel(level)
    with pytest.raises(ValueError, match="Invalid log level integer"):
        poptorch.setLogLevel(5)
    with pytest.raises(ValueError, match=r"Unknown log level.*DEBUG, ERR, INFO, OFF, TRACE, WARN"):
        poptorch.setLogLevel("LOUD")


class TestDistributedOptions:
    @pytest.fixture
    def launched(self, monkeypatch):
        for name, value in {
            "POPDIST_NUM_TOTAL_REPLICAS": "8",
            "POPDIST_NUM_LOCAL_REPLICAS": "2",
            "POPDIST_NUM_IPUS_PER_REPLICA": "1",
            "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
            "POPDIST_REPLICA_INDEX_OFFSET": "4",
        }.items():
            monkeypatch.setenv(name, value)

    def test_everything_comes_from_the_launcher(self, launched):
        options = poptorch.DistributedOptions()
        assert isinstance(options, poptorch.Options)
        assert options.replication_factor == 2
        assert (options.Distributed.processId, options.Distributed.numProcesses) == (2, 4)
        poptorch.DistributedOptions(ipus_per_replica=1)
        with pytest.raises(ValueError, match="ipus_per_replica=2"):
            poptorch.DistributedOptions(ipus_per_replica=2)

    @pytest.mark.parametrize(
        ("name", "act", "instead"),
        [
            ("useIpuId", lambda o: o.useIpuId(1), "poprun-py .*--ipus-per-replica"),
            ("replicationFactor", lambda o: o.replicationFactor(1), "poprun-py --num-replicas R"),
            (
                "Distributed.disable",
                lambda o: o.Distributed.disable(),
                "poprun-py --num-instances N",
            ),
            (
                "Distributed.setEnvVarNames",
                lambda o: o.Distributed.setEnvVarNames("a", "b"),
                "poprun-py --num-instances N",
            ),
            (
                "Distributed.configureProcessId",
                lambda o: o.Distributed.configureProcessId(0, 1),
                "poprun-py --num-instances N",
            ),
            # The same by the names of values, and from text.
            ("useIpuId", lambda o: setattr(o, "ipu_id", 1), "poprun-py .*--ipus-per-replica"),
            ("useIpuId", lambda o: o.createOrSet(ipu_id=1), "poprun-py .*--ipus-per-replica"),
            (
                "replicationFactor",
                lambda o: o.set(replication_factor=1),
                "poprun-py --num-replicas R",
            ),
            (
                "replicationFactor",
                lambda o: setattr(o, "replication_factor", 1),
                "the program gives 1, but the launcher has set 2.*poprun-py --num-replicas R",
            ),
            (
                "replicationFactor",
                lambda o: o.from_json('{"replicationFactor": 1}'),
                "poprun-py --num-replicas R",
            ),
            (
                "Distributed.configureProcessId",
                lambda o: o.Distributed.set(num_distributed_processes=1),
                "poprun-py --num-instances N",
            ),
        ],
    )
    def test_what_the_launcher_decides_is_blocked(self, launched, name, act, instead):
        blocked = f"Cannot call `{name}` with popdist.poptorch.Options.*{instead}"
        for options in (poptorch.DistributedOptions(), poptorch.DistributedOptions().clone()):
            with pytest.raises(RuntimeError, match=blocked):
                act(options)
            assert options.replication_factor == 2
            assert (options.Distributed.processId, options.Distributed.numProcesses) == (2, 4)

    def test_the_launchers_own_number_of_replicas_is_no_change(self, launched):
        options = poptorch.DistributedOptions().replicationFactor(2)
        options.replication_factor = 2
        assert options.replication_factor == 2

    def test_dictionary_of_frozen_options(self, launched):
        options = poptorch.DistributedOptions()
        options.outputMode(poptorch.OutputMode.All)
        options._freeze()
        assert options.toDict()["replication_factor"] == 2
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            options.deviceIterations(2)
        assert options.clone().deviceIterations(3).device_iterations == 3

    def test_popdists_own_spelling(self, launched):
        options = popdist.poptorch.Options(ipus_per_replica=1).deviceIterations(2)
        assert type(options) is type(options.clone()) is poptorch.DistributedOptions
        assert (options.replication_factor, options.device_iterations) == (2, 2)
        with pytest.raises(ValueError, match="ipus_per_replica=2"):
            popdist.poptorch.Options(ipus_per_replica=2)
        assert type(popdist.poptorch.Options()) is poptorch.Options
        assert popdist.popdist_core.getNumInstances() == 4

    @pytest.mark.parametrize(
        ("make", "warns"), [(poptorch.Options, True), (poptorch.DistributedOptions, False)]
    )
    def test_other_replicas_than_the_launchers(self, launched, monkeypatch, caplog, make, warns):
        monkeypatch.setenv("POPDIST_NUM_TOTAL_REPLICAS", "2")
        monkeypatch.setenv("POPDIST_REPLICA_INDEX_OFFSET", "0")
        options = make().showCompilationProgressBar(False)
        poptorch.trainingModel(Mlp(), options).compile(*classified(2))
        assert ("gave this instance 2 local replicas" in caplog.text) == warns

    def test_replicas_have_as_many_ipus_as_the_launcher_gave(self, launched, monkeypatch):
        model = poptorch.BeginBlock(nn.Linear(2, 2), ipu_id=1)
        for given in ("1", "2"):
            monkeypatch.setenv("POPDIST_NUM_IPUS_PER_REPLICA", given)
            options = poptorch.DistributedOptions().showCompilationProgressBar(False)
            inference = poptorch.inferenceModel(model, options.deviceIterations(2))
            if given == "1":
                with pytest.raises(poptorch.Error, match="poprun-py --ipus-per-replica 2"):
                    inference(torch.ones(4, 2))
            else:
                assert inference(torch.ones(4, 2)).shape == (4, 2)

    def test_alone_it_is_one_instance_with_replicas_set_by_hand(self):
        options = poptorch.DistributedOptions().replicationFactor(3)
        assert options.replication_factor == 3
        assert (options.Distributed.processId, options.Distributed.numProcesses) == (0, 1)
        assert not options.exists("ipu_id")
        with pytest.raises(RuntimeError, match=r"poprun-py --num-instances N"):
            options.Distributed.configureProcessId(0, 2)
        options.replicationFactor(1).showCompilationProgressBar(False)
        assert poptorch.inferenceModel(nn.Linear(1, 1), options)(torch.ones(1, 1)).shape == (1, 1)
        assert (options.Distributed.processId, options.Distributed.numProcesses) == (0, 1)
