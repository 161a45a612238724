"""Rules on hosts: what each finds, in real files and in a sound host made unsound."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.commands import refusal

from ronde.cli import main
from ronde.render import count_findings, draw_log_findings
from ronde.topology import (
    CATALOGUE,
    NCCL_TOPOLOGY,
    NVSWITCH,
    Diagnostic,
    GpuDevice,
    HostTopology,
    Level,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
    Relation,
    Saved,
    lint_fleet,
    lint_host,
    unseen_facts,
)


def run(words):
    return main(["topo", "lint", *words])


ERROR, WARNING, NOTE = Level
SAMPLES = Path(__file__).parent / "samples"
REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs" / "topology-lint.md"

MEANINGS = {n: text for rules in CATALOGUE.values() for n, text in rules.items()}

# How many elements each rule names, judged from the files by hand.
FOUND: dict[str, dict[str, int]] = {
    "nccl_topo/aws_p4de-24xl-topo.xml": {},
    "nccl_topo/azure_ncv4_a100pcie_topo.xml": {
        "link-to-itself": 4,
        "unknown-link-speed": 4,
    },
    "nccl_topo/azure_ndv2_v100_topo.xml": {
        "implausible-processor": 2,
        "nic-behind-processor": 8,
    },
    "nccl_topo/azure_ndv5_h100_topo.xml": {},
    "nccl_topo/azurehpc_nc48v4_topo.xml": {"unknown-link-speed": 2},
    "nccl_topo/hgx_b200_8x_vastai_nccl2.27.3.xml": {"odd-source": 1},
    "nccl_topo/hgx_h200_8x_vastai.xml": {"odd-source": 1},
    "nccl_topo/modal_gvisor_b200_vm_topo.xml": {
        "gpu-listed-as-switch": 8,
        "too-many-nvlinks": 8,
        "nic-faster-than-link": 3,
        "nic-behind-processor": 8,
    },
    "nccl_topo/oci_H100-topology.xml": {"slow-bridge": 8, "odd-nic-speed": 16},
    "nccl_topo/oci_topo-flattened-b4.xml": {"uneven-cores": 1},
    "nccl_topo/oci_topo-flattened.xml": {},
    "nccl_topo/perlmutter_a100_4x_slingshot_nccl2.29.7.xml": {
        "nic-behind-processor": 4
    },
    "nccl_topo/superbench_ndv4_topo.xml": {"shared-cores": 4},
    "rccl_topo/topo_4p1h_1.xml": {"slow-bridge": 4, "virtual-nic": 1},
    "rccl_topo/topo_4p2h.xml": {"slow-bridge": 10, "nic-behind-processor": 4},
    "rccl_topo/topo_4p2h_2nic.xml": {"slow-bridge": 10},
    "rccl_topo/topo_4p3l_ia.xml": {
        "slow-bridge": 10,
        "no-gpudirect": 8,
        "nic-behind-processor": 4,
    },
    "rccl_topo/topo_4p_942.xml": {"odd-nic-speed": 4, "nic-behind-processor": 4},
    "rccl_topo/topo_8p1h_1.xml": {"no-gpudirect": 8, "odd-source": 1},
    "rccl_topo/topo_8p1h_2.xml": {"virtual-nic": 1},
    "rccl_topo/topo_8p1h_3.xml": {"nic-behind-processor": 8},
    "rccl_topo/topo_8p6l.xml": {"nic-behind-processor": 8},
    "rccl_topo/topo_8p_4nics.xml": {},
    "rccl_topo/topo_8p_90a_1.xml": {},
    "rccl_topo/topo_8p_ts1_n4_2.xml": {
        "nic-faster-than-link": 1,
        "nic-behind-processor": 8,
    },
}
HEALTHY = ("perlmutter", "hgx_h200", "hgx_b200", "azure_ndv5", "aws_p4de")


def read(name: str) -> HostTopology:
    path = SAMPLES / name
    topology = NCCL_TOPOLOGY.read(Saved(path.name, path.read_bytes()))
    assert len(topology.hosts) == 1
    return topology.hosts[0]


def one(findings: tuple[Diagnostic, ...], rule: str) -> Diagnostic:
    return next(finding for finding in findings if finding.rule == rule)


@pytest.mark.parametrize("name", FOUND)
def test_samples_have_the_findings_that_their_files_show(name: str) -> None:
    findings = lint_host(read(name))
    assert Counter(finding.rule for finding in findings) == FOUND[name]
    if any(word in name for word in HEALTHY):
        assert all(finding.severity is NOTE for finding in findings)
    assert all(0 <= f.has_gb_per_s < 1e4 for f in findings)
    assert all(len(line) <= 80 for line in draw_log_findings(findings).splitlines())


def test_the_figures_of_real_defects_follow_from_the_files() -> None:
    lost = one(
        lint_host(read("nccl_topo/azure_ncv4_a100pcie_topo.xml")), "link-to-itself"
    )
    assert (lost.has_gb_per_s, lost.should_gb_per_s) == (12.0, 12 * 20.0)
    many = one(
        lint_host(read("nccl_topo/modal_gvisor_b200_vm_topo.xml")), "too-many-nvlinks"
    )
    assert many.has_gb_per_s == pytest.approx(126 * 40.1)
    assert many.should_gb_per_s == pytest.approx(18 * 40.1)
    assert "5052.6" in many.consequence
    assert "5000" in many.consequence
    oci = lint_host(read("nccl_topo/oci_H100-topology.xml"))
    bridge, port = one(oci, "slow-bridge"), one(oci, "odd-nic-speed")
    # 16 lanes of 3 and of 24 units of a tenth of a Gb/s... by 80: 6 and 48.
    assert (bridge.has_gb_per_s, bridge.should_gb_per_s) == (
        16 * 30 / 80,
        16 * 240 / 80,
    )
    assert bridge.severity is ERROR
    assert (port.has_gb_per_s, port.should_gb_per_s) == (22.5, 25.0)


# A sound host: two sockets, and below each two switches with one GPU and one adapter.
SPEED = "32.0 GT/s PCIe"


def sound() -> HostTopology:
    nodes = tuple(
        NumaNode(
            number=n,
            cpus=tuple(range(n * 8, n * 8 + 8)),
            arch="x86_64",
            vendor="GenuineIntel",
            family=6,
            model=0x8F,
        )
        for n in range(2)
    )
    devices: list[PciDevice] = []
    for n in range(4):
        bridge, node = f"0000:{n}0:00.0", n // 2
        devices += [
            PciDevice(bridge, "", node, 0x060400, speed=SPEED, width=16),
            PciDevice(f"0000:{n}1:00.0", bridge, node, 0x030200, speed=SPEED, width=16),
            PciDevice(f"0000:{n}2:00.0", bridge, node, 0x020700, speed=SPEED, width=16),
        ]
    gpus = tuple(GpuDevice(gpu(n), n, sm=90, gdr=1) for n in range(4))
    ports = tuple(
        NetPort(
            f"mlx5_{n}",
            f"0000:{n}2:00.0",
            number=n,
            kind="infiniband",
            mbit_per_s=400_000,
            port=1,
            gdr=1,
        )
        for n in range(4)
    )
    links = tuple(
        Link(LinkKind.NVLINK, gpu(n), NVSWITCH, 18, target_class=0x068000)
        for n in range(4)
    )
    return HostTopology("node1", (), nodes, tuple(devices), gpus, ports, links)


def gpu(number: int) -> str:
    return f"0000:{number}1:00.0"


def with_device(bus_id: str, **fields: object) -> HostTopology:
    host = sound()
    devices = [d._replace(**fields) if d.bus_id == bus_id else d for d in host.devices]
    assert devices != list(host.devices)
    return host._replace(devices=tuple(devices))


def with_gpu(number: int, **fields: object) -> HostTopology:
    host = sound()
    gpus = [g._replace(**fields) if g.number == number else g for g in host.gpus]
    return host._replace(gpus=tuple(gpus))


def with_port(number: int, **fields: object) -> HostTopology:
    host = sound()
    ports = [p._replace(**fields) if p.number == number else p for p in host.ports]
    return host._replace(ports=tuple(ports))


def with_node(number: int, **fields: object) -> HostTopology:
    host = sound()
    nodes = [n._replace(**fields) if n.number == number else n for n in host.numa_nodes]
    return host._replace(numa_nodes=tuple(nodes))


def with_links(*links: Link) -> HostTopology:
    """Replace the links of the first GPUs by others."""
    sources = {link.source for link in links}
    kept = tuple(link for link in sound().links if link.source not in sources)
    return sound()._replace(links=(*links, *kept))


def nvlink(
    source: int, target: str, num: int = 18, target_class: int = 0x030200
) -> Link:
    return Link(LinkKind.NVLINK, gpu(source), target, num, target_class=target_class)


def three_nodes() -> HostTopology:
    host = sound()
    third = host.numa_nodes[1]._replace(number=2, cpus=tuple(range(16, 23)))
    return host._replace(numa_nodes=(*host.numa_nodes, third))


def far() -> HostTopology:
    """The first adapter is slower than the second, which is on another switch."""
    return with_port(0, mbit_per_s=200_000)


BRIDGE, NIC = "0000:00:00.0", "0000:02:00.0"

# One change to the sound host each, and what it must bring: rule, severity, elements.
UNSOUND: dict[str, tuple[Callable[[], HostTopology], Level, list[str]]] = {
    "device-lost": (lambda: with_device(gpu(1), is_lost=True), ERROR, [gpu(1)]),
    "slow-bridge": (lambda: with_device(BRIDGE, width=8), WARNING, [BRIDGE]),
    "tiny-link": (
        lambda: with_device(gpu(0), speed="2.5 GT/s PCIe", width=1),
        ERROR,
        [gpu(0)],
    ),
    "unknown-link-speed": (
        lambda: with_device(gpu(0), speed="", width=0),
        WARNING,
        [gpu(0)],
    ),
    "trained-down": (
        lambda: with_device(gpu(2), speed_now=SPEED, width_now=4),
        ERROR,
        [gpu(2)],
    ),
    "uneven-gpu-link": (lambda: with_device(gpu(3), width=4), WARNING, [gpu(3)]),
    "link-to-itself": (
        lambda: with_links(nvlink(0, gpu(0), 2), nvlink(0, NVSWITCH)),
        ERROR,
        [gpu(0)],
    ),
    "gpu-listed-as-switch": (
        lambda: with_links(nvlink(0, gpu(1), target_class=0x068000), nvlink(1, gpu(0))),
        ERROR,
        [gpu(0)],
    ),
    "too-many-nvlinks": (
        lambda: sound()._replace(
            links=tuple(link._replace(num_links=19) for link in sound().links)
        ),
        ERROR,
        [gpu(n) for n in range(4)],
    ),
    "gpu-without-links": (
        lambda: sound()._replace(links=sound().links[1:]),
        ERROR,
        [gpu(0)],
    ),
    "uneven-nvlinks": (lambda: with_links(nvlink(2, NVSWITCH, 17)), WARNING, [gpu(2)]),
    "no-peer-access": (
        lambda: sound()._replace(relations=(Relation(gpu(0), gpu(1), "NV18", "CNS"),)),
        WARNING,
        [gpu(0), gpu(1)],
    ),
    "acs-redirects": (
        lambda: with_device(BRIDGE, is_redirecting=True),
        WARNING,
        [BRIDGE],
    ),
    "nic-faster-than-link": (
        lambda: with_device(NIC, speed="16.0 GT/s PCIe"),
        WARNING,
        [NIC],
    ),
    "odd-nic-speed": (
        lambda: with_port(1, mbit_per_s=380_000),
        WARNING,
        ["net/mlx5_1"],
    ),
    "slow-nic": (lambda: with_port(2, mbit_per_s=100_000), WARNING, ["net/mlx5_2"]),
    "nic-down": (lambda: with_port(3, is_up=False), WARNING, ["net/mlx5_3"]),
    "virtual-nic": (
        lambda: sound()._replace(ports=(*sound().ports, NetPort("docker0"))),
        NOTE,
        ["net/docker0"],
    ),
    "no-gpudirect": (lambda: with_gpu(1, gdr=0), WARNING, [gpu(1)]),
    "far-nic": (far, WARNING, [gpu(0)]),
    "nic-behind-processor": (lambda: with_device(gpu(0), parent=""), WARNING, [gpu(0)]),
    "no-numa-node": (
        lambda: sound()._replace(
            devices=tuple(
                d._replace(node=-1) if d.bus_id in (BRIDGE, gpu(0)) else d
                for d in sound().devices
            )
        ),
        WARNING,
        [gpu(0)],
    ),
    "shared-cores": (
        lambda: with_node(1, cpus=tuple(range(7, 15))),
        WARNING,
        ["numa/0", "numa/1"],
    ),
    "uneven-cores": (three_nodes, NOTE, ["numa/2"]),
    "implausible-processor": (lambda: with_node(0, model=85), WARNING, ["numa/0"]),
    "refused-by-nccl": (
        lambda: sound()._replace(refused=("Line 2: cpu has no numaid.",)),
        ERROR,
        ["source"],
    ),
    "odd-source": (
        lambda: sound()._replace(remarks=("Line 3: nic is listed twice.",)),
        NOTE,
        ["source"],
    ),
}
# What comes along where one change breaks two things.
BESIDE = {
    "tiny-link": {"slow-bridge"},
    "nic-faster-than-link": {"far-nic"},
    "odd-nic-speed": {"far-nic"},
    "slow-nic": {"far-nic"},
    "far-nic": {"slow-nic"},
    "nic-down": {"nic-behind-processor"},
}


def test_a_sound_host_has_no_findings() -> None:
    assert lint_host(sound()) == ()
    assert lint_host(HostTopology()) == ()


def test_every_rule_is_tried() -> None:
    assert list(CATALOGUE["a host"]) == list(UNSOUND)
    assert len(MEANINGS) == sum(map(len, CATALOGUE.values()))


@pytest.mark.parametrize("rule", UNSOUND)
def test_one_change_brings_its_finding_and_no_other(rule: str) -> None:
    make, severity, elements = UNSOUND[rule]
    findings = lint_host(make())
    own = [finding for finding in findings if finding.rule == rule]
    assert [finding.element for finding in own] == elements
    assert {finding.severity for finding in own} == {severity}
    others = {finding.rule for finding in findings} - {rule}
    assert others <= BESIDE.get(rule, set())
    for finding in own:
        words = finding.seen, finding.consequence, finding.remedy
        assert all(text.endswith(".") and len(text) > 15 for text in words)


def test_a_speed_that_is_low_at_rest_is_a_note_for_gpus_alone() -> None:
    slow = {"speed_now": "2.5 GT/s PCIe", "width_now": 16}
    found = one(lint_host(with_device(gpu(0), **slow)), "trained-down")
    assert found.severity is NOTE
    assert "under load" in found.remedy
    found = one(lint_host(with_device(NIC, **slow)), "trained-down")
    assert found.severity is ERROR
    assert found.has_gb_per_s == 2.5 / 8 * 0.8 * 16


def with_slots(speed: str, **fields: object) -> HostTopology:
    """Return the sound host with all its bridges' links at a speed."""
    host = sound()
    slots = [
        device._replace(speed=speed, **fields) if not device.parent else device
        for device in host.devices
    ]
    return host._replace(devices=tuple(slots))


@pytest.mark.parametrize(
    ("host", "severity"),
    [
        # Cards of the next generation in a host whose slots are all of this one.
        (with_slots("16.0 GT/s PCIe"), NOTE),
        # Below half it is no matter of generations, nor with fewer lanes.
        (with_slots("5.0 GT/s PCIe"), ERROR),
        (with_slots("16.0 GT/s PCIe", width=8), ERROR),
        (with_slots(SPEED, width=8), WARNING),
        # One slot below the others.
        (with_device(BRIDGE, speed="16.0 GT/s PCIe"), WARNING),
    ],
    ids=["as built", "far below", "half the lanes of it", "half the lanes", "one"],
)
def test_bridges_of_a_host_that_is_older_than_its_cards(
    host: HostTopology, severity: Level
) -> None:
    assert one(lint_host(host), "slow-bridge").severity is severity


def test_a_gpu_in_one_package_with_its_processor_needs_no_bus() -> None:
    host = with_device(gpu(0), speed="2.5 GT/s PCIe", width=1)
    inside = Link(LinkKind.C2C, gpu(0), "numa/0", 10, 450.0)

    assert "tiny-link" in {finding.rule for finding in lint_host(host)}
    packaged = host._replace(links=(*host.links, inside))
    assert "tiny-link" not in {finding.rule for finding in lint_host(packaged)}


@pytest.mark.parametrize("place", [{"port": 2}, {"bus_id": "0000:02:00.1"}])
def test_a_second_port_without_cable_is_a_note(place: dict[str, object]) -> None:
    host = sound()
    second = host.ports[0]._replace(title="mlx5_9", is_up=False, **place)
    found = one(lint_host(host._replace(ports=(*host.ports, second))), "nic-down")
    assert found.severity is NOTE


def test_a_port_that_is_down_loses_the_rate_of_the_others() -> None:
    found = one(lint_host(with_port(3, is_up=False, mbit_per_s=10_000)), "nic-down")
    assert "the node has 50 GB/s less" in found.consequence
    init = one(lint_host(with_port(3, is_up=False, state="INIT, LinkUp")), "nic-down")
    assert "no subnet manager has configured the port" in init.seen
    off = lint_host(with_port(3, is_up=False, kind="", state="DOWN, Disabled"))
    assert "nic-down" not in {finding.rule for finding in off}


@pytest.mark.parametrize("of_gpus", [0, 1])
@pytest.mark.parametrize(("name", "num"), [("mlx5_", 4), ("eth", 0)])
def test_gpudirect_that_is_off_for_all_ports(of_gpus: int, name: str, num: int) -> None:
    host = sound()
    ports = [p._replace(gdr=0, kind="", title=f"{name}{p.number}") for p in host.ports]
    gpus = tuple(each._replace(gdr=of_gpus) for each in host.gpus)
    found = lint_host(host._replace(ports=tuple(ports), gpus=gpus))
    assert [f.rule for f in found] == ["no-gpudirect"] * num


def test_what_is_no_adapter_for_traffic_is_not_judged() -> None:
    host = sound()
    # A management processor's interface behind USB, and rates of the kernel's own.
    usb = PciDevice("0000:99:00.0", "", 0, 0x0C0330, speed=SPEED, width=4, width_now=1)
    port = NetPort("idrac", usb.bus_id, mbit_per_s=425, number=9)
    cloud = NetPort("ens4", NIC, mbit_per_s=32_000, is_up=False)
    more = host._replace(devices=(*host.devices, usb), ports=(*host.ports, port))
    assert lint_host(more) == ()
    found = lint_host(host._replace(ports=(*host.ports, cloud)))
    assert {finding.rule for finding in found} == {"nic-down"}


def test_a_family_after_15_is_one_of_the_future() -> None:
    assert [n for n in (5, 6, 79) if lint_host(with_node(0, family=n))] == [5]


def test_lint_names_what_a_host_does_not_show() -> None:
    assert unseen_facts([]) == ()
    full = sound()
    facts = ("current speed of PCI links", "ACS", "access between GPUs")
    assert unseen_facts([full]) == facts
    rates = tuple(port._replace(mbit_per_s=0) for port in full.ports)
    bare = full._replace(ports=rates, links=(), devices=())
    assert unseen_facts([full, bare]) == (
        "current speed of PCI links (1 of 2 hosts)",
        *facts[1:],
        "PCI links (1 of 2 hosts)",
        "NVLinks (1 of 2 hosts)",
        "rates of network ports (1 of 2 hosts)",
    )
    assert unseen_facts([full._replace(gpus=())]) == facts[:1]


def all_ports_down() -> HostTopology:
    ports = tuple(port._replace(is_up=False) for port in sound().ports)
    return sound()._replace(ports=ports)


def fleet(odd: HostTopology) -> list[HostTopology]:
    return [odd._replace(name="odd"), *(sound()._replace(name=f"n{i}") for i in (1, 2))]


@pytest.mark.parametrize(
    ("odd", "rules", "has", "should"),
    [
        (sound()._replace(gpus=sound().gpus[1:]), {"node-gpus-differ"}, 0, 0),
        (
            with_links(nvlink(0, NVSWITCH, 9), nvlink(1, NVSWITCH, 9)),
            {"node-nvlinks-differ"},
            9 * 20.6,
            18 * 20.6,
        ),
        (with_port(0, is_up=False), {"node-network-differs"}, 150.0, 200.0),
        (
            with_device(gpu(0), speed="16.0 GT/s PCIe"),
            {"node-gpu-links-differ"},
            24.0,
            48.0,
        ),
        (all_ports_down(), {"node-network-differs"}, 0, 200.0),
        (with_device(gpu(0), width_now=4), {"node-gpu-links-differ"}, 12.0, 48.0),
        (with_node(0, cpus=(0, 1, 2)), {"node-cores-differ"}, 0, 0),
    ],
)
def test_one_node_of_three_that_is_unlike(
    odd: HostTopology, rules: set[str], has: float, should: float
) -> None:
    findings = lint_fleet(fleet(odd))
    assert {finding.rule for finding in findings} == rules
    assert {finding.element for finding in findings} == {"odd"}
    assert findings[0].has_gb_per_s == pytest.approx(has)
    assert findings[0].should_gb_per_s == pytest.approx(should)
    assert "2 of 3 nodes" in findings[0].seen


def test_nodes_that_are_alike_and_one_that_reports_less() -> None:
    assert lint_fleet([]) == ()
    assert lint_fleet([sound()]) == ()
    silent = sound()._replace(ports=(), devices=(), numa_nodes=())
    assert lint_fleet(fleet(silent)) == ()


def test_equal_findings_are_reported_once_and_the_worst_first() -> None:
    findings = lint_host(read("nccl_topo/modal_gvisor_b200_vm_topo.xml"))
    text = draw_log_findings(findings)
    heads = re.findall(r"^(ERROR|WARNING|NOTE) (\S+):", text, re.MULTILINE)
    assert [head for head, _ in heads] == ["ERROR"] * 2 + ["WARNING"] * 2 + ["NOTE"]
    assert "ERROR too-many-nvlinks: 8 times: 0002:00:01.0, " in text
    assert count_findings(findings) == "16 errors, 3 warnings, 8 notes"
    assert count_findings(()) == "nothing found"
    assert draw_log_findings(()) == ""


def test_every_rule_is_documented_with_its_meaning() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \|", DOCS.read_text(), re.MULTILINE)
    reported = {
        name: meaning.replace("&lt;", "<").replace("&gt;", ">")
        for name, meaning in rows
    }
    assert reported == MEANINGS


def name(path: str) -> str:
    return str(SAMPLES / path)


MODAL = name("nccl_topo/modal_gvisor_b200_vm_topo.xml")


def test_the_command_reports_and_ends_with_what_it_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([name("nccl_topo/azure_ndv5_h100_topo.xml")]) == 0
    assert run([name("nccl_topo/oci_topo-flattened-b4.xml")]) == 0
    assert "1 note" in capsys.readouterr().out
    assert run([MODAL]) == 1
    out = capsys.readouterr().out
    assert out.startswith(
        "modal_gvisor_b200_vm_topo (8 GPUs, 13 network ports, 2 NUMA nodes): "
        "16 errors, 3 warnings"
    )


def test_rules_can_be_chosen_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = "too-many-nvlinks,nic-behind-processor"
    assert run([MODAL, "--rule", chosen, "--json"]) == 1
    reported = json.loads(capsys.readouterr().out)
    assert reported["form"] == "ronde-findings"
    counts = Counter(finding["rule"] for finding in reported["findings"])
    assert counts == {"too-many-nvlinks": 8, "nic-behind-processor": 8}
    assert run([MODAL, "--rule", chosen, "--ignore", "too-many-nvlinks"]) == 0
    # A file that cannot be read hides no other.
    assert run([str(DOCS), MODAL, "/none.xml"]) == 64
    out, err = capsys.readouterr()
    assert "16 errors" in out
    assert DOCS.name in err
    assert "none.xml: No such file" in err
    said = refusal(capsys, "topo", "lint", MODAL, "--ignore", "nvlink")
    assert "must name rules, got 'nvlink'" in said
    assert run(["--rules"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in MEANINGS)


def test_several_hosts_are_compared_and_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = ["azurehpc_nc48v4_topo.xml", "azure_ncv4_a100pcie_topo.xml"]
    assert run([name(f"nccl_topo/{file}") for file in files]) == 1
    out = capsys.readouterr().out
    assert out.startswith("2 hosts: ")
    assert "WARNING node-gpus-differ: azurehpc_nc48v4_topo\n" in out
    assert "azure_ncv4_a100pcie_topo 0001:00:00.0" in out


def test_the_odd_one_of_a_fleet_may_be_the_better_one() -> None:
    odd, other, third = fleet(sound()._replace(gpus=sound().gpus[1:]))
    few = [odd, odd._replace(name="b"), odd._replace(name="c"), other]
    findings = lint_fleet(few)
    assert [(f.element, f.severity) for f in findings] == [("n1", WARNING)]
    # With as many of either, more is right.
    draw = lint_fleet([odd, odd._replace(name="b"), other, third])
    assert [f.element for f in draw] == ["odd", "b"]


def test_of_an_unknown_chip_no_loss_is_claimed_in_figures() -> None:
    links = [nvlink(0, NVSWITCH, 18), nvlink(1, NVSWITCH, 12)]
    host = with_links(*links)
    known = one(lint_host(host), "uneven-nvlinks")
    assert known.should_gb_per_s > known.has_gb_per_s > 0
    unknown = host._replace(gpus=tuple(g._replace(sm=-1) for g in host.gpus))
    found = one(lint_host(unknown), "uneven-nvlinks")
    assert (found.has_gb_per_s, found.should_gb_per_s) == (0.0, 0.0)
    assert found.consequence == "Collectives run at the slowest GPU's rate."
    assert found.severity is known.severity
