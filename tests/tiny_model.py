"""A tiny random Qwen3 on disk, with a tokenizer: what the end-to-end tests serve, train and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE with isolated digits; the end token is ``<|im_end|>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    text = ["user\nassistant\nState the final answer to the following arithmetic problem: 3 + 4 = 7"] * 4
    tokenizer.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_tiny_model(
    directory: Path, *, tied: bool = False, seed: int = 0, vocab_size: int = 320, **config: Any
) -> Path:
    """Writes config, float32 weights and tokenizer of a random two-layer Qwen3 (about 0.5M parameters).

    Weights are large enough (std 0.08) that the output distribution is far from uniform. With ``num_experts``
    it is a Qwen3-MoE with two experts per token.
    """
    tokenizer = tiny_tokenizer(vocab_size)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
    }
    family: Any = (Qwen3Config, Qwen3ForCausalLM)
    if "num_experts" in config:
        family = (Qwen3MoeConfig, Qwen3MoeForCausalLM)
        sizes |= {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}
    hf_config = family[0](
        vocab_size=vocab_size,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **(sizes | config),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family[1](hf_config).float()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
