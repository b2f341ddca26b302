"""Where bytes become objects by running what they name: each place is known, and guarded."""

from __future__ import annotations

import ast

import pytest
from support.imports import ROOT

# Of these modules, the functions that run what bytes say; of torch and NumPy one depends on a flag.
_LOADERS = {"load", "loads", "Unpickler"}
_MODULES = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "torch", "np", "numpy"}
# mpi4py's own, which unpickle what came over MPI's sockets; those that start with a capital do not.
_MPI = {"bcast", "allgather", "gather", "scatter", "alltoall", "allreduce", "reduce", "scan",
        "exscan", "recv", "irecv", "sendrecv", "mrecv"}  # fmt: skip
_COMMUNICATORS = {"comm", "_comm", "world", "local", "parent", "COMM_WORLD"}

# The module, what stands there, and what makes sure that it is ours.
KNOWN = {
    # The secret of the job, where there are several hosts; else pipes and memory of this host.
    "popdist_py/collectives/objects.py": ["pickle.loads(_verified("],
    # A file that this user or root alone can have written, and that is undamaged.
    "popdist_py/poptorch/compilation/executable_cache.py": ["torch.load(file, weights_only=False)"],
    "popdist_py/poptorch/model/saved_model.py": ["torch.load(source, weights_only=False)"],
    "poprun_py/python_api/functions/packed_file.py": ["pickle.loads(self._stream"],
    # Tensors and plain values alone.
    "popdist_py/torch_states/state_parts.py": ["torch.load(io.BytesIO(data), weights_only=True)"],
    # A pipe or a pair of sockets between a process and its child, without a name.
    "popdist_py/poptorch/data/loader_messages.py": ["pickle.loads(self._connection.recv_bytes())"],
    "popdist_py/poptorch/data/shared_file_pickle.py": ["pickle.loads(pickled, buffers=buffers)"],
    "popdist_py/poptorch/data/shared_slots.py": ["pickle.loads(description.original)"],
    "poprun_py/python_api/messages.py": ["pickle.loads(data)"],
    # What the other ranks of torch's process group sent, as torch's all_gather_object unpickles it.
    "popdist_py/torch_states/loop_checkpoints.py": ["pickle.loads(row[: int(size)].numpy()"],
    # What this very function has pickled.
    "poprun_py/python_api/functions/run_call.py": ["pickle.loads(stream, buffers=buffers)"],
}
# The functions that read files: what they call, in this order, before bytes become objects.
GUARDS = {
    "popdist_py/poptorch/compilation/executable_cache.py": (
        "_read",
        "open_own",
        "is_sealed",
        "load",
    ),
    "popdist_py/poptorch/model/saved_model.py": ("_content", "open_own", "is_sealed", "_unpickled"),
    "poprun_py/python_api/functions/packed_file.py": (
        "open_packed",
        "check_own",
        "crc32",
        "PackedFile",
    ),
}
# Who accepts connections. Those of other hosts or users go through the gate.
LISTENERS = {
    "popdist_py/peers/gate.py": "the gate",
    "poprun_py/running/supervise/control_channel.py": "a Unix socket in a folder of mode 0700",
}


@pytest.fixture(scope="module")
def trees():
    """Return each module of the two packages, with its text and its syntax tree, by its path."""
    found = {}
    for package in ("poprun_py", "popdist_py"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            found[str(path.relative_to(ROOT))] = text, ast.parse(text)
    return found


def loads_in(text, tree):
    """Return the calls of a module that run what bytes name."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            if isinstance(node, ast.ImportFrom) and node.module in _MODULES - {"torch", "numpy"}:
                names = {each.name for each in node.names}
                if names & _LOADERS:
                    yield f"from {node.module} import {names}"
            continue
        of, name = node.func.value, node.func.attr
        last = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
        if (last in _MODULES and name in _LOADERS) or (last in _COMMUNICATORS and name in _MPI):
            yield ast.get_source_segment(text, node)


def test_every_place_that_unpickles_is_known(trees):
    found = {path: list(loads_in(*module)) for path, module in trees.items()}
    # Groups and communicators of ours have methods of MPI's names, which take arrays.
    ours = {"_world.gather(", "_host.gather("}
    found = {
        path: left
        for path, calls in found.items()
        if (left := [call for call in calls if not any(each in call for each in ours)])
    }
    assert found.keys() == KNOWN.keys()
    for path, calls in found.items():
        assert len(calls) == len(KNOWN[path]), (path, calls)
        for call, expected in zip(calls, KNOWN[path], strict=True):
            assert call.startswith(expected), (path, call)


def calls_in(node):
    """Return the calls inside a node with their names, in the order in which they are made."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    calls.sort(key=lambda call: (call.end_lineno, call.end_col_offset))
    return [(getattr(call.func, "attr", getattr(call.func, "id", "")), call) for call in calls]


@pytest.mark.parametrize("path", GUARDS)
def test_files_that_are_unpickled_are_checked_first(trees, path):
    name, *expected = GUARDS[path]
    _, tree = trees[path]
    (function,) = (each for each in ast.walk(tree) if getattr(each, "name", "") == name)
    found = [call for call, _ in calls_in(function) if call in expected]
    assert list(dict.fromkeys(found)) == expected


def test_nobody_but_the_gate_accepts_a_connection_of_a_network(trees):
    # A socket's method takes no argument.
    found = {
        path
        for path, (_, tree) in trees.items()
        if any(name == "accept" and not call.args for name, call in calls_in(tree))
    }
    assert found == LISTENERS.keys()


@pytest.mark.parametrize(("text", "count"), [
    ("import pickle\npickle.loads(x)", 1), ("import torch\ntorch.load(x)", 1),
    ("from pickle import loads", 1), ("self.comm.bcast(1)", 1), ("comm.Bcast(x)", 0),
    ("json.loads(x)", 0), ("numpy.load(x, allow_pickle=True)", 1), ("MPI.COMM_WORLD.recv()", 1),
])  # fmt: skip
def test_the_search_finds_what_it_looks_for(text, count):
    assert len(list(loads_in(text, ast.parse(text)))) == count
