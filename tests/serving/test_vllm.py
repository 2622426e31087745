"""vLLM: what its launcher counts and says, what its plugin registers, and, where vLLM is, the tokens it chooses."""

from __future__ import annotations

import json
import math
import pickle
import random
import secrets
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from holotron.model.config import ConfigError
from holotron.model.dialects import read_config
from holotron.model.presets import preset_config
from holotron.model.tiny_checkpoints import make_tiny
from holotron.serving.vllm_launch import launch
from holotron.serving.vllm_memory import GIB, pages, read_model
from holotron.serving.vllm_plan import Deployment, Plan, plan
from holotron.serving.vllm_plugin import OWN, RELEASED, register
from holotron.serving.vllm_plugin.configs import CONFIGS, ReleasedConfig, ServedConfig, tower_sizes
from holotron.serving.vllm_plugin.heads import WIDTHS, attention_width, widen
from holotron.serving.vllm_plugin.logits import only_tokens
from holotron.serving.vllm_plugin.torchvision import placeholder

ROOT = Path(__file__).resolve().parents[2]
PILOT = ROOT / "weights" / "pilot"
MIB = 2**20
H100 = 79.6
without_vllm = pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
with_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed in this interpreter; see docs/vllm.md for how to run this"
)


def value(made: Plan, flag: str) -> str:
    """What follows a flag in the command."""
    words = made.arguments
    return words[words.index(flag) + 1]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_pages_of_the_12b_are_those_its_architecture_gives() -> None:
    """28 Mamba layers in groups of 6 with the 6 attention layers: five blocks of state, and one per 1312 tokens."""
    found = pages(preset_config("holotron-12b"), "bfloat16", prefix_caching=False)
    assert found.block_tokens == 1312
    assert found.block_bytes == 1312 * 24_576 == 30.75 * MIB
    assert found.state_blocks == 5
    assert found.sequence_bytes(0) == 153.75 * MIB
    assert found.sequence_bytes(1) == found.sequence_bytes(1312) == 184.5 * MIB
    assert found.sequence_bytes(1313) == 215.25 * MIB


@pytest.mark.parametrize(("context", "fits"), [(16384, 79), (32768, 47), (65536, 26)])
def test_residents_of_an_h100_without_prefix_caching(context: int, fits: int) -> None:
    """Figures of an independent count of the same layout."""
    found = pages(preset_config("holotron-12b"), "bfloat16", prefix_caching=False)
    pool = H100 * GIB * 0.9 - 4 * GIB - found.weights
    assert pool // found.sequence_bytes(context) == fits


@pytest.mark.parametrize(
    ("preset", "block"), [("nemotron-nano-9b-v2", 1312), ("nemotron-3-nano-30b-a3b", 2096), ("holotron-12b", 1312)]
)
def test_blocks_hold_the_state_of_a_layer_and_no_more_than_needed(preset: str, block: int) -> None:
    config = preset_config(preset)
    language = config.language
    mamba, attention = (language.hybrid_override_pattern.count(letter) for letter in "M*")
    found = pages(config, "bfloat16", prefix_caching=True)
    state = language.state_bytes(4, 2) / mamba
    token = language.kv_bytes_per_token(2) / attention
    assert found.block_tokens == block
    assert (block - 16) * token < state <= block * token
    assert found.state_blocks == 2 * math.ceil(mamba / attention)


def test_floats_of_32_bits_double_weights_and_keys() -> None:
    config = preset_config("holotron-12b")
    half, full = (pages(config, dtype, prefix_caching=False) for dtype in ("bfloat16", "float32"))
    assert full.weights / half.weights == pytest.approx(2, rel=1e-3)
    assert full.block_tokens is not None and half.block_tokens is not None
    assert full.block_tokens < half.block_tokens  # the same state is as large as fewer, wider tokens


def test_a_preset_goes_by_its_hub_id_and_a_baseline_without_state_is_refused() -> None:
    assert read_model("holotron-12b")[0] == read_model("Hcompany/Holotron-12B")[0] == "Hcompany/Holotron-12B"
    assert read_model(str(PILOT))[1].language.hidden_size == 192
    with pytest.raises(ConfigError, match="no hybrid"):
        read_model("holo2-8b")


# --- placement --------------------------------------------------------------------------------------------------------


def test_one_gpu_seats_what_fits_and_says_who_waits() -> None:
    made = plan(Deployment(model="holotron-12b", gpus=1, gpu_memory_gib=H100, users=100, context=16384))
    sequence = pages(preset_config("holotron-12b"), "bfloat16", prefix_caching=True).sequence_bytes(16384)
    assert value(made, "--tensor-parallel-size") == "1"
    assert int(value(made, "--max-num-seqs")) == made.residents == 62
    assert made.residents * sequence < 43.2 * GIB < (made.residents + 1) * sequence
    assert "38 of them wait" in made.explain()
    assert "--data-parallel-size" not in made.arguments and not made.first


def test_fewer_users_than_seats_bound_the_batch() -> None:
    made = plan(Deployment(model="holotron-12b", users=7))
    assert value(made, "--max-num-seqs") == "7"
    assert value(made, "--mm-processor-cache-type") == "shm"
    assert "--api-server-count" not in made.arguments  # the cache in shared memory allows one process


def test_several_gpus_make_copies_before_they_split_a_model() -> None:
    made = plan(Deployment(model="holotron-12b", gpus=4, users=200, context=16384))
    assert (made.tensor_parallel, made.replicas) == (1, 4)
    assert value(made, "--data-parallel-size") == "4"
    assert value(made, "--max-num-seqs") == "50"


def test_small_gpus_share_one_model() -> None:
    """24.6 GiB of weights do not fit into 23 GiB."""
    made = plan(Deployment(model="holotron-12b", gpus=4, gpu_memory_gib=23, users=20, context=16384))
    assert made.tensor_parallel == 2 and made.residents * made.replicas >= 20
    pool = made.tensor_parallel * (23 * GIB * 0.9 - 4 * GIB)
    found = pages(preset_config("holotron-12b"), "bfloat16", prefix_caching=True)
    assert found.weights + made.residents * found.sequence_bytes(16384) <= pool


def test_several_nodes_are_joined_by_ray() -> None:
    made = plan(Deployment(model="holotron-12b", gpus=8, nodes=2, users=400))
    assert any(line.startswith("ray start --head") and "--num-gpus 8" in line for line in made.first)
    assert any(line.startswith("ray start --address") for line in made.first)
    assert value(made, "--distributed-executor-backend") == value(made, "--data-parallel-backend") == "ray"
    assert value(made, "--data-parallel-size") == "16" and value(made, "--data-parallel-size-local") == "8"
    assert made.explain().index("ray start --head") < made.explain().index("vllm serve")


def test_a_copy_reaches_over_nodes_only_where_one_node_is_too_small() -> None:
    made = plan(Deployment(model="holotron-12b", gpus=2, nodes=4, gpu_memory_gib=11.5, users=5))
    assert made.tensor_parallel == 8 and made.replicas == 1
    assert "waits for the network" in made.explain()
    near = plan(Deployment(model="holotron-12b", gpus=2, nodes=4, gpu_memory_gib=23, users=5))
    assert near.tensor_parallel == 2


def test_what_does_not_fit_is_refused_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match=r"24\.6 GiB of weights .* 1 GPUs of 16 GiB"):
        plan(Deployment(model="holotron-12b", gpu_memory_gib=16))
    with pytest.raises(ConfigError, match="tensor_parallel 3 does not divide"):
        plan(Deployment(model="holotron-12b", gpus=3, tensor_parallel=3))
    with pytest.raises(ConfigError, match="more than half"):
        plan(Deployment(model="holotron-12b", gpus=0, memory_gib=24))
    with pytest.raises(ConfigError, match="the model's is 131072"):
        plan(Deployment(model="holotron-12b", context=131073))


@pytest.mark.parametrize(
    "wrong",
    [
        {"users": 0}, {"images": 0}, {"gpus": -1}, {"dtype": "int8"}, {"gpus": 0, "nodes": 2},
        {"gpus": 0, "tensor_parallel": 2},
    ],
)  # fmt: skip
def test_contradictions_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Deployment(**{"model": "holotron-12b"} | wrong)


# --- flags ------------------------------------------------------------------------------------------------------------


def test_flags_of_the_workload() -> None:
    made = plan(Deployment(model="holotron-12b", users=100, images=5, context=40000))
    assert json.loads(value(made, "--limit-mm-per-prompt")) == {"image": 5, "video": 0, "audio": 0}
    assert value(made, "--max-model-len") == "40000"
    assert value(made, "--video-pruning-rate") == "0"
    assert value(made, "--mamba-ssm-cache-dtype") == "float32"
    assert value(made, "--api-server-count") == "2"
    assert "--enable-prefix-caching" in made.arguments and "--trust-remote-code" not in made.arguments
    assert int(value(made, "--max-num-batched-tokens")) >= 13 * 256 + 2  # twelve tiles and the thumbnail
    assert all(flag.reason for flag in made.flags)


def test_the_default_context_holds_the_screenshots() -> None:
    few, many = (plan(Deployment(model="holotron-12b", images=images)) for images in (3, 40))
    assert few.context == 16384
    assert many.context >= 40 * (768 + 2) + 4096 and many.context % 1024 == 0


def test_a_text_model_gets_no_image_flags() -> None:
    made = plan(Deployment(model="nemotron-nano-9b-v2"))
    assert not [word for word in made.arguments if word.startswith(("--limit-mm", "--mm-", "--video"))]


def test_a_cpu_gets_its_own_settings() -> None:
    made = plan(Deployment(model=str(PILOT), gpus=0, cores=2, memory_gib=24, users=4, compiler=False))
    assert made.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1" and made.environment["OMP_NUM_THREADS"] == "2"
    assert int(made.environment["VLLM_CPU_KVCACHE_SPACE"]) >= 1
    assert value(made, "--dtype") == "float32"
    assert "--no-enable-prefix-caching" in made.arguments and "--enforce-eager" in made.arguments
    assert "--tensor-parallel-size" not in made.arguments
    assert plan(Deployment(model=str(PILOT), gpus=0)).environment["VLLM_CPU_OMP_THREADS_BIND"] == "0"


def test_print_only_shows_a_command_that_a_shell_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("holotron-12b", print_only=True, gpus=1, users=9, extra=["--seed", "3"], api_key="hidden word") == 0
    shown = capsys.readouterr().out
    command, _, reasons = shown.partition("\nwhy\n")
    read = subprocess.run(
        ["bash", "-c", f"vllm() {{ printf '%s\\0' \"$@\"; }}\n{command}"], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    assert read[:2] == ["serve", "Hcompany/Holotron-12B"]
    assert json.loads(read[read.index("--limit-mm-per-prompt") + 1])["image"] == 3
    assert read[read.index("--host") + 1] == "127.0.0.1" and read[read.index("--seed") + 1] == "3"
    assert "hidden word" not in shown
    for word in (word for word in read if word.startswith("--")):
        assert word in reasons


def test_an_open_address_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="API key"):
        launch("holotron-12b", print_only=True, gpus=1, host="0.0.0.0")
    assert launch("holotron-12b", print_only=True, gpus=1, host="0.0.0.0", insecure=True) == 0
    assert launch("holotron-12b", print_only=True, gpus=1, host="::1") == 0


@without_vllm
def test_without_vllm_it_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("holotron-12b", gpus=1) == 1
    assert "pip install vllm" in capsys.readouterr().err


# --- plugin -----------------------------------------------------------------------------------------------------------


def test_the_package_never_imports_vllm_by_itself() -> None:
    code = (
        "import sys, holotron, holotron.serving.vllm_plugin, holotron.serving.vllm_launch\n"
        "import holotron.serving.vllm_plugin.configs\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'vllm'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@without_vllm
def test_registering_without_vllm_says_so() -> None:
    with pytest.raises(ImportError, match="pip install vllm"):
        register()


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    named = EntryPoint("holotron", stated["vllm.general_plugins"]["holotron"], "vllm.general_plugins")
    assert named.load() is register


@pytest.mark.parametrize("family", ["vl-v2", "omni"])
def test_released_configs_say_what_vllm_reads(family: str, tmp_path: Path) -> None:
    values = json.loads((make_tiny(family, tmp_path / family, secrets.randbelow(1000)) / "config.json").read_text())
    made = next(c for c in CONFIGS if c.model_type == values["model_type"])(**values)
    ours = read_config(values)
    text, vision = made.text_config, made.vision_config
    assert text.hybrid_override_pattern == ours.language.hybrid_override_pattern
    assert text.architectures == ["NemotronHForCausalLM"] and text.dtype == torch.float32
    assert (text.head_dim, text.vocab_size) == (ours.language.head_dim, ours.language.vocab_size)
    assert tower_sizes(vision.args["model"]) == (64, 2, 2, 256)
    assert vision.args["register_multiple"] == values["vision_config"]["args"]["register_multiple"]
    assert ("min_num_patches" in vision.args) == (family == "omni")
    assert made.get_text_config() is text and made.template == values.get("template")
    again = pickle.loads(pickle.dumps(made))  # as vLLM sends it to its workers
    assert again.text_config.to_dict() == text.to_dict() and again.vision_config.args == vision.args


def test_a_release_that_states_sizes_instead_of_a_name_gets_one() -> None:
    values = dict(preset_values("nemotron-3-nano-omni"))
    made = ReleasedConfig(**values)
    args = made.vision_config.args
    assert tower_sizes(args["model"]) == (1280, 32, 16, 5120)
    assert args["register_multiple"] == 10 and not args["cls_token_per_teacher"]  # 1 + 9 prefix tokens
    assert args["cpe_max_size"] == 2048


def preset_values(name: str) -> dict[str, Any]:
    from holotron.model.presets import find_preset

    return dict(find_preset(name).values)


def test_a_known_tower_keeps_its_name() -> None:
    made = ReleasedConfig(**preset_values("holotron-12b"))
    assert made.vision_config.args["model"] == "vit_huge_patch16_224"
    assert tower_sizes(made.vision_config.args["model"]) is None
    with pytest.raises(ConfigError, match="no vision_config"):
        ReleasedConfig(**{key: v for key, v in preset_values("holotron-12b").items() if key != "vision_config"})


def test_our_own_config_widens_heads_to_a_kernel() -> None:
    made = ServedConfig.from_dict(json.loads((PILOT / "config.json").read_text()))
    assert made.language.head_dim == 48 and made.text_config.head_dim == 64
    again = ServedConfig.from_dict(made.to_dict())
    assert again.text_config.head_dim == 64 and again.language.head_dim == 48
    assert attention_width(64) == 64 and attention_width(513 - 1) == 512
    with pytest.raises(ConfigError, match="wider"):
        attention_width(513)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wider_heads_attend_as_before(dtype: torch.dtype) -> None:
    narrow = random.choice([n for n in range(8, 60, 8) if n not in WIDTHS])
    wide, hidden, heads, kv_heads = attention_width(narrow), 24, 4, 2
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}, width {narrow} -> {wide}")
    torch.manual_seed(seed)
    rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    weights = {name: (torch.randn(n * narrow, hidden) / hidden**0.5).to(dtype) for name, n in rows.items()}
    weights["o_proj"] = (torch.randn(hidden, heads * narrow) / (heads * narrow) ** 0.5).to(dtype)
    inputs = torch.randn(9, hidden, dtype=torch.float64)

    def attend(weights: dict[str, torch.Tensor], width: int) -> torch.Tensor:
        q, k, v = ((inputs @ weights[n].double().T).unflatten(1, (-1, width)).transpose(0, 1) for n in rows)
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None].repeat_interleave(2, 1), v[None].repeat_interleave(2, 1), is_causal=True
        )
        return out[0].transpose(0, 1).flatten(1) @ weights["o_proj"].double().T

    wider = {name: widen(f"layers.4.mixer.{name}.weight", weight, narrow, wide) for name, weight in weights.items()}
    torch.testing.assert_close(attend(wider, wide), attend(weights, narrow), rtol=1e-5, atol=1e-5)
    other = torch.randn(3, 5)
    assert widen("layers.0.mixer.in_proj.weight", other, narrow, wide) is other


def test_ids_without_a_token_are_never_chosen() -> None:
    known = random.randrange(2, 20)
    logits = torch.randn(3, 24)
    kept = logits.clone()
    logits[:, known:] += 100
    assert int(only_tokens(logits, known).argmax(-1).max()) < known  # type: ignore[union-attr]
    assert torch.equal(logits[:, :known], kept[:, :known])
    assert only_tokens(None, known) is None and only_tokens(kept, None) is kept


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed here")
def test_the_placeholder_for_torchvision_is_gone_afterwards() -> None:
    with placeholder():
        import torchvision.transforms as kept  # type: ignore[import-untyped,unused-ignore]
    with pytest.raises(AttributeError):
        kept.Compose  # noqa: B018
    with pytest.raises(ImportError):
        import torchvision.transforms  # noqa: F401
    with pytest.raises(RuntimeError), placeholder():
        raise RuntimeError
    assert "torchvision" not in sys.modules


# --- with vLLM --------------------------------------------------------------------------------------------------------


@with_vllm
def test_vllm_knows_our_classes_and_takes_our_flags() -> None:
    register()
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = ModelRegistry.get_supported_archs()
    assert {*RELEASED, OWN} <= set(known)
    assert isinstance(AutoConfig.from_pretrained(PILOT), ServedConfig)
    for deployment in (
        Deployment(model="holotron-12b"),
        Deployment(model="holotron-12b", gpus=8, nodes=2, gpu_memory_gib=23, users=400),
        Deployment(model=str(PILOT), gpus=0, cores=2, compiler=False),
    ):
        made = plan(deployment)
        read = make_arg_parser(FlexibleArgumentParser()).parse_args(made.arguments)
        assert read.limit_mm_per_prompt["image"] == 3 and read.max_model_len == made.context


@with_vllm
@pytest.mark.slow
def test_vllm_chooses_the_native_engines_tokens(tmp_path: Path) -> None:
    """The pilot and a tiny checkpoint of the 12B's layout, images included: two engine starts, minutes."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import vllm_agreement

    figures, rows = vllm_agreement.measure(sys.executable, ["pilot", "vl-v2"], 24, secrets.randbelow(2**31))
    assert all(row["same_prompt"] for row in rows)
    for row in rows:
        assert row["first_difference"] is None or row["least_margin"] < 1e-3, row
        assert row["logprob_difference"] < 1e-3, row
    assert figures["vllm_greedy_agreement"] > 0.9
