"""Saved facts, and changes since."""

import pytest
from tests.check.fleets import CHECKS, make_fleet

from ronde.check import (
    Change,
    Finding,
    HostFacts,
    SavedRun,
    Severity,
    compare,
    judge,
    load_last,
    save,
)
from ronde.errors import UsageError
from ronde.render import draw_changes

IDS = (*(check.id for check in CHECKS), "host-answers")


def kept(fleet):
    return SavedRun(fleet.hosts, judge(fleet, CHECKS).findings, IDS)


def host(name="a", **values):
    return SavedRun((HostFacts(name, values, {}, {}),), (), ())


def changed(before, after):
    """Return the facts that differ, without the host."""
    facts = compare(host(**before), host(**after)).facts
    return {each.fact: (each.before, each.after) for each in facts}


def test_the_last_saved_run_is_loaded(tmp_path):
    path = tmp_path / "facts.jsonl"
    first, last = kept(make_fleet(3)), kept(make_fleet(2, node2={"memlock": 8}))
    assert last.findings
    save(path, first)
    assert load_last(path)[1] == first
    save(path, last)
    assert load_last(path)[1] == last
    assert len(path.read_text().splitlines()) == 2
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot read the --since file"),
        (b"", "contains no saved run"),
        (b"\xff\xfe", "cannot read the --since file"),
        (b"[1]\n", ":1: "),
        (b'{"schema": 9}\n', "record has schema 9, but"),
    ],
)
def test_a_file_without_a_run_is_refused(tmp_path, content, why):
    path = tmp_path / "facts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=why):
        load_last(path)


def test_a_run_of_another_form_is_refused(tmp_path):
    path = tmp_path / "facts"
    save(path, host())
    path.write_text(path.read_text().replace('"unreadable"', '"strange"'))
    with pytest.raises(UsageError, match=r"must have the fields .*unreadable"):
        load_last(path)


def test_changed_facts_are_reported_by_key():
    before = {"host.kernel": "5.15", "network.nics": {"eth0": {"mtu": 1500}}}
    after = {"host.kernel": "6.1", "network.nics": {"eth0": {"mtu": 9000}}}
    assert changed(before, after) == {
        "host.kernel": ("5.15", "6.1"),
        "network.nics[eth0][mtu]": ("1500", "9000"),
    }


def test_items_of_lists_are_distinguished():
    before = {"gpu.devices": [{"ecc": True}, {"ecc": True}]}
    after = {"gpu.devices": [{"ecc": True}, {"ecc": False}]}
    assert changed(before, after) == {"gpu.devices[1][ecc]": ("on", "off")}
    assert changed({"a": [1, 2]}, {"a": [1, 3]}) == {"a": ("[1, 2]", "[1, 3]")}


def test_measurements_are_no_changes():
    assert changed({"rtt_s": 0.1}, {"rtt_s": 0.9}) == {}
    assert changed({"free_bytes": 100 << 20}, {"free_bytes": 95 << 20}) == {}
    assert changed({"free_bytes": 100 << 20}, {"free_bytes": 80 << 20})
    assert changed({"num_flaps": 100}, {"num_flaps": 101})


@pytest.mark.parametrize(
    ("fact", "before", "after"),
    [
        ("host.pids_left", 4000, 3990),
        ("gpu.processes", [[]], [[{"pid": 7, "command": "a"}]]),
        ("storage.paths", {"/": {"free_inodes": 9}}, {"/": {"free_inodes": 8}}),
        ("cluster.products", {"cpu": {"num_products": 9}}, {"cpu": {}}),
    ],
)
def test_momentary_values_are_no_changes(fact, before, after):
    assert changed({fact: before}, {fact: after}) == {}


def test_unreadable_facts_are_no_changes():
    assert changed({"a": 1}, {}) == {}
    assert changed({}, {"a": 1}) == {}
    assert changed({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}) == {
        "a[c]": ("(none)", "2")
    }


def test_new_and_gone_findings():
    before, after = make_fleet(3, node1={"memlock": 8}), make_fleet(3)
    changes = compare(kept(before), kept(after))
    assert [each.host for each in changes.gone] == ["node1"]
    assert changes.new == ()
    changes = compare(kept(after), kept(before))
    assert [(each.check, each.host) for each in changes.new] == [
        ("locked-memory", "node1")
    ]
    assert changes.facts == (Change("node1", "host.memlock_gib", "64", "8"),)


def test_a_finding_with_another_value_is_not_new():
    before = make_fleet(1, node1={"memlock": 8})
    after = make_fleet(1, node1={"memlock": 9})
    changes = compare(kept(before), kept(after))
    assert (changes.new, changes.gone) == ((), ())


def test_skipped_checks_have_no_new_findings():
    fleet = make_fleet(1, node1={"memlock": 8})
    one, other = kept(fleet), SavedRun(fleet.hosts, (), ("governor",))
    assert compare(one, other).gone == ()
    assert compare(other, one).new == ()


def test_new_and_gone_hosts():
    before, after = make_fleet(2), make_fleet(3, node3={"memlock": 8})
    changes = compare(kept(before), kept(after))
    assert (changes.new_hosts, changes.gone_hosts) == (("node3",), ())
    assert changes.new == ()
    changes = compare(kept(after), kept(before))
    assert (changes.new_hosts, changes.gone_hosts) == ((), ("node3",))


def test_a_host_that_stopped_answering_is_a_new_finding():
    absent = Finding("host-answers", Severity.FAIL, "node2", "no answer: refused")
    after = SavedRun(make_fleet(1).hosts, (absent,), IDS)
    changes = compare(kept(make_fleet(2)), after)
    assert changes.new == (absent,)
    assert changes.gone_hosts == ()


def test_changes_are_formatted():
    before = make_fleet(8)
    odd = {f"node{n}": {"memlock": 8} for n in (3, 4, 5)}
    text = draw_changes(compare(kept(before), kept(make_fleet(8, **odd))), "noon")
    assert text == (
        "since noon:\n"
        "  new on node[3-5]: locked-memory: 8 GiB can be locked\n"
        "  node[3-5]: host.memlock_gib was 64, is 8\n"
    )
    same = compare(kept(before), kept(before))
    assert draw_changes(same, "noon") == "since noon:\n  nothing has changed\n"


def test_long_values_are_cut_to_their_difference():
    line = "quiet " * 40
    before, after = host(cmdline=f"{line}iommu=on"), host(cmdline=f"{line}iommu=pt")
    text = draw_changes(compare(before, after), "noon")
    assert "iommu=on" in text
    assert "iommu=pt" in text
    assert len(text) < 120
