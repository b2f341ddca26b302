"""The hosts of a job, their hardware, and the leases of CPUs that jobs hold on them.

- host_list: the hosts of a launch
- remote_shell, mpirun_ssh: commands on other hosts, and copies of folders to them
- host_reports, probe_script: the facts that hosts report about themselves
- host_checks, host_networks: checks of the hosts, and the network between them
- machine, machine_reader: the CPUs, NUMA nodes and memory of a host
- leases, lease_files: the CPUs of this machine that jobs hold, and the queue of waiting jobs
- remote_leases, lease_messages: leases on other hosts, and texts about leases
"""
