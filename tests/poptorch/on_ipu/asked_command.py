"""Runs ``python -m popdist_py.ipu`` in the process of the tests."""

from __future__ import annotations

import functools
from inspect import signature

from click.testing import CliRunner

from popdist_py.poptorch.on_ipu.command import COMMAND


@functools.cache
def ask(*words):
    """Run the command in this process, and return its exit code, standard output and errors."""
    # Before version 8.2, click mixes standard output and standard error by default.
    apart = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
    done = CliRunner(**apart).invoke(COMMAND, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr
