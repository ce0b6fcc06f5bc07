from __future__ import annotations

import pytest
import torch

from megatron_grpo.parallel.collectives import split_for_context_parallel


def test_rank_owns_a_chunk_and_its_mirror_image() -> None:
    x = torch.arange(8)
    assert split_for_context_parallel(x, 0, 2, dim=0).tolist() == [0, 1, 6, 7]
    assert split_for_context_parallel(x, 1, 2, dim=0).tolist() == [2, 3, 4, 5]
    assert split_for_context_parallel(x, 0, 1, dim=0).tolist() == list(range(8))


def test_split_is_differentiable() -> None:
    x = torch.zeros(8, requires_grad=True)
    split_for_context_parallel(x, 1, 2, dim=0).sum().backward()
    assert x.grad.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_indivisible_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"length 6 .* context parallel size 2: pad it to a multiple of 4"):
        split_for_context_parallel(torch.zeros(1, 6), 0, 2, dim=1)
