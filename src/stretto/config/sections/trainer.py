"""[trainer]: the learner, its optimizer, schedule, loss, and checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from stretto.config.section import Section
from stretto.config.sections.algorithm import Advantages, DefaultLoss, Loss
from stretto.config.sections.model import ActivationCheckpointSection
from stretto.config.sections.run import RunKeys


class OptimSection(Section):
    """Keys of all optimizers."""

    type: str
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""
    max_norm: float | None = Field(1.0, gt=0)
    """Gradient norm above which gradients are scaled down; None: no clipping."""


class AdamWOptim(OptimSection):
    """AdamW."""

    type: Literal["adamw"] = "adamw"
    betas1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    betas2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""


class SgdOptim(OptimSection):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"] = "sgd"
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    """L2 penalty."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum."""
    nesterov: bool = True
    """Nesterov's form of the momentum."""


class MuonOptim(OptimSection):
    """Muon for the matrices of the blocks, AdamW for all other weights (embedding, output head, norms, biases).
    Steps of matrices are scaled to the size that AdamW's have."""

    type: Literal["muon"] = "muon"
    mu: float = Field(0.95, ge=0, lt=1)
    """Momentum of the matrices, in Nesterov's form."""
    betas1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    betas2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of AdamW's second moment."""


class SignSgdOptim(OptimSection):
    """Every weight moves by lr, in the direction of its gradient's sign; no state."""

    type: Literal["sign_sgd"] = "sign_sgd"


Optim = Annotated[AdamWOptim | SgdOptim | MuonOptim | SignSgdOptim, Field(discriminator="type")]


Steps = Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)]


def num_steps(steps: int | float, max_steps: int | None) -> int:
    """How many steps these are, of a number or of a share of max_steps.

    Rounded to the nearest, halves down, so that shares that add up to 1 fit into max_steps.
    """
    if isinstance(steps, int):
        return steps
    assert max_steps is not None, "a share of no end: checked with the config"
    return math.ceil(steps * max_steps - 0.5 - 1e-9)


class ConstantScheduler(Section):
    """Learning rate stays at its peak after the warm-up."""

    type: Literal["constant"] = "constant"
    warmup_steps: Steps = 10
    """Steps of linear rise from 0; a number below 1 is a share of max_steps, or in `sft` of the steps that max_epochs
    gives. Adam's first steps are large: without a rise they can move a policy so far that it does not come back."""


class FallingScheduler(Section):
    """Keys of schedules that fall."""

    type: str
    warmup_steps: Steps = 10
    """Steps of linear rise from 0; a number below 1 is a share of max_steps, or in `sft` of the steps that max_epochs
    gives."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end."""


class LinearScheduler(FallingScheduler):
    """Rise, plateau, linear fall over the last decay_steps."""

    type: Literal["linear"] = "linear"
    decay_steps: Steps = 10
    """Steps of linear fall before max_steps; a number below 1 is a share of max_steps, or in `sft` of the steps that
    max_epochs gives."""


class CosineScheduler(FallingScheduler):
    """Rise, then half a cosine down to min_lr at max_steps."""

    type: Literal["cosine"] = "cosine"


Scheduler = Annotated[ConstantScheduler | LinearScheduler | CosineScheduler, Field(discriminator="type")]


class CriticPlacement(Section):
    """Present: the critic has ranks of its own, processes `critic` beside the policy's."""

    num_workers: int = Field(1, gt=0)
    """Its data-parallel ranks, each cp x tp processes (with Megatron of each stage) as the policy's are; they divide
    the policy's number."""
    host: str = "127.0.0.1"
    """Address of the policy's first rank, where both meet; over several machines the first node's."""
    port: int = Field(29600, ge=1, le=65535)
    """Port there."""


class CriticSection(Section):
    """A critic, trained beside the policy: its network with an output of one number, and an optimizer of its own."""

    load: str | None = None
    """Directory or name of a model of the policy's family to start from: a critic that was saved, a reward model,
    or a language model, which gets a new output that is 0. None: the model that the policy starts from."""
    save: Path | None = None
    """Directory of its exports, one `step_N` whenever the policy's weights are exported, or without
    [ckpt.weights] every ckpt.interval steps and at the end. None: RUN/critic, with the policy's only."""
    lr: float | None = Field(None, gt=0)
    """Learning rate; None: the peak of the policy's."""
    optim: Optim | None = None
    """Present: an optimizer with settings of its own, learning rate included; None: those of the policy's."""
    ac: ActivationCheckpointSection | None = None
    """Present: what the critic computes again in its backward pass; None: what the policy does, [model.ac]."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps of linear rise from 0; then the rate stays."""
    num_critic_only_steps: int = Field(0, ge=0)
    """First steps in which only the critic learns; the policy's scheduler begins behind them."""
    value_clip: float | None = Field(0.2, gt=0)
    """Most that a value may move within a step of several updates, in reward units; None: no limit. The first update of
    a step is not limited, so that with one update it does nothing."""
    placement: CriticPlacement | None = None


class CkptWeightsSection(Section):
    """Hugging Face weights, config and tokenizer under RUN/weights/step_N; `latest` links to the newest."""

    interval: int | None = Field(None, gt=0)
    """Steps between exports; None: with every checkpoint, and at the end."""
    keep_last: int | None = Field(None, ge=1)
    """Newest exports kept, of the policy and of a critic; None: as many as ckpt.keep_last says. Those of every
    ckpt.keep_interval-th step are kept as well."""
    save_adapter_separately: bool = False
    """With model.lora: also write the adapter alone, in PEFT's format, under weights/step_N/lora_adapters."""


CHECKPOINTS_BY_TIME = 2


class CkptSection(Section):
    """Checkpoints to resume from, under RUN/checkpoints/step_N; complete or absent."""

    interval: int | None = Field(None, gt=0)
    """Steps between checkpoints; None: by `minutes`. There is always one at the end, and when the run is stopped."""
    minutes: float | None = Field(10.0, gt=0)
    """Without `interval`: minutes between checkpoints, without exported weights; None: only at the end."""
    keep_last: int | None = Field(None, ge=1)
    """Newest checkpoints kept; None: all with `interval`, two without."""
    keep_interval: int | None = Field(None, ge=1)
    """With keep_last: checkpoints of steps that are multiples of it are kept as well."""
    is_async: bool = True
    """Continue training while a checkpoint is written; needs a copy of the state in CPU memory."""
    weights: CkptWeightsSection | None = CkptWeightsSection()
    """Present: also write Hugging Face weights."""
    output_dir: Path | None = None
    """Directory for the checkpoints of runs, each in a directory of its run's name, to which RUN/checkpoints is then a
    link: a larger disk, or one that is kept longer. None: in the run's own directory."""
    skip_optimizer: bool = False
    """Neither write nor read the optimizer's state: checkpoints of AdamW have a third of the size, and a resumed run
    begins with a new optimizer."""
    skip_scheduler: bool = False
    """A resumed run begins its schedule anew: warm-up and decay count from the step of the checkpoint. A decay that is
    longer than the steps that are left after the warm-up takes all of these, from the full rate."""
    skip_dataloader: bool = False
    """A resumed `sft` run reads its data from the beginning; `rl` has no such position."""


def is_by_time(ckpt: CkptSection) -> bool:
    """Whether checkpoints are due by the clock rather than by steps."""
    return ckpt.interval is None and ckpt.minutes is not None


def is_checkpoint_due(ckpt: CkptSection, step: int, since_last_s: float) -> bool:
    """Whether a checkpoint is due after this step; since_last_s: seconds since the last one, or since the start."""
    if ckpt.interval is not None:
        return step % ckpt.interval == 0
    return ckpt.minutes is not None and since_last_s >= 60 * ckpt.minutes


def num_exports_kept(ckpt: CkptSection) -> int | None:
    """How many of the newest exports are kept; None: all."""
    own = ckpt.weights.keep_last if ckpt.weights is not None else None
    return ckpt.keep_last if own is None else own


def num_kept(ckpt: CkptSection) -> int | None:
    """How many of the newest checkpoints are kept; None: all."""
    return CHECKPOINTS_BY_TIME if ckpt.keep_last is None and is_by_time(ckpt) else ckpt.keep_last


class TrainerHooksSection(Section):
    """A user's functions in the trainer by import path, `module:function`, in vime's terms; docs/data.md has what they
    are given. Each rank calls them."""

    model: str | None = None
    """`provider(args, build)`: the model that is trained, and its reference: what `build()` gives with parts changed,
    and weights of the same names and shapes, which engines load."""
    init: str | None = None
    """`init(args)`: called once, when model and optimizer are built."""
    before_log_prob: str | None = None
    """`before(args, model, store_prefix)`: called before each pass that only computes log-probabilities; the prefix is
    "" for the policy, "ref_" for the reference."""
    before_train_step: str | None = None
    """`before(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)`: called before each update."""
    advantages: str | None = None
    """`advantages(args, rollout_data)`: sets rollout_data["advantages"], per sample one number per token of its
    response, and "returns" if there is a critic."""
    data_postprocess: str | None = None
    """`process(args, rollout_id, rollout_data)`: may change the data of a step when its log-probabilities and
    advantages are known."""
    tis: str | None = None
    """`tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)`: the
    losses per token, a mask per sample and metrics after a correction for off-policy data. It gets trained ones."""
    loss: str | None = None
    """`loss(args, batch, logits, sum_of_sample_mean)`: the whole policy loss from the logits of the batch, and metrics;
    both are sums that sum_of_sample_mean makes, and trainer.loss says only how it does."""
    pg_loss_reducer: str | None = None
    """`reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)`: gives the function that sums
    the policy's losses per token in the place of trainer.loss.reduction."""
    post_write: str | None = None
    """`post_write(args, version_dir, rollout_engines)`: called by the first rank when a version of the weights is
    written, before engines hear of it; with weight_broadcast.type = "filesystem". The list of engines is empty."""
    args: dict[str, Any] = Field({})
    """More attributes of `args`."""

    @property
    def is_empty(self) -> bool:
        """Whether no function is named."""
        return all(value is None for name, value in self if name != "args")


MatmulPrecision = Literal["highest", "high", "medium"]


class RankKeys(Section):
    """How the ranks of a trainer run."""

    num_threads: int | None = Field(None, gt=0)
    """CPU threads of one rank; None: given out by the launcher."""
    matmul_precision: MatmulPrecision = "highest"
    """Precision of products of float32 matrices: `high` is TF32 on a GPU; on a CPU it changes nothing or little."""
    is_deterministic: bool = False
    """The same batch gives the same weights, bit for bit: torch's kernels are those that always sum in one order,
    which takes time; an operation without such a kernel ends the run and names itself."""
    env_vars: dict[str, str] = Field({})
    """Environment variables of the trainer alone."""


class MegatronSection(Section):
    """How Megatron-Core spreads the policy and its critic over ranks, with trainer.backend = "megatron". model.tp,
    model.cp and model.ep are its degrees too."""

    pp: int = Field(1, gt=0)
    """Pipeline stages: ranks with different layers, through which micro batches go one after another."""
    virtual_stages: int = Field(1, gt=0)
    """Parts of its layers that each stage has, interleaved with those of the others, so that stages wait less."""
    first_stage_layers: int | None = Field(None, gt=0)
    """Layers of the first stage, if it has fewer or more than others; None: as many."""
    last_stage_layers: int | None = Field(None, gt=0)
    """Layers of the last stage, which also has the output head; None: as many as others."""
    etp: int = Field(1, gt=0)
    """Ranks that split the features of each expert."""
    overrides: dict[str, Any] = Field({})
    """Arguments of Megatron by its own names, such as moe_permute_fusion = true; they come last."""


class TrainerKeys(RankKeys):
    """Keys of the trainer process alone."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """What computes and updates the policy: our own modules, sharded with FSDP2, or those of Megatron-Core."""
    megatron: MegatronSection | None = None
    """None: the defaults, if the backend is "megatron"."""
    interpreter: str | None = None
    """The Python of the trainer's ranks, with stretto of the same version and what its backend needs; None: that of
    this command, or for "megatron" the one that `make megatron` makes, if this one does not have Megatron-Core."""
    optim: Optim = AdamWOptim()
    scheduler: Scheduler = ConstantScheduler()
    loss: Loss = DefaultLoss()
    hooks: TrainerHooksSection = TrainerHooksSection()
    advantages: Advantages | None = None
    """Present: the orchestrator sends scores, and tokens get their advantages here."""
    critic: CriticSection | None = None
    """Present: train a critic, whose values `advantages.type = "gae"` uses."""
    updates_per_step: int = Field(1, gt=0)
    """Optimizer updates of a step, each on its share of the batch's samples; a batch of fewer samples makes fewer, and
    a warning says so."""
    epochs_per_step: int = Field(1, gt=0)
    """Passes over the batch in a step, in another order each time."""
    batch_timeout_s: float = Field(3600.0, gt=0)
    """Longest wait for a batch before the trainer stops."""
    memory_profiler_path: Path | None = None
    """Directory for snapshots of the GPU's memory, a file per step and rank, which https://pytorch.org/memory_viz
    draws; steps become slower, and files have up to 40 MB. None: nothing is recorded."""
    enable_router_replay: bool = False
    """Use the experts that the engine chose for each token, not those this process would choose; with `rl` this
    also sets inference.enable_return_routed_experts. Tokens without choices are routed here."""
    enable_token_export: bool = False
    """Write trained tokens with logprobs and advantage, as text of full precision, to RUN/tokens_trained/step_N.jsonl
    (debugging). The page does not need it."""
    keep_token_bytes: int | None = Field(1_000_000_000, gt=0)
    """Bytes of entropy and mismatch per trained token that are kept in RUN/tokens_trained for the page's colours, of
    all ranks together: beyond them the oldest steps go, those of every 10th and 100th step last. None: no limit."""


class TrainerSection(TrainerKeys, RunKeys):
    """All keys of the trainer process: its own and the run's."""

    ckpt: CkptSection | None = CkptSection()
