from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config import DataConfig, DatasetConfig
from megatron_grpo.data.chat import ChatRenderer
from megatron_grpo.data.datasets import Question, load_prompts, read_questions

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def jsonl(path: Path, *lines: Any) -> DatasetConfig:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return DatasetConfig(kind="jsonl", path=path)


def gym(**changes: Any) -> DatasetConfig:
    values: dict[str, Any] = {"task": "chain_sum", "task_args": SUMS, "size": 400}
    return DatasetConfig(kind="reasoning_gym", **{**values, **changes})


class WordRenderer(ChatRenderer):
    """One token for each word: lengths that a reader can count."""

    def __init__(self) -> None:
        pass

    def render(self, messages: Any) -> tuple[int, ...]:
        return tuple(len(word) for message in messages for word in message["content"].split())


def load(dataset: DatasetConfig, overlong: str = "error", total: int = 10, new: int = 5) -> list[Any]:
    data = DataConfig(train=dataset, overlong_prompts=overlong)  # type: ignore[arg-type]
    return load_prompts(data, "train", WordRenderer(), max_total_sequence_length=total, max_new_tokens=new)


def test_jsonl_texts_and_messages(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And 2 + 2?"}]
    dataset = jsonl(
        tmp_path / "math.jsonl", {"prompt": "1 + 1?", "answer": "2"}, "", {"prompt": chat, "k": [1]}
    )
    assert list(read_questions(dataset)) == [
        Question("math:0", "1 + 1?", ({"role": "user", "content": "1 + 1?"},), {"answer": "2"}),
        Question("math:1", "And 2 + 2?", tuple(chat), {"k": [1]}),
    ]


def test_jsonl_is_streamed_and_keeps_repeated_prompts(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "x"}, "broken")
    questions = read_questions(dataset)
    assert [next(questions).prompt_id, next(questions).prompt_id] == ["a:0", "a:1"]
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: not JSON"):
        next(questions)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "not JSON .* at column 15"),
        ('["x"]', "list instead of an object"),
        (
            {"question": "x", "answer": "y"},
            r"no field 'prompt' \(prompt_key\); the line has: question, answer",
        ),
        ({"prompt": 3}, "field 'prompt' is 3; it must be a text or a list"),
        ({"prompt": "  "}, "field 'prompt' is"),
        ({"prompt": []}, r"field 'prompt' is \[\]"),
        ({"prompt": ["x"]}, "message 0 of field 'prompt'"),
        ({"prompt": [{"role": "user"}]}, "message 0 of field 'prompt'"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "message 0 of field 'prompt'"),
        (
            {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "'assistant'",
        ),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path: Path, line: Any, message: str) -> None:
    dataset = jsonl(tmp_path / "math.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(ValueError, match=rf"math\.jsonl, line 2: .*{message}"):
        list(read_questions(dataset))


def test_files_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no prompt"):
        list(read_questions(jsonl(tmp_path / "empty.jsonl", "")))
    with pytest.raises(ValueError, match=r"there is no file .*missing\.jsonl"):
        list(read_questions(DatasetConfig(kind="jsonl", path=tmp_path / "missing.jsonl")))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "café"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl, line 1: not UTF-8"):
        list(read_questions(DatasetConfig(kind="jsonl", path=latin)))


def test_reasoning_gym_questions_are_distinct_and_carry_what_scoring_needs() -> None:
    questions = list(read_questions(gym()))
    texts = [question.text for question in questions]
    assert len(texts) == len(set(texts)) <= 200  # 10 x 10 operands, + and -
    first = questions[0]
    assert first.prompt_id == "chain_sum:0"
    assert first.metadata["task"] == "chain_sum"
    assert first.metadata["task_args"] == SUMS
    assert first.metadata["entry"].keys() == {"question", "answer", "metadata"}
    assert first.metadata["entry"]["question"] == first.text
    assert questions == list(read_questions(gym()))


def test_split_is_by_the_hash_of_the_question() -> None:
    everything = {q.prompt_id: q.text for q in read_questions(gym())}
    train = {q.prompt_id: q.text for q in read_questions(gym(split="train"))}
    validation = {q.prompt_id: q.text for q in read_questions(gym(split="validation"))}
    assert train | validation == everything
    for text in everything.values():
        in_validation = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10_000 < 2_000
        assert (text in validation.values()) == in_validation
    other_seed = {q.text for q in read_questions(gym(split="validation", seed=7, size=100))}
    assert other_seed.isdisjoint(train.values())


def test_split_of_a_file_and_an_empty_split(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", *({"prompt": f"question {i}"} for i in range(100)))
    train = [q.text for q in read_questions(file.model_copy(update={"split": "train"}))]
    validation = [q.text for q in read_questions(file.model_copy(update={"split": "validation"}))]
    assert sorted(train + validation) == sorted(f"question {i}" for i in range(100))
    assert 5 < len(validation) < 40
    single = jsonl(tmp_path / "one.jsonl", {"prompt": train[0]}).model_copy(update={"split": "validation"})
    with pytest.raises(ValueError, match="none of 1 questions is in split validation"):
        list(read_questions(single))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (gym(task="chain_sums"), "no task 'chain_sums'; nearest: chain_sum"),
        (
            gym(task_args={"terms": 2}),
            r"task_args \['terms'\] are not of task chain_sum; it takes .*min_terms",
        ),
        (gym(task_args={"seed": 2}), r"task_args \['seed'\] are not of task"),
        (gym(task_args={"min_terms": 5, "max_terms": 2}), "task chain_sum refuses task_args"),
    ],
)
def test_bad_tasks(dataset: DatasetConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(read_questions(dataset))


def test_overlong_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", {"prompt": "one two three four five"}, {"prompt": "1 2 3 4 5 6"})
    with pytest.raises(ValueError, match=r"prompt a:1 has 6 tokens, .*length 10 minus .*max_new_tokens 5"):
        load(dataset)
    with caplog.at_level(logging.INFO):
        (prompt,) = load(dataset, "drop")
    assert prompt.prompt_id == "a:0"
    assert prompt.token_ids == (3, 3, 5, 4, 4)
    assert [record.message for record in caplog.records if "1 prompts, 1 too long" in record.message] != []
    with pytest.raises(ValueError, match=r"all 2 prompts are longer than policy.max_total_sequence_length 9"):
        load(dataset, "drop", total=9)


def test_keys_of_the_other_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="kind is jsonl but size is 5, which only the other kind takes"):
        DatasetConfig(kind="jsonl", path=Path("a.jsonl"), size=5)
    with pytest.raises(ValueError, match="kind is reasoning_gym but prompt_key is question"):
        gym(prompt_key="question")
    with pytest.raises(ValueError, match="path is null"):
        DatasetConfig(kind="jsonl")
    with pytest.raises(ValueError, match="size is None"):
        gym(size=None)
    again = DatasetConfig.model_validate(gym().model_dump())  # what save_config writes is accepted
    assert again == gym()
