"""[orchestrator]: environments, sampling, the bound on staleness, batches, evals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stretto.config.section import Section
from stretto.config.sections.algorithm import Algo, GrpoAlgo
from stretto.config.sections.curriculum import CurriculumSection, Filter, Gate, TruncatedFilter
from stretto.config.sections.distill import FrozenModelPlace, OpsdAlgo, RequestsSection, TaughtAlgo, TeacherSection
from stretto.config.sections.hooks import HooksSection
from stretto.config.sections.model import RendererSection
from stretto.config.sections.run import RunKeys


class ClientSection(RequestsSection):
    """Addresses of engines, and how requests are sent to them."""

    base_url: list[str] | str = "http://127.0.0.1:8000/v1"
    """OpenAI-style address of the engine or router; a list spreads rollouts over several."""
    name: str = "actor"
    """Name of the policy for hooks, besides `actor`: get_model_url(args, name)."""
    admin_base_url: list[str] | None = None
    """Addresses of the engines themselves for admin calls; None: the same as base_url."""
    headers: dict[str, str] = Field({})
    """Headers of every request."""
    headers_from_env: dict[str, str] = Field({})
    """Headers of every request, and the environment variables that hold their values, such as a gateway's key."""
    api: Literal["tokens", "chat"] = "tokens"
    """`tokens`: our engines and vLLM, token ids in and out; `chat`: any server with /chat/completions, text only,
    for the verb `eval`."""
    split_samples: bool = False
    """Ask for each sample in a request of its own, not for a group in one. `rl` sets it for prefill and decode engines,
    where the cache of a request is fetched once."""
    served_model: str | None = None
    """Model named in requests of api = "chat"; None: the first the server lists."""
    liveness_interval_s: float = Field(5.0, gt=0)
    """Seconds between two health checks of an engine."""
    liveness_timeout_s: float = Field(30.0, gt=0)
    """An engine that has not answered for longer is down: its requests go to other engines."""
    recovery_timeout_s: float = Field(600.0, gt=0)
    """Longest wait for an engine to come back when none is left, or to take a request when it is full of others'."""
    extra_headers_from_state: dict[str, Literal["trajectory_id"]] = Field({"X-Session-ID": "trajectory_id"})
    """Headers of requests for tokens, and what of the rollout they carry: `trajectory_id` is its id, by which a router
    sends its turns to one engine."""


TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class SamplingOverrides(Section):
    """How one environment is sampled; None: like the others."""

    temperature: float | None = Field(None, ge=0, le=2)
    """0 is greedy."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus."""
    top_k: int | None = Field(None, gt=0)
    """Keep the k likeliest tokens."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Drop tokens less likely than min_p times the likeliest."""
    max_completion_tokens: int | None = Field(None, gt=0)
    """Tokens in one reply."""
    ignore_eos: bool | None = None
    """Go on past end tokens up to the limit: fixed lengths, for benchmarks."""
    stop: str | list[str] | None = None
    """Texts that end a reply, such as `</answer>`; a list of none: no such text. The token that completes one is the
    last of the reply and is trained; rewards get the text up to and including the stop text."""
    stop_token_ids: list[TokenId] | None = None
    """Tokens that end a reply besides the model's own end tokens; they are part of it and trained."""
    min_tokens: int | None = Field(None, ge=0)
    """Tokens of a reply before which no end token is sampled and no stop text counts; in training only with replay."""
    bad_words: list[str] | None = None
    """Texts that are not sampled, at the start of a text or after a blank: the token that would complete one is banned;
    in training only with replay."""
    logit_bias: dict[str, Bias] | None = None
    """Numbers that are added to the logits of tokens, by token id or by the text of one token; not in training, because
    its log-probabilities would not be the model's."""

    def over(self, sampling: SamplingSection) -> SamplingSection:
        """The sampling with what is set here."""
        return sampling.model_copy(update=self.model_dump(exclude_none=True))


class SamplingSection(SamplingOverrides):
    """How the policy is sampled."""

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, gt=0)
    """Keep the k likeliest tokens; None: all."""
    min_p: float = Field(0.0, ge=0, le=1)
    max_completion_tokens: int | None = Field(None, gt=0)
    """Tokens in one reply; None: up to seq_len."""
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)

    def cuts(self) -> dict[str, Any]:
        """The settings, with values, that leave only a part of the vocabulary to draw from."""
        found = {
            "top_p": self.top_p if self.top_p < 1 else None,
            "top_k": self.top_k,
            "min_p": self.min_p or None,
            "min_tokens": self.min_tokens or None,
            "bad_words": self.bad_words or None,
        }
        return {key: value for key, value in found.items() if value is not None}


class EnvSection(Section):
    """One environment."""

    id: str
    """Bundled environment (`sort-letters`, `reverse-text`), `module:attr` or a module with one environment, an
    installed taskset of verifiers, or `verifiers`."""
    name: str | None = None
    """Name in metrics; None: the id."""
    args: dict[str, Any] = Field({})
    """Keyword arguments of the environment."""
    system_prompt: str | None = None
    """A system message before each of its conversations that does not begin with one of its own."""
    models: dict[str, str] = Field({})
    """Names by which it asks frozen models: with { judge = "large" } its `ctx.model("judge")` is [models.large]. Models
    that are not named here keep their names."""
    num_workers: int | None = Field(None, gt=0)
    """Processes it runs in, killed and started anew when they hang or crash; None: the orchestrator's own, and
    one for verifiers."""
    worker_timeout_s: float = Field(60.0, gt=0)
    """A worker whose event loop has not run for longer is hung: an environment blocks it."""
    worker_memory_bytes: int | None = Field(None, gt=0)
    """A worker that has more memory is killed, and its rollouts are played again; None: half of the machine's."""
    worker_growth_bytes: int | None = Field(1 << 30, gt=0)
    """A worker that has grown by more, since its first calls, is renewed when its rollouts have ended; None: never."""
    worker_max_calls: int | None = Field(None, gt=0)
    """Rollouts, prompts and scores after which a worker is renewed; None: any number."""


class TrainEnvSection(EnvSection):
    """One training environment."""

    ratio: float = Field(1.0, gt=0)
    """Share of tasks drawn from it, relative to the others."""
    algo: Algo | None = None
    """Credit of its groups; None: [orchestrator.algo]."""
    sampling: SamplingOverrides = SamplingOverrides()
    """How its rollouts are sampled; keys that are not given are those of train.sampling."""
    group_size: int | None = Field(None, gt=0)
    """Rollouts of one of its tasks; None: the run's group_size. A batch is batch_size / group_size groups (both
    the run's), whatever their sizes."""
    rollout_timeout_s: float | None = Field(None, gt=0)
    """Deadline of one of its rollouts; None: the run's."""
    max_rollout_retries: int | None = Field(None, ge=0)
    """Times that one of its failed rollouts is tried again; None: as the run's."""
    timeout_is: Literal["score", "zero", "fail"] = "score"
    """What a rollout is worth whose time is over (a time limit of the environment, or rollout_timeout_s during a reply
    that is not its first). "score": the environment's reward for what is there; "zero": reward 0; both are trained and
    in the baseline, so that running out of time is nothing to be learned. "fail": neither."""
    curriculum: CurriculumSection | None = None
    """Which of its tasks are drawn, and which of its groups are trained on; None: as [orchestrator.curriculum]."""


class ReplaySection(Section):
    """top_p, top_k, min_p, min_tokens and bad_words in training: engines return the tokens that each token was drawn
    from, and the trainer computes its probability among the same. With `rl` this also sets
    inference.enable_return_sampling_mask."""

    max_tokens: int = Field(1024, gt=0)
    """Most tokens that one may be drawn from; without top_k, this is the top_k of rollouts that any other of the five
    applies to. Each takes four bytes of a batch."""


class TrainSection(Section):
    """How training rollouts are sampled."""

    sampling: SamplingSection = SamplingSection()
    replay: ReplaySection | None = None
    """Present: rollouts may be sampled with top_p, top_k, min_p, min_tokens and bad_words, which are refused without
    it."""


class EvalEnvSection(EnvSection):
    """One environment for evals; None: the value of [eval]."""

    interval: int | None = Field(None, gt=0)
    """Steps between evals of it."""
    num_examples: int | None = Field(None, gt=0)
    """Tasks of it."""
    group_size: int | None = Field(None, gt=0)
    """Rollouts per task (sampled)."""
    sampling: SamplingOverrides = SamplingOverrides()
    """How it is sampled."""
    rollout_timeout_s: float | None = Field(None, gt=0)
    """Deadline of one of its rollouts; None: as the others'."""
    max_rollout_retries: int | None = Field(None, ge=0)
    """Times that one of its failed rollouts is tried again; None: as the others'."""


class EvalSection(Section):
    """Evaluation on held-out tasks, before, during and after training.

    An eval is of one version of the weights: the next one waits until it is done.
    """

    env: list[EvalEnvSection] = Field([])
    """Environments; empty: the training environments' held-out tasks, with the reply length, deadline and retries of
    their environments where [eval] says nothing."""
    interval: int | None = Field(None, gt=0)
    """Steps between evals; None: only before and after."""
    num_examples: int | None = Field(256, gt=0)
    """Tasks per environment; None: all."""
    group_size: int = Field(1, gt=0)
    """Rollouts per task (sampled)."""
    greedy: bool = True
    """Also evaluate with temperature 0; all that ends a reply or bans words stays as in `sampling`."""
    skip_first_step: bool = False
    """No eval of the starting weights."""
    max_rollout_retries: int | None = Field(None, ge=0)
    """Times that a failed rollout is tried again; None: as in training, or 2."""
    retrigger_on_resume: bool = False
    """Evaluate the version a run resumes from once more, even if it has been; of `rl`."""
    save_samples: bool = True
    """Keep prompt, reply and reward of every rollout in RUN/evals."""
    log_samples: int = Field(2, ge=0)
    """Conversations per environment and mode for the log and trackers, shortened: the best, the worst, then any."""
    sampling: SamplingSection = SamplingSection()

    def is_due(self, version: int, *, end: int | None) -> bool:
        """Whether the run evaluates `version`: the first, the last (`end`), and each interval's."""
        if version == 0 and self.skip_first_step:
            return False
        intervals = [own.interval or self.interval for own in self.env] or [self.interval]
        return any(is_at_interval(interval, version, end=end) for interval in intervals)


class EarlyStopSection(Section):
    """End the run when its score gets no better: held-out reward (`rl`), or validation loss, lower is better (`sft`).

    The run then saves and ends as one that was stopped.
    """

    patience: int | None = Field(5, ge=1)
    """Evals in a row without a better score after which the run ends; None: only `target` ends it."""
    min_delta: float = Field(0.0, ge=0)
    """How much better a score must be to count, in reward units, or in nats per token."""
    target: float | None = None
    """End the run as soon as a version has this score; None: no such end."""

    def reason_to_stop(self, scores: Mapping[int, float], *, is_loss: bool = False) -> str | None:
        """Why a run with these scores, by version, ends now; None if it goes on. is_loss: lower is better."""
        versions, sign = sorted(scores), -1.0 if is_loss else 1.0
        if not versions:
            return None
        newest = scores[versions[-1]]
        if self.target is not None and sign * newest >= sign * self.target:
            return f"version {versions[-1]} has {newest:.4g}, and early_stop.target is {self.target:g}"
        best, num_worse = versions[0], 0
        for version in versions[1:]:
            if sign * (scores[version] - scores[best]) > self.min_delta:
                best, num_worse = version, 0
            else:
                num_worse += 1
        if self.patience is None or num_worse < self.patience:
            return None
        return (
            f"{num_worse} evals since version {best} ({scores[best]:.4g}) are not better by more than "
            f"{self.min_delta:g} (early_stop.patience = {self.patience})"
        )


class TrainingEvalSection(EvalSection):
    """The evals of an `rl` run, and what follows from them. A score is a version's mean reward over environments."""

    keep_best: bool = False
    """Keep the weights of the version with the best score as RUN/weights/best. It needs exports at the evals: see
    ckpt.weights.interval."""
    early_stop: EarlyStopSection | None = None
    score_by: Literal["sampled", "greedy"] = "sampled"
    """Whose mean is the score: that of sampled rollouts, or of greedy ones."""


def is_at_interval(interval: int | None, version: int, *, end: int | None) -> bool:
    """Whether a version is at the interval, or the first or last one."""
    is_interval = interval is not None and version % interval == 0
    return version == 0 or is_interval or (end is not None and version >= end)


class LedgerSection(Section):
    """The run's database."""

    keep_bytes: int | None = Field(10_000_000_000, gt=0)
    """Bytes of token payloads kept on disk: beyond them the oldest go. None: no limit. Rows are kept always, and so is
    what came after the newest checkpoint."""
    keep_steps: int | None = Field(None, gt=0)
    """Steps whose token payloads are kept on disk at most; None: as many as keep_bytes allows."""
    keep_samples: int = Field(16, ge=0)
    """Rollouts per step whose token payloads are kept for ever: best ones, worst ones and the first ones."""
    segment_bytes: int = Field(64_000_000, gt=0)
    """Size at which a payload file is closed and the next begun."""


ADAPTIVE = 'concurrency.type = "adaptive"'
"""The key that needs an add-on."""


class FixedConcurrency(Section):
    """As many rollouts as max_inflight_rollouts and the bound on staleness allow."""

    type: Literal["fixed"] = "fixed"


class AdaptiveConcurrency(Section):
    """As many rollouts as the engines take: more, step by step, while they have room, else fewer, at once."""

    type: Literal["adaptive"] = "adaptive"
    min_rollouts: int = Field(16, gt=0)
    """Least number of rollouts."""
    max_rollouts: int | None = Field(None, gt=0)
    """Greatest number; None: what max_inflight_rollouts or the slots of the batches allow."""
    initial_rollouts: int | None = Field(None, gt=0)
    """Number at the start; None: min_rollouts."""
    interval_s: float = Field(2.0, gt=0)
    """Seconds between two checks of the engines."""
    increase: int = Field(16, gt=0)
    """Rollouts that are added after a check that found room."""
    decrease: float = Field(0.8, gt=0, lt=1)
    """Factor of the number after a check that found none."""
    cache_low: float = Field(0.8, gt=0, le=1)
    """There is room while less than this share of the cache is used (mean over engines) ..."""
    cache_high: float = Field(0.95, gt=0, le=1)
    """... and none above this."""
    waiting_high: float = Field(8.0, ge=0)
    """There is none while more requests than this wait in an engine (mean over engines)."""
    cooldown_s: float = Field(10.0, ge=0)
    """Seconds after a decrease in which nothing is changed: running requests must end first."""


class SteeringSection(Section):
    """Present: the run itself chooses how many steps generation is ahead, and with it the rollouts in flight, for most
    effective tokens per second: sampled tokens per second times what they are worth, which is their effective sample
    size to the power of ess_power. A higher level must earn min_gain, so that ties go to fresher data. max_async_level
    is where it starts. With max_update_interval it also chooses how often engines get new weights."""

    min_level: int = Field(1, ge=1)
    """Lowest max_async_level."""
    max_level: int = Field(8, ge=1)
    """Highest max_async_level."""
    max_update_interval: int | None = Field(None, ge=1)
    """Most steps between two versions that engines get; weight_broadcast.interval is the fewest, and where it starts.
    max_async_level rises with it. None: weight_broadcast.interval stays."""
    interval: int = Field(10, ge=2)
    """Steps that are measured for one decision, after those in which a change takes effect; more than the level."""
    min_gain: float = Field(0.04, gt=0)
    """How much more effective tokens per second a level must give than the one below it, per step of it; the same for
    steps between two versions."""
    min_wait: float = Field(0.05, ge=0, lt=1)
    """A higher level is tried if the trainer has waited for more than this share of the time."""
    effective: Literal["tokens", "rollouts"] = "tokens"
    """Whose effective sample size counts: `ess/tokens`, or `ess/rollouts`, which falls much faster with age, so that it
    needs a lower min_ess."""
    ess_power: float = Field(4.0, ge=0)
    """How fast what a token teaches falls with the effective sample size. 1: as its variance alone says; 4 is what runs
    at fixed levels have shown, since weights per token do not make up for all of the way from the sampler."""
    min_ess: float = Field(0.8, ge=0, lt=1)
    """Below this effective sample size, the median of the measured steps, the level is lowered, whatever the speed; one
    that should be is not tried."""
    retry: int = Field(8, ge=1)
    """Decisions after which a level that did not earn its gain is tried again; twice as many after each failure."""


Concurrency = Annotated[FixedConcurrency | AdaptiveConcurrency, Field(discriminator="type")]


class OrchestratorRendererSection(RendererSection):
    """How messages become tokens."""

    place: ClassVar[str] = "orchestrator.renderer"


class OrchestratorKeys(Section):
    """Keys of the orchestrator process alone."""

    renderer: OrchestratorRendererSection = OrchestratorRendererSection()
    client: ClientSection = ClientSection()
    train: TrainSection = TrainSection()
    env: list[TrainEnvSection] = Field([])
    """Training environments, `[[orchestrator.env]]`."""
    eval: TrainingEvalSection | None = None
    algo: Algo = GrpoAlgo()
    curriculum: CurriculumSection = CurriculumSection()
    """The curriculum of environments that have none of their own."""
    debug: Literal["rollouts", "training"] | None = None
    """Run only one half. rollouts: there is no trainer, batches are made, counted and dropped, and the engines
    keep the weights they start with. training: there are no engines, and hooks.rollout_function gives saved ones."""
    frozen_models: dict[str, FrozenModelPlace] = Field({})
    """By name: other frozen models that hooks use, and where they run. `rl` fills it in from [models]."""
    teacher: TeacherSection | None = None
    batch_size: int = Field(128, gt=0)
    """Rollouts in one training step; a multiple of group_size."""
    token_batch_size: int | None = Field(None, gt=0)
    """Tokens, of prompts and replies, with which a batch is complete before it has batch_size rollouts, which must be
    given beside it. A batch always has whole groups; those that are left over are in the next batch, unless
    max_off_policy_steps drops them; with batch_order = "finished" a batch takes more instead. None: a batch is
    batch_size rollouts."""
    group_size: int = Field(8, gt=0)
    """Rollouts of one task that are compared."""
    row_tokens: int | None = Field(None, gt=1)
    """Tokens in one packed row of the trainer. More than seq_len: several long samples share a pass; less: a pass of
    short samples is small, and a longer sample has a row of its own. None: seq_len."""
    max_async_level: int = Field(1, ge=0)
    """Steps that generation may be ahead of the trained weights; 0 is synchronous."""
    sync_interval: int | None = Field(None, gt=0)
    """With `deterministic`: after every so many steps the next batch waits for their weights, so that a run that is
    resumed there plays what it would have played. `rl` fills it in with ckpt.interval."""
    max_off_policy_steps: int = Field(8, ge=0)
    """No rollout is trained whose first token is older than this many steps. Batches wait for groups that would become
    so; those that cannot be waited for, such as groups that a rollout_function has put back, are dropped whole."""
    steering: SteeringSection | None = None
    concurrency: Concurrency = FixedConcurrency()
    max_inflight_rollouts: int | None = Field(None, gt=0)
    """Rollouts running at once, in whole groups of the largest group_size; None: (max_async_level + 1) batches."""
    filter_zero_advantages: bool = True
    """Groups without signal (all rewards equal) are replaced by other groups instead of filling the batch."""
    max_oversampling: float = Field(4.0, ge=1)
    """Groups drawn for a batch, relative to its size; beyond, zero-signal groups fill it, with a warning."""
    max_rejected_batches: int = Field(10, gt=0)
    """Batches' worth of groups that gates and filters reject in a row before the run stops with the cause."""
    filters: list[Filter] = Field([])
    """Rollouts to leave out of batches, or to count: gibberish, repetition, zero_advantage, truncated."""
    mask_truncated_completions: bool = False
    """Do not train rollouts that were cut: the filter `truncated`, enforced. Their rewards stay in the group's mean."""
    hooks: HooksSection = HooksSection()
    batch_order: Literal["dispatch", "finished"] = "dispatch"
    """Which groups make a batch: `dispatch`, the earliest drawn, waiting for those still running; `finished`, the
    oldest of those that are done, waiting only for groups that would be older than max_off_policy_steps in a later
    batch. Neither prefers short rollouts."""
    oversampling_factor: float | None = Field(None, ge=1)
    """Rollouts in flight, relative to one batch; None: max_async_level + 1. Less bounds how many run at once. More
    starts groups early, and none is thrown away: what a batch does not take is in the next one."""
    partial_rollout: bool = True
    """Keep the tokens of rollouts that a stop interrupts, and the turns that a crash does; a resumed run goes on
    from them. False: such rollouts are played again."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Do not train the tokens of a continued rollout that older weights sampled."""
    max_rollout_retries: int = Field(2, ge=0)
    """Times a failed rollout is tried again before it is recorded as failed."""
    max_failed_groups: int = Field(32, gt=0)
    """Consecutive failed groups after which the run stops with the cause."""
    rollout_timeout_s: float | None = Field(600.0, gt=0)
    """Deadline of one rollout."""
    tasks_per_minute: int | None = Field(None, gt=0)
    """Groups begun per minute, evenly over it, for environments that start something slow or costly; None: no limit."""
    env_vars: dict[str, str] = Field({})
    """Environment variables of the orchestrator and of its environments."""
    ledger: LedgerSection = LedgerSection()
    num_train_workers: int = Field(1, gt=0)
    """Data-parallel trainer ranks to pack for."""
    stall_timeout_s: float = Field(600.0, gt=0)
    """A run without progress for longer (no token, version or step) dumps stacks and queue depths, then stops."""

    @property
    def all_filters(self) -> list[Filter]:
        """`filters`, and that of mask_truncated_completions."""
        others = [each for each in self.filters if each.type != "truncated"]
        return [*others, TruncatedFilter()] if self.mask_truncated_completions else self.filters

    def env_of(self, name: str) -> TrainEnvSection | None:
        """The section of a training environment, by its name."""
        return next((section for section in self.env if (section.name or section.id) == name), None)

    @property
    def algos(self) -> dict[str, Algo]:
        """The algos in use by path: those of environments, and the run's if one has none."""
        own = {f"env.{i}.algo": env.algo for i, env in enumerate(self.env) if env.algo is not None}
        return own if self.env and len(own) == len(self.env) else {**own, "algo": self.algo}

    def algo_of(self, env: str) -> Algo:
        """Credit of an environment, by its name."""
        section = self.env_of(env)
        return (section and section.algo) or self.algo

    def algo_path(self, env: str) -> str:
        """The path of the credit of an environment, for messages."""
        for index, section in enumerate(self.env):
            if (section.name or section.id) == env and section.algo is not None:
                return f"orchestrator.env.{index}.algo"
        return "orchestrator.algo"

    def teachers_of(self, env: str) -> dict[str, tuple[TeacherSection, float]]:
        """The frozen teachers of an environment with their weights, by their names in metrics; {}: it has none."""
        algo = self.algo_of(env)
        if not isinstance(algo, TaughtAlgo):
            return {}
        if algo.teachers:
            return {name: (self.frozen_models[name], weight) for name, weight in algo.teachers.items()}
        section = algo.teacher or self.teacher
        return {} if section is None else {"teacher": (section, 1.0)}

    @property
    def beside(self) -> str:
        """A key that asks for models beside the policy, for messages; "": there are none."""
        if self.frozen_models:
            return f"[models.{next(iter(self.frozen_models))}]"
        if self.teacher is not None:
            return "[orchestrator.teacher]"
        for path, algo in self.algos.items():
            if isinstance(algo, TaughtAlgo | OpsdAlgo):
                return f'orchestrator.{path}.type = "{algo.type}"'
        return ""

    def sampling_of(self, env: str) -> SamplingSection:
        """How rollouts of an environment are sampled."""
        section = self.env_of(env)
        return section.sampling.over(self.train.sampling) if section else self.train.sampling

    def group_size_of(self, env: str) -> int:
        """Rollouts of one task of an environment."""
        section = self.env_of(env)
        return (section and section.group_size) or self.group_size

    @property
    def largest_group(self) -> int:
        """Most rollouts of one task of any environment."""
        return max((env.group_size or self.group_size for env in self.env), default=self.group_size)

    @property
    def smallest_group(self) -> int:
        """Fewest rollouts of one task of any environment."""
        return min((env.group_size or self.group_size for env in self.env), default=self.group_size)

    def gates_of(self, env: str) -> dict[str, Gate]:
        """Gates of an environment's groups."""
        return self.curriculum_of(self.env_of(env)).gates

    @property
    def has_pools(self) -> bool:
        """Whether tasks of an environment are in pools."""
        return any(self.curriculum_of(env).sampler.type == "difficulty_pool" for env in self.env)

    def curriculum_of(self, section: TrainEnvSection | None) -> CurriculumSection:
        """The curriculum of an environment."""
        return (section and section.curriculum) or self.curriculum

    @property
    def least_level(self) -> tuple[str, int]:
        """The fewest steps that generation may be ahead, and the key that says so."""
        if self.steering is None or not self.max_async_level:
            return "max_async_level", self.max_async_level
        return "steering.min_level", self.steering.min_level

    @property
    def most_async_level(self) -> int:
        """The most steps that generation may be ahead."""
        return self.max_async_level if self.steering is None else self.steering.max_level

    @property
    def most_update_interval(self) -> int:
        """The most steps between two versions that engines get, if that is more than weight_broadcast.interval."""
        return 1 if self.steering is None else self.steering.max_update_interval or 1

    def eval_as_trained(self) -> TrainingEvalSection | None:
        """[eval] with the reply length of training, unless it has its own; without environments, those of training.

        These keep their reply length, their deadline and, unless [eval] has its own, their number of retries.
        """
        if self.eval is None:
            return None
        own_limit = self.eval.sampling.max_completion_tokens
        limit = own_limit or self.train.sampling.max_completion_tokens
        sampling = self.eval.sampling.model_copy(update={"max_completion_tokens": limit})
        changes: dict[str, Any] = {"sampling": sampling}
        if not self.eval.env:
            changes["env"] = [
                EvalEnvSection(
                    **{key: getattr(env, key) for key in EnvSection.model_fields},
                    sampling=SamplingOverrides(max_completion_tokens=own_limit or env.sampling.max_completion_tokens),
                    rollout_timeout_s=env.rollout_timeout_s,
                    max_rollout_retries=(
                        env.max_rollout_retries
                        if self.eval.max_rollout_retries is None
                        else self.eval.max_rollout_retries
                    ),
                )
                for env in self.env
            ]
        return self.eval.model_copy(update=changes)


class OrchestratorSection(OrchestratorKeys, RunKeys):
    """All keys of the orchestrator process: its own and the run's."""
