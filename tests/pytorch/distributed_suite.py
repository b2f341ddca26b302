"""PyTorch's own tests of process groups (torch.testing, in every wheel), over a named back end.

Run by test_own_tests.py: ``python distributed_suite.py BACKEND WORLD_SIZE [TEST...]``. Ranks are
forked, so that torch is imported once; everything else is as in PyTorch's own suite.
"""

import os
import sys
import tempfile
import unittest

BACKEND, WORLD_SIZE, *NAMES = sys.argv[1:]

folder = tempfile.mkdtemp(prefix="own-tests-")
os.environ.update(
    BACKEND="gloo", WORLD_SIZE=WORLD_SIZE, TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/shared"
)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

if BACKEND == "popdist":
    # As the launcher's option does it: who says gloo gets ours.
    from popdist_py.torch_backend.substitution import substitute

    substitute("popdist")

torch.set_num_threads(1)
from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)


class TestOfPyTorch(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._fork_processes()


if __name__ == "__main__":
    loader = unittest.TestLoader()
    names = NAMES or loader.getTestCaseNames(TestOfPyTorch)
    suite = unittest.TestSuite(TestOfPyTorch(name) for name in names)

    class Result(unittest.TextTestResult):
        def _say(self, word, test, reason=""):
            print(f"{word}\t{test._testMethodName}\t{' '.join(str(reason).split())[:300]}", flush=True)

        def addSuccess(self, test):
            self._say("passed", test)

        def addSkip(self, test, reason):
            self._say("skipped", test, reason)

        def addFailure(self, test, err):
            self._say("failed", test, err[1])

        addError = addFailure

    unittest.TextTestRunner(resultclass=Result, verbosity=0, stream=sys.stderr).run(suite)
