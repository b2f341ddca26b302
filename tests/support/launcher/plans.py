"""Plans for hosts whose machines are all unknown."""

from __future__ import annotations

from poprun_py.planning.launch_plan import make_plan
from poprun_py.planning.plan_inputs import PlanInputs
from poprun_py.planning.topology import make_topology
from poprun_py.planning.user_mpi_arguments import split_mpi_arguments


def plan_blindly(config, *, hosts, mpi, environ, probed=None):
    config, mpi_arguments = split_mpi_arguments(config)
    topology = make_topology(config, hosts)
    inputs = PlanInputs(
        environ=environ,
        hosts=topology.hosts,
        machines=(None,) * len(topology.hosts),
        mpi=mpi,
        probed=probed,
    )
    return make_plan(config, topology, mpi_arguments, inputs)
