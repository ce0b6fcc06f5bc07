"""Write a tiny Qwen3 model that can just about do the task of a run, so that GRPO has something to learn from.

``python tools/warm_start.py --config configs/quickstart.yaml [section.key=value ...]`` makes a byte-level BPE
tokenizer and a float32 model, trains it on right answers of ``data.train`` until its expected reward passes a
target, and writes a Hugging Face directory to ``policy.model_path``. A second call with the same settings does
nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from megatron_grpo.config import RunConfig, load_config
from megatron_grpo.data.chat import ChatRenderer
from megatron_grpo.data.datasets import Question, read_questions

logger = logging.getLogger("warm_start")

MARKER = "warm_start.json"  # in the written directory: the settings that it was made from
THREADS = 1  # fixed, because the order of float sums, and so the weights, depend on it
PAD, TURN_END, ROLES = "<|pad|>", "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (  # one token a role, so that a prompt is mostly its question
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IGNORED = -100

Example = tuple[
    list[int], list[int]
]  # token ids of the rendered prompt, and of the answer with the end token


@dataclass(frozen=True)
class Recipe:
    """Sizes and training; about 0.4 M parameters and 100 steps with the quickstart's task."""

    vocab_size: int = 320  # at most; what the merges leave free is filled with reserved tokens
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32  # the smallest that vLLM's attention takes
    max_positions: int = 512
    batch_size: int = 64
    lr: float = 2e-3
    warmup_steps: int = 10
    target_reward: float = 0.3  # on train problems: most groups then hold right and wrong replies
    probe_size: int = 256
    probe_every: int = 5
    max_steps: int = 400


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(argv)
    disable_progress_bar()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    try:
        warm_start(load_config(args.config, args.overrides))
    except ValueError as error:
        logger.error("%s", error)
        return 1
    return 0


def warm_start(config: RunConfig, recipe: Recipe | None = None) -> None:
    """Make ``policy.model_path`` unless a directory made from the same settings is there.

    Raises:
        ValueError: the data give no answers, the target was not reached, or the path holds something else.
    """
    recipe, path, train = recipe or Recipe(), config.policy.model_path, config.data.train
    if train.kind != "reasoning_gym":
        raise ValueError(
            f"data.train.kind is {train.kind}: a warm start needs right answers, which only reasoning_gym tasks "
            "give; train from a model of your own (policy.model_path)"
        )
    settings = {
        "data": train.model_dump(mode="json"),
        "system_prompt": config.data.system_prompt,
        "seed": config.grpo.seed,
        "recipe": asdict(recipe),
    }
    if path.exists():
        marker = path / MARKER
        if not marker.is_file():
            raise ValueError(
                f"policy.model_path {path} exists and was not made by this tool (it has no {MARKER}); give "
                "another path, or move it away"
            )
        if json.loads(marker.read_text()) == settings:
            logger.info("%s is there, made from the same settings: nothing to do", path)
            return
        logger.info("%s was made from other settings: making it again", path)

    started = time.monotonic()
    torch.set_num_threads(THREADS)
    torch.manual_seed(config.grpo.seed)
    questions = list(read_questions(train))
    tokenizer = build_tokenizer(questions, recipe.vocab_size)
    renderer = ChatRenderer(tokenizer, config.data.system_prompt)
    examples = [encode(question, renderer) for question in questions]
    model = build_model(tokenizer, recipe)
    steps, reward = fit(model, examples, recipe, seed=config.grpo.seed)
    write(path, model, tokenizer, settings)
    logger.info(
        "%s: %d parameters, vocabulary %d, expected reward %.2f on train problems after %d steps, %.1f s",
        path,
        model.num_parameters(),
        len(tokenizer),
        reward,
        steps,
        time.monotonic() - started,
    )


def build_tokenizer(questions: Sequence[Question], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with exactly ``vocab_size`` tokens and the chat template above.

    A digit is one token, as the answers need it. Between digits, merges cross words: what every prompt repeats
    becomes one token, and a prompt is mostly its question.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=len(questions) // 4,
        special_tokens=[PAD, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator((text for q in questions for text in (q.text, answer_of(q))), trainer)
    # Not special, so that a sampled one is visible in the reply's text, and wrong.
    free = range(vocab_size - core.get_vocab_size() - len(ROLES))
    names = [*ROLES, *(f"<|reserved_{i}|>" for i in free)]
    core.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=TURN_END, pad_token=PAD)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Qwen3ForCausalLM:
    """A float32 Qwen3 with random weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.num_layers,
            num_attention_heads=recipe.num_heads,
            num_key_value_heads=recipe.num_kv_heads,
            head_dim=recipe.head_dim,
            max_position_embeddings=recipe.max_positions,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def answer_of(question: Question) -> str:
    return str(question.metadata["entry"]["answer"])


def encode(question: Question, renderer: ChatRenderer) -> Example:
    answer = renderer.tokenizer.encode(answer_of(question) + TURN_END, add_special_tokens=False)
    return list(renderer.render(question.messages)), answer


def collate(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, both [B, S]; padded on the right, where causal attention needs no mask."""
    width = max(len(prompt) + len(answer) for prompt, answer in examples) - 1
    inputs = torch.zeros(len(examples), width, dtype=torch.long)
    labels = torch.full((len(examples), width), IGNORED)
    for row, (prompt, answer) in enumerate(examples):
        tokens = torch.tensor(prompt + answer)
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        labels[row, len(prompt) - 1 : len(tokens) - 1] = tokens[len(prompt) :]
    return inputs, labels


def fit(
    model: Qwen3ForCausalLM, examples: Sequence[Example], recipe: Recipe, *, seed: int
) -> tuple[int, float]:
    """Train until the expected reward on a sample of ``examples`` passes the target.

    Returns:
        The number of steps and the expected reward.

    Raises:
        ValueError: the target was not reached in ``recipe.max_steps``.
    """
    rng = random.Random(seed)
    probe = collate(rng.sample(examples, min(recipe.probe_size, len(examples))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / recipe.warmup_steps)
    )
    reward = 0.0
    model.train()
    for step in range(1, recipe.max_steps + 1):
        inputs, labels = collate(rng.choices(examples, k=recipe.batch_size))
        logits = model(input_ids=inputs, use_cache=False).logits  # [B, S, vocab]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % recipe.probe_every == 0:
            reward = expected_reward(model, *probe)
            logger.info("step %d: loss %.3f, expected reward %.3f", step, loss.item(), reward)
            if reward >= recipe.target_reward:
                return step, reward
    raise ValueError(
        f"the expected reward on train problems is {reward:.2f} after {recipe.max_steps} steps, and the warm start "
        f"stops at {recipe.target_reward}; make the task easier (data.train.task_args)"
    )


@torch.no_grad()
def expected_reward(model: Qwen3ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean probability of the right reply, the end token included: the reward of sampling at temperature 1."""
    logits = model(input_ids=inputs, use_cache=False).logits  # [B, S, vocab]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(labels).sum(-1).neg().exp().mean().item()


def write(
    path: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: dict[str, Any]
) -> None:
    """Write the directory beside ``path`` and rename it, so that ``path`` is complete or absent."""
    partial = path.with_name(f".{path.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / MARKER).write_text(json.dumps(settings, indent=2) + "\n")
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)


if __name__ == "__main__":
    sys.exit(main())
