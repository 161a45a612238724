"""Installed software: read from files, and compared between hosts."""

from importlib.metadata import version
from typing import Any

import pytest
from tests.check.fleets import of_family

import ronde
from ronde.check import (
    ABSENT,
    PROBES,
    Family,
    Fleet,
    HostFacts,
    Severity,
    UnreadableError,
    find_error,
    find_nccl,
    read_driver,
    read_packages,
    read_torch,
    run_probes,
    select_environment,
)

HEALTHY: dict[str, Any] = {
    "versions.python": "3.11.7",
    "versions.python_path": "/usr/bin/python3",
    "versions.torch": "2.13.0",
    "versions.torch_build": "CUDA 12.8",
    "versions.packages": {"numpy": "2.4.6", "tqdm": "4.70.1"},
    "versions.nccl": "2.28.9",
    "versions.driver": "NVIDIA 570.86.15",
    "versions.environment": {"NCCL_DEBUG": "WARN"},
    "torch.import_error": "",
}


NOTHING: tuple[dict[str, Any], ...] = ({},)


def fleet(*changes, **settings):
    """Return healthy hosts node1, node2, ... with some facts changed in each."""
    hosts = tuple(
        HostFacts(
            f"node{n}",
            HEALTHY | {n if "." in n else f"versions.{n}": v for n, v in each.items()},
            {},
            {},
        )
        for n, each in enumerate(changes, 1)
    )
    return Fleet(hosts, settings)


def found(of):
    return [
        finding for check in of_family(Family.VERSIONS) for finding in check.find(of)
    ]


def test_this_host_reports_all_its_facts_without_secrets(monkeypatch):
    monkeypatch.setenv("RONDE_API_KEY", "hunter2")
    monkeypatch.setenv("NCCL_PROXY", "https://me:hunter2@host/")
    outcome = run_probes({"versions": PROBES["versions"]}, {})["versions"]
    environment = outcome.values["versions.environment"]
    assert {"RONDE_API_KEY", "NCCL_PROXY"} <= set(environment)
    assert "hunter2" not in str(outcome)
    assert outcome.failure == ""
    assert set(outcome.values) == set(HEALTHY) - {"torch.import_error"}
    assert outcome.unreadable == {}
    assert outcome.values["versions.packages"]["ronde"].startswith(ronde.__version__)
    assert outcome.values["versions.torch"] == version("torch")


def test_a_healthy_fleet_gives_no_findings():
    for size in (1, 2, 3):
        assert found(fleet(*NOTHING * size)) == []


PIP = "/usr/bin/python3 -m pip install "


@pytest.mark.parametrize(
    ("error", "changes", "fix"),
    [
        ("ModuleNotFoundError: No module named 'torch'", {}, f"{PIP}torch==2.13.0"),
        (
            "ModuleNotFoundError: No module named 'torch._C'",
            {"packages": {"torch": "2.13.0"}},
            f"{PIP}--force-reinstall torch==2.13.0",
        ),
        (
            "ModuleNotFoundError: No module named 'sympy'",
            {"packages": {"torch": "2.13.0"}},
            f"{PIP}torch==2.13.0",
        ),
        (
            "OSError: x",
            {"torch.shadowing": "/my/torch"},
            "mv /my/torch /my/torch.old  #",
        ),
    ],
)
def test_torch_that_cannot_be_imported_is_a_fault_with_its_cure(error, changes, fix):
    odd = {"torch": ABSENT, "torch.import_error": error} | changes
    usual = {"torch": "2.13.0+cu128"}
    findings = [f for f in found(fleet(odd, usual, usual)) if "torch" in f.check]
    assert [(f.check, f.host, f.severity) for f in findings] == [
        ("torch-installed", "node1", Severity.FAIL)
    ]
    assert findings[0].fix.startswith(fix)


def test_the_error_of_an_import_is_reported(tmp_path, monkeypatch):
    """One of each, by the probe itself: with torch's name, before the real one."""
    (tmp_path / "left_over_a").mkdir()
    texts = {
        "raising_a": "raise OSError('libc10.so: no\\nmore')",
        "leaving_a": "exit(3)",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [
        find_error(name) for name in ("json", "absent_a", *texts, "left_over_a")
    ] == [
        "",
        "ModuleNotFoundError: No module named 'absent_a'",
        "OSError: libc10.so: no",
        "SystemExit: 3",
        f"{tmp_path}/left_over_a has no __init__.py",
    ]
    monkeypatch.setenv("PYTHONPATH", f"/none:{tmp_path}/")
    for name, text, error in (
        ("torch.py", "raise ImportError('too old')", "ImportError: too old"),
        ("torch/__init__.py", "raise ImportError('x')", "ImportError: x"),
        (
            "torch/__init__.py",
            "__version__ = '1.9.0'",
            f"{tmp_path}/torch is another package: it has no version.py",
        ),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        outcome = run_probes({"torch": PROBES["torch"]}, {})["torch"]
        assert outcome.values == {
            "torch.import_error": error,
            "torch.shadowing": f"{tmp_path}/{name.removesuffix('/__init__.py')}",
        }


@pytest.mark.parametrize(
    ("fact", "value", "check", "severity"),
    [
        ("torch", "2.12.0", "torch", Severity.FAIL),
        ("torch_build", "CPU", "torch", Severity.FAIL),
        ("nccl", "2.29.3", "nccl", Severity.FAIL),
        ("driver", "NVIDIA 550.54.15", "gpu-driver", Severity.WARN),
        ("packages", {"numpy": "2.4.6"}, "packages", Severity.WARN),
        ("environment", {}, "environment", Severity.WARN),
    ],
)
def test_the_one_of_three_that_differs_is_named(fact, value, check, severity):
    (finding,) = found(fleet({}, {fact: value}, {}))
    assert (finding.check, finding.host) == (check, "node2")
    assert finding.severity == severity
    assert finding.usual.endswith("on 2 hosts")
    assert not {"VERSION", "FOLDER", "INTERFACE"}.intersection(finding.fix.split())


def test_different_packages_are_reported_together():
    usual = {f"p{n}": "1.0" for n in range(9)}
    other = usual | {f"p{n}": "2.0" for n in range(5)}
    (finding,) = found(
        fleet({"packages": usual}, {"packages": usual}, {"packages": other})
    )
    assert finding.message == "p0 2.0, p1 2.0, p2 2.0 and 2 more"
    assert finding.usual == "1.0 on 2 hosts"
    assert finding.fix == f"{PIP}p0==1.0 p1==1.0 p2==1.0 p3==1.0 p4==1.0"


@pytest.mark.parametrize(
    ("environment", "what", "usual"),
    [
        ({"NCCL_DEBUG": "WARN", "A": ""}, "A=", "(not set) on 2 hosts"),
        (
            {"NCCL_ALGO": "Ring"},
            "NCCL_ALGO=Ring, NCCL_DEBUG=(not set)",
            "NCCL_ALGO=(not set) on 2 hosts; NCCL_DEBUG=WARN on 2 hosts",
        ),
    ],
)
def test_variables_of_one_host_are_reported_with_their_values(environment, what, usual):
    (finding,) = found(fleet({}, {}, {"environment": environment}))
    assert (finding.message, finding.usual) == (what, usual)
    assert finding.fix.startswith("grep -sE ")


@pytest.mark.parametrize(
    ("version", "num_bad"), [("2.10.1+cu128", 1), ("2.11.0", 0), ("dev", 0)]
)
def test_torch_that_is_too_old_is_known(version, num_bad):
    findings = found(fleet({"torch": version}))
    assert [(f.check, f.severity) for f in findings] == [
        ("torch-installed", Severity.FAIL)
    ] * num_bad


VERSION_FILE = """\
from typing import Optional
__all__ = ['__version__', 'cuda']
__version__ = '2.9.0+cu126'
debug = False
cuda: Optional[str] = {cuda}
hip: Optional[str] = {hip}
"""


@pytest.mark.parametrize(
    ("cuda", "hip", "build"),
    [
        ("'12.6'", "None", "CUDA 12.6"),
        ("None", "'6.4.43482'", "HIP 6.4.43482"),
        ("None", "None", "CPU"),
    ],
)
def test_the_build_of_torch_is_read(tmp_path, cuda, hip, build):
    (tmp_path / "version.py").write_text(VERSION_FILE.format(cuda=cuda, hip=hip))
    assert read_torch(tmp_path) == ("2.9.0+cu126", build)


def test_packages_are_read_from_directory_names(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for name in (
        "first/PyYAML-6.0.3.dist-info",
        "first/nvidia_nccl_cu12-2.27.3.dist-info",
        "first/scikit_learn-1.9.1.dist-info",
        "first/torch-2.13.0+cpu.dist-info",
        "first/numpy",
        "second/distro_info-1.5-py3.11.egg-info",
        "second/PyYAML-5.0.dist-info",
        "second/broken.dist-info",
    ):
        (tmp_path / name).mkdir(parents=True)
    packages = read_packages(["", str(first), str(second), str(tmp_path / "none")])
    assert packages == {
        "pyyaml": "6.0.3",
        "nvidia-nccl-cu12": "2.27.3",
        "scikit-learn": "1.9.1",
        "torch": "2.13.0+cpu",
        "distro-info": "1.5",
    }
    assert find_nccl(packages) == "2.27.3"
    assert find_nccl({}) == ABSENT


def test_a_truncated_version_file_is_unreadable(tmp_path):
    (tmp_path / "version.py").write_text("__version__ = '2.13.0'\ncuda: str = (")
    with pytest.raises(UnreadableError, match="reinstall torch"):
        read_torch(tmp_path)


def test_versions_of_drivers(tmp_path):
    assert read_driver(str(tmp_path)) == ABSENT
    amd = tmp_path / "sys/module/amdgpu/version"
    amd.parent.mkdir(parents=True)
    amd.write_text("6.8.5\n")
    assert read_driver(str(tmp_path)) == "amdgpu 6.8.5"
    nvidia = tmp_path / "proc/driver/nvidia/version"
    nvidia.parent.mkdir(parents=True)
    nvidia.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  570.86.15\nGCC\n")
    assert read_driver(str(tmp_path)) == "NVIDIA 570.86.15"
    nvidia.write_text("something else\n")
    with pytest.raises(UnreadableError, match="something else"):
        read_driver(str(tmp_path))


def test_settings_are_those_of_ranks():
    own = {
        "NCCL_DEBUG": "WARN",
        "NCCL_ALGO": "Ring",
        "RONDE_COOKIE": "of a job",
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "GPU-8a7b,GPU-1c2d",
        "LD_PRELOAD": "/x.so",
    }
    assert select_environment(own, {"NCCL_DEBUG": "INFO", "PATH": "/bin"}) == {
        "CUDA_VISIBLE_DEVICES": "2 by UUID",
        "LD_PRELOAD": "/x.so",
        "NCCL_ALGO": "Ring",
        "NCCL_DEBUG": "INFO",
    }
