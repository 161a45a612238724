"""Read the report of ``nvidia-smi -q``, which is text or XML."""

import re
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element, SubElement

from ronde.topology.probes.base import Saved, has_line, lines_of_one, parse_xml

_GPU = re.compile(r"\s*GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*")
is_query = has_line(re.compile(rf"=NVSMI LOG=|<nvidia_smi_log\b|^{_GPU.pattern}$"))
_REASONS = re.compile(r"clocks_(?:event|throttle)_reasons")
_MAX_DEPTH = 16
_PAIRS = """
    gpu/gpu_uuid=uuid mig_mode/current=current_mig ecc_mode/current=current_ecc
    power_readings/power_limit=current_power_limit pci/gpu_link_info=pci_gpu_link_info
    pci_gpu_link_info/pcie_generation=pcie_gen pci_gpu_link_info/link_width=link_widths
    pcie_gen/max=max_link_gen pcie_gen/current=current_link_gen
    link_widths/max=max_link_width link_widths/current=current_link_width
    volatile/sram_uncorrectable_sec_ded=sram_uncorrectable_secded
    aggregate/sram_uncorrectable_sec_ded=sram_uncorrectable_secded
    remapped_rows/correctable_error=remapped_row_corr
    remapped_rows/uncorrectable_error=remapped_row_unc
    remapped_rows/pending=remapped_row_pending
    remapped_rows/remapping_failure_occurred=remapped_row_failure
    temperature/gpu_t_limit_temp=gpu_temp_tlimit
"""
_NAMES = {text: name for text, _, name in (p.partition("=") for p in _PAIRS.split())}
"""Names in XML that differ from those in text, by section and name in text."""


def read_query(saved: Saved) -> Element:
    """Return the report as XML; text is converted to the names of XML."""
    if "<nvidia_smi_log" in saved.text:
        parse_xml(saved.data, saved.name, "nvidia_smi_log")
        return ET.fromstring(saved.data)  # noqa: S314  parse_xml refuses entities
    top = Element("nvidia_smi_log")
    gpus: dict[str, Element] = {}
    # Sections that are open, each with its indentation.
    opened = [(-1, top)]
    for line in lines_of_one(saved.text.splitlines(), saved.name):
        key, colon, value = line.strip().partition(":")
        indentation = len(line) - len(line.lstrip())
        while key and len(opened) > 1 and opened[-1][0] >= indentation:
            opened.pop()
        section = opened[-1][1]
        if match := _GPU.fullmatch(line):
            if match[1] not in gpus:
                gpus[match[1]] = SubElement(top, "gpu", id=match[1])
            opened = [(-1, top), (indentation, gpus[match[1]])]
        elif name := _xml_name(section.tag, key):
            element = SubElement(section, name)
            element.text = value.strip()
            # Lines below a value belong to the same section.
            is_section = not colon and len(opened) < _MAX_DEPTH
            opened += [(indentation, element)] if is_section else []
    return top


def _xml_name(section: str, key: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "_", key.lower()).strip("_")
    if name and _REASONS.fullmatch(section):
        return f"{section[:-1]}_{name}"
    return _NAMES.get(f"{section}/{name}", name)
