"""GRPO post-training on megatron-core policies with vLLM rollouts."""

__version__ = "0.1.0"
