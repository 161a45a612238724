"""Engines make the tokens of ``generate``; bad models and names are refused."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S
from tests.ranks import job_store

from ronde.errors import UsageError
from ronde.serve import load_engine, read_model, require_engine, require_tp

ROOT = Path(__file__).parents[2]
GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 9,
    "max_position_embeddings": 8,
    "num_attention_heads": 6,
    "eos_token_id": [1, 2],
}
CASES = [
    (30, ["1", "2"]),
    pytest.param(500, ["1", "2", "4", "2:gloo", "4:gloo"], marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("num", "jobs"), CASES)
def test_each_request_gets_the_tokens_of_generate(tmp_path, num, jobs):
    with job_store() as store:
        command = ["-m", "tests.serve.engine_ranks", tmp_path, store, num, *jobs]
        subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # noqa: TID251
            check=True,
            timeout=HANG_S if num < 100 else 20 * HANG_S,
        )
    found = json.loads((tmp_path / "answers.json").read_text())
    for job in jobs:
        first = found[f"{job} 0"]
        assert first["whole"] == found["right"]
        assert first["num_evictions"] > 0
        assert set(first["finish"].values()) == {"stop", "length"}
        assert max(first["logprobs"]) <= 0
        assert set(first["free"]) == {1.0}
    alone = found["1 0"]
    assert alone["resumed"]
    for number, num_made, made in alone["resumed"]:
        assert made == found["right"][str(number)][num_made:]
    assert not alone["cancelled"]


def test_transformers_has_the_inner_names_of_the_adapter():
    from transformers.generation.continuous_batching import continuous_api as api

    assert list(inspect.signature(api.ContinuousBatchProcessor).parameters) == [
        "cache", "config", "generation_config", "continuous_batching_config",
        "logit_processor", "input_queue", "cancel_queue", "output_router",
        "background_thread_status", "model_device", "model_dtype", "scheduler",
        "distributed_helper",
    ], "the adapter of transformers makes a batch by position"  # fmt: skip
    batch = api.ContinuousBatchProcessor
    for owner, name, parameters in (
        (batch, "_update_tp_group_state", "self"),
        (batch, "prepare_next_batch", "self"),
        (batch, "_generation_step", "self model"),
        (batch, "update_batch", "self"),
        (api.ModelRunner, "_sample", "self scores output_ids"),
        (api.OutputRouter, "deliver_batch", "self outputs"),
        (api.FIFOScheduler, "add_waiting_request", "self state"),
        (api.FIFOScheduler, "set_request_cancellation", "self request_id"),
        (api.FIFOScheduler, "clear_cancelled_requests", "self"),
    ):
        found = " ".join(inspect.signature(getattr(owner, name)).parameters)
        assert found == parameters, f"transformers' {name} takes {found} now"


def test_a_models_folder_is_read(tmp_path):
    path = tmp_path / "config.json"
    for text, message in (
        (None, "with config.json"),
        ("{", "must be a JSON object"),
        (json.dumps(GOOD | {"architectures": ["BertModel"]}), "ForCausalLM"),
        (json.dumps(GOOD | {"vocab_size": None}), "must have vocab_size"),
    ):
        if text is not None:
            path.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_model(str(tmp_path))
    path.write_text(json.dumps(GOOD))
    facts = read_model(str(tmp_path))
    assert facts == (9, 8, 6)
    require_tp(facts, 3)
    with pytest.raises(UsageError, match=r"6 KV heads, got 4. Take one of 1, 2, 3, 6"):
        require_tp(facts, 4)


def test_an_unknown_engine_is_refused():
    with pytest.raises(UsageError, match="transformers, vllm or MODULE:FACTORY"):
        require_engine("other")
    with pytest.raises(UsageError, match="must be importable"):
        load_engine("nothing.here:make")
