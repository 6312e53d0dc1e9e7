"""Metrics under vLLM's names, and under `bequest:` for what vLLM has not. The engine reports each step and each ended
request; here that is plain arithmetic, and the exposition format is made when somebody asks: a step of 64 sequences
must not cost 64 calls into a client library."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from bequest.engine.types import Grade, GradeLoad, Source
from bequest.engine.types.states import ExtractedStates
from bequest.engine.watching.observation import AdapterLoad, EngineLoad, RequestStats, StepStats
from bequest.server.operation.batch_figures import BatchFigures
from bequest.server.operation.spending import Spending
from bequest.server.operation.traffic import Traffic

StatesOf = Literal["prompt", "completion"]

_STEP_SECONDS = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01)
_TOKEN_SECONDS = (*_STEP_SECONDS, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_FIRST_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                  20.0, 40.0, 80.0, 160.0, 640.0)  # fmt: skip
_REQUEST_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
                    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)  # fmt: skip
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)
_REASONS = ("stop", "length", "abort", "error")
_SOURCES: tuple[Source, ...] = ("blocks", "host", "file", "prefix_cache", "recompute")
_STATES_OF: tuple[StatesOf, ...] = ("prompt", "completion")
_GRADES: tuple[Grade, ...] = ("running", "leased", "stored", "warm", "tokens")


class Histogram:
    """Counts per bucket, not cumulative; the last bucket is everything above."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Most streams of a step have waited equally long."""
        if len(values) < 2:
            for value in values:
                self.observe(value)
            return
        for value, count in Counter(values).items():
            self.counts[bisect_left(self.bounds, value)] += count
            self.total += count * value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it) as the exposition format wants them."""
        pairs, seen = [], 0
        for bound, count in zip((*map(float, self.bounds), float("inf")), self.counts, strict=True):
            seen += count
            pairs.append(("+Inf" if bound == float("inf") else repr(bound), float(seen)))
        return pairs


class Metrics(Collector):
    """The engine's Observer, and prometheus_client's Collector. Lives on the event-loop thread."""

    def __init__(self) -> None:
        self.model_name = ""  # the label on everything, known when the model is
        self.cache_dtype = ""  # likewise
        self.deferred = 0  # requests that wait for their parents
        self.load: Callable[[], EngineLoad] = lambda: EngineLoad(0, 0, 0, 0)  # asked at each exposition
        self._prompt_tokens = 0  # of requests that were answered, at least in part
        self._computed_tokens = 0  # of prompts
        self._generation_tokens = 0
        self._preemptions = 0
        self._drafts = self._draft_tokens = self._accepted_tokens = 0
        self._prefix_hits = 0
        self._images_seen = self._image_bytes = self._images_found = 0
        self._experts_read = self._experts_held = 0
        self._swapped_out = 0
        self._swapped_in = 0
        self._inherited_tokens = 0
        self._continuations = dict.fromkeys(_SOURCES, 0)
        self._extractions = dict.fromkeys(_STATES_OF, 0)
        self._extracted_vectors = 0
        self._extracted_bytes = 0
        self._extraction_tokens = 0
        self._dropped_readers = 0
        self._finished = dict.fromkeys(_REASONS, 0)
        self._first_token = Histogram(_FIRST_SECONDS)
        self._inter_token = Histogram(_TOKEN_SECONDS)
        self._step = Histogram(_TOKEN_SECONDS)
        self._end_to_end = Histogram(_REQUEST_SECONDS)
        self._queue = Histogram(_REQUEST_SECONDS)
        self._prefill = Histogram(_REQUEST_SECONDS)
        self._decode = Histogram(_REQUEST_SECONDS)
        self._request_prompt = Histogram(_COUNTS)
        self._request_generation = Histogram(_COUNTS)
        self._request_max_tokens = Histogram(_COUNTS)
        self._request_n = Histogram(_CHOICES)
        self._iteration_tokens = Histogram(_STEP_TOKENS)
        self._inference = Histogram(_REQUEST_SECONDS)
        self._per_token = Histogram(_TOKEN_SECONDS)
        self.traffic = Traffic()
        self.batches = BatchFigures()
        self.spending = Spending()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def on_step(self, stats: StepStats) -> None:
        self._computed_tokens += stats.prompt_tokens
        self._generation_tokens += stats.generated_tokens
        self._preemptions += stats.preempted
        self._swapped_out += stats.swapped_out
        self._swapped_in += stats.swapped_in
        self._images_seen += stats.images_seen
        self._image_bytes += stats.image_bytes
        self._images_found += stats.images_found
        self._experts_read += stats.experts[0]
        self._experts_held += stats.experts[1]
        self._step.observe(stats.seconds)
        self._iteration_tokens.observe(stats.prompt_tokens + stats.generated_tokens)
        for seconds in stats.first_token_seconds:
            self._first_token.observe(seconds)
        self._inter_token.observe_all(stats.inter_token_seconds)
        self._drafts += stats.drafts
        self._draft_tokens += stats.drafted_tokens
        self._accepted_tokens += stats.accepted_tokens

    def on_finish(self, stats: RequestStats) -> None:
        self.spending.on_finish(stats)
        self._finished[stats.reason] += 1
        if stats.completion_tokens or stats.reason in ("stop", "length"):
            self._prompt_tokens += stats.prompt_tokens
            self._prefix_hits += stats.cached_tokens
        if stats.inheritance is not None:
            self._continuations[stats.inheritance.source] += 1
            self._inherited_tokens += stats.inheritance.inherited_tokens
        self._end_to_end.observe(stats.total_seconds)
        self._queue.observe(stats.queue_seconds)
        self._prefill.observe(stats.prefill_seconds)
        self._decode.observe(stats.decode_seconds)
        self._inference.observe(stats.prefill_seconds + stats.decode_seconds)
        if stats.completion_tokens > stats.n:
            # Choices run side by side: each took this time for its part of the tokens.
            self._per_token.observe(stats.decode_seconds * stats.n / (stats.completion_tokens - stats.n))
        self._request_prompt.observe(stats.prompt_tokens)
        self._request_generation.observe(stats.completion_tokens)
        self._request_max_tokens.observe(stats.max_tokens)
        self._request_n.observe(stats.n)

    def computed(self) -> tuple[int, int]:
        """Tokens of prompts and of answers since the start."""
        return self._computed_tokens, self._generation_tokens

    def figures(self) -> dict[str, Any]:
        """Sums since the start, of which a watcher takes differences."""
        return {
            "generation_tokens": self._generation_tokens,
            "prompt_tokens": self._computed_tokens,
            "inherited_tokens": self._inherited_tokens,
            "preemptions": self._preemptions,
            "draft_tokens": self._draft_tokens,
            "accepted_tokens": self._accepted_tokens,
            "first_token": {"bounds": self._first_token.bounds, "counts": list(self._first_token.counts)},
            "inter_token": {"bounds": self._inter_token.bounds, "counts": list(self._inter_token.counts)},
        }

    def on_states(self, states: ExtractedStates, of: StatesOf) -> None:
        """Hidden states have come from the engine, of an extraction or with a completion."""
        self._extractions[of] += 1
        self._extraction_tokens += states.computed_tokens
        for choice in states.choices:
            self._extracted_vectors += math.prod(choice.shape[:-1])
            self._extracted_bytes += choice.num_bytes

    def on_dropped_reader(self) -> None:
        self._dropped_readers += 1

    def exposition(self) -> tuple[bytes, str]:
        """The text format and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        load = self.load()
        yield from self._gauges(load)
        yield self._waiting_by_reason(load)
        yield self._cache_config(load)
        yield from self._adapters(load.adapters)
        yield from self._retained(load)
        yield from self._counters()
        yield from self._histograms()
        yield from self.traffic.collect()
        yield from self.batches.collect()

    def _gauges(self, load: EngineLoad) -> Iterator[Metric]:
        leases = load.retained.get("leased", GradeLoad()).records
        usage = load.used_blocks / load.usable_blocks if load.usable_blocks else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences that run.", load.running),
            ("vllm:num_requests_waiting", "Sequences that wait to run.", load.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the cache's blocks in use; 1 is full.", usage),
            ("bequest:blocks", "Blocks of the cache.", load.usable_blocks),
            ("bequest:blocks_used", "Blocks of the cache in use.", load.used_blocks),
            ("bequest:extractions_waiting", "Extractions that wait to run.", load.waiting_extractions),
            ("bequest:states_bytes", "Hidden states that are collected or being sent.", load.states_bytes),
            ("bequest:host_blocks", "Blocks of the host pool.", load.usable_host_blocks),
            ("bequest:host_blocks_used", "Blocks of the host pool in use.", load.used_host_blocks),
            ("bequest:leases", "Leases.", leases),
            ("bequest:retention_budget_blocks", "Blocks that leases may hold.", load.retention_budget),
            ("bequest:retention_charged_blocks", "Of those, held by or promised to leases.", load.retention_charged),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self.model_name], value)
            yield gauge

    def _waiting_by_reason(self, load: EngineLoad) -> Metric:
        """vLLM's reasons: for room to run, or for something else first, which is a parent here."""
        gauge = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "What waits to run, and why.", labels=["model_name", "reason"]
        )
        gauge.add_metric([self.model_name, "capacity"], load.waiting)
        gauge.add_metric([self.model_name, "deferred"], self.deferred)
        return gauge

    def _cache_config(self, load: EngineLoad) -> Metric:
        labels = {
            "block_size": str(load.block_size),
            "cache_dtype": self.cache_dtype,
            "enable_prefix_caching": str(load.prefix_caching),
            "num_cpu_blocks": str(max(load.usable_host_blocks, 0)),
            "num_gpu_blocks": str(load.usable_blocks),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "The cache, in its labels.", labels=["model_name", *labels])
        info.add_metric([self.model_name, *labels.values()], 1)
        return info

    def _adapters(self, load: AdapterLoad) -> Iterator[Metric]:
        """vLLM's gauge has what routers of adapters read in its labels, and the time as its value."""
        loaded = GaugeMetricFamily("bequest:adapters", "Adapters that are loaded.", labels=["model_name"])
        loaded.add_metric([self.model_name], load.loaded)
        yield loaded
        if not load.loaded:
            return
        labels = {
            "max_lora": str(load.at_once),
            "running_lora_adapters": ",".join(load.running),
            "waiting_lora_adapters": ",".join(load.waiting),
        }
        text = "Adapters of open requests, in its labels, and when."
        info = GaugeMetricFamily("vllm:lora_requests_info", text, labels=["model_name", *labels])
        info.add_metric([self.model_name, *labels.values()], time.time())
        yield info

    def _retained(self, load: EngineLoad) -> Iterator[Metric]:
        """What can be continued from, by grade."""
        for name, text in (
            ("records", "Requests"),
            ("tokens", "Their tokens"),
            ("blocks", "Their blocks, shared ones once for each,"),
        ):
            gauge = GaugeMetricFamily(
                f"bequest:retained_{name}", f"{text} that can be continued from.", labels=["model_name", "grade"]
            )
            for grade in _GRADES:
                gauge.add_metric([self.model_name, grade], getattr(load.retained.get(grade, GradeLoad()), name))
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens of answered requests, cached ones included.", self._prompt_tokens),
            ("bequest:computed_prompt_tokens", "Prompt tokens computed.", self._computed_tokens),
            ("vllm:generation_tokens", "Tokens generated.", self._generation_tokens),
            ("vllm:num_preemptions", "Times a sequence gave up its blocks to others.", self._preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", self._prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found there, inherited ones included.", self._prefix_hits),
            ("vllm:spec_decode_num_drafts", "Times that tokens were drafted.", self._drafts),
            ("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", self._draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were right.", self._accepted_tokens),
            ("bequest:inherited_tokens", "Tokens of parents never computed again.", self._inherited_tokens),
            ("bequest:extracted_vectors", "Hidden states delivered.", self._extracted_vectors),
            ("bequest:extracted_bytes", "Their bytes.", self._extracted_bytes),
            ("bequest:extraction_tokens", "Tokens computed for hidden states alone.", self._extraction_tokens),
            ("bequest:dropped_readers", "Clients dropped because they stopped reading.", self._dropped_readers),
            ("bequest:swapped_out_blocks", "Blocks moved to the host pool.", self._swapped_out),
            ("bequest:swapped_in_blocks", "Blocks moved back.", self._swapped_in),
            ("bequest:experts_read", "Experts that steps read, once for each layer and step.", self._experts_read),
            ("bequest:experts_held", "Experts that steps would read if they took all.", self._experts_held),
            ("bequest:images_seen", "Times the vision tower looked at an image.", self._images_seen),
            ("bequest:image_bytes", "Bytes of pixels that it looked at.", self._image_bytes),
            ("bequest:images_found", "Times a step found rows of an image on the device.", self._images_found),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self.model_name], value)
            yield counter
        continuations = CounterMetricFamily(
            "bequest:continuations", "Continuations that ended, by source.", labels=["model_name", "source"]
        )
        for source, count in self._continuations.items():
            continuations.add_metric([self.model_name, source], count)
        yield continuations
        extractions = CounterMetricFamily(
            "bequest:extractions", "Requests whose hidden states were delivered.", labels=["model_name", "of"]
        )
        for of, count in self._extractions.items():
            extractions.add_metric([self.model_name, of], count)
        yield extractions
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([self.model_name, reason], count)
        yield success

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self._first_token),
            ("inter_token_latency_seconds", "Between two tokens of a sequence.", self._inter_token),
            ("e2e_request_latency_seconds", "Arrival to end.", self._end_to_end),
            ("request_queue_time_seconds", "Waiting to run.", self._queue),
            ("request_prefill_time_seconds", "From running to the first token.", self._prefill),
            ("request_decode_time_seconds", "From the first token to the last.", self._decode),
            ("request_inference_time_seconds", "From running to the end.", self._inference),
            ("request_time_per_output_token_seconds", "Of a request, on average.", self._per_token),
            ("iteration_tokens_total", "Tokens of a step.", self._iteration_tokens),
            ("request_prompt_tokens", "Prompt tokens of a request.", self._request_prompt),
            ("request_generation_tokens", "Generated tokens of a request.", self._request_generation),
            ("request_params_max_tokens", "max_tokens of a request.", self._request_max_tokens),
            ("request_params_n", "n of a request.", self._request_n),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self.model_name], buckets=histogram.cumulative(), sum_value=histogram.total)
            yield family
        step = HistogramMetricFamily("bequest:step_seconds", "A step on the device.", labels=["model_name"])
        step.add_metric([self.model_name], buckets=self._step.cumulative(), sum_value=self._step.total)
        yield step
