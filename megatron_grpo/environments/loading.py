"""From ``env`` in the configuration to an environment object: built in, or a user's class by import path."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys

from megatron_grpo.config import EnvConfig
from megatron_grpo.environments.base import Environment


def load_environment(config: EnvConfig) -> Environment:
    """Build the environment; modules in the current directory can be imported.

    Raises:
        ValueError: names ``env.class_path`` or ``env.args``, the value and the mend. What the user's own
            module or constructor raises passes through.
    """
    if config.class_path is None:
        # Here, so that a custom environment does not wait seconds for reasoning-gym's imports.
        from megatron_grpo.environments.reasoning_gym import ReasoningGymEnvironment

        factory: type[Environment] = ReasoningGymEnvironment
    else:
        factory = _import(config.class_path)
    try:
        inspect.signature(factory).bind(**config.args)
    except TypeError as error:
        raise ValueError(
            f"env.args {config.args} do not fit {factory.__name__}{inspect.signature(factory)}: {error}"
        ) from None
    return factory(**config.args)


def _import(class_path: str) -> type[Environment]:
    module_name, separator, class_name = class_path.partition(":")
    if not separator or not module_name or not class_name:
        raise ValueError(
            f"env.class_path '{class_path}' is not of the form package.module:ClassName, "
            "for example my_package.rewards:MyEnvironment"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module was found and one of its own imports was not
        raise ValueError(
            f"env.class_path '{class_path}': there is no module '{error.name}'; install it, or start "
            f"the run in the directory that holds it (now {os.getcwd()})"
        ) from None
    factory = getattr(module, class_name, None)
    if factory is None:
        near = difflib.get_close_matches(class_name, vars(module), n=1)
        hint = f"did you mean '{near[0]}'?" if near else "check the class's name"
        raise ValueError(
            f"env.class_path '{class_path}': {module.__file__} has no attribute '{class_name}'; {hint}"
        )
    if not isinstance(factory, type) or not callable(getattr(factory, "step", None)):
        raise ValueError(
            f"env.class_path '{class_path}' is not a class with a method step(self, group); "
            "see the Environment protocol in megatron_grpo/environments/base.py"
        )
    return factory
