"""What Prometheus reads at ``/metrics``."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)


class Metrics:
    """The numbers of one server.

    Args:
        n_blocks: Blocks of the cache's pool.
    """

    def __init__(self, n_blocks: int) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.running = self._gauge("requests_running", "Requests that hold blocks of the cache")
        self.waiting = self._gauge("requests_waiting", "Requests that wait for blocks")
        self.blocks_free = self._gauge(
            "blocks_free", "Blocks of the cache that no request holds; the prefix tree may remember them"
        )
        self._gauge("blocks", "Blocks of the cache").set(n_blocks)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of accepted prompts")
        self.found_tokens = self._counter(
            "prefix_tokens_found", "Tokens whose keys and values the prefix tree had, instead of computed"
        )
        self.forked_tokens = self._counter(
            "prefix_tokens_forked", "Tokens of prompts that further answers share with the first, in forks of its cache"
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated")
        self.failed_steps = self._counter("failed_steps", "Steps of the engine that failed as a whole")
        self.responses = self._counter(
            "responses", "Answered requests for completions, by status; 499: the client left", "status"
        )
        self.time_to_first_token = Histogram(
            "workbook_time_to_first_token_seconds", "From a request's arrival to its first token",
            buckets=BUCKETS_S, registry=self.registry,
        )  # fmt: skip

    def text(self) -> bytes:
        """All numbers, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(f"workbook_{name}", meaning, registry=self.registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"workbook_{name}", meaning, labels, registry=self.registry)
