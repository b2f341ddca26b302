"""The command ``poprun-py`` with its subcommands ``report``, ``compare`` and ``scale``.

Each subcommand is a module that parses its words, and prints or writes what other packages make.
``words.py`` parses their options, ``measured_runs.py`` launches jobs for ``scale``. No module here
computes, draws or supervises.
"""
