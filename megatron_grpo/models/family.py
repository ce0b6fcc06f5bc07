"""What a model family provides: a :class:`ModelDescription` made from a Hugging Face ``config.json``.

A family is one file with one function ``describe(hf_config) -> ModelDescription``, entered in
``models/registry.py`` under its HF architecture name. The function refuses, by key and value, every
setting of the config that it does not carry over to Megatron. Describing a model does not import torch: ``plan``
answers in a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_grpo.models.hf_directory import HFConfig, HFDirectory
from megatron_grpo.models.weight_map import ParamMapping

if TYPE_CHECKING:
    from megatron_grpo.config.parallel import ParallelConfig
    from megatron_grpo.config.policy import PolicyConfig


@dataclass(frozen=True)
class ModelDescription:
    """One model: its sizes, its TransformerConfig and its weight map.

    Attributes:
        architecture: HF architecture name, such as ``Qwen3ForCausalLM``.
        vocab_size: rows of the HF embedding, without Megatron's padding.
        tied_embeddings: the output layer is the embedding; HF then stores no ``lm_head.weight``.
        rotary_base: theta of the rotary embedding.
        transformer_config_kwargs: the arguments of Megatron's TransformerConfig that the architecture sets;
            ``activation_func`` by its name in ``torch.nn.functional``.
        weight_map: makes the mappings of all parameters, in export order, from the padded vocabulary size.
        num_experts, moe_ffn_hidden_size: routed experts of a mixture-of-experts layer, and features of one.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    tied_embeddings: bool
    rotary_base: float
    transformer_config_kwargs: Mapping[str, Any]
    weight_map: Callable[[int], tuple[ParamMapping, ...]]
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the HF tensors, in export order."""
        mappings = self.weight_map(self.vocab_size)
        return {t.name: t.shape for mapping in mappings if not mapping.is_copy for t in mapping.hf}

    def check_tensors(self, directory: HFDirectory) -> None:
        """Check that the directory holds the tensors of this model, by name and shape.

        Raises:
            ModelDirectoryError: names missing, unknown and wrongly shaped tensors.
        """
        # some writers store the output layer of a tied model too; it equals the embedding
        directory.expect(self.hf_shapes(), ignore=("lm_head.weight",) if self.tied_embeddings else ())

    def check_policy(self, policy: PolicyConfig) -> None:
        """Check that the model can be trained this way.

        Raises:
            ValueError: names the key, the values and the mend.
        """
        self.check_layout(policy.parallel)
        for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            if (value := getattr(policy, key)) and self.num_experts is None:
                raise ValueError(
                    f"policy.{key} is {value} but {self.architecture} has no experts; set it to 0"
                )

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Check that the model can be cut this way.

        Raises:
            ValueError: names the key, the values and the factors that work.
        """
        pp = parallel.pipeline_model_parallel_size
        _check_divides(
            "tensor_model_parallel_size",
            parallel.tensor_model_parallel_size,
            {
                "attention heads": self.num_attention_heads,
                "query groups (num_key_value_heads)": self.num_query_groups,
                "MLP features (intermediate_size)": self.ffn_hidden_size,
            },
        )
        _check_divides("pipeline_model_parallel_size", pp, {"layers": self.num_layers})
        _check_divides(
            "virtual_pipeline_model_parallel_size",
            parallel.virtual_pipeline_model_parallel_size or 1,
            {"layers per pipeline stage": self.num_layers // pp},
        )
        ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
        if self.num_experts is None or self.moe_ffn_hidden_size is None:
            for key, value in (("expert_model_parallel_size", ep), ("expert_tensor_parallel_size", etp or 1)):
                if value > 1:
                    raise ValueError(
                        f"policy.parallel.{key} is {value} but {self.architecture} has no experts; set it to 1"
                    )
            return
        _check_divides("expert_model_parallel_size", ep, {"experts": self.num_experts})
        _check_divides(
            "expert_tensor_parallel_size",
            etp or parallel.tensor_model_parallel_size,
            {"expert MLP features (moe_intermediate_size)": self.moe_ffn_hidden_size},
        )
        if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
            raise ValueError(
                f"policy.parallel.tensor_model_parallel_size is {parallel.tensor_model_parallel_size} and "
                f"sequence_parallel is false; Megatron trains {self.architecture}'s experts with tensor parallelism "
                "only if tokens are cut too: set policy.parallel.sequence_parallel to true"
            )


def refuse_unsupported(hf_config: HFConfig, architecture: str, supported: Mapping[str, Any]) -> None:
    """Check the settings that a family handles with one value only; a key that is absent has that value.

    Raises:
        ValueError: names the key, its value and the value that is supported.
    """
    for key, value in supported.items():
        if hf_config.get(key, value) != value:
            raise ValueError(
                f"config.json: {key} is {hf_config[key]!r}; {architecture} is supported with {value!r} only"
            )


def require_sizes(hf_config: HFConfig, architecture: str, keys: Sequence[str]) -> None:
    """Raises ValueError, with the names and values, if keys are missing or no positive integers."""
    missing = [key for key in keys if key not in hf_config]
    if missing:
        raise ValueError(f"config.json: {', '.join(missing)} missing; {architecture} needs it")
    for key in keys:
        value = hf_config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config.json: {key} is {value!r}; it must be a positive integer")


def positive_number(key: str, value: Any) -> float:
    """``value`` of the key ``key`` of config.json.

    Raises:
        ValueError: it is missing, or not a positive finite number.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {key} is {value!r}; it must be a positive number")
    return float(value)


def rope_theta(hf_config: HFConfig) -> float:
    """Theta of the rotary embedding: under ``rope_parameters`` (transformers 5) or ``rope_theta`` (before).

    Raises:
        ValueError: a scaled rotary embedding, or no theta at all.
    """
    parameters = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"config.json: rope_parameters is {parameters!r}; it must be an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"config.json: rope_type is {kind!r}; only 'default' is supported. Remove the scaling from "
            "rope_parameters (or rope_scaling) if the model is trained inside its original context length"
        )
    theta = parameters.get("rope_theta", hf_config.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json: rope_theta is missing, and so is rope_parameters.rope_theta; add one")
    return positive_number("rope_theta", theta)


def _check_divides(key: str, factor: int, counts: Mapping[str, int]) -> None:
    for what, count in counts.items():
        if count % factor:
            common = math.gcd(*counts.values())
            factors = [f for f in range(1, common + 1) if common % f == 0]
            nearest = [f for f in factors if f < factor][-1:] + [f for f in factors if f > factor][:1]
            raise ValueError(
                f"policy.parallel.{key} {factor} does not divide the model's {count} {what}; "
                f"use {' or '.join(map(str, nearest))}"
            )
