"""Metrics of a job, as Prometheus and node_exporter read them."""

import stat
import sys
from contextlib import closing
from http.client import HTTPConnection
from math import isnan
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.limits import HANG_S
from tests.monitor.jobs import make_table, make_watcher

from ronde.errors import LaunchError, UsageError
from ronde.monitor import JobWatcher, open_metrics, publish


def scrape(where, path=None, **headers):
    url = urlsplit(where)
    with closing(HTTPConnection(url.hostname, url.port, timeout=HANG_S)) as client:
        client.request("GET", path or url.path, headers=headers)
        with client.getresponse() as response:
            return response.status, response.read().decode()


def parse(text):
    """Return the values, by name and sorted values of the labels."""
    return {
        (sample.name.removeprefix("ronde_"), *sorted(sample.labels.values())): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_has_the_figures_of_the_job_its_ranks_hosts_and_gpus():
    with open_metrics("0") as server:
        server.add(make_watcher(16, late=2).view())
        status, text = scrape(server.where)
    assert status == 200
    found, job = parse(text), "20261130-1"
    assert found["step", job] == 110
    assert found["step_seconds", "0.5", job] == 0.2
    assert found["loss", job] == 2.5
    assert found["hang", job] == 0
    assert found["ranks", job, "running"] == 16
    assert found["rank_blame_ratio", "2", job, "node0"] == pytest.approx(0.3)
    assert found["rank_share_ratio", "2", job, "node0", "waiting"] == 0
    assert found["rank_memory_bytes", "15", job, "node1"] == 4 << 30
    assert found["rank_progress", "15", job, "node1", "tokens"] == 110000
    assert found["host_cpu_seconds_total", job, "node1"] == 20
    assert found["network_sent_bytes_total", job, "eth0", "node1"] == 2e9
    assert found["gpu_clock_hertz", job, "7", "node1"] == 1.755e9
    assert found["gpu_throttled", job, "7", "node1"] == 0
    # Each metric has a line of help, and base units.
    assert all(family.documentation for family in text_string_to_metric_families(text))


def test_unknown_figures_are_absent():
    table = make_table(2)
    rows = [row._replace(status=None, status_age_s=0.0) for row in table.workers]
    outside = rows[1]._replace(rank=None)
    view = JobWatcher(table._replace(workers=(rows[0], outside))).view()
    with open_metrics("0") as server:
        assert scrape(server.where) == (200, "")
        server.add(view)
        found = parse(scrape(server.where)[1])
    assert {name for name, *_ in found} == {"ranks", "restarts_total", "rank_awaited"}
    assert not [labels for _, *labels in found if "1" in labels]


def test_a_figure_that_is_not_finite_is_nan():
    (rank,) = make_watcher(1).view().ranks
    view = make_watcher(1).view()._replace(ranks=(rank._replace(progress={"x": None}),))
    with open_metrics("0") as server:
        server.add(view)
        found = parse(scrape(server.where)[1])
    assert isnan(found["rank_progress", "0", "20261130-1", "node0", "x"])


def test_only_this_host_is_served_by_default():
    with open_metrics("0") as server:
        assert urlsplit(server.where).hostname == "127.0.0.1"
        assert scrape(server.where, Host="evil.example")[0] == 403
        assert scrape(server.where, "/")[0] == 404
    with open_metrics("0.0.0.0:0") as server:
        assert scrape(server.where, Host="node0.cluster")[0] == 200


def test_a_file_is_written_whole_and_goes_with_the_job(tmp_path):
    path = tmp_path / "ronde.prom"
    view = make_watcher(1).view()

    def views():
        yield view
        assert parse(path.read_text())["step", "20261130-1"] == 110
        assert stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044
        assert [each.name for each in tmp_path.iterdir()] == ["ronde.prom"]

    publish(views(), [open_metrics(str(path))])
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_reported(tmp_path):
    with (
        open_metrics(str(tmp_path / "missing" / "ronde.prom")) as file,
        pytest.raises(LaunchError, match=r"ronde.prom cannot be written: No such file"),
    ):
        file.add(make_watcher(1).view())


@pytest.mark.parametrize("where", ["", "x", "host:", "9" * 5000, "a.txt", "-1"])
def test_another_destination_is_refused(where):
    with pytest.raises(UsageError, match="--prometheus must be"):
        open_metrics(where)


@pytest.mark.parametrize("where", ["70000", "192.0.2.1:9400"])
def test_an_address_that_is_not_this_hosts_is_refused(where):
    with pytest.raises(UsageError, match=f"{where}"):
        open_metrics(where)


def test_a_missing_prometheus_client_is_named(monkeypatch):
    for name in ("prometheus_client", "prometheus_client.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"pip install 'ronde\[monitor\]'"):
        open_metrics("0")
