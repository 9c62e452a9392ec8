"""The families that our decoder supports (impl = "custom"), by `model_type`."""

from stretto.models.families import dense, glm4_moe, qwen3_moe

FAMILIES = {
    family.name: family
    for family in (dense.LLAMA, dense.QWEN2, dense.QWEN3, qwen3_moe.QWEN3_MOE, glm4_moe.GLM4_MOE)
}
