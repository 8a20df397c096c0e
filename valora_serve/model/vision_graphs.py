"""Captured vision encoders: CUDA graphs that encode a number of images of one shape."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from valora_data.models.base import IMAGE, PIXELS
from valora_serve.model.graphs import Graphs
from valora_serve.model.prompt import VisualFeatures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from valora_serve.model.graphs import GraphRecorder, Replay
    from valora_serve.model.prompt import Visual

log = logging.getLogger(__name__)


@dataclass(slots=True)
class VisionGraph:
    """A captured encoder of a fixed number of images.

    Attributes:
        replay: Computes `embeddings` from `pixels`.
        pixels: [images, channels, height, width].
        embeddings: [images, visual tokens, width], written by a replay.
    """

    replay: Replay
    pixels: Tensor
    embeddings: Tensor


class VisionGraphs(Graphs[VisionGraph]):
    """Captured encoders by their number of images.

    There are none where images differ in shape (the Qwen-VL family, see `window_graphs`): the
    encoder then reads on the host where the patches of each image begin. Adapters of the vision
    tower run without a graph, too.

    Args:
        resources: The model.
        recorder: Recorder that captures the graphs.
        sizes: Numbers of images to capture.
    """

    def missing(self, terms: int) -> list[int]:
        """Return the sizes that are not captured, the largest first; images have no LoRA terms."""
        if terms or self._resources.lmm.pixel_shape is None:
            return []
        return super().missing(0)

    def _capture(self, size: int, terms: int) -> VisionGraph | None:
        """Capture one size; None if this encoder waits for the host, which no graph can."""
        lmm = self._resources.lmm
        shape = lmm.pixel_shape
        assert shape is not None
        with torch.inference_mode():
            pixels = torch.zeros((size, *shape), dtype=lmm.dtype, device=lmm.device)

        def run() -> tuple[Tensor]:
            with lmm.linears.scope.vision(no_adapter):
                parts, _ = lmm.architecture.visual_features(lmm.model, {PIXELS[IMAGE]: pixels})
            return (torch.stack(parts),)

        recorded = record_encoder(self._recorder, run)
        if recorded is None:
            return None
        replay, embeddings = recorded
        return VisionGraph(replay, pixels, embeddings)

    def encode(self, visuals: Sequence[Visual]) -> list[VisualFeatures] | None:
        """Encode images of several requests together.

        Args:
            visuals: Images or videos of one kind and shape, without adapters.

        Returns:
            None if no graph holds them; the caller encodes them without one.
        """
        shape = self._resources.lmm.pixel_shape
        if shape is None or not self._sizes:
            return None
        pixels = [visual.tensors.get(PIXELS[IMAGE]) for visual in visuals]
        fitting = [one for one in pixels if one is not None and tuple(one.shape) == (1, *shape)]
        if len(fitting) < len(visuals) or any(len(visual.tensors) > 1 for visual in visuals):
            return None
        found: list[VisualFeatures] = []
        while len(found) < len(fitting):
            part = fitting[len(found) : len(found) + self._sizes[-1]]
            graph = self._best(len(part), 0)
            if graph is None:
                return None
            # In the type of the weights on the host already, which halves the copy.
            host = torch.cat(part).to(graph.pixels.dtype)
            if graph.pixels.is_cuda:
                host = host.pin_memory()
            graph.pixels[: len(part)].copy_(host, non_blocking=True)
            graph.replay()
            # The next replay of any graph may overwrite them.
            found += [VisualFeatures(one.clone()) for one in graph.embeddings[: len(part)]]
        return found


def record_encoder(
    recorder: GraphRecorder, run: Callable[[], tuple[Tensor]]
) -> tuple[Replay, Tensor] | None:
    """Capture an encoder.

    Args:
        recorder: Recorder that captures the graph.
        run: Encodes images from buffers of fixed address.

    Returns:
        What replays it, and its result; None, with a warning, if it waits for the host.
    """

    def result() -> tuple[Tensor]:
        return (torch.zeros_like(run()[0]),)

    try:
        replay, (embeddings,) = recorder.record(run, result)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        log.warning("the vision encoder runs without CUDA graphs: %s", error)
        return None
    return replay, embeddings


def no_adapter(_rows: int) -> None:
    """No row of an image has an adapter."""
