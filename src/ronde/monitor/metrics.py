"""Metrics of a job for Prometheus: ``ronde top --prometheus``.

An unknown figure has no sample.
"""

import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ronde.errors import LaunchError, UsageError
from ronde.monitor.view import WatchedHost, WatchedJob, WatchedRank
from ronde.monitor.web import HttpRequest, HttpServer, ViewSink

_WRITE_EVERY_S = 15.0
_SILENT_S = 10.0  # after which figures of a host are unknown
_Sample = tuple[str, dict[str, str], float | None]


class _Metrics(ViewSink):
    """The metrics of a job's newest view, in a registry of Prometheus.

    Raises:
        UsageError: prometheus_client is not installed.
    """

    def __init__(self) -> None:
        try:
            self._kinds: Any = import_module("prometheus_client.core")
        except ImportError:
            raise UsageError(
                "--prometheus needs prometheus_client: pip install 'ronde[monitor]'"
            ) from None
        self.registry: Any = self._kinds.CollectorRegistry(auto_describe=False)
        self._view: WatchedJob | None = None
        self.registry.register(self)

    def add(self, view: WatchedJob) -> None:
        self._view = view

    def collect(self) -> Iterable[Any]:
        families: dict[str, Any] = {}
        if (view := self._view) is None:
            return ()
        for name, labels, value in _read_job(view):
            if value is None:
                continue
            if name not in families:
                kind = "Counter" if name.endswith("_total") else "Gauge"
                make = getattr(self._kinds, f"{kind}MetricFamily")
                title = name.removesuffix("_total").replace("_", " ")
                families[name] = make(f"ronde_{name}", title, labels=["job", *labels])
            families[name].add_metric([view.job.job_id, *labels.values()], value)
        return families.values()


class MetricsServer(_Metrics):
    """Serves ``/metrics``.

    Raises:
        UsageError: The address is not this host's, or the port is in use.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._server = HttpServer(host, port, self._respond)
        self.where = f"http://{f'[{host}]' if ':' in host else host}"
        self.where += f":{self._server.port}/metrics"

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._server.close()

    def _respond(self, request: HttpRequest) -> None:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        if request.path.partition("?")[0] == "/metrics":
            text = generate_latest(self.registry)
            request.reply(200, text, CONTENT_TYPE_LATEST)
        else:
            request.reply(404, b"The metrics are at /metrics.\n")


class MetricsFile(_Metrics):
    """Writes metrics for node_exporter's textfile collector every 15 s.

    The file is removed in the end.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._due_s = 0.0
        self.where = str(path)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._path.unlink(missing_ok=True)

    def add(self, view: WatchedJob) -> None:
        """Write the file if it is due.

        Raises:
            LaunchError: It cannot be written.
        """
        from prometheus_client import write_to_textfile

        super().add(view)
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + _WRITE_EVERY_S
        try:
            write_to_textfile(self.where, self.registry)
        except OSError as error:
            raise LaunchError(
                f"{self.where} cannot be written: {error.strerror}. Choose a file in a "
                "directory that you may write to."
            ) from None


def open_metrics(where: str) -> ViewSink:
    """Return a server for ``[HOST:]PORT``, or a writer for ``FILE.prom``."""
    host, _, port = where.rpartition(":")
    if where.endswith(".prom"):
        return MetricsFile(Path(where))
    if not (port.isascii() and port.isdecimal() and len(port) < 9):
        raise UsageError(
            f"--prometheus must be [HOST:]PORT or FILE.prom, got {where!r}. "
            "Type: --prometheus 9400"
        )
    return MetricsServer(host.strip("[]") or "127.0.0.1", int(port))


def _read_job(view: WatchedJob) -> Iterator[_Sample]:
    yield "step", {}, view.step
    yield "step_seconds", {"quantile": "0.5"}, view.step_s
    yield "step_seconds", {"quantile": "0.99"}, view.step_p99_s
    for part, share in (view.shares._asdict() if view.shares else {}).items():
        yield "step_share_ratio", {"part": part}, share
    yield "tokens_per_second", {}, view.tokens_per_s
    yield "loss", {}, view.loss
    is_known = any(rank.status_age_s for rank in view.ranks)
    yield "hang", {}, bool(view.hang) if is_known else None
    states = [rank.state for rank in view.ranks]
    for state in sorted({"running", *states}):
        yield "ranks", {"state": state}, states.count(state)
    yield "restarts_total", {}, view.job.restarts
    for rank in view.ranks:
        if rank.rank is not None:
            labels = {"rank": str(rank.rank), "host": rank.host}
            yield from _read_rank(rank, labels)
    for host in view.hosts:
        if host.age_s < _SILENT_S:
            yield from _read_host(host, {"host": host.host})


def _read_rank(rank: WatchedRank, labels: dict[str, str]) -> Iterator[_Sample]:
    yield "rank_step", labels, rank.step
    yield "rank_step_seconds", labels, rank.step_s
    yield "rank_own_seconds", labels, rank.own_s
    for part, share in (rank.shares._asdict() if rank.shares else {}).items():
        yield "rank_share_ratio", {**labels, "part": part}, share
    yield "rank_blame_ratio", labels, rank.blame if rank.shares else None
    yield "rank_awaited", labels, rank.is_awaited
    age_s = rank.collective_age_s if rank.collective else None
    yield "rank_collective_seconds", labels, age_s
    yield "rank_status_age_seconds", labels, rank.status_age_s or None
    for name, value in rank.progress.items():
        shown = float("nan") if value is None else value
        yield "rank_progress", {**labels, "name": name}, shown
    yield "rank_cpu_cores", labels, rank.cpu
    yield "rank_memory_bytes", labels, rank.rss_bytes or None
    yield "rank_device_memory_bytes", labels, rank.device_bytes or None


def _read_host(host: WatchedHost, labels: dict[str, str]) -> Iterator[_Sample]:
    usage = host.usage
    if usage is None:
        return
    yield "host_cpu_seconds_total", labels, usage.cpu_s
    yield "host_cpus", labels, usage.num_cpus
    yield "host_memory_bytes", labels, usage.memory_bytes
    yield "host_memory_size_bytes", labels, usage.total_memory_bytes
    yield "host_shm_bytes", labels, usage.shm_bytes
    yield "host_shm_size_bytes", labels, usage.total_shm_bytes
    yield "host_oom_kills_total", labels, usage.num_oom_kills
    for each in usage.interfaces:
        own = {**labels, "interface": each.name}
        yield "network_received_bytes_total", own, each.received_bytes
        yield "network_sent_bytes_total", own, each.sent_bytes
        yield "network_errors_total", own, each.num_errors
    for gpu in usage.gpus:
        own = {**labels, "gpu": str(gpu.number)}
        yield "gpu_utilization_ratio", own, gpu.utilization
        yield "gpu_memory_bytes", own, gpu.memory_bytes
        yield "gpu_memory_size_bytes", own, gpu.total_memory_bytes
        yield "gpu_power_watts", own, gpu.power_w
        yield "gpu_temperature_celsius", own, gpu.temperature_c
        clock_hz = None if gpu.clock_mhz is None else gpu.clock_mhz * 1e6
        yield "gpu_clock_hertz", own, clock_hz
        yield "gpu_throttled", own, bool(gpu.throttled_by)
