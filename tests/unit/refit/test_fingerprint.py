from __future__ import annotations

import pytest
import torch

from megatron_grpo.refit.fingerprint import fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
def test_equal_for_equal_bytes_whatever_the_strides(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    assert fingerprint(tensor) == fingerprint(tensor.t().contiguous().t())
    assert fingerprint(tensor) == fingerprint(torch.nn.Parameter(tensor.clone(), requires_grad=False))
    assert len(fingerprint(tensor)) == 32


def test_differs_in_one_bit_in_shape_and_in_dtype() -> None:
    tensor = torch.randn(64, 64)
    flipped = tensor.clone()
    flipped.view(torch.int32)[63, 63] ^= 1
    others = [flipped, tensor.reshape(32, 128), tensor.view(torch.int32), tensor[:63], torch.zeros(0)]
    assert len({fingerprint(t) for t in [tensor, *others]}) == 6


def test_scalars_zeros_and_nans() -> None:
    assert fingerprint(torch.tensor(1.0)) != fingerprint(torch.tensor([1.0]))
    assert fingerprint(torch.tensor(0.0)) != fingerprint(torch.tensor(-0.0))
    assert fingerprint(torch.tensor(float("nan"))) == fingerprint(torch.tensor(float("nan")))
