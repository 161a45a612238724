import torch


def add(communicator):
    t = torch.full((5,), float(communicator.rank + 1))
    communicator.all_reduce(t).wait()
    return t.tolist()


def test_all_reduce(run_ranks):
    assert run_ranks(3, add) == [[6.0] * 5] * 3


def bare(claim):
    from ronde.collectives import connect

    c = connect(claim)
    t = torch.ones(2)
    c.all_reduce(t).wait()
    c.close()
    return t.tolist()


def test_bare(run_ranks_bare):
    for launcher in ("ronde", "torchrun", "plain"):
        assert run_ranks_bare(2, bare, launcher=launcher) == [[2.0, 2.0]] * 2
