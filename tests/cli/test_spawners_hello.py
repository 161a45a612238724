"""The first words of a host: found in any noise, and believed only when well formed."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import ronde
from ronde.errors import LaunchError
from ronde.launch import MAX_HELLO_BYTES, MAX_NOISE_BYTES, HelloReader, Host

SENTINEL = b"b5d0f3a1c2e4967880716253f4e5d6c7a9"
SAID = {
    "python": "{}.{}.{}".format(*sys.version_info[:3]),
    "executable": "/usr/bin/python3",
    "ronde": ronde.__version__,
    "import_error": "",
}
HOST = Host("node2", user="ada")
# Noise that holds pieces of the sentinel, and lines.
NOISE = st.lists(
    st.one_of(
        st.binary(max_size=50),
        st.sampled_from([SENTINEL[:-1], SENTINEL[:16], b"\n", b"{}\n"]),
    ),
    max_size=8,
).map(b"".join)


def encoded(said):
    return json.dumps(said).encode() + b"\n"


def feed(hello_reader, data, cuts):
    """Feed the data in pieces; return what came behind the greeting, or None."""
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[a:b] for a, b in pairwise(places)]
    for number, piece in enumerate(pieces):
        rest = hello_reader.feed(piece)
        if rest is not None:
            return rest + b"".join(pieces[number + 1 :])
    return None


CUTS = st.lists(st.integers(0, 1000), max_size=10)


@given(noise=NOISE, after=st.binary(max_size=100), cuts=CUTS)
def test_a_greeting_is_found_however_it_comes(noise, after, cuts):
    hello_reader = HelloReader("ssh", SENTINEL)
    data = noise + SENTINEL + encoded(SAID) + after
    before = data.partition(SENTINEL)[0]
    assert feed(hello_reader, data, cuts) == after
    assert hello_reader.noise == before
    assert hello_reader.found is not None
    assert hello_reader.found.executable == SAID["executable"]


@given(words=st.binary(max_size=200), cuts=CUTS)
def test_malformed_hellos_are_refused(words, cuts):
    hello_reader = HelloReader("ssh", SENTINEL)
    with pytest.raises(LaunchError, match="hello from the remote Python "):
        feed(hello_reader, SENTINEL + words.replace(b"\n", b"") + b"\n", cuts)
    assert hello_reader.found is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*SAID, "x"]), inner, max_size=5)
    ),
    max_leaves=8,
)


def test_a_greeting_that_is_deep_or_endless_is_refused():
    with pytest.raises(LaunchError, match="is not JSON"):
        HelloReader("ssh", SENTINEL).feed(SENTINEL + b"[" * 3_000 + b"\n")
    hello_reader = HelloReader("ssh", SENTINEL)
    assert hello_reader.feed(SENTINEL + b"x" * MAX_HELLO_BYTES) is None
    with pytest.raises(LaunchError, match="longer than"):
        hello_reader.feed(b"x")


def test_endless_noise_takes_no_more_than_its_share():
    hello_reader = HelloReader("ssh", SENTINEL)
    for _ in range(40):
        assert hello_reader.feed(b"n" * 10_000) is None
    assert hello_reader.feed(b"last\n" + SENTINEL[:10]) is None
    assert len(hello_reader.noise) == MAX_NOISE_BYTES
    assert hello_reader.feed(SENTINEL[10:] + encoded(SAID) + b"!") == b"!"
    assert hello_reader.noise.endswith(b"nnn" + b"last\n")
    assert len(hello_reader.noise) <= MAX_NOISE_BYTES


def met(**changes):
    hello_reader = HelloReader("ssh", SENTINEL)
    hello_reader.feed(SENTINEL + encoded(SAID | changes))
    assert hello_reader.found is not None
    return hello_reader.found


# From no index, which may have none.
INSTALL = (
    f"tar -C {Path(ronde.__file__).parents[1]} -cz ronde | ssh ada@node2 'tar -xz -C "
    '"$(/usr/bin/python3 -c "import site; print(*site.getsitepackages()[:1])")"\''
)


@pytest.mark.parametrize(
    ("changes", "reason", "cure"),
    [
        (
            {
                "ronde": "",
                "import_error": "ModuleNotFoundError: No module named 'ronde'",
            },
            "ronde is missing for /usr/bin/python3",
            INSTALL,
        ),
        (
            {"ronde": "9.9"},
            f"its ronde is 9.9, here it is {ronde.__version__}",
            INSTALL,
        ),
        (
            {"ronde": "", "import_error": "SyntaxError: no\x1b[2J"},
            "its ronde cannot be imported: SyntaxError: no[2J",
            INSTALL,
        ),
    ],
)
def test_problems_of_a_remote_python_have_a_remedy(changes, reason, cure):
    failure = met(**changes).problem(HOST, "ssh")
    assert failure is not None
    assert (failure.reason, failure.cure) == (reason, cure)


def test_another_python_is_told_before_its_ronde():
    failure = met(python="3.6.15", ronde="", import_error="SyntaxError").problem(
        HOST, "ssh"
    )
    assert failure is not None
    assert failure.reason.startswith("its Python is 3.6.15 (/usr/bin/python3), here")
    assert "--python" in failure.cure
