"""Times the fused output layer + log-prob against megatron-core's and torch's, forward and backward.

    python tools/bench/logprob.py --tokens 1024 --hidden 256 --vocab 151936 --dtype float32 --tp 1 2

Each variant lives in processes of its own (one per tensor-parallel rank, gloo, one thread each) and computes
log-probs of random labels and the gradients of hidden states and output weight. The variants take turns, so that
other work on the machine meets all of them alike.

CPU s
    Process CPU time of forward and backward, all threads, summed over ranks: median over the rounds.
ratio
    CPU time over megatron-core's in the same round (``linear_with_grad_accumulation_and_async_allreduce`` and
    ``vocab_parallel_cross_entropy``, unmasked): median over the rounds.
of unmasked
    CPU time of a masked variant over that of the same variant without a mask, in the same round: median.
peak MiB
    High-water mark of resident memory (``VmHWM``, reset through ``clear_refs`` before each call) over resident
    memory before the call, less the bytes of the two gradients: largest over rounds and ranks. Library code and
    per-thread buffers that a call on a few tokens loads are already resident; everything else counts, also
    what BLAS allocates. A peak before the gradients exist is flattered by their bytes: megatron-core's in bf16,
    never the fused one. Linux only.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MEGATRON = "megatron-core"
MIB = 2**20


def _variant(name: str, chunk: int | None, masked: float, vocab: int) -> Callable[..., Tensor]:
    """``fn(hidden, weight, labels, mask) -> log-probs`` on this rank."""
    group = dist.group.WORLD
    if name == "torch":
        if dist.get_world_size() > 1:
            raise ValueError("the torch variant is not vocab-parallel; use it with --tp 1")

        def log_softmax(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
            logprobs = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
            return logprobs.gather(1, labels.unsqueeze(1)).squeeze(1)

        return log_softmax
    if name == MEGATRON:
        from megatron_grpo.parallel import platform

        platform.install()
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

        def megatron(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
            logits = linear_with_grad_accumulation_and_async_allreduce(
                hidden, weight, None, False, dist.get_world_size() > 1, False, tp_group=group
            )
            return -vocab_parallel_cross_entropy(logits, labels, tp_group=group)

        return megatron

    from megatron_grpo.parallel.fused_logprobs import fused_linear_logprobs, masked_linear_logprobs

    options = {"vocab_chunk": chunk, "with_entropy": name == "fused + entropy"}

    def fused(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        if masked:
            return masked_linear_logprobs(hidden, weight, labels, mask, group, 1.0, vocab, **options)[0]
        return fused_linear_logprobs(hidden, weight, labels, group, 1.0, vocab, **options)[0]

    return fused


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: resident memory can only be measured on Linux")


def _measure(fn: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[float, int]:
    """CPU seconds and peak bytes beyond the two gradients."""
    hidden, weight = (x.detach().requires_grad_() for x in inputs[:2])
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _resident("VmRSS"), time.process_time()
    logprobs = fn(hidden, weight, *inputs[2:])
    logprobs.sum().backward()
    seconds, peak = time.process_time() - start, _resident("VmHWM") - before
    return seconds, peak - sum(x.numel() * x.element_size() for x in (hidden, weight))


def _serve(
    conn: Connection, rank: int, tp: int, store: str, variant: tuple[Any, ...], inputs: list[Tensor]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp)
    fn = _variant(*variant)
    hidden, weight, labels, mask = inputs
    inputs[1] = weight = weight.chunk(tp)[rank]
    weight.sum()  # shared pages become resident in this process before anything is measured
    few = slice(0, 8)
    _measure(fn, [hidden[few], weight, labels[few], torch.ones_like(mask[few])])
    conn.send("ready")
    while conn.recv():
        dist.barrier()
        conn.send(_measure(fn, inputs))
    dist.destroy_process_group()


class _Ranks:
    """The processes of one variant."""

    def __init__(
        self, label: str, tp: int, variant: tuple[Any, ...], inputs: list[Tensor], folder: str
    ) -> None:
        self.label = label
        self.variant = variant
        self.seconds: list[float] = []
        self.peak = 0
        context = mp.get_context("spawn")
        store = os.path.join(folder, f"{tp} {label}".replace(" ", "_"))
        pipes = [context.Pipe() for _ in range(tp)]
        self._conns = [here for here, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(there, rank, tp, store, variant, inputs), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, there in pipes:
            there.close()
        for conn in self._conns:
            conn.recv()

    def run(self) -> None:
        for conn in self._conns:
            conn.send(True)
        results = [conn.recv() for conn in self._conns]
        self.seconds.append(sum(seconds for seconds, _ in results))
        self.peak = max(self.peak, *(peak for _, peak in results))

    def over(self, other: _Ranks) -> float:
        """CPU time over that of another variant in the same round: median over the rounds."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))

    def close(self) -> None:
        for conn in self._conns:
            conn.send(False)
        for process in self._processes:
            process.join()


def _run(args: argparse.Namespace, tp: int, dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(args.tokens, args.hidden, generator=generator).to(getattr(torch, dtype)),
        (torch.randn(args.vocab, args.hidden, generator=generator) / args.hidden**0.5).to(
            getattr(torch, dtype)
        ),
        torch.randint(0, args.vocab, (args.tokens,), generator=generator),
    ]
    scores = torch.rand(args.tokens, generator=generator)
    variants: list[tuple[str, tuple[Any, ...]]] = [(MEGATRON, (MEGATRON, None, 0.0, args.vocab))]
    if tp == 1:
        variants.append(("torch log_softmax", ("torch", None, 0.0, args.vocab)))
    for chunk in args.chunks or [None]:
        size = f" {chunk}" if chunk else ""
        variants.append((f"fused{size}", ("fused", chunk, 0.0, args.vocab)))
        if args.entropy:
            variants.append((f"fused + entropy{size}", ("fused + entropy", chunk, 0.0, args.vocab)))
        for masked in args.masked:
            variants.append((f"fused{size}, {masked:.0%} masked", ("fused", chunk, masked, args.vocab)))
    with tempfile.TemporaryDirectory() as folder:
        for x in inputs:
            x.share_memory_()
        ranks = []
        for label, variant in variants:
            mask = scores.argsort().argsort() >= round(variant[2] * args.tokens)
            ranks.append(_Ranks(label, tp, variant, [*inputs, mask], folder))
        for _ in range(args.rounds):
            for r in ranks:
                r.run()
        for r in ranks:
            r.close()
    shape = f"{args.tokens} x {args.hidden} x {args.vocab}"
    for r in ranks:
        name, chunk, masked, vocab = r.variant
        unmasked = next(other for other in ranks if other.variant == (name, chunk, 0.0, vocab))
        times = f"{statistics.median(r.seconds):.2f} | {r.over(ranks[0]):.2f}"
        of_unmasked = f"{r.over(unmasked):.2f}" if masked else ""
        sys.stdout.write(
            f"| {shape} | {dtype} | {tp} | {r.label} | {times} | {of_unmasked} | {r.peak / MIB:.0f} |\n"
        )
    sys.stdout.flush()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--tp", nargs="+", type=int, default=[1])
    parser.add_argument(
        "--chunks", nargs="*", type=int, help="columns of a tile; default: the library's choice"
    )
    parser.add_argument(
        "--masked", nargs="*", type=float, default=[0.6], help="fractions of positions without a loss"
    )
    parser.add_argument("--entropy", action="store_true", help="also with the entropy")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    sys.stdout.write(
        "| tokens x hidden x vocabulary | dtype | TP | variant | CPU s | ratio | of unmasked | peak MiB |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    for dtype in args.dtype:
        for tp in args.tp:
            _run(args, tp, dtype)


if __name__ == "__main__":
    main()
