"""What Prometheus reads at ``/metrics``."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
LENGTH_BUCKETS = tuple(2.0**i for i in range(18))


class Metrics:
    """The numbers of one server.

    Args:
        n_blocks: Blocks of the cache's pool.
    """

    def __init__(self, n_blocks: int) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # CPU time and memory of the HTTP side's process
        self.running = self._gauge("requests_running", "Requests that hold blocks of the cache")
        self.waiting = self._gauge("requests_waiting", "Requests that wait for blocks")
        self.blocks_free = self._gauge(
            "blocks_free", "Blocks of the cache that no request holds; the prefix tree may remember them"
        )
        self._gauge("blocks", "Blocks of the cache").set(n_blocks)
        self.position_bytes = self._gauge("cache_position_bytes", "Bytes of the cache that a position takes")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of accepted prompts")
        self.found_tokens = self._counter(
            "prefix_tokens_found", "Tokens whose keys and values the prefix tree had, instead of computed"
        )
        self.forked_tokens = self._counter(
            "prefix_tokens_forked", "Tokens of prompts that further answers share with the first, in forks of its cache"
        )
        self.preemptions = self._counter(
            "preemptions", "Requests that gave their blocks to older ones, and compute their tokens again"
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated")
        self.drafted_tokens = self._counter("draft_tokens", "Tokens drafted")
        self.kept_tokens = self._counter("draft_tokens_accepted", "Drafted tokens that the model kept")
        self.failed_steps = self._counter("failed_steps", "Steps of the engine that failed as a whole")
        self.responses = self._counter(
            "responses", "Answered requests for completions, by status; 499: the client left", "status"
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to an answer's first token", BUCKETS_S
        )
        self.time_per_token = self._histogram(
            "time_per_token_seconds", "Mean time between the tokens of a complete answer", STEP_BUCKETS_S
        )
        self.request_time = self._histogram(
            "request_seconds", "From a request's arrival to the last token of an answer", BUCKETS_S
        )
        self.answer_length = self._histogram("answer_tokens", "Tokens of a complete answer", LENGTH_BUCKETS)
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens of an accepted prompt", LENGTH_BUCKETS)

    def tell_path(self, path: str) -> None:
        """Say which way the engine's steps take through the model: "fast" or "plain"."""
        self._gauge("runner_info", "The way of a step through the model: fast or plain", "path").labels(path).set(1)

    def note(self, counts: dict[str, int], levels: dict[str, int]) -> None:
        """Note what the engine's worker reports: by how much counters grow, and the values of gauges."""
        for name, n in counts.items():
            getattr(self, name).inc(n)
        for name, n in levels.items():
            getattr(self, name).set(n)

    def observe_end(self, n_tokens: int, seconds: float, first_s: float) -> None:
        """Note a complete answer: its tokens, and when its last and its first came after the request."""
        self.answer_length.observe(n_tokens)
        self.request_time.observe(seconds)
        if n_tokens > 1:
            self.time_per_token.observe((seconds - first_s) / (n_tokens - 1))

    def text(self) -> bytes:
        """All numbers, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"workbook_{name}", meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"workbook_{name}", meaning, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"workbook_{name}", meaning, labels, registry=self.registry)
