"""VQAScore on tiny random models of several real classes, against plain single passes without padding."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from imgscale import registry
from imgscale.errors import UserError
from imgscale.verifiers.vqa import QUESTION, Vqa

PROMPTS = ["a red circle", "two blue stars and a very small green square", "a red circle", ""]
TEXTS = [QUESTION, *PROMPTS, "Yes", " Yes", "No", " No", "USER: ASSISTANT:", "yes no"] * 3
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
PIXELS: dict[str, Any] = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.3] * 3}


def tokenizer(*special: str, eos_at_end: bool = False) -> Any:
    """A small byte-level tokenizer, which tells "Yes" from " Yes"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    known = ["<pad>", "<s>", "</s>", *special]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=known, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    if eos_at_end:
        made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(special),
    )


def save(path: Path, model: Any, processor: Any) -> None:
    with torch.no_grad():  # random models agree on an answer for everything; wilder ones don't
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.3)
    model.eval().save_pretrained(path)
    processor.save_pretrained(path)


def qwen2_vl(path: Path) -> None:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    marks = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokens = tokenizer(*marks)
    ids = dict(zip(marks, tokens.convert_tokens_to_ids(list(marks)), strict=True))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8}
    config = Qwen2VLConfig(
        text_config={**TEXT, "vocab_size": len(tokens), "rope_parameters": rope, "pad_token_id": 0},
        vision_config=vision,
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
    )
    limits = {"patch_size": 8, "min_pixels": 16 * 16, "max_pixels": 64 * 64}
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    images, videos = Qwen2VLImageProcessor(**limits), Qwen2VLVideoProcessor(**limits)
    processor = Qwen2VLProcessor(images, tokens, videos, chat_template=template)
    save(path, Qwen2VLForConditionalGeneration(config), processor)


def llava(path: Path) -> None:
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    tokens = tokenizer("<image>")
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **VISION, "projection_dim": 32},
        text_config={"model_type": "llama", **TEXT, "vocab_size": len(tokens), "pad_token_id": 0},
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
        image_seq_length=16,
    )
    template = (
        "{% for m in messages %}{{ m.role.upper() }}: {% for c in m.content %}{% if c.type == 'image' %}<image>\n"
        "{% else %}{{ c.text }} {% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    processor = LlavaProcessor(
        CLIPImageProcessor(**{**PIXELS, "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}),
        tokens,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    save(path, LlavaForConditionalGeneration(config), processor)


def paligemma(path: Path) -> None:
    from transformers import (
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        PaliGemmaProcessor,
        SiglipImageProcessor,
    )

    tokens = tokenizer("<image>")
    images = SiglipImageProcessor(**PIXELS)
    images.image_seq_length = 16
    processor = PaliGemmaProcessor(images, tokens)
    config = PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", **VISION, "projection_dim": 32, "vision_use_head": False},
        text_config={"model_type": "gemma", **TEXT, "head_dim": 8, "vocab_size": len(tokens), "pad_token_id": 0},
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
        projection_dim=32,
    )
    save(path, PaliGemmaForConditionalGeneration(config), processor)


QFORMER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "encoder_hidden_size": 32,
    "max_position_embeddings": 128,
}


def instructblip(path: Path) -> None:
    from transformers import (
        BlipImageProcessor,
        InstructBlipConfig,
        InstructBlipForConditionalGeneration,
        InstructBlipProcessor,
    )

    tokens, queries = tokenizer(eos_at_end=True), tokenizer()
    processor = InstructBlipProcessor(BlipImageProcessor(**PIXELS), tokens, queries, num_query_tokens=4)
    t5 = {"model_type": "t5", "vocab_size": len(tokens), "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    config = InstructBlipConfig(
        vision_config=VISION,
        qformer_config={**QFORMER, "vocab_size": len(queries)},
        text_config={**t5, "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0},
        num_query_tokens=4,
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
    )
    save(path, InstructBlipForConditionalGeneration(config), processor)


def git(path: Path) -> None:
    """Positions counted from the left end, padding or not: rows of different lengths must not share a batch."""
    from transformers import CLIPImageProcessor, GitConfig, GitForCausalLM, GitProcessor

    tokens = tokenizer()
    config = GitConfig(
        vision_config=VISION,
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    square = {**PIXELS, "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    save(path, GitForCausalLM(config), GitProcessor(CLIPImageProcessor(**square), tokens))


def blip2_opt(path: Path) -> None:
    from transformers import Blip2Config, Blip2ForConditionalGeneration, Blip2Processor, BlipImageProcessor

    tokens = tokenizer()
    processor = Blip2Processor(BlipImageProcessor(**PIXELS), tokens, num_query_tokens=4)
    opt = {"model_type": "opt", "vocab_size": len(tokens), "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    config = Blip2Config(
        vision_config=VISION,
        qformer_config=QFORMER,
        text_config={**opt, "num_attention_heads": 4, "word_embed_proj_dim": 32, "pad_token_id": 0},
        num_query_tokens=4,
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
    )
    save(path, Blip2ForConditionalGeneration(config), processor)


MODELS: dict[str, Callable[[Path], None]] = {
    f.__name__: f for f in (qwen2_vl, llava, paligemma, instructblip, blip2_opt, git)
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, write in MODELS.items():
        write(made[name])
    return made


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Vqa]:
    return {name: Vqa(model=str(folder)) for name, folder in folders.items()}


def pictures(n: int, h: int = 32, w: int = 32) -> Tensor:
    """Noise on the 8-bit grid, so that a PIL image holds exactly the same."""
    return torch.randint(0, 256, (n, 3, h, w)) / 255


def plain(name: str, folder: Path, image: Tensor, prompt: str) -> Tensor:
    """All probabilities of the first token of the answer: one image, no padding, as the model cards call them."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    question = f"Does this figure show '{prompt}'? Please answer yes or no."
    picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
    more: dict[str, Any] = {}
    if name == "qwen2_vl":
        mark = "<|vision_start|><|image_pad|><|vision_end|>"
        question = f"<|im_start|>user\n{mark}{question}<|im_end|>\n<|im_start|>assistant\n"
    elif name == "llava":
        question = f"USER: <image>\n{question} ASSISTANT:"
    elif name == "paligemma":
        question = f"<image>{question}"
    elif name == "instructblip":
        more["decoder_input_ids"] = torch.tensor([[0]])
    inputs = processor(images=picture, text=question, return_tensors="pt")
    inputs.pop("labels", None)
    with torch.no_grad():
        logits = model(**inputs, **more).logits
    assert logits.shape[0] == 1
    return torch.softmax(logits[0, -1].float(), -1)


ANSWERS = {  # as the answer stands there: after a line break or alone, or after a word
    "qwen2_vl": ("Yes", "No"),
    "llava": (" Yes", " No"),
    "paligemma": ("Yes", "No"),
    "instructblip": ("Yes", "No"),
    "blip2_opt": (" Yes", " No"),
    "git": (" Yes", " No"),
}


# ------------------------------------------------------------------------------------- against plain computations


@pytest.mark.parametrize("name", MODELS)
def test_is_the_probability_of_yes(name: str, folders: dict[str, Path], models: dict[str, Vqa]) -> None:
    images = pictures(4, 40, 48)
    tokens = models[name]._tokenizer
    yes, no = (tokens(a, add_special_tokens=False).input_ids[0] for a in ANSWERS[name])
    said = [plain(name, folders[name], image, prompt) for image, prompt in zip(images, PROMPTS, strict=True)]
    expected = torch.stack([p[yes] for p in said])
    scores = models[name](images, PROMPTS)
    assert scores.dtype == torch.float32 and scores.shape == (4,)
    assert expected.std() > 1e-4 * expected.mean()  # else the next line would prove little
    torch.testing.assert_close(scores, expected, rtol=2e-3, atol=1e-7)

    either = Vqa(model=str(folders[name]), normalise="yes-no")(images, PROMPTS)
    expected = torch.stack([p[yes] / (p[yes] + p[no]) for p in said])
    torch.testing.assert_close(either, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_shape_order_and_batch(name: str, models: dict[str, Vqa]) -> None:
    images = pictures(6)
    prompts = [PROMPTS[i % 4] for i in range(6)]
    together = models[name](images, prompts)
    assert together.isfinite().all() and ((together >= 0) & (together <= 1)).all()
    assert len(set(together.tolist())) == 6
    alone = torch.cat([models[name](images[i : i + 1], prompts[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(together, alone, rtol=2e-3, atol=1e-7)
    order = torch.randperm(6)
    again = models[name](images[order], [prompts[i] for i in order])
    torch.testing.assert_close(again, together[order], rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_one_pass_for_a_batch_and_no_more_logits_than_needed(
    name: str, models: dict[str, Vqa], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    forward = models[name]._model.forward

    def counted(**inputs: Any) -> Any:
        found = forward(**inputs)
        seen.append((len(inputs["input_ids"]), found.logits.shape[1]))
        return found

    monkeypatch.setattr(models[name]._model, "forward", counted)
    monkeypatch.setattr(models[name]._model, "generate", None)
    models[name](pictures(4), PROMPTS)
    if name in ("blip2_opt", "git"):  # one for each length
        assert sorted(n for n, _ in seen) == [1, 1, 2]
    else:
        assert seen == [(4, 1)]


# ----------------------------------------------------------------------------------------------------- conformance


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 3, 32, 32), torch.full((2, 3, 20, 50), 0.5), torch.ones(2, 3, 64, 33)]
)
@pytest.mark.parametrize("prompt", ["", "?! {prompt} {0}", "star " * 30, "ein Würfel 立方体", "an <image> of </s>"])
@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "instructblip"])
def test_any_image_and_any_prompt_get_a_number(name: str, images: Tensor, prompt: str, models: dict[str, Vqa]) -> None:
    assert models[name](images, [prompt, "a star"]).isfinite().all()


def test_no_images_are_no_scores(models: dict[str, Vqa]) -> None:
    assert models["llava"](pictures(0), []).shape == (0,)


def test_other_questions_and_answers(folders: dict[str, Path], models: dict[str, Vqa]) -> None:
    images = pictures(2)
    lower = Vqa(model=str(folders["llava"]), answer="yes")(images, PROMPTS[:2])
    asked = Vqa(model=str(folders["llava"]), question="{prompt}?")(images, PROMPTS[:2])
    scores = models["llava"](images, PROMPTS[:2])
    assert not torch.allclose(lower, scores) and not torch.allclose(asked, scores)


def test_a_special_token_in_a_prompt_is_only_white_space(models: dict[str, Vqa]) -> None:
    images = pictures(1).expand(2, -1, -1, -1)
    a, b = models["llava"](images, ["a <image> b", "a   b"])
    assert a == pytest.approx(float(b), rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_gives_float32_probabilities(name: str, folders: dict[str, Path]) -> None:
    images = pictures(4)
    half, full = (
        Vqa(model=str(folders[name]), dtype=dtype, normalise="yes-no")(images, PROMPTS)
        for dtype in ("bfloat16", "float32")
    )
    assert half.dtype == torch.float32 and torch.allclose(half, full, atol=0.1)


def test_runs_in_inference_mode_as_the_engine_calls_it(folders: dict[str, Path]) -> None:
    with torch.inference_mode():
        assert Vqa(model=str(folders["qwen2_vl"]))(pictures(2), PROMPTS[:2]).isfinite().all()


# --------------------------------------------------------------------------------------------------------- loading


def test_names_itself_in_records(folders: dict[str, Path], models: dict[str, Vqa]) -> None:
    identity = models["llava"].identity()
    weights = (folders["llava"] / "model.safetensors").read_bytes()
    assert identity["sha256"] == hashlib.sha256(weights).hexdigest()
    assert identity["question"] == QUESTION and identity["answer"] == "Yes" and identity["normalise"] == "vocabulary"
    assert identity["source"] == str(folders["llava"]) and identity["dtype"] == "float32"
    json.dumps(identity)


def test_is_registered_and_says_what_it_needs() -> None:
    entry, options = registry.verifier.resolve("vqa(normalise=yes-no, remote_code=false)")
    assert entry.target is Vqa and options == {"normalise": "yes-no", "remote_code": False}
    with pytest.raises(UserError, match="give model=…, such as Qwen/Qwen2.5-VL-3B-Instruct"):
        entry.target(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "no-such-folder"}, "There is no VQA model 'no-such-folder'; give a folder, or a hub id"),
        ({"model": "nobody/nothing"}, "'nobody/nothing' can't be loaded"),
        ({"question": "What is it?"}, r"question can't be 'What is it\?'; \{prompt\} must stand"),
        ({"dtype": "int8"}, "choose one of float32"),
    ],
)
def test_what_cannot_be_loaded_is_explained(options: dict[str, Any], message: str, folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=message):
        Vqa(**{"model": str(folders["llava"]), **options})


def test_answers_that_begin_alike_are_refused(folders: dict[str, Path]) -> None:
    vqa = Vqa(model=str(folders["llava"]), answer="Yes", against="Yes")
    with pytest.raises(UserError, match="'Yes' and 'Yes' begin alike; give others"):
        vqa(pictures(1), ["a star"])


def test_code_of_a_model_is_run_only_when_asked(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["llava"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForImageTextToText": "own.Net"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\n")
    with pytest.raises(UserError, match="brings code of its own; read it, and give remote_code=true"):
        Vqa(model=str(tmp_path))
    assert not (tmp_path / "run").exists()
