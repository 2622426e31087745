"""How much of the vision tower's work tile reuse saves on real pages: 1920 x 1080, 4 x 2 tiles and a thumbnail.

A tiny checkpoint of the VL_V2 layout with tiles of the real size, 512 pixels; a tile costs the same FLOP whatever it
shows, so fractions of tiles are fractions of FLOP, for a real tower too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engine_peers.process import PeerError, PeerProcess
from engine_replay import PEERS, progress, requests_file
from store import ROOT

from holotron.bench.replay import read_requests
from holotron.bench.traces import TraceFolder
from holotron.engine.vision_cache import tile_hashes
from holotron.model.dialects import read_config
from holotron.model.hub import read_json
from holotron.model.processing import processor_of
from holotron.model.radio import RadioConfig
from holotron.model.tiny_checkpoints import make_tiny

TILE = 512
TOKENS = 131_072
Rows = list[dict[str, Any]]


def tiled_model(folder: Path) -> Path:
    """The tiny VL_V2 checkpoint, but with tiles of 512 pixels and room for a long history."""
    make_tiny("vl-v2", folder, overwrite=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"force_image_size": TILE, "max_sequence_length": TOKENS}
    config["llm_config"]["max_position_embeddings"] = TOKENS
    config["vision_config"]["preferred_resolution"] = [TILE, TILE]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    images = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(images | {"image_size": TILE}, indent=2) + "\n")
    return folder


def tile_flops(config: RadioConfig, projector: int, hidden: int) -> float:
    """FLOP of one tile through tower and projector: its products, multiplications and additions apart."""
    patches = (TILE // config.patch_size) ** 2
    seen = patches + config.prefix_tokens
    block = 2.0 * seen * config.hidden * (4 * config.hidden + 2 * config.mlp) + 4.0 * seen**2 * config.hidden
    patch = 2.0 * patches * 3 * config.patch_size**2 * config.hidden
    projected = 2.0 * patches / 4 * (4 * config.hidden * projector + projector * hidden)
    return config.depth * block + patch + projected


def counted(traces: TraceFolder, model: Path) -> dict[str, Any]:
    """By comparing the pixels of tiles, engine apart: all tiles, and those that their trace has not had before."""
    processor = processor_of(read_config(read_json(model, "config.json")))
    assert processor is not None
    total = new = same = 0
    with progress() as bar:
        task = bar.add_task("tiles", total=sum(len(trace.turns) for trace in traces.set.traces))
        for trace in traces.set.traces:
            seen: set[bytes] = set()
            pictures: set[str] = set()
            for turn in trace.turns:
                hashes = tile_hashes(processor(traces.png(turn.image)).pixel_values)
                total += len(hashes)
                new += len(set(hashes) - seen)
                seen |= set(hashes)
                same += len(hashes) if turn.image in pictures else 0
                pictures.add(turn.image)
                bar.advance(task)
    return {"tiles": total, "tiles_each": len(hashes), "new_tiles": new, "tiles_of_repeated_pictures": same}


def measure_vision(options: argparse.Namespace) -> Rows:
    """One user after another plays its trace; the engine counts the tiles it encodes."""
    traces = TraceFolder.read(options.pages)
    model = tiled_model(options.work / "tiled-model")
    rows: Rows = [{"measure": "tiles", "traces": len(traces.set.traces), **counted(traces, model)}]
    turns = len(traces.set.traces[0].turns)
    environment = {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(ROOT / "src")}
    for history in options.histories:
        file = requests_file(traces, model, history)
        played = read_requests(file)
        command = [sys.executable, str(PEERS / "native.py"), "--model", str(model), "--threads", str(options.threads)]
        process = PeerProcess("native", command, environment, options.work / f"vision-{history}.log")
        row: dict[str, Any] = {"measure": "vision", "history": history}
        try:
            process.ask("start", 600)
            row |= process.ask(
                "replay", 3600, requests=str(file), users=1, steps=turns * len(played), skip=0, clear=True,
                limit_s=3000.0, think=0.0,
            )  # fmt: skip
        except PeerError as error:
            row["reason"] = str(error)
        finally:
            process.stop()
        steps = sum(len(trace) for trace in played)
        tiles = rows[0]["tiles"] // steps
        row |= {"tiles_of_new_screenshots": tiles * steps, "tiles_of_all_prompts": tiles * sum(
            len(request.images) for trace in played for request in trace)}  # fmt: skip
        rows.append(row)
    return rows


def vision_figures(rows: Rows) -> dict[str, float]:
    """The headline holds what was encoded against every tile of every new screenshot, each counted once: encoding anew
    what a history resends, as engines without a cache do, is the second, easier comparison."""
    figures: dict[str, float] = {}
    for row in rows:
        if row["measure"] == "vision" and row.get("tiles_encoded") and not row.get("cut_short"):
            end = "" if row["history"] == "append" else f"_{row['history']}"
            figures[f"vision_flops_fraction{end}"] = row["tiles_encoded"] / row["tiles_of_new_screenshots"]
            figures[f"vision_flops_fraction_resent{end}"] = row["tiles_encoded"] / row["tiles_of_all_prompts"]
        elif row["measure"] == "tiles":
            figures["vision_new_tiles_fraction"] = row["new_tiles"] / row["tiles"]
            figures["vision_repeated_pictures_fraction"] = row["tiles_of_repeated_pictures"] / row["tiles"]
            figures["radio_h_tflop_per_screenshot"] = row["tiles_each"] * tile_flops(RadioConfig(), 20480, 5120) / 1e12
    return figures
