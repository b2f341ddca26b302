"""What is found under the SDK's names are our own objects, in every module of theirs."""

from __future__ import annotations

import importlib
import pickle
import pickletools
from types import ModuleType

import pytest
from sdk_names.places import forget

import popdist_py
import popdist_py.poptorch

pytestmark = pytest.mark.usefixtures("names")

# What PopTorch's documentation lists.
DOCUMENTED = """
trainingModel inferenceModel load isRunningOnIpu ipuHardwareIsAvailable ipuHardwareVersion
setLogLevel registerCustomArgParser registerPreCompileHook registerPostCompileHook getIpuTensorId
print module_repr
Options PoplarExecutor DataLoader AsynchronousDataAccessor TensorLocationSettings Attribute
ICustomArgParser Error RecoverableError UnrecoverableError ConfigFileError
Block BeginBlock BlockFunction removeBlocks Stage Phase NameScope MultiConv CPU
PipelinedExecution ShardedExecution ParallelPhasedExecution SerialPhasedExecution
identity_loss for_loop cond nop dynamic_slice dynamic_update recomputationCheckpoint
serializedMatMul set_available_memory set_overlap_for_input set_overlap_for_output ipu_print_tensor
ctc_beam_search_decoder custom_op fps nearest
OutputMode ReductionType MeanReductionStrategy DataLoaderMode SharingStrategy ConnectionType
SyncPattern HalfFloatCastingBehavior Liveness AutoStage MultiConvPlanType CommGroupType
VariableRetrievalMode MatMulSerializationMode OverlapMode
enums options ops optim profiling testing poptorch_core __version__
"""
INSIDE = {
    "autocasting": "Policy autocast",
    "enums": "OutputMode DataLoaderMode",
    "functions": "fps nearest",
    "ops": "ipu_print_tensor custom_op",
    "optim": "SGD Adam AdamW RMSprop LAMB LARS",
    "options": "Options ConfigFileError _DistributedOptions _TrainingOptions _PrecisionOptions"
    " _TensorLocationOptions _JitOptions _PopartOptions",
    "poptorch_core": "Error RecoverableError UnrecoverableError",
    "profiling": "Channel",
    "testing": "allclose",
    "types": "Options DataLoader ICustomArgParser",
}
POPDIST = """
isPopdistEnvSet getNumTotalReplicas getNumLocalReplicas getNumIpusPerReplica getReplicaIndexOffset
getNumInstances getInstanceIndex getLocalInstanceIndex getDeviceId checkNumIpusPerReplica init
execute_on_instances initializeBackend finalizeBackend isBackendInitialized registerDefaultBackend
registerBackend synchronize
"""


def fresh(names):
    """Yield names; for each of them, no package of the SDK has been imported yet."""
    for name in names:
        forget()
        yield name


def test_every_name_of_poptorch():
    for name in fresh({*DOCUMENTED.split(), *popdist_py.poptorch.__all__}):
        ours = getattr(popdist_py.poptorch, name)
        theirs = getattr(importlib.import_module("poptorch"), name)
        if isinstance(ours, ModuleType):
            assert theirs is importlib.import_module(f"poptorch.{name}"), name
            assert ours.__all__, name
            assert all(getattr(theirs, each) is getattr(ours, each) for each in ours.__all__), name
        else:
            assert theirs is ours, name


def test_every_module_of_poptorch():
    for module in fresh(INSIDE):
        theirs = importlib.import_module(f"poptorch.{module}")
        where = getattr(popdist_py.poptorch, module, popdist_py.poptorch)
        for name in INSIDE[module].split():
            assert getattr(theirs, name) is getattr(where, name), (module, name)


def test_every_name_of_popdist():
    import popdist

    for name in {*POPDIST.split(), *popdist_py.__all__}:
        assert getattr(popdist, name) is getattr(popdist_py, name), name
    assert set(POPDIST.split()) < set(dir(popdist))


def test_every_name_of_horovod_and_popart():
    modules = (
        "horovod.torch", "horovod.torch.mpi_ops", "horovod.torch.compression",
        "horovod.torch.functions", "horovod.torch.optimizer", "horovod.torch.sync_batch_norm",
        "horovod.common.exceptions", "horovod.common.util",
        "popart",
    )  # fmt: skip
    for module in fresh(modules):
        theirs = importlib.import_module(module)
        ours = importlib.import_module(f"popdist_py.{module}")
        assert ours.__all__, module
        assert all(getattr(theirs, name) is getattr(ours, name) for name in ours.__all__), module


def test_what_horovod_and_popart_lack_is_said_with_what_to_do():
    import horovod.torch as hvd
    import popart

    assert hvd.Average is hvd.mpi_ops.Average
    assert importlib.import_module("horovod").__version__.startswith("0.28.")
    with pytest.raises(AttributeError, match=r"elastic of Horovod is not.*--max-restarts"):
        _ = hvd.elastic
    with pytest.raises(AttributeError, match=r"run is not available.*poprun-py"):
        _ = importlib.import_module("horovod").run
    with pytest.raises(ImportError, match=r"elastic is not available.*--max-restarts"):
        from horovod.torch import elastic  # noqa: F401
    for module in ("runner", "run", "spark", "ray", "tensorflow", "tensorflow.keras", "keras"):
        with pytest.raises(ImportError, match=r"is not available .*(poprun|horovod)"):
            importlib.import_module(f"horovod.{module}")
    with pytest.raises(AttributeError, match=r"popart\.Builder is not available.*poptorch"):
        _ = popart.Builder


def test_the_options_of_popdist_are_those_of_an_instance():
    import popdist
    import poptorch

    # Before anybody imported the module itself.
    options = popdist.poptorch.Options()
    assert type(options) is popdist_py.poptorch.DistributedOptions
    assert isinstance(options, poptorch.Options)
    two = popdist.poptorch.Options(ipus_per_replica=2).outputMode(poptorch.OutputMode.All)
    assert two.toDict()["ipus_per_replica"] == 2
    assert importlib.import_module("popdist.poptorch") is popdist.poptorch


def test_the_native_modules():
    from popdist import popdist_core
    from poptorch import poptorch_core

    assert popdist_core.getNumInstances is popdist_py.getNumInstances
    assert poptorch_core.Error is popdist_py.poptorch.Error


def test_what_is_not_there_is_said_under_the_name_that_was_asked():
    for package in fresh(("poptorch", "popdist")):
        module = importlib.import_module(package)
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Optionz'"):
            _ = module.Optionz
        with pytest.raises(ImportError, match=f"cannot import name 'Optionz' from '{package}'"):
            exec(f"from {package} import Optionz")
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{package}.model'"):
            importlib.import_module(f"{package}.model")


def test_our_rooms_are_no_part_of_the_sdk():
    import popdist
    import poptorch

    assert not any(hasattr(poptorch, room) for room in ("model", "data", "update", "calls"))
    assert not any(hasattr(popdist, room) for room in ("popart", "horovod", "collectives"))


def test_other_frameworks_of_popdist_are_refused():
    for other in fresh(("popart", "tensorflow")):
        with pytest.raises(ModuleNotFoundError, match=rf"popdist\.{other} .*PyTorch"):
            importlib.import_module(f"popdist.{other}")


def test_a_star_import_brings_the_documented_names():
    scope = {}
    exec("from poptorch import *\nfrom popdist import *", scope)
    assert set(DOCUMENTED.split()) - {"__version__"} <= set(scope)
    assert set(POPDIST.split()) <= set(scope)
    assert scope["Options"] is popdist_py.poptorch.Options


def test_reloading_makes_no_second_objects():
    import poptorch
    import poptorch.optim

    for module in (poptorch.optim, poptorch, poptorch.options):
        importlib.reload(module)
    assert poptorch.optim.AdamW is popdist_py.poptorch.optim.AdamW
    assert poptorch.Options is popdist_py.poptorch.Options
    assert isinstance(popdist_py.poptorch.Options(), poptorch.Options)


def test_what_was_pickled_under_the_sdk_loads_as_ours():
    places = (
        ("poptorch", "Options"), ("poptorch.options", "Options"), ("poptorch.optim", "AdamW"),
        ("poptorch.enums", "OutputMode"), ("popdist.poptorch", "Options"),
    )  # fmt: skip
    for module, name in fresh(places):
        # Protocol 0 names a class as c<module>\n<name>\n.
        found = pickle.loads(f"c{module}\n{name}\n.".encode())
        assert found is getattr(importlib.import_module(module), name), (module, name)
        assert found.__module__.startswith("popdist_py."), (module, name)


def test_what_is_pickled_under_the_names_loads_without_them():
    import poptorch

    options = poptorch.Options().deviceIterations(3)
    stored = pickle.dumps([options, poptorch.OutputMode.All, poptorch.Error("x")])
    texts = [text for _, text, _ in pickletools.genops(stored) if isinstance(text, str)]
    assert "popdist_py.poptorch.options.options" in texts
    assert not [text for text in texts if text.partition(".")[0] in ("poptorch", "popdist")]
    assert pickle.loads(stored)[0].device_iterations == 3
