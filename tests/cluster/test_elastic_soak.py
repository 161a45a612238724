"""A training goes on while ranks, hosts and links are lost, and hosts come and go."""

import pytest
from tests.cluster.machines import machines, why_not
from tests.soak import elastic_faults

SEED = 18


@pytest.mark.soak
@pytest.mark.parametrize(("num_faults", "is_divided"), [(20, False), (10, True)])
def test_random_faults_lose_nothing(tmp_path, num_faults, is_divided):
    """No hang, no process left, each sample once, and the weights to the last bit."""
    if reason := why_not():
        pytest.skip(reason)
    plan = elastic_faults.Plan(pace=elastic_faults.QUICK, is_divided=is_divided)
    with machines(elastic_faults.NUM_HOSTS, shared=[tmp_path]) as cluster:
        piece = elastic_faults.run_piece(cluster, tmp_path, SEED, num_faults, plan)
    output = (tmp_path / "output").read_text(errors="replace")
    assert not piece.wrong, f"{piece.wrong}\n{output[-20000:]}"
    assert piece.num_faults == num_faults
    assert piece.num_views > num_faults / 4
