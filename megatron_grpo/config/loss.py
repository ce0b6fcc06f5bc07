"""``loss_fn``: the knobs of the clipped policy-gradient loss and the combinations that are refused."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from megatron_grpo.config.base import Config


class ClippedPGLossConfig(Config):
    """Configuration of ``ClippedPGLossFn``. Every invalid combination is refused when it is built."""

    ratio_clip_min: NonNegativeFloat = Field(
        0.2, le=1.0, description="ratios are clipped to 1 - this from below"
    )
    ratio_clip_max: NonNegativeFloat = Field(0.2, description="and to 1 + this from above")
    ratio_clip_c: float | None = Field(
        None, gt=1.0, description="dual clip: bound of the loss at negative advantages"
    )
    token_level_loss: bool = Field(True, description="token mean over the global batch; false: mean over "
                                   "sequences of the per-sequence token mean")  # fmt: skip
    sequence_level_importance_ratios: bool = Field(False, description="GSPO; needs token_level_loss false")
    disable_ppo_ratio: bool = Field(False, description="REINFORCE: no ratio and no clip")
    force_on_policy_ratio: bool = Field(
        False, description="ratio of value 1; needs one optimizer step per rollout batch"
    )
    use_cispo: bool = Field(False, description="the clipped ratio is a constant weight of every token")
    reference_policy_kl_penalty: NonNegativeFloat = Field(
        0.01, description="coefficient of the KL term; 0: no reference policy is kept"
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL")
    kl_input_clamp_value: PositiveFloat | None = Field(
        20.0, description="bound of the log-ratio in the KL; null: none"
    )
    kl_output_clamp_value: PositiveFloat | None = Field(
        10.0, description="bound of the KL of a token; null: none"
    )
    use_kl_in_reward: bool = Field(False, description="the KL goes into the reward and not into the loss")
    use_importance_sampling_correction: bool = Field(
        False, description="weigh the actor term by exp(trainer - engine log-prob)"
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(
        None,
        description="tis: clamp the weight; icepop: drop tokens, seq-mask-tis: sequences outside the bounds",
    )
    truncated_importance_sampling_ratio: PositiveFloat | None = Field(
        None, description="upper bound of the weight"
    )
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = Field(
        None, description="lower bound of the weight"
    )
    use_on_policy_kl_approximation: bool | None = Field(
        None,
        description="weigh the KL by current over engine probability; null: as grpo.async_grpo.enabled, so false",
    )

    @model_validator(mode="after")
    def _valid_combination(self) -> ClippedPGLossConfig:
        self._check_cispo()
        self._check_ratios()
        self._check_truncation()
        if self.use_kl_in_reward and self.reference_policy_kl_penalty == 0:
            raise ValueError(
                "use_kl_in_reward is true and reference_policy_kl_penalty is 0, which leaves no KL to put there; "
                "give it a coefficient, or set use_kl_in_reward to false"
            )
        return self

    def _check_cispo(self) -> None:
        if not self.use_cispo:
            return
        conflicts = {
            "ratio_clip_c": self.ratio_clip_c is not None,
            "disable_ppo_ratio": self.disable_ppo_ratio,
            "force_on_policy_ratio": self.force_on_policy_ratio,
            "sequence_level_importance_ratios": self.sequence_level_importance_ratios,
            "token_level_loss": not self.token_level_loss,
        }
        for key, conflicting in conflicts.items():
            if conflicting:
                default = type(self).model_fields[key].default
                raise ValueError(
                    f"use_cispo is true and {key} is {getattr(self, key)}: CISPO is token level and has its own "
                    f"surrogate; set {key} to {default} or use_cispo to false"
                )

    def _check_ratios(self) -> None:
        if self.force_on_policy_ratio and self.disable_ppo_ratio:
            raise ValueError(
                "force_on_policy_ratio and disable_ppo_ratio are both true; set one of them to false "
                "(the first keeps a ratio of value 1, the second has none)"
            )
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise ValueError(
                "sequence_level_importance_ratios is true and token_level_loss is true; "
                "GSPO needs token_level_loss: false"
            )

    def _check_truncation(self) -> None:
        kind = self.truncated_importance_sampling_type
        ratio = self.truncated_importance_sampling_ratio
        low = self.truncated_importance_sampling_ratio_min
        if kind is None:
            for key in ("truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"):
                if getattr(self, key) is not None:
                    raise ValueError(
                        f"{key} is {getattr(self, key)} but truncated_importance_sampling_type is null; set the "
                        "type (tis, icepop or seq-mask-tis) or remove the ratio"
                    )
            return
        if not self.use_importance_sampling_correction:
            raise ValueError(
                f"truncated_importance_sampling_type is {kind} but use_importance_sampling_correction is false; "
                "set the latter to true or the type to null"
            )
        if ratio is None:
            raise ValueError(
                f"truncated_importance_sampling_type is {kind} but truncated_importance_sampling_ratio is null; "
                "give the upper bound of the weight, for example 2.0"
            )
        if kind != "tis" and low is None:
            raise ValueError(
                f"truncated_importance_sampling_type is {kind}, which needs "
                "truncated_importance_sampling_ratio_min (null now); give the lower bound, for example 0.5"
            )
        if low is not None and low > ratio:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min {low} is above truncated_importance_sampling_ratio "
                f"{ratio}; lower the first or raise the second"
            )
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            raise ValueError(
                "truncated_importance_sampling_type is seq-mask-tis and sequence_level_importance_ratios is true; "
                "use tis or icepop with sequence-level ratios, or token-level ratios"
            )
