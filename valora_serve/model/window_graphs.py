"""Captured vision encoders of Qwen2.5-VL: CUDA graphs that encode an image of up to some windows.

One image, or frame of a video, fills a GPU, so that they are encoded one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from valora_data.models.base import PIXELS
from valora_data.models.qwen_vl import GRIDS
from valora_serve.model.attention.base import to_device
from valora_serve.model.graphs import Graphs
from valora_serve.model.prompt import VisualFeatures
from valora_serve.model.vision_graphs import no_adapter, record_encoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from valora_data.models.qwen_vl import WindowEncoder
    from valora_serve.model.graphs import GraphRecorder, Replay
    from valora_serve.model.prompt import Visual
    from valora_serve.model.work import StepResources

WINDOWS = (4, 8, 16, 32, 64, 128)
"""Numbers of windows that are captured; a window has 112 × 112 pixels."""

KNOWN = 256
"""Image sizes whose arrangement stays on the device."""


@dataclass(slots=True)
class WindowGraph:
    """A captured encoder of images of up to so many windows.

    Attributes:
        replay: Computes `embeddings` from the other buffers.
        pixels: [slots, columns], zeros where there is no patch.
        places: [slots, 2] int64, row and column of each patch.
        present: [slots] bool, which slots hold a patch.
        embeddings: [merged slots, width], written by a replay.
    """

    replay: Replay
    pixels: Tensor
    places: Tensor
    present: Tensor
    embeddings: Tensor


@dataclass(frozen=True, slots=True)
class _Sent:
    """An `Arrangement` on the device."""

    slots: Tensor
    places: Tensor
    tokens: Tensor


class WindowGraphs(Graphs[WindowGraph]):
    """Captured encoders by their number of windows; adapters of the tower run without.

    Args:
        encoder: Encodes images in windows of one size.
        resources: The model.
        recorder: Recorder that captures the graphs.
        sizes: Numbers of windows to capture.
    """

    def __init__(
        self,
        encoder: WindowEncoder,
        resources: StepResources,
        recorder: GraphRecorder,
        sizes: Sequence[int],
    ) -> None:
        super().__init__(resources, recorder, sizes)
        self._encoder = encoder
        self._sent = lru_cache(KNOWN)(self._send)

    def missing(self, terms: int) -> list[int]:
        """Return the sizes that are not captured, the largest first; images have no LoRA terms."""
        return [] if terms else super().missing(0)

    def _capture(self, size: int, terms: int) -> WindowGraph | None:
        """Capture one size; None if this encoder waits for the host, which no graph can."""
        lmm, encoder = self._resources.lmm, self._encoder
        slots = size * encoder.slots
        with torch.inference_mode():
            pixels = torch.zeros((slots, encoder.columns), dtype=lmm.dtype, device=lmm.device)
            places = torch.zeros((slots, 2), dtype=torch.int64, device=lmm.device)
            present = torch.ones(slots, dtype=torch.bool, device=lmm.device)

        def run() -> tuple[Tensor]:
            with lmm.linears.scope.vision(no_adapter):
                return (encoder.encode(pixels, places, present),)

        recorded = record_encoder(self._recorder, run)
        if recorded is None:
            return None
        replay, embeddings = recorded
        return WindowGraph(replay, pixels, places, present, embeddings)

    def encode(self, visuals: Sequence[Visual]) -> list[VisualFeatures] | None:
        """Encode images, or videos, of several requests, without adapters.

        Args:
            visuals: Images or videos of one kind.

        Returns:
            None if no graph holds one of them; the caller encodes all without.
        """
        grids = [tuple(int(n) for n in visual.tensors[GRIDS[visual.kind]][0]) for visual in visuals]
        graphs = [self._best(self._encoder.windows(*grid[1:]), 0) for grid in grids]
        held = [graph for graph in graphs if graph is not None]
        if len(held) < len(visuals):
            return None  # before any of them is encoded
        found = []
        for visual, (times, rows, columns), graph in zip(visuals, grids, held, strict=True):
            # In the type of the weights on the host already, which halves the copy.
            host = visual.tensors[PIXELS[visual.kind]].to(graph.pixels.dtype)
            if graph.pixels.is_cuda:
                host = host.pin_memory()
            patches = host.to(graph.pixels.device, non_blocking=True)
            frames = [
                self._replay(graph, frame, rows, columns)
                for frame in patches.view(times, rows * columns, -1)
            ]
            found.append(VisualFeatures(frames[0] if len(frames) == 1 else torch.cat(frames)))
        return found

    def _replay(self, graph: WindowGraph, patches: Tensor, rows: int, columns: int) -> Tensor:
        """Encode one image or frame of patches [rows · columns, columns of pixels]."""
        sent = self._sent(rows, columns)
        graph.pixels.zero_()
        graph.pixels.index_copy_(0, sent.slots, patches)
        graph.places.index_copy_(0, sent.slots, sent.places)
        graph.present.zero_()
        graph.present.index_fill_(0, sent.slots, True)
        graph.replay()
        return graph.embeddings[sent.tokens]  # a copy: the next replay overwrites them

    def _send(self, rows: int, columns: int) -> _Sent:
        made, device = self._encoder.arrange(rows, columns), self._resources.lmm.device
        return _Sent(
            to_device(made.slots, device),
            to_device(made.places, device),
            to_device(made.tokens, device),
        )
