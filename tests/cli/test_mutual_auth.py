import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st
from tests.limits import HANG_S

from ronde.errors import LaunchError, UsageError
from ronde.launch import (
    MIN_CHARACTERS,
    NodeInfo,
    decode_node_info,
    encode_message,
    make_head_tls,
    parse_endpoint,
    read_token,
    with_port,
)
from ronde.store import HandshakeData, SharedKey

GOOD = "0123456789abcdef" * 2
TOKEN = SharedKey(GOOD.encode())
MEETING = HandshakeData(b"h" * 48, b"n" * 32, b"node info")


@pytest.fixture
def token_file(tmp_path):
    def write(text, mode=0o600):
        path = tmp_path / "token"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return str(path)

    return write


def test_another_certificate_makes_another_proof():
    one, other = (
        MEETING._replace(certificate=make_head_tls().certificate) for _ in range(2)
    )
    assert TOKEN.prove(b"client", one) != TOKEN.prove(b"client", other)


@given(st.binary())
@example(encode_message(NodeInfo("node1", 2))[:-1])
@example(b'{"is": "NodeInfo", "host": "node1", "slots": true}')
@example(b'{"is": "NodeInfo", "host": "node1", "slots": 0}')
@example(b'{"is": "NodeInfo", "host": "a\\u001b[2J", "slots": 1}')
@example(b'{"is": "NodeInfo", "host": "-oProxyCommand=x", "slots": 1}')
@example(b'{"is": "Leave"}')
def test_malformed_node_info_is_refused(raw):
    with pytest.raises(LaunchError):
        decode_node_info(raw)


def test_a_good_token_is_read_and_the_line_end_is_not_part_of_it(token_file):
    with_end = read_token(token_file(GOOD + "\n"))
    assert with_end.prove(b"client", MEETING) == TOKEN.prove(b"client", MEETING)


def test_a_token_does_not_show_itself():
    shown = f"{TOKEN} {TOKEN!r}"
    assert "SharedKey" in shown
    assert GOOD not in shown


@pytest.mark.parametrize("text", ["", "x" * (MIN_CHARACTERS - 1), " " * 99])
def test_a_token_that_could_be_guessed_is_refused(token_file, text):
    with pytest.raises(UsageError, match=r"at least 32 characters, got \d+\. Make one"):
        read_token(token_file(text))


@pytest.mark.parametrize("text", [GOOD + " " + GOOD, b"\xff" * 64, "x" * 5000])
def test_a_token_with_blanks_or_other_bytes_is_refused(token_file, text):
    with pytest.raises(UsageError, match="printable ASCII"):
        read_token(token_file(text))


@pytest.mark.parametrize("mode", [0o604, 0o602])
def test_a_token_that_every_user_can_read_or_write_is_refused(token_file, mode):
    path = token_file(GOOD, mode)
    with pytest.raises(UsageError, match=rf"\(mode {mode:04o}\)\. Type: chmod 600"):
        read_token(path)


def test_a_token_comes_through_standard_input():
    code = (
        "from ronde.launch import read_token;"
        "from ronde.store import HandshakeData;"
        "print(read_token('-').prove(b'', HandshakeData(b'', b'')).hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=GOOD + "\n",
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert done.stdout.strip() == TOKEN.prove(b"", HandshakeData(b"", b"")).hex()


def test_a_certificate_is_of_one_job_and_its_key_does_not_stay_open():
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert make_head_tls().certificate != make_head_tls().certificate
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_head_names_a_missing_package():
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from ronde.errors import UsageError\n"
        "from ronde.launch import make_head_tls, make_node_context\n"
        "make_node_context()\n"
        "try: make_head_tls()\n"
        "except UsageError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert re.search(r"is not installed.*pip install 'ronde\[agent\]'", done.stdout)


hosts = st.from_regex(
    r"[a-z][a-z0-9.-]{0,20}|10\.0\.0\.[0-9]|fd00::[0-9a-f]", fullmatch=True
)


@given(hosts, st.integers(0, 65535))
def test_an_endpoint_is_read_as_it_is_written(host, port):
    assert parse_endpoint(with_port(host, port), "--agent") == (host, port)
    assert parse_endpoint(str(port), "--listen") == ("", port)


@pytest.mark.parametrize(
    "text",
    ["", "node1", "node1:", ":29400", "fd00::1:29400", "n:65536", "[]:1", "n:²"],
)
def test_malformed_endpoints_are_refused(text):
    with pytest.raises(UsageError, match="--agent must be HOST:PORT"):
        parse_endpoint(text, "--agent")
