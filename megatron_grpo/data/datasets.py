"""Prompt datasets: questions from a JSONL file or from reasoning-gym, rendered to :class:`Prompt` objects."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_grpo.config import DataConfig, DatasetConfig
from megatron_grpo.data.chat import ChatRenderer, Message
from megatron_grpo.types import Prompt

logger = logging.getLogger(__name__)

_SPLIT_BUCKETS = 10_000


@dataclass(frozen=True)
class Question:
    """A prompt before it is rendered. ``text`` is the last message; ``metadata`` goes to the environment."""

    prompt_id: str
    text: str
    messages: tuple[Message, ...]
    metadata: dict[str, Any]


def load_prompts(
    data: DataConfig,
    which: Literal["train", "validation"],
    renderer: ChatRenderer,
    *,
    max_total_sequence_length: int,
    max_new_tokens: int,
) -> list[Prompt]:
    """All prompts of ``data.train`` or ``data.validation``, in the order of the source.

    Raises:
        ValueError: the source can't be read, a prompt leaves no room for ``max_new_tokens`` and
            ``data.overlong_prompts`` is error, or no prompt is left; names the line or prompt and the keys.
    """
    dataset = getattr(data, which)
    if dataset is None:
        raise ValueError(f"data.{which} is null; give a dataset")
    limit = max_total_sequence_length - max_new_tokens
    budget = (
        f"policy.max_total_sequence_length {max_total_sequence_length} minus generation.max_new_tokens "
        f"{max_new_tokens} leaves {limit}"
    )
    prompts, dropped = [], 0
    for question in read_questions(dataset):
        try:
            token_ids = renderer.render(question.messages)
        except ValueError as error:
            raise ValueError(f"data.{which}: prompt {question.prompt_id}: {error}") from None
        if len(token_ids) <= limit:
            prompts.append(Prompt(question.prompt_id, token_ids, question.text, question.metadata))
        elif data.overlong_prompts == "drop":
            dropped += 1
        else:
            raise ValueError(
                f"data.{which}: prompt {question.prompt_id} has {len(token_ids)} tokens, but {budget}; "
                "change one of them, or set data.overlong_prompts: drop"
            )
    if not prompts:
        raise ValueError(f"data.{which}: all {dropped} prompts are longer than {budget}; change one of them")
    logger.info("data.%s: %d prompts, %d too long and dropped (%s)", which, len(prompts), dropped, budget)
    return prompts


def read_questions(dataset: DatasetConfig) -> Iterator[Question]:
    """The questions of ``dataset.split``, one at a time.

    A question is in the validation split iff the hash of its text falls below ``validation_fraction``, so
    train and validation share no question, whatever their sizes and seeds.

    Raises:
        ValueError: names the file and line, or the task, and the mend; also when no question is in the split.
    """
    total = selected = 0
    for question in _read_jsonl(dataset) if dataset.kind == "jsonl" else _generate(dataset):
        total += 1
        if dataset.split == "all" or dataset.split == _split_of(question.text, dataset.validation_fraction):
            selected += 1
            yield question
    source = dataset.path if dataset.kind == "jsonl" else f"task {dataset.task}"
    if not total:
        raise ValueError(f"{source} holds no prompt; give one JSON object per line")
    if not selected:
        raise ValueError(
            f"{source}: none of {total} questions is in split {dataset.split} with "
            f"validation_fraction {dataset.validation_fraction}; use more questions or split: all"
        )


def _split_of(text: str, validation_fraction: float) -> str:
    bucket = int(hashlib.sha256(text.encode()).hexdigest(), 16) % _SPLIT_BUCKETS
    return "validation" if bucket < _SPLIT_BUCKETS * validation_fraction else "train"


# --- JSONL ---


def _read_jsonl(dataset: DatasetConfig) -> Iterator[Question]:
    path = Path(dataset.path or "")
    if not path.is_file():
        raise ValueError(
            f"there is no file {path} (looked for in {Path.cwd()}); give the path of a JSONL file"
        )
    index = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield _parse(line, dataset.prompt_key, f"{path.stem}:{index}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            index += 1


def _parse(line: bytes, prompt_key: str, prompt_id: str) -> Question:
    try:
        fields = json.loads(line.rstrip())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno}); each line is one object") from None
    if not isinstance(fields, dict):
        raise ValueError(f'{type(fields).__name__} instead of an object; write {{"{prompt_key}": ..., ...}}')
    if prompt_key not in fields:
        raise ValueError(
            f"no field '{prompt_key}' (prompt_key); the line has: {', '.join(fields) or 'nothing'}"
        )
    prompt = fields.pop(prompt_key)
    messages = _messages(prompt, prompt_key)
    return Question(prompt_id, messages[-1]["content"], messages, fields)


def _messages(prompt: Any, prompt_key: str) -> tuple[Message, ...]:
    if isinstance(prompt, str) and prompt.strip():
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(
            f"field '{prompt_key}' is {json.dumps(prompt)[:60]}; it must be a text or a list of chat messages"
        )
    for position, message in enumerate(prompt):
        if not (isinstance(message, dict) and {type(message.get(k)) for k in ("role", "content")} == {str}):
            raise ValueError(
                f"message {position} of field '{prompt_key}' is {json.dumps(message)[:60]}; a message is "
                '{"role": "user", "content": "..."} with texts'
            )
    if prompt[-1]["role"] != "user":
        raise ValueError(
            f"the last message of field '{prompt_key}' has role '{prompt[-1]['role']}'; the policy answers a "
            "user: move a reference answer to a field of its own"
        )
    return tuple(prompt)


# --- reasoning-gym ---


def _generate(dataset: DatasetConfig) -> Iterator[Question]:
    # Here, because its import takes seconds (sympy, matplotlib) that JSONL data need not wait for.
    from reasoning_gym.factory import DATASETS, create_dataset

    task, args = dataset.task or "", dataset.task_args
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(near)}" if near else "see the dataset gallery of reasoning-gym"
        raise ValueError(f"reasoning-gym has no task '{task}'; {hint}")
    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    unknown = args.keys() - known
    if unknown:
        raise ValueError(
            f"task_args {sorted(unknown)} are not of task {task}; it takes {', '.join(sorted(known))} (size "
            "and seed are keys of the dataset itself)"
        )
    try:
        entries = create_dataset(task, size=dataset.size, seed=dataset.seed, **args)
    except (AssertionError, TypeError, ValueError) as error:  # how the tasks refuse a configuration
        raise ValueError(f"task {task} refuses task_args {args}: {error}") from None
    seen: set[str] = set()
    for index, entry in enumerate(entries):
        text = entry["question"]
        if text not in seen:
            seen.add(text)
            metadata = {"task": task, "task_args": args, "entry": entry}
            yield Question(f"{task}:{index}", text, ({"role": "user", "content": text},), metadata)
    logger.info("task %s: %d problems generated, %d distinct", task, dataset.size, len(seen))
