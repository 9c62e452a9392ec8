"""Flags of Megatron-LM about the model's shape, parallelism and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stretto.base.errors import ConfigError
from stretto_vime.flags.flag import Flag, Setting, Values, attribute_of, copies, equal, noted, part, refused, sets
from stretto_vime.flags.mesh import BACKEND, EXPERTS, axes, has_megatron, has_plugin, splits_tokens
from stretto_vime.flags.shape import SHAPES, has_tower, read_shape

HOW = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers")
OVERRIDES = (
    *HOW, "--moe-token-dispatcher-type", "--moe-enable-deepep", "--attention-softmax-in-fp32", "--deterministic-mode",
    "--moe-shared-expert-overlap",
)  # fmt: skip
"""Arguments that Megatron gets as they were typed."""
RECOMPUTED = tuple(map(attribute_of, HOW))
NOT_SPLIT = "Every rank has all layers; their weights are sharded over all ranks, and results are the same."
NO_DISK = (
    "every update would read and write the whole state, 12 bytes a weight, on that disk; it is sharded over all ranks "
    "here, so use --optimizer-cpu-offload, for CPU memory, or more nodes"
)
NO_BALANCE = "the loss is that of the policy alone; use 0"
ALONE = (
    "Layers that predict several tokens stay as they are, and engines may draft with them, less often right as "
    "the policy moves; what the policy learns is the same."
)

# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "Training backend": (
        part("--train-backend", "text", "megatron", "trainer.backend", "Training backend; vime has Megatron-LM alone.",
             choices=("megatron",),
             note="Typed, Megatron-Core trains where it is there and does what is asked for (docs/megatron.md); else, "
                  "or left out, stretto's own trainer does, with the same results."),
        sets("--custom-model-provider-path", "text", None, "trainer.hooks.model", "Function that builds the model.",
             note="It is called as `provider(args, build)` and changes the model that `build()` gives: "
                  "docs/data.md. One of vime_plugins is not: each family has modules of its own."),
        refused("--megatron-to-hf-mode", "text", "raw",
                "weights have Hugging Face's names from the start; leave it out", "How weights are renamed.",
                allowed=("bridge",)),
        equal("--model-name", "text", None, "The family is config.json's model_type.",
              "Name of the architecture for conversions."),
        noted("--qwen-gdn-backend", "text", "fla", "There is one implementation.", "Kernels of gated delta nets."),
        equal("--transformer-impl", "text", "transformer_engine", "The modules are stretto's own.",
              "Modules of Megatron-LM.", choices=("local", "transformer_engine")),
        equal("--attention-backend", "text", "auto", "torch chooses the kernel.", "Kernel of attention."),
    ),
    "Model parameters": (
        *(shape.flag(name) for name, shape in SHAPES.items()),
        *(equal(name, "integer", None, "Rows are packed; --rollout-max-context-len bounds them.", "Not used by vime.")
          for name in ("--seq-length", "--max-position-embeddings", "--max-positional-embedding")),
        equal("--make-vocab-size-divisible-by", "integer", 128, "The vocabulary is not padded.",
              "Padding of the vocabulary."),
        noted("--mtp-num-layers", "integer", None, ALONE, "Layers that predict several tokens.", allowed=(0,)),
        equal("--mtp-loss-scaling-factor", "number", 0.2, "It is of --enable-mtp-training.", "Weight of their loss."),
        noted("--enable-mtp-training", "switch", False, ALONE, "Train them."),
        *(equal(name, "switch", False, text, meaning) for name, text, meaning in (
            ("--use-flash-attn", "torch chooses the kernel.", "Kernel of attention."),
            ("--no-rope-fusion", "There is no such kernel.", "Without a fused kernel."),
            ("--no-masked-softmax-fusion", "There is no such kernel.", "Without a fused kernel."),
            ("--no-position-embedding", "No family has learned positions.", "Without learned positions."),
            ("--enable-experimental", "There is nothing to allow.", "Allow what Megatron-LM calls experimental."),
            ("--moe-router-fusion", "There is no such kernel.", "Fused router."),
            ("--moe-shared-expert-overlap", "It changes the time only.", "The shared expert runs beside the others."),
        )),
        noted("--spec", "list", None, "Each family has modules of its own.", "Module and name of the layers."),
        noted("--moe-router-dtype", "text", None, "The router computes in float32.", "Type of the router.",
              allowed=("fp32",), choices=("fp32", "fp64")),
        equal("--moe-token-drop-policy", "text", "probs", "No token is dropped.", "Which tokens are dropped.",
              choices=("probs", "position")),
        refused("--moe-expert-capacity-factor", "number", None, "no token is dropped; leave it out",
                "Tokens that an expert takes."),
        refused("--moe-aux-loss-coeff", "number", 0.0, NO_BALANCE, "Weight of a loss that balances experts."),
        refused("--moe-z-loss-coeff", "number", None, NO_BALANCE, "Weight of a loss that keeps scores small.",
                allowed=(0.0,)),
        sets("--moe-router-bias-update-rate", "number", 1e-3, "model.moe_bias_update_rate",
             "Step of the bias that balances experts; 0: it stays.", note="With --moe-router-enable-expert-bias."),
        part("--moe-router-load-balancing-type", "text", "aux_loss", "", "How experts are balanced.",
             choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
             note="By nothing: with losses of weight 0 these are the same."),
        copies("--deterministic-mode", "switch", False, "trainer.is_deterministic", "The same results in every run.",
               note="The trainer's; --vllm-enable-deterministic-inference is the engines'."),
        equal("--attention-dropout", "number", 0.1, "There is no dropout.", "Dropout of attention."),
        equal("--hidden-dropout", "number", 0.1, "There is no dropout.", "Dropout of hidden states."),
    ),
    "Parallelism and recomputation": (
        sets("--tensor-model-parallel-size", "integer", 1, "model.tp model.cp",
             "TP: ranks that share the features of a token.",
             note="Where a family's layers cannot be cut so, CP, or more replicas."),
        sets("--sequence-parallel", "switch", False, "model.sequence_parallel",
             "SP: split tokens over the TP ranks outside the layers that TP cuts."),
        part("--pipeline-model-parallel-size", "integer", 1, "trainer.megatron.pp", "PP: ranks that share the layers.",
             note=f"With --train-backend megatron. Without: {NOT_SPLIT}"),
        *(part(name, "integer", None, keys, text, note="With --train-backend megatron.") for name, keys, text in (
            ("--decoder-first-pipeline-num-layers", "trainer.megatron.first_stage_layers",
             "Layers of the first stage of PP."),
            ("--decoder-last-pipeline-num-layers", "trainer.megatron.last_stage_layers",
             "Layers of the last stage of PP."),
            ("--virtual-pipeline-model-parallel-size", "trainer.megatron.virtual_stages", "Interleaved PP."),
            ("--num-layers-per-virtual-pipeline-stage", "trainer.megatron.virtual_stages",
             "Layers of a stage of interleaved PP."),
        )),
        sets("--context-parallel-size", "integer", 1, "model.cp model.cp_style",
             "CP: ranks that share the tokens of a row, as a ring."),
        sets("--expert-model-parallel-size", "integer", 1, "model.ep", "EP: ranks that share the experts.",
             note="Ranks of TP are among them with --sequence-parallel."),
        part("--expert-tensor-parallel-size", "integer", None, "model.ep trainer.megatron.etp",
             "ETP: TP of the experts.",
             note="An expert is whole on its rank: EP x ETP ranks have different experts. With --train-backend "
                  "megatron its features are split."),
        noted("--allgather-cp", "switch", False, "How keys travel does not change results.",
              "CP by gathering keys."),
        sets("--recompute-granularity", "text", None, "model.ac.mode", "Recompute activations: full, or a selection.",
             choices=("full", "selective")),
        part("--recompute-method", "text", None, "model.ac.group_size model.ac.num_blocks",
             "uniform: groups of layers; block: the first ones.", choices=("uniform", "block")),
        part("--recompute-num-layers", "integer", None, "model.ac.group_size model.ac.num_blocks",
             "Layers of a group; with --recompute-method block, of each stage of PP."),
        equal("--recompute-loss-function", "switch", False, "The head never builds logits of all tokens.",
              "Recompute the loss."),
        equal("--log-probs-chunk-size", "integer", -1,
              "`model.fused_lm_head_token_chunk_size` bounds the logits in memory.", "Chunk of log-probabilities."),
        equal("--use-distributed-optimizer", "switch", True, "Optimizer state is sharded over all ranks.",
              "Shard the optimizer's state."),
        equal("--use-precision-aware-optimizer", "switch", False,
              "`model.optimization_dtype` is the type of its weights.", "Optimizer state in other types."),
        copies("--optimizer-cpu-offload", "switch", False, "model.optim_cpu_offload",
               "Optimizer state in CPU memory."),
        refused("--optimizer-state-nvme-dir", "text", None, NO_DISK, "Directory of the optimizer's state on a disk."),
        equal("--optimizer-state-nvme-chunk-mb", "integer", 256, "It is of --optimizer-state-nvme-dir.",
              "Piece of that state in memory."),
        equal("--overlap-cpu-optimizer-d2h-h2d", "switch", False, "Copies run beside computation.",
              "Overlap its copies."),
        equal("--moe-token-dispatcher-type", "text", "allgather", "Tokens travel by all-to-all.",
              "How tokens get to their experts.", choices=("allgather", "alltoall", "flex")),
        equal("--moe-grouped-gemm", "switch", False, "`model.moe_use_grouped_mm` is on.", "Experts in one product."),
        equal("--moe-permute-fusion", "switch", False, "It is part of the experts' product.", "Fused permutation."),
        part("--moe-enable-deepep", "switch", False, "model.ep_comm_backend", "Tokens travel by DeepEP."),
        equal("--accumulate-allreduce-grads-in-fp32", "switch", False, "`model.reduce_dtype` is float32.",
              "Sum gradients in float32."),
        equal("--attention-softmax-in-fp32", "switch", False, "torch's kernels do so.", "Softmax in float32."),
        equal("--no-gradient-accumulation-fusion", "switch", False, "There is no such kernel.",
              "Without a fused kernel."),
        equal("--bf16", "switch", True, "`model.dtype` is auto: bfloat16 on a GPU.", "Compute in bfloat16."),
        refused("--fp16", "switch", False,
                "float16 overflows in training; leave it out for bfloat16, or model.dtype = \"float32\"",
                "Compute in float16."),
        part("--fp8-format", "text", None, "model.fp8", "8-bit products.", choices=("e4m3", "hybrid"),
             note="Only e4m3 with --fp8-recipe blockwise."),
        part("--fp8-recipe", "text", "delayed", "model.fp8", "How 8-bit values are scaled.",
             choices=("delayed", "tensorwise", "mxfp8", "blockwise", "custom")),
        refused("--force-fp8-ue8m0-scale", "switch", False, "there is one kind of scales; leave it out",
                "Scales that are powers of two."),
    ),
}
# fmt: on


def settings(flags: Values) -> Iterator[Setting]:
    """Axes of the mesh, 8-bit products, and recomputation.

    Raises: ConfigError for 8-bit products of another kind.
    """
    if has_tower(flags.hf_checkpoint):
        yield Setting("model.vlm", {}, ("--hf-checkpoint",))
    if has_megatron(flags):
        yield from _of_megatron(flags)
    if not has_plugin(flags):
        yield from flags.settings("--custom-model-provider-path")
    mesh = axes(flags)
    yield Setting("model.tp", mesh.tp, ("--tensor-model-parallel-size",))
    if mesh.cp > 1:
        yield Setting("model.cp", mesh.cp, ("--context-parallel-size", "--tensor-model-parallel-size"))
        if not has_megatron(flags):
            yield Setting("model.cp_style", "ring", ("--context-parallel-size",))
    if splits_tokens(flags, mesh):
        yield Setting("model.sequence_parallel", True, ("--sequence-parallel",))
    if mesh.ep > 1:
        yield Setting("model.ep", mesh.ep, EXPERTS)
    if flags.moe_enable_deepep and mesh.ep > 1 and not has_megatron(flags):
        yield Setting("model.ep_comm_backend", "deepep", ("--moe-enable-deepep",))
    if flags.fp8_format is not None:
        if (flags.fp8_format, flags.fp8_recipe) != ("e4m3", "blockwise"):
            names = flags.typed("--fp8-format", "--fp8-recipe")
            raise ConfigError(f"{names}: 8-bit products are e4m3, scaled by blocks; use e4m3 and blockwise")
        yield Setting("model.fp8", True, ("--fp8-format", "--fp8-recipe"))
    if flags.moe_router_enable_expert_bias and flags.moe_router_bias_update_rate:
        yield from flags.settings("--moe-router-bias-update-rate")
    values = {name: getattr(flags, name) for name in RECOMPUTED}
    if has_megatron(flags):
        return
    yield from recomputed(values, flags.pipeline_model_parallel_size, "model.ac", HOW)


def _of_megatron(flags: Values) -> Iterator[Setting]:
    """What --train-backend megatron means: its degrees, and its arguments as they were typed.

    Raises: ConfigError for layers of virtual stages that do not divide those of a stage.
    """
    yield Setting("trainer.backend", "megatron", (BACKEND,))
    yield Setting("trainer.megatron.pp", flags.pipeline_model_parallel_size, ("--pipeline-model-parallel-size",))
    for end in ("first", "last"):
        name = f"--decoder-{end}-pipeline-num-layers"
        if (layers := flags.value(name)) is not None:
            yield Setting(f"trainer.megatron.{end}_stage_layers", layers, (name,))
    if (virtual := _virtual_stages(flags)) is not None:
        yield virtual
    if (etp := flags.expert_tensor_parallel_size) is not None:
        yield Setting("trainer.megatron.etp", etp, ("--expert-tensor-parallel-size",))
    for name in OVERRIDES:
        if flags.has(name):
            yield Setting(f"trainer.megatron.overrides.{attribute_of(name)}", flags.value(name), (name,))


def _virtual_stages(flags: Values) -> Setting | None:
    number, each = "--virtual-pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"
    if (virtual := flags.value(number)) is not None:
        return Setting("trainer.megatron.virtual_stages", virtual, (number,))
    if (layers := flags.value(each)) is None:
        return None
    total = read_shape(flags.hf_checkpoint).get("num_hidden_layers") or flags.num_layers
    stages = flags.pipeline_model_parallel_size
    if not total or total % (stages * layers):
        raise ConfigError(
            f"{flags.given[each]}: the {total} layers of this model in {stages} stages of "
            f"--pipeline-model-parallel-size are no multiples of it; change it"
        )
    return Setting("trainer.megatron.virtual_stages", total // (stages * layers), (each,))


def recomputed(values: Mapping[str, Any], stages: int, at: str, sources: tuple[str, ...]) -> Iterator[Setting]:
    """What a network computes again in its backward pass, by the values of RECOMPUTED."""
    granularity, method, num = (values[name] for name in RECOMPUTED)
    if granularity is None:
        return
    yield Setting(f"{at}.mode", granularity, sources[:1])
    if granularity == "selective":
        yield Setting(f"{at}.targets", ["norm", "attn_proj"], sources[:1])
    elif method == "block":
        yield Setting(f"{at}.num_blocks", (num or 1) * stages, sources[-2:])
    elif method == "uniform" and num is not None:
        yield Setting(f"{at}.group_size", num, sources[-2:])
