import pytest
from hypothesis import given, strategies as st

from ronde.errors import WorldError
from ronde.world import (
    HOROVOD,
    OPEN_MPI,
    PLAIN,
    PMI,
    RONDE,
    TORCHRUN,
    Launcher,
    LauncherEnv,
    World,
    parse_tasks_per_node,
    read_rank_info,
)

DIALECTS = [RONDE, TORCHRUN, HOROVOD, OPEN_MPI, PMI, PLAIN]


@st.composite
def places(draw: st.DrawFn) -> dict[str, int]:
    """One rank's true place in a world of nodes that need not be equal."""
    nodes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    node = draw(st.integers(0, len(nodes) - 1))
    local_rank = draw(st.integers(0, nodes[node] - 1))
    return {
        "rank": sum(nodes[:node]) + local_rank,
        "size": sum(nodes),
        "local_rank": local_rank,
        "local_size": nodes[node],
        "cross_rank": sum(n > local_rank for n in nodes[:node]),
        "cross_size": sum(n > local_rank for n in nodes),
        "node_rank": node,
        "num_nodes": len(nodes),
    }


def environment(dialect: LauncherEnv, place: dict[str, int]) -> dict[str, str]:
    environ = {name: str(place[key]) for key, name in dialect.names.items()}
    return environ | ({dialect.job_id: "job"} if dialect.is_marked else {})


@given(st.sampled_from(DIALECTS), places())
def test_what_a_launcher_says_is_what_is_read(
    dialect: LauncherEnv, place: dict[str, int]
) -> None:
    claim = read_rank_info(environment(dialect, place))
    assert claim.launcher is dialect.launcher
    for name in ("rank", "size", "local_rank", "local_size"):
        assert getattr(claim, name) == place[name]
    if "cross_rank" in dialect.names or place["num_nodes"] == 1:
        assert (claim.cross_rank, claim.cross_size) == (
            place["cross_rank"],
            place["cross_size"],
        )
    else:
        assert claim.world is None


@given(st.sampled_from(DIALECTS), places(), st.data())
def test_a_part_of_an_environment_is_a_world_of_one_only_where_it_says_so(
    dialect: LauncherEnv, place: dict[str, int], data: st.DataObject
) -> None:
    environ = environment(dialect, place)
    kept = data.draw(
        st.lists(st.sampled_from(sorted(environ)), min_size=1, unique=True)
    )
    if dialect.is_marked:
        kept.append(dialect.job_id)  # Without its mark it would be PLAIN's.
    part = {name: environ[name] for name in kept}
    if not {dialect.names[key] for key in dialect.required} <= part.keys():
        if (
            dialect is PLAIN
            and "RANK" not in part
            and all(
                value == str(int(name.endswith("SIZE"))) for name, value in part.items()
            )
        ):
            claim = read_rank_info(part)
            assert (claim.size, len(claim.stray)) == (1, len(part))
            return
        with pytest.raises(WorldError) as refusal:
            read_rank_info(part)
        # The message shows all that was there.
        assert all(name in str(refusal.value) for name in kept)
        return
    try:
        claim = read_rank_info(part)
    except WorldError:
        return
    assert claim.launcher is not Launcher.NONE
    assert (claim.rank, claim.size) == (place["rank"], place["size"])


@given(st.sampled_from(DIALECTS[1:]), st.sampled_from(DIALECTS[1:]), places(), places())
def test_two_launchers_agree_nest_or_are_refused(
    first: LauncherEnv, second: LauncherEnv, one: dict[str, int], other: dict[str, int]
) -> None:
    environ = environment(first, one) | environment(second, other)
    try:
        claim = read_rank_info(environ)
    except WorldError:
        return
    assert (claim.rank, claim.size) in {
        (one["rank"], one["size"]),
        (other["rank"], other["size"]),
    }


@given(
    st.dictionaries(
        st.sampled_from([*RONDE.names.values(), "TORCHELASTIC_RUN_ID", "PMI_RANK"]),
        st.one_of(st.integers(-2, 5).map(str), st.text("0123 -+x_٣", max_size=3)),
    )
)
def test_any_values_give_a_sound_claim_or_a_world_error(
    environ: dict[str, str],
) -> None:
    try:
        claim = read_rank_info(environ)
    except WorldError:
        return
    assert 0 <= claim.rank < claim.size
    assert 0 <= claim.local_rank < claim.local_size <= claim.size
    assert (claim.launcher is Launcher.NONE) == (len(environ) == len(claim.stray))


@given(st.lists(st.integers(0, 999), min_size=1, max_size=30))
def test_run_lengths_round_trip(tasks: list[int]) -> None:
    parts: list[list[int]] = []
    for count in tasks:
        if parts and parts[-1][0] == count:
            parts[-1][1] += 1
        else:
            parts.append([count, 1])
    text = ",".join(str(c) if n == 1 else f"{c}(x{n})" for c, n in parts)
    assert parse_tasks_per_node(text) == tasks


@pytest.mark.parametrize("text", ["", "4(x0)", "4(x9999999)", "a", "4,", "4(x2)(x2)"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(WorldError, match=r"must be counts such as 4\(x2\),3"):
        parse_tasks_per_node(text)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_worlds_from_hosts_count_every_host(hosts: list[str]) -> None:
    worlds = [World.from_hosts(rank, hosts) for rank in range(len(hosts))]
    for host, world in zip(hosts, worlds, strict=True):
        assert world.local_size == hosts.count(host)
        same_local = [w for w in worlds if w.local_rank == world.local_rank]
        assert world.cross_size == len(same_local)
        assert sorted(w.cross_rank for w in same_local) == list(range(len(same_local)))
