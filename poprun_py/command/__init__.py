"""The commands beside the launch: ``poprun-py report``, ``compare`` and ``scale``.

A command is a module: it reads its words, and prints or writes what other rooms make. words.py is
how they read them, measured_runs.py launches for scale.
Nothing here computes, draws or supervises.
May call: every other room.
"""
