"""transformers' continuous batching, one step at a time.

Cache, attention, chunks of prompts and eviction are transformers'. Ours are the order of
the calls and the choice of tokens. Its inner names change with its minor version, which
``require_engine`` checks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig
from transformers.distributed import DistributedConfig
from transformers.generation import GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.initialization import (
    resolve_continuous_batching_config,
    update_cb_config_after_cache_creation,
)
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)
from transformers.utils import logging
from transformers.utils.import_utils import is_flash_attn_2_available

from ronde.collectives.rendezvous import open_store
from ronde.errors import UsageError
from ronde.memory import available_memory
from ronde.serve.engines.loading import ModelFacts, read_model, require_tp
from ronde.serve.policy import Capacity
from ronde.serve.protocol import ReplicaConfig
from ronde.serve.requests import InferenceRequest, Token
from ronde.serve.sampling import choose_token
from ronde.world import RankInfo

_BLOCK_TOKENS = 32
_START_S = 300.0


def make_engine(config: ReplicaConfig, info: RankInfo) -> "TransformersEngine":
    """Load this rank's share of a model and try it; collective.

    Raises:
        UsageError: The folder has no such model, or ``size`` does not divide its heads.
    """
    facts = read_model(config.model)
    require_tp(facts, info.size)
    if info.size > 1:
        dist.init_process_group(
            "ronde",
            store=dist.PrefixStore("ronde/serve", open_store(info, _START_S)),
            rank=info.rank,
            world_size=info.size,
        )
    with torch.inference_mode():
        engine = TransformersEngine(_load(config, info), facts, config, info)
        engine.add(InferenceRequest(0, (0, 0), 2))
        while engine.has_work:
            engine.step()
    return engine


def _load(config: ReplicaConfig, info: RankInfo) -> Any:  # noqa: ANN401  of any class
    logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(info.local_rank)
    options: dict[str, Any] = (
        {"device_map": f"cuda:{info.local_rank}"} if on_gpu else {}
    )
    if info.size > 1:
        options = {"distributed_config": DistributedConfig(tp_size=info.size)}
    has_flash = on_gpu and is_flash_attn_2_available()
    return AutoModelForCausalLM.from_pretrained(
        config.model,
        dtype=config.dtype or "auto",
        attn_implementation="flash_attention_2" if has_flash else "sdpa",
        local_files_only=True,
        **options,
    ).eval()


class _Ranks(DistributedHelper):
    """All ranks as one group, torch's default; no further connections."""

    def __init__(self, size: int, tp_plan: dict[str, str]) -> None:
        super().__init__(None, None, tp_plan)
        self.tp_size = size


class _Batch(ContinuousBatchProcessor):
    """A batch whose ranks get requests by equal calls instead of from each other."""

    def _update_tp_group_state(self) -> bool:
        return False  # not to stop


class _Unsent(OutputRouter):
    """Drops outputs: tokens are returned by ``step``."""

    def deliver_batch(self, outputs: Sequence[object]) -> None:
        pass


@dataclass(slots=True)
class _Row:
    request: InferenceRequest
    num_made: int


class TransformersEngine:
    """A model of transformers as an ``InferenceEngine``."""

    def __init__(
        self,
        model: Any,
        facts: ModelFacts,
        config: ReplicaConfig,
        info: RankInfo,  # noqa: ANN401
    ) -> None:
        self._model = model
        self._stop_ids = config.stop_ids
        self._rows: dict[str, _Row] = {}
        self._made: list[Token] = []
        self._batch = _make_batch(model, facts, config, info)
        self._batch.model_runner._sample = self._choose  # type: ignore
        cache = self._batch.cache
        self._capacity = Capacity(
            num_blocks=cache.num_blocks,
            block_tokens=_BLOCK_TOKENS,
            max_requests=config.max_requests,
            max_len=min(config.max_model_len or facts.max_len, facts.max_len),
            vocabulary=facts.vocabulary,
            evicts=True,
        )

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def add(self, request: InferenceRequest) -> None:
        name = str(request.id)
        self._rows[name] = _Row(request, request.num_made)
        stop_ids = [*self._stop_ids, *request.stop_ids]
        self._batch.scheduler.add_waiting_request(
            RequestState(
                name,
                list(request.prompt),
                max_new_tokens=request.max_tokens,
                eos_token_id=stop_ids,
            )
        )

    def cancel(self, request_id: int) -> None:
        name, scheduler = str(request_id), self._batch.scheduler
        if self._rows.pop(name, None) is not None:
            scheduler.set_request_cancellation(name)
            scheduler.clear_cancelled_requests()
            # An eviction sets this until a request has finished.
            scheduler.block_new_requests = False

    def step(self) -> list[Token]:
        self._made = []
        if self._batch.prepare_next_batch():
            self._batch._generation_step(self._model)
            self._batch.update_batch()
        return self._made

    def _choose(self, scores: Tensor, output_ids: Tensor) -> None:
        """Choose the next tokens in place of ``ModelRunner._sample``.

        Args:
            scores: Logits after the last tokens, shape ``(1, requests, vocabulary)``.
            output_ids: Where transformers reads the tokens, shape ``(1, requests)``.
        """
        batch = self._batch.inputs_and_outputs.requests_in_batch
        rows = [self._rows[r.state.request_id] for r in batch if r.has_new_token]
        logits = scores[0, : len(rows)].double()
        if all(row.request.temperature == 0 for row in rows):
            tokens = logits.argmax(1)
            logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(1)
            chosen = list(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        else:
            chosen = [
                choose_token(each, row.request, row.num_made)
                for each, row in zip(logits.cpu(), rows, strict=True)
            ]
        output_ids[0, : len(rows)] = torch.tensor([token for token, _ in chosen])
        for row, (token, logprob) in zip(rows, chosen, strict=True):
            self._made.append(self._advance(row, token, logprob))

    def _advance(self, row: _Row, token: int, logprob: float) -> Token:
        request, finish = row.request, None
        row.num_made += 1
        if token in self._stop_ids or token in request.stop_ids:
            finish = "stop"
        elif row.num_made - request.num_made == request.max_tokens:
            finish = "length"
        if finish is not None:
            del self._rows[str(request.id)]
        return Token(request.id, token, finish, logprob)


def _batch_tokens(config: ReplicaConfig, device: torch.device) -> int:
    return config.max_batch_tokens or (2048 if device.type == "cuda" else 512)


def _num_blocks(
    text: Any,
    model: Any,
    facts: ModelFacts,
    config: ReplicaConfig,
    info: RankInfo,  # noqa: ANN401
) -> int:
    """Return the blocks that fit into this rank's share of memory, if they are used."""
    if model.device.type == "cuda":
        free, share = torch.cuda.mem_get_info()[0], config.kv_memory or 0.9
    else:
        free = available_memory().num_bytes // info.local_size
        share = config.kv_memory or 0.3
    heads = find_num_key_value_heads(text) // info.size
    item = model.dtype.itemsize
    token_bytes = 2 * heads * find_head_dim(text) * text.num_hidden_layers * item
    if model.config._attn_implementation == "sdpa":
        token_bytes += _batch_tokens(config, model.device) * item  # of its mask
    most = int(free * share) // (token_bytes * _BLOCK_TOKENS)
    if most < max(1, config.kv_blocks):
        raise UsageError(
            f"kv_blocks must be at most {most}, got {max(1, config.kv_blocks)}: "
            f"{share:g} of {free} free bytes, and {token_bytes * _BLOCK_TOKENS} a block."
        )
    useful = config.max_requests * -(-facts.max_len // _BLOCK_TOKENS)
    return config.kv_blocks or min(most, useful)


def _make_batch(
    model: Any,
    facts: ModelFacts,
    config: ReplicaConfig,
    info: RankInfo,  # noqa: ANN401
) -> _Batch:
    text = model.config.get_text_config()
    ranks = _Ranks(info.size, model.tp_plan)
    processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList())
    options = resolve_continuous_batching_config(
        text,
        ContinuousBatchingConfig(
            page_size=_BLOCK_TOKENS,
            num_blocks=_num_blocks(text, model, facts, config, info),
            max_batch_tokens=_batch_tokens(config, model.device),
            disable_nccl_graph_mixing=False,  # that would need CUDA graphs
            max_memory_percent=1.0,
            max_requests_per_batch=config.max_requests,
            use_async_batching=False,
            use_cuda_graph=False,
            safety_margin=0.0,
            seed=0,
        ),
        None,
        has_logit_processors=False,
        device=model.device,
    )
    cache = PagedAttentionCache(
        text,
        options,
        model.device,
        ranks,
        model.dtype,
        model._supports_logits_to_keep(),
    )
    update_cb_config_after_cache_creation(
        options, cache.num_blocks, cache.max_batch_tokens
    )
    return _Batch(
        cache=cache,
        config=text,
        generation_config=GenerationConfig(do_sample=False),
        continuous_batching_config=options,
        logit_processor=processors,
        input_queue=None,
        cancel_queue=None,
        output_router=_Unsent(),
        background_thread_status=BackgroundThreadStatus(),
        model_device=model.device,
        model_dtype=model.dtype,
        scheduler=FIFOScheduler(cache, 0.0, config.max_requests),
        distributed_helper=ranks,
    )
