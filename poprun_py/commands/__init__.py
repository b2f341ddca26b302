"""The commands beside the launch: ``poprun-py report``, ``compare`` and ``scale``.

Each module is one command: it reads its words, and prints or writes what other rooms make.
Nothing here computes, draws or supervises.
May call: every other room.
"""
