"""Runs when Python starts for a program of these tests: what the generated data need, and no more.

The programs are left as they are. Three variables tell what happens to the libraries that they use:

- ``SDK_PROGRAMS_CIFAR``: the folder of generated CIFAR-10 files. torchvision compares the files of
  CIFAR-10 with MD5 sums in a table; the table gets the sums of these files.
- ``SDK_PROGRAMS_ITEMS``: a number. ``TensorDataset`` keeps the first so many items, so that the
  10,000 random pictures of a tutorial do not take minutes here.
- ``SDK_PROGRAMS_SEED``: a number. Torch begins with this seed, not with one that differs from run
  to run: of some hundred first weights of a small net one never learns.
"""

import os
import sys


def _cifar(module):
    """Give the MD5 table of CIFAR-10 the sums of the generated files."""
    import hashlib
    from pathlib import Path

    kind = module.CIFAR10
    folder = Path(os.environ["SDK_PROGRAMS_CIFAR"], kind.base_folder)

    def md5(name):
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    kind.train_list = [[name, md5(name)] for name, _ in kind.train_list]
    kind.test_list = [[name, md5(name)] for name, _ in kind.test_list]
    kind.meta = {**kind.meta, "md5": md5(kind.meta["filename"])}


def _items(module):
    """Let ``TensorDataset`` keep its first items."""
    kind, count = module.TensorDataset, int(os.environ["SDK_PROGRAMS_ITEMS"])
    make = kind.__init__

    def make_small(self, *tensors):
        make(self, *(tensor[:count].clone() for tensor in tensors))

    kind.__init__ = make_small


def _seed(module):
    """Let torch begin with a fixed seed."""
    module.default_generator.manual_seed(int(os.environ["SDK_PROGRAMS_SEED"]))


_CHANGES = {
    "torchvision.datasets.cifar": ("SDK_PROGRAMS_CIFAR", _cifar),
    "torch.utils.data.dataset": ("SDK_PROGRAMS_ITEMS", _items),
    "torch.random": ("SDK_PROGRAMS_SEED", _seed),
}


class _Finder:
    """Finds a module of the table as the other finders do, and changes it when it has run."""

    def find_spec(self, name, path=None, target=None):
        variable, change = _CHANGES.get(name, ("", None))
        if not os.environ.get(variable):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, _Finder())
