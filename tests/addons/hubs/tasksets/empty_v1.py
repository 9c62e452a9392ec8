"""Uses verifiers and exports no taskset."""

import verifiers.v1 as vf

__all__ = ["vf"]
