"""Files with pickled values keep large arrays outside of the pickle and are checked when read."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch

from poprun_py.python_api.functions.packed_file import (
    IncompleteFileError,
    open_packed,
    write_packed,
)
from poprun_py.python_api.functions.pickling import pickled


def there_and_back(value, tmp_path):
    path = tmp_path / "value"
    write_packed(path, {"about": "it"}, pickled(value))
    file = open_packed(path)
    path.unlink()
    assert file.head == {"about": "it"}
    return file.load()


@pytest.mark.parametrize("size", [3, 1 << 20])
def test_loaded_arrays_are_equal_and_can_be_changed(tmp_path, size):
    """A small file is read, a large one is mapped. Both may be removed afterwards."""
    array = np.arange(size)
    fixed = np.arange(3)
    fixed.flags.writeable = False
    text, here, there, still = there_and_back(["é", array, array, fixed], tmp_path)
    assert text == "é"
    assert here is there
    np.testing.assert_array_equal(here, array)
    here[0] = 7
    assert not still.flags.writeable
    assert here.ctypes.data % 64 == 0


def test_large_arrays_and_tensors_are_kept_outside_of_the_pickle():
    module = torch.nn.Linear(300, 300)
    stream, *arrays = pickled({"array": np.ones(1 << 18), "module": module})
    buffers = [array for (array,) in arrays]
    assert sum(map(len, stream)) < 4000
    assert sorted(buffer.nbytes for buffer in buffers) == [1200, 360_000, 1 << 21]
    # The buffers are the memory of the weights, not copies.
    places = {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers}
    assert {each.data_ptr() for each in module.parameters()} < places


def test_long_bytes_are_not_copied_before_they_are_written(tmp_path):
    long, text, changing = bytes(1 << 20), "é" * (1 << 20), bytearray(1 << 20)
    ((*chunks,),) = pickled([long, text, changing])
    assert any(chunk is long for chunk in chunks)
    changing[0] = 1
    write_packed(tmp_path / "value", {}, [chunks])
    assert open_packed(tmp_path / "value").load() == [long, text, bytearray(1 << 20)]


def test_loaded_tensors_share_their_storage_as_before(tmp_path):
    base = torch.arange(10.0)
    weight = torch.ones(2, requires_grad=True)
    given = {"base": base, "view": base[2:5], "weight": weight, "none": torch.empty(0)}
    found = there_and_back({**given, "half": torch.ones(3, dtype=torch.bfloat16)}, tmp_path)
    found["base"][3] = 77
    assert found["view"].tolist() == [2, 77, 4]
    assert found["weight"].requires_grad
    assert found["none"].shape == (0,)
    assert found["half"].tolist() == [1, 1, 1]
    assert torch.equal(found["weight"], weight)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "uint16", "bfloat16", "bool"])
def test_tensors_of_every_type_are_loaded(kind, tmp_path):
    tensor = torch.ones(4).to(getattr(torch, kind))
    write_packed(tmp_path / "file", {}, pickled((tensor, tensor[1:])))
    whole, part = open_packed(tmp_path / "file").load()
    assert whole.dtype == part.dtype == tensor.dtype
    assert part.float().tolist() == [1, 1, 1]
    assert whole.data_ptr() + whole.element_size() == part.data_ptr()


def test_a_file_is_replaced_in_one_step_and_only_its_owner_can_read_it(tmp_path):
    path = tmp_path / "value"
    write_packed(path, {}, pickled(np.ones(1000)))
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    with pytest.raises(TypeError, match="a bytes-like object is required"):
        write_packed(path, {}, [*pickled(1), "not bytes"])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kept", [0, 5, 16, 4000, -1])
def test_an_incomplete_or_missing_file_is_refused(tmp_path, kept):
    path = tmp_path / "value"
    write_packed(path, {}, pickled(np.ones(1000)))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(IncompleteFileError):
        open_packed(path)
    with pytest.raises(IncompleteFileError):
        open_packed(tmp_path / "nothing")


def test_the_head_is_read_without_unpickling(tmp_path):
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("it was unpickled",)

    path = tmp_path / "value"
    write_packed(path, {"n": 1}, pickled(Trap()))
    file = open_packed(path)
    assert file.head == {"n": 1}
    with pytest.raises(pytest.fail.Exception):
        file.load()
    assert pickle.HIGHEST_PROTOCOL == 5


def test_a_truncated_or_changed_file_is_refused(tmp_path):
    """A full disk or a broken connection can leave such a file."""
    path = tmp_path / "value"
    write_packed(path, {"about": "it"}, pickled(["text", np.arange(4)]))
    whole = path.read_bytes()
    open_packed(path)
    # Every byte around the values, and some bytes of the values.
    places = [at for at in range(len(whole)) if at % 5 == 0 or not 48 < at < len(whole) - 48]
    damaged = [(whole[:at], whole[:at] + whole[at + 1 :],
                whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
               for at in places]  # fmt: skip
    for data in itertools.chain(*damaged):
        path.write_bytes(data)
        with pytest.raises(IncompleteFileError, match="is incomplete or was changed"):
            open_packed(path)


def test_a_file_that_others_can_write_to_is_refused(tmp_path):
    path = tmp_path / "value"
    write_packed(path, {}, pickled(1))
    path.chmod(0o622)
    with pytest.raises(
        IncompleteFileError, match=r"other users can write to the file \(mode 0622\)"
    ):
        open_packed(path)
