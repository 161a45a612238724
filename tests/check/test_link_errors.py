"""Error counters of links, and changes if they grow."""

from ronde.check import RDMA_ERRORS, HostFacts, SavedRun, compare, read_errors

PORT = "sys/class/infiniband/mlx5_0/ports/1"


def count(root, **counts):
    """Have the port of a saved tree show counters: ``counters__symbol_error=3``."""
    for name, number in counts.items():
        file = root / PORT / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{number}\n")


def test_error_counters_are_read_by_port(tmp_path):
    count(tmp_path, counters__symbol_error=7, hw_counters__out_of_sequence=0)
    count(tmp_path, counters__port_rcv_data=99, counters__link_downed="N/A (no PMA)")
    count(tmp_path, hw_counters__implied_nak_seq_err=2)
    assert read_errors(str(tmp_path)) == {
        "mlx5_0:1": {"symbol_error": 7, "out_of_sequence": 0, "implied_nak_seq_err": 2}
    }
    assert read_errors(str(tmp_path / "none")) == {}


def test_a_grown_counter_is_a_change(tmp_path):
    runs = []
    for number in (7, 9):
        count(tmp_path, counters__symbol_error=number, counters__port_rcv_errors=100)
        values = {RDMA_ERRORS: read_errors(str(tmp_path))}
        runs.append(SavedRun((HostFacts("a", values, {}, {}),), (), ()))
    (change,) = compare(*runs).facts
    assert change.fact == "network.rdma_errors[mlx5_0:1][symbol_error]"
    assert (change.before, change.after) == ("7", "9")
