from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tests.topology.hostile import bad_inputs, check_harmless

from ronde.errors import UsageError
from ronde.topology.findings import Finding, Severity
from ronde.topology.lint.form import check_form
from ronde.topology.probes.probe import Saved

SAMPLES = Path(__file__).parent / "samples"
FILES = sorted([*SAMPLES.glob("nccl_topo/*"), *SAMPLES.glob("rccl_topo/*")])

GOOD = """\
<system version="1">
  <cpu numaid="0" affinity="3" arch="x86_64">
    <pci busid="0000:01:00.0" class="0x030200" link_speed="" link_width="0">
      <gpu dev="0" sm="90" rank="0" gdr="1"/>
    </pci>
  </cpu>
</system>
"""


def check(text: str | bytes) -> tuple[Finding, ...]:
    return check_form(Saved("a.xml", text.encode() if isinstance(text, str) else text))


def rules(text: str | bytes) -> list[tuple[str, str]]:
    return [(finding.element, finding.rule) for finding in check(text)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_that_are_in_use_are_in_form(path: Path):
    assert check_form(Saved(path.name, path.read_bytes())) == ()


# Each is one change to a file that is in form, and what NCCL makes of it.
@pytest.mark.parametrize(
    ("was", "becomes", "expected"),
    [
        ("<system", '<?xml version="1.0"?>\n<system', ("line 1", "declaration")),
        ("  <cpu", "<?now?><cpu", ("line 2", "declaration")),
        ("<system", "<!DOCTYPE system>\n<system", ("line 1", "document-type")),
        ("<system", "\ufeff<system", ("line 1", "byte-order-mark")),
        ("\n  <cpu", "\n\n here\n  <cpu", ("line 3", "text")),
        ("  <cpu", "<![CDATA[]]><cpu", ("line 2", "text")),
        ("  <cpu", "&#10;<cpu", ("line 2", "text")),
        ("  <cpu", "\t<cpu", ("line 2", "tab-between-elements")),
        ("  <cpu", "<!--\na\nb-->\n\t<cpu", ("line 5", "tab-between-elements")),
        ("</system>\n", "</system>\n\t", ("line 8", "tab-between-elements")),
        (" affinity", "\naffinity", ("line 2", "break-in-tag")),
        (' affinity="3"', '\r\naffinity="3"', ("line 2", "break-in-tag")),
        ('arch="x86_64">', 'arch="x86_64"\n>', ("line 2", "break-in-tag")),
        (" affinity", " \taffinity", ("line 2", "tab-in-tag")),
        ('dev="0"', 'dev ="0"', ("line 4", "blank-at-equals")),
        ('dev="0"', 'dev= "0"', ("line 4", "blank-at-equals")),
        ("</cpu>", "</cpu >", ("line 6", "blank-in-end-tag")),
        (" sm=", "  sm=", ("line 4", "surplus-blank")),
        ('gdr="1"/>', 'gdr="1" />', ("line 4", "surplus-blank")),
        ('dev="0"', "dev='0'", ("line 4", "single-quote")),
        ('dev="0"', 'dev="&#48;"', ("line 4", "entity-in-value")),
        ('dev="0"', 'dev="0" a="' + "x" * 254 + '"', ("line 4", "long-text")),
        ('dev="0"', 'dev="0" ' + "x" * 254 + '=""', ("line 4", "long-text")),
        ("<system", "<!--====-->\n<system", ("line 1", "equals-in-comment")),
        ("<system", f"<!--{'x' * 254}-->\n<system", ("line 1", "equals-in-comment")),
        ('<system version="1"', "<system", ("line 1", "wrong-version")),
        ('version="1"', 'version="2"', ("line 1", "wrong-version")),
        ('version="1"', 'version="one"', ("line 1", "wrong-version")),
        ("    </pci>", "    </pci><gpu/>", ("line 5", "unknown-element")),
        (' rank="0"', "", ("line 4", "gpu-without-rank")),
        ('busid="0000:01:00.0" ', "", ("line 3", "missing-attribute")),
        ("</cpu>", '<nic><net name="a"/></nic></cpu>', ("line 6", "net-without-dev")),
    ],
)
def test_one_change_and_what_nccl_makes_of_it(
    was: str, becomes: str, expected: tuple[str, str]
):
    assert GOOD.count(was) >= 1
    assert rules(GOOD.replace(was, becomes, 1)) == [expected]


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("<system", "<!-- two words\n\tand = a tab --><system"),
        ("<system", "<!----><system"),
        ("<system", "<!--a>b=c--><system"),
        ("  <cpu", "\r\n\r\n   <cpu"),
        ('dev="0"', 'dev="0" a="' + "x" * 253 + '"'),
        ('dev="0"', 'dev="0" a="\' > / ="'),
        ("<system", "\n\n<system"),
        ('version="1"', 'version="1.0"'),
        ('version="1"', 'name="a" version="1"'),
    ],
)
def test_what_nccl_takes_is_in_form(was: str, becomes: str):
    assert rules(GOOD.replace(was, becomes, 1)) == []


@pytest.mark.parametrize(
    ("place", "child", "is_known"),
    [
        ("system", "cpu", True),
        ("system", "pci", False),
        ("cpu", "pci", True),
        ("cpu", "nic", True),
        ("cpu", "net", False),
        ("pci", "pcilink", True),
        ("pci", "nvlink", False),
        ("gpu", "nvlink", True),
        ("gpu", "c2c", True),
        ("nic", "net", True),
        ("nic", "gin", False),
        ("net", "net", False),
    ],
)
def test_elements_have_their_places(place: str, child: str, *, is_known: bool):
    chain = {
        "system": [],
        "cpu": ["cpu"],
        "pci": ["cpu", "pci"],
        "gpu": ["cpu", "pci", "gpu"],
        "nic": ["cpu", "nic"],
        "net": ["cpu", "nic", "net"],
    }[place]
    said = 'busid="0:1:0.0" rank="0" dev="0" target="0:2:0.0" count="1" bw="1"'
    text = (
        '<system version="1">'
        + "".join(f"<{tag} {said}>" for tag in chain)
        + f"<{child} {said}><odd/></{child}>"
        + "".join(f"</{tag}>" for tag in reversed(chain))
        + "</system>"
    )

    # What is in an unknown element is not told again.
    (finding,) = check(text)
    assert finding.rule == "unknown-element"
    what = f"odd in {child}" if is_known else f"{child} in {place}"
    assert finding.what.endswith(f": {what}.")


@pytest.mark.parametrize(
    ("class_code", "beside", "num"),
    [
        ("0x060400", "", 0),
        ("0x060000", "", 0),
        ("0x060400", '<nic><net dev="0"/></nic>', 1),
        ("0x020700", "", 1),
        ("0x030200", "", 1),
        ("0x068000", "", 1),
    ],
)
def test_only_bridges_have_devices_below(class_code: str, beside: str, num: int):
    text = GOOD.replace("0x030200", class_code).replace(
        "    </pci>", f'{beside}\n<pci busid="0:2:0.0"/></pci>'
    )

    assert rules(text) == [("line 6", "device-below-device")] * num


def test_amds_files_have_a_version_and_links_of_their_own():
    amd = GOOD.replace('sm="90"', 'sm="304" gcn="942"').replace('"1">', '"2">', 1)
    links = '<xgmi target="a" count="1"/><nvlink target="a" count="1"/></gpu>'

    assert rules(amd) == []
    assert rules(amd.replace('version="2"', 'version="1"')) == [
        ("line 1", "wrong-version")
    ]
    (finding,) = check(amd.replace('gdr="1"/>', f'gdr="1">{links}'))
    assert "nvlink in gpu" in finding.what


@pytest.mark.parametrize(
    ("num", "expected"), [(16, []), (17, [("line 1", "many-attributes")])]
)
def test_sixteen_attributes_are_kept(num: int, expected: list[tuple[str, str]]):
    more = "".join(f' a{n}=""' for n in range(num - 1))

    assert rules(f'<system version="1"{more}><cpu/></system>') == expected


@pytest.mark.parametrize(
    ("num", "expected"),
    [
        (127, []),
        (128, []),
        (129, ["quite-many-children"]),
        (254, ["quite-many-children"]),
        # With the one around them, 256 elements.
        (255, ["quite-many-children", "many-elements"]),
        (640, ["quite-many-children", "many-elements"]),
        (641, ["many-children", "many-elements"]),
    ],
)
def test_numbers_of_elements(num: int, expected: list[str]):
    text = '<system version="1">' + "<cpu/>" * num + "</system>"

    assert [rule for _, rule in rules(text)] == expected


def test_amds_reader_takes_more_elements_and_fewer_children():
    def of(num: int) -> list[str]:
        nets = '<net dev="0" gcn=""/>' * num
        text = f'<system version="2"><cpu><nic>{nets}</nic></cpu></system>'
        return [rule for _, rule in rules(text)]

    assert of(512) == []
    assert of(513) == ["many-children"]
    assert of(8191) == ["many-children", "many-elements"]


def test_many_lines_are_one_finding():
    tabs = "\n\t<cpu/>" * 9

    (finding,) = check(f'<system version="1">{tabs}\n</system>')

    assert finding.element == "line 2"
    assert finding.severity is Severity.ERROR
    assert finding.what == (
        "A tab stands between elements, and so at lines 3, 4, 5, 6, 7 and 3 more."
    )


def test_wide_characters():
    assert rules(GOOD.encode("utf-16")) == [("line 1", "wide-characters")]


def test_other_forms_have_no_findings():
    others = [
        path for path in SAMPLES.glob("*/*") if path.is_file() and path not in FILES
    ]
    assert len(others) > 10
    for path in others:
        assert check_form(Saved(path.name, path.read_bytes())) == ()


def test_what_is_no_xml_is_refused():
    with pytest.raises(UsageError, match="must be well-formed XML"):
        check(GOOD.replace("</cpu>", ""))


def test_hostile_files_are_refused_or_checked():
    assert check_harmless(check, bad_inputs(FILES[0].read_bytes())) > 30


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_findings_stand_at_lines_of_the_file(data: st.DataObject):
    pieces = ["\t", "\n", "  ", " ", "<!-- x -->", "<?x?>", "<odd/>", "'", "&lt;", "x"]
    text = GOOD
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.sampled_from(pieces)) + text[at:]

    try:
        findings = check(text)
    except UsageError:
        return
    lines = [int(finding.element.removeprefix("line ")) for finding in findings]
    assert lines == sorted(lines)
    assert all(1 <= line <= text.count("\n") + 1 for line in lines)
    assert len({finding.rule for finding in findings}) == len(findings)
