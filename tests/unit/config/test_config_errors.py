"""Every mistake of a user is one message with its place, the rule, and the way out; all of them at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.config import ENV, complaints
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.config.describe import ROOTS
from stretto.config.load import load
from stretto.config.root import RLConfig

WRONG_RL: dict[str, tuple[str, list[str]] | tuple[str, list[str], str]] = {
    "a list where a table belongs, above a key that follows from others": (
        'orchestrator = []\nmax_steps = 4\n[inference]\nengine = "vllm"\n'
        "[deployment]\nnum_infer_gpus = 1\nnum_train_gpus = 1\n", ["c.toml:1: orchestrator = []: a table is needed"]),
    "a loss where credit belongs": ('[orchestrator.algo]\ntype = "gspo"\n' + ENV,
        ["c.toml:2: orchestrator.algo.type", '"gspo" belongs to trainer.loss.type']),
    "a vision tower that an adapter would leave as it is": (
        "[model.lora]\n[model.vlm]\nfreeze_vision_encoder = false\n" + ENV,
        ["c.toml:3, c.toml:1: model.vlm.freeze_vision_encoder = false with model.lora", "leave one of them out"]),
    "an adapter that the embedded engine would merge": (
        '[model.lora]\n[inference]\nengine = "embedded"\n[inference.lora]\ncompute_policy = false\n' + ENV,
        ["inference.lora.compute_policy = false does nothing with inference.engine", "always computes it"]),
    "an adapter that nobody trains": ("[inference.lora]\ncompute_policy = true\n" + ENV,
        ["inference.lora.compute_policy = true does nothing with model.lora", "add [model.lora]"]),
    "a vision tower at another place": ('[model.vlm]\nvision_encoder_attr = "visual"\n' + ENV,
        ['c.toml:2: model.vlm.vision_encoder_attr = "visual"', '"model.visual"']),
    "images for a model of transformers": ('[model]\nimpl = "hf"\n[model.vlm]\n' + ENV,
        ["model.vlm", 'model.impl = "hf"']),
    "a group of one in one environment": (ENV + "group_size = 1\n",
        ["c.toml:3: orchestrator.env.0.group_size = 1", "every advantage"]),
    "one environment played greedily": (ENV + "sampling = { temperature = 0 }\n",
        ["c.toml:3: orchestrator.env.0.sampling.temperature = 0 is greedy"]),
    "a nucleus that the trainer knows nothing of": ("[orchestrator.train.sampling]\ntop_p = 0.9\n" + ENV,
        ["c.toml:2: orchestrator.train.sampling.top_p = 0.9: ", "ratio", "add [orchestrator.train.replay]"]),
    "one environment of few tokens": (ENV + "sampling = { top_k = 20 }\n",
        ["c.toml:3: orchestrator.env.0.sampling.top_k = 20: ", "add [orchestrator.train.replay]"]),
    "a distilled environment of likely tokens": (ENV + 'algo = { type = "opsd" }\nsampling = { min_p = 0.1 }\n',
        ["c.toml:4: orchestrator.env.0.sampling.min_p = 0.1: "]),
    "a distilled environment played greedily": (ENV + 'algo = { type = "opsd" }\nsampling = { temperature = 0 }\n',
        ["c.toml:4: orchestrator.env.0.sampling.temperature = 0", "is greedy"]),
    "more tokens than are replayed": (
        "[orchestrator.train.replay]\nmax_tokens = 16\n" + ENV + "sampling = { top_k = 20 }\n",
        ["c.toml:5: orchestrator.env.0.sampling.top_k = 20", "more than", "orchestrator.train.replay.max_tokens = 16"]),
    "an engine that does not say what it drew from": (
        "[orchestrator.train.replay]\n[inference]\nenable_return_sampling_mask = false\n" + ENV,
        ["inference.enable_return_sampling_mask = false", "nothing to replay"]),
    "a gate of advantages that are not known yet": (
        '[orchestrator.algo]\ntype = "rae"\n' + ENV + 'curriculum = { gates = { g = { type = "advantage_range" } } }\n',
        ['orchestrator.env.0.curriculum.gates.g.type = "advantage_range" sees rewards', "baseline", '"reward_range"']),
    "a critic where everything is distilled": (
        '[orchestrator.algo]\ntype = "opsd"\n[trainer.advantages]\ntype = "gae"\n[trainer.critic]\nlr = 1e-5\n' + ENV,
        ["trainer.advantages", "would do nothing", "trainer.critic", "leave them out"]),
    "a bound on a ratio that is 1": (
        '[trainer.loss]\ntype = "ppo"\nuse_rollout_logprobs = false\nclip_high = 0.28\n' + ENV,
        ["c.toml:4, c.toml:3: trainer.loss.clip_high = 0.28", "does nothing", "trainer.loss.use_rollout_logprobs",
        "or raise updates_per_step"]),
    "a rejection of what agrees": ("[trainer.loss.correction.reject]\nlow = 1.1\n" + ENV,
        ["c.toml:2: trainer.loss.correction.reject.low = 1.1", "leaves out the ratio 1", "give 1 or less"]),
    "a mask on what agrees": (
        '[trainer.loss]\ntype = "reinforce"\n[trainer.loss.correction.weights]\nmode = "mask"\nhigh = 0.9\n' + ENV,
        ["c.toml:5: trainer.loss.correction.weights.high = 0.9", "leaves out the ratio 1", "give 1 or more"]),
    "credit of turns that the trainer would replace": (
        '[orchestrator.algo]\ntype = "ppo"\nturns = { type = "states" }\n[trainer.advantages]\ntype = "gae"\n'
        "[trainer.critic]\n" + ENV,
        ["c.toml:3, c.toml:4: orchestrator.algo.turns does nothing with [trainer.advantages]", "drop it"]),
    "credit without any advantage": (
        '[orchestrator.algo]\nturns = { type = "returns", weight = 0, rollout_weight = 0 }\n' + ENV,
        ["orchestrator.algo.turns.weight = 0", "orchestrator.algo.turns.rollout_weight = 0", "no advantage is left"]),
    "credit of turns by a misspelt kind": ('[orchestrator.algo]\nturns = { type = "state" }\n' + ENV,
        ['orchestrator.algo.turns.type = "state"', "states"]),
    "returns that are the score": (
        '[orchestrator.algo]\ntype = "reinforce_plus_plus"\n[trainer.advantages]\ntype = "returns"\nwhiten = false\n'
        + ENV, ['trainer.advantages.type = "returns"', "does nothing", "kl_coef = 0"]),
    "a control beside others": (ENV + '[[orchestrator.env]]\nid = "reverse-text"\nalgo = { type = "zero" }\n',
        ['orchestrator.env.1.algo.type = "zero" with trainer.loss.kl_tau = 0.001', "kl_tau = 0"]),
    "a role with the number of a player": (
        '[orchestrator.algo]\ntype = "hierarchical_grpo"\nepisode_agents = ["solver/0"]\n' + ENV,
        ["orchestrator.algo.episode_agents", "one player", '"solver/0"', '"solver"']),
    "a dual clip that would bound every token": ('[trainer.loss]\ntype = "ppo"\nclip_dual = 0.5\n' + ENV,
        ["c.toml:3: trainer.loss.clip_dual = 0.5", "1"]),
    "a constant reduction without its constant": ('[trainer.loss]\nreduction = "constant"\n' + ENV,
        ['c.toml:2: trainer.loss.reduction = "constant" needs trainer.loss.reduction_tokens']),
    "a constant without its reduction": ("[trainer.loss]\nreduction_tokens = 8\n" + ENV,
        ["trainer.loss.reduction_tokens = 8", "does nothing", 'trainer.loss.reduction = "token"']),
    "a group of one where one environment compares": (
        '[orchestrator]\ngroup_size = 1\nbatch_size = 4\n[orchestrator.algo]\ntype = "reinforce_plus_plus"\n' + ENV
        + '[[orchestrator.env]]\nid = "reverse-text"\nalgo = { type = "rloo" }\n',
        ["c.toml:2: orchestrator.group_size = 1", "every advantage", "rloo"]),
    "a filter of advantages that rae does not know yet": (
        '[orchestrator]\nfilters = [{ type = "zero_advantage" }]\n[orchestrator.algo]\ntype = "rae"\n' + ENV,
        ['orchestrator.filters.0.type = "zero_advantage"', "rewards of 0", 'orchestrator.algo.type = "rae"',
        "drop the filter"]),
    "credit that no environment uses": ('[orchestrator.algo]\ntype = "rloo"\n' + ENV + 'algo = { type = "max_rl" }\n',
        ["c.toml:1: orchestrator.algo", "does nothing", "`algo`"]),
    "a length penalty of nothing": (
        "[orchestrator.algo.length_penalty]\noutput_weight = 0\ninput_weight = 0\nturns_weight = 0\n" + ENV,
        ["c.toml:1: orchestrator.algo.length_penalty", "does nothing"]),
    "an overlong penalty that nobody pays": (
        "seq_len = 64\n[orchestrator.algo.overlong]\nmax_tokens = 200\nbuffer_tokens = 10\n" + ENV,
        ["orchestrator.algo.overlong.max_tokens = 200", "begin at 190", "seq_len = 64"]),
    "an overlong penalty that everybody pays": (
        ENV + 'algo = { type = "grpo", overlong = { max_tokens = 8, buffer_tokens = 10 } }\n',
        ["orchestrator.env.0.algo.overlong.buffer_tokens = 10 is longer than", "max_tokens = 8"]),
    "a correction of nothing": ("[trainer.loss.correction]\n" + ENV,
        ["c.toml:1: trainer.loss.correction", "does nothing"]),
    "a ratio that would act twice": (
        '[trainer.loss]\ntype = "ppo"\n[trainer.loss.correction.weights]\nhigh = 3\n' + ENV,
        ["trainer.loss.correction.weights", "already contains", '"ppo"', '"reinforce"']),
    "bounds the wrong way round": ("[trainer.loss.correction.reject]\nlow = 2.0\n" + ENV,
        ["c.toml:2: trainer.loss.correction.reject.low = 2 must be below", "high = 1.25"]),
    "a loss of one's own without its place": ('[trainer.loss]\ntype = "custom"\n' + ENV,
        ["trainer.loss.import_path: required and missing"]),
    "a control with an entropy bonus": (
        '[trainer.loss]\nentropy_coef = 0.1\nkl_tau = 0\n[orchestrator.algo]\ntype = "zero"\n' + ENV,
        ['orchestrator.algo.type = "zero"', "gradient", "trainer.loss.entropy_coef"]),
    "a loss of nothing": ("[trainer.loss]\nadv_tau = 0.0\nkl_tau = 0.0\n" + ENV,
        ["trainer.loss.adv_tau", "leave no loss", "trainer.loss.kl_tau = 0"]),
    "unknown key in a list of tables": (ENV + 'nam = "a"\n',
        ["c.toml:3: orchestrator.env.0.nam", "unknown key", "`name`"]),
    "unknown key in an inline table": ('[orchestrator]\nenv = [\n  { id = "a" },\n  { id = "b", arg = {} },\n]\n',
        ["c.toml:4: orchestrator.env.1.arg", "unknown key", "`args`"]),
    "an argument of an environment beside its args": (ENV + 'path = "a.jsonl"\n',
        ["c.toml:3: orchestrator.env.0.path", "an argument of the environment is `args.path`; here are id, name"]),
    "the weight of an environment": (ENV + ENV + "weight = 2.0\n",
        ["c.toml:5: orchestrator.env.1.weight", "unknown key; did you mean `ratio`?"]),
    "unknown key in a union's variant": ('[trainer.optim]\ntype = "sgd"\nmomentun = 0.5\n' + ENV,
        ["c.toml:3: trainer.optim.momentun", "unknown key", "`momentum`"]),
    "key of another variant": ("[trainer.optim]\nmomentum = 0.5\n" + ENV,
        ["c.toml:2: trainer.optim.momentum: unknown key", '"adamw"', 'it belongs to type = "sgd"']),
    "key of another section": ("[trainer]\nlr = 0.5\n" + ENV,
        ["c.toml:2: trainer.lr", "unknown key", "`trainer.optim.lr`", "`trainer.critic.lr`"]),
    "unknown key in a list of variants": ('[orchestrator]\nfilters = [{ type = "repetition", windw = 2 }]\n' + ENV,
        ["c.toml:2: orchestrator.filters.0.windw", "unknown key", "`window`"]),
    "wrong value in a list of variants": ('[orchestrator]\nfilters = [{ type = "repetition", window = 0 }]\n' + ENV,
        ["c.toml:2: orchestrator.filters.0.window = 0", "must be greater than or equal to 1"]),
    "unknown variant in a list": ('[orchestrator]\nfilters = [{ type = "repetitoin" }]\n' + ENV,
        ["c.toml:2: orchestrator.filters.0.type", 'did you mean "repetition"?']),
    "unknown union tag": (ENV + '[trainer.optim]\ntype = "adamv"\nlr = 1\n',
        ["c.toml:4: trainer.optim.type", '"adamv"', '"adamw" or "sgd"', 'did you mean "adamw"?']),
    "union tag of a wrong type": (ENV + "[trainer.scheduler]\ntype = 3\n",
        ["c.toml:4: trainer.scheduler.type = 3", '"constant" or "linear" or "cosine"']),
    "wrong choice": (ENV + '[trainer.model]\nimpl = "costum"\n',
        ["c.toml:4: model.impl", '"costum"', 'did you mean "custom"?']),
    "fraction for a whole number": ("seq_len = 12.5\n" + ENV, ["c.toml:1: seq_len = 12.5", "valid integer"]),
    "true for a number": ("max_steps = true\n" + ENV, ["c.toml:1: max_steps = true", "integer > 0 or None is needed"]),
    "number for true": (ENV + "[orchestrator]\nfilter_zero_advantages = 7\n",
        ["c.toml:4: orchestrator.filter_zero_advantages = 7", "must be true or false"]),
    "number out of range": (ENV + "[orchestrator.train.sampling]\ntemperature = 3.5\n",
        ["c.toml:4: orchestrator.train.sampling.temperature = 3.5", "less than or equal to 2"]),
    "not a number": (ENV + "[trainer.optim]\nlr = inf\n", ["c.toml:4: trainer.optim.lr = inf", "finite number"]),
    "value for a section that extends another": ("[orchestrator]\nclient = true\n" + ENV,
        ["c.toml:2: orchestrator.client", "table is needed", "[orchestrator.client]", "base_url"]),
    "single table for a list": ('[orchestrator.env]\nid = "a"\n',
        ["c.toml:1: orchestrator.env", "list of tables", "[[orchestrator.env]]"]),
    "required key missing": ("[[orchestrator.env]]\nratio = 2.0\n",
        ["c.toml:1: orchestrator.env.0.id", "required and missing", "`id`"]),
    "broken TOML": ("max_steps = 3\nseq_len = = 4\n", ["c.toml:2: not valid TOML: Invalid value"]),
    "unknown flag": (ENV,
        ["--orchestrator.group-sizes 4", "unknown flag", "--orchestrator.group-size?"], "--orchestrator.group-sizes 4"),
    "flag without its section": (ENV, ["--gpu-memory-utilization 0.5", "unknown flag",
        "--inference.gpu-memory-utilization"], "--gpu-memory-utilization 0.5"),
    "flag of a section that stands elsewhere": (ENV,
        ["--scheduler.type linear", "unknown flag", "--trainer.scheduler.type"], "--scheduler.type linear"),
    "flag without a value": (ENV, ["--max-steps: a value must follow"], "--max-steps"),
    "bad value of a flag": (ENV, ["--orchestrator.batch-size=many: orchestrator.batch_size", '"many"', "valid integer"],
        "--orchestrator.batch-size=many"),
    "something that cannot be off": (ENV, ["--no-seq-len: `seq_len`", "turned off"], "--no-seq-len"),
    "index beyond a list": (ENV,
        ["--orchestrator.env.3.id x: orchestrator.env", "next index"], "--orchestrator.env.3.id x"),
    "word without a flag": (ENV, ["more.toml", "unexpected word", "`@ more.toml`"], "more.toml"),
    "nothing after @": (ENV, ["@: a file name must follow"], "@"),
    "two places disagree": ("max_steps = 3\n[trainer]\nmax_steps = 4\n" + ENV,
        ["c.toml:1, c.toml:3: max_steps = 3", "trainer.max_steps = 4", "give it once, as max_steps"]),
    "two flags disagree": (ENV, ['--model.name a, --trainer.model.name b: --model.name = "a"',
        '--trainer.model.name = "b"', "as model.name"], "--model.name a --trainer.model.name b"),
    "two sections disagree": (
        '[orchestrator.weight_broadcast]\ntype = "filesystem"\n[trainer.weight_broadcast]\ntype = "shm"\n' + ENV,
        ['c.toml:2, c.toml:4: orchestrator.weight_broadcast.type = "filesystem" but ',
        'trainer.weight_broadcast.type = "shm"']),
    "an alias and its key disagree": ("[orchestrator]\ngroup_size = 4\nrollouts_per_example = 8\n" + ENV,
        ["c.toml:2, c.toml:3: orchestrator.group_size = 4", "orchestrator.rollouts_per_example = 8", "once",
        "orchestrator.group_size"]),
    "a group of one": ("[orchestrator]\ngroup_size = 1\n" + ENV,
        ["c.toml:2: orchestrator.group_size = 1", "every advantage", "use 2 or more"]),
    "DeepEP in float32": ('[trainer.model]\nep_comm_backend = "deepep"\ndtype = "float32"\n' + ENV,
        ['c.toml:2, c.toml:3: model.ep_comm_backend = "deepep" carries bfloat16',
        'use dtype = "bfloat16", or "torch"']),
    "setting of a backend that is not used": ("[trainer.model]\ndeepep_token_chunk_size = 512\n" + ENV,
        ["c.toml:2: model.deepep_token_chunk_size = 512", "does nothing", 'model.ep_comm_backend = "torch"']),
    "advantages without a critic": ('[orchestrator.algo]\ntype = "ppo"\n[trainer.advantages]\ntype = "gae"\n' + ENV,
        ['c.toml:4: trainer.advantages.type = "gae"', "needs values", "[trainer.critic]"]),
    "scores that nobody makes advantages of": ('[orchestrator.algo]\ntype = "ppo"\n' + ENV,
        ['c.toml:2: orchestrator.algo.type = "ppo"', "as they are", "[trainer.critic]"]),
    "a price that the algorithm ignores": (
        '[orchestrator.algo]\ntype = "grpo"\n[trainer.advantages]\ntype = "returns"\nkl_coef = 0.1\n' + ENV,
        ['orchestrator.algo.type = "grpo"', "ignores", "[trainer.advantages]", '"returns"',
        'use algo type "reinforce_plus_plus"']),
    "whitened twice": (
        '[orchestrator.algo]\ntype = "reinforce_plus_plus"\nwhiten = true\n[trainer.advantages]\ntype = "returns"\n'
        + ENV, ["orchestrator.algo.whiten = true", "whitens", "[trainer.advantages]", "set whiten = false"]),
    "price twice": (
        '[orchestrator.algo]\ntype = "reinforce_plus_plus"\n[trainer.advantages]\ntype = "returns"\nkl_coef = 0.1\n'
        "[trainer.loss.reference_kl]\n" + ENV, ["trainer.advantages.kl_coef", "trainer.loss.reference_kl"]),
    "estimator without a price": (
        '[orchestrator.algo]\ntype = "reinforce_plus_plus"\n[trainer.advantages]\ntype = "returns"\n'
        'kl_estimator = "k3"\n' + ENV,
        ['c.toml:5: trainer.advantages.kl_estimator = "k3"', "does nothing", "trainer.advantages.kl_coef = 0"]),
    "shaped without a price": (
        '[orchestrator.algo]\ntype = "reinforce_plus_plus_baseline"\n[trainer.advantages]\ntype = "shaped"\n' + ENV,
        ['c.toml:4: trainer.advantages.type = "shaped"', "does nothing", "trainer.advantages.kl_coef = 0"]),
    "ratio that reinforce does not have": ('[trainer.loss]\ntype = "reinforce"\nuse_rollout_logprobs = false\n' + ENV,
        ["trainer.loss.use_rollout_logprobs = false", "does nothing", '"reinforce"']),
    "zero advantages before there are baselines": (
        '[orchestrator]\nfilters = [{ type = "zero_advantage" }]\nalgo = { type = "reinforce_plus_plus" }\n' + ENV,
        ["rewards of 0", '"zero_advantage"', 'orchestrator.algo.type = "reinforce_plus_plus"']),
    "inflight below a group": ("[orchestrator]\nmax_inflight_rollouts = 4\n" + ENV,
        ["c.toml:2: orchestrator.max_inflight_rollouts = 4", "cannot hold one group"]),
    "inflight below a group of one environment": (
        "[orchestrator]\nmax_inflight_rollouts = 8\n" + ENV + "group_size = 16\n",
        ["orchestrator.max_inflight_rollouts = 8 cannot hold one group of orchestrator.env.0.group_size = 16"]),
    "lead beyond the bound on staleness": ("[orchestrator]\nmax_async_level = 3\nmax_off_policy_steps = 2\n" + ENV,
        ["c.toml:2, c.toml:3: orchestrator.max_async_level = 3", "raise orchestrator.max_off_policy_steps"]),
    "no environment": ("max_steps = 3\n",
        ["orchestrator.env", "no environment", "[[orchestrator.env]]", 'id = "sort-letters"']),
    "advantages and no environment": (
        '[orchestrator.algo]\ntype = "reinforce_plus_plus"\n[trainer.advantages]\ntype = "returns"\n',
        ["orchestrator.env", "no environment"]),
    "environments of one name": (ENV + ENV,
        ["c.toml:1, c.toml:3: orchestrator.env: 2 environments", '"sort-letters"', "its own `name`"]),
    "reserved environment name": (ENV + 'name = "all"\n',
        ["c.toml:3: orchestrator.env.0.name", '"all"', "choose another"]),
    "no room for a prompt": ("seq_len = 64\n[orchestrator.train.sampling]\nmax_completion_tokens = 65\n" + ENV,
        ["c.toml:3, c.toml:1: orchestrator.train.sampling.max_completion_tokens = 65", "more than", "seq_len = 64"]),
    "reply of one environment longer than a sequence": (
        "seq_len = 64\n" + ENV + "sampling = { max_completion_tokens = 65 }\n",
        ["orchestrator.env.0.sampling.max_completion_tokens = 65 is more than seq_len = 64"]),
    "reply of one environment of an eval longer than a sequence": (
        "seq_len = 64\n" + ENV + '[[orchestrator.eval.env]]\nid = "x"\nsampling = { max_completion_tokens = 65 }\n',
        ["orchestrator.eval.env.0.sampling.max_completion_tokens = 65 is more than seq_len = 64"]),
    "least length of the run above the greatest of an environment": (
        "[orchestrator.train]\nreplay = {}\nsampling = { min_tokens = 10 }\n" + ENV
        + "sampling = { max_completion_tokens = 4 }\n",
        ["orchestrator.train.sampling.min_tokens = 10 is more than "
         "orchestrator.env.0.sampling.max_completion_tokens = 4: no reply could be so long"]),
    "least length of an eval above the greatest of training": (
        "[orchestrator.train.sampling]\nmax_completion_tokens = 4\n[orchestrator.eval.sampling]\nmin_tokens = 10\n"
        + ENV,
        ["eval.sampling.min_tokens = 10 is more than orchestrator.train.sampling.max_completion_tokens = 4"]),
    "least length of an eval above the greatest of an environment in training": (
        "[orchestrator.eval.sampling]\nmin_tokens = 10\n" + ENV + "sampling = { max_completion_tokens = 4 }\n",
        ["eval.sampling.min_tokens = 10 is more than orchestrator.env.0.sampling.max_completion_tokens = 4"]),
    "least length of an evaluated environment above the greatest of training": (
        "[orchestrator.train.sampling]\nmax_completion_tokens = 4\n" + ENV
        + '[[orchestrator.eval.env]]\nid = "x"\nsampling = { min_tokens = 10 }\n',
        ["eval.env.0.sampling.min_tokens = 10 is more than orchestrator.train.sampling.max_completion_tokens = 4"]),
    "greedy training": (ENV, ["--orchestrator.train.sampling.temperature 0: ", "temperature = 0 is greedy"],
        "--orchestrator.train.sampling.temperature 0"),
    "a key as verl writes it": (ENV,
        ["unexpected word", "--key", "--trainer.optim.lr"], "actor_rollout_ref.actor.optim.learning_rate=1e-6"),
    "a share of no end": ('[trainer.scheduler]\ntype = "constant"\nwarmup_steps = 0.1\n' + ENV,
        ["c.toml:3: trainer.scheduler.warmup_steps = 0.1", "share of", "max_steps"]),
    "a share above one": ('max_steps = 10\n[trainer.scheduler]\ntype = "linear"\ndecay_steps = 1.5\n' + ENV,
        ["c.toml:4: trainer.scheduler.decay_steps = 1.5: "]),
    "a fall without an end": ('[trainer.scheduler]\ntype = "linear"\n' + ENV,
        ["c.toml:1: trainer.scheduler", "linear schedule falls", "max_steps"]),
    "a schedule longer than the run": ('max_steps = 15\n[trainer.scheduler]\ntype = "linear"\n' + ENV,
        ["c.toml:1: trainer.scheduler", "must fit", "warmup_steps", "decay_steps = 10"]),
    "a cosine that is all warm-up": ('max_steps = 5\n[trainer.scheduler]\ntype = "cosine"\nwarmup_steps = 5\n' + ENV,
        ["c.toml:4, c.toml:1: trainer.scheduler.warmup_steps = 5", "must be under", "max_steps = 5"]),
    "a schedule that does nothing": (
        'max_steps = 5\n[trainer.scheduler]\ntype = "linear"\nwarmup_steps = 0\ndecay_steps = 0\n' + ENV,
        ["c.toml:2: trainer.scheduler", "neither rises nor falls"]),
    "an end above the peak": ('max_steps = 50\n[trainer.scheduler]\ntype = "cosine"\nmin_lr = 1e-3\n' + ENV,
        ["c.toml:4: trainer.scheduler.min_lr = 0.001", "above the peak", "trainer.optim.lr = 1e-06"]),
    "an option that vLLM does not have": (f"[inference.vllm_extra]\nmax_modle_len = 2\n{ENV}",
        ["c.toml:2: inference.vllm_extra.max_modle_len: vLLM 0.32.0 has no option --max-modle-len; did you mean"]),
    "a value for a switch of vLLM": (f"[inference.vllm_extra]\nheadless = 3\n{ENV}",
        ["c.toml:2: inference.vllm_extra.headless", "switch", "--headless"]),
    "a choice that vLLM does not have": (f'[inference.vllm_extra]\nall2all_backend = "deepep"\n{ENV}',
        ["--all2all-backend takes one of", "not 'deepep'"]),
    "client and server ports": ('[orchestrator.client]\nbase_url = "http://localhost:8001/v1"\n' + ENV,
        ["c.toml:2, --inference.server.port 8002", "inference.server.port = 8002", "--no-inference"],
        "--inference.server.port 8002"),
    "two listeners on a port": ("[inference.server]\nport = 5556\n" + ENV,
        ["c.toml:2: control.port", "inference.server.port"]),
    "shared memory to another host": (ENV, ["weight_broadcast.type", '"shm"', "http://10.0.0.2:8000/v1 is another",
        '"filesystem"'], "--no-inference --orchestrator.client.base-url http://10.0.0.2:8000/v1"),
    "engine shorter than the run": ("seq_len = 4096\n[inference]\nmax_model_len = 1024\n" + ENV,
        ["c.toml:3, c.toml:1: inference.max_model_len = 1024", "shorter than", "seq_len = 4096"]),
    "a group that the engine does not take": ("[inference]\nmax_num_seqs = 4\n" + ENV, ["orchestrator.group_size = 8",
        "engine samples a group", "takes inference.max_num_seqs = 4; raise that"],
        "--orchestrator.batch-size 64 --orchestrator.group-size 8"),
    "new model shorter than the run": ("[model.scratch]\nmax_position_embeddings = 64\n" + ENV,
        ["--seq-len 128, c.toml:2: seq_len = 128", "longer than", "= 64"], "--seq-len 128"),
    "a control that would learn": ('[orchestrator.algo]\ntype = "zero"\n' + ENV,
        ["c.toml:2: ", 'orchestrator.algo.type = "zero" with trainer.loss.kl_tau = 0.001', "kl_tau = 0"]),
    "a new model that no engine has": ("seq_len = 64\n[model.scratch]\nnum_layers = 1\n" + ENV,
        ["c.toml:2: model.scratch", "no engine", "make one with `sft`"]),
    "heads that do not group": ("seq_len = 64\n[model.scratch]\nnum_heads = 5\n" + ENV,
        ["c.toml:3: model.scratch.num_heads = 5", "multiple of", "num_kv_heads = 2"]),
    "a family with images and no tower": ('seq_len = 64\n[model.scratch]\nfamily = "qwen3_vl"\n[model.vlm]\n' + ENV,
        ["c.toml:3", 'model.scratch.family = "qwen3_vl"', "vision tower", "[model.scratch.vision]"]),
    "a tower of a family of text": ("seq_len = 64\n[model.scratch.vision]\ndepth = 1\n" + ENV,
        ["[model.scratch.vision] is for qwen3_vl, ", 'model.scratch.family = "qwen3"; leave it out']),
    "a tower and nothing on whether to train it": (
        'seq_len = 64\n[model.scratch]\nfamily = "qwen3_vl"\n[model.scratch.vision]\ndepth = 1\n' + ENV,
        ['model.scratch.family = "qwen3_vl"', "vision tower", "[model.vlm]"]),
    "heads of a tower that do not fit": (
        'seq_len = 64\n[model.scratch]\nfamily = "qwen3_vl"\n[model.scratch.vision]\nnum_heads = 5\n[model.vlm]\n'
        + ENV, ["model.scratch.vision.hidden_size = 32", "multiple of", "num_heads = 5"]),
    "experts that are square, which may be stored either way round": (
        'seq_len = 64\n[model.scratch]\nfamily = "qwen3_vl_moe"\nmoe_intermediate_size = 64\n'
        "[model.scratch.vision]\n[model.vlm]\n" + ENV,
        ["model.scratch.moe_intermediate_size = 64", "hidden_size = 64", "a square matrix does not say which"]),
    "heartbeats slower than death": ("[control]\nheartbeat_s = 5.0\ndead_after_s = 8.0\n" + ENV,
        ["c.toml:3, c.toml:2: control.dead_after_s = 8", "at least twice", "heartbeat_s = 5"]),
    "a GPU named twice": (ENV, ["trainer_gpu_ids = [0, 0]", "each GPU once"], "--trainer-gpu-ids 0,0"),
    "GPU ids that are none": (ENV,
        ["--trainer-gpu-ids", "valid integer", 'trainer_gpu_ids.1 = "x"'], "--trainer-gpu-ids 0,x"),
    "GPU ids against counts": ("[deployment]\nnum_train_gpus = 2\n" + ENV,
        ["--trainer-gpu-ids 0, c.toml:2: trainer_gpu_ids = [0]", "are 1 GPUs", "deployment.num_train_gpus = 2"],
        "--trainer-gpu-ids 0"),
    "groups of an environment that are too small for the ranks": (
        "[orchestrator]\nbatch_size = 16\ngroup_size = 16\nnum_train_workers = 4\n[orchestrator.algo]\n"
        'type = "reinforce_plus_plus"\n' + ENV + "group_size = 2\n",
        ["c.toml:4, c.toml:9: orchestrator.num_train_workers = 4: ", "has 2 rollouts at most with orchestrator.env.0.g",
         "some would have none; raise orchestrator.batch_size"]),
    "GPUs of a teacher that nobody starts": (ENV, ["--teacher-gpu-ids 3: teacher_gpu_ids = [3] does nothing",
        "this run starts no teacher"], "--teacher-gpu-ids 3"),
    "a number of GPUs of a teacher that nobody starts": ("[deployment]\nnum_teacher_gpus = 2\n" + ENV,
        ["c.toml:2: deployment.num_teacher_gpus = 2 does nothing", "this run starts no teacher"]),
    "a frozen model that the run does not have": (ENV + 'models = { judge = "other" }\n',
        ['orchestrator.env.0.models.judge = "other": this run has no such model; add a table [models.other]']),
    "a shared GPU filled by the engine": (ENV,
        ["share GPU 0", "inference.gpu_memory_utilization = 0.9"], "--trainer-gpu-ids 0 --inference-gpu-ids 0"),
    "a run name that is a path": ('[run]\nname = "a/b"\n' + ENV, ['c.toml:2: run.name = "a/b": letters, digits']),
    "a batch in tokens of nobody knows how many rollouts": ("[orchestrator]\ntoken_batch_size = 4096\n" + ENV,
        ["c.toml:2: orchestrator.token_batch_size = 4096", "most rollouts", "orchestrator.batch_size"]),
    "resume and clean": (ENV, ["--resume, --clean", "clean deletes"], "--resume --clean"),
    "step 0": (ENV, ["--resume.step 0: resume.step = 0", "greater than"], "--resume.step 0"),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("mistake", WRONG_RL)
@needs("prime")
def test_one_mistake_is_one_message_with_place_rule_and_way_out(mistake: str, tmp_path: Path) -> None:
    toml, parts, *flags = WRONG_RL[mistake]
    (line,) = complaints(tmp_path, toml, " ".join(flags))
    for part in parts:
        assert part in line, line
    assert "validation error" not in line and "pydantic" not in line


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("-1", "must be greater than or equal to 0"),
        ("1.5", "must be a valid integer or less than 1"),
        ("'many'", "integer or number is needed; it counts in steps, or, below 1, as a share of all steps"),
    ],
)
def test_a_key_of_several_types_is_told_by_its_bounds(value: str, rule: str, tmp_path: Path) -> None:
    toml = f"max_steps = 3\n[trainer.scheduler]\nwarmup_steps = {value}\n" + ENV
    (line,) = complaints(tmp_path, toml, "")
    assert line.endswith(rule), line


WRONG_OTHERS = {
    "sft without data": ("sft", "max_steps = 3\n", ["data: required and missing", '[data] type = "file"']),
    "sft without an end": ("sft",
        '[data]\ntype = "file"\nname = "a.jsonl"\n', ["never end", "max_steps", "max_epochs"]),
    "sft that trains no role": ("sft",
        'max_steps = 3\n[data]\ntype = "file"\nname = "a"\n[loss_mask]\nassistant = false\n',
        ["c.toml:5: loss_mask trains no role"]),
    "eval without environments": ("eval", "seed = 1\n", ["eval.env", "no environment"]),
    "eval with a frozen model that it does not have": ("eval",
        '[[eval.env]]\nid = "a"\nmodels = { judge = "other" }\n',
        ['eval.env.0.models.judge = "other": this run has no such model; add a table [models.other]']),
    "eval with a least length above the greatest": ("eval",
        '[eval.sampling]\nmax_completion_tokens = 4\n[[eval.env]]\nid = "a"\nsampling = { min_tokens = 10 }\n',
        ["eval.env.0.sampling.min_tokens = 10 is more than eval.sampling.max_completion_tokens = 4"]),
    "inference without a model": ("inference", 'model = "None"\n', ["c.toml:1: model: no model to serve"]),
    "a file of rl for a verb that is no part of it": ("eval",
        '[orchestrator]\nbatch_size = 8\n[[eval.env]]\nid = "a"\n',
        ["c.toml:1: orchestrator", "unknown key", "[orchestrator]", "`rl`"]),
    "orchestrator with groups of one": ("orchestrator",
        'group_size = 1\n[[env]]\nid = "a"\n', ["c.toml:1: group_size = 1", "every advantage"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG_OTHERS)
def test_other_verbs_name_keys_as_their_own_files_write_them(mistake: str, tmp_path: Path) -> None:
    verb, toml, parts = WRONG_OTHERS[mistake]
    (line,) = complaints(tmp_path, toml, "", verb)
    for part in parts:
        assert part in line, line


def test_all_problems_come_at_once_and_none_twice(tmp_path: Path) -> None:
    toml = (
        "max_steps = 20\n[orchestrator]\nbatchsize = 64\ngroup_size = 'x'\n"
        "[orchestrator.train.sampling]\ntemperature = 3.5\n" + ENV + "nam = 'a'\n"
        "[trainer]\nmax_steps = 30\n[inference]\nengine = 'embedded'\n[inference.parallel]\ntp = 2\n"
    )
    lines = complaints(tmp_path, toml, "--lr 3 --inference.server.port 5555")
    found = ["--lr", "batchsize", "env.0.nam", "trainer.max_steps", "temperature", "group_size", "tp = 2", "5555"]
    assert len(lines) == len(found)
    for part in found:
        assert sum(part in line for line in lines) == 1, (part, lines)


def test_a_problem_that_only_follows_from_another_is_not_reported(tmp_path: Path) -> None:
    linear = '[trainer.scheduler]\ntype = "linear"\n'
    assert len(complaints(tmp_path, "max_step = 50\n" + linear + ENV, "")) == 1
    assert len(complaints(tmp_path, "[[orchestrator.env]]\nname = 'a'\n", "")) == 1
    assert len(complaints(tmp_path, "", f"@ {tmp_path}/envs.toml")) == 1


def test_a_missing_file_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text("")
    (line,) = complaints(tmp_path, ENV, f"--trainer @ {tmp_path}/trian.toml")
    assert line == "trian.toml: no such file; did you mean train.toml?"
    (line,) = complaints(tmp_path, ENV, f"@ {tmp_path}/no/rl.toml")
    assert line == "no/rl.toml: no such file, and no directory no"


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n "seed": 1,\n}')
    (tmp_path / "b.json").write_text("[1]")
    (tmp_path / "c2.toml").write_bytes(b"a = '\xff'")
    (tmp_path / "d.toml").mkdir()
    (tmp_path / "e.yaml").write_text("")
    flags = " ".join(f"@ {tmp_path}/{name}" for name in ("a.json", "b.json", "c2.toml", "d.toml", "e.yaml"))
    lines = complaints(tmp_path, ENV, flags)
    for line, part in zip(
        lines, ["a.json:", "b.json:1", "not UTF-8", "directory", "not a .toml or .json"], strict=True
    ):
        assert part in line


def test_a_json_file_has_lines_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n  "orchestrator": {\n    "env": [\n      {"id": "a", "foo": 1}\n    ]\n  }\n}')
    (line,) = complaints(tmp_path, "", f"@ {tmp_path}/a.json")
    assert line.startswith("a.json:4: orchestrator.env.0.foo: unknown key")


CRITIC = '[orchestrator.algo]\ntype = "ppo"\n[trainer.advantages]\ntype = "gae"\n[trainer.critic]\n'
OLD_POLICY = '[trainer.loss]\ntype = "ppo"\nuse_rollout_logprobs = false\nclip_high = 0.28\n'
RIGHT_RL = {
    "groups of one at the root and of several where they are compared": (
        "[orchestrator]\ngroup_size = 1\n" + ENV + "group_size = 4\n"
    ),
    "a greedy teacher": (
        "[orchestrator]\n"
        + ENV
        + 'algo = { type = "sft", teacher = { base_url = "http://127.0.0.1:9/v1" } }\nsampling = { temperature = 0 }\n'
    ),
    "a teacher of few tokens": (
        "[orchestrator]\n"
        + ENV
        + 'algo = { type = "sft", teacher = { base_url = "http://127.0.0.1:9/v1" } }\nsampling = { top_k = 5 }\n'
    ),
    "evals of a nucleus": ENV + "[orchestrator.eval]\nsampling = { top_p = 0.9 }\n",
    "a nucleus that is replayed": "[orchestrator.train]\nsampling = { top_p = 0.9 }\nreplay = {}\n" + ENV,
    "a bound on the ratio of several updates": "[trainer]\nupdates_per_step = 4\n" + OLD_POLICY + ENV,
    "a bound beside a correction": OLD_POLICY + "[trainer.loss.correction.weights]\nhigh = 2\n" + ENV,
    "a bound on values of several epochs": "[trainer]\nepochs_per_step = 2\n" + CRITIC + "value_clip = 0.4\n" + ENV,
    "no bound on values": CRITIC + 'value_clip = "None"\n' + ENV,
    "a critic that is ready before the end": "max_steps = 10\n" + CRITIC + "num_critic_only_steps = 9\n" + ENV,
    "a critic beside an environment that is distilled": (
        CRITIC + ENV + '[[orchestrator.env]]\nid = "reverse-text"\nalgo = { type = "opsd" }\n'
    ),
    "a truncation at 1": '[trainer.loss]\ntype = "reinforce"\n[trainer.loss.correction.weights]\nhigh = 1\n' + ENV,
    "returns that are whitened in the trainer": (
        '[orchestrator.algo]\ntype = "reinforce_plus_plus"\n[trainer.advantages]\ntype = "returns"\n' + ENV
    ),
    "a filter of another kind than the first": '[orchestrator]\nfilters = [{ type = "repetition", window = 2 }]\n'
    + ENV,
    "a control beside others": (
        "[trainer.loss]\nkl_tau = 0\n" + ENV + '[[orchestrator.env]]\nid = "reverse-text"\nalgo = { type = "zero" }\n'
    ),
    "a gate of rewards with a late baseline": (
        '[orchestrator.algo]\ntype = "rae"\n' + ENV + 'curriculum = { gates = { g = { type = "reward_range" } } }\n'
    ),
}


@pytest.mark.parametrize("case", RIGHT_RL)
def test_neighbours_of_mistakes_load(case: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(RIGHT_RL[case])
    load(ROOTS["rl"], ["@", str(file)], verb="rl")


def test_steps_of_the_critic_alone_leave_a_schedule_less_room(tmp_path: Path) -> None:
    toml = "max_steps = 9\n" + CRITIC + "num_critic_only_steps = 4\n" + ENV
    toml += '[trainer.scheduler]\ntype = "cosine"\nwarmup_steps = 5\n'
    (line,) = complaints(tmp_path, toml, "")
    assert "under max_steps = 9 without the 4 of trainer.critic.num_critic_only_steps" in line
    assert load(RLConfig, ["@", str(tmp_path / "c.toml"), "--trainer.critic.num-critic-only-steps", "3"])


@needs("vllm")
@pytest.mark.parametrize(
    "flags", ["--inference.vllm-extra.seed 2 --inference.seed 4", "--inference.port 9000 --inference.server.port 9001"]
)
def test_two_spellings_on_the_command_line_with_two_values_are_refused(flags: str, tmp_path: Path) -> None:
    (line,) = complaints(tmp_path, ENV, flags)
    first, second = flags.split(" --")
    assert line.startswith(f"{first}, --{second}: --inference."), line
    assert "give it once, as inference." in line


def test_a_flag_may_be_given_again_and_another_spelling_with_the_same_value(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(ENV)
    words = "--inference.seed 1 --inference.seed=2 --inference.vllm-extra.seed 2 --inference.server.port 9000"
    cfg = load(RLConfig, ["@", str(tmp_path / "rl.toml"), *words.split()])
    assert cfg.inference is not None and cfg.inference.seed == 2


def test_a_key_of_a_table_by_name_may_have_dashes(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(ENV)
    words = ["--models.my-judge.base-url", "http://a:1/v1", "--models.my-judge.client.max-concurrent", "3"]
    cfg = load(RLConfig, ["@", str(tmp_path / "rl.toml"), *words])
    assert (cfg.models["my-judge"].base_url, cfg.models["my-judge"].client.max_concurrent) == ("http://a:1/v1", 3)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--trainer.loss ipo", 'write trainer.loss.type = "ipo", or --trainer.loss.type ipo'),
        (
            "--orchestrator.algo dr_grpo",
            'write orchestrator.algo.type = "dr_grpo", or --orchestrator.algo.type dr_grpo',
        ),
        ("--trainer.loss mine", "a table is needed: [trainer.loss] type = "),
    ],
)
def test_a_form_that_stands_for_its_table_is_told_its_key(flags: str, told: str, tmp_path: Path) -> None:
    (line,) = complaints(tmp_path, ENV, flags)
    assert told in line


PAIRS = '[data]\ntype = "preference"\nname = "a.jsonl"\n'


@needs("sft")
def test_the_loss_of_pairs_is_dpo_unless_it_says_another(tmp_path: Path) -> None:
    path = tmp_path / "sft.toml"
    for loss, kind in (("", "dpo"), ("[loss]\nbeta = 0.3\n", "dpo"), ('[loss]\ntype = "reward"\n', "reward")):
        path.write_text(f"max_steps = 1\n{PAIRS}{loss}")
        cfg = load(ROOTS["sft"], ["@", str(path)], verb="sft")
        assert cfg.pair_loss.type == kind and getattr(cfg.pair_loss, "beta", 0.3) == (0.3 if loss else 0.1)
    (line,) = complaints(tmp_path, f"max_steps = 1\n{PAIRS}[loss]\ncenter_rewards_coefficient = 0.1\n", "", "sft")
    assert 'unknown key for type = "dpo"; it belongs to type = "reward"' in line
    rows = PAIRS.replace("preference", "file")
    (line,) = complaints(tmp_path, f"max_steps = 1\n{rows}[loss]\nbeta = 0.3\n", "", "sft")
    assert "loss is for pairs" in line


LINES = (Path(__file__).parents[2] / "cases" / "newcomers.txt").read_text().splitlines()
NEWCOMERS = dict(line.split(" => ", 1) for line in LINES if not line.startswith("#"))


@pytest.mark.heavy
@pytest.mark.parametrize("written", NEWCOMERS)
@needs("prime")
def test_a_mistake_of_somebody_new_is_one_line_with_what_to_write(written, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(written.replace("\\n", "\n") + "\n" + ENV)
    with pytest.raises(ConfigError) as caught:
        load(RLConfig, ["@", str(path)])
    title, *problems = str(caught.value).splitlines()
    assert title.startswith("1 problem ") and len(problems) == 1, problems
    assert problems[0].strip().startswith(f"{path}:"), problems
    assert NEWCOMERS[written].replace("FILE", str(path)) in problems[0]
