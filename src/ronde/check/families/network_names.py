"""Would ranks listen where others can reach them?"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ronde.addresses import is_loopback
from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.facts import HostFacts
from ronde.check.fleet import Fleet
from ronde.check.reachability import ADDRESS

_OWN_NAME = "network.own_name"
_INTERFACES = "network.interfaces"
_VARIABLES = "network.variables"
_GLOO = "GLOO_SOCKET_IFNAME"
_BY_PREFIX = ("NCCL_SOCKET_IFNAME",)
_BY_NAME = (_GLOO, "TP_SOCKET_IFNAME")
_OF_CONTAINERS = re.compile(
    r"(docker|podman|nerdctl|virbr|lxcbr|lxdbr|cni|veth).*|br-[0-9a-f]{12}"
)
"""Interfaces that lead to containers or virtual machines of this host alone."""

Interfaces = Mapping[str, Mapping[str, Any]]


def chooses(setting: str, name: str) -> bool:
    """Say whether NCCL's way to choose takes an interface, or a port of an adapter.

    A list of beginnings; of whole names after ``=``, and of what not to take after
    ``^``. An adapter may be followed by a colon and the port: ``mlx5_0:1``.

    Source: NCCL's documentation of ``NCCL_SOCKET_IFNAME`` and ``NCCL_IB_HCA``.
    """
    is_excluding = setting.startswith("^")
    listed = setting.removeprefix("^")
    is_whole = listed.startswith("=")
    adapter, _, port = name.partition(":")
    is_listed = False
    for entry in listed.removeprefix("=").split(","):
        begin, _, wanted_port = entry.strip().partition(":")
        fits = adapter == begin if is_whole else adapter.startswith(begin)
        if begin and fits and wanted_port in ("", port):
            is_listed = True
    return is_listed != is_excluding


def _judge_name(fleet: Fleet) -> Iterator[Finding]:
    if len(fleet.hosts) < 2:
        return
    for facts in fleet.having(_OWN_NAME, _INTERFACES, _VARIABLES):
        if facts.values[_VARIABLES].get(_GLOO):
            # Then nobody asks for the name.
            continue
        own: dict[str, Any] = facts.values[_OWN_NAME]
        what = _tell_name(own, facts.values[_INTERFACES])
        if what:
            fix = _mend_name(facts, own["name"])
            yield Finding("host-name", Severity.WARN, facts.host, what, fix=fix)


def _tell_name(own: Mapping[str, Any], interfaces: Interfaces) -> str:
    name = own["name"]
    if own["error"]:
        return f"its name {name} does not resolve: {own['error']}"
    at = {address: i for i, each in interfaces.items() for address in each["addresses"]}
    # Who listens takes the first that is this host's.
    first = next((a for a in own["addresses"] if a in at or is_loopback(a)), "")
    if is_loopback(first):
        return f"its name {name} resolves to {first}, which no other host reaches"
    if _OF_CONTAINERS.fullmatch(at.get(first, "")):
        return (
            f"its name {name} resolves to {first} of {at[first]}, for containers here"
        )
    if at and not first:
        named = ", ".join(own["addresses"]) or "nothing"
        return f"its name {name} resolves to {named}, no address of this host"
    return ""


def _mend_name(facts: HostFacts, name: str) -> str:
    address = facts.values.get(ADDRESS) or "ITS_ADDRESS"
    interfaces: Interfaces = facts.values[_INTERFACES]
    own = next((i for i, e in interfaces.items() if address in e["addresses"]), "eth0")
    return (
        f"In /etc/hosts there, let the only line with {name} be: {address} {name}. Or "
        f"export {_GLOO}={own} (ronde run does)."
    )


def _judge_choice(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having(_INTERFACES, _VARIABLES):
        for variable, setting in facts.values[_VARIABLES].items():
            what = _tell_choice(
                variable,
                setting,
                facts.values[_INTERFACES],
                is_alone=len(fleet.hosts) < 2,
            )
            if what:
                yield Finding("chosen-interface", Severity.FAIL, facts.host, what)


def _tell_choice(
    variable: str, setting: str, interfaces: Interfaces, *, is_alone: bool
) -> str:
    if not setting or variable not in (*_BY_PREFIX, *_BY_NAME):
        return ""
    told = f"{variable}={setting}"
    if variable in _BY_PREFIX:
        chosen = [name for name in interfaces if chooses(setting, name)]
    else:
        chosen = setting.split(",")
        # Each of them has to be there.
        missing = [name for name in chosen if name not in interfaces]
        if missing:
            return f"{told}: no {', '.join(missing)} is among {', '.join(interfaces)}"
    if not chosen:
        return f"{told} fits no interface here: {', '.join(interfaces)}"
    if is_alone or setting.startswith("^"):
        return ""
    why = _tell_unreached(chosen, interfaces)
    return f"{told} takes {', '.join(chosen)} alone, which {why}" if why else ""


def _tell_unreached(names: Sequence[str], interfaces: Interfaces) -> str:
    """Return why no other host comes by any of some interfaces; empty if one may."""
    if all(_is_local(name, interfaces) for name in names):
        return "no other host reaches"
    is_known = any(each["addresses"] for each in interfaces.values())
    if is_known and not any(interfaces[name]["addresses"] for name in names):
        return "has no address"
    return ""


def _is_local(name: str, interfaces: Interfaces) -> bool:
    is_loopback_one = interfaces[name]["kind"] == "loopback"
    return is_loopback_one or _OF_CONTAINERS.fullmatch(name) is not None


CHECKS = (
    Check(
        id="host-name",
        family=Family.NETWORK,
        title="the host's own name leads to an address that others reach",
        reads="what the C library's resolver says of the host's name, and its own "
        f"addresses; nothing where {_GLOO} is set",
        threshold="the first address that is this host's is neither loopback nor a "
        "container bridge's",
        source="Gloo listens at what the host's name resolves to, or at loopback; a "
        "warning, for ronde run names the interface instead",
        severity=Severity.WARN,
        fix=f"Mend /etc/hosts, or export {_GLOO} (ronde run does).",
        needs="several hosts",
        why="Started by torchrun or mpirun, ranks of Gloo listen at loopback without a "
        "word; those of other hosts connect to themselves or are refused.",
        facts=(_OWN_NAME, _INTERFACES, _VARIABLES),
        judge=_judge_name,
        besides=(ADDRESS,),
    ),
    Check(
        id="chosen-interface",
        family=Family.NETWORK,
        title="the interface that variables choose is there",
        reads=", ".join((*_BY_PREFIX, *_BY_NAME)),
        threshold="an interface fits, which is not for this host alone and has an "
        "address; of a list of Gloo's each is there",
        source="NCCL's and Gloo's documentation of the variables",
        severity=Severity.FAIL,
        fix="Unset the variable, or name an interface of this host: ip -br address.",
        needs="",
        why="Ranks find no interface and end at once, or listen where nobody comes.",
        facts=(_INTERFACES, _VARIABLES),
        judge=_judge_choice,
    ),
)
"""Names and interfaces chosen."""
