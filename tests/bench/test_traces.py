"""Traces: what is written is read back, the prompts grow as a history does, and the recorders repeat themselves."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from PIL import Image

from holotron.bench.drawn import draw_traces
from holotron.bench.pages import record_pages
from holotron.bench.recording import NEXT, record_miniwob
from holotron.bench.replay import read_requests, shared_prefix, write_requests
from holotron.bench.requests import build_requests, least_computed_fraction
from holotron.bench.traces import TraceError, TraceFolder
from holotron.engine import LLM, SamplingParams
from holotron.model.special_ids import read_special_ids
from holotron.model.tiny_checkpoints import make_tiny
from holotron.model.tokenizer import load_tokenizer

PILOT = Path(__file__).resolve().parents[2] / "weights" / "pilot"
torch.set_num_threads(1)


def same_files(a: Path, b: Path) -> bool:
    names = sorted(str(path.relative_to(a)) for path in a.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(b)) for path in b.rglob("*") if path.is_file())
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def test_drawn_traces_repeat_by_seed_and_read_back(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**31)
    made = draw_traces(tmp_path / "a", traces=2, turns=4, viewport=(64, 48), seed=seed)
    draw_traces(tmp_path / "b", traces=2, turns=4, viewport=(64, 48), seed=seed)
    other = draw_traces(tmp_path / "c", traces=2, turns=4, viewport=(64, 48), seed=seed + 1)
    assert same_files(tmp_path / "a", tmp_path / "b")
    assert other.set.traces != made.set.traces
    assert TraceFolder.read(tmp_path / "a").set == made.set
    assert [len(trace.turns) for trace in made.set.traces] == [4, 4]


def test_recording_anew_leaves_no_old_screenshots(tmp_path: Path) -> None:
    draw_traces(tmp_path, traces=3, turns=3, seed=1)
    made = draw_traces(tmp_path, traces=1, turns=2, seed=2)
    kept = {path.stem for path in (tmp_path / "images").iterdir()}
    assert kept == {turn.image for trace in made.set.traces for turn in trace.turns}


def test_unusable_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="record some first"):
        TraceFolder.read(tmp_path)
    made = draw_traces(tmp_path, traces=1, turns=2)
    made.path(made.set.traces[0].turns[0].image).unlink()
    with pytest.raises(TraceError, match="lacks 1 screenshots"):
        TraceFolder.read(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index | {"surprise": 1}))
    with pytest.raises(TraceError, match=r"index\.json cannot be read"):
        TraceFolder.read(tmp_path)


@pytest.mark.parametrize("kept", [None, 2])
def test_prompts_are_what_the_engine_sees(tmp_path: Path, kept: int | None) -> None:
    traces = draw_traces(tmp_path, traces=2, turns=5, viewport=(64, 48), seed=random.SystemRandom().randrange(2**31))
    found = build_requests(traces, PILOT, kept)
    write_requests(tmp_path / "requests.jsonl", found)
    assert read_requests(tmp_path / "requests.jsonl") == found
    llm = LLM(PILOT, max_batch=2)
    place = read_special_ids(PILOT, load_tokenizer(PILOT)).image
    assert place is not None
    for request in (found[0][0], found[1][4]):
        assert request.token_ids.count(place) == len(request.images) == min(request.turn + 1, kept or 99)
        pictures = [Path(path).read_bytes() for path in request.images]
        prompt = {"prompt_token_ids": request.token_ids, "multi_modal_data": {"image": pictures}}
        output = llm.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True))[0]  # type: ignore[arg-type]
        assert output.prompt_token_ids == request.expanded(place)
        assert output.metrics.prompt_tokens == request.prompt_tokens


def test_the_history_holds_the_recorded_replies(tmp_path: Path) -> None:
    traces = draw_traces(tmp_path, traces=1, turns=4, viewport=(64, 48))
    tokenizer = load_tokenizer(PILOT)
    requests = build_requests(traces, PILOT, None)[0]
    for before, after in zip(requests, requests[1:], strict=False):
        assert shared_prefix(before.token_ids, after.token_ids) == len(before.token_ids)
        reply = traces.set.traces[0].turns[before.turn].reply
        said = tokenizer.decode(after.token_ids[len(before.token_ids) :][: before.output_tokens])
        assert said == reply
    window = build_requests(traces, PILOT, 1)[0]
    place = read_special_ids(PILOT, tokenizer).image
    assert place is not None
    assert shared_prefix(window[1].token_ids, window[2].token_ids) < len(window[1].token_ids)
    assert least_computed_fraction([requests], place) < least_computed_fraction([window], place)


def test_least_computed_fraction_by_hand(tmp_path: Path) -> None:
    traces = draw_traces(tmp_path, traces=1, turns=2, viewport=(64, 48))
    first, second = build_requests(traces, PILOT, None)[0]
    place = read_special_ids(PILOT, load_tokenizer(PILOT)).image
    assert place is not None
    expected = second.prompt_tokens / (first.prompt_tokens + second.prompt_tokens)
    assert least_computed_fraction([[first, second]], place) == pytest.approx(expected)


def test_templates_without_delimiters_get_them(tmp_path: Path) -> None:
    model = make_tiny("vl-v2", tmp_path / "model")
    traces = draw_traces(tmp_path / "traces", traces=1, turns=1, viewport=(128, 64))
    [[request]] = build_requests(traces, model, None)
    special = read_special_ids(model, load_tokenizer(model))
    at = request.token_ids.index(special.image)
    assert request.token_ids[at - 1 : at + 2] == [special.image_start, special.image, special.image_end]


@pytest.mark.browser
async def test_miniwob_recording_repeats(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**31)
    made = await record_miniwob(tmp_path / "a", traces=2, turns=5, seed=seed, workers=2)
    await record_miniwob(tmp_path / "b", traces=2, turns=5, seed=seed, workers=1)
    assert same_files(tmp_path / "a", tmp_path / "b")
    for trace in made.set.traces:
        assert len(trace.turns) == 5
        assert trace.turns[0].observation == ""
        assert all(turn.observation == "" or turn.observation.startswith(NEXT) for turn in trace.turns)
        assert {(turn.width, turn.height) for turn in trace.turns} == {made.set.viewport}


@pytest.mark.browser
async def test_pages_are_walked_offline(tmp_path: Path) -> None:
    root = tmp_path / "site"
    (root / "sub").mkdir(parents=True)
    outside = '<img src="http://127.0.0.1:9/x.png"><link rel=stylesheet href="/style.css">'
    (root / "style.css").write_text("body { background: rgb(0, 128, 0); font: 20px sans-serif }")
    for name, link in (("index.html", "sub/two.html"), ("sub/two.html", "../index.html")):
        body = f'{outside}<a href="{link}">Next</a> <input placeholder=name> <button>Go</button><p>{"text " * 900}'
        (root / name).write_text(f"<!doctype html>{body}")
    made = await record_pages(tmp_path / "traces", root, traces=1, turns=8, viewport=(320, 240), seed=3)
    again = await record_pages(tmp_path / "again", root, traces=1, turns=8, viewport=(320, 240), seed=3)
    assert made.set == again.set
    [trace] = made.set.traces
    assert len({turn.image for turn in trace.turns}) > 2
    assert not any(turn.is_error for turn in trace.turns)
    corner = Image.open(made.path(trace.turns[0].image)).convert("RGB").getpixel((1, 1))
    assert corner == (0, 128, 0), "the style sheet came from the folder"
    with pytest.raises(TraceError, match="no .html page"):
        await record_pages(tmp_path / "none", tmp_path / "again")
