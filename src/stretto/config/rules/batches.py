"""Rules of [orchestrator]: environments, sampling, groups, batches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from stretto.config.derived import LOCAL_HOSTS
from stretto.config.root import OrchestratorConfig, RLConfig
from stretto.config.rules.learning import GROUP_BASELINE
from stretto.config.rules.rule import At, Named, Problem, Problems, Rules, idle, is_address
from stretto.config.sections.curriculum import DifficultySampler, RangeGate
from stretto.config.sections.distill import WITHOUT_BEHAVIOR, WITHOUT_REWARD, ScoredAlgo
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

# -- environments and engines --


def env_names(s: Any, at: At) -> Problems:
    """Names are keys of metrics: unique, and not the name of an aggregate."""
    names = [env.name or env.id for env in s.env]
    for index, (env, name) in enumerate(zip(s.env, names, strict=True)):
        key = at(f"env.{index}.{'name' if env.name else 'id'}")
        if env.name and not ENV_NAME.fullmatch(env.name):
            yield Problem(key, f"{key}: letters, digits and . _ : @ + - only, for it names metrics")
        elif name in RESERVED_ENV_NAMES:
            yield Problem(key, f"{key} is the name of an aggregate in metrics; choose another")
    for name, count in Counter(names).items():
        if count > 1:
            same = tuple(at(f"env.{index}") for index, other in enumerate(names) if other == name)
            what = f'{count} environments are called "{name}"; give each its own `name`'
            yield Problem(same, f"{at('env').path}: {what}")


def urls(client: ClientSection) -> list[str]:
    """Every address of the client."""
    return [client.base_url] if isinstance(client.base_url, str) else client.base_url


def engine_addresses(s: ClientSection, at: At) -> Problems:
    """There is an engine, and its address is one."""
    key = at("base_url")
    if not urls(s):
        yield Problem(key, f"{key.path} is empty; give the address of an engine, such as http://127.0.0.1:8000/v1")
    for url in [url for url in urls(s) if not is_address(url)][:1]:
        yield Problem(key, f'{key.path} = "{url}" is not an address; write it like http://127.0.0.1:8000/v1')


def shared_memory(s: OrchestratorSection, at: At) -> Problems:
    """Shared memory does not reach an engine on another host."""
    wire, engines = at("weight_broadcast.type"), s.client.admin_base_url
    engines = urls(s.client) if engines is None else engines
    away = [url for url in engines if is_address(url) and urlsplit(url).hostname not in LOCAL_HOSTS]
    if away and s.weight_broadcast.type == "shm":
        rule = f'shared memory ends at this host and {away[0]} is another; use type = "filesystem"'
        yield Problem((wire, at("client.base_url")), f"{wire}: {rule}")


def pools(s: DifficultySampler, at: At) -> Problems:
    """Pools of equal thresholds, of which one is empty; names that metrics cannot have; pools without any weight."""
    key = at("pools")
    named: dict[float, str] = {}
    for name, pool in s.pools.items():
        if name == "unseen" or not re.fullmatch(r"[\w.:@+-]+", name):
            rule = "letters, digits and . _ : @ + - only, and not `unseen`, for it names a metric"
            yield Problem(key, f"{key.path}.{name}: {rule}")
        if (other := named.setdefault(pool.threshold, name)) != name:
            what = f"{other} and {name} have the same threshold, {pool.threshold:g}; change one"
            yield Problem(key, f"{key.path}: {what}")
    if s.pools and not any(pool.weight for pool in s.pools.values()):
        what = "no pool has a weight above 0, so no task would be drawn twice; raise one"
        yield Problem(key, f"{key.path}: {what}")


def thresholds(s: DifficultySampler, at: At) -> Problems:
    """Hard tasks are below easy ones."""
    hard, easy = at("hard_threshold"), at("easy_threshold")
    if s.hard_threshold > s.easy_threshold:
        yield Problem((hard, easy), f"{hard} is above {easy}; no task would be normal: swap them")
    if s.pools:
        keys = ("hard_threshold", "easy_threshold", "hard_weight", "normal_weight", "easy_weight")
        yield from idle(at, keys, "pools", "leave pools out", why="pools have their own")


def gate(s: RangeGate, at: At) -> Problems:
    """A range has its bounds in order."""
    low, high = at("reject_min"), at("reject_max")
    if s.reject_min > s.reject_max:
        yield Problem((low, high), f"{low} is above {high}; it would reject nothing: swap them")


# -- sampling --


def replies(s: SamplingOverrides, at: At) -> Problems:
    """Replies that cannot exist."""
    least, most, stop, banned = map(at, ("min_tokens", "max_completion_tokens", "stop", "bad_words"))
    if s.max_completion_tokens is not None and (s.min_tokens or 0) > s.max_completion_tokens:
        yield _no_reply(least, most)
    if "" in ([s.stop] if isinstance(s.stop, str) else s.stop or ()):
        what = "has an empty text, which would end every reply at its first token; leave it out"
        yield Problem(stop, f"{stop.path} {what}")
    if not all(word.strip() for word in s.bad_words or ()):
        yield Problem(banned, f"{banned.path} has an empty text, which would ban every reply; leave it out")


def sampled_as_trained(s: OrchestratorKeys, at: At) -> Problems:
    """Groups of one or of equal rollouts, and sampling from a distribution that is not trained."""
    found: dict[str, Problem] = {}  # the first problem of each place
    replay = s.train.replay

    def add(path: str, sentence: str) -> None:
        found.setdefault(path, Problem(at(path), sentence))

    for index, env in enumerate(s.env or [None]):
        algo = (env and env.algo) or s.algo
        own_size, own = (None, None) if env is None else (env.group_size, env.sampling)
        sampling = s.train.sampling if own is None else own.over(s.train.sampling)
        is_learned_as_given = algo.type in WITHOUT_BEHAVIOR
        given = {} if own is None else own.model_dump(exclude_none=True)
        tables = {True: f"env.{index}.sampling", False: "train.sampling"}
        places = {key: f"{tables[key in given]}.{key}" for key in SamplingSection.model_fields}
        hooks = s.hooks
        is_own = (hooks.reward_post_process, hooks.convert_samples_to_train_data) != (None, None)
        if (own_size or s.group_size) == 1 and algo.type in GROUP_BASELINE and not is_own:
            where = "group_size" if own_size is None else f"env.{index}.group_size"
            rule = f"every advantage would be zero, for {algo.type} subtracts the group's mean and one is its own mean"
            add(where, f"{at(where)}: {rule}; use 2 or more (8 is the default)")
        if sampling.temperature == 0:
            where = places["temperature"]
            is_fine = is_learned_as_given and where.startswith("env")
            rule = "the rollouts of a group would be equal and teach nothing"
            if algo.type in WITHOUT_REWARD:
                rule = "its tokens would be no samples of what is trained"
            if algo.type != "zero" and not is_fine:
                add(where, f"{at(where)} is greedy: {rule}; use more, such as 1.0")
            continue
        if sampling.logit_bias and not is_learned_as_given:
            where = places["logit_bias"]
            add(
                where,
                f"{at(where).path}: the engine's log-probabilities would be of changed logits, and the trainer's of "
                "the model's, so that every ratio of the two is wrong; leave it out, or ban words with bad_words; "
                "evals and agents that are not trained may have it",
            )
        has_alternatives = isinstance(algo, ScoredAlgo) and algo.top_k is not None
        for key, value in () if is_learned_as_given else sampling.cuts().items():
            where, most = places[key], at("train.replay.max_tokens")
            if has_alternatives:
                rule = f"{algo.type} with top_k also learns tokens that this leaves out; leave out the one or the other"
                add(where, f"{at(where)}: {rule}")
            elif replay is None:
                way = f"leave it out, or add [{at('train.replay').path}], which trains what was sampled"
                add(where, f"{at(where)}: {WHY_NOT_CUT}; {way}")
            elif key == "top_k" and value > replay.max_tokens:
                add(where, f"{at(where)} is more than {most}; lower it or raise that")
    yield from found.values()


# -- groups --


def batch_sizes(s: OrchestratorKeys, at: At) -> Problems:
    """Whole groups fill a batch, and each rank has a part of it."""
    size, group, tokens = at("batch_size"), at("group_size"), at("token_batch_size")
    if s.batch_size % s.group_size:
        low = s.batch_size // s.group_size * s.group_size
        fitting = " or ".join(str(each) for each in (low, low + s.group_size) if each)
        yield Problem((size, group), f"{size} must be a multiple of {group}; use {fitting}")
    if s.token_batch_size is not None and "batch_size" not in s.model_fields_set:
        rule = f"needs {size.path}, the most rollouts of a batch: give at least as many as have so many tokens"
        yield Problem(tokens, f"{tokens} {rule}")
    limit, ranks = at("max_inflight_rollouts"), at("num_train_workers")
    sizes = {f"env.{index}.group_size": env.group_size or 0 for index, env in enumerate(s.env)}
    sizes["group_size"] = s.group_size
    too_large = [
        key for key, own in sizes.items() if s.max_inflight_rollouts is not None and s.max_inflight_rollouts < own
    ]
    for key in map(at, too_large[-1:]):
        yield Problem((limit, key), f"{limit} cannot hold one group of {key}; raise it")
    groups = s.batch_size // s.group_size
    if s.num_train_workers > s.batch_size:
        what = f"{ranks} ranks cannot share {size} rollouts: some would have none; raise {size.path}"
        yield Problem((ranks, size), what)
    elif s.num_train_workers > (most := groups * s.largest_group):
        own = at(max(sizes, key=lambda key: sizes[key] if key != "group_size" else 0))
        held = f"{most} rollout{'s' * (most != 1)} at most with {own}"
        rule = f"a batch of {size} / {group} groups has {held}, and some would have none"
        yield Problem((ranks, own), f"{ranks}: {rule}; raise {size.path}")


def oversampling(s: OrchestratorKeys, at: At) -> Problems:
    """Groups that start early are allowed to, and are not dropped for their age."""
    ahead, levels, oldest = at("oversampling_factor"), at("max_async_level"), at("max_off_policy_steps")
    early = (s.oversampling_factor or 1) - 1
    if early > 0 and s.max_async_level == 0:
        rule = f"{ahead} starts groups early and {levels} forbids it; raise {levels.path} or leave it out"
        yield Problem((ahead, levels), rule)
    if early > max(s.max_off_policy_steps, s.max_async_level):
        rule = f"{ahead} starts groups {early:g} steps early and {oldest} drops what is so old; raise {oldest.path}"
        yield Problem((ahead, oldest), rule)


def filters(s: OrchestratorKeys, at: At) -> Problems:
    """A filter is given once."""
    kinds = Counter(each.type for each in s.filters)
    for kind in [kind for kind, count in kinds.items() if count > 1][:1]:
        yield Problem(at("filters"), f'{at("filters").path}: "{kind}" is listed twice; give it once')


def asynchrony(s: OrchestratorKeys, at: At) -> Problems:
    """Rollouts that start early are not dropped for their age."""
    levels, oldest = at("max_async_level"), at("max_off_policy_steps")
    if s.max_async_level > s.max_off_policy_steps:
        yield Problem(
            (levels, oldest),
            f"{levels} lets rollouts start that many versions early, and {oldest} drops what is so old, so that most "
            f"would be lost; raise {oldest.path} or lower {levels.path}",
        )


def update_interval(s: OrchestratorSection, at: At) -> Problems:
    """Engines get the versions for which batches and evals wait."""
    interval, (key, level) = s.weight_broadcast.interval, s.least_level
    every, levels = at("weight_broadcast.interval"), at(key)
    if interval > level + 1:
        yield Problem(
            (every, levels),
            f"{every} leaves a batch waiting for weights that no engine gets: it may be {levels.path} + 1 = {level + 1}"
            f" at most; lower it{'' if s.colocate else f', or set {levels.path} = {interval - 1}'}",
        )
    if s.eval is None:
        return
    own = {f"eval.env.{index}.interval": env.interval for index, env in enumerate(s.eval.env)}
    for path, steps in ({"eval.interval": s.eval.interval} | own).items():
        if steps is not None and steps % interval:
            rule = f"{at(path)} is the eval of a version that no engine gets, with {every}"
            yield Problem((at(path), every), f"{rule}; use {_near(steps, interval)}, or another multiple")


def _near(steps: int, interval: int) -> str:
    """The multiples of an interval below and above."""
    low = steps // interval * interval
    return " or ".join(str(each) for each in (low, low + interval) if each)


def environments(s: OrchestratorKeys, at: At) -> Problems:
    """There is something to train on."""
    envs = at("env")
    if not s.env:
        what = f'no environment to train on; add one, such as [[{envs.path}]] id = "sort-letters"'
        yield Problem(envs, f"{envs.path}: {what}")
    yield from env_names(s, at)


def tokens_to_train(s: OrchestratorKeys, at: At) -> Problems:
    """Rollouts consist of tokens, and masks are of rollouts that are continued."""
    if not s.partial_rollout:
        key = "mask_offpolicy_in_partial_rollout"
        yield from idle(at, key, "partial_rollout", why="no rollout is continued")
    api = at("client.api")
    if s.client.api == "chat":
        yield Problem(api, f'{api} gives no tokens to train on; use "tokens" with the `inference` verb or vLLM')


def reply_length(s: OrchestratorSection, at: At) -> Problems:
    """A reply fits into a sample, and an environment's least length does not exceed its greatest."""
    length, run = at("seq_len"), "train.sampling"
    tables = {run: s.train.sampling} | {f"env.{index}.sampling": env.sampling for index, env in enumerate(s.env)}
    for path, own in tables.items():
        reply = at(f"{path}.max_completion_tokens")
        if (own.max_completion_tokens or 0) > s.seq_len:
            yield Problem((reply, length), f"{reply} is more than {length}; lower it or raise seq_len")
    for index in range(len(s.env)):
        yield from _lengths(at, (f"env.{index}.sampling", run))


def eval_reply_length(s: EvalSection, at: At) -> Problems:
    """An evaluated environment's least length does not exceed its greatest."""
    for index in range(len(s.env)):
        yield from _lengths(at, (f"env.{index}.sampling", "sampling"))


def trained_eval_reply_length(s: OrchestratorKeys, at: At) -> Problems:
    """The same where evals have the greatest length of training."""
    if s.eval is None or s.eval.sampling.max_completion_tokens is not None:
        return
    run = ("eval.sampling", "train.sampling")
    if not s.eval.env:
        for path in [f"env.{index}.sampling" for index in range(len(s.env))] or [run[0]]:
            yield from _lengths(at, run[:1], (path, run[1]))
    for index, env in enumerate(s.eval.env):
        if env.sampling.max_completion_tokens is None:
            yield from _lengths(at, (f"eval.env.{index}.sampling", run[0]), run[1:])


def _lengths(at: At, least: Sequence[str], most: Sequence[str] = ()) -> Problems:
    """A reply's bounds, each of the first table that has it; most: tables of the greatest, if others than least."""
    low = _first_given(at, least, "min_tokens")
    high = _first_given(at, most or least, "max_completion_tokens")
    # Where one table has both, `replies` compares them.
    is_one = low.path.rpartition(".")[0] == high.path.rpartition(".")[0]
    if not is_one and high.held is not None and (low.held or 0) > high.held:
        yield _no_reply(low, high)


def _first_given(at: At, tables: Sequence[str], key: str) -> Named:
    found = [at(f"{table}.{key}") for table in tables]
    return next((each for each in found if each.held is not None), found[-1])


def _no_reply(least: Named, most: Named) -> Problem:
    what = f"{least} is more than {most}: no reply could be so long; lower it or raise that"
    return Problem((least, most), what)


# -- doubts --


def late_rollouts(s: OrchestratorKeys, at: At) -> Problems:
    """Batches of whoever is done have no time for those who are not."""
    order, oldest, levels = at("batch_order"), at("max_off_policy_steps"), at("max_async_level")
    if s.batch_order == "finished" and s.max_off_policy_steps <= s.max_async_level:
        yield Problem(
            (order, oldest, levels),
            f"{order} with {oldest}, which is below {levels.path} + 1 = {s.max_async_level + 1}: each batch waits for "
            f'all that was drawn before it, as with "dispatch"; raise {oldest.path}, to four times as much or more '
            "if some rollouts take much longer than most",
        )


def limit_never_reached(s: OrchestratorKeys, at: At) -> Problems:
    """Fewer rollouts run at once than are allowed."""
    limit, ahead, levels = s.max_inflight_rollouts, at("oversampling_factor"), at("max_async_level")
    batches = max(s.max_async_level + 1, s.oversampling_factor or 0)
    held = int(batches * s.batch_size) // s.group_size * s.largest_group
    if limit is None or limit <= held or s.max_async_level == 0:
        return
    factor = min(limit * s.group_size / s.largest_group / s.batch_size, s.max_off_policy_steps + 1)
    most = at("max_inflight_rollouts")
    yield Problem(
        (most, ahead, levels),
        f"{most} is never reached: {held} rollouts are in flight at most; for more give oversampling_factor = "
        f"{factor:g}, which trains older ones",
    )


# -- the clock --


def clock(c: RLConfig | OrchestratorConfig, at: At) -> Problems:
    """A deterministic run leaves nothing to the order in which rollouts end."""
    s, path = (c.orchestrator, "orchestrator.") if isinstance(c, RLConfig) else (c, "")
    switch = at("deterministic")
    if not c.deterministic:
        yield from idle(at, f"{path}sync_interval", "deterministic", "set that")
        return
    timed = {
        "batch_order": s.batch_order == "finished",
        "token_batch_size": s.token_batch_size is not None,
        "oversampling_factor": (s.oversampling_factor or 1) > 1,
    }
    for name in (name for name, is_timed in timed.items() if is_timed):
        key = at(f"{path}{name}")
        rule = (
            f"{key} makes batches of whatever is done first, and {switch} allows no such thing; leave one of them out"
        )
        yield Problem((key, switch), rule)
    saved, every = at("ckpt.interval" if isinstance(c, RLConfig) else "sync_interval"), at("weight_broadcast.interval")
    if saved.held is not None and saved.held % every.held:
        rule = f"{saved}: with {switch} the next batch waits for its weights, and with {every} no engine gets them"
        yield Problem((saved, every), f"{rule}; use {_near(saved.held, every.held)}, or another multiple")
    service = at("service")
    if c.service is not None:
        rule = f"{service.path}: on a service the requests of others decide about its batches, against {switch}"
        yield Problem((service, switch), f"{rule}; leave one of them out")


RULES: Rules = {
    RLConfig: (clock,),
    OrchestratorConfig: (clock,),
    ClientSection: (engine_addresses,),
    EvalSection: (env_names, eval_reply_length),
    SamplingOverrides: (replies,),
    RangeGate: (gate,),
    DifficultySampler: (thresholds, pools),
    OrchestratorKeys: (
        batch_sizes,
        oversampling,
        filters,
        sampled_as_trained,
        asynchrony,
        environments,
        tokens_to_train,
        trained_eval_reply_length,
    ),
    OrchestratorSection: (reply_length, shared_memory, update_interval),
}
