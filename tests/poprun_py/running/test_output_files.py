"""The files of instances' output: private, limited in size, and whole where they are kept."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.output_files import (
    OutputFiles,
    Part,
    output_parts,
    output_path,
    part_to_remove,
)

LIMIT = 800  # eight parts of 100 bytes


def parts_of(folder, stream="stdout"):
    return output_parts(output_path(str(folder), 0, stream, 1))


def text_of(folder, stream="stdout"):
    return [path.read_bytes() for path in parts_of(folder, stream)]


def written(folder, chunks, limit=LIMIT, stream="stdout"):
    files = OutputFiles(str(folder), 1, limit)
    files.open(0)
    for chunk in chunks:
        files.write(0, stream, chunk)
    files.close()
    return files


def test_output_files_are_private_and_appended_to(tmp_path):
    for text in (b"one", b"two"):
        files = OutputFiles(str(tmp_path), 11)
        files.open(3)
        files.write(3, "stdout", text)
        files.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "instance-03.stderr",
        "instance-03.stdout",
    ]
    assert (tmp_path / "instance-03.stdout").read_bytes() == b"onetwo"
    assert (tmp_path / "instance-03.stdout").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_reported_once_and_does_not_raise(tmp_path):
    files = OutputFiles(str(tmp_path), 1)
    files.open(0)
    files.close()
    (tmp_path / "instance-0.stdout").unlink()
    (tmp_path / "instance-0.stdout").symlink_to("/dev/full")
    files.write(0, "stdout", b"fine")
    files.write(0, "stdout", b"again")
    assert "is incomplete: No space left on device" in files.trouble
    files.close()


LINES = [b"line %d\n" % number for number in range(1000)]


def test_output_below_an_eighth_of_the_limit_is_one_file(tmp_path):
    files = written(tmp_path, LINES[:10])
    assert text_of(tmp_path) == [b"".join(LINES[:10])]
    assert not files.notice


@pytest.mark.parametrize("chunks", [LINES, [b"".join(LINES)]], ids=["lines", "one chunk"])
def test_the_beginning_and_the_newest_output_are_kept_in_whole_lines(tmp_path, chunks):
    files = written(tmp_path, chunks)
    names = [path.name for path in parts_of(tmp_path)]
    numbers = [int(name.rpartition(".")[2]) for name in names[:-1]]
    assert names[-1] == "instance-0.stdout"
    assert numbers[:2] == [1, numbers[-1] - len(numbers) + 2]  # the gap is after the first part
    assert numbers[1:] == list(range(numbers[1], numbers[-1] + 1))
    first, *newest = text_of(tmp_path)
    whole = b"".join(LINES)
    assert whole.startswith(first)
    assert whole.endswith(b"".join(newest))
    assert all(text.endswith(b"\n") for text in (first, *newest))
    kept = len(first) + sum(map(len, newest))
    assert LIMIT // 2 < kept <= LIMIT
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in parts_of(tmp_path))
    assert files.notice == (
        f"instance 0 has written more output than --log-limit allows: {tmp_path} keeps the "
        "beginning and the newest part of this output"
    )


def test_one_stream_may_use_what_the_other_one_does_not(tmp_path):
    files = OutputFiles(str(tmp_path), 1, LIMIT)
    files.open(0)
    files.write(0, "stderr", b"a traceback\n" * 15)
    for line in LINES:
        files.write(0, "stdout", line)
    files.close()
    assert b"".join(text_of(tmp_path, "stderr")) == b"a traceback\n" * 15
    assert sum(map(len, text_of(tmp_path))) > LIMIT / 2


def test_the_stream_with_more_output_loses_its_oldest_part_after_the_first():
    parts = {"stdout": [(1, 100), (3, 100), (4, 100)], "stderr": [(1, 100), (2, 90), (3, 100)]}
    parts = {name: [Part(*each) for each in of_stream] for name, of_stream in parts.items()}
    assert part_to_remove(parts, 780) == ("stdout", Part(3, 100))
    assert part_to_remove(parts, 800) is None
    assert part_to_remove({"stdout": [Part(1, 900)], "stderr": []}, 800) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["stdout", "stderr"]), st.integers(0, 300), st.integers(0, 40)),
        max_size=60,
    )
)
def test_any_output_fits_the_limit_and_misses_only_one_piece(tmp_path_factory, chunks):
    """Lines of any length in chunks of any length: a piece between first and newest may miss."""
    folder = tmp_path_factory.mktemp("output")
    files, whole = OutputFiles(str(folder), 1, LIMIT), {"stdout": b"", "stderr": b""}
    files.open(0)
    for number, (stream, size, every) in enumerate(chunks):
        data = bytes(
            10 if every and (number + at) % every == 0 else 65 + at % 26 for at in range(size)
        )
        files.write(0, stream, data)
        whole[stream] += data
        assert sum(path.stat().st_size for path in folder.iterdir()) <= LIMIT
    files.close()
    for stream, output in whole.items():
        first, *newest = text_of(folder, stream)
        if not newest:
            assert first == output
        else:
            assert output.startswith(first)
            assert output.endswith(b"".join(newest))
            assert newest[-1]


def test_a_restart_in_the_same_folder_goes_on_with_the_parts(tmp_path):
    written(tmp_path, LINES[:30])
    before = [path.name for path in parts_of(tmp_path)]
    written(tmp_path, LINES[30:60])
    assert [path.name for path in parts_of(tmp_path)][: len(before) - 1] == before[:-1]
    assert len(parts_of(tmp_path)) > len(before)
    assert b"".join(LINES).startswith(text_of(tmp_path)[0])
    assert b"".join(LINES[:60]).endswith(b"".join(text_of(tmp_path)[1:]))


def test_files_that_the_user_has_moved_away_are_no_trouble(tmp_path):
    files = OutputFiles(str(tmp_path), 1, LIMIT)
    files.open(0)
    for line in LINES:
        files.write(0, "stdout", line)
        if line == LINES[500]:
            for path in tmp_path.iterdir():
                path.unlink()
    files.close()
    assert not files.trouble
    assert b"".join(LINES).endswith(text_of(tmp_path)[-1])


def test_a_part_that_cannot_be_renamed_is_reported(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("pathlib.Path.rename", refuse)
    files = written(tmp_path, LINES)
    assert "is incomplete: Operation not permitted" in files.trouble


def test_other_files_are_no_parts(tmp_path):
    for name in ("instance-0.stdout.gz", "instance-0.stdout.2", "instance-0.stdout.10",
                 "instance-00.stdout.1", "instance-0.stderr.1"):  # fmt: skip
        (tmp_path / name).touch()
    assert [path.name for path in parts_of(tmp_path)] == [
        "instance-0.stdout.2", "instance-0.stdout.10", "instance-0.stdout",
    ]  # fmt: skip
