"""Plans for hosts whose machines are all unknown."""

from __future__ import annotations

from poprun_py.machines.host_checks import ProbedHosts
from poprun_py.machines.host_list import LOCALHOST
from poprun_py.machines.remote_shell import Shell
from poprun_py.options.launch_config import LaunchConfig, merged_config
from poprun_py.options.option_origins import from_command_line
from poprun_py.planning.hosts_and_mpi import PlanInputs
from poprun_py.planning.installed_mpi import OPEN_MPI_5, Mpi
from poprun_py.planning.instances_on_hosts import make_topology
from poprun_py.planning.launch_plan import make_plan
from poprun_py.planning.mpi_commands import split_mpi_arguments

MPI = Mpi(path="/mpi/bin/mpirun", kind=OPEN_MPI_5)


def plan_blindly(config, *, hosts=(LOCALHOST,), mpi=MPI, environ=None, machines=None, probed=None):
    if probed is None and not all(host.is_local for host in hosts):
        probed = ProbedHosts(shell=Shell(words=()), machines={}, hostnames={}, has_fabric=True)
    config, _ = split_mpi_arguments(config)
    topology = make_topology(config, hosts)
    inputs = PlanInputs(
        config=config,
        topology=topology,
        environ=environ or {},
        machines=machines or (None,) * len(topology.hosts),
        mpi=mpi,
        probed=probed,
    )
    return make_plan(inputs)


def placing(mode="spreadnuma", **values):
    """Return the options of a job with a placement mode; roundrobin stands for --numa-aware yes."""
    chosen = {"numa_aware": True} if mode == "roundrobin" else {"process_placement": mode}
    return merged_config(from_command_line({**chosen, **values}))


def plan_with_folder(output_dir, environ=None, **options):
    """Return the plan of a run that is recorded in a folder; without one if the folder is None."""
    folder = None if output_dir is None else str(output_dir)
    config = LaunchConfig(program=("true",), output_dir=folder, **options)
    return plan_blindly(config, environ=environ)
