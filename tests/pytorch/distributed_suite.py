"""PyTorch's own tests of process groups (torch.testing, in every wheel), over gloo or popdist.

``python distributed_suite.py BACKEND WORLD_SIZE [TEST... | --but PATTERN]`` prints a line for each
test: passed, skipped or failed, its name, and why. PATTERN matches names to leave out.

Three things differ from PyTorch's own run of them. Ranks are forked, so that torch is imported
once. What waits for ranks looks ten times as often, since such pauses are most of the time, and
waits longer for them. And what it tests on GPUs alone is tested on CPUs: nearly all of
DistributedDataParallel, and every call of which gloo knew nothing when its test was written.

Run by test_own_tests.py. Nothing here knows which tests are expected to pass.
"""

import importlib.util
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path

BACKEND, WORLD_SIZE, *NAMES = sys.argv[1:]
MODULE = "torch.testing._internal.distributed.distributed_test"
# PyTorch's tests leave files behind.
folder = tempfile.tempdir = tempfile.mkdtemp(prefix="own-tests-")
os.environ.update(
    BACKEND="gloo",
    WORLD_SIZE=WORLD_SIZE,
    TEMP_DIR=folder,
    TORCHINDUCTOR_CACHE_DIR=f"{folder}/compiled",
    INIT_METHOD=f"file://{folder}/shared",
    DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="100",
)

import torch  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

torch.set_num_threads(1)
_BRACKETS = r"\((?:[^()\[\]]|\[[^\]]*\]|\([^()]*\))*\)"
# What the source says of GPUs, and what it says here.
_ON_CPU = (
    (r'BACKEND != "(?:nccl|mpi)"(?: or IS_\w+)*,', "False,"),
    (r'require_backend_is_available\(\{"nccl"\}\)', 'require_backend_is_available({"gloo"})'),
    (rf"\.cuda{_BRACKETS}", ".cpu()"),
    (rf"torch\.cuda\.(?:set_device|synchronize){_BRACKETS}", "None"),
    (r"torch\.cuda\.current_device\(\)", '"cpu"'),
    (rf"torch\.cuda\.manual_seed({_BRACKETS})", r"torch.manual_seed\1"),
    (r"device=rank_to_GPU\[rank\]\[0\]", 'device="cpu"'),
    (r"torch\.cuda\.device_count\(\)", "99"),
    (r'backend=(?:"nccl"|dist\.Backend\.NCCL)', "backend=BACKEND"),
    (r"output_device=self\.rank", "output_device=None"),
    (r"device_ids=(?:\[[^\]]*\]|gpus|gpu_subset|device_ids)", "device_ids=None"),
    (r"device=(?:self\.rank|rank|device_id|my_rank|0)\b", 'device="cpu"'),
    (
        r"torch\.device\((?:rank|next_rank|self\.rank|f?\"cuda[^()]*(?:\(i\))?)\)",
        'torch.device("cpu")',
    ),
    (r'(?<!feature\[)f?"cuda(?::[^"]*)?"', '"cpu"'),
    (r"\.to\((?:self\.rank|rank|device_id)\)", '.to("cpu")'),
    (r"cuda=True", "cuda=False"),
)
# The barrier of files before and after each test.
_PATIENT = (
    (r"time\.sleep\(0\.1\)", "time.sleep(0.01)"),
    (r"def sync\(cls, wait_for=None, timeout=10\)", "def sync(cls, wait_for=None, timeout=100)"),
)


def module_on_cpu():
    """Return PyTorch's module of tests, changed to use no GPU."""
    spec = importlib.util.find_spec(MODULE)
    source = Path(spec.origin).read_text()
    for pattern, replacement in (*_ON_CPU, *_PATIENT):
        source = re.sub(pattern, replacement, source)
    module = types.ModuleType(MODULE)
    module.__file__ = spec.origin
    # Objects of its classes are pickled.
    sys.modules[MODULE] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module


common_distributed.time = types.SimpleNamespace(
    time=time.time, sleep=lambda seconds: time.sleep(seconds / 10)
)
common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
common_distributed.skip_if_no_gpu = lambda test: test
common_distributed.skip_if_small_worldsize = lambda test: test
common_distributed.init_multigpu_helper = lambda size, _: {rank: [rank] for rank in range(size)}
tests = module_on_cpu()
if BACKEND == "popdist":
    # As the launcher's option does it: who says gloo gets ours.
    from popdist_py.torch_backend.substitution import substitute

    substitute("popdist")


class TestOfPyTorch(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def _check_return_codes(self, fn, elapsed_time):
        super()._check_return_codes(fn, elapsed_time)
        codes = {process.exitcode for process in self.processes}
        assert len(codes) == 1, f"ranks ended with {codes}"


class Result(unittest.TextTestResult):
    def _say(self, word, test, reason=""):
        text = " ".join(str(reason).split())[-2000:]
        print(f"{word}\t{test._testMethodName}\t{text}", flush=True)

    def addSuccess(self, test):
        self._say("passed", test)

    def addSkip(self, test, reason):
        self._say("skipped", test, reason)

    def addFailure(self, test, err):
        self._say("failed", test, err[1])

    addError = addFailure


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    names = NAMES
    if not names or names[0] == "--but":
        left_out = re.compile(names[1] if names else "$")
        every = unittest.TestLoader().getTestCaseNames(TestOfPyTorch)
        names = [name for name in every if not left_out.fullmatch(name)]
    suite = unittest.TestSuite(TestOfPyTorch(name) for name in names)
    unittest.TextTestRunner(resultclass=Result, verbosity=0, stream=sys.stderr).run(suite)
    shutil.rmtree(folder)
