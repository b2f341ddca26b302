"""Random graphs with skips, masks, in-place results and weights that several operations read."""

from __future__ import annotations

from hypothesis import strategies as st

from popdist_py.ipu.graph import Graph
from tools.device.ipu_graphs import Builder


@st.composite
def graphs(draw, most: int = 9, *, shares_weights: bool = True) -> Graph:
    """Forward passes of at most ``most`` operations."""
    build = Builder(draw(st.integers(1, 32)), "float16")
    x = build.input("input", draw(st.integers(1, 4096)))
    names = [x, build.input("mask", draw(st.integers(1, 4096)), "int32")]
    tables: list[str] = []
    for index in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(["product", "elementwise", "add", "norm", "view", "lookup"]))
        weights: list[str] = []
        if kind in ("product", "lookup", "norm"):
            if tables and shares_weights and draw(st.booleans()):
                weights = [draw(st.sampled_from(tables))]
            else:
                weights = [build.weight(f"w{index}", draw(st.integers(1, 3_000_000)))]
                tables += weights
        read = [x]
        if kind in ("add", "elementwise") and draw(st.booleans()):
            read.append(draw(st.sampled_from(names)))
        x = build.add(
            f"o{index}",
            kind,
            read,
            None if kind == "view" else draw(st.integers(1, 8192)),
            weights=weights,
            is_in_place=kind in ("add", "elementwise") and draw(st.booleans()),
            is_checkpoint=draw(st.booleans()),
        )
        names.append(x)
    return build.graph([x])
