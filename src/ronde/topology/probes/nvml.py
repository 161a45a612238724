"""GPUs as NVML tells of them, which comes with NVIDIA's driver.

Each question may fail by itself, and in virtual machines many do: what NVML does not
tell is left unknown.
"""

from collections.abc import Generator
from contextlib import contextmanager
from itertools import permutations
from typing import Any, NamedTuple

from ronde.topology.graph import UNKNOWN, HostTopology
from ronde.topology.probes.nvml_answers import GpuAnswers, Remote, graph_of

# pynvml has it as a tuple by mistake.
_P2P_READ = 0
_NODE_WORDS = 16
_UNKNOWN_REMOTE = 255


class NoNvmlError(Exception):
    """NVML does not answer; the text says why and what to do."""


class NvmlHost(NamedTuple):
    """What NVML says of this machine.

    Attributes:
        host: Its GPUs; none where NVML does not answer.
        notices: What it could not be asked, a sentence each.
    """

    host: HostTopology | None
    notices: tuple[str, ...]


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
