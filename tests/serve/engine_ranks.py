"""Serve random requests with transformers' engine; find ``generate``'s answers.

    python -m tests.serve.engine_ranks FOLDER STORE NUM SIZE[:ENGINE]...

Imports transformers once and forks all ranks. Writes the answers of each job and the
right ones to FOLDER/answers.json.
"""

import json
import os
import random
import sys
import traceback
from pathlib import Path

import torch
from examples.make_llama import make_model
from tests.serve.test_batch_manager import Client, serve
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from ronde.serve import InferenceRequest, ReplicaConfig, choose_token, load_engine
from ronde.world import read_rank_info

END, VOCABULARY = 1, 936
TIGHT = 8  # blocks of 32 tokens, for up to 6 requests of up to 5 blocks


def random_requests(num):
    chance = random.Random(num)
    shared = tuple(chance.choices(range(2, VOCABULARY), k=70))
    return [
        InferenceRequest(
            i,
            shared[: chance.choice((0, 0, 40, 70))]
            + tuple(chance.choices(range(VOCABULARY), k=chance.randint(1, 30))),
            chance.randint(1, 30),
            temperature=chance.choice((0.0, 0.0, 0.8)),
            top_k=chance.choice((0, 20)),
            top_p=chance.choice((1.0, 0.9)),
            seed=chance.getrandbits(64),
            stop_ids=(END, *chance.choice(((), range(100, 130)))),
        )
        for i in range(num)
    ]


class Chooser(LogitsProcessor):
    """Leaves ``generate`` one token to choose."""

    def __init__(self, request):
        self.request = request

    def __call__(self, input_ids, scores):
        made = input_ids.shape[1] - len(self.request.prompt) + self.request.num_made
        chosen = torch.full_like(scores, -torch.inf)
        chosen[0, choose_token(scores[0], self.request, made)[0]] = 0.0
        return chosen


@torch.inference_mode()
def answers(folder, requests):
    """Return the tokens of ``generate`` for one request after the other."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = {}
    for each in requests:
        made = model.generate(
            torch.tensor([each.prompt]),
            attention_mask=torch.ones(1, len(each.prompt), dtype=torch.long),
            max_new_tokens=each.max_tokens,
            do_sample=False,
            eos_token_id=list(each.stop_ids),
            pad_token_id=0,
            logits_processor=LogitsProcessorList(
                [Chooser(each)] if each.temperature else []
            ),
        )
        found[each.id] = made[0, len(each.prompt) :].tolist()
    return found


class Watched:
    """An engine that counts the steps in which a request was evicted."""

    def __init__(self, engine):
        self.engine, self.num_evictions = engine, 0
        self.capacity, self.add = engine.capacity, engine.add
        self.cancel = engine.cancel

    has_work = property(lambda self: self.engine.has_work)

    def step(self):
        made = self.engine.step()
        self.num_evictions += self.engine._batch.scheduler.block_new_requests
        return made

    def count_free(self):
        """Return the share of blocks that no request has and no prefix keeps."""
        cache = self.engine._batch.cache
        cache.evict_cached_blocks()
        cache.pool.try_to_free_sectors()
        return cache.pool.num_free_sectors / cache.num_sectors


def serve_requests(folder, requests):
    """Serve as a rank; return the answers, of each kind of use.

    Chunks are short, so that most prompts take several steps.
    """
    info = read_rank_info()
    config = ReplicaConfig(
        folder, dtype="float64", max_requests=6, max_batch_tokens=40, kv_blocks=TIGHT,
    )  # fmt: skip
    watched = Watched(load_engine("transformers")(config, info))
    client = Client(requests, 5)
    serve(client, "max_utilization", watched)
    found = {"whole": client.tokens(), "finish": {}, "logprobs": []}
    for each in client.responses:
        found["logprobs"] += each.logprobs
        if each.is_final:
            found["finish"][each.id] = each.finish
    found["num_evictions"] = watched.num_evictions
    found["free"] = [watched.count_free()]
    if info.size > 1:
        return found

    halves = []  # as after a fault
    for each in requests:
        half = found["whole"].get(each.id, ())[: each.max_tokens // 2]
        if 0 < len(half) == each.max_tokens // 2 < each.max_tokens:
            new = each._replace(
                prompt=each.prompt + tuple(half),
                max_tokens=each.max_tokens - len(half),
                num_made=len(half),
            )
            halves.append(new)
    halves = halves[:8]
    resumed = Client(halves, 6)
    serve(resumed, "guaranteed_no_evict", watched)
    found["resumed"] = [
        (each.id, each.num_made, resumed.tokens()[each.id]) for each in halves
    ]
    found["cancelled"] = cancel_all(watched, requests)
    found["free"].append(watched.count_free())
    return found


def cancel_all(watched, requests):
    """Cancel each request, in prefill, in decode, evicted; return if work is left."""
    chance, running = random.Random(7), set()
    for each in [r._replace(max_tokens=50, stop_ids=()) for r in requests]:
        if len(running) == 5:
            number = chance.choice(sorted(running))
            watched.cancel(number)
            running.remove(number)
        watched.add(each)
        running.add(each.id)
        for _ in range(chance.randint(0, 6)):
            running -= {t.id for t in watched.step() if t.finish} if running else set()
    for number in sorted(running):
        watched.cancel(number)
    return watched.has_work


def fork(path, fn, *args, **environment):
    """Write what a function returns in a child to a file; return the child's pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ.update(environment)  # noqa: TID251
            Path(path).write_text(json.dumps(fn(*args)))
            code = 0
        except BaseException:  # noqa: BLE001  a child's outermost line
            traceback.print_exc()
        os._exit(code)
    return pid


def main(folder, store, num, *jobs):
    model = f"{folder}/model"
    requests = random_requests(int(num))
    paths, pids = {"right": f"{folder}/right"}, []
    make = fork(f"{folder}/made", make_model, model)
    assert os.waitpid(make, 0)[1] == 0
    pids.append(fork(paths["right"], answers, model, requests))
    for number, job in enumerate(jobs):
        size, _, engine = job.partition(":")
        for rank in range(int(size)):
            paths[f"{job} {rank}"] = f"{folder}/{number}.{rank}"
            pids.append(
                fork(
                    paths[f"{job} {rank}"], serve_requests, model, requests,
                    RANK=str(rank), WORLD_SIZE=size, LOCAL_RANK=str(rank),
                    LOCAL_WORLD_SIZE=size, LOCAL_SIZE=size, CROSS_RANK="0",
                    CROSS_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
                    RONDE_STORE=store, RONDE_JOB_ID=f"{number}", RONDE_EPOCH="0",
                    RONDE_COOKIE="tests", RONDE_HOST="localhost", RONDE_NODE_RANK="0",
                    NODE_RANK="0", GROUP_RANK="0", GROUP_WORLD_SIZE="1",
                    TORCHELASTIC_RUN_ID=f"{number}", TORCHELASTIC_RESTART_COUNT="0",
                    TORCHELASTIC_MAX_RESTARTS="0",
                    TORCHELASTIC_USE_AGENT_STORE="False", RONDE_DRIFT="error",
                    RONDE_ENGINE=engine or "auto",
                )
            )  # fmt: skip
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(codes):
            sys.exit(1)
        pids = []
    found = {name: json.loads(Path(path).read_text()) for name, path in paths.items()}
    Path(f"{folder}/answers.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
