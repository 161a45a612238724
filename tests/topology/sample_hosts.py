"""The hosts of the sample files."""

from pathlib import Path

from ronde.topology import NCCL_TOPOLOGY, NVIDIA_SMI, HostTopology, Saved

SAMPLES = Path(__file__).parent / "samples"
FILES = sorted(
    path.name
    for folder in ("nccl_topo", "rccl_topo")
    for path in (SAMPLES / folder).iterdir()
)
PERLMUTTER = "perlmutter_a100_4x_slingshot_nccl2.29.7.xml"
B200 = "hgx_b200_8x_vastai_nccl2.27.3.xml"
H200 = "hgx_h200_8x_vastai.xml"
OCI_H100 = "oci_H100-topology.xml"


def sample_path(name: str) -> Path:
    """Return where the sample of a name is."""
    (path,) = SAMPLES.glob(f"*_topo*/{name}")
    return path


def sample_host(name: str) -> HostTopology:
    """Return the one host of a sample."""
    path = sample_path(name)
    probe = NCCL_TOPOLOGY if path.suffix == ".xml" else NVIDIA_SMI
    (host,) = probe.read(Saved(name, path.read_bytes())).hosts
    return host
