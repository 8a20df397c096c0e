"""Encodes the images of a step together, and caches them for later requests."""

import logging
from collections import OrderedDict
from collections.abc import Sequence

from valora_kernels.metadata import NONE
from valora_serve.engine.adapter_registry import MergeState
from valora_serve.engine.sequence import SequenceState
from valora_serve.errors import ImageError, StoppedError
from valora_serve.model.prompt import MemoryTokens, VisualFeatures
from valora_serve.model.runner import ModelRunner

log = logging.getLogger(__name__)


class ImageEncoder:
    """Encodes images, with an LRU cache by image, the adapter's vision weights and the tenant."""

    def __init__(self, runner: ModelRunner, merge_state: MergeState, max_bytes: int) -> None:
        self.queries = self.hits = self.encoded = self.held_bytes = 0
        self._runner, self._merge_state, self._max_bytes = runner, merge_state, max_bytes
        self._kept: OrderedDict[bytes, VisualFeatures] = OrderedDict()

    def encode(
        self, shares: Sequence[tuple[SequenceState, int]]
    ) -> list[tuple[SequenceState, ImageError]]:
        """Set `features` of the requests of a step; return those whose images are broken."""
        groups: dict[tuple[object, ...], list[tuple[SequenceState, int]]] = {}
        for sequence, count in shares:
            end = sequence.kv_tokens + count
            memory = sequence.prompt.memory
            if memory is not None and sequence.kv_tokens <= memory.at[-1] and memory.at[0] < end:
                sequence.memory = sequence.memory or self._memory(memory)
            for number, visual in enumerate(sequence.prompt.visuals):
                reached = sequence.kv_tokens <= visual.at[-1] and visual.at[0] < end
                if number in sequence.features or not reached:
                    continue
                self.queries += 1
                if (features := self._cached(_key(sequence, number))) is not None:
                    self.hits += 1
                    sequence.features[number] = features
                    continue
                pixels = next(iter(visual.tensors.values()))
                ragged = len(visual.tensors) > 1  # patches; images of all sizes fit in one batch
                shape = None if ragged else pixels.shape[1:]
                groups.setdefault((visual.kind, shape), []).append((sequence, number))
        broken: dict[str, tuple[SequenceState, ImageError]] = {}
        for members in groups.values():
            self._encode_group(members, broken)
        return list(broken.values())

    def _memory(self, memory: MemoryTokens) -> VisualFeatures:
        key = b"memory|" + memory.key
        features = self._cached(key)
        if features is None:
            lmm = self._runner.lmm
            features = VisualFeatures(memory.embeddings.to(lmm.device, lmm.dtype))
            self._keep(key, features)
        return features

    def _cached(self, key: bytes) -> VisualFeatures | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def _encode_group(
        self,
        members: Sequence[tuple[SequenceState, int]],
        broken: dict[str, tuple[SequenceState, ImageError]],
    ) -> None:
        """Encode images together; if that fails, one by one, so that only the bad ones fail."""
        try:
            self._encode(members)
        except StoppedError:
            raise  # no image is to blame
        except Exception as error:
            log.exception("encoding %d images together failed", len(members))
            if len(members) > 1:
                for one in members:
                    self._encode_group([one], broken)
                return
            ((sequence, number),) = members
            log.warning("image %d of request %s cannot be encoded: %r", number, sequence.id, error)
            said = f"image {number + 1} cannot be encoded ({type(error).__name__})"
            broken.setdefault(sequence.id, (sequence, ImageError(f"{said}: send another one")))

    def _encode(self, members: Sequence[tuple[SequenceState, int]]) -> None:
        distinct: dict[bytes, tuple[SequenceState, int]] = {}
        for sequence, number in members:
            distinct.setdefault(_key(sequence, number), (sequence, number))
        slots = [
            self._runner.adapters[next(iter(sequence.adapters))].slot if sequence.vision else NONE
            for sequence, _ in distinct.values()
        ]
        visuals = [sequence.prompt.visuals[number] for sequence, number in distinct.values()]
        encoded = self._runner.encode(visuals, slots, self._merge_state.slot)
        found = dict(zip(distinct, encoded, strict=True))
        self.encoded += len(found)
        for key, features in found.items():
            self._keep(key, features)
        for sequence, number in members:
            sequence.features[number] = found[_key(sequence, number)]

    def _keep(self, key: bytes, features: VisualFeatures) -> None:
        if features.bytes > self._max_bytes:
            return
        if (old := self._kept.pop(key, None)) is not None:
            self.held_bytes -= old.bytes
        self._kept[key] = features.alone()
        self.held_bytes += features.bytes
        while self.held_bytes > self._max_bytes:
            _, old = self._kept.popitem(last=False)
            self.held_bytes -= old.bytes


def _key(sequence: SequenceState, number: int) -> bytes:
    return sequence.prompt.visuals[number].key + sequence.vision + sequence.tenant
