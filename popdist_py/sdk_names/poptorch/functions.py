"""Operations on point clouds under PopTorch's own name, re-exported from popdist_py."""

from popdist_py.poptorch import fps, nearest

__all__ = ["fps", "nearest"]
