"""The command ``poprun-py`` with its subcommands ``report``, ``compare`` and ``scale``.

Each subcommand is a module that parses its command line and prints or writes results of other
packages. ``subcommands.py`` is shared by the subcommands, and ``measured_runs.py`` launches jobs
for ``scale``.
"""
