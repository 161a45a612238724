"""Start programs with the system's ssh and the user's ssh configuration."""

import re
import shlex
from collections.abc import Sequence

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
_SECURE = (
    "-T",  # no terminal, which would change bytes
    "-a",  # no forwarding of the user's keys
    "-x",
    *("-o", "BatchMode=yes"),  # no questions
    *("-o", "ConnectTimeout=10"),
    # Longer than the leases of controller and agent.
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=4"),
    *("-o", "ClearAllForwardings=yes"),
    # Use a shared connection if there is one, but leave none behind.
    *("-o", "ControlMaster=no"),
    # In a configuration for logins it refuses a command.
    *("-o", "RemoteCommand=none"),
)

_NO_SERVER = "no name server answers"
_CROWDED = "its ssh server takes no more connections now"
_CROWDED_WORDS = (
    "during banner exchange|kex_exchange_identification|ssh_exchange_identification"
    "|Exceeded MaxStartups|Not allowed at this time"
    "|Connection (closed|reset) by .* port"
)
# Patterns of ssh's errors, with reason and remedy; ``{ssh}`` and so on are commands.
_ERRORS = (
    (
        "HOST IDENTIFICATION HAS CHANGED",
        "host key changed: another machine answers, or it was installed anew",
        "find out which; if it is right: {forget}",
    ),
    ("REVOKED HOST KEY|marked as revoked", "host key revoked", "ask its administrator"),
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
    """Starts programs on other hosts with ssh."""

    name = "ssh"

    def __init__(self, ssh_args: Sequence[str] = ()) -> None:
        self._ssh_args = tuple(ssh_args)

    def client(self, host: Host) -> list[str]:
        port = ["-p", str(host.port)] if host.port else []
        user = ["-l", host.user] if host.user else []
        # The first value of an option wins.
        return ["ssh", *self._ssh_args, *_SECURE, *port, *user, "--"]

    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        return [*self.client(host), host.name, shlex.join(words)]

    def explain_silence(self, host: Host) -> Failure | None:
        # Imported late: most hosts answer.
        from ronde.launch.hosts.ssh_path import explain_silence

        return explain_silence(host, self.client(host)[:-1])

    def explain(self, host: Host, exit_code: int, errors: str) -> Failure:
        if exit_code != _FAILED:
            return explain_program(exit_code, errors)
        ssh = shell_command(self.name, host)
        for pattern, reason, cure in _ERRORS:
            if re.search(pattern, errors):
                # In the form of known_hosts.
                has_port = host.port not in {0, 22}
                known = f"[{host.name}]:{host.port}" if has_port else host.name
                advice = cure.format(
                    ssh=ssh,
                    copy_id=shlex.join(["ssh-copy-id", *ssh_destination(host)]),
                    forget=shlex.join(["ssh-keygen", "-R", known]),
                )
                return Failure(reason, advice, reason in (_NO_SERVER, _CROWDED))
        return Failure(f"ssh failed: {last_line(errors) or 'no output'}", ssh)
