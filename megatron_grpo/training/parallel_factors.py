"""What ``doctor parallel`` compares: a run's parallelism one factor at a time, on a shrunk model of its family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_grpo.config import ConfigError, RunConfig
from megatron_grpo.config.parallel import ParallelConfig
from megatron_grpo.config.policy import PolicyConfig
from megatron_grpo.models.hf_directory import HFConfig, read_hf_config
from megatron_grpo.models.registry import describe_model
from megatron_grpo.training.preflight import check_layer_spec

RANK_LIMIT = 8  # of the ranks that the doctor starts itself
_SEQUENCE = 16  # tokens of the longest row
_VOCABULARY = 61  # which TP does not divide


@dataclass(frozen=True)
class Factor:
    """One comparison: the run with this much of its parallelism.

    Attributes:
        name: what the line says.
        policy: with the shrunk model's sizes; ``model_path`` is not looked at.
        ranks: how many it needs.
    """

    name: str
    policy: PolicyConfig
    ranks: int


@dataclass(frozen=True)
class Examination:
    """All comparisons of a run, against one reference.

    Attributes:
        factors: in the order in which they run.
        reduced: factors of the layout that are larger in the run, for the user.
    """

    run: RunConfig
    hf_config: HFConfig
    factors: tuple[Factor, ...]
    reduced: tuple[str, ...]
    rows: int

    @property
    def ranks(self) -> int:
        return max(factor.ranks for factor in self.factors)


def plan_examination(run: RunConfig, ranks: int | None = None) -> Examination:
    """The comparisons for ``run``, on at most ``ranks`` ranks (None: as many as they need, up to ``RANK_LIMIT``).

    Raises:
        ConfigError: no config.json, or a model or layout that is not supported.
    """
    try:
        hf_config = read_hf_config(run.policy.model_path)
        model = describe_model(hf_config)
    except ValueError as error:
        raise ConfigError(f"policy.model_path: {error}") from None
    try:
        model.check_policy(run.policy)
        check_layer_spec(run.policy)
        if ranks is not None:
            run.policy.parallel.data_parallel_size(ranks)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    limit = ranks or RANK_LIMIT
    wanted = run.policy.parallel
    replica, etp = wanted.model_parallel_size, wanted.expert_tensor_parallel_size
    expert_ranks = wanted.expert_model_parallel_size * (etp or wanted.tensor_model_parallel_size)
    per_replica = wanted.tensor_model_parallel_size * wanted.context_parallel_size
    sizes = {
        "TP": wanted.tensor_model_parallel_size,
        "PP": wanted.pipeline_model_parallel_size,
        "CP": wanted.context_parallel_size,
        "EP": wanted.expert_model_parallel_size,
        "ETP": etp or 1,
        "DP": max(1, limit // replica) if ranks is not None else max(2, expert_ranks // per_replica),
    }
    alone = {name: size if size <= limit else 2 for name, size in sizes.items()}
    vpp = wanted.virtual_pipeline_model_parallel_size or 1
    together = _fitted(sizes, etp, limit)
    reduced = tuple(
        f"{name} {size} is tested as {alone[name]} alone and {together[name]} in the layout"
        for name, size in sizes.items()
        if (alone[name], together[name]) != (size, size)
    )
    micro = min(run.policy.train_micro_batch_size, 2)
    at_a_time = math.lcm(alone["PP"], together["PP"]) if vpp > 1 else 1
    replicas = math.lcm(alone["DP"], together["DP"], alone["EP"], alone["ETP"])
    rows = max(4, 2 * micro * at_a_time * replicas)  # of two rows the batch masks both

    def factor(name: str, layout: ParallelConfig, dp: int = 1, packed: bool = True) -> Factor:
        policy = _shrunk_policy(run.policy, layout, micro, rows, packed)
        return Factor(name, policy, layout.model_parallel_size * dp)

    def layout(
        tp: int = 1, pp: int = 1, vpp: int = 1, cp: int = 1, ep: int = 1, expert_tp: int | None = None
    ) -> ParallelConfig:
        return wanted.model_copy(
            update={
                "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
                "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None, "context_parallel_size": cp,
                "expert_model_parallel_size": ep,
                "expert_tensor_parallel_size": etp and (expert_tp or min(etp, tp)),
                "sequence_parallel": wanted.sequence_parallel and tp > 1,
            }
        )  # fmt: skip

    candidates = [
        (True, factor("micro-batch", layout(), packed=False)),
        (run.policy.sequence_packing.enabled, factor("packing", layout())),
        (sizes["TP"] > 1, factor("tp", layout(tp=alone["TP"]))),
        (sizes["PP"] > 1, factor("pp", layout(pp=alone["PP"]))),
        (vpp > 1, factor("vpp", layout(pp=alone["PP"], vpp=vpp))),
        (sizes["CP"] > 1, factor("cp", layout(cp=alone["CP"]))),
        (sizes["EP"] > 1, factor("ep", layout(ep=alone["EP"]), dp=alone["EP"])),
        (
            etp is not None and etp > sizes["TP"],
            factor("etp", layout(expert_tp=alone["ETP"]), dp=alone["ETP"]),
        ),
        (sizes["DP"] > 1, factor("dp", layout(), dp=alone["DP"])),
        (
            sum(size > 1 for size in together.values()) > 1,
            factor(
                "layout",
                layout(
                    together["TP"],
                    together["PP"],
                    vpp if together["PP"] > 1 else 1,
                    together["CP"],
                    together["EP"],
                    together["ETP"],
                ),
                dp=together["DP"],
            ),
        ),
    ]
    factors = tuple(factor for used, factor in candidates if used)
    return Examination(run, _shrunk_model(hf_config, alone, together, vpp), factors, reduced, rows)


def _fitted(sizes: dict[str, int], etp: int | None, limit: int) -> dict[str, int]:
    """``sizes`` cut down until their ranks fit ``limit``: the largest to 2 first, then DP, CP, PP and TP to 1."""
    fitted = dict(sizes)

    def ranks() -> int:
        replica = fitted["TP"] * fitted["PP"] * fitted["CP"]
        return replica * fitted["DP"]

    while ranks() > limit and max(fitted[n] for n in ("TP", "PP", "CP", "DP")) > 2:
        fitted[max(("TP", "PP", "CP", "DP"), key=lambda n: fitted[n])] = 2
    for name in ("DP", "CP", "PP", "TP"):
        if ranks() > limit:
            fitted[name] = 1
    stage = ranks() // fitted["PP"]
    fitted["ETP"] = math.gcd(etp, stage) if etp else 1
    fitted["EP"] = math.gcd(fitted["EP"], stage // (fitted["ETP"] if etp else fitted["TP"]))
    return fitted


def _shrunk_policy(
    policy: PolicyConfig, layout: ParallelConfig, micro: int, rows: int, packed: bool
) -> PolicyConfig:
    """``policy`` for short rows; a packed micro-batch holds as many of the longest as in the run, up to four."""
    shrunk = policy.model_copy(
        update={
            "parallel": layout,
            "max_total_sequence_length": _SEQUENCE,
            "train_global_batch_size": rows,
            "train_micro_batch_size": micro,
            "logprob_batch_size": None,
            "make_vocab_size_divisible_by": 1,
        }
    )
    packing: dict[str, Any] = {"enabled": policy.sequence_packing.enabled and packed}
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        budget = getattr(policy, key)
        sequences = 1.0 if budget is None else min(4.0, budget / policy.longest_sequence)
        packing[key] = max(shrunk.longest_sequence, round(sequences * shrunk.longest_sequence))
    return shrunk.model_copy(update={"sequence_packing": policy.sequence_packing.model_copy(update=packing)})


def _shrunk_model(
    hf_config: HFConfig, alone: dict[str, int], together: dict[str, int], vpp: int
) -> dict[str, Any]:
    """The user's config.json with small sizes that every factor divides, and its ratio of heads to query groups."""
    heads = hf_config["num_attention_heads"]
    ratio = heads // (hf_config.get("num_key_value_heads") or heads)
    tp, pp, etp = (math.lcm(alone[name], together[name]) for name in ("TP", "PP", "ETP"))
    groups = max(2, tp)
    small = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 16 * tp,
        "num_hidden_layers": max(2, pp * vpp),
        "num_attention_heads": groups * ratio,
        "num_key_value_heads": groups,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    if hf_config.get("num_experts") or hf_config.get("num_local_experts"):
        experts = max(4, 2 * math.lcm(alone["EP"], together["EP"]))
        small |= {
            "num_experts": experts, "num_local_experts": experts, "moe_intermediate_size": 8 * math.lcm(tp, etp),
            "decoder_sparse_step": 1, "mlp_only_layers": [],
            "num_experts_per_tok": min(hf_config["num_experts_per_tok"], experts // 2),
        }  # fmt: skip
    return {**hf_config, **small}
