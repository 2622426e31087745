"""Loading tokenizers, and the ids that code must know."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from holotron.model.config import ConfigError
from holotron.model.special_ids import SpecialIds, read_special_ids
from holotron.model.tokenizer import build_tokenizer, coordinate_tokens, load_tokenizer, token_id
from tests.model.chat_tokenizers import V2, V2_IMAGES, V3, V3_IMAGES, byte_tokenizer

# Public facts: how Tekken splits text, and what one conversion of Mistral's tokenizers put in its place.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MISCONVERTED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LARGE = 131072


def large_tokenizer(pre_tokenizer: Any, merges: list[tuple[str, str]]) -> Tokenizer:
    """131,072 tokens: 1,000 special ones, bytes from 1,000 on, merges from 1,256 on, then fillers."""
    specials = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, 1000))]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokens += [f"filler{i}" for i in range(LARGE - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


def save(tokenizer: Tokenizer, folder: Path, config: dict[str, Any] | None = None, **more: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"bos_token": "<s>", "eos_token": "<SPECIAL_12>", **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


# Merges that the two expressions let happen or not: across a change of case, and across digits.
CASES = [("e", "B"), ("1", "2"), ("a", "y"), ("Ã", "©"), ("æ¼", "¢"), ("æ", "¼")]
CASES.sort(key=lambda pair: len("".join(pair)))


def known_ids() -> dict[str, list[int]]:
    order = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {chr(code): 1000 + order.index(chr(code)) for code in range(33, 127)}
    names |= {"".join(pair): 1256 + i for i, pair in enumerate(CASES)}

    def ids(*tokens: str) -> list[int]:
        return [names[token] for token in tokens]

    return {
        "eBay": ids("e", "B", "ay"),
        "1234": ids("1", "2", "3", "4"),
        "é": ids("Ã©"),
        "漢": ids("æ¼¢"),
    }


@pytest.mark.parametrize("pattern", [TEKKEN, MISCONVERTED])
def test_digits_accents_and_cjk_have_known_ids(pattern: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(large_tokenizer(split(pattern), CASES), tmp_path, config={"architectures": ["Some"]})
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(folder)
    assert "regex" not in caplog.text
    for text, ids in known_ids().items():
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text
    text = "Año 2012: eBay, naïve café, 漢字かな, ｱ, 1２³\r\n\t fin"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_without_the_fix_the_misconverted_expression_gives_other_ids(tmp_path: Path) -> None:
    folder = save(large_tokenizer(split(MISCONVERTED), CASES), tmp_path, config={"architectures": ["Some"]})
    plain = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, fix_mistral_regex=False)
    assert plain.encode("eBay", add_special_tokens=False) != known_ids()["eBay"]
    assert plain.encode("1234", add_special_tokens=False) != known_ids()["1234"]


def test_the_fix_leaves_tokenizers_of_another_kind_alone(tmp_path: Path) -> None:
    """transformers would put a Mistral expression in front of any tokenizer in such a folder that asks for the fix."""
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    folder = save(large_tokenizer(own, CASES), tmp_path, config={"architectures": ["Some"]})
    before = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in ("eBay 2012", "漢é"):
        expected = before.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert load_tokenizer(folder).encode(text, add_special_tokens=False) == expected
    forced = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, fix_mistral_regex=True)
    assert forced.encode("eBay", add_special_tokens=False) != before.encode("eBay", add_special_tokens=False)


def test_code_that_a_checkpoint_names_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    tokenizer = byte_tokenizer(V2, "<SPECIAL_12>").backend_tokenizer
    folder = save(tokenizer, tmp_path, auto_map={"AutoTokenizer": ["own.Own", "own.Own"]}, tokenizer_class="Own")
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, PreTrainedTokenizerFast) and not ran.exists()
    assert loaded.eos_token_id == V2.index("<SPECIAL_12>")


def test_the_chat_template_comes_from_any_of_its_files(tmp_path: Path) -> None:
    save(byte_tokenizer(V2, "<SPECIAL_12>").backend_tokenizer, tmp_path)
    assert load_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "processor"}')
    assert load_tokenizer(tmp_path).chat_template == "processor"
    save(byte_tokenizer(V2, "<SPECIAL_12>").backend_tokenizer, tmp_path, chat_template="config")
    assert load_tokenizer(tmp_path).chat_template == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).chat_template == "file"


def test_unusable_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer.json"):
        load_tokenizer(tmp_path)
    for text, message in (("{", "unreadable"), ("[]", "not a JSON object"), ("{}", "cannot be used")):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match=f"tokenizer.json.*{message}"):
            load_tokenizer(tmp_path)


def test_a_built_tokenizer_decodes_to_what_it_read() -> None:
    tokenizer = build_tokenizer(['{"a":', "}}"], "")
    text = '{"a":1,"x":1000,"y":0}}É 漢'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    first = coordinate_tokens(tokenizer)
    assert first["x"] + 1000 in ids and first["y"] in ids and token_id(tokenizer, "}}") in ids
    with pytest.raises(ValueError, match="reserved"):
        build_tokenizer(["<pad>"], "")


# --- special ids ---


def vl_tokenizer() -> PreTrainedTokenizerFast:
    """The ids of 12B-v2-VL: specials below 1,000, placeholders behind the 131,072 tokens of the text model."""
    tokenizer = large_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), [])
    more = ("<image>", "<img>", "</img>", "<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>", "<video>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in more])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<SPECIAL_12>", pad_token="<SPECIAL_12>"
    )


VL_CONFIG: dict[str, Any] = {
    "img_context_token": "<image>",
    "img_context_token_id": 131072,
    "img_start_token": "<img>",
    "img_end_token": "</img>",
    "video_context_token": "<video>",
    "vision_config": {"args": {}},
    "eos_token_id": 12,
    "llm_config": {"vocab_size": 132096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}


def test_the_ids_of_12b_v2_vl() -> None:
    tokenizer = vl_tokenizer()
    special = SpecialIds.resolve(tokenizer, VL_CONFIG, {"eos_token_id": [2, 12], "pad_token_id": 12})
    assert special == SpecialIds(
        bos=1, eos=12, stop=frozenset({2, 12}), pad=0, image=131072, image_start=131073, image_end=131074, video=131081
    )
    small = {**VL_CONFIG, "llm_config": {**VL_CONFIG["llm_config"], "vocab_size": 131072}}
    with pytest.raises(
        ConfigError, match=r"image '<image>' is 131072, but config.json llm_config has vocab_size 131072"
    ):
        SpecialIds.resolve(tokenizer, small)
    # a pad that the config gets right is taken, wherever it is stated; without one it is <unk>
    assert SpecialIds.resolve(tokenizer, {"pad_token_id": 11}).pad == 11
    assert SpecialIds.resolve(tokenizer, {"pad_token_id": 12}).pad == 0


def test_the_ids_of_omni() -> None:
    specials = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, 32))]
    named = {10: "<|im_start|>", 11: "<|im_end|>", 12: "<think>", 13: "</think>", 18: "<image>", 19: "<img>"}
    named |= {20: "</img>", 22: "<video>", 27: "<so_embedding>"}
    specials = [named.get(i, token) for i, token in enumerate(specials)]
    tokenizer = byte_tokenizer(tuple(specials), "<|im_end|>")
    config = {
        "image_token_id": 18,
        "audio_token_id": 27,
        "vision_config": {},
        "text_config": {"vocab_size": 131072, "eos_token_id": [2, 11], "pad_token_id": 0},
    }
    assert SpecialIds.resolve(tokenizer, config) == SpecialIds(
        bos=1, eos=11, stop=frozenset({2, 11}), pad=0, image=18, image_start=19, image_end=20, video=22, audio=27,
        think=12, think_end=13,
    )  # fmt: skip


def test_a_text_model_has_no_image_ids() -> None:
    special = SpecialIds.resolve(byte_tokenizer(V2, "<SPECIAL_12>"), {"vocab_size": 500})
    assert (special.image, special.image_start, special.video, special.audio, special.think) == (None,) * 5


def test_a_baseline_may_spell_its_placeholders_otherwise() -> None:
    tokens = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<SPECIAL_5>")
    tokenizer = byte_tokenizer(tokens, "<|im_end|>", pad="<|endoftext|>", bos=None)
    config = {"vision_config": {"depth": 1}, "image_token_id": 4, "vision_start_token_id": 2, "vision_end_token_id": 3}
    special = SpecialIds.resolve(tokenizer, config)
    assert (special.image, special.image_start, special.image_end) == (4, 2, 3)
    for wrong in (5, 6, 9999):  # a spare token, a byte, nothing
        with pytest.raises(ConfigError, match=f"image_token_id is {wrong}"):
            SpecialIds.resolve(tokenizer, {**config, "image_token_id": wrong})


OMNI = byte_tokenizer(V3 + V3_IMAGES, "<|im_end|>", pad="<unk>")
IMAGE_ID = OMNI.convert_tokens_to_ids("<image>")


@pytest.mark.parametrize(
    ("config", "generation", "message"),
    [
        ({"img_context_token_id": 3}, {}, rf"img_context_token_id is 3 .*'<image>' is {IMAGE_ID}"),
        ({"image_token_id": 400000}, {}, rf"image_token_id is 400000 \(None\).*'<image>' is {IMAGE_ID}"),
        ({"audio_token_id": 1}, {}, r"audio_token_id is 1 \('<s>'\).*'<so_embedding>'"),
        ({"img_context_token": "<picture>"}, {}, "'<picture>', which the tokenizer does not have"),
        ({"img_context_token": "<img>", "image_token_id": IMAGE_ID}, {}, "but the tokenizer's '<img>' is"),
        ({"bos_token_id": 0}, {}, r"config.json: bos_token_id is 0 \('<unk>'\), but the tokenizer's '<s>' is 1"),
        ({"eos_token_id": 3}, {}, r"eos_token_id is 3 \('<\|im_start\|>'\), but the tokenizer's '<\|im_end\|>' is 4"),
        ({}, {"eos_token_id": [4, 7]}, r"generation_config.json: eos_token_id is 7 "),
        ({"text_config": {"eos_token_id": 9999}}, {}, r"config.json text_config: eos_token_id is 9999 \(None\)"),
        ({"pad_token_id": 1}, {}, r"pad_token_id is 1 \('<s>'\), but '<unk>' is 0"),
        ({"pad_token_id": 9999}, {}, "pad_token_id is 9999, which the tokenizer does not have"),
        ({"eos_token_id": "4"}, {}, "is '4', which is no token id"),
        ({"eos_token_id": [True]}, {}, "is True, which is no token id"),
        ({"bos_token_id": -1}, {}, "is -1, which is no token id"),
        ({"vocab_size": 4}, {}, "is 4, but config.json has vocab_size 4"),
    ],
)
def test_ids_that_contradict_the_tokenizer_are_refused(
    config: dict[str, Any], generation: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SpecialIds.resolve(OMNI, config, generation)


def test_a_vision_model_needs_an_image_token_and_any_model_an_end() -> None:
    with pytest.raises(ConfigError, match="has a vision tower, but the tokenizer has no token '<image>'"):
        SpecialIds.resolve(byte_tokenizer(V2, "<SPECIAL_12>"), {"vision_config": {"tower": "radio"}})
    nameless = byte_tokenizer(V2 + V2_IMAGES, "")
    with pytest.raises(ConfigError, match="no eos_token"):
        SpecialIds.resolve(nameless, {})


def test_pads_never_end_a_turn() -> None:
    tokens = ("<s>", "<SPECIAL_11>", "<SPECIAL_12>")
    for pad in (None, "<SPECIAL_12>"):
        with pytest.raises(ConfigError, match="no token can pad"):
            SpecialIds.resolve(byte_tokenizer(tokens, "<SPECIAL_12>", pad=pad), {"pad_token_id": 2})
    spare = byte_tokenizer((*tokens, "<SPECIAL_13>", "<SPECIAL_40>"), "<SPECIAL_12>", pad="<SPECIAL_12>")
    assert SpecialIds.resolve(spare, {}).pad == 4
    assert SpecialIds.resolve(byte_tokenizer((*tokens, "<pad>"), "<SPECIAL_12>"), {}).pad == 3
    # a second end token pads where nothing else can, as in Qwen's tokenizers
    qwen = byte_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", pad="<|endoftext|>", bos=None)
    special = SpecialIds.resolve(qwen, {}, {"eos_token_id": [2, 0], "pad_token_id": 0})
    assert (special.pad, special.eos, special.stop, special.bos) == (0, 2, frozenset({0, 2}), None)


def test_special_ids_of_a_folder(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(V2 + V2_IMAGES, "<SPECIAL_12>")
    with pytest.raises(ConfigError, match="has no config.json"):
        read_special_ids(tmp_path, tokenizer)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer)}))
    assert read_special_ids(tmp_path, tokenizer).stop == {6}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 2]}')
    assert read_special_ids(tmp_path, tokenizer).stop == {6, 2}
