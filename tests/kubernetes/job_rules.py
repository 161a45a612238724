"""Rules of Kubernetes' Job controller that no schema contains."""

import re
from collections.abc import Iterator
from typing import Any

LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


def broken_rules(name: str, spec: dict[str, Any]) -> Iterator[str]:
    """Yield the rules that the spec of a Job breaks."""
    template = spec["template"]["spec"]
    names = [container["name"] for container in template["containers"]]
    rules = spec.get("podFailurePolicy", {}).get("rules", [])
    if rules and template["restartPolicy"] != "Never":
        yield "podFailurePolicy needs restartPolicy Never"
    if rules and spec.get("podReplacementPolicy") != "Failed":
        yield "podFailurePolicy needs podReplacementPolicy Failed"
    for rule in rules:
        if len(rule.keys() & {"onExitCodes", "onPodConditions"}) != 1:
            yield "a rule has exit codes or conditions"
        if codes := rule.get("onExitCodes"):
            values = codes["values"]
            if values != sorted(set(values)) or not 1 <= len(values) <= 255:
                yield "codes are ascending and unique"
            if codes["operator"] == "In" and 0 in values:
                yield "codes have no 0"
            if not all(0 <= value <= 255 for value in values):
                yield "codes are at most 255"
            if codes.get("containerName") not in names:
                yield "the rule's container exists"
    yield from _broken_limits(name, spec)
    yield from _broken_pod(template)


def _broken_limits(name: str, spec: dict[str, Any]) -> Iterator[str]:
    is_indexed = spec.get("completionMode") == "Indexed"
    if not re.fullmatch(LABEL, f"{name}-{spec['completions'] - 1}"):
        yield "a pod's name is a DNS label"
    for field in ("backoffLimitPerIndex", "successPolicy"):
        if field in spec and not is_indexed:
            yield f"{field} needs an indexed Job"
    if "backoffLimitPerIndex" in spec and spec["template"]["spec"]["restartPolicy"] != (
        "Never"
    ):
        yield "backoffLimitPerIndex needs restartPolicy Never"
    if "maxFailedIndexes" in spec and "backoffLimitPerIndex" not in spec:
        yield "maxFailedIndexes needs backoffLimitPerIndex"
    if spec.get("maxFailedIndexes", 0) > spec["completions"]:
        yield "maxFailedIndexes is at most completions"
    if spec["completions"] != spec["parallelism"]:
        yield "an elastic Job's completions are its parallelism"
    for rule in spec.get("successPolicy", {}).get("rules", []):
        if any(int(i) >= spec["completions"] for i in rule["succeededIndexes"].split()):
            yield "succeeded indexes exist"


def _broken_pod(template: dict[str, Any]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in template["volumes"]}
    for container in template["containers"]:
        if {mount["name"] for mount in container["volumeMounts"]} != volumes.keys():
            yield "each volume is mounted"
        if container["resources"]["requests"] != container["resources"]["limits"]:
            yield "requests are limits"
        limit = container["resources"]["limits"].get("memory", "1Ei")
        for volume in volumes.values():
            size = volume.get("emptyDir", {}).get("sizeLimit", "0")
            if quantity(size) > quantity(limit):
                yield "memory holds /dev/shm"
    security = template["securityContext"]
    if security["runAsNonRoot"] and not security.get("runAsUser", 0):
        yield "the user is a number above 0"


def quantity(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)([kMGTPE]?)(i?)", text)
    assert match, text
    base = 1024 if match[3] else 1000
    return int(match[1]) * base ** " kMGTPE".index(match[2] or " ")


def action(spec: dict[str, Any], code: int, *, is_disrupted: bool = False) -> str:
    """Return what the Job controller does after a pod failed: the first rule counts."""
    for rule in spec["podFailurePolicy"]["rules"]:
        if code in rule.get("onExitCodes", {}).get("values", []):
            return rule["action"]
        if is_disrupted and "onPodConditions" in rule:
            return rule["action"]
    return "Count"
