"""How this process was launched: `mlx.launch` tells a rank its place in environment variables."""

import os
from dataclasses import dataclass
from pathlib import Path

from ..reading import read_json

_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")  # which mpirun sets


@dataclass(frozen=True)
class Launched:
    """A rank that was launched with others."""

    rank: int  # from 0
    size: int = 0  # number of ranks; 0 if only MPI knows
    host: str = ""  # where the others reach the first rank; empty if only MPI knows
    port: int = 0  # on which they do so before MLX connects them
    own_port: int | None = None  # on which MLX waits for a neighbour here; None if not known


def launched() -> Launched | None:
    """Return how this process was launched; None if it is alone.

    Raises:
        PackError: the launcher's file is no list.
    """
    for name in _MPI:
        if name in os.environ:
            return Launched(int(os.environ[name]))
    if "MLX_RANK" not in os.environ:
        return None

    rank = int(os.environ["MLX_RANK"])
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        host, _, port = coordinator.rpartition(":")
        size = len(_listed("MLX_IBV_DEVICES"))
        return Launched(rank, size, host, int(port) + 1)

    if host := os.environ.get("NCCL_HOST_IP"):
        size = int(os.environ.get("MLX_WORLD_SIZE", "0"))
        return Launched(rank, size, host, int(os.environ.get("NCCL_PORT", "0")) + 1)

    ring = _listed("MLX_HOSTFILE")
    if len(ring) < 2:
        return None
    host, _, port = ring[0][0].rpartition(":")
    return Launched(rank, len(ring), host, int(port) - 1, int(ring[rank][0].rpartition(":")[2]))


def _listed(variable: str) -> list:
    """The list in the file that a variable names; empty without one."""
    name = os.environ.get(variable)
    if not name or not (file := Path(name)).is_file() or not file.stat().st_size:
        return []
    return read_json(file, list)
