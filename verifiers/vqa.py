"""VQAScore: how sure a vision-language model is that the image shows the prompt (Lin et al. 2024, eq. 1).

The score is P("Yes" | image, "Does this figure show '{prompt}'? Please answer yes or no."), read off one forward pass.
Nothing is generated.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from imgscale.errors import UserError
from imgscale.registry import verifier
from imgscale.verifiers._network import DTYPES, Network, check, fetch, plain_tensors, why_not

QUESTION = "Does this figure show '{prompt}'? Please answer yes or no."
CHOICES = "Qwen/Qwen2.5-VL-3B-Instruct, HuggingFaceTB/SmolVLM2-2.2B-Instruct or Salesforce/instructblip-flan-t5-xl"


@verifier("vqa", cite="lin2024vqascore")
class Vqa:
    """Probability that a vision-language model answers "Yes" when asked whether the image shows the prompt.

    Any image-text-to-text model of transformers will do: those that continue a text (Qwen-VL, LLaVA, PaliGemma, …),
    asked in their own chat format if they have one, and those with an encoder and a decoder (BLIP-2 and InstructBLIP
    with Flan-T5). It reads as much of a long prompt as the model does.

    Args:
        model: A folder or a hub id, such as Qwen/Qwen2.5-VL-3B-Instruct. Needed.
        revision: A branch, tag or commit of the hub.
        question: What is asked; {prompt} stands for the prompt.
        answer: The answer whose probability is the score: that of its first token, as the tokenizer writes it there.
        against: The answer that it is weighed against with normalise=yes-no.
        normalise: "vocabulary": the probability among all tokens, as in the paper. "yes-no": among these two answers.
        device: Where it runs; where the images are, if None.
        dtype: Of the network: float32, bfloat16 or float16. Probabilities are computed in float32.
        offload: Leave the device after every call.
        remote_code: Run code that comes with the model. Read it first.

    Raises:
        UserError: There is no such model, or it can't be loaded or asked like this; the message says why.
    """

    name = "vqa"
    range = (0.0, 1.0)
    reads_prompt = True
    differentiable = False  # processors work on 8-bit pictures
    licence = "that of the model"

    def __init__(
        self,
        *,
        model: str | None = None,
        revision: str | None = None,
        question: str = QUESTION,
        answer: str = "Yes",
        against: str = "No",
        normalise: Literal["vocabulary", "yes-no"] = "vocabulary",
        device: str | None = None,
        dtype: str = "float32",
        offload: bool = False,
        remote_code: bool = False,
    ) -> None:
        if not model:
            raise UserError(f"vqa asks a vision-language model that you choose; give model=…, such as {CHOICES}.")
        if "{prompt}" not in question:
            raise UserError(f"vqa's question can't be {question!r}; {{prompt}} must stand where the prompt goes.")
        files, found, self._processor, loaded = _load(model, revision, remote_code, dtype)
        self.network = Network(loaded, files, model, revision=found, device=device, dtype=dtype, offload=offload)
        self._tokenizer = getattr(self._processor, "tokenizer", self._processor)
        self._model = self.network.module
        parameters = inspect.signature(self._model.forward).parameters
        self._takes = set(parameters)
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._pairs = _is_encoder_decoder(self._model.config)
        self._tokenizer.padding_side = "right" if self._pairs else "left"  # so that the answer's place is the last one
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        self._special = [t for t in dict.fromkeys([*self._tokenizer.all_special_tokens, *added]) if len(t) > 2]
        self.question, self.answer, self.against, self.normalise = question, answer, against, normalise
        self._tokens: tuple[int, int] | None = None

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores ``images`` ``(n, 3, h, w)`` in [0, 1] for their ``n`` prompts: float32 ``(n,)`` in [0, 1]."""
        check("vqa", images, prompts)
        if not len(images):
            return torch.zeros(0, device=images.device)
        texts = [self._text(p) for p in prompts]
        pictures = _pictures(images)
        yes, no = self._answer_tokens(texts[0], pictures[0])
        with self.network.on(images.device) as device, torch.no_grad():
            scores = torch.empty(len(texts), device=device)
            for rows in self._batches(texts):
                logits = self._logits([texts[i] for i in rows], [pictures[i] for i in rows], device)
                if self.normalise == "yes-no":
                    scores[rows] = (logits[:, yes] - logits[:, no]).sigmoid()
                else:
                    scores[rows] = logits.softmax(-1)[:, yes]
        return scores.to(images.device)

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: model, hash of its weights, what it was asked, and how."""
        asked = {"question": self.question, "answer": self.answer, "normalise": self.normalise}
        if self.normalise == "yes-no":
            asked["against"] = self.against
        processor = type(self._processor).__name__
        return {"name": "vqa", **self.network.identity(), **asked, "preprocessing": {"processor": processor, "bits": 8}}

    # ------------------------------------------------------------------------------------------------ what is asked

    def _text(self, prompt: str) -> str:
        """The question about a prompt as the model is asked it."""
        for token in self._special:  # or "<image>" in a prompt would stand for another image
            prompt = prompt.replace(token, " ")
        question = self.question.replace("{prompt}", prompt)
        if getattr(self._processor, "chat_template", None):
            return self._chat(question)
        # Other processors put the image's place there by themselves.
        return self._processor.image_token + question if "PaliGemma" in type(self._processor).__name__ else question

    def _chat(self, question: str, answer: str | None = None) -> str:
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
        ]
        if answer is not None:
            chat.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        text: str = self._processor.apply_chat_template(chat, add_generation_prompt=answer is None, tokenize=False)
        return text

    def _answer_tokens(self, text: str, picture: Image.Image) -> tuple[int, int]:
        """The first tokens of the two answers, as they follow the question: the same for every prompt."""
        if self._tokens is None:
            if self._pairs:  # a decoder writes the answer alone
                yes, no = (self._tokenizer(a, add_special_tokens=False).input_ids[0] for a in self._answers)
            else:
                end, gap = self._gap(text, picture)
                yes, no = (self._next(end, gap + a) for a in self._answers)
            if yes == no:
                raise UserError(f"The answers {self.answer!r} and {self.against!r} begin alike; give others.")
            self._tokens = yes, no
        return self._tokens

    @property
    def _answers(self) -> tuple[str, str]:
        return self.answer, self.against

    def _gap(self, text: str, picture: Image.Image) -> tuple[str, str]:
        """How the question ends, and what stands between it and the answer: white space or nothing.

        The model's chat format says so, where it has one, since that is what the model was trained on. Else it is a
        space, unless the question ends with white space or a special token.
        """
        if getattr(self._processor, "chat_template", None):
            question = self.question.replace("{prompt}", "")
            asked, answered = self._chat(question), self._chat(question, self.answer)
            before = answered.removeprefix(asked).partition(self.answer)[0]
            if answered.startswith(asked) and not before.strip():
                return asked, before
        last = int(self._inputs([text], [picture])["input_ids"][0, -1])
        end = self._tokenizer.decode([last])
        return end, "" if last in self._tokenizer.all_special_ids or end[-1:].isspace() else " "

    def _next(self, text: str, more: str) -> int:
        """The first token of ``more`` after ``text``."""
        before = self._tokenizer(text, add_special_tokens=False).input_ids
        after = self._tokenizer(text + more, add_special_tokens=False).input_ids
        if len(after) > len(before) and after[: len(before)] == before:
            return int(after[len(before)])
        return int(self._tokenizer(more, add_special_tokens=False).input_ids[0])

    # ----------------------------------------------------------------------------------------------------- one pass

    def _batches(self, texts: list[str]) -> list[list[int]]:
        """Rows that go together: all, where padding before the text shifts nothing but rotary positions.

        Those are relative, and multimodal ones are counted by the mask. Learned positions would be others, so that
        rows of such models are batched by length.
        """
        config = self._model.config.get_text_config(decoder=True)
        rotary = any(getattr(config, key, None) is not None for key in ("rope_parameters", "rope_theta"))
        if self._pairs or rotary:
            return [list(range(len(texts)))]
        groups: dict[int, list[int]] = {}
        for i, text in enumerate(texts):
            groups.setdefault(len(self._tokenizer(text).input_ids), []).append(i)
        return list(groups.values())

    def _inputs(self, texts: list[str], pictures: list[Image.Image]) -> dict[str, Tensor]:
        nested = bool(getattr(self._processor, "chat_template", None))  # chats may hold several images each
        images = [[picture] for picture in pictures] if nested else pictures
        found = self._processor(images=images, text=texts, padding=True, return_tensors="pt")
        return {k: v for k, v in found.items() if k != "labels" and (self._takes_all or k in self._takes)}

    def _logits(self, texts: list[str], pictures: list[Image.Image], device: torch.device) -> Tensor:
        """Logits of the answer's first token, float32 ``(n, vocabulary)``."""
        inputs: dict[str, Any] = {}
        for key, value in self._inputs(texts, pictures).items():
            value = value.to(device) if isinstance(value, Tensor) else value
            floats = isinstance(value, Tensor) and value.is_floating_point()
            inputs[key] = value.to(self.network.dtype) if floats else value
        if self._pairs:
            start = torch.full((len(texts), 1), _decoder_start(self._model.config), device=device)
            inputs["decoder_input_ids"] = start
        elif "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = 1  # those of the whole question would fill the memory
        if "use_cache" in self._takes:
            inputs["use_cache"] = False
        logits: Tensor = self._model(**inputs).logits
        return logits[:, -1].float()


def _pictures(images: Tensor) -> list[Image.Image]:
    """PIL images, which every processor takes, of ``(n, 3, h, w)`` in [0, 1]."""
    pixels = (images.detach().float().nan_to_num(0.0).clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    return [Image.fromarray(one) for one in np.ascontiguousarray(pixels.permute(0, 2, 3, 1).numpy())]


def _is_encoder_decoder(config: Any) -> bool:
    """Whether the language model has an encoder: of the whole, or of its text part, as in BLIP-2."""
    return bool(config.is_encoder_decoder or getattr(config.get_text_config(decoder=True), "is_encoder_decoder", False))


def _decoder_start(config: Any) -> int:
    """The token that a decoder begins with."""
    for part in (config.get_text_config(decoder=True), config):
        for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
            if getattr(part, key, None) is not None:
                return int(getattr(part, key))
    return 0


def _load(model: str, revision: str | None, remote_code: bool, dtype: str) -> tuple[list[Path], str | None, Any, Any]:
    """The weights files, the hub's commit, the processor, and the network on the CPU."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder, files, found = fetch("VQA model", model, revision)
    # Code that comes with a model of the hub isn't among what `fetch` fetches.
    where, at = (model, found) if remote_code and found else (str(folder), None)
    try:
        with plain_tensors():
            processor = AutoProcessor.from_pretrained(where, revision=at, trust_remote_code=remote_code)
            network = AutoModelForImageTextToText.from_pretrained(
                where, revision=at, trust_remote_code=remote_code, dtype=DTYPES.get(dtype)
            )
    except Exception as error:  # transformers, the hub, json and safetensors each raise their own
        if "trust_remote_code" in str(error):
            raise UserError(
                f"The VQA model {model!r} brings code of its own; read it, and give remote_code=true to run it."
            ) from error
        raise UserError(why_not("VQA model", model, error)) from error
    return files, found, processor, network
