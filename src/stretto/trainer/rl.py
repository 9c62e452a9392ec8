"""The trainer process of an rl run: batches in, versions out.

    meet the orchestrator -> publish the version it starts from
    -> each step: wait for the batch, train, tell, publish the new version, checkpoint when due
    -> at max_steps, at Stop or at Ctrl-C: checkpoint, wait until engines hold the last version, say Bye

The orchestrator tells when to stop and completes checkpoints; both ways of waiting for it have a deadline,
and its death ends every wait (transports/control.py). Learning itself is learner.py.
"""

from __future__ import annotations

import logging
import runpy
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
from torch import nn

from stretto.base import log, rundir
from stretto.base.errors import ConfigError, EngineError, WireError
from stretto.base.garbage import settle
from stretto.base.memory import keep_freed_memory
from stretto.base.status import stop_signals
from stretto.chat.tokenizer import END_OF_TEXT, load_tokenizer
from stretto.config.roots import TrainerConfig
from stretto.config.trainer import CriticSection
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.monitors import build_monitors
from stretto.records.control import (
    Bye,
    CheckpointBegun,
    CheckpointComplete,
    CheckpointSaved,
    Failed,
    Register,
    StepDone,
    Stop,
    VersionLoaded,
    VersionReady,
)
from stretto.records.sample import TrainBatch
from stretto.records.weights import Canary
from stretto.trainer import checkpoint
from stretto.trainer.canary import sing
from stretto.trainer.critic import Critic, load_critic, with_value_head
from stretto.trainer.export import export_critic, export_weights
from stretto.trainer.interrupt import StopFlag, finish_on_signal
from stretto.trainer.learner import Learner, find_tokenizer, load_policy
from stretto.trainer.mesh import (
    Mesh,
    build_mesh,
    by_lead,
    process_group,
    rank_name,
    share_of_cores,
    training_device,
)
from stretto.trainer.metrics import alone
from stretto.trainer.throughput import Throughput
from stretto.trainer.token_export import TokenExport
from stretto.trainer.updates import Updates
from stretto.transports.control import ControlClient
from stretto.transports.rollouts import build_receiver
from stretto.transports.weights import ONE_RANK, build_publisher

logger = logging.getLogger(__name__)

ROLE = "trainer"
POLL_S = 0.1  # how long a Stop may go unnoticed while waiting for a batch
MONITOR_CLOSE_S = 10.0
LOGGED = ("loss/mean", "mismatch_kl/mean", "entropy/mean", "optim/grad_norm", "optim/lr")
GROUP_MARGIN_S = 600.0  # ranks wait for the lead's batch or for engines, and for what it does around that


def main(cfg: TrainerConfig) -> int:
    """Train to the end, until told to stop, or until the first Ctrl-C; the exit status."""
    log.setup(rank_name(ROLE), cfg.run_dir, cfg.log.level, cfg.log.json_logging)
    torch.set_num_threads(cfg.num_threads or share_of_cores())
    torch.manual_seed(cfg.seed)
    keep_freed_memory()
    signal.signal(signal.SIGTERM, _exit_in_order)
    with (
        finish_on_signal(*stop_signals()) as interrupt,
        process_group(max(cfg.batch_timeout_s, 2 * cfg.weight_broadcast.timeout_s) + GROUP_MARGIN_S),
        ExitStack() as stack,
    ):
        Trainer(cfg, interrupt, stack).run()
    return 0


class Trainer:
    """One life of a trainer process. `stack` closes what it opens, in reverse.

    On several ranks the lead talks to the orchestrator and writes metrics; it tells the others when to stop and what
    engines have loaded. Each publishes the tensors that it owns. Each data-parallel rank receives its own batches and
    is registered; those that share them (cp, tp) get them from it.
    """

    def __init__(self, cfg: TrainerConfig, interrupt: StopFlag, stack: ExitStack) -> None:
        self.cfg, self.run_dir = cfg, cfg.run_dir
        self.interrupt = interrupt
        self.tokenizer_dir = by_lead(lambda: find_tokenizer(cfg.model, cfg.tokenizer, cfg.run_dir))
        self.learner = build_learner(cfg, self.tokenizer_dir)
        self.mesh = mesh = self.learner.mesh
        self.updates = Updates(self.learner, cfg, alone if mesh is None else mesh.reduce)
        self.is_lead = mesh is None or mesh.is_lead
        self.dp_rank, self.dp = (0, 1) if mesh is None else (mesh.dp_rank, mesh.degrees.dp)
        self.resumed_step = resume(cfg, self.learner)
        self.is_registered = mesh is None or mesh.is_counted
        if self.is_registered:
            self.control = ControlClient(cfg.control, cfg.run_name)
            stack.callback(self.control.close)
            self.receiver = build_receiver(cfg.rollout_transport, self.run_dir, rank=self.dp_rank)
            stack.callback(self.receiver.close)
        self.publisher = build_publisher(cfg.weight_broadcast, self.run_dir, cfg.run_name, mesh or ONE_RANK)
        stack.callback(self.publisher.close)
        if self.is_lead:
            self.monitors = build_monitors(
                cfg.monitors, self.run_dir, ROLE, cfg.run_name, resumed_step=self.resumed_step
            )
            stack.callback(self.monitors.close, MONITOR_CLOSE_S)
        self.written: deque[int] = deque()
        self.saver: checkpoint.Saver | None = None
        if cfg.ckpt is not None:
            is_async = cfg.ckpt.is_async
            self.saver = checkpoint.Saver(self.run_dir, is_async=is_async, on_written=self.written.append)
        self.throughput = Throughput()
        self.stop: Stop | None = None
        self.loaded_version = -1
        self.saved_step = self.complete_step = self.exported_step = self.learner.step
        self.num_tokens = 0

    def run(self) -> None:
        """Every step, then what is due at the end; an error is told to the orchestrator before it ends us."""
        if self.is_registered:
            self.meet()
        try:
            self.publish()
            settle()
            self.step_started_at = time.perf_counter()
            while self.learner.step != self.cfg.max_steps and (batch := self.next_batch()) is not None:
                self.train(batch)
                self.publish()
                self.save_if_due()
            self.finish()
        except Exception as error:
            if self.is_registered:
                self.tell_failure(error)
            raise
        if self.is_registered:
            self.control.send(Bye())
        logger.info("done at step %d", self.learner.step)

    # -- a step --

    def next_batch(self) -> TrainBatch | None:
        """The batch of the next step; None when told to stop.

        The lead waits for its own; the orchestrator has then sent everybody's.

        Raises: EngineError when none comes in batch_timeout_s.
        """
        self.wait_s = -time.perf_counter()
        batch = self.receive(self.should_stop) if self.is_lead else None
        if self.mesh is not None:
            # Any rank may be the one that was told: a preemption can take one machine of several.
            said = self.mesh.gather((batch is not None, self.interrupt.is_set))
            if not said[0][0] or any(is_set for _, is_set in said):
                return None
            if self.is_registered and not self.is_lead:
                batch = self.receive(lambda: False)
            batch = self.mesh.share(batch)
        self.wait_s += time.perf_counter()
        return batch

    def receive(self, should_stop: Callable[[], bool]) -> TrainBatch | None:
        """This rank's batch of the next step; None when it should stop.

        Raises: EngineError when none comes in batch_timeout_s.
        """
        step = self.learner.step + 1
        deadline = time.monotonic() + self.cfg.batch_timeout_s
        while not should_stop():
            batch = self.receiver.try_receive(POLL_S)
            if batch is not None:
                check_batch(batch, step, self.dp_rank, self.dp)
                return batch
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the orchestrator sent no batch for step {step} within batch_timeout_s = "
                    f"{self.cfg.batch_timeout_s:g}; see its log for what it waits for"
                )
        return None

    def train(self, batch: TrainBatch) -> None:
        """One optimizer step, told to orchestrator and monitors."""
        start = time.perf_counter()
        metrics = self.updates.train(batch.micro_batches)
        now = time.perf_counter()
        counts = {
            "tokens": sum(mb.num_tokens for mb in batch.micro_batches),
            "micro_batches": len(batch.micro_batches),
        }
        counts = counts if self.mesh is None else self.mesh.reduce(counts)
        num_tokens = int(counts["tokens"])
        self.num_tokens += num_tokens
        time_s, self.step_started_at = now - self.step_started_at, now
        metrics |= {
            "batch/tokens": num_tokens,
            "batch/micro_batches": counts["micro_batches"],
            "progress/total_tokens": self.num_tokens,
            "perf/throughput": self.throughput.add(num_tokens, time_s),
            "time/step": time_s,
            "time/wait_for_batch": self.wait_s,
            "time/train": now - start,
        }
        if not self.is_lead:
            return
        step = self.learner.step
        self.control.send(
            StepDone(step=step, metrics=metrics, num_tokens=num_tokens, time_s=time_s, wait_s=self.wait_s)
        )
        self.monitors.log(step, metrics)
        logger.info(
            "step %d loss=%.4f mismatch_kl=%.2e entropy=%.3f grad_norm=%.3f lr=%.2e "
            "%.0f tokens/s %.3fs (waited %.3fs)",
            step,
            *(metrics.get(name, 0.0) for name in LOGGED),
            metrics["perf/throughput"],
            time_s,
            self.wait_s,
        )

    def publish(self) -> None:
        """Hand the current weights to the engines; the version is the number of steps done."""
        start = time.perf_counter()
        if self.is_lead:
            self.hear()
        if self.mesh is not None:
            self.loaded_version = self.mesh.tell(self.loaded_version)
            self.publisher.release(self.loaded_version - 1)
        manifest = self.publisher.publish(self.learner.step, self.learner.export_tensors())
        canary = self.canary()
        if not self.is_lead:
            return
        adapter = self.learner.adapter_info()
        manifest = msgspec.structs.replace(manifest, canary=canary, adapter=adapter)
        self.control.send(VersionReady(manifest=manifest))
        values = {"time/publish": time.perf_counter() - start, "publish/bytes": manifest.sent_bytes}
        self.monitors.log(self.learner.step, values)

    def canary(self) -> Canary | None:
        """What engines must agree with once they have loaded the version of this step; None: not checked."""
        interval = self.cfg.weight_broadcast.canary_interval
        if interval is None or self.learner.step % interval:
            return None
        return sing(self.learner, self.cfg.weight_broadcast.canary_tokens)

    def save_if_due(self, *, is_last: bool = False) -> None:
        """Checkpoint and export at their intervals, and both at the end."""
        ckpt, step = self.cfg.ckpt, self.learner.step
        if ckpt is None or self.saver is None:
            return
        self.saver.check()
        start = time.perf_counter()
        is_saving = is_last or (ckpt.interval is not None and step % ckpt.interval == 0)
        if ckpt.weights is not None and step != self.exported_step:
            interval = ckpt.weights.interval
            if is_last or (is_saving if interval is None else step % interval == 0):
                export_weights(
                    self.run_dir,
                    self.learner.policy,
                    step,
                    self.tokenizer_dir,
                    self.cfg.model if ckpt.weights.save_adapter_separately else None,
                )
                if (critic := self.learner.critic) is not None:
                    folder = critic.section.save or self.run_dir.critic
                    export_critic(critic, folder / f"step_{step}", self.tokenizer_dir)
                self.exported_step = step
        if is_saving and step != self.saved_step:
            if self.is_lead:
                self.control.send(CheckpointBegun(step=step))
            self.saver.save(self.learner)
            self.saved_step = step
        if is_last:
            self.saver.wait()
        self.tell_saved()
        if self.is_lead and step in (self.saved_step, self.exported_step):
            self.monitors.log(step, {"time/save_ckpt": time.perf_counter() - start})

    def tell_saved(self) -> None:
        """The orchestrator completes checkpoints whose files are there."""
        while self.written:
            self.control.send(CheckpointSaved(step=self.written.popleft()))

    # -- the orchestrator --

    def meet(self) -> None:
        """Register.

        Raises: ConfigError when the orchestrator continues from another step.
        """
        step = self.learner.step
        registered = self.control.register(
            Register(rank=self.dp_rank, world_size=self.dp, resumed_step=self.resumed_step, version=step)
        )
        if (registered.resume_step or 0) != step:
            raise ConfigError(
                f"the orchestrator continues after step {registered.resume_step or 0}, this trainer after "
                f"step {step}; start both with the same --resume"
            )
        logger.info("registered with the orchestrator; starting at step %d", step + 1)

    def hear(self) -> None:
        """Take in what the orchestrator said, without waiting, and tell what has come to be meanwhile."""
        self.tell_saved()
        for message in self.control.poll():
            self.on_message(message)

    def on_message(self, message: object) -> None:
        match message:
            case Stop():
                logger.info("told to stop: %s", message.reason)
                self.stop = message
            case VersionLoaded(version=version):
                self.loaded_version = version
                self.publisher.release(version - 1)
            case CheckpointComplete(step=step):
                self.complete_step = step
                ckpt = self.cfg.ckpt
                gone = checkpoint.prune(self.run_dir, ckpt.keep_last, ckpt.keep_interval) if ckpt else []
                if gone:
                    logger.info("deleted checkpoints of steps %s", ", ".join(map(str, gone)))
            case _:
                raise WireError(f"the orchestrator sent {type(message).__name__}, which is ours to send")

    def should_stop(self) -> bool:
        self.hear()
        return self.stop is not None or self.interrupt.is_set

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Hear the orchestrator until something is so.

        Raises: EngineError naming what was waited for.
        """
        deadline = time.monotonic() + timeout_s
        while not is_done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(f"waited {timeout_s:g} s for {what}; see the orchestrator's log")
            for message in self.control.wait(left):
                self.on_message(message)

    # -- the end --

    def finish(self) -> None:
        """Save unless told not to; leave only when nobody needs what only this process has."""
        step = self.learner.step
        should_save = self.stop is None or self.stop.save
        if should_save if self.mesh is None else self.mesh.tell(should_save):
            self.save_if_due(is_last=True)
        if self.is_lead:
            if self.cfg.ckpt is None and step:
                logger.warning("nothing was saved: ckpt = None")
            timeout_s = self.cfg.weight_broadcast.timeout_s
            self.wait_until(
                lambda: self.complete_step == self.saved_step,
                timeout_s,
                f"the orchestrator to complete the checkpoint of step {self.saved_step}",
            )
            what = f"the engines to load the last version, {step}"
            self.wait_until(lambda: self.loaded_version == step, timeout_s, what)
        if self.mesh is not None:
            # Closing a publisher takes back the memory that engines read a version from, on every rank.
            self.mesh.tell(None)

    def tell_failure(self, error: Exception) -> None:
        try:
            self.control.send(Failed(reason=f"{type(error).__name__}: {error}"), timeout_s=2.0)
        except (EngineError, WireError) as also:
            logger.debug("could not tell the orchestrator: %s", also)


def build_learner(cfg: TrainerConfig, tokenizer_dir: Path) -> Learner:
    """The policy and its learner, as configured."""
    tokenizer = load_tokenizer(tokenizer_dir)
    tokens = {
        "vocab_size": tokenizer.vocab_size,
        "eos_token_id": list(tokenizer.eos_ids),
        "pad_token_id": tokenizer.token_id(END_OF_TEXT),
    }
    policy, reference = load_policy(cfg.model, may_be_outline=True, **tokens), None
    if (named := reference_of(cfg)) is not None:
        path, name = named
        other = {} if name is None else {"name": name, "scratch": None}
        section = cfg.model.model_copy(update=other)
        reference = load_policy(section, may_be_outline=True, **tokens).requires_grad_(False)
        if reference.output_weight.shape[0] != policy.output_weight.shape[0]:
            raise ConfigError(
                f"{path} knows {reference.output_weight.shape[0]} tokens and the "
                f"policy {policy.output_weight.shape[0]}; give a reference of the same family"
            )
    logger.info("%d parameters on %s", sum(p.numel() for p in policy.parameters()), training_device())
    mesh = build_mesh(cfg.model, policy.config)
    critic = None if cfg.critic is None else build_critic(cfg, cfg.critic, policy, tokens, mesh)
    return Learner(
        policy,
        model=cfg.model,
        optim=cfg.optim,
        scheduler=cfg.scheduler,
        max_steps=cfg.max_steps,
        loss=cfg.loss,
        reference=reference,
        observe=_token_export(cfg, mesh) if cfg.enable_token_export else None,
        enable_router_replay=cfg.enable_router_replay,
        mesh=mesh,
        critic=critic,
    )


def reference_of(cfg: TrainerConfig) -> tuple[str, str | None] | None:
    """Which key asks for a frozen reference, and which model it names; None: nobody asks."""
    if (kl := cfg.loss.reference_kl) is not None:
        return "trainer.loss.reference_kl.model", kl.model
    if cfg.advantages is not None and cfg.advantages.kl_coef:
        return "trainer.advantages.kl_model", cfg.advantages.kl_model
    return None


def build_critic(
    cfg: TrainerConfig, section: CriticSection, policy: nn.Module, tokens: dict[str, Any], mesh: Mesh | None
) -> Critic:
    """The critic from its own directory, or from the model that the policy starts from.

    Raises: ConfigError when the policy is not of a family of ours, or the critic's texts are made of other tokens.
    """
    if not isinstance(policy, Decoder):
        raise ConfigError(
            '[trainer.critic] needs a policy of our own modules; model.impl = "hf" has no value output'
        )
    model = cfg.model.model_copy(update={"lora": None})
    if section.load is None and model.scratch is not None:
        network = with_value_head(load_policy(model, **tokens))
    else:
        directory = section.load or model.name
        network = load_critic(directory, dtype=hub.DTYPES[model.dtype], may_be_outline=True)
    sizes = [m.model.embed_tokens.weight.shape[0] for m in (network, policy)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"trainer.critic.load knows {sizes[0]} tokens and the policy {sizes[1]}; give a critic of its family"
        )
    return Critic(network, section=section, model=model, optim=cfg.optim, mesh=mesh)


def resume(cfg: TrainerConfig, learner: Learner) -> int | None:
    """Load the checkpoint that [resume] asks for; its step, None without [resume].

    Raises: ConfigError when there is none.
    """
    if cfg.resume is None:
        return None
    run, step = rundir.find_checkpoint(cfg.run_dir, cfg.resume.step, cfg.resume.dir)
    if run != cfg.run_dir and (own := cfg.run_dir.complete_checkpoints()):
        raise ConfigError(
            f"resume.dir: {cfg.run_dir} has a checkpoint of its own, of step {own[-1]}; continue it with --resume alone"
        )
    checkpoint.load(run, learner, step)
    logger.info("resumed after step %d%s", step, "" if run == cfg.run_dir else f" of {run}")
    return step


def _token_export(cfg: TrainerConfig, mesh: Mesh | None) -> TokenExport:
    """One folder a data-parallel rank where there are several."""
    folder = cfg.run_dir.trained_tokens
    return TokenExport(folder if mesh is None or mesh.degrees.dp == 1 else folder / f"rank_{mesh.dp_rank}")


def check_batch(batch: TrainBatch, step: int, rank: int, world_size: int) -> None:
    """Raises: WireError when it is not this data-parallel rank's batch of this step."""
    if (batch.step, batch.rank, batch.world_size) != (step, rank, world_size):
        raise WireError(
            f"got the batch of step {batch.step} for rank {batch.rank} of {batch.world_size}; "
            f"expected step {step} for rank {rank} of {world_size}"
        )


def _exit_in_order(number: int, frame: FrameType | None) -> None:
    """SIGTERM: leave through every `finally`, so that shared memory and sockets are given back."""
    sys.exit(128 + number)


if __name__ == "__main__":  # torchrun src/stretto/trainer/rl.py @ train.toml
    sys.argv.insert(1, "trainer")
    runpy.run_module("stretto", run_name="__main__")
