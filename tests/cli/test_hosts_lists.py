import re
import shutil
import subprocess

import pytest
from hypothesis import given, strategies as st
from tests.limits import HANG_S

from ronde.errors import UsageError
from ronde.world import MAX_HOSTS, expand_list

CONFIG = """\
ClusterName=test
SlurmctldHost=localhost
AuthType=auth/none
NodeName=n1
PartitionName=all Nodes=n1
"""


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory):
    """Return a function that asks Slurm for the names of a list, None if it refuses."""
    program = shutil.which("scontrol")
    if program is None:
        pytest.skip("scontrol is not installed: apt-get install slurm-wlm")
    config = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    config.write_text(CONFIG)

    def ask(text):
        done = subprocess.run(
            [program, "show", "hostnames", text],
            env={"SLURM_CONF": str(config)},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert "fetch_config" not in done.stderr
        # It ends with 0 whatever it says.
        return (
            None if "Invalid hostlist" in done.stderr else done.stdout.split("\n")[:-1]
        )

    return ask


LISTS = {
    "n[01-04,7]": "n01 n02 n03 n04 n7",
    "n[001-3]": "n001 n002 n003",
    "n[9-11]": "n9 n10 n11",
    "n[09-011]": "n09 n10 n11",
    "n[098-100]": "n098 n099 n100",
    "n[01,1]": "n01 n1",
    "rack[0-1]n[08-11]": "rack0n08 rack0n09 rack0n10 rack0n11 "
    "rack1n08 rack1n09 rack1n10 rack1n11",
    "n[1-2][3-4]": "n13 n14 n23 n24",
    "[1-2]": "1 2",
    "fd00::[1-2]": "fd00::1 fd00::2",
    "n[1,1]": "n1 n1",
    "a1,a1": "a1 a1",
    "n1,,n2": "n1 n2",
    " n1 , n2 ": "n1 n2",
    "b2,a[1-2],b1": "b2 a1 a2 b1",
    ",": "",
}


@pytest.mark.parametrize(("text", "names"), LISTS.items())
def test_lists_are_read_as_slurm_reads_them(scontrol, text, names) -> None:
    assert expand_list(text, "-H") == names.split()
    assert [name for name in scontrol(text) if name] == names.split()


NUMBERS = st.integers(0, 120).map(str) | st.from_regex(r"0{0,2}[0-9]", fullmatch=True)


@st.composite
def ranges(draw):
    spans = draw(
        st.lists(st.tuples(NUMBERS, st.integers(0, 4)), min_size=1, max_size=3)
    )
    texts = [f"{low}-{int(low) + n}" if n else low for low, n in spans]
    return f"[{','.join(texts)}]"


WORDS = st.lists(
    st.tuples(
        st.from_regex(r"[a-z][a-z.-]{0,2}", fullmatch=True), ranges() | st.just("")
    ),
    min_size=1,
    max_size=2,
).map(lambda pieces: "".join(map("".join, pieces)))


# Slurm knows no name behind a range: those are ours alone.
@given(
    st.lists(WORDS.filter(lambda word: not re.search(r"\][a-z.-]+$", word)), min_size=1)
)
def test_any_list_is_read_as_slurm_reads_it(scontrol, words) -> None:
    text = ",".join(words)
    assert expand_list(text, "-H") == scontrol(text)


def test_a_name_may_follow_its_number() -> None:
    assert expand_list("n[08-10].rack[1-2].example", "-H") == [
        f"n{n}.rack{rack}.example" for n in ("08", "09", "10") for rack in (1, 2)
    ]


REFUSED = {
    "n[3-1]": "got '3-1' in 'n[3-1]'",
    "n[010-09]": "got '010-09'",
    "n[ab]": "got 'ab'",
    "n[1,]": "got '' in 'n[1,]'",
    "n[1-4:2]": "got '1-4:2'",
    "n[1-2 ,4]": "got '1-2 '",
    "n[\u0661]": "got '\u0661'",
    "n[[1]]": "got 'n[[1]]'",
    "a,n[1-100000]": "got 'n[1-100000]', which names 100000",
    "n[1-300]m[1-300]": "which names 90000",
    f"n[{'9' * 5000}]": "a range must be ascending numbers",
}


@pytest.mark.parametrize(("text", "said"), REFUSED.items())
def test_lists_that_slurm_refuses_are_refused(scontrol, text, said) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        expand_list(text, "hosts.txt line 3")
    assert str(caught.value).startswith("hosts.txt line 3: ")
    if len(text) < 80 and "]m[" not in text and "],m[" not in text:
        assert scontrol(text) is None


def test_as_many_hosts_as_there_may_be() -> None:
    names = expand_list(f"n[1-{MAX_HOSTS}]", "-H")
    assert (len(names), names[0], names[-1]) == (MAX_HOSTS, "n1", f"n{MAX_HOSTS}")
