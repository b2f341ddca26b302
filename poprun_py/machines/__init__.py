"""The hosts of a job and their hardware, and the leases of cores that jobs hold there.

Contains host lists, allocations, remote shells, host checks, file synchronisation, the choice of a
network, the reader of sysfs (CPUs, NUMA nodes, memory), and leases as locked files. No module here
places or starts an instance.
"""
