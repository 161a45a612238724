"""Compare hosts with the equipment in ``--expect 8xH100,8x400G,2TiB,10GB/s``."""

import re
from pathlib import Path

from ronde.check.check import FAIL, Family, Problem, Problems, check
from ronde.check.fleet import Fleet, Value, Values
from ronde.errors import UsageError
from ronde.units import format_size, parse_bit_per_s, parse_size_bytes

EXPECTED = "expected"  # setting; see ``read_expected``
# Firmware and kernel take the rest.
_SHARE_OF_MEMORY = 0.9
_PORTS = re.compile(r"(\d{1,4})x(\d{1,5})G(?:b(?:it)?(?:/s|ps)?)?", re.IGNORECASE)
_GPUS = re.compile(r"(\d{1,4})x([A-Za-z][\w .-]*)")


def read_expected(text: str) -> dict[str, Value]:
    """Parse ``--expect``, which is a list of equipment or a file with such a list.

    All keys of the result are optional: ``gpus`` (a number and a part of the model's
    name), ``ports`` (a number and Mbit/s), ``memory_bytes``, and ``gb_per_s``, the rate
    between hosts.
    """
    expected: dict[str, Value] = {}
    path = Path(text)
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        text = ",".join(line.partition("#")[0] for line in lines)
    for word in filter(None, map(str.strip, text.split(","))):
        if found := _PORTS.fullmatch(word):
            part = {"ports": [int(found[1]), int(found[2]) * 1000]}
        elif found := _GPUS.fullmatch(word):
            part = {"gpus": [int(found[1]), found[2]]}
        else:
            try:
                if word.endswith(("/s", "ps")):
                    part = {"gb_per_s": parse_bit_per_s(word) / 8e9}
                else:
                    # A size needs a unit.
                    size = parse_size_bytes("" if word.isdecimal() else word)
                    part = {"memory_bytes": size}
            except UsageError:
                raise _bad(word) from None
        if part.keys() & expected.keys():
            raise _bad(word, "each kind once")
        expected |= part
    if not expected:
        raise _bad(text)
    return expected


def _bad(word: str, rule: str = "GPUs, ports, memory or a rate") -> UsageError:
    return UsageError(
        f"--expect must name {rule}, got {word!r}. Type, for example: "
        "--expect 8xH100,8x400G,2TiB,10GB/s, or a file with such words."
    )


@check(FAIL, "gpu.count", optional=("gpu.titles",), family=Family.CLUSTER)
def expected_gpus(fleet: Fleet) -> Problems:
    """Each host has the GPUs that --expect names.

    reads: the number and the names of the GPUs in NVML
    threshold: at least this number of GPUs with the model in their name
    source: --expect
    fix: nvidia-smi -L; lspci -d 10de:  # also shows cards that the driver does not find
    needs: --expect with GPUs, such as 8xH100
    why: Ranks find no GPU there, or a slower one, and all other ranks wait.
    """
    number, model = fleet.settings.get(EXPECTED, {}).get("gpus", (0, ""))
    for facts in fleet.having("gpu.count") if number else ():
        titles = [str(title or "?") for title in facts.values.get("gpu.titles") or ()]
        fitting = [title for title in titles if model.lower() in title.lower()]
        if len(fitting) < number:
            has, num_others = f"{len(fitting)} GPUs {model}", len(titles) - len(fitting)
            if others := sorted({*titles} - {*fitting}):
                has += f", and {num_others} others ({', '.join(others)})"
            yield Problem(has, usual=f"{number} expected", host=facts.host)


@check(
    FAIL, "network.interfaces", optional=("network.rdma_ports",), family=Family.CLUSTER
)
def expected_ports(fleet: Fleet) -> Problems:
    """Each host has the ports that --expect names.

    reads: speed and state in /sys/class/net and /sys/class/infiniband
    threshold: at least this number of RDMA ports, or else of physical interfaces, that
        are up and at least as fast
    source: --expect
    fix: ip -br link; ibstat  # then look at cable, transceiver and switch port
    needs: --expect with ports, such as 8x400G
    why: The host with fewer or slower ports sets the pace of every reduction.
    """
    number, mbit_per_s = fleet.settings.get(EXPECTED, {}).get("ports", (0, 0))
    for facts in fleet.having("network.interfaces") if number else ():
        ports: Values = facts.values.get("network.rdma_ports") or {}
        rdma: list[int] = [
            p["mbit_per_s"] for p in ports.values() if p["state"] == "ACTIVE"
        ]
        links: Values = facts.values["network.interfaces"]
        own: list[int] = [
            i["mbit_per_s"] for i in links.values() if i["kind"] == "physical"
        ]
        fast = max(sum(rate >= mbit_per_s for rate in rates) for rates in (rdma, own))
        if fast < number:
            message = f"{fast} ports of {mbit_per_s / 1000:g} Gbit/s are up"
            yield Problem(message, usual=f"{number} expected", host=facts.host)


@check(FAIL, "host.memory_bytes", family=Family.CLUSTER)
def expected_memory(fleet: Fleet) -> Problems:
    """Each host has the memory that --expect names.

    reads: MemTotal of /proc/meminfo
    threshold: 90 % of the size, since firmware and kernel use the rest
    source: --expect; ronde's choice: 90 %
    fix: dmidecode -t memory  # and look into the BMC's log: has firmware disabled
        memory?
    needs: --expect with a size, such as 2TiB
    why: A job that fits into other hosts' memory runs out of memory there.
    """
    expected = fleet.settings.get(EXPECTED, {}).get("memory_bytes", 0)
    for host, num_bytes in fleet.known("host.memory_bytes").items():
        if num_bytes < _SHARE_OF_MEMORY * expected:
            message = f"{format_size(num_bytes)} of memory"
            yield Problem(message, usual=f"{format_size(expected)} expected", host=host)
