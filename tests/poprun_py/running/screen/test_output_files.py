"""The files with the output of instances."""

from __future__ import annotations

from poprun_py.running.screen.output_files import OutputFiles


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
    files._files[0, "stdout"] = open("/dev/full", "wb", buffering=0)  # noqa: PTH123, SIM115
    files.write(0, "stdout", b"fine")
    files.write(0, "stdout", b"again")
    assert "is incomplete: No space left on device" in files.trouble
    files.close()
