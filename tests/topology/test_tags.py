"""Texts that came through a launcher or a logger are read as if they had not."""

from pathlib import Path

import pytest

from ronde.errors import UsageError
from ronde.topology import LSPCI, NVIDIA_SMI, HostTopology, Probe, Saved, untag

SAMPLES = Path(__file__).parent / "samples"
MATRIX = SAMPLES / "nvsmi_topo_m" / "perlmutter_a100_4x_drv580.159.txt"
LIST = SAMPLES / "sysfs_snapshots" / "gpud_lspci.nn.a100"
TEXTS = [(NVIDIA_SMI, MATRIX.read_text()), (LSPCI, LIST.read_text())]
TAGS = [
    "0: ",
    "   3: ",
    "node17: ",
    "[node17:3] ",
    "[1,0]<stdout>:",
    "[pod/trainer-0/pytorch] ",
    "2026-01-31T10:20:30.123456789Z ",
    "[pod/trainer-0/pytorch] 2026-01-31T10:20:30.123456789Z ",
    "node17: 3: ",
    "> ",
]


def read(probe: Probe, text: str) -> HostTopology:
    saved = Saved("it.txt", text.encode())
    assert probe.recognises(saved)
    (host,) = probe.read(saved).hosts
    return host


def tagged(text: str, tag: str) -> str:
    return "".join(f"{tag}{line}".rstrip(" ") + "\n" for line in text.splitlines())


@pytest.mark.parametrize(("probe", "text"), TEXTS, ids=["nvidia-smi", "lspci"])
@pytest.mark.parametrize("tag", TAGS)
def test_tags_change_nothing(probe: Probe, text: str, tag: str) -> None:
    assert read(probe, tagged(text, tag)) == read(probe, text)


@pytest.mark.parametrize(("probe", "text"), TEXTS, ids=["nvidia-smi", "lspci"])
@pytest.mark.parametrize("tags", [("n1: ", "n2: "), ("n1: 0: ", "n2: 0: ")])
def test_texts_of_several_hosts_are_not_mixed(
    probe: Probe, text: str, tags: tuple[str, str]
) -> None:
    both = "".join(tagged(text, tag) for tag in tags)
    assert probe.recognises(Saved("it.txt", both.encode()))
    with pytest.raises(UsageError, match=r"has output from 2 hosts or ranks: 'n1, n2'"):
        probe.read(Saved("it.txt", both.encode()))


def test_a_long_list_is_recognised_by_its_beginning() -> None:
    text = tagged(LIST.read_text() + "\tCapabilities: [40] x\n" * 20_000, "node17: ")
    assert LSPCI.recognises(Saved("it.txt", text.encode()))


@pytest.mark.parametrize("text", [text for _, text in TEXTS], ids=["matrix", "list"])
def test_what_has_no_tags_is_left_alone(text: str) -> None:
    assert untag(text.splitlines()) == (text.splitlines(), ())
    # One line without is enough.
    lines = [*tagged(text, "0: ").splitlines(), "end"]
    assert untag(lines)[0] == lines
