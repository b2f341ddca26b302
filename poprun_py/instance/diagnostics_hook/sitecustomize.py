"""The diagnostics hook, which runs when Python starts in an instance and answers signals.

On SIGRTMAX - 3, the process writes the stacks of all its threads to a file of the wrapper. On
SIGRTMAX - 4, the process writes a NUL to the wrapper's file as soon as its main thread runs Python
code instead of C code. On a fatal signal, the process prints a Python stack. The process tells the
wrapper when an exception has ended its main thread, because other threads may keep the process
alive afterwards. Before a process with torch ends, it waits for gloo's threads, which might
otherwise abort the process while Python shuts down.

In a program with checkpoints in memory, the hook first forks a spare, which forks the programs of
later restarts (poprun_prepared_start.py).

The hook removes its folder from ``sys.path`` and PYTHONPATH, and runs the user's own
``sitecustomize``, so that the program does not see the hook.
"""

import atexit
import os
import sys

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from typing import Any

# torch's name for the threads of gloo's process groups, which live until the process ends.
_GLOO = "pt_gloo_runloop"
_IDLE_CHECKS, _CHECK_SECONDS, _MOST_CHECKS = 2, 0.001, 1000
# The offset of the word _FAILED (progress_memory.py) in the shared memory, and the size of a word.
_FAILED_AT, _WORD_BYTES = 28 * 8, 8
_START_HOOK = os.path.abspath(f"{__file__}/../../../../popdist_py/start_hook")
# The possible names of the main thread's outermost function while the program's code runs.
_PROGRAM_FUNCTIONS = ("<module>", "_run_module_as_main")


def _write_stacks_on_signal() -> None:
    """Let faulthandler write the Python stacks on a signal, even while C code runs."""
    number, _, path = os.environ.pop("POPDIST_STACKS", "").partition(":")
    if not path:
        return
    import faulthandler

    try:
        if not faulthandler.is_enabled():
            faulthandler.enable()
        file = open(path, "ab", buffering=0)  # noqa: SIM115 (kept open for the handlers)
        # The handlers keep only the descriptor, so the file object must stay alive.
        sys._poprun_stacks_file = file  # type: ignore[attr-defined]
        faulthandler.register(int(number), file=file, all_threads=True, chain=False)
        _answer_on_signal_in_python(int(number) - 1, file.fileno())
    except (OSError, ValueError, RuntimeError, AttributeError):
        return


def _answer_on_signal_in_python(number: int, file: int) -> None:
    """Install a signal handler that writes a NUL to a file once the main thread runs Python."""
    try:
        # The public module signal takes longer to import than _signal, because it defines enums.
        import _signal as signal  # type: ignore[import-not-found]
    except ImportError:
        import signal

    opened = os.fstat(file)

    def answer(*_: object) -> None:
        # A program may close all descriptors, and then open files of its own under their numbers.
        try:
            if os.path.samestat(os.fstat(file), opened):
                os.write(file, b"\0")
                return
        except OSError:
            pass
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})  # the wrapper then asks no more

    signal.signal(number, answer)
    signal.siginterrupt(number, False)
    # While Python shuts down, it removes its signal handlers. Without a handler, the signal would
    # kill the process, so the process ignores the signal during the shutdown.
    atexit.register(signal.signal, number, signal.SIG_IGN)
    # A parent process may have blocked the two signals, and its descendants inherit the mask.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number, number + 1})


def _report_fatal_exception() -> None:
    """Install an exception hook that tells the wrapper when an exception ends the main thread.

    After an exception in its main thread, a process stays alive while Python waits for other
    threads and for the processes of a pool.
    """
    path = os.environ.get("POPDIST_HEARTBEAT", "")
    program, shown = os.getpid(), sys.excepthook
    if not path or sys.flags.inspect or sys.flags.interactive:
        return

    def show(kind: "type[BaseException]", value: BaseException, trace: "Any") -> None:
        try:
            shown(kind, value, trace)
        finally:
            if (
                os.getpid() == program
                and _ends_main_thread(kind, value)
                and _has_others_to_wait_for()
            ):
                _tell_wrapper(path, program)

    sys.excepthook = show


def _ends_main_thread(kind: "type[BaseException]", value: BaseException) -> bool:
    """Return whether Python called the exception hook because the main thread ends.

    Programs and Python's prompt also call the exception hook, to show an exception and go on.
    """
    if issubclass(kind, KeyboardInterrupt) or hasattr(sys, "ps1"):
        return False
    if os.environ.get("PYTHONINSPECT") or getattr(sys, "last_value", None) is not value:
        return False
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    # In a thread of the threading module, the outermost function is ``_bootstrap``.
    is_thread = frame.f_code.co_name.startswith("_bootstrap")
    return not is_thread and frame.f_code.co_name not in _PROGRAM_FUNCTIONS


def _has_others_to_wait_for() -> bool:
    """Return whether Python will wait for threads or processes before it ends."""
    threading = sys.modules.get("threading")
    if threading is not None:
        main = threading.main_thread()
        if any(each is not main and not each.daemon for each in threading.enumerate()):
            return True
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and any(not each.daemon for each in processes.active_children())


def _tell_wrapper(path: str, program: int) -> None:
    """Write the program's process id to the shared memory, and wake the wrapper to read it.

    ``path`` is the file of the shared memory: /proc/PID/fd/N with the wrapper's process id.
    """
    import signal

    try:
        with open(path, "r+b", buffering=0) as file:
            file.seek(_FAILED_AT)
            file.write(program.to_bytes(_WORD_BYTES, sys.byteorder))
        # The wrapper always handles SIGCHLD, which the kernel sends when a child ends.
        os.kill(int(path.split("/")[2]), signal.SIGCHLD)
    except (OSError, ValueError, IndexError):
        return


def _hide_hook() -> None:
    """Remove the hook's folder from sys.path and PYTHONPATH; run the user's ``sitecustomize``."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    _hide_from_variables()
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if "sitecustomize" not in sys.modules and ours is not None:
            sys.modules["sitecustomize"] = ours


def _hide_from_variables() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e != here]
    if any(rest):
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)


def _fork_spare(wrapper: int, requests: int, imports_output: int, is_ahead: int = 0) -> None:
    """Fork a spare; return in the program and in each program of the spare, with all hooks.

    If ``is_ahead`` is not 0, this process is not a program, and ends when it has forked the spare.
    """
    import poprun_prepared_start  # type: ignore[import-not-found]

    poprun_prepared_start.fork_spare(wrapper, requests, imports_output, bool(is_ahead), _hide_hook)
    _answer_wrapper()
    _hide_from_variables()
    if _START_HOOK in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        _run_start_hook()


def _may_fork_spare(wrapper: int) -> bool:
    """Return whether this is the wrapper's program, runs a file, and has printed nothing yet."""
    if os.getppid() != wrapper or sys.argv[0] in ("", "-", "-c"):
        return False
    prints = sys.flags.verbose or "importtime" in sys._xoptions
    return not prints and not os.environ.get("PYTHONPROFILEIMPORTTIME")


def _run_start_hook() -> None:
    """Run the library's start hook, which ran before the fork without the library's variables."""
    import runpy

    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if path.startswith(_START_HOOK) and name != "sitecustomize":
            del sys.modules[name]
    sys.path.insert(0, _START_HOOK)
    runpy.run_path(os.path.join(_START_HOOK, "sitecustomize.py"), run_name="popdist_start")
    sys.path.remove(_START_HOOK)


def _answer_wrapper() -> None:
    _write_stacks_on_signal()
    _report_fatal_exception()


def _wait_for_gloo() -> None:
    """Wait up to a second until gloo's threads are idle, because they may still free a last tensor.

    To free a tensor, a thread needs Python's global lock. While the interpreter shuts down, Python
    ends every thread that asks for the global lock. The C++ library treats the end of gloo's thread
    as an error ("terminate called without an active exception"), so the process would end with
    SIGABRT after a successful training. While this function sleeps, Python's global lock is free. A
    gloo thread in the state S (sleeping) is idle.
    """
    if "torch" not in sys.modules:
        return
    import time

    idle = 0
    for _ in range(_MOST_CHECKS):
        states = _states_of_threads(_GLOO)
        if not states or idle == _IDLE_CHECKS:
            return
        time.sleep(_CHECK_SECONDS)
        idle = idle + 1 if states == {"S"} else 0


def _states_of_threads(name: str) -> set[str]:
    """Return the state letters of this process's threads that have the name ``name``."""
    states = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                head, _, rest = file.read().rpartition(")")
        except OSError:
            continue  # the thread has just ended
        if head.partition("(")[2] == name:
            states.add(rest.split()[0])
    return states


atexit.register(_wait_for_gloo)
_spare = [int(each) for each in os.environ.pop("POPRUN_PREPARED", "").split(":") if each]
if _spare and _may_fork_spare(_spare[0]):
    _fork_spare(*_spare)
else:
    if _spare and os.getppid() == _spare[0]:
        if len(_spare) > 3:  # this process is to fork a spare, but not to run the script
            os.write(_spare[1], b"0")
            os._exit(0)
        os.close(_spare[1])
        os.close(_spare[2])
    _answer_wrapper()
    _hide_hook()
