"""How many IPU-Link domains a job is in, as far as its numbers decide. Pure arithmetic.

An IPU-Link domain is one rack: 64 IPUs. A replica and an instance lie in one domain, so the domains
divide the instances.
"""

from __future__ import annotations

from popdist_py.device_numbers import LINK_DOMAIN_IPUS

_MOST_NAMED = 4


def fewest_link_domains(num_instances: int, num_ipus: int) -> int:
    """Return as few domains as hold ``num_ipus`` and divide ``num_instances``.

    Instances of more than 64 IPUs fit into no domain: each is then a domain, larger than any that
    exists, as CPU hosts run such jobs all the same.
    """
    return next(iter(roomy_link_domains(num_instances, num_ipus)), num_instances)


def roomy_link_domains(num_instances: int, num_ipus: int) -> list[int]:
    """Return the smallest numbers of domains that hold the IPUs and divide the instances."""
    least = -(-num_ipus // LINK_DOMAIN_IPUS)
    found: list[int] = []
    for number in range(least, num_instances + 1):
        if num_instances % number == 0:
            found.append(number)
            if len(found) == _MOST_NAMED:
                break
    return found
