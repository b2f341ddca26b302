"""A hypothesis strategy for machines, which may be sparse, asymmetric, hybrid or limited."""

from __future__ import annotations

from hypothesis import strategies as st

from poprun_py.machines.machine import Core, Machine, NumaNode


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
    step = draw(st.integers(1, 3))
    cores: list[Core] = []
    nodes: list[NumaNode] = []
    cpu = 0
    for position, size in enumerate(sizes):
        own: list[int] = []
        for number in range(size):
            threads = draw(st.integers(1, 2))
            cpus = tuple(range(cpu, cpu + step * threads, step))
            cpu = cpus[-1] + step
            efficiency = draw(st.integers(0, 1))
            cores.append(Core(cpus, position // 2, position * step, number // 2, efficiency))
            own += cpus
        distances = tuple(
            10 if other == position else draw(st.sampled_from([12, 20]))
            for other in range(len(sizes))
        )
        memory = draw(st.sampled_from([0, 1 << 30]))
        nodes.append(NumaNode(position * step, tuple(own), memory, distances))
    everything = [c for core in cores for c in core.cpus]
    allowed = (
        draw(st.sets(st.sampled_from(everything), min_size=1))
        if draw(st.booleans())
        else everything
    )
    memory_nodes = draw(st.sets(st.sampled_from([node.index for node in nodes]), min_size=1))
    quota = draw(st.none() | st.floats(0.1, 20))
    return Machine(tuple(cores), tuple(nodes), frozenset(allowed), frozenset(memory_nodes), quota)
