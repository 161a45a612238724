"""What NCCL's own reader makes of a topology file that is good XML.

It is stricter than XML in what it takes, and silent about what it does not use.
"""

import re
from collections import defaultdict
from collections.abc import Iterator

from ronde.topology.findings import Finding
from ronde.topology.lint.form_faults import Fault, FaultKind, to_finding
from ronde.topology.lint.form_markup import find_markup_faults
from ronde.topology.probes.probe import Saved
from ronde.topology.xml_tree import Element, outermost_tag, parse_xml

MAX_CHILDREN, MAX_CHILDREN_BEFORE, MAX_CHILDREN_AMD = 640, 128, 512
"""Of an element: of NCCL, of NCCL before 2.29.7, of AMD's RCCL."""

MAX_ELEMENTS, MAX_ELEMENTS_AMD = 255, 8191
"""Of a file. Both readers have room for one more and need it to read a closing tag."""

_CHILDREN = {
    "system": ("cpu",),
    "cpu": ("pci", "nic"),
    "pci": ("pci", "gpu", "nic", "pcilink"),
    "gpu": ("nvlink", "c2c"),
    "nic": ("net",),
}
_CHILDREN_AMD = {**_CHILDREN, "gpu": ("xgmi",)}
_NEEDED = {
    "pci": ("busid",),
    "nvlink": ("target", "count"),
    "xgmi": ("target", "count"),
    "c2c": ("bw", "count"),
    "pcilink": ("target",),
}
_NO_BRIDGES = ("0x02", "0x03", "0x12", "0x068000", "0x068001")
"""Beginnings of classes that its readers know for something else than a bridge."""
_VERSION = re.compile(r"\s*\+?0*([0-9]{1,9})(?![0-9])")


def check_form(saved: Saved) -> tuple[Finding, ...]:
    """Return what NCCL would reject, drop or ignore in a topology file, by line.

    A finding of several lines names the first and counts the others. Files of other
    forms have none.

    Raises:
        UsageError: It is no well-formed XML.
    """
    if outermost_tag(saved.data) != "system":
        return ()
    root = parse_xml(saved.data, saved.name)
    faults: defaultdict[FaultKind, list[Fault]] = defaultdict(list)
    for fault in (*find_markup_faults(saved.data), *_tree_faults(root)):
        faults[fault.kind].append(fault)
    found = [
        to_finding(kind, sorted(each, key=lambda fault: fault.line))
        for kind, each in faults.items()
    ]
    return tuple(sorted(found, key=lambda finding: int(finding.element.split()[1])))


def _tree_faults(root: Element) -> Iterator[Fault]:
    """Yield what is wrong with elements, apart from how they are written."""
    is_amd = _is_amd(root)
    yield from _version_faults(root, is_amd=is_amd)
    places = _CHILDREN_AMD if is_amd else _CHILDREN
    num_elements = 0
    waiting = [root]
    while waiting:
        element = waiting.pop()
        num_elements += 1
        yield from _attribute_faults(element)
        known = element.named(*places.get(element.tag, ()))
        yield from _place_faults(element)
        yield from _number_faults(element, len(known), is_amd=is_amd)
        for child in element.children:
            if child.tag not in places.get(element.tag, ()):
                what = f"{child.tag[:40]} in {element.tag}"
                yield Fault(child.line, FaultKind.UNKNOWN_ELEMENT, what)
        waiting.extend(known)
    if num_elements > (MAX_ELEMENTS_AMD if is_amd else MAX_ELEMENTS):
        yield Fault(root.line, FaultKind.MANY_ELEMENTS, f"{num_elements}")


def _is_amd(root: Element) -> bool:
    """Return whether a file is AMD's: it names an architecture, or xGMI."""
    waiting = [root]
    while waiting:
        element = waiting.pop()
        if element.tag == "xgmi" or "gcn" in element.attributes:
            return True
        waiting.extend(element.children)
    return False


def _version_faults(root: Element, *, is_amd: bool) -> Iterator[Fault]:
    told = root.attributes.get("version")
    # Both readers take the digits at the beginning.
    found = _VERSION.match(told or "")
    needed = 2 if is_amd else 1
    if not found or int(found[1]) != needed:
        got = "none" if told is None else repr(told[:20])
        yield Fault(root.line, FaultKind.WRONG_VERSION, f"{got}, not {needed}")


def _attribute_faults(element: Element) -> Iterator[Fault]:
    for name in _NEEDED.get(element.tag, ()):
        if name not in element.attributes:
            what = f"{name} of {element.tag}"
            yield Fault(element.line, FaultKind.MISSING_ATTRIBUTE, what)
    if element.tag == "gpu" and "rank" not in element.attributes:
        yield Fault(element.line, FaultKind.GPU_WITHOUT_RANK)
    if element.tag == "net" and "dev" not in element.attributes:
        yield Fault(element.line, FaultKind.NET_WITHOUT_DEV)


def _place_faults(element: Element) -> Iterator[Fault]:
    is_end = element.attributes.get("class", "").startswith(_NO_BRIDGES)
    if element.tag == "pci" and (is_end or element.named("nic")):
        for below in element.named("pci"):
            yield Fault(below.line, FaultKind.DEVICE_BELOW_DEVICE)


def _number_faults(element: Element, num: int, *, is_amd: bool) -> Iterator[Fault]:
    what = f"{num} in {element.tag}"
    if num > (MAX_CHILDREN_AMD if is_amd else MAX_CHILDREN):
        yield Fault(element.line, FaultKind.MANY_CHILDREN, what)
    elif num > MAX_CHILDREN_BEFORE and not is_amd:
        yield Fault(element.line, FaultKind.QUITE_MANY_CHILDREN, what)
