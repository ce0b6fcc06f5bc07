from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_grpo.data.chat import ChatRenderer, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(path: Path, template: str | None) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=259,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("model"), TEMPLATE))


def test_renders_the_generation_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    token_ids = ChatRenderer(tokenizer).render([{"role": "user", "content": "3 + 4 ="}])
    assert token_ids[0] == 1  # <|im_start|>
    assert tokenizer.decode(token_ids) == "<|im_start|>user\n3 + 4 =<|im_end|>\n<|im_start|>assistant\n"
    # three marks, and one token for each byte of: user, newline, question, newline, assistant, newline
    assert len(token_ids) == 3 + 4 + 1 + 7 + 1 + 9 + 1


def test_system_prompt_unless_the_conversation_has_one(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tokenizer, system_prompt="Be brief.")
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "Be long."}
    assert tokenizer.decode(renderer.render([user])).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    own = tokenizer.decode(renderer.render([system, user]))
    assert own.startswith("<|im_start|>system\nBe long.<|im_end|>\n<|im_start|>user\nhi")


def test_what_the_template_refuses_is_said(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="chat template refuses the messages: no tools here"):
        ChatRenderer(tokenizer).render([{"role": "tool", "content": "x"}])


def test_directories_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no chat template; .*chat_template.jinja"):
        load_tokenizer(save_tokenizer(tmp_path / "base", None))
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)
