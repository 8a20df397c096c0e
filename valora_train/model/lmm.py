"""The base model as it is trained on: hidden states, answers, and its LoRA adapters."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from valora_data.contract.base_model import BaseModel, load_model
from valora_data.cpu import cpu_multiplies_bfloat16
from valora_train.model.adapters import Adapters
from valora_train.model.encode import Encoder, visual_features
from valora_train.model.prompts import HiddenStates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from valora_train.model.prompts import Encoded, Example
    from valora_train.model.team import Team
    from valora_train.settings import LoraSettings, ModelSettings


class _Float32Attention(TorchFunctionMode):
    """Computes attention in float32 inside of autocast, which is the faster type on CPUs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value, *rest = args
        with torch.autocast(query.device.type, enabled=False):
            found = func(query.float(), key.float(), value.float(), *rest, **(kwargs or {}))
        return found.to(query.dtype)


def training_type(settings: ModelSettings) -> torch.dtype:
    """The type that training on a float32 base model multiplies matrices in (`model.precision`)."""
    if settings.precision != "auto":
        found: torch.dtype = getattr(torch, settings.precision)
        return found
    on_cpu = torch.device(settings.device).type == "cpu"
    return torch.bfloat16 if on_cpu and cpu_multiplies_bfloat16() else torch.float32


class Lmm(BaseModel):
    """A frozen base model that gives hidden states and writes answers, with LoRA adapters.

    Args:
        settings: Which model, and how it is run.
        lora: What adapters change. While they change neither the vision tower nor the projector,
            images may be encoded once and their features kept.
        team: The processes that train together; None for this one alone.

    Attributes:
        adapters: The LoRA adapters.
        coordinates: How the model writes boxes, `grid1000` or `pixels`.
        coordinate_step: What the numbers of boxes are multiples of.
        sharded: Whether its layers are sharded among several processes, which then run it
            together.

    Raises:
        BundleError: If there is no such model, or it takes no images.
    """

    def __init__(
        self, settings: ModelSettings, lora: LoraSettings, team: Team | None = None
    ) -> None:
        options: dict[str, Any] = {}
        if settings.attention != "auto":
            options["attn_implementation"] = settings.attention
        model, processor = load_model(
            settings.id,
            getattr(torch, settings.dtype),
            quantize=settings.quantize,
            device=settings.device,
            plain=True,
            **options,
        )
        super().__init__(settings.id, model, processor)
        if settings.shard and team is not None:
            # Layer by layer, and before the model moves, so that no device holds all of it.
            team.shard(self.language_model, self.language_model.layers)
        self.to(settings.device)
        self._training_type = training_type(settings)
        self._checkpointing = settings.gradient_checkpointing
        if self._checkpointing:
            # Newer versions of transformers renamed the method.
            enable = getattr(self.model, "activation_checkpointing_enable", None)
            (enable or self.model.gradient_checkpointing_enable)({"use_reentrant": False})
        self.sharded = settings.shard and team is not None and team.size > 1
        self.coordinates = settings.coordinates
        self.coordinate_step = settings.coordinate_step
        self.adapters = Adapters(self, lora)
        self._batch_size = settings.batch_size
        frozen_vision = not (lora.vision_tower or lora.projector)
        self._encoder = Encoder(
            self, settings.batch_size, keep_features=settings.keep_features and frozen_vision
        )

    @property
    def crops(self) -> bool:
        """Whether the image processor keeps only the middle of an image."""
        return bool(getattr(self.processor.image_processor, "do_center_crop", False))

    def encode(self, examples: Sequence[Example], whole: bool = True) -> list[Encoded]:
        """Turn examples into the language model's inputs, see `Encoder`."""
        return self._encoder(examples, whole)

    def states(self, batch: Sequence[Encoded], training: bool | None = None) -> HiddenStates:
        """Compute the last hidden states with the active adapter.

        Args:
            batch: Encoded examples of any lengths.
            training: Whether something learns from them, see `precision`.
        """
        self.language_model.train(self._checkpointing and torch.is_grad_enabled())
        with self.precision(training):
            embedded, visual, ids, extra = self._embed(batch)
            self.adapters.act_from([item.prompt - 1 for item in batch], ids.shape[1])
            output = self.language_model(inputs_embeds=embedded, use_cache=False, **extra)
        return HiddenStates(
            output.last_hidden_state,
            visual,
            tuple(item.prompt for item in batch),
            tuple(item.length for item in batch),
            ids,
            tuple(item.places for item in batch),
        )

    def _embed(self, batch: Sequence[Encoded]) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        # Padded on the right of a causal model: what is read never sees the padding, so no
        # attention mask is needed.
        ids = pad_sequence([item.ids for item in batch], batch_first=True).to(self.device)
        visual = pad_sequence([item.visual for item in batch], batch_first=True).to(self.device)
        embedded = self.model.get_input_embeddings()(ids)
        features, deep = visual_features(self, batch)
        embedded = embedded.masked_scatter(visual[..., None], features.to(embedded.dtype))
        extra: dict[str, Any] = {}
        if batch[0].positions is not None:
            rows = [item.positions.T for item in batch if item.positions is not None]
            positions = pad_sequence(rows, batch_first=True)
            extra["position_ids"] = positions.permute(2, 0, 1).to(self.device)
        if deep:
            extra |= self.architecture.deep_arguments(visual, deep)
        return embedded, visual, ids, extra

    @torch.no_grad()
    def write(self, batch: Sequence[Encoded], max_tokens: int) -> list[str]:
        """Write the likeliest answers, token by token (greedily), with the active adapter.

        Args:
            batch: Prompts without answers, of any lengths.
            max_tokens: Most tokens of an answer.
        """
        by_length: dict[int, list[int]] = defaultdict(list)
        for row, item in enumerate(batch):
            by_length[item.length].append(row)
        answers = [""] * len(batch)
        for rows in by_length.values():  # equal lengths need no padding
            for start in range(0, len(rows), self._batch_size):
                some = rows[start : start + self._batch_size]
                with self.precision():
                    texts = self._write([batch[row] for row in some], max_tokens)
                for row, text in zip(some, texts, strict=True):
                    answers[row] = text
        return answers

    @contextmanager
    def precision(self, training: bool | None = None) -> Iterator[None]:
        """Let adapters compute in the base model's type; their weights stay float32.

        On a base model in float32, training computes in `model.precision`, and all else in float32.

        Args:
            training: Whether something learns from the results; None: whether there are gradients.
        """
        low = self.dtype
        if low == torch.float32 and (torch.is_grad_enabled() if training is None else training):
            low = self._training_type
        if low == torch.float32:
            yield
            return
        # What one thread has cast, another one that computes beside it must not learn from.
        cache = self.device.type != "cpu"
        with torch.autocast(self.device.type, low, cache_enabled=cache), self._attention():
            yield

    def _attention(self) -> AbstractContextManager[Any]:
        # What checkpointing computes again must be computed in the same way, outside of this.
        fast = self.dtype == torch.float32 and self.device.type == "cpu" and not self._checkpointing
        return _Float32Attention() if fast else nullcontext()

    def _write(self, batch: Sequence[Encoded], max_tokens: int) -> list[str]:
        self.language_model.eval()
        embedded, _, ids, extra = self._embed(batch)
        self.adapters.act_from([item.prompt - 1 for item in batch], ids.shape[1])
        output = self.language_model(inputs_embeds=embedded, use_cache=True, **extra)
        self.adapters.act_everywhere()
        stops = torch.tensor(sorted(self.stop_ids), device=self.device)
        tokens = [self.logits(output.last_hidden_state[:, -1]).argmax(-1)]
        ended = torch.isin(tokens[0], stops)
        lasts = [item.last for item in batch]
        while len(tokens) < max_tokens and not bool(ended.all()):
            extra = {}
            if lasts[0] is not None:
                now = torch.tensor([last + len(tokens) for last in lasts if last is not None])
                extra["position_ids"] = now[None, :, None].expand(3, -1, 1).to(self.device)
            output = self.language_model(
                inputs_embeds=self.model.get_input_embeddings()(tokens[-1][:, None]),
                past_key_values=output.past_key_values,
                use_cache=True,
                **extra,
            )
            tokens.append(self.logits(output.last_hidden_state[:, -1]).argmax(-1))
            ended |= torch.isin(tokens[-1], stops)
        return [self.text_of(row) for row in torch.stack(tokens, dim=1).tolist()]
