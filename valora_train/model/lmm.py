"""The base model as it is trained on: hidden states, answers, and its LoRA adapters."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from valora_data.contract.base_model import BaseModel, load_model
from valora_data.contract.recall import write_on
from valora_data.cpu import cpu_multiplies_bfloat16
from valora_train.model.adapters import Adapters
from valora_train.model.encode import Encoder, visual_features
from valora_train.model.prompts import HiddenStates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from valora_train.model.prompts import Encoded, Example
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
        return torch.float32 if settings.precision == "float32" else torch.bfloat16
    on_cpu = torch.device(settings.device).type == "cpu"
    return torch.bfloat16 if on_cpu and cpu_multiplies_bfloat16() else torch.float32


class Lmm(BaseModel):
    """A frozen base model that gives hidden states and writes answers, with LoRA adapters."""

    def __init__(self, settings: ModelSettings, lora: LoraSettings) -> None:
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
        # Several processes then run it together.
        self.sharded = settings.shard and PartialState().num_processes > 1
        if self.sharded:  # layer by layer, and before it moves, so that no device holds all of it
            _shard(self.language_model, torch.device(settings.device).type)
        self.to(settings.device)
        self._training_type = training_type(settings)
        self._checkpointing = settings.gradient_checkpointing
        if self._checkpointing:
            # Newer versions of transformers renamed the method.
            enable = getattr(self.model, "activation_checkpointing_enable", None)
            (enable or self.model.gradient_checkpointing_enable)({"use_reentrant": False})
        self.coordinates = settings.coordinates  # how it writes boxes
        self.coordinate_step = settings.coordinate_step  # their numbers are multiples of this
        self.batch_size = settings.batch_size
        self.adapters = Adapters(self, lora)
        # Else adapters change the features of images, which cannot be kept.
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
        """Compute the last hidden states with the active adapter; `training`: see `precision`."""
        self.language_model.train(self._checkpointing and torch.is_grad_enabled())
        with self.precision(training):
            ids, visual, output = self._run(batch, use_cache=False)
        return HiddenStates.of(batch, output.last_hidden_state, visual, ids)

    def _run(self, batch: Sequence[Encoded], use_cache: bool) -> tuple[Tensor, Tensor, Any]:
        """Token ids, which of them are visual, and the language model's output."""
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
        self.adapters.act_from([item.prompt - 1 for item in batch], ids.shape[1])
        output = self.language_model(inputs_embeds=embedded, use_cache=use_cache, **extra)
        return ids, visual, output

    @torch.no_grad()
    def write(self, batch: Sequence[Encoded], max_tokens: int) -> list[str]:
        """Write the likeliest answers, token by token (greedily), with the active adapter."""
        self.language_model.eval()
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row, item in enumerate(batch):
            alike[item.length, item.end].append(row)
        answers = [""] * len(batch)
        for (_, end), rows in alike.items():  # equal lengths need no padding
            for start in range(0, len(rows), self.batch_size):
                some = rows[start : start + self.batch_size]
                with self.precision():
                    _, _, output = self._run([batch[row] for row in some], use_cache=True)
                    self.adapters.act_everywhere()
                    texts = write_on(
                        self, output.last_hidden_state, output.past_key_values, end, max_tokens
                    )
                for row, text in zip(some, texts, strict=True):
                    answers[row] = text
        return answers

    @contextmanager
    def precision(self, training: bool | None = None) -> Iterator[None]:
        """Let adapters compute in the base model's type; their weights stay float32.

        On a base model in float32, training (None: what has gradients) computes in
        `model.precision`, and all else in float32.
        """
        low = self.dtype
        if low == torch.float32 and (torch.is_grad_enabled() if training is None else training):
            low = self._training_type
        if low == torch.float32:
            yield
            return
        on_cpu = self.device.type == "cpu"
        # What checkpointing computes again must be computed in the same way, outside of this.
        fast = on_cpu and self.dtype == torch.float32 and not self._checkpointing
        # What one thread has cast, another one that computes beside it must not learn from.
        with (
            torch.autocast(self.device.type, low, cache_enabled=not on_cpu),
            _Float32Attention() if fast else nullcontext(),
        ):
            yield


def _shard(decoder: Any, device: str) -> None:
    """Shard the layers of the frozen decoder (FSDP2); a layer is gathered while it runs.

    Adapters that are added later, and the weights beside the layers, are whole on every process.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (PartialState().num_processes,))
    inside = {weight for layer in decoder.layers for weight in layer.parameters()}
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()) - inside)
