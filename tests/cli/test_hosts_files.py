import re

import pytest
from hypothesis import given, strategies as st

from ronde.errors import UsageError
from ronde.launch import SLOTS_OPEN, Host, parse_hostfile, parse_hosts


def read(text):
    """Return the hosts of a file without where they are said."""
    return [host._replace(named_at="") for host in parse_hostfile(text, "hosts.txt")]


DIALECTS = {
    # Horovod's, Open MPI's, MPICH's and DeepSpeed's ways to give slots
    "n1 slots=4": [Host("n1", 4)],
    "n1 slots=4 max_slots=8": [Host("n1", 4)],
    "n1 max-slots=8": [Host("n1", 8)],
    "n1:4": [Host("n1", 4)],
    "n1 slots = 2\t max_slots =\t3": [Host("n1", 2)],
    "n1": [Host("n1")],
    "n1 slots=0\nn2:0": [Host("n1", 0), Host("n2", 0)],
    # a host a line for every slot
    "n1\nn2\nn1\nn1": [Host("n1", 3), Host("n2")],
    # who, where and what
    "bob@n1:2": [Host("n1", 2, user="bob")],
    "n1 user=bob port=2222": [Host("n1", user="bob", port=2222)],
    "n1 addr=10.0.0.1\nn2 addr=fd00::2": [
        Host("n1", address="10.0.0.1"),
        Host("n2", address="fd00::2"),
    ],
    "n1 gpus=0,2": [Host("n1", 2, gpus=("0", "2"))],
    "n1 slots=1 gpus=MIG-a/1/0": [Host("n1", 1, gpus=("MIG-a/1/0",))],
    # several on one line
    "n[01-02] slots=2": [Host("n01", 2), Host("n02", 2)],
    "n1 , n2 slots=2": [Host("n1", 2), Host("n2", 2)],
    "n1:1,n2:2": [Host("n1", 1), Host("n2", 2)],
    # IPv6
    "::1": [Host("::1")],
    "fd00::2:4": [Host("fd00::2:4")],
    "[fd00::2]:4": [Host("fd00::2", 4)],
    "bob@[fd00::2]:4": [Host("fd00::2", 4, user="bob")],
    "fe80::1%eth0": [Host("fe80::1%eth0")],
    "fd00::[1-2] slots=2": [Host("fd00::1", 2), Host("fd00::2", 2)],
    # what is no host
    "\n# c\n  # c\n// c\nn1 # c\nn2 slots=2 // c\n\n": [Host("n1"), Host("n2", 2)],
    "\ufeffn1 slots=2\r\n\r\nn2\r\n": [Host("n1", 2), Host("n2")],
}


@pytest.mark.parametrize(("text", "hosts"), DIALECTS.items())
def test_host_files_as_other_launchers_have_them(text, hosts) -> None:
    assert read(text) == hosts


def test_a_host_knows_its_line() -> None:
    hosts = parse_hostfile("# all\nn1\n\nn[2-3]\n", "hosts.txt")
    assert [host.named_at for host in hosts] == [
        *("hosts.txt line 2", "hosts.txt line 4", "hosts.txt line 4")
    ]


REFUSED = {
    "": "hosts.txt names no host. Write a line such as n1 slots=4 for each",
    "# none\n\n": "hosts.txt names no host",
    "n1\nn2 slots=abc": "line 2, column 10: slots must be a whole number from 0 to "
    "65536, got 'abc'",
    "n1 slots=2, max_slots=3": "column 10: slots must be a whole number from 0 to 65536"
    ", got '2,'",
    "n1 slots=-1": "got '-1'",
    "n1 slots=\u0662": "got '\u0662'",
    "n1 slots=": "column 10: slots must be a whole number from 0 to 65536, got ''",
    "n1:x": "slots of n1 must be a whole number from 0 to 65536, got 'x'",
    "n1 slots=4 max_slots=3": "column 22: max_slots must be at least the slots, got 3 "
    "for 4",
    "n1 SLOTS=2": "column 4: a key must be one of slots, count, cpu, max_slots, "
    "max-slots, port, addr, user, gpus, got 'SLOTS'. Type: slots=",
    "n1 binding=user:0": "got 'binding'",
    "n1 4": "column 4: expected key=value after the host, without blanks in the value, "
    "got '4'. Type: slots=4",
    "n1 slots=2 ; c": "got '; c'",
    "n1 gpus=0, 2": "column 12: expected key=value after the host",
    "n1 gpus=0,0": "got '0,0'. Type: gpus=0,2",
    "n1 port=0": "column 9: port must be a whole number from 1 to 65535, got '0'",
    "n1 addr=n2": "column 9: addr must be the numeric address of one host, got 'n2'",
    "n1,n2 addr=10.0.0.1": "got '10.0.0.1' for 2 hosts",
    "n1 user=a;b": "a user must be a login name, got 'a;b'",
    "-o@n1": "a user must be a login name, got '-o'",
    "; c": "column 1: a host must be a name or an address, got ';'",
    "n1#c": "got 'n1#c'",
    "  -oProxyCommand=id": "line 1, column 3: a host must be a name or an address, "
    "got '-oProxyCommand=id'",
    "n\x1b1": "got 'n\\x1b1'",
    "n1\u00a0slots=2": "got 'n1\\xa0slots=2'",
    "(null)": "got '(null)'",
    "fd00::zz": "got 'fd00::zz'",
    "slots=4": "got 'slots=4'",
    "n[1-3 slots=2": "brackets must be closed and not be nested",
    ",": "names no host. Type names such as a:2,b:4",
    "fd00::[1-2]:4": "Write there: fd00::[1-2] slots=4",
    # lines and words that contradict each other
    "n1 slots=2\nn2\nn1": "hosts.txt line 1 and hosts.txt line 3: host n1 is named "
    "twice, with slots. Name it once",
    "n1\nn1 slots=2": "hosts.txt line 1 and hosts.txt line 2: ",
    "n1\nn1 port=22": "hosts.txt line 1 and hosts.txt line 2: ",
    "n[1,1] slots=2": "hosts.txt line 1: host n1 is named twice",
    "n1:2 slots=2": "slots must be given once, got n1:2 and slots=2",
    "n1 slots=2 count=2": "slots must be given once, got slots=2 and count=2",
    "u@n1 user=u": "user must be given once, got u@ and user=u",
}


@pytest.mark.parametrize(("text", "said"), REFUSED.items())
def test_malformed_host_files_are_refused(text, said) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        parse_hostfile(text, "hosts.txt")
    message = str(caught.value)
    assert message.startswith("hosts.txt ")
    assert re.search(r"\. [A-Z]|Write there", message), "no cure"


@given(st.text("n1[]-,:=# \t\r\n/@%.;slotaduge\ufeff") | st.text())
def test_no_text_breaks_the_reader(text) -> None:
    try:
        hosts = parse_hostfile(text, "f")
    except UsageError:
        return
    assert hosts
    assert len({host.name for host in hosts}) == len(hosts)
    for host in hosts:
        assert re.fullmatch(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]*", host.name)


NAMES = st.from_regex(
    r"[a-z0-9][a-z0-9.-]{0,8}", fullmatch=True
) | st.ip_addresses().map(str)
WORDS = st.from_regex(r"[a-z][a-z0-9_.-]{0,5}", fullmatch=True)
HOSTS = st.builds(
    Host,
    name=NAMES,
    slots=st.just(SLOTS_OPEN) | st.integers(0, 999),
    user=st.just("") | WORDS,
    port=st.just(0) | st.integers(1, 65535),
    address=st.just("") | st.ip_addresses().map(str),
    gpus=st.lists(st.integers(0, 99).map(str), unique=True, max_size=3).map(tuple),
    named_at=st.just(""),
)


@st.composite
def written(draw, host):
    """Write a host in one of the ways there are."""
    name, pairs = host.name, []
    if host.slots != SLOTS_OPEN:
        key = draw(st.sampled_from(["", "slots", "count", "cpu", "max_slots"]))
        if key:
            pairs.append((key, host.slots))
        else:
            name = f"[{name}]" if ":" in name else name
            name += f":{host.slots}"
    if host.user and draw(st.booleans()):
        name = f"{host.user}@{name}"
    elif host.user:
        pairs.append(("user", host.user))
    pairs += [("port", host.port)] * bool(host.port)
    pairs += [("addr", host.address)] * bool(host.address)
    pairs += [("gpus", ",".join(host.gpus))] * bool(host.gpus)
    blank = st.text(" \t", max_size=2)
    words = [
        f" {draw(blank)}{key}{draw(blank)}={draw(blank)}{value}"
        for key, value in draw(st.permutations(pairs))
    ]
    comment = draw(st.sampled_from(["", "  # n9 slots=1", "\t// n9"]))
    return f"{draw(blank)}{name}{''.join(words)}{draw(blank)}{comment}"


@given(
    st.data(),
    st.lists(HOSTS, min_size=1, max_size=5, unique_by=lambda host: host.name),
    st.sampled_from(["\n", "\r\n", "\n\n# n9 slots=1\n"]),
)
def test_any_written_host_is_read_back(data, hosts, between) -> None:
    lines = [data.draw(written(host)) for host in hosts]
    expected = [
        host._replace(slots=len(host.gpus))
        if host.gpus and host.slots == SLOTS_OPEN
        else host
        for host in hosts
    ]
    assert read(between.join(lines)) == expected


SHORT_HOSTS = {
    "a:2,b:4": [Host("a", 2), Host("b", 4)],
    "a,b:2": [Host("a"), Host("b", 2)],
    "a,a,b,a": [Host("a", 3), Host("b")],
    "bob@n[1-2]:2,[fd00::2]:3,fd00::3": [
        Host("n1", 2, user="bob"),
        Host("n2", 2, user="bob"),
        Host("fd00::2", 3),
        Host("fd00::3"),
    ],
    " a:1, b:0,": [Host("a", 1), Host("b", 0)],
}


@pytest.mark.parametrize(("text", "hosts"), SHORT_HOSTS.items())
def test_hosts_in_one_word(text, hosts) -> None:
    assert parse_hosts(text) == tuple(host._replace(named_at="-H") for host in hosts)


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "": "-H names no host. Type names such as a:2,b:4",
        "a:-1": "-H: slots of a must be a whole number from 0 to 65536, got '-1'",
        "a b": "-H: a host must be a name or an address, got 'a b'",
        ":2": "-H: a host must be a name or an address, got ''",
        "a:2,b:1,a:2": "-H: host a is named twice, with slots",
    }.items(),
)
def test_malformed_host_lists_are_refused(text, said) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_hosts(text)
