"""Language models without a vision side: Gemma 3, Llama, Mistral, Qwen2 and Qwen3."""

from collections.abc import Mapping, Sequence
from typing import Any

from valora_data.errors import BundleError
from valora_data.models.base import Architecture

# What chat templates would choose by themselves: Llama 3.2's writes the date of today, which no
# adapter was trained with, and Qwen3's lets the model think before it answers.
TEMPLATE = {"date_string": "26 Jul 2024", "enable_thinking": False}


class TextModel(Architecture):
    """A causal language model: ``lm_head`` of its output is logits, attention causal."""

    takes_images = False
    auto = "AutoModelForCausalLM"
    decoder = "model"

    def load_processor(self, source: str) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source)

    def render(self, processor: Any, messages: Sequence[Mapping[str, Any]], generate: bool) -> str:
        if not processor.chat_template:
            raise BundleError(
                f"the tokenizer of base model {processor.name_or_path} has no chat template: use "
                "the model's instruct version, or save the tokenizer with a chat_template; "
                "/v1/completions needs none"
            )
        turns = [{**turn, "content": _text_of(turn["content"])} for turn in messages]
        return str(
            processor.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=generate, **TEMPLATE
            )
        )

    def language_model(self, model: Any) -> Any:
        return model.model


def _text_of(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
