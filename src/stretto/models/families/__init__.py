"""The families that our decoder supports (impl = "custom"), by `model_type`."""

from stretto.models.families import (
    afmoe,
    deepseek_v3,
    dense,
    glm4_moe,
    glm_moe_dsa,
    gpt_oss,
    laguna,
    minimax_m2,
    nemotron_h,
    qwen3_5,
    qwen3_moe,
    qwen3_vl,
)

FAMILIES = {
    family.name: family
    for family in (
        dense.LLAMA,
        dense.QWEN2,
        dense.QWEN3,
        qwen3_moe.QWEN3_MOE,
        dense.GLM4,
        glm4_moe.GLM4_MOE,
        gpt_oss.GPT_OSS,
        minimax_m2.MINIMAX_M2,
        afmoe.AFMOE,
        laguna.LAGUNA,
        qwen3_5.QWEN3_5,
        qwen3_5.QWEN3_5_MOE,
        nemotron_h.NEMOTRON_H,
        deepseek_v3.DEEPSEEK_V3,
        glm_moe_dsa.GLM_MOE_DSA,
        glm_moe_dsa.DEEPSEEK_V32,
        qwen3_vl.QWEN3_VL,
        qwen3_vl.QWEN3_VL_MOE,
        qwen3_vl.QWEN3_5_VL,
        qwen3_vl.QWEN3_5_MOE_VL,
    )
}
