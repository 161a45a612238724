"""A training goes on while ranks, hosts and links are lost, and hosts come and go."""

import pytest
from benchmarks import elastic_soak
from tests.cluster.machines import machines, why_not

FAULTS, SEED = 30, 18


@pytest.mark.timeout(300)
def test_thirty_random_faults_lose_nothing(tmp_path):
    """No hang, no process left, each sample once, and the weights to the last bit."""
    if reason := why_not():
        pytest.skip(reason)
    with machines(elastic_soak.NUM_HOSTS, shared=[tmp_path]) as cluster:
        pace = elastic_soak.QUICK
        piece = elastic_soak.run_piece(cluster, tmp_path, SEED, FAULTS, pace=pace)
    output = (tmp_path / "output").read_text(errors="replace")
    assert not piece.wrong, f"{piece.wrong}\n{output[-20000:]}"
    assert piece.num_faults == FAULTS
    assert piece.num_views > FAULTS / 4
