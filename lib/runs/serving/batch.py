"""Texts that a model writes after many prompts at once, without a server."""

import random
from typing import Any

from lib.given.models.serving import Request
from lib.runs.flags import UsageError
from lib.runs.memory import block_bytes, check_need, state_bytes
from lib.runs.serving.admission import make_scheduler
from lib.runs.serving.models import Served
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.text import Answer, Characters

BLOCK = 16  # positions
STEP_TOKENS = 2048


def make_engine(served: Served, n_requests: int) -> PrefixEngine:
    """An engine whose cache holds so many full contexts.

    Raises:
        UsageError: it does not fit into memory.
    """
    config: Any = served.model.config
    weight = next(served.model.parameters())
    n_blocks = n_requests * -(-config.context_len // BLOCK)
    of_states = n_requests * state_bytes(config, weight.dtype)
    need = n_blocks * block_bytes(config, BLOCK, weight.dtype) + of_states
    check_need(need, weight.device, f"a cache of {n_requests} contexts of {config.context_len}", ["--batch-size"])
    return PrefixEngine(served.model, make_scheduler(STEP_TOKENS, n_blocks, BLOCK, n_requests if of_states else 0))


def write(
    served: Served,
    prompts: list[str],
    n_samples: int,
    stops: tuple[str, ...],
    options: Any,
    progress: Any,
) -> list[list[str]]:
    """What the model writes after each prompt, so many times, up to the first of the stop strings.

    A prompt that is too long loses its beginning. A sample is the same whatever else is asked beside it, up to the
    rounding of a batch.

    Args:
        served: The model.
        prompts, n_samples, stops: What is asked.
        options: Has ``batch_size``, ``max_new_tokens``, ``temperature`` and ``seed``. With ``chat``, each prompt is a
            user's message, written by the model's template.
        progress: Its ``update(1)`` is called after each text.

    Raises:
        UsageError: the context has no room for a prompt beside so many new tokens.
    """
    engine, texts = make_engine(served, options.batch_size), [[""] * n_samples for _ in prompts]
    jobs = _requests(served, prompts, n_samples, stops, options)
    for request in jobs:
        engine.submit(request)
    left = dict.fromkeys(jobs, options.max_new_tokens)
    while left:
        for request, token in engine.step():
            if request not in left:
                continue
            answer, (i, sample) = jobs[request]
            left[request] -= 1
            ends = isinstance(token, Exception) or token in served.tokenizer.end_ids
            texts[i][sample] += "" if ends else answer.add(token)
            if ends or answer.is_stopped or not left[request]:
                texts[i][sample] += answer.finish()
                del left[request]
                engine.cancel(request)
                progress.update(1)
    return texts


def _requests(
    served: Served, prompts: list[str], n_samples: int, stops: tuple[str, ...], options: Any
) -> dict[Request, tuple[Answer, tuple[int, int]]]:
    """A request for each sample of each prompt, with what collects its text, and its place among the texts."""
    config: Any = served.model.config
    room = config.context_len - options.max_new_tokens
    if room < 1:
        raise UsageError(
            f"--max-new-tokens {options.max_new_tokens}: the model's context has {config.context_len} tokens, "
            f"one of them for the prompt; expected at most {config.context_len - 1}"
        )
    found = {}
    for i, prompt in enumerate(prompts):
        tokens = _encoded(served, prompt, options)[-room:]
        for sample in range(n_samples):
            seed = random.Random(f"{options.seed} {i} {sample}").getrandbits(62)
            request = Request(tokens, options.max_new_tokens, options.temperature, seed)
            found[request] = Answer(Characters(served.tokenizer.decode, tokens), stops), (i, sample)
    return found


def _encoded(served: Served, prompt: str, options: Any) -> list[int]:
    if not getattr(options, "chat", False):
        return served.tokenizer.encode(prompt)
    assert served.template is not None
    return served.tokenizer.encode_rendered(served.template.render([{"role": "user", "content": prompt}]))
