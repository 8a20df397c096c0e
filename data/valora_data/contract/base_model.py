"""A base model: how training and serving load it, prompt it and read it, in one place."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.contract import quantized
from valora_data.contract.files import expanded
from valora_data.errors import BundleError, DataError, ValoraError
from valora_data.hashing import file_hash, hash_files
from valora_data.models.base import IMAGE, PIXELS, VIDEO, Architecture
from valora_data.models.registry import architecture_of, family_of
from valora_data.wording import first_line, plural

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor

SHIPPED = ("tiny", "photo")  # base models that are part of the package
SMOL = "smol"  # whose halves are packages
# Suffixes of the files that tokenizers, processors and further heads are read from.
PROCESSOR_FILES = {".jinja", ".json", ".model", ".py", ".safetensors", ".tiktoken", ".txt"}
_MARK = "\ufdd0"  # a noncharacter of Unicode
_KEPT = "\u2060"  # a word joiner, in tokens that are found when the mark has been dropped
MANY_PIXELS = 4_000_000  # images of more together are processed one by one, in less memory


def base_folder(base: str) -> str:
    """The folder or the name on the hub that a base model's id stands for; or a `BundleError`."""
    if not base:
        raise BundleError("the base model's name is empty: name a folder, or a model on the hub")
    if base in SHIPPED:
        return str(Path(__file__).parents[1] / base)
    if base == SMOL:
        from valora_data.models import smol

        return str(smol.folder())
    path = expanded(base)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BundleError(f"{base} holds no config.json: name a folder with a saved model")
        return str(path)
    if base.startswith((".", "/", "~")):
        raise BundleError(f"base model folder {base} does not exist: check the path")
    return base


def base_family(base: str) -> Architecture:
    """Return the family of a base model, of which the configuration alone is read."""
    try:
        return _described(base, base_folder(base))[1]
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot load base model {base}: {first_line(error)}") from error


def _described(base: str, source: str) -> tuple[dict[str, Any], Architecture]:
    from transformers import PretrainedConfig
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(source):  # which the model's hash does not cover
        text = f"base model {base} holds adapter_config.json, which transformers would apply"
        raise BundleError(f"{text}: merge it into the model, or move it away")
    described: dict[str, Any] = PretrainedConfig.get_config_dict(source)[0]
    return described, family_of(str(described.get("model_type")), base)


def base_hash(base: str) -> str:
    """Return the sha256 of config.json and model*.safetensors, in hexadecimal."""
    folder = _local_folder(base)
    if not (weights := sorted(folder.glob("model*.safetensors"))):
        raise BundleError(f"{base} holds no model*.safetensors: save the model as safetensors")
    named = "".join(f"{file.name}{file_hash(file)}" for file in (folder / "config.json", *weights))
    return hashlib.sha256(named.encode()).hexdigest()


def processor_hash(base: str) -> str:
    """Return the sha256 of what else in a base model's folder decides on inputs and outputs."""
    folder = _local_folder(base)
    weights = ("config.json", "figures.json", "model*.safetensors", "*.index.json")
    files = (file for file in folder.rglob("[!.]*") if file.suffix in PROCESSOR_FILES)
    read = [file for file in files if file.is_file() and not any(map(file.match, weights))]
    return hash_files(read, folder)


def _local_folder(base: str) -> Path:
    folder = Path(base_folder(base))
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(base, allow_patterns=["*.json", "*.safetensors"]))


def load_model(
    base: str,
    dtype: torch.dtype,
    *,
    quantize: str | None = None,
    device: torch.device | str = "cpu",
    read: Callable[..., Any] | None = None,
    plain: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Load model and processor, onto the CPU; or one quantized to 4 bits (``nf4``) onto its device.

    `read` stands for ``from_pretrained``; `plain` refuses a quantised model; or a `BundleError`.
    """
    import valora_data.models.lite_tower  # noqa: F401 (registers it with transformers)

    source = base_folder(base)
    try:
        # Imports the package that registers it, which may bring the transformers model along.
        described, family = _described(base, source)
        if plain:
            quantized.check_plain(base, described)
        processor = family.load_processor(source)
        if quantize is not None:
            options |= quantized.loading_options(base, source, dtype, device)
        read = read or family.auto_class().from_pretrained
        model, found = read(source, dtype=dtype, output_loading_info=True, **options)
    except ValoraError:
        raise
    except Exception as error:  # of a damaged file, libraries raise whatever they trip over
        raise BundleError(f"cannot load base model {base}: {first_line(error)}") from error
    if absent := sorted(found["missing_keys"]):  # transformers would draw them at random
        text = f"base model {base} lacks {plural(len(absent), 'weight')} of its architecture"
        raise BundleError(f"{text}, such as {absent[0]}: name a complete model")
    if family.takes_images:
        check_image_token(base, model.config, processor)
    if quantize is not None:
        quantized.prepare_packed(model)
    return model, processor


def check_image_token(base: str, config: Any, processor: Any) -> None:
    """Check that a model takes images and that its tokenizer keeps their placeholder whole."""
    token = getattr(config, "image_token_id", None)
    tokenizer = getattr(processor, "tokenizer", None)
    if token is None or tokenizer is None or not hasattr(processor, "image_processor"):
        text = f"base model {base} has no image token, so it takes no images: choose a"
        raise BundleError(f"{text} LLaVA, SmolVLM, InternVL or Qwen-VL model")
    word = str(getattr(processor, "image_token", None) or tokenizer.convert_ids_to_tokens(token))
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    # Gemma 3's processor writes an image's tokens behind the one that begins it.
    if ids not in ([token], [getattr(config, "boi_token_id", token)]):
        raise BundleError(
            f"the tokenizer of base model {base} splits the image token {word!r} into {len(ids)} "
            f"tokens instead of the one with id {token}: add it to the tokenizer as a special token"
        )


class _ImageProcessor:
    """Keeps an image processor's last output, of which processors drop parts."""

    def __init__(self, image_processor: Any, one_by_one: bool) -> None:
        self._image_processor, self._one_by_one = image_processor, one_by_one
        self.made: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._image_processor, name)

    def __call__(self, images: Sequence[Any], *others: Any, **options: Any) -> Any:
        if self.made is None:
            function = self._each if self._one_by_one else self._image_processor
            self.made = function(images, *others, **options)
        return copy.copy(self.made)

    def _each(self, images: Sequence[Any], *others: Any, **options: Any) -> Any:
        import numpy as np
        import torch

        parts, nested = [], isinstance(images[0], list)  # nested: the images of one prompt
        for image in images[0] if nested else images:
            one = image
            if image.mode == "RGB" and getattr(self, "backend", "") == "torchvision":
                one = torch.empty((3, image.height, image.width), dtype=torch.uint8)
                for channel, plane in enumerate(one.numpy()):  # which it would copy three times
                    plane[:] = np.asarray(image.getchannel(channel))
            parts.append(self._image_processor([[one] if nested else one], *others, **options))
        found = parts[0]
        of_prompts = int(nested and found[PIXELS[IMAGE]].dim() == 5)  # not so with Gemma 3
        for name in list(found):
            values = [part[name] for part in parts]
            if not torch.is_tensor(values[0]):
                found[name] = [[one for value in values for one in value[0]]]
                continue
            if not nested and values[0].dim() == 5:  # filled up to the most crops
                longest, pad = max(value.shape[1] for value in values), torch.nn.functional.pad
                values = [pad(value, (*(0,) * 7, longest - value.shape[1])) for value in values]
            if len({value.shape[1 + of_prompts :] for value in values}) > 1:
                raise ValueError("images of different sizes do not fit into one batch")
            found[name] = torch.cat(values, dim=of_prompts)
        return found


class PlainText:
    """Marks the special tokens of a tokenizer in texts of users, where they are plain text."""

    def __init__(
        self, tokenizer: Any, placeholders: Sequence[int | None] = (), words: Iterable[str] = ()
    ) -> None:
        from tokenizers import normalizers

        # The tokenizer drops the marks when it has found the special tokens of the chat template.
        self._marked: dict[str, str] = {}
        self._longest = 0
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return
        for number, token in backend.get_added_tokens_decoder().items():
            if token.special or number in placeholders:
                mark = _KEPT if token.normalized else _MARK
                self._marked[token.content] = token.content[:1] + mark + token.content[1:]
        for word in words:
            self._marked.setdefault(word, word[:1] + _MARK + word[1:])
        self._longest = max(map(len, self._marked), default=0)
        found = backend.normalizer or normalizers.Sequence([])
        if _MARK in found.normalize_str(_MARK):
            backend.normalizer = normalizers.Sequence([normalizers.Replace(_MARK, ""), found])

    def text(self, text: str) -> str:
        """Return a text whose special tokens are marked."""
        for token, marked in self._marked.items():
            text = text.replace(token, marked)
        return text

    def content(self, content: Any) -> Any:
        """Return the content of a turn whose special tokens are marked, in each text."""
        if isinstance(content, str):
            return self.text(content)
        parts, before = [], ""  # the text right before a part, which may begin a token
        for part in content:
            text = self.text(part["text"]) if "text" in part else ""
            if text and any(token in before + text[: self._longest] for token in self._marked):
                text = _MARK + text
            before = (before + text)[-self._longest :] if "text" in part else ""
            parts.append({**part, "text": text} if "text" in part else part)
        return parts


def _check_attention(base: str, text: Any) -> None:
    """Refuse a language model whose tokens' keys and values do not depend on the past alone."""
    ropes = getattr(text, "rope_parameters", None) or {}
    for part in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if (rope := part.get("rope_type")) in ("dynamic", "longrope"):
            why = f"turns positions by the length of the prompt (rope_type {rope})"
            text = f"base model {base} {why}: use another model, or one with a fixed scaling"
            raise BundleError(text)
    names = "use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping"
    for name in names:
        if getattr(text, name, None):
            raise BundleError(f"base model {base} has {name}, which is not served: use another")


def _window_of(text: Any) -> int | None:
    """Most tokens that a layer attends to, if fewer than positions; None if all attend to all."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ("sliding_attention",)
    if not window or not getattr(text, "use_sliding_window", True):
        return None
    shorter = "sliding_attention" in kinds and window < text.max_position_embeddings
    return int(window) if shorter else None


class BaseModel:
    """A frozen LMM and its processor, or a language model and its tokenizer (`load_model`)."""

    def __init__(self, base: str, model: Any, processor: Any) -> None:
        self.base = base
        self.name = Path(base).name if Path(base).is_absolute() else base  # for clients
        self.model: Any = model.requires_grad_(False).eval()
        self.processor: Any = processor
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        self.architecture = family = architecture_of(model, base)
        self.language_model: Any = family.language_model(model)  # without the output embeddings
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.config: Any = model.config
        text = self.config.get_text_config()
        _check_attention(base, text)
        self.takes_images = family.takes_images
        self.width = int(text.hidden_size)
        # Up to the window of its layers, attention in it is full attention.
        self.window = _window_of(text)
        # Of prompt and answer together.
        self.context_length = self.window or int(text.max_position_embeddings)
        # Id that stands for a visual token; None where there are none.
        self.image_token: Any = int(self.config.image_token_id) if self.takes_images else None
        self.video_token = family.video_token(self.config)
        self.three_positions = family.three_positions
        self.fixed_grid = family.fixed_grid(self.config)
        self.block = family.block(self.config)
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = [*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id]
        self.stop_ids = frozenset(token for token in ends if token in range(self.vocabulary))
        # What stands for an image, or a video, in a prompt before it is processed.
        self.placeholders = {
            kind: str(
                getattr(processor, f"{kind}_token", None)
                or self.tokenizer.convert_ids_to_tokens(token)
            )
            for kind, token in ((IMAGE, self.image_token), (VIDEO, self.video_token))
            if token is not None
        }
        tokens = (self.image_token, self.video_token)
        self.plain = PlainText(self.tokenizer, tokens, self.placeholders.values())
        self._shared_images: dict[Any, tuple[_ImageProcessor, Sequence[Any]]] | None = None

    @contextmanager
    def images_once(self) -> Iterator[None]:
        """Context in which images that several prompts have are processed once."""
        self._shared_images = {}
        try:
            yield
        finally:
            self._shared_images = None

    def check_takes_images(self, error: type[ValoraError] = BundleError) -> None:
        """Raise an error if it reads nothing but text."""
        if not self.takes_images:
            text = f"base model {self.name} reads text alone: leave images and videos out, or use a"
            raise error(f"{text} LLaVA, SmolVLM, InternVL or Qwen-VL model")

    def to(self, device: torch.device | str) -> None:
        """Move the model to a device."""
        self.model = self.model.to(device)
        self.device = self.model.device

    @property
    def vocabulary(self) -> int:
        """Number of logits."""
        return int(self.model.lm_head.out_features)

    # --- prompts

    def render(self, messages: Sequence[Mapping[str, Any]], *, generate: bool = True) -> str:
        """Write turns as a prompt, up to the answer if asked; special tokens are plain text."""
        turns = [{**turn, "content": self.plain.content(turn["content"])} for turn in messages]
        return self.architecture.render(self.processor, turns, generate)

    def tokenize(self, text: str, *, special: bool | None = None) -> list[int]:
        """Token ids of a prompt without media; `special` None: of a rendered one."""
        ids = self.tokenizer(text, add_special_tokens=self._special(text, special))["input_ids"]
        return [int(i) for i in ids]

    def check_tokens(self, ids: Tensor) -> None:
        """Raise an error if the tokenizer gives a token that has no embedding."""
        if (token := int(ids.max())) >= self.vocabulary:
            word = self.tokenizer.convert_ids_to_tokens(token)
            text = f"a text has token {token} {word}, for which base model {self.name} has no"
            raise DataError(f"{text} embedding: leave it out, or use another")

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, which ends before the first token that ends answers."""
        end = next((i for i, token in enumerate(tokens) if token in self.stop_ids), len(tokens))
        return str(self.tokenizer.decode(tokens[:end], skip_special_tokens=True).strip())

    def process(
        self, text: str, images: Sequence[Image] = (), videos: Sequence[Sequence[Image]] = (), *,
        special: bool | None = None,
    ) -> Any:  # fmt: skip
        """The processor's output for a prompt with a placeholder for each image and video.

        Videos are all their frames; a `ValueError` says that images do not fit it, or each other.
        """
        import numpy as np

        if images or videos:
            self.check_takes_images()
        media: dict[str, Any] = {"images": list(images)} if images else {}
        if videos:
            media["videos"] = [np.stack([np.asarray(frame) for frame in video]) for video in videos]
            media["videos_kwargs"] = {"do_sample_frames": False}
        processor, family = self.processor, self.architecture
        if images and videos and self.image_token == self.video_token:
            raise ValueError("this base model takes images or videos in a prompt, not both")
        many = sum(image.width * image.height for image in images) > MANY_PIXELS
        if images and (many or family.in_crops or self._shared_images is not None):
            known = {} if self._shared_images is None else self._shared_images
            once = _ImageProcessor(processor.image_processor, many)
            processor = copy.copy(processor)
            # Kept images beside it, so that no other image gets the id of one that is gone.
            key = tuple(map(id, images))
            processor.image_processor, _ = known.setdefault(key, (once, images))
        options = {"return_tensors": "pt", "add_special_tokens": self._special(text, special)}
        found = processor(text=[text], **options, **media)
        if images and family.in_crops:
            made = processor.image_processor.made
            crops = family.crops(self.processor.image_processor, made, [i.size for i in images])
            if crops is not None:
                found["crops"] = crops
        if videos and PIXELS[VIDEO] not in found:  # frames are encoded as images are
            found[PIXELS[VIDEO]] = found.pop(PIXELS[IMAGE])
            found["frames"] = [len(video) for video in videos]
        return found

    def _special(self, text: str, wanted: bool | None) -> bool:
        bos = self.tokenizer.bos_token
        if wanted is None:  # templates write it, but for some of models that take images
            wanted = self.takes_images
        return wanted and not (bos and text.startswith(bos))

    def visual_features(
        self, batch: Sequence[Mapping[str, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Encode images, or videos, together: `EncoderInput.tensors` of each."""
        import torch

        names = list(batch[0])
        inputs = {name: torch.cat([one[name] for one in batch]).to(self.device) for name in names}
        inputs[names[0]] = inputs[names[0]].to(self.dtype)  # the pixels
        return self.architecture.visual_features(self.model, inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states: […, width] → […, vocabulary] float32."""
        logits: Tensor = self.model.lm_head(hidden)
        return logits.float()
