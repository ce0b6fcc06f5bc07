from __future__ import annotations

import pytest

from megatron_grpo.config.loss import ClippedPGLossConfig

TIS = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0}
SEQUENCE = {"token_level_loss": False, "sequence_level_importance_ratios": True}


def tis(kind: str, **keys: object) -> dict[str, object]:
    return {**TIS, "truncated_importance_sampling_type": kind, **keys}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ratio_clip_mni": 0.2}, ["ratio_clip_mni", "ratio_clip_min"]),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, ["use_cispo", "ratio_clip_c", "3.0", "None"]),
        ({"use_cispo": True, "disable_ppo_ratio": True}, ["use_cispo", "disable_ppo_ratio", "True"]),
        ({"use_cispo": True, "force_on_policy_ratio": True}, ["use_cispo", "force_on_policy_ratio"]),
        ({"use_cispo": True, **SEQUENCE}, ["use_cispo", "sequence_level_importance_ratios"]),
        ({"use_cispo": True, "token_level_loss": False}, ["use_cispo", "token_level_loss", "False"]),
        ({"force_on_policy_ratio": True, "disable_ppo_ratio": True}, ["force_on_policy_ratio", "disable_ppo_ratio"]),
        ({"sequence_level_importance_ratios": True}, ["sequence_level_importance_ratios", "token_level_loss: false"]),
        ({"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0},
         ["truncated_importance_sampling_type is tis", "use_importance_sampling_correction is false"]),
        ({"truncated_importance_sampling_ratio": 2.0}, ["truncated_importance_sampling_ratio is 2.0", "type"]),
        ({"truncated_importance_sampling_ratio_min": 0.5}, ["truncated_importance_sampling_ratio_min is 0.5", "type"]),
        (tis("icepop"), ["icepop", "truncated_importance_sampling_ratio_min"]),
        (tis("seq-mask-tis"), ["seq-mask-tis", "truncated_importance_sampling_ratio_min"]),
        (tis("seq-mask-tis", truncated_importance_sampling_ratio_min=0.5, **SEQUENCE),
         ["seq-mask-tis", "sequence_level_importance_ratios"]),
        (tis("tis", truncated_importance_sampling_ratio=None), ["truncated_importance_sampling_ratio is null"]),
        (tis("tis", truncated_importance_sampling_ratio_min=3.0), ["3.0", "2.0", "above"]),
        (tis("tis", truncated_importance_sampling_ratio=0.0), ["truncated_importance_sampling_ratio"]),
        (tis("tis", truncated_importance_sampling_ratio_min=-0.1), ["truncated_importance_sampling_ratio_min"]),
        (tis("top"), ["truncated_importance_sampling_type", "seq-mask-tis"]),
        ({"ratio_clip_min": 1.1}, ["ratio_clip_min", "1.1"]),
        ({"ratio_clip_min": -0.1}, ["ratio_clip_min", "-0.1"]),
        ({"ratio_clip_max": -0.1}, ["ratio_clip_max", "-0.1"]),
        ({"ratio_clip_c": 1.0}, ["ratio_clip_c", "greater than 1"]),
        ({"reference_policy_kl_penalty": -0.1}, ["reference_policy_kl_penalty", "-0.1"]),
        ({"reference_policy_kl_penalty": float("inf")}, ["reference_policy_kl_penalty", "finite"]),
        ({"reference_policy_kl_penalty": float("nan")}, ["reference_policy_kl_penalty"]),
        ({"ratio_clip_max": float("inf")}, ["ratio_clip_max", "finite"]),
        ({"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.0},
         ["use_kl_in_reward is true", "reference_policy_kl_penalty is 0", "coefficient"]),
        ({"reference_policy_kl_type": "k4"}, ["reference_policy_kl_type", "k4"]),
    ],
)  # fmt: skip
def test_refused_when_built(keys: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words below are the match
        ClippedPGLossConfig(**keys)
    assert [word for word in words if word not in str(error.value)] == []


def test_defaults_of_the_specification() -> None:
    assert ClippedPGLossConfig().model_dump() == {
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "ratio_clip_c": None,
        "token_level_loss": True,
        "sequence_level_importance_ratios": False,
        "disable_ppo_ratio": False,
        "force_on_policy_ratio": False,
        "use_cispo": False,
        "reference_policy_kl_penalty": 0.01,
        "reference_policy_kl_type": "k3",
        "kl_input_clamp_value": 20.0,
        "kl_output_clamp_value": 10.0,
        "use_kl_in_reward": False,
        "use_importance_sampling_correction": False,
        "truncated_importance_sampling_type": None,
        "truncated_importance_sampling_ratio": None,
        "truncated_importance_sampling_ratio_min": None,
        "use_on_policy_kl_approximation": None,  # follows grpo.async_grpo.enabled
    }
