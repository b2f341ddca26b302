"""Registers the back end popdist in a Python of a job when it imports torch.distributed, if ever.

Where the library is installed PyTorch does so by itself; a checkout, a torch before 2.5 and
TORCH_DEVICE_BACKEND_AUTOLOAD=0 have this. Imported when Python starts, so it imports nothing that
is not there by then.
"""

import os
import sys

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class _TorchFinder:
    """Finds torch.distributed as the other finders do, and adds a last step to its import."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> "ModuleSpec | None":
        """Return the spec of torch.distributed, with another last step; None for all others."""
        if name != "torch.distributed":
            return None
        sys.meta_path.remove(self)
        # Import passes over finders without find_spec as well.
        finds = (getattr(finder, "find_spec", lambda *_: None) for finder in sys.meta_path)
        found: ModuleSpec | None = next(
            (spec for find in finds if (spec := find(name, path))), None
        )
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def execute_and_register(module: "ModuleType") -> None:
                execute(module)
                _register()

            found.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return found


def _register() -> None:
    """Register, also where the library is not on the path of the program."""
    sys.path.append(_ROOT)
    try:
        import popdist_py.torch_backend  # noqa: F401
    except ImportError:
        pass  # the package was removed
    finally:
        sys.path.pop()


def start() -> None:
    """Wait for torch.distributed in a Python of a job."""
    if os.environ.get("POPDIST_TORCH_BACKEND"):
        sys.meta_path.insert(0, _TorchFinder())
