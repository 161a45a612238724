"""Split files of NCCL's log into messages, and match each with its known form.

Files are read in pieces, to bound the memory. Ranks that write into the same file may
interrupt each other's lines. Every message begins with ``host:pid:thread [device] NCCL
INFO``; text in front is the head of an interrupted message. Its tail may follow on a
line of its own. Both are joined if the result is a message of a known form.
"""

import gzip
import io
import re
import zlib
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import BinaryIO, NamedTuple, cast

from ronde.errors import UsageError
from ronde.topology.nccl_log.failures import FailureReader
from ronde.topology.nccl_log.watchdog import WatchdogReader

MAX_LINE_CHARS = 1 << 16
"""The rest of longer lines is ignored; NCCL cuts its own lines at 1,023 characters."""

_INFO, _WARN = " NCCL INFO ", " NCCL WARN "
_MARK = (
    r"(?P<pid>\d{1,10}):(?P<thread>\d{1,10}) \[-?\d{1,4}\] "
    r"(?:(?P<source>\S{1,300}:\d+) (?:\([^()\s]{1,200}\) )?)?NCCL (?P<level>INFO|WARN) "
)
# Prefixes of launchers, loggers and terminals.
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
# A possible beginning of a mark, with the host in front of it.
_MARK_BEGUN = re.compile(
    r"[A-Za-z0-9][\w.-]{0,254}"
    r"(?::|:\d{1,10}(?::\d{0,10}(?: \[?-?\d{0,4}\]?(?: \S{0,300})?)?)?)?"
)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Ray's note about lines that it folds.
_REPEATED = re.compile(r" *\[repeated \d{1,9}x across [a-z ]{1,20}\].*")

_OF_FAILURES = "rror", "xit", "local_rank", "Traceback", "File", "ignored", "restart"
_PIECE_BYTES = 1 << 20
_MAX_PREFIXES = 1 << 16
_HEAD_LASTS = 200  # Lines.


class NcclMessage(NamedTuple):
    """A message with its prefix parsed: host, process, thread and severity."""

    host: str
    pid: int
    thread: int
    is_warning: bool  # It is marked ``WARN``.
    location: str  # File and line of NCCL's source; empty if unknown.
    text: str


class MessageReader:
    """Parser of a log's lines; joins messages that other lines interrupt."""

    def __init__(self) -> None:
        self.watchdog, self.failures = WatchdogReader(), FailureReader()
        self.num_lines = 0
        self.num_mended = 0  # Messages that were put together from pieces.
        self.num_lost = 0  # Pieces of messages that nothing fitted to.
        self._hosts_of_pid: dict[int, set[str]] = {}
        self._hosts: dict[str, int] = {}  # With the number of their processes.
        self._prefixes: dict[str, tuple[str, int, int, bool, str]] = {}
        # The head of a message that was cut, and the number of its line.
        self._head, self._head_line = "", 0

    def feed(self, line: str) -> list[NcclMessage]:
        self.num_lines += 1
        if "CCL" not in line and not self._head:
            is_open = self.failures.waiting or self.failures.may_go_on
            if is_open or any(word in line for word in _OF_FAILURES):
                self.failures.feed(line)
            return []
        # Most lines repeat a prefix: look it up, which is far cheaper.
        prefix, _, text = line.partition(_INFO)
        known = self._prefixes.get(prefix)
        is_odd = " NCCL " in text or "\r" in text or "\x1b" in text or "[rep" in text
        if known and not is_odd and "Group" not in text:
            return [NcclMessage(*known, text.rstrip(" "))]
        if "Group" in line or "Work" in line:
            self.watchdog.feed(line)
        if "rror: " in line:
            self.failures.feed(line)
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        # Progress bars write over their own line.
        parts = line.rstrip("\r").split("\r")
        return [each for part in parts for each in self._feed_part(part)]

    def end(self) -> None:
        """End a file; an interrupted message without its tail is dropped."""
        # A head without a prefix was probably no message.
        self.num_lost += "NCCL" in self._head
        self._head = ""

    def _feed_part(self, line: str) -> list[NcclMessage]:
        if self.num_lines - self._head_line > _HEAD_LASTS:
            self.end()
        message = _read_whole(line)
        if message is None:
            return list(self._split(line[:MAX_LINE_CHARS]))
        host, pid = message[:2]
        hosts = self._hosts_of_pid.setdefault(pid, set())
        if host not in hosts:
            # If the host ends with another host of this process, the rest is the tail
            # of a cut line, unless the other host is rare, and cut itself.
            end = _longest_end(host[1:], hosts)
            if end and self._hosts.get(host, 0) < self._hosts[end] - 1:
                return list(self._split(line[:MAX_LINE_CHARS]))
            hosts.add(host)
            self._hosts[host] = self._hosts.get(host, 0) + 1
        if not message.is_warning:
            if len(self._prefixes) >= _MAX_PREFIXES:
                # Prefixes with times never repeat.
                self._prefixes.clear()
            self._prefixes[line.partition(_INFO)[0]] = message[:-1]
        return [message]

    def _split(self, line: str) -> Iterator[NcclMessage]:
        """Yield the messages of a line that contains several prefixes."""
        marks = list(_ANYWHERE.finditer(line))
        hosts: list[str] = []
        for mark in marks:
            at = mark.start()
            found = _HOST_END.search(line, max(0, at - 255), at)
            token = found[0] if found else ""
            own = self._hosts_of_pid.get(int(mark["pid"]), ())
            host = _longest_end(token, own) or _longest_end(token, self._hosts) or token
            hosts.append(host)
        starts = [m.start() - len(host) for m, host in zip(marks, hosts, strict=True)]
        yield from self._lead(line[: starts[0]] if marks else line, is_cut=bool(marks))
        for index, host in enumerate(hosts):
            if host and index == len(hosts) - 1:
                yield _message(host, marks[-1], line[marks[-1].end() :])
            elif host and hosts[index + 1] in self._hosts:
                self._hold(line[starts[index] : starts[index + 1]])
            elif host:
                # It is unknown where this one ends and the next host begins.
                self.num_lost += 1

    def _lead(self, lead: str, *, is_cut: bool) -> Iterator[NcclMessage]:
        """Yield the message, if any, that a piece without a prefix completes."""
        if is_cut and (match := _BEFORE_ALONE.match(lead)):
            # Leading blanks belong to the piece.
            lead = lead if match[0].isspace() else lead[match.end() :]
        if not lead.strip():
            return
        if message := self._join(lead):
            yield message
        elif is_cut:
            self._hold(lead)

    def _join(self, tail: str) -> NcclMessage | None:
        message = _read_whole(self._head + tail) if self._head else None
        if message is None or message.host not in self._hosts or message.is_warning:
            return None
        if recognise(message.text) is None:
            return None
        self._head = ""
        self.num_mended += 1
        return message

    def _hold(self, head: str) -> None:
        # Other programs write other text.
        if "NCCL" in head or _MARK_BEGUN.fullmatch(head):
            self.end()
            self._head, self._head_line = head, self.num_lines


def _longest_end(token: str, hosts: Container[str]) -> str:
    """Return the longest known host name that is a suffix of a word, or ""."""
    ends = (token[start:] for start in range(len(token)))
    return next((end for end in ends if end in hosts), "")


def _message(host: str, mark: re.Match[str], text: str) -> NcclMessage:
    pid, thread, location, level = mark.group("pid", "thread", "source", "level")
    text = text.rstrip(" ")
    if "[repeated " in text:
        text = _REPEATED.sub("", text)
    return NcclMessage(
        host, int(pid), int(thread), level == "WARN", location or "", text
    )


def _read_whole(text: str) -> NcclMessage | None:
    """Return the message of a line with exactly one prefix, else None."""
    match = _CLEAN.match(text)
    if match is None or _INFO in (rest := text[match.end() :]) or _WARN in rest:
        return None
    return _message(match[1], match, rest)


# Each line: the first word or group of a message, its topic, and the whole message;
# behind => its report, if not its first group. Indented lines go on with the one
# above. @ stands for a fragment below.
_FORMS = r"""
NCCL versions NCCL version (@VERSION)(?: .*)?
RCCL versions RCCL version (?:: )?(@VERSION)(?: .*)?
cudaDriverVersion drivers cudaDriverVersion (\d+)
Bootstrap bootstrap Bootstrap ?: Using ?(?:\[\d+\])?([^\s:]+):\S*
Using networks Using network (\S.*?)
NET/ found NET/(IB\w*) ?: Using@DEVICES ?(?:\[RO\])?; OOB \S+
NET/ found NET/(Socket) ?: Using@DEVICES
NET/ candidates NET/(IB\w*) ?: No device found\. => {} none
NET/ gdr NET/(.+?) ?: GPU Direct RDMA (Enabled|Disabled) for HCA \d+ '(.+)'
    => {0} {2} {1}
NET/ candidates NET/OFI Selected [Pp]rovider is ([\w;.-]+)(?:, fabric is \S+)?
    [ ]\(found (\d+) nics\) => Libfabric {} ({} adapters)
NET/ plugins (NET/Plugin ?: .+|NET/OFI .+)
=== tree_root === System : maxBw [\d.]+ totalBw [\d.]+ ===()
=== tree_root ={30,}()
+ tree_link ( *)\+ ([A-Z0-9]{3,4})\[([\d.]+)\] - (@ELEMENT)
    (?: \((?:(?:[0-9a-f-]*/)*([\d.]+)|[0-9a-f./-]*)\))?(?: \[MLOPart \d+\])?
/ paths (@ELEMENT) :((?:@ELEMENT \(.*)?)
/ tree_root (@ELEMENT)(?: \([0-9a-f./-]*\))?
Pattern nothing Pattern \d+, crossNic \d+, nChannels \d+, bw .+, sameChannels \d+
Channel edge Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\]
    [ ](?:\[(send|receive)\] )?via (@TRANSPORT)(?: comm \S+ nRanks \d+)?
Channel nothing Channel \d+/\d+ :(?: +\d+)+
CollNet edge CollNet \d+/\d+ : (\d+)() \[(send|receive)\] via
    [ ](COLLNET/[\w.-]+)/-?\d+(?:/GDRDMA)?(?:/Shared)?
P2P p2p (P2P is disabled between connected GPUs \d+ and \d+)\..*
Could p2p (Could not enable P2P between dev \d+\(=[0-9a-f]+\) and dev \d+)\(=.*
Call retries Call to connect returned (.+), retrying
retry retries \w+: connect to (\S+ returned .+), retrying \(\d+/\d+\)
    [ ]after sleep for \d+ msec
NVLS nvls NVLS multicast support is ((?:not )?available on dev \d+)
    (?: \(NVLS_NCHANNELS -?\d+\))?
Failed nvls Failed to bind NVLink SHARP \(NVLS\) Multicast memory of size \d+ :
    [ ](CUDA error \d+ '.*?').* => lost: {}
Failed plugins (Failed to open libibverbs\.so\S*)
MNNVL fabric MNNVL busId 0x([0-9a-f]+) fabric UUID ([0-9a-f]+\.[0-9a-f]+)
    [ ]cliqueId 0x([0-9a-f]+) state (\d+) healthMask 0x([0-9a-f]+)
    => {} {} {} {} {}
comm layout comm (0x[0-9a-f]+) rank (\d+) nRanks (\d+) nNodes (\d+) localRanks \d+
    [ ]localRank \d+ MNNVL (\d)
init init (?:\[Rank \d+\] )?(?:\w+ )?comm (0x[0-9a-f]+) rank (\d+) nranks (\d+)
    [ ]cudaDev \d+(?: nvmlDev \d+)? busId ([0-9a-f]+)
    (?: parent (0x[0-9a-f]+|\(nil\)) (?:(?:splitCount|childCount) (\d+) )?
    color (-?\d+) key -?\d+)?(?: commId (0x[0-9a-f]+))?
    (?: localSize \d+)?(?: used \d+ bytes)?(?: on core -?\d+)?
    [ ]?- Init (START|COMPLETE)
Init timings Init timings(?: - \w+)?: rank (\d+) nranks (\d+) total ([\d.]+)
    [ ]\(([a-z]+ -?[\d.]+(?:, [a-z]+ -?[\d.]+)*)\)
Connected nothing Connected all rings, use ring PXN \d+ GDR \d+
digit channels (\d+) coll channels, (?:\d+ collnet channels, )?(\d+) nvls channels,
    [ ](\d+) p2p channels, \d+ p2p channels per peer
comm: channels comm:0x[0-9a-f]+, nRanks:\d+, nNodes:\d+, coll channels:(\d+)
    [ ]collnet channels:\d+, nvls channels:(\d+), p2p channels:(\d+),
    [ ]p2p channels per peer:\d+
tuning tuning (\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)
    [ ]channel\{Lo\.\.Hi\}=\{\d+\.\.\d+\}
setting settings ([NR]CCL_[A-Z0-9_]+) set (?:by environment )?to (\S(?:.*?\S)??)\.?
    => {}={}
"""
_FRAGMENTS = {
    "@VERSION": r"\d+\.\d+\.\d+\w*(?:\+(?:cuda|hip)[\d.]+)?(?:-\S+)?",
    # Adapters that NCCL takes for one stand in braces.
    "@DEVICES": r"((?: ?\[\d+\](?:=\{[^{}]+\}|[^\s\[]+))+)",
    # Capitals before 2.21.
    "@ELEMENT": r"[A-Z]{3}/[0-9a-fA-F]+(?:-[0-9a-f]+)?",
    "@TRANSPORT": r"P2P/direct pointer(?:/read)?|P2P/[\w/\[\]]+|SHM/[\w/]+|"
    r"NET/[\w.-]+(?: [\w.-]+)?/-?\d+(?:\(\d+\))?(?:/GDRDMA(?:\(PCI\))?)?(?:/Shared)?",
    # Whole numbers of limited length; cut ones do not match.
    r"[\d.]+": r"\d+(?:\.\d+)?",
    r"\d+": r"\d{1,18}",
}


_Form = tuple[str, str, Callable[[str], re.Match[str] | None]]


def _compile_forms() -> dict[str, list[_Form]]:
    text = _FORMS.strip().replace("\n    ", "")
    for name, fragment in _FRAGMENTS.items():
        text = text.replace(name, fragment)
    # Frequent messages that are not read.
    found: dict[str, list[_Form]] = {"Ring": [], "Trees": []}
    for line in text.split("\n"):
        word, topic, form = line.split(" ", 2)
        form, _, words = form.partition("=>")
        match = re.compile(form.rstrip(" ")).fullmatch
        found.setdefault(word, []).append((topic, words.strip(), match))
    found["comm"] += found["init"]
    return found


_PATTERNS = _compile_forms()


def recognise(text: str) -> tuple[str, str, re.Match[str]] | None:
    """Return topic, words and match of a message of a known form."""
    # Most begin with a known word; strip only the others.
    forms = _PATTERNS.get(text[: text.find(" ")])
    if forms is None:
        word = text.lstrip(" ").partition(" ")[0].rstrip(":")
        forms = _PATTERNS.get(word) or _PATTERNS.get(_group_of(word, text), [])
    for topic, words, fullmatch in forms:
        if match := fullmatch(text):
            return topic, words, match
    return None


def _group_of(word: str, text: str) -> str:
    if text.endswith(("Init COMPLETE", "Init START")):
        return "init"
    if " connect to " in text:
        return "retry"
    if word[:1].isdigit():
        return "digit"
    for beginning in ("NCCL_", "RCCL_", "NET/", "===", "comm:"):
        if word.startswith(beginning) and " :GPU/" not in text:
            return "setting" if beginning[1:] == "CCL_" else beginning
    return "/" if word[3:4] == "/" else "tuning"


def is_nccl_log(text: str) -> bool:
    """Return True for output of NCCL, or of torch about a time-out or failure.

    Reports of signals and of Slurm alone do not count, as any program may cause them.
    """
    watchdog, failures = WatchdogReader(), FailureReader()
    for line in text.splitlines():
        watchdog.feed(line)
        failures.feed(line)
    has_raised = not all(each.pid or each.host for each in failures.report())
    return watchdog.num_lines > 0 or has_raised or bool(_ANYWHERE.search(text))


def read_lines(file: BinaryIO) -> Iterator[str]:
    """Yield lines without their ends; long ones are cut.

    Raises:
        OSError: The file cannot be read.
        UsageError: It is packed, and damaged or cut.
    """
    whole = io.BufferedReader(cast("io.RawIOBase", file))
    is_packed = whole.peek(2).startswith(b"\x1f\x8b")
    source = gzip.GzipFile(fileobj=whole) if is_packed else whole
    rest = ""
    try:
        for piece in iter(partial(source.read, _PIECE_BYTES), b""):
            # Bytes that are no UTF-8, or cut by a piece's end, become replacement
            # characters; no field that is read here has any.
            *lines, rest = (rest + piece.decode(errors="replace")).split("\n")
            yield from lines
            rest = rest[:MAX_LINE_CHARS]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        why = "it is truncated" if isinstance(error, EOFError) else error
        raise UsageError(
            f"cannot unpack the log: {why}. Give the part that can be unpacked: "
            "zcat FILE > nccl.log"
        ) from None
    finally:
        whole.detach()  # The file is the caller's to close.
    if rest:
        yield rest
