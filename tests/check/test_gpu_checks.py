"""Checks of GPUs find faults, and find nothing on healthy hosts."""

import pytest
from tests.check.fleets import of_family
from tests.check.nvml_fake import GIB, SavedNvml, asking, healthy, refusal

from ronde.check import (
    FactReader,
    Family,
    Fleet,
    HostFacts,
    Severity,
    judge,
    store_answers,
)

NOT_SUPPORTED, LOST = 3, 15
FAIL, WARN, INFORM = Severity.FAIL, Severity.WARN, Severity.INFORM
UNSUPPORTED = (
    "ecc_errors",
    "remapped_rows",
    "recovery_action",
    "fabric",
    "margin_celsius",
    "mig",
    "has_valid_inforom",
)
CARD = {"address": "0000:1b:00.0", "driver": "nvidia"}


CHECKS = of_family(Family.GPU)


def kernel_facts(num_gpus):
    """Return the kernel's facts of a healthy host."""
    names = [f"nvidia{n}" for n in range(num_gpus)] + ["nvidiactl", "nvidia-uvm"]
    return {
        "gpu.cards": [CARD] * num_gpus,
        "gpu.kernel_module": "550.54.15",
        "gpu.files": {f"/dev/{name}": "" for name in names},
        "gpu.nvml_error": "",
        "gpu.xids": [],
        "gpu.direct_rdma": {"adapters": 1, "way": "nvidia_peermem"},
        "gpu.acs": [],
        "gpu.is_virtual": False,
        "versions.torch_build": "CUDA 12.4",
    }


def host(name="a", num_gpus=8, facts=(), record=None, **changes):
    """Return the facts of a host whose last GPU has other answers."""
    reading = FactReader({})
    nvml = SavedNvml(record or healthy(num_gpus, **changes))
    store_answers(reading, nvml, asking(nvml))
    values = kernel_facts(num_gpus) | reading.values | dict(facts)
    return HostFacts(name, values, reading.unreadable, {})


def find(*hosts, **settings):
    return judge(Fleet(hosts, settings), CHECKS).findings


def only(findings, check):
    """Return the one finding there is, which is of this check."""
    assert [each.check for each in findings] == [check], findings
    return findings[0]


# Silence


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_nothing_is_wrong_with_healthy_hosts(num_hosts, num_gpus):
    hosts = [host(f"h{n}", num_gpus) for n in range(num_hosts)]
    judgement = judge(Fleet(tuple(hosts), {"num_ranks": num_gpus}), CHECKS)
    assert judgement.findings == ()
    assert judgement.unread == ()


def test_nothing_is_wrong_with_a_host_without_gpus():
    bare = {"gpu.cards": [], "gpu.kernel_module": "", "gpu.files": {}}
    values = bare | {"gpu.nvml_error": "", "gpu.count": 0}
    plain = HostFacts("a", values | {"versions.torch_build": "CPU"}, {}, {})
    judgement = judge(Fleet((plain,), {"num_ranks": 4}), CHECKS)
    assert judgement.findings == ()
    assert judgement.unread == ()


def test_nothing_is_wrong_with_a_card_that_supports_little():
    answers = dict.fromkeys(UNSUPPORTED, refusal(NOT_SUPPORTED))
    desktop = {"titles": "NVIDIA GeForce RTX 3060", "nvlinks": [], "vbios": "94.06"}
    judgement = judge(Fleet((host(num_gpus=1, **answers, **desktop),), {}), CHECKS)
    assert judgement.findings == ()
    assert judgement.unread == ()


# One GPU


ROWS = {"corrected": 0, "uncorrected": 0, "is_pending": False, "has_failed": False}
ECC = {
    "sram_uncorrected": 0,
    "sram_uncorrected_ever": 0,
    "sram_corrected": 0,
    "dram_corrected": 0,
}
FABRIC = healthy(1)["gpus"][0]["fabric"]
PCIE = {"width": 16, "max_width": 16, "generation": 1, "max_generation": 5}
TRAINER = {"pid": 4242, "memory_bytes": GIB, "command": "python"}
MPS = {"pid": 4243, "memory_bytes": GIB, "command": "nvidia-cuda-mps-server"}


@pytest.mark.parametrize(
    ("question", "answer", "check", "severity", "what"),
    [
        ("recovery_action", 1, "gpu-advice", FAIL, "reset of the GPU"),
        ("recovery_action", 99, "gpu-advice", FAIL, "action 99"),
        ("remapped_rows", ROWS | {"has_failed": True}, "gpu-rows", FAIL, "not be re"),
        ("remapped_rows", ROWS | {"is_pending": True}, "gpu-rows", FAIL, "waits"),
        ("remapped_rows", ROWS | {"uncorrected": 513}, "gpu-rows", FAIL, "513 rows"),
        ("ecc_errors", ECC | {"sram_uncorrected": 1}, "gpu-ecc-errors", FAIL, "1 unc"),
        ("ecc_errors", ECC | {"sram_corrected": 10001}, "gpu-ecc-errors", FAIL, "cac"),
        (
            "ecc_errors",
            ECC | {"dram_corrected": 20_000_001},
            "gpu-ecc-errors",
            FAIL,
            "",
        ),
        ("clock_events", 0x48, "gpu-clocks", FAIL, "too hot"),
        ("clock_events", 0x08, "gpu-clocks", WARN, "halved"),
        ("clock_events", 0x21, "gpu-clocks", WARN, "hot"),
        ("margin_celsius", 4, "gpu-temperature", WARN, "4 degrees"),
        ("has_valid_inforom", False, "gpu-firmware", FAIL, "InfoROM"),
        ("vbios", "96.00.74.00.02", "gpu-firmware", WARN, "VBIOS 96.00.74.00.02"),
        ("memory_bytes", {"total": 40 * GIB, "used": 0}, "gpu-model", WARN, "40 "),
        ("pcie", PCIE | {"width": 8}, "gpu-pcie", FAIL, "8 lanes of 16"),
        ("pcie", PCIE | {"max_generation": 4}, "gpu-pcie", WARN, "generation 4"),
        ("fabric", FABRIC | {"state": 1}, "gpu-fabric", FAIL, "has not begun"),
        ("fabric", FABRIC | {"status": 999}, "gpu-fabric", FAIL, "error 999"),
        # Two bits each from bit 0: bandwidth, route recovery, route; 1 is yes, 2 is no.
        ("fabric", FABRIC | {"health": 0b101001}, "gpu-fabric", WARN, "less bandwidth"),
        ("fabric", FABRIC | {"health": 0b011010}, "gpu-fabric", FAIL, "route"),
        ("fabric", FABRIC | {"health": 5 << 8}, "gpu-fabric", FAIL, "number 5"),
        ("fabric", FABRIC | {"summary": 2}, "gpu-fabric", FAIL, "unhealthy"),
        ("mig", True, "gpu-mig", FAIL, "MIG"),
        ("busy_percent", 20, "gpu-busy", WARN, "20 %"),
        ("memory_bytes", {"total": 80 * GIB, "used": 2 * GIB}, "gpu-busy", FAIL, "2.0"),
        ("processes", [TRAINER], "gpu-busy", FAIL, "4242"),
    ],
)
def test_a_faulty_gpu_is_named(question, answer, check, severity, what):
    finding = only(find(host(**{question: answer})), check)
    assert finding.severity is severity
    assert finding.message.startswith("GPU 7: ")
    assert what in finding.message


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("remapped_rows", ROWS | {"corrected": 9, "uncorrected": 512}),
        ("ecc_errors", ECC | {"sram_corrected": 10_000, "dram_corrected": 20_000_000}),
        ("ecc_errors", ECC | {"sram_uncorrected_ever": 4}),
        # Idle, application clocks, power cap.
        ("clock_events", 0x07),
        ("margin_celsius", 5),
        # H100 and older GPUs have these for no reading.
        ("margin_celsius", 0),
        ("margin_celsius", -3),
        ("fabric", FABRIC | {"state": 0, "health": 0x555}),
        ("fabric", FABRIC | {"health": 0b10101010 | 1 << 8}),
        ("busy_percent", 19),
        ("memory_bytes", {"total": 80 * GIB, "used": 2 * GIB - 1}),
        ("pcie", PCIE | {"generation": 5}),
    ],
)
def test_values_within_the_threshold_are_not_reported(question, answer):
    assert find(host(**{question: answer})) == ()


def test_a_lost_gpu_is_reported_once():
    record = healthy(8)
    record["gpus"][3] = dict.fromkeys(record["gpus"][3], refusal(LOST, "GPU is lost"))
    finding = only(find(host(record=record)), "gpu-lost")
    assert (finding.severity, finding.message) == (FAIL, "GPU 3: GPU is lost")


def test_the_mps_server_does_not_make_a_gpu_busy():
    values = {"gpu.processes": [[]] * 7 + [[MPS]]}
    assert find(host(facts=values)) == ()


def test_a_host_with_one_gpu_gets_one_rank_unless_more_are_asked_for():
    one = host(num_gpus=1, mig=True)
    assert only(find(one), "gpu-mig").severity is INFORM
    assert only(find(one, host("b", 1)), "gpu-mig").severity is FAIL
    assert {f.check: f.severity for f in find(one, num_ranks=2)}["gpu-mig"] is FAIL


# Links


@pytest.mark.parametrize(
    ("links", "what"),
    [
        ([True] * 17 + [False], "17 of 18 NVLinks are active, not 17"),
        ([False] * 18, "0 of 18 NVLinks are active, not 0-17"),
        ([], "0 of 18 NVLinks are active"),
    ],
)
def test_inactive_nvlinks_are_counted(links, what):
    found = find(host(nvlinks=links))
    assert {each.check for each in found} <= {"gpu-nvlink"}
    assert f"GPU 7: {what}" in [each.message for each in found]


@pytest.mark.parametrize(
    ("title", "num_links"),
    [
        ("A100-SXM4-80GB", 12),
        ("A800-SXM4-80GB", 8),
        ("H800", 8),
        *((name, 18) for name in ("H100 80GB HBM3", "H200", "H20", "B200", "GB200")),
        *((name, 18) for name in ("B300 SXM6 AC", "GB300", "GH200 480GB", "H20-3e")),
        *((name, 0) for name in ("H200 NVL", "H100 NVL", "H800 PCIe", "A100 PCIe")),
    ],
)
def test_models_have_their_number_of_nvlinks(title, num_links):
    links = [True] * max(1, num_links)
    for each, is_reported in ((links, False), ([*links[1:], False], bool(num_links))):
        record = healthy(4)
        for gpu in record["gpus"]:
            gpu |= {"titles": f"NVIDIA {title}", "nvlinks": each}
        # One link at least is active on a host whose links are judged.
        record["gpus"][0]["nvlinks"] = links
        what = f"{num_links - 1} of {num_links} NVLinks are active"
        reported = [f.message for f in find(host(num_gpus=4, record=record))]
        assert [what in text for text in reported] == [True] * is_reported


def test_a_host_without_any_nvlinks_is_a_virtual_machine():
    record = healthy(2)
    for gpu in record["gpus"]:
        gpu["nvlinks"] = [False] * 18
    assert find(host(num_gpus=2, record=record)) == ()


def test_of_an_unknown_model_the_gpu_with_fewer_links_is_odd():
    record = healthy(4, nvlinks=[True] * 3 + [False])
    for gpu in record["gpus"]:
        gpu["titles"] = "NVIDIA A800"
    for gpu in record["gpus"][:3]:
        gpu["nvlinks"] = [True] * 4
    finding = only(find(host(num_gpus=4, record=record)), "gpu-nvlink")
    assert finding.message == "GPU 3: 3 active NVLinks"
    assert finding.usual.startswith("4 active NVLinks")


@pytest.mark.parametrize("is_virtual", [True, False])
def test_equally_narrow_links_are_notes(is_virtual):
    facts = {"gpu.is_virtual": is_virtual}
    alone, odd = (
        host(num_gpus=num, facts=facts, pcie=PCIE | {"width": 8}) for num in (1, 2)
    )
    assert only(find(alone), "gpu-pcie").severity is INFORM
    found = only(find(odd), "gpu-pcie")
    assert found.severity is (WARN if is_virtual else FAIL)
    assert ("reseat" in found.fix) is not is_virtual


def test_gpudirect_rdma_matters_between_hosts():
    facts = {"gpu.direct_rdma": {"adapters": 2, "way": ""}}
    assert find(host(facts=facts)) == ()
    finding = only(find(host(facts=facts), host("b")), "gpu-direct-rdma")
    assert (finding.severity, finding.host) == (FAIL, "a")


def test_acs_is_reported_if_devices_have_peers():
    facts = {"gpu.acs": ["0000:19:01.0"]}
    finding = only(find(host(facts=facts)), "gpu-acs")
    assert "0000:19:01.0" in finding.fix
    alone = facts | {"gpu.direct_rdma": {"adapters": 0, "way": ""}}
    assert find(host(num_gpus=1, facts=alone)) == ()


# The host


def bare(**facts):
    """Return a host without answers from NVML."""
    values = kernel_facts(1) | {f"gpu.{name}": value for name, value in facts.items()}
    return HostFacts("a", values, {}, {})


@pytest.mark.parametrize(
    ("facts", "severity", "message", "fix"),
    [
        ({"nvml_error": "version mismatch"}, FAIL, "NVML does not answer: version mism",
         "reboot"),
        ({"files": {}}, FAIL, "the driver is loaded, but there is no file /dev/nvidia0",
         "docker run --gpus all"),
        ({"files": {}, "kernel_module": "", "count": 0,
          "cards": [CARD | {"driver": "nouveau"}, CARD | {"driver": ""}]}, WARN,
         "2 NVIDIA cards without NVIDIA's driver: they have no driver, nouveau", ""),
    ],
)  # fmt: skip
def test_a_driver_that_does_not_answer_is_reported(facts, severity, message, fix):
    finding = only(find(bare(**facts)), "gpu-answers")
    assert finding.severity is severity
    assert finding.message.startswith(message)
    assert fix in finding.fix


def test_device_files_of_other_jobs_gpus_do_not_matter():
    files = {f"/dev/nvidia{n}": "Operation not permitted" for n in range(7)}
    mine = {"/dev/nvidia7": "", "/dev/nvidiactl": ""}
    assert find(host(num_gpus=1, facts={"gpu.files": files | mine})) == ()
    found = find(host(num_gpus=1, facts={"gpu.files": files | {"/dev/nvidiactl": ""}}))
    assert only(found, "gpu-files").severity is FAIL


def test_a_gpu_that_the_driver_could_not_start_is_reported_though_others_work():
    files = {f"/dev/nvidia{n}": "" for n in range(8)} | {"/dev/nvidiactl": ""}
    files["/dev/nvidia3"] = "Input/output error"
    finding = only(find(host(num_gpus=7, facts={"gpu.files": files})), "gpu-files")
    assert finding.message == "cannot open /dev/nvidia3 (Input/output error)"
    assert "reboot" in finding.fix


def test_a_gpu_unknown_to_nvml_is_missing():
    facts = {"gpu.files": kernel_facts(8)["gpu.files"]}
    finding = only(find(host(num_gpus=7, facts=facts)), "gpu-lost")
    assert finding.message == "NVML knows 7 GPUs, but 8 have device files"


def test_a_host_with_fewer_gpus_is_odd():
    finding = only(find(host("a"), host("b", 7), host("c")), "gpu-count")
    assert (finding.host, finding.usual) == ("b", "8 on 2 hosts")


def test_another_model_is_a_warning():
    record = healthy(1, titles="NVIDIA A100-SXM4-80GB", nvlinks=[True] * 12)
    other = host("c", 1, record=record)
    finding = only(find(host("a", 1), host("b", 1), other), "gpu-model")
    assert (finding.host, finding.severity) == ("c", WARN)


# The log

UNADVISED = {"gpu.recovery_action": [None] * 8}


def xid(code, **changes):
    entry = {"kind": "Xid", "address": "0000:1b:00.0", "code": code, "times": 1}
    return entry | {"age_s": 600.0, "is_fatal": False} | changes


@pytest.mark.parametrize(
    ("entry", "severity"),
    [
        (xid(79), FAIL),
        (xid(48), FAIL),
        (xid(94), INFORM),
        *((xid(code), FAIL) for code in (46, 74, 95, 109, 151, 158, 167, 171)),
        (xid(150, is_fatal=True), FAIL),
        (xid(150), INFORM),
        (xid(78), WARN),
        (xid(999), INFORM),
        (xid(20034, kind="SXid", is_fatal=True), FAIL),
        (xid(20034, kind="SXid"), INFORM),
        # A number of the switches is not the GPUs' of the same number.
        (xid(79, kind="SXid"), INFORM),
    ],
)
def test_errors_in_the_log_are_judged_by_their_number(entry, severity):
    finding = only(find(host(facts={"gpu.xids": [entry]} | UNADVISED)), "gpu-xid")
    assert finding.severity is severity
    assert "at 0000:1b:00.0 10m ago" in finding.message


def test_errors_since_the_start_are_reported_with_their_age():
    entry = xid(95, age_s=30 * 3600.0, times=3)
    finding = only(find(host(facts={"gpu.xids": [entry]} | UNADVISED)), "gpu-xid")
    assert finding.message == (
        "Xid 95 (memory error, not contained) at 0000:1b:00.0, 3 times, last 30h ago"
    )
    assert "--gpu-reset" in finding.fix


@pytest.mark.parametrize(("action", "severity"), [(0, WARN), (1, FAIL), (None, FAIL)])
def test_an_error_before_a_reset_is_a_warning(action, severity):
    """The driver takes its advice back when the GPU was reset."""
    facts = {
        "gpu.xids": [xid(95)],
        "gpu.bus_ids": ["0000:1a:00.0", "0000:1b:00.0"],
        "gpu.recovery_action": [1, action],
    }
    found = find(host(facts=facts))
    (finding,) = (each for each in found if each.check == "gpu-xid")
    assert finding.severity is severity
    assert ("advises no action" in finding.message) == (severity is WARN)


# Software


@pytest.mark.parametrize(
    ("build", "cuda", "check", "severity"),
    [
        ("CPU", [12, 4], "gpu-torch", FAIL),
        ("CUDA 12.8", [12, 4], "gpu-cuda", WARN),
        ("CUDA 13.0", [12, 9], "gpu-cuda", FAIL),
    ],
)
def test_torch_and_the_driver_must_fit(build, cuda, check, severity):
    facts = {"versions.torch_build": build, "gpu.cuda_version": cuda}
    assert only(find(host(facts=facts)), check).severity is severity
