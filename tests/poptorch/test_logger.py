"""The log of the library."""

from __future__ import annotations

import logging


def test_the_log_goes_to_stderr_in_one_format(capsys):
    logging.getLogger("poptorch::python").warning("hello")
    assert capsys.readouterr().err.endswith(" [poptorch::python] [warning] hello\n")
