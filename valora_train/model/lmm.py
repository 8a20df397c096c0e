"""The large multimodal model: LLaVA or the Qwen-VL family, and the LoRA adapters on it."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from valora_data.contract.base_model import base_folder
from valora_data.contract.grid_pooling import places_of
from valora_data.errors import BundleError, DataError
from valora_train.model.prompts import Encoded, HiddenStates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from PIL.Image import Image

    from valora_train.model.prompts import Example
    from valora_train.model.team import Team
    from valora_train.settings import LoraSettings, ModelSettings

PIXELS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
TEMPORAL = "second_per_grid_ts"


class Lmm:
    """A frozen LMM whose last hidden states can be read, and which writes.

    The prompt stands *before* the image: in a causal language model, visual tokens that follow
    the prompt know what is asked of them, so that a linear head on them can answer in one pass.
    (Chat templates that put images first, such as that of LLaVA-1.5, are left as they are.)

    Args:
        settings: Which model.
        lora: What will be adapted. While neither the vision tower nor the projector is, images
            may be encoded once and their features kept.
        team: The processes that train together; this one alone if None.

    Attributes:
        model: The transformers model.
        processor: Its processor.
        width: Size of the hidden states.
        coordinates: How it writes boxes, `grid1000` or `pixels`.
        coordinate_step: What the numbers of boxes are multiples of.
        parted: Whether its layers lie on several processes, which then run it together.

    Raises:
        BundleError: If there is no such model, or it takes no images.
    """

    def __init__(
        self, settings: ModelSettings, lora: LoraSettings, team: Team | None = None
    ) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        source = base_folder(settings.id)
        extra: dict[str, Any] = {}
        if settings.attention != "auto":
            extra["attn_implementation"] = settings.attention
        try:
            self.processor: Any = AutoProcessor.from_pretrained(source)
            self.model: Any = AutoModelForImageTextToText.from_pretrained(
                source, dtype=getattr(torch, settings.dtype), **extra
            )
        except (OSError, ValueError, ImportError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise BundleError(f"cannot load base model {settings.id}: {reason}") from error
        self.tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        check_image_token(settings.id, self.model.config, self.processor)
        self._core = self.model.model
        self._text = self._core.language_model
        self.model.requires_grad_(False).eval()
        if settings.shard and team is not None:
            team.part(self._text, self._text.layers)  # layer by layer, so that no device holds all
        self.model.to(settings.device)
        self._checkpointing = settings.gradient_checkpointing
        if self._checkpointing:
            # Newer transformers have another name for it.
            enable = getattr(self.model, "activation_checkpointing_enable", None)
            (enable or self.model.gradient_checkpointing_enable)({"use_reentrant": False})
        self.parted = settings.shard and team is not None and team.size > 1
        self._batch_size = settings.batch_size
        self._adapts_vision = lora.vision_tower or lora.projector
        self._keeps_features = settings.keep_features and not self._adapts_vision
        self._lora = lora
        self._prompts: dict[tuple[str, int], Tensor] = {}
        self._endings: dict[str, Tensor] = {}
        config = self.model.config
        self._image_token = int(config.image_token_id)
        self._video_token = getattr(config, "video_token_id", None)
        self._three = hasattr(self._core, "get_rope_index")
        self.width = int(config.get_text_config().hidden_size)
        self.device: torch.device = self.model.device
        self.coordinates = settings.coordinates
        self.coordinate_step = settings.coordinate_step
        vision = config.vision_config
        side = 0 if self._three else vision.image_size // vision.patch_size
        self._square = (side, side)

    @property
    def crops(self) -> bool:
        """Whether the image processor cuts off what is not in the middle of an image."""
        return bool(getattr(self.processor.image_processor, "do_center_crop", False))

    def grid_of(self, image: Image) -> tuple[int, int]:
        """Rows and columns of visual tokens of an image."""
        if not self._three:
            return self._square
        grid = self.processor.image_processor(image, return_tensors="pt")["image_grid_thw"][0]
        merge = int(self.model.config.vision_config.spatial_merge_size)
        return int(grid[1]) // merge, int(grid[2]) // merge

    # --- from questions to tokens and features ------------------------------------------------

    def encode(self, examples: Sequence[Example], whole: bool = True) -> list[Encoded]:
        """Turn questions into what the language model takes.

        Args:
            examples: With images of any size.
            whole: Whether what follows the last visual token is read too; heads on visual tokens
                do without.

        Returns:
            One for each example, in order.
        """
        found: list[Encoded] = []
        for batch in _batches(examples, self._batch_size):
            part = [self._tokens(example) for example in batch] if self._three else (
                self._fixed(batch)
            )  # fmt: skip
            if not whole:
                part = [_cut(item) for item in part]
            if self._keeps_features:
                with torch.no_grad():
                    part = self._with_features(part)
            found += part
        return found

    def _fixed(self, batch: Sequence[Example]) -> list[Encoded]:
        """Where every image has the same number of visual tokens."""
        images = [image for example in batch for image in example.images]
        pixels = self.processor.image_processor(images, return_tensors="pt")["pixel_values"]
        pixels = pixels.to(self.device, self.model.dtype)
        found = []
        for example, part in zip(
            batch, pixels.split([len(example.images) for example in batch]), strict=True
        ):
            ids = self._prompt(example.question, len(example.images))
            seen = (part.shape[-1], part.shape[-2])
            item = Encoded(
                ids,
                ids == self._image_token,
                len(ids),
                seen,
                self._square,
                places_of(*self._square, len(example.images)),
                {PIXELS[0]: part},
            )
            found.append(self._with_answer(item, example))
        return found

    def _prompt(self, question: str, images: int) -> Tensor:
        """Token ids of a question and images, up to where the answer begins: (length,)."""
        key = (question, images)
        if key not in self._prompts:
            from PIL import Image

            text = self._render(question, "image", images)
            blank = [Image.new("RGB", (8, 8))] * images
            row = self._process(text, images=blank)["input_ids"][0]
            expected = images * self._square[0] * self._square[1]
            if int((row == self._image_token).sum()) != expected:
                raise BundleError(
                    f"expected {expected} visual tokens for {images} images, got "
                    f"{int((row == self._image_token).sum())}: check the processor of the base "
                    "model"
                )
            self._prompts[key] = row
        return self._prompts[key]

    def _render(self, question: str, kind: str, count: int, answer: str | None = None) -> str:
        parts = [{"type": "text", "text": question}, *[{"type": kind}] * count]
        turns: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        if answer is not None:
            said = [{"type": "text", "text": answer}]
            turns.append({"role": "assistant", "content": said})
        text = self.processor.apply_chat_template(turns, add_generation_prompt=answer is None)
        return str(text)

    def _process(self, text: str, **media: Any) -> Any:
        bos = self.tokenizer.bos_token
        return self.processor(
            text=[text],
            return_tensors="pt",
            # Chat templates write the first token themselves.
            add_special_tokens=not (bool(bos) and text.startswith(bos)),
            **media,
        )

    def _tokens(self, example: Example) -> Encoded:
        """Where the number of visual tokens follows from the size of an image."""
        if example.video:
            frames = np.stack([np.asarray(frame) for frame in example.images])
            media: dict[str, Any] = {
                "videos": [frames], "videos_kwargs": {"do_sample_frames": False},
            }  # fmt: skip
            text = self._render(example.question, "video", 1)
        else:
            media = {"images": list(example.images)}
            text = self._render(example.question, "image", len(example.images))
        inputs = self._process(text, **media)
        ids = inputs["input_ids"][0]
        kinds = torch.zeros_like(inputs["input_ids"], dtype=torch.int32)
        kinds[inputs["input_ids"] == self._image_token] = 1
        kinds[inputs["input_ids"] == self._video_token] = 2
        pixels = {key: inputs[key] for key in PIXELS if key in inputs}
        grids = {key: value for key, value in pixels.items() if key.endswith("thw")}
        all_grids = next(iter(grids.values()))
        grid = all_grids[0]
        if TEMPORAL in inputs:
            grids[TEMPORAL] = torch.as_tensor(inputs[TEMPORAL])
        positions, _ = self._core.get_rope_index(inputs["input_ids"], kinds, **grids)
        vision = self.model.config.vision_config
        merge, patch = int(vision.spatial_merge_size), int(vision.patch_size)
        item = Encoded(
            ids,
            kinds[0] > 0,
            len(ids),
            (int(grid[2]) * patch, int(grid[1]) * patch),
            (int(grid[1]) // merge, int(grid[2]) // merge),
            torch.cat(
                [
                    places_of(rows // merge, columns // merge, times)
                    for times, rows, columns in all_grids.tolist()
                ]
            ),
            {key: value.to(self.device) for key, value in pixels.items()},
            positions=positions[:, 0],
        )
        return self._with_answer(item, example)

    def _with_answer(self, item: Encoded, example: Example) -> Encoded:
        if example.answer is None:
            return item
        answer = self._ending(example.answer(item.seen))
        positions = item.positions
        if positions is not None:
            more = int(positions.max()) + 1 + torch.arange(len(answer))
            positions = torch.cat([positions, more.expand(3, -1)], dim=1)
        return replace(
            item,
            ids=torch.cat([item.ids, answer]),
            visual=torch.cat([item.visual, torch.zeros(len(answer), dtype=torch.bool)]),
            positions=positions,
        )

    def _ending(self, answer: str) -> Tensor:
        """Token ids of an answer as the chat template writes it, with the token that ends it."""
        if answer not in self._endings:
            before = self._render("?", "image", 0)
            after = self._render("?", "image", 0, answer)
            text = after.removeprefix(before) if after.startswith(before) else answer
            end = self.tokenizer.eos_token or ""
            text = text.rstrip()
            text = (text.removesuffix(end) if end else text).rstrip()
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            self._endings[answer] = torch.tensor([*ids, self.tokenizer.eos_token_id])
        return self._endings[answer]

    # --- from pixels to features ---------------------------------------------------------------

    def _with_features(self, batch: Sequence[Encoded]) -> list[Encoded]:
        features, deep = self._features(batch)
        counts = [int(item.visual.sum()) for item in batch]
        layers = [layer.split(counts) for layer in deep]
        return [
            replace(
                item, features=part, deep=tuple(layer[row] for layer in layers), pixels={}
            )
            for row, (item, part) in enumerate(zip(batch, features.split(counts), strict=True))
        ]  # fmt: skip

    def _features(self, batch: Sequence[Encoded]) -> tuple[Tensor, list[Tensor]]:
        """Visual features of a batch in order, (tokens, width), and what deeper layers get."""
        if batch[0].features is not None:
            deep = [torch.cat(layer) for layer in zip(*(item.deep for item in batch), strict=True)]
            return torch.cat([item.features for item in batch if item.features is not None]), deep
        names = list(batch[0].pixels)
        if any(list(item.pixels) != names for item in batch):
            parts = [self._features([item]) for item in batch]
            layers = zip(*(deep for _, deep in parts), strict=True)
            return torch.cat([part for part, _ in parts]), [torch.cat(layer) for layer in layers]
        inputs = {name: torch.cat([item.pixels[name] for item in batch]) for name in names}
        inputs[names[0]] = inputs[names[0]].to(self.device, self.model.dtype)
        video = names[0] == "pixel_values_videos"
        function = self._core.get_video_features if video else self._core.get_image_features
        output = function(**inputs, return_dict=True)
        deep = [
            layer if torch.is_tensor(layer) else torch.cat(tuple(layer))
            for layer in getattr(output, "deepstack_features", None) or ()
        ]
        return torch.cat(list(output.pooler_output)), deep

    # --- through the language model ------------------------------------------------------------

    def states(self, batch: Sequence[Encoded]) -> HiddenStates:
        """Last hidden states, with whatever adapter is active.

        Args:
            batch: Of any lengths.
        """
        self._text.train(self._checkpointing and torch.is_grad_enabled())
        with self._precision():
            embedded, visual, ids, extra = self._embed(batch)
            output = self._text(inputs_embeds=embedded, use_cache=False, **extra)
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
        features, deep = self._features(batch)
        embedded = embedded.masked_scatter(visual[..., None], features.to(embedded.dtype))
        extra: dict[str, Any] = {}
        if batch[0].positions is not None:
            rows = [item.positions.T for item in batch if item.positions is not None]
            positions = pad_sequence(rows, batch_first=True)
            extra["position_ids"] = positions.permute(2, 0, 1).to(self.device)
        if deep:
            extra |= {"visual_pos_masks": visual, "deepstack_visual_embeds": deep}
        return embedded, visual, ids, extra

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, width) → (…, vocabulary) float32."""
        logits: Tensor = self.model.lm_head(hidden)
        return logits.float()

    @torch.no_grad()
    def write(self, batch: Sequence[Encoded], max_tokens: int) -> list[str]:
        """The likeliest answers, token by token (greedy), with whatever adapter is active.

        Args:
            batch: Prompts without answers, of any lengths.
            max_tokens: Longest answer.
        """
        by_length: dict[int, list[int]] = defaultdict(list)
        for row, item in enumerate(batch):
            by_length[item.length].append(row)
        answers = [""] * len(batch)
        for rows in by_length.values():  # equal lengths need no padding
            for start in range(0, len(rows), self._batch_size):
                some = rows[start : start + self._batch_size]
                for row, text in zip(
                    some, self._continue([batch[row] for row in some], max_tokens), strict=True
                ):
                    answers[row] = text
        return answers

    def _precision(self) -> AbstractContextManager[Any]:
        """Where the base is of 16 bits, adapters compute in it; their weights stay float32."""
        if self.model.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.model.dtype)

    def _continue(self, batch: Sequence[Encoded], max_tokens: int) -> list[str]:
        with self._precision():
            return self._write(batch, max_tokens)

    def _write(self, batch: Sequence[Encoded], max_tokens: int) -> list[str]:
        self._text.eval()
        embedded, _, _, extra = self._embed(batch)
        output = self._text(inputs_embeds=embedded, use_cache=True, **extra)
        stops = torch.tensor(sorted(self._stops()), device=self.device)
        tokens = [self.logits(output.last_hidden_state[:, -1]).argmax(-1)]
        ended = torch.isin(tokens[0], stops)
        lasts = [item.last for item in batch]
        while len(tokens) < max_tokens and not bool(ended.all()):
            extra = {}
            if lasts[0] is not None:
                now = torch.tensor([last + len(tokens) for last in lasts if last is not None])
                extra["position_ids"] = now[None, :, None].expand(3, -1, 1).to(self.device)
            output = self._text(
                inputs_embeds=self.model.get_input_embeddings()(tokens[-1][:, None]),
                past_key_values=output.past_key_values,
                use_cache=True,
                **extra,
            )
            tokens.append(self.logits(output.last_hidden_state[:, -1]).argmax(-1))
            ended |= torch.isin(tokens[-1], stops)
        stop = set(stops.tolist())
        texts = []
        for row in torch.stack(tokens, dim=1).tolist():
            end = next((i for i, token in enumerate(row) if token in stop), len(row))
            texts.append(self.tokenizer.decode(row[:end], skip_special_tokens=True).strip())
        return texts

    def _stops(self) -> set[int]:
        found = getattr(self.model.generation_config, "eos_token_id", None)
        ids = found if isinstance(found, list) else [found]
        return {int(i) for i in [*ids, self.tokenizer.eos_token_id] if i is not None}

    # --- adapters -------------------------------------------------------------------------------

    def adapt(self, name: str, seed: int) -> None:
        """Add a LoRA adapter that changes nothing yet (B = 0).

        Args:
            name: Its name.
            seed: Seed of A.
        """
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=self._lora.rank,
            lora_alpha=self._lora.alpha,
            use_rslora=self._lora.rslora,
            target_modules=target_pattern(self._lora),
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if not hasattr(self, "peft"):
                self.peft: Any = get_peft_model(self.model, config, adapter_name=name)
            else:
                self.peft.add_adapter(name, config)
        self._stay_in_precision()
        self.activate(name)

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter from a PEFT folder."""
        from peft import PeftModel

        if not hasattr(self, "peft"):
            self.peft = PeftModel.from_pretrained(self.model, folder, adapter_name=name)
        else:
            self.peft.load_adapter(folder, adapter_name=name)
        self._stay_in_precision()

    def _stay_in_precision(self) -> None:
        """Cast LoRA's few weights (autocast) and not, as PEFT does, the many activations."""
        if self.model.dtype == torch.float32:
            return
        for module in self.model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False

    def activate(self, name: str | None) -> None:
        """Make an adapter the one that acts, or none."""
        if not hasattr(self, "peft"):
            return
        if name is None:
            self.peft.base_model.disable_adapter_layers()
            return
        self.peft.base_model.enable_adapter_layers()
        self.peft.set_adapter(name)

    def save_adapter(self, name: str, folder: Path, base: str) -> None:
        """Write an adapter in PEFT's format, such that plain PEFT loads it onto the base.

        Args:
            name: The adapter.
            folder: Where `adapter_config.json` and `adapter_model.safetensors` go.
            base: Id of the base model, which the configuration names.
        """
        from peft.utils import get_peft_model_state_dict
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        weights = get_peft_model_state_dict(self.peft, adapter_name=name)
        save_file(
            {key: value.detach().cpu().contiguous() for key, value in weights.items()},
            folder / "adapter_model.safetensors",
            {"format": "pt"},
        )
        config = copy.copy(self.peft.peft_config[name])
        config.base_model_name_or_path = base
        config.inference_mode = True
        config.save_pretrained(folder)

    def remove(self, name: str) -> None:
        """Delete an adapter."""
        self.peft.delete_adapter(name)

    def lora_parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """An adapter's weights by module path, e.g. ``…layers.0.self_attn.q_proj.lora_A``."""
        suffix = f".{name}.weight"
        return {
            key.removesuffix(suffix): value
            for key, value in self.model.named_parameters()
            if key.endswith(suffix) and ".lora_" in key
        }


def target_pattern(lora: LoraSettings) -> str:
    """The regular expression, over full module names, of what PEFT shall adapt.

    It names the parts of LLaVA (``vision_tower``, ``multi_modal_projector``) and of the Qwen-VL
    family (``visual.blocks``, ``visual…merger``).
    """
    parts = [rf".*language_model.*\.({'|'.join(map(re.escape, lora.targets))})"]
    if lora.vision_tower:
        parts.append(r".*vision_tower.*\.(q_proj|k_proj|v_proj|out_proj)")
        parts.append(r".*visual\.blocks.*\.attn\.(qkv|proj)")
    if lora.projector:
        parts.append(r".*multi_modal_projector\.linear_[12]")
        parts.append(r".*visual\..*merger.*\.(mlp\.[02]|linear_fc[12])")
    return "|".join(f"({part})" for part in parts)


def check_image_token(base: str, config: Any, processor: Any) -> None:
    """See to it that a model takes images, and that its tokenizer keeps their placeholder whole.

    Raises:
        BundleError: If not.
    """
    token = getattr(config, "image_token_id", None)
    tokenizer = getattr(processor, "tokenizer", None)
    if token is None or tokenizer is None or not hasattr(processor, "image_processor"):
        raise BundleError(
            f"base model {base} has no image token, so it takes no images: choose a LLaVA or "
            "Qwen-VL model"
        )
    word = str(getattr(processor, "image_token", None) or tokenizer.convert_ids_to_tokens(token))
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if ids != [token]:
        raise BundleError(
            f"the tokenizer of base model {base} splits the image token {word!r} into {len(ids)} "
            f"tokens instead of the one with id {token}: add it to the tokenizer as a special token"
        )


def _batches(examples: Sequence[Example], most: int) -> Iterator[Sequence[Example]]:
    """Examples with at most so many images together, at least one at a time."""
    start = images = 0
    for at, example in enumerate(examples):
        if at > start and images + len(example.images) > most:
            yield examples[start:at]
            start, images = at, 0
        images += len(example.images)
        if not example.images:
            raise DataError("an example has no image, or a video no frames: leave it out")
    if examples:
        yield examples[start:]


def _cut(item: Encoded) -> Encoded:
    """Without what follows the last visual token; nothing before it sees that."""
    end = int(torch.nonzero(item.visual)[-1]) + 1
    positions = None if item.positions is None else item.positions[:, :end]
    return replace(
        item, ids=item.ids[:end], visual=item.visual[:end], prompt=end, positions=positions
    )
