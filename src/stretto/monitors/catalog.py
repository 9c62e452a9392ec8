"""Every metric that a run writes: who writes it, its unit, what it means and how to read it.

`python -m stretto.monitors.catalog` prints the page, which `make docs` puts on the site. The metrics files of
all test runs are checked against this table (tests/cases/metric_names.py), so a new metric needs an entry here.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

WIDTH = 110


@dataclass(frozen=True)
class Metric:
    """One metric, or one per value of the <placeholders> in its name."""

    name: str
    unit: str
    meaning: str
    reading: str = ""  # what is good, what is bad

    @property
    def pattern(self) -> str:
        """A regular expression that matches the names of this metric."""
        return re.sub(r"<([^>]+)>", lambda m: "[^/]+" if m[1] == "metric" else ".+", re.escape(self.name))


@dataclass(frozen=True)
class Part:
    """Metrics of one subject."""

    title: str
    roles: tuple[str, ...]  # they are in the files metrics/<role>.jsonl
    about: str
    metrics: tuple[Metric, ...]


def _rows(text: str) -> tuple[Metric, ...]:
    """Parse metrics written as `name | unit | meaning | how to read it`; continuation lines are indented."""
    entries = text.strip().replace("\n    ", " ").splitlines()
    return tuple(Metric(*(cell.strip() for cell in entry.split(" | "))) for entry in entries)


PARTS = (
    Part(
        "Reward and rollouts",
        ("orchestrator",),
        "Known when the batch is made, written when its step is trained.",
        _rows("""
reward/mean | reward | Mean over the rollouts played for the step, with groups that are not trained on because
    all their rewards are equal. | It should rise, by more than its noise; compare with evals.
reward/std | reward | Standard deviation over the same rollouts. | Near 0 there is nothing to learn from.
reward/trained | reward | Mean over the rollouts of the batch only. | Groups of equal rewards are left out, so
    it stays in the middle while `reward/mean` rises.
reward/<env>/mean | reward | Mean per environment, if there are several.
batch/<env> | rollouts | Rollouts per environment, if there are several.
completion/mean | tokens | Sampled tokens per rollout. | A steady rise to the limit, or a fall to almost
    nothing, is often a reward that is gamed.
completion/max | tokens | The longest rollout of the batch.
completion/truncated_share | 0 to 1 | Rollouts that reached a limit of tokens. | Above 0.5 the limit decides
    the reward: raise `max_completion_tokens` or `seq_len`.
groups/drawn | groups | Groups started since the last batch.
groups/failed | groups | Groups dropped since the last batch because rollouts failed. | Should be
    0; `stretto rollouts RUN --failed` has the reasons.
outcomes/<reason> | 0 to 1 | Rollouts that ended for this reason, of all that ended since the last batch. | The reasons
    are the table in [environments](environments.md#how-a-rollout-can-end).
outcomes/left_out | 0 to 1 | Rollouts that infrastructure ended: they are not trained and not in the baseline.
outcomes/left_out_long | 0 to 1 | The same share, of the rollouts with more sampled tokens than the median. | Well above
    `outcomes/left_out_short`, long rollouts are lost more often, and what is trained is no fair sample.
outcomes/left_out_short | 0 to 1 | The same share, of the other rollouts.
groups/rejected | groups | Groups that a filter or a function of yours has rejected since the last batch.
groups/unaccounted | groups | Groups that are neither trained, dropped, failed, running nor waiting. | Always 0;
    otherwise the run warns.
advantage/group_sum | 0 to 1 | Sum of the advantages of a group, as a share of the sum of their magnitudes; the
    largest of the batch, of algos with a group's mean as baseline. | Below 1e-6; otherwise the run warns.
groups/zero_signal_share | 0 to 1 | Finished groups in which all advantages are 0. | Near 1 tasks are too easy
    or too hard for the policy.
turns/reward | reward | Mean over the turns of the batch of the rewards that the environment gave them.
turns/credited_share | 0 to 1 | Turns of the batch that have an advantage beside their rollout's. | Near 0 with
    `turns.type = "states"` the rollouts of a group hardly meet in equal states: name them more coarsely.
filter/<type> | 0 to 1 | Rollouts that this filter flagged since the last batch.
curriculum/<env>/<pool> | tasks | Tasks in each difficulty pool: unseen, and hard, normal, easy or those of `pools`.
baseline/<env>/<agent> | reward | Running mean reward that is subtracted from an agent's rewards (`rae`).
env/<env>/<name> | the environment's | Mean of what the environment reports beside the reward.
rollout/<metric> | the function's | What a rollout function of yours reports.
"""),
    ),
    Part(
        "Staleness and time",
        ("orchestrator",),
        "How far generation is ahead of training, and who waits for whom.",
        _rows("""
off_policy/mean | versions | Version that is trained, minus the version that sampled a rollout's first token;
    mean over the groups of the batch. | About `max_async_level`; 0 in synchronous runs; with
    `weight_broadcast.interval` up to half an interval less.
off_policy/max | versions | The same for the oldest group. | Never above `max_off_policy_steps`.
off_policy/dropped | groups | Groups dropped since the last batch because they were too old. | 0: batches wait
    for groups that would be. Above 0 where a user's function chooses groups or puts them back.
time/step | s | Time between the ends of two steps.
time/wait_for_late | s | With `batch_order = "finished"`: a batch had enough groups, and waited for others that
    would be too old for later ones. | If large: raise `max_off_policy_steps`.
time/wait_for_rollouts | s | Time in which the trainer waited for its batch. | If large: more engines, or
    fewer ranks for the trainer.
time/wait_for_trainer | s | Time in which no rollout was running. | If large: the trainer is the slower part,
    or `max_async_level` is 0.
time/pack | s | Packing the batch and writing it to the ledger.
time/update_weights | s | Loading the latest version into all engines.
tokens_per_s | tokens/s | Sampled tokens of the batch per second of the step.
trainer/step_s | s | Duration of the step as the trainer measured it.
trainer/wait_s | s | The trainer's waiting within it.
trainer/time/step | s | The trainer's `time/step`, see below.
models/<name>/requests | requests | Asked of a frozen model since the run began, over all its starts.
models/<name>/cached | requests | The part of them that was answered from the cache.
models/<name>/failed | requests | The part of them that had no answer, after all retries. | Should be 0.
models/<name>/prompt_tokens | tokens | Tokens of prompts, as its server counts them.
models/<name>/completion_tokens | tokens | Tokens of replies.
models/<name>/cost | price | What they cost, if `prompt_price` or `reply_price` is given. | `max_cost` bounds it.
progress/rollouts | rollouts | Trained since the run began.
progress/tokens | tokens | Sampled tokens trained since the run began.
steering/level | steps | `max_async_level` of the moment, with `[orchestrator.steering]`.
steering/update_interval | steps | Steps between two versions that engines get, with `[orchestrator.steering]`.
steering/effective_tokens_per_s | tokens/s | What it is steered by: sampled tokens per second times what they are
    worth, their effective sample size to the power of `ess_power`, over the steps of a decision.
concurrency/limit | rollouts | Most rollouts in flight, with `concurrency.type = "adaptive"`.
canary/error | nats | Mean difference between the log-probabilities of trainer and engine on fixed tokens, at
    the latest check. | Above `canary_tolerance` the run ends: a wrong weight update.
canary/tolerance | nats | The difference that rounding explains in the precision of trainer and engine; 0 before the
    first check, and where a function of yours plays. | `mismatch_kl/age/0` stays below its square; otherwise the
    run warns, unless it makes several updates per step or an adapter has `dropout`.
canary/rollout_error | nats | The same difference between what a finished rollout was sampled by and what an engine
    computes when it reads it again: after each check one is read, or a few short ones. | Above `canary/tolerance` the
    run warns: the engine samples by another distribution than it computes.
canary/groups | groups | Groups of tensors (layers) of which engines and trainer had equal bits at the latest check; 0:
    not compared, as with vLLM, which packs tensors. | If one differs the run ends.
inference/num_requests_running | requests | Requests that engines are computing. Like the others of `inference/`,
    read at most once per second.
inference/num_requests_waiting | requests | Requests that wait in engines. | Always above 0: engines are full.
inference/kv_cache_usage | 0 to 1 | Share of the engines' cache that is in use. | Near 1 requests are
    preempted.
inference/num_preemptions | requests | Requests preempted for lack of cache, since the engine began. | If it
    rises: fewer rollouts in flight, or more memory for the cache.
speculation/acceptance | 0 to 1 | Drafted tokens that were sampled, of those drafted since the last step's reading, with
    `[inference.speculation]`. | Low, drafts cost more than they save; the embedded engine then stops.
speculation/accepted_length | tokens | Tokens of a draft that were sampled, mean over drafts. | Sampled tokens per
    pass and sequence, less one.
speculation/accepted_at/<position> | 0 to 1 | Drafts whose token at this position, from 0, was sampled. | Falls with the
    position; near 0 at the last ones, `num_speculative_tokens` is too large.
speculation/on_share | 0 to 1 | Passes of embedded engines in which drafts were looked for. | 0 where nothing is copied.
"""),
    ),
    Part(
        "Budget",
        ("orchestrator", "sft"),
        "What the run has used, and how far its `[budget]` goes.",
        _rows("""
budget/hours | h | Hours of the run over all its starts. | The bounds are `[budget]`, see [steering](steering.md).
budget/tokens | tokens | Tokens of trained batches, prompts included, over all starts.
budget/sampled_tokens | tokens | Tokens sampled in rollouts that have ended, trained or not, over all starts.
budget/cost | price | What that costs, if something has a price.
budget/share | 0 to 1 | Part of the budget that is used: of its bounds, the one that is nearest.
budget/last_step | step | The step with which the budget would end the run, if the coming steps are as the last 20.
"""),
    ),
    Part(
        "Learning",
        ("trainer", "orchestrator", "sft"),
        "From forward and backward passes, as means over all ranks. `sft` has those that need no reward. "
        'A loss of yours (`trainer.loss.type = "custom"`) adds what it reports as `<name>/mean`.',
        _rows("""
loss/mean | loss | The loss of the step. | Says little in reinforcement learning: near 0, and it need not
    fall.
entropy/mean | nats per token | Entropy of the policy at sampled tokens. | A slow fall is normal; near 0 the
    policy always gives the same reply and learning ends.
entropy/<env>/mean | nats per token | The same per environment, if there are several.
mismatch_kl/mean | nats per token | How far the trainer's log-probabilities of sampled tokens are from the
    engine's (k3 estimate); staleness is part of it. | Runs that learn stay below 0.03; above 0.3 the run
    warns: a learning rate that is far too high, or other numerics.
mismatch_kl/max | nats | The largest value of one token. | Single large values are normal.
ess/tokens | 0 to 1 | Effective sample size of the batch by tokens, (sum r)^2 / (n sum r^2), with r the ratio of trained
    policy and sampler. | 1 where no token is older than the policy; the further the policy has moved, the lower.
ess/rollouts | 0 to 1 | The same by trained branches of rollouts, whose r is the product over their tokens. |
    Below 0.3 there is a warning, if that of tokens is below 0.9 too. It falls with the length of replies.
mismatch_kl/<env>/mean | nats per token | The same per environment, if there are several.
age/<versions> | 0 to 1 | Sampled tokens of this age: the trained version minus the oldest one whose cache the
    token may have read, that of its rollout's first token. | Ages are 0, 1, 2, 3-4, 5-8 and 9+.
mismatch_kl/age/<versions> | nats per token | `mismatch_kl/mean` of the tokens of this age. | At age 0 it is the
    numerics of trainer and engine alone, with a bound (`canary/tolerance`), and of the second update of a step on
    the policy's way in that step; what later ages have more is its way since then.
ess/tokens/age/<versions> | 0 to 1 | `ess/tokens` of the tokens of this age.
ess/rollouts/age/<versions> | 0 to 1 | `ess/rollouts` of the branches of this age. | Where it is near 0 the run is
    too far ahead: lower `max_async_level` or `max_off_policy_steps`.
is_masked/mean | 0 to 1 | Tokens whose gradient the loss's bounds removed. | Above 0.2 steps are too large or
    data too old.
is_masked_low/mean | 0 to 1 | The part of them that became too unlikely.
is_masked_high/mean | 0 to 1 | The part of them that became too likely.
reference_kl/mean | nats per token | Distance to the reference model, if there is one. | Grows as the policy
    leaves where it began.
teacher_kl/mean | nats per token | Distance to the teacher on sampled tokens (`opd`, `opsd`). | Should fall.
nll/mean | nats per token | Negative log-likelihood of the tokens that are imitated: the loss of `sft`, or of
    a teacher's replies. | Should fall.
correction/weight/mean | factor | Mean weight of importance correction. | Near 1.
correction/is_outside/mean | 0 to 1 | Tokens whose ratio is outside of the correction's bounds.
correction/is_rejected/mean | 0 to 1 | Tokens that rejection removed. | Above 0.5 most data are wasted.
correction/is_vetoed/mean | 0 to 1 | Tokens of samples that the veto removed.
max_vio/mean | ratio | Busiest expert compared with the mean, (max - mean) / mean, over layers. | 0 is even;
    if it grows, experts collapse.
max_vio/max | ratio | The same in the worst layer.
indexer_kl/mean | nats | KL divergence of the index from the attention to the keys it chose, per token and layer.
routing_confidence/mean | 0 to 1 | Probability that routers give to the experts they choose.
optim/lr | - | Learning rate of the step.
optim/grad_norm | - | Norm of the gradient before clipping, mean over the updates of the step. | Sudden peaks
    announce trouble; a value that is not finite ends the run.
optim/updates | updates | Optimizer updates in the step, if more than one.
optim/dropout | 0 to 1 | Share of an adapter's inputs that training leaves out by chance, if any.
optim/skipped | updates | Updates that were left out because no token had an advantage or another target.
"""),
    ),
    Part(
        "Critic",
        ("trainer", "orchestrator"),
        "With `[trainer.critic]`.",
        _rows("""
critic/value_loss | reward² | Mean squared error of values. | Should fall early.
critic/value/mean | reward | Mean value. | Close to `critic/return/mean`.
critic/return/mean | reward | Mean return.
critic/is_clipped/mean | 0 to 1 | Values whose change was clipped.
critic/explained_variance | up to 1 | Share of the returns' variance that values explain. | Below 0 the critic
    is worse than a constant.
critic/lr | - | Learning rate of the critic.
critic/grad_norm | - | Norm of its gradient before clipping.
time/wait_for_values | s | Waiting for the values of a critic on ranks of its own, after the policy's own estimates.
time/wait_for_critic | s | Waiting for its updates, after the policy's own.
"""),
    ),
    Part(
        "Work of the trainer",
        ("trainer", "orchestrator", "sft"),
        "Where the orchestrator has the same name, its file calls the trainer's `trainer/<name>`.",
        _rows("""
batch/tokens | tokens | Tokens of the batch over all ranks, prompts included.
batch/sampled_tokens | tokens | Tokens that the policy sampled.
batch/micro_batches | - | Forward and backward passes over all ranks.
progress/total_tokens | tokens | Tokens trained since the process began.
perf/throughput | tokens/s | Tokens per second over the last ten steps, waiting included.
time/step | s | From the end of one step to the end of the next.
time/train | s | Forward, backward and update.
time/wait_for_batch | s | Waiting for the batch.
"""),
    ),
    Part(
        "Files and weights",
        ("trainer", "orchestrator"),
        "In the rows of the steps in which they happen.",
        _rows("""
time/publish | s | Publishing a version for engines; of the steps whose version is sent.
publish/bytes | bytes | Size of the published weights.
time/save_ckpt | s | Time that training waited for a checkpoint or an export.
"""),
    ),
    Part(
        "Supervised fine-tuning",
        ("sft",),
        "Beside `nll/mean`, which is the training loss.",
        _rows("""
val/loss | nats per token or pair | Loss on validation rows. | If it rises while `nll/mean` falls, stop: the model
    memorizes.
time/pack | s | Drawing the examples of a step and packing them into rows.
time/forward_backward | s | Forward and backward.
time/optim | s | Reduction of gradients, clipping, and the update.
time/val | s | Duration of the validation.
progress/epoch | epochs | Passes over the rows so far.
progress/total_samples | rows | Rows trained so far.
"""),
    ),
    Part(
        "Preference pairs",
        ("sft",),
        'With `[data] type = "preference"`, beside `loss/mean` and `val/loss`, which are means over pairs. The names '
        "are TRL's.",
        _rows("""
rewards/accuracies | 0 to 1 | Pairs whose better reply has the higher reward. | 0.5 is chance; at the first step of DPO
    both rewards are 0, and it is 0.
rewards/margins | reward | Reward of the better reply minus that of the other. | Should rise.
rewards/chosen | reward | Mean reward of the better replies: of a reward model its score, of DPO beta x (log-probability
    minus the start's).
rewards/rejected | reward | Mean reward of the other replies.
logps/chosen | nats | Mean log-probability of the better replies (`dpo`). | If it falls with that of the others, the
    policy forgets both: lower the learning rate or raise beta.
logps/rejected | nats | Mean log-probability of the other replies (`dpo`).
val/rewards/accuracies | 0 to 1 | The same on validation pairs. | The figure to choose by.
val/rewards/margins | reward | The same on validation pairs.
"""),
    ),
    Part(
        "Evals",
        ("orchestrator", "eval", "evals"),
        "In the row of the step that made the version. `<mode>` is sampled or greedy. `eval` is the "
        "verb's file, `evals` that of evals during `sft`.",
        _rows("""
eval/<env>/<mode>/mean | reward | Mean reward on held-out tasks. | The figure to compare runs by.
eval/<env>/<mode>/avg@<k> | reward | The same, by its usual name if there are k replies per task.
eval/<env>/<mode>/pass@<k> | 0 to 1 | Probability that one of k replies is right; only for rewards 0 and 1. |
    If it falls while the mean rises, the policy only sharpens what it knew.
eval/<env>/<mode>/pass^<k> | 0 to 1 | Probability that all of k replies are right.
eval/<env>/<mode>/completion_tokens | tokens | Mean length of replies.
eval/<env>/<mode>/num_failed | rollouts | Rollouts that failed and are not counted. | Should be 0.
eval/<env>/<mode>/metrics/<name> | the environment's | Mean of what the environment reports beside the reward, such as
    each of several rewards.
eval/time_s | s | Duration of the eval.
eval/<metric> | the function's | What an eval function of yours reports.
"""),
    ),
)

ENGINE = _rows("""
num_requests_running | requests | Requests that are being computed.
num_requests_waiting | requests | Requests that wait.
kv_cache_usage_perc | 0 to 1 | Share of the cache that is in use.
weight_version | version | The loaded version.
prefix_cache_queries_total | tokens | Prompt tokens looked up in the prefix cache.
prefix_cache_hits_total | tokens | Prompt tokens found there. | Near the queries in groups: all members share
    a prompt.
num_preemptions_total | requests | Requests preempted for lack of cache.
prompt_tokens_total | tokens | Tokens of prompts.
prompt_tokens_cached_total | tokens | The part of them that was not computed again.
generation_tokens_total | tokens | Sampled tokens.
weight_updates_total | updates | Versions loaded.
weight_update_seconds_total | s | Time spent loading them.
spec_decode_num_drafts_total | drafts | Drafts checked. This and the next: with `[inference.speculation]`.
spec_decode_num_draft_tokens_total | tokens | Tokens of them.
spec_decode_num_accepted_tokens_total | tokens | The part of them that was sampled. | Near the draft tokens: longer
    drafts may pay.
spec_decode_num_accepted_tokens_per_pos_total | tokens | The same by `position` in the draft, from 0.
spec_decode_num_passes_total | passes | Passes of the embedded engine.
spec_decode_num_passes_on_total | passes | Those in which it looked for drafts: it rests while they do not pay.
request_success_total | completions | Ended completions by `finished_reason`: stop, length, abort.
time_to_first_token_seconds | s | From arrival to the first token, a histogram.
e2e_request_latency_seconds | s | From arrival to the end, a histogram.
request_queue_time_seconds | s | From arrival to the start, a histogram.
cache_config_info | - | Size and number of cache blocks, as labels.
""")
"""Metrics of the embedded engine at /metrics; vLLM has them too, except those named `weight_`, and many more."""


@cache
def find_metric(name: str) -> Metric | None:
    """The entry of a metric of a run, from any process; None if it has none."""
    metrics = (metric for part in PARTS for metric in part.metrics)
    return next((metric for metric in metrics if re.fullmatch(metric.pattern, name)), None)


def markdown() -> str:
    """The page of all metrics."""
    parts = [_section(part.title, f"{_files(part)} {part.about}", part.metrics) for part in PARTS]
    engine = _section("At an engine", _ENGINE_HEAD, ENGINE, prefix="vllm:")
    return "\n\n".join([_HEAD.strip(), *parts, engine]) + "\n"


def _files(part: Part) -> str:
    return "In " + ", ".join(f"`metrics/{role}.jsonl`" for role in part.roles) + "."


def _section(title: str, about: str, metrics: Iterable[Metric], prefix: str = "") -> str:
    return "\n\n".join([f"## {title}", textwrap.fill(about, WIDTH), "\n".join(_item(m, prefix) for m in metrics)])


def _item(metric: Metric, prefix: str) -> str:
    unit = f" ({metric.unit})" if metric.unit != "-" else ""
    reading = f" *{metric.reading}*" if metric.reading else ""
    text = f"- **`{prefix}{metric.name}`**{unit}: {metric.meaning}{reading}"
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


_HEAD = """
# Metrics

What each number of a run is, and how to read it.

Each process writes `metrics/<role>.jsonl` in the run directory, one JSON object per step. In `rl` the
orchestrator sends its metrics to the trackers that are configured (`[monitors.wandb]`,
`[monitors.tensorboard]`, `[monitors.trackio]`). The orchestrator's file has the trainer's metrics too: one
file has every curve. From Python: `stretto.Run("outputs/demo").metrics()`;
as a picture: `stretto plot outputs/demo --key entropy/mean`.

For each metric: its name, its unit, what it is, and *how to read it*. `<env>` and other words in angle
brackets stand for names of your run. Look first at `reward/mean` and the evals, then at `completion/mean`,
`entropy/mean` and `mismatch_kl/mean`. [My reward does not rise](reward_does_not_rise.md) goes on from there.
"""

_ENGINE_HEAD = (
    "At `http://HOST:PORT/metrics` in Prometheus' format, with vLLM's names. vLLM has no `weight_` "
    "metrics, and many of its own."
)


if __name__ == "__main__":
    sys.stdout.write(markdown())
