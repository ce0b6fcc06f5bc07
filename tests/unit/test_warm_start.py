"""The warm-start tool: tokenizer, labels, accuracy, and the directory that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_grpo.config import RunConfig, load_config
from megatron_grpo.data.chat import ChatRenderer, load_tokenizer
from megatron_grpo.data.datasets import Question, load_prompts, read_questions
from tools.warm_start import (
    IGNORED,
    MARKER,
    Recipe,
    answer_of,
    build_model,
    build_tokenizer,
    collate,
    encode,
    expected_reward,
    fit,
    main,
    warm_start,
)

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
# Stops at the first probe, whatever was learned.
QUICK = Recipe(
    hidden_size=64, intermediate_size=64, num_layers=1, batch_size=8, probe_every=2, target_reward=0.0
)


def small_config(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_config(
        QUICKSTART, [f"policy.model_path={tmp_path / 'model'}", "data.train.size=60", *overrides]
    )


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return list(read_questions(load_config(QUICKSTART).data.train))


def test_quickstart_splits_are_disjoint_and_everything_fits(
    questions: list[Question], tmp_path: Path
) -> None:
    config = load_config(QUICKSTART)
    config.check_world_size(2)
    assert config.data.validation is not None
    train = {q.text for q in questions}
    held_out = {q.text for q in read_questions(config.data.validation)}
    assert len(train) + len(held_out) == 200  # 10 x 10 sums and as many differences
    assert 30 <= len(held_out) <= 50
    assert not train & held_out

    renderer = ChatRenderer(build_tokenizer(questions, Recipe().vocab_size))
    longest = max(len(encode(question, renderer)[1]) for question in questions)
    assert longest <= config.generation.max_new_tokens  # every answer can be given
    limits = {
        "max_total_sequence_length": config.policy.max_total_sequence_length,
        "max_new_tokens": config.generation.max_new_tokens,
    }
    assert max(len(p.token_ids) for p in load_prompts(config.data, "train", renderer, **limits)) == 8


def test_tokenizer_has_the_asked_size_and_keeps_the_varying_part_in_characters(
    questions: list[Question],
) -> None:
    tokenizer = build_tokenizer(questions, 320)
    assert len(tokenizer) == 320
    unused = tokenizer.convert_ids_to_tokens(319)
    assert unused.startswith("<|reserved_")
    assert tokenizer.decode([319], skip_special_tokens=True) == unused  # if sampled, visible and wrong
    text = "State the final answer to the following arithmetic problem: 12 + 3 = oboe"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[1:] == [*"12", "Ġ+Ġ", "3", "Ġ=", "Ġ", *"oboe"]
    rendered = ChatRenderer(tokenizer).render([{"role": "user", "content": "sun"}])
    assert tokenizer.decode(rendered) == "<|user|>sun<|end|><|assistant|>"


def test_only_answers_are_labelled() -> None:
    inputs, labels = collate([([5, 6, 7], [8, 2]), ([5], [9, 2])])
    assert inputs.tolist() == [[5, 6, 7, 8], [5, 9, 0, 0]]
    assert labels.tolist() == [[IGNORED, IGNORED, 8, 2], [9, 2, IGNORED, IGNORED]]


def test_expected_reward_is_the_probability_of_the_whole_reply(questions: list[Question]) -> None:
    torch.manual_seed(0)
    tokenizer = build_tokenizer(questions, 320)
    renderer = ChatRenderer(tokenizer)
    recipe = Recipe(hidden_size=64, intermediate_size=128, target_reward=0.2, probe_size=24, batch_size=24)
    examples = [encode(question, renderer) for question in questions[:24]]
    model = build_model(tokenizer, recipe)
    _, reward = fit(model, examples, recipe, seed=0)
    assert 0.2 <= reward < 1

    total = 0.0
    for prompt, answer in examples:
        probability = 1.0
        for n, token in enumerate(answer):
            logits = model(torch.tensor([prompt + answer[:n]])).logits[0, -1]
            probability *= logits.softmax(-1)[token].item()
        total += probability
    assert expected_reward(model, *collate(examples)) == pytest.approx(total / 24, rel=1e-4)
    assert reward == pytest.approx(total / 24, rel=1e-4)


def test_directory_is_complete_and_depends_on_the_seed_only(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        warm_start(small_config(tmp_path / name, f"grpo.seed={seed}"), QUICK)
    a, b, c = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["model"]  # no partial directory is left

    made = json.loads((tmp_path / "a" / "model" / "config.json").read_text())
    tokenizer = load_tokenizer(tmp_path / "a" / "model")
    assert made["architectures"] == ["Qwen3ForCausalLM"]
    assert made["dtype"] == "float32"
    assert made["vocab_size"] == len(tokenizer) == 320
    assert made["eos_token_id"] == tokenizer.eos_token_id


def test_same_settings_are_made_once(tmp_path: Path) -> None:
    def made() -> int:
        return (tmp_path / "model" / MARKER).stat().st_mtime_ns

    warm_start(small_config(tmp_path), QUICK)
    first = made()
    warm_start(small_config(tmp_path), QUICK)
    assert made() == first
    warm_start(small_config(tmp_path, "grpo.seed=1"), QUICK)
    assert made() > first


def test_refusals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    foreign = tmp_path / "model"
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"was not made by this tool \(it has no warm_start.json\)"):
        warm_start(small_config(tmp_path), QUICK)
    assert (foreign / "config.json").read_text() == "{}"

    with pytest.raises(ValueError, match=r"data\.train\.kind is jsonl"):
        warm_start(small_config(tmp_path, "data.train={kind: jsonl, path: x.jsonl}"), QUICK)

    other = small_config(tmp_path / "other")
    with pytest.raises(ValueError, match=r"the expected reward on train problems is 0\.00 after 2 steps"):
        warm_start(other, Recipe(hidden_size=64, num_layers=1, probe_every=2, max_steps=2))
    assert not other.policy.model_path.exists()

    assert main(["--config", str(QUICKSTART), "data.train.tsk=chain_sum"]) == 1
    assert "did you mean 'task'?" in caplog.text


def test_answer(questions: list[Question]) -> None:
    for question in questions[:50]:
        problem = question.text.removesuffix(" =").split(": ")[1]
        left, operator, right = problem.split()
        value = int(left) + int(right) if operator == "+" else int(left) - int(right)
        assert answer_of(question) == str(value)
