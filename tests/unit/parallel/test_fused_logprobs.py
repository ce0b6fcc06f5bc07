from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.parallel.fused_logprobs import fused_linear_logprobs, masked_linear_logprobs
from megatron_grpo.parallel.logprobs import vocab_parallel_logprobs

TOKENS, HIDDEN, VOCAB, PADDED = 11, 16, 61, 64


def inputs(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and weight that want gradients, labels, and the gradient of each log-prob."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (tokens,), generator=generator)
    upstream = torch.randn(tokens, generator=generator, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels, upstream


def gradients(logprobs: Tensor, upstream: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((logprobs * upstream).sum(), of)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab_chunk", [1, 7, 32, 61, 64, None])
def test_equals_full_log_softmax(vocab_chunk: int | None, temperature: float) -> None:
    hidden, weight, labels, upstream = inputs()
    with torch.no_grad():
        weight[VOCAB:] = 1e3  # padding is in no softmax
    logprobs, entropy = fused_linear_logprobs(
        hidden, weight, labels, None, temperature, VOCAB, with_entropy=True, vocab_chunk=vocab_chunk
    )
    full = (hidden @ weight.t()[:, :VOCAB] / temperature).log_softmax(-1)
    expected = full.gather(1, labels.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1), rtol=0, atol=1e-12)
    assert entropy is not None
    assert not entropy.requires_grad
    got = gradients(logprobs, upstream, hidden, weight)
    for gradient, want in zip(got, gradients(expected, upstream, hidden, weight), strict=True):
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-12)
    assert got[1][VOCAB:].abs().max() == 0


def test_equals_the_unfused_function_with_impossible_labels() -> None:
    hidden, weight, labels, upstream = inputs()
    labels[:3] = torch.tensor([VOCAB, -1, 10_000])
    logprobs, _ = fused_linear_logprobs(hidden, weight, labels, None, 0.7, VOCAB, vocab_chunk=8)
    expected = vocab_parallel_logprobs(hidden @ weight.t(), labels, None, 0.7, VOCAB)
    assert logprobs[:3].tolist() == [-math.inf] * 3
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-12)
    got, want = (gradients(x[3:], upstream[3:], hidden, weight) for x in (logprobs, expected))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_float32_is_computed_and_returned_in_float32() -> None:
    hidden, weight, labels, upstream = inputs(torch.float32)
    logprobs, _ = fused_linear_logprobs(hidden, weight, labels, None, 0.7, VOCAB, vocab_chunk=7)
    assert logprobs.dtype == torch.float32
    exact = vocab_parallel_logprobs(hidden.double() @ weight.double().t(), labels, None, 0.7, VOCAB)
    torch.testing.assert_close(logprobs.double(), exact, rtol=0, atol=1e-5)
    got = gradients(logprobs, upstream, hidden, weight)
    for gradient, want in zip(got, gradients(exact, upstream, hidden, weight), strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
)
def test_bf16_weight_gradient_is_a_float32_accumulation(device: str) -> None:
    """Against the float64 product of the same bf16 matrices: one rounding to bf16 and nothing else.

    Rounding gives 2**-8 at most and 0.0017 in norm; a sum that is kept in bf16 over tokens is several times worse.
    """
    hidden, weight, labels, upstream = (x.detach().to(device) for x in inputs(torch.bfloat16, tokens=2000))
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, _ = fused_linear_logprobs(hidden, weight, labels, None, 0.7, VOCAB, vocab_chunk=8)
    got = gradients(logprobs, upstream, hidden, weight)
    assert [g.dtype for g in got] == [torch.bfloat16] * 2

    logits = (hidden @ weight.t()).detach().double().requires_grad_()  # rounded as an output layer's
    expected = vocab_parallel_logprobs(logits, labels, None, 0.7, VOCAB)
    torch.testing.assert_close(logprobs.double(), expected.detach(), rtol=0, atol=2e-5)
    (grad_logits,) = gradients(expected, upstream, logits)
    grad_logits = grad_logits.bfloat16().double()
    grad_weight = grad_logits.t() @ hidden.detach().double()
    error = got[1].double() - grad_weight
    assert error.norm() / grad_weight.norm() < 0.0018
    assert (error.abs() <= 2**-8 * grad_weight.abs() + 1e-4 * grad_weight.abs().max()).all()
    grad_hidden = grad_logits @ weight.detach().double()
    assert (got[0].double() - grad_hidden).norm() / grad_hidden.norm() < 0.003


def test_huge_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[1e30], [0.0], [-1e30]])
    logprobs, entropy = fused_linear_logprobs(
        hidden, weight, torch.tensor([0]), None, 1.0, 3, with_entropy=True, vocab_chunk=1
    )
    assert entropy is not None
    assert (logprobs.tolist(), entropy.tolist()) == ([0.0], [0.0])


def test_inputs_are_not_modified_and_backward_can_run_twice() -> None:
    hidden, weight, labels, upstream = inputs()
    before = [x.detach().clone() for x in (hidden, weight, labels, upstream)]
    logprobs, _ = fused_linear_logprobs(hidden, weight, labels, None, 0.7, VOCAB, vocab_chunk=7)
    loss = (logprobs * upstream).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((hidden, weight, labels, upstream), before, strict=True))


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_weight_or_hidden_states_get_no_gradient(frozen: int) -> None:
    hidden, weight, labels, _ = inputs()
    (hidden, weight)[frozen].requires_grad_(False)
    fused_linear_logprobs(hidden, weight, labels, None, 1.0, VOCAB)[0].sum().backward()
    assert [x.grad is None for x in (hidden, weight)] == [frozen == 0, frozen == 1]


def test_mask_selects_before_the_matrix_product() -> None:
    hidden, weight, labels, upstream = inputs(tokens=12)
    sheet: dict[str, Any] = {"labels": labels.view(3, 4), "mask": torch.rand(3, 4) < 0.5}
    sheet["mask"][0] = False
    with torch.no_grad():
        hidden.view(3, 4, HIDDEN)[0] = math.nan  # not one of these may be multiplied
    logprobs, entropy = masked_linear_logprobs(
        hidden.view(3, 4, HIDDEN), weight, **sheet, tp_group=None, temperature=0.7, vocab_size=VOCAB,
        with_entropy=True,
    )  # fmt: skip
    rows = sheet["mask"].flatten()
    full = (hidden[rows] @ weight.t()[:, :VOCAB] / 0.7).log_softmax(-1)
    expected = full.gather(1, labels[rows].unsqueeze(1)).squeeze(1)
    assert logprobs.shape == (3, 4)
    torch.testing.assert_close(logprobs.flatten()[rows], expected, rtol=0, atol=1e-12)
    assert logprobs.flatten()[~rows].abs().max() == 0
    assert entropy is not None
    torch.testing.assert_close(entropy.flatten()[rows], -(full.exp() * full).sum(-1), rtol=0, atol=1e-12)
    got = gradients(logprobs.flatten(), upstream, hidden, weight)
    want = gradients(expected, upstream[rows], hidden, weight)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_no_position_at_all_has_zero_gradients() -> None:
    hidden, weight, labels, _ = inputs()
    logprobs, _ = masked_linear_logprobs(
        hidden, weight, labels, torch.zeros(TOKENS), None, 1.0, VOCAB, with_entropy=True
    )
    logprobs.sum().backward()
    assert logprobs.abs().max() == 0
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temperature_without_a_distribution_is_refused(temperature: float) -> None:
    hidden, weight, labels, _ = inputs()
    with pytest.raises(ValueError, match=f"temperature {temperature}"):
        fused_linear_logprobs(hidden, weight, labels, None, temperature, VOCAB)


def test_inputs_that_do_not_fit_are_refused() -> None:
    hidden, weight, labels, _ = inputs()
    with pytest.raises(
        ValueError, match=r"hidden \(11, 16\), weight \(64, 16\) and labels \(10,\) do not fit"
    ):
        fused_linear_logprobs(hidden, weight, labels[1:], None, 1.0, VOCAB)
    with pytest.raises(ValueError, match="vocab_size 65 is not between 1 and the 64 rows"):
        fused_linear_logprobs(hidden, weight, labels, None, 1.0, 65)
    with pytest.raises(ValueError, match=r"hidden is torch.float64 but the output weight torch.bfloat16"):
        fused_linear_logprobs(hidden, weight.bfloat16(), labels, None, 1.0, VOCAB)
    with pytest.raises(ValueError, match="vocab_chunk 0"):
        fused_linear_logprobs(hidden, weight, labels, None, 1.0, VOCAB, vocab_chunk=0)
    with pytest.raises(ValueError, match=r"mask \(3,\) do not fit hidden \(11, 16\)"):
        masked_linear_logprobs(hidden, weight, labels, torch.ones(3), None, 1.0, VOCAB)
