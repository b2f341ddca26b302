"""``--page`` and ``--beside`` of ``python -m popdist_py.ipu``: the page, and wrong options."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from inspect import signature
from pathlib import Path

import pytest
from click.testing import CliRunner

from popdist_py.poptorch.on_ipu.command import COMMAND

FILE = str(Path(__file__).with_name("command_models.py"))
MLP = (f"{FILE}:mlp", "--input", "16")
LARGE = (f"{FILE}:large", "--input", "20000")


def ask(*words):
    """Return the exit code, standard output and standard error of the command."""
    apart = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
    done = CliRunner(**apart).invoke(COMMAND, list(map(str, words)))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_a_page_is_written_beside_the_text(tmp_path):
    page = tmp_path / "page.html"
    code, out, _ = ask(*MLP, "--batch", "8", "--page", page)
    assert code == 0
    assert out.startswith(ask(*MLP, "--batch", "8")[1])
    assert out.endswith(f"\nThe page was written to {page}\n")
    text = page.read_text()
    assert f"<h1>{FILE}:mlp</h1>" in text
    rows = re.findall(r"<tr><td>(--\w+)</td><td[^>]*>([^<]*)</td></tr>", text)
    assert rows == [("--input", "16:float32"), ("--batch", "8")]


def test_json_and_a_page_are_made_together(tmp_path):
    page = tmp_path / "page.html"
    code, out, _ = ask(*MLP, "--json", "--page", page)
    assert code == 0
    assert json.loads(out) == json.loads(ask(*MLP, "--json")[1])
    assert page.exists()


def test_json_names_the_model_and_the_given_options():
    words = ("--split", "2", "--off-chip", "optimizer,activations", "--synthetic-data")
    told = json.loads(ask(*MLP, *words, "--json")[1])
    assert told["model"] == f"{FILE}:mlp"
    assert told["options"] == {
        "--input": "16:float32", "--split": "2", "--off-chip": "optimizer,activations",
        "--synthetic-data": "yes",
    }  # fmt: skip


def test_a_page_compares_with_a_saved_report(tmp_path):
    page, other = tmp_path / "page.html", tmp_path / "other.json"
    other.write_text(ask(*MLP, "--batch", "4", "--json")[1])
    code, _, _ = ask(*MLP, "--batch", "8", "--page", page, "--beside", other)
    assert code == 0
    text = page.read_text()
    assert ">Comparison</h2>" in text
    assert re.search(r"<td>--batch</td><td[^>]*>8</td><td[^>]*>4</td>", text)


def test_a_model_that_does_not_fit_has_a_page_with_advice_in_poptorch_s_words(tmp_path):
    page = tmp_path / "page.html"
    code, _, _ = ask(*LARGE, "--page", page)
    assert code == 1
    text = page.read_text()
    assert "Does not fit" in text
    assert "batch_size of poptorch.DataLoader" in text or "poptorch." in text


def test_a_search_writes_the_page_of_the_run_that_it_found(tmp_path):
    page = tmp_path / "page.html"
    code, out, _ = ask(*MLP, "--find", "splits", "--ipus", "2", "--page", page)
    assert code == 0
    assert "The best splits over 2 IPUs" in out
    assert "on 2 mk2 IPUs of a replica" in page.read_text()
    assert ">Search</h2>" in page.read_text()


def test_a_page_is_written_before_the_reader_of_the_output_ends(tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as output:  # noqa: PTH123 (a descriptor)
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as ended:
            COMMAND.main([*MLP, "--page", str(page)])
    assert ended.value.code == 141
    assert "Memory Report" in page.read_text()


def test_a_page_that_cannot_be_written_leaves_no_file_and_the_report_is_printed(
    tmp_path, monkeypatch
):
    def full(self, *_, **__):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    code, out, error = ask(*MLP, "--page", tmp_path / "page.html")
    assert code == 2
    assert out == ask(*MLP)[1]
    assert error.endswith("page.html of --page: No space left on device\n")
    assert list(tmp_path.iterdir()) == []


def test_wrong_pages_are_rejected_before_the_model_is_made(tmp_path):
    report = tmp_path / "report.json"
    report.write_text('{"version": 2}')
    missing = ("no_such_package.models:model", "--input", "16")
    page = tmp_path / "page.html"
    for words, message in (
        (("--page", tmp_path / "no" / "page.html"), f"the folder {tmp_path / 'no'} does not exist"),
        (("--page", tmp_path), "is a folder: give the name of a file"),
        (("--page", report), "would overwrite a file that is not a page"),
        (("--beside", report), "add --page FILE.html"),
        (("--page", page, "--beside", report), "is not a report that python -m popdist_py.ipu"),
        (("--page", page, "--beside", tmp_path / "none.json"), "No such file or directory"),
    ):
        code, out, error = ask(*missing, *words)
        assert (code, out) == (2, "")
        assert message in " ".join(error.split())
    assert report.read_text() == '{"version": 2}'
    assert not page.exists()


@pytest.mark.parametrize("old", ["", "<!DOCTYPE html>\n<html>old</html>"])
def test_an_older_page_is_replaced(tmp_path, old):
    page = tmp_path / "page.html"
    page.write_text(old)
    assert ask(*MLP, "--page", page)[0] == 0
    assert "Memory Report" in page.read_text()
