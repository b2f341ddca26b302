"""A seal tells of any damage to a file, wherever it is."""

from __future__ import annotations

import errno
import io

import pytest
from support.damage import damaged

from popdist_py.own_files.seal import is_sealed, sealed


def sealed_bytes(*parts):
    file = io.BytesIO()
    with sealed(file) as content:
        for part in parts:
            assert content.write(part) == len(part)
        content.flush()
    return file.getvalue()


@pytest.mark.parametrize("parts", [(), (b"one",), (b"one", memoryview(b"two")), (bytes(3 << 20),)])
def test_a_sealed_file_is_read_from_where_its_content_begins(parts):
    file = io.BytesIO(sealed_bytes(*parts))
    assert is_sealed(file) is True
    assert file.read() == b"".join(parts)


def test_any_damage_shows():
    for how, data in damaged(sealed_bytes(b"content")):
        assert not is_sealed(io.BytesIO(data)), how


def test_a_file_without_a_seal_is_at_its_beginning():
    for data in (b"", b"short", bytes(100)):
        file = io.BytesIO(data)
        assert is_sealed(file) is None
        assert file.read() == data


def broken_off(file, writes):
    with sealed(file) as content:
        writes(content)
        raise ZeroDivisionError


def test_a_file_that_was_not_finished_is_not_whole():
    file = io.BytesIO()
    with pytest.raises(ZeroDivisionError):
        broken_off(file, lambda content: content.write(b"half"))
    assert is_sealed(io.BytesIO(file.getvalue())) is False


class Full(io.BytesIO):
    """A disk with room for the seal alone."""

    def write(self, data):
        if self.tell():
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_is_named_whatever_the_writer_makes_of_it():
    def writes(content):
        try:
            content.write(b"content")
        except OSError:
            raise RuntimeError("unexpected pos 450 vs 337") from None

    with pytest.raises(OSError, match="No space left"):
        broken_off(Full(), writes)
