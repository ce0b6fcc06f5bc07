"""Losses, gradients and advantages against values of an independent implementation, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.algorithms.advantage_estimator import AdvantageInputs, make_advantage_estimator
from megatron_grpo.algorithms.loss.kl import kl_in_reward
from megatron_grpo.algorithms.loss.loss_functions import ClippedPGLossFn, LossInputs
from megatron_grpo.algorithms.sequence_index import SequenceIndex
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.loss import ClippedPGLossConfig

TOLERANCE = 1e-7
# The golden files' name of a metric where it differs from ours.
RENAMED = {"is_oob_ratio": "importance_weight_out_of_bounds"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for argument, key in (("loss_case", "inputs"), ("advantage_case", "estimator")):
        if argument in metafunc.fixturenames:
            cases = [c for c in golden_cases(Path(metafunc.config.getoption("--golden-dir"))) if key in c]
            metafunc.parametrize(argument, cases, ids=[case["name"] for case in cases])


def golden_cases(folder: Path) -> list[dict[str, Any]]:
    """Of all files of ``folder``; a case that no test would look at is an error, and so is a folder without any."""
    cases = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        found = content.get("cases") if isinstance(content, dict) else None
        if not found or not all(
            "name" in case and ("inputs" in case) != ("estimator" in case) for case in found
        ):
            raise pytest.UsageError(
                f"{path} has no golden cases: it needs a list 'cases' of objects with a name and either inputs (loss) "
                "or estimator (advantages)"
            )
        cases += found
    if not cases:
        raise pytest.UsageError(f"--golden-dir {folder} is not a directory with golden values (*.json)")
    return cases


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(tensor(got), tensor(expected), rtol=TOLERANCE, atol=TOLERANCE)


def test_loss_gradient_and_metrics(loss_case: dict[str, Any]) -> None:
    config = ClippedPGLossConfig(**loss_case["loss_fn"])
    given = {name: tensor(values) for name, values in loss_case["inputs"].items()}
    expected = loss_case["expected"]
    curr = given["curr_logprobs"].requires_grad_()  # [B, S - 1]: of tokens 1 .. S - 1
    rows, width = curr.shape

    def flat(name: str) -> Tensor:
        return given[name][:, 1:].reshape(-1)

    inputs = LossInputs(
        prev_logprobs=flat("prev_logprobs"),
        generation_logprobs=flat("generation_logprobs"),
        reference_policy_logprobs=flat("reference_policy_logprobs")
        if "reference_policy_logprobs" in given
        else None,
        advantages=flat("advantages"),
        token_mask=flat("token_mask"),
        sequences=SequenceIndex(torch.arange(rows).repeat_interleave(width), rows, given["sample_mask"]),
    )
    output = ClippedPGLossFn(config)(curr.reshape(-1), inputs)
    loss = output.loss_sum / output.num_tokens
    loss.backward()
    assert_close(loss.item(), expected["loss"])
    assert_close(curr.grad.tolist(), expected["grad_curr_logprobs"])
    for name, number in expected.get("metrics", {}).items():
        metric = output.metrics.get(RENAMED.get(name, name))
        if metric is None:
            continue
        if name == "sampling_importance_ratio" and config.sequence_level_importance_ratios:
            continue  # theirs is the product over the sequence, ours the geometric mean (see the loss)
        assert metric.value() == pytest.approx(number, rel=TOLERANCE, abs=TOLERANCE), name


def test_advantages(advantage_case: dict[str, Any]) -> None:
    case = advantage_case
    config = GRPOConfig(
        max_num_steps=1, num_prompts_per_step=1, num_generations_per_prompt=2, adv_estimator=case["estimator"]
    )
    loss = ClippedPGLossConfig(**case.get("loss_fn", {}))
    group_ids = torch.tensor(case["prompt_ids"])
    rows = len(group_ids)
    kl = None
    if "logprobs_policy" in case:
        kl = kl_in_reward(loss, tensor(case["logprobs_policy"]), tensor(case["logprobs_reference"]))
    advantages, _ = make_advantage_estimator(config, loss, None)(
        AdvantageInputs(
            rewards=tensor(case.get("rewards", [0.0] * rows)),
            group_ids=group_ids,
            sample_mask=tensor(case.get("sample_mask", [1.0] * rows)),
            token_mask=tensor(case.get("token_mask", [[1.0]] * rows)),
            components={f"reward/{name}": tensor(r) for name, r in case.get("reward_components", {}).items()},
            kl=kl,
        )
    )
    expected = tensor(case["expected"])
    got = advantages if expected.dim() == 2 else advantages[:, 0]
    assert_close(got.tolist(), expected.tolist())


@pytest.mark.parametrize(
    "content", [None, "[]", '{"cases": []}', '{"cases": [{"name": "x", "input": {}}]}'], ids=str
)
def test_a_folder_that_would_check_nothing_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(pytest.UsageError, match="golden"):
        golden_cases(tmp_path)
