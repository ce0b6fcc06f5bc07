"""Configuration: pydantic models with ``extra="forbid"``; imports neither torch nor anything of ours."""

from megatron_grpo.config.data import DataConfig, DatasetConfig, EnvConfig
from megatron_grpo.config.generation import GenerationConfig, VLLMConfig
from megatron_grpo.config.grpo import AdvEstimatorConfig, AsyncGRPOConfig, GRPOConfig
from megatron_grpo.config.loader import ConfigError, load_config, save_config
from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.config.parallel import ParallelConfig
from megatron_grpo.config.policy import OptimizerConfig, PolicyConfig, SchedulerConfig
from megatron_grpo.config.run import CheckpointingConfig, LoggerConfig, RunConfig

__all__ = [
    "AdvEstimatorConfig",
    "AsyncGRPOConfig",
    "CheckpointingConfig",
    "ClippedPGLossConfig",
    "ConfigError",
    "DataConfig",
    "DatasetConfig",
    "EnvConfig",
    "GRPOConfig",
    "GenerationConfig",
    "LoggerConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PolicyConfig",
    "RunConfig",
    "SchedulerConfig",
    "VLLMConfig",
    "load_config",
    "save_config",
]
