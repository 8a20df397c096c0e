"""Teachers out of transformers: tiny models of the true architectures, beside its pipelines."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.support.data_sets import write_video
from tests.support.helpers import save_random_llava
from valora_data.schema import Answer, Sample, Task
from valora_data.sources.formats.videos import read_frames
from valora_teachers.base import TeacherError, check_answers
from valora_teachers.registry import load_teacher

NAMES = {0: "cat", 1: "house dog", 2: "eel", 3: "fox"}
ALL = tuple(NAMES.values())
WORDS = [*"abc?.", "cat", "dog", "red", "blue", "the", "left", "right", "what", "is", "this", "yes"]


TINY = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "initializer_range": 0.5,
}  # fmt: skip


def load_huggingface(source, task: Task, labels=(), *, prompt: str = "", **options):
    return load_teacher("huggingface", source, labels, options, task, prompt)


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Noise around a colour of its own, so that models say different things of them."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, 3) * 0.7 + rng.integers(0, 76, (size[1], size[0], 3))
    return Image.fromarray(pixels.astype(np.uint8))


def samples(count: int, prompt: str | None = None) -> list[Sample]:
    sizes = [(40, 30), (31, 44), (40, 30)]
    return [
        Sample(f"s{i}", picture(i, sizes[i % 3]), Answer(), prompt and f"{prompt} {WORDS[i]}")
        for i in range(count)
    ]


def word_tokenizer(folder: Path, **special: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of whole words, as BERT and CLIP have theirs."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate([*dict.fromkeys(special.values()), *WORDS])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token=special["unk_token"]))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    tokenizer.save_pretrained(folder)
    return tokenizer


BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **TINY | {"initializer_range": 0.8}, image_size=24, patch_size=8, id2label=NAMES
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    size = {"height": 24, "width": 24}
    transformers.ViTImageProcessor(size=size).save_pretrained(folder)
    return folder


# ---- classification ----------------------------------------------------------------------------


def test_image_classification_agrees_with_the_pipeline(vit: Path) -> None:
    some = samples(5)
    done: list[tuple[int, int]] = []
    teacher = load_huggingface(vit, Task.CLASSIFICATION, ALL, batch=2)
    answers = teacher.answer(some, lambda *args: done.append(args))
    assert done == [(2, 5), (4, 5), (5, 5)]
    pipeline = transformers.pipeline("image-classification", str(vit), top_k=4)
    for sample, answer in zip(some, answers, strict=True):
        theirs = {entry["label"]: entry["score"] for entry in pipeline(sample.image)}
        assert answer.soft == pytest.approx([theirs[name] for name in teacher.labels], abs=1e-5)
        assert answer.label == max(theirs, key=theirs.get)
    assert len({answer.label for answer in answers}) > 1


def test_classes_that_mean_one_label_add_up(vit: Path) -> None:
    some = samples(3)
    every = load_huggingface(vit, Task.CLASSIFICATION, ALL).answer(some)
    names = {"eel": "fish", "cat": "House_Dog"}
    teacher = load_huggingface(vit, Task.CLASSIFICATION, ["fish", "House_Dog"], names=names)
    for whole, answer in zip(every, teacher.answer(some), strict=True):
        cat, dog, eel, _ = whole.soft  # "house dog" is found whatever its case
        total = cat + dog + eel
        assert answer.soft == pytest.approx((eel / total, (cat + dog) / total), abs=1e-5)


def test_labels_that_do_not_map(vit: Path) -> None:
    with pytest.raises(
        TeacherError, match=r"has no class 'bird', only cat, house dog, eel, fox: map"
    ):
        load_huggingface(vit, Task.CLASSIFICATION, ["cat", "bird"])
    with pytest.raises(TeacherError, match=r"has no class 'crow', only .*teacher\.options\.names"):
        load_huggingface(vit, Task.CLASSIFICATION, ["cat", "bird"], names={"crow": "bird"})


def test_counts_and_yes_no(vit: Path) -> None:
    names = {"cat": "0", "eel": "1", "fox": "2"}
    counter = load_huggingface(vit, Task.COUNTING, ["0", "1", "2"], names=names)
    for answer in counter.answer(samples(3)):
        assert answer.count == int(np.argmax(answer.soft))
    names = {"cat": "no", "fox": "yes"}
    (answer,) = load_huggingface(vit, Task.VQA, ["no", "yes"], names=names).answer(samples(1))
    assert answer.answers == (("no", "yes")[int(np.argmax(answer.soft))],)


def test_a_model_for_several_labels_at_once(vit: Path, tmp_path: Path) -> None:
    model = transformers.ViTForImageClassification.from_pretrained(vit)
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    with pytest.raises(TeacherError, match="gives several labels at once"):
        load_huggingface(tmp_path, Task.CLASSIFICATION, ALL)


# ---- video -------------------------------------------------------------------------------------


def test_video_classification_agrees_with_the_pipeline(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.VideoMAEConfig(
        **TINY | {"initializer_range": 0.8}, image_size=16, patch_size=8, num_frames=4,
        tubelet_size=2, id2label=NAMES,
    )  # fmt: skip
    transformers.VideoMAEForVideoClassification(config).save_pretrained(tmp_path)
    size = {"height": 16, "width": 16}
    transformers.VideoMAEImageProcessor(size={"shortest_edge": 16}, crop_size=size).save_pretrained(
        tmp_path
    )
    pipeline = transformers.VideoClassificationPipeline(  # its video processor needs torchcodec
        transformers.AutoModelForVideoClassification.from_pretrained(tmp_path),
        image_processor=transformers.AutoImageProcessor.from_pretrained(tmp_path), top_k=4,
    )  # fmt: skip
    teacher = load_huggingface(tmp_path, Task.VIDEO, ALL, batch=2)
    clips = []
    for index, levels in enumerate([[10, 60, 110, 160], [200, 150, 90, 20], [90, 90, 200, 20]]):
        path = write_video(tmp_path / f"{index}.mp4", levels, (32, 32))
        first, *rest = read_frames(path, 4)
        clips.append(Sample(str(path), first, Answer(), rest=tuple(rest)))
    for clip, answer in zip(clips, teacher.answer(clips), strict=True):
        theirs = {entry["label"]: entry["score"] for entry in pipeline(clip.id)}
        assert answer.soft == pytest.approx([theirs[name] for name in teacher.labels], abs=1e-4)
    # More frames are thinned out evenly, fewer ones repeat.
    long = Sample(
        "l", clips[0].image, Answer(), rest=tuple(f for f in clips[0].images for _ in "ab")[1:]
    )
    short = Sample("s", clips[0].images[0], Answer(), rest=clips[0].images[2:3])
    double = Sample("d", short.images[0], Answer(), rest=tuple(short.images[i] for i in (0, 1, 1)))
    a, b, c, d = teacher.answer([long, clips[0], short, double])
    assert a.soft == pytest.approx(b.soft, abs=1e-5)
    assert c.soft == pytest.approx(d.soft, abs=1e-5)


# ---- detection ---------------------------------------------------------------------------------


def save_rt_detr(folder: Path) -> Path:
    torch.manual_seed(2)
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=16, encoder_in_channels=[8, 16, 16],
        encoder_ffn_dim=16, encoder_attention_heads=2, d_model=16, num_queries=12,
        decoder_in_channels=[16, 16, 16], decoder_ffn_dim=16, decoder_layers=2,
        decoder_attention_heads=2, num_denoising=0, id2label=NAMES,
    )  # fmt: skip
    transformers.RTDetrForObjectDetection(config).save_pretrained(folder)
    size = {"height": 64, "width": 64}
    transformers.RTDetrImageProcessor(size=size).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rt_detr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_rt_detr(tmp_path_factory.mktemp("rtdetr"))


def assert_same_boxes(answer: Answer, theirs: list[dict], size: tuple[int, int]) -> None:
    """Ours are exact and inside the image; those of pipelines are cut down to whole pixels."""
    for box in answer.boxes:
        assert 0 <= box.x0 < box.x1 <= size[0]
        assert 0 <= box.y0 < box.y1 <= size[1]
    confidences = [box.confidence for box in answer.boxes]
    assert confidences == sorted(confidences, reverse=True)
    for entry in theirs:
        edges = [entry["box"][key] for key in ("xmin", "ymin", "xmax", "ymax")]
        clipped = np.clip(edges, 0, [size[0], size[1]] * 2)
        if clipped[0] + 1 < clipped[2] and clipped[1] + 1 < clipped[3]:
            assert any(
                box.label == entry["label"]
                and abs(box.confidence - entry["score"]) < 1e-4
                and np.abs(np.array(box.xyxy) - clipped).max() < 1.01
                for box in answer.boxes
            )


def test_detection_agrees_with_the_pipeline(rt_detr: Path) -> None:
    pipeline = transformers.pipeline("object-detection", str(rt_detr), threshold=0.3)
    teacher = load_huggingface(rt_detr, Task.DETECTION, ALL, threshold=0.3, batch=2)
    some = samples(3)
    for sample, answer in zip(some, teacher.answer(some), strict=True):
        theirs = pipeline(sample.image)
        assert theirs
        assert_same_boxes(answer, theirs, sample.image.size)
    every = [box.label for answer in teacher.answer(some) for box in answer.boxes]
    kept = every[0]
    chosen = load_huggingface(rt_detr, Task.DETECTION, [kept], threshold=0.3).answer(some)
    assert [box.label for a in chosen for box in a.boxes] == [kept] * every.count(kept)


def test_a_teacher_that_finds_nothing(rt_detr: Path) -> None:
    teacher = load_huggingface(rt_detr, Task.DETECTION, ALL, threshold=0.999999)
    answers = teacher.answer(samples(3))
    assert answers == [Answer()] * 3
    with pytest.raises(TeacherError, match="rt-detr finds nothing on 3 samples: check that it"):
        check_answers("rt-detr", Task.DETECTION, answers)
    check_answers("x", Task.COUNTING, [Answer(), Answer(count=0)])


# ---- open vocabulary ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def owl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("owl")
    torch.manual_seed(3)
    tokenizer = word_tokenizer(
        folder, pad_token="!", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    config = transformers.OwlViTConfig(
        text_config={**TINY, "vocab_size": len(tokenizer)},
        vision_config={**TINY, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )  # fmt: skip
    transformers.OwlViTForObjectDetection(config).save_pretrained(folder)
    image_processor = transformers.OwlViTImageProcessor(size={"height": 32, "width": 32})
    transformers.OwlViTProcessor(image_processor, tokenizer).save_pretrained(folder)
    return folder


def test_owl_agrees_with_the_pipeline(owl: Path) -> None:
    """Asked for each label; the pipeline pads its phrases like ours."""
    labels = ["cat", "red_dog"]
    teacher = load_huggingface(owl, Task.DETECTION, labels, threshold=0.3, batch=2)
    some = samples(3)
    model = transformers.OwlViTForObjectDetection.from_pretrained(owl)
    processor = transformers.OwlViTProcessor.from_pretrained(owl)
    for sample, answer in zip(some, teacher.answer(some), strict=True):
        theirs = []
        for label in labels:
            inputs = processor(
                text=[[label.replace("_", " ")]], images=sample.image, return_tensors="pt"
            )
            with torch.inference_mode():
                outputs = model(**inputs)
            (found,) = processor.post_process_grounded_object_detection(
                outputs, threshold=0.3, target_sizes=[sample.image.size[::-1]]
            )
            for score, edges in zip(found["scores"], found["boxes"].tolist(), strict=True):
                box = dict(zip(("xmin", "ymin", "xmax", "ymax"), edges, strict=True))
                theirs.append({"score": score.item(), "label": label, "box": box})
        assert theirs
        assert_same_boxes(answer, theirs, sample.image.size)


def test_grounding_looks_for_each_sample_s_own_phrase(owl: Path) -> None:
    some = samples(4, "the")
    teacher = load_huggingface(owl, Task.GROUNDING, batch=3, threshold=0.0)
    answers = teacher.answer(some)
    for sample, answer in zip(some, answers, strict=True):
        (box,) = answer.boxes
        assert box.label == sample.prompt
        alone = load_huggingface(owl, Task.DETECTION, [sample.prompt], threshold=0.0)
        best = alone.answer([sample])[0].boxes[0]
        assert box.xyxy == pytest.approx(best.xyxy, abs=1e-3)
    with pytest.raises(TeacherError, match="sample s0 has no phrase to look for"):
        teacher.answer(samples(1))


def test_phrases_can_stand_for_labels(owl: Path) -> None:
    some = samples(2)
    named = load_huggingface(
        owl, Task.DETECTION, ["pet"], names={"red cat": "pet"}, threshold=0.0
    ).answer(some)
    plain = load_huggingface(owl, Task.DETECTION, ["red cat"], threshold=0.0).answer(some)
    for a, b in zip(named, plain, strict=True):
        assert {box.label for box in a.boxes} == {"pet"}
        assert [box.xyxy for box in a.boxes] == [box.xyxy for box in b.boxes]
    with pytest.raises(
        TeacherError, match="has to be told what to look for: give the domain label"
    ):
        load_huggingface(owl, Task.DETECTION)
    with pytest.raises(TeacherError, match="is mapped to 'dog', which is not one of pet"):
        load_huggingface(owl, Task.DETECTION, ["pet"], names={"red cat": "dog"})


def test_grounding_dino(tmp_path: Path) -> None:
    torch.manual_seed(4)
    tokenizer = word_tokenizer(tmp_path, **BERT)
    config = transformers.GroundingDinoConfig(
        backbone_config=transformers.SwinConfig(
            embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2, image_size=32,
            out_features=["stage2", "stage3", "stage4"],
        ),
        text_config={"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1,
                     "num_attention_heads": 2, "intermediate_size": 16,
                     "vocab_size": len(tokenizer)},
        num_queries=10, encoder_layers=1, encoder_ffn_dim=16, encoder_attention_heads=2,
        decoder_layers=2, decoder_ffn_dim=16, decoder_attention_heads=2, d_model=64,
        num_feature_levels=4, max_text_len=16,
    )  # fmt: skip
    model = transformers.GroundingDinoForObjectDetection(config)
    model.save_pretrained(tmp_path)
    image_processor = transformers.GroundingDinoImageProcessor(
        size={"shortest_edge": 48, "longest_edge": 64}
    )
    processor = transformers.GroundingDinoProcessor(image_processor, tokenizer)
    processor.save_pretrained(tmp_path)
    some = samples(3, "the red")
    teacher = load_huggingface(tmp_path, Task.GROUNDING, threshold=0.0, batch=1)
    for sample, answer in zip(some, teacher.answer(some), strict=True):
        text = f"{sample.prompt}."
        inputs = processor(text=text, images=sample.image, return_tensors="pt")
        with torch.inference_mode():
            outputs = model.eval()(**inputs)
        (found,) = processor.post_process_grounded_object_detection(
            outputs, inputs["input_ids"], threshold=0.0, target_sizes=[sample.image.size[::-1]]
        )
        best = int(found["scores"].argmax())
        (box,) = answer.boxes
        assert box.label == sample.prompt
        assert box.confidence == pytest.approx(found["scores"][best].item(), abs=1e-5)
        limits = [sample.image.width, sample.image.height] * 2
        clipped = np.clip(found["boxes"][best].tolist(), 0, limits)
        assert box.xyxy == pytest.approx(clipped, abs=1e-3)


# ---- language ----------------------------------------------------------------------------------


def save_blip(folder: Path, kind: type) -> Path:
    torch.manual_seed(5)
    tokenizer = word_tokenizer(folder, **BERT, bos_token="[DEC]", eos_token="[SEP]")
    text = {**TINY, "encoder_hidden_size": 16, "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.sep_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "sep_token_id": tokenizer.sep_token_id}  # fmt: skip
    config = transformers.BlipConfig(
        text_config=text,
        vision_config={**TINY, "image_size": 16, "patch_size": 8},
        projection_dim=16, image_text_hidden_size=16,
    )  # fmt: skip
    kind(config).save_pretrained(folder)
    images = transformers.BlipImageProcessor(size={"height": 16, "width": 16})
    transformers.BlipProcessor(images, tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "task", "prompt"),
    [
        (transformers.BlipForConditionalGeneration, Task.CAPTION, ""),
        (transformers.BlipForQuestionAnswering, Task.VQA, "{} ?"),
    ],
)
def test_captions_and_answers_of_blip(kind, task: Task, prompt: str, tmp_path: Path) -> None:
    folder = save_blip(tmp_path, kind)
    model = kind.from_pretrained(folder).eval()
    processor = transformers.BlipProcessor.from_pretrained(folder)
    some = samples(3, "what is the" if prompt else None)
    teacher = load_huggingface(folder, task, (), prompt=prompt, max_new_tokens=6, batch=2)
    found = []
    for sample, answer in zip(some, teacher.answer(some), strict=True):
        asked = {"text": f"{sample.prompt} ?"} if prompt else {}
        inputs = processor(images=sample.image, **asked, return_tensors="pt")
        ids = model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=6)
        text = processor.decode(ids[0], skip_special_tokens=True).strip()
        assert (answer.captions or answer.answers) == ((text,) if text else ())
        found.append(text)
    assert prompt or any(found)
    if prompt:
        with pytest.raises(TeacherError, match="has no chat template, so that labels cannot be"):
            load_huggingface(folder, Task.VQA, ["no", "yes"])


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llava(tmp_path_factory.mktemp("vlm"), seed=6)


def test_answers_agree_with_the_pipeline(llava: Path) -> None:
    pipeline = transformers.pipeline("image-text-to-text", str(llava))
    some = samples(4, "what is")
    teacher = load_huggingface(llava, Task.VQA, (), prompt="{}", max_new_tokens=6, batch=3)
    for sample, answer in zip(some, teacher.answer(some), strict=True):
        content = [
            {"type": "image", "image": sample.image},
            {"type": "text", "text": sample.prompt},
        ]
        (theirs,) = pipeline(
            text=[{"role": "user", "content": content}], return_full_text=False,
            generate_kwargs={"max_new_tokens": 6, "do_sample": False},
        )  # fmt: skip
        text = theirs["generated_text"].strip()
        assert answer.answers == ((text,) if text else ())


def test_labels_are_scored_by_their_likelihood(llava: Path) -> None:
    (sample,) = samples(1, "is this")
    labels = ["no", "yes!", "maybe"]
    teacher = load_huggingface(llava, Task.VQA, labels, prompt="{}")
    (answer,) = teacher.answer([sample])
    model = transformers.AutoModelForImageTextToText.from_pretrained(llava).eval()
    processor = transformers.AutoProcessor.from_pretrained(llava)
    content = [{"type": "image"}, {"type": "text", "text": sample.prompt}]
    asked = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    totals = []
    for label in labels:
        ids = processor.tokenizer(label, add_special_tokens=False)["input_ids"]
        inputs = processor(text=asked + label, images=sample.image, return_tensors="pt",
                           add_special_tokens=False)  # fmt: skip
        assert inputs["input_ids"][0, -len(ids) :].tolist() == ids
        with torch.inference_mode():
            logs = model(**inputs).logits[0].log_softmax(-1)
        places = range(len(inputs["input_ids"][0]) - len(ids) - 1, 10_000)
        totals.append(sum(logs[p, i].item() for p, i in zip(places, ids, strict=False)))
    expected = torch.tensor(totals).softmax(-1)
    assert answer.soft == pytest.approx(expected.tolist(), abs=1e-5)
    assert answer.answers == (labels[int(expected.argmax())],)


# ---- what does not fit -------------------------------------------------------------------------


def test_models_that_do_not_do_the_task(vit: Path, rt_detr: Path, tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match="is a model for ImageClassification, which gives no"):
        load_huggingface(vit, Task.DETECTION, ["cat"])
    with pytest.raises(TeacherError, match=r"is a model for ObjectDetection, .* task grounding"):
        load_huggingface(rt_detr, Task.GROUNDING)
    with pytest.raises(TeacherError, match="teacher nobody/nothing cannot be loaded"):
        load_huggingface("nobody/nothing", Task.CAPTION)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(TeacherError, match="is a model for nothing that a teacher does"):
        load_huggingface(tmp_path, Task.CAPTION)


def test_weights_that_are_pickles_are_refused(vit: Path, tmp_path: Path) -> None:
    for file in vit.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    model = transformers.ViTForImageClassification.from_pretrained(vit)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(TeacherError, match="cannot be loaded"):
        load_huggingface(tmp_path, Task.CLASSIFICATION, ALL)
