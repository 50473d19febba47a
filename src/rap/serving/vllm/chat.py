"""The chat format of gpt-oss, which vLLM chooses by the dense model's names."""

from vllm.config import VllmConfig
from vllm.model_executor.models.config import GptOssForCausalLMConfig

from ...model.layers import base_model_type


class HarmonyConfig(GptOssForCausalLMConfig):
    """Serves a pruned gpt-oss with the messages, channels and tools of its dense model.

    vLLM uses OpenAI's harmony format for chats if the model type equals `gpt_oss`. Its servers
    compare it after this, in the process that has read the checkpoint. Nothing later needs the
    pruned name: classes were chosen by it before.
    """

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """As for the dense model: a reasoning parser too, if none is given."""
        GptOssForCausalLMConfig.verify_and_update_config(vllm_config)
        config = vllm_config.model_config.hf_config
        config.model_type = base_model_type(config)
