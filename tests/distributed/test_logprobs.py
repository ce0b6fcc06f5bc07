from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.parallel.logprobs import vocab_parallel_logprobs
from tests.rank_pool import RankPool

TOLERANCE = 1e-12


def _shard_errors(
    rank: int, world: int, vocab: int, padded: int, temperature: float
) -> tuple[float, float, float]:
    """Largest error of the log-probs and of this shard's gradient, and largest gradient of a padding column."""
    generator = torch.Generator().manual_seed(0)
    full = 3 * torch.randn(4, 6, padded, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab, (4, 6), generator=generator)
    weight = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    full.requires_grad_()
    logp = (full[..., :vocab] / temperature).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    (full_gradient,) = torch.autograd.grad((logp * weight).sum(), full)

    width = padded // world
    columns = slice(rank * width, (rank + 1) * width)
    shard = full.detach()[..., columns].clone().requires_grad_()
    got = vocab_parallel_logprobs(shard, labels, dist.group.WORLD, temperature, vocab)
    (gradient,) = torch.autograd.grad((got * weight).sum(), shard)
    padding = gradient[..., max(vocab - rank * width, 0) :]
    return (
        (got - logp).abs().max().item(),
        (gradient - full_gradient[..., columns]).abs().max().item(),
        padding.abs().max().item() if padding.numel() else 0.0,
    )


def _gathered(rank: int, world: int, vocab: int) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the test below looks at the text
        vocab_parallel_logprobs(
            torch.zeros(2, 64), torch.zeros(2, dtype=torch.int64), dist.group.WORLD, 1.0, vocab
        )
    return str(error.value)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("vocab", [61, 64])
def test_gathered_logits_are_refused(ranks: RankPool, vocab: int) -> None:
    """The log-probs would be right, and the gradient of all ranks but one zero."""
    for text in ranks.run(2, _gathered, vocab):
        assert "gathered logits would lose most of their gradient; pass this rank's columns" in text


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("world", "vocab", "padded", "temperature"),
    [(2, 61, 64, 1.0), (2, 61, 64, 0.7), (4, 61, 64, 0.7), (4, 5, 16, 1.0)],  # 5 of 16: two shards of padding
)
def test_vocab_parallel_equals_one_process(
    ranks: RankPool, world: int, vocab: int, padded: int, temperature: float
) -> None:
    for logprob_error, gradient_error, padding in ranks.run(world, _shard_errors, vocab, padded, temperature):
        assert logprob_error < TOLERANCE
        assert gradient_error < TOLERANCE
        assert padding == 0.0
