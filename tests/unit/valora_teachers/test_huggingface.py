"""Models of transformers as teachers, also the base model that reads, beside its own pipelines."""

import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.image_utils import SizeDict

from tests.support.data_sets import write_video
from tests.support.helpers import save_random_llava
from tests.support.lmm_checkpoints import CHECKPOINTS
from valora_data.schema import Answer, Document, Sample, Task, no_image
from valora_data.sources.formats.videos import read_frames
from valora_teachers.base import TeacherError, check_answers
from valora_teachers.registry import load_teacher, teacher_facts

NAMES = {0: "cat", 1: "house dog", 2: "eel", 3: "fox"}
ALL = tuple(NAMES.values())
WORDS = [*"abc?.", "cat", "dog", "red", "blue", "the", "left", "right", "what", "is", "this", "yes"]
TINY = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "initializer_range": 0.5,
}  # fmt: skip
CLEAR = TINY | {"initializer_range": 0.8, "id2label": NAMES}
BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
CLIP = {"pad_token": "!", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def load(source, task, labels=(), *, prompt="", **options):
    return load_teacher("huggingface", source, labels, options, task, prompt)


def square(side):
    return {"height": side, "width": side}


def samples(count, prompt=None):
    """Noise around a colour of its own, so that models say different things of each."""
    found = []
    for i in range(count):
        rng, (width, height) = np.random.default_rng(i), [(40, 30), (31, 44)][i % 3 == 1]
        pixels = rng.integers(0, 256, 3) * 0.7 + rng.integers(0, 76, (height, width, 3))
        image = Image.fromarray(pixels.astype(np.uint8))
        found.append(Sample(f"s{i}", image, Answer(), prompt and f"{prompt} {WORDS[i]}"))
    return found


def word_tokenizer(folder, **special):
    """A tokenizer of whole words, as BERT and CLIP have theirs."""
    vocab = {token: i for i, token in enumerate([*dict.fromkeys(special.values()), *WORDS])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token=special["unk_token"]))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = transformers.ViTConfig(**CLEAR, image_size=24, patch_size=8)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size=square(24)).save_pretrained(folder)
    return folder


def assert_soft(teacher, answer, theirs, close=1e-5):
    scores = {entry["label"]: entry["score"] for entry in theirs}
    assert answer.soft == pytest.approx([scores[name] for name in teacher.labels], abs=close)
    assert answer.choice == max(scores, key=scores.get)


def test_image_classification_agrees_with_the_pipeline(vit):
    some, done = samples(5), []
    teacher = load(vit, Task.CLASSIFICATION, ALL, batch=2)
    answers = teacher.answer(some, lambda *args: done.append(args))
    assert done == [(2, 5), (4, 5), (5, 5)]
    pipeline = transformers.pipeline("image-classification", str(vit), top_k=4)
    for sample, answer in zip(some, answers, strict=True):
        assert_soft(teacher, answer, pipeline(sample.image))
    assert len({answer.label for answer in answers}) > 1
    # Classes that mean one label add up; "house dog" is found whatever its case.
    names = {"eel": "fish", "cat": "House_Dog"}
    teacher = load(vit, Task.CLASSIFICATION, ["fish", "House_Dog"], names=names)
    for whole, answer in zip(answers, teacher.answer(some), strict=True):
        cat, dog, eel, _ = whole.soft
        total = cat + dog + eel
        assert answer.soft == pytest.approx((eel / total, (cat + dog) / total), abs=1e-5)
    with pytest.raises(TeacherError, match="has no class 'crow', only cat, house dog, eel, fox"):
        load(vit, Task.CLASSIFICATION, ["fox"], names={"crow": "fox"})
    counter = load(vit, Task.COUNTING, ["0", "1"], names={"cat": "0", "eel": "1"})
    assert all(one.count == int(np.argmax(one.soft)) for one in counter.answer(some))


def test_video_classification_agrees_with_the_pipeline(tmp_path):
    torch.manual_seed(1)
    config = transformers.VideoMAEConfig(
        **CLEAR, image_size=16, patch_size=8, num_frames=4, tubelet_size=2
    )
    transformers.VideoMAEForVideoClassification(config).save_pretrained(tmp_path)
    transformers.VideoMAEImageProcessor(
        size={"shortest_edge": 16}, crop_size=square(16)
    ).save_pretrained(tmp_path)
    pipeline = transformers.VideoClassificationPipeline(  # its video processor needs torchcodec
        transformers.AutoModelForVideoClassification.from_pretrained(tmp_path),
        image_processor=transformers.AutoImageProcessor.from_pretrained(tmp_path), top_k=4,
    )  # fmt: skip
    teacher = load(tmp_path, Task.VIDEO, ALL, batch=2)
    clips = []
    for index, levels in enumerate([[10, 60, 110, 160], [200, 150, 90, 20], [90, 90, 200, 20]]):
        path = write_video(tmp_path / f"{index}.mp4", levels, (32, 32))
        first, *rest = read_frames(path, 4)
        clips.append(Sample(str(path), first, Answer(), rest=tuple(rest)))
    for clip, answer in zip(clips, teacher.answer(clips), strict=True):
        assert_soft(teacher, answer, pipeline(clip.id), 1e-4)
    # More frames are thinned out evenly, fewer ones repeat.
    a, b, c, d = (clips[0].images[i] for i in range(4))
    shown = [(a, a, b, b, c, c, d, d), (a, b, c, d), (a, c), (a, a, c, c)]
    asked = [Sample("x", first, Answer(), rest=tuple(rest)) for first, *rest in shown]
    found = [answer.soft for answer in teacher.answer(asked)]
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[2] == pytest.approx(found[3], abs=1e-5)


@pytest.fixture(scope="module")
def rt_detr(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rtdetr")
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
    transformers.RTDetrImageProcessor(size=square(64)).save_pretrained(folder)
    return folder


def assert_same_boxes(answer, theirs, size):
    """Ours are exact and inside the image; those of pipelines are cut down to whole pixels."""
    assert theirs
    for box in answer.boxes:
        assert 0 <= box.x0 < box.x1 <= size[0] and 0 <= box.y0 < box.y1 <= size[1]
    confidences = [box.confidence for box in answer.boxes]
    assert confidences == sorted(confidences, reverse=True)
    for label, score, edges in theirs:
        clipped = np.clip(edges, 0, [size[0], size[1]] * 2)
        if clipped[0] + 1 < clipped[2] and clipped[1] + 1 < clipped[3]:
            assert any(
                box.label == label and abs(box.confidence - score) < 1e-4
                and np.abs(np.array(box.xyxy) - clipped).max() < 1.01
                for box in answer.boxes
            )  # fmt: skip


def test_detection_agrees_with_the_pipeline(rt_detr):
    pipeline = transformers.pipeline("object-detection", str(rt_detr), threshold=0.3)
    teacher, some = load(rt_detr, Task.DETECTION, ALL, threshold=0.3, batch=2), samples(3)
    answers = teacher.answer(some)
    for sample, answer in zip(some, answers, strict=True):
        theirs = [(e["label"], e["score"], [*e["box"].values()]) for e in pipeline(sample.image)]
        assert_same_boxes(answer, theirs, sample.image.size)
    every = [box.label for answer in answers for box in answer.boxes]
    chosen = load(rt_detr, Task.DETECTION, every[:1], threshold=0.3).answer(some)
    assert [box.label for a in chosen for box in a.boxes] == every[:1] * every.count(every[0])
    answers = load(rt_detr, Task.DETECTION, ALL, threshold=0.999999).answer(some)
    assert answers == [Answer()] * 3
    with pytest.raises(TeacherError, match="rt-detr finds nothing on 3 samples: check that it"):
        check_answers("rt-detr", Task.DETECTION, answers)
    check_answers("x", Task.COUNTING, [Answer(), Answer(count=0)])


def test_images_that_a_processor_cannot_take(rt_detr):
    teacher, narrow = load(rt_detr, Task.DETECTION, ALL), Image.new("RGB", (1, 5000))
    teacher._processor.size = SizeDict(shortest_edge=64, longest_edge=128)
    asked = [*samples(2), Sample("n", narrow, Answer())]
    with pytest.raises(TeacherError, match=r"such as n of 1 × 5000 pixels \(.*: cut or pad them"):
        teacher.answer(asked)


@pytest.fixture(scope="module")
def owl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("owl")
    torch.manual_seed(3)
    tokenizer = word_tokenizer(folder, **CLIP)
    config = transformers.OwlViTConfig(
        text_config={**TINY, "vocab_size": len(tokenizer)},
        vision_config={**TINY, "image_size": 32, "patch_size": 8}, projection_dim=16,
    )  # fmt: skip
    transformers.OwlViTForObjectDetection(config).save_pretrained(folder)
    images = transformers.OwlViTImageProcessor(size=square(32))
    transformers.OwlViTProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def theirs_of(model, processor, sample, text, threshold, *given):
    inputs = processor(text=text, images=sample.image, return_tensors="pt")
    with torch.inference_mode():
        outputs, more = model.eval()(**inputs), {name: inputs[name] for name in given}
    sizes = [sample.image.size[::-1]]
    return processor.post_process_grounded_object_detection(
        outputs, threshold=threshold, target_sizes=sizes, **more
    )[0]


def test_owl_agrees_with_its_processor(owl):
    labels, some = ["cat", "red_dog"], samples(3)
    teacher = load(owl, Task.DETECTION, labels, threshold=0.3, batch=2)
    model = transformers.OwlViTForObjectDetection.from_pretrained(owl)
    processor = transformers.OwlViTProcessor.from_pretrained(owl)
    for sample, answer in zip(some, teacher.answer(some), strict=True):
        theirs = []
        for label in labels:
            found = theirs_of(model, processor, sample, [[label.replace("_", " ")]], 0.3)
            pairs = zip(found["scores"].tolist(), found["boxes"].tolist(), strict=True)
            theirs += [(label, *pair) for pair in pairs]
        assert_same_boxes(answer, theirs, sample.image.size)
    # Phrases can stand for labels.
    named = load(owl, Task.DETECTION, ["pet"], names={"red cat": "pet"}, threshold=0.0)
    plain = load(owl, Task.DETECTION, ["red cat"], threshold=0.0)
    for a, b in zip(named.answer(some[:2]), plain.answer(some[:2]), strict=True):
        assert {box.label for box in a.boxes} == {"pet"}
        assert [box.xyxy for box in a.boxes] == [box.xyxy for box in b.boxes]
    with pytest.raises(TeacherError, match="has to be told what to look for: give the domain lab"):
        load(owl, Task.DETECTION)
    with pytest.raises(TeacherError, match="is mapped to 'dog', which is not one"):
        load(owl, Task.DETECTION, ["pet"], names={"red cat": "dog"})


def test_grounding_looks_for_each_sample_s_own_phrase(owl):
    some = samples(4, "the")
    teacher = load(owl, Task.GROUNDING, batch=3, threshold=0.0)
    for sample, answer in zip(some, teacher.answer(some), strict=True):
        (box,) = answer.boxes
        assert box.label == sample.prompt
        alone = load(owl, Task.DETECTION, [sample.prompt], threshold=0.0)
        assert box.xyxy == pytest.approx(alone.answer([sample])[0].boxes[0].xyxy, abs=1e-3)
    with pytest.raises(TeacherError, match="sample s0 has no phrase to look for"):
        teacher.answer(samples(1))


def test_grounding_dino(tmp_path):
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
    size = {"shortest_edge": 48, "longest_edge": 64}
    images = transformers.GroundingDinoImageProcessor(size=size)
    processor = transformers.GroundingDinoProcessor(images, tokenizer)
    processor.save_pretrained(tmp_path)
    some = samples(3, "the red")
    teacher = load(tmp_path, Task.GROUNDING, threshold=0.0, batch=1)
    for sample, answer in zip(some, teacher.answer(some), strict=True):
        found = theirs_of(model, processor, sample, f"{sample.prompt}.", 0.0, "input_ids")
        best = int(found["scores"].argmax())
        (box,) = answer.boxes
        assert box.label == sample.prompt
        assert box.confidence == pytest.approx(found["scores"][best].item(), abs=1e-5)
        clipped = np.clip(found["boxes"][best].tolist(), 0, [*sample.image.size] * 2)
        assert box.xyxy == pytest.approx(clipped, abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "task", "prompt"),
    [
        (transformers.BlipForConditionalGeneration, Task.CAPTION, ""),
        (transformers.BlipForQuestionAnswering, Task.VQA, "{} ?"),
    ],
)
def test_captions_and_answers_of_blip(kind, task, prompt, tmp_path):
    torch.manual_seed(5)
    tokenizer = word_tokenizer(tmp_path, **BERT, bos_token="[DEC]", eos_token="[SEP]")
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "pad")}
    ids |= dict.fromkeys(("eos_token_id", "sep_token_id"), tokenizer.sep_token_id)
    config = transformers.BlipConfig(
        text_config={**TINY, "encoder_hidden_size": 16, "vocab_size": len(tokenizer), **ids},
        vision_config={**TINY, "image_size": 16, "patch_size": 8},
        projection_dim=16, image_text_hidden_size=16,
    )  # fmt: skip
    model = kind(config).eval()
    model.save_pretrained(tmp_path)
    images = transformers.BlipImageProcessor(size=square(16))
    processor = transformers.BlipProcessor(images, tokenizer)
    processor.save_pretrained(tmp_path)
    some = samples(3, "what is the" if prompt else None)
    teacher = load(tmp_path, task, (), prompt=prompt, max_new_tokens=6, batch=2)
    found = []
    for sample, answer in zip(some, teacher.answer(some), strict=True):
        asked = {"text": f"{sample.prompt} ?"} if prompt else {}
        inputs = processor(images=sample.image, **asked, return_tensors="pt")
        written = model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=6)
        text = processor.decode(written[0], skip_special_tokens=True).strip()
        assert (answer.captions or answer.answers) == ((text,) if text else ())
        found.append(text)
    assert prompt or any(found)
    if prompt:
        with pytest.raises(TeacherError, match="has no chat template, so that labels cannot be"):
            load(tmp_path, Task.VQA, ["no", "yes"])


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return save_random_llava(tmp_path_factory.mktemp("vlm"), seed=6)


def test_answers_agree_with_the_pipeline(llava):
    pipeline = transformers.pipeline("image-text-to-text", str(llava))
    some = samples(4, "what is")
    teacher = load(llava, Task.VQA, (), prompt="{}", max_new_tokens=6, batch=3)
    greedy = {"max_new_tokens": 6, "do_sample": False}
    for sample, answer in zip(some, teacher.answer(some), strict=True):
        shown = {"type": "image", "image": sample.image}
        turn = {"role": "user", "content": [shown, {"type": "text", "text": sample.prompt}]}
        (theirs,) = pipeline(text=[turn], return_full_text=False, generate_kwargs=greedy)
        text = theirs["generated_text"].strip()
        assert answer.answers == ((text,) if text else ())


def test_labels_are_scored_by_their_likelihood(llava):
    (sample,), labels = samples(1, "is this"), ["no", "yes!", "maybe"]
    (answer,) = load(llava, Task.VQA, labels, prompt="{}").answer([sample])
    model = transformers.AutoModelForImageTextToText.from_pretrained(llava).eval()
    processor = transformers.AutoProcessor.from_pretrained(llava)
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": sample.prompt}]}
    asked = processor.apply_chat_template([turn], add_generation_prompt=True)
    totals = []
    for label in labels:
        ids = processor.tokenizer(label, add_special_tokens=False)["input_ids"]
        inputs = processor(text=asked + label, images=sample.image, return_tensors="pt",
                           add_special_tokens=False)  # fmt: skip
        assert inputs["input_ids"][0, -len(ids) :].tolist() == ids
        with torch.inference_mode():
            logs = model(**inputs).logits[0, -len(ids) - 1 : -1].log_softmax(-1)
        totals.append(sum(row[i].item() for row, i in zip(logs, ids, strict=True)))
    expected = torch.tensor(totals).softmax(-1)
    assert answer.soft == pytest.approx(expected.tolist(), abs=1e-5)
    assert answer.answers == (labels[int(expected.argmax())],)


def test_models_that_do_not_do_the_task(vit, rt_detr, tmp_path):
    model = transformers.ViTForImageClassification.from_pretrained(vit)
    for name in ("pickled", "several", "bert"):
        (tmp_path / name).mkdir()
        for file in vit.glob("*.json"):
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(tmp_path / "several")
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    for place, task, labels, message in (
        (vit, Task.DETECTION, ["cat"], "is a model for ImageClassification, which gives no"),
        (rt_detr, Task.GROUNDING, (), r"is a model for ObjectDetection, .* task grounding"),
        ("nobody/nothing", Task.CAPTION, (), "teacher nobody/nothing cannot be loaded"),
        (tmp_path / "bert", Task.CAPTION, (), "is a model for nothing that a teacher does"),
        (tmp_path / "several", Task.CLASSIFICATION, ALL, "gives several labels at once"),
        (tmp_path / "pickled", Task.CLASSIFICATION, ALL, "cannot be loaded"),
    ):
        with pytest.raises(TeacherError, match=message):
            load(place, task, labels)


TEXTS = ["417 color red\n820 thing star", "131 color blue\n417 color green\n900 table 21"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(CHECKPOINTS["llava"](tmp_path_factory.mktemp("base"), seed=3))


def test_it_answers_as_transformers_does_with_the_document_in_the_prompt(base):
    teacher = load_teacher("in_context", base, (), {"max_tokens": 5}, Task.CONTEXT, "{}")
    samples = [
        Sample(question, no_image(), Answer(), question, document=Document(text))
        for question in ("417 color?", "which table has 900?")
        for text in TEXTS
    ]
    seen = []
    answers = teacher.answer(samples, lambda done, count: seen.append((done, count)))
    model = teacher.model
    for sample, answer in zip(samples, answers, strict=True):
        turns = [
            {"role": role, "content": [{"type": "text", "text": text}]}
            for role, text in (("system", sample.document.text), ("user", sample.prompt))
        ]
        inputs = model.process(model.render(turns))
        with torch.no_grad():
            ids = model.model.generate(**inputs, max_new_tokens=5, do_sample=False)
        assert answer.answers == (model.text_of(ids[0, inputs["input_ids"].shape[1] :].tolist()),)
    assert seen[-1] == (4, 4)


def test_what_it_cannot_answer_is_refused(base, tmp_path):
    teacher = load_teacher("in_context", base, (), {}, Task.CONTEXT, "{}")
    with pytest.raises(TeacherError, match="asks about no document"):
        teacher.answer([Sample("a", no_image(), Answer(), "why?")])
    long = Sample("ledger/val/0", no_image(), Answer(), "why?", document=Document("a b " * 9000))
    with pytest.raises(TeacherError, match=r"domain ledger: the document has \d+ tokens"):
        teacher.answer([long])
    image = Sample("ledger/val/0", no_image(), Answer(), "an <image>?", document=Document("a b"))
    assert len(teacher.answer([image])) == 1  # which is text
    with pytest.raises(TeacherError, match="leave labels"):
        load_teacher("in_context", base, ("yes", "no"), {}, Task.CONTEXT, "{}")
    # It is another teacher if the model is another; answers do not depend on batches.
    settings, inputs = teacher_facts("in_context", base, {"max_tokens": 5, "batch": 2})
    assert settings["options"] == {"max_tokens": 5}
    other = str(CHECKPOINTS["llava"](tmp_path / "other", seed=4))
    assert teacher_facts("in_context", other, {"max_tokens": 5})[1] != inputs
