"""Metrics of a server for Prometheus, under vLLM's names."""

import re

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics import Counter, Gauge, Histogram

from ronde.errors import UsageError

_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_COUNTERS = {  # and a label
    **dict.fromkeys(("prompt_tokens", "generation_tokens", "steps"), ""),
    "resumed_requests": "",
    "request_success": "finished_reason",
    "restarts": "cause",
    "rejected": "reason",
}
_TIMES = (
    *("time_to_first_token", "inter_token_latency", "e2e_request_latency"),
    *("request_queue_time", "step", "broadcast"),
)
_BUCKETS_S = (
    *(1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
_HISTOGRAMS: dict[str, tuple[float, ...]] = {
    **{f"{name}_seconds": _BUCKETS_S for name in _TIMES},
    "iteration_tokens_total": tuple(float(1 << power) for power in range(15)),
}


class ServingMetrics:
    """The metrics of one server; ``prefix`` begins their names."""

    def __init__(self, prefix: str = "ronde_", model: str = "") -> None:
        if not re.fullmatch("[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
            rule = "letters, digits, _ and :, and no digit first"
            raise UsageError(f"metrics prefix must be {rule}, got {prefix!r}.")
        self._registry = known = CollectorRegistry()
        self._model, own = model, ["model_name"]
        self._gauges = [Gauge(prefix + n, n, own, registry=known) for n in _GAUGES]
        self._counters = {
            n: Counter(prefix + n, n, own + label.split(), registry=known)
            for n, label in _COUNTERS.items()
        }
        self._histograms = {
            n: Histogram(prefix + n, n, own, registry=known, buckets=buckets)
            for n, buckets in _HISTOGRAMS.items()
        }
        for name in (name for name, label in _COUNTERS.items() if not label):
            self._add(name, 0)

    def on_first_token(self, wait_s: float, queue_s: float) -> None:
        self._observe("time_to_first_token_seconds", wait_s)
        self._observe("request_queue_time_seconds", queue_s)

    def on_token_gap(self, gap_s: float) -> None:
        self._observe("inter_token_latency_seconds", gap_s)

    def on_end(
        self, finish: str, latency_s: float, num_prompt: int, num_made: int
    ) -> None:
        self._add("request_success", 1, {"cancel": "abort"}.get(finish, finish))
        self._add("prompt_tokens", num_prompt)
        self._add("generation_tokens", num_made)
        self._observe("e2e_request_latency_seconds", latency_s)

    def on_step(self, num_tokens: int, step_s: float, broadcast_s: float) -> None:
        self._add("steps", 1)
        self._observe("iteration_tokens_total", num_tokens)
        self._observe("step_seconds", step_s)
        self._observe("broadcast_seconds", broadcast_s)

    def on_restart(self, cause: str) -> None:
        self._add("restarts", 1, cause)

    def on_resumed(self, num: int) -> None:
        self._add("resumed_requests", num)

    def on_rejected(self, reason: str) -> None:
        self._add("rejected", 1, reason)

    def render(self, num_running: int, num_waiting: int, kv_usage: float) -> bytes:
        """Return all metrics in Prometheus' text format."""
        values = (num_running, num_waiting, kv_usage)
        for gauge, value in zip(self._gauges, values, strict=True):
            gauge.labels(self._model).set(value)
        return generate_latest(self._registry)

    def _add(self, name: str, amount: int, *labels: str) -> None:
        self._counters[name].labels(self._model, *labels).inc(amount)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].labels(self._model).observe(value)
