from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_grpo.config import ParallelConfig, RunConfig
from tests.unit.config.configs import values


def test_the_smallest_configuration_and_what_follows_from_it() -> None:
    config = RunConfig.model_validate(values())
    assert config.grpo.rollouts_per_step == 32
    assert config.optimizer_steps_per_rollout == 2
    assert config.policy.forward_batch_size == config.policy.train_micro_batch_size == 1


@pytest.mark.parametrize(
    ("section", "key", "nearest"),
    [
        ("grpo", "num_prompts_per_stp", "num_prompts_per_step"),
        ("loss_fn", "ratio_clip", "ratio_clip_c"),
        ("policy", "model_name_path", "model_path"),
        ("generation", "temprature", "temperature"),
    ],
)
def test_an_unknown_key_names_the_nearest(section: str, key: str, nearest: str) -> None:
    with pytest.raises(ValidationError, match=f"unknown key '{key}'; did you mean '{nearest}'"):
        RunConfig.model_validate(values(**{section: {key: 1}}))


def test_an_unknown_key_that_is_like_no_other_lists_all() -> None:
    with pytest.raises(ValidationError, match="unknown key 'zzz'; valid keys: max_new_tokens, temperature"):
        RunConfig.model_validate(values(generation={"zzz": 1}))


def test_a_configuration_cannot_be_changed() -> None:
    config = RunConfig.model_validate(values())
    with pytest.raises(ValidationError, match="frozen"):
        config.grpo.seed = 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"policy": {"train_global_batch_size": 12}},
            "train_global_batch_size 12 does not divide .* 8 x .* 4 = 32; use a divisor",
        ),
        (
            {"loss_fn": {"force_on_policy_ratio": True}},
            "train_global_batch_size 16 makes 2 of 32 rollouts; set it to 32",
        ),
        (
            {"policy": {"moe_z_loss_coeff": 0.1}, "loss_fn": {"token_level_loss": False}},
            "policy.moe_z_loss_coeff is 0.1 and loss_fn.token_level_loss is false",
        ),
        (
            {"policy": {"moe_aux_loss_coeff": 0.1, "sequence_packing": {"enabled": True}}},
            "moe_aux_loss_coeff is 0.1 and sequence_packing.enabled is true",
        ),
        (
            {"generation": {"max_new_tokens": 64}},
            "max_new_tokens 64 leaves no room .*max_total_sequence_length 64",
        ),
        (
            {"loss_fn": {"use_kl_in_reward": True}, "grpo": {"adv_estimator": {"name": "gdpo"}}},
            "use_kl_in_reward is true and grpo.adv_estimator.name is gdpo",
        ),
        ({"grpo": {"val_period": 2}}, "data.validation is null"),
        ({"grpo": {"val_at_start": True}}, "data.validation is null"),
        ({"grpo": {"val_at_end": True}}, "data.validation is null"),
        ({"grpo": {"advantage_clip_low": 1.0, "advantage_clip_high": -1.0}}, "low 1.0 is above .*high -1.0"),
        ({"grpo": {"advantage_clip_low": 1.0}}, "advantage_clip_low is 1.0: 0 must lie inside the bounds"),
        ({"grpo": {"advantage_clip_high": -1.0}}, "advantage_clip_high is -1.0: 0 must lie inside"),
        ({"grpo": {"advantage_clip_low": 0.0, "advantage_clip_high": 0.0}}, "must differ"),
        ({"grpo": {"advantage_clip_low": float("nan")}}, "finite number"),
        ({"grpo": {"seed": 2**31}}, "less than 2147483648"),
        (
            {"grpo": {"adv_estimator": {"name": "gdpo"}}},
            "gdpo and env.name is reasoning_gym, which gives one reward",
        ),
        ({"grpo": {"num_generations_per_prompt": 1}}, "greater than or equal to 2"),
        ({"generation": {"temperature": 0}}, "temperature is 0: greedy rollouts"),
        ({"generation": {"temperature": 1e-4}}, "temperature is 0.0001: vLLM samples at 0.01 instead"),
        ({"generation": {"temperature": -0.5}}, "greater than or equal to 0"),
        ({"generation": {"top_p": 0.9}}, "top_p is 0.9: .* biases every ratio; set top_p to 1.0"),
        ({"generation": {"top_k": 5}}, "top_k is 5: .* biases every ratio; set top_k to -1"),
        ({"policy": {"optimizer": {"lr": 1e-4, "min_lr": 1e-3}}}, "min_lr 0.001 is above lr 0.0001"),
        (
            {"policy": {"parallel": {"sequence_parallel": True}}},
            "sequence_parallel is true but tensor_model_parallel_size is 1",
        ),
        (
            {"policy": {"parallel": {"virtual_pipeline_model_parallel_size": 2}}},
            "virtual_pipeline_model_parallel_size is 2 but pipeline_model_parallel_size is 1",
        ),
        ({"data": {"train": {"kind": "jsonl"}}}, "kind is jsonl but path is null"),
        (
            {"data": {"train": {"kind": "jsonl", "path": "p", "task": "chain_sum"}}},
            "kind is jsonl but task is chain_sum, which only the other kind takes",
        ),
        (
            {"data": {"train": {"kind": "reasoning_gym", "task": "chain_sum"}}},
            "task is chain_sum and size is None; give both",
        ),
        ({"env": {"name": "custom"}}, "name is custom and class_path is None"),
        ({"grpo": {"adv_estimator": {"name": "ppo"}}}, "'grpo', 'gdpo' or 'reinforce_plus_plus'"),
        (
            {"grpo": {"use_dynamic_sampling": True, "async_grpo": {"enabled": True}}},
            "use_dynamic_sampling is true and async_grpo.enabled is true: .*; set one of them to false",
        ),
        (
            {"grpo": {"async_grpo": {"enabled": True}}},
            "async_grpo.enabled is true and loss_fn.use_importance_sampling_correction is false: .* to true",
        ),
        (
            {
                "grpo": {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 2}},
                "loss_fn": {"use_importance_sampling_correction": True},
            },
            "async_grpo.enabled is true, but this version trains synchronously only; set it to false",
        ),
        (
            {"grpo": {"dynamic_sampling_max_gen_batches": 0}},
            "dynamic_sampling_max_gen_batches\n.*greater than 0",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_keys_and_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(values(**changes))


def test_one_virtual_stage_is_none() -> None:
    """Megatron would take 1 for an interleaved schedule, and fail inside the first forward pass."""
    layout = ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=1)
    assert layout.group_sizes()["virtual_pipeline_model_parallel_size"] is None


def test_neighbours_of_the_refused_values_are_accepted() -> None:
    changes: dict[str, Any] = {
        "policy": {"train_global_batch_size": 32, "max_total_sequence_length": 65},
        "loss_fn": {"force_on_policy_ratio": True},
        "grpo": {
            "use_dynamic_sampling": True,
            "async_grpo": {"enabled": False},
            "seed": 2**31 - 1,
            "advantage_clip_low": 0.0,
            "advantage_clip_high": 1.0,
        },
        "generation": {"max_new_tokens": 64, "temperature": 0.7, "top_p": 1.0, "top_k": -1},
    }
    config = RunConfig.model_validate(values(**changes))
    assert config.optimizer_steps_per_rollout == 1


def parallel(**factors: Any) -> ParallelConfig:
    return ParallelConfig(**{f"{name}_model_parallel_size": value for name, value in factors.items()})


def test_data_parallel_size_follows_from_the_world() -> None:
    layout = ParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2
    )
    assert layout.model_parallel_size == 8
    assert layout.data_parallel_size(24) == 3
    with pytest.raises(ValueError, match="world size 12 is not a multiple of TP 2 x PP 2 x CP 2 = 8"):
        layout.data_parallel_size(12)
    with pytest.raises(
        ValueError, match="world size 6 is not a multiple of expert-TP 1 x EP 4 x PP 1 = 4; start 4"
    ):
        parallel(expert=4).data_parallel_size(6)


@pytest.mark.parametrize(
    ("world_size", "message"),
    [
        (3, "grpo.num_prompts_per_step 8 is not a multiple of the data-parallel size 3"),
        (16, "grpo.num_prompts_per_step 8 is not a multiple of the data-parallel size 16"),
    ],
)
def test_prompts_divide_over_the_replicas(world_size: int, message: str) -> None:
    config = RunConfig.model_validate(values())
    config.check_world_size(8)
    with pytest.raises(ValueError, match=message):
        config.check_world_size(world_size)


def test_the_global_batch_divides_over_the_replicas() -> None:
    config = RunConfig.model_validate(values(policy={"train_global_batch_size": 4}))
    config.check_world_size(4)
    with pytest.raises(ValueError, match=r"train_global_batch_size 4 is not a multiple .* size 8"):
        config.check_world_size(8)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            "request_timeout_s",
            "distributed_timeout_s 1000 must exceed generation.vllm.request_timeout_s 940 "
            r"\+ env.timeout_s 60 = 1000",
        ),
        (
            "startup_timeout_s",
            r"must exceed generation.vllm.startup_timeout_s 940 \+ env.startup_timeout_s 60 = 1000",
        ),
    ],
)
def test_collectives_wait_longer_than_leaders(engine: str, message: str) -> None:
    def content(seconds: float) -> dict[str, Any]:
        short = {"request_timeout_s": 10, "startup_timeout_s": 10, engine: seconds}
        env = {"timeout_s": 60, "startup_timeout_s": 60}
        return values(generation={"vllm": short}, env=env) | {"distributed_timeout_s": 1000}

    RunConfig.model_validate(content(939))
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(content(940))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            {"train_micro_batch_size": 3},
            "train_micro_batch_size 3 does not divide .* 16 / data-parallel size 2 = 8 sequences; use 2 or 4",
        ),
        (
            {"logprob_batch_size": 5},
            "logprob_batch_size 5 does not divide .* / data-parallel size 2 = 16 sequences; use 4 or 8",
        ),
        (
            {
                "train_micro_batch_size": 8,
                "parallel": {
                    "pipeline_model_parallel_size": 2,
                    "virtual_pipeline_model_parallel_size": 2,
                },
            },
            "train_micro_batch_size 8 does not divide .* 8 sequences into a multiple of PP 2 .* use 4$",
        ),
    ],
)
def test_micro_batches_are_of_one_size(policy: dict[str, Any], message: str) -> None:
    config = RunConfig.model_validate(values(policy=policy))
    with pytest.raises(ValueError, match=message):
        config.check_world_size(2 * config.policy.parallel.model_parallel_size)


PACKED = {"enabled": True}


def test_token_budgets_follow_from_the_batch_sizes() -> None:
    policy = RunConfig.model_validate(values(policy={"sequence_packing": PACKED})).policy
    assert policy.train_mb_tokens == policy.logprob_mb_tokens == 64
    sizes = {"train_micro_batch_size": 2, "logprob_batch_size": 5, "max_total_sequence_length": 65}
    cp = {"parallel": {"context_parallel_size": 4}}  # sequences are padded to a multiple of 8
    policy = RunConfig.model_validate(values(policy={"sequence_packing": PACKED} | sizes | cp)).policy
    assert (policy.train_mb_tokens, policy.logprob_mb_tokens) == (2 * 72, 5 * 72)
    explicit = {"sequence_packing": PACKED | {"train_mb_tokens": 100}}
    policy = RunConfig.model_validate(values(policy=explicit)).policy
    assert (policy.train_mb_tokens, policy.logprob_mb_tokens) == (100, 64)
    policy = RunConfig.model_validate(values()).policy
    assert (policy.train_mb_tokens, policy.logprob_mb_tokens) == (None, None)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            {"sequence_packing": PACKED | {"train_mb_tokens": 63}},
            "sequence_packing.train_mb_tokens 63 is below max_total_sequence_length 64; raise it to at least 64",
        ),
        (
            {
                "sequence_packing": PACKED | {"logprob_mb_tokens": 70},
                "max_total_sequence_length": 65,
                "parallel": {
                    "context_parallel_size": 2,
                    "tensor_model_parallel_size": 2,
                    "sequence_parallel": True,
                },
            },
            r"sequence_packing.logprob_mb_tokens 70 is below max_total_sequence_length 65 \+ 7 of padding for context "
            "and sequence parallelism; raise it to at least 72",
        ),
        (
            {"sequence_packing": {"train_mb_tokens": 4096}},
            "sequence_packing.train_mb_tokens is 4096 but sequence_packing.enabled is false; set enabled to true",
        ),
    ],
)
def test_a_token_budget_holds_the_longest_sequence(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(values(policy=policy))


def test_packed_micro_batches_need_no_divisor() -> None:
    policy = {"train_micro_batch_size": 3, "logprob_batch_size": 5, "train_global_batch_size": 2}
    with pytest.raises(ValueError, match=r"policy\.train_global_batch_size 2 is not a multiple"):
        RunConfig.model_validate(values(policy=policy)).check_world_size(4)
    packed = RunConfig.model_validate(values(policy=policy | {"sequence_packing": PACKED}))
    packed.check_world_size(4)
    with pytest.raises(ValueError, match=r"grpo\.num_prompts_per_step 8 is not a multiple"):
        packed.check_world_size(3)
