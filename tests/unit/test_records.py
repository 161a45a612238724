import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from ronde.errors import UsageError
from ronde.records import Record, append_record, read_records

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
)


@given(
    st.text(),
    st.dictionaries(st.text(), st.one_of(LEAVES, st.lists(LEAVES, max_size=3))),
)
def test_a_record_survives_its_line(kind: str, values: dict[str, object]) -> None:
    record = Record(kind, values)
    line = record.to_json()
    assert "\n" not in line
    assert Record.from_json(line) == record


def test_files_are_appended_to_and_read_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    written = [Record("a", {"n": 1}), Record("b", {"n": 2}), Record("a", {"n": 3})]
    for record in written:
        append_record(path, record)
    assert read_records(path) == written
    assert [r.values["n"] for r in read_records(path, kind="a")] == [1, 3]


def _append_many(path: Path, writer: int) -> None:
    for number in range(50):
        append_record(path, Record("line", {"writer": writer, "n": number}))


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append_many, args=(path, i)) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = {(r.values["writer"], r.values["n"]) for r in read_records(path)}
    assert found == {(i, n) for i in range(3) for n in range(50)}


GOOD = Record("a", {}).to_json()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a record must be JSON"),
        ("[]", 'a record must have a "schema"'),
        ('{"kind": "a"}', 'a record must have a "schema"'),
        (
            GOOD.replace('"schema": 1', '"schema": 2'),
            "record has schema 2, but this ronde reads schema 1",
        ),
        (
            GOOD.replace('"values"', '"figures"'),
            r"a record must have the fields .*'values'\], got .*'figures'",
        ),
        (
            GOOD.replace('"kind": "a"', '"kind": 1'),
            r"a record\.kind must be str, got 1\.",
        ),
        (
            GOOD.replace('"cpu"', '"chip"'),
            r"a record\.machine must have the fields \['cpu'.* got \['chip'",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(UsageError, match=message) as refusal:
        read_records(path)
    assert str(refusal.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object()])
def test_what_is_not_json_is_refused_unwritten(tmp_path: Path, value: object) -> None:
    path = tmp_path / "records.jsonl"
    with pytest.raises(UsageError, match="a record's values must have JSON types"):
        append_record(path, Record("a", {"x": value}))
    assert not path.exists()
