"""The base model as the engine runs it: paged attention, and linears that take LoRA terms."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from valora_data.contract.base_model import BaseModel
from valora_data.contract.quantized import BLOCK, check_library
from valora_data.models.base import ModelPart
from valora_kernels.launching import has_dependent_launch
from valora_serve.catalogue.adapters import ModelTargets
from valora_serve.errors import SettingsError
from valora_serve.model.attention.base import AttentionPlan, register_attention
from valora_serve.model.linears import LinearGroup, Linears, MakeGroup
from valora_serve.model.prompt import Visual, VisualFeatures
from valora_serve.model.quantized_linears import ALIGNMENT, check_device, make_fp8, make_nf4
from valora_serve.model.split import SplitHead, SplitReader, attention_sizes, part_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class VisualRows:
    """The visual tokens among the rows of a step."""

    rows: Tensor  # [visual rows] int64, their indices in the step
    embeddings: Tensor  # [visual rows, width], which replace those of the placeholders
    # [visual rows, width] for each of the first layers to whose outputs features are added.
    deep: list[Tensor] = field(default_factory=list)


class Lmm(BaseModel):
    """A base model whose attention is paged and whose linears take LoRA terms.

    The transformers model is changed in place. `quantize` says how its weights were quantized.
    `split` read a rank's part. The language model computes in 8 bits with `fp8`; with `packed` its
    weights stay in 4 bits.
    """

    linears: Linears

    def __init__(
        self,
        base: str,
        model: Any,
        processor: Any,
        device: torch.device,
        quantize: str | None = None,
        split: SplitReader | None = None,
        *,
        fp8: bool = False,
        packed: bool = False,
    ) -> None:
        super().__init__(base, model, processor)
        self.quantize = quantize
        self.mergeable = not (fp8 or packed)  # whether adapters can be merged into its weights
        self.to(device)
        text = self.config.get_text_config()
        text._attn_implementation = register_attention()
        # Channels, height and width of every image's pixels; None if they differ.
        self.pixel_shape = self.architecture.pixel_shape(self.config)
        self.layers = int(text.num_hidden_layers)
        heads, kv_heads, self.head_dim = attention_sizes(self.config)
        rank, size = (split.group.rank, split.group.size) if split else (0, 1)
        # Of queries, and of keys and values, that this process computes; and which those are.
        self.own_kv_heads = own = part_of(kv_heads, rank, size)
        self.heads, self.kv_heads = heads // size, own.stop - own.start
        within = {
            path: "text" if part is ModelPart.LANGUAGE else "vision"
            for path, part in self.architecture.adaptable(model).items()
        }
        make: MakeGroup = LinearGroup
        if split is not None:
            make = split.make
        elif fp8:
            check_device(device)
            make = make_fp8
        elif packed:
            check_library(device.type)
            make = make_nf4(self.dtype)
        # Linears by the names that adapters on disk use, with the sizes of the whole model.
        self.targets = ModelTargets.of(model, self.architecture)
        group = split.group if split else None
        self.linears = Linears.of(model, within, make, self.architecture.linears, group)
        if split is not None:
            model.lm_head = SplitHead(model.lm_head, split.group)
        elif fp8:
            self._check_quantized("fp8", f"widths are multiples of {ALIGNMENT}", "none")
        elif packed:
            self._check_quantized("nf4_packed", f"weights fill blocks of {BLOCK}", "nf4")

    def _check_quantized(self, name: str, why: str, instead: str) -> None:
        """Say how many layers stay as they are; refuse it if all do: nothing could be merged."""
        groups = [group for group in self.linears.groups.values() if group.spec.part == "text"]
        left = sum(len(group.spec.modules) for group in groups if not group.quantized)
        if not any(group.quantized for group in groups):
            raise SettingsError(
                f"quantize={name} is for layers whose {why}, and base model {self.base} has none "
                f"in its language model: use quantize={instead}"
            )
        if left:
            log.warning(
                "quantize=%s: %d of the %d linear layers of the language model stay in %s, as it "
                "is for those whose %s",
                name, left, sum(len(group.spec.modules) for group in groups),
                str(self.dtype).removeprefix("torch."), why,
            )  # fmt: skip

    def encode(self, visuals: Sequence[Visual]) -> list[VisualFeatures]:
        """Encode visuals, of one shape unless patches are concatenated."""
        parts, deep = self.visual_features([visual.tensors for visual in visuals])
        layers = [layer.split([len(part) for part in parts]) for layer in deep]
        return [
            VisualFeatures(part, tuple(layer[row] for layer in layers))
            for row, part in enumerate(parts)
        ]

    def hidden(
        self, ids: Tensor, positions: Tensor, plan: AttentionPlan, visual: VisualRows | None = None
    ) -> Tensor:
        """Compute the hidden states of tokens, [rows] int64, as `forward` does."""
        return self.forward(self.embed(ids, visual), positions, plan, visual)

    def embed(self, ids: Tensor, visual: VisualRows | None = None) -> Tensor:
        """Return the first layer's input: [rows, width]."""
        embedded: Tensor = self.language_model.get_input_embeddings()(ids)
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
        """Run all layers and the final norm: `embedded`, [rows, width], to hidden states alike.

        `positions` are [rows] int64, or [3, rows] if rotary positions have three parts.
        """
        extra: dict[str, Any] = {}
        if visual is not None and visual.deep:
            mask = torch.zeros(1, len(embedded), dtype=torch.bool, device=embedded.device)
            mask[0, visual.rows] = True
            extra = self.architecture.deep_arguments(mask, visual.deep)
        positions = positions[:, None] if positions.ndim > 1 else positions[None]
        output = self.language_model(
            inputs_embeds=embedded[None],
            position_ids=positions,
            use_cache=False,
            plan=plan,
            **extra,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def compile_layers(self) -> None:
        """Let torch compile each layer, but for products and attention, at its first use."""
        early = has_dependent_launch(self.device)
        torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 64)
        for layer in self.language_model.layers:
            layer.compile(dynamic=True, options={"triton.enable_pdl": early})
