"""``ronde check``, as a user types it."""

import json
import os
import re
import signal

import pytest
from tests.cli.conftest import Ronde
from tests.limits import HANG_S

from ronde.check import Collected, HostFacts, all_checks
from ronde.cli import judge_request, read_check_request
from ronde.errors import UsageError
from ronde.launch import parse_hostfile, parse_hosts
from ronde.render import write_hostfile

ABSENT = "nosuchhost.invalid"
HERE = os.uname().nodename
NO_SSH = ("--ssh-args", "-F /none/ssh_config")
"""With this option ssh ends at once, for any resolver."""

check = Ronde()


def request(*words, environ=None):
    return read_check_request(words, environ or {})


@pytest.fixture(scope="module")
def looked(tmp_path_factory):
    """Check this machine once; return the output and the saved file."""
    folder = tmp_path_factory.mktemp("looked")
    saved = folder / "facts.jsonl"
    done = check("check", "--json", "--save", str(saved))
    return done, saved


def test_this_machine_is_checked(looked):
    done, saved = looked
    assert done.stderr == b""
    reported = json.loads(done.stdout)
    assert done.returncode == reported["verdict"]["exit_code"]
    assert done.returncode in (0, 2)
    (host,) = reported["hosts"]
    assert host["host"] == HERE
    assert host["values"]["versions.python"]
    assert host["values"]["probe.failed"] == {}
    verdict = reported["verdict"]
    assert verdict["ready"] + verdict["warned"] + verdict["not_ready"] == [HERE]
    (line,) = saved.read_text().splitlines()
    assert json.loads(line)["values"]["hosts"] == reported["hosts"]


def test_what_has_changed_since(looked, tmp_path):
    _, saved = looked
    file = tmp_path / "then.jsonl"
    record = json.loads(saved.read_text())
    record["values"]["hosts"][0]["values"]["versions.python"] = "2.7.18"
    file.write_text(json.dumps(record) + "\n")
    done = check("check", "--since", str(file), "--only", "versions")
    text = done.stdout.decode()
    assert f"{HERE}: versions.python was 2.7.18, is 3." in text
    assert done.stderr == b""


def test_a_table_and_a_verdict():
    done = check("check", "--only", "storage,host", "--skip", "memory-left")
    lines = done.stdout.decode().splitlines()
    assert lines[0].split() == ["name", "host", "storage", "cluster"]
    assert lines[1].split()[0] == HERE
    assert lines[-1].startswith(("1 of 1 host is ready", f"{HERE} is not ready: "))
    assert b"\x1b" not in done.stdout


def test_an_unreachable_host_is_a_finding(tmp_path):
    good = tmp_path / "good.txt"
    good.write_text("old\n")
    names = f"localhost:2,{ABSENT}:2"
    done = check("check", "-H", names, *NO_SSH, "--json", "--write-hostfile", str(good))
    reported = json.loads(done.stdout)
    assert done.returncode == 2
    assert [host["host"] for host in reported["hosts"]] == ["localhost"]
    absent = [each for each in reported["findings"] if each["host"] == ABSENT]
    assert [each["check"] for each in absent] == ["host-answers"]
    assert ABSENT in reported["verdict"]["not_ready"]
    ready = "localhost" not in reported["verdict"]["not_ready"]
    assert good.read_text() == (
        "localhost slots=2\n" if ready else "# no host is ready\n"
    )


def test_a_host_with_unknown_gpus_ends_with_3():
    gpus = {"gpu.count": "neither nvidia-ml-py nor nvidia-smi is here"}
    asked = Collected((HostFacts(HERE, {}, gpus, {}),), ())
    assert judge_request(request("--only", "gpu"), asked).exit_code == 3
    # Nothing is known of it either; without a GPU that is so for --only gpu.
    host = Collected((HostFacts(HERE, {"host.cgroup_pids": None}, gpus, {}),), ())
    for words, known in (("host", asked), ("gpu-nvlink", host)):
        checked = judge_request(request("--only", words), known)
        assert checked.exit_code == 3
        assert checked.verdict.is_unread


def test_no_host_answers(tmp_path):
    good = tmp_path / "good.txt"
    done = check("check", "-H", ABSENT, *NO_SSH, "--write-hostfile", str(good))
    assert done.returncode == 3
    text = done.stdout.decode()
    assert text.splitlines()[-1] == "no host answered, so nothing is known"
    assert f"x host-answers: {ABSENT}\n    no answer: " in text
    with pytest.raises(UsageError):
        parse_hostfile(good.read_text(), "good.txt")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--only", "hots"], r"--only must be .* got 'hots'. Type: host"),
        (["--skip", "host-anwsers"], r"got 'host-anwsers'. Type: host-answers"),
        (["--only", "host-answers", "--skip", "host-answers"], "--skip leaves no"),
        (["--burn", "soon"], "--burn: duration must be"),
        (["--bandwidth", "pigeon"], "--bandwidth must be auto, tcp, gloo or nccl, got"),
        (["--ranks", "0"], "--ranks must be"),
        (["--path", ""], "must not be empty"),
        (["--save", "/proc"], "cannot write the file of --save"),
        (["--write-hostfile", "/none/good"], "cannot write the file of --write-h"),
        (["-H", "a", "--hostfile", "b"], "cannot be combined with"),
        (["node1"], "unexpected word 'node1'. Type: ronde check --help"),
    ],
)
def test_bad_options_are_refused(words, why):
    with pytest.raises(UsageError, match=why):
        request(*words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--since", "/none/facts"], b"cannot read the --since file"),
        (["explain", "lockd-memory"], b"explain must be a check's id, got"),
        (["explain"], b"ronde check explain takes one argument"),
        (["list", "all"], b"ronde check list takes no arguments"),
    ],
)
def test_a_bad_command_line_ends_with_64(words, why):
    done = check("check", *words)
    assert done.returncode == 64
    assert done.stderr.startswith(b"ronde: " + why)
    assert done.stdout == b""


def test_options_become_settings_of_probes():
    asked = request(
        *("--path", "data", "--path", "/b", "--file", "f", "--burn", "2m"),
        *("--ranks", "4", "--bandwidth"),
        environ={"NCCL_DEBUG": "INFO"},
    ).settings
    here = os.getcwd()  # noqa: PTH109 - the words are relative to it
    assert asked["directory"] == here
    assert request("--chdir", "job").settings["directory"] == f"{here}/job"
    assert asked["paths"] == [f"{here}/data", "/b"]
    assert asked["files"] == [f"{here}/f"]
    assert (asked["burn_s"], asked["num_ranks"]) == (120.0, 4)
    assert asked["bandwidth"] == "auto"
    assert asked["environment"] == {"NCCL_DEBUG": "INFO"}


def test_slots_are_the_default_number_of_ranks():
    assert request("-H", "a:2,b:4").settings["num_ranks"] == 4
    assert "num_ranks" not in request("-H", "a,b").settings


def test_only_and_skip_choose_checks():
    families = {check.family for check in request("--only", "gpu").checks}
    assert families == {"gpu", "cluster"}
    ids = [check.id for check in request("--only", "gpu", "--skip", "gpu").checks]
    assert ids == ["host-answers"]
    assert len(request("--skip", "host-answers").checks) == len(all_checks()) - 1


def test_hosts_come_back_from_a_hostfile():
    text = "a slots=4\n[fd00::2]:2 port=22\nb user=me addr=10.0.0.2\n"
    hosts = parse_hostfile(text, "hosts")
    again = parse_hostfile(write_hostfile(hosts), "hosts")
    assert [str(h) for h in again] == [str(h) for h in hosts]
    assert write_hostfile(parse_hosts("c,d:3")) == "c\nd slots=3\n"


def test_help_and_lists():
    for words in (["--help"], ["-H", "a", "-h"], ["list", "--help"]):
        done = check("check", *words)
        assert (done.returncode, done.stdout[:18]) == (0, b"usage: ronde check")
    listed = check("check", "list").stdout.decode()
    assert re.findall(r"^  ([a-z0-9-]+)(?: |$)", listed, re.MULTILINE) == [
        each.id
        for family in re.findall(r"^([a-z]+):$", listed, re.MULTILINE)
        for each in all_checks()
        if each.family == family
    ]
    assert listed.count("\n  host-answers ") == 1
    done = check("check", "explain", "host-answers")
    assert done.stdout.startswith(b"host-answers: the host can be reached")
    assert b"check" in check("--help").stdout


def test_ctrl_c_ends_it(tmp_path):
    """The command waits for a host whose ssh prints nothing."""
    started = tmp_path / "started"
    os.mkfifo(started)
    proxy = f"-o 'ProxyCommand=sh -c \"echo > {started}; exec sleep 60\"'"
    with check.start("check", "-H", ABSENT, "--ssh-args", proxy) as process:
        started.read_text()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, out, err) == (130, b"", b"")
