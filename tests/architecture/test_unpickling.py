"""Where bytes become objects by running what they name: each place is known, and guarded."""

from __future__ import annotations

import ast
from pathlib import Path

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
    "popdist_py/collectives/object_calls.py": ["pickle.loads(_vouched("],
    # A file that this user or root alone can have written, and that is undamaged.
    "popdist_py/poptorch/compilation/executable_cache.py": ["torch.load(file, weights_only=False)"],
    "popdist_py/poptorch/model/saved_model.py": ["torch.load(source, weights_only=False)"],
    "poprun_py/functions/packed_file.py": ["pickle.loads(self._stream"],
    # Tensors and plain values alone.
    "popdist_py/poptorch/checkpoint.py": ["torch.load(io.BytesIO(data), weights_only=True)"],
    # A pipe or a pair of sockets between a process and its child, without a name.
    "popdist_py/poptorch/data/loader_messages.py": ["pickle.loads(self._connection.recv_bytes())"],
    "popdist_py/poptorch/data/memory_pickle.py": ["pickle.loads(pickled, buffers=buffers)"],
    "popdist_py/poptorch/data/shared_slots.py": ["pickle.loads(description.original)"],
    "poprun_py/jobs/channel.py": ["pickle.loads(data)"],
    # What this very function has pickled.
    "poprun_py/functions/failures.py": ["pickle.loads(stream.getvalue()"],
}
# What the files of others go through first.
GUARDS = {
    "popdist_py/poptorch/compilation/executable_cache.py": ("open_own(", "is_sealed("),
    "popdist_py/poptorch/model/saved_model.py": ("open_own(", "is_sealed("),
    "poprun_py/functions/packed_file.py": ("check_own(", "zlib.crc32("),
}
# Who accepts connections. Those of other hosts or users go through the gate.
LISTENERS = {
    "popdist_py/peers/gate.py": "the gate",
    "poprun_py/supervision/control_channel.py": "a Unix socket in a folder of mode 0700",
}


def sources():
    for package in ("poprun_py", "popdist_py"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def loads_in(text):
    """Return the calls of a module that run what bytes name."""
    for node in ast.walk(ast.parse(text)):
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


def test_every_place_that_unpickles_is_known():
    found = {path: calls for path, text in sources() if (calls := list(loads_in(text)))}
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


@pytest.mark.parametrize("path", GUARDS)
def test_files_that_are_unpickled_are_checked_first(path):
    text = Path(ROOT, path).read_text()
    assert all(guard in text for guard in GUARDS[path])


def test_nobody_but_the_gate_accepts_a_connection_of_a_network():
    found = {path for path, text in sources() if ".accept()" in text}
    assert found == LISTENERS.keys()


@pytest.mark.parametrize(("text", "count"), [
    ("import pickle\npickle.loads(x)", 1), ("import torch\ntorch.load(x)", 1),
    ("from pickle import loads", 1), ("self.comm.bcast(1)", 1), ("comm.Bcast(x)", 0),
    ("json.loads(x)", 0), ("numpy.load(x, allow_pickle=True)", 1), ("MPI.COMM_WORLD.recv()", 1),
])  # fmt: skip
def test_the_search_finds_what_it_looks_for(text, count):
    assert len(list(loads_in(text))) == count
