"""A command keeps its exit codes, even if its output cannot be written."""

from __future__ import annotations

import os
import sys

import click
import pytest
from click.testing import CliRunner

from popdist_py.poptorch.on_ipu.help_and_exit import ReportCommand


def command(action):
    return ReportCommand(
        "report",
        callback=lambda **_: action(),
        params=[click.Option([f"--{name}"], help=f"About {name}.") for name in ("a", "b", "c")],
        groups={"Second letters": ("--b",), "First letters": ("--a",)},
    )


def exit_code(action, words=()):
    with pytest.raises(SystemExit) as ended:
        command(action).main(list(words))
    return ended.value.code


def leaving(code):
    return lambda: click.get_current_context().exit(code)


def raising(error):
    def action():
        raise error

    return action


def test_exit_codes(capsys):
    assert exit_code(leaving(4)) == 4
    assert exit_code(lambda: None) == 0
    assert exit_code(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")
    assert exit_code(raising(click.ClickException("not this"))) == 1
    assert exit_code(lambda: None, ["--d"]) == 2
    assert "No such option" in capsys.readouterr().err


def test_a_fault_is_one_line(capsys):
    assert exit_code(raising(KeyError("gone"))) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith("Error: the estimate failed with KeyError: 'gone' (test_help_and_exit")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("write", [click.echo, print])
def test_the_reader_of_the_output_has_ended(write, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as output:  # noqa: PTH123 (a descriptor)
        monkeypatch.setattr(sys, "stdout", output)
        assert exit_code(lambda: write("a report")) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device")  # noqa: PTH110
def test_a_full_disk(monkeypatch, capsys):
    with open("/dev/full", "w", encoding="utf-8") as output:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", output)
        assert exit_code(lambda: click.echo("a report")) == 2
    assert capsys.readouterr().err == (
        "Error: cannot write standard output: No space left on device\n"
    )


def test_characters_that_the_encoding_lacks(monkeypatch, tmp_path):
    file = tmp_path / "output"
    with file.open("w", encoding="utf-8") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert exit_code(lambda: click.echo("ü \udcff")) == 0
    assert file.read_text(encoding="utf-8") == "ü \\udcff\n"


def test_help_has_groups():
    shown = CliRunner().invoke(command(lambda: None), ["--help"]).output
    places = [shown.index(each) for each in ("Second letters:", "--b", "First letters:", "--a")]
    assert places == sorted(places)
    assert places[-1] < shown.index("Other options:") < shown.index("--c") < shown.index("--help")
