"""The steps in which anything of a job is ended (ask once, wait, force), and their limits.

What asking and forcing mean is a parameter; the clock is an argument. The supervisor ends mpirun
and the instances this way, each wrapper its program. Standard library only and cheap to import.
"""

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Programs have the job's grace time after SIGTERM; their wrappers keep it.
# Without a launcher no output will be read: the program gets little time.
ORPHAN_GRACE_SECONDS = 1.0
# mpirun kills a wrapper a quarter of a second after SIGTERM: the wrapper needs no limit then.
UNLIMITED_GRACE_SECONDS = 3600.0
# After a program has ended with one of these codes, children that it left, such as an upload, have
# the job's grace time to end. 75 is popdist_py.RESUME_EXIT_CODE.
GOOD_CODES = (0, 75)
# After any other end they have this long.
LEFTOVER_SECONDS_AFTER_FAILURE = 0.1
# After an exception has ended its main thread, a program has the grace time to end, and at least
# this long.
LEAST_SECONDS_AFTER_EXCEPTION = 1.0
# After a program has ended with 0 and nothing is left of it, its wrapper waits this long for the
# other instances. Then it ends, so that Open MPI sees that the instance has ended.
LEAVE_SECONDS = 2.0
# Between two kills: a process may start another while the rest is killed.
KILL_AGAIN_SECONDS = 0.05
# mpirun after SIGTERM: it has nothing to save.
MPIRUN_GRACE_SECONDS = 2.0
# mpirun after the last instance has ended, and where a host is lost: a daemon there never answers.
MPIRUN_FOLLOWS_SECONDS, MPIRUN_FOLLOWS_SECONDS_OF_LOST_HOST = 10.0, 1.0


class GracefulStop:
    """The end of one thing: ``ask`` at most once, ``force`` when its time is over.

    Args:
        ask: asks for the end.
        force: brings it about.
        again_seconds: after how long ``force`` is repeated; by default never.
    """

    def __init__(
        self,
        ask: "Callable[[], None]",
        force: "Callable[[], None]",
        again_seconds: float = float("inf"),
    ) -> None:
        self.asked_at: float | None = None
        self._ask = ask
        self._force = force
        self._again_seconds = again_seconds
        self._force_at = float("inf")

    def begin(self, now: float, grace_seconds: float = float("inf")) -> None:
        """Ask, unless that was done before, and force after ``grace_seconds``."""
        self.force_after(grace_seconds, now)
        if self.asked_at is None:
            self.asked_at = now
            self._ask()

    def force_after(self, seconds: float, now: float) -> None:
        """Force after some time, or sooner if that was said before; asks for nothing."""
        self._force_at = min(self._force_at, now + seconds)

    def next_deadline(self) -> float:
        """Return when ``on_time`` has something to do; inf for never."""
        return self._force_at

    def on_time(self, now: float) -> None:
        """Force if the time is over."""
        if now >= self._force_at:
            self._force_at = now + self._again_seconds
            self._force()
