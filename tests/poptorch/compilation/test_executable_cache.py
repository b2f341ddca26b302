"""The folder of compiled executables: shared by processes, apart for other models and options."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import datetime
import decimal
import errno
import functools
import importlib
import io
import linecache
import multiprocessing
import operator
import os
import random
import re
import string
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from poptorch.unreadable_files import UNREADABLE, make_unreadable
from support.damage import damaged
from support.models import Mlp, classified, quiet_options
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import get_ema_multi_avg_fn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.compilation import backends, model_key
from popdist_py.poptorch.compilation.backend_comparison import BackendComparison
from popdist_py.poptorch.compilation.executable_cache import ExecutableCache
from popdist_py.poptorch.compilation.model_key_text import code_text


def back_end_of(folder):
    """Return what runs the replicas of a model that is compiled through the cache."""
    options = quiet_options().replicationFactor(2).enableExecutableCaching(str(folder))
    model = Mlp()
    training = poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=0.1)
    )
    training.compile(*classified(8))
    return training._compiled.program.back_end


def test_a_back_end_that_agreed_is_not_compared_again(tmp_path, monkeypatch):
    assert back_end_of(tmp_path) == "fused graph"
    monkeypatch.setattr(BackendComparison, "difference", lambda *_: pytest.fail("compared again"))
    monkeypatch.setattr(BackendComparison, "prepare", lambda *_: pytest.fail("the loop ran again"))
    assert back_end_of(tmp_path) == "fused graph"


def test_a_back_end_that_fails_though_it_agreed_before_is_replaced(tmp_path, monkeypatch):
    assert back_end_of(tmp_path) == "fused graph"
    monkeypatch.setattr(backends, "BACKENDS", backends.BACKENDS[:2])
    assert back_end_of(tmp_path) == "graph"


class Noting(nn.Module):
    """Notes when it is traced."""

    def __init__(self, log):
        super().__init__()
        self.log = log
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        from popdist_py.poptorch.tracing import current_forward

        if current_forward.is_tracing():
            with Path(self.log).open("a") as file:
                file.write("traced\n")
        return self.inner(x)


def _compile(log, cache):
    options = quiet_options().enableExecutableCaching(cache)
    poptorch.inferenceModel(Noting(log), options).compile(torch.ones(1, 2))


def _compile_together(barrier, log, cache):
    barrier.wait()
    _compile(log, cache)


def test_processes_share_one_compilation(tmp_path):
    log, cache = str(tmp_path / "log"), tmp_path / "cache"
    fork = multiprocessing.get_context("fork")
    arguments = (fork.Barrier(2), log, str(cache))
    processes = [fork.Process(target=_compile_together, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(40)
        assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == "traced\n"
    assert len(list(cache.iterdir())) == 1


def test_different_models_and_options_have_their_own_files(tmp_path):
    def compiled(model, **change):
        options = quiet_options().enableExecutableCaching(str(tmp_path))
        for name, value in change.items():
            getattr(options, name)(value)
        inference = poptorch.inferenceModel(model, options)
        return inference(torch.ones(4, 2)), inference

    compiled(nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    out, _ = compiled(model)
    torch.testing.assert_close(out, model(torch.ones(4, 2)).detach())
    assert len(list(tmp_path.iterdir())) == 1
    compiled(nn.Linear(2, 3))
    compiled(nn.Linear(2, 2), deviceIterations=2)
    assert len(list(tmp_path.iterdir())) == 3


class Refuses(nn.Module):
    """Cannot be compiled while ``path`` exists."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def forward(self, x):
        if self.path.exists():
            raise ValueError("refused")
        return 2 * x


def test_a_compilation_that_failed_leaves_the_next_one_to_compile(tmp_path):
    reason, cache = tmp_path / "reason", tmp_path / "cache"
    reason.touch()
    inference = poptorch.inferenceModel(
        Refuses(reason), quiet_options().enableExecutableCaching(str(cache))
    )
    with pytest.raises(ValueError, match="refused"):
        inference(torch.ones(2))
    reason.unlink()
    assert inference(torch.ones(2)).tolist() == [2, 2]
    assert len(list(cache.iterdir())) == 1


def _cached(folder, model=None, strategy=None, change=None):
    options = quiet_options().enableExecutableCaching(str(folder)).deviceIterations(4)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    if change is not None:
        change(options)
    inference = poptorch.inferenceModel(model or nn.Linear(2, 2), options)
    inference(torch.ones(4, 2))
    return inference


class TwoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        with poptorch.Block("a"):
            x = self.first(x)
        with poptorch.Block("b"):
            return self.second(x)


def _ipus(inference):
    return inference._compiled.executable.first_forward.placement.num_ipus


def test_a_strategy_does_not_find_what_was_compiled_for_another(tmp_path):
    a, b = poptorch.Stage, poptorch.ShardedExecution
    assert _ipus(_cached(tmp_path, TwoBlocks(), b(a("a"), a("b")))) == 2
    assert _ipus(_cached(tmp_path, TwoBlocks(), b(a("a", "b")))) == 1
    assert _ipus(_cached(tmp_path, TwoBlocks(), b(a("a").ipu(1), a("b").ipu(3)))) == 4
    assert len(list(tmp_path.iterdir())) == 3
    assert _ipus(_cached(tmp_path, TwoBlocks(), b(a("a"), a("b")))) == 2
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "strategies",
    [
        (poptorch.ShardedExecution("a", "b"), poptorch.PipelinedExecution("a", "b")),
        (
            poptorch.SerialPhasedExecution("a", "b"),
            poptorch.SerialPhasedExecution("a", "b").setTensorsLiveness(
                poptorch.Liveness.OffChipAfterFwd
            ),
            poptorch.SerialPhasedExecution("a", "b").useSeparateBackwardPhase(),
            poptorch.SerialPhasedExecution(poptorch.Phase("a").ipus(1), "b"),
            poptorch.SerialPhasedExecution(["a", "b"]),
            poptorch.ParallelPhasedExecution("a", "b"),
            poptorch.ParallelPhasedExecution("a", "b").sendTensorsOffChipAfterFwd(),
        ),
        tuple(poptorch.PipelinedExecution(stage) for stage in poptorch.AutoStage),
    ],
)
def test_strategies_describe_all_that_was_set(strategies):
    described = {
        repr(poptorch.Options().setExecutionStrategy(s)._description()) for s in strategies
    }
    assert len(described) == len(strategies)


def test_a_cached_model_is_found_by_everything_that_compiling_depends_on(tmp_path, monkeypatch):
    def dropped(p):
        return nn.Sequential(nn.Linear(2, 2), nn.Dropout(p))

    def began(ipu):
        return nn.Sequential(poptorch.BeginBlock(nn.Linear(2, 2), "a", ipu_id=ipu))

    increment = poptorch.AutoStage.SameAsIpu
    ways = [
        lambda: _cached(tmp_path),
        lambda: _cached(tmp_path, change=lambda options: options.disableModuleNamescope()),
        lambda: _cached(tmp_path, change=lambda options: options.enableStableNorm(True)),
        lambda: _cached(
            tmp_path, change=lambda options: options.Precision.setPartialsType(torch.half)
        ),
        lambda: _cached(tmp_path, nn.Sequential(nn.ReLU(), nn.Tanh())),
        lambda: _cached(tmp_path, nn.Sequential(nn.Tanh(), nn.ReLU())),
        lambda: _cached(tmp_path, dropped(0.0)),
        lambda: _cached(tmp_path, dropped(0.5)),
        lambda: _cached(tmp_path, began(0), increment),
        lambda: _cached(tmp_path, began(1), increment),
    ]
    for number, way in enumerate(ways, 1):
        way()
        assert len(list(tmp_path.iterdir())) == number
    for way in ways:
        way()
    assert len(list(tmp_path.iterdir())) == len(ways)
    for place in (model_key, torch):
        monkeypatch.setattr(place, "__version__", "0.0.0")
        _cached(tmp_path)
        monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == len(ways) + 2


def test_a_training_model_is_compiled_again_when_its_forward_was_edited(tmp_path, monkeypatch):
    source = tmp_path / "edited.py"
    text = (
        "import torch\n"
        "import popdist_py.poptorch as poptorch\n"
        "class Edited(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(2, 2)\n"
        "    def forward(self, x):\n"
        "        return poptorch.identity_loss({} * self.layer(x), 'sum')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    # Python takes bytecode of a source of the same size and second for that of this one.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for factor in (1, 2, 1):
        source.write_text(text.format(factor))
        monkeypatch.delitem(sys.modules, "edited", raising=False)
        linecache.clearcache()
        importlib.invalidate_caches()
        model = importlib.import_module("edited").Edited()
        options = quiet_options().enableExecutableCaching(str(tmp_path / "cache"))
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        poptorch.trainingModel(model, options, optimizer)(torch.ones(1, 2))
    assert len(list((tmp_path / "cache").iterdir())) == 2


@dataclasses.dataclass
class Settings:
    depth: int = 1


def scaled_by(factor):
    return lambda x: x * factor


class WithSettings(nn.Module):
    """Does what its attributes and the functions around it say."""

    def __init__(self, **settings):
        super().__init__()
        vars(self).update(settings)

    def forward(self, x):
        return helper(x)


def helper(x):
    return sum(twice(y) for y in [x])


def twice(x):
    return x + x


def thrice(x):
    return 3 * x


def test_settings_of_a_module_choose_the_executable(tmp_path):
    settings = [
        {}, {"p": 0}, {"p": 0.5}, {"p": True}, {"p": None}, {"p": "a"}, {"p": (1, 2)},
        {"p": [1, 3]}, {"p": {"a": 1}}, {"p": {"a": 2}}, {"p": {"a", "b", "c"}}, {"q": 0},
        {"_p": 0}, {"p": Settings(1)}, {"p": Settings(2)}, {"p": scaled_by(1)},
        {"p": scaled_by(2)}, {"p": functools.partial(twice, x=1)},
    ]  # fmt: skip
    cyclic = []
    cyclic.append(cyclic)
    settings.append({"p": cyclic})
    for repetition in range(2):
        for number, chosen in enumerate(settings, 1):
            _cached(tmp_path, WithSettings(**chosen))
            files = len(list(tmp_path.iterdir()))
            assert files == (number if repetition == 0 else len(settings)), chosen


class Plain:
    """An object of a class of the user's own."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def method(self):
        return 1


class WithSlots:
    __slots__ = ("depth",)

    def __init__(self, depth=None):
        if depth is not None:
            self.depth = depth


class Named(dict):
    """A dictionary with an attribute."""

    def __init__(self, name):
        super().__init__(a=1)
        self.name = name


def cyclic_object(depth):
    one = Plain(depth=depth)
    one.itself = [one]
    return one


def doubled(value, count=40):
    """Return a value inside objects that mention one another twice, 2 ** count times in all."""
    for _ in range(count):
        value = Plain(left=value, right=value)
    return value


def context_variable(value):
    return contextvars.ContextVar("variable", default=value)


@functools.lru_cache
def cached_twice(x):
    return 2 * x


@functools.lru_cache
def cached_thrice(x):
    return 3 * x


DIFFERENT = {
    "objects": lambda: [Plain(), Plain(a=1), Plain(a=2), Plain(b=1), Plain(a=Plain(b=1))],
    "slots": lambda: [WithSlots(), WithSlots(1), WithSlots(2)],
    "subclasses": lambda: [Named("a"), Named("b")],
    "cycles": lambda: [cyclic_object(1), cyclic_object(2)],
    "much twice": lambda: [doubled(1), doubled(2)],
    "namespaces": lambda: [types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)],
    "torch's functions": lambda: [torch.relu, torch.tanh, torch.Tensor.relu, torch.Tensor.tanh],
    "functions in C": lambda: [len, max, operator.itemgetter(1), operator.itemgetter(2)],
    "cached functions": lambda: [cached_twice, cached_thrice],
    "bound methods": lambda: [Plain(a=1).method, Plain(a=2).method, [1].count, [2].count],
    "values": lambda: [
        *(decimal.Decimal(1), decimal.Decimal(2), collections.deque([1]), collections.deque([2])),
        *(datetime.date(2020, 1, 1), datetime.date(2020, 1, 2), re.compile("a"), re.compile("b")),
        *(torch.channels_last, torch.preserve_format, torch.device("cpu"), torch.device("meta")),
    ],
    "arrays": lambda: [
        *(np.float32(1), np.float32(2), np.array([1, 2]), np.array([2, 1]), np.array([1.0, 2.0])),
        np.array([Plain(a=1)]),
    ],
    "modules of Python": lambda: [operator, types],
    "objects of Python": lambda: [
        *(random.Random(1), random.Random(2), string.Template("a"), string.Template("b")),
        *(types.MappingProxyType({"a": 1}), types.MappingProxyType({"a": 2})),
        *(memoryview(b"a"), memoryview(b"b"), *map(context_variable, [1, 2])),
    ],
    "objects of torch": lambda: [
        *(torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.0, 5.0)),
        *(get_ema_multi_avg_fn(0.5), get_ema_multi_avg_fn(0.9)),
    ],
    "constant tensors": lambda: [torch.zeros(2), torch.ones(2), torch.ones(2).long()],
    "modules": lambda: [
        *([nn.Linear(2, 2)], [nn.Linear(2, 3)], [nn.Dropout(0.1)], [nn.Dropout(0.2)]),
        Plain(inner=nn.Dropout(0.2)),
    ],
}


def _text(value):
    return str(code_text(WithSettings(p=value)))


@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_a_module_holds_is_named_by_its_content(kind):
    texts, again = ([_text(value) for value in DIFFERENT[kind]()] for _ in range(2))
    assert texts == again
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("held", [threading.Lock(), object(), iter([1]), open])
def test_what_has_no_value_is_named_by_its_class(held):
    assert hex(id(held))[2:] not in _text(held)


@pytest.mark.parametrize(
    "held",
    [
        lambda: torch.ones(2, dtype=torch.cfloat).conj(),
        lambda: torch.ones(2, dtype=torch.cfloat).conj().imag,
        lambda: torch.ones(2).to_sparse(),
        lambda: torch.ones(0, 2),
        lambda: torch.tensor(1.0, requires_grad=True) * 2,
        lambda: torch.ones(2, device="meta"),
        lambda: FakeTensorMode().from_tensor(torch.ones(2)),
    ],
    ids=["conjugate", "negative", "sparse", "empty", "result", "meta", "without data"],
)
def test_every_tensor_has_a_text(held):
    assert _text(held()) == _text(held())


def test_hooks_of_modules_are_named_by_what_they_do():
    texts = []
    for hook in (lambda *_: None, lambda *args: 2 * args[2]):
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].register_forward_hook(hook)
        texts.append(str(code_text(model)))
    assert texts[0] != texts[1]


def test_functions_that_a_forward_leads_to_choose_the_executable(tmp_path, monkeypatch):
    _cached(tmp_path, WithSettings())
    monkeypatch.setitem(globals(), "twice", thrice)
    _cached(tmp_path, WithSettings())
    assert len(list(tmp_path.iterdir())) == 2


class WithoutHash(type):
    __hash__ = None


def with_an_empty_cell():
    code = scaled_by(1).__code__
    return types.FunctionType(code, {}, closure=(types.CellType(),) * len(code.co_freevars))


@pytest.mark.parametrize("held", [WithoutHash("Kind", (), {}), with_an_empty_cell()])
def test_whatever_a_module_holds_can_be_compiled(tmp_path, held):
    _cached(tmp_path, WithSettings(p=held))
    assert len(list(tmp_path.iterdir())) == 1


def _order_and_text():
    """Return the order of a set of names in this process, and the key of a model with sets."""
    names = {f"name {number}" for number in range(10)}
    held = Plain(functions={helper, twice, thrice}, classes={Plain, WithSettings})
    model = WithSettings(p=names, q=torch.ones(2), r=object(), s=held)
    return list(names), str(code_text(model))


@pytest.mark.mpi
def test_a_model_has_one_key_in_all_processes(instances):
    """Each process has hashes of its own, so that sets have another order in each."""
    (first, one), (second, other) = instances.run(_order_and_text)
    assert first != second
    assert one == other


class Branches(nn.Module):
    def __init__(self, p, has_second):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.p, self.config = p, Plain(has_second=has_second)

    def forward(self, x):
        y = self.first(x) + (self.second(x) if self.config.has_second else 0)
        return poptorch.identity_loss(torch.dropout(y, self.p, True) if self.p else y, "sum")


def test_a_model_with_other_settings_trains_as_without_the_cache(tmp_path):
    def trained(p, has_second, options):
        torch.manual_seed(0)
        model = Branches(p, has_second)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, options.randomSeed(3), optimizer)
        training(torch.ones(2, 2))
        return {name: value.clone() for name, value in training.state_dict().items()}

    for p, has_second in [(0, False), (0, True), (0.5, False)]:
        cached = trained(p, has_second, quiet_options().enableExecutableCaching(str(tmp_path)))
        torch.testing.assert_close(cached, trained(p, has_second, quiet_options()))


def test_the_folder_of_the_cache_can_move(tmp_path):
    _cached(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    _cached(tmp_path / "two")
    assert len(list((tmp_path / "two").iterdir())) == 1


@pytest.mark.parametrize("how", UNREADABLE)
def test_a_cached_executable_that_cannot_be_read_is_compiled_again(tmp_path, monkeypatch, how):
    log, cache = tmp_path / "log", tmp_path / "cache"
    _compile(str(log), str(cache))
    (file,) = cache.iterdir()
    make_unreadable(file, how, monkeypatch)
    for _ in range(2):
        _compile(str(log), str(cache))
    assert log.read_text() == 2 * "traced\n"
    assert list(cache.iterdir()) == [file]


class TestFoldersThatCannotBeWritten:
    """They are no reason to stop: the model is compiled, and the log says what to do."""

    def test_a_folder_that_cannot_be_made(self, tmp_path, caplog):
        (tmp_path / "file").touch()
        assert _cached(tmp_path / "file" / "cache") is not None
        assert (
            f"not stored in the cache folder {tmp_path / 'file' / 'cache'} (Not a directory)"
            in caplog.text
        )
        assert "--executable-cache-path" in caplog.text

    def test_a_folder_without_room(self, tmp_path, caplog, monkeypatch):
        class Full(io.BufferedWriter):
            def write(self, data):
                if self.tell() > 1000:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(data)

        opened = Path.open

        def full(path, mode="r", **arguments):
            if mode != "wb":
                return opened(path, mode, **arguments)
            return Full(io.FileIO(path, "w"))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", full)
            _cached(tmp_path)
        assert "(No space left on device)" in caplog.text
        (file,) = tmp_path.iterdir()
        assert file.stat().st_size == 0
        _cached(tmp_path)
        assert file.stat().st_size > 0

    def test_what_a_folder_holds_is_used_though_it_is_only_read(
        self, tmp_path, caplog, monkeypatch
    ):
        log = tmp_path / "log"
        _compile(str(log), str(tmp_path / "cache"))
        opened = os.open

        def read_only(path, flags, *arguments, **keywords):
            if flags & os.O_CREAT:
                raise PermissionError(errno.EACCES, "Permission denied")
            return opened(path, flags, *arguments, **keywords)

        monkeypatch.setattr(os, "open", read_only)
        _compile(str(log), str(tmp_path / "cache"))
        assert log.read_text() == "traced\n"
        assert caplog.text == ""


class TestWhoCanWrite:
    """Loading an executable runs code: what others may have written is compiled again."""

    @pytest.fixture
    def cache(self, tmp_path):
        before = os.umask(0)
        try:
            _compile(str(tmp_path / "log"), str(tmp_path / "cache"))
        finally:
            os.umask(before)
        return tmp_path / "cache"

    def test_folder_and_files_are_for_their_user_alone(self, cache):
        (file,) = cache.iterdir()
        assert cache.stat().st_mode & 0o777 == 0o700
        assert file.stat().st_mode & 0o777 == 0o600

    def test_a_file_that_others_can_write_to_is_replaced(self, cache, tmp_path, caplog):
        (file,) = cache.iterdir()
        file.chmod(0o666)
        for _ in range(2):
            _compile(str(tmp_path / "log"), str(cache))
        assert (tmp_path / "log").read_text() == 2 * "traced\n"
        assert file.stat().st_mode & 0o777 == 0o600
        (warning,) = caplog.messages
        assert (
            f"because the cached file is not trusted: {file}: other users can write to the file "
            "(mode 0666)" in warning
        )
        assert f"chmod go-w {file}" in warning

    def test_a_folder_that_others_can_write_to_is_not_used(self, cache, tmp_path, caplog):
        cache.chmod(0o777)
        for file in cache.iterdir():
            file.unlink()
        _compile(str(tmp_path / "log"), str(cache))
        assert (tmp_path / "log").read_text() == 2 * "traced\n"
        (warning,) = caplog.messages
        assert (
            f"compiled without the executable cache: {cache}: other users can replace files"
            in warning
        )
        assert f"chmod go-w {cache}" in warning
        assert not list(cache.iterdir())


def test_a_damaged_executable_is_compiled_again_with_one_warning(tmp_path, caplog):
    log, cache = tmp_path / "log", tmp_path / "cache"
    _compile(str(log), str(cache))
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    # Far inside, where torch itself sees nothing.
    file.write_bytes(whole[:-700] + bytes([whole[-700] ^ 1]) + whole[-699:])
    for _ in range(2):
        _compile(str(log), str(cache))
    assert log.read_text() == 2 * "traced\n"
    (warning,) = caplog.messages
    assert (
        f"compiled again, because the cached file {file} cannot be read: the file is damaged"
        in warning
    )


@pytest.mark.sweep
def test_an_executable_that_is_damaged_anywhere_is_not_loaded(tmp_path):
    _cached(tmp_path)
    (file,) = tmp_path.iterdir()
    cache = ExecutableCache(file)
    assert cache.load() is not None
    for how, data in damaged(file.read_bytes()):
        file.write_bytes(data)
        assert cache.load() is None, how
