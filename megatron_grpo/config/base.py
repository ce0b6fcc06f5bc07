"""The base of every configuration model: unknown keys are errors that name the nearest valid key."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Config(BaseModel):
    """Immutable, closed configuration model of finite values, which are validated when the object is built."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _name_nearest_key(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key in values:
                if key not in cls.model_fields:
                    near = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.5)
                    hint = (
                        f"did you mean '{near[0]}'?" if near else f"valid keys: {', '.join(cls.model_fields)}"
                    )
                    raise ValueError(f"unknown key '{key}'; {hint}")
        return values
