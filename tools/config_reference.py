"""Write docs/config.md from the configuration models; with ``--check``, only say whether it is up to date."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_grpo.config import RunConfig
from megatron_grpo.config.base import Config

OUTPUT = Path(__file__).parent.parent / "docs" / "config.md"

PREFACE = """\
# Configuration

Written by `tools/config_reference.py` from the models in `megatron_grpo/config/`; do not edit it by hand.

A run is described by one YAML file, checked as a whole before any process starts. An unknown key is an error that
names the nearest valid one; so is a combination of values that cannot work. `megatron-grpo plan --config FILE
--world-size N` runs all checks and starts nothing; `--show` also prints every value, defaults included. Each
run writes what it used to `<run_dir>/config.yaml`, which can be given to `--config` again.

**Overrides.** Arguments of the form `section.key=value` change single values, in order, the last one wins:

```
launch/torchrun.sh --config configs/quickstart.yaml --nproc-per-node 2 grpo.seed=1 policy.optimizer.lr=1e-5
```

A value is read as YAML: `null`, `true`, `[a, b]`, `{x: 1}`. Missing sections are made. A list or mapping is
replaced as a whole (`data.train.task_args={min_terms: 2}`), or one key of a mapping by its path
(`data.train.task_args.min_terms=2`). Quote a value in the shell when it holds spaces, brackets or braces.
`1e-5` is a number here, also without a decimal point.

**Environment variables.** No setting of a run comes from the environment. What is read:

| variable | read by | meaning |
|---|---|---|
| `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` | trainer ranks | set by torchrun (or by you under \
plain srun); without `MASTER_ADDR` the process is a run of one rank |
| `TORCHELASTIC_RUN_ID` | trainer ranks | set by torchrun: its SIGTERM and its end are then the end of the rank |
| `CUDA_VISIBLE_DEVICES` | trainer ranks, engines | as set by the scheduler; an engine gets the one GPU of its owner |
| `OMP_NUM_THREADS` | trainer ranks | CPU threads of each rank; `launch/torchrun.sh` sets 1 if it is not set. \
Engines on a CPU take `generation.vllm.cpu_threads`, environment workers 1 |
| `MEGATRON_GRPO_PYTHON` | `launch/torchrun.sh` | interpreter to use instead of `.venv/bin/python` |
| `SLURM_*` | `launch/slurm.sbatch` | the allocation: nodes, GPUs per node, job id, submit directory |
| `PYTHON`, `PYENV_ROOT` | `make setup`, `make gpu-env` | the Python 3.12 to use, and where pyenv keeps its versions |
| `MEGATRON_GRPO_ENGINE_KEY` | engines | the key of the run, made and passed on by the owner of the engine; never \
set it yourself |
"""


def main() -> None:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if the page is out of date")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    text = render()
    if not args.check:
        args.output.write_text(text)
    elif not args.output.is_file() or args.output.read_text() != text:
        sys.exit(f"{args.output} is out of date; run: python tools/config_reference.py")


def render() -> str:
    """The whole page."""
    parts = [PREFACE]
    for model, paths in _sections(RunConfig).items():
        title = " and ".join(f"`{path}`" for path in paths if path) or "Top level"
        rows = [_row(name, field) for name, field in model.model_fields.items()]
        doc = " ".join((model.__doc__ or "").split()).replace("``", "`")
        parts.append(f"\n## {title}\n\n{doc}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
        parts += [f"{row}\n" for row in rows]
    return "".join(parts)


def _sections(root: type[Config]) -> dict[type[Config], list[str]]:
    """Every model of the tree with the paths where it stands, in the order of the keys."""
    found: dict[type[Config], list[str]] = {}

    def visit(model: type[Config], path: str) -> None:
        found.setdefault(model, []).append(path)
        for name, field in model.model_fields.items():
            for child in _models(field):
                visit(child, f"{path}.{name}".lstrip("."))

    visit(root, "")
    return found


def _models(field: FieldInfo) -> list[type[Config]]:
    candidates = [field.annotation, *get_args(field.annotation)]
    return [c for c in candidates if isinstance(c, type) and issubclass(c, Config)]


def _row(name: str, field: FieldInfo) -> str:
    if models := _models(field):
        kind, meaning = "section", (models[0].__doc__ or "").splitlines()[0].replace("``", "`")
    else:
        kind, meaning = _type(field.annotation, field.metadata), field.description or ""
    return f"| `{name}` | {kind} | {_default(field.default)} | {meaning} |"


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, Config):
        return "its defaults"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _type(annotation: Any, bounds: Iterable[Any] = ()) -> str:
    """The accepted values in words, for example ``int > 0 or null``."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0], [*args[1:], *bounds])
    if origin in (Union, UnionType):
        *first, last = (_type(arg, bounds if arg is not NoneType else ()) for arg in args)
        return f"{', '.join(first)} or {last}"
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is tuple:
        return f"list of {_type(args[0])}"
    if origin is dict:
        return "mapping"
    name = {NoneType: "null", Path: "path", str: "text"}.get(annotation, annotation.__name__)
    limits = [
        *_limit(bounds, max, {"> ": "gt", ">= ": "ge"}),
        *_limit(bounds, min, {"< ": "lt", "<= ": "le"}),
    ]
    return f"{name} {' and '.join(limits)}".rstrip()


def _limit(
    bounds: Iterable[Any], tightest: Callable[..., tuple[float, str]], signs: dict[str, str]
) -> list[str]:
    found = [(getattr(b, name), sign) for b in bounds for sign, name in signs.items() if hasattr(b, name)]
    if not found:
        return []
    value, sign = tightest(found)
    return [f"{sign}{value}" if isinstance(value, int) else f"{sign}{value:g}"]


if __name__ == "__main__":
    main()
