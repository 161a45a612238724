"""transformers' continuous batching, one step at a time.

Cache, attention, chunked prompts and eviction are transformers'. The order of calls and
the choice of tokens are ours. Inner names of transformers change with its minor
version, which ``require_engine`` checks.
"""

from contextlib import nullcontext
from itertools import pairwise
from mmap import MAP_PRIVATE, mmap
from typing import Any, cast

import torch
from torch import Tensor, distributed as dist
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    conversion_mapping,
)
from transformers.distributed import DistributedConfig
from transformers.generation import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
)
from transformers.generation.continuous_batching import (
    cb_logits_processors,
    continuous_api,
    initialization,
    utils,
)
from transformers.generation.continuous_batching.requests import RequestState
from transformers.integrations import sdpa_attention
from transformers.utils import is_flash_attn_2_available, logging

from ronde.collectives.rendezvous import open_store
from ronde.errors import UsageError
from ronde.memory import available_memory
from ronde.serve.engines.loading import read_model, require_tp
from ronde.serve.policy import Capacity
from ronde.serve.protocol import ReplicaConfig
from ronde.serve.requests import InferenceRequest, Token
from ronde.serve.sampling import choose_token
from ronde.world import RankInfo

_BLOCK_TOKENS = 32
_START_S = 300.0
_ON_CPU = "sdpa_by_request"


def prepare(config: ReplicaConfig) -> None:
    """Import the model's modules and make tables, so that forked workers need not."""
    auto: Any = AutoConfig
    found = auto.from_pretrained(config.model, local_files_only=True)
    classes: Any = AutoModelForCausalLM
    classes._model_mapping.get(type(found), None)
    tables: Any = conversion_mapping
    tables.get_checkpoint_conversion_mapping(found.model_type)


def make_engine(config: ReplicaConfig, info: RankInfo) -> "TransformersEngine":
    """Load this rank's share of a model and try it; collective.

    Raises:
        UsageError: The folder has no such model, or the ranks cannot hold it.
    """
    facts = read_model(config.model)
    require_tp(facts, info.size)
    config = config._replace(
        max_model_len=min(config.max_model_len or facts.max_len, facts.max_len)
    )
    logging.disable_progress_bar()
    AttentionInterface.register(_ON_CPU, attend_by_request)
    attention, options = _ON_CPU, dict[str, Any]()
    if torch.cuda.is_available():
        torch.cuda.set_device(info.local_rank)
        options["device_map"] = f"cuda:{info.local_rank}"
        attention = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    if info.size > 1:
        store = dist.PrefixStore("ronde/serve", open_store(info, _START_S))
        dist.init_process_group(
            "ronde", store=store, rank=info.rank, world_size=info.size
        )
        options = {"distributed_config": DistributedConfig(tp_size=info.size)}
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(
            config.model,
            dtype=config.dtype or "auto",
            attn_implementation=attention,
            local_files_only=True,
            **options,
        )
        engine = TransformersEngine(model.eval(), config, info)
    engine.add(InferenceRequest(0, (0, 0), 2))
    while engine.has_work:
        engine.step()
    return engine


class TransformersEngine:
    """A model of transformers as an ``InferenceEngine``."""

    def __init__(self, model: Any, config: ReplicaConfig, info: RankInfo) -> None:
        self._model = model
        self._rows: dict[str, tuple[InferenceRequest, int]] = {}  # with num_made
        self._made: list[Token] = []
        self._batch: Any = _make_batch(model, config, info)
        self._batch.model_runner._sample = self._choose
        self.capacity = Capacity(
            num_blocks=self._batch.cache.num_blocks,
            block_tokens=_BLOCK_TOKENS,
            max_requests=self._batch.scheduler.max_requests_per_batch,
            max_len=config.max_model_len,
            vocabulary=model.config.get_text_config().vocab_size,
            evicts=True,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def add(self, request: InferenceRequest) -> None:
        name = str(request.id)
        self._rows[name] = request, request.num_made
        self._batch.scheduler.add_waiting_request(
            RequestState(
                name,
                list(request.prompt),
                max_new_tokens=request.max_tokens,
                eos_token_id=[*request.stop_ids],
            )
        )

    def cancel(self, request_id: int) -> None:
        name, scheduler = str(request_id), self._batch.scheduler
        if self._rows.pop(name, None) is not None:
            scheduler.set_request_cancellation(name)
            scheduler.clear_cancelled_requests()
            # An eviction sets this until the next request finishes.
            scheduler.block_new_requests = False

    @torch.inference_mode()
    def step(self) -> list[Token]:
        self._made = []
        if self._batch.prepare_next_batch():
            self._batch._generation_step(self._model)
            self._batch.update_batch()
        return self._made

    def _choose(self, scores: Tensor, output_ids: Tensor) -> None:
        """Choose the next tokens; called in place of ``ModelRunner._sample``.

        Args:
            scores: The logits, shape ``(1, requests, vocabulary)``.
            output_ids: Gets the tokens, shape ``(1, at least requests)``.
        """
        batch = self._batch.inputs_and_outputs.requests_in_batch
        rows = [self._rows[e.state.request_id] for e in batch if e.has_new_token]
        logits = scores[0, : len(rows)].double()
        if any(request.temperature for request, _ in rows):
            chosen = [
                choose_token(each, *row) for each, row in zip(logits, rows, strict=True)
            ]
        else:
            tokens = logits.argmax(1, keepdim=True)
            logprobs = logits.gather(1, tokens) - logits.logsumexp(1, keepdim=True)
            pairs = cast("list[Any]", torch.cat((tokens, logprobs), 1).tolist())
            chosen = [(int(token), logprob) for token, logprob in pairs]
        output_ids[0, : len(rows)] = torch.tensor([token for token, _ in chosen])
        for (request, num_made), (token, logprob) in zip(rows, chosen, strict=True):
            name, finish = str(request.id), None
            self._rows[name] = request, num_made + 1
            if token in request.stop_ids:
                finish = "stop"
            elif num_made + 1 - request.num_made == request.max_tokens:
                finish = "length"
            if finish is not None:
                del self._rows[name]
            self._made.append(Token(request.id, token, finish, logprob))


def _make_batch(model: Any, config: ReplicaConfig, info: RankInfo) -> Any:
    text, is_on_gpu = model.config.get_text_config(), model.device.type == "cuda"
    max_tokens = config.max_batch_tokens or (2048 if is_on_gpu else 128)
    options: Any = ContinuousBatchingConfig(
        page_size=_BLOCK_TOKENS,
        num_blocks=_count_blocks(model, config, info, max_tokens),
        max_batch_tokens=max_tokens,
        max_requests_per_batch=min(config.max_requests, max_tokens),
        max_memory_percent=100,  # memory was checked
        use_async_batching=False,
        use_cuda_graph=False,  # tokens are chosen on the host
        disable_nccl_graph_mixing=False,
        seed=0,
    )
    options = initialization.resolve_continuous_batching_config(
        text, options, None, has_logit_processors=False, device=model.device
    )
    # All ranks are torch's default group; there is no need of another.
    ranks = continuous_api.DistributedHelper(None, None, model.tp_plan)
    ranks.tp_size = info.size
    router: Any = continuous_api.OutputRouter()
    router.deliver_batch = list  # nowhere: ``step`` returns the tokens
    with nullcontext() if is_on_gpu else _LazyZeros():
        cache = continuous_api.PagedAttentionCache(
            text, options, model.device, ranks, model.dtype,
            model._supports_logits_to_keep(),
        )  # fmt: skip
    batch: Any = continuous_api.ContinuousBatchProcessor(
        cache, text, GenerationConfig(do_sample=False), options,
        cb_logits_processors.ContinuousBatchingLogitsProcessorList(LogitsProcessorList()),
        None, None, router, continuous_api.BackgroundThreadStatus(),
        model.device, model.dtype,
        continuous_api.FIFOScheduler(cache, 0.0, options.max_requests_per_batch),
        ranks,
    )  # fmt: skip
    batch._update_tp_group_state = lambda: False  # all ranks call ``add`` alike
    return batch


class _LazyZeros(TorchFunctionMode):
    """Lets the kernel clear bytes of zeros page by page, when they are first used.

    Clearing a whole cache takes seconds at each start.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options: dict[str, Any] = kwargs or {}
        if func is torch.zeros and options.get("dtype") is torch.uint8:
            return torch.frombuffer(mmap(-1, args[0], MAP_PRIVATE), dtype=torch.uint8)
        return func(*args, **options)


def _count_blocks(
    model: Any, config: ReplicaConfig, info: RankInfo, max_tokens: int
) -> int:
    """Return the blocks that this rank's memory holds, if requests can fill them."""
    text = model.config.get_text_config()
    heads = utils.find_num_key_value_heads(text) // info.size
    # Keys and values of a token, of one layer also the copy that attention reads.
    values = 2 * heads * utils.find_head_dim(text) * (text.num_hidden_layers + 1)
    values += max_tokens if utils.attn_mask_is_needed(text) else 0
    block_bytes = values * model.dtype.itemsize * _BLOCK_TOKENS
    if model.device.type == "cuda":
        free_bytes, share = torch.cuda.mem_get_info()[0], config.kv_memory or 0.9
    else:
        free_bytes = available_memory().num_bytes // info.local_size
        share = config.kv_memory or 0.3
    most = int(free_bytes * share) // block_bytes
    if most < max(1, config.kv_blocks):
        raise UsageError(
            f"kv_blocks must be from 1 to {share:g} * {free_bytes} free bytes / "
            f"{block_bytes} bytes a block = {most}, got {config.kv_blocks}."
        )
    useful = config.max_requests * -(-config.max_model_len // _BLOCK_TOKENS)
    return config.kv_blocks or min(most, useful)


def attend_by_request(
    module: torch.nn.Module,
    *states: Any,
    cu_seq_lens_q: Any,
    cu_seq_lens_k: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Call transformers' attention for each request of a packed batch.

    One call for all multiplies all queries with all keys and masks most of it.
    """
    (query, key, value, _), found = states, list[Tensor]()
    ends = zip(cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist(), strict=True)
    for (q, k), (q_end, k_end) in pairwise(ends):
        num, past, mask = q_end - q, k_end - k - q_end + q, None
        window = options.get("sliding_window") or k_end
        if num > 1 and (past or window < num):
            mask = torch.ones(1, 1, num, past + num, dtype=torch.bool)
            mask = mask.tril(past).triu(past - window + 1)
        own = query[:, :, q:q_end], key[:, :, k:k_end], value[:, :, k:k_end], mask
        options["is_causal"] = mask is None
        found.append(sdpa_attention.sdpa_attention_forward(module, *own, **options)[0])
    return torch.cat(found, 1), None
