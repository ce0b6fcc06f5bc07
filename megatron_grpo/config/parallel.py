"""Parallel layout of the policy: Megatron's factors and the rules between them."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from megatron_grpo.config.base import Config


class ParallelConfig(Config):
    """How the policy is laid out. The data-parallel size follows from the world size.

    Keys are Megatron-LM's: world size = TP x PP x CP x DP, and for experts ETP x EP x PP x expert-DP.
    """

    tensor_model_parallel_size: PositiveInt = Field(1, description="TP")
    pipeline_model_parallel_size: PositiveInt = Field(1, description="PP")
    virtual_pipeline_model_parallel_size: PositiveInt | None = Field(
        None, description="VPP, model chunks per pipeline stage; needs pipeline_model_parallel_size > 1"
    )
    context_parallel_size: PositiveInt = Field(1, description="CP")
    expert_model_parallel_size: PositiveInt = Field(
        1,
        description="EP; a divisor of the number of experts. Its ranks may lie in several data-parallel replicas",
    )
    expert_tensor_parallel_size: PositiveInt | None = Field(
        None, description="ETP; null: as tensor_model_parallel_size"
    )
    sequence_parallel: bool = Field(
        False, description="SP; needs tensor_model_parallel_size > 1, where models with experts need it"
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica: TP x PP x CP."""
        return (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    @property
    def sequence_multiple(self) -> int:
        """Sequences are padded to a multiple of this: 2 x CP chunks, and TP equal parts under SP."""
        chunks = 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
        return chunks * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    def group_sizes(self) -> dict[str, Any]:
        """The arguments of ``parallel.layout.initialize_layout``."""
        return {key: value for key, value in self if key != "sequence_parallel"}

    def data_parallel_size(self, world_size: int) -> int:
        """DP size for a world of ``world_size`` ranks.

        Raises:
            ValueError: the world is not a multiple of TP x PP x CP, or experts do not divide it.
        """
        tp, pp, cp = (
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.context_parallel_size,
        )
        if world_size % self.model_parallel_size:
            raise ValueError(
                f"policy.parallel: world size {world_size} is not a multiple of TP {tp} x PP {pp} x CP {cp} = "
                f"{self.model_parallel_size}; start {self.model_parallel_size} ranks (or a multiple), or "
                "change the layout"
            )
        etp, ep = self.expert_tensor_parallel_size or tp, self.expert_model_parallel_size
        if world_size % (etp * ep * pp):
            raise ValueError(
                f"policy.parallel: world size {world_size} is not a multiple of expert-TP {etp} x EP {ep} x PP {pp} "
                f"= {etp * ep * pp}; start {math.lcm(etp * ep * pp, self.model_parallel_size)} ranks (or a "
                "multiple), or change the layout"
            )
        return world_size // self.model_parallel_size

    @field_validator("virtual_pipeline_model_parallel_size")
    @classmethod
    def _one_chunk_is_none(cls, value: int | None) -> int | None:
        """Megatron takes 1 for an interleaved schedule."""
        return None if value == 1 else value

    @model_validator(mode="after")
    def _factors_agree(self) -> ParallelConfig:
        vpp = self.virtual_pipeline_model_parallel_size
        if vpp is not None and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                f"virtual_pipeline_model_parallel_size is {vpp} but pipeline_model_parallel_size is 1; "
                "raise the latter to at least 2 or remove the former"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel is true but tensor_model_parallel_size is 1; "
                "set sequence_parallel to false, or tensor_model_parallel_size to 2 or more"
            )
        return self
