"""Chat messages to token ids, by the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

Message = dict[str, str]


def load_tokenizer(model_path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in ``model_path/tokenizer.json``, from local files only.

    Not through AutoTokenizer, whose import takes five times as long.

    Raises:
        ValueError: there is no tokenizer.json, or it has no chat template.
    """
    if not (model_path / "tokenizer.json").is_file():
        raise ValueError(
            f"policy.model_path {model_path} has no tokenizer.json; copy it from the model's repository, or "
            "write it with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
        model_path, local_files_only=True
    )
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer in policy.model_path {model_path} has no chat template; use an instruction-tuned "
            "model, or put a chat_template.jinja beside tokenizer.json"
        )
    return tokenizer


class ChatRenderer:
    """Renders conversations that end with the header of the assistant's turn.

    Args:
        tokenizer: has a chat template.
        system_prompt: put before conversations that have no system message of their own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, system_prompt: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of ``messages`` and the generation prompt.

        Raises:
            ValueError: the template refuses the messages or renders no token.
        """
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            token_ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=False
            )
        except TemplateError as error:
            raise ValueError(f"the tokenizer's chat template refuses the messages: {error}") from None
        if not token_ids:
            raise ValueError("the tokenizer's chat template renders the messages to no token")
        return tuple(token_ids)
