"""The JAX algorithms against golden values, and against the torch ones on values that are far apart or broken."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from megatron_grpo.algorithms import advantage_estimator as torch_advantages
from megatron_grpo.algorithms.jax import advantages as jax_advantages
from megatron_grpo.algorithms.jax.importance_sampling import sequence_logprob_error
from megatron_grpo.algorithms.jax.kl import kl_estimate, kl_in_reward, kl_penalty
from megatron_grpo.algorithms.jax.loss import LossInputs, LossOutput, clipped_pg_loss
from megatron_grpo.algorithms.loss import importance_sampling as torch_importance_sampling
from megatron_grpo.algorithms.loss import kl as torch_kl
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.loss import ClippedPGLossConfig
from tests.unit.algorithms.batches import VARIANTS, Batch, loss_and_gradient, random_batch

GOLDEN = Path(__file__).parents[2] / "golden"
# Their denominators carry an epsilon of 1e-8; the files allow for it. Torch and JAX are compared without.
GOLDEN_TOLERANCE = {"rtol": 1e-7, "atol": 1e-7}
LOSS_CASES = json.loads((GOLDEN / "clipped_pg_loss.json").read_text())["cases"]
ADVANTAGE_CASES = json.loads((GOLDEN / "advantages.json").read_text())["cases"]
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
MORE_VARIANTS: dict[str, dict[str, object]] = {
    "cispo with KL": {"use_cispo": True, "reference_policy_kl_penalty": 0.1},
    "k1 async, no clamps": {
        "reference_policy_kl_type": "k1", "use_on_policy_kl_approximation": True,
        "kl_input_clamp_value": None, "kl_output_clamp_value": None, "reference_policy_kl_penalty": 0.3,
    },
    "k2 tight clamps": {
        "reference_policy_kl_type": "k2", "kl_input_clamp_value": 0.5, "kl_output_clamp_value": 0.1,
    },
    "tis with minimum": {
        "use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.05, "truncated_importance_sampling_ratio_min": 0.95,
    },
    "on policy with weights": {"force_on_policy_ratio": True, "use_importance_sampling_correction": True},
    "clip range 0": {"ratio_clip_min": 0.0, "ratio_clip_max": 0.0, "reference_policy_kl_penalty": 0.0},
    "KL in reward": {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.2},
    "gspo seq icepop": {
        "token_level_loss": False, "sequence_level_importance_ratios": True,
        "use_importance_sampling_correction": True, "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.02, "truncated_importance_sampling_ratio_min": 0.98,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=[*VARIANTS, *MORE_VARIANTS])
def config(request: pytest.FixtureRequest) -> ClippedPGLossConfig:
    return ClippedPGLossConfig(**(VARIANTS | MORE_VARIANTS)[request.param])


def _loss(
    config: ClippedPGLossConfig, curr: jax.Array, inputs: LossInputs
) -> tuple[jax.Array, LossOutput]:  # fmt: skip
    output = clipped_pg_loss(config, curr, inputs)
    return output.loss_sum / output.num_tokens, output


FAST_COMPILE = {"xla_backend_optimization_level": 0}
value_and_gradient = jax.jit(
    jax.value_and_grad(_loss, argnums=1, has_aux=True), static_argnums=0, compiler_options=FAST_COMPILE
)
jitted_advantages = jax.jit(jax_advantages.advantages, static_argnums=(0, 1), compiler_options=FAST_COMPILE)


def jax_loss(config: ClippedPGLossConfig, batch: Batch) -> tuple[jax.Array, jax.Array, LossOutput]:
    """Loss, gradient and output of a batch of torch tensors."""
    arrays = {name: jnp.asarray(values.numpy()) for name, values in batch.items()}
    inputs = LossInputs(
        prev_logprobs=arrays["prev"],
        generation_logprobs=arrays["generation"],
        reference_policy_logprobs=arrays["reference"],
        advantages=arrays["advantages"],
        token_mask=arrays["token_mask"],
        sample_mask=arrays["sample_mask"],
    )
    (loss, output), gradient = value_and_gradient(config, arrays["curr"], inputs)
    return loss, gradient, output


def assert_parity(config: ClippedPGLossConfig, batch: Batch) -> None:
    expected_loss, expected_gradient, (expected,) = loss_and_gradient(config, batch)
    loss, gradient, output = jax_loss(config, batch)
    assert math.isfinite(expected_loss)
    np.testing.assert_allclose(loss, expected_loss, **TIGHT)
    np.testing.assert_allclose(gradient, expected_gradient, **TIGHT)
    assert output.num_tokens == expected.num_tokens.item()
    assert output.num_dropped == expected.metrics["num_dropped_tokens"].value()


@pytest.mark.parametrize("case", LOSS_CASES, ids=[case["name"] for case in LOSS_CASES])
def test_golden_loss_and_gradient(case: dict[str, Any]) -> None:
    given = {name: torch.tensor(values, dtype=torch.float64) for name, values in case["inputs"].items()}
    # position 0 has no log-prob; the current ones are of tokens 1 .. S - 1
    batch = {
        "curr": given["curr_logprobs"],
        "prev": given["prev_logprobs"][:, 1:],
        "generation": given["generation_logprobs"][:, 1:],
        "reference": given["reference_policy_logprobs"][:, 1:],
        "advantages": given["advantages"][:, 1:],
        "token_mask": given["token_mask"][:, 1:],
        "sample_mask": given["sample_mask"],
        "staleness": torch.zeros_like(given["curr_logprobs"]),
    }
    config = ClippedPGLossConfig(**case["loss_fn"])
    loss, gradient, _ = jax_loss(config, batch)
    np.testing.assert_allclose(loss, case["expected"]["loss"], **GOLDEN_TOLERANCE)
    np.testing.assert_allclose(gradient, case["expected"]["grad_curr_logprobs"], **GOLDEN_TOLERANCE)
    assert_parity(config, batch)


def test_loss_of_random_batches(config: ClippedPGLossConfig) -> None:
    assert_parity(config, random_batch())


def test_policy_that_has_not_moved(config: ClippedPGLossConfig) -> None:
    """The ratio is exactly 1: on the bound of an empty clip range, and equal in both terms of the maximum."""
    batch = random_batch(seed=1)
    batch["curr"] = batch["prev"].clone()
    assert_parity(config, batch)


def test_log_probs_far_apart(config: ClippedPGLossConfig) -> None:
    """Differences past every clamp, up to where exp overflows float64 by far."""
    batch = random_batch(seed=2)
    for scale, name in ((30, "prev"), (30, "generation"), (30, "reference"), (40, "curr")):
        batch[name] = batch[name] * scale
    batch["curr"][3, 2] = -2000.0
    assert_parity(config, batch)


def test_garbage_at_masked_positions_changes_nothing(config: ClippedPGLossConfig) -> None:
    batch = random_batch(seed=3)
    clean_loss, clean_gradient, _ = jax_loss(config, batch)
    masked = (batch["token_mask"] == 0) | (batch["sample_mask"] == 0)[:, None]
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e300]).repeat(masked.numel())
    for name in ("curr", "prev", "generation", "reference", "advantages"):
        batch[name][masked] = garbage[: int(masked.sum())].double()
    loss, gradient, output = jax_loss(config, batch)
    assert loss == clean_loss
    assert (gradient == clean_gradient).all()
    assert output.num_dropped == 0


def test_tokens_that_are_not_finite_are_dropped(config: ClippedPGLossConfig) -> None:
    batch = random_batch(seed=4)
    batch["token_mask"][:, 2] = 1
    for row, (name, value) in enumerate(
        [("curr", -math.inf), ("prev", math.nan), ("generation", math.inf), ("reference", math.nan)]
    ):
        batch[name][row, 2] = value
    assert_parity(config, batch)
    _, gradient, output = jax_loss(config, batch)
    assert bool(jnp.isfinite(gradient).all())
    assert output.num_dropped >= 2


def test_input_that_is_missing_is_named() -> None:
    ones = jnp.ones((1, 2))
    inputs = LossInputs(ones, ones, None, ones, ones, jnp.ones(1))
    with pytest.raises(ValueError, match="reference_policy_logprobs is None"):
        clipped_pg_loss(ClippedPGLossConfig(), ones, inputs)
    with pytest.raises(ValueError, match="prev_logprobs is None"):
        clipped_pg_loss(ClippedPGLossConfig(), ones, inputs._replace(prev_logprobs=None))


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("clamps", [(20.0, 10.0), (0.5, 0.2), (None, 10.0), (1000.0, 10.0), (None, None)])
def test_kl(kl_type: Any, on_policy: bool, clamps: tuple[float | None, float | None]) -> None:
    config = ClippedPGLossConfig(
        reference_policy_kl_type=kl_type,
        use_on_policy_kl_approximation=on_policy,
        kl_input_clamp_value=clamps[0],
        kl_output_clamp_value=clamps[1],
    )
    c, r, g = torch.randn(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    c[:6], r[:6] = 0, torch.tensor([0.5, -0.5, 20, -20, 900, -900])  # on the limits, and where exp overflows
    c.requires_grad_()
    expected = torch_kl.kl_penalty(config, c, r, g)
    expected.sum().backward()
    arrays = [jnp.asarray(x.detach().numpy()) for x in (c, r, g)]
    np.testing.assert_allclose(kl_penalty(config, *arrays), expected.detach(), **TIGHT)
    gradient = jax.grad(lambda current: kl_penalty(config, current, *arrays[1:]).sum())(arrays[0])
    np.testing.assert_allclose(gradient, c.grad, **TIGHT)
    with torch.no_grad():
        r[6:8] = torch.tensor([math.nan, math.inf])
    arrays[1] = jnp.asarray(r.numpy())
    in_reward = torch_kl.kl_in_reward(config, c, r)
    assert in_reward.isnan().sum() == 2
    np.testing.assert_allclose(kl_in_reward(config, *arrays[:2]), in_reward, **TIGHT)


def test_kl_without_clamps_has_a_finite_gradient_where_exp_overflows() -> None:
    gradient = jax.grad(lambda log_ratio: kl_estimate(log_ratio, "k3"))(jnp.asarray(2000.0))
    assert gradient == -1.0


def test_sequence_logprob_error() -> None:
    batch = random_batch()
    batch["prev"][0, 3], batch["generation"][3, 3] = math.nan, -math.inf
    names = ("prev", "generation", "token_mask")
    expected = torch_importance_sampling.sequence_logprob_error(*(batch[n] for n in names))
    got = sequence_logprob_error(*(jnp.asarray(batch[n].numpy()) for n in names))
    np.testing.assert_allclose(got, expected, **TIGHT)
    assert got[2] == 1.0  # no response


def grpo_config(**estimator: object) -> GRPOConfig:
    clip = {name: estimator.pop(name) for name in list(estimator) if name.startswith("advantage_clip")}
    return GRPOConfig(
        max_num_steps=1, num_prompts_per_step=1, num_generations_per_prompt=2, adv_estimator=estimator, **clip
    )  # fmt: skip


@pytest.mark.parametrize("case", ADVANTAGE_CASES, ids=[case["name"] for case in ADVANTAGE_CASES])
def test_golden_advantages(case: dict[str, Any]) -> None:
    config, loss = grpo_config(**case["estimator"]), ClippedPGLossConfig(**case.get("loss_fn", {}))
    group_ids = jnp.asarray(case["prompt_ids"])
    rows = len(group_ids)
    kl = None
    if "logprobs_policy" in case:
        kl = kl_in_reward(loss, jnp.asarray(case["logprobs_policy"]), jnp.asarray(case["logprobs_reference"]))
    inputs = jax_advantages.AdvantageInputs(
        rewards=jnp.asarray(case.get("rewards", [0.0] * rows)),
        group_ids=group_ids,
        sample_mask=jnp.asarray(case.get("sample_mask", [1.0] * rows)),
        token_mask=jnp.asarray(case.get("token_mask", [[1.0]] * rows)),
        components={f"reward/{n}": jnp.asarray(r) for n, r in case.get("reward_components", {}).items()},
        kl=kl,
    )
    jax_advantages.check_rewards(config, inputs)
    values = jitted_advantages(config, loss, inputs).values
    expected = np.asarray(case["expected"])
    np.testing.assert_allclose(values if expected.ndim == 2 else values[:, 0], expected, **TIGHT)


ESTIMATORS: dict[str, dict[str, object]] = {
    "grpo": {"name": "grpo", "normalize_rewards": True},
    "grpo mean, clipped": {
        "name": "grpo", "normalize_rewards": False, "use_leave_one_out_baseline": False,
        "advantage_clip_low": -0.3, "advantage_clip_high": 0.4,
    },
    "gdpo": {"name": "gdpo", "normalize_rewards": True},
    "reinforce++": {"name": "reinforce_plus_plus"},
    "reinforce++ without baseline": {"name": "reinforce_plus_plus", "minus_baseline": False},
}  # fmt: skip


def advantage_inputs(seed: int = 0, rows: int = 40, width: int = 5) -> dict[str, Any]:
    """Numpy inputs: groups of unequal size under large ids, one of a single row, one of equal rewards."""
    rng = np.random.default_rng(seed)
    group_ids = rng.integers(0, 7, rows) * 10**12
    group_ids[4] = 5
    first, second = rng.normal(size=(2, rows)).round(1)
    second[group_ids == 0] = first[group_ids == 0] = 0.1  # whose mean is not 0.1 in floating point
    sample_mask = (rng.random(rows) > 0.2).astype(float)
    sample_mask[4] = 1
    first[sample_mask == 0] = np.nan
    return {
        "rewards": first + second,
        "group_ids": group_ids,
        "sample_mask": sample_mask,
        "token_mask": (rng.random((rows, width)) > 0.3).astype(float),
        "components": {"reward/first": first, "reward/second": second, "environment/turns": second**2},
        "kl": np.where(rng.random((rows, width)) > 0.1, rng.random((rows, width)), np.nan),
    }


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
@pytest.mark.parametrize("use_kl_in_reward", [False, True])
def test_advantages_of_random_batches(estimator: dict[str, object], use_kl_in_reward: bool) -> None:
    config = grpo_config(**estimator)
    loss = ClippedPGLossConfig(use_kl_in_reward=use_kl_in_reward, reference_policy_kl_penalty=0.1)
    given = advantage_inputs()
    inputs = jax_advantages.AdvantageInputs(**jax.tree.map(jnp.asarray, given))
    if config.adv_estimator.name == "gdpo" and use_kl_in_reward:
        with pytest.raises(ValueError, match="use_kl_in_reward"):
            jax_advantages.advantages(config, loss, inputs)
        with pytest.raises(ValueError, match="use_kl_in_reward"):
            torch_advantages.make_advantage_estimator(config, loss, None)
        return
    got = jitted_advantages(config, loss, inputs)
    estimate = torch_advantages.make_advantage_estimator(config, loss, None)
    expected, metrics = estimate(torch_advantages.AdvantageInputs(**jax.tree.map(torch.from_numpy, given)))
    np.testing.assert_allclose(got.values, expected, **TIGHT)
    assert got.num_groups == metrics["num_groups"].value()
    assert got.num_degenerate_groups == metrics["num_degenerate_groups"].value()
    assert got.num_degenerate_groups == (1 if use_kl_in_reward and config.adv_estimator.name == "grpo" else 2)


def test_degenerate_groups_are_exactly_0() -> None:
    given = advantage_inputs()
    inputs = jax_advantages.AdvantageInputs(**jax.tree.map(jnp.asarray, given))
    for name in ("grpo", "gdpo"):
        values = jitted_advantages(grpo_config(name=name), ClippedPGLossConfig(), inputs).values
        assert (values[(given["group_ids"] == 0) | (given["group_ids"] == 5)] == 0).all()
        assert int((values != 0).sum()) > 50


@pytest.mark.parametrize("normalize", [True, False])
def test_components_that_cancel_are_not_scaled_up(normalize: bool) -> None:
    rewards = np.asarray([0.1, 0.7, 0.3, 0.9])
    given = {
        "rewards": rewards,
        "group_ids": np.asarray([1, 1, 2, 2]),
        "sample_mask": np.ones(4),
        "token_mask": np.ones((4, 1)),
        "components": {"reward/a": 1e6 * rewards, "reward/b": (2.0 if normalize else 1e6) * (1 - rewards)},
    }
    inputs = jax_advantages.AdvantageInputs(**jax.tree.map(jnp.asarray, given))
    config, loss = grpo_config(name="gdpo", normalize_rewards=normalize), ClippedPGLossConfig()
    assert (jax_advantages.advantages(config, loss, inputs).values == 0).all()
    estimate = torch_advantages.make_advantage_estimator(config, loss, None)
    assert (estimate(torch_advantages.AdvantageInputs(**jax.tree.map(torch.from_numpy, given)))[0] == 0).all()


def test_reward_that_is_not_finite_is_named_and_spoils_its_group() -> None:
    inputs = jax_advantages.AdvantageInputs(
        jnp.asarray([1.0, math.nan, 0.0, 1.0]), jnp.asarray([1, 1, 2, 2]), jnp.ones(4), jnp.ones((4, 1)),
        {"reward/format": jnp.asarray([0.0, math.inf, 1.0, 1.0]), "reward/correct": jnp.zeros(4)},
    )  # fmt: skip
    for name, message in (
        ("grpo", "the reward is not finite in 1"),
        ("gdpo", "reward/format is not finite in 1"),
    ):
        with pytest.raises(ValueError, match=message):
            jax_advantages.check_rewards(grpo_config(name=name), inputs)
    values = jax_advantages.advantages(grpo_config(name="grpo"), ClippedPGLossConfig(), inputs).values
    assert jnp.isnan(values[:2]).all()
    assert jnp.isfinite(values[2:]).all()


def test_gdpo_needs_two_components() -> None:
    inputs = jax_advantages.AdvantageInputs(
        jnp.ones(2),
        jnp.ones(2),
        jnp.ones(2),
        jnp.ones((2, 1)),
        {"reward/a": jnp.ones(2), "environment/turns": jnp.ones(2)},
    )
    with pytest.raises(ValueError, match="1 reward components"):
        jax_advantages.advantages(grpo_config(name="gdpo"), ClippedPGLossConfig(), inputs)
