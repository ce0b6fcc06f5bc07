from __future__ import annotations

import pytest
import torch

from megatron_grpo.models.registry import describe_model
from megatron_grpo.models.weight_map import (
    QKV,
    ColumnParallel,
    GatedMLP,
    HFTensor,
    ParamMapping,
    RowParallel,
    VocabParallel,
    canonical_name,
    padded_vocab_size,
)
from tests.unit.models.test_qwen3 import CONFIG


def shards_of(mapping: ParamMapping, sources: list[torch.Tensor], tp: int) -> list[torch.Tensor]:
    shards = []
    for rank in range(tp):
        shard = torch.full(mapping.shard_shape(tp), float("nan"))
        mapping.to_megatron(sources, shard, rank, tp)
        shards.append(shard)
    return shards


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_of_every_qwen3_parameter(tp: int, tied: bool) -> None:
    model = describe_model(CONFIG | {"tie_word_embeddings": tied})
    generator = torch.Generator().manual_seed(0)
    exported = []
    for mapping in model.weight_map(padded_vocab_size(61, 16, tp)):
        sources = [torch.randn(t.shape, generator=generator) for t in mapping.hf]
        shards = shards_of(mapping, sources, tp)
        assert not any(shard.isnan().any() for shard in shards)
        if mapping.sharded:
            total = sum(s.numel() for s in sources)
            padding = (padded_vocab_size(61, 16, tp) - 61) * 64 if isinstance(mapping, VocabParallel) else 0
            assert sum(shard.numel() for shard in shards) == total + padding
        for source, result in zip(sources, mapping.to_hf(shards), strict=True):
            assert torch.equal(source, result)
            assert result.is_contiguous()
        exported += [] if mapping.is_copy else [t.name for t in mapping.hf]
    assert exported == list(model.hf_shapes())


def test_qkv_is_interleaved_by_query_group() -> None:
    # 4 query heads of one row each in 2 groups: q 0..3, k 10 and 11, v 20 and 21
    mapping = QKV(
        "qkv",
        (HFTensor("q", (4, 1)), HFTensor("k", (2, 1)), HFTensor("v", (2, 1))),
        num_query_groups=2,
        head_dim=1,
    )
    sources = [torch.tensor([rows]).T.float() for rows in ([0, 1, 2, 3], [10, 11], [20, 21])]
    (full,) = shards_of(mapping, sources, 1)
    assert full.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert shards_of(mapping, sources, 2)[1].flatten().tolist() == [2, 3, 11, 21]


def test_gate_and_up_are_stacked_on_each_rank() -> None:
    mapping = GatedMLP("fc1", (HFTensor("gate", (4, 1)), HFTensor("up", (4, 1))))
    sources = [torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]]
    assert [s.flatten().tolist() for s in shards_of(mapping, sources, 2)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_rows_and_columns() -> None:
    full = torch.arange(8.0).view(2, 4)
    assert shards_of(RowParallel("p", (HFTensor("w", (2, 4)),)), [full], 2)[1].tolist() == [[2, 3], [6, 7]]
    assert shards_of(ColumnParallel("p", (HFTensor("w", (2, 4)),)), [full], 2)[1].tolist() == [[4, 5, 6, 7]]
    bias = ColumnParallel("p", (HFTensor("b", (4,)),))
    assert shards_of(bias, [torch.arange(4.0)], 2)[1].tolist() == [2, 3]


def test_vocabulary_padding_is_zero_and_never_exported() -> None:
    assert padded_vocab_size(61, 8, 4) == 64
    assert padded_vocab_size(61, 32, 4) == 128  # ranks 2 and 3 hold padding only
    mapping = VocabParallel("e", (HFTensor("embed", (61, 2)),), padded_vocab_size=128)
    shards = shards_of(mapping, [torch.ones(61, 2)], 4)
    assert [s.sum().item() for s in shards] == [64, 58, 0, 0]
    assert mapping.to_hf(shards)[0].shape == (61, 2)


@pytest.mark.parametrize(
    ("spelled", "canonical"),
    [
        (
            "decoder.layers.7.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.7.input_layernorm.weight",
        ),
        ("decoder.layers.7.mlp.linear_fc1.layer_norm_weight", "decoder.layers.7.pre_mlp_layernorm.weight"),
        ("decoder.layers.7.mlp.linear_fc1.weight", "decoder.layers.7.mlp.linear_fc1.weight"),
    ],
)
def test_transformer_engine_spelling(spelled: str, canonical: str) -> None:
    assert canonical_name(spelled) == canonical
    names = {m.param for m in describe_model(CONFIG | {"num_hidden_layers": 8}).weight_map(64)}
    assert canonical in names
