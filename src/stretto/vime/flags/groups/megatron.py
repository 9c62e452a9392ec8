"""Flags of Megatron-LM about the model's shape, parallelism and memory."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.base.errors import ConfigError
from stretto.vime.flags.flag import Flag, Setting, Values, copies, equal, part, refused, sets
from stretto.vime.flags.shape import SHAPES

NO_MEGATRON = "stretto does not use Megatron-LM"
NOT_SPLIT = (
    "layers are not spread over ranks in training; use --tensor-model-parallel-size, or more ranks: weights are "
    "sharded over all of them"
)
NO_MTP = "layers that predict several tokens are not trained; leave it out"

# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "Training backend": (
        refused("--train-backend", "text", "megatron", f"{NO_MEGATRON}: the trainer is its own; leave it out",
                "Training backend; Megatron-LM is the only one."),
        copies("--custom-model-provider-path", "text", None, "trainer.hooks.model", "Function that builds the model.",
               note="It is called as `provider(args, build)` and changes the model that `build()` gives: "
                    "docs/data.md."),
        refused("--megatron-to-hf-mode", "text", "raw",
                "weights have Hugging Face's names from the start; leave it out", "How weights are renamed.",
                allowed=("bridge",)),
        refused("--model-name", "text", None, "the family is config.json's model_type; leave it out",
                "Name of the architecture for conversions."),
        refused("--qwen-gdn-backend", "text", "fla", "there is one implementation; leave it out",
                "Kernels of gated delta nets."),
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
        refused("--mtp-num-layers", "integer", None, NO_MTP, "Layers that predict several tokens."),
        refused("--mtp-loss-scaling-factor", "number", 0.2, NO_MTP, "Weight of their loss."),
        refused("--enable-mtp-training", "switch", False, NO_MTP, "Train them."),
        equal("--attention-dropout", "number", 0.1, "There is no dropout.", "Dropout of attention."),
        equal("--hidden-dropout", "number", 0.1, "There is no dropout.", "Dropout of hidden states."),
    ),
    "Parallelism and recomputation": (
        copies("--tensor-model-parallel-size", "integer", 1, "model.tp",
               "TP: ranks that share the features of a token."),
        equal("--sequence-parallel", "switch", False,
              "Norms are computed whole on every rank of model.tp; results are the same.",
              "SP: split norms over the TP ranks."),
        refused("--pipeline-model-parallel-size", "integer", 1, NOT_SPLIT, "PP: ranks that share the layers."),
        refused("--decoder-last-pipeline-num-layers", "integer", None, NOT_SPLIT, "Layers of the last stage of PP."),
        refused("--virtual-pipeline-model-parallel-size", "integer", None, NOT_SPLIT, "Interleaved PP."),
        sets("--context-parallel-size", "integer", 1, "model.cp model.cp_style",
             "CP: ranks that share the tokens of a row, as a ring."),
        sets("--expert-model-parallel-size", "integer", 1, "model.ep", "EP: ranks that share the experts."),
        part("--expert-tensor-parallel-size", "integer", None, "", "ETP: TP of the experts.",
             note="Experts are never split: 1, or leave it out."),
        refused("--allgather-cp", "switch", False, "model.cp_style chooses between ulysses and ring; leave it out",
                "CP by gathering keys."),
        sets("--recompute-granularity", "text", None, "model.ac.mode", "Recompute activations: full, or a selection.",
             choices=("full", "selective")),
        part("--recompute-method", "text", None, "", "uniform: groups of layers; block: the first ones.",
             choices=("uniform", "block"), note="With full. uniform only."),
        part("--recompute-num-layers", "integer", None, "", "Layers of a group.", note="With full. 1 only."),
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
        refused("--fp8-format", "text", None, "set model.fp8 = true in the TOML of --print-config",
                "8-bit products."),
        refused("--force-fp8-ue8m0-scale", "switch", False, "there is one kind of scales; leave it out",
                "Scales that are powers of two."),
    ),
}
# fmt: on


def settings(flags: Values) -> Iterator[Setting]:
    """Axes of the mesh, and recomputation.

    Raises: ConfigError for what only Megatron does.
    """
    if flags.context_parallel_size > 1:
        yield from flags.settings("--context-parallel-size")
        yield Setting("model.cp_style", "ring", ("--context-parallel-size",))
    if flags.expert_model_parallel_size > 1:
        yield from flags.settings("--expert-model-parallel-size")
    if flags.expert_tensor_parallel_size not in (None, 1):
        raise ConfigError(
            f"{flags.given['--expert-tensor-parallel-size']}: an expert is whole on its rank; leave it out, and "
            "spread the experts with --expert-model-parallel-size"
        )
    if flags.moe_enable_deepep:
        yield Setting("model.ep_comm_backend", "deepep", ("--moe-enable-deepep",))
    if flags.recompute_granularity is None:
        return
    yield from flags.settings("--recompute-granularity")
    if flags.recompute_granularity == "selective":
        yield Setting("model.ac.targets", ["norm", "attn_proj"], ("--recompute-granularity",))
    elif flags.recompute_method == "block":
        raise ConfigError(
            f"{flags.given['--recompute-method']}: which blocks recompute is model.ac.freq; use uniform, and set "
            "that in the TOML of --print-config"
        )
    elif flags.recompute_num_layers not in (None, 1):
        raise ConfigError(
            f"{flags.given['--recompute-num-layers']}: every block keeps its own input; use 1, or model.ac.freq in "
            "the TOML of --print-config for blocks that keep everything"
        )
