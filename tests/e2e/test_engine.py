"""A real vLLM server: sampling against Hugging Face, refits, the key, and its death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from megatron_grpo.rollout.client import Completion, SamplingParams
from megatron_grpo.rollout.errors import EngineError
from megatron_grpo.rollout.router import EngineRouter
from megatron_grpo.types import Prompt
from tests.e2e.conftest import Serve, Served
from tests.tiny_model import tiny_tokenizer, write_tiny_model

pytestmark = pytest.mark.timeout(300)

PROMPT = [1, *range(20, 60), 2, 1, 70, 71]
SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.7)


def _perturbed(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }


def _sample(
    served: Served, seed: int = 3, n: int = 4, sampling: SamplingParams = SAMPLING
) -> list[Completion]:
    return served.run(served.client.generate(PROMPT, n, sampling, seed))


def _worst_error(
    served: Served, weights: dict[str, torch.Tensor], completions: list[Completion], temperature: float
) -> float:
    """Largest difference of any sampled token's log-prob from the Hugging Face forward's."""
    worst = 0.0
    for completion in completions:
        expected = served.reference_logprobs(weights, [*PROMPT, *completion.token_ids], temperature)
        got = torch.tensor(completion.logprobs)
        worst = max(worst, (expected[-len(got) :] - got).abs().max().item())
    return worst


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def served(request: pytest.FixtureRequest, serve: Serve) -> Iterator[Served]:
    """An engine that holds the weights of its disk, before and after the test."""
    engine = serve(request.param)
    yield engine
    engine.refit.push(engine.weights.items(), engine.run(engine.client.weight_version()) + 1)


@pytest.fixture
def untied(serve: Serve) -> Served:
    return serve(False)


def test_logprobs_are_those_of_the_tempered_distribution(served: Served) -> None:
    completions = _sample(served)
    assert _worst_error(served, served.weights, completions, 0.7) < 1e-4
    assert len({c.token_ids for c in completions}) == 4
    assert all(len(c.token_ids) == 8 or c.finish_reason == "stop" for c in completions)


def test_same_seed_same_samples_other_seed_others(untied: Served) -> None:
    first, again, other = _sample(untied), _sample(untied), _sample(untied, seed=1003)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert not {c.token_ids for c in first} & {c.token_ids for c in other}
    # Sample i of seed s is sample 0 of seed s + i: groups need seeds further apart than their size.
    assert _sample(untied, seed=4, n=1)[0].token_ids == first[1].token_ids


def test_greedy_is_the_argmax(untied: Served) -> None:
    (completion,) = _sample(untied, n=1, sampling=SamplingParams(4, temperature=0.0))
    distribution = untied.reference_distribution(untied.weights, [*PROMPT, *completion.token_ids])
    assert completion.token_ids == tuple(distribution[len(PROMPT) - 1 : -1].argmax(-1).tolist())


def test_score_is_the_logprob_of_each_prompt_token(untied: Served) -> None:
    got = torch.tensor(untied.run(untied.client.score(PROMPT)))
    assert got.shape == (len(PROMPT) - 1,)
    torch.testing.assert_close(got, untied.reference_logprobs(untied.weights, PROMPT), atol=1e-4, rtol=0)


def test_end_tokens_are_among_the_sampled_tokens(untied: Served) -> None:
    end = tiny_tokenizer().eos_token_id
    own = _sample(untied, n=64, sampling=SamplingParams(40, temperature=1.5))
    stopped = [c for c in own if c.finish_reason == "stop"]
    assert stopped, "no response of 64 x 40 tokens over 313 ended by itself"
    assert all(c.token_ids[-1] == end and end not in c.token_ids[:-1] for c in stopped)
    assert all(len(c.token_ids) == 40 and end not in c.token_ids for c in own if c.finish_reason == "length")

    token = own[0].token_ids[2]
    first = _sample(untied, n=64, sampling=SamplingParams(40, temperature=1.5, stop_token_ids=(token,)))[0]
    assert first.finish_reason == "stop"
    assert first.token_ids == own[0].token_ids[: own[0].token_ids.index(token) + 1]


def test_many_groups_at_once(untied: Served) -> None:
    """Field report: a seeded prompt cut into chunks kills vLLM on a CPU. 40 groups are more than one batch."""
    tokenizer = tiny_tokenizer()
    router = EngineRouter([untied.client], lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))
    prompts = [(Prompt(f"train:{i}", tuple(range(3, 120 + i)), "q"), i) for i in range(40)]
    groups = untied.run(router.sample(prompts, 8, SamplingParams(3), seed=1))
    assert [len(group.rollouts) for group in groups] == [8] * 40
    rollout = groups[7].rollouts[3]
    assert rollout.text == tokenizer.decode(list(rollout.token_ids), skip_special_tokens=True)
    again = untied.run(router.sample(prompts, 8, SamplingParams(3), seed=1))
    assert [[r.token_ids for r in g.rollouts] for g in again] == [
        [r.token_ids for r in g.rollouts] for g in groups
    ]


def test_refit_serves_the_new_weights_under_the_new_version(served: Served) -> None:
    before = _sample(served)  # fills the prefix cache with values of the old weights
    version = served.run(served.client.weight_version()) + 1
    new = _perturbed(served.weights, seed=version)
    report = served.refit.push(new.items(), version, must_change=new.keys())
    assert report.tensors == len(served.weights)
    assert report.buckets > 1

    after = _sample(served)
    assert {v for c in after for v in c.weight_versions} == {version}
    assert _worst_error(served, new, after, 0.7) < 1e-5
    assert _worst_error(served, served.weights, before, 0.7) < 1e-5
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    got = torch.tensor(served.run(served.client.score(PROMPT)))
    torch.testing.assert_close(got, served.reference_logprobs(new, PROMPT), atol=1e-5, rtol=0)


def test_refits_of_equal_weights_change_no_bit(served: Served) -> None:
    before = _sample(served)
    version = served.run(served.client.weight_version())
    for i in range(1, 6):
        served.refit.push(served.weights.items(), version + i)
    after = _sample(served)
    assert [(c.token_ids, c.logprobs) for c in after] == [(c.token_ids, c.logprobs) for c in before]
    assert {v for c in after for v in c.weight_versions} == {version + 5}


def test_refit_in_the_middle_of_a_response(untied: Served) -> None:
    version = untied.run(untied.client.weight_version()) + 1
    future = untied.loop.submit(untied.client.generate(PROMPT, 8, SamplingParams(200), seed=5))
    time.sleep(0.2)
    new = _perturbed(untied.weights, seed=9)
    # New requests are refused while a refit runs; those under way freeze and go on after it.
    untied.refit.push(new.items(), version)
    completions = future.result(60)
    untied.refit.push(untied.weights.items(), version + 1)

    versions = [c.weight_versions for c in completions]
    assert {v for spans in versions for v in spans} <= {version - 1, version}
    assert all(list(spans) == sorted(spans) for spans in versions)
    longest = max(completions, key=lambda c: c.weight_versions.count(version))
    first_new = longest.weight_versions.index(version)
    got = torch.tensor(longest.logprobs)
    expected = untied.reference_logprobs(new, [*PROMPT, *longest.token_ids])[len(PROMPT) - 1 :]
    # The tail is that of the new weights over the whole prefix: keys and values were computed again.
    assert (expected - got)[first_new:].abs().max() < 1e-4
    if first_new > 0:
        assert (expected - got)[:first_new].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda w: {n: t for n, t in w.items() if n.endswith("q_proj.weight")},
            r"2\d of 2\d tensors did not arrive",
        ),
        (
            lambda w: {n: t for n, t in w.items() if "0.self_attn.v_proj" not in n},
            r"layers\.0\.self_attn\.v_proj",
        ),
        (
            lambda w: w | {"model.layers.7.mlp.up_proj.weight": torch.zeros(2)},
            r"layers\.7\.mlp.* is not a weight",
        ),
        (
            lambda w: w | {"model.norm.weight": torch.zeros(64)},
            r"model.norm.weight has shape \(64,\), .*\(128,\)",
        ),
    ],
    ids=["only q_proj", "without one v_proj", "unknown name", "wrong shape"],
)
def test_incomplete_weights_are_refused_by_name_and_the_engine_recovers(
    served: Served, change: object, match: str
) -> None:
    before = _sample(served)
    version = served.run(served.client.weight_version()) + 1
    bad = change(_perturbed(served.weights, seed=2))  # type: ignore[operator]
    with pytest.raises(EngineError, match=f"{served.process.name}: .*refit refused.*{match}"):
        served.refit.push(bad.items(), version)
    with pytest.raises(EngineError, match=f"{served.process.name} is stale"):
        _sample(served)
    assert [path.name for path in served.process.private_dir.iterdir()] == ["engine.sock"]

    served.refit.push(served.weights.items(), version + 1)
    after = _sample(served)
    assert [(c.token_ids, c.logprobs) for c in after] == [(c.token_ids, c.logprobs) for c in before]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}], ids=["no key", "wrong key"])
def test_every_route_but_health_asks_for_the_key(untied: Served, headers: dict[str, str]) -> None:
    transport = httpx.HTTPTransport(uds=str(untied.process.socket_path))
    with httpx.Client(transport=transport, base_url="http://engine", headers=headers, timeout=30) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/weight_info").status_code == 401
        routes = ["/update_weights", "/start_weight_update", "/pause", "/resume", "/collective_rpc"]
        routes += ["/reset_prefix_cache", "/v1/completions", "/inference/v1/generate", "/metrics"]
        assert [client.post(route, json={}).status_code for route in routes] == [401] * len(routes)
    assert untied.process.socket_path.stat().st_mode & 0o777 == 0o600
    command_lines = [p.cmdline() for p in psutil.Process(untied.process.pid).children(recursive=True)]
    assert not any(untied.process.key in word for line in command_lines for word in line)


OWNER = """
    import sys, time
    from pathlib import Path
    from megatron_grpo.config.generation import VLLMConfig
    from megatron_grpo.rollout.engine_process import EngineProcess

    directory = Path(sys.argv[1])
    engine = EngineProcess("orphan", directory / "model", directory, VLLMConfig(), max_model_len=64)
    engine.start()
    print(engine.pid, engine.private_dir, flush=True)
    time.sleep(300)
"""


def test_no_process_outlives_a_killed_owner(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, private_dir = owner.stdout.readline().split()
    guard = psutil.Process(int(pid))
    deadline = time.monotonic() + 200
    # The worst moment: the server has started its engine core, which is importing.
    while len(tree := guard.children(recursive=True)) < 3:
        assert time.monotonic() < deadline, (tmp_path / "orphan.log").read_text()
        time.sleep(0.2)
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs([guard, *tree], timeout=20)
    assert alive == []
    assert not Path(private_dir).exists()


def test_killed_server_is_an_error_with_the_end_of_its_log(serve: Serve) -> None:
    """Last: the tied engine does not come back."""
    served = serve(True)
    (server,) = psutil.Process(served.process.pid).children()

    async def kill_while_generating() -> None:
        request = asyncio.ensure_future(served.client.generate(PROMPT, 2, SamplingParams(200), 1))
        await asyncio.sleep(0.1)
        os.kill(server.pid, signal.SIGKILL)
        await request

    started = time.monotonic()
    with pytest.raises(
        EngineError, match=r"(?s)tied ended with status 137; the end of .*tied\.log:\n.*SIGKILL|status -9"
    ):
        served.run(kill_while_generating())
    with pytest.raises(EngineError, match="tied ended with status 137"):
        served.run(served.client.weight_version())
    assert time.monotonic() - started < 30
    with pytest.raises(EngineError, match="tied ended with status 137"):
        served.refit.push(served.weights.items(), 999)
