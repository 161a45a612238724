"""GPUs that compute or copy slower than others of their model."""

import pytest

from ronde.check import COPIES, PRODUCTS, Fleet, HostFacts, Severity, all_checks, judge

FAIL, WARN, INFORM = Severity
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
CARD = "NVIDIA GeForce RTX 3060"


def computed(speed, model=H100):
    reported = {"checksum": "c0ffee", "num_products": 40, "num_wrong": 0}
    return reported | {"gflop_per_s": speed} | ({"model": model} if model else {})


def copied(up=55.0, down=55.0, within=2600.0, model=H100, *, is_near=True):
    return {
        "model": model,
        "is_near": is_near,
        "host_to_device_gb_per_s": up,
        "device_to_host_gb_per_s": down,
        "device_memory_gb_per_s": within,
    }


def find(fact, *hosts, **optional):
    """Return the findings on hosts a, b and so on with these facts."""
    checks = {
        fact: [check for check in all_checks() if fact in check.facts]
        for fact in (PRODUCTS, COPIES)
    }
    fleet = Fleet(
        tuple(
            HostFacts(name, {fact: reported, **optional}, {}, {})
            for name, reported in zip("abcdef", hosts, strict=False)
        ),
        {},
    )
    return judge(fleet, checks[fact]).findings


def gpus(*reported):
    return {f"cuda:{number}": each for number, each in enumerate(reported)}


def seven_and(odd, usual):
    """Return eight GPUs of which the fourth is odd."""
    return gpus(usual, usual, usual, odd, usual, usual, usual, usual)


# Computing


@pytest.mark.parametrize(
    ("speed", "severity"), [(91.0, None), (89.0, WARN), (79.0, FAIL)]
)
def test_one_slow_gpu_of_eight_is_found_within_one_host(speed, severity):
    found = find(PRODUCTS, seven_and(computed(speed), computed(100.0)))
    assert [(f.severity, f.host) for f in found] == ([(severity, "a")] * bool(severity))
    for finding in found:
        assert finding.check == "product-speed"
        assert finding.message == f"cuda:3 computed at {speed:g} GFLOP/s"
        assert finding.usual == "100 GFLOP/s on most GPUs of this model"


def test_models_are_not_compared_with_each_other():
    three = [computed(20.0, A100)] * 3
    assert find(PRODUCTS, gpus(computed(60.0), *three, computed(60.0))) == ()


def test_two_different_gpus_are_both_reported():
    found = find(PRODUCTS, gpus(computed(10.0), computed(100.0)))
    assert {(f.severity, f.message, f.usual) for f in found} == {
        (WARN, "cuda:0 computed at 10 GFLOP/s", "100 GFLOP/s elsewhere"),
        (WARN, "cuda:1 computed at 100 GFLOP/s", "10 GFLOP/s elsewhere"),
    }


# Copying


WAYS = (
    ("up", "from the host"),
    ("down", "to the host"),
    ("within", "within its memory"),
)


@pytest.mark.parametrize(("part", "words"), WAYS)
@pytest.mark.parametrize(("share", "severity"), [(91, None), (89, WARN), (79, FAIL)])
def test_a_gpu_that_copies_slower_than_its_model(part, words, share, severity):
    usual = copied(100.0, 100.0, 100.0, CARD)
    odd = copied(**{"up": 100.0, "down": 100.0, "within": 100.0} | {part: share})
    found = find(COPIES, seven_and(odd | {"model": CARD}, usual))
    assert [(f.check, f.severity) for f in found] == (
        [("gpu-copy-speed", severity)] * bool(severity)
    )
    for finding in found:
        assert finding.message == f"cuda:3 copied {words} at {share} GB/s"
        assert finding.usual == "100 GB/s on most GPUs of this model"


@pytest.mark.parametrize(
    ("model", "floor"),
    [(A100, 21), ("A100-SXM4-40GB", 21), (H100, 48), ("NVIDIA H200", 48)],
)
def test_a_known_model_has_a_minimum(model, floor):
    assert find(COPIES, gpus(copied(floor, floor, model=model))) == ()
    (finding,) = find(COPIES, gpus(copied(floor - 1, floor, model=model)))
    assert finding.severity is FAIL
    assert f"from the host at {floor - 1} GB/s, below the {floor} " in finding.message
    (finding,) = find(COPIES, gpus(copied(floor, floor - 1, model=model)))
    assert "to the host" in finding.message


@pytest.mark.parametrize(
    "model",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100 PCIe",
        CARD,
    ],
)
def test_models_with_similar_names_have_no_minimum(model):
    assert find(COPIES, gpus(copied(1.0, 1.0, 1.0, model))) == ()


def test_host_memory_on_another_node_is_a_warning():
    (finding,) = find(COPIES, gpus(copied(20.0, is_near=False)))
    assert finding.severity is WARN
    assert finding.message.endswith(
        "(the host memory may have been on another NUMA node)"
    )
    # The GPU's own memory is where it is.
    slow = copied(within=1000.0, is_near=False)
    (finding,) = find(COPIES, seven_and(slow, copied()))
    assert finding.severity is FAIL


def test_a_gpu_that_could_not_be_measured_is_reported_and_is_no_fault():
    (finding,) = find(COPIES, gpus(copied(), {"failure": "out of memory"}))
    assert finding.severity is INFORM
    assert finding.message == "cuda:1 could not be measured: out of memory"
