import json
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from ronde.collectives import (
    CLASS_LIMITS_BYTES,
    CLASS_SAMPLES_BYTES,
    COLLECTIVES,
    SIZED,
    UNSIZED,
    Choice,
    EngineTable,
    TableKey,
    default_table,
    explain,
    from_json,
    load,
    save,
    size_class,
    to_json,
)
from ronde.world import ENGINES, read_cache_directory

KEY = TableKey(("a", "b"), (2, 2), (("ronde", "1"), ("torch", "2")))
SHAPES = [(1,), (4,), (1, 1), (2, 2), (3, 1)]

choices = st.builds(
    Choice, st.sampled_from(ENGINES[1:]), st.sampled_from(["", "ring"]), st.text()
)
tables = st.builds(
    EngineTable,
    st.fixed_dictionaries(
        {
            **{n: st.tuples(*[choices] * len(CLASS_SAMPLES_BYTES)) for n in SIZED},
            **{n: st.tuples(choices) for n in UNSIZED},
        }
    ),
    st.text(),
)


def test_every_class_has_its_sample():
    assert [size_class(n) for n in CLASS_SAMPLES_BYTES] == [0, 1, 2, 3, 4]
    assert [size_class(n) for n in CLASS_LIMITS_BYTES] == [0, 1, 2, 3]
    assert [size_class(n + 1) for n in CLASS_LIMITS_BYTES] == [1, 2, 3, 4]
    assert size_class(0) == 0


@pytest.mark.parametrize("ranks_per_host", SHAPES)
def test_rules_know_every_collective_and_size(ranks_per_host):
    table = default_table(ranks_per_host)
    for name in COLLECTIVES:
        for size in (0, *CLASS_SAMPLES_BYTES, 1 << 40):
            choice = table.choose(name, size, "cpu")
            assert choice.engine in ENGINES[1:]
            assert choice.reason
            assert table.choose(name, size, "cuda").engine == "nccl"


def test_rules_by_hosts():
    assert default_table([4]).choose("all_reduce", 4, "cpu").engine == "shared_memory"
    assert default_table([1, 1]).choose("all_reduce", 1 << 30, "cpu").engine == "gloo"
    both = default_table([2, 2])
    assert both.choose("all_reduce", 1024, "cpu").engine == "gloo"
    assert both.choose("all_reduce", 1 << 20, "cpu").engine == "hierarchical"


@given(tables, st.sampled_from(UNSIZED), st.integers(0), st.integers(0))
def test_where_ranks_may_differ_in_size_they_choose_alike(table, name, one, other):
    assert table.choose(name, one, "cpu") == table.choose(name, other, "cpu")


@given(tables)
def test_a_table_reads_back(table):
    read = from_json(to_json(table, KEY), KEY)
    assert read == table
    assert explain(read) == explain(table)


@given(tables, st.data())
def test_a_cut_table_is_never_fatal(table, data):
    text = to_json(table, KEY)
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    with pytest.raises(ValueError):  # noqa: PT011  whatever was cut
        from_json(cut, KEY)


def test_explanation_joins_equal_classes():
    one, other = Choice("gloo", "", "why"), Choice("scheduled", "ring", "because")
    table = replace(
        default_table([1, 1]),
        choices=dict.fromkeys(UNSIZED, (one,))
        | dict.fromkeys(SIZED, (one, one, other, other, one)),
    )
    lines = explain(table).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["all_reduce", "up", "to", "64KiB", "gloo", "why"],
        ["all_reduce", "64KiB", "to", "16MiB", "scheduled/ring", "because"],
        ["all_reduce", "above", "16MiB", "gloo", "why"],
    ]
    assert lines[-1].split() == ["accelerators", "every", "size", "nccl"]


def test_a_tuned_table_is_found_again(tmp_path):
    table = default_table([2, 2])
    path = save(table, KEY, tmp_path / "cache" / "ronde")
    assert path.read_text() == to_json(table, KEY)
    assert list(path.parent.iterdir()) == [path]
    assert load(KEY, tmp_path / "cache" / "ronde") == (table, "")
    save(default_table([1, 1]), KEY, path.parent)
    assert load(KEY, path.parent)[0] == default_table([1, 1])


def test_what_was_never_measured_is_nothing_to_speak_of(tmp_path):
    assert load(KEY, tmp_path / "nowhere") == (None, "")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda _: "{", "Expecting"),
        (lambda _: "[]", "it must be an object"),
        (lambda _: "\udcff", "is not used"),
        (lambda text: text.replace('"gloo"', '"gluu"'), "it names no engine"),
        (lambda text: text.replace("4096", "4095"), "or size classes"),
        (lambda text: text.replace('"torch"', '"tarch"'), "other hosts, ranks"),
        (
            lambda text: text.replace('"all_to_all"', '"all_for_all"'),
            "other collectives",
        ),
        (lambda _: "[" * 100_000, "is not used"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, damage, said):
    path = save(default_table([2, 2]), KEY, tmp_path)
    text = damage(path.read_text())
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    table, note = load(KEY, tmp_path)
    assert table is None
    assert said in note
    assert note.startswith(f"{path} is not used: ")
    assert note.endswith("Measure anew: ronde bench --tune")


def test_other_ranks_and_versions_have_other_files(tmp_path):
    others = [
        replace(KEY, hosts=("a", "c")),
        replace(KEY, ranks_per_host=(2, 1)),
        replace(KEY, versions=(("ronde", "2"),)),
    ]
    assert len({key.path(tmp_path) for key in (KEY, *others)}) == 4


def test_the_key_names_what_is_installed():
    key = TableKey.here({"n1": 2, "n0": 1})
    assert (key.hosts, key.ranks_per_host) == (("n1", "n0"), (2, 1))
    assert {"ronde", "torch"} <= dict(key.versions).keys()
    assert json.loads(json.dumps(key.versions))


def test_the_cache_directory():
    home = {"HOME": "/home/u"}
    assert str(read_cache_directory(home)) == "/home/u/.cache/ronde"
    assert str(read_cache_directory(home | {"XDG_CACHE_HOME": "/c"})) == "/c/ronde"
    relative = home | {"XDG_CACHE_HOME": "c"}
    assert str(read_cache_directory(relative)) == "/home/u/.cache/ronde"
