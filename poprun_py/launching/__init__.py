"""One launch, from its configuration to its result.

This package contains the order of the steps (plan, wait for cores and IPUs, run, restart), the
leases of cores, the lifetime of a partition, the attempts, and the files of a run (its report, its
page, the timeline and the metrics). Other packages supervise processes and draw pages.
"""
