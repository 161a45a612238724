"""What is found in real files with one fault planted, and in sound ones."""

import gzip
import re
from pathlib import Path

import pytest
from tests.commands import refusal

from ronde.errors import UsageError
from ronde.render import draw_tree
from ronde.topology import (
    AlignmentRequest,
    HostPlan,
    HostTopology,
    Level,
    Saved,
    Topology,
    compare_hosts,
    lint_fleet,
    lint_host,
    plan_host,
    read_file,
    read_saved,
)

ERROR, WARNING, NOTE = Level
SAMPLES = Path(__file__).parent / "samples"
B200 = SAMPLES / "nvsmi_topo_m/hgx_b200_8x_drv595.91.txt"
PERLMUTTER = SAMPLES / "nvsmi_topo_m/perlmutter_a100_4x_drv580.159.txt"
H100 = SAMPLES / "nccl_topo/azure_ndv5_h100_topo.xml"
P4DE = SAMPLES / "nccl_topo/aws_p4de-24xl-topo.xml"
PERLMUTTER_XML = SAMPLES / "nccl_topo/perlmutter_a100_4x_slingshot_nccl2.29.7.xml"


def host_of(text: str) -> HostTopology:
    (host,) = read_file(Saved("it", text.encode())).hosts
    return host


def found_in(text: str) -> dict[str, str]:
    return {each.rule: each.element for each in lint_host(host_of(text))}


def with_fewer_links(number: int) -> str:
    """Return the matrix of eight GPUs in which one has lost 2 of its 18 links."""
    rows: list[str] = []
    for row in B200.read_text().split("\n"):
        cells = row.split("\t")
        if cells[0] == f"GPU{number}":
            cells = [cell.replace("NV18", "NV16") for cell in cells]
        elif re.fullmatch("GPU[0-9]", cells[0]):
            cells[1 + number] = cells[1 + number].replace("NV18", "NV16")
        rows.append("\t".join(cells))
    return "\n".join(rows)


SXM, PCIE = "NVIDIA H100 80GB HBM3", "NVIDIA A100-PCIE-40GB"
DOWN = "NVML: Unable to retrieve NVLink information as all links are inActive"
LEGEND = "Legend:\n\n  X    = Self\n"
NV_LEGEND = LEGEND + "  NV#  = Connection traversing a bonded set of # NVLinks\n"
MIG = "  MIG 1g.10gb     Device  0: (UUID: MIG-6f1d)"


def status_of(*gpus: tuple[str, str | int]) -> str:
    """Return what nvidia-smi nvlink -s prints of GPUs: model, and links or a line."""
    text = ""
    for number, (title, shown) in enumerate(gpus):
        lines = [shown] if isinstance(shown, str) else []
        if isinstance(shown, int):
            lines = [f"\t Link {n}: 26.562 GB/s" for n in range(shown)]
        head = f"GPU {number}: {title} (UUID: GPU-{number:08d})"
        text += "\n".join([head, *lines]) + "\n"
    return text


def matrix(*rows: str) -> str:
    names = [f"GPU{n}" for n in range(len(rows))]
    lines = [[name, *row.split()] for name, row in zip(names, rows, strict=True)]
    return "\n".join(map("\t".join, [["", *names], *lines])) + "\n"


ALONE = matrix("X SYS", "SYS X")
NAMES = status_of((SXM, ""), (SXM, ""))
OFF = {"gpu-without-links": "error"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The fabric manager does not run.
        (status_of(*[(SXM, DOWN)] * 8), OFF),
        (status_of(*[(SXM, DOWN)] * 2).replace("\nNVML", " NVML"), OFF),
        (status_of(*[("Tesla V100-SXM2-16GB", DOWN)] * 8), OFF),
        (ALONE + NAMES, OFF),
        (status_of((SXM, 18), (SXM, DOWN)), OFF),
        (matrix("X NV12 SYS", "NV12 X SYS", "SYS SYS X"), OFF),
        # A matrix shows how it should be, and a list how it is.
        (matrix("X NV18", "NV18 X") + status_of((SXM, 18), (SXM, DOWN)), OFF),
        # Links of all GPUs are down, as of one switch.
        (status_of(*[(SXM, 14)] * 8), {"uneven-nvlinks": "warning"}),
        # No NVLinks, and sound: no board joins them, or nobody knows.
        (status_of(*[(PCIE, DOWN)] * 4), {}),
        (status_of(*[("NVIDIA H100 PCIe", "\t Link 0: <inactive>")] * 2), {}),
        (status_of(("NVIDIA GH200 480GB", DOWN)), {}),
        (status_of((SXM, DOWN)), {}),
        (status_of(*[(SXM, f"{DOWN}\n{MIG}")] * 2), {}),
        (f"{ALONE}\n{LEGEND}\n{NAMES}", {}),
        (status_of(*[("NVIDIA A800-SXM4-80GB", 8)] * 8), {}),
        # Two of three have a bridge; one that drives a screen has no links.
        (
            status_of(*[("NVIDIA RTX A6000", 4)] * 2, ("NVIDIA RTX A6000", DOWN)),
            {"gpu-without-links": "note"},
        ),
        (status_of(*[("NVIDIA A100-SXM4-40GB", 12)] * 4, ("NVIDIA T400", DOWN)), {}),
        # A part of eight V100, which one or two links join to four others each.
        (matrix("X NV1 NV2", "NV1 X SYS", "NV2 SYS X"), {}),
    ],
)
def test_nvlinks_that_are_down_are_found_and_missing_ones_are_not(text, expected):
    found = {f.rule: str(f.severity) for f in lint_host(host_of(text))}
    assert {rule: level for rule, level in found.items() if "source" not in rule} == (
        expected
    )


def test_gpus_without_any_link_are_all_named_and_drawn():
    host = host_of(status_of(*[(SXM, DOWN)] * 8))
    found = lint_host(host)
    assert [finding.element for finding in found] == [f"gpu/{n}" for n in range(8)]
    assert "its model has 18" in found[0].seen
    assert "NVLink: every GPU: none" in draw_tree(Topology((host,)))
    # A matrix shows as much of GPUs whose model is unknown.
    rows = (" ".join("X" if n == one else "SYS" for n in range(8)) for one in range(8))
    found = lint_host(host_of(matrix(*rows) + NAMES))
    assert [finding.element for finding in found] == [f"gpu/{n}" for n in range(8)]
    assert "fabric manager first" in found[7].remedy
    both = matrix("X NV18", "NV18 X") + status_of((SXM, 18), (SXM, DOWN))
    assert [link.source for link in host_of(both).links] == ["gpu/0"]
    sound = host_of(status_of(*[(SXM, 18)] * 8))
    assert not compare_hosts(sound, host).is_equal
    (odd, *_) = lint_fleet([sound, sound, host._replace(name="odd")])
    assert (odd.rule, odd.element) == ("node-nvlinks-differ", "odd")
    # One that shows nothing of NVLinks has not lost them.
    silent = host_of(f"{ALONE}\n{LEGEND}")
    assert not [f for f in lint_fleet([sound, sound, silent]) if "nvlinks" in f.rule]


LOST = """\
04:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev ff) (prog-if ff)
\t!!! Unknown header type 7f
05:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
"""
LOST_IDS = LOST.replace("controller:", "controller [0302]:").replace(
    "] (", "] [10de:2330] ("
)


def xgmi(lost: set[int]) -> str:
    """Return rocm-smi's table of eight GPUs, of which a pair has no link."""
    names = [f"GPU{n}" for n in range(8)]
    lines = ["======= Link Type between two GPUs =======", "  ".join(["", *names])]
    for one in range(8):
        words = ["PCIE" if {one, n} == lost else "XGMI" for n in range(8)]
        words[one] = "0"
        lines.append("  ".join([names[one], *words]))
    return "\n".join(lines) + "\n"


def adapters(kinds: str) -> str:
    """Return a matrix of four GPUs and adapters, and how near the first adapter is."""
    columns = [f"{name}{n}" for name in ("GPU", "NIC") for n in range(4)]
    rows = [["", *columns, "CPU Affinity", "NUMA Affinity"]]
    for one, kind in enumerate(kinds.split()):
        links = ["X" if n == one else "NV18" for n in range(4)]
        near = ["PIX" if n == one else "SYS" for n in (1, 2, 3)]
        node = one // 2
        rows.append([f"GPU{one}", *links, kind, *near, f"{node}", f"{node}"])
    return "\n".join(map("\t".join, rows)) + "\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOST, {"device-lost": "error 0000:04:00.0"}),
        (LOST_IDS, {"device-lost": "error 0000:04:00.0"}),
        (xgmi(set()), {}),
        (xgmi({2, 5}), {"uneven-nvlinks": "error gpu/5"}),
        (adapters("PIX SYS SYS SYS"), {}),
        (adapters("SYS PIX SYS SYS"), {"nic-behind-processor": "warning gpu/0"}),
        (adapters("SYS SYS NODE NODE"), {"nic-behind-processor": "warning gpu/0"}),
    ],
)
def test_one_that_is_unlike_the_others_is_found(text, expected):
    host = host_of(text)
    found = {f.rule: f"{f.severity} {f.element}" for f in lint_host(host)}
    assert found == expected
    if "device-lost" in found:
        assert "does not answer" in draw_tree(Topology((host,)))


@pytest.mark.parametrize(
    ("text", "level", "counts"),
    [
        (matrix("X CNS CNS", "CNS X CNS", "CNS CNS X"), "warning", ["CNS for 2"] * 3),
        (matrix("X OK TNS", "OK X OK", "TNS OK X"), "warning", ["TNS for 1"] * 2),
        (matrix("X NS", "NS X"), "note", ["NS for 1"] * 2),
        (matrix("X U", "U X"), "", []),
    ],
)
def test_each_of_a_pair_without_access_is_counted(text, level, counts):
    found = [f for f in lint_host(host_of(text)) if f.rule == "no-peer-access"]
    assert [f.seen[f.seen.index("(") + 1 : -2] for f in found] == counts
    assert {str(finding.severity) for finding in found} <= {level}


def test_a_gpu_with_fewer_links_is_found_in_a_matrix():
    assert found_in(B200.read_text()) == {}
    assert found_in(with_fewer_links(5)) == {"uneven-nvlinks": "gpu/5"}


def test_a_gpu_with_inactive_links_is_found_in_their_list():
    good = status_of(*[(SXM, 18)] * 4)
    assert found_in(good) == {}
    bad = re.sub(r"(GPU 2:.*\n(?:.*\n){7})(?:.*\n){11}", r"\1", good)
    lost = "\n".join(f"\t Link {n}: <inactive>" for n in range(7, 18))
    (finding,) = lint_host(host_of(bad.replace("GPU 3", f"{lost}\nGPU 3")))
    assert (finding.rule, finding.element) == ("uneven-nvlinks", "gpu/2")
    assert finding.severity is ERROR
    assert "7 NVLinks are up, and other GPUs of this host have 18" in finding.seen


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
@pytest.mark.parametrize("path", [B200, H100], ids=lambda path: path.name)
def test_other_encodings_read_the_same(path, encoding, tmp_path):
    text = path.read_text()
    data = text.encode(encoding)
    data = b"\xfe\xff" + data if encoding == "utf-16-be" else data
    (tmp_path / "saved").write_bytes(data)
    (host,) = read_file(read_saved(str(tmp_path / "saved"))).hosts
    assert host.gpus == host_of(text).gpus
    assert host.links == host_of(text).links


def test_packed_files_are_read_and_cut_ones_are_refused(tmp_path):
    packed = tmp_path / "topo.xml.gz"
    packed.write_bytes(gzip.compress(H100.read_bytes()))
    (host,) = read_file(read_saved(str(packed))).hosts
    assert len(host.gpus) == 8
    packed.write_bytes(packed.read_bytes()[:-50])
    with pytest.raises(UsageError, match="cannot unpack"):
        read_saved(str(packed))


def test_an_empty_file_has_its_own_sentence(tmp_path, capsys):
    (tmp_path / "topo.xml").write_text(" \n")
    said = refusal(capsys, "topo", str(tmp_path / "topo.xml"))
    assert "topo.xml is empty" in said


def test_a_processor_without_numaid_is_an_error():
    text = re.sub(' numaid="[0-9]+"', "", P4DE.read_text())
    found = {f.rule: f for f in lint_host(host_of(text))}
    assert found["refused-by-nccl"].severity is ERROR
    assert found["refused-by-nccl"].seen.count("cpu has no numaid") == 2


def test_what_clouds_leave_out_is_no_fault():
    assert found_in(re.sub(' affinity="[^"]*"', "", P4DE.read_text())) == {}
    no_lanes = H100.read_text().replace('link_width="16"', 'link_width="0"')
    assert found_in(no_lanes) == {}


def plan(text: str, num_ranks: int) -> HostPlan:
    return plan_host(host_of(text), AlignmentRequest(num_ranks))


def gpus_of(placed: HostPlan) -> list[int]:
    return [gpu for rank in placed.ranks for gpu in rank.gpus]


def test_a_lost_gpu_leaves_its_number_free():
    text = PERLMUTTER_XML.read_text()
    for old, new in ((3, 4), (2, 3)):
        text = text.replace(f'<gpu dev="{old}"', f'<gpu dev="{new}"')
    placed = plan(text, 4)
    assert gpus_of(placed) == [0, 1, 3, 4]
    assert placed.env["CUDA_VISIBLE_DEVICES"] == "0,1,3,4"


PAIRS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tCPU Affinity\tNUMA Affinity
GPU0\tX\tSYS\tSYS\tNV4\tSYS\tSYS\t0-31\t0
GPU1\tSYS\tX\tSYS\tSYS\tSYS\tSYS\t0-31\t0
GPU2\tSYS\tSYS\tX\tSYS\tNV4\tSYS\t0-31\t0
GPU3\tNV4\tSYS\tSYS\tX\tSYS\tSYS\t0-31\t0
GPU4\tSYS\tSYS\tNV4\tSYS\tX\tSYS\t0-31\t0
GPU5\tSYS\tSYS\tSYS\tSYS\tSYS\tX\t0-31\t0
"""
MODELS = "".join(f"GPU {n}: NVIDIA A100 80GB PCIe (UUID: GPU-{n})\n" for n in range(6))


def test_fewer_ranks_than_gpus_get_those_that_nvlink_joins():
    assert gpus_of(plan(PAIRS + MODELS, 2)) == [0, 3]
    rows = PAIRS.split("\n")
    rows[1], rows[4] = (row.replace("NV4", "SYS") for row in (rows[1], rows[4]))
    assert gpus_of(plan("\n".join(rows) + MODELS, 2)) == [2, 4]
    assert gpus_of(plan(PAIRS + MODELS, 6)) == list(range(6))
    assert gpus_of(plan(PERLMUTTER.read_text(), 2)) == [0, 1]


def test_interfaces_of_containers_are_no_adapters():
    """One real port of Ethernet is left, and virtual ones of its rate near the GPUs."""
    text = PERLMUTTER_XML.read_text()
    text = re.sub('(<net name="cxi[1-3]"[^>]*)net="1"', r'\1net="0"', text)
    text = text.replace('speed="200000" port="1"', 'speed="10000" port="0"')
    virtual = "".join(
        f'<nic><net name="{name}" dev="{9 + n}" speed="10000" port="0" guid="0x0" '
        'maxconn="65536" gdr="0"/></nic>'
        for n, name in enumerate(("cali3e", "tunl0", "br-12ab", "bond7"))
    )
    head, cpu, rest = text.partition("<cpu ")
    inside = rest.replace(">", f">{virtual}", 1)
    ports = {
        nic.name for rank in plan(head + cpu + inside, 4).ranks for nic in rank.nics
    }
    assert ports == {"cxi0"}
