"""``ronde check read``: output of other programs, saved into files, is judged."""

import json
import re
from pathlib import Path

import pytest
from tests.topology.hostile import bad_inputs, check_harmless

from ronde.check import read_saved_facts
from ronde.cli import main
from ronde.topology import Saved

HERE = Path(__file__).parent
GPU = (HERE / "nvidia-smi-query.txt").read_text()
XML = (HERE / "nvidia-smi-gpu.xml").read_text()
BUSES = ("18", "2A", "3A", "5D", "9A", "AB", "BA", "DB")


def query(*changes: str, version: str = "570.133.20") -> str:
    """Return nvidia-smi -q of eight GPUs; changes such as ``Max: 5 > 4`` of the fourth.

    The last line counts that has the name and the value.
    """
    gpus = [GPU.replace("{bus}", bus) for bus in BUSES]
    for change in changes:
        name, old, new = re.split(": | > ", change)
        *_, line = re.finditer(rf"{name} +: {old}", gpus[3])
        gpus[3] = f"{gpus[3][: line.start()]}{name} : {new}{gpus[3][line.end() :]}"
    head = f"==============NVSMI LOG==============\n\nDriver Version : {version}\n"
    return f"{head}Attached GPUs                    : 8\n" + "\n".join(gpus)


@pytest.fixture
def judged(tmp_path, capsys, monkeypatch):
    """Judge texts in files ``a``, ``b``, ...; return the exit code and the output."""
    monkeypatch.chdir(tmp_path)

    def judge(*texts: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
        names = [chr(ord("a") + n) for n in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            Path(name).write_text(text)
        code = main(["check", "read", *names, *options])
        shown = capsys.readouterr()
        # Without the line breaks of a narrow terminal.
        return code, re.sub("\n {6,}", " ", shown.out + shown.err)

    return judge


def test_healthy_gpus_have_no_findings(judged):
    assert judged(query()) == (0, "a: nothing found in nvidia-smi -q of 8 GPUs\n")


FAULTS = """
2 x gpu-rows: a broken row of its memory waits to be replaced | Pending: No > Yes
2 x gpu-rows: a broken row of its memory could not be repl | Occurred: No > Yes
2 x gpu-ecc-errors: 9 uncorrectable errors in its caches | SEC-DED: 0 > 9
2 x logged-errors: 2 uncorrectable errors in its memory | DRAM Uncorrectable: 0 > 2
2 x logged-errors: a repair of its memory waits for a reset | Blacklist: N/A > Yes
2 x logged-errors: the driver asks for a reset | Reset Required: Requested.* > Yes
2 x logged-errors: its caches (SRAM) had more errors | Exceeded: No > Yes
0 ! logged-errors: it is above its temperature limit | T.Limit Temp: 44 C > -1 C
0 ! logged-errors: its power limit is 350.00 W, but 700.00 | Limit: 700.00 W > 350.00 W
0 ! logged-errors: its ECC is Disabled, but Enabled | Current +: Enabled > Disabled
0 i logged-errors: its model is NVIDIA A40, but NVIDIA | Name: NVIDIA H200 > NVIDIA A40
0 ! gpu-fabric: the fabric has less bandwidth than it | Bandwidth: Full > Degraded
2 x logged-errors: its memory cannot be repaired | Unrepairable Memory: No > Yes
2 x logged-errors: 60 or more pages of its memory | Single Bit ECC: N/A > 64
2 x gpu-fabric: its registration with the fabric ended in error T | Status: Success > T
2 x gpu-pcie: its PCI link has 8 lanes of 16 | Current: 16x > 8x
2 x gpu-clocks: it is too hot (hardware | HW Thermal Slowdown: Not Active > Active
2 x gpu-advice: the driver advises a reboot of the host | Action: None > Reboot
2 x logged-errors: the driver advises: Bus Reset | Action: None > Bus Reset
2 x gpu-lost: GPU is lost | Product Name: NVIDIA H200 > GPU is lost
2 x gpu-lost: GPU requires reset | Current Temp: 41 C > [GPU requires reset]
2 x logged-errors: no program may compute on it | Compute Mode: Default > Prohibited
0 ! logged-errors: only one program may use it | Mode: Default > Exclusive_Process
0 ! logged-errors: ecc_mode changes from Enabled | Pending: Enabled > Disabled
0 i logged-errors: split into instances (MIG) | Current +: Disabled > Enabled
0 i logged-errors: persistence mode is off | Persistence Mode: Enabled > Disabled
"""


@pytest.mark.parametrize("row", FAULTS.strip().splitlines())
def test_one_gpu_of_eight(judged, row):
    found, change = row.split(" | ")
    code, mark, check, what = found.split(" ", 3)
    has, shown = judged(query(change))
    assert f"\n{mark} {check} a\n    GPU 3: {what}" in shown
    assert has == int(code)


def test_a_fix_names_the_gpu(judged):
    shown = judged(query("Compute Mode: Default > Prohibited"))[1]
    assert "    fix: sudo nvidia-smi -i 3 -c DEFAULT\n" in shown
    shown = judged(query("Limit: 700.00 W > 350.00 W"))[1]
    assert "    fix: sudo nvidia-smi -i 3 -pl 700.00\n" in shown


def test_gpus_with_the_same_fault_share_a_finding_and_its_fix(judged):
    text = re.sub("Channel Repair Pending +: No", r"\g<0>t", query())
    text = re.sub("(Channel Repair Pending +): Not", r"\1: Yes", text, count=2)
    code, shown = judged(text)
    assert code == 2
    assert "GPUs 0, 1: a repair of its memory waits for a reset" in shown
    assert "--gpu-reset -i 0,1\n" in shown


def test_a_single_section_is_checked(judged):
    """As nvidia-smi -q -d prints it, and with the ends of lines of Windows."""
    section = "\n".join(
        f"GPU 0000000{n}:00:00.0\n    Retired Pages\n"
        f"        Single Bit ECC                    : {n}\n"
        f"        Pending Page Blacklist            : {'Yes' if n == 2 else 'No'}\n"
        for n in range(1, 4)
    )
    text = f"\n==============NVSMI LOG==============\n\n{section}"
    for lines in (text, text.replace("\n", "\r\n")):
        code, shown = judged(lines)
        assert (code, shown.splitlines()[0]) == (
            2,
            "a: 1 finding in nvidia-smi -q of 3 GPUs",
        )
        assert "GPU 1: a repair of its memory waits" in shown


def test_xml_is_read_like_text(judged):
    gpu = XML.format(bus="1B", title="NVIDIA H100", width=8, hot="Active")
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "v13.dtd">\n'
    code, shown = judged(f"{head}<nvidia_smi_log>{gpu}</nvidia_smi_log>")
    assert code == 2
    assert shown.startswith("a: 4 findings in nvidia-smi -q of 1 GPU\n")
    # Whether it is a virtual machine is not in the file.
    for check in ("x gpu-rows", "x gpu-ecc-errors", "x gpu-clocks", "i gpu-pcie"):
        assert f"{check}: a\n    GPU 0: " in shown


@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("GPU 00000000:DB", "! logged-errors: a\n    the file shows 7 of 8 GPUs\n"),
        ("GPU 00000000:2A", "i logged-errors: a\n    the file shows 1 of 8 GPUs\n"),
        ("    Remapped Rows", "! logged-errors: a\n    GPU 7 lacks its last sections"),
    ],
)
def test_a_cut_file_is_reported(judged, end, found):
    assert found in judged(query().rpartition(end)[0])[1]


NO_GPUS = """
the GPU: 0000:3A:00.0|Unable to determine the device handle for GPU 0000:3A:00.0: GPU is
the driver|No devices were found
InfoROM is damaged: 0000:5D:00.0|WARNING: infoROM is corrupted at gpu 0000:5D:00.0
the driver|NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.
the driver|Failed to initialize NVML: Driver/library version mismatch
"""


@pytest.mark.parametrize("row", NO_GPUS.strip().splitlines())
def test_errors_of_nvidia_smi(judged, row):
    what, line = row.split("|")
    code, shown = judged(f"{line}\n")
    assert shown.startswith("a: 1 finding in 1 line\n")
    assert "x logged-errors: a\n" in shown
    assert f" {what} in line 1\n" in shown
    assert code == 2


def test_files_are_compared_like_hosts(judged):
    fewer = query(version="570.86.15").partition("GPU 00000000:DB")[0]
    code, shown = judged(query(), query(), fewer)
    assert code == 2
    assert "x gpu-count: c\n    number of GPUs 7, but 8 on 2 hosts" in shown
    assert "! gpu-driver: c\n    GPU driver NVIDIA 570.86.15, but" in shown
    assert judged(query(), query())[0] == 0


STAMPS = {
    "dmesg": "[ 8123.004711] ",
    "dmesg -T": "[Thu Nov 26 04:11:09 2026] ",
    "dmesg -H": "[Nov26 04:11] ",
    "dmesg -x": "kern  :warn  : [ 8123.004711] ",
    "dmesg --time-format iso": "2026-11-26T04:11:09,004711+00:00 ",
    "journalctl -k": "Nov 26 04:11:09 gn17 kernel: ",
    "journalctl -k -o short-iso": "2026-11-26T04:11:09+0000 gn17 kernel: ",
    "journalctl -k -o short-monotonic": "[ 8123.004711] gn17 kernel: ",
    "kern.log": "Nov 26 04:11:09 gn17 kernel: [ 8123.004711] ",
    "rsyslog": "2026-11-26T04:11:09.004711+00:00 gn17 kernel: [ 8123.004711] ",
    "dmesg -r": "<4>[  201.650118] ",
    "journalctl -o cat, grep -h": "kernel: ",
    "/dev/kmsg": "4,1711,8123004711,-;",
    "pdsh": "gn17: [ 8123.004711] ",
}
SOUND = """\
Linux version 6.8.0-60-generic (buildd@host) (gcc 13.3.0) #63-Ubuntu SMP
NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build
mlx5_core 0000:29:00.0 ens41np0: Link down
mlx5_core 0000:29:00.0 ens41np0: Link up
pcieport 0000:14:01.0: AER: enabled with IRQ 35
mlx5_core 0000:29:00.0: Port module event: module 0, Cable plugged
"""

SOUGHT = "errors of GPUs, adapters, links, PCI, memory, processors and file servers"
NOTHING = f"a: nothing found in 6 kernel lines (searched for {SOUGHT})\n"


def log(text: str, stamp: str = STAMPS["dmesg"]) -> str:
    return "".join(f"{stamp}{line}\n" for line in (SOUND + text).splitlines())


@pytest.mark.parametrize("stamp", STAMPS.values(), ids=STAMPS)
def test_every_form_of_a_kernel_log(judged, stamp):
    assert judged(log("", stamp)) == (0, NOTHING)
    fallen = "NVRM: Xid (PCI:0000:3a:00): 79, pid='<unknown>', name=<unknown>, GPU has "
    fallen += "fallen off the bus.\nNVRM: GPU 0000:3a:00.0: GPU has fallen off the bus."
    code, shown = judged(log(fallen, stamp))
    assert code == 2
    assert shown.startswith(
        "a: 1 finding in 8 kernel lines (searched for errors of GPUs,"
    )
    assert "Xid 79 (it has fallen off the bus) at 0000:3a:00.0 in line 7" in shown


def test_lines_of_other_programs_are_ignored(judged):
    text = log("", STAMPS["kern.log"])
    text += "Nov 26 04:12:00 gn17 agent[99]: NVRM: Xid (PCI:0000:3a:00): 79, seen\n"
    assert judged(text) == (0, NOTHING)


LOGGED = """
2 x logged-errors: fatal PCI errors (AER): 0000:3a:00.0 in line 7 (8123.004711)
  nvidia 0000:3a:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=x, (Receiver
0 i logged-errors: corrected PCI errors (AER): 0000:3a:00.0 in line 7
  nvidia 0000:3a:00.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Tr
2 x logged-errors: the adapter's firmware has failed: 0000:29:00.0 in line 7
  mlx5_core 0000:29:00.0: poll_health:801:(pid 0): device's health compromised
2 x logged-errors: NVIDIA's driver could not start: 0000:3a:00.0 in line 7
  NVRM: GPU 0000:3a:00.0: RmInitAdapter failed! (0x62:0x40:2192)
2 x logged-errors: a GPU has fallen off the bus: 0000:3a:00.0 in line 7
  NVRM: GPU at PCI:0000:3a:00.0 has fallen off the bus.
2 x logged-errors: a GPU has fallen off the bus: 0000:3a:00.0 in line 9
  NVRM: The NVIDIA GPU 0000:3a:00.0|NVRM: (PCI ID: 10de:2330)|NVRM: fallen off the bus
0 ! logged-errors: NVIDIA's driver could not start a GPU: 0000:3a:00.0, 2 times
  nvidia: probe of 0000:3a:00.0 failed with error -1|NVRM: The NVIDIA probe routine fail
2 x logged-errors: the driver has reset a GPU: 0000:3a:00.0 in line 7
  amdgpu 0000:3a:00.0: amdgpu: GPU reset begin!
2 x logged-errors: uncorrectable errors in a GPU's memory or caches: 0000:3a:00.0
  amdgpu 0000:3a:00.0: amdgpu: 1 uncorrectable hardware errors detected in umc block
0 ! logged-errors: an adapter reports a cable or transceiver error: High Temperature:
  mlx5_core 0000:29:00.0: Port module event[error]: module 0, High Temperature
0 ! logged-errors: 0000:29:00.0 lost its link 1 time and is down
  mlx5_core 0000:29:00.0: Port module event: module 0, Cable unplugged
0 ! logged-errors: an adapter is too hot: 0000:29:00.0 in line 7
  mlx5_core 0000:29:00.0: temp_warn:244:(pid 0): High temperature on sensors with bit
0 ! logged-errors: errors of the host's memory or processor in line 7
  mce: [Hardware Error]: CPU 7: Machine Check Exception: 5 Bank 9: be0000000005017a
0 ! logged-errors: errors of the host's memory or processor in line 7
  EDAC MC3: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#0_DIMM#0
0 ! logged-errors: a processor was stuck in line 7
  watchdog: BUG: soft lockup - CPU#31 stuck for 26s! [python3:7351]
0 ! logged-errors: a file server does not answer: store4 in line 7
  nfs: server store4 not responding, still trying
0 ! logged-errors: a program crashed in libnccl.so.2.27.3 in line 7
  python3[7351]: segfault at 10 ip 00007f3a sp 00007ffd error 4 in libnccl.so.2.27.3[7
2 x gpu-xid: Xid 154 (the driver advises a reset of the GPU) at 0000:3a:00.0 in line
  NVRM: Xid (PCI:0000:3a:00): 154, GPU recovery action changed from 0x0 () to 0x1 (R
0 i gpu-xid: Xid 63 (a row or page of memory will be replaced) at 0000:3a:00.0 in line
  NVRM: Xid (PCI:0000:3a:00): 63, pid=9, name=python, Row Remapper: New row (0x1) mark
0 i gpu-xid: Xid 45 (it follows from Xid 149) at 0000:3a:00.0 in line 7 (8123.004711)
  NVRM: Xid (PCI:0000:3a:00): 45, pid=9, Ch 8 caused by previous Xid 149
2 i gpu-xid: Xid 45 (it follows from Xid 48) at 0000:3a:00.0 in line 8 (8123.004711)
  NVRM: Xid (PCI:0000:3a:00): 48, DBE|NVRM: Xid (PCI:0000:3a:00): 45, Ch 8
0 i logged-errors: a program has reached its cgroup's limit of memory: job_8812 in
  oom-kill:oom_memcg=/uid_7/job_8812/x,task=py|Memory cgroup out of memory: Kill process
0 ! logged-errors: a file server does not answer: nas2 in line 8
  nfs: server nas1 not responding|nfs: server nas2 not responding|nfs: server nas1 OK
0 ! logged-errors: the kernel has killed programs for lack of memory: python3 in line 7
  Out of memory: Killed process 71 (python3) total-vm:9kB, anon-rss:8kB
2 x gpu-xid: SXid 20034 at 0000:c1:00.0 in line 7 (8123.004711)
  nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
0 ! logged-errors: 0000:29:00.0 ens41np0 lost its link 1 time and is down
  mlx5_core 0000:29:00.0 ens41np0: Link down
""".strip().splitlines()


@pytest.mark.parametrize(
    ("row", "line"), [*zip(LOGGED[::2], LOGGED[1::2], strict=True)]
)
def test_errors_in_a_kernel_log(judged, row, line):
    code, mark, check, what = row.split(" ", 3)
    has, shown = judged(log(line.strip().replace("|", "\n")))
    assert f"\n{mark} {check} a\n    {what}" in shown
    assert has == int(code)


def test_repeated_errors_are_one_finding(judged):
    error = "nvidia 0000:3a:00.0: PCIe Bus Error: severity=Corrected, type=x\n"
    shown = judged(log(error * 3))[1]
    assert "(AER): 0000:3a:00.0, 3 times, last in line 9 (8123.004711)\n" in shown
    assert "    fix: sudo lspci -vv -s 0000:3a:00.0; reseat the device" in shown


@pytest.mark.parametrize(
    ("port", "down", "up"),
    [("ens41np0: Link", "down", "up"), ("mlx5_0: Port: 1 Link", "DOWN", "ACTIVE")],
)
@pytest.mark.parametrize(("times", "mark"), [(2, "i"), (4, "!")])
def test_a_link_that_flaps(judged, port, down, up, times, mark):
    port = f"mlx5_core 0000:29:00.0 {port}"
    code, shown = judged(log(f"{port} {up}\n{port} {down}\n" * times + f"{port} {up}"))
    assert f"{mark} logged-errors: a\n    {port.split(': ')[0][10:]} lost its" in shown
    assert code == 0


def test_a_link_that_goes_down_with_the_host_is_not_lost(judged):
    port = "mlx5_core 0000:29:00.0: mlx5_0: Port: 1 Link "
    boots = log(f"{port}DOWN\n{port}ACTIVE\n{port}DOWN\n") * 7
    assert judged(f"{boots}{log(f'{port}ACTIVE')}")[1].startswith("a: nothing found")
    flaps = "".join(
        f"{STAMPS['dmesg']}{port}{word}\n" for word in ["DOWN", "ACTIVE"] * 6
    )
    assert "lost its link 6 times\n" in judged(flaps)[1]


def ibstat(*ports: tuple[str, str, str, str]) -> str:
    """Return ibstat's text of adapters with a port each."""
    return "".join(
        f"CA 'mlx5_{n}'\n\tCA type: MT4129\n\tNumber of ports: 1\n"
        f"\tFirmware version: 28.43.1014\n\tPort 1:\n\t\tState: {state}\n"
        f"\t\tPhysical state: {physical}\n\t\tRate: {rate}\n\t\tBase lid: {n}\n"
        f"\t\tLink layer: {layer}\n"
        for n, (state, physical, rate, layer) in enumerate(ports)
    )


UP = ("Active", "LinkUp", "400", "InfiniBand")


@pytest.mark.parametrize(
    ("ports", "code", "found"),
    [
        ([UP] * 4, 0, "a: nothing found in ibstat of 4 ports\n"),
        ([UP, ("Down", "Disabled", "10", "Ethernet")], 0, "a: nothing found"),
        ([UP, ("Down", "Polling", "40", "InfiniBand")], 0,
         "if it has no cable on purpose: export NCCL_IB_HCA=^=mlx5_1:1\n"),
        ([("Down", "Polling", "40", "InfiniBand")] * 2, 0,
         "mlx5_1:1 are DOWN/Polling\n    fix: look at its cable and transceiver"),
        ([("Down", "Polling", "40", "InfiniBand")] * 8, 2,
         "x rdma-port: a\n    mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_3:1"),
        ([UP] * 7 + [("Down", "Polling", "40", "InfiniBand")], 0,
         "! rdma-port: a\n    mlx5_7:1 is DOWN/Polling"),
        ([UP] * 7 + [("Down", "Disabled", "40", "InfiniBand")], 0,
         "! rdma-port: a\n    mlx5_7:1 is DOWN/Disabled\n    fix: sudo ibportstate -C"),
        ([UP, ("Initializing", "LinkUp", "400", "InfiniBand")], 0,
         "mlx5_1:1 is INIT/LinkUp\n    fix: sminfo -C mlx5_1 -P 1; if none answers"),
        ([UP, UP, ("Active", "LinkUp", "100", "InfiniBand")], 0,
         "! logged-errors: a\n    mlx5_2:1 runs at 100 Gb/s, but others at 400"),
        ([UP] * 7 + [("Active", "LinkUp", "200", "InfiniBand")], 0,
         "! logged-errors: a\n    mlx5_7:1 runs at 200 Gb/s, but others at 400"),
        ([UP] * 8 + [("Active", "LinkUp", "200", "InfiniBand")] * 2, 0,
         "i logged-errors: a\n    mlx5_8:1 runs at 200 Gb/s, but others at 400"),
        ([UP, ("Active", "LinkUp", "100", "Ethernet")], 0,
         "i logged-errors: a\n    ports have different link layers: Ethernet and"),
    ],
)  # fmt: skip
def test_ports(judged, ports, code, found):
    has, shown = judged(ibstat(*ports))
    assert found in shown
    assert UP in ports or "HCA" not in shown
    assert has == code


IBSTATUS = """\
Infiniband device 'mlx5_0' port 1 status:
\tdefault gid:\t fe80:0000:0000:0000:a088:c203:0011:2233
\tbase lid:\t 0x11
\tsm lid:\t\t 0x1
\tstate:\t\t 4: ACTIVE
\tphys state:\t 5: LinkUp
\trate:\t\t 400 Gb/sec (4X NDR)
\tlink_layer:\t InfiniBand

Infiniband device 'mlx5_0' port 2 status:
\tstate:\t\t 1: DOWN
\tphys state:\t 2: Polling
\trate:\t\t 10 Gb/sec (4X SDR)
\tlink_layer:\t InfiniBand
"""
DEVINFO = """\
hca_id:\tmlx5_0
\ttransport:\t\t\tInfiniBand (0)
\tvendor_part_id:\t\t\t4129
\tphys_port_cnt:\t\t\t2
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tactive_mtu:\t\t4096 (5)
\t\t\tlink_layer:\t\tInfiniBand
\t\t\tactive_width:\t\t4X (2)
\t\t\tactive_speed:\t\t100.0 Gbps (128)
\t\t\tphys_state:\t\tLINK_UP (5)

\t\tport:\t2
\t\t\tstate:\t\t\tPORT_DOWN (1)
\t\t\tlink_layer:\t\tInfiniBand
\t\t\tphys_state:\t\tPOLLING (2)
"""


@pytest.mark.parametrize("text", [IBSTATUS, DEVINFO], ids=["ibstatus", "ibv_devinfo"])
def test_other_programs_print_the_same_ports(text):
    facts, _ = read_saved_facts(Saved("a", text.encode()))
    first, second = facts.values["network.rdma_ports"].values()
    assert list(facts.values["network.rdma_ports"]) == ["mlx5_0:1", "mlx5_0:2"]
    assert (first["state"], first["physical_state"]) == ("ACTIVE", "LinkUp")
    assert (first["mbit_per_s"], first["layer"]) == (400_000, "InfiniBand")
    assert (second["state"], second["physical_state"]) == ("DOWN", "Polling")


def test_warnings_count_with_strict_and_json_has_it_all(judged):
    text = query("Mode: Default > Exclusive_Process")
    assert judged(text)[0] == 0
    assert judged(text, options=("--strict",))[0] == 1
    reported = json.loads(judged(text, options=("--json",))[1])
    (host,) = reported["hosts"]
    assert host["values"]["gpu.count"] == 8
    assert [each["check"] for each in reported["findings"]] == ["logged-errors"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n",
            "but nvidia-smi topo -m. Type: ronde topo lint a\n",
        ),
        (
            "gn1:12:34 [0] NCCL INFO Bootstrap: Using eth0\n",
            "a log of NCCL or torch. Type: ronde topo log a\n",
        ),
        ("Architecture:            x86_64\n", "but output of lscpu."),
        ("once upon a time\n", "but an unknown format."),
    ],
)
def test_other_files_are_refused(judged, text, words):
    code, shown = judged(text)
    assert code == 64
    assert "a is not output of nvidia-smi -q, dmesg or ibstat, but " in shown
    assert words in shown


def test_hostile_files_are_harmless():
    def read(data: bytes) -> None:
        read_saved_facts(Saved("a", data))

    text = query().encode()
    assert check_harmless(read, bad_inputs(text, "nvidia_smi_log", "gpu")) > 5
