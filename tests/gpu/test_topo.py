"""``ronde topo`` of a machine with GPUs, and of what NCCL says of it."""

import json

import pytest
import torch
from tests.cli.conftest import Ronde
from tests.gpu.devices import NEEDS_CUDA, NUM_DEVICES

pytestmark = NEEDS_CUDA
ronde = Ronde()


def topo(*words, num_codes=1):
    ended = ronde("topo", *words)
    assert ended.returncode in range(num_codes), ended.stderr.decode()
    return ended.stdout.decode()


def test_all_gpus_are_shown():
    (host,) = json.loads(topo("--json"))["hosts"]
    assert len(host["gpus"]) >= NUM_DEVICES
    assert topo().count("GPU") >= NUM_DEVICES


def test_every_verb_has_an_answer():
    assert "rank" in topo("place", "-n", str(NUM_DEVICES))
    assert "all_reduce" in topo("limit")
    topo("lint", num_codes=2)
    for flag in ("--matrix", "--paths"):
        assert topo(flag).strip()


def test_what_nccl_logs_of_itself_is_read(tmp_path):
    graph = tmp_path / "topo.xml"
    ended = ronde(
        *("bench", "all_reduce", "--engine", "nccl", "--device", "cuda", "--no-limit"),
        *("-g", "2", "-b", "1M", "-e", "1M", "-n", "2", "-T", "30"),
        *(() if NUM_DEVICES >= 2 else ("--share-gpu",)),
        env={
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING",
            "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%p.log"),
            "NCCL_TOPO_DUMP_FILE": str(graph),
        },
    )
    if b"Duplicate GPU" in ended.stderr:
        pytest.skip("NCCL lets no two ranks share a GPU")
    assert ended.returncode == 0, ended.stderr.decode()
    version = ".".join(map(str, torch.cuda.nccl.version()))
    logs = map(str, sorted(tmp_path.glob("nccl.*.log")))
    assert f"NCCL {version}" in topo("log", *logs, num_codes=2)
    assert "GPU" in topo(str(graph))
    topo("lint", str(graph), num_codes=2)
