"""The differential test of the loss: generated cases, and ``make differential``, which runs them all.

    python -m tests.distributed.differential [--precision fp64 fp32] [--layout tp2_sp] [--case NAME] [--seed 0]

A case is a layout, a cut into micro-batches, a loss and a batch; its name holds all of them. What is compared, and
with what, is in ``megatron_grpo/training/differential.py``.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.config.loss import ClippedPGLossConfig
from megatron_grpo.config.parallel import ParallelConfig
from megatron_grpo.config.policy import PolicyConfig
from tests.rank_pool import RankPool

if TYPE_CHECKING:
    from megatron_grpo.parallel.layout import ParallelLayout

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
SMALLEST_GRADIENT = {
    "fp64": 0.0,
    "fp32": 0.01,
}  # one in a thousand of the largest has 4 digits left in float32
CASES_PER_LAYOUT = 7
TIMEOUT_S = 120.0

TP2, TP4 = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 4}
SP = {"sequence_parallel": True}
PP2, PP4 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
CP2, CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
EP2, ETP1 = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}
# ranks and factors; DP is what is left
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, TP2),
    "tp2_sp": (2, TP2 | SP),
    "pp2": (2, PP2),
    "vpp2": (2, VPP2),
    "cp2": (2, CP2),
    "dp2": (2, {}),
    "tp4_sp": (4, TP4 | SP),
    "pp4": (4, PP4),
    "cp4": (4, CP4),
    "dp4": (4, {}),
    "tp2_sp_pp2": (4, TP2 | SP | PP2),
    "tp2_cp2": (4, TP2 | CP2),
    "tp2_sp_cp2": (4, TP2 | SP | CP2),
    "tp2_sp_dp2": (4, TP2 | SP),
    "tp2_sp_vpp2": (4, TP2 | SP | VPP2),
    "pp2_cp2": (4, PP2 | CP2),
    "pp2_dp2": (4, PP2),
    "vpp2_cp2": (4, VPP2 | CP2),
    "vpp2_dp2": (4, VPP2),
    "cp2_dp2": (4, CP2),
    "tp4_dp2": (8, TP4),
    "tp2_sp_pp2_cp2": (8, TP2 | SP | PP2 | CP2),
    "tp2_pp2_dp2": (8, TP2 | PP2),
    "tp2_sp_cp2_dp2": (8, TP2 | SP | CP2),
    "tp2_sp_vpp2_dp2": (8, TP2 | SP | VPP2),
    "vpp2_cp2_dp2": (8, VPP2 | CP2),
    "pp4_dp2": (8, PP4),
    "cp4_dp2": (8, CP4),
    "dp8": (8, {}),
    # a model with experts, one layer dense
    "moe": (1, {}),
    "moe_ep2": (2, EP2),
    "moe_cp2": (2, CP2),
    "moe_tp2_sp_etp1": (2, TP2 | SP | ETP1),
    "moe_tp2_sp_ep2": (4, TP2 | SP | EP2),
    "moe_tp2_sp_ep2_etp1": (2, TP2 | SP | EP2 | ETP1),
    "moe_vpp2_ep2": (4, VPP2 | EP2),
    "moe_cp2_ep2": (2, CP2 | EP2),
    "moe_ep2_dp4": (4, EP2),
    "moe_ep4_cp2": (4, CP2 | {"expert_model_parallel_size": 4}),
    "moe_tp2_sp_pp2_ep2": (8, TP2 | SP | PP2 | EP2),
    "moe_tp2_sp_cp2_ep4_etp1": (8, TP2 | SP | CP2 | ETP1 | {"expert_model_parallel_size": 4}),
}

IS = {"use_importance_sampling_correction": True}
SEQUENCE = {"token_level_loss": False}


def _truncated(kind: str, high: float, low: float | None = None) -> dict[str, Any]:
    return IS | {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "clip": {},
    "clip_higher": {"ratio_clip_max": 0.28},
    "rloo": {"disable_ppo_ratio": True} | SEQUENCE | IS,
    "dual_clip": {"ratio_clip_c": 1.5},
    "gspo": {"sequence_level_importance_ratios": True, "ratio_clip_min": 0.05, "ratio_clip_max": 0.05} | SEQUENCE,
    "gspo_tis": {"sequence_level_importance_ratios": True} | SEQUENCE | _truncated("tis", 1.05),
    "cispo": {"use_cispo": True, "ratio_clip_max": 0.3},
    "reinforce": {"disable_ppo_ratio": True},
    "on_policy": {"force_on_policy_ratio": True},
    "is": IS,
    "tis": _truncated("tis", 1.1),
    "icepop": _truncated("icepop", 1.2, 0.8),
    "seq_mask_tis": _truncated("seq-mask-tis", 1.2, 0.9),
    "seq_mean": SEQUENCE,
}  # fmt: skip
_KL = {"reference_policy_kl_penalty": 0.3}
KLS: dict[str, dict[str, Any]] = {
    "no_kl": {"reference_policy_kl_penalty": 0.0},
    **{k: _KL | {"reference_policy_kl_type": k} for k in ("k1", "k2", "k3")},
    **{
        f"{k}_weighted": _KL | {"reference_policy_kl_type": k, "use_on_policy_kl_approximation": True}
        for k in ("k1", "k2", "k3")
    },
    "k3_clamped": _KL | {"kl_input_clamp_value": 0.6, "kl_output_clamp_value": 0.1},
}
MASKS = ("all", "single", "holes", "masked", "empty_shard")
# rows of a padded micro-batch; token budgets of a packed one, and whether rank 0 gets no row at all
CUTS: dict[str, dict[str, Any]] = {
    "padded1": {"rows": 1},
    "padded2": {"rows": 2},
    "padded4": {"rows": 4},
    "packed32": {"tokens": 32},
    "packed64": {"tokens": 64},
    "packed512": {"tokens": 512},
    "packed32_no_row": {"tokens": 32, "no_row": True},
}
EMBEDDINGS = ("tied", "untied")
TEMPERATURES = (1.0, 0.7)
RECOMPUTE = ("stored", "full", "selective")  # activations


@dataclass(frozen=True)
class Case:
    """One comparison; every field but the seed is a key of a table above."""

    layout: str
    cut: str
    variant: str
    kl: str
    masks: str
    embeddings: str
    recompute: str
    temperature: float
    seed: int

    @property
    def name(self) -> str:
        """All factors, and enough to run the case alone."""
        parts = (self.layout, self.cut, self.variant, self.kl, self.masks, self.embeddings, self.recompute)
        return "-".join([*parts, f"t{self.temperature}", f"seed{self.seed}"])

    @classmethod
    def named(cls, name: str) -> Case:
        """The case of :attr:`name`."""
        *parts, temperature, seed = name.split("-")
        return cls(*parts, float(temperature[1:]), int(seed[4:]))  # type: ignore[misc]

    @property
    def factors(self) -> set[str]:
        """What the fixed sample must cover."""
        return {*self.layout.split("_"), self.cut, self.variant, self.kl, self.masks, self.embeddings,
                self.recompute, str(self.temperature)}  # fmt: skip

    @property
    def world_size(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(**LAYOUTS[self.layout][1])

    @property
    def layers(self) -> int:
        parallel = self.parallel
        return max(
            2, parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
        )

    def model(self, folder: Path) -> Path:
        """Where :func:`write_models` puts the model of this case."""
        return folder / f"{self.embeddings}{self.layers}{'moe' if self.has_experts else ''}"

    @property
    def has_experts(self) -> bool:
        return self.layout.startswith("moe")

    def dealt(self) -> list[list[int]] | None:
        """Rows of each data-parallel rank, where they are not dealt evenly."""
        dp = self.parallel.data_parallel_size(self.world_size)
        if dp == 1 or not CUTS[self.cut].get("no_row"):
            return None
        rows = list(range(self.rows))
        return [[], *(rows[i :: dp - 1] for i in range(dp - 1))]

    @property
    def rows(self) -> int:
        """Four for each replica: a multiple of every cut, and of PP micro-batches where interleaving needs it."""
        return 4 * self.parallel.data_parallel_size(self.world_size)

    def policy(self, folder: Path, precision: str) -> PolicyConfig:
        cut = CUTS[self.cut]
        rows = cut.get("rows", 1)
        if self.parallel.virtual_pipeline_model_parallel_size:
            rows = min(rows, 2)  # 4 rows make at least PP = 2 micro-batches
        return PolicyConfig.model_validate(
            {
                "model_path": self.model(folder),
                "max_total_sequence_length": 24,
                "train_global_batch_size": self.rows,
                "train_micro_batch_size": rows,
                "logprob_batch_size": 1 if rows == 4 else 2,
                "sequence_packing": {
                    "enabled": "tokens" in cut,
                    "train_mb_tokens": cut.get("tokens"),
                    "logprob_mb_tokens": 2 * cut["tokens"] if "tokens" in cut else None,
                },
                # Megatron's router does not see where packed sequences end, which the first of them needs
                "moe_aux_loss_coeff": 0.1 if self.has_experts and "tokens" not in cut else 0.0,
                "moe_z_loss_coeff": 0.01 if self.has_experts else 0.0,
                "recompute_granularity": None if self.recompute == "stored" else self.recompute,
                "precision": precision,
                "layer_spec": "local",
                "parallel": LAYOUTS[self.layout][1],
                "make_vocab_size_divisible_by": 1,
                "optimizer": {"lr": 1e-3, "use_distributed_optimizer": precision == "fp32"},
            }
        )

    def problem(self, folder: Path) -> Any:
        """What the one-process reference solves."""
        from megatron_grpo.training.differential import BatchSpec, Problem

        return Problem(
            self.policy(folder, "fp64"),
            ClippedPGLossConfig(**(VARIANTS[self.variant] | KLS[self.kl])),
            self.temperature,
            BatchSpec(self.rows, self.masks, self.seed, max_prompt=12),  # type: ignore[arg-type]
        )


def generate(seed: int = 0, per_layout: int = CASES_PER_LAYOUT) -> list[Case]:
    """The set: every value of a factor is dealt before one comes again."""
    rng = random.Random(seed)

    def deck(values: Sequence[Any]) -> Iterator[Any]:
        while True:
            yield from rng.sample(values, len(values))

    decks = [deck([*x]) for x in (CUTS, VARIANTS, KLS, MASKS, EMBEDDINGS, RECOMPUTE, TEMPERATURES)]
    numbers = itertools.count(1000 * seed)
    return [
        Case(layout, *(next(d) for d in decks), next(numbers))
        for layout in LAYOUTS
        for _ in range(per_layout)
    ]


def sample(cases: Sequence[Case], ranks: int) -> list[Case]:
    """Cases on at most ``ranks`` ranks in which every value of every factor occurs that does so there."""
    cases = [case for case in cases if case.world_size <= ranks]
    left = set().union(*(case.factors for case in cases))
    chosen: list[Case] = []
    while left:
        chosen.append(max(cases, key=lambda case: (len(case.factors & left), -case.world_size)))
        left -= chosen[-1].factors
    return sorted(chosen, key=lambda case: list(LAYOUTS).index(case.layout))


# ---- on the ranks


def write_models(folder: Path, cases: Sequence[Case]) -> None:
    """The models of all cases, tiny, with a vocabulary that TP does not divide."""
    from megatron_grpo.training.differential import write_random_model

    for case in cases:
        if not case.model(folder).exists():
            write_random_model(case.model(folder), _hf_config(case))


def _hf_config(case: Case) -> dict[str, Any]:
    """A tiny model, but not so tiny that the few entries of a gradient may all be small, which float32 cannot hold."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    }
    return {
        **(experts | {"mlp_only_layers": [1]} if case.has_experts else {}),
        "architectures": ["Qwen3MoeForCausalLM" if case.has_experts else "Qwen3ForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": case.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": case.embeddings == "tied",
    }


def _layout(parallel: ParallelConfig) -> ParallelLayout:
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    from megatron_grpo.parallel.layout import initialize_layout

    destroy_moe_metrics_tracker()
    logging.getLogger("megatron").setLevel(logging.ERROR)  # every model that is built warns about its class
    return initialize_layout(**parallel.group_sizes(), timeout_s=TIMEOUT_S)


def solve_all(rank: int, world: int, cases: Sequence[Case], folder: Path) -> None:
    """The reference's answers to all cases, one file each."""
    import torch
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    from megatron_grpo.training.differential import solve

    layout = _layout(ParallelConfig())
    for case in cases:
        destroy_moe_metrics_tracker()  # it has room for the layers of the first model that it sees
        torch.save(solve(case.problem(folder), layout), folder / f"{case.name}.pt")


def check_all(rank: int, world: int, cases: Sequence[Case], folder: Path, precision: str) -> list[Any]:
    """The differences of each of ``cases``, which are of one layout, on this rank."""
    import torch

    from megatron_grpo.policy.policy import MegatronPolicy
    from megatron_grpo.training.differential import answer_in_layout, differences

    layout = _layout(cases[0].parallel)
    results = []
    for case in cases:
        batch, expected = torch.load(folder / f"{case.name}.pt", weights_only=False)
        policy = MegatronPolicy(
            case.policy(folder, precision),
            layout,
            temperature=case.temperature,
            total_optimizer_steps=1,
            with_reference=False,
        )
        answer = answer_in_layout(policy, case.problem(folder), batch, case.dealt())
        results.append(differences(answer, expected, smallest_gradient=SMALLEST_GRADIENT[precision]))
    return results


# ---- the whole set


def run(
    pool: RankPool, cases: Sequence[Case], folder: Path, precisions: Sequence[str], fn: Any = check_all
) -> Iterator[tuple[str, Case, dict[str, Any]]]:
    """Precision, case and the worst differences over the ranks, of every case."""
    write_models(folder, cases)
    pool.run(1, solve_all, cases, folder, timeout=30 * TIMEOUT_S)
    for precision in precisions:
        for layout, group in itertools.groupby(cases, key=lambda case: case.layout):
            members = list(group)
            ranks = pool.run(LAYOUTS[layout][0], fn, members, folder, precision, timeout=10 * TIMEOUT_S)
            for case, per_rank in zip(members, zip(*ranks, strict=True), strict=True):
                kinds = sorted({kind for result in per_rank for kind in result})
                yield precision, case, {
                    kind: max((r[kind] for r in per_rank if kind in r), key=lambda d: d.error)
                    for kind in kinds
                }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", nargs="+", choices=TOLERANCE, default=list(TOLERANCE))
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, help="only cases of these")
    parser.add_argument("--case", nargs="+", type=Case.named, help="only these, by name")
    parser.add_argument("--seed", type=int, default=0, help="of the generated set")
    args = parser.parse_args()
    cases = args.case or [c for c in generate(args.seed) if args.layout is None or c.layout in args.layout]
    start, failed = time.monotonic(), 0
    worst: dict[tuple[str, str], Any] = {}
    pool = RankPool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = run(pool, cases, Path(folder), args.precision)
            for (precision, layout), group in itertools.groupby(results, key=lambda r: (r[0], r[1].layout)):
                members, bad = 0, 0
                for _, case, found in group:
                    members += 1
                    wrong = max(d.error for d in found.values()) > TOLERANCE[precision]
                    bad += wrong
                    if wrong or args.case:
                        _say(f"{'FAILED' if wrong else 'ok'} {precision} {case.name}")
                        for kind, difference in found.items():
                            _say(f"    {kind:10} {difference}")
                    for kind, difference in found.items():
                        key = precision, kind
                        if key not in worst or difference.error > worst[key][0].error:
                            worst[key] = difference, case.name
                failed += bad
                _say(
                    f"{precision} {layout:16} {members} cases, {bad} failed, {time.monotonic() - start:.0f} s"
                )
    finally:
        pool.close()
    for (precision, kind), (difference, name) in sorted(worst.items()):
        _say(f"worst {precision} {kind:10} {difference}  in {name}")
    total = f"{len(cases)} cases in {' and in '.join(args.precision)}"
    _say(f"{total}, {failed} failed, {time.monotonic() - start:.0f} s")
    return int(failed > 0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
