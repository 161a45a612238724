"""Options of jobs whose ranks come and go, as ronde and others spell them."""

import re

import pytest

from ronde.cli import read_run_request
from ronde.errors import UsageError
from ronde.launch import NO_LIMIT, SLOTS_OPEN, DiscoverySpec

TRAIN = ("--", "train.py")


def asked(*words, environ=()):
    return read_run_request([*words, *TRAIN], dict(environ))


def elastic(words, environ=()):
    return asked(*words.split(), environ=environ).spec.elastic


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a\na\na\nb slots=4\nb slots=2\nc slots=0\n")
    return path


@pytest.mark.parametrize(
    "words", ["", "-n 4", "-n 4 -H a:2,b:2", "--nnodes 1 -ppn 2", "--nnodes 1:1 -ppn 2"]
)
def test_a_job_without_such_an_option_is_not_elastic(words):
    request = asked(*words.split())
    assert (request.spec.elastic, request.spec.min_ranks) == (None, None)
    assert "HOROVOD_ELASTIC" not in request.spec.env
    assert request.horovod.ignored == ()


@pytest.mark.parametrize(
    ("words", "limits", "start"),
    [
        # Words; fewest and most ranks; fewest and most at the start.
        ("--min-ranks 2", (2, NO_LIMIT), (2, None)),
        ("--max-ranks 8", (1, 8), (1, 8)),
        ("--max-ranks 8 -n 4", (4, 8), (4, 4)),
        ("--min-ranks 2 --max-ranks 8 -n 4", (2, 8), (2, 4)),
        ("--min-np 2 -np 4 -H a:2,b:2", (2, NO_LIMIT), (2, 4)),
        ("--min-num-proc 2 --max_num_proc 8 -np 4", (2, 8), (2, 4)),
        ("--host-discovery hosts", (1, NO_LIMIT), (1, None)),
        ("--host-discovery-script hosts -np 4 --min-np 2", (2, NO_LIMIT), (2, 4)),
        ("--nnodes 1:4 --nproc-per-node 2", (2, 8), (2, 8)),
    ],
)
def test_limits_of_ranks(words, limits, start, hostfile):
    spec = asked(*words.replace(" hosts", f" {hostfile}").split()).spec
    assert (spec.elastic.min_ranks, spec.elastic.max_ranks) == limits
    assert (spec.min_ranks, spec.num_ranks) == start
    assert spec.env["HOROVOD_ELASTIC"] == "1"


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--spares 2", "spares", 2),
        ("--failure-domain host", "failure_domain", "host"),
        ("--cooldown 5s,2m", "cooldown_s", (5.0, 120.0)),
        ("--blacklist-cooldown-range 10 100", "cooldown_s", (10.0, 100.0)),
        ("--elastic-timeout 5m", "elastic_timeout_s", 300.0),
        ("--reform-timeout 500ms", "reform_timeout_s", 0.5),
        ("--reset-limit 3", "reset_limit", 3),
        (
            "--notice aws,file:/run/end,signal",
            "notice",
            ("aws", "file:/run/end", "signal"),
        ),
        ("--host-discovery hosts --discover-every 250ms", "discover_every_s", 0.25),
        # Under horovodrun's and torchrun's names a failed rank takes its host with it.
        ("--host-discovery hosts", "failure_domain", "slot"),
        ("--host-discovery-script hosts", "failure_domain", "host"),
        ("--blacklist-cooldown-range 10 100", "failure_domain", "host"),
        (
            "--host-discovery-script hosts --failure-domain slot",
            "failure_domain",
            "slot",
        ),
    ],
)
def test_each_option_reaches_the_job(words, field, value, hostfile):
    words = words.replace(" hosts", f" {hostfile}")
    assert getattr(elastic(f"--min-ranks 1 {words}"), field) == value


@pytest.mark.parametrize("option", ["--host-discovery", "--host-discovery-script"])
def test_the_first_answer_of_a_command(option):
    command = "echo a:2; echo b; echo a:4; echo b; echo localhost:0"
    words = (option, command, "--standalone")
    with pytest.raises(UsageError, match="ranks on this machine only"):
        asked(*words)
    spec = asked(option, command, "--nproc-per-node", "2").spec
    slots = {host.name: host.slots for host in spec.hosts}
    assert slots == {"a": 2, "b": SLOTS_OPEN, "localhost": 0}
    assert spec.elastic.discovery == DiscoverySpec(
        option, command, is_file=False, num_each=2
    )


def test_options_without_effect_are_reported():
    words = "--elastic-timeout 5 --blacklist-cooldown-range 1 2 --reset-limit 3"
    request = asked(*words.split())
    assert set(request.horovod.ignored) == {
        "--elastic-timeout",
        "--blacklist-cooldown-range",
    }
    assert request.spec.env["HOROVOD_RESET_LIMIT"] == "3"
    assert asked("--min-np", "1", *words.split()).horovod.ignored == ()


def test_limits_in_a_configuration_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("params: {min_num_proc: 2, max_num_proc: 3, reset_limit: 4}\n")
    found = elastic(f"--config-file {path}")
    assert (found.min_ranks, found.max_ranks, found.reset_limit) == (2, 3, 4)
    assert elastic(f"--config-file {path} --reset-limit 5").reset_limit == 5


ALONE = "needs --min-ranks, --max-ranks or --host-discovery. Type"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--min-ranks 0", "--min-ranks must be a whole number of at least 1, got '0'"),
        ("--max-ranks x", "--max-ranks must be a whole number of at least 1, got 'x'"),
        (
            "--min-ranks 2 --min-np 2",
            "--min-ranks and --min-np cannot be used together",
        ),
        (
            "--nnodes 1:2 -ppn 1 --max-np 2",
            "--max-np and --nodes 1:2 cannot be used together",
        ),
        (
            "--min-ranks 4 --max-ranks 2",
            "--min-ranks must be at most --max-ranks, got 4 and",
        ),
        ("-n 5 --max-np 4", "-np must be at most --max-np, got 5 and --max-np 4"),
        (
            "-n 1 --nnodes 1:2 -ppn 2",
            "--nodes 1:2 must be at most -np, got 2 and -np 1",
        ),
        (
            "--nnodes 4:2 -ppn 1",
            "--nodes must begin with the smaller number, got '4:2'",
        ),
        ("--nnodes 1:2", "--nodes 1:2 needs a number of ranks for each host"),
        ("--nnodes 2:4 -ppn 1", "--nodes must be at most 1, the number of known hosts"),
        ("--nnodes 1 --host-discovery hosts", "--nodes must be a range such as 2:4"),
        ("--spares 1", f"--spares {ALONE}"),
        ("--notice aws", f"--notice {ALONE}"),
        ("--min-np 1 --discover-every 1s", "--discover-every needs --host-discovery"),
        ("--min-np 1 --spares x", "--spares must be a whole number of at least 0"),
        ("--min-np 1 --failure-domain rack", "--failure-domain must be slot or host"),
        (
            "--min-np 1 --cooldown 30s",
            "--cooldown must be two durations above 0, the shorter",
        ),
        (
            "--min-np 1 --cooldown 2s,1s",
            "the shorter first, got '2s 1s'. Type: --coold",
        ),
        (
            "--min-np 1 --cooldown 1,2 --blacklist-cooldown-range 1 2",
            "--cooldown and --blacklist-cooldown-range cannot be used together",
        ),
        ("--min-np 1 --elastic-timeout 0", "--elastic-timeout must be longer than 0"),
        ("--min-np 1 --reform-timeout x", "--reform-timeout: duration must be seconds"),
        ("--min-np 1 --reset-limit -1", "--reset-limit must be a whole number"),
        (
            "--min-np 1 --notice slack",
            "--notice must be a list of signal, aws, gcp, azure,",
        ),
        (
            "-H a --host-discovery hosts",
            "--hosts cannot be combined with --host-discovery",
        ),
        ("--host-discovery false", "--host-discovery: 'false' failed: exit code 1"),
        ("--host-discovery true", "--host-discovery true names no host"),
        (
            "--host-discovery /dev/null",
            "--host-discovery: '/dev/null' failed: exit code 126",
        ),
        (
            "--host-discovery script",
            "is a script, but it is not executable. Type: chmod +x",
        ),
        ("--host-discovery bad", "line 1, column 1: a host must be a name"),
        (
            "--listen 0 --host-discovery x",
            "--host-discovery cannot be combined with --listen",
        ),
    ],
)
def test_invalid_options_are_refused(words, said, hostfile, tmp_path):
    (tmp_path / "script").write_text("#!/bin/sh\necho a\n")
    (tmp_path / "bad").write_text("$:2\n")
    for path in (hostfile, tmp_path / "script", tmp_path / "bad"):
        words = re.sub(rf" {path.name}$", f" {path}", words)
    with pytest.raises(UsageError, match=re.escape(said)):
        asked(*words.split())
