"""vLLM's engine on each rank, by its launcher for other launchers; public calls only.

Greedy requests get the same tokens in any batch and after they were resumed, but for
rounding. A seed gives the same tokens only in a request that was not resumed, as vLLM's
generator begins again with each request.
"""

from importlib import import_module
from typing import Any

import torch
from torch import distributed as dist

from ronde.collectives.rendezvous import open_store
from ronde.memory import available_memory
from ronde.serve.engines.loading import read_model, require_tp
from ronde.serve.policy import Capacity
from ronde.serve.protocol import ReplicaConfig
from ronde.serve.requests import InferenceRequest, Token
from ronde.world import RankInfo

_vllm: Any = import_module("vllm")  # by name: it has no types where it is missing
_START_S = 300.0
_MOST_SEED = (1 << 63) - 1


def make_engine(config: ReplicaConfig, info: RankInfo) -> "VllmEngine":
    """Load this rank's share of a model and try it; collective.

    Raises:
        UsageError: The folder has no such model, or ``size`` does not divide its heads.
    """
    require_tp(read_model(config.model), info.size)
    store = dist.PrefixStore("ronde/serve", open_store(info, _START_S))
    dist.init_process_group("ronde", store=store, rank=info.rank, world_size=info.size)
    max_tokens = config.max_batch_tokens or (2048 if torch.cuda.is_available() else 128)
    options: dict[str, Any] = {"gpu_memory_utilization": config.kv_memory or 0.9}
    if not torch.cuda.is_available():
        free = torch.tensor(available_memory().num_bytes // info.local_size)
        dist.all_reduce(free, dist.ReduceOp.MIN)  # blocks must be equal on all ranks
        memory = int(free * (config.kv_memory or 0.3))
        options = {"kv_cache_memory_bytes": memory, "enforce_eager": True}
    engine = VllmEngine(
        _vllm.LLMEngine.from_engine_args(
            _vllm.EngineArgs(
                config.model,
                dtype=config.dtype or "auto",
                max_model_len=config.max_model_len or None,
                max_num_seqs=min(config.max_requests, max_tokens),
                max_num_batched_tokens=max_tokens,
                num_gpu_blocks_override=config.kv_blocks or None,
                tensor_parallel_size=info.size,
                distributed_executor_backend="external_launcher",
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                async_scheduling=False,
                disable_log_stats=True,
                seed=0,
                **options,
            )
        )
    )
    engine.add(InferenceRequest(0, (0, 0), 2))
    while engine.has_work:
        engine.step()
    return engine


class VllmEngine:
    """vLLM's engine as an ``InferenceEngine``."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._running: dict[str, int] = {}
        of_model, config = engine.model_config, engine.vllm_config
        cache = config.cache_config
        self.capacity = Capacity(
            num_blocks=cache.num_gpu_blocks - 1,  # vLLM keeps one empty
            block_tokens=cache.block_size,
            max_requests=config.scheduler_config.max_num_seqs,
            max_len=of_model.max_model_len,
            vocabulary=of_model.get_vocab_size(),
            evicts=True,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def add(self, request: InferenceRequest) -> None:
        params = _vllm.SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=request.seed & _MOST_SEED,
            max_tokens=request.max_tokens,
            stop_token_ids=[*request.stop_ids],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=_vllm.sampling_params.RequestOutputKind.DELTA,
        )
        name = str(request.id)
        self._running[name] = request.id
        self._engine.add_request(name, {"prompt_token_ids": [*request.prompt]}, params)

    def cancel(self, request_id: int) -> None:
        if self._running.pop(str(request_id), None) is not None:
            self._engine.abort_request([str(request_id)])

    def step(self) -> list[Token]:
        made: list[Token] = []
        for output in self._engine.step():
            (part,) = output.outputs
            number = self._running[output.request_id]
            for token, logprobs in zip(part.token_ids, part.logprobs, strict=True):
                made.append(Token(number, token, None, logprobs[token].logprob))
            if part.finish_reason is not None:
                made[-1] = made[-1]._replace(finish=part.finish_reason)
                del self._running[output.request_id]
        return made
