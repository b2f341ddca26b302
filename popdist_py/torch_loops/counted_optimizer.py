"""The choice of the one optimizer of a program whose steps are the program's training steps.

This module only compares optimizers and does not call them.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

# Another optimizer replaces the counted one after more than this many steps in a row. The limit is
# above the steps that the discriminator of a GAN, or the value function of a policy, makes in turn.
_MOST_OTHERS: Final = 100


class CountedOptimizer:
    """Decides which steps of optimizers count as training steps.

    A program may have several optimizers, such as those of a generator and a discriminator. Only
    the steps of one optimizer count: of the optimizer that stepped first. Another optimizer
    replaces it in two cases. The counted optimizer was deleted, or the other one has made over a
    hundred steps since the last step of the counted one. A program may thus train several models in
    turn.
    """

    def __init__(self) -> None:
        self._counted: Any = _no_optimizer  # a weak reference
        self._other: Any = _no_optimizer  # a weak reference to a possible replacement
        self._num_other = 0  # the steps of ``_other`` since the last counted step
        self._thread = _Thread()

    def begin_step(self, optimizer: Any) -> None:
        """Record that a step of ``optimizer`` begins."""
        self._thread.begun = id(optimizer)

    def end_step(self, optimizer: Any) -> bool:
        """Tell whether the step of ``optimizer`` that ends now counts.

        An optimizer may call ``step`` of its base class or of an optimizer in it. Of such nested
        steps, only the innermost can count.
        """
        if self._thread.begun != id(optimizer):
            return False
        self._thread.begun = 0
        if self._counted() is not optimizer:
            if self._counted() is not None and not self._replaces(optimizer):
                return False
            self._counted = weakref.ref(optimizer)
        self._num_other = 0
        return True

    def _replaces(self, optimizer: Any) -> bool:
        """Count a step of another optimizer, and tell whether it replaces the counted one."""
        if self._num_other == 0 or self._other() is None:
            self._other = weakref.ref(optimizer)
            self._num_other = 0
        if self._other() is optimizer:
            self._num_other += 1
        return self._num_other > _MOST_OTHERS


class _Thread(threading.local):
    """The state of one thread, because threads may step optimizers at the same time.

    ``begun`` is the id of the optimizer whose step has begun last, or 0 after the end of the step.
    """

    begun = 0


def _no_optimizer() -> None:
    return None
