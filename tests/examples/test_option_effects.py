"""Each option of an example acts, or a line says that it does not.

The CNN programs have a table of their own, in ``test_cnns_option_effects.py``.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
from types import SimpleNamespace

import pytest
import torch
from support.repository import ROOT
from torch.utils.data import SequentialSampler, TensorDataset

from popdist_py import poptorch

pytestmark = pytest.mark.examples

EXAMPLES = ROOT / "examples"
# Options that become options of PopTorch: the function that makes those, and what is given.
MAKES_OPTIONS = {
    "data_loading/data_loading.py": (
        "parse", lambda module, args: module["make_options"](args, synthetic=False),
        {"--replicas": "2", "--gradient-accumulation": "2", "--device-iterations": "2",
         "--device": "bow", "--case": "1"},
    ),
    "hands_on/main.py": (
        "parse_arguments", lambda module, args: module["training_options"](args),
        {"--gradient-accumulation": "8", "--device-iterations": "4", "--device-iteration": "4",
         "--replicas": "2", "--seed": "3", "--device": "bow", "--execution": "fused"},
    ),
    "pipelining/mnist_pipeline.py": (
        "parse_arguments", lambda module, args: module["get_training_options"](args[1]),
        {"--device-iterations": "2", "--gradient-accumulation": "8", "--strategy": "sharded",
         "--offload-optimiser": "", "--device": "bow", "--seed": "3", "--profile": ""},
    ),
}  # fmt: skip
# What does nothing beside other options, and what the line says.
IDLE = {
    "cnns/curve.py": [("folder --epochs 3", "--epochs (the run is trained)", "main")],
    "course/data_parallel.py": [("--n-reps 3", "--n-reps (times are modelled)", "arguments")],
    "course/lfw_dataset.py": [
        ("-output file.png", "--output (no -visualize_batch)", "main"),
        ("-batches_to_check 3", "--batches-to-check (neither -get_timing nor -plot)", "main"),
        ("-workers 3", "--workers (no -plot)", "main"),
        ("-num_workers 3", "--num-workers (nothing is loaded)", "main"),
    ],
    "course/speed_up.py": [
        ("--quick --steps 3", "--steps (--quick chooses it)", "arguments"),
        ("--quick --repetitions 2", "--repetitions (--quick chooses it)", "arguments"),
    ],
    "data_loading/figures.py": [
        ("batching f.svg --stages 2 --gradient-accumulation 3",
         "--stages (the figure batching has none)", "parse"),
        ("throughput f.svg --replicas 3", "--replicas (the figure throughput has none)", "parse"),
    ],
    "hands_on/compare.py": [
        ("--steps 0 --side 32", "--side (--steps 0 trains nothing)", "parse_arguments"),
    ],
    "language_model.py": [("--save-every 3", "--save-every (no --checkpoints)", "main")],
    "pipelining/figures.py": [
        ("--compare a b --ipus 2", "--ipus (--compare draws what was measured)", "parse_arguments"),
    ],
    "pipelining/mnist_pipeline.py": [
        ("--profile-dir there", "--profile-dir (no --profile)", "parse_arguments"),
    ],
    "sweeps/submitit_jobs.py": [
        ("--cpus 3", "--cpus (no --cluster slurm)", "parse_arguments"),
    ],
    "train.py": [("--data-dir there", "--data-dir (scikit-learn has the digits)", "main")],
}  # fmt: skip
# With the launcher, which gives the replicas.
LAUNCHED = {
    "data_loading/data_loading.py": "parse",
    "hands_on/main.py": "parse_arguments",
    "language_model.py": "main",
    "train.py": "main",
}
# Programs that learn, and what stands for their data and for the processes of a job.
_TWO_SETS = (TensorDataset(torch.zeros(64, 1, 8, 8), torch.zeros(64, dtype=torch.long)),) * 2
_ALONE = {
    "dist": SimpleNamespace(
        get_rank=lambda: 0, get_world_size=lambda: 1, all_gather_object=lambda *_: None,
        barrier=lambda: None, init_process_group=lambda *_: None,
        destroy_process_group=lambda: None,
    ),
    "DistributedSampler": lambda data, **_: SequentialSampler(data),
    "DistributedDataParallel": lambda model: model,
    "popdist_py": SimpleNamespace(isPopdistEnvSet=lambda: False, init=lambda: None),
}  # fmt: skip
LEARNING_RATES = {
    "course/distributed_example.py": {
        "join_others": lambda: None, "load_once": lambda _: _TWO_SETS,
    },
    "course/fashion_mnist.py": {"load": lambda _: _TWO_SETS},
    "ddp.py": {"load": lambda: _TWO_SETS},
    "train.py": {"load": lambda *_: _TWO_SETS},
}  # fmt: skip
# Options that are read by other names than ``args.NAME``, and where.
READ_BY_NAME = {
    "pipelining/walkthrough.py": "globals() has them all",
    "pipelining/walkthrough_code_only.py": "globals() has them all",
    "course/lfw_dataset.py": "add() makes three spellings of a name",
    "cnns/arguments.py": "test_cnns_option_effects.py",
}
# The files of tests, beside test_programs.py, that show what the options of a program do.
TESTS = {
    "cnns": ("test_cnns_training.py", "test_cnns_runs.py", "test_cnns_restore.py",
             "test_cnns_datasets.py"),
    "common": ("test_running.py",),
    "course": ("test_course_training.py",),
    "data_loading": ("test_data_loading.py",),
    "ddp.py": ("test_other_launchers.py",),
    "hands_on": ("test_hands_on.py",),
    "language_model.py": ("test_language_model.py",),
    "mpi.py": ("test_other_launchers.py",),
    "pipelining": ("test_pipelining.py",),
    "sweep.py": ("test_sweep.py",),
    "sweeps": ("test_sweeps.py",),
    "train.py": (
        "test_train.py", "../system/test_main_job.py", "../system/test_readme_program.py",
    ),
}  # fmt: skip
_MAKERS = {"add", "add_argument", "_flag"}


class Ended(Exception):
    """A program came to where its work begins."""


def trees():
    for path in sorted(EXAMPLES.rglob("*.py")):
        name = str(path.relative_to(EXAMPLES))
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def options_of(tree):
    """Yield the options that a program declares: its names, and the name that is read."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        made_by = getattr(node.func, "attr", getattr(node.func, "id", ""))
        words = [w.value for w in node.args if isinstance(getattr(w, "value", None), str)]
        options = [word for word in words if word.startswith("-")]
        if made_by in _MAKERS and options:
            own = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            longest = next((w for w in options if w.startswith("--")), options[0])
            yield options, own.get("dest") or longest.lstrip("-").replace("-", "_")


def test_every_option_of_every_program_is_read():
    """An option that nothing reads cannot act; what those that are read do has tests of its own."""
    read, declared = set(), {}
    for name, tree in trees():
        names = {
            node.attr if isinstance(node, ast.Attribute) else node.value
            for node in ast.walk(tree)
            if (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))
            or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        }
        # The programs of the course share arguments, and those of a folder their modules.
        read |= {(name.split("/")[0], each) for each in names}
        if name not in READ_BY_NAME:
            declared[name] = list(options_of(tree))
    assert sum(map(len, declared.values())) > 120
    unread = [
        (name, options)
        for name, found in declared.items()
        for options, dest in found
        if (name.split("/")[0], dest) not in read
    ]
    assert unread == []


def test_every_option_is_in_a_test():
    """A new option needs a test that shows what it does."""
    untested = {}
    for name, tree in trees():
        if name in READ_BY_NAME:
            continue
        files = ("test_programs.py", *TESTS.get(name.split("/")[0], ()))
        text = "".join((ROOT / "tests" / "examples" / file).read_text() for file in files)
        known = {*MAKES_OPTIONS.get(name, ((), (), ()))[2]}
        if name in LEARNING_RATES:
            known.add("--learning-rate")
        found = [
            options[-1]
            for options, _ in options_of(tree)
            if not any(o in known or re.search(rf"(?<![\w-]){o}(?![\w-])", text) for o in options)
        ]
        if found:
            untested[name] = " ".join(found)
    assert untested == {}


@pytest.mark.parametrize("name", MAKES_OPTIONS)
def test_options_reach_poptorch(name, program):
    parse, make, given = MAKES_OPTIONS[name]
    module = program(name)
    before = make(module, module[parse]([]))._description()
    for option, value in given.items():
        args = module[parse]([option, *value.split()])
        assert make(module, args)._description() != before, option


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_the_learning_rate_is_the_optimisers(name, program, monkeypatch):
    main = program(name)["main"]
    for each, stand_in in {**_ALONE, **LEARNING_RATES[name]}.items():
        if each in main.__globals__:
            monkeypatch.setitem(main.__globals__, each, stand_in)
    rates = []

    def adam(_, lr):
        rates.append(lr)
        raise Ended

    for module in (torch.optim, poptorch.optim):
        monkeypatch.setattr(module, "Adam", adam)
    for words in ([], ["--learning-rate", "0.5"]):
        with pytest.raises(Ended):
            main(words)
    assert rates[0] < rates[1] == 0.5


def said_by(module, parse, words, capsys, monkeypatch):
    """Return the line about options that do nothing, without the program's name."""
    if parse == "main":
        # What follows the arguments is not run.
        monkeypatch.setitem(module["main"].__globals__, "popdist_py", _Ending())
    with contextlib.suppress(Ended):
        module[parse](words.split())
    lines = [line for line in capsys.readouterr().err.splitlines() if "without effect" in line]
    return [re.sub(r"^\S+: without effect here: ", "", line) for line in lines]


class _Ending:
    """popdist_py for a program that shall not begin to work."""

    def isPopdistEnvSet(self):
        return "POPDIST_NUM_TOTAL_REPLICAS" in os.environ

    def init(self):
        raise Ended


@pytest.mark.parametrize("name", IDLE)
def test_what_does_nothing_is_said(name, program, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    module = program(name)
    for words, line, parse in IDLE[name]:
        assert said_by(module, parse, words, capsys, monkeypatch) == [line]


@pytest.mark.parametrize("name", LAUNCHED)
def test_replicas_are_the_launchers(name, program, capsys, monkeypatch):
    for variable, value in {
        "NUM_TOTAL_REPLICAS": 2, "NUM_LOCAL_REPLICAS": 2, "REPLICA_INDEX_OFFSET": 0,
        "UNIFORM_REPLICAS_PER_INSTANCE": 1, "NUM_LOCAL_INSTANCES": 1,
    }.items():  # fmt: skip
        monkeypatch.setenv(f"POPDIST_{variable}", str(value))
    module = program(name)
    said = said_by(module, LAUNCHED[name], "--replicas 3", capsys, monkeypatch)
    assert said == ["--replicas (the launcher gives the replicas)"]
    monkeypatch.setenv("RANK", "1")  # one instance says it for all
    assert said_by(module, LAUNCHED[name], "--replicas 3", capsys, monkeypatch) == []
