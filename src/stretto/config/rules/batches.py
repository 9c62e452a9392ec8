"""Rules of [orchestrator]: environments, sampling, groups, batches, a user's functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from stretto.config.derived import LOCAL_HOSTS
from stretto.config.rules.learning import GROUP_BASELINE
from stretto.config.rules.rule import Each, Idle, Rule, Rules, matching
from stretto.config.sections.curriculum import DifficultySampler, RangeGate
from stretto.config.sections.distill import WITHOUT_BEHAVIOR, WITHOUT_REWARD
from stretto.config.sections.hooks import ENVIRONMENTS
from stretto.config.sections.orchestrator import (
    ClientSection,
    EvalSection,
    OrchestratorKeys,
    OrchestratorSection,
    SamplingOverrides,
    SamplingSection,
)

ENV_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]*")
RESERVED_ENV_NAMES = ("all", "agg", "mean")
WHY_NOT_CUT = (
    "the engine's log-probabilities would be of the tokens that are left, and the trainer's of the whole vocabulary, "
    "so that every ratio of the two is wrong"
)

WHY_NOT_BIASED = (
    "{0.path}: the engine's log-probabilities would be of changed logits, and the trainer's of the model's, so that "
    "every ratio of the two is wrong; leave it out, or ban words with bad_words; evals and agents that are not trained "
    "may have it"
)


# -- environments and engines --


def name_faults(section: Any) -> Iterator[tuple[str, str, str]]:
    """Names are keys of metrics: unique, and not the name of an aggregate."""
    names = [env.name or env.id for env in section.env]
    for index, (env, name) in enumerate(zip(section.env, names, strict=True)):
        key = f"env.{index}.{'name' if env.name else 'id'}"
        if env.name and not ENV_NAME.fullmatch(env.name):
            yield key, "{0}: letters, digits and . _ : @ + - only, for it names metrics", name
        elif name in RESERVED_ENV_NAMES:
            yield key, "{0} is the name of an aggregate in metrics; choose another", name
    for name, count in Counter(names).items():
        if count > 1:
            where = " ".join(f"env.{index}" for index, other in enumerate(names) if other == name)
            message = f'{{{count}.path}}: {count} environments are called "{{it}}"; give each its own `name`'
            yield f"{where} | env", message, name


def urls(client: ClientSection) -> list[str]:
    """Every address of the client."""
    return [client.base_url] if isinstance(client.base_url, str) else client.base_url


def is_address(url: str) -> bool:
    """Whether a URL names a scheme, a host and, if any, a valid port."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def remote_engine(section: OrchestratorSection) -> str | None:
    """The address of an engine on another host, which shared memory does not reach."""
    client = section.client
    engines = urls(client) if client.admin_base_url is None else client.admin_base_url
    away = [url for url in engines if is_address(url) and urlsplit(url).hostname not in LOCAL_HOSTS]
    return away[0] if away and section.weight_broadcast.type == "shm" else None


def pool_faults(section: DifficultySampler) -> Iterator[tuple[str, str]]:
    """Pools of equal thresholds, of which one is empty; names that metrics cannot have; pools without any weight."""
    named: dict[float, str] = {}
    for name, pool in section.pools.items():
        if name == "unseen" or not re.fullmatch(r"[\w.:@+-]+", name):
            yield (
                "pools",
                f"{{0.path}}.{name}: letters, digits and . _ : @ + - only, and not `unseen`, for it names a metric",
            )
        if (other := named.setdefault(pool.threshold, name)) != name:
            yield ("pools", f"{{0.path}}: {other} and {name} have the same threshold, {pool.threshold:g}; change one")
    if section.pools and not any(pool.weight for pool in section.pools.values()):
        yield "pools", "{0.path}: no pool has a weight above 0, so no task would be drawn twice; raise one"


# -- sampling --


def sampling_faults(section: OrchestratorKeys) -> Iterator[tuple[str, str]]:
    """Groups of one or of equal rollouts, and sampling from a distribution that is not trained."""
    found: dict[str, str] = {}  # the message by the place of the value
    replay = section.train.replay
    for index, env in enumerate(section.env or [None]):
        algo = (env and env.algo) or section.algo
        own_size, own = (None, None) if env is None else (env.group_size, env.sampling)
        sampling = section.train.sampling if own is None else own.over(section.train.sampling)
        is_learned_as_given = algo.type in WITHOUT_BEHAVIOR
        given = {} if own is None else own.model_dump(exclude_none=True)
        tables = {True: f"env.{index}.sampling", False: "train.sampling"}
        places = {key: f"{tables[key in given]}.{key}" for key in SamplingSection.model_fields}
        hooks = section.hooks
        is_own = (hooks.reward_post_process, hooks.convert_samples_to_train_data) != (None, None)
        if (own_size or section.group_size) == 1 and algo.type in GROUP_BASELINE and not is_own:
            where = "group_size" if own_size is None else f"env.{index}.group_size"
            rule = f"every advantage would be zero, for {algo.type} subtracts the group's mean and one is its own mean"
            found.setdefault(where, f"{{0}}: {rule}; use 2 or more (8 is the default)")
        if sampling.temperature == 0:
            where = places["temperature"]
            is_fine = is_learned_as_given and where.startswith("env")
            rule = "the rollouts of a group would be equal and teach nothing"
            if algo.type in WITHOUT_REWARD:
                rule = "its tokens would be no samples of what is trained"
            if algo.type != "zero" and not is_fine:
                found.setdefault(where, f"{{0}} is greedy: {rule}; use more, such as 1.0")
            continue
        if sampling.logit_bias and not is_learned_as_given:
            found.setdefault(places["logit_bias"], WHY_NOT_BIASED)
        for key, value in () if is_learned_as_given else sampling.cuts().items():
            if replay is None:
                way = "leave it out, or add [{1.path}], which trains what was sampled"
                found.setdefault(places[key], f"{{0}}: {WHY_NOT_CUT}; {way}")
            elif key == "top_k" and value > replay.max_tokens:
                found.setdefault(places[key], "{0} is more than {2}; lower it or raise that")
    for where, message in found.items():
        yield f"{where} | train.replay train.replay.max_tokens", message


# -- groups --


def sizes_that_fit(section: OrchestratorKeys) -> str | None:
    """Batch sizes near the given one that whole groups fill; None if they fill the given one."""
    if not section.batch_size % section.group_size:
        return None
    low = section.batch_size // section.group_size * section.group_size
    return " or ".join(str(size) for size in (low, low + section.group_size) if size)


def steps_early(section: OrchestratorKeys) -> str | None:
    """How many steps early oversampled groups start, if they would be too old to be trained."""
    ahead = (section.oversampling_factor or 1) - 1
    is_lost = ahead > max(section.max_off_policy_steps, section.max_async_level)
    return f"{ahead:g}" if is_lost else None


def ahead_of(section: OrchestratorKeys) -> str | None:
    """Why fewer rollouts run at once than are allowed, if generation may be ahead."""
    limit, batches = section.max_inflight_rollouts, section.max_async_level + 1
    held = int(max(batches, section.oversampling_factor or 0) * section.batch_size)
    if limit is None or limit <= held or section.max_async_level == 0:
        return None
    return (
        f"{held} rollouts are in flight at most; for more give oversampling_factor = "
        f"{min(limit / section.batch_size, section.max_off_policy_steps + 1):g}, which trains older ones"
    )


# -- a user's own functions --


def hook_faults(section: OrchestratorKeys) -> Iterator[tuple[str, str] | tuple[str, str, Any]]:
    """Hooks that would do nothing, and settings that hooks replace."""
    hooks = section.hooks
    for index, env in enumerate(section.env):
        algo = (env.algo or section.algo).type
        for key in ("reward_post_process", "rollout_function"):
            if algo in WITHOUT_REWARD and getattr(hooks, key) is not None:
                rule = f'does nothing for {{it}}: its algo "{algo}" learns from a teacher, not from rewards'
                yield f"hooks.{key}", f"{{0.path}} {rule}; leave one of them out", env.name or env.id
        if hooks.rollout_function is not None and env.group_size not in (None, section.group_size):
            message = "{0}: {1.path} gets groups of one size; leave it out"
            yield f"env.{index}.group_size | hooks.rollout_function", message
    for pattern in () if section.eval is None else ("eval.env.*.group_size", "eval.env.*.sampling"):
        for unused, value, default in matching(section, pattern):
            if hooks.eval_setting is not None and value != default:
                message = "{0.path} does nothing: {1.path} makes the evals; leave it out"
                yield f"{unused} | hooks.{hooks.eval_setting}", message


# fmt: off
SHORT_ROLLOUTS = Rule("batch_order max_off_policy_steps max_async_level",
     lambda s: s.batch_order == "finished" and s.max_off_policy_steps <= s.max_async_level and s.max_async_level + 1,
     "{0} with {1}, which is below {2.path} + 1 = {it}: long rollouts wait behind short ones until they are "
     'too old, so that mostly short ones are trained; raise {1.path}, or use "dispatch"')
NEVER_REACHED = Rule("max_inflight_rollouts oversampling_factor max_async_level", ahead_of,
     "{0} is never reached: {it}")

RULES: Rules = {
    ClientSection: (
        Rule("base_url", lambda s: not urls(s),
             "{0.path} is empty; give the address of an engine, such as http://127.0.0.1:8000/v1"),
        Rule("base_url", lambda s: next((url for url in urls(s) if not is_address(url)), None),
             '{0.path} = "{it}" is not an address; write it like http://127.0.0.1:8000/v1'),
    ),
    EvalSection: (Each(name_faults),),
    SamplingOverrides: (
        Rule("min_tokens max_completion_tokens",
             lambda s: s.max_completion_tokens is not None and (s.min_tokens or 0) > s.max_completion_tokens,
             "{0} is more than {1}: no reply could be so long; lower it or raise that"),
        Rule("stop", lambda s: "" in ([s.stop] if isinstance(s.stop, str) else s.stop or ()),
             "{0.path} has an empty text, which would end every reply at its first token; leave it out"),
        Rule("bad_words", lambda s: not all(word.strip() for word in s.bad_words or ()),
             "{0.path} has an empty text, which would ban every reply; leave it out"),
    ),
    RangeGate: (
        Rule("reject_min reject_max", lambda s: s.reject_min > s.reject_max,
             "{0} is above {1}; it would reject nothing: swap them"),
    ),
    DifficultySampler: (
        Rule("hard_threshold easy_threshold", lambda s: s.hard_threshold > s.easy_threshold,
             "{0} is above {1}; no task would be normal: swap them"),
        Idle("hard_threshold easy_threshold hard_weight normal_weight easy_weight", "pools", lambda s: s.pools
             and "pools have their own", "leave pools out"),
        Each(pool_faults),
    ),
    OrchestratorKeys: (
        Rule("batch_size group_size", sizes_that_fit, "{0} must be a multiple of {1}; use {it}"),
        Rule("token_batch_size | batch_size",
             lambda s: s.token_batch_size is not None and "batch_size" not in s.model_fields_set,
             "{0} needs {1.path}, the most rollouts of a batch: give at least as many as have so many tokens"),
        Idle("token_batch_size", "hooks.rollout_function", lambda s: s.hooks.rollout_function is not None
             and "its calls are batches of batch_size rollouts", "leave one of them out"),
        Idle("token_batch_size", "hooks.buffer_filter", lambda s: s.hooks.buffer_filter is not None
             and "it chooses batch_size rollouts", "leave one of them out"),
        Rule("max_inflight_rollouts group_size",
             lambda s: s.max_inflight_rollouts is not None and s.max_inflight_rollouts < s.group_size,
             "{0} cannot hold one group of {1}; raise it"),
        Rule("num_train_workers batch_size", lambda s: s.num_train_workers > s.batch_size,
             "{0} ranks cannot share {1} rollouts: some would have none; raise {1.path}"),
        Rule("oversampling_factor max_async_level",
             lambda s: (s.oversampling_factor or 1) > 1 and s.max_async_level == 0,
             "{0} starts groups early and {1} forbids it; raise {1.path} or leave it out"),
        Rule("oversampling_factor max_off_policy_steps", steps_early,
             "{0} starts groups {it} steps early and {1} drops what is so old; raise {1.path}"),
        Rule("filters",
             lambda s: next((kind for kind, n in Counter(f.type for f in s.filters).items() if n > 1), None),
             '{0.path}: "{it}" is listed twice; give it once'),
        Idle("hooks.args", "hooks", lambda s: s.hooks.is_empty and "no function is named", "name one"),
        Idle("hooks.eval_function hooks.eval_log", "eval",
             lambda s: s.eval is None and "there are no evals", "add [eval]"),
        Rule("hooks.eval_function hooks.rollout_function",
             lambda s: s.eval and s.hooks.eval_function == ENVIRONMENTS and s.hooks.rollout_function is None,
             "{0} is what happens without {1.path}; leave it out"),
        Idle("env.*.sampling.*", "hooks.rollout_function",
             lambda s: s.hooks.rollout_function is not None and "it samples by itself", "name none"),
        Each(hook_faults),
        Each(sampling_faults),
        Rule("max_async_level max_off_policy_steps", lambda s: s.max_async_level > s.max_off_policy_steps,
             "{0} lets rollouts start that many versions early, and {1} drops what is so old, so that most would "
             "be lost; raise {1.path} or lower {0.path}"),
        Rule("env", lambda s: not s.env,
             '{0.path}: no environment to train on; add one, such as [[{0.path}]] id = "sort-letters"'),
        Each(name_faults),
        Idle("mask_offpolicy_in_partial_rollout", "partial_rollout",
             lambda s: not s.partial_rollout and "no rollout is continued"),
        Rule("client.api", lambda s: s.client.api == "chat",
             '{0} gives no tokens to train on; use "tokens" with the `inference` verb or vLLM'),
    ),
    OrchestratorSection: (
        Rule("train.sampling.max_completion_tokens seq_len",
             lambda s: (s.train.sampling.max_completion_tokens or 0) > s.seq_len,
             "{0} is more than {1}; lower it or raise seq_len"),
        Rule("weight_broadcast.type client.base_url", remote_engine,
             '{0}: shared memory ends at this host and {it} is another; use type = "filesystem"'),
    ),
}
# fmt: on
