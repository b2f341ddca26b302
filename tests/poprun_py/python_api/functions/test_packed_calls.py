"""Pickled calls of functions, and the errors for parts that cannot be pickled."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading

import pytest

from poprun_py.errors import StartError, UsageError
from poprun_py.planning.user_program import call_folder, short_name
from poprun_py.python_api.functions.packed_call import function_name, write_call
from poprun_py.python_api.functions.packed_file import open_packed

LOCK = threading.Lock()


class Holder:
    def __init__(self):
        self.inner = {"lock": LOCK}


def test_the_program_of_a_call_has_its_name_and_folder(tmp_path):
    def train():
        return 1

    program = write_call(tmp_path, train)
    assert short_name(program) == "train()"
    assert call_folder(program) == tmp_path
    assert call_folder(("train.py", "--lr", "0.1", "3")) is None
    call = open_packed(tmp_path / "call")
    assert (tmp_path / "call").stat().st_mode & 0o777 == 0o600
    function, args, kwargs = call.load()
    assert (function(), args, kwargs) == (1, (), {})
    assert "" not in call.head["path"]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda: 1, "<lambda>"),
        (functools.partial(max, 1), "max"),
        (Holder, "Holder"),
        (len, "len"),
        ("abc".upper, "str.upper"),
    ],
)
def test_every_callable_has_a_name(function, name):
    assert function_name(function) == name


def of_nested():
    lock = LOCK
    return lambda: lock


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "named"),
    [
        (max, [1, LOCK], {}, "max: argument 1 (lock) cannot"),
        (max, [1, {"a": [0, LOCK]}], {}, "max: argument 1 (dict), at ['a'][1], cannot"),
        (max, [], {"key": Holder()}, "max: argument 'key' (Holder), at .inner['lock'], cannot"),
        (of_nested(), [], {}, "<lambda>: variable 'lock' (lock), which the function uses, cannot"),
        (LOCK.acquire, [], {}, "lock.acquire cannot"),
    ],
)
def test_the_error_names_the_part_that_cannot_be_pickled(function, args, kwargs, named, tmp_path):
    with pytest.raises(UsageError) as caught:
        write_call(tmp_path, function, args, kwargs)
    assert str(caught.value).startswith(named)
    assert "(cannot pickle '_thread.lock' object): create " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_writing_a_call_into_a_missing_folder_is_a_start_error(tmp_path):
    with pytest.raises(StartError, match=r"max and its arguments cannot be written"):
        write_call(tmp_path / "nowhere", max)


def test_a_module_that_cannot_be_imported_by_name_is_pickled_by_value(tmp_path, monkeypatch):
    """pytest and loaders of plug-ins import files in this way."""
    path = tmp_path / "unfindable.py"
    path.write_text(
        "HALF = 0.5\ndef inner(x):\n    return HALF * x\ndef f(x):\n    return inner(x)\n"
    )
    spec = importlib.util.spec_from_file_location("unfindable", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "unfindable", module)
    write_call(tmp_path, module.f)
    monkeypatch.delitem(sys.modules, "unfindable")
    call = open_packed(tmp_path / "call")
    function, _, _ = call.load()
    assert function(3) == 1.5


def test_a_function_of_an_importable_module_is_pickled_by_name(tmp_path):
    write_call(tmp_path, importlib.util.find_spec)
    function, _, _ = open_packed(tmp_path / "call").load()
    assert function is importlib.util.find_spec


async def of_a_loop():
    return 1


def of_values():
    yield 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (of_a_loop, "of_a_loop is an async function: launch a function that returns asyncio.run"),
        (functools.partial(of_a_loop), "of_a_loop is an async function"),
        (of_values, "of_values is a generator function: launch a function that returns a list"),
    ],
)
def test_coroutine_functions_and_generators_are_refused(function, said, tmp_path):
    with pytest.raises(UsageError) as caught:
        write_call(tmp_path, function)
    assert str(caught.value).startswith(said)


def test_a_recursive_function_with_a_cache_can_be_pickled(tmp_path):
    @functools.lru_cache(maxsize=7)
    def fibonacci(number):
        return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)

    write_call(tmp_path, fibonacci)
    function, _, _ = open_packed(tmp_path / "call").load()
    assert function(60) == 1548008755920
    assert function.cache_parameters()["maxsize"] == 7


def test_a_closure_with_an_unset_variable_can_be_pickled(tmp_path):
    def early():
        return later()

    write_call(tmp_path, early)

    def later():
        return 1


def test_a_removed_folder_is_left_out_of_the_module_path(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.syspath_prepend("")
    gone.rmdir()
    write_call(tmp_path, len)
    assert "" not in open_packed(tmp_path / "call").head["path"]
