"""All ranks make the tokens that each request gets alone, and differ in no step."""

import random
import re
from collections import defaultdict
from pathlib import Path

import pytest
from tests.serve.model import CAPACITY, answer_to, make_engine, random_requests

from ronde.errors import CollectiveError, UsageError
from ronde.serve import BatchManager, InferenceRequest, OutOfStepError

NUM = 60
PAGE = Path(__file__).parents[2] / "docs/how-to/batch-manager.md"


class Client:
    """Hands out requests at random moments and keeps what comes back."""

    def __init__(self, requests, seed):
        self.todo = list(requests)
        self.chance = random.Random(seed)
        self.responses = []
        self.statistics = []
        self.manager = None

    def get_requests(self, most):
        if not self.todo:
            self.manager.stop()
        num = min(most + 2, self.chance.choice((0, 0, 1, 3)), len(self.todo))
        taken, self.todo = self.todo[:num], self.todo[num:]
        return taken

    def tokens(self):
        made = defaultdict(list)
        for response in self.responses:
            made[response.id] += response.tokens
        return dict(made)

    def final(self):
        """Return the final responses by request, each of which has exactly one."""
        found = [each for each in self.responses if each.is_final]
        assert len({each.id for each in found}) == len(found)
        return {each.id: each for each in found}


def serve(client, policy="guaranteed_no_evict", engine=None, **callbacks):
    client.manager = BatchManager(
        engine or make_engine(),
        client.get_requests,
        client.responses.append,
        send_stats=client.statistics.append,
        policy=policy,
        **callbacks,
    )
    client.manager.run()


def serve_all(info, policy, seed):
    """Serve on this rank; return how often a callback was called and what came back."""
    client = Client(random_requests(random.Random(seed), NUM), seed)
    serve(client, policy)
    return len(client.statistics), client.responses


@pytest.mark.parametrize(
    ("size", "launcher", "policy"),
    [
        (1, "ronde", "guaranteed_no_evict"),
        (3, "ronde", "guaranteed_no_evict"),
        (2, "torchrun", "static_batch"),
        (4, "plain", "guaranteed_no_evict"),
    ],
)
def test_each_request_gets_the_tokens_that_it_gets_alone(
    run_ranks_bare, size, launcher, policy
):
    first, *others = run_ranks_bare(size, serve_all, policy, 5, launcher=launcher)
    assert others == [(0, [])] * (size - 1)
    client = Client([], 0)
    client.responses = first[1]
    requests = random_requests(random.Random(5), NUM)
    assert client.tokens() == {each.id: answer_to(each) for each in requests}
    assert client.final().keys() == {each.id for each in requests}


def test_a_running_batch_is_joined_unless_it_is_static():
    most = {}
    for policy in ("guaranteed_no_evict", "static_batch"):
        client = Client(random_requests(random.Random(1), NUM), 1)
        serve(client, policy)
        assert all(each.num_blocks <= CAPACITY.num_blocks for each in client.statistics)
        assert max(s.num_running for s in client.statistics) <= CAPACITY.max_requests
        most[policy] = client.statistics[-1].iteration
    assert most["guaranteed_no_evict"] < 0.8 * most["static_batch"]


def test_requests_are_stopped_while_they_run_and_while_they_wait():
    chance = random.Random(2)
    requests = [r._replace(max_tokens=20) for r in random_requests(chance, 20)]
    client, stopped = Client(requests, 2), set()

    def poll_stop():
        found = {r.id for r in requests if chance.random() < 0.02}
        stopped.update(found)
        return found

    serve(client, poll_stop=poll_stop)
    final, made = client.final(), client.tokens()
    assert final.keys() == {each.id for each in requests}
    cancelled = {i for i, each in final.items() if each.finish == "cancel"}
    assert 0 < len(cancelled) < len(requests)
    assert cancelled <= stopped
    for request in requests:
        whole, got = answer_to(request), made.get(request.id, [])
        assert got == (whole[: len(got)] if request.id in cancelled else whole)


def test_a_bad_request_is_answered_and_the_others_are_served():
    good = InferenceRequest(1, (1, 2), 8)
    client = Client(
        [good, good, InferenceRequest(2, (), 8), InferenceRequest(3, (1,), 99)], 3
    )
    serve(client)
    errors = [each.error for each in client.responses if each.error]
    assert errors[0] == "id must not be in use, got 1."
    assert errors[1].startswith("prompt must be at least one token")
    assert errors[2].startswith("max_tokens must be from 1 to 63 after a prompt of 1")
    assert client.tokens()[1] == answer_to(good)


class Astray:
    """An engine that differs from those of other ranks from one step on."""

    def __init__(self, kind, at):
        self.own, self.kind, self.at = make_engine(), kind, at
        self.num = self.planted = 0

    capacity = property(lambda self: self.own.capacity)
    has_work = property(lambda self: self.own.has_work)

    def add(self, request):
        self.own.add(request)

    def cancel(self, request_id):
        self.own.cancel(request_id)

    def step(self):
        self.num += 1
        rows = self.own._rows
        old = [i for i, row in rows.items() if row.tokens]
        is_now = self.num >= self.at and not self.planted and len(old) > 1
        if is_now and self.kind == "extra":
            self.own.add(InferenceRequest(9, (1,), 50))
        elif is_now and self.kind == "missing":
            self.own.cancel(old[0])
        elif is_now and self.kind == "order":
            rows[old[0]] = rows.pop(old[0])
        made = self.own.step()
        if is_now and self.kind == "token":
            made[0] = made[0]._replace(token=made[0].token + 1)
        self.planted = self.num if is_now else self.planted
        return made


def go_astray(info, kind, rank, at):
    """Return if this rank found it, the message, the last step and the planted."""
    requests = random_requests(random.Random(at), NUM)
    requests = [each._replace(max_tokens=30, stop_ids=()) for each in requests]
    engine = Astray(kind if info.rank == rank else "", at)
    with pytest.raises((CollectiveError, UsageError)) as caught:
        serve(Client(requests, at), engine=engine)
    is_out = isinstance(caught.value, OutOfStepError)
    return is_out, str(caught.value), engine.num, engine.planted


FAULTS = [
    pytest.param(kind, rank, at, marks=[pytest.mark.soak] if at > 1 else [])
    for kind in ("extra", "missing", "order", "token")
    for rank in range(3)
    for at in (1, 2, 3, 5, 9, 14, 22, 35, 50)
]


@pytest.mark.parametrize(("kind", "rank", "at"), FAULTS)
def test_ranks_that_differ_end_at_the_next_step(run_ranks_bare, kind, rank, at):
    ends = run_ranks_bare(3, go_astray, kind, rank, at)
    found = {i: message for i, (is_out, message, _, _) in enumerate(ends) if is_out}
    planted = ends[rank][3]
    assert planted >= at
    assert all(num <= planted + 1 for _, _, num, _ in ends)
    if rank > 0:
        assert f"rank {rank} has digest" in found[rank]
        assert f"before step {planted}, and rank 0 has" in found[rank]
    else:
        assert found or "requests in progress" in ends[0][1], ends


def raise_somewhere(info, rank):
    client = Client(random_requests(random.Random(1), NUM), 1)
    engine = make_engine()
    if info.rank == rank:

        def fail(rows):
            raise ZeroDivisionError("of this rank")

        engine._decode = fail
    with pytest.raises((CollectiveError, ZeroDivisionError)) as caught:
        serve(client, engine=engine)
    return type(caught.value).__name__


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_of_one_rank_ends_all(run_ranks_bare, rank):
    names = run_ranks_bare(3, raise_somewhere, rank)
    assert [i for i, name in enumerate(names) if name == "ZeroDivisionError"] == [rank]


def test_wrong_policies_are_refused():
    with pytest.raises(UsageError, match="policy must be one of guaranteed_no_evict"):
        BatchManager(make_engine(), lambda _: None, lambda _: None, policy="fifo")
    with pytest.raises(UsageError, match="does not evict, got 'max_utilization'"):
        BatchManager(
            make_engine(), lambda _: None, lambda _: None, policy="max_utilization"
        )


def test_the_program_of_the_page_answers_all_requests(capsys):
    [program] = re.findall(r"```python.*?\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(program, {})  # noqa: S102  without a launcher it is one rank
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    ends = [line for line in lines if line[-1] in ("length", "stop")]
    assert sorted(int(line[0]) for line in ends) == list(range(20))
