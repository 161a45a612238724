"""A program that polls for notices that this host will be reclaimed.

The agent runs it as a ``RemoteProgram`` with the sources of ``--notice`` as arguments.
It writes the lines ``leaving REASON`` and ``notice TEXT``. Each source has a thread, so
that a slow one delays no other.

Source: "Spot Instance interruption notices" of EC2, "Preemptible VM instances" of
    Compute Engine, "Scheduled Events for Linux VMs" of Azure.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple, cast

from ronde.launch.environments import own_environment

_LINK_LOCAL = "169.254.169.254"  # of EC2's and Azure's metadata service
_GOOGLE = "metadata.google.internal"
_TIMEOUT_S = 1.0  # of a connection, and of each read from it
_MAX_BYTES = 256 << 10
_TRIES = 3  # that fail in a row before the user is notified
_RETRY_S = 1.0
_QUIET_S = 30.0  # between two tries of a service that has never answered
_SLURM_LEAD_S = 60.0
_OK, _NOT_FOUND = 200, 404
_AZURE_EVENTS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
# Those in the last line mean that the answer has an unexpected form.
_FAILURES = (
    *(OSError, HTTPException, ValueError),
    *(LookupError, TypeError, AttributeError),
)


class Source(NamedTuple):
    """A service or file that announces that this host will be reclaimed."""

    service: str  # its name, for messages
    every_s: float
    read: Callable[[], str]  # returns why the host is taken, or an empty text


def read_file(path: str) -> str:
    return f"{path} is there" if Path(path).exists() else ""


def read_slurm() -> str:
    text = own_environment().get("SLURM_JOB_END_TIME", "")
    if not text.isdecimal():
        raise ValueError(f"got {text!r}" if text else "not set")
    end_s = int(text)
    is_near = time.time() >= end_s - _SLURM_LEAD_S
    at = time.strftime("%H:%M:%S", time.gmtime(end_s))
    return f"Slurm ends its job at {at} UTC" if is_near else ""


def read_aws() -> str:
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _request(_LINK_LOCAL, "PUT", "/latest/api/token", ttl)
    headers = {"X-aws-ec2-metadata-token": token}
    path = "/latest/meta-data/spot/instance-action"
    text = _request(_LINK_LOCAL, "GET", path, headers)
    if not text:
        return ""
    action = cast("dict[str, str]", json.loads(text))
    return f"AWS takes it {_clock(action['time'])}"


def read_gcp() -> str:
    path = "/computeMetadata/v1/instance/preempted"
    text = _request(_GOOGLE, "GET", path, {"Metadata-Flavor": "Google"})
    return "Google Cloud takes it within 30 s" if text.strip() == "TRUE" else ""


def read_azure() -> str:
    # Events name their machines. The first answer about events may take two minutes,
    # but not the answer about this machine's name.
    path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    name = _request(_LINK_LOCAL, "GET", path, {"Metadata": "true"}).strip()
    if not name:
        raise HTTPException(f"HTTP status {_NOT_FOUND}")
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    try:
        text = _request(_LINK_LOCAL, "GET", path, {"Metadata": "true"})
    except TimeoutError:
        return ""
    document = cast("dict[str, list[dict[str, object]]]", json.loads(text or "{}"))
    for event in document.get("Events", []):
        kind, resources = str(event["EventType"]), cast("list[str]", event["Resources"])
        if kind in _AZURE_EVENTS and name in resources:
            return f"Azure takes it {_clock(str(event['NotBefore']))} ({kind})"
    return ""


def _request(host: str, method: str, path: str, headers: dict[str, str]) -> str:
    """Return a service's answer, empty for "not found"; proxies are ignored."""
    connection = HTTPConnection(host, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        if response.status == _NOT_FOUND and method == "GET":
            return ""
        if response.status != _OK:
            raise HTTPException(f"HTTP status {response.status}")
        return response.read(_MAX_BYTES).decode(errors="replace")
    finally:
        connection.close()


def _clock(text: str) -> str:
    found = re.search(r"\d\d:\d\d:\d\d", text)
    return f"at {found[0]} UTC" if found else "now"


_SERVICES = {
    "aws": Source("EC2 metadata service", 5.0, read_aws),
    "gcp": Source("Google Cloud metadata service", 1.0, read_gcp),
    "azure": Source("Azure metadata service", 1.0, read_azure),
    "slurm": Source("SLURM_JOB_END_TIME", 1.0, read_slurm),
}


def watch(option: str) -> None:
    kind, _, path = option.partition(":")
    source = _SERVICES.get(kind) or Source("file", 0.5, lambda: read_file(path))
    num_failed, has_answered, is_reported = 0, False, False
    while True:
        pause_s = source.every_s
        try:
            reason = source.read()
        except _FAILURES as error:
            num_failed += 1
            pause_s = _RETRY_S if num_failed < _TRIES or has_answered else _QUIET_S
            if num_failed >= _TRIES and not is_reported:
                is_reported = True
                text = f"--notice {option}: no {source.service} here"
                _write(f"notice {text} ({getattr(error, 'strerror', None) or error})")
        else:
            if reason:
                _write(f"leaving {reason}")
                return
            num_failed, has_answered = 0, True
        time.sleep(pause_s)


def _write(line: str) -> None:
    # In one call, so that the threads' lines do not mix.
    os.write(1, " ".join(line.split()).encode() + b"\n")


def main() -> None:
    for option in sys.argv[3:]:
        threading.Thread(target=watch, args=(option,), daemon=True).start()
    sys.stdin.read()  # ends with the agent
