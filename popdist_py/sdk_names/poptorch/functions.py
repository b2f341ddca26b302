"""Operations on point clouds, under PopTorch's own name: every object is that of popdist_py."""

from popdist_py.poptorch import fps, nearest

__all__ = ["fps", "nearest"]
