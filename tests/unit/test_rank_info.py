import json
from pathlib import Path

import pytest

from ronde.errors import WorldError
from ronde.world import ENGINES, Launcher, Meeting, RankInfo, World, read_rank_info

ENVIRONMENTS = Path(__file__).parent / "environments"

RONDE = {
    "RONDE_JOB_ID": "j1",
    "RONDE_EPOCH": "0",
    "RONDE_COOKIE": "c",
    "RONDE_HOST": "n1",
    "RONDE_NODE_RANK": "0",
    "RONDE_STORE": "/run/s/store.0",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "4242",
}
HOROVOD = {
    "HOROVOD_HOSTNAME": "n2",
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "9999",
    "HOROVOD_CONTROLLER": "gloo",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "11",
    "SLURM_NNODES": "3",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
}
TORCHRUN_ON_NODE_1_OF_2 = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}


def mpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
    }


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("openmpi_5_0_11", Launcher.OPEN_MPI),
        ("openmpi_5_0_11_oversubscribed", Launcher.OPEN_MPI),
        ("mpich_5_0_2", Launcher.PMI),
        ("torchrun_2_13_standalone", Launcher.TORCHRUN),
        ("torchrun_2_13_static", Launcher.TORCHRUN),
        ("torchrun_inside_mpirun", Launcher.TORCHRUN),
    ],
)
def test_variables_captured_from_real_launchers(name: str, launcher: Launcher) -> None:
    ranks = json.loads((ENVIRONMENTS / f"{name}.json").read_text())
    infos = [read_rank_info(environ) for environ in ranks]
    size = len(ranks)
    assert [info.launcher for info in infos] == [launcher] * size
    worlds = [info.world for info in infos]
    assert [world and world.rank for world in worlds] == list(range(size))
    assert {world and world.size for world in worlds} == {size}
    # One machine: every local number follows, whatever order the launcher gave them.
    assert sorted(info.local_rank for info in infos) == list(range(size))
    assert {(c.local_size, c.cross_rank, c.cross_size) for c in infos} == {(size, 0, 1)}


def test_torchrun_hosts_the_meeting() -> None:
    ranks = json.loads((ENVIRONMENTS / "torchrun_2_13_static.json").read_text())
    assert read_rank_info(ranks[0]).meeting == Meeting(
        "127.0.0.1", 29712, is_hosted=True
    )
    restarted = ranks[0] | {"TORCHELASTIC_RESTART_COUNT": "2"}
    meeting = Meeting("127.0.0.1", 29712, is_hosted=True, attempt=2)
    assert read_rank_info(restarted).meeting == meeting
    assert read_rank_info(TORCHRUN_ON_NODE_1_OF_2).meeting == Meeting("n1", 29500)


def test_ronde() -> None:
    assert read_rank_info(RONDE) == RankInfo(
        Launcher.RONDE,
        rank=0,
        size=2,
        local_rank=0,
        local_size=2,
        cross_rank=0,
        cross_size=1,
        meeting=Meeting("127.0.0.1", 4242),
        store="/run/s/store.0",
        job_id="j1",
    )
    assert read_rank_info(TORCHRUN_ON_NODE_1_OF_2 | {"RONDE_STORE": "/x"}).store == ""


def test_slurm_step_with_unequal_nodes() -> None:
    info = read_rank_info(SLURM)
    assert info.launcher is Launcher.SLURM
    assert info.world == World(9, 11, 1, 3, 2, 3)
    assert info.job_id == "77.0"


def test_slurm_counts_only_hosts_that_have_the_local_rank() -> None:
    step = SLURM | {"SLURM_TASKS_PER_NODE": "4,1,6", "SLURM_LOCALID": "3"}
    assert read_rank_info(step).world == World(9, 11, 3, 6, 1, 2)


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "4294967292"])
def test_slurm_pseudo_step_is_no_launcher(step: str) -> None:
    assert read_rank_info(SLURM | {"SLURM_STEP_ID": step}).launcher is Launcher.NONE


def test_slurm_allocation_is_no_launcher() -> None:
    environ = {name: v for name, v in SLURM.items() if name != "SLURM_STEP_ID"}
    assert read_rank_info(environ) == RankInfo(Launcher.NONE, 0, 1, 0, 1, 0, 1)


def test_open_mpi_over_nodes_leaves_the_node_open() -> None:
    info = read_rank_info(
        mpi(2, 4, 0, 2) | {"MASTER_ADDR": "n1", "MASTER_PORT": "5000"}
    )
    assert info.world is None
    assert (info.local_rank, info.local_size) == (0, 2)
    assert info.meeting == Meeting("n1", 5000)


def test_plain_without_local_numbers_leaves_them_open() -> None:
    info = read_rank_info({"RANK": "2", "WORLD_SIZE": "4"})
    assert info == RankInfo(Launcher.PLAIN, 2, 4, 0, 1)
    assert info.world is None
    assert read_rank_info(
        {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}
    ) == RankInfo(Launcher.PLAIN, 2, 4, 2, 3)


@pytest.mark.parametrize(
    "outer",
    [mpi(1, 2, 0, 1), {"PMI_RANK": "1", "PMI_SIZE": "2"}],
    ids=["openmpi", "pmi"],
)
def test_one_torchrun_a_node_is_the_inner_world(outer: dict[str, str]) -> None:
    info = read_rank_info(TORCHRUN_ON_NODE_1_OF_2 | outer)
    assert (info.launcher, info.rank, info.size) == (Launcher.TORCHRUN, 3, 4)


@pytest.mark.parametrize(
    ("inner", "launcher", "rank"),
    [
        (TORCHRUN_ON_NODE_1_OF_2, Launcher.TORCHRUN, 3),
        (mpi(1, 2, 1, 2), Launcher.OPEN_MPI, 1),
        (mpi(0, 2, 0, 2), Launcher.OPEN_MPI, 0),  # as many as ronde's
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, Launcher.PMI, 1),
    ],
)
def test_a_launcher_that_a_rank_starts_has_ranks_of_its_own(
    inner: dict[str, str], launcher: Launcher, rank: int
) -> None:
    own = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "TORCHELASTIC_RUN_ID": "j1"}
    info = read_rank_info(RONDE | own | inner)
    assert (info.launcher, info.rank, info.store) == (launcher, rank, "")
    # Where ronde's ranks meet is not where these do.
    address = info.meeting and info.meeting.address
    assert address == inner.get("MASTER_ADDR")


def test_slurm_left_over_from_starting_mpi_does_not_count() -> None:
    daemon = SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert read_rank_info(daemon | mpi(1, 2, 1, 2)).rank == 1


def test_pmi_under_srun_takes_the_local_numbers_of_the_step() -> None:
    info = read_rank_info(SLURM | {"PMI_RANK": "9", "PMI_SIZE": "11"})
    assert (info.launcher, info.local_rank, info.local_size) == (Launcher.PMI, 1, 3)
    assert info.cross_size == 3


def test_world_size_exported_beside_srun_agrees() -> None:
    info = read_rank_info(SLURM | {"WORLD_SIZE": "11"})
    assert (info.launcher, info.rank) == (Launcher.SLURM, 9)
    with pytest.raises(
        WorldError, match=r"WORLD_SIZE=8.*SLURM_NTASKS=11.*without RANK"
    ):
        read_rank_info(SLURM | {"WORLD_SIZE": "8"})


def test_rank_from_procid_by_hand_agrees() -> None:
    info = read_rank_info(SLURM | {"RANK": "9", "WORLD_SIZE": "11"})
    assert (info.launcher, info.local_rank) == (Launcher.PLAIN, 1)


CONTRADICTIONS = {
    "two launchers": (
        mpi(0, 2, 0, 2) | {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "4"},
        r"horovod has 0 of 4 \(HOROVOD_RANK=0, .*\) but openmpi has 0 of 2",
    ),
    "stale rank beside srun": (
        SLURM | {"RANK": "0", "WORLD_SIZE": "1"},
        r"plain has 0 of 1 \(RANK=0, WORLD_SIZE=1\) but slurm has 9 of 11",
    ),
    "local ranks differ": (
        mpi(1, 2, 0, 1) | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        r"OMPI_COMM_WORLD_LOCAL_RANK=0.*LOCAL_RANK=1",
    ),
    "rank above size": (
        {"RANK": "4", "WORLD_SIZE": "4"},
        r"RANK must be below WORLD_SIZE, got RANK=4 and WORLD_SIZE=4\.",
    ),
    "a node without ranks": (
        TORCHRUN_ON_NODE_1_OF_2 | {"LOCAL_WORLD_SIZE": "4"},
        r"LOCAL_WORLD_SIZE \+ GROUP_WORLD_SIZE - 1 = 4 \+ 2 - 1 = 5, got 4\.",
    ),
    "one node, other ranks elsewhere": (
        RONDE | {"WORLD_SIZE": "3"},
        r"LOCAL_WORLD_SIZE must be equal where GROUP_WORLD_SIZE=1 to WORLD_SIZE",
    ),
    "tasks do not add up": (
        SLURM | {"SLURM_NTASKS": "12"},
        r"SLURM_TASKS_PER_NODE=4\(x2\),3 is 4 \+ 4 \+ 3 = 11, got 12\.",
    ),
    "local id past the node": (
        SLURM | {"SLURM_LOCALID": "3"},
        r"SLURM_LOCALID must be below the number of tasks on node 2",
    ),
}


@pytest.mark.parametrize(
    ("environ", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys()
)
def test_contradictions_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        read_rank_info(environ)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.0", "0x1", "1_0", "٣", "9" * 30])
def test_a_rank_is_a_plain_integer(text: str) -> None:
    with pytest.raises(WorldError, match="RANK must be an integer of at least 0, got"):
        read_rank_info({"RANK": text, "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("half", "message"),
    [
        ({"MASTER_ADDR": "n1"}, "MASTER_ADDR=n1 and no MASTER_PORT"),
        ({"MASTER_PORT": "29500"}, "MASTER_PORT=29500 and no MASTER_ADDR"),
    ],
)
def test_half_a_meeting_is_refused(half: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        read_rank_info({"RANK": "0", "WORLD_SIZE": "2"} | half)
    alone = RankInfo(Launcher.NONE, 0, 1, 0, 1, 0, 1)
    stray = tuple("=".join(item) for item in half.items())
    assert read_rank_info(half) == alone._replace(stray=stray)


STRAYS = [
    {"LOCAL_RANK": "0"},
    {"WORLD_SIZE": "1"},
    {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"},
    {"CROSS_RANK": "0", "CROSS_SIZE": "1"},
]


@pytest.mark.parametrize("stray", STRAYS, ids=" ".join)
def test_what_is_left_over_does_not_count_and_is_listed(stray: dict[str, str]) -> None:
    said = {"=".join(item) for item in stray.items()}
    for launcher in ({}, SLURM, HOROVOD, mpi(1, 2, 1, 2)):
        info = read_rank_info(launcher | stray)
        assert set(info.stray) == said
        assert info._replace(stray=()) == read_rank_info(launcher)


@pytest.mark.parametrize("port", ["0", "65536", "ssh"])
def test_a_port_is_a_port(port: str) -> None:
    with pytest.raises(WorldError, match="MASTER_PORT must be"):
        read_rank_info(RONDE | {"MASTER_PORT": port})


def test_no_launcher_is_a_world_of_one() -> None:
    meeting_only = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    for environ in ({}, {"PATH": "/bin", "OMP_NUM_THREADS": "2"}, meeting_only):
        assert read_rank_info(environ) == RankInfo(Launcher.NONE, 0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize("environ", [{}, RONDE, SLURM, TORCHRUN_ON_NODE_1_OF_2])
def test_any_launchers_ranks_are_told_the_engine(environ):
    info = read_rank_info(environ)
    assert (info.engine, info.algorithm) == ("auto", "")
    said = {"RONDE_ENGINE": "scheduled", "RONDE_ALGORITHM": "ring"}
    assert read_rank_info(environ | said) == info._replace(
        engine="scheduled", algorithm="ring"
    )
    assert read_rank_info(environ | {"RONDE_ENGINE": "", "RONDE_ALGORITHM": ""}) == info


def test_every_engine_that_can_be_named_can_be_connected_by():
    from ronde.collectives import ENGINES as FACTORIES

    assert set(FACTORIES) <= set(ENGINES)
