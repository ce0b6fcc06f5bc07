"""``generation``: sampling parameters and the vLLM engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from megatron_grpo.config.base import Config

# What rollout/engine_process.py gives to vLLM's api_server and nobody else may, and what would undo it.
OWN_ARGUMENTS = frozenset(
    f"--{name}"
    for name in (
        "model", "served-model-name", "uds", "host", "port", "api-key", "middleware", "weight-transfer-config",
        "worker-extension-cls", "logprobs-mode", "generation-config", "override-generation-config", "max-model-len",
        "max-num-seqs", "dtype", "seed", "enable-scale-out", "disable-uvicorn-access-log", "gpu-memory-utilization",
        "enforce-eager", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "config",
    )
)  # fmt: skip

LOWEST_TEMPERATURE = 0.01  # that vLLM samples at


class VLLMConfig(Config):
    """How engines are started and watched. GPU-only keys are ignored by vLLM's CPU build."""

    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="auto: that of policy.precision, so that both sides compute alike"
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs; the CPU build never has them")
    max_num_seqs: PositiveInt = Field(256, description="sequences that one engine decodes at a time")
    gpu_memory_utilization: float = Field(
        0.6, gt=0, le=1, description="share of the memory of its GPU that an engine takes"
    )
    cpu_kvcache_gib: PositiveInt = Field(1, description="key-value cache of an engine on a CPU, GiB")
    cpu_threads: PositiveInt = Field(1, description="OpenMP threads of an engine on a CPU")
    startup_timeout_s: PositiveFloat = Field(
        600, description="deadline from the start of a server to its first answer"
    )
    request_timeout_s: PositiveFloat = Field(600, description="deadline of one prompt's group")
    extra_args: tuple[str, ...] = Field(
        (), description="further arguments of vLLM's api_server, none that the engine process sets"
    )

    @model_validator(mode="after")
    def _own_arguments_stay(self) -> VLLMConfig:
        for argument in self.extra_args:
            name = argument.split("=", 1)[0].replace("_", "-")
            # argparse also takes the beginning of a name
            if own := [own for own in OWN_ARGUMENTS if len(name) > 2 and own.startswith(name)]:
                raise ValueError(
                    f"extra_args has {argument}: {min(own)} belongs to the engine process; another value would change "
                    "its log-probs, weights or protection without an error. Remove it, or set the key of this section"
                )
        return self

    def resolved(self, precision: str) -> VLLMConfig:
        """With ``dtype`` auto replaced by that of ``policy.precision``."""
        dtype = {"bf16": "bfloat16", "fp32": "float32"}[precision] if self.dtype == "auto" else self.dtype
        return self.model_copy(update={"dtype": dtype})


class GenerationConfig(Config):
    """What is asked of the engines for a training rollout."""

    max_new_tokens: PositiveInt = Field(description="a response ends here unless an end token comes first")
    temperature: NonNegativeFloat = Field(
        1.0, description="above 0; also divides the logits of the policy's log-probs"
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="must be 1: the policy is trained on the whole distribution"
    )
    top_k: int = Field(-1, description="must be -1, for the same reason")
    vllm: VLLMConfig = VLLMConfig()

    @model_validator(mode="after")
    def _trainable_sampling(self) -> GenerationConfig:
        if self.temperature == 0:
            raise ValueError(
                "temperature is 0: greedy rollouts of a group are identical and have no advantage; use a value "
                "above 0, for example 1.0 (evaluation is greedy in any case)"
            )
        if self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature:g}: vLLM samples at {LOWEST_TEMPERATURE} instead, and the policy's "
                f"log-probs would be of another distribution; use at least {LOWEST_TEMPERATURE}"
            )
        for key, value, off in (("top_p", self.top_p, 1.0), ("top_k", self.top_k, -1)):
            if value != off:
                raise ValueError(
                    f"{key} is {value}: the engine would sample from a truncated distribution while the policy's "
                    f"log-probs are over the whole vocabulary, which biases every ratio; set {key} to {off}"
                )
        return self
