"""Programs on other hosts by the system's ssh, as the user has configured it."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ronde.errors import Failure
from ronde.launch.host import Host
from ronde.launch.hosts.spawner import (
    NO_ANSWER,
    UNKNOWN_NAME,
    Spawner,
    explain_program,
    last_line,
    shell_command,
    ssh_destination,
)

_FAILED = 255
_CONFIGURATION = re.compile(r"Reading configuration data (\S+)")
_PROXIES = re.compile(r"^proxy(command|jump) (?!none$)", re.MULTILINE)
_NAMES = re.compile(
    # What is included for some hosts is not read for all.
    r"^\s*(hostname|proxycommand|proxyjump|canonicalizehostname|match)\b"
    r"|^\s*host\b(.|\n)*^\s*include\b",
    re.IGNORECASE | re.MULTILINE,
)
_SECURE = (
    "-T",  # bytes pass as they are
    "-a",  # nothing on another host can use the user's keys
    "-x",
    *("-o", "BatchMode=yes"),  # ask nothing: nobody is there to answer
    *("-o", "ConnectTimeout=10"),
    # Later than the controller and the agent give each other up.
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=4"),
    *("-o", "ClearAllForwardings=yes"),
    # A connection of others is used where there is one; none is left behind.
    *("-o", "ControlMaster=no"),
    # What a user's configuration may want for logins, and refuses a command.
    *("-o", "RemoteCommand=none"),
)


_NO_SERVER = "no name server answers"
_CROWDED = "its ssh server takes no more connections now"
_CROWDED_WORDS = (
    "during banner exchange|kex_exchange_identification|ssh_exchange_identification"
    "|Exceeded MaxStartups|Not allowed at this time"
    "|Connection (closed|reset) by .* port"
)
# What ssh says, and what it means; ``{ssh}`` and so on stand for commands.
_COMPLAINTS = (
    (
        "HOST IDENTIFICATION HAS CHANGED",
        "host key changed: another machine answers, or it was installed anew",
        "find out which; if it is right: {forget}",
    ),
    ("REVOKED HOST KEY|marked as revoked", "host key revoked", "ask who runs the host"),
    (
        "Host key verification failed|No .* host key is known",
        "host key unknown",
        "{ssh} once, to see it and accept it",
    ),
    (
        "Temporary failure in name resolution",
        _NO_SERVER,
        "name addresses, or see /etc/resolv.conf",
    ),
    ("Could not resolve hostname", *UNKNOWN_NAME[:2]),
    (
        r"Permission denied \(|Too many authentication failures",
        "key refused",
        "{copy_id}",
    ),
    ("Connection refused", "nothing answers on its ssh port", "{ssh}, or port=N"),
    (_CROWDED_WORDS, _CROWDED, "raise MaxStartups there, or see what it logs"),
    (
        "connect to host .*timed out|No route to host|Network is unreachable|is down",
        "not reached",
        "see whether it is up: {ssh}",
    ),
    ("[Tt]imed out", NO_ANSWER, "see whether it is up: {ssh}"),
    (
        "no matching .* found|Unable to negotiate",
        "its ssh server and this ssh have no method in common",
        "{ssh}, then --ssh-args",
    ),
)


class SshSpawner(Spawner):
    """Starts programs by ssh."""

    name = "ssh"

    def __init__(self, ssh_args: Sequence[str] = ()) -> None:
        self._ssh_args = tuple(ssh_args)

    def client(self, host: Host) -> list[str]:
        port = ["-p", str(host.port)] if host.port else []
        user = ["-l", host.user] if host.user else []
        # The first value that ssh is given for an option is the one it takes.
        return ["ssh", *self._ssh_args, *_SECURE, *port, *user, "--"]

    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        return [*self.client(host), host.name, shlex.join(words)]

    def leads_by_name(self, name: str) -> bool:
        # Imported where it is needed: few starts ask.
        from ronde.launch.hosts.ssh_path import ask_settings

        try:
            settings, notes = ask_settings(self.client(Host(name))[:-1], name)
            files = _CONFIGURATION.findall(notes)
            texts = [Path(file).read_text(errors="replace") for file in files]
        except (OSError, subprocess.SubprocessError):
            return False
        is_same = f"hostname {name}\n" in settings
        is_direct = not _PROXIES.search(settings)
        return is_same and is_direct and not any(map(_NAMES.search, texts))

    def explain_silence(self, host: Host) -> Failure | None:
        # Imported where it is needed: most hosts answer.
        from ronde.launch.hosts.ssh_path import explain_silence

        return explain_silence(host, self.client(host)[:-1])

    def explain(self, host: Host, exit_code: int, complaints: str) -> Failure:
        if exit_code != _FAILED:
            return explain_program(exit_code, complaints)
        ssh = shell_command(self.name, host)
        for pattern, reason, cure in _COMPLAINTS:
            if re.search(pattern, complaints):
                # As known_hosts has it.
                has_port = host.port not in {0, 22}
                known = f"[{host.name}]:{host.port}" if has_port else host.name
                advice = cure.format(
                    ssh=ssh,
                    copy_id=shlex.join(["ssh-copy-id", *ssh_destination(host)]),
                    forget=shlex.join(["ssh-keygen", "-R", known]),
                )
                return Failure(reason, advice, reason in (_NO_SERVER, _CROWDED))
        return Failure(f"ssh failed: {last_line(complaints) or 'no output'}", ssh)
