"""Data of the base model: tokenizer, processor, and an endless stream of training samples.

A sample is one turn, `<s><|user|>` prompt `<image>`… `<|assistant|>` answer `</s>`. The prompt
precedes the image, so that the visual tokens can attend to it. Samples about albums begin with a
system turn that holds them, and ask several questions, one turn after the other. Samples about
record documents are drawn where they are learnt (`records`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.bench.base_models.albums import MAX_THINGS as ALBUM_THINGS
from tests.bench.base_models.albums import AlbumFact, album_facts
from tests.bench.base_models.clips import domain_words_in, draw_clip
from tests.bench.base_models.questions import (
    CAPTIONED,
    TASKS,
    Question,
    ask_about_album,
    ask_motion,
    ask_which_image,
    vocabulary,
)
from tests.bench.base_models.scenes import MAX_THINGS, TRAINING_SEEDS, Scene, draw_scene
from tests.bench.base_models.shapes import SHAPES
from valora_data.sources.generic.scenes import COLORS, PATTERNS, SIZE

VOCABULARY = 2048
NAME = os.environ.get("BASE_MODEL", "tiny")
"""What is made: ``tiny``, ``photo`` or ``smol``."""
SMOL = NAME == "smol"
PHOTO = NAME == "photo" or SMOL
"""Whether it sees photographs."""
SIDE, CELLS = (448, 14) if PHOTO else (SIZE, 8)
"""Sides of an image, in pixels and in visual tokens; scenes are drawn at `SIZE`."""
PATCH = SIZE / CELLS
VISUAL_TOKENS = CELLS**2
WORDS = 2 if SMOL else 1
"""Tokens of text, relative to those of valora-tiny's tokenizer, which has a token a number."""
SPECIALS = ("<pad>", "<s>", "</s>", "<image>", "<|system|>", "<|user|>", "<|assistant|>")
MARKUP = ("<ref>", "</ref>", "<box>", "</box>")
TURN = (
    ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>")
    if SMOL
    else ("<s><|user|>", "<|assistant|>", "</s>")
)
"""What is before a prompt, between its images and the answer, and after that."""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{{- '<image>' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

DOMAIN_NAMES = ("license plate", "traffic sign", "vehicle", "vegetation", "bicycle", "person")
"""Labels of the built-in detection domains: in the tokenizer, but never in the training data."""

LATER_WORDS = """
object image images video frame frames picture photo question answer option options choose
following caption short sentence word words describe scene category class label type kind
action activity doing happens moving running walking jumping sitting standing playing
holding eating drinking opening closing turning throwing catching pushing pulling cat dog
bird horse sheep cow elephant bear zebra animal food fruit water sky ground grass building
room kitchen street indoor outdoor day night summer winter weather sunny rain snow old young
new dark bright light many few all none both other another between behind front near far
next inside outside on in at of to for with from by and or not is are was has have does do
can it its this that there their they he she we you your my who when why which whose how
much long tall high low wide round flat empty full open closed clean wood metal glass
plastic paper stone fabric texture shape size material surface part side corner edge middle
upper lower same different more less than most least only very number count text read
written says true false correct wrong maybe unknown positive negative man woman child hand
head shirt car truck bus tree flower road one eight nine ten zero crop land forest river sea
residential repeat airplane boat bridge field desert mountain beach airport harbor storage
tank court pool ship
"""


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer in which every number up to 1000 is one token.

    Merges are learned from the vocabulary of generic scenes, from the names of the detection
    domains and from words of other tasks. A word's token includes the space before it.
    """
    numbers = [str(n) for n in range(10, 1001)]
    split = Regex(r" ?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    core = sorted(set(re.findall(r"[a-z]+", " ".join([*vocabulary(), *DOMAIN_NAMES]))))
    later = sorted(set(re.findall(r"[a-z]+", LATER_WORDS)))
    # After a comma, a word has no leading space, as at the start of an answer.
    corpus = [f" {word},{word}" for word in [*core * 5, *later]]
    corpus += ["(1,2),(3,4) . ? ! :"] * 9
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(numbers),
        special_tokens=[*SPECIALS, *MARKUP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = learned["vocab"]
    merges = [tuple(pair) for pair in learned["merges"]]
    for number in numbers:
        vocab.setdefault(number, len(vocab))
    # Not special tokens, because decoding must keep them in the text of an answer.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP])
    # With `ignore_merges`, a piece in the vocabulary becomes one token: numbers need no merges.
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, ignore_merges=True)
    return tokenizer


def build_processor() -> Any:
    """The processor that ships with the model: resizing, and the chat template."""
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>", "<|system|>", "<|user|>", "<|assistant|>"],
        padding_side="left",
        model_max_length=4096 if PHOTO else 2048,
        clean_up_tokenization_spaces=False,
    )
    size = {"height": SIDE, "width": SIDE}
    return LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size=size,
            crop_size=size,
            do_center_crop=False,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        ),
        tokenizer=tokenizer,
        patch_size=SIDE // CELLS,
        vision_feature_select_strategy="full" if PHOTO else "default",
        num_additional_image_tokens=0 if PHOTO else 1,
        chat_template=CHAT_TEMPLATE,
    )


def domain_tokens(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Ids of the tokens that are words of the detection domains, which must not be trained.

    None for valora-smol, which has read them all.
    """
    if SMOL:
        return np.zeros(0, dtype=np.int64)
    words = {token: i for token, i in tokenizer.get_vocab().items() if domain_words_in(token)}
    return np.array(sorted(words.values()), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A group of samples of similar length, so that batches need little padding.

    Attributes:
        images: Images per sample.
        length: Tokens per sample, visual tokens included.
        share: Share of training steps, relative to the other buckets'.
        batch: Samples per step, relative to the batch size.
        turns: Questions per sample; several if an album is asked about.
    """

    images: int
    length: int
    share: float
    batch: float = 1.0
    turns: int = 1


BUCKETS = {
    "short": Bucket(1, VISUAL_TOKENS + WORDS * 26, 0.50),
    "long": Bucket(1, VISUAL_TOKENS + WORDS * 56, 0.40),
    "two": Bucket(2, 2 * VISUAL_TOKENS + WORDS * 18, 0.04, 0.5),
    "three": Bucket(3, 3 * VISUAL_TOKENS + WORDS * 18, 0.03, 0.5),
    "four": Bucket(4, 4 * VISUAL_TOKENS + WORDS * 18, 0.03, 0.5),
    "album_1": Bucket(1, VISUAL_TOKENS + 12 * 4, 0.06, 0.5, 4),
    "album_4": Bucket(4, 4 * VISUAL_TOKENS + 12 * 12, 0.10, 0.2, 12),
    "album_12": Bucket(12, 12 * VISUAL_TOKENS + 12 * 16, 0.08, 0.08, 16),
    "album_28": Bucket(28, 28 * VISUAL_TOKENS + 12 * 20, 0.06, 0.05, 20),
}
"""Groups of samples with images. The shares of those about single scenes and series add up to 1;
albums come on top."""
SCENES = tuple(name for name, bucket in BUCKETS.items() if bucket.turns == 1)
"""Names of the groups that hold no albums."""
SHORT_TASKS = (
    ["detect"] * 8 + ["count"] * 5 + ["where"] * 2 + ["color"] * 3 + ["pattern"] * 2 + ["size"]
    + ["yes_no"] * 4 + ["relation"] * 3 + ["classify"] * 3 + ["repeat"] * (not SMOL)
)  # fmt: skip
"""Tasks of short samples; repeated names set the proportions."""

INDEX = {
    name: i for names in (tuple(SHAPES), tuple(COLORS), PATTERNS) for i, name in enumerate(names)
}
"""Index of each shape, colour and pattern within its kind."""

LOGGED = [*TASKS, "which_image", "motion", "repeat", *(n for n in BUCKETS if n not in SCENES)]
SHARE_OF_FEW = {"short": 0.2, "long": 0.75}
"""Share of scenes with a single object (short), or with few enough objects for a caption (long)."""

CHUNK = 32
"""Number of samples that a worker makes at a time."""
SPARE_SCENES = 12
"""Scenes that a chunk of albums draws beyond those of one album. Its albums share scenes, because
these take longer to draw and to encode than questions."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples of one bucket that share a set of images, or a batch of such chunks.

    Attributes:
        pixels: (u, 96, 96, 3) uint8, the images.
        things: (u, MAX_THINGS, 7) float32, the objects of each image: (x0, y0, x1, y1) relative to
            the image size, and the indices of shape, colour and pattern.
        n_things: (u,) int64, number of objects of each image.
        pick: (b, images) int64, indices of the images of each sample, in order.
        ids: (b, length) int64, token ids, padded on the right.
        span: (b, turns, 2) int64, start and end of the tokens of each answer.
        look: (b, turns, 2) int64, what an answer about an album is found by: positions of the
            question's shape and of the visual token at the centre of the thing; 0 for none.
        boxes: (b, MAX_THINGS, 4) float32, boxes to detect, relative to the image size.
        n_boxes: (b,) int64, number of boxes to detect; −1 where the sample is not about detection.
        task: (b,) int64, index into `LOGGED`.
    """

    pixels: npt.NDArray[np.uint8]
    things: npt.NDArray[np.float32]
    n_things: npt.NDArray[np.int64]
    pick: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    span: npt.NDArray[np.int64]
    look: npt.NDArray[np.int64]
    boxes: npt.NDArray[np.float32]
    n_boxes: npt.NDArray[np.int64]
    task: npt.NDArray[np.int64]

    @staticmethod
    def join(chunks: list[Chunk]) -> Chunk:
        """Concatenate chunks."""
        starts = np.cumsum([0, *(len(c.pixels) for c in chunks)])
        picks = [c.pick + start for c, start in zip(chunks, starts, strict=False)]
        rest = ("ids", "span", "look", "boxes", "n_boxes", "task")
        return Chunk(
            np.concatenate([c.pixels for c in chunks]),
            np.concatenate([c.things for c in chunks]),
            np.concatenate([c.n_things for c in chunks]),
            np.concatenate(picks),
            *(np.concatenate([getattr(c, name) for c in chunks]) for name in rest),
        )


def _things_of(images: Sequence[Scene]) -> npt.NDArray[np.float32]:
    """Box in [0, 1], shape, colour and pattern of every thing: (images, MAX_THINGS, 7)."""
    things = np.zeros((len(images), MAX_THINGS, 7), dtype=np.float32)
    for i, scene in enumerate(images):
        for j, thing in enumerate(scene.things):
            things[i, j, :4] = np.array(thing.box) / SIZE
            things[i, j, 4:] = INDEX[thing.shape], INDEX[thing.color], INDEX[thing.pattern]
    return things


def _cell(box: tuple[float, float, float, float]) -> int:
    """Index of the visual token at the centre of a box in pixels."""
    column, row = (int((low + high) / 2 // PATCH) for low, high in (box[::2], box[1::2]))
    return row * CELLS + column


class SampleMaker:
    """Draws scenes, generates questions about them and encodes them as samples.

    Args:
        seed: Seed of scenes and questions.
        tokenizer: Tokenizer of `build_tokenizer`.
    """

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        self.rng = np.random.default_rng(seed)
        self.tokenizer = tokenizer
        known = tokenizer.get_vocab()
        self.special = {token: known[token] for token in SPECIALS if token in known}
        self.special["<pad>"] = known.get("<pad>", 0)
        self.turn = [tokenizer.encode(text, add_special_tokens=False).ids for text in TURN]
        hidden = {*self.special.values(), *domain_tokens(tokenizer).tolist()}
        self.speakable = np.array([i for i in range(tokenizer.get_vocab_size()) if i not in hidden])

    def make(self, name: str) -> Chunk:
        """Make a chunk of the bucket `name`."""
        bucket = BUCKETS[name]
        if bucket.turns > 1:
            return self._make_albums(name, bucket)
        images: list[Scene] = []
        samples: list[tuple[Question, list[int]]] = []
        while len(samples) < CHUNK:
            before = len(images)
            if bucket.images > 1:
                asked = self._ask_series(bucket.images, images)
            else:
                few = 1 if name == "short" else CAPTIONED
                most = few if self.rng.random() < SHARE_OF_FEW[name] else MAX_THINGS
                scene = draw_scene(self._seed(), most)
                images.append(scene)
                asked = [(q, [before]) for q in self._ask(scene, name)]
            samples += asked
        encoded = [self._encode(q, bucket) for q, _ in samples[:CHUNK]]
        boxes = np.zeros((CHUNK, MAX_THINGS, 4), dtype=np.float32)
        for i, (question, _) in enumerate(samples[:CHUNK]):
            if question.boxes:
                boxes[i, : len(question.boxes)] = np.array(question.boxes) / SIZE
        return Chunk(
            pixels=np.stack([scene.pixels for scene in images]),
            things=_things_of(images),
            n_things=np.array([len(scene.things) for scene in images]),
            pick=np.array([pick for _, pick in samples[:CHUNK]]),
            ids=np.stack([ids for ids, _ in encoded]),
            span=np.array([[span] for _, span in encoded]),
            look=np.zeros((CHUNK, 1, 2), dtype=np.int64),
            boxes=boxes,
            n_boxes=np.array(
                [len(q.boxes) if q.task == "detect" else -1 for q, _ in samples[:CHUNK]]
            ),
            task=np.array([LOGGED.index(q.task) for q, _ in samples[:CHUNK]]),
        )

    def _make_albums(self, name: str, bucket: Bucket) -> Chunk:
        """Make a chunk of albums with several questions each."""
        scenes = [
            draw_scene(self._seed(), ALBUM_THINGS) for _ in range(bucket.images + SPARE_SCENES)
        ]
        head = [self.special["<image>"]] * (VISUAL_TOKENS * bucket.images)
        picks: list[npt.NDArray[np.int64]] = []
        rows: list[npt.NDArray[np.int64]] = []
        spans: list[list[tuple[int, int]]] = []
        looks: list[list[tuple[int, int]]] = []
        while len(rows) < CHUNK:
            pick = self.rng.permutation(len(scenes))[: bucket.images]
            facts = album_facts([scenes[place] for place in pick])
            if facts:
                asked = ask_about_album(self.rng, facts, bucket.turns)
                ids, span, look = self._encode_turns(head, asked, bucket)
                picks.append(pick)
                rows.append(ids)
                spans.append(span)
                looks.append(look)
        return Chunk(
            pixels=np.stack([scene.pixels for scene in scenes]),
            things=_things_of(scenes),
            n_things=np.array([len(scene.things) for scene in scenes]),
            pick=np.array(picks, dtype=np.int64),
            ids=np.stack(rows),
            span=np.array(spans),
            look=np.array(looks),
            boxes=np.zeros((CHUNK, MAX_THINGS, 4), dtype=np.float32),
            n_boxes=np.full(CHUNK, -1),
            task=np.full(CHUNK, LOGGED.index(name)),
        )

    def _encode_turns(
        self, head: list[int], asked: list[tuple[AlbumFact, str]], bucket: Bucket
    ) -> tuple[npt.NDArray[np.int64], list[tuple[int, int]], list[tuple[int, int]]]:
        """Token ids of a system turn and of questions with their answers, (length,).

        Returns:
            The ids, and `Chunk.span` and `Chunk.look` of the sample.
        """
        special = self.special
        ids: list[int] = [special["<s>"], special["<|system|>"]]
        first = len(ids)
        ids += head
        spans: list[tuple[int, int]] = []
        looks: list[tuple[int, int]] = []
        for fact, question in asked:
            encoded = self.tokenizer.encode(question)
            end = question.index(f" {fact.shape}") + 1 + len(fact.shape)
            ids += [special["<|user|>"]]
            shape = len(ids) + [stop for _, stop in encoded.offsets].index(end)
            ids += [*encoded.ids, special["<|assistant|>"]]
            start = len(ids)
            ids += [*self.tokenizer.encode(fact.value).ids, special["</s>"]]
            spans.append((start, len(ids)))
            looks.append((shape, first + fact.image * VISUAL_TOKENS + _cell(fact.box)))
        if len(ids) > bucket.length:
            raise ValueError(f"{len(ids)} tokens do not fit in {bucket.length}: {asked}")
        padded = np.full(bucket.length, special["<pad>"], dtype=np.int64)
        padded[: len(ids)] = ids
        none = [(0, 0)] * (bucket.turns - len(spans))
        return padded, spans + none, looks + none

    def _seed(self) -> int:
        return int(self.rng.integers(TRAINING_SEEDS, 2**62))

    def _ask(self, scene: Scene, bucket: str) -> list[Question]:
        """Several different questions about one scene."""
        rng = self.rng
        tasks = (
            ["caption", "box"]
            if bucket == "long"
            else [SHORT_TASKS[i] for i in rng.integers(len(SHORT_TASKS), size=7)]
        )
        if bucket == "short" and len(scene.things) == 1:
            tasks[0] = "classify"
        asked: dict[str, Question] = {}
        for task in tasks:
            question = Question("repeat", "") if task == "repeat" else TASKS[task](scene, rng)
            if question is not None:
                asked.setdefault(question.prompt, question)
        return list(asked.values())

    def _ask_series(self, n: int, images: list[Scene]) -> list[tuple[Question, list[int]]]:
        """Questions about series of n images, which are added to `images`."""
        first = len(images)
        if self.rng.random() < 0.7:
            frames, shape, way = draw_clip(self._seed(), n)
            images.extend(frames)
            return [(ask_motion(shape, way), list(range(first, first + n)))]
        images.extend(draw_scene(self._seed(), 3) for _ in range(n + 1))
        asked = []
        for _ in range(3):
            pick = first + self.rng.permutation(n + 1)[:n]
            question = ask_which_image([images[i] for i in pick], self.rng)
            if question is not None:
                asked.append((question, [int(i) for i in pick]))
        return asked

    def _encode(
        self, question: Question, bucket: Bucket
    ) -> tuple[npt.NDArray[np.int64], tuple[int, int]]:
        before, between, after = self.turn
        if question.task == "repeat":
            # Copying random tokens trains every row of the embedding, also those that no answer
            # uses, but not the domains' words.
            words = self.rng.choice(self.speakable, int(self.rng.integers(2, 7))).tolist()
            prompt, answer = [*self.tokenizer.encode("repeat").ids, *words], words
        else:
            prompt = self.tokenizer.encode(question.prompt).ids
            answer = self.tokenizer.encode(question.answer).ids
        ids = [*before, *prompt]
        ids += [self.special["<image>"]] * (VISUAL_TOKENS * bucket.images) + between
        start = len(ids)
        if question.task != "detect":
            ids += [*answer, *after]
        if len(ids) > bucket.length:
            raise ValueError(f"{len(ids)} tokens do not fit in {bucket.length}: {question}")
        padded = np.full(bucket.length, self.special["<pad>"], dtype=np.int64)
        padded[: len(ids)] = ids
        return padded, (start, len(ids))


def _work(seed: int, tokenizer: str, names: Sequence[str], out: Queue[tuple[str, Chunk]]) -> None:
    maker = SampleMaker(seed, Tokenizer.from_file(tokenizer))
    shares = [BUCKETS[name].share * BUCKETS[name].batch for name in names]
    shares = [share / sum(shares) for share in shares]
    # One of each first, so that training need not wait for the rarest.
    for name in names:
        out.put((name, maker.make(name)))
    while True:
        bucket = str(maker.rng.choice(list(names), p=shares))
        out.put((bucket, maker.make(bucket)))


class Stream:
    """Batches from a pool of chunks that worker processes replace continuously.

    Training never waits for the workers: until new chunks arrive, batches reuse chunks of the pool,
    in other combinations and with other noise.

    Args:
        seed: Seed of the workers and of the choice of chunks.
        tokenizer: Tokenizer of `build_tokenizer`.
        workers: Number of processes.
        pool: Largest number of chunks per bucket.
        buckets: Names of the buckets.
    """

    def __init__(
        self,
        seed: int,
        tokenizer: Tokenizer,
        workers: int,
        pool: int = 2000,
        buckets: Sequence[str] = tuple(BUCKETS),
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool: dict[str, list[Chunk]] = {name: [] for name in buckets}
        shares = np.array([BUCKETS[name].share for name in buckets])
        self.shares = shares / shares.sum()
        self.most = pool
        self.made = 0
        context = multiprocessing.get_context("spawn")
        self.queue: Queue[tuple[str, Chunk]] = context.Queue(maxsize=4 * workers)
        # As an argument, a large one would let each worker start only after the one before.
        self.folder = tempfile.TemporaryDirectory()
        path = f"{self.folder.name}/tokenizer.json"
        tokenizer.save(path)
        self.workers = [
            context.Process(
                target=_work, args=(seed + 1 + i, path, buckets, self.queue), daemon=True
            )
            for i in range(workers)
        ]
        for worker in self.workers:
            worker.start()
        threading.Thread(target=self._collect, daemon=True).start()

    def check(self) -> None:
        """Raise an error if a worker has died."""
        dead = [worker.pid for worker in self.workers if not worker.is_alive()]
        if dead:
            raise RuntimeError(
                f"{len(dead)} of the drawing processes died; see their messages above"
            )

    def close(self) -> None:
        """Stop the workers; chunks in the pool remain."""
        for worker in self.workers:
            worker.terminate()

    def _collect(self) -> None:
        rng = np.random.default_rng(0)
        while True:
            name, chunk = self.queue.get()
            chunks = self.pool[name]
            if len(chunks) < self.most:
                chunks.append(chunk)
            else:
                chunks[int(rng.integers(self.most))] = chunk
            self.made += len(chunk.task)

    def batch(self, size: int) -> Chunk:
        """A batch of about `size` samples of one bucket, which is drawn according to its share."""
        name = str(self.rng.choice(list(self.pool), p=self.shares))
        chunks = self.pool[name]
        wanted = max(1, round(size * BUCKETS[name].batch / CHUNK))
        return Chunk.join([chunks[i] for i in self.rng.integers(len(chunks), size=wanted)])
