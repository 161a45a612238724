"""Collectives on MPI, through mpi4py."""

from ronde.collectives.engines.mpi.engine import MpiEngine, connect_some, connect_world

__all__ = ["MpiEngine", "connect_some", "connect_world"]
