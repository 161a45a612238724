"""The report on a profile: shares, late ranks, lines and advice."""

import json
import math

import pytest
from hypothesis import given, settings, strategies as st
from jsonschema import validate
from tests.monitor.jobs import make_table
from tests.monitor.profiles import (
    MODEL,
    NAMES,
    STACKS,
    TRAIN,
    make_profile,
    make_window,
    user,
    without_steps,
)

from ronde.monitor import (
    Profile,
    StackReader,
    find_advice,
    find_headline,
    summarize_profile,
)
from ronde.render import draw_profile, write_collapsed, write_speedscope
from ronde.status import StepTime


def summarize(*ranks, read=lambda file, before: (), **options):
    return summarize_profile(make_profile(*ranks, **options), read)


def advice_of(report, kind):
    return [each.text for each in find_advice(report) if each.kind == kind]


@pytest.mark.parametrize(
    ("name", "kind", "line"),
    [
        ("compute", "compute", 40),
        ("model", "compute", 212),
        ("backward", "compute", 44),
        ("hook", "communication", 44),
        ("step", "compute", 45),
        ("reduce", "communication", 45),
        ("barrier", "communication", 46),
        ("loader", "input", 88),
        ("own loader", "input", 7),
        ("save", "checkpoint", 52),
        ("synchronize", "sync", 47),
        ("ddp", "compute", 40),
        ("import", "other", 1),
        ("lost", "other", None),
    ],
)
def test_the_innermost_known_frame_decides_the_kind_of_a_stack(name, kind, line):
    found = StackReader(None).read(STACKS[name])
    assert found.kind == kind
    assert (found.line[1] if found.line else None) == line


def test_stacks_show_the_engine_the_loop_and_opaque_ddp():
    reader = StackReader(None)
    assert reader.read(STACKS["own loader"]).loop == (TRAIN, 88)
    reader.read(STACKS["reduce"])
    assert (reader.engine, reader.is_loading_itself) == ("shared_memory", True)
    reader.read(STACKS["ddp"])
    assert reader.is_ddp_opaque
    reader.read(STACKS["hook"])
    assert not reader.is_ddp_opaque


def test_on_gpus_a_line_that_reads_a_value_is_a_wait_for_the_gpu():
    source = {TRAIN: ["x = loss.item()", "y = loss.items()"]}
    read = lambda file, before: source.get(file, ())  # noqa: E731
    stacks = [(user(1),), (user(2),), (user(3),)]
    kinds = [StackReader(lambda file: source[file]).read(each).kind for each in stacks]
    assert kinds == ["sync", "compute", "compute"]
    assert StackReader(None).read(stacks[0]).kind == "compute"
    gpus = without_steps(make_table(1), device_bytes=1 << 30)
    report = summarize({"compute": 500, "synchronize": 500}, status=gpus, read=read)
    assert report.shares.sync == pytest.approx(0.5)
    assert "train.py:47" in advice_of(report, "sync")[0]
    assert "8 GPUs" not in find_headline(report)


def test_shares_are_those_of_the_samples():
    profile = make_profile({"compute": 300, "loader": 150, "save": 40, "import": 10})
    profile = profile._replace(begun_at=profile.begun_at - 60)  # the first is late
    report = summarize_profile(profile)
    assert report.shares == pytest.approx((0.6, 0, 0, 0.3, 0.08, 0, 0.02), abs=1e-12)
    assert math.fsum(report.shares) == 1
    assert report.duration_s == pytest.approx(10)
    assert report.ranks[0].shares == report.shares
    assert [line.location for line in report.lines][:2] == [
        "train.py:40",
        "train.py:88",
    ]
    assert sum(map(sum, report.bins)) == pytest.approx(1)
    assert find_headline(report) == (
        "train.py spends its time computing in this configuration (1 rank on 1 node)."
    )


def test_the_excess_over_the_shortest_communication_is_waiting_for_the_late_rank():
    usual = {"compute": 200, "reduce": 300}
    report = summarize(usual, usual, {"compute": 350, "model": 50, "reduce": 100})
    assert report.shares == pytest.approx((16 / 30, 0.2, 8 / 30, 0, 0, 0, 0))
    assert report.ranks[0].shares.waiting == pytest.approx(0.4)
    assert report.ranks[2].shares.waiting == pytest.approx(0)
    blame = [rank.blame for rank in report.ranks]
    assert blame == pytest.approx([0, 0, report.shares.waiting])
    assert [rank.num_late for rank in report.ranks] == [0, 0, 2]
    [text] = advice_of(report, "waiting")
    assert text == (
        "The ranks wait 27% of the time, mostly for rank 2 (node0; last in 2 of 2 "
        "periods), which spends 75% more time at train.py:40. Even out the ranks' work "
        "there. If it is even, compare node0 with the other nodes: ronde check. Gain: "
        "at most 1.36x."
    )


def test_work_that_only_the_late_rank_does_is_named():
    report = summarize({"compute": 200, "reduce": 300}, {"compute": 200, "model": 300})
    assert report.shares.waiting == pytest.approx(0.3)
    [text] = advice_of(report, "waiting")
    assert "it alone spends 60% of its time at model.py:212." in text


def test_a_difference_within_the_noise_of_sampling_is_no_waiting():
    report = summarize(*({"compute": 300 + n, "reduce": 200 - n} for n in range(8)))
    assert report.shares.waiting == 0
    assert report.shares.communication == pytest.approx(0.4 - 0.007)


def alternating_table():
    """Return two ranks that are late in turn, for 60 of the 80 ms that one blocks."""
    parts = [(0.02, 0.08), (0.08, 0.02)]
    table = make_table(2)
    rows = [
        row._replace(
            status=row.status._replace(
                device_bytes=0,
                steps=tuple(
                    StepTime(n, 0.2, parts[n % 2][row.rank], 0.0, 0.01)
                    for n in range(16)
                ),
            )
        )
        for row in table.workers
    ]
    return table._replace(workers=tuple(rows))


def test_steps_show_ranks_that_are_late_in_turn_and_the_garbage_collector():
    step = {"compute": 150, "reduce": 50}
    report = summarize(step, step, num_windows=5, status=alternating_table())
    assert report.shares == pytest.approx((0.7, 0.1, 0.15, 0, 0, 0, 0.05))
    assert (report.rounds, report.num_rounds) == ("steps", 16)
    assert [rank.num_late for rank in report.ranks] == [8, 8]
    [text] = advice_of(report, "waiting")
    assert text.startswith(
        "The ranks wait 15% of the time for each other, in turn: rank 0, rank 1."
    )


def test_ranks_that_are_late_in_turn_are_seen_in_long_slices():
    a, b = [("compute", 400), ("reduce", 100)], [("compute", 100), ("reduce", 400)]
    windows = [
        make_window(worker, (a, b)[(worker + n) % 2], begun_s=5.0 * n)
        for n in range(4)
        for worker in range(2)
    ]
    profile = make_profile({}, {})._replace(windows=tuple(windows))
    report = summarize_profile(profile._replace(ended_at=profile.begun_at + 20))
    assert report.shares[:3] == pytest.approx((0.5, 0.2, 0.3))
    assert [rank.num_late for rank in report.ranks] == [2, 2]


def test_slow_input_is_advised_upon_with_its_loop():
    report = summarize({"own loader": 400, "compute": 600})
    assert find_headline(report).startswith("train.py spends its time computing")
    [text] = advice_of(report, "input")
    assert text.startswith("40% of the time goes to input at train.py:88. Its Data")
    assert "no workers: the rank loads" in text
    assert text.endswith("Gain: at most 1.67x.")
    [text] = advice_of(summarize({"loader": 400, "compute": 600}), "input")
    assert "more workers (num_workers)" in text
    assert not advice_of(summarize({"loader": 4, "compute": 600}), "input")


def test_communication_and_checkpoints_are_advised_upon():
    report = summarize({"reduce": 700, "save": 200, "compute": 100})
    assert find_headline(report).startswith("train.py is communication-bound in this")
    [text] = advice_of(report, "communication")
    assert text.startswith("70% of the time is communication by shared_memory that no")
    assert "train.py:45" in text
    assert "train.py:52" in advice_of(report, "checkpoint")[0]
    gains = [each.gain for each in find_advice(report) if each.kind != "note"]
    assert gains == pytest.approx([1 / 0.3, 1 / 0.8])


def test_notes_name_shares_without_gain_and_the_limits_of_the_figures():
    report = summarize({"compute": 90, "ddp": 10, "import": 10}, {}, rate_hz=50)
    text = "\n".join(advice_of(report, "note"))
    start = "Under 1% of the time is communication, waiting for late ranks, input or ch"
    assert start in text
    assert "Few samples: 220 per rank. A share of one rank may be off by 7% of" in text
    assert "Without samples: rank 1. " in text
    assert "DDP communicates inside backward(), in C++" in text
    assert "9% of the time is imports" in text
    assert "most of it at train.py:1." in text
    [*_, text] = advice_of(summarize({"compute": 900, "lost": 1000}), "note")
    assert "most of it at an unknown line." in text


def test_failed_readings_are_reported():
    profile = make_profile({"compute": 1000})
    window = profile.windows[0]._replace(runs=(), problem="py-spy is not installed")
    report = summarize_profile(profile._replace(windows=(window, profile.windows[1])))
    text = "50% of the expected samples are missing (py-spy is not installed)."
    assert text in " ".join(advice_of(report, "note"))
    assert report.shares.compute == 1
    lost = profile._replace(windows=(window,))
    text = "Without samples: rank 0 (py-spy is not installed)."
    assert text in " ".join(advice_of(summarize_profile(lost), "note"))
    assert find_headline(summarize_profile(lost)) == "train.py was not sampled."


def test_a_line_has_its_source_unless_the_file_changed(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("".join(f"line {n}\n" for n in range(1, 300)))
    profile = make_profile({"model": 1000})
    frames = [f._replace(file=str(file)) for f in profile.windows[0].frames]
    windows = [w._replace(frames=tuple(frames)) for w in profile.windows]
    profile = profile._replace(windows=tuple(windows))
    [line] = summarize_profile(profile).lines
    assert (line.text, line.context) == ("", ())  # written after the job began
    job = profile.status.job._replace(started_at=file.stat().st_mtime + 1)
    profile = profile._replace(status=profile.status._replace(job=job))
    [line] = summarize_profile(profile).lines
    assert (line.text, line.first) == ("line 212", 210)
    assert line.context == tuple(f"line {n}" for n in range(210, 215))


def test_the_text_page_is_at_most_100_columns_wide():
    usual = {"compute": 200, "reduce": 300, "model": 20, "own loader": 40, "save": 20}
    late = {"compute": 400, "reduce": 100, "model": 20, "own loader": 40, "save": 20}
    source = {TRAIN: ["x = 1  # " + 200 * "long "] * 99, MODEL: ["y"] * 400}
    report = summarize(*[usual] * 39, late, read=lambda file, _: source[file])
    text = draw_profile(report)
    assert max(map(len, text.splitlines())) <= 100
    assert "waiting for a rank" in text
    assert "and 8 more ranks" in text
    assert "  39  node4" in text  # the late rank


COUNTS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 300)), max_size=6)
WINDOWS = st.lists(
    st.tuples(st.integers(0, 5), COUNTS, st.floats(-2.0, 30.0), st.floats(0.0, 9.0)),
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(WINDOWS, st.floats(0.0, 30.0), st.integers(1, 200), st.booleans())
def test_any_profile_has_a_report_whose_shares_add_up(
    windows, length_s, rate, has_steps
):
    status = make_table(4, late=1)  # workers 4 and 5 are unknown to it
    profile = Profile(
        status if has_steps else without_steps(status),
        1000.0,
        1000.0 + length_s,
        rate,
        tuple(make_window(w, r, begun_s=b, length_s=n) for w, r, b, n in windows),
    )
    report = summarize_profile(profile)
    num_samples = sum(count for _, runs, *_ in windows for _, count in runs)
    whole = float(num_samples > 0)
    assert sum(rank.num_samples for rank in report.ranks) == num_samples
    assert math.fsum(report.shares) == pytest.approx(whole, abs=1e-12)
    assert all(0 <= share <= 1 for share in report.shares)
    for rank in report.ranks:
        expected = float(rank.num_samples > 0)
        assert math.fsum(rank.shares) == pytest.approx(expected, abs=1e-12)
        assert math.fsum(map(math.fsum, rank.bins)) == pytest.approx(expected)
    blame = math.fsum(rank.blame for rank in report.ranks)
    assert blame == pytest.approx(report.shares.waiting, abs=1e-9) or blame == 0
    assert draw_profile(report)


def test_stacks_are_exported_for_flame_graphs(tmp_path):
    profile = make_profile({"model": 30, "step": 20}, {"model": 50}, num_windows=1)
    write_collapsed(profile, tmp_path / "stacks.txt")
    lines = (tmp_path / "stacks.txt").read_text().splitlines()
    assert f"rank 1;main ({TRAIN}:40);forward ({MODEL}:212) 50" in lines
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == 100
    write_speedscope(profile, tmp_path / "profile.json")
    plain = json.loads((tmp_path / "profile.json").read_text())
    validate(plain, SPEEDSCOPE)
    frames = plain["shared"]["frames"]
    assert [each["name"] for each in plain["profiles"]] == ["rank 0", "rank 1"]
    for each in plain["profiles"]:
        assert len(each["samples"]) == len(each["weights"])
        assert all(0 <= i < len(frames) for stack in each["samples"] for i in stack)
        assert each["endValue"] - each["startValue"] == pytest.approx(0.5)
        assert sum(each["weights"]) == pytest.approx(0.5)
    outer, inner = plain["profiles"][1]["samples"][0]
    assert (frames[outer]["line"], frames[inner]["line"]) == (40, 212)


SPEEDSCOPE = {
    "type": "object",
    "required": ["$schema", "shared", "profiles"],
    "properties": {
        "$schema": {"const": "https://www.speedscope.app/file-format-schema.json"},
        "shared": {
            "type": "object",
            "required": ["frames"],
            "properties": {
                "frames": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string"},
                            "file": {"type": "string"},
                            "line": {"type": "number"},
                        },
                    },
                }
            },
        },
        "profiles": {
            "type": "array",
            "items": {
                "type": "object",
                "required": [
                    "type",
                    "name",
                    "unit",
                    "startValue",
                    "endValue",
                    "samples",
                    "weights",
                ],
                "properties": {
                    "type": {"const": "sampled"},
                    "unit": {"enum": ["none", "milliseconds", "seconds", "bytes"]},
                    "samples": {
                        "type": "array",
                        "items": {"type": "array", "items": {"type": "integer"}},
                    },
                    "weights": {"type": "array", "items": {"type": "number"}},
                },
            },
        },
    },
}
"""The part for sampled profiles of speedscope's documented format."""
