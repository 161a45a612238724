"""Collectives on MPI, through mpi4py: buffers, never pickles."""

from ronde.collectives.engines.mpi.engine import (
    MpiCommunicator,
    connect_some,
    connect_world,
)

__all__ = ["MpiCommunicator", "connect_some", "connect_world"]
