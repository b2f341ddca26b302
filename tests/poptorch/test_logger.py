"""The log of the library."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest
from rich.console import Console
from rich.logging import RichHandler
from tqdm import tqdm

from popdist_py.poptorch.logger import _take_level, install_excepthook

log = logging.getLogger("poptorch::python")


@pytest.fixture
def root():
    """Return the root logger, which loses the handlers that a test gives it."""
    logger = logging.getLogger()
    before = list(logger.handlers)
    yield logger
    logger.handlers[:] = before


def test_the_log_goes_to_stderr_in_one_format(capsys):
    log.warning("hello")
    assert capsys.readouterr().err.endswith(" [poptorch::python] [warning] hello\n")


def test_an_exception_that_ends_the_program_is_logged(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    install_excepthook()
    error = RuntimeError("told")
    sys.excepthook(RuntimeError, error, None)
    shown = capsys.readouterr().err
    assert "[poptorch::python] [critical]" in shown
    assert shown.count("RuntimeError: told") == 1


def test_a_hook_that_stands_already_stays(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", print)
    install_excepthook()
    assert sys.excepthook is print


def test_a_line_begins_a_line_while_a_bar_is_shown(capsys):
    with tqdm(total=100, desc="Graph compilation") as bar:
        bar.update(30)
        log.warning("hello")
    lines = re.split(r"[\r\n]+", capsys.readouterr().err)
    assert next(line for line in lines if "hello" in line).startswith("[")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_program_with_a_log_of_its_own_sees_a_line_once(root, capsys, caplog, stream):
    root.handlers.clear()
    logging.basicConfig(stream=getattr(sys, stream), format="mine: %(message)s")
    root.addHandler(caplog.handler)
    log.warning("hello")
    shown = capsys.readouterr()
    assert shown.out + shown.err == "mine: hello\n"
    assert getattr(shown, stream[3:]) == "mine: hello\n"
    assert caplog.messages == ["hello"]


def test_a_rich_log_shows_a_line_once(root, capsys):
    root.addHandler(RichHandler(console=Console(stderr=True)))
    log.warning("hello")
    assert capsys.readouterr().err.count("hello") == 1


@pytest.mark.parametrize(
    "handler",
    [logging.StreamHandler(io.StringIO()), logging.NullHandler()],
    ids=["elsewhere", "nowhere"],
)
def test_a_log_that_is_not_on_the_screen_takes_no_line_from_it(root, capsys, handler):
    root.addHandler(handler)
    log.warning("hello")
    assert capsys.readouterr().err.count("hello") == 1


def test_what_the_programs_log_leaves_out_is_shown(root, capsys):
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR)
    root.addHandler(handler)
    log.warning("hello")
    assert capsys.readouterr().err.endswith("[warning] hello\n")


@pytest.mark.parametrize(
    ("text", "level", "said"),
    [
        ("DEBUG", logging.DEBUG, ""),
        ("4", logging.ERROR, ""),
        ("LOUD", logging.WARNING, "POPTORCH_LOG_LEVEL=LOUD is ignored"),
        ("5", logging.WARNING, "POPTORCH_LOG_LEVEL=5 is ignored"),
    ],
)
def test_the_environment_has_names_and_numbers_of_levels(caplog, text, level, said):
    before = log.level
    try:
        _take_level(text)
        assert log.level == level
    finally:
        log.setLevel(before)
    assert caplog.messages == [] if not said else said in caplog.text
