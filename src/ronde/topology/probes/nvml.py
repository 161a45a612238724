"""GPUs as NVML tells of them, which comes with NVIDIA's driver.

Each question may fail by itself, and in virtual machines many do: what NVML does not
tell is left unknown.
"""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import Any, NamedTuple

from ronde.topology.graph import (
    NVSWITCH,
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    PciDevice,
    Relation,
)
from ronde.topology.pci import plain_address

FORM = "NVML"
"""How sources of this kind begin."""

PCI_SPEEDS = {
    1: "2.5 GT/s PCIe",
    2: "5.0 GT/s PCIe",
    3: "8.0 GT/s PCIe",
    4: "16.0 GT/s PCIe",
    5: "32.0 GT/s PCIe",
    6: "64.0 GT/s PCIe",
}
"""Of a lane by generation, as the kernel writes them."""

_NVLINK_2_GB_PER_S, _NVLINK_3_GB_PER_S = 25.0, 26.0
_GPU, _SWITCH = 0, 2
_CLASSES = {_GPU: 0x030200, _SWITCH: 0x068000}
"""PCI classes by NVML's number for what an NVLink leads to."""
_HIDDEN_DOMAIN = "ffffff"
# nvidia-smi's words by NVML's number.
_PEERS = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}


class Remote(NamedTuple):
    """Where an NVLink leads."""

    kind: int  # NVML's number: 0 a GPU, 2 a switch, 255 unknown.
    address: str  # As NVML spells it; empty where it does not tell.


class GpuAnswers(NamedTuple):
    """What NVML says of a GPU."""

    address: str  # On the bus, as NVML spells it: ``00000000:1B:00.0``.
    title: str = ""  # Its model.
    uuid: str = ""  # ``GPU-...``.
    sm: int = UNKNOWN  # Compute capability, such as 90; ``UNKNOWN``.
    # Number of the device above that of its vendor, 16 bits each; ``UNKNOWN``.
    ids: int = UNKNOWN
    subsystem_ids: int = UNKNOWN  # The same of the board; ``UNKNOWN``.
    generation: int = UNKNOWN  # Of its PCI link as trained now; ``UNKNOWN``.
    width: int = UNKNOWN  # Of its PCI link as trained now; ``UNKNOWN``.
    node: int = UNKNOWN  # NUMA node of the processor that it is near; ``UNKNOWN``.
    nvlinks: tuple[Remote, ...] = ()  # One for each that is active.
    nvlink_mb_per_s: int = UNKNOWN  # At which each of them signals; ``UNKNOWN``.
    # One for each link to its processor that is active.
    c2c_mb_per_s: tuple[int, ...] = ()


def payload_gb_per_s(signalling_mb_per_s: float) -> float:
    """Return what an NVLink carries of the rate at which it signals; 0 where untold.

    Source: NVLink 2 spends 1 bit in 33 on coding (25.781 -> 25), later ones 1 in 17
    (26.562 -> 25, 53.125 -> 50).
    """
    rate = max(0.0, signalling_mb_per_s / 1e3)
    if rate >= _NVLINK_3_GB_PER_S:
        return rate * 16 / 17
    return rate * 32 / 33 if rate > _NVLINK_2_GB_PER_S else rate


def graph_of(
    gpus: Sequence[GpuAnswers], peers: Mapping[tuple[int, int], int]
) -> HostTopology:
    """Return the graph of what NVML says."""
    named = [
        GpuDevice(
            bus_id=plain_address(gpu.address),
            number=number,
            sm=gpu.sm,
            title=gpu.title,
            uuid=gpu.uuid,
        )
        for number, gpu in enumerate(gpus)
    ]
    names = [gpu.name for gpu in named]
    lost = [
        (name, num_lost)
        for name, gpu in zip(names, gpus, strict=True)
        if (num_lost := sum(1 for remote in gpu.nvlinks if not _target(remote)))
    ]
    return HostTopology(
        sources=(FORM,),
        devices=tuple(
            _device(gpu.bus_id, said)
            for gpu, said in zip(named, gpus, strict=True)
            if gpu.bus_id
        ),
        gpus=tuple(named),
        links=tuple(link for each in map(_links, names, gpus) for link in each),
        relations=tuple(
            Relation(names[one], names[other], peer=_PEERS[said])
            for (one, other), said in peers.items()
            # One direction stands for both where they are alike.
            if said in _PEERS and (one < other or said != peers.get((other, one)))
        ),
        remarks=tuple(
            f"NVML does not tell where {num_lost} NVLinks of {name} lead."
            for name, num_lost in lost
        ),
    )


def _device(name: str, gpu: GpuAnswers) -> PciDevice:
    device, vendor = _split(gpu.ids)
    subsystem_device, subsystem_vendor = _split(gpu.subsystem_ids)
    return PciDevice(
        bus_id=name,
        node=gpu.node,
        vendor=vendor,
        device=device,
        subsystem_vendor=subsystem_vendor,
        subsystem_device=subsystem_device,
        speed_now=PCI_SPEEDS.get(gpu.generation, ""),
        width_now=gpu.width,
    )


def _links(name: str, gpu: GpuAnswers) -> list[Link]:
    targets = Counter(
        (target, _CLASSES.get(remote.kind, UNKNOWN))
        for remote in gpu.nvlinks
        if (target := _target(remote))
    )
    each = payload_gb_per_s(gpu.nvlink_mb_per_s)
    links = [
        Link(LinkKind.NVLINK, name, target, count, round(count * each, 3), target_class)
        for (target, target_class), count in targets.items()
    ]
    if gpu.c2c_mb_per_s:
        gb_per_s = sum(gpu.c2c_mb_per_s) / 1000
        node = f"numa/{gpu.node}"
        links.append(Link(LinkKind.C2C, name, node, len(gpu.c2c_mb_per_s), gb_per_s))
    return links


def _target(remote: Remote) -> str:
    """Return the name of what an NVLink leads to; empty where nobody knows."""
    address = plain_address(remote.address)
    if not address or address.startswith(_HIDDEN_DOMAIN):
        # Virtual machines do not see the switches.
        return NVSWITCH if remote.kind == _SWITCH else ""
    return address


def _split(ids: int) -> tuple[int, int]:
    """Return the upper and the lower 16 bits."""
    return (ids >> 16, ids & 0xFFFF) if ids >= 0 else (UNKNOWN, UNKNOWN)


# pynvml has it as a tuple by mistake.
_P2P_READ = 0
_NODE_WORDS = 16
_UNKNOWN_REMOTE = 255


class NoNvmlError(Exception):
    """NVML does not answer; the text says why and what to do."""


class NvmlHost(NamedTuple):
    """What NVML says of this machine."""

    host: HostTopology | None  # Its GPUs; none where NVML does not answer.
    notices: tuple[str, ...]  # What it could not be asked, a sentence each.


@contextmanager
def open_nvml() -> Generator[Any]:
    """Give the module ``pynvml``, ready to be asked.

    Raises:
        NoNvmlError: It is not installed, or NVML does not answer.
    """
    try:
        import pynvml  # pyright: ignore[reportMissingTypeStubs]  it has none
    except ImportError:
        raise NoNvmlError(
            "NVML can only be asked with nvidia-ml-py: pip install 'ronde[gpu]'"
        ) from None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoNvmlError(f"NVML does not answer: {error}") from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def read_nvml() -> NvmlHost:
    """Return what NVML says of this machine; that it says nothing is no error."""
    try:
        with open_nvml() as nvml:
            return _read(nvml)
    except NoNvmlError as error:
        return NvmlHost(None, (f"{error}. NVLinks are not known.",))


def _read(nvml: Any) -> NvmlHost:  # noqa: ANN401  a module without types, like all below
    handles: list[object] = []
    notices: list[str] = []
    for index in range(_ask(nvml, 0, "nvmlDeviceGetCount")):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError as error:
            notices.append(f"NVML does not tell of GPU {index}: {error}.")
    peers = {
        (one, other): _ask(
            nvml,
            UNKNOWN,
            "nvmlDeviceGetP2PStatus",
            handles[one],
            handles[other],
            _P2P_READ,
        )
        for one, other in permutations(range(len(handles)), 2)
    }
    gpus = [_read_gpu(nvml, handle) for handle in handles]
    return NvmlHost(graph_of(gpus, peers), tuple(notices))


def _read_gpu(nvml: Any, handle: object) -> GpuAnswers:  # noqa: ANN401
    def ask(default: object, name: str) -> Any:  # noqa: ANN401
        return _ask(nvml, default, name, handle)

    pci = ask(None, "nvmlDeviceGetPciInfo")
    major, minor = ask((0, UNKNOWN), "nvmlDeviceGetCudaComputeCapability")
    return GpuAnswers(
        address=_text(pci.busId) if pci else "",
        title=_text(ask("", "nvmlDeviceGetName")),
        uuid=_text(ask("", "nvmlDeviceGetUUID")),
        sm=major * 10 + minor,
        ids=pci.pciDeviceId if pci else UNKNOWN,
        subsystem_ids=pci.pciSubSystemId if pci else UNKNOWN,
        generation=ask(UNKNOWN, "nvmlDeviceGetCurrPcieLinkGeneration"),
        width=ask(UNKNOWN, "nvmlDeviceGetCurrPcieLinkWidth"),
        node=_read_node(nvml, handle),
        nvlinks=_read_nvlinks(nvml, handle),
        nvlink_mb_per_s=_ask_fields(
            nvml, handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        )[0],
        c2c_mb_per_s=_read_c2c(nvml, handle),
    )


def _read_node(nvml: Any, handle: object) -> int:  # noqa: ANN401
    """Return the NUMA node of the processor near a GPU, if it is one."""
    words = _ask(
        nvml,
        (),
        "nvmlDeviceGetMemoryAffinity",
        handle,
        _NODE_WORDS,
        nvml.NVML_AFFINITY_SCOPE_NODE,
    )
    nodes = sum(word << 64 * place for place, word in enumerate(words))
    return nodes.bit_length() - 1 if nodes.bit_count() == 1 else UNKNOWN


def _read_nvlinks(nvml: Any, handle: object) -> tuple[Remote, ...]:  # noqa: ANN401
    remotes: list[Remote] = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _ask(nvml, 0, "nvmlDeviceGetNvLinkState", handle, link):
            continue
        kind = _ask(
            nvml, _UNKNOWN_REMOTE, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link
        )
        pci = _ask(nvml, None, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        remotes.append(Remote(kind, _text(pci.busId) if pci else ""))
    return tuple(remotes)


def _read_c2c(nvml: Any, handle: object) -> tuple[int, ...]:  # noqa: ANN401
    """Return the MB/s of each link to the processor in a GPU's package.

    Source: what ``ncclTopoGetXmlFromGpu`` of NCCL's src/graph/xml.cc asks.
    """
    (num_links,) = _ask_fields(nvml, handle, [nvml.NVML_FI_DEV_C2C_LINK_COUNT])
    rates: list[int] = []
    for link in range(max(0, num_links)):
        status, rate = _ask_fields(
            nvml,
            handle,
            [
                (nvml.NVML_FI_DEV_C2C_LINK_GET_STATUS, link),
                (nvml.NVML_FI_DEV_C2C_LINK_GET_MAX_BW, link),
            ],
        )
        if status == 1 and rate > 0:
            rates.append(rate)
    return tuple(rates)


def _ask_fields(nvml: Any, handle: object, fields: list[Any]) -> list[int]:  # noqa: ANN401
    """Return the numbers of fields, ``UNKNOWN`` for those that NVML does not tell."""
    values = _ask(nvml, (), "nvmlDeviceGetFieldValues", handle, fields)
    told = [
        int(value.value.uiVal) if value.nvmlReturn == nvml.NVML_SUCCESS else UNKNOWN
        for value in values
    ]
    return told or [UNKNOWN] * len(fields)


def _ask(nvml: Any, default: Any, name: str, *asked: object) -> Any:  # noqa: ANN401
    """Return an answer of NVML's, or what stands for one that it does not give."""
    try:
        return getattr(nvml, name)(*asked)
    except nvml.NVMLError:
        return default


def _text(said: Any) -> str:  # noqa: ANN401
    # Older releases of the module have bytes.
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)
