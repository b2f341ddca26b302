"""The hosts of a job, their hardware, and the leases of CPUs that jobs hold on them.

- host_list, host_allocation: the hosts of a launch
- remote_shell, mpirun_ssh, folder_sync: commands on other hosts, and copies to them
- probe, probe_script, host_checks, host_networks: facts about other hosts, and checks of them
- machine, machine_reader: the CPUs, NUMA nodes and memory of a host
- leases, lease_files, lease_messages: the CPUs that jobs hold, and the queue of waiting jobs
"""
