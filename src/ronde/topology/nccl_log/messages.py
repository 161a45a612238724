"""Lines of a log -> NCCL's messages.

Ranks write into one file at once, so lines break inside each other. Where that happened
is seen by the prefix that every message has: ``host:pid:thread [device] NCCL INFO``.
What stood before it on the line is the head of a message that was cut; its tail may
follow on a line of its own, and is put to it where exactly one head makes sense of it.
"""

import re
from collections.abc import Container, Iterator
from typing import NamedTuple

from ronde.topology.nccl_log.patterns import recognise

MAX_LINE_CHARS = 1 << 16
"""Of a longer line the rest is not looked at; NCCL cuts its own at 1,023."""

_INFO = " NCCL INFO "
_WARN = " NCCL WARN "
_MARK = (
    r"(\d{1,10}):(\d{1,10}) \[(-?\d{1,4})\] "
    r"(?:(\S{1,300}:\d+) (?:\([^()\s]{1,200}\) )?)?NCCL (INFO|WARN) "
)
# What launchers, loggers and terminals put before a line.
_BEFORE = (
    r" {0,40}(?:\[[^\]\n]{1,300}\](?:<std(?:out|err)>)?:?[ \t]?|\([^()\n]{1,80}\) |"
    r"\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)?[ \t]|"
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,255} \S{1,64}\[\d{1,10}\]: |"
    r"std(?:out|err) [FP] |[\w./-]{1,253}(?:\|\d{1,6})?:[ \t]|[\w./-]{1,128} {1,40}\| )"
    r"{0,4} {0,40}"
)
_CLEAN = re.compile(rf"{_BEFORE}([A-Za-z0-9][\w.-]{{0,254}}):{_MARK}")
_ANYWHERE = re.compile(f":{_MARK}")
_BEFORE_ALONE = re.compile(_BEFORE)
_HOST_END = re.compile(r"[A-Za-z0-9][\w.-]*$")
# What may be the beginning of a mark, the host in front of it included.
_MARK_BEGUN = re.compile(
    r"[A-Za-z0-9][\w.-]{0,254}"
    r"(?::|:\d{1,10}(?::\d{0,10}(?: \[?-?\d{0,4}\]?(?: \S{0,300})?)?)?)?"
)
_LOOSE_VERSION = re.compile(rf"{_BEFORE}([NR]CCL version (?:: )?\d\S*)")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Ray's word for lines of other processes that it keeps to itself.
_REPEATED = re.compile(r" *\[repeated \d{1,9}x across [a-z ]{1,20}\].*")

_MAX_HEADS = 32
_MAX_PIDS = 1 << 20
_MAX_PREFIXES = 1 << 16
_HEAD_LASTS_LINES = 200
_MAX_HEAD_CHARS = 2048


class NcclMessage(NamedTuple):
    """What one process said at once."""

    host: str  # Name of its host; empty for a version that names none.
    pid: int  # Number of its process.
    thread: int  # Number of the thread.
    is_warning: bool  # It is marked ``WARN``.
    place: str  # File and line of NCCL's source; empty where not told.
    text: str  # What it says.


class MessageReader:
    """Takes lines one by one and returns the messages in them.

    Attributes:
        num_lines: Taken so far.
        num_mended: Messages that were put together from pieces.
        num_lost: Pieces of messages that nothing fitted to.
    """

    def __init__(self) -> None:
        self.num_lines = 0
        self.num_mended = 0
        self.num_lost = 0
        self._hosts_of_pid: dict[int, set[str]] = {}
        # With the number of their processes.
        self._hosts: dict[str, int] = {}
        self._prefixes: dict[str, tuple[str, int, int]] = {}
        # Heads of messages that were cut, each with the line where it stood.
        self._heads: list[tuple[int, str]] = []

    def feed(self, line: str) -> list[NcclMessage]:
        """Return the messages that a line makes whole."""
        self.num_lines += 1
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        line = line.rstrip("\r")
        if "\r" not in line:
            return self._feed_part(line)
        # Progress bars write over their own line.
        return [
            message for part in line.split("\r") for message in self._feed_part(part)
        ]

    def _feed_part(self, line: str) -> list[NcclMessage]:
        # Most lines begin like one before them, and looking that up is far cheaper.
        prefix, mark, text = line.partition(_INFO)
        known = self._prefixes.get(prefix)
        if known is not None and _INFO not in text and _WARN not in text:
            host, pid, thread = known
            return [NcclMessage(host, pid, thread, False, "", _plain(text))]  # noqa: FBT003
        return self._feed_new(line, prefix if mark else "")

    def _feed_new(self, line: str, prefix: str) -> list[NcclMessage]:
        """Return the messages of a line that does not begin like one before it."""
        match = _CLEAN.match(line)
        if match is not None and not _has_mark(line, match.end()):
            message = _message(match.group(1), match, line[match.end() :], 2)
            if self._is_known(message):
                self._learn(prefix, message)
                return [message]
            if self._heads and (mended := self._join_host(line)):
                return [mended]
            if self._is_own(message.host, message.pid):
                self._learn(prefix, message)
                return [message]
        if match is None and not self._heads and "CCL" not in line:
            return []
        return list(self._split(line[:MAX_LINE_CHARS]))

    def end(self) -> None:
        """Count the heads that are left as lost."""
        self._forget(len(self._heads))

    def _learn(self, prefix: str, message: NcclMessage) -> None:
        if prefix and not message.is_warning:
            if len(self._prefixes) >= _MAX_PREFIXES:
                # Times of day stand in them: no two are alike.
                self._prefixes.clear()
            self._prefixes[prefix] = (message.host, message.pid, message.thread)

    def _is_known(self, message: NcclMessage) -> bool:
        return message.host in self._hosts_of_pid.get(message.pid, ())

    def _is_own(self, host: str, pid: int) -> bool:
        """Return whether a line begins with its host, and learn that host.

        Where the host ends with another that has this process, the rest is the tail of
        a line that was cut, unless more processes have the longer; where another ends
        with it, it was cut itself.
        """
        self._forget(self._num_old())
        hosts = self._hosts_of_pid.setdefault(pid, set())
        num_processes = self._hosts.get(host, 0)
        end = _longest_end(host, hosts)
        if end and num_processes <= self._hosts[end]:
            return False
        is_cut = self._heads and not num_processes
        if is_cut and any(known.endswith(host) for known in self._hosts):
            return False
        if len(self._hosts_of_pid) < _MAX_PIDS:
            hosts.add(host)
            self._hosts[host] = num_processes + 1
        return True

    def _own_host(self, token: str, pid: int) -> str:
        """Return the known host that a word ends with, else the word itself."""
        for hosts in (self._hosts_of_pid.get(pid, ()), self._hosts):
            if token in hosts:
                return token
            if end := _longest_end(token, hosts):
                return end
        return token

    def _split(self, line: str) -> Iterator[NcclMessage]:
        """Yield what a line is made of that broke, or that another broke into."""
        marks = list(_ANYWHERE.finditer(line))
        starts: list[int] = []
        is_sure: list[bool] = []
        for mark in marks:
            found = _HOST_END.search(line[max(0, mark.start() - 255) : mark.start()])
            token = found.group() if found else ""
            host = self._own_host(token, int(mark.group(1)))
            starts.append(mark.start() - len(host))
            is_sure.append(host in self._hosts)
        lead = line[: starts[0]] if starts else line
        yield from self._lead(lead, is_cut=bool(starts))
        for index, mark in enumerate(marks):
            host = line[starts[index] : mark.start()]
            if not host:
                continue
            if index + 1 < len(marks) and not is_sure[index + 1]:
                # Nobody knows where this one ends and the next host begins.
                self.num_lost += 1
            elif index + 1 < len(marks):
                self._hold(line[starts[index] : starts[index + 1]])
            else:
                yield _message(host, mark, line[mark.end() :], 1)

    def _lead(self, lead: str, *, is_cut: bool) -> Iterator[NcclMessage]:
        """Yield what a piece without a prefix of its own completes."""
        lead = _without_prefix(lead) if is_cut else lead
        if not lead.strip():
            return
        if version := _LOOSE_VERSION.fullmatch(lead):
            yield NcclMessage(
                "", 0, 0, is_warning=False, place="", text=version.group(1)
            )
        elif message := self._join(lead):
            yield message
        elif is_cut:
            self._hold(lead)

    def _join(self, tail: str) -> NcclMessage | None:
        """Return the message that a tail completes, if it is one and no other."""
        self._forget(self._num_old())
        wholes = [
            (at, message)
            for at, (_, head) in enumerate(self._heads)
            if (message := _whole(head + tail)) and message.host in self._hosts
        ]
        if len({message for _, message in wholes}) != 1:
            return None
        at, message = wholes[0]
        del self._heads[at]
        self.num_mended += 1
        return message

    def _join_host(self, line: str) -> NcclMessage | None:
        """Return the message of a line that lacks the beginning of its host."""
        wholes = {
            message
            for _, head in self._heads
            if _INFO not in head
            and (message := _read_whole(head + line))
            and self._is_known(message)
        }
        if len(wholes) != 1:
            return None
        self.num_mended += 1
        return wholes.pop()

    def _hold(self, head: str) -> None:
        if "NCCL" not in head and not _MARK_BEGUN.fullmatch(head):
            # Another program spoke, and ended its line too late.
            return
        if len(head) > _MAX_HEAD_CHARS:
            self.num_lost += 1
            return
        self._heads.append((self.num_lines, head))
        self._forget(max(self._num_old(), len(self._heads) - _MAX_HEADS))

    def _num_old(self) -> int:
        oldest = self.num_lines - _HEAD_LASTS_LINES
        return sum(line < oldest for line, _ in self._heads)

    def _forget(self, num_heads: int) -> None:
        # A head that has no prefix was no message, as far as one can tell.
        self.num_lost += sum("NCCL" in head for _, head in self._heads[:num_heads])
        del self._heads[:num_heads]


def _longest_end(token: str, hosts: Container[str]) -> str:
    """Return the longest host that a longer word ends with; empty for none."""
    ends = (token[start:] for start in range(1, len(token)))
    return next((end for end in ends if end in hosts), "")


def _has_mark(line: str, start: int) -> bool:
    return line.find(_INFO, start) >= 0 or line.find(_WARN, start) >= 0


def _message(host: str, mark: re.Match[str], text: str, first: int) -> NcclMessage:
    """Return a message; ``first`` is the number of the group with the pid."""
    pid, thread, _, place, level = mark.group(*range(first, first + 5))
    return NcclMessage(
        host, int(pid), int(thread), level == "WARN", place or "", _plain(text)
    )


def _read_whole(text: str) -> NcclMessage | None:
    """Return the one message that a line is, as far as its prefix goes."""
    match = _CLEAN.match(text)
    if match is None or _has_mark(text, match.end()):
        return None
    return _message(match.group(1), match, text[match.end() :], 2)


def _whole(text: str) -> NcclMessage | None:
    """Return the message that a head and a tail make; None where they make none."""
    message = _read_whole(text)
    if message is None or message.is_warning or recognise(message.text) is None:
        return None
    return message


def _without_prefix(lead: str) -> str:
    """Return a piece without what a launcher put before it.

    Blanks alone are the piece's own: a line was cut in front of them.
    """
    match = _BEFORE_ALONE.match(lead)
    end = match.end() if match else 0
    return lead if lead[:end].isspace() else lead[end:]


def _plain(text: str) -> str:
    """Return what was said without what stands behind it."""
    text = text.rstrip(" ")
    return _REPEATED.sub("", text) if "[repeated " in text else text
