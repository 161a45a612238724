"""Metrics have vLLM's names, under any prefix."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ronde.errors import UsageError
from ronde.serve import ServingMetrics


def read(text):
    """Return the values by name and labels, without those of buckets and times."""
    return {
        (each.name, *sorted(each.labels.values())): each.value
        for family in text_string_to_metric_families(text.decode())
        for each in family.samples
        if not each.name.endswith(("_bucket", "_created"))
    }


def test_every_event_counts_under_the_names_of_dashboards():
    metrics = ServingMetrics("vllm:", "m")
    assert read(metrics.render(0, 0, 0.0))["vllm:prompt_tokens_total", "m"] == 0
    metrics.on_first_token(2.0, 0.5)
    metrics.on_token_gap(0.25)
    metrics.on_end("stop", 3.0, 7, 5)
    metrics.on_end("cancel", 1.0, 1, 1)
    metrics.on_step(12, 0.5, 0.25)
    metrics.on_restart("hang")
    metrics.on_resumed(3)
    metrics.on_rejected("queue_full")
    values = read(metrics.render(4, 6, 0.75))
    wanted = {
        "num_requests_running": 4,
        "num_requests_waiting": 6,
        "kv_cache_usage_perc": 0.75,
        "prompt_tokens_total": 8,
        "generation_tokens_total": 6,
        "resumed_requests_total": 3,
        "steps_total": 1,
        "request_success_total stop": 1,
        "request_success_total abort": 1,
        "restarts_total hang": 1,
        "rejected_total queue_full": 1,
    }
    sums = {
        "time_to_first_token_seconds": 2.0,
        "inter_token_latency_seconds": 0.25,
        "e2e_request_latency_seconds": 4.0,
        "request_queue_time_seconds": 0.5,
        "step_seconds": 0.5,
        "broadcast_seconds": 0.25,
        "iteration_tokens_total": 12,
    }
    wanted |= {f"{name}_sum": value for name, value in sums.items()}
    wanted |= {f"{name}_count": 1 for name in sums}
    wanted["e2e_request_latency_seconds_count"] = 2
    assert values == {
        (f"vllm:{name.split()[0]}", *sorted(["m", *name.split()[1:]])): value
        for name, value in wanted.items()
    }


def test_two_servers_of_one_process_do_not_share_metrics():
    metrics, other = ServingMetrics(), ServingMetrics()
    metrics.on_resumed(1)
    assert read(metrics.render(0, 0, 0))["ronde_resumed_requests_total", ""] == 1
    assert read(other.render(0, 0, 0))["ronde_resumed_requests_total", ""] == 0


@pytest.mark.parametrize("prefix", ["", "9a", "a-b", "ä_", "a b"])
def test_wrong_prefixes_are_refused(prefix):
    with pytest.raises(UsageError, match="metrics prefix must be letters"):
        ServingMetrics(prefix)
