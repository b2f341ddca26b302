"""The command ``poprun-py`` with its subcommands ``report``, ``compare`` and ``scale``.

Each subcommand is a module that parses its command line, and prints or writes results that other
packages compute.
"""
