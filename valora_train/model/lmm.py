"""The base model as it is trained on: inputs, hidden states, answers, and its LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from valora_data.contract.base_model import BaseModel, load_model
from valora_data.contract.contexts import tail_tokens
from valora_data.contract.label_head import places_of
from valora_data.contract.recall import write_on
from valora_data.cpu import cpu_multiplies_bfloat16
from valora_data.errors import BundleError, DataError
from valora_data.models.base import IMAGE, PIXELS, VIDEO
from valora_data.wording import plural
from valora_train.model.adapters import Adapters
from valora_train.model.prompts import Encoded, Example, HiddenStates, alike
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
        attention = None if settings.attention == "auto" else settings.attention
        model, processor = load_model(
            settings.id, getattr(torch, settings.dtype), quantize=settings.quantize,
            device=settings.device, plain=True, attn_implementation=attention,
        )  # fmt: skip
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
        # While adapters leave the vision tower alone, images are encoded once: up to a projector
        # that adapters change. Else their pixels stay on the host, since those of some thousand
        # images would fill a GPU.
        name = self.architecture.token_projector if lora.projector else ""
        self._projector = getattr(self.model.model, name, None) if name else None
        fixed = not lora.vision_tower and (self._projector is not None or not lora.projector)
        self._keep = settings.keep_features and fixed
        self._place = self.device if self._keep else torch.device("cpu")
        self._answers: dict[str, Tensor] = {}
        self._prompts: dict[tuple[str, int], Tensor] = {}

    @property
    def crops(self) -> bool:
        """Whether the image processor keeps only the middle of an image."""
        images = getattr(self.processor, "image_processor", None)
        cut = getattr(images, "do_center_crop", False)
        return bool(cut) and not self.architecture.in_crops

    def encode(self, examples: Sequence[Example], whole: bool = True) -> list[Encoded]:
        """Turn examples, whose images may have any size, into the language model's inputs.

        The question precedes the images (unless the chat template puts these first), so that heads
        on visual tokens know it; they do without the tokens behind the last of them (`whole`).
        """
        if examples and not any(example.images or example.video for example in examples):
            return [self._worded(example) for example in examples]
        found: list[Encoded] = []
        for batch in _batches(examples, self.batch_size):
            if self.fixed_grid is None:
                part = [self._processed(example) for example in batch]
            else:
                part = self._on_fixed_grid(batch, self.fixed_grid)
            if not whole:
                part = [_cut(item) for item in part]
            found += self._with_features(part) if self._keep else part
        return found

    def _worded(self, example: Example) -> Encoded:
        """Encode a question without images, or the tail of one about a context, with the answer."""
        turns = [{"role": "user", "content": [{"type": "text", "text": example.question}]}]
        made = tail_tokens(self, turns) if example.context else self.tokenize(self.render(turns))
        ids, none = torch.tensor(made), torch.zeros(0, dtype=torch.int64)
        seen = torch.zeros_like(ids, dtype=torch.bool)
        positions = None
        if self.three_positions and not example.context:
            positions = torch.arange(len(ids)).expand(3, -1)
        item = Encoded(ids, seen, len(ids), (0, 0), (0, 0), none, none, positions=positions)
        return self._with_answer(item, example)

    def _render(self, question: str, kind: str, count: int, answer: str | None = None) -> str:
        parts = [{"type": "text", "text": question}, *[{"type": kind}] * count]
        turns: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        if answer is not None:
            said = [{"type": "text", "text": answer}]
            turns.append({"role": "assistant", "content": said})
        return self.render(turns, generate=answer is None)

    def _on_fixed_grid(self, batch: Sequence[Example], grid: tuple[int, int]) -> list[Encoded]:
        """Encode examples with fixed grids together: 0.64 ms an image; `_processed` takes 2.3."""
        images = [image for example in batch for image in example.images]
        pixels = self.processor.image_processor(images, return_tensors="pt")[PIXELS[IMAGE]]
        parts = pixels.to(self._place, self.dtype).split([len(one.images) for one in batch])
        found = []
        for example, part in zip(batch, parts, strict=True):
            key = example.question, len(part)
            if key not in self._prompts:
                text, blank = self._render(key[0], IMAGE, key[1]), Image.new("RGB", (8, 8))
                self._prompts[key] = self.process(text, [blank] * key[1])["input_ids"][0]
            ids, places = self._prompts[key], places_of(*grid, len(part))
            visual = ids == self.image_token
            cells = visual.nonzero()[:, 0]
            self._check_tokens(len(places), len(cells), len(part))
            size, kept = (part.shape[-1], part.shape[-2]), {PIXELS[IMAGE]: part}
            item = Encoded(ids, visual, len(ids), size, grid, cells, places, kept)
            found.append(self._with_answer(item, example))
        return found

    def _check_tokens(self, expected: int, found: int, images: int) -> None:
        if expected != found:
            text = f"expected {expected} visual tokens for {images} images, got {found}: check the"
            raise BundleError(f"{text} processor of the base model")

    def _processed(self, example: Example) -> Encoded:
        """Encode an example by the processor, which knows how many tokens each image has."""
        video = example.video and self.video_token is not None
        kind, token = (VIDEO, self.video_token) if video else (IMAGE, self.image_token)
        text = self._render(example.question, kind, 1 if video else len(example.images))
        width, height = example.images[0].size
        shown = f"{plural(len(example.images), 'image')} of {width} × {height} pixels"
        try:
            if video:
                inputs = self.process(text, videos=[example.images])
            else:
                inputs = self.process(text, example.images)
            visual = inputs["input_ids"][0] == token
            parts = self.architecture.split(kind, inputs, int(visual.sum()), self.config)
        except ValueError as error:
            text = f"base model {self.base} cannot take {shown}, so cut or pad such images, or"
            raise DataError(f"{text} leave them out: {error}") from error
        ids = inputs["input_ids"][0]
        if len(ids) > self.context_length:
            raise DataError(
                f"{shown} are {len(ids)} tokens with the question, but base model {self.base} "
                f"reads at most {self.context_length}: set a smaller size in its processor, which "
                "makes fewer crops, or use another model"
            )
        grids = [part.grid for part in parts if part.grid is not None]
        if len(grids) < len(parts):
            raise BundleError(
                f"base model {self.base} does not say how its visual tokens lie in an image: "
                "register its architecture, with the grid, in valora.architectures"
            )
        places = torch.cat([places_of(rows, columns, times) for times, rows, columns in grids])
        counts = [part.tokens for part in parts]
        self._check_tokens(sum(counts), int(visual.sum()), len(parts))
        own = zip(visual.nonzero()[:, 0].split(counts), parts, strict=True)
        cells = torch.cat([at if part.cells is None else at[part.cells] for at, part in own])
        pixels = {
            name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors
        }
        pixels = {
            name: part.to(self._place, self.dtype if part.is_floating_point() else part.dtype)
            for name, part in pixels.items()
        }
        positions = (self.architecture.positions(self.model, inputs, self.config) or (None,))[0]
        item = Encoded(
            ids, visual, len(ids), parts[0].size, grids[0][1:], cells, places, pixels,
            positions=positions,
        )  # fmt: skip
        return self._with_answer(item, example)

    def _with_answer(self, item: Encoded, example: Example) -> Encoded:
        if example.answer is not None:
            answer, positions = self._answer(example.answer(item.seen)), item.positions
            if positions is not None:
                more = int(positions.max()) + 1 + torch.arange(len(answer))
                positions = torch.cat([positions, more.expand(3, -1)], dim=1)
            seen = torch.cat([item.visual, torch.zeros_like(answer, dtype=torch.bool)])
            ids = torch.cat([item.ids, answer])
            item = replace(item, ids=ids, visual=seen, positions=positions)
        if item.length > self.context_length:
            what = "has positions for" if self.window is None else "attends in windows of"
            raise DataError(
                f"an example has {item.length} tokens with its answer, but base model {self.base} "
                f"{what} {self.context_length}, and is served up to it: shorten it, or use another"
            )
        self.check_tokens(item.ids)
        return item

    def _answer(self, answer: str) -> Tensor:
        """The token ids of an answer as the chat template writes it, with its end token."""
        if answer not in self._answers:
            tokenizer = self.tokenizer
            if tokenizer.eos_token is None:
                text = f"the tokenizer of base model {self.base} has no eos_token, which is to end"
                raise BundleError(f"{text} answers: save it with one")
            text = self._render("?", IMAGE, 0, answer)
            before = self._render("?", IMAGE, 0)
            text = (text.removeprefix(before) if text.startswith(before) else answer).rstrip()
            text = text.removesuffix(tokenizer.eos_token or "").rstrip()
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            self._answers[answer] = torch.tensor([*ids, tokenizer.eos_token_id])
        return self._answers[answer]

    @torch.no_grad()
    def _with_features(self, batch: Sequence[Encoded]) -> list[Encoded]:
        """Replace pixels by features, those that the projector reads if adapters change it."""
        seen: list[Tensor] = []
        with ExitStack() as watched:
            if self._projector is not None:
                watched.enter_context(self.adapters.none_active())  # nothing reads their results
                hook = self._projector.register_forward_pre_hook(
                    lambda _, given: seen.append(given[0].flatten(0, -2))
                )
                watched.callback(hook.remove)
            features, deep = self._visual_features(batch)
        features = torch.cat(seen) if seen else features
        short = features.bfloat16()
        features = short if torch.equal(short.to(features.dtype), features) else features
        counts = [int(item.visual.sum()) for item in batch]
        rows = zip(*(part.split(counts) for part in (features, *deep)), strict=True)
        return [
            replace(item, features=first, deep=tuple(others), pixels={})
            for item, (first, *others) in zip(batch, rows, strict=True)
        ]

    def states(self, batch: Sequence[Encoded], training: bool | None = None) -> HiddenStates:
        """Compute the last hidden states with the active adapter; `training`: see `precision`."""
        self.language_model.train(self._checkpointing and torch.is_grad_enabled())
        with self.precision(training):
            ids, output = self._run(batch, use_cache=False)
        return HiddenStates.of(batch, output.last_hidden_state, ids)

    def _run(self, batch: Sequence[Encoded], use_cache: bool) -> tuple[Tensor, Any]:
        """Token ids, and the language model's output."""
        # Padded on the right of a causal model: what is read never sees the padding, so no
        # attention mask is needed.
        ids = pad_sequence([item.ids for item in batch], batch_first=True).to(self.device)
        visual = pad_sequence([item.visual for item in batch], batch_first=True).to(self.device)
        embedded = self.model.get_input_embeddings()(ids)
        features, deep = self._visual_features(batch)
        embedded = embedded.masked_scatter(visual[..., None], features.to(embedded.dtype))
        extra: dict[str, Any] = {}
        if batch[0].positions is not None:
            rows = [item.positions.T for item in batch if item.positions is not None]
            positions = pad_sequence(rows, batch_first=True)
            extra["position_ids"] = positions.permute(2, 0, 1).to(self.device)
        if deep:
            extra |= self.architecture.deep_arguments(visual, deep)
        extra |= self.architecture.attention(self.model, embedded, visual)
        self.adapters.act_from([item.prompt - 1 for item in batch], ids.shape[1])
        output = self.language_model(inputs_embeds=embedded, use_cache=use_cache, **extra)
        return ids, output

    def _visual_features(self, batch: Sequence[Encoded]) -> tuple[Tensor, list[Tensor]]:
        """Visual features of a batch, and those for each of the first layers, kept or made now."""
        batch = [item for item in batch if bool(item.visual.any())]
        if not batch:
            return torch.zeros(0, self.width, dtype=self.dtype, device=self.device), []
        if batch[0].features is not None:
            kept = zip(*((item.features, *item.deep) for item in batch), strict=True)
            features, *deep = (torch.cat(parts).to(self.dtype) for parts in kept)
            return features if self._projector is None else self._projector(features), deep
        names = list(batch[0].pixels)
        if any(list(item.pixels) != names for item in batch):  # images and videos
            found = [self._visual_features([item]) for item in batch]
            layers = zip(*(deep for _, deep in found), strict=True)
            return torch.cat([part for part, _ in found]), [torch.cat(layer) for layer in layers]
        parts, deep = self.visual_features([item.pixels for item in batch])
        return torch.cat(parts), deep

    @torch.no_grad()
    def write(self, batch: Sequence[Encoded], max_tokens: int) -> list[str]:
        """Write the likeliest answers, token by token (greedily), with the active adapter."""
        self.language_model.eval()
        answers = [""] * len(batch)
        # Equal lengths need no padding.
        for rows in alike([(item.length, item.end) for item in batch], self.batch_size):
            with self.precision():
                _, output = self._run([batch[row] for row in rows], use_cache=True)
                self.adapters.act_everywhere()
                hidden, cache = output.last_hidden_state, output.past_key_values
                room = max(self.context_length - batch[rows[0]].length, 1)
                most = min(max_tokens, room)
                texts = write_on(self, hidden, cache, batch[rows[0]].end, most)
            for row, text in zip(rows, texts, strict=True):
                answers[row] = text
        return answers

    @contextmanager
    def precision(self, training: bool | None = None) -> Iterator[None]:
        """Let adapters compute in the base model's type, or training in `model.precision`."""
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
    """Shard the frozen decoder's layers (FSDP2), each gathered while it runs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (PartialState().num_processes,))
    inside = {weight for layer in decoder.layers for weight in layer.parameters()}
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()) - inside)


def _batches(examples: Sequence[Example], most: int) -> Iterator[Sequence[Example]]:
    """Yield examples with at most `most` images together, but at least one example."""
    start = images = 0
    for at, example in enumerate(examples):
        if not example.images:
            raise DataError("an example has no image, or a video no frames: leave it out")
        if at > start and images + len(example.images) > most:
            yield examples[start:at]
            start, images = at, 0
        images += len(example.images)
    if examples:
        yield examples[start:]


def _cut(item: Encoded) -> Encoded:
    """Remove the tokens behind the last visual token; no token before them sees them."""
    end = int(torch.nonzero(item.visual)[-1]) + 1
    positions = None if item.positions is None else item.positions[:, :end]
    return replace(
        item, ids=item.ids[:end], visual=item.visual[:end], prompt=end, positions=positions
    )
