"""The command ``poprun-py`` with its subcommands, such as ``report`` and ``jobs``.

Each subcommand is a module that parses its command line, and prints or writes results that other
packages compute.
"""
