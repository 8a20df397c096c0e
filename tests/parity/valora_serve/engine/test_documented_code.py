"""Code in the documentation gives what the server gives: PEFT's snippet, and merging DoRA."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.support.cases import others_slow
from tests.support.engine_reference import make_engine, run
from tests.support.serve_helpers import EVERYTHING, make_adapter
from valora_data.contract.base_model import base_folder
from valora_serve.types import Request, SamplingParams

ROOT = Path(__file__).parents[4]
PROMPT = "what color is the star?"


def snippet(page, word):
    text = (ROOT / page).read_text(encoding="utf-8")
    return next(b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in b)


def engine_answer(base, adapters, model, prompt, count=12):
    engine = make_engine(base, adapters, fresh=True)
    request = Request("r", model, text=prompt, sampling=SamplingParams(max_tokens=count))
    return run(engine, [request])["r"].tokens


def peft_answer(model, base, prompt, count=12):
    tokenizer = AutoProcessor.from_pretrained(base_folder(base)).tokenizer
    bos = tokenizer.bos_token
    ids = tokenizer(prompt, return_tensors="pt",
                    add_special_tokens=not (bos and prompt.startswith(bos)))  # fmt: skip
    with torch.no_grad():
        made = model.generate(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"],
                              max_new_tokens=count, do_sample=False)  # fmt: skip
    return made[0, ids["input_ids"].shape[1] :].tolist()


def test_the_tutorials_adapter_answers_as_the_server(tmp_path):
    adapter = make_adapter(tmp_path / "adapter", "tiny", seed=4, strength=0.1)
    code = snippet("docs/tutorials/first-bundle.md", "PeftModel").replace(
        "bundles/detection/adapters/adapter-1", str(adapter)
    )
    names = {}
    exec(code, names)  # the page's own code
    model = names["model"].eval()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    expected = engine_answer("tiny", {"mine": adapter}, "mine", PROMPT)
    assert peft_answer(model, "tiny", PROMPT)[: len(expected)] == expected


SAVED = [{"use_dora": True}, {"modules_to_save": ["multi_modal_projector"]}, {"lora_bias": False}]


@pytest.mark.parametrize("options", others_slow(SAVED[1:2], SAVED), ids=str)
def test_merging_as_documented_serves_what_peft_computes(options, random_llava, tmp_path):
    adapter = make_adapter(tmp_path / "dora", str(random_llava), seed=2, targets=EVERYTHING
                           if "modules_to_save" not in options else ["q_proj", "up_proj"],
                           **options)  # fmt: skip
    (tmp_path / "base").symlink_to(random_llava)
    with contextlib.chdir(tmp_path):
        exec(snippet("docs/how-to/adapters.md", "merge_and_unload"), {})  # the page's own code
    base = AutoModelForImageTextToText.from_pretrained(random_llava, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter).eval()
    expected = engine_answer(str(tmp_path / "merged"), {}, None, "a quiet street")
    assert peft_answer(model, str(random_llava), "a quiet street")[: len(expected)] == expected
