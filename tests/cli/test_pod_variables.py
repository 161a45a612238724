"""A pod's number and head, from the variables of its controller."""

import pytest

from ronde.cli import MachineFile, PodName, apply_pod, find_pod, make_run_parser
from ronde.errors import UsageError

FULL = "train-2.train.default.svc.cluster.local"
HEAD = "joins train-0.train.default.svc.cluster.local:29400"
INDEXED = {"RONDE_NODES": "3", "JOB_COMPLETION_INDEX": "2"}
LWS = {
    "LWS_GROUP_SIZE": "3",
    "LWS_WORKER_INDEX": "2",
    "LWS_LEADER_ADDRESS": "lws-0.lws.ns",
}
TRAIN_JOB = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "2",
}
PYTORCH_JOB = {
    **TRAIN_JOB,
    "PET_MASTER_ADDR": "train-master-0",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "12",
    "RANK": "2",
}
del PYTORCH_JOB["JOB_COMPLETION_INDEX"]
ELASTIC = {
    "PET_NNODES": "2:4",
    "PET_RDZV_ENDPOINT": "train-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NPROC_PER_NODE": "auto",
}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_NODE_RANK": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
}
VOLCANO = {
    "VC_TASK_INDEX": "1",
    "RANK": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "train-master-0.train",
    "MASTER_PORT": "23456",
}


def pod(environ, nodes=None, host="train-2"):
    return find_pod(environ, PodName(host, lambda: FULL), nodes)


@pytest.mark.parametrize(
    ("environ", "nodes", "text", "slots"),
    [
        (INDEXED, None, HEAD, ""),
        ({"JOB_COMPLETION_INDEX": "2"}, (3, 3), HEAD, ""),
        ({**INDEXED, "RONDE_HEAD": "a:1"}, None, "joins a:1", ""),
        (LWS, None, "joins lws-0.lws.ns:29400", ""),
        (TRAIN_JOB, None, "joins train-node-0-0.train:29500", "4"),
        (PYTORCH_JOB, None, "joins train-master-0:29500", "4"),
        (SKYPILOT, None, "joins 10.0.0.1:29400", ""),
        (VOLCANO, None, "joins train-master-0.train:29400", ""),
    ],
)  # fmt: skip
def test_pod_two_of_three_joins_the_head(environ, nodes, text, slots):
    found = pod(environ, nodes)
    assert (found.number, found.nodes, found.slots) == (2, "3", slots)
    assert str(found).startswith("pod 2 of 3 (")
    assert str(found).endswith(text)


@pytest.mark.parametrize("environ", [INDEXED, LWS, TRAIN_JOB, SKYPILOT, VOLCANO])
def test_pod_zero_is_the_head(environ):
    numbers = ("JOB_COMPLETION_INDEX", "RANK", "LWS_WORKER_INDEX", "PET_NODE_RANK")
    zero = dict.fromkeys({*numbers, "SKYPILOT_NODE_RANK"} & environ.keys(), "0")
    assert str(pod({**environ, **zero})).endswith("is the head")


def test_pods_without_a_number_know_the_head_by_its_name():
    assert pod(ELASTIC, host="train-worker-0").number == 0
    found = pod(ELASTIC, host="train-worker-3")
    assert (found.number, found.nodes) == (-1, "2:4")
    assert str(found) == "pod of 2:4 (PET_RDZV_ENDPOINT) joins train-worker-0:23456"


def test_numbers_of_an_elastic_job_may_have_gaps():
    assert pod({"RONDE_NODES": "2:3", "JOB_COMPLETION_INDEX": "5"}).number == 5


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "a"},
        {"PET_NNODES": "1", "PET_NODE_RANK": "0"},
        {"SKYPILOT_NUM_NODES": "1"},
        {"JOB_COMPLETION_INDEX": "0"},
        {"OMPI_MCA_orte_default_hostfile": "/no/such/file"},
    ],
)
def test_variables_of_one_node_are_no_place(environ):
    assert pod(environ) is None


@pytest.mark.parametrize(
    ("environ", "nodes", "said"),
    [
        ({"JOB_COMPLETION_INDEX": "1"}, None, "nodes must be known in pod 1"),
        ({**TRAIN_JOB, "PET_NNODES": "abc"}, None, "PET_NNODES must be a whole number"),
        ({**TRAIN_JOB, "PET_NNODES": "2:1"}, None, "begin with the smaller number"),
        ({**TRAIN_JOB, "PET_NNODES": "0"}, None, "PET_NNODES must be a whole"),
        ({**TRAIN_JOB, "PET_NNODES": "2"}, None, "must be below the number"),
        ({**TRAIN_JOB, "PET_NODE_RANK": "-1"}, None, "PET_NODE_RANK must be a whole"),
        ({**TRAIN_JOB, "PET_NODE_RANK": "1"}, None, "must agree, got 1 and 2"),
        ({**TRAIN_JOB, "PET_MASTER_ADDR": " "}, None, "PET_MASTER_ADDR must be set"),
        ({**TRAIN_JOB, "PET_MASTER_PORT": "x"}, None, "PET_MASTER_PORT must be a"),
        (TRAIN_JOB, (2, 2), "by --nodes must agree, got 3 and 2"),
        (TRAIN_JOB | LWS | {"LWS_WORKER_INDEX": "1"}, None, "must agree, got 1 and 2"),
        (TRAIN_JOB | LWS | {"LWS_GROUP_SIZE": "4"}, None, "must agree, got 4 and 3"),
        ({"LWS_GROUP_SIZE": "3"}, None, "LWS_WORKER_INDEX must be set"),
        ({**LWS, "LWS_LEADER_ADDRESS": ""}, None, "LWS_LEADER_ADDRESS must be"),
        ({**SKYPILOT, "SKYPILOT_NODE_IPS": ""}, None, "SKYPILOT_NODE_IPS must be set"),
        ({"RONDE_NODES": "3"}, None, "RONDE_NODE_INDEX must be set"),
        # Otherwise each pod would train a world of its own.
        ({"RONDE_NODE_INDEX": "1"}, None, "RONDE_NODES must be above 1 where"),
        ({**INDEXED, "RONDE_NODES": "1", "RONDE_NODE_INDEX": "2"}, None, "got 1. Corr"),
        ({"RONDE_HEAD": "a:1"}, None, "must be above 1 where RONDE_HEAD is"),
        ({**LWS, "LWS_GROUP_SIZE": "1"}, None, "LWS_GROUP_SIZE must be above 1 where"),
        ({"PET_NODE_RANK": "1"}, None, "must be above 1 where PET_NODE_RANK"),
        ({**INDEXED, "RONDE_HEAD": "a:b"}, None, "RONDE_HEAD must be HOST:PORT"),
        ({"K_MPI_JOB_ROLE": "worker"}, None, "worker of an MPIJob must run sshd"),
        ({"K_MPI_JOB_ROLE": "launcher"}, None, "launcher of an MPIJob must have a"),
        ({"K_MPI_JOB_ROLE": "launcher", "HYDRA_HOST_FILE": "/no"}, None, "got /no. "),
    ],
)  # fmt: skip
def test_contradictions_and_incomplete_variables_are_refused(environ, nodes, said):
    with pytest.raises(UsageError) as refused:
        pod(environ, nodes)
    assert said in str(refused.value)


def test_an_mpi_launcher_has_its_hosts_in_a_file(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("train-worker-0 slots=1\n")
    environ = {
        "OMPI_MCA_orte_default_hostfile": str(path),
        "K_MPI_JOB_ROLE": "launcher",
    }
    assert pod(environ) == MachineFile("OMPI_MCA_orte_default_hostfile", str(path))


def read(words, environ):
    parser = make_run_parser()
    options = parser.parse_args(words)
    return apply_pod(parser, options, parser.given(options), environ)


def test_the_same_line_counts_as_far_as_a_node_needs_it():
    words = ["--slots", "2", "--max-restarts", "3", "--join-timeout", "30m", "train.py"]
    options, text = read(words, TRAIN_JOB)
    assert (options.agent, options.program) == ("train-node-0-0.train:29500", [])
    assert (options.slots, options.join_timeout, options.max_restarts) == (2, 1800, 0)
    assert options.nproc_per_node is None  # --slots wins
    assert text == "pod 2 of 3 (PET_NODE_RANK) joins train-node-0-0.train:29500"
    head = TRAIN_JOB | {"PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"}
    options, text = read(["--max-restarts", "3", "train.py"], head)
    assert (options.listen, options.nodes, options.nproc_per_node) == ("29500", "3", 4)
    assert (options.max_restarts, options.program) == (3, ["train.py"])


@pytest.mark.parametrize(
    "words",
    [
        ["--standalone"],
        ["-H", "a"],
        ["--agent", "a:1"],
        ["--listen", "1"],
        ["--nested"],
    ],
)
def test_options_win(words):
    options, text = read([*words, "train.py"], TRAIN_JOB)
    assert (options.pod, text) == (None, "")


@pytest.mark.parametrize("rank", ["LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"])
@pytest.mark.parametrize("environ", [TRAIN_JOB, VOLCANO, SKYPILOT])
def test_a_rank_of_another_launcher_is_no_pod(environ, rank):
    assert read(["train.py"], {**environ, rank: "1"})[1] == ""


def test_pod_zero_without_a_count_warns():
    _, text = read(["train.py"], {"JOB_COMPLETION_INDEX": "0"})
    assert "each trains for itself" in text
