"""Notice that this host is about to be taken, looked for by a process of its own.

The agent starts it with the sources as its arguments, and reads frames of
``HostLeaving`` and ``Notice`` from its standard output. There each source has a thread,
so that one that does not answer holds up no other.

Source: "Spot Instance interruption notices" of EC2, "Preemptible VM instances" of
    Compute Engine, "Scheduled Events for Linux VMs" of Azure.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO, NamedTuple, cast

from ronde.launch.agent.relay import OutputSender, Watched
from ronde.launch.environments import own_environment
from ronde.launch.wire import messages
from ronde.processes import end_with

_LINK_LOCAL = "169.254.169.254"  # of EC2's and Azure's metadata service
_GOOGLE = "metadata.google.internal"
_TIMEOUT_S = 1.0  # of a connection, and of each read from it
_MAX_BYTES = 256 << 10
_TRIES = 3  # that fail in a row before the user is told
_RETRY_S = 1.0
_QUIET_S = 30.0  # between two tries of what has never answered
_SLURM_LEAD_S = 60.0
_OK, _NOT_FOUND = 200, 404
_AZURE_EVENTS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
# The last ones where the answer is of another form.
_FAILURES = (
    *(OSError, HTTPException, ValueError),
    *(LookupError, TypeError, AttributeError),
)
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from ronde.launch.agent.notices import main; main()"
)
_READ_BYTES = 64 << 10


class NoticePoller:
    """The agent's end of the process: passes on its messages until ``close``."""

    def __init__(self, sources: tuple[str, ...], sender: OutputSender) -> None:
        self._sender = sender
        self._reader = messages.MessageDecoder((messages.HostLeaving, messages.Notice))
        package_dir = __file__.rpartition("/ronde/launch/")[0]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, package_dir, *sources],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            # The agent has one thread, so that code between fork and exec is safe.
            preexec_fn=end_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509
        )
        self._file = cast("IO[bytes]", self._process.stdout)

    def watched(self) -> Watched:
        if not self._file.closed:
            yield self._file.fileno(), select.POLLIN, self._read

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._file.close()

    def _read(self) -> None:
        if self._file.closed:  # after the poll had seen it ready
            return
        data = os.read(self._file.fileno(), _READ_BYTES)
        for message in self._reader.feed(data):
            self._sender.send(message)
        if not data:
            self._file.close()
            text = "--notice: the process that looks for it has ended"
            self._sender.send(messages.Notice(text))


class Source(NamedTuple):
    """One place that such notice comes from."""

    service: str  # what must be there
    every_s: float
    look: Callable[[], str]  # why the host is taken, in half a sentence, or empty


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
    token = _ask(_LINK_LOCAL, "PUT", "/latest/api/token", ttl)
    headers = {"X-aws-ec2-metadata-token": token}
    text = _ask(_LINK_LOCAL, "GET", "/latest/meta-data/spot/instance-action", headers)
    if not text:
        return ""
    action = cast("dict[str, str]", json.loads(text))
    return f"AWS takes it {_clock(action['time'])}"


def read_gcp() -> str:
    path = "/computeMetadata/v1/instance/preempted"
    text = _ask(_GOOGLE, "GET", path, {"Metadata-Flavor": "Google"})
    return "Google Cloud takes it within 30 s" if text.strip() == "TRUE" else ""


def read_azure() -> str:
    # Whose events they are is told apart by the machine's name there. The first answer
    # about events may take two minutes, that about the name does not.
    path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    name = _ask(_LINK_LOCAL, "GET", path, {"Metadata": "true"}).strip()
    if not name:
        raise HTTPException(f"HTTP status {_NOT_FOUND}")
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    try:
        text = _ask(_LINK_LOCAL, "GET", path, {"Metadata": "true"})
    except TimeoutError:
        return ""
    document = cast("dict[str, list[dict[str, object]]]", json.loads(text or "{}"))
    for event in document.get("Events", []):
        kind, resources = str(event["EventType"]), cast("list[str]", event["Resources"])
        if kind in _AZURE_EVENTS and name in resources:
            return f"Azure takes it {_clock(str(event['NotBefore']))} ({kind})"
    return ""


def _ask(host: str, method: str, path: str, headers: dict[str, str]) -> str:
    """Return what a service answers, without any proxy; nothing for "not found"."""
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


def find_source(option: str) -> Source:
    """Return a source by its name in ``--notice``."""
    kind, _, path = option.partition(":")
    return _SERVICES.get(kind) or Source("file", 0.5, lambda: read_file(path))


def watch(option: str) -> None:
    """Look until there is notice; say once that a source does not answer."""
    source, num_failed, has_answered, is_reported = find_source(option), 0, False, False
    while True:
        pause_s = source.every_s
        try:
            reason = source.look()
        except _FAILURES as error:
            num_failed += 1
            pause_s = _RETRY_S if num_failed < _TRIES or has_answered else _QUIET_S
            if num_failed >= _TRIES and not is_reported:
                is_reported = True
                text = f"--notice {option}: no {source.service} here"
                why = getattr(error, "strerror", None) or str(error)
                _send(messages.Notice(f"{text} ({why})"))
        else:
            if reason:
                _send(messages.HostLeaving(reason))
                return
            num_failed, has_answered = 0, True
        time.sleep(pause_s)


def _send(message: messages.FromAgent) -> None:
    # Less than a pipe takes at once, so that threads do not mix.
    os.write(1, messages.encode(message))


def main() -> None:
    threads = [threading.Thread(target=watch, args=(name,)) for name in sys.argv[2:]]
    for thread in threads:
        thread.start()
    # The agent ends this.
    threading.Event().wait()
