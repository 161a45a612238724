"""Query GPUs through NVML, which is part of NVIDIA's driver.

Any query may fail, and many do in virtual machines. The value is then unknown.
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

_NVLINK_2_GB_PER_S, _NVLINK_3_GB_PER_S = 25.0, 26.0
# NVML's numbers for the ends of NVLinks, and their PCI classes.
_GPU, _SWITCH, _UNKNOWN_REMOTE = 0, 2, 255
_CLASSES = {_GPU: 0x030200, _SWITCH: 0x068000}
_HIDDEN_DOMAIN = "ffffff"
# nvidia-smi's words by NVML's number.
_PEERS = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
# pynvml has it as a tuple by mistake.
_P2P_READ = 0
_NODE_WORDS = 16


class Remote(NamedTuple):
    """The remote end of an NVLink."""

    kind: int  # NVML's number: 0 a GPU, 2 a switch, 255 unknown.
    address: str  # As NVML spells it; empty if unknown.


class GpuAnswers(NamedTuple):
    """NVML's answers about a GPU."""

    address: str  # On the bus, as NVML spells it: ``00000000:1B:00.0``.
    title: str = ""  # Its model.
    uuid: str = ""
    sm: int = UNKNOWN  # Compute capability, such as 90.
    node: int = UNKNOWN  # NUMA node of the processor near it.
    nvlinks: tuple[Remote, ...] = ()  # Those that are active.
    has_states: bool = True  # NVML has states of NVLinks; False in MIG mode.
    nvlink_mb_per_s: int = UNKNOWN  # At which each of them signals.
    c2c_mb_per_s: tuple[int, ...] = ()  # Of each active link to its processor.


def payload_gb_per_s(signalling_mb_per_s: float) -> float:
    """Return the payload rate for an NVLink's signalling rate; 0 if unknown.

    Source: NVLink 2 uses 1 bit in 33 for coding (25.781 -> 25), later versions 1 in 17
    (26.562 -> 25, 53.125 -> 50).
    """
    rate = max(0.0, signalling_mb_per_s / 1e3)
    if rate >= _NVLINK_3_GB_PER_S:
        return rate * 16 / 17
    return rate * 32 / 33 if rate > _NVLINK_2_GB_PER_S else rate


def graph_of(
    gpus: Sequence[GpuAnswers], peers: Mapping[tuple[int, int], int]
) -> HostTopology:
    """Return NVML's answers as a topology, without details of PCI devices."""
    named: list[GpuDevice] = []
    links: list[Link] = []
    remarks: list[str] = []
    for number, gpu in enumerate(gpus):
        address = plain_address(gpu.address)
        own = GpuDevice(address, number, sm=gpu.sm, title=gpu.title, uuid=gpu.uuid)
        named.append(own._replace(nvlinks=len(gpu.nvlinks)) if gpu.has_states else own)
        each = payload_gb_per_s(gpu.nvlink_mb_per_s)
        ends = [(_target(end), _CLASSES.get(end.kind, UNKNOWN)) for end in gpu.nvlinks]
        for (target, code), num in Counter(ends).items():
            if target:
                rate = round(num * each, 3)
                links.append(Link(LinkKind.NVLINK, own.name, target, num, rate, code))
            else:
                lost = f"{num} NVLinks of {own.name}"
                remarks.append(f"NVML does not show where {lost} lead.")
        if rates := gpu.c2c_mb_per_s:
            near, rate = f"numa/{gpu.node}", sum(rates) / 1000
            links.append(Link(LinkKind.C2C, own.name, near, len(rates), rate))
    return HostTopology(
        sources=("NVML",),
        devices=tuple(
            PciDevice(each.bus_id, node=gpu.node)
            for each, gpu in zip(named, gpus, strict=True)
            if each.bus_id
        ),
        gpus=tuple(named),
        links=tuple(links),
        relations=tuple(
            Relation(named[one].name, named[other].name, peer=_PEERS[answer])
            for (one, other), answer in peers.items()
            # Equal directions are listed once.
            if answer in _PEERS and (one < other or answer != peers.get((other, one)))
        ),
        remarks=tuple(remarks),
    )


def _target(remote: Remote) -> str:
    address = plain_address(remote.address)
    if not address or address.startswith(_HIDDEN_DOMAIN):
        # Virtual machines do not see the switches.
        return NVSWITCH if remote.kind == _SWITCH else ""
    return address


class NoNvmlError(Exception):
    """Raised if NVML does not answer; the text has the reason and the remedy."""


@contextmanager
def open_nvml() -> Generator[Any]:
    """Yield the module ``pynvml``, initialised."""
    try:
        import pynvml  # pyright: ignore[reportMissingTypeStubs]  it has none
    except ImportError:
        raise NoNvmlError("NVML needs nvidia-ml-py: pip install 'ronde[gpu]'") from None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoNvmlError(f"NVML does not answer: {error}") from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def read_nvml() -> tuple[HostTopology | None, tuple[str, ...]]:
    """Return this machine's GPUs (None without NVML), and notices."""
    handles: list[object] = []
    notices: list[str] = []
    status = "nvmlDeviceGetP2PStatus"
    try:
        with open_nvml() as nvml:
            for index in range(_ask(nvml, 0, "nvmlDeviceGetCount")):
                try:
                    handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
                except nvml.NVMLError as error:
                    notices.append(f"NVML does not answer for GPU {index}: {error}.")
            peers = {
                (a, b): _ask(nvml, UNKNOWN, status, handles[a], handles[b], _P2P_READ)
                for a, b in permutations(range(len(handles)), 2)
            }
            gpus = [_read_gpu(nvml, handle) for handle in handles]
    except NoNvmlError as error:
        return None, (f"{error}. NVLinks are unknown.",)
    return graph_of(gpus, peers), tuple(notices)


def _read_gpu(nvml: Any, handle: object) -> GpuAnswers:  # noqa: ANN401
    def ask(default: object, name: str, *given: object) -> Any:  # noqa: ANN401
        return _ask(nvml, default, name, handle, *given)

    def address(pci: Any) -> str:  # noqa: ANN401
        return pci.busId if pci else ""

    states = [
        ask(UNKNOWN, "nvmlDeviceGetNvLinkState", link)
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
    ]
    has_mig = ask((0, 0), "nvmlDeviceGetMigMode")[0] == 1
    major, minor = ask((0, UNKNOWN), "nvmlDeviceGetCudaComputeCapability")
    scope = nvml.NVML_AFFINITY_SCOPE_NODE
    words = ask((), "nvmlDeviceGetMemoryAffinity", _NODE_WORDS, scope)
    nodes = sum(word << 64 * index for index, word in enumerate(words))
    speed = nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
    kind = "nvmlDeviceGetNvLinkRemoteDeviceType"
    remote = "nvmlDeviceGetNvLinkRemotePciInfo"
    return GpuAnswers(
        address=address(ask(None, "nvmlDeviceGetPciInfo")),
        title=ask("", "nvmlDeviceGetName"),
        uuid=ask("", "nvmlDeviceGetUUID"),
        sm=major * 10 + minor,
        node=nodes.bit_length() - 1 if nodes.bit_count() == 1 else UNKNOWN,
        nvlinks=tuple(
            Remote(ask(_UNKNOWN_REMOTE, kind, link), address(ask(None, remote, link)))
            for link, state in enumerate(states)
            if state == 1
        ),
        nvlink_mb_per_s=_ask_fields(nvml, handle, [speed])[0],
        has_states=not has_mig and set(states) != {UNKNOWN},
        c2c_mb_per_s=_read_c2c(nvml, handle),
    )


def _read_c2c(nvml: Any, handle: object) -> tuple[int, ...]:  # noqa: ANN401
    """Return the MB/s of each link to the processor in a GPU's package.

    Source: ``ncclTopoGetXmlFromGpu`` of NCCL's src/graph/xml.cc.
    """
    (num_links,) = _ask_fields(nvml, handle, [nvml.NVML_FI_DEV_C2C_LINK_COUNT])
    fields = nvml.NVML_FI_DEV_C2C_LINK_GET_STATUS, nvml.NVML_FI_DEV_C2C_LINK_GET_MAX_BW
    answers = (
        _ask_fields(nvml, handle, [(each, link) for each in fields])
        for link in range(max(0, num_links))
    )
    return tuple(rate for status, rate in answers if status == 1 and rate > 0)


def _ask_fields(nvml: Any, handle: object, fields: list[Any]) -> list[int]:  # noqa: ANN401
    values = _ask(nvml, (), "nvmlDeviceGetFieldValues", handle, fields)
    known = [
        int(value.value.uiVal) if value.nvmlReturn == nvml.NVML_SUCCESS else UNKNOWN
        for value in values
    ]
    return known or [UNKNOWN] * len(fields)


def _ask(nvml: Any, default: Any, name: str, *given: object) -> Any:  # noqa: ANN401
    try:
        return getattr(nvml, name)(*given)
    except nvml.NVMLError:
        return default
