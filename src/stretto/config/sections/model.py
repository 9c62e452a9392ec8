"""[model], [model.scratch], [tokenizer], [renderer]: which network, and how text becomes tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from stretto.config.section import Section
from stretto.families.own.dense import QWEN3
from stretto.families.table import FAMILIES, OFFERED, traits_of

if TYPE_CHECKING:
    Family = str
else:
    Family = Literal[tuple(OFFERED)]
"""`model_type` of the families of families/own and of add-ons."""


class ScratchVisionSection(Section):
    """The vision tower of a random network, and how pictures become its patches."""

    depth: int = Field(2, gt=0)
    """Number of blocks."""
    hidden_size: int = Field(32, gt=0)
    """Width of the residual stream; a multiple of 4 x num_heads."""
    intermediate_size: int = Field(64, gt=0)
    """Width of the MLP."""
    num_heads: int = Field(2, gt=0)
    """Heads of attention."""
    patch_size: int = Field(8, gt=0)
    """Pixels along one side of a patch."""
    merge_size: int = Field(2, gt=0)
    """Patches along one side of what becomes one token: 2 x 2 patches of 8 pixels are a token for 16 x 16 pixels."""
    max_tokens: int = Field(64, gt=0)
    """Larger pictures are made smaller, to at most so many tokens; smaller ones stay as they are."""


class ScratchSection(Section):
    """Start from a random network of this shape instead of loading weights; everything is made locally."""

    family: Family = QWEN3.name
    """Architecture family; the keys on experts count for those with experts only. `nemotron_h` has one half of a block
    per layer, in turn: Mamba 2, experts, attention, experts."""
    tokenizer: Literal["letters"] = "letters"
    """Tokenizer to build beside it: `letters` has one token per character and Qwen3's chat tokens."""
    phrases: tuple[str, ...] = ()
    """Texts that are one token each in that tokenizer, beside the characters: a text of every prompt, such as the
    description of a tool, then takes a few tokens instead of hundreds."""
    hidden_size: int = Field(64, gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(256, gt=0)
    """Width of the MLP."""
    num_layers: int = Field(2, gt=0)
    """Number of blocks."""
    num_heads: int = Field(4, gt=0)
    """Query heads; a multiple of num_kv_heads."""
    num_kv_heads: int = Field(2, gt=0)
    """Key and value heads."""
    head_dim: int = Field(16, gt=0, multiple_of=2)
    """Width of one head."""
    num_experts: int = Field(8, gt=0)
    """Experts of every block (`glm4_moe`, `afmoe`, `laguna`, `deepseek_v3`: of every block but the first)."""
    num_experts_per_tok: int = Field(2, gt=0)
    """Experts that compute one token."""
    moe_intermediate_size: int = Field(64, gt=0)
    """Width of one expert; of `qwen3_vl_moe` three quarters of hidden_size if it is not given, because its files do not
    say which way round a square matrix is."""
    has_expert_bias: bool = False
    """Give routers a bias on the choice of experts, which `trainer.moe_bias_update_rate` moves. Only the embedded
    engine and the trainer support it."""
    sliding_window: int = Field(64, gt=0)
    """Tokens that a token sees in layers with a window (`gpt_oss`, `afmoe`, `laguna`), itself included."""
    index_topk: int = Field(64, gt=0)
    """Tokens that a token attends to where an indexer chooses them (`glm_moe_dsa`, `deepseek_v32`)."""
    tie_word_embeddings: bool = True
    """Use the embedding matrix as output head."""
    max_position_embeddings: int = Field(512, gt=0)
    """Longest sequence the model accepts, tokens."""
    vision: ScratchVisionSection | None = None
    """Present: the vision tower of `qwen3_vl`, `qwen3_vl_moe`, `qwen3_5` and `qwen3_5_moe`, which need it. The
    tokenizer then has the Qwen-VL families' tokens for images too."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights."""

    @classmethod
    def _derived(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        if not traits_of(str(values.get("family"))).may_be_transposed:
            return {}
        width = values.get("hidden_size", 64)
        return {"moe_intermediate_size": 3 * width // 4} if isinstance(width, int) and width > 1 else {}


LORA_TARGETS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts",
    "fc1_latent_proj", "fc2_latent_proj",
)  # fmt: skip


class LoRASection(Section):
    """Train a low-rank adapter beside the weights, which stay as they are."""

    rank: int = Field(16, gt=0)
    """Rank of the adapter."""
    alpha: float = Field(32.0, gt=0)
    """The adapter's part is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the adapter's inputs that is dropped while training."""
    target_modules: tuple[str, ...] = Field(LORA_TARGETS, min_length=1)
    """Last parts of the names of linear layers, and `experts` for those of a mixture. Names that a model does not
    have are left out, and listed in the log."""


ACTIVATION_TARGETS = ("norm", "attn_proj", "mlp", "routed_experts")
"""Parts of a block that selective checkpointing can name."""


class ActivationCheckpointSection(Section):
    """Compute activations again in the backward pass instead of keeping them."""

    mode: Literal["full", "selective"] = "full"
    """`full`: only a block's input is kept; `selective`: only the parts named in `targets` are computed again."""
    freq: int = Field(1, gt=0)
    """Only blocks 0, freq, 2 freq, ... do so; the others keep everything."""
    group_size: int = Field(1, gt=0)
    """With mode = "full": so many neighbouring blocks are computed again at once, and keep one input between them. Less
    is kept during the forward pass, and all that a group keeps is there during its backward pass."""
    num_blocks: int | None = Field(None, gt=0)
    """Only the first so many blocks do so; the others keep everything. None: all."""
    targets: tuple[Literal["norm", "attn_proj", "mlp", "routed_experts", "mla_up_proj", "linear_attn"], ...] = ("norm",)
    """With mode = "selective". `norm`: the norms before attention and MLP; `attn_proj`: from a block's input to its
    queries, keys and values; `mlp`: dense MLPs; `routed_experts`: experts, without the exchange of their tokens."""

    def groups(self, num_blocks: int) -> list[range]:
        """The blocks of each group whose members are computed again, whole or some parts of them."""
        last = min(self.num_blocks or num_blocks, num_blocks)
        step = max(self.freq, self.group_size)
        return [range(first, min(first + self.group_size, last)) for first in range(0, last, step)]


class ActivationOffloadSection(Section):
    """Keep in CPU memory what blocks save for the backward pass; needs a GPU. Implies `[model.ac]`."""

    pin_memory: bool = True
    """Page-locked CPU memory: copies run beside computation; false: less CPU memory that cannot be swapped, and
    copies that computation waits for."""
    max_inflight_activations: int = Field(5, gt=0)
    """Copies that may be in progress, each still taking GPU memory, before computation waits for one."""


class CompileSection(Section):
    """Compile the blocks' norms, projections, MLPs and experts with torch.compile, for rows of any length."""

    fullgraph: bool = False
    """Stop with an error where a part cannot become one graph; false: it becomes several."""


class VisionSection(Section):
    """The policy sees images: required for a model with a vision tower, refused for any other."""

    vision_encoder_attr: str = "model.visual"
    """Path of the vision tower in the model. Our own modules have this one; others are refused."""
    language_model_attr: str = "model.language_model"
    """Path of the decoder in the model; as `vision_encoder_attr`."""
    freeze_vision_encoder: bool = True
    """Do not train the vision tower; false: train it too, sharded per block. It is published either way."""
    max_patches: int | None = Field(None, gt=0)
    """Patches of all images in one micro batch, beside seq_len tokens: the tower's memory grows with them. None: as
    many as the tokens of a row can stand for. A sample with more has a micro batch of its own."""


SharedPrefixes = Literal["auto", "off", "prompts", "tree"]

Dtype = Literal["auto", "float32", "bfloat16"]


def dtype_on(dtype: Dtype, *, is_gpu: bool) -> Literal["float32", "bfloat16"]:
    """What `auto` means on a device; a plan keeps `auto`, as its machine may have no GPU."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if is_gpu else "float32"


class ModelSection(Section):
    """The policy network. All keys but name, impl, dtype, trust_remote_code, lora and scratch are for training only."""

    name: str = "Qwen/Qwen3-0.6B"
    """Directory with Hugging Face safetensors, config and tokenizer (or the name of a model of the Hub)."""
    impl: Literal["auto", "custom", "hf"] = "auto"
    """`custom`: our module, for the families of docs/add_a_model.md; `hf`: transformers'; `auto`: custom where there is
    one."""
    dtype: Dtype = "auto"
    """Type of weights and activations in the forward pass; `auto`: bfloat16 on a GPU, float32 on a CPU, found by each
    process on its own device."""
    optimization_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights the optimizer updates."""
    trust_remote_code: bool = False
    """Let transformers run code from the model directory (impl = "hf" only)."""
    fused_lm_head_token_chunk_size: int = Field(2048, gt=0)
    """Tokens per chunk of the fused output head, which never builds [tokens, vocab]."""
    shared_prefixes: SharedPrefixes = "auto"
    """Tokens that samples of a micro batch have in common from their start are computed once, forward and backward.
    `tree`: all that any samples begin with alike, to any depth, turns and branches too, and samples that share much are
    packed together; `prompts`: equal prompts, on a CPU; `off`: each sample is computed by itself; `auto`: `tree` on a
    CPU, `off` on a GPU. The results are the same. Not with cp_style = "ring", recurrent layers, impl = "hf" or
    indexer_kl_coeff: these compute each sample."""
    moe_use_grouped_mm: bool = True
    """Compute all experts in one grouped matrix product; false: one after the other, the slow reference."""
    freeze_moe_router: bool = False
    """Do not train the routers of a mixture of experts."""
    indexer_kl_coeff: float | None = Field(None, gt=0)
    """Train the indexers of glm_moe_dsa and deepseek_v32 towards the attention to the keys they choose, by this factor
    times the KL divergence, the mean over the tokens that passes compute: of a sample those before its last trained
    one. None: they stay as they are. Not beside an adapter."""
    moe_bias_update_rate: float | None = Field(None, gt=0)
    """Step of the bias on the choice of experts that balances their loads without a loss; None: it stays as it is.
    Refused for models without such a bias."""
    dp_replicate: int = Field(1, gt=0)
    """Copies of the sharded weights (HSDP): shards are gathered within a copy, gradients summed over all."""
    cp: int = Field(1, gt=0)
    """Ranks that share the tokens of one packed row, context parallelism."""
    cp_style: Literal["auto", "ulysses", "ring"] = "auto"
    """`ulysses`: ranks swap heads for tokens, cp divides the query heads; `ring`: keys and values go round, any cp.
    `auto`: `ulysses` if cp divides the heads, else `ring`; `ring` for families with an indexer (glm_moe_dsa)."""
    tp: int = Field(1, gt=0)
    """Ranks that share the features of one token, tensor parallelism; a divisor of the key and value heads."""
    sequence_parallel: bool = False
    """Ranks of tp split the tokens of a row outside the layers that they cut: norms, residuals, experts, the output
    head. What these keep for the backward pass is divided by tp, and ep may take ranks of tp."""
    ep: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Ranks that share the experts of a mixture, among dp_shard x cp, and x tp with sequence_parallel; `auto`: as many
    as can."""
    ep_comm_backend: Literal["torch", "deepep"] = "torch"
    """How tokens travel to their experts: `torch` is its all-to-all; `deepep` is DeepEP's, for experts over several
    nodes (GPUs, dtype bfloat16, the package deep_ep). Gradients are clipped with both."""
    deepep_num_sms: int = Field(20, gt=0, multiple_of=2)
    """Multiprocessors of a GPU that DeepEP takes for itself."""
    deepep_token_chunk_size: int | None = Field(None, gt=0)
    """Rows that DeepEP sends at once, which bounds its buffers; None: all of a pass."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass and gather them again in the backward pass; false: faster,
    and all weights are in memory."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks."""
    fsdp_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory; needs several ranks with a GPU each."""
    optim_cpu_offload: bool = False
    """Keep optimizer state in CPU memory between updates, which stream it through the GPU; needs a GPU."""
    ac: ActivationCheckpointSection | None = None
    """Present: activations take less memory and are computed twice."""
    ac_offloading: ActivationOffloadSection | None = None
    """Present: what is kept for the backward pass waits in CPU memory."""
    compile: CompileSection | None = None
    """Present: compile blocks; the first step takes longer."""
    fp8: bool | Literal["reference"] = False
    """Multiply in block-scaled 8-bit floats in linear layers and experts, forward and backward; weights keep their
    types. Needs a GPU of compute capability 9.0 or newer. `reference`: the same roundings in plain torch on any
    device, slowly, to see what they do to a run."""
    vlm: VisionSection | None = None
    """Present: the model has a vision tower, and its prompts may have images."""
    lora: LoRASection | None = None
    """Present: train an adapter only (trainer and `sft`); engines are sent the adapter."""
    scratch: ScratchSection | None = None
    """Present: build a random model of this shape instead of loading `name`."""


def cp_style(section: ModelSection, shape: Any) -> Literal["ulysses", "ring"]:
    """How the ranks of cp share a row: `auto` is `ring` if an indexer chooses keys, or cp cannot divide the heads.

    shape: what has the model's family, num_heads and num_kv_heads.
    """
    if section.cp_style != "auto":
        return section.cp_style
    heads, kv_heads = shape.num_heads // section.tp, shape.num_kv_heads // section.tp
    is_cut = not heads % section.cp and not (kv_heads % section.cp and section.cp % kv_heads)
    return "ulysses" if is_cut and not traits_of(shape.family).chooses_keys else "ring"


def shares_prefixes(section: ModelSection, found: Any | None, *, is_on_cpu: bool) -> bool:
    """Whether a trainer computes what samples begin with alike once, to any depth; is_on_cpu: the trainer is.

    found: as in `why_unshared`.
    """
    is_wanted = section.shared_prefixes == "tree" or (section.shared_prefixes == "auto" and is_on_cpu)
    return is_wanted and why_unshared(section, found) is None


def why_unshared(section: ModelSection, found: Any | None) -> str | None:
    """Why samples are computed one by one in spite of shared_prefixes = "tree" or "auto"; None: not for such a reason.

    found: the shape of `name` as in `cp_style`, None if it is not known.
    """
    shape = found if section.scratch is None else section.scratch
    family = "" if shape is None else shape.family
    if section.shared_prefixes not in ("auto", "tree"):
        return None
    if section.impl == "hf" or (family and family not in FAMILIES and section.impl == "auto"):
        return "modules of transformers take whole samples"
    if traits_of(family).is_recurrent:
        return f"{family} has layers that pass a state from token to token"
    if section.indexer_kl_coeff is not None:
        return "indexer_kl_coeff is a mean over the tokens of all samples"
    style = section.cp_style if shape is None else cp_style(section, shape)
    if section.cp == 1 or style == "ulysses":
        return None
    how = "" if section.cp_style == "ring" else f", which cp = {section.cp} uses for this model,"
    return f'cp_style = "ring"{how} passes keys of whole samples from rank to rank'


class TokenizerSection(Section):
    """Where the tokenizer comes from when it is not in the model directory."""

    name: str | None = None
    """Directory of the tokenizer; None: the model's own."""
    chat_template: str | None = None
    """A chat template instead of the tokenizer's, exported with the weights; the same as `renderer.template`."""


class RendererSection(Section):
    """How messages become tokens."""

    place: ClassVar[str] = "renderer"
    """The path of the section, for messages about its keys."""

    name: str = "auto"
    """`auto`: the model's own chat template, or the renderer of its family where that gives the same tokens;
    `template`: the template always; `text`: prompts as they stand, for base models; or a family (`qwen3`, ...)."""
    template: str | None = None
    """A chat template instead of the model's: a .jinja file, its text, `chatml`, or one of the model's own list by its
    name. It is exported with the weights."""
    enable_thinking: bool = False
    """Leave room for a thinking block where the template has one (`enable_thinking` or `thinking`)."""
    clear_thinking: bool | None = None
    """Leave the thinking of earlier turns out of prompts; None: as the template does. Only GLM-5's have it."""
    tool_parser: str = "auto"
    """Format of tool calls in replies (`hermes`, `qwen3-coder`, `llama3`, `python`, `mistral`, `granite`, ...);
    `auto`: the one that reads the template's own calls; `none`: calls stay text. A family has a format of its own."""
    special_tokens_in_text: Literal["token", "text"] = "token"
    """The text of a special token in a message that is not the assistant's: `token`: it becomes that token, as in
    transformers; `text`: it stays text. Such texts are counted, and the first is warned about."""
    settings: dict[str, Any] = Field({})
    """Further variables of the template, such as `reasoning_effort` or `preserve_thinking`, or settings of a family,
    such as `thinking_retention = "all"`; an unknown name is refused with a list of the known ones."""
