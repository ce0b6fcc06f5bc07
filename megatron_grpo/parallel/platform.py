"""The CPU platform: unmodified megatron-core on machines without CUDA, over gloo.

megatron-core addresses "the current CUDA device" in many places. Without a GPU, :func:`install` maps that
device onto the CPU by replacing functions of ``torch`` only; no file of Megatron is touched. With a GPU it
does nothing. It must run before the first ``import megatron.core``, and only in training processes:
vLLM servers are never patched. Streams and events become no-ops, so a CPU run cannot show overlap races.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "randn", "rand", "zeros_like",
    "ones_like", "empty_like", "full_like", "randint", "eye", "linspace",
)  # fmt: skip
_installed = False


def is_cpu() -> bool:
    """Whether this process trains on the CPU platform."""
    return not torch.cuda.is_available() or _installed


def device() -> torch.device:
    """The device of this rank's tensors."""
    return _CPU if is_cpu() else torch.device("cuda", torch.cuda.current_device())


def distributed_backend() -> str:
    """``gloo`` without CUDA; with it, NCCL for device tensors and gloo for host tensors."""
    return "gloo" if is_cpu() else "cpu:gloo,cuda:nccl"


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 0.0


class _Stream:
    """The one logical stream of a CPU."""

    device = _CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _StreamContext:
    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> _StreamContext:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _AnyIndex:
    """``torch.cuda.default_generators[i]`` is the CPU generator, whatever ``i`` is."""

    def __getitem__(self, _: Any) -> torch.Generator:
        return torch.default_generator


def _names_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def inner(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return inner


def _constant(value: Any) -> Callable[..., Any]:
    # a new function object per name: torch._dynamo refuses one object registered under two rules
    return lambda *_args, **_kwargs: value


def install() -> None:
    """Map CUDA onto the CPU when there is no CUDA; safe to call again.

    Raises:
        RuntimeError: ``megatron.core`` was imported before.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("platform.install() must run before the first import of megatron.core")
    _installed = True
    _patch_cuda_namespace()
    _patch_devices()
    _patch_collectives()
    # megatron.core.jit compiles at import: on a CPU that costs a C++ compiler and up to a minute a process
    torch.compile = lambda model=None, **_: model if model is not None else (lambda f: f)  # type: ignore
    _repair_torch_adamw_in_distributed_optimizer()


def _patch_cuda_namespace() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, _constant(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, _constant(0))
    stream = _Stream()
    cuda.Stream, cuda.Event, cuda.stream = _Stream, _Event, _StreamContext
    cuda.current_stream, cuda.default_stream = _constant(stream), _constant(stream)
    cuda.is_current_stream_capturing = _constant(False)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _constant(None), _constant(None)
    # random state: the "CUDA generator" is the CPU generator
    generator = torch.default_generator
    for namespace in (cuda, cuda.random):
        namespace.manual_seed = lambda seed: generator.manual_seed(int(seed))
        namespace.manual_seed_all = lambda seed: generator.manual_seed(int(seed))
        namespace.get_rng_state = lambda device=None: generator.get_state()
        namespace.set_rng_state = lambda state, device=None: generator.set_state(state)
    cuda.default_generators = _AnyIndex()
    cuda._lazy_call = lambda callback, **_: callback()
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in str(record.msg)
    )


def _patch_devices() -> None:
    t: Any = torch
    # torch lists its factories on first use: listed after the replacement, `with torch.device("meta")`, which
    # transformers loads models under, would silently do nothing
    _device_constructors()
    for name in _FACTORIES:
        setattr(t, name, _on_cpu(getattr(t, name)))
    t.Tensor.record_stream = _constant(None)
    t.Tensor.cuda = lambda self, *_, **__: self
    t.Tensor.pin_memory = lambda self, *_, **__: self
    t.nn.Module.cuda = lambda self, *_, **__: self
    original_to = t.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _names_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        result: torch.Tensor = original_to(self, *args, **kwargs)
        return result

    t.Tensor.to = to
    original_type = t.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # megatron.core.optimizer compares type() with 'torch.cuda.FloatTensor' and its kin
        out = original_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(out, str) and out.startswith("torch.") and caller.startswith("megatron.core.optimizer"):
            return "torch.cuda." + out.removeprefix("torch.")
        return out

    t.Tensor.type = type_


def _patch_collectives() -> None:
    """What NCCL accepts and gloo does not: device ids in a barrier, tensors as split sizes, uneven lists."""
    d: Any = dist
    barrier, all_to_all_single = d.barrier, d.all_to_all_single
    all_gather, reduce_scatter = d.all_gather, d.reduce_scatter

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if torch.is_tensor(sizes) else sizes

    def uneven_all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None,
                          async_op: bool = False) -> Any:  # fmt: skip
        if async_op or len({x.shape for x in outputs}) == 1:
            return all_gather(outputs, tensor, group=group, async_op=async_op)
        for index, output in enumerate(outputs):
            if index == d.get_rank(group):
                output.copy_(tensor)
            d.broadcast(output, group=group, group_src=index)
        return None

    def uneven_reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], op: Any = d.ReduceOp.SUM,
                              group: Any = None, async_op: bool = False) -> Any:  # fmt: skip
        if async_op or len({x.shape for x in inputs}) == 1:
            return reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
        flat = torch.cat([x.reshape(-1) for x in inputs])
        d.all_reduce(flat, op=op, group=group)
        mine = torch.split(flat, [x.numel() for x in inputs])[d.get_rank(group)]
        output.copy_(mine.view(output.shape))
        return None

    d.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    d.all_to_all_single = lambda output, input, output_split_sizes=None, input_split_sizes=None, *a, **k: (
        all_to_all_single(output, input, as_list(output_split_sizes), as_list(input_split_sizes), *a, **k)
    )
    d.all_gather, d.reduce_scatter = uneven_all_gather, uneven_reduce_scatter


def _repair_torch_adamw_in_distributed_optimizer() -> None:
    """torch's AdamW, Megatron's fallback without TE and Apex, keeps a ``step`` per parameter.

    The checkpoint loader does not expect it, and after a load every parameter shared one step tensor, so
    that each in-place increment counted once per parameter and the bias correction was silently wrong.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_state = DistributedOptimizer._set_main_param_and_optimizer_states
    load = DistributedOptimizer.load_state_dict

    def set_state_with_step(self: Any, param: Any, tensors: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        group, order = self.model_param_group_index_map[param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        return set_state(self, param, tensors, *args, **kwargs)

    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> Any:
        out = load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
        return out

    DistributedOptimizer._set_main_param_and_optimizer_states = set_state_with_step
    DistributedOptimizer.load_state_dict = load_with_own_steps
