"""Any of transformers' LMMs, as the engine uses it: prompts in, visual features, hidden states."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from valora_data.contract.bundle import base_folder
from valora_data.contract.grid_pooling import places_of
from valora_data.errors import BundleError
from valora_kernels.launching import has_dependent_launch
from valora_serve.catalogue.adapters import ModelTargets
from valora_serve.errors import ImageError, RequestError
from valora_serve.memory.block_manager import Span
from valora_serve.model.attention.base import register_attention
from valora_serve.model.linears import Linears

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from PIL.Image import Image

    from valora_serve.model.attention.base import AttentionPlan
    from valora_serve.types import Request


@dataclass(frozen=True, slots=True)
class Visual:
    """An image or a video in a prompt, not yet encoded.

    Attributes:
        kind: ``image`` or ``video``.
        key: Content hash of what the encoder sees.
        tensors: What the encoder takes.
        at: [tokens] int64, the prompt's tokens that it stands for.
        size: Width and height of the image as it was sent, in pixels.
    """

    kind: str
    key: bytes
    tensors: dict[str, Tensor]
    at: NDArray[np.int64]
    size: tuple[int, int]

    def spans(self, key: bytes) -> list[Span]:
        """Runs of its tokens, for the prefix cache.

        Args:
            key: What else changes what the model sees of it.
        """
        cuts = np.flatnonzero(np.diff(self.at) != 1) + 1
        runs = np.split(self.at, cuts)
        return [
            Span(int(run[0]), int(run[-1]) + 1, self.key + b"|%d|" % number + key)
            for number, run in enumerate(runs)
        ]


@dataclass(frozen=True, slots=True)
class VisualFeatures:
    """An encoded image or video.

    Attributes:
        embeddings: [tokens, width], what stands in the prompt.
        deep: For some first layers what is added to their outputs, each [tokens, width] (Qwen3-VL).
    """

    embeddings: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        parts = (self.embeddings, *self.deep)
        return sum(part.numel() * part.element_size() for part in parts)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, ready for the engine.

    Attributes:
        ids: Its tokens, with as many placeholders as an image has visual tokens.
        visuals: Its images and videos.
        positions: [3, tokens] int64 for models with positions in time, height and width; None
            where the position is the token's index.
        delta: Position minus index of what is generated.
    """

    ids: list[int]
    visuals: tuple[Visual, ...] = ()
    positions: NDArray[np.int64] | None = None
    delta: int = 0


@dataclass(slots=True)
class VisualRows:
    """What a forward pass sees besides tokens.

    Attributes:
        rows: Rows of the step that are visual.
        embeddings: [rows, width].
        deep: Added to the outputs of the first layers, each [rows, width].
    """

    rows: Tensor
    embeddings: Tensor
    deep: list[Tensor] = field(default_factory=list)


class Lmm:
    """A base model.

    Args:
        base: ``tiny``, a folder or a hub name.
        dtype: Of the weights and of the computation.
        device: Where.

    Attributes:
        base: The same.
        device: The same.
        dtype: The same.
        processor: transformers' processor.
        tokenizer: Its tokenizer.
        linears: Everything that adapters can change.
        targets: The same by the names that adapters on disk have for it.
        width: Of the hidden states.
        layers: Of the language model.
        heads: Query heads of its attention.
        kv_heads: Heads of keys and values.
        head_dim: Width of a head.
        vocabulary: Number of logits.
        context_length: Tokens of the longest sequence, prompt and answer together.
        stop_ids: Tokens that end an answer.
        grid: Rows and columns of visual tokens, where all images have the same.

    Raises:
        BundleError: No such model, or one of a kind that cannot be served.
    """

    def __init__(self, base: str, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.base, self.device, self.dtype = base, device, dtype
        source = base_folder(base)
        try:
            self.processor: Any = AutoProcessor.from_pretrained(source)
            model: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=dtype)
        except (OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise BundleError(f"cannot load base model {base}: {reason}") from error
        self._take(model)

    @classmethod
    def of(cls, model: Any, processor: Any, device: torch.device, base: str = "custom") -> Lmm:
        """Wrap a model that is in memory already, e.g. with random weights for a benchmark."""
        self = cls.__new__(cls)
        self.base, self.device, self.dtype = base, device, model.dtype
        self.processor = processor
        self._take(model)
        return self

    def _take(self, model: Any) -> None:
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.model = model.requires_grad_(False).eval().to(self.device)
        self._core = model.model
        self._text = (
            model.get_decoder()
            if not hasattr(self._core, "language_model")
            else (self._core.language_model)
        )
        text = model.config.get_text_config()
        self._refuse_windows(text)
        text._attn_implementation = register_attention()
        self.width = int(text.hidden_size)
        self.layers = int(text.num_hidden_layers)
        self.heads = int(text.num_attention_heads)
        self.kv_heads = int(getattr(text, "num_key_value_heads", None) or self.heads)
        self.head_dim = int(getattr(text, "head_dim", None) or self.width // self.heads)
        self.vocabulary = int(model.lm_head.weight.shape[0])
        self.context_length = int(text.max_position_embeddings)
        self.stop_ids = self._stop_ids()
        self._image_token = getattr(model.config, "image_token_id", None)
        self._video_token = getattr(model.config, "video_token_id", None)
        self._three = hasattr(self._core, "get_rope_index")
        parts = self._parts()
        wanted = {
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name.startswith(tuple(parts))
        }
        self.targets = ModelTargets.of(model, wanted)
        self.linears = Linears.of(model, parts)
        vision = getattr(model.config, "vision_config", None)
        self.grid: tuple[int, int] | None = None
        if vision is not None and hasattr(vision, "image_size") and not self._three:
            side = int(vision.image_size) // int(vision.patch_size)
            self.grid = (side, side)

    def _refuse_windows(self, text: Any) -> None:
        window = getattr(text, "sliding_window", None)
        uses = getattr(text, "use_sliding_window", window is not None)
        if window and uses and window < text.max_position_embeddings:
            raise BundleError(
                f"base model {self.base} attends in windows of {window} tokens, which paged "
                "attention here does not do: use a model with full attention"
            )

    def _parts(self) -> dict[str, str]:
        """Modules whose linears adapters may change."""
        names = dict(self.model.named_modules())
        text = next(name for name, module in names.items() if module is self._text)
        parts = {f"{text}.layers": "text"}
        for leaf in ("vision_tower", "visual", "multi_modal_projector"):
            parts |= {name: "vision" for name in names if name.split(".")[-1] == leaf}
        return parts

    def _stop_ids(self) -> frozenset[int]:
        found = getattr(self.model.generation_config, "eos_token_id", None)
        ids = found if isinstance(found, list) else [found]
        return frozenset(int(i) for i in [*ids, self.tokenizer.eos_token_id] if i is not None)

    # ------------------------------------------------------------------ prompts

    def prepare(self, request: Request, prompt: str | None = None) -> Prompt:
        """Make tokens and pixels of a request.

        Args:
            request: The question.
            prompt: The domain's own, put before images that come without any text.

        Raises:
            RequestError: Nothing or too much is asked, or placeholders and images differ.
        """
        given = [request.messages is not None, request.text is not None,
                 request.token_ids is not None]  # fmt: skip
        if sum(given) > 1:
            raise RequestError("request: give one of messages, text and token_ids")
        if request.token_ids is not None:
            return self._from_ids(request)
        if request.text is not None:
            return self._process(request.text, request.images, request.videos)
        messages = request.messages
        if messages is None:
            if not (request.images or request.videos) or prompt is None:
                raise RequestError("request: nothing is asked: give messages, text or token_ids")
            parts: list[dict[str, Any]] = [{"type": "text", "text": prompt}]
            parts += [{"type": "image"} for _ in request.images]
            parts += [{"type": "video"} for _ in request.videos]
            messages = [{"role": "user", "content": parts}]
        videos = request.videos
        images = list(request.images)
        if videos and self._video_token is None:
            messages, images = _frames_as_images(messages, images, videos)
            videos = ()
        messages = _normal(messages)
        try:
            text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        except Exception as error:
            raise RequestError(f"messages do not fit the chat template: {error}") from error
        return self._process(str(text), images, videos)

    def _from_ids(self, request: Request) -> Prompt:
        if request.images or request.videos:
            raise RequestError("token_ids: images need text or messages")
        ids = [int(i) for i in request.token_ids or ()]
        if not ids:
            raise RequestError("token_ids: expected at least one token, got none")
        wrong = next((i for i in ids if not 0 <= i < self.vocabulary), None)
        if wrong is not None:
            raise RequestError(f"token_ids: expected 0 to {self.vocabulary - 1}, got {wrong}")
        return Prompt(ids)

    def _process(
        self, text: str, images: Sequence[Image], videos: Sequence[Sequence[Image]]
    ) -> Prompt:
        self._check_places("images", self._image_token, text, len(images))
        self._check_places("videos", self._video_token, text, len(videos))
        if not (images or videos):
            ids = self.tokenizer(text, add_special_tokens=not self._has_bos(text))["input_ids"]
            if not ids:
                raise RequestError("prompt: expected some text, got none")
            return Prompt([int(i) for i in ids])
        kwargs: dict[str, Any] = {}
        if images:
            kwargs["images"] = list(images)
        try:
            if videos:
                kwargs["videos"] = [np.stack([np.asarray(f) for f in frames]) for frames in videos]
                kwargs["videos_kwargs"] = {"do_sample_frames": False}
            inputs = self.processor(
                text=[text],
                **kwargs,
                return_tensors="pt",
                add_special_tokens=not self._has_bos(text),
            )
        except (ValueError, TypeError, StopIteration, IndexError) as error:
            raise ImageError(f"images and prompt do not fit each other: {error}") from error
        ids = inputs["input_ids"][0]
        visuals = self._visuals(inputs, ids, images, videos)
        positions, delta = None, 0
        if self._three:
            grids = {k: inputs[k] for k in ("image_grid_thw", "video_grid_thw") if k in inputs}
            kinds = torch.zeros_like(inputs["input_ids"], dtype=torch.int32)
            kinds[inputs["input_ids"] == self._image_token] = 1
            kinds[inputs["input_ids"] == self._video_token] = 2
            if "second_per_grid_ts" in inputs:
                seconds = torch.as_tensor(inputs["second_per_grid_ts"])
                grids["second_per_grid_ts"] = seconds
            three, change = self._core.get_rope_index(inputs["input_ids"], kinds, **grids)
            positions, delta = three[:, 0].numpy(), int(change[0, 0])
        return Prompt(ids.tolist(), tuple(visuals), positions, delta)

    def _check_places(self, kind: str, token: int | None, text: str, given: int) -> None:
        """Whether a prompt names as many images or videos as were sent; not all processors ask."""
        if token is None:
            if given:
                raise RequestError(f"base model {self.base} takes no {kind} in such a prompt")
            return
        named = text.count(self.tokenizer.convert_ids_to_tokens(token))
        if named != given:
            raise RequestError(f"prompt: names {named} {kind}, but {given} were sent")

    def _has_bos(self, text: str) -> bool:
        """Chat templates write the first token themselves; tokenizers would add another."""
        bos = self.tokenizer.bos_token
        return bool(bos) and text.startswith(bos)

    def _visuals(
        self,
        inputs: Any,
        ids: Tensor,
        images: Sequence[Image],
        videos: Sequence[Sequence[Image]],
    ) -> list[Visual]:
        """Cut the processor's output into images and videos."""
        found: list[Visual] = []
        kinds = (
            ("image", self._image_token, "pixel_values", [image.size for image in images]),
            ("video", self._video_token, "pixel_values_videos", [v[0].size for v in videos]),
        )
        for kind, token, pixels, sizes in kinds:
            grids = f"{kind}_grid_thw"
            if pixels not in inputs:
                continue
            at = np.flatnonzero(ids.numpy() == token)
            if grids in inputs:
                grid = inputs[grids]
                pieces = list(inputs[pixels].split(grid.prod(-1).tolist()))
                merge = int(self.model.config.vision_config.spatial_merge_size) ** 2
                counts = (grid.prod(-1) // merge).tolist()
                tensors = [
                    {pixels: piece, grids: row[None]}
                    for piece, row in zip(pieces, grid, strict=True)
                ]
            else:
                if len(inputs[pixels]) != len(sizes):
                    raise RequestError(
                        f"base model {self.base} cuts images into several parts, which is not "
                        "served: use LLaVA-1.5 or the Qwen-VL family"
                    )
                tensors = [{pixels: piece[None]} for piece in inputs[pixels]]
                counts = [len(at) // len(sizes)] * len(sizes)
            if len(sizes) != len(tensors) or sum(counts) != len(at):
                raise RequestError(
                    f"prompt: expected a place for each of {len(sizes)} {kind}s, "
                    f"got {len(at)} visual tokens for {sum(counts)}"
                )
            places = np.split(at, np.cumsum(counts)[:-1])
            for one, place, size in zip(tensors, places, sizes, strict=True):
                found.append(Visual(kind, _hash(kind, one), one, place, size))
        return sorted(found, key=lambda visual: int(visual.at[0]))

    def places(self, visual: Visual) -> Tensor:
        """Where in the image its visual tokens lie: [tokens], see `grid_pooling.places_of`."""
        grid = visual.tensors.get(f"{visual.kind}_grid_thw")
        if grid is None:
            assert self.grid is not None
            return places_of(*self.grid)
        merge = int(self.model.config.vision_config.spatial_merge_size)
        times, rows, columns = grid[0].tolist()
        return places_of(rows // merge, columns // merge, times)

    # ------------------------------------------------------------------ computing

    def encode(self, visuals: Sequence[Visual]) -> list[VisualFeatures]:
        """Encode images of several requests together.

        The caller sets their adapters with `linears.scope.vision`.

        Args:
            visuals: All of one kind, and of one shape where the encoder wants a rectangle.
        """
        names = list(visuals[0].tensors)
        inputs = {
            name: torch.cat([visual.tensors[name] for visual in visuals]).to(self.device)
            for name in names
        }
        pixels = names[0]
        inputs[pixels] = inputs[pixels].to(self.dtype)
        video = visuals[0].kind == "video"
        function = self._core.get_video_features if video else self._core.get_image_features
        output = function(**inputs, return_dict=True)
        parts = list(output.pooler_output)
        counts = [len(part) for part in parts]
        # Cut by image or not, as transformers' version has it.
        deep = [
            (layer if torch.is_tensor(layer) else torch.cat(tuple(layer))).split(counts)
            for layer in getattr(output, "deepstack_features", None) or ()
        ]
        return [
            VisualFeatures(one, tuple(layer[row] for layer in deep))
            for row, one in enumerate(parts)
        ]

    def hidden(
        self, ids: Tensor, positions: Tensor, plan: AttentionPlan, visual: VisualRows | None = None
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:
            ids: [rows] int64.
            positions: [rows] or, for models with three, [3, rows] int64.
            plan: Attention of this step.
            visual: Images among the rows.

        Returns:
            [rows, width].
        """
        return self.forward(self.embed(ids, visual), positions, plan, visual)

    def embed(self, ids: Tensor, visual: VisualRows | None = None) -> Tensor:
        """What goes into the first layer: [rows, width]."""
        embedded: Tensor = self._text.get_input_embeddings()(ids)
        if visual is None:
            return embedded
        return embedded.index_copy(0, visual.rows, visual.embeddings.to(embedded.dtype))

    def forward(
        self,
        embedded: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        visual: VisualRows | None = None,
    ) -> Tensor:
        """From the first layer to the final norm; arguments as in `hidden`.

        Args:
            embedded: [rows, width], what `embed` says.
            positions: As in `hidden`.
            plan: As in `hidden`.
            visual: For what images add to the first layers.

        Returns:
            [rows, width].
        """
        extra: dict[str, Any] = {}
        if visual is not None and visual.deep:
            mask = torch.zeros(1, len(embedded), dtype=torch.bool, device=embedded.device)
            mask[0, visual.rows] = True
            extra = {"visual_pos_masks": mask, "deepstack_visual_embeds": visual.deep}
        positions = positions[:, None] if positions.ndim > 1 else positions[None]
        output = self._text(
            inputs_embeds=embedded[None],
            position_ids=positions,
            use_cache=False,
            plan=plan,
            **extra,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def compile_layers(self) -> None:
        """Fuse what lies between products and attention: norms, rotations, activations, sums.

        transformers' layers stay as they are; torch compiles them at their first use. From compute
        capability 9.0 on kernels start while those before them still end.
        """
        early = has_dependent_launch(self.device)
        torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 64)
        for layer in self._text.layers:
            layer.compile(dynamic=True, options={"triton.enable_pdl": early})

    @property
    def three_positions(self) -> bool:
        """Whether a token's position has three parts."""
        return self._three

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, width] → [rows, vocabulary] float32."""
        logits: Tensor = self.model.lm_head(hidden)
        return logits.float()


def _hash(kind: str, tensors: dict[str, Tensor]) -> bytes:
    digest = hashlib.sha256(kind.encode())
    for tensor in tensors.values():
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.digest()


def _normal(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Contents as lists of parts, which all chat templates of LMMs read."""
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]}
        if isinstance(turn.get("content"), str)
        else dict(turn)
        for turn in messages
    ]


def _frames_as_images(
    messages: Sequence[dict[str, Any]],
    images: Sequence[Image],
    videos: Sequence[Sequence[Image]],
) -> tuple[list[dict[str, Any]], list[Image]]:
    """For models without videos: a video's frames are so many images in its place."""
    image, video = iter(images), iter(videos)
    turns, found = [], []
    for turn in messages:
        content = turn.get("content")
        if isinstance(content, str):
            turns.append(dict(turn))
            continue
        parts: list[dict[str, Any]] = []
        for part in content or ():
            if part.get("type") == "video":
                frames = next(video, ())
                parts += [{"type": "image"} for _ in frames]
                found += list(frames)
                continue
            if part.get("type") == "image":
                found += [one for one in [next(image, None)] if one is not None]
            parts.append(part)
        turns.append({**turn, "content": parts})
    return turns, found
