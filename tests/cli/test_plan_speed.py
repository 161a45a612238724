"""``ronde plan``: predicted speed, from records and published speeds, and refusals."""

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from tests.commands import refusal
from tests.limits import HANG_S

from ronde.cli import main
from ronde.records import Record, append_record, read_records

POINTS = ("--points", "1=253.1,4=925,8=1282", "--per-node", "4")
PROGRAM = ("--parameters", "25.6M", "--batch", "64", "--unit", "images")
CLUSTER = ("--link", "10Gbit/s", "--transport", "tcp", "--alpha-us", "10")
KNOWN = (*POINTS, *PROGRAM, *CLUSTER, "--overlap", "none")
HEADINGS = ["ranks", "nodes", "step", "samples/s", "80", "%", "efficiency", "binds"]
BLOCKS = "blocks=12,hidden=768,sequence=196"
PHASES = ("input", "host_to_device", "forward", "backward", "update")


def show(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def read(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return json.loads(show(capsys, *words, "--json"))


def training(path: Path, **changed: object) -> Path:
    """Append a record of two ranks, as ``ronde bench train`` wrote it at first."""
    phases = dict(zip(PHASES, (0.1, 0.2, 40.0, 80.0, 10.0), strict=True))
    variants = {
        "one_rank": {"step_ms": 130.0, "units_per_s": 246.0, "phases_ms": phases},
        "all_ranks": {"step_ms": 180.0, "units_per_s": 355.6, "phases_ms": phases},
        "no_communication": {"step_ms": 135.0, "phases_ms": phases},
    }
    values: dict[str, Any] = {
        "model": "mlp",
        "unit": "images",
        "num_parameters": 15_832_074,
        "batch_a_rank": 32,
        "framework": "torch",
        "dtype": "float32",
        "optimizer": "sgd",
        "compression": "none",
        "input": "prepared",
        "device": "cpu",
        "engine": "auto",
        "num_ranks": 2,
        "is_in_step": True,
        "variants": variants,
    }
    append_record(path, Record("bench_train", values | changed))
    return path


NEW_KEYS = {
    "hosts": [1, 1],
    "gradients": [[4_000_000, 4, 10.0], [11_832_074, 4, 60.0]],
    "buckets": {"num_bytes": [16_000_000, 47_328_296]},
    "spread": {"between_ranks": 0.02, "common": 0.01},
    "algorithm": "ring",
}


def test_two_published_numbers_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "--points", "1=253.1,8=1282", "--per-node", "4", "-n", "16,32")
    rows = text.splitlines()
    assert rows[1].split() == HEADINGS
    assert [row.split()[0] for row in rows[2:6]] == ["1", "8", "16", "32"]
    assert "unknown: parameters, link, transport, gpu_link, overlap, batch" in text
    assert "given" in rows[3]


def test_all_of_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    questions = (
        *("--nodes", "1..256", "--advise", "--what-if", "link=100Gbit/s/25Gbit/s"),
        *("--what-if", "batch=128,dtype=bfloat16", "--samples", "115M"),
        *("--cost", "usd_per_rank_hour=2,watts_per_rank=300,usd_per_kwh=0.2"),
    )
    text = show(capsys, *KNOWN, *questions)
    assert max(map(len, text.splitlines())) <= 100
    for words in ("without it", "Most would help: ", "least", "knee", "A rank of"):
        assert words in text
    found = read(capsys, *KNOWN, *questions)
    assert (found["form"], found["version"]) == ("ronde-plan", 1)
    rows = found["rows"]
    assert [row["ranks"] for row in rows] == [1, *(4 << k for k in range(9))]
    assert [row["is_measured"] for row in rows[:4]] == [True, True, True, False]
    for row in rows:
        assert 0 < row["low"] <= row["units_per_s"] <= row["high"]
        assert row["units_per_s"] == pytest.approx(64 * row["ranks"] / row["step_s"])
        assert sum(row["parts_s"].values()) == pytest.approx(row["step_s"])
    assert rows[0]["efficiency"] == 1
    assert rows[-1]["binds"] == ["bandwidth between"]
    fast, slower, other = found["what_if"]
    assert [each["change"] for each in (fast, slower)] == [
        "link=100Gbit/s",
        "link=25Gbit/s",
    ]
    assert len(fast["rows"]) == 3
    assert fast["rows"][-1]["ratio"][1] >= slower["rows"][-1]["ratio"][1] > 1
    assert other["rows"][-1]["ratio"][1] > 1
    hours = [cost["figures"]["hours"] for cost in found["cost"]]
    assert hours[0][1] == pytest.approx(115e6 / 253.1 / 3600)
    of_one = found["cost"][0]["figures"]
    kwh = hours[0][1] * 0.3 * 1.3
    assert of_one["kWh"][1] == pytest.approx(kwh)
    assert of_one["dollars"][1] == pytest.approx(hours[0][1] * 2 + kwh * 0.2)
    assert of_one["J a sample"][1] == pytest.approx(300 * 1.3 / 253.1)


def test_a_ratio_is_surer_than_the_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    change = ("--what-if", "dtype=bfloat16", "-n", "512")
    found = read(capsys, *POINTS, *PROGRAM, *CLUSTER, *change)
    low, _, high = found["what_if"][0]["rows"][0]["ratio"]
    assert 1 < high / low < found["rows"][-1]["high"] / found["rows"][-1]["low"]


@pytest.mark.parametrize(
    ("change", "is_faster"),
    [
        *(("link=100Gbit/s", True), ("link=1Gbit/s", False), ("alpha=1", True)),
        *(("compression=powersgd", True), ("overlap=bucket", True), ("jitter=0", True)),
        *(("compute=2", True), ("compute=0.5", False), ("batch=128", True)),
        *(("accumulation=2", True), ("jitter=0.2", False), ("input=5000", False)),
        *(("exchange=shard_all", False), ("sharding=shard_all", False)),
        *((f"{BLOCKS},mesh=tp=2", False), ("period=8", True)),
        *((f"{BLOCKS},microbatches=8,mesh=pp=2,tp=4", False),),
    ],
)
def test_changes(
    capsys: pytest.CaptureFixture[str], *, change: str, is_faster: bool
) -> None:
    words = (*KNOWN, "--gpu-link", "10GB/s", "-n", "64", "--what-if", change)
    found = read(capsys, *words)
    assert (found["what_if"][0]["rows"][0]["ratio"][1] > 1) == is_faster


def test_records(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    old = str(training(tmp_path / "old.jsonl"))
    new = str(training(tmp_path / "new.jsonl", **NEW_KEYS))
    asked = ("-n", "16", "--link", "1Gbit/s", "--transport", "tcp")
    text = show(capsys, old, "--per-node", "1", *asked)
    assert "older ronde" in text
    assert "batches were prepared" in text
    found = read(capsys, new, *asked)
    measured = found["inputs"]["measured"]
    assert {"phases", "gradients", "hosts", "parameters", "per_node"} <= {*measured}
    assert [(row["ranks"], row["nodes"]) for row in found["rows"]] == [
        *((1, 1), (2, 2), (16, 16))
    ]
    assert [row["units_per_s"] for row in found["rows"][:2]] == [246.0, 355.6]
    contradiction = read(capsys, new, *asked, "--parameters", "3M")
    assert contradiction["rows"] == found["rows"]
    assert any("parameters" in each for each in contradiction["inputs"]["left_out"])
    more = read(capsys, new, *asked, "--points", "8=1200", "--batch", "64")
    assert [(row["ranks"], row["batch"]) for row in more["rows"][2:]] == [
        *((8, 32), (16, 32))
    ]
    layouts = read(
        *(capsys, new, *asked, "--mesh", "tp=2", "--gpu-link", "10GB/s"),
        *("--what-if", f"{BLOCKS},mesh=tp=2/dp_shard=-1"),
    )
    assert layouts["rows"] == found["rows"]
    assert any("stated mesh" in each for each in layouts["inputs"]["left_out"])
    assert len(layouts["what_if"]) == 2
    assert any("not validated here" in each for each in layouts["notes"])
    twice = read(capsys, new, new, *asked)
    assert twice["rows"] == found["rows"]
    training(tmp_path / "new.jsonl", **NEW_KEYS, batch_a_rank=64)
    assert read(capsys, new, "--what-if", "batch=64")["what_if"]


def test_the_largest_job_without_torch() -> None:
    """Twenty sizes up to 27,600 ranks; the time is a figure of the documentation."""
    words = [*KNOWN[:3], "6", *KNOWN[4:], "--points", "1=100,6=590,12=1100"]
    words += ["-n", ",".join(str(6 * n) for n in [*range(2, 21), 4600])]
    program = (
        "import sys\nfrom ronde.cli import main\n"
        "assert main(['plan', *sys.argv[1:]]) == 0\nassert 'torch' not in sys.modules\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "27,600" in done.stdout
    assert int(done.stdout.split()[-1]) < 150 * 1024  # KiB


def test_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        'per_node = 4\nlink = "10Gbit/s"\ntransport = "tcp"\nalpha_us = 10\n'
        "[cost]\nusd_per_node_hour = 8\n"
    )
    points = (*POINTS[:2], *PROGRAM, "--overlap", "none", "-n", "64")
    in_file = read(capsys, *points, "--cluster", str(cluster), "--samples", "1M")
    assert in_file["rows"] == read(capsys, *KNOWN, "-n", "64")["rows"]
    assert "dollars" in in_file["cost"][0]["figures"]
    chart, record = tmp_path / "plan.svg", tmp_path / "plan.jsonl"
    show(capsys, *KNOWN, "-n", "64", "--svg", str(chart), "--record", str(record))
    drawn = ET.parse(chart).getroot()  # noqa: S314 - ours
    circles = drawn.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 3  # measured points
    for text in ("compute", "64 images a rank"):
        assert text in chart.read_text()
    [kept] = read_records(record, "plan")
    assert kept.values["rows"] == in_file["rows"]


def test_memory_and_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*KNOWN, "-n", "16", "--mesh", "dp_shard=16", "--limit", "1GiB")
    assert "A rank of dp_shard=16 sends 274.7MiB" in show(capsys, *words)
    assert "It fits without activations." in show(capsys, *words)
    assert "It does not fit: a rank has 1MiB" in show(capsys, *words[:-1], "1MiB")


def test_the_mesh_of_given_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        *("--points", "64=9532", "--per-node", "8", "--unit", "tokens:2048"),
        *("--batch", "64", "--parameters", "175B", "--dtype", "float16"),
        *("--mesh", "tp=8,pp=8", "--blocks", "96", "--hidden", "12288"),
        *("--microbatches", "64", "--link", "1600Gbit/s", "--gpu-link", "225GB/s"),
        *("--transport", "rdma", "-n", "128", "--global-batch", "128"),
    )
    found = read(capsys, *words, "--what-if", "mesh=tp=16,pp=8")
    few, more = found["rows"]
    assert few["step_s"] == pytest.approx(64 * 2048 / 9532)
    assert more["batch"] == 64
    bubbles = [row["parts_s"]["bubble"] for row in (few, more)]
    assert bubbles[0] == pytest.approx(bubbles[1], rel=0.2)
    assert found["what_if"][0]["rows"][0]["ratio"][1] < 1
    notes = " ".join(found["notes"])
    for text in ("A rank of pp=8,dp_replicate=2,tp=8", "tp=16 leaves nodes of 8"):
        assert text in notes


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--points 1=100,2=250", "2 ranks are faster than linear, 125%"),
        ("--points 1=100,2=190 --per-node 1 -n 1024", "over 64 times the largest"),
        ("--points 1=99 --parameters 100M --batch 8 -n 64", "No middle stands"),
        ("--points 1=100,2=190", "assumed: float32, 2 ranks a node"),
        ("--points 8=100,16=190 --per-node 8", "efficiency by 8 ranks"),
    ],
)
def test_doubtful_inputs(
    capsys: pytest.CaptureFixture[str], words: str, note: str
) -> None:
    assert note in " ".join(show(capsys, *words.split()).split())
    found = read(capsys, *words.split())
    for row in found["rows"]:
        figures = [row["low"], row["high"], *row["parts_s"].values()]
        assert all(math.isfinite(f) and f >= 0 for f in figures)
        assert 0 < row["low"] <= row["high"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-n 4", "a record of ronde bench train or --points is required"),
        ("--points 1=253", "one size alone needs --parameters and --link, got neither"),
        ("--points 1=0,2=3", "one must be a number above 0"),
        ("--points 1=nan,2=3", "one must be a number above 0"),
        ("--points 1=-3", "one must be a number above 0"),
        ("--points x=3", "one must be a whole number"),
        (
            "--points 1=3,1=4,2=6",
            "speeds of 1 rank must be above 0 and agree within 10%",
        ),
        ("{points} -n 6", "ranks must be a multiple of 4 a node, got 6"),
        ("{points} -n 0", "-n must be up to 64 numbers of at least 1, got '0'"),
        ("{points} --nodes 4..2", "--nodes must be up to 64 numbers"),
        ("{points} --algorithm rings", "--algorithm must be ring, tree"),
        ("{points} --unit pictures", "--unit must be samples, images"),
        ("{points} --link 10", "--link must be a rate, got '10'"),
        ("{points} --link 0Gbit/s", "--link must be a rate, got '0Gbit/s'"),
        ("{points} --alpha-us nan", "--alpha-us must be a number above 0"),
        ("{points} --oversubscription 0.5", "must be a number of at least 1"),
        ("{points} --transport ib", "--transport must be tcp, rdma, roce or"),
        ("{points} --what-if lnk=1GB/s", "unknown key 'lnk'. Did you mean link?"),
        ("{points} --what-if link", "--what-if link must be a rate, got ''"),
        ("{points} --what-if link=2GB/s", "link needs --parameters and --batch"),
        (f"{{points}} {' '.join(PROGRAM)} --what-if link=2GB/s", "needs today's rate"),
        ("{points} --what-if batch=2", "--what-if batch needs today's batch"),
        ("{points} --batch 8 --what-if batch=65", "must leave a rank 1 to 64 samples"),
        ("{points} --cost usd=1 --samples 1M", "unknown key 'usd'"),
        ("{points} --cost pue=0.5 --samples 1M", "must be a number of at least 1"),
        ("{points} --batch 8 --global-batch 8 -n 16", "--global-batch must leave a"),
        ("{points} --mesh tp=-1", "--mesh must have no cp, and numbers of tp and pp"),
        ("{points} --mesh tp=4", "must divide the number of ranks"),
        ("{points} --batch 8 --what-if mesh=tp=2", "tp and pp need parameters, blocks"),
        (
            "{points} --what-if exchange=shard_all,period=4",
            "exchange must be all_reduce",
        ),
        (
            "{points} --mesh dp_shard=-1 --exchange all_reduce",
            "with dp_shard shard_all",
        ),
        ("{points} --period 0.5", "--period must be a number of at least 1"),
        (
            f"{{known}} --gpu-link 9GB/s --what-if {BLOCKS},microbatches=65,mesh=pp=2",
            "microbatches must be at most the 64 samples of a copy",
        ),
        (
            "--points 8=24000,16=47000 --per-node 8 --parameters 7B --batch 4",
            "the bytes of 8 ranks alone take",
        ),
        ("{points} --limit 80GB", "--limit needs --parameters"),
        ("{points} --oversubscription 2", "oversubscription and leaf_nodes need each"),
        ("{points} --samples 1M --epochs 2", "--samples cannot be combined with"),
        (
            "{points} --svg no/such/folder.svg",
            "--svg and --record must be files that can be written",
        ),
        ("{points} --what-if dtype=bf16,dtype=fp16", "must have dtype once"),
        ("{known} --what-if bucket=1KiB", "bucket must be at least 64KiB"),
        ("{known} --what-if accumulation=1.5", "must be a whole number"),
        ("{known} --what-if per_node=3", "ranks must be a multiple of 3 a node"),
        (
            "{points} --samples 1M --cost usd_per_rank_hour=1,usd_per_node_hour=3",
            "both",
        ),
        ("minus.jsonl", "one_rank.step_ms in minus.jsonl must be a number"),
        ("hosts.jsonl", "hosts in hosts.jsonl must be a number from 1"),
        ("{points} --epochs 90", "a cost needs --samples, or --epochs and"),
        ("{points} --max-global-batch 8", "must allow 8 ranks of a known --batch"),
        ("{points} --cluster missing.toml", "--cluster must be a file of TOML"),
        ("{points} --cluster bad.toml", "bad.toml: unknown key 'lnk'. Did you mean"),
        ("missing.jsonl", "RECORD must be a file of records"),
        ("other.jsonl", "must have a record of kind bench_train or bench"),
        ("broken.jsonl", "has a training whose ranks' weights differ"),
        ("models.jsonl", "model must be the same in all records, got mlp in"),
        ("batches.jsonl", "batch_a_rank must be the same in all records"),
        ("dtypes.jsonl", "dtype must be the same in all records"),
        ("cut.jsonl", "a record must be complete, got a wrong value: KeyError"),
        ("speeds.jsonl", "agree within 10%, got 355.6 and 440"),
        ("one.jsonl -n 8 --per-node 2", "4 nodes need --link, as a record of CPUs"),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text('lnk = "10Gbit/s"\n')
    append_record(Path("other.jsonl"), Record("training", {}))
    training(Path("broken.jsonl"), is_in_step=False)
    changes: dict[str, dict[str, object]] = {
        "models": {"model": "resnet50"},
        "batches": {"batch_a_rank": 64},
        "dtypes": {"dtype": "bfloat16"},
    }
    for name, changed in changes.items():
        training(training(Path(f"{name}.jsonl")), **changed)
    training(Path("cut.jsonl"), variants={"one_rank": {}})
    training(Path("minus.jsonl"), variants={"one_rank": {"step_ms": -1.0}})
    training(Path("hosts.jsonl"), hosts=[1, 0])
    training(Path("one.jsonl"))
    training(Path("speeds.jsonl"))
    [record] = read_records(Path("speeds.jsonl"))
    variants = record.values["variants"]
    faster = variants["all_ranks"] | {"units_per_s": 440.0}
    training(Path("speeds.jsonl"), variants=variants | {"all_ranks": faster})
    words = words.format(points=" ".join(POINTS), known=" ".join(KNOWN))
    shown = refusal(capsys, "plan", *words.split())
    assert message in shown
    assert shown.count("\n") == 1
