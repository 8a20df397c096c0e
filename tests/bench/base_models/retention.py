"""A loss that keeps what a model knows while it learns something else.

Learning to look facts up starts at a high learning rate, which costs much of what was learnt about
scenes. Labels of scenes bring it back slowly: an answer has few tokens, and each of them tells
little. The model as it was before tells how likely every token is (learning without forgetting, Li
and Hoiem 2016).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Retention(nn.Module):
    """The language model and the detection head as they are now, to be imitated later.

    Args:
        language: Language model (Llama of transformers), whose output embeddings are tied.
        head: Detection head (`PretrainingHead`).

    Attributes:
        known: (b, length, 192), hidden states of the batch that was recalled last.
    """

    known: Tensor

    def __init__(self, language: Any, head: nn.Module) -> None:
        super().__init__()
        # Not deep copies, which would share the hooks of `LookupTutor`.
        self.language = type(language)(language.config)
        self.language.load_state_dict(language.state_dict())
        self.head = type(head)()
        self.head.load_state_dict(head.state_dict())
        self.to(next(language.parameters()).device).requires_grad_(False)

    @torch.no_grad()
    def recall(self, ids: Tensor, image_token: int, visual: Tensor) -> None:
        """Compute the last hidden states of samples.

        Args:
            ids: (b, length) int64, token ids, padded on the right.
            image_token: Id that stands for a visual token.
            visual: (b, images, cells, 192), projected features of the images of each sample.
        """
        embeddings = self.language.embed_tokens(ids)
        mask = (ids == image_token)[..., None]
        embeddings = embeddings.masked_scatter(mask, visual.to(embeddings.dtype))
        self.known = self.language(inputs_embeds=embeddings, use_cache=False)[0]

    def words_loss(self, logits: Tensor, at: tuple[Tensor, Tensor], silent: Tensor) -> Tensor:
        """Mean Kullback-Leibler divergence of answer tokens from what was known.

        Args:
            logits: (a, vocabulary) float32, logits of the model in training, `silent` included.
            at: Rows and columns of `known` that predict these tokens, (a,) int64 each.
            silent: (vocabulary,) float32, −inf for tokens that are left out, else 0.
        """
        with torch.no_grad():
            old = F.linear(self.known[at], self.language.embed_tokens.weight).float() + silent
            truth = old.log_softmax(-1)
        gap = F.kl_div(logits.log_softmax(-1), truth, log_target=True, reduction="none")
        return gap.masked_fill(silent < 0, 0.0).sum(-1).mean()

    def boxes_loss(self, scores: Tensor, codes: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
        """Distance of detection from what was known, per cell that holds something.

        Args:
            scores: (b, cells) float32, objectness logits of the model in training.
            codes: (b, cells, 4) float32, its box codes.
            at: Rows and columns of `known` that are these cells, together (b, cells).
        """
        with torch.no_grad():
            old_scores, old_codes = self.head(self.known[at].float())
            holds = old_scores.sigmoid()
        objectness = F.binary_cross_entropy_with_logits(scores, holds, reduction="sum")
        apart = F.smooth_l1_loss(codes, old_codes, reduction="none", beta=0.1).sum(-1)
        loss: Tensor = (objectness + (apart * holds).sum()) / holds.sum().clamp_min(1)
        return loss
