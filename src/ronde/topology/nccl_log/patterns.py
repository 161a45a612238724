"""Which of NCCL's statements a message makes.

Each form is matched whole, so that a message that was cut makes none.
"""

import re
from enum import StrEnum


class Topic(StrEnum):
    """What a statement is about."""

    VERSION = "version"
    DRIVER = "driver"
    SETTING = "setting"
    BOOTSTRAP = "bootstrap"
    NETWORK = "network"
    IB_FOUND = "ib_found"
    SOCKET_FOUND = "socket_found"
    NONE_FOUND = "none_found"
    OFI_FOUND = "ofi_found"
    PLUGIN = "plugin"
    GDR = "gdr"
    LIBRARY = "library"
    SYSTEM = "system"
    TREE_ROOT = "tree_root"
    TREE_LINK = "tree_link"
    PATHS = "paths"
    GRAPH = "graph"
    RING = "ring"
    EDGE = "edge"
    P2P_REFUSED = "p2p_refused"
    NVLS = "nvls"
    NVLS_LOST = "nvls_lost"
    MNNVL = "mnnvl"
    LAYOUT = "layout"
    CHANNELS = "channels"
    USES = "uses"
    INIT = "init"
    ABORT = "abort"
    RETRY = "retry"
    TIMINGS = "timings"
    TUNING = "tuning"
    OLD_TUNING = "old_tuning"


Statement = tuple[Topic, re.Match[str]]

# Adapters that NCCL takes for one stand in braces.
_DEVICES = r"((?: ?\[\d+\](?:=\{[^{}]+\}|[^\s\[]+))+)"
# Capitals before 2.21.
_ELEMENT = r"[A-Z]{3}/[0-9a-fA-F]+(?:-[0-9a-f]+)?"
_NET = r"NET/[\w.-]+(?: [\w.-]+)?/-?\d+(?:\(\d+\))?(?:/GDRDMA(?:\(PCI\))?)?(?:/Shared)?"
_VERSION = r"\d+\.\d+\.\d+\w*(?:\+(?:cuda|hip)[\d.]+)?(?:-\S+)?"
_TRANSPORT = rf"P2P/direct pointer(?:/read)?|P2P/[\w/\[\]]+|SHM/[\w/]+|{_NET}"
_INIT = (
    r"(?:\[Rank \d+\] )?(?:(\w+) )?comm (0x[0-9a-f]+) rank (\d+) nranks (\d+) cudaDev "
    r"(\d+)(?: nvmlDev \d+)? busId ([0-9a-f]+)(?: parent (0x[0-9a-f]+|\(nil\)) "
    r"(?:(?:splitCount|childCount) (\d+) )?color (-?\d+) key -?\d+)?"
    r"(?: commId (0x[0-9a-f]+))?"
    # AMD's library goes on so.
    r"(?: localSize \d+)?(?: used \d+ bytes)?(?: on core -?\d+)?"
    r" ?- Init (START|COMPLETE)"
)
_ABORT = (
    r"comm 0x[0-9a-f]+ rank \d+ n[rR]anks \d+ cudaDev \d+ busId [0-9a-f]+ - "
    r"Abort (?:START|COMPLETE)"
)
_RETRIES = (
    r"Call to connect returned (.+), retrying",
    r"\w+: connect to (\S+ returned .+), retrying \(\d+/\d+\) after sleep for \d+ msec",
)

_FORMS: dict[str, tuple[tuple[Topic, str], ...]] = {
    "NCCL": ((Topic.VERSION, rf"NCCL version ({_VERSION})(?: .*)?"),),
    "RCCL": ((Topic.VERSION, rf"RCCL version (?:: )?({_VERSION})(?: .*)?"),),
    "cudaDriverVersion": ((Topic.DRIVER, r"cudaDriverVersion (\d+)"),),
    "Bootstrap": ((Topic.BOOTSTRAP, r"Bootstrap ?: Using ?(?:\[\d+\])?([^\s:]+):\S*"),),
    "Using": ((Topic.NETWORK, r"Using network (\S.*?)"),),
    "NET/": (
        (Topic.IB_FOUND, rf"NET/(IB\w*) ?: Using{_DEVICES} ?(?:\[RO\])?; OOB (\S+)"),
        (Topic.SOCKET_FOUND, rf"NET/(Socket) ?: Using{_DEVICES}"),
        (Topic.NONE_FOUND, r"NET/(IB\w*) ?: No device found\."),
        (
            Topic.GDR,
            r"NET/(.+?) ?: GPU Direct RDMA (Enabled|Disabled) for HCA \d+ '(.+)'",
        ),
        (
            Topic.OFI_FOUND,
            (
                r"NET/OFI Selected [Pp]rovider is ([\w;.-]+)(?:, fabric is \S+)? "
                r"\(found (\d+) nics\)"
            ),
        ),
        (Topic.PLUGIN, r"(NET/Plugin ?: .+|NET/OFI .+)"),
    ),
    "===": (
        (Topic.SYSTEM, r"=== System : maxBw ([\d.]+) totalBw ([\d.]+) ==="),
        (Topic.SYSTEM, r"={30,}"),
    ),
    "+": (
        (
            Topic.TREE_LINK,
            (
                rf"( *)\+ ([A-Z0-9]{{3,4}})\[([\d.]+)\] - ({_ELEMENT})"
                r"(?: \([0-9a-f./-]*?([\d.]*)\))?(?: \[MLOPart \d+\])?"
            ),
        ),
    ),
    "/": (
        (Topic.PATHS, rf"({_ELEMENT}) :((?:{_ELEMENT} \(.*)?)"),
        (Topic.TREE_ROOT, rf"({_ELEMENT})(?: \([0-9a-f./-]*\))?"),
    ),
    "Pattern": (
        (
            Topic.GRAPH,
            (
                r"Pattern (\d+), crossNic \d+, nChannels (\d+), bw ([\d.]+)/([\d.]+), "
                r"type (\w+)/(\w+), sameChannels \d+"
            ),
        ),
    ),
    "Channel": (
        (
            Topic.EDGE,
            (
                r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] "
                rf"(?:\[(?:send|receive)\] )?via ({_TRANSPORT})"
                r"(?: comm \S+ nRanks \d+)?"
            ),
        ),
        (Topic.RING, r"Channel (\d+)/(\d+) :((?: +\d+)+)"),
    ),
    # Reductions in the network's switches.
    "CollNet": (
        (
            Topic.EDGE,
            (
                r"CollNet \d+/\d+ : (\d+)() \[(?:send|receive)\] via "
                r"(COLLNET/[\w.-]+)/-?\d+(?:/GDRDMA)?(?:/Shared)?"
            ),
        ),
    ),
    "P2P": (
        (
            Topic.P2P_REFUSED,
            r"(P2P is disabled between connected GPUs \d+ and \d+)\..*",
        ),
    ),
    "Could": (
        (
            Topic.P2P_REFUSED,
            r"(Could not enable P2P between dev \d+\(=[0-9a-f]+\) and dev \d+)\(=.*",
        ),
    ),
    "Call": ((Topic.RETRY, _RETRIES[0]),),
    "NVLS": (
        (
            Topic.NVLS,
            (
                r"NVLS multicast support is (not )?available on dev (\d+)"
                r"(?: \(NVLS_NCHANNELS -?\d+\))?"
            ),
        ),
    ),
    "Failed": (
        (
            Topic.NVLS_LOST,
            (
                r"Failed to bind NVLink SHARP \(NVLS\) Multicast memory of size \d+ : "
                r"(CUDA error \d+ '.*?').*"
            ),
        ),
        (Topic.LIBRARY, r"(Failed to open libibverbs\.so\S*)"),
    ),
    "MNNVL": (
        (
            Topic.MNNVL,
            (
                r"MNNVL busId 0x([0-9a-f]+) fabric UUID (\S+) cliqueId (0x[0-9a-f]+) "
                r"state (\d+) healthMask (0x[0-9a-f]+)"
            ),
        ),
    ),
    "comm": (
        (
            Topic.LAYOUT,
            (
                r"comm (0x[0-9a-f]+) rank (\d+) nRanks (\d+) nNodes (\d+) "
                r"localRanks (\d+) localRank \d+ MNNVL (\d)"
            ),
        ),
        (Topic.INIT, _INIT),
        (Topic.ABORT, _ABORT),
    ),
    "init": ((Topic.INIT, _INIT),),
    "retry": ((Topic.RETRY, _RETRIES[1]),),
    "Init": (
        (
            Topic.TIMINGS,
            (
                r"Init timings(?: - \w+)?: rank (\d+) nranks (\d+) total ([\d.]+) "
                r"\(([a-z]+ -?[\d.]+(?:, [a-z]+ -?[\d.]+)*)\)"
            ),
        ),
    ),
    "Connected": ((Topic.USES, r"Connected all rings, use ring (PXN \d+ GDR \d+)"),),
    # Of these there are many, and nothing is read from them.
    "Ring": (),
    "Trees": (),
    "digit": (
        (
            Topic.CHANNELS,
            (
                r"(\d+) coll channels, (?:\d+ collnet channels, )?(\d+) nvls channels, "
                r"(\d+) p2p channels, (\d+) p2p channels per peer"
            ),
        ),
        (Topic.OLD_TUNING, r"(\d+) Bytes -> Algo (\d+) proto (\d+) time [\d.]+"),
    ),
    # AMD's library since 2.27.
    "comm:": (
        (
            Topic.CHANNELS,
            (
                r"comm:0x[0-9a-f]+, nRanks:\d+, nNodes:\d+, coll channels:(\d+) "
                r"collnet channels:\d+, nvls channels:(\d+), p2p channels:(\d+), "
                r"p2p channels per peer:(\d+)"
            ),
        ),
    ),
    "tuning": (
        (
            Topic.TUNING,
            (
                r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel"
                r"\{Lo\.\.Hi\}=\{\d+\.\.\d+\}"
            ),
        ),
    ),
    "setting": (
        (
            Topic.SETTING,
            r"([NR]CCL_[A-Z0-9_]+) set (?:by environment )?to (\S(?:.*?\S)??)\.?",
        ),
    ),
}


def _compile(form: str) -> re.Pattern[str]:
    """Return a form that takes numbers alone that are numbers, and not too long."""
    form = form.replace(r"[\d.]+", r"\d+(?:\.\d+)?")
    return re.compile(form.replace(r"\d+", r"\d{1,18}"))


_PATTERNS = {
    word: tuple((topic, _compile(form)) for topic, form in forms)
    for word, forms in _FORMS.items()
}
_NONE: tuple[tuple[Topic, re.Pattern[str]], ...] = ()
_PATH_ITEM = _compile(rf"({_ELEMENT}) \((\d+)/([\d.]+)/(\w+)\)")


def recognise(text: str) -> Statement | None:
    """Return the statement that a message makes, if it makes a known one."""
    for topic, pattern in _patterns_for(text):
        if match := pattern.fullmatch(text):
            return topic, match
    return None


def split_paths(text: str) -> list[tuple[str, int, float, str]]:
    """Return the whole items of a line of paths: target, hops, GB/s and kind.

    NCCL cuts these lines at 1,023 characters; the item that is cut is left out.
    """
    return [
        (target, int(hops), float(gb_per_s), kind)
        for target, hops, gb_per_s, kind in _PATH_ITEM.findall(text)
    ]


def _patterns_for(text: str) -> tuple[tuple[Topic, re.Pattern[str]], ...]:
    """Return the forms that a message with this beginning may have."""
    word = text.lstrip(" ").partition(" ")[0].rstrip(":")
    known = _PATTERNS.get(word)
    return _PATTERNS.get(_group_of(word, text), _NONE) if known is None else known


def _group_of(word: str, text: str) -> str:
    """Return the name of the forms whose first word varies."""
    if text.endswith(("Init COMPLETE", "Init START")):
        return "init"
    if " connect to " in text:
        return "retry"
    if word[:1].isdigit():
        return "digit"
    by_beginning = {
        "NCCL_": "setting",
        "RCCL_": "setting",
        "NET/": "NET/",
        "===": "===",
        "comm:": "comm:",
    }
    for beginning, group in by_beginning.items():
        if word.startswith(beginning) and " :GPU/" not in text:
            return group
    return "/" if word[3:4] == "/" else "tuning"
