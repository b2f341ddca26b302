"""The program of an instance: writes where the kernel really runs it and puts its memory, as JSON.

``probe.py FOLDER``: standard library only, because importing torch takes half a minute on an
emulated machine; the threads are those of the OpenMP library that torch uses.
"""

import ctypes
import json
import mmap
import os
import sys
from pathlib import Path

_BYTES = 24 << 20


def memory_of_a_large_allocation() -> dict[str, object]:
    """Touch some memory and return its line of ``numa_maps``: policy and pages by node."""
    block = mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, _BYTES, mmap.PAGESIZE):
        block[page] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    words = max((w for w in lines if int(w[0], 16) <= address), key=lambda w: int(w[0], 16))
    pages = {
        int(name[1:]): int(count)
        for name, equals, count in (word.partition("=") for word in words)
        if equals and name[0] == "N" and name[1:].isdigit()
    }
    return {"policy": words[1], "nodes": sorted(pages), "pages": sum(pages.values())}


def openmp_threads() -> int | None:
    """Run a parallel region of torch's OpenMP library; return the threads the kernel then shows."""
    libraries = sorted(Path(sys.prefix).glob("lib/python*/site-packages/torch/lib/libgomp*"))
    if not libraries:
        return None
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    ctypes.CDLL(str(libraries[0])).GOMP_parallel(region, None, 0, 0)
    return len(list(Path("/proc/self/task").iterdir()))


def main() -> None:
    status = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":\t" in line
    )
    found = {
        "cpus": status["Cpus_allowed_list"],
        "allocation": memory_of_a_large_allocation(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "threads": openmp_threads(),
    }
    (Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
