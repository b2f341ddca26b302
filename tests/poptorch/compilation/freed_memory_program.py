"""What becomes of a freed block: ``python freed_memory_program.py CASE``, by assertions.

Run by test_freed_memory.py. A case without a model imports no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from popdist_py.collectives.freed_memory import (
    give_back_freed_memory,
    give_back_kept_memory,
    keep_freed_memory,
)

BLOCK_BYTES = 32 << 20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def bytes_given_back():
    """Return how much less memory the process has once it frees a block that others follow."""
    block = np.ones(BLOCK_BYTES // 8)
    others = [np.ones(8000) for _ in range(8)]
    before = resident_bytes()
    del block
    after = resident_bytes()
    del others
    return before - after


def given_back_until_it_is_kept():
    assert give_back_freed_memory()
    assert bytes_given_back() > BLOCK_BYTES / 2
    assert keep_freed_memory()
    assert bytes_given_back() < BLOCK_BYTES / 2


def given_back_once():
    assert keep_freed_memory()
    block = np.ones(BLOCK_BYTES // 8)
    others = [np.ones(8000) for _ in range(8)]
    del block
    before = resident_bytes()
    give_back_kept_memory()
    assert before - resident_bytes() > BLOCK_BYTES / 2
    del others
    assert bytes_given_back() < BLOCK_BYTES / 2


def kept_after_compiling():
    kept_after_compiling_with(lambda original: original)


def kept_after_a_refusal():
    def refused(*_, **__):
        raise ValueError("refused")

    kept_after_compiling_with(lambda _: refused, fails=True)


def kept_after_compiling_with(rest, *, fails=False):
    from support.models import Mlp, classified, quiet_options

    import popdist_py.poptorch as poptorch
    from popdist_py.poptorch.compilation import compiler

    given_back = []
    rest = rest(compiler.build_program)

    def build(*args, **kwargs):
        given_back.append(bytes_given_back())
        return rest(*args, **kwargs)

    compiler.build_program = build
    model = Mlp()
    training = poptorch.trainingModel(
        model, quiet_options(), poptorch.optim.SGD(model.parameters(), lr=0.1)
    )
    try:
        training.compile(*classified(4))
        failed = False
    except ValueError:
        failed = True
    assert failed == fails
    assert given_back[0] > BLOCK_BYTES / 2
    assert bytes_given_back() < BLOCK_BYTES / 2


if __name__ == "__main__":
    globals()[sys.argv[1]]()
