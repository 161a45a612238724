"""Probes and steps run only if a check needs them."""

import json

import pytest
from tests.cli.conftest import Ronde

from ronde.check import (
    FAILED,
    PROBES,
    Check,
    Fleet,
    HostFacts,
    all_checks,
    all_steps,
    plan_for,
)
from ronde.cli import read_check_request

ronde = Ronde()

ALL = {"burn_s": 1.0, "bandwidth": "tcp", "files": ["/f"]}
"""Settings with which every step runs."""


def planned(*words):
    """Return the names of probes and steps for some words of the command."""
    request = read_check_request(words, {})
    plan = plan_for(request.checks, request.settings)
    return set(plan.probes), {step.name for step in plan.steps}


def giver_of(fact):
    """Return the name of the step or else of the probe that gives a fact."""
    steps = [step.name for step in all_steps() if fact in step.facts]
    probes = [name for name, entry in PROBES.items() if fact.startswith(entry.facts)]
    return [*steps, *probes, "nobody"][0]


def givers(*checks):
    """Return the names of the probes and steps that run for some checks."""
    plan = plan_for(checks, ALL)
    return {*plan.probes, *(step.name for step in plan.steps)}


@pytest.mark.parametrize(
    ("words", "probes", "steps"),
    [
        ("--only versions", {"versions", "torch"}, set()),
        ("--only torch,nccl --path /d --burn 1s", {"versions"}, set()),
        ("--only dataset-files --file /f", set(), {"files"}),
        ("--only locked-memory", {"host"}, set()),
        ("--only storage --path /d", {"storage"}, {"sharing"}),
        ("--only shared-folder --path /d", set(), {"sharing"}),
        ("--only network", {"network", "host"}, {"reaching"}),
        ("--only slow-pair --bandwidth", {"gpu", "versions"}, {"bandwidth"}),
        ("--only slow-pair -H a,b --expect 10GB/s", {"gpu", "versions"}, {"bandwidth"}),
        ("--only slow-host --burn 1s", set(), {"pace"}),
        ("--only clock-offset", set(), {"clock"}),
        ("--only gpu-torch", {"gpu", "versions"}, set()),
        ("--only host-answers", set(), set()),
        ("--only probe-hung", set(PROBES), set()),
        ("--only probe-hung,locked-memory", {"host"}, set()),
        ("--skip storage", set(PROBES) - {"storage"}, {"clock", "reaching", "pace"}),
    ],
)
def test_only_needed_probes_and_steps_run(words, probes, steps):
    assert planned(*words.split()) == (probes, steps)


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.id)
def test_a_plan_collects_the_facts_of_its_check(check: Check):
    facts = {*check.facts, *check.optional} - {FAILED}
    assert {giver_of(fact) for fact in facts} <= givers(check)


class Watched(dict):
    """Facts that record which of them were read."""

    def __init__(self, values):
        super().__init__(values)
        self.asked = set()

    def __contains__(self, name):
        self.asked.add(name)
        return super().__contains__(name)

    def __getitem__(self, name):
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)


def test_no_check_reads_undeclared_facts():
    """Of hosts as this machine is, several times."""
    done = ronde("check", "--json")
    (host,) = json.loads(done.stdout)["hosts"]
    for check in all_checks():
        hosts = [HostFacts(n, Watched(host["values"]), {}, {}) for n in "abc"]
        list(check.judge(Fleet(tuple(hosts), {"num_ranks": 2})))
        asked = hosts[0].values.asked - {FAILED}
        assert {giver_of(name) for name in asked} <= givers(check), (check.id, asked)


def test_skipped_checks_start_and_write_nothing(tmp_path):
    """Creating a file changes its folder's time, even if it is removed."""
    words = ("--path", str(tmp_path), "--json")
    before = tmp_path.stat().st_mtime_ns
    for chosen in (("--only", "versions"), ("--skip", "storage")):
        reported = json.loads(ronde("check", *chosen, *words).stdout)
        (host,) = reported["hosts"]
        assert "storage" not in host["seconds"]
        assert not [name for name in host["values"] if name.startswith("storage.")]
        assert tmp_path.stat().st_mtime_ns == before
    reported = json.loads(ronde("check", "--only", "storage", *words).stdout)
    assert reported["hosts"][0]["seconds"].keys() == {"storage"}
