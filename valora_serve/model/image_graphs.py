"""Captured vision encoders: CUDA graphs of images of one shape, or of some windows of any image."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from valora_data.models.base import IMAGE, PIXELS
from valora_serve.model.attention.base import to_device
from valora_serve.model.graphs import GraphRecorder, Graphs, Replay
from valora_serve.model.prompt import Visual, VisualFeatures
from valora_serve.model.work import VISION, StepResources

log = logging.getLogger(__name__)

WINDOWS = (4, 8, 16, 32, 64, 128)  # numbers that are captured; a window has 112 × 112 pixels
KNOWN = 256  # image sizes whose arrangement stays on the device


@dataclass(slots=True)
class ImageGraph:
    """A captured encoder: its inputs, and its embeddings, which a replay overwrites."""

    replay: Replay
    inputs: list[Tensor]
    results: list[Tensor]


class ImageGraphs(Graphs[ImageGraph]):
    """Captured encoders by their number of images; adapters of the tower run without a graph."""

    def missing(self, terms: int) -> list[int]:
        """Return the sizes that are not captured; images have no LoRA terms."""
        return [] if terms else super().missing(0)

    def _inputs(self, size: int) -> list[Tensor]:
        """Buffers of the encoder's inputs: pixels [images, channels, height, width] first."""
        lmm = self._resources.lmm
        assert lmm.pixel_shape is not None
        return [torch.zeros((size, *lmm.pixel_shape), dtype=lmm.dtype, device=lmm.device)]

    def _embed(self, inputs: list[Tensor]) -> Tensor:
        """[images, visual tokens, width]."""
        lmm = self._resources.lmm
        return torch.stack(
            lmm.architecture.visual_features(lmm.model, {PIXELS[IMAGE]: inputs[0]})[0]
        )

    def _capture(self, size: int, terms: int) -> ImageGraph | None:
        """Capture one size; None if this encoder waits for the host, which no graph can."""
        with torch.inference_mode():
            inputs = self._inputs(size)
            try:
                replay, results = self._recorder.record(lambda: (self._embed(inputs),))
                if not results:  # without a GPU
                    replay()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                log.warning("the vision encoder runs without CUDA graphs: %s", error)
                return None
        return ImageGraph(replay, inputs, results)

    def encode(self, visuals: Sequence[Visual]) -> list[VisualFeatures] | None:
        """Encode visuals of one kind and shape without adapters; None if no graph holds them."""
        if not self.sizes:
            return None
        shape = 1, *(self._resources.lmm.pixel_shape or ())
        pixels = [visual.tensors.get(PIXELS[IMAGE]) for visual in visuals]
        fitting = [one for one in pixels if one is not None and tuple(one.shape) == shape]
        if len(fitting) < len(visuals) or any(len(visual.tensors) > 1 for visual in visuals):
            return None
        found: list[VisualFeatures] = []
        while len(found) < len(fitting):
            part = fitting[len(found) : len(found) + self.sizes[-1]]
            graph = self._best(len(part), 0)
            if graph is None:
                return None
            held = graph.inputs[0]
            held[: len(part)].copy_(_on_host(torch.cat(part), held), non_blocking=True)
            graph.replay()
            # The next replay of any graph may overwrite them.
            found += [VisualFeatures(one.clone()) for one in graph.results[0][: len(part)]]
        return found


class WindowGraphs(ImageGraphs):
    """Captured encoders of one image of any size, by numbers of windows (Qwen2.5-VL)."""

    def __init__(self, encoder: Any, *resources: Any) -> None:
        super().__init__(*resources)
        self._encoder = encoder
        self._arranged = lru_cache(KNOWN)(self._arrange)

    def _inputs(self, size: int) -> list[Tensor]:
        """Pixels of each slot, zeros where there is no patch; its row and column; whether it is."""
        slots, lmm = size * self._encoder.slots, self._resources.lmm
        return [
            torch.zeros((slots, self._encoder.columns), dtype=lmm.dtype, device=lmm.device),
            torch.zeros((slots, 2), dtype=torch.int64, device=lmm.device),
            torch.ones(slots, dtype=torch.bool, device=lmm.device),
        ]

    def _embed(self, inputs: list[Tensor]) -> Tensor:
        """[merged slots, width]."""
        found: Tensor = self._encoder.encode(*inputs)
        return found

    def encode(self, visuals: Sequence[Visual]) -> list[VisualFeatures] | None:
        """Encode images or videos of one kind; None if no graph holds one of them."""
        parts = [tuple(visual.tensors.values()) for visual in visuals]  # pixels and grid
        grids = [tuple(int(n) for n in grid[0]) for _, grid, *_ in parts]
        graphs = [self._best(self._encoder.windows(*grid[1:]), 0) for grid in grids]
        held = [graph for graph in graphs if graph is not None]
        if len(held) < len(visuals):
            return None  # before any of them is encoded
        found = []
        for (pixels, *_), (times, rows, columns), graph in zip(parts, grids, held, strict=True):
            to = graph.inputs[0]
            patches = _on_host(pixels, to).to(to.device, non_blocking=True)
            frames = [
                self._replay(graph, frame, rows, columns)
                for frame in patches.view(times, rows * columns, -1)
            ]
            found.append(VisualFeatures(frames[0] if len(frames) == 1 else torch.cat(frames)))
        return found

    def _replay(self, graph: ImageGraph, patches: Tensor, rows: int, columns: int) -> Tensor:
        """Encode one image or frame of patches [rows · columns, columns of pixels]."""
        slots, where, tokens = self._arranged(rows, columns)
        pixels, places, present = graph.inputs
        pixels.zero_()
        pixels.index_copy_(0, slots, patches)
        places.index_copy_(0, slots, where)
        present.zero_()
        present.index_fill_(0, slots, True)
        graph.replay()
        return graph.results[0][tokens]  # a copy: the next replay overwrites them

    def _arrange(self, rows: int, columns: int) -> list[Tensor]:
        made, device = self._encoder.arrange(rows, columns), self._resources.lmm.device
        return [to_device(part, device) for part in (made.slots, made.places, made.tokens)]


def _on_host(pixels: Tensor, like: Tensor) -> Tensor:
    """Pixels in the type of the weights on the host already, which halves the copy."""
    pixels = pixels.to(like.dtype)  # those of another rank of a group are on the device
    return pixels.pin_memory() if like.is_cuda and not pixels.is_cuda else pixels


def image_graphs(
    resources: StepResources, recorder: GraphRecorder, counts: Sequence[int]
) -> ImageGraphs:
    """Graphs of the model's encoder, for these numbers of images where they have one shape."""
    lmm = resources.lmm
    encoder = lmm.architecture.window_encoder(lmm.model)
    if encoder is not None:
        return WindowGraphs(encoder, VISION, resources, recorder, WINDOWS if counts else ())
    return ImageGraphs(VISION, resources, recorder, () if lmm.pixel_shape is None else counts)
