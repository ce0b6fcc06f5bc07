from __future__ import annotations

import math

import pytest
import torch

from megatron_grpo.parallel.logprobs import vocab_parallel_logprobs

VOCAB, PADDED = 61, 64


def logits_and_labels(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3, 5, PADDED, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (3, 5), generator=generator)
    return logits.to(dtype), labels


def reference(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    logp = (logits[..., :VOCAB].double() / temperature).log_softmax(-1)
    return logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_log_softmax_of_scaled_unpadded_logits(temperature: float) -> None:
    logits, labels = logits_and_labels()
    logits[..., VOCAB:] = 1e6  # padding is in no softmax
    logits.requires_grad_()
    logprobs = vocab_parallel_logprobs(logits, labels, None, temperature, VOCAB)
    expected = reference(logits, labels, temperature)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-13)
    weight = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
    (gradient,) = torch.autograd.grad((logprobs * weight).sum(), logits)
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), logits)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-14)
    assert gradient[..., VOCAB:].abs().max() == 0


@pytest.mark.parametrize(("dtype", "out", "atol"), [(torch.float32, torch.float32, 5e-6),
                                                    (torch.bfloat16, torch.float32, 5e-6)])  # fmt: skip
def test_low_precision_logits_are_computed_in_float32(
    dtype: torch.dtype, out: torch.dtype, atol: float
) -> None:
    logits, labels = logits_and_labels(dtype)
    logits.requires_grad_()
    logprobs = vocab_parallel_logprobs(logits, labels, None, 0.7, VOCAB)
    assert logprobs.dtype == out
    torch.testing.assert_close(logprobs.double(), reference(logits, labels, 0.7), rtol=0, atol=atol)
    logprobs.sum().backward()
    assert logits.grad.dtype == dtype


def test_logits_are_not_modified() -> None:
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    before = logits.detach().clone()
    vocab_parallel_logprobs(logits, labels, None, 0.5, VOCAB).sum().backward()
    assert torch.equal(logits, before)


def test_two_consumers_of_the_same_logits() -> None:
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    cold = vocab_parallel_logprobs(logits, labels, None, 0.5, VOCAB)
    warm = vocab_parallel_logprobs(logits, labels, None, 2.0, VOCAB)
    (gradient,) = torch.autograd.grad(cold.sum() + warm.sum(), logits)
    expected = reference(logits, labels, 0.5).sum() + reference(logits, labels, 2.0).sum()
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-13)


def test_second_backward_fails_instead_of_giving_garbage() -> None:
    logits, labels = logits_and_labels()
    total = vocab_parallel_logprobs(logits.requires_grad_(), labels, None, 1.0, VOCAB).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        total.backward()


def test_label_outside_the_vocabulary_is_impossible() -> None:
    logits, labels = logits_and_labels()
    labels[0, :3] = torch.tensor([VOCAB, -1, 10_000])
    logprobs = vocab_parallel_logprobs(logits, labels, None, 1.0, VOCAB)
    assert logprobs[0, :3].tolist() == [-math.inf] * 3
    assert logprobs[1:].isfinite().all()


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e30, 0.0, -1e30]], requires_grad=True)
    logprobs = vocab_parallel_logprobs(logits, torch.tensor([0]), None, 1.0, 3)
    assert logprobs.tolist() == [0.0]


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temperature_without_a_distribution_is_refused(temperature: float) -> None:
    logits, labels = logits_and_labels()
    with pytest.raises(ValueError, match=f"temperature {temperature}"):
        vocab_parallel_logprobs(logits, labels, None, temperature, VOCAB)


def test_shapes_that_do_not_fit_are_refused() -> None:
    logits, labels = logits_and_labels()
    with pytest.raises(ValueError, match=r"labels \(5, 3\) do not fit logits \(3, 5, 64\)"):
        vocab_parallel_logprobs(logits, labels.T, None, 1.0, VOCAB)
    with pytest.raises(ValueError, match="vocab_size 65 is not between 1 and the 64 columns"):
        vocab_parallel_logprobs(logits, labels, None, 1.0, 65)


def test_a_label_in_the_padding_moves_no_padding_column() -> None:
    logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    vocab_parallel_logprobs(logits, torch.tensor([3]), None, 1.0, 3).sum().backward()
    assert logits.grad[0].tolist() == [pytest.approx(-1 / 3)] * 3 + [0.0]
