"""A plan in words, for a few ranks and for a thousand."""

from ronde.launch import Host, HostShare, JobPlan, JobSpec, make_facts
from ronde.render import format_runs, plan_text
from ronde.topology import RankResources

HALVES = (
    RankResources(
        2, (0, 1), 0, {"CUDA_VISIBLE_DEVICES": "0"}, "GPU 0 H100", "mlx5_0", "half"
    ),
    RankResources(
        2, (2, 3), 1, {"CUDA_VISIBLE_DEVICES": "1"}, "GPU 1 H100", "mlx5_1", "half"
    ),
)
ANYWHERE = (RankResources(1, why="not bound"),) * 4


def plan(
    *hosts: tuple[str, tuple[RankResources, ...]], env: dict[str, str] | None = None
):
    shares: list[HostShare] = []
    for name, places in hosts:
        start = shares[-1].ranks.stop if shares else 0
        env_of_host = {"GLOO_SOCKET_IFNAME": f"eth{len(shares)}"}
        ranks = range(start, start + len(places))
        shares.append(HostShare(Host(name), ranks, places, env_of_host))
    return JobPlan(
        spec=JobSpec(("python", "my train.py"), env or {}),
        facts=make_facts(),
        shares=tuple(shares),
        address="10.0.0.1",
    )


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_every_rank_has_a_line_with_what_it_gets():
    lines = lines_of(plan_text(plan(("a", HALVES))))
    assert lines[0] == "2 ranks on 1 host, meeting at 10.0.0.1: python 'my train.py'"
    assert lines[2] == "host rank local device cores CPUs memory NIC why"
    assert lines[3] == "a 0 0 GPU 0 H100 2 0-1 0 mlx5_0 half"
    assert lines[4] == "a 1 1 GPU 1 H100 2 2-3 1 mlx5_1 half"
    assert lines[-1] == "Nothing was started."


def test_ranks_and_hosts_that_are_alike_share_a_line():
    lines = lines_of(plan_text(plan(("a", ANYWHERE), ("b", ANYWHERE), ("c", HALVES))))
    assert "a 0-3 0-3 - 1 all - - not bound" in lines
    assert "b 4-7 as on a" in lines
    assert "c 8 0 GPU 0 H100 2 0-1 0 mlx5_0 half" in lines


def test_a_thousand_ranks_stay_readable():
    hosts = [(f"n{number:03d}", HALVES * 4) for number in range(125)]
    text = plan_text(plan(*hosts))
    assert "n001 to n124" in text
    assert "8-999" in text
    assert "  LOCAL_RANK: 0-7, 125 times\n" in text
    assert "  NODE_RANK: 0-124, each 8 times\n" in text
    assert len(text.splitlines()) < 70
    assert max(map(len, text.splitlines())) < 200


def test_variables_of_all_stand_once_and_those_of_each_by_rank():
    lines = lines_of(plan_text(plan(("a", HALVES), ("b", ANYWHERE[:1]))))
    of_all = lines[: lines.index("variables of each rank, by rank:")]
    of_each = lines[len(of_all) :]
    assert "WORLD_SIZE=3" in of_all
    assert "RANK: 0-2" in of_each
    assert "CUDA_VISIBLE_DEVICES: 0-1; (unset)" in of_each
    assert "GLOO_SOCKET_IFNAME: eth0, 2 times; eth1" in of_each
    assert "OMP_NUM_THREADS: 2, 2 times; 1" in of_each


def test_secrets_are_not_shown_and_controls_do_nothing():
    env = {"WANDB_API_KEY": "hunter2", "A": "x y", "B": "\x1b[2Jgone"}
    noted = plan(("a", ANYWHERE), env=env)._replace(notices=("be warned.",))
    text = plan_text(noted)
    assert "hunter2" not in text
    assert "WANDB_API_KEY=" in text
    assert "  A='x y'\n" in text
    assert "\x1b" not in text
    assert "note: be warned.\n" in text


def test_values_are_put_together_only_where_nothing_is_lost():
    assert format_runs(["0", "1", "2", "5"]) == "0-2; 5"
    assert format_runs(["7", "7", "7"]) == "7, 3 times"
    assert format_runs(["0", "0", "1", "1"]) == "0-1, each 2 times"
    assert format_runs(["0", "1", "0", "1"]) == "0-1, 2 times"
    assert format_runs(["n9", "n10"]) == "n9 to n10"
    assert format_runs(["n09", "n10"]) == "n09 to n10"
    assert format_runs(["n9", "m10"]) == "n9; m10"
    assert format_runs([]) == ""
    assert format_runs([str(n * 2) for n in range(20)]).endswith("; 14; and 12 more")
