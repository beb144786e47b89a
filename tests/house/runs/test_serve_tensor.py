"""A Llama that the server divides among ranks: its tokens are those of one process, a rank that dies ends its requests
with a reason, and what does not fit is refused.
"""

import signal

import httpx
import openai
import psutil
import pytest
import torch

from lib.fast.serving import Runner
from lib.given.kernels.mode import INTERPRETED
from lib.given.models.gpt2 import GPT2Config
from lib.given.models.llama import LlamaConfig
from lib.given.models.variants import variant_of
from lib.gpt2 import GPT2
from lib.llama import Llama
from lib.ranks import pool
from lib.runs import serve
from lib.runs.flags import UsageError
from lib.runs.serving import divided, models
from lib.runs.serving.prefix import PrefixEngine
from lib.runs.serving.process import Place
from lib.runs.serving.wanted import Wanted
from lib.runs.variants import VariantLlama
from lib.serving import Scheduler
from tests.house.runs import divided_program
from tests.house.runs.test_serve import LONG_S, Running, alone, client, metric, post, running

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(200)]


def test_two_ranks_give_the_tokens_of_one_with_shared_blocks_forks_preemption_and_cancellation(tmp_path):
    first, second = pool("gloo").run(divided_program.serve, tmp_path / "pipe", time_limit_s=60).values
    assert first["wrong"] == []
    assert first["cancelled"] > 0
    assert min(first["counts"].values()) > 0, first["counts"]
    assert first["busy"] == {}
    assert first["calls"] == {"all_reduce": 2 * divided_program.SIZES.n_layers}
    assert first["weights"]["layers.0.attention.wk.weight"] == [8, 32]  # one of the two key/value heads
    assert first["weights"]["layers.1.feed_forward.w2.weight"] == [32, 24]
    assert first["keys"].shape == second["keys"].shape == (2, divided_program.N_BLOCKS, divided_program.BLOCK, 1, 8)
    assert not torch.equal(first["keys"], second["keys"])


@pytest.mark.skipif(not INTERPRETED, reason="on GPUs a server with NCCL does this")
def test_two_ranks_take_captured_steps_together(tmp_path):
    """With tokens that only rank 0 has drawn, shared blocks and copies of them."""
    first, second = pool("gloo").run(divided_program.serve_captured, tmp_path / "pipe", time_limit_s=100).values
    assert first == second == []


def test_an_engine_is_not_used_again_after_rank_0_has_left_a_pass(monkeypatch):
    engine = divided.Leader(divided_program.make_model(), Scheduler(16, 8, 4), [])
    for place, is_torn in ((PrefixEngine, False), (Runner, True)):
        with monkeypatch.context() as patched:
            name = "_begin" if place is PrefixEngine else "pass_row"
            patched.setattr(place, name, lambda *_: 1 / 0)
            engine.submit(Wanted([1, 2], 2))
            with pytest.raises(ZeroDivisionError):
                engine.step()
        if is_torn:
            with pytest.raises(RuntimeError, match="in the middle of a pass"):
                engine.abandon()
        else:
            assert len(engine.abandon()) == 1


def test_a_server_on_two_ranks_answers_as_one_does_and_says_what_happened_when_a_rank_dies():
    with running(Running("--tensor", "2", "--device", "cpu")) as server:
        asked = {"model": "tiny", "prompt": "The for statement", "max_tokens": 12, "temperature": 0}
        begin = "So begin both of these prompts, "
        for prompt in ("The for statement", begin + "a", begin + "b"):
            answer = client(server).completions.create(**asked | {"prompt": prompt})
            assert answer.choices[0].text == alone(models.make_tiny(), [prompt], 12)[0]
        assert metric(server, "prefix_tokens_found_total") == 32
        assert "on 2 ranks (gloo), each with 2 of 4 heads and 1 of 2" in "".join(
            server.process.stdout.readline() for _ in range(2)
        )
        stream = client(server).completions.create(**asked | {"max_tokens": 900}, stream=True)
        next(iter(stream))
        all_of_them = psutil.Process(server.process.pid).children()
        last = [p for p in all_of_them if "spawn_main" in " ".join(p.cmdline())][-1]
        last.kill()
        said = r"the process of rank 1 has ended: signal 9 \(SIGKILL\) killed it; the others cannot go on without it"
        with pytest.raises(openai.APIError, match=said):
            list(stream)
        assert httpx.get(f"{server.root}/health").status_code == 503
        refused = post(server, asked)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unhealthy")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LONG_S) == 1
        assert psutil.wait_procs(all_of_them, LONG_S)[1] == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tensor", "2", "--draft", "prompt"], "--tensor 2 with --draft prompt: .* expected one of the two flags"),
        (["--tensor", "4", "--quantize", "int4"], "--tensor 4 with --quantize int4"),
        (["--tensor", "2", "--cache-dtype", "int8"], "--tensor 2 with --cache-dtype int8"),
        (["--tensor", "9"], "--tensor: '9': expected a whole number of at most 8"),
    ],
)
def test_flags_that_do_not_go_with_ranks_are_refused_before_anything_starts(flags, said, capsys):
    assert serve.main(["--model", "tiny", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(UsageError, match=said):
        raise UsageError(error)


def test_models_and_machines_that_ranks_cannot_share_are_refused_by_name(monkeypatch):
    def refused(model, n_ranks):
        options = serve.make_parser().parse_args(["--model", "mine", "--tensor", str(n_ranks)])
        with pytest.raises(UsageError) as found:
            divided.check(model, options)
        return str(found.value)

    sizes = LlamaConfig(vocab_size=16, dim=24, n_layers=1, n_heads=6, n_kv_heads=2, hidden_dim=9, context_len=8)
    assert refused(Llama(sizes), 4) == "--tensor 4: --model mine has 6 heads; expected a number of ranks that divides 6"
    assert "has 2 key/value heads; expected a number of ranks that divides 2" in refused(Llama(sizes), 3)
    assert "has 9 feed-forward features; expected a number of ranks that divides 9" in refused(Llama(sizes), 2)
    assert "mine is of the family qwen3; expected a plain" in refused(VariantLlama(variant_of(sizes, "qwen3")), 2)
    assert "is of the family GPT2" in refused(GPT2(GPT2Config(vocab_size=16, dim=8, n_heads=2, n_layers=1)), 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    options = serve.make_parser().parse_args(["--model", "mine", "--tensor", "2"])
    with pytest.raises(UsageError, match="--tensor 2: PyTorch sees 1 GPU here; expected no more ranks than GPUs, or"):
        divided.find_device(options, Place(0, 2, []))
